"""Cutting of token rows and documents into chunks, on the device and without waiting for it.

B batch, T tokens, N documents (B rows when nothing is packed), C chunk.
"""

# Triton is optional, and its annotations describe neither a kernel's body nor a launch.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..segments import CHUNK, PROGRAMS, segments

# What is prepared: for the outputs, for the summary, for the gradients.
OUTPUT = 0
SUMMARY = 1
GRADIENT = 2

# Rows of the table of scales [chunks, HV, SCALE_ROWS, C], fp32: what multiplies token i of a chunk.
# x and y are the inverse norms of k and q (1 without normalisation), G the running sum of g within the chunk.
READ = 0  # e^G x: keys that read the state before the chunk
WRITE = 1  # e^(G_last - G) x: keys that write the state after it
QUERY = 2  # s e^G y: queries that read the state before the chunk
BETA = 3
GATE = 4  # G
KEY_NORM = 5  # x
QUERY_NORM = 6  # y
ERROR = 7  # -e^G x beta: errors that take the state's gradient
SCALE_ROWS = 8


class Spans(NamedTuple):
    """Where cutting rows into spans pays, as measured (README.md)."""

    forward: int  # spans of a row, at least
    backward: int
    chunks: int  # of a span, at least


class Chunks(NamedTuple):
    """Where the chunks of a batch, or of a segment, lie. Those of a document are neighbours; each starts a new one."""

    count: int  # chunks with memory of their own: exact, or an upper bound for packed documents
    documents: int  # N
    per_document: int  # chunks of a document; 0 for packed documents
    starts: torch.Tensor | None  # [count] int64, first token; packed documents only, like the next three
    lengths: torch.Tensor | None  # [count] int32, tokens, 0 beyond the last document
    token_offsets: torch.Tensor | None  # [N + 1] int64, first token; of what lies in the segment
    chunk_offsets: torch.Tensor | None  # [N + 1] int64, first chunk
    spans: int = 1  # spans of a document, each with a state of its own
    span_chunks: int = 2**30  # chunks of a span


def cut(batch: int, seq_len: int, cu_seqlens: torch.Tensor | None) -> Chunks:
    """Chunks of `batch` rows of `seq_len` tokens, or of the documents of one packed row.

    Args:
        cu_seqlens: [N+1], int32 or int64, on the device of the inputs, or None. Its values are not read here.
    """
    if cu_seqlens is None:
        per_document = triton.cdiv(seq_len, CHUNK)
        return Chunks(batch * per_document, batch, per_document, None, None, None, None)
    offsets = cu_seqlens.long()
    documents = offsets.numel() - 1
    chunk_offsets = torch.nn.functional.pad(((offsets.diff() + (CHUNK - 1)) // CHUNK).cumsum(0), (1, 0))
    count = seq_len // CHUNK + documents
    index = torch.arange(count, device=offsets.device)
    document = torch.searchsorted(chunk_offsets[1:], index, right=True).clamp_(max=documents - 1)
    starts = offsets[document] + (index - chunk_offsets[document]) * CHUNK
    lengths = (offsets[document + 1] - starts).clamp_(0, CHUNK)
    return Chunks(count, documents, 0, starts, lengths.int(), offsets, chunk_offsets)


class Part(NamedTuple):
    """What is worked off at once: a segment of rows, or of the documents of a packed row."""

    tokens: slice  # of its rows; all of a packed row, whose chunks say where it lies
    chunks: Chunks
    document: torch.Tensor | None = None  # [1] int64, the only one of a packed row that may have begun before

    def entering(self, states: torch.Tensor) -> torch.Tensor:
        """Of the states after the part before, what the backward of this one cannot do without."""
        return states if self.document is None else states.index_select(0, self.document)


def cut_in_parts(batch: int, seq_len: int, cu_seqlens: torch.Tensor | None, count: int) -> list[Part]:
    """The chunks of `cut` in `count` segments. In a packed row they end wherever its documents lie.

    A document keeps its chunks. In each part of a packed row all documents are known, and empty where they lie outside.
    """
    if count == 1:
        return [Part(slice(None), cut(batch, seq_len, cu_seqlens))]
    if cu_seqlens is None:
        return [Part(x, cut(batch, x.stop - x.start, None)) for x in segments(seq_len, count)]
    whole = cut(1, seq_len, cu_seqlens)
    starts, lengths, chunk_offsets = whole.starts, whole.lengths, whole.chunk_offsets
    assert starts is not None
    assert lengths is not None
    assert chunk_offsets is not None
    # Behind the last document's chunks lie those without tokens.
    first_tokens = torch.nn.functional.pad(starts.clamp(max=seq_len), (0, 1), value=seq_len)
    parts = []
    size = triton.cdiv(whole.count, count)
    for begin in range(0, whole.count, size):
        end = min(begin + size, whole.count)
        offsets = chunk_offsets.clamp(begin, end)
        chunks = whole._replace(
            count=end - begin,
            # Copies: kernels are compiled for aligned memory.
            starts=starts[begin:end].clone(),
            lengths=lengths[begin:end].clone(),
            token_offsets=first_tokens[offsets],
            chunk_offsets=offsets - begin,
        )
        document = (chunk_offsets[1:] <= begin).sum(0, keepdim=True).clamp_(max=whole.documents - 1)
        parts.append(Part(slice(None), chunks, document))
    return parts


def split(chunks: Chunks, heads: int, value_dim: int, least: int, shortest: int) -> Chunks:
    """The same chunks in as many spans as fill the GPU, or as they are where that would not pay.

    A split prepares twice and runs every chain twice, for the spans' summaries and for the result, each a fraction of
    the chunks long, in three or four more launches: `least` spans, of `shortest` chunks at least. The choice depends on
    shapes alone, so results stay the same.
    """
    if chunks.starts is not None:
        return chunks
    programs = chunks.documents * heads * (value_dim // 64)
    span_chunks = max(shortest, triton.cdiv(chunks.per_document, max(1, PROGRAMS // programs)))
    spans = triton.cdiv(chunks.per_document, span_chunks)
    return chunks._replace(spans=spans, span_chunks=span_chunks) if spans >= least else chunks


@triton.jit
def chunk_tokens(i_chunk, p_starts, p_lengths, seq_len, chunks_per_document, C: tl.constexpr, PACKED: tl.constexpr):
    """Row of the batch, first token in it, and number of tokens of a chunk (int32)."""
    if PACKED:
        i_row = tl.zeros_like(i_chunk)
        first = tl.load(p_starts + i_chunk).to(tl.int32)
        length = tl.load(p_lengths + i_chunk)
    else:
        i_row = i_chunk // chunks_per_document
        first = (i_chunk - i_row * chunks_per_document) * C
        length = tl.minimum(seq_len - first, C)
    return i_row, first, length


@triton.jit
def document_span(i_document, p_token_offsets, p_chunk_offsets, seq_len, chunks_per_document, PACKED: tl.constexpr):
    """Row of the batch, first token in it, number of tokens, first chunk and number of chunks of a document (int32)."""
    if PACKED:
        i_row = tl.zeros_like(i_document)
        first = tl.load(p_token_offsets + i_document).to(tl.int32)
        length = tl.load(p_token_offsets + i_document + 1).to(tl.int32) - first
        first_chunk = tl.load(p_chunk_offsets + i_document).to(tl.int32)
        num_chunks = tl.load(p_chunk_offsets + i_document + 1).to(tl.int32) - first_chunk
    else:
        i_row = i_document
        first = tl.zeros_like(i_document)
        length = first + seq_len
        first_chunk = i_document * chunks_per_document
        num_chunks = first + chunks_per_document
    return i_row, first, length, first_chunk, num_chunks
