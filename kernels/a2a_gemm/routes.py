"""Who holds what before and after an exchange: the shape arithmetic that every backend shares.

Names: W ranks, r this rank, B batch, S all tokens, Sl = S / W tokens of a rank, H heads, h heads of a rank, D head dim.

An exchange has two routes. `"to_heads"` trades a rank's tokens of all heads for all tokens of its heads,
`[B, Sl, H, D] -> [B, S, h, D]`; `"to_sequence"` is its inverse. Where heads are fewer than ranks, `W % H == 0` and
rank r holds a copy of head `r * H // W`: `to_heads` repeats, and its adjoint sums the copies.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Route = Literal["to_heads", "to_sequence"]
ROUTES: tuple[Route, ...] = ("to_heads", "to_sequence")


def opposite(route: Route) -> Route:
    """The route of the adjoint."""
    return "to_sequence" if route == "to_heads" else "to_heads"


def check_route(route: str) -> None:
    """Raise ValueError unless `route` is one of `ROUTES`."""
    if route not in ROUTES:
        raise ValueError(f"route={route!r} is not supported: choose one of {', '.join(map(repr, ROUTES))}")


def heads_per_rank(heads: int, world_size: int) -> int:
    """Heads that each rank holds: `heads / world_size`, or 1 where fewer heads than ranks are repeated.

    Raises:
        ValueError: neither divides the other.
    """
    if heads > 0 and heads % world_size == 0:
        return heads // world_size
    if heads > 0 and world_size % heads == 0:
        return 1
    raise ValueError(f"heads={heads} must divide or be divisible by the {world_size} ranks of the group")


def copies(heads: int, world_size: int) -> int:
    """How many ranks hold each head after `to_heads`: 1, or `world_size / heads` where heads are fewer than ranks."""
    return world_size * heads_per_rank(heads, world_size) // heads


def repeat_heads(x: Tensor, dim: int, count: int) -> Tensor:
    """Every head of `x` along `dim` repeated `count` times in place: heads `0 0 1 1` for a count of two."""
    return x if count == 1 else x.repeat_interleave(count, dim)


def sum_copies(x: Tensor, dim: int, count: int) -> Tensor:
    """The adjoint of `repeat_heads`: neighbouring groups of `count` heads along `dim` are added."""
    return x if count == 1 else x.unflatten(dim, (x.shape[dim] // count, count)).sum(dim + 1)


def split_tokens(tokens: int, world_size: int) -> int:
    """Tokens of a rank.

    Raises:
        ValueError: `tokens` not divisible by `world_size`.
    """
    if tokens % world_size:
        raise ValueError(f"tokens={tokens} must be divisible by the {world_size} ranks of the group: pad the sequence")
    return tokens // world_size
