"""Fine-tune on conversations, or prompts and completions, with TRL's SFTTrainer and context parallelism.

    accelerate launch --config_file recipes/gpu_x8.yaml recipes/sft_trl.py --model PATH --dataset NAME \\
        --per_device_train_batch_size 4 --bf16 --output_dir DIR

All options of SFTConfig are there. `padding_free` is on: the documents of a batch lie one after the other in one row,
without padding between them, and none sees another. TRL refuses `packing` beside context parallelism, and cutting to a
`max_length` beside `padding_free`. See recipes/README.md.
"""

import os
import sys
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from sft import ModelArguments, data_source, load_model, load_tokenizer, lora_config, parse
from transformers import set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


@dataclass
class DocumentArguments:
    dataset: str = field(
        metadata={
            "help": "A .json, .jsonl or .parquet file, or any name that datasets.load_dataset takes, with a column "
            "messages, or prompt and completion, or text."
        }
    )
    split: str = field(default="train", metadata={"help": "Split of a named data set."})


def main(argv: list[str]) -> None:
    model_args, data_args, training_args = parse(
        argv, ModelArguments, DocumentArguments, SFTConfig, padding_free=True, max_length=None
    )
    set_seed(training_args.seed)
    tokenizer = load_tokenizer(model_args.model, model_args.tokenizer)
    model = load_model(model_args, tokenizer)

    if model_args.patch:
        import hf_cp

        hf_cp.patch(
            model,
            linear_mode=model_args.linear_mode,
            attention_mode=model_args.attention_mode,
            gdn_backend=model_args.gdn_backend,
            projection_backend=model_args.projection_backend,
        )

    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=load_dataset(**data_source(data_args.dataset, data_args.split)),
        processing_class=tokenizer,
        peft_config=lora_config(model_args.lora_rank) if model_args.lora_rank else None,
    )
    resume: str | bool | None = training_args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume == "last" else resume)
    trainer.save_model()
    trainer.save_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1:])
