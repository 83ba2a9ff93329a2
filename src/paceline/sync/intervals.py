"""Tracks how long each worker's iterations take, for models that depend on the workers' speeds.

An interval ends with a push. It begins with the worker's previous push, as DSSP defines it, unless the model calls
`begin` when it answers the worker's pull. Then the time for which the worker has waited is left out. The interval
that ends with the warm-up of an accelerator is left out, because the next ones are shorter. Time outside of training
that a push names is not part of its interval, because it says nothing about the next ones.
"""

from __future__ import annotations

from ..state import stateful
from .events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Intervals"]


@stateful(decides="last_ticks interval_ticks")
class Intervals:
    """For each live worker, when its current interval began, and how long its last interval was.

    Attributes:
        last_ticks: worker -> time of the worker's last push or join, or the time given to `begin`.
        interval_ticks: worker -> length of the interval that ended with the worker's last push other than a warm-up,
            without the time outside of training.
    """

    def __init__(self) -> None:
        self.last_ticks: dict[int, int] = {}
        self.interval_ticks: dict[int, int] = {}

    def note(self, event: AnyEvent) -> None:
        """Update the times after the model has accepted an event."""
        match event:
            case PushReceived():
                if not event.warm_up:
                    length_ticks = event.now_ticks - self.last_ticks[event.worker]
                    self.interval_ticks[event.worker] = max(0, length_ticks - event.outside_ticks)
                self.last_ticks[event.worker] = event.now_ticks
            case WorkerJoined():
                self.last_ticks[event.worker] = event.now_ticks
            case WorkerLost() | WorkerFinished():
                del self.last_ticks[event.worker]
                self.interval_ticks.pop(event.worker, None)
            case _:
                pass

    def begin(self, worker: int, now_ticks: int) -> None:
        """Begin a worker's current interval now instead of with its last push."""
        self.last_ticks[worker] = now_ticks
