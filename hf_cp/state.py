"""What a patched model knows about itself, and the group it is bound to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from .config import PatchConfig
from .mesh import CpMesh


@dataclass
class PatchState:
    """What a patched model knows, shared by its head and its decoder.

    Args:
        config: modes and backends.
        mesh: the context-parallel group; of size 1 until a group is bound.
        min_local: least tokens a rank must hold (the convolution's halo has one sender).
        announced: the group that the start-up line was written for.
        weights_sharded: FSDP2 was seen around the head: calls with a KV cache need all ranks.
    """

    config: PatchConfig
    mesh: CpMesh
    min_local: int
    announced: CpMesh | None = None
    weights_sharded: bool = False


def patch_state(model: nn.Module) -> PatchState | None:
    """The state of the first patched model inside ``model``, or ``None``."""
    return next((m.__dict__["_hf_cp"] for m in model.modules() if "_hf_cp" in m.__dict__), None)


def bind(model: nn.Module, mesh: CpMesh) -> None:
    """Tie every patched model inside ``model`` to a context-parallel group.

    Raises:
        ValueError: head counts that the group does not divide, or a model that is tied to another group.
    """
    bound = {id(s): (m, s) for m in model.modules() if (s := m.__dict__.get("_hf_cp")) is not None}
    for module, state in bound.values():
        check_group(module, state.config, mesh)
    for _, state in bound.values():
        state.mesh = mesh


def check_group(model: Any, config: PatchConfig, mesh: CpMesh) -> None:
    """Raise where one model, patched or about to be, cannot be tied to a group; see `bind`."""
    state = patch_state(model)
    if state is not None and state.mesh.cp_size > 1 and _ranks(state.mesh) != _ranks(mesh):
        raise ValueError(
            f"cp_group of {state.mesh.cp_size} ranks is already bound to the model, which cannot be bound to another "
            f"group of {mesh.cp_size} too: give cp_group or prepare with Accelerate, not both"
        )
    _check_heads(model.config.get_text_config(), config, mesh.cp_size)
    if config.projection_backend == "fused":
        _check_fused(model.config.get_text_config(), config, mesh.cp_size)


def _check_fused(text_config: Any, config: PatchConfig, cp_size: int) -> None:
    """Raise where sizes are not served by the fused projections' kernels."""
    if cp_size > 8:
        raise ValueError(f"projection_backend='fused' serves up to 8 ranks of one host, not {cp_size}: use 'torch'")
    widths = {"hidden_size": text_config.hidden_size}
    layers = text_config.layer_types[: text_config.num_hidden_layers]
    if config.attention_mode == "ulysses" and "full_attention" in layers:
        widths["head_dim"] = text_config.head_dim
        heads = text_config.num_key_value_heads
        if heads % cp_size and cp_size % heads:
            raise ValueError(
                f"projection_backend='fused' needs {heads} key-value heads that divide cp_size {cp_size}, or are "
                "divided by it: use 'torch'"
            )
    if config.linear_mode == "ulysses" and "linear_attention" in layers:
        widths["linear_key_head_dim"] = text_config.linear_key_head_dim
        widths["linear_value_head_dim"] = text_config.linear_value_head_dim
    for name, width in widths.items():
        if width % 8:
            raise ValueError(f"projection_backend='fused' needs {name} {width} divisible by 8: use 'torch'")


def _ranks(mesh: CpMesh) -> list[int] | None:
    return None if mesh.group is None else dist.get_process_group_ranks(mesh.group)


def _check_heads(text_config: Any, config: PatchConfig, cp_size: int) -> None:
    """Raise where a mode's head counts are not divisible by the group."""
    layers = text_config.layer_types[: text_config.num_hidden_layers]
    linear = (text_config.linear_num_key_heads, text_config.linear_num_value_heads)
    indivisible = "linear_attention" in layers and any(heads % cp_size for heads in linear)
    if config.linear_mode == "ulysses" and indivisible:
        raise ValueError(
            f"linear_mode='ulysses' needs key/value heads {linear[0]}/{linear[1]} divisible by cp_size {cp_size}: "
            "choose linear_mode='p2p' or 'allgather'"
        )
    heads = text_config.num_attention_heads
    if config.attention_mode == "ulysses" and "full_attention" in layers and heads % cp_size:
        raise ValueError(
            f"attention_mode='ulysses' needs {heads} attention heads divisible by cp_size {cp_size}: "
            "choose attention_mode='allgather'"
        )
