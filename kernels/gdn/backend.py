"""Choice of the implementation of the stage functions, by name and without fallback."""

import functools
import importlib
from importlib.metadata import version
from importlib.util import find_spec
from typing import Protocol, cast

import torch

# A backend is a module of this package with the functions of `Stages`; it is imported when first asked for.
_MODULES = {"eager": "eager", "triton": "triton_stages"}


class Stages(Protocol):
    """The four stage functions of a backend; `eager` documents their equations, shapes and dtypes.

    They take no process group: what crosses ranks is composed between them. They are not differentiable by autograd.
    """

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        scale: float,
        initial_state: torch.Tensor | None,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def summary(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        use_qk_l2norm_in_kernel: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward_state(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        do: torch.Tensor,
        *,
        scale: float,
        use_qk_l2norm_in_kernel: bool,
    ) -> torch.Tensor: ...

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        do: torch.Tensor,
        dfinal_state: torch.Tensor | None,
        *,
        scale: float,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...


def unavailable_reason(name: str) -> str | None:
    """Why backend `name` cannot run here; None if it can.

    Raises:
        ValueError: no backend has this name.
    """
    if name not in _MODULES:
        valid = ", ".join(f'"{valid}"' for valid in _MODULES)
        raise ValueError(f"gdn_backend={name!r} is unknown: pass one of {valid}")
    if name == "triton":
        if find_spec("triton") is None:
            return "Triton is not installed"
        if not torch.cuda.is_available():
            return "PyTorch sees no CUDA GPU"
        capability = torch.cuda.get_device_capability()
        if capability[0] != 9:
            return (
                f"the GPU has compute capability {capability[0]}.{capability[1]}, the Triton stages need 9.0 (Hopper)"
            )
        if tuple(map(int, version("triton").split(".")[:2])) < (3, 6):
            return f"Triton {version('triton')} is older than 3.6"
    return None


def is_available(name: str) -> bool:
    """Whether backend `name` can run here; `unavailable_reason` says why not.

    Raises:
        ValueError: no backend has this name.
    """
    return unavailable_reason(name) is None


@functools.cache
def get_backend(name: str) -> Stages:
    """The stage functions of backend `name`.

    Raises:
        ValueError: no backend has this name, or it cannot run here (with the reason).
    """
    reason = unavailable_reason(name)
    if reason is not None:
        raise ValueError(f'gdn_backend="{name}" cannot run: {reason}; pass gdn_backend="eager"')
    return cast("Stages", importlib.import_module(f".{_MODULES[name]}", __package__))
