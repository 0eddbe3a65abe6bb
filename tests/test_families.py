"""The other model families: the same body, with experts and with fused projections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import (
    TWO_LAYERS,
    assert_small,
    difference,
    documents_alone,
    each_pair,
    gradients,
    step,
    token_ids,
    worst,
)

import hf_cp
from hf_cp.loss import TrainerItemCount
from hf_cp.testing import TINY_FIELDS, World

Worlds = Callable[..., World]
PAIRS = [("p2p", "ulysses"), ("allgather", "allgather"), ("ulysses", "ulysses")]
FIELDS: dict[str, Any] = {
    **TINY_FIELDS,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "router_aux_loss_coef": 0.3,
}


def small_model(name: str, **overrides: Any) -> Any:
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    if name == "Qwen3_5Moe":
        rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config_name = {"Qwen3_5Moe": "Qwen3_5MoeTextConfig", "Qwen3Next": "Qwen3NextConfig"}[name]
    config = getattr(transformers, config_name)(**(FIELDS | {"rope_parameters": rope} | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for key, parameter in model.named_parameters():
            if key.endswith("mlp.gate.weight"):  # a router's start is so small that choices of experts are near ties
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def family_case(rank: int, size: int, name: str, padded: bool) -> dict[str, float]:
    model = small_model(name, **TWO_LAYERS).train()
    ids = token_ids(2, 37)
    inputs: dict[str, Any] = {"input_ids": ids}
    if padded:
        inputs["attention_mask"] = (torch.arange(37) < torch.tensor([[37], [20]])).long()
    labels = ids.masked_fill(inputs.get("attention_mask", torch.ones_like(ids)) == 0, -100)
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "router": {"output_router_logits": True},
        "router, count": {"output_router_logits": True, "num_items_in_batch": 90},
    }
    expected = {call: step(model, **inputs, labels=labels, **extra) for call, extra in calls.items()}
    with torch.no_grad():
        stock = model(**inputs, output_router_logits=True)
    keys = list(model.state_dict())

    def check() -> dict[str, float]:
        assert list(model.state_dict()) == keys
        errors = {}
        for call, extra in calls.items():
            loss, right = expected[call]
            found_loss, found = step(model, **inputs, labels=labels, **extra)
            errors |= {f"{call} loss": abs(found_loss.item() - loss.item()), f"{call}": worst(found, right)}
        # Trainer divides the count by W and multiplies the loss by the world size W.
        extra = calls["router, count"] | {"num_items_in_batch": TrainerItemCount(90)}
        loss, right = expected["router, count"]
        found_loss, found = step(model, **inputs, labels=labels, **extra)
        errors["Trainer's loss"] = abs(found_loss.item() * size - loss.item())
        errors["Trainer's"] = worst({n: g * size for n, g in found.items()}, right)
        # Counting each rank alone, it does not multiply.
        extra |= {"num_items_in_batch": TrainerItemCount(90 / size, across_devices=False)}
        found_loss, found = step(model, **inputs, labels=labels, **extra)
        errors["Trainer's local loss"] = abs(found_loss.item() - loss.item())
        errors["Trainer's local"] = worst(found, right)
        with torch.no_grad():
            output = model(**inputs, output_router_logits=True)
        kept = inputs.get("attention_mask", torch.ones_like(ids)).bool()
        rows = kept.flatten()
        routers = zip(output.router_logits, stock.router_logits, strict=True)
        return errors | {
            "logits": difference(output.logits[kept], stock.logits[kept]),
            "aux_loss": abs(output.aux_loss.item() - stock.aux_loss.item()),
            "router_logits": max(difference(a[rows], b[rows]) for a, b in routers),
        }

    return each_pair(model, check, PAIRS)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_family(world: Worlds, size: int, name: str, padded: bool) -> None:
    assert_small(world(size).run(family_case, name, padded, timeout=120))


def packed_case(rank: int, size: int, name: str) -> dict[str, float]:
    """Packed documents and their router's loss, against the stock router's loss of what each document alone gives."""
    import transformers

    module = {"Qwen3_5Moe": "qwen3_5_moe", "Qwen3Next": "qwen3_next"}[name]
    stock_balance = getattr(getattr(transformers.models, module), f"modeling_{module}").load_balancing_loss_func
    model = small_model(name, **TWO_LAYERS).train()

    def balance(outputs: list[Any]) -> torch.Tensor:
        routers = tuple(torch.cat(layer) for layer in zip(*(o.router_logits for o in outputs), strict=True))
        return FIELDS["router_aux_loss_coef"] * stock_balance(routers, FIELDS["num_experts"], 2)

    alone = documents_alone(model, (3, 1, 20, 23), balance)
    inputs: dict[str, Any] = {"input_ids": alone.ids, "position_ids": alone.positions, "output_router_logits": True}

    def check() -> dict[str, float]:
        loss, found = step(model, **inputs, shift_labels=alone.targets)
        with torch.no_grad():
            logits = model(**inputs).logits
        return {
            "loss": abs(loss.item() - alone.loss.item()),
            "gradients": worst(found, alone.gradients),
            "logits": difference(logits, alone.logits),
        }

    return each_pair(model, check, PAIRS)


@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed(world: Worlds, size: int, name: str) -> None:
    assert_small(world(size).run(packed_case, name, timeout=120))


def dense_layers_case(rank: int, size: int) -> dict[str, float]:
    """Qwen3-Next with a dense layer among the sparse ones: only the routers of sparse layers count."""
    model = small_model("Qwen3Next", mlp_only_layers=[1]).train()
    ids = token_ids(1, 21)
    loss, expected = step(model, input_ids=ids, labels=ids, output_router_logits=True)
    hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    found_loss, _ = step(model, input_ids=ids, labels=ids, output_router_logits=True)
    return {"loss": abs(found_loss.item() - loss.item()), "gradients": worst(gradients(model), expected)}


def test_dense_layers_among_sparse_ones(world: Worlds) -> None:
    assert_small(world(2).run(dense_layers_case))


@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
def test_files_are_stock(name: str, tmp_path: Path) -> None:
    """Loaded in bf16, patched and saved: keys, dtypes and architectures are those of the stock model's folder."""
    import transformers

    small_model(name, **TWO_LAYERS).save_pretrained(tmp_path / "stock")
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    stock, model = (load(tmp_path / "stock", dtype=torch.bfloat16) for _ in range(2))
    hf_cp.patch(model, gdn_backend="eager")
    model.save_pretrained(tmp_path / "patched")
    loaded = load(tmp_path / "patched", dtype="auto")
    assert type(loaded) is type(stock)
    assert loaded.config.architectures == [f"{name}ForCausalLM"]
    for other in (model, loaded):
        assert list(other.state_dict()) == list(stock.state_dict())
        assert all(
            a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip(other.parameters(), stock.parameters(), strict=True)
        )
    assert list((tmp_path / "patched").glob("*.safetensors"))
