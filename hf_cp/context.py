"""What every mixer of one forward needs to know about its place in the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .config import PatchConfig
from .layout import LocalDocuments, ShardLayout
from .mesh import CpMesh


@dataclass(frozen=True, eq=False)
class CpContext:
    """One forward's layout, as a keyword that travels with the hidden states.

    It is an argument and never a global: activation checkpointing replays a layer during backward, when a global
    would already belong to another forward.

    Args:
        config: modes and backends of the model.
        mesh: the context-parallel group.
        layout: which tokens of the sequence this rank holds.
        documents: the documents on this rank and which of them cross its edges.
        cu_seqlens: int32 ``[N+1]`` boundaries in the whole padded sequence, ``None`` where nothing is packed.
        position_ids: text positions ``[B, T]`` of the whole sequence, ``None`` where the model derives none.
        segments: which keys the queries of full attention see, as index lists; ``None`` for plain causal attention or
            where the attention function takes a mask.
        fused: what mixers with fused projections share (`models.common.fused_projections.FusedProjections`), or
            ``None``.
    """

    config: PatchConfig
    mesh: CpMesh
    layout: ShardLayout
    documents: LocalDocuments
    cu_seqlens: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    segments: tuple[Any, ...] | None = None
    fused: Any = None
