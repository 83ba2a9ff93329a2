"""The data of a script that is resumed: it gets the batches that are left, in the same order, with the same draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from paceline import distribute
from paceline.core.data_feed import DataFeed
from paceline.core.data_ledger import DataLedger
from paceline.core.job_cut import LoaderCut
from paceline.core.lease import Split
from paceline.core.loader_ledger import LoaderLedger, PositionCounts
from paceline.core.requests import Request
from paceline.train.session import Session, install, resumption_of
from tests.support.data_grants import granted
from tests.support.marks import thorough

EPOCHS, SIZE, BATCH = 3, 22, 4

Cut = tuple[bytes, tuple[LoaderCut, ...]]


class Servers:
    """Where the worker's state is kept, and where it comes from in a resumed run."""

    def __init__(self, worker: Worker, state: bytes | None) -> None:
        self._worker = worker
        self._state = state

    def keep_worker_state(self, state: Sequence[memoryview]) -> None:
        worker = self._worker
        pushed = worker.data.pushed
        worker.made = b"".join(state), worker.ledger.cut({0: [(each, each) for each in pushed]})

    def fetch_worker_states(self) -> tuple[bytes | None, bytes | None]:
        return self._state, self._state


class Worker:
    """The part of the only worker's session that `distribute` uses, with a job that can be cut."""

    def __init__(self, resumed: Cut | None = None) -> None:
        self.worker = self.main_worker = self.seed = self.cut = 0
        self.workers = 1
        self.split, self.batch, self.joint_batch = "auto", "equal", False
        self.device = torch.device("cpu")
        self.data = DataFeed()
        self.core = SimpleNamespace(data=self.data, lockstep=True, iteration=0)
        self.resumed = int(resumed is not None)
        self.ledger = DataLedger(() if resumed is None else resumed[1])
        self.servers = Servers(self, None if resumed is None else resumed[0])
        self.made: Cut | None = None

    def exchange(self, ask: Callable[[], Sequence[Request]]) -> None:
        self._carry(ask())

    def _carry(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.data.handle(granted(self.ledger, 0, 1, request))

    def push(self, cut: int) -> None:
        """Push what has been computed. The job is cut after push number `cut`."""
        self.data.accumulate()
        self._carry(self.data.push())
        self.data.answered()
        self.core.iteration += 1
        self.cut = int(self.core.iteration == cut)

    def epoch_begins(self, epoch: int) -> None:
        pass

    def watched(self) -> None:
        """No time is measured."""


def drawn() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


class Noisy(Dataset[tuple[int, float]]):
    """Items with noise from all generators, as an augmentation draws it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, drawn()


class Stream(IterableDataset[tuple[int, float]]):
    """Items of unknown number, in an order that depends on the generators."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for index in torch.randperm(SIZE).tolist():
            yield index, drawn()


class Resumable(Stream):
    """A stream that can go on from a state. It counts the items that it yields."""

    def __init__(self) -> None:
        self.yielded = 0
        self._at, self._from, self._seed = 0, 0, 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        self._at, self._from = self._from, 0
        if not self._at:
            self._seed = int(torch.randint(10**6, ()))
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self._seed)).tolist()
        for index in order[self._at :]:
            self._at += 1
            self.yielded += 1
            yield index, drawn()

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._from, self._seed = state["at"], state["seed"]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Noisy(), BATCH),
    "shuffled": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "drop last": lambda: DataLoader(Noisy(), BATCH, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        Noisy(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "own sampler": lambda: DataLoader(
        Noisy(), BATCH, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE, generator=torch.Generator())
    ),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "resumable stream": lambda: DataLoader(Resumable(), BATCH),
}


def trained(
    make: Callable[[], DataLoader[Any]],
    *,
    cut: int = -1,
    resumed: Cut | None = None,
    every: int = 1,
    split: Split = "auto",
) -> tuple[list[list[tuple[Any, ...]]], Worker, DataLoader[Any]]:
    """Return the batches of each epoch, the worker and the loader. The script pushes once in `every` batches."""
    worker = Worker(resumed)
    install(cast(Session, worker), for_thread=True)
    try:
        torch.manual_seed(7 if resumed is None else 8)
        random.seed(7 if resumed is None else 8)
        np.random.seed(7 if resumed is None else 8)
        loader = make()
        batches = distribute(loader, split=split)
        epochs: list[list[tuple[Any, ...]]] = []
        for _ in range(EPOCHS):
            epochs.append([])
            got = 0
            for got, (indices, noise) in enumerate(batches, 1):
                if resumption_of(worker).repeats:  # type: ignore[arg-type]
                    continue
                epochs[-1].append((tuple(indices.tolist()), tuple(noise.tolist()), drawn()))
                if got % every == 0:
                    worker.push(cut)
            if not isinstance(loader.dataset, Stream):
                assert len(batches) == (got or len(loader))  # type: ignore[arg-type]
        return epochs, worker, loader
    finally:
        install(None, for_thread=True)


def counts_of(worker: Worker) -> list[PositionCounts]:
    """Return the counts of each loader after everything that was pushed is settled."""
    cut = worker.ledger.cut({0: [(each, each) for each in worker.data.pushed]})
    return [LoaderLedger(loader).counts() for loader in cut]


def test_the_length_of_a_loader_is_that_of_the_rest_under_a_dynamic_split() -> None:
    _, worker, _ = trained(LOADERS["shuffled"], cut=3, split="dynamic")
    left, _, _ = trained(LOADERS["shuffled"], resumed=worker.made, split="dynamic")
    assert [len(epoch) for epoch in left] == [3, 6, 6]


@pytest.mark.parametrize(
    ("name", "every"), [*((name, 1) for name in LOADERS), ("shuffled", 2), ("resumable stream", 2)]
)
@pytest.mark.parametrize("cut", [1, 6, 8, *thorough(3, 4, 5)])
def test_a_script_goes_on_with_the_very_batch_and_its_draws(name: str, every: int, cut: int) -> None:
    expected, alone, _ = trained(LOADERS[name], every=every)
    undisturbed, worker, _ = trained(LOADERS[name], every=every, cut=cut)
    assert undisturbed == expected
    assert worker.made is not None
    resumed, after, loader = trained(LOADERS[name], every=every, resumed=worker.made)
    epoch, done = divmod(cut, len(expected[0]) // every)
    left = [[] if number < epoch else each for number, each in enumerate(expected)]
    left[epoch] = left[epoch][done * every :]
    assert resumed == left
    assert [counts_of(each) for each in (worker, after)] == [counts_of(alone)] * 2
    if isinstance(loader.dataset, Resumable):
        # only the first batch of each epoch that has ended is produced again, and compared
        assert loader.dataset.yielded <= SIZE * (EPOCHS - epoch) - (done * every - epoch) * BATCH
