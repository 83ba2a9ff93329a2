"""Leases: batches of an epoch's order that the coordinator hands out to a worker.

The order of an epoch is a permutation of the items of a dataset. Every worker can compute this order from the run's
seed and the number of the epoch. So the coordinator and the workers exchange *positions* in the order, not indices of
items.

In the worker, `Drawn` decides which of the batches that a script has drawn belong to its next push.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from ..state import stateful
from ..sync.events import Number

Split = Literal["auto", "dynamic", "static"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""The ways to divide an epoch: as suits the sync model ("auto"), on demand ("dynamic"), in equal shares ("static")."""

BatchSizing = Literal["equal", "balanced"]
BATCH_SIZINGS: tuple[BatchSizing, ...] = get_args(BatchSizing)
"""The ways to size batches: all workers have batches of the same size, or the sizes follow the workers' speeds."""


class DataOrder(msgspec.Struct, frozen=True, array_like=True):
    """The properties of an epoch on which all workers must agree before the epoch is split between them.

    Attributes:
        size: number of positions in the epoch; None if it is not known in advance.
        batch: number of positions in a full batch of one worker or, if `joint` is True, in a full joint batch of all
            workers.
        drop_last: True to leave out a last batch that is not full.
        split: how the epoch is split: "dynamic" hands out each batch when a worker needs it, "static" gives all
            workers equal shares, and "auto" is "static" if the sync model keeps all workers in lockstep, else
            "dynamic".
        digest: hash of the first items of the order, to detect workers with different orders.
        balanced: True if the sizes of the workers' batches follow the workers' speeds. If the split is static, the size
            of a joint batch stays constant: `batch` times the number of workers.
        most: maximum size of a worker's batch if `balanced` or `joint` is True; None for no maximum.
        joint: True if `batch` is the size of a joint batch, which is divided among the live workers. Only for an order
            of known size.
    """

    size: Number | None
    batch: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    drop_last: bool
    split: Split
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    balanced: bool = False
    most: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None = None
    joint: bool = False

    def __post_init__(self) -> None:
        if self.balanced and self.size is None:
            raise ValueError("an order of unknown size cannot be balanced")
        if self.joint and self.size is None:
            raise ValueError("the joint batches of an order of unknown size cannot be divided")

    @property
    def end(self) -> int | None:
        """The first position that is never handed out, whichever workers take part; None if the size is unknown."""
        if self.size is None or not (self.joint and self.drop_last):
            return self.size
        return self.size - self.size % self.batch


class Batch(NamedTuple):
    """One batch: `size` positions in the order of an epoch, from `start` on.

    If the size of the order was not known in advance, the batch may extend beyond the end of the order; the batch then
    has only the positions that exist. If the order has fewer than `least_size` positions, the batch does not exist.
    """

    epoch: int
    start: int
    size: int
    least_size: int


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Batches that a worker may use. Batch i, counted from 0, begins at position `start + i * stride`.

    Attributes:
        epoch: the epoch to whose order the positions refer.
        start: first position of the first batch.
        batch: number of positions in each batch; 0 if the worker has no part in a joint batch of the other workers.
        stride: distance between the first positions of two consecutive batches.
        count: number of batches; None if the lease continues until the end of the order, because the size of the
            order is not known in advance. A batch of such a lease exists only if its whole joint batch exists. So all
            workers have the same number of batches.
    """

    epoch: int
    start: int
    batch: int
    stride: int
    count: int | None = 1


class Pushed(NamedTuple):
    """The batches that a worker's script had drawn from a loader before the worker's last push.

    Attributes:
        batches: number of these batches.
        skipped: number of positions in these batches that the script has skipped, so that the positions belong to no
            push.
    """

    batches: int
    skipped: int

    @property
    def packed(self) -> PackedPushed:
        """This value in the form in which it is sent: usually a single number, because scripts rarely skip a batch."""
        return (self.batches, self.skipped) if self.skipped else self.batches

    @classmethod
    def unpack(cls, packed: PackedPushed) -> Pushed:
        return cls(packed, 0) if isinstance(packed, int) else cls(*packed)


# The pair is not a `tuple[Number, Number]`: msgspec 0.22 crashes in the garbage collector if a union contains
# a tuple of fixed length.
PackedPushed = Number | Annotated[tuple[Number, ...], msgspec.Meta(min_length=2, max_length=2)]


def remove_first(lease: Lease, batches: int) -> Lease | None:
    """Return a lease without its first `batches` batches; None if no batches are left."""
    if not batches:
        return lease
    if lease.count is not None and batches >= lease.count:
        return None
    return msgspec.structs.replace(
        lease,
        start=lease.start + batches * lease.stride,
        count=None if lease.count is None else lease.count - batches,
    )


def nth_batch(lease: Lease, number: int) -> Batch:
    """Return a batch of a lease; the batches are counted from 0."""
    start = lease.start + number * lease.stride
    if lease.count is not None:
        return Batch(lease.epoch, start, lease.batch, start + 1)
    return Batch(lease.epoch, start, lease.batch, (start // lease.stride + 1) * lease.stride)


def single(epoch: int, start: int, size: int) -> Lease:
    """Return a lease of one batch."""
    return Lease(epoch, start, size, size)


def positions(leases: Iterable[Lease]) -> int:
    """Return the number of positions in some leases. Leases whose `count` is None are ignored."""
    return sum(lease.batch * lease.count for lease in leases if lease.count is not None)


def trim(leases: deque[Lease], epoch: int, size: int, *, drop_last: bool) -> tuple[int, int]:
    """Remove from the leases of an epoch all positions that do not exist, because the order has only `size` positions.

    If `drop_last` is True, also remove a batch that is incomplete without these positions. Shares of a static split
    stay as they are, because each worker ends its share itself.

    Returns:
        The number of removed positions that do not exist, and the number of removed positions that exist.
    """
    nonexistent = left_out = 0
    for _ in range(len(leases)):
        lease = leases.popleft()
        if lease.epoch != epoch or lease.count is None or lease.stride != lease.batch:
            leases.append(lease)
            continue
        existing = min(max(size - lease.start, 0), lease.batch * lease.count)
        nonexistent += lease.batch * lease.count - existing
        full, rest = divmod(existing, lease.batch)
        if full:
            leases.append(msgspec.structs.replace(lease, count=full))
        if drop_last:
            left_out += rest
        elif rest:
            leases.append(single(epoch, lease.start + full * lease.batch, rest))
    return nonexistent, left_out


def with_end(leases: Iterable[Lease], size: int) -> list[Lease]:
    """Set the `count` of leases without a count, now that the size of the order is known. Leave out empty leases."""
    rounds = [(lease, size // lease.stride - lease.start // lease.stride) for lease in leases]
    return [msgspec.structs.replace(lease, count=count) for lease, count in rounds if count > 0]


def split_rest(leases: Collection[Lease], end: int) -> tuple[int, list[Lease]]:
    """Find the longest range of positions up to `end` (exclusive) that the given leases of one epoch fully cover.

    Args:
        leases: leases of positions before `end`. No two leases contain the same position.
        end: a position.

    Returns:
        The first position of this range, and leases of the positions before the range.

    >>> split_rest([Lease(0, 4, 2, 4, 3), Lease(0, 10, 2, 4, 2), Lease(0, 16, 3, 3, 1)], 19)
    (8, [Lease(epoch=0, start=4, batch=2, stride=4, count=1)])
    """
    contained = range(end + 1)
    begin = bisect_left(
        contained,
        True,
        key=lambda start: sum(_positions_from(lease, start) for lease in leases) == end - start,
    )
    before = [
        (lease, min(max(-((lease.start - begin) // lease.stride), 0), lease.count or 0)) for lease in leases
    ]
    return begin, [msgspec.structs.replace(lease, count=count) for lease, count in before if count]


def _positions_from(lease: Lease, start: int) -> int:
    """Return the number of positions of a lease that lie at or after the position `start`."""
    assert lease.count is not None
    gone, part = divmod(max(start - lease.start, 0), lease.stride)
    return max(lease.count - gone, 0) * lease.batch - (min(part, lease.batch) if gone < lease.count else 0)


def deal(lease: Lease, parts: int) -> tuple[list[Lease], list[Lease]]:
    """Deal the batches of a lease in rounds.

    Return one lease for each part ([] if there is no full round), and one lease for each remaining batch.
    """
    assert lease.count is not None
    rounds, more = divmod(lease.count, parts)
    stride = lease.stride
    dealt = [
        Lease(lease.epoch, lease.start + part * stride, lease.batch, parts * stride, rounds)
        for part in range(parts if rounds else 0)
    ]
    first = lease.start + rounds * parts * stride
    return dealt, [single(lease.epoch, first + batch * stride, lease.batch) for batch in range(more)]


def divide_evenly(total: int, parts: int) -> list[int]:
    """Divide a number of samples into parts whose sizes differ by at most 1."""
    size, more = divmod(total, parts)
    return [size + (part < more) for part in range(parts)]


def order_difference(order: DataOrder, other: DataOrder, *, static: bool) -> str:
    """Return how an order differs from another worker's order; "" if both can be split together."""
    if order.size != other.size:
        return f"it has {_size(order)} items instead of {_size(other)}"
    if order.digest != other.digest:
        return (
            "its order is different. The sampler must draw from torch's default generator, or yield the same order "
            "in every worker"
        )
    if (static or order.balanced) and order.batch != other.batch:
        need = (
            "batch='balanced' needs equal sizes" if order.balanced else "Unequal sizes need split='dynamic'"
        )
        return f"its batch size is {order.batch} instead of {other.batch}. {need}"
    theirs = _settings(other)
    for name, mine in _settings(order).items():
        if mine != theirs[name]:
            return f"its {name} is {mine!r} instead of {theirs[name]!r}"
    return ""


def _settings(order: DataOrder) -> dict[str, object]:
    """Return the settings of a loader, by their names in `DataLoader` and `distribute`."""
    return {
        "drop_last": order.drop_last,
        "split": order.split,
        "batch": "balanced" if order.balanced else "equal",
        "max_batch": order.most,
        "joint_batch": order.joint,
    }


def _size(order: DataOrder) -> str:
    return "an unknown number of" if order.size is None else str(order.size)


# -- What becomes of the batches that a script has drawn from one loader: which of them belong to the next push
#
# A batch that was drawn is *undecided* until a gradient is accumulated. Then the batch is either *used*, so it belongs
# to the next push, or *skipped*, so it belongs to no push. The batch that was drawn last is used. An earlier undecided
# batch is used if its forward pass is a part of the gradient, because the script may have added up the losses of
# several batches. If no forward pass with the earlier batch was seen, the batch is used if the script still holds it,
# because the script may have collected several batches. Otherwise, the earlier batch is skipped: for example, the
# script has caught an exception, or the loss was not finite.
#
# If accumulated gradients are dropped, their batches are undecided again. If a script accumulates no gradient
# before a push, for example because it assigns the gradients itself, the push contains all undecided batches.


@stateful()
@dataclass(slots=True)
class DrawnBatch:
    """A batch that a script has drawn.

    Attributes:
        positions: number of positions in the batch.
        samples: number of samples in the batch; None if it is unknown.
        is_held: function that returns True if the script may still use the batch. After it has returned False once, it
            always returns False.
        passed: True if a push has followed, so that `Drawn.pushed` counts the batch.
        watched: True if a forward pass with the batch was seen, so that `contributes` is known.
        contributes: True if this forward pass is a part of an accumulated gradient.
    """

    positions: int
    samples: int | None
    is_held: Callable[[], bool]
    passed: bool = False
    watched: bool = False
    contributes: bool = False


MOST_BATCHES = 1024
"""Maximum number of undecided batches. A script may draw batches and never push; if it draws more than this number, all
undecided batches are joined into one batch, which the script is assumed to hold no longer."""


@stateful()
class Drawn:
    """The batches that a script has drawn from one loader.

    Attributes:
        count: number of batches that the script has drawn.
        pushed: what the script had drawn before its last push.
    """

    def __init__(self) -> None:
        self.count = 0
        self.pushed: Pushed = Pushed(0, 0)
        self._undecided: list[DrawnBatch] = []
        # Batches for which it was decided since the last push whether the gradient uses them.
        self._used: list[DrawnBatch] = []
        self._skipped: list[DrawnBatch] = []

    def draw(self, batch: DrawnBatch) -> None:
        """Record that the script has drawn a batch."""
        self.count += 1
        if len(self._undecided) >= MOST_BATCHES:
            self._undecided[:] = [_joined(self._undecided)]
        self._undecided.append(batch)

    def accumulate(self) -> None:
        """Decide which of the undecided batches are used, because a gradient is accumulated."""
        decided = self._undecided[:]
        del self._undecided[: len(decided)]  # a thread of the script may draw another batch meanwhile
        for batch in decided[:-1]:
            used = batch.contributes if batch.watched else batch.is_held()
            (self._used if used else self._skipped).append(batch)
        self._used += decided[-1:]

    def drop(self) -> None:
        """Make the used batches undecided again, because their gradients are dropped."""
        for batch in self._used:
            batch.contributes = False
        self._undecided[:0] = self._used
        self._used.clear()

    def samples(self, *, accumulated: bool) -> int | None:
        """Return the number of samples in the next push; None if it is unknown, or if there is no batch.

        Args:
            accumulated: False if no gradient has been accumulated since the last push.
        """
        batches = self._used if accumulated else [*self._used, *self._undecided]
        return _samples_of(batches) if batches else None

    def push(self, *, accumulated: bool) -> int:
        """Record a push. Return the number of positions that have been skipped since the last push.

        Args:
            accumulated: False if no gradient has been accumulated since the last push.
        """
        skipped = sum(batch.positions for batch in self._skipped)
        self._used.clear()
        self._skipped.clear()
        if not accumulated:
            self._undecided.clear()
        for batch in self._undecided:
            batch.passed = True
        self.pushed = Pushed(self.count, self.pushed.skipped + skipped)
        return skipped

    def end(self) -> Pushed:
        """Return the final value of `pushed`, when the script has ended.

        In the result, batches that were undecided at the last push count as skipped.
        """
        batches = [*self._undecided, *self._used, *self._skipped]
        passed = sum(batch.positions for batch in batches if batch.passed)
        return self.pushed._replace(skipped=self.pushed.skipped + passed)


def _samples_of(batches: Sequence[DrawnBatch]) -> int | None:
    counts = [batch.samples for batch in batches if batch.samples is not None]
    return sum(counts) if len(counts) == len(batches) else None


def _joined(batches: Sequence[DrawnBatch]) -> DrawnBatch:
    return DrawnBatch(
        sum(batch.positions for batch in batches),
        _samples_of(batches),
        lambda: False,
        all(batch.passed for batch in batches),
    )
