"""The contract of a sync model: what a specification is, and what the two hosts may ask of its machines.

A *specification* (`BSP()`, `SSP(staleness=3)`) is a frozen value: it can be written on a command line, sent in
a message, stored in a trace. It makes the *state machines* that decide: one for each shard, and, for models of
the whole job, one for the coordinator. A machine knows no host, no clock and no tensor. Its one method takes an
event and returns the actions that follow from it, in order; an event that the contract does not allow raises
`InvalidEventError` and changes nothing.
"""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import msgspec

from ..errors import ConfigurationError
from .actions import AnyAction
from .events import AnyEvent

__all__ = ["Machine", "SyncModel"]


class Machine(Protocol):
    """A pure state machine: events in, actions out."""

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it. Raises `InvalidEventError`, state unchanged."""
        ...

    def validate(self) -> None:
        """Cross-check every derived collection; raise `InternalError` where two disagree."""
        ...


class SyncModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A specification: which sync model, with which parameters. A value.

    Attributes:
        name: how it is written on the command line, before the colon.
    """

    name: ClassVar[str]

    def at_shard(self) -> Machine:
        """A new machine for one shard."""
        raise TypeError(f"{type(self).__name__} does not say what it does at a shard")

    def at_coordinator(self) -> Machine | None:
        """A new machine for the coordinator, or None for a model whose shards decide alone."""
        return None

    def __str__(self) -> str:
        keys = ",".join(f"{key}={_plain(value)}" for key, value in msgspec.structs.asdict(self).items())
        return f"{self.name}:{keys}" if keys else self.name


def _plain(value: object) -> object:
    """A whole number as one, also where it has travelled as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def require_count(model: str, key: str, value: float, least: int, *, infinite: bool = False) -> None:
    """Refuse a parameter that is not a whole number of at least `least` (or infinity, where allowed)."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if whole and value >= least and (infinite if math.isinf(value) else value == int(value)):
        return
    or_infinite = ', or "inf"' if infinite else ""
    raise ConfigurationError(f"{model}: {key} is {value!r}, expected a whole number >= {least}{or_infinite}.")
