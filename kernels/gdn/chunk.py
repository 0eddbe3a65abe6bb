"""The differentiable operator over the stage functions of a backend.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .arguments import check_arguments
from .backend import Stages, get_backend


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """Gated delta rule with the stage functions' own backward.

    ==================  ================  ===========================
    tensor              shape             gradient
    ==================  ================  ===========================
    q, k                [B, T, H, K]      dq, dk, summed over HV / H
    v, o                [B, T, HV, V]     dv, do
    g, beta             [B, T, HV]        dg, dbeta
    initial_state       [N, HV, K, V]     dinitial_state
    final_state         [N, HV, K, V]     dfinal_state
    ==================  ================  ===========================

    Forward: o, final_state = stages.forward(...). Backward: all gradients = stages.backward(...).
    Saved: the inputs alone. The states of all chunks would take K / C times the elements of v, in fp32; the backward
    computes them anew from the initial state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        scale: float,
        use_qk_l2norm_in_kernel: bool,
        stages: Stages,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens)
        ctx.stages = stages
        ctx.scale = scale
        ctx.use_qk_l2norm_in_kernel = use_qk_l2norm_in_kernel
        ctx.set_materialize_grads(False)
        return stages.forward(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dfinal_state: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, initial_state, cu_seqlens = ctx.saved_tensors
        if do is None and dfinal_state is None:
            return (None,) * 10
        dq, dk, dv, dg, dbeta, dinitial_state = ctx.stages.backward(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            v.new_zeros(v.shape) if do is None else do,
            dfinal_state,
            scale=ctx.scale,
            use_qk_l2norm_in_kernel=ctx.use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )
        dinitial_state = None if initial_state is None else dinitial_state.to(initial_state.dtype)
        return dq, dk, dv, dg, dbeta, dinitial_state, None, None, None, None


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
    o, final_state = _ChunkGatedDeltaRule.apply(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel, get_backend(backend)
    )
    return o, final_state if output_final_state else None
