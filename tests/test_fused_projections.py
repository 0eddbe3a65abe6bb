"""Mixers with fused projections: their composition on gloo ranks, with the torch operators, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_families import small_model
from test_parity import TWO_LAYERS, assert_small, difference, step, token_ids, worst
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_cp
from hf_cp.kernels.a2a_gemm import TorchBackend
from hf_cp.modes import projections
from hf_cp.testing import World, tiny_qwen3_5

Worlds = Callable[..., World]


def fuse_in_torch(model: Any) -> None:
    """Patch with Ulysses modes, and let the group's fused mixers run the torch operators."""
    group = dist.group.WORLD
    hf_cp.patch(model, linear_mode="ulysses", attention_mode="ulysses", gdn_backend="eager", cp_group=group)
    state = model._hf_cp
    state.config = dataclasses.replace(state.config, projection_backend="fused")
    projections.provide(state.mesh, TorchBackend(group))


class Operators(TorchDispatchMode):
    """Names of the exchanging operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hf_cp" and "a2a" in func._opname:
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def compare(model: Any, inputs: dict[str, Tensor]) -> dict[str, float]:
    """Errors of loss, gradients and logits against the stock model in this process."""
    model.train()
    loss, expected = step(model, **inputs)
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"]).logits
    fuse_in_torch(model)
    with Operators() as operators, torch.no_grad():
        found_logits = model(input_ids=inputs["input_ids"]).logits
    # Linear attention, full attention: what they read, and what they write.
    reads = 2 if hasattr(model.model.layers[0].linear_attn, "in_proj_qkv") else 1
    assert operators.names == ["gemm_a2a"] * reads + ["a2a_gemm", "gemm_a2a", "a2a_gemm"]
    found_loss, found = step(model, **inputs)
    hf_cp.unpatch(model)
    loss_error = abs(found_loss - loss).item() / loss.item()
    return {
        "loss": loss_error,
        "gradients": worst(found, expected),
        "logits": difference(found_logits, logits),
    }


def check_models(rank: int, size: int) -> dict[str, float]:
    errors = {}
    ids = token_ids(2, 45)
    models = {"Qwen3.5": tiny_qwen3_5(**TWO_LAYERS), "Qwen3-Next": small_model("Qwen3Next", **TWO_LAYERS)}
    for name, model in models.items():
        for key, error in compare(model, {"input_ids": ids, "labels": ids}).items():
            errors[f"{name}: {key}"] = error
    # Documents in a row, padding at the end, and layers that run again in backward.
    ids = token_ids(1, 37)
    positions = torch.cat([torch.arange(11), torch.arange(26)])[None]
    model = tiny_qwen3_5(**TWO_LAYERS)
    model.gradient_checkpointing_enable()
    packed = {"input_ids": ids, "labels": ids, "position_ids": positions}
    model.train()
    # The stock layers' own fallback takes no boundaries, so the reference is the patched model without the fusion.
    hf_cp.patch(model, linear_mode="ulysses", attention_mode="ulysses", gdn_backend="eager", cp_group=dist.group.WORLD)
    loss, expected = step(model, **packed)
    fuse_in_torch(model)
    found_loss, found = step(model, **packed)
    errors |= {"packed: loss": abs(found_loss - loss).item(), "packed: gradients": worst(found, expected)}
    return errors


def test_fused_mixers_match_one_process(world: Worlds) -> None:
    """With two key-value heads on four ranks, so that each is copied."""
    assert_small(world(4).run(check_models, timeout=240))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="fused") as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fused_projections_need_an_exchange_to_fuse() -> None:
    text = refusal(
        lambda: hf_cp.patch(tiny_qwen3_5(), projection_backend="fused", attention_mode="allgather", gdn_backend="eager")
    )
    assert "linear_mode='p2p'" in text
    assert "choose 'ulysses'" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may serve")
def test_fused_projections_need_a_gpu() -> None:
    model = tiny_qwen3_5(num_hidden_layers=1)
    text = refusal(lambda: hf_cp.patch(model, projection_backend="fused", gdn_backend="eager"))
    assert 'use "torch"' in text
    assert not hasattr(model, "_hf_cp")


def adapt(layer: nn.Module, name: str) -> None:
    """Give a layer's projection a LoRA adapter, as PEFT does."""
    import peft

    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[name]), layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: adapt(layer, "k_proj"), r"k_proj is a peft\.tuners\.lora\.\S*Linear, not a plain"),
        (lambda layer: setattr(layer, "o_proj", nn.Linear(4, 4)), "o_proj has a bias"),
    ],
)
def test_other_projections_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], message: str
) -> None:
    monkeypatch.setattr(projections, "check_served", lambda: None)  # as if there were a GPU
    model = tiny_qwen3_5()
    change(model.model.layers[3].self_attn)
    with pytest.raises(ValueError, match=message) as caught:
        hf_cp.patch(model, projection_backend="fused", gdn_backend="eager")
    assert 'use projection_backend="torch"' in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "ranks", "message"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 4, "needs 3 key-value heads"),
        ({"head_dim": 12}, 2, "needs head_dim 12 divisible by 8"),
        ({}, 16, "up to 8 ranks"),
    ],
)
def test_sizes_that_the_kernels_do_not_serve(fields: dict[str, int], ranks: int, message: str) -> None:
    from hf_cp.config import PatchConfig
    from hf_cp.state import _check_fused

    config = PatchConfig(projection_backend="fused")
    text = refusal(lambda: _check_fused(tiny_qwen3_5(**fields).config, config, ranks))
    assert message in text
    assert "use 'torch'" in text
