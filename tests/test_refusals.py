"""Every wrong configuration gives one line, the same on every rank, soon; and the next right call succeeds."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForQuestionAnswering,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

import hf_cp
from hf_cp import entry
from hf_cp.class_swap import is_patched
from hf_cp.testing import TINY_FIELDS, CommunicationLog, World, allow_fsdp2_on_cpu, tiny_qwen3_5

Worlds = Callable[..., World]
SECONDS = 5.0
BATCH, LENGTH = 2, 17


def refusal(call: Callable[[], Any]) -> str:
    """The one line that `call` is refused with; any other outcome fails."""
    begin = time.monotonic()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    assert type(caught.value) is ValueError
    assert time.monotonic() - begin < SECONDS
    text = str(caught.value)
    assert text.strip()
    assert "\n" not in text
    return text


def assert_same(texts: list[str], *fragments: str) -> None:
    assert len(set(texts)) == 1, texts
    for fragment in fragments:
        assert fragment in texts[0], texts[0]


def token_ids(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


# Forward. One model for all cases of a world, so that each case also shows that the one before left nothing behind.


@cache
def bound_model() -> Any:
    model = tiny_qwen3_5(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    return hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)


def right_batch() -> dict[str, Any]:
    ids = token_ids()
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}


@cache
def right_loss() -> float:
    model = copy.deepcopy(bound_model())
    return hf_cp.unpatch(model)(**right_batch()).loss.item()


def changed(name: str, rank: int, only: int | None = 1, **changes: Any) -> dict[str, Any]:
    """The right batch with an entry changed, on one rank or (`only=None`) on all."""
    batch = right_batch()
    return batch | changes if only is None or rank == only else batch


def with_one_changed(name: str, rank: int) -> dict[str, Any]:
    batch = right_batch()
    if rank == 1:
        batch[name] = batch[name].clone()
        batch[name][-1, -1] = 0 if name == "attention_mask" else 5
    return batch


def swapped_rows(rank: int) -> dict[str, Any]:
    batch = right_batch()
    return batch | {"input_ids": batch["input_ids"].flip(0)} if rank == 1 else batch


def without(names: tuple[str, ...], rank: int, only: int | None = 1) -> dict[str, Any]:
    batch = right_batch()
    return {k: v for k, v in batch.items() if k not in names} if only is None or rank == only else batch


def of_size(rank: int, batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    ids = token_ids(0, batch, length) if rank == 1 else token_ids()
    return {"input_ids": ids, "labels": ids}


def cached(rank: int, only: int | None, **changes: Any) -> dict[str, Any]:
    return changed("", rank, only, past_key_values=DynamicCache(config=bound_model().config), **changes)


def on_one_rank_only(name: str, rank: int, **other: Any) -> dict[str, Any]:
    return right_batch() | ({name: other["second"]} if rank == 1 else {name: other["first"]})


def embedded(rank: int, only: int | None, keep_ids: bool) -> dict[str, Any]:
    batch = right_batch()
    if only is None or rank == only:
        embeds = bound_model().model.embed_tokens(batch["input_ids"]).detach()
        batch["inputs_embeds"] = embeds
        if not keep_ids:
            del batch["input_ids"]
    return batch


def packed(rank: int, only: int | None, how: str) -> dict[str, Any]:
    if how == "positions":
        changes: dict[str, Any] = {"position_ids": torch.cat([torch.arange(9), torch.arange(8)]).expand(BATCH, -1)}
    else:
        changes = {"cu_seq_lens_q": torch.tensor([0, 9, LENGTH], dtype=torch.int32)}
    return changed("", rank, only, **changes)


def beyond(value: int, first: str) -> dict[str, Any]:
    """The right batch, but for an id or a label that the first rank alone would stop at."""
    batch = right_batch()
    batch[first] = batch[first].clone()
    batch[first][0, 3] = value
    return batch


def one_row(rank: int, **rank_one: Any) -> dict[str, Any]:
    ids = token_ids(0, 1)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    return batch | (rank_one if rank == 1 else {})


def one_row_all(rank: int, **changes: Any) -> dict[str, Any]:
    return one_row(1, **changes)


MASK_4D = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
BOUNDARIES = torch.tensor([0, 9, LENGTH], dtype=torch.int32)
DIFFER = ("differs between context-parallel ranks", "dispatch_batches=False")

# name: (keyword arguments by rank, what the line must say)
FORWARDS: dict[str, tuple[Callable[[int], dict[str, Any]], tuple[str, ...]]] = {
    "ids differ": (partial(with_one_changed, "input_ids"), ("inputs", *DIFFER)),
    "rows in another order": (swapped_rows, ("inputs", *DIFFER)),
    "labels differ": (partial(with_one_changed, "labels"), ("labels", *DIFFER)),
    "mask differs": (partial(with_one_changed, "attention_mask"), ("attention mask", *DIFFER)),
    "positions differ": (partial(with_one_changed, "position_ids"), ("position ids", *DIFFER)),
    "lengths differ": (partial(of_size, length=16), ("sequence length", "17, 16", *DIFFER)),
    "batch sizes differ": (partial(of_size, batch=3), ("batch size", "2, 3", *DIFFER)),
    "same number of tokens in another shape": (partial(of_size, batch=LENGTH, length=BATCH), ("batch size", *DIFFER)),
    "no labels on one rank": (partial(without, ("labels",)), ("labels", *DIFFER)),
    "no mask on one rank": (partial(without, ("attention_mask",)), ("attention mask", *DIFFER)),
    "no positions on one rank": (partial(without, ("position_ids",)), ("position ids", *DIFFER)),
    "embeddings on one rank": (partial(embedded, only=1, keep_ids=False), ("inputs", *DIFFER)),
    "boundaries on one rank": (partial(one_row, cu_seq_lens_q=BOUNDARIES), DIFFER),
    "positions differ beside boundaries": (
        lambda rank: one_row_all(
            rank, cu_seq_lens_q=BOUNDARIES, position_ids=torch.arange(LENGTH)[None] + (5 if rank else 0)
        ),
        ("position ids", *DIFFER),
    ),
    "hidden states on one rank": (partial(changed, "", only=1, output_hidden_states=True), ("output_hidden_states",)),
    "last logits on one rank": (
        lambda rank: without(("labels",), rank, None) | ({"logits_to_keep": 1} if rank else {}),
        ("logits_to_keep",),
    ),
    "item count on one rank": (partial(changed, "", only=1, num_items_in_batch=7), ("num_items_in_batch",)),
    "item counts differ": (
        lambda rank: right_batch() | {"num_items_in_batch": torch.tensor(7 + rank)},
        ("num_items_in_batch",),
    ),
    "cache": (partial(cached, only=None), ("use_cache=False", "labels")),
    "cache on one rank": (partial(cached, only=1), ("use_cache=False", "rank 1")),
    "use_cache": (partial(changed, "", only=None, use_cache=True), ("use_cache=False",)),
    "use_cache on the first rank": (partial(changed, "", only=0, use_cache=True), ("use_cache=False", "rank 0")),
    "use_cache with shifted labels": (
        lambda rank: without(("labels",), rank, None) | {"shift_labels": token_ids(), "use_cache": True},
        ("use_cache=False",),
    ),
    "4-D mask": (partial(changed, "", only=None, attention_mask=MASK_4D), ("attention_mask", "4", "cu_seq_lens_q")),
    "4-D mask on one rank": (partial(changed, "", only=1, attention_mask=MASK_4D), ("attention_mask", "rank 1")),
    "dict of masks": (
        partial(changed, "", only=None, attention_mask={"full_attention": None, "linear_attention": None}),
        ("attention_mask", "dict"),
    ),
    "dict of masks on one rank": (
        partial(changed, "", only=1, attention_mask={"full_attention": None, "linear_attention": None}),
        ("attention_mask", "rank 1"),
    ),
    "attention weights": (partial(changed, "", only=None, output_attentions=True), ("output_attentions=True",)),
    "attention weights on one rank": (
        partial(changed, "", only=1, output_attentions=True),
        ("output_attentions=True", "rank 1"),
    ),
    "packed rows by positions": (partial(packed, only=None, how="positions"), ("batch size 2", "concatenate")),
    "packed rows by boundaries": (partial(packed, only=None, how="boundaries"), ("batch size 2", "concatenate")),
    "packed rows on one rank": (partial(packed, only=0, how="positions"), ("batch size 2", "rank 0")),
    "boundaries that end early": (
        partial(one_row_all, cu_seq_lens_q=torch.tensor([0, 9, 12], dtype=torch.int32)),
        ("cu_seq", "17"),
    ),
    "boundaries that decrease": (
        partial(one_row_all, cu_seq_lens_q=torch.tensor([0, 9, 4, 17], dtype=torch.int32)),
        ("cu_seq",),
    ),
    "padding within a document": (
        partial(one_row_all, cu_seq_lens_q=BOUNDARIES, attention_mask=(torch.arange(LENGTH) > 1).long()[None]),
        ("attention_mask", "packed document"),
    ),
    "padding within a document, by positions, on one rank": (
        partial(
            one_row,
            position_ids=torch.cat([torch.arange(9), torch.arange(8)])[None],
            attention_mask=(torch.arange(LENGTH) != 12).long()[None],
        ),
        ("attention_mask", "packed document", "rank 1"),
    ),
    "boundaries as a list": (partial(one_row_all, cu_seq_lens_q=[0, 9, LENGTH]), ("cu_seq_lens_q of list",)),
    "boundaries of two dimensions on one rank": (
        partial(one_row, cu_seq_lens_q=BOUNDARIES[None]),
        ("cu_seq_lens_q of shape [1, 3]", "rank 1"),
    ),
    "ids as floats": (partial(changed, "", only=None, input_ids=token_ids().float()), ("input_ids of torch.float32",)),
    "ids outside the vocabulary": (lambda rank: beyond(97, first="input_ids"), ("input_ids: 1 outside",)),
    "negative ids": (lambda rank: beyond(-1, first="input_ids"), ("input_ids: 1 outside",)),
    "labels outside the vocabulary": (lambda rank: beyond(97, first="labels"), ("labels: 1 outside",)),
    "negative labels": (lambda rank: beyond(-1, first="labels"), ("labels: 1 outside",)),
    "shifted labels outside the vocabulary": (
        lambda rank: {"input_ids": token_ids(), "shift_labels": beyond(97, first="labels")["labels"].roll(-3, 1)},
        ("labels: 1 outside",),
    ),
    "seq_idx alone": (
        partial(one_row_all, seq_idx=(torch.arange(LENGTH) > 8).int()[None]),
        ("seq_idx", "cu_seq_lens_q"),
    ),
    "ids and embeddings": (partial(embedded, only=None, keep_ids=True), ("input_ids", "inputs_embeds", "one of")),
    "ids and embeddings on one rank": (partial(embedded, only=1, keep_ids=True), ("inputs_embeds", "rank 1")),
    "no inputs": (partial(without, ("input_ids",), only=None), ("input_ids", "inputs_embeds")),
    "no inputs on one rank": (partial(without, ("input_ids",)), ("input_ids", "rank 1")),
    "ids of one dimension": (partial(changed, "", only=None, input_ids=token_ids()[0]), ("input_ids", "[batch")),
    "ids of one dimension on one rank": (partial(changed, "", only=1, input_ids=token_ids()[0]), ("input_ids",)),
    "no tokens": (lambda rank: {"input_ids": token_ids()[:, :0], "labels": token_ids()[:, :0]}, ("seq_len=0",)),
    "labels too short": (partial(changed, "", only=None, labels=token_ids()[:, :-2]), ("labels", "[2, 15]")),
    "labels of one dimension on one rank": (partial(changed, "", only=1, labels=token_ids()[0]), ("labels",)),
    "mask too short": (
        partial(changed, "", only=None, attention_mask=torch.ones(BATCH, LENGTH - 3, dtype=torch.long)),
        ("attention_mask", "[2, 14]"),
    ),
    "positions too long": (
        partial(changed, "", only=None, position_ids=torch.arange(LENGTH + 1).expand(BATCH, -1)),
        ("position_ids", "[2, 18]"),
    ),
}


def first_label(rank: int, size: int) -> float:
    """The first label of a row predicts nothing, and the stock model does not look at it either."""
    batch = right_batch()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, 0] = 97
    return bound_model()(**batch).loss.item()


def test_a_first_label_is_not_looked_at(world: Worlds) -> None:
    assert world(2).run(first_label) == pytest.approx([right_loss()] * 2, rel=1e-5)


def refused_forward(rank: int, size: int, name: str) -> str:
    model = bound_model()
    text = refusal(lambda: model(**FORWARDS[name][0](rank)))
    loss = model(**right_batch()).loss
    loss.backward()
    hf_cp.average_gradients(model)
    assert loss.item() == pytest.approx(right_loss(), rel=1e-5)
    return text


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(world: Worlds, name: str) -> None:
    assert_same(world(2).run(refused_forward, name, timeout=12.0), *FORWARDS[name][1])


def decoder_alone(rank: int, size: int) -> list[str]:
    """The decoder called directly goes through the same door."""
    decoder = bound_model().model
    ids = token_ids()
    texts = [
        refusal(lambda: decoder(input_ids=token_ids(rank))),
        refusal(lambda: decoder(input_ids=ids, attention_mask=MASK_4D if rank else None)),
        refusal(lambda: decoder(input_ids=ids, inputs_embeds=decoder.embed_tokens(ids) if rank else None)),
        refusal(lambda: decoder(input_ids=ids, output_hidden_states=rank == 1)),
        # One rank asks the decoder, the other the head.
        refusal(lambda: (decoder if rank else bound_model())(input_ids=ids)),
    ]
    assert decoder(input_ids=ids).last_hidden_state.shape[:2] == ids.shape
    return texts


def mixed_caches(rank: int, size: int) -> list[str]:
    """Without labels a call with a cache is stock's: ranks that begin one meet those that shard, in every order."""
    head: Any = bound_model().eval()
    ids = token_ids()
    texts = []
    for model in (head, head.model):
        texts += [
            refusal(lambda model=model: model(input_ids=ids, use_cache=rank == 1)),
            refusal(lambda model=model: model(input_ids=ids, use_cache=rank != 1)),
            refusal(
                lambda model=model: model(
                    input_ids=ids, **({"past_key_values": DynamicCache(config=head.config)} if rank == 1 else {})
                )
            ),
        ]
    texts += [
        # A rank that generates, and ranks that go on with training.
        refusal(
            lambda: (
                head.generate(ids, max_new_tokens=2, pad_token_id=0) if rank == 1 else head(input_ids=ids, labels=ids)
            )
        ),
        refusal(lambda: head.generate(ids, max_new_tokens=2, pad_token_id=0, use_cache=rank == 1)),
    ]
    # Caches that hold tokens, of which the group knows nothing: the stock model's, and a copy of one that it began.
    stock: Any = hf_cp.unpatch(copy.deepcopy(head))
    with torch.no_grad():
        begun = head(input_ids=ids, use_cache=True).past_key_values
        for foreign in (stock(input_ids=ids, use_cache=True).past_key_values, copy.deepcopy(begun)):
            cache = {"past_key_values": foreign} if rank == 1 else {}
            texts.append(refusal(lambda cache=cache: head(input_ids=ids, **cache)))
        # Where every rank brings one, that is agreed on once; each goes on for as long as it likes.
        for cache, messages in ((copy.deepcopy(begun), ["all_gather"]), (begun, [])):
            with CommunicationLog() as log:
                for _ in range(1 + rank):
                    head(input_ids=ids[:, :1], past_key_values=cache)
            assert log.names == messages
    # The reason of a rank that refuses its call beats the mixture.
    beaten = refusal(
        lambda: head(input_ids=ids, use_cache=True) if rank else head(input_ids=ids, output_attentions=True)
    )
    assert "output_attentions" in beaten
    # What every rank begins needs no agreement on tokens, and none on what follows: other prompts, other numbers.
    prompt = token_ids(rank)[:1, : 9 + rank]
    with torch.no_grad(), CommunicationLog() as log:
        found = head.generate(prompt, max_new_tokens=3 + rank, do_sample=False, pad_token_id=0)
    assert log.names == ["all_gather"]
    assert torch.equal(found, stock.generate(prompt, max_new_tokens=3 + rank, do_sample=False, pad_token_id=0))
    assert head.train()(input_ids=ids, labels=ids).loss.isfinite()
    return texts


def test_cached_calls_on_some_ranks(world: Worlds) -> None:
    results = world(4).run(mixed_caches)
    assert all(texts == results[0] for texts in results)
    for text in results[0]:
        assert "use_cache=True" in text
        assert "\n" not in text
    assert "ranks 1 of 0 to 3" in results[0][0]
    assert "ranks 0, 2, 3 of 0 to 3" in results[0][1]


def sharded_weights(rank: int, size: int) -> list[str]:
    """FSDP2 gathers weights in each call, so that no rank can go on with a cache while another does something else."""
    ids, texts = token_ids(), []
    for wrapped in ("layers", "head", "layers and head"):
        model = copy.deepcopy(bound_model()).eval()
        stock: Any = hf_cp.unpatch(copy.deepcopy(model))
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.model.layers if "layers" in wrapped else []:
            fully_shard(layer, mesh=mesh)
        if "head" in wrapped:
            fully_shard(model, mesh=mesh)
        with torch.no_grad():
            begun = model(input_ids=ids, use_cache=True).past_key_values
            for _ in range(2):
                cache = {"past_key_values": begun} if rank == 1 else {}
                texts.append(refusal(lambda model=model, cache=cache: model(input_ids=ids[:, :1], **cache)))
            found, expected = (
                m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, stock)
            )
            assert torch.equal(found, expected)
    return texts


def test_cached_calls_with_sharded_weights(world: Worlds) -> None:
    first, second = world(2).run(sharded_weights, timeout=30)
    assert first == second
    assert all("use_cache=True on context-parallel ranks 1 of 0 to 1 alone" in text for text in first)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def waits_in_vain(rank: int, size: int) -> list[str]:
    """Rank 1 goes on with a cache that the group began, and then does something else; rank 0 does not wait for ever."""
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=2.5))
    model: Any = hf_cp.unpatch(copy.deepcopy(bound_model()))
    hf_cp.patch(model, gdn_backend="eager", cp_group=group)
    ids, handler = token_ids(), Lines()
    begun = model(input_ids=ids, use_cache=True).past_key_values
    if rank == 1:
        model(input_ids=ids[:, :1], past_key_values=begun)
    else:
        patience, entry._PATIENCE = entry._PATIENCE, 0.5
        logging.getLogger("hf_cp").addHandler(handler)
        try:
            with pytest.raises(RuntimeError) as raised:
                model(input_ids=ids)
        finally:
            entry._PATIENCE = patience
            logging.getLogger("hf_cp").removeHandler(handler)
        handler.lines.append(str(raised.value))
    dist.barrier()
    return handler.lines


def test_a_rank_that_waits_in_vain(world: Worlds) -> None:
    lines, nothing = world(2).run(waits_in_vain, timeout=20)
    assert nothing == []
    warning, error = lines[-2:]
    for line in (warning, error):
        assert line.startswith("context-parallel rank 0 of 2")
        assert "go on with a KV cache" in line
        assert "\n" not in line
    assert "still does" in warning
    assert "Timed out" in error


def test_decoder(world: Worlds) -> None:
    first, second = world(2).run(decoder_alone)
    assert first == second


def inner_rank(rank: int, size: int) -> list[str]:
    """Of four ranks only an inner one is wrong; and two ranks are wrong in different ways."""
    model = bound_model()
    ids = token_ids()
    wrong: list[dict[str, Any]] = [{"output_attentions": True}, {}, {"use_cache": True}, {}]
    texts = [
        refusal(lambda: model(input_ids=token_ids(rank % 2), labels=ids)),
        refusal(lambda: model(input_ids=ids, labels=ids, use_cache=rank == 1)),
        refusal(lambda: model(input_ids=ids, labels=ids, **wrong[rank])),
        # Refusal beats a difference, so that the reason is the one shown.
        refusal(lambda: model(input_ids=token_ids(rank), labels=ids, use_cache=rank == 2)),
    ]
    assert model(input_ids=ids, labels=ids).loss.isfinite()
    return texts


def test_inner_rank(world: Worlds) -> None:
    results = world(4).run(inner_rank)
    assert all(texts == results[0] for texts in results)
    assert "rank 1" in results[0][1]
    assert "rank 0" in results[0][2]
    assert "rank 2" in results[0][3]


def config_asks_for_attentions(rank: int, size: int) -> str:
    model = copy.deepcopy(bound_model())
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    return refusal(lambda: model(**right_batch()))


def test_attention_weights_by_config(world: Worlds) -> None:
    assert_same(world(2).run(config_asks_for_attentions), "output_attentions=True")


# Patching.


def tiny_vision_config() -> Qwen3_5VisionConfig:
    return Qwen3_5VisionConfig(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)


NEXT_FIELDS: dict[str, Any] = {
    **TINY_FIELDS,
    "num_hidden_layers": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def tiny_llama() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


class Subclass(Qwen3_5ForCausalLM):
    """A user's own subclass, whose forward nobody here knows."""


def subclassed() -> Any:
    model = tiny_qwen3_5(num_hidden_layers=1)
    model.__class__ = Subclass
    return model


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Llama": (tiny_llama, "LlamaForCausalLM"),
    "question answering": (
        lambda: Qwen3NextForQuestionAnswering(Qwen3NextConfig(**NEXT_FIELDS)),
        "Qwen3NextForQuestionAnswering",
    ),
    "vision tower alone": (lambda: Qwen3_5VisionModel(tiny_vision_config()), "Qwen3_5VisionModel"),
    "no transformers model": (lambda: nn.Linear(2, 2), "Linear"),
    "Llama beside a known one": (lambda: nn.ModuleList([tiny_qwen3_5(num_hidden_layers=1), tiny_llama()]), "Llama"),
    "subclass": (subclassed, "Subclass"),
}


def assert_untouched(model: nn.Module) -> None:
    assert not any(is_patched(m) or "_hf_cp" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_model(name: str) -> None:
    build, class_name = UNKNOWN[name]
    model = build()
    text = refusal(lambda: hf_cp.patch(model, gdn_backend="eager"))
    assert class_name in text
    assert "Qwen3_5ForCausalLM" in text
    assert_untouched(model)


@pytest.mark.parametrize("field", ["linear_mode", "attention_mode", "gdn_backend", "projection_backend"])
@pytest.mark.parametrize("value", ["auto", "AUTO", "", "ring", None, 1, ["p2p"], True])
def test_unknown_setting(field: str, value: Any) -> None:
    model = tiny_qwen3_5(num_hidden_layers=1)
    text = refusal(lambda: hf_cp.patch(model, **{"gdn_backend": "eager", field: value}))
    assert f"{field}={value!r}" in text
    assert "choose" in text
    assert_untouched(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can run here")
def test_triton_without_gpu() -> None:
    model = tiny_qwen3_5(num_hidden_layers=1)
    text = refusal(lambda: hf_cp.patch(model))
    assert 'gdn_backend="triton"' in text
    assert 'gdn_backend="eager"' in text
    assert_untouched(model)


class ReplacedLayer(nn.Module):
    """Somebody's own token mixing."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states


@pytest.mark.parametrize("layer", [0, 2])
def test_replaced_layer(layer: int) -> None:
    model = tiny_qwen3_5()
    model.model.layers[layer].linear_attn = ReplacedLayer()
    text = refusal(lambda: hf_cp.patch(model, gdn_backend="eager"))
    assert "linear_attention" in text
    assert "Qwen3_5GatedDeltaNet" in text
    assert_untouched(model)


def test_replaced_layer_of_the_second_model_leaves_the_first_alone() -> None:
    models = nn.ModuleList([tiny_qwen3_5(num_hidden_layers=1), tiny_qwen3_5(num_hidden_layers=1)])
    models[1].model.layers[0].linear_attn = ReplacedLayer()  # pyright: ignore
    assert "linear_attention" in refusal(lambda: hf_cp.patch(models, gdn_backend="eager"))
    assert_untouched(models)


def test_replaced_layer_of_a_patched_model() -> None:
    model = hf_cp.patch(tiny_qwen3_5(num_hidden_layers=2), gdn_backend="eager")
    model.model.layers[0].linear_attn = ReplacedLayer()  # pyright: ignore
    assert "linear_attention" in refusal(lambda: hf_cp.patch(model, gdn_backend="eager"))
    hf_cp.unpatch(model)
    assert_untouched(model)


def test_replaced_attention() -> None:
    model = tiny_qwen3_5()
    model.model.layers[3].self_attn = ReplacedLayer()
    text = refusal(lambda: hf_cp.patch(model, gdn_backend="eager"))
    assert "full_attention" in text
    assert "Qwen3_5Attention" in text
    assert_untouched(model)


def test_other_settings() -> None:
    model = hf_cp.patch(tiny_qwen3_5(), gdn_backend="eager")
    text = refusal(lambda: hf_cp.patch(model, gdn_backend="eager", linear_mode="allgather"))
    assert "linear_mode='p2p'" in text
    assert "unpatch" in text
    hf_cp.patch(hf_cp.unpatch(model), gdn_backend="eager", linear_mode="allgather")
    assert "unpatch" in refusal(lambda: hf_cp.patch(nn.Sequential(model), gdn_backend="eager"))


def test_average_gradients_of_a_stock_model() -> None:
    assert "hf_cp.patch" in refusal(lambda: hf_cp.average_gradients(tiny_qwen3_5(num_hidden_layers=1)))


# Heads. (attention heads, linear key heads, linear value heads)
HEADS: dict[str, tuple[dict[str, int], dict[str, str], tuple[str, ...]]] = {
    "key heads": (
        {"linear_num_key_heads": 1, "linear_num_value_heads": 2},
        {"linear_mode": "ulysses"},
        ("linear_mode='ulysses'", "1/2", "cp_size 2", "p2p"),
    ),
    "value heads": (
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
        {"linear_mode": "ulysses"},
        ("linear_mode='ulysses'", "3/3", "cp_size 2", "p2p"),
    ),
    "attention heads": (
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        {},
        ("attention_mode='ulysses'", "3 attention heads", "cp_size 2", "attention_mode='allgather'"),
    ),
}


def indivisible_at_patch(rank: int, size: int, name: str) -> str:
    overrides, settings, _ = HEADS[name]
    model = tiny_qwen3_5(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **overrides)
    text = refusal(lambda: hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD, **settings))
    assert_untouched(model)
    ids = token_ids()
    expected = model(input_ids=ids, labels=ids).loss.item()
    hf_cp.patch(model, gdn_backend="eager", attention_mode="allgather", cp_group=dist.group.WORLD)
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-5)
    return text


@pytest.mark.parametrize("name", HEADS)
def test_indivisible_heads_at_patch(world: Worlds, name: str) -> None:
    assert_same(world(2).run(indivisible_at_patch, name), *HEADS[name][2])


def unused_heads(rank: int, size: int) -> None:
    """A model without full attention does not mind the number of its attention heads, nor one without delta rule."""
    ids = token_ids()
    for kind, overrides in (
        ("linear_attention", {"num_attention_heads": 3, "num_key_value_heads": 1}),
        ("full_attention", {"linear_num_key_heads": 1, "linear_num_value_heads": 1}),
    ):
        model = tiny_qwen3_5(num_hidden_layers=1, layer_types=[kind], **overrides)
        expected = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
        hf_cp.patch(model, gdn_backend="eager", linear_mode="ulysses", cp_group=dist.group.WORLD)
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-5)


def test_heads_of_absent_layers_do_not_matter(world: Worlds) -> None:
    world(2).run(unused_heads)


# Groups.


def new_group(ranks: list[int]) -> Any:
    return dist.new_group(ranks)


def other_group_of_same_size(rank: int, size: int) -> list[str]:
    neighbours = [new_group([0, 1]), new_group([2, 3])][rank // 2]
    strided = [new_group([0, 2]), new_group([1, 3])][rank % 2]
    model = tiny_qwen3_5(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    hf_cp.patch(model, gdn_backend="eager", cp_group=neighbours)
    texts = [
        refusal(lambda: hf_cp.patch(model, gdn_backend="eager", cp_group=strided)),
        refusal(lambda: hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)),
    ]
    ids = token_ids(rank // 2)
    assert model(input_ids=ids, labels=ids).loss.isfinite()
    # The same ranks under another handle are the same group.
    again = [new_group([0, 1]), new_group([2, 3])][rank // 2]
    hf_cp.patch(model, gdn_backend="eager", cp_group=again)
    assert model(input_ids=ids, labels=ids).loss.isfinite()
    return texts


def test_bound_to_another_group(world: Worlds) -> None:
    results = world(4).run(other_group_of_same_size)
    assert all(texts == results[0] for texts in results)
    assert all("already bound" in text and "cp_group" in text for text in results[0])


def not_a_member(rank: int, size: int) -> str | None:
    group = new_group([0])
    model = tiny_qwen3_5(num_hidden_layers=1)
    if rank == 0:
        hf_cp.patch(model, gdn_backend="eager", cp_group=group)
        return None
    text = refusal(lambda: hf_cp.patch(model, gdn_backend="eager", cp_group=group))
    assert_untouched(model)
    return text


def test_rank_outside_the_group(world: Worlds) -> None:
    text = world(2).run(not_a_member)[1]
    assert "rank 1 is not a member" in text


def fsdp2_averages_itself(rank: int, size: int) -> str:
    model = tiny_qwen3_5(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model(**right_batch()).loss.backward()
    return refusal(lambda: hf_cp.average_gradients(model))


def test_average_gradients_under_fsdp2(world: Worlds) -> None:
    assert_same(world(2).run(fsdp2_averages_itself), "FSDP2", "drop the call")


# Accelerate.


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    allow_fsdp2_on_cpu()
    environment = dict(os.environ)  # plugins pass their settings on through it
    AcceleratorState._reset_state(True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        os.environ.clear()
        os.environ.update(environment)


def accelerator(config: Any, fsdp_version: int | None = None, **kwargs: Any) -> Accelerator:
    plugin = None if fsdp_version is None else FullyShardedDataParallelPlugin(fsdp_version=fsdp_version)
    return Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin, **kwargs)


def prepare(config: Any, fsdp_version: int | None = None, overrides: Any = None, **settings: Any) -> Any:
    overrides = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]} | (overrides or {})
    model = hf_cp.patch(tiny_qwen3_5(**overrides), gdn_backend="eager", **settings)
    optimizer = torch.optim.SGD(model.parameters())
    return accelerator(config, fsdp_version).prepare(model, optimizer)[0]


Sizes: Any = hf_cp.ContextParallelConfig
# name: (what is done, what the line must say)
SETUPS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "product too large": (lambda: prepare(Sizes(cp_size=4)), ("cp_size 4", "= 4", "processes 2", "cp_size=2")),
    "product too large, FSDP2": (
        lambda: prepare(Sizes(cp_size=2, dp_shard_size=2), 2),
        ("dp_shard_size 2", "cp_size 2", "= 4", "processes 2", "cp_size=2"),
    ),
    "product with replicas": (
        lambda: prepare(Sizes(cp_size=2, dp_replicate_size=3)),
        ("dp_replicate_size 3", "= 6", "dp_replicate_size=1"),
    ),
    "indivisible product": (lambda: prepare(Sizes(cp_size=3)), ("= 3", "processes 2", "cp_size=2")),
    "product without cp": (lambda: prepare(Sizes(dp_shard_size=3), 2), ("= 3", "processes 2", "dp_shard_size=2")),
    "base class, product": (
        lambda: prepare(ParallelismConfig(cp_size=4), 2),
        ("cp_size 4", "= 4", "processes 2", "cp_size=2"),
    ),
    "cp_size auto": (lambda: Sizes(cp_size="auto"), ("cp_size='auto'",)),
    "dp_replicate_size auto": (
        lambda: Sizes(cp_size=2, dp_replicate_size="auto"),
        ("dp_replicate_size='auto'",),
    ),
    "cp_size 2.0": (lambda: Sizes(cp_size=2.0), ("cp_size=2.0",)),
    "cp_size 0": (lambda: Sizes(cp_size=0), ("cp_size=0",)),
    "cp_size -1": (lambda: Sizes(cp_size=-1), ("cp_size=-1",)),
    "tp_size": (
        lambda: prepare(Sizes(cp_size=2, tp_size=2)),
        ("tp_size=2", "cannot be combined", "1"),
    ),
    "sp_size": (lambda: prepare(Sizes(cp_size=2, sp_size=2)), ("sp_size=2",)),
    "FSDP1": (lambda: prepare(Sizes(cp_size=2), 1), ("fsdp_version=1", "fsdp_version: 2")),
    "dp_shard without FSDP2": (
        lambda: prepare(Sizes(dp_shard_size=2)),
        ("dp_shard_size=2 needs FSDP2", "dp_replicate_size"),
    ),
    "key heads at prepare": (
        lambda: prepare(Sizes(cp_size=2), None, HEADS["key heads"][0], linear_mode="ulysses"),
        HEADS["key heads"][2],
    ),
    "attention heads at prepare": (
        lambda: prepare(Sizes(cp_size=2), 2, HEADS["attention heads"][0]),
        HEADS["attention heads"][2],
    ),
}


def refused_setup(rank: int, size: int, name: str) -> str:
    with fresh_accelerate():
        text = refusal(SETUPS[name][0])
    with fresh_accelerate():
        model = prepare(Sizes(cp_size=2))
        assert model(**right_batch()).loss.item() == pytest.approx(right_loss(), rel=1e-5)
    return text


@pytest.mark.parametrize("name", SETUPS)
def test_setup(world: Worlds, name: str) -> None:
    assert_same(world(2).run(refused_setup, name), *SETUPS[name][1])


def follow_the_advice(rank: int, size: int) -> None:
    """The value that the message recommends works."""
    for given, fsdp_version, recommended in (
        ({"cp_size": 2, "dp_replicate_size": 4}, None, {"cp_size": 2, "dp_replicate_size": 2}),
        ({"cp_size": 2}, 2, {"cp_size": 2, "dp_shard_size": 2}),
        ({"cp_size": 3}, None, {"cp_size": 4}),
    ):
        with fresh_accelerate():
            text = refusal(partial(prepare, Sizes(**given), fsdp_version))
        assert all(f"{name}={value}" in text for name, value in recommended.items()), text
        with fresh_accelerate():
            assert prepare(Sizes(**recommended), fsdp_version)(**right_batch()).loss.isfinite()


def test_recommended_sizes_work(world: Worlds) -> None:
    world(4).run(follow_the_advice)


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_distributed_type(kind: DistributedType) -> None:
    launched: Any = SimpleNamespace(num_processes=2, distributed_type=kind, is_fsdp2=False)
    text = refusal(lambda: Sizes(cp_size=2)._validate_accelerator(launched))
    assert f"distributed_type={kind.value}" in text
    assert "FSDP2 or DDP" in text


def two_groups(rank: int, size: int) -> str:
    """cp_group and Accelerate name different groups."""
    pairs = [new_group([0, 2]), new_group([1, 3])]
    with fresh_accelerate():
        text = refusal(lambda: prepare(Sizes(cp_size=2, dp_replicate_size=2), cp_group=pairs[rank % 2]))
    with fresh_accelerate():
        text += refusal(lambda: prepare(Sizes(cp_size=2, dp_replicate_size=2), cp_group=dist.group.WORLD))
    neighbours = [new_group([0, 1]), new_group([2, 3])]
    with fresh_accelerate():
        model = prepare(Sizes(cp_size=2, dp_replicate_size=2), cp_group=neighbours[rank // 2])
        assert model(**right_batch()).loss.isfinite()
    return text


def test_cp_group_and_accelerate_differ(world: Worlds) -> None:
    for text in world(4).run(two_groups):
        assert "not both" in text


def liger_heads(rank: int, size: int) -> list[str]:
    """Liger's loss, bound before patching, and between that and Accelerate's prepare, where Trainer binds it."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_5  # pyright: ignore[reportMissingImports]

    # What else it replaces, it replaces for all models of the process.
    apply = partial(apply_liger_kernel_to_qwen3_5, rms_norm=False, swiglu=False)
    model = tiny_qwen3_5(num_hidden_layers=1)
    apply(model=model)
    texts = [refusal(lambda: hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD))]
    for loss in (True, False):
        with fresh_accelerate():
            launched, model = accelerator(Sizes(cp_size=2)), copy.deepcopy(bound_model())
            apply(model=model, fused_linear_cross_entropy=loss)
            if loss:
                texts.append(refusal(partial(launched.prepare, model)))
            else:
                launched.prepare(model)
    return texts


def test_the_loss_of_liger(world: Worlds) -> None:
    pytest.importorskip("liger_kernel")
    for texts in world(2).run(liger_heads):
        assert all('liger_kernel_config={"fused_linear_cross_entropy": False}' in text for text in texts)


def dispatched(rank: int, size: int) -> list[str]:
    """A dispatcher gives every rank another batch, whatever is prepared first."""
    texts = []
    for order in (["model", "loader"], ["loader", "model"], ["model loader"]):
        with fresh_accelerate():
            settings = DataLoaderConfiguration(dispatch_batches=True)
            launched = accelerator(Sizes(cp_size=2), dataloader_config=settings)
            rows: Any = [{"input_ids": row} for row in token_ids(batch=4)]
            objects = {"model": copy.deepcopy(bound_model()), "loader": DataLoader(rows, batch_size=2)}
            calls = [[objects[name] for name in names.split()] for names in order]
            texts.append(refusal(partial(prepare_in_turn, launched, calls)))
    return texts


def prepare_in_turn(launched: Accelerator, calls: list[list[Any]]) -> None:
    for objects in calls:
        launched.prepare(*objects)


def test_dispatch_batches(world: Worlds) -> None:
    first, second = world(2).run(dispatched)
    assert first == second
    for text in first:
        assert "dispatch_batches=True" in text
        assert "False" in text
