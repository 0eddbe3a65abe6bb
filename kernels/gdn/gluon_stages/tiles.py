"""Where the tiles of a chunk lie, and their descriptors for the copy engine."""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton_stages.chunks import CHUNK

_C = gl.constexpr(CHUNK)
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def chunk_tokens(i_chunk, p_starts, p_lengths, seq_len, chunks_per_document, PACKED: gl.constexpr):
    """Row of the batch, first token in it, and number of tokens of a chunk."""
    if PACKED:
        i_row = i_chunk * 0
        first = gl.load(p_starts + i_chunk).to(gl.int32)
        length = gl.load(p_lengths + i_chunk)
    else:
        i_row = i_chunk // chunks_per_document
        first = (i_chunk - i_row * chunks_per_document) * _C
        length = gl.minimum(seq_len - first, _C)
    return i_row, first, length


def tiles(x: torch.Tensor | None, block: list[int]) -> TensorDescriptor | None:
    """Tiles of the last two dims of [.., rows, columns] or, with a block of three dims, of [B, T, heads * D]."""
    if x is None:
        return None
    if len(block) == 3:
        batch, seq_len, heads, dim = x.shape
        shape = [batch, seq_len, heads * dim]
    else:
        shape = [x.numel() // x.shape[-1], x.shape[-1]]
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorDescriptor(x, shape, strides, block, _layout(tuple(block), x.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    # Making one takes 17 us of the host, and a layer's launches take 60 of them.
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])
