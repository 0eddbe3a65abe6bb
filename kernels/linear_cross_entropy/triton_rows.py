"""Cross-entropy of rows of logits and its gradient in place of them, as one Triton kernel.

Three passes over the logits where the same in torch takes about twenty.
"""

# Triton is optional.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
# Below any logit that is not -inf; differences to it stay defined.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _row_kernel(
    p_logits,
    p_targets,
    p_losses,
    vocab,
    smoothing,
    IGNORE: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of logits [vocab], its target and its loss; grid (rows)."""
    i_row = tl.program_id(0)
    target = tl.load(p_targets + i_row)
    p_row = p_logits + i_row.to(tl.int64) * vocab
    o_v = tl.arange(0, BLOCK)
    if target == IGNORE:
        tl.store(p_losses + i_row, 0.0)
        if GRADIENT:
            for begin in range(0, vocab, BLOCK):
                tl.store(p_row + begin + o_v, 0.0, mask=begin + o_v < vocab)
    else:
        b_max = tl.full([BLOCK], _LOWEST, tl.float32)
        b_sum = tl.zeros([BLOCK], tl.float32)
        b_all = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, vocab, BLOCK):
            inside = begin + o_v < vocab
            b_x = tl.load(p_row + begin + o_v, mask=inside, other=float("-inf")).to(tl.float32)
            b_new = tl.maximum(b_max, b_x)
            b_sum = b_sum * tl.exp(b_max - b_new) + tl.exp(b_x - b_new)
            b_max = b_new
            if SMOOTH:
                b_all += tl.where(inside, b_x, 0.0)
        largest = tl.max(b_max, axis=0)
        log_sum = largest + tl.log(tl.sum(b_sum * tl.exp(b_max - largest), axis=0))
        # A target outside the vocabulary gives NaN.
        known = (target >= 0) & (target < vocab)
        loss = log_sum - (1 - smoothing) * tl.load(p_row + target, mask=known, other=float("nan")).to(tl.float32)
        if SMOOTH:
            loss -= smoothing * (tl.sum(b_all, axis=0) / vocab)
        tl.store(p_losses + i_row, loss)
        if GRADIENT:
            # The target's logit has been read by all threads before one of them writes over it.
            tl.debug_barrier()
            for begin in range(0, vocab, BLOCK):
                inside = begin + o_v < vocab
                b_x = tl.load(p_row + begin + o_v, mask=inside, other=0.0).to(tl.float32)
                b_dx = tl.exp(b_x - log_sum)
                if SMOOTH:
                    b_dx -= smoothing / vocab
                b_dx = tl.where(begin + o_v == target, b_dx - (1 - smoothing), b_dx)
                tl.store(p_row + begin + o_v, b_dx.to(p_logits.dtype.element_ty), mask=inside)


def row_losses(
    logits: Tensor, targets: Tensor, *, ignore_index: int, label_smoothing: float, with_gradient: bool
) -> Tensor:
    """Cross-entropy of every row; see `linear_cross_entropy_sum`.

    Args:
        logits: ``[N, vocab]``, contiguous, fp32, bf16 or fp16; ``with_gradient`` puts their gradient in their place.
        targets: int64 ``[N]``; rows with ``ignore_index`` give zeros, rows with one outside the vocabulary NaN.
        label_smoothing: e, in [0, 1).

    Returns:
        fp32 ``[N]``.
    """
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        _row_kernel[(rows,)](
            logits,
            targets,
            losses,
            vocab,
            float(label_smoothing),
            IGNORE=ignore_index,
            SMOOTH=label_smoothing > 0,
            GRADIENT=with_gradient,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
            num_warps=8,
        )
    return losses
