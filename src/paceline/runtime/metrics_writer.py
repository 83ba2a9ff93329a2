"""The thread that writes the metrics of a run to its directory while the run goes on.

The coordinator's own thread must not wait for a disk, so it only merges the metrics, in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..core.metrics.history import History
from ..trace.metrics_file import METRICS_FILE, write_metrics

__all__ = ["MetricsWriter"]

WRITING_INTERVAL_S = 2.0
"""Minimum time between two writes."""

WRITING_SHARE = 0.02
"""Maximum share of the time that the writes take."""


class MetricsWriter:
    """Writes the metrics to `metrics.jsonl` when there are new ones. If nothing is logged, there is no file.

    Args:
        history: the metrics.
        run_dir: the run directory.
        failed: called once with an error message if the file cannot be written.
    """

    def __init__(self, history: History, run_dir: Path, failed: Callable[[str], None]) -> None:
        self._history = history
        self._run_dir = run_dir
        self._failed = failed
        self._written = 0  # number of values that were noted before the last write
        self._broken = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and write the last metrics."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write()

    def _run(self) -> None:
        pause_s = WRITING_INTERVAL_S
        while not self._over.wait(pause_s):
            begun_s = time.monotonic()
            self._write()
            pause_s = max(WRITING_INTERVAL_S, (time.monotonic() - begun_s) / WRITING_SHARE)

    def _write(self) -> None:
        noted = self._history.noted
        if noted == self._written or self._broken:
            return
        try:
            write_metrics(self._run_dir, self._history.metrics())
            self._written = noted
        except OSError as error:
            self._broken = True
            self._failed(
                f"{METRICS_FILE} cannot be written: {error.strerror or error}. The run continues without it."
            )
