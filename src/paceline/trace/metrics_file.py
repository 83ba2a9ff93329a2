"""The file `metrics.jsonl` in a run directory: what the scripts of the workers have logged.

Each line is one point of a metric: the fields of `MetricPoint`, with the name and the kind of the metric, and
`"guessed": true` if its values are guesses. JSON has no NaN and no infinity, so these values are written as the
strings "NaN", "Infinity" and "-Infinity". The file is replaced as a whole while the run goes on, so it is always
complete.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ..core.metrics.history import Kind, Metric, MetricHistory, MetricPoint
from ..files import Unfinished, open_regular

__all__ = ["METRICS_FILE", "read_metrics", "write_metrics"]

METRICS_FILE = "metrics.jsonl"

Special = Literal["NaN", "Infinity", "-Infinity"]


class _Line(msgspec.Struct, omit_defaults=True):
    name: str
    kind: Kind
    time_s: float
    samples: int
    updates: int
    value: float | Special
    weight: float = 1.0
    count: int = 1
    worker: int = -1
    guessed: bool = False


def write_metrics(run_dir: Path, metrics: Iterable[Metric]) -> None:
    """Write the metrics of a run to its directory, in place of those that were written before.

    Raises:
        OSError: the file cannot be written. An earlier file is unchanged.
    """
    unfinished = Unfinished(run_dir / METRICS_FILE)
    encode = msgspec.json.Encoder().encode
    try:
        with unfinished.place.open("wb") as file:
            for metric in metrics:
                file.writelines(encode(line) + b"\n" for line in _lines(metric))
        # Nobody relies on the file after a crash of the system, so nobody waits for the disk.
        os.replace(unfinished.place, unfinished.path)
    except BaseException:
        unfinished.discard()
        raise


def read_metrics(run_dir: Path) -> MetricHistory:
    """Read the metrics of a run. They are empty if its script has logged nothing.

    Raises:
        OSError: the file cannot be read.
        msgspec.DecodeError: the file is damaged.
    """
    path = run_dir / METRICS_FILE
    points: dict[str, list[_Line]] = {}
    if path.exists():
        decode = msgspec.json.Decoder(_Line).decode
        with open_regular(path) as file:
            for text in file:
                line = decode(text)
                points.setdefault(line.name, []).append(line)
    return MetricHistory(
        Metric(name, lines[0].kind, tuple(map(_point, lines)), lines[0].guessed)
        for name, lines in points.items()
    )


def _lines(metric: Metric) -> Iterator[_Line]:
    for point in metric.points:
        yield _Line(
            metric.name,
            metric.kind,
            point.time_s,
            point.samples,
            point.updates,
            point.value if math.isfinite(point.value) else _special(point.value),
            point.weight,
            point.count,
            point.worker,
            metric.guessed,
        )


def _point(line: _Line) -> MetricPoint:
    return MetricPoint(
        line.time_s, line.samples, line.updates, float(line.value), line.weight, line.count, line.worker
    )


def _special(value: float) -> Special:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
