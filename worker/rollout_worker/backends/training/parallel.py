"""How a run's processes share a model: each has all of it (DDP), or a shard of each weight (FSDP2).

Everything is accelerate's. It uses FSDP on accelerators only and would silently train with DDP on the CPU, so it is
forced to FSDP there: the tests on two CPU processes take the same path as GPUs.
"""

from __future__ import annotations

from typing import Any

import accelerate.utils
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from rollout.model.errors import AttemptError
from rollout.workloads.train.config import TrainingSection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def make_accelerator(settings: TrainingSection) -> Accelerator:
    """Make the accelerator. Raises AttemptError if this host lacks what `device` and `devices` ask for."""
    gpus = torch.cuda.device_count() if settings.device != "cpu" and torch.cuda.is_available() else 0
    if settings.device == "cuda" and not gpus:
        message = 'device = "cuda", but torch finds no GPU on this worker: set device = "cpu", or use a host with one'
        raise AttemptError(message, code="device_missing")
    if gpus and settings.devices > gpus:
        raise AttemptError(
            f"devices = {settings.devices}, but this worker has {gpus} GPU{'s' if gpus > 1 else ''}: lower devices "
            "(and raise gradient_accumulation as much), or use a host with more",
            code="device_missing",
        )
    plugin = _plugin() if settings.strategy == "fsdp" else None
    # Buckets that are rebuilt after the first step, as they are without this, would sum in another order in a process
    # that begins at a snapshot than in one that came there by itself.
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        mixed_precision="bf16" if settings.precision == "bf16" else "no",
        cpu=not gpus,
        fsdp_plugin=plugin,
        kwargs_handlers=[ddp],
    )
    if plugin is not None and not accelerator.is_fsdp2:
        state: Any = accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState().distributed_type = DistributedType.FSDP  # from which the other one is filled again and again
    return accelerator


def _plugin() -> FullyShardedDataParallelPlugin:
    """Return the plugin. Half precision is autocast's, as without FSDP: shards are gathered in float32, so the numbers
    are the same."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(),
    )


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the model and the optimiser prepared for training."""
    if accelerator.is_fsdp2:
        _name_layers(accelerator, model)
    given: Any = accelerator
    model, wrapped = given.prepare(model, optimizer)
    # The wrapper is for gradient scalers, which bf16 does without, and looks for a package on the disk at each step.
    return model, wrapped.optimizer


def prepare_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Prepare a model that is not trained: with FSDP each process has a shard of it, too."""
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    library: Any = accelerate.utils
    return library.fsdp2_prepare_model(accelerator, model)


def _name_layers(accelerator: Accelerator, model: Any) -> None:
    """Name the layers to gather one at a time; a model may name kinds of layers that it does not have."""
    kinds = {type(module).__name__ for module in model.modules()}
    state: Any = accelerator.state
    state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(
        kinds & set(getattr(model, "_no_split_modules", None) or ())
    )


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of which this process has a shard. All processes call it at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, which all have, sharded like `like`; or the tensor if `like` is not."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    mesh = like.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
