"""Choice of the implementation of the stage functions, by name and without fallback."""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch

# A backend is a module of this package with the functions of `Stages`; it is imported when first asked for.
_MODULES = {"eager": "eager", "triton": "triton_stages", "gluon": "gluon_stages"}
# What the kernels serve.
OLDEST_TRITON = (3, 6)
DIMS = {"triton": (64, 128, 256), "gluon": (128,)}
DTYPES = {
    "triton": (torch.bfloat16, torch.float16, torch.float32),
    "gluon": (torch.bfloat16, torch.float16),
}
MAX_TAPS = 4


class Stages(Protocol):
    """The four stage functions of a backend; `eager` documents their equations, shapes and dtypes.

    They take no process group: what crosses ranks is composed between them. They are not differentiable by autograd.

    What one may leave for another, for time and memory alone; a backend may leave it unused:
        edge_states: the forward puts the states between segments of long rows there, [B, HV, K, V] each (of a packed
            row, that of the document at the edge); with them the backward holds the states of one segment at a time.
        keep, kept: `backward_state` puts there what a `backward` of the same span would compute again, and takes out.
        state_ready: takes the gradient of the initial state as soon as it is under way.
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
        edge_states: list[torch.Tensor] | None = None,
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
        keep: list[Any] | None = None,
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
        edge_states: Sequence[torch.Tensor] = (),
        kept: list[Any] | None = None,
        state_ready: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...


def check_known(name: str) -> None:
    """Refuses a name that no backend has.

    Raises:
        ValueError: names the backends.
    """
    if name not in _MODULES:
        valid = ", ".join(f'"{valid}"' for valid in _MODULES)
        raise ValueError(f"gdn_backend={name!r} is unknown: pass one of {valid}")


@functools.cache
def _absent_reason(name: str) -> str | None:
    """Why backend `name` cannot run in this process, whatever it is given; None if it can."""
    check_known(name)
    if name == "eager":
        return None
    if find_spec("triton") is None:
        return "Triton is not installed"
    if tuple(map(int, version("triton").split(".")[:2])) < OLDEST_TRITON:
        return f"Triton {version('triton')} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if interprets():
        return "Triton's interpreter does not run Gluon" if name == "gluon" else None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, the Triton kernels need 9.0 (Hopper)"
    return None


def interprets() -> bool:
    """Whether Triton runs its kernels in its interpreter, on the CPU: a tool for tests, very slow."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def unserved_reason(
    name: str,
    *,
    key_dim: int | None = None,
    value_dim: int | None = None,
    taps: int | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Why backend `name` serves such inputs on no machine; None if it does on some. See `unavailable_reason`."""
    if name == "eager":
        return None
    for field, dim in (("K", key_dim), ("V", value_dim)):
        if dim is not None and dim not in DIMS[name]:
            return f"head dim {field}={dim} is not one of {', '.join(map(str, DIMS[name]))}"
    if taps is not None and taps > MAX_TAPS:
        return f"a convolution over {taps} tokens is wider than {MAX_TAPS}"
    if dtype is not None and dtype not in DTYPES[name]:
        return f"dtype {dtype} is not one of {', '.join(map(str, DTYPES[name]))}"
    return None


def unavailable_reason(
    name: str,
    *,
    key_dim: int | None = None,
    value_dim: int | None = None,
    taps: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> str | None:
    """Why backend `name` cannot run here, or cannot serve what is asked; None if it can. What is None is not asked.

    Args:
        key_dim, value_dim: K and V of a head. taps: k of the convolution. dtype: of the inputs. device: they are on.
    Raises:
        ValueError: no backend has this name.
    """
    reason = _absent_reason(name) or unserved_reason(name, key_dim=key_dim, value_dim=value_dim, taps=taps, dtype=dtype)
    if reason is not None or name == "eager":
        return reason
    if interprets():
        # Its products of bfloat16 are wrong.
        return f"Triton's interpreter does not compute in {dtype}" if dtype not in (None, torch.float32) else None
    if device is not None and device.type != "cuda":
        return f"the tensors are on {device}, not on a CUDA GPU"
    return None


def is_available(
    name: str,
    *,
    key_dim: int | None = None,
    value_dim: int | None = None,
    taps: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> bool:
    """Whether backend `name` can run here and serves what is asked; `unavailable_reason` says why not.

    Raises:
        ValueError: no backend has this name.
    """
    asked: Any = {"key_dim": key_dim, "value_dim": value_dim, "taps": taps, "dtype": dtype, "device": device}
    return unavailable_reason(name, **asked) is None


def check_served(name: str, **asked: Any) -> None:
    """Refuses what `unavailable_reason` gives a reason for.

    Raises:
        ValueError: no backend has this name, it cannot run here, or it does not serve what is asked.
    """
    refuse(name, unavailable_reason(name, **asked))


def refuse(name: str, reason: str | None) -> None:
    """Raises the one line in which every refusal of a backend reads; nothing without a reason."""
    if reason is not None:
        remedy = '"triton" or "eager"' if name == "gluon" else '"eager"'
        raise ValueError(f'gdn_backend="{name}" cannot run: {reason}; pass gdn_backend={remedy}')


@functools.cache
def announce_compilation() -> None:
    """Says once, on the first process of a machine, that Triton kernels are about to be compiled: it looks like a hang.

    A warning, since that is what Python shows where nobody has set up logging.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and not interprets():
        logging.getLogger(__name__).warning(
            "the Triton kernels of the Gated DeltaNet layer compile at their first call, for a minute or so; later "
            "processes read Triton's cache, and python -m hf_cp.kernels.gdn.warm_up fills it ahead"
        )


@functools.cache
def get_backend(name: str) -> Stages:
    """The stage functions of backend `name`.

    Raises:
        ValueError: no backend has this name, or it cannot run here (with the reason).
    """
    check_served(name)
    if name != "eager":
        announce_compilation()
    return cast("Stages", importlib.import_module(f".{_MODULES[name]}", __package__))
