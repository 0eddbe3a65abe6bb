"""The differentiable operator over the stage functions of a backend.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
"""

import torch

from .arguments import check_arguments, compute_dtype
from .backend import check_served, get_backend
from .operators import register
from .segments import segment_count


def _forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel, backend):
    check_served(backend, key_dim=k.shape[-1], value_dim=v.shape[-1], dtype=k.dtype, device=k.device)
    edge_states: list[torch.Tensor] = []
    o, final_state = get_backend(backend).forward(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        edge_states=edge_states,
    )
    final_state = final_state.contiguous()
    edges = torch.stack(edge_states) if edge_states else final_state.new_zeros(0, *final_state.shape)
    return o.contiguous(), final_state, edges


def _state(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Zeros [N, HV, K, V]."""
    states = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return k.new_zeros(states, v.shape[2], k.shape[3], v.shape[3], dtype=compute_dtype(k))


def _forward_fake(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel, backend):
    state = _state(k, v, cu_seqlens)
    count, documents = 1, None if cu_seqlens is None else state.shape[0]
    if backend != "eager":
        batch, seq_len, heads, value_dim = v.shape
        count = segment_count(batch, seq_len, heads, value_dim, k.shape[3], documents)
    edge = state if documents is None or count == 1 else state[:1]
    return v.new_zeros(v.shape), state, state.new_zeros(count - 1, *edge.shape)


def _setup_context(ctx, inputs, output):
    """Saves the inputs, and the states between segments.

    The states of all chunks would take K / C times the elements of v, in fp32; the backward computes them anew from the
    initial state and those.
    """
    *tensors, ctx.scale, ctx.use_qk_l2norm_in_kernel, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dfinal_state, _):
    """All gradients = stages.backward(...); those of q and k are summed over HV / H."""
    if do is None and dfinal_state is None:
        return (None,) * 10
    q, k, v, g, beta, initial_state, cu_seqlens, edges = ctx.saved_tensors
    *gradients, dinitial_state = _chunk_backward(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        v.new_zeros(v.shape) if do is None else do,
        dfinal_state,
        edges,
        cu_seqlens,
        ctx.scale,
        ctx.use_qk_l2norm_in_kernel,
        ctx.backend,
    )
    return *gradients, None if initial_state is None else dinitial_state, None, None, None, None


def _gradients(
    q, k, v, g, beta, initial_state, do, dfinal_state, edges, cu_seqlens, scale, use_qk_l2norm_in_kernel, backend
):
    *gradients, dinitial_state = get_backend(backend).backward(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        do,
        dfinal_state,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        edge_states=edges.unbind(),
    )
    if initial_state is not None:
        dinitial_state = dinitial_state.to(initial_state.dtype)
    inputs = (q, k, v, g, beta)
    gradients = [dx.to(x.dtype).contiguous() for dx, x in zip(gradients, inputs, strict=True)]
    return *gradients, dinitial_state.contiguous()


def _gradients_fake(
    q, k, v, g, beta, initial_state, do, dfinal_state, edges, cu_seqlens, scale, use_qk_l2norm_in_kernel, backend
):
    dinitial_state = _state(k, v, cu_seqlens)
    if initial_state is not None:
        dinitial_state = initial_state.new_zeros(initial_state.shape)
    return *(x.new_zeros(x.shape) for x in (q, k, v, g, beta)), dinitial_state


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state"
_OPTIONS = "Tensor? cu_seqlens, float scale, bool use_qk_l2norm_in_kernel, str backend"
_chunk = register(
    f"gdn_chunk({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", _forward, _forward_fake, _setup_context, _backward
)
_chunk_backward = register(
    f"gdn_chunk_backward({_INPUTS}, Tensor do, Tensor? dfinal_state, Tensor edges, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "eager",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule, chunk by chunk, with gradients of all inputs and of the initial state.

    S_t = e^{g_t} S_{t-1} + k_t beta_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,  o_t = scale S_t^T q_t

    Args:
        q, k: [B, T, H, K], floating. Keys must satisfy beta |k|^2 <= 2, as normalised keys do: see README.md.
        v: [B, T, HV, V], q's dtype; value head j reads key head j // (HV / H).
        g: [B, T, HV], log-decay (natural log, per token). beta: [B, T, HV], step size.
        scale: factor on q; None is K^-1/2.
        initial_state: [N, HV, K, V], the state before the first token; None is zeros.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: L2-normalise q and k first; gradients are those of the raw q and k.
        cu_seqlens: [N+1], int32 or int64, with B = 1: one state a document, empty documents allowed.
        backend: name of the stage functions, see `get_backend`.
    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] (fp32, or fp64 for fp64 input) or None.
    Raises:
        ValueError: a shape, dtype, device or offset outside the above, or a backend that is unknown or cannot run.
    Source: Gated Delta Networks, arXiv:2412.06464, section 3.3; README.md has the equations of every stage.
    """
    check_arguments(q, k, v, g, beta, initial_state, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o, final_state, _ = _chunk(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel, backend)
    return o, final_state if output_final_state else None
