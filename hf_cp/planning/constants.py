"""Every number that the cost model is made of, with where it comes from, and the measurements it has to reproduce.

``ours`` marks what was measured with this package on one H200 (141 GB; torch 2.11, Triton 3.6, 2026-11-30); the rest
was read elsewhere or assumed, as its source says. README.md beside this compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Constant:
    """A number, its unit, and its source."""

    value: float
    unit: str
    source: str
    ours: bool


CONSTANTS: dict[str, Constant] = {
    "matmul_rate": Constant(
        7.0e14, "FLOP/s", "bf16 products inside training steps, STEPS below; 8192^3 alone reaches 8.0e14", True
    ),
    "memory_rate": Constant(4.1e12, "B/s", "device copy, kernels/gdn/README.md, Layer, measured", True),
    "attention_forward_rate": Constant(
        4.9e14, "FLOP/s", "causal sdpa, head dim 256, from the steps of 131,072 and 262,144 tokens in STEPS", True
    ),
    "attention_backward_rate": Constant(3.6e14, "FLOP/s", "as attention_forward_rate", True),
    "delta_rule_start": Constant(0.15e-3, "s", "kernels/gdn/README.md, Triton stages, Measured: forward over T", True),
    "delta_rule_forward": Constant(1.40e-9, "s per token and value head of 128 x 128", "as delta_rule_start", True),
    "delta_rule_backward_start": Constant(0.65e-3, "s", "as delta_rule_start: backward over T", True),
    "delta_rule_backward": Constant(3.52e-9, "s per token and value head of 128 x 128", "as delta_rule_start", True),
    "delta_rule_full_heads": Constant(
        12.6, "value heads", "the same: 32,768 tokens of 4 value heads take what as many of 12.6 would", True
    ),
    "summary": Constant(
        0.87e-9,
        "s per token and value head of 128 x 128",
        "kernels/gdn/README.md, Gluon stages, Measured: Triton's prepare and chain of the summary",
        True,
    ),
    "convolution_forward": Constant(
        1.05e-12, "s per token and channel", "kernels/gdn/README.md, Layer, measured", True
    ),
    "convolution_backward": Constant(2.07e-12, "s per token and channel", "as convolution_forward", True),
    "gated_norm_forward": Constant(1.39e-12, "s per token and channel", "as convolution_forward", True),
    "gated_norm_backward": Constant(2.79e-12, "s per token and channel", "as convolution_forward", True),
    "norm_forward_bytes": Constant(40, "B per token and channel", "operators of transformers' RMS norm, counted", True),
    "norm_backward_bytes": Constant(70, "B per token and channel", "as norm_forward_bytes", True),
    "mlp_forward_bytes": Constant(10, "B per token and channel of ffn", "silu and product in bf16, counted", True),
    "mlp_backward_bytes": Constant(18, "B per token and channel of ffn", "as mlp_forward_bytes", True),
    "loss_passes": Constant(
        20,
        "passes over logits in fp32",
        "forward of the steps in STEPS less layers, products and weight gradient",
        True,
    ),
    "loss_weight_bytes": Constant(
        16, "B per number of the head's weight and chunk of 512 MiB", "sum of the weight gradient, counted", True
    ),
    "optimizer_bytes_mixed": Constant(50, "B per parameter", "clipping and fused AdamW, STEPS", True),
    "optimizer_bytes_bf16": Constant(28, "B per parameter", "as optimizer_bytes_mixed", True),
    "host_forward": Constant(2.9e-3, "s per layer", "steps of 8,192 tokens in STEPS: the host starts kernels", True),
    "host_backward": Constant(3.3e-3, "s per layer", "as host_forward", True),
    "nvlink_rate": Constant(366e9, "B/s per GPU and direction", "kernels/a2a_gemm/README.md, Floors; two H200", True),
    "state_hop": Constant(
        40e-6, "s for 2 MiB, NCCL, two H200", "kernels/gdn: state chain; the reference report saw 120 to 140 us", True
    ),
    "state_apply": Constant(8e-6, "s for M S + h of 32 heads", "assumed: one small batched product in fp32", False),
    "collective_start": Constant(30e-6, "s", "assumed: NCCL's latency of one collective within a node", False),
    "network_rate": Constant(42e9, "B/s per GPU and direction", "assumed: 400 Gb/s a GPU at 85 %; not measured", False),
    "network_start": Constant(15e-6, "s", "assumed: added latency of a message between nodes; not measured", False),
}


def constant(name: str) -> float:
    return CONSTANTS[name].value


# What the model has to reproduce: times within 11 %, memory within 5 % (tests/test_plan.py).

# A Gated DeltaNet layer, forward and backward; hidden 2,048, heads 16/32 of 128, bf16. `python -m hf_cp.bench`.
LAYERS: list[dict[str, Any]] = [{"tokens": 8192, "ms": 5.340}, {"tokens": 32768, "ms": 16.626}]

# Training steps, one H200, `gdn_backend="triton"`, clipping and fused AdamW; peak of allocated memory.
# `hf-cp bench --table step`; the shape by name of `shape.PUBLISHED`, cut to its first layers.
_STEP = ("model", "layers", "tokens", "checkpointing", "precision", "forward_ms", "backward_ms", "optimizer_ms", "gib")
STEPS: list[dict[str, Any]] = [
    dict(zip(_STEP, row, strict=True))
    for row in (
        ("0.8B", 24, 8192, False, "mixed", 150.7, 91.5, 13.1, 29.95),
        ("0.8B", 24, 8192, False, "bf16", 143.0, 80.7, 5.7, 22.89),
        ("0.8B", 24, 32768, False, "bf16", 458.3, 424.9, 5.7, 71.35),
        ("0.8B", 24, 32768, True, "mixed", 459.8, 598.7, 8.7, 15.92),
        ("0.8B", 24, 131072, True, "mixed", 2378.2, 5006.0, 8.8, 35.28),
        ("0.8B", 8, 262144, True, "mixed", 3691.3, 5687.8, 5.0, 41.40),
        ("4B", 8, 8192, False, "mixed", 161.0, 85.9, 26.3, 44.05),
        ("4B", 8, 32768, True, "mixed", 636.8, 557.8, 27.0, 37.83),
    )
]
