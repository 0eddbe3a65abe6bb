"""Gradients of the inputs of each chunk, all chunks at once.

B batch, T tokens, H key heads, HV value heads, G group (HV / H), K/V head dims, C chunk.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import Any

import torch
import triton
import triton.language as tl

from .chunks import BETA, CHUNK, GATE, KEY_NORM, QUERY_NORM, SCALE_ROWS, Chunks, chunk_tokens
from .launch import SIZES, Kernel, block_tiles, dot_precision, launch, on_device, token_tiles
from .prepare import Prepared
from .state import Chains

_BETA = tl.constexpr(BETA)
_GATE = tl.constexpr(GATE)
_KEY_NORM = tl.constexpr(KEY_NORM)
_QUERY_NORM = tl.constexpr(QUERY_NORM)
_SCALE_ROWS = tl.constexpr(SCALE_ROWS)


@Kernel
@triton.jit(do_not_specialize=SIZES)
def _value_kernel(
    d_k,
    d_v,
    d_do,
    d_du,
    d_inverse,
    d_attention,
    d_states,
    d_dv,
    d_written,
    p_inverse,
    p_attention,
    p_scales,
    p_dv,
    p_dg,
    p_dbeta,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_PRECISION: tl.constexpr,
):
    """dv, dbeta, N, beta∘dL and a part of dg of one chunk of one value head; grid (chunks * HV).

    dV' comes in p_dv and dv replaces it; N replaces P and beta∘dL replaces A∘D. R∘V' is left for the keys' kernel.
    """
    pid = tl.program_id(0)
    i_head = pid.to(tl.int64)
    i_hv = pid % HV
    i_h = i_hv // (HV // H)
    i_row, first, length = chunk_tokens(pid // HV, p_starts, p_lengths, seq_len, chunks_per_document, C, PACKED)
    start = i_row.to(tl.int64) * seq_len + first

    o_c = tl.arange(0, C)
    m_c = o_c < length
    p_row = p_scales + i_head * (_SCALE_ROWS * C)
    b_gate = tl.load(p_row + _GATE * C + o_c)
    b_beta = tl.load(p_row + _BETA * C + o_c)
    b_key_norm = tl.load(p_row + _KEY_NORM * C + o_c)
    last_gate = tl.load(p_row + (_GATE * C + C - 1))
    b_k = d_k.load([i_row, first, i_h * K]).reshape(C, K)
    b_inverse = d_inverse.load([pid * C, 0])

    b_dp = tl.zeros([C, C], dtype=tl.float32)
    b_da = tl.zeros([C, C], dtype=tl.float32)
    b_dbeta = tl.zeros([C], dtype=tl.float32)
    b_dbegin = tl.zeros([C], dtype=tl.float32)
    for i_v in tl.range(0, V // BLOCK_V, num_stages=STAGES):
        column = i_hv * V + i_v * BLOCK_V
        b_state = d_states.load([pid * V + i_v * BLOCK_V, 0])
        b_v = d_v.load([i_row, first, column]).reshape(C, BLOCK_V)
        b_ks = tl.dot(b_k, tl.trans(b_state), input_precision=PRECISION)
        b_ks *= (tl.exp(b_gate) * b_key_norm)[:, None]
        b_w = b_v - b_ks
        b_w_beta = (b_w * b_beta[:, None]).to(b_k.dtype)

        b_du = d_du.load([i_row, first, column]).reshape(C, BLOCK_V)
        b_dw = tl.dot(tl.trans(b_inverse), b_du, input_precision=PRECISION)
        b_dbeta += tl.sum(b_dw * b_w, axis=1)
        b_dw *= b_beta[:, None]
        b_dbegin -= tl.sum(b_dw * b_ks, axis=1)
        b_da = tl.dot(b_du, tl.trans(b_w_beta), b_da, input_precision=PRECISION)
        if PACKED:
            o_values = o_c[:, None] * (HV * V) + tl.arange(0, BLOCK_V)[None, :]
            p_tile = p_dv + start * (HV * V) + column
            tl.store(p_tile + o_values, b_dw.to(p_dv.dtype.element_ty), mask=m_c[:, None])
        else:
            d_dv.store([i_row, first, column], b_dw.to(p_dv.dtype.element_ty).reshape(1, C, BLOCK_V))

        b_u = tl.dot(b_inverse, b_w_beta, input_precision=PRECISION)
        b_do = d_do.load([i_row, first, column]).reshape(C, BLOCK_V)
        b_dp = tl.dot(b_do, tl.trans(b_u.to(b_k.dtype)), b_dp, input_precision=PRECISION)
        d_written.store([pid * C, i_v * BLOCK_V], (b_u * tl.exp(last_gate - b_gate)[:, None]).to(b_k.dtype))

    m_lower = o_c[:, None] >= o_c[None, :]
    m_upper = o_c[:, None] <= o_c[None, :]
    m_strict = o_c[:, None] > o_c[None, :]
    b_da = tl.where(m_lower, b_da, 0.0)

    # The gates' gradient: token l takes Z_ij of i >= l > j, the states' terms from i >= l or i < l. Differences of row
    # and column sums of Z would say the same, and cancel all digits under a strong decay.
    b_z = b_dp * d_attention.load([pid * C, 0]) + b_da * b_inverse
    b_z = tl.where(m_strict, b_z, 0.0)
    b_across = tl.dot(m_upper.to(tl.float32), b_z, input_precision=SUM_PRECISION)
    b_dg = tl.sum(tl.where(m_strict, b_across, 0.0), axis=1)
    b_dg += tl.sum(tl.where(m_upper, b_dbegin[None, :], 0.0), axis=1)
    tl.store(p_dg + i_head * C + o_c, b_dg)

    # dL = -D∘(Ag^T dAg Ag^T) below the diagonal, Ag = A∘D: the gates of the three factors cancel but for D_ij.
    b_half = tl.dot(tl.trans(b_inverse), b_da.to(b_k.dtype), input_precision=PRECISION)
    b_dl = tl.dot(b_half.to(b_k.dtype), tl.trans(b_inverse), input_precision=PRECISION)
    b_decay = tl.exp(tl.where(m_lower, b_gate[:, None] - b_gate[None, :], float("-inf")))
    b_dl = tl.where(m_strict, -b_dl * b_decay, 0.0)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_dbeta += b_key_norm * tl.sum(b_dl * b_kk * b_key_norm[None, :], axis=1)
    tl.store(p_dbeta + (start + o_c) * HV + i_hv, b_dbeta.to(p_dbeta.dtype.element_ty), mask=m_c)

    o_block = o_c[:, None] * C + o_c[None, :]
    tl.debug_barrier()
    tl.store(p_attention + i_head * (C * C) + o_block, (scale * b_dp * b_decay).to(b_k.dtype))
    tl.store(p_inverse + i_head * (C * C) + o_block, (b_beta[:, None] * b_dl).to(b_k.dtype))


@Kernel
@triton.jit(do_not_specialize=SIZES)
def _key_kernel(
    d_q,
    d_k,
    d_dv,
    d_written,
    d_states,
    d_dstates,
    p_dl,
    p_n,
    p_scales,
    p_dk,
    p_dg,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    H,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk and its part of dg, of one chunk of a key head and its value heads; grid (chunks * H)."""
    pid = tl.program_id(0)
    i_chunk = (pid // H).to(tl.int64)
    i_h = pid % H
    HV = H * GROUP
    i_row, first, length = chunk_tokens(pid // H, p_starts, p_lengths, seq_len, chunks_per_document, C, PACKED)
    start = i_row.to(tl.int64) * seq_len + first

    o_c = tl.arange(0, C)
    b_k = d_k.load([i_row, first, i_h * K]).reshape(C, K)
    b_q = d_q.load([i_row, first, i_h * K]).reshape(C, K)
    b_dk = tl.zeros([C, K], dtype=tl.float32)
    p_norm = p_scales + (i_chunk * HV + i_h * GROUP) * (_SCALE_ROWS * C) + o_c
    b_key_norm = tl.load(p_norm + _KEY_NORM * C)
    b_query_norm = tl.load(p_norm + _QUERY_NORM * C)
    # What a value head can compute anew must not occupy registers while the next one runs.
    for i_group in tl.range(0, GROUP, disable_licm=True):
        i_hv = i_h * GROUP + i_group
        i_head = i_chunk * HV + i_hv
        row_head = (pid // H) * HV + i_hv
        p_row = p_scales + i_head * (_SCALE_ROWS * C)
        b_begin = tl.exp(tl.load(p_row + _GATE * C + o_c))
        last_gate = tl.load(p_row + (_GATE * C + C - 1))

        b_part = tl.zeros([C, K], dtype=tl.float32)
        dchunk = 0.0
        for i_v in tl.range(0, V // BLOCK_V, num_stages=STAGES):
            b_state = d_states.load([row_head * V + i_v * BLOCK_V, 0])
            b_dstate = d_dstates.load([row_head * V + i_v * BLOCK_V, 0])
            b_dv = d_dv.load([i_row, first, i_hv * V + i_v * BLOCK_V]).reshape(C, BLOCK_V)
            b_written = d_written.load([row_head * C, i_v * BLOCK_V])
            b_part = tl.dot(b_written, b_dstate, b_part, input_precision=PRECISION)
            b_dv = (-b_begin[:, None] * b_dv).to(b_k.dtype)
            b_dk = tl.dot(b_dv, b_state, b_dk, input_precision=PRECISION)
            dchunk += tl.sum(tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), axis=1), axis=0)
        b_rows = d_k.load([i_row, first, i_h * K]).reshape(C, K)
        b_dend = b_key_norm * tl.sum(b_part * b_rows, axis=1)
        b_dk += b_part
        b_dg = tl.load(p_dg + i_head * C + o_c) + dchunk * tl.exp(last_gate)
        b_dg += tl.sum(tl.where(o_c[:, None] > o_c[None, :], b_dend[None, :], 0.0), axis=1)
        tl.debug_barrier()
        tl.store(p_dg + i_head * C + o_c, b_dg)

        # Transposes go through memory: Triton before 3.7.1 miscompiles a product with a transposed product on Hopper.
        o_block = o_c[:, None] * C + o_c[None, :]
        o_block_t = o_c[None, :] * C + o_c[:, None]
        b_dl = tl.load(p_dl + i_head * (C * C) + o_block).to(tl.float32)
        b_dl += tl.load(p_dl + i_head * (C * C) + o_block_t).to(tl.float32)
        b_dk = tl.dot((b_dl * b_key_norm[None, :]).to(b_k.dtype), b_k, b_dk, input_precision=PRECISION)
        b_n_t = tl.load(p_n + i_head * (C * C) + o_block_t)
        b_dk = tl.dot((b_n_t * b_query_norm[None, :]).to(b_k.dtype), b_q, b_dk, input_precision=PRECISION)

    if NORMALIZE:
        b_rows = d_k.load([i_row, first, i_h * K]).reshape(C, K)
        b_along = tl.sum(b_dk * b_rows, axis=1) * b_key_norm * b_key_norm
        b_dk = b_key_norm[:, None] * (b_dk - b_rows * b_along[:, None])
    o_keys = o_c[:, None] * (H * K) + tl.arange(0, K)[None, :]
    p_tile = p_dk + (start * H + i_h) * K
    tl.store(p_tile + o_keys, b_dk.to(p_dk.dtype.element_ty), mask=(o_c < length)[:, None])


@Kernel
@triton.jit(do_not_specialize=SIZES)
def _query_kernel(
    d_q,
    d_k,
    d_do,
    d_attention,
    d_states,
    p_scales,
    p_dg_part,
    p_dq,
    p_dg,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    scale,
    H,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq and dg of one chunk of a key head and its value heads, after the keys' kernel; grid (chunks * H)."""
    pid = tl.program_id(0)
    i_chunk = (pid // H).to(tl.int64)
    i_h = pid % H
    HV = H * GROUP
    i_row, first, length = chunk_tokens(pid // H, p_starts, p_lengths, seq_len, chunks_per_document, C, PACKED)
    start = i_row.to(tl.int64) * seq_len + first

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, K)
    m_c = o_c < length
    b_k = d_k.load([i_row, first, i_h * K]).reshape(C, K)
    b_dq = tl.zeros([C, K], dtype=tl.float32)
    p_norm = p_scales + (i_chunk * HV + i_h * GROUP) * (_SCALE_ROWS * C) + o_c
    b_key_norm = tl.load(p_norm + _KEY_NORM * C)
    b_query_norm = tl.load(p_norm + _QUERY_NORM * C)
    for i_group in tl.range(0, GROUP, disable_licm=True):
        i_hv = i_h * GROUP + i_group
        i_head = i_chunk * HV + i_hv
        row_head = (pid // H) * HV + i_hv
        b_begin = tl.exp(tl.load(p_scales + i_head * (_SCALE_ROWS * C) + _GATE * C + o_c))
        b_part = tl.zeros([C, K], dtype=tl.float32)
        for i_v in tl.range(0, V // BLOCK_V, num_stages=STAGES):
            b_do = d_do.load([i_row, first, i_hv * V + i_v * BLOCK_V]).reshape(C, BLOCK_V)
            b_state = d_states.load([row_head * V + i_v * BLOCK_V, 0])
            b_part = tl.dot(b_do, b_state, b_part, input_precision=PRECISION)
        b_part *= (scale * b_begin)[:, None]
        b_rows = d_q.load([i_row, first, i_h * K]).reshape(C, K)
        b_dbegin = b_query_norm * tl.sum(b_part * b_rows, axis=1)
        b_dq += b_part
        b_n = (d_attention.load([row_head * C, 0]) * b_key_norm[None, :]).to(b_k.dtype)
        b_dq = tl.dot(b_n, b_k, b_dq, input_precision=PRECISION)
        m_upper = o_c[:, None] <= o_c[None, :]
        b_dg = tl.load(p_dg_part + i_head * C + o_c)
        b_dg += tl.sum(tl.where(m_upper, b_dbegin[None, :], 0.0), axis=1)
        tl.store(p_dg + (start + o_c) * HV + i_hv, b_dg.to(p_dg.dtype.element_ty), mask=m_c)

    if NORMALIZE:
        b_rows = d_q.load([i_row, first, i_h * K]).reshape(C, K)
        b_along = tl.sum(b_dq * b_rows, axis=1) * b_query_norm * b_query_norm
        b_dq = b_query_norm[:, None] * (b_dq - b_rows * b_along[:, None])
    o_keys = o_c[:, None] * (H * K) + o_k[None, :]
    tl.store(p_dq + (start * H + i_h) * K + o_keys, b_dq.to(p_dq.dtype.element_ty), mask=m_c[:, None])


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor,
    prepared: Prepared,
    chains: Chains,
    out: tuple[torch.Tensor, ...],
    chunks: Chunks,
    *,
    scale: float,
    normalize: bool,
) -> None:
    """Fills dq, dk, dv, dg, dbeta from the states before and their gradients after each chunk; dv holds dV' so far.

    W~ = beta∘W,  V' = Ag W~,  dW~ = Ag^T dV',  dv = beta∘dW~,  dP = tril(dO V'^T),  dAg = tril(dV' W~^T),
    dL = -tril(D∘(Ag^T dAg Ag^T), -1),  N = s dP∘D,  Z = dP∘P + dAg∘Ag
    dq = s E∘(dO S^T) + N K,  dk = R∘(V' dS^T) - E∘(dv S^T) + N^T Q + (beta∘dL + (beta∘dL)^T) K
    dbeta = <dW~, W> + sum_j dL_ij <k_i, k_j>
    dg_l = sum_{i>=l>j} Z_ij + sum_{i>=l} (<q_i, s E (dO S^T)_i> - <k_i, E (dv S^T)_i>) + sum_{i<l} <k_i, R (V' dS^T)_i>
           + e^Γ <dS, S>
    """
    _, seq_len, H, K = k.shape
    HV, V = v.shape[2:]
    dq, dk, dv, dg, dbeta = out
    dg_part = torch.empty(chunks.count, HV, CHUNK, dtype=torch.float32, device=k.device)
    written = k.new_empty(chunks.count, HV, CHUNK, V)
    value, key, query = (launch(kernel, K, k.dtype) for kernel in ("value", "key", "query"))
    d_k = token_tiles(k, CHUNK, K)
    d_q = token_tiles(q, CHUNK, K)
    d_inverse, d_attention = block_tiles(prepared.first, CHUNK, CHUNK), block_tiles(prepared.second, CHUNK, CHUNK)
    shape: Any = {
        "K": K,
        "V": V,
        "C": CHUNK,
        "PACKED": chunks.starts is not None,
        "PRECISION": dot_precision(k.dtype),
    }
    place = (chunks.starts, chunks.lengths, seq_len, chunks.per_document)
    with on_device(k):
        d_dv = token_tiles(dv, CHUNK, value.block_v)
        _value_kernel[(chunks.count * HV,)](
            d_k,
            token_tiles(v, CHUNK, value.block_v),
            token_tiles(do, CHUNK, value.block_v),
            d_dv,
            d_inverse,
            d_attention,
            block_tiles(chains.states, value.block_v, K),
            d_dv,
            block_tiles(written, CHUNK, value.block_v),
            prepared.first,
            prepared.second,
            prepared.scales,
            dv,
            dg_part,
            dbeta,
            *place,
            scale,
            H,
            HV,
            BLOCK_V=value.block_v,
            STAGES=value.stages,
            SUM_PRECISION="tf32" if k.dtype != torch.float32 else shape["PRECISION"],
            **shape,
            **value.options,
        )
        _key_kernel[(chunks.count * H,)](
            d_q,
            d_k,
            token_tiles(dv, CHUNK, key.block_v),
            block_tiles(written, CHUNK, key.block_v),
            block_tiles(chains.states, key.block_v, K),
            block_tiles(chains.dstates, key.block_v, K),
            prepared.first,
            prepared.second,
            prepared.scales,
            dk,
            dg_part,
            *place,
            H,
            GROUP=HV // H,
            BLOCK_V=key.block_v,
            STAGES=key.stages,
            NORMALIZE=normalize,
            **shape,
            **key.options,
        )
        del written
        _query_kernel[(chunks.count * H,)](
            d_q,
            d_k,
            token_tiles(do, CHUNK, query.block_v),
            d_attention,
            block_tiles(chains.states, query.block_v, K),
            prepared.scales,
            dg_part,
            dq,
            dg,
            *place,
            scale,
            H,
            GROUP=HV // H,
            BLOCK_V=query.block_v,
            STAGES=query.stages,
            NORMALIZE=normalize,
            **shape,
            **query.options,
        )
