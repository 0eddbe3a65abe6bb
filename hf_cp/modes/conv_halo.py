"""The causal convolution in front of the delta rule, across rank edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives import shift
from ..context import CpContext
from ..kernels.gdn.layer import causal_conv1d


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, cp: CpContext, *, activation: str, widths: Sequence[int]
) -> list[torch.Tensor]:
    """Depthwise causal convolution of this rank's tokens, with the last ``k - 1`` of the previous rank in front.

    Communication: ``B * (k - 1) * D`` elements to the next rank, forward; as many gradients back.

    Args:
        x: ``[B, L, D]``, this rank's tokens; ``L >= k - 1`` (the layout pads up to it).
        weight: ``[D, k]``.
        activation: name of the activation behind it, e.g. ``"silu"``.
        widths: channels of each result, ``D`` together.

    Returns:
        ``[B, L, width]`` tensors.
    """
    halo = None
    width = weight.shape[-1] - 1
    if cp.mesh.cp_size > 1 and width > 0:
        halo = shift(x[:, -width:].contiguous(), cp.mesh)
        if not cp.documents.continues_from_previous and cp.mesh.previous_rank is not None:
            # A document begins here. The first rank's halo is zero; another's stays
            # in the graph: the neighbour waits for its gradient, a zero.
            halo = halo.masked_fill(torch.ones((), dtype=torch.bool, device=halo.device), 0.0)
    return causal_conv1d(
        x,
        weight,
        halo=halo,
        cu_seqlens=cp.documents.cu_seqlens,
        activation=activation,
        widths=widths,
        backend=cp.config.gdn_backend,
    )
