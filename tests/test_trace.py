"""`hf-cp trace` on the traces of two gloo ranks and of a GPU, the names in profiles, and the line at the start."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import hf_cp
from hf_cp import regions, report, trace
from hf_cp.cli import main
from hf_cp.testing import World, tiny_qwen3_5

LAYERS = ["linear_attn.0", "linear_attn.1", "linear_attn.2", "self_attn.3"]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextlib.contextmanager
def logged() -> Any:
    """What the package says, from INFO on."""
    logger, handler = logging.getLogger("hf_cp"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def profiled_case(rank: int, size: int, folder: str, checkpointing: bool) -> list[str]:
    model = tiny_qwen3_5().train()
    hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.arange(256)[None] % 90 + 1
    with logged() as lines:
        model(input_ids=ids, labels=ids).loss.backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(input_ids=ids, labels=ids).loss.backward()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    return lines


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gloo_traces(
    world: Callable[..., World], tmp_path: Path, checkpointing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = world(2).run(profiled_case, str(tmp_path), checkpointing)
    assert lines == [
        [
            "INFO Qwen3_5TextModel: 3 Gated DeltaNet layers (p2p, eager), 1 of full attention (ulysses, sdpa); "
            "cp_size 2 of 2 processes; projections torch; pure torch on CPU"
        ],
        [],
    ]
    picture = tmp_path / "trace.png"
    files = [str(tmp_path / f"rank{rank}.json") for rank in (1, 0)]
    assert main(["trace", *files, "--json", "--picture", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert picture.stat().st_size > 10_000
    for rank in (0, 1):
        mine = {row["layer"]: row for row in rows if row["rank"] == rank}
        assert list(mine) == [*LAYERS, "head", "outside", "all"]
        for row in mine.values():
            overlap = row["not overlapped ms"] + row["overlapped ms"]
            assert overlap == pytest.approx(row["communication ms"], abs=1e-6)
            assert row["computing ms"] > 0
        assert all(mine[layer]["communication ms"] > 0 for layer in LAYERS)
        parts = sum(mine[layer]["computing ms"] for layer in [*LAYERS, "head", "outside"])
        assert parts == pytest.approx(mine["all"]["computing ms"], rel=1e-6)
    # The messages of both directions, and those that recomputation repeats: chain and halo, or two all-to-alls.
    repeats = 3 if checkpointing else 2
    work = trace.read(tmp_path / "rank0.json").work
    count = {layer: sum(w.is_message and w.layer == layer for w in work) for layer in LAYERS}
    assert count == dict.fromkeys(LAYERS, 2 * repeats)


def test_backward_belongs_to_its_layer(tmp_path: Path) -> None:
    """The backward of a layer computes about twice what its forward does, and counts for it."""
    model = tiny_qwen3_5().train()
    hf_cp.patch(model, gdn_backend="eager")
    ids = torch.arange(256)[None] % 90 + 1
    path = tmp_path / "trace.json"
    times = []
    for backward in (False, True):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss = model(input_ids=ids, labels=ids).loss
            if backward:
                loss.backward()
        profiler.export_chrome_trace(str(path))
        content = json.loads(path.read_text())
        operators = {
            event["name"]: event["ts"] for event in content["traceEvents"] if event.get("cat") == "user_annotation"
        }
        assert {f"hf_cp::{layer}" for layer in LAYERS} <= set(operators)
        assert {f"hf_cp::{part}" for part in ("project", "conv", "gates", "delta_rule", "norm", "head")} <= set(
            operators
        )
        work = trace.read(path).work
        times.append({layer: sum(w.layer == layer for w in work) for layer in LAYERS})
    for layer in LAYERS:
        assert times[1][layer] > 1.5 * times[0][layer], (layer, times)


def test_no_names_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was named")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    model = hf_cp.patch(tiny_qwen3_5(num_hidden_layers=1, layer_types=["linear_attention"]), gdn_backend="eager")
    model(input_ids=torch.arange(1, 9)[None])
    assert regions.region("conv") is regions.region("norm")
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(AssertionError, match=r"hf_cp::linear_attn\.0 was named"),
    ):
        model(input_ids=torch.arange(1, 9)[None])


def event(name: str, cat: str, tid: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": begin, "dur": end - begin, "args": args}


# A layer on the host, its backward in another thread, and the kernels that both started; microseconds.
GPU_EVENTS = [
    event("hf_cp::linear_attn.0", "user_annotation", 1, 0, 100),
    event("aten::mm", "cpu_op", 1, 10, 20, **{"Sequence number": 7, "Fwd thread id": 0}),
    event("cudaLaunchKernel", "cuda_runtime", 1, 12, 13, correlation=1),
    event("cudaLaunchKernel", "cuda_runtime", 1, 30, 31, correlation=2),
    event("aten::add", "cpu_op", 1, 110, 120, **{"Sequence number": 8, "Fwd thread id": 0}),
    event("cudaLaunchKernel", "cuda_runtime", 1, 111, 112, correlation=3),
    event("autograd::engine::evaluate_function: AddBackward0", "cpu_op", 2, 200, 210, **{"Sequence number": 8}),
    event("cudaLaunchKernel", "cuda_runtime", 2, 201, 202, correlation=4),
    event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 2, 220, 240, **{"Sequence number": 7}),
    event("cudaLaunchKernel", "cuda_runtime", 2, 221, 222, correlation=5),
    event("gemm", "kernel", 7, 1000, 3000, correlation=1),
    event("ncclDevKernel_SendRecv", "kernel", 9, 2000, 4000, correlation=2),
    event("elementwise", "kernel", 7, 3500, 4500, correlation=3),
    event("elementwise", "kernel", 7, 5000, 5500, correlation=4),
    event("gemm", "kernel", 7, 6000, 7000, correlation=5),
]


def test_gpu_trace(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": GPU_EVENTS, "distributedInfo": {"rank": 3}}).encode()))
    assert trace.table(trace.read(path)) == [
        {
            "rank": 3,
            "layer": layer,
            "computing ms": computing,
            "communication ms": communication,
            "not overlapped ms": apart,
            "overlapped ms": communication - apart,
        }
        for layer, computing, communication, apart in (
            ("linear_attn.0", 3.0, 2.0, 0.5),
            ("outside", 1.5, 0.0, 0.0),
            ("all", 4.5, 2.0, 0.5),
        )
    ]


def test_intervals() -> None:
    assert trace.union([(3, 4), (0, 2), (1, 2.5), (4, 5), (6, 6)]) == [(0, 2.5), (3, 5)]
    assert trace.common([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == [(1, 2), (3, 4), (4.5, 5)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as a trace"),
        ("[]", "has no traceEvents"),
        ('{"traceEvents": []}', "has no operators"),
        ('{"traceEvents": [1, {"ph": "X", "cat": "cpu_op", "dur": 1}]}', "has no operators"),
    ],
)
def test_other_files_are_refused(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert main(["trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["trace", "none.json"], ["plan", "--model", "none"]):
        for picture, said in ((tmp_path, " is a folder"), (tmp_path / "x.txt", ": give a name that ends in .png")):
            assert main([*command, "--picture", str(picture)]) == 2
            error = capsys.readouterr().err
            assert f"--picture {picture}{said}" in error
            assert error.count("\n") == 1
        with monkeypatch.context() as patch:
            patch.setattr(report, "find_spec", lambda name: None)
            assert main([*command, "--picture", "x.png"]) == 2
        assert "--picture x.png needs matplotlib, which is not installed: pip install" in capsys.readouterr().err
