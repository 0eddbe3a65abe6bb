"""The fused operators between processes, against torch in the same group: `torchrun --nproc-per-node 2 THIS [HOW]`.

Ranks may share a GPU: CUDA IPC works there, symmetric memory needs one GPU a rank. Exits with an error on a mismatch.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from hf_cp.kernels.a2a_gemm import Backend, TorchBackend, a2a_gemm, batched_pv_a2a, gemm_a2a
from hf_cp.kernels.a2a_gemm.fused import FusedBackend
from hf_cp.kernels.a2a_gemm.workspace import Workspace, cuda_ipc, symmetric_memory

LIMIT = 1e-2


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


def run(backend: Backend, rank: int, world_size: int, turn: int) -> list[Tensor]:
    """Outputs and gradients of the three operators on this rank."""
    Sl, D, C, N = 136, 64, 256, 192
    heads = [2 * world_size, 1, 1]
    weights = [(draw(10 + i, H * D, C) / 16).requires_grad_() for i, H in enumerate(heads)]
    out = (draw(20, N, 2 * world_size * D) / 16).requires_grad_()
    x = draw(1000 * turn + rank, 1, Sl, C).requires_grad_()
    q, k, v = gemm_a2a(x, weights, D, backend=backend)
    y = a2a_gemm(q * (k + v), out, backend=backend)
    grads = torch.autograd.grad(y, [x, *weights, out], draw(500 + rank, *y.shape))
    S = Sl * world_size
    o = batched_pv_a2a(draw(30 + rank, 1, 2, S, S) / 16, draw(40 + rank, 1, S, 1, D), backend=backend)
    return [q, k, v, y, o, *grads]


def main() -> None:
    transport = {"ipc": cuda_ipc, "symmetric": symmetric_memory}[sys.argv[1] if len(sys.argv) > 1 else "ipc"]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.group.WORLD
    workspace = Workspace(group, device, 1 << 22, transport=transport)
    fused, plain = FusedBackend(workspace), TorchBackend(group)
    for turn in range(5):
        got, want = run(fused, rank, world_size, turn), run(plain, rank, world_size, turn)
        torch.cuda.synchronize()
        workspace.check()
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            error = ((a.float() - b.float()).norm() / b.float().norm()).item()
            if not error < LIMIT:
                sys.exit(f"rank {rank}, turn {turn}, tensor {i}: relative error {error:.2e} must be below {LIMIT:.0e}")
    print(f"rank {rank} of {world_size} on {device}: 5 turns agree, epoch {workspace.epoch}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
