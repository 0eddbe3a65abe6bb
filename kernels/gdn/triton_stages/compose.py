"""The stage functions of a backend, made of its kernels.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ..backend import refuse, unserved_reason
from ..segments import segment_count, segments
from .chunks import GRADIENT, OUTPUT, SUMMARY, Chunks, Spans, cut, split
from .state import fold, fold_both

_WHOLE = [slice(None)]
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

        A long row is worked off in segments only for the states between them.
        """
        self._check(k, v)
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        state = _contiguous(initial_state)
        o = torch.empty_like(v)
        for rows in _segments(k, v, cu_seqlens) if edge_states is not None else _WHOLE:
            if rows.start:
                assert edge_states is not None
                assert state is not None
                edge_states.append(state)
            inputs = [_part(x, rows) for x in (q, k, v, g, beta)]
            state = self._outputs(inputs, _part(o, rows), state, scale, use_qk_l2norm_in_kernel, cu_seqlens)
        assert state is not None
        return o, state

    def _outputs(
        self,
        inputs: Sequence[torch.Tensor],
        o: torch.Tensor,
        initial_state: torch.Tensor | None,
        scale: float,
        normalize: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Fills the outputs of a segment; returns its final states."""
        q, k, v, g, beta = inputs
        chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
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
        return self._state_gradient(inputs, None, scale, use_qk_l2norm_in_kernel, keep)

    def _state_gradient(
        self,
        inputs: Sequence[torch.Tensor],
        dfinal_state: torch.Tensor | None,
        scale: float,
        normalize: bool,
        keep: list[Any] | None,
    ) -> torch.Tensor:
        """d_initial_state alone, of rows with one document each; segment by segment, in the memory of one."""
        parts = _segments(inputs[1], inputs[-1], None)
        dstate = dfinal_state
        for rows in reversed(parts):
            q, k, g, beta, do = (_part(x, rows) for x in inputs)
            chunks = cut(k.shape[0], k.shape[1], None)
            prepared = self.kernels.prepare(q, k, g, beta, chunks, mode=GRADIENT, scale=scale, normalize=normalize)
            dstate = self.kernels.reverse(q, k, None, do, prepared, None, dstate, None, chunks).dinitial_state
            if keep is not None and len(parts) == 1:
                keep.append(prepared)
        assert dstate is not None
        return dstate

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
        states = [_contiguous(initial_state), *edge_states]
        parts = _segments(k, v, cu_seqlens) if edge_states else _WHOLE
        dstate = _contiguous(dfinal_state)
        if state_ready is not None and len(parts) > 1:
            state_ready(self._state_gradient((q, k, g, beta, do), dstate, scale, normalize, None))
            state_ready = None
        out = _OnDemand(q, k, v, g, beta)
        for rows, state in zip(reversed(parts), reversed(states), strict=True):
            dstate = self._gradients(
                [_part(x, rows) for x in (q, k, v, g, beta, do)],
                partial(out.part, rows),
                state,
                dstate,
                scale,
                normalize,
                cu_seqlens,
                kept,
                state_ready,
            )
        assert dstate is not None
        return *(out.part(_WHOLE[0], index) for index in range(5)), dstate  # pyright: ignore[reportReturnType]

    def _gradients(
        self,
        inputs: Sequence[torch.Tensor],
        out: Callable[[int], torch.Tensor],
        initial_state: torch.Tensor | None,
        dfinal_state: torch.Tensor | None,
        scale: float,
        normalize: bool,
        cu_seqlens: torch.Tensor | None,
        kept: list[Any] | None,
        state_ready: Callable[[torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """Fills the gradients of a segment; returns those of its first states."""
        q, k, v, g, beta, do = inputs
        chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
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

    def part(self, rows: slice, index: int) -> torch.Tensor:
        if index not in self._made:
            self._made[index] = torch.empty_like(self._inputs[index])
        return _part(self._made[index], rows)


def _segments(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[slice]:
    batch, seq_len, _, key_dim = k.shape
    count = segment_count(batch, seq_len, v.shape[2], v.shape[3], key_dim, packed=cu_seqlens is not None)
    return _WHOLE if count == 1 else segments(seq_len, count)


def _part(x: torch.Tensor, rows: slice) -> torch.Tensor:
    return x if rows == _WHOLE[0] else x[:, rows]


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
