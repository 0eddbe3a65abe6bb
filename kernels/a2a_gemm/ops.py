"""The public operators and their gradients, on any backend.

| operator | per rank in | exchange and product | per rank out |
|---|---|---|---|
| `a2a_gemm`, `to_sequence` | x `[B, S, h, D]` | A `[B, Sl, H*D]`, K group p from rank p; `A @ W^T` | `[B, Sl, N]` |
| `a2a_gemm`, `to_heads` | x `[B, Sl, H, D]` | A `[B, S, h*D]`, rows p from rank p; `A @ W^T` | `[B, S, N]` |
| `gemm_a2a`, `to_heads` | x `[B, Sl, C]` | `x @ W_i^T`, columns of p's heads to rank p | `[B, S, h_i, D]` each |
| `gemm_a2a`, `to_sequence` | x `[B, S, C]` | `x @ W_i^T`, rows of p's tokens to rank p | `[B, Sl, W*h_i, D]` each |
| `batched_pv_a2a` | p `[B, h, S, S]`, v `[B, S, hkv, D]` | `p @ v` a head, rows to the owner | `[B, Sl, W*h, D]` |

Backward: the gradient of the input is the mirrored operator along the opposite route; that of a weight is local, from
the exchanged gradient or the saved exchanged input. Copies of a head (kv heads fewer than ranks) add up in both.

Source: Ulysses sequence parallelism (Jacobs et al., 2023, arXiv:2309.14509) for the routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reference import TorchBackend
from .routes import Route, check_route, copies, heads_per_rank, opposite, repeat_heads, split_tokens, sum_copies


class Backend(Protocol):
    """What runs the operators; `TorchBackend` documents the shapes."""

    @property
    def world_size(self) -> int: ...

    def exchange(self, tensors: Sequence[Tensor], heads: Sequence[int], route: Route) -> list[Tensor]: ...

    def gemm_a2a(
        self, x: Tensor, matrices: Sequence[Tensor], heads: Sequence[int], head_dim: int, route: Route
    ) -> list[Tensor]: ...

    def a2a_gemm(
        self, tensors: Sequence[Tensor], matrices: Sequence[Tensor], heads: Sequence[int], route: Route
    ) -> tuple[Tensor, list[Tensor]]: ...

    def batched_pv_a2a(self, p: Tensor, v: Tensor) -> Tensor: ...


def _backend(backend: Backend | None, group: dist.ProcessGroup | None) -> Backend:
    if backend is not None and group is not None:
        raise ValueError("group and backend are both given: a backend already has its group, leave group out")
    return TorchBackend(group) if backend is None else backend


class _A2AGemm(torch.autograd.Function):
    """`y = exchange(x) @ weight^T`.

    | | per rank | |
    |---|---|---|
    | forward | x, weight `[N, K]` | A = exchange(x) `[B, T, K]`, y = A weight^T |
    | backward | dy `[B, T, N]` | dx = exchange^T(dy weight), the mirrored operator; dweight = dy^T A, local |

    Saves A and the weight: x is needed for neither gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, heads: int, route: Route, backend: Backend) -> Tensor:
        ctx.heads, ctx.head_dim, ctx.route, ctx.backend = heads, x.shape[3], route, backend
        y, (gathered,) = backend.a2a_gemm([x], [weight.t()], [heads], route)
        ctx.save_for_backward(gathered if weight.requires_grad else None, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        gathered, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            (dx,) = ctx.backend.gemm_a2a(dy, [weight], [ctx.heads], ctx.head_dim, opposite(ctx.route))
        if ctx.needs_input_grad[1]:
            dweight = dy.flatten(0, 1).t() @ gathered.flatten(2).flatten(0, 1)
        return dx, dweight, None, None, None


class _GemmA2A(torch.autograd.Function):
    """`y_i = exchange(x @ weight_i^T)`.

    | | per rank | |
    |---|---|---|
    | forward | x `[B, T, C]`, weight_i `[F_i, C]` | y_i = exchange(x weight_i^T) |
    | backward | dy_i | G_i = exchange^T(dy_i), dx = sum_i G_i weight_i (the mirrored operator), dweight_i = G_i^T x |

    Saves x and the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: Sequence[int], head_dim: int, route: Route, backend: Backend, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.heads, ctx.route, ctx.backend = heads, route, backend
        ctx.save_for_backward(x, *weights)
        return tuple(backend.gemm_a2a(x, [weight.t() for weight in weights], heads, head_dim, route))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        route = opposite(ctx.route)
        if ctx.needs_input_grad[0]:
            dx, exchanged = ctx.backend.a2a_gemm(grads, weights, ctx.heads, route)
        else:
            dx, exchanged = None, ctx.backend.exchange(grads, ctx.heads, route)
        rows = x.flatten(0, 1)
        dweights: list[Tensor | None] = [None] * len(weights)
        for i, (grad, heads) in enumerate(zip(exchanged, ctx.heads, strict=True)):
            if ctx.needs_input_grad[5 + i]:
                count = copies(heads, ctx.backend.world_size) if route == "to_sequence" else 1
                dweights[i] = sum_copies(grad, 2, count).flatten(2).flatten(0, 1).t() @ rows
        return dx, None, None, None, None, *dweights


class _BatchedPV(torch.autograd.Function):
    """`o = exchange(p v)` along `to_sequence`.

    | | per rank | |
    |---|---|---|
    | forward | p `[B, h, S, S]`, v `[B, S, hkv, D]` | o = exchange(p_l v_l) `[B, Sl, W*h, D]` |
    | backward | do | G = exchange^T(do) `[B, S, h, D]`; dp_l = G_l v_l^T; dv = p_l^T G_l, summed over a group's heads |

    Saves p and v.
    """

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, backend: Backend) -> Tensor:
        ctx.backend = backend
        ctx.save_for_backward(p, v)
        return backend.batched_pv_a2a(p, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p, v = ctx.saved_tensors
        heads = p.shape[1] * ctx.backend.world_size
        (grad,) = ctx.backend.exchange(grads, [heads], "to_heads")
        grad = grad.transpose(1, 2)
        count = p.shape[1] // v.shape[2]
        dp = dv = None
        if ctx.needs_input_grad[0]:
            dp = grad @ repeat_heads(v, 2, count).permute(0, 2, 3, 1)
        if ctx.needs_input_grad[1]:
            dv = sum_copies((p.transpose(2, 3) @ grad).transpose(1, 2), 2, count)
        return dp, dv, None


def a2a_gemm(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    route: Route = "to_sequence",
    backend: Backend | None = None,
) -> Tensor:
    """Exchange heads and tokens, then project: `exchange(x) @ weight^T`.

    With `to_sequence` this is attention's output exchange and its output projection in one.

    Args:
        x: `[B, S, h, D]` for `to_sequence`, `[B, Sl, H, D]` for `to_heads`.
        weight: `[N, W*h*D]` for `to_sequence`, `[N, H/W*D]` for `to_heads`; x's dtype.
        group: the ranks; None for one rank alone.
        route: see the module.
        backend: what runs it, with its own group; `TorchBackend(group)` if None.

    Returns:
        `[B, Sl, N]` for `to_sequence`, `[B, S, N]` for `to_heads`.

    Raises:
        ValueError: shapes that contradict each other or that the group does not divide.
    """
    check_route(route)
    engine = _backend(backend, group)
    W = engine.world_size
    if x.dim() != 4 or weight.dim() != 2:
        raise ValueError(
            f"x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)} must be [B, T, heads, D] and [N, K]"
        )
    if route == "to_sequence":
        heads = x.shape[2] * W
        split_tokens(x.shape[1], W)
        columns = heads * x.shape[3]
    else:
        heads = x.shape[2]
        if heads % W:
            raise ValueError(f"x has {heads} heads, which must be divisible by the {W} ranks of the group")
        columns = heads // W * x.shape[3]
    if weight.shape[1] != columns:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} must have {columns} columns: those of x {tuple(x.shape)} after "
            f"route={route!r} over {W} ranks"
        )
    output = _A2AGemm.apply(x, weight, heads, route, engine)
    assert isinstance(output, Tensor)
    return output


def gemm_a2a(
    x: Tensor,
    weights: Sequence[Tensor],
    head_dim: int,
    group: dist.ProcessGroup | None = None,
    *,
    route: Route = "to_heads",
    backend: Backend | None = None,
) -> tuple[Tensor, ...]:
    """Project, then exchange tokens and heads: `exchange(x @ weight_i^T)`, one message for all operands.

    With `to_heads` this is the q, k and v projection and attention's input exchange in one. An operand with fewer
    heads than ranks is repeated: rank r gets head `r * H_i // W`.

    Args:
        x: `[B, Sl, C]` for `to_heads`, `[B, S, C]` for `to_sequence`.
        weights: `[H_i * D, C]` for `to_heads`, `[h_i * D, C]` for `to_sequence`; x's dtype.
        head_dim: D.
        group: the ranks; None for one rank alone.
        route: see the module.
        backend: what runs it, with its own group; `TorchBackend(group)` if None.

    Returns:
        One tensor a weight: `[B, S, h_i, D]` for `to_heads`, `[B, Sl, W*h_i, D]` for `to_sequence`.

    Raises:
        ValueError: shapes that contradict each other or that the group does not divide.
    """
    check_route(route)
    engine = _backend(backend, group)
    W = engine.world_size
    if x.dim() != 3 or not weights:
        raise ValueError(
            f"x of shape {tuple(x.shape)} must be [B, T, C], with one weight or more ({len(weights)} given)"
        )
    heads = []
    for i, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != x.shape[2] or weight.shape[0] % head_dim:
            raise ValueError(
                f"weights[{i}] of shape {tuple(weight.shape)} must be [heads * {head_dim}, {x.shape[2]}] to fit "
                f"x {tuple(x.shape)} and head_dim={head_dim}"
            )
        count = weight.shape[0] // head_dim
        if route == "to_heads":
            heads_per_rank(count, W)
            heads.append(count)
        else:
            split_tokens(x.shape[1], W)
            heads.append(count * W)
    outputs = _GemmA2A.apply(x, heads, head_dim, route, engine, *weights)
    assert isinstance(outputs, tuple)
    return outputs


def batched_pv_a2a(
    p: Tensor, v: Tensor, group: dist.ProcessGroup | None = None, *, backend: Backend | None = None
) -> Tensor:
    """Attention's second product for materialised probabilities, and its output exchange: `exchange(p @ v)`.

    Args:
        p: `[B, h, S, S]`, this rank's heads.
        v: `[B, S, hkv, D]`, hkv dividing h; query head l reads value head `l // (h / hkv)`.
        group: the ranks; None for one rank alone.
        backend: what runs it, with its own group; `TorchBackend(group)` if None.

    Returns:
        `[B, Sl, W*h, D]`; rank r's heads at `r*h`.

    Raises:
        ValueError: shapes that contradict each other or that the group does not divide.
    """
    engine = _backend(backend, group)
    if p.dim() != 4 or v.dim() != 4 or p.shape[0] != v.shape[0] or p.shape[3] != v.shape[1] or p.shape[1] % v.shape[2]:
        raise ValueError(
            f"p of shape {tuple(p.shape)} and v of shape {tuple(v.shape)} must be [B, h, S, S] and [B, S, hkv, D] "
            f"with hkv dividing h"
        )
    split_tokens(p.shape[2], engine.world_size)
    output = _BatchedPV.apply(p, v, engine)
    assert isinstance(output, Tensor)
    return output
