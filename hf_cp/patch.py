"""Patch a model in place, and take the patch back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from . import plugin
from .class_swap import is_patched, stock_class, swap_in, swap_out
from .collectives import all_reduce_
from .config import PatchConfig
from .kernels.gdn.backend import check_served
from .mesh import CpMesh
from .models.common import (
    attention,
    causal_lm,
    classification,
    fused_head,
    fused_projections,
    gated_delta_net,
    lm_head,
    multimodal,
    out_proj,
    text_model,
)
from .models.common.family import Family
from .models.qwen3_5 import FAMILY as QWEN3_5
from .models.qwen3_5_moe import FAMILY as QWEN3_5_MOE
from .models.qwen3_next import FAMILY as QWEN3_NEXT
from .modes import projections
from .state import PatchState, bind, check_group, patch_state

FAMILIES: tuple[Family, ...] = (QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT)


def patch(
    model: nn.Module,
    *,
    linear_mode: str = "p2p",
    attention_mode: str = "ulysses",
    gdn_backend: str = "triton",
    projection_backend: str = "torch",
    cp_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Make a model context parallel, in place.

    The group comes from ``cp_group``, or from Accelerate when the model is prepared under a `ContextParallelConfig` or
    a launch configuration with ``parallelism_config``. Without either the patched modules run on one device.
    Parameters, state-dict keys, dtypes and ``config.architectures`` stay as they are. Patching again with the same
    settings changes nothing.

    Args:
        model: a supported transformers model, or a module that holds one (a PEFT model, say).
        linear_mode: Gated DeltaNet across ranks: ``"p2p"``, ``"allgather"`` or ``"ulysses"``.
        attention_mode: full attention across ranks: ``"ulysses"`` or ``"allgather"``.
        gdn_backend: Gated DeltaNet kernels: ``"triton"`` (Hopper GPUs), ``"gluon"`` (the same, faster, for heads of 128
            computed in bf16 or fp16) or ``"eager"`` (pure torch, any device).
        projection_backend: exchange and projection: ``"torch"``, or ``"fused"`` (Hopper GPUs): one kernel for both
            in mixers whose mode is ``"ulysses"``.
        cp_group: ranks that share one sequence, in the order of the shards.

    Returns:
        The same model.

    Raises:
        ValueError: unknown setting, backend that cannot run here, model or layer that is not supported, head counts
            that the group does not divide; one line that names field, value and remedy.
    """
    config = PatchConfig(linear_mode, attention_mode, gdn_backend, projection_backend)
    check_served(config.gdn_backend)
    if config.projection_backend == "fused":
        projections.check_served()
    mesh = CpMesh.from_group(cp_group)
    targets = list(_targets(model))
    for root, family in targets:
        existing = patch_state(root)
        if existing is not None and existing.config != config:
            raise ValueError(f"model is already patched with {existing.config}: call hf_cp.unpatch(model) first")
        _check_layers(root, family)
        _check_kernels(root, config)
        _check_projections(root, family, config)
        if cp_group is not None:
            check_group(root, config, mesh)
    for root, family in targets:
        _patch_root(root, family, config)
    if cp_group is not None:
        bind(model, mesh)
        fused_head.serve_fused_head(model)
    plugin.install()
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Give every patched module its stock class back, in place; the model is what it was before `patch`.

    Returns:
        The same model.
    """
    for module in model.modules():
        if is_patched(module):
            swap_out(module)
            for name in ("_hf_cp", attention.CONFIG_VIEW):
                module.__dict__.pop(name, None)
    return model


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average gradients over ranks in a bare training loop, without FSDP or DDP, between backward and optimizer step.

    Args:
        model: a patched model bound to a group.
        group: ranks to average over; the context-parallel group by default. With data parallelism beside it, give the
            group of all ranks.

    Raises:
        ValueError: the model is not patched, or FSDP holds its parameters and averages by itself.
    """
    state = patch_state(model)
    if state is None:
        raise ValueError("model is not patched: call hf_cp.patch(model) before hf_cp.average_gradients(model)")
    mesh = state.mesh if group is None else CpMesh.from_group(group)
    if mesh.cp_size == 1:
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(isinstance(p, DTensor) for p in parameters):
        raise ValueError("model parameters are sharded by FSDP2, which averages gradients itself: drop the call")
    # A parameter without a gradient on every rank stays without one, or weight decay would move it.
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64, device=parameters[0].device)
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for p, ranks in zip(parameters, all_reduce_(used, mesh).tolist(), strict=True):
        if ranks:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            buckets.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad)
    for gradients in buckets.values():
        flat = torch.cat([g.flatten() for g in gradients])
        mean = all_reduce_(flat, mesh).div_(mesh.cp_size).split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, mean, strict=True):
            gradient.copy_(part.view_as(gradient))


def _targets(model: nn.Module) -> Iterator[tuple[nn.Module, Family]]:
    """Outermost transformers models inside ``model`` and their families.

    Raises:
        ValueError: a transformers model that no family knows.
    """
    roots = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    inner = {id(child) for root in roots for child in root.modules() if child is not root}
    supported = sorted({cls.__name__ for f in FAMILIES for cls in f.models})
    if not roots:
        raise ValueError(f"model of class {type(model).__name__} holds no transformers model: give one of {supported}")
    for root in roots:
        if id(root) in inner and any(stock_class(root) in f.vision_towers for f in FAMILIES):
            continue
        family = next((f for f in FAMILIES if stock_class(root) in f.models), None)
        if family is None:
            raise ValueError(f"model of class {stock_class(root).__name__} is not supported: give one of {supported}")
        if id(root) not in inner:
            yield root, family


def _check_layers(root: nn.Module, family: Family) -> None:
    """Raise where a mixer is not of the family's class: it would run on each rank's tokens alone."""
    text_config: Any = root.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    classes = [stock_class(module) for module in root.modules()]
    layer_types = text_config.layer_types[: text_config.num_hidden_layers]
    for layer_type, mixer in (("linear_attention", family.gated_delta_net), ("full_attention", family.attention)):
        expected, found = layer_types.count(layer_type), classes.count(mixer)
        if found < expected:
            raise ValueError(
                f"{expected} {layer_type} layers but {found} of class {mixer.__name__}: "
                "replaced layer classes are not supported; restore them"
            )


def _check_kernels(root: Any, config: PatchConfig) -> None:
    """Raise where the model's sizes or dtype are not served by the kernels that were chosen."""
    text_config = root.config.get_text_config()
    if "linear_attention" in text_config.layer_types[: text_config.num_hidden_layers]:
        check_served(
            config.gdn_backend,
            key_dim=text_config.linear_key_head_dim,
            value_dim=text_config.linear_value_head_dim,
            taps=text_config.linear_conv_kernel_dim,
            # Weights in fp32 may be computed with in 16 bits; the layers see which, and refuse.
            dtype=None if root.dtype == torch.float32 else root.dtype,
        )


def _check_projections(root: nn.Module, family: Family, config: PatchConfig) -> None:
    """Raise where a projection is not one that the fused kernels read."""
    for module in root.modules():
        if stock_class(module) is family.attention and fused_projections.serves(config, "full_attention"):
            fused_projections.check(module, fused_projections.ATTENTION)
        elif stock_class(module) is family.gated_delta_net and fused_projections.serves(config, "linear_attention"):
            fused_projections.check(module, (*family.project_to_heads.names, "out_proj"))


def _patch_root(root: nn.Module, family: Family, config: PatchConfig) -> None:
    text_config: Any = root.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    state = patch_state(root) or PatchState(config, CpMesh.single(), max(1, text_config.linear_conv_kernel_dim - 1))
    shared = {"hf_cp_family": family}
    for module in list(root.modules()):
        stock = stock_class(module)
        if stock in family.models:
            module.__dict__["_hf_cp"] = state
        if stock in family.language_models:
            swap_in(module, causal_lm.forward, shared)
            head: Any = module.lm_head
            if stock_class(head) is nn.Linear:
                kernel = "torch" if config.gdn_backend == "eager" else "triton"
                swap_in(head, lm_head.forward, {"hf_cp_cross_entropy": kernel})
        elif stock in family.token_classifiers + family.sequence_classifiers:
            swap_in(module, classification.forward, shared)
        elif stock in family.multimodal_backbones:
            swap_in(module, multimodal.forward, shared)
        elif stock in family.backbones:
            swap_in(module, text_model.forward, shared)
        elif stock in family.vision_towers:
            swap_in(module, multimodal.vision_forward, shared)
        elif stock is family.attention:
            swap_in(module, fused_projections.attention_forward, shared | {"config": attention.CONFIG_PROPERTY})
            attention.show_config(module)
        elif stock is family.gated_delta_net:
            swap_in(module, gated_delta_net.forward, shared | {"hf_cp_gdn_backend": config.gdn_backend})
            projection: Any = module.out_proj
            if stock_class(projection) is nn.Linear:
                swap_in(projection, out_proj.forward, {})
