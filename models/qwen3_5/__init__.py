"""Qwen3.5, dense: text models and those that see images and videos."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from ..common.family import Family, Projections, newest


def project(module: Any, hidden_states: torch.Tensor) -> Projections:
    """``in_proj_qkv``, ``in_proj_b`` and ``in_proj_a`` at once, ``in_proj_z`` when asked. Called as modules."""
    return Projections(
        module.in_proj_qkv(hidden_states),
        module.in_proj_b(hidden_states),
        module.in_proj_a(hidden_states),
        lambda: module.in_proj_z(hidden_states),
    )


FAMILY = Family(
    name="Qwen3.5",
    causal_lms=(stock.Qwen3_5ForCausalLM,),
    backbones=(stock.Qwen3_5TextModel,),
    attention=stock.Qwen3_5Attention,
    gated_delta_net=stock.Qwen3_5GatedDeltaNet,
    eager_attention=stock.eager_attention_forward,
    project=project,
    multimodal_lms=(stock.Qwen3_5ForConditionalGeneration,),
    multimodal_backbones=(stock.Qwen3_5Model,),
    vision_towers=(stock.Qwen3_5VisionModel,),
    multimodal_output=newest(stock, "MultimodalCausalLMOutputWithPast", "Qwen3_5CausalLMOutputWithPast"),
    token_classifiers=(stock.Qwen3_5ForTokenClassification,),
    sequence_classifiers=(stock.Qwen3_5TextForSequenceClassification, stock.Qwen3_5ForSequenceClassification),
)
