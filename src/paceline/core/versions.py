"""How stale each push is: a shard's version, and the version that each worker's weights are of."""

from __future__ import annotations

from collections.abc import Iterable

from ..sync.actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush
from ..sync.events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost

__all__ = ["Versions"]

Key = tuple[int, int]
"""A push: (worker, iteration)."""


class Versions:
    """Counts a shard's updates.

    Attributes:
        version: how many there have been.
    """

    def __init__(self) -> None:
        self.version = 0
        self._pulled: dict[int, int] = {}  # live worker -> the version of the weights that it has
        self._computed_on: dict[Key, int] = {}  # the same of each push that is neither applied nor dropped

    def note(self, event: AnyEvent) -> None:
        """Take in an event that the model has accepted, before its actions."""
        if type(event) is PushReceived:
            self._computed_on[event.worker, event.iteration] = self._pulled[event.worker]
        elif type(event) is WorkerJoined:
            self._pulled[event.worker] = self.version
        elif type(event) is WorkerLost or type(event) is WorkerFinished:
            del self._pulled[event.worker]

    def carry_out(self, action: AnyAction) -> list[tuple[int, int, int]]:
        """Take in one action. Of each push that it applies: (worker, iteration, updates that its gradient missed)."""
        if type(action) is AnswerPull:
            self._pulled[action.worker] = self.version
        elif type(action) is ApplyPush:
            return self._apply([(action.worker, action.iteration)])
        elif type(action) is ApplyMean:
            return self._apply(action.pushes)
        elif type(action) is DropPush:
            del self._computed_on[action.worker, action.iteration]
        return []

    def _apply(self, keys: Iterable[Key]) -> list[tuple[int, int, int]]:
        missed = [(*key, self.version - self._computed_on.pop(key)) for key in keys]
        self.version += 1
        return missed
