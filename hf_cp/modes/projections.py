"""Which backend of `kernels.a2a_gemm` joins the projections of one group with its exchanges.

A fused backend has a workspace that all ranks of the group made together: it is made at the first forward, and again
only where a longer sequence needs a larger one. Ranks of a group run the same forward, so they make it together.
"""

from __future__ import annotations

import weakref

import torch

from ..kernels.a2a_gemm import Backend
from ..kernels.a2a_gemm.build import BuildError, check_available, check_device
from ..kernels.a2a_gemm.fused import VARIANTS, FusedBackend
from ..kernels.a2a_gemm.workspace import Workspace
from ..mesh import CpMesh

# Bytes that a workspace's size is rounded up to, so that a few tokens more do not need another.
_GRAIN = 32 << 20
# How long a kernel waits for another rank, which may be writing a checkpoint: as long as NCCL's messages.
_TIMEOUT_S = 600.0

# A mesh is shared by a model's copies; graphs that are still alive keep the backend that they were recorded with.
_backends: weakref.WeakKeyDictionary[CpMesh, Backend] = weakref.WeakKeyDictionary()
_retired: weakref.WeakKeyDictionary[CpMesh, Backend] = weakref.WeakKeyDictionary()


def provide(mesh: CpMesh, backend: Backend) -> None:
    """Use this backend for a group, instead of making one: with a workspace of another size or transport, say."""
    _backends[mesh] = backend


def backend_of(mesh: CpMesh, device: torch.device, nbytes: int, flag_count: int) -> Backend:
    """The group's backend. Collective where a workspace has to be made.

    Args:
        nbytes: of the largest operand that a rank exchanges.
        flag_count: row tiles times column groups of the largest operand that is gathered, times its batch.

    Raises:
        ValueError: a device or a provided workspace that cannot serve this.
        BuildError: the kernels cannot be built or do not run on this device.
    """
    backend = _backends.get(mesh)
    if isinstance(backend, FusedBackend):
        workspace = backend.workspace
        if workspace.capacity >= nbytes and workspace.flags.count >= flag_count:
            return backend
    elif backend is not None:
        return backend
    if device.type != "cuda":
        raise ValueError(f'projection_backend="fused" needs a GPU, the model is on {device}: move it, or use "torch"')
    # All ranks have met when a workspace has been made. Until then others may read the one before, whose graphs may be
    # gone here.
    capacity = -(-nbytes // _GRAIN) * _GRAIN
    made = FusedBackend(Workspace(mesh.group, device, capacity, timeout_s=_TIMEOUT_S, flag_count=flag_count))
    if backend is not None:
        _retired[mesh] = backend
    _backends[mesh] = made
    return made


def check_served() -> None:
    """Raise where the fused kernels cannot run in this process.

    Raises:
        ValueError: no GPU, another GPU than Hopper, or neither built libraries nor what builds them; says which.
    """
    if not torch.cuda.is_available():
        raise ValueError('projection_backend="fused" needs an NVIDIA Hopper GPU, found none: use "torch"')
    try:
        check_device(torch.cuda.get_device_capability(), torch.cuda.get_device_name())
        check_available(VARIANTS)
    except BuildError as error:
        raise ValueError(f'projection_backend="fused": {error}') from error
