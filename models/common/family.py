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
        multimodal_lms: classes with a language-model head over a multimodal backbone.
        multimodal_backbones: classes that merge images and videos into the embeddings of a ``language_model``, one of
            the backbones.
        vision_towers: what those run on images and videos.
        token_classifiers: classes with a ``score`` for each token.
        sequence_classifiers: classes with a ``score`` for each row's last token.
        attention: full-attention class; takes part through its attention function.
        gated_delta_net: linear-attention class.
        eager_attention: the family's own attention function, used for ``attn_implementation="eager"``.
        project: input projections of a Gated DeltaNet layer.
        output: what a head returns; with ``aux_loss`` and ``router_logits`` where the family has experts.
        multimodal_output: what a multimodal head returns.
    """

    name: str
    causal_lms: tuple[type[nn.Module], ...]
    backbones: tuple[type[nn.Module], ...]
    attention: type[nn.Module]
    gated_delta_net: type[nn.Module]
    eager_attention: Callable[..., Any]
    project: Callable[[Any, torch.Tensor], Projections]
    output: type[Any] = CausalLMOutputWithPast
    multimodal_lms: tuple[type[nn.Module], ...] = ()
    multimodal_backbones: tuple[type[nn.Module], ...] = ()
    vision_towers: tuple[type[nn.Module], ...] = ()
    multimodal_output: type[Any] | None = None
    token_classifiers: tuple[type[nn.Module], ...] = ()
    sequence_classifiers: tuple[type[nn.Module], ...] = ()

    @property
    def models(self) -> tuple[type[nn.Module], ...]:
        """Every class that can be patched."""
        heads = self.causal_lms + self.multimodal_lms + self.token_classifiers + self.sequence_classifiers
        return heads + self.backbones + self.multimodal_backbones

    @property
    def language_models(self) -> tuple[type[nn.Module], ...]:
        """Classes that compute a language-model loss."""
        return self.causal_lms + self.multimodal_lms

    @property
    def has_experts(self) -> bool:
        """Whether the family's decoders route tokens to experts and can return the router's logits."""
        return "router_logits" in self.output.__dataclass_fields__


def newest(module: Any, *names: str) -> Any:
    """The first of these names that a module of transformers has; names change between releases."""
    return next(getattr(module, name) for name in names if hasattr(module, name))
