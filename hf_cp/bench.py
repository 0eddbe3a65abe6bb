"""Times a complete Gated DeltaNet layer, or a training step, patched and stock, on one device.

    hf-cp bench [--table layer] [--layer-code triton,stock] [--tokens 8192,32768] [--hidden 2048 --heads 16:32]
    hf-cp bench --table step [--models 0.8B,4B] [--tokens 8192,32768,longest] [--checkpointing off,full]

"triton", "gluon" and "eager" are the model patched with that backend on one rank, "stock" is transformers' own.

layer: projections, convolution, delta rule, gated norm and output projection of Qwen3.5 in bfloat16, random weights.
Each row: median milliseconds of forward, backward and both of 20 runs after 5 (of 3 after 1 for stock and eager, whose
torch loops take long), each waited for, and peak MiB beyond weights and inputs.

step: forward, backward, clipping and fused AdamW of a random Qwen3.5 with its whole vocabulary, as many layers as the
estimate of hf-cp plan lets fit; medians of 10 steps after 3 (of 2 after 1 for stock, eager and very long sequences).

What is further from fp64, in its output or any gradient, than twice stock's own error is not timed. On a CPU, sizes are
tiny and say nothing about speed. --out FOLDER keeps the table as JSON, Markdown and a picture.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import bench_step
from .config import PatchConfig
from .context import CpContext
from .layout import ShardLayout
from .mesh import CpMesh
from .report import conditions, header_line, in_words, row_line, write

CHECKED_TOKENS = 2048
COLUMNS = ("layer code", "tokens", "forward ms", "backward ms", "both ms", "peak MiB")
IMPLEMENTATIONS = ("stock", *PatchConfig.CHOICES["gdn_backend"])
Layer = Callable[[torch.Tensor], torch.Tensor]


def make_model(hidden: int, key_heads: int, value_heads: int, dim: int, device: str) -> Any:
    """A decoder of one Gated DeltaNet layer in bfloat16, the same weights on every call."""
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    config = Qwen3_5TextConfig(
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = Qwen3_5TextModel(config)
    return model.to(device, torch.bfloat16)


def make_layer(name: str, model: Any, tokens: int) -> tuple[Layer, dict[str, torch.nn.Parameter]]:
    """The layer as a function of ``[1, T, D]``, and its parameters by name."""
    from .patch import patch

    layer = model.layers[0].linear_attn
    parameters = dict(layer.named_parameters())
    if name == "stock":
        return layer, parameters
    patch(model, gdn_backend=name)
    layout = ShardLayout(tokens, 1, 0)
    context = CpContext(PatchConfig(gdn_backend=name), CpMesh.single(), layout, layout.one_document())
    return lambda x: layer(x, cp_context=context), parameters


def results(
    layer: Layer, parameters: dict[str, torch.nn.Parameter], x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output, and gradients of the input and of all parameters."""
    y = layer(x)
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return {"output": y.detach(), **dict(zip(("input", *parameters), gradients, strict=True))}


def inputs(tokens: int, hidden: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x, dy = (torch.randn(1, tokens, hidden, device=device, generator=generator).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def errors(name: str, sizes: dict[str, int], device: str) -> dict[str, float]:
    """Relative L2 distances to fp64 of all results."""
    tokens = CHECKED_TOKENS if device == "cuda" else 128
    x, dy = inputs(tokens, sizes["hidden"], device)
    found = results(*make_layer(name, make_model(**sizes, device=device), tokens), x, dy)
    exact = make_layer("eager", make_model(**sizes, device=device).double(), tokens)
    expected = results(*exact, x.detach().double().requires_grad_(), dy.double())
    return {key: float((found[key].double() - b).norm() / b.norm()) for key, b in expected.items()}


def median_ms(function: Callable[[], object], device: str, warm_up: int, repeats: int) -> float:
    """Of single calls, each waited for."""
    if device == "cuda":
        from .kernels.gdn.bench import median_ms as on_gpu

        return on_gpu(function, warm_up, repeats)
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def measure(name: str, tokens: int, sizes: dict[str, int], device: str) -> dict[str, Any]:
    """One row of the table of layers."""
    layer, parameters = make_layer(name, make_model(**sizes, device=device), tokens)
    x, dy = inputs(tokens, sizes["hidden"], device)
    runs = (1, 3) if name in ("stock", "eager") else (5, 20)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    forward_ms = median_ms(forward, device, *runs)
    both_ms = median_ms(lambda: results(layer, parameters, x, dy), device, *runs)
    row: dict[str, Any] = {"layer code": name, "tokens": tokens, "forward ms": forward_ms}
    row |= {"backward ms": both_ms - forward_ms, "both ms": both_ms}
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results(layer, parameters, x, dy)
        torch.cuda.synchronize()
        row["peak MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        torch.cuda.empty_cache()
    return row


def _layer_table(arguments: argparse.Namespace, emit: Callable[[dict[str, Any]], None]) -> None:
    key_heads, value_heads = map(int, arguments.heads.split(":"))
    sizes = {"hidden": arguments.hidden, "key_heads": key_heads, "value_heads": value_heads, "dim": arguments.dim}
    stock = errors("stock", sizes, arguments.device)
    for name in arguments.layer_code.split(","):
        found = errors(name, sizes, arguments.device)
        reason = bench_step.refusal(found, stock)
        if reason is not None:
            raise ValueError(f"{name} is not timed: {reason}")
        _say(f"{name} is at most {max(found.values()):.1e} away from fp64, stock {max(stock.values()):.1e}")
        for tokens in map(int, arguments.tokens.split(",")):
            emit(measure(name, tokens, sizes, arguments.device))


def _step_table(arguments: argparse.Namespace, emit: Callable[[dict[str, Any]], None]) -> None:
    on_gpu = arguments.device == "cuda"
    # What the estimate may fill: the allocator's fragments need the rest.
    room = 0.9 * torch.cuda.get_device_properties(0).total_memory if on_gpu else 0.0
    cases = bench_step.cases(arguments, room)
    names, implementations = arguments.models.split(","), arguments.layer_code.split(",")
    bench_step.check(names, implementations, arguments.device, _say)
    for case in cases:
        emit(bench_step.measure(case))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", choices=("layer", "step"), default="layer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layer-code", default="triton,stock", help=f"some of {', '.join(IMPLEMENTATIONS)}")
    parser.add_argument("--tokens", default="8192,32768", help="lengths; for steps also longest, by the estimate")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", default="16:32", help="key and value heads")
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--models", default="0.8B,4B", help=f"for steps, some of {', '.join(bench_step.SHAPES)}")
    parser.add_argument("--layers", type=int, help="for steps, at most so many")
    parser.add_argument("--checkpointing", default="off", help="for steps: off, full or off,full")
    parser.add_argument("--precision", choices=("mixed", "bf16"), default="bf16", help="for steps, of weights")
    parser.add_argument("--out", type=Path, metavar="FOLDER")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the table, row by row.

    Raises:
        ValueError: no GPU where one was asked for, an unknown name, or code that is too far from fp64 to be timed.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: PyTorch sees no CUDA GPU; run it where there is one (hf-cp doctor), or tiny sizes with "
            "--device cpu --layer-code eager,stock --tokens 128 --hidden 64 --heads 2:4 --dim 16, or --models tiny"
        )
    unknown = [name for name in arguments.layer_code.split(",") if name not in IMPLEMENTATIONS]
    if unknown:
        raise ValueError(f"--layer-code has {unknown[0]!r}: give some of {', '.join(IMPLEMENTATIONS)}")
    found = conditions(arguments.device) | {"command": f"hf-cp bench {' '.join(argv)}".strip()}
    columns = COLUMNS if arguments.table == "layer" else bench_step.COLUMNS
    rows: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        if not rows:
            print(f"{in_words(found)}\n\n{header_line(columns)}")
        rows.append(row)
        print(row_line(row, columns), flush=True)

    (_layer_table if arguments.table == "layer" else _step_table)(arguments, emit)
    if arguments.out is not None:
        label = ("layer code", "tokens")
        value = "both ms"
        if arguments.table == "step":
            label, value = ("model", *label, "checkpointing"), "tokens/s"
        for path in write(arguments.out, arguments.table, found, rows, label, value):
            _say(f"wrote {path}")
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
