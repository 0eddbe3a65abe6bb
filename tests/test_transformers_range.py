"""What differs between the oldest and the newest transformers under support; `make test` runs it on both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from training_runs import (
    Layout,
    Rows,
    Run,
    assert_moves,
    assert_same_curve,
    environment_of,
    launched,
    make_trainer,
    relative,
    resume,
    run_in,
    small_model,
    train_on_one_process,
    whole_weights,
)
from transformers import Qwen3_5ForCausalLM

import hf_cp
from hf_cp.testing import World

Worlds = Callable[..., World]
FSDP_CP2, DDP_CP2 = Layout("fsdp2", cp=2), Layout("ddp", cp=2)
OLDEST = "5.17"


def version_on_rank(rank: int, size: int) -> tuple[str, str]:
    return transformers.__version__, str(Path(transformers.__file__).parent)


def test_version(world: Worlds) -> None:
    """The version that EXPECT_TRANSFORMERS names is the one under test, in this process and in every rank."""
    here = version_on_rank(0, 1)
    assert world(2).run(version_on_rank) == [here] * 2
    expected = os.environ.get("EXPECT_TRANSFORMERS")
    if expected is None:
        assert Version(here[0]) >= Version(OLDEST)
    else:
        assert here[0] == expected


@pytest.mark.parametrize(
    "run",
    [
        Run(FSDP_CP2, steps=6, eval_every=3),
        Run(FSDP_CP2, steps=6, accumulation=2, average_tokens=False, checkpointing="not_reentrant"),
        Run(DDP_CP2, steps=6, checkpointing="reentrant"),
        Run(DDP_CP2, steps=6, accumulation=2, count_items=False),
        Run(Layout("fsdp2", cp=2, dp_shard=2, attention_mode="allgather"), steps=6, from_environment=True),
        Run(Layout("ddp", cp=4, linear_mode="ulysses"), steps=6, streaming=True),
    ],
    ids=str,
)
def test_every_step_equals_one_process(world: Worlds, run: Run) -> None:
    assert run.layout is not None
    expected = train_on_one_process(run.on_one_process())
    assert_moves(expected, run.steps, run.clip)
    assert_same_curve(run_in(world(run.layout.world_size), run), expected)


def evaluate(run: Run) -> tuple[float, Any]:
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder)
        predicted: Any = trainer.predict(Rows(5, run.seq_len, seed=1))
        return predicted.metrics["test_loss"], predicted


def evaluate_on_rank(rank: int, size: int, run: Run) -> tuple[float, Any]:
    return evaluate(run)


def test_evaluation_equals_one_process(world: Worlds) -> None:
    batch = (("per_device_eval_batch_size", 4),)
    loss, expected = evaluate(Run(options=batch))
    for found_loss, found in world(2).run(evaluate_on_rank, Run(DDP_CP2, options=batch)):
        assert relative([found_loss], [loss]) <= 1e-6
        assert (found.label_ids == expected.label_ids).all()
        torch.testing.assert_close(
            torch.as_tensor(found.predictions), torch.as_tensor(expected.predictions), rtol=1e-5, atol=1e-5
        )


def resume_on_rank(rank: int, size: int, run: Run, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Two steps, a checkpoint, two more steps from it, and the model saved."""
    trainer = None
    for begin, end in ((0, 2), (2, 4)):
        options = (("max_steps", end), ("save_strategy", "steps"), ("save_steps", 2))
        with launched(environment_of(run)):
            trainer = make_trainer(Run(run.layout, steps=run.steps, options=options), folder)
            resume(trainer, folder, begin, end)
            trainer.save_model(str(folder / "saved"))
    assert trainer is not None
    history = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return history, whole_weights(trainer.model_wrapped)


def test_resumed_and_saved(world: Worlds, tmp_path: Path) -> None:
    run = Run(FSDP_CP2, steps=4)
    expected = train_on_one_process(run.on_one_process())
    (history, weights), _ = world(2).run(resume_on_rank, run, tmp_path, timeout=120)
    losses, norms = zip(*history, strict=True)
    assert relative(losses, expected.losses) <= 1e-5
    assert relative(norms, expected.grad_norms) <= 1e-5
    saved = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.architectures == ["Qwen3_5ForCausalLM"]
    assert all(torch.equal(weights[name], w) for name, w in whole_weights(saved).items())


def outputs(model: Any) -> dict[str, Any]:
    """Padded on the right, padded on the left, with hidden states, and generated with a cache."""
    model.eval()
    ids = torch.stack([Rows(2, 37, seed=3)[row]["input_ids"] for row in range(2)])
    right = torch.ones_like(ids).index_fill(1, torch.arange(30, 37), 0)
    found = {}
    with torch.no_grad():
        for name, mask in (("right", right), ("left", right.flip(1))):
            labels = ids.masked_fill(mask == 0, -100)
            output = model(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
            found[f"{name} loss"] = output.loss
            found[f"{name} logits"] = output.logits[mask == 1]
            found[f"{name} hidden states"] = torch.stack(output.hidden_states)[:, mask == 1]
        found["generated"] = model.generate(ids[:, :9], max_new_tokens=6, do_sample=False)
    return found


def outputs_on_rank(rank: int, size: int) -> dict[str, Any]:
    return outputs(hf_cp.patch(small_model(), gdn_backend="eager", cp_group=dist.group.WORLD))


def test_outputs_equal_stock(world: Worlds) -> None:
    expected = outputs(small_model())
    for found in world(2).run(outputs_on_rank):
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text
            )


def documents() -> tuple[torch.Tensor, torch.Tensor]:
    """Two documents in a row and their positions; the first crosses the edge between two ranks."""
    lengths = (35, 20)
    ids = torch.cat([Rows(2, 35, seed=4)[row]["input_ids"][:length] for row, length in enumerate(lengths)])
    return ids[None], torch.cat([torch.arange(length) for length in lengths])[None]


def packed_on_rank(rank: int, size: int) -> torch.Tensor:
    model = hf_cp.patch(small_model().eval(), gdn_backend="eager", cp_group=dist.group.WORLD)
    ids, positions = documents()
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions).logits


def test_packed_documents_do_not_see_each_other(world: Worlds) -> None:
    ids, positions = documents()
    second = int((positions[0] == 0).nonzero()[1])
    stock = small_model().eval()
    with torch.no_grad():
        expected = torch.cat([stock(input_ids=part).logits for part in (ids[:, :second], ids[:, second:])], dim=1)
    for logits in world(2).run(packed_on_rank):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
