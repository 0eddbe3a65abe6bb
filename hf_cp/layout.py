"""Which rank holds which tokens: contiguous shards, padding at the end, document boundaries. No communication.

Zigzag orders would balance causal attention, but they break the order in which a recurrence reads its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LocalDocuments:
    """The documents that one shard holds, in the shard's own numbering.

    Args:
        cu_seqlens: int32 `[N+1]`, from 0 to `seq_len_local`, strictly increasing; on the device of the global tensor.
            None where the sequence is one document and rows are not packed.
        bounds: the same numbers on the host, so that nobody has to read them back from a device.
        continues_from_previous: the first local document began on an earlier rank.
        continues_into_next: the last local document goes on on the next rank.
    """

    cu_seqlens: Tensor | None
    bounds: tuple[int, ...]
    continues_from_previous: bool
    continues_into_next: bool

    @property
    def max_seqlen(self) -> int:
        """Length of the longest local document."""
        return max(b - a for a, b in itertools.pairwise(self.bounds))


@dataclass(frozen=True)
class ShardLayout:
    """Contiguous shards of a sequence: rank r of W holds `[r*L, (r+1)*L)` with `L = max(ceil(T/W), min_local)`.

    The sequence is padded at its end from T to `L*W`; a shard, or several, may consist of padding alone.

    Args:
        seq_len: T, tokens of the whole sequence, at least 1.
        cp_size: W, number of ranks.
        cp_rank: this rank, in [0, W).
        min_local: least tokens a shard may have (k-1 for a convolution of width k: its halo has one sender).

    Raises:
        ValueError: a field out of range.
    """

    seq_len: int
    cp_size: int
    cp_rank: int
    min_local: int = 1

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len={self.seq_len} must be at least 1; drop empty sequences from the batch")
        if self.cp_size < 1:
            raise ValueError(f"cp_size={self.cp_size} must be at least 1")
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"cp_rank={self.cp_rank} must lie in [0, cp_size={self.cp_size})")
        if self.min_local < 1:
            raise ValueError(f"min_local={self.min_local} must be at least 1")

    @property
    def seq_len_local(self) -> int:
        """L, tokens a rank holds, the same on every rank."""
        return max(-(-self.seq_len // self.cp_size), self.min_local)

    @property
    def padded_len(self) -> int:
        """L*W, length of the padded sequence."""
        return self.seq_len_local * self.cp_size

    @property
    def padding(self) -> int:
        """Tokens added at the end of the sequence."""
        return self.padded_len - self.seq_len

    @property
    def start(self) -> int:
        """First position of this rank, in the padded sequence."""
        return self.cp_rank * self.seq_len_local

    @property
    def stop(self) -> int:
        """One past the last position of this rank, in the padded sequence."""
        return self.start + self.seq_len_local

    def _check_len(self, x: Tensor, dim: int, expected: int, what: str) -> None:
        if x.shape[dim] != expected:
            raise ValueError(f"dim {dim} of shape {tuple(x.shape)} must be {what}={expected}")

    def pad(self, x: Tensor, dim: int, value: float) -> Tensor:
        """`x` with `padding` entries of `value` appended along `dim`.

        Args:
            x: any shape with `seq_len` along `dim`.
            dim: the sequence dimension.
            value: pad id for ids, -100 for labels, 0 for an attention mask. Positions: `pad_position_ids`.

        Raises:
            ValueError: `x` does not have `seq_len` entries along `dim`.
        """
        self._check_len(x, dim, self.seq_len, "seq_len")
        return _append(x, dim, self.padding, value)

    def shard(self, x: Tensor, dim: int, value: float) -> Tensor:
        """This rank's slice of `pad(x, dim, value)`, as a copy, so that the whole sequence can be freed.

        Differentiable; the gradient is zero outside the slice.
        """
        self._check_len(x, dim, self.seq_len, "seq_len")
        begin, end = min(self.start, self.seq_len), min(self.stop, self.seq_len)
        local = x.narrow(dim, begin, end - begin)
        missing = self.seq_len_local - (end - begin)
        return _append(local, dim, missing, value) if missing else local.clone(memory_format=torch.contiguous_format)

    def unpad(self, x: Tensor, dim: int) -> Tensor:
        """`x` without its padding: a view of the first `seq_len` of `padded_len` entries along `dim`."""
        self._check_len(x, dim, self.padded_len, "padded_len")
        return x.narrow(dim, 0, self.seq_len)

    def pad_position_ids(self, position_ids: Tensor) -> Tensor:
        """Positions of the padded sequence: the padding goes on counting from the last position, by 1 a token.

        Args:
            position_ids: integers `[B, T]`, `[3, B, T]` (mrope) or `[4, B, T]` (text row, then mrope).
        """
        self._check_len(position_ids, -1, self.seq_len, "seq_len")
        if not self.padding:
            return position_ids
        steps = torch.arange(1, self.padding + 1, dtype=position_ids.dtype, device=position_ids.device)
        return torch.cat([position_ids, position_ids[..., -1:] + steps], dim=-1)

    def shard_position_ids(self, position_ids: Tensor) -> Tensor:
        """This rank's slice of `pad_position_ids(position_ids)`, as a copy."""
        return self.pad_position_ids(position_ids)[..., self.start : self.stop].clone(
            memory_format=torch.contiguous_format
        )

    def one_document(self) -> LocalDocuments:
        """The documents of this shard where nothing is packed: one, with the padding at its end."""
        return LocalDocuments(None, (0, self.seq_len_local), self.cp_rank > 0, self.cp_rank < self.cp_size - 1)

    def pad_cu_seqlens(self, cu_seqlens: Tensor) -> Tensor:
        """Boundaries in the padded sequence: the padding, if any, is one further document.

        Args:
            cu_seqlens: integers `[N+1]` over the unpadded sequence.

        Returns:
            int32 `[N+1]` or `[N+2]`.
        """
        return (F.pad(cu_seqlens, (0, 1), value=self.padded_len) if self.padding else cu_seqlens).to(torch.int32)

    def document_positions(self, cu_seqlens: Tensor) -> Tensor:
        """Position of each token in its document, int64 `[1, T]`, from boundaries `[N+1]` without the padding."""
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        index = torch.arange(self.seq_len, device=cu_seqlens.device)
        return (index - torch.repeat_interleave(starts, lengths, output_size=self.seq_len))[None]

    def local_cu_seqlens(self, cu_seqlens: Tensor | Sequence[int]) -> LocalDocuments:
        """The documents of this shard, numbered from the shard's first token.

        The padding at the end of the sequence counts as one further document. A rank edge within a document is no
        document edge: the two flags of the result say whether state crosses it. Empty documents are dropped.

        Args:
            cu_seqlens: integers `[N+1]` over the *unpadded* sequence, from 0 to `seq_len`, non-decreasing. A tensor on
                a device costs one read by the host.

        Raises:
            ValueError: boundaries that do not start at 0, do not end at `seq_len`, or decrease.
        """
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else torch.device("cpu")
        edges: list[int] = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != self.seq_len:
            ends = f"[{edges[0]}, ..., {edges[-1]}]" if edges else "[]"
            raise ValueError(f"cu_seqlens={ends} must run from 0 to seq_len={self.seq_len}")
        if any(b < a for a, b in itertools.pairwise(edges)):
            raise ValueError("cu_seqlens must not decrease")
        global_edges = set(edges) | {self.padded_len}
        inner = sorted(e - self.start for e in global_edges if self.start < e < self.stop)
        bounds = (0, *inner, self.seq_len_local)
        return LocalDocuments(
            cu_seqlens=_host_to_device(torch.tensor(bounds, dtype=torch.int32), device),
            bounds=bounds,
            continues_from_previous=self.start not in global_edges,
            continues_into_next=self.stop not in global_edges,
        )


def cu_seqlens_from_position_ids(position_ids: Tensor) -> Tensor | None:
    """Document boundaries of a packed row: each position 0 starts a document, and so does the row itself.

    Args:
        position_ids: integers `[1, T]`, the *text* positions (mrope rows say nothing about packing).

    Returns:
        int32 `[N+1]` from 0 to T, or None when the row is one document. On a device this costs one read by the host.

    Raises:
        ValueError: not one row.
    """
    if position_ids.dim() != 2 or position_ids.shape[0] != 1 or position_ids.shape[1] < 1:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} must be [1, T]: packing is one row a batch"
        )
    seq_len = position_ids.shape[1]
    resets = (position_ids[0, 1:] == 0).nonzero().flatten() + 1
    if resets.numel() == 0:
        return None
    return F.pad(F.pad(resets, (1, 0), value=0), (0, 1), value=seq_len).to(torch.int32)


def _append(x: Tensor, dim: int, count: int, value: float) -> Tensor:
    if count == 0:
        return x
    shape = list(x.shape)
    shape[dim] = count
    return torch.cat([x, x.new_full(shape, value)], dim=dim)


def _host_to_device(x: Tensor, device: torch.device) -> Tensor:
    # From pinned memory the copy does not make the host wait for the device.
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
