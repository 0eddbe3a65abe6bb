"""The order of copies and tiles, and the protocol of flags and epochs, checked over every interleaving of small cases.

The order is the kernel's own: `order.cuh` is compiled for the host. The steps around it are modelled here.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hf_cp.kernels.a2a_gemm import build, plan

KERNELS = Path(plan.__file__).resolve().parent
SHIM = """
#include "order.cuh"
using namespace hf_cp;
extern "C" int order_bytes() { return sizeof(Order); }
extern "C" int order_item(Order const* o, int index, Item* item) { return item_at(*o, index, *item); }
extern "C" void order_tile(Order const* o, int pair, int rank, Tile* tile) { *tile = tile_at(*o, pair, rank); }
extern "C" void order_walk(Order const* o, int cta, Walk* walk) { *walk = walk_of(*o, cta); }
extern "C" int order_columns_of_a_load(int share, int rows_are_k) { return columns_of_a_load(share, rows_are_k); }
// For every step: the K tile, then how many groups it waits for, then those.
extern "C" int order_steps(Order const* o, int* out) {
  int* const begin = out;
  Steps steps = first_step(*o);
  for (int i = 0; i < o->k_tiles; ++i, next_step(*o, steps)) {
    *out++ = steps.k_tile;
    int* const count = out++;
    *count = 0;
    for (int group = next_group(*o, steps); group >= 0; group = next_group(*o, steps)) {
      *out++ = group;
      ++*count;
    }
  }
  return out - begin;
}
"""


class COrder(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ["tiles_m", "tiles_n", "batches", "cluster", "window"]),
        *((name, ctypes.c_int32) for name in ["copy_ctas", "ctas", "main_pairs", "group_count", "first_group"]),
        ("group_begin", ctypes.c_int32 * (plan.MAX_GROUPS + 1)),
        *((name, ctypes.c_int32) for name in ["k_tiles", "first_k_tile", "tile_k"]),
    ]


@dataclass(frozen=True)
class Case:
    """Sizes of one launch; `cuts` are the first columns of its groups and, last, the number of columns."""

    tiles_m: int
    tiles_n: int
    batches: int
    cluster: int
    window: int
    copy_ctas: int
    ctas: int
    tail_pairs: int
    cuts: tuple[int, ...]
    first_group: int
    tile_k: int = 4

    @property
    def pairs(self) -> int:
        return -(-self.tiles_m // self.cluster) * self.tiles_n * self.batches

    @property
    def k_tiles(self) -> int:
        return -(-self.cuts[-1] // self.tile_k)

    def c(self) -> COrder:
        order = COrder(
            self.tiles_m, self.tiles_n, self.batches, self.cluster, self.window, self.copy_ctas, self.ctas,
            self.pairs - min(self.tail_pairs, self.pairs), len(self.cuts) - 1, self.first_group,
        )  # fmt: skip
        for i, column in enumerate(self.cuts):
            order.group_begin[i] = column
        order.k_tiles, order.tile_k = self.k_tiles, self.tile_k
        order.first_k_tile = -(-self.cuts[self.first_group] // self.tile_k) % self.k_tiles
        return order


class Order:
    """The kernel's order for one case: which items a CTA copies, which tiles it multiplies, what each step needs."""

    def __init__(self, library: ctypes.CDLL, case: Case) -> None:
        self.case = case
        order = ctypes.byref(case.c())
        three = ctypes.c_int32 * 3
        out = three()
        self.items: list[tuple[int, int, int]] = []
        while library.order_item(order, len(self.items), out):
            self.items.append((out[0], out[1], out[2]))
        self.tiles: list[list[tuple[int, int, int]]] = []
        for cta in range(case.ctas):
            library.order_walk(order, cta, out)
            pairs = range(out[0], out[2], out[1])
            tiles = []
            for pair in pairs:
                library.order_tile(order, pair, cta % case.cluster, out)
                tiles.append((out[0], out[1], out[2]))
            self.tiles.append(tiles)
        raw = (ctypes.c_int32 * (case.k_tiles * (plan.MAX_GROUPS + 2)))()
        count = library.order_steps(order, raw)
        self.steps: list[tuple[int, tuple[int, ...]]] = []
        at = 0
        while at < count:
            self.steps.append((raw[at], tuple(raw[at + 2 : at + 2 + raw[at + 1]])))
            at += 2 + raw[at + 1]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("order")
    (folder / "shim.cpp").write_text(SHIM)
    output = folder / "order.so"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-I", KERNELS, folder / "shim.cpp", "-o", output],
        check=True,
    )
    loaded = ctypes.CDLL(str(output))
    assert loaded.order_bytes() == ctypes.sizeof(COrder)
    return loaded


def cases() -> Iterator[Case]:
    for tiles_m, tiles_n, batches, cluster, window in itertools.product([1, 3, 4], [1, 3], [1, 2], [1, 2], [1, 2, 5]):
        for cuts in [(0, 8), (0, 4, 12, 16), (0, 3, 10, 11, 18), (0, 6, 9)]:
            for first_group in {0, len(cuts) - 2}:
                for copies, tail in [(1, 0), (2, 1), (2, 7)]:
                    shape = (tiles_m, tiles_n, batches, cluster, window)
                    yield Case(*shape, copies * cluster, (copies + 2) * cluster, tail, cuts, first_group)


def test_every_item_tile_and_step_comes_once(library: ctypes.CDLL) -> None:
    for case in cases():
        order = Order(library, case)
        groups = len(case.cuts) - 1
        everything = set(itertools.product(range(case.batches), range(case.tiles_m), range(groups)))
        assert len(order.items) == len(everything), case
        assert set(order.items) == everything, case
        rows = -(-case.tiles_m // case.cluster) * case.cluster
        tiles = [tile for cta in order.tiles for tile in cta]
        assert sorted(tiles) == sorted(itertools.product(range(case.batches), range(rows), range(case.tiles_n))), case
        # CTAs of a cluster share the column tile and take neighbouring row tiles, at every step of the walk.
        for cta in range(0, case.ctas, case.cluster):
            for r in range(case.cluster):
                shifted = [(batch, row + r, column) for batch, row, column in order.tiles[cta]]
                assert order.tiles[cta + r] == shifted, case
        assert sorted(k for k, _ in order.steps) == list(range(case.k_tiles)), case
        there: set[int] = set()
        for k, waited in order.steps:
            there.update(waited)
            start, end = k * case.tile_k, min((k + 1) * case.tile_k, case.cuts[-1])
            needed = {g for g in range(groups) if case.cuts[g] < end and case.cuts[g + 1] > start}
            assert needed <= there, (case, k)


def test_first_steps_need_the_first_group_alone(library: ctypes.CDLL) -> None:
    """Products start when one group is there, also where groups are no multiple of a step."""
    for cuts, first_group in [((0, 8, 16), 1), ((0, 6, 14, 24), 1), ((0, 6, 14, 24), 0)]:
        order = Order(library, Case(2, 1, 1, 1, 1, 1, 3, 0, cuts, first_group))
        assert order.items[0][2] == first_group
        assert order.steps[0][1] == (first_group,)


def test_every_tile_s_second_operand_is_loaded_in_boxes_the_copy_engine_takes(library: ctypes.CDLL) -> None:
    """A CTA's share of a tile, for every variant: whole boxes of at most 256 rows, that keep the swizzle's 8 rows."""
    shares = set()
    for name in build.VARIANTS:
        macros = build.VARIANTS[name][1]
        if macros:
            share = macros["HF_CP_TILE_N"] // macros["HF_CP_CLUSTER"]
            columns = library.order_columns_of_a_load(share, macros["HF_CP_ROWS_ARE_K"])
            assert share % columns == 0, name
            assert columns % 8 == 0, name
            assert columns <= 256, name
            shares.add(share)
    assert max(shares) > 256  # more than one box


def test_groups_lie_within_one_source_and_fit_a_warp() -> None:
    for cuts in [[0, 8192], [0, 1024, 2048], [0, 24, 48, 4096], list(range(0, 24 * 520 + 1, 520))]:
        for size in (1, 2):
            bounds = plan.group_bounds(cuts, size)
            assert set(cuts) <= set(bounds)
            assert 2 <= len(bounds) <= plan.MAX_GROUPS + 1
            assert bounds == sorted(set(bounds))
            starts = [max(cut for cut in cuts if cut <= bound) for bound in bounds]
            assert all((b - s) % (plan.CHUNK_BYTES // size) == 0 for b, s in zip(bounds, starts, strict=True))


@pytest.mark.parametrize(("pairs", "clusters"), [(128, 66), (640, 66), (512, 66), (7, 4)])
def test_copying_clusters_get_no_more_than_they_have_time_for(pairs: int, clusters: int) -> None:
    for copy_clusters in range(1, min(clusters, 9)):
        for copy_rounds in (0.0, 0.4, 1.0, 2.5):
            rounds, tail = plan.split_work(pairs, clusters, copy_clusters, copy_rounds)
            assert pairs - tail <= int(rounds) * (clusters - copy_clusters)
            assert -(-tail // copy_clusters) <= max(0, rounds - copy_rounds) + 1e-9
            # Less time would not do.
            shorter = rounds - 1e-6
            late = max(0, int(shorter - copy_rounds))
            assert int(shorter) * (clusters - copy_clusters) + late * copy_clusters < pairs


def test_the_schedule_foretells_what_was_measured() -> None:
    """2048 x 5120 x 4096 on 132 CTAs, 8 ranks: microseconds of an H200, see the kernels' README."""
    tile = plan.Shape(128, 256, 64, 2, 4, 0, 384, 2)
    wide = plan.Shape(128, 320, 64, 2, 3, 0, 384, 2)
    narrow = plan.Shape(128, 160, 64, 2, 5, 0, 384, 2)
    for shape, copy_ctas, measured in [(tile, 8, 153.1), (tile, 16, 151.5), (wide, 8, 143.2), (narrow, 16, 139.3)]:
        chosen = plan.schedule(shape, 2048, [5120], 1, 4096, 132, True, copy_ctas)
        assert chosen.copy_ctas == copy_ctas
        assert chosen.ns / 1e3 == pytest.approx(measured, rel=0.08)
    for shape, measured in [(tile, 145.2), (wide, 122.2), (narrow, 125.2)]:
        assert plan.schedule(shape, 2048, [5120], 1, 4096, 132, False).ns / 1e3 == pytest.approx(measured, rel=0.03)
    # Alone, wide tiles end first; with copies, narrow ones, of which copying CTAs leave out one.
    best = {shape.tile_n: plan.schedule(shape, 2048, [5120], 1, 4096, 132, True) for shape in (tile, wide, narrow)}
    assert min(best, key=lambda n: best[n].ns) == 160
    assert (best[160].copy_ctas, best[160].tail_pairs) == (16, 24)
    # 4096 x 10240 x 8192 has rounds enough for any tile, and 12 copying CTAs were best.
    large = plan.schedule(tile, 4096, [10240], 1, 8192, 132, True)
    assert (large.copy_ctas, large.tail_pairs) == (12, 40)


Step = tuple[Callable[["Memory"], bool], Callable[["Memory"], None]]


@dataclass
class Memory:
    """Flags and contents of the gathered operand by item, as the epoch that wrote them."""

    flags: dict[tuple[int, int, int], int]
    contents: dict[tuple[int, int, int], int]
    violations: list[str] = field(default_factory=list)


def programs(order: Order, epoch: int, wait: bool) -> list[list[Step]]:
    """What each CTA does, one atomic step after another; a step has a condition and an effect."""

    def write(item: tuple[int, int, int]) -> Step:
        return (lambda m: True, lambda m: m.contents.__setitem__(item, epoch))

    def publish(item: tuple[int, int, int]) -> Step:
        return (lambda m: True, lambda m: m.flags.__setitem__(item, epoch))

    def read(needs: Sequence[tuple[int, int, int]], reads: Sequence[tuple[int, int, int]]) -> Step:
        def check(m: Memory) -> None:
            m.violations += [f"{item} read in epoch {epoch}" for item in reads if m.contents[item] != epoch]

        return (lambda m: not wait or all(m.flags[item] >= epoch for item in needs), check)

    case, made = order.case, []
    for cta in range(case.ctas):
        steps: list[Step] = []
        if cta < case.copy_ctas:
            for item in order.items[cta :: case.copy_ctas]:
                steps += [write(item), publish(item)]
        for batch, row, _ in order.tiles[cta]:
            if row >= case.tiles_m:
                continue
            for k, waited in order.steps:
                start, end = k * case.tile_k, (k + 1) * case.tile_k
                touched = [g for g in range(len(case.cuts) - 1) if case.cuts[g] < end and case.cuts[g + 1] > start]
                steps.append(read([(batch, row, g) for g in waited], [(batch, row, g) for g in touched]))
        made.append(steps)
    return made


def explore(order: Order, epochs: int, wait: bool = True) -> tuple[int, set[str]]:
    """Walk every interleaving of a launch, epoch after epoch; states seen, and violations."""
    nothing = dict.fromkeys(order.items, 0)
    seen_states, violations = 0, set()
    flags, contents = dict(nothing), dict(nothing)
    for epoch in range(1, epochs + 1):
        steps = programs(order, epoch, wait)
        ends = tuple(len(one) for one in steps)
        start = tuple(0 for _ in steps)
        # Contents and flags follow from how far each CTA is, so positions are the whole state.
        pending, seen = [(start, flags, contents)], {start}
        finished = False
        while pending:
            at, flags_now, contents_now = pending.pop()
            moved = False
            for cta, position in enumerate(at):
                if position == ends[cta]:
                    continue
                ready, effect = steps[cta][position]
                memory = Memory(dict(flags_now), dict(contents_now))
                if not ready(memory):
                    continue
                moved = True
                effect(memory)
                violations.update(memory.violations)
                following = (*at[:cta], position + 1, *at[cta + 1 :])
                if following not in seen:
                    seen.add(following)
                    pending.append((following, memory.flags, memory.contents))
            if at == ends:
                finished = True
            elif not moved:
                violations.add(f"deadlock in epoch {epoch} at {at}")
        assert finished or violations
        seen_states += len(seen)
        flags, contents = dict.fromkeys(order.items, epoch), dict.fromkeys(order.items, epoch)
    return seen_states, violations


INTERLEAVED = [
    Case(2, 1, 1, 1, 1, 1, 3, 0, (0, 4, 8), 1),
    Case(2, 2, 1, 1, 2, 2, 4, 2, (0, 4, 8), 0),
    Case(2, 1, 1, 1, 1, 1, 3, 1, (0, 3, 6, 9), 2),
    Case(3, 1, 1, 2, 1, 2, 4, 1, (0, 5, 8), 1),
]


@pytest.mark.parametrize("case", INTERLEAVED)
def test_no_interleaving_reads_too_early_or_stops(library: ctypes.CDLL, case: Case) -> None:
    states, violations = explore(Order(library, case), epochs=2)
    assert not violations
    assert states > 60


def test_without_the_wait_some_interleaving_reads_too_early(library: ctypes.CDLL) -> None:
    _, violations = explore(Order(library, INTERLEAVED[1]), epochs=2, wait=False)
    assert any("read in epoch 2" in violation for violation in violations)


# Two ranks, their halves and meetings. A pull: write the own half, meet, read every rank's. A push: write into every
# rank's half, meet, read the own. Reads take two steps, so that a write between them shows.

# A replayed CUDA graph finds the half that its call was captured with, and the host, which turns to the other half with
# every call of its own, does not know of it.

# How far each rank is, the last meeting that each has signalled, and [rank][half] -> epoch written by each rank.
State = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[tuple[int, ...], ...], ...]]


def rank_program(
    kinds: Sequence[str], rank: int, halves: int, meet: bool, captured_half: int, eager_begin_too: bool
) -> list[tuple[str, int, int, int]]:
    """Steps `(what, epoch, half, other rank)`; for meetings, their number in the place of the epoch.

    Kinds that start with "replayed" come from a graph that was captured before the first of them.
    """
    steps: list[tuple[str, int, int, int]] = []
    meetings = eager = 0
    captured = False

    def meeting() -> list[tuple[str, int, int, int]]:
        nonlocal meetings
        meetings += 1
        return [("signal", meetings, 0, 0), ("wait", meetings, 0, 0)] if meet else []

    for epoch, kind in enumerate(kinds, 1):
        replayed = kind.startswith("replayed")
        captured = captured or replayed
        half = captured_half if replayed else eager % halves
        eager += not replayed
        if replayed or (captured and eager_begin_too):
            steps += meeting()
        if kind.endswith("pull"):
            steps.append(("write own", epoch, half, rank))
            steps += meeting()
            steps += [(what, epoch, half, peer) for peer in (0, 1) for what in ("read", "read")]
        else:
            steps += [("push", epoch, half, peer) for peer in (0, 1)]
            steps += meeting()
            steps += [("read pushed", epoch, half, rank)] * 2
    return steps


def explore_ranks(
    kinds: Sequence[str], halves: int = 2, meet: bool = True, captured_half: int = 0, eager_begin_too: bool = True
) -> set[str]:
    """Every interleaving of two ranks that run the same operators; what went wrong."""
    steps = [rank_program(kinds, rank, halves, meet, captured_half, eager_begin_too) for rank in (0, 1)]
    start: State = ((0, 0), (0, 0), (((0, 0),) * halves,) * 2)
    pending: list[State] = [start]
    seen: set[State] = {start}
    wrong: set[str] = set()
    while pending:
        at, signals, memory = pending.pop()
        moved = False
        for rank in (0, 1):
            if at[rank] == len(steps[rank]):
                continue
            what, epoch, half, peer = steps[rank][at[rank]]
            new_signals, new_memory = signals, memory
            if what == "wait" and min(signals) < epoch:
                continue
            moved = True
            if what == "signal":
                new_signals = tuple(epoch if r == rank else s for r, s in enumerate(signals))
            elif what == "read" and memory[peer][half][peer] != epoch:
                wrong.add(f"rank {rank} pulled epoch {memory[peer][half][peer]} from {peer} in {epoch}")
            elif what == "read pushed" and memory[rank][half] != (epoch, epoch):
                wrong.add(f"rank {rank} holds {memory[rank][half]} in {epoch}")
            elif what in ("write own", "push"):
                changed = [list(one) for one in memory]
                written = (epoch, epoch) if what == "write own" else tuple(
                    epoch if r == rank else e for r, e in enumerate(memory[peer][half])
                )  # fmt: skip
                changed[peer][half] = written
                new_memory = tuple(tuple(one) for one in changed)
            following: State = (tuple(p + (r == rank) for r, p in enumerate(at)), new_signals, new_memory)
            if following not in seen:
                seen.add(following)
                pending.append(following)
        if not moved and at != tuple(map(len, steps)):
            wrong.add(f"deadlock at {at}")
    return wrong


SEQUENCES = list(itertools.product(["pull", "push"], repeat=5))


def test_two_halves_and_one_meeting_an_epoch_are_enough() -> None:
    for kinds in SEQUENCES:
        assert not explore_ranks(kinds), kinds


def test_one_half_or_no_meeting_is_not() -> None:
    assert any(explore_ranks(kinds, halves=1) for kinds in SEQUENCES)
    assert all(explore_ranks(kinds, meet=False) for kinds in SEQUENCES)


REPLAYS = list(itertools.product(["pull", "push", "replayed pull", "replayed push"], repeat=4))


def test_replays_and_calls_may_follow_each_other() -> None:
    for kinds, captured_half in itertools.product(REPLAYS, [0, 1]):
        assert not explore_ranks(kinds, captured_half=captured_half), (kinds, captured_half)


def test_a_call_after_a_replay_has_to_begin_with_a_meeting() -> None:
    """A pull or a push into the half that another rank's replay still reads."""
    for kinds in [("replayed pull", "pull"), ("replayed push", "push"), ("push", "pull", "replayed push", "push")]:
        assert explore_ranks(kinds, eager_begin_too=False), kinds
