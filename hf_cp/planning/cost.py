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

    def is_far(self, ranks: int) -> bool:
        """Whether so many neighbouring ranks are of several nodes."""
        return ranks > self.gpus_per_node

    def all_to_all(self, payload: float, ranks: int) -> float:
        """Seconds of an all-to-all of which each rank holds ``payload`` bytes."""
        inside = min(ranks, self.gpus_per_node)
        seconds = c("collective_start") + payload * (inside - 1) / ranks / c("nvlink_rate")
        if self.is_far(ranks):
            seconds += c("network_start") + payload * (ranks - inside) / ranks / c("network_rate")
        return seconds

    def all_gather(self, payload: float, ranks: int) -> float:
        """Seconds of an all-gather to which each rank gives ``payload`` bytes, or of the reduce-scatter back.

        A ring, cut into as many as a node has GPUs, so that what goes to the next node takes all of its links.
        """
        edges = (ranks - 1) // self.gpus_per_node
        steps = (ranks - 1 - edges) * c("ring_step") + edges * c("network_start")
        rate = c("nvlink_rate")
        if self.is_far(ranks):
            rate = min(rate, self.gpus_per_node * c("network_rate"))
        return c("collective_start") + steps + payload * (ranks - 1) / rate

    def all_reduce(self, payload: float, ranks: int) -> float:
        """Seconds of an all-reduce of ``payload`` bytes between replicas: one rank of every node, or ranks of one."""
        rate = c("network_rate") if self.is_far(self.gpus) else c("nvlink_rate")
        return c("collective_start") + 2 * payload * (ranks - 1) / ranks / rate


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
    size = tokens * heads * shape.key_dim * shape.value_dim / 128**2
    idle = max(0.0, 1 - heads / 32)
    forward, backward = (
        c(f"{gdn_backend}_{way}_start") + c(f"{gdn_backend}_{way}") * size * (1 + c(f"{gdn_backend}_{way}_idle") * idle)
        for way in ("forward", "backward")
    )
    return forward, backward


def linear_mixer_seconds(shape: ModelShape, training: Training, gdn_backend: str = "triton") -> tuple[float, float]:
    """Forward and backward of one Gated DeltaNet layer's own computing."""
    L, W = training.tokens, training.cp_size
    products = 2 * L * (shape.mixer_parameters(LINEAR) - shape.taps * shape.conv_width) / c("matmul_rate")
    forward = products + L * shape.conv_width * c("convolution_forward")
    forward += L * shape.value_width * c("gated_norm_forward")
    backward = training.backward_products * products + L * shape.conv_width * c("convolution_backward")
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
    backward = 2.5 * causal / c("attention_backward_rate") + width * c("attention_backward_bytes")
    backward += training.backward_products * products
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


def mlp_seconds(shape: ModelShape, training: Training) -> tuple[float, float]:
    """Forward and backward of one layer's MLP, or of the experts that its tokens are sent to."""
    products = 2 * training.tokens * shape.active_mlp_parameters / c("matmul_rate")
    width = training.tokens * (shape.ffn + shape.experts_per_token * shape.expert_ffn) / c("memory_rate")
    backward = training.backward_products * products + width * c("mlp_backward_bytes")
    return products + width * c("mlp_forward_bytes"), backward


def adapter_seconds(shape: ModelShape, training: Training, layer_type: str) -> tuple[float, float]:
    """Forward and backward of the LoRA adapters of one layer."""
    products = 2 * training.tokens * shape.adapter_parameters(layer_type, training.lora) / c("matmul_rate")
    each_input = c("adapter_input_bytes_autocast" if training.autocast else "adapter_input_bytes")
    linears = shape.linears(layer_type)
    moved = training.tokens * sum(each_input * inner + c("adapter_output_bytes") * outer for inner, outer in linears)
    # A backward takes two products, but no more bytes.
    return products + moved / c("memory_rate"), 2 * products + moved / c("memory_rate")


def head_seconds(shape: ModelShape, training: Training, loss: str = "triton") -> float:
    """Head and loss, whose gradients are computed with them, chunk by chunk; a frozen weight's gradient is not.

    Args:
        loss: ``"triton"``, or ``"torch"`` as ``gdn_backend="eager"`` has it.
    """
    L = training.tokens
    products = 2 * (1 + training.backward_products) * L * shape.head_parameters / c("matmul_rate")
    logits = L * shape.vocab
    # A chunk is 512 MiB of logits in fp32, or 1 GiB in bf16.
    chunks = math.ceil(4 * logits / CHUNK_BYTES / (4 if loss == "triton" else 1))
    moved = c(f"loss_bytes_{loss}") * logits
    if not training.lora:
        moved += chunks * c(f"loss_weight_bytes_{loss}") * shape.head_parameters
    return products + moved / c("memory_rate")


def host_seconds(shape: ModelShape, training: Training) -> tuple[float, float]:
    """What the host takes to start the kernels of the layers' forward, and of all that follows the loss.

    Those of adapters were not measured, and are not counted.
    """
    count, replays = len(shape.layer_types), 1 if training.checkpointing else 0
    several = training.shards > 1 or training.cp_size > 1
    kind = "host_ranks" if several else "host"
    forward, backward = count * c(f"{kind}_forward"), count * c(f"{kind}_backward")
    begins, ends = (c("host_ranks_begin"), c("host_ranks_end")) if several else (0.0, 0.0)
    return begins + forward, replays * forward + backward + ends


def _state_bytes(shape: ModelShape, training: Training) -> tuple[int, int]:
    """Of one layer's state in fp32, and of a summary: the state with the map of what was before."""
    state = 4 * training.batch * shape.value_heads * shape.key_dim * shape.value_dim
    return state, state + 4 * training.batch * shape.value_heads * shape.key_dim**2


def state_seconds(shape: ModelShape, training: Training, cluster: Cluster, way: str) -> float:
    """Until the last rank has the state that enters it, once, in one direction.

    Args:
        way: ``"chain"`` (a hop after another, what p2p does), ``"allgather"`` (all summaries, folded by each rank),
            ``"scan"`` (log2 W rounds that join summaries of twice as many ranks; not implemented, for comparison).
    """
    W = training.cp_size
    if W == 1:
        return 0.0
    state, summary = _state_bytes(shape, training)
    apply = c("state_apply") * max(1, training.batch * shape.value_heads / 32)

    def hop(size: float, far: bool) -> float:
        rate = c("network_rate") if far else c("nvlink_rate")
        known = 2 * 2**20 / c("nvlink_rate")  # what of the measured hop is the size's
        return c("state_hop") - known + size / rate + (c("network_start") if far else 0) + apply

    far_hops = (W - 1) // cluster.gpus_per_node
    if way == "chain":
        return (W - 1 - far_hops) * hop(state, False) + far_hops * hop(state, True)
    if way == "allgather":
        return cluster.all_gather(summary, W) + (W - 1) * apply
    rounds = math.ceil(math.log2(W))
    near = min(rounds, math.ceil(math.log2(cluster.gpus_per_node)))
    return near * (hop(summary, False) + apply) + (rounds - near) * (hop(summary, True) + apply)


def state_waits(shape: ModelShape, checkpointing: bool, way: str) -> int:
    """How often a step's slowest rank waits as long as `state_seconds`, in layers that compute nothing meanwhile.

    A rank that is late in the chain is as late in the linear layers that follow, and waits no more in them: it counts
    once for each run of linear layers. Not in the backward of recomputed layers: a layer's states travel in one
    direction, then its gradients in the other, and what was last is the first to be waited for.
    """
    directions = 3 if checkpointing else 2
    if way != "chain":
        return directions * shape.linear_layers
    runs = sum(kind == LINEAR for kind, _ in itertools.groupby(shape.layer_types))
    return runs + (2 * shape.linear_layers if checkpointing else runs)


def _fsdp(shape: ModelShape, training: Training, trained: int) -> dict[str, tuple[int, int]]:
    """Parameters that FSDP2 gathers and whose gradients it reduces, each time counted: ``"root"`` and ``"layers"``.

    Layers are gathered forward and backward, what is outside of them once, before them; gradients are reduced once.
    """
    root, adapters = shape.root_parameters, trained if training.lora else 0
    layers = shape.parameters - root + adapters
    return {"root": (root, 0 if training.lora else root), "layers": (2 * layers, adapters or layers)}


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
    trained = shape.adapters(training.lora) if training.lora else shape.parameters
    owned = trained / training.shards
    fsdp = _fsdp(shape, training, trained) if training.shards > 1 else {}

    # Computing: forward and backward of the layers.
    norms = 2 * L * D * c("norm_forward_bytes") / memory, 2 * L * D * c("norm_backward_bytes") / memory
    layers = {
        "delta rule layers": (shape.linear_layers, linear_mixer_seconds(shape, training, gdn_backend)),
        "attention": (shape.full_layers, attention_seconds(shape, training)),
        "MLP": (count, mlp_seconds(shape, training)),
        "norms": (count, norms),
    }
    if training.lora:
        each = [adapter_seconds(shape, training, kind) for kind in shape.layer_types]
        layers["adapters"] = 1, (sum(forward for forward, _ in each), sum(backward for _, backward in each))
    compute = {name: number * (replays * part[0] + part[1]) for name, (number, part) in layers.items()}
    compute["head and loss"] = head_seconds(shape, training)
    compute["optimizer"] = owned * c(f"optimizer_bytes_{training.precision}") / memory
    if fsdp:
        copied = sum(map(sum, fsdp.values()))
        compute["FSDP's copies"] = copied * (c("fsdp_copies") + c("fsdp_casts") / training.shards) / memory
    # Where layers are short, the host is what takes the time, in forward or from then on. It gets ahead while the
    # head's long kernels run, but not by what they take.
    forward = sum(number * part[0] for number, part in layers.values())
    then = sum(compute.values()) - compute["head and loss"] - forward
    host = host_seconds(shape, training)
    compute["waiting for the host"] = max(0.0, host[0] - forward) + max(0.0, host[1] - then)
    computing = sum(compute.values())

    # Exchanges between the ranks of a sequence.
    exposed: dict[str, float] = {}
    wire: dict[str, float] = {}
    directions = replays + 1
    if W > 1 and shape.linear_layers:
        halo = 2 * training.batch * (shape.taps - 1) * shape.conv_width
        wire["halo"] = shape.linear_layers * directions * halo
        start = c("collective_start") + (c("network_start") if cluster.is_far(W) else 0.0)
        exposed["halo"] = shape.linear_layers * directions * start
        # The output gate's projection, or its like in backward, runs meanwhile.
        meanwhile = 2 * L * D * shape.value_width / c("matmul_rate")
        if way == "ulysses":
            there, back = _linear_payloads(shape, training)
            wire["linear layers"] = shape.linear_layers * directions * (there + back) * (W - 1) / W
            seconds = max(0.0, cluster.all_to_all(there, W) - meanwhile) + cluster.all_to_all(back, W)
            exposed["linear layers"] = shape.linear_layers * directions * seconds
        else:
            state, summary = _state_bytes(shape, training)
            sent = {"chain": state, "allgather": summary * (W - 1), "scan": summary * math.ceil(math.log2(W))}
            wire["linear layers"] = shape.linear_layers * directions * sent[way]
            wait = max(0.0, state_seconds(shape, training, cluster, way) - meanwhile)
            exposed["linear layers"] = state_waits(shape, training.checkpointing, way) * wait
    if W > 1 and shape.full_layers:
        if training.attention_mode == "ulysses":
            there, back = _attention_payloads(shape, training)
            moved, seconds = (there + back) * (W - 1) / W, cluster.all_to_all(there, W) + cluster.all_to_all(back, W)
        else:
            moved = 4 * L * shape.kv_width * (W - 1)
            seconds = cluster.all_gather(4 * L * shape.kv_width, W)
        wire["attention"] = shape.full_layers * directions * moved
        exposed["attention"] = shape.full_layers * directions * seconds

    # Parameters and gradients in bf16, those of layers while other layers run.
    if fsdp:
        shards = training.shards
        given = {place: 2 * sum(numbers) / shards for place, numbers in fsdp.items()}
        wire["FSDP"] = (shards - 1) * sum(given.values())
        root, inside = (
            messages * cluster.all_gather(given[place] / messages, shards)
            for place, messages in (("root", 2), ("layers", 3 * count))
        )
        exposed["FSDP"] = root + max(0.0, inside - computing)
    replicas = cluster.gpus // max(training.shards, W)
    if replicas > 1:
        wire["replicas"] = 2 * 2 * owned * (replicas - 1) / replicas
        exposed["replicas"] = max(0.0, cluster.all_reduce(2 * owned, replicas) - 0.5 * computing)
    return StepCost(compute, exposed, wire)
