"""What the states do not enter: inverses, attention blocks and scales of all chunks at once.

B batch, T tokens, H key heads, HV value heads, G group (HV / H), K key dim, C chunk.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference import L2NORM_EPS
from .chunks import (
    BETA,
    CHUNK,
    GATE,
    KEY_NORM,
    QUERY,
    QUERY_NORM,
    READ,
    SCALE_ROWS,
    WRITE,
    Chunks,
    chunk_tokens,
)
from .launch import dot_precision, launch, on_device

_READ = tl.constexpr(READ)
_WRITE = tl.constexpr(WRITE)
_QUERY = tl.constexpr(QUERY)
_BETA = tl.constexpr(BETA)
_GATE = tl.constexpr(GATE)
_KEY_NORM = tl.constexpr(KEY_NORM)
_QUERY_NORM = tl.constexpr(QUERY_NORM)
_SCALE_ROWS = tl.constexpr(SCALE_ROWS)


# What is prepared: for the outputs, for the summary, for the gradients.
OUTPUT = 0
SUMMARY = 1
GRADIENT = 2


class Prepared(NamedTuple):
    """Two [C, C] blocks of each chunk, in the dtype of k, and the scales of its tokens.

    With Ag = (A∘D) diag(beta): OUTPUT has diag(R) Ag and P Ag, SUMMARY has diag(R) Ag and diag(x) A diag(beta) (the
    same without gate), GRADIENT has A∘D and P.
    """

    both: torch.Tensor  # [2, chunks, HV, C, C]: the first, then the second
    first: torch.Tensor
    second: torch.Tensor
    scales: torch.Tensor  # [chunks, HV, SCALE_ROWS, C], fp32


_OUTPUT = tl.constexpr(OUTPUT)
_SUMMARY = tl.constexpr(SUMMARY)
_GRADIENT = tl.constexpr(GRADIENT)


@triton.jit
def unit_lower_inverse(b_lower, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular [C, C], C = 64: 2 x 2 blocks, joined in pairs five times.

    For two blocks: [[I + L1, 0], [B, I + L2]]^-1 = [[X1, 0], [-X2 B X1, X2]], so X - X (off-diagonal part of L) X with
    X the block diagonal of the inverses. Powers of L, which a product form of the inverse would take, grow as
    binomials before they cancel; here every factor is a part of L or of the inverse. With |k|^2 beta <= 2 no entry of
    the inverse exceeds 2, so fp16 operands, which round as tf32 does at twice its speed, do not overflow.
    """
    # The highest bit in which row and column differ is the level at which their blocks join.
    o_bits = tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]
    b_inverse = tl.where(o_bits == 0, 1.0, tl.where(o_bits == 1, -b_lower, 0.0))
    for level in tl.static_range(1, 6):
        b_off = tl.where((o_bits >> level) == 1, b_lower, 0.0).to(DTYPE)
        b_rounded = b_inverse.to(DTYPE)
        b_half = tl.dot(b_off, b_rounded, input_precision=PRECISION)
        b_inverse -= tl.dot(b_rounded, b_half.to(DTYPE), input_precision=PRECISION)
    return b_inverse


@triton.jit
def inverse_norm(b_x, EPS: tl.constexpr, NORMALIZE: tl.constexpr):
    """(|x|^2 + eps)^-1/2 of the rows of [C, K], or ones."""
    if NORMALIZE:
        b_wide = b_x.to(tl.float32)
        b_norm = tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) + EPS)
    else:
        b_norm = tl.full([b_x.shape[0]], 1.0, dtype=tl.float32)
    return b_norm


@triton.jit
def _prepare_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_first,
    p_second,
    p_scales,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    scale,
    H,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MODE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_DTYPE: tl.constexpr,
):
    """One chunk of one key head and its GROUP value heads; grid (chunks * H)."""
    pid = tl.program_id(0)
    i_chunk = (pid // H).to(tl.int64)
    i_h = pid % H
    HV = H * GROUP
    i_row, first, length = chunk_tokens(pid // H, p_starts, p_lengths, seq_len, chunks_per_document, C, PACKED)

    start = i_row.to(tl.int64) * seq_len + first
    o_c = tl.arange(0, C)
    m_c = o_c < length
    o_tile = o_c[:, None] * (H * K) + tl.arange(0, K)[None, :]
    b_k = tl.load(p_k + (start * H + i_h) * K + o_tile, mask=m_c[:, None], other=0.0)
    b_key_norm = inverse_norm(b_k, EPS, NORMALIZE)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_kk *= b_key_norm[:, None] * b_key_norm[None, :]
    if MODE != _SUMMARY:
        b_q = tl.load(p_q + (start * H + i_h) * K + o_tile, mask=m_c[:, None], other=0.0)
        b_query_norm = inverse_norm(b_q, EPS, NORMALIZE)
        b_qk = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_qk *= scale * b_query_norm[:, None] * b_key_norm[None, :]

    # What a value head can compute anew must not occupy registers while the next one runs.
    for i_group in tl.range(0, GROUP, disable_licm=True):
        i_hv = i_h * GROUP + i_group
        o_token = (start + o_c) * HV + i_hv
        b_g = tl.load(p_g + o_token, mask=m_c, other=0.0).to(tl.float32)
        b_beta = tl.load(p_beta + o_token, mask=m_c, other=0.0).to(tl.float32)
        b_gate = tl.cumsum(b_g, axis=0)
        last = tl.sum(b_g, axis=0)
        m_strict = o_c[:, None] > o_c[None, :]
        b_inverse = unit_lower_inverse(tl.where(m_strict, b_beta[:, None] * b_kk, 0.0), C, INVERSE_DTYPE, PRECISION)
        o_block = o_c[:, None] * C + o_c[None, :]
        i_block = (i_chunk * HV + i_hv) * C * C
        b_begin = tl.exp(b_gate)
        # Zero past the document's end: the tile there may hold the next document's tokens.
        b_write = tl.where(m_c, tl.exp(last - b_gate) * b_key_norm, 0.0)
        m_lower = o_c[:, None] >= o_c[None, :]
        b_decay = tl.exp(tl.where(m_lower, b_gate[:, None] - b_gate[None, :], float("-inf")))
        b_gated = b_inverse * b_decay
        if MODE == _OUTPUT:
            b_gated *= b_beta[None, :]
            b_first = b_write[:, None] * b_gated
            b_second = tl.dot((b_qk * b_decay).to(b_k.dtype), b_gated.to(b_k.dtype), input_precision=PRECISION)
        elif MODE == _SUMMARY:
            b_first = b_write[:, None] * b_gated * b_beta[None, :]
            b_second = b_key_norm[:, None] * b_inverse * b_beta[None, :]
        else:
            b_first = b_gated
            b_second = b_qk * b_decay
        tl.store(p_first + i_block + o_block, b_first.to(p_first.dtype.element_ty))
        tl.store(p_second + i_block + o_block, b_second.to(p_second.dtype.element_ty))

        p_row = p_scales + (i_chunk * HV + i_hv) * (_SCALE_ROWS * C) + o_c
        tl.store(p_row + _READ * C, tl.where(m_c, b_begin * b_key_norm, 0.0))
        tl.store(p_row + _GATE * C, b_gate)
        if MODE != _SUMMARY:
            tl.store(p_row + _QUERY * C, tl.where(m_c, scale * b_begin * b_query_norm, 0.0))
        if MODE != _OUTPUT:
            tl.store(p_row + _KEY_NORM * C, tl.where(m_c, b_key_norm, 0.0))
        if MODE == _GRADIENT:
            tl.store(p_row + _WRITE * C, b_write)
            tl.store(p_row + _BETA * C, b_beta)
            tl.store(p_row + _QUERY_NORM * C, tl.where(m_c, b_query_norm, 0.0))


def prepare(
    q: torch.Tensor | None,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    *,
    mode: int,
    scale: float,
    normalize: bool,
) -> Prepared:
    """The blocks that `Prepared` names, and scales, of every chunk.

    A = (I + tril(diag(beta) K K^T, -1))^-1,  D_ij = e^(G_i - G_j) for i >= j,  P = s (Q K^T)∘D

    Args:
        q, k: [B, T, H, K], contiguous; SUMMARY takes no q. g, beta: [B, T, HV].
        scale: factor s on q. normalize: L2-normalise q and k.
    """
    _, seq_len, H, K = k.shape
    HV = g.shape[2]
    both = k.new_empty(2, chunks.count, HV, CHUNK, CHUNK)
    first, second = both
    scales = torch.empty(chunks.count, HV, SCALE_ROWS, CHUNK, dtype=torch.float32, device=k.device)
    precision = dot_precision(k.dtype)
    with on_device(k):
        _prepare_kernel[(chunks.count * H,)](
            q,
            k,
            g,
            beta,
            first,
            second,
            scales,
            chunks.starts,
            chunks.lengths,
            seq_len,
            chunks.per_document,
            scale,
            H,
            GROUP=HV // H,
            K=K,
            C=CHUNK,
            EPS=L2NORM_EPS,
            NORMALIZE=normalize,
            MODE=mode,
            PACKED=chunks.starts is not None,
            PRECISION=precision,
            INVERSE_DTYPE=tl.float32 if k.dtype == torch.float32 else tl.float16,
            **launch("prepare", K, k.dtype).options,
        )
    return Prepared(both, first, second, scales)
