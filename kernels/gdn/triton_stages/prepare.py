"""What the states do not enter: inverses, attention blocks and scales of all chunks at once.

B batch, T tokens, H key heads, HV value heads, G group (HV / H), K key dim, C chunk.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference import L2NORM_EPS
from .chunks import (
    BETA,
    CHUNK,
    ERROR,
    GATE,
    GRADIENT,
    KEY_NORM,
    OUTPUT,
    QUERY,
    QUERY_NORM,
    READ,
    SCALE_ROWS,
    SUMMARY,
    WRITE,
    Chunks,
    chunk_tokens,
)
from .launch import SIZES, Kernel, block_tiles, dot_precision, launch, on_device, token_tiles

_READ = tl.constexpr(READ)
_WRITE = tl.constexpr(WRITE)
_QUERY = tl.constexpr(QUERY)
_BETA = tl.constexpr(BETA)
_GATE = tl.constexpr(GATE)
_ERROR = tl.constexpr(ERROR)
_KEY_NORM = tl.constexpr(KEY_NORM)
_QUERY_NORM = tl.constexpr(QUERY_NORM)
_SCALE_ROWS = tl.constexpr(SCALE_ROWS)


class Prepared(NamedTuple):
    """Two [C, C] blocks of each chunk, in the dtype of k, and the scales of its tokens.

    With Ag = (A∘D) diag(beta): OUTPUT has diag(R) Ag and P Ag, SUMMARY has diag(R) Ag and diag(x) A diag(beta) (the
    same without gate), GRADIENT has A∘D and P.
    """

    both: torch.Tensor  # [2, chunks, HV, C, C]: the first, then the second
    first: torch.Tensor
    second: torch.Tensor
    scales: torch.Tensor  # [chunks, HV, SCALE_ROWS, C], fp32

    def after_chains(self) -> "Prepared":
        """What the gradients need."""
        return self


_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
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
    b_lower = b_lower.to(DTYPE)
    for level in tl.static_range(1, 6):
        b_off = tl.where((o_bits >> level) == 1, b_lower, 0.0)
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


@Kernel
@triton.jit(do_not_specialize=SIZES)
def _prepare_kernel(
    d_q,
    d_k,
    p_g,
    p_beta,
    d_first,
    d_second,
    p_scales,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    scale,
    H,
    HV,
    K: tl.constexpr,
    C: tl.constexpr,
    DTYPE: tl.constexpr,
    EPS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MODE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_DTYPE: tl.constexpr,
):
    """One chunk of one value head; grid (chunks * HV).

    K K^T and Q K^T are the same for the value heads of a key head; to compute them again costs less than to hold them.
    """
    pid = tl.program_id(0)
    i_hv = pid % HV
    i_h = i_hv // (HV // H)
    i_row, first, length = chunk_tokens(pid // HV, p_starts, p_lengths, seq_len, chunks_per_document, C, PACKED)
    o_c = tl.arange(0, C)
    m_c = o_c < length
    o_token = (i_row.to(tl.int64) * seq_len + first + o_c) * HV + i_hv
    # A decay of e^-200 is 0 in fp32, as one of e^-inf is; of the latter, differences would be NaN.
    b_g = tl.maximum(tl.load(p_g + o_token, mask=m_c, other=0.0).to(tl.float32), -200.0)
    b_beta = tl.load(p_beta + o_token, mask=m_c, other=0.0).to(tl.float32)
    b_k = d_k.load([i_row, first, i_h * K]).reshape(C, K)
    b_key_norm = inverse_norm(b_k, EPS, NORMALIZE)
    b_gate = tl.cumsum(b_g, axis=0)
    last = tl.sum(b_g, axis=0)

    # Past the document's end a tile may hold the next document's tokens: select, so that nothing of them gets through.
    m_strict = (o_c[:, None] > o_c[None, :]) & m_c[:, None]
    b_lower = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_lower = tl.where(m_strict, (b_beta * b_key_norm)[:, None] * b_key_norm[None, :] * b_lower, 0.0)
    b_inverse = unit_lower_inverse(b_lower, C, INVERSE_DTYPE, PRECISION)

    b_begin = tl.exp(b_gate)
    b_write = tl.where(m_c, tl.exp(last - b_gate) * b_key_norm, 0.0)
    p_row = p_scales + pid.to(tl.int64) * (_SCALE_ROWS * C) + o_c
    tl.store(p_row + _READ * C, tl.where(m_c, b_begin * b_key_norm, 0.0))
    tl.store(p_row + _GATE * C, b_gate)
    if MODE != _OUTPUT:
        tl.store(p_row + _KEY_NORM * C, tl.where(m_c, b_key_norm, 0.0))
    if MODE == _GRADIENT:
        tl.store(p_row + _WRITE * C, b_write)
        tl.store(p_row + _BETA * C, b_beta)
        tl.store(p_row + _ERROR * C, tl.where(m_c, -b_begin * b_key_norm * b_beta, 0.0))

    m_lower = (o_c[:, None] >= o_c[None, :]) & m_c[:, None]
    b_decay = tl.exp(tl.where(m_lower, b_gate[:, None] - b_gate[None, :], float("-inf")))
    if MODE == _SUMMARY:
        b_inverse = tl.where(m_c[:, None], b_inverse * b_beta[None, :], 0.0)
        d_second.store([pid * C, 0], (tl.where(m_c, b_key_norm, 0.0)[:, None] * b_inverse).to(DTYPE))
        d_first.store([pid * C, 0], (b_write[:, None] * b_inverse * b_decay).to(DTYPE))
    else:
        b_inverse *= b_decay
        if MODE == _GRADIENT:
            d_first.store([pid * C, 0], b_inverse.to(DTYPE))
        else:
            b_inverse *= b_beta[None, :]
            d_first.store([pid * C, 0], (b_write[:, None] * b_inverse).to(DTYPE))
        b_q = d_q.load([i_row, first, i_h * K]).reshape(C, K)
        b_query_norm = inverse_norm(b_q, EPS, NORMALIZE)
        b_attention = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_attention *= scale * b_query_norm[:, None] * b_key_norm[None, :]
        b_attention = tl.where(m_lower, b_attention * b_decay, 0.0)
        if MODE == _OUTPUT:
            b_attention = tl.dot(b_attention.to(DTYPE), b_inverse.to(DTYPE), input_precision=PRECISION)
        d_second.store([pid * C, 0], b_attention.to(DTYPE))
        tl.store(p_row + _QUERY * C, tl.where(m_c, scale * b_begin * b_query_norm, 0.0))
        if MODE == _GRADIENT:
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
        _prepare_kernel[(chunks.count * HV,)](
            token_tiles(q, CHUNK, K),
            token_tiles(k, CHUNK, K),
            g,
            beta,
            block_tiles(first, CHUNK, CHUNK),
            block_tiles(second, CHUNK, CHUNK),
            scales,
            chunks.starts,
            chunks.lengths,
            seq_len,
            chunks.per_document,
            scale,
            H,
            HV,
            K=K,
            C=CHUNK,
            DTYPE=_DTYPES[k.dtype],
            EPS=L2NORM_EPS,
            NORMALIZE=normalize,
            MODE=mode,
            PACKED=chunks.starts is not None,
            PRECISION=precision,
            INVERSE_DTYPE=tl.float32 if k.dtype == torch.float32 else tl.float16,
            **launch("prepare", K, k.dtype).options,
        )
    return Prepared(both, first, second, scales)
