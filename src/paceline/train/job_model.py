"""The modules that the optimizers of a script train, seen as one model."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.layout import (
    BufferSpec,
    FrozenSpec,
    HyperParameters,
    Layout,
    ModelSpec,
    OptimizerSpec,
    Parameter,
    ShardSlice,
    joint_counters,
)
from ..errors import ConfigurationError, UsageError
from ..shard.foreign import changed_groups
from ..shard.optimizers import OF_TORCH, counters_in, join_state, slice_state, with_counters
from ..shard.vectors import Vectors, chunks, digest_of, digests_of, dtype_name


class _Part(NamedTuple):
    """One of the modules.

    Attributes:
        model: the module.
        prefix: the beginning of the names of its tensors.
        known: `id` of each tensor that was a part of the joint model before the module was added.
    """

    model: nn.Module
    prefix: str
    known: frozenset[int]


class JointModel:
    """The modules that one or several optimizers train, with names that distinguish all of their tensors.

    A module that is a part of another module is not counted twice. If two modules give the same name to different
    tensors, all names of the n-th module begin with "model<n>.", where n is counted from 0 in the order of the
    optimizers. A joint model can be extended by further modules. Earlier names then remain the same. If a tensor of an
    added module has the same name as a tensor of an earlier module, only the names of the added module get such a
    prefix. Tensors that the script has inserted into an earlier module are named as tensors of this module. A tensor
    that the script has removed from a module keeps its names and its last content.

    Args:
        models: the module that each optimizer trains, in the order of the optimizers.
        before: the joint model that these modules extend; None if there is none.

    Example:
        >>> one, other = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
        >>> list(JointModel([one, one]).tensors())
        ['weight']
        >>> list(JointModel([one, other]).tensors())
        ['model0.weight', 'model1.weight']
        >>> list(JointModel([other], before=JointModel([one])).tensors())
        ['weight', 'model1.weight']
    """

    def __init__(self, models: Sequence[nn.Module], before: JointModel | None = None) -> None:
        self._parts: list[_Part] = list(before._parts) if before is not None else []
        self._owners: dict[str, tuple[nn.Module, str]] = dict(before._owners) if before is not None else {}
        known = frozenset(map(id, before.tensors().values())) if before is not None else frozenset()
        self._latest: dict[str, torch.Tensor] = dict(before._latest) if before is not None else {}
        earlier = [part.model for part in self._parts]
        distinct = list({id(model): model for model in [*earlier, *models]}.values())
        inner = {id(sub) for model in distinct for sub in model.modules() if sub is not model}
        added = [model for model in distinct[len(earlier) :] if id(model) not in inner]
        for model, prefix, _ in self._parts:
            for name, tensor in _tensors(model).items():
                if id(tensor) not in known:  # a layer that was inserted into an earlier module
                    self._owners.setdefault(prefix + name, (model, name))
        named = self.tensors()
        named |= {name: named[full] for full, (_, name) in self._owners.items()}
        known = frozenset(map(id, named.values()))
        contents = [{k: v for k, v in _tensors(model).items() if id(v) not in known} for model in added]
        collide = [
            any(named.setdefault(name, tensor) is not tensor for name, tensor in content.items())
            for content in contents
        ]
        if before is None:
            collide = [any(collide)] * len(added)
        for model, content, needs_prefix in zip(added, contents, collide, strict=True):
            prefix = f"model{len(self._parts)}." if needs_prefix else ""
            self._parts.append(_Part(model, prefix, known))
            self._owners |= {prefix + name: (model, name) for name in content}
            self._latest |= {prefix + name: tensor for name, tensor in content.items()}

    def modules(self) -> Iterator[nn.Module]:
        """Return every module once."""
        found = {id(module): module for part in self._parts for module in part.model.modules()}
        return iter(found.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return each parameter with its name. A tied parameter is returned with each of its names."""
        for model, prefix, known in self._parts:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if id(parameter) not in known:
                    yield prefix + name, parameter

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the `state_dict` of the modules, by name, including those that the script removed."""
        tensors = {id(part.model): _tensors(part.model) for part in self._parts}
        for full, (model, name) in self._owners.items():
            if (tensor := tensors[id(model)].get(name)) is not None:
                self._latest[full] = tensor
        return {full: self._latest[full] for full in self._owners}

    def added(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the modules that have no name in the joint model yet, by new names."""
        known = {id(tensor) for tensor in self._present()}
        return {
            part.prefix + name: tensor
            for part in self._parts
            for name, tensor in _tensors(part.model).items()
            if id(tensor) not in known and (part.model, name) not in self._owners.values()
        }

    def _present(self) -> Iterator[torch.Tensor]:
        for name in self._owners:
            with suppress(AttributeError):
                yield self.tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor that now has this name.

        Raises:
            AttributeError: no tensor has this name any more.
        """
        model, name = self._owners[name]
        owner, _, name = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), name)
        if not isinstance(tensor, torch.Tensor):
            raise AttributeError(f"{name!r} is no tensor any more")
        return tensor

    def latest(self, name: str) -> torch.Tensor:
        """Return the tensor that now has this name. If it was removed, return the last tensor with this name."""
        with suppress(AttributeError):
            self._latest[name] = self.tensor(name)
        return self._latest[name]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


# -- The module that an optimizer trains, the names of its parameters, and their layout in the flat vectors

PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Names of torch's classes whose instances exchange gradients between processes by themselves."""


def find_model(parameters: Sequence[torch.Tensor]) -> nn.Module:
    """Search all existing modules, and return the outermost one that contains all of these parameters.

    Raises:
        ConfigurationError: no module contains all of the parameters, or several outermost modules do.
    """
    wanted = {id(parameter) for parameter in parameters}
    holders = [module for module in _modules() if wanted <= _parameter_ids(module)]
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


def _modules() -> Iterator[nn.Module]:
    """Return all existing modules. There may be a million other objects, so the loop over all objects runs in C."""
    kinds: set[type] = set()
    todo: list[type] = [nn.Module]
    while todo:
        kinds.add(kind := todo.pop())
        todo += kind.__subclasses__()
    things = gc.get_objects()
    return compress(things, map(kinds.__contains__, map(type, things)))


def require_not_wrapped(models: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> None:
    """Check that no wrapper for torch's own data parallelism contains these parameters.

    Args:
        models: the modules that are trained, as far as they are known.
        parameters: the parameters that are trained.

    Raises:
        ConfigurationError: a model, a part of it, or a module around it is such a wrapper.
    """
    if not torch.distributed.is_available():
        return
    modules = [module for model in models for module in model.modules()]
    if torch.distributed.is_initialized():  # without a process group, no such module can exist
        trained = {id(parameter) for parameter in parameters}
        modules += [
            candidate
            for candidate in _modules()
            if _parallel_class(candidate) and trained & _parameter_ids(candidate)
        ]
    for module in modules:
        if name := _parallel_class(module):
            raise ConfigurationError(
                f"The model is wrapped in {name}, which exchanges gradients between the workers by itself, and so "
                "does the run. Remove the wrapper and the call of torch.distributed.init_process_group(), or start "
                "the script with torchrun."
            )


def _parallel_class(candidate: nn.Module) -> str:
    """Return the name of the class of `PARALLEL` to which a module belongs; "" if there is none."""
    for base in type(candidate).__mro__:
        if base.__name__ in PARALLEL and base.__module__.startswith("torch."):
            return base.__name__
    return ""


def require_trainable(model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    """Check that a model contains no module that would silently compute something different in a run.

    Raises:
        ConfigurationError: the model contains such a module.
    """
    trained = set(map(id, parameters))
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"Module {name!r} is a SyncBatchNorm, which needs accelerators and a process group to compute the "
                "statistics of all workers' batches. Here, it would silently use the statistics of its own batch. Use "
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


class ParameterPlace(NamedTuple):
    """The place of a parameter in the layout. See `core.layout`.

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


def layout_of(
    model: JointModel, places: Sequence[ParameterPlace], before: Sequence[Parameter] = ()
) -> Layout:
    """Return the flat-vector layout of parameters. See `Layout`.

    Args:
        model: the model that contains the parameters.
        places: the parameters, in the order of the layout.
        before: the descriptions of the parameters that are trained already, which come first in the layout.

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
                "load_state_dict(..., assign=True) or by a new layer, create the optimizer after that. Otherwise, pass "
                "the module that holds all parameters: DistributedOptimizer(optimizer, model=...)."
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
                "move the whole model to one device, and start one worker for each device."
            )
    return first.device


def least_samples_of(modules: Iterable[nn.Module]) -> int:
    """Return how many samples a batch of these modules must have: BatchNorm cannot normalize a single sample."""
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


# -- The tensors that no optimizer trains: buffers, such as BatchNorm's statistics, and frozen parameters ----

COMPARED_SIZE = 65_536
"""Maximum number of elements in a buffer whose changes are also detected by a comparison with a copy."""


class Buffers:
    """Detects changes to a model's buffers, and describes its frozen parameters.

    Buffers and frozen parameters are the tensors in the model's `state_dict` that the optimizer does not train. Both
    may be on any device. The tensors that this class returns are in host memory, unless stated otherwise.

    Args:
        model: the model.
        trained: the parameters that the optimizer trains.
        before: the buffers of a smaller model, which this model extends. Values of these buffers that were sent are not
            sent again.

    Attributes:
        specs: description of each buffer, in the order of the `state_dict`.
        frozen: description of each frozen parameter, in the order of the `state_dict`.
        added: the buffers that the smaller model did not have, by name. They count as sent.
        have_changed: True if training may have changed a buffer: `changed` has returned the buffer a second time, or
            `send_again` has been called for it.
    """

    def __init__(
        self, model: JointModel, trained: Sequence[torch.Tensor], before: Buffers | None = None
    ) -> None:
        self._model = model
        trained_ids = set(map(id, trained))
        tensors = {name: tensor for name, tensor in model.tensors().items() if id(tensor) not in trained_ids}
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided:
                raise ConfigurationError(
                    f"Buffer {name!r} has the layout {tensor.layout}, expected torch.strided, because workers exchange "
                    "only buffers that are dense. If all workers compute the same values, register the buffer with "
                    "register_buffer(..., persistent=False), so that it is not exchanged."
                )
        described = [
            BufferSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            for name, tensor in tensors.items()
        ]
        # A list is made first, for the reason given in `DistributedOptimizer.parameter_set`.
        self.specs = tuple([spec for spec in described if not isinstance(tensors[spec.name], nn.Parameter)])
        self._names = frozenset(tensors)
        self._dtypes = [tensors[spec.name].dtype for spec in self.specs]
        frozen = [spec for spec in described if isinstance(tensors[spec.name], nn.Parameter)]
        digests = {str(spec): spec.digest for spec in before.frozen} if before is not None else {}
        new = [spec for spec in frozen if str(spec) not in digests]
        found = digests_of([tensors[spec.name] for spec in new])
        digests |= {str(spec): digest for spec, digest in zip(new, found, strict=True)}
        self.frozen: tuple[FrozenSpec, ...] = tuple(
            FrozenSpec(spec.name, spec.shape, spec.dtype, digests[str(spec)]) for spec in frozen
        )
        self.added: dict[str, torch.Tensor] = {}
        self.have_changed = False
        self._sent: dict[str, _Sent] = {}
        if before is not None:
            self._follow(before)

    def _follow(self, before: Buffers) -> None:
        self.have_changed = before.have_changed
        earlier = {spec.name for spec in before.specs}
        tensors = self.all()
        self.added = _copies({name: each for name, each in tensors.items() if name not in earlier})
        sent = {name: each for name, each in before._sent.items() if name in tensors}
        self._sent = sent | {name: _Sent(tensors[name], value) for name, value in self.added.items()}

    def all(self) -> dict[str, torch.Tensor]:
        """Return every buffer by name, on its own device."""
        return {spec.name: self._get(spec.name) for spec in self.specs}

    def values(self, specs: Sequence[BufferSpec]) -> list[torch.Tensor]:
        """Return copies of the values of these buffers, in this order."""
        return list(_copies({spec.name: self._get(spec.name) for spec in specs}).values())

    def chunks_of(self, digest: str) -> Iterator[memoryview] | None:
        """Return the bytes of the frozen parameter with this digest, in parts; None if no parameter has it."""
        for spec in self.frozen:
            if spec.digest == digest:
                return chunks(self._get(spec.name))
        return None

    def differing_from(self, earlier: Mapping[int, torch.Tensor]) -> set[str]:
        """Return the names of the buffers that differ from earlier copies, which are given by the buffers' `id`."""
        found = set()
        for spec in self.specs:
            tensor = self._model.latest(spec.name)
            before = earlier.get(id(tensor))
            if before is None or before.shape != tensor.shape or not _same_bits(tensor.detach(), before):
                found.add(spec.name)
        return found

    def send_again(self, names: Iterable[str]) -> None:
        """Let the next call of `changed` return these buffers even if they have not changed."""
        for name in names:
            self.have_changed = True
            self._sent.pop(name, None)

    @torch.no_grad()
    def take_over(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Set buffers and frozen parameters, by name, to these values. Return True if any of them has changed.

        The buffers count as sent.
        """
        buffers = {name: tensor for name, tensor in self.all().items() if name in values}
        differing = [name for name, own in _on_host(buffers).items() if not _same_bits(own, values[name])]
        differing += [spec.name for spec in self.frozen if spec.name in values]
        for name in differing:
            self._get(name).copy_(values[name])
        for name, tensor in buffers.items():
            self._sent[name] = _Sent(tensor, values[name])
        self.frozen = tuple(
            msgspec.structs.replace(spec, digest=digest_of(values[spec.name]))
            if spec.name in values
            else spec
            for spec in self.frozen
        )
        return bool(differing)

    def changed(self) -> dict[int, torch.Tensor]:
        """Return copies of the buffers that have changed since the last call, by index in `specs`.

        The first call returns all buffers.

        Raises:
            UsageError: the shape or dtype of a tensor has changed since training began.
        """
        suspected: dict[str, torch.Tensor] = {}
        index_of = {}
        for index, spec in enumerate(self.specs):
            tensor = self._get(spec.name)
            if tensor.shape != spec.shape or tensor.dtype != self._dtypes[index]:
                now = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
                raise UsageError(
                    f"Buffer {spec.name!r} was {spec.dtype}{list(spec.shape)} when training began, but is now {now}. "
                    "A buffer may not change its shape or dtype after the first step. Create it in its final shape, "
                    "or with register_buffer(..., persistent=False) if it need not be saved."
                )
            sent = self._sent.get(spec.name)
            if sent is None or sent.may_differ_from(tensor):
                suspected[spec.name], index_of[spec.name] = tensor, index
        found = {}
        for name, value in _on_host(suspected).items():
            sent = self._sent.get(name)
            if sent is None or sent.differs_from(suspected[name], value):
                self.have_changed |= sent is not None
                self._sent[name] = sent = _Sent(suspected[name], value)
                found[index_of[name]] = sent.copy if sent.copy is not None else _copy(suspected[name], value)
        return found

    def unknown(self) -> list[str]:
        """Return the names of the buffers that the script has added since this object was created."""
        return [
            name
            for name, tensor in self._model.added().items()
            if not isinstance(tensor, nn.Parameter) and name not in self._names
        ]

    def _get(self, name: str) -> torch.Tensor:
        return self._model.latest(name).detach()


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return these tensors in host memory: tensors on the CPU as they are, other tensors as parts of a copy.

    All tensors of one device and dtype are copied in one call, because each copy waits for the device.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            groups[tensor.device, tensor.dtype].append(name)
    found = dict(tensors)
    for members in groups.values():
        flat = torch.cat([tensors[name].reshape(-1) for name in members]).cpu()
        parts = flat.split([tensors[name].numel() for name in members])
        found |= {name: part.view(tensors[name].shape) for name, part in zip(members, parts, strict=True)}
    return found


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of these tensors in host memory."""
    return {name: _copy(tensors[name], value) for name, value in _on_host(tensors).items()}


def _copy(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor whose content in host memory is `value`.

    `Buffers` returns only copies, because the memory of its results may be lent, for example for sending. torch does
    not let a tensor whose memory has been lent grow, but a script may let its buffers grow.
    """
    return value.clone() if tensor.device.type == "cpu" else value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bits(tensor), _bits(other))  # so that NaN equals NaN


class _Sent:
    """The content of a buffer at the time when it was last sent, kept to detect later changes.

    A tensor's version counter reveals most changes. However, BatchNorm's kernel writes the running statistics without
    incrementing the counter, so buffers of up to `COMPARED_SIZE` elements are also compared with a copy.

    Args:
        tensor: the buffer.
        value: its content, in host memory.

    Attributes:
        copy: a copy of the content; None if the buffer is large.
    """

    def __init__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._version = (tensor.data_ptr(), tensor._version)
        self.copy = _copy(tensor, value) if tensor.numel() <= COMPARED_SIZE else None

    def may_differ_from(self, tensor: torch.Tensor) -> bool:
        """Return True if the buffer may have changed, so that its content has to be looked at."""
        return self.copy is not None or (tensor.data_ptr(), tensor._version) != self._version

    def differs_from(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Return True if the buffer, whose content is now `value`, may have changed."""
        if (tensor.data_ptr(), tensor._version) != self._version:
            return True
        return self.copy is not None and not torch.equal(value, self.copy)


# -- What the optimizers of a script train, as one model: the parameter sets, and how they are extended ------
#
# A parameter set consists of the parameters that one optimizer trains. When a script adds parameters after
# training has begun, the earlier parameters keep their sets and their places in the layout. If a new
# optimizer trains parameters of one earlier set, the new optimizer takes over this set.
#
# The optimizers that exist in the first forward pass are registered together, in the order of their creation.
# Each set has vectors of its own in the layout, so it has its own part of each memory region (see `wire.memory`), is
# sliced over all shards separately, and has a separate optimizer in each store.
#
# A worker has one sequence of iterations: each step of any optimizer is an iteration at every shard. With one
# sequence for each set, two workers could wait for each other forever, each at a barrier of a different set.
# A commit names its set (`set_index`), and the answer contains only the weights of this set. So the memory
# and the version counters of the other sets do not change, and an autograd graph that holds their weights
# stays usable. For the same reason, workers with several sets never read the weights in the servers' memory:
# another worker may push another set in the same round. A pull that is repeated, for a restart or an
# evaluation, returns the weights of all sets.
#
# If a mean contains pushes of several sets, the store takes one step for each set, with the mean of the set's own
# pushes. If a push is computed from the same batch as the push before it, both pushes have the same weight in a mean.
# The later push is flagged (`repeated`), so that its samples are not counted again. A script with one optimizer sends
# the same messages as if there were no sets.
#
# When an optimizer takes over a set, the set keeps its index and its vectors, and the servers replace the
# optimizer of the set and discard the optimizer's state. Parameters of the set that the new optimizer does
# not train have no gradients from then on. The vectors of a set are not freed when the script has dropped its
# model, because the saved weights contain all models.


class ParameterSet(NamedTuple):
    """The parameters that one optimizer of the script trains.

    Attributes:
        models: the modules that contain the parameters.
        parameters: the parameters, in the order of the optimizer's groups.
        optimizer: the optimizer that the servers run.
        owner: the script's optimizer. If it changes, another optimizer has taken over the set.
        state: the optimizer's initial state: parameter -> key -> value. Only the initializer's state is used.
        scale_gradients: function that scales the gradients in place before each push; None for unscaled gradients.
    """

    models: tuple[nn.Module, ...]
    parameters: Sequence[torch.Tensor]
    optimizer: OptimizerSpec
    owner: torch.optim.Optimizer
    state: Mapping[Any, Mapping[str, Any]]
    scale_gradients: Callable[[], None] | None = None


class TrainedModel(NamedTuple):
    """All that a script trains, as one model.

    Attributes:
        sets: the parameter sets. Below, a set is given by its index in this sequence.
        model: the modules of all sets.
        parameters: the parameters of all sets, in the order of the layout. An optimizer that has taken over a set may
            not train all of the set's parameters.
        members: for each set, the indices in `parameters` of the parameters that the set's optimizer trains, in the
            optimizer's order.
        buffers: the tensors of the model that are not trained.
        spec: description of the model and the optimizers, which must be the same in all workers.
        device: the device of all parameters.
    """

    sets: Sequence[ParameterSet]
    model: JointModel
    parameters: Sequence[torch.Tensor]
    members: Sequence[Sequence[int]]
    buffers: Buffers
    spec: ModelSpec
    device: torch.device

    @classmethod
    def of(cls, sets: Sequence[ParameterSet], before: TrainedModel | None = None) -> TrainedModel:
        """Return the trained model of a script with these parameter sets.

        Args:
            sets: the parameter sets.
            before: what the script trained before it added parameters or sets; None if it has added none.

        Raises:
            ConfigurationError: the model or its parameters are not supported.
        """
        modules = [module for each in sets for module in each.models]
        model = JointModel(modules, before.model if before else None)
        for each in sets:
            for module in each.models:
                require_trainable(module, each.parameters)
        earlier = before.parameters if before else ()
        described = before.spec.layout.parameters if before else ()
        known = {id(parameter): place for parameter, place in zip(earlier, described, strict=True)}
        part = max((place.part for place in described), default=-1) + 1
        added = []
        for set_index, each in enumerate(sets):
            for position, parameter in enumerate(each.parameters):
                if (place := known.get(id(parameter))) is None:
                    added.append(ParameterPlace(parameter, set_index, position, part))
                elif place.set_index != set_index:
                    raise ConfigurationError(
                        f"Parameter {place.names[0]!r} has been trained by another optimizer. A new optimizer may "
                        "take over the parameters of one earlier optimizer, and only one new optimizer may do so."
                    )
        _require_disjoint(model, [parameter for each in sets for parameter in each.parameters])
        parameters = [*earlier, *(place.parameter for place in added)]
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        members = [[index_of[id(parameter)] for parameter in each.parameters] for each in sets]
        layout = layout_of(model, added, described)
        buffers = Buffers(model, parameters, before.buffers if before else None)
        first, *further = (
            msgspec.structs.replace(
                each.optimizer,
                group_of=_in_layout(layout, set_index, members[set_index], each.optimizer.group_of),
                replaced=_replaced(set_index, each, before),
            )
            for set_index, each in enumerate(sets)
        )
        spec = ModelSpec(layout, first, buffers.specs, tuple(further), buffers.frozen)
        return cls(sets, model, parameters, members, buffers, spec, single_device_of(model, parameters))

    def replaced(self, indices: Sequence[int]) -> list[str]:
        """Of the parameters at these indices, return the names of those that the script has replaced by other
        parameters.
        """
        found = []
        for index in indices:
            name = self.spec.layout.parameters[index].names[0]
            try:
                present = self.model.tensor(name)
            except AttributeError:
                continue  # the parameter was removed, for example with an auxiliary output that is no longer used
            if present is not self.parameters[index] and present.requires_grad and present.is_leaf:
                found.append(name)
        return found

    def new_since(self, before: TrainedModel) -> list[torch.Tensor]:
        """Return the parameters whose optimizer state is new, because they or their optimizers have been added."""
        known = set(map(id, before.parameters))
        return [
            parameter
            for set_index, each in enumerate(self.sets)
            for parameter in each.parameters
            if id(parameter) not in known or each.owner is not before.sets[set_index].owner
        ]

    def optimizer_of_job(
        self, set_index: int, shards: Sequence[tuple[ShardSlice, Vectors]]
    ) -> tuple[dict[int, dict[str, Any]], Sequence[HyperParameters]]:
        """Join the parts of a set's optimizer that the shards hold.

        Returns:
            The "state" entry of the optimizer's `state_dict()`, and the changes that the optimizer has made in each of
            its groups.
        """
        state = join_state(self.spec.layout, shards)
        counters = joint_counters(counters_in(of_shard) for _, of_shard in shards)
        members = enumerate(self.members[set_index])
        return (
            {position: state[index] for position, index in members if index in state},
            counters[set_index] if counters else (),
        )

    def initial_state(self, parameters: Sequence[torch.Tensor]) -> Callable[[ShardSlice], Vectors]:
        """Return a function that returns a shard's part of these parameters' optimizer state.

        If all parameters of an optimizer are among these, the state includes the counters of this optimizer.
        """
        wanted = set(map(id, parameters))
        state = {
            parameter: {key: _in_host_memory(value) for key, value in each.state[parameter].items()}
            for each in self.sets
            for parameter in each.parameters
            if id(parameter) in wanted and parameter in each.state
        }
        counters = [
            changed_groups(
                each.owner, each.optimizer.groups, [each.owner.defaults] * len(each.optimizer.groups)
            )
            if each.optimizer.name not in OF_TORCH and wanted.issuperset(map(id, each.parameters))
            else ()
            for each in self.sets
        ]
        return lambda shard: with_counters(slice_state(shard, self.parameters, state), counters)


def _in_host_memory(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _require_disjoint(model: JointModel, parameters: Sequence[torch.Tensor]) -> None:
    seen: set[int] = set()
    for parameter in parameters:
        if id(parameter) in seen:
            raise ConfigurationError(
                f"Parameter {describe_parameter(model, parameter)} belongs to two optimizers. In a run, each "
                "parameter may be trained by one optimizer only. Give the optimizers different parameters."
            )
        seen.add(id(parameter))


def _in_layout(
    layout: Layout, set_index: int, members: Sequence[int], group_of: Sequence[int]
) -> tuple[int, ...]:
    """Return the group of each parameter of a set, in the order of the layout.

    Args:
        layout: the layout.
        set_index: the set.
        members: the indices of the parameters that the optimizer trains, in the optimizer's order.
        group_of: the groups of these parameters.
    """
    groups = dict(zip(members, group_of, strict=True))
    return tuple(
        groups.get(index, 0) for index, place in enumerate(layout.parameters) if place.set_index == set_index
    )


def _replaced(set_index: int, parameters: ParameterSet, before: TrainedModel | None) -> int:
    """Return how often the optimizer of a set has been replaced."""
    if before is None or set_index >= len(before.sets):
        return 0
    changed = parameters.owner is not before.sets[set_index].owner
    earlier = before.spec.optimizers[set_index]
    if changed and parameters.optimizer.whole != earlier.whole:
        raise ConfigurationError(
            f"{parameters.optimizer.name} cannot take over the parameters of {earlier.name}, because only one of them "
            "needs whole tensors, and the servers hold the parameters already. Create both optimizers before training "
            "begins, for different parameters, or start another run."
        )
    return earlier.replaced + changed


# -- Parameters and buffers that get their shape in the first forward pass -----------------------------------
#
# Examples are the parameters of lazy modules, such as `torch.nn.LazyLinear`, and the buffers of observers for
# quantization, which are empty before the first forward pass. Training needs tensors that have shapes. So the
# training of such a model does not begin with the first forward pass, but with the step that follows.


def any_lazy(parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if at least one of the parameters has no shape yet."""
    return any(map(is_lazy, parameters))


def any_empty_buffer(models: Iterable[nn.Module]) -> bool:
    """Return True if a module has a buffer without elements, whose shape the forward pass may set."""
    buffers = (buffer for model in models for buffer in model.buffers())
    return any(is_lazy(buffer) or buffer.numel() == 0 for buffer in buffers)


def initialize(models: Sequence[nn.Module], closure: Callable[[], object]) -> None:
    """Run a closure once for its forward pass, which initializes lazy parameters.

    The closure runs in evaluation mode, so it does not change running statistics, and dropout draws no random numbers.
    Its gradients are discarded.
    """
    parts = {module: module.training for model in models for module in model.modules()}
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    for model in models:
        model.eval()
    try:
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            closure()
    finally:
        for module, training in parts.items():
            module.training = training
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def require_initialized(models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> None:
    """Check that no parameter of an optimizer is still without a shape (lazy) when the optimizer takes a step.

    Raises:
        UsageError: a parameter has no shape.
    """
    lazy = {id(parameter) for parameter in parameters if is_lazy(parameter)}
    if not lazy:
        return
    names = [name for model in models for name, value in model.named_parameters() if id(value) in lazy]
    raise UsageError(
        f"Parameter {names[0] if names else ''!r} has no shape yet, because its lazy module has not run before the "
        "first step(). Run a forward pass of the whole model before the first step, for example "
        "`with torch.no_grad(): model(inputs)`."
    )
