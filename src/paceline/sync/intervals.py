"""Tracks the time between each worker's successive pushes, for models that depend on the workers' speeds."""

from __future__ import annotations

from .events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Intervals"]


class Intervals:
    """For each live worker, the time of its last push and the interval between its last two pushes.

    Attributes:
        last_s: worker -> time of the worker's last push, or of its join if the worker has not pushed yet.
        interval_s: worker -> time between the worker's last two pushes, or between its join and its only push.
    """

    def __init__(self) -> None:
        self.last_s: dict[int, float] = {}
        self.interval_s: dict[int, float] = {}

    def note(self, event: AnyEvent) -> None:
        """Update the times after the model has accepted an event."""
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
