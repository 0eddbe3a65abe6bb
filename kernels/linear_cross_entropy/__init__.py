"""Language-model head and cross-entropy together, a few tokens at a time."""

from .chunked import linear_cross_entropy_sum

__all__ = ["linear_cross_entropy_sum"]
