"""An unchanged Trainer with a patched model against the stock model on one process, step by step."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from test_families import small_model as sparse_model
from test_parity import TWO_LAYERS
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.data import IterableDataset
from training_runs import (
    FSDP2,
    Curve,
    Layout,
    Rows,
    Run,
    assert_moves,
    assert_same_curve,
    curve_of,
    environment_of,
    launched,
    make_trainer,
    patched,
    relative,
    resume,
    run_in,
    sizes_environment,
    small_model,
    train_on_one_process,
    whole_weights,
)
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import TrainerCallback

import hf_cp
from hf_cp.testing import World, tiny_qwen3_5

Worlds = Callable[..., World]
RECIPES = Path(__file__).resolve().parents[1] / "recipes"

FSDP_CP2 = Layout("fsdp2", cp=2)
DDP_CP2 = Layout("ddp", cp=2)
FSDP_2X2 = Layout("fsdp2", cp=2, dp_shard=2)
HSDP_2X2 = Layout("fsdp2", cp=2, dp_replicate=2)
DDP_2X2 = Layout("ddp", cp=2, dp_replicate=2)

# Twenty steps for each wrapper; a few show how micro-batches, counts, replay and streams enter a step.
FEW = 6
RUNS = [
    Run(FSDP_CP2, eval_every=5),
    Run(FSDP_CP2, count_items=False, steps=FEW),
    Run(FSDP_CP2, accumulation=4, average_tokens=False, steps=FEW),
    Run(FSDP_CP2, checkpointing="reentrant", steps=FEW),
    Run(FSDP_CP2, checkpointing="not_reentrant", steps=FEW),
    Run(FSDP_CP2, streaming=True, steps=FEW),
    Run(DDP_CP2, accumulation=4, eval_every=3, steps=FEW),
    Run(DDP_CP2, count_items=False),
    Run(DDP_CP2, checkpointing="not_reentrant", steps=FEW),
    Run(Layout("fsdp2", cp=4, linear_mode="allgather", attention_mode="allgather"), eval_every=3, steps=FEW),
    Run(Layout("ddp", cp=4, linear_mode="ulysses"), count_items=False, steps=FEW),
    Run(FSDP_2X2, accumulation=4, steps=FEW),
    Run(FSDP_2X2, count_items=False),
    Run(FSDP_2X2, streaming=True, steps=FEW),
    Run(FSDP_2X2, from_environment=True, steps=FEW),
    Run(HSDP_2X2),
    Run(HSDP_2X2, accumulation=4, count_items=False, steps=FEW),
    Run(DDP_2X2, count_items=False, steps=FEW),
    Run(DDP_2X2, accumulation=4, steps=FEW),
    Run(Layout("fsdp2", dp_shard=2), steps=FEW),  # patched, no context parallelism
]


# name: (model, its decoder layer)
OTHER_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "untied head": (functools.partial(tiny_qwen3_5, **TWO_LAYERS, tie_word_embeddings=False), "Qwen3_5DecoderLayer"),
    "experts": (
        functools.partial(sparse_model, "Qwen3_5Moe", **TWO_LAYERS, output_router_logits=True),
        "Qwen3_5MoeDecoderLayer",
    ),
    "experts of Next": (
        functools.partial(sparse_model, "Qwen3Next", **TWO_LAYERS, output_router_logits=True),
        "Qwen3NextDecoderLayer",
    ),
}


def train_other(run: Run, name: str) -> Curve:
    build, layer = OTHER_MODELS[name]
    environment = {**environment_of(run), "FSDP_TRANSFORMER_CLS_TO_WRAP": layer}
    with launched(environment), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder, model=patched(build(), run.layout))
        trainer.train()
        return curve_of(trainer)


def train_other_on_rank(rank: int, size: int, *arguments: Any) -> Curve:
    return train_other(*arguments)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_equal_one_process(world: Worlds, name: str) -> None:
    """With the router's loss: its gradient norm is that of one process, too."""
    for run in (Run(FSDP_CP2, steps=FEW), Run(DDP_CP2, steps=FEW, count_items=False)):
        expected = train_other(run.on_one_process(), name)
        assert_moves(expected, run.steps, run.clip)
        assert_same_curve(world(2).run(train_other_on_rank, run, name, timeout=150), expected)


def test_router_loss_equals_stock_data_parallelism(world: Worlds) -> None:
    """Trainer multiplies the router's loss by the data-parallel ranks, and no further."""
    habits: dict[str, Any] = {"steps": FEW, "accumulation": 2}
    stock = world(2).run(train_other_on_rank, Run(Layout("ddp", dp_replicate=2, stock=True), **habits), "experts")
    found = world(4).run(train_other_on_rank, Run(DDP_2X2, **habits), "experts", timeout=150)
    assert_same_curve(found, stock[0])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_step_equals_one_process(world: Worlds, run: Run) -> None:
    assert run.layout is not None
    expected = train_on_one_process(run.on_one_process())
    assert_moves(expected, run.steps, run.clip)
    assert_same_curve(run_in(world(run.layout.world_size), run), expected)


def test_item_counts_of_one_device_equal_stock_data_parallelism(world: Worlds) -> None:
    """Without averaging over devices each data-parallel rank divides by its own count, which no one process does."""
    habits: dict[str, Any] = {"steps": 8, "accumulation": 2, "average_tokens": False}
    stock = run_in(world(2), Run(Layout("ddp", dp_replicate=2, stock=True), **habits))
    assert_same_curve(run_in(world(4), Run(DDP_2X2, **habits)), stock[0])


def launch_environment(recipe: str) -> dict[str, str]:
    """What `accelerate launch --config_file` hands to its processes."""
    arguments = launch_command_parser().parse_args(["--config_file", str(RECIPES / recipe), "script.py"])
    validated, _, _ = _validate_launch_command(arguments)
    environment = prepare_multi_gpu_env(validated)
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


def recipe_on_rank(rank: int, size: int, run: Run, environment: dict[str, str]) -> Curve:
    with launched(environment), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder)
        trainer.train()
        return curve_of(trainer)


def test_launch_configuration_file_of_the_recipes(world: Worlds) -> None:
    run = Run(FSDP_CP2, from_environment=True, steps=FEW)
    environment = launch_environment("cpu_x2.yaml")
    assert environment.items() >= sizes_environment(FSDP_CP2).items()
    expected = train_on_one_process(run.on_one_process())
    assert_same_curve(world(2).run(recipe_on_rank, run, environment, timeout=150), expected)


# Evaluation.

Evaluated = dict[str, Any]


def evaluate(run: Run, rows: int, batch: int, lengths_differ: bool) -> Evaluated:
    """eval_loss, and what `compute_metrics` and `predict` are given, of the untrained model."""
    seen: dict[str, Any] = {}

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.update(logits=torch.as_tensor(prediction.predictions), labels=torch.as_tensor(prediction.label_ids))
        return {"rows": len(prediction.predictions)}

    data = Rows(rows, run.seq_len, seed=1, batch=batch if lengths_differ else 0)
    options = {"eval_dataset": data, "compute_metrics": compute_metrics}
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder, **options)
        if trainer.is_fsdp_enabled:  # Accelerate takes a model under FSDP2 only together with an optimizer
            trainer.train()
        metrics = trainer.evaluate()
        predicted: Any = trainer.predict(data)
    return {
        "loss": metrics["eval_loss"],
        "test_loss": predicted.metrics["test_loss"],
        "rows": metrics["eval_rows"],
        "predicted": torch.as_tensor(predicted.predictions),
        **seen,
    }


def with_eval_batch(run: Run, batch: int) -> Run:
    return replace(run, steps=1, options=(("per_device_eval_batch_size", batch), ("learning_rate", 0.0)))


def evaluate_on_rank(rank: int, size: int, run: Run, cases: list[tuple[int, int, bool]]) -> list[Evaluated]:
    return [evaluate(with_eval_batch(run, batch), rows, batch, differ) for rows, batch, differ in cases]


@functools.cache
def evaluate_on_one_process(rows: int, batch: int, lengths_differ: bool) -> Evaluated:
    return evaluate(with_eval_batch(Run(), batch), rows, batch, lengths_differ)


def assert_same_evaluation(found: Evaluated, expected: Evaluated) -> None:
    assert relative([found["loss"], found["test_loss"]], [expected["loss"], expected["test_loss"]]) <= 1e-6
    assert found["rows"] == expected["rows"]
    assert torch.equal(found["labels"], expected["labels"])
    for name in ("logits", "predicted"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (FSDP_CP2, [(5, 4, False), (8, 4, False), (1, 4, False), (7, 2, True)]),
        (DDP_CP2, [(5, 4, False), (3, 2, False), (6, 3, True)]),
        (Layout("ddp", cp=4, attention_mode="allgather"), [(5, 4, False), (2, 4, False), (7, 3, True)]),
    ],
    ids=str,
)
def test_evaluation_equals_one_process(world: Worlds, layout: Layout, cases: list[tuple[int, int, bool]]) -> None:
    for results in world(layout.world_size).run(evaluate_on_rank, Run(layout), cases, timeout=120):
        for case, found in zip(cases, results, strict=True):
            rows = case[0]
            expected = evaluate_on_one_process(*case)
            assert expected["rows"] == rows
            assert_same_evaluation(found, expected)


def test_evaluation_equals_stock_data_parallelism(world: Worlds) -> None:
    cases = [(5, 2, False), (3, 2, False), (9, 2, False), (8, 2, False)]
    expected = world(2).run(evaluate_on_rank, Run(Layout("ddp", dp_replicate=2, stock=True)), cases)[0]
    for layout, count in ((DDP_2X2, 4), (FSDP_2X2, 2)):
        for results in world(4).run(evaluate_on_rank, Run(layout), cases[:count], timeout=120):
            for found, wanted in zip(results, expected[:count], strict=True):
                assert_same_evaluation(found, wanted)


# Habits: what a user sets or hangs in, against the stock model with the same.


class Ragged(Rows):
    """Rows of many lengths, for a collator that pads."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[: 20 + 7 * index % 40] for name, x in super().__getitem__(index).items()}


def pad_right(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = [row | {"attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    filling = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in filling.items()
    }


class LooksIn(TrainerCallback):
    """After each step, a forward in evaluation and a sample, as to see how a model gets on."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        prompt = torch.arange(1, 20)[None]
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(state.global_step)
            total = model(input_ids=prompt).logits.square().sum().item()
            sample = getattr(model, "module", model).generate(prompt, max_new_tokens=4, do_sample=True, pad_token_id=0)
        model.train()
        state.log_history.append(
            {"logits": total, "sample": float(sample[0, -4:].dot(torch.tensor([1, 97, 101, 103])))}
        )


class Toggles(TrainerCallback):
    """Checkpointing in every other step, and an evaluation after each."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> Any:
        model = getattr(model, "module", model)
        if state.global_step % 2:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        control.should_evaluate = True
        return control


class Wider(Rows):
    """Rows with columns that the model knows nothing of."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"row": torch.tensor(index), "score": torch.ones(3)}


class SumsOfBatches:
    """Metrics that are told batch by batch."""

    def __init__(self) -> None:
        self.sums = [0.0, 0.0, 0.0]

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
        found = (len(labels), (labels != -100).sum().item(), logits.double().square().sum().item())
        self.sums = [a + b for a, b in zip(self.sums, found, strict=True)]
        if not compute_result:
            return {}
        (rows, labels, squares), self.sums = self.sums, [0.0, 0.0, 0.0]
        return {"rows": rows, "labels": labels, "squares": squares}


def of_inputs_and_losses(prediction: Any) -> dict[str, float]:
    inputs, losses = torch.as_tensor(prediction.inputs), torch.as_tensor(prediction.losses)
    return {"inputs": inputs.sum().item(), "rows": len(inputs), "losses": losses.sum().item(), "count": len(losses)}


class Counted(Trainer):
    """A `compute_loss` that adds to Trainer's own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = 2 * loss
        return (loss, outputs) if return_outputs else loss


class Passes(Trainer):
    """A `compute_loss` that hands the count to the model, as stock's examples do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Divides(Trainer):
    """A `compute_loss` of the user's own, from whole logits and the count."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        total = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="sum")
        loss = total / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def ragged_in_one_row() -> dict[str, Any]:
    """Rows of many lengths, packed; the stock model, which cannot pack, gets them padded."""
    packs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return {"train_dataset": Ragged(8, 63), "eval_dataset": Ragged(5, 63, seed=1), "data_collator": packs}


PACKED: dict[str, Any] = {"include_num_input_tokens_seen": "non_padding"}
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}

# name: (options of Trainer, what else it is given, its class)
HABITS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], type[Trainer]]] = {
    "noise on embeddings": ({"neftune_noise_alpha": 5.0}, dict, Trainer),
    "callback": ({}, lambda: {"callbacks": [LooksIn()]}, Trainer),
    "ragged rows, short last batch": (
        {"max_steps": -1, "num_train_epochs": 2, "include_num_input_tokens_seen": "non_padding"},
        lambda: {"train_dataset": Ragged(5, 63), "data_collator": pad_right},
        Trainer,
    ),
    "more in compute_loss": ({}, dict, Counted),
    "count handed on": ({"gradient_accumulation_steps": 2}, dict, Passes),
    "count handed on, of one device": ({"average_tokens_across_devices": False}, dict, Passes),
    "division by the count": ({}, dict, Divides),
    "division by the count of one device": ({"average_tokens_across_devices": False}, dict, Divides),
    "evaluated before": ({"bf16": False}, dict, Trainer),
    "checkpointing toggled, evaluated by a callback": ({}, lambda: {"callbacks": [Toggles()]}, Trainer),
    "other columns kept": ({"remove_unused_columns": False}, lambda: {"train_dataset": Wider(8, 63)}, Trainer),
    "grouped by length": (
        {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "non_padding"},
        lambda: {"train_dataset": Ragged(8, 63), "data_collator": pad_right},
        Trainer,
    ),
    "metrics of batches": (
        EVALUATED | {"batch_eval_metrics": True},
        lambda: {"compute_metrics": SumsOfBatches()},
        Trainer,
    ),
    "metrics of inputs and losses": (
        EVALUATED | {"include_for_metrics": ["inputs", "loss"], "eval_on_start": True},
        lambda: {"compute_metrics": of_inputs_and_losses},
        Trainer,
    ),
    "packed": (PACKED, ragged_in_one_row, Trainer),
    "packed, smoothed, accumulated": (
        PACKED | EVALUATED | {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2},
        ragged_in_one_row,
        Trainer,
    ),
}
CLOCK = ("runtime", "per_second", "flos")


def with_habits(layout: Layout | None, names: list[str]) -> dict[str, list[dict[str, float]]]:
    logs = {}
    for name in names:
        options, make_extra, trainer_class = HABITS[name]
        extra = make_extra()
        if layout is None and name.startswith("packed"):
            extra["data_collator"] = pad_right
        run = Run(layout, steps=2, options=tuple(options.items()))
        with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(run, folder, **extra)
            trainer.__class__ = trainer_class
            if name == "evaluated before":
                trainer.evaluate()
            trainer.train()
            logs[name] = trainer.state.log_history
            rates = [entry for entry in logs[name] if "train_tokens_per_second" in entry]
            assert rates
            for entry in rates:
                tokens = entry["train_tokens_per_second"] * entry["train_runtime"]
                assert tokens == pytest.approx(entry["num_input_tokens_seen"], rel=0.02)
    return logs


def with_habits_on_rank(rank: int, size: int, layout: Layout, names: list[str]) -> Any:
    return with_habits(layout, names)


def test_habits_equal_one_process(world: Worlds) -> None:
    expected = with_habits(None, list(HABITS))
    fsdp = [name for name in HABITS if name.startswith(("noise", "callback", "packed", "checkpointing"))]
    for layout, names in ((DDP_CP2, list(HABITS)), (FSDP_CP2, fsdp)):
        for logs in world(2).run(with_habits_on_rank, layout, names, timeout=120):
            for name in names:
                for found, right in zip(logs[name], expected[name], strict=True):
                    assert set(found) == set(right)
                    for key in (key for key in right if not any(word in key for word in CLOCK)):
                        assert found[key] == pytest.approx(right[key], rel=1e-5), (layout, name, key)


class Shuffled(IterableDataset[dict[str, Tensor]]):
    """A stream that each process shuffles by itself."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Rows(8, 63)
        for index in torch.randperm(8, generator=torch.Generator().manual_seed(self.seed)).tolist():
            yield rows[index]


def other_orders(rank: int, size: int) -> list[str]:
    """A stream in another order, and Trainer's own shuffling by another seed."""
    texts = []
    for options, extra in (((), {"train_dataset": Shuffled(rank)}), ((("seed", rank), ("data_seed", rank)), {})):
        run = Run(DDP_CP2, steps=2, options=options)
        with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(run, folder, **extra)
            with pytest.raises(ValueError, match="differs between context-parallel ranks") as raised:
                trainer.train()
        texts.append(str(raised.value))
    return texts


def test_other_orders_on_other_ranks(world: Worlds) -> None:
    first, second = world(2).run(other_orders)
    assert first == second
    assert all("use the same seed on all ranks" in text and "\n" not in text for text in first)


# Checkpoints.


def save_on_rank(rank: int, size: int, run: Run, folder: Path) -> dict[str, Any]:
    with launched(environment_of(run)):
        trainer = make_trainer(run, folder)
        trainer.train()
        trainer.save_model(str(folder / "trainer"))
        model: Any = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if rank == 0:
            model.save_pretrained(folder / "pretrained", state_dict=state)
        wrapped: Any = trainer.model_wrapped
        with torch.no_grad():
            logits = wrapped.eval()(input_ids=Rows(2, 63, seed=2)[0]["input_ids"][None]).logits
        return {"logits": logits, "weights": whole_weights(wrapped)}


@pytest.mark.parametrize("layout", [FSDP_CP2, DDP_CP2], ids=str)
def test_saved_model_is_a_stock_model(world: Worlds, layout: Layout, tmp_path: Path) -> None:
    results = world(2).run(save_on_rank, Run(layout, steps=3), tmp_path)
    for name in ("trainer", "pretrained"):
        model = Qwen3_5ForCausalLM.from_pretrained(tmp_path / name).eval()
        assert model.config.architectures == ["Qwen3_5ForCausalLM"]
        assert "_hf_cp" not in vars(model)
        ids = Rows(2, 63, seed=2)[0]["input_ids"][None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        for result in results:
            torch.testing.assert_close(result["logits"], logits, rtol=1e-5, atol=1e-5)
            assert all(torch.equal(result["weights"][key], w) for key, w in whole_weights(model).items())


def interrupted_on_rank(rank: int, size: int, run: Run, folder: Path, kind: str) -> Curve:
    """Four steps in two processes' worth of state: two, a checkpoint, and two more from it."""
    environment = {**environment_of(run), "FSDP_STATE_DICT_TYPE": kind}
    for begin, end in ((0, 2), (2, 4)):
        options = (("max_steps", end), ("save_strategy", "steps"), ("save_steps", 2))
        with launched(environment):
            curve = resume(make_trainer(replace(run, options=options), folder), folder, begin, end)
    return curve


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (FSDP_CP2, "FULL_STATE_DICT"),
        (FSDP_CP2, "SHARDED_STATE_DICT"),
        (DDP_CP2, "FULL_STATE_DICT"),
        (FSDP_2X2, "SHARDED_STATE_DICT"),
    ],
    ids=str,
)
def test_resumed_run_continues_the_curve(world: Worlds, layout: Layout, kind: str, tmp_path: Path) -> None:
    run = Run(layout, steps=4, accumulation=2)
    expected = train_on_one_process(run.on_one_process())
    found = world(layout.world_size).run(interrupted_on_rank, run, tmp_path, kind, timeout=120)
    assert_same_curve(found, expected)


# Numbers of fewer bits.


def low_precision_on_rank(rank: int, size: int, kind: str) -> Curve:
    run = Run(FSDP_CP2, steps=FEW, options=(("bf16", kind == "mixed_precision"),))
    model = small_model()
    if kind == "loaded":
        model = model.to(torch.bfloat16)
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder, model=patched(model, run.layout))
        trainer.train()
        return curve_of(trainer)


@pytest.mark.parametrize("kind", ["loaded", "mixed_precision"])
def test_bfloat16_follows_the_curve(world: Worlds, kind: str) -> None:
    expected = train_on_one_process(Run(FSDP_CP2, steps=FEW).on_one_process())
    for curve in world(2).run(low_precision_on_rank, kind, timeout=120):
        assert relative(curve.losses, expected.losses) < 0.02
        assert curve.losses[-1] < 0.9 * curve.losses[0]
        dtype = torch.bfloat16 if kind == "loaded" else torch.float32
        assert {w.dtype for w in curve.weights.values()} == {dtype}


def mixed_dtypes_on_rank(rank: int, size: int) -> str:
    run = Run(FSDP_CP2, steps=1)
    model = small_model().to(torch.bfloat16)
    model.model.layers[0].linear_attn.A_log.data = model.model.layers[0].linear_attn.A_log.data.float()
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder, model=patched(model, run.layout))
        with pytest.raises(ValueError, match="dtype") as raised:
            trainer.train()
    return str(raised.value)


def test_mixed_dtypes_are_refused_before_training(world: Worlds) -> None:
    messages = world(2).run(mixed_dtypes_on_rank)
    assert len(set(messages)) == 1
    assert "\n" not in messages[0]
    assert "A_log" in messages[0]


# Models that are none of ours.


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def unpatched_on_rank(rank: int, size: int) -> None:
    environment = {**FSDP2, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
    with launched(environment), tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, use_cpu=True, report_to=[], parallelism_config=FSDP_CP2.config(), disable_tqdm=True
        )
        trainer = Trainer(model=llama(), args=options, train_dataset=Rows(4, 64))
        accelerator = trainer.accelerator
        stock = llama()
        model, _ = accelerator.prepare(stock, torch.optim.AdamW(stock.parameters()))
        context = accelerator._cp_context
        assert isinstance(context, functools.partial)
        assert context.func is context_parallel
        # Accelerate's hook on attention modules, which a patched model never gets.
        assert any(module._forward_pre_hooks for name, module in model.named_modules() if name.endswith("self_attn"))
        batch = {"input_ids": torch.full((2, 64), 1 + rank), "labels": torch.full((2, 64), 1 + rank)}
        _, inputs = trainer._prepare_context_parallel_inputs(model, dict(batch))
        assert {"shift_labels", "position_ids"} <= set(inputs)
        assert "cp_options" not in inputs
        gathered: Any = accelerator.gather_for_metrics(batch["labels"])
        assert gathered[:, 0].tolist() == [1, 1, 2, 2]
    with launched(environment):
        accelerator = Accelerator(cpu=True, parallelism_config=FSDP_CP2.config())
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="linear_attention"):
            accelerator.prepare(model, optimizer)


def test_unpatched_models_go_to_accelerate(world: Worlds) -> None:
    # After a patched model has been trained in the same processes.
    run_in(world(2), Run(FSDP_CP2, steps=1))
    world(2).run(unpatched_on_rank)


def patched_alone() -> Curve:
    with launched({}), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Run(steps=FEW), folder, model=hf_cp.patch(small_model(), gdn_backend="eager"))
        trainer.train()
        return curve_of(trainer)


def test_patched_on_one_process_without_any_configuration() -> None:
    assert_same_curve([patched_alone()], train_on_one_process(Run(steps=FEW)))
