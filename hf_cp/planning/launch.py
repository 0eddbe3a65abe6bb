"""The launch configuration of a plan, as `accelerate launch --config_file` reads it, and the options of the script."""

from __future__ import annotations

from .cost import Cluster
from .memory import Training
from .shape import ModelShape


def script_options(training: Training) -> str:
    """What `recipes/sft.py` is started with for this plan, beside model, data and output folder."""
    options = [f"--seq_len {training.seq_len}", f"--per_device_train_batch_size {training.batch}"]
    if training.lora or training.precision == "bf16":
        options.append("--dtype bfloat16")
    if training.precision == "mixed":
        options.append("--bf16")
    if training.lora:
        options.append(f"--lora_rank {training.lora}")
    if training.checkpointing:
        options.append("--gradient_checkpointing")
    if training.cp_size > 1:
        options.append(f"--linear_mode {training.linear_mode} --attention_mode {training.attention_mode}")
    return " ".join(options)


def launch_yaml(shape: ModelShape, training: Training, cluster: Cluster, command: str) -> str:
    """The file's text: FSDP2 and context parallelism, or one process.

    Args:
        command: what wrote it, for the comment at the top.
    """
    comment = f"""\
# Written by: {command}
# In the script: hf_cp.patch(model, linear_mode="{training.linear_mode}", attention_mode="{training.attention_mode}")
# With recipes/sft.py: {script_options(training)}
"""
    # FSDP2 keeps in fp32 what is trained, whatever dtype it was loaded in, if it computes in another.
    mixed_precision = "bf16" if training.precision == "mixed" else "'no'"
    nodes = -(-cluster.gpus // cluster.gpus_per_node)
    if cluster.gpus == 1:
        return f"""{comment}\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
num_machines: 1
num_processes: 1
machine_rank: 0
main_training_function: main
mixed_precision: {mixed_precision}
use_cpu: false
"""
    if nodes == 1:
        place = "main_process_port: 0"
    else:
        comment += "# Start it on every machine with its --machine_rank, and with --main_process_ip of the first.\n"
        place = "main_process_ip: 127.0.0.1\nmain_process_port: 29500\nrdzv_backend: static\nsame_network: true"
    return f"""{comment}\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: {nodes}
num_processes: {cluster.gpus}
machine_rank: 0
{place}
main_training_function: main
mixed_precision: {mixed_precision}
use_cpu: false
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {shape.layer_class}
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
parallelism_config:
  parallelism_config_dp_replicate_size: {cluster.gpus // training.shards}
  parallelism_config_dp_shard_size: {training.shards // training.cp_size}
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: {training.cp_size}
  parallelism_config_cp_comm_strategy: allgather
"""
