"""Causal depthwise convolution with silu, and its backward.

B batch, T tokens, D channels, k taps (at most 4). A channel's weight is w[0..k-1], the last one on the token itself;
`distance` d counts tokens back from it, so d = 0 is w[k-1].
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..triton_stages.launch import Kernel, on_device
from .math import sigmoid

# Tokens and channels of a program, which is one warp; the backward holds more of each channel in registers.
STRIP, CHANNELS, BACKWARD_CHANNELS = 128, 128, 128
# Most outputs that the channels are split over.
SEGMENTS = 3


@Kernel
@triton.jit(do_not_specialize=["seq_len", "documents"])
def _before_kernel(p_cu_seqlens, p_before, seq_len, documents, STEPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """How many tokens of a token's own document stand before it, 3 where they are more or may lie before token 0."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # The document of token t is the last n with cu_seqlens[n] <= t: below `high` all are, `low` is one.
    b_low = tl.zeros([BLOCK_T], tl.int32)
    b_high = tl.zeros([BLOCK_T], tl.int32) + documents
    for _ in tl.static_range(STEPS):
        b_middle = (b_low + b_high) // 2
        b_is = tl.load(p_cu_seqlens + b_middle).to(tl.int32) <= o_t
        b_low = tl.where(b_is, b_middle, b_low)
        b_high = tl.where(b_is, b_high, b_middle)
    b_start = tl.load(p_cu_seqlens + b_low).to(tl.int32)
    b_before = tl.where(b_low == 0, 3, tl.minimum(o_t - b_start, 3))
    tl.store(p_before + o_t, b_before, mask=o_t < seq_len)


@triton.jit
def _segment(i_block, p_0, p_1, p_2, width_0, width_1, width_2, BLOCK_D: tl.constexpr):
    """The tensor that a block of channels belongs to, its width, its first channel of all, the block's first in it."""
    blocks_0 = tl.cdiv(width_0, BLOCK_D)
    blocks_1 = tl.cdiv(width_1, BLOCK_D)
    is_2 = i_block >= blocks_0 + blocks_1
    is_1 = i_block >= blocks_0
    p_segment = tl.where(is_2, p_2, tl.where(is_1, p_1, p_0))
    width = tl.where(is_2, width_2, tl.where(is_1, width_1, width_0))
    first = tl.where(is_2, width_0 + width_1, tl.where(is_1, width_0, 0))
    i_block = i_block - tl.where(is_2, blocks_0 + blocks_1, tl.where(is_1, blocks_0, 0))
    return p_segment, width, first, i_block * BLOCK_D


@triton.jit
def _load_token(p, i_t, stride, seq_len, o_d, is_d):
    return tl.load(p + i_t.to(tl.int64) * stride + o_d, mask=is_d & (i_t < seq_len), other=0.0)


@triton.jit
def _load_group(p, i_t, stride, seq_len, o_d, is_d):
    """Tokens t to t + 3 of a tensor, as they are stored; zero behind the row."""
    return (
        _load_token(p, i_t, stride, seq_len, o_d, is_d),
        _load_token(p, i_t + 1, stride, seq_len, o_d, is_d),
        _load_token(p, i_t + 2, stride, seq_len, o_d, is_d),
        _load_token(p, i_t + 3, stride, seq_len, o_d, is_d),
    )


@triton.jit
def _load_before(p_before, i_t, seq_len):
    """`_before_kernel`'s count for token t; where nothing is packed nobody looks at it."""
    return i_t if p_before is None else tl.load(p_before + i_t, mask=i_t < seq_len, other=0)


@triton.jit
def _load_before_group(p_before, i_t, seq_len):
    return (
        _load_before(p_before, i_t, seq_len),
        _load_before(p_before, i_t + 1, seq_len),
        _load_before(p_before, i_t + 2, seq_len),
        _load_before(p_before, i_t + 3, seq_len),
    )


@triton.jit
def _load_weights(p_weight, o_d, is_d, TAPS: tl.constexpr):
    """The weight at distance 0 to 3, zero where there is none."""
    p_w = p_weight + o_d * TAPS + (TAPS - 1)
    return (
        tl.load(p_w, mask=is_d, other=0.0).to(tl.float32),
        tl.load(p_w - 1, mask=is_d & (TAPS > 1), other=0.0).to(tl.float32),
        tl.load(p_w - 2, mask=is_d & (TAPS > 2), other=0.0).to(tl.float32),
        tl.load(p_w - 3, mask=is_d & (TAPS > 3), other=0.0).to(tl.float32),
    )


@triton.jit
def _load_past(p_x, p_halo, i_t, stride, channels, o_d, is_d, TAPS: tl.constexpr):
    """The tokens at distance 1 to 3 before token t; before token 0 stands the halo, or zero."""
    p_x += (i_t - 1).to(tl.int64) * stride + o_d
    x1 = tl.load(p_x, mask=is_d & (i_t > 0), other=0.0).to(tl.float32)
    x2 = tl.load(p_x - stride, mask=is_d & (i_t > 1), other=0.0).to(tl.float32)
    x3 = tl.load(p_x - 2 * stride, mask=is_d & (i_t > 2), other=0.0).to(tl.float32)
    if p_halo is not None:
        p_halo += (TAPS - 2) * channels + o_d
        is_first = is_d & (i_t == 0)
        x1 += tl.load(p_halo, mask=is_first & (TAPS > 1), other=0.0).to(tl.float32)
        x2 += tl.load(p_halo - channels, mask=is_first & (TAPS > 2), other=0.0).to(tl.float32)
        x3 += tl.load(p_halo - 2 * channels, mask=is_first & (TAPS > 3), other=0.0).to(tl.float32)
    return x1, x2, x3


@triton.jit
def _of_document(b, before, distance: tl.constexpr, PACKED: tl.constexpr):
    """What comes from, or goes to, the token at a distance: nothing if that belongs to another document."""
    return tl.where(before >= distance, b, 0.0) if PACKED else b


@Kernel
@triton.jit(do_not_specialize=["seq_len", "strips"])
def _forward_kernel(
    p_x,
    p_weight,
    p_halo,
    p_before,
    p_y0,
    p_y1,
    p_y2,
    seq_len,
    strips,
    channel_blocks,
    stride_row,
    stride_token,
    channels,
    width_0,
    width_1,
    width_2,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y_t = act(sum_d w[d] x_{t-d}) of a strip, one token after another: the three before it stay in registers."""
    i_block = tl.program_id(0) % channel_blocks
    i_strip = tl.program_id(0) // channel_blocks
    i_first = (i_strip % strips) * STRIP
    i_row = (i_strip // strips).to(tl.int64)
    p_y, width, first, o_first = _segment(i_block, p_y0, p_y1, p_y2, width_0, width_1, width_2, BLOCK_D)
    PACKED: tl.constexpr = p_before is not None
    o_d = o_first + tl.arange(0, BLOCK_D)
    is_d = o_d < width
    p_y += i_row * seq_len * width
    p_x += i_row * stride_row + first
    if p_halo is not None:
        p_halo += i_row * (TAPS - 1) * channels + first
    w = _load_weights(p_weight, first + o_d, is_d, TAPS)
    x1, x2, x3 = _load_past(p_x, p_halo, i_first, stride_token, channels, o_d, is_d, TAPS)
    next_x = _load_group(p_x, i_first, stride_token, seq_len, o_d, is_d)
    next_before = _load_before_group(p_before, i_first, seq_len)
    for i in range(0, STRIP, 4):
        i_t = i_first + i
        x, before = next_x, next_before
        next_x = _load_group(p_x, i_t + 4, stride_token, seq_len, o_d, is_d)
        next_before = _load_before_group(p_before, i_t + 4, seq_len)
        for j in tl.static_range(4):
            x0 = x[j].to(tl.float32)
            b_y = w[0] * x0 + w[1] * _of_document(x1, before[j], 1, PACKED)
            b_y += w[2] * _of_document(x2, before[j], 2, PACKED)
            b_y += w[3] * _of_document(x3, before[j], 3, PACKED)
            if SILU:
                b_y *= sigmoid(b_y)
            p_out = p_y + (i_t + j).to(tl.int64) * width + o_d
            tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=is_d & (i_t + j < seq_len))
            x1, x2, x3 = x0, x1, x2


@triton.jit
def _token(b_x, b_dy, before, x, dx, dw, w, SILU: tl.constexpr, PACKED: tl.constexpr):
    """One token of the backward. Tuples go by distance from it.

    Args:
        b_x, b_dy: the token and the gradient of its output. before: see `_before_kernel`.
        x: the three tokens before it. dx: what their gradients amount to so far. dw: likewise, of the weights.
    Returns:
        x and dx for the next token, dw, and the gradient of the token three before, complete.
    """
    b_x = b_x.to(tl.float32)
    b_dy = b_dy.to(tl.float32)
    x1 = _of_document(x[0], before, 1, PACKED)
    x2 = _of_document(x[1], before, 2, PACKED)
    x3 = _of_document(x[2], before, 3, PACKED)
    if SILU:
        b_sum = w[0] * b_x + w[1] * x1 + w[2] * x2 + w[3] * x3
        b_sigmoid = sigmoid(b_sum)
        b_dy = b_dy * b_sigmoid * (1.0 + b_sum * (1.0 - b_sigmoid))
    dx1 = dx[0] + w[1] * _of_document(b_dy, before, 1, PACKED)
    dx2 = dx[1] + w[2] * _of_document(b_dy, before, 2, PACKED)
    dx3 = dx[2] + w[3] * _of_document(b_dy, before, 3, PACKED)
    dw = (dw[0] + b_dy * b_x, dw[1] + b_dy * x1, dw[2] + b_dy * x2, dw[3] + b_dy * x3)
    return (b_x, x[0], x[1]), (w[0] * b_dy, dx1, dx2), dw, dx3


@triton.jit
def _store_token(p_dx, p_dhalo, b_dx, i_t, i_first, seq_len, channels, o_d, is_d, TAPS: tl.constexpr):
    """Stores a token's gradient if it is this strip's, or the halo's."""
    b_dx = b_dx.to(p_dx.dtype.element_ty)
    tl.store(p_dx + i_t.to(tl.int64) * channels + o_d, b_dx, mask=is_d & (i_t >= i_first) & (i_t < seq_len))
    if p_dhalo is not None:
        is_halo = (i_first == 0) & (i_t < 0) & (i_t >= 1 - TAPS)
        tl.store(p_dhalo + (i_t + (TAPS - 1)) * channels + o_d, b_dx, mask=is_d & is_halo)


@Kernel
@triton.jit(do_not_specialize=["seq_len", "strips"])
def _backward_kernel(
    p_x,
    p_weight,
    p_halo,
    p_before,
    p_dy0,
    p_dy1,
    p_dy2,
    p_dx,
    p_dhalo,
    p_dweight,
    seq_len,
    strips,
    channel_blocks,
    stride_row,
    stride_token,
    channels,
    width_0,
    width_1,
    width_2,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dx, dhalo and a strip's part of dweight, one token after another.

    The three tokens before the current one and their unfinished gradients stay in registers. Behind the strip come
    three more tokens, whose outputs depend on its last ones.
    """
    i_block = tl.program_id(0) % channel_blocks
    i_strip = tl.program_id(0) // channel_blocks
    i_first = (i_strip % strips) * STRIP
    i_row = (i_strip // strips).to(tl.int64)
    p_dy, width, first, o_first = _segment(i_block, p_dy0, p_dy1, p_dy2, width_0, width_1, width_2, BLOCK_D)
    PACKED: tl.constexpr = p_before is not None
    o_d = o_first + tl.arange(0, BLOCK_D)
    is_d = o_d < width
    p_dy += i_row * seq_len * width
    p_x += i_row * stride_row + first
    p_dx += i_row * seq_len * channels + first
    if p_halo is not None:
        p_halo += i_row * (TAPS - 1) * channels + first
        p_dhalo += i_row * (TAPS - 1) * channels + first
    w = _load_weights(p_weight, first + o_d, is_d, TAPS)
    x = _load_past(p_x, p_halo, i_first, stride_token, channels, o_d, is_d, TAPS)
    b_zero = tl.zeros([BLOCK_D], tl.float32)
    dx = (b_zero, b_zero, b_zero)
    dw = (b_zero, b_zero, b_zero, b_zero)
    next_x = _load_group(p_x, i_first, stride_token, seq_len, o_d, is_d)
    next_dy = _load_group(p_dy, i_first, width, seq_len, o_d, is_d)
    next_before = _load_before_group(p_before, i_first, seq_len)
    for i in range(0, STRIP, 4):
        i_t = i_first + i
        now_x, now_dy, before = next_x, next_dy, next_before
        next_x = _load_group(p_x, i_t + 4, stride_token, seq_len, o_d, is_d)
        next_dy = _load_group(p_dy, i_t + 4, width, seq_len, o_d, is_d)
        next_before = _load_before_group(p_before, i_t + 4, seq_len)
        for j in tl.static_range(4):
            x, dx, dw, b_done = _token(now_x[j], now_dy[j], before[j], x, dx, dw, w, SILU, PACKED)
            _store_token(p_dx, p_dhalo, b_done, i_t + (j - 3), i_first, seq_len, channels, o_d, is_d, TAPS)
    i_t = i_first + STRIP
    dw_strip = dw
    for j in tl.static_range(3):
        x, dx, dw, b_done = _token(next_x[j], next_dy[j], next_before[j], x, dx, dw, w, SILU, PACKED)
        _store_token(p_dx, p_dhalo, b_done, i_t + (j - 3), i_first, seq_len, channels, o_d, is_d, TAPS)
    p_dweight += i_strip.to(tl.int64) * TAPS * channels + first
    for d in tl.static_range(TAPS):
        tl.store(p_dweight + (TAPS - 1 - d) * channels + o_d, dw_strip[d], mask=is_d)


def _before(cu_seqlens: torch.Tensor | None, seq_len: int) -> torch.Tensor | None:
    """See `_before_kernel`: int32 [T], or None where nothing is packed."""
    if cu_seqlens is None:
        return None
    documents, block = cu_seqlens.numel() - 1, 1024
    before = torch.empty(seq_len, dtype=torch.int32, device=cu_seqlens.device)
    # Powers of two, so that the number of documents compiles anew only when it has doubled.
    steps = max(4, documents.bit_length())
    _before_kernel[(triton.cdiv(seq_len, block),)](cu_seqlens, before, seq_len, documents, steps, block, num_warps=4)
    return before


def _padded(values: Sequence, fill: object) -> list:
    return [*values, *[fill] * (SEGMENTS - len(values))]


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    halo: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    activation: str | None,
    widths: Sequence[int],
) -> list[torch.Tensor]:
    """The outputs [B, T, width] of consecutive channels; see `layer.causal_conv1d`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, seq_len, channels = x.shape
    outputs = [x.new_empty(batch, seq_len, width) for width in widths]
    strips = triton.cdiv(seq_len, STRIP)
    channel_blocks = sum(triton.cdiv(width, CHANNELS) for width in widths)
    with on_device(x):
        _forward_kernel[(batch * strips * channel_blocks,)](
            x,
            weight.contiguous(),
            None if halo is None else halo.contiguous(),
            _before(cu_seqlens, seq_len),
            *_padded(outputs, outputs[0]),
            seq_len,
            strips,
            channel_blocks,
            x.stride(0),
            x.stride(1),
            channels,
            *_padded(widths, 0),
            TAPS=weight.shape[1],
            SILU=activation == "silu",
            STRIP=STRIP,
            BLOCK_D=CHANNELS,
            num_warps=1,
        )
    return outputs


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    halo: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    activation: str | None,
    douts: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dx, dweight and dhalo from the gradients of the outputs."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, seq_len, channels = x.shape
    taps, widths = weight.shape[1], [dout.shape[-1] for dout in douts]
    dx = x.new_empty(x.shape)
    dhalo = None if halo is None else x.new_empty(halo.shape)
    strips = triton.cdiv(seq_len, STRIP)
    channel_blocks = sum(triton.cdiv(width, BACKWARD_CHANNELS) for width in widths)
    dweight = x.new_empty(batch * strips, taps, channels, dtype=torch.float32)
    with on_device(x):
        _backward_kernel[(batch * strips * channel_blocks,)](
            x,
            weight.contiguous(),
            None if halo is None else halo.contiguous(),
            _before(cu_seqlens, seq_len),
            *_padded([dout.contiguous() for dout in douts], dx),
            dx,
            dhalo,
            dweight,
            seq_len,
            strips,
            channel_blocks,
            x.stride(0),
            x.stride(1),
            channels,
            *_padded(widths, 0),
            TAPS=taps,
            SILU=activation == "silu",
            STRIP=STRIP,
            BLOCK_D=BACKWARD_CHANNELS,
            num_warps=1,
        )
    # Summed in a fixed order: the same bits every time.
    return dx, dweight.sum(0).t().contiguous().to(weight.dtype), dhalo
