"""Launches: what the kernels are told, in the layout of plan.cuh, and the choices that a launch leaves open.

A launch gathers blocks of other ranks into the first operand (or takes it as it is), multiplies, and writes the product
to segments wherever they lie. All of `a2a_gemm`, `gemm_a2a` and `batched_pv_a2a` is this one kernel.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import build

MAX_RANKS, MAX_SECTIONS, MAX_GROUPS = 8, 3, 31
MAX_SEGMENTS = MAX_BLOCKS = 3 * MAX_RANKS
CHUNK_BYTES = 1024  # of a row, that the copies move at a time
# What one CTA of an H200 does: bytes copied beside a product, operations of a product by the bytes of an element, and
# what a tile costs beyond them.
COPY_BYTES_PER_NS = 27.0
FLOPS_PER_NS = {1: 10100.0, 2: 5600.0}
TILE_NS = 1000.0

_u64, _i64, _i32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32


class MatrixSpec(ctypes.Structure):
    _fields_ = [
        *((name, _u64) for name in ["address"]),
        *((name, _i64) for name in ["row_stride", "batch_stride"]),
        *((name, _i32) for name in ["columns", "rows", "batches", "unused"]),
    ]


class BlockSpec(ctypes.Structure):
    _fields_ = [("source", MatrixSpec), ("column", _i32), ("row", _i32)]


class SegmentSpec(ctypes.Structure):
    _fields_ = [("target", MatrixSpec), *((name, _i32) for name in ["column", "row", "section", "unused"])]


class Spec(ctypes.Structure):
    _fields_ = [
        ("a", MatrixSpec),
        ("b", MatrixSpec * MAX_SECTIONS),
        ("segments", SegmentSpec * MAX_SEGMENTS),
        ("blocks", BlockSpec * MAX_BLOCKS),
        ("group_begin", _i32 * (MAX_GROUPS + 1)),
        *(
            (name, _i32)
            for name in [
                *("sections", "segment_count", "block_count", "group_count", "b_batch_divisor"),
                *("own_block", "first_group"),
                *("window", "copy_ctas", "ctas", "tail_pairs"),
            ]
        ),
        *(
            (name, _u64)
            for name in [
                *("epoch", "flags", "all_copied", "copied_count", "report", "scale_a"),
            ]
        ),
        ("scale_b", _u64 * MAX_SECTIONS),
        ("timeout_ns", _u64),
        ("test_mode", _i32),
    ]


class Report(ctypes.Structure):
    _fields_ = [(name, _u64) for name in ["kind", "rank", "place", "expected", "seen"]]


@dataclass(frozen=True)
class Matrix:
    """`[batches, rows, columns]` in device memory, contiguous columns.

    Args:
        address: of the first number; a multiple of 16 bytes.
        row_stride, batch_stride: bytes; multiples of 16.
    """

    address: int
    columns: int
    rows: int
    batches: int
    row_stride: int
    batch_stride: int

    @classmethod
    def of(cls, x: Tensor, what: str = "operand") -> Matrix:
        """A tensor of two or three dimensions.

        Raises:
            ValueError: columns that are not contiguous, or an address or stride that the copy engine cannot take.
        """
        if x.dim() == 2:
            x = x.unsqueeze(0)
        size = x.element_size()
        if x.dim() != 3 or (x.shape[2] > 1 and x.stride(2) != 1):
            raise ValueError(
                f"{what} of shape {tuple(x.shape)}, strides {x.stride()} must be [batch, rows, columns] "
                f"with contiguous columns"
            )
        strides = [x.stride(i) * size if x.shape[i] > 1 else 0 for i in (1, 0)]
        if x.data_ptr() % 16 or any(stride % 16 for stride in strides):
            raise ValueError(
                f"{what} of shape {tuple(x.shape)}, strides {x.stride()} must start at and step by multiples of 16 "
                f"bytes: make the last dimension a multiple of {16 // size}"
            )
        row_stride = strides[0] or -(-x.shape[2] * size // 16) * 16
        return cls(x.data_ptr(), x.shape[2], x.shape[1], x.shape[0], row_stride, strides[1])

    def part(self, column: int, row: int, columns: int, rows: int, element_size: int) -> Matrix:
        """The sub-matrix from (row, column) on."""
        address = self.address + row * self.row_stride + column * element_size
        return replace(self, address=address, columns=columns, rows=rows)

    def spec(self) -> MatrixSpec:
        return MatrixSpec(self.address, self.row_stride, self.batch_stride, self.columns, self.rows, self.batches, 0)


@dataclass(frozen=True)
class Block:
    """Part of the gathered operand, from (row, column) on, that `source` holds."""

    source: Matrix
    column: int = 0
    row: int = 0


@dataclass(frozen=True)
class Segment:
    """Where the part of the product from (row, column) on goes. Columns count over all sections."""

    target: Matrix
    column: int = 0
    row: int = 0
    section: int = 0


@dataclass(frozen=True)
class Shape:
    """Of a variant's tiles, as its library says."""

    tile_m: int
    tile_n: int
    tile_k: int
    cluster: int
    stages: int
    shared_bytes: int
    threads: int
    element_bytes: int


@dataclass(frozen=True)
class Tuning:
    """What a launch leaves open; zero chooses.

    Args:
        copy_ctas: CTAs that copy before they multiply, a multiple of the cluster size.
        tail_pairs: clusters' worth of tiles left to them; -1 chooses.
        window: row tiles, in clusters, that are copied and multiplied together.
        ctas: all CTAs; those that the device takes by default.
    """

    copy_ctas: int = 0
    tail_pairs: int = -1
    window: int = 0
    ctas: int = 0


CHOOSE = Tuning()

# Variants that this process has described a launch of, and so has loaded onto the device.
_described: set[str] = set()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def library(variant: str) -> ctypes.CDLL:
    """A variant's library with its functions typed, checked to agree with this module."""
    loaded = build.load(variant)
    if not hasattr(loaded, "checked"):
        loaded.hf_cp_create.argtypes = [ctypes.POINTER(Spec), ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p, _i32]
        loaded.hf_cp_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        loaded.hf_cp_destroy.argtypes = [ctypes.c_void_p]
        loaded.hf_cp_destroy.restype = None
        loaded.hf_cp_error.argtypes = [_i32]
        loaded.hf_cp_error.restype = ctypes.c_char_p
        assert loaded.hf_cp_spec_bytes() == ctypes.sizeof(Spec), "plan.py and plan.cuh disagree"
        loaded.checked = True  # pyright: ignore[reportAttributeAccessIssue]
    return loaded


def use_device(device: int) -> None:
    """Make a device's context current in this thread, which launches need: threads of autograd may have none."""
    loaded = build.load("ranks")
    code = loaded.hf_cp_use_device(device)
    if code:
        loaded.hf_cp_error.restype = ctypes.c_char_p
        raise RuntimeError(f"device {device} could not be made current: {loaded.hf_cp_error(code).decode()}")


def shape_of(variant: str) -> Shape:
    values = (_i32 * 8)()
    library(variant).hf_cp_variant(values)
    return Shape(*values)


def group_bounds(cuts: Sequence[int], element_bytes: int) -> list[int]:
    """First column of each group that the copies publish, and the number of columns last.

    Args:
        cuts: ascending columns where the source changes, from 0 to the number of columns.

    Returns:
        At most 31 groups, each within one source; all but a source's last a multiple of what is moved at a time.
    """
    unit = CHUNK_BYTES // element_bytes
    columns = cuts[-1]
    size = unit
    while True:
        bounds = [column for start, end in itertools.pairwise(cuts) for column in range(start, end, size)]
        if len(bounds) <= MAX_GROUPS:
            return [*bounds, columns]
        size += unit


def split_work(pairs: int, clusters: int, copy_clusters: int, copy_rounds: float) -> tuple[float, int]:
    """How long a launch takes, in tiles one after another, and the tiles that the copying clusters take, in pairs.

    Copying clusters multiply when their copies are done.

    Args:
        pairs: of the whole product.
        clusters: of the grid.
        copy_rounds: time of the copies, in units of the time of a tile.
    """
    others = clusters - copy_clusters
    most = ceil_div(pairs, others)
    # The launch ends with a tile of either kind of cluster.
    ends = sorted({*map(float, range(1, most + 1)), *(copy_rounds + late for late in range(1, most + 1))})
    for end in ends:
        late = max(0, int(end - copy_rounds + 1e-9))
        if others * int(end) + copy_clusters * late >= pairs:
            return end, max(0, pairs - others * int(end))
    raise AssertionError("the other clusters alone end in time")


@dataclass(frozen=True)
class Schedule:
    """How a launch divides its work, and how long that should take."""

    ns: float
    copy_ctas: int
    tail_pairs: int


def schedule(
    shape: Shape, rows: int, columns: Sequence[int], batches: int, k: int, ctas: int, copied: bool, copy_ctas: int = 0
) -> Schedule:
    """The best division of a product among CTAs, by the rates of `COPY_BYTES_PER_NS` and `FLOPS_PER_NS`.

    Args:
        rows, columns, batches, k: of the product, `columns` of each section.
        ctas: of the grid.
        copied: whether the first operand is gathered.
        copy_ctas: that many; 0 chooses up to 16: of those that end first, the fewest that copy in a quarter of it,
            for else many products wait.
    """
    clusters = ctas // shape.cluster
    pairs = ceil_div(ceil_div(rows, shape.tile_m), shape.cluster) * batches * sum(
        ceil_div(n, shape.tile_n) for n in columns
    )  # fmt: skip
    tile = TILE_NS + 2 * shape.tile_m * shape.tile_n * k / FLOPS_PER_NS[shape.element_bytes]
    if not copied:
        return Schedule(ceil_div(pairs, clusters) * tile, 0, 0)
    one_copies = batches * rows * k * shape.element_bytes / COPY_BYTES_PER_NS
    most = max(1, min(16 // shape.cluster, clusters - 1))
    choices = [copy_ctas // shape.cluster] if copy_ctas else range(1, most + 1)
    best, best_rank = Schedule(float("inf"), 0, 0), (float("inf"), True)
    for copy_clusters in choices:
        count = copy_clusters * shape.cluster
        copies = one_copies / count
        rounds, tail = split_work(pairs, clusters, copy_clusters, copies / tile)
        # The last rows that arrive have a tile to go.
        ns = max(rounds * tile, copies + tile)
        # Until copies are quick enough, more CTAs are better.
        rank = (ns, copies > ns / 4)
        if rank < best_rank or (rank == best_rank and rank[1]):
            best, best_rank = Schedule(ns, count, tail), rank
    return best


@dataclass
class Plan:
    """One launch, described once and run many times. The memory that it was described with has to outlive its runs."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p

    def run(self, stream: int) -> None:
        """Enqueue on a CUDA stream.

        Raises:
            RuntimeError: the launch was refused.
        """
        code = self.library.hf_cp_run(self.handle, ctypes.c_void_p(stream))
        if code:
            raise RuntimeError(f"the fused kernel could not be launched: {self.library.hf_cp_error(code).decode()}")

    def __del__(self) -> None:
        if self.handle:
            self.library.hf_cp_destroy(self.handle)


class PlanCache:
    """Launches by what they were described from: a training step repeats its shapes, and mostly its addresses.

    Args:
        limit: launches kept; the one unused for longest goes first.
    """

    def __init__(self, limit: int = 512) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._limit = limit

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The launch of `key`, made if it is new. The key has to hold everything that `make` reads."""
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = make()
            if len(self._plans) >= self._limit:
                del self._plans[next(iter(self._plans))]
        self._plans[key] = plan
        return plan


@dataclass(frozen=True)
class Flags:
    """Device memory of one launch's protocol: addresses of the epoch, `count` flags, the flag for all, its counter.

    `report` is host memory that the device writes when it has waited longer than `timeout_ns`.
    """

    epoch: int
    flags: int
    all_copied: int
    copied_count: int
    report: int
    count: int
    timeout_ns: int = 20_000_000_000


def make_plan(
    variant: str,
    a: Matrix,
    b: Sequence[Matrix],
    segments: Sequence[Segment],
    *,
    blocks: Sequence[Block] = (),
    flags: Flags | None = None,
    cuts: Sequence[int] = (),
    first_column: int = 0,
    own_block: int = -1,
    scales: tuple[int, Sequence[int]] = (0, ()),
    tuning: Tuning = CHOOSE,
    sm_count: int = 132,
    device: int | None = None,
    test_mode: int = 0,
) -> Plan:
    """Describe a launch.

    Args:
        variant: a name of `build.VARIANTS`.
        a: `[L, M, K]`; with blocks, the buffer that they are gathered in.
        b: up to 3 row sections `[Lb, N_i, K]` (`[Lb, K, N_i]` for variants with K rows), Lb dividing L.
        segments: where the product's parts go, at most 24, sorted by section.
        blocks: where the parts of `a` come from, at most 24.
        flags: needed with blocks.
        cuts: columns of `a` where the source changes, 0 and K included.
        first_column: where copies and products start.
        own_block: the block that lies on this device. Products read its columns where they lie, if they are whole K
            steps of all rows, and so start before anything has been copied.
        scales: addresses of fp32 scalars multiplied into the product, one for `a` and one for each of `b`, or 0.
        device: index of the GPU; the current one if None.

    Raises:
        ValueError: more parts than a launch takes, or what the library says about the sizes.
        RuntimeError: the variant's first launch, while a CUDA graph is captured.
    """
    if torch.cuda.is_current_stream_capturing() and variant not in _described:
        raise RuntimeError(
            f"the first launch of {variant} cannot be captured in a CUDA graph, which does not let it be loaded: run "
            f"the same call once before"
        )
    if not 0 < len(b) <= MAX_SECTIONS or len(segments) > MAX_SEGMENTS or len(blocks) > MAX_BLOCKS:
        raise ValueError(
            f"{len(b)} operands, {len(segments)} segments and {len(blocks)} blocks must be at most {MAX_SECTIONS}, "
            f"{MAX_SEGMENTS} and {MAX_BLOCKS}: use fewer ranks or operands"
        )
    use_device(torch.cuda.current_device() if device is None else device)
    loaded, shape = library(variant), shape_of(variant)
    spec = Spec(a=a.spec(), sections=len(b), segment_count=len(segments), block_count=len(blocks))
    for i, matrix in enumerate(b):
        spec.b[i] = matrix.spec()
    for i, segment in enumerate(segments):
        spec.segments[i] = SegmentSpec(segment.target.spec(), segment.column, segment.row, segment.section, 0)
    for i, block in enumerate(blocks):
        spec.blocks[i] = BlockSpec(block.source.spec(), block.column, block.row)
    spec.b_batch_divisor = a.batches // b[0].batches

    ctas = tuning.ctas or sm_count // shape.cluster * shape.cluster
    rows_are_k = bool(build.VARIANTS[variant][1]["HF_CP_ROWS_ARE_K"])
    columns = [matrix.columns if rows_are_k else matrix.rows for matrix in b]
    chosen = schedule(shape, a.rows, columns, a.batches, a.columns, ctas, bool(blocks), tuning.copy_ctas)
    spec.ctas, spec.copy_ctas, spec.tail_pairs = ctas, chosen.copy_ctas, chosen.tail_pairs
    if blocks:
        spec.copy_ctas = tuning.copy_ctas or chosen.copy_ctas
        spec.tail_pairs = chosen.tail_pairs if tuning.tail_pairs < 0 else tuning.tail_pairs
    spec.window = tuning.window or 8 // shape.cluster
    if blocks:
        assert flags is not None
        bounds = group_bounds(cuts or [0, a.columns], shape.element_bytes)
        for i, column in enumerate(bounds):
            spec.group_begin[i] = column
        spec.group_count = len(bounds) - 1
        needed = a.batches * ceil_div(a.rows, shape.tile_m) * spec.group_count
        if needed > flags.count:
            raise ValueError(f"the gathered operand needs {needed} flags, the workspace has flag_count={flags.count}")
        spec.first_group = next(i for i in range(spec.group_count) if bounds[i + 1] > first_column)
        spec.epoch, spec.flags = flags.epoch, flags.flags
        spec.all_copied, spec.copied_count = flags.all_copied, flags.copied_count
    if flags is not None:
        spec.report, spec.timeout_ns = flags.report, flags.timeout_ns
    spec.scale_a = scales[0]
    for i, address in enumerate(scales[1]):
        spec.scale_b[i] = address
    spec.own_block = own_block
    spec.test_mode = test_mode

    handle = ctypes.c_void_p()
    message = ctypes.create_string_buffer(512)
    if loaded.hf_cp_create(ctypes.byref(spec), ctypes.byref(handle), message, len(message)):
        raise ValueError(f"{variant}: {message.value.decode()}")
    _described.add(variant)
    return Plan(loaded, handle)


def choose_variant(
    variants: Sequence[str], rows: int, columns: Sequence[int], batches: int, k: int, sm_count: int, copied: bool
) -> str:
    """Of variants that differ in their tiles, the one that should end first; arguments as for `schedule`."""

    def ns(variant: str) -> float:
        shape = shape_of(variant)
        return schedule(shape, rows, columns, batches, k, sm_count // shape.cluster * shape.cluster, copied).ns

    return min(variants, key=ns)


def stream_of(device: torch.device | int | None = None) -> int:
    """The current CUDA stream's handle."""
    return torch.cuda.current_stream(device).cuda_stream
