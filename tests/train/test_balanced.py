"""Balanced batches in training: the same joint batches, whatever their sizes, under every sync model."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.core.lease import BatchSizing
from paceline.errors import ConfigurationError
from paceline.settings.checks import paces
from paceline.sim import Cluster, Presence, Recorded, simulate
from paceline.sync.events import PushReceived
from paceline.trace import replay
from paceline.train.generator_states import generators_lock
from paceline.train.session import current
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

ITEMS = 400
SIZINGS: tuple[BatchSizing, ...] = ("equal", "balanced")
UNEQUAL = Cluster(compute_s=[1.0, 1.0, 3.0], fixed_share=0.2)


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ITEMS, 5, generator=generator, dtype=torch.float64), torch.arange(ITEMS))


class Trainer:
    """Trains one worker's model, and records the size and the items of each batch."""

    def __init__(self, *layers: nn.Module, batch: int = 8) -> None:
        with generators_lock:  # another worker's thread may be drawing its order from the same generator
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(5, 4), *layers, nn.Tanh(), nn.Linear(4, 1)).double()
        self.loader = DataLoader(examples(), batch_size=batch, shuffle=True)
        self.sizes: list[int] = []
        self.items = Counter[int]()

    def train(self, epochs: int = 3, *, accelerated: bool = False, **options: Any) -> Trainer:
        """Train. If `accelerated` is True, the first step declares that the worker is on an accelerator."""
        optimizer = paceline.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9), model=self.model
        )
        for _ in paceline.epochs(epochs):
            for x, index in paceline.distribute(self.loader, **options):
                optimizer.zero_grad()
                (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                if accelerated and (session := current()) is not None:
                    session.core.data.accelerated = True
                self.sizes.append(len(x))
                self.items.update(index.tolist())
        return self


def simulated(
    sync: str, batch: BatchSizing, cluster: Cluster = UNEQUAL
) -> tuple[list[Trainer], dict[str, Any]]:
    trainers: list[Trainer] = []
    result = simulate(cluster, sync, train_fn=lambda: trainers.append(Trainer().train()), batch=batch)
    assert result.state_dict is not None
    return trainers, result.state_dict


def test_bsp_learns_the_same_with_balanced_as_with_equal_batches() -> None:
    """Except for the order of summation."""
    equal, expected = simulated("bsp", "equal")
    balanced, weights = simulated("bsp", "balanced")
    assert sum((trainer.items for trainer in balanced), Counter()) == Counter(dict.fromkeys(range(ITEMS), 3))
    assert {size for trainer in equal for size in trainer.sizes[:-1]} == {
        8,
        6,
        5,
    }  # 16 items remain at the end
    assert sorted(trainer.sizes[20] for trainer in balanced) in ([2, 11, 11], [3, 10, 11])
    for name, value in expected.items():
        assert torch.linalg.norm(weights[name] - value) <= 1e-12 * torch.linalg.norm(value)


@pytest.mark.parametrize(
    "sync",
    [
        "ssp:staleness=2",
        "spec-sync",
        "drop-stragglers:quorum=2",
        *thorough("asp", "elastic-bsp:lookahead=5"),
    ],
)
def test_every_model_uses_every_item_once_per_epoch(sync: str) -> None:
    trainers, _ = simulated(sync, "balanced")
    assert sum((trainer.items for trainer in trainers), Counter()) == Counter(dict.fromkeys(range(ITEMS), 3))
    assert len({max(trainer.sizes) for trainer in trainers}) > 1


@pytest.mark.thorough
def test_with_accumulated_gradients_the_sizes_are_the_same_as_without() -> None:
    """Every push contains two batches, so it takes twice as long."""
    sizes: list[list[int]] = []

    def train() -> None:
        trainer = Trainer()
        optimizer = paceline.DistributedOptimizer(
            torch.optim.SGD(trainer.model.parameters(), lr=0.1), model=trainer.model
        )
        for _ in range(8):
            for number, (x, _) in enumerate(paceline.distribute(trainer.loader)):
                trainer.model(x).square().mean().backward()
                trainer.sizes.append(len(x))
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        sizes.append(trainer.sizes)

    result = simulate(UNEQUAL, "bsp", train_fn=train, batch="balanced")
    assert [sorted(each[number] for each in sizes) for number in (60, 100)] == [[2, 11, 11]] * 2
    assert result.measures.iterations[0] >= 8 * 8


def test_a_lost_workers_items_are_used_by_the_others() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 3.0], presence={0: Presence(lost_at_s=9.5)})
    items = Counter[int]()

    def train() -> None:
        trainer = Trainer()
        try:
            trainer.train()
        finally:  # a lost worker's function is ended by an exception
            items.update(trainer.items)

    simulate(cluster, "bsp", train_fn=train, batch="balanced")
    assert set(items.values()) <= {3, 4}  # the lost worker was recording an item whose push never arrived
    assert items.keys() == set(range(ITEMS))


def test_bsp_learns_the_same_with_sizes_in_steps_and_its_trace_contains_the_warm_ups() -> None:
    """Workers 0 and 2 act as if they were on accelerators. A batch of 16 has steps of 2."""
    trainers: dict[int, Trainer] = {}

    def train() -> None:
        trainer = trainers[paceline.worker_index()] = Trainer(batch=16)
        trainer.train(accelerated=paceline.worker_index() != 1)

    results = [simulate(UNEQUAL, "bsp", train_fn=train, batch=batch, record=True) for batch in SIZINGS]
    equal, balanced = (result.state_dict for result in results)
    assert equal is not None
    assert balanced is not None
    for name, value in equal.items():
        assert torch.linalg.norm(balanced[name] - value) <= 1e-12 * torch.linalg.norm(value)
    sizes = [set(trainers[worker].sizes) for worker in range(3)]
    assert all(size == 1 or size % 2 == 0 for worker in (0, 2) for size in sizes[worker])
    assert max(len(sizes[0]), len(sizes[2])) <= 5  # with those of the rest of an epoch
    assert sum(trainers[2].sizes) < 0.6 * sum(trainers[0].sizes)
    trace = results[1].trace[0]
    pushes = [entry.event for entry in trace.entries if isinstance(entry.event, PushReceived)]
    warm = Counter(push.worker for push in pushes if push.warm_up)
    assert warm == {worker: len(sizes[worker]) - 1 for worker in (0, 2)}  # all sizes but the first
    assert replay(trace) == []


def test_the_warm_ups_of_an_accelerator_are_no_compute_times_of_a_recorded_run(tmp_path: Path) -> None:
    result = simulate(
        Cluster(compute_s=[1.0, 1.0, 3.0]),
        "bsp",
        train_fn=lambda: Trainer(batch=16).train(accelerated=paceline.worker_index() == 0),
        record=True,
    )
    pushes = [entry.event for entry in result.trace[0].entries if isinstance(entry.event, PushReceived)]
    typical = Counter(push.worker for push in pushes if not push.warm_up)
    assert typical[0] < typical[1] == typical[2]
    found = Cluster.from_run(result.save(tmp_path / "run"))
    for worker, times in enumerate(found.compute_s):
        assert isinstance(times, Recorded)
        assert len(times.seconds) == typical[worker]


@pytest.mark.parametrize("sync", ["bsp", *thorough("asp")])
def test_in_a_live_run_the_slower_worker_receives_smaller_batches(
    sync: str, run_on_threads: RunOnThreads
) -> None:
    def train() -> tuple[list[int], Counter[int]]:
        trainer = Trainer().train(epochs=1)
        return trainer.sizes, trainer.items

    results: dict[int, Any] = run_on_threads(
        train, workers=2, sync=sync, batch="balanced", pace=[(0.002, 0.018), (0.002, 0.078)]
    ).results
    items = results[0][1] + results[1][1]
    assert items == Counter(dict.fromkeys(range(ITEMS), 1))
    if sync == "bsp":  # under asp, one worker may have used everything before the other one starts
        assert max(results[1][0][20:]) < 8 < max(results[0][0])


def test_batch_norm_never_receives_a_batch_of_one() -> None:
    trainers: list[Trainer] = []
    cluster = Cluster(compute_s=[1.0, 1.0, 40.0])
    simulate(
        cluster,
        "bsp",
        train_fn=lambda: trainers.append(Trainer(nn.BatchNorm1d(4)).train()),
        batch="balanced",
    )
    assert min(size for trainer in trainers for size in trainer.sizes) == 2


def test_no_batch_is_larger_than_the_maximum() -> None:
    trainers: list[Trainer] = []
    simulate(
        UNEQUAL,
        "bsp",
        train_fn=lambda: trainers.append(Trainer().train(batch="balanced", max_batch=9)),
    )
    assert max(size for trainer in trainers for size in trainer.sizes) == 9


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DataLoader(Numbers()), {"batch": "balanced"}, "only the batches of a DataLoader with a batch_size"),
        (DataLoader(examples(), batch_size=None), {"batch": "balanced"}, "only the batches of a DataLoader"),
        ([1, 2, 3], {"batch": "balanced"}, "only the batches of a DataLoader"),
        (DataLoader(examples(), batch_size=8), {"batch": "half"}, "unknown batch 'half'"),
        (
            DataLoader(examples(), batch_size=8),
            {"max_batch": 7},
            "max_batch is 7, expected an integer of at least 8",
        ),
        (DataLoader(examples(), batch_size=8), {"max_batch": "9"}, "max_batch is '9'"),
        (
            DataLoader(examples(), batch_size=8),
            {"max_batch": 9, "batch": "equal"},
            "omit max_batch, or use batch='balanced'",
        ),
    ],
)
def test_bad_arguments_are_refused(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        paceline.distribute(loader, **options)


def test_data_that_cannot_be_balanced_is_handed_out_equally(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        trainer = Trainer()
        trainer.loader = [(torch.ones(4, 5, dtype=torch.float64), torch.arange(4))] * 12  # type: ignore[assignment]
        trainer.train(epochs=1)

    with caplog.at_level(logging.WARNING):
        simulate(UNEQUAL, "bsp", train_fn=train, batch="balanced")
    assert (
        "distribute() gives all workers equal batches, because only the batches of a DataLoader"
        in caplog.text
    )


def test_paces_may_have_a_fixed_part() -> None:
    assert paces("pace", ".05,.02+.03") == paces("pace", [0.05, (0.02, 0.03)]) == ((0.0, 0.05), (0.02, 0.03))
    with pytest.raises(ConfigurationError, match=r"pace is '1\+x', expected numbers of seconds"):
        paces("pace", "1+x")


@pytest.mark.parametrize("pace", [[0.02, (0.1, 0.2, 0.3)], [0.02, "0.1"]])
def test_paces_of_other_types_are_refused(pace: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a number of seconds for each worker, or a pair"):
        paceline.launch(print, workers=2, pace=pace)
