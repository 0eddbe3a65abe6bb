"""Choices that do not depend on the data: dot precision, devices, launch tables."""

# pyright: reportMissingImports=false

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

# Arguments that no kernel is compiled anew for: what runs is what was verified. With one chunk a document as a
# constant, the Gluon kernel of the gradients had five times the spills, and its dg was wrong on the H200.
SIZES = [
    "seq_len",
    "chunks_per_document",
    "transition_offset",
    "tasks",
    "spans",
    "span_chunks",
    "H",
    "HV",
    # Only their alignment: a span may begin at any token.
    "p_g",
    "p_beta",
]


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of a dot over operands of `dtype`; it matters for fp32 alone."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the device of `x` current, so that kernels start there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class Kernel:
    """A jitted kernel whose later launches cost less of the host: a decorator over `triton.jit` and `gluon.jit`.

    Triton takes 100 us or more to find the compiled kernel of a launch among those of its arguments: it looks at each
    argument, at each layout of a descriptor and at every constant that the kernel's module holds. What decides is less:
    dtypes, alignment, block shapes, constants.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        # Interpreted functions have no such list, and compile nothing.
        self._constant = [parameter.is_constexpr for parameter in getattr(function, "params", ())]
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Launches on the current device and stream: positional arguments first, then constants and options by name."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        kinds = [x if constant else _kind(x) for x, constant in zip(args, self._constant, strict=False)]
        key = (device, *kinds, *named.items())
        compiled = self._compiled.get(key)
        if compiled is not None:
            rest = self.function.arg_names[len(args) :]
            compiled[(*grid, 1, 1)[:3]](*args, *(named[name] for name in rest))
            return
        compiled = self.function[grid](*args, **named)
        # The interpreter compiles nothing.
        if compiled is not None:
            self._compiled[key] = compiled


def _kind(x: Any) -> Any:
    """What Triton may have compiled a kernel for, of one argument."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    if type(x) is float:
        return float
    # Of Gluon's descriptors the layout follows from these. What is left is None.
    return (x.base.dtype, tuple(x.block_shape)) if hasattr(x, "block_shape") else x


class Launch(NamedTuple):
    """Shape of a launch: rows of V a program holds, stages that loads run ahead, and options of the compiler."""

    block_v: int
    stages: int
    options: dict[str, int]


# Launches for K, V <= 128 in 16-bit types, each verified on an H200 with Triton 3.6: verify before a change, since a
# neighbour of these (value: one stage, 168 registers) ended in an illegal access. 4 warps hold the 64 rows of a chunk
# once; 8 would hold them twice. Fewer registers, so more programs on a multiprocessor, pay for the query kernel alone.
_LAUNCHES = {
    "prepare": Launch(64, 1, {"num_warps": 4, "num_stages": 1}),
    "forward": Launch(64, 3, {"num_warps": 4}),
    "summary": Launch(64, 3, {"num_warps": 4}),
    "backward": Launch(64, 3, {"num_warps": 4}),
    "value": Launch(32, 2, {"num_warps": 4, "num_stages": 1}),
    "key": Launch(32, 2, {"num_warps": 4, "num_stages": 1}),
    "query": Launch(64, 2, {"num_warps": 4, "num_stages": 1, "maxnreg": 168}),
}


def launch(kernel: str, K: int, dtype: torch.dtype) -> Launch:
    """The fixed launch of a kernel: nothing is tuned at run time."""
    table = _LAUNCHES[kernel]
    if dtype == torch.float32:
        return Launch(64, 1, {"num_warps": 8 if K > 128 else 4, "num_stages": 1})
    if K > 128:
        wide = kernel in ("value", "key", "query")
        return Launch(64, 1 if wide else min(table.stages, 2), {"num_warps": 8 if wide else 4, "num_stages": 1})
    return table


def token_tiles(x: torch.Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    """Tiles [rows, columns] of [B, T, heads * D] for the copy engine, from a contiguous [B, T, heads, D]."""
    if x is None:
        return None
    batch, seq_len, heads, dim = x.shape
    width = heads * dim
    return TensorDescriptor(x, [batch, seq_len, width], [seq_len * width, width, 1], [1, rows, columns])


def block_tiles(x: torch.Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    """Tiles [rows, columns] of the last two dims for the copy engine, the dims before them laid end to end."""
    if x is None:
        return None
    width = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // width, width], [width, 1], [rows, columns])
