"""`hf-cp bench` at toy size on the CPU: its tables and files, what it refuses to time, and where there is no GPU.

Between ranks the same: two that gloo joins, each of which runs the command.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cp import bench, bench_layer, bench_step
from hf_cp.bench_ranks import Ranks, joined, timed
from hf_cp.cli import main
from hf_cp.kernels.gdn import bench as gdn_bench
from hf_cp.mesh import CpMesh
from hf_cp.planning.memory import GIB, Training, estimate
from hf_cp.planning.shape import PUBLISHED
from hf_cp.testing import CommunicationLog, World

Worlds = Callable[..., World]

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
    right = bench_layer.make_layer

    def make_layer(variant: bench_layer.Variant, model: Any, *arguments: Any) -> Any:
        layer, parameters = right(variant, model, *arguments)
        wrong = variant.code == "eager" and model.dtype == torch.bfloat16
        return (lambda x: 1.05 * layer(x)) if wrong else layer, parameters

    monkeypatch.setattr(bench_layer, "make_layer", make_layer)
    assert main(LAYER) == 2
    said = capsys.readouterr()
    assert "hf-cp bench: eager is not timed: output is 5." in said.err
    assert "| eager |" not in said.out


def test_a_step_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench_step.prepare

    def prepare(model: Any, implementation: str, *others: Any) -> Any:
        model = right(model, implementation, *others)
        if implementation == "eager" and model.dtype == torch.float32:
            model.model.layers[0].linear_attn.in_proj_qkv.weight.register_hook(lambda gradient: 1.2 * gradient)
        return model

    monkeypatch.setattr(bench_step, "prepare", prepare)
    assert main(STEP) == 2
    said = capsys.readouterr()
    assert "eager is not timed: tiny: model.layers.0.linear_attn.in_proj_qkv.weight is 2.0e-01 away" in said.err
    assert not said.out


def test_steps_with_liger(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kernels do not run here; which models get them can be seen."""
    assert main([*STEP, "--liger"]) == 2
    assert "--liger: " in capsys.readouterr().err
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    arguments = parser.parse_args([*STEP[1:], "--liger"])
    found = bench_step.cases(arguments, [("eager", {}), ("stock", {})], 1, 0.0)
    assert {(case.code, case.liger) for case in found} == {("eager, liger", True), ("stock, liger", True)}

    # What is timed with it is what is compared with fp64, and the measure is stock without it.
    compared: list[str] = []

    def errors(case: bench_step.Case, *_: Any) -> dict[str, float]:
        compared.append(case.code if case.liger else f"{case.code} alone")
        return {"loss": 1e-3, "weight": 1e-3, bench_step.NORM: 1e-3}

    monkeypatch.setattr(bench_step, "exact", lambda *_: {})
    monkeypatch.setattr(bench_step, "errors", errors)
    bench_step.check(found, Ranks(CpMesh.single(), torch.device("cpu")), lambda line: None)
    assert compared == ["stock alone", "eager, liger", "stock, liger"]

    pytest.importorskip("liger_kernel")
    case = bench_step.Case("tiny", bench_step.TINY, "stock", 8, False, "bf16", (0, 1))
    for liger in (True, False):
        model = bench_step.model_of(replace(case, liger=liger), case.shape, torch.device("cpu"), torch.float32)
        layer = model.model.layers[0]
        for module in (model.model.norm, layer.input_layernorm, layer.post_attention_layernorm, layer.mlp):
            assert liger == ("liger" in module.forward.__func__.__module__)
        assert "forward" not in model.__dict__


def test_steps_of_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "--lora", "4", "--layer-code", "eager,stock", "--out", str(tmp_path)]) == 0
    # Only adapters have gradients: their matrices alone are compared, with both random, so that none is zero.
    assert "tiny: eager, lora 4 is at most" in capsys.readouterr().err
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert {row["layer code"] for row in rows} == {"eager, lora 4", "stock, lora 4"}
    case = bench_step.Case("tiny", bench_step.TINY, "eager", 8, False, "mixed", (0, 1), lora=4)
    found = bench_step.exact(case, torch.device("cpu"), torch.bfloat16)
    weights = set(found) - {"loss", bench_step.NORM}
    assert weights
    assert all("lora_" in name and found[name].norm() > 0 for name in weights)
    for options, said in ((["--precision", "bf16"], "--lora: --precision bf16: "), (["--lora", "-1"], "--lora -1: ")):
        assert main([*STEP, "--lora", "4", *options]) == 2
        assert said in capsys.readouterr().err


def test_steps_of_packed_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = [*STEP, "--documents", "3", "--tokens", "50"]
    assert main(packed) == 2
    assert "--documents 3: stock does not pack" in capsys.readouterr().err
    assert main([*packed, "--layer-code", "eager", "--out", str(tmp_path)]) == 0
    assert "tiny: eager, 3 documents is at most" in capsys.readouterr().err
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert {row["layer code"] for row in rows} == {"eager, 3 documents"}
    case = bench_step.Case("tiny", bench_step.TINY, "eager", 50, False, "mixed", (0, 1), documents=3)
    positions = bench_step.inputs_of(case, 50, torch.device("cpu"))["position_ids"]
    assert positions.tolist() == [[*range(17), *range(17), *range(16)]]
    # They are what is computed: one document of as many tokens has another loss.
    losses = [
        bench_step.exact(x, torch.device("cpu"), torch.float32)["loss"] for x in (case, replace(case, documents=1))
    ]
    assert abs(losses[0] / losses[1] - 1) > 1e-6


def test_steps_of_a_compiled_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is compared with fp64 and what is timed are both compiled, stock as the measure is not."""
    # To compile takes a minute: test_patch.py does.
    compiled: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model))
    command = [*STEP, "--checkpointing", "off", "--layer-code", "eager", "--compile", "--out", str(tmp_path)]
    assert main(command) == 0
    assert [len(model.model.layers) for model in compiled] == [len(bench_step.CHECKED_LAYERS), 4]
    assert "tiny: eager, compiled is at most" in capsys.readouterr().err
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [row["layer code"] for row in rows] == ["eager, compiled"]


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
        ([*STEP, "--layers", "two"], "--layers has 'two'"),
        ([*LAYER, "--tokens", "8k"], "--tokens has '8k'"),
        ([*LAYER, "--heads", "16"], "--heads 16: give two numbers, such as 16:32"),
    ],
)
def test_unknown_names(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert said in capsys.readouterr().err


NO_EFFECT = [
    ([*LAYER, "--lora", "8"], "--lora with --table layer: it has no effect there, leave it out or give --table step"),
    ([*LAYER, "--models", "tiny"], "--models with --table layer: it has no effect there, leave it out or give --table"),
    ([*LAYER, "--steps", "3"], "--steps with --table layer"),
    ([*STEP, "--hidden", "64"], "--hidden with --table step"),
    ([*STEP, "--deterministic"], "--deterministic with --table step"),
    ([*STEP, "--modes", "p2p"], "--modes on one device: it has no effect there, leave it out or start torchrun"),
    ([*LAYER, "--projection-backend", "fused"], "--projection-backend on one device: it has no effect there"),
    ([*STEP, "--table", "trajectory", "--liger"], "--liger with --table trajectory"),
    ([*STEP, "--table", "trajectory", "--profile", "x"], "--profile with --table trajectory"),
    ([*STEP, "--tokens", "longest"], "--tokens has 'longest' with --device cpu: it fills a GPU's memory"),
    ([*STEP, "--layer-code", "eager", "--documents", "33"], "--documents 33 in 32 tokens: give fewer, or more tokens"),
    ([*LAYER, "--heads", "4:2"], "--heads 4:2: give value heads, a multiple of the key heads, such as 16:32"),
    ([*LAYER, "--heads", "0:0"], "--heads 0:0: give value heads, a multiple of the key heads"),
    ([*LAYER, "--layer-type", "full", "--heads", "3:2"], "--heads 3:2: give query heads, a multiple of the key/value"),
    ([*LAYER, "--out", "/dev/null/x"], "--out /dev/null/x cannot be made a folder (Not a directory): give another"),
    ([*LAYER, "--profile", "/dev/null"], "--profile /dev/null cannot be made a folder (File exists): give another"),
]


@pytest.mark.parametrize(("options", "said"), NO_EFFECT)
def test_what_cannot_be_or_has_no_effect_is_one_line_before_anything_runs(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    found = capsys.readouterr()
    assert found.err.startswith(f"hf-cp bench: {said}")
    assert found.err.count("\n") == 1
    assert not found.out


def test_every_option_of_another_table_is_refused() -> None:
    """One that is new says in `SERVES` which tables it serves, or all have it."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    known = {name for names in bench.SERVES.values() for name in names}
    every = {"table", "device", "layer_code", "tokens", "local_tokens", "modes", "out"}
    assert set(vars(parser.parse_args([]))) == known | every


@pytest.mark.parametrize("option", ["vocab", "hidden", "dim"])
def test_sizes_are_above_zero(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*STEP, f"--{option}", "-5"])
    assert f"argument --{option}: '-5': give a whole number above 0" in capsys.readouterr().err


def test_what_fits() -> None:
    shape, training = PUBLISHED["4B"], Training(8192, precision="mixed")
    cut = bench_step.fitting_layers(shape, training, 60 * GIB)
    assert 4 < len(cut.layer_types) < len(shape.layer_types)
    assert estimate(cut, training).peak <= 60 * GIB
    length = bench_step.longest(PUBLISHED["0.8B"], training, 120 * GIB)
    assert estimate(PUBLISHED["0.8B"], Training(length)).peak <= 120 * GIB
    assert estimate(PUBLISHED["0.8B"], Training(length + 8192)).peak > 120 * GIB


def test_a_line_through_the_layers() -> None:
    assert bench_step.fit([4, 8], [854.047, 1686.321]) == pytest.approx((21.773, 208.0685))
    assert bench_step.fit([4, 8, 12], [10, 20, 30]) == pytest.approx((0, 2.5))
    with pytest.raises(ValueError, match="a line needs two numbers of layers"):
        bench_step.fit([4, 4], [1.0, 2.0])
    row = {"model": "report", "mode": "p2p/ulysses", "tokens": 64}
    rows = [row | {"layers": 4, "step ms": 30.0}, row | {"layers": 8, "step ms": 50.0}]
    rows += [row | {"mode": "other", "layers": 8, "step ms": 9.0}, row | {"layers": 12, "note": "out of memory"}]
    assert bench_step.fits(rows) == [row | {"layers": "fit", "note": "T = 10.00 ms + 5.00 ms x layers"}]


# Between ranks.

RANKS = ["bench", "--device", "cpu", "--layer-code", "eager"]
RANKS_LAYER = [*RANKS, "--hidden", "32", "--heads", "2:4", "--dim", "16", "--local-tokens", "16"]
RANKS_FULL = [*RANKS, "--layer-type", "full", "--hidden", "32", "--heads", "4:2", "--dim", "16", "--tokens", "32"]
RANKS_STEP = [*RANKS, "--table", "step", "--models", "tiny", "--local-tokens", "16"]


def run_command(rank: int, size: int, command: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = main(command)
    return status, out.getvalue(), error.getvalue()


def table_rows(ranks: list[tuple[int, str, str]], folder: Path, name: str) -> list[dict[str, Any]]:
    """What the first rank wrote; the others may say nothing of it."""
    assert [status for status, _, _ in ranks] == [0, 0], ranks
    assert ranks[0][1].startswith(f"2 x CPU, torch {torch.__version__}")
    assert ranks[1][1] == ""
    assert "away from fp64" not in ranks[1][2]
    content = json.loads((folder / f"{name}.json").read_text())
    assert content["conditions"]["command"].startswith("torchrun --nproc-per-node 2 -m hf_cp.bench --device cpu")
    printed = [line for line in ranks[0][1].splitlines() if line.startswith("| ")]
    assert len(printed) == 1 + len(content["rows"])
    return content["rows"]


def events(path: Path) -> Counter[str]:
    """How often each name occurs in a trace, of gloo's messages without a prefix."""
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(event["name"].removeprefix("gloo:") for event in found if event.get("ph") == "X")


# Forward and backward of one Gated DeltaNet layer. Of the two ranks, each sends in one direction and receives in the
# other: the halo of the convolution, and in p2p the state.
LAYER_MESSAGES = {
    "p2p": {"send": 2, "recv": 2},
    "allgather": {"all_gather": 2, "send": 1, "recv": 1},
    "ulysses": {"all_to_all": 4, "send": 1, "recv": 1},
}
MESSAGES = ("send", "recv", "all_gather", "all_to_all", "all_reduce", "barrier")


def test_layers_between_ranks(world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "traces"
    command = [*RANKS_LAYER, "--out", str(tmp_path), "--profile", str(traces)]
    rows = table_rows(world(2).run(run_command, command), tmp_path, "layer")
    found = [(row["mode"], row["ranks"], row["tokens"], row["local tokens"]) for row in rows]
    modes = ["p2p", "allgather", "ulysses"]
    alone = [("one device", 1, tokens, tokens) for tokens in (16, 32)]
    assert found == [*((mode, 2, 32, 16) for mode in modes), *alone]
    for row in rows:
        assert 0 < row["forward min"] <= row["forward ms"] <= row["forward p90"]
        assert 0 < row["both min"] <= row["both ms"] <= row["both p90"]
        assert row["backward ms"] == pytest.approx(row["both ms"] - row["forward ms"])
    assert (tmp_path / "layer.png").stat().st_size > 5_000

    names = [f"layer-eager-{mode}-2x16-rank{rank}.json.gz" for mode in modes for rank in (0, 1)]
    assert sorted(path.name for path in traces.iterdir()) == sorted(names)
    for mode in modes:
        files = [str(path) for path in traces.glob(f"layer-eager-{mode}-*.json.gz")]
        assert main(["trace", "--json", *files]) == 0
        table = json.loads(capsys.readouterr().out)
        mixers = [row for row in table if row["layer"] == "linear_attn.0"]
        assert [row["rank"] for row in mixers] == [0, 1]
        assert all(row["communication ms"] > 0 and row["computing ms"] > 0 for row in mixers)
        for path in map(Path, files):
            found = events(path)
            assert {name: found[name] for name in MESSAGES if found[name]} == LAYER_MESSAGES[mode], path

    rows = table_rows(world(2).run(run_command, [*RANKS_FULL, "--out", str(tmp_path)]), tmp_path, "layer")
    assert [(row["mode"], row["tokens"]) for row in rows] == [
        *(("ulysses", 32), ("allgather", 32)),
        *(("one device", 16), ("one device", 32)),
    ]


def test_steps_between_ranks(world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*RANKS_STEP, "--modes", "p2p,ulysses", "--layers", "1,2", "--out", str(tmp_path)]
    ranks = world(2).run(run_command, command)
    rows = table_rows(ranks, tmp_path, "step")
    modes = [f"{mode}/ulysses" for mode in ("p2p", "ulysses")]
    assert all(f"tiny: eager, {mode} is at most" in ranks[0][2] for mode in modes)
    assert [(row["layers"], row["mode"]) for row in rows] == [(n, mode) for n in (1, 2, "fit") for mode in modes]
    for row in rows[:4]:
        assert row["tokens"] == 32
        assert row["tokens/s"] == pytest.approx(32e3 / row["step ms"], abs=1)
        assert all(row[f"{part} ms"] > 0 for part in ("forward", "backward", "optimizer"))
    # Far apart in a model as small as this one.
    assert sum(row["optimizer ms"] for row in rows[:4]) < sum(row["forward ms"] for row in rows[:4])
    assert all("x layers" in row["note"] for row in rows[4:])

    traces = tmp_path / "traces"
    # Short documents are further from fp64 in bf16 than one sequence is, on one device too.
    ranks = world(2).run(run_command, [*RANKS_STEP, "--modes", "p2p", "--documents", "5"])
    assert "| p2p/ulysses | 2 | 32 | 16 | off | eager, 5 documents |" in ranks[0][1], ranks
    assert "tiny: eager, 5 documents, p2p/ulysses is at most" in ranks[0][2]
    ranks = world(2).run(run_command, [*RANKS_STEP, "--modes", "p2p", "--lora", "4"])
    assert "| p2p/ulysses | 2 | 32 | 16 | off | eager, lora 4 |" in ranks[0][1], ranks
    command = [*RANKS_STEP, "--modes", "allgather", "--attention-mode", "allgather", "--checkpointing", "full"]
    ranks = world(2).run(run_command, [*command, "--profile", str(traces)])
    assert "| allgather/allgather | 2 | 32 | 16 | full |" in ranks[0][1]
    files = sorted(traces.iterdir())
    stem = "step-tiny-4layers-eager-allgather-allgather-2x16-full"
    assert [path.name for path in files] == [f"{stem}-rank0.json.gz", f"{stem}-rank1.json.gz"]
    assert main(["trace", "--json", *map(str, files)]) == 0
    table = json.loads(capsys.readouterr().out)
    # All four layers' messages, and FSDP's outside of them.
    for layer in ("linear_attn.0", "linear_attn.2", "self_attn.3", "outside"):
        assert all(row["communication ms"] > 0 for row in table if row["layer"] == layer)
    # The halos of three layers, forward and again in the recomputation, and their gradients; one step of the optimizer.
    for path, sent, received in zip(files, (6, 3), (3, 6), strict=True):
        found = events(path)
        assert (found["send"], found["recv"], found["barrier"]) == (sent, received, 0)
        assert found["Optimizer.step#AdamW.step"] == 1


def wrong_layer(rank: int, size: int) -> tuple[int, str, str]:
    """The second rank alone is wrong by five percent, in one mode alone."""
    right = bench_layer.make_layer

    def make_layer(variant: bench_layer.Variant, *arguments: Any) -> Any:
        layer, parameters = right(variant, *arguments)
        return (lambda x: 1.05 * layer(x)) if rank == 1 and variant.mode == "allgather" else layer, parameters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_layer, "make_layer", make_layer)
        return run_command(rank, size, RANKS_LAYER)


def wrong_model(rank: int, size: int) -> tuple[int, str, str]:
    """One mode's model computes with other weights than it should."""
    right = bench_step.spread

    def spread(model: Any, case: bench_step.Case, ranks: Ranks) -> Any:
        if case.settings["linear_mode"] == "ulysses":
            with torch.no_grad():
                model.model.layers[0].linear_attn.out_proj.weight.mul_(1.2)
        return right(model, case, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_step, "spread", spread)
        return run_command(rank, size, RANKS_STEP)


@pytest.mark.parametrize(
    ("case", "said"),
    [(wrong_layer, "eager, allgather is not timed: "), (wrong_model, "eager, ulysses/ulysses is not timed: tiny: ")],
)
def test_what_is_wrong_between_ranks_is_not_timed(world: Worlds, case: Any, said: str) -> None:
    ranks = world(2).run(case)
    assert [status for status, _, _ in ranks] == [2, 2]
    lines = [error.splitlines()[-1] for _, _, error in ranks]
    assert lines[0] == lines[1]
    assert f"hf-cp bench: {said}" in lines[0]
    assert all(out == "" for _, out, _ in ranks)


REFUSED = [
    ([*RANKS_LAYER, "--layer-code", "stock"], "--layer-code has 'stock', which runs on one device only"),
    ([*RANKS_LAYER, "--modes", "zigzag"], "--modes has 'zigzag': give some of p2p, allgather, ulysses"),
    ([*RANKS_FULL, "--modes", "p2p"], "--modes has 'p2p': give some of ulysses, allgather"),
    ([*RANKS_LAYER, "--heads", "1:2"], "linear_mode=ulysses: 2 ranks do not divide 1/2 heads"),
    ([*RANKS_LAYER, "--tokens", "32"], "--tokens and --local-tokens: give one of the two"),
    ([*RANKS_FULL, "--tokens", "33"], "--tokens has 33: 2 ranks need the same number of tokens each"),
    ([*RANKS_LAYER, "--projection-backend", "fused"], 'projection_backend="fused" needs an NVIDIA Hopper GPU'),
    ([*RANKS_STEP, "--local-tokens", "longest"], "--local-tokens has 'longest'"),
    ([*RANKS_STEP, "--compile"], "--compile is for one device"),
]


def refused_commands(rank: int, size: int) -> list[tuple[int, str, int]]:
    """Status, error and number of messages of each refused command."""
    found = []
    for command, _ in REFUSED:
        with CommunicationLog() as log:
            status, _, error = run_command(rank, size, command)
        found.append((status, error, log.count()))
    return found


@needs_no_gpu
def test_refusals_between_ranks(world: Worlds) -> None:
    first, second = world(2).run(refused_commands)
    assert first == second
    for (status, error, messages), (command, said) in zip(first, REFUSED, strict=True):
        assert (status, messages) == (2, 0), command
        assert said in error
        assert error.count("\n") == 1


def slow_second_rank(rank: int, size: int) -> tuple[list[float], list[list[float]], list[float]]:
    def call(mark: Callable[[], None]) -> None:
        time.sleep(0.03 * rank)
        mark()
        time.sleep(0.03 * (1 - rank))

    with joined(torch.device("cpu")) as ranks:
        timing = timed(call, ranks, 1, 3)
        return timing.calls, timing.parts, ranks.largest([float(rank), math.nan if rank else 0.0])


def test_the_slowest_rank_counts(world: Worlds) -> None:
    """Each rank is the slow one in one part: neither part nor whole may be a rank's own."""
    first, second = world(2).run(slow_second_rank)
    assert first == second
    calls, parts, largest = first
    assert len(calls) == 3
    assert len(parts) == 2
    assert all(x > 28 for x in (*calls, *parts[0], *parts[1]))
    assert largest == [1.0, math.inf]


def test_one_rank_measures_alone() -> None:
    ranks = Ranks(CpMesh.single(), torch.device("cpu"))
    timing = timed(lambda mark: time.sleep(0.002), ranks, 0, 4)
    assert timing.least <= timing.median <= timing.p90 == max(timing.calls)
    assert timing.part_medians == [timing.median]
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        timed(lambda mark: None, ranks, 2, 0)
