"""Batches that are moved to a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map

from ..errors import ConfigurationError

__all__ = ["MovedLoader", "device_of", "moved", "pins"]

T = TypeVar("T")


def device_of(device: torch.device | str) -> torch.device:
    """Return a device that the user has named.

    Raises:
        ConfigurationError: torch does not know it.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device is {device!r}, expected a device of torch, such as paceline.device() or 'cuda:0'."
        ) from error


def pins(loader: object) -> bool:
    """Return True if a loader puts its batches into pinned memory."""
    return bool(getattr(loader, "pin_memory", False))


def moved(batch: T, device: torch.device, *, pinned: bool) -> T:
    """Return a batch whose tensors are on a device. What is there already is not copied.

    Args:
        batch: tensors and other objects, nested in lists, tuples, dictionaries and the like. Objects that have a
            method `to`, such as `PackedSequence`, move themselves.
        device: the device.
        pinned: True if the tensors are in pinned memory, so that their copies need not be waited for.
    """
    found: T = tree_map(
        lambda leaf: leaf.to(device, non_blocking=pinned) if _moves(leaf) else leaf, batch, is_leaf=_moves
    )
    return found


def _moves(part: Any) -> bool:
    return callable(getattr(part, "to", None)) and not isinstance(part, type)


class MovedLoader(Generic[T]):
    """A loader whose batches are moved to a device. All other attributes are those of the loader.

    Args:
        loader: the loader.
        device: the device.
        pinned: see `moved`.
    """

    def __init__(self, loader: Iterable[T], device: torch.device, *, pinned: bool) -> None:
        self._loader = loader
        self._device = device
        self._pinned = pinned

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        batches = iter(self._loader)  # now, not when the first batch is asked for
        return (moved(batch, self._device, pinned=self._pinned) for batch in batches)

    def __getattr__(self, name: str) -> Any:
        # An attribute of this class can be missing, for example while an instance is copied.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)
