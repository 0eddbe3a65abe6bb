"""AllToAll joined with the matrix product before or after it; see README.md."""

from .ops import Backend, a2a_gemm, batched_pv_a2a, gemm_a2a
from .reference import TorchBackend

__all__ = ["Backend", "TorchBackend", "a2a_gemm", "batched_pv_a2a", "gemm_a2a"]
