"""The head that TRL puts on a model, over a sharded sequence: scores of each token instead of logits.

``trl.trainer.utils.add_fused_lm_head`` (trl 1.16) sets an instance ``forward``. Called with ``fused_lm_head=True``, it
runs the backbone and scores the labels it is given, with ``shift_labels`` as they are. Here it gets this rank's tokens
and labels, and its scores are gathered: one number of each kind for each token.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
from torch import nn

from hf_cp.class_swap import is_patched, stock_class
from hf_cp.loss import IGNORE_INDEX, TrainerItemCount, shift_labels

from .multimodal import language_model
from .randomness import own_randomness
from .router import balance_loss
from .signature import CallArguments
from .text_model import open_context, whole_sequence

_KEYWORD = "fused_lm_head"
_SCORES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def serve_fused_head(model: nn.Module) -> None:
    """Put the exchange around the fused head of each patched model inside ``model``; repeating does nothing.

    Raises:
        ValueError: the head is Liger's: it computes the loss of one rank's tokens as if they were all.
    """
    for module in model.modules():
        forward = module.__dict__.get("forward")
        family = getattr(type(module), "hf_cp_family", None)
        if forward is None or family is None or stock_class(module) not in family.language_models:
            continue
        inner = getattr(forward, "__func__", forward)
        if getattr(inner, "__module__", "").startswith("liger_kernel.") and module.__dict__["_hf_cp"].mesh.cp_size > 1:
            raise ValueError(
                f"use_liger_kernel gives {type(module).__name__} a forward with a loss of its own, which does not know "
                'of cp_size: pass liger_kernel_config={"fused_linear_cross_entropy": False}'
            )
        if _KEYWORD in inspect.signature(inner, follow_wrapped=False).parameters and not hasattr(
            inner, "_hf_cp_serves"
        ):
            module.__dict__["forward"] = types.MethodType(_served(forward), module)


def _served(fused: Any) -> Any:
    @functools.wraps(fused)
    def forward(module: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head and is_patched(module) and module._hf_cp.mesh.cp_size > 1:
            return _score(module, fused, args, kwargs)
        return fused(*args, fused_lm_head=fused_lm_head, **kwargs)

    forward._hf_cp_serves = True  # pyright: ignore[reportAttributeAccessIssue]
    return forward


def _score(module: Any, fused: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole batch in on every rank, scores of the whole sequence out, equal on all ranks.

    Args:
        kwargs: with ``labels`` ``[B, T]``, or ``shift_labels`` ``[B, T]``.

    Returns:
        As TRL's head: scores ``[B, T - 1]``, or ``[B, T]`` for labels that the caller shifted.

    Raises:
        ValueError: the same line on every rank of the group, before any message whose size depends on data.
    """
    arguments = CallArguments(stock_class(module).forward, args, kwargs)
    labels, shifted = arguments.pop("labels"), arguments.pop("shift_labels")
    num_items = arguments.pop("num_items_in_batch")
    text_config = module.config.get_text_config()
    routing = arguments.pop("output_router_logits")
    routing = getattr(text_config, "output_router_logits", False) if routing is None else routing
    refusal = "labels=None: the fused head scores labels; give labels or shift_labels" if labels is shifted else None
    cp, whole = open_context(
        language_model(module.model),
        arguments,
        labels=labels if shifted is None else shifted,
        shifted=shifted is not None,
        vocabulary=getattr(module.lm_head, "out_features", None),
        kind=64 + 2 * (shifted is None) + 16 * bool(routing),
        refusal=refusal,
        num_items_in_batch=num_items.count if isinstance(num_items, TrainerItemCount) else num_items,
    )
    targets = shift_labels(labels) if shifted is None else shifted
    routers: list[Any] = []
    local = arguments.replace(shift_labels=cp.layout.shard(targets, 1, IGNORE_INDEX), cp_opened=(cp, whole))
    if routing:  # what TRL's head would make of the router's logits is the balance of one shard
        local |= {"output_router_logits": False, "cp_routers": routers}
    with own_randomness(module.lm_head, cp.mesh):
        output = fused(fused_lm_head=True, **local)
    names = [name for name in _SCORES if getattr(output, name) is not None]
    scores = torch.stack([getattr(output, name).float() for name in names], dim=-1)
    scores = whole_sequence(scores, cp)[:, : None if shifted is not None else -1]
    for name, values in zip(names, scores.unbind(-1), strict=True):
        dtype = getattr(output, name).dtype
        output[name] = values if dtype.is_floating_point else values.detach().to(dtype)
    count = output.label_mask.sum().clamp(min=1) if num_items is None else num_items
    output["loss"] = -output.log_probs.sum() / count
    if routing:
        kept = whole.attention_mask if whole.attention_mask is not None else scores.new_ones(whole.inputs.shape[:2])
        output["aux_loss"] = balance_loss(
            routers, cp.layout.shard(kept, 1, 0), cp.mesh, experts_per_token=text_config.num_experts_per_tok
        )
        output["loss"] = output.loss + getattr(text_config, "router_aux_loss_coef", 0.0) * output.aux_loss
    return output
