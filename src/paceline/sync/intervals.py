"""How long each worker takes per iteration, from the times of its pushes. A part of models that look at speed."""

from __future__ import annotations

from .events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Intervals"]


class Intervals:
    """Each live worker's last push and last interval.

    Attributes:
        last_s: worker -> when it pushed last; for one that has not, when it joined.
        interval_s: worker -> between its last two pushes, or between joining and its only one.
    """

    def __init__(self) -> None:
        self.last_s: dict[int, float] = {}
        self.interval_s: dict[int, float] = {}

    def note(self, event: AnyEvent) -> None:
        """Take in an event that the model has accepted."""
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
