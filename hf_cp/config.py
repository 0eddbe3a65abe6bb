"""The settings of one patched model. Imports nothing of this package."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass(frozen=True)
class PatchConfig:
    """How the mixers of one patched model cross ranks and which kernels they run.

    Args:
        linear_mode: Gated DeltaNet across ranks: ``"p2p"``, ``"allgather"`` or ``"ulysses"``.
        attention_mode: full attention across ranks: ``"ulysses"`` or ``"allgather"``.
        gdn_backend: Gated DeltaNet kernels: ``"triton"``, ``"gluon"`` (heads of 128, 16-bit computation) or ``"eager"``
            (pure torch).
        projection_backend: exchange and projection: ``"torch"``, or ``"fused"`` where a mode is ``"ulysses"``.

    Raises:
        ValueError: a value is not one of these. There is no ``"auto"``: what runs is what was chosen.
    """

    linear_mode: str = "p2p"
    attention_mode: str = "ulysses"
    gdn_backend: str = "triton"
    projection_backend: str = "torch"

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "linear_mode": ("p2p", "allgather", "ulysses"),
        "attention_mode": ("ulysses", "allgather"),
        "gdn_backend": ("triton", "gluon", "eager"),
        "projection_backend": ("torch", "fused"),
    }

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = self.CHOICES[field.name]
            if value not in allowed:
                raise ValueError(f"{field.name}={value!r} is not supported: choose {' or '.join(map(repr, allowed))}")
        if self.projection_backend == "fused" and "ulysses" not in (self.linear_mode, self.attention_mode):
            raise ValueError(
                f"projection_backend='fused' serves Ulysses exchanges, but linear_mode={self.linear_mode!r} and "
                f"attention_mode={self.attention_mode!r} have none: choose 'ulysses' for one, or 'torch'"
            )
