"""Gated DeltaNet of a patched model: one body for all families and all linear modes."""

from __future__ import annotations

from typing import Any

import torch

from hf_cp.compilation import outside_graphs
from hf_cp.context import CpContext
from hf_cp.kernels.gdn.reference import gate
from hf_cp.modes import allgather, p2p, ulysses
from hf_cp.modes.conv_halo import causal_conv
from hf_cp.modes.state_passing import SpanInputs

_MODES = {"p2p": p2p.start, "allgather": allgather.start, "ulysses": ulysses.start}


@outside_graphs
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
        cp_context: absent for calls with a cache, which run the stock forward.

    Returns:
        ``[B, L, D]``.
    """
    if cp_context is None:
        return stock_forward(module, hidden_states, *args, attention_mask=attention_mask, **kwargs)
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    qkv, b, a, project_z = type(module).hf_cp_family.project(module, hidden_states)
    qkv = causal_conv(qkv, module.conv1d.weight.squeeze(1), cp_context, activation=module.activation)
    q, k, v = qkv.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    inputs = SpanInputs(
        q.unflatten(-1, (-1, module.head_k_dim)),
        k.unflatten(-1, (-1, module.head_k_dim)),
        v.unflatten(-1, (-1, module.head_v_dim)),
        gate(a, module.A_log, module.dt_bias),
        b.sigmoid(),
    )
    finish = _MODES[cp_context.config.linear_mode](inputs, cp_context)
    z = project_z()
    return _finish_layer(module, finish(), z)


def _finish_layer(module: Any, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Gated norm and output projection: ``[B, L, HV, V]`` and the gate ``[B, L, HV * V]`` to ``[B, L, D]``."""
    batch, length, heads, dim = output.shape
    normed = module.norm(output.reshape(-1, dim), z.reshape(-1, dim))
    return module.out_proj(normed.reshape(batch, length, heads * dim))
