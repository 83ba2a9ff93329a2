"""What a worker tells the coordinator for display: what it does, its last loss, and what it spends its time on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ..core.metrics.time_spent import Stopwatch
from ..core.metrics.unsent_metrics import Settled
from ..core.protocol.messages import Activity, Status
from ..errors import PeerLostError
from ..sync.ticks import TICKS_PER_S
from .job import Job
from .worker_links import Links

__all__ = ["WorkerStatus", "queued_ticks"]

STATUS_INTERVAL_S = 0.1  # minimum time between two reports


def queued_ticks() -> int:
    """Return how long the main thread of this process could run, but had no core, in ticks; 0 if this is unknown.

    Linux counts this for each thread.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * TICKS_PER_S // 10**9
    except (OSError, ValueError, IndexError):
        return 0


class WorkerStatus:
    """Reports the state of a worker.

    Args:
        job: the configuration of the run.
        links: the worker's connections.

    Attributes:
        stopwatch: measures what the worker spends its time on.
        away: True while the script is outside of training whatever it does, for example inside `evaluating`.
    """

    def __init__(self, job: Job, links: Links) -> None:
        self.stopwatch = Stopwatch(job.now_ticks())
        self.away = False
        self._job = job
        self._links = links
        self._reported_s = -math.inf
        # What was shown last; the state is "" before the first time.
        self._shown: Literal["", "computing", "waiting", "pulling", "paused"] = ""
        self._loss: float | None = None  # the last one that is known
        self._guessed = False  # True if it is a guess

    def note_loss(self, logged: Settled) -> None:
        """Keep the last loss that is known."""
        if logged.shown is not None:
            self._loss, self._guessed = logged.shown, logged.guessed

    def show(self, state: Literal["computing", "waiting", "pulling", "paused"], now_s: float) -> None:
        """Report the worker's state to the coordinator for display, at most once per `STATUS_INTERVAL_S`.

        A change to "computing" is always reported, so that the display does not keep showing "waiting".
        """
        due = now_s - self._reported_s >= STATUS_INTERVAL_S
        if (state != self._shown and (due or state == "computing")) or (due and state == "computing"):
            self._reported_s, self._shown = now_s, state
            self._report()

    def _report(self) -> None:
        """Send the state that is shown, and what the worker has spent its time on."""
        if not self._shown:
            return
        spent = self.stopwatch.read(self._job.now_ticks())
        core = self._links.core
        epoch, part = core.data.place
        status = Status(
            core.iteration,
            self._loss,
            self._shown,
            spent,
            core.updates,
            core.samples,
            epoch,
            part,
            self._guessed,
        )
        self._links.post(self._links.coordinator, status)

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Return a context in which the worker spends its time on this activity.

        What takes the worker away from its training may take long, so the coordinator is told of it at once.
        """
        away = self.away
        with self._links.lock:
            self.away = away or activity == "outside"
            before = self.stopwatch.enter(activity, self._job.now_ticks())
            if activity == "outside":
                with contextlib.suppress(PeerLostError):  # the next exchange notices it, and knows the reason
                    self._report()
        try:
            yield
        finally:
            with self._links.lock:
                self.away = away
                self.stopwatch.enter(before, self._job.now_ticks())
