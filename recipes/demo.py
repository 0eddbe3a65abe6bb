"""Train a small Qwen3.5 twice on real text, on one process and on two with context parallelism, and compare.

The one process runs the stock model and cannot import `hf_cp`; the two run the patched model under Accelerate with
FSDP2, each holding half of every sequence. Both start recipes/sft.py with the same seed, data and settings. Needs no
GPU and no network; `make demo` calls it. Exits with 1 if the losses differ by more than LOSS_BOUND.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

RECIPES = Path(__file__).resolve().parent
SFT = RECIPES / "sft.py"
LOSS_BOUND = 1e-4
VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
# An entry of None in sys.modules makes every import of that name fail.
WITHOUT_HF_CP = (
    "import runpy, sys; sys.modules['hf_cp'] = None; sys.argv = sys.argv[1:]; sys.path.insert(0, '');"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def documentation() -> Iterator[str]:
    """Documentation strings of the standard library, a module at a time and in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a few files are there to be refused
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        strings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        text = "\n\n".join(string for string in strings if string)
        if len(text) > 200:
            yield text


def train_tokenizer(texts: list[str], folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT).save_pretrained(
        folder
    )


def train(launcher: list[str], arguments: list[str], output: Path, environment: dict[str, str]) -> float:
    """Run recipes/sft.py and return the seconds it took."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *launcher, str(SFT), *arguments, "--output_dir", str(output)], env=environment, check=True
    )
    return time.perf_counter() - start


class Step(NamedTuple):
    step: int
    loss: float
    grad_norm: float


def read_steps(output: Path) -> list[Step]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [Step(entry["step"], entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def draw(single: list[Step], sharded: list[Step], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    steps = [row.step for row in single]
    for axis, field, name, color in ((axes[0], "loss", "loss", "C0"), (axes[1], "grad_norm", "gradient norm", "C1")):
        reference = [getattr(row, field) for row in single]
        values = [getattr(row, field) for row in sharded]
        axis.plot(steps, reference, color="0.75", linewidth=6, label="stock, one process")
        axis.plot(steps, values, color="C3", linewidth=1.5, label="hf_cp, two processes")
        axis.set(xlabel="step", title=name)
        axis.legend()
        # A difference of exactly zero has no place on a logarithmic axis: the curve has a gap there.
        differences = [relative(b, a) or float("nan") for a, b in zip(reference, values, strict=True)]
        axes[2].semilogy(steps, differences, marker=".", color=color, label=name)
    axes[2].axhline(LOSS_BOUND, color="0.5", linestyle="--", label="bound on the loss")
    axes[2].set(xlabel="step", title="relative difference")
    axes[2].legend()
    figure.savefig(path, dpi=120)


def report(single: list[Step], sharded: list[Step]) -> bool:
    """Print the table and the summary line; whether the runs agree."""
    print(f"\n{'':>4}  {'one process (stock)':^22}  {'two processes (hf_cp)':^22}  {'relative difference':^20}")
    names = f"{'loss':>10}  {'grad_norm':>10}"
    print(f"{'step':>4}  {names}  {names}  {'loss':>9}  {'grad_norm':>9}")
    differences = [
        (relative(b.loss, a.loss), relative(b.grad_norm, a.grad_norm)) for a, b in zip(single, sharded, strict=True)
    ]
    for a, b, (by_loss, by_norm) in zip(single, sharded, differences, strict=True):
        values = "  ".join(f"{value:>10.6f}" for value in (a.loss, a.grad_norm, b.loss, b.grad_norm))
        print(f"{a.step:>4}  {values}  {by_loss:>9.1e}  {by_norm:>9.1e}")
    # Written so that a NaN fails.
    agree = all(by_loss <= LOSS_BOUND for by_loss, _ in differences)
    by_loss, by_norm = (max(column) for column in zip(*differences, strict=True))
    print(
        f"\n{'PASS' if agree else 'FAIL'}: {len(single)} steps, loss {single[0].loss:.3f} -> {single[-1].loss:.3f}; "
        f"largest relative difference loss {by_loss:.1e} (bound {LOSS_BOUND:.0e}), grad_norm {by_norm:.1e}"
    )
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=RECIPES.parent / "runs" / "demo", help="folder for all it writes"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--max-texts", type=int, default=None, help="stop reading the library after this many modules")
    args = parser.parse_args()
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    texts = list(islice(documentation(), args.max_texts))
    (output / "docstrings.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, output / "tokenizer")
    characters = sum(map(len, texts))
    print(
        f"Documentation strings of {len(texts)} modules of the standard library, {characters / 1e6:.1f} million "
        f"characters; tokenizer of {VOCAB_SIZE} tokens trained in {time.perf_counter() - start:.0f} s."
    )

    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(output / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
        # One thread a process: on two cores, more of them only wait for one another.
        "OMP_NUM_THREADS": "1",
    }
    arguments = [
        *("--model", "tiny", "--tokenizer", str(output / "tokenizer")),
        *("--dataset", str(output / "docstrings.jsonl"), "--seq_len", str(args.seq_len)),
        *("--per_device_train_batch_size", "2", "--max_steps", str(args.steps), "--learning_rate", "1e-3"),
        *("--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "3", "--logging_steps", "1"),
        *("--save_strategy", "no", "--report_to", "none", "--dataloader_pin_memory", "false", "--use_cpu", "true"),
        *("--seed", "0"),
    ]
    modes = ["--linear_mode", "p2p", "--attention_mode", "ulysses", "--gdn_backend", "eager"]
    accelerate = ["-m", "accelerate.commands.launch", "--config_file", str(RECIPES / "cpu_x2.yaml")]

    print(f"\nOne process: transformers {transformers.__version__} as it is, hf_cp cannot be imported.", flush=True)
    single_time = train(["-c", WITHOUT_HF_CP], [*arguments, "--no_patch"], output / "one", environment)
    print("\nTwo processes: FSDP2 and context parallelism, each with half of every sequence.", flush=True)
    sharded_time = train(accelerate, [*arguments, *modes], output / "two", environment)

    single, sharded = read_steps(output / "one"), read_steps(output / "two")
    agree = report(single, sharded)
    draw(single, sharded, output / "curves.png")
    print(f"one process {single_time:.0f} s, two processes {sharded_time:.0f} s; curves in {output / 'curves.png'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
