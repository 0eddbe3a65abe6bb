"""The fused kernels on one GPU: every rank's buffers are local, each rank launches on its own stream.

That the ranks share the GPU's multiprocessors makes the order in which they run arbitrary, which is what the protocol
has to stand. What a link between GPUs adds is not seen here.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from a2a_gemm_ranks import check_replays
from torch import Tensor

from hf_cp.kernels.a2a_gemm import TorchBackend, a2a_gemm, build, gemm_a2a
from hf_cp.kernels.a2a_gemm.fused import FusedBackend
from hf_cp.kernels.a2a_gemm.plan import Block, Matrix, Segment, Tuning, make_plan, stream_of
from hf_cp.kernels.a2a_gemm.routes import heads_per_rank
from hf_cp.kernels.a2a_gemm.workspace import Workspace
from hf_cp.testing import free_port

# Ranks of one process: the first launch of a kernel that is loaded late waits for the device, which may be waiting for
# the rank that is not enqueued yet.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# With the default of 8 queues the streams of 8 ranks and autograd's share some, and a rank that waits in one keeps the
# rank it waits for from starting.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
pytestmark = pytest.mark.gpu(1)
BF16 = torch.bfloat16
# One rounding to BF16 of an fp32 sum is 2^-9 at most, about 1.7e-3 in the norm; the order of the sum adds little.
LIMIT = 2.5e-3


class Ranks:
    """The ranks of one device: a backend and a stream each."""

    def __init__(self, world_size: int, capacity: int = 1 << 24) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.W = world_size
        # All of them have to fit on the device at once, beside the meetings.
        ctas = torch.cuda.get_device_properties(device).multi_processor_count // world_size // 2 * 2
        tuning = Tuning(copy_ctas=4 if ctas >= 16 else 2, ctas=max(ctas - 2, 4))
        self.workspaces = Workspace.local_world(world_size, device, capacity, timeout_s=5.0)
        self.backends = [FusedBackend(workspace, tuning=tuning) for workspace in self.workspaces]
        self.streams = [torch.cuda.Stream(device) for _ in range(world_size)]

    def run(self, call: Callable[[int, FusedBackend], object]) -> list[object]:
        """`call(rank, backend)` on every rank's stream; waits for all."""
        torch.cuda.synchronize()
        results = []
        for rank, (backend, stream) in enumerate(zip(self.backends, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append(call(rank, backend))
        torch.cuda.synchronize()
        for workspace in self.workspaces:
            workspace.check()
        return results


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def error(x: Tensor, want: Tensor) -> float:
    difference = ((x.float() - want.float()).norm() / want.float().norm()).item()
    return difference if math.isfinite(difference) else math.inf


def to_sequence(parts: list[Tensor]) -> list[Tensor]:
    """`[B, S, h, D]` of each rank to `[B, Sl, W*h, D]` of each rank, by indices alone."""
    W = len(parts)
    return [torch.cat([part.chunk(W, 1)[r] for part in parts], 2) for r in range(W)]


def to_heads(parts: list[Tensor], heads: int) -> list[Tensor]:
    """`[B, Sl, H, D]` of each rank to `[B, S, h, D]` of each rank, copies included."""
    W, h = len(parts), heads_per_rank(heads, len(parts))
    starts = [r * heads // W for r in range(W)]
    return [torch.cat([part[:, :, start : start + h] for part in parts], 1) for start in starts]


# Tokens of a rank, heads of a rank, head dim: ragged rows, K groups that are no multiple of the tile, a batch.
SHAPES = [(1, 200, 3, 72), (2, 130, 2, 64), (2, 64, 1, 128), (1, 37, 5, 40)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_a2a_gemm_to_sequence(ranks: Ranks, shape: tuple[int, int, int, int], transposed: bool) -> None:
    B, Sl, h, D = shape
    W, N = ranks.W, 328
    x = [draw(B, W * Sl, h, D) for _ in range(W)]
    matrix = draw(W * h * D, N) if transposed else draw(N, W * h * D).t()
    gathered = to_sequence(x)
    for rank, (y, a) in enumerate(ranks.run(lambda r, b: b.a2a_gemm([x[r]], [matrix], [W * h], "to_sequence"))):  # pyright: ignore[reportGeneralTypeIssues]
        assert torch.equal(a, gathered[rank].flatten(2)), rank
        assert error(y, gathered[rank].flatten(2).float() @ matrix.float()) < LIMIT, rank


@pytest.mark.parametrize("shape", SHAPES)
def test_a2a_gemm_to_heads(ranks: Ranks, shape: tuple[int, int, int, int]) -> None:
    B, Sl, h, D = shape
    W, N = ranks.W, 328
    x = [draw(B, Sl, W * h, D) for _ in range(W)]
    matrix = draw(N, h * D).t()
    gathered = to_heads(x, W * h)
    for rank, (y, a) in enumerate(ranks.run(lambda r, b: b.a2a_gemm([x[r]], [matrix], [W * h], "to_heads"))):  # pyright: ignore[reportGeneralTypeIssues]
        assert torch.equal(a, gathered[rank].flatten(2)), rank
        assert error(y, gathered[rank].flatten(2).float() @ matrix.float()) < LIMIT, rank


def test_a2a_gemm_sums_the_copies_of_a_head(ranks: Ranks) -> None:
    B, Sl, D, N = 1, 96, 64, 200
    W = ranks.W
    heads = [2 * W, 1, 1]
    x = [[draw(B, W * Sl, heads_per_rank(H, W), D) for H in heads] for _ in range(W)]
    matrices = [draw(H * D, N) for H in heads]
    results = ranks.run(lambda r, b: b.a2a_gemm(x[r], matrices, heads, "to_sequence"))
    widths = [W * heads_per_rank(H, W) * D for H in heads]
    for rank, (y, gathered) in enumerate(results):  # pyright: ignore[reportGeneralTypeIssues]
        want = torch.zeros(B, Sl, N, device="cuda")
        for i, H in enumerate(heads):
            part = to_sequence([one[i] for one in x])[rank]
            assert torch.equal(gathered.split(widths, 2)[i], part.flatten(2)), (rank, i)
            summed = part.float().unflatten(2, (H, -1)).sum(3).flatten(2)
            want += summed @ matrices[i].float()
        assert error(y, want) < LIMIT, rank


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_a2a_to_heads(ranks: Ranks, shape: tuple[int, int, int, int], transposed: bool) -> None:
    B, Sl, h, D = shape
    W, C = ranks.W, 264
    heads = [W * h, 1, max(W // 2, 1)]
    x = [draw(B, Sl, C) for _ in range(W)]
    matrices = [draw(C, H * D) if transposed else draw(H * D, C).t() for H in heads]
    results = ranks.run(lambda r, b: b.gemm_a2a(x[r], matrices, heads, D, "to_heads"))
    for i, H in enumerate(heads):
        want = to_heads([(one.float() @ matrices[i].float()).unflatten(2, (H, D)) for one in x], H)
        for rank in range(W):
            assert error(results[rank][i], want[rank]) < LIMIT, (rank, i)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("shape", SHAPES)
def test_gemm_a2a_to_sequence(ranks: Ranks, shape: tuple[int, int, int, int]) -> None:
    B, Sl, h, D = shape
    W, C = ranks.W, 264
    x = [draw(B, W * Sl, C) for _ in range(W)]
    weights = [[draw(h * D, C), draw(D, C)] for _ in range(W)]
    results = ranks.run(lambda r, b: b.gemm_a2a(x[r], [w.t() for w in weights[r]], [W * h, W], D, "to_sequence"))
    for i in range(2):
        parts = [(one.float() @ w[i].float().t()).unflatten(2, (-1, D)) for one, w in zip(x, weights, strict=True)]
        for rank, want in enumerate(to_sequence(parts)):
            assert error(results[rank][i], want) < LIMIT, (rank, i)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(("Sl", "h", "hkv", "D"), [(72, 4, 2, 128), (128, 2, 1, 64), (40, 3, 3, 136)])
def test_batched_pv(ranks: Ranks, Sl: int, h: int, hkv: int, D: int) -> None:
    W, B = ranks.W, 2
    S = W * Sl
    p, v = [draw(B, h, S, S) for _ in range(W)], [draw(B, S, hkv, D) for _ in range(W)]
    parts = [
        (a.float() @ b.float().repeat_interleave(h // hkv, 2).transpose(1, 2)).transpose(1, 2)
        for a, b in zip(p, v, strict=True)
    ]
    results = ranks.run(lambda r, b: b.batched_pv_a2a(p[r], v[r]))
    for rank, want in enumerate(to_sequence(parts)):
        assert error(results[rank], want) < LIMIT, rank  # pyright: ignore[reportArgumentType]


def test_launches_are_reused_and_operands_taken_where_they_lie(ranks: Ranks) -> None:
    """New numbers at old addresses, and an operand written into the workspace's own buffer."""
    W, Sl, h, D = ranks.W, 64, 2, 64
    x, matrix = [draw(1, W * Sl, h, D) for _ in range(W)], draw(200, W * h * D).t()

    def call(r: int, backend: FusedBackend) -> Tensor:
        buffer = backend.pull_buffer(*x[r].shape)
        buffer.copy_(x[r])
        y, _ = backend.a2a_gemm([buffer], [matrix], [W * h], "to_sequence")
        return y

    counts = []
    for _ in range(6):
        for part in x:
            part.normal_()
        for rank, (y, gathered) in enumerate(zip(ranks.run(call), to_sequence(x), strict=True)):
            assert error(y, gathered.flatten(2).float() @ matrix.float()) < LIMIT, rank  # pyright: ignore[reportArgumentType]
        counts.append(len(ranks.backends[0].plans))
    # The two halves take turns, and the allocator gives the same memory for results again.
    assert counts[-1] < len(counts), counts


def test_what_would_be_read_or_exchanged_wrongly_is_refused() -> None:
    backend = Ranks(2).backends[0]
    view = backend.pull_buffer(1, 2, 64, 64).transpose(1, 2)
    with pytest.raises(ValueError, match="lies in the workspace's buffer: it must be contiguous"):
        backend.a2a_gemm([view], [draw(200, 2 * 2 * 64).t()], [4], "to_sequence")
    with pytest.raises(RuntimeError, match="the 2 ranks of one process have no group to exchange through"):
        backend.exchange([view], [4], "to_sequence")


@pytest.mark.parametrize(("Sl", "h", "D"), [(100, 3, 80), (64, 2, 128)])
def test_fp8(ranks: Ranks, Sl: int, h: int, D: int) -> None:
    """Against the same numbers in fp32: products of e4m3 numbers are exact there, the tensor cores' sums nearly so."""
    W, B, N, C = ranks.W, 2, 336, 272
    e4m3 = torch.float8_e4m3fn
    scale_a, scale_b = torch.tensor(0.5, device="cuda"), torch.tensor(0.25, device="cuda")
    x = [draw(B, W * Sl, h, D).to(e4m3) for _ in range(W)]
    weight = draw(N, W * h * D).to(e4m3)
    results = ranks.run(lambda r, b: b.a2a_gemm([x[r]], [weight.t()], [W * h], "to_sequence", (scale_a, [scale_b])))
    gathered = to_sequence([part.float() for part in x])
    for rank, (y, a) in enumerate(results):  # pyright: ignore[reportGeneralTypeIssues]
        assert torch.equal(a.float(), gathered[rank].flatten(2)), rank
        assert y.dtype == BF16
        assert error(y, gathered[rank].flatten(2) @ weight.float().t() * 0.125) < 4e-3, rank
    z = [draw(B, Sl, C).to(e4m3) for _ in range(W)]
    weights = [draw(W * h * D, C).to(e4m3), draw(D, C).to(e4m3)]
    scales = [torch.tensor(2.0, device="cuda"), torch.tensor(3.0, device="cuda")]
    outputs = ranks.run(
        lambda r, b: b.gemm_a2a(z[r], [w.t() for w in weights], [W * h, 1], D, "to_heads", (scale_a, scales))
    )
    for i, (w, H) in enumerate(zip(weights, [W * h, 1], strict=True)):
        parts = [(one.float() @ w.float().t() * (0.5 * (2.0 + i))).unflatten(2, (H, D)) for one in z]
        for rank, want in enumerate(to_heads(parts, H)):
            assert error(outputs[rank][i], want) < 4e-3, (rank, i)  # pyright: ignore[reportIndexIssue]


def test_gradients(ranks: Ranks) -> None:
    """Of both operators in a row, q, k and v with fewer key heads than ranks, against one process in fp32."""
    if ranks.W == 8:
        pytest.skip("one thread does not start the backward of 8 ranks; 8 processes do: see below")
    W, B, Sl, D, C, N = ranks.W, 1, 72, 64, 256, 192
    heads = [2 * W, 1, 1]
    x, dy = [draw(B, Sl, C) for _ in range(W)], [draw(B, Sl, N) for _ in range(W)]
    weights, out = [draw(H * D, C) / 16 for H in heads], draw(N, 2 * W * D) / 16
    copies = [[w.clone().requires_grad_() for w in (*weights, out)] for _ in range(W)]
    inputs = [one.clone().requires_grad_() for one in x]

    def forward(r: int, backend: FusedBackend) -> Tensor:
        q, k, v = gemm_a2a(inputs[r], copies[r][:3], D, backend=backend)
        return a2a_gemm(q * (k + v), copies[r][3], backend=backend)

    for stream in ranks.streams:
        # Opening cuBLAS for a stream in autograd's thread, its first product of a kind, and taking memory from the
        # device wait for the device: the thread would never come to the rank that the others wait for.
        with torch.cuda.stream(stream):
            for w in (*weights, out):
                w = w.clone().requires_grad_()
                torch.nn.functional.linear(draw(B * Sl, w.shape[1]), w).sum().backward()
            held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in [1 << 19] * 64 + [1 << 26]]
            del held
    y = ranks.run(forward)
    grads = ranks.run(lambda r, b: torch.autograd.grad(y[r], [inputs[r], *copies[r]], dy[r]))  # pyright: ignore[reportCallIssue, reportArgumentType]

    whole = torch.cat(x, 1).float().requires_grad_()
    dense = [w.float().requires_grad_() for w in (*weights, out)]
    q, k, v = ((whole @ w.t()).unflatten(2, (-1, D)) for w in dense[:3])
    want = (q * (k + v)).flatten(2) @ dense[3].t()
    dx, *dw = torch.autograd.grad(want, [whole, *dense], torch.cat(dy, 1).float())
    assert error(torch.cat(y, 1), want) < 1e-2  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert error(torch.cat([one[0] for one in grads], 1), dx) < 1e-2  # pyright: ignore[reportIndexIssue]
    for i, w in enumerate(dw):
        total = sum(one[1 + i].float() for one in grads)  # pyright: ignore[reportIndexIssue]
        assert error(total, w) < 1e-2, i  # pyright: ignore[reportArgumentType]


def poisoned_epochs(
    epochs: int, test_mode: int, start: int = 0, variant: str = "bf16", width: int = 520, own: bool = False
) -> list[int]:
    """Epochs of `a2a_gemm` on poisoned memory that came out wrong, W = 4 local ranks' operands in one launch."""
    W, M, N = 4, 520, 512
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = Workspace(None, device, 1024, timeout_s=5.0)
    workspace.set_epoch(start)
    if start:
        workspace._memory.local.view(torch.int64)[-128:] = start
    a, d = (torch.empty(M, n, device="cuda", dtype=BF16) for n in (W * width, N))
    b = draw(N, W * width)
    parts = [torch.empty(M, width, device="cuda", dtype=BF16) for _ in range(W)]
    plans = [
        make_plan(
            variant, Matrix.of(a), [Matrix.of(b)], [Segment(Matrix.of(d))],
            blocks=[Block(Matrix.of(part), i * width) for i, part in enumerate(parts)],
            cuts=[i * width for i in range(W + 1)], first_column=width * turn, own_block=turn if own else -1,
            flags=workspace.flags, tuning=Tuning(copy_ctas=copy_ctas, tail_pairs=tail), test_mode=test_mode,
        )
        for turn, (copy_ctas, tail) in enumerate([(2, 0), (8, 2), (12, 6), (4, 1)])
    ]  # fmt: skip
    wrong = []
    for epoch in range(epochs):
        for part in parts:
            part.normal_()
        a.fill_(float("nan"))
        d.fill_(float("nan"))
        workspace.meet()
        plans[epoch % len(plans)].run(stream_of())
        whole = torch.cat(parts, 1)
        if not error(d, whole @ b.t()) < 4e-3 or not torch.equal(a, whole):
            wrong.append(epoch)
    workspace.check()
    assert workspace.epoch == start + epochs
    return wrong


@pytest.mark.parametrize("test_mode", [0, 2])
@pytest.mark.parametrize(
    ("variant", "width", "own"),
    [
        *[("bf16", 520, False), ("bf16", 512, True), ("bf16_wide", 512, True), ("bf16_narrow", 512, True)],
        *[(f"bf16{tile}_cluster_1", width, width == 512) for tile in ("", "_wide", "_narrow") for width in (512, 520)],
    ],
)
def test_poisoned_memory_is_never_read(test_mode: int, variant: str, width: int, own: bool) -> None:
    if variant not in build.USED and not build.library_path(variant).exists():
        pytest.skip(f"only the bench uses {variant}: python -m hf_cp.kernels.a2a_gemm.build {variant}")
    assert poisoned_epochs(100, test_mode, variant=variant, width=width, own=own) == []


@pytest.mark.parametrize(("width", "own"), [(520, False), (512, True)])
def test_without_the_wait_poison_is_read(width: int, own: bool) -> None:
    """The control of the test above: it must be able to fail."""
    assert len(poisoned_epochs(20, test_mode=3, width=width, own=own)) > 10


def test_epochs_pass_two_to_the_32() -> None:
    assert poisoned_epochs(8, test_mode=0, start=2**32 - 4) == []


def test_graph_replays_count_epochs() -> None:
    W, M, N, width = 2, 256, 256, 256
    workspace = Workspace(None, torch.device("cuda", torch.cuda.current_device()), 1024, timeout_s=5.0)
    a, d, b = (
        torch.empty(M, W * width, device="cuda", dtype=BF16),
        torch.empty(M, N, device="cuda", dtype=BF16),
        draw(N, W * width),
    )
    parts = [draw(M, width) for _ in range(W)]
    plan = make_plan(
        "bf16", Matrix.of(a), [Matrix.of(b)], [Segment(Matrix.of(d))],
        blocks=[Block(Matrix.of(part), i * width) for i, part in enumerate(parts)],
        cuts=[0, width, 2 * width], flags=workspace.flags,
    )  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    workspace.meet()
    plan.run(stream_of())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        workspace.meet()
        plan.run(stream_of())
    for _ in range(5):
        for part in parts:
            part.normal_()
        a.fill_(float("nan"))
        graph.replay()
        assert error(d, torch.cat(parts, 1) @ b.t()) < 4e-3
    workspace.check()
    assert workspace.epoch == 6


def test_captured_operators_replay_forward_and_backward() -> None:
    """One rank alone; several, each a process: see below."""
    workspace = Workspace(None, torch.device("cuda", torch.cuda.current_device()), 1 << 22, timeout_s=5.0)
    backend = FusedBackend(workspace)
    check_replays(backend, TorchBackend(None), 0)
    with pytest.raises(RuntimeError, match=r"pull_buffer cannot be used .* nor after one has captured calls"):
        backend.pull_buffer(1, 128, 2, 64)


def test_what_has_not_run_yet_cannot_be_captured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = Workspace(None, device, 1 << 20)
    backend, x, matrix = FusedBackend(workspace), draw(1, 128, 2, 64), draw(128, 128).t()
    with (
        pytest.raises(RuntimeError, match=r"first call of a workspace cannot be captured .*: run the same call once"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        backend.a2a_gemm([x], [matrix], [2], "to_sequence")
    with (
        pytest.raises(RuntimeError, match="a workspace of capacity=1048576 cannot be made while"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        Workspace(None, device, 1 << 20)
    # Nothing was enqueued, and the workspace serves as before.
    assert workspace.epoch == 0
    y, _ = backend.a2a_gemm([x], [matrix], [2], "to_sequence")
    assert error(y, x.flatten(2).float() @ matrix.float()) < LIMIT


def test_a_grid_that_does_not_fit_is_refused() -> None:
    x, b, d = draw(256, 256), draw(256, 256), draw(256, 256)
    with pytest.raises(ValueError, match=r"ctas=4096 cannot be resident together: this device takes \d+ clusters"):
        make_plan("bf16", Matrix.of(x), [Matrix.of(b)], [Segment(Matrix.of(d))], tuning=Tuning(ctas=4096))
    with pytest.raises(ValueError, match="multiples of the cluster size 2"):
        make_plan("bf16", Matrix.of(x), [Matrix.of(b)], [Segment(Matrix.of(d))], tuning=Tuning(ctas=31))


def test_a_rank_that_never_arrives_is_reported() -> None:
    workspace = Workspace.local_world(2, torch.device("cuda", torch.cuda.current_device()), 1024, timeout_s=0.05)[1]
    workspace.meet()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"rank 1 waited more than 0.05 s for rank 0: expected epoch 1, saw 0"):
        workspace.check()


@pytest.mark.parametrize(
    ("script", "how", "size"),
    [
        *[("a2a_gemm_ranks.py", "ipc", 2), ("a2a_gemm_ranks.py", "ipc", 8), ("a2a_gemm_ranks.py", "ipc graph", 2)],
        ("fused_model_ranks.py", "ipc", 2),
    ],
)
def test_processes_share_memory_through_ipc(script: str, how: str, size: int) -> None:
    """Operators, replays, and a whole model. One GPU runs the processes in turns; on several this crosses links."""
    run_ranks(script, how, size)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("script", "how"),
    [
        *[("a2a_gemm_ranks.py", "symmetric"), ("a2a_gemm_ranks.py", "symmetric graph")],
        *[("fused_model_ranks.py", "symmetric"), ("fused_model_ranks.py", "fsdp")],
    ],
)
def test_two_gpus_share_symmetric_memory(script: str, how: str) -> None:
    run_ranks(script, how)


def run_ranks(script: str, how: str, size: int = 2) -> None:
    port = free_port()
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name(script), *how.split()],
            env={**os.environ, **meeting, "RANK": str(r)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r in range(size)
    ]  # fmt: skip
    said = [process.communicate(timeout=180)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(said)
