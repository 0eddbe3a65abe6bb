"""Gated DeltaNet of a patched model: one body for all families and all linear modes."""

from __future__ import annotations

from typing import Any

import torch

from hf_cp.compilation import outside_graphs
from hf_cp.context import CpContext
from hf_cp.kernels.gdn import chunk_gated_delta_rule, layer
from hf_cp.kernels.gdn.backend import refuse, unserved_reason
from hf_cp.modes import allgather, p2p, ulysses
from hf_cp.modes.conv_halo import causal_conv
from hf_cp.modes.state_passing import SpanInputs, whole_rule
from hf_cp.regions import region

from . import fused_projections
from .out_proj import LateGradient

_MODES = {"p2p": p2p.start, "allgather": allgather.start, "ulysses": ulysses.start}


def forward(
    module: Any,
    stock_forward: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    cp_context: CpContext | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Token mixing of one Gated DeltaNet layer over this rank's tokens.

    Args:
        hidden_states: ``[B, L, D]``.
        attention_mask: padding mask ``[B, L]`` of this rank's tokens, or ``None``; padding enters as zeros, as stock.
        cp_context: absent for calls with a cache, which nothing shards: the stock forward runs them, or the Triton
            or Gluon kernels where they were chosen.

    Returns:
        ``[B, L, D]``.
    """
    if cp_context is None:
        if type(module).hf_cp_gdn_backend == "eager":
            return stock_forward(module, hidden_states, *args, attention_mask=attention_mask, **kwargs)
        # transformers 5.17 gives the cache another name.
        cache = args[0] if args else kwargs.get("cache", kwargs.get("cache_params"))
        return _with_cache(module, _masked(hidden_states, attention_mask), cache)
    hidden_states = _masked(hidden_states, attention_mask)
    with region("linear_attn", module.layer_idx):
        if cp_context.mesh.cp_size == 1:
            return _on_one_rank(module, hidden_states, cp_context)
        if cp_context.fused is not None and cp_context.config.linear_mode == "ulysses":
            return fused_projections.gated_delta_net(module, hidden_states, cp_context)
        return _across_ranks(module, hidden_states, cp_context)


def _on_one_rank(module: Any, hidden_states: torch.Tensor, cp: CpContext) -> torch.Tensor:
    inputs, project_z = _span_inputs(module, hidden_states, cp)
    normed = _norm(module, whole_rule(inputs, cp), project_z(), cp.config.gdn_backend)
    return module.out_proj(normed)


@outside_graphs
def _across_ranks(module: Any, hidden_states: torch.Tensor, cp: CpContext) -> torch.Tensor:
    """The output gate is projected while a state is under way, and in backward the weight gradient of ``out_proj``."""
    inputs, project_z = _span_inputs(module, hidden_states, cp)
    finish = _MODES[cp.config.linear_mode](inputs, cp)
    z = project_z()
    late = LateGradient(module.out_proj)
    normed = _norm(module, finish(between=late.record), z, cp.config.gdn_backend)
    return late.project(module.out_proj, normed)


def _masked(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    if attention_mask is None:
        return hidden_states
    return (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)


def _span_inputs(module: Any, hidden_states: torch.Tensor, cp: CpContext) -> tuple[SpanInputs, Any]:
    """Inputs of the delta rule, and the function that computes the output gate."""
    with region("project"):
        qkv, b, a, project_z = type(module).hf_cp_family.project(module, hidden_states)
    refuse(cp.config.gdn_backend, unserved_reason(cp.config.gdn_backend, dtype=qkv.dtype))
    with region("conv"):
        parts = causal_conv(qkv, _conv_weight(module), cp, activation=module.activation, widths=_widths(module))
    with region("gates"):
        g, beta = layer.gates(a, b, module.A_log, module.dt_bias, backend=cp.config.gdn_backend)
    return SpanInputs(*_heads(module, parts), g, beta), project_z


def _conv_weight(module: Any) -> torch.Tensor:
    return module.conv1d.weight.squeeze(1)


def _widths(module: Any) -> tuple[int, int, int]:
    return module.key_dim, module.key_dim, module.value_dim


def _heads(module: Any, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v ``[B, L, heads, dim]`` of ``[B, L, heads * dim]``."""
    q, k, v = parts
    key, value = (-1, module.head_k_dim), (-1, module.head_v_dim)
    return q.unflatten(-1, key), k.unflatten(-1, key), v.unflatten(-1, value)


def _norm(module: Any, output: torch.Tensor, z: torch.Tensor, backend: str) -> torch.Tensor:
    """Gated norm: ``[B, L, HV, V]`` and the gate ``[B, L, HV * V]`` to ``[B, L, HV * V]``."""
    norm = module.norm
    with region("norm"):
        normed = layer.gated_rms_norm(output, z.view_as(output), norm.weight, norm.variance_epsilon, backend=backend)
    return normed.flatten(-2)


class _Nothing:
    """The part of a cache that belongs to a layer, where there is no cache."""

    has_previous_state = (False,)


def _with_cache(module: Any, hidden_states: torch.Tensor, cache: Any) -> torch.Tensor:
    """Token mixing behind the tokens that a cache stands for, with the GPU kernels; the cache moves on."""
    backend = type(module).hf_cp_gdn_backend
    qkv, b, a, project_z = type(module).hf_cp_family.project(module, hidden_states)
    held: Any = cache.layers[module.layer_idx] if cache is not None else _Nothing
    follows = held.has_previous_state[0]
    needs_gradient = torch.is_grad_enabled() and qkv.requires_grad
    if follows and qkv.shape[1] == 1 and not held.record_past and not needs_gradient:
        mixed = layer.conv_step(qkv[:, 0], held.conv_states[0], _conv_weight(module), module.activation)
        output = layer.delta_step(
            mixed, a[:, 0], b[:, 0], module.A_log, module.dt_bias, held.recurrent_states[0], module.num_k_heads
        )[:, None]
    else:
        halo = held.conv_states[0][..., 1 - module.conv_kernel_size :].mT.clone() if follows else None
        # The cache writes to what it holds, also while a backward still needs it.
        state = held.recurrent_states[0].clone() if follows else None
        if cache is not None:
            cache.update_conv_state(qkv.mT, module.layer_idx, conv_kernel_size=module.conv_kernel_size)
        parts = layer.causal_conv1d(
            qkv, _conv_weight(module), halo, None, module.activation, widths=_widths(module), backend=backend
        )
        g, beta = layer.gates(a, b, module.A_log, module.dt_bias, backend=backend)
        output, final_state = chunk_gated_delta_rule(
            *_heads(module, parts),
            g,
            beta,
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            backend=backend,
        )
        if cache is not None:
            cache.update_recurrent_state(final_state, module.layer_idx)
    return module.out_proj(_norm(module, output, project_z(), backend))
