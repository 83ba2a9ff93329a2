"""Computes the staleness of each push at a shard: how many updates its gradient does not take into account."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...state import stateful
from ...sync.events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from ..protocol.messages import PushCounts

__all__ = ["Versions"]

Key = tuple[int, int]
"""A push: (worker, iteration)."""


@stateful(
    decides="version lost dropped_samples _pulled _computed_on _means _averaged _dropped", fixed="_first"
)
class Versions:
    """Counts the updates at one shard and computes the staleness of each push.

    Args:
        version: number of updates in the weights with which the shard begins.

    Attributes:
        version: number of updates that have been applied.
        lost: number of pushes that were dropped because their workers were lost.
        dropped_samples: number of samples in the other dropped pushes.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = self._first = version
        self.lost = self.dropped_samples = 0
        self._means = self._averaged = 0  # number of means, and of pushes in them
        self._dropped = 0  # number of pushes that are in no update, including lost ones
        self._pulled: dict[int, int] = {}  # live worker -> version of the worker's weights
        # push that is neither applied nor dropped yet -> version of the weights on which its gradient was computed
        self._computed_on: dict[Key, int] = {}

    @property
    def workers(self) -> Iterable[int]:
        """The live workers."""
        return self._pulled

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return what decides: no number of all updates or pushes, but what each worker's weights do not contain."""
        missed = {worker: self.missed(worker) for worker in self._pulled}
        counts = dict.fromkeys(("version", "lost", "dropped_samples", "_means", "_averaged", "_dropped"))
        return {**counts, "_pulled": missed, "_computed_on": self._computed_on.keys()}

    def note(self, event: AnyEvent) -> None:
        """Record an event that the model has accepted. Call this before recording the resulting actions."""
        if type(event) is PushReceived:
            self._computed_on[event.worker, event.iteration] = self._pulled[event.worker]
        elif type(event) is WorkerJoined:
            self._pulled[event.worker] = self.version
        elif type(event) is WorkerLost or type(event) is WorkerFinished:
            del self._pulled[event.worker]

    def answered(self, worker: int) -> None:
        """Record that a worker receives the current weights."""
        self._pulled[worker] = self.version

    def missed(self, worker: int) -> int:
        """Return the number of updates since a worker has received the weights; 0 if it is not live."""
        return self.version - self._pulled.get(worker, self.version)

    @property
    def unapplied(self) -> Collection[Key]:
        """The pushes that have been received, and are neither applied nor dropped yet."""
        return self._computed_on.keys()

    def pushes(self) -> PushCounts:
        """Return what has become of all pushes. Those that are neither applied nor dropped count as lost."""
        return PushCounts(
            applied=self.version - self._first - self._means,
            averaged=self._averaged,
            dropped=self._dropped - self.lost,
            lost=self.lost + len(self._computed_on),
            dropped_samples=self.dropped_samples,
        )

    def is_unapplied(self, push: Key) -> bool:
        """Return True if a push has been received, and is neither applied nor dropped yet."""
        return push in self._computed_on

    def drop(self, worker: int, iteration: int) -> None:
        """Record that a push is dropped."""
        del self._computed_on[worker, iteration]
        self._dropped += 1

    def apply_one(self, push: Key) -> tuple[int, int, int]:
        """Record one update with a single push; return (worker, iteration, staleness) of the push."""
        missed = self.version - self._computed_on.pop(push)
        self.version += 1
        return (*push, missed)

    def apply(self, pushes: Iterable[Key]) -> list[tuple[int, int, int]]:
        """Record one update; return (worker, iteration, staleness) for each of its pushes."""
        staleness = [(*key, self.version - self._computed_on.pop(key)) for key in pushes]
        self.version += 1
        if len(staleness) > 1:  # the mean of a single push is the push itself
            self._means += 1
            self._averaged += len(staleness)
        return staleness
