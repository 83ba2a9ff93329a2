"""What the optimizers of a script train, as one model: the parameter sets, and their extension by further parameters.

A parameter set consists of the parameters that one optimizer trains. When a script adds parameters after training has
begun, the earlier parameters keep their sets and their places in the layout. If a new optimizer trains parameters of
one earlier set, it takes over this set.

The optimizers that exist in the first forward pass are registered together, in the order of their creation. Each set
has vectors of its own in the layout, so it has its own memory in every region, is sliced over all shards by itself,
and has a separate optimizer in each store.

A worker has one sequence of iterations: each step of any optimizer is an iteration at every shard. With one sequence
for each set, a worker could wait at a barrier of one set for a worker that waits at a barrier of the other set. A
commit names its set (`set_index`), and the answer contains only the weights of this set. So the memory and the
version counters of the other sets do not change, and a graph that holds them stays usable. For the same reason,
workers with several sets never read the weights in the servers' memory: another worker may push another set in the
same round. A pull that is repeated, for a restart or an evaluation, brings all sets.

If a mean contains pushes of several sets, the store takes one step for each set, with the shares of its own pushes. A
push that is computed from the same batch as the push before it has the same weight, and is flagged (`repeated`), so
that its samples are not counted again. A script with one optimizer sends the same messages as if there were no sets.

When an optimizer takes over a set, the set keeps its index and its vectors, and the servers replace its optimizer
without its state. Parameters of the set that the new optimizer does not train have no gradients from then on. The
vectors of a set are not freed when the script has dropped its model, because the saved weights contain all models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ..core.protocol.layout import Layout, ShardSlice
from ..core.protocol.model_spec import ModelSpec, OptimizerSpec
from ..errors import ConfigurationError
from ..shard.optimizer_state import slice_state
from ..shard.vectors import Vectors
from .buffers import Buffers
from .joint_model import JointModel
from .trained_model import Place, describe_parameter, layout_of, require_trainable, single_device_of

__all__ = ["ParameterSet", "Trained"]


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


class Trained(NamedTuple):
    """All that a script trains, as one model.

    Attributes:
        sets: the parameter sets. Below, a set is given by its index in this sequence.
        model: the modules of all sets.
        parameters: the parameters of all sets, in the order of the layout. An optimizer that has taken over a set may
            not train all of the set's parameters.
        members: for each set, the indices in `parameters` of those that its optimizer trains, in its order.
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
    def of(cls, sets: Sequence[ParameterSet], before: Trained | None = None) -> Trained:
        """Return what a script trains with these parameter sets.

        Args:
            sets: the parameter sets.
            before: what it has trained before parameters were added to some sets, or sets were added.

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
                    added.append(Place(parameter, set_index, position, part))
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
        """Return the names of those of these parameters in whose places the model has other ones to train."""
        found = []
        for index in indices:
            name = self.spec.layout.parameters[index].names[0]
            try:
                present = self.model.tensor(name)
            except AttributeError:
                continue  # it was removed, such as an auxiliary output that is no longer used
            if present is not self.parameters[index] and present.requires_grad and present.is_leaf:
                found.append(name)
        return found

    def new_since(self, before: Trained) -> list[torch.Tensor]:
        """Return the parameters whose optimizer state is new: they or their optimizers have been added."""
        known = set(map(id, before.parameters))
        return [
            parameter
            for set_index, each in enumerate(self.sets)
            for parameter in each.parameters
            if id(parameter) not in known or each.owner is not before.sets[set_index].owner
        ]

    def initial_state(self, parameters: Sequence[torch.Tensor]) -> Callable[[ShardSlice], Vectors]:
        """Return a function that returns a shard's part of these parameters' optimizer state."""
        wanted = set(map(id, parameters))
        state = {
            parameter: {key: _on_host(value) for key, value in each.state[parameter].items()}
            for each in self.sets
            for parameter in each.parameters
            if id(parameter) in wanted and parameter in each.state
        }
        return lambda shard: slice_state(shard, self.parameters, state)


def _on_host(value: Any) -> Any:
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
        members: the indices of the parameters that the optimizer trains, in its order.
        group_of: the groups of these parameters.
    """
    groups = dict(zip(members, group_of, strict=True))
    return tuple(
        groups.get(index, 0) for index, place in enumerate(layout.parameters) if place.set_index == set_index
    )


def _replaced(set_index: int, parameters: ParameterSet, before: Trained | None) -> int:
    """Return how often the optimizer of a set has been replaced."""
    if before is None or set_index >= len(before.sets):
        return 0
    changed = parameters.owner is not before.sets[set_index].owner
    return before.spec.optimizers[set_index].replaced + changed
