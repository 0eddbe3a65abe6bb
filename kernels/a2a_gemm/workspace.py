"""What the fused operators own between calls: buffers that every rank reaches, flags, and the epoch.

Every operator call is one *epoch*: it has one meeting of the ranks, a kernel of one warp, before the product where
other ranks' operands are pulled, after it where products were pushed. Buffers alternate between two halves, and that is
why one meeting is enough: what was read or written of a half in epoch e happened before the meeting of e + 1, and the
half is touched again in e + 2.

No flag is ever reset. An epoch lives in device memory and counts up, so that a replayed CUDA graph counts as well.
Replays do not turn to the other half, and the host does not know when they run: from the first captured call on, every
call, captured or not, begins with a meeting of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import build
from .plan import MAX_RANKS, Flags, Report, stream_of, use_device

COPY_MISSING, RANK_MISSING = 1, 2


class Meeting(ctypes.Structure):
    _fields_ = [
        ("slots", ctypes.c_uint64 * MAX_RANKS),
        *((name, ctypes.c_uint64) for name in ["epoch", "report", "timeout_ns"]),
        *((name, ctypes.c_int32) for name in ["ranks", "rank"]),
    ]


class PeerMemory:
    """One buffer a rank, all of one size, that every rank's device can read and write.

    Args:
        local: this rank's, `uint8`.
        addresses: of every rank's, as this process sees them.
        keep: what holds the other ranks' memory open.
    """

    def __init__(self, local: Tensor, addresses: Sequence[int], keep: object = None) -> None:
        self.local = local
        self.addresses = list(addresses)
        self._keep = keep


Transport = Callable[[int, torch.device, "dist.ProcessGroup | None"], PeerMemory]


def symmetric_memory(nbytes: int, device: torch.device, group: dist.ProcessGroup | None) -> PeerMemory:
    """Through torch symmetric memory. Collective. Without multicast: nothing here uses it."""
    if group is None or dist.get_world_size(group) == 1:
        return alone(nbytes, device, group)
    import torch.distributed._symmetric_memory as symm_mem

    local = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    with _environment("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"):
        handle = symm_mem.rendezvous(local, group)
    return PeerMemory(local, handle.buffer_ptrs, handle)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def cuda_ipc(nbytes: int, device: torch.device, group: dist.ProcessGroup | None) -> PeerMemory:
    """Through CUDA IPC handles. Collective. The memory is kept until the process ends: another rank may still read it.

    Raises:
        RuntimeError: the same on all ranks, where one has no memory or cannot open another's.
    """
    if group is None or dist.get_world_size(group) == 1:
        return alone(nbytes, device, group)
    library = build.load("ranks")
    own = torch.cuda.current_device() if device.index is None else device.index
    address, handle = ctypes.c_uint64(), ctypes.create_string_buffer(_IPC_HANDLE_BYTES)
    code = library.hf_cp_ipc_allocate(own, ctypes.c_uint64(nbytes), ctypes.byref(address), handle)
    offered = _exchange_or_raise(None if code else handle.raw, f"allocate {nbytes} bytes", code, group)
    rank, addresses = dist.get_rank(group), []
    for peer, found in enumerate(offered):
        opened = ctypes.c_uint64(address.value)
        if peer != rank and not code:
            code = library.hf_cp_ipc_open(own, ctypes.create_string_buffer(found, len(found)), ctypes.byref(opened))
        addresses.append(opened.value)
    _exchange_or_raise(b"" if not code else None, "open another rank's memory", code, group)
    return PeerMemory(torch.as_tensor(_Bytes(address.value, nbytes), device=torch.device("cuda", own)), addresses)


_IPC_HANDLE_BYTES = 64


class _Bytes:
    """Device memory as torch reads it from others: `address`, `nbytes`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _exchange_or_raise(value: bytes | None, what: str, code: int, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's value; where one has none, the same error on all."""
    found: list[tuple[bytes | None, int]] = [(None, 0)] * dist.get_world_size(group)
    dist.all_gather_object(found, (value, code), group=group)
    for rank, (_, error) in enumerate(found):
        if error:
            raise RuntimeError(
                f"rank {rank} could not {what} through CUDA IPC (CUDA error {error}): "
                f'use projection_backend="torch", or linked GPUs of one host (hf-cp doctor)'
            )
    return [one for one, _ in found if one is not None]


def alone(nbytes: int, device: torch.device, group: dist.ProcessGroup | None) -> PeerMemory:
    """For one rank alone."""
    local = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return PeerMemory(local, [local.data_ptr()])


class Workspace:
    """Made once for a group, not per call. Collective, but for one rank alone.

    Its calls run one after another: on one stream, or on streams that wait for each other. A CUDA graph that captured
    calls needs the workspace as long as it is replayed, is replayed by all ranks alike, and does not raise by itself
    where a rank was missing: `check` does.

    Args:
        group: the ranks, at most 8 of one host; None for one rank alone.
        device: this rank's GPU.
        capacity: bytes of the largest operand that is exchanged, per rank. Two buffers of that size are allocated.
        transport: how ranks reach each other's memory: `symmetric_memory` or `cuda_ipc`.
        timeout_s: how long a kernel waits for another rank, or for a copy, before it gives up and says so.
        flag_count: row tiles times groups of the largest gathered operand, times its batch.

    Raises:
        BuildError: the device cannot run the kernels, or they cannot be built.
        ValueError: more ranks than a launch takes.
        RuntimeError: made while a CUDA graph is captured.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        capacity: int,
        *,
        transport: Transport = symmetric_memory,
        timeout_s: float = 20.0,
        flag_count: int = 1 << 16,
    ) -> None:
        build.check_device(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a workspace of capacity={capacity} cannot be made while a CUDA graph is captured: run the same "
                f"sizes once before"
            )
        world_size = 1 if group is None else dist.get_world_size(group)
        if world_size > MAX_RANKS:
            raise ValueError(
                f"the group has {world_size} ranks, the fused kernels take at most {MAX_RANKS} of one host"
            )
        capacity = -(-capacity // 1024) * 1024
        memory = transport(2 * capacity + 1024, device, group)
        memory.local.zero_()
        torch.cuda.synchronize(device)
        if group is not None:
            # No rank may signal before the others have cleared their slots.
            dist.barrier(group)
        self._start(group, device, world_size, 0 if group is None else dist.get_rank(group), memory, capacity)
        self._allocate_flags(flag_count, timeout_s)

    @classmethod
    def local_world(
        cls, world_size: int, device: torch.device, capacity: int, *, timeout_s: float = 20.0, flag_count: int = 1 << 16
    ) -> list[Workspace]:
        """Workspaces of `world_size` ranks that live on one device, in one process, for tests and measurements."""
        capacity = -(-capacity // 1024) * 1024
        buffers = [torch.zeros(2 * capacity + 1024, dtype=torch.uint8, device=device) for _ in range(world_size)]
        addresses = [buffer.data_ptr() for buffer in buffers]
        torch.cuda.synchronize(device)
        made = []
        for rank, buffer in enumerate(buffers):
            workspace = cls.__new__(cls)
            workspace._start(None, device, world_size, rank, PeerMemory(buffer, addresses, buffers), capacity)
            workspace._allocate_flags(flag_count, timeout_s)
            made.append(workspace)
        return made

    def _start(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        world_size: int,
        rank: int,
        memory: PeerMemory,
        capacity: int,
    ) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        self.group, self.device, self.world_size, self.rank = group, device, world_size, rank
        self.capacity = capacity
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self._memory = memory
        self._half = 0
        self._has_met = self.captured = False
        self._meet = build.load("ranks")
        assert self._meet.hf_cp_meeting_bytes() == ctypes.sizeof(Meeting), "workspace.py and ranks.cu disagree"
        self._meet.hf_cp_meet.argtypes = [ctypes.POINTER(Meeting), ctypes.c_void_p]

    def _allocate_flags(self, flag_count: int, timeout_s: float) -> None:
        # Epoch, flag for all, counter, then the flags.
        self._state = torch.zeros(3 + flag_count, dtype=torch.int64, device=self.device)
        self._report = torch.zeros(5, dtype=torch.int64, device="cpu").pin_memory()
        base = self._state.data_ptr()
        timeout_ns = int(timeout_s * 1e9)
        self.flags = Flags(base, base + 24, base + 8, base + 16, self._report.data_ptr(), flag_count, timeout_ns)
        slots = [address + 2 * self.capacity for address in self._memory.addresses]
        self._meeting = Meeting(
            (ctypes.c_uint64 * MAX_RANKS)(*slots), base, self._report.data_ptr(), self.flags.timeout_ns,
            self.world_size, self.rank,
        )  # fmt: skip
        torch.cuda.synchronize(self.device)

    @property
    def epoch(self) -> int:
        """Meetings that have happened; waits for the device."""
        return int(self._state[0].item())

    def set_epoch(self, epoch: int) -> None:
        """Continue from another epoch, on every rank alike and while nothing runs: for tests near 2^32."""
        self._state[0] = epoch
        torch.cuda.synchronize(self.device)

    def peek_half(self, nbytes: int) -> tuple[Tensor, list[int]]:
        """The buffer of the next epoch: this rank's bytes, and the address of every rank's.

        Raises:
            ValueError: more bytes than the workspace was made for.
        """
        if nbytes > self.capacity:
            raise ValueError(f"the operand has {nbytes} bytes, the workspace was made for capacity={self.capacity}")
        start = self._half * self.capacity
        return self._memory.local[start : start + nbytes], [address + start for address in self._memory.addresses]

    def next_half(self, nbytes: int) -> tuple[Tensor, list[int]]:
        """As `peek_half`, for the call that uses it.

        Raises:
            RuntimeError: the workspace's first call, while a CUDA graph is captured: its kernels are not loaded yet.
        """
        half = self.peek_half(nbytes)
        if torch.cuda.is_current_stream_capturing():
            if not self._has_met:
                raise RuntimeError(
                    "the first call of a workspace cannot be captured in a CUDA graph: run the same call once before"
                )
            self.captured = True
        if self.captured:
            # A replay, which the host does not see, may have used this half last: everyone has to be done with it.
            self.meet()
        self._half ^= 1
        return half

    def meet(self) -> None:
        """Enqueue the meeting of the ranks on the current stream."""
        use_device(self.device.index)
        code = self._meet.hf_cp_meet(ctypes.byref(self._meeting), ctypes.c_void_p(stream_of(self.device)))
        if code:
            raise RuntimeError(f"the meeting of the ranks could not be launched (CUDA error {code})")
        self._has_met = True

    def check(self) -> None:
        """Raise if a kernel that has run gave up waiting; does not wait for those that have not.

        Raises:
            RuntimeError: who waited for whom, with the epoch expected and the one seen.
        """
        report = Report.from_address(self._report.data_ptr())
        if report.kind == RANK_MISSING:
            raise RuntimeError(
                f"rank {report.rank} waited more than {self.flags.timeout_ns / 1e9:g} s for rank {report.place}: "
                f"expected epoch {report.expected}, saw {report.seen}"
            )
        if report.kind == COPY_MISSING:
            raise RuntimeError(
                f"rank {self.rank} waited more than {self.flags.timeout_ns / 1e9:g} s for flag {report.place} of its "
                f"copies: expected epoch {report.expected}, saw {report.seen}"
            )
