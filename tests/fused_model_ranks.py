"""A patched model with fused against torch projections, between processes: `torchrun --nproc-per-node 2 THIS [HOW]`.

HOW is how ranks reach each other's memory: `ipc`, which works on one GPU too, or `symmetric`, a GPU a rank; `fsdp` is
`symmetric` under FSDP2, whose NCCL messages run on streams of their own beside the fused kernels. Logits and every
gradient are compared; exits with an error on a mismatch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import hf_cp
from hf_cp.kernels.a2a_gemm.fused import FusedBackend
from hf_cp.kernels.a2a_gemm.workspace import Workspace, cuda_ipc
from hf_cp.modes import projections
from hf_cp.testing import tiny_qwen3_5

LIMIT = 2e-2  # BF16 in every product and between them


def whole(x: torch.Tensor) -> torch.Tensor:
    """A gradient, gathered where FSDP holds a part of it."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).float().clone()


def step(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    fsdp: Any = model if issubclass(type(model), FSDPModule) else None
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    if fsdp is not None:
        fsdp.reshard()  # or the root's whole parameters would be found below, which have no gradients
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    if fsdp is None:
        hf_cp.average_gradients(model)
    return logits, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def patch(model: Any, projection_backend: str) -> None:
    hf_cp.patch(
        model, linear_mode="ulysses", attention_mode="ulysses", gdn_backend="eager",
        projection_backend=projection_backend, cp_group=dist.group.WORLD,
    )  # fmt: skip


def main() -> None:
    how = sys.argv[1] if len(sys.argv) > 1 else "ipc"
    dist.init_process_group("gloo" if how == "ipc" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = tiny_qwen3_5(
        hidden_size=256, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=64, vocab_size=512
    ).to(device, torch.bfloat16)  # fmt: skip
    model.train()
    if how == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    worst = 0.0
    for length in (128, 301):
        ids = torch.randint(1, 512, (2, length), generator=torch.Generator().manual_seed(length)).to(device)
        patch(model, "torch")
        want, gradients = step(model, ids)
        hf_cp.unpatch(model)
        patch(model, "fused")
        if how == "ipc":
            workspace = Workspace(dist.group.WORLD, device, 8 << 20, transport=cuda_ipc, timeout_s=60.0)
            projections.provide(model._hf_cp.mesh, FusedBackend(workspace))
        for turn in range(2):
            got, found = step(model, ids)
            torch.cuda.synchronize()
            total = torch.stack([g.norm() for g in gradients.values()]).norm()
            errors = {"logits": ((got - want).norm() / want.norm()).item()}
            for name, g in gradients.items():
                errors[name] = ((found[name] - g).norm() / max(g.norm(), 0.05 * total)).item()
            bad = {name: error for name, error in errors.items() if not error < LIMIT}
            if bad:
                sys.exit(f"rank {rank}, length {length}, turn {turn}: errors {bad} must be below {LIMIT}")
            worst = max(worst, *errors.values())
        hf_cp.unpatch(model)
    print(f"rank {rank} on {device}: logits and {len(gradients)} gradients agree, worst {worst:.2e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
