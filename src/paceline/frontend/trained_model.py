"""The module that an optimizer trains, the names of its parameters, and their layout in the flat vectors."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..core.protocol.layout import Layout, Parameter
from ..errors import ConfigurationError
from ..shard.vectors import dtype_name
from .joint_model import JointModel

__all__ = [
    "Place",
    "describe_parameter",
    "find_model",
    "layout_of",
    "require_not_wrapped",
    "require_trainable",
    "single_device_of",
]

PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Names of torch's classes whose instances exchange gradients between processes by themselves."""


def find_model(parameters: Sequence[torch.Tensor]) -> nn.Module:
    """Search all existing modules, and return the outermost one that contains all of these parameters.

    Raises:
        ConfigurationError: no module contains all of the parameters, or several outermost modules do.
    """
    wanted = {id(parameter) for parameter in parameters}
    holders = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), nn.Module) and wanted <= _parameter_ids(candidate)
    ]
    inner = {id(sub) for holder in holders for sub in holder.modules() if sub is not holder}
    outermost = [holder for holder in holders if id(holder) not in inner]
    if len(outermost) == 1:
        model: nn.Module = getattr(outermost[0], "_orig_mod", outermost[0])  # unwrap torch.compile's module
        return model
    found = "no module holds" if not outermost else f"{len(outermost)} modules hold"
    raise ConfigurationError(
        f"Cannot find the model: {found} all of the optimizer's parameters. Pass the model explicitly: "
        "DistributedOptimizer(optimizer, model=...). Combine several modules in a torch.nn.ModuleDict({...})."
    )


def require_not_wrapped(models: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> None:
    """Check that no module of torch's own data parallelism contains these parameters.

    Args:
        models: the modules that are trained, as far as they are known.
        parameters: the parameters that are trained.

    Raises:
        ConfigurationError: a model, a part of it, or a module around it is such a module.
    """
    if not torch.distributed.is_available():
        return
    modules = [module for model in models for module in model.modules()]
    if torch.distributed.is_initialized():  # otherwise, no such module can exist
        trained = {id(parameter) for parameter in parameters}
        modules += [
            candidate
            for candidate in gc.get_objects()
            if _parallel_class(candidate) and trained & _parameter_ids(candidate)
        ]
    for module in modules:
        if name := _parallel_class(module):
            raise ConfigurationError(
                f"The model is wrapped in {name}, which exchanges gradients between the workers by itself, and so "
                "does the run. Remove the wrapper and the call of torch.distributed.init_process_group(), or start "
                "the script with torchrun."
            )


def _parallel_class(candidate: object) -> str:
    """Return the name of the class of `PARALLEL` to which an object belongs; "" if there is none."""
    if not issubclass(type(candidate), nn.Module):
        return ""
    for base in type(candidate).__mro__:
        if base.__name__ in PARALLEL and base.__module__.startswith("torch."):
            return base.__name__
    return ""


def require_trainable(model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    """Check that a model contains no module that would compute something else in a run, without an error.

    Raises:
        ConfigurationError: the model contains such a module.
    """
    trained = set(map(id, parameters))
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"Module {name!r} is a SyncBatchNorm, which needs accelerators and a process group to compute the "
                "statistics of all workers' batches. Without them, it would silently use those of its own batch. Use "
                "BatchNorm: each worker normalizes by its own batch, and the servers pool the running statistics."
            )
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
            and id(module.weight) in trained
        ):
            raise ConfigurationError(
                f"Module {name!r} has max_norm={module.max_norm}, so its forward pass edits the weights: in each "
                "worker, only the rows that this worker uses. Set its max_norm to None, and limit the norms after "
                "each step: `with optimizer.editing(), torch.no_grad(): "
                f"embedding.weight.renorm_({module.norm_type}, 0, {module.max_norm})`."
            )


class Place(NamedTuple):
    """The place of a parameter in the layout. See `core.protocol.layout`.

    Attributes:
        parameter: the parameter.
        set_index: index of the parameter set that the parameter belongs to.
        position: index of the parameter in the set.
        part: number of the part of the layout with which the parameter was added.
    """

    parameter: torch.Tensor
    set_index: int
    position: int
    part: int


def layout_of(model: JointModel, places: Sequence[Place], before: Sequence[Parameter] = ()) -> Layout:
    """Return the flat-vector layout of parameters. See `Layout`.

    Args:
        model: the model that contains the parameters.
        places: the parameters, in the order of the layout.
        before: the descriptions of the parameters that precede them, because they are trained already.

    Raises:
        ConfigurationError: a parameter does not belong to the model, has no data, or has a dtype that cannot be
            trained.
    """
    names = _names(model)
    entries = list(before)
    for parameter, set_index, position, part in places:
        if id(parameter) not in names:
            raise ConfigurationError(
                f"The optimizer's parameter {position}, of shape {list(parameter.shape)}, is not a parameter of the "
                "model. If the model got new parameters after the optimizer was created, for example by "
                "load_state_dict(..., assign=True) or by a new layer, create the optimizer after that. Else pass the "
                "module that holds all parameters: DistributedOptimizer(optimizer, model=...)."
            )
        entry = Parameter(
            names[id(parameter)], tuple(parameter.shape), dtype_name(parameter.dtype), set_index, part
        )
        if parameter.is_meta:
            raise ConfigurationError(
                f"Parameter {entry.names[0]!r} is on the device 'meta', so it has no values to train. Create them "
                "first: model.to_empty(device=...), and then load or initialize the weights."
            )
        entries.append(entry)
    return Layout.of(entries)


def single_device_of(model: JointModel, parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of all of these parameters.

    Raises:
        ConfigurationError: they are on several devices.
    """
    first = parameters[0]
    for parameter in parameters:
        if parameter.device != first.device:
            raise ConfigurationError(
                f"Parameter {describe_parameter(model, first)} is on {first.device}, but "
                f"{describe_parameter(model, parameter)} is on {parameter.device}. A worker trains on one device: "
                "move the whole model to one, and start one worker for each device."
            )
    return first.device


def least_samples_of(modules: Iterable[nn.Module]) -> int:
    """Return how many samples a batch of these modules must have: BatchNorm cannot normalize a single one."""
    return 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules) else 1


def describe_parameter(model: JointModel, parameter: torch.Tensor) -> str:
    """Return a parameter's name in the model, or its shape if it is not a parameter of the model."""
    names = _names(model).get(id(parameter))
    return repr(names[0]) if names else f"a tensor of shape {list(parameter.shape)}"


def _names(model: JointModel) -> dict[int, tuple[str, ...]]:
    """Return a mapping from `id(parameter)` to the parameter's names. Tied parameters have several names."""
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names


def _parameter_ids(module: nn.Module) -> set[int]:
    try:
        return {id(parameter) for parameter in module.parameters()}
    except AttributeError:  # the module's constructor has not finished, or has failed
        return set()
