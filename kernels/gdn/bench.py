"""Times the stages of a backend, and the public kernels where they are installed, on one GPU.

python -m hf_cp.kernels.gdn.bench [--backends triton,gluon,eager,fla,flash_qla] [--shapes 8192:16:32,32768:16:32]

A backend whose outputs or gradients miss fp64 by more than BOUND is not timed. Each row: tokens, key and value heads,
median milliseconds of forward, backward and both, and peak MiB beyond the inputs, of 20 runs after 5, each waited for.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F

from . import eager
from .backend import get_backend
from .chunk import chunk_gated_delta_rule

BOUND = 5.86e-3
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
Operator = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def inputs(seq_len: int, key_heads: int, value_heads: int, dim: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v, g, beta, initial_state as leaves, and the gradients of o and of the final state."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (randn(1, seq_len, key_heads, dim).bfloat16() for _ in range(2))
    v = randn(1, seq_len, value_heads, dim).bfloat16()
    decay = torch.rand(value_heads, device="cuda", generator=generator) * 16
    g = -decay * F.softplus(randn(1, seq_len, value_heads) + 1) * 0.05
    beta = randn(1, seq_len, value_heads).sigmoid().bfloat16()
    state = randn(1, value_heads, dim, dim)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
    return leaves, [randn(1, seq_len, value_heads, dim).bfloat16(), randn(1, value_heads, dim, dim)]


def operators(names: list[str]) -> dict[str, Operator]:
    """The operators under their common signature: (q, k, v, g, beta, initial_state) to (o, final_state)."""
    found: dict[str, Operator] = {}
    options: Any = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for name in names:
        if name in ("eager", "triton", "gluon"):
            get_backend(name)
            found[name] = lambda q, k, v, g, beta, state, name=name: chunk_gated_delta_rule(
                q, k, v, g, beta, initial_state=state, backend=name, **options
            )
        elif name == "fla":
            from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
                chunk_gated_delta_rule as fla,
            )

            found[name] = lambda q, k, v, g, beta, state: fla(q, k, v, g=g, beta=beta, initial_state=state, **options)
        elif name == "flash_qla":
            from flash_qla import chunk_gated_delta_rule as qla  # pyright: ignore[reportMissingImports]

            found[name] = lambda q, k, v, g, beta, state: qla(q, k, v, g, beta, initial_state=state, **options)
        else:
            raise ValueError(f"--backends has {name!r}: pass some of eager, triton, gluon, fla, flash_qla")
    return found


def gradients(operator: Operator, leaves: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    o, final_state = operator(*leaves)
    assert final_state is not None
    return [o.detach(), final_state.detach(), *torch.autograd.grad([o, final_state], leaves, grads)]


def errors(operator: Operator, key_heads: int, value_heads: int, dim: int) -> dict[str, float]:
    """Relative L2 errors against fp64 at 8,192 tokens."""
    leaves, grads = inputs(8192, key_heads, value_heads, dim)
    actual = gradients(operator, leaves, grads)
    q, k, v, g, beta, state, do, dfinal_state = (x.detach().double() for x in (*leaves, *grads))
    options: Any = {"scale": dim**-0.5, "use_qk_l2norm_in_kernel": True}
    expected = [
        *eager.forward(q, k, v, g, beta, initial_state=state, **options),
        *eager.backward(q, k, v, g, beta, state, do, dfinal_state, **options),
    ]
    return {name: float((x.double() - y).norm() / y.norm()) for name, x, y in zip(NAMES, actual, expected, strict=True)}


def median_ms(function: Callable[[], object], warmup: int = 5, repeats: int = 20) -> float:
    for _ in range(warmup):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def measure(operator: Operator, seq_len: int, key_heads: int, value_heads: int, dim: int) -> tuple[float, ...]:
    leaves, grads = inputs(seq_len, key_heads, value_heads, dim)

    def forward() -> None:
        with torch.no_grad():
            operator(*leaves)

    forward_ms = median_ms(forward)
    both_ms = median_ms(lambda: gradients(operator, leaves, grads))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(operator, leaves, grads)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return forward_ms, both_ms - forward_ms, both_ms, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="triton")
    parser.add_argument("--shapes", default="8192:16:32,16384:16:32,32768:16:32,65536:16:32,32768:32:32,32768:2:4")
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("hf_cp.kernels.gdn.bench: PyTorch sees no CUDA GPU: run it where there is one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {version('triton')}, BF16, B=1")
    print("| backend | tokens | heads | forward ms | backward ms | both ms | peak MiB |\n|---|---|---|---|---|---|---|")
    for name, operator in operators(arguments.backends.split(",")).items():
        for shape in arguments.shapes.split(","):
            seq_len, key_heads, value_heads = map(int, shape.split(":"))
            started = time.perf_counter()
            found = errors(operator, key_heads, value_heads, arguments.dim)
            torch.cuda.synchronize()
            if time.perf_counter() - started > 30:
                print(f"({name} took {time.perf_counter() - started:.0f} s to compile)")
            wrong = {key: f"{value:.1e}" for key, value in found.items() if not value < BOUND}
            if wrong:
                print(f"| {name} | {seq_len} | {key_heads}/{value_heads} | not timed, wrong: {wrong} |", flush=True)
                continue
            row = measure(operator, seq_len, key_heads, value_heads, arguments.dim)
            print(
                f"| {name} | {seq_len} | {key_heads}/{value_heads} | "
                f"{row[0]:.3f} | {row[1]:.3f} | {row[2]:.3f} | {row[3]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
