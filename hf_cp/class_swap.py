"""Change what a module's ``forward`` does by changing its class, and back.

The new class is a subclass of the stock one with the same name, so that ``isinstance``, FSDP's wrapping by class name,
saved ``architectures`` and checks by class name go on as before. Parameters, buffers and keys are not touched, and an
instance ``forward`` that someone else has set stays.

A copy of a module is as patched as the module. A pickle of it, and so what ``torch.save`` writes, is the stock module,
which loads where this package is missing. A patched class, called as its ``from_pretrained`` does, makes stock modules.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_STOCK = "_hf_cp_stock_class"
# What patching puts into a module's own dictionary begins like this.
_PREFIX = "_hf_cp"


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without the one that FSDP2 has put on top."""
    cls = type(module)
    return cls.__bases__[-1] if issubclass(cls, FSDPModule) else cls


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before patching, under FSDP2's; its own class where it is not patched."""
    return getattr(_own_class(module), _STOCK, _own_class(module))


def is_patched(module: nn.Module) -> bool:
    """Whether this module's class was swapped."""
    return hasattr(type(module), _STOCK)


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(cls, _STOCK)(*args, **kwargs) if args or kwargs else object.__new__(cls)


def _copy(self: Any) -> Any:
    twin = object.__new__(type(self))
    twin.__setstate__(self.__dict__)
    return twin


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    twin = memo[id(self)] = object.__new__(type(self))
    twin.__setstate__(copy.deepcopy(self.__dict__, memo))
    return twin


def _reduce_ex(self: Any, protocol: Any) -> Any:
    if isinstance(self, FSDPModule):  # cannot be pickled, patched or not
        return object.__reduce_ex__(self, protocol)
    state = {key: value for key, value in self.__dict__.items() if not key.startswith(_PREFIX)}
    # What Python itself writes for plain objects, so that any process can read it.
    return copyreg._reconstructor, (stock_class(self), object, None), state  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _patched_class(
    stock: type[nn.Module], forward: Callable[..., Any] | None, attributes: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        _STOCK: stock,
        "__new__": _new,
        "__copy__": _copy,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        **dict(attributes),
    }
    if forward is not None:
        patched = forward

        @functools.wraps(stock.forward)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not is_patched(self):  # mixed precision kept this function in an instance `forward` beyond `swap_out`
                return stock.forward(self, *args, **kwargs)
            return patched(self, stock.forward, *args, **kwargs)

        namespace["forward"] = call
    return type(stock.__name__, (stock,), namespace)


def swap_in(module: nn.Module, forward: Callable[..., Any] | None, attributes: Mapping[str, Any]) -> None:
    """Give a module a subclass of its class.

    Args:
        forward: called as ``forward(module, stock_forward, *args, **kwargs)``; ``None`` keeps the stock forward.
        attributes: class attributes of the new class.
    """
    _replace_class(module, _patched_class(stock_class(module), forward, tuple(attributes.items())))


def swap_out(module: nn.Module) -> None:
    """Give a module its stock class back."""
    _replace_class(module, stock_class(module))


def _replace_class(module: nn.Module, new: type[nn.Module]) -> None:
    """Put ``new`` in the place of the module's own class; FSDP2's stays on top."""
    cls, own = type(module), _own_class(module)
    if own is new:
        return
    if cls is own:
        module.__class__ = new
        return
    bases = (*cls.__bases__[:-1], new)
    namespace = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(cls.__name__, bases, namespace)
