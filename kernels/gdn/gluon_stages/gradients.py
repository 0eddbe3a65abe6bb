"""Gradients of the inputs of each chunk, in one kernel that reads every tile once.

B batch, T tokens, H key heads, HV value heads, G group (HV / H), K/V head dims, C chunk.

One warp loads and four compute, in half the shared memory and registers of a multiprocessor: two programs share one,
and each computes while the other waits. States, their gradients and queries pass through the same 32 KB in turn.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton_stages.chunks import CHUNK, PROGRAMS, Chunks
from ..triton_stages.launch import SIZES, Kernel, on_device
from .compatible import async_load, async_store, barrier, view
from .prepare import Prepared, exp2
from .scales import BETA, GATE, KEY_NORM, QUERY_NORM, READ, SCALE_ROWS, WRITE
from .state import Chains
from .tiles import DTYPES, chunk_tokens, tiles

_READ = gl.constexpr(READ)
_WRITE = gl.constexpr(WRITE)
_BETA = gl.constexpr(BETA)
_GATE = gl.constexpr(GATE)
_KEY_NORM = gl.constexpr(KEY_NORM)
_QUERY_NORM = gl.constexpr(QUERY_NORM)
_SCALE_ROWS = gl.constexpr(SCALE_ROWS)
_C = gl.constexpr(CHUNK)
_D = gl.constexpr(128)  # K and V


_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load(
    d_q,
    d_k,
    d_v,
    d_do,
    d_states,
    d_dstates,
    d_inverse,
    d_attention,
    s_k,
    s_pair,
    s_values,
    s_blocks,
    s_state,
    full,
    empty,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    first_task,
    programs,
    steps,
    H,
    GROUP: gl.constexpr,
    PACKED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    tile_layout: gl.constexpr = s_k.layout
    state_layout: gl.constexpr = s_state.layout
    s_again = view(s_pair, DTYPE, [1, _D, _D], state_layout)
    s_q = view(s_state, DTYPE, [2, 1, _C, _D], tile_layout)
    for step in range(steps):
        i_task = step // GROUP
        i_group = step - i_task * GROUP
        task = first_task + i_task * programs
        i_chunk = task // H
        i_h = task - i_chunk * H
        i_row, first, _ = chunk_tokens(i_chunk, p_starts, p_lengths, seq_len, chunks_per_document, PACKED)
        i_hv = i_h * GROUP + i_group
        i_head = i_chunk * (H * GROUP) + i_hv
        phase = step & 1
        if i_group == 0:
            mbarrier.wait(empty.index(0), (i_task & 1) ^ 1)
            mbarrier.expect(full.index(0), 2 * _C * _D)
            async_load(d_k, [i_row, first, i_h * _D], full.index(0), s_k.index(0))
        # The state, its gradient, the queries: 3 step, 3 step + 1 and 3 step + 2.
        mbarrier.wait(empty.index(1), phase ^ 1)
        mbarrier.expect(full.index(1), 2 * _D * _D)
        async_load(d_states, [i_head * _D, 0], full.index(1), s_state.index(0))
        mbarrier.wait(empty.index(2), 1)
        mbarrier.expect(full.index(2), 2 * (2 * _C * _D))
        async_load(d_v, [i_row, first, i_hv * _D], full.index(2), s_pair.index(0))
        async_load(d_do, [i_row, first, i_hv * _D], full.index(2), s_pair.index(1))
        mbarrier.wait(empty.index(1), phase)
        mbarrier.expect(full.index(1), 2 * _D * _D)
        async_load(d_dstates, [i_head * _D, 0], full.index(1), s_state.index(0))
        mbarrier.wait(empty.index(3), phase ^ 1)
        mbarrier.expect(full.index(3), 2 * (2 * _C * _C))
        async_load(d_inverse, [i_head * _C, 0], full.index(3), s_blocks.index(0))
        async_load(d_attention, [i_head * _C, 0], full.index(3), s_blocks.index(1))
        mbarrier.wait(empty.index(2), 0)
        mbarrier.expect(full.index(2), 2 * _D * _D)
        async_load(d_states, [i_head * _D, 0], full.index(2), s_again.index(0))
        mbarrier.wait(empty.index(1), phase ^ 1)
        mbarrier.expect(full.index(1), 2 * _C * _D)
        async_load(d_q, [i_row, first, i_h * _D], full.index(1), s_q.index(0))
        mbarrier.wait(empty.index(4), phase)
        mbarrier.expect(full.index(4), 2 * _C * _D)
        async_load(d_do, [i_row, first, i_hv * _D], full.index(4), s_values.index(0))


@gluon.jit
def _store(d_x, p_x, s_tile, i_row, first, column, width, length, PACKED: gl.constexpr):
    """Stores a tile [1, C, D] that all threads have written; of packed documents without the tokens past the end."""
    if PACKED:
        if length < _C:
            flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            o_c = gl.arange(0, _C, gl.SliceLayout(1, flat))
            o_d = gl.arange(0, _D, gl.SliceLayout(0, flat))
            p_tile = p_x + first.to(gl.int64) * width + column
            b_tile = s_tile.reshape([_C, _D]).load(flat)
            gl.store(p_tile + o_c[:, None] * width + o_d[None, :], b_tile, mask=(o_c < length)[:, None])
        else:
            async_store(d_x, [i_row, first, column], s_tile)
    else:
        async_store(d_x, [i_row, first, column], s_tile)


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _nil(x):
    """0, which the compiler does not know: it would keep in registers all addresses that it can use again."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _widened(x, DTYPE: gl.constexpr):
    """x in fp32, from pairs: taken apart otherwise, each half of what is rounded early fills a register."""
    if gl.bfloat16 == DTYPE:
        y = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [x], gl.float32, True, 2
        )
    else:
        y = gl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
            "=&r,=&r,r",
            [x],
            gl.float32,
            True,
            2,
        )
    return y


@gluon.jit
def _apart(o_i, o_j):
    """Pairs (a, b) with a - b = i - j: what differs between the columns of a thread alone is in b, so constant."""
    return o_i[:, None] - (o_j & 6)[None, :], (o_j & 57)[None, :]


@gluon.jit
def _rounded(x, DTYPE: gl.constexpr):
    """x in DTYPE, now: the compiler would rather keep x until the result is needed, in twice the registers."""
    if gl.bfloat16 == DTYPE:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, False, 2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, False, 2)
    return y


@gluon.jit
def _factor(x, DTYPE: gl.constexpr):
    """The same for a factor of keys that bears their norms: of a key of zeros 1 / sqrt(eps), which must stay finite."""
    if gl.bfloat16 == DTYPE:
        y = _rounded(x, DTYPE)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, False, 2)
    return y


@gluon.jit
def _run(
    d_dq,
    p_dq,
    d_dk,
    p_dk,
    d_dv,
    p_dv,
    p_dg,
    p_dbeta,
    p_partial,
    p_scales,
    s_k,
    s_pair,
    s_values,
    s_blocks,
    s_state,
    s_rows,
    full,
    empty,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    scale,
    first_task,
    programs,
    steps,
    H,
    GROUP: gl.constexpr,
    NORMALIZE: gl.constexpr,
    PACKED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    left_square: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    row: gl.constexpr = gl.SliceLayout(1, wide)
    row_square: gl.constexpr = gl.SliceLayout(1, square)
    column: gl.constexpr = gl.SliceLayout(0, square)
    tile_layout: gl.constexpr = s_k.layout
    state_layout: gl.constexpr = s_state.layout
    block_layout: gl.constexpr = s_blocks.layout
    # What is rounded for dq and dk carries the norms of q and k, and in fp16 is lifted out of the subnormal numbers.
    LIFT: gl.constexpr = 8.0 if gl.float16 == DTYPE else 1.0
    no_wide = gl.full([_C, _D], 0.0, gl.float32, wide)
    no_square = gl.full([_C, _C], 0.0, gl.float32, square)
    HV = H * GROUP
    s_again = view(s_pair, DTYPE, [1, _D, _D], state_layout)
    s_q = view(s_state, DTYPE, [2, 1, _C, _D], tile_layout)
    s_spare = view(s_state, DTYPE, [4, _C, _C], block_layout)
    s_out = view(s_blocks, DTYPE, [1, 1, _C, _D], tile_layout)

    p_partial += first_task * (2 * _C * _D)
    for step in range(steps):
        i_task = step // GROUP
        i_group = step - i_task * GROUP
        task = first_task + i_task * programs
        i_chunk = task // H
        i_h = task - i_chunk * H
        i_row, first, length = chunk_tokens(i_chunk, p_starts, p_lengths, seq_len, chunks_per_document, PACKED)
        phase = step & 1
        i_hv = i_h * GROUP + i_group
        i_head = i_chunk * HV + i_hv
        p_row = p_scales + i_head.to(gl.int64) * (_SCALE_ROWS * _C)
        nil = _nil(step)
        o_r = gl.arange(0, _C, row) + nil
        b_read = gl.load(p_row + _READ * _C + o_r)
        b_write = gl.load(p_row + _WRITE * _C + o_r)
        b_beta = gl.load(p_row + _BETA * _C + o_r)
        b_gate = gl.load(p_row + _GATE * _C + o_r) * _LOG2E
        b_key_norm = gl.load(p_row + _KEY_NORM * _C + o_r)
        b_query_norm = gl.load(p_row + _QUERY_NORM * _C + o_r)
        last_gate = gl.load(p_row + (_GATE * _C + _C - 1)) * _LOG2E

        # W, and beta W in place of v.
        if i_group == 0:
            mbarrier.wait(full.index(0), i_task & 1)
        mbarrier.wait(full.index(1), phase)
        keys = s_k.index(nil).reshape([_C, _D])
        b_ks = warpgroup_mma(keys, s_state.index(nil).permute((1, 0)), no_wide, use_acc=False, is_async=True)
        s_rows.index(0).store(b_gate - _log2(b_key_norm))
        b_ks = warpgroup_mma_wait(0, [b_ks])
        # Pending stores of the last step's results read from these buffers.
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(empty.index(1))
        mbarrier.arrive(empty.index(3), pred=step > 0)
        mbarrier.wait(full.index(2), 0)
        nil = _nil(step)
        errors = s_pair.index(nil).reshape([_C, _D])
        b_w = _widened(errors.load(wide), DTYPE) - b_ks * b_read[:, None]
        b_errors = _rounded(b_w, DTYPE)
        errors.store(_rounded(b_w * b_beta[:, None], DTYPE))

        # dU
        mbarrier.wait(full.index(1), phase ^ 1)
        nil = _nil(step)
        keys = s_k.index(nil).reshape([_C, _D])
        b_du = warpgroup_mma(keys, s_state.index(nil).permute((1, 0)), no_wide, use_acc=False, is_async=True)
        b_du = warpgroup_mma_wait(0, [b_du])
        b_du *= b_write[:, None]
        mbarrier.wait(full.index(3), phase)
        attention = s_blocks.index(nil + 1)
        grads = s_pair.index(nil + 1).reshape([_C, _D])
        b_du = warpgroup_mma(attention.permute((1, 0)), grads, b_du, is_async=True)
        b_du = warpgroup_mma_wait(0, [b_du])
        s_values.index(nil).reshape([_C, _D]).store(_rounded(b_du, DTYPE))
        fence_async_shared()
        barrier()

        # dAg, dW~ and dv
        nil = _nil(step)
        dvalues = s_values.index(nil).reshape([_C, _D])
        errors = s_pair.index(nil).reshape([_C, _D])
        inverse = s_blocks.index(nil)
        b_da = warpgroup_mma(dvalues, errors.permute((1, 0)), no_square, use_acc=False, is_async=True)
        o_j = gl.arange(0, _C, column)
        o_i = gl.arange(0, _C, row_square) + nil
        m_i, m_j = _apart(o_i, o_j)
        b_da = warpgroup_mma_wait(0, [b_da])
        b_da = _rounded(gl.where(m_i >= m_j, b_da, 0.0), DTYPE)
        b_dw = warpgroup_mma(inverse.permute((1, 0)), dvalues, no_wide, use_acc=False, is_async=True)
        b_dw = warpgroup_mma_wait(0, [b_dw])
        # Through memory: the compiler would put the sum off, and keep both factors, until it is needed.
        s_rows.index(1).store(gl.sum(b_dw * _widened(b_errors, DTYPE), axis=1))
        b_dv = _rounded(b_dw * b_beta[:, None], DTYPE)
        barrier()
        dvalues.store(b_dv)
        fence_async_shared()
        nil = _nil(step)
        inverse = s_blocks.index(nil)
        errors = s_pair.index(nil).reshape([_C, _D])
        b_u = warpgroup_mma(inverse, errors, no_wide, use_acc=False, is_async=True)
        b_half = warpgroup_mma(
            gl.convert_layout(b_da, left_square), inverse.permute((1, 0)), no_square, use_acc=False, is_async=True
        )
        b_u = warpgroup_mma_wait(1, [b_u])
        barrier()
        _store(d_dv, p_dv, s_values.index(nil), i_row, first, i_hv * _D, HV * _D, length, PACKED)
        b_u = _rounded(b_u, DTYPE)
        errors.store(b_u)
        fence_async_shared()
        b_half = warpgroup_mma_wait(0, [b_half])
        b_half = _rounded(b_half, DTYPE)
        barrier()

        # dP, and from it Z and M = y N x.
        nil = _nil(step)
        grads = s_pair.index(nil + 1).reshape([_C, _D])
        errors = s_pair.index(nil).reshape([_C, _D])
        attention = s_blocks.index(nil + 1)
        b_dp = warpgroup_mma(grads, errors.permute((1, 0)), no_square, use_acc=False, is_async=True)
        o_i = gl.arange(0, _C, row_square) + nil
        m_i, m_j = _apart(o_i, o_j)
        b_gate_i = gl.convert_layout(b_gate + _log2(b_query_norm * (scale * LIFT)), row_square)
        b_gate_j = s_rows.index(0).load(column)
        b_dp = warpgroup_mma_wait(0, [b_dp])
        b_z = b_dp * _widened(attention.load(square), DTYPE)
        b_z += _widened(b_da, DTYPE) * _widened(s_blocks.index(nil).load(square), DTYPE)
        b_z = _rounded(b_z, DTYPE)
        b_decay = gl.where(m_i >= m_j, b_gate_i[:, None] - b_gate_j[None, :], float("-inf"))
        b_n = _factor(b_dp * exp2(b_decay), DTYPE)
        barrier()
        mbarrier.arrive(empty.index(2))
        attention.store(b_half)
        fence_async_shared()
        barrier()

        # x beta dL x, for short dL.
        nil = _nil(step)
        keys = s_k.index(nil).reshape([_C, _D])
        inverse = s_blocks.index(nil)
        attention = s_blocks.index(nil + 1)
        b_dl = warpgroup_mma(inverse.permute((1, 0)), attention, no_square, use_acc=False, is_async=True)
        o_i = gl.arange(0, _C, row_square) + nil
        m_i, m_j = _apart(o_i, o_j)
        b_gate_i = gl.convert_layout(b_gate + _log2(b_key_norm), row_square)
        b_gate_j = s_rows.index(0).load(column)
        b_dl = warpgroup_mma_wait(0, [b_dl])
        b_decay = gl.where(m_i > m_j, b_gate_i[:, None] - b_gate_j[None, :], float("-inf"))
        b_dl *= -exp2(b_decay)
        b_kk = warpgroup_mma(keys, keys.permute((1, 0)), no_square, use_acc=False, is_async=True)
        b_kk = warpgroup_mma_wait(0, [b_kk])
        b_dbeta = s_rows.index(1).load(row) + gl.convert_layout(gl.sum(b_dl * b_kk, axis=1), row)
        b_dl = _factor(b_dl * gl.convert_layout(b_beta * LIFT, row_square)[:, None], DTYPE)
        o_token = (i_row.to(gl.int64) * seq_len + first) * HV + i_hv
        gl.store(p_dbeta + o_token + o_r * HV, b_dbeta.to(p_dbeta.dtype.element_ty), mask=o_r < length)
        barrier()
        inverse.store(b_n)
        attention.store(b_dl)
        fence_async_shared()
        barrier()

        # x R (U dS^T) of dk, and <dS, S>, the trace of a product.
        nil = _nil(step)
        state = s_state.index(nil)
        again = s_again.index(nil)
        b_dk = warpgroup_mma(gl.convert_layout(b_u, left_wide), state, no_wide, use_acc=False, is_async=True)
        mbarrier.wait(full.index(2), 1)
        b_trace = warpgroup_mma(
            again.slice(0, 64, 0), state.slice(0, 64, 0).permute((1, 0)), no_square, use_acc=False, is_async=True
        )
        b_trace = warpgroup_mma(again.slice(64, 64, 0), state.slice(64, 64, 0).permute((1, 0)), b_trace, is_async=True)
        o_i = gl.arange(0, _C, row_square) + nil
        m_i, m_j = _apart(o_i, o_j)
        b_dk = warpgroup_mma_wait(1, [b_dk])
        b_dk *= (b_write * LIFT)[:, None]
        b_dend = gl.sum(b_dk * _widened(s_k.index(nil).reshape([_C, _D]).load(wide), DTYPE), axis=1) * (1 / LIFT)
        b_trace = warpgroup_mma_wait(0, [b_trace])
        b_chunk = gl.sum(gl.where(m_i == m_j, b_trace, 0.0), axis=1)
        b_chunk = gl.convert_layout(b_chunk, row) * exp2(last_gate)
        barrier()
        mbarrier.arrive(empty.index(1))
        nil = _nil(step)
        pairs = s_spare.index(nil + 2)
        pairs.store(b_z)
        fence_async_shared()
        barrier()

        # Sums over the tokens from one on, sum_{i>=l} Z_ij; the rest of dk but for M^T Q.
        keys = s_k.index(nil).reshape([_C, _D])
        o_i = gl.arange(0, _C, row_square) + nil
        m_i, m_j = _apart(o_i, o_j)
        ones = gl.convert_layout(gl.where(m_i <= m_j, 1.0, 0.0).to(DTYPE), left_square)
        b_across = warpgroup_mma(ones, pairs, no_square, use_acc=False, is_async=True)
        b_dk = warpgroup_mma(s_blocks.index(nil + 1), keys, b_dk, is_async=True)
        b_dk = warpgroup_mma(s_blocks.index(nil + 1).permute((1, 0)), keys, b_dk, is_async=True)
        b_across = warpgroup_mma_wait(2, [b_across])
        b_dg = gl.sum(gl.where(m_i > m_j, b_across, 0.0), axis=1)
        nil = _nil(step)
        again = s_again.index(nil)
        b_read *= LIFT
        b_dread = warpgroup_mma(s_values.index(nil).reshape([_C, _D]), again, no_wide, use_acc=False, is_async=True)
        b_dk, b_dread = warpgroup_mma_wait(0, [b_dk, b_dread])
        b_dread *= b_read[:, None]
        b_dk -= b_dread
        b_dbegin = -gl.sum(b_dread * _widened(s_k.index(nil).reshape([_C, _D]).load(wide), DTYPE), axis=1)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(empty.index(4))

        # dq
        nil = _nil(step)
        again = s_again.index(nil)
        queries = s_q.index(nil).reshape([_C, _D])
        inverse = s_blocks.index(nil)
        mbarrier.wait(full.index(1), phase)
        b_dk = warpgroup_mma(inverse.permute((1, 0)), queries, b_dk, is_async=True)
        mbarrier.wait(full.index(4), phase)
        b_dq = warpgroup_mma(s_values.index(nil).reshape([_C, _D]), again, no_wide, use_acc=False, is_async=True)
        b_dk, b_dq = warpgroup_mma_wait(0, [b_dk, b_dq])
        b_dq *= (exp2(b_gate) * (b_query_norm * (scale * LIFT)))[:, None]
        b_dbegin += gl.sum(b_dq * _widened(queries.load(wide), DTYPE), axis=1)
        s_rows.index(0).store(b_dbegin * (1 / LIFT) + b_chunk)
        s_rows.index(1).store(b_dend + b_chunk)
        nil = _nil(step)
        b_dq = warpgroup_mma(s_blocks.index(nil), s_k.index(nil).reshape([_C, _D]), b_dq, is_async=True)
        barrier()
        mbarrier.arrive(empty.index(2))

        # The gates' gradient: token l takes what decays over it, Z_ij of i >= l > j and the states' terms.
        o_i = gl.arange(0, _C, row_square) + nil
        m_i, m_j = _apart(o_i, o_j)
        b_begin_j = s_rows.index(0).load(column)
        b_end_j = s_rows.index(1).load(column)
        b_dg += gl.sum(gl.where(m_i > m_j, b_end_j[None, :], b_begin_j[None, :]), axis=1)
        gl.store(p_dg + o_token + o_i * HV, b_dg.to(p_dg.dtype.element_ty), mask=o_i < length)
        b_dq = warpgroup_mma_wait(0, [b_dq])

        # What the value heads before this one have added, and what this one hands on.
        if GROUP > 1:
            o_partial = o_r[:, None] * _D + gl.arange(0, _D, gl.SliceLayout(0, wide))[None, :]
            if i_group > 0:
                b_dk += gl.load(p_partial + _C * _D + o_partial).to(gl.float32) * LIFT
                b_dq += gl.load(p_partial + o_partial).to(gl.float32) * LIFT
            if i_group < GROUP - 1:
                gl.store(p_partial + _C * _D + o_partial, _rounded(b_dk * (1 / LIFT), DTYPE))
                gl.store(p_partial + o_partial, _rounded(b_dq * (1 / LIFT), DTYPE))
        nil = _nil(step)
        if i_group == GROUP - 1:
            if LIFT != 1:
                b_dk *= 1 / LIFT
                b_dq *= 1 / LIFT
            if NORMALIZE:
                b_rows = _widened(s_k.index(nil).reshape([_C, _D]).load(wide), DTYPE)
                b_dk -= b_rows * (gl.sum(b_dk * b_rows, axis=1) * b_key_norm * b_key_norm)[:, None]
                b_rows = _widened(s_q.index(nil).reshape([_C, _D]).load(wide), DTYPE)
                b_dq -= b_rows * (gl.sum(b_dq * b_rows, axis=1) * b_query_norm * b_query_norm)[:, None]
            barrier()
            s_values.index(nil).reshape([_C, _D]).store(_rounded(b_dk, DTYPE))
            s_out.index(nil).reshape([_C, _D]).store(_rounded(b_dq, DTYPE))
            fence_async_shared()
            barrier()
            mbarrier.arrive(empty.index(0))
            _store(d_dk, p_dk, s_values.index(nil), i_row, first, i_h * _D, H * _D, length, PACKED)
            _store(d_dq, p_dq, s_out.index(nil), i_row, first, i_h * _D, H * _D, length, PACKED)
        else:
            barrier()
        mbarrier.arrive(empty.index(1))
    tma.store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=SIZES)
def _gradient_kernel(
    d_q,
    d_k,
    d_v,
    d_do,
    d_states,
    d_dstates,
    d_inverse,
    d_attention,
    d_dq,
    p_dq,
    d_dk,
    p_dk,
    d_dv,
    p_dv,
    p_dg,
    p_dbeta,
    p_partial,
    p_scales,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    scale,
    tasks,
    H,
    GROUP: gl.constexpr,
    NORMALIZE: gl.constexpr,
    PACKED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Chunks of key heads with their value heads, one after another; grid (programs), tasks = chunks * H."""
    s_k = gl.allocate_shared_memory(DTYPE, [1, 1, _C, _D], d_k.layout)
    s_pair = gl.allocate_shared_memory(DTYPE, [2, 1, _C, _D], d_k.layout)
    s_values = gl.allocate_shared_memory(DTYPE, [1, 1, _C, _D], d_k.layout)
    s_blocks = gl.allocate_shared_memory(DTYPE, [2, _C, _C], d_inverse.layout)
    s_state = gl.allocate_shared_memory(DTYPE, [1, _D, _D], d_states.layout)
    s_rows = gl.allocate_shared_memory(gl.float32, [2, _C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(5):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()
    first_task = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = (tasks - first_task + programs - 1) // programs * GROUP
    gl.warp_specialize(
        [
            (
                _run,
                (
                    d_dq,
                    p_dq,
                    d_dk,
                    p_dk,
                    d_dv,
                    p_dv,
                    p_dg,
                    p_dbeta,
                    p_partial,
                    p_scales,
                    s_k,
                    s_pair,
                    s_values,
                    s_blocks,
                    s_state,
                    s_rows,
                    full,
                    empty,
                    p_starts,
                    p_lengths,
                    seq_len,
                    chunks_per_document,
                    scale,
                    first_task,
                    programs,
                    steps,
                    H,
                    GROUP,
                    NORMALIZE,
                    PACKED,
                    DTYPE,
                ),
            ),
            (
                _load,
                (
                    d_q,
                    d_k,
                    d_v,
                    d_do,
                    d_states,
                    d_dstates,
                    d_inverse,
                    d_attention,
                    s_k,
                    s_pair,
                    s_values,
                    s_blocks,
                    s_state,
                    full,
                    empty,
                    p_starts,
                    p_lengths,
                    seq_len,
                    chunks_per_document,
                    first_task,
                    programs,
                    steps,
                    H,
                    GROUP,
                    PACKED,
                    DTYPE,
                ),
            ),
        ],
        [1],
        [24],
    )


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
    """Fills dq, dk, dv, dg, dbeta from the states before and their gradients after each chunk.

    W = V - E∘(K S),  W~ = beta∘W,  U = Ag W~,  dU = P^T dO + R∘(K dS),  dW~ = Ag^T dU,  dv = beta∘dW~,
    dP = tril(dO U^T),  dAg = tril(dU W~^T),  dL = -tril(D∘(Ag^T dAg Ag^T), -1),  N = s dP∘D,  Z = dP∘P + dAg∘Ag
    dq = s E∘(dO S^T) + N K,  dk = R∘(U dS^T) - E∘(dv S^T) + N^T Q + (beta∘dL + (beta∘dL)^T) K
    dbeta = <dW~, W> + sum_j dL_ij <k_i, k_j>
    dg_l = sum_{i>=l>j} Z_ij + sum_{i>=l} (<q_i, s E (dO S^T)_i> - <dv_i, E (K S)_i>) + sum_{i<l} <U_i, R (K dS)_i>
           + e^Γ <dS, S>
    """
    _, seq_len, H, K = k.shape
    HV = v.shape[2]
    dq, dk, dv, dg, dbeta = out
    tasks = chunks.count * H
    programs = min(tasks, 2 * PROGRAMS)
    partial = torch.empty(programs, 2, CHUNK, K, dtype=k.dtype, device=k.device)
    token, state, block = [1, CHUNK, K], [K, K], [CHUNK, CHUNK]
    with on_device(k):
        _gradient_kernel[(programs,)](
            tiles(q, token),
            tiles(k, token),
            tiles(v, token),
            tiles(do, token),
            tiles(chains.states, state),
            tiles(chains.dstates, state),
            tiles(prepared.inverse, block),
            tiles(prepared.attention, block),
            tiles(dq, token),
            dq,
            tiles(dk, token),
            dk,
            tiles(dv, token),
            dv,
            dg,
            dbeta,
            partial,
            prepared.scales,
            prepared.scales if chunks.starts is None else chunks.starts,
            prepared.scales if chunks.lengths is None else chunks.lengths,
            seq_len,
            chunks.per_document,
            scale,
            tasks,
            H,
            GROUP=HV // H,
            NORMALIZE=normalize,
            PACKED=chunks.starts is not None,
            DTYPE=DTYPES[k.dtype],
            num_warps=4,
            maxnreg=128,
        )
