"""Choosing a backend: what cannot run or is not served is refused with its reason, by every caller the same."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_cp
from hf_cp.class_swap import is_patched
from hf_cp.kernels.gdn import (
    backend,
    chunk_gated_delta_rule,
    eager,
    get_backend,
    is_available,
    layer,
    unavailable_reason,
)
from hf_cp.kernels.gdn.backend import unserved_reason
from hf_cp.testing import tiny_qwen3_5

CPU = torch.device("cpu")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can run here")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What was found about the machine is found anew."""
    caches = (backend._absent_reason, backend.get_backend, backend.announce_compilation)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton as where it is not installed: neither found nor importable."""
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton able to run, on the CPU; nothing is launched here."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_eager() -> None:
    assert get_backend("eager") is eager
    assert is_available("eager", key_dim=7, value_dim=5, taps=9, dtype=torch.float64, device=CPU)
    assert unavailable_reason("eager", key_dim=7) is None


def test_unknown() -> None:
    for ask in (is_available, unavailable_reason, get_backend):
        with pytest.raises(ValueError, match=r"gdn_backend='cuda' is unknown: pass one of \"eager\", \"triton\""):
            ask("cuda")


def test_without_triton(without_triton: None) -> None:
    assert unavailable_reason("triton") == "Triton is not installed"
    assert not is_available("triton")
    with pytest.raises(ValueError, match=r'"triton" cannot run: Triton is not installed; pass gdn_backend="eager"'):
        get_backend("triton")


@needs_no_gpu
def test_without_gpu() -> None:
    pytest.importorskip("triton")
    assert unavailable_reason("triton") == "PyTorch sees no CUDA GPU"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"key_dim": 64, "value_dim": 256, "taps": 4, "dtype": torch.float32, "device": CPU}, None),
        ({"key_dim": 96}, "head dim K=96 is not one of 64, 128, 256"),
        ({"value_dim": 512}, "head dim V=512 is not one of 64, 128, 256"),
        ({"taps": 5}, "a convolution over 5 tokens is wider than 4"),
        ({"dtype": torch.float64}, "dtype torch.float64 is not one of torch.bfloat16, torch.float16, torch.float32"),
        ({"dtype": torch.bfloat16}, "Triton's interpreter does not compute in torch.bfloat16"),
    ],
)
def test_unserved(interpreted: None, asked: dict[str, Any], reason: str | None) -> None:
    assert unavailable_reason("triton", **asked) == reason
    assert is_available("triton", **asked) == (reason is None)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"key_dim": 128, "value_dim": 128, "dtype": torch.float16}, None),
        ({"key_dim": 64}, "head dim K=64 is not one of 128"),
        ({"value_dim": 256}, "head dim V=256 is not one of 128"),
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of torch.bfloat16, torch.float16"),
    ],
)
def test_unserved_by_gluon(asked: dict[str, Any], reason: str | None) -> None:
    assert unserved_reason("gluon", **asked) == reason


def test_gluon_is_not_interpreted(interpreted: None) -> None:
    assert unavailable_reason("gluon") == "Triton's interpreter does not run Gluon"


def calls(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Every operator with the Triton backend, on tensors that it does not serve."""
    x, weight, heads = torch.ones(1, 4, 8, dtype=dtype), torch.ones(8, 4, dtype=dtype), torch.ones(8, dtype=dtype)
    q = torch.ones(1, 4, 2, 64, dtype=dtype)
    return {
        "conv": lambda: layer.causal_conv1d(x, weight, backend="triton"),
        "gates": lambda: layer.gates(x, x, heads, heads, backend="triton"),
        "norm": lambda: layer.gated_rms_norm(x, x, heads, 1e-6, backend="triton"),
        "conv step": lambda: layer.conv_step(x[:, 0], torch.ones(1, 8, 4, dtype=dtype), weight),
        "delta step": lambda: layer.delta_step(
            torch.ones(1, 384, dtype=dtype),
            heads[None, :2],
            heads[None, :2],
            heads[:2],
            heads[:2],
            q.new_ones(1, 2, 64, 64),
            2,
        ),
        "delta rule": lambda: chunk_gated_delta_rule(q, q, q, -x[..., :2], x[..., :2], backend="triton"),
    }


@pytest.mark.parametrize("name", calls(torch.float64))
def test_operators_refuse(interpreted: None, name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot run: dtype torch\.float64 is not one of") as error:
        calls(torch.float64)[name]()
    assert "\n" not in str(error.value)


@needs_no_gpu
@pytest.mark.parametrize("name", calls(torch.float32))
def test_operators_refuse_where_nothing_runs(name: str) -> None:
    with pytest.raises(ValueError, match=r'gdn_backend="triton" cannot run: .*; pass gdn_backend="eager"'):
        calls(torch.float32)[name]()


@pytest.mark.parametrize(
    ("fields", "dtype", "reason"),
    [
        ({"linear_key_head_dim": 16}, torch.float32, "head dim K=16 is not one of 64, 128, 256"),
        ({"linear_value_head_dim": 16}, torch.float32, "head dim V=16 is not one of 64, 128, 256"),
        ({"linear_conv_kernel_dim": 6}, torch.float32, "a convolution over 6 tokens is wider than 4"),
        ({}, torch.float64, "dtype torch.float64 is not one of"),
    ],
)
def test_patch_refuses_the_model(interpreted: None, fields: dict[str, Any], dtype: torch.dtype, reason: str) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = tiny_qwen3_5(**(sizes | fields)).to(dtype)
    with pytest.raises(ValueError, match=reason) as error:
        hf_cp.patch(model)
    assert 'pass gdn_backend="eager"' in str(error.value)
    assert not any(is_patched(module) for module in model.modules())
    hf_cp.patch(model, gdn_backend="eager")


def test_a_model_without_delta_rule_needs_no_kernels_for_it(interpreted: None) -> None:
    hf_cp.patch(tiny_qwen3_5(num_hidden_layers=1, layer_types=["full_attention"]))


@pytest.mark.parametrize(("local_rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_compilation_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: str | None, lines: int
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with caplog.at_level(logging.WARNING, logger="hf_cp"):
        backend.announce_compilation()
        backend.announce_compilation()
    assert len(caplog.messages) == lines
    assert all("compile" in message and "\n" not in message for message in caplog.messages)


class Seen(TorchDispatchMode):
    """The names of the operators that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_operators_show_themselves_to_whoever_looks() -> None:
    """A dispatch mode sees operators, forward and backward; without one they are autograd functions, equal in all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 8, generator=generator).requires_grad_() for _ in range(3))
    g, beta = -torch.rand(1, 70, 2, generator=generator), torch.rand(1, 70, 2, generator=generator)

    def run() -> tuple[str, list[torch.Tensor]]:
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return type(o.grad_fn).__name__, [o, *torch.autograd.grad(o.square().sum(), [q, k, v])]

    with Seen() as seen:
        _, shown = run()
    name, plain = run()
    assert {"hf_cp::gdn_chunk", "hf_cp::gdn_chunk_backward"} <= seen.names
    assert name == "gdn_chunkBackward"
    assert all(torch.equal(a, b) for a, b in zip(shown, plain, strict=True))
    with torch.no_grad():
        assert not chunk_gated_delta_rule(q, k, v, g, beta)[0].requires_grad
