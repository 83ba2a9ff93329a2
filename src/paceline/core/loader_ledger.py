"""The ledger of one loader: how its epochs are split between the workers, and the state of every position.

The coordinator hands out the batches of each epoch and keeps account of every position. A position is in exactly one
of these states:

    left        no worker has it: it has not been handed out, or a script has ended the epoch without using it
    leased      a worker has received it, and no push that contains it is known to be complete
    used        it was part of a push that every shard has received
    torn        it was part of a push that only some shards received before the worker was lost
    returned    a lost worker had received it and has not used it
    left out    it belongs to an incomplete batch at the end of the epoch, which is not handed out

Returned positions are handed out again before any others: in the same epoch if its split is dynamic and a worker
still draws from the epoch, else in a later one. What a script has not used is handed out again in the same epoch.

With a static split, all workers that take part when the epoch begins have equal shares of every joint batch. With a
dynamic split, a worker receives a lease of one or several batches whenever it has none left. The number of batches
follows the worker's speed and shrinks toward the end of the epoch (*weighted factoring*), so that all workers end the
epoch at about the same time.

If the order is balanced, the sizes of the workers' batches follow their speeds (see `paceline.core.batch_sizes`).
With a dynamic split, a worker's next lease has batches of its present size. With a static split, the shares are dealt
a few rounds at a time, when the first worker needs them. So the sizes in a round are settled before any worker takes
its batch of the round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set

import msgspec

from ..errors import ConfigurationError, ProtocolError
from .batch_sizes import BatchSizes
from .lease import Lease, Order, deal, divide, order_difference, positions, remove_first, single

__all__ = ["Grant", "LoaderLedger", "PositionCounts"]

LEASE_S = 0.25  # maximum time for which a lease of several batches lasts
MOST_ROUNDS = 4  # maximum number of rounds of a balanced, static split that are dealt at a time
MOST_BATCHES = 16  # maximum number of batches in a lease
PART = 0.5  # maximum part of the remaining time of the epoch for which a lease of several batches lasts
PACE_WEIGHT = 0.25  # weight of the latest observation in a worker's mean time per batch


class Grant(msgspec.Struct, frozen=True):
    """The answer to a worker that needs data.

    Attributes:
        leases: the batches that the worker may use, in order.
        last: True if the worker receives no more batches in this epoch.
    """

    leases: tuple[Lease, ...]
    last: bool


class PositionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of positions in each state, over all epochs of a loader. See the docstring of the module."""

    total: int
    left: int
    leased: int
    used: int
    torn: int
    returned: int
    left_out: int


class _Epoch:
    """An epoch that some workers have begun and not all workers have ended."""

    def __init__(self, order: Order, opener: int, *, static: bool) -> None:
        self.order = order
        self.opener = opener
        self.static = static
        # The first position that, with a dynamic split, no worker has received, or, with a static split, is not part
        # of the shares.
        self.next = 0
        self.unused: deque[Lease] = deque()  # dynamic split: what scripts have not used
        self.end = order.size  # None while the size is not known
        # Static split: worker -> leases that it has yet to receive, for each worker that may receive more.
        self.shares: dict[int, list[Lease]] = {}
        self.joint = 0  # static split: number of positions in a joint batch
        self.ended: set[int] = set()  # workers that receive no more batches

    @property
    def left(self) -> int:
        """Number of positions that no worker has received, as far as the size is known."""
        shared = sum(map(positions, self.shares.values()))
        return max((self.end or 0) - self.next, 0) + positions(self.unused) + shared


class _Pace:
    """The mean time for which a worker uses a batch."""

    __slots__ = ("asked_s", "batch_s", "batches")

    def __init__(self) -> None:
        self.asked_s = 0.0
        self.batches = 0  # number of batches in the last lease; 0 if the worker has none
        self.batch_s: float | None = None

    @property
    def rate(self) -> float:
        return 1.0 / self.batch_s if self.batch_s else 0.0

    def ask(self, now_s: float) -> None:
        """Record that the worker has used its last lease."""
        if self.batches:
            batch_s = max(now_s - self.asked_s, 1e-9) / self.batches
            usual_s = self.batch_s if self.batch_s is not None else batch_s
            self.batch_s = usual_s + (batch_s - usual_s) * PACE_WEIGHT
        self.asked_s, self.batches = now_s, 0


class LoaderLedger:
    """The ledger of one loader."""

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}
        self._opened = 0  # number of the last epoch that was opened, plus 1
        self._order: Order | None = None  # the order of this epoch
        self._current: dict[int, int] = {}  # worker -> the epoch that it has begun last
        self._returned: deque[Lease] = deque()  # each lease has a count
        self._held: dict[int, deque[Lease]] = {}  # worker -> its leases that are not settled, in order
        self._settled: dict[int, int] = {}  # worker -> number of batches that are settled
        self._paces: dict[int, _Pace] = {}
        self._rate = 0.0  # sum of the workers' rates, in batches per second
        self._sizes = BatchSizes()
        self._least = 1  # minimum size of a batch of a balanced order
        self._total = self._left = self._used = self._torn = self._left_out = 0

    @property
    def last_order(self) -> tuple[Order, int]:
        assert self._order is not None
        return self._order, self._opened

    # -- leases -------------------------------------------------------------------------------------------

    def has_leases(self, worker: int) -> bool:
        return bool(self._held.get(worker)) or any(worker in epoch.shares for epoch in self._epochs.values())

    def require_plausible(
        self, worker: int, epoch: int, order: Order, drawn: int, committed: int, end: tuple[int, int] | None
    ) -> None:
        """Raise `ProtocolError` if a request contradicts the worker's earlier requests, or itself."""
        current, settled = self._current.get(worker, -1), self._settled.get(worker, 0)
        if epoch < current:
            raise ProtocolError(
                f"worker {worker} requests data of epoch {epoch}, after data of epoch {current}"
            )
        if not settled <= committed <= drawn:
            raise ProtocolError(
                f"worker {worker} has drawn {drawn} batches and pushed {committed}, expected at least {settled} "
                "pushed batches, and no more than it has drawn"
            )
        if end is not None and order.size is not None:
            raise ProtocolError(f"worker {worker} reports the end of an order whose size is known")

    def settle(self, worker: int, least: int, most: int) -> None:
        """Record that a worker's batches before number `least` are used, and those from there to `most` are torn."""
        self._used += self._remove(worker, least)
        self._torn += self._remove(worker, most)

    def observe(self, worker: int, times: Iterable[tuple[int, float]], least: int) -> None:
        """Record the times of a worker's latest batches, and the minimum size of its next batches."""
        for samples, seconds in times:
            self._sizes.observe(worker, samples, seconds)
        self._least = max(self._least, least)

    def begin(
        self, worker: int, epoch: int, order: Order, drawn: int, live: Set[int], lockstep: bool
    ) -> None:
        """Let a worker begin an epoch, if it has not begun it already."""
        if epoch > self._current.get(worker, -1):
            self._end(worker, drawn - self._settled.get(worker, 0), live)
            self._current[worker] = epoch
            if epoch >= self._opened:
                self._open(epoch, order, worker, live, lockstep)
        state = self._epochs.get(epoch)
        if state is None:
            return
        if difference := order_difference(order, state.order, static=state.static):
            raise ConfigurationError(
                f"distribute() cannot split the data: worker {worker}'s loader differs from worker {state.opener}'s: "
                f"{difference}."
            )

    def grant(self, worker: int, epoch: int, order: Order, now_s: float, live: Set[int]) -> Grant:
        """Return a worker's next leases."""
        state = self._epochs.get(epoch)
        if state is None or worker in state.ended:
            # The worker asks again for returned positions, or has joined late.
            leases = self._cut(self._returned, order, order.batch, 1)
            last = not leases
        elif state.static:
            if worker in state.shares and not state.shares[worker] and state.order.balanced:
                self._deal_rounds(epoch, state)
            leases = state.shares.pop(worker, [])
            last = not state.order.balanced or not leases
            if not last:
                state.shares[worker] = []
        else:
            leases = self._next_leases(worker, epoch, state, now_s, live)
            last = not leases
        self._held.setdefault(worker, deque()).extend(leases)
        if last and state is not None:
            self._end_epoch(worker, epoch, state, live)
        return Grant(tuple(leases), last)

    def trim(self, worker: int, epoch: int, size: int) -> None:
        """Remove the positions that do not exist, because the order of an epoch has only `size` positions."""
        state = self._epochs.get(epoch)
        if state is not None and state.order.size is None:
            state.end = size
            if state.static:
                state.next = size
        drop_last = state is not None and state.order.drop_last
        for leases in (self._held.get(worker), self._returned, state.unused if state is not None else None):
            for _ in range(len(leases or ())):
                assert leases is not None
                lease = leases.popleft()
                leases.extend(self._trimmed(lease, size, drop_last) if lease.epoch == epoch else [lease])

    def _trimmed(self, lease: Lease, size: int, drop_last: bool) -> list[Lease]:
        """Return a lease without the positions from `size` on, and without an incomplete batch if `drop_last`."""
        if lease.count is None or lease.stride != lease.batch:
            return [lease]  # a share of a static split; the worker itself ends it
        existing = min(max(size - lease.start, 0), lease.batch * lease.count)
        self._total -= lease.batch * lease.count - existing
        full, rest = divmod(existing, lease.batch)
        trimmed = [msgspec.structs.replace(lease, count=full)] if full else []
        start = lease.start + full * lease.batch
        if drop_last:
            self._left_out += rest
        elif rest:
            trimmed.append(single(lease.epoch, start, rest))
        return trimmed

    def leave(self, worker: int, live: Set[int], *, lost: bool) -> None:
        """Take back everything that a worker has and has not used, and forget the worker."""
        unused = self._take_back(worker, 0)
        unused += [lease for state in self._epochs.values() for lease in state.shares.pop(worker, [])]
        if lost:
            # A lease without a count cannot be returned, because its size is not known.
            self._returned.extendleft(lease for lease in reversed(unused) if lease.count is not None)
        else:
            self._leave_unused(unused)
        for number, state in list(self._epochs.items()):
            self._end_epoch(worker, number, state, live)
        self._sizes.forget(worker)
        self._rate -= self._paces[worker].rate if worker in self._paces else 0.0
        for known in (self._current, self._held, self._settled, self._paces):
            known.pop(worker, None)

    def counts(self) -> PositionCounts:
        return PositionCounts(
            total=self._total,
            left=self._left + sum(epoch.left for epoch in self._epochs.values()),
            leased=sum(map(positions, self._held.values())),
            used=self._used,
            torn=self._torn,
            returned=positions(self._returned),
            left_out=self._left_out,
        )

    def _remove(self, worker: int, until: int) -> int:
        """Remove a worker's batches before number `until` from its leases. Return their number of positions."""
        settled, held = self._settled.get(worker, 0), self._held.get(worker)
        removed = 0
        while held and settled < until:
            lease = held[0]
            batches = until - settled if lease.count is None else min(until - settled, lease.count)
            removed += batches * lease.batch
            if lease.count is None:  # positions of an epoch of unknown size are counted when they are used
                self._total += batches * lease.batch
            rest = remove_first(lease, batches)
            if rest is None:
                held.popleft()
            else:
                held[0] = rest
            settled += batches
        self._settled[worker] = max(settled, until)
        return removed

    def _take_back(self, worker: int, keep: int) -> list[Lease]:
        """Take back a worker's leases except for its next `keep` batches. Return what was taken back."""
        kept: deque[Lease] = deque()
        returned: list[Lease] = []
        for lease in self._held.get(worker, ()):
            batches = keep if lease.count is None else min(keep, lease.count)
            if batches:
                kept.append(msgspec.structs.replace(lease, count=batches))
                if lease.count is None:
                    self._total += batches * lease.batch
            keep -= batches
            rest = remove_first(lease, batches)
            if rest is not None:
                returned.append(rest)
        self._held[worker] = kept
        return returned

    def _leave_unused(self, unused: Iterable[Lease]) -> None:
        """Make positions that a script has not used available to the other workers, in the same epoch only."""
        for lease in unused:
            state = self._epochs.get(lease.epoch)
            if state is None or state.static:
                self._left += positions([lease])
            else:
                state.unused.append(lease)

    # -- epochs -------------------------------------------------------------------------------------------

    def _open(self, number: int, order: Order, opener: int, live: Set[int], lockstep: bool) -> None:
        static = order.split == "static" or (order.split == "auto" and lockstep)
        state = self._epochs[number] = _Epoch(order, opener, static=static)
        self._opened, self._order = number + 1, order
        self._total += order.size or 0
        if static:
            members = sorted(live)
            shares: dict[int, list[Lease]] = {member: [] for member in members}
            self._deal_returned(list(shares.values()))
            state.shares = shares
            state.joint = order.batch * len(members)
            if not order.balanced:
                self._deal(list(shares.values()), number, order)
                state.next = order.size or 0

    def _end(self, worker: int, keep: int, live: Set[int]) -> None:
        """End the current epoch of a worker that begins a later one. The worker keeps its next `keep` batches."""
        number = self._current.get(worker, -1)
        state = self._epochs.get(number)
        self._leave_unused(self._take_back(worker, keep))
        if worker in self._paces:
            self._paces[worker].batches = 0  # the time between two epochs does not count
        if state is not None:
            self._end_epoch(worker, number, state, live)

    def _end_epoch(self, worker: int, number: int, state: _Epoch, live: Set[int]) -> None:
        """Record that a worker receives no more batches of an epoch. Close the epoch if it was the last one."""
        state.ended.add(worker)
        self._left += positions(state.shares.pop(worker, ()))
        if len(state.ended) >= len(live) and live <= state.ended:
            del self._epochs[number]
            self._left += state.left

    def _deal(self, shares: list[list[Lease]], number: int, order: Order) -> None:
        """Give every share the same number of batches of an epoch: an equal part of every joint batch."""
        batch, parts = order.batch, len(shares)
        joint = batch * parts
        rounds, rest = (None, 0) if order.size is None else divmod(order.size, joint)
        if rounds != 0:
            for part, share in enumerate(shares):
                share.append(Lease(number, part * batch, batch, joint, rounds))
        if order.drop_last or rest < parts:
            self._left_out += rest
        else:
            assert rounds is not None
            for share, lease in zip(shares, divide(single(number, rounds * joint, rest), parts), strict=True):
                share.append(lease)

    def _deal_rounds(self, number: int, state: _Epoch) -> None:
        """Add the next rounds of a balanced epoch to the shares, with sizes that follow the workers' speeds."""
        order, end = state.order, state.end
        assert end is not None
        members = sorted(state.shares)
        joint = min(state.joint, (order.most or state.joint) * len(members))
        least = min(self._least, joint // len(members))
        rounds, left = self._rounds(), end - state.next
        if full := min(rounds, left // joint):
            sizes = self._sizes.of(members, joint, least=least, most=order.most)
            for worker, start in _starts(sizes, state.next):
                state.shares[worker].append(Lease(number, start, sizes[worker], joint, full))
            state.next += full * joint
        elif left:
            state.next = end
            if order.drop_last or left < least * len(members):
                self._left_out += left
            else:
                sizes = self._sizes.divide(members, left, least=least, most=order.most)
                for worker, start in _starts(sizes, end - left):
                    state.shares[worker].append(single(number, start, sizes[worker]))

    def _rounds(self) -> int:
        """Return the number of rounds of a balanced epoch to deal at a time."""
        round_s = self._sizes.round_s
        return max(1, min(MOST_ROUNDS, int(LEASE_S / round_s))) if round_s else 1

    def _deal_returned(self, shares: list[list[Lease]]) -> None:
        """Give every share the same number of batches from the returned positions."""
        left: list[Lease] = []
        for returned in self._returned:
            dealt, rest = deal(returned, len(shares))
            left += rest
            for share, lease in zip(shares, dealt, strict=False):
                share.append(lease)
        whole = len(left) // len(shares) * len(shares)
        for number, lease in enumerate(left[:whole]):
            shares[number % len(shares)].append(lease)
        self._returned = deque(lease for lease in left[whole:] if lease.batch < len(shares))
        for returned in left[whole:]:
            if returned.batch >= len(shares):
                for share, lease in zip(shares, divide(returned, len(shares)), strict=True):
                    share.append(lease)

    def _next_leases(
        self, worker: int, number: int, state: _Epoch, now_s: float, live: Set[int]
    ) -> list[Lease]:
        """Return the next leases of a dynamic split: returned positions first, then new ones."""
        order = state.order
        size = order.batch
        if order.balanced:
            members = sorted(live)
            joint = min(size, order.most or size) * len(members)
            least = min(self._least, joint // len(members))
            size = self._sizes.of(members, joint, least=least, most=order.most)[worker]
        pace = self._paces.setdefault(worker, _Pace())
        before = pace.rate
        pace.ask(now_s)
        self._rate += pace.rate - before
        wanted = self._batches(pace, state)
        leases = self._cut(self._returned, order, size, wanted)
        leases += self._cut(state.unused, order, size, wanted - len(leases))
        if wanted > len(leases):
            leases += self._new_leases(number, state, size, wanted - len(leases))
        pace.batches = sum(lease.count or 0 for lease in leases)
        return leases

    def _cut(self, leases: deque[Lease], order: Order, largest: int, most: int) -> list[Lease]:
        """Remove up to `most` batches of at most `largest` positions from some leases, as leases of one batch."""
        smallest = self._smallest(order, largest)
        found: list[Lease] = []
        while leases and len(found) < most:
            lease = leases.popleft()
            if lease.batch < smallest:
                self._left_out += positions([lease])
                continue
            if (rest := remove_first(lease, 1)) is not None:
                leases.appendleft(rest)
            size = min(lease.batch, largest)
            if size < lease.batch:
                leases.appendleft(single(lease.epoch, lease.start + size, lease.batch - size))
            found.append(single(lease.epoch, lease.start, size))
        return found

    def _smallest(self, order: Order, largest: int) -> int:
        """Return the size of the smallest batch that is handed out, if full batches have size `largest`."""
        if order.balanced:
            return min(self._least, largest)
        return largest if order.drop_last else 1

    def _new_leases(self, number: int, state: _Epoch, batch: int, wanted: int) -> list[Lease]:
        """Return up to `wanted` batches of size `batch` that no worker has received."""
        start, end = state.next, state.end
        if end is None:
            state.next += wanted * batch
            self._total += wanted * batch
            return [Lease(number, start, batch, batch, wanted)]
        full = min(wanted, (end - start) // batch) if end > start else 0
        leases = [Lease(number, start, batch, batch, full)] if full else []
        state.next = start = start + full * batch
        if full < wanted and start < end:
            state.next = end
            if state.order.drop_last or end - start < self._smallest(state.order, batch):
                self._left_out += end - start
            else:
                leases.append(single(number, start, end - start))
        return leases

    def _batches(self, pace: _Pace, state: _Epoch) -> int:
        """Return the number of batches for a worker's next lease."""
        if pace.batch_s is None or self._rate <= 0.0:
            return 1
        batches = min(MOST_BATCHES, LEASE_S / pace.batch_s)
        if state.end is not None:
            remaining_s = state.left / state.order.batch / self._rate
            batches = min(batches, PART * remaining_s / pace.batch_s)
        return max(1, int(batches))


def _starts(sizes: Mapping[int, int], start: int) -> Iterator[tuple[int, int]]:
    """Yield the first position of each worker's part of a joint batch that begins at `start`."""
    for worker, size in sizes.items():
        yield worker, start
        start += size
