"""What surrounds the delta rule in a Gated DeltaNet layer: convolution, gates, gated norm, and one step of decoding.

B batch, T tokens, D channels, k taps, H key heads, HV value heads, K/V head dims.
Each function takes the name of a backend, as the delta rule does: "eager" runs the definition in `reference`, "triton"
and "gluon" the same kernel of `triton_layer`. Decoding steps exist as kernels only.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from . import reference
from .arguments import check_convolution
from .backend import announce_compilation, check_known, check_served
from .operators import register


def _kernels(*tensors: torch.Tensor | None, **dims: int) -> Any:
    """The kernels, for what they serve. Called in operators' bodies, which a compiler does not trace."""
    for x in tensors:
        if x is not None:
            check_served("triton", dtype=x.dtype, device=x.device, **dims)
    announce_compilation()
    return importlib.import_module(".triton_layer", __package__)


# Convolution.


def _conv(x, weight, halo, cu_seqlens, activation, widths):
    kernels = _kernels(x, weight, halo, taps=weight.shape[1])
    return kernels.conv.forward(x, weight, halo, cu_seqlens, activation, widths)


def _conv_fake(x, weight, halo, cu_seqlens, activation, widths):
    return [x.new_empty((*x.shape[:2], width)) for width in widths]


def _conv_setup(ctx, inputs, output):
    x, weight, halo, cu_seqlens, ctx.activation, ctx.widths = inputs
    ctx.save_for_backward(x, weight, halo, cu_seqlens)


def _conv_backward(ctx, douts):
    x, weight, halo, cu_seqlens = ctx.saved_tensors
    douts = [
        x.new_zeros((*x.shape[:2], width)) if dout is None else dout
        for dout, width in zip(douts, ctx.widths, strict=True)
    ]
    dx, dweight, dhalo = _conv1d_backward(x, weight, halo, cu_seqlens, ctx.activation, douts)
    return dx, dweight, None if halo is None else dhalo, None, None, None


def _conv_gradients(x, weight, halo, cu_seqlens, activation, douts):
    dx, dweight, dhalo = _kernels().conv.backward(x, weight, halo, cu_seqlens, activation, douts)
    return dx, dweight, x.new_empty(0) if dhalo is None else dhalo


def _conv_gradients_fake(x, weight, halo, cu_seqlens, activation, douts):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(0 if halo is None else halo.shape)


_conv1d = register(
    "gdn_conv1d(Tensor x, Tensor weight, Tensor? halo, Tensor? cu_seqlens, str? activation, SymInt[] widths)"
    " -> Tensor[]",
    _conv,
    _conv_fake,
    _conv_setup,
    _conv_backward,
)
_conv1d_backward = register(
    "gdn_conv1d_backward(Tensor x, Tensor weight, Tensor? halo, Tensor? cu_seqlens, str? activation, Tensor[] douts)"
    " -> (Tensor, Tensor, Tensor)",
    _conv_gradients,
    _conv_gradients_fake,
)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    halo: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    activation: str | None = "silu",
    *,
    widths: Sequence[int] | None = None,
    backend: str = "eager",
) -> list[torch.Tensor]:
    """Causal depthwise convolution, its channels split; see `reference.causal_conv1d`.

    Args:
        x: [B, T, D], floating. weight: [D, k].
        halo: [B, k-1, D], the tokens before token 0, of document 0 alone; None is zeros.
        cu_seqlens: [N+1], int32 or int64, with B = 1; None is one document a row. On a GPU its values are not read.
        activation: "silu" or None.
        widths: channels of each result, D together, at most 3; None is one result.
        backend: "eager", "triton" or "gluon" (k at most 4).
    Returns:
        [B, T, width] tensors in x's dtype; with kernels contiguous ones.
    Raises:
        ValueError: a shape, dtype, device or activation outside the above, or a backend that cannot run.
    """
    widths = [x.shape[-1]] if widths is None else list(widths)
    if sum(widths) != x.shape[-1] or not 0 < len(widths) <= 3:
        raise ValueError(f"widths={widths} of x with {x.shape[-1]} channels: pass up to 3 widths that add up to them")
    if backend == "eager":
        return list(reference.causal_conv1d(x, weight, halo, cu_seqlens, activation).split(widths, dim=-1))
    check_convolution(x, weight, halo, cu_seqlens, activation)
    check_known(backend)
    if cu_seqlens is not None and cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, x on {x.device}: move it there")
    return _conv1d(x, weight, halo, cu_seqlens, activation, widths)


# Gates.


def _gates(a, b, A_log, dt_bias):
    return _kernels(a, b, A_log, dt_bias).gates.forward(a, b, A_log, dt_bias)


def _gates_fake(a, b, A_log, dt_bias):
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)


def _gates_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gates_backward(ctx, dg, dbeta):
    a, b, A_log, dt_bias = ctx.saved_tensors
    dg = a.new_zeros(a.shape, dtype=torch.float32) if dg is None else dg
    dbeta = b.new_zeros(b.shape) if dbeta is None else dbeta
    return _gates_backward_op(a, b, A_log, dt_bias, dg, dbeta)


def _gates_gradients(a, b, A_log, dt_bias, dg, dbeta):
    return _kernels().gates.backward(a, b, A_log, dt_bias, dg, dbeta)


def _gates_gradients_fake(a, b, A_log, dt_bias, dg, dbeta):
    return tuple(x.new_empty(x.shape) for x in (a, b, A_log, dt_bias))


_gates_op = register(
    "gdn_gates(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias) -> (Tensor, Tensor)",
    _gates,
    _gates_fake,
    _gates_setup,
    _gates_backward,
)
_gates_backward_op = register(
    "gdn_gates_backward(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor dg, Tensor dbeta)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _gates_gradients,
    _gates_gradients_fake,
)


def gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, *, backend: str = "eager"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay g = -exp(A_log) softplus(a + dt_bias) and step size beta = sigmoid(b); see `reference.gate`.

    Args:
        a, b: [B, T, HV], floating. A_log, dt_bias: [HV], floating.
        backend: "eager", "triton" or "gluon".
    Returns:
        g [B, T, HV] in fp32 (fp64 if an input is fp64) and beta [B, T, HV] in b's dtype.
    Raises:
        ValueError: shapes that differ, or a backend that cannot run.
    """
    if backend == "eager":
        return reference.gate(a, A_log, dt_bias), b.sigmoid()
    heads = a.shape[-1:]
    if a.dim() != 3 or b.shape != a.shape or A_log.shape != heads or dt_bias.shape != heads:
        shapes = ", ".join(str(list(x.shape)) for x in (a, b, A_log, dt_bias))
        raise ValueError(f"a, b, A_log, dt_bias have shapes {shapes}: pass [B, T, HV] twice and [HV] twice")
    check_known(backend)
    return _gates_op(a, b, A_log, dt_bias)


# Gated norm.


def _norm(x, z, weight, eps):
    return _kernels(x, z, weight).norm.forward(x, z, weight, eps)


def _norm_fake(x, z, weight, eps):
    return x.new_empty(x.shape)


def _norm_setup(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _norm_backward(ctx, dy):
    return *_norm_backward_op(*ctx.saved_tensors, dy, ctx.eps), None


def _norm_gradients(x, z, weight, dy, eps):
    return _kernels().norm.backward(x, z, weight, dy, eps)


def _norm_gradients_fake(x, z, weight, dy, eps):
    return tuple(t.new_empty(t.shape) for t in (x, z, weight))


_norm_op = register(
    "gdn_gated_rms_norm(Tensor x, Tensor z, Tensor weight, float eps) -> Tensor",
    _norm,
    _norm_fake,
    _norm_setup,
    _norm_backward,
)
_norm_backward_op = register(
    "gdn_gated_rms_norm_backward(Tensor x, Tensor z, Tensor weight, Tensor dy, float eps) -> (Tensor, Tensor, Tensor)",
    _norm_gradients,
    _norm_gradients_fake,
)


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: str = "eager"
) -> torch.Tensor:
    """RMS norm over the last dim, scaled by `weight` and by silu(z); see `reference.gated_rms_norm`.

    Args:
        x, z: [..., V], floating, of one shape. weight: [V], floating. eps: added to the mean square.
        backend: "eager", "triton" or "gluon".
    Returns:
        [..., V] in x's dtype.
    Raises:
        ValueError: shapes that differ, or a backend that cannot run.
    """
    if z.shape != x.shape or weight.shape != x.shape[-1:]:
        shapes = ", ".join(str(list(t.shape)) for t in (x, z, weight))
        raise ValueError(f"x, z, weight have shapes {shapes}: pass x and z of one shape [..., V] and weight [V]")
    if backend == "eager":
        return reference.gated_rms_norm(x, z, weight, eps)
    check_known(backend)
    return _norm_op(x, z, weight, eps)


# Decoding.


def _check_no_gradient(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("a decoding step has no gradient: call it under torch.no_grad()")


def _conv_step(x, state, weight, activation):
    return _kernels(x, state, weight, taps=weight.shape[1]).step.conv_step(x, state, weight, activation)


def _delta_step(qkv, a, b, A_log, dt_bias, state, key_heads):
    kernels = _kernels(qkv, a, b, key_dim=state.shape[2], value_dim=state.shape[3])
    return kernels.step.delta_step(qkv, a, b, A_log, dt_bias, state, key_heads)


_conv_step_op = register(
    "gdn_conv_step(Tensor x, Tensor(a!) state, Tensor weight, str? activation) -> Tensor",
    _conv_step,
    lambda x, state, weight, activation: x.new_empty(x.shape),
)
_delta_step_op = register(
    "gdn_delta_step(Tensor qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, int key_heads)"
    " -> Tensor",
    _delta_step,
    lambda qkv, a, b, A_log, dt_bias, state, key_heads: qkv.new_empty(*state.shape[:2], state.shape[3]),
)


def conv_step(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, activation: str | None = "silu"
) -> torch.Tensor:
    """The convolution of one more token, without gradients.

    Args:
        x: [B, D]. weight: [D, k].
        state: [B, D, kept], the last kept >= k - 1 tokens, x's dtype; moved up by one, in place.
        activation: "silu" or None.
    Returns:
        [B, D] in x's dtype.
    Raises:
        ValueError: a shape, dtype or device that is not served.
    """
    _check_no_gradient(x, state, weight)
    if x.dim() != 2 or state.shape[:2] != x.shape or state.shape[2] < weight.shape[1] - 1:
        raise ValueError(f"state has shape {list(state.shape)}, x {list(x.shape)}: pass [B, D, kept >= k - 1], [B, D]")
    return _conv_step_op(x, state, weight, activation)


def delta_step(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """Gates and delta rule of one more token, q and k L2-normalised, without gradients.

    Args:
        qkv: [B, 2 H K + HV V], the convolution's output. a, b: [B, HV]. A_log, dt_bias: [HV].
        state: [B, HV, K, V], contiguous; S <- e^g S + k beta (v - e^g S^T k)^T, in place.
        key_heads: H.
    Returns:
        o = K^-1/2 S^T q, [B, HV, V] in qkv's dtype.
    Raises:
        ValueError: a shape, dtype or device that is not served.
    """
    _check_no_gradient(qkv, a, b, A_log, dt_bias, state)
    batch, heads, key_dim, value_dim = state.shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    if qkv.shape != (batch, channels) or not state.is_contiguous():
        raise ValueError(
            f"qkv has shape {list(qkv.shape)}, state {list(state.shape)} with strides {state.stride()}: "
            f"pass [B, {channels}] and a contiguous [B, HV, K, V]"
        )
    return _delta_step_op(qkv, a, b, A_log, dt_bias, state, key_heads)
