"""How the processes of a run share a model: each has all of it (DDP), or a share of each weight (FSDP2).

All of it is accelerate's. It takes its FSDP path on accelerators only and would silently train as DDP on the CPU, so
there it is told that this is FSDP: the path that the tests run on two CPU processes is the one that GPUs take.
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
    """AttemptError: this host has not what `device` and `devices` ask for."""
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
    """Half precision is autocast's, as without FSDP: shares are gathered in float32, and the numbers are the same."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(),
    )


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The model and the optimiser as they are trained."""
    if accelerator.is_fsdp2:
        _name_layers(accelerator, model)
    given: Any = accelerator
    model, wrapped = given.prepare(model, optimizer)
    # The wrapper is for gradient scalers, which bf16 does without, and looks for a package on the disk at each step.
    return model, wrapped.optimizer


def prepare_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """A model that is not trained: with FSDP each process holds its share of it, too, else all of it."""
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    library: Any = accelerate.utils
    return library.fsdp2_prepare_model(accelerator, model)


def _name_layers(accelerator: Accelerator, model: Any) -> None:
    """What is gathered at a time is a layer; a model may name kinds of layers that it does not have."""
    kinds = {type(module).__name__ for module in model.modules()}
    state: Any = accelerator.state
    state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(
        kinds & set(getattr(model, "_no_split_modules", None) or ())
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this process has a share. All processes at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's share of `tensor`, which all have, as `like` is shared; or the tensor, if that is not."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    mesh = like.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
