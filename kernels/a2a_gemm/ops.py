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

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..gdn.operators import register
from .handles import backend_of
from .reference import TorchBackend
from .routes import Route, check_route, copies, heads_per_rank, opposite, repeat_heads, split_tokens, sum_copies


class Backend(Protocol):
    """What runs the operators; `TorchBackend` documents the shapes."""

    @property
    def world_size(self) -> int: ...

    @property
    def handle(self) -> str:
        """The name under which `handles.backend_of` finds this backend again."""
        ...

    def exchange(self, tensors: Sequence[Tensor], heads: Sequence[int], route: Route) -> list[Tensor]: ...

    def gemm_a2a(
        self, x: Tensor, matrices: Sequence[Tensor], heads: Sequence[int], head_dim: int, route: Route
    ) -> list[Tensor]: ...

    def a2a_gemm(
        self, tensors: Sequence[Tensor], matrices: Sequence[Tensor], heads: Sequence[int], route: Route
    ) -> tuple[Tensor, Tensor]: ...

    def batched_pv_a2a(self, p: Tensor, v: Tensor) -> Tensor: ...


def _backend(backend: Backend | None, group: dist.ProcessGroup | None) -> Backend:
    if backend is not None and group is not None:
        raise ValueError("group and backend are both given: a backend already has its group, leave group out")
    return TorchBackend(group) if backend is None else backend


# The operators as PyTorch sees them. A backend goes by its handle, a matrix is `[K, N]` as `TorchBackend` takes it, and
# results are contiguous and share memory with nothing else.


def _own(results: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous results, copied where a backend returned an argument: one rank alone has nothing to exchange."""
    taken = {x.untyped_storage().data_ptr() for x in arguments}
    contiguous = [y.contiguous() for y in results]
    return [y.clone() if y.untyped_storage().data_ptr() in taken else y for y in contiguous]


def _widths(tensors: Sequence[Tensor], heads: Sequence[int], route: Route, W: int) -> list[int]:
    """Columns of each gathered operand, copies of heads included."""
    return [
        heads_per_rank(count, W) * x.shape[3] * (W if route == "to_sequence" else 1)
        for x, count in zip(tensors, heads, strict=True)
    ]


def _exchanged_fake(
    x: Tensor, count: int, head_dim: int, route: Route, W: int, dtype: torch.dtype | None = None
) -> Tensor:
    h = heads_per_rank(count, W)
    B, T = x.shape[:2]
    shape = (B, T * W, h, head_dim) if route == "to_heads" else (B, T // W, W * h, head_dim)
    return x.new_empty(shape, dtype=dtype or x.dtype)


def _a2a_gemm(tensors, matrices, heads, route, handle):
    y, gathered = backend_of(handle).a2a_gemm(tensors, matrices, heads, route)
    return tuple(_own([y, gathered], tensors))


def _a2a_gemm_fake(tensors, matrices, heads, route, handle):
    W = backend_of(handle).world_size
    B, T = tensors[0].shape[:2]
    rows = T // W if route == "to_sequence" else T * W
    widths = _widths(tensors, heads, route, W)
    return tensors[0].new_empty(B, rows, matrices[0].shape[1]), tensors[0].new_empty(B, rows, sum(widths))


def _a2a_gemm_setup(ctx, inputs, output):
    tensors, matrices, ctx.heads, ctx.route, ctx.handle = inputs
    ctx.dims = [x.shape[3] for x in tensors]
    ctx.backend = backend_of(ctx.handle)
    ctx.widths = _widths(tensors, ctx.heads, ctx.route, ctx.backend.world_size)
    needed = any(matrix.requires_grad for matrix in matrices)
    ctx.save_for_backward(output[1] if needed else None, *matrices)
    ctx.set_materialize_grads(False)


def _a2a_gemm_backward(ctx, dy, dgathered):
    gathered, *matrices = ctx.saved_tensors
    count = len(matrices)
    if dgathered is not None:
        raise RuntimeError("hf_cp::a2a_gemm: the exchanged operand is returned for backward alone, do not use it")
    if dy is None:
        return [None] * count, [None] * count, None, None, None
    dy = dy.contiguous()
    needs_x, needs_matrix = ctx.needs_input_grad[:2]
    dx: list[Tensor | None] = [None] * count
    if any(needs_x):
        unit = math.gcd(*ctx.dims)
        heads = [H * D // unit for H, D in zip(ctx.heads, ctx.dims, strict=True)]
        transposed = [matrix.t() for matrix in matrices]
        parts = _gemm_a2a_op(dy, transposed, heads, unit, opposite(ctx.route), ctx.handle)
        dx = [part.flatten(2).unflatten(2, (-1, D)) for part, D in zip(parts, ctx.dims, strict=True)]
    dmatrices: list[Tensor | None] = [None] * count
    if any(needs_matrix):
        rows = dy.flatten(0, 1).t()
        for i, (part, H, D) in enumerate(zip(gathered.split(ctx.widths, 2), ctx.heads, ctx.dims, strict=True)):
            many = copies(H, ctx.backend.world_size) if ctx.route == "to_sequence" else 1
            part = sum_copies(part.unflatten(2, (-1, D)), 2, many).flatten(2)
            # Transposed, so that the gradient of a weight `[N, K]` lies as the weight does.
            dmatrices[i] = (rows @ part.flatten(0, 1)).t() if needs_matrix[i] else None
    return dx, dmatrices, None, None, None


def _gemm_a2a(x, matrices, heads, head_dim, route, handle):
    return _own(backend_of(handle).gemm_a2a(x, matrices, heads, head_dim, route), [x])


def _gemm_a2a_fake(x, matrices, heads, head_dim, route, handle):
    W = backend_of(handle).world_size
    return [_exchanged_fake(x, count, head_dim, route, W) for count in heads]


def _gemm_a2a_setup(ctx, inputs, output):
    x, matrices, ctx.heads, ctx.head_dim, ctx.route, ctx.handle = inputs
    ctx.backend = backend_of(ctx.handle)
    ctx.shapes = [y.shape for y in output]
    ctx.save_for_backward(x, *matrices)
    ctx.set_materialize_grads(False)


def _gemm_a2a_backward(ctx, grads):
    x, *matrices = ctx.saved_tensors
    count, route = len(matrices), opposite(ctx.route)
    if all(grad is None for grad in grads):
        return None, [None] * count, None, None, None, None
    grads = [
        x.new_zeros(shape) if grad is None else grad.contiguous() for grad, shape in zip(grads, ctx.shapes, strict=True)
    ]
    needs_x, needs_matrix = ctx.needs_input_grad[:2]
    dx = None
    if needs_x:
        transposed = [matrix.t() for matrix in matrices]
        dx, gathered = _a2a_gemm_op(grads, transposed, ctx.heads, route, ctx.handle)
        exchanged = gathered.split(_widths(grads, ctx.heads, route, ctx.backend.world_size), 2)
    else:
        exchanged = _exchange_op(grads, ctx.heads, route, ctx.handle)
    dmatrices: list[Tensor | None] = [None] * count
    rows = x.flatten(0, 1)
    for i, (grad, heads) in enumerate(zip(exchanged, ctx.heads, strict=True)):
        if needs_matrix[i]:
            many = copies(heads, ctx.backend.world_size) if route == "to_sequence" else 1
            grad = sum_copies(grad.flatten(2).unflatten(2, (-1, ctx.head_dim)), 2, many)
            dmatrices[i] = (grad.flatten(2).flatten(0, 1).t() @ rows).t()
    return dx, dmatrices, None, None, None, None


def _exchange(tensors, heads, route, handle):
    return _own(backend_of(handle).exchange(tensors, heads, route), tensors)


def _exchange_fake(tensors, heads, route, handle):
    W = backend_of(handle).world_size
    return [_exchanged_fake(x, count, x.shape[3], route, W) for x, count in zip(tensors, heads, strict=True)]


def _batched_pv(p, v, handle):
    return _own([backend_of(handle).batched_pv_a2a(p, v)], [p, v])[0]


def _batched_pv_fake(p, v, handle):
    W = backend_of(handle).world_size
    B, h, S, _ = p.shape
    return p.new_empty(B, S // W, W * h, v.shape[3])


def _batched_pv_setup(ctx, inputs, output):
    p, v, ctx.handle = inputs
    ctx.backend = backend_of(ctx.handle)
    ctx.save_for_backward(p, v)


def _batched_pv_backward(ctx, grad):
    p, v = ctx.saved_tensors
    heads = p.shape[1] * ctx.backend.world_size
    (grad,) = _exchange_op([grad.contiguous()], [heads], "to_heads", ctx.handle)
    grad = grad.transpose(1, 2)
    count = p.shape[1] // v.shape[2]
    dp = dv = None
    if ctx.needs_input_grad[0]:
        dp = grad @ repeat_heads(v, 2, count).permute(0, 2, 3, 1)
    if ctx.needs_input_grad[1]:
        dv = sum_copies((p.transpose(2, 3) @ grad).transpose(1, 2), 2, count)
    return dp, dv, None


_a2a_gemm_op = register(
    "a2a_gemm(Tensor[] tensors, Tensor[] matrices, int[] heads, str route, str handle) -> (Tensor, Tensor)",
    _a2a_gemm,
    _a2a_gemm_fake,
    _a2a_gemm_setup,
    _a2a_gemm_backward,
)
_gemm_a2a_op = register(
    "gemm_a2a(Tensor x, Tensor[] matrices, int[] heads, int head_dim, str route, str handle) -> Tensor[]",
    _gemm_a2a,
    _gemm_a2a_fake,
    _gemm_a2a_setup,
    _gemm_a2a_backward,
)
_exchange_op = register(
    "a2a_exchange(Tensor[] tensors, int[] heads, str route, str handle) -> Tensor[]", _exchange, _exchange_fake
)
_batched_pv_op = register(
    "batched_pv_a2a(Tensor p, Tensor v, str handle) -> Tensor",
    _batched_pv,
    _batched_pv_fake,
    _batched_pv_setup,
    _batched_pv_backward,
)


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
    return _a2a_gemm_op([x], [weight.t()], [heads], route, engine.handle)[0]


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
    return tuple(_gemm_a2a_op(x, [weight.t() for weight in weights], heads, head_dim, route, engine.handle))


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
    return _batched_pv_op(p, v, engine.handle)
