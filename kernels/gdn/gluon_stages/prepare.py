"""Inverses, attention blocks and scales of all chunks at once, in Gluon for Hopper; 16-bit types, K = 128.

B batch, T tokens, H key heads, HV value heads, G group (HV / H), K key dim, C chunk.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..reference import L2NORM_EPS
from ..triton_stages.chunks import CHUNK, GRADIENT, OUTPUT, PROGRAMS, SUMMARY, Chunks
from ..triton_stages.launch import SIZES, Kernel, on_device
from .compatible import async_load, async_store, barrier
from .scales import BETA, DECAY, GATE, KEY_NORM, QUERY_NORM, READ, SCALE_ROWS, WRITE
from .tiles import chunk_tokens, tiles


class Prepared(NamedTuple):
    """What the chains and the gradients of each chunk read, in the dtype of k, and the scales of its tokens.

    Ag = (A∘D) diag(beta), B = diag(R) Ag. None where the mode does not need it.
    """

    scales: torch.Tensor  # [chunks, HV, SCALE_ROWS, C], fp32
    # [1 or 2, chunks, HV, K, C]: K^T B, and for M the same without gates, K^T diag(x) A diag(beta)
    writes: torch.Tensor | None
    queries: torch.Tensor | None  # [chunks, HV, C, K]: s E∘Q - P Ag (E∘K)
    reads: torch.Tensor | None  # [chunks, HV, C, K]: -B (E∘K)
    attention: torch.Tensor | None  # [chunks, HV, C, C]: P Ag for the outputs, P for the gradients
    inverse: torch.Tensor | None  # [chunks, HV, C, C]: A∘D

    def after_chains(self) -> "Prepared":
        """What the gradients need: the rest makes room for them."""
        return self._replace(writes=None, queries=None, reads=None)


_READ = gl.constexpr(READ)
_DECAY = gl.constexpr(DECAY)
_WRITE = gl.constexpr(WRITE)
_BETA = gl.constexpr(BETA)
_GATE = gl.constexpr(GATE)
_KEY_NORM = gl.constexpr(KEY_NORM)
_QUERY_NORM = gl.constexpr(QUERY_NORM)
_SCALE_ROWS = gl.constexpr(SCALE_ROWS)
_OUTPUT = gl.constexpr(OUTPUT)
_SUMMARY = gl.constexpr(SUMMARY)
_GRADIENT = gl.constexpr(GRADIENT)
_C = gl.constexpr(CHUNK)
_BUFFERS = gl.constexpr(2)
_LOG2E = gl.constexpr(1.4426950408889634)

# Warp w owns rows 16w to 16w + 15 in every layout below, a thread the same two of them, and of their columns the same
# two of each eight. So blocks of 16 rows pass from one layout to another without leaving their registers.
_SQUARE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_ROWS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
_PAIRS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2, 1], instr_shape=[1, 16, 8]))
_BLOCKS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
# A chunk's tokens, the same in each warp.
_TOKENS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


@gluon.constexpr_function
def _pending(mode, ring, tile, count):
    """Stores that may be under way when `count` tiles from `tile` on are written, none of them handed over yet.

    A value head writes its tiles round a ring, each head from its beginning; the factor alone is not handed over.
    """
    tiles, factor = {OUTPUT: (6, 0), SUMMARY: (5, 0), GRADIENT: (9, 2)}[mode]
    written = [(index % ring, index != factor) for index in range(tiles)]
    before = written + written[:tile]
    allowed = tiles
    for index in range(tile, tile + count):
        same = [place for place, (slot, _) in enumerate(before) if slot == index % ring]
        if same and before[same[-1]][1]:
            allowed = min(allowed, sum(stored for _, stored in before[same[-1] + 1 :]))
    return allowed


@gluon.jit
def exp2(x):
    """One instruction, where exp2 takes four: what it loses is below 2^-126, and flushed to zero."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _round(x, DTYPE: gl.constexpr):
    """To a 16-bit type, in pairs: after a select the compiler would round first and select the halves one by one."""
    if gl.float16 == DTYPE:
        y = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    else:
        y = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    return y


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _split_columns(x):
    """[64, 2N] to its left and right half."""
    N: gl.constexpr = x.shape[1] // 2
    left, right = x.reshape([x.shape[0], 2, N]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, _ROWS), gl.convert_layout(right, _ROWS)


@gluon.jit
def _join_columns(left, right, layout: gl.constexpr):
    """Two [64, N] to [64, 2N]."""
    N: gl.constexpr = left.shape[1]
    joined = gl.join(left, right).permute([0, 2, 1]).reshape([left.shape[0], 2 * N])
    return gl.convert_layout(joined, layout)


@gluon.jit
def _own_columns(x):
    """[64, 64] to the [64, 32] that holds the two diagonal blocks of 32, one below the other."""
    left, right = _split_columns(x)
    o_r = gl.arange(0, _C, gl.SliceLayout(1, _ROWS))[:, None]
    return left, gl.where(o_r < 32, left, right)


@gluon.jit
def _blocks(pairs):
    """[64, 32] of two blocks of 32 to the left [64, 16] and to the four diagonal blocks [4, 16, 16]."""
    even, odd = _split_columns(pairs)
    o_r = gl.arange(0, _C, gl.SliceLayout(1, _ROWS))[:, None]
    blocks = gl.where((o_r & 16) != 0, odd, even)
    return even, gl.convert_layout(blocks.reshape([4, 16, 16]), _BLOCKS)


@gluon.jit
def _inverse_norm(blocks, EPS: gl.constexpr):
    """(|x|^2 + eps)^-1/2 of the rows of X, from the diagonal blocks of X X^T."""
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _BLOCKS)))[None, :, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, _BLOCKS)))[None, None, :]
    squares = gl.sum(gl.where(o_i == o_j, blocks, 0.0), axis=2)
    norm = gl.rsqrt(squares + EPS)
    return gl.convert_layout(norm.reshape([_C]), gl.SliceLayout(1, _SQUARE))


@gluon.jit
def _left(x, layout: gl.constexpr):
    return gl.convert_layout(_round(x, gl.float16), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _right_of_transposed(x):
    """The right operand X from X^T: a thread holds of one what it holds of the other, so nothing moves."""
    return gl.convert_layout(x.permute([0, 2, 1]), gl.DotOperandLayout(1, _BLOCKS, 2))


@gluon.jit
def _level(x, level: gl.constexpr):
    """The part of the blocks of 16 that joins their blocks of 2^level, in fp16."""
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _BLOCKS)))[None, :, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, _BLOCKS)))[None, None, :]
    return _round(gl.where((o_i ^ o_j) >> level == 1, x, 0.0), gl.float16)


@gluon.jit
def _scale_level(x, factor):
    factor, _ = gl.broadcast(factor, x)
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, factor], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _join_blocks(x, x_t, off, off_t, LAST: gl.constexpr):
    """X + X off X of the four blocks of 16, and its transpose unless LAST; in both orientations nothing moves."""
    zero = gl.zeros([4, 16, 16], gl.float32, _BLOCKS)
    rounded, rounded_t = _round(x, gl.float16), _round(x_t, gl.float16)
    left: gl.constexpr = gl.DotOperandLayout(0, _BLOCKS, 2)
    half = mma_v2(gl.convert_layout(rounded, left), _right_of_transposed(off_t), zero)
    x = mma_v2(_left(half, _BLOCKS), _right_of_transposed(rounded_t), x)
    if not LAST:
        half_t = mma_v2(gl.convert_layout(rounded_t, left), _right_of_transposed(off), zero)
        x_t = mma_v2(_left(half_t, _BLOCKS), _right_of_transposed(rounded), x_t)
    return x, x_t


@gluon.jit
def _place(task, p_starts, p_lengths, seq_len, chunks_per_document, H, GROUP: gl.constexpr, PACKED: gl.constexpr):
    """Row of the batch, first token in it, number of tokens, key head and first block of a task."""
    i_chunk = task // H
    i_row, first, length = chunk_tokens(i_chunk, p_starts, p_lengths, seq_len, chunks_per_document, PACKED)
    return i_row, first, length, task - i_chunk * H, task * GROUP


@gluon.jit
def _clear_rows(p_tile, length):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_row = gl.arange(0, _C, gl.SliceLayout(1, layout))[:, None]
    p_tile.store(gl.where(o_row < length, p_tile.load(layout), 0.0))


@gluon.jit
def _load_tiles(d_q, d_k, i_row, first, i_h, p_q, p_k, p_ready, pred, K: gl.constexpr, QUERIES: gl.constexpr):
    BYTES: gl.constexpr = _C * K * 2
    mbarrier.expect(p_ready, BYTES * 2 if QUERIES else BYTES, pred=pred)
    async_load(d_k, [i_row, first, i_h * K], p_ready, p_k, pred=pred)
    if QUERIES:
        async_load(d_q, [i_row, first, i_h * K], p_ready, p_q, pred=pred)


@gluon.jit
def _load_scalars(p_g, p_beta, i_row, first, length, head, seq_len, HV):
    o_c = gl.arange(0, _C, _TOKENS)
    o_token = (i_row.to(gl.int64) * seq_len + first + o_c) * HV + head
    b_g = gl.load(p_g + o_token, mask=o_c < length, other=0.0).to(gl.float32)
    b_beta = gl.load(p_beta + o_token, mask=o_c < length, other=0.0).to(gl.float32)
    return b_g, b_beta


@Kernel
@gluon.jit(do_not_specialize=SIZES)
def _prepare_kernel(
    d_q,
    d_k,
    p_g,
    p_beta,
    d_writes,
    d_queries,
    d_reads,
    d_attention,
    d_inverse,
    p_scales,
    transition_offset,
    p_starts,
    p_lengths,
    seq_len,
    chunks_per_document,
    scale,
    tasks,
    H,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    EPS: gl.constexpr,
    NORMALIZE: gl.constexpr,
    MODE: gl.constexpr,
    PACKED: gl.constexpr,
    RING: gl.constexpr,
):
    """Chunks of key heads, one after another, and in each its value heads; grid (programs), tasks = chunks * H.

    D is a quotient of decays, D_il D_lj = D_ij, so the products take no gate: with F = diag(x) A diag(beta),
        K^T B = (K^T F) diag(e^(G_last - G)),  P A_g = s diag(y) (tril(Q K^T) F)∘D,
        B (READ∘K) = e^(G_last) F diag(x) K,  the queries s diag(y e^G) (Q - tril(Q K^T) F diag(x) K).
    F is rounded once and serves two products, tril(Q K^T) serves all value heads.

    RING tiles on their way out. For the gradients fewer products run at once: their registers would spill.
    """
    DTYPE: gl.constexpr = d_k.dtype
    QUERIES: gl.constexpr = MODE != _SUMMARY
    SERIAL: gl.constexpr = MODE == _GRADIENT
    HALF: gl.constexpr = K // 2
    # Products of unscaled q and k could leave the range of fp16, that of bf16 is as wide as theirs.
    SCALED: gl.constexpr = gl.float16 == DTYPE
    # Joins give A diag(beta) as cheaply as A: 1/beta + L in place of 1 + beta L. The gradients take A itself.
    FOLDED: gl.constexpr = MODE != _GRADIENT
    S_ROW: gl.constexpr = gl.SliceLayout(1, _SQUARE)
    S_COL: gl.constexpr = gl.SliceLayout(0, _SQUARE)
    B_ROW: gl.constexpr = gl.SliceLayout(2, _BLOCKS)
    B_COL: gl.constexpr = gl.SliceLayout(1, _BLOCKS)
    TILE: gl.constexpr = d_k.layout
    SQUARE_STAGE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF_STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    BLOCK_STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    p_k = gl.allocate_shared_memory(DTYPE, [_BUFFERS, 1, _C, K], TILE)
    p_q = gl.allocate_shared_memory(DTYPE, [_BUFFERS, 1, _C, K], TILE) if QUERIES else p_k
    p_stage = gl.allocate_shared_memory(DTYPE, [RING, _C, _C], SQUARE_STAGE)
    p_corner = gl.allocate_shared_memory(gl.float16, [_C, 32], HALF_STAGE)
    p_joined = gl.allocate_shared_memory(gl.float16, [_C, 32], HALF_STAGE)
    p_beside = gl.allocate_shared_memory(gl.float16, [2, 32, 16], BLOCK_STAGE)
    p_blocks = gl.allocate_shared_memory(gl.float16, [2, 32, 16], BLOCK_STAGE)
    p_gate = gl.allocate_shared_memory(gl.float32, [_C], VECTOR)
    p_step = gl.allocate_shared_memory(gl.float32, [_C], VECTOR)
    p_end = gl.allocate_shared_memory(gl.float32, [_C], VECTOR)
    p_key_norm = gl.allocate_shared_memory(gl.float32, [_C], VECTOR)
    p_query_norm = gl.allocate_shared_memory(gl.float32, [_C], VECTOR)
    p_ready = gl.allocate_shared_memory(gl.int64, [_BUFFERS, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(_BUFFERS):
        mbarrier.init(p_ready.index(index), count=1)
    fence_async_shared()

    HV = H * GROUP
    o_c = gl.arange(0, _C, _TOKENS)
    o_row = gl.arange(0, _C, S_ROW)
    o_col = gl.arange(0, _C, S_COL)
    o_r = gl.arange(0, _C, gl.SliceLayout(1, _ROWS))[:, None]
    o_i = gl.arange(0, 16, gl.SliceLayout(0, B_ROW))[None, :, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, B_COL))[None, None, :]
    o_b = gl.arange(0, 4, gl.SliceLayout(1, B_ROW))[:, None, None] * 16

    first_task = gl.program_id(0)
    programs = gl.num_programs(0)
    i_row, first, length, i_h, i_first = _place(
        first_task, p_starts, p_lengths, seq_len, chunks_per_document, H, GROUP, PACKED
    )
    _load_tiles(d_q, d_k, i_row, first, i_h, p_q.index(0), p_k.index(0), p_ready.index(0), True, K, QUERIES)
    next_g, next_beta = _load_scalars(p_g, p_beta, i_row, first, length, i_h * GROUP, seq_len, HV)
    step = 0
    for task in range(first_task, tasks, programs):
        buffer = step % _BUFFERS
        phase = (step // _BUFFERS) & 1
        after = gl.minimum(task + programs, tasks - 1)
        more = task + programs < tasks
        after_row, after_first, after_length, after_h, i_after = _place(
            after, p_starts, p_lengths, seq_len, chunks_per_document, H, GROUP, PACKED
        )
        later = (step + 1) % _BUFFERS
        _load_tiles(
            d_q,
            d_k,
            after_row,
            after_first,
            after_h,
            p_q.index(later),
            p_k.index(later),
            p_ready.index(later),
            more,
            K,
            QUERIES,
        )
        mbarrier.wait(p_ready.index(buffer), phase)
        p_key = p_k.index(buffer + (i_h >> 16)).reshape([_C, K])
        p_query = p_q.index(buffer + (i_h >> 16)).reshape([_C, K])

        # Past the document's end a tile may hold the next document's tokens: cleared, not multiplied by zero, so that
        # nothing of them gets through, and so seldom that all else need not care.
        if length < _C:
            _clear_rows(p_key, length)
            if QUERIES:
                _clear_rows(p_query, length)
            fence_async_shared()

        # What the value heads of a key head share.
        zero = gl.zeros([_C, _C], gl.float32, _SQUARE)
        b_kk = warpgroup_mma(p_key, p_key.permute([1, 0]), zero, use_acc=False, is_async=True)
        if QUERIES and SERIAL:
            if NORMALIZE:
                b_qq = warpgroup_mma(p_query, p_query.permute([1, 0]), zero, use_acc=False, is_async=True)
            b_kk = warpgroup_mma_wait(1 if NORMALIZE else 0, deps=[b_kk])
        elif QUERIES:
            b_qk = warpgroup_mma(p_query, p_key.permute([1, 0]), zero, use_acc=False, is_async=True)
            if NORMALIZE:
                b_qq = warpgroup_mma(p_query, p_query.permute([1, 0]), zero, use_acc=False, is_async=True)
                b_kk, b_qk, b_qq = warpgroup_mma_wait(0, deps=[b_kk, b_qk, b_qq])
            else:
                b_kk, b_qk = warpgroup_mma_wait(0, deps=[b_kk, b_qk])
        else:
            b_kk = warpgroup_mma_wait(0, deps=[b_kk])
        b_left, b_pairs = _own_columns(b_kk)
        b_even, b_diagonal = _blocks(b_pairs)
        b_key_norm = _inverse_norm(b_diagonal, EPS) if NORMALIZE else gl.full([_C], 1.0, gl.float32, S_ROW)
        b_key_norm = gl.where(o_row < length, b_key_norm, 0.0)
        p_key_norm.store(b_key_norm)
        if QUERIES:
            if NORMALIZE:
                if SERIAL:
                    b_qq = warpgroup_mma_wait(0, deps=[b_qq])
                _, b_pairs_q = _own_columns(b_qq)
                _, b_diagonal_q = _blocks(b_pairs_q)
                b_query_norm = gl.where(o_row < length, _inverse_norm(b_diagonal_q, EPS), 0.0)
            else:
                b_query_norm = gl.where(o_row < length, 1.0, 0.0)
            if MODE == _GRADIENT:
                p_query_norm.store(b_query_norm)
            b_row_scale = scale * b_query_norm
            if SERIAL:
                b_qk = warpgroup_mma(p_query, p_key.permute([1, 0]), zero, use_acc=False, is_async=True)
                b_qk = warpgroup_mma_wait(0, deps=[b_qk])
            if SCALED:
                b_qk = b_qk * b_query_norm[:, None]
                b_post_scale = gl.full([_C], 1.0, gl.float32, S_ROW) * scale
            else:
                b_post_scale = b_row_scale
            b_qk = gl.where(o_row[:, None] >= o_col[None, :], b_qk, 0.0)
            b_scores = gl.convert_layout(_round(b_qk, DTYPE), gl.DotOperandLayout(0, _SQUARE, 2))

        # -N, N the strictly lower part of the normalised K K^T: what joins blocks of 32, of 16, and smaller ones.
        b_rows_norm = gl.convert_layout(b_key_norm, gl.SliceLayout(1, _ROWS))[:, None]
        b_left_norm = p_key_norm.slice(0, 32).load(gl.SliceLayout(0, _ROWS))[None, :]
        b_corner = b_left * -b_rows_norm * b_left_norm
        p_corner.store(_round(b_corner, gl.float16))
        b_row_norm = p_key_norm.reshape([4, 16]).load(B_ROW)[:, :, None]
        b_col_norm = p_key_norm.reshape([4, 16]).load(B_COL)[:, None, :]
        b_diagonal = b_diagonal * -b_row_norm * b_col_norm
        b_lower = gl.where(o_i > o_j, b_diagonal, 0.0)
        b_upper = gl.where(o_i < o_j, b_diagonal, 0.0)
        b_lower0, b_upper0 = _level(b_lower, 0), _level(b_upper, 0)
        b_lower1, b_upper1 = _level(b_lower, 1), _level(b_upper, 1)
        b_lower2, b_upper2 = _level(b_lower, 2), _level(b_upper, 2)
        b_lower3, b_upper3 = _level(b_lower, 3), _level(b_upper, 3)
        b_even_norm = p_key_norm.reshape([2, 32]).load(gl.SliceLayout(1, _PAIRS))
        b_even_norm, _ = b_even_norm.reshape([2, 2, 16]).permute([0, 2, 1]).split()
        b_beside = gl.convert_layout(b_even.reshape([2, 32, 16]), _PAIRS)
        b_pair_norm = p_key_norm.reshape([2, 32]).load(gl.SliceLayout(2, _PAIRS))[:, :, None]
        b_even_norm = gl.convert_layout(b_even_norm, gl.SliceLayout(1, _PAIRS))[:, None, :]
        b_beside = b_beside * -b_pair_norm * b_even_norm
        p_beside.store(_round(b_beside, gl.float16))
        b_beside = p_beside.slice(16, 16, 1).load(gl.DotOperandLayout(1, _PAIRS, 2))

        for i_group in range(GROUP):
            head = i_h * GROUP + i_group
            i_block = i_first + i_group
            # Zero, but not to the compiler: over the loop it would keep in registers what it computes from addresses.
            if SERIAL:
                nil = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [head], dtype=gl.int32, is_pure=False, pack=1)
                o_again = o_row + nil
            else:
                nil = head >> 16
                o_again = o_row
            p_key = p_k.index(buffer + nil).reshape([_C, K])
            p_query = p_q.index(buffer + nil).reshape([_C, K])
            p_left, p_right = p_key.slice(0, HALF, 1), p_key.slice(HALF, HALF, 1)
            # A decay of e^-200 is 0 in fp32, as one of e^-inf is; of the latter, differences would be NaN.
            b_g, b_beta = gl.maximum(next_g, -200.0), next_beta
            inside = i_group + 1 < GROUP
            next_g, next_beta = _load_scalars(
                p_g,
                p_beta,
                gl.where(inside, i_row, after_row),
                gl.where(inside, first, after_first),
                gl.where(inside, length, after_length),
                gl.where(inside, head + 1, after_h * GROUP),
                seq_len,
                HV,
            )
            b_gate = gl.associative_scan(b_g, 0, _add)
            last = gl.sum(b_g, axis=0)
            b_end = exp2((last - b_gate) * _LOG2E)
            b_x = p_key_norm.load(_TOKENS)
            p_row = p_scales + i_block.to(gl.int64) * (_SCALE_ROWS * _C) + o_c
            gl.store(p_row + _READ * _C, exp2(b_gate * _LOG2E) * b_x)
            gl.store(p_row + _DECAY * _C, exp2(last * _LOG2E) + gl.zeros_like(b_gate))
            gl.store(p_row + _GATE * _C, b_gate)
            if MODE != _OUTPUT:
                gl.store(p_row + _KEY_NORM * _C, b_x)
            if MODE == _GRADIENT:
                gl.store(p_row + _WRITE * _C, b_end * b_x)
                gl.store(p_row + _BETA * _C, b_beta)
                gl.store(p_row + _QUERY_NORM * _C, p_query_norm.load(_TOKENS))
            p_gate.store(b_gate * _LOG2E)
            p_step.store(b_beta)
            p_end.store(b_end)

            # A, or A diag(beta): blocks of 16 within each warp, then two joins of blocks of other warps.
            if MODE == _GRADIENT:
                b_products = warpgroup_mma(p_query, p_key.permute([1, 0]), zero, use_acc=False, is_async=True)
            b_row_beta = p_step.reshape([4, 16]).load(B_ROW)[:, :, None]
            b_col_beta = p_step.reshape([4, 16]).load(B_COL)[:, None, :]
            if FOLDED:
                b_inverse = gl.where(o_i == o_j, b_row_beta, 0.0)
                b_0, b_1, b_2, b_3 = b_lower0, b_lower1, b_lower2, b_lower3
                b_0t, b_1t, b_2t, b_3t = b_upper0, b_upper1, b_upper2, b_upper3
            else:
                b_inverse = gl.where((o_i == o_j) & (o_b + o_i < length), 1.0, 0.0)
                b_row16, b_col16 = b_row_beta.to(gl.float16), b_col_beta.to(gl.float16)
                b_0, b_0t = _scale_level(b_lower0, b_row16), _scale_level(b_upper0, b_col16)
                b_1, b_1t = _scale_level(b_lower1, b_row16), _scale_level(b_upper1, b_col16)
                b_2, b_2t = _scale_level(b_lower2, b_row16), _scale_level(b_upper2, b_col16)
                b_3, b_3t = b_lower3, _scale_level(b_upper3, b_col16)
            b_inverse, b_inverse_t = _join_blocks(b_inverse, b_inverse, b_0, b_0t, False)
            b_inverse, b_inverse_t = _join_blocks(b_inverse, b_inverse_t, b_1, b_1t, False)
            b_inverse, b_inverse_t = _join_blocks(b_inverse, b_inverse_t, b_2, b_2t, False)
            b_inverse, b_inverse_t = _join_blocks(b_inverse, b_inverse_t, b_3, b_3t, True)
            p_blocks.store(_round(gl.convert_layout(b_inverse.reshape([2, 32, 16]), _PAIRS), gl.float16))
            b_left16 = b_inverse if FOLDED else b_inverse * b_col_beta
            b_left16 = gl.convert_layout(b_left16.reshape([2, 32, 16]), _PAIRS)
            b_half = mma_v2(_left(b_left16, _PAIRS), b_beside, gl.zeros([2, 32, 16], gl.float32, _PAIRS))
            b_even_inverse = p_blocks.slice(0, 16, 1).load(gl.DotOperandLayout(1, _PAIRS, 2))
            b_off = mma_v2(_left(b_half, _PAIRS), b_even_inverse, gl.zeros([2, 32, 16], gl.float32, _PAIRS))
            b_off = gl.convert_layout(b_off.reshape([_C, 16]), _ROWS)
            b_own = gl.convert_layout(b_inverse.reshape([_C, 16]), _ROWS)
            m_odd = (o_r & 16) != 0
            b_joined = _join_columns(gl.where(m_odd, b_off, b_own), gl.where(m_odd, b_own, 0.0), _ROWS)
            p_joined.store(_round(b_joined, gl.float16))
            b_left32 = b_joined
            if not FOLDED:
                b_pair_beta = p_step.reshape([2, 32]).load(gl.SliceLayout(1, _PAIRS))[:, None, :]
                b_pair_joined = gl.convert_layout(b_joined.reshape([2, 32, 32]), _PAIRS) * b_pair_beta
                b_left32 = gl.convert_layout(b_pair_joined.reshape([_C, 32]), _ROWS)
            zero32 = gl.zeros([_C, 32], gl.float32, _ROWS)
            b_corner32 = p_corner.slice(32, 32).load(gl.DotOperandLayout(1, _ROWS, 2))
            b_half32 = mma_v2(_left(b_left32, _ROWS), b_corner32, zero32)
            b_top = p_joined.slice(0, 32).load(gl.DotOperandLayout(1, _ROWS, 2))
            b_off32 = mma_v2(_left(b_half32, _ROWS), b_top, zero32)
            b_full = _join_columns(gl.where(o_r < 32, b_joined, b_off32), gl.where(o_r < 32, 0.0, b_joined), _SQUARE)

            b_x_row = p_key_norm.load(S_ROW)[:, None]
            if QUERIES:
                # The exponent is positive above the diagonal alone, where what it scales is zero.
                b_gate_row = p_gate.load(S_ROW)
                b_decay = exp2(gl.minimum(b_gate_row[:, None] - p_gate.load(S_COL)[None, :], 0.0))
                b_begin = (exp2(b_gate_row) * b_post_scale)[:, None]
            if MODE == _GRADIENT:
                b_products = warpgroup_mma_wait(0, deps=[b_products])
                b_pair = gl.where(o_again[:, None] >= o_col[None, :], b_products, 0.0)
                b_pair = b_pair * p_key_norm.load(S_COL)[None, :] * (b_row_scale[:, None] * b_decay)
                tma.store_wait(_pending(MODE, RING, 0, 3))
                p_stage.index(0).store(_round(b_full * b_decay, DTYPE))
                p_stage.index(1).store(_round(b_pair, DTYPE))
                b_full = b_full * p_step.load(S_COL)[None, :]
                p_factor = p_stage.index(2 + nil)
            else:
                tma.store_wait(_pending(MODE, RING, 0, 1))
                p_factor = p_stage.index(nil)
            p_factor.store(_round(b_full * b_x_row, DTYPE))
            fence_async_shared()
            if MODE == _GRADIENT:
                barrier()
                async_store(d_inverse, [i_block * _C, 0], p_stage.index(0))
                async_store(d_attention, [i_block * _C, 0], p_stage.index(1))
            if QUERIES:
                b_mixed = warpgroup_mma(b_scores, p_factor, zero, use_acc=False, is_async=True)
                if SERIAL:
                    b_mixed = warpgroup_mma_wait(0, deps=[b_mixed])
            b_top = warpgroup_mma(p_left.permute([1, 0]), p_factor, zero, use_acc=False, is_async=True)
            if MODE == _SUMMARY:
                b_bottom = warpgroup_mma(p_right.permute([1, 0]), p_factor, zero, use_acc=False, is_async=True)
                b_top = warpgroup_mma_wait(1, deps=[b_top])
                b_end_col = p_end.load(S_COL)[None, :]
                tma.store_wait(_pending(MODE, RING, 1, 4))
                p_stage.index(1).store(_round(b_top, DTYPE))
                p_stage.index(2).store(_round(b_top * b_end_col, DTYPE))
                b_bottom = warpgroup_mma_wait(0, deps=[b_bottom])
                p_stage.index(3).store(_round(b_bottom, DTYPE))
                p_stage.index(4).store(_round(b_bottom * b_end_col, DTYPE))
                fence_async_shared()
                barrier()
                row = transition_offset + i_block * K
                async_store(d_writes, [row, 0], p_stage.index(1))
                async_store(d_writes, [i_block * K, 0], p_stage.index(2))
                async_store(d_writes, [row + HALF, 0], p_stage.index(3))
                async_store(d_writes, [i_block * K + HALF, 0], p_stage.index(4))
            else:
                if MODE == _GRADIENT:
                    b_reads_left = _round(b_full * -p_key_norm.load(S_COL)[None, :], DTYPE)
                    b_reads_left = gl.convert_layout(b_reads_left, gl.DotOperandLayout(0, _SQUARE, 2))
                if not SERIAL:
                    b_mixed = warpgroup_mma_wait(1, deps=[b_mixed])
                b_queries_left = _round(b_mixed * -p_key_norm.load(S_COL)[None, :], DTYPE)
                b_queries_left = gl.convert_layout(b_queries_left, gl.DotOperandLayout(0, _SQUARE, 2))
                if not SERIAL:
                    b_bottom = warpgroup_mma(p_right.permute([1, 0]), p_factor, zero, use_acc=False, is_async=True)
                if MODE == _OUTPUT:
                    tma.store_wait(_pending(MODE, RING, 1, 2))
                    p_stage.index(1).store(_round(b_mixed * b_post_scale[:, None] * b_decay, DTYPE))
                    b_top = warpgroup_mma_wait(1, deps=[b_top])
                    p_stage.index(2).store(_round(b_top * p_end.load(S_COL)[None, :], DTYPE))
                    fence_async_shared()
                    barrier()
                    async_store(d_attention, [i_block * _C, 0], p_stage.index(1))
                    async_store(d_writes, [i_block * K, 0], p_stage.index(2))
                    LAST: gl.constexpr = 3
                else:
                    b_top = warpgroup_mma_wait(0, deps=[b_top])
                    tma.store_wait(_pending(MODE, RING, 3, 1))
                    p_stage.index(3 % RING).store(_round(b_top * p_end.load(S_COL)[None, :], DTYPE))
                    b_bottom = warpgroup_mma(p_right.permute([1, 0]), p_factor, zero, use_acc=False, is_async=True)
                    b_reads = warpgroup_mma(b_reads_left, p_left, zero, use_acc=False, is_async=True)
                    b_bottom = warpgroup_mma_wait(1, deps=[b_bottom])
                    tma.store_wait(_pending(MODE, RING, 4, 1) - 1)
                    p_stage.index(4 % RING).store(_round(b_bottom * p_end.load(S_COL)[None, :], DTYPE))
                    fence_async_shared()
                    barrier()
                    async_store(d_writes, [i_block * K, 0], p_stage.index(3 % RING))
                    async_store(d_writes, [i_block * K + HALF, 0], p_stage.index(4 % RING))
                    b_reads_end = b_x_row * exp2(last * _LOG2E)
                    b_reads_right = warpgroup_mma(b_reads_left, p_right, zero, use_acc=False, is_async=True)
                    b_reads = warpgroup_mma_wait(1, deps=[b_reads])
                    tma.store_wait(_pending(MODE, RING, 5, 2))
                    p_stage.index(5 % RING).store(_round(b_reads * b_reads_end, DTYPE))
                    b_reads_right = warpgroup_mma_wait(0, deps=[b_reads_right])
                    p_stage.index(6 % RING).store(_round(b_reads_right * b_reads_end, DTYPE))
                    fence_async_shared()
                    barrier()
                    async_store(d_reads, [i_block * _C, 0], p_stage.index(5 % RING))
                    async_store(d_reads, [i_block * _C, HALF], p_stage.index(6 % RING))
                    LAST: gl.constexpr = 6
                b_q = p_query.slice(0, HALF, 1).load(_SQUARE).to(gl.float32)
                if SCALED:
                    b_q = b_q * b_query_norm[:, None]
                b_queries = warpgroup_mma(b_queries_left, p_left, b_q, is_async=True)
                if SERIAL:
                    b_queries = warpgroup_mma_wait(0, deps=[b_queries])
                    tma.store_wait(_pending(MODE, RING, LAST + 1, 1))
                    p_stage.index((LAST + 1) % RING).store(_round(b_queries * b_begin, DTYPE))
                else:
                    b_bottom = warpgroup_mma_wait(1, deps=[b_bottom])
                    tma.store_wait(_pending(MODE, RING, 3, 1))
                    p_stage.index(3 % RING).store(_round(b_bottom * p_end.load(S_COL)[None, :], DTYPE))
                b_q = p_query.slice(HALF, HALF, 1).load(_SQUARE).to(gl.float32)
                if SCALED:
                    b_q = b_q * b_query_norm[:, None]
                b_queries_right = warpgroup_mma(b_queries_left, p_right, b_q, is_async=True)
                if not SERIAL:
                    b_queries = warpgroup_mma_wait(1, deps=[b_queries])
                    tma.store_wait(_pending(MODE, RING, LAST + 1, 1) - 1)
                    p_stage.index((LAST + 1) % RING).store(_round(b_queries * b_begin, DTYPE))
                fence_async_shared()
                barrier()
                if MODE == _OUTPUT:
                    async_store(d_writes, [i_block * K + HALF, 0], p_stage.index(3 % RING))
                async_store(d_queries, [i_block * _C, 0], p_stage.index((LAST + 1) % RING))
                b_queries_right = warpgroup_mma_wait(0, deps=[b_queries_right])
                tma.store_wait(_pending(MODE, RING, LAST + 2, 1))
                p_stage.index((LAST + 2) % RING).store(_round(b_queries_right * b_begin, DTYPE))
                fence_async_shared()
                barrier()
                async_store(d_queries, [i_block * _C, HALF], p_stage.index((LAST + 2) % RING))
        i_row, first, length, i_h, i_first = after_row, after_first, after_length, after_h, i_after
        step += 1  # noqa: SIM113
    tma.store_wait(0)


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
    tasks = chunks.count * H
    writes = k.new_empty(2 if mode == SUMMARY else 1, chunks.count, HV, K, CHUNK)
    queries = None if mode == SUMMARY else k.new_empty(chunks.count, HV, CHUNK, K)
    reads = k.new_empty(chunks.count, HV, CHUNK, K) if mode == GRADIENT else None
    attention = None if mode == SUMMARY else k.new_empty(chunks.count, HV, CHUNK, CHUNK)
    inverse = k.new_empty(chunks.count, HV, CHUNK, CHUNK) if mode == GRADIENT else None
    scales = torch.empty(chunks.count, HV, SCALE_ROWS, CHUNK, dtype=torch.float32, device=k.device)
    with on_device(k):
        _prepare_kernel[(min(tasks, 2 * PROGRAMS),)](
            tiles(q, [1, CHUNK, K]),
            tiles(k, [1, CHUNK, K]),
            g,
            beta,
            tiles(writes, [CHUNK, CHUNK]),
            tiles(queries, [CHUNK, CHUNK]),
            tiles(reads, [CHUNK, CHUNK]),
            tiles(attention, [CHUNK, CHUNK]),
            tiles(inverse, [CHUNK, CHUNK]),
            scales,
            chunks.count * HV * K,
            chunks.starts,
            chunks.lengths,
            seq_len,
            chunks.per_document,
            scale,
            tasks,
            H,
            GROUP=HV // H,
            K=K,
            EPS=L2NORM_EPS,
            NORMALIZE=normalize,
            MODE=mode,
            PACKED=chunks.starts is not None,
            RING=5 if mode == SUMMARY else 4,
            num_warps=4,
        )
    return Prepared(scales, writes, queries, reads, attention, inverse)
