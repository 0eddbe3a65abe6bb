"""The operators as PyTorch sees them: schemas, fakes, gradients, and compiled graphs that do not break at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cp.kernels.a2a_gemm import TorchBackend, a2a_gemm, batched_pv_a2a, gemm_a2a
from hf_cp.kernels.a2a_gemm.handles import backend_of, register_backend
from hf_cp.testing import SavedTensorLog

OPS = torch.ops.hf_cp
ALONE = TorchBackend()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


X, Y = [draw(2, 4, 3, 2), draw(2, 4, 1, 2)], [draw(6, 5), draw(2, 5)]
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (OPS.a2a_gemm, (X, Y, [3, 1], "to_sequence", ALONE.handle)),
    (OPS.gemm_a2a, (draw(2, 4, 5), [draw(5, 6), draw(5, 2)], [3, 1], 2, "to_heads", ALONE.handle)),
    (OPS.batched_pv_a2a, (draw(2, 4, 6, 6), draw(2, 6, 2, 3), ALONE.handle)),
    (OPS.a2a_exchange, ([x.detach() for x in X], [3, 1], "to_heads", ALONE.handle)),
]


@pytest.mark.parametrize(("operator", "arguments"), CALLS, ids=[str(operator) for operator, _ in CALLS])
def test_operators_keep_the_rules(operator: Any, arguments: tuple[Any, ...]) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    if operator is OPS.a2a_gemm:
        # What was gathered is returned for the backward alone, and has no gradient of its own.
        tests = tests[:2]
    else:
        tests += ("test_autograd_registration",)
    torch.library.opcheck(operator.default, arguments, test_utils=tests)


def layer(x: Tensor, wq: Tensor, wk: Tensor, out: Tensor) -> Tensor:
    q, k = gemm_a2a(x, [wq, wk], 4, backend=ALONE)
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3)).softmax(-1)
    return a2a_gemm(batched_pv_a2a(scores, k, backend=ALONE), out, backend=ALONE)


def test_a_compiled_layer_is_one_graph_with_the_same_gradients() -> None:
    inputs = [draw(1, 6, 10), draw(8, 10), draw(4, 10), draw(7, 8)]
    dy = draw(1, 6, 7).detach()
    want = layer(*inputs)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(*inputs)
    torch.testing.assert_close(got, want)
    pairs = zip(torch.autograd.grad(got, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_what_a_frozen_weight_needs_is_not_kept() -> None:
    x, weight = draw(1, 4, 3, 2), draw(5, 6)
    for trained in (True, False):
        weight.requires_grad_(trained)
        with SavedTensorLog(ignore=[weight]) as log:
            a2a_gemm(x, weight)
        assert ((1, 4, 6) in log.shapes) == trained


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_the_gradients_that_are_asked_for(needed: tuple[bool, bool]) -> None:
    x, weight = draw(1, 4, 5), draw(6, 5)
    for tensor, wanted in zip((x, weight), needed, strict=True):
        tensor.requires_grad_(wanted)
    (q,) = gemm_a2a(x, [weight], 2)
    q.sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needed


def test_the_gradient_of_a_weight_lies_as_the_weight_does() -> None:
    weight, out = draw(6, 5), draw(7, 6)
    (q,) = gemm_a2a(draw(1, 4, 5), [weight], 2)
    a2a_gemm(q, out).sum().backward()
    for parameter in (weight, out):
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()


def test_a_backend_that_is_gone_is_named() -> None:
    class Mine(TorchBackend):
        pass

    backend: Callable[..., Any] | Any = Mine()
    handle = register_backend(backend)
    assert backend_of(handle) is backend
    del backend
    with pytest.raises(RuntimeError, match=f"{handle} is gone: keep it"):
        backend_of(handle)
