"""Names that Gluon has changed between the releases of Triton that are served."""

# Triton is optional.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Waits for all warps of a program, or of a warp-specialised part of it; until Triton 3.6 thread_barrier.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# The copy engine, (descriptor, coordinates, barrier, tile) and (descriptor, coordinates, tile); until 3.7 under the
# names of what they copy.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# Whether a view of shared memory as another shape has a public name, as it has since Triton 3.9.
_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def view(s_tile, DTYPE: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as another shape."""
    if _HAS_REINTERPRET:  # noqa: SIM108
        s_view = s_tile.reinterpret(DTYPE, shape, layout)
    else:
        s_view = s_tile._reinterpret(DTYPE, shape, layout)
    return s_view
