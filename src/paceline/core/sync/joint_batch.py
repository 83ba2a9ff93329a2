"""The samples of a joint batch: those that one push of each live worker would contain."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...state import stateful

__all__ = ["JointBatch"]

PUSHES = 8
"""Number of a worker's pushes over which its samples are averaged."""

NEGLIGIBLE = 0.001
"""Part of the joint batch below which the samples of workers that have left are forgotten."""


@stateful(decides="_usual _total _known _left")
class JointBatch:
    """Estimates the samples of a joint batch at one shard, in constant time for each push.

    The *usual samples* of a worker are a running mean over its pushes. A worker that has not pushed yet is counted
    with the mean of the others. If numbers of samples are unknown, pushes are counted.

    Example:
        >>> batch = JointBatch()
        >>> for worker in (0, 1):
        ...     batch.join(worker)
        >>> for worker, samples in ((0, 48), (1, 16)):
        ...     _ = batch.push(worker, samples)
        >>> batch.share({0}, [48.0])
        0.75
    """

    def __init__(self) -> None:
        self._usual: dict[int, tuple[float, int]] = {}  # live worker -> usual samples, number of pushes
        self._total = 0.0  # sum of the usual samples of the workers that have pushed
        self._known = 0  # number of live workers that have pushed
        self._left = 0.0  # usual samples of workers that have left, as far as they still count

    @property
    def workers(self) -> int:
        """The number of live workers."""
        return len(self._usual)

    def join(self, worker: int) -> None:
        """Add a live worker."""
        self._usual[worker] = 0.0, 0

    def leave(self, worker: int) -> None:
        """Remove a worker. Its samples remain in the joint batch until they are forgotten."""
        usual, pushes = self._usual.pop(worker)
        if pushes:
            self._known -= 1
            self._total = self._total - usual if self._known else 0.0
            self._left += usual

    def push(self, worker: int, samples: int | None) -> float:
        """Record a push, and return its samples: those of a typical push if they are unknown."""
        counted = float(samples) if samples else self._typical
        usual, pushes = self._usual[worker]
        self._known += not pushes
        change = (counted - usual) / min(pushes + 1, PUSHES)
        self._usual[worker] = usual + change, pushes + 1
        self._total += change
        return counted

    def share(self, workers: Collection[int], samples: Iterable[float]) -> float:
        """Return the part of a joint batch that some pushes contain; at most 1.

        Args:
            workers: the workers of these pushes. If they are all live ones, the pushes are a whole joint batch.
            samples: the samples of each push.
        """
        joint = self._total + self._typical * (len(self._usual) - self._known)
        if self._left < joint * NEGLIGIBLE:
            self._left = 0.0
        contained = sum(samples)
        if len(workers) >= len(self._usual) and self._usual.keys() <= set(workers):
            contained = max(contained, joint)
        return min(contained / (joint + self._left), 1.0)

    def forget(self, part: float) -> None:
        """Remove a part of the samples of workers that have left."""
        self._left *= 1.0 - part

    @property
    def _typical(self) -> float:
        """The mean of the workers' usual samples; 1 before the first push, so that pushes are counted."""
        return self._total / self._known if self._known else 1.0
