"""The recipes: launch configurations, data, a stock run, resuming, and the demo from end to end."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from datasets import Dataset
from forked_scripts import run_script
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.qwen3_5 import modeling_qwen3_5

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
    [({"text_column": "body"}, "text_column='body'"), ({"seq_len": 10**6}, "holds 0 windows of seq_len=1000000")],
)
def test_unusable_data_is_one_line_that_names_the_field(
    options: dict[str, Any], message: str, text_file: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        sft.load_windows(sft.DataArguments(dataset=str(text_file), **options), tokenizer)
    assert "\n" not in str(raised.value)


def test_stock_run_saves_evaluates_and_resumes_without_the_package(
    text_file: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    common = [
        *("--model", "tiny", "--tokenizer", tokenizer_folder, "--dataset", text_file, "--seq_len", "32"),
        *("--no_patch", "--eval_windows", "4", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"),
        *("--lr_scheduler_type", "constant", "--logging_steps", "1", "--save_steps", "2", "--report_to", "none"),
    ]
    runs = [
        [*common, "--output_dir", tmp_path / "whole", "--max_steps", "4"],
        [*common, "--output_dir", tmp_path / "parts", "--max_steps", "2"],
        [*common, "--output_dir", tmp_path / "parts", "--max_steps", "4", "--resume_from_checkpoint", "last"],
    ]
    script = tmp_path / "runs.py"
    arguments = [[str(argument) for argument in one] for one in runs]
    script.write_text(
        f"import sys\nsys.modules['hf_cp'] = None\nsys.path.insert(0, {str(RECIPES)!r})\nimport sft\n"
        f"for argv in {arguments!r}:\n    sft.main(argv)\n"
    )
    run_script(script, timeout=400)

    whole, parts = demo.read_steps(tmp_path / "whole"), demo.read_steps(tmp_path / "parts")
    assert [step for step, _, _ in whole] == [1, 2, 3, 4]
    assert parts == whole
    for name in ("model.safetensors", "tokenizer.json", "checkpoint-2/trainer_state.json"):
        assert (tmp_path / "parts" / name).exists(), name


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
