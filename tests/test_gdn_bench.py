"""The bench of the delta rule without a GPU: its processes and their lock, what it refuses, its tables and its file."""

from __future__ import annotations

import inspect
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cp.kernels.gdn import bench

# A process that compiles for some seconds, and is then timed twice; it sends when, by a clock that all share.
WORKER = f"""
import fcntl, os, sys, time
from contextlib import contextmanager
from multiprocessing.connection import Connection
Iterator = list
{inspect.getsource(bench.Card)}
seconds, send, descriptor = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
pipe, card = Connection(send, readable=False), Card(descriptor)
print("what a library says")
time.sleep(seconds)
pipe.send(time.monotonic())
pipe.send("compiled")
if seconds == 0:
    sys.exit(3)
card.free()
for _ in range(2):
    with card.alone():
        begin = time.monotonic()
        time.sleep(0.1)
        pipe.send((begin, time.monotonic()))
"""


def test_processes_compile_together_and_are_timed_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """None is timed while one compiles or another is timed; who takes too long is ended, and who fails is named."""
    seconds = {"fast": 0.1, "slow": 0.8, "late": 600.0, "failing": 0.0}
    commands = {name: [sys.executable, "-c", WORKER, str(value)] for name, value in seconds.items()}
    said: dict[str, list[Any]] = {name: [] for name in commands}
    begin = time.monotonic()
    for name, message in bench.side_by_side(commands, limit=4.0):
        said[name].append(message)
    assert said["late"] == [None]
    assert said["failing"][1:] == ["compiled", 3]
    timed = []
    for name in ("fast", "slow"):
        _, compiled, *intervals, status = said[name]
        assert (compiled, len(intervals), status) == ("compiled", 2, 0)
        timed += intervals
    timed.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(timed))
    # The late one was ended before the first was timed.
    assert timed[0][0] >= begin + 4.0
    assert capfd.readouterr().out == ""


def test_timing_begins_with_the_last_that_has_compiled() -> None:
    commands = {name: [sys.executable, "-c", WORKER, str(name)] for name in (0.1, 1.0)}
    said: dict[float, list[Any]] = {name: [] for name in commands}
    for name, message in bench.side_by_side(commands, limit=60.0):
        said[name].append(message)
    last = max(messages[0] for messages in said.values())
    first = min(begin for messages in said.values() for begin, _ in messages[2:-1])
    assert last <= first < last + 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_run_is_named_in_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The processes themselves, where there is no GPU: each says why it has no time."""
    options = bench.parse(["--backends", "gluon,eager", "--tokens", "64,128", "--heads", "1:2"])
    with (tmp_path / "rows.jsonl").open("w") as out:
        rows = bench.collect(options, out)
    assert {(row["backend"], row["tokens"], row["heads"]) for row in rows} == {
        (backend, tokens, "1/2") for backend in ("gluon", "eager") for tokens in (64, 128)
    }
    for row in rows:
        assert row["note"].startswith("ValueError: gdn_backend" if row["backend"] == "gluon" else "RuntimeError: ")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
    assert capsys.readouterr().out.splitlines() == [bench.line(row) for row in rows]
    assert bench.ratios(rows).count("\n") == 1


def test_what_does_not_compile_in_time_is_named_in_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Processes that are ended before they have imported PyTorch."""
    rows = bench.collect(bench.parse(["--backends", "fla", "--heads", "1:2,2:4", "--limit", "0.01"]), None)
    assert [row["tokens"] for row in rows] == 2 * [8192, 16384, 32768, 65536]
    assert {(row["heads"], row["note"]) for row in rows} == {(x, "not compiled within 0.01 s") for x in ("1/2", "2/4")}
    assert capsys.readouterr().out.count("not compiled within 0.01 s") == 8


def row(backend: str, tokens: int, forward: float, both: float, peak: float) -> bench.Row:
    times = {"forward ms": forward, "backward ms": both - forward, "both ms": both, "both min": both, "both p90": both}
    return {"backend": backend, "tokens": tokens, "heads": "16/32", **times, "peak MiB": peak}


# Of kernels/gdn/README.md.
MEASURED = [
    row("triton", 32768, 1.446, 5.671, 2222),
    row("fla", 32768, 2.319, 9.109, 3864),
    row("flash_qla", 32768, 1.003, 3.776, 2094),
    row("triton", 8192, 0.515, 2.221, 558),
    {"backend": "eager", "tokens": 32768, "heads": "16/32", "note": "not compiled within 3 s"},
]


def test_ratios() -> None:
    lines = bench.ratios(MEASURED).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2:] == [
        "| 32768 | 16/32 | triton | flash_qla | 0.69 | 0.66 | 0.67 | 0.94 |",
        "| 32768 | 16/32 | triton | fla | 1.60 | 1.61 | 1.61 | 1.74 |",
    ]
    gluon, eager = row("gluon", 32768, 0.8, 3.34, 1820), row("eager", 32768, 80.0, 1400.0, 9100)
    with_eager = bench.ratios([*MEASURED, gluon, eager])
    assert "| gluon | eager | 100.00 | 519.69 | 419.16 | 5.00 |" in with_eager
    assert "| gluon | triton | 1.81 |" in with_eager
    assert "| eager | fla |" not in with_eager


def test_lines_have_all_columns() -> None:
    lines = [bench.line(x) for x in MEASURED]
    assert lines[0] == "| triton | 32768 | 16/32 | 1.446 | 4.225 | 5.671 | 5.671 | 5.671 | 2222 |"
    assert {line.count("|") for line in lines} == {10}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backends", "fla,fast"], "--backends has 'fast': pass some of flash_qla, fla, gluon, triton, eager"),
        (["--tokens", "8k"], "--tokens has '8k': pass numbers of tokens"),
        (["--tokens", "0"], "--tokens has '0': pass numbers of tokens"),
        (["--heads", "16"], "--heads has '16': pass key and value heads"),
        (["--heads", "16:24"], "--heads has '16:24': pass key and value heads"),
        (["--dim", "0"], "--dim has 0: pass a number above 0"),
        (["--limit", "-1"], "--limit has -1.0: pass a number above 0"),
        (["--out", "/nowhere/rows.jsonl"], "--out has '/nowhere/rows.jsonl': there is no such folder"),
    ],
)
def test_wrong_options(options: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as error:
        bench.main(options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
