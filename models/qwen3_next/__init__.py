"""Qwen3-Next text models."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_next import modeling_qwen3_next as stock

from ..common.family import Family, Projections


def project(module: Any, hidden_states: torch.Tensor) -> Projections:
    """``in_proj_qkvz`` and ``in_proj_ba``, whose outputs are interleaved by key head; z comes with q, k and v."""
    q, k, v, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    )
    qkv = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    return Projections(qkv, b, a, lambda: z.flatten(2))


FAMILY = Family(
    name="Qwen3-Next",
    causal_lms=(stock.Qwen3NextForCausalLM,),
    backbones=(stock.Qwen3NextModel,),
    attention=stock.Qwen3NextAttention,
    gated_delta_net=stock.Qwen3NextGatedDeltaNet,
    eager_attention=stock.eager_attention_forward,
    project=project,
    output=MoeCausalLMOutputWithPast,
    token_classifiers=(stock.Qwen3NextForTokenClassification,),
    sequence_classifiers=(stock.Qwen3NextForSequenceClassification,),
)
