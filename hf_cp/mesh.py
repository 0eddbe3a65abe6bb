"""The ranks that share one sequence, and this rank's place among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class CpMesh:
    """The context-parallel group of this process: an immutable handle that layers and autograd nodes share.

    A mesh of size 1 has no group; every collective on it is the identity and sends nothing.
    Copying returns the same object, because a process group cannot be copied: a deep-copied model shares its group.

    Args:
        group: the process group, or None for a mesh of size 1.
        cp_size: number of ranks of the group.
        cp_rank: this process's rank within the group (not the global rank).

    Raises:
        ValueError: sizes and rank that contradict each other.
    """

    group: dist.ProcessGroup | None
    cp_size: int
    cp_rank: int

    def __post_init__(self) -> None:
        if self.cp_size < 1 or not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"cp_rank={self.cp_rank} must lie in [0, cp_size={self.cp_size}) with cp_size >= 1")
        if self.group is None and self.cp_size > 1:
            raise ValueError(f"cp_size={self.cp_size} needs a process group; pass one to CpMesh.from_group")

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None) -> CpMesh:
        """The mesh over `group`; a group of one rank (or None) gives `CpMesh.single()`.

        Raises:
            ValueError: this process is not a member of `group`.
        """
        if group is None:
            return cls.single()
        cp_rank = dist.get_rank(group)
        if cp_rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the cp group; pass the group that contains it")
        cp_size = dist.get_world_size(group)
        return cls.single() if cp_size == 1 else cls(group, cp_size, cp_rank)

    @classmethod
    def single(cls) -> CpMesh:
        """A mesh of one rank that never communicates."""
        return cls(None, 1, 0)

    @property
    def previous_rank(self) -> int | None:
        """Group rank that holds the tokens just before this rank's; None on the first rank."""
        return self.cp_rank - 1 if self.cp_rank > 0 else None

    @property
    def next_rank(self) -> int | None:
        """Group rank that holds the tokens just after this rank's; None on the last rank."""
        return self.cp_rank + 1 if self.cp_rank + 1 < self.cp_size else None

    def backend(self, device_type: str) -> str | None:
        """Name of the group's backend for tensors on `device_type`, or None if it has none."""
        if self.group is None:
            return None
        # A configuration reads "cpu:gloo,cuda:nccl".
        pairs = (entry.partition(":") for entry in dist.get_backend_config(self.group).split(","))
        return {device: name for device, _, name in pairs}.get(device_type)

    def stages_through_cpu(self, device: torch.device) -> bool:
        """Whether tensors on `device` travel as CPU copies: gloo's send and recv abort the process on CUDA tensors."""
        return self.cp_size > 1 and device.type != "cpu" and self.backend(device.type) == "gloo"

    @property
    def control_device(self) -> torch.device:
        """Where small host-side messages live: the CPU if the group can send from it, else the current CUDA device."""
        if self.cp_size == 1 or self.backend("cpu") is not None:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def __copy__(self) -> CpMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CpMesh:
        return self
