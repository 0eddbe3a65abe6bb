"""Qwen3.5 with a mixture of experts: text models and those that see images and videos."""

from __future__ import annotations

from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

from ..common.family import Family
from ..qwen3_5 import TO_HEADS, project

FAMILY = Family(
    name="Qwen3.5-MoE",
    causal_lms=(stock.Qwen3_5MoeForCausalLM,),
    backbones=(stock.Qwen3_5MoeTextModel,),
    attention=stock.Qwen3_5MoeAttention,
    gated_delta_net=stock.Qwen3_5MoeGatedDeltaNet,
    eager_attention=stock.eager_attention_forward,
    project=project,
    rotary=stock.apply_rotary_pos_emb,
    project_to_heads=TO_HEADS,
    output=MoeCausalLMOutputWithPast,
    multimodal_lms=(stock.Qwen3_5MoeForConditionalGeneration,),
    multimodal_backbones=(stock.Qwen3_5MoeModel,),
    vision_towers=(stock.Qwen3_5MoeVisionModel,),
    multimodal_output=stock.Qwen3_5MoeCausalLMOutputWithPast,
)
