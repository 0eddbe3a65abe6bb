"""The causal language-model loss over a sequence whose tokens lie on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .collectives import all_reduce_
from .compilation import outside_graphs
from .mesh import CpMesh

IGNORE_INDEX = -100


class TrainerItemCount:
    """``num_items_in_batch`` as Trainer counts it under context parallelism, and a sign that it is Trainer's.

    Trainer divides the count by the number of ranks that share a sequence, and multiplies the loss by the world size.
    Being neither a tensor nor a container of tensors, it passes FSDP's mixed precision, which would round a count of
    labels to the eight bits of bf16.

    Args:
        count: labels of the optimizer step over all ranks, copies included, divided by the ranks of a group.
        across_devices: Trainer counted over all ranks, and multiplies the loss by their number; otherwise it counted
            one rank's labels, and leaves the loss alone.
        multiplied: the loss goes to Trainer's own ``compute_loss``, which multiplies; a user's does not.
        copies: ranks of a group.
    """

    def __init__(
        self, count: torch.Tensor | float, across_devices: bool = True, *, multiplied: bool = True, copies: int = 1
    ) -> None:
        self.count = count
        self.across_devices = across_devices
        self.multiplied = multiplied
        self.copies = copies

    @property
    def labels(self) -> torch.Tensor | float:
        """Labels of the step, each counted once: what a loss of the whole sequence is divided by."""
        return self.count if self.across_devices else self.count * self.copies

    def going_to_trainer(self) -> TrainerItemCount:
        """The same count for a loss that Trainer multiplies."""
        return TrainerItemCount(self.count, self.across_devices, copies=self.copies)

    def __rtruediv__(self, total: torch.Tensor) -> torch.Tensor:
        return total / self.labels

    def __float__(self) -> float:
        return float(self.labels)


def copies_added_up(num_items_in_batch: Any, mesh: CpMesh) -> int:
    """How many times too large Trainer makes a loss that every rank of a group computes alike, without an item count.

    Trainer multiplies by the world size where it counts items over all devices; only the count takes that back.
    """
    items = num_items_in_batch
    return mesh.cp_size if isinstance(items, TrainerItemCount) and items.across_devices and items.multiplied else 1


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Align labels with the positions that predict them: ``out[:, t] = labels[:, t + 1]``, the last is ignored.

    The shift happens on the whole sequence, before sharding: the target of a shard's last token is the first token of
    the next rank.

    Args:
        labels: int64 ``[B, T]`` of the whole sequence.

    Returns:
        int64 ``[B, T]``.
    """
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()


def token_loss_sum(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Sum of the cross-entropy of this rank's tokens, in fp32 (fp64 for fp64 logits).

    Args:
        logits: ``[B, L, vocab]``.
        targets: int64 ``[B, L]``, already shifted; ``-100`` is ignored. A rank with no target gives a zero that is
            still part of the graph, so that its backward sends the same messages as the others.
        label_smoothing: share of a target that is spread evenly over the vocabulary, in [0, 1).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


@outside_graphs
def scaled_loss(
    local_sum: torch.Tensor,
    valid_labels: torch.Tensor,
    mesh: CpMesh,
    *,
    num_items_in_batch: TrainerItemCount | torch.Tensor | float | None,
) -> torch.Tensor:
    """This rank's loss, scaled so that the *mean* of the gradients over the ranks is the gradient of one device.

    With ``W`` ranks in the group, each holding the sum ``s_r`` of its tokens' losses:

    ==================  =========================
    no item count       ``s_r * W / valid_labels``
    Trainer's count     ``s_r / N`` (``N`` is already divided by ``W``, and Trainer multiplies by the world size)
    anyone else's       ``s_r * W / N``
    ==================  =========================

    The value (not the gradient) is replaced by its mean over the group, so that every rank reports the loss of the
    whole batch. Without a valid label the loss and all gradients are zero, where stock gives NaN.

    Args:
        local_sum: scalar, sum over this rank's tokens.
        valid_labels: int64 scalar, number of targets in the whole sequence, equal on all ranks.
        num_items_in_batch: ``N``; ``None`` for the mean over this batch.

    Returns:
        Scalar, equal in value on all ranks of the group.
    """
    ranks, items = mesh.cp_size, num_items_in_batch
    if isinstance(items, TrainerItemCount):
        ranks, items = ranks if items.across_devices and not items.multiplied else 1, items.count
    count = torch.as_tensor(valid_labels if items is None else items, device=local_sum.device).to(local_sum.dtype)
    count = torch.where(count > 0, count, torch.ones_like(count))
    local = local_sum * ranks / count
    mean = all_reduce_(local.detach().clone(), mesh) / mesh.cp_size
    return local + (mean - local.detach())
