"""Classification heads of a patched model: scores from each rank's tokens, and the stock loss of all scores."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput

from hf_cp.class_swap import stock_class
from hf_cp.loss import TrainerItemCount, copies_added_up

from .multimodal import language_model
from .randomness import own_randomness
from .signature import CallArguments
from .text_model import is_cached, open_context, pop_as_tuple, unsharded, whole_output, whole_sequence


def forward(module: Any, stock_forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Whole batch in on every rank; the stock loss and whole logits out, equal on all ranks.

    Scores are few numbers a token. Every rank gets those of the whole sequence and computes the stock loss of them,
    alike: the mean of the ranks' gradients is the gradient of one device.

    Args:
        labels: ``[B, T]`` of a token classifier; ``[B]`` or ``[B, num_labels]`` of a sequence classifier.
        num_items_in_batch: as the stock forward, which means over this batch whatever the count.

    Returns:
        As the stock forward: logits ``[B, T, num_labels]``, or ``[B, num_labels]`` of each row's last token.

    Raises:
        ValueError: the same line on every rank of the group, before any message whose size depends on data.
    """
    arguments = CallArguments(stock_forward, args, kwargs)
    by_token = stock_class(module) in type(module).hf_cp_family.token_classifiers
    arguments.pop("cp_options")
    labels, num_items = arguments.pop("labels"), arguments.pop("num_items_in_batch")
    refusal = None
    if is_cached(arguments):
        if module._hf_cp.mesh.cp_size == 1 or labels is None:
            return unsharded(module, stock_forward, arguments, labels=labels)
        refusal = "use_cache: a KV cache cannot be kept in a sharded forward with labels; call with use_cache=False"
    as_tuple = pop_as_tuple(module, arguments)
    body = getattr(module, module.base_model_prefix)
    cp, whole = open_context(
        language_model(body),
        arguments,
        labels=labels,
        labels_by_row=not by_token,
        kind=32 + 2 * (labels is not None),
        refusal=refusal or (None if by_token else _padding_unknown(module, arguments)),
        num_items_in_batch=num_items.count if isinstance(num_items, TrainerItemCount) else num_items,
    )
    output = body(**arguments.replace(cp_opened=(cp, whole), return_dict=True))
    with own_randomness(module, cp.mesh):
        hidden = output.last_hidden_state
        scores = module.score(module.dropout(hidden) if by_token else hidden)
    scores = whole_sequence(scores, cp)
    loss, logits = None, scores if by_token else _of_last_tokens(module, scores, arguments.get("input_ids"))
    if labels is not None and by_token:
        loss = module.loss_function(logits, labels, module.config)
    elif labels is not None:
        loss = module.loss_function(logits=scores, labels=labels, pooled_logits=logits, config=module.config)
    if loss is not None:
        loss = loss / copies_added_up(num_items, cp.mesh)
    whole_output(output, cp)
    output_class = TokenClassifierOutput if by_token else SequenceClassifierOutputWithPast
    result = output_class(loss=loss, logits=logits, hidden_states=output.hidden_states)
    return result.to_tuple() if as_tuple else result


def _pad_token_id(module: Any) -> int | None:
    return module.config.get_text_config().pad_token_id


def _padding_unknown(module: Any, arguments: CallArguments) -> str | None:
    inputs = arguments.get("input_ids")
    inputs = arguments.get("inputs_embeds") if inputs is None else inputs
    if inputs is None or inputs.shape[0] == 1 or _pad_token_id(module) is not None:
        return None
    return (
        f"pad_token_id=None with batch size {inputs.shape[0]}: a row's last token is unknown; set "
        "model.config.pad_token_id, or use batch size 1"
    )


def _of_last_tokens(module: Any, scores: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
    """Scores ``[B, T, C]`` at each row's last token that is not padding, wherever the padding is: ``[B, C]``."""
    pad = _pad_token_id(module)
    if pad is None or input_ids is None:
        return scores[:, -1]
    index = torch.arange(input_ids.shape[1], device=scores.device)
    last = (index * (input_ids != pad).to(index)).argmax(-1)
    return scores[torch.arange(scores.shape[0], device=scores.device), last]
