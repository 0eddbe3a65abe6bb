"""`hf-cp trace out.json [more.json ...]`: computing and communication, by layer and rank, of a profiled step.

A trace is what `torch.profiler.profile(...).export_chrome_trace(path)` writes, one a rank. On GPUs, NCCL's kernels are
communication and all others computing; without GPU events, gloo's messages and the host's operators are. A patched
model names its layers while a profiler runs; an operator of the backward belongs to the layer of the operator of the
forward whose gradient it computes. What no layer named is "outside": MLPs, norms, optimizer, FSDP.

overlapped: communication while the same device computes. With --picture, a lane each for both, by layer.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .regions import PREFIX
from .report import check_picture, markdown, new_figure, save

OUTSIDE = "outside"
_LAYER = re.compile(re.escape(PREFIX) + r"(linear_attn|self_attn)\.(\d+)$")
_HEAD = PREFIX + "head"
_SPAN = {"name", "tid", "ts", "dur"}
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_MESSAGE = re.compile(r"gloo:")
# Operators that only wait, or that only start a message.
_NOT_COMPUTING = re.compile(r"c10d::|gloo:|nccl:|record_param_comms")

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order."""
    joined: list[list[float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        elif end > begin:
            joined.append([begin, end])
    return [(begin, end) for begin, end in joined]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The points of both; each is disjoint and in order."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


@dataclass(frozen=True)
class Work:
    """Something that took time: microseconds from ``begin`` to ``end``, for a layer."""

    begin: float
    end: float
    layer: str
    is_message: bool


@dataclass(frozen=True)
class Trace:
    """One rank's step."""

    rank: int
    device: str
    work: list[Work]

    @property
    def layers(self) -> list[str]:
        """In the order of the model, what is outside of them last."""
        names = {work.layer for work in self.work}
        numbered = sorted((name for name in names if "." in name), key=lambda name: int(name.partition(".")[2]))
        return [*numbered, *sorted(names - set(numbered), key=lambda name: (name == OUTSIDE, name))]


class _Nesting:
    """Which layer a point in time of a thread lies in, from the regions there."""

    def __init__(self, regions: Iterable[tuple[float, float, str]]) -> None:
        self._regions = sorted(regions)
        self._begins = [begin for begin, _, _ in self._regions]

    def at(self, time: float) -> str | None:
        # Regions of layers lie one after the other.
        index = bisect.bisect_right(self._begins, time) - 1
        if index >= 0 and time <= self._regions[index][1]:
            return self._regions[index][2]
        return None


def _layer_name(name: str) -> str | None:
    found = _LAYER.match(name)
    if found is not None:
        return f"{found[1]}.{found[2]}"
    return "head" if name == _HEAD else None


class _Attribution:
    """The layer of a point in time of a host thread, in forward, recomputation and backward."""

    def __init__(self, host: Sequence[dict[str, Any]]) -> None:
        named: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in host:
            layer = _layer_name(event["name"])
            if layer is not None:
                named[event["tid"]].append((event["ts"], event["ts"] + event["dur"], layer))
        forward = {tid: _Nesting(regions) for tid, regions in named.items()}
        # The node of the backward that belongs to an operator of the forward has its sequence number. Operators without
        # a node bear the number of the next one: the last to bear it is the one.
        by_number: dict[int, str | None] = {}
        backward: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        nodes = []
        for event in sorted(host, key=lambda event: event["ts"]):
            number = event.get("args", {}).get("Sequence number")
            if number is None:
                continue
            if event["name"].startswith("autograd::engine::evaluate_function"):
                nodes.append((event, number))
            elif event["args"].get("Fwd thread id", 0) == 0 and event["tid"] in forward:
                by_number[number] = forward[event["tid"]].at(event["ts"])
        for event, number in nodes:
            layer = by_number.get(number)
            if layer is not None:
                backward[event["tid"]].append((event["ts"], event["ts"] + event["dur"], layer))
        self._forward = forward
        self._backward = {tid: _Nesting(regions) for tid, regions in backward.items()}

    def at(self, tid: Any, time: float) -> str:
        for nesting in (self._forward.get(tid), self._backward.get(tid)):
            layer = nesting.at(time) if nesting is not None else None
            if layer is not None:
                return layer
        return OUTSIDE


def read(path: Path) -> Trace:
    """A rank's trace, ``.json`` or ``.json.gz``.

    Raises:
        ValueError: not a trace of torch.profiler, or one without operators.
    """
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a trace ({error}): give what export_chrome_trace wrote") from None
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{path} has no traceEvents: give what export_chrome_trace wrote")
    spans = [event for event in events if isinstance(event, dict) and event.get("ph") == "X" and event.keys() >= _SPAN]
    host = [event for event in spans if event.get("cat") in ("cpu_op", "user_annotation")]
    if not host:
        raise ValueError(f"{path} has no operators: profile with ProfilerActivity.CPU")
    layer_of = _Attribution(host)
    kernels = [event for event in spans if event.get("cat") in _KERNELS]
    rank = content.get("distributedInfo", {}).get("rank", 0)
    if kernels:
        return Trace(rank, "GPU", list(_gpu_work(spans, kernels, layer_of)))
    return Trace(rank, "CPU", list(_cpu_work(host, layer_of)))


def _gpu_work(
    spans: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]], layer_of: _Attribution
) -> Iterable[Work]:
    """Kernels and copies, each for the layer in which the host started it."""
    starts = {
        event["args"]["correlation"]: event
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    for event in kernels:
        start = starts.get(event.get("args", {}).get("correlation"))
        layer = OUTSIDE if start is None else layer_of.at(start["tid"], start["ts"])
        yield Work(event["ts"], event["ts"] + event["dur"], layer, "nccl" in event["name"].lower())


def _cpu_work(host: Sequence[dict[str, Any]], layer_of: _Attribution) -> Iterable[Work]:
    """Gloo's messages, each for the layer in which it was posted, and the outermost operators that compute."""
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    posts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    messages: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in host:
        if _MESSAGE.match(event["name"]):
            messages[event["name"].partition(":")[2]].append(event)
        elif event["name"].startswith("c10d::"):
            posts[_kind(event["name"])].append(event)
        else:
            by_thread[event["tid"]].append(event)
    for kind, found in messages.items():
        # Gloo works messages of a kind off in the order in which they are posted, perhaps in a thread of its own.
        posted = sorted(posts.get(kind, []), key=lambda event: event["ts"])
        for index, event in enumerate(sorted(found, key=lambda event: event["ts"])):
            start = posted[index] if index < len(posted) else event
            begin = min(start["ts"], event["ts"])
            yield Work(begin, event["ts"] + event["dur"], layer_of.at(start["tid"], start["ts"]), True)
    for tid, found in by_thread.items():
        end = float("-inf")
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            # Nodes of the backward and names hold operators: those are what computes.
            holds = event["name"].startswith("autograd::") or event.get("cat") == "user_annotation"
            if event["ts"] < end or holds or _NOT_COMPUTING.match(event["name"]) or _is_a_node(event["name"]):
                continue
            end = event["ts"] + event["dur"]
            yield Work(event["ts"], end, layer_of.at(tid, event["ts"]), False)


def _kind(name: str) -> str:
    """Gloo's name for a message that a c10d operator posts."""
    plain = name.removeprefix("c10d::").strip("_")
    kinds = {
        "alltoall_base": "all_to_all",
        "allgather_base": "all_gather",
        "reduce_scatter_base": "reduce_scatter",
        "allreduce": "all_reduce",
        "allgather": "all_gather",
    }
    return kinds.get(plain, plain)


def _is_a_node(name: str) -> bool:
    """Python functions of autograd: what they hold computes, or waits."""
    return "::" not in name


def table(trace: Trace) -> list[dict[str, Any]]:
    """Milliseconds of a rank, by layer and in all."""
    computing = union((w.begin, w.end) for w in trace.work if not w.is_message)
    rows = []
    for layer in [*trace.layers, "all"]:
        mine = [w for w in trace.work if layer in ("all", w.layer)]
        own = union((w.begin, w.end) for w in mine if not w.is_message)
        messages = union((w.begin, w.end) for w in mine if w.is_message)
        hidden = length(common(messages, computing))
        rows.append(
            {
                "rank": trace.rank,
                "layer": layer,
                "computing ms": length(own) / 1e3,
                "communication ms": length(messages) / 1e3,
                "not overlapped ms": (length(messages) - hidden) / 1e3,
                "overlapped ms": hidden / 1e3,
            }
        )
    return rows


def draw(traces: Sequence[Trace], path: Path) -> None:
    """Two lanes a rank, computing and communication, over time; a colour a layer.

    Raises:
        ValueError: the file cannot be written.
    """
    figure, axes = new_figure(14, 1.5 + 1.1 * len(traces))
    layers = list(dict.fromkeys(layer for trace in traces for layer in trace.layers))
    names = []
    for index, trace in enumerate(traces):
        start = min(work.begin for work in trace.work)
        for lane, is_message in enumerate((False, True)):
            names.append(f"rank {trace.rank} {'communication' if is_message else 'computing'}")
            for number, layer in enumerate(layers):
                spans = [
                    ((w.begin - start) / 1e3, (w.end - w.begin) / 1e3)
                    for w in trace.work
                    if w.layer == layer and w.is_message == is_message
                ]
                colour = "lightgrey" if layer == OUTSIDE else f"C{number % 10}"
                axes.broken_barh(
                    spans, (2 * index + lane, 0.8), facecolors=colour, label=layer if not names[1:] else ""
                )
    axes.set_yticks([i + 0.4 for i in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help=".json or .json.gz, one a rank")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="FILE")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the table of every rank.

    Raises:
        ValueError: a file that is no trace, or a picture that cannot be drawn.
    """
    check_picture(arguments.picture)
    traces = sorted(map(read, arguments.traces), key=lambda trace: trace.rank)
    rows = [row for trace in traces for row in table(trace)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"{', '.join(sorted({trace.device for trace in traces}))} time\n\n{markdown(rows)}")
    if arguments.picture is not None:
        draw(traces, arguments.picture)
    return 0
