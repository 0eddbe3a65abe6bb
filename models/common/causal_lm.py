"""The language-model head of a patched model: the loss of the whole batch from each rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils

from hf_cp.class_swap import stock_class
from hf_cp.loss import (
    IGNORE_INDEX,
    TrainerItemCount,
    copies_added_up,
    scaled_loss,
    shift_labels,
    token_loss_sum,
)

from . import lm_head
from .multimodal import language_model
from .randomness import own_randomness
from .router import balance_loss
from .signature import CallArguments
from .text_model import is_cached, open_context, pop_as_tuple, unsharded, whole_output, whole_sequence

# Since transformers 5.24 a tensor of two dimensions selects by row, and may be a mask.
_STOCK_SELECT: Callable[..., torch.Tensor] | None = getattr(modeling_utils, "slice_logits_to_keep", None)


@dataclass(frozen=True)
class CallOptions:
    """How a patched head treats one call, as the keyword ``cp_options``.

    Args:
        return_logits: logits of the whole sequence beside a loss; ``None``: in evaluation, not in training.
        label_smoothing: share of a label that is spread evenly over the vocabulary, in [0, 1). As with Trainer's own
            smoother, the router's loss is then no part of the loss.
    """

    return_logits: bool | None = None
    label_smoothing: float = 0.0


def language_model_head(model: nn.Module) -> nn.Module | None:
    """The patched module inside ``model`` that computes a language-model loss, or ``None``."""
    for module in model.modules():
        family = getattr(type(module), "hf_cp_family", None)
        if family is not None and stock_class(module) in family.language_models:
            return module
    return None


def forward(module: Any, stock_forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Whole batch in on every rank; the loss of the whole batch out, equal on all ranks.

    Args:
        labels: ``[B, T]``, shifted here, or ``shift_labels`` ``[B, T]``, already shifted.
        num_items_in_batch: number of labels of the whole optimizer step; ``None`` for the mean over this batch.
        cp_options: see `CallOptions`.

    Returns:
        As the stock forward. In training with labels the logits are left out: they are the largest tensor of all.
        Without labels, or in evaluation, logits and hidden states are whole and in order.

    Raises:
        ValueError: the same line on every rank of the group, before any message whose size depends on data.
    """
    arguments = CallArguments(stock_forward, args, kwargs)
    options = arguments.pop("cp_options") or CallOptions()
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    training = labels is not None or shifted is not None
    refusal = None
    if is_cached(arguments):
        if module._hf_cp.mesh.cp_size == 1 or not training:
            return unsharded(module, stock_forward, arguments)
        refusal = "use_cache: a KV cache cannot be kept in a sharded forward with labels; call with use_cache=False"
    for name in ("labels", "shift_labels"):
        arguments.pop(name)
    num_items, keep = arguments.pop("num_items_in_batch"), arguments.pop("logits_to_keep")
    as_tuple = pop_as_tuple(module, arguments)
    family, text_config = type(module).hf_cp_family, module.config.get_text_config()
    want_routing = family.has_experts and _flag(arguments.get("output_router_logits"), text_config.output_router_logits)
    routing = {"output_router_logits": want_routing} if family.has_experts else {}
    want_logits = not training or (not module.training if options.return_logits is None else options.return_logits)
    cp, whole = open_context(
        language_model(module.model),
        arguments,
        labels=labels if shifted is None else shifted,
        shifted=shifted is not None,
        vocabulary=getattr(module.lm_head, "out_features", None),
        kind=1 + 2 * (labels is not None) + 4 * (shifted is not None) + 8 * want_logits + 16 * want_routing,
        refusal=refusal,
        num_items_in_batch=num_items.count if isinstance(num_items, TrainerItemCount) else num_items,
        logits_to_keep=keep,
    )
    targets = shift_labels(labels) if labels is not None and shifted is None else shifted
    output = module.model(**arguments.replace(cp_opened=(cp, whole), return_dict=True, **routing))
    hidden = output.last_hidden_state
    loss = logits = local_logits = None
    if want_logits and targets is None and _keeps_some(keep):
        logits = module.lm_head(_select(whole_sequence(hidden, cp), keep))
    elif want_logits:
        with own_randomness(module.lm_head, cp.mesh):
            local_logits = module.lm_head(hidden)
        logits = _select(whole_sequence(local_logits, cp), keep)
    if targets is not None:
        local_targets = cp.layout.shard(targets.to(hidden.device), 1, IGNORE_INDEX)
        if local_logits is not None:
            local_sum = token_loss_sum(local_logits, local_targets, options.label_smoothing)
        else:
            with own_randomness(module.lm_head, cp.mesh):
                local_sum = lm_head.loss_sum(module.lm_head, hidden, local_targets, options.label_smoothing)
        valid = (targets != IGNORE_INDEX).sum()
        loss = scaled_loss(local_sum, valid, cp.mesh, num_items_in_batch=num_items)
    recorded = {}
    if want_routing:
        kept = whole.attention_mask if whole.attention_mask is not None else hidden.new_ones(whole.inputs.shape[:2])
        aux_loss = balance_loss(
            output.router_logits,
            cp.layout.shard(kept, 1, 0),
            cp.mesh,
            experts_per_token=text_config.num_experts_per_tok,
        )
        if loss is not None and not options.label_smoothing:
            # Trainer multiplies by the world size, which only the item count takes back.
            coefficient = getattr(module, "router_aux_loss_coef", text_config.router_aux_loss_coef)
            loss = loss + coefficient / copies_added_up(num_items, cp.mesh) * aux_loss
        recorded["aux_loss"] = aux_loss
    whole_output(output, cp)
    multimodal = stock_class(module) in family.multimodal_lms
    output_class = family.multimodal_output if multimodal else family.output
    names = {field.name for field in fields(output_class)} - {"last_hidden_state"}
    recorded |= {name: value for name, value in output.items() if name in names}
    result = output_class(loss=loss, logits=logits, **recorded)
    return result.to_tuple() if as_tuple else result


def _flag(given: bool | None, default: bool) -> bool:
    return default if given is None else given


def _keeps_some(keep: int | torch.Tensor | None) -> bool:
    return isinstance(keep, torch.Tensor) or bool(keep)


def _select(x: torch.Tensor, keep: int | torch.Tensor | None) -> torch.Tensor:
    """The positions that ``logits_to_keep`` asks for: the last ``keep``, or the given ones; all for 0."""
    if not _keeps_some(keep):
        return x
    if _STOCK_SELECT is not None:
        return _STOCK_SELECT(x, keep)
    return x[:, slice(-keep, None) if isinstance(keep, int) else keep]
