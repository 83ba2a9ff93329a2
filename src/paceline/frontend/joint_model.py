"""The modules that the optimizers of a script train, seen as one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

__all__ = ["JointModel"]


class JointModel:
    """The modules that one or several optimizers train, with one name for each of their tensors.

    A module that is a part of another one is not counted twice. If two modules give the same name to different
    tensors, all names of the n-th module begin with "model<n>.", where n is counted from 0 in the order of the
    optimizers.

    Args:
        models: the module that each optimizer trains, in the order of the optimizers.

    Example:
        >>> one, other = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
        >>> list(JointModel([one, one]).tensors())
        ['weight']
        >>> list(JointModel([one, other]).tensors())
        ['model0.weight', 'model1.weight']
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        distinct = list({id(model): model for model in models}.values())
        inner = {id(sub) for model in distinct for sub in model.modules() if sub is not model}
        self._models = [model for model in distinct if id(model) not in inner]
        named: dict[str, torch.Tensor] = {}
        collide = any(
            named.setdefault(name, tensor) is not tensor
            for model in self._models
            for name, tensor in _tensors(model).items()
        )
        self._prefixes = [f"model{index}." if collide else "" for index in range(len(self._models))]
        self._owners = {
            prefix + name: (model, name)
            for prefix, model in zip(self._prefixes, self._models, strict=True)
            for name in _tensors(model)
        }

    def modules(self) -> Iterator[nn.Module]:
        """Return every module once."""
        found = {id(module): module for model in self._models for module in model.modules()}
        return iter(found.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return each parameter with its name. A tied parameter is returned with each of its names."""
        for prefix, model in zip(self._prefixes, self._models, strict=True):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                yield prefix + name, parameter

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the `state_dict` of the modules, by name."""
        return {
            prefix + name: tensor
            for prefix, model in zip(self._prefixes, self._models, strict=True)
            for name, tensor in _tensors(model).items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor that now has this name."""
        model, name = self._owners[name]
        owner, _, name = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), name)
        assert isinstance(tensor, torch.Tensor)
        return tensor


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
