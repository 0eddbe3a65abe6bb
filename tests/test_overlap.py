"""What runs while a Gated DeltaNet layer's exchanges are under way, from the order in which a rank issues its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_cp
from hf_cp.class_swap import swap_in
from hf_cp.config import PatchConfig
from hf_cp.models.common import out_proj
from hf_cp.models.common.out_proj import LateGradient
from hf_cp.testing import CommunicationLog, World, tiny_qwen3_5

Worlds = Callable[..., World]
BATCH, LENGTH = 2, 26
# One Gated DeltaNet layer of the small model: hidden size, HV * V, and a state.
HIDDEN, VALUES, STATE = 64, 128, (BATCH, 8, 16, 16)


class Order(CommunicationLog):
    """The messages of a rank, its matrix products by the shape of their result, and its delta rules, in order.

    A delta rule is one operator, or begins by inverting the systems of its chunks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = len(self.records)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.events += self.records[known:]
        if func is torch.ops.aten.mm.default:
            self.events.append(tuple(result.shape))
        elif func in (torch.ops.aten.linalg_solve_triangular.default, torch.ops.hf_cp.gdn_chunk_backward.default):
            self.events.append("delta rule")
        return result

    def first(self, wanted: Callable[[Any], bool], after: int = -1) -> int:
        """Index of the first event of a kind behind another."""
        return next(i for i, event in enumerate(self.events) if i > after and wanted(event))


def is_exchange(event: Any) -> bool:
    """A message of this layer but for the convolution's halo."""
    return getattr(event, "name", None) in ("all_gather", "all_to_all") or STATE in getattr(event, "shapes", ())


def order_case(rank: int, size: int, linear_mode: str) -> None:
    model = tiny_qwen3_5(num_hidden_layers=1, layer_types=["linear_attention"]).train()
    hf_cp.patch(model, linear_mode=linear_mode, gdn_backend="eager", cp_group=dist.group.WORLD)
    ids = torch.randint(1, 97, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens = BATCH * -(-LENGTH // size)
    with Order() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    qkv = forward.first(lambda event: event == (tokens, 2 * VALUES))
    started = forward.first(is_exchange, after=qkv)
    gate = forward.first(lambda event: event == (tokens, VALUES))
    assert started < gate, forward.events
    assert gate < forward.first(lambda event: event == (tokens, HIDDEN), after=gate), forward.events
    with Order() as backward:
        loss.backward()
    started = backward.first(is_exchange)
    weight = backward.first(lambda event: event == (HIDDEN, VALUES))
    assert started < weight, backward.events
    if linear_mode == "ulysses" or rank < size - 1:  # no gradient of a state comes in on the last rank
        assert weight < backward.first(lambda event: event == "delta rule", after=started), backward.events


@pytest.mark.parametrize("linear_mode", PatchConfig.CHOICES["linear_mode"])
def test_projections_run_while_the_exchange_is_under_way(world: Worlds, linear_mode: str) -> None:
    world(2).run(order_case, linear_mode)


def gradients(projection: nn.Linear, late: LateGradient | None, dtype: torch.dtype | None) -> list[Any]:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        if late is not None:
            late.record()
        y = projection(x) if late is None else late.project(projection, x)
        y.float().square().sum().backward()
    weight, projection.weight.grad = projection.weight.grad, None
    return [y.detach(), x.grad, weight]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_late_weight_gradient_is_autograds(dtype: torch.dtype | None, frozen: bool) -> None:
    """Bit for bit, in fp32 and under autocast, also called again, and without one for a frozen weight."""
    projection = nn.Linear(8, 6, bias=False)
    projection.weight.requires_grad_(not frozen)
    expected = gradients(projection, None, dtype)
    swap_in(projection, out_proj.forward, {})
    for _ in range(2):
        found = gradients(projection, LateGradient(projection), dtype)
        for a, b in zip(found, expected, strict=True):
            if a is None or b is None:
                assert a is b
            else:
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def test_a_wrapped_projection_is_called_as_it_is() -> None:
    projection = nn.Linear(8, 6, bias=False)
    found = gradients(projection, LateGradient(projection), None)
    assert found[2] is not None


def test_late_gradient_with_grad_disabled() -> None:
    projection = nn.Linear(8, 6, bias=False)
    swap_in(projection, out_proj.forward, {})
    with torch.no_grad():
        late = LateGradient(projection)
        late.record()
        y = late.project(projection, torch.ones(1, 2, 8))
    assert torch.equal(y, projection(torch.ones(1, 2, 8)))
