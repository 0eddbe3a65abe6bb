"""TRL's trainers around a patched model: the losses and the metrics of one process."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from test_families import small_model as sparse_model
from test_parity import assert_small, difference, gradients, token_ids, worst
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from training_runs import ADAM_EPSILON, LEARNING_RATE, Layout, environment_of, launched, whole_weights
from training_runs import Run as Environment
from transformers import PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import add_fused_lm_head

import hf_cp
from hf_cp.testing import CommunicationLog, World, tiny_qwen3_5

Worlds = Callable[..., World]
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
STEPS, ROWS = 2, 2


@dataclass(frozen=True)
class Run:
    """A TRL run: ``kind`` names data and options below; without a layout, stock and on one process."""

    kind: str
    layout: Layout | None = None
    accumulation: int = 1

    def __str__(self) -> str:
        return f"{self.kind}, {self.layout}"


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}w2 {% generation %}{{ message.content }} w96 "
    "{% endgeneration %}{% else %}w3 {{ message.content }} {% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = Tokenizer(WordLevel({f"w{index}": index for index in range(97)}, unk_token="w1"))
    vocabulary.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="w0", eos_token="w96", unk_token="w1", chat_template=TEMPLATE
    )


def words(ids: list[int]) -> str:
    return " ".join(f"w{index}" for index in ids)


def text(index: int, length: int) -> list[int]:
    return torch.randint(2, 96, (length,), generator=torch.Generator().manual_seed(index)).tolist()


def documents(count: int) -> list[list[int]]:
    return [text(index, 19 + 9 * (index % 4)) for index in range(count)]


def sft_rows(kind: str, count: int) -> Dataset:
    rows: list[dict[str, Any]] = [{"input_ids": ids} for ids in documents(count)]
    if "assistant" in kind:
        turns = [[text(4 * i + k, 7 + (i + k) % 5) for k in range(4)] for i in range(count)]
        roles = ("user", "assistant") * 2
        rows = [
            {"messages": [{"role": role, "content": words(ids)} for role, ids in zip(roles, turn, strict=True)]}
            for turn in turns
        ]
    if "completion" in kind:
        rows = [row | {"completion_mask": [int(i > 8) for i in range(len(row["input_ids"]))]} for row in rows]
    return Dataset.from_list(rows)


def pairs(count: int) -> Dataset:
    rows = [
        {
            "prompt": words(text(3 * index, 9 + index % 3)),
            "chosen": words(text(3 * index + 1, 14 + 3 * (index % 3))),
            "rejected": words(text(3 * index + 2, 21 - 2 * (index % 3))),
        }
        for index in range(count)
    ]
    return Dataset.from_list(rows)


def judged(count: int) -> Dataset:
    """Completions that are wanted or not, of which every batch has both."""
    rows = [
        {
            "prompt": words(text(2 * i, 9 + i % 3)),
            "completion": words(text(2 * i + 1, 23 - 3 * (i % 4))),
            "label": i % 2 == 0,
        }
        for i in range(count)
    ]
    return Dataset.from_list(rows)


def scored(count: int) -> Dataset:
    rows = [{"chosen": words(text(2 * i, 20 + i % 5)), "rejected": words(text(2 * i + 1, 25))} for i in range(count)]
    return Dataset.from_list(rows)


def half_log_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    total = torch.nn.functional.cross_entropy(logits.mT, targets, ignore_index=-100, reduction="sum")
    return 0.5 * total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())


def build_model(kind: str) -> Any:
    if kind.startswith("reward"):
        from test_classification import small_model

        return small_model("Qwen3_5TextForSequenceClassification", num_labels=1, **TWO_LAYERS)
    model = sparse_model("Qwen3_5Moe", **TWO_LAYERS) if "experts" in kind else tiny_qwen3_5(**TWO_LAYERS)
    model.config.pad_token_id = 0
    return model


def build_trainer(run: Run, folder: str) -> Any:
    kind, dp = run.kind, 1 if run.layout is None else run.layout.dp
    stock = run.layout is None
    model = build_model(kind)
    if not stock:
        hf_cp.patch(model, gdn_backend="eager")
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": ROWS // dp,
        "per_device_eval_batch_size": 2,
        "max_steps": STEPS,
        "gradient_accumulation_steps": run.accumulation,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": ADAM_EPSILON,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.25,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": "checkpointed" in kind,
        "seed": 0,
    }
    if run.layout is not None:
        options["parallelism_config"] = run.layout.config()
    count = STEPS * ROWS * run.accumulation
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer()}
    if kind.startswith("SFT"):
        if "smoothed" in kind:
            options["label_smoothing_factor"] = 0.2
        if "function" in kind:
            common["compute_loss_func"] = half_log_loss
        # What is one row to the patched model, packed, is as many padded rows to the stock one.
        options |= {"padding_free": "packed" in kind and not stock, "packing": "blocked" in kind}
        options |= {"assistant_only_loss": "assistant" in kind, "loss_type": "dft" if "DFT" in kind else "nll"}
        config: Any = SFTConfig(max_length=64 if "blocked" in kind else None, **options)
        return SFTTrainer(args=config, train_dataset=sft_rows(kind, count), eval_dataset=sft_rows(kind, 3), **common)
    if kind.startswith(("DPO", "KTO")):
        if "LoRA" in kind:
            common["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
        else:
            reference = build_model(kind)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.mul_(0.9)
            if not stock and "stock reference" not in kind:
                hf_cp.patch(reference, gdn_backend="eager")
            common["ref_model"] = reference
        if kind.startswith("KTO"):
            config = KTOConfig(max_length=None, **options)
            return KTOTrainer(args=config, train_dataset=judged(count), eval_dataset=judged(4), **common)
        config = DPOConfig(max_length=None, **options)
        return DPOTrainer(args=config, train_dataset=pairs(count), eval_dataset=pairs(3), **common)
    config = RewardConfig(max_length=None, **options)
    return RewardTrainer(args=config, train_dataset=scored(count), eval_dataset=scored(3), **common)


@dataclass
class Outcome:
    """Every number that a run logs, step by step, and the weights that it ends with."""

    logs: dict[str, list[float]]
    weights: dict[str, Tensor]
    notes: dict[str, Any]


TIMES = ("runtime", "per_second", "flos", "train_loss", "epoch", "step", "tps", "mfu")


def train(run: Run) -> Outcome:
    environment = Environment(layout=run.layout)
    with launched(environment_of(environment)), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = build_trainer(run, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        logs: dict[str, list[float]] = {}
        for entry in trainer.state.log_history:
            for name, value in entry.items():
                if not any(word in name for word in TIMES):
                    logs.setdefault(name, []).append(value)
        reference = getattr(trainer, "ref_model", None)
        state = None if reference is None else next((m.__dict__.get("_hf_cp") for m in reference.modules()), None)
        notes = {"reference ranks": None if state is None else state.mesh.cp_size}
        return Outcome(logs, whole_weights(trainer.model_wrapped), notes)


def train_on_rank(rank: int, size: int, run: Run) -> Outcome:
    return train(run)


@functools.cache
def train_on_one_process(run: Run) -> Outcome:
    return train(run)


def assert_same(found: list[Outcome], expected: Outcome, least: set[str]) -> None:
    assert least <= set(expected.logs)
    for outcome in found:
        assert set(outcome.logs) == set(expected.logs)
        for name, values in expected.logs.items():
            pairs = zip(outcome.logs[name], values, strict=True)
            # Rewards and divergences are differences of sums of log-probabilities that are far larger.
            least_scale = 1.0 if "rewards" in name or name in ("kl", "eval_kl") else 1e-2
            worst = max(abs(a - b) / max(abs(b), least_scale) for a, b in pairs)
            assert worst <= 2e-5, (name, outcome.logs[name], values)
        for name, weight in expected.weights.items():
            error = (outcome.weights[name] - weight).norm() / weight.norm().clamp(min=0.05)  # adapters begin at zero
            assert error <= 1e-4, name


FSDP, DDP = Layout("fsdp2", cp=2), Layout("ddp", cp=2)
METRICS = {"loss", "grad_norm", "eval_loss"}


@pytest.mark.parametrize(
    ("run", "least"),
    [
        (Run("SFT", FSDP, accumulation=2), ("entropy", "mean_token_accuracy", "num_tokens", "eval_entropy")),
        (Run("SFT, packed", FSDP), ("entropy", "mean_token_accuracy", "num_tokens")),
        (Run("SFT, assistant tokens, checkpointed", DDP), ("entropy", "mean_token_accuracy")),
        (Run("SFT, completion, DFT", Layout("ddp", cp=2, dp_replicate=2)), ("entropy", "mean_token_accuracy")),
        (Run("SFT, experts", DDP), ("entropy", "aux_loss")),
        (Run("SFT, smoothed", DDP), ("entropy",)),
        (Run("SFT, function", DDP, accumulation=2), ("entropy",)),
        (Run("DPO", DDP), ("rewards/margins", "logps/chosen", "num_tokens")),
        (Run("DPO", FSDP), ("rewards/margins", "logps/chosen")),
        (Run("DPO, stock reference", DDP), ("rewards/margins", "logps/chosen")),
        (Run("DPO, LoRA", FSDP), ("rewards/margins", "logps/chosen")),
        (Run("KTO", DDP), ("kl", "rewards/margins", "logps/chosen", "num_tokens")),
        (Run("KTO, LoRA", FSDP), ("kl", "rewards/margins", "logps/chosen")),
        (Run("reward", DDP), ("accuracy", "margin")),
    ],
    ids=str,
)
def test_trainer_equals_one_process(world: Worlds, run: Run, least: tuple[str, ...]) -> None:
    assert run.layout is not None
    expected = copy.copy(train_on_one_process(Run(run.kind.replace(", stock reference", ""), None, run.accumulation)))
    found = world(run.layout.world_size).run(train_on_rank, run, timeout=120)
    if run.layout.dp > 1:  # evaluation averages over other batches
        for outcome in (expected, *found):
            outcome.logs = {name: values for name, values in outcome.logs.items() if not name.startswith("eval_")}
    assert_same(found, expected, METRICS & set(expected.logs) | set(least))
    bound = {"DPO": run.layout.cp, "KTO": run.layout.cp, "DPO, stock reference": None}
    assert all(outcome.notes["reference ranks"] == bound.get(run.kind) for outcome in found)


def blocked(rank: int, size: int) -> str:
    with (
        launched({}),
        tempfile.TemporaryDirectory() as folder,
        pytest.raises(ValueError, match="Packing is not") as raised,
    ):
        build_trainer(Run("SFT, blocked", DDP), folder)
    return str(raised.value)


def test_packing_is_blocked_by_trl(world: Worlds) -> None:
    texts = world(2).run(blocked)
    assert texts[0] == texts[1]
    assert "\n" not in texts[0]
    assert "cp_size" in texts[0]


# The head itself.


def with_head(model: Any, group: bool) -> Any:
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"))
    return hf_cp.patch(model, gdn_backend="eager", cp_group=dist.group.WORLD) if group else model


def score(model: Any, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    """The scores, and the gradients of a loss made of them, alike on every rank."""
    model.zero_grad(set_to_none=True)
    output = model(**inputs, fused_lm_head=True)
    (output.loss + 0.1 * output.entropy.square().mean()).backward()
    if "_hf_cp" in model.__dict__:
        hf_cp.average_gradients(model)
    return output, gradients(model)


def head_case(rank: int, size: int) -> dict[str, float]:
    ids = token_ids(3, 41)
    labels = ids.masked_fill(ids % 4 == 0, -100)
    labels[1, :] = -100
    mask = (torch.arange(41) < torch.tensor([[41], [30], [12]])).long()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    errors = {}
    for name in ("dense", "experts"):
        model, stock = with_head(build_model(name).train(), True), with_head(build_model(name).train(), False)
        experts = {"output_router_logits": True} if name == "experts" else {}
        calls: dict[str, dict[str, Any]] = {
            "labels": {"labels": labels},
            "mask": {"labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask},
            "shifted labels and count": {"shift_labels": shifted, "num_items_in_batch": 57},
        }
        for call, inputs in calls.items():
            expected, right = score(stock, input_ids=ids, **inputs, **experts)
            with CommunicationLog() as log:
                found, wrong = score(model, input_ids=ids, **inputs, **experts)
            assert type(found) is type(expected)
            assert set(found.keys()) == set(expected.keys())
            gathered = [r.payload_bytes for r in log.records if r.name == "all_gather"]
            # Six numbers a token and not the hidden states, whose width is 64. Router logits are not gathered either.
            assert max(gathered) <= 3 * -(-41 // size) * 6 * 4
            for key, value in expected.items():
                assert found[key].dtype == value.dtype
                if value.dtype.is_floating_point:
                    errors[f"{name}, {call}: {key}"] = difference(found[key], value)
                else:
                    assert torch.equal(found[key], value), key
            errors[f"{name}, {call}: gradients"] = worst(wrong, right)
        with pytest.raises(ValueError, match="labels=None") as raised:
            model(input_ids=ids, fused_lm_head=True)
        assert "\n" not in str(raised.value)
        assert difference(model(input_ids=ids).logits, stock(input_ids=ids).logits) < 1e-5
        hf_cp.unpatch(model)
        errors[f"{name}, unpatched"] = worst(
            score(model, input_ids=ids, labels=labels, **experts)[1],
            score(stock, input_ids=ids, labels=labels, **experts)[1],
        )
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_head(world: Worlds, size: int) -> None:
    assert_small(world(size).run(head_case))
