"""The events that a shard may legally receive next.

Each worker joins, then repeatedly pushes, pulls and is answered, and may leave at any time.
`paceline.core.protocol.order` enforces this order. This module implements the order independently, so that the tests
do not depend on that module.
"""

from __future__ import annotations

from typing import Literal

from ..sync.actions import SetTimer
from ..sync.events import (
    AnyEvent,
    Change,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

__all__ = ["LegalEvents", "Phase"]

Phase = Literal["computing", "pushed", "waiting"]

MOST_WORKERS = 4


class LegalEvents:
    """Generates legal and illegal events for a shard.

    Args:
        repeats: True if the state machine under test accepts repeated pulls.

    Attributes:
        now_ticks: time of the next event, in ticks. The caller may increase this attribute.
        phase: live worker -> its phase, in order of joining.
        label: live worker -> iteration that its next push is labeled with.
        progress: worker -> the later round that the worker was told to continue from; removed by its next push.
        gone: workers that have left and have not joined again.
        timers: timers that are set and have not fired.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self.now_ticks = 0
        self.phase: dict[int, Phase] = {}
        self.label: dict[int, int] = {}
        self.progress: dict[int, int] = {}
        self.gone: list[int] = []
        self.timers: list[SetTimer] = []
        self._repeats = repeats

    @property
    def waiting(self) -> set[int]:
        """The workers that have an unanswered pull."""
        return {worker for worker, phase in self.phase.items() if phase == "waiting"}

    def in_phase(self, phase: Phase) -> list[int]:
        """Return the live workers in this phase, in order of joining."""
        return [worker for worker, current in self.phase.items() if current == phase]

    def join(self, iteration: int = 0) -> WorkerJoined:
        """Return the `WorkerJoined` event of a new worker, with this `iteration`."""
        worker = len(self.phase) + len(self.gone)
        return WorkerJoined(now_ticks=self.now_ticks, worker=worker, iteration=iteration)

    def push(
        self,
        worker: int,
        *,
        empty: bool = False,
        stop: Stop | None = None,
        change: Change | None = None,
        significance: float | None = None,
    ) -> PushReceived:
        """Return the next push of a worker that is computing."""
        return PushReceived(
            now_ticks=self.now_ticks,
            worker=worker,
            iteration=self.label[worker],
            empty=empty,
            stop=stop,
            change=change,
            significance=significance,
            progress=self.progress.get(worker),
        )

    def pull(self, worker: int) -> PullRequested:
        """Return the pull that follows a worker's last push."""
        return PullRequested(now_ticks=self.now_ticks, worker=worker, iteration=self.label[worker] - 1)

    def repeat(self, worker: int) -> PullRepeated:
        """Return a repeated pull for the iteration that a worker is computing."""
        return PullRepeated(now_ticks=self.now_ticks, worker=worker, iteration=self.label[worker])

    def fire(self, timer: SetTimer) -> TimerFired:
        """Return the `TimerFired` event of a timer, at the time when it is due, or now if it is overdue."""
        now_ticks = max(self.now_ticks, timer.due_ticks)
        return TimerFired(now_ticks=now_ticks, worker=timer.worker, iteration=timer.iteration)

    def leave(self, worker: int, *, lost: bool) -> WorkerLost | WorkerFinished:
        """Return the `WorkerLost` event of a worker if `lost` is true, otherwise its `WorkerFinished` event."""
        return (WorkerLost if lost else WorkerFinished)(now_ticks=self.now_ticks, worker=worker)

    def pick(self, choice: int) -> AnyEvent:
        """Return the legal event selected by `choice`, an integer >= 0. One choice in twelve makes a worker leave."""
        choice, kind = divmod(choice, 12)
        events: list[AnyEvent] = []
        if kind == 0:
            events += [self.leave(worker, lost=lost) for worker in self.phase for lost in (True, False)]
        else:
            for worker, phase in self.phase.items():
                if phase == "computing":
                    events += [self.push(worker), self.push(worker), self.push(worker, empty=True)]
                    events += [self.repeat(worker)] * self._repeats
                elif phase == "pushed":
                    events += [self.pull(worker)] * 3
            events += [self.fire(timer) for timer in self.timers]
        if not events or (kind == 1 and len(self.phase) < MOST_WORKERS):
            events = [self.join()]
        return events[choice % len(events)]

    def illegal(self) -> list[AnyEvent]:
        """Return events that are illegal now: at least one of each kind that can be illegal in the current state."""
        now_ticks = self.now_ticks
        stranger = 1000
        events: list[AnyEvent] = []
        for worker in [stranger, *self.gone[:2]]:
            events += [
                PushReceived(now_ticks=now_ticks, worker=worker, iteration=0),
                PullRequested(now_ticks=now_ticks, worker=worker, iteration=0),
                WorkerLost(now_ticks=now_ticks, worker=worker),
                WorkerFinished(now_ticks=now_ticks, worker=worker),
            ]
            events += [PullRepeated(now_ticks=now_ticks, worker=worker, iteration=0)] * self._repeats
        for worker, phase in self.phase.items():
            label = self.label[worker]
            events += [
                WorkerJoined(now_ticks=now_ticks, worker=worker, iteration=label),
                # This push has already been received.
                PushReceived(now_ticks=now_ticks, worker=worker, iteration=label - 1),
                # This push skips an iteration.
                PushReceived(now_ticks=now_ticks, worker=worker, iteration=label + 1),
                # The push that must precede this pull has not been received yet.
                PullRequested(now_ticks=now_ticks, worker=worker, iteration=label),
            ]
            if phase != "computing":
                events.append(PushReceived(now_ticks=now_ticks, worker=worker, iteration=label))
            if phase != "pushed":
                events.append(PullRequested(now_ticks=now_ticks, worker=worker, iteration=label - 1))
            if self._repeats:
                events.append(PullRepeated(now_ticks=now_ticks, worker=worker, iteration=label + 1))
                if phase != "computing":
                    events.append(PullRepeated(now_ticks=now_ticks, worker=worker, iteration=label))
        return events

    def advance(self, event: AnyEvent) -> None:
        """Record an event that the shard has received."""
        self.now_ticks = max(self.now_ticks, event.now_ticks)
        worker = event.worker
        match event:
            case WorkerJoined():
                self.phase[worker] = "pushed" if event.pulls else "computing"
                self.label[worker] = event.iteration
                if worker in self.gone:
                    self.gone.remove(worker)
            case PushReceived():
                self.phase[worker] = "pushed"
                self.label[worker] += 1
                self.progress.pop(worker, None)
            case PullRequested():
                self.phase[worker] = "waiting"
            case WorkerLost() | WorkerFinished():
                del self.phase[worker], self.label[worker]
                self.progress.pop(worker, None)
                self.gone.append(worker)
            case TimerFired():
                fired = worker, event.iteration
                self.timers = [timer for timer in self.timers if (timer.worker, timer.iteration) != fired]
            case PullRepeated():
                pass
            case _:
                raise AssertionError(f"a shard cannot receive {event}")
