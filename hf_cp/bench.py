"""Times a complete Gated DeltaNet layer, patched and stock, on one GPU.

python -m hf_cp.bench [--layers triton,stock] [--tokens 8192,32768] [--hidden 2048 --heads 16:32 --dim 128]

The layer is projections, convolution, delta rule, gated norm and output projection of Qwen3.5, in bfloat16 with random
weights. "triton" and "eager" are the layer patched with that backend on one rank, "stock" is transformers' own. A layer
whose output or gradients are more than twice as far from fp64 as stock's bfloat16 is not timed. Each row: median
milliseconds of forward, backward and both of 20 runs after 5 (of 3 after 1 for stock and eager, whose torch loops take
long), each waited for, and peak MiB beyond weights and inputs.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from .config import PatchConfig
from .context import CpContext
from .kernels.gdn.bench import median_ms
from .layout import ShardLayout
from .mesh import CpMesh

CHECKED_TOKENS = 2048
Layer = Callable[[torch.Tensor], torch.Tensor]


def make_model(hidden: int, key_heads: int, value_heads: int, dim: int) -> Any:
    """A decoder of one Gated DeltaNet layer on the GPU in bfloat16, the same weights on every call."""
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
    )
    torch.manual_seed(0)
    model: Any = Qwen3_5TextModel(config)
    return model.to("cuda", torch.bfloat16)


def make_layer(name: str, model: Any, tokens: int) -> tuple[Layer, list[torch.nn.Parameter]]:
    """The layer as a function of ``[1, T, D]``, and its parameters."""
    from .patch import patch

    layer = model.layers[0].linear_attn
    parameters = list(layer.parameters())
    if name == "stock":
        return layer, parameters
    patch(model, gdn_backend=name)
    layout = ShardLayout(tokens, 1, 0)
    context = CpContext(PatchConfig(gdn_backend=name), CpMesh.single(), layout, layout.one_document())
    return lambda x: layer(x, cp_context=context), parameters


def results(
    layer: Layer, parameters: list[torch.nn.Parameter], x: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    """Output, and gradients of the input and of all parameters."""
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)]


def inputs(tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(1, tokens, hidden, device="cuda", generator=generator).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def errors(name: str, sizes: dict[str, int]) -> list[float]:
    """Relative L2 distances to fp64 of all results."""
    model = make_model(**sizes)
    x, dy = inputs(CHECKED_TOKENS, sizes["hidden"])
    found = results(*make_layer(name, model, CHECKED_TOKENS), x, dy)
    exact_model = make_model(**sizes).double()
    exact = make_layer("eager", exact_model, CHECKED_TOKENS)
    expected = results(*exact, x.detach().double().requires_grad_(), dy.double())
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def measure(name: str, tokens: int, sizes: dict[str, int]) -> tuple[float, float, float]:
    """Milliseconds of forward, and of forward and backward, and peak MiB."""
    layer, parameters = make_layer(name, make_model(**sizes), tokens)
    x, dy = inputs(tokens, sizes["hidden"])
    runs = (5, 20) if name == "triton" else (1, 3)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    forward_ms = median_ms(forward, *runs)
    both_ms = median_ms(lambda: results(layer, parameters, x, dy), *runs)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(layer, parameters, x, dy)
    torch.cuda.synchronize()
    return forward_ms, both_ms, (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="triton,stock")
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", default="16:32")
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()
    key_heads, value_heads = map(int, arguments.heads.split(":"))
    sizes = {"hidden": arguments.hidden, "key_heads": key_heads, "value_heads": value_heads, "dim": arguments.dim}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "transformers"))
    print(f"{torch.cuda.get_device_name()}, {versions}, BF16, B=1, {sizes}")
    bounds = [2 * error for error in errors("stock", sizes)]
    print("| layer | tokens | forward ms | backward ms | both ms | peak MiB |\n|---|---|---|---|---|---|")
    for name in arguments.layers.split(","):
        found = errors(name, sizes)
        if not all(error <= bound for error, bound in zip(found, bounds, strict=True)):
            raise SystemExit(f"{name} is not timed: errors against fp64 {found}, of which at most {bounds} is allowed")
        print(f"{name}: largest error against fp64 {max(found):.1e}, stock's {max(bounds) / 2:.1e}")
        for tokens in map(int, arguments.tokens.split(",")):
            forward_ms, both_ms, peak = measure(name, tokens, sizes)
            row = f"| {name} | {tokens} | {forward_ms:.3f} | {both_ms - forward_ms:.3f} | {both_ms:.3f} | {peak:.0f} |"
            print(row, flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
