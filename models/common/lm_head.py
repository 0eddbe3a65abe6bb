"""The output projection of a patched model: logits as stock, or the loss of its tokens without their logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_cp.class_swap import is_patched
from hf_cp.compilation import outside_graphs
from hf_cp.kernels.linear_cross_entropy import linear_cross_entropy_sum
from hf_cp.loss import token_loss_sum
from hf_cp.regions import region

# Tokens at a time where the projection is not a plain linear layer and runs as a module.
_MODULE_CHUNK = 1024
# Tracing does not know its products into given memory, in another dtype.
_linear_cross_entropy_sum = outside_graphs(linear_cross_entropy_sum)


def forward(
    module: Any,
    stock_forward: Any,
    hidden_states: torch.Tensor,
    cp_targets: torch.Tensor | None = None,
    cp_label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Logits; with targets the sum of their cross-entropies.

    The loss is computed inside this call because FSDP gathers the weight around it.

    Args:
        hidden_states: ``[B, L, D]``.
        cp_targets: int64 ``[B, L]``, already shifted.
        cp_label_smoothing: share of a target that is spread evenly over the vocabulary.

    Returns:
        ``[B, L, vocab]``, or with targets a scalar in fp32 (fp64 for fp64 inputs).
    """
    if cp_targets is None:
        return stock_forward(module, hidden_states)
    return _linear_cross_entropy_sum(
        hidden_states.flatten(0, 1),
        module.weight,
        cp_targets.flatten(),
        bias=module.bias,
        label_smoothing=cp_label_smoothing,
        backend=module.hf_cp_cross_entropy,
    )


def loss_sum(
    lm_head: nn.Module, hidden_states: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Sum of the cross-entropies of ``[B, L]`` targets, never with more than a chunk of logits.

    A projection that something else has wrapped or replaced (LoRA, a quantised layer) is called as a module, its chunks
    recomputed in backward.
    """
    if is_patched(lm_head):
        with region("head"):
            return lm_head(hidden_states, cp_targets=targets, cp_label_smoothing=label_smoothing)

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_loss_sum(lm_head(hidden), labels, label_smoothing)

    chunks = zip(hidden_states.split(_MODULE_CHUNK, 1), targets.split(_MODULE_CHUNK, 1), strict=True)
    with region("head"):
        sums = [checkpoint(chunk_loss, hidden, labels, use_reentrant=False) for hidden, labels in chunks]
        return torch.stack(sums).sum()
