"""The recipes: launch configurations, data, a stock run, resuming, and the demo from end to end."""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import yaml
from datasets import Dataset
from forked_scripts import run_script
from safetensors.torch import load_file
from training_runs import FSDP2, Layout, sizes_environment
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    TrainingArguments,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_cp import bench, cli
from hf_cp.kernels.gdn import bench as gdn_bench
from hf_cp.planning.launch import script_options
from hf_cp.planning.memory import Training
from hf_cp.testing import free_port

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CONFIGS = sorted(RECIPES.glob("*.yaml"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


demo = load("demo")
sft = load("sft")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    documents = demo.documentation()
    return [next(documents) for _ in range(12)]


@pytest.fixture(scope="module")
def tokenizer_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.train_tokenizer(texts, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="module")
def text_file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sizes_of_a_launch_configuration_fit(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    sizes = config.get("parallelism_config", {})
    product = math.prod(sizes.get(f"parallelism_config_{axis}_size", 1) for axis in ("dp_replicate", "dp_shard", "cp"))
    assert product == config["num_processes"]
    assert config["num_processes"] % config["num_machines"] == 0
    if config["distributed_type"] == "FSDP":
        assert hasattr(modeling_qwen3_5, config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"])
    assert path.name in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_knows_every_key_of_a_launch_configuration(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    load_config_from_file(str(path))


def test_options_of_the_launcher_come_before_its_configuration() -> None:
    """What the README and the table of plans say: a mesh or a layer's name without a file of their own."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    options = ["--parallelism_config_cp_size", "4", "--parallelism_config_dp_shard_size", "2"]
    options += ["--fsdp_transformer_layer_cls_to_wrap", "Qwen3_5MoeDecoderLayer"]
    command = ["--config_file", str(RECIPES / "gpu_x8.yaml"), *options, "sft.py"]
    found = _validate_launch_command(launch_command_parser().parse_args(command))[0]
    assert (found.parallelism_config_cp_size, found.parallelism_config_dp_shard_size) == (4, 2)
    assert found.fsdp_transformer_layer_cls_to_wrap == "Qwen3_5MoeDecoderLayer"
    assert (found.num_processes, found.mixed_precision, found.fsdp_version) == (8, "bf16", 2)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_windows_are_the_texts_one_after_the_other(
    suffix: str, streaming: bool, texts: list[str], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / f"texts{suffix}"
    if suffix == ".txt":
        path.write_text(texts[0])
        texts = texts[:1]
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts))
    else:
        Dataset.from_dict({"text": texts, "other": [1] * len(texts)}).to_parquet(str(path))
    arguments = sft.DataArguments(dataset=str(path), seq_len=33, streaming=streaming)
    windows = list(sft.load_windows(arguments, tokenizer))

    expected: list[int] = []
    for text in texts:
        expected += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert [token for window in windows for token in window["input_ids"]] == expected[: len(expected) // 33 * 33]
    assert all(window["labels"] == window["input_ids"] and len(window["input_ids"]) == 33 for window in windows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "body"}, "text_column='body'"),
        ({"seq_len": 10**6}, "holds 0 windows of seq_len=1000000"),
        ({"seq_len": 10**6, "streaming": True}, "holds 0 windows of seq_len=1000000"),
        ({"eval_windows": 10**6, "streaming": True}, "of which eval_windows=1000000 are held out"),
        ({"seq_len": 1}, "seq_len=1: give at least 2 tokens"),
        ({"eval_windows": -1}, "eval_windows=-1: give a number of windows"),
    ],
)
def test_unusable_data_is_one_line_that_names_the_field(
    options: dict[str, Any], message: str, text_file: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        sft.load_windows(sft.DataArguments(dataset=str(text_file), **options), tokenizer)
    assert "\n" not in str(raised.value)


def test_all_windows_may_be_evaluated_on(text_file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    count = len(sft.load_windows(sft.DataArguments(str(text_file)), tokenizer))
    every = sft.DataArguments(str(text_file), eval_windows=count)
    with pytest.raises(ValueError, match=f"of which eval_windows={count} are held out"):
        sft.load_windows(every, tokenizer)
    every.evaluate_only = True
    assert len(sft.load_windows(every, tokenizer)) == count


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "has no adapter_config.json: give"), ({"base_model_name_or_path": ""}, "names no model: train it on one")],
)
def test_what_cannot_be_merged_is_one_line(content: Any, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^adapter='{tmp_path}' {said}") as raised:
        load("merge").main(["--adapter", str(tmp_path), "--output_dir", str(tmp_path / "merged")])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["cp_size", "batch_size", "accumulation", "max_steps"])
def test_sizes_of_the_loop_are_above_zero(
    name: str, text_file: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    command = ["--model", "tiny", "--tokenizer", str(tokenizer_folder), "--dataset", str(text_file)]
    command += ["--output_dir", str(tmp_path), "--max_steps", "1", f"--{name}", "0"]
    with pytest.raises(ValueError, match=f"^{name}=0: give a number above 0"):
        load("accelerate_loop").main(command)


@pytest.mark.parametrize("script", ["sft", "sft_trl", "accelerate_loop"])
def test_a_model_without_a_tokenizer_is_one_line(
    script: str, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    command = ["--model", "tiny", "--dataset", str(text_file), "--output_dir", str(tmp_path), "--max_steps", "1"]
    with pytest.raises(ValueError, match=r"^tokenizer is not given, and model='tiny' has none: give a folder or"):
        load(script).main(command)


def test_other_dtypes_are_refused(tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("float31", "nn", "int8"):
        with pytest.raises(ValueError, match=f"^dtype='{dtype}' is not supported: choose 'float32' or 'bfloat16' or"):
            sft.load_model(sft.ModelArguments("tiny", dtype=dtype), tokenizer)
        with pytest.raises(SystemExit):
            load("merge").main(["--adapter", "none", "--output_dir", "none", "--dtype", dtype])
        assert f"argument --dtype: invalid choice: '{dtype}'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_run(text_file: Path, tokenizer_folder: Path) -> list[str]:
    """Options of a run on the small model, of any number of processes."""
    options = [
        *("--model", "tiny", "--tokenizer", tokenizer_folder, "--dataset", text_file, "--seq_len", "32"),
        *("--eval_windows", "4", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"),
        *("--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none"),
    ]
    return [str(option) for option in options]


@pytest.fixture(scope="module")
def stock_runs(small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of the stock model where the package cannot be imported: in one run, and resumed after two."""
    folder = tmp_path_factory.mktemp("stock")
    common = [*small_run, "--no_patch", "--save_steps", "2"]
    runs = [
        [*common, "--output_dir", str(folder / "whole"), "--max_steps", "4"],
        [*common, "--output_dir", str(folder / "parts"), "--max_steps", "2"],
        [*common, "--output_dir", str(folder / "parts"), "--max_steps", "4", "--resume_from_checkpoint", "last"],
    ]
    script = folder / "runs.py"
    script.write_text(
        f"import sys\nsys.modules['hf_cp'] = None\nsys.path.insert(0, {str(RECIPES)!r})\nimport sft\n"
        f"for argv in {runs!r}:\n    sft.main(argv)\n"
    )
    run_script(script, timeout=400)
    return folder


def test_stock_run_saves_evaluates_and_resumes_without_the_package(stock_runs: Path) -> None:
    whole, parts = demo.read_steps(stock_runs / "whole"), demo.read_steps(stock_runs / "parts")
    assert [step for step, _, _ in whole] == [1, 2, 3, 4]
    assert parts == whole
    for name in ("model.safetensors", "tokenizer.json", "checkpoint-2/trainer_state.json"):
        assert (stock_runs / "parts" / name).exists(), name


# What Slurm does for two_nodes.sbatch: the same command on both machines, which here are one host.
SRUN = """#!/bin/bash
[[ $SLURM_CPUS_ON_NODE && " $* " == *" --kill-on-bad-exit=1 "* ]] || exit 2
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & started+=($!); done
for task in "${started[@]}"; do wait -n "${started[@]}" || { kill "${started[@]}"; wait; exit 1; }; done
"""
SCONTROL = """#!/bin/bash
[[ $* == "show hostnames 127.0.0.[1-2]" ]] && printf '127.0.0.%d\\n' 1 2
"""


def assert_same_steps(
    found: list[tuple[int, float, float]], expected: list[tuple[int, float, float]], loss: float, norm: float
) -> None:
    """Number by number, within these relative errors of the loss and of the gradient norm."""
    for (_, found_loss, found_norm), (_, stock_loss, stock_norm) in zip(found, expected, strict=True):
        assert found_loss == pytest.approx(stock_loss, rel=loss)
        assert found_norm == pytest.approx(stock_norm, rel=norm)


def end_with_descendants(process: subprocess.Popen[str]) -> None:
    """A launcher puts what it starts in sessions of their own, which a signal to its group does not reach."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
    process.kill()


def test_two_machines_train_as_one(small_run: list[str], stock_runs: Path, tmp_path: Path) -> None:
    """The batch script itself, of two launches that find each other, each with one process of a sequence's two."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = free_port()
    launch = yaml.safe_load((RECIPES / "two_nodes.yaml").read_text())
    launch |= {"num_processes": 2, "main_process_port": port, "mixed_precision": "no"}
    sizes = {"parallelism_config_dp_shard_size": 1, "parallelism_config_cp_size": 2}
    launch["parallelism_config"] |= sizes
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(launch))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LAUNCH": str(tmp_path / "launch.yaml"),
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_CPUS_ON_NODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--gdn_backend", "eager", "--max_steps", "2", "--ddp_timeout", "120", "--save_strategy", "no"]
    command = ["bash", RECIPES / "two_nodes.sbatch", RECIPES / "sft.py", *small_run, *options, "--output_dir", tmp_path]
    with (tmp_path / "output").open("w+") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)
        try:
            code = job.wait(timeout=300)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_with_descendants(job)
            job.wait()
    assert code == 0, f"exit code {code}\n{(tmp_path / 'output').read_text()[-6000:]}"
    expected = demo.read_steps(stock_runs / "whole")[:2]
    found = demo.read_steps(tmp_path)
    assert [step for step, _, _ in found] == [1, 2]
    assert_same_steps(found, expected, loss=1e-5, norm=1e-4)


def test_accelerate_loop_on_two_processes_equals_one(text_file: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    options = [
        *("--model", "tiny", "--tokenizer", tokenizer_folder, "--dataset", text_file, "--seq_len", "33"),
        *("--batch_size", "2", "--accumulation", "2", "--max_steps", "3", "--warmup_steps", "1"),
        *("--learning_rate", "1e-3", "--max_grad_norm", "0.25", "--gdn_backend", "eager"),
    ]
    reports = []
    for ranks in (1, 2):
        arguments = [*options, "--cp_size", ranks, "--output_dir", tmp_path / str(ranks)]
        printed = run_script(RECIPES / "accelerate_loop.py", *map(str, arguments), ranks=ranks, timeout=300)
        lines = re.findall(r"^step (\d): loss (\S+), grad_norm (\S+), rate (\S+)$", printed, re.MULTILINE)
        reports.append([tuple(map(float, line)) for line in lines])
    one, two = reports
    assert [(step, rate) for step, _, _, rate in one] == [(1, 0.0), (2, 1e-3), (3, 5e-4)]
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
        assert expected[2] > 0.25
    assert one[-1][1] < one[0][1]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "1").state_dict()
    shared = AutoModelForCausalLM.from_pretrained(tmp_path / "2").state_dict()
    assert set(stock) == set(shared)
    assert all((shared[name] - weight).norm() <= 1e-4 * weight.norm() for name, weight in stock.items())


def test_trl_packs_what_one_process_pads(tokenizer_folder: Path, texts: list[str], tmp_path: Path) -> None:
    """Prompts and completions in one row over two processes, and in padded rows to the stock model on one."""
    rows = [{"prompt": text[:40], "completion": text[40 : 120 + 20 * (i % 3)]} for i, text in enumerate(texts)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        *("--model", "tiny", "--tokenizer", tokenizer_folder, "--dataset", path, "--gdn_backend", "eager"),
        *("--per_device_train_batch_size", "3", "--max_steps", "2", "--learning_rate", "1e-3", "--report_to", "none"),
        *("--logging_steps", "1", "--lr_scheduler_type", "constant", "--save_strategy", "no", "--output_dir"),
    ]
    stock = [*common, tmp_path / "stock", "--no_patch", "--padding_free", "false", "--bf16", "false"]
    shared = [*common, tmp_path / "shared", "--bf16", "false"]
    run_script(RECIPES / "sft_trl.py", *map(str, stock), timeout=300)
    launch = FSDP2 | sizes_environment(Layout("fsdp2", cp=2))
    run_script(RECIPES / "sft_trl.py", *map(str, shared), ranks=2, environment=launch, timeout=300)
    expected, found = demo.read_steps(tmp_path / "stock"), demo.read_steps(tmp_path / "shared")
    assert [step for step, _, _ in expected] == [1, 2]
    assert_same_steps(found, expected, loss=1e-5, norm=1e-4)


def test_adapters_are_trained_merged_and_evaluated(
    tokenizer: PreTrainedTokenizerBase, text_file: Path, tmp_path: Path
) -> None:
    """The merged model, in plain transformers, evaluates to what the adapters evaluated to in the patched one."""
    common = [
        *("--dataset", text_file, "--seq_len", "33", "--eval_windows", "2", "--gdn_backend", "eager"),
        *("--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--report_to", "none"),
    ]
    base, lora, merged, check = (tmp_path / name for name in ("base", "lora", "merged", "check"))
    sft.load_model(sft.ModelArguments("tiny"), tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    runs = [
        ["--model", base, "--lora_rank", "4", "--max_steps", "2", "--output_dir", lora],
        ["--model", merged, "--no_patch", "--evaluate_only", "--output_dir", check],
    ]
    train, evaluate = ([str(argument) for argument in (*one, *common)] for one in runs)
    script = tmp_path / "runs.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(RECIPES)!r})\nimport merge, sft\nsft.main({train!r})\n"
        f"merge.main({['--adapter', str(lora), '--output_dir', str(merged)]!r})\nsft.main({evaluate!r})\n"
    )
    run_script(script, timeout=400)
    adapters = load_file(lora / "adapter_model.safetensors")
    assert any(bool(x.any()) for name, x in adapters.items() if "lora_B" in name)
    losses = [json.loads((folder / "eval_results.json").read_text())["eval_loss"] for folder in (lora, check)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.fixture(scope="module")
def mixture(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with experts, with its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes |= {"shared_expert_intermediate_size": 64, "vocab_size": len(tokenizer), "num_hidden_layers": 4}
    dense: dict[str, Any] = {
        name: value for name, value in sft.NAMED_CONFIGS["tiny"].items() if name != "intermediate_size"
    }
    torch.manual_seed(0)
    Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**dense | sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_adapters_of_a_mixture_on_two_processes_equal_one(mixture: Path, text_file: Path, tmp_path: Path) -> None:
    """As `hf-cp plan --lora` has it: frozen weights in bf16, adapters in fp32, FSDP2, layers recomputed.

    One process alone reads the weights, as the launch configurations for GPUs have it.
    """
    common = [
        *("--model", mixture, "--dataset", text_file, "--seq_len", "64", "--per_device_train_batch_size", "2"),
        *("--dtype", "bfloat16", "--bf16", "--lora_rank", "4", "--learning_rate", "1e-2", "--max_steps", "2"),
        *("--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"),
    ]
    stock = [*common, "--no_patch", "--output_dir", tmp_path / "stock"]
    shared = [*common, "--gradient_checkpointing", "--gdn_backend", "eager", "--output_dir", tmp_path / "shared"]
    run_script(RECIPES / "sft.py", *map(str, stock), timeout=300)
    launch = FSDP2 | sizes_environment(Layout("fsdp2", cp=2)) | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    launch |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3_5MoeDecoderLayer", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    run_script(RECIPES / "sft.py", *map(str, shared), ranks=2, environment=launch, timeout=300)
    expected, found = demo.read_steps(tmp_path / "stock"), demo.read_steps(tmp_path / "shared")
    assert [step for step, _, _ in expected] == [1, 2]
    assert_same_steps(found, expected, loss=5e-4, norm=1e-2)
    adapters = load_file(tmp_path / "shared" / "adapter_model.safetensors")
    assert adapters.keys() == load_file(tmp_path / "stock" / "adapter_model.safetensors").keys()
    assert all(x.dtype == torch.float32 and bool(x.any()) for x in adapters.values())


def test_table_of_plans_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    table = (RECIPES / "README.md").read_text().partition("<!-- plan table -->\n")[2].partition("<!-- end -->\n")[0]
    assert cli.main(["plan", "--table"]) == 0
    assert capsys.readouterr().out == table, "put the output of `hf-cp plan --table` between the marks"


PLANS = [
    Training(32768, 2, cp_size=4, shards=8, linear_mode="ulysses", attention_mode="allgather", checkpointing=True),
    Training(131072, cp_size=2, shards=2, lora=8),
    Training(65536, precision="bf16"),
]


@pytest.mark.parametrize("plan", PLANS, ids=["all weights", "adapters", "bf16"])
def test_options_of_a_plan_are_the_scripts(plan: Training) -> None:
    kinds: Any = (sft.ModelArguments, sft.DataArguments, TrainingArguments)
    parser = HfArgumentParser(kinds)
    required = ["--model", "tiny", "--dataset", "x.txt", "--output_dir", "x"]
    found = parser.parse_args([*required, *script_options(plan).split()])
    assert found.seq_len == plan.seq_len
    assert found.per_device_train_batch_size == plan.batch
    assert found.lora_rank == plan.lora
    assert bool(found.bf16) == (plan.precision == "mixed")
    assert found.dtype == ("bfloat16" if plan.lora or plan.precision == "bf16" else "float32")
    assert bool(found.gradient_checkpointing) == plan.checkpointing
    assert (found.linear_mode, found.attention_mode) == (plan.linear_mode, plan.attention_mode)


def test_liger_comes_without_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["--model", "tiny", "--dataset", "x.txt", "--output_dir", str(tmp_path), "--report_to", "none"]
    kinds = (sft.ModelArguments, sft.DataArguments, TrainingArguments)
    assert not sft.parse([*command, "--no_patch"], *kinds)[2].use_liger_kernel
    monkeypatch.setattr(sft, "is_liger_kernel_available", lambda: True)
    arguments = sft.parse([*command, "--no_patch", "--liger"], *kinds)[2]
    assert arguments.use_liger_kernel
    assert arguments.liger_kernel_config == {"fused_linear_cross_entropy": False}


def test_missing_liger_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "is_liger_kernel_available", lambda: False)
    with pytest.raises(ValueError, match=r"^liger=True, but liger-kernel is not installed: [a-z -]+$"):
        sft.main(["--model", "tiny", "--dataset", "x.txt", "--output_dir", "x", "--no_patch", "--liger"])


def test_missing_peft_and_ranks_below_zero_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "is_peft_available", lambda: False)
    command = ["--model", "tiny", "--dataset", "x.txt", "--output_dir", "x", "--no_patch", "--lora_rank"]
    for rank, said in (("4", "lora_rank=4, but peft is not installed: pip install peft"), ("-4", "lora_rank=-4: give")):
        with pytest.raises(ValueError, match=f"^{said}"):
            sft.main([*command, rank])


def test_nothing_to_evaluate_on_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluate_only=True with eval_windows=0"):
        sft.main(["--model", "tiny", "--dataset", "x.txt", "--output_dir", "x", "--evaluate_only"])


def test_demo_agrees_and_draws(tmp_path: Path) -> None:
    options = ["--output", str(tmp_path), "--steps", "3", "--seq-len", "63", "--max-texts", "12"]
    output = run_script(RECIPES / "demo.py", *options, timeout=400)
    assert "PASS: 3 steps" in output, output[-3000:]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_demo_notices_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = demo.Step(1, 7.0, 1.0), demo.Step(2, 6.0, 1.0)
    assert demo.report([first, second], [first, second])
    assert "PASS" in capsys.readouterr().out
    for loss in (6.001, math.nan):
        assert not demo.report([first, second], [first, demo.Step(2, loss, 1.0)])
        assert "FAIL" in capsys.readouterr().out


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(RECIPES / "measure.sh"), *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)


def test_phases_of_measuring_are_commands_that_exist(tmp_path: Path) -> None:
    listed = measure("--list")
    assert listed.returncode == 0, listed.stderr
    lines = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    assert len({name for name, *_ in lines}) == len(lines) > 20
    parser = argparse.ArgumentParser(exit_on_error=False)
    bench.add_arguments(parser)
    for _, gpus, limit, command in lines:
        assert int(gpus) in (1, 2, 4, 8)
        assert int(limit) < 600
        for path in re.findall(r"\btests/\S+", command):
            assert (RECIPES.parent / path).exists(), path
        for module in re.findall(r"-m (hf_cp\S+)", command):
            assert importlib.util.find_spec(module), module
        _, _, options = command.partition("-m hf_cp.bench ")
        processes = re.search(r"--nproc-per-node (\d)", command)
        bench._check_used(parser.parse_args(shlex.split(options)), int(processes[1]) if processes else 1)
        _, kernels, options = command.partition("-m hf_cp.kernels.gdn.bench ")
        if kernels:
            gdn_bench.parse(shlex.split(options.replace("FOLDER", str(tmp_path))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_phase_that_fails_is_told(tmp_path: Path) -> None:
    done = measure(str(tmp_path), "layer")
    assert done.returncode == 1
    assert "PyTorch sees no CUDA GPU" in (tmp_path / "layer.log").read_text()
    summary = (tmp_path / "summary.txt").read_text()
    assert summary == done.stdout
    assert re.fullmatch(r"layer +\d+ s  status   1  -m hf_cp.bench .*\n", summary)
    done = measure(str(tmp_path), "layer", "fast")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no phase is called fast" in done.stderr
