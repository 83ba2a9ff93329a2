"""Tracks how long each worker's iterations take, for models that depend on the workers' speeds.

An interval ends with a push. It begins with the worker's previous push, as DSSP defines it, unless the model calls
`begin` when it answers the worker's pull. Then the time for which the worker has waited is left out.
"""

from __future__ import annotations

from .events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Intervals"]


class Intervals:
    """For each live worker, when its current interval began, and how long its last interval was.

    Attributes:
        last_s: worker -> time of the worker's last push or join, or the time given to `begin`.
        interval_s: worker -> length of the interval that ended with the worker's last push.
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

    def begin(self, worker: int, now_s: float) -> None:
        """Begin a worker's current interval now instead of with its last push."""
        self.last_s[worker] = now_s
