"""What integrations of frameworks use of the loader, the optimizer and the schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import paceline
from paceline.core.shard import Details, _mean_scales
from paceline.errors import ConfigurationError, UsageError
from paceline.integrations import require
from paceline.sim import Cluster, SimResult, simulate
from paceline.train.prepare import follow, follow_as_written
from paceline.train.session import current

SIZE, BATCH = 96, 4
WHOLE = SIZE // BATCH
UNEQUAL = Cluster(compute_s=[1.0, 3.0])


def distributed(size: int = SIZE, **options: Any) -> Any:
    return paceline.distribute(DataLoader(TensorDataset(torch.arange(float(size))), BATCH), **options)


def stepping(body: Callable[[Any, Any], None], cluster: Cluster = UNEQUAL, sync: str = "asp") -> SimResult:
    """Run a function in each worker, with a distributed loader and a function that makes a step with a batch."""

    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)

        def step(x: torch.Tensor, **options: Any) -> None:
            optimizer.zero_grad()
            (model(x[:, None]).mean() * 0).backward()
            optimizer.step(**options)

        step.optimizer = optimizer  # type: ignore[attr-defined]
        body(distributed(), step)

    return simulate(cluster, sync, train_fn=train)


@pytest.mark.parametrize(
    ("sync", "dynamic"), [("bsp", False), ("asp", True), ("auto", True), ("bsp@0,asp@4", True)]
)
def test_a_loader_tells_whether_a_pass_may_be_longer_than_a_share(sync: str, dynamic: bool) -> None:
    found = []

    def body(loader: Any, step: Any) -> None:
        found.append((len(loader), loader.whole_length, loader.may_be_dynamic))
        step(torch.zeros(1))

    stepping(body, sync=sync)
    assert found == [(WHOLE // 2, WHOLE, dynamic)] * 2


def test_with_a_joint_batch_the_whole_length_counts_the_parts() -> None:
    found = []

    def body(_: Any, step: Any) -> None:
        loader = distributed(joint_batch=True)
        found.append((len(loader), loader.whole_length))
        step(torch.zeros(1))

    stepping(body, sync="bsp")
    assert found == [(WHOLE, 2 * WHOLE)] * 2


def test_no_worker_uses_more_than_the_whole_length_and_all_see_the_end() -> None:
    begun: dict[int, list[int]] = {0: [], 1: []}
    ends = []

    def body(loader: Any, step: Any) -> None:
        assert loader.begun == 0
        for epoch in range(2):
            for (x,) in loader:
                begun[paceline.worker_index()].append(epoch * WHOLE + loader.begun)
                step(x)
            ends.append(loader.begun)

    stepping(body)
    assert sorted(begun[0] + begun[1]) == list(range(1, 2 * WHOLE + 1))
    assert len(begun[0]) > 2 * len(begun[1])
    assert all(each == sorted(set(each)) for each in begun.values())
    assert ends == [WHOLE] * 4


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_worker_knows_how_many_batches_are_left_if_shares_are_equal(sync: str) -> None:
    left: dict[int, list[int | None]] = {0: [], 1: []}

    def body(loader: Any, step: Any) -> None:
        for (x,) in loader:
            left[paceline.worker_index()].append(loader.left)
            step(x)

    stepping(body, sync=sync)
    if sync == "bsp":
        assert left == {0: [*range(WHOLE // 2 - 1, -1, -1)], 1: [*range(WHOLE // 2 - 1, -1, -1)]}
    else:
        assert left[0][0] is None


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_pass_may_leave_out_what_was_used_before(sync: str) -> None:
    seen: list[tuple[int, float]] = []
    rates = []

    def body(loader: Any, step: Any) -> None:
        scheduler = LambdaLR(step.optimizer, lambda count: 1.0 - count / (2 * WHOLE))
        following = follow(scheduler, step.optimizer, loader, loader.whole_length)
        for _ in range(10):
            scheduler.step()  # what the script has loaded
        loader.begin_at(10)
        for epoch in range(2):
            for (x,) in loader:
                seen.extend((epoch, float(item)) for item in x)
                step(x)
                following.step()
        rates.append(following.get_last_lr()[0])

    result = stepping(body, sync=sync)
    expected = [(0, float(item)) for item in range(10 * BATCH, SIZE)]
    assert sorted(seen) == sorted([*expected, *((1, float(item)) for item in range(SIZE))])
    assert result.measures.samples == 2 * SIZE - 10 * BATCH
    assert rates == pytest.approx([0.0, 0.0], abs=1e-9)


def test_a_schedule_that_is_made_late_follows_the_job() -> None:
    rates = {}

    def body(loader: Any, step: Any) -> None:
        scheduler = follow(
            LambdaLR(step.optimizer, lambda count: 1.0 - count / (2 * WHOLE)),
            step.optimizer,
            loader,
            loader.whole_length,
        )
        for _ in range(2):
            for (x,) in loader:
                step(x)
                scheduler.step()
        rates[paceline.worker_index()] = scheduler.get_last_lr()[0]

    stepping(body)
    assert rates == pytest.approx({0: 0.0, 1: 0.0}, abs=1e-9)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    alone = LambdaLR(optimizer, lambda count: 1.0)
    assert follow(alone, paceline.DistributedOptimizer(optimizer), None) is alone


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("joint", [False, True])
def test_a_schedule_that_is_written_for_the_scripts_loader_ends_with_the_data(joint: bool, sync: str) -> None:
    """The script's loader has `WHOLE` batches, whether a batch is divided among the workers or not."""
    rates = {}
    size = SIZE + 1  # the last joint batch is smaller than the others
    batches = WHOLE + 1

    def body(_: Any, step: Any) -> None:
        loader = distributed(size, joint_batch=joint)
        assert loader.script_length == batches
        schedule = LambdaLR(step.optimizer, lambda count: 1.0 - count / (2 * batches))
        scheduler = follow_as_written(schedule, step.optimizer, loader)
        for epoch in range(2):
            for (x,) in loader:
                step(x)
                scheduler.step()
            rates[epoch, paceline.worker_index()] = scheduler.get_last_lr()[0]

    stepping(body, sync=sync)
    expected = {(epoch, worker): 0.01 * (1 - epoch) / 2 for epoch in range(2) for worker in range(2)}
    assert rates == pytest.approx(expected, abs=0.01 / WHOLE)


class Shuffled(RandomSampler):
    """A sampler whose order depends on the number of the epoch, which it advances by itself, as some frameworks' do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from order
        self.epoch += 7


def test_a_sampler_is_told_the_epoch() -> None:
    seen: dict[int, list[float]] = {0: [], 1: []}

    def body(_: Any, step: Any) -> None:
        data = TensorDataset(torch.arange(float(SIZE)))
        loader: Any = paceline.distribute(DataLoader(data, BATCH, sampler=Shuffled(data)))
        for epoch in range(2):
            for (x,) in loader:
                seen[epoch] += x.tolist()
                step(x)

    stepping(body, Cluster(compute_s=[1.0]), "bsp")
    orders = [
        torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in (0, 1)
    ]
    assert [seen[0], seen[1]] == orders


def test_a_push_has_a_weight_besides_its_samples() -> None:
    """Worker 0 has 4 samples with 9 tokens, worker 1 as many with 3; the mean is that over all tokens."""
    weights = []

    def train() -> None:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = paceline.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), model=nn.ParameterList([weight])
        )
        for _ in range(2):
            optimizer.zero_grad()
            (weight * [1.0, 2.0][paceline.worker_index()]).sum().backward()
            optimizer.step(samples=4, weight=[9, 3][paceline.worker_index()])
        session = current()
        assert session is not None
        assert session.core.data.weight is None
        weights.append(weight.item())

    result = simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=train)
    assert weights == pytest.approx([-2 * (9 * 1.0 + 3 * 2.0) / 12] * 2)
    assert result.measures.samples == 16


@pytest.mark.parametrize(
    ("pushes", "scales"),
    [
        ([(4, 9.0), (4, 3.0)], (0.75, 0.25)),
        ([(4, 9.0), (4, 0.0)], (1.0, 0.0)),
        ([(4, 0.0), (4, 0.0)], (0.5, 0.5)),
        ([(6, 9.0), (2, None)], (0.75, 0.25)),
        ([(None, 3.0), (None, 1.0)], (0.75, 0.25)),
        ([(None, 3.0), (2, None)], (0.5, 0.5)),
    ],
)
def test_a_mean_goes_by_weights_if_all_are_known_and_else_by_samples(
    pushes: list[tuple[int | None, float | None]], scales: tuple[float, ...]
) -> None:
    assert _mean_scales([Details(samples, weight, 0, None) for samples, weight in pushes]) == scales


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many", True])
def test_a_weight_that_makes_no_sense_is_refused(weight: Any) -> None:
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(
        UsageError, match=f"weight is {re.escape(repr(weight))}, expected a number from 0 to 1e"
    ):
        optimizer.step(weight=weight)


def test_a_framework_that_is_missing_or_too_old_is_named_with_its_remedy() -> None:
    require("torch", "2.0", "lightning")
    with pytest.raises(
        ConfigurationError, match=r"torch 99\.0 or later, but 2\.\S+ is installed.*paceline\[lightning\]"
    ):
        require("torch", "99.0", "lightning")
    with pytest.raises(
        ConfigurationError, match=r"not installed. Install it with: pip install 'paceline\[x\]'"
    ):
        require("no-such-package", "1", "x")
