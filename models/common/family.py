"""What a model family declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast


class Projections(NamedTuple):
    """Input projections of one Gated DeltaNet layer, on this rank's tokens.

    Args:
        qkv: ``[B, L, 2 * H * K + HV * V]``, before the convolution.
        b, a: ``[B, L, HV]``, before sigmoid and softplus.
        project_z: computes the output gate ``[B, L, HV * V]``; called while a state is under way.
    """

    qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    project_z: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """The module classes of one model family, and the two things that families do differently.

    Args:
        causal_lms: classes with a language-model head.
        backbones: classes that run the decoder layers.
        attention: full-attention class; takes part through its attention function.
        gated_delta_net: linear-attention class.
        eager_attention: the family's own attention function, used for ``attn_implementation="eager"``.
        project: input projections of a Gated DeltaNet layer.
        output: what a head returns; with ``aux_loss`` and ``router_logits`` where the family has experts.
    """

    name: str
    causal_lms: tuple[type[nn.Module], ...]
    backbones: tuple[type[nn.Module], ...]
    attention: type[nn.Module]
    gated_delta_net: type[nn.Module]
    eager_attention: Callable[..., Any]
    project: Callable[[Any, torch.Tensor], Projections]
    output: type[Any] = CausalLMOutputWithPast

    @property
    def has_experts(self) -> bool:
        """Whether the family's decoders route tokens to experts and can return the router's logits."""
        return "router_logits" in self.output.__dataclass_fields__
