"""Checkpoints that are written by one number of ranks and read by another, and folders for the stock model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch import Tensor
from training_runs import (
    Curve,
    Layout,
    Rows,
    Run,
    assert_moves,
    assert_same_curve,
    environment_of,
    launched,
    make_trainer,
    patched,
    resume,
    small_model,
    train_on_one_process,
    whole_weights,
)
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

from hf_cp.testing import World, tiny_qwen3_5

Worlds = Callable[..., World]
STEPS = 10
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def untied_model() -> Any:
    layers = ["linear_attention", "full_attention"]
    return tiny_qwen3_5(num_hidden_layers=2, layer_types=layers, tie_word_embeddings=False)


def leg(run: Run, folder: Path, kind: str, begin: int, end: int, model: Any = None) -> Curve:
    """Steps ``begin`` to ``end`` of a run that is one epoch long, from a checkpoint and to another."""
    options = (("max_steps", end), ("save_strategy", "steps"), ("save_steps", end))
    with launched({**environment_of(run), "FSDP_STATE_DICT_TYPE": kind}):
        return resume(make_trainer(replace(run, options=options), folder, model=model), folder, begin, end)


def leg_on_rank(rank: int, size: int, *arguments: Any) -> Curve:
    return leg(*arguments)


# name: legs as (layout, rows of each rank, last step). One process without a layout is stock Trainer's.
JOURNEYS: dict[str, tuple[str, list[tuple[Layout | None, int, int]]]] = {
    "5 + 5": (FULL, [(Layout("fsdp2", cp=2), 2, 5), (Layout("fsdp2", cp=2), 2, STEPS)]),
    "full, cp 4 to 2 to 1": (
        FULL,
        [
            (Layout("fsdp2", cp=4, attention_mode="allgather"), 2, 3),
            (Layout("fsdp2", cp=2), 2, 7),
            (Layout("fsdp2", dp_shard=2), 1, STEPS),
        ],
    ),
    "sharded, cp 4 to 2 to 1": (
        SHARDED,
        [
            (Layout("fsdp2", cp=4), 2, 4),
            (Layout("fsdp2", cp=2, linear_mode="allgather"), 2, 5),
            (Layout("fsdp2", dp_shard=2), 1, STEPS),
        ],
    ),
    "sharded, cp 2 to dp 2 x cp 2": (
        SHARDED,
        [(Layout("fsdp2", cp=2), 2, 5), (Layout("fsdp2", cp=2, dp_shard=2), 1, STEPS)],
    ),
    "DDP, cp 4 to 2 to a stock model": (
        FULL,
        [(Layout("ddp", cp=4), 2, 3), (Layout("ddp", cp=2), 2, 7), (None, 2, STEPS)],
    ),
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_journey_equals_one_process(world: Worlds, name: str, tmp_path: Path) -> None:
    kind, legs = JOURNEYS[name]
    expected = train_on_one_process(Run(rows=2, steps=STEPS))
    assert_moves(expected, STEPS, Run().clip)
    begin, curves = 0, []
    for layout, rows, end in legs:
        # The number of rows is that of the whole run, so that every leg reads the same epoch.
        run = Run(layout, rows=rows, steps=STEPS)
        if layout is None:
            curves = [leg(run, tmp_path, kind, begin, end)]
        else:
            curves = world(layout.world_size).run(leg_on_rank, run, tmp_path, kind, begin, end, timeout=120)
        begin = end
    assert_same_curve(curves, expected)


def saved_on_rank(rank: int, size: int, folder: Path, kind: str, tied: bool) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and the model as Trainer and as ``save_pretrained`` write it."""
    run = Run(Layout("fsdp2", cp=2), steps=2)
    model = patched(small_model() if tied else untied_model(), run.layout)
    options = (("save_strategy", "steps"), ("save_steps", 2))
    with launched({**environment_of(run), "FSDP_STATE_DICT_TYPE": kind}):
        trainer = make_trainer(replace(run, options=options), folder, model=model)
        trainer.train()
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if rank == 0:
            unwrapped: Any = trainer.accelerator.unwrap_model(trainer.model_wrapped)
            unwrapped.save_pretrained(folder / "pretrained", state_dict=state, max_shard_size="100KB")
        return whole_weights(trainer.model_wrapped)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_folders_for_the_stock_model(world: Worlds, kind: str, tied: bool, tmp_path: Path) -> None:
    weights = world(2).run(saved_on_rank, tmp_path, kind, tied)[0]
    assert ("lm_head.weight" in weights) != tied
    folders = [tmp_path / "pretrained"] + [tmp_path / "checkpoint-2"] * (kind == FULL)
    ids = Rows(1, 40)[0]["input_ids"][None]
    for folder in folders:
        assert list(folder.glob("model*.safetensors"))
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(model) is Qwen3_5ForCausalLM
        assert model.config.architectures == ["Qwen3_5ForCausalLM"]
        assert all(torch.equal(w, weights[name]) for name, w in model.named_parameters())
        with torch.no_grad():
            assert model(input_ids=ids).logits.isfinite().all()
    if kind == SHARDED:
        merge_fsdp_weights(str(tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
        merged = load_file(tmp_path / "merged" / "model.safetensors")
        assert all(torch.equal(merged[name], w) for name, w in weights.items())
        assert set(merged) - set(weights) <= {"lm_head.weight"}
