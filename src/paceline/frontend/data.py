"""`distribute`, which gives each worker its part of the data.

As in the papers, the parts do not depend on the speed of the workers. At the start of every epoch, each worker runs
the loader's own sampler once, with a generator seeded from the run's seed and the epoch, so that all workers see the
same order. Each of n workers takes every n-th item. All parts have the same length. If the number of items is not a
multiple of n, the last items of the order are left out. If the loader shuffles, these items differ between epochs.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ..errors import ConfigurationError
from .session import Session, current

__all__ = ["distribute"]

T = TypeVar("T")

KEPT = {
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
} & set(inspect.signature(DataLoader.__init__).parameters)
"""Arguments that are copied from the user's loader: all except the dataset and those that set the order."""


def distribute(loader: DataLoader[T]) -> Iterable[T]:
    """Return this worker's part of a loader.

    All parts have the same length. All workers use the same order of the items, and each of n workers takes every
    n-th item. If the loader shuffles, the order changes in every epoch and depends on the run's seed. In a script
    that runs by itself, the loader is returned unchanged. Call this function once, or at the start of every epoch.
    Each pass over the result is one epoch.

    Args:
        loader: a loader over a dataset with a length. Its batch size is the batch size of each worker. A custom
            sampler must draw from torch's default generator, or yield the same order in every worker.

    Returns:
        An iterable of batches. Its length is the number of batches.

    Raises:
        ConfigurationError: the dataset is an `IterableDataset`, or there are fewer items (with a custom
            `batch_sampler`, fewer batches) than workers.

    Example:
        >>> import paceline, torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True)
        >>> for epoch in range(2):
        ...     for (batch,) in paceline.distribute(loader):
        ...         pass  # train on the batch
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "distribute() cannot split a loader over an IterableDataset: such a dataset has no length and no order "
            "to split. Select each worker's items in the dataset itself, with paceline.worker_index() and "
            "paceline.worker_count()."
        )
    session = current()
    if session is None:
        return loader
    kept: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    passes = _passes.setdefault(session, Passes()).over(loader.dataset)
    if loader.batch_size is None and loader.batch_sampler is not None:  # the user's own batches
        return DataLoader(loader.dataset, batch_sampler=Part(loader.batch_sampler, session, passes), **kept)
    part: Part[Any] = Part(loader.sampler, session, passes)
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=part, drop_last=bool(loader.drop_last), **kept
    )


class Part(Sampler[T]):
    """One worker's part of another sampler: every n-th item of an order that is the same in all workers.

    Args:
        whole: the sampler to split.
        session: this worker's session.
        passes: counter of the passes over the dataset.
    """

    def __init__(self, whole: Iterable[T], session: Session, passes: Iterator[int]) -> None:
        self._whole = whole
        self._session = session
        self._worker = session.worker
        self._workers = session.workers
        self._seed = session.seed
        self._passes = passes
        if not len(self):
            raise ConfigurationError(
                f"distribute() cannot split {self._total()} items among {self._workers} "
                f"worker{'s' * (self._workers > 1)}: each worker needs at least one item."
            )

    def __len__(self) -> int:
        return self._total() // self._workers

    def __iter__(self) -> Iterator[T]:
        with torch.random.fork_rng(devices=[]):
            epoch = next(self._passes)
            self._session.epoch_begins(epoch)
            seed = _mix(self._seed, epoch)
            # torch.manual_seed would also seed every accelerator, and record a stack trace for each.
            torch.default_generator.manual_seed(seed)
            generator = getattr(self._whole, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            order = list(self._whole)
        return iter(order[self._worker :: self._workers][: len(order) // self._workers])

    def _total(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]  # a map-style loader's sampler has a length


class Passes:
    """Counters of the passes over each dataset.

    A counter belongs to a dataset and not to a loader. So `distribute` may be called once or in every epoch, even
    with a new loader each time.
    """

    def __init__(self) -> None:
        self._weak: WeakKeyDictionary[object, Iterator[int]] = WeakKeyDictionary()
        # id -> (dataset, counter), for datasets that cannot be weak keys, such as lists. Keeping these datasets alive
        # prevents other objects from getting the same id.
        self._strong: dict[int, tuple[object, Iterator[int]]] = {}

    def over(self, dataset: object) -> Iterator[int]:
        """Return the counter of a dataset."""
        try:
            return self._weak.setdefault(dataset, itertools.count())
        except TypeError:
            _, count = self._strong.setdefault(id(dataset), (dataset, itertools.count()))
            return count


_passes: WeakKeyDictionary[Session, Passes] = WeakKeyDictionary()


def _mix(seed: int, epoch: int) -> int:
    """Mix two numbers into one seed, so that nearby numbers give very different seeds (finalizer of SplitMix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + epoch + 1) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    z = (z ^ z >> 30) * 0x94D049BB133111EB & (1 << 64) - 1
    return z ^ z >> 31
