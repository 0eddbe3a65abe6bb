"""Names for the parts of a step in profiles, read by `hf-cp trace`, and in NVTX under torch's `emit_nvtx`.

The names are `hf_cp::<part>`; a part of one layer carries its index, `hf_cp::linear_attn.3`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.autograd.profiler

PREFIX = "hf_cp::"
_NOTHING = contextlib.nullcontext()


def region(part: str, layer: int | None = None) -> Any:
    """A context that names what runs in it while a profiler runs; otherwise it costs one look at a flag.

    In graphs of `torch.compile` it is nothing: a name would split them.

    Args:
        part: what runs, e.g. ``"conv"``.
        layer: index of the decoder layer that it makes up.
    """
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.autograd.profiler.record_function(PREFIX + part if layer is None else f"{PREFIX}{part}.{layer}")
