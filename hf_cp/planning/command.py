"""What a sequence length needs: every mesh of the GPUs with every pair of modes, what a rank holds, sends and takes.

    hf-cp plan --model 4B --seq-len 256k --gpus 8 --write launch.yaml
    hf-cp plan --model path/to/config.json --seq-len 128k --nodes 2 --gpus 8 --lora 16
    hf-cp plan --model 27B --scale              (64 to 1,024 GPUs, 1M to 10M tokens)

cp: ranks that share a sequence; dp shard: groups of them that parameters are spread over as well (FSDP2); dp replicate:
copies of all of it. Memory in GiB a rank. sent GB: by a rank in a step; waiting s: for messages, part of step s.
Nothing is measured: `hf_cp/planning/README.md` says how near the estimates are. The status is 1 where nothing fits.
"""

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
from ..report import check_picture, markdown, new_figure, save
from .cost import Cluster, StepCost, refusals, state_seconds, step_cost
from .launch import launch_yaml, script_options
from .memory import GIB, MemoryEstimate, Training, estimate
from .shape import PUBLISHED, ModelShape, load_shape

# Slower by so much than the fastest is fast enough, if more ranks share a sequence and each holds less.
TOLERANCE = 0.03
# Slower by so much is no reason to leave the default modes.
SAME = 0.01
# Rows that are printed or drawn; --json has all.
SHOWN = 16
# Of a GPU's memory. The rest is for fragments and for what NCCL and CUDA keep.
USABLE = 0.9
# `--table`: nodes and GPUs of each; models and lengths that the recipes are about.
TABLE_CLUSTERS = {"1 GPU": (1, 1), "2 GPUs": (1, 2), "4 GPUs": (1, 4), "8 GPUs": (1, 8), "2 x 8 GPUs": (2, 8)}
TABLE_MODELS = ("0.8B", "4B", "9B", "27B", "35B-A3B")
TABLE_TOKENS = {"32k": 32768, "128k": 131072, "256k": 262144}
TABLE_RANK = 16
SCALE_GPUS = (64, 128, 256, 512, 1024)
SCALE_TOKENS = (1_000_000, 2_000_000, 4_000_000, 10_000_000)
# Of a step: where passing states takes more, more ranks do not pay.
STATES_SHARE = 0.05
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
    found = re.fullmatch(r"(\d+)([kKmM]?)", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0, such as 262144, 256k or 10M")
    return int(found[1]) * {"": 1, "k": 1024, "m": 1_000_000}[found[2].lower()]


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return int(text)


def gigabytes(text: str) -> float:
    """``141``, ``80`` or ``79.6``."""
    if re.fullmatch(r"\d+(\.\d+)?", text) is None or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give GB above 0, such as 141 or 80")
    return float(text)


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


def _candidate(shape: ModelShape, training: Training, cluster: Cluster, gpu_bytes: float) -> Candidate:
    memory = estimate(shape, training)
    reasons = refusals(shape, training)
    cost = None if reasons else step_cost(shape, training, cluster)
    if memory.peak > USABLE * gpu_bytes:
        reasons.append(f"needs {memory.peak / GIB:.0f} GiB of {USABLE * gpu_bytes / GIB:.0f}")
    groups = cluster.gpus // training.cp_size
    rate = 0.0 if cost is None else groups * training.batch * training.seq_len / cost.seconds
    return Candidate(training, memory, cost, tuple(reasons), rate)


def best(found: list[Candidate], gpus_per_node: int | None = None) -> Candidate | None:
    """Of those that fit and train about as many tokens a second as any, the one with the largest cp_size.

    Among them the one that spreads parameters furthest, then the fastest; the default modes where they are as fast.

    Args:
        gpus_per_node: prefer sequences that stay inside a node, whatever the others' speed: the cost of exchanges
            over the network was not measured.
    """
    fitting = [one for one in found if not one.reasons]
    if gpus_per_node is not None:
        fitting = [one for one in fitting if one.training.cp_size <= gpus_per_node] or fitting
    fastest = max((one.tokens_per_second for one in fitting), default=0.0)
    fast = [one for one in fitting if one.tokens_per_second >= (1 - TOLERANCE) * fastest]
    widest = max(((one.training.cp_size, one.training.shards) for one in fast), default=None)
    alike = [one for one in fast if (one.training.cp_size, one.training.shards) == widest]
    fastest = max((one.tokens_per_second for one in alike), default=0.0)
    alike = [one for one in alike if one.tokens_per_second >= (1 - SAME) * fastest]
    return min(alike, key=_departure, default=None)


def _departure(one: Candidate) -> list[int]:
    """How far from the default modes."""
    return [PatchConfig.CHOICES[name].index(getattr(one.training, name)) for name in ("linear_mode", "attention_mode")]


def in_order(found: list[Candidate]) -> list[Candidate]:
    """Those that fit first, the fastest of them first; then what comes nearest to fitting."""
    return sorted(
        found, key=lambda one: (bool(one.reasons), -one.tokens_per_second if not one.reasons else one.memory.peak)
    )


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


def _shared(base: Training, ranks: int, tokens: int) -> Training:
    """One sequence over all ranks, as many as its length needs."""
    return replace(base, seq_len=tokens, cp_size=ranks, shards=ranks, attention_mode="allgather", checkpointing=True)


def states_share(shape: ModelShape, training: Training, per_node: int, way: str) -> float:
    """What of a step is waiting for states that travel in this way, 0 to 1; all GPUs share the sequence."""
    cost = step_cost(shape, training, Cluster(training.cp_size, per_node), way)
    return cost.exposed.get("linear layers", 0.0) / cost.seconds


def fewest_tokens(shape: ModelShape, base: Training, per_node: int, ranks: int, way: str) -> int | None:
    """Tokens a rank from which on states take less than `STATES_SHARE` of a step, to two digits; None below 512."""

    def scales(tokens: int) -> bool:
        return states_share(shape, _shared(base, ranks, tokens * ranks), per_node, way) <= STATES_SHARE

    below = next((2**i for i in range(20, 8, -1) if not scales(2**i)), None)
    if below is None:
        return None
    above = 2 * below
    while above > 1.01 * below:
        middle = (below + above) // 2
        below, above = (below, middle) if scales(middle) else (middle, above)
    return int(float(f"{above:.2g}"))


def scaling_limits(shape: ModelShape, base: Training, per_node: int, rows: list[dict[str, Any]]) -> list[str]:
    """Where passing states stops scaling, by way, and what that means for the meshes of `scale_rows`; a line each."""
    said = [
        f"Passing states takes {100 * STATES_SHARE:.0f} % of such a step at so many tokens a rank, and more at fewer, "
        f"over {', '.join(f'{ranks:,}' for ranks in SCALE_GPUS)} ranks:"
    ]
    for way, name in WAYS.items():
        limits = [fewest_tokens(shape, base, per_node, ranks, way) for ranks in SCALE_GPUS]
        said.append(f"- {name}: " + ", ".join("none" if tokens is None else f"{tokens:,}" for tokens in limits))
    chains = [line["chain %"] for line in rows if "chain %" in line]
    if chains:
        said.append(
            f"In the meshes chosen above the chain takes at most {max(chains):.2g} % of a step: no other way of "
            "passing states gains more."
        )
    return said


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
            chain = step_cost(shape, replace(one.training, linear_mode="p2p"), cluster)
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
            training = _shared(base, gpus, tokens)
            line: dict[str, Any] = {"tokens": tokens, "cp": gpus, "tokens a rank": training.tokens}
            line |= {f"{way} %": 100 * states_share(shape, training, per_node, way) for way in WAYS}
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
    shown = [one for one in in_order(found) if one.cost is not None][:SHOWN]
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
    parser.add_argument(
        "--seq-len",
        type=number,
        help="tokens of a sequence: 262144, 256k (x 1,024), 1M (x 1,000,000); 256k if not given",
    )
    parser.add_argument("--gpus", type=count, help="of all nodes together, with --nodes of each; 8 if not given")
    parser.add_argument("--nodes", type=count, help="machines of --gpus GPUs")
    parser.add_argument("--gpus-per-node", type=count, help="joined by NVLink; 8, or with --nodes all of a node")
    parser.add_argument(
        "--gpu-memory", type=gigabytes, default=141.0, help="GB of one GPU (1e9 bytes), of which 90 %% are used; 141"
    )
    parser.add_argument("--batch", type=count, help="sequences that one context-parallel group takes at once; 1")
    parser.add_argument("--layers", type=count, help="the model's first layers alone")
    parser.add_argument(
        "--checkpointing", choices=("auto", "off", "full"), help="auto, the default: where it is needed"
    )
    parser.add_argument("--precision", choices=("mixed", "bf16"), help="of weights: fp32, the default, or bf16")
    parser.add_argument("--lora", type=count, metavar="RANK", help="train adapters, as recipes/sft.py makes them")
    parser.add_argument("--table", action="store_true", help="what fits how many GPUs, in Markdown, for the recipes")
    parser.add_argument("--scale", action="store_true", help="64 to 1,024 GPUs and 1M to 10M tokens instead")
    parser.add_argument("--json", action="store_true", help="all rows, and the choice in detail")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the launch configuration of the choice")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it: .png, .pdf or .svg")


def _check(arguments: argparse.Namespace) -> None:
    """Raise where options do not go together.

    Raises:
        ValueError: an option that another one leaves without effect, or a file that cannot be written.
    """
    given = [name for name, value in vars(arguments).items() if value not in (None, False)]
    unused = {
        "table": ("model", "seq_len", "gpus", "nodes", "gpus_per_node", "batch", "layers", "checkpointing", "lora"),
        "scale": ("seq_len", "gpus", "nodes", "checkpointing", "write"),
    }
    unused["table"] += ("precision", "scale", "json", "write", "picture")
    for mode, names in unused.items():
        wrong = [name for name in names if name in given]
        if mode in given and wrong:
            raise ValueError(f"--{wrong[0].replace('_', '-')} with --{mode}: it has no effect there, leave it out")
    if arguments.table:
        return
    if arguments.model is None:
        raise ValueError("--model is missing: give a config.json, a folder with one, or the name of a Qwen3.5")
    if arguments.lora and arguments.precision == "bf16":
        raise ValueError(f"--lora {arguments.lora} with --precision bf16: adapters are fp32, use mixed")
    if arguments.nodes and arguments.gpus_per_node:
        raise ValueError("--nodes with --gpus-per-node: with --nodes, --gpus is that of each node")
    if arguments.write is not None and arguments.write.is_dir():
        raise ValueError(f"--write {arguments.write} is a folder: give the name of a file")
    check_picture(arguments.picture)


def _shape(arguments: argparse.Namespace) -> ModelShape:
    """The model that is asked for.

    Raises:
        ValueError: it cannot be read, has fewer layers, or takes no adapters that are estimated.
    """
    shape = load_shape(arguments.model)
    if arguments.lora and shape.experts and shape.layer_class == "Qwen3NextDecoderLayer":
        raise ValueError(
            f"--lora {arguments.lora} with a Qwen3-Next: PEFT adapts its experts too, which is not estimated"
        )
    if arguments.layers is None:
        return shape
    if arguments.layers > len(shape.layer_types):
        raise ValueError(f"--layers {arguments.layers}: the model has {len(shape.layer_types)}, give no more")
    return shape.with_layers(arguments.layers)


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Print the plan. Returns 0 where something fits, else 1.

    Raises:
        ValueError: a model that cannot be read, options that do not go together, or a file that cannot be written.
    """
    _check(arguments)
    gpu_bytes = arguments.gpu_memory * 1e9
    if arguments.table:
        _print_table(gpu_bytes)
        return 0
    shape = _shape(arguments)
    precision = arguments.precision or "mixed"
    title = f"{arguments.model}, {shape.parameters / 1e9:.2f}e9 parameters, {precision} precision"
    if arguments.lora:
        title += f", LoRA of rank {arguments.lora}: {shape.adapters(arguments.lora) / 1e6:.1f}e6 trained"
    title += f", GPUs of {arguments.gpu_memory:g} GB"
    base = Training(arguments.seq_len or 262144, arguments.batch or 1, precision=precision, lora=arguments.lora or 0)
    if arguments.scale:
        return _scale(arguments, shape, base, gpu_bytes, title)
    gpus = arguments.gpus or 8
    cluster = Cluster(gpus * (arguments.nodes or 1), gpus if arguments.nodes else arguments.gpus_per_node or 8)
    if cluster.gpus > cluster.gpus_per_node and cluster.gpus % cluster.gpus_per_node:
        raise ValueError(
            f"--gpus {cluster.gpus} is not a multiple of --gpus-per-node {cluster.gpus_per_node}: change one of them"
        )
    title += f", {base.seq_len:,} tokens, {cluster.gpus} GPU{'s' if cluster.gpus > 1 else ''}"
    return _plan(arguments, argv, shape, base, cluster, title)


def _scale(arguments: argparse.Namespace, shape: ModelShape, base: Training, gpu_bytes: float, title: str) -> int:
    """Print the answers for many GPUs and long sequences.

    Raises:
        ValueError: nodes that do not make up as many GPUs.
    """
    per_node = arguments.gpus_per_node or 8
    if SCALE_GPUS[0] % per_node:
        raise ValueError(f"--gpus-per-node {per_node} with --scale: give a number that divides {SCALE_GPUS[0]}")
    rows, shared = scale_rows(shape, base, per_node, gpu_bytes), shared_rows(shape, base, per_node)
    states = state_rows(shape, base, Cluster(SCALE_GPUS[-1], per_node))
    limits = scaling_limits(shape, base, per_node, rows)
    if arguments.json:
        content = {"scale": rows, "one sequence": shared, "state exchange": states, "limits": limits}
        print(json.dumps(content, indent=1))
    else:
        print(f"{title}\n\n{markdown(rows)}")
        print(
            "\nOne sequence over all GPUs, layers recomputed, % of the step that waits for states:\n\n"
            f"{markdown(shared)}"
        )
        print(f"\nOne exchange of states, ms until the last rank has its own:\n\n{markdown(states)}\n")
        print("\n".join(limits))
    if arguments.picture:
        _draw_scale(arguments.picture, rows, shared, states, title)
    return 0 if any(one["verdict"] == "fits" for one in rows) else 1


def _plan(
    arguments: argparse.Namespace, argv: list[str], shape: ModelShape, base: Training, cluster: Cluster, title: str
) -> int:
    """Print the candidates and the choice among them, and write what is asked for."""
    gpu_bytes = arguments.gpu_memory * 1e9
    found = in_order(candidates(shape, base, cluster, gpu_bytes, arguments.checkpointing or "auto"))
    choice = best(found, cluster.gpus_per_node)
    if choice is None and arguments.write:
        raise ValueError(
            f"--write {arguments.write}: nothing fits, so there is nothing to write; see the plan without it"
        )
    rows = [row(one, cluster) for one in found]
    chosen = None if choice is None else row(choice, cluster)
    if arguments.json:
        content: dict[str, Any] = {"plan": rows, "choice": chosen}
        if choice is not None and choice.cost is not None:
            content["choice detail"] = asdict(choice.cost) | {"memory": asdict(choice.memory)}
        print(json.dumps(content, indent=1))
    else:
        print(f"{title}\n\n{markdown(rows[:SHOWN])}")
        if len(rows) > SHOWN:
            print(f"\nThe best {SHOWN} of {len(rows)}; --json has all.")
        print(
            "\nMemory in GiB a rank; the peak is less than the sum, since not all exists at a time. It may take "
            f"{USABLE * gpu_bytes / GIB:.0f} GiB: {100 * USABLE:.0f} % of a GPU, the rest is for fragments and NCCL."
        )
        print("\n".join(_choice_lines(choice, found, cluster)))
    if arguments.write and choice is not None:
        text = launch_yaml(shape, choice.training, cluster, "hf-cp plan " + shlex.join(argv))
        try:
            arguments.write.parent.mkdir(parents=True, exist_ok=True)
            arguments.write.write_text(text)
        except OSError as error:
            raise ValueError(f"--write {arguments.write} cannot be written ({error.strerror}): give another") from None
    if arguments.picture:
        _draw_plan(arguments.picture, shape, found, cluster, title)
    return 1 if choice is None else 0


def _choice_lines(choice: Candidate | None, found: list[Candidate], cluster: Cluster) -> list[str]:
    """What was chosen and why, in words."""
    if choice is None or choice.cost is None:
        training = found[0].training
        help_yet = {
            "a smaller --batch": training.batch > 1,
            "--lora": not training.lora,
            "--checkpointing full": not any(one.training.checkpointing for one in found),
            "--precision bf16": training.precision != "bf16" and not training.lora,
        }
        options = ["more GPUs", "shorter sequences", *(name for name, helps in help_yet.items() if helps)]
        return [f"Nothing fits: give {', '.join(options[:-1])} or {options[-1]}."]
    training = choice.training
    chosen = [f"cp_size {training.cp_size}", f"dp_shard_size {training.shards // training.cp_size}"]
    if cluster.gpus > training.shards:
        chosen.append(f"dp_replicate_size {cluster.gpus // training.shards}")
    if training.cp_size > 1:
        modes = f'linear_mode="{training.linear_mode}", attention_mode="{training.attention_mode}"'
        chosen.append(f"hf_cp.patch(model, {modes})")
    chosen.append(f"checkpointing {'full' if training.checkpointing else 'off'}")
    lines = [f"Choice: {', '.join(chosen)}: {choice.memory.peak / GIB:.0f} GiB, {choice.cost.seconds:.2f} s a step"]
    if len(found) > 1:
        where = " inside a node" if training.cp_size <= cluster.gpus_per_node < cluster.gpus else ""
        lines.append(f"Of what fits{where} and is within {100 * TOLERANCE:.0f} % of the fastest, the largest cp_size.")
    lines.append(_placement(training, cluster))
    fastest = best(found)
    ratio = 1.0 if fastest is None else fastest.tokens_per_second / choice.tokens_per_second
    if fastest is not None and fastest.training.cp_size > cluster.gpus_per_node and ratio > 1 + TOLERANCE:
        lines.append(
            f"A sequence over several nodes, cp_size {fastest.training.cp_size}, would train {ratio:.2f} times the "
            "tokens a second by the model, whose network was not measured."
        )
    return [*lines, f"With recipes/sft.py: {script_options(training)}"]


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
