"""`hf-cp doctor`: what of this package can run here, and for what cannot, why and what to install."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .config import PatchConfig
from .kernels.a2a_gemm import build
from .kernels.gdn.backend import OLDEST_TRITON, unavailable_reason
from .modes import projections
from .report import installed

# Oldest versions, as in pyproject.toml (tests/test_doctor.py compares).
OLDEST = {"torch": "2.11", "transformers": "5.17", "accelerate": "1.15", "datasets": "", "safetensors": ""}
OPTIONAL = {"triton": ".".join(map(str, OLDEST_TRITON)), "matplotlib": "", "nvidia-cutlass": "", "peft": "", "trl": ""}
# Compiled for Hopper, these multiply a transposed product wrongly. The kernels here contain none.
BAD_TRITON = ((3, 4), (3, 7, 1))
NEEDED_GLIBCXX = b"GLIBCXX_3.4.29"
FUSED = "fused"


def numbers(version: str) -> tuple[int, ...]:
    """``"2.11.0+cpu"`` as ``(2, 11, 0)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def versions() -> tuple[dict[str, str | None], list[str]]:
    """Installed versions by name, and a line for each that is missing or too old."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    wrong = []
    for name, oldest in (OLDEST | OPTIONAL).items():
        found[name] = version = installed(name)
        if version is None:
            if name in OLDEST:
                wrong.append(f'{name} is not installed: pip install "{name}{f">={oldest}" if oldest else ""}"')
        elif oldest and numbers(version) < numbers(oldest):
            wrong.append(f'{name} {version} is older than {oldest}: pip install -U "{name}>={oldest}"')
    return found, wrong


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability and memory in GiB of each visible GPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "capability": capability, "GiB": round(properties.total_memory / 2**30)})
    return found


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """How GPUs are joined, by pair, from the output of ``nvidia-smi topo -m``: ``NV18``, ``PIX``, ``SYS`` and so on."""
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split("\t") for line in text.splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    found = {}
    for row in rows:
        first = re.fullmatch(r"GPU(\d+)", row[0])
        if first is None or row is header:
            continue
        for name, cell in zip(header, row, strict=False):
            second = re.fullmatch(r"GPU(\d+)", name)
            if second is not None and int(first[1]) < int(second[1]):
                found[int(first[1]), int(second[1])] = cell
    return found


def links() -> list[dict[str, Any]]:
    """Every pair of visible GPUs: whether one reads the other's memory, and by what they are joined."""
    count = torch.cuda.device_count()
    if count < 2:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
        topology = parse_topology(done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        topology = {}
    found = []
    for a, b in itertools.combinations(range(count), 2):
        peer = torch.cuda.can_device_access_peer(a, b)
        found.append({"pair": [a, b], "peer access": peer, "link": topology.get((a, b), "unknown")})
    return found


def old_libstdcxx(library: Path) -> str | None:
    """Why this libstdc++ does not serve Triton's library, and what to do; ``None`` if it does."""
    if NEEDED_GLIBCXX in library.read_bytes():
        return None
    newer = Path(sys.prefix) / "lib"
    return (
        f"{library} has no {NEEDED_GLIBCXX.decode()}, which Triton's library needs: put the folder of a newer "
        f"libstdc++.so.6 first, LD_LIBRARY_PATH={newer}:$LD_LIBRARY_PATH where it is Python's own"
    )


def loaded_libstdcxx() -> Path | None:
    """The libstdc++ that this process uses, or ``None`` where that cannot be told."""
    try:
        ctypes.CDLL("libstdc++.so.6")
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = [line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libstdc++.so" in line]
    return Path(paths[0]) if paths else None


def triton_fault() -> str | None:
    """Why an installed Triton cannot be imported, or ``None``."""
    if installed("triton") is None:
        return None
    try:
        importlib.import_module("triton")
    except ImportError as error:
        library = loaded_libstdcxx()
        old = old_libstdcxx(library) if library is not None else None
        return old or f"triton cannot be imported: {str(error).splitlines()[0]}"
    return None


def triton_note(version: str | None) -> str | None:
    """What to know of this version of Triton, or ``None``."""
    if version is None or not BAD_TRITON[0] <= numbers(version) < BAD_TRITON[1]:
        return None
    lower, upper = (".".join(map(str, bound)) for bound in BAD_TRITON)
    return (
        f"triton {version} lies in [{lower}, {upper}), which multiplies a transposed product wrongly on Hopper: the "
        f"kernels here avoid it, flash-linear-attention refuses it; triton>={upper} has it mended"
    )


def _remedy(reason: str) -> str:
    """What to install for a backend that cannot run for this reason."""
    if "not installed" in reason:
        return 'pip install "hf_cp[triton]"'
    if "older than" in reason:
        return f'pip install -U "triton>={OPTIONAL["triton"]}"'
    if "sees no CUDA GPU" in reason and torch.version.cuda is None:
        return f'torch {torch.__version__} is built without CUDA: install a CUDA build, or gdn_backend="eager"'
    if "sees no CUDA GPU" in reason:
        return 'a driver that torch sees (nvidia-smi, CUDA_VISIBLE_DEVICES), or gdn_backend="eager"'
    return 'gdn_backend="eager" runs anywhere'


def fused_reason(pairs: Sequence[dict[str, Any]]) -> str | None:
    """Why AllToAll fused with GEMM cannot be built or run, remedy included; ``None`` if it can."""
    try:
        projections.check_served()
    except ValueError as error:
        return str(error).removeprefix('projection_backend="fused"').lstrip(": ")
    if not all(pair["peer access"] for pair in pairs):
        return 'GPUs without peer access to each other: run on GPUs that NVLink joins, or use "torch"'
    return None


def backends(pairs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every backend: whether it runs here, and if not, why and what to do."""
    found: dict[str, dict[str, Any]] = {}
    fault = triton_fault()
    for name in PatchConfig.CHOICES["gdn_backend"]:
        reason = unavailable_reason(name)
        if reason is None and fault is not None and name != "eager":
            found[name] = {"runs": False, "reason": fault, "remedy": "as said"}
        else:
            found[name] = {
                "runs": reason is None,
                "reason": reason,
                "remedy": None if reason is None else _remedy(reason),
            }
    reason = fused_reason(pairs)
    why, _, remedy = (reason or "").partition(": ")
    found[FUSED] = {"runs": reason is None, "reason": why or None, "remedy": remedy or None}
    return found


def examine(asked: Sequence[str]) -> dict[str, Any]:
    """Everything that the command prints.

    Args:
        asked: backends that have to run.

    Raises:
        ValueError: a backend that does not exist.
    """
    known = (*PatchConfig.CHOICES["gdn_backend"], FUSED)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ValueError(f"--backends has {unknown[0]!r}: give some of {', '.join(known)}")
    found, problems = versions()
    pairs = links()
    available = backends(pairs)
    try:
        nvcc = str(build.find_nvcc())
    except build.BuildError as error:
        nvcc = f"none: {error}"
    notes = [note for note in (triton_note(found["triton"]),) if note]
    apart = [pair["pair"] for pair in pairs if not pair["peer access"]]
    if apart:
        notes.append(f"GPUs {apart} have no peer access: exchanges between them pass through the host, and are slow")
    problems += [
        f"{name}: {available[name]['reason']}: {available[name]['remedy']}"
        for name in asked
        if not available[name]["runs"]
    ]
    return {
        "versions": found,
        "gpus": gpus(),
        "links": pairs,
        "nvcc": nvcc,
        "backends": available,
        "notes": notes,
        "asked": list(asked),
        "problems": problems,
        "ok": not problems,
    }


def in_lines(found: dict[str, Any]) -> str:
    """What `examine` found, to be read."""
    lines = ["versions   " + ", ".join(f"{name} {version or '-'}" for name, version in found["versions"].items())]
    lines += [
        f"GPU {i}      {gpu['name']}, {gpu['capability']}, {gpu['GiB']} GiB" for i, gpu in enumerate(found["gpus"])
    ]
    lines += ["GPU        none"] * (not found["gpus"])
    for pair in found["links"]:
        a, b = pair["pair"]
        lines.append(f"link {a}-{b}   {pair['link']}, {'peer access' if pair['peer access'] else 'no peer access'}")
    lines.append(f"nvcc       {found['nvcc']}")
    for name, backend in found["backends"].items():
        said = "runs" if backend["runs"] else f"cannot run: {backend['reason']}; {backend['remedy']}"
        lines.append(f"{name:<10} {said}")
    lines += [f"note       {note}" for note in found["notes"]]
    asked = ", ".join(found["asked"]) or "nothing"
    lines += [f"problem    {problem}" for problem in found["problems"]]
    lines.append(f"asked for  {asked}: {'all can run' if found['ok'] else 'not all can run'}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends",
        default=PatchConfig.gdn_backend,
        help=f"what has to run for exit status 0: some of {', '.join(PatchConfig.CHOICES['gdn_backend'])}, {FUSED}",
    )
    parser.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print what is found. Returns 0 if all that was asked for can run, else 1."""
    found = examine([name for name in arguments.backends.split(",") if name])
    print(json.dumps(found, indent=1) if arguments.json else in_lines(found))
    return 0 if found["ok"] else 1
