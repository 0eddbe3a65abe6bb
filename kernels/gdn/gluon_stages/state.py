"""The two chains over the chunks of a span: the state forward, its gradient backward.

N documents, T tokens, H key heads, HV value heads, K/V head dims, C chunk.

Both hold the transpose of the state, [64, K] of it a program, as an accumulator: its rows are independent, and every
product of a chain has the chain's own operand on the left, where it is read from registers. One warp loads, and four
keep the tensor cores busy: a product that does not need the state runs while the state is rounded for the next step.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import NamedTuple

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

from ..triton_stages.chunks import CHUNK, Chunks
from ..triton_stages.launch import SIZES, Kernel, on_device
from .compatible import async_load, async_store, barrier, view
from .prepare import Prepared
from .scales import DECAY, KEY_NORM, READ, SCALE_ROWS
from .tiles import DTYPES, tiles

_READ = gl.constexpr(READ)
_DECAY = gl.constexpr(DECAY)
_KEY_NORM = gl.constexpr(KEY_NORM)
_SCALE_ROWS = gl.constexpr(SCALE_ROWS)
_C = gl.constexpr(CHUNK)
_D = gl.constexpr(128)  # K and V
_BV = gl.constexpr(64)  # rows of the transposed state that a program holds
_BLOCKS = gl.constexpr(2)
_STAGES = gl.constexpr(3)


@gluon.jit
def _span(
    i_span, p_token_offsets, p_chunk_offsets, seq_len, chunks_per_document, spans, span_chunks, PACKED: gl.constexpr
):
    """Row, first token, tokens, first chunk, and the chunks from begin to end of a span."""
    i_document = i_span // spans
    i_part = i_span - i_document * spans
    if PACKED:
        i_row = i_document * 0
        first = gl.load(p_token_offsets + i_document).to(gl.int32)
        length = gl.load(p_token_offsets + i_document + 1).to(gl.int32) - first
        first_chunk = gl.load(p_chunk_offsets + i_document).to(gl.int32)
        chunks = gl.load(p_chunk_offsets + i_document + 1).to(gl.int32) - first_chunk
    else:
        i_row = i_document
        first = i_document * 0
        length = first + seq_len
        first_chunk = i_document * chunks_per_document
        chunks = first + chunks_per_document
    begin = i_part * span_chunks
    end = gl.minimum(begin + span_chunks, chunks)
    return i_row, first, length, first_chunk, begin, end


@gluon.jit
def _load_state(
    d_k,
    d_v,
    d_writes,
    d_queries,
    d_attention,
    s_k,
    s_v,
    s_writes,
    s_queries,
    s_attention,
    full,
    empty,
    i_row,
    token,
    i_key,
    i_value,
    i_chunk,
    writes_offset,
    HV,
    steps,
    HAS_OUTPUT: gl.constexpr,
):
    for step in range(steps):
        stage = step % _STAGES
        mbarrier.wait(empty.index(stage), ((step // _STAGES) & 1) ^ 1)
        ready = full.index(stage)
        if HAS_OUTPUT:
            mbarrier.expect(ready, 2 * (3 * _C * _D + _C * _BV + _C * _C))
        else:
            mbarrier.expect(ready, 2 * (2 * _C * _D + _C * _BV))
        async_load(d_k, [i_row, token, i_key], ready, s_k.index(stage))
        async_load(d_v, [i_row, token, i_value], ready, s_v.index(stage))
        async_load(d_writes, [i_chunk * _D + writes_offset, 0], ready, s_writes.index(stage))
        if HAS_OUTPUT:
            async_load(d_attention, [i_chunk * _C, 0], ready, s_attention.index(stage))
            async_load(d_queries, [i_chunk * _C, 0], ready, s_queries.index(stage))
        token += _C
        i_chunk += HV


@gluon.jit
def _run_state(
    d_o,
    p_o,
    d_states,
    p_scales,
    p_initial_state,
    p_final_state,
    p_transition,
    s_k,
    s_v,
    s_writes,
    s_queries,
    s_attention,
    s_out,
    full,
    empty,
    i_row,
    token,
    left,
    i_value,
    i_chunk,
    i_state,
    i_block,
    is_transition,
    HV,
    steps,
    HAS_INITIAL_STATE: gl.constexpr,
    HAS_OUTPUT: gl.constexpr,
    HAS_STATES: gl.constexpr,
    HAS_TRANSITION: gl.constexpr,
    HAS_FINAL_STATE: gl.constexpr,
    PACKED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left_narrow: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    left_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_k = gl.arange(0, _D, gl.SliceLayout(0, wide))
    o_v = gl.arange(0, _BV, gl.SliceLayout(1, wide))
    o_c = gl.arange(0, _C, gl.SliceLayout(0, narrow))

    value_scale = 1.0
    read_row = _READ
    b_state = gl.full([_BV, _D], 0.0, gl.float32, wide)
    o_state = i_block * _BV + o_k[None, :] * _D + o_v[:, None]
    if HAS_TRANSITION:
        if is_transition:
            value_scale = 0.0
            read_row = _KEY_NORM
            b_state = gl.where(o_k[None, :] == (i_block * _BV + o_v)[:, None], 1.0, 0.0)
    elif HAS_INITIAL_STATE:
        b_state = gl.load(p_initial_state + i_state * (_D * _D) + o_state).to(gl.float32)
    total = 1.0
    p_row = p_scales + i_chunk.to(gl.int64) * (_SCALE_ROWS * _C)
    b_read = gl.load(p_row + read_row * _C + o_c)
    decay = gl.load(p_row + _DECAY * _C)
    zeros = gl.full([_BV, _C], 0.0, gl.float32, narrow)
    b_part = zeros
    if HAS_OUTPUT:
        if steps > 0:
            mbarrier.wait(full.index(0), 0)
        b_part = warpgroup_mma(
            s_v.index(0).reshape([_C, _BV]).permute((1, 0)),
            s_attention.index(0).permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        b_part = warpgroup_mma_wait(0, [b_part])
    for step in range(steps):
        stage = step % _STAGES
        if not HAS_OUTPUT:
            mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
        # The next chunk's scales (at the end, of this one again). The fence before a store waits for all loads under
        # way: where there is one, they start here and not, as the compiler would have it, just before it.
        p_row += gl.where(step + 1 < steps, HV, 0).to(gl.int64) * (_SCALE_ROWS * _C)
        b_read_next = gl.load(p_row + read_row * _C + o_c, volatile=HAS_OUTPUT or HAS_STATES)
        next_decay = gl.load(p_row + _DECAY * _C, volatile=HAS_OUTPUT or HAS_STATES)
        keys = s_k.index(stage).reshape([_C, _D])
        values = s_v.index(stage).reshape([_C, _BV])
        b_rounded = b_state.to(DTYPE)
        b_left = gl.convert_layout(b_rounded, left_narrow)
        b_ks = warpgroup_mma(b_left, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if HAS_OUTPUT:
            b_o = warpgroup_mma(b_left, s_queries.index(stage).permute((1, 0)), b_part, is_async=True)
        if HAS_STATES:
            tma.store_wait(0)
            barrier()
            s_out.store(b_rounded)
            fence_async_shared()
            barrier()
            async_store(d_states, [i_chunk * _D + i_block * _BV, 0], s_out)
        b_values = values.permute((1, 0)).load(narrow).to(gl.float32)
        if HAS_TRANSITION:
            b_values *= value_scale
            total *= decay
            decay = gl.where(is_transition, 1.0, decay)
        b_state *= decay
        b_ks = warpgroup_mma_wait(1 if HAS_OUTPUT else 0, [b_ks])
        b_w = (b_values - b_read[None, :] * b_ks).to(DTYPE)
        b_w = gl.convert_layout(b_w, left_wide)
        b_next = warpgroup_mma(b_w, s_writes.index(stage).permute((1, 0)), b_state, is_async=True)
        if HAS_OUTPUT:
            following = step + 1
            more = following < steps
            after = gl.where(more, following % _STAGES, stage)
            mbarrier.wait(full.index(after), gl.where(more, (following // _STAGES) & 1, (step // _STAGES) & 1))
            b_after = warpgroup_mma(
                s_v.index(after).reshape([_C, _BV]).permute((1, 0)),
                s_attention.index(after).permute((1, 0)),
                zeros,
                use_acc=False,
                is_async=True,
            )
            b_o = warpgroup_mma_wait(2, [b_o])
            tma.store_wait(0)
            barrier()
            out = s_out.reshape([_C, _BV])
            out.permute((1, 0)).store(b_o.to(DTYPE))
            if PACKED:
                barrier()
                if left < _C:
                    f_c = gl.arange(0, _C, gl.SliceLayout(1, flat))
                    f_v = gl.arange(0, _BV, gl.SliceLayout(0, flat))
                    b_out = out.load(flat)
                    p_tile = p_o + token.to(gl.int64) * (HV * _D) + i_value
                    gl.store(p_tile + f_c[:, None] * (HV * _D) + f_v[None, :], b_out, mask=(f_c < left)[:, None])
                else:
                    fence_async_shared()
                    barrier()
                    async_store(d_o, [i_row, token, i_value], s_out)
            else:
                fence_async_shared()
                barrier()
                async_store(d_o, [i_row, token, i_value], s_out)
            b_state = warpgroup_mma_wait(1, [b_next])
            b_part = warpgroup_mma_wait(0, [b_after])
        else:
            b_state = warpgroup_mma_wait(0, [b_next])
        barrier()
        mbarrier.arrive(empty.index(stage))
        b_read = b_read_next
        decay = next_decay
        token += _C
        left -= _C
        i_chunk += HV

    tma.store_wait(0)
    if HAS_TRANSITION:
        if is_transition:
            o_m = i_block * _BV + o_k[None, :] * _D + o_v[:, None]
            gl.store(p_transition + i_state * (_D * _D) + o_m, b_state * total)
        else:
            gl.store(p_final_state + i_state * (_D * _D) + o_state, b_state)
    elif HAS_FINAL_STATE:
        gl.store(p_final_state + i_state * (_D * _D) + o_state, b_state)


@Kernel
@gluon.jit(do_not_specialize=SIZES)
def _forward_kernel(
    d_k,
    d_v,
    d_writes,
    d_queries,
    d_attention,
    transition_offset,
    p_scales,
    p_initial_state,
    d_o,
    p_o,
    p_final_state,
    p_transition,
    p_token_offsets,
    p_chunk_offsets,
    seq_len,
    chunks_per_document,
    spans,
    span_chunks,
    H,
    HV,
    HAS_INITIAL_STATE: gl.constexpr,
    HAS_OUTPUT: gl.constexpr,
    HAS_TRANSITION: gl.constexpr,
    PACKED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Grid (documents * spans * HV * blocks)."""
    pid = gl.program_id(0)
    BLOCKS: gl.constexpr = 2 * _BLOCKS if HAS_TRANSITION else _BLOCKS
    i_block = pid % BLOCKS
    i_hv = (pid // BLOCKS) % HV
    i_span = pid // (BLOCKS * HV)
    i_row, first, length, first_chunk, begin, end = _span(
        i_span, p_token_offsets, p_chunk_offsets, seq_len, chunks_per_document, spans, span_chunks, PACKED
    )
    is_transition = i_block >= _BLOCKS
    writes_offset = 0
    if HAS_TRANSITION:
        writes_offset = gl.where(is_transition, transition_offset, 0)
        i_block = i_block % _BLOCKS
    s_k = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, _C, _D], d_k.layout)
    s_v = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, _C, _BV], d_v.layout)
    s_writes = gl.allocate_shared_memory(DTYPE, [_STAGES, _D, _C], d_writes.layout)
    if HAS_OUTPUT:
        s_queries = gl.allocate_shared_memory(DTYPE, [_STAGES, _C, _D], d_queries.layout)
        s_attention = gl.allocate_shared_memory(DTYPE, [_STAGES, _C, _C], d_attention.layout)
        s_out = gl.allocate_shared_memory(DTYPE, [1, _C, _BV], d_o.layout)
    else:
        s_queries = s_writes
        s_attention = s_writes
        s_out = s_writes
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    barrier()
    token = first + begin * _C
    i_chunk = (first_chunk + begin) * HV + i_hv
    i_key = i_hv // (HV // H) * _D
    i_value = i_hv * _D + i_block * _BV
    i_state = i_span.to(gl.int64) * HV + i_hv
    steps = gl.maximum(end - begin, 0)
    gl.warp_specialize(
        [
            (
                _run_state,
                (
                    d_o,
                    p_o,
                    d_o,
                    p_scales,
                    p_initial_state,
                    p_final_state,
                    p_transition,
                    s_k,
                    s_v,
                    s_writes,
                    s_queries,
                    s_attention,
                    s_out,
                    full,
                    empty,
                    i_row,
                    token,
                    length - begin * _C,
                    i_value,
                    i_chunk,
                    i_state,
                    i_block,
                    is_transition,
                    HV,
                    steps,
                    HAS_INITIAL_STATE,
                    HAS_OUTPUT,
                    False,
                    HAS_TRANSITION,
                    True,
                    PACKED,
                    DTYPE,
                ),
            ),
            (
                _load_state,
                (
                    d_k,
                    d_v,
                    d_writes,
                    d_queries,
                    d_attention,
                    s_k,
                    s_v,
                    s_writes,
                    s_queries,
                    s_attention,
                    full,
                    empty,
                    i_row,
                    token,
                    i_key,
                    i_value,
                    i_chunk,
                    writes_offset,
                    HV,
                    steps,
                    HAS_OUTPUT,
                ),
            ),
        ],
        [1],
        [24],
    )


@gluon.jit
def _load_gradient(
    d_k,
    d_do,
    d_queries,
    d_reads,
    s_k,
    s_do,
    s_queries,
    s_reads,
    full,
    empty,
    i_row,
    token,
    i_key,
    i_value,
    i_chunk,
    HV,
    steps,
):
    for step in range(steps):
        stage = step % _STAGES
        mbarrier.wait(empty.index(stage), ((step // _STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, 2 * (3 * _C * _D + _C * _BV))
        async_load(d_k, [i_row, token, i_key], ready, s_k.index(stage))
        async_load(d_do, [i_row, token, i_value], ready, s_do.index(stage))
        async_load(d_queries, [i_chunk * _C, 0], ready, s_queries.index(stage))
        async_load(d_reads, [i_chunk * _C, 0], ready, s_reads.index(stage))
        token -= _C
        i_chunk -= HV


@gluon.jit
def _run_gradient(
    d_dstates,
    p_scales,
    p_dfinal_state,
    p_dinitial_state,
    s_k,
    s_do,
    s_queries,
    s_reads,
    s_out,
    full,
    empty,
    i_chunk,
    i_state,
    i_block,
    HV,
    steps,
    HAS_DFINAL_STATE: gl.constexpr,
    HAS_DSTATES: gl.constexpr,
    DTYPE: gl.constexpr,
):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left_narrow: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    left_wide: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    o_k = gl.arange(0, _D, gl.SliceLayout(0, wide))
    o_v = gl.arange(0, _BV, gl.SliceLayout(1, wide))
    o_state = i_state * (_D * _D) + i_block * _BV + o_k[None, :] * _D + o_v[:, None]
    if HAS_DFINAL_STATE:
        b_dstate = gl.load(p_dfinal_state + o_state).to(gl.float32)
    else:
        b_dstate = gl.full([_BV, _D], 0.0, gl.float32, wide)
    zeros = gl.full([_BV, _C], 0.0, gl.float32, narrow)
    p_decay = p_scales + i_chunk.to(gl.int64) * (_SCALE_ROWS * _C) + _DECAY * _C
    decay = gl.load(p_decay)
    for step in range(steps):
        stage = step % _STAGES
        mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
        p_decay -= gl.where(step + 1 < steps, HV, 0).to(gl.int64) * (_SCALE_ROWS * _C)
        next_decay = gl.load(p_decay, volatile=True)
        keys = s_k.index(stage).reshape([_C, _D])
        grads = s_do.index(stage).reshape([_C, _BV])
        b_rounded = b_dstate.to(DTYPE)
        b_left = gl.convert_layout(b_rounded, left_narrow)
        b_dwritten = warpgroup_mma(b_left, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_dstate *= decay
        b_next = warpgroup_mma(grads.permute((1, 0)), s_queries.index(stage), b_dstate, is_async=True)
        if HAS_DSTATES:
            tma.store_wait(0)
            barrier()
            s_out.store(b_rounded)
            fence_async_shared()
            barrier()
            async_store(d_dstates, [i_chunk * _D + i_block * _BV, 0], s_out)
        b_dwritten = warpgroup_mma_wait(1, [b_dwritten])
        b_dw = gl.convert_layout(b_dwritten.to(DTYPE), left_wide)
        b_next = warpgroup_mma(b_dw, s_reads.index(stage), b_next, is_async=True)
        b_dstate = warpgroup_mma_wait(0, [b_next])
        barrier()
        mbarrier.arrive(empty.index(stage))
        decay = next_decay
        i_chunk -= HV
    tma.store_wait(0)
    gl.store(p_dinitial_state + o_state, b_dstate)


@Kernel
@gluon.jit(do_not_specialize=SIZES)
def _backward_kernel(
    d_k,
    d_v,
    d_do,
    d_writes,
    d_queries,
    d_reads,
    p_scales,
    p_initial_state,
    p_dfinal_state,
    d_states,
    d_dstates,
    p_dinitial_state,
    p_token_offsets,
    p_chunk_offsets,
    seq_len,
    chunks_per_document,
    spans,
    span_chunks,
    H,
    HV,
    HAS_INITIAL_STATE: gl.constexpr,
    HAS_DFINAL_STATE: gl.constexpr,
    HAS_STATES: gl.constexpr,
    PACKED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Grid (documents * spans * HV * blocks), twice that with states: the two chains are independent."""
    pid = gl.program_id(0)
    CHAINS: gl.constexpr = 2 if HAS_STATES else 1
    i_block = (pid // CHAINS) % _BLOCKS
    i_hv = (pid // (CHAINS * _BLOCKS)) % HV
    i_span = pid // (CHAINS * _BLOCKS * HV)
    i_row, first, length, first_chunk, begin, end = _span(
        i_span, p_token_offsets, p_chunk_offsets, seq_len, chunks_per_document, spans, span_chunks, PACKED
    )
    s_k = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, _C, _D], d_k.layout)
    s_v = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, _C, _BV], d_do.layout)
    s_queries = gl.allocate_shared_memory(DTYPE, [_STAGES, _C, _D], d_queries.layout)
    s_reads = gl.allocate_shared_memory(DTYPE, [_STAGES, _C, _D], d_reads.layout)
    s_out = gl.allocate_shared_memory(DTYPE, [_BV, _D], d_states.layout) if HAS_STATES else s_reads.index(0)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    barrier()
    i_key = i_hv // (HV // H) * _D
    i_value = i_hv * _D + i_block * _BV
    i_state = i_span.to(gl.int64) * HV + i_hv
    steps = gl.maximum(end - begin, 0)
    if pid % CHAINS == 1:
        if HAS_STATES:
            writes_layout: gl.constexpr = d_writes.layout
            s_writes = view(s_reads, DTYPE, [_STAGES, _D, _C], writes_layout)
            token = first + begin * _C
            i_chunk = (first_chunk + begin) * HV + i_hv
            gl.warp_specialize(
                [
                    (
                        _run_state,
                        (
                            d_states,
                            p_scales,
                            d_states,
                            p_scales,
                            p_initial_state,
                            p_scales,
                            p_scales,
                            s_k,
                            s_v,
                            s_writes,
                            s_queries,
                            s_queries,
                            s_out,
                            full,
                            empty,
                            i_row,
                            token,
                            length,
                            i_value,
                            i_chunk,
                            i_state,
                            i_block,
                            False,
                            HV,
                            steps,
                            HAS_INITIAL_STATE,
                            False,
                            True,
                            False,
                            False,
                            PACKED,
                            DTYPE,
                        ),
                    ),
                    (
                        _load_state,
                        (
                            d_k,
                            d_v,
                            d_writes,
                            d_queries,
                            d_queries,
                            s_k,
                            s_v,
                            s_writes,
                            s_queries,
                            s_queries,
                            full,
                            empty,
                            i_row,
                            token,
                            i_key,
                            i_value,
                            i_chunk,
                            0,
                            HV,
                            steps,
                            False,
                        ),
                    ),
                ],
                [1],
                [24],
            )
    else:
        last = gl.maximum(end, begin + 1) - 1
        token = first + last * _C
        i_chunk = (first_chunk + last) * HV + i_hv
        gl.warp_specialize(
            [
                (
                    _run_gradient,
                    (
                        d_dstates,
                        p_scales,
                        p_dfinal_state,
                        p_dinitial_state,
                        s_k,
                        s_v,
                        s_queries,
                        s_reads,
                        s_out,
                        full,
                        empty,
                        i_chunk,
                        i_state,
                        i_block,
                        HV,
                        steps,
                        HAS_DFINAL_STATE,
                        HAS_STATES,
                        DTYPE,
                    ),
                ),
                (
                    _load_gradient,
                    (
                        d_k,
                        d_do,
                        d_queries,
                        d_reads,
                        s_k,
                        s_v,
                        s_queries,
                        s_reads,
                        full,
                        empty,
                        i_row,
                        token,
                        i_key,
                        i_value,
                        i_chunk,
                        HV,
                        steps,
                    ),
                ),
            ],
            [1],
            [24],
        )


class Chains(NamedTuple):
    """What the two chains leave for the gradients of each chunk, states in the dtype of k."""

    states: torch.Tensor | None  # [chunks, HV, V, K], S^T before the chunk
    dstates: torch.Tensor | None  # [chunks, HV, V, K], dS^T after the chunk
    dinitial_state: torch.Tensor  # [N * spans, HV, K, V], fp32


def outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prepared: Prepared,
    initial_state: torch.Tensor | None,
    o: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Fills the outputs; returns the final states.

    W = V - E∘(K S),  S <- e^Γ S + (K^T B) W,  O = (s E∘Q - P Ag (E∘K)) S + (P Ag) V

    Args:
        q: not read, `prepared` has what it becomes. k: [B, T, H, K]. v: [B, T, HV, V]. All contiguous.
        prepared: in mode OUTPUT. initial_state: [N * spans, HV, K, V] or None. o: like v.
    Returns:
        Final states [N * spans, HV, K, V] fp32.
    """
    final_state, _ = _run_forward(k, v, prepared, initial_state, o, chunks)
    return final_state


def transitions(
    k: torch.Tensor, v: torch.Tensor, prepared: Prepared, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """M and h of every span: final_state = M @ initial_state + h.

    M <- M - X^T (K M) from I with X = diag(beta) A^T K, times e^(sum g) at the end; h is the state from zeros.

    Args:
        k: [B, T, H, K]. v: [B, T, HV, V]. prepared: in mode SUMMARY.
    Returns:
        M [N * spans, HV, K, K] and h [N * spans, HV, K, V], fp32.
    """
    final_state, transition = _run_forward(k, v, prepared, None, None, chunks)
    assert transition is not None
    return transition, final_state


def _run_forward(
    k: torch.Tensor,
    v: torch.Tensor,
    prepared: Prepared,
    initial_state: torch.Tensor | None,
    o: torch.Tensor | None,
    chunks: Chunks,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Final states, and with o its values or without it M. What a launch does not use is passed as something else."""
    _, seq_len, H, K = k.shape
    HV, V = v.shape[2:]
    rows = chunks.documents * chunks.spans
    final_state = torch.empty(rows, HV, K, V, dtype=torch.float32, device=v.device)
    transition = None if o is not None else torch.empty(rows, HV, K, K, dtype=torch.float32, device=v.device)
    d_writes = tiles(prepared.writes, [K, CHUNK])
    with on_device(v):
        _forward_kernel[(rows * HV * (2 if transition is None else 4),)](
            tiles(k, [1, CHUNK, K]),
            tiles(v, [1, CHUNK, 64]),
            d_writes,
            tiles(prepared.queries, [CHUNK, K]) or d_writes,
            tiles(prepared.attention, [CHUNK, CHUNK]) or d_writes,
            chunks.count * HV * K,
            prepared.scales,
            _or(initial_state, final_state),
            tiles(o, [1, CHUNK, 64]) or d_writes,
            _or(o, final_state),
            final_state,
            _or(transition, final_state),
            _or(chunks.token_offsets, final_state),
            _or(chunks.chunk_offsets, final_state),
            seq_len,
            chunks.per_document,
            chunks.spans,
            chunks.span_chunks,
            H,
            HV,
            HAS_INITIAL_STATE=initial_state is not None,
            HAS_OUTPUT=o is not None,
            HAS_TRANSITION=transition is not None,
            PACKED=chunks.starts is not None,
            DTYPE=DTYPES[k.dtype],
            num_warps=4,
        )
    return final_state, transition


def reverse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    do: torch.Tensor,
    prepared: Prepared,
    initial_state: torch.Tensor | None,
    dfinal_state: torch.Tensor | None,
    dv: Callable[[], torch.Tensor] | None,
    chunks: Chunks,
) -> Chains:
    """The gradient's chain, and with v the state's beside it; without v, dinitial_state alone is filled.

    dS <- e^Γ dS + (s E∘Q - P Ag (E∘K))^T dO - (B (E∘K))^T (K dS)

    Args:
        q, dv: not used. k: [B, T, H, K]. v, do: [B, T, HV, V]. prepared: in mode GRADIENT.
        initial_state, dfinal_state: [N * spans, HV, K, V] or None.
    """
    _, seq_len, H, K = k.shape
    HV, V = do.shape[2:]
    rows = chunks.documents * chunks.spans
    states = None if v is None else k.new_empty(chunks.count, HV, V, K)
    dstates = None if states is None else torch.empty_like(states)
    dinitial_state = torch.empty(rows, HV, K, V, dtype=torch.float32, device=k.device)
    d_do, d_queries = tiles(do, [1, CHUNK, 64]), tiles(prepared.queries, [CHUNK, K])
    with on_device(k):
        _backward_kernel[(rows * HV * 2 * (1 if states is None else 2),)](
            tiles(k, [1, CHUNK, K]),
            tiles(v, [1, CHUNK, 64]) or d_do,
            d_do,
            tiles(prepared.writes, [K, CHUNK]),
            d_queries,
            tiles(prepared.reads, [CHUNK, K]),
            prepared.scales,
            _or(initial_state, dinitial_state),
            _or(dfinal_state, dinitial_state),
            tiles(states, [64, K]) or d_queries,
            tiles(dstates, [64, K]) or d_queries,
            dinitial_state,
            _or(chunks.token_offsets, dinitial_state),
            _or(chunks.chunk_offsets, dinitial_state),
            seq_len,
            chunks.per_document,
            chunks.spans,
            chunks.span_chunks,
            H,
            HV,
            HAS_INITIAL_STATE=initial_state is not None,
            HAS_DFINAL_STATE=dfinal_state is not None,
            HAS_STATES=states is not None,
            PACKED=chunks.starts is not None,
            DTYPE=DTYPES[k.dtype],
            num_warps=4,
        )
    return Chains(states, dstates, dinitial_state)


def _or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if x is None else x
