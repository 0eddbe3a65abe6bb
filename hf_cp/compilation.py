"""What `torch.compile` must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Keep a function, and all that it calls, out of compiled graphs; the rest of a model is compiled around it.

    For what exchanges messages: tracing it would take minutes, and a graph may not reorder what ranks send to one
    another.
    """
    return cast(F, torch.compiler.disable(function))
