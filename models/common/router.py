"""The load-balancing loss of a mixture of experts over a sequence whose tokens lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hf_cp.collectives import all_reduce_, reduce_sum
from hf_cp.mesh import CpMesh


def balance_loss(
    router_logits: Sequence[torch.Tensor], kept: torch.Tensor, mesh: CpMesh, *, experts_per_token: int
) -> torch.Tensor:
    """``E * sum_e f_e p_e``: the share of routed tokens of each expert times its mean probability.

    Both are taken over all layers and all kept tokens of the whole sequence: counts and sums are added over the group
    before they are multiplied. Every rank gets the same value; the gradient of the sums is the adjoint of an addition
    over ranks, so that averaged gradients are those of one device.

    Args:
        router_logits: one ``[B * L, E]`` a layer, this rank's tokens.
        kept: ``[B, L]``, one for each token that counts, zero for padding.
        mesh: the context-parallel group.
        experts_per_token: experts that a token is routed to.

    Returns:
        Scalar, fp32.

    Source: Switch Transformers, arXiv:2101.03961, equations (4) to (6).
    """
    weight = kept.reshape(-1, 1).to(router_logits[0].device, torch.float32)
    experts = router_logits[0].shape[-1]
    counts = weight.new_zeros(experts)
    sums = weight.new_zeros(experts)
    for logits in router_logits:
        probabilities = F.softmax(logits, dim=-1)
        chosen = probabilities.topk(experts_per_token, dim=-1).indices
        counts.scatter_add_(0, chosen.flatten(), weight.expand_as(chosen).flatten())
        sums = sums + (probabilities.float() * weight).sum(0)
    rows = weight.sum() * len(router_logits)
    totals = all_reduce_(torch.cat([counts, rows[None]]), mesh)
    counts, rows = totals[:-1], totals[-1]
    return experts * (counts / rows * reduce_sum(sums, mesh) / rows).sum()
