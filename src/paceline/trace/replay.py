"""Replays a trace with a core that must return the recorded actions, or with another sync model.

Live runs use the same cores (see `paceline.core`). The decisions of a core depend only on its events, so a replay is
exact. If the beginning of a trace was deleted, the replay begins with the state of the core that the header contains.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from ..core.coordinator import Coordinator
from ..core.requests import Entry
from ..core.shard import Shard
from ..errors import ConfigurationError, InvalidEventError
from ..sync import SyncModel
from ..sync.actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, SetTimer
from ..sync.events import (
    PullRequested,
    PushReceived,
    RecordedEvent,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.plugins import load_models
from ..sync.schedule import read_schedule
from .keyframes import fill
from .measures import Pulls
from .recording import Header, Memory, Trace, modules_of_models, require_known


class Replay:
    """A new core of the kind that recorded a trace, for replaying the trace event by event.

    Args:
        header: header of the trace.
        trust: True to import the modules that the header names, if they have not been imported.

    Attributes:
        core: the core.

    Raises:
        ConfigurationError: the sync model is unknown, the module that defines it has not been imported, or the
            beginning of the trace was deleted and the state of the core at the first remaining entry was not kept.
    """

    def __init__(self, header: Header, *, trust: bool = False) -> None:
        imports = () if header.imports is msgspec.UNSET else header.imports
        keyframe = None if header.keyframe is msgspec.UNSET else header.keyframe
        if keyframe is not None and keyframe.why:
            raise ConfigurationError(
                f"the trace of {header.recorded_by} cannot be replayed: its beginning was deleted, and the state of "
                f"the sync model at the first remaining entry was not kept ({keyframe.why}). Run with --traces full "
                "to keep the whole trace."
            )
        sync = header.sync if keyframe is None or not keyframe.sync else keyframe.sync
        if not trust:
            require_known(imports, f"the trace of {header.recorded_by}")
        load_models(sync, imports if trust else ())
        schedule = read_schedule(sync)
        if not trust:
            require_known(modules_of_models(schedule.models), f"the trace of {header.recorded_by}")
        self._memory = Memory(header)
        if header.host == "shard":
            self.core: Shard | Coordinator = Shard(
                header.index,
                schedule.first,
                header.seed,
                recorder=self._memory,
                ticks_per_s=header.ticks_per_s,
                translated=header.translated,
                replays=True,
            )
            self._take: Callable[[Any], object] = self.core.handle
        else:
            self.core = Coordinator(
                schedule,
                workers=0,
                servers=0,
                shards=0,
                seed=header.seed,
                recorder=self._memory,
                ticks_per_s=header.ticks_per_s,
            )
            self._take = self.core.take
        if keyframe is not None:
            fill(self.core, keyframe, imports)

    def take(self, event: RecordedEvent) -> Entry:
        """Pass an event to the core and return the entry that the core records."""
        with contextlib.suppress(InvalidEventError):  # the refusal is recorded
            self._take(event)
        return self._memory.trace.entries[-1]


def replay(trace: Trace, *, trust: bool = False) -> list[str]:
    """Replay a trace and return a description of each difference; an empty list if all decisions are identical.

    Args:
        trace: the trace.
        trust: True to import the modules with the run's models, which the trace names. If False, these modules must
            have been imported already, because importing a module runs its code.
    """
    host = Replay(trace.header, trust=trust)
    differences = []
    for number, recorded in enumerate(trace.entries):
        replayed = host.take(recorded.event)
        if (was := _decision(recorded)) != (now := _decision(replayed)):
            differences.append(f"entry {number}: {recorded.event}: recorded {was}, replayed {now}")
    return differences


def _decision(entry: Entry) -> object:
    """Return what a core has decided about an event: its refusal, or its actions and the standings (see `Entry`)."""
    return entry.refused or ((entry.actions, entry.standings) if entry.standings else entry.actions)


# -- What another sync model would have decided about the recorded events of a run ---------------------------
#
# The events of a shard were caused in part by the recorded decisions: a worker pushes again only after its
# pull was answered. Another model would have answered at other times, and later events would have been different. So
# the pushes and pulls of each worker are passed to the other model in their recorded order and at their recorded
# times. A pull counts as delayed if the model answers later than on arrival. If a worker's next push comes before the
# model has answered the worker's pull, this push counts as *too early*: under the other model, the worker would not
# have sent the push at that time. The push and everything that the worker sends later are deferred until the model
# answers.

UNDERSTOOD = (PushReceived, PullRequested, WorkerFinished, WorkerJoined, WorkerLost)
"""The events that are passed to the other model: those that workers cause.

Recorded timers are ignored, because the other model sets its own timers.
"""


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """What a model has decided at one shard.

    Attributes:
        sync: the model.
        pushes: number of pushes that the shard has received.
        updates: number of optimizer steps.
        dropped: number of pushes that were dropped.
        delayed: worker -> number of its pulls that were not answered on arrival.
        waited_s: worker -> total time for which its answered pulls waited, in seconds.
        mean_staleness: mean staleness of the pushes that were applied, in updates.
        max_staleness: largest staleness of a push that was applied.
        too_early: worker -> number of its pushes that the worker would have sent later under this model.
        differs_s: time of the first event for which the model's decision differs from the recorded one, in seconds
            since the run began; None if no decision differs.
    """

    sync: str
    pushes: int
    updates: int
    dropped: int
    delayed: dict[int, int]
    waited_s: dict[int, float]
    mean_staleness: float
    max_staleness: int
    too_early: dict[int, int]
    differs_s: float | None = None


class _Tally:
    """Counts the decisions of a shard."""

    def __init__(self, sync: str, ticks_per_s: int) -> None:
        self._sync, self._ticks_per_s = sync, ticks_per_s
        self._pushes = self._updates = self._dropped = 0
        self._delayed: Counter[int] = Counter()
        self._waited: Counter[int] = Counter()
        self._pulls = Pulls()
        self._staleness: list[int] = []
        self.too_early: Counter[int] = Counter()
        self.differs_s: float | None = None

    def note(self, entry: Entry) -> None:
        event = entry.event
        self._pushes += isinstance(event, PushReceived)
        self._staleness += [updates for _, _, updates in entry.staleness]
        for wait in self._pulls.ended(entry):
            if wait.reason != "left":
                self._waited[wait.worker] += wait.end - wait.begin
        for action in entry.actions:
            self._updates += isinstance(action, ApplyPush | ApplyMean)
            self._dropped += isinstance(action, DropPush)
        if isinstance(event, PullRequested) and event.worker in self._pulls.asked:
            self._delayed[event.worker] += 1

    def decisions(self) -> Decisions:
        staleness = self._staleness
        return Decisions(
            sync=self._sync,
            pushes=self._pushes,
            updates=self._updates,
            dropped=self._dropped,
            delayed=dict(sorted(self._delayed.items())),
            waited_s={worker: ticks / self._ticks_per_s for worker, ticks in sorted(self._waited.items())},
            mean_staleness=sum(staleness) / len(staleness) if staleness else 0.0,
            max_staleness=max(staleness, default=0),
            too_early=dict(sorted(self.too_early.items())),
            differs_s=self.differs_s,
        )


def decisions_of(trace: Trace) -> Decisions:
    """Return what was decided at a shard, from its trace."""
    tally = _Tally(trace.header.own_sync, trace.header.ticks_per_s)
    for entry in trace.entries:
        if entry.refused is None:
            tally.note(entry)
    return tally.decisions()


def redecide(trace: Trace, model: SyncModel) -> Decisions:
    """Return what another model would have decided about the events of a shard.

    Args:
        trace: the whole trace of a shard.
        model: the other model. It must not need plans from the coordinator.
    """
    return _Other(trace, model).decisions()


class _Other:
    """Passes the events of a trace to a shard with another model."""

    def __init__(self, trace: Trace, model: SyncModel) -> None:
        header = trace.header
        self._trace = trace
        self._memory = Memory(msgspec.structs.replace(header, sync=str(model)))
        self._shard = Shard(
            header.index,
            read_schedule(str(model)).first,
            header.seed,
            recorder=self._memory,
            ticks_per_s=header.ticks_per_s,
        )
        self._tally = _Tally(str(model), header.ticks_per_s)
        self._waiting: set[int] = set()
        self._deferred: dict[int, deque[RecordedEvent]] = {}
        self._timers: list[SetTimer] = []
        self._progress: dict[int, int] = {}  # worker -> round from which it was told to continue
        self._answered: deque[int] = deque()  # workers whose deferred events may be passed on

    def decisions(self) -> Decisions:
        for recorded in self._trace.entries:
            event = recorded.event
            if recorded.refused is not None or not isinstance(event, UNDERSTOOD):
                continue
            self._fire(event.now_ticks)
            decided = self._offer(event)
            if self._tally.differs_s is None and decided != recorded.actions:
                self._tally.differs_s = self._trace.header.time_s(recorded)
        last_ticks = self._trace.entries[-1].event.now_ticks if self._trace.entries else 0
        self._fire(last_ticks + 1)
        return self._tally.decisions()

    def _fire(self, now_ticks: int) -> None:
        """Fire the timers that are due before a time.

        A timer that is due at exactly this time fires after the messages that arrive at this time.
        """
        while due := [timer for timer in self._timers if timer.due_ticks < now_ticks]:
            first = min(due, key=lambda timer: timer.due_ticks)
            self._timers.remove(first)
            self._take(TimerFired(now_ticks=first.due_ticks, worker=first.worker, iteration=first.iteration))
            self._catch_up(first.due_ticks)

    def _offer(self, event: RecordedEvent) -> list[AnyAction] | None:
        """Pass on an event, or defer it if its worker still waits. Return the actions; None for a deferred event."""
        assert isinstance(event, UNDERSTOOD)
        worker = event.worker
        if worker in self._waiting:  # a timer that is due at the same time may answer the worker's pull
            self._fire(event.now_ticks + 1)
        leaves = isinstance(event, WorkerLost)
        if leaves:
            self._deferred.pop(worker, None)
        if not leaves and (worker in self._waiting or worker in self._deferred):
            if isinstance(event, PushReceived):
                self._tally.too_early[worker] += 1
            self._deferred.setdefault(worker, deque()).append(event)
            return None
        decided = self._take(event)
        self._catch_up(event.now_ticks)
        return decided

    def _take(self, event: RecordedEvent) -> list[AnyAction] | None:
        """Let the shard handle an event, and return the actions; None if the model does not allow the event."""
        if isinstance(event, PushReceived):  # remove what the recorded model's plans have added
            progress = self._progress.pop(event.worker, None)
            event = msgspec.structs.replace(event, stop=None, change=None, progress=progress)
        try:
            self._shard.handle(event)
        except InvalidEventError:
            return None
        entry = self._memory.trace.entries[-1]
        self._tally.note(entry)
        if isinstance(event, PullRequested):
            self._waiting.add(event.worker)
        elif isinstance(event, WorkerLost | WorkerFinished):
            self._waiting.discard(event.worker)
        for action in entry.actions:
            if isinstance(action, SetTimer):
                self._timers.append(action)
            elif isinstance(action, AnswerPull):
                self._waiting.discard(action.worker)
                self._answered.append(action.worker)
                if action.v_train is not None:
                    self._progress[action.worker] = action.v_train
        return entry.actions

    def _catch_up(self, now_ticks: int) -> None:
        """Pass on the deferred events of workers that were answered, until these workers wait again."""
        while self._answered:
            worker = self._answered.popleft()
            deferred = self._deferred.get(worker)
            while deferred and worker not in self._waiting:
                event = deferred.popleft()
                self._take(msgspec.structs.replace(event, now_ticks=max(now_ticks, event.now_ticks)))
            if not deferred:
                self._deferred.pop(worker, None)
