"""Full attention of a patched model: the stock forward, with the exchange around its attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_cp.autocast import autocast_dtype
from hf_cp.compilation import outside_graphs
from hf_cp.context import CpContext
from hf_cp.modes import attention as modes
from hf_cp.modes import segments
from hf_cp.regions import region

IMPLEMENTATION = "hf_cp"
# Attention functions that `attention_mode="allgather"` can align at the last key.
ALLGATHER_IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


class _ConfigView:
    """The model's config, except that it names our attention function. The config itself stays as it is."""

    _attn_implementation = IMPLEMENTATION

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while being copied
            raise AttributeError(name)
        return getattr(self._config, name)


class _ModuleView:
    """An attention module as its attention function sees it: with the true config, and this rank's heads only."""

    def __init__(self, module: nn.Module, num_key_value_groups: int) -> None:
        self._module = module
        self.config = module.__dict__["config"]
        self.num_key_value_groups = num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _config_property() -> property:
    """A class attribute ``config`` for patched attention classes: stock code reads the view, writes go through."""

    def read(module: nn.Module) -> Any:
        return module.__dict__[CONFIG_VIEW]

    def write(module: nn.Module, config: Any) -> None:
        module.__dict__["config"] = config
        show_config(module)

    return property(read, write)


CONFIG_PROPERTY = _config_property()
# Where the view is kept. Made while a compiler traces, it would be read through the property itself, for ever.
CONFIG_VIEW = "_hf_cp_config"


def show_config(module: nn.Module) -> None:
    """Make the view of a patched attention module's config."""
    module.__dict__[CONFIG_VIEW] = _ConfigView(module.__dict__["config"])


@outside_graphs
def attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cp_context: CpContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention function over a sharded sequence.

    Args:
        query, key, value: ``[B, heads, L, D]``, this rank's tokens after norm and rotary embedding.
        attention_mask: the mask of the *whole* sequence as the model's attention function wants it.
        cp_context: absent where nothing is sharded: then this is the stock call.

    Returns:
        ``[B, L, HQ, D]`` and ``None`` (the stock weights where nothing is sharded).
    """
    name, stock = _stock(module)
    if cp_context is None:
        return stock(_ModuleView(module, module.num_key_value_groups), query, key, value, attention_mask, **kwargs)
    dtype = autocast_dtype(query.device)
    if dtype is not None:  # the rotary embedding may have made fp32 of q and k; exchanges and segments take what comes
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with region("self_attn", module.layer_idx):
        if cp_context.mesh.cp_size == 1:
            return _attend(module, query, key, value, attention_mask, cp_context, **kwargs), None
        if cp_context.config.attention_mode == "ulysses":
            query, key, value = modes.sequence_to_heads(query, key, value, cp_context)
            output = _attend(module, query, key, value, attention_mask, cp_context, **kwargs)
            return modes.heads_to_sequence(output, cp_context), None
        key, value, mask = modes.gather_keys(key, value, attention_mask, name, cp_context)
        return _attend(module, query, key, value, mask, cp_context, **kwargs), None


@outside_graphs
def attend_to_all(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cp_context: CpContext,
    **kwargs: Any,
) -> torch.Tensor:
    """The model's own attention function where this rank has all tokens of some heads: no exchange.

    Args:
        query, key, value: ``[B, heads, T, D]``, query heads a multiple of the others.
        attention_mask: of the whole sequence, as the model's attention function wants it.

    Returns:
        ``[B, T, heads, D]``.
    """
    with region("self_attn", module.layer_idx):
        return _attend(module, query, key, value, attention_mask, cp_context, **kwargs)


def _stock(module: Any) -> tuple[str, Callable[..., Any]]:
    """The attention function that the model's config names, with its name."""
    name = module.__dict__["config"]._attn_implementation
    return name, ALL_ATTENTION_FUNCTIONS.get_interface(name, type(module).hf_cp_family.eager_attention)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cp: CpContext,
    **kwargs: Any,
) -> torch.Tensor:
    if cp.segments is not None:
        scale, dropout = kwargs["scaling"], kwargs.get("dropout", 0.0)
        return segments.attend(query, key, value, cp.segments, scale=scale, dropout=dropout)
    kwargs["position_ids"] = cp.position_ids
    view = _ModuleView(module, query.shape[1] // key.shape[1])
    return _stock(module)[1](view, query, key, value, mask, **kwargs)[0]


AttentionInterface.register(IMPLEMENTATION, attention_function)
