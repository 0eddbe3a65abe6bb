"""Argument checks shared by the reference and the operator.

B batch, T tokens, H key heads, HV value heads, K/V head dims, N states (B, or the number of documents).
"""

from itertools import pairwise

import torch


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype that states and sums are held in: fp64 if any input is fp64, otherwise fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def document_bounds(cu_seqlens: torch.Tensor, seq_len: int) -> list[tuple[int, int]]:
    """First and past-the-last token of every document; waits for the device if `cu_seqlens` is on one.

    Args:
        cu_seqlens: [N+1], int32 or int64, token offsets; equal neighbours are an empty document.
        seq_len: T, the length that the last offset must equal.
    Returns:
        N pairs (start, stop).
    Raises:
        ValueError: the offsets do not rise from 0 to `seq_len`.
    """
    offsets = cu_seqlens.tolist()
    bounds = list(pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != seq_len or any(start > stop for start, stop in bounds):
        raise ValueError(
            f"cu_seqlens={_shortened(offsets)} does not rise from 0 to T={seq_len}: pass the offsets of all tokens"
        )
    return bounds


def check_cu_seqlens(cu_seqlens: torch.Tensor, batch: int) -> None:
    """Checks rank, dtype and batch of `cu_seqlens` without reading its values."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}: pass int32 or int64 offsets")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}: pass [num_docs + 1] with num_docs >= 1")
    if batch != 1:
        raise ValueError(f"cu_seqlens is given with batch size {batch}: pack the documents into one row (B = 1)")


def check_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    halo: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    activation: str | None,
) -> None:
    """Checks the arguments of the causal convolution, from metadata alone (never waits for a device).

    Args:
        x: [B, T, D]. weight: [D, k]. halo: [B, k-1, D] or None. cu_seqlens: [N+1] or None. activation: "silu" or None.
    Raises:
        ValueError: names the field, its value and the remedy.
    """
    if activation not in ("silu", None):
        raise ValueError(f'activation={activation!r} is unknown: pass "silu" or None')
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(f"x has shape {list(x.shape)}, weight {list(weight.shape)}: pass [B, T, D] and [D, k]")
    expected = [x.shape[0], weight.shape[1] - 1, x.shape[2]]
    if halo is not None and list(halo.shape) != expected:
        raise ValueError(f"halo has shape {list(halo.shape)}: pass [B, k - 1, D] = {expected}, or None")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x.shape[0])


def check_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Checks shapes, dtypes and devices, from metadata alone (never waits for a device).

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV]. All floating; q, k, v of one dtype.
        initial_state: [N, HV, K, V] or None. cu_seqlens: [N+1] or None.
    Raises:
        ValueError: names the field, its value and the remedy.
    """
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}: pass [B, T, H, K]")
    batch, seq_len, key_heads, key_dim = q.shape
    if k.shape != q.shape:
        raise ValueError(f"k has shape {list(k.shape)}, q has {list(q.shape)}: pass q and k of one shape [B, T, H, K]")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v has shape {list(v.shape)}: pass [B, T, HV, V] with B={batch}, T={seq_len} as in q")
    value_heads, value_dim = v.shape[2:]
    if min(key_heads, key_dim, value_heads, value_dim) == 0 or value_heads % key_heads:
        raise ValueError(
            f"v has {value_heads} heads of {value_dim}, q has {key_heads} heads of {key_dim}: "
            "pass non-zero sizes, the heads of v a multiple of those of q"
        )
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            raise ValueError(f"{name} has shape {list(x.shape)}: pass [B, T, HV] = {list(v.shape[:3])}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}: cast them to one dtype")
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    states = batch
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch)
        states = cu_seqlens.numel() - 1
    if initial_state is not None:
        expected = [states, value_heads, key_dim, value_dim]
        if list(initial_state.shape) != expected:
            raise ValueError(f"initial_state has shape {list(initial_state.shape)}: pass [N, HV, K, V] = {expected}")
        tensors["initial_state"] = initial_state
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}: pass a floating dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: move them to one device")


def _shortened(offsets: list[int]) -> str:
    return str(offsets) if len(offsets) <= 8 else f"[{str(offsets[:3])[1:-1]}, ..., {str(offsets[-3:])[1:-1]}]"
