"""The torch operators on gloo ranks against one process that holds everything: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_cp.kernels.a2a_gemm import a2a_gemm, batched_pv_a2a, gemm_a2a
from hf_cp.testing import World, relative_error

Worlds = Callable[..., World]
B, D, N = 2, 3, 7


def draw(seed: int, *shape: int) -> Tensor:
    """Numbers that every rank can draw for itself."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(x: Tensor, rank: int, W: int) -> Tensor:
    return x.chunk(W, 1)[rank]


def heads(x: Tensor, rank: int, W: int) -> Tensor:
    """Rank's heads of `[B, S, H, D]`; a copy of one where they are fewer than ranks."""
    h = max(x.shape[2] // W, 1)
    start = rank * x.shape[2] // W
    return x[:, :, start : start + h]


def gradients(outputs: list[Tensor], weights_of_loss: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    loss = torch.stack([(y * w).sum() for y, w in zip(outputs, weights_of_loss, strict=True)]).sum()
    return list(torch.autograd.grad(loss, inputs))


def compare(got: list[Tensor], want: list[Tensor]) -> None:
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert relative_error(x, y) < 1e-12, (i, x.shape)


def total(x: Tensor) -> Tensor:
    """Sum over ranks: the gradient of something that every rank holds."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def check_a2a_gemm(to_sequence: bool) -> None:
    W, r = dist.get_world_size(), dist.get_rank()
    S, H = 5 * W, 2 * W
    x = draw(1, B, S, H, D).requires_grad_()
    mine = heads if to_sequence else tokens
    part = mine(x, r, W).detach().requires_grad_()
    if to_sequence:
        weight = draw(2, N, H * D).requires_grad_()
        dense = x.flatten(2) @ weight.t()
        dy = draw(3, *dense.shape)
        want_y, want_dy = tokens(dense, r, W), tokens(dy, r, W)
    else:
        # Every rank multiplies its own heads by the same weight.
        weight = draw(2, N, H // W * D).requires_grad_()
        dense = x.unflatten(2, (W, -1)).flatten(3) @ weight.t()  # [B, S, W, N]
        dy = draw(3, *dense.shape)
        want_y, want_dy = dense[:, :, r], dy[:, :, r]
    copy = weight.detach().clone().requires_grad_()
    y = a2a_gemm(part, copy, dist.group.WORLD, route="to_sequence" if to_sequence else "to_heads")
    dx, dw = gradients([dense], [dy], [x, weight])
    got = gradients([y], [want_dy], [part, copy])
    compare([y, got[0], total(got[1])], [want_y, mine(dx, r, W), dw])


def check_gemm_a2a(to_heads: bool, head_counts: list[int]) -> None:
    W, r = dist.get_world_size(), dist.get_rank()
    S, C = 5 * W, 11
    route = "to_heads" if to_heads else "to_sequence"
    x = draw(1, B, S, C).requires_grad_()
    weights = [draw(2 + i, H * D, C).requires_grad_() for i, H in enumerate(head_counts)]
    dense = [(x @ w.t()).unflatten(-1, (-1, D)) for w in weights]
    if to_heads:
        part = tokens(x, r, W).detach().requires_grad_()
        mine = [w.detach().clone().requires_grad_() for w in weights]
        # A repeated head has a gradient on each rank that holds it, and they add up.
        dys = [[draw(50 + 10 * i + rank, *heads(y, rank, W).shape) for rank in range(W)] for i, y in enumerate(dense)]
        outputs = [heads(y, rank, W) for y in dense for rank in range(W)]
        want = [heads(y, r, W) for y in dense]
        want_dy = [dy[r] for dy in dys]
        dx, *dw = gradients(outputs, [dy for one in dys for dy in one], [x, *weights])
        dx = tokens(dx, r, W)
    else:
        # Rank r computes its heads of all tokens.
        part = x.detach().clone().requires_grad_()
        mine = [w.chunk(W)[r].detach().clone().requires_grad_() for w in weights]
        dy = [draw(50 + i, *y.shape) for i, y in enumerate(dense)]
        want, want_dy = [tokens(y, r, W) for y in dense], [tokens(y, r, W) for y in dy]
        dx, *dw = gradients(dense, dy, [x, *weights])
        dw = [w.chunk(W)[r] for w in dw]
    got_y = gemm_a2a(part, mine, D, dist.group.WORLD, route=route)
    got_dx, *got_dw = gradients(list(got_y), want_dy, [part, *mine])
    if to_heads:
        got_dw = [total(w) for w in got_dw]
    else:
        got_dx = total(got_dx)
    compare([*got_y, got_dx, *got_dw], [*want, dx, *dw])


def check_batched_pv(h: int, hkv: int) -> None:
    W, r = dist.get_world_size(), dist.get_rank()
    S = 3 * W
    p, v = draw(1, B, h * W, S, S).requires_grad_(), draw(2, B, S, hkv * W, D).requires_grad_()
    dense = (p @ v.repeat_interleave(h // hkv, 2).transpose(1, 2)).transpose(1, 2)
    dy = draw(3, *dense.shape)
    dp, dv = gradients([dense], [dy], [p, v])
    mine = [p.chunk(W, 1)[r].detach().requires_grad_(), v.chunk(W, 2)[r].detach().requires_grad_()]
    o = batched_pv_a2a(mine[0], mine[1], dist.group.WORLD)
    got = gradients([o], [tokens(dy, r, W)], mine)
    compare([o, *got], [tokens(dense, r, W), dp.chunk(W, 1)[r], dv.chunk(W, 2)[r]])


def check_all(rank: int, W: int) -> None:
    for route in (True, False):
        check_a2a_gemm(route)
        check_gemm_a2a(route, [2 * W, W])
    check_gemm_a2a(True, [2 * W, 1, 1])
    check_gemm_a2a(True, [2 * W, W // 2 or 1, W // 2 or 1])
    check_batched_pv(2, 1)
    check_batched_pv(3, 3)


@pytest.mark.parametrize("size", [2, 4])
def test_operators_and_gradients_match_one_process(world: Worlds, size: int) -> None:
    world(size).run(check_all)


def test_one_rank_needs_no_group() -> None:
    x, w = draw(1, B, 5, 4, D), draw(2, N, 4 * D)
    assert torch.equal(a2a_gemm(x, w), x.flatten(2) @ w.t())
    q, k = gemm_a2a(x.flatten(2), [draw(3, 4 * D, 4 * D), draw(4, 2 * D, 4 * D)], D)
    assert q.shape == (B, 5, 4, D)
    assert k.shape == (B, 5, 2, D)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: a2a_gemm(draw(1, 2, 4, 3, 2), draw(1, 5, 7)), "must have 6 columns"),
        (lambda: a2a_gemm(draw(1, 2, 4, 6), draw(1, 5, 6)), r"must be \[B, T, heads, D\]"),
        (lambda: a2a_gemm(draw(1, 2, 4, 3, 2), draw(1, 5, 6), route="back"), "route='back' is not supported"),  # pyright: ignore[reportArgumentType]
        (lambda: gemm_a2a(draw(1, 2, 4, 6), [draw(1, 5, 6)], 2), r"weights\[0\] of shape \(5, 6\)"),
        (lambda: gemm_a2a(draw(1, 2, 4, 6), [], 2), "one weight or more"),
        (lambda: batched_pv_a2a(draw(1, 1, 3, 4, 4), draw(1, 1, 4, 2, 5)), "hkv dividing h"),
    ],
)
def test_wrong_shapes_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def check_refusals(rank: int, size: int) -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="tokens=5 must be divisible by the 2 ranks"):
        a2a_gemm(draw(1, 1, 5, 3, 2), draw(1, 5, 12), group)
    with pytest.raises(ValueError, match="heads=3 must divide or be divisible by the 2 ranks"):
        gemm_a2a(draw(1, 1, 4, 6), [draw(1, 6, 6)], 2, group)


def test_what_the_group_does_not_divide_is_refused(world: Worlds) -> None:
    world(2).run(check_refusals)
