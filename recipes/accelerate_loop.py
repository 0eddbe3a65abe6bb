"""A training loop of one's own with Accelerate: context parallelism, FSDP2, accumulation, clipping, a schedule, saving.

    torchrun --nproc-per-node 8 recipes/accelerate_loop.py --cp_size 8 --model PATH --dataset NAME --output_dir DIR

The script says itself how many processes share a sequence; the others are data-parallel. See recipes/README.md.
"""

import argparse
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from sft import DataArguments, ModelArguments, load_model, load_tokenizer, load_windows
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_cosine_schedule_with_warmup, set_seed

import hf_cp


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as in sft.py")
    parser.add_argument("--tokenizer", help="the model's own if not given")
    parser.add_argument("--dataset", required=True, help="as in sft.py")
    parser.add_argument("--output_dir", required=True, help="for the model at the end")
    parser.add_argument("--cp_size", type=int, default=1, help="processes that share a sequence")
    parser.add_argument(
        "--seq_len", type=int, default=2048, help="tokens of a window, over all processes that share it"
    )
    parser.add_argument("--batch_size", type=int, default=1, help="windows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; the weights stay fp32")
    parser.add_argument("--gdn_backend", default="triton", help="triton, gluon or eager, as in sft.py")
    args = parser.parse_args(argv)
    for name in ("cp_size", "batch_size", "accumulation", "max_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)}: give a number above 0.")

    set_seed(0)
    tokenizer = load_tokenizer(args.model, args.tokenizer)
    bare = load_model(ModelArguments(args.model), tokenizer).train()

    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        from hf_cp.testing import allow_fsdp2_on_cpu

        allow_fsdp2_on_cpu()
    world_size = PartialState(cpu=on_cpu).num_processes
    if world_size % args.cp_size:
        raise ValueError(f"cp_size={args.cp_size} does not divide the number of processes {world_size}.")
    sizes = hf_cp.ContextParallelConfig(cp_size=args.cp_size, dp_shard_size=world_size // args.cp_size)
    layers: Any = bare.get_decoder().layers
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(layers[0]).__name__],
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if args.bf16 else "no",
        parallelism_config=sizes,
        fsdp_plugin=sharding if world_size > 1 else None,
        # An accumulation that the end of the data cuts short goes on with the next epoch.
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.accumulation, sync_with_dataloader=False),
    )
    hf_cp.patch(bare, gdn_backend=args.gdn_backend)

    with accelerator.local_main_process_first():
        windows: Any = load_windows(DataArguments(args.dataset, seq_len=args.seq_len), tokenizer)
    batches = DataLoader(windows, args.batch_size, shuffle=True, drop_last=True, collate_fn=default_data_collator)
    inner = torch.optim.AdamW(bare.parameters(), lr=args.learning_rate)
    # Not prepared: Accelerate would step it once a process, as if each had data of its own.
    schedule = get_cosine_schedule_with_warmup(inner, args.warmup_steps, args.max_steps)
    prepared: Any = accelerator.prepare(bare, inner, batches)
    model, optimizer, loader = prepared
    if not len(loader):
        raise ValueError(f"dataset={args.dataset!r} has too few windows for batch_size={args.batch_size}.")

    step, total = 0, torch.zeros((), device=accelerator.device)
    while step < args.max_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                # Of whole sequences, on each process that shares them. All are as long: a mean of means is right.
                loss = model(**batch).loss
                accelerator.backward(loss)
                total += loss.detach() / args.accumulation
                if accelerator.sync_gradients:
                    norm: Any = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            mean: Any = accelerator.reduce(total, "mean")
            rate = schedule.get_last_lr()[0]
            accelerator.print(f"step {step}: loss {mean.item():.6f}, grad_norm {norm.item():.6f}, rate {rate:.3e}")
            schedule.step()
            total.zero_()
            if step == args.max_steps:
                break

    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=weights)
        tokenizer.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1:])
