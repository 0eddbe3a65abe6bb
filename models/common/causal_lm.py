"""The language-model head of a patched model: the loss of the whole batch from each rank's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_cp.loss import IGNORE_INDEX, TrainerItemCount, scaled_loss, shift_labels, token_loss_sum

from . import lm_head
from .signature import CallArguments
from .text_model import is_cached, open_context, pop_as_tuple, whole_sequence, whole_states


@dataclass(frozen=True)
class CallOptions:
    """How a patched head treats one call, as the keyword ``cp_options``.

    Args:
        return_logits: logits of the whole sequence beside a loss; ``None``: in evaluation, not in training.
    """

    return_logits: bool | None = None


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
    decoder = module.model
    want_logits = not training or (not module.training if options.return_logits is None else options.return_logits)
    cp, whole = open_context(
        decoder,
        arguments,
        labels=labels if shifted is None else shifted,
        kind=1 + 2 * (labels is not None) + 4 * (shifted is not None) + 8 * want_logits,
        refusal=refusal,
        num_items_in_batch=num_items.count if isinstance(num_items, TrainerItemCount) else num_items,
        logits_to_keep=keep,
    )
    targets = shift_labels(labels) if labels is not None and shifted is None else shifted
    output = decoder(**arguments.replace(cp_opened=(cp, whole)))
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
            local_sum = lm_head.loss_sum(module.lm_head, hidden, local_targets)
        else:
            local_sum = token_loss_sum(local_logits, local_targets)
        valid = (targets != IGNORE_INDEX).sum()
        loss = scaled_loss(local_sum, valid, cp.mesh, num_items_in_batch=num_items)
    states = output.get("hidden_states")
    if states is not None:
        states = whole_states(states, cp)
    result = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=states)
    return result.to_tuple() if as_tuple else result


def _keeps_some(keep: int | torch.Tensor | None) -> bool:
    return isinstance(keep, torch.Tensor) or bool(keep)


def _select(x: torch.Tensor, keep: int | torch.Tensor | None) -> torch.Tensor:
    """The positions that ``logits_to_keep`` asks for: the last ``keep``, or the given ones; all for 0."""
    if not _keeps_some(keep):
        return x
    return x[:, slice(-keep, None) if isinstance(keep, int) else keep]
