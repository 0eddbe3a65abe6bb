"""Seconds of a training step and bytes on the wire, of one rank, from `constants`.

Compute is counted by part; what a rank waits for of its exchanges is added, less what the layer computes meanwhile.
Where layers are so short that the host cannot start their kernels in time, the rest of its time is a part of its own.
T tokens of a sequence, L tokens a rank, W ranks that share it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from .constants import constant as c
from .memory import CHUNK_BYTES, Training
from .shape import FULL, LINEAR, ModelShape


@dataclass(frozen=True)
class Cluster:
    """GPUs and how they hang together.

    Args:
        gpus: of the whole job. gpus_per_node: joined by NVLink; nodes are joined by the network.
    """

    gpus: int
    gpus_per_node: int = 8

    def rates(self, ranks: int) -> tuple[float, float]:
        """Latency and bytes a second of a message to the next of so many neighbouring ranks, at the slowest place."""
        if ranks <= self.gpus_per_node:
            return 0.0, c("nvlink_rate")
        return c("network_start"), c("network_rate")

    def all_to_all(self, payload: float, ranks: int) -> float:
        """Seconds of an all-to-all of which each rank holds ``payload`` bytes."""
        inside = min(ranks, self.gpus_per_node)
        seconds = c("collective_start") + payload * (inside - 1) / ranks / c("nvlink_rate")
        if ranks > inside:
            seconds += c("network_start") + payload * (ranks - inside) / ranks / c("network_rate")
        return seconds

    def all_gather(self, payload: float, ranks: int) -> float:
        """Seconds of an all-gather to which each rank gives ``payload`` bytes, or of its reduce-scatter."""
        latency, rate = self.rates(ranks)
        return c("collective_start") + latency * math.log2(max(ranks, 2)) + payload * (ranks - 1) / rate


@dataclass(frozen=True)
class StepCost:
    """Seconds of one rank's step, the slowest rank's where they differ.

    Args:
        compute: by part, forward, backward and recomputation together.
        exposed: waiting for exchanges, by kind.
        wire_bytes: sent by a rank a step, by kind.
    """

    compute: dict[str, float]
    exposed: dict[str, float]
    wire_bytes: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.compute.values()) + sum(self.exposed.values())


def refusals(shape: ModelShape, training: Training) -> list[str]:
    """Why the head counts do not allow these modes, a line each."""
    found, W = [], training.cp_size
    if training.linear_mode == "ulysses" and shape.linear_layers and (shape.key_heads % W or shape.value_heads % W):
        found.append(f"linear_mode=ulysses: {shape.key_heads}/{shape.value_heads} heads are not divisible by {W}")
    if training.attention_mode == "ulysses" and shape.full_layers and shape.query_heads % W:
        found.append(f"attention_mode=ulysses: {shape.query_heads} query heads are not divisible by {W}")
    return found


def delta_rule_seconds(
    shape: ModelShape, tokens: int, heads: float, gdn_backend: str = "triton"
) -> tuple[float, float]:
    """Forward and backward of the kernels for some value heads; few heads leave multiprocessors idle.

    Args:
        gdn_backend: ``"triton"`` or ``"gluon"``.
    """
    full = c(f"{gdn_backend}_full_heads")
    size = tokens * max(heads, full) * shape.key_dim * shape.value_dim / 128**2
    forward = c(f"{gdn_backend}_forward_start") + c(f"{gdn_backend}_forward") * size
    return forward, c(f"{gdn_backend}_backward_start") + c(f"{gdn_backend}_backward") * size


def linear_mixer_seconds(shape: ModelShape, training: Training, gdn_backend: str = "triton") -> tuple[float, float]:
    """Forward and backward of one Gated DeltaNet layer's own computing."""
    L, W = training.tokens, training.cp_size
    products = 2 * L * (shape.mixer_parameters(LINEAR) - shape.taps * shape.conv_width) / c("matmul_rate")
    forward = products + L * shape.conv_width * c("convolution_forward")
    forward += L * shape.value_width * c("gated_norm_forward")
    backward = 2 * products + L * shape.conv_width * c("convolution_backward")
    backward += L * shape.value_width * c("gated_norm_backward")
    extra = 0.0
    if training.linear_mode == "ulysses":
        core = delta_rule_seconds(shape, L * W, shape.value_heads / W, gdn_backend)
        if W > 1:
            extra = _ulysses_copies(sum(_linear_payloads(shape, training)))
    else:
        core = delta_rule_seconds(shape, L, shape.value_heads, gdn_backend)
        if W > 1:
            size = L * shape.value_heads * shape.key_dim * shape.value_dim / 128**2
            extra = c(f"{gdn_backend}_summary") * size
    return forward + core[0] + extra, backward + core[1] + extra


def attention_seconds(shape: ModelShape, training: Training) -> tuple[float, float]:
    """Forward and backward of one full attention layer's own computing, on the rank with most keys."""
    T, L, W = training.seq_len, training.tokens, training.cp_size
    causal = 2 * training.batch * T * T * shape.query_width / W  # half of the square, two products
    copies = 0.0
    if W > 1 and training.attention_mode == "allgather":
        causal *= (2 * W - 1) / W * c("attention_aligned_late")
    elif W > 1:
        copies = _ulysses_copies(sum(_attention_payloads(shape, training)))
    products = 2 * L * shape.mixer_parameters(FULL) / c("matmul_rate")
    width = L * (4 * shape.query_width + 2 * shape.kv_width) / c("memory_rate")
    forward = causal / c("attention_forward_rate") + products + width * c("attention_forward_bytes")
    backward = 2.5 * causal / c("attention_backward_rate") + 2 * products + width * c("attention_backward_bytes")
    return forward + copies, backward + copies


def _linear_payloads(shape: ModelShape, training: Training) -> tuple[float, float]:
    """Bytes that a rank holds of what Ulysses exchanges in a Gated DeltaNet layer, there and back."""
    return (
        training.tokens * (2 * shape.conv_width + 6 * shape.value_heads),
        2 * training.tokens * shape.value_width,
    )


def _attention_payloads(shape: ModelShape, training: Training) -> tuple[float, float]:
    """The same in full attention, with key/value heads repeated until every rank has one."""
    kv = max(shape.kv_width, shape.head_dim * training.cp_size)
    return 2 * training.tokens * (shape.query_width + 2 * kv), 2 * training.tokens * shape.query_width


def _ulysses_copies(payload: float) -> float:
    """Seconds of bringing what Ulysses exchanges into the order of ranks, and out of it."""
    return c("ulysses_copies") * payload / c("memory_rate")


def head_seconds(shape: ModelShape, training: Training, loss: str = "triton") -> float:
    """Head and loss, whose gradients are computed with them, chunk by chunk.

    Args:
        loss: ``"triton"``, or ``"torch"`` as ``gdn_backend="eager"`` has it.
    """
    L = training.tokens
    products = 6 * L * shape.head_parameters / c("matmul_rate")
    logits = L * shape.vocab
    # A chunk is 512 MiB of logits in fp32, or 1 GiB in bf16.
    chunks = math.ceil(4 * logits / CHUNK_BYTES / (4 if loss == "triton" else 1))
    moved = c(f"loss_bytes_{loss}") * logits + chunks * c(f"loss_weight_bytes_{loss}") * shape.head_parameters
    return products + moved / c("memory_rate")


def host_seconds(shape: ModelShape, training: Training) -> tuple[float, float]:
    """What the host takes to start the kernels of the layers' forward, and of all that follows the loss."""
    count, replays = len(shape.layer_types), 1 if training.checkpointing else 0
    several = training.shards > 1 or training.cp_size > 1
    kind = "host_ranks" if several else "host"
    forward, backward = count * c(f"{kind}_forward"), count * c(f"{kind}_backward")
    begins, ends = (c("host_ranks_begin"), c("host_ranks_end")) if several else (0.0, 0.0)
    return begins + forward, replays * forward + backward + ends


def state_seconds(shape: ModelShape, training: Training, cluster: Cluster, way: str) -> float:
    """Until the last rank has the state that enters it, once, in one direction.

    Args:
        way: ``"chain"`` (a hop after another, what p2p does), ``"allgather"`` (all summaries, folded by each rank),
            ``"scan"`` (log2 W rounds that join summaries of twice as many ranks; not implemented, for comparison).
    """
    W = training.cp_size
    if W == 1:
        return 0.0
    heads = training.batch * shape.value_heads
    state = 4 * heads * shape.key_dim * shape.value_dim
    summary = state + 4 * heads * shape.key_dim**2
    apply = c("state_apply") * max(1, heads / 32)

    def hop(size: float, far: bool) -> float:
        rate = c("network_rate") if far else c("nvlink_rate")
        known = 2 * 2**20 / c("nvlink_rate")  # what of the measured hop is the size's
        return c("state_hop") - known + size / rate + (c("network_start") if far else 0) + apply

    far_hops = (W - 1) // cluster.gpus_per_node if cluster.gpus_per_node < W else 0
    if way == "chain":
        return (W - 1 - far_hops) * hop(state, False) + far_hops * hop(state, True)
    if way == "allgather":
        return cluster.all_gather(summary, W) + (W - 1) * apply
    rounds = math.ceil(math.log2(W))
    near = min(rounds, math.ceil(math.log2(cluster.gpus_per_node)))
    return near * (hop(summary, False) + apply) + (rounds - near) * (hop(summary, True) + apply)


def _runs_of_linear_layers(shape: ModelShape) -> int:
    return sum(kind == LINEAR for kind, _ in itertools.groupby(shape.layer_types))


def step_cost(
    shape: ModelShape, training: Training, cluster: Cluster, way: str | None = None, gdn_backend: str = "triton"
) -> StepCost:
    """A whole step: forward, backward, recomputation where asked for, optimizer, exchanges.

    Args:
        way: how states travel, as for `state_seconds`; by default what ``linear_mode`` does.
        gdn_backend: as for `delta_rule_seconds`.
    """
    way = way or {"p2p": "chain"}.get(training.linear_mode, training.linear_mode)
    L, W, D = training.tokens, training.cp_size, shape.hidden
    count, replays = len(shape.layer_types), 2 if training.checkpointing else 1
    memory = c("memory_rate")

    # Computing: forward and backward of the layers.
    products = 2 * L * shape.active_mlp_parameters / c("matmul_rate")
    width = L * (shape.ffn + shape.experts_per_token * shape.expert_ffn) / memory
    mlp = products + width * c("mlp_forward_bytes"), 2 * products + width * c("mlp_backward_bytes")
    norms = 2 * L * D * c("norm_forward_bytes") / memory, 2 * L * D * c("norm_backward_bytes") / memory
    layers = {
        "delta rule layers": (shape.linear_layers, linear_mixer_seconds(shape, training, gdn_backend)),
        "attention": (shape.full_layers, attention_seconds(shape, training)),
        "MLP": (count, mlp),
        "norms": (count, norms),
    }
    owned = shape.parameters / training.shards
    compute = {name: number * (replays * part[0] + part[1]) for name, (number, part) in layers.items()}
    compute["head and loss"] = head_seconds(shape, training)
    compute["optimizer"] = owned * c(f"optimizer_bytes_{training.precision}") / memory
    if training.shards > 1:
        compute["FSDP's copies"] = shape.parameters * c("fsdp_copies") / memory
    # Where layers are short, the host is what takes the time, in forward or from then on. It gets ahead while the
    # head's long kernels run, but not by what they take.
    forward = sum(number * part[0] for number, part in layers.values())
    then = sum(compute.values()) - compute["head and loss"] - forward
    host = host_seconds(shape, training)
    compute["waiting for the host"] = max(0.0, host[0] - forward) + max(0.0, host[1] - then)

    # Exchanges between the ranks of a sequence.
    exposed: dict[str, float] = {}
    wire: dict[str, float] = {}
    directions = replays + 1
    if W > 1 and shape.linear_layers:
        halo = 2 * training.batch * (shape.taps - 1) * shape.conv_width
        wire["halo"] = shape.linear_layers * directions * halo
        latency, _ = cluster.rates(W)
        exposed["halo"] = shape.linear_layers * directions * (c("collective_start") + latency)
        # The output gate's projection, or its like in backward, runs meanwhile.
        meanwhile = 2 * L * D * shape.value_width / c("matmul_rate")
        state = 4 * training.batch * shape.value_heads * shape.key_dim * shape.value_dim
        if way == "ulysses":
            there, back = _linear_payloads(shape, training)
            wire["linear layers"] = shape.linear_layers * directions * (there + back) * (W - 1) / W
            seconds = max(0.0, cluster.all_to_all(there, W) - meanwhile) + cluster.all_to_all(back, W)
            exposed["linear layers"] = shape.linear_layers * directions * seconds
        else:
            summary = state * (1 + shape.key_dim / shape.value_dim)
            sent = {"chain": state, "allgather": summary * (W - 1), "scan": summary * math.ceil(math.log2(W))}
            wire["linear layers"] = shape.linear_layers * directions * sent[way]
            wait = max(0.0, state_seconds(shape, training, cluster, way) - meanwhile)
            # A rank that is late in the chain stays late by the same time until attention brings all together, so it
            # counts once for each run of linear layers.
            times = _runs_of_linear_layers(shape) if way == "chain" else shape.linear_layers
            exposed["linear layers"] = times * directions * wait
    if W > 1 and shape.full_layers:
        if training.attention_mode == "ulysses":
            there, back = _attention_payloads(shape, training)
            moved, seconds = (there + back) * (W - 1) / W, cluster.all_to_all(there, W) + cluster.all_to_all(back, W)
        else:
            moved = 4 * L * shape.kv_width * (W - 1)
            seconds = cluster.all_gather(4 * L * shape.kv_width, W)
        wire["attention"] = shape.full_layers * directions * moved
        exposed["attention"] = shape.full_layers * directions * seconds

    # Parameters and gradients in bf16: gathered forward and backward, gradients spread once, while layers run. What is
    # outside the layers is gathered once, before them, and its gradients are spread after them.
    if training.shards > 1:
        share = 2 * (training.shards - 1) / training.shards
        root, inner = share * 2 * shape.root_parameters, share * 3 * (shape.parameters - shape.root_parameters)
        wire["FSDP"] = root + inner
        _, rate = cluster.rates(training.shards)
        exposed["FSDP"] = root / rate + max(0.0, inner / rate - sum(compute.values()))
    replicas = cluster.gpus // max(training.shards, training.cp_size)
    if replicas > 1:
        wire["replicas"] = 2 * 4 * owned
        _, rate = cluster.rates(cluster.gpus)
        exposed["replicas"] = max(0.0, wire["replicas"] / rate - 0.5 * sum(compute.values()))
    return StepCost(compute, exposed, wire)
