"""Attention over packed and padded sequences without a mask of length squared.

Who sees whom is kept as segments: a run of queries and the keys that this run sees, either all of them or causally,
the last query seeing the last key. A padded batch has a causal segment a row for its tokens, and one without causality
for the padding behind them; padding in front sees nothing and gives zeros. A packed row has one segment a document.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


class Segment(NamedTuple):
    """Queries ``[begin, end)`` of a row and the keys they see: ``keys`` ranges in order, the last aligned if causal."""

    row: int
    begin: int
    end: int
    keys: tuple[tuple[int, int], ...]
    causal: bool

    @property
    def key_count(self) -> int:
        """Keys of the segment's last query."""
        return sum(stop - start for start, stop in self.keys)


def packed_segments(bounds: Sequence[int]) -> list[Segment]:
    """One causal segment a document; ``bounds`` are the document boundaries of the only row, from 0 to T."""
    return [Segment(0, begin, end, ((begin, end),), True) for begin, end in pairwise(bounds) if begin < end]


def padded_segments(mask: Tensor) -> list[Segment]:
    """The segments of a padding mask ``[B, T]``, whatever its pattern: a query sees the kept keys up to itself.

    Costs one host read of the positions where the mask changes.
    """
    kept = mask != 0
    changes: list[list[int]] = [[] for _ in range(len(kept))]
    for row, position in (kept[:, 1:] != kept[:, :-1]).nonzero().tolist():
        changes[row].append(position + 1)
    segments = []
    for row, first in enumerate(kept[:, 0].tolist()):
        keys: tuple[tuple[int, int], ...] = ()
        edges = [0, *changes[row], kept.shape[1]]
        for index, (begin, end) in enumerate(pairwise(edges)):
            is_kept = first == (index % 2 == 0)
            if is_kept:
                keys = (*keys, (begin, end))
            if keys:
                segments.append(Segment(row, begin, end, keys, is_kept))
    return segments


def queries_between(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """The segments of the queries ``[start, stop)`` alone, their positions counted from ``start``; keys stay whole."""
    local = []
    for segment in segments:
        begin, end = max(segment.begin, start), min(segment.end, stop)
        if begin >= end:
            continue
        keys = segment.keys
        if segment.causal:  # later queries take their keys with them
            last_begin, last_end = keys[-1]
            keys = (*keys[:-1], (last_begin, last_end - (segment.end - end)))
        local.append(Segment(segment.row, begin - start, end - start, keys, segment.causal))
    return local


@dataclass(frozen=True, eq=False)
class Group:
    """Segments of one kind, ready for a variable-length kernel.

    Args:
        causal: the kind.
        queries, keys: int64, rows of the flattened ``[B * Q]`` queries and ``[B * S]`` keys, segment after segment.
        query_bounds, key_bounds: where each segment begins in them, on the host; ``cu_*`` the same as int32 tensors.
    """

    causal: bool
    queries: Tensor
    keys: Tensor
    query_bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]
    cu_queries: Tensor
    cu_keys: Tensor


def groups(segments: Sequence[Segment], queries: int, keys: int, device: torch.device) -> list[Group]:
    """Segments as index lists, causal ones and others apart.

    Args:
        queries, keys: length of a row of queries and of keys.
    """
    result = []
    for causal in (True, False):
        chosen = [s for s in segments if s.causal == causal]
        if not chosen:
            continue
        query_ranges = [(s.row * queries + s.begin, s.row * queries + s.end) for s in chosen]
        key_ranges = [(s.row * keys + a, s.row * keys + b) for s in chosen for a, b in s.keys]
        query_bounds = (0, *accumulate(s.end - s.begin for s in chosen))
        key_bounds = (0, *accumulate(s.key_count for s in chosen))
        result.append(
            Group(
                causal,
                _indices(query_ranges, device),
                _indices(key_ranges, device),
                query_bounds,
                key_bounds,
                torch.tensor(query_bounds, dtype=torch.int32, device=device),
                torch.tensor(key_bounds, dtype=torch.int32, device=device),
            )
        )
    return result


def _indices(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in ranges])


def attend(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Group], *, scale: float, dropout: float = 0.0) -> Tensor:
    """Softmax attention of every query over the keys of its segment; zeros for a query without a segment.

    On CUDA in half precision without dropout by PyTorch's variable-length flash attention, elsewhere segment by
    segment.

    Args:
        q: ``[B, HQ, Q, D]``.
        k, v: ``[B, HKV, S, D]``, HQ a multiple of HKV.

    Returns:
        ``[B, Q, HQ, D]``.
    """
    batch, heads, length, dim = q.shape
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    kernel = _flash if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and dropout == 0 else _one_by_one
    output = q.new_zeros(batch * length, heads, dim)
    for part in parts:
        values = kernel(flat_q[part.queries], flat_k[part.keys], flat_v[part.keys], part, scale, dropout)
        output = output.index_copy(0, part.queries, values)
    return output.unflatten(0, (batch, length))


# torch 2.11 takes grouped heads without being told, later versions ask for the flag.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _flash(q: Tensor, k: Tensor, v: Tensor, part: Group, scale: float, dropout: float) -> Tensor:
    assert dropout == 0
    longest = [max(map(sub, bounds[1:], bounds)) for bounds in (part.query_bounds, part.key_bounds)]
    window = (-1, 0) if part.causal else (-1, -1)
    output = varlen_attn(q, k, v, part.cu_queries, part.cu_keys, *longest, scale=scale, window_size=window, **_GROUPED)
    assert isinstance(output, Tensor)
    return output


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, part: Group, scale: float, dropout: float) -> Tensor:
    outputs = []
    for own, seen in zip(pairwise(part.query_bounds), pairwise(part.key_bounds), strict=True):
        own, seen = slice(*own), slice(*seen)
        query, key, value = (x.transpose(0, 1)[None] for x in (q[own], k[seen], v[seen]))
        square = query.shape[2] == key.shape[2]
        mask = None
        if part.causal and not square:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=q.device)
            mask = mask.tril(key.shape[2] - query.shape[2])
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=part.causal and square,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
