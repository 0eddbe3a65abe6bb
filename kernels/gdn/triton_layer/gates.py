"""Log-decay and step size of each token, and their backward.

HV value heads. All tensors of tokens are [rows, HV], a row one token; parameters are [HV].
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import Any

import torch
import triton
import triton.language as tl

from ..triton_stages.launch import Kernel, on_device
from .math import sigmoid, softplus

# Elements of a block, and most programs of the backward: each leaves one partial sum of the parameters' gradients.
ELEMENTS, PROGRAMS = 4096, 528


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_g,
    p_beta,
    rows,
    stride_a,
    stride_b,
    HV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64) * BLOCK_R
    o_r, o_h = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_H)
    is_h = o_h < HV
    b_scale = -tl.exp(tl.load(p_A_log + o_h, mask=is_h, other=0.0).to(tl.float32))
    b_bias = tl.load(p_dt_bias + o_h, mask=is_h, other=0.0).to(tl.float32)
    is_in = (i_r + o_r < rows) & is_h[None, :]
    b_a = tl.load(p_a + i_r * stride_a + o_r * stride_a + o_h[None, :], mask=is_in, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + i_r * stride_b + o_r * stride_b + o_h[None, :], mask=is_in, other=0.0).to(tl.float32)
    o_out = i_r * HV + o_r * HV + o_h[None, :]
    tl.store(p_g + o_out, b_scale[None, :] * softplus(b_a + b_bias[None, :]), mask=is_in)
    tl.store(p_beta + o_out, sigmoid(b_b).to(p_beta.dtype.element_ty), mask=is_in)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_dg,
    p_dbeta,
    p_da,
    p_db,
    p_partial,
    rows,
    stride_a,
    stride_b,
    HV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """da, db, and this program's part of dA_log and ddt_bias; blocks go to the programs in turn."""
    o_r, o_h = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_H)
    is_h = o_h < HV
    b_scale = -tl.exp(tl.load(p_A_log + o_h, mask=is_h, other=0.0).to(tl.float32))
    b_bias = tl.load(p_dt_bias + o_h, mask=is_h, other=0.0).to(tl.float32)
    b_dA = tl.zeros([BLOCK_H], tl.float32)
    b_dbias = tl.zeros([BLOCK_H], tl.float32)
    for i in range(0, tl.cdiv(rows, BLOCK_R * tl.num_programs(0))):
        i_r = (tl.program_id(0).to(tl.int64) + i * tl.num_programs(0)) * BLOCK_R
        is_in = (i_r + o_r < rows) & is_h[None, :]
        o_out = i_r * HV + o_r * HV + o_h[None, :]
        b_a = tl.load(p_a + i_r * stride_a + o_r * stride_a + o_h[None, :], mask=is_in, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + i_r * stride_b + o_r * stride_b + o_h[None, :], mask=is_in, other=0.0).to(tl.float32)
        b_dg = tl.load(p_dg + o_out, mask=is_in, other=0.0).to(tl.float32)
        b_dbeta = tl.load(p_dbeta + o_out, mask=is_in, other=0.0).to(tl.float32)
        b_x = b_a + b_bias[None, :]
        b_da = b_dg * b_scale[None, :] * sigmoid(b_x)
        b_dA += tl.sum(b_dg * b_scale[None, :] * softplus(b_x), axis=0)
        b_dbias += tl.sum(b_da, axis=0)
        b_beta = sigmoid(b_b)
        tl.store(p_da + o_out, b_da.to(p_da.dtype.element_ty), mask=is_in)
        tl.store(p_db + o_out, (b_dbeta * b_beta * (1.0 - b_beta)).to(p_db.dtype.element_ty), mask=is_in)
    p_partial += tl.program_id(0) * 2 * HV + o_h
    tl.store(p_partial, b_dA, mask=is_h)
    tl.store(p_partial + HV, b_dbias, mask=is_h)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, T, HV] as [B * T, HV] with neighbouring heads side by side."""
    return x.reshape(-1, x.shape[-1]) if x.stride(-1) == 1 else x.contiguous().reshape(-1, x.shape[-1])


def _blocks(heads: int) -> dict[str, Any]:
    block_h = triton.next_power_of_2(heads)
    return {"HV": heads, "BLOCK_R": max(1, ELEMENTS // block_h), "BLOCK_H": block_h}


def forward(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g in fp32 and beta in b's dtype; see `layer.gates`."""
    g, beta = a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)
    a, b = _rows(a), _rows(b)
    rows, heads = a.shape
    blocks = _blocks(heads)
    with on_device(a):
        _forward_kernel[(triton.cdiv(rows, blocks["BLOCK_R"]),)](
            a, b, A_log.contiguous(), dt_bias.contiguous(), g, beta, rows, a.stride(0), b.stride(0), **blocks
        )
    return g, beta


def backward(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    dg: torch.Tensor,
    dbeta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """da, db, dA_log and ddt_bias, each in the dtype of what it belongs to."""
    da, db = a.new_empty(a.shape), b.new_empty(b.shape)
    a, b = _rows(a), _rows(b)
    rows, heads = a.shape
    blocks = _blocks(heads)
    programs = min(PROGRAMS, triton.cdiv(rows, blocks["BLOCK_R"]))
    partial = a.new_empty(programs, 2, heads, dtype=torch.float32)
    with on_device(a):
        _backward_kernel[(programs,)](
            a,
            b,
            A_log.contiguous(),
            dt_bias.contiguous(),
            dg.contiguous(),
            dbeta.contiguous(),
            da,
            db,
            partial,
            rows,
            a.stride(0),
            b.stride(0),
            **blocks,
        )
    # Summed in a fixed order: the same bits every time.
    dA_log, ddt_bias = partial.sum(0).unbind(0)
    return da, db, dA_log.to(A_log.dtype, copy=True), ddt_bias.to(dt_bias.dtype, copy=True)
