"""The table ``trajectory`` of `hf-cp bench`: training over several ranks, step by step beside training on one device.

All processes share one sequence; FSDP2 over the same processes holds the weights and averages gradients in fp32. Both
sides start from the same random weights and take the same steps: AdamW at 1e-4, weight decay 0.01, clipping at 1, one
window of a memory-mapped token file a step, whose last tokens are padding on most steps. Rank 0 trains the one device
first, while the others wait, or reads it from a file. It trains it twice: the second run is the first row, and how far
it is from the first is what no other row can be held to be under.

Errors are absolute and relative differences of the loss and of the gradient norm before clipping, which both sides sum
in fp64. Growth is that of the memory allocated on the device, or resident on a CPU, from step 5 to the last.

Processes may share a card; what they then exchange goes through gloo. FSDP2 would work so as well, but gloo carries all
weights through host memory, and its reduce-scatter is an all-reduce. So the weights are whole on every process there,
and gradients are averaged in each other's memory, which gives the numbers of FSDP2.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import gc
import itertools
import json
import math
import os
import pickle
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from . import report
from .bench_ranks import launched_size
from .bench_step import REPORT, TINY, make_model
from .config import PatchConfig
from .entry import fingerprint
from .loss import IGNORE_INDEX
from .patch import average_gradients, patch

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
TIMEOUT = timedelta(hours=1)
# Characters of the text that tokens are learned from: always as many, so that more steps do not change the first ones.
LEARNED_FROM = 4_000_000
# Memory is compared from here on: before, the optimizer makes its states and allocators settle.
SETTLED_STEPS = 5
# Without a token file of the user's, tokens are bytes where the vocabulary is this large, else learned from the text.
BYTES = 256
# The tiny heads can be spread over four ranks.
SHAPES = {
    "report": replace(REPORT.with_layers(4), vocab=4096),
    "tiny": replace(TINY, query_heads=8, key_heads=4, value_heads=8, tied=False),
}
GRADIENTS = {
    "fsdp": "FSDP2",
    "shared": "averaged in shared memory with whole weights on every process",
    "all-reduce": "averaged by all-reduce with whole weights on every process",
}
# By device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        **{"models": "report", "precision": "mixed", "tokens": "8192", "layer_code": "triton"},
        "initial_weights": "torch",
    },
    "cpu": {
        **{"models": "tiny", "precision": "fp32", "tokens": "256", "layer_code": "eager"},
        "initial_weights": "transformers",
    },
}
# Of the relative errors, where weights or computation are in 16 bits, and in fp32.
BOUNDS = {"bound_loss": (3.8e-4, 1e-5), "bound_norm": (4e-3, 1e-5)}
# What a row is of: linear mode, attention mode, checkpointing, run. Of the one device, which has no modes:
Modes = tuple[str, str, str, int]
ONE_DEVICE: Modes = ("one device", "", "off", 1)
# torch has no deterministic running sum of floats on CUDA, which these compute with.
NOT_DETERMINISTIC = ("eager", "stock")
COLUMNS = (
    *("ranks", "linear", "attention", "checkpointing", "run", "steps"),
    *("max loss rel", "mean loss rel", "max loss abs", "mean loss abs"),
    *("max norm rel", "mean norm rel", "max norm abs", "mean norm abs"),
    *("loss rel, first tenth", "loss rel, last tenth", "not finite", "growth MiB", "step ms", "bitwise"),
)


@dataclass(frozen=True)
class Case:
    """One training run over the ranks of a group, or on one device (``group`` is ``None``).

    Args:
        precision: ``"fp32"``; ``"bf16"``, weights and optimizer states in bf16 too; ``"mixed"``, fp32 weights computed
            with in bf16.
        backend: a ``gdn_backend``, or ``"stock"`` for the model as transformers has it.
        gradients: one of `GRADIENTS`.
        initial_weights: ``"transformers"``, as it makes them, with a deviation of 0.02; ``"torch"``, as
            `redraw_as_torch` leaves them.
    """

    model: str
    precision: str
    steps: int
    backend: str
    device: torch.device
    linear_mode: str = "p2p"
    attention_mode: str = "ulysses"
    checkpointing: bool = False
    group: dist.ProcessGroup | None = None
    gradients: str = "all-reduce"
    initial_weights: str = "transformers"

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


@dataclass
class Curve:
    """What a run gave, the same on every rank.

    Args:
        losses, norms: of every step. windows: checksum of the tokens of every step.
        weights: hashes of every rank's part of the weights at the end.
        growth: bytes of memory, of the rank where it grew most; ``None`` where it cannot be read.
        seconds: median of a step.
    """

    losses: list[float]
    norms: list[float]
    windows: list[int]
    weights: list[int]
    growth: int | None
    seconds: float


# Data.


def _sources() -> Iterator[Path]:
    """Of the standard library, always in the same order."""
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if not name.endswith("-packages"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _texts() -> Iterator[str]:
    return (source.read_bytes().decode("utf-8", "replace") for source in _sources())


def learned_tokens(vocab: int) -> Any:
    """A tokenizer of byte pairs, the same on every call: learned from the start of the text, on one thread.

    Args:
        vocab: its tokens, at least 256, which are all bytes.

    Returns:
        A `tokenizers.Tokenizer`; it loses nothing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    # Every rank learns them, on as many cores as there are.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.train_from_iterator(_start(_texts(), LEARNED_FROM), trainer)
    return tokenizer


def _start(parts: Iterator[Any], count: int) -> Iterator[Any]:
    """Of texts or sequences, in all ``count`` characters or items; fewer where there are fewer."""
    for part in parts:
        yield part[:count]
        count -= len(part)
        if count <= 0:
            return


def make_token_file(path: Path, count: int, vocab: int = BYTES) -> None:
    """Write the first ``count`` tokens of the sources of Python's standard library, as 16-bit little-endian numbers.

    More tokens do not change the first.

    Args:
        vocab: 256 for bytes, else that of `learned_tokens`.

    Raises:
        ValueError: the library holds less.
    """
    if vocab == BYTES:
        parts: Iterator[Any] = (source.read_bytes() for source in _sources())
    else:
        tokenizer = learned_tokens(vocab)
        parts = (tokenizer.encode(text).ids for text in _texts())
    with path.open("wb") as file:
        for tokens in _start(parts, count):
            array.array("H", list(tokens)).tofile(file)
            count -= len(tokens)
    if count:
        raise ValueError(
            f"the text lacks {count} tokens: give fewer --steps or --tokens, or a file of your own with --data"
        )


class Windows:
    """The windows of a token file, one a step.

    Args:
        path: 16-bit little-endian token ids. It is mapped into memory, not read.
        length: tokens of a window.

    Raises:
        ValueError: fewer than ``steps`` windows, or a token beyond the vocabulary.
    """

    def __init__(self, path: Path, length: int, steps: int, vocab: int) -> None:
        held = path.stat().st_size // (2 * length)
        if held < steps:
            raise ValueError(f"--data {path} holds {held} windows of {length} tokens: give at most so many --steps")
        tokens = torch.from_file(str(path), shared=False, size=steps * length, dtype=torch.int16)
        self._windows = tokens.view(steps, length)
        largest = int(self._ids(self._windows).max())
        if largest >= vocab:
            raise ValueError(f"--data {path} has token {largest}: the vocabulary is {vocab}: tokenise with fewer")

    @staticmethod
    def _ids(tokens: Tensor) -> Tensor:
        # The file's numbers have no sign.
        return tokens.long() & 0xFFFF

    def __len__(self) -> int:
        return len(self._windows)

    def checksum(self, step: int) -> int:
        return int(fingerprint(self._windows[step]))

    def batch(self, step: int, device: torch.device) -> dict[str, Tensor]:
        """Ids, labels and mask ``[1, T]``; up to an eighth of a window, another length each step, is padding."""
        ids = self._ids(self._windows[step])[None].to(device)
        length = ids.shape[1]
        mask = torch.ones_like(ids)
        mask[:, length - 37 * step % (length // 8 + 1) :] = 0
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORE_INDEX), "attention_mask": mask}


# Weights.


def redraw_as_torch(model: torch.nn.Module) -> None:
    """Draw the weights of embedding, projections and convolutions as torch's own modules do, the same on every call.

    That is from N(0, 1) for an embedding, within ``1 / sqrt(inputs)`` for the others. With 4,096 tokens and a hidden
    size of 2,048, training then starts at a loss of 8.5 and a gradient norm of 3, where transformers' start at 8.7 and
    14.
    """
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.Linear, torch.nn.Conv1d)):
            module.reset_parameters()


class SharedMean:
    """Averages gradients of processes on one machine in each other's memory: on one card, by CUDA IPC.

    Collective, as is each mean. Sums in fp32 in the order of ranks, so that it can be repeated bit by bit.
    Made once a process: memory that others have opened cannot be given back while they have.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._group, self._device = group, device
        part = -(-count // ranks)
        self._part = slice(rank * part, (rank + 1) * part)
        self.flat = torch.zeros(ranks * part, dtype=dtype, device=device)
        self._mean = torch.zeros(part, dtype=torch.float32, device=device)
        if device.type == "cpu":
            # The other strategy hands over file descriptors, which needs more than bytes.
            torch.multiprocessing.set_sharing_strategy("file_system")
        handles: list[Any] = [None] * ranks
        dist.all_gather_object(handles, bytes(ForkingPickler.dumps((self.flat, self._mean))), group=group)
        opened = [(self.flat, self._mean) if r == rank else pickle.loads(data) for r, data in enumerate(handles)]
        self._flats, self._means = zip(*opened, strict=True)

    def into(self, out: Tensor) -> None:
        """Write the mean of all ranks' `flat` to ``out``, of the same length."""
        self._meet()
        total = self._flats[0][self._part].float()
        for flat in self._flats[1:]:
            total += flat[self._part]
        self._mean.copy_(total.div_(len(self._flats)))
        self._meet()
        torch.cat(self._means, out=out) if out.dtype == torch.float32 else out.copy_(torch.cat(self._means))

    def _meet(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self._group)


def _cut(flat: Tensor, parameters: Sequence[Any]) -> list[Tensor]:
    """Views of a buffer with the shapes of parameters, one after the other."""
    sizes = [p.numel() for p in parameters]
    return [part.view_as(p) for part, p in zip(flat[: sum(sizes)].split(sizes), parameters, strict=True)]


class _Weights:
    """What the optimizer trains, and how gradients get there and weights back."""

    def __init__(self, model: Any, case: Case, shared: SharedMean | None) -> None:
        self._model, self._case, self._shared = model, case, shared
        if case.gradients == "fsdp" and case.group is not None:
            _shard(model, case, case.group)
            self.trained: list[Any] = list(model.parameters())
            return
        self._computed = list(model.parameters())
        self.trained = self._computed
        if case.precision == "mixed":
            self.trained = [torch.nn.Parameter(p.detach().clone()) for p in self._computed]
        for p in self._computed:
            p.data = p.data.to(case.compute_dtype)
        if shared is not None:
            self._mean = torch.empty_like(shared.flat, dtype=torch.float32) if self._mixed else shared.flat

    @property
    def _mixed(self) -> bool:
        return self._case.precision == "mixed" and not self.sharded

    @property
    def sharded(self) -> bool:
        return self._case.gradients == "fsdp" and self._case.group is not None

    def before_backward(self) -> None:
        if self._shared is not None:
            self._shared.flat.zero_()
            for p, view in zip(self._computed, _cut(self._shared.flat, self._computed), strict=True):
                p.grad = view

    def gradients(self) -> list[Tensor]:
        """Of the whole batch, what lies here of them; the optimizer sees the same memory."""
        case = self._case
        if self.sharded:
            return [p.grad.to_local() for p in self.trained]
        if self._shared is not None:
            self._shared.into(self._mean)
            if self._mixed:
                for p, view in zip(self.trained, _cut(self._mean, self.trained), strict=True):
                    p.grad = view
        else:
            if case.group is not None:
                average_gradients(self._model)
            if self._mixed:
                for p, computed in zip(self.trained, self._computed, strict=True):
                    p.grad = computed.grad.float()
        return [p.grad for p in self.trained]

    def after_step(self) -> None:
        for p in self.trained:
            p.grad = None
        if not self.sharded:
            with torch.no_grad():
                for p, computed in zip(self.trained, self._computed, strict=True):
                    computed.grad = None
                    if self._mixed:
                        computed.copy_(p)

    def hashes(self) -> list[int]:
        """Of every rank's part."""
        parts = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in self.trained]
        total = torch.stack([fingerprint(part) * (2 * i + 1) for i, part in enumerate(parts)]).sum().item()
        return [int(x) for x in _from_all(int(total), self._case.group)]


def _shard(model: Any, case: Case, group: dist.ProcessGroup) -> None:
    """FSDP2 over the group, layer by layer; gradients are averaged in fp32."""
    if case.precision == "bf16":
        for p in model.parameters():
            p.data = p.data.bfloat16()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if case.precision == "mixed" else None, reduce_dtype=torch.float32
    )
    mesh = DeviceMesh.from_group(group, case.device.type)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _from_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# A run.


def _clip(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> float:
    """Clip in place by the norm over all ranks, and return the norm.

    In fp64: torch's own sums in the gradients' dtype, and its norm in bf16 has three digits.
    """
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    squares = torch.stack(norms).square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt().item()
    if norm > CLIP:
        for gradient in gradients:
            gradient.mul_(CLIP / norm)
    return norm


def _allocated(device: torch.device) -> int | None:
    """Bytes: of the caching allocator, or resident on a CPU (``None`` where the system does not say)."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def train(case: Case, windows: Windows, shared: SharedMean | None = None) -> Curve:
    """Take the steps of a case, from random weights that are the same on every call. Collective over its group.

    Args:
        shared: for ``gradients="shared"``.
    """
    model = make_model(SHAPES[case.model], case.device.type, torch.float32)
    if case.initial_weights == "torch":
        redraw_as_torch(model)
    if case.backend != "stock":
        modes = {"linear_mode": case.linear_mode, "attention_mode": case.attention_mode}
        patch(model, **modes, gdn_backend=case.backend, cp_group=case.group)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = _Weights(model, case, shared)
    optimizer = torch.optim.AdamW(
        weights.trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=case.device.type == "cuda"
    )
    losses, norms, seconds, settled = [], [], [], None
    for step in range(case.steps):
        started = time.perf_counter()
        weights.before_backward()
        loss = model(**windows.batch(step, case.device)).loss
        loss.backward()
        gradients = weights.gradients()
        norms.append(_clip(gradients, case.group if weights.sharded else None))
        del gradients
        optimizer.step()
        weights.after_step()
        losses.append(loss.item())
        del loss
        seconds.append(time.perf_counter() - started)
        if step + 1 == min(SETTLED_STEPS, case.steps):
            settled = _allocated(case.device)
    last = _allocated(case.device)
    grown = _from_all(None if settled is None or last is None else last - settled, case.group)
    return Curve(
        losses,
        norms,
        [windows.checksum(step) for step in range(case.steps)],
        weights.hashes(),
        None if None in grown else max(grown),
        statistics.median(seconds),
    )


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """torch's deterministic algorithms within; operators that have none raise.

    On CUDA that makes deterministic the backward of scaled-dot-product attention, which adds up dq in any order, that
    of the embedding, which does so where few tokens differ, and convolutions. With warnings in place of errors, the
    first would be left as it is. The package's kernels have no atomics, nor measurements that choose among them.
    """
    before = torch.get_deterministic_debug_mode()
    if wanted:
        # Read when cuBLAS is first used, so before there is a device.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# The table.


def _errors(found: Sequence[float], expected: Sequence[float], name: str) -> dict[str, float]:
    absolute = [abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(found, expected, strict=True)]
    relative = relative_errors(found, expected)
    return {
        f"max {name} rel": max(relative),
        f"mean {name} rel": statistics.fmean(relative),
        f"max {name} abs": max(absolute),
        f"mean {name} abs": statistics.fmean(absolute),
    }


def relative_errors(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Step by step; infinite where a number is not finite."""
    pairs = zip(found, expected, strict=True)
    return [abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]


def summary(curve: Curve, reference: Curve) -> dict[str, Any]:
    """The columns of the table that come from a curve and the one of one device."""
    steps = len(curve.losses)
    relative = relative_errors(curve.losses, reference.losses[:steps])
    tenth = max(1, steps // 10)
    numbers = [*curve.losses, *curve.norms]
    return {
        "steps": steps,
        **_errors(curve.losses, reference.losses[:steps], "loss"),
        **_errors(curve.norms, reference.norms[:steps], "norm"),
        "loss rel, first tenth": statistics.fmean(relative[:tenth]),
        "loss rel, last tenth": statistics.fmean(relative[-tenth:]),
        "not finite": sum(not math.isfinite(x) for x in numbers),
        "growth MiB": None if curve.growth is None else curve.growth / 2**20,
        "step ms": 1e3 * curve.seconds,
    }


def difference(a: Curve, b: Curve) -> str | None:
    """Where two curves first differ in a bit, or ``None``."""
    for name, found, expected in (("loss", a.losses, b.losses), ("gradient norm", a.norms, b.norms)):
        for step, (x, y) in enumerate(zip(found, expected, strict=True), start=1):
            if x != y:
                return f"{name} of step {step}"
    return None if a.weights == b.weights else "the weights at the end"


def failures(row: dict[str, Any], bound_loss: float, bound_norm: float) -> list[str]:
    """What a row exceeds."""
    found = []
    for name, bound in (("max loss rel", bound_loss), ("max norm rel", bound_norm)):
        if not row[name] <= bound:
            found.append(f"{name} {row[name]:.2e} is above {bound:.1e}")
    if row["not finite"]:
        found.append(f"{row['not finite']} numbers are not finite")
    return found


def _picture(path: Path, title: str, reference: Curve, runs: dict[str, Curve]) -> None:
    figure, axes = report.new_figure(10, 5)
    steps = range(1, len(reference.losses) + 1)
    axes.plot(steps, reference.losses, color="black", linewidth=2, label="loss, one device")
    errors = axes.twinx()
    errors.set_yscale("log")
    for name, curve in runs.items():
        axes.plot(range(1, len(curve.losses) + 1), curve.losses, linewidth=0.8)
        differences = relative_errors(curve.losses, reference.losses[: len(curve.losses)])
        shown = [x if 0 < x < math.inf else math.nan for x in differences]
        errors.plot(range(1, len(shown) + 1), shown, linestyle="none", marker=".", markersize=3, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    errors.set_ylabel("relative difference of the loss")
    axes.legend(loc="upper left", fontsize=7)
    if runs:
        errors.legend(loc="upper right", fontsize=7)
    axes.set_title(title, fontsize=6, wrap=True)
    report.save(figure, path)


def write(
    folder: Path,
    conditions: dict[str, Any],
    settings: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    reference: Curve,
    runs: dict[str, Curve],
) -> list[Path]:
    """Write the table, the curves of all steps, which --reference reads, and a picture of them with matplotlib."""
    files = report.write(folder, "trajectory", conditions, rows, (), "")
    curves = {"settings": settings, "one device": vars(reference), "runs": {k: vars(v) for k, v in runs.items()}}
    files.append(folder / "trajectory_curves.json")
    files[-1].write_text(json.dumps({"conditions": conditions, **curves}) + "\n")
    if report.find_spec("matplotlib") is not None:
        files.append(folder / "trajectory.png")
        _picture(files[-1], report.in_words(conditions), reference, runs)
    return files


def read_reference(path: Path, settings: dict[str, Any], windows: Windows) -> Curve:
    """The curve of one device from ``trajectory_curves.json``.

    Raises:
        ValueError: of another model, of other data or too few steps.
    """
    try:
        content = json.loads(path.read_text())
        curve, found = Curve(**content["one device"]), content["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--reference {path}: {error}; give a trajectory_curves.json of this command") from None
    for name, value in settings.items():
        if found.get(name) != value:
            raise ValueError(f"--reference {path} has {name} {found.get(name)!r}, this run {value!r}: make them equal")
    if len(curve.losses) < len(windows):
        raise ValueError(f"--reference {path} has {len(curve.losses)} steps: give at most so many --steps")
    if curve.windows[: len(windows)] != [windows.checksum(step) for step in range(len(windows))]:
        raise ValueError(f"--reference {path} was trained on other tokens: give its --data and --tokens")
    return curve


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What no other table takes."""
    group = parser.add_argument_group("trajectories")
    group.add_argument("--steps", type=int, default=100)
    group.add_argument("--one-device", choices=("patched", "stock"), default="patched", help="what one device runs")
    group.add_argument("--initial-weights", choices=("torch", "transformers"), help="who draws them; torch on GPUs")
    group.add_argument("--gradients", choices=tuple(GRADIENTS), help="fsdp; shared where ranks share a card")
    group.add_argument("--data", type=Path, metavar="FILE", help="16-bit token ids; without it, Python's own sources")
    group.add_argument(
        "--reference", type=Path, metavar="FILE", help="trajectory_curves.json; its one device is not trained"
    )
    group.add_argument("--repeat", type=int, default=1, help="runs of each setting, which are compared bit by bit")
    group.add_argument("--deterministic", action="store_true", help="torch's deterministic algorithms")
    group.add_argument("--bound-loss", type=float, help="of the relative error: 3.8e-4, in fp32 1e-5")
    group.add_argument("--bound-norm", type=float, help="of the relative error: 4e-3, in fp32 1e-5")


@contextlib.contextmanager
def _joined(device: str) -> Iterator[tuple[dist.ProcessGroup | None, torch.device, bool]]:
    """The group of all processes that a launcher started (``None`` for one), this one's device, and whether ranks
    share a card."""
    shares, found = False, torch.device(device)
    if device == "cuda":
        cards = torch.cuda.device_count()
        shares = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > cards
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % cards)
        torch.cuda.set_device(found)
    if launched_size() == 1:
        yield None, found, shares
        return
    made = not dist.is_initialized()
    if made and device == "cuda" and not shares:
        # Objects, and the wait for rank 0, go through gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=found)
    elif made:
        # NCCL takes one process a card.
        dist.init_process_group("gloo", timeout=TIMEOUT)
    yield dist.group.WORLD, found, shares
    # Not after an error: where a rank has gone, leaving would wait for it.
    if made:
        dist.barrier()
        dist.destroy_process_group()


def _on_rank_0(make: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """What ``make`` gives on rank 0, on every rank; where it raises a `ValueError`, all ranks raise it."""
    outcome: list[Any] = [None, None]
    if group is None or dist.get_rank(group) == 0:
        try:
            outcome[0] = make()
        except ValueError as error:
            outcome[1] = str(error)
    if group is not None:
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def _listed(option: str, given: str, allowed: Sequence[str]) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in allowed:
            raise ValueError(f"{option} has {name!r}: give some of {', '.join(allowed)}")
    return names


@dataclass(frozen=True)
class _Settings:
    """The command line, checked."""

    model: str
    precision: str
    tokens: int
    backend: str
    initial_weights: str
    linear: list[str]
    attention: str
    checkpointing: list[str]
    bound_loss: float
    bound_norm: float


def _settings(arguments: argparse.Namespace) -> _Settings:
    given = {name: getattr(arguments, name) or value for name, value in DEFAULTS[arguments.device].items()}
    for name in ("steps", "repeat"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: give at least 1")
    if not given["tokens"].isdecimal() or int(given["tokens"]) < 1 or arguments.local_tokens is not None:
        raise ValueError("--tokens: give one number for trajectories, the tokens of a window over all ranks")
    if int(given["tokens"]) < 2:
        raise ValueError(f"--tokens {given['tokens']}: give at least 2, since the first token is not predicted")
    for name in BOUNDS:
        bound = getattr(arguments, name)
        if bound is not None and not bound >= 0:
            raise ValueError(f"--{name.replace('_', '-')} {bound:g}: give a relative error, 0 or more")
    if given["models"] not in SHAPES:
        raise ValueError(f"--models {given['models']}: give {' or '.join(SHAPES)} for trajectories")
    choices = PatchConfig.CHOICES
    if given["layer_code"] not in choices["gdn_backend"]:
        raise ValueError(f"--layer-code {given['layer_code']}: give one of {', '.join(choices['gdn_backend'])}")
    if arguments.deterministic and arguments.device == "cuda":
        if given["layer_code"] in NOT_DETERMINISTIC:
            raise ValueError(f"--deterministic with --layer-code {given['layer_code']}: on GPUs, give triton or gluon")
        if arguments.one_device in NOT_DETERMINISTIC:
            raise ValueError(f"--deterministic with --one-device {arguments.one_device}: on GPUs, give patched")
    exact = given["precision"] == "fp32"
    return _Settings(
        *(given["models"], given["precision"], int(given["tokens"]), given["layer_code"]),
        given["initial_weights"],
        _listed("--modes", arguments.modes or "p2p", choices["linear_mode"]),
        arguments.attention_mode,
        _listed("--checkpointing", arguments.checkpointing, ("off", "full")),
        *(BOUNDS[name][exact] if getattr(arguments, name) is None else getattr(arguments, name) for name in BOUNDS),
    )


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Train, print the table on rank 0, row by row, and write it.

    Returns:
        1 on rank 0 where a bound is exceeded, a number is not finite, or runs differ with --deterministic that should
        not; else 0.

    Raises:
        ValueError: an option or its file; the same on every rank.
    """
    chosen = _settings(arguments)
    report.make_folder("--out", arguments.out)
    with (
        _determinism(arguments.deterministic),
        _joined(arguments.device) as (group, device, shares),
        tempfile.TemporaryDirectory() as folder,
    ):
        gradients = arguments.gradients or ("shared" if shares else "fsdp")
        data = _token_file(arguments, chosen, Path(folder))
        windows = Windows(data, chosen.tokens, arguments.steps, SHAPES[chosen.model].vocab)
        backend = "stock" if arguments.one_device == "stock" else chosen.backend
        alone = Case(chosen.model, chosen.precision, arguments.steps, backend, device)
        alone = replace(alone, initial_weights=chosen.initial_weights)
        settings = {"model": chosen.model, "precision": chosen.precision, "tokens": chosen.tokens}
        settings |= {"vocabulary": SHAPES[chosen.model].vocab, "initial weights": chosen.initial_weights}

        def one_device() -> list[Curve]:
            if arguments.reference is not None:
                return [read_reference(arguments.reference, settings, windows)]
            return [train(alone, windows), train(alone, windows)]

        reference, *again = _on_rank_0(one_device, group)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        table = _Table(arguments, argv, chosen, settings, reference, group, gradients)
        for curve in again:
            table.add((*ONE_DEVICE[:3], 2), curve)
        if group is not None:
            count = SHAPES[chosen.model].parameters
            shared = SharedMean(count, alone.compute_dtype, device, group) if gradients == "shared" else None
            runs = range(1, arguments.repeat + 1)
            for linear, checkpointing, number in itertools.product(chosen.linear, chosen.checkpointing, runs):
                modes = (linear, chosen.attention, checkpointing, number)
                full = checkpointing == "full"
                case = replace(alone, backend=chosen.backend, linear_mode=linear, checkpointing=full, group=group)
                case = replace(case, attention_mode=chosen.attention, gradients=gradients)
                table.add(modes, train(case, windows, shared))
        # A launcher ends all processes when one ends with a failure: that is left to the one that writes.
        return table.finish() if group is None or dist.get_rank(group) == 0 else 0


def _token_file(arguments: argparse.Namespace, chosen: _Settings, folder: Path) -> Path:
    if arguments.data is None:
        make_token_file(folder / "tokens.bin", arguments.steps * chosen.tokens, SHAPES[chosen.model].vocab)
        return folder / "tokens.bin"
    if not arguments.data.is_file():
        raise ValueError(f"--data {arguments.data} is not a file: give 16-bit token ids, or leave it out")
    return arguments.data.resolve()


class _Table:
    """The rows so far; every rank has the same, rank 0 prints them."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        argv: Sequence[str],
        chosen: _Settings,
        settings: dict[str, Any],
        reference: Curve,
        group: dist.ProcessGroup | None,
        gradients: str,
    ) -> None:
        self._arguments, self._chosen, self._settings, self._reference = arguments, chosen, settings, reference
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._speaks = group is None or dist.get_rank(group) == 0
        found = report.conditions(arguments.device)
        command = f"hf-cp bench {' '.join(argv)}"
        if group is not None:
            cards = f"{min(self._ranks, torch.cuda.device_count())} x " if arguments.device == "cuda" else ""
            found["device"] = f"{self._ranks} processes on {cards}{found['device']}"
            found["messages"] = dist.get_backend_config(group)
            found["gradients"] = GRADIENTS[gradients]
            command = f"torchrun --nproc-per-node {self._ranks} -m hf_cp.bench {' '.join(argv)}"
        self.conditions = found | settings
        self.conditions |= {
            "data": "the sources of Python's standard library" if arguments.data is None else "a file",
            "backend": chosen.backend,
            "one device": arguments.one_device,
            "deterministic": arguments.deterministic,
            "command": command,
        }
        self._rows: list[dict[str, Any]] = []
        self._curves: dict[Modes, Curve] = {}
        self._failures: list[str] = []

    def _compare(self, modes: Modes, curve: Curve) -> str:
        """With the first run of the same, and with what was not checkpointed."""
        linear, attention, checkpointing, number = modes
        others = {"run 1": (linear, attention, checkpointing, 1)} if number > 1 else {}
        if checkpointing == "full" and self._arguments.deterministic:
            others["off"] = (linear, attention, "off", 1)
        said = []
        known = {ONE_DEVICE: self._reference} | self._curves
        for name, key in others.items():
            if key in known:
                where = difference(curve, known[key])
                said.append(f"equals {name}" if where is None else f"differs from {name} from {where} on")
                if where is not None and self._arguments.deterministic:
                    self._failures.append(f"{_named(modes)} {said[-1]}")
        return "; ".join(said)

    def add(self, modes: Modes, curve: Curve) -> None:
        names = dict(zip(("linear", "attention", "checkpointing", "run"), modes, strict=True))
        ranks = 1 if modes[:3] == ONE_DEVICE[:3] else self._ranks
        row = {"ranks": ranks, **names, **summary(curve, self._reference)}
        row["bitwise"] = self._compare(modes, curve)
        bounds = self._chosen.bound_loss, self._chosen.bound_norm
        self._failures += [f"{_named(modes)}: {text}" for text in failures(row, *bounds)]
        if self._speaks:
            if not self._rows:
                print(f"{report.in_words(self.conditions)}\n\n{report.header_line(COLUMNS)}")
            print(report.row_line(row, COLUMNS), flush=True)
        self._rows.append(row)
        self._curves[modes] = curve

    def finish(self) -> int:
        """Say what failed and write the files."""
        one = self._reference
        _say(f"one device: {len(one.losses)} steps, loss {one.losses[0]:.4f} to {one.losses[-1]:.4f}")
        _say(f"one device: gradient norm {min(one.norms):.4f} to {max(one.norms):.4f}, step {1e3 * one.seconds:.0f} ms")
        if not all(map(math.isfinite, [*one.losses, *one.norms])):
            self._failures.append("one device: a number is not finite")
        if self._arguments.out is not None:
            runs = {_named(modes): curve for modes, curve in self._curves.items()}
            for path in write(self._arguments.out, self.conditions, self._settings, self._rows, one, runs):
                _say(f"wrote {path}")
        for text in self._failures:
            _say(text)
        return 1 if self._failures else 0


def _named(modes: Modes) -> str:
    return ", ".join(str(x) for x in modes if x != "")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
