"""The interface of a sync model: its specification, its state machines, and what these have in common.

A *specification* (`BSP()`, `SSP(staleness=3)`) is an immutable object that can be written on a command line, sent in
a message and stored in a trace. A specification creates the *state machines* that make the decisions: one for each
shard and, if the model plans for the whole job, one for the coordinator. A state machine has no access to a host, a
clock or a tensor. Its method `handle` takes an event and returns the resulting actions, in order.

A state machine receives only legal events: `paceline.core.order` checks in advance that each worker pushes, pulls and
receives its answer in this order. Therefore a state machine stores only what the rule of its model needs. If this rule
also forbids some of the legal events, the state machine rejects such an event in its method `check`, which does not
change any state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from functools import cache
from typing import ClassVar, Literal, NamedTuple, Protocol, dataclass_transform

import msgspec

from ..errors import ConfigurationError, InternalError
from ..state import stateful
from .actions import AnyAction, ApplyMean, DropPush
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


class Machine(Protocol):
    """An object that takes events and returns actions.

    A machine is the state machine of one model, or an object that switches between several state machines.
    """

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one event and return the resulting actions."""

    def validate(self) -> None:
        """Check that the state of this object is consistent; raise `InternalError` if it is not."""


class Fault(msgspec.Struct, frozen=True):
    """Describes how a condition that the user wrote has failed.

    Attributes:
        reason: what went wrong, in one sentence.
        traceback: traceback of the exception in the condition; "" if the condition did not raise one.
    """

    reason: str
    traceback: str = ""


class Handover(NamedTuple):
    """What the state machine of a shard passes on to the state machine of the next model.

    Attributes:
        counts: c_p of each live worker (see `Counts`). The new state machine takes ownership of this object.
        held: (worker, iteration) of each held push.
        delayed: worker -> iteration of the worker's delayed pull.
        significance: worker -> |g| / |w| of the worker's last push, if measured.
    """

    counts: Counts
    held: list[tuple[int, int]]
    delayed: dict[int, int]
    significance: dict[int, float]


@stateful(fixed="ticks_per_s alone")
class ShardMachine:
    """Base class of the state machines that run a model at one shard.

    A subclass implements `pushed` and `pulled`, and overrides other methods if needed. This class updates c_p before
    it calls these methods.

    Attributes:
        ticks_per_s: number of ticks per second of the run. The host sets it before the first event.
        alone: True if all shards run this model. The host sets it before the first event.
        counts: c_p of the live workers.
        frozen: lost workers of which this shard holds a push that other shards may not have received. No mean
            that contains such a push may be applied before `settle`.
        fault: None, or the failure of a user's condition. After a failure, the state machine must not receive more
            events.
    """

    ticks_per_s: int = TICKS_PER_S
    alone: bool = True
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
        """Return the actions for a push. The first of these actions applies, holds or drops the push."""
        raise NotImplementedError

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        """Answer a pull now, or keep the pull to answer it later."""
        raise NotImplementedError

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """Return the actions for a timer that is due.

        The timer may have been set by an earlier model, or for a pull that no longer exists.
        """
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        """Return the actions for a worker that has joined."""
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        """Discard the delayed pull of a worker that has left, and answer the pulls that waited for this worker."""
        return []

    def holds(self, worker: int) -> bool:
        """Return True if a push of this worker is held, and other shards may hold or apply the same push.

        If so, and the worker is lost, the worker is `frozen` until `settle` is called.
        """
        return False

    def settle(self, worker: int, kept: int | None) -> list[AnyAction]:
        """Drop the held pushes of a frozen worker that have a label above `kept`.

        None keeps all pushes. If the model has already been told that the worker has left (see `core.shard`), the
        updates that have waited for this decision are applied now. Otherwise, the worker's `WorkerLost` event follows.

        A subclass that overrides this method must call `super().settle`, or remove the worker from `frozen` itself.
        """
        self.frozen.discard(worker)
        return []

    @property
    def entry(self) -> int:
        """The least c_p with which a worker could join now. By default, min c.

        All shards are asked for this number. The largest of the answers is the worker's c_p at every shard.
        """
        return self.counts.slowest

    def may_join(self, count: int) -> bool:
        """Return True if a worker may still join with this c_p. The shard may have advanced since `entry` was read."""
        return True

    def waits(self) -> dict[int, str]:
        """Return a mapping from each worker with a delayed pull to a description of what the pull waits for."""
        return {}

    def hand_over(self) -> Handover:
        """Return the state for the next state machine. This state machine must not be used afterwards."""
        return Handover(self.counts, [], {}, {})

    def take_over(self, handover: Handover, now_ticks: int) -> list[AnyAction]:
        """Continue from the state of another state machine.

        Apply the mean of the held pushes, and process the delayed pulls. Pushes of frozen workers are not applied. If
        this state machine does not hold these pushes, `core.shard` holds them.
        """
        self.counts = handover.counts
        held = sorted(push for push in handover.held if push[0] not in self.frozen)
        actions: list[AnyAction] = [ApplyMean(tuple(held))] if held else []
        for worker, iteration in sorted(handover.delayed.items()):
            actions += self.pulled(PullRequested(now_ticks=now_ticks, worker=worker, iteration=iteration))
        return actions

    def validate(self) -> None:
        """Check that the state of this object is consistent; raise `InternalError` if it is not."""
        self.counts.validate()


@stateful(fixed="ticks_per_s")
class JobMachine:
    """Base class of the state machines that run a model at the coordinator, if the model plans for the whole job.

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
        """Return the actions for a report that a worker has pushed an iteration to every shard."""
        return []

    def started(self, event: IterationStarted) -> list[AnyAction]:
        """Return the actions for the start of an iteration. Called only if `needs_starts` is True."""
        return []

    def timer_fired(self, timer: TimerFired) -> list[AnyAction]:
        """Return the actions for a timer that is due.

        An earlier model may have set the timer, or the worker may have continued or left since then.
        """
        return []

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        """Return the actions for a worker that has joined."""
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        """Return the actions for a worker that has left."""
        return []

    def validate(self) -> None:
        """Check that the state of this object is consistent; raise `InternalError` if it is not."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class SyncModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """The specification of a sync model: an immutable object that contains the parameters of the model.

    Attributes:
        name: name of the model on the command line, before the colon.
        style: the color of the model in pictures, as a hexadecimal number, and the index of its dashes in
            `paceline.look.timelines.DASHES`. Without a color, the picture chooses both.
        shown: the settings whose timelines the documentation shows; () for the default setting.
        demo: the model's settings that only `paceline demo --all` runs, with the hyper-parameters of a similar model.
    """

    name: ClassVar[str]
    style: ClassVar[tuple[str, int]] = "", 0
    shown: ClassVar[tuple[str, ...]] = ()
    demo: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_staleness(self) -> bool:
        """True if the model uses the staleness of each push when the push arrives."""
        return False

    @property
    def needs_at_once(self) -> bool:
        """True if the model uses the largest number of workers that have been present at the same time.

        A worker that joins again is not counted twice, and the number does not decrease when workers leave. The
        number is part of a checkpoint, so a resumed run begins with this number.
        """
        return False

    @property
    def needs_significance(self) -> bool:
        """True if each push must contain |g| / |w|, the norm of the gradient divided by the norm of the weights."""
        return False

    @property
    def whole_job(self) -> bool:
        """True if all shards must run this model, because it plans for the whole job."""
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
        """True if each applied gradient was computed on the newest weights, so that its staleness is 0.

        With several shards, a few gradients may still have missed one update.
        """
        return self.lockstep

    @property
    def scales_pushes(self) -> bool:
        """True if the model multiplies gradients by factors of its own. If so, hyper-parameters are not translated."""
        return False

    @property
    def agrees_on_means(self) -> bool:
        """True if every mean contains the same pushes at all shards, apart from pushes of lost workers.

        Also True if the model applies every push on arrival. To clip the joint gradient, the norm of a whole mean must
        be computed, which is possible only under such a model.
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
        """Return a new state machine for the shard with index `shard`.

        Models that draw random numbers use the run's `seed`.
        """
        raise TypeError(f"{type(self).__name__} does not implement at_shard")

    def at_coordinator(self, seed: int = 0) -> JobMachine | None:
        """Return a new state machine for the coordinator, or None if the model does not need one."""
        return None

    def __str__(self) -> str:
        """Return the notation that `parse` reads.

        Numbers are always included; other values are included only if they differ from the default.
        """
        shown = [
            f"{field.name}={_plain(value)}"
            for field in _fields(type(self))
            if (value := getattr(self, field.name)) != field.default or _is_number(value)
        ]
        return f"{self.name}:{','.join(shown)}" if shown else self.name


_fields = cache(msgspec.structs.fields)  # msgspec makes these objects anew for each call


class OneShardModel(SyncModel):
    """Base class of the models that use or drop a push depending on its staleness, and answer pulls on arrival."""

    one_shard = True
    whole_job = True
    agrees_on_means = True
    independent = True
    needs_staleness = True


def agree_on_means(models: Sequence[SyncModel]) -> bool:
    """Return True if shards with these models agree on means (see `SyncModel.agrees_on_means`).

    Args:
        models: one model for all shards, or one for each shard.
    """
    return len(set(models)) == 1 and models[0].agrees_on_means


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Fraction) and not isinstance(value, bool)


def _plain(value: object) -> object:
    """Return an integer for a float with an integral value, a lower-case word for a bool, else the value itself."""
    if isinstance(value, bool):
        return str(value).lower()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def without_torn(
    held: Sequence[tuple[int, int]], worker: int, kept: int | None
) -> tuple[list[tuple[int, int]], list[AnyAction]]:
    """Return the held pushes that are kept, and actions that drop a lost worker's pushes with labels above `kept`.

    Args:
        held: (worker, iteration) of each held push.
        worker: the lost worker.
        kept: label of the worker's last push that all shards have received; None to keep all pushes.
    """
    torn = [] if kept is None else [push for push in held if push[0] == worker and push[1] > kept]
    return [push for push in held if push not in torn], [DropPush(*push) for push in torn]


def require_within(model: str, key: str, value: float | Fraction, least: float, most: float) -> None:
    """Raise `ConfigurationError` unless a parameter is a number in [least, most]."""
    if not (_is_number(value) and least <= value <= most):
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


# -- Keeps c_p, the number of iterations that each live worker p has pushed, and the minimum and maximum of c_p
#
# Only legal events reach a model (see `paceline.core.order`), so `Counts` does not check them. Joins and pushes
# take amortized constant time, regardless of the number of workers, because the number of workers is stored
# for each value of c_p. If no worker is left at the minimum, the minimum moves up to the next value that a
# worker has.


@stateful()
class Counts:
    """Tracks the progress of the live workers.

    Attributes:
        count: live worker -> c_p, in order of joining.
        slowest: smallest c_p of the live workers; unchanged while there are no live workers.
        fastest: largest c_p of the live workers; unchanged while there are no live workers.
        furthest: the largest c_p that any worker has ever had.
        joins: number of joins; a worker that leaves and joins again is counted twice.
    """

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.slowest = 0
        self.fastest = 0
        self.furthest = 0
        self.joins = 0
        self._at: dict[int, int] = {}  # value of c_p -> number of live workers with this value

    @property
    def live_count(self) -> int:
        """Number of live workers."""
        return len(self.count)

    def at(self, count: int) -> int:
        """Return the number of live workers with c_p = `count`."""
        return self._at.get(count, 0)

    def beyond(self, count: int) -> int:
        """Return the number of live workers with c_p > `count`, in time linear in the number of distinct counts."""
        return sum(workers for at, workers in self._at.items() if at > count)

    def gap(self, worker: int) -> int:
        """Return c_p - min c; 0 for a worker that is not live."""
        return self.count.get(worker, self.slowest) - self.slowest

    def joined(self, worker: int, count: int | None) -> None:
        """Add a worker with c_p = `count`, or with c_p = min c if `count` is None."""
        if count is None:
            count = self.slowest
        alone = not self.count
        self.joins += 1
        self._put(worker, count)
        self.slowest = count if alone else min(self.slowest, count)
        self.fastest = count if alone else max(self.fastest, count)

    def left(self, worker: int) -> int:
        """Remove a worker and return its c_p."""
        count = self.count.pop(worker)
        self._take(count)
        if self.count:
            self._raise_slowest()
            if count == self.fastest and count not in self._at:
                self.fastest = max(self._at)
        return count

    def pushed(self, worker: int, progress: int | None = None) -> int:
        """Count a push, and return the worker's c_p before the push.

        If `progress` is given, the push is for that round, and c_p becomes at least `progress` + 1.
        """
        before = self.count[worker]
        count = (before if progress is None else max(before, progress)) + 1
        self._put(worker, count)
        self._take(before)
        if count > self.fastest:
            self.fastest = count
        if before == self.slowest:
            self._raise_slowest()
        return before

    def validate(self) -> None:
        """Check that the derived values agree with c_p; raise `InternalError` if they do not."""
        counts = self.count.values()
        if Counter(counts) != self._at:
            raise InternalError(f"the tally of c_p is {self._at}, but the values of c_p are {self.count}")
        if counts and (self.slowest, self.fastest) != (min(counts), max(counts)):
            raise InternalError(
                f"slowest is {self.slowest} and fastest is {self.fastest}, but the values of c_p are {self.count}"
            )

    def _put(self, worker: int, count: int) -> None:
        self.count[worker] = count
        if count > self.furthest:
            self.furthest = count
        self._at[count] = self._at.get(count, 0) + 1

    def _take(self, count: int) -> None:
        self._at[count] -= 1
        if not self._at[count]:
            del self._at[count]

    def _raise_slowest(self) -> None:
        """Increase `slowest` to the smallest c_p of the live workers.

        The loop usually runs at most once, and never more often than there are distinct counts.
        """
        for _ in self._at:
            if self.slowest in self._at:
                return
            self.slowest += 1
        self.slowest = min(self._at)


# -- What a sync model does to the result of training, as far as its rule alone tells ------------------------
#
# Speed can be simulated without the script of a user, but accuracy cannot. So if Paceline
# recommends a model for its speed, it also says which of the `EFFECTS` the model has. Only training with the model
# shows how large the effect is.
#
# A sync model also determines the number of samples in an update: with n workers, an update under one model uses
# n batches, and an update under another model uses a single batch. The hyper-parameters of a script are
# usually made for a single batch.

Effect = Literal["exact", "fresh", "stale"]

EFFECTS: dict[Effect, str] = {
    "exact": "every update is that of one process on the joint batch",
    "fresh": "no gradient is stale, but late gradients are dropped, so an update averages fewer gradients",
    "stale": "gradients are computed on outdated weights, which changes how training proceeds",
}
"""The effects as clauses, from the smallest effect to the largest."""


def effect_of(models: Sequence[SyncModel]) -> Effect:
    """Return the effect of one model for all shards, or of one model for each shard.

    >>> from .notation import parse_shards
    >>> effect_of(parse_shards("bsp")), effect_of(parse_shards("drop-stragglers:quorum=3"))
    ('exact', 'fresh')
    >>> effect_of(parse_shards("bsp|asp"))
    'stale'
    """
    if all(model.lockstep for model in models):
        return "exact"
    return "fresh" if all(model.fresh for model in models) else "stale"


def backup_quorum(workers: int, slow: int = 1) -> int | None:
    """Return how many pushes `drop-stragglers` should wait for; None if too few workers would remain.

    Args:
        workers: number of workers.
        slow: number of workers that are too slow to be waited for.

    >>> backup_quorum(4), backup_quorum(16, slow=4), backup_quorum(2)
    (3, 12, None)
    """
    quorum = workers - max(1, slow)
    return quorum if 2 * quorum > workers else None


# -- samples of an update ---------------------------------------------------------------------------------

Kind = Literal["rounds", "quorum", "collected", "barriers", "arrival"]
"""The ways in which sync models make updates from pushes.

rounds      the mean of one push of every worker
quorum      the mean of the first pushes of a round
collected   the mean of a fixed number of pushes, from any workers
barriers    single pushes, and the mean of one push of every worker at a barrier
arrival     single pushes
"""

KINDS: dict[str, Kind] = {"drop-stragglers": "quorum", "rennala": "collected", "elastic-bsp": "barriers"}
"""Name of a model -> its kind. Any other model is "rounds" if it averages, and "arrival" otherwise."""


class Samples(NamedTuple):
    """The values from which the number of samples in an update follows.

    Attributes:
        workers: number of workers.
        batch: batch size of the loader in samples; None if it is unknown.
        joint: True if the batch size is the size of the joint batch, which is divided among the workers.
        balanced: True if the size of each worker's batch follows the worker's speed.
        translated: True if the hyper-parameters refer to the joint batch. See `paceline.sync.translation`.
        divisible: True if the batches of the loader could be divided.
        loader: False if the script distributes no loader, but makes its batches itself, of an unknown size.
        asked: True if the run was asked to divide the batches of loaders.
    """

    workers: int
    batch: int | None
    joint: bool = False
    balanced: bool = False
    translated: bool = True
    divisible: bool = True
    loader: bool = True
    asked: bool = False

    @property
    def whose(self) -> str:
        """A phrase that says where a batch of unknown size comes from."""
        return "of the loader" if self.loader else "of the script"

    @property
    def joint_batch(self) -> int:
        """Number of samples in a joint batch."""
        return (self.batch or 1) * (1 if self.joint else self.workers)

    @property
    def part(self) -> str:
        """The number of samples in a worker's batch."""
        if not self.joint:
            return str(self.batch or 1)
        least, more = divmod(self.batch or 1, self.workers)
        if self.balanced:
            return f"about {max(1, round((self.batch or 1) / self.workers))}"
        return f"{least} or {least + 1}" if more else str(least)

    def pushes(self, count: int) -> str:
        """The number of samples in several pushes."""
        total = count * self.joint_batch / self.workers
        return f"{total:.0f}" if not self.joint else f"about {total:.0f}"


def samples_words(models: Sequence[SyncModel], samples: Samples, option: str = "--joint-batch") -> str:
    """Return how many samples an update has, and the batch size of the script; "" for a single worker.

    Args:
        models: one model for all shards, or one model for each shard.
        samples: the values from which the numbers follow.
        option: the option with which the user divides the batches of the loader among the workers.

    >>> from .notation import parse_shards
    >>> def words(sync: str, **changes: object) -> str:
    ...     return samples_words(parse_shards(sync), Samples(3, 16)._replace(**changes))
    >>> words("bsp")
    '3 workers x 16 = 48 samples an update; the script says 16: --joint-batch keeps 16'
    >>> words("bsp", batch=48, joint=True)
    '48 samples an update, divided over 3 workers'
    >>> words("asp", translated=False)
    '16 samples an update, 3 under way at the same time'
    >>> words("bsp", workers=1)
    ''
    """
    if samples.workers < 2:
        return ""
    kinds = {_kind(model): model for model in models}
    clauses = [
        (f"{model.name}: " if len(kinds) > 1 else "") + _CLAUSES[kind](model, samples)
        for kind, model in kinds.items()
    ]
    return "; ".join([*clauses, *_remedy(kinds, samples, option)])


def _kind(model: SyncModel) -> Kind:
    if model.lockstep or getattr(model, "pushes", "") == "average":
        return "rounds"
    return KINDS.get(model.name, "arrival")


def _in_rounds(model: SyncModel, samples: Samples) -> str:
    workers, batch, joint = samples.workers, samples.batch, samples.joint_batch
    if batch is None:
        return f"{workers} batches {samples.whose} an update, one of each worker"
    if samples.joint:
        return f"{batch} samples an update, {_divided(samples)}"
    if samples.balanced:
        return (
            f"{joint} samples an update ({workers} workers x {batch}), divided in proportion to their speeds"
        )
    return f"{workers} workers x {batch} = {joint} samples an update"


def _with_quorum(model: SyncModel, samples: Samples) -> str:
    quorum, workers = min(getattr(model, "quorum", samples.workers), samples.workers), samples.workers
    if samples.joint:
        parts = f"{samples.batch}, {_divided(samples)}, of which {quorum} count"
        return f"{samples.pushes(quorum)} samples an update: {parts}"
    unit = _unit(samples)
    return f"{quorum} of {workers} workers x {samples.part} = {samples.pushes(quorum)} {unit} an update"


def _collected(model: SyncModel, samples: Samples) -> str:
    count = getattr(model, "batch", 1)
    if samples.joint:
        return f"{samples.pushes(count)} samples an update, in {count} pushes: {samples.batch}, {_divided(samples)}"
    return f"{count} pushes x {samples.part} = {samples.pushes(count)} {_unit(samples)} an update"


def _singly(samples: Samples, besides: str) -> str:
    of = f": {samples.batch}, {_divided(samples)}" if samples.joint else ""
    return f"{samples.part} {_unit(samples, 1)} an update, {besides}{of}"


_CLAUSES: dict[Kind, Callable[[SyncModel, Samples], str]] = {
    "rounds": _in_rounds,
    "quorum": _with_quorum,
    "collected": _collected,
    "barriers": lambda model, samples: _singly(samples, f"and {samples.joint_batch} at a barrier"),
    "arrival": lambda model, samples: _singly(samples, f"{samples.workers} under way at the same time"),
}


def _unit(samples: Samples, pushes: int = 2) -> str:
    if samples.batch is None:
        return f"batch{'es' * (pushes > 1)} {samples.whose}"
    return "samples"


def _divided(samples: Samples) -> str:
    speeds = ", in proportion to their speeds" if samples.balanced else ""
    return f"divided over {samples.workers} workers{speeds}"


def _remedy(kinds: Collection[Kind], samples: Samples, option: str) -> list[str]:
    """Return the batch size of the script, and the option that gives the joint batch this size."""
    batch = samples.batch
    if not samples.loader:
        return ["the script has distributed no loader" + f", so {option} divides nothing" * samples.asked]
    if samples.joint or batch is None:
        return []
    if "rounds" in kinds:
        said = f"the script says {batch}"
    elif samples.translated:
        refers = f"{samples.workers} x {batch} = {samples.joint_batch} samples"
        said = f"the hyper-parameters refer to {refers}, the script says {batch}"
    else:
        return [f"the script says {batch}"] if "quorum" in kinds or "collected" in kinds else []
    possible = samples.divisible and batch >= samples.workers
    return [f"{said}: {option} keeps {batch}" if possible else said]
