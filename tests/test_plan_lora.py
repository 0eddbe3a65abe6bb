"""`hf-cp plan` with LoRA and for several nodes: against parameters and bytes counted in real PEFT models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

import hf_cp
from hf_cp.cli import main
from hf_cp.kernels.gdn import backend
from hf_cp.planning.command import best, candidates
from hf_cp.planning.constants import CONSTANTS
from hf_cp.planning.cost import Cluster, host_seconds, step_cost
from hf_cp.planning.memory import Training, estimate, layer_bytes
from hf_cp.planning.shape import FULL, LINEAR, PUBLISHED, ModelShape, shape_from_config
from hf_cp.state import patch_state
from hf_cp.testing import tiny_qwen3_5

CONFIGS = [
    (Qwen3_5ForCausalLM, Qwen3_5TextConfig(num_hidden_layers=4)),
    (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(num_hidden_layers=4)),
]
RANK = 8
# Divides none of the widths below, so that a tensor with such a dimension is one over tokens.
TOKENS = 1009
WIDTHS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 192,
    "shared_expert_intermediate_size": 384,
}


def adapted(model: Any, **settings: Any) -> Any:
    """Adapters as recipes/sft.py makes them."""
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, **settings)


@pytest.mark.parametrize(("model_class", "config"), CONFIGS, ids=lambda value: getattr(value, "__name__", ""))
def test_adapters_are_those_of_the_model(model_class: Any, config: Any) -> None:
    with torch.device("meta"):
        model = adapted(model_class(config))
    shape = shape_from_config(config.to_dict())
    assert shape.adapters(RANK) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    linears = [m.base_layer for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    found = sorted((m.in_features, m.out_features) for m in linears if isinstance(m, nn.Linear))
    assert found == sorted(pair for kind in shape.layer_types for pair in shape.linears(kind))


def saved_a_token(kind: str, experts: bool, lora: bool, sharded: bool) -> tuple[ModelShape, float]:
    """Bytes a token that the second of two layers of a patched model saves for backward, parameters excepted.

    Nothing is computed: in fake mode, the operators' own descriptions say what the kernels return.

    Args:
        sharded: as FSDP2 has it, parameters in bf16 while they are computed with; else autocast makes bf16.
    """
    widths = {**WIDTHS, "num_hidden_layers": 2, "layer_types": [kind] * 2, "vocab_size": 128, "pad_token_id": None}
    config: Any = Qwen3_5MoeTextConfig(**widths, **EXPERTS) if experts else Qwen3_5TextConfig(**widths)
    model: Any = (Qwen3_5MoeForCausalLM if experts else Qwen3_5ForCausalLM)(config)
    model = model.to(torch.bfloat16 if lora or sharded else torch.float32).train()
    if experts:
        model.set_experts_implementation("grouped_mm")
    hf_cp.patch(model, gdn_backend="triton")
    state = patch_state(model)
    assert state is not None
    state.announced = state.mesh
    decoder = model.model
    if lora:
        model = adapted(model, autocast_adapter_dtype=not sharded)
    saved: dict[int, Tensor] = {}
    counts: list[int] = []

    def pack(x: Tensor) -> Tensor:
        if any(size and size % TOKENS == 0 for size in x.shape):
            saved.setdefault(x.untyped_storage()._cdata, x)
        return x

    def count(*_: Any) -> None:
        counts.append(sum(x.untyped_storage().nbytes() for x in saved.values()))

    decoder.layers[1].register_forward_pre_hook(count)
    decoder.layers[1].register_forward_hook(count)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=not sharded),
    ):
        decoder(input_ids=torch.zeros(1, TOKENS, dtype=torch.long))
    return shape_from_config(config.to_dict()), (counts[1] - counts[0]) / TOKENS


@pytest.mark.parametrize(
    ("experts", "lora", "sharded"),
    [
        (False, False, False),
        (False, False, True),
        (False, True, False),
        (False, True, True),
        (True, False, True),  # experts compute in fp32 where autocast alone makes bf16
        (True, True, False),
        (True, True, True),
    ],
)
@pytest.mark.parametrize("kind", [LINEAR, FULL])
def test_saved_bytes_are_those_of_the_model(
    kind: str, experts: bool, lora: bool, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_absent_reason", lambda name: None)  # no kernel is started
    shape, found = saved_a_token(kind, experts, lora, sharded)
    training = Training(TOKENS, shards=2 if sharded else 1, lora=RANK if lora else 0)
    expected = layer_bytes(shape, training, kind)
    if kind == FULL:
        # On the CPU, attention has the heads before the tokens, and its output is copied to have them behind.
        expected += 2 * shape.query_width
    assert found == expected


def test_a_step_holds_what_is_counted() -> None:
    """A real step of a small model: its weights, gradients and AdamW's states, and no gradient of the head."""
    model = tiny_qwen3_5(tie_word_embeddings=False).to(torch.bfloat16).train()
    shape = shape_from_config(model.config.to_dict())
    hf_cp.patch(model, gdn_backend="eager")
    model = adapted(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    head = model.get_base_model().lm_head.weight
    saved: list[Tensor] = []
    ids = torch.arange(64)[None] % 90 + 1
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    memory = estimate(shape, Training(64, lora=RANK))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert memory.weights == held + 2 * shape.adapters(RANK)  # autocast's copies
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    assert memory.optimizer == sum(x.nbytes for x in states)
    assert not [x for x in saved if x.shape == head.shape and x.data_ptr() != head.data_ptr()]
    whole = estimate(shape, Training(64))
    assert whole.loss - memory.loss == 4 * shape.head_parameters + 64 * 4 * shape.hidden  # the last norm's too


def test_adapters_take_less_memory_and_time() -> None:
    for name, shape in PUBLISHED.items():
        training = Training(131072, cp_size=8, shards=8, checkpointing=True)
        cluster = Cluster(8)
        assert estimate(shape, replace(training, lora=16)).peak < estimate(shape, training).peak, name
        whole, adapters = step_cost(shape, training, cluster), step_cost(shape, replace(training, lora=16), cluster)
        # In the smallest, moving the adapters' inputs and outputs takes what the gradients of the weights took.
        assert 0.5 * whole.seconds < adapters.seconds < (1.05 if name == "0.8B" else 1) * whole.seconds, name
        # No gradients of what is frozen: two of three passes of the layers, one of two outside.
        assert adapters.wire_bytes["FSDP"] < 0.7 * whole.wire_bytes["FSDP"], name


def test_a_sequence_stays_inside_a_node_if_it_fits() -> None:
    cluster = Cluster(16)
    for name in ("4B", "9B", "27B"):
        found = candidates(PUBLISHED[name], Training(262144), cluster, 141e9, "auto")
        choice = best(found, cluster.gpus_per_node)
        assert choice is not None
        assert choice.training.cp_size <= 8
        assert choice.training.shards in (8, 16)
        assert {one.training.shards for one in found if one.training.cp_size == 8} == {8, 16}
    far = best(candidates(PUBLISHED["27B"], Training(1_000_000), cluster, 141e9, "auto"), 8)
    assert far is not None
    assert far.training.cp_size == far.training.shards == 16


@pytest.mark.parametrize("options", [["--nodes", "2", "--gpus", "8"], ["--gpus", "16"]])
def test_two_nodes(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "launch.yaml"
    command = ["plan", "--model", "4B", "--seq-len", "256k", "--lora", "16", *options, "--write", str(path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Every sequence stays inside a node, 2 at a time; parameters are spread " in printed
    assert "A sequence over several nodes, cp_size 16, would train 1." in printed
    launch = yaml.safe_load(path.read_text())
    sizes = [launch["parallelism_config"][f"parallelism_config_{name}_size"] for name in ("dp_replicate", "dp_shard")]
    assert sizes in ([1, 2], [2, 1])
    assert launch["parallelism_config"]["parallelism_config_cp_size"] == 8
    assert (launch["num_machines"], launch["num_processes"]) == (2, 16)
    assert "--dtype bfloat16 --bf16 --lora_rank 16" in path.read_text()


def test_no_faster_mesh_is_named_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Over nodes, 35B-A3B would train 0.99 times as many tokens; 27B lies over two nodes as it is."""
    for name, where in (("35B-A3B", "Every sequence stays inside a node"), ("27B", "A sequence lies over 2 nodes")):
        assert main(["plan", "--model", name, "--seq-len", "1M", "--gpus", "16"]) == 0
        printed = capsys.readouterr().out
        assert where in printed
        assert "would train" not in printed


def test_adapters_of_qwen3_next_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Qwen3NextConfig().save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--lora", "8"]) == 2
    assert "--lora 8 with a Qwen3-Next" in capsys.readouterr().err


def test_only_what_is_trained_is_counted() -> None:
    """Against all weights: products of frozen weights' gradients go, and what FSDP reduces and copies of them."""
    shape, training, cluster = PUBLISHED["4B"], Training(8192, shards=2), Cluster(2)
    frozen = replace(training, lora=16)
    whole, adapters = (step_cost(shape, each, cluster) for each in (training, frozen))
    rate = CONSTANTS["matmul_rate"].value
    saved = whole.compute["MLP"] - adapters.compute["MLP"]
    assert saved == pytest.approx(32 * 2 * training.tokens * shape.mlp_parameters / rate)
    trained, root = shape.adapters(16), shape.root_parameters
    # On two ranks, half of each message: layers twice, what is outside once, adapters three times.
    assert adapters.wire_bytes["FSDP"] == 2 * (root + 2 * (shape.parameters - root) + 3 * trained) / 2
    assert whole.wire_bytes["FSDP"] == 2 * (2 * root + 3 * (shape.parameters - root)) / 2
    copies = [cost.compute["FSDP's copies"] / cost.wire_bytes["FSDP"] for cost in (whole, adapters)]
    assert copies[0] == pytest.approx(copies[1])
    assert adapters.compute["optimizer"] == pytest.approx(whole.compute["optimizer"] * trained / shape.parameters)


def test_the_host_is_waited_for_with_adapters_as_without() -> None:
    """Forward and backward apart: a long backward makes up for nothing that the forward waited."""
    shape, cluster = PUBLISHED["0.8B"], Cluster(8)
    for lora in (0, 16):
        training = Training(65536, cp_size=4, shards=8, lora=lora)
        cost = step_cost(shape, training, cluster)
        work = sum(x for name, x in cost.compute.items() if name not in ("head and loss", "waiting for the host"))
        begin, then = host_seconds(shape, training)
        assert work > begin + then
        assert 0.01 < cost.compute["waiting for the host"] < begin


def test_bf16_throughout_is_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    assert main(["plan", "--model", "4B", "--gpus", "8", "--precision", "bf16", "--write", str(path)]) == 0
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "no"
    assert "--dtype bfloat16" in path.read_text()
    assert "--bf16" not in path.read_text()
