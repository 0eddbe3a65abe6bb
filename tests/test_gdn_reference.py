"""The torch definitions against stock transformers, torch.nn.functional and each document alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from hf_cp.kernels.gdn import recurrent_gated_delta_rule
from hf_cp.kernels.gdn.reference import causal_conv1d, gate, gated_rms_norm, l2norm


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    norm = expected.detach().double().norm()
    return float((actual.detach().double() - expected.detach().double()).norm() / norm.clamp_min(1e-300))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(seq_len: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """B=2, H=2, HV=4, K=8, V=6; queries and keys of norm about 1."""
    return {
        "q": randn(2, seq_len, 2, 8, seed=1, dtype=dtype) * 8**-0.5,
        "k": randn(2, seq_len, 2, 8, seed=2, dtype=dtype) * 8**-0.5,
        "v": randn(2, seq_len, 4, 6, seed=3, dtype=dtype),
        "g": F.logsigmoid(randn(2, seq_len, 4, seed=4, dtype=dtype)),
        "beta": randn(2, seq_len, 4, seed=5, dtype=dtype).sigmoid(),
    }


@pytest.mark.parametrize("l2norm_in_kernel", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("stock_name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_recurrence_equals_stock(stock_name: str, with_state: bool, l2norm_in_kernel: bool):
    # The stock functions compute in fp32 whatever they are given.
    x = inputs(70, torch.float32)
    state = randn(2, 4, 8, 6, seed=6, dtype=torch.float32) if with_state else None
    weights = randn(2, 70, 4, 6, seed=7, dtype=torch.float32), randn(2, 4, 8, 6, seed=8, dtype=torch.float32)
    results = []
    for function in (recurrent_gated_delta_rule, getattr(stock, stock_name)):
        leaves = [t.clone().requires_grad_() for t in (*x.values(), *([] if state is None else [state]))]
        o, final_state = function(
            *leaves[:5],
            initial_state=leaves[5] if with_state else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm_in_kernel,
        )
        assert final_state is not None
        loss = (o * weights[0]).sum() + (final_state * weights[1]).sum()
        results.append([o, final_state, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 2e-6


def test_recurrence_by_hand():
    """Two tokens, K = V = 1, worked out on paper."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    g = torch.tensor([0.5, 0.25], dtype=torch.float64).log().view(1, 2, 1)
    beta = torch.tensor([0.5, 1.0], dtype=torch.float64).view(1, 2, 1)
    v = torch.tensor([3.0, 5.0], dtype=torch.float64).view(1, 2, 1, 1)
    state = torch.full((1, 1, 1, 1), 4.0, dtype=torch.float64)
    o, final_state = recurrent_gated_delta_rule(
        2 * one, one, v, g, beta, scale=10.0, initial_state=state, output_final_state=True
    )
    # 4 decays to 2, then 2 + 0.5 (3 - 2) = 2.5; beta = 1 overwrites with 5.
    assert final_state is not None
    torch.testing.assert_close(o.flatten(), torch.tensor([50.0, 100.0], dtype=torch.float64))
    assert final_state.item() == pytest.approx(5.0)


def test_recurrence_by_document():
    x: Any = {name: t[:1] for name, t in inputs(20).items()}
    offsets = [0, 0, 1, 9, 9, 20, 20]
    state = randn(6, 4, 8, 6, seed=6)
    o, final_state = recurrent_gated_delta_rule(
        **x, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(offsets)
    )
    assert final_state is not None
    for n in range(6):
        tokens = slice(offsets[n], offsets[n + 1])
        alone, alone_state = recurrent_gated_delta_rule(
            *(t[:, tokens] for t in x.values()), initial_state=state[n : n + 1], output_final_state=True
        )
        assert torch.equal(o[:, tokens], alone)
        assert alone_state is not None
        assert torch.equal(final_state[n : n + 1], alone_state)


def test_recurrence_dtypes():
    x = inputs(5, torch.bfloat16)
    o, state = recurrent_gated_delta_rule(**x, output_final_state=True)
    assert state is not None
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    o, state = recurrent_gated_delta_rule(**inputs(0), output_final_state=True)
    assert o.shape == (2, 0, 4, 6)
    assert state is not None
    assert torch.equal(state, torch.zeros(2, 4, 8, 6, dtype=torch.float64))


def test_l2norm():
    x = randn(3, 7)
    x[1] = 0
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert relative_error(l2norm(x), expected) < 1e-15
    assert torch.equal(l2norm(x)[1], torch.zeros(7, dtype=torch.float64))
    assert torch.autograd.gradcheck(l2norm, x.requires_grad_())
    narrow = l2norm(randn(3, 7, dtype=torch.bfloat16))
    assert narrow.dtype == torch.bfloat16


def test_gate():
    a, A_log, dt_bias = randn(2, 5, 4, seed=1), randn(4, seed=2), randn(4, seed=3)
    expected = -A_log.exp() * (1 + (a + dt_bias).exp()).log()
    assert relative_error(gate(a, A_log, dt_bias), expected) < 1e-14
    narrow = [x.bfloat16() for x in (a, A_log, dt_bias)]
    assert gate(*narrow).dtype == torch.float32
    assert relative_error(gate(*narrow), gate(*(x.double() for x in narrow))) < 1e-6
    assert torch.autograd.gradcheck(gate, [x.requires_grad_() for x in (a, A_log, dt_bias)])


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_conv_equals_torch(taps: int):
    x, weight, halo = randn(2, 9, 5, seed=1), randn(5, taps, seed=2), randn(2, taps - 1, 5, seed=3)

    def expected(before: torch.Tensor) -> torch.Tensor:
        return F.conv1d(torch.cat([before, x], 1).mT, weight[:, None], groups=5).mT

    assert relative_error(causal_conv1d(x, weight, halo, activation=None), expected(halo)) < 1e-14
    assert relative_error(causal_conv1d(x, weight, halo), F.silu(expected(halo))) < 1e-14
    assert relative_error(causal_conv1d(x, weight), F.silu(expected(torch.zeros_like(halo)))) < 1e-14
    leaves = [t[..., :3, :2] if t.dim() == 3 else t[:2] for t in (x, weight, halo)]
    leaves[2] = halo[..., :2]
    assert torch.autograd.gradcheck(causal_conv1d, [t.clone().requires_grad_() for t in leaves])


def test_conv_equals_stock():
    x, weight = randn(2, 9, 5, seed=1, dtype=torch.bfloat16), randn(5, 4, seed=2, dtype=torch.bfloat16)
    theirs = stock.causal_conv1d_fn(x.mT, weight, activation="silu").mT
    assert causal_conv1d(x, weight).dtype == torch.bfloat16
    assert relative_error(causal_conv1d(x, weight), theirs) < 1e-2


def test_conv_by_document():
    x, weight, halo = randn(1, 12, 5, seed=1), randn(5, 4, seed=2), randn(1, 3, 5, seed=3)
    offsets = [0, 2, 2, 3, 10, 12, 12]
    y = causal_conv1d(x, weight, halo, torch.tensor(offsets, dtype=torch.int32))
    for n in range(6):
        tokens = slice(offsets[n], offsets[n + 1])
        alone = causal_conv1d(x[:, tokens], weight, halo if n == 0 else None)
        assert relative_error(y[:, tokens], alone) < 1e-14


def test_conv_documents_do_not_see_each_other():
    """NaN in one document, or in the halo of an empty document 0, reaches no other document, forward or backward."""
    weight = randn(5, 4, seed=2).requires_grad_()
    x = randn(1, 6, 5, seed=1)
    halo = torch.full((1, 3, 5), float("nan"), dtype=torch.float64)
    alone = causal_conv1d(x[:, 3:], weight)
    x[:, :3] = float("nan")
    assert relative_error(causal_conv1d(x, weight, halo, torch.tensor([0, 0, 3, 6]))[:, 3:], alone) < 1e-14
    x[:, :3] = 1
    y = causal_conv1d(x.requires_grad_(), weight, halo, torch.tensor([0, 0, 3, 6]))
    dx, dweight = torch.autograd.grad(y[:, 3:].sum(), [x, weight])
    assert not dx[:, :3].any()
    assert torch.isfinite(dx).all()
    (alone_dweight,) = torch.autograd.grad(alone.sum(), weight)
    assert relative_error(dweight, alone_dweight) < 1e-14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"weight": torch.ones(4, 4)}, "weight"),
        ({"halo": torch.ones(1, 4, 5)}, "halo"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens"),
    ],
)
def test_conv_rejects(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{"x": torch.ones(1, 6, 5), "weight": torch.ones(5, 4), **change})


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gated_norm_equals_stock(dtype: torch.dtype, weight_dtype: torch.dtype):
    """Bit for bit, values and gradients, in every mixture of dtypes."""
    module = stock.Qwen3_5RMSNormGated(16, eps=1e-5)
    module.weight.data = randn(16, seed=1).to(weight_dtype)
    results = []
    for call in (module, lambda x, z: gated_rms_norm(x, z, module.weight, 1e-5)):
        x, z = randn(7, 16, seed=2).to(dtype).requires_grad_(), randn(7, 16, seed=3).to(dtype).requires_grad_()
        y = call(x, z)
        results.append([y, *torch.autograd.grad(y, [x, z, module.weight], randn(7, 16, seed=4).to(y.dtype))])
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gated_norm_gradients():
    inputs = [randn(3, 5, seed=1), randn(3, 5, seed=2), randn(5, seed=3)]
    function = lambda x, z, weight: gated_rms_norm(x, z, weight, 1e-6)  # noqa: E731
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in inputs])


def test_conv_offsets_are_not_read_on_a_device():
    """A tensor without values stands for one on a device: reading it would raise."""
    x, weight = torch.empty(1, 6, 5, device="meta"), torch.empty(5, 4, device="meta")
    offsets = torch.tensor([0, 2, 6]).to("meta")
    assert causal_conv1d(x, weight, None, offsets).shape == x.shape
