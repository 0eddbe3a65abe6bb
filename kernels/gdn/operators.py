"""Registration of kernels with PyTorch: `torch.compile` keeps each in its graphs as one node."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import Parameter

# Lives as long as the process: what it registers is withdrawn with it.
_LIBRARY = torch.library.Library("hf_cp", "FRAGMENT")


class Operator:
    """An operator, called with its arguments by position.

    Where nothing looks on - no compiler, dispatch mode, functorch transform or tensor subclass - it is the function and
    its backward alone: PyTorch's dispatcher takes 60 us more of the host for an operator written in Python, and a step
    of 8,192 tokens waits for the host.

    Args:
        registered: `torch.ops.hf_cp.<name>`.
        function, setup_context, backward: as in `register`.
    """

    def __init__(
        self,
        registered: Any,
        function: Callable[..., Any],
        setup_context: Callable[..., None] | None,
        backward: Callable[..., Any] | None,
    ) -> None:
        self.registered = registered
        self._function = function
        # An autograd function does not see tensors in lists.
        lists = any(str(argument.type) == "List[Tensor]" for argument in registered.default._schema.arguments)
        self._node = None if lists or backward is None else _node(registered, function, setup_context, backward)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or _observed(args):
            return self.registered(*args)
        if not torch.is_grad_enabled():
            return self._function(*args)
        if self._node is None:
            return self.registered(*args)
        results = self._node.apply(*args)
        return list(results) if self._node.returns_list else results


def _observed(args: Iterable[Any]) -> bool:
    """Whether something besides autograd has to see the operator as one."""
    if torch._C._len_torch_dispatch_stack() or _functorch.peek_interpreter_stack() is not None:
        return True
    return any(_observed(x) if type(x) is list else _is_special(x) for x in args)


def _is_special(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and type(x) not in (torch.Tensor, Parameter)


def _node(
    registered: Any,
    function: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any],
) -> Any:
    """The operator as an autograd function."""
    lists = isinstance(registered.default._schema.returns[0].type, torch.ListType)

    def forward(ctx: Any, *args: Any) -> Any:
        results = function(*args)
        if setup_context is not None:
            setup_context(ctx, args, results)
        return tuple(results) if lists else results

    def apply_backward(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, list(grads)) if lists else backward(ctx, *grads)

    # Profiles show the class's name.
    name = registered.default._schema.name.partition("::")[2]
    content = {"forward": staticmethod(forward), "backward": staticmethod(apply_backward), "returns_list": lists}
    return type(name, (torch.autograd.Function,), content)


def register(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Operator:
    """The operator `torch.ops.hf_cp.<name>`.

    Args:
        schema: name, arguments and results in PyTorch's notation. A result may not share memory with an argument or
            with another result.
        function: what it computes, on any device. Not traced.
        fake: the results' shapes, strides, dtypes and devices, for arguments without values.
        setup_context: `(ctx, inputs, output)`, saves what the backward needs.
        backward: `(ctx, *grads)`, a gradient for each argument; made of operators, since it is traced. None where the
            operator is not differentiable: gradients of its results are then refused. An operator that writes to an
            argument cannot have one: its caller refuses.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_cp::{name}", fake, lib=_LIBRARY)

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"hf_cp::{name} is not differentiable: a second derivative is not implemented")

    if "!" not in schema:
        torch.library.register_autograd(f"hf_cp::{name}", backward or refuse, setup_context=setup_context, lib=_LIBRARY)
        backward = backward or refuse
    return Operator(getattr(torch.ops.hf_cp, name), function, setup_context, backward)
