"""The eager stage functions, and the operator over them, against the token recurrence."""

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_cp.kernels.gdn import chunk_gated_delta_rule, eager, recurrent_gated_delta_rule

NAMES = ("q", "k", "v", "g", "beta")
GRAD_NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
SCALE = 0.3
OPTIONS: Any = {"scale": SCALE, "use_qk_l2norm_in_kernel": True}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    if not expected.any():
        return float(actual.double().norm())
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(
    seq_len: int, *, batch: int = 2, states: int | None = None, key_heads: int = 2, group: int = 2, normed: bool = True
) -> dict[str, torch.Tensor]:
    """Inputs, initial state and output gradients with K=8, V=6; keys of any norm if `normed`, else of norm about 1."""
    heads, states = key_heads * group, batch if states is None else states
    size = 2.0 if normed else 8**-0.5
    return {
        "q": size * randn(batch, seq_len, key_heads, 8, seed=1),
        "k": size * randn(batch, seq_len, key_heads, 8, seed=2),
        "v": randn(batch, seq_len, heads, 6, seed=3),
        "g": F.logsigmoid(randn(batch, seq_len, heads, seed=4) + 1),
        "beta": randn(batch, seq_len, heads, seed=5).sigmoid(),
        "initial_state": randn(states, heads, 8, 6, seed=6),
        "do": randn(batch, seq_len, heads, 6, seed=7),
        "dfinal_state": randn(states, heads, 8, 6, seed=8),
    }


def run(function, x, *, normed=True, with_state=True, cu_seqlens=None) -> dict[str, torch.Tensor]:
    """o, final_state and all gradients, through autograd."""
    leaves = [x[name].detach().clone().requires_grad_() for name in NAMES]
    state = x["initial_state"].detach().clone().requires_grad_() if with_state else None
    o, final_state = function(
        *leaves,
        scale=SCALE,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=normed,
        cu_seqlens=cu_seqlens,
    )
    grads = torch.autograd.grad(
        [o, final_state],
        [*leaves, *([] if state is None else [state])],
        [x["do"].to(o.dtype), x["dfinal_state"].to(final_state.dtype)],
    )
    return dict(zip(["o", "final_state", *GRAD_NAMES], [o.detach(), final_state.detach(), *grads], strict=False))


def assert_close(actual: dict, expected: dict, bound: float):
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) < bound, errors


def span(x: dict[str, torch.Tensor], tokens: slice, *names: str) -> Any:
    return [x[name][:, tokens] for name in names]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("seq_len", [1, 7, 63, 64, 65, 130, 257])
def test_operator_equals_recurrence(seq_len: int, with_state: bool, normed: bool):
    x = case(seq_len, normed=normed)
    actual = run(chunk_gated_delta_rule, x, normed=normed, with_state=with_state)
    expected = run(recurrent_gated_delta_rule, x, normed=normed, with_state=with_state)
    assert_close(actual, expected, 1e-9)


@pytest.mark.parametrize(("key_heads", "group"), [(1, 1), (3, 1), (1, 3)])
def test_operator_head_groups(key_heads: int, group: int):
    x = case(70, batch=1, key_heads=key_heads, group=group)
    assert_close(run(chunk_gated_delta_rule, x), run(recurrent_gated_delta_rule, x), 1e-9)


def test_operator_gradcheck():
    x = case(3, batch=1, key_heads=1)
    for name, dims in {"q": (2,), "k": (2,), "v": (3,), "initial_state": (2, 3)}.items():
        x[name] = x[name][(..., *(slice(dim) for dim in dims))]
    leaves = [x[name].clone().requires_grad_() for name in (*NAMES, "initial_state")]

    def function(*leaves) -> Any:
        return chunk_gated_delta_rule(
            *leaves[:5], initial_state=leaves[5], output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    assert torch.autograd.gradcheck(function, leaves)


def test_operator_default_scale_and_one_output():
    """scale=None is K^-1/2; a loss on one output alone; inputs that need no gradient; strided inputs."""
    x = case(70)
    leaves = [x[name].requires_grad_(name != "g") for name in NAMES]
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in leaves]
    o, none = chunk_gated_delta_rule(*strided)
    assert none is None
    expected, _ = recurrent_gated_delta_rule(*leaves, scale=8**-0.5)
    assert relative_error(o, expected) < 1e-9
    for pick in (0, 1):
        grads = []
        used = [t for t in leaves if t.requires_grad and (pick == 0 or t is not leaves[0])]
        for function in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
            output = function(*leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)[pick]
            assert output is not None
            grads.append(torch.autograd.grad(output.square().sum(), used))
        for actual, wanted in zip(*grads, strict=True):
            assert relative_error(actual, wanted) < 1e-9


def test_segments_change_nothing(monkeypatch: pytest.MonkeyPatch):
    """More tokens than are prepared at once: the same result in every stage."""
    x = case(150)
    stages: list[dict[str, torch.Tensor]] = []
    for segment in (eager.SEGMENT, eager.CHUNK):
        monkeypatch.setattr(eager, "SEGMENT", segment)
        result = run(chunk_gated_delta_rule, x)
        result["M"], result["h"] = eager.summary(
            *span(x, slice(None), "k", "v", "g", "beta"), use_qk_l2norm_in_kernel=True
        )
        result["dh"] = eager.backward_state(
            *span(x, slice(None), "q", "k", "g", "beta", "do"), scale=SCALE, use_qk_l2norm_in_kernel=True
        )
        stages.append(result)
    assert_close(stages[1], stages[0], 1e-12)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("seq_len", [1, 64, 150])
def test_summary_and_backward_state(seq_len: int, normed: bool):
    """final_state = M initial_state + h and d_initial_state = M^T d_final_state + dh."""
    x = case(seq_len, normed=normed)
    expected = run(recurrent_gated_delta_rule, x, normed=normed)
    M, h = eager.summary(*(x[name] for name in NAMES[1:]), use_qk_l2norm_in_kernel=normed)
    assert M.shape == (2, 4, 8, 8)
    assert relative_error(M @ x["initial_state"] + h, expected["final_state"]) < 1e-12
    dh = eager.backward_state(
        *(x[name] for name in ("q", "k", "g", "beta", "do")), scale=SCALE, use_qk_l2norm_in_kernel=normed
    )
    assert relative_error(M.mT @ x["dfinal_state"] + dh, expected["dinitial_state"]) < 1e-12


@pytest.mark.parametrize("cuts", [[0, 75, 150], [0, 1, 64, 64, 129, 150], [0, 37, 40, 111, 149, 150]])
def test_spans_compose(cuts: list[int]):
    """Summaries folded across spans give each span its states; the spans' results are then those of the whole."""
    x = case(150)
    expected = run(chunk_gated_delta_rule, x)
    spans = [slice(start, stop) for start, stop in pairwise(cuts)]
    maps = [eager.summary(*span(x, s, *NAMES[1:]), use_qk_l2norm_in_kernel=True) for s in spans]
    dhs = [eager.backward_state(*span(x, s, "q", "k", "g", "beta", "do"), **OPTIONS) for s in spans]

    states, dstates = [x["initial_state"]], [x["dfinal_state"]]
    for M, h in maps:
        states.append(M @ states[-1] + h)
    for (M, _), dh in zip(reversed(maps), reversed(dhs), strict=True):
        dstates.append(M.mT @ dstates[-1] + dh)
    dstates.reverse()

    outs, grads = [], []
    for n, s in enumerate(spans):
        o, final_state = eager.forward(*span(x, s, *NAMES), initial_state=states[n], **OPTIONS)
        assert relative_error(final_state, states[n + 1]) < 1e-12
        outs.append(o)
        q, k, v, g, beta, do = span(x, s, *NAMES, "do")
        *dinputs, dinitial = eager.backward(q, k, v, g, beta, states[n], do, dstates[n + 1], **OPTIONS)
        assert relative_error(dinitial, dstates[n]) < 1e-12
        grads.append(dinputs)
    actual = {"o": torch.cat(outs, 1), "final_state": states[-1]}
    actual |= {name: torch.cat(parts, 1) for name, parts in zip(GRAD_NAMES, zip(*grads, strict=True), strict=False)}
    actual["dinitial_state"] = dstates[0]
    assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents(dtype: torch.dtype):
    offsets = [0, 0, 1, 2, 66, 66, 70, 140, 140]
    x = case(140, batch=1, states=8)
    actual = run(chunk_gated_delta_rule, x, cu_seqlens=torch.tensor(offsets, dtype=dtype))
    assert_close(actual, run(recurrent_gated_delta_rule, x, cu_seqlens=torch.tensor(offsets, dtype=dtype)), 1e-9)
    for n in range(8):
        tokens, rows = slice(offsets[n], offsets[n + 1]), slice(n, n + 1)
        alone = {name: t[rows] if "state" in name else t[:, tokens] for name, t in x.items()}
        mine = {name: t[rows] if "state" in name else t[:, tokens] for name, t in actual.items()}
        assert_close(mine, run(chunk_gated_delta_rule, alone), 1e-12)
    # The state and its gradient pass through an empty document untouched.
    assert torch.equal(actual["final_state"][0], x["initial_state"][0])
    assert torch.equal(actual["dinitial_state"][0], x["dfinal_state"][0])


def test_documents_without_state_and_in_segments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "SEGMENT", 64)
    cu_seqlens = torch.tensor([0, 70, 75, 150])
    x = case(150, batch=1, states=3)
    actual = run(chunk_gated_delta_rule, x, with_state=False, cu_seqlens=cu_seqlens)
    assert_close(actual, run(recurrent_gated_delta_rule, x, with_state=False, cu_seqlens=cu_seqlens), 1e-9)


def test_no_tokens():
    x = case(0)
    actual = run(chunk_gated_delta_rule, x)
    assert actual["o"].shape == (2, 0, 4, 6)
    assert torch.equal(actual["final_state"], x["initial_state"])
    assert torch.equal(actual["dinitial_state"], x["dfinal_state"])
    M, h = eager.summary(*(x[name] for name in NAMES[1:]), use_qk_l2norm_in_kernel=True)
    assert torch.equal(M, torch.eye(8, dtype=torch.float64).expand(2, 4, 8, 8))
    dh = eager.backward_state(
        *(x[name] for name in ("q", "k", "g", "beta", "do")), scale=SCALE, use_qk_l2norm_in_kernel=True
    )
    assert not h.any()
    assert not dh.any()


@pytest.mark.parametrize("decay", [1.0, 16.0])
def test_fp32_error(decay: float):
    """At most twice the error of the fp32 recurrence, or 1e-5; also of dg where A is 16."""
    x = case(257)
    x["g"] = decay * x["g"]
    narrow = {name: t.float() for name, t in x.items()}
    exact = run(recurrent_gated_delta_rule, {name: t.double() for name, t in narrow.items()})
    actual, recurrence = run(chunk_gated_delta_rule, narrow), run(recurrent_gated_delta_rule, narrow)
    for name, expected in exact.items():
        assert actual[name].dtype == torch.float32
        error = relative_error(actual[name], expected)
        assert error < max(1e-5, 2 * relative_error(recurrence[name], expected)), (name, error)


def test_fp32_mixed_decay():
    """A run of strong decay leaves its rounding out of the weak decays after it in the chunk."""
    x = case(64)
    x["g"] = torch.full_like(x["g"], -0.01)
    x["g"][:, :40] = -20
    narrow = {name: t.float() for name, t in x.items()}
    exact = run(recurrent_gated_delta_rule, {name: t.double() for name, t in narrow.items()})
    actual = run(chunk_gated_delta_rule, narrow)
    assert_close(actual, exact, 1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_inputs(autocast: bool):
    """bf16 in and out, fp32 between, under autocast too: the error is that of rounding the results."""
    x = {name: t if "state" in name else t.bfloat16() for name, t in case(130).items()}
    x["g"], x["initial_state"] = case(130)["g"].float(), x["initial_state"].float()
    exact = run(recurrent_gated_delta_rule, {name: t.double() for name, t in x.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = run(chunk_gated_delta_rule, x)
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        assert actual[name].dtype == torch.bfloat16
        assert relative_error(actual[name], exact[name]) < 4e-3
    for name in ("final_state", "dg", "dinitial_state"):
        assert actual[name].dtype == torch.float32
        assert relative_error(actual[name], exact[name]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("edge", ["g=0", "g=-20", "g=-inf", "beta=0", "beta=1", "zero keys", "equal keys", "padding"])
def test_edge_values(edge: str, dtype: torch.dtype):
    x = case(130)
    if edge.startswith("g="):
        x["g"] = torch.full_like(x["g"], float(edge[2:]))
        if edge == "g=-inf":
            x["g"] = torch.where(torch.arange(130)[:, None] % 30 == 3, x["g"], -0.1)
    elif edge.startswith("beta="):
        x["beta"] = torch.full_like(x["beta"], float(edge[5:]))
    elif edge == "zero keys":
        x["k"][:, 10:90] = 0
        x["q"][:, 70:] = 0
    elif edge == "equal keys":
        x["k"][:] = x["k"][:, :1]
        x["beta"] = torch.ones_like(x["beta"])
    elif edge == "padding":
        for name in ("q", "k", "v", "g", "beta"):
            x[name][:, 100:] = 0
    x = {name: t.to(dtype) for name, t in x.items()}
    actual = run(chunk_gated_delta_rule, x)
    expected = run(recurrent_gated_delta_rule, {name: t.double() for name, t in x.items()})
    assert_close(actual, expected, 1e-9 if dtype == torch.float64 else 1e-5)


def test_edge_values_summary():
    """Under g = -20 a token the span's M underflows to 0, without NaN; with g = 0 and beta = 0 it is the identity."""
    x = case(130)
    M, h = eager.summary(x["k"], x["v"], torch.full_like(x["g"], -20), x["beta"], use_qk_l2norm_in_kernel=True)
    assert not M.any()
    assert torch.isfinite(h).all()
    zeros = torch.zeros_like(x["beta"])
    M, h = eager.summary(x["k"], x["v"], zeros, zeros, use_qk_l2norm_in_kernel=True)
    assert torch.equal(M, torch.eye(8, dtype=torch.float64).expand_as(M))
    assert not h.any()


def test_no_uninitialised_memory():
    """The package allocates with values, and a result does not depend on what freed memory held."""
    allocators = {"empty", "empty_like", "new_empty", "empty_strided", "resize_"}
    for path in Path(eager.__file__).parent.glob("*.py"):
        if path.stem in ("arguments", "backend", "chunk", "eager", "reference"):
            names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            assert not names & allocators, path
    x = case(70, batch=1, states=4)
    cu_seqlens = torch.tensor([0, 0, 3, 70, 70])
    results = []
    for poison in (float("nan"), 1e30):
        held = [torch.full_like(t, poison) for t in x.values() for _ in range(8)]
        del held
        results.append(run(chunk_gated_delta_rule, x, cu_seqlens=cu_seqlens))
    for name, first in results[0].items():
        assert torch.equal(first, results[1][name])


def test_inputs_are_left_alone():
    x = case(70)
    before = {name: t.clone() for name, t in x.items()}
    _, final_state = eager.forward(*(x[n] for n in NAMES), initial_state=x["initial_state"], **OPTIONS)
    final_state.zero_()
    *_, dinitial = eager.backward(*(x[n] for n in (*NAMES, "initial_state", "do", "dfinal_state")), **OPTIONS)
    dinitial.zero_()
    for name, t in before.items():
        assert torch.equal(x[name], t)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(1, 4, 8)}, r"q has shape \[1, 4, 8\]"),
        ({"k": torch.ones(1, 4, 2, 7)}, "k has shape"),
        ({"v": torch.ones(1, 5, 4, 6)}, "v has shape"),
        ({"v": torch.ones(1, 4, 3, 6)}, "v has 3 heads"),
        ({"g": torch.ones(1, 4, 2)}, "g has shape"),
        ({"beta": torch.ones(1, 4, 2)}, "beta has shape"),
        ({"beta": torch.ones(1, 4, 4, dtype=torch.int32)}, "beta has dtype"),
        ({"v": torch.ones(1, 4, 4, 6).bfloat16()}, "cast them to one dtype"),
        ({"g": torch.ones(1, 4, 4, device="meta")}, "g is on meta"),
        ({"initial_state": torch.ones(1, 2, 8, 6)}, "initial_state has shape"),
        ({"initial_state": torch.ones(1, 4, 8, 6), "cu_seqlens": torch.tensor([0, 2, 4])}, "initial_state has shape"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens has dtype"),
        ({"cu_seqlens": torch.tensor([[0, 4]])}, "cu_seqlens has shape"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens=\[0, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "cu_seqlens="),
        ({"backend": "auto"}, r"gdn_backend='auto' is unknown: pass one of \"eager\", \"triton\""),
    ],
)
def test_operator_rejects(change: dict, message: str):
    x = {name: t.float() for name, t in case(4, batch=1).items() if name in NAMES}
    with pytest.raises(ValueError, match=message) as error:
        chunk_gated_delta_rule(**{**x, **change})
    assert "\n" not in str(error.value)


def test_operator_rejects_packed_batch():
    x = case(4)
    with pytest.raises(ValueError, match="batch size 2"):
        chunk_gated_delta_rule(*(x[name] for name in NAMES), cu_seqlens=torch.tensor([0, 4]))
