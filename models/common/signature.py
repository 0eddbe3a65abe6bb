"""Arguments of a stock forward by name, however they were passed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

# The cache argument was renamed between transformers 5.17 and 5.24; both spellings are still accepted.
_CACHE_NAMES = ("cache", "past_key_values")


@functools.lru_cache(maxsize=64)
def _positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds)[1:]


class CallArguments:
    """The arguments of one call of ``forward(self, *args, **kwargs)``, without ``self``."""

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = _positional_names(forward)
        if len(args) > len(names):
            raise TypeError(f"forward takes {len(names)} positional arguments but {len(args)} were given")
        self._values = dict(zip(names, args, strict=False)) | kwargs

    def get(self, name: str) -> Any:
        """The argument, or ``None`` where it was left out."""
        return self._values.get(name)

    def pop(self, name: str) -> Any:
        """The argument, or ``None``; the call no longer holds it."""
        return self._values.pop(name, None)

    @property
    def cache(self) -> Any:
        """The KV cache under either of its names, or ``None``."""
        return next((self._values[name] for name in _CACHE_NAMES if self._values.get(name) is not None), None)

    def replace(self, **changes: Any) -> dict[str, Any]:
        """All arguments as keywords, some of them replaced."""
        return self._values | changes
