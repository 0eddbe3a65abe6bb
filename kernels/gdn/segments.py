"""Segments of long rows: what a backward holds of a batch at once does not grow with it.

B batch, T tokens, N documents of a packed row, HV value heads, K/V head dims.
"""

CHUNK = 64
# Elements of the states before a segment's chunks; their gradients are as many, and what is prepared about as many.
SEGMENT_STATES = 2**27
# Chunks of a segment for each document of the row, at least: every segment passes on a state of each in fp32.
DOCUMENT_CHUNKS = 8
# Chains that run at once: one on each multiprocessor of an H100 or H200.
PROGRAMS = 132


def segment_count(
    batch: int, seq_len: int, value_heads: int, value_dim: int, key_dim: int, documents: int | None = None
) -> int:
    """Segments of each row, by shapes alone: what they leave of the backward's chains still fills the GPU.

    Args:
        documents: N of a packed row; None where nothing is packed.
    """
    most = _most_chunks(value_heads, value_dim, key_dim)
    together = _together(documents or batch, value_heads, value_dim)
    if documents is None:
        return 1 if together > 1 else _quotient(seq_len, most * CHUNK)
    # As many as there can be: a document of one token more than whole chunks has another.
    chunks = seq_len // CHUNK + documents
    most = max(most, DOCUMENT_CHUNKS * documents)
    if together > 1:
        most = max(most, _quotient(chunks * together, documents))
    return _quotient(chunks, most)


def segments(seq_len: int, count: int) -> list[slice]:
    """The tokens of `count` segments: whole chunks, but for the last."""
    size = _quotient(_quotient(seq_len, CHUNK), count) * CHUNK
    return [slice(begin, min(begin + size, seq_len)) for begin in range(0, seq_len, size)]


def row_groups(batch: int, seq_len: int, value_heads: int, value_dim: int, key_dim: int) -> list[slice]:
    """Rows whose gradients are computed at once: as many as a segment has room for or the chains fill the GPU with."""
    room = _most_chunks(value_heads, value_dim, key_dim) // _quotient(seq_len, CHUNK)
    size = _quotient(batch, _quotient(batch, max(room, _together(batch, value_heads, value_dim))))
    return [slice(begin, min(begin + size, batch)) for begin in range(0, batch, size)]


def _together(count: int, value_heads: int, value_dim: int) -> int:
    """Of `count` rows or documents, how many run at once for their chains to fill the GPU in the backward."""
    return min(count, max(1, PROGRAMS // (2 * value_heads * (value_dim // 64))))


def _most_chunks(value_heads: int, value_dim: int, key_dim: int) -> int:
    return max(1, SEGMENT_STATES // (value_heads * key_dim * value_dim))


def _quotient(a: int, b: int) -> int:
    """Rounded up."""
    return (a + b - 1) // b
