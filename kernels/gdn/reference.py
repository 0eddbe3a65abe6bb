"""Plain torch definitions of the layer's operators, differentiable by autograd: what every kernel is tested against.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
Lower dtypes are computed in fp32, fp64 in fp64 (the gated delta rule goes by k).
"""

import torch
import torch.nn.functional as F

from .arguments import check_arguments, check_convolution, compute_dtype, document_bounds

L2NORM_EPS = 1e-6


def l2norm(x: torch.Tensor, eps: float = L2NORM_EPS) -> torch.Tensor:
    """L2 normalisation over the last dim: x / sqrt(sum x^2 + eps). A zero vector stays zero.

    Args:
        x: [..., D], floating.
    Returns:
        Like x.
    """
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def gate(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Log-decay of each token: g = -exp(A_log) softplus(a + dt_bias), natural log, not cumulative.

    Args:
        a: [B, T, HV], floating. A_log, dt_bias: [HV], floating.
    Returns:
        [B, T, HV], fp32 (fp64 if an input is fp64), at most 0.
    Source: Gated Delta Networks, arXiv:2412.06464, section 3.4 (the gate of Mamba-2).
    """
    dtype = compute_dtype(a, A_log, dt_bias)
    return -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    halo: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Causal depthwise convolution, each channel over the last k tokens of the token's own document.

    y_t = act(sum_j weight[:, j] x_{t-k+1+j}), tokens before the document counting as zero.

    Args:
        x: [B, T, D], floating. weight: [D, k], the last tap on the token itself.
        halo: [B, k-1, D], the tokens before token 0, of document 0 alone; None is zeros. The caller zeroes it when
            no document continues from before token 0.
        cu_seqlens: [N+1], int32 or int64, with B = 1; None is one document a row.
        activation: "silu" or None.
    Returns:
        [B, T, D] in x's dtype.
    Raises:
        ValueError: a shape, dtype, offset or activation outside the above.
    """
    check_convolution(x, weight, halo, cu_seqlens, activation)
    batch, seq_len, channels = x.shape
    taps = weight.shape[1]
    if halo is None:
        halo = x.new_zeros(batch, taps - 1, channels)
    document = torch.zeros(seq_len, dtype=torch.int64, device=x.device)
    if cu_seqlens is not None:
        # Offsets on a GPU are not read by the host: that would wait for the device in every layer.
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            document_bounds(cu_seqlens, seq_len)
        index = torch.arange(seq_len, dtype=cu_seqlens.dtype, device=x.device)
        document = torch.searchsorted(cu_seqlens[1:].to(x.device), index, right=True)
    source = F.pad(document, (taps - 1, 0))

    dtype = compute_dtype(x, weight)
    extended = torch.cat([halo.to(dtype), x.to(dtype)], dim=1)
    y = x.new_zeros(x.shape, dtype=dtype)
    for tap in range(taps):
        window = slice(tap, tap + seq_len)
        own = (source[window] == document)[None, :, None]
        y = y + weight[:, tap].to(dtype) * torch.where(own, extended[:, window], 0)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gated RMS norm over the last dim: x / sqrt(mean x^2 + eps) * weight * silu(z).

    Rounds where transformers' gated norms do: the normed x to x's dtype, before the weight, and the result.

    Args:
        x, z: [..., V], floating. weight: [V], floating.
    Returns:
        [..., V] in x's dtype.
    """
    dtype = compute_dtype(x, z, weight)
    wide = x.to(dtype)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed * F.silu(z.to(dtype))).to(x.dtype)


def recurrent_gated_delta_rule(
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule, one token after another.

    S_t = e^{g_t} S_{t-1} + k_t beta_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,  o_t = scale S_t^T q_t

    Args:
        q, k: [B, T, H, K], floating.
        v: [B, T, HV, V], q's dtype; value head j reads key head j // (HV / H).
        g: [B, T, HV], log-decay (natural log, per token). beta: [B, T, HV], step size.
        scale: factor on q; None is K^-1/2.
        initial_state: [N, HV, K, V], the state before the first token; None is zeros.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: L2-normalise q and k first.
        cu_seqlens: [N+1], int32 or int64, with B = 1: one state a document, empty documents allowed.
    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] (fp32, or fp64 for fp64 input) or None.
    Raises:
        ValueError: a shape, dtype, device or offset outside the above.
    Source: Gated Delta Networks, arXiv:2412.06464, equation 10.
    """
    check_arguments(q, k, v, g, beta, initial_state, cu_seqlens)
    batch, seq_len, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // key_heads
    dtype = compute_dtype(k)
    factor = key_dim**-0.5 if scale is None else scale

    q, k, wide_v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(group, dim=2) for x in (q * factor, k))
    decay = g.exp()

    bounds = [(0, seq_len)] if cu_seqlens is None else document_bounds(cu_seqlens, seq_len)
    rows = batch if cu_seqlens is None else 1
    outputs, states = [wide_v[:, :0]], []
    for document, (start, stop) in enumerate(bounds):
        if initial_state is None:
            state = wide_v.new_zeros(rows, value_heads, key_dim, value_dim)
        else:
            state = initial_state[document * rows : (document + 1) * rows].to(dtype)
        for t in range(start, stop):
            key = k[:, t, :, :, None]
            state = decay[:, t, :, None, None] * state
            error = wide_v[:, t] - (key * state).sum(-2)
            state = state + key * (beta[:, t, :, None] * error)[..., None, :]
            outputs.append((q[:, t, :, :, None] * state).sum(-2)[:, None])
        states.append(state)
    o = torch.cat(outputs, dim=1).to(v.dtype)
    return o, torch.cat(states) if output_final_state else None
