"""Each mode sends what its documentation says, and keeps nothing longer than its shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_cp
from hf_cp.config import PatchConfig
from hf_cp.modes.attention import key_value_heads
from hf_cp.testing import CommunicationLog, SavedTensorLog, World, tiny_qwen3_5

Worlds = Callable[..., World]
LINEAR, ATTENTION = PatchConfig.CHOICES["linear_mode"], PatchConfig.CHOICES["attention_mode"]
FLOAT, BATCH, LENGTH = 4, 2, 26
ENTRY = ("all_gather", 8 * 15)  # the agreement: fifteen int64


def patched(linear: str, attention: str, **overrides: Any) -> Any:
    model = tiny_qwen3_5(**overrides).train()
    hf_cp.patch(model, linear_mode=linear, attention_mode=attention, gdn_backend="eager", cp_group=dist.group.WORLD)
    return model


def ids_of(length: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(length))


def messages(log: CommunicationLog) -> Counter[tuple[str, int]]:
    return Counter((r.name, r.payload_bytes) for r in log.records if r.name != "recv")


def linear_messages(mode: str, rank: int, size: int, backward: bool) -> list[tuple[str, int]]:
    """One Gated DeltaNet layer of the small model: H 4, HV 8, K = V = 16, convolution width 4."""
    local = -(-LENGTH // size)
    sends = rank > 0 if backward else rank < size - 1
    halo = [("send", FLOAT * BATCH * 3 * (2 * 4 * 16 + 8 * 16))] if sends else []
    if mode == "p2p":
        return halo + ([("send", FLOAT * BATCH * 8 * 16 * 16)] if sends else [])
    if mode == "allgather":
        return [*halo, ("all_gather", FLOAT * BATCH * 8 * 16 * (16 + 16))]
    tokens = FLOAT * BATCH * local
    return [
        *halo,
        ("all_to_all", tokens * (2 * 4 * 16 + 8 * 16 + 2 * 8)),  # q, k, v, g, beta in one message
        ("all_to_all", tokens * 8 * 16),  # output
    ]


def attention_messages(mode: str, size: int, backward: bool) -> list[tuple[str, int]]:
    """The full-attention layer of the small model: 8 query heads, 2 kv heads, head dim 16."""
    tokens = FLOAT * BATCH * -(-LENGTH // size)
    if mode == "allgather":
        kv = tokens * 2 * 2 * 16
        return [("reduce_scatter", kv * size)] if backward else [("all_gather", kv)]
    copies = sum(len(heads) for heads in key_value_heads(8, 2, size))
    return [("all_to_all", tokens * (8 + 2 * copies) * 16), ("all_to_all", tokens * 8 * 16)]


def formula_case(rank: int, size: int) -> None:
    for linear in LINEAR:
        for attention in ATTENTION:
            model = patched(linear, attention)
            ids = ids_of(LENGTH)
            with CommunicationLog() as log:
                loss = model(input_ids=ids, labels=ids).loss
            expected = Counter([ENTRY, ("all_reduce", FLOAT)])
            expected.update(3 * linear_messages(linear, rank, size, backward=False))
            expected.update(attention_messages(attention, size, backward=False))
            assert messages(log) == expected, f"{linear}/{attention} forward: {messages(log)} for {expected}"
            with CommunicationLog() as log:
                loss.backward()
            expected = Counter(3 * linear_messages(linear, rank, size, backward=True))
            expected.update(attention_messages(attention, size, backward=True))
            assert messages(log) == expected, f"{linear}/{attention} backward: {messages(log)} for {expected}"


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_each_mode(world: Worlds, size: int) -> None:
    world(size).run(formula_case, timeout=90)


def autocast_case(rank: int, size: int) -> None:
    for attention in ATTENTION:
        model = patched("p2p", attention)
        ids = ids_of(LENGTH)
        with CommunicationLog() as log, torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        found = messages(log)
        with CommunicationLog() as log:
            loss.backward()
        for backward in (False, True):
            expected = Counter((name, n // 2) for name, n in attention_messages(attention, size, backward=backward))
            assert not expected - found, f"{attention}, {backward=}: {found} for {expected}"
            found = messages(log)


def test_autocast_halves_attention_messages(world: Worlds) -> None:
    """q and k come out of the rotary embedding in fp32, and would be rounded only behind the exchange."""
    world(2).run(autocast_case)


def silent_case(rank: int, size: int) -> None:
    model = patched("p2p", "ulysses")
    ids = ids_of(LENGTH)
    with CommunicationLog() as log:
        model(input_ids=ids, labels=ids).loss.backward()
    assert not log.records, log


def test_one_rank_sends_nothing(world: Worlds) -> None:
    world(1).run(silent_case)


def saved_case(rank: int, size: int, linear: str, attention: str, layers: tuple[str, ...]) -> int:
    """Bytes saved for backward of one step; asserts that nothing is larger than its share of the sequence."""
    length = 1021
    local = -(-length // size)
    model = patched(linear, attention, num_hidden_layers=len(layers), layer_types=list(layers))
    ids = ids_of(length, batch=1)
    with SavedTensorLog(ignore=list(model.parameters())) as log:
        model(input_ids=ids, labels=ids)
    widest = max(97, 2 * 4 * 16 + 8 * 16, 2 * 8 * 16)  # vocabulary, qkv of the delta rule, q_proj with its gate
    for shape in log.shapes:
        assert torch.Size(shape).numel() <= local * widest, f"saved {shape} on a shard of {local} tokens"
        if linear != "ulysses" and "full_attention" not in layers:
            assert not {length, local * size} & set(shape), f"saved {shape}: the whole sequence of {length} tokens"
    return log.total_bytes


@pytest.mark.parametrize(
    ("linear", "attention", "layers"),
    [
        ("p2p", "ulysses", ("linear_attention",)),
        ("allgather", "ulysses", ("linear_attention",)),
        ("ulysses", "ulysses", ("linear_attention",)),
        ("p2p", "ulysses", ("linear_attention", "full_attention")),
    ],
)
def test_activations_shrink_with_the_group(world: Worlds, linear: str, attention: str, layers: tuple[str, ...]) -> None:
    two = world(2).run(saved_case, linear, attention, layers)
    four = world(4).run(saved_case, linear, attention, layers)
    # States and other parts that do not depend on the length may not halve.
    assert max(four) <= 0.55 * max(two), (two, four)


def replay_case(rank: int, size: int, reentrant: bool) -> None:
    ids = ids_of(LENGTH)
    model = patched("p2p", "ulysses")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with CommunicationLog() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with CommunicationLog() as backward:
        loss.backward()
    state = ("send", FLOAT * BATCH * 8 * 16 * 16)
    chains = 3 * (rank < size - 1)  # one a linear layer, and the last rank sends none
    assert messages(forward)[state] == chains, forward
    gradient_chains = 3 * (rank > 0)
    assert messages(backward)[state] == chains + gradient_chains, backward


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_one_chain_a_layer(world: Worlds, reentrant: bool) -> None:
    world(2).run(replay_case, reentrant)
    world(4).run(replay_case, reentrant)


READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero")


def counting(method: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """The method, whose calls the last of the counts tells."""

    def counted(*args: Any) -> Any:
        counts[-1] += 1
        return method(*args)

    return counted


def host_reads_case(rank: int, size: int, linear: str, attention: str, layers: int) -> list[int]:
    """How often the host looks at a tensor in a step, dense and with padding: a wait, where it lies on a GPU."""
    model = patched(
        linear,
        attention,
        num_hidden_layers=4 * layers,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * layers,
    )
    ids = ids_of(LENGTH)
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name), counts))
        for inputs in ({}, {"attention_mask": mask}):
            counts.append(0)
            model(input_ids=ids, labels=ids, **inputs).loss.backward()
    return counts


@pytest.mark.parametrize(
    ("linear", "attention"), [("p2p", "ulysses"), ("allgather", "allgather"), ("ulysses", "ulysses")]
)
@pytest.mark.parametrize("size", [1, 2])
def test_layers_do_not_make_the_host_wait(world: Worlds, size: int, linear: str, attention: str) -> None:
    """Where it looks at a tensor at all, it does so once a call, not once a layer."""
    assert world(size).run(host_reads_case, linear, attention, 1) == world(size).run(
        host_reads_case, linear, attention, 2
    )
