"""The tensors of a model that its optimizer does not train: buffers, such as BatchNorm's statistics, and frozen
parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import nn

from ..core.protocol.model_spec import BufferSpec, FrozenSpec
from ..errors import UsageError
from ..shard.digests import chunks, digest_of, digests_of
from ..shard.vectors import dtype_name
from .joint_model import JointModel

__all__ = ["Buffers"]

COMPARED_SIZE = 65_536
"""Maximum number of elements in a buffer that is also compared with a copy to detect changes."""


class Buffers:
    """Detects changes to a model's buffers, and describes its frozen parameters.

    These are the tensors in the model's `state_dict` that the optimizer does not train. They may be on any device.
    What this class returns is in host memory, unless stated otherwise.

    Args:
        model: the model.
        trained: the parameters that the optimizer trains.
        before: the buffers of a smaller model, which this model extends. What they have sent is not sent again.

    Attributes:
        specs: description of each buffer, in the order of the `state_dict`.
        frozen: description of each frozen parameter, in the order of the `state_dict`.
        added: the buffers that the smaller model did not have, by name. They count as sent.
        have_changed: True if `changed` has returned a buffer that had been returned before.
    """

    def __init__(
        self, model: JointModel, trained: Sequence[torch.Tensor], before: Buffers | None = None
    ) -> None:
        self._model = model
        trained_ids = set(map(id, trained))
        tensors = {name: tensor for name, tensor in model.tensors().items() if id(tensor) not in trained_ids}
        described = [
            BufferSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            for name, tensor in tensors.items()
        ]
        # A list first: see `DistributedOptimizer.parameter_set`.
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
        """Return the bytes of the frozen parameter with this digest, in parts; None if there is none."""
        for spec in self.frozen:
            if spec.digest == digest:
                return chunks(self._get(spec.name))
        return None

    def differing_from(self, earlier: Mapping[int, torch.Tensor]) -> set[str]:
        """Return the names of the buffers that differ from earlier copies of them, which are given by their `id`."""
        found = set()
        for spec in self.specs:
            tensor = self._model.latest(spec.name)
            before = earlier.get(id(tensor))
            if before is None or before.shape != tensor.shape or not _same_bits(tensor.detach(), before):
                found.add(spec.name)
        return found

    def send_again(self, names: Iterable[str]) -> None:
        """Let the next call of `changed` return these buffers in any case."""
        for name in names:
            self.have_changed = True
            self._sent.pop(name, None)

    @torch.no_grad()
    def take_over(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Set buffers and frozen parameters, by name, to these values. Return True if one has changed.

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

        The first call returns all.

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
    """Return these tensors in host memory: those on the CPU themselves, others as parts of one copy.

    There is one copy for all tensors of a device and dtype, because each copy waits for the device.
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
    """Return a copy of a tensor, of which `value` is the content in host memory.

    Only copies leave this class: torch forbids a tensor to grow once its memory has been lent, as for sending.
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
        copy: a copy of its content; None if it is large.
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
