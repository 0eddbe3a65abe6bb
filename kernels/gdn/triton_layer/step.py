"""One token of decoding: the convolution's and the delta rule's states, updated in place.

B rows, D channels, k taps, H key heads, HV value heads, K/V head dims.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

from ..reference import L2NORM_EPS
from ..triton_stages.launch import Kernel, on_device
from .math import sigmoid, softplus

CHANNELS = 256
# Columns of a head's state that a program updates.
COLUMNS = 32
_EPS = tl.constexpr(L2NORM_EPS)


@Kernel
@triton.jit
def _conv_kernel(
    p_x,
    p_state,
    p_weight,
    p_y,
    channels,
    channel_blocks,
    stride_x,
    stride_row,
    stride_channel,
    stride_kept,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y = act(sum_j w_j s_j) over the last k of the kept tokens and the new one; the kept ones move up by one."""
    i_row = (tl.program_id(0) // channel_blocks).to(tl.int64)
    o_d = (tl.program_id(0) % channel_blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_d = o_d < channels
    b_x = tl.load(p_x + i_row * stride_x + o_d, mask=is_d, other=0.0)
    p_state += i_row * stride_row + o_d * stride_channel
    b_y = tl.load(p_weight + o_d * TAPS + (TAPS - 1), mask=is_d, other=0.0).to(tl.float32) * b_x.to(tl.float32)
    for j in tl.static_range(1, KEPT):
        b_s = tl.load(p_state + j * stride_kept, mask=is_d, other=0.0)
        # The kept token j is KEPT - j before the new one.
        if KEPT - j < TAPS:
            b_w = tl.load(p_weight + o_d * TAPS + (TAPS - 1 - KEPT + j), mask=is_d, other=0.0).to(tl.float32)
            b_y += b_w * b_s.to(tl.float32)
        tl.store(p_state + (j - 1) * stride_kept, b_s, mask=is_d)
    tl.store(p_state + (KEPT - 1) * stride_kept, b_x.to(p_state.dtype.element_ty), mask=is_d)
    if SILU:
        b_y = b_y * sigmoid(b_y)
    tl.store(p_y + i_row * channels + o_d, b_y.to(p_y.dtype.element_ty), mask=is_d)


@Kernel
@triton.jit
def _delta_kernel(
    p_qkv,
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_state,
    p_o,
    stride_a,
    stride_b,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """S <- e^g S + k beta (v - e^g S^T k)^T and o = s S^T q, of [K, BLOCK_V] of a head's state."""
    i_head = tl.program_id(0) // (V // BLOCK_V)
    i_v = (tl.program_id(0) % (V // BLOCK_V)) * BLOCK_V
    i_row = (i_head // HV).to(tl.int64)
    i_value = i_head % HV
    i_key = i_value // (HV // H)
    o_k, o_v = tl.arange(0, K), i_v + tl.arange(0, BLOCK_V)
    p_qkv += i_row * (2 * H * K + HV * V)
    b_q = tl.load(p_qkv + i_key * K + o_k).to(tl.float32)
    b_k = tl.load(p_qkv + H * K + i_key * K + o_k).to(tl.float32)
    b_v = tl.load(p_qkv + 2 * H * K + i_value * V + o_v).to(tl.float32)
    b_q = b_q * (tl.rsqrt(tl.sum(b_q * b_q, axis=0) + _EPS) * scale)
    b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, axis=0) + _EPS)
    a = tl.load(p_a + i_row * stride_a + i_value).to(tl.float32) + tl.load(p_dt_bias + i_value).to(tl.float32)
    g = -tl.exp(tl.load(p_A_log + i_value).to(tl.float32)) * softplus(a)
    beta = sigmoid(tl.load(p_b + i_row * stride_b + i_value).to(tl.float32)).to(p_b.dtype.element_ty).to(tl.float32)
    p_state += i_head.to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]
    b_state = tl.exp(g) * tl.load(p_state).to(tl.float32)
    b_error = beta * (b_v - tl.sum(b_k[:, None] * b_state, axis=0))
    b_state += b_k[:, None] * b_error[None, :]
    tl.store(p_state, b_state.to(p_state.dtype.element_ty))
    b_o = tl.sum(b_q[:, None] * b_state, axis=0)
    tl.store(p_o + i_head.to(tl.int64) * V + o_v, b_o.to(p_o.dtype.element_ty))


def conv_step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, activation: str | None) -> torch.Tensor:
    """[B, D] of the next token, `state` [B, D, kept] updated in place; see `layer.conv_step`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, channels = x.shape
    y = x.new_empty(x.shape)
    blocks = triton.cdiv(channels, CHANNELS)
    with on_device(x):
        _conv_kernel[(batch * blocks,)](
            x,
            state,
            weight.contiguous(),
            y,
            channels,
            blocks,
            x.stride(0),
            *state.stride(),
            TAPS=weight.shape[1],
            KEPT=state.shape[-1],
            SILU=activation == "silu",
            BLOCK_D=CHANNELS,
            num_warps=4,
        )
    return y


def delta_step(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """[B, HV, V] of the next token, `state` [B, HV, K, V] updated in place; see `layer.delta_step`."""
    batch, heads, key_dim, value_dim = state.shape
    qkv = qkv.contiguous()
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a, b))
    o = qkv.new_empty(batch, heads, value_dim)
    with on_device(qkv):
        _delta_kernel[(batch * heads * (value_dim // COLUMNS),)](
            qkv,
            a,
            b,
            A_log.contiguous(),
            dt_bias.contiguous(),
            state,
            o,
            a.stride(0),
            b.stride(0),
            key_dim**-0.5,
            H=key_heads,
            HV=heads,
            K=key_dim,
            V=value_dim,
            BLOCK_V=COLUMNS,
            num_warps=4,
        )
    return o
