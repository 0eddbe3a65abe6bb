"""Times the fused operators against pure products, on one GPU with every rank's buffers local.

    python -m hf_cp.kernels.a2a_gemm.bench [ROW ...] [--sweep] [--clusters 1,2] [--json FILE]

A row is first checked (poisoned buffers, against fp32), then timed: 10 warm-up calls and 50 samples, in rounds that
alternate between the candidates, so that all see the same clocks. A sample is the time between two CUDA events; the
median is reported. TFLOPS count 2LMNK, the exchange adds none. Local memory stands in for the other ranks' memory: the
figures show what the exchange costs inside a GPU, not what a link adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from .build import check_device, with_clusters
from .plan import Block, Matrix, Plan, Segment, Tuning, make_plan, shape_of, stream_of
from .workspace import Workspace

LIMIT = 4e-3  # rounding to BF16, and the tensor cores' sums of FP8 products
PEAK = {torch.bfloat16: 989.5, torch.float8_e4m3fn: 1979.0}


@dataclass(frozen=True)
class Row:
    """One line of the table: an operator, its sizes for one rank, and the variants that can run it.

    The windows of `sweep` are in row tiles here, so that clusters of any size are given the same.
    """

    operator: str
    dtype: torch.dtype
    M: int
    N: int
    K: int
    L: int
    W: int
    variants: tuple[str, ...]
    sweep: tuple[Tuning, ...] = ()


def _tunings(copy_ctas: list[int], tails: list[int], windows: list[int]) -> tuple[Tuning, ...]:
    return tuple(Tuning(c, t, w) for c in copy_ctas for t in tails for w in windows)


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
_WIDE = ("bf16", "bf16_wide", "bf16_narrow")
_FP8_WIDE = ("fp8", "fp8_wide")
_COPIES = _tunings([4, 8, 12, 16], [-1], [8])
_NO_COPIES = _tunings([0], [0], [8, 16])
ROWS = {
    "medium": Row("a2a_gemm", BF16, 2048, 5120, 4096, 1, 8, _WIDE, _COPIES),
    "medium_cp4": Row("a2a_gemm", BF16, 2048, 5120, 4096, 1, 4, _WIDE, _COPIES),
    "large": Row("a2a_gemm", BF16, 4096, 10240, 8192, 1, 8, _WIDE, _COPIES),
    "large_fp8": Row("a2a_gemm", FP8, 4096, 10240, 8192, 1, 8, _FP8_WIDE, _COPIES),
    "pv": Row("batched_pv_a2a", BF16, 4096, 128, 4096, 8, 8, ("bf16_batched",), _NO_COPIES),
    "qkv": Row("gemm_a2a", BF16, 4096, 10240, 8192, 1, 8, _WIDE, _NO_COPIES),
    "qkv_fp8": Row("gemm_a2a", FP8, 4096, 10240, 8192, 1, 8, _FP8_WIDE, _NO_COPIES),
}


def draw(*shape: int, dtype: torch.dtype, scale: float = 0.5) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def error(x: Tensor, want: Tensor) -> float:
    x, want = x.float(), want.float()
    return ((x - want).norm() / want.norm()).item()


def time_all(
    candidates: dict[str, Callable[[], object]], warmup: int = 10, samples: int = 50, rounds: int = 5
) -> dict[str, float]:
    """Median milliseconds of each candidate."""
    taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for turn in range(rounds):
        for name, call in candidates.items():
            for _ in range(warmup if turn == 0 else 2):
                call()
            for _ in range(samples // rounds):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                taken[name].append((start, end))
            torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in events) for name, events in taken.items()}


def product(a: Tensor, b: Tensor, one: Tensor) -> Tensor:
    """`a @ b^T` by the library: cuBLAS for BF16, cuBLASLt for FP8."""
    if a.dtype == BF16:
        return a @ b.t()
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=BF16, use_fast_accum=True)  # pyright: ignore[reportPrivateImportUsage]


@dataclass
class Case:
    """A row set up: buffers, what each launch must give, and how to launch it."""

    row: Row
    pure: dict[str, Callable[[], object]]
    then: Callable[[], object]
    plan: Callable[[str, Tuning], Plan]
    poison: Callable[[], None]
    check: Callable[[], float]


def require(wrong: float, what: str) -> None:
    """Exit unless a relative error is what rounding makes."""
    if not wrong < LIMIT:
        sys.exit(f"{what}: relative error {wrong:.2e} must be below {LIMIT:.0e}; nothing was timed")


def alone(row: Row, a: Tensor, b: Tensor, d: Tensor, want: Tensor, ws: Workspace) -> dict[str, Callable[[], object]]:
    """Each variant's product of operands that lie there, into `d`; checked."""
    calls: dict[str, Callable[[], object]] = {}
    for variant in row.variants:
        plan = make_plan(variant, Matrix.of(a), [Matrix.of(b)], [Segment(Matrix.of(d))], sm_count=ws.sm_count)
        d.fill_(float("nan"))
        plan.run(stream_of())
        require(error(d, want), f"{row.operator}: own {variant}")
        # A plan holds addresses alone.
        calls[f"own {variant}"] = lambda plan=plan, held=(a, b, d): plan.run(stream_of())
    return calls


def gather_case(row: Row, ws: Workspace) -> Case:
    """`a2a_gemm`: K group p lies at rank p."""
    width = row.K // row.W
    parts = [draw(row.M, width, dtype=row.dtype) for _ in range(row.W)]
    b = draw(row.N, row.K, dtype=row.dtype)
    a, d = (
        torch.empty(row.M, row.K, device="cuda", dtype=row.dtype),
        torch.empty(row.M, row.N, device="cuda", dtype=BF16),
    )
    one = torch.ones((), device="cuda")
    whole = torch.cat([part.view(torch.uint8) for part in parts], 1).view(row.dtype)
    want = whole.float() @ b.float().t()
    blocks = [Block(Matrix.of(part), i * width) for i, part in enumerate(parts)]
    cuts = [i * width for i in range(row.W + 1)]
    library_out = torch.empty_like(whole)

    def then() -> object:
        torch.cat([part.view(torch.uint8) for part in parts], 1, out=library_out.view(torch.uint8))
        return product(library_out, b, one)

    def plan(variant: str, tuning: Tuning) -> Plan:
        return make_plan(
            variant, Matrix.of(a), [Matrix.of(b)], [Segment(Matrix.of(d))], blocks=blocks, flags=ws.flags, cuts=cuts,
            own_block=0, tuning=tuning, sm_count=ws.sm_count,
        )  # fmt: skip

    def poison() -> None:
        a.view(torch.uint8).fill_(0xFF)
        d.fill_(float("nan"))

    def check() -> float:
        if not torch.equal(a.view(torch.uint8), whole.view(torch.uint8)):
            return float("inf")
        return error(d, want)

    pure = {"library": lambda: product(whole, b, one), **alone(row, whole, b, d, want, ws)}
    return Case(row, pure, then, plan, poison, check)


def scatter_case(row: Row, ws: Workspace) -> Case:
    """`gemm_a2a`: q, k and v with grouped heads, columns of rank p's heads to rank p."""
    head = 128
    # Query heads four to a key head, as near as the columns divide: 8/10, 1/10 and 1/10 of them.
    widths = [row.N * 8 // 10, row.N // 10, row.N // 10]
    x, weights = draw(row.M, row.K, dtype=row.dtype), [draw(n, row.K, dtype=row.dtype) for n in widths]
    b = torch.cat([w.view(torch.uint8) for w in weights]).view(row.dtype)
    one = torch.ones((), device="cuda")
    outputs = [[torch.empty(row.M, n // row.W, device="cuda", dtype=BF16) for _ in range(row.W)] for n in widths]
    want = x.float() @ b.float().t()
    assert all(n % (row.W * head) == 0 for n in widths)
    segments, first = [], 0
    for section, n in enumerate(widths):
        for rank in range(row.W):
            segments.append(Segment(Matrix.of(outputs[section][rank]), first + rank * n // row.W, 0, section))
        first += n

    def pack(y: Tensor) -> list[Tensor]:
        return [part.contiguous() for third in y.split(widths, 1) for part in third.chunk(row.W, 1)]

    def plan(variant: str, tuning: Tuning) -> Plan:
        return make_plan(
            variant, Matrix.of(x), [Matrix.of(w) for w in weights], segments, tuning=tuning, sm_count=ws.sm_count
        )

    whole = torch.empty(row.M, row.N, device="cuda", dtype=BF16)

    def poison() -> None:
        for output in outputs:
            for part in output:
                part.fill_(float("nan"))

    def check() -> float:
        return error(torch.cat([part for output in outputs for part in output], 1), want)

    pure = {"library": lambda: product(x, b, one), **alone(row, x, b, whole, want, ws)}
    return Case(row, pure, lambda: pack(product(x, b, one)), plan, poison, check)


def batched_case(row: Row, ws: Workspace) -> Case:
    """`batched_pv_a2a`: every head's rows to the rank that owns their tokens."""
    p, v = draw(row.L, row.M, row.K, dtype=row.dtype), draw(row.K, row.L, row.N, dtype=row.dtype)
    values = v.transpose(0, 1)
    rows = row.M // row.W
    outputs = [torch.empty(rows, row.L, row.N, device="cuda", dtype=BF16) for _ in range(row.W)]
    want = torch.bmm(p.float(), values.float())
    segments = [Segment(Matrix.of(o.transpose(0, 1)), 0, rank * rows) for rank, o in enumerate(outputs)]
    whole = torch.empty(row.L, row.M, row.N, device="cuda", dtype=BF16)

    def plan(variant: str, tuning: Tuning) -> Plan:
        return make_plan(variant, Matrix.of(p), [Matrix.of(values)], segments, tuning=tuning, sm_count=ws.sm_count)

    def poison() -> None:
        for output in outputs:
            output.fill_(float("nan"))

    def check() -> float:
        return error(torch.cat(outputs).transpose(0, 1), want)

    def then() -> object:
        return [part.transpose(0, 1).contiguous() for part in torch.bmm(p, values).chunk(row.W, 1)]

    pure = {"library": lambda: torch.bmm(p, values), **alone(row, p, values, whole, want, ws)}
    return Case(row, pure, then, plan, poison, check)


CASES = {"a2a_gemm": gather_case, "gemm_a2a": scatter_case, "batched_pv_a2a": batched_case}


def row_of(name: str, clusters: Sequence[int]) -> Row:
    """A row with its tiles in clusters of these sizes, those it has by default if none is given.

    Raises:
        ValueError: a size for which no variant is there.
    """
    row = ROWS[name]
    if not clusters:
        return row
    return replace(row, variants=tuple(with_clusters(v, ctas) for v in row.variants for ctas in clusters))


def side_by_side(times: dict[str, float], clusters: dict[str, tuple[str, int]]) -> list[str]:
    """A line for each set of candidates that differ in their clusters alone.

    Args:
        times: milliseconds of each candidate.
        clusters: of those of this kernel, what they have in common with others, and the CTAs of their clusters.
    """
    found: dict[str, dict[int, float]] = {}
    for label, (what, ctas) in clusters.items():
        found.setdefault(what, {})[ctas] = times[label]
    lines = []
    for what, ms in found.items():
        first = next(iter(ms.values()))
        columns = [f"{ctas} CTAs {time:.4f} ms {100 * time / first:6.1f} %" for ctas, time in ms.items()]
        lines.append(f"{what:<40} " + "   ".join(columns))
    return lines


def run_row(name: str, ws: Workspace, sweep: bool, clusters: Sequence[int] = ()) -> list[dict[str, object]]:
    row = row_of(name, clusters)
    case = CASES[row.operator](row, ws)
    candidates: dict[str, Callable[[], object]] = {f"pure {key}": call for key, call in case.pure.items()}
    candidates["exchange, then library" if row.operator == "a2a_gemm" else "library, then exchange"] = case.then
    compared: dict[str, tuple[str, int]] = {}
    for variant in row.variants:
        shape = shape_of(variant)
        tile = f"{shape.tile_m} x {shape.tile_n}"
        compared[f"pure own {variant}"] = f"{tile} alone", shape.cluster
        for tuning in row.sweep if sweep else (Tuning(),):
            what = f"copy {tuning.copy_ctas} tail {tuning.tail_pairs} window {tuning.window}"
            tuning = replace(tuning, window=tuning.window // shape.cluster)
            plan = case.plan(variant, tuning)

            def fused(plan: Plan = plan) -> None:
                if row.operator == "a2a_gemm":
                    ws.meet()
                    plan.run(stream_of())
                else:
                    plan.run(stream_of())
                    ws.meet()

            case.poison()
            fused()
            torch.cuda.synchronize()
            ws.check()
            label = f"fused {variant} {what}"
            require(case.check(), f"{name}: {label}")
            candidates[label] = fused
            compared[label] = f"{tile} fused, {what}", shape.cluster
    times = time_all(candidates)
    best = min(time for key, time in times.items() if key.startswith("pure "))
    operations = 2 * row.L * row.M * row.N * row.K / 1e9
    table = [
        {
            "row": name, "candidate": key, "ms": round(time, 4), "tflops": round(operations / time, 1),
            "of_pure": round(100 * best / time, 1), "of_peak": round(100 * operations / time / PEAK[row.dtype], 1),
        }
        for key, time in times.items()
    ]  # fmt: skip
    print(f"\n{name}: {row.operator} {str(row.dtype)[6:]} W={row.W} M={row.M} N={row.N} K={row.K} L={row.L}")
    for line in table:
        print(
            f"  {line['candidate']:<48} {line['ms']:8.4f} ms {line['tflops']:7.1f} TFLOPS "
            f"{line['of_pure']:6.1f} % of pure {line['of_peak']:5.1f} % of peak",
            flush=True,
        )
    if clusters:
        print("  clusters side by side:", *side_by_side(times, compared), sep="\n    ", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--sweep", action="store_true", help="over copying CTAs and windows of row tiles")
    parser.add_argument(
        "--clusters", type=lambda text: [int(part) for part in text.split(",")], default=[], metavar="1,2",
        help="every tile in clusters of so many CTAs, side by side; builds the variants that only this compares",
    )  # fmt: skip
    parser.add_argument("--json", help="also write the lines there")
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"unknown row {unknown[0]!r}: choose from {', '.join(ROWS)}")
    try:
        rows = {name: row_of(name, options.clusters) for name in options.rows}
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cuda", torch.cuda.current_device())
    check_device(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, all buffers local; 2LMNK, 10 + 50, median")
    for variant in dict.fromkeys(v for row in rows.values() for v in row.variants):
        print(variant, asdict(shape_of(variant)))
    ws = Workspace(None, device, 1024)
    lines = [line for name in options.rows for line in run_row(name, ws, options.sweep, options.clusters)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
