"""Batch sizes in proportion to speed: how the samples of a joint batch are divided among unequal workers.

The time that a worker takes for a batch of n samples is modeled as a + b n, with a fixed part a and a part that is
proportional to n. The sizes are chosen so that all workers need the same time. The sizes change only if the change is
expected to shorten the time of the slowest worker by more than the uncertainty of the estimates.

An accelerator compiles or tunes its programs again for each new size of a batch. So the sizes of a worker on an
accelerator are multiples of an increment (see `step_of`), and the other workers take the rest of the joint batch.

`LeaseSizes` decides how many batches a worker receives at a time, and of which sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from math import sqrt
from statistics import median
from typing import NamedTuple

from ..state import stateful
from .job_cut import WorkerTimes
from .lease import DataOrder, divide_evenly

WINDOW = 48  # number of observations of a worker that are kept
RECENT = 4  # number of observations that show a change of speed if all of them differ from the earlier observations
LEAST_SEEN = 3  # number of observations of every worker that are needed for a first change of the sizes
# relative change of a worker's time, beyond its usual variation, that counts as a change of speed
LEAST_CHANGE = 0.1
# minimum relative gain, beyond the uncertainty of the estimates, for which the sizes are changed
LEAST_GAIN = 0.05
CERTAINTY = 3.0  # number of standard errors by which a gain must exceed `LEAST_GAIN`
LEAST_PART = 0.01  # lower limit for the estimated fraction of the time that is proportional to the size
PRIOR_WEIGHT = 0.05  # weight of the earlier estimate of the fixed part
SIZES = 4  # number of sizes whose times are kept to estimate the fixed part
# Minimum number of increments in the batch of a worker with an equal share. So a size differs from the best size by at
# most 1/16 of this batch, which is little more than `LEAST_GAIN`, and only few sizes occur.
STEPS = 8
BISECTIONS = 64  # enough to find a time between 1e-30 s and 1e30 s as exactly as a float can represent it


class BatchTime(NamedTuple):
    """An estimate of the time that a worker takes for a batch of n samples: `fixed_s + sample_s * n`.

    Attributes:
        fixed_s: the part of the time that does not depend on the size of the batch, in seconds.
        sample_s: the additional time for each sample, in seconds; positive.
        error: relative standard error of the estimate at the present size.
    """

    fixed_s: float
    sample_s: float
    error: float = 0.0

    @staticmethod
    def fitted(observed: Iterable[tuple[int, float]]) -> BatchTime:
        """Return an estimate from the sizes of some batches and the times in seconds that a worker took for them."""
        observations = _Observations()
        for samples, seconds in observed:
            observations.add(samples, seconds)
        return observations.estimate()

    def of(self, samples: int) -> float:
        """Return the estimated time for a batch, in seconds."""
        return self.fixed_s + self.sample_s * samples


def divide_in_proportion(
    total: int, times: Sequence[BatchTime], *, least: int = 1, most: int | None = None
) -> list[int]:
    """Divide a number of samples so that the longest time of any worker is as short as possible.

    Args:
        total: number of samples, at least `least * len(times)` and at most `most * len(times)`.
        times: the workers' estimated times.
        least: minimum size of each part.
        most: maximum size of each part; None for no maximum.
    """
    largest = total if most is None else most

    def sizes_within(limit_s: float) -> list[int]:
        return [
            int(min(max((limit_s - fixed_s) / sample_s, least), largest)) for fixed_s, sample_s, _ in times
        ]

    # Invariant: the largest parts that fit into `low_s` seconds have at most `total` samples together, and the largest
    # parts that fit into `high_s` seconds have at least `total` samples. The geometric mean keeps the relative error
    # small, even if speeds differ by many orders of magnitude.
    low_s, high_s = min(time.of(least) for time in times), max(time.of(largest) for time in times)
    fewer, more = len(times) * least, total * len(times)
    for _ in range(BISECTIONS):
        if more - fewer <= 1:
            break  # any time between `low_s` and `high_s` gives the same sizes as one of these two times
        middle_s = sqrt(low_s * high_s)
        if (fitting := sum(sizes_within(middle_s))) < total:
            low_s, fewer = middle_s, fitting
        else:
            high_s, more = middle_s, fitting
    sizes = sizes_within(low_s)
    # Distribute the remaining samples one at a time, each to the part that takes the least time with one more sample.
    growing = [(times[part].of(size + 1), part) for part, size in enumerate(sizes) if size < largest]
    heapify(growing)
    for _ in range(total - sum(sizes)):
        part = growing[0][1]
        sizes[part] += 1
        if sizes[part] < largest:
            heapreplace(growing, (times[part].of(sizes[part] + 1), part))
        else:
            heappop(growing)
    return sizes


def step_of(batch: int) -> int:
    """Return the increment between the batch sizes that a worker on an accelerator may have.

    The increment divides the batch, so that equal shares are multiples of the increment. It is the largest divisor that
    fits into the batch at least `STEPS` times; 1 if there is no such divisor.

    Args:
        batch: size of a batch if all workers have equal shares.

    Example:
        >>> [step_of(batch) for batch in (8, 32, 64, 100, 250, 17)]
        [1, 4, 8, 10, 25, 1]
    """
    return next(step for step in range(max(batch // STEPS, 1), 0, -1) if batch % step == 0)


def in_steps(
    sizes: Sequence[int], steps: Sequence[int], *, least: int = 1, most: int | None = None
) -> list[int]:
    """Change sizes as little as possible so that each is a multiple of its increment. Their sum stays the same.

    Parts with increment 1 make up for the rounding of the other parts, in proportion to their sizes. If there are no
    such parts, or if `least` and `most` do not allow this, one of the other parts makes up for the rounding, and is
    then no multiple of its increment. A size that is smaller than its increment becomes a power of two instead, because
    a whole increment would be many times too large for a very slow worker. If `least` and `most` do not allow this
    either, the sizes are returned unchanged.

    Args:
        sizes: the sizes, each between `least` and `most`.
        steps: the increment of each size; 1 if any size is allowed.
        least: minimum size of each part.
        most: maximum size of each part; None for no maximum.

    Example:
        >>> in_steps([43, 13, 8], [8, 1, 1])
        [40, 15, 9]
    """
    largest = sum(sizes) if most is None else most
    rounded = list(sizes)
    rest = 0  # number of samples that the parts so far have lost by rounding
    # The parts with the largest increments come first, so that the other parts can make up for the rounding of these
    # parts.
    for part in sorted(
        (part for part, step in enumerate(steps) if step > 1), key=lambda part: (-steps[part], -sizes[part])
    ):
        size = wanted = sizes[part]
        step = steps[part]
        if size >= step:
            wanted += rest
        else:
            step = 1 << (size.bit_length() - 1)
        lowest, highest = -(-least // step) * step, largest // step * step
        if lowest <= highest:
            nearest = (2 * wanted + step - 1) // (2 * step) * step
            rounded[part] = min(max(nearest, lowest), highest)
            rest += size - rounded[part]
    if rest == 0:
        return rounded
    # sorted by size, so that the result does not depend on the order of the workers
    takers = sorted((part for part, step in enumerate(steps) if step == 1), key=lambda part: -sizes[part])
    share = sum(sizes[part] for part in takers) + rest
    if takers and least * len(takers) <= share <= largest * len(takers):
        alike = [BatchTime(0.0, 1.0 / sizes[part]) for part in takers]
        for part, size in zip(
            takers, divide_in_proportion(share, alike, least=least, most=largest), strict=True
        ):
            rounded[part] = size
        return rounded
    for part in sorted(range(len(sizes)), key=lambda part: (-rounded[part], -sizes[part], steps[part])):
        if least <= rounded[part] + rest <= largest:
            rounded[part] += rest
            return rounded
    return list(sizes)


@stateful(history="changes")
class BatchSizes:
    """The batch sizes of the workers that share joint batches.

    Args:
        times: the times that the workers took for their batches in an earlier run.

    Attributes:
        changes: number of times that the sizes were changed although the workers were the same.
        steps: worker -> the increment between the batch sizes that the worker may have. A worker without an entry may
            have any size, as with increment 1.
    """

    def __init__(self, times: Iterable[WorkerTimes] = ()) -> None:
        self.changes = 0
        self.steps: dict[int, int] = {}
        self._observed = {each.worker: _Observations(each.fixed_samples, each.latest) for each in times}
        self._sizes: dict[int, int] = {}
        self._limits: tuple[int, int, int | None, list[int]] = (0, 0, None, [])
        self._fresh = 0  # number of observations since the sizes were last considered

    @property
    def round_s(self) -> float | None:
        """Estimated time for a joint batch with the present sizes, in seconds; None if it is unknown."""
        times = self._times(self._sizes)
        if not times:
            return None
        return max(time.of(size) for time, size in zip(times, self._sizes.values(), strict=True))

    def observe(self, worker: int, samples: int, seconds: float) -> None:
        """Record the time that a worker took for a batch."""
        self._observed.setdefault(worker, _Observations()).add(samples, seconds)
        self._fresh += 1

    def cut(self) -> tuple[WorkerTimes, ...]:
        """Return the observations that another run needs in order to begin with the present sizes."""
        return tuple(WorkerTimes(worker, *known.cut()) for worker, known in sorted(self._observed.items()))

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._observed.pop(worker, None)
        self.steps.pop(worker, None)

    def of(
        self, workers: Collection[int], total: int, *, least: int = 1, most: int | None = None
    ) -> Mapping[int, int]:
        """Return the size of each worker's part of a joint batch.

        The sizes are equal until the times of all workers are known, and change only if a change is worthwhile.

        Args:
            workers: the workers that share the joint batch, in order.
            total: number of samples in the joint batch.
            least: minimum size of each part.
            most: maximum size of each part; None for no maximum.
        """
        limits = total, least, most, self._steps_of(workers)
        same = list(workers) == list(self._sizes) and limits == self._limits
        if same and self._fresh < RECENT * len(workers):
            return self._sizes
        self._fresh = 0
        self._limits = limits
        times = self._times(workers)
        best = self.divide(workers, total, least=least, most=most)
        if not same:
            self._sizes = best
        elif times and best != self._sizes and self._pays(times, best):
            self._sizes = best
            self.changes += 1
        return self._sizes

    def divide(
        self, workers: Collection[int], total: int, *, least: int = 1, most: int | None = None
    ) -> dict[int, int]:
        """Divide a joint batch according to the present estimates; evenly if some workers' times are unknown."""
        times = self._times(workers)
        sizes = (
            divide_in_proportion(total, times, least=least, most=most)
            if times
            else divide_evenly(total, len(workers))
        )
        stepped = in_steps(sizes, self._steps_of(workers), least=least, most=most)
        return dict(zip(workers, stepped, strict=True))

    def _steps_of(self, workers: Collection[int]) -> list[int]:
        return [self.steps.get(worker, 1) for worker in workers]

    def _pays(self, times: Sequence[BatchTime], best: Mapping[int, int]) -> bool:
        """Return True if the best sizes shorten the longest time by more than its uncertainty."""
        now_s, error = max(
            (time.of(size), time.error) for time, size in zip(times, self._sizes.values(), strict=True)
        )
        then_s = max(time.of(size) for time, size in zip(times, best.values(), strict=True))
        return now_s > then_s * (1.0 + LEAST_GAIN + CERTAINTY * error)

    def _times(self, workers: Collection[int]) -> list[BatchTime]:
        """Return the estimated time of each worker; [] if too little is known about some workers."""
        observed = filter(None, map(self._observed.get, workers))
        known = [each for each in observed if each.count >= LEAST_SEEN]
        return [each.estimate() for each in known] if len(known) == len(workers) else []


@stateful()
class _Observations:
    """The times that one worker has taken for its batches.

    The time for a batch has a fixed part and a part that is proportional to the size. The ratio of these two parts is
    estimated from the times of batches of different sizes. The ratio is expressed as the number of samples whose
    proportional part equals the fixed part.

    Args:
        fixed_samples: the ratio that is assumed until it can be estimated, expressed as this number of samples.
        latest: (samples, seconds) of batches that were observed before.
    """

    def __init__(self, fixed_samples: float = 0.0, latest: Iterable[tuple[int, float]] = ()) -> None:
        self._latest: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # (samples, seconds)
        # Size -> its latest times, since the last change of speed. The sizes are in the order of their last use.
        self._by_size: dict[int, deque[float]] = {}
        # the fixed part, as estimated from the times before the last change of speed
        self._fixed_samples = fixed_samples
        self._estimate: BatchTime | None = None
        for samples, seconds in latest:
            self.add(samples, seconds)

    @property
    def count(self) -> int:
        return len(self._latest)

    def cut(self) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Return the fixed part as a number of samples, and the latest observations."""
        return self._fit(), tuple(self._latest)

    def add(self, samples: int, seconds: float) -> None:
        self._latest.append((samples, max(seconds, 1e-9)))
        self._estimate = None
        if self._speed_has_changed():
            self._fixed_samples = self._fit()
            recent = list(self._latest)[-RECENT:]
            self._latest.clear()
            self._by_size.clear()
            for earlier in recent:
                self._keep(*earlier)
            self._latest.extend(recent)
        else:
            self._keep(*self._latest[-1])

    def estimate(self) -> BatchTime:
        if self._estimate is None:
            size = self._latest[-1][0]
            fixed = self._fit()
            # the times that the latest batches would have taken at the present size
            times_s = [seconds * ((fixed + size) / (fixed + samples)) for samples, seconds in self._latest]
            usual_s = median(times_s)
            sample_s = usual_s / (fixed + size)
            error = 1.25 * _relative_spread(times_s, usual_s) / len(times_s) ** 0.5
            self._estimate = BatchTime(fixed * sample_s, sample_s, error)
        return self._estimate

    def _keep(self, samples: int, seconds: float) -> None:
        times_s = self._by_size.pop(samples, None) or deque(maxlen=WINDOW)
        times_s.append(seconds)
        self._by_size[samples] = times_s
        if len(self._by_size) > SIZES:
            del self._by_size[next(iter(self._by_size))]

    def _speed_has_changed(self) -> bool:
        """Return True if the latest times all lie outside the usual variation of earlier times for the same size."""
        size = self._latest[-1][0]
        recent = list(self._latest)[-RECENT:]
        earlier_s = [seconds for samples, seconds in list(self._latest)[:-RECENT] if samples == size]
        if len(earlier_s) < RECENT or any(samples != size for samples, _ in recent):
            return False
        usual_s = median(earlier_s)
        limit = 1.0 + LEAST_CHANGE + 1.5 * _relative_spread(earlier_s, usual_s)
        slower = all(seconds > usual_s * limit for _, seconds in recent)
        return slower or all(seconds * limit < usual_s for _, seconds in recent)

    def _fit(self) -> float:
        """Estimate the fixed part of the time, as a number of samples.

        The estimate is a weighted least-squares fit of a + b n to the median times of the observed sizes n. The
        larger the range of the sizes is, the less the earlier estimate counts.
        """
        points = [(size, median(times_s), len(times_s)) for size, times_s in self._by_size.items()]
        if len(points) < 2:
            return self._fixed_samples
        # Errors are proportional to the times, so the squared errors are weighted by 1 / time^2.
        weights = [count / time_s**2 for _, time_s, count in points]
        mean_size, mean_s = _weighted_mean(points, weights)
        square = sum(w * (size - mean_size) ** 2 for w, (size, _, _) in zip(weights, points, strict=True))
        product = sum(
            w * (size - mean_size) * (time_s - mean_s)
            for w, (size, time_s, _) in zip(weights, points, strict=True)
        )
        slope = product / square
        # for a batch of the mean size: the part of the time that is proportional to the size
        fitted = slope * mean_size / mean_s
        earlier = mean_size / (self._fixed_samples + mean_size)
        weight = square / mean_size**2 * mean_s**2
        part = (PRIOR_WEIGHT * earlier + weight * fitted) / (PRIOR_WEIGHT + weight)
        return mean_size * (1.0 / min(max(part, LEAST_PART), 1.0) - 1.0)


def _weighted_mean(
    points: Sequence[tuple[float, float, int]], weights: Sequence[float]
) -> tuple[float, float]:
    """Return the weighted means of the first and of the second coordinates."""
    total = sum(weights)
    return (
        sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total,
        sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total,
    )


def _relative_spread(values: Sequence[float], center: float) -> float:
    """Return a robust estimate of the standard deviation, divided by the center."""
    # For a normal distribution, the standard deviation is 1.4826 times the median absolute deviation.
    return 1.4826 * median(abs(value - center) for value in values) / center


# -- The sizes of leases: the number of batches in a worker's next lease, and the sizes of these batches -----
#
# The number of batches follows the worker's speed and shrinks toward the end of the epoch (*weighted
# factoring*), so that all workers end the epoch at about the same time. If the order is balanced, the sizes
# of the batches follow the workers' speeds as well (see `BatchSizes`).

LEASE_S = 0.25  # maximum time for which a lease of several batches lasts
MOST_ROUNDS = 4  # maximum number of rounds of a balanced, static split that are dealt at a time
MOST_BATCHES = 16  # maximum number of batches in a lease
PART = 0.5  # maximum fraction of the epoch's remaining time for which a lease of several batches lasts
PACE_WEIGHT = 0.25  # weight of the latest observation in a worker's mean time per batch


@stateful()
class LeaseSizes:
    """The sizes of the leases of all workers of one loader.

    Args:
        times: the times that the workers took for their batches in an earlier run.

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
        """Ignore the time until the worker's next request, for example because the worker is between two epochs."""
        if worker in self._paces:
            self._paces[worker].batches = 0

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self.balanced.forget(worker)
        if (pace := self._paces.pop(worker, None)) is not None:
            self._rate -= pace.rate

    def smallest(self, order: DataOrder, largest: int) -> int:
        """Return the size of the smallest batch that is handed out, if full batches have size `largest`."""
        if order.balanced or order.joint:
            return min(self.least, largest)
        return largest if order.drop_last else 1

    def joint(self, order: DataOrder, workers: int) -> int:
        """Return the size of a joint batch of an order whose `batch` is the size of a joint batch.

        This is the size of the loader's batch, or the sum of the maximum sizes of the workers' batches if this sum is
        smaller.
        """
        return min(order.batch, (order.most or order.batch) * workers)

    def parts(
        self, order: DataOrder, members: Sequence[int], total: int, *, steady: bool
    ) -> Mapping[int, int]:
        """Divide a joint batch of `total` positions among workers.

        Each part has at least `least` positions. If there are too few positions for this, the last workers receive
        none; if there are fewer than `least` positions, the first worker receives all of them. If the workers that
        receive a part would then have to exceed the maximum size, they exceed it as little as possible.

        Args:
            order: the order.
            members: the workers, in order of their indices.
            total: number of positions, at most `joint`.
            steady: True to keep the sizes of earlier joint batches, unless it is worthwhile to change them.
        """
        served = members[: max(total // self.least, 1)]
        least, most = min(self.least, total), order.most
        if most is not None:  # one part must have this size if all parts are as equal as possible
            most = max(most, *divide_evenly(total, len(served)))
        if order.balanced:
            divide = self.balanced.of if steady else self.balanced.divide
            sizes = divide(served, total, least=least, most=most)
        else:
            sizes = dict(zip(served, divide_evenly(total, len(served)), strict=True))
        return {**dict.fromkeys(members, 0), **sizes}

    def rounds(self) -> int:
        """Return the number of rounds (joint batches) that a balanced, static split deals at a time."""
        round_s = self.balanced.round_s
        return max(1, min(MOST_ROUNDS, int(LEASE_S / round_s))) if round_s else 1

    def batches(self, worker: int, now_s: float, left: float | None) -> int:
        """Return the maximum number of batches for the next lease of a worker that has used up its previous lease.

        Args:
            worker: index of the worker.
            now_s: current time in seconds.
            left: number of full batches that remain in the epoch; None if it is unknown.
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


@stateful()
class _Pace:
    """The mean time that a worker takes for a batch."""

    __slots__ = ("asked_s", "batch_s", "batches")

    def __init__(self) -> None:
        self.asked_s = 0.0
        self.batches = 0  # number of batches in the worker's present lease; 0 if it has none
        self.batch_s: float | None = None

    @property
    def rate(self) -> float:
        return 1.0 / self.batch_s if self.batch_s else 0.0

    def ask(self, now_s: float) -> None:
        """Record that the worker has used up its lease."""
        if self.batches:
            batch_s = max(now_s - self.asked_s, 1e-9) / self.batches
            usual_s = self.batch_s if self.batch_s is not None else batch_s
            self.batch_s = usual_s + (batch_s - usual_s) * PACE_WEIGHT
        self.asked_s, self.batches = now_s, 0
