"""Checks and creates the directory of a run, live or simulated."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ..core.metrics import Kind, Metric, MetricHistory, MetricPoint
from ..errors import ConfigurationError
from ..files import Unfinished, open_regular, read_regular

REPORT = "report.html"
"""Name of the file with the report of a run."""

BEFORE = "before"
"""The folder in a run directory with the files that the run had written before it was resumed."""


def require_usable(path: str | os.PathLike[str]) -> None:
    """Raise `ConfigurationError` if a run directory cannot be written or already contains a run.

    This function does not create the directory.
    """
    if not os.fspath(path):
        raise ConfigurationError(
            "the name of the run directory is empty; give a name, or omit this option to create a new directory."
        )
    run_dir = Path(path).absolute()
    if _has_ended(run_dir / "summary.json") or any(run_dir.glob("trace-*.jsonl")):
        raise ConfigurationError(f"the run directory {path} already contains a run; choose another.")
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the run directory {path} cannot be written; choose another one.")


def _has_ended(summary: Path) -> bool:
    """Return True if there is a summary, unless the run ended before training began."""
    try:
        ended: dict[str, object] = msgspec.json.decode(read_regular(summary), type=dict)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    measured = "duration_s" in ended or ended.get("traces") == "off"
    return ended.get("ended") not in ("failed", "interrupted") or measured


def set_aside(run_dir: Path, name: str, stays: Callable[[str], bool]) -> Path:
    """Move the files of a run into a new folder in its directory, because the run begins again in this directory.

    Args:
        run_dir: the directory of the run.
        name: name of the folder in `before`. If this folder exists already, a number is added to the name.
        stays: returns True if the file or the folder with this name is not moved.

    Returns:
        The folder.

    Raises:
        ConfigurationError: the directory cannot be written.
    """
    folder = run_dir / BEFORE / name
    for number in itertools.count(2):
        if not folder.exists():
            break
        folder = folder.with_name(f"{name}-{number}")
    try:
        folder.mkdir(parents=True)
        for path in sorted(run_dir.iterdir()):
            if path.name != BEFORE and not stays(path.name):
                path.rename(folder / path.name)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {run_dir} cannot be written: {error.strerror}. Free space there, or allow writing."
        ) from error
    return folder


def make_run_dir(path: str | os.PathLike[str] | None) -> Path:
    """Create and return the run directory: `path`, or a new directory in ./runs, named after the date and time."""
    try:
        if path is not None:
            run_dir = Path(path).absolute()
            run_dir.mkdir(parents=True, exist_ok=True)
            probe = run_dir / f".writable-{secrets.token_hex(4)}"
            probe.touch()
            probe.unlink()
            return run_dir
        Path("runs").mkdir(exist_ok=True)  # otherwise, a link to nowhere would count as a run in the loop
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for number in itertools.count(1):
            run_dir = Path("runs", stamp if number == 1 else f"{stamp}-{number}").absolute()
            with contextlib.suppress(FileExistsError):
                run_dir.mkdir()
                break
        return run_dir
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {path or 'runs'} cannot be written: {error.strerror}. Choose another one: in "
            "Python with run_dir, on the command line with --run-dir."
        ) from error


# -- The file `metrics.jsonl` in a run directory: what the scripts of the workers have logged ----------------
#
# Each line is one point of a metric: the fields of `MetricPoint`, with the name and the kind of the metric,
# and `"guessed": true` if Paceline has guessed its values. JSON has no NaN and no infinity, so these values are
# written as the strings "NaN", "Infinity" and "-Infinity". The file is replaced as a whole while the run goes
# on, so it is always complete.

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
    """Write the metrics of a run to its directory, in place of the metrics that were written before.

    Raises:
        OSError: the file cannot be written. An earlier file is unchanged.
    """
    unfinished = Unfinished(run_dir / METRICS_FILE)
    encode = msgspec.json.Encoder().encode
    try:
        with unfinished.place.open("wb") as file:
            for metric in metrics:
                file.writelines(encode(line) + b"\n" for line in _lines(metric))
        # The file is not needed after a crash of the system, so there is no wait for the disk.
        os.replace(unfinished.place, unfinished.path)
    except BaseException:
        unfinished.discard()
        raise


def read_metrics(run_dir: Path) -> MetricHistory:
    """Read the metrics of a run. The result is empty if the script has logged nothing.

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
