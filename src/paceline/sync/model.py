"""The contract of a sync model: what a specification is, and what the hosts may ask of its machines.

A *specification* (`BSP()`, `SSP(staleness=3)`) is a frozen value: it can be written on a command line, sent in
a message, stored in a trace. It makes the *state machines* that decide: one for each shard, and, for models that plan
for the whole job, one for the coordinator. A machine knows no host, no clock and no tensor. Its one method takes an
event and returns the actions that follow from it, in order.

A machine receives legal events only: the order push, pull, answer of each worker is kept in front of it (see
`paceline.core.order`). It keeps what its own rule needs. A machine whose rule does not allow every legal event
refuses it in `check`, which changes nothing.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from ..errors import ConfigurationError, InternalError
from .actions import AnyAction, ApplyMean
from .counts import Counts
from .events import (
    AnyEvent,
    IterationFinished,
    IterationStarted,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

__all__ = [
    "Fault",
    "Handover",
    "JobMachine",
    "Machine",
    "ShardMachine",
    "SyncModel",
    "require_count",
    "require_order",
    "require_within",
]


class Machine(Protocol):
    """What takes events and returns actions: the machine of a model, or the host of one through all changes."""

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it."""
        ...

    def validate(self) -> None:
        """Cross-check every derived collection; raise `InternalError` where two disagree."""
        ...


class Fault(msgspec.Struct, frozen=True):
    """How a user's condition has failed.

    Attributes:
        reason: one sentence.
        traceback: traceback of the condition; "" if it did not raise.
    """

    reason: str
    traceback: str = ""


class Handover(NamedTuple):
    """What one shard machine leaves to the next.

    Attributes:
        counts: c_p of the live workers. The new machine owns it from now on.
        held: (worker, iteration) of the pushes that are held.
        delayed: worker -> iteration of its delayed pull.
        significance: worker -> |g| / |w| of its last push, where it was measured.
    """

    counts: Counts
    held: list[tuple[int, int]]
    delayed: dict[int, int]
    significance: dict[int, float]


class ShardMachine:
    """A model's machine at one shard; the base class of them all.

    A subclass implements `pushed` and `pulled`, and the other methods where it needs them. c_p is kept here and is up
    to date when they are called.

    Attributes:
        counts: the live workers and their c_p.
        fault: set when a condition of the user has failed; the machine must not receive further events.
    """

    fault: Fault | None = None

    def __init__(self) -> None:
        self.counts = Counts()

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one legal event; return what follows from it."""
        match event:
            case PushReceived():
                self.counts.pushed(event.worker, event.progress)
                return self.pushed(event)
            case PullRequested():
                return self.pulled(event)
            case TimerFired():
                return self.timer_fired(event)
            case WorkerJoined():
                self.counts.joined(event.worker, event.count)
                return self.joined(event)
            case WorkerLost() | WorkerFinished():
                self.counts.left(event.worker)
                return self.left(event)
            case _:
                raise InternalError(f"a shard does not take a {type(event).__name__}", (event,))

    def check(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if the model does not allow this event. Changes nothing."""

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        """Return what to do with a push: apply, hold or drop it first, then what follows."""
        raise NotImplementedError

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        """Answer a pull now, or keep it and answer it later."""
        raise NotImplementedError

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """A timer is due. It may have been set by an earlier model or for a pull that is forgotten."""
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        """A worker has joined."""
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        """A worker has left: forget its delayed pull, and release what waited for it."""
        return []

    def waits(self) -> dict[int, str]:
        """For each delayed pull, what it waits for: worker -> description."""
        return {}

    def hand_over(self) -> Handover:
        """Return what the next machine goes on from. The machine must not be used afterwards."""
        return Handover(self.counts, [], {}, {})

    def take_over(self, handover: Handover, now_s: float) -> list[AnyAction]:
        """Go on from where another machine stopped: apply the mean of the held pushes, test delayed pulls again."""
        self.counts = handover.counts
        actions: list[AnyAction] = [ApplyMean(tuple(sorted(handover.held)))] if handover.held else []
        for worker, iteration in sorted(handover.delayed.items()):
            actions += self.pulled(PullRequested(now_s=now_s, worker=worker, iteration=iteration))
        return actions

    def validate(self) -> None:
        """Cross-check every derived collection; raise `InternalError` where two disagree."""
        self.counts.validate()


class JobMachine:
    """A model's machine at the coordinator, if the model plans for the whole job; the base class of them all.

    Attributes:
        next_superstep: first superstep of a worker that joins now; 0 where no barriers are planned.
    """

    next_superstep: int = 0

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one legal event; return what follows from it."""
        match event:
            case IterationFinished():
                return self.finished(event)
            case IterationStarted():
                return self.started(event)
            case TimerFired():
                return self.timer_fired(event)
            case WorkerJoined():
                return self.joined(event)
            case WorkerLost() | WorkerFinished():
                return self.left(event)
            case _:
                raise InternalError(f"a coordinator does not take a {type(event).__name__}", (event,))

    def check(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if the model does not allow this event. Changes nothing."""

    def finished(self, event: IterationFinished) -> list[AnyAction]:
        """A worker has pushed an iteration to every shard."""
        return []

    def started(self, event: IterationStarted) -> list[AnyAction]:
        """A worker computes an iteration; only if the model `needs_starts`."""
        return []

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """A timer is due. It may have been set by an earlier model, or for a worker that has gone on or left."""
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        """A worker has joined."""
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        """A worker has left."""
        return []

    def validate(self) -> None:
        """Cross-check every derived collection; raise `InternalError` where two disagree."""


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
        """True if workers report to the coordinator when they start an iteration, and it may restart them."""
        return False

    @property
    def needs_plans(self) -> bool:
        """True if the shards depend on plans of the coordinator: one shard alone cannot fall back to the model."""
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
