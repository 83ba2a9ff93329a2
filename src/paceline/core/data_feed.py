"""The data of one worker, without I/O: the leases that it has, and what its script has drawn from them.

A batch is *taken* when the sampler of the loader receives it, *drawn* when the loader passes it to the script, and
*committed* when every shard has answered a push that was made after the batch was drawn. A loader that prepares batches
in processes of its own takes batches long before they are drawn. `lease.Drawn` decides which of the drawn batches
belong to a push.

A script may iterate over its loader on a thread of its own. So one thread may take batches while another thread draws,
pushes or receives leases. Each of these operations uses attributes of its own, except for the queue of leases: `take`
removes from one end what `handle` has appended at the other end. Only one thread at a time may call `handle` and the
methods that return requests; see `Session.exchange`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..state import stateful
from .batch_sizes import step_of
from .lease import Batch, DataOrder, Drawn, DrawnBatch, Lease, PackedPushed, nth_batch
from .messages import (
    MOST_TIMES,
    DataGranted,
    DataRequested,
    EntryRequested,
    EpochReached,
    LoopEntered,
    LoopLimits,
    LoopPosition,
    StatesDecided,
)
from .requests import COORDINATOR, Request, Send


class Work(NamedTuple):
    """An amount of data, on which the time to compute a gradient depends.

    Attributes:
        batches: number of batches; more than one if a script accumulates gradients.
        full_batches: the same amount of data, expressed as a number of the loader's full batches.
    """

    batches: int
    full_batches: float


ONE_BATCH = Work(1, 1.0)


@stateful(history="accumulations begins_pass _passes")
class DataFeed:
    """The data of one worker, for all loaders that its script distributes.

    Attributes:
        used: True if the script has set `samples`, or has begun an epoch of a distributed loader.
        weight: weight of the next push in a mean; None if the weight is the push's number of samples. May be set.
        again: True while the script makes one more pass over its loaders, in which it receives only positions that
            lost workers had not used.
        stopped: numbers of the training loops that a worker has stopped. See `paceline.epochs`.
        entered: the answer to the last `enter`.
        states_wanted: True if the worker must send the states of its tracked objects, according to the answer to the
            last `reach`.
        pushed: for each loader, what the script had drawn before its last push. See `Commit.drawn`.
        least: minimum size of a batch of a balanced order, or of a part of a joint batch. May be set.
        accelerated: True if the worker computes on an accelerator, which compiles or tunes its programs for each new
            size of a batch. May be set.
        workers: number of workers of the job. May be set.
        newest: the batch that the script has drawn last.
        accumulations: number of times that the script has accumulated a gradient for batches that it had drawn.
        begins_pass: True if the last push is the first one of a pass over its loader.
    """

    def __init__(self) -> None:
        self.used = False
        self.weight: float | None = None
        self.again = False
        self.stopped: set[int] = set()
        self.entered = LoopEntered()
        self.states_wanted = False
        self.pushed: tuple[PackedPushed, ...] = ()
        self.least = 1
        self.accelerated = False
        self.workers = 1
        self.newest: DrawnBatch | None = None
        self.accumulations = 0
        self.begins_pass = False
        self._passes: dict[int, int] = {}  # loader -> the epoch of the last push with data from this loader
        self._loaders: list[_LoaderFeed] = []
        self._asks = False  # True while a question about a training loop has not been answered
        self._loop = -1  # the training loop that the script has begun last
        self._epoch: int | None = None  # the epoch of this loop that the script has reached
        self._trained: _LoaderFeed | None = None  # the loader of the last push with data
        self._last: _LoaderFeed | None = None  # the loader from which the script has drawn last
        self._samples: int | None = None  # number of samples in the next push, if the script has set it
        # the loader from which the script had drawn last when it accumulated a gradient for the next push
        self._accumulated: _LoaderFeed | None = None
        self._decided = True  # False while it is undecided to which push some drawn batches belong

    @property
    def waiting(self) -> bool:
        """True while a request has not been answered."""
        return self._asks or any(loader.requested for loader in self._loaders)

    @property
    def has_batches(self) -> bool:
        """True if the worker has batches, from any loader, that it has not taken yet."""
        return any(loader.has_batches for loader in self._loaders)

    @property
    def samples(self) -> int | None:
        """Number of samples in the next push. May be set if the script knows the number.

        Otherwise, the samples in the batches of one loader are counted. If the script has accumulated a gradient for
        this push, this is the loader from which the script had drawn last at that time. If not, this is the loader
        from which the script has drawn last by now. None if the number is unknown, or if there are no such batches.
        """
        feed = self._accumulated or self._last
        if self._samples is not None or feed is None:
            return self._samples
        return feed.drawn.samples(accumulated=self._accumulated is not None)

    @samples.setter
    def samples(self, count: int) -> None:
        self._samples = count

    @property
    def work(self) -> Work:
        """The data in the next push; one full batch if the script has not drawn a batch since its last push."""
        return self._last.work if self._last is not None else ONE_BATCH

    @property
    def warm_up(self) -> bool:
        """True in an accelerator's first iteration with batches of a new size, because this iteration takes longer."""
        return self.accelerated and self._last is not None and self._last.warm_up

    @property
    def has_drawn(self) -> bool:
        """True if the script has drawn a batch since its last push."""
        return self._last is not None

    @property
    def place(self) -> tuple[int | None, float | None]:
        """The present epoch of the script, and the part of this epoch whose data has been drawn. See `Status`."""
        trained = self._trained
        if self._epoch is None:
            return (None, None) if trained is None else (trained.epoch, trained.part)
        return self._epoch, None if trained is None else trained.part

    def begin(self, loader: int, name: str, epoch: int, order: DataOrder) -> list[Request]:
        """Begin an epoch of a loader. The loaders are numbered, but may begin in any order."""
        self.used = True
        while loader >= len(self._loaders):
            self._loaders.append(_LoaderFeed(self, len(self._loaders)))
        return self._loaders[loader].begin(name, epoch, order)

    def reopen(self) -> list[Request]:
        """For each loader whose current epoch has ended, request positions that other workers have returned."""
        return [request for loader in self._loaders if loader.ended for request in loader.reopen()]

    def take(self, loader: int) -> Batch | None:
        """Take the next batch of the current epoch; return None if there is no batch, or if the epoch has ended."""
        return self._loaders[loader].take()

    def ended(self, loader: int) -> bool:
        """Return True if the worker has taken all of its batches of the current epoch."""
        return self._loaders[loader].ended

    def to_take(self, loader: int) -> int | None:
        """Return how many batches of the current epoch the worker will take; None if this is not known yet."""
        return self._loaders[loader].to_take

    def request(self, loader: int) -> list[Request]:
        """Request more batches of the current epoch, unless a request is pending."""
        return self._loaders[loader].request()

    def exhaust(self, loader: int, epoch: int, size: int) -> list[Request]:
        """Report that an order whose size was not known in advance has ended after `size` positions.

        Call this method when the batch that was taken last extends beyond the end.
        """
        return self._loaders[loader].exhaust(epoch, size)

    def draw(
        self,
        loader: int,
        positions: int,
        samples: int | None,
        is_held: Callable[[], bool] = lambda: False,
        part: float | None = None,
    ) -> None:
        """Record that the loader has passed a batch to the script.

        Args:
            loader: the loader.
            positions: number of positions in the batch.
            samples: number of samples in the batch; None if it is unknown.
            is_held: function that returns True if the script may still use the batch.
            part: the part of the epoch's order up to the end of the batch; None if it is unknown.
        """
        self._last = feed = self._loaders[loader]
        self.newest = DrawnBatch(positions, samples, is_held)
        feed.draw(self.newest)
        if part is not None:
            feed.part = max(part, feed.part or 0.0)
        self._decided = False

    def accumulate(self) -> None:
        """Record that a gradient is accumulated, which decides to which push the drawn batches belong."""
        if not self._decided:
            self._decided, self._accumulated = True, self._last or self._accumulated
            self.accumulations += 1
            for loader in self._loaders:
                loader.drawn.accumulate()

    def drop(self) -> None:
        """Record that the script has dropped the gradients that it had accumulated since its last push."""
        self._decided = False
        for loader in self._loaders:
            loader.drawn.drop()

    def push(self, busy_s: float | None = None) -> list[Request]:
        """Record a push, and request the next batches of the loader from which the script has drawn last.

        The time of a warm-up does not count for the sizes of the next batches.

        Args:
            busy_s: time that the worker took for the iteration, not including the time that it waited for others;
                None if it is unknown.
        """
        feed, accumulated = self._last, self._accumulated is not None
        if self.warm_up:
            busy_s = None
        self._trained = feed or self._trained
        self.begins_pass = feed is not None and self._passes.get(feed.number) != feed.epoch
        if feed is not None:
            self._passes[feed.number] = feed.epoch
        self._last = self._accumulated = self._samples = self.weight = None
        for loader in self._loaders:
            loader.push(busy_s if loader is feed else None, accumulated=accumulated)
        self.pushed = tuple(loader.drawn.pushed.packed for loader in self._loaders)
        return feed.request() if feed is not None and feed.needs_more else []

    def answered(self) -> None:
        """Record that every shard has answered the last push."""
        for loader, pushed in zip(self._loaders, self.pushed, strict=False):
            loader.committed = pushed

    def end(self) -> tuple[PackedPushed, ...]:
        """Return `pushed` at the end of the script, with the batches that no push has used counted as skipped."""
        return tuple(loader.drawn.end().packed for loader, _ in zip(self._loaders, self.pushed, strict=False))

    def enter(self, loop: int, limits: LoopLimits | None = None) -> list[Request]:
        """Begin a training loop of a worker that has not trained yet: ask how far the job has come."""
        self._asks, self._loop, self._epoch = True, loop, 0
        return [Send(COORDINATOR, EntryRequested(loop, limits))]

    def reach(
        self, position: LoopPosition, *, over: bool, tracks: bool, limits: LoopLimits | None = None
    ) -> list[Request]:
        """Report that the script has reached a position. If it `tracks` objects, ask whether to send their states."""
        self._asks, self.states_wanted = tracks, False
        self._loop, self._epoch = position.loop, position.epoch
        if self._trained is not None and self._trained.part is not None:
            self._trained.part = 0.0
        return [Send(COORDINATOR, EpochReached(position, over, tracks, limits))]

    def handle(self, message: DataGranted | LoopEntered | StatesDecided) -> None:
        """Receive leases, or the answer to a question about a training loop."""
        match message:
            case DataGranted():
                if message.loader < len(self._loaders):
                    self._loaders[message.loader].receive(message)
            case LoopEntered():
                self._asks, self.entered = False, message
                if (position := message.position) is not None and position.loop == self._loop:
                    self._epoch = position.epoch
            case StatesDecided():
                self._asks, self.states_wanted = False, message.wanted


@stateful()
class _LoaderFeed:
    """The data of one worker from one loader."""

    def __init__(self, feed: DataFeed, number: int) -> None:
        self.drawn = Drawn()
        self.committed: PackedPushed = 0
        self.ended = False
        self.requested = False  # True while a request has not been answered
        self.epoch = -1
        self.part: float | None = None  # the part of the epoch that has been drawn; None if it is unknown
        self._feed = feed
        self.number = number
        self._name: str
        self._order: DataOrder
        self._leases: deque[Lease] = deque()  # leases with batches that the worker has not taken
        self._taken = 0  # number of batches that the worker has taken from the first of these leases
        self._last = False  # True if the worker receives no more leases in this epoch
        # Number of batches that the script has drawn since its last push, and number of positions in them.
        self._unpushed = self._unpushed_positions = 0
        self.warm_up = False  # True if one of these batches is the first of its size
        self._sizes: set[int] = set()  # numbers of positions of the batches that the script has drawn
        self._times: deque[tuple[int, float]] = deque(maxlen=MOST_TIMES)

    @property
    def work(self) -> Work:
        if not self._unpushed:
            return ONE_BATCH
        return Work(self._unpushed, self._unpushed_positions / self._order.batch)

    @property
    def has_batches(self) -> bool:
        return bool(self._leases)

    @property
    def needs_more(self) -> bool:
        return not self.has_batches and not self._last

    @property
    def to_take(self) -> int | None:
        counts = [lease.count if lease.batch else 0 for lease in self._leases if lease.count is not None]
        return sum(counts) - self._taken if self._last and len(counts) == len(self._leases) else None

    def begin(self, name: str, epoch: int, order: DataOrder) -> list[Request]:
        self._name, self.epoch, self._order = name, epoch, order
        self.part = None if order.size is None else 0.0
        self._leases.clear()
        self._taken = 0
        self._last = self.ended = self.requested = False
        return self.request()

    def draw(self, batch: DrawnBatch) -> None:
        self.drawn.draw(batch)
        if batch.positions not in self._sizes:
            self._sizes.add(batch.positions)
            self.warm_up = True
        self._unpushed += 1
        self._unpushed_positions += batch.positions

    def push(self, busy_s: float | None, *, accumulated: bool) -> None:
        batches = self._unpushed  # more than one if the script accumulates gradients
        if self.drawn.push(accumulated=accumulated):
            busy_s = None  # with a skipped batch, the time does not tell how long a batch takes
        if busy_s is not None and self._unpushed_positions and self._order.balanced:
            self._times.append((max(1, round(self._unpushed_positions / batches)), busy_s / batches))
        self._unpushed = self._unpushed_positions = 0
        self.warm_up = False

    def reopen(self) -> list[Request]:
        self._last = self.ended = False
        return self.request()

    def take(self) -> Batch | None:
        last = self._last  # read first, because another thread may append the last leases meanwhile
        if not self._leases:
            self.ended = last
            return None
        lease, number = self._leases[0], self._taken
        if number + 1 == lease.count:
            self._taken = 0
            self._leases.popleft()
        else:
            self._taken = number + 1
        return nth_batch(lease, number)

    def request(self) -> list[Request]:
        return [] if self.requested or self._last else [self._request()]

    def exhaust(self, epoch: int, size: int) -> list[Request]:
        if self._taken:  # the other batches of this lease begin after the end
            self._taken = 0
            self._leases.popleft()
        return [self._request((epoch, size))]

    def _request(self, end: tuple[int, int] | None = None) -> Send:
        self.requested = True
        times, order = tuple(self._times), self._order
        self._times.clear()
        least = step = 1
        if order.balanced or order.joint:
            least = self._feed.least
        if order.balanced and self._feed.accelerated:
            share = max(order.batch // self._feed.workers, 1) if order.joint else order.batch
            step = step_of(min(share, order.most or share))
        request = DataRequested(
            self.number,
            self._name,
            self.epoch,
            order,
            self.drawn.count,
            self.committed,
            end,
            times,
            least,
            step,
        )
        return Send(COORDINATOR, request)

    def receive(self, message: DataGranted) -> None:
        if message.epoch != self.epoch:
            return  # the script has begun a later epoch; the coordinator takes these leases back
        self.requested = False
        self._leases.extend(message.leases)
        self._last = message.last
