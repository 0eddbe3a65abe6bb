"""Which bytes of which rank a fused launch reads and writes: what the kernel would be told, carried out on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_cp.kernels.a2a_gemm.fused import check_parts, pull_blocks, pull_offsets, push_segments
from hf_cp.kernels.a2a_gemm.plan import Matrix, Plan, PlanCache
from hf_cp.kernels.a2a_gemm.routes import heads_per_rank

B, D = 2, 8
BF16 = torch.bfloat16


class Halves:
    """One buffer a rank, and the matrices in them by address."""

    def __init__(self, world_size: int, nbytes: int) -> None:
        self.buffers = [torch.full((nbytes,), 0xFF, dtype=torch.uint8) for _ in range(world_size)]
        self.addresses = [buffer.data_ptr() for buffer in self.buffers]

    def view(self, matrix: Matrix) -> Tensor:
        for buffer in self.buffers:
            start = matrix.address - buffer.data_ptr()
            if 0 <= start < buffer.numel():
                assert start % 16 == matrix.row_stride % 16 == matrix.batch_stride % 16 == 0
                strides = (matrix.batch_stride // 2, matrix.row_stride // 2, 1)
                shape = (matrix.batches, matrix.rows, matrix.columns)
                return buffer.view(BF16).as_strided(shape, strides, start // 2)
        raise AssertionError("the address lies in no rank's buffer")


def to_sequence(parts: list[Tensor]) -> list[Tensor]:
    W = len(parts)
    return [torch.cat([part.chunk(W, 1)[r] for part in parts], 2) for r in range(W)]


def to_heads(parts: list[Tensor], heads: int) -> list[Tensor]:
    W, h = len(parts), heads_per_rank(heads, len(parts))
    starts = [r * heads // W for r in range(W)]
    return [torch.cat([part[:, :, start : start + h] for part in parts], 1) for start in starts]


def operands(W: int) -> list[list[int]]:
    return [[2 * W], [W, 1, 1], [3 * W, max(W // 2, 1), W]]


@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("route", ["to_sequence", "to_heads"])
def test_blocks_gather_every_rank_s_part_once(W: int, route: str) -> None:
    Sl = 5
    for heads in operands(W):
        if route == "to_sequence":
            x = [[torch.randn(B, W * Sl, heads_per_rank(H, W), D).to(BF16) for H in heads] for _ in range(W)]
            want = [to_sequence([one[i] for one in x]) for i in range(len(heads))]
        else:
            x = [[torch.randn(B, Sl, H, D).to(BF16) for H in heads] for _ in range(W)]
            want = [to_heads([one[i] for one in x], H) for i, H in enumerate(heads)]
        offsets = pull_offsets(x[0])
        halves = Halves(W, offsets[-1])
        for rank in range(W):
            for part, offset in zip(x[rank], offsets, strict=False):
                bytes_of = part.flatten().view(torch.uint8)
                halves.buffers[rank][offset : offset + bytes_of.numel()] = bytes_of
        for rank in range(W):
            expected = torch.cat([one[rank].flatten(2) for one in want], 2)
            blocks, cuts = pull_blocks(x[rank], heads, route, rank, halves.addresses)  # pyright: ignore[reportArgumentType]
            gathered, written = torch.empty_like(expected), torch.zeros(expected.shape)
            for block in blocks:
                source = halves.view(block.source)
                rows = slice(block.row, block.row + block.source.rows)
                columns = slice(block.column, block.column + block.source.columns)
                gathered[:, rows, columns] = source
                written[:, rows, columns] += 1
                assert {block.column, block.column + block.source.columns} <= set(cuts)
            assert torch.equal(written, torch.ones_like(written))
            assert torch.equal(gathered, expected)
            assert (cuts[0], cuts[-1]) == (0, expected.shape[2])
            # Where products start, at this rank's own part, it reads its own buffer.
            own = blocks[rank].source.address - halves.addresses[rank]
            assert 0 <= own < offsets[-1]
            if route == "to_sequence":
                assert blocks[rank].column == cuts[rank]


@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("route", ["to_sequence", "to_heads"])
def test_segments_scatter_products_to_their_owners(W: int, route: str) -> None:
    Sl = 5
    for heads in operands(W):
        local = [H if route == "to_heads" else heads_per_rank(H, W) for H in heads]
        if route == "to_sequence" and any(H % W for H in heads):
            continue  # copies of a head are not computed twice
        tokens = Sl if route == "to_heads" else W * Sl
        products = [[torch.randn(B, tokens, h, D).to(BF16) for h in local] for _ in range(W)]
        by_operand = [[one[i] for one in products] for i in range(len(heads))]
        if route == "to_heads":
            want = [to_heads(parts, H) for parts, H in zip(by_operand, heads, strict=True)]
        else:
            want = [to_sequence(parts) for parts in by_operand]
        sizes = [one[0].numel() * 2 for one in want]
        halves = Halves(W, sum(sizes))
        for rank in range(W):
            whole = torch.cat([one.flatten(2) for one in products[rank]], 2)
            columns = [h * D for h in local]
            segments = push_segments((B, tokens), columns, heads, D, route, rank, halves.addresses)  # pyright: ignore[reportArgumentType]
            assert [s.section for s in segments] == sorted(s.section for s in segments)
            for segment in segments:
                rows = slice(segment.row, segment.row + segment.target.rows)
                part = slice(segment.column, segment.column + segment.target.columns)
                halves.view(segment.target).copy_(whole[:, rows, part])
        for rank in range(W):
            results = halves.buffers[rank].split(sizes)
            for i, result in enumerate(results):
                assert torch.equal(result.view(BF16).view(want[i][rank].shape), want[i][rank]), (rank, i)


@pytest.mark.parametrize(("heads", "head_dim", "element_bytes"), [(4, 4, 2), (1, 12, 2), (4, 8, 1), (8, 3, 2)])
def test_parts_that_some_ranks_cannot_address_are_refused_on_all(heads: int, head_dim: int, element_bytes: int) -> None:
    """Rank 0's part starts where the operand does, so the copy engine's own refusal would come on the others alone."""
    with pytest.raises(ValueError, match=rf"make the head dim a multiple of {16 // element_bytes}") as caught:
        check_parts(heads, head_dim, 4, element_bytes)
    assert "\n" not in str(caught.value)
    check_parts(heads, 16, 4, element_bytes)


def test_a_launch_is_described_once_and_the_oldest_forgotten() -> None:
    cache, made = PlanCache(limit=2), []

    def make() -> Plan:
        made.append(len(made))
        return object()  # pyright: ignore[reportReturnType]

    first = cache.get("a", make)
    assert cache.get("a", make) is first
    cache.get("b", make)
    cache.get("a", make)
    cache.get("c", make)  # "b" goes, unused for longest
    assert len(cache) == 2
    assert cache.get("a", make) is first
    assert len(made) == 3
    cache.get("b", make)
    assert len(made) == 4


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.empty(4, 6, dtype=BF16), r"shape \(1, 4, 6\).* make the last dimension a multiple of 8"),
        (torch.empty(8, 16, dtype=BF16).t(), "contiguous columns"),
        (torch.empty(8, 17, dtype=BF16)[:, 1:], "multiples of 16 bytes"),
    ],
)
def test_what_the_copy_engine_cannot_address_is_named(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Matrix.of(x)
    assert "\n" not in str(caught.value)
