"""The multimodal decoder of a patched model: images and videos go into the whole sequence, which is then sharded."""

from __future__ import annotations

from typing import Any

from .signature import CallArguments
from .text_model import is_cached, open_context, pop_as_tuple, unsharded, whole_decoder_output


def language_model(body: Any) -> Any:
    """The module that runs the decoder layers: of a multimodal model its ``language_model``, else the model itself."""
    return getattr(body, "language_model", body)


def forward(module: Any, stock_forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Whole batch in, whole hidden states out; with a cache the stock forward.

    Every rank runs the vision tower on all images and videos, merges them into the embeddings of the whole sequence and
    computes its positions, as stock; the text decoder below keeps this rank's tokens. It is told how by the keyword
    ``cp_opened``, which a patched head gives, and then the hidden states stay local.
    """
    arguments = CallArguments(stock_forward, args, kwargs)
    if arguments.get("cp_opened") is not None:
        return stock_forward(module, **arguments.replace())
    if is_cached(arguments):
        return unsharded(module, stock_forward, arguments)
    as_tuple = pop_as_tuple(module, arguments)
    cp, whole = open_context(module.language_model, arguments)
    output = stock_forward(module, **arguments.replace(cp_opened=(cp, whole), return_dict=True))
    whole_decoder_output(output, cp)
    return output.to_tuple() if as_tuple else output


def vision_forward(
    module: Any, stock_forward: Any, *args: Any, cp_opened: Any = None, cp_routers: Any = None, **kwargs: Any
) -> Any:
    """The stock vision tower, which is not sharded; the multimodal decoder hands it all keywords that it was given."""
    return stock_forward(module, *args, **kwargs)
