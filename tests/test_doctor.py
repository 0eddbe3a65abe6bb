"""`hf-cp` and `hf-cp doctor`: what is found, what is missing, and the exit status that scripts read."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from hf_cp import doctor
from hf_cp.cli import COMMANDS, main
from hf_cp.config import PatchConfig

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can run here")
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tNODE\tSYS\t0-31\t0
GPU2\tSYS\tNODE\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: hf-cp {command}" in capsys.readouterr().out


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["dance"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    assert "hf-cp = " in PYPROJECT
    module, _, function = re.findall(r'^hf-cp = "(.+)"$', PYPROJECT, re.MULTILINE)[0].partition(":")
    assert getattr(importlib.import_module(module), function) is main
    assert "invalid choice" in capsys.readouterr().err


def test_oldest_versions_are_those_of_the_package() -> None:
    wanted = re.findall(r'^    "([a-z]+)(?:>=([\d.]+))?",$', PYPROJECT, re.MULTILINE)
    assert dict(wanted) == doctor.OLDEST
    assert f'triton = ["triton>={doctor.OPTIONAL["triton"]}"]' in PYPROJECT


def test_eager_runs_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backends", "eager"]) == 0
    said = capsys.readouterr().out
    assert f"torch {doctor.installed('torch')}" in said
    assert "asked for  eager: all can run" in said
    for name in (*PatchConfig.CHOICES["gdn_backend"], "fused"):
        assert re.search(rf"^{name} ", said, re.MULTILINE), name


@needs_no_gpu
def test_what_cannot_run_says_why_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["asked"] == [PatchConfig.gdn_backend]
    assert not found["ok"]
    assert found["gpus"] == found["links"] == []
    for name in ("triton", "fused"):
        assert not found["backends"][name]["runs"]
        assert found["backends"][name]["reason"]
        assert found["backends"][name]["remedy"]
    assert found["problems"] == [
        f"triton: {found['backends']['triton']['reason']}: {found['backends']['triton']['remedy']}"
    ]


def test_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backends", "eager,cuda"]) == 2
    assert "--backends has 'cuda': give some of triton" in capsys.readouterr().err


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"torch": "2.9.1+cpu", "transformers": "5.17.0", "safetensors": "0.8", "triton": "3.5.1"}
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(doctor, "triton_fault", lambda: None)
    assert main(["doctor", "--backends", "eager"]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert [line.split(maxsplit=1)[1] for line in problems] == [
        'torch 2.9.1+cpu is older than 2.11: pip install -U "torch>=2.11"',
        'accelerate is not installed: pip install "accelerate>=1.15"',
        'datasets is not installed: pip install "datasets"',
        'triton 3.5.1 is older than 3.6: pip install -U "triton>=3.6"',
    ]


def test_old_libstdcxx(tmp_path: Path) -> None:
    library = tmp_path / "libstdc++.so.6"
    library.write_bytes(b"\x7fELF GLIBCXX_3.4.28\0CXXABI_1.3.12\0")
    reason = doctor.old_libstdcxx(library)
    assert reason is not None
    assert reason.startswith(f"{library} has no GLIBCXX_3.4.29")
    assert f"LD_LIBRARY_PATH={sys.prefix}/lib" in reason
    library.write_bytes(b"\x7fELF GLIBCXX_3.4.28\0GLIBCXX_3.4.29\0")
    assert doctor.old_libstdcxx(library) is None
    loaded = doctor.loaded_libstdcxx()
    if loaded is not None:
        assert b"GLIBCXX_3.4" in loaded.read_bytes()


def test_triton_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library that asks for a newer libstdc++ than the one at hand fails while it is imported."""
    (tmp_path / "triton").mkdir()
    message = "/lib/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by libtriton.so)"
    (tmp_path / "triton" / "__init__.py").write_text(f"raise ImportError({message!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(doctor, "installed", lambda name: "3.6.0")
    old = tmp_path / "libstdc++.so.6"
    old.write_bytes(b"GLIBCXX_3.4.28")
    monkeypatch.setattr(doctor, "loaded_libstdcxx", lambda: old)
    monkeypatch.setattr(doctor, "unavailable_reason", lambda name: None)
    assert main(["doctor"]) == 1
    assert f"triton     cannot run: {old} has no GLIBCXX_3.4.29" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "loaded_libstdcxx", lambda: None)
    assert doctor.triton_fault() == f"triton cannot be imported: {message}"


@pytest.mark.parametrize(
    ("version", "bad"), [("3.3.1", False), ("3.4.0", True), ("3.6.0+git1", True), ("3.7.0", True), ("3.7.1", False)]
)
def test_known_bad_triton(version: str, bad: bool) -> None:
    assert (doctor.triton_note(version) is not None) == bad


def test_links_of_gpus() -> None:
    assert doctor.parse_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NODE"}
    assert doctor.parse_topology("") == {}
