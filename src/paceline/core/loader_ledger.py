"""The ledger of one loader: the state of every position of its epochs, without I/O.

The coordinator hands out the batches of each epoch (see `paceline.core.epoch_split`) and keeps track of every
position. A position is in exactly one of these states:

    left        no worker has it: it has not been handed out, a script has ended the epoch without using it, or a
                worker that left early had drawn it and not pushed it, and the ledger had forgotten it (see below)
    leased      a worker has received it, and no push that contains it is known to be complete
    used        it was part of a push that every shard has received
    torn        it was part of a push that only some shards received before the worker was lost
    returned    a worker had received it, but left early, or was lost, before using it
    left out    it belongs to an incomplete batch at the end of the epoch, which is not handed out, or to a batch
                that a script has skipped between its pushes, because the script computed no gradient of the batch

Returned positions are handed out again before any other positions: in the same epoch if its split is dynamic and a
worker still draws from the epoch, else in a later epoch. With a dynamic split, positions that a worker gives back
because its script has ended the epoch early are handed out again in the same epoch only.

A lease is *settled* when it is known which of its positions are used, torn or left out. A script may draw from a loader
and never push, for example to evaluate a model. Then no lease is ever settled. Therefore, the ledger forgets the
positions of the oldest leases and keeps only the number and the sizes of their batches, which are enough to count
exactly what a later push has used. No lease is forgotten if a script pushes at least once in `MOST_LEASES` batches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Set
from itertools import chain

import msgspec

from ..errors import ConfigurationError, ProtocolError
from ..state import stateful
from .batch_sizes import LeaseSizes
from .epoch_split import DynamicSplit, EpochSplit, Grant, JointSplit, StaticSplit, take_batches
from .job_cut import EpochCut, LoaderCut
from .lease import DataOrder, Lease, Pushed, order_difference, positions, remove_first, single, trim, with_end

MOST_LEASES = 1024  # maximum number of leases that a worker has drawn and whose positions are known


class PositionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of positions in each state, over all epochs of a loader. See the docstring of the module."""

    total: int
    left: int
    leased: int
    used: int
    torn: int
    returned: int
    left_out: int


@stateful()
class _Account:
    """The account of one worker with one loader.

    Attributes:
        epoch: the last epoch that the worker has begun; -1 before the first one.
        settled: number of batches that are settled.
        counted: number of positions in these batches.
        skipped: number of these positions that the worker's script has skipped.
        first: number of the first batch in `leases`, counted from 0; the batches in `forgotten` come before it.
        leases: leases that are not settled, in order.
        forgotten: earlier leases that are not settled, in order. Their epochs and first positions are not valid.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.settled = self.first = 0
        self.counted = self.skipped = 0
        self.leases: deque[Lease] = deque()
        self.forgotten: deque[Lease] = deque()

    @property
    def open_batches(self) -> int:
        """Number of batches in leases that are not settled."""
        return sum(lease.count or 0 for leases in (self.forgotten, self.leases) for lease in leases)

    def forget(self, drawn: int) -> None:
        """Forget the positions of the oldest leases, but only of leases among the worker's first `drawn` batches."""
        while len(self.leases) > MOST_LEASES:
            count = self.leases[0].count
            if count is None or self.first + count > drawn:
                return
            self.first += count
            lease = self.leases.popleft()
            if self.forgotten and self.forgotten[-1].batch == lease.batch:
                lease = msgspec.structs.replace(lease, count=count + (self.forgotten.pop().count or 0))
            self.forgotten.append(lease)


NEW = LoaderCut(name="")
"""The state with which a loader begins in a run that resumes no cut."""


@stateful()
class LoaderLedger:
    """The ledger of one loader.

    Args:
        cut: the state with which the loader begins.

    Attributes:
        moved: number of positions of earlier epochs that a static split has handed out in a later epoch.
    """

    def __init__(self, cut: LoaderCut = NEW) -> None:
        self.moved = cut.moved
        self._splits: dict[int, EpochSplit] = {}  # epochs that some workers have begun and not all have ended
        # Epochs that all workers have ended, of which some workers had leases when the last epoch was opened.
        self._closed: dict[int, EpochSplit] = {}
        self._opened = cut.opened  # number of the last epoch that was opened, plus 1
        self._order = cut.order  # the order of this epoch
        # the first epoch of which the earlier run has not used all data; if there is none, the last epoch that the
        # earlier run has opened
        self._resumed = min((rest.number for rest in cut.epochs), default=cut.opened - 1)
        self._accounts: defaultdict[int, _Account] = defaultdict(_Account)  # worker -> its account
        self._returned = deque(cut.returned)  # each lease has a count
        self._sizes = LeaseSizes(cut.times)
        self._used, self._torn = cut.used, cut.torn
        # numbers of positions, in addition to those that the splits count
        self._total, self._left, self._left_out = cut.total, cut.left, cut.left_out
        # epochs of which an earlier run has used a part, and that no worker has begun in this run
        self._rests = {rest.number: rest for rest in cut.epochs}

    @property
    def last_order(self) -> tuple[DataOrder, int]:
        assert self._order is not None
        return self._order, self._opened

    def has_leases(self, worker: int) -> bool:
        account = self._accounts.get(worker)
        if account is not None and (account.leases or account.forgotten):
            return True
        return any(worker in split.shares for split in self._splits.values())

    def require_plausible(
        self,
        worker: int,
        epoch: int,
        order: DataOrder,
        drawn: int,
        committed: int,
        end: tuple[int, int] | None,
    ) -> None:
        """Raise `ProtocolError` if a request contradicts the worker's earlier requests, or itself."""
        account = self._accounts.get(worker) or _Account()  # a refused request must not open an account
        if epoch < account.epoch:
            raise ProtocolError(
                f"worker {worker} requests data of epoch {epoch}, after data of epoch {account.epoch}"
            )
        if not account.settled <= committed <= drawn:
            raise ProtocolError(
                f"worker {worker} has drawn {drawn} batches and pushed {committed}, expected at least "
                f"{account.settled} pushed batches, and no more than it has drawn"
            )
        if end is not None and order.size is not None:
            raise ProtocolError(f"worker {worker} reports the end of an order whose size is known")

    def settle(self, worker: int, least: Pushed, most: Pushed) -> None:
        """Record that a worker's batches in `least` are used, and that the further batches in `most` are torn.

        Skipped positions are left out, even if they were counted as used before: a worker may skip a batch after the
        batch was settled.
        """
        account = self._accounts[worker]
        self._used += self._remove(account, least.batches)
        self._used -= self._leave_out(account, least.skipped)
        torn = self._remove(account, most.batches)
        skipped = self._leave_out(account, most.skipped)
        self._torn += max(torn - skipped, 0)
        self._used -= max(skipped - torn, 0)

    def observe(self, worker: int, times: Iterable[tuple[int, float]], least: int, step: int) -> None:
        """Record the times of a worker's latest batches, and which sizes its next batches may have."""
        self._sizes.observe(worker, times, least, step)

    def begin(
        self, worker: int, epoch: int, order: DataOrder, drawn: int, live: Set[int], lockstep: bool
    ) -> None:
        """Let a worker begin an epoch, unless it has begun this epoch already."""
        account = self._accounts[worker]
        if epoch > account.epoch:
            self._end_current(worker, account, drawn, live)
            account.epoch = epoch
            if epoch >= self._opened or epoch in self._rests:
                self._open(epoch, order, worker, live, lockstep)
        split = self._splits.get(epoch)
        if split is None:
            return
        if difference := order_difference(order, split.order, static=split.static):
            raise ConfigurationError(
                f"distribute() cannot split the data: worker {worker}'s loader differs from worker {split.opener}'s: "
                f"{difference}."
            )

    def grant(
        self, worker: int, epoch: int, order: DataOrder, drawn: int, now_s: float, live: Set[int]
    ) -> Grant:
        """Hand out the next leases of a worker whose script has drawn `drawn` batches."""
        split = self._splits.get(epoch)
        if epoch < self._resumed:
            # A script that has no `paceline.epochs` makes the passes of the earlier run again, without data.
            grant = Grant((), last=True)
        elif split is None or worker in split.ended:
            # The worker asks again for returned positions, or has joined late.
            largest = max(order.batch // len(live), 1) if order.joint else order.batch
            smallest = self._sizes.smallest(order, largest)
            leases, left_out = take_batches(self._returned, smallest, largest, 1)
            self._left_out += left_out
            grant = Grant(tuple(leases), not leases, uneven=bool(leases))
        else:
            grant = split.grant(worker, self._returned, now_s, live, self._accounts[worker].open_batches)
            if split.static:
                self.moved += positions(lease for lease in grant.leases if lease.epoch < epoch)
        account = self._accounts[worker]
        account.leases.extend(lease for lease in grant.leases if lease.batch)
        if len(account.leases) > MOST_LEASES:
            account.forget(drawn)
        if grant.last and split is not None:
            self._end(worker, epoch, split, live)
        return grant

    def trim(self, worker: int, epoch: int, size: int, *, drop_last: bool) -> None:
        """Remove the positions that do not exist, because the order of an epoch has only `size` positions.

        If `drop_last` is True, also remove a batch that is incomplete without these positions. All workers may have
        ended the epoch already, because a worker may use positions of the epoch that another worker has returned.
        """
        split = self._split(epoch)
        if split is not None and split.order.size is None:
            split.end_at(size)
        account = self._accounts[worker]
        for _ in range(len(account.leases)):
            lease = account.leases.popleft()
            if lease.epoch == epoch and lease.count is None:
                ended = with_end([lease], size)
                self._total += positions(ended)
                account.leases += ended
            else:
                account.leases.append(lease)
        for leases in (account.leases, self._returned):
            nonexistent, left_out = trim(leases, epoch, size, drop_last=drop_last)
            self._total -= nonexistent
            self._left_out += left_out

    def leave(self, worker: int, live: Set[int], *, early: bool) -> None:
        """Take back all positions that a worker may use but has not used, and forget the worker."""
        account = self._accounts.pop(worker, _Account())
        self._left += positions(account.forgotten)
        unused = [*account.leases]
        shares = [split.shares.pop(worker, []) for split in self._splits.values()]
        unused += [lease for share in shares for lease in share if lease.batch]
        if early:
            # A lease without a count cannot be returned, because its size is not known.
            self._put_back(lease for lease in unused if lease.count is None)
            self._returned.extendleft(lease for lease in reversed(unused) if lease.count is not None)
        else:
            self._put_back(unused)
        for epoch, split in list(self._splits.items()):
            split.ended.discard(worker)  # another worker may join with the same index
            self._close_if_ended(epoch, split, live)
        self._sizes.forget(worker)

    def counts(self) -> PositionCounts:
        splits = self._splits.values()
        return PositionCounts(
            total=self._total + sum(split.total for split in splits),
            left=self._left + sum(split.left for split in splits),
            leased=sum(positions(a.leases) + positions(a.forgotten) for a in self._accounts.values()),
            used=self._used,
            torn=self._torn,
            returned=positions(self._returned),
            left_out=self._left_out + sum(split.left_out for split in splits),
        )

    def cut(self, name: str) -> LoaderCut:
        """Return the data that is left if all workers are lost. All positions that were used must have been settled."""
        accounts, shares = self._accounts.values(), [split.shares.values() for split in self._splits.values()]
        unused: defaultdict[int, list[Lease]] = defaultdict(list)  # by epoch
        for lease in chain(
            self._returned, *(account.leases for account in accounts), *chain.from_iterable(shares)
        ):
            unused[lease.epoch].append(lease)
        total, left_out, rests = self._total, self._left_out, list(self._rests.values())
        closed = self._leased()
        for split in closed.values():
            total -= split.total
            left_out -= split.left_out
        for number, split in (self._splits | closed).items():
            rest = split.cut(unused[number])
            unused[number] = rest.before
            total += rest.total
            left_out += rest.left_out
            rests.append(EpochCut(number, split.order, rest.begin))
        returned = [lease for leases in unused.values() for lease in leases if lease.count is not None]
        return LoaderCut(
            name=name,
            opened=self._opened,
            order=self._order,
            epochs=tuple(sorted(rests, key=lambda rest: rest.number)),
            returned=tuple(sorted(returned, key=lambda lease: (lease.epoch, lease.start))),
            total=total,
            left=self._left + sum(positions(account.forgotten) for account in accounts),
            used=self._used,
            torn=self._torn,
            left_out=left_out,
            moved=self.moved,
            times=self._sizes.balanced.cut(),
        )

    # -- leases of a worker -------------------------------------------------------------------------------

    def _remove(self, account: _Account, until: int) -> int:
        """Remove a worker's batches before number `until` from its leases. Return the number of removed positions."""
        if until <= account.settled:
            return 0
        removed = 0
        while account.settled < until and (leases := account.forgotten or account.leases):
            lease = leases[0]
            batches = until - account.settled
            if lease.count is not None:
                batches = min(batches, lease.count)
            else:  # positions of an epoch of unknown size are counted when they are used
                self._total += batches * lease.batch
            removed += batches * lease.batch
            rest = remove_first(lease, batches)
            if rest is None:
                leases.popleft()
            else:
                leases[0] = rest
            account.settled += batches
        account.settled = until
        account.first = max(account.first, until)
        account.counted += removed
        return removed

    def _leave_out(self, account: _Account, skipped: int) -> int:
        """Leave out the settled positions that a worker has skipped: `skipped` in total.

        Return the number of these positions that were not left out before.
        """
        new = max(min(skipped, account.counted) - account.skipped, 0)
        account.skipped += new
        self._left_out += new
        return new

    def _take_back(self, account: _Account, drawn: int) -> list[Lease]:
        """Take back a worker's leases from batch number `drawn` on, and return these leases."""
        kept: deque[Lease] = deque()
        taken_back: list[Lease] = []
        keep = max(drawn - account.first, 0)
        for lease in account.leases:
            batches = keep if lease.count is None else min(keep, lease.count)
            if batches:
                kept.append(msgspec.structs.replace(lease, count=batches))
                if lease.count is None:
                    self._total += batches * lease.batch
            keep -= batches
            rest = remove_first(lease, batches)
            if rest is not None:
                taken_back.append(rest)
        account.leases = kept
        return taken_back

    def _put_back(self, unused: Iterable[Lease]) -> None:
        """Make positions that a script has not used available to the other workers, in the same epoch only."""
        for lease in unused:
            split = self._splits.get(lease.epoch)
            if split is None or split.static:
                self._left += positions([lease])
            else:
                split.unused.append(lease)
            if lease.count is None and (split := self._split(lease.epoch)) is not None:
                split.endless.append(lease)

    # -- epochs -------------------------------------------------------------------------------------------

    def _split(self, epoch: int) -> EpochSplit | None:
        """Return the split of an open or closed epoch; None if the ledger has no split of this epoch."""
        return self._splits.get(epoch) or self._closed.get(epoch)

    def _leased(self) -> dict[int, EpochSplit]:
        """Return the closed epochs of which some workers have leases that are not settled."""
        leased = {lease.epoch for account in self._accounts.values() for lease in account.leases}
        return {number: split for number, split in self._closed.items() if number in leased}

    def _open(self, epoch: int, order: DataOrder, opener: int, live: Set[int], lockstep: bool) -> None:
        """Begin to split an epoch that no worker has begun in this run.

        If an earlier run has used a part of the epoch, only the rest is split.
        """
        rest = self._rests.pop(epoch, None)
        begin = 0 if rest is None else rest.begin
        if rest is not None and (order.size, order.digest) != (rest.order.size, rest.order.digest):
            raise ConfigurationError(
                f"distribute() cannot continue epoch {epoch}: the loader of worker {opener} differs from that of the "
                f"run that is resumed: {order_difference(order, rest.order, static=False)}."
            )
        for earlier in [number for number in self._rests if number < epoch]:
            self._return_rest(self._rests.pop(earlier))
        static = order.split == "static" or (order.split == "auto" and lockstep)
        if order.size is None and begin % (order.batch * len(live)):
            static = False  # joint batches of another size have been used before
        self._splits[epoch] = (
            JointSplit(epoch, order, opener, self._sizes, live, begin)
            if static and order.joint
            else StaticSplit(epoch, order, opener, self._sizes, live, self._returned, begin)
            if static
            else DynamicSplit(epoch, order, opener, self._sizes, begin)
        )
        if epoch >= self._opened:
            self._opened, self._order = epoch + 1, order
        self._closed = self._leased()

    def _return_rest(self, rest: EpochCut) -> None:
        """Add the rest of an epoch of an earlier run to `_returned`, because no worker will begin this epoch now."""
        order = rest.order
        if order.size is None:
            return
        full, last = divmod(order.size - rest.begin, order.batch)
        self._total += order.size - rest.begin
        if full:
            self._returned.append(Lease(rest.number, rest.begin, order.batch, order.batch, full))
        if last and order.joint and order.drop_last:
            self._left_out += last
        elif last:
            self._returned.append(single(rest.number, order.size - last, last))

    def _end_current(self, worker: int, account: _Account, drawn: int, live: Set[int]) -> None:
        """End the current epoch of a worker that begins a later epoch. The worker keeps the drawn batches."""
        self._put_back(self._take_back(account, drawn))
        self._sizes.pause(worker)
        if (split := self._splits.get(account.epoch)) is not None:
            self._end(worker, account.epoch, split, live)

    def _end(self, worker: int, epoch: int, split: EpochSplit, live: Set[int]) -> None:
        """Record that a worker receives no more batches of an epoch. Close the epoch if no worker receives more."""
        split.ended.add(worker)
        self._left += positions(split.shares.pop(worker, ()))
        self._close_if_ended(epoch, split, live)

    def _close_if_ended(self, epoch: int, split: EpochSplit, live: Set[int]) -> None:
        """Close an epoch if no live worker receives more batches of it.

        If no worker is live, other workers may join later and continue the epoch.
        """
        if live and len(split.ended) >= len(live) and live <= split.ended:
            del self._splits[epoch]
            if not split.left:
                self._closed[epoch] = split
            self._total += split.total
            self._left += split.left
            self._left_out += split.left_out
