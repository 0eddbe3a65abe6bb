"""Inputs that failed in other packages, and their relatives, where no other file has them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import assert_small, difference, each_pair, gradients, step, token_ids, worst
from torch import Tensor
from training_runs import FSDP2, Curve, Layout, Run, assert_same_curve, train_on_one_process
from training_runs import train as train_run

import hf_cp
from hf_cp.testing import CommunicationLog, SavedTensorLog, World, tiny_qwen3_5

Worlds = Callable[..., World]
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
STATE_BYTES = 2 * 8 * 16 * 16 * 4  # [B, HV, K, V] in fp32


def long_model() -> Any:
    return tiny_qwen3_5(**TWO_LAYERS, max_position_embeddings=4096).train()


def long_batch(length: int) -> dict[str, Tensor]:
    """Ids, labels, mask and positions of a length that no number of ranks divides."""
    ids = token_ids(1, length)
    # Rows that a constant told apart would turn queries and keys alike.
    positions = torch.stack([torch.arange(length) // slower for slower in (1, 2, 3, 5)])[:, None]
    mask = torch.ones_like(ids)
    mask[:, : length // 5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}


@functools.cache
def long_reference(length: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    model, batch = long_model(), long_batch(length)
    loss, expected = step(model, **batch)
    with torch.no_grad():
        return loss, expected, model(**batch).logits


def long_case(rank: int, size: int, length: int, reference: Any) -> dict[str, float]:
    model, batch = long_model(), long_batch(length)
    loss, expected, logits = reference

    def check() -> dict[str, float]:
        found_loss, found = step(model, **batch)
        with torch.no_grad():
            found_logits = model.eval()(**batch).logits
        model.train()
        kept = batch["attention_mask"].bool()
        return {
            "loss": abs(found_loss.item() - loss.item()),
            "gradients": worst(found, expected),
            "logits": difference(found_logits[kept], logits[kept]),
        }

    return each_pair(model, check, [("p2p", "ulysses"), ("allgather", "allgather")])


@pytest.mark.parametrize(("size", "length"), [(1, 2999), (2, 2999), (4, 2999)])
def test_long_lengths(world: Worlds, size: int, length: int) -> None:
    assert_small(world(size).run(long_case, length, long_reference(length), timeout=90))


# Replay.


def frozen(model: Any, names: tuple[str, ...]) -> Any:
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return model


# name: (layers that are checkpointed, what is frozen)
REPLAYS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "all": ((0, 1, 2, 3), ()),
    "every other": ((0, 2), ()),
    "the other half": ((1, 3), ()),
    "all, first layers frozen": ((0, 1, 2, 3), ("embed_tokens", "layers.0.", "layers.1.")),
    "every other, mixers frozen": ((1, 2), ("linear_attn", "embed_tokens")),
}


def replay_case(rank: int, size: int, reentrant: bool) -> dict[str, float]:
    """Exactly two forward chains of states and one of gradients for a layer that is replayed, from the log."""
    ids = token_ids(2, 37)
    errors = {}
    for name, (layers, parts) in REPLAYS.items():
        stock = frozen(tiny_qwen3_5().train(), parts)
        loss, _ = step(stock, input_ids=ids, labels=ids)
        expected = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
        model = frozen(tiny_qwen3_5().train(), parts)
        hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for index, layer in enumerate(model.model.layers):
            layer.gradient_checkpointing = index in layers
        if reentrant:
            model.enable_input_require_grads()
        with CommunicationLog() as log:
            found_loss = model(input_ids=ids, labels=ids).loss
            found_loss.backward()
        hf_cp.average_gradients(model)
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert set(found) == set(expected), name
        errors |= {f"{name} loss": abs(found_loss.item() - loss.item()), f"{name} gradients": worst(found, expected)}
        # transformers lets the embeddings' output require a gradient, so that every layer has its gradient chain.
        sent = Counter((r.name, r.payload_bytes) for r in log.records)[("send", STATE_BYTES)]
        chains = (3 + sum(index < 3 for index in layers)) * (rank < size - 1) + 3 * (rank > 0)
        assert sent == chains, (name, sent, chains)
    return errors


@pytest.mark.parametrize("reentrant", [True, False])
def test_replay_on_four_ranks(world: Worlds, reentrant: bool) -> None:
    assert_small(world(4).run(replay_case, reentrant, timeout=90))


def saved_case(rank: int, size: int) -> list[int]:
    """Bytes that further checkpointed layers save, one of each kind at a time."""
    ids = token_ids(2, 512)
    totals = []
    for kinds in (["full_attention"], ["full_attention", "linear_attention"], ["full_attention"] * 2):
        model = tiny_qwen3_5(num_hidden_layers=len(kinds), layer_types=kinds).train()
        hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with SavedTensorLog(ignore=list(model.parameters())) as log:
            model(input_ids=ids, labels=ids)
        totals.append(log.total_bytes)
    return [total - totals[0] for total in totals[1:]]


def test_a_checkpointed_layer_saves_its_input(world: Worlds) -> None:
    hidden = 2 * (512 // 2) * 64 * 4
    for layers in world(2).run(saved_case):
        assert all(hidden <= saved <= 1.1 * hidden for saved in layers), (layers, hidden)


def fsdp_checkpointed(rank: int, size: int, run: Run) -> Curve:
    FSDP2["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
    try:
        curve = train_run(run)
    finally:
        del FSDP2["FSDP_ACTIVATION_CHECKPOINTING"]
    wrapper = "_checkpoint_wrapped_module."
    assert any(wrapper in name for name in curve.weights)
    curve.weights = {name.replace(wrapper, ""): weight for name, weight in curve.weights.items()}
    return curve


def test_checkpointing_of_fsdp(world: Worlds) -> None:
    run = Run(Layout("fsdp2", cp=4), steps=4)
    expected = train_on_one_process(replace(run, layout=None))
    assert_same_curve(world(4).run(fsdp_checkpointed, run, timeout=90), expected)


# Clipping.


def clipped_case(rank: int, size: int) -> dict[str, float]:
    """The norm that FSDP2's gradients have over all ranks is that of one process, and after clipping the limit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    ids = token_ids(2, 37)
    stock = tiny_qwen3_5(**TWO_LAYERS).train()
    step(stock, input_ids=ids, labels=ids)
    limit = 0.1
    norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), limit).item()
    expected = gradients(stock)
    model = tiny_qwen3_5(**TWO_LAYERS).train()
    hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model(input_ids=ids, labels=ids).loss.backward()
    total: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert norm > 2 * limit

    def whole(x: Tensor | None) -> Tensor:
        assert isinstance(x, DTensor)
        return x.full_tensor()

    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    clipped = torch.stack([g.norm() for g in found.values()]).norm().item()
    return {
        "norm": abs(total.full_tensor().item() / norm - 1) / 10,  # sums in fp32 by halves and whole
        "limit": abs(clipped / limit - 1),
        "gradients": worst(found, expected) / 10,
    }


def test_clipped_norm_is_the_limit(world: Worlds) -> None:
    assert_small(world(2).run(clipped_case))


# Packing.


def other_document_case(rank: int, size: int) -> dict[str, float]:
    """Other tokens in document 1 move neither document 2's logits nor the gradients of its loss."""
    edges, length = torch.tensor([0, 23, 40, 61], dtype=torch.int32), 61
    positions = torch.cat([torch.arange(n) for n in edges.diff().tolist()])[None]
    first, second = token_ids(1, length), token_ids(1, length)
    second[:, :23] = token_ids(1, 23, seed=9)
    assert (first != second).any()
    targets = torch.nn.functional.pad(first[:, 1:], (0, 1), value=-100)
    targets[:, [*range(23), 39]] = -100
    model = tiny_qwen3_5(**TWO_LAYERS, tie_word_embeddings=False).train()

    def check() -> dict[str, float]:
        errors = {}
        for name, boundaries in (("boundaries", {"cu_seq_lens_q": edges}), ("positions", {"position_ids": positions})):
            with torch.no_grad():
                logits = [model(input_ids=ids, **boundaries).logits for ids in (first, second)]
            steps = [step(model, input_ids=ids, shift_labels=targets, **boundaries) for ids in (first, second)]
            assert difference(logits[1][:, :23], logits[0][:, :23]) > 0.1
            errors[f"{name} logits"] = difference(logits[1][:, 23:], logits[0][:, 23:])
            errors[f"{name} loss"] = (steps[1][0] - steps[0][0]).abs().item()
            errors[f"{name} gradients"] = worst(steps[1][1], steps[0][1])
        return errors

    return each_pair(model, check)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_documents_do_not_see_another(world: Worlds, size: int) -> None:
    assert_small(world(size).run(other_document_case), 1e-6)


# Generation and padding.


def generation_case(rank: int, size: int) -> None:
    """Beams, samples with a seed, both, and a prompt in chunks: stock's, token for token; and with sharded weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stock, ids = tiny_qwen3_5(**TWO_LAYERS).eval(), token_ids(2, 17)
    settings: list[dict[str, Any]] = [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 20, "temperature": 1.3},
        {"do_sample": True, "num_beams": 2},
        {"prefill_chunk_size": 5},
    ]
    for sharded in (False, True):
        model = hf_cp.patch(tiny_qwen3_5(**TWO_LAYERS).eval(), gdn_backend="eager", cp_group=dist.group.WORLD)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        for setting in settings[1:2] if sharded else settings:
            found = []
            for each in (model, stock):
                torch.manual_seed(3)
                with torch.no_grad():
                    found.append(each.generate(ids, max_new_tokens=3, pad_token_id=0, **setting))  # pyright: ignore
            assert torch.equal(*found), (setting, sharded)


def test_generation(world: Worlds) -> None:
    world(2).run(generation_case)


def padded_case(rank: int, size: int) -> float:
    """One row and several, padded on either side: every output is stock's, at padding too."""
    stock = tiny_qwen3_5(**TWO_LAYERS).eval()
    model = hf_cp.patch(tiny_qwen3_5(**TWO_LAYERS).eval(), gdn_backend="eager", cp_group=dist.group.WORLD)
    errors = []
    for valid in ((12,), (29,), (29, 12, 3)):
        ids = token_ids(len(valid), 29)
        right = (torch.arange(29) < torch.tensor(valid)[:, None]).long()
        for mask in (right, right.flip(1)):
            with torch.no_grad():
                found, expected = (
                    m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (model, stock)
                )
            errors.append(difference(found, expected))
    return max(errors)


def test_padding_comes_out_as_stock(world: Worlds) -> None:
    assert all(error < 1e-5 for error in world(2).run(padded_case))
