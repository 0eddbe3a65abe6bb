"""Registration of kernels with PyTorch: `torch.compile` keeps each in its graphs as one node."""

from collections.abc import Callable
from typing import Any

import torch

# Lives as long as the process: what it registers is withdrawn with it.
_LIBRARY = torch.library.Library("hf_cp", "FRAGMENT")


def register(
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
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
    return getattr(torch.ops.hf_cp, name)
