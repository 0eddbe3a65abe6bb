"""What LoRA changes in the cost of a step: frozen weights need no gradients, and adapters are work of their own."""

from __future__ import annotations

import math

from .constants import constant as c
from .cost import Cluster, StepCost, host_seconds
from .memory import CHUNK_BYTES, Training
from .shape import FULL, LINEAR, ModelShape

LAYER_PARTS = ("delta rule layers", "attention", "MLP", "norms")
HOST = "waiting for the host"
# Bytes that an adapted linear moves a token, forward and as many backward, counted from PEFT's operators. An input is
# read by the first matrix; where autocast alone makes bf16, it is brought to fp32 and back to bf16 before. An output
# is written by the second matrix, scaled, and added to the frozen layer's.
INPUT_BYTES, INPUT_BYTES_AUTOCAST, OUTPUT_BYTES = 2, 14, 12


def adapter_seconds(shape: ModelShape, training: Training, layer_type: str) -> float:
    """Forward of the adapters of one layer."""
    linears = shape.linears(layer_type)
    products = 2 * training.tokens * shape.adapter_parameters(layer_type, training.lora) / c("matmul_rate")
    each_input = INPUT_BYTES_AUTOCAST if training.autocast else INPUT_BYTES
    moved = training.tokens * sum(each_input * inner + OUTPUT_BYTES * outer for inner, outer in linears)
    return products + moved / c("memory_rate")


def with_adapters(shape: ModelShape, training: Training, cluster: Cluster, cost: StepCost) -> StepCost:
    """The cost of a step with frozen weights and adapters of rank ``training.lora``.

    The time in which the host starts kernels is that of a step without adapters: theirs is not counted.

    Args:
        cost: of the same step with all weights trained.
    """
    L, rate = training.tokens, c("matmul_rate")
    compute, exposed, wire = dict(cost.compute), dict(cost.exposed), dict(cost.wire_bytes)
    # The products of the weights' gradients, and in the head the sum of them over chunks.
    linear = shape.mixer_parameters(LINEAR) - shape.taps * shape.conv_width
    compute["delta rule layers"] -= shape.linear_layers * 2 * L * linear / rate
    compute["attention"] -= shape.full_layers * 2 * L * shape.mixer_parameters(FULL) / rate
    compute["MLP"] -= len(shape.layer_types) * 2 * L * shape.active_mlp_parameters / rate
    summed = math.ceil(L * shape.vocab / CHUNK_BYTES) * c("loss_weight_bytes_triton") / c("memory_rate")
    compute["head and loss"] -= (2 * L / rate + summed) * shape.head_parameters
    adapters = shape.adapters(training.lora)
    compute["optimizer"] *= adapters / shape.parameters
    passes = 3 if training.checkpointing else 2  # a backward takes two products, but no more bytes
    each = {name: adapter_seconds(shape, training, name) for name in set(shape.layer_types)}
    compute["adapters"] = passes * sum(each[name] for name in shape.layer_types)
    compute["adapters"] += 2 * L * adapters / rate
    # Of what remains, the time in which the host starts it.
    started = ("adapters", "optimizer", "FSDP's copies", *LAYER_PARTS)
    compute[HOST] = max(0.0, sum(host_seconds(shape, training)) - sum(compute.get(part, 0.0) for part in started))
    if training.shards > 1:
        # Frozen weights are gathered, once outside the layers and twice inside; their gradients do not exist.
        share = 2 * (training.shards - 1) / training.shards
        root, inner = shape.root_parameters, 2 * (shape.parameters - shape.root_parameters) + 3 * adapters
        wire["FSDP"] = share * (root + inner)
        _, speed = cluster.rates(training.shards)
        exposed["FSDP"] = share * root / speed + max(0.0, share * inner / speed - sum(compute.values()))
    if "replicas" in wire:
        wire["replicas"] *= adapters / shape.parameters
        _, speed = cluster.rates(cluster.gpus)
        exposed["replicas"] = max(0.0, wire["replicas"] / speed - 0.5 * sum(compute.values()))
    return StepCost(compute, exposed, wire)
