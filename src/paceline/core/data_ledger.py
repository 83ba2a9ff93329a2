"""The ledger of the data: which worker has which positions of which epoch of which loader, without I/O.

The ledger has one `LoaderLedger` for each loader that a script distributes, and knows how each worker numbers its
loaders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from ..errors import InternalError, ProtocolError
from ..state import restore, snapshot, stateful
from ..sync.ticks import TICKS_PER_S
from .epoch_split import Grant
from .job_cut import LoaderCut, LoopCut
from .lease import DataOrder, PackedPushed, Pushed
from .loader_ledger import LoaderLedger, PositionCounts
from .messages import (
    DataRequested,
    EpochReached,
    LoopEntered,
    LoopLimits,
    LoopPosition,
    StatesDecided,
    TrainingStopped,
)
from .requests import Request, Send, worker_peer


@stateful()
class DataLedger:
    """The ledger of the data of a job, for all loaders that its script distributes.

    Args:
        loaders: the state of each loader in the cut with which the run begins; () if the run resumes no cut.

    Attributes:
        keeps: True to settle no positions (see `LoaderLedger.settle`) when a worker requests data, so that the
            positions that each worker has remain known. A later request settles these positions as well. May be set.
    """

    def __init__(self, loaders: Sequence[LoaderCut] = ()) -> None:
        self.keeps = False
        self._loaders = {cut.name: LoaderLedger(cut) for cut in loaders}
        # worker -> (the worker's number for a loader -> name of the loader)
        self._names: dict[int, dict[int, str]] = {}

    def request(
        self, worker: int, message: DataRequested, *, now_s: float, live: Set[int], lockstep: bool
    ) -> Grant:
        """Hand out data to a worker that has no data left, or that begins an epoch.

        Args:
            worker: index of the worker.
            message: the worker's request.
            now_s: current time in seconds.
            live: the workers that take part in the job.
            lockstep: True if the sync model in force keeps all workers in lockstep.

        Raises:
            ConfigurationError: the order differs from the order of another worker.
            ProtocolError: the request contradicts an earlier request of the worker, or itself.
        """
        name, epoch, order, drawn = message.name, message.epoch, message.order, message.drawn
        if self._names.get(worker, {}).get(message.loader, name) != name:
            raise ProtocolError(
                f"worker {worker} requests data for loader {message.loader} under another name: {name!r}"
            )
        ledger = self._loaders.get(name) or LoaderLedger()
        pushed = Pushed.unpack(message.committed)
        ledger.require_plausible(worker, epoch, order, drawn, pushed.batches, message.end)
        self._loaders[name] = ledger
        self._names.setdefault(worker, {})[message.loader] = name
        if not self.keeps:
            ledger.settle(worker, pushed, pushed)
        ledger.observe(worker, message.times, message.least, message.step)
        ledger.begin(worker, epoch, order, drawn, live, lockstep)
        if message.end is not None:
            ledger.trim(worker, *message.end, drop_last=order.drop_last)
        return ledger.grant(worker, epoch, order, drawn, now_s, live)

    def leave(
        self, worker: int, drawn: Sequence[tuple[PackedPushed, PackedPushed]], live: Set[int], *, early: bool
    ) -> None:
        """Take back the unused positions of a worker that has left.

        Args:
            worker: index of the worker.
            drawn: for each of the worker's loaders, what the worker had drawn before its last push, at the shard that
                has received the fewest of its pushes and at the shard that has received the most. A missing entry means
                no push.
            live: the workers that remain in the job.
            early: True if the worker was lost, or left before its script had ended. Its unused positions are then
                handed out again in any epoch; otherwise, they are handed out again only in the epoch to which they
                belong.
        """
        numbers = {name: number for number, name in self._names.pop(worker, {}).items()}
        for name, ledger in self._loaders.items():
            number = numbers.get(name, len(drawn))
            if number < len(drawn):
                least, most = map(Pushed.unpack, drawn[number])
                ledger.settle(worker, least, most)
            ledger.leave(worker, live, early=early)

    def cut(self, drawn: Mapping[int, Sequence[tuple[PackedPushed, PackedPushed]]]) -> tuple[LoaderCut, ...]:
        """Return the data that would be left if all workers were lost now. The ledger itself does not change.

        Args:
            drawn: worker -> what the worker had drawn before its last push. See `leave`.
        """
        copy = DataLedger()
        restore(copy, snapshot(self))
        for worker, names in copy._names.items():
            for number, (least, most) in enumerate(drawn.get(worker, ())):
                if (name := names.get(number)) is not None:
                    copy._loaders[name].settle(worker, Pushed.unpack(least), Pushed.unpack(most))
        return tuple(ledger.cut(name) for name, ledger in copy._loaders.items())

    def has_leases(self, worker: int) -> bool:
        """Return True if some of the worker's positions are not settled: the worker may or may not have used them."""
        return any(ledger.has_leases(worker) for ledger in self._loaders.values())

    def counts(self) -> dict[str, PositionCounts]:
        """Return the number of positions in each state, for each loader."""
        return {name: ledger.counts() for name, ledger in self._loaders.items()}

    @property
    def moved(self) -> int:
        """Number of positions of earlier epochs that a static split has handed out in a later epoch."""
        return sum(ledger.moved for ledger in self._loaders.values())

    def newest_order(self, worker: int) -> DataOrder | None:
        """Return the order of the newest loader of a worker; None if the worker has begun no loader."""
        names = self._names.get(worker)
        return self._loaders[names[max(names)]].last_order[0] if names else None

    def most_used_order(self) -> tuple[DataOrder, int] | None:
        """Return the order of the last opened epoch of a loader, and the number of epochs that were opened.

        The loader is the one from which the most samples were used. The result is None if no samples were used.
        """
        counts = self.counts()
        most = max(counts, key=lambda name: counts[name].used, default=None)
        return None if most is None or not counts[most].used else self._loaders[most].last_order

    def validate(self) -> None:
        """Raise `InternalError` unless every position is in exactly one state."""
        for counts in self.counts().values():
            left, leased, settled = counts.left, counts.leased, counts.used + counts.torn
            if left + leased + settled + counts.returned + counts.left_out != counts.total:
                raise InternalError(f"the states of the positions do not add up: {counts}")


# -- How far the scripts of a job have come in their training loops, without I/O. See `paceline.epochs` ------
#
# A worker that joins a run in progress runs its script from the first line, but its training loop begins with
# the epoch that the job has reached. The workers reach the epochs at different times. The position of the job
# is the position of one worker: the worker with the lowest index among those that take part. This worker also sends the
# states of the objects that its script tracks, so the position and the states belong together. If this worker is lost,
# the worker with the next index takes its place at the next epoch.
#
# At the end of a loop, there is no next epoch at which another worker could take this place. So each worker that ends a
# loop sends the states, unless a worker with a lower index has sent them before. Therefore, the states survive if any
# worker is lost.

AT_THE_BEGINNING = LoopCut()


@stateful(fixed="_first")
class LoopPositions:
    """The position of the job, and the worker that keeps the states of tracked objects.

    Args:
        cut: the positions in the cut with which the run begins. Default: the positions of a run that resumes no cut.
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
        self._first = cut.position  # the position of workers that have not asked for their position
        self._of: dict[int, LoopPosition | None] = {}  # worker -> the position that it has reached
        # number of the last loop that has begun, and the time at which it began, in ticks
        self._begun = (cut.begun, -round(cut.elapsed_s * ticks_per_s))
        # number of the last loop that has ended, and the worker whose states were sent last
        self._ended = cut.ended

    @property
    def loop(self) -> int:
        """Number of the last loop that has begun; -1 if no loop has begun."""
        return self._begun[0]

    @property
    def begun_ticks(self) -> int:
        """Time at which the loop with the number `loop` began, in ticks."""
        return self._begun[1]

    def cut(self, now_ticks: int, ticks_per_s: int, worker: int | None = None) -> LoopCut:
        """Return the state of the training loops, at the position of `worker` or, if `worker` is None, of the job."""
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
            start: number of updates, and of samples, at the beginning of the loop.
        """
        if loop > self._begun[0]:
            self._begun, self.limits, self.start = (loop, now_ticks), limits, start
        elif loop == self._begun[0] and limits not in (None, self.limits):
            # A resumed script may have other limits, so the loop goes on even if its earlier limits have stopped it.
            self.limits = limits
            self.stopped.discard(loop)

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
        """Record the position that a worker has reached, and answer whether the worker must send its states."""
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
        """Return True if the position of this worker becomes the position of the job."""
        position, newest = message.position, self._newest
        ended, keeper = self._ended
        if message.over and position.loop >= ended:
            return position.loop > ended or worker <= keeper
        ahead = newest is None or (position.loop, position.epoch) > (newest.loop, newest.epoch)
        return ahead and worker == min(present, default=-1)
