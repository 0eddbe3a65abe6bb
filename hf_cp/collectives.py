"""Every message of the package: differentiable exchanges, the halo, the state chain, and the forward-entry agreement.

Rules that hold for all of them:

- Messages depend on the mesh and on shapes only, never on data, so that all ranks of a group issue the same sequence.
- Each differentiable function sends exactly one message forward and its adjoint backward. No function saves a tensor.
- On a mesh of size 1 a function is the identity, or zero where it would receive from nobody, and sends nothing.
- `start_*` posts the message and returns a pending result; `wait()` yields the value. What is computed in between
  overlaps with the message, in backward too. A pending result that is dropped without `wait()` leaves a message
  unmatched, and the next launch raises.
- gloo cannot send CUDA tensors point to point, so on a gloo group they travel as CPU copies.

Shapes below use B batch, L = seq_len_local, W = cp_size, H heads, D head dim, HV value heads, K and V state dims.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_cp.mesh import CpMesh
from hf_cp.regions import region

# torch 2.13 renamed both and warns about the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Transport: plain buffers, no autograd.


class _Transfer:
    """Messages under way, with the buffers that must live until they have arrived."""

    def __init__(self, works: Sequence[Any], sent: Tensor | None, received: Tensor, device: torch.device) -> None:
        self._works = works
        self._sent = sent
        self._received = received
        self._device = device

    def wait(self) -> Tensor:
        """The received buffer; on CUDA the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._sent = (), None
        return self._received.to(self._device)


# Clock cycles; 20 us of an H200.
HEAD_START = 36_000


def _let_start(mesh: CpMesh, device: torch.device) -> None:
    """Hold the current stream back until the message just posted has begun.

    A product that fills all multiprocessors makes no room before it ends. The message's kernel reaches the device some
    microseconds after a product that was started right behind it, and would wait for all of that product.
    """
    if device.type == "cuda" and not mesh.stages_through_cpu(device):
        torch.cuda._sleep(HEAD_START)


_abandoned: list[object] = []


def _check_abandoned() -> None:
    if _abandoned:
        _abandoned.clear()
        raise RuntimeError("an exchange was started and dropped without wait(); its message would pair with the next")


def _wire(x: Tensor, mesh: CpMesh) -> Tensor:
    _check_abandoned()
    return x.cpu() if mesh.stages_through_cpu(x.device) else x


def _send_all_to_all(x: Tensor, mesh: CpMesh) -> _Transfer:
    """Exchange `x` `[W, ...]`, row j to rank j; the result's row j came from rank j."""
    sent = _wire(x.contiguous(), mesh)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=mesh.group, async_op=True)
    return _Transfer((work,), sent, received, x.device)


def _send_all_gather(x: Tensor, mesh: CpMesh) -> _Transfer:
    """Gather `x` from all ranks into `[W, *x.shape]`."""
    sent = _wire(x.contiguous(), mesh)
    received = sent.new_empty((mesh.cp_size, *sent.shape))
    work = _all_gather_single(received.flatten(), sent.flatten(), group=mesh.group, async_op=True)
    return _Transfer((work,), sent, received, x.device)


def _send_reduce_scatter(x: Tensor, mesh: CpMesh) -> _Transfer:
    """Sum `x` `[W, ...]` over ranks; rank r receives row r of the sum."""
    sent = _wire(x.contiguous(), mesh)
    received = sent.new_empty(sent.shape[1:])
    work = _reduce_scatter_single(received.flatten(), sent.flatten(), group=mesh.group, async_op=True)
    return _Transfer((work,), sent, received, x.device)


def _send_all_reduce(x: Tensor, mesh: CpMesh) -> _Transfer:
    """Sum of `x` over ranks, in a new buffer."""
    received = _wire(x.clone(memory_format=torch.contiguous_format), mesh)
    work = dist.all_reduce(received, group=mesh.group, async_op=True)
    return _Transfer((work,), None, received, x.device)


def _send_to(
    x: Tensor | None, to: int | None, received: Tensor | None, source: int | None, mesh: CpMesh, tag: int = 0
) -> list[Any]:
    """Post one send and one receive together, so that neither waits for the other; ends of the chain post only one."""
    _check_abandoned()
    ops = []
    if to is not None:
        assert x is not None
        ops.append(dist.P2POp(dist.isend, x, group=mesh.group, tag=tag, group_peer=to))
    if source is not None:
        assert received is not None
        ops.append(dist.P2POp(dist.irecv, received, group=mesh.group, tag=tag, group_peer=source))
    # A batch uses the group's own communicator; single NCCL sends would create one communicator per pair.
    return dist.batch_isend_irecv(ops) if ops else []


# Differentiable messages. An operation maps tensors to tensors through one transfer and knows its adjoint.


class _Operation(Protocol):
    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Post the message; the returned function waits for it and unpacks the result."""
        ...

    @property
    def adjoint(self) -> _Operation: ...


class _Flight:
    """What travels beside autograd: the function that lands the message in forward, and the one of its adjoint."""

    def __init__(self, operation: _Operation) -> None:
        self.operation = operation
        self.land_forward: Callable[[], tuple[Tensor, ...]] | None = None
        self.land_backward: Callable[[], tuple[Tensor, ...]] | None = None

    def start(self, operation: _Operation, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        with region(f"start{type(operation).__name__}"):
            return operation.launch(inputs)

    def wait(self, land: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        with region(f"wait{type(self.operation).__name__}"):
            return land()


class _Launch(torch.autograd.Function):
    """Post the message in forward; in backward, land the message that `_Land.backward` posted.

    | | per rank | |
    |---|---|---|
    | forward | inputs x | message A x posted; returns an empty token that ties `_Land` to the graph |
    | backward | the token's gradient, ignored | dx = A^T dy |

    Saves no tensor: A is linear.
    """

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *inputs: Tensor) -> Tensor:
        ctx.flight = flight
        flight.land_forward = flight.start(flight.operation, inputs)
        return inputs[0].new_empty((0,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        land, ctx.flight.land_backward = ctx.flight.land_backward, None
        assert land is not None, "the adjoint is posted by _Land.backward, which autograd runs first"
        return None, *ctx.flight.wait(land)


class _Land(torch.autograd.Function):
    """Wait for the message in forward; in backward, post its adjoint and let `_Launch.backward` land it.

    | | per rank | |
    |---|---|---|
    | forward | the token | y = A x |
    | backward | dy | message A^T dy posted; returns an empty gradient for the token |

    Whatever autograd runs between the two nodes in backward (what ran between `start` and `wait` in forward) overlaps
    with the message. Saves no tensor: A is linear.
    """

    @staticmethod
    def forward(ctx: Any, flight: _Flight, token: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        land, flight.land_forward = flight.land_forward, None
        assert land is not None
        return flight.wait(land)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.land_backward = ctx.flight.start(ctx.flight.operation.adjoint, grads)
        return None, grads[0].new_empty((0,))


class PendingTensors:
    """Tensors that a message is bringing; `wait()` returns them, once."""

    def __init__(self, flight: _Flight | None, token: Tensor | None, ready: tuple[Tensor, ...] | None = None) -> None:
        self._flight = flight
        self._token = token
        self._ready = ready

    def wait(self) -> list[Tensor]:
        """The received tensors, attached to the autograd graph."""
        if self._ready is not None:
            return list(self._ready)
        flight, token = self._flight, self._token
        if flight is None or token is None:
            raise RuntimeError("wait() was already called on this exchange")
        self._flight = self._token = None
        return list(_Land.apply(flight, token))  # pyright: ignore[reportArgumentType]

    def __del__(self) -> None:
        if getattr(self, "_flight", None) is not None:
            _abandoned.append(self._flight)


class PendingTensor:
    """One tensor that a message is bringing; `wait()` returns it, once."""

    def __init__(self, pending: PendingTensors) -> None:
        self._pending = pending

    def wait(self) -> Tensor:
        """The received tensor, attached to the autograd graph."""
        return self._pending.wait()[0]


def _start(operation: _Operation, inputs: Sequence[Tensor]) -> PendingTensors:
    flight = _Flight(operation)
    token = _Launch.apply(flight, *inputs)
    assert isinstance(token, Tensor)
    return PendingTensors(flight, token)


def _ready(*tensors: Tensor) -> PendingTensors:
    return PendingTensors(None, None, tensors)


@dataclass(frozen=True)
class _AllToAll:
    mesh: CpMesh
    scatter_dim: int
    gather_dim: int

    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        (x,) = inputs
        W, scatter_dim, gather_dim = self.mesh.cp_size, self.scatter_dim, self.gather_dim
        rows = x.unflatten(scatter_dim, (W, x.shape[scatter_dim] // W)).movedim(scatter_dim, 0)
        transfer = _send_all_to_all(rows, self.mesh)
        return lambda: (transfer.wait().movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous(),)

    @property
    def adjoint(self) -> _AllToAll:
        return _AllToAll(self.mesh, self.gather_dim, self.scatter_dim)


@dataclass(frozen=True)
class _Segments:
    """Where each tensor of an exchange lies in the row for one rank.

    Args:
        shapes: `[B, L, H_i/W, ...]` of what one rank holds of one peer's tokens and heads.
        dtypes: one per tensor. The row is typed if they agree, else bytes, each tensor aligned to its item size.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def wire_dtype(self) -> torch.dtype:
        return self.dtypes[0] if len(set(self.dtypes)) == 1 else torch.uint8

    def offsets(self) -> list[int]:
        """Start of each segment and, last, the length of the row, in items of the wire dtype."""
        if self.wire_dtype() != torch.uint8:
            sizes = [math.prod(shape) for shape in self.shapes]
            return [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        offsets, end = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            start = -(-end // dtype.itemsize) * dtype.itemsize
            offsets.append(start)
            end = start + math.prod(shape) * dtype.itemsize
        return [*offsets, -(-end // 8) * 8]

    def views(self, row_per_rank: Tensor) -> list[Tensor]:
        """The segments of `[W, row]` as `[W, *shape_i]` views."""
        offsets = self.offsets()
        views = []
        for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            length = math.prod(shape)
            if row_per_rank.dtype != dtype:
                length *= dtype.itemsize
            segment = row_per_rank[:, offsets[i] : offsets[i] + length]
            views.append(segment.view(dtype).unflatten(1, shape))
        return views


@dataclass(frozen=True)
class _Exchange:
    """One all-to-all that carries several tensors between sequence shards and head shards.

    Row j of the send buffer holds, one tensor after another, this rank's tokens of rank j's heads (to heads) or this
    rank's heads of rank j's tokens (to sequence).
    """

    mesh: CpMesh
    to_heads: bool

    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        W = self.mesh.cp_size
        dim = 2 if self.to_heads else 1
        rows = [x.unflatten(dim, (W, x.shape[dim] // W)).movedim(dim, 0) for x in inputs]
        segments = _Segments(tuple(tuple(row.shape[1:]) for row in rows), tuple(row.dtype for row in rows))
        send = torch.empty((W, segments.offsets()[-1]), dtype=segments.wire_dtype(), device=inputs[0].device)
        for view, row in zip(segments.views(send), rows, strict=True):
            view.copy_(row)
        transfer = _send_all_to_all(send, self.mesh)
        _let_start(self.mesh, send.device)
        gather_dim = 1 if self.to_heads else 2

        def land() -> tuple[Tensor, ...]:
            return tuple(
                view.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()
                for view in segments.views(transfer.wait())
            )

        return land

    @property
    def adjoint(self) -> _Exchange:
        return _Exchange(self.mesh, not self.to_heads)


@dataclass(frozen=True)
class _Shift:
    mesh: CpMesh
    forward: bool = True

    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        (x,) = inputs
        mesh = self.mesh
        to, source = mesh.next_rank, mesh.previous_rank
        if not self.forward:
            to, source = source, to
        sent = _wire(x.contiguous(), mesh)
        received = torch.zeros_like(sent) if source is None else torch.empty_like(sent)
        works = _send_to(sent, to, received, source, mesh)
        transfer = _Transfer(works, sent, received, x.device)
        return lambda: (transfer.wait(),)

    @property
    def adjoint(self) -> _Shift:
        return _Shift(self.mesh, not self.forward)


@dataclass(frozen=True)
class _Gather:
    mesh: CpMesh
    dim: int
    adjoint_kind: Literal["sum", "slice"]

    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        transfer = _send_all_gather(inputs[0], self.mesh)
        dim = self.dim
        return lambda: (transfer.wait().movedim(0, dim).flatten(dim, dim + 1).contiguous(),)

    @property
    def adjoint(self) -> _ReduceScatter | _Slice:
        return (_ReduceScatter if self.adjoint_kind == "sum" else _Slice)(self.mesh, self.dim)


@dataclass(frozen=True)
class _ReduceScatter:
    mesh: CpMesh
    dim: int

    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        (x,) = inputs
        W, dim = self.mesh.cp_size, self.dim
        transfer = _send_reduce_scatter(x.unflatten(dim, (W, x.shape[dim] // W)).movedim(dim, 0), self.mesh)
        return lambda: (transfer.wait(),)

    @property
    def adjoint(self) -> _Gather:
        return _Gather(self.mesh, self.dim, "sum")


@dataclass(frozen=True)
class _Slice:
    """This rank's part along `dim`, without a message: only the backward of a gather whose consumers are replicated."""

    mesh: CpMesh
    dim: int

    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        part = (
            inputs[0].chunk(self.mesh.cp_size, self.dim)[self.mesh.cp_rank].clone(memory_format=torch.contiguous_format)
        )
        return lambda: (part,)

    @property
    def adjoint(self) -> _Operation:
        raise RuntimeError("the slice of a gathered gradient is not differentiable a second time")


@dataclass(frozen=True)
class _Reduce:
    mesh: CpMesh

    def launch(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        transfer = _send_all_reduce(inputs[0], self.mesh)
        return lambda: (transfer.wait(),)

    @property
    def adjoint(self) -> _Reduce:
        return self


# Public differentiable functions.


def _check_divisible(x: Tensor, dim: int, mesh: CpMesh) -> None:
    if x.shape[dim] % mesh.cp_size:
        raise ValueError(f"dim {dim} of shape {tuple(x.shape)} must be divisible by cp_size={mesh.cp_size}")


def all_to_all(x: Tensor, mesh: CpMesh, scatter_dim: int, gather_dim: int) -> Tensor:
    """Split `scatter_dim` over the ranks and concatenate, in rank order, what arrives along `gather_dim`.

    | | per rank | |
    |---|---|---|
    | forward | x `[.., S, .., G, ..]` | y `[.., S/W, .., W*G, ..]`, y's part j along G is part r of rank j's x |
    | backward | dy, as y | dx, as x: the same exchange with the two dims swapped |

    Args:
        x: S entries along `scatter_dim`, G along `gather_dim`; either dim may be the first. Sequence to heads:
            `[B, L, H, D] -> [B, W*L, H/W, D]` is `all_to_all(x, mesh, scatter_dim=2, gather_dim=1)`.
        mesh: the group.
        scatter_dim: divisible by W.
        gather_dim: another dim.

    Raises:
        ValueError: equal dims, or S not divisible by W.
    """
    scatter_dim, gather_dim = scatter_dim % x.dim(), gather_dim % x.dim()
    if scatter_dim == gather_dim:
        raise ValueError(f"scatter_dim={scatter_dim} and gather_dim={gather_dim} must differ")
    _check_divisible(x, scatter_dim, mesh)
    if mesh.cp_size == 1:
        return x
    return _start(_AllToAll(mesh, scatter_dim, gather_dim), (x,)).wait()[0]


def start_exchange_sequence_to_heads(tensors: Sequence[Tensor], mesh: CpMesh) -> PendingTensors:
    """Post `exchange_sequence_to_heads`; `wait()` returns its list."""
    for x in tensors:
        if x.dim() < 3 or x.shape[:2] != tensors[0].shape[:2]:
            raise ValueError(f"shape {tuple(x.shape)} must be [B, L, H, ...] with B, L of {tuple(tensors[0].shape)}")
        _check_divisible(x, 2, mesh)
    if mesh.cp_size == 1:
        return _ready(*tensors)
    return _start(_Exchange(mesh, to_heads=True), tensors)


def exchange_sequence_to_heads(tensors: Sequence[Tensor], mesh: CpMesh) -> list[Tensor]:
    """Trade sequence shards of all heads for the whole sequence of some heads, several tensors in one message.

    | | per rank, for each tensor i | |
    |---|---|---|
    | forward | `[B, L, H_i, ...]` | `[B, W*L, H_i/W, ...]`: heads `[r*H_i/W, (r+1)*H_i/W)` of all tokens |
    | backward | `[B, W*L, H_i/W, ...]` | `[B, L, H_i, ...]`, the inverse exchange, again one message |

    Args:
        tensors: same B and L; head counts, trailing dims and dtypes may differ (differing dtypes travel as bytes, with
            under 16 bytes of alignment a tensor).
        mesh: the group.

    Raises:
        ValueError: a head count that W does not divide, or B and L that differ.
    """
    return start_exchange_sequence_to_heads(tensors, mesh).wait()


def start_exchange_heads_to_sequence(x: Tensor, mesh: CpMesh) -> PendingTensor:
    """Post `exchange_heads_to_sequence`; `wait()` returns its tensor."""
    if x.dim() < 3:
        raise ValueError(f"shape {tuple(x.shape)} must be [B, T, H, ...]")
    _check_divisible(x, 1, mesh)
    if mesh.cp_size == 1:
        return PendingTensor(_ready(x))
    return PendingTensor(_start(_Exchange(mesh, to_heads=False), (x,)))


def exchange_heads_to_sequence(x: Tensor, mesh: CpMesh) -> Tensor:
    """The inverse, and adjoint, of `exchange_sequence_to_heads` for one tensor.

    | | per rank | |
    |---|---|---|
    | forward | `[B, W*L, H/W, ...]` | `[B, L, H, ...]` |
    | backward | `[B, L, H, ...]` | `[B, W*L, H/W, ...]` |

    Raises:
        ValueError: a sequence that W does not divide.
    """
    return start_exchange_heads_to_sequence(x, mesh).wait()


def start_shift(x: Tensor, mesh: CpMesh) -> PendingTensor:
    """Post `shift`; `wait()` returns its tensor."""
    if mesh.cp_size == 1:
        return PendingTensor(_ready(torch.zeros_like(x)))
    return PendingTensor(_start(_Shift(mesh), (x,)))


def shift(x: Tensor, mesh: CpMesh) -> Tensor:
    """What the previous rank passed; zeros on rank 0.

    | | rank r | |
    |---|---|---|
    | forward | x_r, any shape, the same on all ranks | y_r = x_{r-1}, y_0 = 0 |
    | backward | dy_r | dx_r = dy_{r+1}, dx_{W-1} = 0 |

    All ranks post their send and receive together, so no order of ranks can deadlock.
    """
    return start_shift(x, mesh).wait()


def start_gather_sequence(x: Tensor, mesh: CpMesh, dim: int, adjoint: Literal["sum", "slice"] = "sum") -> PendingTensor:
    """Post `gather_sequence`; `wait()` returns its tensor."""
    if adjoint not in ("sum", "slice"):
        raise ValueError(f"adjoint={adjoint!r} must be 'sum' or 'slice'")
    if mesh.cp_size == 1:
        return PendingTensor(_ready(x))
    return PendingTensor(_start(_Gather(mesh, dim % x.dim(), adjoint), (x,)))


def gather_sequence(x: Tensor, mesh: CpMesh, dim: int, adjoint: Literal["sum", "slice"] = "sum") -> Tensor:
    """All ranks' `x` concatenated along `dim`, in rank order.

    | | per rank | |
    |---|---|---|
    | forward | x `[.., L, ..]` | y `[.., W*L, ..]` |
    | backward, "sum" | dy_r `[.., W*L, ..]` | dx_r = part r of sum_j dy_j (one reduce-scatter) |
    | backward, "slice" | dy `[.., W*L, ..]` | dx_r = part r of dy_r (no message) |

    Args:
        x: the same shape on all ranks.
        mesh: the group.
        dim: dimension to concatenate.
        adjoint: "sum" when each rank computes its own part of the loss from y; "slice" when every rank computes the
            same function of y, so that dy is already the whole gradient on each.

    Raises:
        ValueError: an unknown adjoint.
    """
    return start_gather_sequence(x, mesh, dim, adjoint).wait()


def reduce_sum(x: Tensor, mesh: CpMesh) -> Tensor:
    """Sum of `x` over the ranks.

    | | per rank | |
    |---|---|---|
    | forward | x_r | y = sum_j x_j on every rank |
    | backward | dy_r | dx = sum_j dy_j: each rank's y depends on every rank's x |
    """
    if mesh.cp_size == 1:
        return x
    return _start(_Reduce(mesh), (x,)).wait()[0]


@torch.no_grad()
def all_reduce_(x: Tensor, mesh: CpMesh) -> Tensor:
    """Replace `x` by its sum over the ranks, in place, outside autograd; returns `x`."""
    if mesh.cp_size > 1:
        x.copy_(_send_all_reduce(x, mesh).wait())
    return x


# State passing. Explicit forward/reverse pairs, for the autograd Function of a mixer to call.


def _advance(M: Tensor | None, h: Tensor, state: Tensor | None, reverse: bool) -> Tensor:
    """`M state + h` in h's dtype, with M transposed in reverse; a missing M or state is zero."""
    if M is None or state is None:
        return h
    # Autocast would make bf16 of it, half of the message that the next rank waits for.
    with torch.autocast(h.device.type, enabled=False):
        return torch.matmul(M.mT if reverse else M, state).add_(h)


def _check_states(M: Tensor | None, h: Tensor) -> None:
    if h.dim() != 4:
        raise ValueError(f"h of shape {tuple(h.shape)} must be [B, HV, K, V]")
    if M is not None and (M.shape != (*h.shape[:2], h.shape[2], h.shape[2]) or M.dtype != h.dtype):
        raise ValueError(
            f"M of shape {tuple(M.shape)}, {M.dtype} must be [B, HV, K, K] for h of {tuple(h.shape)}, {h.dtype}"
        )


# Chains started on each group. A chain's send may be posted long after its receive, with other messages to the same
# neighbour in between; gloo pairs by tag, so each chain has its own. (NCCL has no tags; there a chain posts both at
# once, in program order.)
_chains_started: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _next_chain_tag(mesh: CpMesh) -> int:
    assert mesh.group is not None
    started = _chains_started.get(mesh.group, 0)
    _chains_started[mesh.group] = started + 1
    # Tag 0 is everybody else's.
    return 1 + started % 65536


class PendingState:
    """A boundary state under way; `wait()` returns it, `[B, HV, K, V]`, once."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish

    def wait(self) -> Tensor:
        """The state that enters this shard: S_in forward, dS_out in reverse."""
        if self._finish is None:
            raise RuntimeError("wait() was already called on this state")
        finish, self._finish = self._finish, None
        with region("wait_State"):
            return finish()

    def __del__(self) -> None:
        if getattr(self, "_finish", None) is not None:
            _abandoned.append(self._finish)


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device, priority=-1)
    return _side_streams[device]


@torch.no_grad()
def start_state_chain(
    M: Tensor | None, h: Tensor, mesh: CpMesh, reverse: bool = False, accept: bool = True
) -> PendingState:
    """Start passing the recurrent state from rank to rank; `wait()` returns what enters this shard.

    | | rank r receives | sends | returns |
    |---|---|---|---|
    | forward | S_in from r-1 (rank 0: zero) | S_out = M S_in + h to r+1 | S_in |
    | reverse | dS_out from r+1 (last rank: zero) | dS_in = M^T dS_out + h to r-1 | dS_out |

    In reverse `h` is dh, the gradient that the shard's own outputs give to S_in. The next state is sent as soon as the
    arriving one is there: on CUDA on a side stream, which the host never waits for; on CPU in `wait()`, the receive
    having been posted at once. One message `[B, HV, K, V]` a hop, whatever `M` and `accept` are.

    Args:
        M: `[B, HV, K, K]`, the shard's transition; None is zero: a document starts inside the shard, so that no state
            crosses it.
        h: `[B, HV, K, V]`, fp32 or fp64.
        mesh: the group.
        reverse: the adjoint direction.
        accept: False takes what arrives for zero: the shard's first document starts here (forward), or its last
            document ends here (reverse).
    """
    _check_states(M, h)
    if mesh.cp_size == 1:
        zero = torch.zeros_like(h)
        return PendingState(lambda: zero)
    _check_abandoned()
    source, to = mesh.previous_rank, mesh.next_rank
    if reverse:
        source, to = to, source
    if h.device.type == "cuda" and not mesh.stages_through_cpu(h.device):
        return _start_chain_on_stream(M, h, mesh, source, to, reverse, accept)

    tag = _next_chain_tag(mesh)
    wire = h.new_empty(h.shape, device="cpu" if mesh.stages_through_cpu(h.device) else h.device)
    receiving = _send_to(None, None, wire, source, mesh, tag)
    # The first rank of the chain waits for nobody.
    sent = h.contiguous().to(wire.device) if source is None else None
    sending = _send_to(sent, to, None, None, mesh, tag) if source is None else []

    def finish() -> Tensor:
        nonlocal sent, sending
        if source is None:
            state = torch.zeros_like(h)
        else:
            for work in receiving:
                work.wait()
            state = wire.to(h.device) if accept else torch.zeros_like(h)
            sent = _advance(M, h, state if accept else None, reverse).contiguous().to(wire.device)
            sending = _send_to(sent, to, None, None, mesh, tag)
        # The neighbour's receive was posted before it could ask for anything that comes after this state.
        for work in sending:
            work.wait()
        return state

    return PendingState(finish)


def _start_chain_on_stream(
    M: Tensor | None, h: Tensor, mesh: CpMesh, source: int | None, to: int | None, reverse: bool, accept: bool
) -> PendingState:
    side = _side_stream(h.device)
    side.wait_stream(torch.cuda.current_stream(h.device))
    with torch.cuda.stream(side):
        state = torch.zeros_like(h) if source is None else torch.empty_like(h)
        for work in _send_to(None, None, state, source, mesh):
            work.wait()
        incoming = state if source is not None and accept else None
        out = _advance(M, h, incoming, reverse).contiguous()
        if not accept:
            state = torch.zeros_like(h)
        arrived = torch.cuda.Event()
        arrived.record(side)
        for work in _send_to(out, to, None, None, mesh):
            work.wait()
    h.record_stream(side)
    if M is not None:
        M.record_stream(side)
    _let_start(mesh, h.device)

    def finish() -> Tensor:
        current = torch.cuda.current_stream(h.device)
        current.wait_event(arrived)
        state.record_stream(current)
        return state

    return PendingState(finish)


@torch.no_grad()
def start_gather_states(
    M: Tensor | None, h: Tensor, mesh: CpMesh, reverse: bool = False, accept: bool = True
) -> PendingState:
    """Start gathering every shard's (M, h) in one all-gather; `wait()` folds the ones that precede this shard.

    | | rank r returns |
    |---|---|
    | forward | S_in = fold of j = 0 .. r-1 in order: S <- M_j S + h_j, from zero |
    | reverse | dS_out = fold of j = W-1 .. r+1 in order: dS <- M_j^T dS + h_j, from zero |

    The same values as `start_state_chain`, for one message of `[B, HV, K, K+V]` a rank instead of a chain of hops.

    Args:
        M: `[B, HV, K, K]` or None for zero, as in `start_state_chain`. Where `accept` is False it is sent as zero,
            since nothing that arrives passes through this shard.
        h: `[B, HV, K, V]`; in reverse, dh.
        mesh: the group.
        reverse: the adjoint direction.
        accept: False returns zero.
    """
    _check_states(M, h)
    if mesh.cp_size == 1:
        zero = torch.zeros_like(h)
        return PendingState(lambda: zero)
    K = h.shape[2]
    passing = M if M is not None and accept else h.new_zeros((*h.shape[:2], K, K))
    transfer = _send_all_gather(torch.cat([passing, h], dim=-1), mesh)
    _let_start(mesh, h.device)

    def finish() -> Tensor:
        summaries = transfer.wait()
        state = None
        order = range(mesh.cp_size - 1, mesh.cp_rank, -1) if reverse else range(mesh.cp_rank)
        if accept:
            for j in order:
                state = _advance(summaries[j, ..., :K], summaries[j, ..., K:], state, reverse)
        return torch.zeros_like(h) if state is None else state.clone()

    return PendingState(finish)


# Agreement between ranks, on the host.


def exchange_vector(values: Sequence[int] | Tensor, mesh: CpMesh) -> list[list[int]]:
    """Every rank's vector of integers, in rank order, with one message and one read by the host.

    Args:
        values: int64, the same count on all ranks. A CUDA tensor is gathered behind the work queued on its stream; a
            list does not wait for that work.
        mesh: the group.

    Returns:
        `[cp_size][len(values)]`.
    """
    if mesh.cp_size == 1:
        return [values.tolist() if isinstance(values, Tensor) else [int(v) for v in values]]
    device = mesh.control_device
    if isinstance(values, Tensor):
        local = values.to(torch.int64)
        if device.type == "cpu" or local.device.type == "cuda":
            return _send_all_gather(local.to(device), mesh).wait().tolist()
        return exchange_vector(local.tolist(), mesh)
    local = torch.tensor([int(v) for v in values], dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return _send_all_gather(local, mesh).wait().tolist()
    side = _side_stream(device)
    with torch.cuda.stream(side):
        gathered = _send_all_gather(local.pin_memory().to(device, non_blocking=True), mesh).wait()
        host = torch.empty(gathered.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        host.copy_(gathered, non_blocking=True)
        read = torch.cuda.Event()
        read.record(side)
    read.synchronize()
    return host.tolist()


def exchange_objects(value: Any, mesh: CpMesh) -> list[Any]:
    """Every rank's picklable object, in rank order: error texts, never in a training step."""
    if mesh.cp_size == 1:
        return [value]
    _check_abandoned()
    gathered: list[Any] = [None] * mesh.cp_size
    dist.all_gather_object(gathered, value, group=mesh.group)
    return gathered
