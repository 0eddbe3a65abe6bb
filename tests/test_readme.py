"""Every code block of the README runs as it is written, and its commands name targets and files that exist."""

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from forked_scripts import run_script
from transformers import TrainingArguments

from hf_cp.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RECIPES_README = (ROOT / "recipes" / "README.md").read_text()

# What a reader brings along: a data set, and a checkpoint, for which a small random model stands in.
PRELUDE = """
import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig


def _tiny(name, **kwargs):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, rope_parameters={**rope, "mrope_interleaved": True},
        )
    )


AutoModelForCausalLM.from_pretrained = _tiny
dataset = [{"input_ids": list(range(i, i + 65)), "labels": list(range(i, i + 65))} for i in range(1, 9)]
"""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


BLOCKS = [
    pytest.param(block, id=f"{name}-{index}")
    for name, text in (("README", README), ("models", (ROOT / "models" / "README.md").read_text()))
    for index, block in enumerate(blocks(text, "python"))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + block)
    ranks = 2 if "cp_size=2" in block or "init_process_group" in block else 1
    run_script(script, ranks=ranks, environment={"ACCELERATE_USE_CPU": "true"})


@pytest.mark.parametrize("page", sorted(ROOT.glob("*/README.md")) + sorted(ROOT.glob("*/*/README.md")), ids=str)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text):
        assert (page.parent / path).exists(), path
    # Files in the first column of a table lie in the page's folder or below, or are named from there or from the root.
    for cell in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE):
        for name in re.findall(r"`([\w/.]+(?:\.(?:py|cuh?|md|yaml|sh|sbatch)|/))`", cell):
            places = (page.parent / name, ROOT / name, *page.parent.rglob(Path(name).name))
            assert any(place.exists() for place in places), name


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "hf_cp" / "README.md"], ids=str)
def test_messages_are_those_of_the_code(page: Path) -> None:
    sources = [*ROOT.glob("hf_cp/*.py"), *ROOT.glob("hf_cp/modes/*.py"), *ROOT.glob("models/**/*.py")]
    sources += ROOT.glob("kernels/gdn/*.py")
    # Texts that stand in several pieces, one a line, are one.
    code = re.sub(r"[\"']\s*f?[\"']", "", "".join(path.read_text() for path in sources))
    table = re.search(r"^\| message.*?\n\n", page.read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None
    messages = re.findall(r"^\| `([^`]+)` \|", table[0], re.MULTILINE)
    assert messages
    for message in messages:
        # Between fields, which are numbers, names and what the page leaves out.
        pieces = re.split(r"\.\.\.|\d+|[\"'].*?[\"']", message)
        longest = max((piece.strip() for piece in pieces), key=len)
        assert len(longest) > 8, message
        assert longest in code, longest


@pytest.mark.parametrize("text", [README, RECIPES_README], ids=["README", "recipes/README"])
def test_commands_name_what_exists(text: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(blocks(text, "sh"))
    assert commands
    mentioned = set(re.findall(r"\bmake ([a-z-]+)", commands)) | set(re.findall(r"`make ([a-z-]+)", text))
    assert mentioned <= targets, mentioned - targets
    for path in re.findall(r"\brecipes/[\w.]+", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / path).exists(), path


def test_features_name_tests_that_exist() -> None:
    tests = ROOT / "tests"
    rows = [line for line in (tests / "README.md").read_text().splitlines() if line.startswith("| ")]
    count = 0
    for row in rows:
        content = ""
        for file, name in re.findall(r"\b(test_\w+\.py)|\b(test_\w+)", row.rsplit("|", 2)[1]):
            content = (tests / file).read_text() if file else content
            assert file or f"def {name}(" in content, f"{name} of {row}"
            count += bool(name)
    assert count > len(rows)


def test_lines_of_the_command_are_understood() -> None:
    lines = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("hf-cp ")]
    assert {line.split()[1] for line in lines} == set(COMMANDS)
    for line in lines:
        name, *options = shlex.split(line, comments=True)[1:]
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(COMMANDS[name][0], "hf_cp").add_arguments(parser)
        parser.parse_args(options)


def test_options_of_the_commands_exist() -> None:
    spec = importlib.util.spec_from_file_location("readme_sft", ROOT / "recipes" / "sft.py")
    assert spec is not None
    assert spec.loader is not None
    sft = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sft  # dataclasses look their module up there
    spec.loader.exec_module(sft)
    known = {
        field.name for kind in (sft.DataArguments, sft.ModelArguments, TrainingArguments) for field in fields(kind)
    }
    known |= {"no_patch"} | {action.dest for action in launch_command_parser()._actions}
    commands = [block for text in (README, RECIPES_README) for block in blocks(text, "sh") if "sft.py" in block]
    assert commands
    for command in commands:
        options = set(re.findall(r"--(\w+)", command))
        assert options <= known, options - known
