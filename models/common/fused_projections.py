"""Mixers of a patched model whose projections and Ulysses exchanges are one operator each.

Attention: q with its gate, k and v are projected and their heads exchanged in one product; norms, rotary embedding,
attention and the gate then act on all tokens of this rank's heads; the output projection takes its operand from all
ranks. The gate travels with q, since the output projection reads its operand where the heads are: kept with the tokens
it would have to be multiplied between the exchange and the product that is to run beside it.

Gated DeltaNet: the same, with z in the place of the gate, and beta and g, which are small, in a message of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_cp.autocast import autocast_dtype
from hf_cp.class_swap import stock_class
from hf_cp.collectives import start_exchange_sequence_to_heads
from hf_cp.compilation import outside_graphs
from hf_cp.context import CpContext
from hf_cp.kernels.a2a_gemm import Backend, a2a_gemm, gemm_a2a
from hf_cp.kernels.a2a_gemm.plan import MAX_GROUPS
from hf_cp.kernels.gdn import layer
from hf_cp.kernels.gdn.backend import refuse, unserved_reason
from hf_cp.modes import projections
from hf_cp.modes.state_passing import SpanInputs, whole_rule

from .attention import attend_to_all

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_ROW_TILE = 128


@dataclass(frozen=True, eq=False)
class FusedProjections:
    """What the fused mixers of one forward share.

    Args:
        backend: runs the operators.
        cos, sin: rotary embedding of the whole sequence, fp32 ``[B or 1, T, R]``.
    """

    backend: Backend
    cos: torch.Tensor
    sin: torch.Tensor


def serves(config: Any, layer_type: str) -> bool:
    """Whether layers of this type run fused under these settings."""
    mode = config.attention_mode if layer_type == "full_attention" else config.linear_mode
    return config.projection_backend == "fused" and mode == "ulysses"


@outside_graphs
def prepare(decoder: Any, cp: CpContext, batch: int, position_ids: torch.Tensor) -> FusedProjections:
    """Find or make the group's workspace, and embed the positions of the whole sequence.

    Args:
        decoder: the patched decoder.
        position_ids: ``[B, T]``, or ``[3 or 4, B, T]``, of the whole sequence.
    """
    W, tokens = cp.mesh.cp_size, batch * cp.layout.padded_len
    flags = batch * -(-cp.layout.seq_len_local // _ROW_TILE) * MAX_GROUPS
    nbytes = 2 * tokens * _widest(decoder.config, cp.config, W)
    backend = projections.backend_of(cp.mesh, position_ids.device, nbytes, flags)
    if position_ids.ndim == 3 and position_ids.shape[0] == 4:
        position_ids = position_ids[1:]
    elif position_ids.ndim == 2 and hasattr(decoder.rotary_emb, "mrope_section"):
        position_ids = position_ids.expand(3, -1, -1)
    like = torch.empty(0, device=position_ids.device)
    with torch.no_grad():
        cos, sin = decoder.rotary_emb(like, position_ids)
    return FusedProjections(backend, cos, sin)


def _widest(config: Any, settings: Any, W: int) -> int:
    """Columns a token of the largest operand that a rank exchanges, head side."""
    widths = [0]
    layers = config.layer_types[: config.num_hidden_layers]
    if "full_attention" in layers and serves(settings, "full_attention"):
        kv = max(config.num_key_value_heads // W, 1)
        widths.append((2 * config.num_attention_heads // W + 2 * kv) * config.head_dim)
    if "linear_attention" in layers and serves(settings, "linear_attention"):
        key = config.linear_num_key_heads * config.linear_key_head_dim
        value = config.linear_num_value_heads * config.linear_value_head_dim
        widths.append(2 * (key + value) // W)
    return max(widths)


def check(module: Any, names: tuple[str, ...]) -> None:
    """Raise unless these projections of a mixer are plain ones.

    Raises:
        ValueError: which one is not, and why.
    """
    for name in names:
        projection = getattr(module, name)
        kind = stock_class(projection)
        why = None
        if isinstance(projection, FSDPModule):
            why = "is sharded by itself, not with its decoder layer"
        elif kind is not nn.Linear:
            why = f"is a {kind.__module__}.{kind.__name__}, not a plain torch.nn.Linear"
        elif projection.bias is not None:
            why = "has a bias"
        if why is not None:
            raise ValueError(f'projection_backend="fused": {name} {why}: use projection_backend="torch"')


def _computed(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    """Operands in the dtype that a linear layer would compute in here."""
    dtype = autocast_dtype(x.device) or x.dtype
    if any(isinstance(weight, DTensor) for weight in weights):
        raise ValueError(
            'projection_backend="fused": a weight is a DTensor in its forward, as with tensor parallelism: use '
            'projection_backend="torch"'
        )
    return [operand.to(dtype) for operand in (x, *weights)]


def attention_forward(
    module: Any,
    stock_forward: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    *args: Any,
    cp_context: CpContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Full attention over this rank's tokens, ``[B, L, C]``; stock unless its projections are fused.

    Args:
        position_embeddings: of this rank's tokens, for the stock forward.
        attention_mask: of the whole sequence.
    """
    fused = None if cp_context is None else cp_context.fused
    if fused is None or cp_context is None or not serves(cp_context.config, "full_attention"):
        extra = {} if cp_context is None else {"cp_context": cp_context}
        return stock_forward(module, hidden_states, position_embeddings, attention_mask, *args, **extra, **kwargs)
    check(module, ATTENTION)
    unpad, D, family = cp_context.layout.unpad, module.head_dim, type(module).hf_cp_family
    operands = _computed(hidden_states, module.q_proj.weight, module.k_proj.weight, module.v_proj.weight)
    # Query heads are pairs of D columns, the query and its gate.
    q, k, v = (unpad(x, 1) for x in gemm_a2a(operands[0], operands[1:], D, backend=fused.backend))
    q, gate = q.unflatten(2, (-1, 2)).unbind(3)
    q, k, v = module.q_norm(q).transpose(1, 2), module.k_norm(k).transpose(1, 2), v.transpose(1, 2)
    cos, sin = (x.to(hidden_states.dtype) for x in (fused.cos, fused.sin))
    q, k = (x.to(v.dtype) for x in family.rotary(q, k, cos, sin))
    kwargs |= {"scaling": module.scaling, "dropout": module.attention_dropout if module.training else 0.0}
    for name in ("cache", "past_key_values"):  # None here: nothing with a cache is sharded
        kwargs.pop(name, None)
    output = attend_to_all(module, q, k, v, attention_mask, cp_context, **kwargs)
    output = cp_context.layout.pad(output * torch.sigmoid(gate), 1, 0.0)
    output, weight = _computed(output, module.o_proj.weight)
    return a2a_gemm(output, weight, backend=fused.backend), None


@outside_graphs
def gated_delta_net(module: Any, hidden_states: torch.Tensor, cp: CpContext) -> torch.Tensor:
    """Token mixing of one Gated DeltaNet layer, ``[B, L, C]`` to ``[B, L, C]``: Ulysses with fused projections."""
    fused, backend = cp.fused, cp.config.gdn_backend
    assert fused is not None
    family = type(module).hf_cp_family
    check(module, (*family.project_to_heads.names, "out_proj"))
    b, a = family.project_to_heads.narrow(module, hidden_states)
    refuse(backend, unserved_reason(backend, dtype=b.dtype))
    g, beta = layer.gates(a, b, module.A_log, module.dt_bias, backend=backend)
    gates = start_exchange_sequence_to_heads([g, beta], cp.mesh)
    q, k, v, z = family.project_to_heads.wide(module, hidden_states, _computed, fused.backend)
    r, W = cp.mesh.cp_rank, cp.mesh.cp_size
    weights = module.conv1d.weight.squeeze(1).split((module.key_dim, module.key_dim, module.value_dim))
    q, k, v = (
        _conv(module, x, weight.chunk(W)[r], cp).unflatten(2, (-1, head_dim))
        for x, weight, head_dim in zip(
            (q, k, v), weights, (module.head_k_dim, module.head_k_dim, module.head_v_dim), strict=True
        )
    )
    output = whole_rule(SpanInputs(q, k, v, *gates.wait()), cp)
    norm = module.norm
    normed = layer.gated_rms_norm(output, z.view_as(output), norm.weight, norm.variance_epsilon, backend=backend)
    normed, weight = _computed(normed, module.out_proj.weight)
    return a2a_gemm(normed, weight, backend=fused.backend)


def _conv(module: Any, x: torch.Tensor, weight: torch.Tensor, cp: CpContext) -> torch.Tensor:
    """The causal convolution of all tokens of some channels."""
    return layer.causal_conv1d(x, weight, None, cp.cu_seqlens, module.activation, backend=cp.config.gdn_backend)[0]
