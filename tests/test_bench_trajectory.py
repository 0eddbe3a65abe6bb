"""The table of trajectories at toy size: two gloo ranks and one device, its files, bit for bit, and its verdicts."""

from __future__ import annotations

import argparse
import gc
import json
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cp import bench, bench_trajectory
from hf_cp.bench_step import make_model
from hf_cp.bench_trajectory import (
    SHAPES,
    Case,
    Curve,
    Windows,
    difference,
    failures,
    learned_tokens,
    make_token_file,
    redraw_as_torch,
    summary,
    train,
)
from hf_cp.testing import World

# Memory is read after a collection, which in a forked rank would walk, and copy, all that was imported.
gc.freeze()
Worlds = Callable[..., World]
TABLE = ["--table", "trajectory", "--device", "cpu"]
CPU = [*TABLE, "--steps", "4", "--tokens", "67"]


def run(argv: list[str], command: Callable[..., int] = bench.run) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return command(parser.parse_args(argv), argv)


def on_ranks(rank: int, size: int, commands: list[list[str]]) -> list[int]:
    return [run(argv) for argv in commands]


def refusal(argv: list[str], command: Callable[..., int] = bench.run) -> str:
    with pytest.raises(ValueError, match=r"^--") as error:
        run(argv, command)
    return str(error.value)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trajectory.json").read_text())["rows"]


def runs_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trajectory_curves.json").read_text())["runs"]


def test_two_ranks_follow_one_device(world: Worlds, tmp_path: Path) -> None:
    """Checkpointed or not, repeated, in every mode, with the one device from a file, and held to a bound."""
    data, one = tmp_path / "tokens.bin", tmp_path / "one"
    make_token_file(data, 4 * 67)
    given = [*CPU, "--data", str(data)]
    assert run([*given, "--one-device", "stock", "--out", str(one)]) == 0
    reference = [*given, "--reference", str(one / "trajectory_curves.json")]
    mixed = [*given, "--steps", "2", "--precision", "mixed"]
    two, modes, shared, strict = (tmp_path / name for name in ("two", "modes", "shared", "strict"))
    expected = ["--reference", str(strict / "trajectory_curves.json")]
    commands = [
        [*reference, "--deterministic", "--checkpointing", "off,full", "--out", str(two)],
        [*reference, "--steps", "2", "--linear-mode", "ulysses", "--attention-mode", "allgather", "--out", str(modes)],
        [*mixed, "--bound-norm", "1e-9", "--out", str(strict)],
        [*mixed, "--gradients", "shared", "--repeat", "2", "--out", str(shared), *expected],
    ]
    assert world(2).run(on_ranks, commands, timeout=120) == [[0, 0, 1, 0], [0, 0, 0, 0]]

    # A run of its own, which on a CPU is the same, is the first row of the one device.
    for folder, ranks in ((one, [1]), (strict, [1, 2])):
        assert rows_of(folder)[0] | {"linear": "one device", "run": 2, "max loss rel": 0} == rows_of(folder)[0]
        assert rows_of(folder)[0]["bitwise"] == "equals run 1"
        assert [row["ranks"] for row in rows_of(folder)] == ranks
    rows = rows_of(two)
    assert [row["bitwise"] for row in [*rows, *rows_of(shared)]] == ["", "equals off", "", "equals run 1"]
    for row in [*rows, *rows_of(modes)]:
        assert row["max loss rel"] < 1e-6
        assert row["max norm rel"] < 1e-6
        assert row["ranks"] == 2
    # Rounding differs, or both sides would be the same run.
    assert all(row["max norm rel"] > 0 for row in rows)
    curves = json.loads((one / "trajectory_curves.json").read_text())["one device"]
    assert len(set(curves["windows"])) == len(set(curves["losses"])) == 4
    assert [row["steps"] for row in rows_of(modes)] == [2]
    # Weights whole and gradients averaged in shared memory are FSDP2, bit by bit, and 16 bits are seen.
    sharded, whole = runs_of(strict), runs_of(shared)
    assert list(sharded) == ["one device, off, 2", "p2p, ulysses, off, 1"]
    for name, curve in [*sharded.items()][1:]:
        assert curve["losses"] == whole[name]["losses"]
        assert curve["norms"] == pytest.approx(whole[name]["norms"], rel=1e-12)
    assert rows_of(strict)[1]["max norm rel"] > 1e-6
    assert (two / "trajectory.png").stat().st_size > 10_000
    assert "| max loss rel |" in (two / "trajectory.md").read_text()


CURVE = Curve([4.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1, 2, 3], [7, 8], 0, 0.1)


def test_verdicts() -> None:
    row = summary(replace(CURVE, losses=[4.0, 2.002, 1.0], norms=[1.0, 1.0, 0.9]), CURVE)
    assert row["max loss abs"] == pytest.approx(2e-3)
    assert row["max loss rel"] == pytest.approx(1e-3)
    assert row["mean norm rel"] == pytest.approx(0.1 / 3)
    assert failures(row, 1.1e-3, 0.11) == []
    assert failures(row, 0.9e-3, 0.09) == [
        "max loss rel 1.00e-03 is above 9.0e-04",
        "max norm rel 1.00e-01 is above 9.0e-02",
    ]
    broken = summary(replace(CURVE, losses=[4.0, float("nan"), 1.0]), CURVE)
    assert failures(broken, 1.0, 1.0) == ["max loss rel inf is above 1.0e+00", "1 numbers are not finite"]
    assert difference(CURVE, replace(CURVE)) is None
    assert difference(CURVE, replace(CURVE, norms=[1.0, 1.0 + 2**-52, 1.0])) == "gradient norm of step 2"
    assert difference(CURVE, replace(CURVE, weights=[7, 9])) == "the weights at the end"


def test_windows_and_what_is_refused(tmp_path: Path) -> None:
    data, other = tmp_path / "data.bin", tmp_path / "other.bin"
    make_token_file(data, 300)
    windows = Windows(data, 100, 3, 256)
    batch = windows.batch(2, torch.device("cpu"))
    padding = int((batch["attention_mask"] == 0).sum())
    assert padding == 74 % 13
    assert (batch["labels"][0, -padding:] == -100).all()
    assert (batch["labels"][0, :-padding] == batch["input_ids"][0, :-padding]).all()
    assert bytes(batch["input_ids"][0].tolist()) == data.read_bytes()[400:600:2]

    small = [*TABLE, "--tokens", "32", "--steps", "1"]
    assert "holds 3 windows" in refusal([*small, "--data", str(data), "--tokens", "100", "--steps", "4"])
    other.write_bytes(b"\x00\x01" * 200)
    assert "has token 256" in refusal([*small, "--data", str(other)])
    assert "--modes has 'ring'" in refusal([*small, "--linear-mode", "ring"])
    assert "--steps 0" in refusal([*small, "--steps", "0"])
    assert "--tokens 1: give at least 2" in refusal([*small, "--tokens", "1"])
    assert "--bound-norm -1: give a relative error" in refusal([*small, "--bound-norm", "-1"])
    assert "--out /dev/null/x cannot be made a folder" in refusal([*small, "--out", "/dev/null/x"])
    # Refused before there need be a GPU.
    gpu = [*small, "--deterministic", "--device", "cuda"]
    assert "--one-device stock: on GPUs" in refusal([*gpu, "--one-device", "stock"], bench_trajectory.run)
    assert "--layer-code eager: on GPUs" in refusal([*gpu, "--layer-code", "eager"], bench_trajectory.run)
    assert run([*small, "--out", str(tmp_path)]) == 0
    reference = ["--reference", str(tmp_path / "trajectory_curves.json")]
    assert "has 1 steps" in refusal([*small, *reference, "--steps", "2"])
    assert "has precision 'fp32', this run 'mixed'" in refusal([*small, *reference, "--precision", "mixed"])
    assert "has initial weights 'transformers'" in refusal([*small, *reference, "--initial-weights", "torch"])
    other.write_bytes(b"\x02\x00" * 200)
    assert "trained on other tokens" in refusal([*small, *reference, "--data", str(other)])
    assert "give a trajectory_curves.json" in refusal([*small, "--reference", str(data)])


def test_learned_tokens_spell_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokenizer each time, more tokens after the same first ones, and all of them in the vocabulary."""
    monkeypatch.setattr(bench_trajectory, "LEARNED_FROM", 100_000)
    vocab, files = 400, [tmp_path / "some.bin", tmp_path / "more.bin"]
    for file, count in zip(files, (3000, 5000), strict=True):
        make_token_file(file, count, vocab)
    some, more = (file.read_bytes() for file in files)
    assert len(some) == 6000
    assert more[:6000] == some
    windows = Windows(files[1], 1000, 5, vocab)
    ids = [int(x) for step in range(5) for x in windows.batch(step, torch.device("cpu"))["input_ids"][0]]
    assert max(ids) > 256
    text = (Path(sysconfig.get_path("stdlib")) / "__future__.py").read_text()
    assert learned_tokens(vocab).decode(ids)[: len(text)] == text
    with pytest.raises(ValueError, match="vocabulary is 300: tokenise with fewer"):
        Windows(files[1], 1000, 5, 300)


def test_initial_weights_as_torch_draws_them(tmp_path: Path) -> None:
    make_token_file(tmp_path / "data.bin", 64)
    windows = Windows(tmp_path / "data.bin", 64, 1, 256)
    device = torch.device("cpu")
    curve = train(Case("tiny", "fp32", 1, "stock", device, initial_weights="torch"), windows)
    model = make_model(SHAPES["tiny"], "cpu", torch.float32)
    redraw_as_torch(model)
    assert curve.losses == [pytest.approx(model(**windows.batch(0, device)).loss.item(), rel=1e-6)]
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(1, rel=0.03)
    assert model.lm_head.weight.abs().max().item() == pytest.approx(64**-0.5, rel=0.01)
