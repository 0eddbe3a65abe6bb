"""The output projection of a Gated DeltaNet layer whose weight gradient is computed later than autograd would.

Autograd computes the gradients of a linear layer's input and weight in one go. Across ranks, the layer's gradient
exchange needs the former to start, and the latter is work for the time it takes: so the two are nodes of their own, and
the node of the weight is recorded where autograd, which runs the youngest node first, gets to it during the exchange.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from hf_cp.autocast import autocast_dtype
from hf_cp.class_swap import is_patched


class LateGradient:
    """The weight gradient of one call of a projection, from `record` on.

    Args:
        projection: ``out_proj`` of a patched layer. Where something else has wrapped or replaced it (LoRA, a quantised
            layer), or its weight is frozen or sharded, the projection is called as it is.
    """

    def __init__(self, projection: Any) -> None:
        weight = projection.weight if is_patched(projection) and projection.bias is None else None
        usable = weight is not None and weight.requires_grad and not isinstance(weight, DTensor)
        self._weight = weight if usable and torch.is_grad_enabled() else None
        self._token: torch.Tensor | None = None
        self.factors: tuple[torch.Tensor, torch.Tensor] | None = None

    def record(self) -> None:
        """Record the node that computes the weight gradient: it runs before all that is recorded before."""
        if self._weight is not None:
            token = _WeightGradient.apply(self._weight, self)
            assert isinstance(token, torch.Tensor)
            self._token = token

    def project(self, projection: Any, x: torch.Tensor) -> torch.Tensor:
        """Call the projection."""
        return projection(x) if self._token is None else projection(x, cp_late=(self, self._token))


def forward(module: Any, stock_forward: Any, x: torch.Tensor, cp_late: tuple[LateGradient, Any] | None = None) -> Any:
    """``x W^T``, ``[B, L, HV * V]`` to ``[B, L, D]``; with ``cp_late`` the weight gradient is left to its node."""
    if cp_late is None:
        return stock_forward(module, x)
    weight = module.weight.detach()
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    late, token = cp_late
    return _Projection.apply(x, weight, token, late)


class _WeightGradient(torch.autograd.Function):
    """Ties the weight to the graph by an empty token; backward ``dW = dy^T x``, of what `_Projection` left."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, late: LateGradient) -> torch.Tensor:
        ctx.late, ctx.dtype = late, weight.dtype
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_gradient: Any) -> tuple[torch.Tensor, None]:
        factors, ctx.late.factors = ctx.late.factors, None
        assert factors is not None, "_Projection.backward runs first: the token is its input"
        dy, x = (t.flatten(0, -2) for t in factors)
        return (dy.t() @ x).to(ctx.dtype), None


class _Projection(torch.autograd.Function):
    """``y = x W^T``; backward ``dx = dy W``, and dy and x are left for `_WeightGradient`. Saved: x and W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, token: torch.Tensor, late: LateGradient) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.late = late
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.late.factors = dy, x
        return dy @ weight, None, dy.new_empty(0), None
