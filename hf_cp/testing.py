"""Tools for tests: worlds of gloo ranks, a log of every message, a log of saved tensors, FSDP2 on CPU.

A `World` keeps its ranks alive between calls, so that a suite pays the imports once. Its ranks are forked from a
server that has imported torch once; a restart after a failure takes well under a second a rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


def relative_error(x: Tensor, ref: Tensor) -> float:
    """`|x - ref| / |ref|` in the L2 norm, in fp64; any NaN gives inf. A zero `ref` gives 0 if `x` is zero, else inf.

    Raises:
        ValueError: shapes differ.
    """
    if x.shape != ref.shape:
        raise ValueError(f"shape {tuple(x.shape)} must equal the reference's {tuple(ref.shape)}")
    wanted = ref.detach().to("cpu", torch.float64)
    difference = (x.detach().to("cpu", torch.float64) - wanted).norm().item()
    norm = wanted.norm().item()
    if not math.isfinite(difference) or not math.isfinite(norm):
        return math.inf
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / norm


@contextlib.contextmanager
def fill_uninitialized() -> Iterator[None]:
    """Within the context, `torch.empty` and friends hold NaN (the largest value for integers), in this process.

    Works through torch's deterministic mode: operators without a deterministic version warn.
    """
    mode = torch.get_deterministic_debug_mode()
    # A module with properties, which type checkers do not see.
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)


# Logs.

_NAMES = {
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
# Helpers of the functional collectives: they move nothing.
_SILENT = {"wait_tensor", "_wrap_tensor_autograd"}
# c10d ops whose first argument is the output.
_OUTPUT_FIRST = {
    "alltoall_base_",
    "alltoall_",
    "_allgather_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
    "scatter_",
}


@dataclass(frozen=True)
class CommunicationRecord:
    """One message as its rank issued it.

    Args:
        name: all_to_all, all_gather, reduce_scatter, all_reduce, send, recv, broadcast, gather, scatter, reduce or
            barrier.
        payload_bytes: numel * itemsize of the buffers this rank puts in; 0 for recv and barrier. An all-to-all counts
            the part that stays on the rank too, a gather counts the rank's own shard once.
        shapes: shapes of those buffers (of the receiving buffer for recv).
        dtype: of the first of them; None for a barrier.
        group_size: ranks of the group.
    """

    name: str
    payload_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None
    group_size: int

    def __str__(self) -> str:
        shapes = " ".join(str(list(shape)) for shape in self.shapes)
        return f"{self.name:<15} {self.payload_bytes:>12} B  {shapes} {self.dtype} over {self.group_size}"


class CommunicationLog(TorchDispatchMode):
    """Context manager that records every message this process issues, in forward, backward and checkpoint replay.

    It watches the operators below `torch.distributed`, so that DDP's, FSDP's, DTensor's and functional collectives are
    seen as well. Not seen: what a compiled graph or a thread without this mode issues.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[CommunicationRecord] = []

    def total(self, name: str | None = None) -> int:
        """Payload bytes of all messages called `name`, or of all messages."""
        return sum(record.payload_bytes for record in self.records if name in (None, record.name))

    def count(self, name: str | None = None) -> int:
        """Number of messages called `name`, or of all messages."""
        return sum(name in (None, record.name) for record in self.records)

    @property
    def names(self) -> list[str]:
        """Names of the messages in the order of issue."""
        return [record.name for record in self.records]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(t, "__torch_dispatch__") and t.__name__ in ("DTensor", "AsyncCollectiveTensor") for t in types):
            # Let the subclass turn into its collectives first: while a mode runs, it does not see what it calls.
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record(func.namespace, func._schema.name.partition("::")[2], args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, namespace: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if op in _SILENT:
            return
        name = _NAMES.get(op, op)
        group_size = _group_size([*args, *kwargs.values()])
        inputs = args[1] if namespace == "c10d" and op in _OUTPUT_FIRST else args[0]
        buffers = [] if name == "barrier" else list(_tensors(inputs))
        self.records.append(
            CommunicationRecord(
                name=name,
                payload_bytes=0 if name == "recv" else sum(b.numel() * b.itemsize for b in buffers),
                shapes=tuple(tuple(b.shape) for b in buffers),
                dtype=buffers[0].dtype if buffers else None,
                group_size=group_size,
            )
        )

    def __repr__(self) -> str:
        lines = [f"CommunicationLog: {len(self.records)} messages, {self.total()} payload bytes"]
        return "\n".join([*lines, *(f"  {record}" for record in self.records)])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _group_size(values: Sequence[Any]) -> int:
    for value in values:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):
                return dist.ProcessGroup.unbox(value).size()
        if isinstance(value, str):
            with contextlib.suppress(RuntimeError, ValueError):
                return _resolve_process_group(value).size()  # pyright: ignore[reportArgumentType]
    return 0


class SavedTensorLog:
    """Context manager that records the tensors autograd saves for backward.

    A tensor saved twice, or two views of one storage, count once in `total_bytes`. Parameters count like any other
    tensor; pass them as `ignore`.

    Args:
        ignore: tensors whose storage does not count, for example `model.parameters()`.
    """

    def __init__(self, ignore: Iterator[Tensor] | Sequence[Tensor] = ()) -> None:
        self._ignored = {t.untyped_storage().data_ptr() for t in ignore}
        self._storages: dict[int, Tensor] = {}
        self.tensors: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def _pack(self, saved: Tensor) -> Tensor:
        pointer = saved.untyped_storage().data_ptr()
        if pointer not in self._ignored:
            self.tensors.append((tuple(saved.shape), saved.dtype))
            # Kept, so that the storage cannot be reused under the same address.
            self._storages[pointer] = saved.detach()
        return saved

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each saved tensor, in the order of saving."""
        return [shape for shape, _ in self.tensors]

    @property
    def total_bytes(self) -> int:
        """Bytes of the distinct storages that are kept for backward."""
        return sum(t.untyped_storage().nbytes() for t in self._storages.values())

    def __enter__(self) -> SavedTensorLog:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def __repr__(self) -> str:
        lines = [f"SavedTensorLog: {len(self.tensors)} tensors, {self.total_bytes} bytes"]
        return "\n".join([*lines, *(f"  {list(shape)} {dtype}" for shape, dtype in self.tensors)])


# Accelerate on CPU.


def allow_fsdp2_on_cpu() -> None:
    """Let Accelerate run FSDP2 and its parallelism config on CPU ranks over gloo, in this process.

    Accelerate takes its FSDP branch only for accelerators: on CPU it falls back to DDP and says nothing. This makes
    `AcceleratorState` see a multi-accelerator job when FSDP is asked for; the device stays the CPU and `fully_shard`
    is the real one. Call it before the first `Accelerator`; calling it again changes nothing.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__
    if getattr(original, "_allows_fsdp2_on_cpu", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")
        if wants_fsdp or kwargs.get("fsdp_plugin") is not None:
            state = PartialState(cpu=True)
            if state.distributed_type == DistributedType.MULTI_CPU:
                PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    init._allows_fsdp2_on_cpu = True  # pyright: ignore[reportAttributeAccessIssue]
    AcceleratorState.__init__ = init


# References to functions of test modules. pytest's importlib mode gives such a module a name that no other process can
# import, so functions and classes travel as (module name, file, qualified name), and the receiver loads the file.

_LIBRARY_ROOTS = tuple(
    os.path.realpath(path) + os.sep
    for path in {*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))}
)


def _travels_by_file(module_name: str) -> str | None:
    """File of a module that the other process may not find by name, or None."""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None or module_name.partition(".")[0] == __name__.partition(".")[0]:
        return None
    path = os.path.realpath(file)
    return None if path.startswith(_LIBRARY_ROOTS) else path


def _load_by_file(module_name: str, file: str, qualname: str) -> Any:
    module = sys.modules.get(module_name)
    if module is None or os.path.realpath(getattr(module, "__file__", None) or "") != file:
        # The script's own name is taken in the receiver.
        name = "__hf_cp_main__" if module_name == "__main__" else module_name
        module = sys.modules.get(name)
        if module is None or os.path.realpath(getattr(module, "__file__", None) or "") != file:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    return functools.reduce(getattr, qualname.split("."), module)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)):
            file = _travels_by_file(obj.__module__)
            if file is not None:
                if "<" in obj.__qualname__:
                    raise ValueError(f"{obj.__qualname__} cannot be sent to a rank; define it at the top of its module")
                name = "__main__" if obj.__module__ == "__hf_cp_main__" else obj.__module__
                return _load_by_file, (name, file, obj.__qualname__)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


# Worlds.


class RankFailure(AssertionError):  # noqa: N818
    """One or more ranks raised, died or did not finish; the message holds each one's traceback or stack.

    Args:
        reports: text by rank.
    """

    def __init__(self, reports: Mapping[int, str], world_size: int) -> None:
        self.reports = dict(reports)
        parts = [f"\n--- rank {rank} of {world_size} ---\n{text.rstrip()}" for rank, text in sorted(reports.items())]
        super().__init__("".join(parts))


@dataclass(frozen=True)
class CaseResult:
    """What one case gave on each rank: `values` if it is `ok`, else `error` with every failed rank's report."""

    ok: bool
    values: list[Any]
    error: str = ""


# Modules that the fork server imports if the parent has: each costs seconds a rank otherwise.
_HEAVY_MODULES = (
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.trainer",
    "accelerate",
    "peft",
)
# Messages that a rank remembers, for when it hangs.
_REMEMBERED = 200
_SHOWN = 30


class _Messages:
    """The last messages of this process, and which of them are under way; read by another thread when it hangs.

    Collectives are in torch's flight recorder. gloo leaves sends and receives out of it, so they are noted here.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[int, str, Any]] = deque(maxlen=_REMEMBERED)
        for name in ("send", "recv"):
            setattr(dist.ProcessGroup, name, self._noting(name, getattr(dist.ProcessGroup, name)))

    def _noting(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def method(group: Any, tensors: Any, peer: int, *args: Any) -> Any:
            shapes = " ".join(str(list(x.shape)) for x in tensors)
            direction = "to" if name == "send" else "from"
            entry = [time.time_ns(), f"{name} {shapes} {direction} rank {peer} of {group.size()}", None]
            self._pairs.append(entry)  # pyright: ignore[reportArgumentType]
            entry[2] = original(group, tensors, peer, *args)
            return entry[2]

        return method

    def __str__(self) -> str:
        trace = json.loads(_c10d._dump_fr_trace_json(True, False))  # pyright: ignore[reportAttributeAccessIssue]
        lines = [
            (
                entry["time_created_ns"],
                f"{entry['profiling_name'].partition(':')[2]} {entry['input_sizes']} in {entry['process_group'][1]}",
                entry["retired"],
            )
            for entry in trace.get("entries", [])
        ]
        lines += [(when, text, work is not None and work.is_completed()) for when, text, work in list(self._pairs)]
        now = time.time_ns()
        shown = [
            f"  {(now - when) / 1e9:8.2f} s ago  {text}{'' if finished else '  <- not finished'}"
            for when, text, finished in sorted(lines, key=lambda line: line[0])[-_SHOWN:]
        ]
        return "\n".join([f"its last {len(shown)} of {len(lines)} messages:", *shown])


def _answer_for_messages(messages: _Messages, pipe: connection.Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv_bytes()
            pipe.send_bytes(str(messages).encode())


# Time that the other ranks get to finish, or to be shown where they wait, once one has failed.
_GRACE_SECONDS = 3.0


class World:
    """A world of ranks that stays up and runs what it is sent: `run(fn, *args)` calls `fn(rank, world_size, *args)`.

    Each rank has an initialised default process group, one thread, and the environment that Accelerate reads (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). After a failure the ranks are replaced before the next call, so
    that no unmatched message of one case reaches another. What a case sets in a process (subgroups, patched classes)
    stays there for later cases.

    Args:
        size: number of ranks.
        backend: "gloo", or "nccl" with one CUDA device a rank.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._folder: Path | None = None
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._watches: list[connection.Connection] = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank and return the values in rank order.

        Args:
            fn: function at the top level of a module; a test module will do.
            args: picklable.
            timeout: seconds for all ranks to finish. The ranks' start is not counted.

        Raises:
            RankFailure: a rank raised, died or ran past the timeout; with the stacks of those that were waiting, and
                after a timeout with the last messages of every rank.
        """
        task = _dumps((fn, args))
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(task)
        values, reports = self._collect(timeout)
        if reports:
            self.close()
            raise RankFailure(reports, self.size)
        return [values[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Stop the ranks; the next `run` starts new ones."""
        for pipe in self._pipes + self._watches:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._watches = [], [], []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _start(self) -> None:
        context = _fork_server()
        folder = Path(tempfile.mkdtemp(prefix="hf_cp_world_"))
        self._folder = folder
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            watch, watched = context.Pipe()
            arguments = (rank, self.size, self.backend, str(folder), port, theirs, watched, list(sys.path))
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            watched.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._watches.append(watch)
        _, reports = self._collect(timeout=120.0)
        if reports:
            self.close()
            raise RankFailure(reports, self.size)

    def _collect(self, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        values: dict[int, Any] = {}
        reports: dict[int, str] = {}
        waiting = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout
        while waiting:
            left = deadline - time.monotonic()
            ready = connection.wait(list(waiting.values()), max(left, 0.0))
            if not ready and left <= 0.0:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
                except EOFError:
                    self._processes[rank].join(_GRACE_SECONDS)
                    ok, value = False, f"died with exit code {self._processes[rank].exitcode}\n{self._stack(rank)}"
                if ok:
                    values[rank] = value
                else:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                    reports[rank] = value
        failed_elsewhere = bool(reports)
        for rank in waiting:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if waiting:
            # The handler writes within microseconds, but on a busy machine the process must first get its turn.
            time.sleep(0.5)
        for rank in waiting:
            why = "was waiting while another rank failed" if failed_elsewhere else f"did not finish within {timeout} s"
            reports[rank] = f"{why}; its stack:\n{self._stack(rank)}"
        if waiting and not failed_elsewhere:
            for rank in range(self.size):
                reports[rank] = f"{reports.get(rank, 'finished')}\n{self._messages(rank)}"
        return values, reports

    def _messages(self, rank: int) -> str:
        """What a rank sent and received last; its main thread may hang in one of them."""
        watch = self._watches[rank]
        try:
            watch.send_bytes(b"")
            return watch.recv_bytes().decode() if watch.poll(_GRACE_SECONDS) else "(gives no list of its messages)"
        except (OSError, EOFError):
            return "(is gone, and with it the list of its messages)"

    def _stack(self, rank: int) -> str:
        assert self._folder is not None
        path = self._folder / f"stack{rank}"
        return path.read_text() if path.exists() else ""


def free_port() -> int:
    """A port that nothing on this machine listens at, for ranks to meet at.

    It is none of those that the system gives to connections: until the ranks come, which takes seconds, another
    process's connection could get such a port.

    Raises:
        OSError: none was found.
    """
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port between 20000 and 30000 is free")


@functools.cache
def _fork_server() -> Any:
    # Forked children inherit these; they are read when torch is imported.
    saved = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ.update(dict.fromkeys(saved, "1"))
    context = multiprocessing.get_context("forkserver")
    heavy = [module for module in _HEAVY_MODULES if module in sys.modules]
    if "bitsandbytes" in sys.modules:  # these import it, and it starts CUDA, which children then cannot
        heavy = [module for module in heavy if module not in ("peft", "transformers.trainer")]
    context.set_forkserver_preload(["torch", __name__, *heavy])
    from multiprocessing import forkserver

    forkserver.ensure_running()
    for name, value in saved.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return context


def _rank_main(
    rank: int,
    size: int,
    backend: str,
    folder: str,
    port: int,
    pipe: connection.Connection,
    watched: connection.Connection,
    path: list[str],
) -> None:
    # Open for the life of the process: the signal handler and the fault handler write to it.
    stack = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        TORCH_FR_BUFFER_SIZE=str(_REMEMBERED),
    )
    threading.Thread(target=_answer_for_messages, args=(_Messages(), watched), daemon=True).start()
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    _answer(pipe, _join_world, rank, size, backend, folder)
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        _answer(pipe, _run_task, task, rank, size)


def _join_world(rank: int, size: int, backend: str, folder: str) -> None:
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )


def _run_task(task: bytes, rank: int, size: int) -> Any:
    fn, args = pickle.loads(task)
    return fn(rank, size, *args)


def _answer(pipe: connection.Connection, fn: Callable[..., Any], *args: Any) -> None:
    try:
        answer = _dumps((True, fn(*args)))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # pytest's Skipped and Failed are no Exceptions; the parent raises what it gets
        answer = _dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in a fresh gloo world and return the values in rank order.

    Raises:
        RankFailure: a rank raised, died or ran past the timeout.
    """
    with World(world_size) as world:
        return world.run(fn, *args, timeout=timeout)


def run_cases(
    world_size: int, cases: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]], timeout: float = 60.0
) -> dict[str, CaseResult]:
    """Run named cases one after another in one world; a failed case does not stop the others.

    Args:
        world_size: number of ranks.
        cases: name -> (fn, args), called as `fn(rank, world_size, *args)`.
        timeout: seconds a case.
    """
    results = {}
    with World(world_size) as world:
        for name, (fn, args) in cases.items():
            try:
                results[name] = CaseResult(True, world.run(fn, *args, timeout=timeout))
            except RankFailure as failure:
                results[name] = CaseResult(False, [], str(failure))
    return results


# Small models.


# Sizes that the small models of all families share.
TINY_FIELDS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}


def tiny_qwen3_5(**overrides: Any) -> Any:
    """A random fp32 Qwen3.5 text model with a head, small enough for gloo ranks; the same weights on every call.

    Layers linear x3, full; delta-rule key/value heads 4/8, attention query/kv heads 8/2, convolution width 4.

    Args:
        overrides: fields of ``Qwen3_5TextConfig``.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    fields: dict[str, Any] = {
        **TINY_FIELDS,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(fields | overrides)))
