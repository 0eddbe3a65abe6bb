"""Every number that the cost model is made of, with where it comes from, and the measurements it has to reproduce.

``ours`` marks what was measured with this package on H200 (141 GB; torch 2.11, Triton 3.6, 2026-11-30); the rest was
read elsewhere or assumed, as its source says. README.md beside this compares, and says which rows numbers were taken
from.
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


_HEADS = "s per token and value head of 128 x 128"
_IDLE = "of the time that a head takes among 32, more the fewer there are"
_CHANNEL = "B per token and channel"
_TRITON = "kernels/gdn/README.md, Triton stages, Measured: "
_GLUON = "kernels/gdn/README.md, Gluon stages, Measured: "
_LAYER = "kernels/gdn/README.md, Layer, measured"
# One card, 0.8B in bf16 with gluon: kernels of two steps at 8,192 tokens, with and without Liger's norms and MLPs, and
# of two with them at 32,768.
_TRACE = "kernel times in traces of a step, 0.8B, 8,192 and 32,768 tokens"

CONSTANTS: dict[str, Constant] = {
    "matmul_rate": Constant(
        7.0e14, "FLOP/s", f"{_TRACE}: 7.1e14 in layers, 6.7e14 to 7.4e14 in the head; 8192^3 alone 8.0e14", True
    ),
    "memory_rate": Constant(4.1e12, "B/s", f"device copy, {_LAYER}", True),
    "attention_forward_rate": Constant(
        6.3e14,
        "FLOP/s",
        f"causal sdpa, head dim 256: {_TRACE}, 6.7e14, and the step of 131,072 tokens, which is slower",
        True,
    ),
    "attention_backward_rate": Constant(3.65e14, "FLOP/s", "as attention_forward_rate; 3.8e14 in the trace", True),
    "attention_aligned_late": Constant(
        1.5,
        "of the operations",
        "LAYERS, all-gather with 16,384 local tokens: aligned at the last key, sdpa takes a slower kernel",
        True,
    ),
    "attention_forward_bytes": Constant(
        36, _CHANNEL, "norms of q and k, rotation, gate: LAYERS, full attention on one device, 32,768 tokens", True
    ),
    "attention_backward_bytes": Constant(60, _CHANNEL, "as attention_forward_bytes", True),
    "triton_forward_start": Constant(0.02e-3, "s", f"{_TRITON}spans, 8,192 and 32,768 tokens", True),
    "triton_forward": Constant(1.24e-9, _HEADS, f"{_TRITON}Kernels, sum", True),
    "triton_forward_idle": Constant(0.75, _IDLE, f"{_TRITON}spans, 32,768 tokens", True),
    "triton_backward_start": Constant(0.05e-3, "s", "as triton_forward_start", True),
    "triton_backward": Constant(3.80e-9, _HEADS, f"{_TRITON}32,768 tokens, whole, less the forward", True),
    "triton_backward_idle": Constant(0.53, _IDLE, "as triton_forward_idle", True),
    "triton_summary": Constant(0.87e-9, _HEADS, f"{_GLUON}Triton's prepare and chain of the summary", True),
    "gluon_forward_start": Constant(0.03e-3, "s", f"{_TRITON}spans, 8,192 tokens", True),
    "gluon_forward": Constant(0.73e-9, _HEADS, f"{_GLUON}forward, sum, less its start", True),
    "gluon_forward_idle": Constant(1.0, _IDLE, f"{_TRITON}spans, 32,768 tokens", True),
    "gluon_backward_start": Constant(0.03e-3, "s", "as gluon_forward_start", True),
    "gluon_backward": Constant(2.42e-9, _HEADS, f"{_GLUON}backward, sum, less its start; segments", True),
    "gluon_backward_idle": Constant(0.35, _IDLE, "as gluon_forward_idle", True),
    "gluon_summary": Constant(0.54e-9, _HEADS, f"{_GLUON}prepare and chain of the summary", True),
    "ulysses_copies": Constant(
        11,
        "B moved per byte that a rank holds",
        "recipes/README.md, Measured between GPUs: computing of a linear layer in the trace of Ulysses",
        True,
    ),
    "convolution_forward": Constant(1.05e-12, "s per token and channel", _LAYER, True),
    "convolution_backward": Constant(2.07e-12, "s per token and channel", _LAYER, True),
    "gated_norm_forward": Constant(1.39e-12, "s per token and channel", _LAYER, True),
    "gated_norm_backward": Constant(2.79e-12, "s per token and channel", _LAYER, True),
    "norm_forward_bytes": Constant(
        62, _CHANNEL, f"transformers' RMS norm and the sum beside it: {_TRACE}, what Liger's kernels save", True
    ),
    "norm_backward_bytes": Constant(160, _CHANNEL, "as norm_forward_bytes, and sums of gradients", True),
    "mlp_forward_bytes": Constant(10, "B per token and channel of ffn", "silu and product in bf16, counted", True),
    "mlp_backward_bytes": Constant(18, "B per token and channel of ffn", "as mlp_forward_bytes", True),
    "loss_bytes_triton": Constant(6.6, "B per logit", f"{_TRACE}: three passes in bf16, at 3.7 TB/s", True),
    "loss_weight_bytes_triton": Constant(
        8, "B per number of the head's weight and chunk of 1 GiB", "sum of the weight gradient, counted", True
    ),
    "loss_bytes_torch": Constant(80, "B per logit", "STEPS of the time less all else: 20 passes in fp32", True),
    "loss_weight_bytes_torch": Constant(
        16, "B per number of the head's weight and chunk of 512 MiB", "sum of the weight gradient, counted", True
    ),
    "optimizer_bytes_mixed": Constant(50, "B per parameter", "clipping and fused AdamW, STEPS", True),
    "optimizer_bytes_bf16": Constant(31, "B per parameter", f"the same, {_TRACE}", True),
    "fsdp_copies": Constant(
        4, "B per parameter gathered or reduced", "counted: out of what was gathered, into what is reduced, bf16", True
    ),
    "fsdp_casts": Constant(6, "B per parameter of a rank's own, each time", "counted: fp32 to bf16, or back", True),
    # An input is read by the first matrix; where autocast alone makes bf16, it is brought to fp32 and back to bf16
    # before. An output is written by the second matrix, scaled, and added to the frozen layer's.
    "adapter_input_bytes": Constant(2, _CHANNEL, "counted from PEFT's operators; forward, and backward as many", True),
    "adapter_input_bytes_autocast": Constant(14, _CHANNEL, "as adapter_input_bytes", True),
    "adapter_output_bytes": Constant(12, _CHANNEL, "as adapter_input_bytes", True),
    "host_forward": Constant(2.3e-3, "s per layer", "STEPS of 8,192 tokens: the host starts kernels", True),
    "host_backward": Constant(2.7e-3, "s per layer", "as host_forward", True),
    "host_ranks_begin": Constant(
        10e-3, "s", "STEPS on two ranks, vocabulary 4,096, local 2,048 and 4,096: the host had more work then", True
    ),
    "host_ranks_forward": Constant(5.8e-3, "s per layer", "as host_ranks_begin", True),
    "host_ranks_backward": Constant(
        9.2e-3, "s per layer", "as host_ranks_begin; with its share of the optimizer", True
    ),
    "host_ranks_end": Constant(5e-3, "s", "as host_ranks_begin", True),
    "nvlink_rate": Constant(366e9, "B/s per GPU and direction", "kernels/a2a_gemm/README.md, Floors; two H200", True),
    "state_hop": Constant(
        40e-6, "s for 2 MiB, NCCL, two H200", "kernels/gdn: state chain; the reference report saw 120 to 140 us", True
    ),
    "state_apply": Constant(8e-6, "s for M S + h of 32 heads", "assumed: one small batched product in fp32", False),
    "collective_start": Constant(30e-6, "s", "assumed: NCCL's latency of one collective within a node", False),
    "ring_step": Constant(3.5e-6, "s", "assumed: added latency of each rank of NCCL's ring within a node", False),
    "network_rate": Constant(42e9, "B/s per GPU and direction", "assumed: 400 Gb/s a GPU at 85 %; not measured", False),
    "network_start": Constant(15e-6, "s", "assumed: added latency of a message between nodes; not measured", False),
}


def constant(name: str) -> float:
    return CONSTANTS[name].value


# What the model has to reproduce: times within 15 %, memory within 6 % (tests/test_plan.py). ``fitted`` marks rows that
# a number above was taken from; the others check.


def _rows(names: str, *rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# One token mixer, forward and backward: hidden 2,048, Gated DeltaNet with heads 16/32 of 128 or full attention with 8/2
# of 256, bf16. `hf-cp bench --table layer`, on one device and between two. Gated DeltaNet with gluon: with the host
# ahead. The others were begun on idle devices.
LAYERS: list[dict[str, Any]] = _rows(
    "layer code ranks mode local_tokens ms fitted",
    ("linear", "triton", 1, "p2p", 8192, 4.54, False),
    ("linear", "triton", 1, "p2p", 32768, 16.4, False),
    ("linear", "gluon", 1, "p2p", 8192, 3.58, False),
    ("linear", "gluon", 1, "p2p", 16384, 6.99, False),
    ("linear", "gluon", 1, "p2p", 32768, 13.8, False),
    ("linear", "gluon", 1, "p2p", 65536, 27.9, False),
    ("linear", "gluon", 2, "p2p", 8192, 3.97, False),
    ("linear", "gluon", 2, "p2p", 16384, 7.62, False),
    ("linear", "gluon", 2, "p2p", 32768, 15.4, False),
    ("linear", "gluon", 2, "allgather", 8192, 3.99, False),
    ("linear", "gluon", 2, "allgather", 16384, 7.66, False),
    ("linear", "gluon", 2, "allgather", 32768, 15.4, False),
    ("linear", "gluon", 2, "ulysses", 8192, 5.39, False),
    ("linear", "gluon", 2, "ulysses", 16384, 10.4, False),
    ("linear", "gluon", 2, "ulysses", 32768, 20.3, False),
    ("full", "gluon", 1, "ulysses", 8192, 5.71, False),
    ("full", "gluon", 1, "ulysses", 16384, 14.9, False),
    ("full", "gluon", 1, "ulysses", 32768, 47.0, True),
    ("full", "gluon", 2, "ulysses", 8192, 8.95, False),
    ("full", "gluon", 2, "ulysses", 16384, 25.6, False),
    ("full", "gluon", 2, "allgather", 8192, 15.4, False),
    ("full", "gluon", 2, "allgather", 16384, 50.0, True),
)

# Training steps with clipping and fused AdamW; peak of allocated memory. `hf-cp bench --table step`, of shapes by name,
# cut to their first layers and, where given, to a vocabulary. On two ranks under FSDP2, attention in Ulysses mode.
# ``loss="torch"``: measured before heads on kernels took their loss in Triton.
_STEP = "model vocab layers ranks mode tokens checkpointing precision code loss ms gib fitted"


def _modes(vocab: int, layers: int, local: int, full: bool, fitted: str, ms: str, gib: str) -> list[dict[str, Any]]:
    """Rows of p2p, allgather and ulysses on two ranks.

    Args:
        fitted: the modes that were. ms: of each. gib: of the first two, which are alike, and of ulysses.
    """
    state_passing, ulysses = map(float, gib.split())
    memory = (state_passing, state_passing, ulysses)
    rows = []
    for mode, time, peak in zip(("p2p", "allgather", "ulysses"), map(float, ms.split()), memory, strict=True):
        model = ("report", vocab, layers, 2, mode, 2 * local, full)
        rows.append((*model, "mixed", "gluon", "triton", time, peak, mode in fitted.split()))
    return _rows(_STEP, *rows)


STEPS: list[dict[str, Any]] = [
    *_rows(
        _STEP,
        ("0.8B", 248320, 24, 1, "p2p", 8192, False, "bf16", "triton", "triton", 175, 23.3, False),
        ("0.8B", 248320, 24, 1, "p2p", 8192, False, "bf16", "gluon", "triton", 146, 23.3, True),
        ("0.8B", 248320, 24, 1, "p2p", 32768, False, "bf16", "triton", "triton", 686, 71.8, False),
        ("0.8B", 248320, 24, 1, "p2p", 32768, False, "bf16", "gluon", "triton", 662, 71.7, True),
        ("0.8B", 248320, 24, 1, "p2p", 131072, True, "mixed", "gluon", "triton", 6582, 35.3, False),
        ("0.8B", 248320, 24, 1, "p2p", 32768, False, "bf16", "triton", "torch", 888.9, 71.35, True),
        ("0.8B", 248320, 24, 1, "p2p", 32768, True, "mixed", "triton", "torch", 1067.2, 15.92, False),
        ("0.8B", 248320, 24, 1, "p2p", 131072, True, "mixed", "triton", "torch", 7393.0, 35.28, True),
        ("0.8B", 248320, 8, 1, "p2p", 262144, True, "mixed", "triton", "torch", 9384.1, 41.40, False),
        ("4B", 248320, 8, 1, "p2p", 8192, False, "mixed", "triton", "torch", 273.2, 44.05, False),
        ("4B", 248320, 8, 1, "p2p", 32768, True, "mixed", "triton", "torch", 1221.6, 37.83, False),
    ),
    *_modes(248320, 4, 2048, False, "", "86.9 91.1 96.9", "13.46 13.46"),
    *_modes(248320, 8, 2048, False, "", "144.9 151.0 173.0", "16.06 16.05"),
    *_modes(248320, 4, 4096, False, "", "96.7 95.4 112.1", "15.32 15.32"),
    *_modes(248320, 8, 4096, False, "", "161.8 153.6 169.8", "19.02 19.00"),
    *_modes(248320, 4, 16384, False, "", "218.1 216.9 224.7", "22.20 22.20"),
    *_modes(248320, 8, 16384, False, "", "311.2 308.4 331.1", "32.50 32.49"),
    *_modes(248320, 4, 16384, True, "ulysses", "242 249 263", "13.6 13.6"),
    *_modes(4096, 4, 2048, False, "p2p allgather ulysses", "67.9 75.6 80.5", "3.11 3.10"),
    *_modes(4096, 8, 2048, False, "p2p allgather ulysses", "126 131 145", "5.71 5.69"),
    *_modes(4096, 4, 4096, False, "p2p allgather ulysses", "77.5 69.2 78.7", "4.26 4.26"),
    *_modes(4096, 8, 4096, False, "p2p allgather ulysses", "125 137 144", "7.96 7.95"),
    *_modes(4096, 4, 16384, False, "", "101 105 111", "11.4 11.3"),
    *_modes(4096, 8, 16384, False, "", "199 205 217", "21.6 21.6"),
]
