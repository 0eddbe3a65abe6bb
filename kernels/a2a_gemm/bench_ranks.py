"""Times the fused operators between GPUs, against the library's product alone and with NCCL's exchange beside it.

    torchrun --nproc-per-node W -m hf_cp.kernels.a2a_gemm.bench_ranks [ROW ...] [--json FILE]

The rows are those of `bench`, with W the number of processes. Each is first checked against torch and NCCL; then 10
warm-up calls and 50 samples, in rounds that alternate between the candidates. Before every sample the devices meet,
and everything is enqueued by then: a sample is the time between two CUDA events, without the host's. A rank's median is
reported, of the slowest rank. TFLOPS count 2LMNK.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .bench import BF16, PEAK, ROWS, Row, draw, error, product, require
from .fused import FusedBackend
from .plan import Tuning
from .reference import TorchBackend
from .workspace import Workspace, cuda_ipc, symmetric_memory

HEAD_DIM = 128
# The device sleeps while the host enqueues a sample, as a training step keeps it busy: about half a millisecond.
HEAD_START_CYCLES = 1_000_000


class Case:
    """A row's candidates on this rank: the product alone, with NCCL, and fused. Each returns its result."""

    def __init__(self, row: Row, fused: FusedBackend, torch_backend: TorchBackend) -> None:
        W = fused.world_size
        one = torch.ones((), device="cuda")
        scales = None if row.dtype == BF16 else (one, [one])
        if row.operator == "a2a_gemm":
            heads = row.K // HEAD_DIM
            weight = draw(row.N, row.K, dtype=row.dtype)
            dist.broadcast(weight.view(torch.uint8), 0)
            # The operand is where whoever computed it would have put it.
            drawn = draw(1, W * row.M, heads // W, HEAD_DIM, dtype=row.dtype)
            whole = draw(row.M, row.K, dtype=row.dtype)

            def run_fused() -> Tensor:
                x = fused.pull_buffer(*drawn.shape, dtype=row.dtype)
                return fused.a2a_gemm([x], [weight.t()], [heads], "to_sequence", scales)[0][0]

            def prepare() -> None:
                for _ in range(2):  # both halves
                    fused.pull_buffer(*drawn.shape, dtype=row.dtype).copy_(drawn)
                    run_fused()

            def run_nccl() -> Tensor:
                moved = torch_backend.exchange([drawn.view(torch.uint8)], [heads], "to_sequence")[0]
                return product(moved.flatten(2)[0].contiguous().view(row.dtype), weight, one)

            self.pure: Callable[[], Any] = lambda: product(whole, weight, one)
        elif row.operator == "gemm_a2a":
            widths = [row.N * 8 // 10, row.N // 10, row.N // 10]
            weights = [draw(n, row.K, dtype=row.dtype) for n in widths]
            for weight in weights:
                dist.broadcast(weight.view(torch.uint8), 0)
            x, joined = draw(1, row.M, row.K, dtype=row.dtype), torch.cat([w.view(torch.uint8) for w in weights])
            joined, heads_of = joined.view(row.dtype), [n // HEAD_DIM for n in widths]
            many = None if scales is None else (one, [one] * 3)

            def run_fused() -> Tensor:
                matrices = [w.t() for w in weights]
                return torch.cat(
                    [y.flatten() for y in fused.gemm_a2a(x, matrices, heads_of, HEAD_DIM, "to_heads", many)]
                )

            def prepare() -> None: ...

            def run_nccl() -> Tensor:
                parts = product(x[0], joined, one)[None].split(widths, 2)
                moved = torch_backend.exchange([y.unflatten(2, (-1, HEAD_DIM)) for y in parts], heads_of, "to_heads")
                return torch.cat([y.flatten() for y in moved])

            self.pure = lambda: product(x[0], joined, one)
        else:
            p, v = draw(1, row.L, row.M, row.K, dtype=row.dtype), draw(1, row.K, row.L, row.N, dtype=row.dtype)

            def run_fused() -> Tensor:
                return fused.batched_pv_a2a(p, v)

            def prepare() -> None: ...

            def run_nccl() -> Tensor:
                return torch_backend.batched_pv_a2a(p, v)

            self.pure = lambda: torch.bmm(p[0], v[0].transpose(0, 1))
        self.fused, self.nccl, self.prepare = run_fused, run_nccl, prepare


def time_all(
    candidates: dict[str, Callable[[], Any]], warmup: int = 10, samples: int = 50, rounds: int = 5
) -> dict[str, float]:
    """Milliseconds of each candidate: the median of the slowest rank."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    together = torch.zeros(1, device="cuda")
    for turn in range(rounds):
        for name, call in candidates.items():
            for _ in range(warmup if turn == 0 else 2):
                call()
            for _ in range(samples // rounds):
                dist.barrier()
                torch.cuda.synchronize()
                torch.cuda._sleep(HEAD_START_CYCLES)
                dist.all_reduce(together)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                end.synchronize()
                taken[name].append(start.elapsed_time(end))
    medians = torch.tensor([statistics.median(times) for times in taken.values()], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(taken, medians.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--copies", type=int, nargs="*", default=[0], help="copying CTAs of a2a_gemm; 0 chooses")
    parser.add_argument("--ipc", action="store_true", help="CUDA IPC instead of symmetric memory")
    parser.add_argument("--json", help="also write the lines there")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, W = dist.get_rank(), dist.get_world_size()
    transport = cuda_ipc if options.ipc else symmetric_memory
    workspace = Workspace(dist.group.WORLD, device, 256 << 20, transport=transport)
    plain, lines = TorchBackend(dist.group.WORLD), []
    if rank == 0:
        print(f"{W} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}, {transport.__name__}; 2LMNK")
    for name in options.rows:
        row = ROWS[name]
        torch.manual_seed(rank)
        candidates: dict[str, Callable[[], Any]] = {}
        for copies in options.copies if row.operator == "a2a_gemm" else [0]:
            case = Case(row, FusedBackend(workspace, tuning=Tuning(copy_ctas=copies)), plain)
            case.prepare()
            wrong = error(case.fused(), case.nccl())
            workspace.check()
            require(wrong, name)
            candidates |= {"pure": case.pure, "product and NCCL": case.nccl, f"fused, copies {copies}": case.fused}
        times = time_all(candidates)
        operations = 2 * row.L * row.M * row.N * row.K / 1e9
        for candidate, ms in times.items():
            line = {
                "row": name, "W": W, "candidate": candidate, "ms": round(ms, 4), "tflops": round(operations / ms, 1),
                "of_pure": round(100 * times["pure"] / ms, 1),
                "of_peak": round(100 * operations / ms / PEAK[row.dtype], 1),
            }  # fmt: skip
            lines.append(line)
            if rank == 0:
                print(*line.values(), flush=True)
    if options.json and rank == 0:
        with open(options.json, "w") as file:
            json.dump(lines, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
