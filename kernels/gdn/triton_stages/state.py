"""The two chains over the chunks of a span: the state forward, its gradient backward.

N documents, T tokens, H key heads, HV value heads, K/V head dims, C chunk.

Both hold the transpose of the state, [BLOCK_V, K], as an accumulator. Its rows are independent of each other, and
every product of a chain then has the chain's own operand on the left, where it is read from registers: nothing passes
through shared memory between one step of the recurrence and the next.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .chunks import BETA, CHUNK, ERROR, GATE, KEY_NORM, QUERY, READ, SCALE_ROWS, WRITE, Chunks, document_span
from .launch import SIZES, Kernel, block_tiles, dot_precision, launch, on_device, token_tiles
from .prepare import Prepared

_READ = tl.constexpr(READ)
_WRITE = tl.constexpr(WRITE)
_QUERY = tl.constexpr(QUERY)
_BETA = tl.constexpr(BETA)
_GATE = tl.constexpr(GATE)
_ERROR = tl.constexpr(ERROR)
_KEY_NORM = tl.constexpr(KEY_NORM)
_SCALE_ROWS = tl.constexpr(SCALE_ROWS)
# Columns of the states that a program folds: few, so that many programs read each M from L2 and none multiplies long.
_FOLD_BLOCK = 16


@triton.jit
def store_tokens(
    d_x, p_x, b_x, i_row, token, column, left, width, C: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr
):
    """Stores a transposed tile [BLOCK_V, C]; of packed documents without the tokens past the document's end."""
    if PACKED:
        o_c = tl.arange(0, C)
        o_tile = o_c[None, :] * width + tl.arange(0, BLOCK_V)[:, None]
        p_tile = p_x + token.to(tl.int64) * width + column
        tl.store(p_tile + o_tile, b_x.to(p_x.dtype.element_ty), mask=o_c[None, :] < left)
    else:
        d_x.store([i_row, token, column], tl.trans(b_x.to(p_x.dtype.element_ty)).reshape(1, C, BLOCK_V))


@triton.jit
def _forward_span(
    i_span,
    i_hv,
    i_block,
    d_q,
    d_k,
    d_v,
    d_first,
    d_second,
    transition_offset,
    p_scales,
    p_initial_state,
    d_o,
    p_o,
    d_states,
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
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_STATES: tl.constexpr,
    HAS_FINAL_STATE: tl.constexpr,
    HAS_TRANSITION: tl.constexpr,
    FOLDED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_V rows of S^T (or, beyond V of them, of M^T) through one span.

    FOLDED: p_first holds diag(R) Ag, and p_second P Ag or what M takes for diag(R) Ag; otherwise p_first holds A∘D.
    """
    i_document = i_span // spans
    i_part = i_span - i_document * spans
    i_row, first, length, first_chunk, num_chunks = document_span(
        i_document, p_token_offsets, p_chunk_offsets, seq_len, chunks_per_document, PACKED
    )
    begin = i_part * span_chunks
    end = tl.minimum(begin + span_chunks, num_chunks)
    i_h = i_hv // (HV // H)
    i_state = i_span.to(tl.int64) * HV + i_hv

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, BLOCK_V)
    # M is the state of a span without gate or values that starts from the identity.
    is_transition = False
    read_row = _READ
    if HAS_TRANSITION:
        is_transition = i_block >= V // BLOCK_V
        block_offset = tl.where(is_transition, transition_offset, 0)
        if is_transition:
            i_block -= V // BLOCK_V
            read_row = _KEY_NORM
            b_state = tl.where(o_k[None, :] == (i_block * BLOCK_V + o_v)[:, None], 1.0, 0.0)
        else:
            b_state = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    elif HAS_INITIAL_STATE:
        b_state = tl.load(p_initial_state + (i_state * K * V + i_block * BLOCK_V) + o_k[None, :] * V + o_v[:, None]).to(
            tl.float32
        )
    else:
        b_state = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    log_decay = 0.0

    for i in tl.range(begin, end, num_stages=STAGES):
        token = first + i * C
        i_chunk = (first_chunk + i) * HV + i_hv
        p_row = p_scales + i_chunk.to(tl.int64) * (_SCALE_ROWS * C)
        b_k = d_k.load([i_row, token, i_h * K]).reshape(C, K)
        b_v = d_v.load([i_row, token, i_hv * V + i_block * BLOCK_V]).reshape(C, BLOCK_V)
        if HAS_TRANSITION:
            # One tensor holds both kinds of blocks, so that the choice is an offset.
            b_inverse = d_first.load([i_chunk * C + block_offset, 0])
            value_scale = tl.where(is_transition, 0.0, 1.0)
        else:
            b_inverse = d_first.load([i_chunk * C, 0])
        b_read = tl.load(p_row + read_row * C + o_c)
        last_gate = tl.load(p_row + (_GATE * C + C - 1))

        b_rounded = b_state.to(b_k.dtype)
        if HAS_STATES:
            d_states.store([i_chunk * V + i_block * BLOCK_V, 0], b_rounded)
        b_values = tl.trans(b_v).to(tl.float32)
        if HAS_TRANSITION:
            b_values *= value_scale
        b_w = b_values - b_read[None, :] * tl.dot(b_rounded, tl.trans(b_k), input_precision=PRECISION)
        if FOLDED:
            b_w = b_w.to(b_k.dtype)
            b_u = tl.dot(b_w, tl.trans(b_inverse), input_precision=PRECISION)
        else:
            b_beta = tl.load(p_row + _BETA * C + o_c)
            b_write = tl.load(p_row + _WRITE * C + o_c)
            b_w = (b_w * b_beta[None, :]).to(b_k.dtype)
            b_u = tl.dot(b_w, tl.trans(b_inverse), input_precision=PRECISION) * b_write[None, :]
        if HAS_OUTPUT:
            b_q = d_q.load([i_row, token, i_h * K]).reshape(C, K)
            b_output = d_second.load([i_chunk * C, 0])
            b_query = tl.load(p_row + _QUERY * C + o_c)
            b_o = b_query[None, :] * tl.dot(b_rounded, tl.trans(b_q), input_precision=PRECISION)
            b_o = tl.dot(b_w, tl.trans(b_output), b_o, input_precision=PRECISION)
            store_tokens(
                d_o, p_o, b_o, i_row, token, i_hv * V + i_block * BLOCK_V, length - i * C, HV * V, C, BLOCK_V, PACKED
            )
        if HAS_TRANSITION:
            log_decay += last_gate
            last_gate *= value_scale
        b_state *= tl.exp(last_gate)
        b_state = tl.dot(b_u.to(b_k.dtype), b_k, b_state, input_precision=PRECISION)

    if HAS_TRANSITION:
        if is_transition:
            p_m = p_transition + (i_state * K * K + i_block * BLOCK_V) + o_k[None, :] * K + o_v[:, None]
            tl.store(p_m, b_state * tl.exp(log_decay))
        else:
            p_h = p_final_state + (i_state * K * V + i_block * BLOCK_V) + o_k[None, :] * V + o_v[:, None]
            tl.store(p_h, b_state)
    elif HAS_FINAL_STATE:
        p_final = p_final_state + (i_state * K * V + i_block * BLOCK_V) + o_k[None, :] * V + o_v[:, None]
        tl.store(p_final, b_state)


@triton.jit
def _reverse_span(
    i_span,
    i_hv,
    i_block,
    d_q,
    d_k,
    d_do,
    d_first,
    d_second,
    p_scales,
    p_dfinal_state,
    d_dvalues,
    p_dvalues,
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
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_DFINAL_STATE: tl.constexpr,
    HAS_DSTATES: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_V rows of dS^T back through one span."""
    i_document = i_span // spans
    i_part = i_span - i_document * spans
    i_row, first, length, first_chunk, num_chunks = document_span(
        i_document, p_token_offsets, p_chunk_offsets, seq_len, chunks_per_document, PACKED
    )
    begin = i_part * span_chunks
    end = tl.minimum(begin + span_chunks, num_chunks)
    i_h = i_hv // (HV // H)
    i_state = i_span.to(tl.int64) * HV + i_hv

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, BLOCK_V)
    o_state = (i_state * K * V + i_block * BLOCK_V) + o_k[None, :] * V + o_v[:, None]
    if HAS_DFINAL_STATE:
        b_dstate = tl.load(p_dfinal_state + o_state).to(tl.float32)
    else:
        b_dstate = tl.zeros([BLOCK_V, K], dtype=tl.float32)

    for step in tl.range(0, end - begin, num_stages=STAGES):
        i = end - 1 - step
        token = first + i * C
        i_chunk = (first_chunk + i) * HV + i_hv
        column = i_hv * V + i_block * BLOCK_V
        p_row = p_scales + i_chunk.to(tl.int64) * (_SCALE_ROWS * C)
        b_k = d_k.load([i_row, token, i_h * K]).reshape(C, K)
        b_q = d_q.load([i_row, token, i_h * K]).reshape(C, K)
        b_do = d_do.load([i_row, token, column]).reshape(C, BLOCK_V)
        b_inverse = d_first.load([i_chunk * C, 0])
        b_attention = d_second.load([i_chunk * C, 0])
        b_write = tl.load(p_row + _WRITE * C + o_c)
        b_query = tl.load(p_row + _QUERY * C + o_c)
        b_error = tl.load(p_row + _ERROR * C + o_c)
        last_gate = tl.load(p_row + (_GATE * C + C - 1))

        b_rounded = b_dstate.to(b_k.dtype)
        if HAS_DSTATES:
            d_dstates.store([i_chunk * V + i_block * BLOCK_V, 0], b_rounded)
        b_do = tl.trans(b_do)
        b_du = b_write[None, :] * tl.dot(b_rounded, tl.trans(b_k), input_precision=PRECISION)
        b_du = tl.dot(b_do, b_attention, b_du, input_precision=PRECISION)
        b_du_rounded = b_du.to(b_k.dtype)
        if HAS_DSTATES:
            store_tokens(
                d_dvalues, p_dvalues, b_du_rounded, i_row, token, column, length - i * C, HV * V, C, BLOCK_V, PACKED
            )
        b_dw = tl.dot(b_du_rounded, b_inverse, input_precision=PRECISION)
        b_dstate *= tl.exp(last_gate)
        b_dstate = tl.dot((b_do * b_query[None, :]).to(b_k.dtype), b_q, b_dstate, input_precision=PRECISION)
        b_dw *= b_error[None, :]
        b_dstate = tl.dot(b_dw.to(b_k.dtype), b_k, b_dstate, input_precision=PRECISION)

    tl.store(p_dinitial_state + o_state, b_dstate)


@Kernel
@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    d_q,
    d_k,
    d_v,
    d_first,
    d_second,
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
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_TRANSITION: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (documents * spans * HV * blocks)."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + K) // BLOCK_V if HAS_TRANSITION else V // BLOCK_V
    i_block = pid % BLOCKS
    i_hv = (pid // BLOCKS) % HV
    _forward_span(
        pid // (BLOCKS * HV),
        i_hv,
        i_block,
        d_q,
        d_k,
        d_v,
        d_first,
        d_second,
        transition_offset,
        p_scales,
        p_initial_state,
        d_o,
        p_o,
        None,
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
        K,
        V,
        C,
        BLOCK_V,
        HAS_INITIAL_STATE,
        HAS_OUTPUT,
        False,
        True,
        HAS_TRANSITION,
        True,
        PACKED,
        PRECISION,
        STAGES,
    )


@Kernel
@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    d_q,
    d_k,
    d_v,
    d_do,
    d_first,
    d_second,
    p_scales,
    p_initial_state,
    p_dfinal_state,
    d_states,
    d_dvalues,
    p_dvalues,
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
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    HAS_DFINAL_STATE: tl.constexpr,
    HAS_STATES: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (documents * spans * HV * blocks), twice that with states: the two chains are independent."""
    pid = tl.program_id(0)
    CHAINS: tl.constexpr = 2 if HAS_STATES else 1
    BLOCKS: tl.constexpr = V // BLOCK_V
    i_block = (pid // CHAINS) % BLOCKS
    i_hv = (pid // (CHAINS * BLOCKS)) % HV
    i_span = pid // (CHAINS * BLOCKS * HV)
    forward = pid % CHAINS == 1
    if forward:
        if HAS_STATES:
            _forward_span(
                i_span,
                i_hv,
                i_block,
                None,
                d_k,
                d_v,
                d_first,
                None,
                0,
                p_scales,
                p_initial_state,
                None,
                None,
                d_states,
                None,
                None,
                p_token_offsets,
                p_chunk_offsets,
                seq_len,
                chunks_per_document,
                spans,
                span_chunks,
                H,
                HV,
                K,
                V,
                C,
                BLOCK_V,
                HAS_INITIAL_STATE,
                False,
                True,
                False,
                False,
                False,
                PACKED,
                PRECISION,
                STAGES,
            )
    else:
        _reverse_span(
            i_span,
            i_hv,
            i_block,
            d_q,
            d_k,
            d_do,
            d_first,
            d_second,
            p_scales,
            p_dfinal_state,
            d_dvalues,
            p_dvalues,
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
            K,
            V,
            C,
            BLOCK_V,
            HAS_DFINAL_STATE,
            HAS_STATES,
            PACKED,
            PRECISION,
            STAGES,
        )


class Chains(NamedTuple):
    """What the two chains leave for the gradients of each chunk, states in the dtype of k."""

    states: torch.Tensor | None  # [chunks, HV, V, K], S^T before the chunk
    dstates: torch.Tensor | None  # [chunks, HV, V, K], dS^T after the chunk
    dinitial_state: torch.Tensor  # [N, HV, K, V], fp32


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

    W = V - E∘(K S),  O = s E∘(Q S) + (P Ag) W,  S <- e^Γ S + K^T (diag(R) Ag) W

    Args:
        q, k: [B, T, H, K]. v, o: [B, T, HV, V]. initial_state: [N, HV, K, V] or None. All contiguous.
    Returns:
        Final states [N, HV, K, V] fp32.
    """
    _, seq_len, H, K = k.shape
    HV, V = v.shape[2:]
    final_state = torch.empty(chunks.documents * chunks.spans, HV, K, V, dtype=torch.float32, device=v.device)
    shape = launch("forward", K, k.dtype)
    with on_device(v):
        _forward_kernel[(chunks.documents * chunks.spans * HV * (V // shape.block_v),)](
            token_tiles(q, CHUNK, K),
            token_tiles(k, CHUNK, K),
            token_tiles(v, CHUNK, shape.block_v),
            block_tiles(prepared.first, CHUNK, CHUNK),
            block_tiles(prepared.second, CHUNK, CHUNK),
            0,
            prepared.scales,
            initial_state,
            token_tiles(o, CHUNK, shape.block_v),
            o,
            final_state,
            None,
            chunks.token_offsets,
            chunks.chunk_offsets,
            seq_len,
            chunks.per_document,
            chunks.spans,
            chunks.span_chunks,
            H,
            HV,
            K=K,
            V=V,
            C=CHUNK,
            BLOCK_V=shape.block_v,
            HAS_INITIAL_STATE=initial_state is not None,
            HAS_OUTPUT=True,
            HAS_TRANSITION=False,
            PACKED=chunks.starts is not None,
            PRECISION=dot_precision(k.dtype),
            STAGES=shape.stages,
            **shape.options,
        )
    return final_state


def transitions(
    k: torch.Tensor, v: torch.Tensor, prepared: Prepared, chunks: Chunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """M and h of every row: final_state = M @ initial_state + h.

    M <- M - X^T (K M) from I with X = diag(beta) A^T K, times e^(sum g) at the end; h is the state from zeros.

    Args:
        k: [B, T, H, K]. v: [B, T, HV, V]. prepared: in mode SUMMARY.
    Returns:
        M [N, HV, K, K] and h [N, HV, K, V], fp32.
    """
    _, seq_len, H, K = k.shape
    HV, V = v.shape[2:]
    final_state = torch.empty(chunks.documents * chunks.spans, HV, K, V, dtype=torch.float32, device=v.device)
    transition = torch.empty(chunks.documents * chunks.spans, HV, K, K, dtype=torch.float32, device=v.device)
    shape = launch("summary", K, k.dtype)
    with on_device(v):
        _forward_kernel[(chunks.documents * chunks.spans * HV * ((V + K) // shape.block_v),)](
            None,
            token_tiles(k, CHUNK, K),
            token_tiles(v, CHUNK, shape.block_v),
            block_tiles(prepared.both, CHUNK, CHUNK),
            None,
            prepared.first.numel() // CHUNK,
            prepared.scales,
            None,
            None,
            None,
            final_state,
            transition,
            chunks.token_offsets,
            chunks.chunk_offsets,
            seq_len,
            chunks.per_document,
            chunks.spans,
            chunks.span_chunks,
            H,
            HV,
            K=K,
            V=V,
            C=CHUNK,
            BLOCK_V=shape.block_v,
            HAS_INITIAL_STATE=False,
            HAS_OUTPUT=False,
            HAS_TRANSITION=True,
            PACKED=chunks.starts is not None,
            PRECISION=dot_precision(k.dtype),
            STAGES=shape.stages,
            **shape.options,
        )
    return transition, final_state


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

    dV' = P^T dO + R∘(K dS),  dW = beta∘((A∘D)^T dV'),  dS <- e^Γ dS + s Q^T (E∘dO) - K^T (E∘dW)

    Args:
        q, k: [B, T, H, K]. v, do: [B, T, HV, V]. initial_state, dfinal_state: [N, HV, K, V] or None.
        dv: gives memory [B, T, HV, V], which is filled with dV'; with v alone.
    """
    _, seq_len, H, K = k.shape
    HV, V = do.shape[2:]
    with_states = v is not None
    states = k.new_empty(chunks.count, HV, V, K) if with_states else None
    dstates = None if states is None else torch.empty_like(states)
    dinitial_state = torch.empty(chunks.documents * chunks.spans, HV, K, V, dtype=torch.float32, device=k.device)
    dvalues = None if dv is None else dv()
    shape = launch("backward", K, k.dtype)
    with on_device(k):
        _backward_kernel[(chunks.documents * chunks.spans * HV * (V // shape.block_v) * (1 + with_states),)](
            token_tiles(q, CHUNK, K),
            token_tiles(k, CHUNK, K),
            token_tiles(v, CHUNK, shape.block_v),
            token_tiles(do, CHUNK, shape.block_v),
            block_tiles(prepared.first, CHUNK, CHUNK),
            block_tiles(prepared.second, CHUNK, CHUNK),
            prepared.scales,
            initial_state,
            dfinal_state,
            block_tiles(states, shape.block_v, K),
            token_tiles(dvalues, CHUNK, shape.block_v),
            dvalues,
            block_tiles(dstates, shape.block_v, K),
            dinitial_state,
            chunks.token_offsets,
            chunks.chunk_offsets,
            seq_len,
            chunks.per_document,
            chunks.spans,
            chunks.span_chunks,
            H,
            HV,
            K=K,
            V=V,
            C=CHUNK,
            BLOCK_V=shape.block_v,
            HAS_INITIAL_STATE=initial_state is not None,
            HAS_DFINAL_STATE=dfinal_state is not None,
            HAS_STATES=with_states,
            PACKED=chunks.starts is not None,
            PRECISION=dot_precision(k.dtype),
            STAGES=shape.stages,
            **shape.options,
        )
    return Chains(states, dstates, dinitial_state)


@triton.jit
def _in_two(x):
    """x as the sum of what TF32 holds of it, exactly, and the rest."""
    large = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return large, x - large


@triton.jit
def _fold_chain(
    p_transition,
    p_added,
    p_boundary,
    p_states,
    i_document,
    i_hv,
    i_block,
    spans,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_V rows of the transposed states of one document and head, of each span but for the last product."""
    o_k = tl.arange(0, K)
    o_state = i_block * BLOCK_V + o_k[None, :] * V + tl.arange(0, BLOCK_V)[:, None]
    # M^T or M as it is multiplied: copied to shared memory ahead, and read from there into operands' registers.
    o_transition = o_k[:, None] * K + o_k[None, :] if REVERSE else o_k[:, None] + o_k[None, :] * K
    i_state = (i_document * spans + (spans - 1 if REVERSE else 0)) * HV + i_hv
    stride = -HV if REVERSE else HV
    if HAS_BOUNDARY:
        b_state = tl.load(p_boundary + (i_document * HV + i_hv) * (K * V) + o_state).to(tl.float32)
    else:
        b_state = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    b_added = tl.load(p_added + i_state * (K * V) + o_state)
    tl.store(p_states + i_state * (K * V) + o_state, b_state)
    for step in tl.range(1, spans, num_stages=STAGES):
        b_transition = tl.load(p_transition + (i_state + (step - 1) * stride) * (K * K) + o_transition)
        i_next = i_state + step * stride
        b_next = tl.load(p_added + i_next * (K * V) + o_state)
        state_large, state_small = _in_two(b_state)
        large, small = _in_two(b_transition)
        # As accurate as "tf32x3", whose three products wait for each other.
        b_state = tl.dot(state_large, large, b_added, input_precision="tf32")
        b_rest = tl.dot(state_large, small, input_precision="tf32")
        b_state += b_rest + tl.dot(state_small, large, input_precision="tf32")
        b_added = b_next
        tl.store(p_states + i_next * (K * V) + o_state, b_state)


@Kernel
@triton.jit(do_not_specialize=SIZES)
def _fold_kernel(
    p_transition,
    p_added,
    p_boundary,
    p_states,
    p_dadded,
    p_dboundary,
    p_dstates,
    spans,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr,
    HAS_DBOUNDARY: tl.constexpr,
    BOTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (documents * HV * blocks), twice that for both chains: they are independent."""
    pid = tl.program_id(0)
    CHAINS: tl.constexpr = 2 if BOTH else 1
    BLOCKS: tl.constexpr = V // BLOCK_V
    i_block = (pid // CHAINS) % BLOCKS
    i_hv = (pid // (CHAINS * BLOCKS)) % HV
    i_document = (pid // (CHAINS * BLOCKS * HV)).to(tl.int64)
    if pid % CHAINS == 1:
        if BOTH:
            _fold_chain(
                p_transition,
                p_dadded,
                p_dboundary,
                p_dstates,
                i_document,
                i_hv,
                i_block,
                spans,
                HV,
                K,
                V,
                BLOCK_V,
                HAS_DBOUNDARY,
                True,
                STAGES,
            )
    else:
        _fold_chain(
            p_transition,
            p_added,
            p_boundary,
            p_states,
            i_document,
            i_hv,
            i_block,
            spans,
            HV,
            K,
            V,
            BLOCK_V,
            HAS_BOUNDARY,
            False,
            STAGES,
        )


def fold(
    transition: torch.Tensor, added: torch.Tensor, initial_state: torch.Tensor | None, chunks: Chunks
) -> torch.Tensor:
    """The state that enters each span.

    S <- M S + h from the first span on

    Args:
        transition: M [N * spans, HV, K, K]. added: h [N * spans, HV, K, V]. All fp32, contiguous.
        initial_state: [N, HV, K, V], or None for zeros.
    Returns:
        [N * spans, HV, K, V], fp32.
    """
    states = torch.empty_like(added)
    _fold(transition, added, initial_state, states, None, None, None, chunks)
    return states


def fold_both(
    transition: torch.Tensor,
    added: torch.Tensor,
    initial_state: torch.Tensor | None,
    dadded: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    chunks: Chunks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state that enters each span, and the gradient of the state that leaves it, in one launch.

    S <- M S + h from the first span on;  dS <- M^T dS + dh from the last span back

    Args:
        transition: M [N * spans, HV, K, K]. added, dadded: h and dh [N * spans, HV, K, V]. All fp32, contiguous.
        initial_state, dfinal_state: [N, HV, K, V], or None for zeros.
    Returns:
        States and their gradients, each [N * spans, HV, K, V], fp32.
    """
    states, dstates = torch.empty_like(added), torch.empty_like(dadded)
    _fold(transition, added, initial_state, states, dadded, dfinal_state, dstates, chunks)
    return states, dstates


def _fold(
    transition: torch.Tensor,
    added: torch.Tensor,
    initial_state: torch.Tensor | None,
    states: torch.Tensor,
    dadded: torch.Tensor | None,
    dfinal_state: torch.Tensor | None,
    dstates: torch.Tensor | None,
    chunks: Chunks,
) -> None:
    """Fills `states`, and `dstates` if it is there."""
    _, HV, K, V = added.shape
    chains = 1 if dstates is None else 2
    with on_device(added):
        _fold_kernel[(chunks.documents * HV * (V // _FOLD_BLOCK) * chains,)](
            transition,
            added,
            initial_state,
            states,
            dadded,
            dfinal_state,
            dstates,
            chunks.spans,
            HV,
            K=K,
            V=V,
            BLOCK_V=_FOLD_BLOCK,
            HAS_BOUNDARY=initial_state is not None,
            HAS_DBOUNDARY=dfinal_state is not None,
            BOTH=dstates is not None,
            STAGES=3,
            num_warps=8,
        )
