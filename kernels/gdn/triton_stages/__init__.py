"""Stage functions of the chunked gated delta rule as Triton kernels for Hopper GPUs.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
They compute what the functions of the same names in `eager` compute; README.md says in which steps, and how fast.
All raise ValueError for a dim or dtype that they do not serve.
"""

import torch

from ..backend import refuse, unserved_reason
from .chunks import Chunks, cut, split
from .gradients import gradients
from .prepare import GRADIENT, OUTPUT, SUMMARY, prepare
from .state import fold, outputs, reverse, transitions


def forward(
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
    _check(k, v)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    initial_state = _contiguous(initial_state)
    chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
    chunks = _split(chunks, k, v)
    if chunks.spans > 1:
        transition, added = _summaries(k, v, g, beta, chunks, use_qk_l2norm_in_kernel)
        initial_state = fold(transition, added, initial_state, chunks, reverse=False)
    prepared = prepare(q, k, g, beta, chunks, mode=OUTPUT, scale=scale, normalize=use_qk_l2norm_in_kernel)
    o, final_states = outputs(q, k, v, prepared, initial_state, chunks)
    return o, final_states.unflatten(0, (chunks.documents, chunks.spans))[:, -1].contiguous()


def summary(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """M and h of a span: final_state = M @ initial_state + h; see `eager.summary`."""
    _check(k, v)
    k, v, g, beta = (x.contiguous() for x in (k, v, g, beta))
    chunks = cut(k.shape[0], k.shape[1], None)
    prepared = prepare(None, k, g, beta, chunks, mode=SUMMARY, scale=1.0, normalize=use_qk_l2norm_in_kernel)
    return transitions(k, v, prepared, chunks)


def backward_state(
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
    _check(k, do)
    q, k, g, beta, do = (x.contiguous() for x in (q, k, g, beta, do))
    chunks = cut(k.shape[0], k.shape[1], None)
    prepared = prepare(q, k, g, beta, chunks, mode=GRADIENT, scale=scale, normalize=use_qk_l2norm_in_kernel)
    return reverse(q, k, None, do, prepared, None, None, chunks).dinitial_state


def backward(
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
    _check(k, v)
    q, k, v, g, beta, do = (x.contiguous() for x in (q, k, v, g, beta, do))
    initial_state, dfinal_state = _contiguous(initial_state), _contiguous(dfinal_state)
    chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
    prepared = prepare(q, k, g, beta, chunks, mode=GRADIENT, scale=scale, normalize=use_qk_l2norm_in_kernel)
    chunks = _split(chunks, k, v)
    if chunks.spans > 1:
        transition, added = _summaries(k, v, g, beta, chunks, use_qk_l2norm_in_kernel)
        dadded = reverse(q, k, None, do, prepared, None, None, chunks).dinitial_state
        initial_state = fold(transition, added, initial_state, chunks, reverse=False)
        dfinal_state = fold(transition, dadded, dfinal_state, chunks, reverse=True)
    chains = reverse(q, k, v, do, prepared, initial_state, dfinal_state, chunks)
    inputs = gradients(q, k, v, g, beta, do, prepared, chains, chunks, scale=scale, normalize=use_qk_l2norm_in_kernel)
    dinitial_states = chains.dinitial_state.unflatten(0, (chunks.documents, chunks.spans))
    return *inputs, dinitial_states[:, 0].contiguous()


def _split(chunks: Chunks, k: torch.Tensor, v: torch.Tensor) -> Chunks:
    # A fold holds M in fp32 in shared memory, which [256, 256] exceeds.
    return chunks if k.shape[-1] > 128 else split(chunks, *v.shape[2:])


def _summaries(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: Chunks, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """M and h of every span."""
    prepared = prepare(None, k, g, beta, chunks, mode=SUMMARY, scale=1.0, normalize=normalize)
    return transitions(k, v, prepared, chunks)


def _check(k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuses what no launch was verified for, from metadata alone."""
    refuse("triton", unserved_reason("triton", key_dim=k.shape[-1], value_dim=v.shape[-1], dtype=k.dtype))
    if k.shape[1] == 0:
        raise ValueError('T=0 is not served by gdn_backend="triton": drop the empty call, or use "eager"')


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
