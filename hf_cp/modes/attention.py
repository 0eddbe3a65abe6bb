"""Full attention across ranks, around the model's own attention function.

q, k and v arrive as the stock attention function gets them: ``[B, heads, L, D]`` after norm and rotary embedding.
``ulysses`` gives that function all tokens of some heads, ``allgather`` this rank's queries and all earlier keys.
"""

from __future__ import annotations

import math

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from ..collectives import exchange_heads_to_sequence, exchange_sequence_to_heads, gather_sequence
from ..context import CpContext


def key_value_heads(query_heads: int, kv_heads: int, cp_size: int) -> list[list[int]]:
    """Which kv heads each rank needs when the query heads are split evenly in order.

    A rank's list has one entry for each run of consecutive query heads that share a kv head, with equal runs, so that
    grouped attention on the rank pairs them rightly. Where kv heads are fewer than ranks they repeat.

    Returns:
        One list a rank, all of the same length.
    """
    local, group = query_heads // cp_size, query_heads // kv_heads
    run = math.gcd(local, group)
    return [[(rank * local + start) // group for start in range(0, local, run)] for rank in range(cp_size)]


def sequence_to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: CpContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens of this rank's heads.

    Communication: ``(W - 1) / W`` of q, and of k and v with repeated kv heads counted as often as they are sent. The
    gradients of the copies are summed.

    Args:
        q, k, v: ``[B, HQ or HKV, L, D]``.

    Returns:
        ``[B, HQ/W, T, D]`` and ``[B, HKV', T, D]``; the padding of the last rank is dropped.
    """
    heads = key_value_heads(q.shape[1], k.shape[1], cp.mesh.cp_size)
    wanted = [head for rank in heads for head in rank]
    if wanted != list(range(k.shape[1])):
        index = torch.tensor(wanted, device=k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    exchanged = exchange_sequence_to_heads([x.transpose(1, 2) for x in (q, k, v)], cp.mesh)
    q, k, v = (cp.layout.unpad(x, 1).transpose(1, 2) for x in exchanged)
    return q, k, v


def heads_to_sequence(output: torch.Tensor, cp: CpContext) -> torch.Tensor:
    """``[B, T, HQ/W, D]`` to this rank's tokens ``[B, L, HQ, D]``."""
    return exchange_heads_to_sequence(cp.layout.pad(output, 1, 0.0), cp.mesh)


def gather_keys(
    k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, implementation: str, cp: CpContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The keys and values that this rank's queries see, and the mask over them.

    Communication: each rank contributes its k and v to one all-gather; backward reduces their gradients.

    Without a mask a rank sees the keys up to its own last token, aligned at that token: sdpa gets a causal bias (its
    own ``is_causal`` aligns at the first key), flash attention aligns so by itself. With a mask it sees all keys, since
    a row that masks them all still gives what the stock function makes of such a row.

    Args:
        k, v: ``[B, HKV, L, D]``.
        mask: ``[B, 1, T, T]`` of the whole sequence, boolean (True attends) or additive, or ``None`` for causal.
        implementation: name of the attention function.

    Returns:
        k and v ``[B, HKV, S, D]`` and the mask of this rank's queries, ``[B, 1, L, S]``.
    """
    layout = cp.layout
    plain = mask is None and cp.segments is None
    seen = layout.stop if plain else layout.seq_len
    both = gather_sequence(torch.stack((k, v)), cp.mesh, dim=3)[:, :, :, :seen]
    if mask is not None:
        rows = layout.pad(mask, 2, True if mask.dtype == torch.bool else 0.0)[:, :, layout.start : layout.stop]
    else:
        rows = _causal_at_the_last_key(k.shape[2], seen) if plain and implementation == "sdpa" else None
    return both[0], both[1], rows


def _causal_at_the_last_key(queries: int, keys: int) -> torch.Tensor:
    """A mask-free bias that lets query i see keys up to ``keys - queries + i``."""
    with _disable_current_modes():  # torch cannot make this tensor subclass under a dispatch mode (flop counters, say)
        return causal_lower_right(queries, keys)
