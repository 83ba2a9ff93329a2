"""The time between successive pushes of each worker, for models that depend on the workers' speeds."""

from __future__ import annotations

from .events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Intervals"]


class Intervals:
    """The last push and the last interval of each live worker.

    Attributes:
        last_s: worker -> time of its last push, or the time at which it joined if it has not pushed yet.
        interval_s: worker -> time between its last two pushes, or between its join and its only push.
    """

    def __init__(self) -> None:
        self.last_s: dict[int, float] = {}
        self.interval_s: dict[int, float] = {}

    def note(self, event: AnyEvent) -> None:
        """Update the times with an event that the model has accepted."""
        match event:
            case PushReceived():
                self.interval_s[event.worker] = event.now_s - self.last_s[event.worker]
                self.last_s[event.worker] = event.now_s
            case WorkerJoined():
                self.last_s[event.worker] = event.now_s
            case WorkerLost() | WorkerFinished():
                del self.last_s[event.worker]
                self.interval_s.pop(event.worker, None)
            case _:
                pass
