"""The decoder of a patched model: whole batch in, this rank's tokens through the layers."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from hf_cp.collectives import gather_sequence
from hf_cp.compilation import outside_graphs
from hf_cp.context import CpContext
from hf_cp.entry import agree
from hf_cp.layout import ShardLayout, cu_seqlens_from_position_ids
from hf_cp.loss import IGNORE_INDEX
from hf_cp.mesh import CpMesh
from hf_cp.modes.segments import groups, packed_segments, padded_segments, queries_between
from hf_cp.startup import announce

from . import fused_projections
from .attention import ALLGATHER_IMPLEMENTATIONS
from .randomness import own_randomness
from .signature import CallArguments

# What a multimodal model is given beside the text.
_MEDIA = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_token_type_ids")


@dataclass(frozen=True)
class Whole:
    """The batch as the user gave it, over the whole sequence, the same on every rank of the group.

    Args:
        inputs: token ids ``[B, T]`` or embeddings ``[B, T, D]``.
        attention_mask: ``[B, T]``, or ``None``.
        position_ids: ``[B, T]`` or ``[3 or 4, B, T]``, or ``None``.
        cu_seqlens: packing boundaries ``[N+1]`` given by the caller, or ``None``.
    """

    inputs: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    @property
    def text_position_ids(self) -> torch.Tensor | None:
        """Text positions ``[B, T]``: three rows alone are image coordinates and say nothing about documents."""
        if self.position_ids is None or self.position_ids.ndim == 2:
            return self.position_ids
        return self.position_ids[0] if self.position_ids.shape[0] == 4 else None

    @functools.cached_property
    def padded(self) -> bool:
        """Whether the mask drops any token. Costs a host read, once."""
        return self.attention_mask is not None and not bool((self.attention_mask == 1).all())

    @functools.cached_property
    def packed(self) -> bool:
        """Several documents in a row: boundaries were given, or positions restart between kept tokens."""
        if self.cu_seqlens is not None:
            return True
        positions = self.text_position_ids
        if positions is None:
            return False
        restarts = positions[:, 1:] == 0
        if self.padded:
            assert self.attention_mask is not None
            kept = self.attention_mask != 0
            restarts = restarts & kept[:, 1:] & kept[:, :-1]
        return bool(restarts.any())

    @functools.cached_property
    def boundaries(self) -> torch.Tensor | None:
        """Document boundaries of a packed row, ``[N+1]``, given or from positions; ``None`` where nothing is packed."""
        if not self.packed or self.cu_seqlens is not None:
            return self.cu_seqlens
        assert self.text_position_ids is not None
        return cu_seqlens_from_position_ids(self.text_position_ids)

    def drops_before_kept(self) -> bool:
        """Whether padding comes before other tokens of its document, in a packed row: only the mask would know."""
        if not self.padded or self.boundaries is None:
            return False
        assert self.attention_mask is not None
        kept = self.attention_mask[0] != 0
        begins = (kept[1:] & ~kept[:-1]).nonzero().flatten() + 1
        return not set(begins.tolist()) <= set(self.boundaries.tolist())


def is_cached(arguments: CallArguments) -> bool:
    """Whether a call uses a KV cache: it then runs unsharded, as stock, alike on every rank."""
    return arguments.cache is not None or bool(arguments.get("use_cache"))


def _is_empty(cache: Any) -> bool:
    """Whether no token has gone through a cache; the linear layers know without a read from the device."""
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return not linear[0].has_previous_state[0] if linear else cache.get_seq_length() == 0


# The group that agreed on a cache. By identity: a copy of a cache is another cache, which no rank has agreed on.
_agreed: weakref.WeakKeyDictionary[Any, CpMesh] = weakref.WeakKeyDictionary()


@outside_graphs
def _agree_on_cache(module: Any, cache: Any) -> None:
    """Let the ranks agree that each of them begins a cache, or brings one that the group has not seen.

    Such a call is not sharded and sends nothing else, and a rank in a sharded one would wait for it. What follows with
    the same cache is not checked: ranks may generate different numbers of tokens. Where FSDP2 shards the weights they
    cannot, for each call gathers them from all ranks; there every call is checked.

    Raises:
        ValueError: the same line on every rank of the group.
    """
    state = module._hf_cp
    wrapped = state.weights_sharded or any(isinstance(m, FSDPModule) for m in (module, *module.layers))
    if wrapped or cache is None or _agreed.get(cache) is not state.mesh or _is_empty(cache):
        agree(state.mesh, refusal=None, cached=True)


@outside_graphs
def _remember(cache: Any, output: Any, mesh: CpMesh) -> None:
    """Note that the group agreed on the cache that a call was given, or made."""
    if cache is None:
        items = output if isinstance(output, tuple) else output.values()
        cache = next((item for item in items if isinstance(item, Cache)), None)
    if cache is not None:
        _agreed[cache] = mesh


def unsharded(module: Any, stock_forward: Any, arguments: CallArguments, **changes: Any) -> Any:
    """The stock forward of a module above the decoder, for a call with a KV cache; the decoder lets the ranks agree."""
    state = module._hf_cp
    if isinstance(module, FSDPModule):
        state.weights_sharded = True
    return stock_forward(module, **arguments.replace(**changes))


def _read_whole(arguments: CallArguments) -> Whole:
    input_ids = arguments.get("input_ids")
    return Whole(
        input_ids if input_ids is not None else arguments.get("inputs_embeds"),
        arguments.get("attention_mask"),
        arguments.get("position_ids"),
        arguments.get("cu_seq_lens_q"),
    )


def _media(arguments: CallArguments) -> list[torch.Tensor]:
    """Images and videos of a multimodal call, their sizes and places, without those that are absent."""
    return [x for name in _MEDIA if (x := arguments.get(name)) is not None]


def _misshapen(arguments: CallArguments, labels: torch.Tensor | None) -> str | None:
    """Which argument does not fit the others, in one line, or ``None``."""
    given = {name: x for name in ("input_ids", "inputs_embeds") if (x := arguments.get(name)) is not None}
    if len(given) != 1:
        return "input_ids, inputs_embeds: give exactly one of the two"
    ((name, inputs),) = given.items()
    wanted = "[batch, sequence]" if name == "input_ids" else "[batch, sequence, hidden]"
    if inputs.ndim != wanted.count(",") + 1:
        return f"{name} of shape {list(inputs.shape)}: give {wanted}"
    if name == "input_ids" and inputs.is_floating_point():
        return f"input_ids of {inputs.dtype}: give whole numbers, or inputs_embeds"
    boundaries = arguments.get("cu_seq_lens_q")
    if boundaries is not None and (not isinstance(boundaries, torch.Tensor) or boundaries.ndim != 1):
        kind = f"shape {list(boundaries.shape)}" if isinstance(boundaries, torch.Tensor) else type(boundaries).__name__
        return f"cu_seq_lens_q of {kind}: give a tensor [documents + 1]"
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        kind = f"{mask.ndim} dimensions" if isinstance(mask, torch.Tensor) else f"type {type(mask).__name__}"
        return f"attention_mask of {kind}: give a padding mask [batch, sequence] or cu_seq_lens_q"
    shape = inputs.shape[:2]
    for name, x in (("attention_mask", mask), ("labels", labels)):
        if x is not None and x.shape != shape:
            return f"{name} of shape {list(x.shape)}: give one entry a token, {list(shape)}"
    if positions is not None and (positions.ndim not in (2, 3) or positions.shape[-1] != shape[1]):
        return f"position_ids of shape {list(positions.shape)}: give [batch, {shape[1]}] or [3 or 4, batch, {shape[1]}]"
    return None


def _unsupported(module: Any, arguments: CallArguments, whole: Whole) -> str | None:
    """Why this call, whose shapes are right, cannot be sharded, in one line, or ``None``."""
    state = module._hf_cp
    if whole.packed and whole.inputs.shape[0] != 1:
        return f"batch size {whole.inputs.shape[0]}: packed documents need batch size 1; concatenate the rows"
    if whole.drops_before_kept():
        return "attention_mask drops tokens before others of their packed document: leave them out of the row"
    seq_idx = arguments.get("seq_idx")
    if seq_idx is not None and not whole.packed and bool((seq_idx[..., 1:] != seq_idx[..., :-1]).any()):
        return "seq_idx alone does not part documents here: give cu_seq_lens_q, or position_ids that restart"
    attentions = arguments.get("output_attentions")
    if module.config.output_attentions if attentions is None else attentions:
        return "output_attentions=True: attention weights are not computed over a sharded sequence; leave it out"
    name = module.config._attn_implementation
    aligned = state.mesh.cp_size == 1 or state.config.attention_mode == "ulysses" or name in ALLGATHER_IMPLEMENTATIONS
    if not aligned:
        return (
            f"attn_implementation={name!r}: attention_mode='allgather' aligns only "
            f"{', '.join(ALLGATHER_IMPLEMENTATIONS)}; choose one of them or attention_mode='ulysses'"
        )
    return None


def _outside(
    module: Any, whole: Whole, targets: torch.Tensor | None, vocabulary: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many ids, and how many targets, are outside the vocabulary, int64 scalars."""
    ids = labels = torch.zeros((), dtype=torch.int64)
    if not whole.inputs.is_floating_point():
        ids = (whole.inputs.clamp(0, module.embed_tokens.weight.shape[0] - 1) != whole.inputs).sum()
    if targets is not None and vocabulary is not None:
        labels = ((targets != IGNORE_INDEX) & (targets.clamp(0, vocabulary - 1) != targets)).sum()
    return ids, labels


@outside_graphs
def open_context(
    module: Any,
    arguments: CallArguments,
    *,
    labels: torch.Tensor | None = None,
    shifted: bool = False,
    vocabulary: int | None = None,
    labels_by_row: bool = False,
    kind: int = 0,
    refusal: str | None = None,
    **hashed: Any,
) -> tuple[CpContext, Whole]:
    """Validate a call, let the ranks agree on it, and lay out the sequence.

    Args:
        module: the patched decoder.
        labels: ``[B, T]``, part of what must agree.
        shifted: each label stands where it is predicted, so that the first one counts too.
        vocabulary: how many labels there are, or ``None`` where it is not known.
        labels_by_row: labels are ``[B, ...]``, not one a token.
        kind: what is asked, as a small integer equal on all ranks.
        refusal: a reason of the caller's own not to run the call.
        hashed: options of the caller's own that must agree; see `agree`.

    Raises:
        ValueError: the same line on every rank of the group.
    """
    state = module._hf_cp
    announce(module, state)
    mesh = state.mesh
    whole = _read_whole(arguments)
    refusal = (
        refusal or _misshapen(arguments, None if labels_by_row else labels) or _unsupported(module, arguments, whole)
    )
    outside = None
    if refusal is None and mesh.cp_size > 1:
        # The first label of a row that is not shifted yet predicts nothing.
        targets = None if labels is None or vocabulary is None else labels if shifted else labels[:, 1:]
        outside = _outside(module, whole, targets, vocabulary)
    agree(
        mesh,
        refusal=refusal,
        outside=outside,
        inputs=whole.inputs,
        position_ids=whole.position_ids,
        cu_seq_lens_q=whole.cu_seqlens,
        attention_mask=whole.attention_mask,
        labels=labels,
        images_and_videos=_media(arguments),
        output_hidden_states=arguments.get("output_hidden_states"),
        kind=4 * kind + 2 * module.training + torch.is_grad_enabled(),
        **hashed,
    )
    layout = ShardLayout(whole.inputs.shape[1], mesh.cp_size, mesh.cp_rank, min_local=state.min_local)
    positions = whole.text_position_ids
    if not whole.packed:
        segments = _segments(module, layout, whole, None)
        return CpContext(state.config, mesh, layout, layout.one_document(), None, positions, segments), whole
    cu_seqlens = whole.boundaries
    assert cu_seqlens is not None
    documents = layout.local_cu_seqlens(cu_seqlens)
    positions = layout.document_positions(cu_seqlens)
    padded = layout.pad_cu_seqlens(cu_seqlens)
    segments = _segments(module, layout, whole, cu_seqlens)
    return CpContext(state.config, mesh, layout, documents, padded, positions, segments), whole


def _masks(module: Any, cp: CpContext, whole: Whole) -> dict[str, torch.Tensor | None]:
    """The stock masks of the whole sequence: attention keeps its whole, linear attention gets this rank's part.

    Where sdpa would get a mask of length squared, the context's segments stand for it.
    """
    batch, length = whole.inputs.shape[:2]
    shape_only = torch.empty(batch, length, 0, dtype=module.embed_tokens.weight.dtype, device=whole.inputs.device)
    packed = cp.cu_seqlens is not None
    attention_mask = whole.attention_mask if whole.padded and not packed else None
    position_ids = cp.position_ids if packed else None
    full = None
    if cp.segments is None:
        full = create_causal_mask(module.config, shape_only, attention_mask, None, position_ids=position_ids)
    linear = create_recurrent_attention_mask(module.config, shape_only, attention_mask, None)
    return {
        "full_attention": full,
        "linear_attention": None if linear is None else cp.layout.shard(linear, 1, 0),
    }


def _segments(module: Any, layout: ShardLayout, whole: Whole, cu_seqlens: torch.Tensor | None) -> Any:
    """Who sees whom in a packed or padded batch under sdpa, for the queries that attention has on this rank."""
    mask = whole.attention_mask
    if module.config._attn_implementation != "sdpa":
        return None
    if cu_seqlens is not None:
        found = packed_segments(cu_seqlens.tolist())
    elif mask is not None and whole.padded:
        found = padded_segments(mask)
    else:
        return None
    queries = layout.seq_len
    if layout.cp_size > 1 and module._hf_cp.config.attention_mode == "allgather":
        found, queries = queries_between(found, layout.start, layout.stop), layout.seq_len_local
    return groups(found, queries, layout.seq_len, whole.inputs.device)


def run_local(module: Any, stock_forward: Any, arguments: CallArguments, cp: CpContext, whole: Whole) -> Any:
    """Run the stock decoder on this rank's tokens; every tensor in its output is local, ``[B, L, ...]``.

    Inputs and positions are those of the call: a multimodal model has made embeddings of the ids that it was given.
    """
    layout = cp.layout
    inputs, position_ids = _read_whole(arguments).inputs, arguments.get("position_ids")
    if position_ids is None and cp.cu_seqlens is not None:
        position_ids = cp.position_ids
    if position_ids is None:
        position_ids = torch.arange(layout.seq_len, device=inputs.device).expand(inputs.shape[0], -1)
    if cp.mesh.cp_size > 1 and cp.config.projection_backend == "fused":
        cp = dataclasses.replace(cp, fused=fused_projections.prepare(module, cp, inputs.shape[0], position_ids))
    name, pad = "input_ids", module.config.pad_token_id or 0
    if module.training and getattr(module.embed_tokens, "neftune_noise_alpha", None) is not None:
        # NEFTune's noise depends on the length and comes from the common generator: draw it for the whole sequence.
        inputs = inputs if inputs.is_floating_point() else module.embed_tokens(inputs)
    if inputs.is_floating_point():
        name, pad = "inputs_embeds", 0.0
    changes = {"input_ids": None, "inputs_embeds": None, name: layout.shard(inputs, 1, pad)}
    local = arguments.replace(
        **changes,
        attention_mask=_masks(module, cp, whole),
        position_ids=layout.shard_position_ids(position_ids),
        use_cache=False,
        return_dict=True,
        cp_context=cp,
    )
    with own_randomness(module, cp.mesh):
        return stock_forward(module, **local)


@outside_graphs
def whole_sequence(x: torch.Tensor, cp: CpContext) -> torch.Tensor:
    """Every rank's tokens ``[B, L, ...]`` as one sequence ``[B, T, ...]``, in order and without padding.

    Contiguous, as what stock returns: losses, its own and others', take views of it.
    """
    return cp.layout.unpad(gather_sequence(x, cp.mesh, dim=1), 1).contiguous()


def whole_output(output: Any, cp: CpContext) -> None:
    """Replace what a decoder recorded of each layer on this rank by the whole sequence's, in place.

    Hidden states that were not asked for are ``None``; router logits are ``[B * T, E]`` as stock's.
    """
    if output.get("hidden_states") is not None:
        output["hidden_states"] = tuple(None if x is None else whole_sequence(x, cp) for x in output["hidden_states"])
    if output.get("router_logits") is not None:
        rows = [x.unflatten(0, (-1, cp.layout.seq_len_local)) for x in output["router_logits"]]
        output["router_logits"] = tuple(whole_sequence(x, cp).flatten(0, 1) for x in rows)


def whole_decoder_output(output: Any, cp: CpContext) -> None:
    """`whole_output`, and the decoder's last hidden state too."""
    output["last_hidden_state"] = whole_sequence(output["last_hidden_state"], cp)
    whole_output(output, cp)


def pop_as_tuple(module: Any, arguments: CallArguments) -> bool:
    """Whether the caller, or else the config, wants a tuple; the call no longer says so."""
    return_dict = arguments.pop("return_dict")
    return (module.config.return_dict if return_dict is None else return_dict) is False


def forward(module: Any, stock_forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The decoder, called by a user: whole batch in, whole hidden states out. With a cache: the stock forward.

    A patched head gives the keyword ``cp_opened``, what its `open_context` returned, and the hidden states stay local.
    With a list as ``cp_routers``, this rank's router logits go into it.
    """
    arguments = CallArguments(stock_forward, args, kwargs)
    opened, routers = arguments.pop("cp_opened"), arguments.pop("cp_routers")
    if opened is not None:
        if routers is not None:
            arguments = CallArguments(stock_forward, (), arguments.replace(output_router_logits=True))
        output = run_local(module, stock_forward, arguments, *opened)
        if routers is not None:
            routers += output["router_logits"]
        return output
    if is_cached(arguments):
        mesh, cache = module._hf_cp.mesh, arguments.cache
        if mesh.cp_size == 1:
            return stock_forward(module, **arguments.replace())
        _agree_on_cache(module, cache)
        output = stock_forward(module, **arguments.replace())
        _remember(cache, output, mesh)
        return output
    as_tuple = pop_as_tuple(module, arguments)
    cp, whole = open_context(module, arguments)
    output = run_local(module, stock_forward, arguments, cp, whole)
    whole_decoder_output(output, cp)
    return output.to_tuple() if as_tuple else output
