"""The state of a run as OpenMetrics, for Prometheus and other tools that collect metrics."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ..core.status import LinkStatus
from ..trace.activity_cells import KINDS
from ..trace.report import LinkTotal, RunReport, TimelineReport
from .dashboard import LiveReport
from .http import HttpResponse, Request

STALENESS_ENDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Upper bounds of the histogram buckets of staleness. Prometheus expects the same buckets all the time."""

WAIT_ENDS_S = tuple(0.001 * 2**power for power in range(16))
"""Upper bounds of the histogram buckets of waits, in seconds, as in `trace.activity_cells`."""

OF_STATUS = {
    "progress": ("paceline_progress_ratio", "Part of the training loop that is done."),
    "left_s": ("paceline_left_seconds", "Time that the training loop will take from now on."),
    "samples_per_s": ("paceline_samples_per_second", "Samples per second of all workers together."),
}
"""Attribute of `JobStatus` -> the name and the description of its metric. An unknown value is left out."""

Labelled = tuple[tuple[str, ...], float]
"""The values of the labels of a metric, and the value of the metric."""

Series = tuple[str, ...]
"""The name of a metric, and the values of its labels."""


class MetricsPage:
    """Answers the requests of programs that collect metrics.

    Args:
        live: the report of the run.
    """

    def __init__(self, live: LiveReport) -> None:
        self._live = live
        self._answered: RunReport | None = None
        self._answers: dict[str, HttpResponse] = {}  # format -> answer for the report `_answered`
        self._most: dict[Series, float] = {}  # counter -> its largest value so far

    async def reply(self, request: Request) -> HttpResponse:
        """Return the metrics, in the format that the request asks for."""
        if request.path not in ("/", "/metrics"):
            return HttpResponse.text(
                HTTPStatus.NOT_FOUND, "There is nothing here. The metrics are at /metrics."
            )
        report = await self._live.get()
        if report is not self._answered:
            self._answered, self._answers = report, {}
        answers = self._answers  # during the next wait, a newer report may get answers of its own
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        if kind not in answers:
            body = await asyncio.to_thread(encode, _Report(report, self._most))
            answers[kind] = HttpResponse(HTTPStatus.OK, body, {"Content-Type": kind})
        return answers[kind]


class _Report(Collector):
    """The metrics of a report.

    Prometheus takes a counter that falls for a new counter. A worker's times can fall, because a later record may say
    that a part of its computing was something else. So such a counter keeps its largest value.
    """

    def __init__(self, report: RunReport, most: dict[Series, float]) -> None:
        self._report = report
        self._most = most

    def collect(self) -> Iterator[Metric]:
        for family in families(self._report):
            if family.type == "counter":
                family.samples = [self._risen(sample) for sample in family.samples]
            yield family

    def _risen(self, sample: Sample) -> Sample:
        series = sample.name, *sample.labels.values()
        value = self._most[series] = max(sample.value, self._most.get(series, 0.0))
        return sample._replace(value=value)


def families(report: RunReport) -> Iterator[Metric]:
    """Yield the metrics of a run."""
    sync = report.live.sync if report.live else report.models[-1].sync if report.models else ""
    about = {"name": report.name, "version": report.version, "state": report.state, "sync": sync}
    yield InfoMetricFamily("paceline_run", "The run.", about)
    time_s, samples, updates = report.progress[-1] if report.progress else (0.0, 0, 0)
    elapsed_s = report.now_s if report.now_s is not None else time_s
    yield GaugeMetricFamily("paceline_run", "Time since the run began.", elapsed_s, unit="seconds")
    yield CounterMetricFamily("paceline_samples", "Samples that all workers have used.", samples)
    yield CounterMetricFamily("paceline_updates", "Updates of the weights.", updates)
    if report.live is not None:
        for field, (name, text) in OF_STATUS.items():
            if (value := getattr(report.live, field)) is not None:
                yield GaugeMetricFamily(name, text, value)
    last = ((metric.name, metric.points[-1].value) for metric in report.metrics if metric.points)
    yield _labelled(
        GaugeMetricFamily("paceline_logged", "Last value of what the script logs.", labels=["name"]),
        (((name,), value) for name, value in last),
    )
    yield from _of_workers(report)
    yield from _of_waiting(report)
    links: Sequence[LinkStatus | LinkTotal] = report.live.links if report.live else report.links
    yield _labelled(
        CounterMetricFamily(
            "paceline_link_bytes", "Bytes from one machine to another.", labels=["sender", "receiver"]
        ),
        (((link.sender, link.receiver), link.total_bytes) for link in links),
    )


def _of_workers(report: RunReport) -> Iterator[Metric]:
    """Yield what each worker has done, and the number of workers in each state."""
    workers = [(str(worker.worker), worker) for worker in report.workers]
    for of, text in (
        ("iterations", "Iterations of a worker."),
        ("samples", "Samples that a worker has used."),
    ):
        yield _labelled(
            CounterMetricFamily(f"paceline_worker_{of}", text, labels=["worker"]),
            (((name,), getattr(worker, of)) for name, worker in workers),
        )
    yield _labelled(
        CounterMetricFamily(
            "paceline_worker", "What a worker spends its time on.", labels=["worker", "use"], unit="seconds"
        ),
        (((name, use), spent_s) for name, worker in workers for use, spent_s in worker.time_s.items()),
    )
    yield _labelled(
        CounterMetricFamily(
            "paceline_awaited",
            "Time for which other workers have waited for a worker, in total.",
            labels=["worker"],
            unit="seconds",
        ),
        (((name,), worker.awaited_s) for name, worker in workers),
    )
    yield _labelled(
        GaugeMetricFamily(
            "paceline_waiting_for_seconds",
            "About how long a worker has waited for another worker.",
            labels=["worker", "awaited"],
        ),
        (((str(worker), str(awaited)), waited_s) for worker, awaited, waited_s in _pairs(report.timeline)),
    )
    states = Counter(worker.state for worker in report.live.workers) if report.live else Counter()
    yield _labelled(
        GaugeMetricFamily(
            "paceline_workers", "Workers in each state, while the run goes on.", labels=["state"]
        ),
        (((state,), count) for state, count in sorted(states.items())),
    )


def _pairs(timeline: TimelineReport | None) -> Iterator[tuple[int, int, float]]:
    """Yield (worker, awaited worker, seconds). Each bucket of the timeline names only one awaited worker."""
    if timeline is None:
        return
    for worker, shares, of in zip(timeline.workers, timeline.shares, timeline.awaited, strict=True):
        kinds = np.frombuffer(base64.b64decode(shares), np.uint8).reshape(timeline.buckets, len(KINDS))
        awaited = np.frombuffer(base64.b64decode(of), "<i2")
        known = awaited >= 0
        waited = np.bincount(awaited[known], weights=kinds[known, KINDS.index("waiting")])
        for other in np.flatnonzero(waited):
            yield worker, int(other), float(waited[other]) / 255.0 * timeline.width_s


def _of_waiting(report: RunReport) -> Iterator[Metric]:
    """Yield the staleness of the pushes and the lengths of the waits, under all models together."""
    staleness, waits = Counter[float](), Counter[float]()
    for model in report.models:
        staleness.update(dict(model.staleness))
        waits.update(dict(model.wait_lengths))
    waited_s = sum(reason.total_s for model in report.models for reason in model.waiting)
    yield HistogramMetricFamily(
        "paceline_staleness",
        "Staleness of the pushes.",
        _classes(staleness, STALENESS_ENDS),
        sum(updates * count for updates, count in staleness.items()),
        unit="updates",
    )
    yield HistogramMetricFamily(
        "paceline_wait", "Lengths of the waits.", _classes(waits, WAIT_ENDS_S), waited_s, unit="seconds"
    )


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[Labelled]) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _classes(counts: Counter[float], ends: Sequence[float]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram: the number of values up to each upper bound, and the number of all values.

    >>> _classes(Counter({0: 5, 3: 2, 99: 1}), [0, 4])
    [('0.0', 5), ('4.0', 7), ('+Inf', 8)]
    """
    below = [(str(float(end)), sum(count for value, count in counts.items() if value <= end)) for end in ends]
    return [*below, ("+Inf", sum(counts.values()))]
