"""How far a job has come, how fast it goes on, and for whom it waits, without I/O.

The *progress* is the part of the training loop in progress that is done. It is known if the loop has a limit
(`paceline.epochs`): the part of the limit that has been used, of the limit that is nearest to its end if there are
several. The workers do not reach an epoch at the same time, so an epoch counts as the mean of what they report. A
loop over `range` tells nobody how long it is; then only the part of the epoch in progress is known.

The time left is extrapolated from the second half of the time since the loop began: an early part of it says little,
because the first iterations are slow, and a short one also, because a script evaluates its model now and then.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from ...sync.ticks import TICKS_PER_S
from ..coordinator import Coordinator
from ..protocol.messages import LoopLimits
from .awaited import Awaited, Looks

__all__ = ["JobProgress", "ProgressMeter", "Rate"]

POINTS = 32  # number of earlier values, within the span, from which a rate is computed
SPEED_SPAN_S = 10.0  # time over which the speed of the job is averaged
LOSS_SPAN_S = 2.0  # time constant of the moving mean of the loss
LEAST_S = 1.0  # time after which a rate is known


class JobProgress(msgspec.Struct, frozen=True):
    """How far a job has come, and how fast it goes on. A value is None if it is not known.

    Attributes:
        progress: the part of the training loop in progress that is done, from 0 to 1.
        left_s: the time in seconds that the loop will take from now on.
        samples_per_s: number of samples per second that all workers together use.
        loss: the mean of the losses that the workers have reported last, a moving mean over some seconds.
        epoch: number of the epoch in progress, counted from 1.
        epochs: number of epochs of the loop.
        epoch_progress: the part of the epoch in progress that is done, from 0 to 1.
    """

    progress: float | None = None
    left_s: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    epoch_progress: float | None = None


class Rate:
    """Measures how fast a number grows.

    Example:
        >>> rate = Rate(ticks_per_s=1)
        >>> for second, value in enumerate((0, 10, 20, 60)):
        ...     rate.note(value, second, span_ticks=2)
        >>> rate.per_s(60, now_ticks=3)
        25.0
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._points: deque[tuple[int, float]] = deque()

    def note(self, value: float, now_ticks: int, span_ticks: int) -> None:
        """Record the number. The rate is averaged over about `span_ticks` before the last call."""
        points = self._points
        if points and now_ticks - points[-1][0] < span_ticks / POINTS:
            return
        points.append((now_ticks, value))
        while len(points) > 1 and points[1][0] <= now_ticks - span_ticks:
            points.popleft()

    def per_s(self, value: float, now_ticks: int) -> float | None:
        """Return the rate per second if the number is `value` now; None if it is not known yet."""
        if not self._points:
            return None
        ticks, before = self._points[0]
        elapsed_s = (now_ticks - ticks) / self._ticks_per_s
        return (value - before) / elapsed_s if elapsed_s >= LEAST_S else None


class ProgressMeter:
    """Follows the progress of one job.

    Args:
        ticks_per_s: number of ticks per second.
    """

    def __init__(self, ticks_per_s: int = TICKS_PER_S) -> None:
        self._ticks_per_s = ticks_per_s
        self._loop = -1  # the training loop to which `_done` refers
        self._done = Rate(ticks_per_s)
        self._samples = Rate(ticks_per_s)
        self._loss: float | None = None
        self._noted_ticks = 0
        self._looks = Looks(ticks_per_s)

    def note(self, core: Coordinator, now_ticks: int) -> None:
        """Record what the workers have reported by now. Call this several times per second."""
        if core.loops.loop != self._loop:
            self._loop, self._done = core.loops.loop, Rate(self._ticks_per_s)
        progress = _progress(core, now_ticks, self._ticks_per_s).progress
        if progress is not None:
            since_ticks = now_ticks - core.loops.begun_ticks
            self._done.note(progress, now_ticks, max(since_ticks // 2, 1))
        if (samples := _samples(core)) > 0:
            self._samples.note(samples, now_ticks, round(SPEED_SPAN_S * self._ticks_per_s))
        self._note_loss(core, (now_ticks - self._noted_ticks) / self._ticks_per_s)
        self._noted_ticks = now_ticks

    def look(self, core: Coordinator, now_ticks: int) -> None:
        """Record who waits for whom. Call this when all servers have answered a `FetchWaits`."""
        self._looks.look(core, now_ticks)

    def awaited(self, now_ticks: int) -> Awaited:
        """Return the workers for which others have waited most often in the last seconds."""
        return self._looks.awaited(now_ticks)

    def read(self, core: Coordinator, now_ticks: int) -> JobProgress:
        """Return the progress of the job."""
        found = _progress(core, now_ticks, self._ticks_per_s)
        samples = _samples(core)
        speed = self._samples.per_s(samples, now_ticks) if samples else None
        left_s = self._left_s(core, found.progress, now_ticks)
        return msgspec.structs.replace(found, left_s=left_s, samples_per_s=speed, loss=self._loss)

    def _note_loss(self, core: Coordinator, elapsed_s: float) -> None:
        losses = [status.loss for worker, status in core.board.items() if worker in core.members.live]
        known = [loss for loss in losses if loss is not None]
        if not known:
            return
        mean, before = sum(known) / len(known), self._loss
        if before is None or not math.isfinite(before) or not math.isfinite(mean):
            self._loss = mean
        else:
            self._loss = before + (mean - before) * -math.expm1(-elapsed_s / LOSS_SPAN_S)

    def _left_s(self, core: Coordinator, progress: float | None, now_ticks: int) -> float | None:
        """Return how long the loop will go on; None if this is unknown."""
        if progress is None:
            return None
        found = []
        if progress >= 1.0:
            found.append(0.0)
        elif (speed := self._done.per_s(progress, now_ticks)) is not None and speed > 0:
            found.append((1.0 - progress) / speed)
        limits = core.loops.limits
        if limits is not None and limits.time_s is not None:
            since_s = (now_ticks - core.loops.begun_ticks) / self._ticks_per_s
            found.append(max(limits.time_s - since_s, 0.0))
        return min(found, default=None)


def _progress(core: Coordinator, now_ticks: int, ticks_per_s: int) -> JobProgress:
    """Return what is known of the progress at one moment: neither times nor speeds nor the loss."""
    loops, limits = core.loops, core.loops.limits or LoopLimits()
    updates = max((status.updates for status in core.board.values()), default=0)
    since_s = (now_ticks - loops.begun_ticks) / ticks_per_s
    passed, by_data = _epochs(core, limits.epochs)
    epoch = epoch_progress = None
    if passed is not None:
        before = int(passed) if limits.epochs is None else min(int(passed), limits.epochs - 1)
        epoch, epoch_progress = before + 1, min(passed - before, 1.0) if by_data else None
    used = (
        (passed, limits.epochs),
        (since_s if loops.loop >= 0 else None, limits.time_s),
        (updates - loops.start[0], limits.updates),
        (_samples(core) - loops.start[1], limits.samples),
    )
    parts = [done / limit for done, limit in used if done is not None and limit is not None]
    progress = min(max(*parts, 0.0), 1.0) if parts else None
    return JobProgress(progress, epoch=epoch, epochs=limits.epochs, epoch_progress=epoch_progress)


def _epochs(core: Coordinator, limit: int | None) -> tuple[float | None, bool]:
    """Return how many epochs are done, None if unknown, and True if the data of the present one is counted.

    That is the mean over the workers that take part or have finished. A worker that has finished has done them all.
    """
    done, by_data = [], False
    for worker, status in core.board.items():
        fate = core.members.fate(worker)
        if status.epoch is None or fate not in ("", "finished"):
            continue
        by_data = by_data or status.part is not None
        reached = status.epoch + (status.part or 0.0)
        done.append(float(limit) if fate == "finished" and limit is not None else reached)
    return sum(done) / len(done) if done else None, by_data


def _samples(core: Coordinator) -> int:
    """Return the number of samples that all workers together have used, as far as a worker knows; 0 if unknown."""
    return max((status.samples for status in core.board.values()), default=0)
