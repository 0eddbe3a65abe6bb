"""The Triton and the Gluon stages: interpreted on the CPU (Triton), compiled for sm_90, and on a GPU, against fp64.

Interpreting and compiling each need Triton in a mode that is fixed when it is imported, so both run in a process of
their own: this file, as a script.
"""

# Triton is optional.
# pyright: reportMissingImports=false, reportCallIssue=false, reportAttributeAccessIssue=false

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_processes import compiled_launches, in_process, prepare_interpreter

from hf_cp.kernels.gdn.backend import unserved_reason

pytest.importorskip("triton")

STAGE_OUTPUTS = (
    *("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "dinitial_state, early"),
    *("M", "h", "dh"),
)
DOCUMENTS = [0, 0, 5, 70, 70, 100, 100]
# In segments of two chunks the long document goes through three of them, and more that are empty follow.
IN_SEGMENTS = [0, 0, 0, 1, 64, 128, 129, 129, 512, 512, 512, 512]
COMPILED: dict[str, dict[str, Any]] = {
    "triton": {"key_dim": 128, "value_dim": 128},
    "gluon": {"key_dim": 128, "value_dim": 128},
    "gluon, one value head a key head": {"key_dim": 128, "value_dim": 128, "group": 1},
}
INTERPRETED: dict[str, dict[str, Any]] = {
    "two chunks": {"seq_len": 65},
    "batch": {"seq_len": 130, "batch": 2, "key_heads": 2, "group": 1},
    "one token": {"seq_len": 1},
    "keys as they come": {"seq_len": 63, "normalize": False},
    "documents": {"seq_len": 100, "cu_seqlens": DOCUMENTS},
    "no gate": {"seq_len": 70, "gate": 0.0},
    "strong gate": {"seq_len": 70, "gate": -20.0},
    "reset": {"seq_len": 70, "reset": 20},
    "beta 0": {"seq_len": 70, "beta": 0.0},
    "beta 1, zero keys": {"seq_len": 70, "beta": 1.0, "zero_keys": True},
    "spans of two chunks": {"seq_len": 323, "batch": 2, "group": 1, "span_chunks": 2},
    "segments of two chunks": {"seq_len": 323, "segment_chunks": 2},
    "segments of spans": {"seq_len": 323, "group": 1, "segment_chunks": 4, "span_chunks": 2, "with_state": False},
    "two segments, one token in the last": {"seq_len": 65, "segment_chunks": 1},
    "batch in segments": {"seq_len": 193, "batch": 2, "group": 1, "segment_chunks": 2},
    "batch in groups": {"seq_len": 65, "batch": 5, "group": 1, "segment_chunks": 5},
    "documents in segments": {"seq_len": 512, "cu_seqlens": IN_SEGMENTS, "group": 1, "segment_chunks": 2},
    "the same without states": {
        **{"seq_len": 512, "cu_seqlens": IN_SEGMENTS, "group": 1, "segment_chunks": 3},
        "with_state": False,
    },
    "one token a document, in segments": {"seq_len": 3, "cu_seqlens": [0, 1, 2, 2, 3], "segment_chunks": 1},
    "one token, in segments": {"seq_len": 1, "cu_seqlens": [0, 0, 1, 1], "segment_chunks": 1},
    "63 tokens in segments": {"seq_len": 63, "cu_seqlens": [0, 62, 63], "segment_chunks": 1},
    "64 tokens in segments": {"seq_len": 64, "cu_seqlens": [0, 0, 64], "segment_chunks": 1},
    "wide": {"seq_len": 65, "key_dim": 128, "value_dim": 128, "group": 1, "with_state": False},
}


def inputs(
    seq_len: int,
    *,
    batch: int = 1,
    key_heads: int = 1,
    group: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    cu_seqlens: list[int] | None = None,
    normalize: bool = True,
    with_state: bool = True,
    gate: float | None = None,
    reset: int | None = None,
    beta: float | None = None,
    zero_keys: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments of all stages; `gate` and `beta` replace those of every token, -inf the gate of one, `reset`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads, states = key_heads * group, batch if cu_seqlens is None else len(cu_seqlens) - 1
    q, k = randn(batch, seq_len, key_heads, key_dim), randn(batch, seq_len, key_heads, key_dim)
    if not normalize:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    if zero_keys:
        q[:, ::5], k[:, ::3] = 0, 0
    decay = torch.rand(heads, generator=generator) * 16
    g = -decay * F.softplus(randn(batch, seq_len, heads) + 1) * 0.05
    if reset is not None:
        g[:, reset] = float("-inf")
    step = randn(batch, seq_len, heads).sigmoid()
    x: dict[str, Any] = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": randn(batch, seq_len, heads, value_dim).to(dtype),
        "g": g if gate is None else torch.full_like(g, gate),
        "beta": (step if beta is None else torch.full_like(step, beta)).to(dtype),
        "initial_state": randn(states, heads, key_dim, value_dim) if with_state else None,
        "do": randn(batch, seq_len, heads, value_dim).to(dtype),
        "dfinal_state": randn(states, heads, key_dim, value_dim) if with_state else None,
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32),
        "normalize": normalize,
    }
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in x.items()}


def stages(backend: str) -> Any:
    """The stage functions of a backend, also where it is not available."""
    return importlib.import_module(f"hf_cp.kernels.gdn.{backend}_stages")


def case_backend(case: str) -> str:
    return case.split(",")[0]


def run_stages(stages: Any, x: dict[str, Any]) -> dict[str, torch.Tensor]:
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    options: Any = {"scale": q.shape[-1] ** -0.5, "use_qk_l2norm_in_kernel": x["normalize"]}
    packed = {"cu_seqlens": x["cu_seqlens"]}
    edges, kept, early, dh = [], [], [], None
    state = x["initial_state"]
    results = list(stages.forward(q, k, v, g, beta, initial_state=state, edge_states=edges, **packed, **options))
    if x["cu_seqlens"] is None:
        dh = stages.backward_state(q, k, g, beta, x["do"], keep=kept, **options)
    passed: Any = {"edge_states": edges, "kept": kept, "state_ready": lambda dstate: early.append(dstate.clone())}
    results += stages.backward(q, k, v, g, beta, state, x["do"], x["dfinal_state"], **passed, **packed, **options)
    assert not kept
    results += early
    if dh is not None:
        results += stages.summary(k, v, g, beta, use_qk_l2norm_in_kernel=x["normalize"])
        results.append(dh)
    return dict(zip(STAGE_OUTPUTS, results, strict=False))


def in_fp64(x: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in x.items()
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error; absolute where fp32 cannot hold the expected values, as after many strong decays."""
    difference, norm = float((actual.double() - expected).norm()), float(expected.norm())
    return difference / norm if norm > 1e-30 else difference


def errors(x: dict[str, Any], actual: dict[str, torch.Tensor]) -> dict[str, float]:
    from hf_cp.kernels.gdn import eager

    expected = run_stages(eager, in_fp64(x))
    assert actual.keys() == expected.keys()
    assert all(torch.isfinite(value).all() for value in actual.values())
    found = {name: relative_error(actual[name], expected[name]) for name in expected}
    # The gates' gradient in a chunk holds <dS, S> of its end, a sum of K V terms that cancel: what their rounding
    # leaves, alike for all tokens of the chunk, counts beside dg itself.
    if x["dfinal_state"] is not None:
        terms = (x["dfinal_state"] * expected["final_state"]).norm(dim=(-1, -2))
        norm = expected["dg"].norm()
        found["dg"] *= float(norm / (norm + 8 * terms.norm()))
    return found


# What a process of its own does.


def in_spans(chunks: Any, size: int) -> Any:
    return chunks._replace(spans=-(-chunks.per_document // size), span_chunks=size)


def interpret() -> dict[str, dict[str, float]]:
    """Errors of every case of INTERPRETED."""
    prepare_interpreter()
    from hf_cp.kernels.gdn import segments, triton_stages
    from hf_cp.kernels.gdn.triton_stages import compose

    kernels: Any = triton_stages._STAGES.kernels
    launch = kernels.outputs

    def outputs(q: Any, k: Any, v: Any, prepared: Any, initial_state: Any, o: Any, chunks: Any) -> Any:
        assert initial_state is None or len(initial_state) == chunks.documents * chunks.spans
        return launch(q, k, v, prepared, initial_state, o, chunks)

    kernels.outputs = outputs
    split, whole, results = compose.split, segments.SEGMENT_STATES, {}
    segments.DOCUMENT_CHUNKS = segments.PROGRAMS = 0
    for name, case in INTERPRETED.items():
        size, segment = case.pop("span_chunks", None), case.pop("segment_chunks", None)
        segments.SEGMENT_STATES = whole if segment is None else segment * case.get("group", 2) * 64 * 64
        compose.split = split if size is None else lambda chunks, *_, size=size: in_spans(chunks, size)
        x = inputs(**case)
        found = run_stages(triton_stages, x)
        results[name] = errors(x, found)
        if segment is not None and size is None:
            assert len(parts(x)) > 1
            segments.SEGMENT_STATES = whole
            assert len(parts(x)) == 1
            expected = run_stages(triton_stages, x)
            # Whole, a backward computes the states anew that in segments the forward hands over, rounded otherwise.
            same = set(expected) - {"dq", "dk", "dg", "dbeta"}
            differing = [output for output in same if not torch.equal(found[output], expected[output])]
            results[name]["differing from the whole"] = len(differing)
    return results


def parts(x: dict[str, Any]) -> list[Any]:
    """What is worked off one after another."""
    from hf_cp.kernels.gdn.triton_stages.compose import _row_groups, _segment_count

    count = _segment_count(x["k"], x["v"], x["cu_seqlens"])
    return [(rows, part) for rows in _row_groups(x["k"], x["v"]) for part in range(count)]


def compile_launches() -> dict[str, list[dict[str, Any]]]:
    """Registers and spilled bytes of every kernel that a backend launches, compiled for sm_90 without a GPU."""
    reports = {}
    for name, case in COMPILED.items():
        x = inputs(128, key_heads=16, dtype=torch.bfloat16, **case)
        with compiled_launches() as compiled:
            run_stages(stages(case_backend(name)), x)
        reports[name] = [{key: report[key] for key in ("kernel", "registers", "spilled")} for report in compiled]
    return reports


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    return in_process(__file__, "interpret", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_stages_equal_fp64(interpreted: dict[str, dict[str, float]], case: str):
    assert max(interpreted[case].values()) < 1e-4, interpreted[case]


def test_segments_are_decided_by_shapes():
    """Rows and documents of 128 by 128 heads; a segment has 16,384 tokens of 32 heads."""
    from hf_cp.kernels.gdn.segments import row_groups, segment_count

    def count(batch: int, seq_len: int, heads: int, documents: int | None = None) -> int:
        return segment_count(batch, seq_len, heads, 128, 128, documents)

    def sizes(batch: int, seq_len: int, heads: int) -> list[int]:
        return [rows.stop - rows.start for rows in row_groups(batch, seq_len, heads, 128, 128)]

    length = 2**17
    assert [count(1, tokens, 32) for tokens in (1, 16384, 16385, length)] == [1, 1, 2, 8]
    assert [count(1, length, heads) for heads in (64, 16, 4)] == [16, 4, 1]
    # A state of each document is passed from segment to segment.
    assert [count(1, length, 32, n) for n in (1, 2, 32, 64, 128, 256, 1024)] == [9, 9, 9, 5, 3, 2, 1]
    # Of 16 heads, two fill the GPU.
    assert [count(1, length, 16, n) for n in (1, 2, 4, 32)] == [5, 1, 2, 5]
    assert [count(batch, length // 2, heads) for batch, heads in ((2, 32), (2, 16), (1, 16))] == [4, 1, 2]
    assert sizes(8, 16384, 32) == [1] * 8
    assert sizes(5, 8192, 32) == [2, 2, 1]
    assert sizes(64, 2048, 32) == [8] * 8
    assert sizes(3, length, 32) == [1] * 3
    assert sizes(4, length, 16) == [2, 2]
    assert sizes(1, length, 32) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_packed_row(seed: int):
    """Together they are the chunks of the whole row, and what the chains take for a document's tokens is right."""
    from hf_cp.kernels.gdn.triton_stages.chunks import CHUNK, cut, cut_in_parts

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 300, (12,), generator=generator) * torch.randint(0, 2, (12,), generator=generator)
    lengths[6 : 6 + seed % 3] = 64 * (seed % 5)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    seq_len = int(offsets[-1])
    whole = cut(1, seq_len, offsets)
    expected = [
        (n, int(offsets[n]) + first, min(CHUNK, length - first))
        for n, length in enumerate(lengths.tolist())
        for first in range(0, length, CHUNK)
    ]
    for count in range(1, whole.count + 1):
        found: list[tuple[int, int, int]] = []
        for part in cut_in_parts(1, seq_len, offsets, count):
            chunks = part.chunks
            begun = {n for n, _, _ in found}
            tables: Any = (chunks.token_offsets, chunks.chunk_offsets, chunks.starts, chunks.lengths)
            tokens, edges, starts, sizes = (x.tolist() for x in tables)
            assert len(starts) == len(sizes) == chunks.count
            assert not any(sizes[edges[-1] :])
            for n in range(12):
                for i, chunk in enumerate(range(edges[n], edges[n + 1])):
                    assert starts[chunk] == tokens[n] + i * CHUNK
                    assert sizes[chunk] == min(CHUNK, tokens[n + 1] - starts[chunk])
                    assert n not in begun or n == part.document
                    found.append((n, starts[chunk], sizes[chunk]))
        assert found == expected


def test_packed_rows_are_cut_without_reading_their_documents():
    """To read a value of a tensor that has none, as of one on a GPU, raises."""
    from hf_cp.kernels.gdn.triton_stages.chunks import cut_in_parts

    with FakeTensorMode():
        parts = cut_in_parts(1, 512, torch.zeros(12, dtype=torch.int32), 4)
    assert [part.chunks.count for part in parts] == [5, 5, 5, 4]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return in_process(__file__, "compile")


KERNELS = {
    "triton": {"_prepare", "_forward", "_backward", "_value", "_key", "_query"},
    "gluon": {"_prepare", "_forward", "_backward", "_gradient"},
}


@pytest.mark.parametrize("case", COMPILED)
def test_launches_compile_for_sm_90(compiled: dict[str, list[dict[str, Any]]], case: str):
    """No kernel spills but by the bytes that were measured to cost less than the ways around them."""
    reports = compiled[case]
    assert {report["kernel"].removesuffix("_kernel") for report in reports} == KERNELS[case_backend(case)]
    assert all(report["spilled"] <= 256 for report in reports), reports


def test_import_needs_no_triton():
    code = "import sys, hf_cp.kernels.gdn as gdn; assert not any('triton_stages' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


BOUNDS = {torch.bfloat16: 5.86e-3, torch.float16: 1e-3, torch.float32: 1e-4}


def check_on_gpu(backend: str, **case: Any) -> None:
    reason = unserved_reason(backend, key_dim=case["key_dim"], value_dim=case["value_dim"], dtype=case["dtype"])
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    x = inputs(device="cuda", **case)
    found = errors(x, run_stages(stages(backend), x))
    bounds = dict.fromkeys(found, BOUNDS[case["dtype"]])
    # M is a product of as many factors as the span has chunks, rounded in each.
    bounds |= {"M": 2 * BOUNDS[case["dtype"]]}
    if case["dtype"] == torch.float16 and case.get("gate") == -20.0:
        # e^-20 is below what fp16 operands hold: what the state passes on is zero.
        for name in ("dg", "dinitial_state", "dinitial_state, early", "dh"):
            found.pop(name)
    wrong = {name: error for name, error in found.items() if not error < bounds[name]}
    assert not wrong, wrong


BACKENDS = pytest.mark.parametrize("backend", ["triton", "gluon"])


@pytest.mark.gpu(1)
@BACKENDS
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"batch": 2},
        {"batch": 5, "seq_len": 100},
        {"cu_seqlens": [0, 0, 64, 65, 500, 500, 1000, 1000]},
    ],
    ids=["one row", "batch in segments", "batch in groups", "documents"],
)
def test_gpu_segments(
    poison_empty: None, backend: str, case: dict[str, Any], with_state: bool, monkeypatch: pytest.MonkeyPatch
):
    from hf_cp.kernels.gdn import segments

    monkeypatch.setattr(segments, "SEGMENT_STATES", 5 * 4 * 128 * 128)
    monkeypatch.setattr(segments, "DOCUMENT_CHUNKS", 0)
    monkeypatch.setattr(segments, "PROGRAMS", 0)
    shape: dict[str, Any] = {"seq_len": 1000, "key_heads": 2, "key_dim": 128, "value_dim": 128}
    check_on_gpu(backend, **(shape | case), with_state=with_state, dtype=torch.bfloat16)


@pytest.mark.gpu(1)
@BACKENDS
@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (256, 256), (64, 128), (128, 64)])
def test_gpu_lengths_and_dims(poison_empty: None, backend: str, seq_len: int, key_dim: int, value_dim: int):
    # Enough heads that an error relative to the whole of dg or dbeta means something at one token.
    check_on_gpu(backend, seq_len=seq_len, key_heads=16, key_dim=key_dim, value_dim=value_dim, dtype=torch.bfloat16)


@pytest.mark.gpu(1)
@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        {"gate": 0.0},
        {"gate": -20.0},
        {"reset": 100},
        {"beta": 0.0},
        {"beta": 1.0},
        {"zero_keys": True},
        {"normalize": False},
        {"with_state": False},
        {"batch": 3},
        {"group": 1},
        {"group": 4},
        {"cu_seqlens": [0, 0, 5, 70, 70, 198, 300, 300]},
    ],
)
def test_gpu_inputs(poison_empty: None, backend: str, case: dict[str, Any], dtype: torch.dtype):
    check_on_gpu(backend, seq_len=300, key_dim=128, value_dim=128, dtype=dtype, **case)


@pytest.mark.gpu(1)
@BACKENDS
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("seq_len", [8192, 16384, 32768])
def test_gpu_long(backend: str, seq_len: int, with_state: bool, seed: int):
    case: Any = {"key_heads": 4, "key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    check_on_gpu(backend, seq_len=seq_len, with_state=with_state, seed=seed, **case)


@pytest.mark.gpu(1)
@BACKENDS
def test_gpu_runs_are_bitwise_equal(poison_empty: None, backend: str):
    x = inputs(1000, key_heads=4, key_dim=128, value_dim=128, dtype=torch.bfloat16, device="cuda")
    first = run_stages(stages(backend), x)
    for _ in range(29):
        again = run_stages(stages(backend), x)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.gpu(1)
@BACKENDS
def test_gpu_more_than_65535_states(backend: str):
    """As many one-token documents as rows of a batch: the same values, one packed."""
    count, dim = 40_000, 128 if backend == "gluon" else 64
    x = inputs(1, batch=count, key_dim=dim, value_dim=dim, dtype=torch.bfloat16, device="cuda")
    rows = run_stages(stages(backend), x)
    packed = {
        name: value.reshape(1, count, *value.shape[2:]) if name in ("q", "k", "v", "g", "beta", "do") else value
        for name, value in x.items()
    }
    packed["cu_seqlens"] = torch.arange(count + 1, device="cuda", dtype=torch.int32)
    documents = run_stages(stages(backend), packed)
    assert all(torch.equal(documents[name].flatten(), rows[name].flatten()) for name in documents)


@pytest.mark.gpu(1)
@BACKENDS
def test_gpu_more_than_2_31_elements(backend: str):
    """The last heads of a tensor of more than 2^31 elements come out as they do alone."""
    if torch.cuda.get_device_properties(0).total_memory < 100e9:
        pytest.skip("needs 100 GB of GPU memory")
    heads, seq_len = 128, 2**17 + 64
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, seq_len, heads, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    g = -torch.rand(shape[:3], device="cuda", generator=generator)
    beta = torch.rand(shape[:3], device="cuda", generator=generator).bfloat16()
    options: Any = {"scale": 0.1, "initial_state": None, "use_qk_l2norm_in_kernel": True}
    o, final_state = stages(backend).forward(q, k, v, g, beta, **options)
    part = [x[:, :, -2:].contiguous() for x in (q, k, v, g, beta)]
    o_part, final_part = stages(backend).forward(*part, **options)
    assert torch.equal(o[:, :, -2:], o_part)
    assert torch.equal(final_state[:, -2:], final_part)


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        print(json.dumps(interpret()))
    else:
        print(json.dumps(compile_launches()))
