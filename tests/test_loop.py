"""Hand-written loops with a patched model against a plain loop with the stock model on one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from training_runs import (
    ADAM_EPSILON,
    LEARNING_RATE,
    WRAPPERS,
    Curve,
    Layout,
    Rows,
    assert_moves,
    assert_same_curve,
    launched,
    patched,
    small_model,
    whole_weights,
)

import hf_cp
from hf_cp.testing import World

Worlds = Callable[..., World]
STEPS, FEW, ROWS, LENGTH, CLIP = 20, 6, 2, 63, 0.25


@dataclass(frozen=True)
class Loop:
    """A loop's layout and habits: micro-batches a step, a given item count, and `maybe_context_parallel`."""

    layout: Layout
    accumulation: int = 1
    count_items: bool = False
    buffers: bool = False
    steps: int = STEPS

    @property
    def micro_batches(self) -> int:
        return self.accumulation * self.layout.dp

    def __str__(self) -> str:
        flags = ["items" if self.count_items else "", "buffers" if self.buffers else ""]
        return "-".join(flag for flag in [str(self.layout), f"accumulate{self.accumulation}", *flags] if flag)


def rows(micro_batches: int, steps: int) -> Rows:
    # A row more than the steps take, so that the end of the data ends no accumulation early.
    return Rows((steps + 1) * micro_batches * ROWS, LENGTH)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON)


def item_count(batches: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def steps_of(loader: Any, micro_batches: int, steps: int) -> Iterator[list[dict[str, Tensor]]]:
    batches = iter(loader)
    for _ in range(steps):
        yield [next(batches) for _ in range(micro_batches)]


@functools.cache
def on_one_process(micro_batches: int, count_items: bool, steps: int) -> Curve:
    """The plain loop: a step's loss is the mean over its micro-batches, or over all its items."""
    model = small_model().train()
    optimizer = optimizer_of(model)
    losses, norms = [], []
    loader = DataLoader(rows(micro_batches, steps), batch_size=ROWS)
    for batches in steps_of(loader, micro_batches, steps):
        total = 0.0
        for batch in batches:
            if count_items:
                loss = model(**batch, num_items_in_batch=item_count(batches)).loss
            else:
                loss = model(**batch).loss / micro_batches
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    curve = Curve(losses, norms, whole_weights(model))
    assert_moves(curve, steps, CLIP)
    return curve


def mean_over_ranks(value: float) -> float:
    """The ranks of a group report the same, so the mean over all ranks is the one over data-parallel ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def total_items(batches: list[dict[str, Tensor]], layout: Layout) -> int:
    """Items of the whole step: each context-parallel group counts once."""
    count = torch.tensor(item_count(batches))
    dist.all_reduce(count)
    items = int(count)
    assert items % layout.cp == 0
    return items // layout.cp


def accelerate_loop(rank: int, size: int, loop: Loop) -> Curve:
    layout = loop.layout
    with launched(WRAPPERS[layout.wrapper]):
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=loop.accumulation, parallelism_config=layout.config()
        )
        bare = patched(small_model(), layout).train()
        prepared: Any = accelerator.prepare(
            bare, optimizer_of(bare), DataLoader(rows(loop.micro_batches, loop.steps), batch_size=ROWS)
        )
        model, optimizer, loader = prepared
        losses, norms = [], []
        for batches in steps_of(loader, loop.accumulation, loop.steps):
            total = 0.0
            extra, scale = {}, 1
            if loop.count_items:
                # A sum over items is averaged by the wrapper and divided by Accelerate; undo both.
                extra, scale = {"num_items_in_batch": total_items(batches, layout)}, loop.micro_batches
            for batch in batches:
                sharded = contextlib.nullcontext()
                if loop.buffers:
                    sharded = accelerator.maybe_context_parallel(
                        buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch)
                    )
                with accelerator.accumulate(model), sharded:
                    loss = model(**batch, **extra).loss * scale
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm: Any = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.item() / loop.accumulation
            losses.append(mean_over_ranks(total))
        return Curve(losses, norms, whole_weights(accelerator.unwrap_model(model)))


FSDP_CP2, DDP_CP2 = Layout("fsdp2", cp=2), Layout("ddp", cp=2)
FSDP_2X2, HSDP_2X2 = Layout("fsdp2", cp=2, dp_shard=2), Layout("fsdp2", cp=2, dp_replicate=2)
DDP_2X2 = Layout("ddp", cp=2, dp_replicate=2)
# Twenty steps for each wrapper of four ranks.
LOOPS = [
    Loop(FSDP_CP2, steps=FEW),
    Loop(FSDP_CP2, accumulation=4, count_items=True, buffers=True, steps=FEW),
    Loop(DDP_CP2, accumulation=4, steps=FEW),
    Loop(DDP_CP2, count_items=True, buffers=True, steps=FEW),
    Loop(FSDP_2X2, count_items=True, buffers=True),
    Loop(HSDP_2X2, steps=FEW),
    Loop(DDP_2X2, accumulation=4, count_items=True, buffers=True, steps=FEW),
    Loop(DDP_2X2),
]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_accelerate_loop_equals_one_process(world: Worlds, loop: Loop) -> None:
    expected = on_one_process(loop.micro_batches, loop.count_items, loop.steps)
    assert_same_curve(world(loop.layout.world_size).run(accelerate_loop, loop, timeout=150), expected)


def bare_loop(rank: int, size: int, loop: Loop) -> Curve:
    """No wrapper and no Accelerate: data-parallel neighbours are ``cp`` ranks apart."""
    layout = loop.layout
    groups = [dist.new_group(list(range(first, first + layout.cp))) for first in range(0, size, layout.cp)]
    dp_rank = rank // layout.cp
    model = patched(small_model(), layout, cp_group=groups[dp_rank]).train()
    optimizer = optimizer_of(model)
    losses, norms = [], []
    loader = DataLoader(rows(loop.micro_batches, loop.steps), batch_size=ROWS)
    for everyone in steps_of(loader, loop.micro_batches, loop.steps):
        batches = everyone[dp_rank :: layout.dp]
        total = 0.0
        for batch in batches:
            if loop.count_items:
                loss = model(**batch, num_items_in_batch=total_items(batches, layout)).loss * layout.dp
            else:
                loss = model(**batch).loss / loop.accumulation
            loss.backward()
            total += loss.item()
        hf_cp.average_gradients(model, **({} if layout.dp == 1 else {"group": dist.group.WORLD}))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total))
    return Curve(losses, norms, whole_weights(model))


@pytest.mark.parametrize(
    "loop",
    [
        Loop(Layout("bare", cp=2), accumulation=4, steps=FEW),
        Loop(Layout("bare", cp=4, linear_mode="ulysses"), count_items=True, steps=FEW),
        Loop(Layout("bare", cp=2, dp_replicate=2), count_items=True),
        Loop(Layout("bare", cp=2, dp_replicate=2, linear_mode="allgather"), accumulation=4, steps=FEW),
    ],
    ids=str,
)
def test_bare_loop_equals_one_process(world: Worlds, loop: Loop) -> None:
    expected = on_one_process(loop.micro_batches, loop.count_items, loop.steps)
    assert_same_curve(world(loop.layout.world_size).run(bare_loop, loop, timeout=150), expected)
