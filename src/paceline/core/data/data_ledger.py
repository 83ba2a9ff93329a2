"""The ledger of the data: which worker has which positions of which epoch of which loader, without I/O.

It has one `LoaderLedger` for each loader that a script distributes, and knows how each worker numbers its loaders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ...errors import InternalError, ProtocolError
from ...state import restore, snapshot, stateful
from ..protocol.job_cut import LoaderCut
from ..protocol.lease import Order, PackedPushed, Pushed
from .epoch_split import Grant
from .loader_ledger import LoaderLedger, PositionCounts

__all__ = ["DataLedger"]


@stateful(decides="keeps _loaders _names")
class DataLedger:
    """The ledger of the data of a job, for all loaders that its script distributes.

    Args:
        loaders: where to begin, if the run resumes another one.

    Attributes:
        keeps: True to settle nothing that workers request data after, so that it is known until later what they have.
            A later request settles it as well. May be set.
    """

    def __init__(self, loaders: Sequence[LoaderCut] = ()) -> None:
        self.keeps = False
        self._loaders = {cut.name: LoaderLedger(cut) for cut in loaders}
        # worker -> the names of the loaders by the worker's numbers
        self._names: dict[int, dict[int, str]] = {}

    def request(
        self,
        worker: int,
        loader: int,
        name: str,
        epoch: int,
        order: Order,
        *,
        drawn: int,
        committed: PackedPushed,
        now_s: float,
        live: Set[int],
        lockstep: bool,
        end: tuple[int, int] | None = None,
        times: Sequence[tuple[int, float]] = (),
        least: int = 1,
        step: int = 1,
    ) -> Grant:
        """Hand out data to a worker that has none left, or that begins an epoch.

        Args:
            worker: index of the worker.
            loader: the worker's own number for the loader.
            name: name of the loader, which is the same in all workers.
            epoch: number of the epoch, counted from 0 for each loader.
            order: the order of the epoch.
            drawn: number of batches of this loader that the worker has passed to its script since it joined.
            committed: what the worker had drawn before its last push that every shard has received. See `Pushed`.
            now_s: current time in seconds.
            live: the workers that take part in the job.
            lockstep: True if the sync model in force keeps all workers in lockstep.
            end: an epoch and the size of its order, if it was not known in advance and the worker has found the end.
            times: the number of positions in each of the worker's latest iterations, and its time in seconds.
            least: minimum size of the worker's batches if the order is balanced.
            step: number of which the sizes of the worker's batches are multiples if the order is balanced.

        Raises:
            ConfigurationError: the order differs from the order of another worker.
            ProtocolError: the request contradicts an earlier request of the worker, or itself.
        """
        if self._names.get(worker, {}).get(loader, name) != name:
            raise ProtocolError(
                f"worker {worker} requests data for loader {loader} under another name: {name!r}"
            )
        ledger = self._loaders.get(name) or LoaderLedger()
        pushed = Pushed.unpack(committed)
        ledger.require_plausible(worker, epoch, order, drawn, pushed.batches, end)
        self._loaders[name] = ledger
        self._names.setdefault(worker, {})[loader] = name
        if not self.keeps:
            ledger.settle(worker, pushed, pushed)
        ledger.observe(worker, times, least, step)
        ledger.begin(worker, epoch, order, drawn, live, lockstep)
        if end is not None:
            ledger.trim(worker, *end, drop_last=order.drop_last)
        return ledger.grant(worker, epoch, order, drawn, now_s, live)

    def leave(
        self, worker: int, drawn: Sequence[tuple[PackedPushed, PackedPushed]], live: Set[int], *, early: bool
    ) -> None:
        """Take back the unused positions of a worker that has left.

        Args:
            worker: index of the worker.
            drawn: for each of the worker's loaders, what the worker had drawn before its last push, at the shards
                that have received the fewest and the most of its pushes. A missing entry means no push.
            live: the workers that remain in the job.
            early: True if the worker was lost, or left before its script had ended. Its unused positions are then
                handed out in any epoch; otherwise, only in the epoch that its script has not used completely.
        """
        numbers = {name: number for number, name in self._names.pop(worker, {}).items()}
        for name, ledger in self._loaders.items():
            number = numbers.get(name, len(drawn))
            if number < len(drawn):
                least, most = map(Pushed.unpack, drawn[number])
                ledger.settle(worker, least, most)
            ledger.leave(worker, live, early=early)

    def cut(self, drawn: Mapping[int, Sequence[tuple[PackedPushed, PackedPushed]]]) -> tuple[LoaderCut, ...]:
        """Return what is left of the data if all workers are lost. The ledger itself does not change.

        Args:
            drawn: worker -> what it had drawn before its last push. See `leave`.
        """
        copy = DataLedger()
        restore(copy, snapshot(self))
        for worker, names in copy._names.items():
            for number, (least, most) in enumerate(drawn.get(worker, ())):
                if (name := names.get(number)) is not None:
                    copy._loaders[name].settle(worker, Pushed.unpack(least), Pushed.unpack(most))
        return tuple(ledger.cut(name) for name, ledger in copy._loaders.items())

    def has_leases(self, worker: int) -> bool:
        """Return True if some positions of the worker are not settled: it may have used them or not."""
        return any(ledger.has_leases(worker) for ledger in self._loaders.values())

    def counts(self) -> dict[str, PositionCounts]:
        """Return the number of positions in each state, for each loader."""
        return {name: ledger.counts() for name, ledger in self._loaders.items()}

    @property
    def moved(self) -> int:
        """Number of positions of earlier epochs that a static split has handed out in a later one."""
        return sum(ledger.moved for ledger in self._loaders.values())

    def newest_order(self, worker: int) -> Order | None:
        """Return the order of the loader that a worker has begun last for the first time; None if there is none."""
        names = self._names.get(worker)
        return self._loaders[names[max(names)]].last_order[0] if names else None

    def last_order(self, name: str) -> tuple[Order, int]:
        """Return the order of the last epoch that was opened of a loader, and the number of opened epochs."""
        return self._loaders[name].last_order

    def most_used_order(self) -> tuple[Order, int] | None:
        """Return `last_order` of the loader from which the most samples were used; None if none were used."""
        counts = self.counts()
        most = max(counts, key=lambda name: counts[name].used, default=None)
        return None if most is None or not counts[most].used else self.last_order(most)

    def validate(self) -> None:
        """Raise `InternalError` unless every position is in exactly one state."""
        for counts in self.counts().values():
            left, leased, settled = counts.left, counts.leased, counts.used + counts.torn
            if left + leased + settled + counts.returned + counts.left_out != counts.total:
                raise InternalError(f"the states of the positions do not add up: {counts}")
