"""Segmented attention against attention with the mask that it replaces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cp.modes.segments import Segment, attend, groups, packed_segments, padded_segments, queries_between
from hf_cp.testing import relative_error

HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 8, 23
MASKS = {
    "right": [[1] * 23, [1] * 9 + [0] * 14, [1] + [0] * 22],
    "left": [[1] * 23, [0] * 14 + [1] * 9, [0] * 22 + [1]],
    "both sides": [[0] * 4 + [1] * 12 + [0] * 7, [1] * 23, [0] * 11 + [1] + [0] * 11],
    "holes": [[1, 0, 1, 1, 0, 0, 1] + [1] * 10 + [0] * 6, [0, 1] * 11 + [0], [1] * 23],
    "a row of nothing": [[0] * 23, [1] * 23, [0] * 23],
}
PACKED = {"documents": [0, 5, 6, 6, 20, 23], "one": [0, 23]}


def tensors(batch: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, heads, LENGTH, DIM, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def visible(name: str) -> tuple[Tensor, list[Segment]]:
    """Who sees whom, ``[B, T, T]``, and the segments that say the same."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if name in MASKS:
        mask = torch.tensor(MASKS[name])
        return causal & mask.bool()[:, None, :], padded_segments(mask)
    bounds = PACKED[name]
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor(bounds), right=True)
    return (causal & (document[:, None] == document))[None], packed_segments(bounds)


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.repeat_interleave(3, 1).mT * DIM**-0.5
    scores = scores.masked_fill(~seen[:, None], -1e30)
    weights = scores.softmax(-1) * seen.any(-1)[:, None, :, None]
    return (weights @ v.repeat_interleave(3, 1)).transpose(1, 2)


def check(leaves: list[Tensor], found: Tensor, expected: Tensor, bound: float) -> None:
    assert relative_error(found, expected) <= bound
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    gradients = torch.autograd.grad((found * weights).sum(), leaves, retain_graph=True)
    for gradient, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        assert relative_error(gradient, right) <= bound


@pytest.mark.parametrize("name", [*MASKS, *PACKED])
def test_whole_sequence(name: str) -> None:
    seen, segments = visible(name)
    q, k, v = tensors(len(seen))
    found = attend(q, k, v, groups(segments, LENGTH, LENGTH, torch.device("cpu")), scale=DIM**-0.5)
    check([q, k, v], found, reference(q, k, v, seen), 1e-12)


@pytest.mark.parametrize("name", [*MASKS, *PACKED])
@pytest.mark.parametrize(("start", "stop"), [(0, 8), (8, 16), (16, 23), (22, 23), (0, 23)])
def test_queries_of_one_rank(name: str, start: int, stop: int) -> None:
    seen, segments = visible(name)
    q, k, v = tensors(len(seen))
    local = queries_between(segments, start, stop)
    found = attend(q[:, :, start:stop], k, v, groups(local, stop - start, LENGTH, torch.device("cpu")), scale=DIM**-0.5)
    check([q, k, v], found, reference(q, k, v, seen)[:, start:stop], 1e-12)


def test_a_query_belongs_to_one_segment() -> None:
    for name in [*MASKS, *PACKED]:
        _, segments = visible(name)
        covered = [(s.row, i) for s in segments for i in range(s.begin, s.end)]
        assert len(covered) == len(set(covered))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*MASKS, *PACKED])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Flash attention in bf16, against fp64 with twice the error of the masked function in the same dtype."""
    seen, segments = visible(name)
    seen = seen.cuda()
    leaves = q, k, v = tensors(len(seen), dtype, "cuda")
    exact = [x.detach().double().requires_grad_() for x in leaves]
    parts = groups(segments, LENGTH, LENGTH, torch.device("cuda"))
    found = attend(q, k, v, parts, scale=DIM**-0.5)
    right = reference(exact[0], exact[1], exact[2], seen)
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True).transpose(1, 2)
    masked = masked.where(seen.any(-1)[:, :, None, None], 0)
    assert relative_error(found, right) <= 2 * relative_error(masked, right) + 1e-6
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    theirs = torch.autograd.grad((masked * weights).sum(), leaves)
    for mine, other, exactly in zip(
        ours, theirs, torch.autograd.grad((right * weights.double()).sum(), exact), strict=True
    ):
        assert relative_error(mine, exactly) <= 2 * relative_error(other, exactly) + 1e-6
