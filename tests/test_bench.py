"""`hf-cp bench` at toy size on the CPU: its tables and files, what it refuses to time, and where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cp import bench, bench_step
from hf_cp.cli import main
from hf_cp.kernels.gdn import bench as gdn_bench
from hf_cp.planning.memory import GIB, Training, estimate
from hf_cp.planning.shape import PUBLISHED

CPU = ["bench", "--device", "cpu", "--layer-code", "eager,stock", "--tokens", "32"]
LAYER = [*CPU, "--hidden", "32", "--heads", "1:2", "--dim", "16"]
STEP = [*CPU, "--table", "step", "--models", "tiny", "--checkpointing", "off,full", "--precision", "mixed"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("command", "rows", "value"), [(LAYER, 2, "both ms"), (STEP, 4, "tokens/s")], ids=["layer", "step"]
)
def test_tables_and_files(
    command: list[str], rows: int, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"CPU, torch {torch.__version__}")
    assert "eager is at most" in said.err
    name = "step" if "step" in command else "layer"
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert content["conditions"]["torch"] == torch.__version__
    assert content["conditions"]["command"] == f"hf-cp {' '.join(command)} --out {tmp_path}"
    assert len(content["rows"]) == rows
    assert all(row[value] > 0 and row["tokens"] == 32 for row in content["rows"])
    assert said.out.count("\n| eager |") + said.out.count("| eager |") >= rows // 2
    assert f"| {value} |" in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_a_layer_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that is wrong by five percent in bfloat16: no row, one line, a failing status."""
    right = bench.make_layer

    def make_layer(name: str, model: Any, tokens: int) -> Any:
        layer, parameters = right(name, model, tokens)
        wrong = name == "eager" and model.dtype == torch.bfloat16
        return (lambda x: 1.05 * layer(x)) if wrong else layer, parameters

    monkeypatch.setattr(bench, "make_layer", make_layer)
    assert main(LAYER) == 2
    said = capsys.readouterr()
    assert "hf-cp bench: eager is not timed: output is 5." in said.err
    assert "| eager |" not in said.out


def test_a_step_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench_step.prepare

    def prepare(model: Any, implementation: str) -> Any:
        model = right(model, implementation)
        if implementation == "eager" and model.dtype == torch.float32:
            model.model.layers[0].linear_attn.in_proj_qkv.weight.register_hook(lambda gradient: 1.2 * gradient)
        return model

    monkeypatch.setattr(bench_step, "prepare", prepare)
    assert main(STEP) == 2
    said = capsys.readouterr()
    assert "eager is not timed: tiny: model.layers.0.linear_attn.in_proj_qkv.weight is 2.0e-01 away" in said.err
    assert not said.out


def test_errors_that_are_permitted() -> None:
    stock = {"loss": 1e-5, "a": 1e-2, "b": 1e-4, "c": 2e-2}
    assert bench_step.refusal(stock, stock) is None
    assert bench_step.refusal(stock | {"b": 1.9e-2}, stock) is None  # within twice the median
    for wrong in ({"b": 2.1e-2}, {"a": float("nan")}, {"loss": 2e-3}, {"c": 4.1e-2}):
        assert bench_step.refusal(stock | wrong, stock) is not None


@needs_no_gpu
def test_without_a_gpu_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench"]) == 2
    error = capsys.readouterr().err
    assert "PyTorch sees no CUDA GPU" in error
    assert "--device cpu" in error
    assert error.count("\n") == 1
    for module in (bench, gdn_bench):
        monkeypatch.setattr(sys, "argv", ["bench"])
        with pytest.raises(SystemExit, match="PyTorch sees no CUDA GPU"):
            module.main()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*LAYER, "--layer-code", "fast"], "--layer-code has 'fast'"),
        ([*STEP, "--models", "13B"], "--models has '13B'"),
        ([*STEP, "--checkpointing", "some"], "--checkpointing has 'some'"),
    ],
)
def test_unknown_names(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert said in capsys.readouterr().err


def test_what_fits() -> None:
    shape, training = PUBLISHED["4B"], Training(8192, precision="mixed")
    cut = bench_step.fitting_layers(shape, training, 60 * GIB)
    assert 4 < len(cut.layer_types) < len(shape.layer_types)
    assert estimate(cut, training).peak <= 60 * GIB
    length = bench_step.longest(PUBLISHED["0.8B"], training, 120 * GIB)
    assert estimate(PUBLISHED["0.8B"], Training(length)).peak <= 120 * GIB
    assert estimate(PUBLISHED["0.8B"], Training(length + 8192)).peak > 120 * GIB
