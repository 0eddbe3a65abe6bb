"""The line that says what runs, once for a model and its group, on rank 0; a warning only where something is lost."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from .class_swap import stock_class
from .kernels.gdn.backend import unavailable_reason
from .state import PatchState

_logger = logging.getLogger("hf_cp")


def announce(decoder: Any, state: PatchState) -> None:
    """Write the line unless it has been written for this group.

    Args:
        decoder: the patched decoder, on its device.
        state: what it is patched with.
    """
    if state.announced is state.mesh:
        return
    state.announced = state.mesh
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    _show()
    device = next(decoder.parameters()).device
    _logger.info(in_words(decoder, state, device))
    for loss in losses(state, device):
        _logger.warning(loss)


def in_words(decoder: Any, state: PatchState, device: torch.device) -> str:
    """Model, patched layers, mesh, modes, backends and kernels, in a line."""
    config, cp_size = state.config, state.mesh.cp_size
    types = decoder.config.layer_types[: decoder.config.num_hidden_layers]
    across = cp_size > 1
    linear = f"{config.linear_mode}, {config.gdn_backend}" if across else config.gdn_backend
    implementation = decoder.config._attn_implementation
    attention = f"{config.attention_mode}, {implementation}" if across else implementation
    processes = dist.get_world_size() if dist.is_initialized() else 1
    kernels = "pure torch" if config.gdn_backend == "eager" else f"Triton {version('triton')}"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return (
        f"{stock_class(decoder).__name__}: {types.count('linear_attention')} Gated DeltaNet layers ({linear}), "
        f"{types.count('full_attention')} of full attention ({attention}); cp_size {cp_size} of {processes} processes; "
        f"projections {config.projection_backend}; {kernels} on {place}"
    )


def losses(state: PatchState, device: torch.device) -> list[str]:
    """What a choice costs here without need, a line each."""
    found = []
    if state.config.gdn_backend == "eager" and device.type == "cuda" and unavailable_reason("triton") is None:
        found.append(
            'gdn_backend="eager" on a GPU that runs the Triton kernels is many times slower: drop the argument'
        )
    if state.mesh.stages_through_cpu(device):
        found.append("the context-parallel group is gloo's: every message passes through the CPU; use nccl on GPUs")
    return found


def _show() -> None:
    """Let the line be seen where nobody has set up logging: Python shows warnings alone there."""
    if not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
