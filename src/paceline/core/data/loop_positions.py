"""How far the scripts of a job have come in their training loops, without I/O. See `paceline.epochs`.

A worker that joins a run in progress runs its script from the first line, but its training loop begins with the epoch
that the job has reached. The workers reach the epochs at different times. The position of the job is that of one
worker: the one with the lowest index of those that take part. This worker also sends the states of the objects that
its script tracks, so both belong together. If it is lost, the next one takes its place at the next epoch.

At the end of a loop there is no next epoch. So a worker that ends a loop sends the states if no worker with a lower
index has sent them before, and they are not lost with any worker.
"""

from __future__ import annotations

from collections.abc import Collection

from ...state import stateful
from ...sync.ticks import TICKS_PER_S
from ..protocol.job_cut import LoopCut
from ..protocol.messages import (
    EpochReached,
    LoopEntered,
    LoopLimits,
    LoopPosition,
    StatesDecided,
    TrainingStopped,
)
from ..protocol.requests import Request, Send, worker_peer

__all__ = ["LoopPositions"]

AT_THE_BEGINNING = LoopCut()


@stateful(decides="limits start stopped _newest _of _begun _ended", fixed="_first")
class LoopPositions:
    """The position of the job, and the worker that keeps the states of tracked objects.

    Args:
        cut: where to begin, if the run resumes another one.
        ticks_per_s: number of ticks per second.

    Attributes:
        limits: the limits of the last loop that has begun; None if they are unknown.
        start: number of updates, and of samples, at the beginning of this loop.
        stopped: the loops that a worker has stopped.
    """

    def __init__(self, cut: LoopCut = AT_THE_BEGINNING, ticks_per_s: int = TICKS_PER_S) -> None:
        self.limits: LoopLimits | None = cut.limits
        self.start = cut.start
        self.stopped = set(cut.stopped)
        self._newest: LoopPosition | None = cut.position
        self._first = cut.position  # where workers begin that have not asked for their position
        self._of: dict[int, LoopPosition | None] = {}  # worker -> the position that it has reached
        # number of the last loop that has begun, and the time at which it began, in ticks
        self._begun = (cut.begun, -round(cut.elapsed_s * ticks_per_s))
        # number of the last loop that has ended, and the worker whose states were sent last
        self._ended = cut.ended

    @property
    def loop(self) -> int:
        """Number of the last loop that has begun; -1 for none."""
        return self._begun[0]

    @property
    def begun_ticks(self) -> int:
        """Time at which this loop began."""
        return self._begun[1]

    def cut(self, now_ticks: int, ticks_per_s: int, worker: int | None = None) -> LoopCut:
        """Return the place of the job in its training loops; with the position of one worker, if it is given."""
        begun, begun_ticks = self._begun
        return LoopCut(
            position=self._newest if worker is None else self._of.get(worker, self._first),
            begun=begun,
            elapsed_s=(now_ticks - begun_ticks) / ticks_per_s if begun >= 0 else 0.0,
            limits=self.limits,
            start=self.start,
            stopped=tuple(sorted(self.stopped)),
            ended=self._ended,
        )

    def begun(
        self, loop: int, now_ticks: int, limits: LoopLimits | None = None, start: tuple[int, int] = (0, 0)
    ) -> None:
        """Record that a worker has begun a loop.

        Args:
            loop: number of the loop.
            now_ticks: current time.
            limits: the limits of the loop; None if they are unknown.
            start: number of updates, and of samples, at its beginning.
        """
        if loop > self._begun[0]:
            self._begun, self.limits, self.start = (loop, now_ticks), limits, start

    def entry(self, worker: int, loop: int, address: str, now_ticks: int, ticks_per_s: int) -> LoopEntered:
        """Return the answer to a worker that joins a run in progress and begins a loop.

        Args:
            worker: index of the worker.
            loop: number of the loop.
            address: the address of the server of shard 0.
            now_ticks: current time.
            ticks_per_s: number of ticks per second.
        """
        self._of[worker] = self._newest
        begun, begun_ticks = self._begun
        elapsed_s = (now_ticks - begun_ticks) / ticks_per_s if loop == begun else 0.0
        return LoopEntered(self._newest or LoopPosition(0, 0), elapsed_s, address)

    def reached(
        self, worker: int, message: EpochReached, present: Collection[int], now_ticks: int
    ) -> list[Request]:
        """Handle a worker that has reached the beginning of an epoch or the end of a loop."""
        position = self._of[worker] = message.position
        self.begun(position.loop, now_ticks, message.limits, (position.updates, position.samples))
        wanted = self._takes(worker, message, present)
        if wanted:
            self._newest = position
        if wanted and message.over:
            self._ended = position.loop, worker
        return [Send(worker_peer(worker), StatesDecided(wanted))] if message.tracks else []

    def left(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._of.pop(worker, None)

    def stop(self, loop: int, live: Collection[int]) -> list[Request]:
        """Stop a loop in all live workers, unless this has been done already."""
        if loop in self.stopped:
            return []
        self.stopped.add(loop)
        return [Send(worker_peer(worker), TrainingStopped(loop)) for worker in sorted(live)]

    def _takes(self, worker: int, message: EpochReached, present: Collection[int]) -> bool:
        """Return True if the position of the job becomes that of this worker."""
        position, newest = message.position, self._newest
        ended, keeper = self._ended
        if message.over and position.loop >= ended:
            return position.loop > ended or worker <= keeper
        ahead = newest is None or (position.loop, position.epoch) > (newest.loop, newest.epoch)
        return ahead and worker == min(present, default=-1)
