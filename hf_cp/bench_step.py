"""The table ``step`` of `hf-cp bench`: a training step of a random Qwen3.5, patched and stock, on one device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .planning.memory import GIB, Training, estimate
from .planning.shape import FULL, LINEAR, PUBLISHED, ModelShape

CHECKED_TOKENS = 512
# A step of hundreds of thousands of tokens takes long: shorter ones compile and warm up as well.
WARM_UP_TOKENS = 32768
CHECKED_LAYERS = (LINEAR, FULL)
# Beyond stock's own error: what a loss near 12.4 may differ by in bf16.
LOSS_SLACK = 1e-3
# For machines without a GPU.
TINY = ModelShape(
    (LINEAR, LINEAR, LINEAR, FULL),
    hidden=64,
    vocab=256,
    ffn=96,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    key_heads=2,
    value_heads=4,
    key_dim=16,
    value_dim=16,
    taps=4,
    tied=True,
)
SHAPES = {"tiny": TINY} | {name: shape for name, shape in PUBLISHED.items() if not shape.experts}
COLUMNS = (
    "model",
    "layers",
    "tokens",
    "checkpointing",
    "layer code",
    "step ms",
    "min ms",
    "p90 ms",
    "forward ms",
    "backward ms",
    "optimizer ms",
    "tokens/s",
    "peak GiB",
    "reserved GiB",
    "estimated GiB",
    "note",
)


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        name: of the model. implementation: ``"stock"``, or a ``gdn_backend`` to patch with.
        precision: as in `Training`. repeats: warm-up steps and timed steps.
    """

    name: str
    shape: ModelShape
    implementation: str
    tokens: int
    checkpointing: bool
    precision: str
    device: str
    repeats: tuple[int, int]


def make_model(shape: ModelShape, device: str, dtype: torch.dtype) -> Any:
    """A random Qwen3.5 text model with a head, the same weights on every call."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rotary = shape.head_dim // 8  # pairs of a quarter of the head dim
    config = Qwen3_5TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=len(shape.layer_types),
        layer_types=list(shape.layer_types),
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=shape.key_dim,
        linear_value_head_dim=shape.value_dim,
        linear_conv_kernel_dim=shape.taps,
        tie_word_embeddings=shape.tied,
        use_cache=False,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3],
            "mrope_interleaved": True,
        },
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3_5ForCausalLM(config)
    return model.to(dtype).train()


def prepare(model: Any, implementation: str) -> Any:
    """The model as it is, or patched."""
    from .patch import patch

    return model if implementation == "stock" else patch(model, gdn_backend=implementation)


def token_ids(shape: ModelShape, tokens: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(0, shape.vocab, (1, tokens), device=device, generator=generator)


def _loss_and_gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


def errors(shape: ModelShape, implementation: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative L2 distance to fp64 of the loss and of every gradient of a short model of these widths."""
    shape = replace(shape, layer_types=CHECKED_LAYERS)
    ids = token_ids(shape, CHECKED_TOKENS, device)
    found = _loss_and_gradients(prepare(make_model(shape, device, dtype), implementation), ids)
    exact = _loss_and_gradients(prepare(make_model(shape, device, dtype).double(), "eager"), ids)
    return {name: float((found[name].double() - x).norm() / x.norm()) for name, x in exact.items()}


def refusal(found: dict[str, float], stock: dict[str, float]) -> str | None:
    """Why an implementation with these errors is not timed, or ``None``.

    Twice stock's own error is allowed; for a gradient, twice the median of stock's where its own happens to be less.
    """
    floor = statistics.median(error for name, error in stock.items() if name != "loss")
    for name, error in found.items():
        bound = 2 * stock[name] + LOSS_SLACK if name == "loss" else 2 * max(stock[name], floor)
        if not error <= bound:
            return f"{name} is {error:.1e} away from fp64, stock {stock[name]:.1e}, allowed {bound:.1e}"
    return None


class _Clock:
    """Times between marks, on the device's own clock where it has one."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between neighbouring marks, once the device has got there."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def train_step(model: Any, optimizer: Any, ids: torch.Tensor, mixed: bool) -> list[float]:
    """One step as Trainer takes it. Returns the milliseconds of forward, backward and optimizer."""
    clock = _Clock(ids.device.type)
    clock.mark()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=mixed):
        loss = model(input_ids=ids, labels=ids).loss
    clock.mark()
    loss.backward()
    clock.mark()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    clock.mark()
    return clock.milliseconds()


def measure(case: Case) -> dict[str, Any]:
    """The row of a case: times, tokens a second, peak memory beside what `hf-cp plan` expects."""
    training = Training(case.tokens, checkpointing=case.checkpointing, precision=case.precision)
    row: dict[str, Any] = {
        "model": case.name,
        "layers": len(case.shape.layer_types),
        "tokens": case.tokens,
        "checkpointing": "full" if case.checkpointing else "off",
        "layer code": case.implementation,
    }
    if case.implementation not in ("stock", "eager"):
        row["estimated GiB"] = estimate(case.shape, training).peak / GIB
    out_of_memory = None
    try:
        row |= _measured(case)
    except torch.OutOfMemoryError as error:
        out_of_memory = str(error).partition(". GPU")[0]
    if out_of_memory is not None:
        row["note"] = out_of_memory
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return row


def _measured(case: Case) -> dict[str, Any]:
    mixed = case.precision == "mixed"
    model = prepare(
        make_model(case.shape, case.device, torch.float32 if mixed else torch.bfloat16), case.implementation
    )
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = token_ids(case.shape, case.tokens, case.device)
    warm_up, repeats = case.repeats
    for _ in range(warm_up):
        train_step(model, optimizer, ids[:, :WARM_UP_TOKENS], mixed)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = [train_step(model, optimizer, ids, mixed) for _ in range(repeats)]
    totals = sorted(map(sum, steps))
    median = statistics.median(totals)
    parts = [statistics.median(part) for part in zip(*steps, strict=True)]
    row: dict[str, Any] = {
        "step ms": median,
        "min ms": totals[0],
        "p90 ms": totals[min(len(totals) - 1, round(0.9 * (len(totals) - 1)))],
        **dict(zip(("forward ms", "backward ms", "optimizer ms"), parts, strict=True)),
        "tokens/s": round(case.tokens / median * 1e3),
    }
    if case.device == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
    return row


def fitting_layers(shape: ModelShape, training: Training, gpu_bytes: float) -> ModelShape:
    """The shape with as many whole periods of four layers as fit, at least one."""
    count = len(shape.layer_types)
    while count > 4 and estimate(shape.with_layers(count), training).peak > gpu_bytes:
        count -= 4
    return shape.with_layers(count)


def longest(shape: ModelShape, training: Training, gpu_bytes: float) -> int:
    """The largest multiple of 8,192 tokens whose step fits, at least one."""
    tokens = 8192
    while estimate(shape, replace(training, seq_len=tokens + 8192)).peak <= gpu_bytes:
        tokens += 8192
    return tokens


def cases(arguments: Any, gpu_bytes: float) -> list[Case]:
    """The rows that the command line asks for; what does not fit by the estimate is cut in layers.

    Raises:
        ValueError: a model or a number that is not known.
    """
    found = []
    for name in arguments.models.split(","):
        if name not in SHAPES:
            raise ValueError(f"--models has {name!r}: give some of {', '.join(SHAPES)}")
        for tokens in arguments.tokens.split(","):
            for checkpointing in arguments.checkpointing.split(","):
                if checkpointing not in ("off", "full"):
                    raise ValueError(f"--checkpointing has {checkpointing!r}: give off, full or off,full")
                shape = SHAPES[name].with_layers(arguments.layers or len(SHAPES[name].layer_types))
                training = Training(8192, checkpointing=checkpointing == "full", precision=arguments.precision)
                length = longest(shape, training, gpu_bytes) if tokens == "longest" else int(tokens)
                if arguments.device == "cuda":
                    shape = fitting_layers(shape, replace(training, seq_len=length), gpu_bytes)
                for implementation in arguments.layer_code.split(","):
                    slow = implementation in ("stock", "eager") or length > 2 * WARM_UP_TOKENS
                    found.append(
                        Case(
                            name,
                            shape,
                            implementation,
                            length,
                            training.checkpointing,
                            training.precision,
                            arguments.device,
                            (1, 2) if slow else (3, 10),
                        )
                    )
    return found


def check(names: Sequence[str], implementations: Sequence[str], device: str, say: Any) -> None:
    """Compare every implementation with fp64 at the widths of every model.

    Raises:
        ValueError: one is further away than stock's own error permits; nothing is timed then.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name in names:
        stock = errors(SHAPES[name], "stock", device, dtype)
        for implementation in implementations:
            if implementation == "stock":
                continue
            found = errors(SHAPES[name], implementation, device, dtype)
            reason = refusal(found, stock)
            if reason is not None:
                raise ValueError(f"{implementation} is not timed: {name}: {reason}")
            worst, stocks = max(found.values()), max(stock.values())
            say(f"{name}: {implementation} is at most {worst:.1e} away from fp64, stock {stocks:.1e}")
