"""Every collective against a dense computation and against its adjoint, and the tools that watch and run them."""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_cp import collectives as c
from hf_cp.mesh import CpMesh
from hf_cp.testing import (
    CommunicationLog,
    RankFailure,
    SavedTensorLog,
    World,
    allow_fsdp2_on_cpu,
    fill_uninitialized,
    free_port,
    relative_error,
    run_cases,
    run_ranks,
)

SIZES = [2, 3, 4]
Worlds = Callable[..., World]
# Divisible by every size, twice over.
B, L, H, D = 2, 12, 24, 5


def tensor_of(rank: int, *shape: int, salt: int = 0) -> Tensor:
    """A tensor that any rank can compute for any other, on the default device."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu").to(torch.get_default_device())


def mesh_of_world() -> CpMesh:
    return CpMesh.from_group(dist.group.WORLD)


# Each maps this rank's x [B, L, H, D] to a tensor, linearly, with messages.
def exchanged_together(x: Tensor, mesh: CpMesh) -> Tensor:
    q, k, g = c.exchange_sequence_to_heads([x, 2 * x[:, :, ::2, :3], 3 * x[..., 0]], mesh)
    return torch.cat([q.flatten(), k.flatten(), g.flatten()])


LINEAR_MAPS: dict[str, Callable[[Tensor, CpMesh], Tensor]] = {
    "all_to_all": partial(c.all_to_all, scatter_dim=2, gather_dim=1),
    "all_to_all_back": partial(c.all_to_all, scatter_dim=1, gather_dim=2),
    "all_to_all_far_dims": partial(c.all_to_all, scatter_dim=2, gather_dim=0),
    "exchange_sequence_to_heads": exchanged_together,
    "exchange_heads_to_sequence": c.exchange_heads_to_sequence,
    "shift": c.shift,
    "gather_sequence": partial(c.gather_sequence, dim=1),
    "gather_sequence_last_dim": partial(c.gather_sequence, dim=-1),
    "reduce_sum": c.reduce_sum,
}


def inner_products(rank: int, size: int, name: str) -> tuple[float, float]:
    """This rank's parts of <A x, y> and <x, A^T y>."""
    x = tensor_of(rank, B, L, H, D).requires_grad_()
    with fill_uninitialized():
        image = LINEAR_MAPS[name](x, mesh_of_world())
        y = tensor_of(rank, *image.shape, salt=1)
        image.backward(y)
    assert x.grad is not None
    return (image.detach() * y).sum().item(), (x.detach() * x.grad).sum().item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LINEAR_MAPS)
def test_backward_is_the_adjoint(world: Worlds, size: int, name: str) -> None:
    parts = world(size).run(inner_products, name)
    left, right = (sum(part) for part in zip(*parts, strict=True))
    assert left == pytest.approx(right, rel=1e-11)


def dense_values(rank: int, size: int, dtype: torch.dtype) -> None:
    mesh = mesh_of_world()
    xs = [(tensor_of(r, B, L, H, D) * 100).to(dtype) for r in range(size)]
    x, sequence = xs[rank], torch.cat(xs, 1)
    own_heads = sequence.chunk(size, 2)[rank]
    # A non-contiguous input must give the same.
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        with fill_uninitialized():
            results = {
                "all_to_all": (c.all_to_all(given, mesh, 2, 1), own_heads),
                "exchange": (c.exchange_sequence_to_heads([given], mesh)[0], own_heads),
                "inverse": (c.exchange_heads_to_sequence(own_heads, mesh), x),
                "all_to_all inverse": (c.all_to_all(own_heads, mesh, 1, 2), x),
                "shift": (c.shift(given, mesh), xs[rank - 1] if rank else torch.zeros_like(x)),
                "gather": (c.gather_sequence(given, mesh, 1), sequence),
                "reduce": (c.reduce_sum(given, mesh), torch.stack(xs).sum(0)),
                "all_reduce_": (c.all_reduce_(given.clone(), mesh), torch.stack(xs).sum(0)),
            }
        for name, (value, wanted) in results.items():
            assert value.dtype == dtype, name
            assert value.shape == wanted.shape, name
            # A sum may be rounded in another order.
            exact = "reduce" not in name or dtype == torch.int64
            limit = 0.0 if exact else 2 * size * torch.finfo(dtype).eps
            assert relative_error(value, wanted) <= limit, name
            assert value.is_contiguous() or name == "all_reduce_", name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_values_against_dense(world: Worlds, size: int, dtype: torch.dtype) -> None:
    world(size).run(dense_values, dtype)


def mixed_exchange(rank: int, size: int) -> int:
    """bf16 q with fp32 g and odd sizes: travels as bytes in one message, forward and backward."""
    mesh = mesh_of_world()
    q = [tensor_of(r, 1, 3, size, 5).to(torch.bfloat16) for r in range(size)]
    g = [tensor_of(r, 1, 3, 2 * size, salt=1).to(torch.float32) for r in range(size)]
    beta = [tensor_of(r, 1, 3, size, salt=2) for r in range(size)]
    inputs = [t.requires_grad_() for t in (q[rank].clone(), g[rank].clone(), beta[rank].clone())]
    with CommunicationLog() as log, fill_uninitialized():
        outputs = c.exchange_sequence_to_heads(inputs, mesh)
        for output, whole in zip(outputs, (q, g, beta), strict=True):
            assert torch.equal(output, torch.cat(whole, 1).chunk(size, 2)[rank])
        # One output without a gradient: the adjoint message has the same size all the same.
        torch.autograd.backward(outputs[:2], [outputs[0].detach() * 2, outputs[1].detach() * 3])
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, q[rank] * 2)
    assert torch.equal(inputs[1].grad, g[rank] * 3)
    assert log.names == ["all_to_all"] * 2
    assert log.records[0].payload_bytes == log.records[1].payload_bytes
    return log.records[0].payload_bytes


@pytest.mark.parametrize("size", SIZES)
def test_exchange_of_mixed_dtypes(world: Worlds, size: int) -> None:
    exact = size * (3 * 5 * 2 + 3 * 2 * 4 + 3 * 8)
    for sent in world(size).run(mixed_exchange):
        assert exact <= sent < exact + size * 3 * 16


def gather_of_replicated_consumers(rank: int, size: int) -> list[str]:
    mesh = mesh_of_world()
    x = tensor_of(rank, B, L, D).requires_grad_()
    y = tensor_of(99, B, L * size, D)
    with CommunicationLog() as log:
        c.gather_sequence(x, mesh, 1, adjoint="slice").backward(y)
    assert x.grad is not None
    assert torch.equal(x.grad, y[:, rank * L : (rank + 1) * L])
    return log.names


def test_gather_with_slice_sends_nothing_back(world: Worlds) -> None:
    assert world(3).run(gather_of_replicated_consumers) == [["all_gather"]] * 3


# State passing.

K, V, HV = 4, 6, 3


def summaries(size: int, dtype: torch.dtype, new_document_on: int | None) -> tuple[list[Tensor | None], list[Tensor]]:
    M: list[Tensor | None] = [tensor_of(r, B, HV, K, K, salt=3).to(dtype) for r in range(size)]
    h = [tensor_of(r, B, HV, K, V, salt=4).to(dtype) for r in range(size)]
    if new_document_on is not None:
        M[new_document_on] = None
    return M, h


def dense_states(M: list[Tensor | None], h: list[Tensor], rank: int, reverse: bool, cut: int | None) -> Tensor:
    """States by the definition; `cut` is the rank whose first token starts a document."""
    state = torch.zeros_like(h[0])
    for r in range(len(h) - 1, rank, -1) if reverse else range(rank):
        if cut == (r + 1 if reverse else r):
            state = torch.zeros_like(state)
        matrix = M[r]
        transition = torch.zeros(K, K, dtype=h[0].dtype) if matrix is None else (matrix.mT if reverse else matrix)
        state = transition @ state + h[r]
    return torch.zeros_like(state) if cut == (rank + 1 if reverse else rank) else state


def state_passing(
    rank: int,
    size: int,
    mode: str,
    dtype: torch.dtype,
    new_document_on: int | None,
    cut: int | None,
    autocast: bool = False,
) -> tuple[float, float]:
    mesh = mesh_of_world()
    start = {"chain": c.start_state_chain, "gather": c.start_gather_states}[mode]
    M, h = summaries(size, dtype, new_document_on)
    dh = [tensor_of(r, B, HV, K, V, salt=5).to(dtype) for r in range(size)]
    values = []
    for reverse, added in ((False, h), (True, dh)):
        accept = cut != (rank + 1 if reverse else rank)
        lower = torch.autocast(h[rank].device.type, torch.bfloat16, enabled=autocast)
        with CommunicationLog() as log, fill_uninitialized(), lower:
            pending = start(M[rank], added[rank], mesh, reverse=reverse, accept=accept)
            value = pending.wait()
        assert value.dtype == dtype
        wanted = dense_states(M, added, rank, reverse, cut)
        assert relative_error(value, wanted) <= 16 * torch.finfo(dtype).eps
        one = B * HV * K * V * dtype.itemsize
        if mode == "gather":
            assert log.names == ["all_gather"]
            assert log.total() == B * HV * K * (K + V) * dtype.itemsize
        else:
            last = 0 if reverse else size - 1
            assert log.total("send") == (0 if rank == last else one)
            assert log.count() == (1 if rank in (0, size - 1) else 2)
        values.append(value)
    # S_in = P h and dS_out = P^T dh, with P strictly below the diagonal.
    return (values[0] * dh[rank]).sum().item(), (values[1] * h[rank]).sum().item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["chain", "gather"])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
def test_states_against_dense(world: Worlds, size: int, mode: str, dtype: torch.dtype, autocast: bool) -> None:
    """Autocast lowers no state: neither its value, nor the message that the next rank waits for."""
    for new_document_on, cut in [(None, None), (1, None), (None, 1), (0, size - 1), (size - 1, size - 1)]:
        parts = world(size).run(state_passing, mode, dtype, new_document_on, cut, autocast)
        left, right = (sum(part) for part in zip(*parts, strict=True))
        assert left == pytest.approx(right, rel=1e-11 if dtype == torch.float64 else 1e-4, abs=1e-4)


def work_between_start_and_wait(rank: int, size: int) -> None:
    """Two chains and other messages may be under way at once: each arrives where it belongs."""
    mesh = mesh_of_world()
    M, h = summaries(size, torch.float64, None)
    chain = c.start_state_chain(M[rank], h[rank], mesh)
    second = c.start_state_chain(None, h[rank], mesh)
    fold = c.start_gather_states(M[rank], h[rank], mesh)
    halo = c.start_shift(h[rank], mesh)
    assert torch.equal(c.reduce_sum(torch.ones(2), mesh), torch.full((2,), float(size)))
    first = chain.wait()
    previous = h[rank - 1] if rank else torch.zeros_like(h[0])
    assert torch.equal(halo.wait(), previous)
    assert torch.equal(second.wait(), previous)
    assert relative_error(fold.wait(), first) < 1e-14
    with pytest.raises(RuntimeError, match="already"):
        chain.wait()


@pytest.mark.parametrize("size", SIZES)
def test_messages_overlap(world: Worlds, size: int) -> None:
    world(size).run(work_between_start_and_wait)


class Mark(torch.autograd.Function):
    """Identity that notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: CommunicationLog, seen: list[int]) -> Tensor:
        ctx.log, ctx.seen = log, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.seen.append(ctx.log.count())
        return grads[0], None, None


def overlap_in_backward(rank: int, size: int) -> None:
    mesh = mesh_of_world()
    x = tensor_of(rank, B, L, H, D).requires_grad_()
    seen: list[int] = []
    with CommunicationLog() as log:
        pending = c.start_exchange_sequence_to_heads([x], mesh)
        between = Mark.apply(x, log, seen)
        assert isinstance(between, Tensor)
        after = pending.wait()[0]
        assert log.count() == 1
        (after.sum() + between.sum()).backward()
    # The adjoint message was posted before the work between start and wait ran its backward.
    assert seen == [2]
    assert log.count() == 2
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_work_between_start_and_wait_overlaps_in_backward(world: Worlds) -> None:
    world(2).run(overlap_in_backward)


def dropped(rank: int, size: int) -> None:
    mesh = mesh_of_world()
    pending = c.start_gather_sequence(torch.ones(2), mesh, 0)
    del pending
    with pytest.raises(RuntimeError, match="dropped without wait"):
        c.shift(torch.ones(2), mesh)
    assert c.shift(torch.ones(2), mesh).sum() == (2 if rank else 0)


def test_a_dropped_exchange_raises_at_the_next(world: Worlds) -> None:
    world(2).run(dropped)


# Agreement.


def agreement(rank: int, size: int) -> None:
    mesh = mesh_of_world()
    big = 2**62 + rank
    with CommunicationLog() as log:
        assert c.exchange_vector([rank, big, -1], mesh) == [[r, 2**62 + r, -1] for r in range(size)]
        assert c.exchange_vector(torch.tensor([rank, 7]), mesh) == [[r, 7] for r in range(size)]
    assert log.names == ["all_gather"] * 2
    assert log.total() == 3 * 8 + 2 * 8
    assert c.exchange_objects("x" * rank, mesh) == ["x" * r for r in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_agreement(world: Worlds, size: int) -> None:
    world(size).run(agreement)


# Meshes.


def test_a_mesh_of_one_sends_nothing() -> None:
    mesh = CpMesh.single()
    x = tensor_of(0, B, L, H, D).requires_grad_()
    h, M = tensor_of(0, B, HV, K, V), tensor_of(0, B, HV, K, K)
    with CommunicationLog() as log:
        for name, function in LINEAR_MAPS.items():
            if name not in ("shift", "exchange_sequence_to_heads"):
                assert function(x, mesh) is x, name
        assert torch.equal(c.exchange_sequence_to_heads([x, x[..., 0]], mesh)[1], x[..., 0])
        assert torch.equal(c.shift(x, mesh), torch.zeros_like(x))
        assert c.all_reduce_(x.detach(), mesh).shape == x.shape
        for start in (c.start_state_chain, c.start_gather_states):
            for reverse in (False, True):
                assert torch.equal(start(M, h, mesh, reverse=reverse).wait(), torch.zeros_like(h))
        assert c.exchange_vector([1, 2], mesh) == [[1, 2]]
        assert c.exchange_objects("a", mesh) == ["a"]
    assert log.records == []


def subgroups(rank: int, size: int) -> tuple[str, str]:
    # new_group gives non-members a plain integer, which its annotation does not leave out for members.
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone: list[Any] = [dist.new_group([r]) for r in range(size)]
    mesh = CpMesh.from_group(pairs[rank // 2])
    assert (mesh.cp_size, mesh.cp_rank) == (2, rank % 2)
    assert (mesh.previous_rank, mesh.next_rank) == ((None, 1) if rank % 2 == 0 else (0, None))
    assert copy.deepcopy(mesh) is mesh
    assert CpMesh.from_group(alone[rank]).group is None
    with pytest.raises(ValueError, match="not a member"):
        CpMesh.from_group(pairs[1 - rank // 2])
    first = rank - rank % 2
    x = torch.full((2,), float(rank))
    with CommunicationLog() as log:
        assert torch.equal(c.gather_sequence(x, mesh, 0), torch.tensor([first, first, first + 1, first + 1.0]))
    assert log.records[0].group_size == 2
    assert torch.equal(c.shift(x, mesh), torch.zeros(2) if rank % 2 == 0 else x - 1)
    assert torch.equal(c.reduce_sum(x, mesh), torch.full((2,), 2.0 * first + 1))
    one = torch.ones(1, 1, 1, 1)
    state = c.start_state_chain(one, one * rank, mesh).wait()
    assert state.item() == (0 if rank % 2 == 0 else rank - 1)
    assert c.exchange_vector([rank], mesh) == [[first], [first + 1]]
    assert c.exchange_objects(rank, mesh) == [first, first + 1]
    return type(mesh).__module__, type(mesh).__qualname__


def test_a_mesh_on_a_subgroup(world: Worlds) -> None:
    assert world(4).run(subgroups) == [("hf_cp.mesh", "CpMesh")] * 4


MEAN: Any = "mean"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: c.all_to_all(x, m, 1, 1), "must differ"),
        (lambda x, m: c.all_to_all(x, m, 3, 1), "divisible by cp_size=2"),
        (lambda x, m: c.exchange_sequence_to_heads([x, x[:1]], m), "with B, L"),
        (lambda x, m: c.exchange_sequence_to_heads([x[:, :, :3]], m), "divisible by cp_size=2"),
        (lambda x, m: c.exchange_heads_to_sequence(x[:, :3], m), "divisible by cp_size=2"),
        (lambda x, m: c.gather_sequence(x, m, 1, MEAN), "adjoint='mean'"),
        (lambda x, m: c.start_state_chain(x[0], x[0], m), r"\[B, HV, K, V\]"),
        (lambda x, m: c.start_gather_states(x, x, m), r"\[B, HV, K, K\]"),
    ],
)
def test_what_does_not_fit_raises_before_any_message(call: Callable[[Tensor, CpMesh], Any], message: str) -> None:
    mesh = object.__new__(CpMesh)
    for field, value in (("group", None), ("cp_size", 2), ("cp_rank", 0)):
        object.__setattr__(mesh, field, value)
    with CommunicationLog() as log, pytest.raises(ValueError, match=message) as raised:
        call(torch.zeros(B, L, H, D), mesh)
    assert "\n" not in str(raised.value)
    assert log.records == []


# The logs.


def message_bytes(rank: int, size: int) -> None:
    mesh = mesh_of_world()
    x = torch.ones(B, L, H, D, dtype=torch.bfloat16, requires_grad=True)
    whole = x.numel() * 2
    cases: dict[str, tuple[list[str], list[int]]] = {
        "all_to_all": (["all_to_all", "all_to_all"], [whole, whole]),
        "exchange_sequence_to_heads": (["all_to_all"] * 2, [(x.numel() + B * L * H // 2 * 3 + B * L * H) * 2] * 2),
        "exchange_heads_to_sequence": (["all_to_all", "all_to_all"], [whole, whole]),
        "gather_sequence": (["all_gather", "reduce_scatter"], [whole, whole * size]),
        "reduce_sum": (["all_reduce", "all_reduce"], [whole, whole]),
    }
    for name, (names, payloads) in cases.items():
        with CommunicationLog() as log, SavedTensorLog() as saved:
            # Sums save shapes, not tensors.
            result = LINEAR_MAPS[name](x, mesh).sum()
            result.backward()
        assert log.names == names, repr(log)
        assert [r.payload_bytes for r in log.records] == payloads, repr(log)
        assert all(r.group_size == size for r in log.records)
        assert saved.tensors == [], (name, saved)
    with CommunicationLog() as log:
        c.shift(x, mesh).sum().backward()
    assert log.count("send") == log.count("recv") == (1 if rank in (0, size - 1) else 2)
    assert log.total("send") == log.count("send") * whole
    assert log.total() == log.total("send")


@pytest.mark.parametrize("size", [2, 3])
def test_message_bytes(world: Worlds, size: int) -> None:
    world(size).run(message_bytes)


def every_kind(rank: int, size: int) -> str:
    """What torch itself, DDP, FSDP2, DTensor and functional collectives send is seen too."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    group = dist.group.WORLD
    assert group is not None
    with CommunicationLog() as log:
        dist.barrier()
        dist.broadcast(torch.ones(3), 0)
        (dist.send if rank == 0 else dist.recv)(torch.ones(3), 1 - rank)
        dist.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(2), torch.ones(2)])
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
        functional.all_reduce(torch.ones(3), "sum", group).sum()
        functional.all_gather_tensor(torch.ones(3), 0, group).sum()
    assert log.names == [
        *("barrier", "broadcast", "send" if rank == 0 else "recv", "all_to_all", "all_gather"),
        *("all_reduce", "all_gather"),
    ]
    assert [r.payload_bytes for r in log.records] == [0, 12, 12 if rank == 0 else 0, 16, 8, 12, 12]
    assert all(r.group_size == size for r in log.records)

    replica = DistributedDataParallel(torch.nn.Linear(4, 4))
    with CommunicationLog() as log:
        replica(torch.ones(2, 4)).sum().backward()
    assert log.total("all_reduce") == 20 * 4

    device_mesh = init_device_mesh("cpu", (size,))
    sharded = torch.nn.Linear(4, 4)
    fully_shard(sharded, mesh=device_mesh)
    with CommunicationLog() as log:
        sharded(torch.ones(2, 4)).sum().backward()
    assert log.total("all_gather") > 0
    assert log.total("reduce_scatter") == 20 * 4

    part: Any = distribute_tensor(torch.ones(4, 2), device_mesh, [Shard(0)])
    with CommunicationLog() as log:
        # A message from within DTensor's own dispatch.
        torch.softmax(part, 0)
    assert log.names == ["all_gather"]
    with CommunicationLog() as log:
        part.sum().full_tensor().item()
    assert log.names == ["all_reduce"]
    return repr(log)


def test_the_log_sees_every_kind_of_message(world: Worlds) -> None:
    for text in world(2).run(every_kind):
        assert text.startswith("CommunicationLog: 1 messages, 4 payload bytes\n  all_reduce")


def replay(rank: int, size: int, reentrant: bool) -> None:
    mesh = mesh_of_world()
    weight = tensor_of(7, D, D).requires_grad_()

    def block(x: Tensor) -> Tensor:
        pending = c.start_shift(x[:, -2:], mesh)
        hidden = torch.tanh(x @ weight)
        halo = pending.wait()
        heads, gate = c.exchange_sequence_to_heads([hidden, hidden[..., 0]], mesh)
        mixed = heads * torch.sigmoid(gate)[..., None]
        out = c.exchange_heads_to_sequence(mixed, mesh)
        return torch.tanh(out + (halo**2).sum() * c.reduce_sum(hidden.mean(), mesh))

    def gradients(wrap: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[str], list[str]]:
        x = tensor_of(rank, B, L, H, D).requires_grad_()
        weight.grad = None
        with CommunicationLog() as log:
            y = wrap(wrap(x))
            forward = log.names
            y.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad], forward, log.names[len(forward) :]

    plain, forward, backward = gradients(block)
    again, forward_again, replayed = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert forward_again == forward
    for value, wanted in zip(again, plain, strict=True):
        assert torch.equal(value, wanted)
    # Each block: its forward messages again, then its backward messages.
    half_forward, half_backward = len(forward) // 2, len(backward) // 2
    assert replayed == 2 * (forward[:half_forward] + backward[:half_backward])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_replay_repeats_the_messages(world: Worlds, size: int, reentrant: bool) -> None:
    world(size).run(replay, reentrant)


def test_saved_tensors_are_logged() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    with SavedTensorLog(ignore=[weight]) as log:
        torch.exp(x @ weight)
    assert sorted(log.shapes) == [(3, 4), (3, 4)]
    assert log.total_bytes == 2 * 12 * 4


def test_relative_error() -> None:
    one = torch.ones(4)
    assert relative_error(one, one) == 0.0
    assert relative_error(one * 1.5, one) == 0.5
    assert relative_error(one * 0, one * 0) == 0.0
    assert relative_error(one, one * 0) == float("inf")
    assert relative_error(one * float("nan"), one) == float("inf")
    assert relative_error(one, one * float("nan")) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        relative_error(one, one[:2])


def test_poisoned_memory(poison_empty: None) -> None:
    assert torch.empty(3).isnan().all()


# The same on CUDA: NCCL, and gloo, which must stage CUDA tensors through the CPU.


def on_cuda(rank: int, size: int, fn: Callable[..., Any], *args: Any) -> Any:
    torch.set_default_device(torch.device("cuda", rank % torch.cuda.device_count()))
    try:
        result = fn(rank, size, *args)
        torch.cuda.synchronize()
    finally:
        torch.set_default_device("cpu")
    return result


CUDA_CASES: list[tuple[Any, ...]] = [
    *((inner_products, name) for name in LINEAR_MAPS),
    *((dense_values, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)),
    (mixed_exchange,),
    *((state_passing, mode, torch.float32, None, cut) for mode in ("chain", "gather") for cut in (None, 1)),
    (work_between_start_and_wait,),
    (agreement,),
    (replay, False),
    (replay, True),
]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: "-".join(str(getattr(x, "__name__", x)) for x in case))
def test_on_nccl(world: Worlds, case: tuple[Any, ...]) -> None:
    check_on_cuda(world(2, backend="nccl"), case)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: "-".join(str(getattr(x, "__name__", x)) for x in case))
def test_cuda_tensors_on_gloo(world: Worlds, case: tuple[Any, ...]) -> None:
    check_on_cuda(world(2), case)


def check_on_cuda(ranks: World, case: tuple[Any, ...]) -> None:
    parts = ranks.run(on_cuda, *case)
    if case[0] in (inner_products, state_passing):
        left, right = (sum(part) for part in zip(*parts, strict=True))
        assert left == pytest.approx(right, rel=1e-4, abs=1e-4)


# Worlds.


def fails_on_one(rank: int, size: int) -> int:
    if rank == 1:
        raise KeyError("lost on the way")
    dist.all_reduce(torch.ones(1))
    return rank


def hangs(rank: int, size: int) -> None:
    if rank == 0:
        time.sleep(60)


def dies(rank: int, size: int) -> None:
    import os

    if rank == 1:
        os._exit(3)


def adds(rank: int, size: int, number: int) -> int:
    return number + rank


def test_a_world_reports_failures_and_recovers(world: Worlds) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="lost on the way") as failed:
        world(2).run(fails_on_one)
    assert "waiting while another rank failed" in failed.value.reports[0]
    assert "in fails_on_one" in failed.value.reports[0]
    assert world(2).run(adds, 4) == [4, 5]
    with pytest.raises(RankFailure, match="did not finish") as failed:
        world(2).run(hangs, timeout=3.0)
    assert set(failed.value.reports) == {0, 1}
    assert failed.value.reports[1].startswith("finished")
    assert "in hangs" in failed.value.reports[0]
    with pytest.raises(RankFailure, match="exit code 3"):
        world(2).run(dies)
    assert world(2).run(adds, 5) == [5, 6]
    assert time.monotonic() - started < 30


def test_a_port_that_is_taken_is_not_given_again() -> None:
    with socket.socket() as held:
        port = free_port()
        held.bind(("", port))
        assert free_port() != port


def test_cases_share_a_world() -> None:
    results = run_cases(2, {"good": (adds, (1,)), "bad": (fails_on_one, ()), "after": (adds, (2,))})
    assert [result.ok for result in results.values()] == [True, False, True]
    assert results["after"].values == [2, 3]
    assert "lost on the way" in results["bad"].error


def test_only_what_a_rank_can_find_is_sent() -> None:
    with pytest.raises(ValueError, match="top of its module"):
        World(2).run(lambda rank, size: rank)


def fsdp2_by_accelerate(rank: int, size: int) -> list[str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.distributed.tensor import DTensor

    allow_fsdp2_on_cpu()
    allow_fsdp2_on_cpu()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with CommunicationLog() as log:
        accelerator.backward(model(torch.ones(1, 4) * rank).sum())
    optimizer.step()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert accelerator.device.type == "cpu"
    return sorted(set(log.names))


def test_accelerate_runs_fsdp2_on_cpu() -> None:
    for names in run_ranks(fsdp2_by_accelerate, 2):
        assert {"all_gather", "reduce_scatter"} <= set(names)
