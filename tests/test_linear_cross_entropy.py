"""The chunked head and cross-entropy against the plain one; its Triton kernel interpreted, compiled and on a GPU.

Interpreting needs Triton in a mode that is fixed when it is imported, so it runs in a process of its own: this file, as
a script.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_processes import compiled_launches, in_process, prepare_interpreter

from hf_cp.kernels.linear_cross_entropy import chunked, linear_cross_entropy_sum
from hf_cp.testing import relative_error

TOKENS, DIM, VOCAB = 37, 24, 101


def inputs(dtype: torch.dtype, with_bias: bool, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, DIM), (VOCAB, DIM)] + [(VOCAB,)] * with_bias
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def some_targets() -> Tensor:
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))
    targets[::5] = -100
    return targets


def plain(leaves: list[Tensor], targets: Tensor, smoothing: float) -> Tensor:
    logits = F.linear(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None)
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def chunk(leaves: list[Tensor], targets: Tensor, smoothing: float, step: int | None) -> Tensor:
    bias = leaves[2] if len(leaves) == 3 else None
    return linear_cross_entropy_sum(
        leaves[0], leaves[1], targets, bias=bias, label_smoothing=smoothing, chunk_tokens=step
    )


def compare(leaves: list[Tensor], found: Tensor, expected: Tensor, bound: float) -> None:
    assert relative_error(found, expected) <= bound
    gradients = torch.autograd.grad(3 * found, leaves)
    for gradient, reference in zip(gradients, torch.autograd.grad(3 * expected, leaves), strict=True):
        assert gradient.dtype == reference.dtype
        assert relative_error(gradient, reference) <= bound


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("step", [1, 7, 37, 64, None])
def test_equal_to_the_plain_loss(step: int | None, with_bias: bool, smoothing: float) -> None:
    leaves, targets = inputs(torch.float64, with_bias), some_targets()
    compare(leaves, chunk(leaves, targets, smoothing, step), plain(leaves, targets, smoothing), 1e-12)


def test_the_default_chunk_holds_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(x.shape[0]) or linear(x, *rest))
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 10 * VOCAB * 4)
    leaves = inputs(torch.float32, False)
    chunk(leaves, some_targets(), 0.0, None)
    assert seen == [10, 10, 10, 7]


def test_many_chunks_in_bf16_lose_nothing_in_the_weight_gradient() -> None:
    leaves, targets = inputs(torch.bfloat16, False), some_targets()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    reference = torch.autograd.grad(plain(exact, targets, 0.0), exact)
    whole = torch.autograd.grad(plain(leaves, targets, 0.0), leaves)
    found = torch.autograd.grad(chunk(leaves, targets, 0.0, 1), leaves)
    for ours, stock, right in zip(found, whole, reference, strict=True):
        assert relative_error(ours, right) <= 1.2 * relative_error(stock, right)


def test_no_valid_target_is_a_zero_in_the_graph() -> None:
    leaves = inputs(torch.float32, True)
    loss = chunk(leaves, torch.full((TOKENS,), -100), 0.0, 8)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, leaves):
        assert gradient.abs().max() == 0


def test_frozen_parts_get_no_gradient() -> None:
    hidden, weight = inputs(torch.float64, False)
    targets = some_targets()
    for frozen, live in ((hidden, weight), (weight, hidden)):
        loss = chunk([x.detach() if x is frozen else x for x in (hidden, weight)], targets, 0.0, 8)
        (gradient,) = torch.autograd.grad(loss, [live])
        (reference,) = torch.autograd.grad(plain([hidden, weight], targets, 0.0), [live])
        assert relative_error(gradient, reference) <= 1e-12


def test_extreme_logits_stay_finite() -> None:
    leaves, targets = inputs(torch.float32, False), some_targets()
    large = [(x * 200).detach().requires_grad_() for x in leaves]
    compare(large, chunk(large, targets, 0.0, 8), plain(large, targets, 0.0), 1e-5)


def test_autocast_takes_both_operands_to_its_dtype() -> None:
    leaves, targets = inputs(torch.float32, False), some_targets()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunk(leaves, targets, 0.0, 8)
    low = [x.detach().bfloat16().requires_grad_() for x in leaves]
    assert loss.item() == chunk(low, targets, 0.0, 8).item()
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize(("hidden", "targets"), [((3, 4), (3,)), ((3, 24), (4,)), ((1, 3, 24), (3,))])
def test_shapes_that_do_not_fit(hidden: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        linear_cross_entropy_sum(torch.zeros(hidden), torch.zeros(VOCAB, DIM), torch.zeros(targets, dtype=torch.int64))


def test_backends_that_do_not_serve() -> None:
    hidden, targets = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match='does not compute in fp64: pass backend="torch"'):
        linear_cross_entropy_sum(hidden, hidden, targets, backend="triton")
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        linear_cross_entropy_sum(hidden, hidden, targets, backend="cuda")


# The Triton kernel.


def triton_errors(dtype: torch.dtype, device: str) -> dict[str, float]:
    """Largest error of loss and gradients against fp64, whose inputs are the same; 101 logits in blocks of 32."""
    from hf_cp.kernels.linear_cross_entropy import triton_rows

    triton_rows._BLOCK = 32
    errors = {}
    for smoothing, with_bias, step in ((0.0, False, None), (0.1, True, 7)):
        leaves, targets = inputs(dtype, with_bias, device), some_targets().to(device)
        found = linear_cross_entropy_sum(
            leaves[0],
            leaves[1],
            targets,
            bias=leaves[2] if with_bias else None,
            label_smoothing=smoothing,
            chunk_tokens=step,
            backend="triton",
        )
        exact = [x.detach().double().requires_grad_() for x in leaves]
        expected = plain(exact, targets, smoothing)
        pairs = zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, exact), strict=True)
        worst = [relative_error(found, expected), *(relative_error(x, y) for x, y in pairs)]
        errors[f"smoothing {smoothing}, bias {with_bias}, {step} tokens"] = max(worst)
    (hidden, weight), targets = inputs(dtype, False, device), some_targets().to(device)
    with torch.no_grad():
        alone = linear_cross_entropy_sum(hidden, weight, targets, backend="triton")
        errors["no gradient"] = relative_error(alone, plain([hidden.double(), weight.double()], targets, 0.0))
        ignored = linear_cross_entropy_sum(hidden, weight, torch.full_like(targets, -100), backend="triton")
        errors["no target"] = float(ignored)
        outside = linear_cross_entropy_sum(hidden, weight, torch.full_like(targets, VOCAB), backend="triton")
        errors["a target outside the vocabulary"] = 0.0 if torch.isnan(outside) else 1.0
    return errors


has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@has_triton
def test_interpreted_kernel_equals_fp64() -> None:
    errors = in_process(__file__, "interpret", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert len(errors) == 5
    assert max(errors.values()) < 1e-5, errors


def compiled_kernel() -> list[dict[str, int]]:
    from hf_cp.kernels.linear_cross_entropy.triton_rows import row_losses

    logits, targets = torch.zeros(2, 248_320, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    with compiled_launches() as reports:
        for smoothing in (0.0, 0.1):
            row_losses(logits, targets, ignore_index=-100, label_smoothing=smoothing, with_gradient=True)
    return [{key: report[key] for key in ("registers", "spilled")} for report in reports]


@has_triton
def test_kernel_compiles_for_sm_90() -> None:
    reports = in_process(__file__, "compile")
    assert len(reports) == 2
    assert all(report["spilled"] == 0 for report in reports), reports


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_gpu_kernel_equals_fp64(dtype: torch.dtype, bound: float) -> None:
    errors = triton_errors(dtype, "cuda")
    assert max(errors.values()) < bound, errors


@pytest.mark.gpu(1)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_memory_and_accuracy_at_a_large_vocabulary(backend: str) -> None:
    tokens, dim, vocab = 32768, 1024, 248_320
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, dim, device="cuda", generator=generator) * 0.03).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy_sum(hidden, weight, targets, backend=backend).backward()
    peak = torch.cuda.max_memory_allocated() - before
    weight_gradient = vocab * dim * (4 + 2)  # fp32 while it accumulates, then bf16
    print(f"peak {peak / 2**30:.2f} GiB, beside the weight gradient {(peak - weight_gradient) / 2**30:.2f} GiB")
    assert peak - weight_gradient < 2e9
    part = slice(0, 512)
    low = hidden.detach()[part].requires_grad_()
    exact = low.detach().double().requires_grad_()
    wide = weight.detach().double()
    F.cross_entropy(exact @ wide.mT, targets[part], reduction="sum").backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    assert relative_error(hidden.grad[part], exact.grad) < 1e-2


@pytest.mark.gpu(1)
def test_memory_of_the_plain_loss_at_a_large_vocabulary() -> None:
    """What the chunks are for: the same loss, all logits at once and in fp32 as stock has them."""
    tokens, dim, vocab = 32768, 1024, 248_320
    if torch.cuda.get_device_properties(0).total_memory < 130e9:
        pytest.skip("needs 130 GB of GPU memory")
    hidden = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, dim, device="cuda") * 0.03).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    F.cross_entropy((hidden @ weight.mT).float(), targets, reduction="sum").backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / 2**30:.2f} GiB")
    assert peak > 30e9


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        prepare_interpreter()
        print(json.dumps(triton_errors(torch.float32, "cpu")))
    else:
        print(json.dumps(compiled_kernel()))
