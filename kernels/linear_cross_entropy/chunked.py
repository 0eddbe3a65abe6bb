"""Cross-entropy of a linear head without the logits of all tokens.

At a vocabulary of 248,320 the logits of 32,768 tokens are 16 GB in bf16 and 32 GB in fp32. Here they exist for one
chunk of tokens at a time, and the gradients of hidden states and weight are made from them on the spot, so that
nothing has to be kept or computed again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# One chunk's logits in the accumulation dtype; with the copies beside them a chunk takes about twice this.
CHUNK_BYTES = 512 * 2**20
# Rows of the weight gradient that are computed at a time, as a share of the vocabulary.
WEIGHT_BLOCKS = 8


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum over tokens of ``-sum_v y_v log softmax(W h + b)_v`` with ``y = (1 - e) onehot(target) + e / vocab``.

    Equal to ``cross_entropy(linear(hidden, weight, bias), targets, reduction="sum")`` with the logits taken to fp32.
    Softmax, loss and the weight's gradient over the chunks accumulate in fp32 (fp64 for fp64 inputs). Once
    differentiable.

    Args:
        hidden: ``[N, D]``, floating.
        weight: ``[vocab, D]`` in the same dtype; under autocast both are taken to its dtype.
        targets: int64 ``[N]``; tokens with ``ignore_index`` give neither loss nor gradient.
        bias: ``[vocab]`` or ``None``.
        label_smoothing: e, in [0, 1).
        chunk_tokens: tokens at a time; by default what `CHUNK_BYTES` holds.

    Returns:
        Scalar, fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes that do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, D] and [vocab, D]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets of shape {list(targets.shape)} must be [N] = {list(hidden.shape[:1])}")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        loss = _LinearCrossEntropySum.apply(hidden, weight, bias, targets, ignore_index, label_smoothing, chunk_tokens)
    assert isinstance(loss, Tensor)
    return loss


class _LinearCrossEntropySum(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of C tokens.

    =========  ====================  ===================================================
    on device  forward               kept for backward
    =========  ====================  ===================================================
    hidden     ``[N, D]``            its gradient ``[N, D]``, in hidden's dtype
    weight     ``[vocab, D]``        its gradient ``[vocab, D]``, in the accumulation dtype
    logits     ``[C, vocab]``        nothing
    =========  ====================  ===================================================

    With ``p = softmax(logits)``: ``dlogits = p - y`` (zero rows where ignored), ``dhidden = dlogits W``,
    ``dweight = sum over chunks of dlogits^T hidden``. Backward multiplies by the scalar gradient of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        chunk_tokens: int | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        accumulation = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        vocab = weight.shape[0]
        step = chunk_tokens or max(1, CHUNK_BYTES // (vocab * accumulation.itemsize))
        loss = torch.zeros((), dtype=accumulation, device=hidden.device)
        dhidden = torch.zeros_like(hidden) if wants_hidden else None
        dweight = torch.zeros_like(weight, dtype=accumulation) if wants_weight else None
        dbias = torch.zeros(vocab, dtype=accumulation, device=hidden.device) if wants_bias else None
        for begin in range(0, hidden.shape[0], step):
            tokens = slice(begin, begin + step)
            rows, labels = hidden[tokens], targets[tokens]
            valid = labels != ignore_index
            labels = labels.where(valid, 0)[:, None]
            logits = torch.nn.functional.linear(rows, weight, bias).to(accumulation)
            log_sum = logits.logsumexp(1, keepdim=True)
            losses = log_sum - (1 - label_smoothing) * logits.gather(1, labels)
            if label_smoothing:
                losses -= label_smoothing * logits.mean(1, keepdim=True)
            loss += losses.where(valid[:, None], 0).sum()
            if not any((wants_hidden, wants_weight, wants_bias)):
                continue
            dlogits = logits.sub_(log_sum).exp_()
            if label_smoothing:
                dlogits -= label_smoothing / vocab
            dlogits.scatter_add_(1, labels, dlogits.new_full(labels.shape, label_smoothing - 1))
            dlogits *= valid[:, None]
            if dbias is not None:
                dbias += dlogits.sum(0)
            dlogits = dlogits.to(hidden.dtype)
            if dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[tokens])
            if dweight is not None:
                _accumulate(dweight, dlogits, rows)
        ctx.save_for_backward(dhidden, dweight, dbias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = [
            None if gradient is None else torch.mul(gradient, dloss, out=torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None)


def _accumulate(total: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
    """``total += dlogits^T hidden`` in total's dtype, a block of the vocabulary at a time to keep the product small."""
    block = -(-total.shape[0] // WEIGHT_BLOCKS)
    for part, columns in zip(total.split(block), dlogits.split(block, dim=1), strict=True):
        if total.dtype == hidden.dtype:
            part.addmm_(columns.mT, hidden)
        elif hidden.is_cuda:
            part += torch.mm(columns.mT, hidden, out_dtype=total.dtype)
        else:
            part.addmm_(columns.mT.to(total.dtype), hidden.to(total.dtype))
