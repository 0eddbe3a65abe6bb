"""Segments of long rows: what a backward holds of a row at once does not grow with the row.

B batch, T tokens, HV value heads, K/V head dims.
"""

CHUNK = 64
# Elements of the states before a segment's chunks; their gradients are as many, and what is prepared about as many.
SEGMENT_STATES = 2**27


def segment_count(batch: int, seq_len: int, value_heads: int, value_dim: int, key_dim: int, *, packed: bool) -> int:
    """Segments of rows of `seq_len` tokens; one where rows or documents share what is held."""
    if packed or batch > 1:
        return 1
    most = max(1, SEGMENT_STATES // (value_heads * key_dim * value_dim))
    return (seq_len + most * CHUNK - 1) // (most * CHUNK)


def segments(seq_len: int, count: int) -> list[slice]:
    """The tokens of `count` segments: whole chunks, but for the last."""
    chunks = (seq_len + CHUNK - 1) // CHUNK
    size = (chunks + count - 1) // count * CHUNK
    return [slice(begin, min(begin + size, seq_len)) for begin in range(0, seq_len, size)]
