"""The data that `distribute` splits: the items of a loader or another iterable, and how they become batches.

A `DataLoader` is split by the indices that its sampler yields, so that each worker loads only its own part. Any other
iterable is split by the objects that it yields: every worker must produce all objects, and keeps only its own part.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ..core.messages import MOST_LOADERS
from ..errors import ConfigurationError
from .session import METHODS, OfSession, Stateful

L = TypeVar("L", bound=Iterable[Any])

IN_ORDER = (
    "distribute() loads the batches in the order of the sampler, so it ignores the loader's in_order=False. Remove "
    "this argument from the DataLoader."
)
REPLACEMENT = (
    "The loader's sampler draws with replacement, so an epoch may contain an item several times or not at all. "
    "distribute() hands out each position in the sampler's order exactly once."
)


class DataSource(Protocol):
    """The data that is split.

    Attributes:
        key: the object that identifies the data, such as a dataset. Sources with the same key have the same data.
        size: number of items in an epoch; None if it is not known in advance.
        batch: number of items in a batch.
        drop_last: True if an incomplete last batch is left out.
        chunk: number of items that are drawn at a time from the order of an epoch.
        once: True if the items can be iterated over only once, like those of a generator.
        counts_samples: True if each item is one sample.
        inner: the object whose attributes the distributed loader exposes.
        divisible: True if batches of sizes other than `batch` can be made.
        stateful: the object whose state tells how far the iteration over the items has come; None if there is none.
        warnings: sentences about how the data is split, for the user.
    """

    key: object
    size: int | None
    batch: int
    drop_last: bool
    chunk: int
    once: bool
    counts_samples: bool
    inner: object
    divisible: bool
    stateful: Stateful | None
    warnings: list[str]

    def order(self) -> Iterable[Any]:
        """Return an iterable over all items of a new epoch."""

    def load(self, batches: Iterable[list[Any]], generator: torch.Generator | None) -> Iterable[Any]:
        """Return an iterable over the objects that the script receives, one for each batch of items.

        Args:
            batches: the batches of items.
            generator: generator for the seeds of the loader's processes; None for the loader's own generator.
        """

    def samples(self, items: list[Any]) -> int | None:
        """Return the number of samples in a batch of items; None if it is unknown."""


def source_of(loader: Iterable[Any]) -> DataSource:
    """Return the source for a loader.

    Raises:
        ConfigurationError: the loader cannot be split.
    """
    if (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    ):
        return IndexSource(loader)
    if not hasattr(type(loader), "__iter__"):
        raise ConfigurationError(
            f"distribute() got {loader!r}, expected a DataLoader or another iterable over batches."
        )
    return ItemSource(loader)


class IndexSource:
    """A `DataLoader`, which is split by the indices that its sampler yields.

    The given loader is not changed: a copy of it, with the same settings, loads the items at the indices in this
    worker's part.
    """

    chunk = 1024
    once = False
    stateful: Stateful | None = None

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.key: object = loader.dataset
        self.inner: object = loader
        self.warnings: list[str] = []
        self._loader = loader
        if _may_reorder(loader):
            self._loader = _in_order(loader)
            self.warnings.append(IN_ORDER)
        batches = loader.batch_sampler if loader.batch_size is None else None
        # torch's own batch sampler makes the same batches as a loader with a batch size. Batches of indices from any
        # other batch sampler are not divided further.
        regular = None
        if type(batches) is BatchSampler and length_of(batches.sampler) is not None:
            regular = batches
        self._whole_batches = batches is not None and regular is None
        self._batch_size = loader.batch_size if regular is None else regular.batch_size
        sampler: Iterable[Any] = batches if self._whole_batches else (regular or loader).sampler  # type: ignore[assignment]
        self._sampler = self._plain(sampler)
        self.counts_samples = not self._whole_batches
        self.size = length_of(self._sampler)
        self.batch = 1 if self._whole_batches else self._batch_size or 1
        self.drop_last = bool((regular or loader).drop_last) and not self._whole_batches
        self.divisible = self._batch_size is not None and self.size is not None
        if _replaces(self._sampler):
            self.warnings.append(REPLACEMENT)

    def order(self) -> Iterable[Any]:
        return self._sampler

    def load(self, batches: Iterable[list[Any]], generator: torch.Generator | None) -> Iterable[Any]:
        loader = copy.copy(self._loader)
        # Set through `__dict__`, because `DataLoader.__setattr__` does not allow these attributes to be changed.
        changed = loader.__dict__
        changed["_iterator"] = None
        if generator is not None:
            changed["generator"] = generator
        if self._whole_batches:
            changed["batch_sampler"] = _Each(batches)
        elif self._batch_size is None:
            changed["sampler"] = _Each(batches)
        else:
            changed["batch_sampler"] = batches
        return loader

    def samples(self, items: list[Any]) -> int | None:
        if not self._whole_batches:
            return len(items)
        return len(items[0]) if isinstance(items[0], Sized) else None

    def _plain(self, sampler: Iterable[Any]) -> Iterable[Any]:
        """Return the sampler itself or, for a `DistributedSampler`, a sampler over the whole dataset."""
        if isinstance(sampler, BatchSampler) and isinstance(sampler.sampler, DistributedSampler):
            return BatchSampler(self._plain(sampler.sampler), sampler.batch_size, sampler.drop_last)
        if not isinstance(sampler, DistributedSampler):
            return sampler
        self.warnings.append(
            "distribute() splits the data itself, so it ignores the loader's DistributedSampler. Remove the "
            f"sampler, and give shuffle={sampler.shuffle!r} to the DataLoader."
        )
        whole: Sampler[Any] = (
            RandomSampler(sampler.dataset) if sampler.shuffle else SequentialSampler(sampler.dataset)  # type: ignore[arg-type]
        )
        return whole


class ItemSource:
    """An iterable that is split by the objects that it yields."""

    batch = 1
    drop_last = False
    chunk = 1
    divisible = False
    counts_samples = False

    def __init__(self, items: Iterable[Any]) -> None:
        self.key: object = items
        self.inner: object = items
        self.warnings: list[str] = []
        self.size: int | None = length_of(items)
        # Some loaders are their own iterators and begin again with each pass. Such loaders usually have a length.
        self.once = isinstance(items, Iterator) and self.size is None
        self._items = items
        self.stateful = _stateful(items)
        if _may_reorder(items):
            self._items = _in_order(items)
            self.warnings.append(IN_ORDER)
        if not isinstance(items, list | tuple | range):
            self.warnings.append(
                f"distribute() can split a {_described(items)} only by its batches: every worker produces all of "
                "them, and skips those of the other workers. To avoid this, use a DataLoader over a dataset with a "
                "length, or select each worker's data with paceline.worker_index() and paceline.worker_count()."
            )

    def order(self) -> Iterable[Any]:
        return self._items

    def load(self, batches: Iterable[list[Any]], generator: torch.Generator | None) -> Iterable[Any]:
        # Every worker must produce the same batches, so the seeds of all workers are the same as well.
        return _Each(batches)

    def samples(self, items: list[Any]) -> int | None:
        return None


class _Each:
    """Yields the only item of each batch."""

    def __init__(self, batches: Iterable[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for [item] in self._batches:
            yield item

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def _may_reorder(loader: Iterable[Any]) -> bool:
    """Return True if a loader yields each batch as soon as one of its processes has loaded it."""
    return getattr(loader, "in_order", True) is False and getattr(loader, "num_workers", 0) > 0


def _in_order(loader: L) -> L:
    """Return a copy of a loader that yields its batches in the order of its sampler."""
    # Some libraries wrap a loader in an object whose `__class__` is `DataLoader`, so `isinstance` is not enough.
    if not issubclass(type(loader), DataLoader):
        raise ConfigurationError(
            f"distribute() cannot split a {type(loader).__name__} with in_order=False, because all workers must "
            "produce the same order. Create the loader with in_order=True."
        )
    ordered = copy.copy(loader)
    ordered.__dict__.update(_iterator=None, in_order=True)
    return ordered


def _stateful(items: Iterable[Any]) -> Stateful | None:
    """Return the iterable, or the dataset of a loader without processes, if it can go on from a state; else None."""
    dataset = items.dataset if isinstance(items, DataLoader) and items.num_workers == 0 else None
    for each in (items, dataset):
        if all(callable(getattr(each, method, None)) for method in METHODS):
            found: Stateful = each  # type: ignore[assignment]
            return found
    return None


def _replaces(sampler: object) -> bool:
    """Return True if a sampler, or the sampler in a batch sampler, draws with replacement."""
    while sampler is not None:
        if getattr(sampler, "replacement", False) is True:
            return True
        sampler = getattr(sampler, "sampler", None)
    return False


def _described(items: Iterable[Any]) -> str:
    name = type(items).__name__
    over_stream = isinstance(items, DataLoader) and isinstance(items.dataset, IterableDataset)
    return f"{name} over an IterableDataset" if over_stream else name


def length_of(items: Iterable[Any]) -> int | None:
    """Return the length of an iterable; None if it is unknown."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except (TypeError, NotImplementedError):
        return None  # for example, a DataLoader over an IterableDataset without a length


# -- The streams of epochs of a worker: which passes belong together, and how many of them have begun --------

log = logging.getLogger("paceline.train.data")


class DataStream:
    """A stream of epochs: all passes over one source that is distributed at one place in the script.

    Attributes:
        number: index of the stream among the streams of this worker.
        name: name of the stream, which is the same in all workers.
        epoch: number of the last pass that has begun, counted from 0; -1 before the first one.
        first: number of the pass that is epoch 0 for `set_epoch`; None if this is not known, because the worker has
            joined late.
        skipped: number of passes that the job had begun before this worker joined, and that this worker does not make.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.epoch = -1
        self.first: int | None = 0
        self.skipped = 0
        self._key: Callable[[], object] = lambda: None
        self._weak = True
        self._warned: set[str] = set()

    def warn(self, warnings: Iterable[str]) -> None:
        """Log warnings about the source. Each of them is logged only once, even if every epoch repeats it."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s", warning)

    def serves(self, key: object) -> bool:
        """Return True if this is the stream of the source with this key."""
        return self._key() is key

    @property
    def free(self) -> bool:
        """True if another source may take over the stream, because its source no longer exists or cannot be tracked."""
        return not self._weak or self._key() is None

    def adopt(self, key: object) -> None:
        """Become the stream of another source."""
        self._weak = _can_be_tracked(key)
        self._key = ref(key) if self._weak else lambda: key


def _can_be_tracked(key: object) -> bool:
    """Return True if it can be known when an object no longer exists."""
    try:
        ref(key)
    except TypeError:  # for example, a list
        return False
    return True


def sites_apart(site: str, loaders: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yield a place for each loader that one call distributes, so that no two of these loaders share a stream.

    Loaders with different datasets have the place of the call. A stream belongs to a dataset, so another loader with
    the same dataset has a place of its own.

    Raises:
        ConfigurationError: a loader cannot be split.
    """
    earlier: list[object] = []
    for loader in loaders:
        key = source_of(loader).key
        # Another source may take over the stream of a source that cannot be tracked.
        number = sum(each is key or not _can_be_tracked(each) for each in earlier)
        yield f"{site}/{number}" if number else site
        earlier.append(key)


class DataStreams:
    """The streams of one worker.

    A stream belongs to a call of `distribute` in the script and to a dataset, not to a loader. So `distribute` may be
    called once or in every epoch, even with a new loader each time. If the dataset is new each time as well, its
    stream continues the stream of an earlier dataset that no longer exists. Since all workers run the same script,
    they give a stream the same name, even if one of them distributes more sources than the others.
    """

    def __init__(self) -> None:
        self._by_site: dict[str, list[DataStream]] = {}
        self._count = 0
        # name -> number of passes that the job had begun when the worker joined
        self._skipped: dict[str, int] = {}

    @property
    def passes(self) -> tuple[tuple[str, int], ...]:
        """(name, number of passes that have begun) for each stream."""
        begun = {stream.name: stream.epoch + 1 for streams in self._by_site.values() for stream in streams}
        return tuple({**self._skipped, **begun}.items())

    def skip(self, passes: Iterable[tuple[str, int]]) -> None:
        """Skip the passes that the job had begun when the worker joined: (name, number of passes)."""
        self._skipped = dict(passes)
        for streams in self._by_site.values():
            for stream in streams:
                self._skip_in(stream)

    def of(self, key: object, site: str) -> DataStream:
        """Return the stream of a source that is distributed at this place in the script."""
        streams = self._by_site.setdefault(site, [])
        for stream in streams:
            if stream.serves(key):
                return stream
        for stream in streams:
            if stream.free:
                break
        else:
            if self._count == MOST_LOADERS:
                raise ConfigurationError(
                    f"distribute() was called for more than {MOST_LOADERS} datasets that still exist. Delete the "
                    "datasets that are no longer used."
                )
            stream = DataStream(self._count, f"{site}#{len(streams)}")
            self._skip_in(stream)
            self._count += 1
            streams.append(stream)
        stream.adopt(key)
        return stream

    def _skip_in(self, stream: DataStream) -> None:
        if (passes := self._skipped.get(stream.name, 0)) > stream.epoch + 1:
            stream.skipped += passes - 1 - stream.epoch
            stream.epoch, stream.first = passes - 1, None


streams_of = OfSession(lambda _: DataStreams())
"""Returns the streams of a worker, given its session."""
