"""Cross-entropy of a linear head without the logits of all tokens.

At a vocabulary of 248,320 the logits of 32,768 tokens are 16 GB in bf16 and 32 GB in fp32. Here they exist for one
chunk of tokens at a time, and the gradients of hidden states and weight are made from them on the spot, so that
nothing has to be kept or computed again in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    backend: str = "torch",
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
        backend: ``"torch"``, or ``"triton"`` (GPUs, not fp64): one kernel for softmax, loss and the logits' gradient,
            which is then rounded to hidden's dtype before it is summed for the bias.

    Returns:
        Scalar, fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes that do not fit, an unknown backend, or fp64 with ``"triton"``.
    """
    if backend not in ("torch", "triton"):
        raise ValueError(f'backend={backend!r} is unknown: pass "torch" or "triton"')
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, D] and [vocab, D]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets of shape {list(targets.shape)} must be [N] = {list(hidden.shape[:1])}")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if backend == "triton" and hidden.dtype == torch.float64:
        raise ValueError('backend="triton" does not compute in fp64: pass backend="torch"')
    with torch.autocast(device, enabled=False):
        rule = _Rule(ignore_index, label_smoothing, chunk_tokens, backend)
        loss = _LinearCrossEntropySum.apply(hidden, weight, bias, targets, rule)
    assert isinstance(loss, Tensor)
    return loss


class _Rule(NamedTuple):
    """The options of `linear_cross_entropy_sum`."""

    ignore_index: int
    label_smoothing: float
    chunk_tokens: int | None
    backend: str

    def tokens_at_a_time(self, vocab: int, logits: torch.dtype, accumulation: torch.dtype) -> int:
        if self.chunk_tokens:
            return self.chunk_tokens
        if self.backend == "torch":
            return max(1, CHUNK_BYTES // (vocab * accumulation.itemsize))
        # The gradient takes the logits' place: no copies. Whole tiles of the products.
        tokens = 2 * CHUNK_BYTES // (vocab * logits.itemsize)
        return max(1, tokens // 128 * 128 or tokens)


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
        rule: _Rule,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        accumulation = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        vocab = weight.shape[0]
        step = rule.tokens_at_a_time(vocab, hidden.dtype, accumulation)
        losses_of = _row_losses_in_torch if rule.backend == "torch" else _row_losses_in_triton
        wants_any = wants_hidden or wants_weight or wants_bias
        loss = torch.zeros((), dtype=accumulation, device=hidden.device)
        dhidden = torch.zeros_like(hidden) if wants_hidden else None
        dweight = torch.zeros_like(weight, dtype=accumulation) if wants_weight else None
        dbias = torch.zeros(vocab, dtype=accumulation, device=hidden.device) if wants_bias else None
        for begin in range(0, hidden.shape[0], step):
            tokens = slice(begin, begin + step)
            rows, labels = hidden[tokens], targets[tokens]
            losses, dlogits = losses_of(torch.nn.functional.linear(rows, weight, bias), labels, rule, wants_any)
            loss += losses.sum()
            if not wants_any:
                continue
            if dbias is not None:
                dbias += dlogits.sum(0, dtype=accumulation)
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
        return (*gradients, None, None)


def _row_losses_in_torch(logits: Tensor, labels: Tensor, rule: _Rule, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """Losses ``[C]`` of logits ``[C, vocab]``, and the logits' gradient, both in the accumulation dtype."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    valid = labels != rule.ignore_index
    labels = labels.where(valid, 0)[:, None]
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = log_sum - (1 - rule.label_smoothing) * logits.gather(1, labels)
    if rule.label_smoothing:
        losses -= rule.label_smoothing * logits.mean(1, keepdim=True)
    losses = losses.squeeze(1).where(valid, 0)
    if not with_gradient:
        return losses, logits
    dlogits = logits.sub_(log_sum).exp_()
    if rule.label_smoothing:
        dlogits -= rule.label_smoothing / logits.shape[1]
    dlogits.scatter_add_(1, labels, dlogits.new_full(labels.shape, rule.label_smoothing - 1))
    dlogits *= valid[:, None]
    return losses, dlogits


def _row_losses_in_triton(logits: Tensor, labels: Tensor, rule: _Rule, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """The same; the gradient is in the logits' dtype, and in their place."""
    from .triton_rows import row_losses

    options: Any = {"ignore_index": rule.ignore_index, "label_smoothing": rule.label_smoothing}
    losses = row_losses(logits, labels, with_gradient=with_gradient, **options)
    return losses, logits


def _accumulate(total: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
    """``total += dlogits^T hidden`` in total's dtype, a block of the vocabulary at a time to keep the product small."""
    block = -(-total.shape[0] // WEIGHT_BLOCKS)
    for part, columns in zip(total.split(block), dlogits.split(block, dim=1), strict=True):
        if total.dtype == hidden.dtype:
            part.addmm_(columns.mT, hidden)
        elif hidden.is_cuda:
            torch.addmm(part, columns.mT, hidden, out_dtype=total.dtype, out=part)
        else:
            part.addmm_(columns.mT.to(total.dtype), hidden.to(total.dtype))
