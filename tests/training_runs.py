"""Training the same small model on one process and on many, with what a launcher would set; shared by several tests."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import hf_cp
from hf_cp.testing import World, allow_fsdp2_on_cpu, tiny_qwen3_5

# Accelerate collects garbage at each preparation; in a forked rank that would walk, and copy, all that was imported.
gc.freeze()

# What `accelerate launch` sets for FSDP2.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3_5DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}
WRAPPERS: dict[str, Mapping[str, str]] = {"fsdp2": FSDP2, "ddp": {}}
LEARNING_RATE = 2e-3
# AdamW makes a full step of a gradient that is far below the others and mostly rounding, unless this damps it.
ADAM_EPSILON = 1e-5


@dataclass(frozen=True)
class Layout:
    """How a world is used: the sizes of its axes and what wraps the model (``"fsdp2"``, ``"ddp"``, ``"bare"``).

    With ``stock`` the model is not patched, and Accelerate knows of data parallelism alone.
    """

    wrapper: str
    cp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    linear_mode: str = "p2p"
    attention_mode: str = "ulysses"
    stock: bool = False

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp

    def config(self) -> hf_cp.ContextParallelConfig:
        return hf_cp.ContextParallelConfig(
            dp_replicate_size=self.dp_replicate, dp_shard_size=self.dp_shard, cp_size=self.cp
        )

    def __str__(self) -> str:
        sizes = {"rep": self.dp_replicate, "shard": self.dp_shard, "cp": self.cp}
        return "-".join(
            ["stock_" * self.stock + self.wrapper, *(f"{name}{size}" for name, size in sizes.items() if size > 1)]
        )


@dataclass(frozen=True)
class Run:
    """One training run. A step takes ``accumulation`` micro-batches of ``rows`` rows on each data-parallel rank."""

    layout: Layout | None = None
    rows: int = 2
    seq_len: int = 63
    steps: int = 20
    accumulation: int = 1
    count_items: bool = True
    average_tokens: bool = True
    clip: float = 0.25
    eval_every: int = 0
    checkpointing: str | None = None
    streaming: bool = False
    from_environment: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def on_one_process(self) -> Run:
        """The same steps by the stock model on one process.

        With a count of items a step's rows are one batch; means of micro-batches need the same micro-batches.
        """
        assert self.layout is not None
        count = self.accumulation * self.layout.dp
        rows, accumulation = (self.rows * count, 1) if self.count_items else (self.rows, count)
        return Run(
            rows=rows,
            seq_len=self.seq_len,
            steps=self.steps,
            accumulation=accumulation,
            count_items=self.count_items,
            clip=self.clip,
            eval_every=self.eval_every,
            streaming=self.streaming,
        )

    def __str__(self) -> str:
        flags = [
            f"accumulate{self.accumulation}",
            "" if self.count_items else "no_items",
            "" if self.average_tokens else "local_items",
            self.checkpointing or "",
            "streaming" if self.streaming else "",
            "launch" if self.from_environment else "",
            "-".join(f"{k}={v}" for k, v in self.options),
        ]
        return "-".join(flag for flag in [str(self.layout), *flags] if flag)


@dataclass
class Curve:
    """What a run reports, the same on every rank."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    eval_losses: list[float] = field(default_factory=list)
    tokens_seen: int = 0


class Rows(Dataset[dict[str, Tensor]]):
    """Chains that can be learnt; the share of ignored labels grows from row to row, so that a wrong weighting shows."""

    def __init__(self, count: int, seq_len: int, *, seed: int = 0, batch: int = 0) -> None:
        """Rows of ``seq_len`` tokens; with ``batch``, each batch of that many rows is five tokens shorter."""
        self.count, self.seq_len, self.seed, self.batch = count, seq_len, seed, batch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        length = self.seq_len - (5 * (index // self.batch) if self.batch else 0)
        generator = torch.Generator().manual_seed(7919 * index + self.seed)
        jumps = torch.randint(1, 97, (length,), generator=generator)
        chain = (jumps[0] + torch.arange(length)) % 96 + 1
        ids = torch.where(torch.rand(length, generator=generator) < 0.1, jumps, chain)
        ignored = torch.rand(length, generator=generator) < 0.1 + 0.17 * (index % 5)
        return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(len(self.rows)):
            yield self.rows[index]


def small_model() -> Any:
    """One layer of each kind, the same weights on every call."""
    return tiny_qwen3_5(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


@contextlib.contextmanager
def launched(environment: Mapping[str, str]) -> Iterator[None]:
    """A process as if freshly launched with ``environment``: Accelerate's state is new, and gone afterwards."""
    before = dict(os.environ)
    allow_fsdp2_on_cpu()
    os.environ.update(environment)
    reset_accelerate()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        reset_accelerate()


def reset_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def sizes_environment(layout: Layout) -> dict[str, str]:
    """What `accelerate launch` makes of a ``parallelism_config`` section."""
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(layout.dp_replicate),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(layout.dp_shard),
        "PARALLELISM_CONFIG_TP_SIZE": "1",
        "PARALLELISM_CONFIG_CP_SIZE": str(layout.cp),
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather",
    }


def environment_of(run: Run) -> dict[str, str]:
    if run.layout is None:
        return {}
    sizes = sizes_environment(run.layout) if run.from_environment else {}
    return {**WRAPPERS[run.layout.wrapper], **sizes}


def patched(model: Any, layout: Layout | None, **settings: Any) -> Any:
    if layout is None or layout.stock:
        return model
    settings = {"linear_mode": layout.linear_mode, "attention_mode": layout.attention_mode, **settings}
    return hf_cp.patch(model, gdn_backend="eager", **settings)


def make_trainer(run: Run, folder: str | Path, *, model: Any = None, **trainer_options: Any) -> Trainer:
    """A Trainer as a user's script would make it, around ``model`` as it is, or a new model that ``run`` describes."""
    if model is None:
        model = patched(small_model(), run.layout)
    if not run.count_items:
        model.accepts_loss_kwargs = False
    dp = 1 if run.layout is None else run.layout.dp
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": run.rows,
        "max_steps": run.steps,
        "gradient_accumulation_steps": run.accumulation,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": ADAM_EPSILON,
        "lr_scheduler_type": "constant",
        "max_grad_norm": run.clip,
        "average_tokens_across_devices": run.average_tokens,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
        "include_num_input_tokens_seen": "all",
    }
    if run.eval_every:
        options |= {"eval_strategy": "steps", "eval_steps": run.eval_every, "per_device_eval_batch_size": 4}
    if run.checkpointing is not None:
        reentrant = {"use_reentrant": run.checkpointing == "reentrant"}
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": reentrant}
    if run.layout is not None and not run.from_environment and not run.layout.stock:
        options["parallelism_config"] = run.layout.config()
    rows = Rows(run.steps * run.accumulation * dp * run.rows, run.seq_len)
    data = {
        "train_dataset": Stream(rows) if run.streaming else rows,
        "eval_dataset": Rows(5, run.seq_len, seed=1),
    }
    trainer = Trainer(model=model, args=TrainingArguments(**options | dict(run.options)), **{**data, **trainer_options})
    trainer.remove_callback(PrinterCallback)
    return trainer


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Every parameter, whole, under its stock name."""
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def curve_of(trainer: Trainer) -> Curve:
    history = trainer.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    return Curve(
        [entry["loss"] for entry in steps],
        [entry["grad_norm"] for entry in steps],
        whole_weights(trainer.model_wrapped),
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        trainer.state.num_input_tokens_seen,
    )


class StepCount(TrainerCallback):
    """Steps that a run takes itself: one that ignored its checkpoint would reach the same curve with more of them."""

    steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1


def resume(trainer: Trainer, folder: Path, begin: int, end: int) -> Curve:
    """Train from the checkpoint of step ``begin`` in ``folder``, if any, to step ``end``; the curve of all steps."""
    count = StepCount()
    trainer.add_callback(count)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{begin}") if begin else None)
    assert trainer.state.global_step == end
    assert count.steps == end - begin
    return curve_of(trainer)


def train(run: Run) -> Curve:
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder)
        trainer.train()
        return curve_of(trainer)


def train_on_rank(rank: int, size: int, run: Run) -> Curve:
    return train(run)


@functools.cache
def train_on_one_process(run: Run) -> Curve:
    return train(run)


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; infinite where one is not a number or the lengths differ."""
    if len(found) != len(expected) or not expected:
        return float("inf")
    errors = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return max((error if error == error else float("inf")) for error in errors)


def deviation(found: Curve, expected: Curve) -> dict[str, float]:
    """Largest relative difference of each reported quantity, and of the weights as one vector and by tensor."""
    errors = {
        "loss": relative(found.losses, expected.losses),
        "grad_norm": relative(found.grad_norms, expected.grad_norms),
        "weights": max(
            ((found.weights[name].double() - w.double()).norm() / w.double().norm()).item()
            for name, w in expected.weights.items()
        ),
    }
    if expected.eval_losses:
        errors["eval_loss"] = relative(found.eval_losses, expected.eval_losses)
    return errors


def assert_same_curve(found: list[Curve], expected: Curve, *, bound: float = 1e-5, weights_bound: float = 1e-4) -> None:
    """Every rank reports the expected curve, and every rank the same one."""
    for curve in found:
        assert curve.losses == found[0].losses
        assert curve.grad_norms == found[0].grad_norms
        assert curve.eval_losses == found[0].eval_losses
        assert curve.tokens_seen == expected.tokens_seen
        assert set(curve.weights) == set(expected.weights)
        assert all(torch.equal(curve.weights[name], w) for name, w in found[0].weights.items())
    errors = deviation(found[0], expected)
    print({name: f"{error:.1e}" for name, error in errors.items()})
    limits = {name: weights_bound if name == "weights" else bound for name in errors}
    assert all(errors[name] <= limits[name] for name in errors), errors


def assert_moves(curve: Curve, steps: int, clip: float) -> None:
    """The reference is worth comparing with: the loss falls, and the limit clips at every step."""
    assert len(curve.losses) == len(curve.grad_norms) == steps
    assert curve.losses[-1] < 0.9 * curve.losses[0]
    assert min(curve.grad_norms) > clip


def run_in(world: World, run: Run) -> list[Curve]:
    return world.run(train_on_rank, run, timeout=150)
