"""Gated DeltaNet over a sharded sequence by passing its state: the body of ``p2p`` and ``allgather``.

Each rank runs the delta rule over its own tokens. A span of tokens maps the state before it to the state after it
affinely, ``S_out = M S_in + h``; ranks exchange only these fp32 summaries. In backward, with ``dh`` the gradient of
the initial state when that of the final state is zero, ``dS_in = M^T dS_out + dh`` travels the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ..context import CpContext
from ..kernels.gdn import get_backend
from ..layout import LocalDocuments


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


def start(inputs: SpanInputs, cp: CpContext, exchange: Exchange) -> Callable[[], torch.Tensor]:
    """Summarise this rank's span and start the exchange; the returned function finishes the layer's delta rule.

    What does not need the state can run between the two calls.

    Returns:
        A function without arguments that gives the output ``[B, L, HV, V]``.
    """
    pending, M = None, None
    if cp.mesh.cp_size > 1:
        with torch.no_grad():
            M, h = _summary(inputs, cp)
            pending = exchange(M, h, reverse=False, accept=cp.documents.continues_from_previous)

    def finish() -> torch.Tensor:
        incoming = None if pending is None else pending.wait()
        output = _StatefulSpan.apply(*inputs, incoming, M, cp, exchange)
        assert isinstance(output, torch.Tensor)
        return output

    return finish


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


class _StatefulSpan(torch.autograd.Function):
    """The delta rule over this rank's tokens, from the state that the previous rank hands over.

    =============  ======================  ==========================================
    on each rank   forward                 backward
    =============  ======================  ==========================================
    q, k           ``[B, L, H, K]``        ``dq, dk``
    v              ``[B, L, HV, V]``       ``dv``
    g, beta        ``[B, L, HV]``          ``dg, dbeta``
    incoming       ``[B, HV, K, V]``       its gradient is sent, not returned
    output         ``[B, L, HV, V]``       ``do``
    =============  ======================  ==========================================

    Backward computes ``dh`` from ``do``, exchanges ``dS_in = M^T dS_out + dh`` in the other direction, and runs the
    local backward with the ``dS_out`` that arrives. Saved: the inputs, the incoming state and M, so nothing is longer
    than the local sequence.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, incoming, M, cp: CpContext, exchange: Exchange):
        documents = cp.documents
        initial_state = None
        if documents.continues_from_previous:
            initial_state = torch.cat([incoming, _others(incoming, documents)])
        output, _ = get_backend(cp.config.gdn_backend).forward(
            q,
            k,
            v,
            g,
            beta,
            scale=q.shape[-1] ** -0.5,
            initial_state=initial_state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=documents.cu_seqlens,
        )
        ctx.save_for_backward(q, k, v, g, beta, initial_state, M)
        ctx.cp, ctx.exchange = cp, exchange
        return output

    @staticmethod
    def backward(ctx: Any, do):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, g, beta, initial_state, M = ctx.saved_tensors
        cp, documents = ctx.cp, ctx.cp.documents
        backend = get_backend(cp.config.gdn_backend)
        scale = q.shape[-1] ** -0.5
        final_gradient = None
        if cp.mesh.cp_size > 1:
            if documents.continues_from_previous:
                stop = documents.bounds[1]
                span = [x[:, :stop] for x in (q, k, g, beta, do)]
                dh = backend.backward_state(*span, scale=scale, use_qk_l2norm_in_kernel=True)
            else:
                dh = _zero_state(v, (q.shape[0], v.shape[2], q.shape[-1], v.shape[-1]))
            outgoing = ctx.exchange(M, dh, reverse=True, accept=documents.continues_into_next).wait()
            if documents.continues_into_next:
                final_gradient = torch.cat([_others(outgoing, documents), outgoing])
        dq, dk, dv, dg, dbeta, _ = backend.backward(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            do,
            final_gradient,
            scale=scale,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=documents.cu_seqlens,
        )
        return dq, dk, dv, dg, dbeta, None, None, None, None
