"""The fused operators between processes, against torch in the same group.

    torchrun --nproc-per-node W THIS [ipc|symmetric] [graph]

Ranks may share a GPU: CUDA IPC works there, symmetric memory needs one GPU a rank. With `graph`, calls are captured in
a CUDA graph and replayed. Exits with an error on a mismatch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_cp.kernels.a2a_gemm import Backend, TorchBackend, a2a_gemm, batched_pv_a2a, gemm_a2a
from hf_cp.kernels.a2a_gemm.fused import FusedBackend
from hf_cp.kernels.a2a_gemm.workspace import Workspace, cuda_ipc, symmetric_memory

LIMIT = 1e-2
TOKENS, HEAD_DIM, HIDDEN, OUT = 136, 64, 256, 192  # tokens of a rank


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


def draw_weights(world_size: int) -> list[Tensor]:
    """Of q, k, v, with fewer key and value heads than ranks, and of the output: the same on every rank."""
    heads = [2 * world_size, 1, 1]
    weights = [draw(10 + i, H * HEAD_DIM, HIDDEN) / 16 for i, H in enumerate(heads)]
    return [*weights, draw(20, OUT, 2 * world_size * HEAD_DIM) / 16]


def step(backend: Backend, x: Tensor, weights: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """Outputs and gradients of both projections on this rank."""
    q, k, v = gemm_a2a(x, weights[:-1], HEAD_DIM, backend=backend)
    y = a2a_gemm(q * (k + v), weights[-1], backend=backend)
    return [q, k, v, y, *torch.autograd.grad(y, [x, *weights], dy)]


def run(backend: Backend, rank: int, world_size: int, turn: int) -> list[Tensor]:
    """Outputs and gradients of the three operators on this rank."""
    x, weights = draw(1000 * turn + rank, 1, TOKENS, HIDDEN), draw_weights(world_size)
    operands = [operand.requires_grad_() for operand in (x, *weights)]
    S = TOKENS * world_size
    p, v = draw(30 + rank, 1, 2, S, S) / 16, draw(40 + rank, 1, S, 1, HEAD_DIM)
    results = step(backend, operands[0], operands[1:], draw(500 + rank, 1, TOKENS, OUT))
    return [*results, batched_pv_a2a(p, v, backend=backend)]


def require_equal(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    """Raise AssertionError unless all are within `LIMIT`."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert error < LIMIT, f"{what}, tensor {i}: relative error {error:.2e} must be below {LIMIT:.0e}"


def check_replays(fused: FusedBackend, plain: TorchBackend, rank: int) -> None:
    """Capture forward and backward, replay them three times with other numbers, an uncaptured step after each.

    Both are held to fp32. Results are poisoned before each replay, and the uncaptured step follows it without a wait:
    it must not touch what another rank's replay still reads.
    """
    W = fused.world_size
    x, dy = (torch.zeros(1, TOKENS, n, device="cuda", dtype=torch.bfloat16) for n in (HIDDEN, OUT))
    operands = [operand.requires_grad_() for operand in (x, *draw_weights(W))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(fused, operands[0], operands[1:], dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = [result.detach() for result in step(fused, operands[0], operands[1:], dy)]
    for turn in range(3):
        numbers = draw(1000 * turn + rank, *x.shape), draw(1000 * turn + 500 + rank, *dy.shape)
        exact = [operand.detach().float().requires_grad_() for operand in (numbers[0], *operands[1:])]
        want = step(plain, exact[0], exact[1:], numbers[1].float())
        for one, number in zip((x, dy), numbers, strict=True):
            one.detach().copy_(number)
        for result in replayed:
            result.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
            eager = step(fused, operands[0], operands[1:], dy)
        torch.cuda.synchronize()
        fused.workspace.check()
        require_equal(replayed, want, f"rank {rank}, replay {turn}")
        require_equal(eager, want, f"rank {rank}, call after replay {turn}")


def main() -> None:
    how, *graph = sys.argv[1:] or ["ipc"]
    transport = {"ipc": cuda_ipc, "symmetric": symmetric_memory}[how]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.group.WORLD
    workspace = Workspace(group, device, 1 << 22, transport=transport)
    fused, plain = FusedBackend(workspace), TorchBackend(group)
    if graph:
        check_replays(fused, plain, rank)
    else:
        for turn in range(5):
            got, want = run(fused, rank, world_size, turn), run(plain, rank, world_size, turn)
            torch.cuda.synchronize()
            workspace.check()
            require_equal(got, want, f"rank {rank}, turn {turn}")
    what = "replays" if graph else "5 turns"
    print(f"rank {rank} of {world_size} on {device}: {what} agree, epoch {workspace.epoch}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
