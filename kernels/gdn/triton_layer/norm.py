"""Gated RMS norm, and its backward.

V values of a head. All tensors are [rows, V], a row one head of one token; the weight is [V].
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import Any

import torch
import triton
import triton.language as tl

from ..triton_stages.launch import Kernel, on_device
from .math import sigmoid

# Elements of a block, forward and backward, and most programs of the backward: each leaves one partial sum of the
# weight's gradient.
ELEMENTS, BACKWARD_ELEMENTS, PROGRAMS = 2048, 2048, 1056


@triton.jit
def _normalize(p_x, p_z, o_in, is_in, eps, V: tl.constexpr):
    """x, its inverse root mean square, the normed x as x's dtype holds it, z and its sigmoid, of a block of rows."""
    b_x = tl.load(p_x + o_in, mask=is_in, other=0.0).to(tl.float32)
    b_z = tl.load(p_z + o_in, mask=is_in, other=0.0).to(tl.float32)
    b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / V + eps)
    b_normed = (b_x * b_r[:, None]).to(p_x.dtype.element_ty).to(tl.float32)
    return b_x, b_r, b_normed, b_z, sigmoid(b_z)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(p_x, p_z, p_weight, p_y, rows, eps, V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr):
    i_r = tl.program_id(0).to(tl.int64) * BLOCK_R
    o_r, o_v = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_V)
    is_in = (i_r + o_r < rows) & (o_v < V)[None, :]
    o_in = i_r * V + o_r * V + o_v[None, :]
    b_w = tl.load(p_weight + o_v, mask=o_v < V, other=0.0)
    _, _, b_normed, b_z, b_sigmoid = _normalize(p_x, p_z, o_in, is_in, eps, V)
    # Where weight and x are both of 16 bits, so is their product.
    b_scaled = b_w.to(tl.float32)[None, :] * b_normed
    if b_w.dtype == p_x.dtype.element_ty:
        b_scaled = b_scaled.to(b_w.dtype).to(tl.float32)
    tl.store(p_y + o_in, (b_scaled * (b_z * b_sigmoid)).to(p_y.dtype.element_ty), mask=is_in)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    p_x,
    p_z,
    p_weight,
    p_dy,
    p_dx,
    p_dz,
    p_partial,
    rows,
    eps,
    V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """With n = x r and s = silu(z): dz = dy w n silu'(z), dw = sum dy s n, dx = r (dn - n mean(dn n)), dn = dy s w."""
    o_r, o_v = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_V)
    b_w = tl.load(p_weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for i in range(0, tl.cdiv(rows, BLOCK_R * tl.num_programs(0))):
        i_r = (tl.program_id(0).to(tl.int64) + i * tl.num_programs(0)) * BLOCK_R
        is_in = (i_r + o_r < rows) & (o_v < V)[None, :]
        o_in = i_r * V + o_r * V + o_v[None, :]
        b_dy = tl.load(p_dy + o_in, mask=is_in, other=0.0).to(tl.float32)
        b_x, b_r, b_normed, b_z, b_sigmoid = _normalize(p_x, p_z, o_in, is_in, eps, V)
        b_dscaled = b_dy * (b_z * b_sigmoid)
        b_dz = b_dy * (b_w[None, :] * b_normed) * (b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid)))
        b_dw += b_dscaled * b_normed
        b_dnormed = b_dscaled * b_w[None, :]
        b_x *= b_r[:, None]
        b_mean = tl.sum(b_dnormed * b_x, axis=1) / V
        b_dx = b_r[:, None] * (b_dnormed - b_x * b_mean[:, None])
        tl.store(p_dx + o_in, b_dx.to(p_dx.dtype.element_ty), mask=is_in)
        tl.store(p_dz + o_in, b_dz.to(p_dz.dtype.element_ty), mask=is_in)
    tl.store(p_partial + tl.program_id(0) * V + o_v, tl.sum(b_dw, axis=0), mask=o_v < V)


def _blocks(dim: int, elements: int) -> dict[str, Any]:
    block_v = triton.next_power_of_2(dim)
    return {"V": dim, "BLOCK_R": max(1, elements // block_v), "BLOCK_V": block_v}


def forward(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The normed and gated rows, in x's dtype; see `layer.gated_rms_norm`."""
    x, z = x.contiguous(), z.contiguous()
    y = torch.empty_like(x)
    rows, blocks = x.numel() // x.shape[-1], _blocks(x.shape[-1], ELEMENTS)
    with on_device(x):
        _forward_kernel[(triton.cdiv(rows, blocks["BLOCK_R"]),)](x, z, weight.contiguous(), y, rows, eps, **blocks)
    return y


def backward(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dz and dweight, each in the dtype of what it belongs to."""
    x, z, dy = x.contiguous(), z.contiguous(), dy.contiguous()
    dx, dz = torch.empty_like(x), torch.empty_like(z)
    rows, blocks = x.numel() // x.shape[-1], _blocks(x.shape[-1], BACKWARD_ELEMENTS)
    programs = min(PROGRAMS, triton.cdiv(rows, blocks["BLOCK_R"]))
    partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    with on_device(x):
        _backward_kernel[(programs,)](x, z, weight.contiguous(), dy, dx, dz, partial, rows, eps, **blocks)
    # Summed in a fixed order: the same bits every time.
    return dx, dz, partial.sum(0).to(weight.dtype)
