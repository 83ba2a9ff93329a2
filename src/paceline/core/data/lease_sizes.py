"""The sizes of leases: the number of batches in a worker's next lease, and the sizes of these batches.

The number of batches follows the worker's speed and shrinks toward the end of the epoch (*weighted factoring*), so
that all workers end the epoch at about the same time. If the order is balanced, the sizes of the batches follow the
workers' speeds as well (see `paceline.core.data.batch_sizes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...state import stateful
from ..protocol.job_cut import WorkerTimes
from ..protocol.lease import Order, divide_evenly
from .batch_sizes import BatchSizes

__all__ = ["LeaseSizes"]

LEASE_S = 0.25  # maximum time for which a lease of several batches lasts
MOST_ROUNDS = 4  # maximum number of rounds of a balanced, static split that are dealt at a time
MOST_BATCHES = 16  # maximum number of batches in a lease
PART = 0.5  # maximum fraction of the epoch's remaining time for which a lease of several batches lasts
PACE_WEIGHT = 0.25  # weight of the latest observation in a worker's mean time per batch


@stateful(decides="balanced least _paces _rate")
class LeaseSizes:
    """The sizes of the leases of all workers of one loader.

    Args:
        times: the times that the workers had taken in an earlier run.

    Attributes:
        balanced: the sizes of the workers' batches if the order is balanced.
        least: minimum size of a batch of a balanced order.
    """

    def __init__(self, times: Iterable[WorkerTimes] = ()) -> None:
        self.balanced = BatchSizes(times)
        self.least = 1
        self._paces: dict[int, _Pace] = {}
        self._rate = 0.0  # sum of the workers' rates, in batches per second

    def observe(self, worker: int, times: Iterable[tuple[int, float]], least: int, step: int) -> None:
        """Record the times of a worker's latest batches, and which sizes its next batches may have."""
        for samples, seconds in times:
            self.balanced.observe(worker, samples, seconds)
        self.least = max(self.least, least)
        self.balanced.steps[worker] = step

    def pause(self, worker: int) -> None:
        """Ignore the time until the worker's next request, for example because it is between two epochs."""
        if worker in self._paces:
            self._paces[worker].batches = 0

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self.balanced.forget(worker)
        if (pace := self._paces.pop(worker, None)) is not None:
            self._rate -= pace.rate

    def smallest(self, order: Order, largest: int) -> int:
        """Return the size of the smallest batch that is handed out, if full batches have size `largest`."""
        if order.balanced or order.joint:
            return min(self.least, largest)
        return largest if order.drop_last else 1

    def joint(self, order: Order, workers: int) -> int:
        """Return the size of a joint batch of an order whose batch is joint.

        It is that of the loader, unless the maximum size of a worker's batch leaves no room for it.
        """
        return min(order.batch, (order.most or order.batch) * workers)

    def parts(self, order: Order, members: Sequence[int], total: int, *, steady: bool) -> Mapping[int, int]:
        """Divide a joint batch of `total` positions among workers.

        No part is smaller than `least`, except for empty ones: if there are too few positions, the last workers
        receive none.

        Args:
            order: the order.
            members: the workers, in order of their indices.
            total: number of positions, at most `joint`.
            steady: True to keep the sizes of earlier joint batches, unless it is worthwhile to change them.
        """
        served = members[: max(total // self.least, 1)]
        least, most = min(self.least, total), order.most
        if not order.balanced:
            sizes: Mapping[int, int] = dict(zip(served, divide_evenly(total, len(served)), strict=True))
        elif steady:
            sizes = self.balanced.of(served, total, least=least, most=most)
        else:
            sizes = self.balanced.divide(served, total, least=least, most=most)
        return {**dict.fromkeys(members, 0), **sizes}

    def rounds(self) -> int:
        """Return the number of rounds of a balanced, static split to deal at a time."""
        round_s = self.balanced.round_s
        return max(1, min(MOST_ROUNDS, int(LEASE_S / round_s))) if round_s else 1

    def batches(self, worker: int, now_s: float, left: float | None) -> int:
        """Return the maximum number of batches for the next lease of a worker that has used its last one.

        Args:
            worker: index of the worker.
            now_s: current time in seconds.
            left: number of full batches that are left in the epoch; None if it is unknown.
        """
        pace = self._paces.setdefault(worker, _Pace())
        before = pace.rate
        pace.ask(now_s)
        self._rate += pace.rate - before
        if pace.batch_s is None or self._rate <= 0.0:
            return 1
        batches = min(MOST_BATCHES, LEASE_S / pace.batch_s)
        if left is not None:
            batches = min(batches, PART * (left / self._rate) / pace.batch_s)
        return max(1, int(batches))

    def lent(self, worker: int, batches: int) -> None:
        """Record the number of batches that a worker has received after a call of `batches`."""
        self._paces[worker].batches = batches


@stateful(decides="asked_s batches batch_s")
class _Pace:
    """The mean time that a worker takes for a batch."""

    __slots__ = ("asked_s", "batch_s", "batches")

    def __init__(self) -> None:
        self.asked_s = 0.0
        self.batches = 0  # number of batches in the last lease; 0 if the worker has none
        self.batch_s: float | None = None

    @property
    def rate(self) -> float:
        return 1.0 / self.batch_s if self.batch_s else 0.0

    def ask(self, now_s: float) -> None:
        """Record that the worker has used its last lease."""
        if self.batches:
            batch_s = max(now_s - self.asked_s, 1e-9) / self.batches
            usual_s = self.batch_s if self.batch_s is not None else batch_s
            self.batch_s = usual_s + (batch_s - usual_s) * PACE_WEIGHT
        self.asked_s, self.batches = now_s, 0
