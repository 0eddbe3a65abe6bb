"""Classification heads over a sharded sequence, and Trainer around them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from test_multimodal import IMAGE, media, placed
from test_multimodal import small_model as multimodal_model
from test_parity import TWO_LAYERS, assert_small, difference, each_pair, gradients, step, token_ids, worst
from torch import Tensor
from torch.utils.data import Dataset
from training_runs import Curve, Layout, Run, assert_same_curve, curve_of, environment_of, launched, make_trainer

import hf_cp
from hf_cp.testing import World, tiny_qwen3_5

Worlds = Callable[..., World]
PAIRS = [("p2p", "ulysses"), ("ulysses", "allgather")]
LABELS, PAD = 3, 0


def small_model(name: str, **overrides: Any) -> Any:
    """A classifier of the family that the class name begins with."""
    if name.startswith("Qwen3Next"):
        from test_families import FIELDS

        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        fields = {**FIELDS, "rope_parameters": rope, "num_experts": 4}
        config: Any = transformers.Qwen3NextConfig(**fields)
    elif name == "Qwen3_5ForSequenceClassification":
        layers = {key: overrides.pop(key) for key in TWO_LAYERS if key in overrides}
        config = multimodal_model("Qwen3_5", "Model", **layers).config
        config.text_config.pad_token_id = PAD
    else:
        config = tiny_qwen3_5().config
    changes = {"num_labels": LABELS, "pad_token_id": PAD, "classifier_dropout": 0.0, **overrides}
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, name)(config)


def padded(side: str) -> dict[str, Tensor]:
    """Three rows of 41, 20 and 2 tokens: the last token of each lies on another of four ranks."""
    ids = token_ids(3, 41)
    mask = torch.stack([(torch.arange(41) < n).long() for n in (41, 20, 2)])
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def labels_of(name: str, kind: str, ids: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if "Token" in name:
        labels = torch.randint(0, LABELS, ids.shape, generator=generator)
        return labels.masked_fill((ids == PAD) | (torch.rand(ids.shape, generator=generator) < 0.4), -100)
    if kind == "regression":
        return torch.randn(len(ids), generator=generator)
    if kind == "several":
        return torch.rand(len(ids), LABELS, generator=generator).round()
    return torch.randint(0, LABELS, (len(ids),), generator=generator)


# name: (class, what the labels are, what is set in the config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tokens": ("Qwen3_5ForTokenClassification", "", {}),
    "tokens, Next": ("Qwen3NextForTokenClassification", "", {}),
    "sequence": ("Qwen3_5TextForSequenceClassification", "one", {}),
    "sequence, several labels": ("Qwen3_5TextForSequenceClassification", "several", {}),
    "sequence, regression": ("Qwen3_5TextForSequenceClassification", "regression", {"num_labels": 1}),
    "sequence, Next": ("Qwen3NextForSequenceClassification", "one", {}),
    "sequence with pictures": ("Qwen3_5ForSequenceClassification", "one", {}),
}


def classify_case(rank: int, size: int, key: str) -> dict[str, float]:
    name, kind, overrides = MODELS[key]
    model = small_model(name, **TWO_LAYERS, **overrides).train()
    keys, errors = list(model.state_dict()), {}
    for side in ("right", "left"):
        batch: dict[str, Any] = padded(side)
        if key == "sequence with pictures":
            ids = placed(41, (18, 6, IMAGE), rows=3)
            batch = {"input_ids": ids, **media(ids, [(1, 4, 6)], [])}
        labels = labels_of(name, kind, batch["input_ids"])
        loss, expected = step(model, **batch, labels=labels)
        with torch.no_grad():
            stock = model(**batch, output_hidden_states=True)
            as_tuple = model(**batch, labels=labels, return_dict=False, use_cache=False)

        def check(batch: Any = batch, labels: Tensor = labels, right: Any = (loss, expected, stock, as_tuple)) -> Any:
            loss, expected, stock, as_tuple = right
            found_loss, found = step(model, **batch, labels=labels)
            with torch.no_grad():
                output = model(**batch, output_hidden_states=True)
                found_tuple = model(**batch, labels=labels, return_dict=False)
            assert type(output) is type(stock)
            assert len(found_tuple) == len(as_tuple)
            kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            logits = (output.logits, stock.logits)
            if "Token" in name:
                logits = (logits[0][kept], logits[1][kept])
            return {
                "loss": abs(found_loss.item() - loss.item()),
                "loss of the tuple": abs(found_tuple[0].item() - loss.item()),
                "gradients": worst(found, expected),
                "logits": difference(*logits),
                "hidden states": difference(output.hidden_states[-1][kept], stock.hidden_states[-1][kept]),
            }

        assert list(model.state_dict()) == keys
        errors |= {f"{side} {k}": v for k, v in each_pair(model, check, PAIRS).items()}
    return errors


def classify_cases(rank: int, size: int, names: list[str]) -> dict[str, float]:
    return {f"{name}: {k}": v for name in names for k, v in classify_case(rank, size, name).items()}


@pytest.mark.parametrize(
    ("size", "names"), [(1, ["tokens", "sequence"]), (2, list(MODELS)), (4, ["tokens", "sequence, Next"])]
)
def test_classifiers(world: Worlds, size: int, names: list[str]) -> None:
    assert_small(world(size).run(classify_cases, names, timeout=120))


def backbones(rank: int, size: int) -> dict[str, float]:
    """``AutoModel``: the bare decoder, with a loss of the user's own."""
    errors = {}
    for build in (lambda: tiny_qwen3_5().model, lambda: small_model("Qwen3NextForTokenClassification").model):
        model = build().train()
        batch = padded("right")
        weights = torch.randn(3, 41, 64, generator=torch.Generator().manual_seed(2))
        weights = weights * batch["attention_mask"][..., None]

        def run(model: Any = model, batch: Any = batch, weights: Tensor = weights) -> tuple[Tensor, dict[str, Tensor]]:
            model.zero_grad(set_to_none=True)
            loss = (model(**batch).last_hidden_state * weights).sum()
            loss.backward()
            if "_hf_cp" in model.__dict__:
                hf_cp.average_gradients(model)
            return loss.detach(), gradients(model)

        loss, expected = run()

        def check(run: Any = run, loss: Tensor = loss, expected: Any = expected) -> dict[str, float]:
            found_loss, found = run()
            return {"loss": abs(found_loss / loss - 1).item(), "gradients": worst(found, expected)}

        errors |= {f"{type(model).__name__} {k}": v for k, v in each_pair(model, check, PAIRS).items()}
    return errors


def test_backbones(world: Worlds) -> None:
    assert_small(world(2).run(backbones, timeout=60))


def refusals(rank: int, size: int) -> list[str]:
    model = small_model("Qwen3_5TextForSequenceClassification", pad_token_id=None)
    hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    tokens = small_model("Qwen3_5ForTokenClassification")
    hf_cp.patch(tokens, gdn_backend="eager", cp_group=dist.group.WORLD)
    ids = token_ids(2, 17)
    labels = torch.tensor([0, 1])
    calls: list[Callable[[], Any]] = [
        lambda: model(input_ids=ids, labels=labels),
        lambda: model(input_ids=ids[:1], labels=labels[:1] + rank),
        lambda: model(input_ids=ids[:1], labels=labels[:1], use_cache=True),
        lambda: tokens(input_ids=ids, labels=labels),
        lambda: tokens(input_ids=ids, labels=ids % LABELS if rank else None),
    ]
    texts = []
    for call in calls:
        with pytest.raises(ValueError, match=" ") as raised:
            call()
        texts.append(str(raised.value))
    assert model(input_ids=ids[:1], labels=labels[:1]).loss.isfinite()
    return texts


def test_refusals(world: Worlds) -> None:
    first, second = world(2).run(refusals)
    assert first == second
    for text, part in zip(
        first, ("pad_token_id", "labels differs", "use_cache", "labels of shape", "labels"), strict=True
    ):
        assert part in text
        assert "\n" not in text


# Trainer.


class Classified(Dataset[dict[str, Any]]):
    def __init__(self, count: int, by_token: bool) -> None:
        self.count, self.by_token = count, by_token

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = token_ids(1, 33, seed=index)[0]
        label: Any = ids % LABELS if self.by_token else ids.sum() % LABELS
        return {"input_ids": ids, "labels": label.masked_fill(ids % 5 == 0, -100) if self.by_token else label}


def train_classifier(run: Run, name: str, smoothing: float) -> tuple[Curve, Tensor]:
    model = small_model(name, **TWO_LAYERS)
    if run.layout is not None and not run.layout.stock:
        hf_cp.patch(model, gdn_backend="eager")
    by_token = "Token" in name
    options: dict[str, Any] = {"train_dataset": Classified(32, by_token), "eval_dataset": Classified(3, by_token)}
    run = Run(
        run.layout, rows=run.rows, steps=run.steps, eval_every=2, options=(("label_smoothing_factor", smoothing),)
    )
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, folder, model=model, **options)
        trainer.train()
        predicted: Any = trainer.predict(options["eval_dataset"])
        return curve_of(trainer), torch.as_tensor(predicted.predictions)


def train_on_rank(rank: int, size: int, *arguments: Any) -> tuple[Curve, Tensor]:
    return train_classifier(*arguments)


@pytest.mark.parametrize("name", ["Qwen3_5ForTokenClassification", "Qwen3_5TextForSequenceClassification"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_trainer_equals_one_process(world: Worlds, name: str, smoothing: float) -> None:
    run = Run(Layout("fsdp2" if smoothing else "ddp", cp=2), rows=4, steps=4)
    expected, expected_logits = train_classifier(Run(rows=4, steps=4), name, smoothing)
    results = world(2).run(train_on_rank, run, name, smoothing, timeout=90)
    for _, logits in results:
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert_same_curve([curve for curve, _ in results], expected)


def test_trainer_equals_stock_data_parallelism(world: Worlds) -> None:
    """Trainer multiplies these means by the data-parallel ranks, and so here."""
    name = "Qwen3_5TextForSequenceClassification"
    stock = Run(Layout("ddp", dp_replicate=2, stock=True), rows=2, steps=4)
    expected = world(2).run(train_on_rank, stock, name, 0.0, timeout=90)[0][0]
    run = Run(Layout("ddp", dp_replicate=2, cp=2), rows=2, steps=4)
    assert_same_curve([curve for curve, _ in world(4).run(train_on_rank, run, name, 0.0, timeout=90)], expected)
