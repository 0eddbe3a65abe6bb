"""Models that see images and videos: merged into the whole sequence, sharded wherever the rank edges fall."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from test_parity import TWO_LAYERS, assert_small, difference, each_pair, gradients, step, token_ids, worst
from torch import Tensor
from torch.utils.data import Dataset
from training_runs import Curve, Layout, Run, assert_same_curve, curve_of, environment_of, launched, make_trainer

import hf_cp
from hf_cp.testing import TINY_FIELDS, World

Worlds = Callable[..., World]
PAIRS = [("p2p", "ulysses"), ("ulysses", "allgather")]
IMAGE, VIDEO = 90, 91
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "router_aux_loss_coef": 0.3,
}


def small_model(name: str, part: str = "ForConditionalGeneration", **overrides: Any) -> Any:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    experts = EXPERTS if name == "Qwen3_5Moe" else {}
    text = {**TINY_FIELDS, **experts, "rope_parameters": rope, "tie_word_embeddings": False} | overrides
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=VISION, image_token_id=IMAGE, video_token_id=VIDEO, tie_word_embeddings=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}{part}")(config)
        for key, parameter in model.named_parameters():
            if key.endswith("mlp.gate.weight"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def pixels(*grids: tuple[int, int, int], seed: int = 0) -> Tensor:
    patches = sum(t * h * w for t, h, w in grids)
    return torch.randn(patches, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(seed))


def media(ids: Tensor, images: list[Any], videos: list[Any]) -> dict[str, Tensor]:
    """What a processor gives beside the ids, for pictures of these sizes ``(t, h, w)`` in patches."""
    batch: dict[str, Tensor] = {"mm_token_type_ids": (ids == IMAGE) + 2 * (ids == VIDEO).int()}
    if images:
        batch |= {"pixel_values": pixels(*images), "image_grid_thw": torch.tensor(images)}
    if videos:
        batch |= {"pixel_values_videos": pixels(*videos, seed=1), "video_grid_thw": torch.tensor(videos)}
    return batch


def placed(length: int, *spans: tuple[int, int, int], rows: int = 1) -> Tensor:
    """Text ids with ``count`` tokens of a picture from ``begin`` on, in the last row."""
    ids = token_ids(rows, length) % 89 + 1
    for begin, count, token in spans:
        ids[-1, begin : begin + count] = token
    return ids


def batch_of(kind: str) -> dict[str, Any]:
    """41 tokens: shards of 21 and 20, or of 11, 11, 11 and 8; a video's frames are separated by text."""
    if kind == "an image across an edge":
        ids = placed(41, (18, 6, IMAGE))
        return {"input_ids": ids, "labels": ids, **media(ids, [(1, 4, 6)], [])}
    if kind == "an image over three ranks, one without":
        ids = placed(41, (2, 24, IMAGE), rows=2)
        mask = torch.ones_like(ids)
        mask[0, 29:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask, **media(ids, [(1, 8, 12)], [])}
    if kind == "images and video, left padding":
        ids = placed(41, (9, 4, IMAGE), (16, 4, VIDEO), (21, 4, VIDEO), (35, 6, IMAGE), rows=2)
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        mask[0, :17] = 0
        labels = ids.masked_fill((mask == 0) | (ids >= IMAGE), -100)
        pictures = media(ids, [(1, 4, 4), (1, 6, 4)], [(2, 4, 4)])
        return {"input_ids": ids, "labels": labels, "attention_mask": mask, **pictures}
    assert kind == "text"
    ids = placed(41, rows=2)
    return {"input_ids": ids, "labels": ids}


KINDS = [
    "an image across an edge",
    "an image over three ranks, one without",
    "images and video, left padding",
    "text",
]


def picture_case(
    rank: int, size: int, name: str, kind: str, device: str = "cpu", backend: str = "eager"
) -> dict[str, float]:
    """Loss, logits, positions and every gradient, the vision tower's too."""
    head_dims: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64} if backend == "triton" else {}
    model = small_model(name, **TWO_LAYERS, **head_dims).train().to(device)
    batch = {key: x.to(device) for key, x in batch_of(kind).items()}
    experts = {"output_router_logits": True} if name == "Qwen3_5Moe" else {}
    given = {key: value for key, value in batch.items() if key != "labels"}
    loss, expected = step(model, **batch, **experts)
    with torch.no_grad():
        stock = model(**given, **experts)
        body = model.model(**given, output_hidden_states=True)
    deltas = model.model.rope_deltas
    assert (deltas is None) == (kind == "text")
    assert kind == "text" or expected["model.visual.patch_embed.proj.weight"].abs().max() > 0
    keys = list(model.state_dict())

    def check() -> dict[str, float]:
        assert list(model.state_dict()) == keys
        model.model.rope_deltas = None
        found_loss, found = step(model, **batch, **experts)
        found_deltas: Any = model.model.rope_deltas
        assert (found_deltas is None) == (deltas is None)
        assert deltas is None or torch.equal(found_deltas, deltas)
        with torch.no_grad():
            output = model(**given, **experts)
            found_body = model.model(**given, output_hidden_states=True)
        assert type(output) is type(stock)
        assert set(output.keys()) | {"cache", "past_key_values"} == set(stock.keys()) | {"cache", "past_key_values"}
        assert type(found_body) is type(body)
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        pairs = zip(found_body.hidden_states, body.hidden_states, strict=True)
        errors = {
            "loss": abs(found_loss.item() - loss.item()),
            "gradients": worst(found, expected),
            "logits": difference(output.logits[kept], stock.logits[kept]),
            "hidden states": max(difference(a[kept], b[kept]) for a, b in pairs),
            "last hidden state": difference(found_body.last_hidden_state[kept], body.last_hidden_state[kept]),
        }
        if experts:
            errors["aux_loss"] = abs(output.aux_loss.item() - stock.aux_loss.item())
        return errors

    return each_pair(model, check, PAIRS, backend)


def picture_cases(rank: int, size: int, name: str, kinds: list[str]) -> dict[str, float]:
    return {f"{kind}: {k}": v for kind in kinds for k, v in picture_case(rank, size, name, kind).items()}


@pytest.mark.parametrize(
    ("size", "name", "kinds"),
    [
        (1, "Qwen3_5", KINDS[2:3]),
        (2, "Qwen3_5", KINDS),
        (4, "Qwen3_5", KINDS[:3]),
        (2, "Qwen3_5Moe", KINDS[1:3]),
    ],
)
def test_pictures(world: Worlds, size: int, name: str, kinds: list[str]) -> None:
    assert_small(world(size).run(picture_cases, name, kinds, timeout=120))


def picture_cases_on_gpu(rank: int, size: int) -> dict[str, float]:
    errors = {}
    # The vision tower's convolution would be computed in TF32, on other pictures a rank than on one process.
    torch.backends.cudnn.allow_tf32 = False
    for kind in (KINDS[0], KINDS[2]):
        for backend in ("eager", "triton"):
            found = picture_case(rank, size, "Qwen3_5", kind, "cuda", backend)
            errors |= {f"{backend}, {kind}: {key}": value for key, value in found.items()}
    return errors


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [1, 2])
def test_pictures_on_one_gpu(world: Worlds, size: int) -> None:
    assert_small(world(size).run(picture_cases_on_gpu, timeout=200), 2e-5)


def packed_case(rank: int, size: int) -> dict[str, float]:
    """Documents with pictures, packed by four rows of positions, against each document alone."""
    model = small_model("Qwen3_5", **TWO_LAYERS).train()
    documents = [placed(13, (4, 6, IMAGE)), placed(9), placed(21, (7, 4, VIDEO), (14, 4, VIDEO))]
    pictures: list[Any] = [([(1, 4, 6)], []), ([], []), ([], [(2, 4, 4)])]
    positions, count = [], sum(ids.shape[1] - 1 for ids in documents)
    model.zero_grad(set_to_none=True)
    loss, logits = torch.zeros(()), []
    for ids, (images, videos) in zip(documents, pictures, strict=True):
        given = media(ids, images, videos)
        output = model(input_ids=ids, **given)
        part = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="sum") / count
        part.backward()
        loss += part.detach()
        logits.append(output.logits.detach())
        text = torch.arange(ids.shape[1]).expand(1, 1, -1)
        grids = {key: value for key, value in given.items() if not key.startswith("pixel")}
        rows = text.expand(3, 1, -1) if len(grids) == 1 else model.model.get_rope_index(ids, **grids)[0]
        positions.append(torch.cat([text, rows]))
    expected = gradients(model)
    ids = torch.cat(documents, dim=1)
    shifted = torch.cat([torch.nn.functional.pad(d[:, 1:], (0, 1), value=-100) for d in documents], dim=1)
    whole = {"input_ids": ids, "position_ids": torch.cat(positions, dim=-1), **media(ids, [(1, 4, 6)], [(2, 4, 4)])}

    def check() -> dict[str, float]:
        found_loss, found = step(model, **whole, shift_labels=shifted)
        with torch.no_grad():
            found_logits = model(**whole).logits
        return {
            "loss": abs(found_loss.item() - loss.item()),
            "gradients": worst(found, expected),
            "logits": difference(found_logits, torch.cat(logits, dim=1)),
        }

    return each_pair(model, check, PAIRS)


@pytest.mark.parametrize("size", [2, 4])
def test_packed_pictures(world: Worlds, size: int) -> None:
    assert_small(world(size).run(packed_case, timeout=90))


def whole_models(rank: int, size: int, folder: Path) -> None:
    """Positions given in three rows, checkpointing, generation, files: as stock."""
    model, stock = small_model("Qwen3_5").train(), small_model("Qwen3_5").train()
    hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    batch = batch_of("an image across an edge")
    rows = stock.model.get_rope_index(
        batch["input_ids"], **{k: v for k, v in batch.items() if k in ("mm_token_type_ids", "image_grid_thw")}
    )[0]
    assert not torch.equal(rows[1], rows[2])
    loss, expected = step(stock, **batch)
    for extra in ({"position_ids": rows}, {"position_ids": torch.cat([torch.arange(41).expand(1, 1, -1), rows])}):
        found_loss, found = step(model, **batch, **extra)
        assert abs(found_loss - loss) < 1e-5
        assert worst(found, expected) < 1e-5
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        found_loss, found = step(model, **batch)
        assert abs(found_loss - loss) < 1e-5
        assert worst(found, expected) < 1e-5
    model.gradient_checkpointing_disable()
    given = {key: value for key, value in batch.items() if key != "labels"}
    for sample in (False, True):
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": sample, "pad_token_id": 0}
        torch.manual_seed(3)
        found_ids = model.eval().generate(**given, **options)
        torch.manual_seed(3)
        assert torch.equal(found_ids, stock.eval().generate(**given, **options))
    if rank == 0:
        model.save_pretrained(folder)
        loaded = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(folder)
        assert loaded.config.architectures == ["Qwen3_5ForConditionalGeneration"]
        assert list(loaded.state_dict()) == list(stock.state_dict())
        pairs = zip(loaded.parameters(), stock.parameters(), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    hf_cp.unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_whole_models(world: Worlds, tmp_path: Path) -> None:
    world(2).run(whole_models, tmp_path, timeout=90)


def refusals(rank: int, size: int) -> list[str]:
    model = small_model("Qwen3_5")
    hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD)
    texts = []
    batch = batch_of("an image across an edge")
    for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
        other = batch[name].clone()
        other[-1, -1] += rank
        for target in (model, model.model):
            with pytest.raises(ValueError, match="images and videos") as raised:
                target(**{key: value for key, value in batch.items() if key != "labels"} | {name: other})
            texts.append(str(raised.value))
    with pytest.raises(ValueError, match="images and videos") as raised:
        model(**(batch if rank else batch_of("an image across an edge") | {"pixel_values": None}))
    assert model(**batch).loss.isfinite()
    return [*texts, str(raised.value)]


def test_other_pictures_on_other_ranks(world: Worlds) -> None:
    first, second = world(2).run(refusals)
    assert first == second
    assert all("\n" not in text and "dispatch_batches=False" in text for text in first)


# Trainer.


class Pictures(Dataset[dict[str, Tensor]]):
    """Rows with one image each, at places that move over the rank edges."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = placed(48, (3 + 7 * index % 40, 4, IMAGE))[0]
        picture = pixels((1, 4, 4), seed=index)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": picture}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}
    return batch | {
        "pixel_values": torch.cat([row["pixel_values"] for row in rows]),
        "image_grid_thw": torch.tensor([(1, 4, 4)] * len(rows)),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).int(),
    }


def train_pictures(run: Run) -> Curve:
    model = small_model("Qwen3_5", **TWO_LAYERS)
    if run.layout is not None:
        hf_cp.patch(model, gdn_backend="eager")
    options = {"train_dataset": Pictures(16), "eval_dataset": Pictures(2), "data_collator": collate}
    with launched(environment_of(run)), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(replace(run, clip=1.0), folder, model=model, **options)
        trainer.train()
        return curve_of(trainer)


def train_pictures_on_rank(rank: int, size: int, run: Run) -> Curve:
    return train_pictures(run)


def test_trainer(world: Worlds) -> None:
    run = Run(Layout("fsdp2", cp=2), steps=2, accumulation=2, eval_every=2, checkpointing="not_reentrant")
    # Multimodal heads take means of micro-batches: they accept no item count.
    expected = train_pictures(replace(run, layout=None, checkpointing=None))
    assert_same_curve(world(2).run(train_pictures_on_rank, run, timeout=120), expected)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="outputs of encoders are new in 5.24")
def test_encoder_outputs_given() -> None:
    model, stock = small_model("Qwen3_5").eval(), small_model("Qwen3_5").eval()
    hf_cp.patch(model, gdn_backend="eager")
    batch = batch_of("an image across an edge")
    picture = batch.pop("pixel_values")
    encoded = stock.get_image_features(picture, batch["image_grid_thw"])
    with torch.no_grad():
        expected = stock(**batch, pixel_values=picture)
        found = model(**batch, mm_encoder_outputs={"image": encoded})
    assert difference(found.logits, expected.logits) < 1e-5
    assert difference(found.image_outputs.last_hidden_state, expected.image_outputs.last_hidden_state) < 1e-5
