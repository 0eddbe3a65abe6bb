"""Times the delta rule of our backends and of the public kernels, side by side on one GPU.

python -m hf_cp.kernels.gdn.bench [--backends flash_qla,fla,gluon,triton,eager] [--tokens 8192,...] [--heads 16:32,...]

Without options it makes the table of all of them; the complete layer's is `hf-cp bench --table layer`.

Each backend and pair of head counts is a process of its own, so that they compile side by side, the public kernels for
minutes. A lock keeps the card free of all else while one is timed: a process holds it, shared, from its start until it
has compiled and met fp64, and then alone for each row. So the clock first starts when the last one has compiled, or has
been ended after --limit seconds. A backend whose outputs or gradients miss fp64 by more than BOUND is not timed.
flash-linear-attention tunes itself meanwhile, beside the others, and is kept from handing its work to FlashQLA.

A row: milliseconds of forward and of both, median, minimum and 90th percentile of 20 runs after 5 (eager from 65,536
tokens on: 3 after 1), each waited for; backward, the difference of the medians; peak MiB beyond the inputs.
"""

import argparse
import fcntl
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from . import eager
from .backend import get_backend
from .chunk import chunk_gated_delta_rule

BOUND = 5.86e-3
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
OURS = ("gluon", "triton", "eager")
BACKENDS = ("flash_qla", "fla", *OURS)
PACKAGES = ("torch", "triton", "flash-linear-attention", "flash-qla", "tilelang")
COLUMNS = ("forward ms", "backward ms", "both ms", "both min", "both p90", "peak MiB")
LONG = 65536  # from here on eager is repeated less
Operator = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Row = dict[str, Any]


def inputs(seq_len: int, key_heads: int, value_heads: int, dim: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v, g, beta, initial_state as leaves, and the gradients of o and of the final state."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (randn(1, seq_len, key_heads, dim).bfloat16() for _ in range(2))
    v = randn(1, seq_len, value_heads, dim).bfloat16()
    decay = torch.rand(value_heads, device="cuda", generator=generator) * 16
    g = -decay * F.softplus(randn(1, seq_len, value_heads) + 1) * 0.05
    beta = randn(1, seq_len, value_heads).sigmoid().bfloat16()
    state = randn(1, value_heads, dim, dim)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
    return leaves, [randn(1, seq_len, value_heads, dim).bfloat16(), randn(1, value_heads, dim, dim)]


def operator_of(name: str) -> Operator:
    """The operator under the common signature: (q, k, v, g, beta, initial_state) to (o, final_state)."""
    options: Any = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if name in OURS:
        get_backend(name)
        return lambda q, k, v, g, beta, state: chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, backend=name, **options
        )
    if name == "fla":
        os.environ["FLA_FLASH_QLA"] = "0"
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla  # pyright: ignore[reportMissingImports]

        return lambda q, k, v, g, beta, state: fla(q, k, v, g=g, beta=beta, initial_state=state, **options)
    from flash_qla import chunk_gated_delta_rule as qla  # pyright: ignore[reportMissingImports]

    return lambda q, k, v, g, beta, state: qla(q, k, v, g, beta, initial_state=state, **options)


def gradients(operator: Operator, leaves: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    o, final_state = operator(*leaves)
    assert final_state is not None
    return [o.detach(), final_state.detach(), *torch.autograd.grad([o, final_state], leaves, grads)]


def errors(operator: Operator, key_heads: int, value_heads: int, dim: int) -> dict[str, float]:
    """Relative L2 errors against fp64 at 8,192 tokens."""
    leaves, grads = inputs(8192, key_heads, value_heads, dim)
    actual = gradients(operator, leaves, grads)
    q, k, v, g, beta, state, do, dfinal_state = (x.detach().double() for x in (*leaves, *grads))
    options: Any = {"scale": dim**-0.5, "use_qk_l2norm_in_kernel": True}
    expected = [
        *eager.forward(q, k, v, g, beta, initial_state=state, **options),
        *eager.backward(q, k, v, g, beta, state, do, dfinal_state, **options),
    ]
    return {name: float((x.double() - y).norm() / y.norm()) for name, x, y in zip(NAMES, actual, expected, strict=True)}


def times_ms(function: Callable[[], object], warm_up: int, repeats: int) -> list[float]:
    """Of each repeat, shortest first."""
    for _ in range(warm_up):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)


def measure(operator: Operator, seq_len: int, heads: tuple[int, int], dim: int, warm_up: int, repeats: int) -> Row:
    leaves, grads = inputs(seq_len, *heads, dim)

    def forward() -> None:
        with torch.no_grad():
            operator(*leaves)

    row: Row = {}
    for name, function in (("forward", forward), ("both", lambda: gradients(operator, leaves, grads))):
        times = times_ms(function, warm_up, repeats)
        row |= {f"{name} ms": statistics.median(times), f"{name} min": times[0]}
        row[f"{name} p90"] = times[round(0.9 * (len(times) - 1))]
    row["backward ms"] = row["both ms"] - row["forward ms"]
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(operator, leaves, grads)
    torch.cuda.synchronize()
    return row | {"peak MiB": (torch.cuda.max_memory_allocated() - before) / 2**20, "repeats": repeats}


class Card:
    """The lock on the GPU, in a process that `side_by_side` has started: it begins shared."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # Compilers that this process starts must not hold it.
        os.set_inheritable(descriptor, False)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no process holds the lock, also this one no longer, and holds it alone."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self.free()

    def free(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


def side_by_side(commands: Mapping[Any, Sequence[str]], limit: float) -> Iterator[tuple[Any, Any]]:
    """Runs all commands at once, and passes on what they send, as it comes.

    Each is started with two more arguments, the descriptors of a `Connection` to write to and of the `Card`. It sends
    "compiled" once, before it gives up the lock.

    Args:
        commands: by any key. limit: seconds; a command that has not sent "compiled" by then is ended.
    Yields:
        The key, and what was sent; None in the end of a command that was ended after `limit`, and its exit status, an
        int, in that of any other.
    """
    with tempfile.NamedTemporaryFile() as lock, ExitStack() as stack:
        running: dict[Connection, tuple[Any, subprocess.Popen[bytes]]] = {}
        for key, command in commands.items():
            receive, send = Pipe(duplex=False)
            # An opening of its own: locks of one opening do not exclude each other.
            descriptor = os.open(lock.name, os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            passed = (send.fileno(), descriptor)
            # What libraries print is no row: it goes to standard error.
            process = subprocess.Popen([*command, *map(str, passed)], pass_fds=passed, stdout=2, start_new_session=True)
            stack.callback(_end, process)
            os.close(descriptor)
            send.close()
            running[receive] = key, process
        begin, compiling = time.monotonic(), set(running)
        while running:
            left = max(0.0, begin + limit - time.monotonic()) if compiling else None
            for receive in wait(list(running), left):
                assert isinstance(receive, Connection)
                key, process = running[receive]
                try:
                    message = receive.recv()
                except EOFError:
                    del running[receive]
                    message = process.wait()
                if message == "compiled" or receive not in running:
                    compiling.discard(receive)
                yield key, message
            if time.monotonic() >= begin + limit:
                for receive in [x for x in compiling if not x.poll()]:
                    compiling.discard(receive)
                    key, process = running.pop(receive)
                    _end(process)
                    yield key, None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process that still runs, and the compilers that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def work(backend: str, heads: tuple[int, int], tokens: list[int], dim: int, send: Connection, card: Card) -> None:
    """The rows of one backend and pair of head counts: what a process of its own does."""
    begin = time.monotonic()
    try:
        operator = operator_of(backend)
        found = errors(operator, *heads, dim)
        for seq_len in tokens if backend != "eager" else ():
            # Other lengths may need other kernels; where there is no room for this beside the rest, they wait.
            with suppress(torch.OutOfMemoryError):
                measure(operator, seq_len, heads, dim, 0, 1)
        _empty()
        send.send(f"{backend} {heads[0]}/{heads[1]}: compiled and checked after {time.monotonic() - begin:.0f} s")
        wrong = {name: f"{error:.1e}" for name, error in found.items() if not error < BOUND}
        failure = f"not timed, wrong: {wrong}" if wrong else None
    except Exception as error:
        operator, failure = None, _one_line(error)
    send.send("compiled")
    card.free()
    for seq_len in tokens:
        row: Row = {"backend": backend, "tokens": seq_len, "heads": f"{heads[0]}/{heads[1]}"}
        if operator is None or failure is not None:
            send.send(row | {"note": failure})
            continue
        few = backend == "eager" and seq_len >= LONG
        with card.alone():
            try:
                row |= measure(operator, seq_len, heads, dim, *((1, 3) if few else (5, 20)))
            except Exception as error:
                row["note"] = _one_line(error)
            _empty()
        send.send(row)


def _empty() -> None:
    """Leaves nothing on the GPU, neither memory nor work."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def line(row: Row) -> str:
    """A row of the table."""
    cells = [row["backend"], str(row["tokens"]), row["heads"]]
    if "note" in row:
        return f"| {' | '.join([*cells, row['note'], *[''] * (len(COLUMNS) - 1)])} |"
    return f"| {' | '.join([*cells, *(f'{row[name]:.3f}' for name in COLUMNS[:-1]), f'{row[COLUMNS[-1]]:.0f}'])} |"


def ratios(rows: list[Row]) -> str:
    """How many times as fast each of our kernels is as each other backend, and in how many times less memory.

    Args:
        rows: as they were printed; those with a note are left out, and so is what they would be compared with.
    Returns:
        A Markdown table; with neither kernels nor others, its head alone.
    """
    lines = [
        "| tokens | heads | backend | against | forward | backward | both | memory |\n|---|---|---|---|---|---|---|---|"
    ]
    measured = {(row["tokens"], row["heads"], row["backend"]): row for row in rows if "note" not in row}
    for (tokens, heads, backend), mine in measured.items():
        if backend not in OURS or backend == "eager":
            continue
        for other in BACKENDS:
            theirs = measured.get((tokens, heads, other))
            if theirs is None or other == backend:
                continue
            cells = [f"{theirs[name] / mine[name]:.2f}" for name in (*COLUMNS[:3], COLUMNS[-1])]
            lines.append(f"| {' | '.join([str(tokens), heads, backend, other, *cells])} |")
    return "\n".join(lines)


def conditions() -> dict[str, str]:
    """The GPU and the versions of what is installed."""
    found = {"gpu": torch.cuda.get_device_name()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"inputs": "BF16, B=1, q/k norm, initial state and its gradient"}


def _refuse(option: str, value: object, remedy: str) -> None:
    raise SystemExit(f"hf_cp.kernels.gdn.bench: {option} has {value!r}: {remedy}")


def parse(command: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked.

    Raises:
        SystemExit: one line, for an option that has a wrong value.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--tokens", default="8192,16384,32768,65536")
    parser.add_argument("--heads", default="16:32,32:32,2:4", help="key and value heads")
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--limit", type=float, default=360.0, help="seconds for compiling and checking")
    parser.add_argument("--out", type=Path, help="file for JSON lines: the conditions, then each row as it comes")
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(command)
    options.backends = options.backends.split(",")
    for name in options.backends:
        if name not in BACKENDS:
            _refuse("--backends", name, f"pass some of {', '.join(BACKENDS)}")
    for name in options.tokens.split(","):
        if not name.isdecimal() or int(name) < 1:
            _refuse("--tokens", name, "pass numbers of tokens, such as 8192,32768")
    options.tokens = [int(name) for name in options.tokens.split(",")]
    pairs = []
    for name in options.heads.split(","):
        pair = name.split(":")
        if len(pair) != 2 or not all(x.isdecimal() and int(x) > 0 for x in pair) or int(pair[1]) % int(pair[0]):
            _refuse("--heads", name, "pass key and value heads, the latter a multiple of the former, such as 16:32")
        pairs.append((int(pair[0]), int(pair[1])))
    options.heads = pairs
    for name in ("dim", "limit"):
        if not getattr(options, name) > 0:
            _refuse(f"--{name}", getattr(options, name), "pass a number above 0")
    if options.out is not None and not options.out.parent.is_dir():
        _refuse("--out", str(options.out), "there is no such folder: make it first")
    return options


def worker_command(backend: str, heads: tuple[int, int], options: argparse.Namespace) -> list[str]:
    """The command of `work`, but for the descriptors."""
    tokens = ",".join(map(str, options.tokens))
    asked = {"backends": backend, "heads": f"{heads[0]}:{heads[1]}", "tokens": tokens, "dim": options.dim}
    arguments = [f"--{name}={value}" for name, value in asked.items()]
    return [sys.executable, "-m", f"{__package__}.bench", *arguments, "--worker"]


def collect(options: argparse.Namespace, out: Any) -> list[Row]:
    """Prints rows, and writes them to `out`, as they come.

    Args:
        options: of `parse`. out: a file for JSON lines, or None.
    Returns:
        A row for each backend, pair of head counts and number of tokens.
    """
    rows: list[Row] = []
    keys = [(backend, heads) for backend in options.backends for heads in options.heads]
    commands = {key: worker_command(*key, options) for key in keys}
    missing = {key: list(options.tokens) for key in keys}

    def add(row: Row, key: Any) -> None:
        missing[key].remove(row["tokens"])
        rows.append(row)
        print(line(row), flush=True)
        if out is not None:
            out.write(json.dumps(row) + "\n")
            out.flush()

    for key, message in side_by_side(commands, options.limit):
        if isinstance(message, dict):
            add(message, key)
        elif isinstance(message, str):
            if message != "compiled":
                print(message, file=sys.stderr, flush=True)
        else:
            note = f"not compiled within {options.limit:g} s" if message is None else f"ended with status {message}"
            backend, heads = key
            for seq_len in list(missing[key]):
                add({"backend": backend, "tokens": seq_len, "heads": f"{heads[0]}/{heads[1]}", "note": note}, key)
    return rows


def main(command: Sequence[str] | None = None) -> None:
    options = parse(command)
    if options.worker is not None:
        send, card = options.worker
        os.set_inheritable(send, False)
        pipe = Connection(send, readable=False)
        work(options.backends[0], options.heads[0], options.tokens, options.dim, pipe, Card(card))
        return
    if not torch.cuda.is_available():
        raise SystemExit("hf_cp.kernels.gdn.bench: PyTorch sees no CUDA GPU: run it where there is one")
    # As an exception, so that no process is left behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    known = conditions()
    print(", ".join(f"{name} {value}" for name, value in known.items()))
    print(f"| backend | tokens | heads | {' | '.join(COLUMNS)} |\n|{'---|' * (3 + len(COLUMNS))}", flush=True)
    with ExitStack() as stack:
        out = None if options.out is None else stack.enter_context(options.out.open("w"))
        if out is not None:
            print(json.dumps(known), file=out, flush=True)
        rows = collect(options, out)
    print(f"\nTimes as fast, and times less memory, than the one it is put against:\n\n{ratios(rows)}")


if __name__ == "__main__":
    main()
