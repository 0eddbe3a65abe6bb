"""Compiles the Triton kernels of a layer's sizes ahead of its first step.

python -m hf_cp.kernels.gdn.warm_up --heads 16:32 --dims 128:128 [--dtype bfloat16] [--backend triton]

Triton keeps what it compiled on disk (TRITON_CACHE_DIR, by default ~/.triton/cache), so a job that finds the cache
starts at once.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from . import layer
from .backend import get_backend
from .chunk import chunk_gated_delta_rule

# One length of each kind that Triton specialises a kernel for: one token, odd, a multiple of 16.
LENGTHS = (1, 1027, 2048)


def warm_up(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    taps: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "triton",
    device: torch.device | str = "cuda",
) -> float:
    """Runs every kernel of a layer of these sizes, forward, backward, packed, across ranks and decoding, on short rows.

    Args:
        key_heads, value_heads: H and HV. key_dim, value_dim: K and V. taps: k of the convolution. dtype: of the layer.
        backend: "triton" or "gluon".
    Returns:
        Seconds that it took.
    Raises:
        ValueError: sizes, dtype or a machine that the kernels do not serve.
    """
    started = time.perf_counter()
    widths = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]

    def ones(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    weight, norm_weight = ones(sum(widths), taps), ones(value_dim)
    # A model in 16 bits may keep these in fp32.
    A_log, dt_bias = ones(value_heads), ones(value_heads)
    state = ones(1, value_heads, key_dim, value_dim, dtype=torch.float32)
    for length in LENGTHS:
        x, a, z = ones(1, length, sum(widths)), ones(1, length, value_heads), ones(1, length, value_heads, value_dim)
        for packed in (False, True):
            offsets = torch.tensor([0, length], dtype=torch.int32, device=device) if packed else None
            for halo in (None, ones(1, taps - 1, sum(widths))):
                parts = layer.causal_conv1d(x, weight, halo, offsets, widths=widths, backend=backend)
                dims = (key_dim, key_dim, value_dim)
                q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
                g, beta = layer.gates(a, a, A_log, dt_bias, backend=backend)
                o, final_state = chunk_gated_delta_rule(
                    q,
                    k,
                    v,
                    g,
                    beta,
                    initial_state=None if halo is None else state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                    cu_seqlens=offsets,
                    backend=backend,
                )
                y = layer.gated_rms_norm(o, z, norm_weight, 1e-6, backend=backend)
                assert final_state is not None
                (y.float().sum() + final_state.sum()).backward()
        with torch.no_grad():
            stages = get_backend(backend)
            options: Any = {"use_qk_l2norm_in_kernel": True}
            stages.summary(k, v, g, beta, **options)
            stages.backward_state(q, k, g, beta, v, scale=1.0, **options)
    with torch.no_grad():
        conv_state = torch.zeros(1, sum(widths), taps, dtype=dtype, device=device)
        mixed = layer.conv_step(weight[None, :, 0], conv_state, weight)
        layer.delta_step(mixed, a[:, 0], a[:, 0], A_log, dt_bias, state.detach(), key_heads)
    if state.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", required=True, help="key and value heads, e.g. 16:32")
    parser.add_argument("--dims", required=True, help="key and value head dims, e.g. 128:128")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--backend", default="triton", choices=["triton", "gluon"])
    arguments = parser.parse_args()
    sizes = [int(n) for field in (arguments.heads, arguments.dims) for n in field.split(":")]
    print(f"{warm_up(*sizes, dtype=getattr(torch, arguments.dtype), backend=arguments.backend):.1f} s")


if __name__ == "__main__":
    main()
