"""Threads that take snapshots of the weights during a run, over connections of their own, as readers do."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...core.oversight.good_weights import GoodWeights
from ...errors import PacelineError
from ...runtime.coordinator_host import CoordinatorHost
from ...runtime.reader import Reader
from ...shard.snapshot import WeightsSnapshot
from ...wire.addresses import seen_from

__all__ = ["Keeper", "Sampler"]

POLL_INTERVAL_S = 0.05

LEAST_KEEPING_S = 1.0
"""Minimum time between two snapshots of good weights."""

KEEPING_SHARE = 0.02
"""Maximum share of the time that these snapshots take."""


class _Reading:
    """A thread that reads the weights while the run goes on. Subclasses say when."""

    def __init__(self, coordinator: CoordinatorHost, name: str) -> None:
        self._coordinator = coordinator
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which waits for training to begin."""
        self._thread.start()

    def stop(self, hurried: Callable[[], bool]) -> None:
        """Stop taking snapshots. Wait for a snapshot in progress, until `hurried` returns True."""
        self._stopped.set()
        while self._thread.is_alive() and not hurried():
            self._thread.join(POLL_INTERVAL_S)

    def _run(self) -> None:
        coordinator = self._coordinator
        while not coordinator.started.wait(POLL_INTERVAL_S):
            if self._stopped.is_set() or coordinator.over.is_set():
                return
        while not self._stopped.wait(POLL_INTERVAL_S) and not coordinator.over.is_set():
            # If a server is lost, there is no message, because the run itself reports the failure. If the model has
            # been extended, snapshots of the former model fail, and a new reader is needed.
            with contextlib.suppress(PacelineError), self._reader() as reader:
                while self._wait():
                    self._take(reader)
                return

    def _wait(self) -> bool:
        """Wait until the next snapshot is due. Return False if the run is over."""
        raise NotImplementedError

    def _take(self, reader: Reader) -> None:
        raise NotImplementedError

    def _is_over_after(self, wait_s: float) -> bool:
        return self._stopped.wait(wait_s) or self._coordinator.over.is_set()

    def _reader(self) -> contextlib.closing[Reader]:
        coordinator = self._coordinator
        assert coordinator.core.model is not None
        job = coordinator.job
        shards = [
            (shard, seen_from(address, coordinator.address)) for shard, address in coordinator.core.shards
        ]
        return contextlib.closing(Reader.connect(coordinator.core.model, shards, job.token, job.contexts))


class Sampler(_Reading):
    """Takes a snapshot of the weights at regular intervals.

    Attributes:
        taken: pairs (seconds since training began, weights).
    """

    def __init__(self, coordinator: CoordinatorHost, interval_s: float) -> None:
        super().__init__(coordinator, "paceline-sampler")
        self.taken: list[tuple[float, WeightsSnapshot]] = []
        self._interval_s = interval_s
        self._tick = 0

    def _wait(self) -> bool:
        due_s = self._coordinator.started_s + self._tick * self._interval_s
        return not self._is_over_after(max(0.0, due_s - self._coordinator.job.now_s()))

    def _take(self, reader: Reader) -> None:
        snapshot = reader.read().completed(Path(self._coordinator.job.run_dir))
        now_s = self._coordinator.job.now_s() - self._coordinator.started_s
        self.taken.append((now_s, snapshot))
        # Skip the due times that passed while the snapshot was being taken.
        self._tick = max(self._tick + 1, math.ceil(now_s / self._interval_s))


class Keeper(_Reading):
    """Keeps the last weights that were certainly good, for a run that its guard may stop.

    It takes a snapshot at most once per second, and for at most 2 % of the time. At most two are in memory.
    """

    def __init__(self, coordinator: CoordinatorHost) -> None:
        super().__init__(coordinator, "paceline-keeper")
        self._weights: GoodWeights[WeightsSnapshot] = GoodWeights(coordinator.core.guard)
        self._due_s = 0.0

    @property
    def good(self) -> WeightsSnapshot | None:
        """The last weights that were certainly good; None if there are none."""
        return self._weights.good

    def _wait(self) -> bool:
        while not self._is_over_after(POLL_INTERVAL_S):
            if self._weights.wanted and time.monotonic() >= self._due_s:
                return True
        return False

    def _take(self, reader: Reader) -> None:
        begun_s = time.monotonic()
        self._weights.take(reader.read().completed(Path(self._coordinator.job.run_dir)))
        now_s = time.monotonic()
        self._due_s = now_s + max(LEAST_KEEPING_S, (now_s - begun_s) / KEEPING_SHARE)
