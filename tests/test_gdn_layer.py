"""What surrounds the delta rule: Triton kernels against fp64, interpreted on the CPU and in every dtype on a GPU; their
registration with PyTorch; and models that run on them.

Interpreting and compiling run in a process of their own: this file, as a script.
"""

# Triton is optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_processes import compiled_launches, in_process, prepare_interpreter

from hf_cp.kernels.gdn import layer, recurrent_gated_delta_rule, reference
from hf_cp.testing import run_ranks, tiny_qwen3_5

Tensors = dict[str, torch.Tensor]
Results = dict[str, torch.Tensor]
EPS = 1e-6


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error; absolute where nothing is expected."""
    difference, norm = float((actual.double() - expected).norm()), float(expected.norm())
    return difference / norm if norm > 0 else difference


def gradients(results: list[torch.Tensor], leaves: Tensors, seeds: int = 50) -> tuple[torch.Tensor, ...]:
    """Gradients of the leaves for random gradients of the results, numbers that every dtype holds."""
    grads = [randn(*y.shape, seed=seeds + i).bfloat16().to(y) for i, y in enumerate(results)]
    return torch.autograd.grad(results, list(leaves.values()), grads)


# Each operation: its inputs, and what it computes of them with a backend. Results hold the gradients of all leaves.


def conv_inputs(batch: int, seq_len: int, channels: int, taps: int, halo: bool) -> Tensors:
    x: Tensors = {"x": randn(batch, seq_len, channels, seed=1), "weight": randn(channels, taps, seed=2)}
    return x | ({"halo": randn(batch, taps - 1, channels, seed=3)} if halo else {})


def conv(x: Tensors, backend: str, widths: list[int], activation: str | None, cu_seqlens: list[int] | None) -> Results:
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=x["x"].device)
    ys = layer.causal_conv1d(x["x"], x["weight"], x.get("halo"), offsets, activation, widths=widths, backend=backend)
    found = dict(zip([f"y{i}" for i in range(len(ys))], ys, strict=True))
    return found | dict(zip([f"d{name}" for name in x], gradients(ys, x), strict=True))


def gates(x: Tensors, backend: str) -> Results:
    g, beta = layer.gates(x["a"], x["b"], x["A_log"], x["dt_bias"], backend=backend)
    return {"g": g, "beta": beta} | dict(zip([f"d{name}" for name in x], gradients([g, beta], x), strict=True))


def norm(x: Tensors, backend: str) -> Results:
    y = layer.gated_rms_norm(x["x"], x["z"], x["weight"], EPS, backend=backend)
    return {"y": y} | dict(zip([f"d{name}" for name in x], gradients([y], x), strict=True))


def gate_inputs(batch: int, seq_len: int, heads: int, scale: float = 1.0) -> Tensors:
    a, b = randn(batch, seq_len, heads, seed=1) * scale, randn(batch, seq_len, heads, seed=2)
    return {"a": a, "b": b, "A_log": randn(heads, seed=3), "dt_bias": randn(heads, seed=4)}


def norm_inputs(*shape: int) -> Tensors:
    return {"x": randn(*shape, seed=1), "z": randn(*shape, seed=2), "weight": 1 + 0.1 * randn(shape[-1], seed=3)}


Case = tuple[Tensors, Callable[..., Results], dict[str, Any]]


def conv_case(
    seq_len: int,
    widths: list[int],
    *,
    batch: int = 1,
    taps: int = 4,
    halo: bool = True,
    activation: str | None = "silu",
    cu_seqlens: list[int] | None = None,
) -> Case:
    options = {"widths": widths, "activation": activation, "cu_seqlens": cu_seqlens}
    return conv_inputs(batch, seq_len, sum(widths), taps, halo), conv, options


def small_cases() -> dict[str, Case]:
    return {
        "conv": conv_case(37, [8, 8, 16], batch=2),
        "conv, one token": conv_case(1, [8]),
        "conv, strips of 128": conv_case(130, [4]),
        "conv without halo": conv_case(20, [130, 4], halo=False),
        "conv of documents": conv_case(40, [8, 4], cu_seqlens=[0, 3, 3, 20, 21, 22, 40]),
        "conv, empty document 0": conv_case(9, [8], cu_seqlens=[0, 0, 9]),
        "conv without activation": conv_case(11, [8], activation=None),
        "conv of two taps": conv_case(11, [8], taps=2),
        "conv of one tap": conv_case(5, [8], taps=1, halo=False),
        "gates": (gate_inputs(2, 70, 6), gates, {}),
        "gates, far from zero": (gate_inputs(1, 33, 3, scale=30.0), gates, {}),
        "norm": (norm_inputs(2, 5, 3, 24), norm, {}),
        "norm of many rows": (norm_inputs(1, 70, 2, 64), norm, {}),
    }


def leaves_of(x: Tensors, dtype: torch.dtype, device: str) -> Tensors:
    return {name: t.to(dtype).to(device).requires_grad_() for name, t in x.items()}


def errors(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    x, compute, options = case
    x = leaves_of(x, dtype, device)
    found = compute(x, "triton", **options)
    expected = compute(
        leaves_of({name: t.detach() for name, t in x.items()}, torch.float64, device), "eager", **options
    )
    assert all(torch.isfinite(y).all() for y in found.values())
    assert [y.dtype for y in found.values()] == [y.dtype for y in compute(x, "eager", **options).values()]
    return {name: relative_error(found[name].detach(), expected[name].detach()) for name in expected}


def step_errors(dtype: torch.dtype, device: str, batch: int, heads: tuple[int, int], dim: int) -> dict[str, float]:
    """Two decoding steps against the definitions over the same tokens."""
    key_heads, value_heads = heads
    channels = (2 * key_heads + value_heads) * dim
    x = {
        "weight": randn(channels, 4, seed=1),
        "before": randn(batch, 4, channels, seed=2),
        "x": randn(batch, 2, channels, seed=3),
        "a": randn(batch, 2, value_heads, seed=4),
        "b": randn(batch, 2, value_heads, seed=5),
        "A_log": randn(value_heads, seed=6),
        "dt_bias": randn(value_heads, seed=7),
    }
    x = {name: t.to(dtype).to(device) for name, t in x.items()}
    state = randn(batch, value_heads, dim, dim, seed=8).to(device)
    conv_state, first_state = x["before"].mT.contiguous(), state.clone()
    mixed, outputs = [], []
    for t in range(2):
        mixed.append(layer.conv_step(x["x"][:, t], conv_state, x["weight"]))
        a, b = x["a"][:, t], x["b"][:, t]
        outputs.append(layer.delta_step(mixed[-1], a, b, x["A_log"], x["dt_bias"], state, key_heads))
    wide = {name: t.double() for name, t in x.items()}
    expected = reference.causal_conv1d(wide["x"], wide["weight"], wide["before"][:, 1:])
    # The delta rule is held to what the convolution gave, rounding and all.
    qkv = torch.stack(mixed, 1).double().split([key_heads * dim, key_heads * dim, value_heads * dim], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv)
    o, final_state = recurrent_gated_delta_rule(
        q,
        k,
        v,
        reference.gate(wide["a"], wide["A_log"], wide["dt_bias"]),
        wide["b"].sigmoid(),
        initial_state=first_state.double(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert final_state is not None
    kept = torch.cat([x["before"][:, 2:], x["x"]], 1).mT
    return {
        "conv": relative_error(torch.stack(mixed, 1), expected),
        "kept tokens": relative_error(conv_state, kept.double()),
        "o": relative_error(torch.stack(outputs, 1), o),
        "state": relative_error(state, final_state),
    }


# Models.


def small_model() -> Any:
    """Two Gated DeltaNet layers of head dim 64, which the kernels serve."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    return tiny_qwen3_5(**fields)


def training_step(model: Any, ids: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
    import hf_cp

    model.train()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    hf_cp.average_gradients(model)
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def packed_inputs() -> tuple[torch.Tensor, dict[str, Any]]:
    """26 tokens in documents of 9, 6 and 11: on two ranks, the second one crosses the edge."""
    ids = torch.randint(1, 97, (1, 26), generator=torch.Generator().manual_seed(0))
    return ids, {"position_ids": torch.cat([torch.arange(n) for n in (9, 6, 11)])[None]}


def ranks_case(rank: int, size: int, linear_mode: str) -> dict[str, float]:
    """Relative differences of one packed step on the kernels to the same on the definitions."""
    import torch.distributed as dist

    import hf_cp

    prepare_short_strips()
    ids, inputs = packed_inputs()
    found = []
    for backend in ("triton", "eager"):
        model = small_model()
        options: Any = {"linear_mode": linear_mode, "attention_mode": "allgather", "gdn_backend": backend}
        hf_cp.patch(model, **options, cp_group=dist.group.WORLD)
        found.append(training_step(model, ids, **inputs))
    triton, eager = found
    assert triton.keys() == eager.keys()
    return {name: relative_error(triton[name], eager[name].double()) for name in eager}


def generation() -> dict[str, Any]:
    """Stock against the kernels, which must not enter stock's torch loops: tokens, logits and states.

    Generated tokens first; then two tokens behind the cache at once; then one with a gradient.
    """
    import hf_cp

    ids = torch.randint(1, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options: Any = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    model = small_model().eval()
    mixer = model.model.layers[0].linear_attn
    module = sys.modules[type(mixer).__module__]
    loops = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_update")
    results = []
    for backend in ("stock", "triton"):
        if backend == "triton":
            hf_cp.patch(model, gdn_backend="triton")
            for name in loops:
                assert hasattr(module, name)
                setattr(module, name, None)
        mixer.A_log.grad = None
        generated = model.generate(ids, attention_mask=mask, **options)
        cache = generated.past_key_values
        states = [cache.layers[0].conv_states[0].clone(), cache.layers[0].recurrent_states[0].clone()]
        with torch.no_grad():
            two = model(ids[:, :2], past_key_values=cache).logits
        cache.layers[0].recurrent_states[0] = cache.layers[0].recurrent_states[0].detach()
        one = model(ids[:, :1], past_key_values=cache).logits
        results.append([generated.sequences, *generated.logits, *states, two, one.detach()])
        if backend == "triton":
            one.sum().backward()
            assert mixer.A_log.grad is not None
            assert mixer.A_log.grad.any()
    stock, triton = results
    return {str(i): relative_error(b, a.double()) for i, (a, b) in enumerate(zip(stock, triton, strict=True))}


def compiled_layer(backend: str, packed: bool) -> float:
    """Largest difference that compiling makes to a layer on one rank, as one graph, in its output and gradients."""
    import hf_cp
    from hf_cp.config import PatchConfig
    from hf_cp.context import CpContext
    from hf_cp.layout import ShardLayout
    from hf_cp.mesh import CpMesh

    model = small_model().train()
    hf_cp.patch(model, gdn_backend=backend)
    mixer = model.model.layers[0].linear_attn
    layout, offsets = ShardLayout(11, 1, 0), torch.tensor([0, 4, 11], dtype=torch.int32)
    documents = layout.local_cu_seqlens(offsets) if packed else layout.one_document()
    config = PatchConfig(gdn_backend=backend)
    context = CpContext(config, CpMesh.single(), layout, documents, offsets if packed else None)
    results = []
    for call in (mixer, torch.compile(mixer, backend="aot_eager", fullgraph=True)):
        x = randn(1, 11, 64, seed=1).requires_grad_()
        y = call(x, cp_context=context)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *mixer.parameters()], randn(*y.shape, seed=2))])
    return max(relative_error(a, b.double()) for a, b in zip(results[1], results[0], strict=True))


# What a process of its own does.


def interpret() -> dict[str, Any]:
    prepare_interpreter()
    from hf_cp.kernels.gdn import warm_up
    from hf_cp.kernels.gdn.triton_layer import conv as conv_kernels

    strip, results = conv_kernels.STRIP, {}
    for name, case in small_cases().items():
        conv_kernels.STRIP = strip if "strips" in name else 8
        results[name] = errors(case, torch.float32, "cpu")
    results["step"] = step_errors(torch.float32, "cpu", batch=2, heads=(1, 2), dim=64)
    check_registration()
    warm_up.LENGTHS = (1,)
    results["warm-up"] = {"seconds": warm_up.warm_up(1, 1, 64, 64, dtype=torch.float32, device="cpu")}
    return results


def check_registration() -> None:
    """What the operators say of themselves, to a compiler, is what they do."""
    from hf_cp.kernels.gdn import segments

    x, weight, halo, widths = randn(1, 9, 8, seed=1), randn(8, 4, seed=2), randn(1, 3, 8, seed=3), [4, 4]
    offsets, a, heads, state = (
        torch.tensor([0, 4, 9]),
        randn(1, 3, 2, seed=4),
        randn(2, seed=5),
        randn(1, 2, 64, 64, seed=6),
    )
    q = randn(1, 3, 1, 64, seed=7)
    ops = torch.ops.hf_cp
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.gdn_conv1d, (x, weight, halo, offsets, "silu", widths)),
        (ops.gdn_conv1d_backward, (x, weight, halo, offsets, "silu", list(x.split(widths, -1)))),
        (ops.gdn_gates, (a, a, heads, heads)),
        (ops.gdn_gates_backward, (a, a, heads, heads, a, a)),
        (ops.gdn_gated_rms_norm, (x, x, weight[:, 0], EPS)),
        (ops.gdn_gated_rms_norm_backward, (x, x, weight[:, 0], x, EPS)),
        (ops.gdn_conv_step, (x[:, 0], randn(1, 8, 4, seed=8), weight, "silu")),
        (ops.gdn_delta_step, (randn(1, 256, seed=9), a[:, 0], a[:, 0], heads, heads, state, 1)),
        (ops.gdn_chunk, (q, q, a[..., None].expand(1, 3, 2, 64), -a.square(), a, state, None, 1.0, True, "triton")),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    # In segments of one chunk, with states between them.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("SEGMENT_STATES", 1), ("DOCUMENT_CHUNKS", 0), ("PROGRAMS", 0)):
            patch.setattr(segments, name, value)
        for batch, seq_len, packed in ((2, 65, None), (1, 3, torch.tensor([0, 1, 3]))):
            q, g = randn(batch, seq_len, 1, 64, seed=7), -randn(batch, seq_len, 1, seed=8).square()
            arguments = (q, q, q, g, -g, None, packed, 1.0, True, "triton")
            torch.library.opcheck(ops.gdn_chunk, arguments, test_utils=("test_schema", "test_faketensor"))
            assert ops.gdn_chunk(*arguments)[2].shape == (1, batch, 1, 64, 64)


def prepare_short_strips() -> None:
    """The interpreter is slow: no strips of 128 for a dozen tokens."""
    prepare_interpreter()
    from hf_cp.kernels.gdn.triton_layer import conv as conv_kernels

    conv_kernels.STRIP = 8


def interpret_model() -> dict[str, Any]:
    prepare_short_strips()
    # Stock's own functions are gone once generation has run.
    compiled = {"compiled": compiled_layer("triton", packed=True)}
    return (
        compiled
        | {"generation": generation()}
        | {mode: run_ranks(ranks_case, 2, mode, timeout=200.0) for mode in ("p2p", "ulysses")}
    )


def compile_launches() -> list[dict[str, Any]]:
    """Every kernel at the sizes of 16 key and 32 value heads of 128, in bfloat16 and in float32."""
    from hf_cp.kernels.gdn.triton_layer import conv, gates, norm, step

    heads, key_heads, dim = 32, 16, 128
    widths = [key_heads * dim, key_heads * dim, heads * dim]
    with compiled_launches() as reports:
        for dtype, packed in ((torch.bfloat16, (False, True)), (torch.float32, (True,))):
            x, weight = torch.zeros(1, 512, sum(widths), dtype=dtype), torch.zeros(sum(widths), 4, dtype=dtype)
            for is_packed in packed:
                halo, cu_seqlens = (x[:, :3], torch.zeros(3, dtype=torch.int32)) if is_packed else (None, None)
                ys = conv.forward(x, weight, halo, cu_seqlens, "silu", widths)
                conv.backward(x, weight, halo, cu_seqlens, "silu", ys)
            a, A_log = torch.zeros(1, 512, heads, dtype=dtype), torch.zeros(heads)
            gates.backward(a, a, A_log, A_log, *gates.forward(a, a, A_log, A_log))
            y = torch.zeros(1, 512, heads, dim, dtype=dtype)
            norm.backward(y, y, y[0, 0, 0], norm.forward(y, y, y[0, 0, 0], EPS), EPS)
            state = torch.zeros(1, heads, dim, dim)
            mixed = step.conv_step(x[:, 0], torch.zeros(1, sum(widths), 4, dtype=dtype), weight, "silu")
            step.delta_step(mixed, a[:, 0], a[:, 0], A_log, A_log, state, key_heads)
    return [{name: value for name, value in report.items() if name != "ptx"} for report in reports]


# Tests.


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    pytest.importorskip("triton")
    return in_process(__file__, "interpret", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("case", [*small_cases(), "step"])
def test_interpreted_kernels_equal_fp64(interpreted: dict[str, dict[str, float]], case: str) -> None:
    assert max(interpreted[case].values()) < 2e-6, interpreted[case]


def test_warm_up_runs_every_kernel(interpreted: dict[str, dict[str, float]]) -> None:
    assert interpreted["warm-up"]["seconds"] > 0


def test_interpreted_models() -> None:
    """A patched model on the kernels, alone with a cache and on two ranks, equals stock and the definitions."""
    pytest.importorskip("triton")
    found = in_process(__file__, "interpret_model", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert found.pop("compiled") < 1e-6
    generated = found.pop("generation")
    assert max(generated.values()) < 1e-4, generated
    for mode, ranks in found.items():
        for differences in ranks:
            assert max(differences.values()) < 1e-4, (mode, differences)


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_on_one_rank_compiles_to_one_graph(packed: bool) -> None:
    assert compiled_layer("eager", packed) < 1e-6


def test_launches_compile_for_sm_90_without_spills() -> None:
    pytest.importorskip("triton")
    reports = in_process(__file__, "compile")
    assert {r["kernel"] for r in reports} == {
        "_before_kernel",
        "_forward_kernel",
        "_backward_kernel",
        "_conv_kernel",
        "_delta_kernel",
    }
    assert not any(report["spilled"] for report in reports), reports


# On a GPU.

BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


def large_cases() -> dict[str, Case]:
    widths = [2048, 2048, 4096]
    return {
        "conv": conv_case(1000, widths, batch=2),
        "conv of documents": conv_case(5000, widths, cu_seqlens=[0, 0, 1, 130, 131, 132, 133, 2000, 2000, 4999, 5000]),
        "conv, uneven": conv_case(129, [100, 60, 20]),
        "gates": (gate_inputs(2, 5000, 32), gates, {}),
        "gates, far from zero": (gate_inputs(1, 777, 6, scale=30.0), gates, {}),
        "norm": (norm_inputs(2, 1500, 32, 128), norm, {}),
        "norm of 64": (norm_inputs(1, 33, 5, 64), norm, {}),
        "norm of 256": (norm_inputs(1, 1000, 3, 256), norm, {}),
    }


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", [*small_cases(), *large_cases()])
def test_gpu_kernels_equal_fp64(poison_empty: None, case: str, dtype: torch.dtype) -> None:
    found = errors((small_cases() | large_cases())[case], dtype, "cuda")
    assert max(found.values()) < BOUNDS[dtype], found


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gpu_steps_equal_fp64(dtype: torch.dtype, dim: int) -> None:
    found = step_errors(dtype, "cuda", batch=3, heads=(2, 4), dim=dim)
    assert max(found.values()) < BOUNDS[dtype], found


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", ["conv of documents", "gates", "norm"])
def test_gpu_runs_are_bitwise_equal(case: str) -> None:
    x, compute, options = large_cases()[case]
    x = leaves_of(x, torch.bfloat16, "cuda")
    first = compute(x, "triton", **options)
    for _ in range(29):
        again = compute(x, "triton", **options)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.gpu(1)
def test_gpu_more_than_2_31_elements() -> None:
    """The last tokens of tensors of more than 2^31 elements come out as they do alone."""
    if torch.cuda.get_device_properties(0).total_memory < 100e9:
        pytest.skip("needs 100 GB of GPU memory")
    tokens, channels, tail = 2**18 + 128, 8192, 256
    x = torch.randn(1, tokens, channels, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = randn(channels, 4, seed=0).to("cuda", torch.bfloat16)
    (y,) = layer.causal_conv1d(x, weight, backend="triton")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    halo, part = x.detach()[:, -tail - 3 : -tail], x.detach()[:, -tail:].clone().requires_grad_()
    (y_part,) = layer.causal_conv1d(part, weight, halo, backend="triton")
    (dx_part,) = torch.autograd.grad(y_part, part, y_part.detach())
    assert torch.equal(y[:, -tail:], y_part)
    assert torch.equal(dx[:, -tail:], dx_part)
    del y, dx
    rows, z = (t.unflatten(-1, (-1, 128)) for t in (x.detach(), x.detach().flip(-1)))
    normed = layer.gated_rms_norm(rows, z, weight[:128, 0], EPS, backend="triton")
    normed_part = layer.gated_rms_norm(rows[:, -tail:], z[:, -tail:], weight[:128, 0], EPS, backend="triton")
    assert torch.equal(normed[:, -tail:], normed_part)


if __name__ == "__main__":
    modes = {"interpret": interpret, "interpret_model": interpret_model, "compile": compile_launches}
    print(json.dumps(modes[sys.argv[1]]()))
