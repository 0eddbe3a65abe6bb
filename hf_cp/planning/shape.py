"""The sizes of a model, read from its `config.json` or by the name of a published one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a text decoder of Gated DeltaNet and full attention layers.

    Args:
        layer_types: one of ``"linear_attention"`` and ``"full_attention"`` a layer.
        hidden, vocab: width of the residual stream, and of the logits.
        ffn: width of a dense MLP, or of the shared expert of a mixture.
        query_heads, kv_heads, head_dim: of full attention.
        key_heads, value_heads, key_dim, value_dim, taps: of a Gated DeltaNet layer and its convolution.
        tied: whether the head shares the embedding's weight.
        experts, experts_per_token, expert_ffn: of a mixture; 0 where the MLP is dense.
        layer_class: name of transformers' decoder layer, which FSDP wraps.
    """

    layer_types: tuple[str, ...]
    hidden: int
    vocab: int
    ffn: int
    query_heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    layer_class: str = "Qwen3_5DecoderLayer"

    @property
    def linear_layers(self) -> int:
        return self.layer_types.count(LINEAR)

    @property
    def full_layers(self) -> int:
        return self.layer_types.count(FULL)

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: q, k and v of all heads of a Gated DeltaNet layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def query_width(self) -> int:
        return self.query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def mixer_parameters(self, layer_type: str) -> int:
        """Of one layer's token mixer."""
        if layer_type == FULL:
            return self.hidden * (3 * self.query_width + 2 * self.kv_width) + 2 * self.head_dim
        projections = self.hidden * (self.conv_width + 2 * self.value_width + 2 * self.value_heads)
        return projections + self.taps * self.conv_width + 2 * self.value_heads + self.value_dim

    @property
    def mlp_parameters(self) -> int:
        """Of one layer's MLP, or all its experts."""
        dense = 3 * self.hidden * self.ffn
        if not self.experts:
            return dense
        return dense + self.hidden * (self.experts + 1 + 3 * self.experts * self.expert_ffn)

    @property
    def active_mlp_parameters(self) -> int:
        """Those of `mlp_parameters` that one token is multiplied with."""
        if not self.experts:
            return self.mlp_parameters
        return self.mlp_parameters - 3 * self.hidden * self.expert_ffn * (self.experts - self.experts_per_token)

    def layer_parameters(self, layer_type: str) -> int:
        """Of one decoder layer, its two norms with it."""
        return self.mixer_parameters(layer_type) + self.mlp_parameters + 2 * self.hidden

    def linears(self, layer_type: str) -> list[tuple[int, int]]:
        """Input and output widths of one layer's linear modules in Qwen3.5; experts and router are no such modules."""
        D = self.hidden
        if layer_type == FULL:
            found = [(D, 2 * self.query_width), (D, self.kv_width), (D, self.kv_width), (self.query_width, D)]
        else:
            inner = [self.conv_width, self.value_width, self.value_heads, self.value_heads]
            found = [*((D, width) for width in inner), (self.value_width, D)]
        if self.experts:
            found.append((D, 1))  # the shared expert's gate
        return [*found, (D, self.ffn), (D, self.ffn), (self.ffn, D)]

    def adapter_parameters(self, layer_type: str, rank: int) -> int:
        """Of LoRA adapters on every linear module of one layer, PEFT's ``target_modules="all-linear"``."""
        return rank * sum(map(sum, self.linears(layer_type)))

    def adapters(self, rank: int) -> int:
        """Of LoRA adapters on every linear module of the model but its head."""
        counts = ((LINEAR, self.linear_layers), (FULL, self.full_layers))
        return sum(count * self.adapter_parameters(kind, rank) for kind, count in counts)

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """Outside the layers: embedding, head where it has its own, last norm."""
        return self.head_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        counts = ((LINEAR, self.linear_layers), (FULL, self.full_layers))
        return sum(count * self.layer_parameters(kind) for kind, count in counts if count) + self.root_parameters

    def with_layers(self, count: int) -> ModelShape:
        """The same with the first ``count`` layers."""
        return replace(self, layer_types=self.layer_types[:count])


_LAYERS = {
    "qwen3_5": "Qwen3_5DecoderLayer",
    "qwen3_5_moe": "Qwen3_5MoeDecoderLayer",
    "qwen3_next": "Qwen3NextDecoderLayer",
}


def _published(hidden: int, ffn: int, layers: int, heads: str, linear_heads: str, **more: Any) -> ModelShape:
    query_heads, kv_heads = map(int, heads.split("/"))
    key_heads, value_heads = map(int, linear_heads.split("/"))
    return ModelShape(
        layer_types=tuple(FULL if i % 4 == 3 else LINEAR for i in range(layers)),
        hidden=hidden,
        vocab=248320,
        ffn=ffn,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=256,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=128,
        value_dim=128,
        taps=4,
        **{"tied": False, **more},
    )


def _mixture(hidden: int, ffn: int, layers: int, heads: str, linear_heads: str, experts: int, each: int) -> ModelShape:
    sizes: Any = {
        "experts": experts,
        "experts_per_token": each,
        "expert_ffn": ffn,
        "layer_class": _LAYERS["qwen3_5_moe"],
    }
    return _published(hidden, ffn, layers, heads, linear_heads, **sizes)


# Qwen3.5 as published; one layer in four is of full attention.
PUBLISHED: dict[str, ModelShape] = {
    "0.8B": _published(1024, 3584, 24, "8/2", "16/16", tied=True),
    "2B": _published(2048, 6144, 24, "8/2", "16/16"),
    "4B": _published(2560, 9216, 32, "16/4", "16/32"),
    "9B": _published(4096, 12288, 32, "16/4", "16/32"),
    "27B": _published(5120, 17408, 64, "24/4", "16/48"),
    "35B-A3B": _mixture(2048, 512, 40, "16/2", "16/32", 256, 8),
    "122B-A10B": _mixture(3072, 1024, 48, "32/2", "16/64", 256, 8),
    "397B-A17B": _mixture(4096, 1024, 60, "32/2", "16/64", 512, 10),
}


def load_shape(model: str) -> ModelShape:
    """The shape behind ``--model``.

    Args:
        model: a ``config.json``, a folder that holds one, or a name of `PUBLISHED`, also as ``Qwen/Qwen3.5-0.8B``.

    Raises:
        ValueError: nothing of this name, or a config of another family.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        size = model.lower().removeprefix("qwen/").removeprefix("qwen3.5-")
        for name, shape in PUBLISHED.items():
            if name.lower() == size:
                return shape
        raise ValueError(f"--model {model}: give a config.json, a folder with one, or one of {', '.join(PUBLISHED)}")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--model {path} is not JSON ({error}): give the config.json of a model") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--model {path} holds no fields: give the config.json of a model")
    return shape_from_config(fields, str(path))


def shape_from_config(fields: Mapping[str, Any], where: str = "config") -> ModelShape:
    """The shape that a transformers config describes; that of a model with images is the shape of its text model.

    Args:
        fields: the contents of ``config.json``, or ``config.to_dict()``.
        where: what to call it in an error.

    Raises:
        ValueError: a field that is missing, or a layer or MLP arrangement that the estimate does not know.
    """
    text = fields.get("text_config") or fields

    def get(name: str, default: int | None = None) -> int:
        value = text.get(name, default)
        if value is None:
            raise ValueError(f"{where} has no {name}: give the config of a Qwen3.5 or Qwen3-Next model")
        if type(value) is not int or value < 1:
            raise ValueError(f"{where} has {name} {value!r}: give a whole number above 0")
        return value

    family = str(text.get("model_type")).removesuffix("_text")
    if family not in _LAYERS:
        raise ValueError(f"{where} has model_type {family!r}: only {', '.join(_LAYERS)} are known")
    count = get("num_hidden_layers")
    types = text.get("layer_types")
    if types is None:
        every = get("full_attention_interval", 4)
        types = [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)]
    types = tuple(types[:count])
    if len(types) < count:
        raise ValueError(f"{where} has num_hidden_layers {count}, but {len(types)} layer_types: make them agree")
    unknown = sorted(set(types) - {LINEAR, FULL})
    if unknown:
        raise ValueError(f"{where} has layers of type {unknown[0]}: only {LINEAR} and {FULL} are known")
    experts = text.get("num_experts") or 0
    if experts and (text.get("decoder_sparse_step", 1) != 1 or text.get("mlp_only_layers")):
        raise ValueError(f"{where} mixes dense MLPs and experts (decoder_sparse_step, mlp_only_layers): not estimated")
    return ModelShape(
        layer_types=types,
        hidden=get("hidden_size"),
        vocab=get("vocab_size"),
        ffn=get("shared_expert_intermediate_size") if experts else get("intermediate_size"),
        query_heads=get("num_attention_heads"),
        kv_heads=get("num_key_value_heads"),
        head_dim=get("head_dim", get("hidden_size") // get("num_attention_heads")),
        key_heads=get("linear_num_key_heads"),
        value_heads=get("linear_num_value_heads"),
        key_dim=get("linear_key_head_dim"),
        value_dim=get("linear_value_head_dim"),
        taps=get("linear_conv_kernel_dim", 4),
        tied=bool(text.get("tie_word_embeddings", fields.get("tie_word_embeddings", False))),
        experts=experts,
        experts_per_token=get("num_experts_per_tok") if experts else 0,
        expert_ffn=get("moe_intermediate_size") if experts else 0,
        layer_class=_LAYERS[family],
    )
