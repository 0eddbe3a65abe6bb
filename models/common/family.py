"""What a model family declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_cp.kernels.a2a_gemm import Backend


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
class HeadProjections:
    """Input projections of a Gated DeltaNet layer whose results are exchanged by the operator that computes them.

    Args:
        names: the linear layers whose weights ``wide`` reads.
        wide: ``(module, hidden_states, operands, backend)`` to q, k, v and z of all tokens, ``[B, W * L, width / W]``:
            this rank's heads. ``operands(x, *weights)`` casts as a linear layer would.
        narrow: ``(module, hidden_states)`` to b and a of this rank's tokens, ``[B, L, HV]``.
    """

    names: tuple[str, ...]
    wide: Callable[[Any, torch.Tensor, Callable[..., list[torch.Tensor]], Backend], tuple[torch.Tensor, ...]]
    narrow: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


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
        rotary: applies a rotary embedding to q and k.
        project_to_heads: of a Gated DeltaNet layer, with the exchange: see `HeadProjections`.
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
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    project_to_heads: HeadProjections
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
