"""The table ``layer`` of `hf-cp bench`: one token mixer, patched and stock, on one device or between ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .bench_ranks import Ranks, timed, write_trace
from .bench_step import refusal, text_config
from .collectives import all_reduce_, gather_sequence
from .config import PatchConfig
from .context import CpContext
from .layout import ShardLayout
from .mesh import CpMesh
from .planning.shape import FULL, LINEAR, ModelShape

CHECKED_TOKENS = 2048
COLUMNS = ("layer code", "tokens", "forward ms", "backward ms", "both ms", "peak MiB")
RANK_COLUMNS = (
    "layer code",
    "mode",
    "ranks",
    "tokens",
    "local tokens",
    "forward ms",
    "forward min",
    "forward p90",
    "backward ms",
    "both ms",
    "both min",
    "both p90",
    "allocated MiB",
    "reserved MiB",
)
ALONE = "one device"
Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """How a layer is computed.

    Args:
        code: ``"stock"``, or a ``gdn_backend`` to patch with.
        mode: the layer's mode between ranks, or `ALONE`: every rank by itself.
        projections: ``projection_backend``.
    """

    code: str
    mode: str = ALONE
    projections: str = "torch"

    @property
    def name(self) -> str:
        return self.mode if self.projections == "torch" else f"{self.mode}, {self.projections}"

    def mesh(self, ranks: Ranks) -> CpMesh:
        return CpMesh.single() if self.mode == ALONE else ranks.mesh

    def settings(self, layer_type: str) -> dict[str, str]:
        """Arguments of `hf_cp.patch`."""
        found = {"gdn_backend": self.code, "projection_backend": self.projections}
        if self.mode != ALONE:
            found["linear_mode" if layer_type == LINEAR else "attention_mode"] = self.mode
        return found


def shape_of(layer_type: str, hidden: int, heads: tuple[int, int], dim: int) -> ModelShape:
    """A decoder of one layer.

    Args:
        heads: key and value heads of Gated DeltaNet, query and key/value heads of full attention.
        dim: of a head.
    """
    linear = layer_type == LINEAR
    first, second = heads
    return ModelShape(
        (layer_type,),
        hidden=hidden,
        vocab=8,
        ffn=64,
        query_heads=1 if linear else first,
        kv_heads=1 if linear else second,
        head_dim=32 if linear else dim,
        key_heads=first if linear else 1,
        value_heads=second if linear else 1,
        key_dim=dim if linear else 16,
        value_dim=dim if linear else 16,
        taps=4,
        tied=True,
    )


def make_model(shape: ModelShape, device: torch.device) -> Any:
    """A decoder in bfloat16, the same weights on every call."""
    from transformers import Qwen3_5TextModel

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3_5TextModel(text_config(shape))
    return model.to(torch.bfloat16)


def make_layer(variant: Variant, model: Any, tokens: int, mesh: CpMesh) -> tuple[Layer, dict[str, torch.nn.Parameter]]:
    """The first layer's token mixer as a function of this rank's ``[1, L, D]``, and its parameters by name."""
    from .models.common import fused_projections
    from .patch import patch

    layer_type = model.config.layer_types[0]
    block = model.layers[0]
    layer = block.linear_attn if layer_type == LINEAR else block.self_attn
    parameters = dict(layer.named_parameters())
    layout = ShardLayout(tokens, mesh.cp_size, mesh.cp_rank)
    device = next(iter(parameters.values())).device
    positions = torch.arange(tokens, device=device)[None]
    given: dict[str, Any] = {}
    if layer_type == FULL:
        like = torch.empty(0, device=device, dtype=model.dtype)
        local = layout.shard_position_ids(positions).expand(3, -1, -1)
        with torch.no_grad():
            given |= {"position_embeddings": model.rotary_emb(like, local), "attention_mask": None}
    if variant.code != "stock":
        settings = variant.settings(layer_type)
        patch(model, **settings, cp_group=mesh.group)
        context = CpContext(PatchConfig(**settings), mesh, layout, layout.one_document())
        if variant.projections == "fused":
            context = replace(context, fused=fused_projections.prepare(model, context, 1, positions))
        given["cp_context"] = context

    def call(x: torch.Tensor) -> torch.Tensor:
        y = layer(x, **given)
        return y if layer_type == LINEAR else y[0]

    return call, parameters


def results(
    layer: Layer, parameters: dict[str, torch.nn.Parameter], x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output, and gradients of the input and of all parameters."""
    y = layer(x)
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return {"output": y.detach(), **dict(zip(("input", *parameters), gradients, strict=True))}


def inputs(tokens: int, hidden: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and gradient of the output ``[1, T, D]``, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    x, dy = (torch.randn(1, tokens, hidden, device=device, generator=generator).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def checked_tokens(device: torch.device) -> int:
    return CHECKED_TOKENS if device.type == "cuda" else 128


def exact(shape: ModelShape, device: torch.device) -> dict[str, torch.Tensor]:
    """What every variant is compared with: `results` in fp64, eager, on one device."""
    tokens = checked_tokens(device)
    x, dy = inputs(tokens, shape.hidden, device)
    layer = make_layer(Variant("eager"), make_model(shape, device).double(), tokens, CpMesh.single())
    return results(*layer, x.detach().double().requires_grad_(), dy.double())


def errors(variant: Variant, shape: ModelShape, ranks: Ranks, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 distances of all results to the exact ones, the same numbers on every rank.

    Outputs and input gradients of all ranks are joined, parameter gradients added up.
    """
    tokens, mesh = checked_tokens(ranks.device), variant.mesh(ranks)
    layout = ShardLayout(tokens, mesh.cp_size, mesh.cp_rank)
    x, dy = (layout.shard(whole.detach(), 1, 0.0) for whole in inputs(tokens, shape.hidden, ranks.device))
    layer = make_layer(variant, make_model(shape, ranks.device), tokens, mesh)
    found = results(*layer, x.requires_grad_(), dy)
    distances = []
    for name, reference in expected.items():
        value = found[name].double()
        value = gather_sequence(value, mesh, dim=1) if name in ("output", "input") else all_reduce_(value, mesh)
        distances.append(float((value - reference).norm() / reference.norm()))
    return dict(zip(expected, ranks.largest(distances), strict=True))


def check(variants: list[Variant], shape: ModelShape, ranks: Ranks, say: Callable[[str], None]) -> None:
    """Compare every variant with fp64.

    Raises:
        ValueError: one is further away than stock's own error permits, on every rank alike; nothing is timed then.
    """
    expected = exact(shape, ranks.device)
    stock = errors(Variant("stock"), shape, ranks, expected)
    for variant in variants:
        found = errors(variant, shape, ranks, expected)
        name = variant.code if variant.mode == ALONE else f"{variant.code}, {variant.name}"
        reason = refusal(found, stock)
        if reason is not None:
            raise ValueError(f"{name} is not timed: {reason}")
        say(f"{name} is at most {max(found.values()):.1e} away from fp64, stock {max(stock.values()):.1e}")


def measure(variant: Variant, tokens: int, shape: ModelShape, ranks: Ranks, traces: Path | None) -> dict[str, Any]:
    """One row: ``tokens`` of all ranks that share them."""
    mesh = variant.mesh(ranks)
    layer, parameters = make_layer(variant, make_model(shape, ranks.device), tokens, mesh)
    local = tokens // mesh.cp_size
    x, dy = inputs(local, shape.hidden, ranks.device)
    runs = (1, 3) if variant.code in ("stock", "eager") else (5, 20)

    def forward(mark: Any) -> None:
        with torch.no_grad():
            layer(x)

    def both(mark: Any) -> None:
        results(layer, parameters, x, dy)

    gc.collect()
    forward_time = timed(forward, ranks, *runs, host=False)
    held = torch.cuda.memory_allocated() if ranks.device.type == "cuda" else 0
    ranks.forget_peaks()
    both_time = timed(both, ranks, *runs, host=False)
    allocated, reserved = ranks.peaks()
    row: dict[str, Any] = {
        "layer code": variant.code,
        "mode": variant.name,
        "ranks": mesh.cp_size,
        "tokens": tokens,
        "local tokens": local,
        "forward ms": forward_time.median,
        "forward min": forward_time.least,
        "forward p90": forward_time.p90,
        "backward ms": both_time.median - forward_time.median,
        "both ms": both_time.median,
        "both min": both_time.least,
        "both p90": both_time.p90,
    }
    if ranks.device.type == "cuda":
        row |= {"peak MiB": (allocated - held) / 2**20}
        row |= {"allocated MiB": allocated / 2**20, "reserved MiB": reserved / 2**20}
    if traces is not None:
        name = "-".join([variant.code, *variant.name.replace(",", "").split(), f"{mesh.cp_size}x{local}"])
        write_trace(both, ranks, traces, f"layer-{name}")
    return row
