"""Tables of measurements: a header with the conditions, Markdown, JSON, and a picture where matplotlib is installed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]
# What pictures may be written as.
PICTURES = (".png", ".pdf", ".svg")


def installed(name: str) -> str | None:
    """Version of an installed distribution, or ``None``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Commit of the checkout that this package runs from, marked where files differ; ``None`` outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == tracked.returncode == 0 else None


def conditions(device: str) -> dict[str, Any]:
    """What a table has to say about the machine: device, versions, commit."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU"}
    stocks = ("flash-linear-attention", "causal-conv1d")  # what stock runs on where they are installed
    found |= {name: installed(name) for name in ("torch", "triton", "transformers", *stocks)}
    return found | {"hf_cp": installed("hf_cp"), "commit": commit()}


def in_words(found: Mapping[str, Any]) -> str:
    """Conditions in one line, without what is not there."""
    shown = [f"{name} {value}" for name, value in found.items() if name != "device" and value is not None]
    return ", ".join([*([found["device"]] if "device" in found else []), *shown])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else str(value)


def header_line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def row_line(row: Row, columns: Sequence[str]) -> str:
    return f"| {' | '.join(_cell(row.get(column)) for column in columns)} |"


def markdown(rows: Sequence[Row]) -> str:
    """A table with a column for every name in the rows, in the order of their first use."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return "\n".join([header_line(columns), *(row_line(row, columns) for row in rows)])


def write(
    folder: Path, name: str, found: Mapping[str, Any], rows: Sequence[Row], label: Sequence[str], value: str
) -> list[Path]:
    """Write ``name.json``, ``name.md`` and, with matplotlib, ``name.png``: bars of one column.

    Args:
        folder: is made if it is not there.
        label: the columns that name a bar.
        value: the column that is its length; rows without a number there have none.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.json", folder / f"{name}.md"]
    files[0].write_text(json.dumps({"conditions": found, "rows": list(rows)}, indent=1) + "\n")
    files[1].write_text(f"{in_words(found)}\n\n{markdown(rows)}\n")
    bars = [(", ".join(_cell(row.get(c)) for c in label), row[value]) for row in rows if row.get(value) is not None]
    if bars and find_spec("matplotlib") is not None:
        figure, axes = new_figure(9, 1 + 0.35 * len(bars))
        names, lengths = zip(*bars, strict=True)
        axes.barh(range(len(bars)), lengths)
        axes.set_yticks(range(len(bars)), names, fontsize=8)
        axes.invert_yaxis()
        axes.bar_label(axes.containers[0], [_cell(x) for x in lengths], fontsize=8, padding=2)
        axes.set_xlabel(value)
        axes.set_title(in_words(found), fontsize=7)
        files.append(folder / f"{name}.png")
        save(figure, files[-1])
    return files


def make_folder(option: str, folder: Path | None) -> None:
    """Make the folder of an option before what takes time begins; none is made where none was given.

    Raises:
        ValueError: it cannot be made, or is a file.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {folder} cannot be made a folder ({error.strerror}): give another") from None


def check_picture(path: Path | None) -> None:
    """Raise where ``--picture`` could not be drawn, before anything is computed.

    Raises:
        ValueError: a folder, another format, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--picture {path} is a folder: give the name of a file")
    if path.suffix not in PICTURES:
        raise ValueError(f"--picture {path}: give a name that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    if find_spec("matplotlib") is None:
        raise ValueError(f'--picture {path} needs matplotlib, which is not installed: pip install "hf_cp[pictures]"')


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, in inches, drawn without a display; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def save(figure: Any, path: Path) -> None:
    """Write a figure of `new_figure`, in the format of the path's suffix.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"the picture {path} cannot be written ({error.strerror}): give another") from None
