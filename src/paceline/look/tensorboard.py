"""The files of a run for TensorBoard: what the script has logged, the speed, staleness and waiting.

The x axis ("step") is the job's progress: the number of samples that all workers together have used, or the number of
updates if the numbers of samples are unknown. Each histogram shows the values that were added since the previous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ..core.metrics import Metric
from ..trace.report import RunReport
from .dashboard import LiveReport

INTERVAL_S = 10.0

Progress = tuple[float, int, int]
"""A time in seconds, and the numbers of samples and of updates at this time."""


async def write_until(over: asyncio.Event, live: LiveReport, folder: Path) -> None:
    """Write what is new every 10 seconds, and once more when the last report is available."""
    files = await asyncio.to_thread(TensorboardFiles, folder)
    try:
        while not over.is_set():
            await asyncio.to_thread(files.write, await live.get())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), INTERVAL_S)
        await asyncio.to_thread(files.write, await live.get())
    finally:
        await asyncio.to_thread(files.close)


class TensorboardFiles:
    """Writes the files of one run.

    Args:
        folder: directory for the files.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))
        self._written_s: dict[str, float] = {}  # tag -> time of the last point that was written
        self._progress: Progress | None = None  # the last progress that was written
        self._staleness: Counter[float] = Counter()  # what the histograms have shown so far
        self._waiting: Counter[float] = Counter()

    def write(self, report: RunReport) -> None:
        """Write what is new in a report."""
        begun_s = _begun_s(report)
        is_over = report.state != "running"
        for metric in report.metrics:
            self._write_metric(metric, begun_s, is_over=is_over)
        if not report.progress:
            return
        now_s, samples, updates = report.progress[-1]
        step = samples or updates
        self._write_speed(report.progress, step, begun_s)
        staleness = Counter[float]()
        waiting = Counter[float]()
        for model in report.models:
            staleness.update({float(updates): count for updates, count in model.staleness})
            waiting.update(dict(model.wait_lengths))
        self._write_histogram(
            "staleness (updates)", _bars(staleness - self._staleness), step, begun_s + now_s
        )
        self._write_histogram(
            "waiting (seconds)", sorted((waiting - self._waiting).items()), step, begun_s + now_s
        )
        self._staleness, self._waiting = staleness, waiting
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def _write_metric(self, metric: Metric, begun_s: float, *, is_over: bool) -> None:
        """Write the points that are new. The last mean may still change, so it is written later."""
        is_final = is_over or metric.kind == "point"
        for point in metric.points if is_final else metric.points[:-1]:
            tag = metric.name if point.worker <= 0 else f"{metric.name}/worker {point.worker}"
            if point.time_s > self._written_s.get(tag, float("-inf")):
                self._written_s[tag] = point.time_s
                self._writer.add_scalar(
                    tag, point.value, point.samples or point.updates, walltime=begun_s + point.time_s
                )

    def _write_speed(self, points: Sequence[Progress], step: int, begun_s: float) -> None:
        """Write the samples and the updates per second since the last call."""
        # A resumed run does not begin with 0 updates.
        before, progress = self._progress or points[0], points[-1]
        time_s = progress[0] - before[0]
        if time_s <= 0.0:
            return
        for place, unit in ((1, "samples"), (2, "updates")):
            if progress[place]:
                rate = (progress[place] - before[place]) / time_s
                self._writer.add_scalar(f"{unit} per second", rate, step, walltime=begun_s + progress[0])
        self._progress = progress

    def _write_histogram(
        self, tag: str, bars: Iterable[tuple[float, int]], step: int, walltime_s: float
    ) -> None:
        """Write a histogram.

        Args:
            tag: the name of the histogram.
            bars: (upper end of a bar, number of values in it), ascending. The first bar begins at zero.
            step: position on the x axis.
            walltime_s: the time.
        """
        limits, counts = zip(*bars, strict=True) if (bars := list(bars)) else ((), ())
        if not sum(counts):
            return
        middles = [(low + high) / 2 for low, high in zip((0.0, *limits), limits, strict=False)]
        self._writer.add_histogram_raw(
            tag,
            min=0.0,
            max=limits[-1],
            num=sum(counts),
            sum=sum(middle * count for middle, count in zip(middles, counts, strict=True)),
            sum_squares=sum(middle**2 * count for middle, count in zip(middles, counts, strict=True)),
            bucket_limits=list(limits),
            bucket_counts=list(counts),
            global_step=step,
            walltime=walltime_s,
        )


def _bars(counts: Mapping[float, int]) -> list[tuple[float, int]]:
    """Return a histogram of whole numbers, with a bar of width 1 around each of them.

    >>> _bars({0.0: 5, 3.0: 2})
    [(0.5, 5), (2.5, 0), (3.5, 2)]
    """
    bars: list[tuple[float, int]] = []
    for value, count in sorted(counts.items()):
        if (bars and bars[-1][0] < value - 0.5) or (not bars and value > 0.5):
            bars.append((value - 0.5, 0))
        bars.append((value + 0.5, count))
    return bars


def _begun_s(report: RunReport) -> float:
    """Return the time at which the run began, in seconds since 1970."""
    if report.begun_at:
        return datetime.fromisoformat(report.begun_at).timestamp()
    return time.time() - (report.progress[-1][0] if report.progress else 0.0)
