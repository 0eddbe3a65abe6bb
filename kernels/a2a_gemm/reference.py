"""The operators in plain torch and one collective each, for any device and process group.

This is what the kernels are held to, and what runs where there are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .routes import Route, copies, repeat_heads, split_tokens

TORCH_HANDLE = "torch:"


class TorchBackend:
    """Exchange with one all-to-all, multiply with `torch.matmul`. Nothing here knows autograd.

    Args:
        group: the process group whose ranks hold the shards; None for one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.handle = TORCH_HANDLE + ("" if group is None else group.group_name)

    def exchange(self, tensors: Sequence[Tensor], heads: Sequence[int], route: Route) -> list[Tensor]:
        """One message that moves every tensor along `route`.

        Args:
            tensors: `[B, Sl, H_i, D_i]` for `to_heads`, `[B, S, h_i, D_i]` for `to_sequence`; one dtype.
            heads: H_i, the heads of the whole group, without copies.

        Returns:
            `[B, S, h_i, D_i]`, repeated where `H_i < W`; or `[B, Sl, W * h_i, D_i]`, all copies side by side.
        """
        W = self.world_size
        scatter, gather = (2, 1) if route == "to_heads" else (1, 2)
        if route == "to_heads":
            tensors = [repeat_heads(x, 2, copies(count, W)) for x, count in zip(tensors, heads, strict=True)]
        else:
            split_tokens(tensors[0].shape[1], W)
        if W == 1:
            return list(tensors)
        rows = [x.unflatten(scatter, (W, x.shape[scatter] // W)).movedim(scatter, 0) for x in tensors]
        sent = torch.cat([row.reshape(W, -1) for row in rows], dim=1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        parts = received.split([math.prod(row.shape[1:]) for row in rows], dim=1)
        return [
            part.unflatten(1, row.shape[1:]).movedim(0, gather).flatten(gather, gather + 1)
            for part, row in zip(parts, rows, strict=True)
        ]

    def gemm_a2a(
        self, x: Tensor, matrices: Sequence[Tensor], heads: Sequence[int], head_dim: int, route: Route
    ) -> list[Tensor]:
        """`x @ matrices[i]`, its heads exchanged.

        Args:
            x: `[B, T, C]`, T the tokens that this rank holds before the exchange.
            matrices: `[C, F_i]`, F_i the heads that this rank computes times D.
            heads: H_i of the whole group.

        Returns:
            One tensor an operand, as `exchange` returns it.
        """
        products = [(x @ matrix).unflatten(-1, (-1, head_dim)) for matrix in matrices]
        return self.exchange(products, heads, route)

    def a2a_gemm(
        self, tensors: Sequence[Tensor], matrices: Sequence[Tensor], heads: Sequence[int], route: Route
    ) -> tuple[Tensor, Tensor]:
        """Exchange the heads of every tensor, then multiply: `sum_i gathered_i @ matrices[i]`.

        Args:
            tensors: as `exchange` takes them.
            matrices: `[K_i, N]`. For `to_sequence`, `K_i = H_i * D_i`; the copies of a head share its rows.

        Returns:
            `[B, T, N]`, T the tokens that this rank holds after the exchange, and what was multiplied: every
            `gathered_i` `[B, T, heads with copies * D_i]`, side by side.
        """
        gathered = self.exchange(tensors, heads, route)
        if route == "to_sequence":
            matrices = [
                repeat_heads(matrix.unflatten(0, (count, -1)), 0, copies(count, self.world_size)).flatten(0, 1)
                for matrix, count in zip(matrices, heads, strict=True)
            ]
        rows = [part.flatten(2) for part in gathered]
        if len(rows) == 1:
            return rows[0] @ matrices[0], rows[0]
        whole = torch.cat(rows, dim=-1)
        return whole @ torch.cat(tuple(matrices)), whole

    def batched_pv_a2a(self, p: Tensor, v: Tensor) -> Tensor:
        """`p[b, l] @ v[b, :, l // (h / hkv)]`, every head's rows to the rank that owns their tokens.

        Args:
            p: `[B, h, S, S]`.
            v: `[B, S, hkv, D]`.

        Returns:
            `[B, Sl, W * h, D]`.
        """
        values = repeat_heads(v, 2, p.shape[1] // v.shape[2])
        product = torch.matmul(p, values.transpose(1, 2)).transpose(1, 2)
        return self.exchange([product], [p.shape[1] * self.world_size], "to_sequence")[0]
