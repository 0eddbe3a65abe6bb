"""Merge LoRA adapters into the model that they were trained on, for plain transformers.

python recipes/merge.py --adapter runs/lora --output_dir runs/merged [--dtype bfloat16]
"""

import argparse
import sys

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
    adapted = AutoPeftModelForCausalLM.from_pretrained(arguments.adapter, dtype=getattr(torch, arguments.dtype))
    adapted.merge_and_unload().save_pretrained(arguments.output_dir)
    AutoTokenizer.from_pretrained(arguments.adapter).save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
