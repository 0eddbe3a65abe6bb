"""Gated delta rule: token reference, stage functions by backend, differentiable operator. Needs torch alone."""

from .backend import get_backend, is_available, unavailable_reason
from .chunk import chunk_gated_delta_rule
from .reference import recurrent_gated_delta_rule

__all__ = [
    "chunk_gated_delta_rule",
    "get_backend",
    "is_available",
    "recurrent_gated_delta_rule",
    "unavailable_reason",
]
