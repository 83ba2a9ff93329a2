"""The interface of a sync model: its specification and its state machines.

A *specification* (`BSP()`, `SSP(staleness=3)`) is an immutable object that can be written on a command line, sent in
a message and stored in a trace. A specification creates the *state machines* that make the decisions: one for each
shard and, if the model plans for the whole job, one for the coordinator. A machine has no access to a host, a clock
or a tensor. The machine's method `handle` takes an event and returns the resulting actions, in order.

A machine receives only legal events: `paceline.core.protocol.order` checks in advance that each worker pushes, pulls
and receives its answer in that order. Therefore a machine stores only what the rule of its model needs. If this rule
forbids some legal events as well, the machine rejects them in its method `check`, which does not change any state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from ..errors import ConfigurationError, InternalError
from ..state import stateful
from .actions import AnyAction, ApplyMean, DropPush
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
from .ticks import TICKS_PER_S, Seconds, vanishes

__all__ = [
    "Fault",
    "Handover",
    "JobMachine",
    "Machine",
    "OneShardModel",
    "ShardMachine",
    "SyncModel",
    "agree_on_means",
    "require_count",
    "require_order",
    "require_seconds",
    "require_within",
    "without_torn",
]


class Machine(Protocol):
    """An object that takes events and returns actions.

    A machine is the state machine of one model, or an object that switches between several state machines.
    """

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one event and return the resulting actions."""
        ...

    def validate(self) -> None:
        """Check that the machine's state is consistent; raise `InternalError` if it is not."""
        ...


class Fault(msgspec.Struct, frozen=True):
    """Describes how a condition that the user wrote has failed.

    Attributes:
        reason: what went wrong, in one sentence.
        traceback: traceback of the exception in the condition; "" if the condition did not raise one.
    """

    reason: str
    traceback: str = ""


class Handover(NamedTuple):
    """The state that a shard's machine passes on to the machine of the next model.

    Attributes:
        counts: c_p of each live worker (see `Counts`). The new machine takes ownership of this object.
        held: (worker, iteration) of each held push.
        delayed: worker -> iteration of the worker's delayed pull.
        significance: worker -> |g| / |w| of the worker's last push, if measured.
    """

    counts: Counts
    held: list[tuple[int, int]]
    delayed: dict[int, int]
    significance: dict[int, float]


@stateful(decides="counts frozen fault", fixed="ticks_per_s")
class ShardMachine:
    """Base class of the machines that run a model at one shard.

    A subclass implements `pushed` and `pulled`, and overrides other methods if needed. This class updates c_p before
    it calls these methods.

    Attributes:
        ticks_per_s: number of ticks per second of the run. The host sets it before the first event.
        counts: c_p of the live workers.
        frozen: lost workers of which this shard holds a push that other shards may not have received. Nothing that
            contains such a push may be applied before `settle`.
        fault: None, or the failure of a user's condition. After a failure, the machine must not receive more events.
    """

    ticks_per_s: int = TICKS_PER_S
    fault: Fault | None = None

    def __init__(self) -> None:
        self.counts = Counts()
        self.frozen: set[int] = set()

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one legal event and return the resulting actions."""
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
                raise InternalError(f"a shard cannot process the event {type(event).__name__}", (event,))

    def check(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if the model does not allow this event. Must not change any state."""

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        """Handle a push. The first action returned applies, holds or drops the push."""
        raise NotImplementedError

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        """Handle a pull: answer it now, or keep it and answer it later."""
        raise NotImplementedError

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """Handle a timer. The timer may have been set by an earlier model, or for a pull that no longer exists."""
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        """Handle a worker that has joined."""
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        """Handle a worker's departure: discard its delayed pull, and answer the pulls that waited for this worker."""
        return []

    def holds(self, worker: int) -> bool:
        """Return True if a push of this worker is held, and other shards may hold or apply the same push.

        If so, and the worker is lost, the worker is `frozen` until `settle` is called.
        """
        return False

    def settle(self, worker: int, kept: int | None) -> list[AnyAction]:
        """Handle the verdict about the held pushes of a frozen worker: drop those with a label above `kept`.

        None keeps all pushes. The worker's `WorkerLost` event follows, unless the model was told before that the
        worker has left (see `core.sync.shard_sync`). Then, what was not applied because of the worker is applied now.

        A subclass that overrides this method must call it, or remove the worker from `frozen` itself.
        """
        self.frozen.discard(worker)
        return []

    @property
    def entry(self) -> int:
        """The least c_p with which a worker could join now. By default, min c.

        All shards are asked for this number, and the worker joins at all of them with the largest one.
        """
        return self.counts.slowest

    def may_join(self, count: int) -> bool:
        """Return True if a worker may still join with this c_p. The shard may have advanced since it was asked."""
        return True

    def waits(self) -> dict[int, str]:
        """Return a mapping from each worker with a delayed pull to a description of what the pull waits for."""
        return {}

    def hand_over(self) -> Handover:
        """Return the state for the next machine. This machine must not be used afterwards."""
        return Handover(self.counts, [], {}, {})

    def take_over(self, handover: Handover, now_ticks: int) -> list[AnyAction]:
        """Continue from another machine's state: apply the mean of the held pushes, and process the delayed pulls.

        Pushes of frozen workers are not applied. If this machine does not hold them either, `core.sync.shard_sync`
        does.
        """
        self.counts = handover.counts
        held = sorted(push for push in handover.held if push[0] not in self.frozen)
        actions: list[AnyAction] = [ApplyMean(tuple(held))] if held else []
        for worker, iteration in sorted(handover.delayed.items()):
            actions += self.pulled(PullRequested(now_ticks=now_ticks, worker=worker, iteration=iteration))
        return actions

    def validate(self) -> None:
        """Check that the machine's state is consistent; raise `InternalError` if it is not."""
        self.counts.validate()


@stateful(fixed="ticks_per_s")
class JobMachine:
    """Base class of the machines that run a model at the coordinator, if the model plans for the whole job.

    Attributes:
        ticks_per_s: number of ticks per second of the run. The host sets it before the first event.
        next_superstep: first superstep that would wait for a worker that joins now; 0 if the model plans no barriers.
    """

    ticks_per_s: int = TICKS_PER_S
    next_superstep: int = 0

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one legal event and return the resulting actions."""
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
                raise InternalError(
                    f"a coordinator cannot process the event {type(event).__name__}", (event,)
                )

    def check(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if the model does not allow this event. Must not change any state."""

    def finished(self, event: IterationFinished) -> list[AnyAction]:
        """Handle the report that a worker has pushed an iteration to every shard."""
        return []

    def started(self, event: IterationStarted) -> list[AnyAction]:
        """Handle the report that a worker has started an iteration. Called only if `needs_starts` is True."""
        return []

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """Handle a timer. An earlier model may have set it, or the worker may since have continued or left."""
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        """Handle a worker that has joined."""
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        """Handle a worker that has left."""
        return []

    def validate(self) -> None:
        """Check that the machine's state is consistent; raise `InternalError` if it is not."""


class SyncModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """The specification of a sync model: an immutable object that contains the parameters of the model.

    Attributes:
        name: name of the model on the command line, before the colon.
    """

    name: ClassVar[str]

    @property
    def needs_staleness(self) -> bool:
        """True if the model uses the staleness of each push when the push arrives."""
        return False

    @property
    def needs_at_once(self) -> bool:
        """True if the model uses the largest number of workers that have been present at once.

        A worker that joins again is not counted twice, and the number does not decrease when workers leave. It is
        part of a checkpoint, so a run that is resumed begins with it.
        """
        return False

    @property
    def needs_significance(self) -> bool:
        """True if each push must contain |g| / |w|, the norm of the gradient divided by the norm of the weights."""
        return False

    @property
    def whole_job(self) -> bool:
        """True if all shards must run this model together, because it plans for the whole job or changes the c_p of
        late workers."""
        return False

    @property
    def one_shard(self) -> bool:
        """True if the model can only run on one shard.

        The shards receive the workers' pushes in different orders. If the order determines which pushes are applied,
        a push could be applied at one shard and dropped at another.
        """
        return False

    @property
    def lockstep(self) -> bool:
        """True if no push is applied while a live worker computes.

        All workers can then read the weights from the same memory.
        """
        return False

    @property
    def fresh(self) -> bool:
        """True if every gradient that is applied was computed on the newest weights, so that its staleness is 0."""
        return self.lockstep

    @property
    def scales_pushes(self) -> bool:
        """True if the model multiplies gradients by factors of its own. Hyper-parameters are then not translated."""
        return False

    @property
    def agrees_on_means(self) -> bool:
        """True if every mean contains the same pushes at all shards, apart from pushes of lost workers.

        Also True if the model applies every push on arrival. Only under such a model can the norm of a whole mean be
        computed, which is necessary to clip the joint gradient.
        """
        return False

    @property
    def independent(self) -> bool:
        """True if no worker ever waits for another worker."""
        return False

    @property
    def needs_starts(self) -> bool:
        """True if workers must report each start of an iteration, because the coordinator may order a restart."""
        return False

    @property
    def needs_plans(self) -> bool:
        """True if the shards need plans from the coordinator. One shard alone cannot switch to such a model."""
        return False

    def require_runnable(self, workers: int) -> None:
        """Raise `ConfigurationError` if the model cannot run in this process with this number of workers."""

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        """Return a new machine for the shard with index `shard`.

        Models that draw random numbers use the run's `seed`.
        """
        raise TypeError(f"{type(self).__name__} does not implement at_shard")

    def at_coordinator(self, seed: int = 0) -> JobMachine | None:
        """Return a new machine for the coordinator, or None if the model does not need one."""
        return None

    def __str__(self) -> str:
        """Return the notation that `parse` reads.

        Numbers are always included; other values are included only if they differ from the default.
        """
        fields = msgspec.structs.fields(self)
        values = [(field, getattr(self, field.name)) for field in fields]
        shown = [
            f"{field.name}={_plain(value)}"
            for field, value in values
            if value != field.default
            or (isinstance(value, int | float | Fraction) and not isinstance(value, bool))
        ]
        return f"{self.name}:{','.join(shown)}" if shown else self.name


class OneShardModel(SyncModel, frozen=True, repr_omit_defaults=True):
    """Base class of the models that decide by the staleness of each push, and answer every pull on arrival."""

    @property
    def one_shard(self) -> bool:
        return True

    @property
    def whole_job(self) -> bool:
        return True

    @property
    def agrees_on_means(self) -> bool:
        return True

    @property
    def independent(self) -> bool:
        return True

    @property
    def needs_staleness(self) -> bool:
        return True


def agree_on_means(models: Sequence[SyncModel]) -> bool:
    """Return True if shards with these models agree on means (see `SyncModel.agrees_on_means`).

    Args:
        models: one model for all shards, or one for each shard.
    """
    return len(set(models)) == 1 and models[0].agrees_on_means


def _plain(value: object) -> object:
    """Return an integer for a float with an integral value, a lower-case word for a bool, else the value itself."""
    if isinstance(value, bool):
        return str(value).lower()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def without_torn(
    held: Sequence[tuple[int, int]], worker: int, kept: int | None
) -> tuple[list[tuple[int, int]], list[AnyAction]]:
    """Return the held pushes without those of a lost worker with labels above `kept`, and actions that drop these.

    Args:
        held: (worker, iteration) of each held push.
        worker: the lost worker.
        kept: label of the worker's last push that all shards have received; None to keep all pushes.
    """
    torn = [] if kept is None else [push for push in held if push[0] == worker and push[1] > kept]
    return [push for push in held if push not in torn], [DropPush(*push) for push in torn]


def require_within(model: str, key: str, value: float | Fraction, least: float, most: float) -> None:
    """Raise `ConfigurationError` unless a parameter is a number in [least, most]."""
    number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if not (number and least <= value <= most):
        and_most = "" if math.isinf(most) else f" and <= {most:g}"
        shown = value if isinstance(value, Fraction) else repr(value)  # -1/3, not Fraction(-1, 3)
        raise ConfigurationError(f"{model}: {key} is {shown}, expected a number >= {least:g}{and_most}.")


def require_seconds(model: str, key: str, value: Seconds, least: float, most: float) -> None:
    """Raise `ConfigurationError` unless a parameter is a time in [least, most] that is not rounded to 0."""
    require_within(model, key, value, least, most)
    if vanishes(value):
        raise ConfigurationError(
            f"{model}: {key} is {value:g}, which would be rounded to 0, because floats are rounded to nanoseconds. "
            "Give the time as a fraction, or use a larger unit."
        )


def require_order(model: str, low_key: str, low: int, high_key: str, high: int) -> None:
    """Raise `ConfigurationError` unless the upper bound is an integer that is at least the lower bound."""
    require_count(model, high_key, high, 0)
    if low > high:
        raise ConfigurationError(
            f"{model}: {low_key} is {low} and {high_key} is {high}, expected {low_key} <= {high_key}."
        )


def require_count(model: str, key: str, value: float, least: int, *, infinite: bool = False) -> None:
    """Raise `ConfigurationError` unless a parameter is an integer >= `least` (or infinity, if `infinite`)."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if number and value >= least and (infinite if math.isinf(value) else value == int(value)):
        return
    or_infinite = ', or "inf"' if infinite else ""
    raise ConfigurationError(f"{model}: {key} is {value!r}, expected a whole number >= {least}{or_infinite}.")
