"""Train or fine-tune a causal language model with Trainer, with or without context parallelism.

    python recipes/sft.py --model tiny --tokenizer PATH --dataset notes.txt --output_dir runs/notes
    accelerate launch --config_file recipes/gpu_x8.yaml recipes/sft.py --model PATH --dataset NAME --output_dir DIR

Everything here is Trainer as usual; context parallelism is the one call of `hf_cp.patch`. With `--no_patch` the package
is not even imported, which is what the patched run is compared with. See recipes/README.md.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.utils.import_utils import is_liger_kernel_available, is_peft_available

# Three Gated DeltaNet layers and one of full attention, as every Qwen3.5 repeats them. The head counts divide by 2.
NAMED_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
}
DTYPES = ("float32", "bfloat16", "float16")
LOCAL_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class ModelArguments:
    model: str = field(
        metadata={"help": f"Folder or hub name of a model, or a randomly initialised one: {', '.join(NAMED_CONFIGS)}."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Folder or hub name; the model's own if not given."})
    dtype: str = field(
        default="float32", metadata={"help": "What the parameters are loaded as. Add --bf16 to compute in bfloat16."}
    )
    attn_implementation: str = field(default="sdpa", metadata={"help": "As in from_pretrained."})
    patch: bool = field(default=True, metadata={"help": "Call hf_cp.patch; --no_patch trains the stock model."})
    linear_mode: str = field(default="p2p", metadata={"help": "Gated DeltaNet layers: p2p, allgather or ulysses."})
    attention_mode: str = field(default="ulysses", metadata={"help": "Full attention layers: ulysses or allgather."})
    gdn_backend: str = field(
        default="triton",
        metadata={"help": "triton (Hopper GPUs), gluon (there, heads of 128 in 16-bit types) or eager (any device)."},
    )
    projection_backend: str = field(
        default="torch", metadata={"help": "torch, or fused (Hopper GPUs, where a mode is ulysses)."}
    )
    lora_rank: int = field(
        default=0, metadata={"help": "Train LoRA adapters of this rank on every linear layer; 0 trains all weights."}
    )
    liger: bool = field(
        default=False, metadata={"help": "Liger's Triton kernels for norms and MLPs; its fused loss stays off."}
    )


@dataclass
class DataArguments:
    dataset: str = field(
        metadata={"help": "A .txt, .json, .jsonl or .parquet file, or any name that datasets.load_dataset takes."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a named data set."})
    split: str = field(default="train", metadata={"help": "Split of a named data set."})
    streaming: bool = field(default=False, metadata={"help": "Read while training; needs --max_steps."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    evaluate_only: bool = field(default=False, metadata={"help": "No training: evaluate on --eval_windows."})
    eval_windows: int = field(default=0, metadata={"help": "Windows held out for evaluation, from the front."})
    seq_len: int = field(default=2048, metadata={"help": "Tokens in a window, over all context-parallel ranks."})
    pack_batch: int = field(
        default=1000, metadata={"help": "Texts packed at a time; what does not fill a window at the end is dropped."}
    )


def parse(argv: list[str], *kinds: Any, **defaults: Any) -> Any:
    """One object of each of the dataclasses; `ModelArguments` and one of TrainingArguments' family are among them."""
    parser = HfArgumentParser(kinds)
    # Accelerate looks for a GPU process group under an FSDP launch unless it is told that there is none.
    parser.set_defaults(use_cpu=not torch.accelerator.is_available(), **defaults)
    plain = parser.parse_args(argv)
    if plain.patch and plain.use_cpu:
        # Making TrainingArguments sets up the process group, so this has to come before.
        from hf_cp.testing import allow_fsdp2_on_cpu

        allow_fsdp2_on_cpu()
    if plain.liger:
        if not is_liger_kernel_available():
            raise ValueError("liger=True, but liger-kernel is not installed: pip install liger-kernel")
        # Its fused loss replaces the forward of the model, and with it the patched one.
        parser.set_defaults(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False})
    if plain.lora_rank < 0:
        raise ValueError(f"lora_rank={plain.lora_rank}: give a rank above 0, or 0 to train all weights.")
    if plain.lora_rank and not is_peft_available():
        raise ValueError(f"lora_rank={plain.lora_rank}, but peft is not installed: pip install peft")
    return parser.parse_args_into_dataclasses(argv)


def load_tokenizer(model: str, tokenizer: str | None) -> Any:
    if tokenizer is None and model in NAMED_CONFIGS:
        raise ValueError(f"tokenizer is not given, and model={model!r} has none: give a folder or a hub name.")
    return AutoTokenizer.from_pretrained(tokenizer or model)


def load_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if args.dtype not in DTYPES:
        raise ValueError(f"dtype={args.dtype!r} is not supported: choose {' or '.join(map(repr, DTYPES))}.")
    dtype = getattr(torch, args.dtype)
    if args.model not in NAMED_CONFIGS:
        return AutoModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, attn_implementation=args.attn_implementation
        )
    fields: dict[str, Any] = NAMED_CONFIGS[args.model] | {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": args.attn_implementation,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).to(dtype)


def lora_config(rank: int) -> Any:
    from peft import LoraConfig

    # "all-linear" leaves the head out.
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def data_source(dataset: str, split: str, config: str | None = None) -> dict[str, Any]:
    """What `load_dataset` takes: a local file is a data set of one split."""
    file_format = LOCAL_FORMATS.get(Path(dataset).suffix)
    if file_format:
        return {"path": file_format, "data_files": dataset, "split": "train"}
    return {"path": dataset, "name": config, "split": split}


def load_windows(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> Dataset | IterableDataset:
    """Token windows of `seq_len`: the texts one after the other, an end-of-text token after each, cut where full."""
    if args.seq_len < 2:
        raise ValueError(f"seq_len={args.seq_len}: give at least 2 tokens, since the first is not predicted.")
    if args.eval_windows < 0:
        raise ValueError(f"eval_windows={args.eval_windows}: give a number of windows to hold out, or 0.")
    source = data_source(args.dataset, args.split, args.dataset_config)
    if LOCAL_FORMATS.get(Path(args.dataset).suffix) == "text":
        source["sample_by"] = "document"  # the file is one text, not one a line
    texts: Any = load_dataset(**source, streaming=args.streaming)
    # Some formats only know their columns once they are read.
    columns = texts.column_names or list(next(iter(texts), {}))
    if args.text_column not in columns:
        raise ValueError(f"text_column={args.text_column!r} is not in the data set; it has {', '.join(columns)}.")

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def pack(batch: dict[str, list[str]]) -> dict[str, Any]:
        encoded: Any = tokenizer(batch[args.text_column], add_special_tokens=False)["input_ids"]
        tokens = [token for text in encoded for token in (*text, *end)]
        starts = range(0, len(tokens) - args.seq_len + 1, args.seq_len)
        return {"input_ids": [tokens[start : start + args.seq_len] for start in starts]}

    windows = texts.map(pack, batched=True, batch_size=args.pack_batch, remove_columns=columns)
    windows = windows.map(lambda batch: {"labels": batch["input_ids"]}, batched=True)
    needed = args.eval_windows + (not args.evaluate_only)
    # A stream is read as far as that.
    found = len(windows) if isinstance(windows, Dataset) else sum(1 for _ in windows.take(needed))
    if found < needed:
        raise ValueError(
            f"dataset={args.dataset!r} holds {found} windows of seq_len={args.seq_len} tokens, of which "
            f"eval_windows={args.eval_windows} are held out: give more text or a smaller seq_len."
        )
    return windows


def main(argv: list[str]) -> None:
    model_args, data_args, training_args = parse(argv, ModelArguments, DataArguments, TrainingArguments)
    if data_args.evaluate_only and not data_args.eval_windows:
        raise ValueError("evaluate_only=True with eval_windows=0: give the number of windows to evaluate on.")
    set_seed(training_args.seed)
    tokenizer = load_tokenizer(model_args.model, model_args.tokenizer)
    model = load_model(model_args, tokenizer)
    with training_args.main_process_first(desc="packing the data set"):
        windows = load_windows(data_args, tokenizer)
    held_out = data_args.eval_windows
    train_windows: Any = windows.skip(held_out)
    eval_windows: Any = windows.take(held_out) if held_out else None

    if model_args.patch:
        import hf_cp

        hf_cp.patch(
            model,
            linear_mode=model_args.linear_mode,
            attention_mode=model_args.attention_mode,
            gdn_backend=model_args.gdn_backend,
            projection_backend=model_args.projection_backend,
        )

    if model_args.lora_rank:
        from peft import get_peft_model

        model: Any = get_peft_model(model, lora_config(model_args.lora_rank))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_windows,
        eval_dataset=eval_windows,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if not data_args.evaluate_only:
        resume: str | bool | None = training_args.resume_from_checkpoint
        trainer.train(resume_from_checkpoint=True if resume == "last" else resume)
    if eval_windows is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if not data_args.evaluate_only:
        trainer.save_model()
        # Loss and grad_norm of every logged step, unrounded.
        trainer.save_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1:])
