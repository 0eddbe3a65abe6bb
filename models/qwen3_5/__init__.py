"""Qwen3.5, dense: text models and those that see images and videos."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from hf_cp.kernels.a2a_gemm import Backend, gemm_a2a

from ..common.family import Family, HeadProjections, Projections, newest


def project(module: Any, hidden_states: torch.Tensor) -> Projections:
    """``in_proj_qkv``, ``in_proj_b`` and ``in_proj_a`` at once, ``in_proj_z`` when asked. Called as modules."""
    return Projections(
        module.in_proj_qkv(hidden_states),
        module.in_proj_b(hidden_states),
        module.in_proj_a(hidden_states),
        lambda: module.in_proj_z(hidden_states),
    )


def project_wide(module: Any, hidden_states: torch.Tensor, operands: Any, backend: Backend) -> tuple[torch.Tensor, ...]:
    """``in_proj_qkv``, its three parts as operands of one product, and ``in_proj_z``."""
    x, qkv, z = operands(hidden_states, module.in_proj_qkv.weight, module.in_proj_z.weight)
    # Heads of q and k may differ in width from those of v; whole heads of either are whole units.
    unit = math.gcd(module.head_k_dim, module.head_v_dim)
    parts = qkv.split((module.key_dim, module.key_dim, module.value_dim))
    exchanged = (*gemm_a2a(x, parts, unit, backend=backend), *gemm_a2a(x, [z], unit, backend=backend))
    return tuple(part.flatten(2) for part in exchanged)


def project_narrow(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``in_proj_b`` and ``in_proj_a``."""
    return module.in_proj_b(hidden_states), module.in_proj_a(hidden_states)


TO_HEADS = HeadProjections(("in_proj_qkv", "in_proj_z"), project_wide, project_narrow)

FAMILY = Family(
    name="Qwen3.5",
    causal_lms=(stock.Qwen3_5ForCausalLM,),
    backbones=(stock.Qwen3_5TextModel,),
    attention=stock.Qwen3_5Attention,
    gated_delta_net=stock.Qwen3_5GatedDeltaNet,
    eager_attention=stock.eager_attention_forward,
    project=project,
    rotary=stock.apply_rotary_pos_emb,
    project_to_heads=TO_HEADS,
    multimodal_lms=(stock.Qwen3_5ForConditionalGeneration,),
    multimodal_backbones=(stock.Qwen3_5Model,),
    vision_towers=(stock.Qwen3_5VisionModel,),
    multimodal_output=newest(stock, "MultimodalCausalLMOutputWithPast", "Qwen3_5CausalLMOutputWithPast"),
    token_classifiers=(stock.Qwen3_5ForTokenClassification,),
    sequence_classifiers=(stock.Qwen3_5TextForSequenceClassification, stock.Qwen3_5ForSequenceClassification),
)
