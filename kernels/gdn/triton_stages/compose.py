"""The stage functions of a backend, made of its kernels.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ..backend import refuse, unserved_reason
from ..segments import row_groups, segment_count
from .chunks import GRADIENT, OUTPUT, SUMMARY, Chunks, Part, Spans, cut, cut_in_parts, split
from .state import fold, fold_both

_ALL = slice(None)
_VALUES = 2  # of q, k, v, g, beta


class Kernels(Protocol):
    """The launches of a backend; `prepare`, `state` and `gradients` of this package document them.

    What is prepared passes from one to the next and is nobody else's; after the chains, `after_chains` of it is kept.
    """

    def prepare(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunks: Chunks,
        *,
        mode: int,
        scale: float,
        normalize: bool,
    ) -> Any: ...

    def outputs(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prepared: Any,
        initial_state: torch.Tensor | None,
        o: torch.Tensor,
        chunks: Chunks,
    ) -> torch.Tensor: ...

    def transitions(
        self, k: torch.Tensor, v: torch.Tensor, prepared: Any, chunks: Chunks
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def reverse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        do: torch.Tensor,
        prepared: Any,
        initial_state: torch.Tensor | None,
        dfinal_state: torch.Tensor | None,
        dv: Callable[[], torch.Tensor] | None,
        chunks: Chunks,
    ) -> Any: ...

    def gradients(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        do: torch.Tensor,
        prepared: Any,
        chains: Any,
        out: tuple[torch.Tensor, ...],
        chunks: Chunks,
        *,
        scale: float,
        normalize: bool,
    ) -> None: ...


class ComposedStages:
    """The four stage functions over `kernels`; `eager` documents what they compute.

    All raise ValueError for a dim or dtype that backend `name` does not serve.
    """

    def __init__(self, name: str, kernels: Kernels, spans: Spans) -> None:
        self.name = name
        self.kernels = kernels
        self.spans = spans

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        scale: float,
        initial_state: torch.Tensor | None,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: torch.Tensor | None = None,
        edge_states: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and final states of the gated delta rule; see `eager.forward`.

        Long rows are worked off in segments, one after another, only for the states between them.
        """
        self._check(k, v)
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        state = _contiguous(initial_state)
        o = torch.empty_like(v)
        batch, seq_len = k.shape[:2]
        count = 1 if edge_states is None else _segment_count(k, v, cu_seqlens)
        final_states, edges = [], []
        # A packed row has the states of all its documents.
        groups = [_ALL] if batch == 1 or count == 1 else [slice(n, n + 1) for n in range(batch)]
        for rows in groups:
            row_state, row_edges = _of(state, rows), []
            for index, part in enumerate(cut_in_parts(batch // len(groups), seq_len, cu_seqlens, count)):
                if index:
                    row_edges.append(part.entering(row_state))
                inputs = [_part(x, rows, part.tokens) for x in (q, k, v, g, beta)]
                o_part = _part(o, rows, part.tokens)
                row_state = self._outputs(inputs, o_part, row_state, part.chunks, scale, use_qk_l2norm_in_kernel)
            final_states.append(row_state)
            edges.append(row_edges)
        if edge_states is not None:
            edge_states += map(_joined, zip(*edges, strict=True))
        return o, _joined(final_states)

    def _outputs(
        self,
        inputs: Sequence[torch.Tensor],
        o: torch.Tensor,
        initial_state: torch.Tensor | None,
        chunks: Chunks,
        scale: float,
        normalize: bool,
    ) -> torch.Tensor:
        """Fills the outputs of a segment; returns its final states."""
        q, k, v, g, beta = inputs
        chunks = self._split(chunks, k, v, self.spans.forward)
        if chunks.spans > 1:
            transition, added = self._summaries(k, v, g, beta, chunks, normalize)
            initial_state = fold(transition, added, initial_state, chunks)
        prepared = self.kernels.prepare(q, k, g, beta, chunks, mode=OUTPUT, scale=scale, normalize=normalize)
        final_states = self.kernels.outputs(q, k, v, prepared, initial_state, o, chunks)
        return final_states.unflatten(0, (chunks.documents, chunks.spans))[:, -1].contiguous()

    def summary(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        use_qk_l2norm_in_kernel: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """M and h of a span: final_state = M @ initial_state + h; see `eager.summary`."""
        self._check(k, v)
        k, v, g, beta = (x.contiguous() for x in (k, v, g, beta))
        return self._summaries(k, v, g, beta, cut(k.shape[0], k.shape[1], None), use_qk_l2norm_in_kernel)

    def backward_state(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        do: torch.Tensor,
        *,
        scale: float,
        use_qk_l2norm_in_kernel: bool,
        keep: list[Any] | None = None,
    ) -> torch.Tensor:
        """dh of a span: d_initial_state = M^T d_final_state + dh; see `eager.backward_state`."""
        self._check(k, do)
        inputs = [x.contiguous() for x in (q, k, g, beta, do)]
        return self._state_gradient(inputs, None, None, scale, use_qk_l2norm_in_kernel, keep)

    def _state_gradient(
        self,
        inputs: Sequence[torch.Tensor],
        dfinal_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        scale: float,
        normalize: bool,
        keep: list[Any] | None,
    ) -> torch.Tensor:
        """d_initial_state alone, segment by segment, in the memory of one."""
        _, k, _, _, do = inputs
        batch, seq_len = k.shape[:2]
        groups, count = _row_groups(k, do), _segment_count(k, do, cu_seqlens)
        dstates = []
        for rows in groups:
            dstate = _of(dfinal_state, rows)
            for part in reversed(cut_in_parts(len(range(batch)[rows]), seq_len, cu_seqlens, count)):
                q, k, g, beta, do = (_part(x, rows, part.tokens) for x in inputs)
                options: Any = {"mode": GRADIENT, "scale": scale, "normalize": normalize}
                prepared = self.kernels.prepare(q, k, g, beta, part.chunks, **options)
                dstate = self.kernels.reverse(q, k, None, do, prepared, None, dstate, None, part.chunks).dinitial_state
                if keep is not None and len(groups) == count == 1:
                    keep.append(prepared)
            dstates.append(dstate)
        return _joined(dstates)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        do: torch.Tensor,
        dfinal_state: torch.Tensor | None,
        *,
        scale: float,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: torch.Tensor | None = None,
        edge_states: Sequence[torch.Tensor] = (),
        kept: list[Any] | None = None,
        state_ready: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of all inputs, the states computed anew from `initial_state`; see `eager.backward`."""
        self._check(k, v)
        normalize = use_qk_l2norm_in_kernel
        q, k, v, g, beta, do = (x.contiguous() for x in (q, k, v, g, beta, do))
        initial_state, dfinal_state = _contiguous(initial_state), _contiguous(dfinal_state)
        batch, seq_len = k.shape[:2]
        groups, count = _row_groups(k, v), len(edge_states) + 1
        if state_ready is not None and len(groups) * count > 1:
            inputs = (q, k, g, beta, do)
            state_ready(self._state_gradient(inputs, dfinal_state, cu_seqlens, scale, normalize, None))
            state_ready = None
        out = _OnDemand(q, k, v, g, beta)
        dstates = []
        for rows in groups:
            parts = cut_in_parts(len(range(batch)[rows]), seq_len, cu_seqlens, count)
            edges, dstate = [_of(x, rows) for x in edge_states], _of(dfinal_state, rows)
            for part, state in _entered(parts, _of(initial_state, rows), edges):
                dstate = self._gradients(
                    [_part(x, rows, part.tokens) for x in (q, k, v, g, beta, do)],
                    partial(out.part, rows, part.tokens),
                    state,
                    dstate,
                    part.chunks,
                    scale,
                    normalize,
                    kept,
                    state_ready,
                )
            dstates.append(dstate)
        gradients = (out.part(_ALL, _ALL, index) for index in range(5))
        return *gradients, _joined(dstates)  # pyright: ignore[reportReturnType]

    def _gradients(
        self,
        inputs: Sequence[torch.Tensor],
        out: Callable[[int], torch.Tensor],
        initial_state: torch.Tensor | None,
        dfinal_state: torch.Tensor | None,
        chunks: Chunks,
        scale: float,
        normalize: bool,
        kept: list[Any] | None,
        state_ready: Callable[[torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """Fills the gradients of a segment; returns those of its first states."""
        q, k, v, g, beta, do = inputs
        prepared = (
            kept.pop()
            if kept
            else self.kernels.prepare(q, k, g, beta, chunks, mode=GRADIENT, scale=scale, normalize=normalize)
        )
        chunks = self._split(chunks, k, v, self.spans.backward)
        if chunks.spans > 1:
            transition, added = self._summaries(k, v, g, beta, chunks, normalize)
            dadded = self.kernels.reverse(q, k, None, do, prepared, None, None, None, chunks).dinitial_state
            initial_state, dfinal_state = fold_both(transition, added, initial_state, dadded, dfinal_state, chunks)
        chains = self.kernels.reverse(q, k, v, do, prepared, initial_state, dfinal_state, partial(out, _VALUES), chunks)
        dinitial_state = chains.dinitial_state.unflatten(0, (chunks.documents, chunks.spans))[:, 0].contiguous()
        if state_ready is not None:
            state_ready(dinitial_state)
        prepared = prepared.after_chains()
        self.kernels.gradients(
            q,
            k,
            v,
            g,
            beta,
            do,
            prepared,
            chains,
            tuple(map(out, range(5))),
            chunks,
            scale=scale,
            normalize=normalize,
        )
        return dinitial_state

    def _summaries(
        self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: Chunks, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """M and h of every span."""
        prepared = self.kernels.prepare(None, k, g, beta, chunks, mode=SUMMARY, scale=1.0, normalize=normalize)
        return self.kernels.transitions(k, v, prepared, chunks)

    def _split(self, chunks: Chunks, k: torch.Tensor, v: torch.Tensor, least: int) -> Chunks:
        # A fold holds M in fp32 in shared memory, which [256, 256] exceeds.
        return chunks if k.shape[-1] > 128 else split(chunks, v.shape[2], v.shape[3], least, self.spans.chunks)

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Refuses what no launch was verified for, from metadata alone."""
        refuse(self.name, unserved_reason(self.name, key_dim=k.shape[-1], value_dim=v.shape[-1], dtype=k.dtype))
        if k.shape[1] == 0:
            raise ValueError(f'T=0 is not served by gdn_backend="{self.name}": drop the empty call, or use "eager"')


class _OnDemand:
    """Gradients like their inputs; each takes memory when it is first asked for."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        self._inputs = inputs
        self._made: dict[int, torch.Tensor] = {}

    def part(self, rows: slice, tokens: slice, index: int) -> torch.Tensor:
        if index not in self._made:
            self._made[index] = torch.empty_like(self._inputs[index])
        return _part(self._made[index], rows, tokens)


def _entered(
    parts: list[Part], initial_state: torch.Tensor | None, edges: list[torch.Tensor]
) -> Iterator[tuple[Part, torch.Tensor | None]]:
    """The parts of rows, last first, each with the states that enter it."""
    states = None
    for part, edge in zip(reversed(parts[1:]), reversed(edges), strict=True):
        if part.document is None:
            yield part, edge
            continue
        if states is None:
            states = edge.new_zeros(part.chunks.documents, *edge.shape[1:])
            if initial_state is not None:
                states.copy_(initial_state)
        # Documents that begin in the part have the caller's states.
        before = states.index_select(0, part.document)
        yield part, states.index_copy_(0, part.document, edge)
        states.index_copy_(0, part.document, before)
    yield parts[0], initial_state


def _segment_count(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    batch, seq_len, heads, value_dim = v.shape
    documents = None if cu_seqlens is None else cu_seqlens.numel() - 1
    return segment_count(batch, seq_len, heads, value_dim, k.shape[3], documents)


def _row_groups(k: torch.Tensor, v: torch.Tensor) -> list[slice]:
    batch, seq_len, heads, value_dim = v.shape
    return [_ALL] if batch == 1 else row_groups(batch, seq_len, heads, value_dim, k.shape[3])


def _part(x: torch.Tensor, rows: slice, tokens: slice) -> torch.Tensor:
    """Contiguous of one row, or where `tokens` are all."""
    x = x if rows == _ALL else x[rows]
    return x if tokens == _ALL else x[:, tokens]


def _of(states: torch.Tensor | None, rows: slice) -> Any:
    return states if states is None or rows == _ALL else states[rows]


def _joined(states: Sequence[torch.Tensor]) -> torch.Tensor:
    return states[0] if len(states) == 1 else torch.cat(list(states))


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
