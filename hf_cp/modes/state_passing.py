"""Gated DeltaNet over a sharded sequence by passing its state: the body of ``p2p`` and ``allgather``.

Each rank runs the delta rule over its own tokens. A span of tokens maps the state before it to the state after it
affinely, ``S_out = M S_in + h``; ranks exchange only these fp32 summaries. In backward, with ``dh`` the gradient of
the initial state when that of the final state is zero, ``dS_in = M^T dS_out + dh`` travels the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..context import CpContext
from ..kernels.gdn import chunk_gated_delta_rule, get_backend
from ..layout import LocalDocuments
from ..regions import region


class Pending(Protocol):
    """A state on its way to this rank."""

    def wait(self) -> torch.Tensor: ...


class Exchange(Protocol):
    """Starts the exchange of summaries.

    ``reverse`` is the gradient's direction (``M`` transposed, ``dh`` for ``h``); ``accept`` is False where a document
    edge falls on the rank edge, and what arrives counts as zero.
    """

    def __call__(self, M: torch.Tensor | None, h: torch.Tensor, *, reverse: bool, accept: bool) -> Pending: ...


class SpanInputs(NamedTuple):
    """This rank's inputs of the delta rule: q, k ``[B,L,H,K]``; v ``[B,L,HV,V]``; g, beta ``[B,L,HV]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class Finish(Protocol):
    """Finishes what a mode has started.

    ``between`` is called where the output exists and its gradient's exchange is not yet tied to it: the backward of
    what is recorded there runs while that exchange is under way.

    Returns:
        The output of the delta rule, ``[B, L, HV, V]``.
    """

    def __call__(self, between: Callable[[], None]) -> torch.Tensor: ...


def whole_rule(inputs: SpanInputs, cp: CpContext) -> torch.Tensor:
    """The delta rule where this rank holds all tokens of the heads it has: no state crosses a rank edge."""
    with region("delta_rule"):
        output, _ = chunk_gated_delta_rule(
            *inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=cp.cu_seqlens, backend=cp.config.gdn_backend
        )
    return output


def start(inputs: SpanInputs, cp: CpContext, exchange: Exchange) -> Finish:
    """Summarise this rank's span and start the exchange; the returned function finishes the layer's delta rule.

    What does not need the state can run between the two calls.
    """
    documents = cp.documents
    done = None
    with torch.no_grad():
        if documents.continues_from_previous or not documents.continues_into_next:
            with region("summary"):
                M, h = _summary(inputs, cp)
        else:
            # No state comes in, so the output can be had at once, and with it the state that goes out.
            with region("delta_rule"):
                done = _forward(inputs, None, cp)
            M, h = None, done.final_state if documents.cu_seqlens is None else done.final_state[-1:]
        with region("start_State"):
            pending = exchange(M, h, reverse=False, accept=documents.continues_from_previous)

    def finish(between: Callable[[], None]) -> torch.Tensor:
        flight = _Flight()
        incoming, initial_state = pending.wait(), None
        if documents.continues_from_previous:
            initial_state = torch.cat([incoming, _others(incoming, documents)])
        with region("delta_rule"):
            output, edges = _StatefulSpan.apply(*inputs, initial_state, done, cp, flight)  # pyright: ignore[reportGeneralTypeIssues]
        between()
        output = _GradientExchange.apply(output, *inputs, initial_state, edges, M, cp, exchange, flight)
        assert isinstance(output, torch.Tensor)
        return output

    return finish


class _Outputs(NamedTuple):
    """The output ``[B,L,HV,V]``, the final states ``[N,HV,K,V]`` and those between segments ``[S,B,HV,K,V]``."""

    output: torch.Tensor
    final_state: torch.Tensor
    edges: torch.Tensor


def _forward(inputs: SpanInputs, initial_state: torch.Tensor | None, cp: CpContext) -> _Outputs:
    edge_states: list[torch.Tensor] = []
    output, final_state = get_backend(cp.config.gdn_backend).forward(
        *inputs,
        scale=inputs.q.shape[-1] ** -0.5,
        initial_state=initial_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cp.documents.cu_seqlens,
        edge_states=edge_states,
    )
    edges = torch.stack(edge_states) if edge_states else final_state.new_zeros(0, *final_state.shape)
    return _Outputs(output, final_state, edges)


def _backward(
    inputs: SpanInputs,
    initial_state: torch.Tensor | None,
    edges: torch.Tensor,
    do: torch.Tensor,
    final_gradient: torch.Tensor | None,
    cp: CpContext,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g, beta."""
    *gradients, _ = get_backend(cp.config.gdn_backend).backward(
        *inputs,
        initial_state,
        do,
        final_gradient,
        scale=inputs.q.shape[-1] ** -0.5,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cp.documents.cu_seqlens,
        edge_states=edges.unbind(),
        **options,
    )
    return tuple(gradients)


def _summary(inputs: SpanInputs, cp: CpContext) -> tuple[torch.Tensor | None, torch.Tensor]:
    """``(M, h)`` of the last local document; ``M`` is ``None`` where that document starts on this rank."""
    _, k, v, g, beta = inputs
    batch, _, value_heads, value_dim = v.shape
    if not cp.documents.continues_into_next:
        return None, _zero_state(v, (batch, value_heads, k.shape[-1], value_dim))
    begin = cp.documents.bounds[-2]
    span = [x[:, begin:] for x in (k, v, g, beta)]
    M, h = get_backend(cp.config.gdn_backend).summary(*span, use_qk_l2norm_in_kernel=True)
    starts_here = begin > 0 or not cp.documents.continues_from_previous
    return (None if starts_here else M), h


def _others(state: torch.Tensor, documents: LocalDocuments) -> torch.Tensor:
    """Zero states of the local documents that do not cross the edge in question; none where nothing is packed."""
    count = 0 if documents.cu_seqlens is None else len(documents.bounds) - 2
    return state.new_zeros(count, *state.shape[1:])


def _zero_state(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros(shape, dtype=dtype, device=like.device)


class _Flight:
    """What the node that asks for the gradient of the final state leaves for the node that uses it."""

    pending: Pending | None = None
    # What was prepared for the gradient of the initial state.
    kept: list[Any] | None = None
    # All gradients, where they depend on no other rank.
    gradients: tuple[torch.Tensor, ...] | None = None


class _StatefulSpan(torch.autograd.Function):
    """The delta rule over this rank's tokens, from the state that the previous rank hands over.

    =============  ======================  ==========================================
    on each rank   forward                 backward
    =============  ======================  ==========================================
    q, k           ``[B, L, H, K]``        ``dq, dk``
    v              ``[B, L, HV, V]``       ``dv``
    g, beta        ``[B, L, HV]``          ``dg, dbeta``
    initial_state  ``[N, HV, K, V]``       its gradient is sent, not returned
    output         ``[B, L, HV, V]``       ``do``
    edges          ``[S, B, HV, K, V]``    no gradient
    =============  ======================  ==========================================

    Backward runs the local backward with the ``dS_out`` that `_GradientExchange` asked for, unless that did. Saved: the
    inputs, the incoming state and the states between segments, so nothing is longer than the local sequence.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, initial_state, done: _Outputs | None, cp: CpContext, flight: _Flight):
        output, _, edges = done or _forward(SpanInputs(q, k, v, g, beta), initial_state, cp)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, edges)
        ctx.cp, ctx.flight = cp, flight
        ctx.mark_non_differentiable(edges)
        return output, edges

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, _):
        flight = ctx.flight
        assert flight.pending is not None, "_GradientExchange.backward runs first: its input is this node's output"
        pending, flight.pending = flight.pending, None
        outgoing = pending.wait()
        gradients, flight.gradients = flight.gradients, None
        if gradients is None:
            *inputs, initial_state, edges = ctx.saved_tensors
            documents = ctx.cp.documents
            final_gradient = None
            if documents.continues_into_next:
                final_gradient = torch.cat([_others(outgoing, documents), outgoing])
            kept, flight.kept = flight.kept, None
            gradients = _backward(SpanInputs(*inputs), initial_state, edges, do, final_gradient, ctx.cp, kept=kept)
        return *gradients, None, None, None, None


class _GradientExchange(torch.autograd.Function):
    """Identity of the output; its backward starts the exchange of the state's gradient.

    =============  ======================  ==========================================
    on each rank   forward                 backward
    =============  ======================  ==========================================
    output         ``[B, L, HV, V]``       ``do``, passed on
    =============  ======================  ==========================================

    Backward computes ``dh`` from ``do`` and starts ``dS_in = M^T dS_out + dh`` in the other direction. Where no
    gradient comes in, it computes all gradients, and sends that of the initial state as soon as it is there.
    Saved: what `_StatefulSpan` saves, and M.
    """

    @staticmethod
    def forward(
        ctx: Any, output, q, k, v, g, beta, initial_state, edges, M, cp: CpContext, exchange: Exchange, flight: _Flight
    ):
        ctx.save_for_backward(q, k, v, g, beta, initial_state, edges, M)
        ctx.cp, ctx.exchange, ctx.flight = cp, exchange, flight
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do):
        *inputs, initial_state, edges, M = ctx.saved_tensors
        inputs = SpanInputs(*inputs)
        documents, flight = ctx.cp.documents, ctx.flight
        q, k, _, g, beta = inputs

        def send(dh: torch.Tensor) -> None:
            with region("start_State"):
                flight.pending = ctx.exchange(M, dh, reverse=True, accept=documents.continues_into_next)

        if not documents.continues_from_previous:
            send(_zero_state(do, (q.shape[0], do.shape[2], q.shape[-1], do.shape[-1])))
        elif documents.continues_into_next:
            stop = documents.bounds[1]
            flight.kept = [] if documents.cu_seqlens is None else None
            with region("summary"):
                dh = get_backend(ctx.cp.config.gdn_backend).backward_state(
                    *(x[:, :stop] for x in (q, k, g, beta, do)),
                    scale=q.shape[-1] ** -0.5,
                    use_qk_l2norm_in_kernel=True,
                    keep=flight.kept,
                )
            send(dh)
        else:
            with region("delta_rule"):
                flight.gradients = _backward(
                    inputs,
                    initial_state,
                    edges,
                    do,
                    None,
                    ctx.cp,
                    state_ready=lambda dstates: send(dstates if documents.cu_seqlens is None else dstates[:1]),
                )
        return do, *(None,) * 11
