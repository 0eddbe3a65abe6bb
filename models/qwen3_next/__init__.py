"""Qwen3-Next text models."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_next import modeling_qwen3_next as stock

from hf_cp.kernels.a2a_gemm import Backend, gemm_a2a

from ..common.family import Family, HeadProjections, Projections


def project(module: Any, hidden_states: torch.Tensor) -> Projections:
    """``in_proj_qkvz`` and ``in_proj_ba``, whose outputs are interleaved by key head; z comes with q, k and v."""
    q, k, v, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    )
    qkv = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    return Projections(qkv, b, a, lambda: z.flatten(2))


def project_wide(module: Any, hidden_states: torch.Tensor, operands: Any, backend: Backend) -> tuple[torch.Tensor, ...]:
    """``in_proj_qkvz``, whose key heads are q, k and all that belongs to them of v and z, side by side."""
    x, weight = operands(hidden_states, module.in_proj_qkvz.weight)
    key, value = module.head_k_dim, module.head_v_dim * module.num_v_heads // module.num_k_heads
    (heads,) = gemm_a2a(x, [weight], 2 * (key + value), backend=backend)
    return tuple(part.flatten(2) for part in heads.split((key, key, value, value), dim=3))


def project_narrow(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``in_proj_ba``, interleaved by key head."""
    pairs = module.in_proj_ba(hidden_states).unflatten(2, (module.num_k_heads, 2, -1))
    b, a = pairs.unbind(3)
    return b.flatten(2), a.flatten(2)


FAMILY = Family(
    name="Qwen3-Next",
    causal_lms=(stock.Qwen3NextForCausalLM,),
    backbones=(stock.Qwen3NextModel,),
    attention=stock.Qwen3NextAttention,
    gated_delta_net=stock.Qwen3NextGatedDeltaNet,
    eager_attention=stock.eager_attention_forward,
    project=project,
    rotary=stock.apply_rotary_pos_emb,
    project_to_heads=HeadProjections(("in_proj_qkvz",), project_wide, project_narrow),
    output=MoeCausalLMOutputWithPast,
    token_classifiers=(stock.Qwen3NextForTokenClassification,),
    sequence_classifiers=(stock.Qwen3NextForSequenceClassification,),
)
