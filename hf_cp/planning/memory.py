"""Bytes that one rank holds at the peak of a training step.

The parts are counted from what the step's operators save for backward, a token and a layer at a time. Four moments
compete for the peak; the estimate is the largest: the end of the forward, where a chunk of logits exists; the start of
the backward, where the head's gradients do; the backward of a layer; and its end, where all gradients exist.
`hf_cp/planning/README.md` says how it compares with measured steps.

L tokens a rank, D hidden, F ffn, C channels of the convolution, Z = HV * V.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shape import FULL, LINEAR, ModelShape

GIB = 2**30
# One chunk's logits in fp32, as in `hf_cp.kernels.linear_cross_entropy`, and what stands beside it while the loss is
# taken: the exponentials inside logsumexp, and the logits in bf16.
CHUNK_BYTES = 512 * 2**20
CHUNK_COPIES = 2.5
# Bytes a token and a value head, per element of K * V, that the backward of the delta rule holds beyond its inputs:
# 2,222 MiB at 32,768 tokens, 32 heads of 128 x 128, kernels/gdn/README.md, "Measured".
DELTA_RULE_BACKWARD = 2222 * 2**20 / (32768 * 32 * 128 * 128)


@dataclass(frozen=True)
class Training:
    """How the model is trained.

    Args:
        seq_len: tokens of a sequence. batch: sequences that one context-parallel group works on at once.
        cp_size: ranks that share a sequence. shards: ranks that parameters, gradients and optimizer are spread over
            (FSDP2), dp_shard_size x cp_size; 1 without FSDP.
        linear_mode, attention_mode: as for `hf_cp.patch`.
        checkpointing: whether every decoder layer is recomputed in backward.
        precision: ``"mixed"``: parameters, gradients and AdamW's states in fp32, computing in bf16, as Trainer does
            with ``bf16=True``; ``"bf16"``: all of them in bf16, as a model loaded in bf16.
        lora: rank of adapters on every linear module but the head, which are trained as ``"mixed"`` has it; all other
            weights are frozen, and loaded in bf16. 0 trains all weights.
    """

    seq_len: int
    batch: int = 1
    cp_size: int = 1
    shards: int = 1
    linear_mode: str = "p2p"
    attention_mode: str = "ulysses"
    checkpointing: bool = False
    precision: str = "mixed"
    lora: int = 0

    @property
    def tokens(self) -> int:
        """L times batch: tokens that a rank holds."""
        return self.batch * -(-self.seq_len // self.cp_size)

    @property
    def autocast(self) -> bool:
        """Whether autocast alone brings trained weights in fp32, and what is multiplied with them, to bf16."""
        return self.precision == "mixed" and self.shards == 1

    @property
    def backward_products(self) -> int:
        """Products with a weight in backward, beside one in forward: for its input's gradient, and for its own."""
        return 1 if self.lora else 2

    @property
    def stream_bytes(self) -> int:
        """Of a number in the residual stream: fp32 where the embeddings are and nothing but autocast makes bf16."""
        return 4 if self.autocast and not self.lora else 2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank.

    Args:
        weights: parameters, frozen ones too, and the copies in bf16 that computing needs.
        gradients, optimizer: at their fullest.
        activations: what layers save for backward, or the inputs of recomputed layers and one layer's own.
        loss: gradients of hidden states and head weight, and a chunk of logits.
        buffers: exchanges under way, and states that a layer keeps.
        peak: largest sum that exists at a time; less than the sum of the parts.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    buffers: float
    peak: float


def _norm_bytes(shape: ModelShape, training: Training) -> int:
    """An RMS norm as transformers writes it: its input and a scale a token in fp32, and for its weight the normed."""
    return (4 if training.lora else 8) * shape.hidden + 4


def _mixer_bytes(shape: ModelShape, training: Training, layer_type: str) -> float:
    """Saved a token by a token mixer, without its input."""
    if layer_type == LINEAR:
        # Input and output of the convolution; gate, output and normed output of the delta rule; a, b, g, beta.
        return 4 * shape.conv_width + 6 * shape.value_width + 10 * shape.value_heads
    query, kv = shape.query_width, shape.kv_width
    # q in fp32 before its norm, after it where the norm is trained, and in bf16; the gate's sigmoid, the output, their
    # product; k as q, and v; scales of norms, and the sums of the softmax.
    normed = 0 if training.lora else 4
    saved = (12 + normed) * query + (8 + normed) * kv + 4 * (2 * shape.query_heads + shape.kv_heads)
    if training.attention_mode == "allgather":
        # Keys and values of the whole sequence.
        saved += 4 * kv * (training.cp_size - 1)
    elif training.cp_size > shape.kv_heads:
        # Repeated, so that every rank has one.
        saved += 4 * shape.head_dim * (training.cp_size - shape.kv_heads)
    return saved


def _mlp_bytes(shape: ModelShape, training: Training) -> float:
    """Saved a token by the second norm and the MLP of a layer."""
    saved = _norm_bytes(shape, training) + 8 * shape.ffn
    if not shape.experts:
        return saved + 2 * shape.hidden * (2 if training.autocast else 1)
    # Of each expert that a token is sent to: gate, up and the activated gate, the output; for its weights the input and
    # the product; indices and scores. The router's probabilities in fp32, and the shared expert's gate and output.
    each = (6 * shape.expert_ffn + 2 * shape.hidden) if training.lora else (8 * shape.expert_ffn + 4 * shape.hidden)
    saved += shape.experts_per_token * (each + 38) + 4 * shape.experts + 2 * shape.hidden + 6
    # Read by the shared expert's gate as well.
    return saved + 2 * shape.hidden * (3 if training.autocast else 1)


def layer_bytes(shape: ModelShape, training: Training, layer_type: str) -> float:
    """Saved a token by one decoder layer."""
    # Autocast makes a bf16 copy of an fp32 input for every projection that reads it; PEFT brings inputs to fp32 for it.
    copies = (4 if layer_type == LINEAR else 3) if training.autocast else 1
    saved = _norm_bytes(shape, training) + 2 * shape.hidden * copies
    saved += _mixer_bytes(shape, training, layer_type) + _mlp_bytes(shape, training)
    # What an adapter's first matrix makes, for its second.
    return saved + 2 * training.lora * len(shape.linears(layer_type))


def _backward_bytes(shape: ModelShape, training: Training, layer_type: str) -> float:
    """Held a token by the backward of one layer beyond what its forward saved, at its fullest.

    The MLP comes first; what it saved is gone when the mixer's turn comes.
    """
    # Recomputing experts, and in part their backward, holds what goes in and comes out of them in two orders.
    mlp = max(4 * (shape.ffn + shape.experts_per_token * shape.expert_ffn), 6 * shape.experts_per_token * shape.hidden)
    if layer_type == FULL:
        # Gradients of q, k, v and the output, and flash attention's sum of dq in fp32.
        mixer = 8 * shape.query_width + 4 * shape.kv_width
        if training.attention_mode == "allgather":
            # Gradients of the whole sequence's keys and values, before they are summed over ranks.
            mixer += 8 * shape.kv_width * (training.cp_size - 1)
    else:
        mixer = DELTA_RULE_BACKWARD * shape.value_heads * shape.key_dim * shape.value_dim
    return max(mlp, mixer - _mlp_bytes(shape, training))


def _buffer_bytes(shape: ModelShape, training: Training) -> float:
    """Exchanges of one layer under way, in and out, and the states that every layer keeps for backward."""
    if training.cp_size == 1:
        return 0
    state = 4 * training.batch * shape.value_heads * shape.key_dim
    kept = 0.0
    if training.linear_mode == "ulysses":
        linear = 2 * training.tokens * (2 * shape.conv_width + 6 * shape.value_heads)
    else:
        kept = shape.linear_layers * state * (shape.key_dim + shape.value_dim)
        ranks = training.cp_size if training.linear_mode == "allgather" else 2
        linear = ranks * state * (shape.key_dim + shape.value_dim)
    width = 2 * shape.kv_width
    if training.attention_mode == "ulysses":
        width = shape.query_width + 2 * max(shape.kv_width, shape.head_dim * training.cp_size)
    attention = 4 * training.tokens * width
    return kept + max(linear if shape.linear_layers else 0, attention if shape.full_layers else 0)


def estimate(shape: ModelShape, training: Training) -> MemoryEstimate:
    """The memory of one rank in a step with AdamW, its loss taken chunk by chunk.

    Args:
        training: with ``lora``, in ``"mixed"`` precision.
    """
    mixed, sharded, lora = training.precision == "mixed", training.shards > 1, training.lora
    number = 4 if mixed else 2
    tokens, head = training.tokens, shape.head_parameters
    matrices = shape.parameters - (0 if shape.tied else head)  # all but a lookup
    kinds = set(shape.layer_types)
    largest = max(map(shape.layer_parameters, kinds))
    # What is trained: all, or adapters beside frozen weights in bf16.
    trained = shape.adapters(lora) if lora else shape.parameters
    trained_head = 0 if lora else head
    in_layer = max(shape.adapter_parameters(name, lora) for name in kinds) if lora else largest
    owned = trained / training.shards
    weights = owned * number + (2 * shape.parameters / training.shards if lora else 0)
    if sharded:
        # Gathered for use: what is outside the layers throughout, and two layers in turn.
        weights += 2 * (shape.root_parameters + 2 * (largest + (in_layer if lora else 0)))
    elif mixed:
        weights += 2 * (trained if lora else matrices)
    optimizer = 2 * owned * number
    # With FSDP a layer's own, before and after they are spread.
    gathered_gradients = 2 * number * in_layer if sharded else 0
    gradients = owned * number + gathered_gradients

    per_type = {name: tokens * layer_bytes(shape, training, name) for name in kinds}
    backward = {name: tokens * _backward_bytes(shape, training, name) for name in per_type}
    if training.checkpointing:
        stored = tokens * len(shape.layer_types) * training.stream_bytes * shape.hidden
        working = max(per_type[name] + backward[name] for name in per_type)
        at_loss = stored
        activations = stored + max(per_type.values())
    else:
        stored = at_loss = activations = sum(per_type[name] for name in shape.layer_types)
        working = max(backward.values())
    last_norm = tokens * (_norm_bytes(shape, training) + 2 * shape.hidden)
    dhead, dhidden = 4 * trained_head, 2 * tokens * shape.hidden
    chunk = min(CHUNK_BYTES, 4 * tokens * shape.vocab) * CHUNK_COPIES
    buffers = _buffer_bytes(shape, training)
    # In backward the head's gradient is scaled, and brought to the weight's dtype.
    head_gradients = dhead + 2 * trained_head + (4 * trained_head if mixed and not sharded else 0)
    head_owned = trained_head * number / (training.shards if sharded else 1)

    fixed = weights + optimizer
    moments = [
        fixed + at_loss + last_norm + dhead + dhidden + chunk,
        fixed + at_loss + last_norm + head_gradients + 2 * dhidden,
    ]
    if training.checkpointing:
        if mixed and not sharded and not lora:
            # The bf16 copies go with the forward; a recomputed layer makes its own.
            fixed -= 2 * (matrices - largest)
        # The first layer comes last, when all gradients but its own and an untied embedding's exist.
        at_first = owned if shape.tied or lora else owned - head / training.shards
        at_first -= in_layer / training.shards
        moments.append(fixed + working + buffers + max(stored + head_owned, at_first * number + gathered_gradients))
    else:
        moments.append(fixed + working + buffers + stored + head_owned)
    moments.append(fixed + gradients + (trained_head * number if shape.tied else 0))
    loss = dhead + dhidden + last_norm + chunk
    return MemoryEstimate(weights, gradients, optimizer, activations, loss, buffers, max(moments))
