"""Shard arithmetic against brute force."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from hf_cp.layout import ShardLayout, cu_seqlens_from_position_ids
from hf_cp.mesh import CpMesh

LENGTHS = [1, 7, 63, 64, 65, 257, 1234]
SIZES = [1, 2, 3, 4, 8]


def layouts(seq_len: int, cp_size: int, min_local: int = 1) -> list[ShardLayout]:
    return [ShardLayout(seq_len, cp_size, rank, min_local) for rank in range(cp_size)]


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("min_local", [1, 3])
def test_shards_tile_the_padded_sequence(seq_len: int, cp_size: int, min_local: int) -> None:
    ranks = layouts(seq_len, cp_size, min_local)
    assert ranks[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranks))
    assert ranks[-1].stop == ranks[0].padded_len >= seq_len
    assert len({r.seq_len_local for r in ranks}) == 1
    assert ranks[0].seq_len_local >= min_local
    # No rank more than needed, unless the minimum asks for it.
    assert ranks[0].padding < cp_size or ranks[0].seq_len_local == min_local


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shard_and_unpad_are_a_round_trip(seq_len: int, cp_size: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = seq_len
    x = torch.randn(shape, dtype=torch.float64)
    ranks = layouts(seq_len, cp_size, 3)
    shards = [r.shard(x, dim, -100.0) for r in ranks]
    whole = torch.cat(shards, dim)
    assert torch.equal(whole, ranks[0].pad(x, dim, -100.0))
    assert torch.equal(ranks[0].unpad(whole, dim), x)
    assert (whole.narrow(dim, seq_len, ranks[0].padding) == -100).all()
    for shard in shards:
        assert shard.is_contiguous()
        assert shard.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert shard.untyped_storage().nbytes() == shard.numel() * shard.itemsize


def test_gradient_of_a_shard_is_zero_outside_it() -> None:
    x = torch.randn(1, 10, 2, dtype=torch.float64, requires_grad=True)
    layout = ShardLayout(10, 4, 3)
    layout.shard(x, 1, 0.0).sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [0.0] * 9 + [1.0]


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 2), (4, 1)])
def test_padding_continues_positions(shape: tuple[int, ...]) -> None:
    positions = torch.arange(1234).expand(*shape, 1234) + torch.arange(shape[0]).view(-1, *[1] * len(shape))
    ranks = layouts(1234, 8)
    assert ranks[0].padded_len == 1240
    padded = ranks[0].pad_position_ids(positions)
    assert padded.shape == (*shape, 1240)
    assert torch.equal(padded[..., :1234], positions)
    assert (padded.diff(dim=-1) == 1).all()
    assert torch.equal(torch.cat([r.shard_position_ids(positions) for r in ranks], -1), padded)


def brute_force(layout: ShardLayout, documents: list[int]) -> tuple[list[int], bool, bool]:
    """Number each token with its document, pad, slice, and read the edges off."""
    number = [i for i, length in enumerate(documents) for _ in range(length)]
    number += [-1] * layout.padding
    local = number[layout.start : layout.stop]
    bounds = [i for i in range(len(local)) if i == 0 or local[i] != local[i - 1]] + [len(local)]
    before = layout.start > 0 and number[layout.start - 1] == local[0]
    after = layout.stop < len(number) and number[layout.stop] == local[-1]
    return bounds, before, after


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_local_cu_seqlens_against_brute_force(seq_len: int, cp_size: int) -> None:
    generator = torch.Generator().manual_seed(seq_len * 10 + cp_size)
    for count in (1, 2, 5, 40):
        cuts = torch.randint(0, seq_len + 1, (count - 1,), generator=generator).sort().values.tolist()
        edges = [0, *cuts, seq_len]
        documents = [b - a for a, b in itertools.pairwise(edges)]
        for layout in layouts(seq_len, cp_size, 3):
            local = layout.local_cu_seqlens(torch.tensor(edges))
            bounds, before, after = brute_force(layout, documents)
            assert list(local.bounds) == bounds
            assert local.cu_seqlens is not None
            assert local.cu_seqlens.tolist() == bounds
            assert local.cu_seqlens.dtype == torch.int32
            assert (local.continues_from_previous, local.continues_into_next) == (before, after)
            assert local.max_seqlen == max(b - a for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("cp_size", SIZES)
def test_whole_sequence_boundaries(cp_size: int) -> None:
    documents = [5, 1, 11]
    layout = ShardLayout(17, cp_size, cp_size - 1)
    edges = torch.tensor([0, 5, 6, 17])
    assert layout.pad_cu_seqlens(edges).tolist() == [0, 5, 6, 17, layout.padded_len][: 5 if layout.padding else 4]
    wanted = [position for length in documents for position in range(length)]
    positions = layout.document_positions(edges)
    assert positions[0].tolist() == wanted
    assert positions.dtype == torch.int64
    again = cu_seqlens_from_position_ids(positions)
    assert again is not None
    assert again.tolist() == edges.tolist()


@pytest.mark.parametrize("cp_size", SIZES)
def test_one_document_crosses_every_inner_edge(cp_size: int) -> None:
    for layout in layouts(2 * cp_size, cp_size):
        local = layout.one_document()
        wanted = layout.local_cu_seqlens([0, 2 * cp_size])
        assert local.cu_seqlens is None
        assert local.bounds == wanted.bounds
        assert local.continues_from_previous == wanted.continues_from_previous
        assert local.continues_into_next == wanted.continues_into_next


def test_a_shard_that_starts_within_a_document_is_numbered_from_its_own_start() -> None:
    local = ShardLayout(4096, 4, 1).local_cu_seqlens([0, 3072, 4096])
    assert local.bounds == (0, 1024)
    assert local.continues_from_previous
    assert local.continues_into_next


def test_neighbours_agree_on_what_crosses_their_edge() -> None:
    for cut in range(1, 20):
        ranks = [layout.local_cu_seqlens([0, cut, 20]) for layout in layouts(20, 3)]
        for left, right in itertools.pairwise(ranks):
            assert left.continues_into_next == right.continues_from_previous
        assert not ranks[0].continues_from_previous
        assert not ranks[-1].continues_into_next


def test_documents_from_positions() -> None:
    assert cu_seqlens_from_position_ids(torch.arange(9)[None]) is None
    assert cu_seqlens_from_position_ids(torch.arange(5, 9)[None]) is None
    assert cu_seqlens_from_position_ids(torch.tensor([[0]])) is None
    packed = cu_seqlens_from_position_ids(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert packed is not None
    assert packed.tolist() == [0, 3, 4, 6]
    assert packed.dtype == torch.int32
    tail = cu_seqlens_from_position_ids(torch.tensor([[7, 8, 0]]))
    assert tail is not None
    assert tail.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0), "seq_len=0"),
        ((5, 0, 0), "cp_size=0"),
        ((5, 2, 2), "cp_rank=2"),
        ((5, 2, -1), "cp_rank=-1"),
        ((5, 2, 0, 0), "min_local=0"),
    ],
)
def test_fields_out_of_range(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        ShardLayout(*arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "edges",
    [[0, 3], [1, 10], [0, 12], [], [0], [0, 7, 3, 10]],
)
def test_boundaries_that_do_not_fit(edges: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        ShardLayout(10, 2, 0).local_cu_seqlens(edges)


def test_tensors_of_another_length() -> None:
    layout = ShardLayout(10, 4, 0)
    for call in (lambda x: layout.pad(x, 1, 0), lambda x: layout.shard(x, 1, 0), layout.pad_position_ids):
        with pytest.raises(ValueError, match="seq_len=10"):
            call(torch.zeros(1, 11, dtype=torch.long))
    with pytest.raises(ValueError, match="padded_len=12"):
        layout.unpad(torch.zeros(1, 10), 1)
    with pytest.raises(ValueError, match="one row"):
        cu_seqlens_from_position_ids(torch.zeros(2, 4, dtype=torch.long))


def test_a_copied_mesh_is_the_same_mesh() -> None:
    mesh = CpMesh.single()
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh
    assert copy.copy(mesh) is mesh
    assert (mesh.previous_rank, mesh.next_rank) == (None, None)
    with pytest.raises(ValueError, match="cp_size=2"):
        CpMesh(None, 2, 0)
