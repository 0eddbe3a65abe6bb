"""Names for backends: PyTorch's operators take strings, not objects.

A `TorchBackend` is found by its group's name. A backend with memory of its own is registered while it lives.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch._C._distributed_c10d import _resolve_process_group

from .reference import TORCH_HANDLE, TorchBackend

_registered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_count = itertools.count()


def register_backend(backend: Any) -> str:
    """A handle for a backend that is kept alive elsewhere."""
    handle = f"fused:{next(_count)}"
    _registered[handle] = backend
    return handle


def backend_of(handle: str) -> Any:
    """The backend of a handle.

    Raises:
        RuntimeError: it is gone.
    """
    if handle.startswith(TORCH_HANDLE):
        name = handle[len(TORCH_HANDLE) :]
        return TorchBackend(_resolve_process_group(name) if name else None)  # pyright: ignore[reportArgumentType]
    backend = _registered.get(handle)
    if backend is None:
        raise RuntimeError(f"backend {handle} is gone: keep it until the last backward has run")
    return backend
