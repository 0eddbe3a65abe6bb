"""The operators on Hopper: exchange and product in one grid."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .handles import register_backend
from .plan import CHOOSE, Block, Matrix, Plan, PlanCache, Segment, Tuning, choose_variant, make_plan, stream_of
from .reference import TorchBackend
from .routes import Route, copies, heads_per_rank, repeat_heads
from .workspace import Workspace

Scales = tuple[Tensor, Sequence[Tensor]]

# Libraries that the projections of a model use.
VARIANTS = ("ranks", "bf16", "bf16_wide", "bf16_narrow", "bf16_rows_k")


class FusedBackend:
    """BF16 and FP8 operators on a workspace's group; see `TorchBackend` for what they compute.

    FP8 operands (e4m3, the weight `[N, K]` with contiguous K) come with `scales`, fp32 scalars on the device: one for
    the exchanged operand, the same at all ranks since one sum spans what all of them hold, and one for each weight.
    Results are BF16: `scale_a * scale_b * sum`, with the tensor cores' fast accumulation.

    Operands that are pulled are first copied into the workspace's buffer, unless they were written there: see
    `pull_buffer`. What was pushed lies there and is copied out.

    Args:
        workspace: buffers and group.
        tuning: what a launch leaves open.
    """

    def __init__(self, workspace: Workspace, *, tuning: Tuning = CHOOSE) -> None:
        self.workspace = workspace
        self.world_size = workspace.world_size
        self.tuning = tuning
        self.test_mode = 0
        self.plans = PlanCache()
        self.handle = register_backend(self)
        self._torch = TorchBackend(workspace.group)

    def pull_buffer(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Where the next `a2a_gemm` of one tensor takes it from: one that is written here need not be copied.

        Valid until that call; no other operator may be called on the workspace in between.

        Raises:
            RuntimeError: in a CUDA graph, or on a workspace whose calls have been captured in one: what is written here
                would come before the meeting that such a call begins with.
        """
        if torch.cuda.is_current_stream_capturing() or self.workspace.captured:
            raise RuntimeError(
                "pull_buffer cannot be used in a CUDA graph, nor after one has captured calls on the workspace: pass "
                "a2a_gemm an operand of your own"
            )
        local, _ = self.workspace.peek_half(math.prod(shape) * dtype.itemsize)
        return local.view(dtype).view(shape)

    def exchange(self, tensors: Sequence[Tensor], heads: Sequence[int], route: Route) -> list[Tensor]:
        """Without a product there is nothing to hide the exchange behind: one all-to-all.

        Raises:
            RuntimeError: ranks that live in one process, which have no group.
        """
        if self._torch.world_size != self.world_size:
            raise RuntimeError(f"the {self.world_size} ranks of one process have no group to exchange through")
        return self._torch.exchange(tensors, heads, route)

    def _check(self, tensors: Sequence[Tensor], scales: Scales | None) -> tuple[int, list[int]]:
        """Raise for what the kernels cannot take; the scales' addresses."""
        self.workspace.check()
        wanted = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        for x in tensors:
            if x.dtype != wanted or x.device != self.workspace.device:
                with_scales = "without" if scales is None else "with"
                raise ValueError(
                    f"operand of dtype {x.dtype} on {x.device} must be {wanted} on {self.workspace.device} "
                    f"{with_scales} scales"
                )
        if scales is None:
            return 0, []
        for scale in (scales[0], *scales[1]):
            if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != self.workspace.device:
                raise ValueError(
                    f"scale of dtype {scale.dtype}, shape {tuple(scale.shape)} on {scale.device} must be one "
                    f"torch.float32 on {self.workspace.device}"
                )
        return scales[0].data_ptr(), [scale.data_ptr() for scale in scales[1]]

    def a2a_gemm(
        self,
        tensors: Sequence[Tensor],
        matrices: Sequence[Tensor],
        heads: Sequence[int],
        route: Route,
        scales: Scales | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Pull what other ranks hold while the product of what is there runs. One scale for all matrices."""
        addresses_of_scales = self._check([*tensors, *matrices], scales)
        for x, count in zip(tensors, heads, strict=True):
            check_parts(count, x.shape[3], self.world_size, x.element_size())
        W, r, ws = self.world_size, self.workspace.rank, self.workspace
        B, tokens = tensors[0].shape[:2]
        offsets = pull_offsets(tensors)
        local, addresses = ws.next_half(offsets[-1])
        for x, offset in zip(tensors, offsets, strict=False):
            here = local[offset : offset + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
            if here.data_ptr() != x.data_ptr():
                here.copy_(x)
            elif not x.is_contiguous():
                raise ValueError(
                    f"operand of shape {tuple(x.shape)}, strides {x.stride()} lies in the workspace's buffer: it must "
                    f"be contiguous, as pull_buffer gives it"
                )
        if route == "to_sequence":
            matrices = [
                m
                if copies(count, W) == 1
                else repeat_heads(m.unflatten(0, (count, -1)), 0, copies(count, W)).flatten(0, 1)
                for m, count in zip(matrices, heads, strict=True)
            ]
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(tuple(matrices))
        rows = tokens // W if route == "to_sequence" else tokens * W
        gathered = tensors[0].new_empty(B, rows, matrix.shape[0])
        y = tensors[0].new_empty(B, rows, matrix.shape[1], dtype=torch.bfloat16)

        def make() -> Plan:
            blocks, cuts = pull_blocks(tensors, heads, route, r, addresses)
            variants, operand = _operand(matrix)
            return make_plan(
                choose_variant(variants, rows, [matrix.shape[1]], B, matrix.shape[0], ws.sm_count, copied=True),
                Matrix.of(gathered),
                [operand],
                [Segment(Matrix.of(y, "output"))],
                blocks=blocks,
                flags=ws.flags,
                cuts=cuts,
                first_column=cuts[r] if route == "to_sequence" else 0,
                own_block=r if route == "to_sequence" else -1,
                scales=addresses_of_scales,
                tuning=self.tuning,
                sm_count=ws.sm_count,
                device=ws.device.index,
                test_mode=self.test_mode,
            )

        plan = self.plans.get(
            (
                "a2a_gemm", route, tuple(heads), addresses[0], *(tuple(x.shape) for x in tensors),
                *map(_identity, (matrix, gathered, y)), *addresses_of_scales[1], addresses_of_scales[0],
                self.tuning, self.test_mode,
            ),
            make,
        )  # fmt: skip
        ws.meet()
        plan.run(stream_of(ws.device))
        return y, gathered

    def gemm_a2a(
        self,
        x: Tensor,
        matrices: Sequence[Tensor],
        heads: Sequence[int],
        head_dim: int,
        route: Route,
        scales: Scales | None = None,
    ) -> list[Tensor]:
        """Store every tile of the product where it belongs, at whichever rank that is."""
        addresses_of_scales = self._check([x, *matrices], scales)
        for count in heads:
            check_parts(count, head_dim, self.world_size, 2)
        W, r, ws = self.world_size, self.workspace.rank, self.workspace
        B, tokens = x.shape[:2]
        received = tokens * W if route == "to_heads" else tokens // W
        here = [heads_per_rank(count, W) * (1 if route == "to_heads" else W) for count in heads]
        sizes = [B * received * count * head_dim * 2 for count in here]
        local, addresses = ws.next_half(sum(sizes))
        rows = x if x.stride(2) == 1 else x.contiguous()

        def make() -> Plan:
            operands = [_operand(matrix) for matrix in matrices]
            if len({variants for variants, _ in operands}) > 1:
                raise ValueError("weights must all be transposed or none: their strides differ")
            columns = [matrix.shape[1] for matrix in matrices]
            return make_plan(
                choose_variant(operands[0][0], tokens, columns, B, x.shape[2], ws.sm_count, copied=False),
                Matrix.of(rows, "x"),
                [operand for _, operand in operands],
                push_segments((B, tokens), columns, heads, head_dim, route, r, addresses),
                scales=addresses_of_scales,
                tuning=self.tuning,
                sm_count=ws.sm_count,
                device=ws.device.index,
                test_mode=self.test_mode,
            )

        plan = self.plans.get(
            (
                "gemm_a2a", route, tuple(heads), head_dim, addresses[0], *map(_identity, (rows, *matrices)),
                *addresses_of_scales[1], addresses_of_scales[0], self.tuning, self.test_mode,
            ),
            make,
        )  # fmt: skip
        plan.run(stream_of(ws.device))
        ws.meet()
        return [
            part.view(torch.bfloat16).view(B, received, count, head_dim).clone()
            for part, count in zip(local.split(sizes), here, strict=True)
        ]

    def batched_pv_a2a(self, p: Tensor, v: Tensor) -> Tensor:
        """One launch an entry of the batch, one meeting for all."""
        self._check([p, v], None)
        check_parts(p.shape[1] * self.world_size, v.shape[3], self.world_size, 2)
        W, r, ws = self.world_size, self.workspace.rank, self.workspace
        B, h, S, _ = p.shape
        D, rows = v.shape[3], S // self.world_size
        size = B * rows * W * h * D * 2
        local, addresses = ws.next_half(size)
        row_stride = W * h * D * 2
        for b in range(B):

            def make(b: int = b) -> Plan:
                start = b * rows * row_stride + r * h * D * 2
                return make_plan(
                    "bf16_batched",
                    Matrix.of(p[b], "p"),
                    [Matrix.of(v[b].transpose(0, 1), "v")],
                    [
                        Segment(Matrix(address + start, D, rows, h, row_stride, D * 2), 0, peer * rows)
                        for peer, address in enumerate(addresses)
                    ],
                    tuning=self.tuning,
                    sm_count=ws.sm_count,
                    device=ws.device.index,
                    test_mode=self.test_mode,
                )

            key = ("batched_pv_a2a", b, addresses[0], _identity(p), _identity(v), self.tuning, self.test_mode)
            self.plans.get(key, make).run(stream_of(ws.device))
        ws.meet()
        return local.view(p.dtype).view(B, rows, W * h, D).clone()


def check_parts(heads: int, head_dim: int, world_size: int, element_bytes: int) -> None:
    """Raise ValueError unless the copy engine can address every rank's part of an operand: on all ranks or none."""
    here = heads_per_rank(heads, world_size)
    if here * head_dim * element_bytes % 16:
        raise ValueError(
            f"a rank's part of an operand, {here} heads of {head_dim} numbers of {element_bytes} bytes, must be a "
            f"multiple of 16 bytes: make the head dim a multiple of {16 // element_bytes}"
        )


def pull_offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each operand starts in a half, in bytes, and, last, how long they are together."""
    offsets = [0]
    for x in tensors:
        offsets.append(offsets[-1] + -(-x.numel() * x.element_size() // 16) * 16)
    return offsets


def pull_blocks(
    tensors: Sequence[Tensor], heads: Sequence[int], route: Route, rank: int, addresses: Sequence[int]
) -> tuple[list[Block], list[int]]:
    """Which part of every rank's half is which part of the gathered operand, and the columns where the rank changes.

    The first blocks are the ranks' parts of the first operand, in rank order.
    """
    W, e = len(addresses), tensors[0].element_size()
    B, tokens = tensors[0].shape[:2]
    blocks, cuts = [], [0]
    for x, offset, count in zip(tensors, pull_offsets(tensors), heads, strict=False):
        D, width = x.shape[3], x.shape[2] * x.shape[3]
        for peer, address in enumerate(addresses):
            there = Matrix(address + offset, width, tokens, B, width * e, tokens * width * e)
            if route == "to_sequence":
                rows = tokens // W
                blocks.append(Block(there.part(0, rank * rows, width, rows, e), cuts[-1]))
                cuts.append(cuts[-1] + width)
            else:
                columns = heads_per_rank(count, W) * D
                part = there.part(rank * count // W * D, 0, columns, tokens, e)
                blocks.append(Block(part, cuts[-1], peer * tokens))
        if route == "to_heads":
            cuts.append(cuts[-1] + heads_per_rank(count, W) * D)
    return blocks, cuts


def push_segments(
    shape: tuple[int, int],
    columns: Sequence[int],
    heads: Sequence[int],
    head_dim: int,
    route: Route,
    rank: int,
    addresses: Sequence[int],
) -> list[Segment]:
    """Which part of the product goes where in every rank's half, where results lie one operand after another.

    Args:
        shape: B and the tokens of x.
        columns: of each operand's product.
    """
    W = len(addresses)
    B, tokens = shape
    received = tokens * W if route == "to_heads" else tokens // W
    segments = []
    offset = first = 0
    for section, (count, product_columns) in enumerate(zip(heads, columns, strict=True)):
        width = heads_per_rank(count, W) * head_dim
        row = width if route == "to_heads" else width * W
        for peer, address in enumerate(addresses):
            there = Matrix(address + offset, row, received, B, row * 2, received * row * 2)
            if route == "to_heads":
                target = there.part(0, rank * tokens, width, tokens, 2)
                segments.append(Segment(target, first + peer * count // W * head_dim, 0, section))
            else:
                target = there.part(rank * width, 0, width, received, 2)
                segments.append(Segment(target, first, peer * received, section))
        offset += B * received * row * 2
        first += product_columns
    return segments


def _identity(x: Tensor) -> tuple[Hashable, ...]:
    """What a launch reads of a tensor."""
    return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype


def _operand(matrix: Tensor) -> tuple[tuple[str, ...], Matrix]:
    """The variants that read a matrix `[K, N]` as it lies, and how they are told where."""
    if matrix.stride(0) == 1:
        names = ("bf16", "bf16_wide", "bf16_narrow") if matrix.dtype == torch.bfloat16 else ("fp8", "fp8_wide")
        return names, Matrix.of(matrix.t(), "weight")
    if matrix.dtype != torch.bfloat16:
        raise ValueError(
            f"weight of dtype {matrix.dtype} must be [N, K] with contiguous K, as the tensor cores read FP8"
        )
    return ("bf16_rows_k",), Matrix.of(matrix, "weight")
