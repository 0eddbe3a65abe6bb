"""Losses that Trainer changes or replaces: label smoothing and a function of the user's own."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_runs import (
    Curve,
    Layout,
    Run,
    assert_same_curve,
    curve_of,
    environment_of,
    launched,
    make_trainer,
)

from hf_cp.testing import World

Worlds = Callable[..., World]
STEPS = 2
FSDP_CP2 = Layout("fsdp2", cp=2)
DDP_2X2 = Layout("ddp", cp=2, dp_replicate=2)


def margin_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss that looks at neighbours across every rank edge: cross-entropy, and a penalty on changes of the logits."""
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    ignored = targets == -100
    total = F.cross_entropy(logits[~ignored], targets[~ignored], reduction="sum")
    total = total + 0.1 * (logits[:, 1:] - logits[:, :-1]).square().mean(-1)[~ignored[:, 1:]].sum()
    return total / (num_items_in_batch if num_items_in_batch is not None else (~ignored).sum())


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smoothing": ({"label_smoothing_factor": 0.2}, {}),
    "function": ({}, {"compute_loss_func": margin_loss}),
    "function beside smoothing": ({"label_smoothing_factor": 0.2}, {"compute_loss_func": margin_loss}),
}


def train_with(run: Run, kind: str) -> tuple[Curve, Tensor]:
    """The curve, and the logits of an evaluation whose loss is in the curve."""
    arguments, extra = KINDS[kind]
    options = (("eval_strategy", "steps"), ("eval_steps", 2), ("per_device_eval_batch_size", 2), *arguments.items())
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(replace(run, options=(*run.options, *options)), folder, **extra)
        trainer.train()
        predicted: Any = trainer.predict(trainer.eval_dataset)  # pyright: ignore[reportArgumentType]
        curve = curve_of(trainer)
        curve.eval_losses.append(predicted.metrics["test_loss"])
        return curve, torch.as_tensor(predicted.predictions)


def train_with_on_rank(rank: int, size: int, run: Run, kind: str) -> tuple[Curve, Tensor]:
    return train_with(run, kind)


@functools.cache
def train_with_on_one_process(run: Run, kind: str) -> tuple[Curve, Tensor]:
    return train_with(run, kind)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (Run(FSDP_CP2, steps=STEPS), "smoothing"),
        (Run(FSDP_CP2, steps=STEPS, accumulation=2), "function"),
        (Run(FSDP_CP2, steps=STEPS, accumulation=2, average_tokens=False), "smoothing"),
        (Run(Layout("ddp", cp=2), steps=STEPS, accumulation=2, average_tokens=False), "function"),
        (Run(Layout("ddp", cp=2), steps=STEPS, count_items=False), "smoothing"),
        (Run(Layout("ddp", cp=2, attention_mode="allgather"), steps=STEPS), "function beside smoothing"),
        (Run(DDP_2X2, steps=STEPS, accumulation=2), "smoothing"),
        (Run(DDP_2X2, steps=STEPS), "function"),
    ],
    ids=str,
)
def test_every_step_equals_one_process(world: Worlds, run: Run, kind: str) -> None:
    assert run.layout is not None
    expected, expected_logits = train_with_on_one_process(run.on_one_process(), kind)
    if run.layout.dp > 1:  # evaluation averages over other batches
        expected.eval_losses.clear()
    results = world(run.layout.world_size).run(train_with_on_rank, run, kind, timeout=150)
    for curve, logits in results:
        if run.layout.dp > 1:
            curve.eval_losses.clear()
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert_same_curve([curve for curve, _ in results], expected)
