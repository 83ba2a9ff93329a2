"""`distribute`: each worker's part of a loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline import DistributedOptimizer, distribute, worker_count, worker_index
from paceline.errors import ConfigurationError
from paceline.frontend.session import Session, current, install

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

Epochs = list[list[int]]
Load = Callable[[], Iterable[Any]]


class Worker:
    """The part of a session that `distribute` uses."""

    def __init__(self, worker: int, workers: int, seed: int = 0) -> None:
        self.worker = worker
        self.workers = workers
        self.seed = seed
        self.epochs: list[int] = []  # announced by epoch_begins()

    def epoch_begins(self, epoch: int) -> None:
        self.epochs.append(epoch)


@contextlib.contextmanager
def being(worker: Worker) -> Iterator[None]:
    install(cast(Session, worker), for_thread=True)
    try:
        yield
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


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 60),
    workers=st.integers(2, 7),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_parts_are_disjoint_and_equally_long_and_leave_only_the_remainder(
    count: int, workers: int, batch_size: int, shuffle: bool, seed: int
) -> None:
    dataset = items(max(count, workers))

    def load() -> Iterable[Any]:
        return distribute(DataLoader(dataset, batch_size=batch_size, shuffle=shuffle))

    for epoch in zip(*epochs_of(load, workers, epochs=2, seed=seed), strict=True):
        assert {len(part) for part in epoch} == {len(dataset) // workers}
        together = [item for part in epoch for item in part]
        assert len(set(together)) == len(together) == len(dataset) - len(dataset) % workers
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
    assert seen == [[[0, 3, 6]] * 2, [[1, 4, 7]] * 2, [[2, 5, 8]] * 2]


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
        sampler: Any = loader.sampler  # type: ignore[attr-defined]
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        assert len(list(sampler)) == 10
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
    for index in range(2):
        with being(Worker(index, 2)):
            first = flat(distribute(DataLoader(dataset, shuffle=True)))
            for _ in range(index + 1):  # one worker reads it more often than the other
                flat(distribute(DataLoader(other, shuffle=True)))
            assert [first, flat(distribute(DataLoader(dataset, shuffle=True)))] == expected[index]


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
        batches = BatchSampler(SequentialSampler(dataset), batch_size=3, drop_last=False)
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
        assert [str(batch) for batch in loader] == ["0+2+4", "6"]


def test_the_last_batch_can_be_dropped() -> None:
    with being(Worker(0, 2)):
        loader = distribute(DataLoader(items(10), batch_size=2, drop_last=True))
        assert [batch[0].tolist() for batch in loader] == [[0, 2], [4, 6]]


def test_processes_that_load_data_give_the_same_parts() -> None:
    dataset = items(24)
    expected = epochs_of(lambda: distribute(DataLoader(dataset, batch_size=4, shuffle=True)), workers=2)
    with being(Worker(1, 2)):
        inner: DataLoader[Any] = DataLoader(
            items(24), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="forkserver"
        )
        assert [flat(distribute(inner))] == expected[1]


# -- what cannot be split ---------------------------------------------------------------------------------


class Flow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_over_an_iterable_dataset_is_refused_with_the_reason(workers: int) -> None:
    with (
        being(Worker(0, workers)),
        pytest.raises(ConfigurationError, match="no length and no order to split"),
    ):
        distribute(DataLoader(Flow()))


def test_a_loader_over_an_iterable_dataset_is_refused_without_a_run_too() -> None:
    """The script would fail later, when it is run with workers."""
    with pytest.raises(ConfigurationError, match=r"paceline\.worker_index\(\)"):
        distribute(DataLoader(Flow()))


@pytest.mark.parametrize("batch_size", [1, None])
def test_more_workers_than_items_are_refused(batch_size: int | None) -> None:
    with (
        being(Worker(0, 4)),
        pytest.raises(ConfigurationError, match="cannot split 3 items among 4 workers"),
    ):
        distribute(DataLoader(items(3), batch_size=batch_size))


def test_more_workers_than_batches_of_the_users_own_are_refused() -> None:
    batches = BatchSampler(SequentialSampler(items(6)), batch_size=3, drop_last=False)
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
    assert run.results == {index: [list(range(index, 12, 3))] * 2 for index in range(3)}
