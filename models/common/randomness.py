"""Random numbers of each rank's own, for dropout on its tokens."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hf_cp.compilation import outside_graphs
from hf_cp.mesh import CpMesh

# Odd and large: seeds of neighbouring ranks share no low bits.
_STRIDE = 0x9E3779B97F4A7C15


@outside_graphs
def own_randomness(module: nn.Module, mesh: CpMesh) -> contextlib.AbstractContextManager[Any]:
    """Within the context, this rank drops out by a seed of its own; without dropout, nothing changes.

    Trainer gives all ranks the same seed. Data order and all else that is drawn must stay alike on a group's ranks, but
    equal masks on all shards would drop one pattern again and again along the sequence. The ranks' seeds come from
    one number of the common generator, which afterwards is what it was, one number on. Activation checkpointing saves
    the state of the generator in here and replays from it.

    Args:
        module: what runs inside; asked whether it drops out.
        mesh: the context-parallel group.
    """
    if mesh.cp_size == 1 or not _drops_out(module):
        return contextlib.nullcontext()
    return _seeded(int(torch.randint(2**62, ()).item()) + _STRIDE * mesh.cp_rank)


def _drops_out(module: nn.Module) -> bool:
    if not module.training:
        return False
    config: Any = getattr(module, "config", None)
    attention = getattr(config, "attention_dropout", 0.0) if config is not None else 0.0
    return bool(attention) or any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in module.modules())


@contextlib.contextmanager
def _seeded(seed: int) -> Any:
    device = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=device):
        torch.default_generator.manual_seed(seed % 2**63)
        if device:
            torch.cuda.manual_seed(seed % 2**63)
        yield
