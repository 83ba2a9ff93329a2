"""The two ways to split an epoch between the workers: a static split and a dynamic split.

With a static split, every joint batch is divided among the workers that take part when the epoch begins: evenly, unless
the order is balanced. With a dynamic split, a worker receives a lease of one or several batches whenever it has no
lease left (see `paceline.core.batch_sizes`).

If the order is balanced, the sizes of the workers' batches follow the workers' speeds. With a dynamic split, a worker's
next lease has batches of the worker's present size. With a static split, the shares are dealt a few rounds at a time,
when the first worker needs them. So the sizes in a round are decided before any worker takes its batch of the round.

Both splits also hand out the positions of earlier epochs that lost and leaving workers have returned: a static split
deals them when the epoch begins, and a dynamic split hands them out before any other positions.

If the batch size is that of a joint batch (`DataOrder.joint`), a static split becomes a `JointSplit`: the joint batches
are the same as those of a single process, and each joint batch is divided among the workers that are live when the
first worker needs its part. With a dynamic split, a worker's batch has the size that its part of a joint batch would
have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from ..state import stateful
from .batch_sizes import MOST_ROUNDS, LeaseSizes
from .lease import (
    DataOrder,
    Lease,
    deal,
    divide_evenly,
    positions,
    remove_first,
    single,
    split_rest,
    trim,
    with_end,
)

LAG = 4 * MOST_ROUNDS
"""Number of joint batches by which a worker may lag behind before it has no part in further joint batches."""


class Grant(msgspec.Struct, frozen=True):
    """The answer to a worker that needs data.

    Attributes:
        leases: the batches that the worker may use, in order.
        last: True if the worker receives no more batches in this epoch.
        uneven: True if the other workers may receive fewer batches than this worker, for example because a worker that
            has left has returned these batches.
    """

    leases: tuple[Lease, ...]
    last: bool
    uneven: bool = False


class Rest(NamedTuple):
    """The part of an epoch that remains if all workers are lost.

    Attributes:
        begin: the first position of the part that no worker has used. The positions from `begin` on are split anew.
        before: leases of the unused positions before `begin`.
        total: number of positions of the epoch before `begin`, as far as the split has counted them.
        left_out: number of these positions that the split has left out.
    """

    begin: int
    before: list[Lease]
    total: int
    left_out: int


@stateful()
class EpochSplit(ABC):
    """An epoch that some workers have begun and not all workers have ended.

    Args:
        number: number of the epoch.
        order: the order of the epoch.
        opener: the worker that began the epoch first.
        sizes: the sizes of the workers' leases.
        begin: the first position that is split; 0 unless an earlier run has used a part of the epoch.

    Attributes:
        static: True if the split is static.
        order: the order of the epoch.
        opener: the worker that began the epoch first.
        shares: static split: worker -> leases that it has yet to receive, for each worker that may receive more.
        unused: dynamic split: leases that scripts have received and not used.
        endless: static split: leases without a count that workers had when they left.
        ended: workers that receive no more batches.
        total: number of positions of the epoch that are split, as far as the size is known.
        left_out: number of positions that this split does not hand out, because their batch is too small.
    """

    static: bool

    def __init__(self, number: int, order: DataOrder, opener: int, sizes: LeaseSizes, begin: int = 0) -> None:
        self.order = order
        self.opener = opener
        self.shares: dict[int, list[Lease]] = {}
        self.unused: deque[Lease] = deque()
        self.endless: list[Lease] = []
        self.ended: set[int] = set()
        self.total = 0 if order.size is None else order.size - begin
        self._number = number
        self._sizes = sizes
        self._next = begin  # the first position that is not part of any lease or share
        self._end = None if order.end is None else max(order.end, begin)  # None while the size is not known
        # number of positions that are not handed out, because they are an incomplete joint batch
        self._tail = 0 if order.size is None else order.size - (self._end or 0)
        self.left_out = self._tail

    @property
    def left(self) -> int:
        """Number of positions that no worker has, as far as the size is known."""
        dealt = sum(map(positions, self.shares.values()))
        return max((self._end or 0) - self._next, 0) + dealt + positions(self.unused)

    @abstractmethod
    def grant(
        self, worker: int, returned: deque[Lease], now_s: float, live: Set[int], open_batches: int = 0
    ) -> Grant:
        """Return a worker's next leases, which may be taken from the returned leases.

        Args:
            worker: index of the worker.
            returned: the leases that lost and leaving workers have returned.
            now_s: current time in seconds.
            live: the workers that take part in the job.
            open_batches: number of batches that the worker has received, and that belong to no push yet.
        """

    @abstractmethod
    def cut(self, leases: Iterable[Lease]) -> Rest:
        """Return the part of the epoch that remains if all workers are lost, given the unused leases of the epoch."""

    def end_at(self, size: int) -> None:
        """Record that an order of unknown size has ended after `size` positions."""
        self._end, self._next = size, max(self._next, size)
        nonexistent, left_out = trim(self.unused, self._number, size, drop_last=self.order.drop_last)
        self.total -= nonexistent
        self.left_out += left_out


@stateful()
class StaticSplit(EpochSplit):
    """A static split between the workers that take part when the epoch begins."""

    static = True

    def __init__(
        self,
        number: int,
        order: DataOrder,
        opener: int,
        sizes: LeaseSizes,
        members: Set[int],
        returned: deque[Lease],
        begin: int = 0,
    ) -> None:
        super().__init__(number, order, opener, sizes, begin)
        self.shares = {member: [] for member in sorted(members)}
        self._joint = order.batch * len(members)  # number of positions in a joint batch
        self._deal_returned(returned)
        if not order.balanced:
            self._deal()

    def grant(
        self, worker: int, returned: deque[Lease], now_s: float, live: Set[int], open_batches: int = 0
    ) -> Grant:
        balanced = self.order.balanced
        if balanced and self.shares.get(worker) == []:
            self._deal_rounds()
        share = self.shares.pop(worker, [])
        last = not balanced or not share
        if not last:
            self.shares[worker] = []
        return Grant(tuple(share), last)

    def cut(self, leases: Iterable[Lease]) -> Rest:
        unused = list(leases)
        if self.order.size is None:
            endless = [*self.endless, *(lease for lease in unused if lease.count is None)]
            stop = max((lease.start for lease in endless), default=0) if self._end is None else self._end
            end = stop - stop % self._joint
            ended = with_end(endless, end)
            begin, before = split_rest([*(lease for lease in unused if lease.count is not None), *ended], end)
            return Rest(begin, before, positions(ended) - (end - begin), 0)
        # Positions at the end were left out because they are too few for this number of workers. They are split anew,
        # because a later run may have another number of workers.
        begin, before = split_rest(unused, min(self._next, self.order.size - self.left_out))
        return Rest(begin, before, self.total - (self.order.size - begin), 0)

    def _deal(self) -> None:
        """Give every worker the same number of batches: an equal part of every joint batch."""
        order, parts, begin = self.order, len(self.shares), self._next
        rounds, rest = (None, 0) if order.size is None else divmod(order.size - begin, self._joint)
        if rounds != 0:
            for part, share in enumerate(self.shares.values()):
                start = begin + part * order.batch
                share.append(Lease(self._number, start, order.batch, self._joint, rounds))
        if order.drop_last or rest < parts:
            self.left_out += rest
        else:
            assert rounds is not None
            self._deal_batch(single(self._number, begin + rounds * self._joint, rest))
        self._next = order.size or begin

    def _deal_batch(self, lease: Lease) -> None:
        """Divide the only batch of a lease among all workers."""
        members = sorted(self.shares)
        sizes = divide_evenly(lease.batch, len(members))
        parts: Mapping[int, int] = dict(zip(members, sizes, strict=True))
        if self.order.balanced:
            least = min(self._sizes.least, lease.batch // len(members))
            parts = self._sizes.balanced.divide(members, lease.batch, least=least, most=self.order.most)
        for worker, start in _starts(parts, lease.start):
            self.shares[worker].append(single(lease.epoch, start, parts[worker]))

    def _deal_rounds(self) -> None:
        """Add the next rounds of a balanced epoch to the shares, with sizes that follow the workers' speeds."""
        order, end, sizes = self.order, self._end, self._sizes
        assert end is not None
        members = sorted(self.shares)
        joint = min(self._joint, (order.most or self._joint) * len(members))
        least = min(sizes.least, joint // len(members))
        rounds, left = sizes.rounds(), end - self._next
        if full := min(rounds, left // joint):
            parts = sizes.balanced.of(members, joint, least=least, most=order.most)
            for worker, start in _starts(parts, self._next):
                self.shares[worker].append(Lease(self._number, start, parts[worker], joint, full))
            self._next += full * joint
        elif left:
            self._next = end
            if order.drop_last or left < least * len(members):
                self.left_out += left
            else:
                self._deal_batch(single(self._number, end - left, left))

    def _deal_returned(self, returned: deque[Lease]) -> None:
        """Give every worker the same number of batches from the returned positions."""
        shares = list(self.shares.values())
        left: list[Lease] = []
        most = self.order.most if self.order.balanced else None
        for lease in [part for each in returned for part in _cut(each, most)]:
            dealt, rest = deal(lease, len(shares))
            left += rest
            for share, part in zip(shares, dealt, strict=False):
                share.append(part)
        whole = len(left) // len(shares) * len(shares)
        for number, lease in enumerate(left[:whole]):
            shares[number % len(shares)].append(lease)
        returned.clear()
        for lease in left[whole:]:
            if lease.batch < len(shares) * self._sizes.least:
                returned.append(lease)
            else:
                self._deal_batch(lease)


class DynamicSplit(EpochSplit):
    """A dynamic split."""

    static = False

    def grant(
        self, worker: int, returned: deque[Lease], now_s: float, live: Set[int], open_batches: int = 0
    ) -> Grant:
        order, sizes = self.order, self._sizes
        size = order.batch
        if order.joint:
            members = sorted(live)
            joint = max(sizes.joint(order, len(members)), sizes.least * len(members))
            size = sizes.parts(order, members, joint, steady=True)[worker]
        elif order.balanced:
            members = sorted(live)
            joint = min(size, order.most or size) * len(members)
            least = min(sizes.least, joint // len(members))
            size = sizes.balanced.of(members, joint, least=least, most=order.most)[worker]
        smallest = sizes.smallest(order, size)
        full = size if order.joint else order.batch
        wanted = sizes.batches(worker, now_s, None if self._end is None else self.left / full)
        leases: list[Lease] = []
        for source in (returned, self.unused):
            if source and len(leases) < wanted:
                found, left_out = take_batches(source, smallest, size, wanted - len(leases))
                leases += found
                self.left_out += left_out
        if len(leases) < wanted:
            leases += self._next_leases(smallest, size, wanted - len(leases))
        sizes.lent(worker, sum(lease.count or 0 for lease in leases))
        return Grant(tuple(leases), not leases)

    def cut(self, leases: Iterable[Lease]) -> Rest:
        unused = deque([*leases, *self.unused])
        end = self._next if self._end is None else self._end
        nonexistent, left_out = trim(unused, self._number, end, drop_last=self.order.drop_last)
        begin, before = split_rest(unused, min(self._next, end))
        total = self.total - nonexistent - (end - begin) - self._tail
        return Rest(begin, before, total, self.left_out + left_out - self._tail)

    def _next_leases(self, smallest: int, size: int, wanted: int) -> list[Lease]:
        """Return up to `wanted` batches of `size` positions that no worker has received."""
        start, end = self._next, self._end
        if end is None:
            self._next += wanted * size
            self.total += wanted * size
            return [Lease(self._number, start, size, size, wanted)]
        full = min(wanted, (end - start) // size) if end > start else 0
        leases = [Lease(self._number, start, size, size, full)] if full else []
        self._next = start = start + full * size
        if full < wanted and start < end:
            self._next = end
            drops = self.order.drop_last and not self.order.joint
            if drops or end - start < smallest:
                self.left_out += end - start
            else:
                leases.append(single(self._number, start, end - start))
        return leases


@stateful()
class JointSplit(EpochSplit):
    """A static split whose joint batches are those of a single process.

    Joint batch k has the positions from k B to (k + 1) B - 1, where B is the batch size of the loader. When the first
    worker needs its part of a joint batch, the joint batch is divided among the workers that are live at this time. If
    the joint batch is too small for all of them, because it is the rest of the epoch, some workers receive an empty
    batch, so that all workers make the same number of iterations. Returned positions are divided in the same way, in
    joint batches of their own.

    A worker that has not asked for many of its parts (see `LAG`), for example because its script evaluates, has no part
    in further joint batches until it asks again. The worker keeps its parts of the joint batches that were divided
    before.
    """

    static = True

    def __init__(
        self, number: int, order: DataOrder, opener: int, sizes: LeaseSizes, members: Set[int], begin: int = 0
    ) -> None:
        super().__init__(number, order, opener, sizes, begin)
        self._members = sorted(members)  # the workers among whom the last joint batch was divided
        self._ahead = 0  # largest number of batches that a worker had received and not yet used in a push

    def grant(
        self, worker: int, returned: deque[Lease], now_s: float, live: Set[int], open_batches: int = 0
    ) -> Grant:
        self._ahead = max(self._ahead, open_batches)
        sizes, uneven = self._sizes, False
        wanted = sizes.batches(worker, now_s, self.left / self.order.batch)
        if not self.shares.get(worker):
            rounds = sizes.rounds() if self.order.balanced else min(wanted, MOST_ROUNDS)
            uneven = self._deal(worker, returned, live, rounds)
        share = self.shares.pop(worker, [])
        if not share:
            return Grant((), last=True)
        self.shares[worker] = []
        sizes.lent(worker, _batches(share))
        return Grant(tuple(share), last=False, uneven=uneven)

    def cut(self, leases: Iterable[Lease]) -> Rest:
        size, end = self.order.size, self._end
        assert size is not None
        assert end is not None
        begin, before = split_rest([lease for lease in leases if lease.batch], min(self._next, end))
        return Rest(begin, before, self.total - (size - begin), self.left_out - self._tail)

    def _deal(self, worker: int, returned: deque[Lease], live: Set[int], rounds: int) -> bool:
        """Divide the next joint batches. Return True if the workers differ from those of the last joint batches."""
        order, sizes, end = self.order, self._sizes, self._end
        assert end is not None
        most = LAG + 2 * self._ahead
        members = [
            each
            for each in sorted(live - self.ended)
            if each == worker or _batches(self.shares.get(each, ())) <= most
        ]
        joint = sizes.joint(order, len(members))
        left = end - self._next
        if returned and (pieces := self._pieces(returned, len(members), joint)):
            for member, piece in zip_longest(members, pieces):
                self._share(member, piece or self._nothing())
        elif left > 0:
            full = min(rounds, left // joint)
            total = joint if full else left
            parts = sizes.parts(order, members, total, steady=full > 0)
            for member, start in _starts(parts, self._next):
                size = parts[member]
                part = (
                    Lease(self._number, start, size, joint, full or 1) if size else self._nothing(full or 1)
                )
                self._share(member, part)
            self._next += total * (full or 1)
        else:
            return False
        changed, self._members = members != self._members, members
        return changed

    def _share(self, member: int, lease: Lease) -> None:
        self.shares.setdefault(member, []).append(lease)

    def _nothing(self, count: int = 1) -> Lease:
        """Return a lease of empty batches."""
        return Lease(self._number, self._next, 0, 1, count)

    def _pieces(self, returned: deque[Lease], parts: int, joint: int) -> list[Lease]:
        """Remove a joint batch from the returned positions: at most one batch for each part, larger batches first."""
        least, most = self._sizes.least, self.order.most
        pieces: list[Lease] = []
        total = 0
        while returned and len(pieces) < parts and (not total or total + least <= joint):
            found, left_out = take_batches(returned, least, min(joint - total, most or joint), 1)
            self.left_out += left_out
            pieces += found
            total += positions(found)
        while len(pieces) < parts:
            largest = max(pieces, key=lambda piece: piece.batch, default=None)
            if largest is None or largest.batch < 2 * least:
                break
            pieces.remove(largest)
            half = largest.batch // 2
            pieces += [
                single(largest.epoch, largest.start, half),
                single(largest.epoch, largest.start + half, largest.batch - half),
            ]
        return sorted(pieces, key=lambda piece: (-piece.batch, piece.epoch, piece.start))


def take_batches(leases: deque[Lease], smallest: int, largest: int, most: int) -> tuple[list[Lease], int]:
    """Remove up to `most` batches of at most `largest` positions from some leases.

    Returns:
        A lease for each of these batches, and the number of positions that are left out: those of batches that were
        also removed, but have fewer than `smallest` positions.
    """
    found: list[Lease] = []
    left_out = 0
    while leases and len(found) < most:
        lease = leases.popleft()
        if lease.batch < smallest:
            left_out += positions([lease])
            continue
        if (rest := remove_first(lease, 1)) is not None:
            leases.appendleft(rest)
        size = min(lease.batch, largest)
        if size < lease.batch:
            leases.appendleft(single(lease.epoch, lease.start + size, lease.batch - size))
        found.append(single(lease.epoch, lease.start, size))
    return found, left_out


def _cut(lease: Lease, most: int | None) -> list[Lease]:
    """Cut the batches of a lease into equal parts if they have more than `most` positions.

    An earlier run may have had a larger maximum, or none.
    """
    if most is None or lease.batch <= most:
        return [lease]
    sizes = dict(enumerate(divide_evenly(lease.batch, -(-lease.batch // most))))
    return [
        Lease(lease.epoch, start, sizes[part], lease.stride, lease.count)
        for part, start in _starts(sizes, lease.start)
    ]


def _batches(leases: Iterable[Lease]) -> int:
    """Return the number of batches in some leases, without the leases that have no count."""
    return sum(lease.count or 0 for lease in leases)


def _starts(sizes: Mapping[int, int], start: int) -> Iterator[tuple[int, int]]:
    """Yield the first position of each worker's part of a joint batch that begins at `start`."""
    for worker, size in sizes.items():
        yield worker, start
        start += size
