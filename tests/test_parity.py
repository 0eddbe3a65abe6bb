"""A patched model on W ranks against the stock model on one device: loss, logits and every gradient, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_cp
from hf_cp.config import PatchConfig
from hf_cp.loss import TrainerItemCount
from hf_cp.modes.attention import key_value_heads
from hf_cp.testing import World, tiny_qwen3_5

Worlds = Callable[..., World]
LINEAR, ATTENTION = PatchConfig.CHOICES["linear_mode"], PatchConfig.CHOICES["attention_mode"]
PAIRS = list(product(LINEAR, ATTENTION))
BOUND = 1e-5
# One layer of each kind, where nothing asks for more; the small model has four, three of them linear.
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def token_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(1000 * length + seed))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest error of a gradient tensor, against the larger of its own norm and 1 % of the total norm."""
    total = torch.stack([g.double().norm() for g in expected.values()]).norm()
    errors = [
        (found[n].double() - g.double()).norm() / max(g.double().norm(), 0.01 * total) for n, g in expected.items()
    ]
    error = torch.stack(errors).max().item()
    return error if error == error else float("inf")


def difference(found: Tensor, expected: Tensor) -> float:
    error = ((found - expected).double().norm() / expected.double().norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def step(model: Any, autocast: bool = False, /, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one call, averaged over the group where the model is patched."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs).loss
    loss.backward()
    if "_hf_cp" in model.__dict__:
        hf_cp.average_gradients(model)
    return loss.detach(), gradients(model)


def each_pair(
    model: Any, check: Callable[[], dict[str, float]], pairs: Any = PAIRS, backend: Any = "eager"
) -> dict[str, float]:
    """Run a check under every pair of modes; errors by `linear/attention: quantity`."""
    errors = {}
    for linear, attention in pairs[: None if dist.get_world_size() > 1 else 1]:  # one rank has no modes
        modes: Any = {"linear_mode": linear, "attention_mode": attention, "gdn_backend": backend}
        hf_cp.patch(model, **modes, cp_group=dist.group.WORLD)
        errors |= {f"{linear}/{attention}: {key}": value for key, value in check().items()}
        hf_cp.unpatch(model)
    return errors


def assert_small(results: list[dict[str, float]], bound: float = BOUND) -> None:
    bad = {f"rank {r}, {k}": v for r, errors in enumerate(results) for k, v in errors.items() if not v <= bound}
    assert results[0], "nothing was compared"
    assert not bad, bad


def lengths_case(
    rank: int, size: int, length: int, pairs: Any, overrides: dict[str, Any], device: str = "cpu"
) -> dict[str, float]:
    model = tiny_qwen3_5(**overrides).train().to(device)
    ids = token_ids(2, length).to(device)
    if length > 1:
        loss, expected = step(model, input_ids=ids, labels=ids)
    else:  # stock has no target and says NaN
        loss, expected = torch.zeros((), device=device), {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(input_ids=ids).logits

    def check() -> dict[str, float]:
        found_loss, found = step(model, input_ids=ids, labels=ids)
        with torch.no_grad():
            found_logits = model(input_ids=ids).logits
        gradient = worst(found, expected) if length > 1 else max(g.abs().max().item() for g in found.values())
        loss_error = (found_loss - loss).abs().item() / max(loss.item(), 1.0)
        return {"loss": loss_error, "gradients": gradient, "logits": difference(found_logits, logits)}

    return each_pair(model, check, pairs)


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 257])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_lengths(world: Worlds, size: int, length: int) -> None:
    overrides = {} if length == 65 else TWO_LAYERS
    assert_small(world(size).run(lengths_case, length, PAIRS, overrides, timeout=120))


def test_fewer_tokens_than_the_convolution_has_taps_on_eight_ranks(world: Worlds) -> None:
    overrides = {**TWO_LAYERS, "linear_num_key_heads": 8, "linear_key_head_dim": 8}
    assert_small(world(8).run(lengths_case, 17, PAIRS, overrides, timeout=180))


def test_odd_world_and_heads_that_only_gathering_serves(world: Worlds) -> None:
    assert_small(world(3).run(lengths_case, 50, [("p2p", "allgather"), ("allgather", "allgather")], {}, timeout=120))


def autocast_case(rank: int, size: int) -> dict[str, float]:
    """Errors against fp32, as multiples of stock's own under autocast."""
    model, ids = tiny_qwen3_5().train(), token_ids(2, 130)
    _, exact = step(model, input_ids=ids, labels=ids)
    allowed = worst(step(model, True, input_ids=ids, labels=ids)[1], exact)

    def check() -> dict[str, float]:
        return {"gradients": worst(step(model, True, input_ids=ids, labels=ids)[1], exact) / allowed}

    return each_pair(model, check)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_autocast(world: Worlds, size: int) -> None:
    assert_small(world(size).run(autocast_case, timeout=120), 2.0)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("length", [1, 65, 1000])
def test_lengths_on_two_gpus(world: Worlds, length: int, backend: str) -> None:
    """Over NCCL, and over gloo, which takes CUDA tensors through the CPU."""
    assert_small(world(2, backend=backend).run(lengths_case, length, PAIRS, {}, "cuda", timeout=300))


@pytest.mark.gpu(1)
def test_lengths_on_one_gpu(world: Worlds) -> None:
    assert_small(world(1).run(lengths_case, 1000, PAIRS, {}, "cuda", timeout=300))


def test_query_heads_of_a_rank_spanning_two_kv_heads(world: Worlds) -> None:
    overrides = {"num_attention_heads": 6, "num_key_value_heads": 3}
    assert key_value_heads(6, 3, 2) == [[0, 0, 1], [1, 2, 2]]
    assert_small(world(2).run(lengths_case, 33, [("p2p", "ulysses"), ("p2p", "allgather")], overrides))


def padding_case(rank: int, size: int, implementation: str) -> dict[str, float]:
    """Ragged right padding, ragged left padding, and a row of one token, labels ignored where padded."""
    model = tiny_qwen3_5(attn_implementation=implementation, **TWO_LAYERS).train()
    length, valid = 45, (45, 18, 1)
    errors = {}
    for side in ("right", "left"):
        ids = token_ids(3, length, seed=1)
        mask = torch.stack([(torch.arange(length) < n).long() for n in valid])
        if side == "left":
            mask = mask.flip(1)
        labels = ids.masked_fill(mask == 0, -100)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        loss, expected = step(model, **inputs)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits

        def check(inputs: Any = inputs, loss: Tensor = loss, expected: Any = expected, logits: Any = logits) -> Any:
            found_loss, found = step(model, **inputs)
            with torch.no_grad():
                found_logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            kept = inputs["attention_mask"].bool()
            return {
                "loss": abs(found_loss.item() - loss.item()),
                "gradients": worst(found, expected),
                "logits": difference(found_logits[kept], logits[kept]),
            }

        errors |= {f"{side} {key}": value for key, value in each_pair(model, check).items()}
    return errors


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_padding(world: Worlds, size: int, implementation: str) -> None:
    assert_small(world(size).run(padding_case, implementation, timeout=120))


def labels_case(rank: int, size: int, kind: str) -> dict[str, float]:
    model = tiny_qwen3_5(tie_word_embeddings=False).train()
    ids = token_ids(2, 41, seed=2)
    labels = torch.full_like(ids, -100)
    if kind == "one on the last rank":
        labels[1, -1] = ids[1, -1]
    elif kind == "one at a rank edge":  # predicted by the last token of the first of two shards
        labels[0, 21] = ids[0, 21]
    elif kind == "none on the first rank":
        labels[:, 24:] = ids[:, 24:]
    loss, expected = step(model, input_ids=ids, labels=labels)
    if kind == "none":
        assert loss.isnan()
        loss, expected = torch.zeros(()), {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def check() -> dict[str, float]:
        found_loss, found = step(model, input_ids=ids, labels=labels)
        gradient = max(g.abs().max().item() for g in found.values()) if kind == "none" else worst(found, expected)
        return {"loss": (found_loss - loss).abs().item(), "gradients": gradient}

    return each_pair(model, check, [("p2p", "ulysses"), ("allgather", "allgather"), ("ulysses", "ulysses")])


@pytest.mark.parametrize("kind", ["one on the last rank", "one at a rank edge", "none on the first rank", "none"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_labels(world: Worlds, size: int, kind: str) -> None:
    assert_small(world(size).run(labels_case, kind))


def scales_case(rank: int, size: int) -> dict[str, float]:
    """The three scales, and labels that the caller shifted."""
    model = tiny_qwen3_5().train()
    ids = token_ids(2, 30, seed=3)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) < 0.4, -100)
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], dim=1)
    count = 57  # labels of a whole optimizer step, more than in this batch
    mean = step(model, input_ids=ids, labels=labels)
    summed = step(model, input_ids=ids, labels=labels, num_items_in_batch=count)

    def check() -> dict[str, float]:
        calls = {
            "no count": (mean, {"labels": labels}),
            "shifted by the caller": (mean, {"labels": labels, "shift_labels": shifted}),
            "shifted labels alone": (mean, {"shift_labels": shifted}),
            "count": (summed, {"labels": labels, "num_items_in_batch": count}),
            "count as tensor": (summed, {"labels": labels, "num_items_in_batch": torch.tensor(float(count))}),
            # Trainer divides the count by W, and multiplies the loss by the world size W before backward.
            "Trainer's count": (summed, {"labels": labels, "num_items_in_batch": TrainerItemCount(count)}),
        }
        errors = {}
        for name, ((loss, expected), inputs) in calls.items():
            found_loss, found = step(model, input_ids=ids, **inputs)
            if name == "Trainer's count":
                found_loss, found = found_loss * size, {n: g * size for n, g in found.items()}
            errors[f"{name} loss"] = abs(found_loss.item() - loss.item())
            errors[f"{name} gradients"] = worst(found, expected)
        return errors

    return each_pair(model, check, [("p2p", "ulysses")])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scales(world: Worlds, size: int) -> None:
    results = world(size).run(scales_case)
    assert_small(results)


def outputs_case(rank: int, size: int) -> dict[str, float]:
    """Whole outputs, and gradients through them: a loss of the user's own, computed alike on every rank."""
    model = tiny_qwen3_5(**TWO_LAYERS).train()
    ids = token_ids(2, 29, seed=5)
    weights = torch.randn(2, 29, 97, generator=torch.Generator().manual_seed(6))
    embeds = model.get_input_embeddings()(ids).detach()

    def own_loss() -> tuple[Tensor, dict[str, Tensor], Tensor]:
        model.zero_grad(set_to_none=True)
        leaf = embeds.clone().requires_grad_()
        loss = (model(inputs_embeds=leaf).logits * weights).mean() + model.model(inputs_embeds=leaf)[0].square().mean()
        loss.backward()
        if "_hf_cp" in model.__dict__:
            hf_cp.average_gradients(model)
            dist.all_reduce(leaf.grad)
            leaf.grad /= size
        assert leaf.grad is not None
        return loss.detach(), gradients(model), leaf.grad

    loss, expected, input_gradient = own_loss()
    with torch.no_grad():
        stock = model(input_ids=ids, output_hidden_states=True)
        last = model(input_ids=ids, logits_to_keep=3).logits

    def check() -> dict[str, float]:
        found_loss, found, found_input = own_loss()
        with torch.no_grad():
            output = model(input_ids=ids, output_hidden_states=True)
            found_last = model(input_ids=ids, logits_to_keep=3).logits
        assert len(output.hidden_states) == len(stock.hidden_states)
        states = [difference(a, b) for a, b in zip(output.hidden_states, stock.hidden_states, strict=True)]
        return {
            "loss": abs(found_loss.item() - loss.item()),
            "gradients": worst(found, expected),
            "input gradient": difference(found_input, input_gradient),
            "logits": difference(output.logits, stock.logits),
            "last logits": difference(found_last, last),
            "hidden states": max(states),
        }

    return each_pair(model, check)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs(world: Worlds, size: int) -> None:
    assert_small(world(size).run(outputs_case, timeout=120))


@dataclass
class Documents:
    """Documents of one row, and what the stock model makes of each alone."""

    ids: Tensor
    targets: Tensor
    edges: Tensor
    positions: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    logits: Tensor


def documents_alone(model: Any, lengths: tuple[int, ...], balance: Callable[[list[Any]], Tensor] | None = None) -> Any:
    """Documents through the stock model, one by one; ``balance`` makes a loss of all that it returned."""
    ids = token_ids(1, sum(lengths), seed=7)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    targets[0, edges[1:].unique() - 1] = -100
    model.zero_grad(set_to_none=True)
    outputs = [
        model(input_ids=ids[:, begin:end], use_cache=False, **({"output_router_logits": True} if balance else {}))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        if begin < end
    ]
    logits = torch.cat([output.logits for output in outputs], dim=1)
    loss = torch.nn.functional.cross_entropy(logits[0], targets[0], ignore_index=-100)
    if balance is not None:
        loss = loss + balance(outputs)
    loss.backward()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return Documents(ids, targets, edges, positions, loss.detach(), gradients(model), logits.detach())


def packed_case(rank: int, size: int, lengths: tuple[int, ...], given: str) -> dict[str, float]:
    """Packed documents against each document alone through the stock model."""
    model = tiny_qwen3_5(**TWO_LAYERS).train()
    alone = documents_alone(model, lengths)
    ids, targets, edges, positions = alone.ids, alone.targets, alone.edges, alone.positions
    total = ids.shape[1]
    mask = torch.ones_like(ids)
    if "a mask" in given:  # of padding behind the last document, whose positions go on
        pad = torch.nn.functional.pad
        ids, targets, mask = pad(ids, (0, 5), value=9), pad(targets, (0, 5), value=-100), pad(mask, (0, 5))
        positions = torch.cat([positions, positions[:, -1:] + torch.arange(1, 6)], dim=1)
        edges = torch.cat([edges[:-1], edges[-1:] + 5])
    boundaries: dict[str, Tensor] = {
        "position_ids": {"position_ids": positions},
        "four rows of position_ids": {"position_ids": positions.expand(4, 1, -1)},
        "cu_seq_lens_q": {"cu_seq_lens_q": edges.to(torch.int32)},
    }[given.removesuffix(" and a mask")]
    if "a mask" in given:
        boundaries["attention_mask"] = mask

    def check() -> dict[str, float]:
        found_loss, found = step(model, input_ids=ids, shift_labels=targets, **boundaries)
        with torch.no_grad():
            found_logits = model(input_ids=ids, **boundaries).logits[:, :total]
        return {
            "loss": abs(found_loss.item() - alone.loss.item()),
            "gradients": worst(found, alone.gradients),
            "logits": difference(found_logits, alone.logits),
        }

    return each_pair(model, check)


@pytest.mark.parametrize(
    ("lengths", "given"),
    [
        ((20, 44), "position_ids"),  # a document across the edge
        ((32, 32), "position_ids"),  # an edge on the edge of two shards
        ((3, 1, 2, 50, 2, 9), "four rows of position_ids"),  # shorter than the convolution
        ((10, 0, 51), "cu_seq_lens_q"),  # an empty document, and padding behind the last
        ((20, 39), "position_ids and a mask"),
        ((20, 39), "cu_seq_lens_q and a mask"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed(world: Worlds, size: int, lengths: tuple[int, ...], given: str) -> None:
    assert_small(world(size).run(packed_case, lengths, given, timeout=120))
