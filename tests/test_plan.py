"""`hf-cp plan`: parameters, memory, messages and time against what was counted or measured, and the files it writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import hf_cp
from hf_cp import bench_step
from hf_cp.cli import main
from hf_cp.config import PatchConfig
from hf_cp.planning.command import (
    STATES_SHARE,
    WAYS,
    best,
    candidates,
    fewest_tokens,
    in_order,
    number,
    scaling_limits,
    states_share,
)
from hf_cp.planning.constants import CONSTANTS, LAYERS, STEPS
from hf_cp.planning.cost import Cluster, head_seconds, refusals, state_seconds, state_waits, step_cost
from hf_cp.planning.launch import launch_yaml
from hf_cp.planning.memory import GIB, Training, estimate
from hf_cp.planning.shape import FULL, LINEAR, PUBLISHED, load_shape, shape_from_config
from hf_cp.state import _check_heads
from hf_cp.testing import CommunicationLog, World, tiny_qwen3_5

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CONFIGS = [
    (Qwen3_5ForCausalLM, Qwen3_5TextConfig(num_hidden_layers=4, tie_word_embeddings=True)),
    (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(num_hidden_layers=4)),
    (Qwen3NextForCausalLM, Qwen3NextConfig(num_hidden_layers=4)),
]


@pytest.mark.parametrize(("model_class", "config"), CONFIGS, ids=lambda value: getattr(value, "__name__", ""))
def test_parameters_are_those_of_the_model(model_class: Any, config: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = model_class(config)
    config.save_pretrained(tmp_path)
    shape = load_shape(str(tmp_path))
    assert shape == load_shape(str(tmp_path / "config.json"))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_class in {type(module).__name__ for module in model.modules()}
    assert load_shape(str(tmp_path)) == shape_from_config({"text_config": config.to_dict()})


def named(row: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in row.items() if key not in ("ms", "gib", "fitted"))


def estimated_step(row: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds and GiB that the models give for a row of `STEPS`."""
    shape = bench_step.SHAPES[row["model"]].with_layers(row["layers"])
    shape = replace(shape, vocab=row["vocab"])
    training = Training(
        row["tokens"],
        cp_size=row["ranks"],
        shards=row["ranks"],
        linear_mode=row["mode"],
        checkpointing=row["checkpointing"],
        precision=row["precision"],
    )
    seconds = step_cost(shape, training, Cluster(row["ranks"]), gdn_backend=row["code"]).seconds
    seconds += head_seconds(shape, training, row["loss"]) - head_seconds(shape, training)
    return 1e3 * seconds, estimate(shape, training).peak / GIB


@pytest.mark.parametrize("row", STEPS, ids=named)
def test_measured_steps_are_reproduced(row: dict[str, Any]) -> None:
    milliseconds, gib = estimated_step(row)
    assert milliseconds == pytest.approx(row["ms"], rel=0.15)
    assert gib == pytest.approx(row["gib"], rel=0.06)


def test_steps_that_no_number_was_taken_from_are_foretold() -> None:
    errors = [abs(estimated_step(row)[0] / row["ms"] - 1) for row in STEPS if not row["fitted"]]
    assert len(errors) > len(STEPS) / 2
    assert sum(errors) / len(errors) < 0.06


@pytest.mark.parametrize("row", LAYERS, ids=named)
def test_measured_layers_are_reproduced(row: dict[str, Any]) -> None:
    kind, ranks = {"linear": LINEAR, "full": FULL}[row["layer"]], row["ranks"]
    shape = replace(bench_step.REPORT, layer_types=(kind,))
    mode: Any = {f"{'linear' if kind == LINEAR else 'attention'}_mode": row["mode"]}
    training = Training(ranks * row["local_tokens"], cp_size=ranks, **mode)
    cost = step_cost(shape, training, Cluster(ranks), gdn_backend=row["code"])
    part, waits = ("delta rule layers", ("linear layers", "halo")) if kind == LINEAR else ("attention", ("attention",))
    milliseconds = 1e3 * (cost.compute[part] + sum(cost.exposed.get(name, 0.0) for name in waits))
    assert milliseconds == pytest.approx(row["ms"], rel=0.15)


def test_every_constant_has_a_source() -> None:
    for name, constant in CONSTANTS.items():
        assert constant.value > 0, name
        assert constant.unit, name
        assert constant.source, name
        assert constant.ours != ("assumed" in constant.source), name


def test_memory_falls_with_ranks_and_recomputation() -> None:
    shape = PUBLISHED["9B"]
    peaks = [estimate(shape, Training(65536, cp_size=w, shards=8)).peak for w in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    whole, sharded = (estimate(shape, Training(65536, cp_size=8, shards=n)) for n in (1, 8))
    assert whole.optimizer == 8 * sharded.optimizer
    training = Training(65536, cp_size=8, shards=8)
    assert estimate(shape, replace(training, checkpointing=True)).peak < estimate(shape, training).peak


def test_modes_are_refused_as_patching_refuses_them() -> None:
    config = Qwen3_5TextConfig(num_hidden_layers=4, num_attention_heads=24, linear_num_value_heads=48)
    shape = shape_from_config(config.to_dict())
    for cp_size in (1, 2, 3, 4, 8, 16, 24):
        for linear in PatchConfig.CHOICES["linear_mode"]:
            for attention in PatchConfig.CHOICES["attention_mode"]:
                training = Training(4096, cp_size=cp_size, linear_mode=linear, attention_mode=attention)
                try:
                    _check_heads(config, PatchConfig(linear, attention), cp_size)
                    allowed = True
                except ValueError:
                    allowed = False
                assert allowed == (not refusals(shape, training)), training


def messages(rank: int, size: int, modes: dict[str, str], length: int) -> list[tuple[str, int]]:
    model = tiny_qwen3_5().train()
    hf_cp.patch(model, **modes, gdn_backend="eager", cp_group=dist.group.WORLD)
    ids = torch.arange(length)[None] % 90 + 1
    with CommunicationLog() as log:
        model(input_ids=ids, labels=ids).loss.backward()
    return [(record.name, record.payload_bytes) for record in log.records]


@pytest.mark.parametrize("linear", ["p2p", "ulysses"])
def test_bytes_on_the_wire_are_those_that_travel(world: Callable[..., World], linear: str) -> None:
    """On two ranks, summed over both; the model computes in fp32, twice the bytes of bf16."""
    modes: dict[str, Any] = {"linear_mode": linear, "attention_mode": "ulysses"}
    ranks = world(2).run(messages, modes, 64)
    shape = shape_from_config(tiny_qwen3_5().config.to_dict())
    wire = step_cost(shape, Training(64, cp_size=2, **modes), Cluster(2)).wire_bytes
    sent = {name: sum(size for rank in ranks for kind, size in rank if kind == name) for name in ("send", "all_to_all")}
    # One rank of the two sends a state or a halo. Half of an all-to-all stays at home; the gates are fp32 as it is.
    gates = 2 * 2 * shape.linear_layers * 32 * 4 * shape.value_heads
    if linear == "p2p":
        assert sent == {"send": wire["linear layers"] + 2 * wire["halo"], "all_to_all": 8 * wire["attention"]}
    else:
        exchanged = 8 * (wire["linear layers"] + wire["attention"]) - gates
        assert sent == {"send": 2 * wire["halo"], "all_to_all": exchanged}


def test_no_way_of_passing_states_is_free() -> None:
    shape, cluster = PUBLISHED["9B"], Cluster(1024)
    for way in ("chain", "allgather", "scan"):
        times = [state_seconds(shape, Training(2**20, cp_size=w), cluster, way) for w in (1, 2, 8, 64, 1024)]
        assert times[0] == 0
        assert times == sorted(times)
    many = Training(2**20, cp_size=1024)
    assert state_seconds(shape, many, cluster, "scan") < state_seconds(shape, many, cluster, "chain") / 10


def test_choice_is_fast_and_fits() -> None:
    shape, cluster = PUBLISHED["27B"], Cluster(8)
    found = candidates(shape, Training(262144), cluster, 141e9, "auto")
    choice = best(found)
    assert choice is not None
    assert choice.memory.peak < 141e9
    fitting = [one.tokens_per_second for one in found if not one.reasons]
    assert choice.tokens_per_second > 0.96 * max(fitting)
    assert best(candidates(shape, Training(262144), Cluster(1), 141e9, "auto")) is None


def mesh_size(launch: dict[str, Any]) -> int:
    """Processes that the mesh of a launch configuration spans; every size has to be there. Without a mesh, one."""
    if launch["distributed_type"] == "NO":
        return 1
    sizes = launch["parallelism_config"]
    names = ("dp_replicate", "dp_shard", "tp", "cp")
    return math.prod(sizes[f"parallelism_config_{name}_size"] for name in names)


def test_meshes_span_all_processes() -> None:
    """Also where parameters are replicated over nodes, which none of the plans below chooses."""
    for gpus, shards, cp_size in ((2, 2, 1), (8, 8, 4), (16, 8, 8), (16, 8, 2), (32, 8, 4), (32, 32, 16)):
        training = Training(65536, cp_size=cp_size, shards=shards)
        launch = yaml.safe_load(launch_yaml(PUBLISHED["4B"], training, Cluster(gpus), "a command"))
        sizes = launch["parallelism_config"]
        assert sizes["parallelism_config_dp_replicate_size"] == gpus // shards
        assert sizes["parallelism_config_cp_size"] == cp_size
        assert mesh_size(launch) == launch["num_processes"] == gpus


@pytest.mark.parametrize(("gpus", "like"), [(1, "gpu_x1"), (2, "gpu_x2"), (8, "gpu_x8"), (16, None)])
def test_launch_configuration(gpus: int, like: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "launch.yaml"
    command = ["plan", "--model", "0.8B", "--seq-len", "128k", "--gpus", str(gpus), "--write", str(path)]
    assert main(command) == 0
    load_config_from_file(str(path))
    found = yaml.safe_load(path.read_text())
    assert mesh_size(found) == found["num_processes"] == gpus
    assert found["num_machines"] == -(-gpus // 8)
    if like is not None:
        recipe = yaml.safe_load((RECIPES / f"{like}.yaml").read_text())
        for sizes in (found, recipe):
            for name in ("cp", "dp_shard"):
                sizes.get("parallelism_config", {}).pop(f"parallelism_config_{name}_size", None)
        assert found == recipe
    assert "Choice: cp_size" in capsys.readouterr().out


def test_json_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    assert main(["plan", "--model", "0.8B", "--gpus", "2", "--json", "--picture", str(picture)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["choice"] in content["plan"]
    assert content["choice detail"]["memory"]["peak"] / GIB == pytest.approx(content["choice"]["peak"])
    assert picture.stat().st_size > 10_000
    assert main(["plan", "--model", "0.8B", "--scale", "--json", "--picture", str(tmp_path / "scale.png")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {row["gpus"] for row in content["scale"]} == {64, 128, 256, 512, 1024}
    assert {row["cp"] for row in content["state exchange"]} == {2**i for i in range(1, 11)}
    assert (tmp_path / "scale.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "none"], "--model none: give a config.json, a folder with one, or one of 0.8B"),
        (["--model", "0.8B", "--gpus", "12"], "--gpus 12 is not a multiple of --gpus-per-node 8"),
        (["--model", "0.8B", "--scale", "--write", "x"], "--write with --scale"),
        (["--model", "0.8B", "--scale", "--gpus", "64"], "--gpus with --scale: it has no effect there, leave it out"),
        (["--model", "0.8B", "--scale", "--gpus-per-node", "3"], "--gpus-per-node 3 with --scale: give a number that"),
        (["--table", "--lora", "8"], "--lora with --table: it has no effect there"),
        (["--table", "--batch", "2"], "--batch with --table: it has no effect there"),
        (["--table", "--precision", "mixed"], "--precision with --table: it has no effect there"),
        (["--model", "0.8B", "--layers", "25"], "--layers 25: the model has 24, give no more"),
        (["--model", "0.8B", "--picture", "x.foo"], "--picture x.foo: give a name that ends in .png"),
        (["--model", "0.8B", "--gpus", "1", "--write", "."], "--write . is a folder: give the name of a file"),
        (["--model", "0.8B", "--gpus", "1", "--write", "/dev/null/x"], "--write /dev/null/x cannot be written ("),
        (["--model", "27B", "--gpus", "1", "--write", "x"], "--write x: nothing fits"),
        ([], "--model is missing: give a config.json, a folder with one, or the name of a Qwen3.5"),
        (["--model", "4B", "--lora", "8", "--precision", "bf16"], "--lora 8 with --precision bf16"),
        (["--model", "4B", "--nodes", "2", "--gpus-per-node", "4"], "--nodes with --gpus-per-node"),
    ],
)
def test_refusals_are_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hf-cp plan: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"model_type": "llama"}, "has model_type 'llama'"),
        ({"layer_types": ["sliding_attention"] * 4}, "has layers of type sliding_attention"),
        ({"num_experts": 4, "mlp_only_layers": [0]}, "mixes dense MLPs and experts"),
        ({"hidden_size": "1024"}, "has hidden_size '1024': give a whole number above 0"),
        ({"num_hidden_layers": 9}, "has num_hidden_layers 9, but 4 layer_types: make them agree"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shape_from_config(Qwen3_5TextConfig(num_hidden_layers=4).to_dict() | changes)


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "27B", "--gpus", "1"]) == 1
    offered = "Nothing fits: give more GPUs, shorter sequences, --lora or --precision bf16."
    assert offered in capsys.readouterr().out
    # What is asked for already is not offered.
    options = ["--gpu-memory", "10", "--batch", "2", "--checkpointing", "off", "--lora", "8"]
    assert main(["plan", "--model", "27B", "--gpus", "1", *options]) == 1
    offered = "Nothing fits: give more GPUs, shorter sequences, a smaller --batch or --checkpointing full."
    assert offered in capsys.readouterr().out


def test_a_picture_that_fails_leaves_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "1", "--seq-len", "8k", "--write", str(tmp_path / "x.yaml"), "--picture", "/dev/null/x.png"]
    assert main(["plan", "--model", "0.8B", *options]) == 2
    error = capsys.readouterr().err
    assert "the picture /dev/null/x.png cannot be written (File exists): give another" in error
    assert error.count("\n") == 1
    assert (tmp_path / "x.yaml").exists()


def test_numbers() -> None:
    assert [number(text) for text in ("262144", "256k", "256K", "10M")] == [262144, 262144, 262144, 10_000_000]
    assert PUBLISHED["0.8B"].layer_types[:4] == (LINEAR, LINEAR, LINEAR, FULL)
    for name in ("0.8b", "Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B"):
        assert load_shape(name) == PUBLISHED["0.8B"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("seq-len", "long"), ("gpus", "1k"), ("lora", "0"), ("gpu-memory", "0"), ("gpu-memory", "nan"), ("batch", "-1")],
)
def test_values_that_are_no_sizes(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", "0.8B", f"--{option}", value])
    assert f"argument --{option}: {value!r}: give " in capsys.readouterr().err.splitlines()[-1]


def test_best_rows_come_first_and_defaults_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "27B", "--seq-len", "128k", "--gpus", "16"]) == 0
    printed = capsys.readouterr().out
    shown = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")][1:]
    assert len(shown) == 16
    assert "The best 16 of " in printed
    rates = [int(cells[16].replace(",", "")) for cells in shown if cells[17].startswith("fits")]
    assert len(rates) > 4
    assert rates == sorted(rates, reverse=True)
    # Other modes may be faster by less than the model can tell.
    found = in_order(candidates(PUBLISHED["0.8B"], Training(262144), Cluster(16), 141e9, "auto"))
    choice = best(found, 8)
    assert choice is not None
    assert choice.training.linear_mode == "p2p"
    assert max(found, key=lambda one: (one.training.cp_size == 8, one.tokens_per_second)).training.linear_mode != "p2p"


def test_collectives_between_nodes_take_all_links() -> None:
    """The all-gather's ring leaves a node by the links of all its GPUs, a message between two ranks by one."""
    cluster, payload = Cluster(64), 2.0**30
    rate = 63 * payload / cluster.all_gather(payload, 64)
    assert 7 * CONSTANTS["network_rate"].value < rate < 8 * CONSTANTS["network_rate"].value
    assert cluster.all_reduce(payload, 8) > 1.7 * payload / CONSTANTS["network_rate"].value
    times = [cluster.all_gather(1.0, ranks) for ranks in (2, 8, 16, 64)]
    assert times == sorted(times)


def test_the_chain_is_paid_more_often_where_layers_are_recomputed() -> None:
    """Late ranks stay late for a run of layers, unless states and their gradients take turns."""
    shape = PUBLISHED["0.8B"]
    assert shape.linear_layers == 18
    assert state_waits(shape, False, "chain") == 6 + 6
    assert state_waits(shape, True, "chain") == 6 + 2 * 18
    assert state_waits(shape, True, "allgather") == state_waits(shape, True, "scan") == 3 * 18


def test_where_states_stop_scaling() -> None:
    shape, base = PUBLISHED["9B"], Training(1)
    limits = {way: fewest_tokens(shape, base, 8, 256, way) for way in WAYS}
    chain, gathered, scan = (limits[way] or 0 for way in ("chain", "allgather", "scan"))
    assert 512 < scan < gathered < chain < 16384
    for way, tokens in limits.items():
        assert tokens is not None
        training = Training(256 * tokens, cp_size=256, shards=256, attention_mode="allgather", checkpointing=True)
        assert states_share(shape, training, 8, way) == pytest.approx(STATES_SHARE, rel=0.1)
    said = scaling_limits(shape, base, 8, [{"chain %": 1.5}, {"chain %": 0.2}, {"verdict": "does not fit"}])
    assert f", {chain:,}, " in said[1]
    assert "at most 1.5 %" in said[-1]
