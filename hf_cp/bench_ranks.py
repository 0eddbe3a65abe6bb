"""What the tables of `hf-cp bench` measure with, on one device and between the ranks that torchrun starts.

Every sample begins when all ranks have met, and counts as long as the slowest rank takes. Their devices are idle then,
so that a sample holds the host's time too, or the host gets a start and a sample is the devices' time.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from .mesh import CpMesh

# What a device sleeps while the host enqueues a sample: about 10 ms.
_HEAD_START_CYCLES = 20_000_000

# Takes the function that marks the end of a part.
Call = Callable[[Callable[[], None]], object]


def launched_size() -> int:
    """Processes that torchrun started this one among; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that measure together, one device each.

    Args:
        mesh: all of them; of size 1 where there is one process.
        device: this process's.
    """

    mesh: CpMesh
    device: torch.device

    @property
    def size(self) -> int:
        return self.mesh.cp_size

    @property
    def rank(self) -> int:
        return self.mesh.cp_rank

    def meet(self) -> None:
        """Wait until all ranks are here and this device is idle."""
        if self.mesh.group is not None:
            dist.barrier(self.mesh.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def head_start(self) -> None:
        """Make the device sleep, then meet the others: what is enqueued next starts on all devices at once."""
        if self.device.type == "cuda":
            torch.cuda._sleep(_HEAD_START_CYCLES)
            if self.mesh.group is not None:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.mesh.group)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest of all ranks, where NaN is the largest of all."""
        wanted = [math.inf if math.isnan(x) else x for x in values]
        if self.mesh.group is None:
            return wanted
        shared = torch.tensor(wanted, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.mesh.group)
        return shared.tolist()

    def peaks(self) -> tuple[float, float]:
        """Bytes allocated and reserved at most since `forget_peaks`, on the worst rank; 0 without a GPU."""
        if self.device.type != "cuda":
            return 0.0, 0.0
        allocated, reserved = self.largest([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        return allocated, reserved

    def forget_peaks(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def choose_device(device: str) -> torch.device:
    """This process's device, made the current one: on GPUs that of its number on this host.

    Raises:
        ValueError: torchrun started more processes on this host than it has GPUs; the same on every rank.
    """
    if device != "cuda" or launched_size() == 1:
        return torch.device(device)
    wanted, found = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if found < wanted:
        raise ValueError(
            f"torchrun started {wanted} processes where PyTorch sees {found} GPUs: give --nproc-per-node no more, or "
            "--device cpu"
        )
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    return place


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """This process among those that torchrun started, over NCCL or gloo; alone without torchrun.

    A default process group that exists already is used, and left as it is.
    """
    if launched_size() == 1:
        yield Ranks(CpMesh.single(), device)
        return
    made = not dist.is_initialized()
    if made and device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    elif made:
        dist.init_process_group("gloo")
    ranks = Ranks(CpMesh.from_group(dist.group.WORLD), device)
    yield ranks
    # Not after an error: where a rank has gone, leaving would wait for it.
    if made:
        ranks.meet()
        dist.destroy_process_group()


class Clock:
    """Times between marks, on the device's own clock where it has one."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between neighbouring marks, once the device has got there."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated calls, of the slowest rank each.

    Args:
        calls: whole calls. parts: of every part between marks, one a call.
    """

    calls: list[float]
    parts: list[list[float]]

    @property
    def median(self) -> float:
        return statistics.median(self.calls)

    @property
    def least(self) -> float:
        return min(self.calls)

    @property
    def p90(self) -> float:
        return sorted(self.calls)[min(len(self.calls) - 1, round(0.9 * (len(self.calls) - 1)))]

    @property
    def part_medians(self) -> list[float]:
        return [statistics.median(part) for part in self.parts]


def timed(call: Call, ranks: Ranks, warm_up: int, repeats: int, *, host: bool = True) -> Timing:
    """Time calls that end their parts with the function that they are given; what is after the last mark is a part.

    Args:
        host: whether the host's time counts where it is the longer one.

    Raises:
        ValueError: no repeats.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    samples = []
    for turn in range(warm_up + repeats):
        ranks.meet()
        if not host:
            ranks.head_start()
        clock = Clock(ranks.device.type)
        clock.mark()
        call(clock.mark)
        clock.mark()
        parts = clock.milliseconds()
        if turn >= warm_up:
            samples.append([sum(parts), *parts])
    width = len(samples[0])
    slowest = ranks.largest([x for sample in samples for x in sample])
    calls, *parts = ([slowest[i] for i in range(column, len(slowest), width)] for column in range(width))
    return Timing(calls, parts)


def write_trace(call: Call, ranks: Ranks, folder: Path, name: str) -> Path:
    """Profile one more call, after one that starts the profiler; `hf-cp trace` reads the file.

    Returns:
        ``folder/name-rank<r>.json.gz`` of this rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-rank{ranks.rank}.json.gz"
    on_gpu = ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as profiler:
        call(lambda: None)
        # Ranks start their profilers at their own pace; the message that they meet with is no part of the trace.
        ranks.meet()
        profiler.step()
        call(lambda: None)
        if on_gpu:
            torch.cuda.synchronize()
        profiler.step()
    return path
