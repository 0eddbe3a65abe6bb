"""Stage functions of the chunked gated delta rule as Triton kernels for Hopper GPUs.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
They compute what the functions of the same names in `eager` compute; README.md says in which steps, and how fast.
"""

import torch

from .chunks import cut
from .gradients import gradients
from .prepare import GRADIENT, OUTPUT, SUMMARY, prepare
from .state import outputs, reverse, transitions


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
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    initial_state = _contiguous(initial_state)
    chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
    prepared = prepare(q, k, g, beta, chunks, mode=OUTPUT, scale=scale, normalize=use_qk_l2norm_in_kernel)
    return outputs(q, k, v, prepared, initial_state, chunks)


def summary(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """M and h of a span: final_state = M @ initial_state + h; see `eager.summary`."""
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
    q, k, v, g, beta, do = (x.contiguous() for x in (q, k, v, g, beta, do))
    initial_state, dfinal_state = _contiguous(initial_state), _contiguous(dfinal_state)
    chunks = cut(k.shape[0], k.shape[1], cu_seqlens)
    prepared = prepare(q, k, g, beta, chunks, mode=GRADIENT, scale=scale, normalize=use_qk_l2norm_in_kernel)
    chains = reverse(q, k, v, do, prepared, initial_state, dfinal_state, chunks)
    inputs = gradients(q, k, v, g, beta, do, prepared, chains, chunks, scale=scale, normalize=use_qk_l2norm_in_kernel)
    return *inputs, chains.dinitial_state


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
