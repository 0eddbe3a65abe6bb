"""The language-model head of a patched model: the loss of the whole batch from each rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils

from hf_cp.class_swap import stock_class
from hf_cp.loss import IGNORE_INDEX, TrainerItemCount, scaled_loss, shift_labels, token_loss_sum

from . import lm_head
from .router import balance_loss
from .signature import CallArguments
from .text_model import is_cached, open_context, pop_as_tuple, whole_output, whole_sequence

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
        if family is not None and stock_class(module) in family.causal_lms:
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
            return stock_forward(module, **arguments.replace())
        refusal = "use_cache: a KV cache cannot be kept in a sharded forward with labels; call with use_cache=False"
    for name in ("labels", "shift_labels"):
        arguments.pop(name)
    num_items, keep = arguments.pop("num_items_in_batch"), arguments.pop("logits_to_keep")
    as_tuple = pop_as_tuple(module, arguments)
    family, decoder = type(module).hf_cp_family, module.model
    want_routing = family.has_experts and _flag(
        arguments.get("output_router_logits"), module.config.output_router_logits
    )
    routing = {"output_router_logits": want_routing} if family.has_experts else {}
    want_logits = not training or (not module.training if options.return_logits is None else options.return_logits)
    cp, whole = open_context(
        decoder,
        arguments,
        labels=labels if shifted is None else shifted,
        kind=1 + 2 * (labels is not None) + 4 * (shifted is not None) + 8 * want_logits + 16 * want_routing,
        refusal=refusal,
        num_items_in_batch=num_items.count if isinstance(num_items, TrainerItemCount) else num_items,
        logits_to_keep=keep,
    )
    targets = shift_labels(labels) if labels is not None and shifted is None else shifted
    output = decoder(**arguments.replace(cp_opened=(cp, whole), **routing))
    hidden = output.last_hidden_state
    loss = logits = local_logits = None
    if want_logits and not (targets is None and _keeps_some(keep)):
        local_logits = module.lm_head(hidden)
        logits = _select(whole_sequence(local_logits, cp), keep)
    elif want_logits:
        logits = module.lm_head(_select(whole_sequence(hidden, cp), keep))
    if targets is not None:
        local_targets = cp.layout.shard(targets.to(hidden.device), 1, IGNORE_INDEX)
        if local_logits is None:
            local_sum = lm_head.loss_sum(module.lm_head, hidden, local_targets, options.label_smoothing)
        else:
            local_sum = token_loss_sum(local_logits, local_targets, options.label_smoothing)
        valid = (targets != IGNORE_INDEX).sum()
        loss = scaled_loss(local_sum, valid, cp.mesh, num_items_in_batch=num_items)
    recorded = {}
    if want_routing:
        kept = whole.attention_mask if whole.attention_mask is not None else hidden.new_ones(whole.inputs.shape[:2])
        aux_loss = balance_loss(
            output.router_logits,
            cp.layout.shard(kept, 1, 0),
            cp.mesh,
            experts_per_token=module.num_experts_per_tok,
        )
        if loss is not None and not options.label_smoothing:
            # Trainer multiplies by the world size, which only the item count takes back.
            multiplied = isinstance(num_items, TrainerItemCount) and num_items.across_devices
            share = cp.mesh.cp_size if multiplied else 1
            loss = loss + module.router_aux_loss_coef / share * aux_loss
        recorded["aux_loss"] = aux_loss
    whole_output(output, cp)
    for name in ("hidden_states", "router_logits"):
        if output.get(name) is not None:
            recorded[name] = output[name]
    result = family.output(loss=loss, logits=logits, **recorded)
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
