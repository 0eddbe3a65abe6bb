"""Gradients of the inputs of each chunk, in one kernel that reads every tile once.

B batch, T tokens, H key heads, HV value heads, G group (HV / H), K/V head dims, C chunk.

One warp loads. Two warpgroups share every product by columns, so that operands pass through shared memory, and each
product runs while the results of others are scaled and rounded.
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
from ..triton_stages.launch import SIZES, on_device
from .compatible import HAS_REINTERPRET, async_load, async_store, barrier
from .prepare import Prepared
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
    s_q,
    s_k,
    s_v,
    s_do,
    s_states,
    s_dstates,
    s_inverse,
    s_attention,
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
):
    for step in range(steps):
        i_task = step // GROUP
        i_group = step - i_task * GROUP
        task = first_task + i_task * programs
        i_chunk = task // H
        i_h = task - i_chunk * H
        i_row, first, _ = chunk_tokens(i_chunk, p_starts, p_lengths, seq_len, chunks_per_document, PACKED)
        i_hv = i_h * GROUP + i_group
        i_head = i_chunk * (H * GROUP) + i_hv
        if i_group == 0:
            mbarrier.wait(empty.index(0), (i_task & 1) ^ 1)
            mbarrier.expect(full.index(0), 2 * (2 * _C * _D))
            async_load(d_k, [i_row, first, i_h * _D], full.index(0), s_k.index(0))
            async_load(d_q, [i_row, first, i_h * _D], full.index(0), s_q.index(0))
        mbarrier.wait(empty.index(1), (step & 1) ^ 1)
        mbarrier.expect(full.index(1), 2 * (2 * _D * _D + _C * _D))
        async_load(d_states, [i_head * _D, 0], full.index(1), s_states.index(0))
        async_load(d_dstates, [i_head * _D, 0], full.index(1), s_dstates.index(0))
        async_load(d_do, [i_row, first, i_hv * _D], full.index(1), s_do.index(0))
        mbarrier.wait(empty.index(2), (step & 1) ^ 1)
        mbarrier.expect(full.index(2), 2 * (_C * _D + 2 * _C * _C))
        async_load(d_attention, [i_head * _C, 0], full.index(2), s_attention.index(0))
        async_load(d_v, [i_row, first, i_hv * _D], full.index(2), s_v.index(0))
        async_load(d_inverse, [i_head * _C, 0], full.index(2), s_inverse.index(0))


@gluon.jit
def _store(d_x, p_x, s_tile, i_row, first, column, width, length, PACKED: gl.constexpr):
    """Stores a tile [1, C, D] that all threads have written; of packed documents without the tokens past the end."""
    if PACKED:
        if length < _C:
            flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
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
def _rounded(x, DTYPE: gl.constexpr):
    """x in DTYPE, now: the compiler would rather keep x until the result is needed, in twice the registers."""
    if gl.bfloat16 == DTYPE:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, False, 2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, False, 2)
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
    s_q,
    s_k,
    s_v,
    s_do,
    s_states,
    s_dstates,
    s_inverse,
    s_attention,
    s_pair,
    s_values,
    s_blocks,
    s_before,
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
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    states: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    o_r = gl.arange(0, _C, rows)
    o_i = gl.arange(0, _C, gl.SliceLayout(1, square))
    o_j = gl.arange(0, _C, gl.SliceLayout(0, square))
    strict = o_i[:, None] > o_j[None, :]
    lower = o_i[:, None] >= o_j[None, :]
    no_wide = gl.full([_C, _D], 0.0, gl.float32, wide)
    no_square = gl.full([_C, _C], 0.0, gl.float32, square)
    HV = H * GROUP

    square_layout: gl.constexpr = s_inverse.layout
    if HAS_REINTERPRET:
        quarters = s_pair.reinterpret(DTYPE, [4, _C, _C], square_layout)
    else:
        quarters = s_pair._reinterpret(DTYPE, [4, _C, _C], square_layout)
    if HAS_REINTERPRET:
        halves = s_values.reinterpret(DTYPE, [2, _C, _C], square_layout)
    else:
        halves = s_values._reinterpret(DTYPE, [2, _C, _C], square_layout)

    # Ones above the diagonal: sums over all tokens before one.
    s_before.index(0).store(gl.where(o_i[:, None] < o_j[None, :], 1.0, 0.0).to(DTYPE))

    o_partial = o_r[:, None] * _D + gl.arange(0, _D, gl.SliceLayout(0, wide))[None, :]
    p_partial += first_task * (2 * _C * _D)
    for step in range(steps):
        i_task = step // GROUP
        i_group = step - i_task * GROUP
        task = first_task + i_task * programs
        i_chunk = task // H
        i_h = task - i_chunk * H
        i_row, first, length = chunk_tokens(i_chunk, p_starts, p_lengths, seq_len, chunks_per_document, PACKED)
        # Always 0, which the compiler does not know: it would keep all operands' addresses in registers.
        zero = length >> 16
        keys = s_k.index(zero).reshape([_C, _D])
        queries = s_q.index(zero).reshape([_C, _D])
        grads = s_do.index(zero).reshape([_C, _D])
        values = s_v.index(zero).reshape([_C, _D])
        before = s_states.index(zero)
        dafter = s_dstates.index(zero)
        inverse = s_inverse.index(zero)
        attention = s_attention.index(zero)
        errors = s_pair.index(zero)
        dvalues = s_pair.index(zero + 1)
        news = s_values.index(zero)
        i_hv = i_h * GROUP + i_group
        i_head = i_chunk * HV + i_hv
        p_row = p_scales + i_head.to(gl.int64) * (_SCALE_ROWS * _C)
        b_read = gl.load(p_row + _READ * _C + o_r)
        b_write = gl.load(p_row + _WRITE * _C + o_r)
        b_beta = gl.load(p_row + _BETA * _C + o_r)
        b_gate = gl.load(p_row + _GATE * _C + o_r)
        b_key_norm = gl.load(p_row + _KEY_NORM * _C + o_r)
        b_query_norm = gl.load(p_row + _QUERY_NORM * _C + o_r)
        last_gate = gl.load(p_row + (_GATE * _C + _C - 1))

        if i_group == 0:
            mbarrier.wait(full.index(0), i_task & 1)
        mbarrier.wait(full.index(1), step & 1)
        b_ks = warpgroup_mma(keys, before.permute((1, 0)), no_wide, use_acc=False, is_async=True)
        b_ks = warpgroup_mma_wait(0, [b_ks])
        b_du = warpgroup_mma(keys, dafter.permute((1, 0)), no_wide, use_acc=False, is_async=True)
        b_ks *= b_read[:, None]
        b_read_values = _rounded(b_ks, DTYPE)
        mbarrier.wait(full.index(2), step & 1)
        # Pending stores of the last step's results read from these buffers.
        tma.store_wait(0)
        barrier()
        errors.store(((values.load(wide).to(gl.float32) - b_ks) * b_beta[:, None]).to(DTYPE))
        b_du = warpgroup_mma_wait(0, [b_du])
        b_du *= b_write[:, None]
        b_dwritten = _rounded(b_du, DTYPE)
        fence_async_shared()
        barrier()
        b_pdo = warpgroup_mma(attention.permute((1, 0)), grads, no_wide, use_acc=False, is_async=True)
        b_u = warpgroup_mma(inverse, errors, no_wide, use_acc=False, is_async=True)
        b_pdo = warpgroup_mma_wait(1, [b_pdo])
        dvalues.store((b_du + b_pdo).to(DTYPE))
        fence_async_shared()
        b_u = warpgroup_mma_wait(0, [b_u])
        barrier()

        b_da = warpgroup_mma(dvalues, errors.permute((1, 0)), no_square, use_acc=False, is_async=True)
        news.store(b_u.to(DTYPE))
        b_dend = gl.sum(b_u * b_dwritten.to(gl.float32), axis=1)
        b_written = _rounded(b_u * gl.exp(last_gate - b_gate)[:, None], DTYPE)
        b_da = warpgroup_mma_wait(0, [b_da])
        s_blocks.index(zero).store(gl.where(lower, b_da, 0.0).to(DTYPE))
        fence_async_shared()
        barrier()

        b_dw = warpgroup_mma(inverse.permute((1, 0)), dvalues, no_wide, use_acc=False, is_async=True)
        b_dp = warpgroup_mma(grads, news.permute((1, 0)), no_square, use_acc=False, is_async=True)
        b_half = warpgroup_mma(inverse.permute((1, 0)), s_blocks.index(zero), no_square, use_acc=False, is_async=True)
        errors.store(b_written)
        b_exp = gl.exp(b_gate)
        b_dw, b_dp, b_half = warpgroup_mma_wait(0, [b_dw, b_dp, b_half])
        b_ks = b_read_values.to(gl.float32)
        b_dbeta = gl.sum(b_dw * (values.load(wide).to(gl.float32) - b_ks), axis=1)
        b_dw *= b_beta[:, None]
        b_dbegin = -gl.sum(b_dw * b_ks, axis=1)
        barrier()
        values.store(b_dw.to(DTYPE))
        dvalues.store((-b_exp[:, None] * b_dw).to(DTYPE))
        s_blocks.index(zero + 1).store(b_half.to(DTYPE))
        fence_async_shared()
        barrier()
        _store(d_dv, p_dv, s_v.index(zero), i_row, first, i_hv * _D, HV * _D, length, PACKED)

        b_dk_next = warpgroup_mma(errors, dafter, no_wide, use_acc=False, is_async=True)
        b_dk_next = warpgroup_mma(dvalues, before, b_dk_next, is_async=True)
        b_gate_j = gl.load(p_row + _GATE * _C + o_j)
        b_key_norm_j = gl.load(p_row + _KEY_NORM * _C + o_j)
        b_gate_i = gl.convert_layout(b_gate, gl.SliceLayout(1, square))
        b_decay = gl.exp(gl.where(lower, b_gate_i[:, None] - b_gate_j[None, :], float("-inf")))
        b_z = s_blocks.index(zero).load(square).to(gl.float32) * inverse.load(square).to(gl.float32)
        b_z += b_dp * attention.load(square).to(gl.float32)
        b_z = gl.where(strict, b_z, 0.0)
        b_high = b_z.to(DTYPE)
        halves.index(zero).store(b_high)
        halves.index(zero + 1).store((b_z - b_high.to(gl.float32)).to(DTYPE))
        b_n = _rounded(scale * b_dp * b_decay, DTYPE)
        b_dk = warpgroup_mma_wait(0, [b_dk_next])
        b_dqs = warpgroup_mma(grads, before, no_wide, use_acc=False, is_async=True)
        b_product = before.load(states).to(gl.float32) * dafter.load(states).to(gl.float32)
        dchunk = gl.sum(gl.sum(b_product, axis=1), axis=0)
        b_query_norm_i = gl.convert_layout(b_query_norm, gl.SliceLayout(1, square))
        barrier()
        quarters.index(zero).store((b_n.to(gl.float32) * b_query_norm_i[:, None]).to(DTYPE))
        quarters.index(zero + 1).store((b_n.to(gl.float32) * b_key_norm_j[None, :]).to(DTYPE))
        fence_async_shared()
        b_dqs = warpgroup_mma_wait(0, [b_dqs])
        b_dqs *= (scale * b_exp)[:, None]
        b_dbegin += b_query_norm * gl.sum(b_dqs * queries.load(wide).to(gl.float32), axis=1)
        barrier()
        mbarrier.arrive(empty.index(1))

        b_kk = warpgroup_mma(keys, keys.permute((1, 0)), no_square, use_acc=False, is_async=True)
        b_dl = warpgroup_mma(s_blocks.index(zero + 1), inverse.permute((1, 0)), no_square, use_acc=False, is_async=True)
        b_across = warpgroup_mma(halves.index(zero), s_before.index(zero), no_square, use_acc=False, is_async=True)
        b_across = warpgroup_mma(halves.index(zero + 1), s_before.index(zero), b_across, is_async=True)
        b_dq_next = warpgroup_mma(quarters.index(zero + 1), keys, b_dqs, is_async=True)
        b_dk_next = warpgroup_mma(quarters.index(zero).permute((1, 0)), queries, b_dk, is_async=True)
        b_kk = warpgroup_mma_wait(5, [b_kk])
        b_dl = warpgroup_mma_wait(4, [b_dl])
        b_dl = gl.where(strict, -b_dl * b_decay, 0.0)
        b_step = gl.sum(b_dl * b_kk * b_key_norm_j[None, :], axis=1)
        b_beta_i = gl.convert_layout(b_beta, gl.SliceLayout(1, square))
        b_key_norm_i = gl.convert_layout(b_key_norm, gl.SliceLayout(1, square))
        b_dl *= b_beta_i[:, None]
        quarters.index(zero + 2).store((b_dl * b_key_norm_j[None, :]).to(DTYPE))
        quarters.index(zero + 3).store((b_dl * b_key_norm_i[:, None]).to(DTYPE))
        fence_async_shared()
        barrier()
        b_dk_next = warpgroup_mma(quarters.index(zero + 2), keys, b_dk_next, is_async=True)
        b_dk_next = warpgroup_mma(quarters.index(zero + 3).permute((1, 0)), keys, b_dk_next, is_async=True)

        # The gates' gradient: token l takes what decays over it, Z_ij of i >= l > j and the states' terms.
        b_across = warpgroup_mma_wait(4, [b_across])
        b_dbegin_i = gl.convert_layout(b_dbegin, gl.SliceLayout(1, square))
        b_dend_i = gl.convert_layout(b_dend, gl.SliceLayout(1, square))
        b_dg = gl.sum(gl.where(lower, b_across + b_dbegin_i[:, None], b_dend_i[:, None]), axis=0)
        b_dg += dchunk * gl.exp(last_gate)
        o_token = (i_row.to(gl.int64) * seq_len + first) * HV + i_hv
        gl.store(p_dg + o_token + o_j * HV, b_dg.to(p_dg.dtype.element_ty), mask=o_j < length)
        b_dbeta += b_key_norm * gl.convert_layout(b_step, rows)
        gl.store(p_dbeta + o_token + o_r * HV, b_dbeta.to(p_dbeta.dtype.element_ty), mask=o_r < length)
        b_dq = warpgroup_mma_wait(3, [b_dq_next])
        b_dk = warpgroup_mma_wait(0, [b_dk_next])
        # What the value heads before this one have added, and what this one hands on.
        if GROUP > 1:
            if i_group > 0:
                b_dq += gl.load(p_partial + o_partial)
                b_dk += gl.load(p_partial + _C * _D + o_partial)
            if i_group < GROUP - 1:
                gl.store(p_partial + o_partial, b_dq)
                gl.store(p_partial + _C * _D + o_partial, b_dk)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(empty.index(2))

        if i_group == GROUP - 1:
            if NORMALIZE:
                b_rows = keys.load(wide).to(gl.float32)
                b_sum = gl.sum(b_dk * b_rows, axis=1) * b_key_norm * b_key_norm
                b_dk = b_key_norm[:, None] * (b_dk - b_rows * b_sum[:, None])
                b_rows = queries.load(wide).to(gl.float32)
                b_sum = gl.sum(b_dq * b_rows, axis=1) * b_query_norm * b_query_norm
                b_dq = b_query_norm[:, None] * (b_dq - b_rows * b_sum[:, None])
            errors.store(b_dk.to(DTYPE))
            dvalues.store(b_dq.to(DTYPE))
            fence_async_shared()
            barrier()
            mbarrier.arrive(empty.index(0))
            tile_layout: gl.constexpr = s_k.layout
            if HAS_REINTERPRET:
                pair = s_pair.reinterpret(DTYPE, [2, 1, _C, _D], tile_layout)
            else:
                pair = s_pair._reinterpret(DTYPE, [2, 1, _C, _D], tile_layout)
            _store(d_dk, p_dk, pair.index(zero), i_row, first, i_h * _D, H * _D, length, PACKED)
            _store(d_dq, p_dq, pair.index(zero + 1), i_row, first, i_h * _D, H * _D, length, PACKED)
    tma.store_wait(0)


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
    s_q = gl.allocate_shared_memory(DTYPE, [1, 1, _C, _D], d_q.layout)
    s_k = gl.allocate_shared_memory(DTYPE, [1, 1, _C, _D], d_k.layout)
    s_v = gl.allocate_shared_memory(DTYPE, [1, 1, _C, _D], d_v.layout)
    s_do = gl.allocate_shared_memory(DTYPE, [1, 1, _C, _D], d_do.layout)
    s_states = gl.allocate_shared_memory(DTYPE, [1, _D, _D], d_states.layout)
    s_dstates = gl.allocate_shared_memory(DTYPE, [1, _D, _D], d_dstates.layout)
    s_inverse = gl.allocate_shared_memory(DTYPE, [1, _C, _C], d_inverse.layout)
    s_attention = gl.allocate_shared_memory(DTYPE, [1, _C, _C], d_attention.layout)
    s_pair = gl.allocate_shared_memory(DTYPE, [2, _C, _D], d_states.layout)
    s_values = gl.allocate_shared_memory(DTYPE, [1, _C, _D], d_states.layout)
    s_blocks = gl.allocate_shared_memory(DTYPE, [2, _C, _C], d_inverse.layout)
    s_before = gl.allocate_shared_memory(DTYPE, [1, _C, _C], d_inverse.layout)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
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
                    s_q,
                    s_k,
                    s_v,
                    s_do,
                    s_states,
                    s_dstates,
                    s_inverse,
                    s_attention,
                    s_pair,
                    s_values,
                    s_blocks,
                    s_before,
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
                    s_q,
                    s_k,
                    s_v,
                    s_do,
                    s_states,
                    s_dstates,
                    s_inverse,
                    s_attention,
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
    chunks: Chunks,
    *,
    scale: float,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg, dbeta from the states before and their gradients after each chunk.

    W = V - E∘(K S),  W~ = beta∘W,  U = Ag W~,  dU = P^T dO + R∘(K dS),  dW~ = Ag^T dU,  dv = beta∘dW~,
    dP = tril(dO U^T),  dAg = tril(dU W~^T),  dL = -tril(D∘(Ag^T dAg Ag^T), -1),  N = s dP∘D,  Z = dP∘P + dAg∘Ag
    dq = s E∘(dO S^T) + N K,  dk = R∘(U dS^T) - E∘(dv S^T) + N^T Q + (beta∘dL + (beta∘dL)^T) K
    dbeta = <dW~, W> + sum_j dL_ij <k_i, k_j>
    dg_l = sum_{i>=l>j} Z_ij + sum_{i>=l} (<q_i, s E (dO S^T)_i> - <dv_i, E (K S)_i>) + sum_{i<l} <U_i, R (K dS)_i>
           + e^Γ <dS, S>
    """
    _, seq_len, H, K = k.shape
    HV = v.shape[2]
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    tasks = chunks.count * H
    programs = min(tasks, PROGRAMS)
    partial = torch.empty(programs, 2, CHUNK, K, dtype=torch.float32, device=k.device)
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
            num_warps=8,
        )
    return dq, dk, dv, dg, dbeta
