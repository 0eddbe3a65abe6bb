"""The stage functions of a backend, made of its kernels.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
"""

from typing import Any, Protocol

import torch

from ..backend import refuse, unserved_reason
from .chunks import GRADIENT, OUTPUT, SUMMARY, Chunks, cut, split
from .state import fold


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
        chunks: Chunks,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

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
        chunks: Chunks,
        *,
        scale: float,
        normalize: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...


class ComposedStages:
    """The four stage functions over `kernels`; `eager` documents what they compute.

    All raise ValueError for a dim or dtype that backend `name` does not serve.
    """

    def __init__(self, name: str, kernels: Kernels) -> None:
        self.name = name
        self.kernels = kernels

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and final states of the gated delta rule; see `eager.forward`."""
        self._check(k, v)
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        initial_state = _contiguous(initial_state)
        chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
        chunks = _split(chunks, k, v)
        if chunks.spans > 1:
            transition, added = self._summaries(k, v, g, beta, chunks, use_qk_l2norm_in_kernel)
            initial_state = fold(transition, added, initial_state, chunks, reverse=False)
        prepared = self.kernels.prepare(
            q, k, g, beta, chunks, mode=OUTPUT, scale=scale, normalize=use_qk_l2norm_in_kernel
        )
        o, final_states = self.kernels.outputs(q, k, v, prepared, initial_state, chunks)
        return o, final_states.unflatten(0, (chunks.documents, chunks.spans))[:, -1].contiguous()

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
    ) -> torch.Tensor:
        """dh of a span: d_initial_state = M^T d_final_state + dh; see `eager.backward_state`."""
        self._check(k, do)
        q, k, g, beta, do = (x.contiguous() for x in (q, k, g, beta, do))
        chunks = cut(k.shape[0], k.shape[1], None)
        prepared = self.kernels.prepare(
            q, k, g, beta, chunks, mode=GRADIENT, scale=scale, normalize=use_qk_l2norm_in_kernel
        )
        return self.kernels.reverse(q, k, None, do, prepared, None, None, chunks).dinitial_state

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of all inputs, the states computed anew from `initial_state`; see `eager.backward`."""
        self._check(k, v)
        q, k, v, g, beta, do = (x.contiguous() for x in (q, k, v, g, beta, do))
        initial_state, dfinal_state = _contiguous(initial_state), _contiguous(dfinal_state)
        chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
        prepared = self.kernels.prepare(
            q, k, g, beta, chunks, mode=GRADIENT, scale=scale, normalize=use_qk_l2norm_in_kernel
        )
        chunks = _split(chunks, k, v)
        if chunks.spans > 1:
            transition, added = self._summaries(k, v, g, beta, chunks, use_qk_l2norm_in_kernel)
            dadded = self.kernels.reverse(q, k, None, do, prepared, None, None, chunks).dinitial_state
            initial_state = fold(transition, added, initial_state, chunks, reverse=False)
            dfinal_state = fold(transition, dadded, dfinal_state, chunks, reverse=True)
        chains = self.kernels.reverse(q, k, v, do, prepared, initial_state, dfinal_state, chunks)
        prepared = prepared.after_chains()
        gradients = self.kernels.gradients(
            q, k, v, g, beta, do, prepared, chains, chunks, scale=scale, normalize=use_qk_l2norm_in_kernel
        )
        dinitial_states = chains.dinitial_state.unflatten(0, (chunks.documents, chunks.spans))
        return *gradients, dinitial_states[:, 0].contiguous()

    def _summaries(
        self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: Chunks, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """M and h of every span."""
        prepared = self.kernels.prepare(None, k, g, beta, chunks, mode=SUMMARY, scale=1.0, normalize=normalize)
        return self.kernels.transitions(k, v, prepared, chunks)

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Refuses what no launch was verified for, from metadata alone."""
        refuse(self.name, unserved_reason(self.name, key_dim=k.shape[-1], value_dim=v.shape[-1], dtype=k.dtype))
        if k.shape[1] == 0:
            raise ValueError(f'T=0 is not served by gdn_backend="{self.name}": drop the empty call, or use "eager"')


def _split(chunks: Chunks, k: torch.Tensor, v: torch.Tensor) -> Chunks:
    # A fold holds M in fp32 in shared memory, which [256, 256] exceeds.
    return chunks if k.shape[-1] > 128 else split(chunks, *v.shape[2:])


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
