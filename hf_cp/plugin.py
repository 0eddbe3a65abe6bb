"""How a patched model enters Accelerate and Trainer.

What is leaned on, and where it was read (accelerate 1.15, transformers 5.17 and 5.24): ``Accelerator._prepare_cp`` and
``_cp_context``, ``ParallelismConfig.__post_init__``, ``_sizes`` and ``_validate_accelerator``,
``Accelerator.gather_for_metrics``, ``Trainer._prepare_context_parallel_inputs``, ``_get_num_items_in_batch``,
``compute_loss`` and ``_track_num_input_tokens``. The methods are wrapped once, on the class, and pass every model that
is not patched to the original.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, recursively_apply
from accelerate.utils.operations import gather_object
from torch import nn
from torch.utils.data import DataLoader

from .class_swap import stock_class
from .loss import TrainerItemCount, shift_labels
from .mesh import CpMesh
from .models.common.causal_lm import CallOptions, language_model_head
from .models.common.fused_head import serve_fused_head
from .state import bind, patch_state

_MARK = "_hf_cp_original"


@dataclass
class ContextParallelConfig(ParallelismConfig):
    """Accelerate's ``ParallelismConfig`` for patched models, as ``TrainingArguments(parallelism_config=...)``.

    The world is ``dp_replicate_size x dp_shard_size x cp_size`` ranks; ranks of one context-parallel group are
    neighbours. Beyond its base class it permits ``dp_replicate_size`` with ``cp_size``, and DDP under ``cp_size``:

    ===========================================  =======================================================
    launched with FSDP2                          sharded over dp_shard x cp, replicated over dp_replicate
    launched without FSDP                        DDP over all ranks
    ===========================================  =======================================================

    Args:
        dp_replicate_size, dp_shard_size, cp_size: sizes; left out, they come from the launch configuration, else 1.

    Raises:
        ValueError: a size below 1.
    """

    def __post_init__(self) -> None:
        install()
        self._mesh_built = False
        replicate = self.dp_replicate_size
        if replicate is None:
            replicate = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        _check_size("dp_replicate_size", replicate)
        self.dp_replicate_size = 1  # the base class refuses replicas beside cp, which DDP and HSDP handle
        for name in ("cp_size", "dp_shard_size"):
            _check_size(name, getattr(self, name))
        super().__post_init__()
        self._set_size("dp_replicate", replicate)
        _check_alone(self)

    @property
    def cp_enabled(self) -> bool:
        """Whether there is more than one context-parallel rank.

        Accelerate refuses context parallelism without FSDP while it builds its state, and takes it for FSDP there. The
        mesh is built right after that; from then on the answer is the true one.
        """
        return self._mesh_built and (self.cp_size or 1) > 1

    def build_device_mesh(self, device_type: str) -> Any:
        """The base class's mesh, with the same names."""
        self._mesh_built = True
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        if self.total_size == 1:
            super()._validate_accelerator(accelerator)
            return
        _check_world(self, accelerator)


def _check_size(name: str, size: Any) -> None:
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f"{name}={size!r} is not supported: give a whole number, at least 1")


def _check_alone(config: ParallelismConfig) -> None:
    for name in ("tp_size", "sp_size"):
        size = getattr(config, name)
        if size > 1:
            raise ValueError(f"{name}={size} cannot be combined with context parallelism: set it to 1")


def _check_product(config: Any, ranks: int) -> None:
    """Raise where the sizes do not make up the number of processes, before a mesh is made of them."""
    if config.total_size in (1, ranks):  # without any size, Accelerate replicates over all processes
        return
    cp_size = config.cp_size if ranks % config.cp_size == 0 else ranks
    rest = ranks // cp_size
    working = f"cp_size={cp_size}, dp_shard_size={rest}, dp_replicate_size=1"
    if rest > 1:
        working += f" with FSDP2, or cp_size={cp_size}, dp_shard_size=1, dp_replicate_size={rest}"
    raise ValueError(
        f"dp_replicate_size {config.dp_replicate_size} x dp_shard_size {config.dp_shard_size} x cp_size "
        f"{config.cp_size} = {config.total_size} is not the number of processes {ranks}: set for example {working}"
    )


def _check_world(config: ParallelismConfig, accelerator: Accelerator) -> None:
    """Raise where the sizes do not make up the world, or a wrapper cannot carry context parallelism."""
    _check_alone(config)
    _check_product(config, accelerator.num_processes)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"distributed_type={accelerator.distributed_type.value} cannot be combined with context parallelism: "
            "launch with FSDP2 or DDP"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("fsdp_version=1 cannot be combined with context parallelism: set fsdp_version: 2")
    if accelerator.distributed_type != DistributedType.FSDP and (config.dp_shard_size or 1) > 1:
        raise ValueError(
            f"dp_shard_size={config.dp_shard_size} needs FSDP2: launch with it, or set dp_replicate_size instead"
        )


def install() -> None:
    """Wrap Accelerate's context-parallel preparation, and Trainer's where it is in use. Repeating it does nothing."""
    _wrap(ParallelismConfig, "build_device_mesh", _build_device_mesh)
    _wrap(Accelerator, "_prepare_cp", _prepare_cp)
    _wrap(Accelerator, "prepare_model", _prepare_model)
    _wrap(Accelerator, "gather_for_metrics", _gather_for_metrics)


def _wrap(cls: type, name: str, replacement: Any) -> None:
    original = getattr(cls, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(method, _MARK, original)
    setattr(cls, name, method)


def _build_device_mesh(original: Any, config: ParallelismConfig, device_type: str) -> Any:
    """Refuse sizes that do not make up the world by name; the mesh would only say that it is too big."""
    if config.tp_size == config.sp_size == 1:
        _check_product(config, PartialState().num_processes)
    return original(config, device_type)


def _prepare_cp(original: Any, accelerator: Accelerator, *args: Any) -> Any:
    """Bind patched models to the accelerator's context-parallel group; leave everything else to Accelerate."""
    config = accelerator.dataloader_config
    if any(isinstance(arg, DataLoader) for arg in args) and config.dispatch_batches is None:
        config.dispatch_batches = False  # a dispatcher would give every rank of a group another batch
    patched = [arg for arg in args if isinstance(arg, nn.Module) and patch_state(arg) is not None]
    if not patched:
        return args if _serves_patched(accelerator) else original(accelerator, *args)
    if config.dispatch_batches:
        raise ValueError("dispatch_batches=True gives context-parallel ranks different batches: set it to False")
    for model in patched:
        _bind(accelerator, model)
    _keep_loss_in_fp32(accelerator)
    return args


def _keep_loss_in_fp32(accelerator: Accelerator) -> None:
    """Take back that FSDP2 casts the outputs of a model in mixed precision: it would round the loss to bf16.

    Hidden states and logits have the dtype of the parameters without it.
    """
    if accelerator.is_fsdp2:
        fsdp: Any = accelerator.state.fsdp_plugin
        policy = fsdp.mixed_precision_policy
        if policy is not None and policy.output_dtype is not None:
            fsdp.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def _prepare_model(original: Any, accelerator: Accelerator, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Bind a model that is prepared alone, as Trainer does to evaluate without training.

    Accelerate would take a model that was prepared to be evaluated for one that is prepared to be trained, and leave it
    without DDP: each rank would go on with gradients of its own.
    """
    parallelism = accelerator.parallelism_config
    if parallelism is None or not parallelism.cp_enabled or patch_state(model) is None:
        return original(accelerator, model, *args, **kwargs)
    _bind(accelerator, model)
    prepared = original(accelerator, model, *args, **kwargs)
    if kwargs.get("evaluation_mode") and accelerator.distributed_type != DistributedType.FSDP:
        prepared._is_accelerate_prepared = False
    return prepared


def _bind(accelerator: Accelerator, model: nn.Module) -> None:
    """Tie a patched model to the accelerator's context-parallel group, and Trainer to patched models."""
    parallelism = accelerator.parallelism_config
    assert parallelism is not None
    assert accelerator.torch_device_mesh is not None
    _check_world(parallelism, accelerator)
    _check_dtypes(accelerator, model)
    bind(model, CpMesh.from_group(accelerator.torch_device_mesh["cp"].get_group()))
    serve_fused_head(model)
    accelerator._cp_context = _whole_batch  # pyright: ignore[reportAttributeAccessIssue]
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None:
        _wrap(trainer.Trainer, "_prepare_context_parallel_inputs", _prepare_trainer_inputs)
        _wrap(trainer.Trainer, "_get_num_items_in_batch", _get_num_items_in_batch)
        _wrap(trainer.Trainer, "compute_loss", _compute_loss)
        _wrap(trainer.Trainer, "_track_num_input_tokens", _track_num_input_tokens)
        _wrap(trainer.Trainer, "prediction_step", _prediction_step)
    sft = sys.modules.get("trl.trainer.sft_trainer")
    if sft is not None:
        _wrap(sft.SFTTrainer, "compute_loss", _compute_sft_loss)


def _check_dtypes(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise where FSDP2 would stop at its first forward because the parameters it trains have several dtypes."""
    if not accelerator.is_fsdp2 or accelerator.mixed_precision != "no":  # with mixed precision Accelerate upcasts all
        return
    names: dict[torch.dtype, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names.setdefault(parameter.dtype, []).append(name)
    if len(names) > 1:
        common = max(names, key=lambda dtype: len(names[dtype]))
        other = next(dtype for dtype in names if dtype != common)
        raise ValueError(
            f"parameter dtype {other} ({names[other][0]} and {len(names[other]) - 1} more) beside {common}: FSDP2 "
            f"shards one dtype, so call model.to({common}), or load in float32 and set mixed_precision='bf16'"
        )


@contextlib.contextmanager
def _whole_batch(**_: Any) -> Iterator[None]:
    """``accelerator.maybe_context_parallel`` for patched models: they take the whole batch and shard it themselves."""
    yield


def _prepare_trainer_inputs(original: Any, trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Hand a patched model its whole batch; TRL's reference model, which it prepares by itself, gets the group too."""
    state = patch_state(model)
    if state is None or _copies(trainer) == 1:
        return original(trainer, model, inputs)
    reference: Any = getattr(trainer, "ref_model", None)
    unbound = None if reference is None else patch_state(reference)
    if reference is not None and unbound is not None and unbound.mesh is not state.mesh:
        bind(reference, state.mesh)
        serve_fused_head(reference)
    return contextlib.nullcontext, inputs


def _loss_from_logits(trainer: Any, model: nn.Module) -> bool:
    """Whether Trainer computes the loss outside the model, from the logits of the whole sequence."""
    smoother_outside = trainer.label_smoother is not None and language_model_head(model) is None
    return trainer.compute_loss_func is not None or smoother_outside


def _smoother_shifts(model: nn.Module) -> bool:
    """Trainer's smoother shifts the labels of text models and takes those of multimodal models as they are."""
    head: Any = language_model_head(model)
    return stock_class(head) in type(head).hf_cp_family.causal_lms


def _smoothed_by_head(trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    inputs = dict(inputs)
    options = inputs.get("cp_options") or CallOptions()
    inputs["cp_options"] = dataclasses.replace(options, label_smoothing=trainer.label_smoother.epsilon)
    if inputs.get("labels") is not None:  # under this name Trainer would take them out for its own smoother
        labels = inputs.pop("labels")
        inputs["shift_labels"] = shift_labels(labels) if _smoother_shifts(model) else labels
    return inputs


def _compute_loss(
    original: Any,
    trainer: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """A loss made of the whole sequence's logits, which every rank of a group computes alike.

    It gets the true item count, and the loss is multiplied by the number of groups, not of ranks. Label smoothing is
    left to a language-model head, which needs no logits for it.
    """
    items = num_items_in_batch
    if _copies(trainer) > 1 and trainer.label_smoother is not None and not _loss_from_logits(trainer, model):
        inputs = _smoothed_by_head(trainer, model, inputs)
    if not isinstance(items, TrainerItemCount):
        return original(trainer, model, inputs, return_outputs, items)
    if not _loss_from_logits(trainer, model):
        return original(trainer, model, inputs, return_outputs, items.going_to_trainer())
    copies = _copies(trainer)
    result = original(trainer, model, inputs, return_outputs, items.labels)
    if not items.across_devices:
        return result
    return (result[0] / copies, result[1]) if return_outputs else result / copies


def _compute_sft_loss(
    original: Any,
    trainer: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """The loss of TRL's SFTTrainer, made of the whole sequence's scores, alike on every rank of a group.

    It is multiplied by the world size before the router's loss is added, so the item count takes back the copies; a
    user's own function gets the true count.
    """
    items = num_items_in_batch
    if not isinstance(items, TrainerItemCount):
        return original(trainer, model, inputs, return_outputs, items)
    if trainer.compute_loss_func is not None:
        return _compute_loss(original, trainer, model, inputs, return_outputs, items)
    return original(trainer, model, inputs, return_outputs, items.count * _copies(trainer))


def _prediction_step(
    original: Any,
    trainer: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    prediction_loss_only: bool,
    *args: Any,
    **kw: Any,
) -> Any:
    """Keep the whole sequence's logits out of an evaluation that only wants the loss."""
    if patch_state(model) is not None:
        inputs = {**inputs, "cp_options": CallOptions(return_logits=not prediction_loss_only)}
    return original(trainer, model, inputs, prediction_loss_only, *args, **kw)


def _copies(trainer: Any) -> int:
    """Ranks that hold the same batch because they share a patched model's sequence."""
    parallelism = trainer.accelerator.parallelism_config
    return parallelism.cp_size if parallelism is not None and patch_state(trainer.model) is not None else 1


def _get_num_items_in_batch(original: Any, trainer: Any, batch_samples: list[Any], device: torch.device) -> Any:
    """Trainer's item count, marked as Trainer's.

    Without the remainder that transformers 5.17 drops, which divides by cp_size in whole numbers.
    """
    copies = _copies(trainer)
    count = original(trainer, batch_samples * copies, device)
    if count is None or copies == 1:
        return count
    across_devices = trainer.args.average_tokens_across_devices
    return TrainerItemCount(count / copies, across_devices, multiplied=False, copies=copies)


def _track_num_input_tokens(original: Any, trainer: Any, inputs: Any) -> None:
    """Count the tokens of a context-parallel group once, where Trainer adds up the copies of all its ranks."""
    before = trainer.state.num_input_tokens_seen
    original(trainer, inputs)
    trainer.state.num_input_tokens_seen = before + (trainer.state.num_input_tokens_seen - before) // _copies(trainer)


def _gather_for_metrics(
    original: Any, accelerator: Accelerator, input_data: Any, use_gather_object: bool = False
) -> Any:
    """``Accelerator.gather_for_metrics`` that counts each context-parallel group once.

    Ranks of a group hold copies of the same samples; the copies of all but its first rank are dropped, then the
    samples that fill up the last batch, as in the original.
    """
    if not _serves_patched(accelerator):
        return original(accelerator, input_data, use_gather_object)
    parallelism: Any = accelerator.parallelism_config
    cp_size = parallelism.cp_size if parallelism is not None and parallelism.cp_enabled else 1

    def first_of_each_group(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, cp_size, x.shape[0] // accelerator.num_processes))[:, 0].flatten(0, 1)

    tensors = not use_gather_object and _only_tensors(input_data)
    if tensors:
        data: Any = recursively_apply(first_of_each_group, accelerator.gather(input_data))
    else:
        gathered = gather_object([input_data])[::cp_size]
        data = [item for part in gathered for item in part]
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return data
    return recursively_apply(lambda x: x[: state.remainder], data) if tensors else data[: state.remainder]


def _serves_patched(accelerator: Accelerator) -> bool:
    return any(patch_state(model) is not None for model in accelerator._models)


def _only_tensors(data: Any) -> bool:
    if isinstance(data, dict):
        return all(_only_tensors(x) for x in data.values())
    if isinstance(data, (list, tuple)):
        return all(_only_tensors(x) for x in data)
    return isinstance(data, torch.Tensor)
