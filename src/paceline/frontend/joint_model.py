"""The modules that the optimizers of a script train, seen as one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["JointModel"]


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
    """The modules that one or several optimizers train, with one name for each of their tensors.

    A module that is a part of another one is not counted twice. If two modules give the same name to different
    tensors, all names of the n-th module begin with "model<n>.", where n is counted from 0 in the order of the
    optimizers. A joint model can be extended by further modules: earlier names remain the same, and only the names of
    an added module get such a prefix, if an earlier module has a tensor of the same name. What was inserted into an
    earlier module has the names of this module. What the script has removed from a module keeps its names and its
    last content.

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
        """Return the tensors in the `state_dict` of the modules, by name, also those that have been removed since."""
        tensors = {id(part.model): _tensors(part.model) for part in self._parts}
        for full, (model, name) in self._owners.items():
            if (tensor := tensors[id(model)].get(name)) is not None:
                self._latest[full] = tensor
        return {full: self._latest[full] for full in self._owners}

    def added(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the modules have now and that have no name in the joint model, by new names."""
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
            AttributeError: there is none any more.
        """
        model, name = self._owners[name]
        owner, _, name = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), name)
        if not isinstance(tensor, torch.Tensor):
            raise AttributeError(f"{name!r} is no tensor any more")
        return tensor

    def latest(self, name: str) -> torch.Tensor:
        """Return the tensor that now has this name or, if the script has removed it, the last that had it."""
        with suppress(AttributeError):
            self._latest[name] = self.tensor(name)
        return self._latest[name]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
