"""`hf-cp plan`: which mesh and modes a sequence length needs, what they hold, send and take."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..config import PatchConfig
from ..report import markdown, new_figure, save
from .cost import Cluster, StepCost, refusals, state_seconds, step_cost
from .launch import launch_yaml, script_options
from .lora import with_adapters
from .memory import GIB, MemoryEstimate, Training, estimate
from .shape import PUBLISHED, ModelShape, load_shape

# Slower by so much than the fastest is fast enough, if more ranks share a sequence and each holds less.
TOLERANCE = 0.03
# Of a GPU's memory. The rest is for fragments and for what NCCL and CUDA keep.
USABLE = 0.9
# `--table`: nodes and GPUs of each; models and lengths that the recipes are about.
TABLE_CLUSTERS = {"1 GPU": (1, 1), "2 GPUs": (1, 2), "4 GPUs": (1, 4), "8 GPUs": (1, 8), "2 x 8 GPUs": (2, 8)}
TABLE_MODELS = ("0.8B", "4B", "9B", "27B", "35B-A3B")
TABLE_TOKENS = {"32k": 32768, "128k": 131072, "256k": 262144}
TABLE_RANK = 16
SCALE_GPUS = (64, 128, 256, 512, 1024)
SCALE_TOKENS = (1_000_000, 2_000_000, 4_000_000, 10_000_000)
WAYS = {"chain": "chain (p2p)", "allgather": "all-gather", "scan": "logarithmic scan (not implemented)"}


@dataclass(frozen=True)
class Candidate:
    """A mesh and modes with what they come to; ``reasons`` against it, if any."""

    training: Training
    memory: MemoryEstimate
    cost: StepCost | None
    reasons: tuple[str, ...]
    tokens_per_second: float


def number(text: str) -> int:
    """``262144``, ``256k`` (times 1,024) or ``10M`` (times 1,000,000)."""
    found = re.fullmatch(r"(\d+)(k|M)?", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0, such as 262144, 256k or 10M")
    return int(found[1]) * {None: 1, "k": 1024, "M": 1_000_000}[found[2]]


def candidates(
    shape: ModelShape, base: Training, cluster: Cluster, gpu_bytes: float, checkpointing: str
) -> list[Candidate]:
    """Every context-parallel size that divides the GPUs, with every pair of modes.

    Parameters are spread over all GPUs; where these are of several nodes and a sequence stays inside one, also over
    those of each node alone, which keeps what FSDP gathers off the network.
    """
    found = []
    for cp_size in (n for n in range(1, cluster.gpus + 1) if cluster.gpus % n == 0):
        # On one rank the modes are alike.
        linear_modes = PatchConfig.CHOICES["linear_mode"][: None if cp_size > 1 else 1]
        attention_modes = PatchConfig.CHOICES["attention_mode"][: None if cp_size > 1 else 1]
        spread = [cluster.gpus]
        if cluster.gpus > cluster.gpus_per_node and cluster.gpus_per_node % cp_size == 0:
            spread.append(cluster.gpus_per_node)
        for linear, attention, shards in product(linear_modes, attention_modes, spread):
            tried = []
            for full in {"off": [False], "full": [True], "auto": [False, True]}[checkpointing]:
                training = replace(
                    base,
                    cp_size=cp_size,
                    shards=shards,
                    linear_mode=linear,
                    attention_mode=attention,
                    checkpointing=full,
                )
                tried.append(_candidate(shape, training, cluster, gpu_bytes))
            # Recompute only if it is needed.
            found.append(next((candidate for candidate in tried if not candidate.reasons), tried[-1]))
    return found


def cost_of(shape: ModelShape, training: Training, cluster: Cluster, way: str | None = None) -> StepCost:
    """`step_cost`, with adapters where they are trained."""
    cost = step_cost(shape, training, cluster, way)
    return with_adapters(shape, training, cluster, cost) if training.lora else cost


def _candidate(shape: ModelShape, training: Training, cluster: Cluster, gpu_bytes: float) -> Candidate:
    memory = estimate(shape, training)
    reasons = refusals(shape, training)
    cost = None if reasons else cost_of(shape, training, cluster)
    if memory.peak > USABLE * gpu_bytes:
        reasons.append(f"needs {memory.peak / GIB:.0f} GiB of {USABLE * gpu_bytes / GIB:.0f}")
    groups = cluster.gpus // training.cp_size
    rate = 0.0 if cost is None else groups * training.batch * training.seq_len / cost.seconds
    return Candidate(training, memory, cost, tuple(reasons), rate)


def best(found: list[Candidate], gpus_per_node: int | None = None) -> Candidate | None:
    """Of those that fit and train about as many tokens a second as any, the one with the largest cp_size.

    Among them the one that spreads parameters furthest, then the fastest.

    Args:
        gpus_per_node: prefer sequences that stay inside a node, whatever the others' speed: the cost of exchanges
            over the network was not measured.
    """
    fitting = [one for one in found if not one.reasons]
    if gpus_per_node is not None:
        fitting = [one for one in fitting if one.training.cp_size <= gpus_per_node] or fitting
    fastest = max((one.tokens_per_second for one in fitting), default=0.0)
    fast = [one for one in fitting if one.tokens_per_second >= (1 - TOLERANCE) * fastest]
    return max(fast, key=lambda one: (one.training.cp_size, one.training.shards, one.tokens_per_second), default=None)


def row(one: Candidate, cluster: Cluster) -> dict[str, Any]:
    """A candidate as a line of the table: memory in GiB, messages in GB a rank and step."""
    memory, cost = one.memory, one.cost
    shown: dict[str, Any] = {
        "cp": one.training.cp_size,
        "dp shard": one.training.shards // one.training.cp_size,
        "dp replicate": cluster.gpus // one.training.shards,
        "linear_mode": one.training.linear_mode if one.training.cp_size > 1 else "any",
        "attention_mode": one.training.attention_mode if one.training.cp_size > 1 else "any",
        "checkpointing": "full" if one.training.checkpointing else "off",
    }
    for part in ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "peak"):
        shown[part] = getattr(memory, part) / GIB
    if cost is not None:
        shown["sent GB"] = sum(cost.wire_bytes.values()) / 1e9
        shown["waiting s"] = sum(cost.exposed.values())
        shown["step s"] = cost.seconds
        shown["tokens/s"] = round(one.tokens_per_second)
    shown["verdict"] = "; ".join(one.reasons) or "fits"
    return shown


def state_rows(shape: ModelShape, base: Training, cluster: Cluster) -> list[dict[str, Any]]:
    """Milliseconds until the last rank has its state, by number of ranks and way."""
    found = []
    for ranks in (2**i for i in range(1, 11)):
        training = replace(base, cp_size=ranks)
        times = {name: 1e3 * state_seconds(shape, training, cluster, way) for way, name in WAYS.items()}
        found.append({"cp": ranks} | times)
    return found


def chain_limit(rows: list[dict[str, Any]]) -> str:
    """For how many ranks another way of passing states is faster than the chain, in a sentence."""
    said = []
    for name in (WAYS["allgather"], WAYS["scan"]):
        ranks = [r["cp"] for r in rows if r[name] < r[WAYS["chain"]]]
        if not ranks:
            where = "never faster than the chain"
        elif ranks[-1] == rows[-1]["cp"]:
            where = f"faster than the chain from {ranks[0]} ranks on"
        else:
            where = f"faster than the chain from {ranks[0]} to {ranks[-1]} ranks"
        said.append(f"{name}: {where}")
    return "; ".join(said)


def scale_rows(shape: ModelShape, base: Training, per_node: int, gpu_bytes: float) -> list[dict[str, Any]]:
    """The best mesh and modes for many GPUs and tokens, and the share of the step that waits for states."""
    found = []
    for tokens in SCALE_TOKENS:
        for gpus in SCALE_GPUS:
            cluster = Cluster(gpus, per_node)
            every = candidates(shape, replace(base, seq_len=tokens), cluster, gpu_bytes, "auto")
            one = best(every, per_node)
            line: dict[str, Any] = {"tokens": tokens, "gpus": gpus}
            if one is None or one.cost is None:
                least = min((c for c in every if c.cost is not None), key=lambda c: c.memory.peak)
                found.append(line | {"verdict": f"cp {least.training.cp_size} {least.reasons[0]}"})
                continue
            chain = cost_of(shape, replace(one.training, linear_mode="p2p"), cluster)
            shares = {name: 100 * value / one.cost.seconds for name, value in one.cost.exposed.items()}
            found.append(
                line
                | {key: value for key, value in row(one, cluster).items() if key in _SCALE_COLUMNS}
                | {
                    "states %": shares.get("linear layers", 0.0),
                    "chain %": 100 * chain.exposed.get("linear layers", 0.0) / chain.seconds,
                    "attention exchange %": shares.get("attention", 0.0),
                    "FSDP %": shares.get("FSDP", 0.0),
                }
            )
    return found


def shared_rows(shape: ModelShape, base: Training, per_node: int) -> list[dict[str, Any]]:
    """One sequence over all GPUs: the share of the step that waits for states, by the way they travel."""
    found = []
    for tokens in SCALE_TOKENS:
        for gpus in SCALE_GPUS:
            cluster = Cluster(gpus, per_node)
            training = replace(
                base, seq_len=tokens, cp_size=gpus, shards=gpus, attention_mode="allgather", checkpointing=True
            )
            line: dict[str, Any] = {"tokens": tokens, "cp": gpus, "tokens a rank": training.tokens}
            for way in WAYS:
                cost = cost_of(shape, training, cluster, way)
                line[f"{way} %"] = 100 * cost.exposed["linear layers"] / cost.seconds
            found.append(line)
    return found


def fitting_table(gpu_bytes: float, rank: int) -> list[dict[str, Any]]:
    """For the recipes' models and lengths and some numbers of GPUs: cp_size, checkpointing, memory and time.

    Args:
        rank: of LoRA's adapters; 0 trains all weights.
    """
    found = []
    for name in TABLE_MODELS:
        for length, tokens in TABLE_TOKENS.items():
            line: dict[str, Any] = {"model": name, "tokens": length}
            for column, (nodes, gpus) in TABLE_CLUSTERS.items():
                cluster = Cluster(nodes * gpus, gpus)
                one = best(candidates(PUBLISHED[name], Training(tokens, lora=rank), cluster, gpu_bytes, "auto"), gpus)
                line[column] = "-"
                if one is not None and one.cost is not None:
                    training = one.training
                    mesh = f"{training.cp_size}{'c' if training.checkpointing else ''}"
                    if cluster.gpus > training.cp_size:
                        mesh += f" x {cluster.gpus // training.cp_size}{'r' if training.shards < cluster.gpus else ''}"
                    line[column] = f"{mesh}, {one.memory.peak / GIB:.0f} GiB, {one.cost.seconds:.1f} s"
            found.append(line)
    return found


_SCALE_COLUMNS = (
    "cp",
    "dp shard",
    "dp replicate",
    "linear_mode",
    "attention_mode",
    "checkpointing",
    "peak",
    "step s",
    "tokens/s",
    "verdict",
)


def _draw_plan(path: Path, shape: ModelShape, found: list[Candidate], cluster: Cluster, title: str) -> None:
    shown = sorted((one for one in found if one.cost is not None), key=lambda one: -one.tokens_per_second)[:16]
    figure, axes = new_figure(10, 1.5 + 0.35 * len(shown))
    names = []
    left = [0.0] * len(shown)
    for one in shown:
        training = one.training
        modes = f"{training.linear_mode}/{training.attention_mode}" if training.cp_size > 1 else "one rank"
        fits = "" if not one.reasons else ", does not fit"
        names.append(f"cp {training.cp_size}, {modes}, ckpt {'full' if training.checkpointing else 'off'}{fits}")
    parts = [("computing", part) for part in shown[0].cost.compute] if shown and shown[0].cost else []
    waits = dict.fromkeys(kind for one in shown if one.cost for kind in one.cost.exposed)
    for group, part in [*parts, *(("waiting", kind) for kind in waits)]:
        widths = []
        for one in shown:
            assert one.cost is not None
            source = one.cost.compute if group == "computing" else one.cost.exposed
            widths.append(source.get(part, 0.0))
        hatch = "//" if group == "waiting" else None
        axes.barh(range(len(shown)), widths, left=left, label=f"{group}: {part}", hatch=hatch)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    save(figure, path)


def _draw_scale(
    path: Path, rows: list[dict[str, Any]], shared: list[dict[str, Any]], states: list[dict[str, Any]], title: str
) -> None:
    """Four answers: mesh and modes, tokens a second, where the chain stops scaling, and what an exchange takes."""
    figure, meshes = new_figure(15, 10)
    meshes.set_subplotspec(figure.add_gridspec(2, 2, width_ratios=(1.5, 1))[0, 0])
    rates, shares, exchange = (figure.add_subplot(meshes.get_gridspec()[place]) for place in ((1, 0), (0, 1), (1, 1)))
    figure.suptitle(title, fontsize=10)

    meshes.set_title("mesh, modes (Gated DeltaNet / attention), peak, step", fontsize=9)
    meshes.set_xlim(-0.5, len(SCALE_GPUS) - 0.5)
    meshes.set_ylim(-0.5, len(SCALE_TOKENS) - 0.5)
    for row_of in rows:
        where = SCALE_GPUS.index(row_of["gpus"]), SCALE_TOKENS.index(row_of["tokens"])
        if row_of["verdict"] == "fits":
            recomputed = ", recomputed" if row_of["checkpointing"] == "full" else ""
            text = f"cp {row_of['cp']} x dp {row_of['gpus'] // row_of['cp']}{recomputed}\n"
            text += f"{row_of['linear_mode']} / {row_of['attention_mode']}\n"
            text += f"{row_of['peak']:.0f} GiB, {row_of['step s']:.0f} s"
        else:
            text = "does not fit:\n" + row_of["verdict"].replace(" needs", "\nneeds")
        color = f"C{round(math.log2(row_of['cp'])) % 10}" if "cp" in row_of else "0.5"
        meshes.text(*where, text, ha="center", va="center", fontsize=7, bbox={"facecolor": color, "alpha": 0.25})
    meshes.set_xticks(range(len(SCALE_GPUS)), [f"{gpus:,} GPUs" for gpus in SCALE_GPUS])
    meshes.set_yticks(range(len(SCALE_TOKENS)), [f"{tokens // 10**6}M tokens" for tokens in SCALE_TOKENS])

    for color, tokens in enumerate(SCALE_TOKENS):
        label = f"{tokens // 10**6}M tokens"
        points = [(r["gpus"], r["tokens/s"] / r["gpus"]) for r in rows if r["tokens"] == tokens and "tokens/s" in r]
        if points:
            rates.plot(*zip(*points, strict=True), marker="o", color=f"C{color}", label=label)
        for way, style in zip(WAYS, ("-", "--", ":"), strict=True):
            waits = [(r["cp"], r[f"{way} %"]) for r in shared if r["tokens"] == tokens]
            name = f"{label}, {WAYS[way]}" if tokens == SCALE_TOKENS[0] else label if way == "chain" else None
            shares.plot(*zip(*waits, strict=True), style, color=f"C{color}", label=name)
    rates.set(yscale="log", xlabel="GPUs", ylabel="tokens/s and GPU")
    shares.set(xlabel="GPUs that share one sequence", ylabel="% of the step that waits for states")
    shares.set_title("one sequence over all GPUs: where the chain stops scaling", fontsize=9)
    for name in WAYS.values():
        exchange.plot([r["cp"] for r in states], [r[name] for r in states], label=name)
    exchange.set(yscale="log", xlabel="cp_size", ylabel="ms until the last rank has its state")
    for axes in (rates, shares, exchange):
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=7)
    save(figure, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="config.json, a folder with one, or the name of a Qwen3.5: 0.8B")
    parser.add_argument("--seq-len", type=number, default=262144, help="tokens of a sequence: 262144, 256k, 1M")
    parser.add_argument("--gpus", type=number, default=8, help="of all nodes together; with --nodes of each")
    parser.add_argument("--nodes", type=number, help="machines of --gpus GPUs")
    parser.add_argument("--gpus-per-node", type=number, help="joined by NVLink; 8, or with --nodes all of a node")
    parser.add_argument("--gpu-memory", type=float, default=141, help="GB of one GPU (1e9 bytes)")
    parser.add_argument(
        "--batch", type=number, default=1, help="sequences that one context-parallel group takes at once"
    )
    parser.add_argument("--layers", type=number, help="the model's first layers alone")
    parser.add_argument("--checkpointing", choices=("auto", "off", "full"), default="auto")
    parser.add_argument("--precision", choices=("mixed", "bf16"), default="mixed", help="of weights: fp32 or bf16")
    parser.add_argument(
        "--lora", type=number, default=0, metavar="RANK", help="train adapters, as recipes/sft.py makes them"
    )
    parser.add_argument("--table", action="store_true", help="what fits how many GPUs, in Markdown, for the recipes")
    parser.add_argument("--scale", action="store_true", help="64 to 1,024 GPUs and 1M to 10M tokens instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the launch configuration of the choice")
    parser.add_argument("--picture", type=Path, metavar="FILE")


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Print the plan. Returns 0 where something fits, else 1.

    Raises:
        ValueError: a model that cannot be read, or options that do not go together.
    """
    gpu_bytes = arguments.gpu_memory * 1e9
    if arguments.table:
        _print_table(gpu_bytes)
        return 0
    if arguments.model is None:
        raise ValueError("--model is missing: give a config.json, a folder with one, or the name of a Qwen3.5")
    if arguments.lora and arguments.precision != "mixed":
        raise ValueError(
            f"--lora {arguments.lora} with --precision {arguments.precision}: adapters are fp32, use mixed"
        )
    if arguments.nodes and arguments.gpus_per_node:
        raise ValueError("--nodes with --gpus-per-node: with --nodes, --gpus is that of each node")
    per_node = arguments.gpus if arguments.nodes else arguments.gpus_per_node or 8
    shape = load_shape(arguments.model)
    if arguments.lora and shape.experts and shape.layer_class == "Qwen3NextDecoderLayer":
        raise ValueError(
            f"--lora {arguments.lora} with a Qwen3-Next: PEFT adapts its experts too, which is not estimated"
        )
    if arguments.layers:
        shape = shape.with_layers(arguments.layers)
    if arguments.scale and arguments.write:
        raise ValueError("--write with --scale: a launch configuration is for one --gpus and --seq-len")
    base = Training(arguments.seq_len, arguments.batch, precision=arguments.precision, lora=arguments.lora)
    cluster = Cluster(arguments.gpus * (arguments.nodes or 1), per_node)
    if cluster.gpus > cluster.gpus_per_node and cluster.gpus % cluster.gpus_per_node:
        raise ValueError(f"--gpus {cluster.gpus} is not a multiple of --gpus-per-node {per_node}")
    states = state_rows(shape, base, cluster)
    title = f"{arguments.model}, {shape.parameters / 1e9:.2f}e9 parameters, {arguments.precision} precision"
    if arguments.lora:
        title += f", LoRA of rank {arguments.lora}: {shape.adapters(arguments.lora) / 1e6:.1f}e6 trained"
    if arguments.scale:
        rows = scale_rows(shape, base, per_node, gpu_bytes)
        shared = shared_rows(shape, base, per_node)
        _print({"scale": rows, "one sequence": shared, "state exchange": states}, arguments.json, title, states)
        if arguments.picture:
            _draw_scale(arguments.picture, rows, shared, states, title)
        return 0 if any(r.get("verdict") == "fits" for r in rows) else 1
    found = candidates(shape, base, cluster, gpu_bytes, arguments.checkpointing)
    choice = best(found, per_node)
    title += f", {arguments.seq_len:,} tokens, {cluster.gpus} GPUs of {arguments.gpu_memory:g} GB"
    rows = [row(one, cluster) for one in found]
    chosen = None if choice is None else row(choice, cluster)
    content: dict[str, Any] = {"plan": rows, "choice": chosen}
    if arguments.json and choice is not None and choice.cost is not None:
        content["choice detail"] = asdict(choice.cost) | {"memory": asdict(choice.memory)}
    _print(content, arguments.json, title, states)
    if choice is not None and not arguments.json:
        print(_placement(choice.training, cluster))
        fastest = best(found)
        if fastest is not None and fastest.training.cp_size > per_node >= choice.training.cp_size:
            ratio = fastest.tokens_per_second / choice.tokens_per_second
            print(
                f"A sequence over several nodes, cp_size {fastest.training.cp_size}, would train {ratio:.2f} times the "
                "tokens a second by the model, whose network was not measured."
            )
        print(f"With recipes/sft.py: {script_options(choice.training)}")
    if arguments.picture:
        _draw_plan(arguments.picture, shape, found, cluster, title)
    if choice is None:
        if arguments.write:
            raise ValueError(f"--write {arguments.write}: nothing fits, so there is nothing to write")
        return 1
    if arguments.write:
        command = "hf-cp plan " + shlex.join(argv)
        arguments.write.write_text(launch_yaml(shape, choice.training, cluster, command))
    return 0


def _placement(training: Training, cluster: Cluster) -> str:
    """Where sequences and parameters lie, in a line."""
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    if cluster.gpus == 1:
        return "One GPU holds everything."
    if nodes == 1:
        return f"Parameters are spread over all {cluster.gpus} GPUs (FSDP2)."
    if training.cp_size > cluster.gpus_per_node:
        where = f"A sequence lies over {-(-training.cp_size // cluster.gpus_per_node)} nodes: it does not fit one"
    else:
        where = f"Every sequence stays inside a node, {cluster.gpus // training.cp_size} at a time"
    if training.shards == cluster.gpus:
        return f"{where}; parameters are spread over all {cluster.gpus} GPUs of {nodes} nodes (FSDP2)."
    return f"{where}; parameters are spread inside a node and replicated over {nodes} nodes (HSDP)."


def _print_table(gpu_bytes: float) -> None:
    whole, adapters = (markdown(fitting_table(gpu_bytes, rank)) for rank in (0, TABLE_RANK))
    print(f"All weights:\n\n{whole}\n\nLoRA of rank {TABLE_RANK}, frozen weights in bf16:\n\n{adapters}")


def _print(content: dict[str, Any], as_json: bool, title: str, states: list[dict[str, Any]]) -> None:
    if as_json:
        print(json.dumps(content, indent=1))
        return
    print(title)
    for rows in (content.get("plan"), content.get("scale")):
        if rows:
            print(f"\n{markdown(rows)}")
    if "scale" in content:
        shared = markdown(content["one sequence"])
        print(f"\nOne sequence over all GPUs, share of the step that waits for states:\n\n{shared}")
        print(f"\nOne exchange of states, ms until the last rank has its own:\n\n{markdown(states)}")
    else:
        choice = content["choice"]
        print("\nMemory in GiB a rank; the peak is less than the sum, since not all exists at a time.")
        if choice is None:
            print("Nothing fits: more GPUs, a larger --gpu-memory, --checkpointing full or --precision bf16.")
        else:
            replicas = f", dp_replicate_size {choice['dp replicate']}" if choice["dp replicate"] > 1 else ""
            modes = (
                ""
                if choice["cp"] == 1
                else (
                    f', hf_cp.patch(model, linear_mode="{choice["linear_mode"]}", '
                    f'attention_mode="{choice["attention_mode"]}")'
                )
            )
            print(
                f"Choice: cp_size {choice['cp']}, dp_shard_size {choice['dp shard']}{replicas}{modes}, "
                f"checkpointing {choice['checkpointing']}: {choice['peak']:.0f} GiB, {choice['step s']:.2f} s a step"
            )
    print(f"\nStates: {chain_limit(states)}.")
