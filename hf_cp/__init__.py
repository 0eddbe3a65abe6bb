"""Context parallelism for hybrid models of Gated DeltaNet and full attention, in plain Hugging Face."""

from .patch import average_gradients, patch, unpatch
from .plugin import ContextParallelConfig

__all__ = ["ContextParallelConfig", "average_gradients", "patch", "unpatch"]
