"""How stale each push is: the version of a shard, and the version of the weights that each worker has."""

from __future__ import annotations

from collections.abc import Iterable

from ..sync.events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Versions"]

Key = tuple[int, int]
"""A push: (worker, iteration)."""


class Versions:
    """Counts the updates of a shard.

    Attributes:
        version: the number of updates.
    """

    def __init__(self) -> None:
        self.version = 0
        self._pulled: dict[int, int] = {}  # live worker -> version of the weights that it has
        self._computed_on: dict[
            Key, int
        ] = {}  # push that is neither applied nor dropped -> version of its weights

    def note(self, event: AnyEvent) -> None:
        """Take in an event that the model has accepted, before its actions."""
        if type(event) is PushReceived:
            self._computed_on[event.worker, event.iteration] = self._pulled[event.worker]
        elif type(event) is WorkerJoined:
            self._pulled[event.worker] = self.version
        elif type(event) is WorkerLost or type(event) is WorkerFinished:
            del self._pulled[event.worker]

    def answered(self, worker: int) -> None:
        """A worker gets the weights as they are now."""
        self._pulled[worker] = self.version

    def drop(self, worker: int, iteration: int) -> None:
        """A push is dropped."""
        del self._computed_on[worker, iteration]

    def apply(self, pushes: Iterable[Key]) -> list[tuple[int, int, int]]:
        """Apply one update; return for each of its pushes (worker, iteration, updates that its gradient missed)."""
        missed = [(*key, self.version - self._computed_on.pop(key)) for key in pushes]
        self.version += 1
        return missed
