"""The emulation of a slower machine: a worker waits after it has computed a gradient."""

from __future__ import annotations

import random

from ..core.data.data_feed import Work
from .job import Job

__all__ = ["Emulation"]


class Emulation:
    """Determines when the machine that a worker emulates would have computed a gradient.

    Args:
        job: the configuration of the run, with the pace and the slowdown of each worker.
        worker: index of the worker.
    """

    def __init__(self, job: Job, worker: int) -> None:
        self._job = job
        self._worker = worker
        self._jitter = random.Random(f"paceline jitter {job.seed} {worker}")

    def until_s(self, begun_s: float, now_s: float, work: Work) -> float:
        """Return when the emulated machine would have ended a computation, on the clock of the run.

        Args:
            begun_s: when the computation began.
            now_s: the current time, at which it has ended on this machine.
            work: what was computed.
        """
        job, computed_s = self._job, now_s - begun_s
        factor = 1 + job.jitter * self._jitter.uniform(-1, 1)
        pace_s = job.pace_of(self._worker, work)
        slowdown = job.slowdown[self._worker] if job.slowdown else 1.0
        return begun_s + max(computed_s, max(pace_s, computed_s * slowdown) * factor)
