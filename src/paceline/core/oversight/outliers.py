"""Finds a worker whose losses or gradients differ from those of all others, as with corrupted data.

Near the end of training, the losses and the norms of single batches have heavy tails: one hard sample makes a norm a
hundred times as large as that of the next batch. So a ratio proves nothing by itself. The test asks how unlikely a
worker's values are among those of the others:

- **One push.** Let y be the logarithm of half the worker's value. Its p-value with respect to another worker is the
  share of that worker's last `WINDOW` values, and of y itself, that are at least y. Beyond them, p decreases with the
  exponent of their tail, as Hill estimates it: the more the others' values scatter, the less a large value says. The
  largest p over all others counts, so a worker that resembles another one is no outlier.
- **Many pushes.** If the worker's values are distributed like the others', whatever their distribution is, then
  1 / (2 sqrt(p)) has a mean of at most 1 (a p-to-e calibrator [1]). So each product of these numbers over consecutive
  pushes is a test martingale. The largest product that ends at the latest push is kept (Page's CUSUM, at least 1).
  The worker is named when it reaches `RARE`.
- **False alarms.** By Ville's inequality, a healthy worker is named once in `RARE` = 10**6 of its pushes on average,
  with all looks counted, if its pushes are independent. Two rules make it rarer, since samples come back: half of a
  value is compared, because the data of workers may be unequal, and all values below a share of the beginning are
  equal, because no fault matters there. In 200 healthy runs, each judged from three beginnings, nobody was named
  (`tests/core/test_outliers.py`).

One push adds at most `MOST`, so three pushes are needed. A fault that multiplies usual losses by ten is named after
three to five pushes, so within 20 updates of four workers.

If only one other worker is known, nobody can say which of the two is wrong. The finding then names both.

[1] Vovk, Wang: E-values: calibration, combination and applications. The Annals of Statistics 49(3), 2021.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

from ...state import stateful
from ..protocol.messages import Observation

__all__ = ["Deviation", "Outliers"]

WINDOW = 12
"""Number of the latest values of each worker with which those of others are compared."""

LEAST = 5
"""Number of values that must be known of a worker before others are compared with it."""

FIRST = 8
"""Number of the first values, of all workers, whose median is the beginning."""

FACTOR = 2.0
"""Factor by which the values of healthy workers may differ, because their data do."""

LEAST_LOSS, LEAST_GRADIENT = 0.25, 0.1
"""Shares of the beginning below which all losses, and all norms of gradients, are equal."""

ROUNDING = 1e-6
"""Losses below this value are mostly roundings of float32 numbers."""

LEAST_TAIL = 0.25
"""Least scale of the tail of the logarithms: regular values do not make one that is slightly larger suspicious."""

RARE = 1e6
"""Product at which a worker is named: the mean number of pushes of a healthy worker between two false alarms."""

MOST = 5.0
"""The most that the logarithm of the product increases with one push."""

HUGE = 1e30  # stands for larger values, and for infinite ones


class Deviation(NamedTuple):
    """How a worker differs from all others.

    Attributes:
        words: what differs, as a clause about the worker.
        other: the only other worker that is known; None if there are several.
    """

    words: str
    other: int | None


@stateful(decides="_losses _gradients")
class Outliers:
    """The latest losses and norms of gradients of each worker."""

    def __init__(self) -> None:
        self._losses = Values(LEAST_LOSS, ROUNDING)
        self._gradients = Values(LEAST_GRADIENT, 0.0)

    def take(self, worker: int, seen: Observation) -> None:
        """Record a push with a finite gradient."""
        if seen.gradient is not None:
            self._gradients.take(worker, seen.gradient)
        if seen.loss is not None and not math.isnan(seen.loss):
            self._losses.take(worker, seen.loss)

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._losses.forget(worker)
        self._gradients.forget(worker)

    def difference(self, worker: int) -> Deviation | None:
        """Return how the pushes of a worker differ from those of all others; None if they do not."""
        for values, name in ((self._losses, "its losses"), (self._gradients, "the norms of its gradients")):
            if values.stands_out(worker):
                own, largest, other = values.compared(worker)
                whose = "the others" if other is None else f"worker {other}"
                return Deviation(f"{name} are usually {own:.3g}, and at most {largest:.3g} at {whose}", other)
        return None


@stateful(decides="_share _rounding _first _latest _evidence")
class Values:
    """The latest values of one kind of each worker, and how much they say against it.

    Args:
        share: share of the beginning below which all values are equal.
        rounding: the same as an absolute number.
    """

    def __init__(self, share: float, rounding: float) -> None:
        self._share = share
        self._rounding = rounding
        self._first: list[float] = []  # the first values of all workers
        self._latest: dict[int, Latest] = {}
        self._evidence: dict[int, float] = {}  # worker -> logarithm of the product, if it is larger than 0

    def take(self, worker: int, value: float) -> None:
        """Record a value of a worker, and compare it with the latest values of all others."""
        if len(self._first) < FIRST:
            self._first.append(value)
        begun = median(self._first)
        level = max(self._share * begun, self._rounding)
        if level > 0:
            own = math.log(min(max(value, level), HUGE))
            if len(self._first) == FIRST:
                added = self._compare(worker, own - math.log(FACTOR)) if value > level else -math.inf
                self._evidence[worker] = max(0.0, self._evidence.get(worker, 0.0) + added)
            self._latest.setdefault(worker, Latest()).take(value, own)

    def forget(self, worker: int) -> None:
        self._latest.pop(worker, None)
        self._evidence.pop(worker, None)
        # What speaks against a worker counts only as long as there is a worker with which it can be compared.
        known = self._known()
        self._evidence = {w: each for w, each in self._evidence.items() if any(other != w for other in known)}

    def stands_out(self, worker: int) -> bool:
        """Return True if the latest values of a worker are very unlikely among those of each other worker."""
        return self._evidence.get(worker, 0.0) >= math.log(RARE)

    def compared(self, worker: int) -> tuple[float, float, int | None]:
        """Return the usual value of a worker, the largest usual one of the others, and the other if it is alone."""
        others = [other for other in self._known() if other != worker]
        largest = max(self._latest[other].usual for other in others)
        return self._latest[worker].lately, largest, others[0] if len(others) == 1 else None

    def _known(self) -> list[int]:
        return [worker for worker, latest in self._latest.items() if latest.is_known]

    def _compare(self, worker: int, y: float) -> float:
        """Return the logarithm of 1 / (2 sqrt(p)) of a value. It is 0 if half of the others are not known yet."""
        smallest, known, others = MOST, 0, 0
        for other, latest in self._latest.items():
            if other == worker:
                continue
            others += 1
            if latest.is_known:
                known += 1
                smallest = min(smallest, -latest.log_p(y) / 2 - math.log(2))
                if smallest < 0:  # it resembles this worker, as nearly all values of nearly all workers do
                    return smallest
        return smallest if known and 2 * known >= others else 0.0


@stateful(decides="_values _logs _tail")
class Latest:
    """The latest values of one worker, and the tail of their logarithms."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._logs: deque[float] = deque(maxlen=WINDOW)
        self._tail = LEAST_TAIL

    def take(self, value: float, log: float) -> None:
        self._values.append(value)
        self._logs.append(log)
        largest = sorted(self._logs, reverse=True)
        count = max(2, len(largest) // 4)
        if len(largest) > count:
            self._tail = max(LEAST_TAIL, sum(largest[:count]) / count - largest[count])

    @property
    def is_known(self) -> bool:
        return len(self._values) >= LEAST

    @property
    def usual(self) -> float:
        return median(self._values)

    @property
    def lately(self) -> float:
        """The median of the last three values, since which something may have changed."""
        return median(list(self._values)[-3:])

    def log_p(self, y: float) -> float:
        """Return the logarithm of the p-value of y with respect to these values."""
        largest, count = max(self._logs), len(self._logs) + 1
        if y > largest:
            return -math.log(count) - (y - largest) / self._tail
        return math.log((1 + sum(log >= y for log in self._logs)) / count)
