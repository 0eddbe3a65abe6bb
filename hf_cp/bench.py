"""Times a complete token mixer, or a training step: patched and stock on one device, mode by mode between ranks.
Or trains between ranks and on one device, and compares step by step.

    hf-cp bench [--table layer] [--layer-code triton,stock] [--tokens 8192,32768] [--hidden 2048 --heads 16:32]
    hf-cp bench --table step [--models 0.8B,4B] [--tokens 8192,32768,longest] [--checkpointing off,full]
    torchrun --nproc-per-node 2 -m hf_cp.bench --table layer [--modes p2p,allgather,ulysses] [--local-tokens 8192,16384]
    torchrun --nproc-per-node 2 -m hf_cp.bench --table step --models report --layers 4,8 --local-tokens 16384
    torchrun --nproc-per-node 4 -m hf_cp.bench --table trajectory [--modes p2p,ulysses] [--checkpointing off,full]

"triton", "gluon" and "eager" are the model patched with that backend, "stock" is transformers' own, on one device only.

layer: projections, convolution, delta rule, gated norm and output projection of Qwen3.5 in bfloat16, random weights; or
its full attention. Each row: median milliseconds of forward, backward and both of 20 runs after 5 (of 3 after 1 for
stock and eager, whose torch loops take long), each waited for and started with the host ahead, as in a long step, so
that it is the device's time; and peak MiB beyond weights and inputs.

step: forward, backward, clipping and fused AdamW of a random Qwen3.5 with its whole vocabulary, or of its adapters
(--lora), as many layers as the estimate of hf-cp plan lets fit; medians of 10 steps after 3 (of 2 after 1 for stock,
eager and very long sequences).

Between ranks, which share one sequence (a GPU each over NCCL, or gloo with --device cpu): ranks meet before every run,
which counts as long as the slowest rank takes; 20 runs after 5, steps too; memory is the worst rank's. Layers are also
timed on "one device": every rank by itself, with the tokens of a rank and with those of all. Steps run under FSDP2 over
the same ranks; where they were timed at several numbers of layers, a line is fitted.

trajectory: 100 steps of training on real text, of four layers with a vocabulary of 4,096; errors of loss and gradient
norm against one device, growth of memory, and whether runs are equal bit by bit (--repeat, --deterministic). The first
row is the one device against a second run of itself. The status is 1 where a bound is exceeded. Ranks may share a card.
Without torchrun, the one device alone, whose curve --reference reads.

What is further from fp64, in its output or any gradient, than twice stock's own error (of packed documents, that of
pure torch on one device) is not timed. On a CPU, sizes are tiny and say nothing about speed. --out FOLDER keeps the
table as JSON, Markdown and a picture; --profile FOLDER one more run of each row as a trace a rank, for hf-cp trace.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from . import bench_layer, bench_step, bench_trajectory
from .bench_layer import ALONE, Variant
from .bench_ranks import Ranks, choose_device, joined, launched_size
from .config import PatchConfig
from .kernels.gdn.backend import check_served
from .modes import projections
from .planning.command import count
from .planning.shape import FULL, LINEAR
from .report import conditions, header_line, in_words, make_folder, row_line, write

# Options that not every table has, by the tables that do.
SERVES = {
    ("layer",): ("layer_type", "hidden", "heads", "dim"),
    ("step",): ("layers", "vocab", "documents", "lora", "compile", "liger"),
    ("step", "trajectory"): ("models", "checkpointing", "precision", "attention_mode"),
    ("layer", "step"): ("projection_backend", "profile"),
    ("trajectory",): (
        *("steps", "one_device", "initial_weights", "gradients", "data", "reference", "repeat"),
        *("deterministic", "bound_loss", "bound_norm"),
    ),
}
# Those that say what travels: of layers and steps between ranks.
BETWEEN_RANKS = ("modes", "attention_mode", "projection_backend")
IMPLEMENTATIONS = ("stock", *PatchConfig.CHOICES["gdn_backend"])
LAYER_TYPES = {"linear": LINEAR, "full": FULL}
# Key and value heads with their dim, or query and key/value heads.
HEADS = {"linear": ("16:32", 128), "full": ("8:2", 256)}
Emit = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]


def _some(name: str, given: str, known: Sequence[str]) -> list[str]:
    """The parts of an option that lists names.

    Raises:
        ValueError: one is not known.
    """
    unknown = [part for part in given.split(",") if part not in known]
    if unknown:
        raise ValueError(f"--{name} has {unknown[0]!r}: give some of {', '.join(known)}")
    return given.split(",")


def _check_used(arguments: argparse.Namespace, size: int) -> None:
    """Raise where an option is given that changes nothing.

    Raises:
        ValueError: another table's option, or one about exchanges where there is one process.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    for tables, names in SERVES.items():
        wrong = [name for name in names if name in given and arguments.table not in tables]
        if wrong:
            raise ValueError(
                f"--{wrong[0].replace('_', '-')} with --table {arguments.table}: it has no effect there, leave it out "
                f"or give --table {' or '.join(tables)}"
            )
    alone = [name for name in BETWEEN_RANKS if name in given]
    if size == 1 and arguments.table != "trajectory" and alone:
        raise ValueError(
            f"--{alone[0].replace('_', '-')} on one device: it has no effect there, leave it out or start "
            "torchrun --nproc-per-node 2 -m hf_cp.bench"
        )


def _lengths(arguments: argparse.Namespace, size: int, default: str) -> str:
    """Tokens of whole sequences, from --tokens or --local-tokens.

    Raises:
        ValueError: both, no numbers, or numbers that the ranks do not divide.
    """
    if arguments.local_tokens is not None and arguments.tokens is not None:
        raise ValueError("--tokens and --local-tokens: give one of the two")
    local = arguments.local_tokens is not None or (arguments.tokens is None and size > 1)
    name = "local-tokens" if local else "tokens"
    given = (arguments.local_tokens if local else arguments.tokens) or default
    lengths = []
    for part in given.split(","):
        if part == "longest" and arguments.table == "step" and not local:
            if arguments.device == "cpu":
                raise ValueError(f"--{name} has 'longest' with --device cpu: it fills a GPU's memory, give a number")
            lengths.append(part)
            continue
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"--{name} has {part!r}: give positive numbers")
        tokens = int(part) * (size if local else 1)
        if tokens % size or (size > 1 and tokens < 3 * size):
            raise ValueError(f"--{name} has {part}: {size} ranks need the same number of tokens each, at least 3")
        lengths.append(str(tokens))
    return ",".join(lengths)


def _variants(arguments: argparse.Namespace, size: int) -> list[Variant]:
    """What the command line asks to compute the layer with; for steps the mode is that of linear layers.

    Raises:
        ValueError: an unknown name, or one that cannot run here.
    """
    codes = _some("layer-code", arguments.layer_code or ("triton" if size > 1 else "triton,stock"), IMPLEMENTATIONS)
    for code in codes:
        if code != "stock":
            check_served(code)
    if size == 1:
        return [Variant(code) for code in codes]
    if "stock" in codes:
        raise ValueError("--layer-code has 'stock', which runs on one device only: start it without torchrun")
    kind = "linear_mode" if arguments.table == "step" or arguments.layer_type == "linear" else "attention_mode"
    known = PatchConfig.CHOICES[kind]
    modes = _some("modes", arguments.modes or ",".join(known), known)
    backends = _some("projection-backend", arguments.projection_backend, PatchConfig.CHOICES["projection_backend"])
    if "fused" in backends:
        projections.check_served()
    return [
        Variant(code, mode, backend)
        for code in codes
        for mode in modes
        for backend in backends
        if backend == "torch" or mode == "ulysses"
    ]


def _layer_shape(arguments: argparse.Namespace) -> Any:
    """The layer that is asked for.

    Raises:
        ValueError: heads that are no pair of numbers, of which one divides the other.
    """
    heads, dim = HEADS[arguments.layer_type]
    given = arguments.heads or heads
    parts = given.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--heads {given}: give two numbers, such as {heads}")
    pair = (int(parts[0]), int(parts[1]))
    (few, many), kinds = (pair, "value heads, a multiple of the key heads")
    if arguments.layer_type == "full":
        (few, many), kinds = (pair[::-1], "query heads, a multiple of the key/value heads")
    if not few or not many or many % few:
        raise ValueError(f"--heads {given}: give {kinds}, such as {heads}")
    return bench_layer.shape_of(LAYER_TYPES[arguments.layer_type], arguments.hidden, pair, arguments.dim or dim)


def _check_heads(shape: Any, modes: dict[str, str], size: int) -> None:
    """Raise where Ulysses cannot spread a shape's heads."""
    asked = {
        LINEAR: ("linear_mode", (shape.key_heads, shape.value_heads)),
        FULL: ("attention_mode", (shape.query_heads,)),
    }
    for layer_type, (mode, heads) in asked.items():
        if layer_type in shape.layer_types and modes.get(mode) == "ulysses" and any(n % size for n in heads):
            shown = "/".join(map(str, heads))
            raise ValueError(f"{mode}=ulysses: {size} ranks do not divide {shown} heads; choose other modes")


def _layer_table(arguments: argparse.Namespace, size: int) -> Callable[[Ranks, Emit, Say], None]:
    """Check what is asked for; the function that measures it."""
    variants, shape = _variants(arguments, size), _layer_shape(arguments)
    for variant in variants:
        _check_heads(shape, variant.settings(shape.layer_types[0]), size)
    default = "8192,16384,32768" if size > 1 else "8192,32768"
    lengths = [int(tokens) for tokens in _lengths(arguments, size, default).split(",")]

    def measure(ranks: Ranks, emit: Emit, say: Say) -> None:
        bench_layer.check(variants, shape, ranks, say)
        for variant in variants:
            for tokens in lengths:
                emit(bench_layer.measure(variant, tokens, shape, ranks, arguments.profile))
        if size > 1:
            for code in dict.fromkeys(variant.code for variant in variants):
                for alone in sorted({*lengths, *(tokens // size for tokens in lengths)}):
                    emit(bench_layer.measure(Variant(code), alone, shape, ranks, None))

    return measure


def _step_table(arguments: argparse.Namespace, size: int) -> Callable[[Ranks, Emit, Say], None]:
    """Check what is asked for; the function that measures it."""
    asked: list[tuple[str, dict[str, str]]] = []
    for variant in _variants(arguments, size):
        modes = {"linear_mode": variant.mode, "attention_mode": arguments.attention_mode}
        projection = {"projection_backend": variant.projections}
        asked.append((variant.code, {} if variant.mode == ALONE else modes | projection))
    arguments.tokens = _lengths(arguments, size, "8192,16384" if size > 1 else "8192,32768")
    if arguments.precision == "fp32":
        raise ValueError("--precision fp32 is for trajectories: give mixed or bf16")
    arguments.models = arguments.models or "0.8B,4B"
    arguments.precision = arguments.precision or ("mixed" if size > 1 or arguments.lora else "bf16")
    if arguments.compile and size > 1:
        raise ValueError("--compile is for one device: start it without torchrun")
    if arguments.documents < 1:
        raise ValueError(f"--documents {arguments.documents}: give a positive number")
    short = [
        tokens for tokens in arguments.tokens.split(",") if tokens != "longest" and int(tokens) < arguments.documents
    ]
    if short:
        raise ValueError(f"--documents {arguments.documents} in {short[0]} tokens: give fewer, or more tokens")
    if arguments.documents > 1 and any(code == "stock" for code, _ in asked):
        raise ValueError(f"--documents {arguments.documents}: stock does not pack: give --layer-code without it")
    if arguments.lora < 0:
        raise ValueError(f"--lora {arguments.lora}: give a positive rank, or 0 for none")
    if arguments.lora:
        bench_step.check_lora(arguments.precision)
    # What the estimate may fill: the allocator's fragments need the rest.
    room = 0.0
    if arguments.device == "cuda":
        room = 0.9 * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if arguments.liger:
        bench_step.check_liger(arguments.device)
    cases = bench_step.cases(arguments, asked, size, room)
    for case in cases:
        _check_heads(case.shape, case.settings, size)

    def measure(ranks: Ranks, emit: Emit, say: Say) -> None:
        bench_step.check(cases, ranks, say)
        gc.collect()
        rows = []
        for case in cases:
            rows.append(bench_step.measure(case, ranks, room, arguments.profile))
            emit(rows[-1])
        for row in bench_step.fits(rows):
            emit(row)

    return measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    some = "some of {}".format
    parser.add_argument("--table", choices=(*TABLES, "trajectory"), default="layer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layer-code", "--gdn-backend", help=some(", ".join(IMPLEMENTATIONS)))
    parser.add_argument("--tokens", help="lengths of sequences; for steps also longest, by the estimate")
    parser.add_argument("--local-tokens", help="the same, as tokens of one rank")
    parser.add_argument(
        "--modes", "--linear-mode", help=f"between ranks, {some(', '.join(PatchConfig.CHOICES['linear_mode']))}"
    )
    parser.add_argument("--projection-backend", default="torch", help="between ranks: torch, fused or torch,fused")
    parser.add_argument("--attention-mode", choices=PatchConfig.CHOICES["attention_mode"], default="ulysses")
    parser.add_argument("--layer-type", choices=tuple(LAYER_TYPES), default="linear")
    parser.add_argument("--hidden", type=count, default=2048)
    parser.add_argument("--heads", help="key and value heads, of full attention query and key/value heads")
    parser.add_argument("--dim", type=count, help="of a head")
    parser.add_argument("--models", help=f"for steps, {some(', '.join(bench_step.SHAPES))}; 0.8B,4B")
    parser.add_argument("--layers", help="for steps, at most so many; 4,8 for a line through both")
    parser.add_argument("--vocab", type=count, help="for steps, instead of the model's own")
    parser.add_argument("--checkpointing", default="off", help="for steps: off, full or off,full")
    parser.add_argument("--precision", choices=("mixed", "bf16", "fp32"), help="of weights; fp32 for trajectories only")
    parser.add_argument("--documents", type=int, default=1, help="for steps: packed into the row")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="for steps: adapters beside frozen weights")
    parser.add_argument("--compile", action="store_true", help="for steps on one device: torch.compile of the model")
    parser.add_argument("--liger", action="store_true", help="for steps: norms and MLPs on Liger's kernels")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    bench_trajectory.add_arguments(parser)


TABLES = {
    "layer": (_layer_table, bench_layer.COLUMNS, bench_layer.RANK_COLUMNS),
    "step": (_step_table, bench_step.COLUMNS, bench_step.RANK_COLUMNS),
}


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the table, row by row; between ranks the first does.

    Raises:
        ValueError: no GPU where one was asked for, an unknown name, or code that is too far from fp64 to be timed; on
            every rank alike.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: PyTorch sees no CUDA GPU; run it where there is one (hf-cp doctor), or tiny sizes with "
            "--device cpu --layer-code eager --tokens 128 --hidden 64 --heads 2:4 --dim 16, or --models tiny"
        )
    _check_used(arguments, launched_size())
    if arguments.table == "trajectory":
        return bench_trajectory.run(arguments, argv)
    size, device = launched_size(), choose_device(arguments.device)
    table, *columns = TABLES[arguments.table]
    measure, columns = table(arguments, size), columns[size > 1]
    for name in ("out", "profile"):
        make_folder(f"--{name}", getattr(arguments, name))
    found = conditions(arguments.device) | {"command": f"hf-cp bench {' '.join(argv)}".strip()}
    if size > 1:
        found["device"] = f"{size} x {found['device']}"
        if arguments.device == "cuda":
            found["nccl"] = ".".join(map(str, nccl.version()))
        found["command"] = f"torchrun --nproc-per-node {size} -m hf_cp.bench {' '.join(argv)}".strip()
    rows: list[dict[str, Any]] = []
    with joined(device) as ranks:

        def say(line: str) -> None:
            if ranks.rank == 0:
                print(line, file=sys.stderr, flush=True)

        def emit(row: dict[str, Any]) -> None:
            if ranks.rank > 0:
                return
            if not rows:
                print(f"{in_words(found)}\n\n{header_line(columns)}")
            rows.append(row)
            print(row_line(row, columns), flush=True)

        measure(ranks, emit, say)
        if arguments.out is not None and ranks.rank == 0:
            label, value = ("layer code", *(("mode", "ranks") if size > 1 else ()), "tokens"), "both ms"
            if arguments.table == "step":
                label, value = ("model", "layers", *label, "checkpointing"), "tokens/s"
            for path in write(arguments.out, arguments.table, found, rows, label, value):
                say(f"wrote {path}")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        sys.exit(run(parser.parse_args(), sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"hf_cp.bench: {error}")


if __name__ == "__main__":
    main()
