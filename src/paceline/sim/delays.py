"""Delays that were measured on a cluster, from a CSV file: the seconds of each worker's computations."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigurationError
from .times import Recorded, Timed

__all__ = ["read_delays"]

COLUMNS = (["worker", "seconds"], ["worker", "time", "seconds"])


def read_delays(path: str | os.PathLike[str]) -> list[Recorded] | list[Timed]:
    """Return the distribution of each worker's compute times from a CSV file.

    The first line names the columns. With `worker,seconds`, each worker's seconds are used in their order, and repeat
    after the last one. With `worker,time,seconds`, an iteration takes the seconds of the last measurement of this
    worker before its beginning; the times are in seconds, and the measurements repeat, too. Workers are numbered from
    0, without gaps.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not valid; the message names the line.

    Example:
        >>> path = getfixture("tmp_path") / "delays.csv"
        >>> _ = path.write_text("worker,seconds\\n0,1.0\\n1,3.0\\n0,1.5\\n")
        >>> [times.seconds for times in read_delays(path)]
        [(1.0, 1.5), (3.0,)]
    """
    shown = os.fspath(path)
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            columns = [name.strip().lower() for name in next(lines, [])]
            if columns not in COLUMNS:
                raise ConfigurationError(
                    f"the first line of {shown} is {','.join(columns)!r}, expected the columns worker,seconds or "
                    "worker,time,seconds."
                )
            rows = list(_rows(shown, lines, len(columns)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"the file of delays {shown} cannot be read: {reason}.") from error
    by_worker: dict[int, list[list[float]]] = defaultdict(list)
    for worker, *numbers in rows:
        by_worker[int(worker)].append(numbers)
    if sorted(by_worker) != list(range(len(by_worker))) or not by_worker:
        raise ConfigurationError(
            f"{shown} has the workers {', '.join(map(str, sorted(by_worker))) or 'none'}, expected 0, 1, 2, ... "
            "without gaps."
        )
    measured = [by_worker[worker] for worker in range(len(by_worker))]
    try:
        if len(columns) == 2:
            return [Recorded(seconds=tuple(seconds for [seconds] in each)) for each in measured]
        return [
            Timed(at=tuple(at for at, _ in each), seconds=tuple(seconds for _, seconds in each))
            for each in map(sorted, measured)
        ]
    except ConfigurationError as error:
        raise ConfigurationError(f"{shown}: {error}") from error


def _rows(shown: str, lines: Iterator[list[str]], columns: int) -> Iterator[list[float]]:
    """Yield the numbers of each line that is not empty."""
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            if len(line) != columns:
                raise ValueError
            yield [int(line[0]), *map(float, line[1:])]
        except ValueError:
            raise ConfigurationError(
                f"line {number} of {shown} is {','.join(line)!r}, expected a worker and "
                f"{'seconds' if columns == 2 else 'its time and seconds'}, for example "
                f"{'0,1.5' if columns == 2 else '0,12.0,1.5'}."
            ) from None
