"""What a worker's script holds between two batches: a script that begins again with it computes the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.sim import Cluster, simulate
from paceline.train.session import BatchSite, current
from paceline.train.worker_state import capture, restore, resume_with
from tests.support.marks import thorough

EPOCHS, BATCHES = 3, 5


class Cut(NamedTuple):
    """What is known of a script that has been cut before a batch."""

    epoch: int
    batch: int
    model: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    state: bytes


class Script:
    """A model with dropout and noise of all generators, and whatever else a script has.

    Args:
        begins: the seed of the script's own first lines, which differ from run to run.
    """

    def __init__(self, begins: int) -> None:
        torch.manual_seed(begins)
        random.seed(begins)
        np.random.seed(begins)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizers = self.make_optimizers()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        return [paceline.DistributedOptimizer(sgd)]

    def train_on(self, x: torch.Tensor) -> None:
        [optimizer] = self.optimizers
        optimizer.zero_grad()
        self.loss(x).backward()
        optimizer.step()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(np.random.randn())
        found: torch.Tensor = (self.model(x + torch.randn_like(x)) - noise).square().mean()
        return found

    def begin_again(self) -> None:
        """Do what a script does before its first batch: its states are other ones afterwards."""
        torch.rand(1), random.random(), np.random.rand()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5

    def held(self) -> list[Any]:
        """Return what is compared in the end."""
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        return [*self.model.state_dict().values(), *map(torch.tensor, rates)]


class Averaged(Script):
    """AdamW with a schedule of its iterations, and an average of its weights."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizer = paceline.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.scheduler = OneCycleLR(optimizer, max_lr=0.02, total_steps=EPOCHS * BATCHES)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        paceline.track(scheduler=self.scheduler, ema=self.ema)
        return [optimizer]

    def train_on(self, x: torch.Tensor) -> None:
        super().train_on(x)
        self.scheduler.step()
        self.ema.update_parameters(self.model)

    def begin_again(self) -> None:
        super().begin_again()
        self.scheduler.step()
        self.ema.update_parameters(self.model)

    def held(self) -> list[Any]:
        return [*super().held(), *self.ema.state_dict().values()]


class SetRate(Script):
    """Sets the learning rate by itself."""

    def train_on(self, x: torch.Tensor) -> None:
        super().train_on(x)
        self.optimizers[0].param_groups[0]["lr"] *= 0.9


class Scaled(Script):
    """A scaler of the loss, whose scale grows."""

    def __init__(self, begins: int) -> None:
        super().__init__(begins)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)

    def train_on(self, x: torch.Tensor) -> None:
        [optimizer] = self.optimizers
        optimizer.zero_grad()
        self.scaler.scale(self.loss(x)).backward()
        self.scaler.step(optimizer)
        self.scaler.update()

    def held(self) -> list[Any]:
        return [*super().held(), torch.tensor(self.scaler.get_scale())]


class Two(Script):
    """Two optimizers, each of which makes a step for each batch."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        first, _, second = self.model
        return [
            paceline.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.01), model=self.model),
            paceline.DistributedOptimizer(torch.optim.Adam(second.parameters()), model=self.model),
        ]

    def train_on(self, x: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            self.loss(x).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9


class Accumulating(Script):
    """Two batches for each step."""

    def train_on(self, x: torch.Tensor) -> None:
        [optimizer] = self.optimizers
        optimizer.zero_grad()
        for half in x.chunk(2):
            self.loss(half).backward()
        optimizer.step()


DATA = torch.arange(EPOCHS * BATCHES * 24.0).reshape(EPOCHS, BATCHES, 6, 4).sin()


def train(make: Callable[[int], Script], at: tuple[int, int] | None = None, cut: Cut | None = None) -> Any:
    """Train a script from its beginning or from a cut. Return the weights, and the cut that was made at a batch."""
    made: list[Any] = []

    def run() -> None:
        session = current()
        assert session is not None
        script = make(1 if cut is None else 2)
        first = 0, 0
        if cut is not None:
            script.model.load_state_dict(cut.model)
            for optimizer, state in zip(script.optimizers, cut.optimizers, strict=True):
                optimizer.load_state_dict(state)
            resume_with(session, cut.state, cut.state)
            first = cut.epoch, cut.batch
            script.begin_again()
        for epoch in range(EPOCHS):
            for batch in range(BATCHES):
                if (epoch, batch) < first:
                    continue
                place = BatchSite("", epoch)
                restore(session, place)
                if (epoch, batch) == at:
                    states = [optimizer.state_dict() for optimizer in script.optimizers]
                    weights = {name: value.clone() for name, value in script.model.state_dict().items()}
                    made.append(Cut(epoch, batch, weights, states, b"".join(capture(session, place))))
                script.train_on(DATA[epoch, batch])
        made.append([value.clone() for value in script.held()])

    simulate(Cluster(compute_s=[1.0]), "bsp", train_fn=run)
    return made


@pytest.mark.parametrize(
    "make", [Script, Averaged, SetRate, Scaled, Two, Accumulating], ids=lambda m: m.__name__
)
@pytest.mark.parametrize("at", [(1, 0), (2, 3), *thorough(((0, 1),))], ids=str)
def test_a_script_that_begins_again_computes_the_same_bits(make: type[Script], at: tuple[int, int]) -> None:
    [expected] = train(make)
    cut, undisturbed = train(make, at)
    [resumed] = train(make, cut=cut)
    for one, other, third in zip(expected, undisturbed, resumed, strict=True):
        assert torch.equal(one, other), "the cut has changed the training"
        assert torch.equal(one, third)
