"""`distribute`, which gives each worker its part of the data: loaders, the order of an epoch, batches on a device.

All workers compute the same order of the items for each epoch. The coordinator hands out positions in this order (see
`paceline.core.data_ledger`): either each worker receives its next batches when it needs them, or all workers
have equal shares.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset

from ..core.lease import BATCH_SIZINGS, SPLITS, Batch, BatchSizing, DataOrder, Split
from ..core.metrics import PassMark, Stopwatch
from ..errors import ConfigurationError, UsageError, unknown_name
from ..shard.vectors import lent_bytes
from .collectives import update_main
from .generator_states import GeneratorStates, generators_lock, loader_seed, seed_worker
from .job_model import least_samples_of
from .loops import Position, active_loop, bars_over, expected_batches, set_batch
from .session import BatchSite, Session, current, hold_job_model, resumption_of, untrained
from .sources import DataSource, DataStream, length_of, source_of, streams_of
from .training import training_of
from .worker_state import at_boundary, begin_resumed, repeated, restore

T = TypeVar("T")

log = logging.getLogger(__name__)


def distribute(
    loader: Iterable[T],
    *,
    split: Split | None = None,
    batch: BatchSizing | None = None,
    joint_batch: bool | None = None,
    max_batch: int | None = None,
    device: torch.device | str | None = None,
) -> Iterable[T]:
    """Return this worker's part of a loader.

    In each epoch, all workers use the same order of the items. If the loader shuffles, the order changes in every
    epoch and depends on the run's seed, but not on the number of workers. Outside a run, the loader is returned
    unchanged, unless its batches are to be moved to a device. Call this function once, or at the start of every
    epoch. Each pass over the result is one epoch.

    The first call also seeds the random generators of torch, Python and NumPy in each worker except worker 0, so that
    dropout, augmentation and noise differ between workers. Worker 0 draws the same random numbers as the script does
    outside a run.

    Args:
        loader: a `DataLoader`, whose batch size is the batch size of each worker (unless `joint_batch` is True), or
            another iterable over batches. A `DataLoader` over a dataset with a length is split at its sampler, so
            that each worker loads only its own part. Any other iterable is split at its output: every worker produces
            all batches and skips those of the other workers.
        split: "dynamic" hands out each batch when a worker needs it, so a fast worker receives more batches; "static"
            gives all workers equal shares of every joint batch (one batch of each worker); "auto" chooses for each
            epoch: "static" if the sync model keeps all workers in lockstep at the beginning of the epoch (as `bsp`
            does), else "dynamic". Default: the option `--split` of the run, or "auto" if the option is not given.
        batch: "equal" gives all workers batches of the loader's size; "balanced" gives a faster worker larger batches
            and a slower worker smaller ones, so that all workers take the same time for a batch. The joint batch of all
            workers has the same samples in both cases. Default: the option `--batch` of the run, or "equal" if the
            option is not given.
        joint_batch: True if the loader's batch size is that of the joint batch: each batch of the loader is divided
            among the workers that take part, so the hyper-parameters have the same meaning as in one process. False if
            the loader's batch size is that of each worker. Default: the option `--joint-batch` of the run.
        max_batch: maximum size of a balanced batch, or of a worker's part of a joint batch, for example because larger
            batches do not fit into memory. Default: no maximum.
        device: device to which all tensors of a batch are moved, such as `paceline.device()`. The tensors may be nested
            in lists, tuples, dictionaries and the like. If the loader pins memory, the copies are asynchronous.
            Default: the batches stay where the loader puts them.

    Returns:
        An iterable over batches. Its length is the number of batches that each worker would receive if all shares were
        equal. In a run that was resumed in the middle of an epoch, the length during the first pass is the number of
        batches in the rest of this epoch.

    Raises:
        ConfigurationError: the loader cannot be split, or has fewer items than there are workers, or its batches
            cannot be balanced, or cannot be divided among the workers.

    Example:
        >>> import paceline, torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True)
        >>> for epoch in range(2):
        ...     for (batch,) in paceline.distribute(loader):
        ...         pass  # train on the batch
    """
    site = call_site(sys._getframe(1))
    return distribute_at(
        site, loader, split=split, batch=batch, joint_batch=joint_batch, max_batch=max_batch, device=device
    )


def distribute_at(
    site: str,
    loader: Iterable[T],
    *,
    split: Split | None = None,
    batch: BatchSizing | None = None,
    joint_batch: bool | None = None,
    max_batch: int | None = None,
    device: torch.device | str | None = None,
) -> Iterable[T]:
    """Distribute a loader as if the script had called `distribute` at `site`. See `call_site`."""
    if split is not None and split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if batch is not None and batch not in BATCH_SIZINGS:
        raise unknown_name("batch", batch, BATCH_SIZINGS)
    target = None if device is None else device_of(device)
    source = source_of(loader)
    session = current()
    joint = joint_batch if joint_batch is not None else session is not None and session.joint_batch
    joint = joint and (session is None or session.workers > 1)
    _require_balanceable(source, batch, max_batch, joint=joint)
    if joint:
        _require_divisible(source, max_batch, 1 if session is None else session.workers)
    if session is None:
        set_batch(source.batch if source.counts_samples else None)
        return loader if target is None else MovedLoader(loader, target, pinned=pins(loader))
    seed_worker(session)
    balanced = (batch or session.batch) == "balanced"
    if balanced and not source.divisible:
        source.warnings.append(f"distribute() gives all workers equal batches, because {NOT_DIVISIBLE}.")
        balanced = False
    division = Division(split or session.split, balanced, max_batch, joint)
    distributed: DistributedLoader[T] = DistributedLoader(source, session, division, site)
    if target is not None:
        distributed.move_to(target)
    return distributed


def call_site(caller: FrameType) -> str:
    """Return the place in the script that a frame executes, as file and line.

    Inside a function, the line is counted from the beginning of the function. So a place keeps its name in a resumed
    run, even if the code around the function has changed.
    """
    code, line = caller.f_code, caller.f_lineno
    name = Path(code.co_filename).name
    return (
        f"{name}:{line}"
        if code.co_name == "<module>"
        else f"{name}:{code.co_qualname}+{line - code.co_firstlineno}"
    )


NOT_DIVISIBLE = (
    "only the batches of a DataLoader with a batch_size, over a dataset with a length, can be balanced"
)


class Division(NamedTuple):
    """The rules by which the positions of an epoch are divided among the workers. See `distribute`."""

    split: Split
    balanced: bool = False
    most: int | None = None
    joint: bool = False


def _require_balanceable(
    source: DataSource, batch: str | None, max_batch: int | None, *, joint: bool
) -> None:
    """Raise `ConfigurationError` for arguments of `distribute` that cannot be used with this source."""
    if batch == "balanced" and not source.divisible:
        raise ConfigurationError(
            f"distribute() was called with batch='balanced', but {NOT_DIVISIBLE}. Omit batch, or use such a loader."
        )
    if max_batch is None or joint:
        return
    if batch == "equal":
        raise ConfigurationError(
            f"max_batch is {max_batch!r}, but distribute() was called with batch='equal'. Only balanced batches have "
            "a maximum size: omit max_batch, or use batch='balanced'."
        )
    if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < source.batch:
        raise ConfigurationError(
            f"max_batch is {max_batch!r}, expected an integer of at least {source.batch}, the loader's batch size."
        )


def _require_divisible(source: DataSource, max_batch: int | None, workers: int) -> None:
    """Raise `ConfigurationError` if the batches of a source cannot be divided among the workers."""
    if not source.divisible:
        raise ConfigurationError(
            f"the joint batches of a {type(source.inner).__name__} cannot be divided among the workers: "
            f"{NOT_DIVISIBLE.replace('balanced', 'divided')}. Use such a loader, or "
            "distribute(loader, joint_batch=False), with which each batch of the loader is the batch of one worker."
        )
    if source.batch < workers:
        raise ConfigurationError(
            f"the joint batch has {_samples(source.batch)}, which cannot be divided among {workers} workers: each "
            f"worker needs at least one sample. Use at most {source.batch} workers, or a larger batch size."
        )
    whole = isinstance(max_batch, int) and not isinstance(max_batch, bool)
    least = -(-source.batch // workers)
    if max_batch is not None and not (whole and max_batch >= least):
        raise ConfigurationError(
            f"max_batch is {max_batch!r}, expected an integer of at least {least}, so that {workers} workers can "
            f"divide the joint batch of {_samples(source.batch)}."
        )


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}"


UNDIVIDED = frozenset({"base_dataloader", "batch_sampler", "sampler"})
"""Attributes of a loader that its distributed loader does not show, because they yield the data of all workers."""


class DistributedLoader(Generic[T]):
    """One worker's part of a loader. Attributes not listed below are those of the loader, except for `UNDIVIDED`.

    Args:
        source: the data to split.
        session: this worker's session.
        division: how the data is divided among the workers.
        site: the place in the script at which `distribute` is called.

    Attributes:
        position: how far the script has progressed through the data.
        knows_end: True if the loader must know of each batch whether it is the last batch of its pass. The next batch
            is then loaded before the script gets the present batch. A pass without a batch for this worker yields the
            first batch of its epoch; steps with this batch do nothing. May be set before a pass.
        is_last: True if the latest batch that the script has got is the last batch of its pass. Only valid if
            `knows_end` is True.
    """

    def __init__(self, source: DataSource, session: Session, division: Division, site: str) -> None:
        self._source = source
        self._session = session
        stream = streams_of(session).of(source.key, site)
        stream.warn(source.warnings)
        self._part = SourcePart(source, session, stream, division)
        # Worker 0 draws the seeds of the loader's processes as the script does outside a run.
        self._generator = torch.Generator() if session.worker > 0 else None
        self._loaded: Iterable[T] = source.load(self._part, self._generator)
        self.position = Position(self._part.joint, stream.name)
        self.is_last = False
        # least number of pushes that the script has made for a batch; 0 if it accumulates gradients
        self._pushes: int | None = None

    def __len__(self) -> int:
        return len(self._part)

    @property
    def whole_length(self) -> int:
        """Number of batches that all workers together use in a whole epoch.

        Under a sync model whose workers do not wait for each other, one worker may use up to this number of batches.
        The length of the loader is each worker's number of batches if all shares are equal.

        Raises:
            TypeError: the loader has no length.
        """
        return self._part.whole_length

    @property
    def script_length(self) -> int | None:
        """Number of batches of the loader that was given to `distribute`; None if it is unknown."""
        return length_of(self._source.inner)  # type: ignore[arg-type]

    @property
    def may_be_dynamic(self) -> bool:
        """True if a pass may hand out each batch when a worker needs it; False if shares are equal in every pass."""
        return self._part.may_be_dynamic

    @property
    def begun(self) -> int:
        """Number of batches, out of `whole_length`, that the job has begun in the current epoch, as far as is known.

        A worker knows the position of the last batch that it has drawn, and whether the epoch has ended.
        """
        return self._part.begun(self.position)

    @property
    def left(self) -> int | None:
        """Number of batches left for this worker in the current pass; None if the number depends on other workers."""
        return self._part.left

    @property
    def divides(self) -> bool:
        """True if the batch size of the script's loader is the size of the joint batch. See `distribute`."""
        return self._part.divides

    @property
    def knows_end(self) -> bool:
        return self._part.never_empty

    @knows_end.setter
    def knows_end(self, knows_end: bool) -> None:
        self._part.never_empty = knows_end

    def __iter__(self) -> Iterator[T]:
        times = _PassTimes(self._session)
        try:
            yield from self._batches(times)
        finally:
            times.end()

    def _batches(self, times: _PassTimes) -> Iterator[T]:
        session, part = self._session, self._part
        loop = active_loop(session)
        hold_job_model(session)
        part.expect_batches()
        begin_resumed(session)
        if loop is None:
            update_main(session)
        epoch = part.next_epoch
        place = BatchSite(self.position.name, epoch)
        if self._generator is not None:
            self._generator.manual_seed(loader_seed(session, epoch))
        resumption = resumption_of(session)
        part.is_finished = resumption.lies_beyond(place)
        with self.position.making_a_pass(session, epoch - part.skipped, dynamic=part.is_dynamic):
            bars = bars_over(self) if part.is_dynamic and part.size is not None else ()
            drawn = 0
            batches = iter(self._loaded)  # a `DataLoader` draws the seed of its processes here
            restore(session, place, self._go_on)
            ahead: list[Any] = []  # the next batch, or END, if it is loaded already
            while True:
                give_state = at_boundary(session, place, self._content)
                if (loaded := ahead.pop() if ahead else next(batches, END)) is END:
                    break
                if loop is not None and loop.over:
                    return
                give_state = self._sit_out(place, give_state)
                give_state()
                taken = part.taken.popleft()
                assert taken is not None
                if taken.batch is not None:
                    resumption.restored = None
                    self.position.draw(taken.batch)
                    session.core.data.draw(
                        part.number,
                        taken.positions,
                        taken.samples,
                        _held(loaded),
                        part.share_until(taken.batch),
                    )
                    drawn += 1
                    for bar in bars:
                        begun = max(self.position.joint_batches - part.before, 1)
                        bar.total = expected_batches(drawn, begun, len(part))
                if self.knows_end:
                    ahead.append(next(batches, END))
                    self.is_last = ahead[0] is END
                before = session.core.iteration + resumption.steps
                times.draw()
                with repeated(session, self._go_on) if taken.batch is None else nullcontext():
                    yield cast(T, loaded)
                times.ask()
                pushes = session.core.iteration + resumption.steps - before
                self._pushes = pushes if self._pushes is None else min(pushes, self._pushes)
            self._sit_out(place, give_state)
            self.position.complete(epoch)
            for bar in bars:
                bar.total = drawn

    def begin_at(self, batches: int) -> None:
        """Let the next pass leave out the first batches of its epoch, for example because an earlier run has used them.

        All workers must call this method at the same point of the script, with the same number. If the workers have
        equal shares in this pass, only whole joint batches are left out.

        Args:
            batches: number of batches, out of `whole_length`.
        """
        self.position.skipped = self._part.skip_batches(batches)

    def _sit_out(self, place: BatchSite, give_state: Callable[[], None]) -> Callable[[], None]:
        """Make the pushes for joint batches in which this worker has no part, and leave out the batches to skip.

        Args:
            place: where the script is.
            give_state: function that gives the script's state to the job if the job is cut. A cut needs this state
                before the next push.

        Returns:
            The function that gives the state after these pushes.
        """
        taken, data = self._part.taken, self._session.core.data
        while taken and (taken[0] is None or taken[0].skipped):
            if (skipped := taken.popleft()) is not None:
                data.draw(self._part.number, skipped.positions, skipped.samples)
            elif (training := training_of(self._session)) is not None:
                give_state()
                training.sit_out(self._pushes or 0)
                give_state = at_boundary(self._session, place, self._content)
        return give_state

    def _content(self) -> dict[str, Any]:
        """Return the state of the script's loader between two batches, from which another run can go on."""
        return {
            "generator": None if (generator := self._own_generator) is None else generator.get_state(),
            "order": self._part.content,
        }

    def _go_on(self, content: Mapping[str, Any]) -> None:
        """Let the script's loader go on from a state that `_content` returned."""
        if self._own_generator is not None and content["generator"] is not None:
            self._own_generator.set_state(content["generator"])
        self._part.resumed = content["order"]

    @property
    def _own_generator(self) -> torch.Generator | None:
        """The generator that the script has given to the loader; None if there is none."""
        generator = getattr(self._source.inner, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def move_to(self, device: torch.device) -> None:
        """Move each batch to a device from now on. See `distribute`."""
        self._loaded = MovedLoader(self._loaded, device, pinned=pins(self._source.inner))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass over this loader, for example when a run is resumed.

        All workers must call this method at the same point of the script, with the same epoch. If the number is 0 and
        a pass has been made before, the script begins to count from 0 again, for example because it trains a second
        time. The orders of the items are then different from those of the first time.

        Args:
            epoch: number of the epoch, counted from 0. The order of the items depends on it.

        Raises:
            UsageError: the number is not an integer, or this epoch or a later one has begun already.
        """
        self._part.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        # An attribute of this class can be missing, for example while an instance is copied.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._source.inner, name)
        if name in UNDIVIDED or (name == "dataset" and isinstance(value, IterableDataset)):
            raise AttributeError(
                f"A distributed loader does not show the {name!r} of the loader: a loader built from it, as by "
                "Accelerate's skip_first_batches(), would yield the data of all workers. Use the Accelerator of "
                "paceline.integrations.accelerate, or paceline.integrations.transformers.distribute(trainer). To look "
                "at the sampler itself, use the loader that was given to prepare or distribute."
            )
        return value


END = object()
"""The value that `next` returns at the end of a pass."""


class _PassTimes:
    """During one pass over a loader, tells the stopwatch of a worker when the worker's script asks for batches.

    Args:
        session: the session of the worker.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begun: tuple[Stopwatch, PassMark] | None = None
        if (watched := session.watched()) is not None:
            watch, now_ticks = watched
            self._begun = watch, watch.begin_pass(session.core.data.accumulations, now_ticks)

    def draw(self) -> None:
        """Record that the script receives a batch now."""
        if (watched := self._session.watched()) is not None:
            watch, now_ticks = watched
            watch.draw(now_ticks)

    def ask(self) -> None:
        """Record that the script asks for the next batch now."""
        if (watched := self._session.watched()) is not None:
            watch, now_ticks = watched
            watch.ask(now_ticks)

    def end(self) -> None:
        """Record that the pass ends now."""
        if (watched := self._session.watched()) is None:
            return
        watch, now_ticks = watched
        if self._begun is not None and self._begun[0] is watch:
            watch.end_pass(self._begun[1], self._session.core.data.accumulations, now_ticks)
        else:  # the worker has begun to train in this pass
            watch.enter("between", now_ticks)


def _held(batch: object) -> Callable[[], bool]:
    """Return a function that tells whether any tensor in a batch is still referenced."""
    tensors = [ref(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return lambda: any(tensor() is not None for tensor in tensors)


class Taken(NamedTuple):
    """A batch that the sampler of a loader has received.

    Attributes:
        batch: the positions that were handed out; None if a batch is repeated (see `worker_state.repeated`).
        positions: number of positions in the batch, without positions after the end of the order.
        samples: number of samples in the batch; None if it is unknown.
        skipped: True if the batch is left out. See `DistributedLoader.begin_at`.
    """

    batch: Batch | None
    positions: int
    samples: int | None
    skipped: bool = False


class SourcePart:
    """One worker's part of a source: an iterable over batches of items. Each pass over it is one epoch.

    Attributes:
        number: index of the source's stream in this worker. See `DataStream`.
        size: number of items in an epoch; None if it is unknown.
        joint: number of items in a joint batch of all workers.
        taken: the batches that were taken but have not been drawn by the script yet; None for a joint batch in which
            this worker has no part.
        resumed: how far an earlier run has come in the items of one epoch; None if unknown.
        expected: number of batches in the latest pass; None if the pass covers a whole epoch, or if the number is
            unknown.
        never_empty: True if a pass without a batch for this worker yields the first batch of its epoch as a repeated
            batch.
    """

    def __init__(self, source: DataSource, session: Session, stream: DataStream, division: Division) -> None:
        self.number = stream.number
        self.size = size = source.size
        self.joint = source.batch if division.joint else source.batch * session.workers
        self.taken: deque[Taken | None] = deque()
        self.resumed: Mapping[str, Any] | None = None
        self.expected: int | None = None
        self.never_empty = False
        self._fresh = True  # True until the script has completed a pass or got a batch
        self._skips = 0  # number of positions at the beginning of the next pass that are left out
        self._skipped = 0  # number of joint batches at the beginning of this pass that were left out
        self.is_finished = False  # True if a resumed script makes a pass that the earlier run had finished
        self._in_rest = session.resumed > 0  # in a resumed run, True until the first batch has arrived
        self._source = source
        self._session = session
        self._stream = stream
        self._division = division
        self._epoch = -1
        self._orders: dict[int, EpochOrder] = {}
        if size is not None and size < max(session.workers, 1):
            raise ConfigurationError(
                f"distribute() cannot split {size} items among {session.workers} "
                f"worker{'s' * (session.workers > 1)}: each worker needs at least one item."
            )

    def set_epoch(self, epoch: int) -> None:
        stream = self._stream
        begun, whole = stream.epoch, isinstance(epoch, int) and not isinstance(epoch, bool)
        first = stream.first
        if whole and (first is None or (epoch == 0 and first <= begun)):
            first = begun + 1 - epoch
        if not whole or first is None or first + epoch <= begun:
            raise UsageError(
                f"epoch is {epoch!r}, expected 0 or an integer of at least {begun + 1 - (first or 0)}: the epochs of "
                "a loader can be skipped, but not repeated."
            )
        stream.first, stream.epoch = first, first + epoch - 1

    def __len__(self) -> int:
        source = self._source
        if source.size is None:
            raise TypeError(f"{type(source.inner).__name__} has no length")
        return self._rounds(source.size) if self.expected is None else self.expected

    @property
    def whole_length(self) -> int:
        """See `DistributedLoader.whole_length`."""
        if self.size is None:
            raise TypeError(f"{type(self._source.inner).__name__} has no length")
        return self._rounds(self.size) * self._session.workers

    def begun(self, position: Position) -> int:
        """See `DistributedLoader.begun`."""
        if not position.passes or position.epoch < self._epoch or self.size is None:
            return 0
        workers, whole = self._session.workers, self.whole_length
        if position.dynamic:
            return min(-(-position.end * workers // self.joint), whole)
        # With equal shares, all workers must return the same number. So the number is computed from the part of a
        # worker's share that the worker has drawn, which is equal in all workers.
        drawn, left, before = position.drawn_in_pass, self.left, (self.before + self._skipped) * workers
        if left is None or position.end == sys.maxsize:
            return min(position.joint_batches * workers, whole)
        return before + -(-(whole - before) * drawn // (drawn + left)) if drawn else before

    @property
    def left(self) -> int | None:
        """See `DistributedLoader.left`."""
        to_take = self._session.core.data.to_take(self.number) if self._epoch >= 0 else None
        return (
            None
            if to_take is None
            else to_take + sum(each is not None and not each.skipped for each in self.taken)
        )

    def skip_batches(self, batches: int) -> int:
        """Leave out batches at the beginning of the next pass, and return the number of whole joint batches in them."""
        positions = batches * self.joint // self._session.workers
        joint_batches = positions // self.joint
        self._skips = positions if self.is_dynamic else joint_batches * self.joint
        return joint_batches

    @property
    def before(self) -> int:
        """Number of joint batches of the epoch that an earlier run used before the current pass."""
        return 0 if self.expected is None or self.size is None else self._rounds(self.size) - self.expected

    def _rounds(self, size: int) -> int:
        """Return the number of joint batches in an order of `size` positions."""
        least = 1 if self._division.joint else self._session.workers
        rounds, rest = divmod(size, self.joint)
        return rounds + (rest >= least and not self._source.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        session, source = self._session, self._source
        self.taken.clear()
        self.expected = None
        skips, self._skips = self._skips, 0
        self._skipped = skips // self.joint
        again = session.core.data.again and self._stream.epoch >= 0
        self._epoch = self._stream.epoch = epoch = self.next_epoch
        if not again:
            session.epoch_begins(epoch)
            digest = self._order(epoch).digest()
            split, balanced, most, joint = self._division
            whole = DataOrder(
                source.size, source.batch, source.drop_last, split, digest, balanced, most, joint
            )
            session.exchange(lambda: session.core.data.begin(self.number, self._stream.name, epoch, whole))
            # A script may divide by the length, so the length must not be 0. If nothing is left of an epoch, the length
            # is that of a whole epoch.
            self.expected = session.core.data.to_take(self.number) or None
        is_empty = True
        while (batch := self._take(epoch)) is not None:
            if not batch.size:
                if self._fresh and session.resumed and training_of(session) is None:
                    # A resumed run may begin with a joint batch that is too small for all workers. The other workers
                    # wait for a push of this worker, so its script must begin to train.
                    self._fresh = is_empty = False
                    yield self._repeat(epoch)
                self.taken.append(None)
                continue
            if batch.epoch == epoch and batch.start < skips:
                self._fresh = False
                self.taken.append(Taken(batch, batch.size, batch.size, skipped=True))
                continue
            items = self._items(batch)
            if self._in_rest:
                self._in_rest = False
                if self.expected is None and source.size is not None and batch.epoch == epoch:
                    self.expected = self._rounds(source.size - batch.start)
            if items:
                self._fresh = is_empty = False
                self.taken.append(Taken(batch, len(items), source.samples(items)))
                yield items
        if is_empty and (self.never_empty or self._fresh) and self._is_repeatable:
            self.expected = 1
            yield self._repeat(epoch)
        self._fresh = False

    def _repeat(self, epoch: int) -> list[Any]:
        """Return the items of the first batch of an epoch, as a repeated batch."""
        items = self._order(epoch).items(0, self._source.batch)
        self.taken.append(Taken(None, len(items), self._source.samples(items)))
        return items

    @property
    def _is_repeatable(self) -> bool:
        """True if the script gets the first batch of an epoch again when nothing of this epoch is left.

        If `never_empty` is False, the script gets the batch again only in a resumed run, in the epoch in progress.
        """
        session, source = self._session, self._source
        in_progress = bool(
            session.resumed
            and (active_loop(session) is not None or self.is_finished)
            and resumption_of(session).begun
        )
        return (self.never_empty or in_progress) and not source.once and source.stateful is None

    @property
    def divides(self) -> bool:
        """True if each batch of the source is divided among the workers."""
        return self._division.joint

    def expect_batches(self) -> None:
        """Before the first joint batch is divided, tell the coordinator how small a part of a joint batch may be.

        Raises:
            ConfigurationError: the parts are too small for the model.
        """
        data, workers, batch = self._session.core.data, self._session.workers, self._source.batch
        if not self._division.joint:
            return
        data.least = max(data.least, least_samples(self._session))
        if data.least * workers > batch:
            raise ConfigurationError(
                f"the model has BatchNorm, which needs at least {data.least} samples in each worker's batch, but "
                f"{workers} workers divide a joint batch of {batch}. Use at most {batch // data.least} workers, or a "
                "larger batch size."
            )

    @property
    def content(self) -> dict[str, Any] | None:
        """The state of the iteration over the items; None if the source cannot go on from a saved state."""
        source, order = self._source, self._orders.get(self._epoch)
        if source.stateful is None or order is None:
            return None
        return {"epoch": self._epoch, "state": source.stateful.state_dict(), **order.content}

    @property
    def next_epoch(self) -> int:
        """Number of the epoch of the next pass. A pass over positions that lost workers have not used belongs to the
        epoch of the previous pass.
        """
        begun = self._stream.epoch
        return begun if self._session.core.data.again and begun >= 0 else begun + 1

    @property
    def skipped(self) -> int:
        """Number of passes that this worker does not make, because it has joined late."""
        return self._stream.skipped

    @property
    def is_dynamic(self) -> bool:
        """True if each batch of an epoch that begins now is handed out when a worker needs it."""
        split = self._division.split
        return split == "dynamic" or (split == "auto" and not self._session.core.lockstep)

    @property
    def may_be_dynamic(self) -> bool:
        """See `DistributedLoader.may_be_dynamic`."""
        split = self._division.split
        return split == "dynamic" or (split == "auto" and not self._session.core.stays_lockstep)

    def share_until(self, batch: Batch) -> float | None:
        """Return the fraction of the current epoch up to the end of a batch; None if it is unknown."""
        size = self._source.size
        return min((batch.start + batch.size) / size, 1.0) if size and batch.epoch == self._epoch else None

    def _take(self, epoch: int) -> Batch | None:
        """Return the next batch of positions in the pass of an epoch; None at the end of the epoch.

        Raises:
            UsageError: a later pass has begun, over this loader or over another loader with the same stream.
        """
        if self._stream.epoch != epoch:
            raise UsageError(
                "A new pass over the distributed loader has begun, so the earlier iterator cannot continue. Loaders "
                "over one dataset count as one loader if one line of the script distributes them. Give each loader a "
                "dataset of its own, such as a torch.utils.data.Subset, or call distribute() in a separate line for "
                "each iterator."
            )
        data = self._session.core.data
        while (batch := data.take(self.number)) is None and not data.ended(self.number):
            self._session.exchange(lambda: data.request(self.number))
        return batch

    def _items(self, batch: Batch) -> list[Any]:
        """Return the items of a batch; [] if the order ends before the batch."""
        order, source = self._order(batch.epoch), self._source
        if source.once and (batch.epoch != self._epoch or batch.start < order.start):
            raise ConfigurationError(
                "this worker must use items that another worker received but did not use. However, a "
                f"{type(source.inner).__name__} can be iterated over only once. Give distribute() an object that can "
                "produce the items again, such as a DataLoader or a list."
            )
        items = order.items(batch.start, batch.size)
        stop = batch.start + batch.size
        if len(items) == batch.size and batch.least_size <= stop:
            return items
        size = order.ends_before(batch.start, max(batch.least_size, stop))
        if size is None:
            return items
        if source.size is not None:
            raise ConfigurationError(
                f"the sampler of the loader has yielded only {size} items, but its length is {source.size}. Its "
                "__len__() must return the number of items that it yields in every epoch."
            )
        self._session.exchange(lambda: self._session.core.data.exhaust(self.number, batch.epoch, size))
        exists = size >= batch.least_size and not source.drop_last
        return items if exists else []

    def _order(self, epoch: int) -> EpochOrder:
        """Return the order of the current epoch, or of an earlier epoch of which lost workers have not used all
        positions.
        """
        if epoch not in self._orders:
            seed, source = _mix(self._session.seed, epoch), self._source

            def begin() -> Iterable[Any]:
                items = source.order()
                _seed(items, seed, epoch)
                return items

            current = {self._epoch: self._orders[self._epoch]} if self._epoch in self._orders else {}
            self._orders = {**current, epoch: EpochOrder(begin, seed, source.chunk)}
            self._go_on_in(epoch)
        return self._orders[epoch]

    def _go_on_in(self, epoch: int) -> None:
        """Let the iteration over the items of an epoch go on from the position that an earlier run had reached."""
        source, content = self._source, self.resumed
        if content is None or content["epoch"] != epoch or source.stateful is None:
            return
        self.resumed = None
        try:
            source.stateful.load_state_dict(content["state"])
        except Exception as error:
            raise UsageError(
                f"the {type(source.stateful).__name__} that was given to distribute() does not accept the state that "
                f"it had at the checkpoint ({' '.join(str(error).split())}). Resume the run with the same script."
            ) from error
        self._orders[epoch].go_on(content)


def least_samples(session: Session) -> int:
    """Return the minimum number of samples in a batch, for the models that are not trained yet."""
    least = 1
    for optimizer in untrained(session):
        with suppress(ConfigurationError):  # a missing model is an error later, when training begins
            least = max(least, *(least_samples_of(model.modules()) for model in optimizer.models()))
    return least


def _seed(sampler: object, seed: int, epoch: int) -> None:
    """Set the seed and the epoch that determine the order of a sampler, or of the sampler in a batch sampler.

    Args:
        sampler: the sampler.
        seed: seed for the generators that the script has passed to the sampler.
        epoch: number of the epoch, for samplers with `set_epoch`.
    """
    while sampler is not None:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        sampler = getattr(sampler, "sampler", None)


def _mix(seed: int, epoch: int) -> int:
    """Mix two numbers into one seed, so that nearby numbers give very different seeds (finalizer of SplitMix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + epoch + 1) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    z = (z ^ z >> 30) * 0x94D049BB133111EB & (1 << 64) - 1
    return z ^ z >> 31


# -- The order of the items in one epoch, which every worker computes for itself -----------------------------
#
# A worker draws the order from the loader's own sampler, with random generators that are seeded from the
# run's seed and the number of the epoch. So all workers see the same order. The order is drawn lazily: it may
# be much longer than the part of it that is used.
#
# Several threads may draw orders; they take turns, because the samplers draw from the generators of the
# process. A script that draws random numbers on one thread while another thread iterates over a distributed
# loader must give the loader a generator of its own.

# Items are drawn in chunks of this size, because saving the states of the generators takes time.
CHUNK = 1024
DIGESTED = 256  # number of items that `digest` covers, from the beginning of the order
MOST_DIGESTED_BYTES = 1 << 16  # maximum number of bytes that `digest` covers of each tensor


class EpochOrder:
    """The order of one epoch.

    Args:
        begin: function that returns a new iterator over the items, for example `iter(sampler)`.
        seed: seed for the random generators during the iteration.
        chunk: number of items that are drawn at a time.

    Attributes:
        start: the first position whose item is kept. Asking for an earlier position begins a new iteration.
    """

    def __init__(self, begin: Callable[[], Iterable[Any]], seed: int, chunk: int = CHUNK) -> None:
        self._begin = begin
        self._seed = seed
        self._chunk = chunk
        self._digest: str | None = None  # None if it has not been computed
        self._iterator: Iterator[Any] | None
        self._drawn: list[Any]
        self._restart()

    def items(self, start: int, size: int) -> list[Any]:
        """Return the items at the positions from `start` on: `size` items, or fewer at the end of the order."""
        self._reach(start, start + size)
        begin = start - self.start
        return self._drawn[begin : begin + size]

    def ends_before(self, start: int, stop: int) -> int | None:
        """Return the size of the order if it is smaller than `stop`, else None.

        Items before position `start` are no longer kept.
        """
        self._reach(start, stop)
        size = self.start + len(self._drawn)
        return size if size < stop else None

    @property
    def content(self) -> dict[str, Any]:
        """The state of the drawing: the position reached, the generators' states, and the hash of the first items.

        The state of the object that is iterated over is not included.
        """
        return {
            "position": self.start + len(self._drawn),
            "generators": self._generators.content,
            "digest": self._digest,
        }

    def go_on(self, content: Mapping[str, Any]) -> None:
        """Go on from the position that an equal order has reached. The next iterator must begin at this position."""
        self._drawn, self.start, self._digest = [], content["position"], content["digest"]
        with generators_lock:
            outside = GeneratorStates()
            self._iterator = iter(self._begin())  # the random numbers drawn here do not matter
            self._generators = GeneratorStates.of(content["generators"])
            outside.give_back()

    def digest(self) -> str:
        """Return a hash of the first items; "" if there are items of a type that cannot be hashed reliably."""
        if self._digest is None:
            self._digest = self._hash()
        return self._digest

    def _hash(self) -> str:
        found = blake2b(digest_size=8)
        try:
            for item in self.items(0, min(DIGESTED, self._chunk)):
                _digest(item, found.update)
        except TypeError:
            return ""
        return found.hexdigest()

    def _reach(self, start: int, stop: int) -> None:
        """Draw the items up to, but not including, position `stop`, and discard those before `start`."""
        if self.start <= start and stop <= self.start + len(self._drawn):
            return
        if start < self.start:
            self._restart()
        while self.start + len(self._drawn) < stop and not self._ended:
            surplus = min(start - self.start, len(self._drawn))
            del self._drawn[:surplus]
            self.start += surplus
            self._draw()

    def _restart(self) -> None:
        self._iterator = None
        with generators_lock:
            # The generators' states with which the iteration continues.
            self._generators = GeneratorStates.seeded(self._seed)
        self.start = 0  # position of the first item in `_drawn`
        self._drawn = []
        self._ended = False

    def _draw(self) -> None:
        """Draw the next chunk of items, using the saved generator states of this order."""
        with generators_lock:
            outside = GeneratorStates()
            self._generators.give_back()
            try:
                if self._iterator is None:
                    self._iterator = iter(self._begin())
                drawn = list(itertools.islice(self._iterator, self._chunk))
                self._generators = GeneratorStates()
            finally:
                outside.give_back()
        self._drawn += drawn
        self._ended = len(drawn) < self._chunk


def _digest(item: object, update: Callable[[bytes], object]) -> None:
    """Pass the content of an item to a hash function; raise `TypeError` if its type is not supported."""
    numpy = sys.modules.get("numpy")
    match item:
        case bool() | int() | float() | str() | bytes() | None:
            update(repr(item).encode())
        case list() | tuple():
            update(b"(")
            for element in item:
                _digest(element, update)
            update(b")")
        case dict():
            for key, element in item.items():
                _digest((key, element), update)
        case torch.Tensor() if not item.is_sparse:
            flat = item.detach().reshape(-1)[: MOST_DIGESTED_BYTES // max(1, item.element_size())]
            update(repr(tuple(item.shape)).encode())
            update(lent_bytes(flat.cpu().contiguous()).tobytes())
        case _ if numpy is not None and isinstance(item, numpy.ndarray | numpy.generic):
            _digest(torch.as_tensor(numpy.asarray(item)), update)
        case _:
            raise TypeError(f"{type(item).__name__} cannot be hashed reliably")


# -- Batches that are moved to a device ----------------------------------------------------------------------


def device_of(device: torch.device | str) -> torch.device:
    """Return a device that the user has named.

    Raises:
        ConfigurationError: torch does not know the device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device is {device!r}, expected a device of torch, such as paceline.device() or 'cuda:0'."
        ) from error


def pins(loader: object) -> bool:
    """Return True if a loader puts its batches into pinned memory."""
    return bool(getattr(loader, "pin_memory", False))


def moved(batch: T, device: torch.device, *, pinned: bool) -> T:
    """Return a batch whose tensors are on a device. Tensors that are on this device already are not copied.

    Args:
        batch: tensors and other objects, nested in lists, tuples, dictionaries and the like. Objects that have a
            method `to`, such as `PackedSequence`, move themselves.
        device: the device.
        pinned: True if the tensors are in pinned memory, so that the copies are asynchronous.
    """

    def move(leaf: Any) -> Any:
        if not _moves(leaf):
            return leaf
        try:
            return leaf.to(device, non_blocking=pinned)
        except TypeError:  # the class may have a method without `non_blocking`
            return leaf.to(device)

    found: T = tree_map(move, batch, is_leaf=_moves)
    return found


def _moves(part: Any) -> bool:
    return callable(getattr(part, "to", None)) and not isinstance(part, type)


class MovedLoader(Generic[T]):
    """A loader whose batches are moved to a device. All other attributes are those of the loader.

    Args:
        loader: the loader.
        device: the device.
        pinned: see `moved`.
    """

    def __init__(self, loader: Iterable[T], device: torch.device, *, pinned: bool) -> None:
        self._loader = loader
        self._device = device
        self._pinned = pinned

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        batches = iter(self._loader)  # made now, not when the first batch is asked for
        return (moved(batch, self._device, pinned=self._pinned) for batch in batches)

    def __getattr__(self, name: str) -> Any:
        # An attribute of this class can be missing, for example while an instance is copied.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)
