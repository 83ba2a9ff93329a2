"""The front end for data: each worker's part of what a loader gives.

Static parts, as in the papers: at the start of every epoch the loader's own sampler is run once in each worker,
under a generator seeded from the run's seed and the epoch, so that all workers see the same order; each takes
every n-th item, and all parts are equally long. What is left over, fewer items than there are workers, falls
on other items in each epoch of a shuffled loader.
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

__all__ = ["distribute", "worker_count", "worker_index"]

T = TypeVar("T")

# What a loader was made with, besides its dataset and what decides on the order.
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


def worker_index() -> int:
    """This process's worker, from 0; 0 in a script that runs by itself."""
    session = current()
    return 0 if session is None else session.worker


def worker_count() -> int:
    """How many workers the run has; 1 in a script that runs by itself."""
    session = current()
    return 1 if session is None else session.workers


def distribute(loader: DataLoader[T]) -> Iterable[T]:
    """This worker's part of a loader, reshuffled every epoch as the loader itself would.

    Args:
        loader: over a dataset with a length. Its batch size is each worker's. A sampler of your own must draw
            from torch's generator, or be the same in every worker.

    Returns:
        An iterable with a length; each pass over it is an epoch. Without a run, the loader itself.

    Raises:
        ConfigurationError: the loader cannot be split.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "distribute() cannot split a loader over an IterableDataset: it has no length and no order to split. "
            "Give each worker its part inside the dataset, by paceline.worker_index() and paceline.worker_count()."
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
    """Every n-th item of another sampler, whose order is the same in all workers."""

    def __init__(self, whole: Iterable[T], session: Session, passes: Iterator[int]) -> None:
        self._whole = whole
        self._session = session
        self._worker = session.worker
        self._workers = session.workers
        self._seed = session.seed
        self._passes = passes
        if not len(self):
            raise ConfigurationError(
                f"distribute() cannot give each of {self._workers} worker{'s' * (self._workers > 1)} a part of "
                f"{self._total()} items."
            )

    def __len__(self) -> int:
        return self._total() // self._workers

    def __iter__(self) -> Iterator[T]:
        with torch.random.fork_rng(devices=[]):
            epoch = next(self._passes)
            self._session.epoch_begins(epoch)
            seed = _mix(self._seed, epoch)
            # Of samplers. torch.manual_seed would seed every accelerator's as well, with a stack trace for each.
            torch.default_generator.manual_seed(seed)
            generator = getattr(self._whole, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            order = list(self._whole)
        return iter(order[self._worker :: self._workers][: len(order) // self._workers])

    def _total(self) -> int:
        return len(self._whole)  # type: ignore[arg-type]  # a map-style loader's sampler has a length


class Passes:
    """Counts the passes over each dataset, so that `distribute` may be called once or in every epoch alike, also
    with a new loader each time."""

    def __init__(self) -> None:
        self._weak: WeakKeyDictionary[object, Iterator[int]] = WeakKeyDictionary()
        self._strong: dict[
            int, tuple[object, Iterator[int]]
        ] = {}  # of datasets that can be no such key: lists, say

    def over(self, dataset: object) -> Iterator[int]:
        """The count that goes with a dataset."""
        try:
            return self._weak.setdefault(dataset, itertools.count())
        except TypeError:
            _, count = self._strong.setdefault(id(dataset), (dataset, itertools.count()))
            return count


_passes: WeakKeyDictionary[Session, Passes] = WeakKeyDictionary()


def _mix(seed: int, epoch: int) -> int:
    """One seed out of two numbers, far apart for neighbours (the finalizer of SplitMix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + epoch + 1) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    z = (z ^ z >> 30) * 0x94D049BB133111EB & (1 << 64) - 1
    return z ^ z >> 31
