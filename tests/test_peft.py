"""Adapters on every projection, their dropout, their files, and quantised linears below them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from test_families import small_model as sparse_model
from test_multimodal import batch_of
from test_multimodal import small_model as multimodal_model
from test_parity import assert_small, difference, documents_alone, token_ids, worst
from torch import Tensor, nn
from training_runs import Curve, Layout, Run, assert_same_curve, curve_of, environment_of, launched, make_trainer

import hf_cp
from hf_cp.testing import World, tiny_qwen3_5

Worlds = Callable[..., World]
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
LENGTH = 37

# name: what the adapters are
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": "all-linear"},
    "LoRA on the head": {"target_modules": ["q_proj", "in_proj_qkv", "lm_head"]},
    "DoRA": {"target_modules": "all-linear", "use_dora": True},
    "rsLoRA and a trained norm": {"target_modules": "all-linear", "use_rslora": True, "modules_to_save": ["norm"]},
}


def base(family: str = "Qwen3_5", **overrides: Any) -> Any:
    overrides = {**TWO_LAYERS, "tie_word_embeddings": False, **overrides}
    return tiny_qwen3_5(**overrides) if family == "Qwen3_5" else sparse_model(family, **overrides)


def adapted(model: Any, order: str, dropout: float = 0.0, **settings: Any) -> Any:
    """Adapters that do something, around a model that is patched ``"before"`` or ``"after"``, or ``"stock"``."""
    if order == "before":
        hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    config = peft.LoraConfig(r=2, lora_alpha=1, init_lora_weights=False, lora_dropout=dropout, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = peft.get_peft_model(model, config)
    if order == "after":
        hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    return model.train()


def step(model: Any, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of what is trained, averaged over the group where the model is patched."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    if any("_hf_cp" in m.__dict__ for m in model.modules()):
        hf_cp.average_gradients(model)
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def projections(model: nn.Module) -> set[str]:
    names = (name for name, m in model.named_modules() if hasattr(m, "lora_A"))
    return {name.rpartition(".")[2] for name in names}


def adapter_cases(rank: int, size: int) -> dict[str, float]:
    ids = token_ids(2, LENGTH)
    errors: dict[str, float] = {}
    for family in ("Qwen3_5", "Qwen3Next"):
        for name, settings in ADAPTERS.items():
            if family != "Qwen3_5" and name != "LoRA":
                continue
            stock = adapted(base(family), "stock", **settings)
            if settings["target_modules"] == "all-linear":
                mixers = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj"}
                linear = ["qkv", "z", "b", "a"] if family == "Qwen3_5" else ["qkvz", "ba"]
                assert projections(stock) >= mixers | {f"in_proj_{part}" for part in linear}
            loss, expected = step(stock, input_ids=ids, labels=ids)
            for order in ("before", "after") if name in ("LoRA", "LoRA on the head") else ("after",):
                found_loss, found = step(adapted(base(family), order, **settings), input_ids=ids, labels=ids)
                assert set(found) == set(expected)
                errors[f"{family} {name} {order} loss"] = abs(found_loss - loss)
                errors[f"{family} {name} {order} gradients"] = worst(found, expected)
    return errors


def test_adapters(world: Worlds) -> None:
    assert_small(world(2).run(adapter_cases, timeout=90))


def packed_case(rank: int, size: int) -> dict[str, float]:
    """Packed documents through adapters, recomputed in backward, against each document alone."""
    settings: dict[str, Any] = {"target_modules": "all-linear"}
    alone = documents_alone(adapted(base(), "stock", **settings), (11, 2, 24))
    batch = {"input_ids": alone.ids, "cu_seq_lens_q": alone.edges.int()}
    errors = {}
    for order in ("before", "after"):
        for reentrant in (None, True, False):
            model = adapted(base(), order, **settings)
            if reentrant is not None:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            loss, found = step(model, **batch, shift_labels=alone.targets)
            expected = {name: gradient for name, gradient in alone.gradients.items() if name in found}
            assert sum("lora_" in name for name in alone.gradients) == len(expected) == len(found)
            errors[f"{order} {reentrant} loss"] = abs(loss - alone.loss.item())
            errors[f"{order} {reentrant} gradients"] = worst(found, expected)
            with torch.no_grad():
                errors[f"{order} {reentrant} logits"] = difference(model.eval()(**batch).logits, alone.logits)
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_with_packed_documents(world: Worlds, size: int) -> None:
    assert_small(world(size).run(packed_case, timeout=90))


def picture_case(rank: int, size: int) -> dict[str, float]:
    """Adapters of the vision tower and of the text model, with an image across an edge."""
    batch = batch_of("an image across an edge")
    settings: dict[str, Any] = {"target_modules": "all-linear"}
    loss, expected = step(adapted(multimodal_model("Qwen3_5", **TWO_LAYERS), "stock", **settings), **batch)
    assert all(any(part in name for name in expected) for part in ("visual", "in_proj_qkv", "q_proj"))
    errors = {}
    for order in ("before", "after"):
        model = adapted(multimodal_model("Qwen3_5", **TWO_LAYERS), order, **settings)
        found_loss, found = step(model, **batch)
        assert set(found) == set(expected)
        errors |= {f"{order} loss": abs(found_loss - loss), f"{order} gradients": worst(found, expected)}
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_with_pictures(world: Worlds, size: int) -> None:
    assert_small(world(size).run(picture_case, timeout=90))


def classifier_case(rank: int, size: int) -> dict[str, float]:
    """PEFT wraps the score of a classifier, which is trained beside the adapters."""

    def build() -> Any:
        model = base()
        config = model.config
        config.num_labels = 3
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return transformers.Qwen3_5TextForSequenceClassification(config)

    settings: dict[str, Any] = {"target_modules": "all-linear", "task_type": "SEQ_CLS"}
    inputs = {"input_ids": token_ids(1, LENGTH), "labels": torch.tensor([2])}
    loss, expected = step(adapted(build(), "stock", **settings), **inputs)
    assert any("score" in name for name in expected)
    errors = {}
    for order in ("before", "after"):
        found_loss, found = step(adapted(build(), order, **settings), **inputs)
        assert set(found) == set(expected)
        errors |= {f"{order} loss": abs(found_loss - loss), f"{order} gradients": worst(found, expected)}
    return errors


def test_adapters_of_a_classifier(world: Worlds) -> None:
    assert_small(world(2).run(classifier_case))


# Dropout.


class Recorder:
    """The masks that each dropout of a model drew, in the order of the calls."""

    def __init__(self, model: nn.Module) -> None:
        self.masks: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            self.masks.setdefault(name, []).append(((output != 0) | (args[0] == 0)).cpu())

        return hook


class Replayed(nn.Module):
    """Dropout by given masks."""

    def __init__(self, mask: Tensor, p: float) -> None:
        super().__init__()
        self.mask, self.p = mask, p

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask / (1 - self.p)


def generator_states(device: str) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def equal(states: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


def dropout_case(rank: int, size: int, device: str = "cpu") -> dict[str, float]:
    """The ranks' masks, put together and given to the stock model, give the same loss and gradients."""
    settings: dict[str, Any] = {"target_modules": ["q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "lm_head"]}
    inputs = {"input_ids": torch.full((2, LENGTH), 7).to(device), "labels": token_ids(2, LENGTH).to(device)}
    model = adapted(base().to(device), "after", dropout=0.4, **settings)
    recorder = Recorder(model)
    torch.manual_seed(11)
    loss, gradients = step(model, **inputs)
    after = generator_states(device)
    masks = recorder.masks
    assert set(masks) == {n for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, ({name: drawn[0] for name, drawn in masks.items()}, after))
    # The common generators go on alike, and the ranks draw differently for equal tokens.
    assert all(equal(states, after) for _, states in everyone)
    for name in masks:
        assert not any(torch.equal(everyone[0][0][name], other[name]) for other, _ in everyone[1:]), name
    stock = adapted(base().to(device), "stock", dropout=0.4, **settings)
    for name in masks:
        whole = torch.cat([drawn[name] for drawn, _ in everyone], dim=1)[:, :LENGTH]
        parent, _, child = name.rpartition(".")
        setattr(stock.get_submodule(parent), child, Replayed(whole.to(device), 0.4))
    expected_loss, expected = step(stock, **inputs)
    errors = {"loss": abs(loss - expected_loss), "gradients": worst(gradients, expected)}

    # Another step draws other masks, the same seed the same, and so do recomputed layers.
    _, other = step(model, **inputs)
    assert worst(other, gradients) > 1e-3
    for checkpointing in (None, True, False):
        if checkpointing is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        recorder.masks.clear()
        torch.manual_seed(11)
        again, found = step(model, **inputs)
        assert again == loss
        assert all(torch.equal(found[key], gradient) for key, gradient in gradients.items()), checkpointing
        drawn = recorder.masks["base_model.model.model.layers.0.linear_attn.in_proj_qkv.lora_dropout.default"]
        assert len(drawn) == (1 if checkpointing is None else 2)
        assert all(torch.equal(mask, masks_of(everyone, rank)) for mask in drawn)

    # Without dropout nothing is drawn.
    plain = adapted(base().to(device), "after", **settings)
    before = generator_states(device)
    step(plain, **inputs)
    assert equal(generator_states(device), before)
    model.eval()
    model(**inputs)
    assert equal(generator_states(device), before)
    return errors


def masks_of(everyone: list[Any], rank: int) -> Tensor:
    return everyone[rank][0]["base_model.model.model.layers.0.linear_attn.in_proj_qkv.lora_dropout.default"]


@pytest.mark.parametrize("size", [2, 4])
def test_dropout(world: Worlds, size: int) -> None:
    assert_small(world(size).run(dropout_case))


@pytest.mark.gpu(1)
def test_dropout_on_one_gpu(world: Worlds) -> None:
    assert_small(world(2).run(dropout_case, "cuda"), 2e-5)


# Trainer and files.

LORA: dict[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def train_adapters(run: Run, folder: Path | None, settings: dict[str, Any]) -> Curve:
    order = "stock" if run.layout is None else "before"
    model = base(tie_word_embeddings=True)
    if run.layout is not None:
        hf_cp.patch(model, gdn_backend="eager")
    config = peft.LoraConfig(r=4, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = peft.get_peft_model(model, config)
    assert order == "stock" or hf_cp.patch(model, gdn_backend="eager") is model
    if run.checkpointing is not None:
        model.enable_input_require_grads()
    run = replace(run, options=(*run.options, ("learning_rate", 2e-2)), clip=0.05)
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(run, scratch, model=model)
        trainer.train()
        if folder is not None:
            trainer.save_model(str(folder))
        return curve_of(trainer)


def train_adapters_on_rank(rank: int, size: int, *arguments: Any) -> Curve:
    return train_adapters(*arguments)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [(Layout("fsdp2", cp=2), LORA), (Layout("ddp", cp=2), LORA | {"use_dora": True})],
    ids=["FSDP2, LoRA", "DDP, DoRA"],
)
def test_trainer(world: Worlds, layout: Layout, settings: dict[str, Any], tmp_path: Path) -> None:
    run = Run(layout, steps=4, checkpointing="not_reentrant")
    expected = train_adapters(run.on_one_process(), None, settings)
    curves = world(2).run(train_adapters_on_rank, run, tmp_path, settings, timeout=90)
    assert_same_curve(curves, expected)
    assert {path.name for path in tmp_path.glob("adapter_*")} == {"adapter_config.json", "adapter_model.safetensors"}
    loaded = peft.PeftModel.from_pretrained(base(tie_word_embeddings=True), str(tmp_path))
    adapters = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert len(adapters) == sum("lora_" in name for name in expected.weights) > 0
    assert all(torch.equal(p, curves[0].weights[name]) for name, p in adapters.items())


# Quantised linears, as transformers loads them; nothing may read their weights.


def quantised(folder: Path, kind: str, order: str, device: str) -> Any:
    options: dict[str, Any] = (
        {"load_in_8bit": True} if kind == "8 bit" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    )
    config = transformers.BitsAndBytesConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device)
    names = {type(m).__name__ for n, m in model.named_modules() if n.endswith(("_proj", "_qkv", "in_proj_z"))}
    assert names == {"Linear8bitLt" if kind == "8 bit" else "Linear4bit"}
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return adapted(model, order, target_modules="all-linear")


def quantised_cases(
    rank: int, size: int, folder: Path, kinds: tuple[str, ...] = ("8 bit", "4 bit"), device: str = "cpu"
) -> dict[str, float]:
    ids = token_ids(1, LENGTH).to(device)
    errors = {}
    for kind in kinds:
        loss, expected = step(quantised(folder, kind, "stock", device), input_ids=ids, labels=ids)
        for order in ("before", "after"):
            found_loss, found = step(quantised(folder, kind, order, device), input_ids=ids, labels=ids)
            assert set(found) == set(expected)
            errors[f"{kind} {order} loss"] = abs(found_loss - loss)
            errors[f"{kind} {order} gradients"] = worst(found, expected)
    return errors


def test_quantised_linears(world: Worlds, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base().save_pretrained(tmp_path)
    assert_small(world(2).run(quantised_cases, tmp_path, timeout=120))


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("kind", "bound"), [("4 bit", 2e-5), ("8 bit", 2e-2)])  # 8 bits round activations too
def test_quantised_linears_on_one_gpu(world: Worlds, tmp_path: Path, kind: str, bound: float) -> None:
    pytest.importorskip("bitsandbytes")
    base().save_pretrained(tmp_path)
    assert_small(world(2).run(quantised_cases, tmp_path, (kind,), "cuda:0", timeout=120), bound)
