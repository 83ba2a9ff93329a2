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
from .ledger import Ledger

__all__ = [
    "JobMachine",
    "Machine",
    "ShardMachine",
    "SyncModel",
    "require_count",
    "require_order",
    "require_within",
]


class Machine(Protocol):
    """A pure state machine: events in, actions out."""

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it. Raises `InvalidEventError`, state unchanged."""
        ...

    def validate(self) -> None:
        """Cross-check every derived collection; raise `InternalError` where two disagree."""
        ...


class ShardMachine(Machine, Protocol):
    """What a model has at each shard.

    Attributes:
        ledger: who is live, how far each worker has come, what each is doing.
    """

    ledger: Ledger

    def waits(self) -> dict[int, str]:
        """For each pull that is delayed, what it waits for: worker -> words."""
        ...


class JobMachine(Machine, Protocol):
    """What a model has at the coordinator, if it plans for the whole job.

    Attributes:
        next_superstep: the first one that a worker is a member of which joins now; 0 where no barriers are planned.
    """

    @property
    def next_superstep(self) -> int: ...


class SyncModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """A specification: which sync model, with which parameters. A value.

    Attributes:
        name: how it is written on the command line, before the colon.
    """

    name: ClassVar[str]

    @property
    def needs_significance(self) -> bool:
        """True if pushes are to carry |g| / |w|."""
        return False

    @property
    def whole_job(self) -> bool:
        """True if all shards must run it, because it plans for the job or gives late workers another count."""
        return False

    @property
    def lockstep(self) -> bool:
        """True if nothing is applied while a live worker computes: all may then compute on the same memory."""
        return False

    @property
    def needs_starts(self) -> bool:
        """True if the coordinator is to be told when a worker starts an iteration, and may have it started anew."""
        return False

    def require_runnable(self, workers: int) -> None:
        """Raise `ConfigurationError` if the model cannot run here with so many workers."""

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        """A new machine for one shard. `seed` is the run's, `shard` its index; few models draw."""
        raise TypeError(f"{type(self).__name__} does not say what it does at a shard")

    def at_coordinator(self, seed: int = 0) -> JobMachine | None:
        """A new machine for the coordinator, or None for a model whose shards decide alone."""
        return None

    def __str__(self) -> str:
        """As `parse` reads it. Numbers are always shown, other things left out at their default."""
        fields = msgspec.structs.fields(self)
        values = [(field, getattr(self, field.name)) for field in fields]
        shown = [
            f"{field.name}={_plain(value)}"
            for field, value in values
            if value != field.default or isinstance(value, int | float)
        ]
        return f"{self.name}:{','.join(shown)}" if shown else self.name


def _plain(value: object) -> object:
    """A whole number as one, also where it has travelled as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def require_within(model: str, key: str, value: float, least: float, most: float) -> None:
    """Refuse a parameter that is not a number in [least, most]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and least <= value <= most):
        most_words = "" if math.isinf(most) else f" and <= {most:g}"
        raise ConfigurationError(f"{model}: {key} is {value!r}, expected a number >= {least:g}{most_words}.")


def require_order(model: str, low_key: str, low: int, high_key: str, high: int) -> None:
    """Refuse an upper bound that is not a whole number, or lies below its lower one."""
    require_count(model, high_key, high, 0)
    if low > high:
        raise ConfigurationError(
            f"{model}: {low_key} is {low} and {high_key} is {high}, expected {low_key} <= {high_key}."
        )


def require_count(model: str, key: str, value: float, least: int, *, infinite: bool = False) -> None:
    """Refuse a parameter that is not a whole number of at least `least` (or infinity, where allowed)."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if whole and value >= least and (infinite if math.isinf(value) else value == int(value)):
        return
    or_infinite = ', or "inf"' if infinite else ""
    raise ConfigurationError(f"{model}: {key} is {value!r}, expected a whole number >= {least}{or_infinite}.")
