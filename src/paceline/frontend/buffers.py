"""The tensors of a model that its optimizer does not train, such as BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..core.model_spec import BufferSpec
from ..errors import UsageError
from ..shard.vectors import dtype_name
from .joint_model import JointModel

__all__ = ["Buffers"]

COMPARED_SIZE = 65_536
"""Maximum number of elements in a buffer that is also compared with a copy to detect changes."""


class Buffers:
    """Detects changes to a model's untrained tensors: those in its `state_dict` that the optimizer does not train.

    Args:
        model: the model.
        trained: the parameters that the optimizer trains.

    Attributes:
        specs: description of each untrained tensor, in the order of the `state_dict`.
        have_changed: True if `changed` has returned a buffer that had been returned before.
    """

    def __init__(self, model: JointModel, trained: Sequence[torch.Tensor]) -> None:
        self._model = model
        trained_ids = set(map(id, trained))
        tensors = {name: tensor for name, tensor in model.tensors().items() if id(tensor) not in trained_ids}
        self.specs = tuple(
            BufferSpec(name, tuple(t.shape), dtype_name(t.dtype), isinstance(t, nn.Parameter))
            for name, t in tensors.items()
        )
        self.have_changed = False
        self._sent: dict[int, _Sent] = {}

    def all(self) -> list[torch.Tensor]:
        """Return every tensor, in the order of `specs`."""
        return [self._get(spec) for spec in self.specs]

    def follow(self, before: Buffers) -> dict[str, torch.Tensor]:
        """Continue for the buffers of a smaller model: what they have sent is not sent again.

        Returns:
            The buffers that the smaller model did not have, by name. They count as sent.
        """
        self.have_changed = before.have_changed
        sent = {before.specs[index].name: each for index, each in before._sent.items()}
        earlier = {spec.name for spec in before.specs}
        added = {spec.name: self._get(spec) for spec in self.specs if spec.name not in earlier}
        for index, spec in enumerate(self.specs):
            if spec.name in added and not spec.fixed:
                self._sent[index] = _Sent(added[spec.name])
            elif spec.name in sent:
                self._sent[index] = sent[spec.name]
        return added

    @torch.no_grad()
    def take_over(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Set buffers, by name, to these values, which count as sent. Return True if one has changed."""
        differs = False
        for index, spec in enumerate(self.specs):
            if spec.name not in values:
                continue
            tensor, value = self._get(spec), values[spec.name]
            if not torch.equal(_bits(tensor), _bits(value)):  # the bits, so that NaN equals NaN
                tensor.copy_(value)
                differs = True
            if not spec.fixed:
                self._sent[index] = _Sent(tensor)
        return differs

    def changed(self) -> dict[int, torch.Tensor]:
        """Return the buffers that have changed since the last call, by index in `specs`. The first call returns all.

        Untrained parameters are never included, because training does not change them.

        Raises:
            UsageError: the shape or dtype of a tensor has changed since training began.
        """
        found = {}
        for index, spec in enumerate(self.specs):
            if spec.fixed:
                continue
            tensor = self._get(spec)
            shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            if (shape, dtype) != (spec.shape, spec.dtype):
                raise UsageError(
                    f"Buffer {spec.name!r} was {spec.dtype}{list(spec.shape)} when training began, but is now "
                    f"{dtype}{list(shape)}. Do not change the shape or dtype of a buffer during training."
                )
            if index not in self._sent or self._sent[index].differs_from(tensor):
                self.have_changed |= index in self._sent
                self._sent[index] = _Sent(tensor)
                found[index] = tensor
        return found

    def _get(self, spec: BufferSpec) -> torch.Tensor:
        return self._model.tensor(spec.name).detach()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Sent:
    """The content of a buffer at the time when it was last sent, kept to detect later changes.

    A tensor's version counter reveals most changes. However, BatchNorm's kernel writes the running statistics without
    incrementing the counter, so buffers of up to `COMPARED_SIZE` elements are also compared with a copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = (tensor.data_ptr(), tensor._version)
        self._copy = tensor.clone() if tensor.numel() <= COMPARED_SIZE else None

    def differs_from(self, tensor: torch.Tensor) -> bool:
        """Return True if the buffer may have changed."""
        if (tensor.data_ptr(), tensor._version) != self._version:
            return True
        return self._copy is not None and not torch.equal(tensor, self._copy)
