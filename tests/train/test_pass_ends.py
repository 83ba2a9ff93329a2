"""Loaders that tell with each batch whether it is the last one of its pass, as frameworks need it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.sim import Cluster, simulate
from paceline.train.data import DistributedLoader
from paceline.train.session import current, resumption_of

EPOCHS = 3


class Pass:
    """One pass of one worker.

    Attributes:
        items: the items of its batches.
        lasts: for each of its batches, whether the loader said that it is the last one.
        repeats: for each of its batches, whether steps do nothing in it.
    """

    def __init__(self) -> None:
        self.items: list[int] = []
        self.lasts: list[bool] = []
        self.repeats: list[bool] = []


def train(
    size: int, batch: int, passes: list[Pass], *, knows_end: bool = True, per_step: int = 1
) -> nn.Module:
    """Train, and make the step for what is left where the loader says that the pass ends."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    x = torch.randn(size, 1, generator=torch.Generator().manual_seed(1))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
    loader: Any = paceline.distribute(DataLoader(TensorDataset(torch.arange(size), x), batch, shuffle=True))
    if isinstance(loader, DistributedLoader):
        loader.knows_end = knows_end
    session = current()
    assert session is not None
    for _ in paceline.epochs(EPOCHS):
        made = Pass()
        passes.append(made)
        optimizer.zero_grad()
        for number, (indices, inputs) in enumerate(loader, 1):
            (model(inputs) - 2).square().mean().backward()
            repeats = resumption_of(session).repeats
            made.repeats.append(repeats)
            made.lasts.append(loader.is_last)
            made.items += [] if repeats else indices.tolist()
            if number % per_step == 0 or loader.is_last:
                optimizer.step()
                optimizer.zero_grad()
    return model


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=2"])
@pytest.mark.parametrize("per_step", [1, 2])
def test_the_last_batch_of_each_pass_is_known(sync: str, per_step: int) -> None:
    size = 46
    passes: list[Pass] = []
    cluster = Cluster([1.0, 2.7, 1.9])
    result = simulate(cluster, sync, train_fn=lambda: train(size, 4, passes, per_step=per_step))
    assert result.measures.samples == size * EPOCHS
    assert len(passes) == 3 * EPOCHS
    for each in passes:
        assert each.lasts == [False] * (len(each.lasts) - 1) + [True]
    counts = Counter(item for each in passes for item in each.items)
    assert counts == dict.fromkeys(range(size), EPOCHS)


def test_looking_ahead_changes_nothing_that_is_computed() -> None:
    def weights(*, knows_end: bool) -> torch.Tensor:
        cluster = Cluster([1.0, 2.7, 1.9])
        found = simulate(cluster, "bsp", train_fn=lambda: train_without_ends(knows_end=knows_end))
        assert found.state_dict is not None
        return found.state_dict["weight"]

    def train_without_ends(*, knows_end: bool) -> None:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        x = torch.randn(45, 1, generator=torch.Generator().manual_seed(1))
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
        loader: Any = paceline.distribute(DataLoader(TensorDataset(x), 4, shuffle=True))
        loader.knows_end = knows_end
        for _ in paceline.epochs(EPOCHS):
            for (inputs,) in loader:
                optimizer.zero_grad()
                (model(inputs) - 2).square().mean().backward()
                optimizer.step()

    assert torch.equal(weights(knows_end=True), weights(knows_end=False))


def test_a_worker_without_a_batch_goes_through_one_in_which_steps_do_nothing() -> None:
    """The slow worker computes its first batch while the other one uses all that is left of two epochs."""
    passes: list[Pass] = []
    result = simulate(Cluster([1.0, 100.0]), "asp", train_fn=lambda: train(8, 4, passes))
    assert result.measures.samples == 8 * EPOCHS
    empty = [each for each in passes if each.repeats == [True]]
    assert empty
    assert all(each.lasts == [True] for each in empty)
    assert all(each.lasts for each in passes)
    counts = Counter(item for each in passes for item in each.items)
    assert counts == dict.fromkeys(range(8), EPOCHS)
