"""The table ``step`` of `hf-cp bench`: a training step of a random Qwen3.5, on one device or between ranks.

Between ranks, the sequence is spread over all of them, and FSDP2 spreads the parameters over the same ranks, a unit a
decoder layer and one for the rest, with weights in fp32 computed with and reduced in bf16, as the recipes have it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .bench_ranks import Ranks, timed, write_trace
from .planning.memory import GIB, Training, estimate
from .planning.shape import FULL, LINEAR, PUBLISHED, ModelShape

CHECKED_TOKENS = 512
# A step of hundreds of thousands of tokens takes long: shorter ones compile and warm up as well.
WARM_UP_TOKENS = 32768
CHECKED_LAYERS = (LINEAR, FULL)
# Beyond stock's own error: what a loss near 12.4, and a norm over all gradients, may differ by in bf16.
NORM = "gradient norm"
SLACK = {"loss": 1e-3, NORM: 4e-3}
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
# The four and eight layers that the tables between ranks are about; what the layers do not fix is as in the 2B model.
REPORT = replace(PUBLISHED["2B"].with_layers(8), key_heads=16, value_heads=32)
SHAPES = {"tiny": TINY, "report": REPORT} | {name: shape for name, shape in PUBLISHED.items() if not shape.experts}
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
RANK_COLUMNS = (*COLUMNS[:2], "mode", "ranks", "tokens", "local tokens", *COLUMNS[3:])


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        name: of the model. implementation: ``"stock"``, or a ``gdn_backend`` to patch with.
        tokens: of the whole sequence.
        precision: as in `Training`. repeats: warm-up steps and timed steps.
        settings: further arguments of `hf_cp.patch`: modes and projections.
        liger: whether norms and MLPs run on Liger's kernels.
        lora: rank of adapters on every linear module but the head, all other weights frozen in bf16; 0 for none.
        compiled: whether `torch.compile` gets the model.
        documents: packed into the row, of one length but for the last.
    """

    name: str
    shape: ModelShape
    implementation: str
    tokens: int
    checkpointing: bool
    precision: str
    repeats: tuple[int, int]
    settings: dict[str, str] = field(default_factory=dict)
    liger: bool = False
    lora: int = 0
    compiled: bool = False
    documents: int = 1

    @property
    def code(self) -> str:
        """What computes the layers, as a row shows it."""
        beside = {"liger": self.liger, f"lora {self.lora}": self.lora, "compiled": self.compiled}
        beside[f"{self.documents} documents"] = self.documents > 1
        return ", ".join([self.implementation, *(name for name, there in beside.items() if there)])

    @property
    def mode(self) -> str:
        """Linear and attention mode, and how projections run where they are fused; empty on one device."""
        modes = "/".join(self.settings[key] for key in ("linear_mode", "attention_mode") if key in self.settings)
        return f"{modes}, fused" if self.settings.get("projection_backend") == "fused" else modes

    def training(self, ranks: int) -> Training:
        """What `hf-cp plan` is asked about."""
        modes: Any = {key: x for key, x in self.settings.items() if key in ("linear_mode", "attention_mode")}
        return Training(
            self.tokens,
            cp_size=ranks,
            shards=ranks,
            checkpointing=self.checkpointing,
            precision=self.precision,
            lora=self.lora,
            **modes,
        )


def text_config(shape: ModelShape) -> Any:
    """The shape as a config of transformers."""
    from transformers import Qwen3_5TextConfig

    rotary = shape.head_dim // 8  # pairs of a quarter of the head dim
    return Qwen3_5TextConfig(
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


def make_model(shape: ModelShape, device: str | torch.device, dtype: torch.dtype, lora: int = 0) -> Any:
    """A random Qwen3.5 text model with a head, the same weights on every call.

    Args:
        lora: rank of adapters on every linear module but the head, both matrices random and in fp32; 0 for none.
    """
    from transformers import Qwen3_5ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3_5ForCausalLM(text_config(shape))
    model = model.to(dtype)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        how: Any = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, **how))
    return model.train()


def check_liger(device: str) -> None:
    """Raise where Liger's kernels cannot run.

    Raises:
        ValueError: it is not installed, or there is no GPU.
    """
    if find_spec("liger_kernel") is None:
        raise ValueError("--liger: liger-kernel is not installed: pip install liger-kernel")
    if device != "cuda":
        raise ValueError("--liger: its kernels run on GPUs only: drop it, or --device cpu")


def check_lora(precision: str) -> None:
    """Raise where models with adapters cannot be made.

    Raises:
        ValueError: PEFT is not installed, or another precision is asked for.
    """
    if find_spec("peft") is None:
        raise ValueError("--lora: peft is not installed: pip install peft")
    if precision != "mixed":
        raise ValueError(f"--lora: --precision {precision}: adapters in fp32 beside frozen bf16: give mixed, or none")


def model_of(case: Case, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of a case before it is patched, with the layers of ``shape``."""
    model = make_model(shape, device, dtype, case.lora)
    if case.liger:
        import liger_kernel.transformers as liger  # pyright: ignore[reportMissingImports]
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

        # It also replaces classes for the whole process, in which models without it are made too.
        classes = modeling.Qwen3_5RMSNorm, modeling.Qwen3_5MLP
        # Its loss would take the place of the patched model's.
        liger.apply_liger_kernel_to_qwen3_5(model=_base(model), fused_linear_cross_entropy=False)
        modeling.Qwen3_5RMSNorm, modeling.Qwen3_5MLP = classes
    return model


def _base(model: Any) -> Any:
    """The model of transformers, without what PEFT puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def prepare(model: Any, implementation: str, compiled: bool = False) -> Any:
    """The model as it is, or patched for one device."""
    from .patch import patch

    model = model if implementation == "stock" else patch(model, gdn_backend=implementation)
    if compiled:
        model.compile()
    return model


def spread(model: Any, case: Case, ranks: Ranks) -> Any:
    """The model patched for these ranks, its parameters sharded over them."""
    from .patch import patch

    group = ranks.mesh.group
    assert group is not None
    patch(model, gdn_backend=case.implementation, cp_group=group, **case.settings)
    device_mesh = DeviceMesh.from_group(group, ranks.device.type)
    policy = MixedPrecisionPolicy()
    if case.precision == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in _base(model).model.layers:
        fully_shard(layer, mesh=device_mesh, mp_policy=policy)
    return fully_shard(model, mesh=device_mesh, mp_policy=policy)


def inputs_of(case: Case, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A row of random tokens, its labels, and for packed documents positions that restart, ``[1, tokens]`` each."""
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, case.shape.vocab, (1, tokens), device=device, generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if case.documents > 1:
        inputs["position_ids"] = torch.arange(tokens, device=device)[None] % -(-tokens // case.documents)
    return inputs


def _loss_and_gradients(model: Any, inputs: dict[str, torch.Tensor], autocast: bool = False) -> dict[str, torch.Tensor]:
    with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        loss = model(**inputs).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            p.grad = None
    norms = [x.double().norm() for name, x in found.items() if name != "loss"]
    return found | {NORM: torch.stack(norms).norm()}


def exact(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Loss, gradients and their norm of a short model of these widths in fp64, its weights rounded to ``dtype``."""
    shape = replace(case.shape, layer_types=CHECKED_LAYERS)
    model = prepare(make_model(shape, device, dtype, case.lora).double(), "eager")
    return _loss_and_gradients(model, inputs_of(case, CHECKED_TOKENS, device))


def errors(case: Case, ranks: Ranks, dtype: torch.dtype, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 distances to the exact results, the same numbers on every rank. Without modes each runs by itself."""
    shape = replace(case.shape, layer_types=CHECKED_LAYERS)
    sharded = ranks.size > 1 and bool(case.settings)
    if sharded:
        model = spread(model_of(case, shape, ranks.device, weights_dtype(case)), case, ranks)
    else:
        model = prepare(model_of(case, shape, ranks.device, dtype), case.implementation, case.compiled)
    # Without adapters, weights of one device are rounded before.
    autocast = bool(case.lora) and not sharded and dtype == torch.bfloat16
    found = _loss_and_gradients(model, inputs_of(case, CHECKED_TOKENS, ranks.device), autocast)
    distances = [float((found[name].double() - x).norm() / x.norm()) for name, x in expected.items()]
    return dict(zip(expected, ranks.largest(distances), strict=True))


def weights_dtype(case: Case) -> torch.dtype:
    return torch.float32 if case.precision == "mixed" and not case.lora else torch.bfloat16


def refusal(found: dict[str, float], stock: dict[str, float], measure: str = "stock") -> str | None:
    """Why an implementation with these errors is not timed, or ``None``.

    Twice stock's own error is allowed; for a gradient, twice the median of stock's where its own happens to be less.

    Args:
        measure: what ``stock`` is called, where it is the error of something else.
    """
    floor = statistics.median(error for name, error in stock.items() if name not in SLACK)
    for name, error in found.items():
        bound = 2 * stock[name] + SLACK[name] if name in SLACK else 2 * max(stock[name], floor)
        if not error <= bound:
            return f"{name} is {error:.1e} away from fp64, {measure} {stock[name]:.1e}, allowed {bound:.1e}"
    return None


def train_step(
    model: Any, optimizer: Any, inputs: dict[str, torch.Tensor], mixed: bool, mark: Callable[[], None]
) -> None:
    """One step as Trainer takes it, marked where forward and backward end."""
    with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16, enabled=mixed):
        loss = model(**inputs).loss
    mark()
    loss.backward()
    mark()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def measure(case: Case, ranks: Ranks, room: float, traces: Path | None) -> dict[str, Any]:
    """The row of a case: times, tokens a second, peak memory beside what `hf-cp plan` expects.

    On one device, running out of memory is a note in the row. Between ranks, where the others would wait, a step is
    not tried if the estimate exceeds ``room``.
    """
    row: dict[str, Any] = {"model": case.name, "layers": len(case.shape.layer_types)}
    if ranks.size > 1:
        row |= {"mode": case.mode, "ranks": ranks.size}
    row["tokens"] = case.tokens
    if ranks.size > 1:
        row["local tokens"] = case.tokens // ranks.size
    row |= {"checkpointing": "full" if case.checkpointing else "off", "layer code": case.code}
    estimated = 0.0
    if case.implementation not in ("stock", "eager"):
        estimated = estimate(case.shape, case.training(ranks.size)).peak
        if not (case.liger or case.compiled):  # which keep less
            row["estimated GiB"] = estimated / GIB
    if ranks.size > 1 and ranks.device.type == "cuda" and estimated > room:
        return row | {"note": f"not tried: more than {room / GIB:.0f} GiB by the estimate"}
    out_of_memory = None
    try:
        row |= _measured(case, ranks, traces)
    except torch.OutOfMemoryError as error:
        if ranks.size > 1:
            raise
        out_of_memory = str(error).partition(". GPU")[0]
    if out_of_memory is not None:
        row["note"] = out_of_memory
    gc.collect()
    ranks.forget_peaks()
    return row


def _measured(case: Case, ranks: Ranks, traces: Path | None) -> dict[str, Any]:
    model = model_of(case, case.shape, ranks.device, weights_dtype(case))
    model = spread(model, case, ranks) if ranks.size > 1 else prepare(model, case.implementation, case.compiled)
    # FSDP's policy does it between ranks.
    autocast = case.precision == "mixed" and ranks.size == 1
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01, fused=True)
    inputs = inputs_of(case, case.tokens, ranks.device)
    shorter = {name: x[:, : WARM_UP_TOKENS * ranks.size] for name, x in inputs.items()}
    warm_up, repeats = case.repeats
    for _ in range(warm_up):
        train_step(model, optimizer, shorter, autocast, lambda: None)
    ranks.forget_peaks()

    def step(mark: Callable[[], None]) -> None:
        train_step(model, optimizer, inputs, autocast, mark)

    timing = timed(step, ranks, 0, repeats)
    row: dict[str, Any] = {
        "step ms": timing.median,
        "min ms": timing.least,
        "p90 ms": timing.p90,
        **dict(zip(("forward ms", "backward ms", "optimizer ms"), timing.part_medians, strict=True)),
        "tokens/s": round(case.tokens / timing.median * 1e3),
    }
    if ranks.device.type == "cuda":
        allocated, reserved = ranks.peaks()
        row |= {"peak GiB": allocated / GIB, "reserved GiB": reserved / GIB}
    if traces is not None:
        parts = ["step", case.name, f"{len(case.shape.layer_types)}layers", *case.code.replace(" ", "").split(",")]
        parts += [part for part in case.mode.replace(",", "/").replace(" ", "").split("/") if part]
        parts += [f"{ranks.size}x{case.tokens // ranks.size}", "full" if case.checkpointing else "off"]
        write_trace(step, ranks, traces, "-".join(parts))
    return row


def fit(layers: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """a and b of ``T = a + b x layers``, by least squares.

    Raises:
        ValueError: fewer than two numbers of layers.
    """
    if len(set(layers)) < 2:
        raise ValueError(f"layers={sorted(set(layers))}: a line needs two numbers of layers")
    x, t = statistics.fmean(layers), statistics.fmean(times)
    slope = sum((a - x) * (b - t) for a, b in zip(layers, times, strict=True)) / sum((a - x) ** 2 for a in layers)
    return t - slope * x, slope


def fits(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every model and setting that was timed at two or more numbers of layers, with the line as its note."""
    same = ("model", "mode", "ranks", "tokens", "local tokens", "checkpointing", "layer code")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "step ms" in row:
            groups.setdefault(tuple(row.get(key) for key in same), []).append(row)
    found = []
    for values, members in groups.items():
        layers = [row["layers"] for row in members]
        if len(set(layers)) > 1:
            constant, slope = fit(layers, [row["step ms"] for row in members])
            note = f"T = {constant:.2f} ms + {slope:.2f} ms x layers"
            named = {key: value for key, value in zip(same, values, strict=True) if value is not None}
            found.append({"model": named.pop("model"), "layers": "fit", **named, "note": note})
    return found


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


def cases(arguments: Any, variants: Sequence[tuple[str, dict[str, str]]], ranks: int, room: float) -> list[Case]:
    """The rows that the command line asks for; what does not fit by the estimate is cut in layers.

    Args:
        variants: implementations with further arguments of `hf_cp.patch`.
        ranks: that share a sequence.
        room: bytes that the estimate may fill on a GPU; 0 without one.

    Raises:
        ValueError: a model or a number that is not known.
    """
    found = []
    for checkpointing in arguments.checkpointing.split(","):
        if checkpointing not in ("off", "full"):
            raise ValueError(f"--checkpointing has {checkpointing!r}: give off, full or off,full")
    for name in arguments.models.split(","):
        if name not in SHAPES:
            raise ValueError(f"--models has {name!r}: give some of {', '.join(SHAPES)}")
    for layers in (arguments.layers or "1").split(","):
        if not layers.isdecimal() or int(layers) < 1:
            raise ValueError(f"--layers has {layers!r}: give positive numbers")
    asked = product(
        arguments.models.split(","),
        arguments.tokens.split(","),
        arguments.checkpointing.split(","),
        (arguments.layers or "0").split(","),
        variants,
    )
    for name, tokens, checkpointing, layers, (implementation, settings) in asked:
        shape = SHAPES[name].with_layers(int(layers) or len(SHAPES[name].layer_types))
        if arguments.vocab:
            shape = replace(shape, vocab=arguments.vocab)
        how: Any = {"liger": arguments.liger, "lora": arguments.lora, "compiled": arguments.compile}
        how |= {"settings": settings, "documents": arguments.documents}
        case = Case(name, shape, implementation, 8192, checkpointing == "full", arguments.precision, (3, 10), **how)
        length = longest(shape, case.training(ranks), room) if tokens == "longest" else int(tokens)
        case = replace(case, tokens=length)
        if room:
            case = replace(case, shape=fitting_layers(shape, case.training(ranks), room))
        slow = implementation in ("stock", "eager") or length > 2 * WARM_UP_TOKENS * ranks
        repeats = (5, 20) if ranks > 1 else (3, 10)
        found.append(replace(case, repeats=(1, 2) if slow else repeats))
    return found


def check(found: Sequence[Case], ranks: Ranks, say: Callable[[str], None]) -> None:
    """Compare every implementation and mode with fp64 at the widths of every model.

    Raises:
        ValueError: one is further away than stock's own error permits; nothing is timed then.
    """
    dtype = torch.bfloat16 if ranks.device.type == "cuda" or ranks.size > 1 else torch.float32
    for name in dict.fromkeys(case.name for case in found):
        different = {(case.implementation, case.mode): case for case in found if case.name == name}
        sample = next(iter(different.values()))
        expected = exact(sample, ranks.device, dtype)
        # Stock does not pack documents, where sums cancel elsewhere: pure torch on one device is the measure then.
        measure = "stock" if sample.documents == 1 else "eager"
        plain = replace(sample, implementation=measure, settings={}, liger=False, compiled=False)
        stock = errors(plain, ranks, dtype, expected)
        for (_, mode), case in different.items():
            if measure == "stock" and case.code == plain.code:
                continue
            measured = errors(case, ranks, dtype, expected)
            code = f"{case.code}, {mode}" if mode else case.code
            reason = refusal(measured, stock, measure)
            if reason is not None:
                raise ValueError(f"{code} is not timed: {name}: {reason}")
            worst, stocks = max(measured.values()), max(stock.values())
            say(
                f"{name}: {code} is at most {worst:.1e} away from fp64, {measure} {stocks:.1e}; "
                f"loss {measured['loss']:.1e}, {NORM} {measured[NORM]:.1e}"
            )
