"""Merge LoRA adapters into the model that they were trained on, for plain transformers.

python recipes/merge.py --adapter runs/lora --output_dir runs/merged [--dtype bfloat16]
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder that sft.py --lora_rank wrote")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the merged weights"
    )
    arguments = parser.parse_args(argv)
    config = Path(arguments.adapter) / "adapter_config.json"
    if not config.is_file():
        raise ValueError(f"adapter={arguments.adapter!r} has no {config.name}: give a folder that --lora_rank wrote.")
    if not json.loads(config.read_text())["base_model_name_or_path"]:
        raise ValueError(f"adapter={arguments.adapter!r} names no model: train it on one that is saved, not on 'tiny'.")
    adapted = AutoPeftModelForCausalLM.from_pretrained(arguments.adapter, dtype=getattr(torch, arguments.dtype))
    adapted.merge_and_unload().save_pretrained(arguments.output_dir)
    AutoTokenizer.from_pretrained(arguments.adapter).save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
