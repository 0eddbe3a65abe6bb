"""Stage functions of the chunked gated delta rule in plain torch, on any device.

B batch, T tokens, H key heads, HV value heads, G = HV / H group, K/V head dims, C chunk, n chunks,
N states (B, or the number of documents). Shapes inside: keys [B, H, 1, n, C, K], values [B, H, G, n, C, V], states
[B, H, G, K, V], so that what depends on keys alone is computed once a key head. README.md maps the names to the
equations. States and sums are fp32 (fp64 where k is fp64), also under autocast.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .arguments import compute_dtype, document_bounds
from .reference import L2NORM_EPS

CHUNK = 64
# Tokens whose [C, C] blocks and chunk states exist at once: bounds memory for a long T.
SEGMENT = 32 * CHUNK


class _Span(NamedTuple):
    """A run of tokens of one document, and the rows of the state that it continues."""

    tokens: slice
    states: slice


class _Gates(NamedTuple):
    """Decays within the chunks of a span, none of which exceeds 1."""

    pair: torch.Tensor  # [B, H, G, n, C, C], from after token j to token i, 0 for j > i
    begin: torch.Tensor  # [B, H, G, n, C, 1], from the chunk's start to token i
    end: torch.Tensor  # [B, H, G, n, C, 1], from after token i to the chunk's end
    chunk: torch.Tensor  # [B, H, G, n, 1, 1], over the whole chunk


class _Scan(NamedTuple):
    """What each chunk of a span saw while the state ran forward through it."""

    states: torch.Tensor  # [B, H, G, n, K, V], before the chunk
    errors: torch.Tensor  # [B, H, G, n, C, V], v less what the state before the chunk predicts of it
    values: torch.Tensor  # [B, H, G, n, C, V], what is written for each key
    final_state: torch.Tensor  # [B, H, G, K, V]


class _ReverseScan(NamedTuple):
    """What each chunk of a span saw while the state's gradient ran backward through it."""

    dstates: torch.Tensor  # [B, H, G, n, K, V], of the state after the chunk
    derrors: torch.Tensor  # [B, H, G, n, C, V]
    dvalues: torch.Tensor  # [B, H, G, n, C, V]
    dinitial_state: torch.Tensor  # [B, H, G, K, V]


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
    edge_states: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states of the gated delta rule.

    W = V - E∘(K S),  V' = A_g W,  O = s E∘(Q S) + P V',  S <- e^Γ S + K^T (R∘V')

    Args:
        q, k: [B, T, H, K], floating. v: [B, T, HV, V]. g, beta: [B, T, HV].
        scale: factor s on q.
        initial_state: [N, HV, K, V], or None for zeros.
        use_qk_l2norm_in_kernel: L2-normalise q and k first.
        cu_seqlens: [N+1], int32 or int64, with B = 1: one state a document.
        edge_states: not used.
    Returns:
        o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] in fp32 (fp64 where k is).
    Raises:
        ValueError: cu_seqlens does not rise from 0 to T.
    Source: Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    with _exact(k):
        final_state = _states(initial_state, k, v, cu_seqlens)
        o = v.new_zeros(v.shape)
        for tokens, rows in _spans(k, cu_seqlens):
            queries, keys = _split_qk(q[:, tokens], k[:, tokens], use_qk_l2norm_in_kernel)
            values, gates, beta_rows = _split_values(keys, v[:, tokens], g[:, tokens], beta[:, tokens])
            gated_inverse = _gated_inverse(_inverse(keys, beta_rows), gates, beta_rows)
            scan = _scan(keys, values, gates, gated_inverse, _group(final_state[rows], k))
            out = scale * gates.begin * (queries @ scan.states) + _attention(queries, keys, gates, scale) @ scan.values
            o[:, tokens] = _join(out, _length(tokens)).to(v.dtype)
            final_state[rows] = scan.final_state.flatten(1, 2)
        return o, final_state


def summary(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The span as an affine map of its state: final_state = M @ initial_state + h.

    M = e^{sum g} (I - X_n^T K_n) ... (I - X_1^T K_1),  X = diag(beta) A^T K;  h is the final state from zeros.

    Args:
        k: [B, T, H, K], floating. v: [B, T, HV, V]. g, beta: [B, T, HV]. One document a row.
        use_qk_l2norm_in_kernel: L2-normalise k first.
    Returns:
        M [B, HV, K, K] and h [B, HV, K, V], fp32 (fp64 where k is).
    """
    with _exact(k):
        h = _states(None, k, v, None)
        batch, _, key_heads, key_dim = k.shape
        transition = torch.eye(key_dim, dtype=h.dtype, device=k.device)
        transition = transition.expand(batch, key_heads, v.shape[2] // key_heads, -1, -1)
        for tokens, rows in _spans(k, None):
            _, keys = _split_qk(None, k[:, tokens], use_qk_l2norm_in_kernel)
            values, gates, beta_rows = _split_values(keys, v[:, tokens], g[:, tokens], beta[:, tokens])
            inverse = _inverse(keys, beta_rows)
            gated_inverse = _gated_inverse(inverse, gates, beta_rows)
            h[rows] = _scan(keys, values, gates, gated_inverse, _group(h[rows], k)).final_state.flatten(1, 2)
            written = beta_rows * (inverse.mT @ keys)
            for chunk in range(keys.shape[3]):
                transition = transition - written[:, :, :, chunk].mT @ (keys[:, :, :, chunk] @ transition)
        # The gate is a scalar that commutes with every factor, so the product itself is free of it.
        decay = g.to(h.dtype).sum(1).exp()[..., None, None]
        return decay * transition.flatten(1, 2), h


def backward_state(
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
    """Gradient of the span's initial state that comes through its outputs alone.

    d_initial_state = M^T d_final_state + dh, M being `summary`'s. From dS = 0, last chunk first:
    dV' = P^T dO + R∘(K dS),  dW = A_g^T dV',  dS <- e^Γ dS + s Q^T (E∘dO) - K^T (E∘dW)

    Args:
        q, k: [B, T, H, K], floating. g, beta: [B, T, HV]. do: [B, T, HV, V]. One document a row.
        scale: factor s on q.
        use_qk_l2norm_in_kernel: L2-normalise q and k first.
        keep: not used.
    Returns:
        dh [B, HV, K, V], fp32 (fp64 where k is).
    """
    with _exact(k):
        dh = _states(None, k, do, None)
        for tokens, rows in reversed(_spans(k, None)):
            queries, keys = _split_qk(q[:, tokens], k[:, tokens], use_qk_l2norm_in_kernel)
            dout, gates, beta_rows = _split_values(keys, do[:, tokens], g[:, tokens], beta[:, tokens])
            gated_inverse = _gated_inverse(_inverse(keys, beta_rows), gates, beta_rows)
            attention = _attention(queries, keys, gates, scale)
            reverse = _reverse_scan(queries, keys, dout, gates, gated_inverse, attention, scale, _group(dh[rows], k))
            dh[rows] = reverse.dinitial_state.flatten(1, 2)
        return dh


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
    edge_states: Sequence[torch.Tensor] = (),
    kept: list[Any] | None = None,
    state_ready: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of all inputs; the states are recomputed from `initial_state`.

    The equations are those of `_backward_span` and, with L2 normalisation y = x r, dx = r (dy - y <y, dy>).

    Args:
        q, k: [B, T, H, K], floating. v, do: [B, T, HV, V]. g, beta: [B, T, HV].
        initial_state, dfinal_state: [N, HV, K, V], or None for zeros. With states merged across ranks this is the
            merged state, not the caller's.
        scale, use_qk_l2norm_in_kernel, cu_seqlens: as in `forward`.
        edge_states, kept: not used. state_ready: takes dinitial_state.
    Returns:
        dq, dk, dv, dg, dbeta in the shapes and dtypes of their inputs (dq, dk summed over the value heads of a key
        head), dinitial_state [N, HV, K, V] in fp32 (fp64 where k is).
    Raises:
        ValueError: cu_seqlens does not rise from 0 to T.
    """
    with _exact(k):
        spans = _spans(k, cu_seqlens)
        entering = []
        state = _states(initial_state, k, v, cu_seqlens)
        for index, (tokens, rows) in enumerate(spans):
            entering.append(_group(state[rows].clone(), k))
            # Only a span that continues in the next one has a final state that is needed here.
            if index + 1 < len(spans) and spans[index + 1].states == rows:
                _, keys = _split_qk(None, k[:, tokens], use_qk_l2norm_in_kernel)
                values, gates, beta_rows = _split_values(keys, v[:, tokens], g[:, tokens], beta[:, tokens])
                gated_inverse = _gated_inverse(_inverse(keys, beta_rows), gates, beta_rows)
                state[rows] = _scan(keys, values, gates, gated_inverse, entering[-1]).final_state.flatten(1, 2)

        grads = tuple(x.new_zeros(x.shape) for x in (q, k, v, g, beta))
        dstate = _states(dfinal_state, k, v, cu_seqlens)
        for (tokens, rows), initial in zip(reversed(spans), reversed(entering), strict=True):
            *dinputs, dinitial = _backward_span(
                q[:, tokens],
                k[:, tokens],
                v[:, tokens],
                g[:, tokens],
                beta[:, tokens],
                initial,
                do[:, tokens],
                _group(dstate[rows], k),
                scale,
                use_qk_l2norm_in_kernel,
            )
            for grad, dinput in zip(grads, dinputs, strict=True):
                grad[:, tokens] = dinput.to(grad.dtype)
            dstate[rows] = dinitial.flatten(1, 2)
        if state_ready is not None:
            state_ready(dstate)
        dq, dk, dv, dg, dbeta = grads
        return dq, dk, dv, dg, dbeta, dstate


def _backward_span(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    do: torch.Tensor,
    dstate: torch.Tensor,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of one span, given the state that enters it and the gradient of the state that leaves it.

    dP = dO V'^T,  dA_g = dV' W^T,  dA = dA_g∘D, columns times beta,  dL = -tril(A^T dA A^T, -1),  N = s dP∘D
    dv = dW,  dq = s E∘(dO S^T) + N K,  dk = U - (E∘dW) S^T + N^T Q + beta∘(dL K) + dL^T (beta∘K),  U = (R∘V') dS^T
    dbeta_j = sum_i (dA_g∘A∘D)_ij + sum_i dL_ji <k_j, k_i>
    dg as in `_gate_gradient`, with Z = dP∘P + dA_g∘A_g
    """
    queries, keys = _split_qk(q, k, use_qk_l2norm_in_kernel)
    values, gates, beta_rows = _split_values(keys, v, g, beta)
    dout = _split(do, q.shape[2], values.dtype)
    inverse = _inverse(keys, beta_rows)
    gated_inverse = _gated_inverse(inverse, gates, beta_rows)
    attention = _attention(queries, keys, gates, scale)
    scan = _scan(keys, values, gates, gated_inverse, state)
    reverse = _reverse_scan(queries, keys, dout, gates, gated_inverse, attention, scale, dstate)

    dattention = dout @ scan.values.mT
    dgated_inverse = reverse.dvalues @ scan.errors.mT
    dinverse_beta = dgated_inverse * gates.pair
    dsystem = -(inverse.mT @ (dinverse_beta * beta_rows.mT) @ inverse.mT).tril(-1)
    dscores = scale * dattention * gates.pair

    dout_begin = gates.begin * dout
    derrors_begin = gates.begin * reverse.derrors
    dkeys_written = (gates.end * scan.values) @ reverse.dstates.mT
    dqueries = scale * (dout_begin @ scan.states.mT) + dscores @ keys
    dkeys = (
        dkeys_written
        - derrors_begin @ scan.states.mT
        + dscores.mT @ queries
        + beta_rows * (dsystem @ keys)
        + dsystem.mT @ (beta_rows * keys)
    )
    dbeta = (dinverse_beta * inverse).sum(-2) + (dsystem * (keys @ keys.mT)).sum(-1)
    dg = _gate_gradient(
        dpair=dattention * attention + dgated_inverse * gated_inverse,
        dbegin=(scale * dout_begin * (queries @ scan.states) - derrors_begin * (keys @ scan.states)).sum(-1),
        dend=(keys * dkeys_written).sum(-1),
        dchunk=(gates.chunk * reverse.dstates * scan.states).sum((-2, -1))[..., None],
    )

    length = q.shape[1]
    dq, dk = (_join(x.sum(2, keepdim=True), length) for x in (dqueries, dkeys))
    if use_qk_l2norm_in_kernel:
        dq, dk = _l2norm_gradient(q, dq), _l2norm_gradient(k, dk)
    dv, dg, dbeta = (_join(x, length) for x in (reverse.derrors, dg, dbeta))
    return dq, dk, dv, dg, dbeta, reverse.dinitial_state


def _gate_gradient(dpair: torch.Tensor, dbegin: torch.Tensor, dend: torch.Tensor, dchunk: torch.Tensor) -> torch.Tensor:
    """dg_l = sum_{i >= l > j} Z_ij + sum_{i >= l} dbegin_i + sum_{i < l} dend_i + dchunk, within a chunk.

    Each term is the gradient of the log of one decay of `_Gates`, given to the tokens that the decay spans. Summing
    row and column sums of Z first would be shorter, and under a strong decay would cancel all digits.

    Args:
        dpair: [..., C, C]. dbegin, dend: [..., C]. dchunk: [..., 1].
    Returns:
        [..., C]
    """
    across = dpair.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
    return across + dbegin.flip(-1).cumsum(-1).flip(-1) + F.pad(dend[..., :-1], (1, 0)).cumsum(-1) + dchunk


def _scan(
    keys: torch.Tensor, values: torch.Tensor, gates: _Gates, gated_inverse: torch.Tensor, state: torch.Tensor
) -> _Scan:
    """W = V - E∘(K S),  V' = A_g W,  S <- e^Γ S + K^T (R∘V'), chunk after chunk."""
    states, errors, written = [], [], []
    for chunk in range(keys.shape[3]):
        key = keys[:, :, :, chunk]
        states.append(state)
        errors.append(values[:, :, :, chunk] - gates.begin[:, :, :, chunk] * (key @ state))
        written.append(gated_inverse[:, :, :, chunk] @ errors[-1])
        state = gates.chunk[:, :, :, chunk] * state + key.mT @ (gates.end[:, :, :, chunk] * written[-1])
    return _Scan(torch.stack(states, 3), torch.stack(errors, 3), torch.stack(written, 3), state)


def _reverse_scan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    dout: torch.Tensor,
    gates: _Gates,
    gated_inverse: torch.Tensor,
    attention: torch.Tensor,
    scale: float,
    dstate: torch.Tensor,
) -> _ReverseScan:
    """dV' = P^T dO + R∘(K dS),  dW = A_g^T dV',  dS <- e^Γ dS + s Q^T (E∘dO) - K^T (E∘dW), last chunk first."""
    local = attention.mT @ dout
    dstates, derrors, dvalues = [], [], []
    for chunk in reversed(range(keys.shape[3])):
        key, begin = keys[:, :, :, chunk], gates.begin[:, :, :, chunk]
        dstates.append(dstate)
        dvalues.append(local[:, :, :, chunk] + gates.end[:, :, :, chunk] * (key @ dstate))
        derrors.append(gated_inverse[:, :, :, chunk].mT @ dvalues[-1])
        dstate = (
            gates.chunk[:, :, :, chunk] * dstate
            + scale * queries[:, :, :, chunk].mT @ (begin * dout[:, :, :, chunk])
            - key.mT @ (begin * derrors[-1])
        )
    dstates, derrors, dvalues = (torch.stack(x[::-1], 3) for x in (dstates, derrors, dvalues))
    return _ReverseScan(dstates, derrors, dvalues, dstate)


def _inverse(keys: torch.Tensor, beta_rows: torch.Tensor) -> torch.Tensor:
    """A = (I + tril(diag(beta) K K^T, -1))^-1 of every chunk, free of the gate: [B, H, G, n, C, C]."""
    system = (beta_rows * (keys @ keys.mT)).tril(-1)
    identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True)


def _gated_inverse(inverse: torch.Tensor, gates: _Gates, beta_rows: torch.Tensor) -> torch.Tensor:
    """A_g = A∘D, columns times beta."""
    return inverse * gates.pair * beta_rows.mT


def _attention(queries: torch.Tensor, keys: torch.Tensor, gates: _Gates, scale: float) -> torch.Tensor:
    """P = s (Q K^T)∘D."""
    return scale * (queries @ keys.mT) * gates.pair


def _gates(g: torch.Tensor) -> _Gates:
    """Decays of the chunks from the log-decays g [B, H, G, n, C] of their tokens.

    The logs of D sum just the tokens between j and i: as differences of one running sum they would carry the rounding
    of the whole chunk's decay, and above the diagonal exp would overflow. Here the logs above it are 0.
    """
    pair = g[..., None].expand(*g.shape, g.shape[-1]).tril(-1).cumsum(-2).exp().tril()
    begin = g.cumsum(-1).exp()[..., None]
    return _Gates(pair, begin, pair[..., -1:, :].mT, begin[..., -1:, :])


def _split(x: torch.Tensor, key_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, heads, ...] to [B, H, heads / H, n, C, ...], zero-padded to whole chunks (of T tokens, if T < CHUNK).

    A padded token has g = 0, beta = 0 and zero vectors: it leaves states, and gradients of states, as they are.
    """
    size = min(CHUNK, x.shape[1])
    padding = x.new_zeros(x.shape[0], -x.shape[1] % size, *x.shape[2:])
    x = torch.cat([x, padding], dim=1).to(dtype).unflatten(1, (-1, size)).unflatten(3, (key_heads, -1))
    return x.movedim((3, 4), (1, 2)).contiguous()


def _join(x: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of `_split`: [B, H, heads / H, n, C, ...] to [B, length, heads, ...]."""
    return x.movedim((1, 2), (3, 4)).flatten(3, 4).flatten(1, 2)[:, :length]


def _split_qk(
    q: torch.Tensor | None, k: torch.Tensor, use_qk_l2norm_in_kernel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a span, normalised if asked; without q the keys stand for both."""
    dtype = compute_dtype(k)
    keys = _split(k, k.shape[2], dtype)
    queries = keys if q is None else _split(q, k.shape[2], dtype)
    if use_qk_l2norm_in_kernel:
        queries, keys = (x * _inverse_norm(x) for x in (queries, keys))
    return queries, keys


def _split_values(
    keys: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, _Gates, torch.Tensor]:
    """Values (or their gradients), gates and beta as a row scale [B, H, G, n, C, 1], of a span."""
    values, g, beta = (_split(x, keys.shape[1], keys.dtype) for x in (v, g, beta))
    return values, _gates(g), beta[..., None]


def _inverse_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def _l2norm_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """dx = r (dy - y <y, dy>) for y = x r, r = (|x|^2 + eps)^-1/2."""
    x = x.to(dy.dtype)
    inverse_norm = _inverse_norm(x)
    y = x * inverse_norm
    return inverse_norm * (dy - y * (y * dy).sum(-1, keepdim=True))


def _spans(k: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[_Span]:
    """The runs of at most SEGMENT tokens of one document, in order; an empty document has none."""
    batch, seq_len = k.shape[:2]
    if cu_seqlens is None:
        documents = [(0, seq_len, slice(0, batch))]
    else:
        documents = [(*bounds, slice(n, n + 1)) for n, bounds in enumerate(document_bounds(cu_seqlens, seq_len))]
    return [
        _Span(slice(begin, min(begin + SEGMENT, stop)), rows)
        for start, stop, rows in documents
        for begin in range(start, stop, SEGMENT)
    ]


def _states(
    source: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """A fresh [N, HV, K, V] in the compute dtype, holding `source` or zeros."""
    if source is not None:
        return source.to(compute_dtype(k), copy=True, memory_format=torch.contiguous_format)
    states = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    return torch.zeros(states, v.shape[2], k.shape[3], v.shape[3], dtype=compute_dtype(k), device=k.device)


def _group(state: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, HV, K, V] as [B, H, G, K, V]."""
    return state.unflatten(1, (k.shape[2], -1))


def _length(tokens: slice) -> int:
    return tokens.stop - tokens.start


@contextmanager
def _exact(k: torch.Tensor) -> Iterator[None]:
    """No graph is recorded, and autocast does not lower the dtype of a product."""
    with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
        yield
