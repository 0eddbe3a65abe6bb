"""A patched model with the GPU kernels, on one rank and on two that share a card, against the reference in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_cp
from hf_cp.config import PatchConfig
from hf_cp.kernels.gdn import chunk_gated_delta_rule, layer
from hf_cp.testing import World, relative_error, tiny_qwen3_5

Worlds = Callable[..., World]
DOCUMENTS = [0, 3, 70, 400, 401, 1000]
# In bf16 rounding decides, and the kernels round in other places than the reference.
WORST, SLACK = 1.5, 2e-3


def model_of(backend: str, dtype: torch.dtype) -> Any:
    dim = 128 if backend == "gluon" else 64
    fields = {"linear_key_head_dim": dim, "linear_value_head_dim": dim, "linear_num_key_heads": 2}
    model = tiny_qwen3_5(**fields, linear_num_value_heads=4).train().cuda()
    # Both dtypes compute with the same weights.
    model.bfloat16()
    return model.to(dtype)


def token_ids(length: int) -> Tensor:
    return torch.randint(1, 97, (2, length), generator=torch.Generator().manual_seed(length)).cuda()


def quantities(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Loss, logits and every gradient, averaged over the group where the model is patched."""
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        logits = model(**inputs).logits
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    if "_hf_cp" in model.__dict__:
        hf_cp.average_gradients(model)
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach()[None], "logits": logits, **gradients}


def against_reference(
    rank: int, size: int, backend: str, dtype: torch.dtype, packed: bool
) -> dict[str, tuple[float, float]]:
    """Errors with the backend, and with the reference in the same dtype, both against the reference in fp32."""
    inputs: dict[str, Tensor] = {"input_ids": token_ids(1000)}
    if packed:
        inputs["input_ids"] = inputs["input_ids"][:1]
        lengths = torch.tensor(DOCUMENTS).diff().tolist()
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    model = model_of(backend, dtype)
    settings: dict[str, Any] = {"cp_group": dist.group.WORLD}

    def eager(dtype: torch.dtype) -> dict[str, Tensor]:
        return quantities(hf_cp.patch(model_of(backend, dtype), gdn_backend="eager", **settings), **inputs)

    expected, rounded = eager(torch.float32), eager(dtype)
    total = torch.stack([x.norm() for name, x in expected.items() if "gradient" in name]).norm()

    def error(found: dict[str, Tensor], name: str) -> float:
        """Relative; that of a gradient to at least a hundredth of all of them: small ones are sums that cancel."""
        norm = expected[name].norm()
        difference = (found[name].float() - expected[name]).norm()
        relative = float(difference / (torch.maximum(norm, 0.01 * total) if "gradient" in name else norm))
        return relative if relative == relative else float("inf")

    errors = {}
    for mode in PatchConfig.CHOICES["linear_mode"][: None if size > 1 else 1]:
        found = quantities(hf_cp.patch(model, linear_mode=mode, gdn_backend=backend, **settings), **inputs)
        hf_cp.unpatch(model)
        errors |= {f"{mode}: {name}": (error(found, name), error(rounded, name)) for name in expected}
    return errors


@pytest.mark.gpu(1)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("triton", torch.float32), ("triton", torch.bfloat16), ("gluon", torch.bfloat16)]
)
@pytest.mark.parametrize("size", [1, 2])
def test_gpu_kernels_in_a_model(world: Worlds, size: int, backend: str, dtype: torch.dtype, packed: bool) -> None:
    results = world(size).run(against_reference, backend, dtype, packed, timeout=300)
    assert all(results)
    bad = {
        (rank, name): error
        for rank, errors in enumerate(results)
        for name, error in errors.items()
        if not error[0] <= (1e-4 if dtype == torch.float32 else WORST * error[1] + SLACK)
    }
    assert not bad, bad


def steps_that_wait_for_nothing(rank: int, size: int, backend: str) -> None:
    """Forward and backward, once everything is compiled; and a layer's operators over packed documents."""
    model = hf_cp.patch(model_of(backend, torch.bfloat16), gdn_backend=backend)
    ids = token_ids(1000)
    q, k = (torch.randn(1, 1000, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, 1000, 4, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    g, beta = -torch.rand(1, 1000, 4, device="cuda"), torch.rand(1, 1000, 4, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor(DOCUMENTS, device="cuda", dtype=torch.int32)
    weight = torch.randn(512, 4, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        (x,) = layer.causal_conv1d(v.flatten(2), weight, cu_seqlens=offsets, backend=backend)
        o, _ = chunk_gated_delta_rule(q, k, x.view_as(v), g, beta, cu_seqlens=offsets, backend=backend)
        o.sum().backward()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_gpu_steps_wait_for_nothing(world: Worlds, backend: str) -> None:
    world(1).run(steps_that_wait_for_nothing, backend, timeout=300)


def compiled_by_lengths(rank: int, size: int, backend: str) -> list[str]:
    """What Triton compiles in steps of 50 lengths, after two whose lengths have nothing in common."""
    from triton import knobs  # pyright: ignore[reportMissingImports]

    model = hf_cp.patch(model_of(backend, torch.bfloat16), gdn_backend=backend)
    for length in (1000, 7):
        quantities(model, input_ids=token_ids(length))
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "jit_cache_hook", lambda **what: names.append(what["repr"]))
        for length in range(2, 2000, 40):
            quantities(model, input_ids=token_ids(length))
        found = list(names)
        # A size that nothing else has: what is compiled is seen.
        x = torch.randn(2, 3, 24, device="cuda")
        layer.gated_rms_norm(x, x, x[0, 0].contiguous(), 1e-6, backend="triton")
        assert len(names) > len(found)
    return found


@pytest.mark.gpu(1)
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_gpu_no_length_is_compiled_for(world: Worlds, backend: str) -> None:
    (names,) = world(1).run(compiled_by_lengths, backend, timeout=300)
    assert not names, names


def cached(rank: int, size: int, backend: str) -> dict[str, float]:
    """Logits of a prompt in two parts and three tokens one by one, against one call over all of them."""
    model = hf_cp.patch(model_of(backend, torch.bfloat16).eval(), gdn_backend=backend)
    ids = token_ids(103)
    errors = {}
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        cache = None
        for begin, end in ((0, 70), (70, 100), (100, 101), (101, 102), (102, 103)):
            output = model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            errors[f"{begin} to {end}"] = relative_error(output.logits, expected[:, begin:end])
    return errors


@pytest.mark.gpu(1)
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_gpu_kernels_behind_a_cache(world: Worlds, backend: str) -> None:
    (errors,) = world(1).run(cached, backend, timeout=300)
    assert max(errors.values()) < 2e-2, errors


def refused_dtype(rank: int, size: int) -> str:
    model = hf_cp.patch(model_of("gluon", torch.float32), gdn_backend="gluon", cp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="gdn_backend") as error:
        model(input_ids=token_ids(100), labels=token_ids(100))
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=token_ids(100), labels=token_ids(100)).loss
    assert torch.isfinite(loss)
    return str(error.value)


@pytest.mark.gpu(1)
def test_gluon_computes_in_16_bits(world: Worlds) -> None:
    """Weights in fp32 are refused where they are computed with as such, and served under autocast."""
    messages = world(2).run(refused_dtype, timeout=300)
    reason = "dtype torch.float32 is not one of torch.bfloat16, torch.float16"
    assert set(messages) == {f'gdn_backend="gluon" cannot run: {reason}; pass gdn_backend="triton" or "eager"'}
