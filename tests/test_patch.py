"""A patched model is the stock model but for its mixers: calls, attributes, checkpoints, wrappers, and back again."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextModel
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5DecoderLayer, Qwen3_5GatedDeltaNet
from transformers.utils.generic import can_return_loss, find_labels

import hf_cp
from hf_cp.class_swap import is_patched
from hf_cp.state import patch_state
from hf_cp.testing import CommunicationLog, World, relative_error, tiny_qwen3_5

Worlds = Callable[..., World]
BATCH, LENGTH = 2, 17
BOUND = 1e-5
PAIRS = [("p2p", "ulysses"), ("allgather", "allgather"), ("ulysses", "ulysses")]
MIXERS = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]


def token_ids(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def two_layers(**overrides: Any) -> Any:
    """One layer of each kind."""
    kinds = ["linear_attention", "full_attention"]
    return tiny_qwen3_5(**{"num_hidden_layers": 2, "layer_types": kinds} | overrides)


def patched(model: Any, group: bool = False, pair: tuple[str, str] = PAIRS[0]) -> Any:
    linear, attention = pair
    world: Any = dist.group.WORLD if group else None
    return hf_cp.patch(model, linear_mode=linear, attention_mode=attention, gdn_backend="eager", cp_group=world)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model: Any, average: bool = False, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one call."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    if average:
        hf_cp.average_gradients(model)
    return loss.item(), {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest error of a gradient, against the larger of its own norm and 1 % of the total norm."""
    assert found.keys() == expected.keys()
    total = torch.stack([g.double().norm() for g in expected.values()]).norm()
    assert total > 0
    errors = [
        (found[n].double() - g.double()).norm() / max(g.double().norm(), 0.01 * total) for n, g in expected.items()
    ]
    error = torch.stack(errors).max().item()
    return error if error == error else float("inf")


# What patching leaves alone.


def test_parameters_keys_and_names_stay() -> None:
    model = tiny_qwen3_5()
    parameters = {name: id(p) for name, p in model.named_parameters()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    keys = list(model.state_dict())
    versions = [p._version for p in model.parameters()]
    text, names, config = repr(model), [c.__name__ for c in classes(model)], copy.deepcopy(model.config.to_dict())
    assert patched(model) is model
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert list(model.state_dict()) == keys
    assert [p._version for p in model.parameters()] == versions
    assert repr(model) == text
    assert [c.__name__ for c in classes(model)] == names
    assert [c.__qualname__ for c in classes(model)] == names
    assert model.config.to_dict() == config
    assert isinstance(model, Qwen3_5ForCausalLM)
    assert isinstance(model.model, Qwen3_5TextModel)
    assert isinstance(model.model.layers[0].linear_attn, Qwen3_5GatedDeltaNet)
    assert isinstance(model.model.layers[3].self_attn, Qwen3_5Attention)
    # Checkpointing wraps this class: nothing may stand between.
    assert all(type(layer) is Qwen3_5DecoderLayer and "forward" not in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize("part", ["head", "decoder"])
def test_signature(part: str) -> None:
    model = tiny_qwen3_5(num_hidden_layers=1)
    stock_class = type(model)
    labels, loss = find_labels(stock_class), can_return_loss(stock_class)
    module = model if part == "head" else model.model
    expected = inspect.signature(module.forward)
    patched(model)
    assert inspect.signature(module.forward) == expected
    assert inspect.signature(type(module).forward) == inspect.signature(type(module).__mro__[1].forward)
    assert find_labels(type(model)) == labels == ["labels"]
    assert can_return_loss(type(model)) == loss


def test_unpatch_is_exact() -> None:
    model = tiny_qwen3_5().eval()
    ids = token_ids()
    before, stock = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True), classes(model)
    attributes = [set(vars(m)) for m in model.modules()]
    attention_config = model.model.layers[3].self_attn.config
    for pair in PAIRS:
        patched(model, pair=pair)
        model(input_ids=ids, labels=ids)
        assert hf_cp.unpatch(model) is model
    assert classes(model) == stock
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert model.model.layers[3].self_attn.config is attention_config is model.config
    after = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    assert torch.equal(after.loss, before.loss)
    assert torch.equal(after.logits, before.logits)
    assert all(map(torch.equal, after.hidden_states, before.hidden_states))
    assert hf_cp.unpatch(model) is model  # of a stock model: nothing
    assert patch_state(model) is None


def test_repeating_changes_nothing() -> None:
    model = patched(tiny_qwen3_5())
    before, state = classes(model), patch_state(model)
    assert patched(model) is model
    assert classes(model) == before
    assert patch_state(model) is state
    assert patched(nn.ModuleDict({"inner": model}))["inner"] is model
    assert classes(model) == before
    stock = classes(tiny_qwen3_5())
    assert classes(hf_cp.unpatch(model)) == stock


def repeating_keeps_the_group(rank: int, size: int) -> None:
    model = patched(two_layers(), group=True)
    state: Any = patch_state(model)
    mesh = state.mesh
    patched(model)  # no group given: the bound one stays
    patched(model, group=True)
    assert state.mesh.cp_size == size
    assert state is patch_state(model)
    # The decoder patched first, then the model that holds it.
    inner = two_layers()
    patched(inner.model, group=True)
    patched(inner)
    assert inner._hf_cp is inner.model._hf_cp
    assert inner._hf_cp.mesh.cp_size == mesh.cp_size
    other = two_layers()
    patched(other.model, group=True)
    with pytest.raises(ValueError, match="already patched"):
        patched(other, group=True, pair=PAIRS[1])
    ids = token_ids()
    assert inner(input_ids=ids, labels=ids).loss.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item())


def test_repeating_keeps_the_group(world: Worlds) -> None:
    world(2).run(repeating_keeps_the_group)


def independent_models(rank: int, size: int) -> dict[str, float]:
    """Two models of different settings and groups, called in turn, and a stock one between them."""
    ids, errors = token_ids(), {}
    first, second, third = patched(two_layers(), True), patched(two_layers(), pair=PAIRS[1]), two_layers().train()
    loss, gradients = step(third, input_ids=ids, labels=ids)
    for turn in range(2):
        for name, model in (("group", first), ("alone", second), ("stock", third)):
            with CommunicationLog() as log:
                found, grads = step(model.train(), name == "group", input_ids=ids, labels=ids)
            assert bool(log.records) == (name == "group")
            errors |= {f"{name} {turn}": abs(found - loss) / loss, f"{name} {turn} grads": worst(grads, gradients)}
    hf_cp.unpatch(second)
    assert not any(is_patched(m) for m in second.modules())
    errors["after unpatch"] = abs(step(first, True, input_ids=ids, labels=ids)[0] - loss)
    assert patch_state(first) is not patch_state(second)
    return errors


def test_two_models_share_nothing(world: Worlds) -> None:
    assert_small(world(2).run(independent_models))


def assert_small(results: list[dict[str, float]], bound: float = BOUND) -> None:
    assert results[0], "nothing was compared"
    bad = {f"rank {r}, {k}": v for r, errors in enumerate(results) for k, v in errors.items() if not v <= bound}
    assert not bad, bad


# Copies and checkpoints.


def test_copy_is_independent() -> None:
    model = patched(two_layers()).eval()
    ids = token_ids()
    twin = copy.deepcopy(model)
    assert classes(twin) == classes(model)
    assert twin._hf_cp is not model._hf_cp
    assert twin._hf_cp is twin.model._hf_cp
    assert twin.model.layers[1].self_attn.__dict__["config"] is twin.config
    assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
    hf_cp.unpatch(twin)
    assert is_patched(model)
    with torch.no_grad():
        twin.model.norm.weight.add_(1.0)
    stock = two_layers().eval()
    assert relative_error(model(input_ids=ids).logits, stock(input_ids=ids).logits) < BOUND
    assert not torch.allclose(twin(input_ids=ids).logits, stock(input_ids=ids).logits)
    config = copy.deepcopy(model.model.layers[1].self_attn.config)
    assert config.hidden_size == model.config.hidden_size


def copy_of_a_bound_model(rank: int, size: int) -> dict[str, float]:
    ids = token_ids()
    loss, gradients = step(two_layers().train(), input_ids=ids, labels=ids)
    model = patched(two_layers().train(), group=True)
    step(model, True, input_ids=ids, labels=ids)
    twin = copy.deepcopy(model)
    assert twin._hf_cp.mesh is model._hf_cp.mesh
    found, grads = step(twin, True, input_ids=ids, labels=ids)
    hf_cp.unpatch(model)
    again, _ = step(twin, True, input_ids=ids, labels=ids)
    return {"loss": abs(found - loss), "gradients": worst(grads, gradients), "original unpatched": abs(again - loss)}


def test_copy_of_a_bound_model(world: Worlds) -> None:
    assert_small(world(2).run(copy_of_a_bound_model))


def test_a_shallow_copy_is_patched() -> None:
    model = patched(two_layers())
    twin = copy.copy(model)
    assert classes(twin) == classes(model)
    assert twin._hf_cp is model._hf_cp
    # What torch's DataParallel does to make a replica.
    assert type(model.__new__(type(model))) is type(model)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [pickled, saved_whole])
def test_a_pickle_holds_the_stock_model(through: Callable[[Any], Any]) -> None:
    """Of a bound model too: a process group cannot be pickled."""
    stock, model = two_layers().eval(), patched(two_layers()).eval()
    before, ids = classes(model), token_ids()
    loaded = through(nn.ModuleDict({"inner": model}))["inner"]
    assert classes(loaded) == classes(stock)
    assert [set(vars(m)) for m in loaded.modules()] == [set(vars(m)) for m in stock.modules()]
    assert loaded.model.layers[1].self_attn.config is loaded.config
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(input_ids=ids, use_cache=False).logits, stock(input_ids=ids, use_cache=False).logits)
    assert classes(model) == before
    assert relative_error(model(input_ids=ids).logits, stock(input_ids=ids, use_cache=False).logits) < BOUND
    assert relative_error(patched(loaded)(input_ids=ids).logits, model(input_ids=ids).logits) < BOUND


def pickle_of_a_bound_model(rank: int, size: int) -> None:
    model = patched(two_layers(), group=True)
    assert not any(is_patched(m) for m in pickled(model).modules())
    with pytest.raises(pickle.PicklingError):  # as of a stock model
        pickled(shard(model, size))


def test_pickle_of_a_bound_model(world: Worlds) -> None:
    world(2).run(pickle_of_a_bound_model)


def test_the_class_of_a_patched_model_makes_stock_models(tmp_path: Path) -> None:
    model, ids = patched(two_layers()).eval(), token_ids()
    model.save_pretrained(tmp_path)
    kind: Any = type(model)
    for made in (kind(model.config), kind.from_pretrained(tmp_path), kind._from_config(model.config)):
        assert type(made) is Qwen3_5ForCausalLM
        assert not any(is_patched(m) for m in made.modules())
        assert made.eval()(input_ids=ids, labels=ids).loss.isfinite()


def test_state_dict_round_trip() -> None:
    model, file = patched(two_layers()), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    stock = two_layers(initializer_range=0.5)
    stock.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(torch.equal, stock.parameters(), model.parameters()))
    model.load_state_dict(stock.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_save_pretrained_loads_in_stock(tmp_path: Path, tied: bool) -> None:
    model = two_layers(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "stock")
    patched(model).save_pretrained(tmp_path / "patched")
    for name in ("config.json",):
        assert (tmp_path / "patched" / name).read_text() == (tmp_path / "stock" / name).read_text()
    files = [sorted(p.name for p in (tmp_path / kind).iterdir()) for kind in ("stock", "patched")]
    assert files[0] == files[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert type(loaded) is Qwen3_5ForCausalLM
    assert loaded.config.architectures == ["Qwen3_5ForCausalLM"]
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


def test_resized_embeddings() -> None:
    model, stock = patched(two_layers()), two_layers()
    ids = token_ids() + 10
    for each in (model, stock):
        torch.manual_seed(0)
        each.resize_token_embeddings(120)
    assert relative_error(model(input_ids=ids).logits, stock(input_ids=ids).logits) < BOUND


def test_meta_device() -> None:
    with torch.device("meta"):
        model = two_layers()
    patched(model)
    model.to_empty(device="cpu")
    model.load_state_dict(two_layers().state_dict())
    assert is_patched(model)


# An instance forward that is not ours.


def test_foreign_forward_survives() -> None:
    model = two_layers()

    def forward(self: Any, *args: Any, **kwargs: Any) -> str:
        return "foreign"

    method = types.MethodType(forward, model)
    model.forward = method
    patched(model)
    assert model.forward is method
    assert model(input_ids=token_ids()) == "foreign"
    hf_cp.unpatch(model)
    assert model.forward is method
    del model.forward
    assert model(input_ids=token_ids()).logits is not None


def test_a_forward_kept_from_before_unpatch_is_stock_afterwards() -> None:
    """Mixed precision keeps the class's forward in an instance attribute; after `unpatch` it must be stock."""
    ids = token_ids()
    with torch.no_grad():
        expected = two_layers().eval()(input_ids=ids, use_cache=False).logits
        model = patched(two_layers()).eval()
        kept_head, kept_decoder = type(model).forward, type(model.model).forward
        model.forward = types.MethodType(lambda self, *a, **k: kept_head(self, *a, **k), model)
        model.model.forward = types.MethodType(lambda self, *a, **k: kept_decoder(self, *a, **k), model.model)
        assert relative_error(model(input_ids=ids).logits, expected) < BOUND
        hf_cp.unpatch(model)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


def test_unpatch_after_mixed_precision() -> None:
    AcceleratorState._reset_state(True)
    try:
        ids = token_ids()
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(patched(two_layers()))
        assert model(input_ids=ids, labels=ids).loss.dtype == torch.float32
        hf_cp.unpatch(model)
        found = model(input_ids=ids, labels=ids, use_cache=False).loss
        stock = accelerator.prepare(two_layers())
        assert torch.equal(found, stock(input_ids=ids, labels=ids, use_cache=False).loss)
    finally:
        AcceleratorState._reset_state(True)


# Calls. Each is made of the stock model, of a patched one alone and of one in a group, in evaluation and training.


def padded() -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    return mask


def rows(count: int) -> Tensor:
    """Position ids with an image somewhere: the rows for height and width differ from the text's."""
    positions = torch.arange(LENGTH).expand(count, BATCH, -1).clone()
    positions[-2:, :, 5:9] = torch.tensor([5, 5, 6, 6])
    positions[-1, :, 5:9] = torch.tensor([5, 6, 5, 6])
    return positions


def embeddings(model: Any) -> Tensor:
    return model.get_input_embeddings()(token_ids()).detach()


CALLS: dict[str, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "keywords": lambda m: ((), {"input_ids": token_ids()}),
    "labels": lambda m: ((), {"input_ids": token_ids(), "labels": token_ids()}),
    "positional": lambda m: ((token_ids(), padded(), torch.arange(LENGTH).expand(BATCH, -1)), {}),
    "positional labels": lambda m: ((token_ids(), None, None, None, None, token_ids()), {}),
    "mask": lambda m: ((), {"input_ids": token_ids(), "attention_mask": padded(), "labels": token_ids()}),
    "bool mask": lambda m: ((), {"input_ids": token_ids(), "attention_mask": padded().bool()}),
    "mask of ones": lambda m: ((), {"input_ids": token_ids(), "attention_mask": torch.ones_like(token_ids())}),
    "tuple": lambda m: ((token_ids(),), {"labels": token_ids(), "return_dict": False}),
    "tuple of everything": lambda m: ((token_ids(),), {"return_dict": False, "output_hidden_states": True}),
    "return_dict=None": lambda m: ((token_ids(),), {"return_dict": None}),
    "hidden states": lambda m: ((token_ids(),), {"output_hidden_states": True, "labels": token_ids()}),
    "some hidden states": lambda m: ((token_ids(),), {"output_hidden_states": [0, -1]}),
    "last logits": lambda m: ((token_ids(),), {"logits_to_keep": 1}),
    "more logits than tokens": lambda m: ((token_ids(),), {"logits_to_keep": LENGTH + 3}),
    "chosen logits": lambda m: ((token_ids(),), {"logits_to_keep": torch.tensor([16, 0, 3, 3])}),
    "logits by mask": lambda m: ((token_ids(),), {"logits_to_keep": torch.arange(LENGTH) % 3 == 0}),
    **(
        {
            "logits by row": lambda m: ((token_ids(),), {"logits_to_keep": torch.tensor([[16, 0, 3], [1, 1, 8]])}),
            "logits by mask of rows": lambda m: ((token_ids(),), {"logits_to_keep": padded().bool()}),
        }
        if Version(transformers.__version__) >= Version("5.24")
        else {}
    ),
    "last logits of hidden states": lambda m: (
        (token_ids(),),
        {"logits_to_keep": 2, "output_hidden_states": True, "return_dict": False},
    ),
    "embeddings": lambda m: ((), {"inputs_embeds": embeddings(m), "labels": token_ids()}),
    "embeddings and mask": lambda m: ((), {"inputs_embeds": embeddings(m), "attention_mask": padded()}),
    "positions": lambda m: ((token_ids(),), {"position_ids": torch.arange(LENGTH).expand(BATCH, -1) + 3}),
    "positions of one row": lambda m: ((token_ids(),), {"position_ids": torch.arange(LENGTH)[None]}),
    "positions in three rows": lambda m: ((token_ids(),), {"position_ids": rows(3)}),
    "positions in four rows": lambda m: ((token_ids(),), {"position_ids": rows(4), "labels": token_ids()}),
    "shift_labels": lambda m: ((token_ids(),), {"labels": token_ids(), "shift_labels": token_ids(7)}),
    "item count": lambda m: ((token_ids(),), {"labels": token_ids(), "num_items_in_batch": torch.tensor(50)}),
    "item count as a number": lambda m: ((token_ids(),), {"labels": token_ids(), "num_items_in_batch": 50}),
    "one token": lambda m: ((token_ids(length=1),), {}),
    "int32 ids": lambda m: ((token_ids().int(),), {}),
}


def tensors(output: Any) -> list[Tensor | None]:
    """The tensors of a model output in order, nested ones too; absent hidden states stay as None."""
    items = list(output.values()) if hasattr(output, "values") else list(output)
    flat: list[Tensor | None] = []
    for item in items:
        flat += list(item) if isinstance(item, tuple) else [item]
    return flat


def compare_call(model: Any, stock: Any, name: str, stock_only: dict[str, Any] | None = None, **extra: Any) -> float:
    """Largest error of any tensor of the output; the outputs must have the same form."""
    args, kwargs = CALLS[name](stock)
    kwargs = kwargs | extra
    expected = stock(*args, use_cache=False, **(kwargs | (stock_only or {})))
    found = model(*args, **kwargs)
    assert type(found) is type(expected)
    if hasattr(expected, "keys"):
        assert list(found.keys()) == list(expected.keys())
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    assert pairs
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(relative_error(a, b) for a, b in pairs if a is not None and b is not None)


@pytest.mark.parametrize("name", CALLS)
def test_call_alone(name: str) -> None:
    model, stock = patched(two_layers()).eval(), two_layers().eval()
    assert compare_call(model, stock, name) < BOUND


def calls_in_group(rank: int, size: int, pair: tuple[str, str]) -> dict[str, float]:
    model, stock = patched(two_layers(), True, pair).eval(), two_layers().eval()
    errors = {name: compare_call(model, stock, name) for name in CALLS}
    with torch.no_grad():
        errors["no_grad"] = compare_call(model, stock, "hidden states")
    with torch.inference_mode():
        errors["inference_mode"] = compare_call(model, stock, "labels")
    # In training the loss is the same, and logits come only without labels.
    training = model.train()(input_ids=token_ids(), labels=token_ids())
    assert training.logits is None
    evaluated = stock(input_ids=token_ids(), labels=token_ids()).loss
    errors["train"] = relative_error(training.loss, evaluated)
    errors["train, no labels"] = compare_call(model, stock, "keywords")
    return errors


@pytest.mark.parametrize("pair", PAIRS)
def test_calls_in_group(world: Worlds, pair: tuple[str, str]) -> None:
    assert_small(world(2).run(calls_in_group, pair))


def configured_calls(rank: int, size: int) -> dict[str, float]:
    """What the config asks for is what a keyword would ask for."""
    errors = {}
    for group in (False, True):
        for name, value in (("return_dict", False), ("output_hidden_states", True), ("use_cache", False)):
            model, stock = patched(two_layers(), group).eval(), two_layers().eval()
            setattr(model.config, name, value)
            # Under return_dict=False in the config the stock head fails over its own decoder's tuple.
            asked: dict[str, Any] = {} if name == "use_cache" else {name: value}
            for call in ("labels", "keywords", "last logits"):
                errors[f"{group} {name} {call}"] = compare_call(model, stock, call, stock_only=asked)
            errors[f"{group} {name} decoder"] = compare_call(model.model, stock.model, "keywords", stock_only=asked)
            other: dict[str, Any] = {"return_dict": True, "output_hidden_states": False}
            errors[f"{group} {name} asked otherwise"] = compare_call(model, stock, "labels", **other)
    return errors


def test_config_defaults(world: Worlds) -> None:
    assert_small(world(2).run(configured_calls))


def decoder_calls(rank: int, size: int) -> dict[str, float]:
    """The decoder alone, patched as part of a head and on its own."""
    errors = {}
    for group in (False, True):
        stock = two_layers().eval().model
        for kind, decoder in (("part", patched(two_layers(), group).eval().model), ("own", two_layers().eval().model)):
            if kind == "own":
                patched(decoder, group)
            for name in ("keywords", "positional", "mask", "tuple of everything", "hidden states", "embeddings"):
                args, kwargs = CALLS[name](stock)
                kwargs.pop("labels", None)
                expected, found = stock(*args, use_cache=False, **kwargs), decoder(*args, **kwargs)
                assert type(found) is type(expected)
                errors[f"{group} {kind} {name}"] = max(map(relative_error, tensors(found), tensors(expected)))  # pyright: ignore
    return errors


def test_decoder_calls(world: Worlds) -> None:
    assert_small(world(2).run(decoder_calls))


def full_output_gradients(rank: int, size: int) -> dict[str, float]:
    """A loss that the user computes from whole logits or hidden states gives the gradients of one process."""
    errors = {}
    weights = torch.randn(BATCH, LENGTH, 97, generator=torch.Generator().manual_seed(3))

    def by_logits(model: Any) -> Tensor:
        return (model(input_ids=token_ids()).logits * weights).sum()

    def by_last_logits(model: Any) -> Tensor:
        return (model(input_ids=token_ids(), logits_to_keep=2).logits * weights[:, :2]).sum()

    def by_hidden_states(model: Any) -> Tensor:
        states = model(input_ids=token_ids(), output_hidden_states=True).hidden_states
        return sum(((i + 1) * (x * weights[..., :64]).sum() for i, x in enumerate(states)), torch.zeros(()))

    def by_decoder(model: Any) -> Tensor:
        return (model.model(input_ids=token_ids()).last_hidden_state * weights[..., :64]).sum()

    for loss in (by_logits, by_last_logits, by_hidden_states, by_decoder):
        found = {}
        for kind, model in (("stock", two_layers().train()), ("patched", patched(two_layers(), True).train())):
            loss(model).backward()
            if kind == "patched":
                hf_cp.average_gradients(model)
            found[kind] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        errors[loss.__name__] = worst(found["patched"], found["stock"])
    return errors


def test_gradients_of_whole_outputs(world: Worlds) -> None:
    assert_small(world(2).run(full_output_gradients))


# Generation.


def generations(rank: int, size: int, group: bool) -> None:
    model, stock = patched(tiny_qwen3_5(), group).eval(), tiny_qwen3_5().eval()
    ids = token_ids()
    left = torch.ones_like(ids)
    left[0, :5] = 0
    settings: list[dict[str, Any]] = [
        {"use_cache": True},
        {"use_cache": False},
        {"use_cache": True, "attention_mask": left},
        {"num_beams": 2},
    ]
    for setting in settings:
        found, expected = (
            m.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **setting) for m in (model, stock)
        )
        assert torch.equal(found, expected), setting
    # By hand: the prompt in two chunks, then token by token; and without a cache object at first.
    for given in (True, False):
        outputs = []
        for each in (model, stock):
            cache = DynamicCache(config=each.config) if given else None
            steps = []
            for part in (ids[:, :9], ids[:, 9:], ids[:, :1], ids[:, 1:2]):
                output = each(input_ids=part, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                steps.append(output.logits)
            outputs.append(torch.cat(steps, 1))
        assert relative_error(*outputs) < BOUND
    # The model still trains.
    assert model.train()(input_ids=ids, labels=ids).loss.isfinite()


def test_generate_alone() -> None:
    generations(0, 1, False)


def test_generate_in_group(world: Worlds) -> None:
    world(2).run(generations, True)


# Dtypes, attention implementations, dropout, frozen parts.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(world: Worlds, dtype: torch.dtype) -> None:
    assert_small(world(2).run(half_precision, dtype), 2.0)


def half_precision(rank: int, size: int, dtype: torch.dtype) -> dict[str, float]:
    """Errors against fp32 in units of the stock model's own."""
    inputs: dict[str, Any] = {"input_ids": token_ids(), "labels": token_ids()}
    exact = step(two_layers().train(), **inputs)[1]
    own = worst(step(two_layers().to(dtype).train(), **inputs)[1], exact)
    errors = {}
    for group in (False, True):
        model = patched(two_layers().to(dtype), group).train()
        loss, gradients = step(model, True, **inputs)
        assert all(g.dtype == dtype for g in gradients.values())
        errors[f"group {group}"] = worst(gradients, exact) / own
        assert model.eval()(input_ids=token_ids()).logits.dtype == dtype
        assert torch.isfinite(torch.tensor(loss))
    return errors


def reads_its_config(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Like flash attention, this function looks at the module's config and parameters."""
    assert module.config._attn_implementation == "reads_its_config"
    assert next(iter(module.parameters())).dtype == query.dtype
    assert isinstance(module.layer_idx, int)
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=kwargs["scaling"])
    return output.transpose(1, 2), None


AttentionInterface.register("reads_its_config", reads_its_config)


def attention_implementations(rank: int, size: int) -> dict[str, float]:
    errors = {}
    for name in ("eager", "sdpa", "reads_its_config"):
        for group in (False, True):
            for pair in PAIRS:
                if name == "reads_its_config" and (pair[1] == "allgather" and group):
                    continue
                stock, model = two_layers().eval(), patched(two_layers().eval(), group, pair)
                # Chosen after patching, as a user may.
                stock.set_attn_implementation(name)
                model.set_attn_implementation(name)
                for call in ("labels", "mask") if name != "reads_its_config" else ("labels",):
                    errors[f"{name} {group} {pair} {call}"] = compare_call(model, stock, call)
    return errors


def test_attention_implementations(world: Worlds) -> None:
    assert_small(world(2).run(attention_implementations))


class Squares(TorchDispatchMode):
    """The results that have two dims of at least `length`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and sum(size >= self.length for size in x.shape) > 1:
                self.found.append(f"{func}: {tuple(x.shape)}")
        return result


SQUARE_FREE: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "dense": lambda length: {},
    "packed": lambda length: {"cu_seq_lens_q": torch.tensor([0, length // 3, length], dtype=torch.int32)},
    "packed by positions": lambda length: {
        "position_ids": torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None]
    },
    "padded": lambda length: {"attention_mask": (torch.arange(length) < length - 5).long()[None]},
}


@pytest.mark.parametrize("case", SQUARE_FREE)
def test_no_mask_of_all_tokens_by_all(case: str) -> None:
    length = 1100  # above every other size of the small model
    model = hf_cp.patch(tiny_qwen3_5(), gdn_backend="eager").train()
    ids = torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(0))
    with Squares(length) as squares:
        model(input_ids=ids, labels=ids, **SQUARE_FREE[case](length)).loss.backward()
    assert not squares.found


def test_dropout_is_the_stock_models() -> None:
    ids, losses = token_ids(), []
    for model in (two_layers(attention_dropout=0.5).train(), patched(two_layers(attention_dropout=0.5).train())):
        torch.manual_seed(0)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
        assert model.model.layers[1].self_attn.attention_dropout == 0.5
        assert model(input_ids=ids, labels=ids).loss.item() != losses[-1]
        evaluated = [model.eval()(input_ids=ids, labels=ids).loss for _ in range(2)]
        assert torch.equal(*evaluated)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


FROZEN: dict[str, Callable[[str], bool]] = {
    "embeddings": lambda name: "embed_tokens" in name,
    "all but the last layer": lambda name: "layers.3" not in name,
    "all but one projection": lambda name: "layers.1.linear_attn.in_proj_b" not in name,
    "alternate layers": lambda name: "layers.0." in name or "layers.2." in name or "embed" in name,
    "all but the convolutions": lambda name: "conv1d" not in name,
}


def frozen_parts(rank: int, size: int, pair: tuple[str, str]) -> dict[str, float]:
    errors = {}
    for kind, is_frozen in FROZEN.items():
        results = []
        for model in (tiny_qwen3_5().train(), patched(tiny_qwen3_5().train(), True, pair)):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not is_frozen(name))
            results.append(step(model, bool(results), input_ids=token_ids(), labels=token_ids()))
        errors[kind] = worst(results[1][1], results[0][1])
    return errors


@pytest.mark.parametrize("pair", PAIRS)
def test_frozen_parts(world: Worlds, pair: tuple[str, str]) -> None:
    assert_small(world(2).run(frozen_parts, pair))


# Activation checkpointing.


def checkpointed(rank: int, size: int, reentrant: bool, pair: tuple[str, str]) -> dict[str, float]:
    inputs: dict[str, Any] = {"input_ids": token_ids(), "labels": token_ids(), "attention_mask": padded()}
    _, expected = step(tiny_qwen3_5().train(), **inputs)
    model = patched(tiny_qwen3_5().train(), True, pair)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    calls: list[tuple[int, list[Any]]] = []
    with CommunicationLog() as log:

        def before(module: nn.Module, args: Any, layer: int) -> None:
            calls.append((layer, [len(log.records)]))

        def after(module: nn.Module, args: Any, output: Any, layer: int) -> None:
            calls[-1][1][:] = log.records[calls[-1][1][0] :]

        for index, layer in enumerate(model.model.layers):
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            mixer.register_forward_pre_hook(partial(before, layer=index))
            mixer.register_forward_hook(partial(after, layer=index))
        loss = model(**inputs).loss
        forward = len(log.records)
        loss.backward()
    first, replay = calls[:4], calls[4:]
    assert [layer for layer, _ in first] == [0, 1, 2, 3]
    assert [layer for layer, _ in replay] == [3, 2, 1, 0]
    assert dict(first) == dict(replay)
    assert all(records for _, records in first)
    # The replays are all that backward sends beyond what it sends without checkpointing.
    backward = len(log.records) - forward
    with CommunicationLog() as plain:
        model.gradient_checkpointing_disable()
        loss = model(**inputs).loss
        assert len(plain.records) == forward
        loss.backward()
    assert backward - (len(plain.records) - forward) == sum(len(records) for _, records in first)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return {"gradients": worst(step(model, True, **inputs)[1], expected)}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_checkpointing(world: Worlds, reentrant: bool, pair: tuple[str, str]) -> None:
    assert_small(world(2).run(checkpointed, reentrant, pair))


# PEFT.


def adapted(order: str, group: bool) -> Any:
    """LoRA on every projection of the mixers, with weights that do something."""
    config = peft.LoraConfig(r=2, target_modules=MIXERS, init_lora_weights=False, lora_dropout=0.0)
    model = two_layers()
    if order == "after":
        patched(model, group)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config)
    if order == "before":
        patched(model, group)
    return model.train()


def lora(rank: int, size: int) -> dict[str, float]:
    inputs: dict[str, Any] = {"input_ids": token_ids(), "labels": token_ids()}
    errors: dict[str, float] = {}
    loss, expected = step(adapted("stock", False), **inputs)
    assert len(expected) == 2 * len(MIXERS)
    for order in ("before", "after"):
        for group in (False, True):
            model = adapted(order, group)
            found, gradients = step(model, True, **inputs)
            errors[f"{order} {group} loss"] = abs(found - loss) / loss
            errors[f"{order} {group} gradients"] = worst(gradients, expected)
            hf_cp.unpatch(model)
            errors[f"{order} {group} unpatched"] = worst(step(model, **inputs)[1], expected)
            merged = patched(model, group).merge_and_unload().eval()
            stock = adapted("stock", False).merge_and_unload().eval()
            errors[f"{order} {group} merged"] = compare_call(merged, stock, "labels")
    return errors


def test_lora(world: Worlds) -> None:
    assert_small(world(2).run(lora))


def test_adapter_keys_are_stock(tmp_path: Path) -> None:
    for order in ("stock", "before", "after"):
        adapted(order, False).save_pretrained(tmp_path / order)
    stock = peft.PeftModel.from_pretrained(two_layers(), tmp_path / "stock").state_dict()
    for order in ("before", "after"):
        found = peft.PeftModel.from_pretrained(two_layers(), tmp_path / order).state_dict()
        assert list(found) == list(stock)
        assert all(torch.equal(found[key], stock[key]) for key in stock)


# FSDP2.


def shard(model: Any, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded(rank: int, size: int) -> dict[str, float]:
    inputs: dict[str, Any] = {"input_ids": token_ids(), "labels": token_ids()}
    errors: dict[str, float] = {}
    loss, expected = step(two_layers().train(), **inputs)
    stock_names = [c.__name__ for c in classes(shard(two_layers(), size))]
    for order in ("patched first", "sharded first"):
        model = two_layers().train()
        if order == "patched first":
            shard(patched(model, True), size)
        else:
            patched(shard(model, size), True)
        for turn in range(2):
            found, gradients = step(model, **inputs)
            errors[f"{order} {turn} loss"] = abs(found - loss) / loss
            errors[f"{order} {turn} gradients"] = worst(gradients, expected)
        assert [c.__name__ for c in classes(model)] == stock_names
        hf_cp.unpatch(model)
        assert isinstance(model, FSDPModule)
        assert isinstance(model, Qwen3_5ForCausalLM)
        assert all(isinstance(layer, FSDPModule) for layer in model.model.layers)
        assert [c.__name__ for c in classes(model)] == stock_names
        assert not any(is_patched(m) or "_hf_cp" in vars(m) for m in model.modules())
        # Each rank has the whole batch, so the mean of the gradients is the gradient.
        found, gradients = step(model, **inputs, use_cache=False)
        errors[f"{order} unpatched loss"] = abs(found - loss) / loss
        errors[f"{order} unpatched gradients"] = worst(gradients, expected)
        patched(model, True, PAIRS[1])
        assert isinstance(model, FSDPModule)
        errors[f"{order} again"] = worst(step(model, **inputs)[1], expected)
    return errors


def test_fsdp2(world: Worlds) -> None:
    assert_small(world(2).run(sharded))


# Compilation.


def compiled(rank: int, size: int) -> dict[str, float]:
    """What talks to other ranks stays out of the graphs; the rest may be compiled."""
    inputs: dict[str, Any] = {"input_ids": token_ids(), "labels": token_ids(), "use_cache": False}
    model = two_layers(num_hidden_layers=1, layer_types=["linear_attention"]).train()
    loss, expected = step(model, **inputs)
    model.zero_grad(set_to_none=True)
    patched(model, True)
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    found = torch.compile(model, backend=backend)(**inputs).loss
    found.backward()
    hf_cp.average_gradients(model)
    assert graphs
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": abs(found.item() - loss) / loss, "gradients": worst(gradients, expected)}


def test_compiled(world: Worlds) -> None:
    assert_small(world(2).run(compiled, timeout=150.0))
