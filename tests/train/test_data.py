"""`distribute`: each worker's part of a loader."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline import DistributedOptimizer, distribute, worker_count, worker_index
from paceline.core.data_feed import DataFeed
from paceline.core.data_ledger import DataLedger
from paceline.core.requests import Request
from paceline.errors import ConfigurationError, UsageError
from paceline.train.data import DistributedLoader
from paceline.train.session import Session, current, install
from tests.support.data_grants import granted

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

Epochs = list[list[int]]
Load = Callable[[], Iterable[Any]]


class Worker:
    """The part of a session that `distribute` uses, under a sync model that keeps all workers in lockstep."""

    def __init__(self, worker: int, workers: int, seed: int = 0, ledger: DataLedger | None = None) -> None:
        self.worker = worker
        self.workers = workers
        self.main_worker = 0
        self.split = "auto"
        self.seed = seed
        self.device = torch.device("cpu")
        self.batch = "equal"
        self.joint_batch = False
        self.data = DataFeed()
        self.core = SimpleNamespace(data=self.data, lockstep=True, iteration=0)
        self.resumed = self.cut = 0
        self.epochs: list[int] = []  # announced by epoch_begins()
        self._ledger = ledger or DataLedger()

    def exchange(self, ask: Callable[[], Sequence[Request]]) -> None:
        for request in ask():
            self.data.handle(granted(self._ledger, self.worker, self.workers, request))

    def epoch_begins(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def watched(self) -> None:
        """No time is measured."""


@contextlib.contextmanager
def being(worker: Worker) -> Iterator[Worker]:
    install(cast(Session, worker), for_thread=True)
    try:
        yield worker
    finally:
        install(None, for_thread=True)


def items(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def flat(batches: Iterable[Any]) -> list[int]:
    """Return the items of an epoch, batch after batch."""
    found: list[int] = []
    for batch in batches:
        found += torch.as_tensor(batch[0]).reshape(-1).tolist()
    return found


def epochs_of(load: Load, workers: int, epochs: int = 1, seed: int = 0) -> list[Epochs]:
    """Return the items that each worker sees in each epoch, as [worker][epoch]. `load` is called once per worker."""
    seen = []
    for index in range(workers):
        with being(Worker(index, workers, seed)):
            loader = load()
            seen.append([flat(loader) for _ in range(epochs)])
    return seen


def shuffled(count: int = 100, **options: Any) -> Load:
    dataset = items(count)
    return lambda: distribute(DataLoader(dataset, shuffle=True, **options))


def interleaved(parts: list[list[int]]) -> list[int]:
    """Return the common order from which all workers took their parts."""
    return [item for row in zip(*parts, strict=True) for item in row]


# -- parts ------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    count=st.integers(1, 60),
    workers=st.integers(2, 7),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_parts_are_disjoint_and_leave_out_only_what_cannot_be_divided(
    count: int, workers: int, batch_size: int, shuffle: bool, seed: int
) -> None:
    dataset = items(max(count, workers))

    def load() -> Iterable[Any]:
        return distribute(DataLoader(dataset, batch_size=batch_size, shuffle=shuffle))

    rest = len(dataset) % (batch_size * workers)
    left_out = rest if rest < workers else 0
    for epoch in zip(*epochs_of(load, workers, epochs=2, seed=seed), strict=True):
        sizes = {len(part) for part in epoch}
        assert max(sizes) - min(sizes) <= 1
        together = [item for part in epoch for item in part]
        assert len(set(together)) == len(together) == len(dataset) - left_out
        assert set(together) <= set(range(len(dataset)))


def test_the_remainder_falls_on_other_items_in_other_epochs() -> None:
    seen = epochs_of(shuffled(11), workers=3, epochs=12)
    missed = {frozenset(range(11)) - {i for part in epoch for i in part} for epoch in zip(*seen, strict=True)}
    assert {len(left) for left in missed} == {2}
    assert len(missed) > 6


def test_a_part_has_the_length_that_its_batches_have() -> None:
    for drop_last, batches in [(False, 4), (True, 3)]:
        with being(Worker(1, 3)):
            loader = distribute(DataLoader(items(100), batch_size=10, shuffle=True, drop_last=drop_last))
            assert len(loader) == batches  # type: ignore[arg-type]
            sizes = [len(batch[0]) for batch in loader]
        assert sizes == [10, 10, 10, 3][:batches]


# -- order ------------------------------------------------------------------------------------------------


def test_a_shuffled_loader_is_reshuffled_in_every_epoch() -> None:
    seen = epochs_of(shuffled(), workers=2, epochs=5)
    orders = [interleaved(list(epoch)) for epoch in zip(*seen, strict=True)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert len({frozenset(part) for part in seen[0]}) == 5  # other items, not only another order


def test_a_sequential_loader_keeps_its_order() -> None:
    dataset = items(10)
    seen = epochs_of(lambda: distribute(DataLoader(dataset, batch_size=2)), workers=3, epochs=2)
    assert seen == [[[0, 1, 6, 7]] * 2, [[2, 3, 8]] * 2, [[4, 5, 9]] * 2]


def test_a_seed_gives_one_order_and_another_seed_another() -> None:
    assert epochs_of(shuffled(), 2, 3, seed=5) == epochs_of(shuffled(), 2, 3, seed=5)
    assert epochs_of(shuffled(), 2, 3, seed=5) != epochs_of(shuffled(), 2, 3, seed=6)


def test_an_epoch_of_one_seed_is_not_another_epoch_of_the_next() -> None:
    orders = [tuple(part) for seed in range(6) for part in epochs_of(shuffled(), 2, 6, seed=seed)[0]]
    assert len(set(orders)) == 36


def test_the_order_does_not_hang_on_what_a_worker_has_drawn() -> None:
    expected = epochs_of(shuffled(), workers=2, epochs=3)
    dataset = items(100)
    with being(Worker(1, 2)):
        loader = distribute(DataLoader(dataset, shuffle=True))
        for epoch in range(3):
            torch.manual_seed(epoch * 12345)
            assert flat(loader) == expected[1][epoch]


def test_a_worker_goes_on_to_draw_as_if_nothing_had_been_shuffled() -> None:
    """Otherwise dropout, for example, would be the same in all workers, or in all epochs."""
    with being(Worker(0, 2)):
        loader = distribute(DataLoader(items(20), sampler=RandomSampler(items(20))))
        torch.manual_seed(3)
        list(DataLoader(items(10)))  # a loader draws the seed of its processes
        expected = torch.rand(4)
        torch.manual_seed(3)
        assert len(list(loader)) == 10
        assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("new_loader", [True, False])
def test_distribute_may_be_called_again_in_each_epoch(new_loader: bool) -> None:
    expected = epochs_of(shuffled(), workers=2, epochs=4)
    dataset = items(100)
    for index in range(2):
        loader = DataLoader(dataset, shuffle=True)
        with being(Worker(index, 2)):
            seen = []
            for _ in range(4):
                loader = DataLoader(dataset, shuffle=True) if new_loader else loader
                seen.append(flat(distribute(loader)))
        assert seen == expected[index]


def test_a_dataset_that_is_a_list_is_reshuffled_as_well() -> None:
    """A list cannot be held weakly, so its epochs are counted in another way."""
    dataset: Any = [(i,) for i in range(60)]
    parts = []
    for index in range(2):
        loader: DataLoader[Any] = DataLoader(dataset, shuffle=True)
        with being(Worker(index, 2)):
            parts.append([flat(distribute(loader)) for _ in range(3)])
    orders = [interleaved([one, two]) for one, two in zip(*parts, strict=True)]
    assert all(sorted(order) == list(range(60)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_a_list_is_reshuffled_with_a_new_loader_in_each_epoch() -> None:
    dataset: Any = [(i,) for i in range(60)]
    with being(Worker(0, 2)):
        seen = [tuple(flat(distribute(DataLoader(dataset, shuffle=True)))) for _ in range(4)]
    assert len(set(seen)) == 4


def test_training_and_test_data_are_counted_apart() -> None:
    expected = epochs_of(shuffled(), workers=2, epochs=2)
    dataset, other = items(100), items(100)

    def read(data: TensorDataset) -> list[int]:
        return flat(distribute(DataLoader(data, shuffle=True)))

    for index in range(2):
        with being(Worker(index, 2)):
            first = read(dataset)
            for _ in range(index + 1):  # one worker reads it more often than the other
                read(other)
            assert [first, read(dataset)] == expected[index]


def test_a_dataset_that_is_made_for_each_epoch_is_reshuffled() -> None:
    with being(Worker(0, 2)) as worker:
        seen = [tuple(flat(distribute(DataLoader(items(60), shuffle=True)))) for _ in range(5)]
        assert len(set(seen)) == 5
        assert worker.data.push() == []
        assert len(worker.data.pushed) == 1  # all epochs belong to one stream


def test_two_places_in_a_script_do_not_disturb_each_other() -> None:
    """One worker may distribute something that the others do not."""
    ledger = DataLedger()
    dataset, other = items(8), items(6)
    parts = []
    for index in range(2):
        with being(Worker(index, 2, ledger=ledger)):
            if index == 1:
                assert flat(distribute(DataLoader(other))) == [1, 3, 5]
            parts.append(flat(distribute(DataLoader(dataset))))
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_an_epoch_that_was_broken_off_is_an_epoch() -> None:
    expected = epochs_of(shuffled(), workers=2, epochs=2)
    dataset = items(100)
    with being(Worker(0, 2)):
        loader = distribute(DataLoader(dataset, shuffle=True))
        first = next(iter(loader))
        assert first[0].tolist() == expected[0][0][:1]
        assert flat(loader) == expected[0][1]


def test_a_loader_with_a_generator_of_its_own_is_split_and_reshuffled() -> None:
    dataset = items(40)
    parts = []
    for index in range(2):
        generator = torch.Generator().manual_seed(index)  # differs between workers, as in a careless script
        with being(Worker(index, 2)):
            loader = distribute(DataLoader(dataset, shuffle=True, generator=generator))
            parts.append([flat(loader) for _ in range(3)])
    orders = [interleaved([one, two]) for one, two in zip(*parts, strict=True)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


# -- kinds of loaders -------------------------------------------------------------------------------------


def test_a_weighted_sampler_draws_once_for_all_workers() -> None:
    weights = [0.0] * 10 + [1.0] * 10
    dataset = items(20)

    def load() -> Iterable[Any]:
        return distribute(DataLoader(dataset, sampler=WeightedRandomSampler(weights, 31)))

    seen = epochs_of(load, workers=3, epochs=2)
    assert [[len(part) for part in worker] for worker in seen] == [[10, 10]] * 3
    assert all(item >= 10 for worker in seen for part in worker for item in part)
    orders = {tuple(interleaved(list(epoch))) for epoch in zip(*seen, strict=True)}
    assert len(orders) == 2


def test_a_sampler_that_repeats_itself_is_split_by_position() -> None:
    dataset = items(4)
    order = [3, 3, 1, 0, 2, 2, 3]
    assert epochs_of(lambda: distribute(DataLoader(dataset, sampler=order)), workers=2) == [
        [[3, 1, 2]],
        [[3, 0, 2]],
    ]


def test_batches_of_the_users_own_are_dealt_out_whole() -> None:
    dataset = items(20)

    def load() -> Iterable[Any]:
        batches = list(BatchSampler(SequentialSampler(dataset), batch_size=3, drop_last=False))
        return distribute(DataLoader(dataset, batch_sampler=batches))

    with being(Worker(0, 2)):
        assert [batch[0].tolist() for batch in load()] == [[0, 1, 2], [6, 7, 8], [12, 13, 14]]
    with being(Worker(1, 2)):
        assert [batch[0].tolist() for batch in load()] == [[3, 4, 5], [9, 10, 11], [15, 16, 17]]


def test_shuffled_batches_of_the_users_own_are_the_same_in_all_workers() -> None:
    dataset = items(20)

    def load() -> Iterable[Any]:
        batches = BatchSampler(RandomSampler(dataset), batch_size=5, drop_last=True)
        return distribute(DataLoader(dataset, batch_sampler=batches))

    seen = epochs_of(load, workers=2, epochs=3)
    epochs = [sorted(one + two) for one, two in zip(*seen, strict=True)]
    assert epochs == [list(range(20))] * 3
    assert len({tuple(part) for part in seen[0]}) == 3


def test_a_loader_without_batches_gives_single_items() -> None:
    dataset = items(10)
    with being(Worker(1, 2)):
        loader = distribute(DataLoader(dataset, batch_size=None))
        assert [int(item[0]) for item in loader] == [1, 3, 5, 7, 9]
        assert len(loader) == 5  # type: ignore[arg-type]


def test_what_a_loader_does_with_its_samples_is_kept() -> None:
    def collate(samples: list[tuple[torch.Tensor]]) -> str:
        return "+".join(str(int(sample[0])) for sample in samples)

    with being(Worker(0, 2)):
        loader = distribute(DataLoader(items(8), batch_size=3, collate_fn=collate))
        assert [str(batch) for batch in loader] == ["0+1+2", "6"]


def test_what_yields_the_data_of_all_workers_is_not_shown() -> None:
    """Accelerate's `skip_first_batches` and the like would build a loader from it that is not divided."""
    plain = DataLoader(items(8), batch_size=2)
    with being(Worker(0, 2)):
        loader: Any = distribute(plain)
        for name in ("sampler", "batch_sampler"):
            with pytest.raises(AttributeError, match=rf"does not show the '{name}'.*paceline.integrations"):
                getattr(loader, name)
            assert not hasattr(loader, name)
        assert (loader.dataset, loader.batch_size) == (plain.dataset, 2)
        endless: Any = distribute(DataLoader(Flow(), batch_size=2))
        with pytest.raises(AttributeError, match="does not show the 'dataset'"):
            _ = endless.dataset


def test_the_last_batch_can_be_dropped() -> None:
    with being(Worker(0, 2)):
        loader = distribute(DataLoader(items(10), batch_size=2, drop_last=True))
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [4, 5]]


def test_processes_that_load_data_give_the_same_parts() -> None:
    dataset = items(24)
    expected = epochs_of(lambda: distribute(DataLoader(dataset, batch_size=4, shuffle=True)), workers=2)
    with being(Worker(1, 2)):
        inner: DataLoader[Any] = DataLoader(
            items(24), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="forkserver"
        )
        assert [flat(distribute(inner))] == expected[1]


class Worn(DataLoader[Any]):
    """A loader with an `__iter__` of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for (batch,) in super().__iter__():
            yield batch * 10


class Named(DataLoader[Any]):
    """A loader with a constructor of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(items(count), batch_size=2)
        self.name = f"{count} items"


def test_a_subclass_of_a_loader_stays_what_it_is() -> None:
    with being(Worker(1, 2)):
        loader: Any = distribute(Named(8))
        assert [batch[0].tolist() for batch in loader] == [[2, 3], [6, 7]]
        assert (loader.name, loader.batch_size, len(loader.dataset)) == ("8 items", 2, 8)
        assert copy.copy(loader).name == "8 items"
        with pytest.raises(AttributeError, match="no attribute '_secret'"):
            _ = loader._secret


def test_persistent_processes_serve_all_epochs() -> None:
    expected = epochs_of(shuffled(24, batch_size=4), workers=2, epochs=3)
    with being(Worker(0, 2)):
        loader = distribute(
            DataLoader(items(24), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
        )
        assert [flat(loader) for _ in range(3)] == expected[0]


def test_a_loader_that_iterates_in_its_own_way_is_split_by_its_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = []
    for index in range(2):
        with being(Worker(index, 2)):
            parts.append([batch.tolist() for batch in distribute(Worn(items(10), batch_size=2))])
    assert parts == [[[0, 10], [40, 50]], [[20, 30], [60, 70]]]
    assert "can split a Worn only by its batches" in caplog.text


def test_a_loader_of_ones_own_that_shuffles_by_itself_has_one_order_in_all_workers() -> None:
    class Own:
        def __iter__(self) -> Iterator[int]:
            order = list(range(30))
            random.shuffle(order)
            return iter(order)

    parts = []
    for index in range(3):
        random.seed(index)
        with being(Worker(index, 3)):
            parts.append(list(distribute(Own())))
    assert sorted(item for part in parts for item in part) == list(range(30))


def test_lists_and_generators_are_split_by_their_items() -> None:
    ledger = DataLedger()
    with being(Worker(0, 2, ledger=ledger)):
        assert list(distribute([5, 6, 7, 8])) == [5, 7]
        assert list(distribute(item for item in range(5))) == [0, 2]  # the last one has no counterpart
    with being(Worker(1, 2, ledger=ledger)):
        assert list(distribute([5, 6, 7, 8])) == [6, 8]
        assert list(distribute(item for item in range(5))) == [1, 3]


class Flow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_loader_over_an_iterable_dataset_is_split_by_its_batches(caplog: pytest.LogCaptureFixture) -> None:
    parts = []
    for index in range(2):
        with being(Worker(index, 2)):
            loader = distribute(DataLoader(Flow(), batch_size=2))
            parts.append([[batch.tolist() for batch in loader] for _ in range(2)])
            with pytest.raises(TypeError, match="DataLoader has no length"):
                len(loader)  # type: ignore[arg-type]
    assert parts == [[[[0, 1], [4, 5]]] * 2, [[[2, 3], [6, 7]]] * 2]
    assert "a DataLoader over an IterableDataset only by its batches" in caplog.text


@pytest.mark.parametrize(("data", "total"), [(items(10), 5), (Flow(), None)], ids=["known", "unknown"])
def test_a_bar_of_tqdm_has_a_total_if_the_loader_has_a_length(
    data: Any, total: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with being(Worker(0, 2)):
        loader = distribute(DataLoader(data, batch_size=2), split="dynamic")
        bar = SimpleNamespace(iterable=loader, total=None)
        bars = SimpleNamespace(tqdm=SimpleNamespace(_instances=[bar]))
        monkeypatch.setitem(sys.modules, "tqdm.std", bars)
        assert len([*loader]) == 5
    assert bar.total == total


def test_a_distributed_sampler_is_replaced_by_the_sampler_of_one_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = items(24)
    for shuffle in (True, False):

        def load(shuffle: bool = shuffle) -> Iterable[Any]:
            return distribute(
                DataLoader(
                    dataset, sampler=DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=shuffle)
                )
            )

        one, two = epochs_of(load, workers=2)
        assert sorted(one[0] + two[0]) == list(range(24))
        assert (interleaved([one[0], two[0]]) == list(range(24))) == (not shuffle)
        assert f"give shuffle={shuffle} to the DataLoader" in caplog.text


def test_a_sampler_of_astronomic_length_is_not_listed() -> None:
    dataset = items(50)
    with being(Worker(1, 2)):
        loader = distribute(
            DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset, num_samples=10**10))
        )
        assert len(loader) == 10**10 // 8  # type: ignore[arg-type]
        seen = [batch[0].tolist() for batch, _ in zip(loader, range(30), strict=False)]
    assert len(seen) == 30
    assert {len(batch) for batch in seen} == {4}


def test_a_batch_sampler_without_a_length_is_split() -> None:
    class Pairs:
        def __iter__(self) -> Iterator[list[int]]:
            return ([first, first + 1] for first in range(0, 14, 2))

    dataset = items(14)
    parts = []
    for index in range(2):
        with being(Worker(index, 2)):
            loader = distribute(DataLoader(dataset, batch_sampler=Pairs()))
            parts.append([flat(loader) for _ in range(2)])
    assert parts == [[[0, 1, 4, 5, 8, 9]] * 2, [[2, 3, 6, 7, 10, 11]] * 2]


def test_a_sampler_that_yields_less_than_it_says_is_reported() -> None:
    class Liar:
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

        def __len__(self) -> int:
            return 20

    with (
        being(Worker(1, 2)),
        pytest.raises(ConfigurationError, match="yielded only 10 items, but its length is 20"),
    ):
        list(distribute(DataLoader(items(30), batch_size=8, sampler=Liar())))


def test_a_sampler_with_another_order_in_another_worker_is_reported() -> None:
    class Own:
        def __iter__(self) -> Iterator[int]:
            return iter(generator.permutation(20).tolist())

        def __len__(self) -> int:
            return 20

    ledger = DataLedger()
    generator = numpy.random.default_rng(1)

    def load() -> None:
        list(distribute(DataLoader(items(20), sampler=Own())))

    with being(Worker(0, 2, ledger=ledger)):
        load()
    with (
        being(Worker(1, 2, ledger=ledger)),
        pytest.raises(
            ConfigurationError, match="worker 1's loader differs from worker 0's: its order is different"
        ),
    ):
        load()


def test_an_iterator_of_an_earlier_epoch_cannot_go_on() -> None:
    with being(Worker(0, 1)):
        loader = distribute(DataLoader(items(10)))
        first = iter(loader)
        next(first)
        next(iter(loader))
        with pytest.raises(UsageError, match="A new pass over the distributed loader"):
            next(first)


def test_an_iterator_cannot_go_on_after_a_pass_over_another_loader_of_its_stream() -> None:
    dataset = items(10)
    with being(Worker(0, 1)):
        training, validation = (distribute(DataLoader(dataset)) for _ in range(2))
        first = iter(training)
        next(first)
        assert len(flat(validation)) == 10
        with pytest.raises(UsageError, match=r"A new pass .* such as a torch\.utils\.data\.Subset"):
            next(first)


def test_a_sampler_with_replacement_is_split_by_position_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = items(6)
    replacing = RandomSampler(dataset, replacement=True, num_samples=12)
    loaders: list[DataLoader[Any]] = [
        DataLoader(dataset, sampler=replacing),
        DataLoader(dataset, sampler=WeightedRandomSampler([1.0] * 6, 12)),
        DataLoader(dataset, batch_sampler=BatchSampler(replacing, 3, drop_last=False)),
    ]
    for loader in loaders:
        caplog.clear()
        with being(Worker(0, 2)):
            for _ in range(3):
                assert len(flat(distribute(loader))) == 6
        assert caplog.text.count("may contain an item several times or not at all") == 1


def test_a_sampler_without_replacement_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with being(Worker(0, 2)):
        distribute(DataLoader(items(6), shuffle=True))
    assert caplog.text == ""


class Endless:
    """A sampler that never ends and has no length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class EndlessFlow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize("split", ["dynamic", "static"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(items(2000), batch_size=2, sampler=Endless()),
        lambda: DataLoader(items(2000), batch_sampler=BatchSampler(Endless(), 2, drop_last=False)),
        lambda: DataLoader(EndlessFlow(), batch_size=2),
        lambda: ([first, first + 1] for first in itertools.count(0, 2)),
    ],
    ids=["sampler", "batch sampler", "IterableDataset", "generator"],
)
def test_an_endless_loader_is_split(make: Callable[[], Iterable[Any]], split: Any) -> None:
    ledger = DataLedger()
    seen: list[int] = []
    passes = []
    for index in range(2):
        with being(Worker(index, 2, ledger=ledger)):
            loader = distribute(make(), split=split)
            with pytest.raises(TypeError, match="has no length"):
                len(loader)  # type: ignore[arg-type]
            passes.append(iter(loader))
    for index in [0, 1] * 6:
        batch = next(passes[index])
        # The items of a `TensorDataset` are tuples, so its batches are lists of one tensor.
        seen += torch.as_tensor(batch[0] if torch.is_tensor(batch[0]) and batch[0].ndim else batch).tolist()
    if split == "static":
        assert seen == list(range(24))
    else:
        assert len(set(seen)) == 24


def test_items_that_cannot_be_produced_again_are_reported() -> None:
    """A lost worker's items are handed out again, but a generator has already been read beyond them."""
    ledger = DataLedger()

    def start() -> Iterator[Any]:
        return iter(distribute((item for item in range(9)), split="dynamic"))

    with being(Worker(1, 2, ledger=ledger)):
        assert next(start()) == 0
    with being(Worker(0, 2, ledger=ledger)):
        rest = start()
        assert next(rest) == 1
        ledger.leave(1, [], {0}, early=True)
        with pytest.raises(ConfigurationError, match="a generator can be iterated over only once"):
            next(rest)


@pytest.mark.parametrize("processes", [0, 2])
def test_batches_arrive_in_order_even_if_the_loader_may_reorder_them(
    processes: int, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"multiprocessing_context": "forkserver"} if processes else {}
    inner: DataLoader[Any] = DataLoader(
        items(12), batch_size=2, num_workers=processes, in_order=False, **options
    )
    passes = 1 if processes else 2  # each pass starts the processes anew, which takes long
    with being(Worker(1, 2)):
        assert [flat(distribute(inner)) for _ in range(passes)] == [[2, 3, 6, 7, 10, 11]] * passes
    assert caplog.text.count("ignores the loader's in_order=False") == (1 if processes else 0)
    assert inner.in_order is False


@pytest.mark.thorough
def test_a_loader_that_iterates_in_its_own_way_is_kept_in_order_too(caplog: pytest.LogCaptureFixture) -> None:
    inner = Worn(items(8), batch_size=2, num_workers=2, in_order=False, multiprocessing_context="forkserver")
    with being(Worker(0, 2)):
        assert [batch.tolist() for batch in distribute(inner)] == [[0, 10], [40, 50]]
    assert "ignores the loader's in_order=False" in caplog.text


class LikeFabric:
    """A wrapper like the one that Lightning Fabric's `setup_dataloaders` returns."""

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.__dict__.update(dataloader.__dict__)
        self._dataloader = dataloader

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataloader)


class LikeAccelerate:
    """A wrapper like the one that Accelerate's `prepare` returns. It says that its class is `DataLoader`."""

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.base_dataloader = dataloader

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.base_dataloader.__class__

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        # It reads one batch ahead, so that it can tell which batch is the last one.
        batches = iter(self.base_dataloader)
        before = next(batches)
        for batch in batches:
            yield before
            before = batch
        yield before


@pytest.mark.parametrize("wrapper", [LikeFabric, LikeAccelerate])
def test_wrappers_of_other_libraries_are_split_by_their_batches(
    wrapper: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = items(24)
    seen = epochs_of(
        lambda: distribute(wrapper(DataLoader(dataset, batch_size=3, shuffle=True))), workers=2, epochs=2
    )
    for epoch in zip(*seen, strict=True):
        assert sorted(item for part in epoch for item in part) == list(range(24))
    assert {len(part) for worker in seen for part in worker} == {12}
    assert seen[0][0] != seen[0][1]
    assert f"can split a {wrapper.__name__} only by its batches" in caplog.text
    with being(Worker(0, 2)):
        assert len(distribute(wrapper(DataLoader(dataset, batch_size=3)))) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("wrapper", [LikeFabric, LikeAccelerate])
def test_wrappers_that_may_reorder_their_batches_are_refused(wrapper: Any) -> None:
    with (
        being(Worker(0, 2)),
        pytest.raises(ConfigurationError, match=f"cannot split a {wrapper.__name__} with in_order=False"),
    ):
        distribute(wrapper(DataLoader(items(8), num_workers=2, in_order=False)))


# -- what cannot be split ---------------------------------------------------------------------------------


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'fair'.*auto, dynamic, static"):
        distribute(DataLoader(items(3)), split="fair")  # type: ignore[arg-type]


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got 5, expected a DataLoader"):
        distribute(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, None])
def test_more_workers_than_items_are_refused(batch_size: int | None) -> None:
    with (
        being(Worker(0, 4)),
        pytest.raises(ConfigurationError, match="cannot split 3 items among 4 workers"),
    ):
        distribute(DataLoader(items(3), batch_size=batch_size))


def test_more_workers_than_batches_of_the_users_own_are_refused() -> None:
    batches = list(BatchSampler(SequentialSampler(items(6)), batch_size=3, drop_last=False))
    with (
        being(Worker(2, 3)),
        pytest.raises(ConfigurationError, match="cannot split 2 items among 3 workers"),
    ):
        distribute(DataLoader(items(6), batch_sampler=batches))


def test_a_loader_without_any_item_is_refused_with_one_worker_too() -> None:
    with being(Worker(0, 1)), pytest.raises(ConfigurationError, match="cannot split 0 items among 1 worker"):
        distribute(DataLoader(items(0)))


# -- with and without a run -------------------------------------------------------------------------------


def test_without_a_run_the_loader_itself_comes_back() -> None:
    assert current() is None
    loader = DataLoader(items(10), shuffle=True)
    assert distribute(loader) is loader
    assert (worker_index(), worker_count()) == (0, 1)


def test_with_one_worker_the_order_is_that_of_the_seed_and_the_epoch_as_with_more() -> None:
    alone, other_seed = (epochs_of(shuffled(), workers=1, epochs=3, seed=seed)[0] for seed in (5, 6))
    two = epochs_of(shuffled(), workers=2, epochs=3, seed=5)
    assert alone == [interleaved(list(epoch)) for epoch in zip(*two, strict=True)]
    assert len({tuple(order) for order in [*alone, *other_seed]}) == 6


def test_one_worker_gets_every_item_in_the_batches_of_the_loader() -> None:
    with being(Worker(0, 1)):
        loader = distribute(DataLoader(items(11), batch_size=4))
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_loaders_may_be_iterated_over_in_any_order() -> None:
    with being(Worker(0, 1)):
        first, second = (distribute(DataLoader(items(count), batch_size=1)) for count in (4, 5))
        assert flat(second) == list(range(5))
        assert flat(first) == list(range(4))


def test_two_loaders_may_be_iterated_over_on_two_threads(run_on_threads: RunOnThreads) -> None:
    done = Barrier(2)  # items that a worker has not pushed when it leaves are handed out again

    def train() -> list[list[int]]:
        loaders = [distribute(DataLoader(items(600), batch_size=1), split="dynamic") for _ in range(2)]
        with ThreadPoolExecutor(max_workers=2) as threads:
            found = list(threads.map(flat, loaders))
        done.wait()
        return found

    results: dict[int, Any] = run_on_threads(train, workers=2, sync="asp").results
    for loader in range(2):
        assert sorted(results[0][loader] + results[1][loader]) == list(range(600))


def test_in_a_run_the_workers_share_out_each_epoch(run_on_threads: RunOnThreads) -> None:
    """The loader is sequential, because workers on threads share torch's generator."""

    def train() -> Epochs:
        model = torch.nn.Linear(1, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        loader = distribute(DataLoader(items(14), batch_size=2))
        seen: Epochs = []
        for _ in range(2):
            seen.append([])
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch.float().unsqueeze(1)).mean().backward()
                optimizer.step()
                seen[-1] += batch.tolist()
        return seen

    run = run_on_threads(train, workers=3)
    assert run.results == {
        0: [[0, 1, 6, 7]] * 2,
        1: [[2, 3, 8, 9]] * 2,
        2: [[4, 5, 10, 11]] * 2,
    }


def test_lists_that_are_made_for_each_epoch_share_one_stream() -> None:
    """It cannot be known when a list no longer exists."""
    with being(Worker(0, 2)) as worker:
        for epoch in range(5):
            assert list(distribute([epoch, epoch + 10])) == [epoch]
        assert worker.data.push() == []
        assert len(worker.data.pushed) == 1


def test_a_resumed_run_has_the_orders_of_the_later_epochs() -> None:
    loader = DataLoader(TensorDataset(torch.arange(24)), batch_size=4, shuffle=True)

    def passes(resumed: int) -> list[list[int]]:
        with being(Worker(0, 1)):
            part = distribute(loader)
            assert isinstance(part, DistributedLoader)
            if resumed:
                part.set_epoch(resumed)
            return [[int(item) for (x,) in part for item in x] for _ in range(resumed, 4)]

    assert passes(2) == passes(0)[2:]


def test_an_epoch_cannot_be_repeated() -> None:
    with being(Worker(0, 1)):
        part = distribute(DataLoader(TensorDataset(torch.arange(24)), batch_size=4))
        assert isinstance(part, DistributedLoader)
        list(part)
        list(part)
        for epoch in (1, -1, True, "1"):
            with pytest.raises(
                UsageError, match=f"epoch is {epoch!r}, expected 0 or an integer of at least 2"
            ):
                part.set_epoch(epoch)  # type: ignore[arg-type]


def test_a_script_that_trains_a_second_time_counts_its_epochs_anew() -> None:
    loader = DataLoader(TensorDataset(torch.arange(24)), batch_size=4, shuffle=True)
    orders: list[list[int]] = []
    with being(Worker(0, 1)):
        part = distribute(loader)
        assert isinstance(part, DistributedLoader)
        for _ in range(2):
            for epoch in range(3):
                part.set_epoch(epoch)
                orders.append([int(item) for (x,) in part for item in x])
        with pytest.raises(UsageError, match="epoch is 2, expected 0 or an integer of at least 3"):
            part.set_epoch(2)
    assert all(sorted(order) == [*range(24)] for order in orders)
    assert len(set(map(tuple, orders))) == 6


def test_torchs_own_batch_sampler_is_split_like_a_batch_size() -> None:
    data = TensorDataset(torch.arange(64))
    batches = BatchSampler(SequentialSampler(data), batch_size=4, drop_last=False)
    ledger, sizes = DataLedger(), []
    for worker in range(3):
        with being(Worker(worker, 3, ledger=ledger)):
            part = distribute(DataLoader(data, batch_sampler=batches))
            sizes.append([len(x) for (x,) in part])
    assert sizes == [[4, 4, 4, 4, 4, 2], [4, 4, 4, 4, 4, 1], [4, 4, 4, 4, 4, 1]]
