"""`epochs`: the loop over epochs that all workers end together."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.lease import Split
from paceline.errors import ConfigurationError, RunFailedError, UsageError
from paceline.sim import Cluster, Presence, simulate

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads


def examples(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(count))), batch_size=4)


class Trainer:
    """One worker's model; `step` records the items of a batch."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer = paceline.DistributedOptimizer(optimizer, model=self.model)
        self.items: list[int] = []

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x[:, None]).mean().backward()
        self.optimizer.step()
        self.items += x.int().tolist()


# -- in a script that runs by itself ----------------------------------------------------------------------


def test_a_number_of_epochs() -> None:
    assert list(paceline.epochs(3)) == [0, 1, 2]


def test_an_amount_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("paceline.train.epochs.time.monotonic", lambda: now_s)
    seen = []
    for epoch in paceline.epochs(minutes=0.5):
        seen.append(epoch)
        now_s += 12.0
    assert seen == [0, 1, 2]


def test_a_loop_that_is_stopped_ends_after_the_epoch() -> None:
    loop = paceline.epochs(10)
    seen = []
    for epoch in loop:
        seen.append(epoch)
        if epoch == 2:
            loop.stop()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"epochs\(10\), epochs\(minutes=30\), epochs\(updates=1000\) or epochs\(samples=10\*\*6\)"),
        ({"count": 0}, "count is 0, expected a positive integer"),
        ({"count": 1.5}, "count is 1.5, expected a positive integer"),
        ({"count": True}, "count is True"),
        ({"updates": 0}, "updates is 0, expected a positive integer: the number of updates of the weights"),
        ({"updates": 1e3}, "updates is 1000.0"),
        (
            {"samples": -4},
            "samples is -4, expected a positive integer: the number of samples that all workers",
        ),
        ({"samples": True}, "samples is True"),
        ({"minutes": -1}, "minutes is -1, expected a positive number"),
        ({"minutes": math.nan}, "minutes is nan"),
        ({"minutes": "1"}, "minutes is '1'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        paceline.epochs(**arguments)


@pytest.mark.parametrize(
    ("limits", "epochs_made"),
    [
        ({"updates": 10}, 4),
        ({"samples": 24}, 2),
        ({"samples": 25}, 3),
        ({"count": 2, "updates": 10, "samples": 1000}, 2),
        ({"count": 9, "updates": 10, "samples": 30}, 3),
    ],
)
def test_alone_updates_and_samples_are_counted_in_whole_epochs(
    limits: dict[str, Any], epochs_made: int
) -> None:
    trainer, loader = Trainer(), examples(12)
    for _ in range(2):  # a second loop counts from its own beginning
        seen = []
        for epoch in paceline.epochs(**limits):
            seen.append(epoch)
            for (x,) in paceline.distribute(loader):
                trainer.step(x)
        assert seen == list(range(epochs_made))


def test_samples_that_cannot_be_counted_are_an_error() -> None:
    trainer = Trainer()

    def train() -> None:
        for _ in paceline.epochs(samples=10):
            for x in paceline.distribute([torch.ones(2), torch.ones(3)]):
                trainer.step(x)

    with pytest.raises(UsageError, match="no step says how many it has used"):
        train()


def test_a_step_may_say_how_many_samples_it_has_used() -> None:
    trainer = Trainer()
    seen = []
    for epoch in paceline.epochs(samples=10):
        seen.append(epoch)
        for x in paceline.distribute([torch.ones(2), torch.ones(3)]):
            trainer.optimizer.step(samples=len(x))
    assert seen == [0, 1]


# -- in a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["asp", "bsp", "elastic-bsp:lookahead=3"])
def test_one_worker_stops_all(sync: str, run_on_threads: RunOnThreads) -> None:
    # The epoch is so long that no worker can end it before worker 1 has made its 20 steps, however late it starts.
    def train() -> tuple[int, int]:
        trainer = Trainer()
        loop = paceline.epochs(1000)
        steps = begun = 0
        for _ in loop:
            begun += 1
            for (x,) in paceline.distribute(examples(400_000)):
                trainer.step(x)
                steps += 1
                if paceline.worker_index() == 1 and steps == 20:
                    loop.stop()
        return begun, steps

    results: dict[int, Any] = run_on_threads(train, workers=3, sync=sync).results
    assert results[1] == (1, 20)
    assert all(begun <= 1 and steps < 100_000 for begun, steps in results.values())


def test_a_second_loop_is_not_stopped_with_the_first(run_on_threads: RunOnThreads) -> None:
    def train() -> list[int]:
        trainer = Trainer()
        seen: list[int] = []
        for _ in range(2):
            loop = paceline.epochs(3)
            for epoch in loop:
                for (x,) in paceline.distribute(examples(24)):
                    trainer.step(x)
                if len(seen) == 0:
                    loop.stop()
                seen.append(epoch)
        return seen

    results: dict[int, Any] = run_on_threads(train, workers=2, sync="bsp").results
    for seen in results.values():
        assert seen == [0, 0, 1, 2]


def test_the_time_is_that_of_the_run() -> None:
    """In virtual time, a worker makes a step a second, so half a minute has 30 steps of each of two workers."""
    made: list[int] = []

    def train() -> None:
        trainer = Trainer()
        for _ in paceline.epochs(minutes=0.5):
            for (x,) in paceline.distribute(examples(32)):
                trainer.step(x)
        made.append(len(trainer.items) // 4)

    result = simulate(Cluster(compute_s=[1.0, 1.0]), "asp", train_fn=train)
    assert made == [30, 30]
    assert result.time_s == pytest.approx(30.0)


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("split", ["dynamic", "static"])
def test_a_pass_over_an_endless_loader_ends_when_the_time_is_over(sync: str, split: Any) -> None:
    made: list[int] = []

    def train() -> None:
        trainer = Trainer()
        begun = 0
        for _ in paceline.epochs(minutes=0.5):
            begun += 1
            for x in paceline.distribute((torch.ones(4) for _ in itertools.count()), split=split):
                trainer.step(x)
        assert begun == 1
        made.append(len(trainer.items) // 4)

    result = simulate(Cluster(compute_s=[1.0, 1.0]), sync, train_fn=train)
    assert made == [30, 30]
    assert result.time_s == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("sync", "limits", "steps"),
    [
        # Each update is the mean of both workers' pushes, of 4 samples each.
        ("bsp", {"updates": 7}, [7, 7]),
        ("bsp", {"samples": 56}, [7, 7]),
        ("bsp", {"samples": 57}, [8, 8]),
        ("bsp", {"count": 1, "samples": 1000}, [8, 8]),
        # Worker 0 makes three steps while worker 1 makes one. The other worker finishes its iteration after the end.
        ("asp", {"updates": 11}, [9, 3]),
        ("asp", {"samples": 44}, [9, 3]),
        ("asp", {"count": 100, "minutes": 100, "updates": 1000, "samples": 44}, [9, 3]),
    ],
)
def test_updates_and_samples_of_all_workers_are_counted(
    sync: str, limits: dict[str, Any], steps: list[int]
) -> None:
    made: dict[int, int] = {}

    def train() -> None:
        trainer = Trainer()
        for _ in paceline.epochs(**limits):
            for (x,) in paceline.distribute(examples(64)):
                trainer.step(x)
        made[paceline.worker_index()] = len(trainer.items) // 4

    simulate(Cluster(compute_s=[1.0, 2.9]), sync, train_fn=train)
    assert [made[0], made[1]] == steps


def test_in_a_run_samples_that_cannot_be_counted_are_an_error() -> None:
    def train() -> None:
        trainer = Trainer()
        for _ in paceline.epochs(samples=10):
            for x in paceline.distribute([torch.ones(2)] * 8):
                trainer.step(x)

    with pytest.raises(RunFailedError, match="no step says how many it has used"):
        simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=train)


def test_a_second_loop_counts_from_its_own_beginning() -> None:
    made: list[list[int]] = []

    def train() -> None:
        trainer = Trainer()
        steps = []
        for _ in range(2):
            for _ in paceline.epochs(updates=5):
                for (x,) in paceline.distribute(examples(64)):
                    trainer.step(x)
            steps.append(len(trainer.items) // 4)
        made.append(steps)

    simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=train)
    assert made == [[5, 10], [5, 10]]


def test_a_worker_that_joins_again_counts_the_updates_of_the_others() -> None:
    made: list[int] = []

    def train() -> None:
        trainer = Trainer()
        for _ in paceline.epochs(updates=20):
            for (x,) in paceline.distribute(examples(4000), split="dynamic"):
                trainer.step(x)
        made.append(len(trainer.items) // 4)

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(lost_at_s=5.5, back_after_s=1.0)})
    result = simulate(cluster, "asp", train_fn=train)
    assert result.measures.updates in (20, 21)
    assert sum(made) + 5 == result.measures.updates


@pytest.mark.parametrize(
    ("split", "joins_at_s", "words"),
    [
        (
            "static",
            3.5,
            "epoch 1 of 2 was handed out before this worker joined, so the worker takes part from the next",
        ),
        (
            "static",
            9.5,
            "epoch 2 of 2 was handed out before this worker joined, so the worker takes no part in the tr",
        ),
        ("dynamic", 3.5, ""),
    ],
)
def test_a_worker_that_joins_and_has_no_data_in_an_epoch_says_so(
    split: Split, joins_at_s: float, words: str
) -> None:
    def train() -> None:
        trainer, loader = Trainer(), paceline.distribute(examples(64), split=split)
        for _ in paceline.epochs(2):
            for (x,) in loader:
                trainer.step(x)

    cluster = Cluster(compute_s=[1.0] * 3, presence={2: Presence(joins_at_s=joins_at_s)})
    faults = simulate(cluster, "bsp", train_fn=train).faults
    if not words:
        assert faults == []
        return
    [fault] = faults
    assert fault.startswith(f"worker 2: the data of {words}")
    assert fault.endswith("With --split dynamic, a worker that joins gets data of the epoch in progress.")


@pytest.mark.parametrize("limits", [{"updates": 30}, {"samples": 240}])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_limit_ends_a_live_run_in_all_workers(
    limits: dict[str, int], servers: int, run_on_threads: RunOnThreads
) -> None:
    def train() -> int:
        trainer = Trainer()
        for _ in paceline.epochs(**limits):
            for (x,) in paceline.distribute(examples(400_000)):
                trainer.step(x)
        return len(trainer.items) // 4

    assert run_on_threads(train, workers=2, servers=servers, sync="bsp").results == {0: 30, 1: 30}


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_the_data_of_a_worker_that_is_lost_in_the_last_epoch_is_used(sync: str) -> None:
    """Under bsp, the others make one more pass, over the rest of the lost worker's share."""
    items: list[int] = []
    passes: list[list[int]] = []

    def train() -> None:
        trainer = Trainer()
        numbers: list[int] = []
        passes.append(numbers)
        for epoch in paceline.epochs(2):
            numbers.append(epoch)
            for (x,) in paceline.distribute(examples(96)):
                trainer.step(x)
                items.extend(x.int().tolist())

    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], presence={1: Presence(lost_at_s=11.5)})
    result = simulate(cluster, sync, train_fn=train)
    assert sorted(items) == sorted([*range(96)] * 2)
    assert result.measures.iterations[1] == 11
    survivors = [numbers for numbers in passes if len(numbers) > 1 and numbers[:2] == [0, 1]]
    assert ([0, 1, 1] in survivors) == (sync == "bsp")
