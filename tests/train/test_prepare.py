"""`prepare`: schedules that follow the progress of the job."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import ConfigurationError, UsageError
from paceline.sim import Cluster, Presence, simulate

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

EPOCHS = 3
BATCHES = 24  # in an epoch of the given loader
UNEQUAL = Cluster(compute_s=[1.0, 3.0])

Make = Callable[[torch.optim.Optimizer, int], LRScheduler]
"""A function of (optimizer, number of steps in the whole schedule) that returns a scheduler."""


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=steps)


def examples(batches: int = BATCHES) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4 * batches, 1)), batch_size=4)


class Script:
    """A training script. `rates` are the learning rates of its steps, and `last` the one after the last step."""

    def __init__(self, make: Make, *, steps: int, distributed_first: bool = False) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader: Any = paceline.distribute(examples()) if distributed_first else examples()
        scheduler = make(optimizer, steps)
        self.model, self.optimizer, self.loader, self.scheduler = paceline.prepare(
            model, optimizer, loader, scheduler
        )
        self.rates: list[float] = []

    @property
    def last(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def step(self) -> None:
        self.rates.append(self.last)
        assert self.optimizer.param_groups[0]["lr"] == self.last
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).mean().backward()
        self.optimizer.step()


def in_every_iteration(script: Script, *, epochs: int = EPOCHS, accumulated: int = 1) -> None:
    for _ in range(epochs):
        for index, _ in enumerate(script.loader):
            if (index + 1) % accumulated == 0:
                script.step()
                script.scheduler.step()


def in_every_epoch(script: Script) -> None:
    for _ in range(EPOCHS):
        for _ in script.loader:
            script.step()
        script.scheduler.step()


def plainly(make: Make, steps: int) -> list[float]:
    """The learning rates before and after each step of a schedule under plain PyTorch."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = make(optimizer, steps)
    rates = [float(scheduler.get_last_lr()[0])]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(float(scheduler.get_last_lr()[0]))
    return rates


def run(cluster: Cluster, sync: str, body: Callable[[], Script]) -> dict[int, Script]:
    scripts: dict[int, Script] = {}

    def train() -> None:
        scripts[paceline.worker_index()] = body()

    simulate(cluster, sync, train_fn=train, guard="off")  # what is minimized has no minimum
    return scripts


# -- in every iteration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [one_cycle, cosine])
def test_outside_a_run_the_schedule_is_the_plain_one(make: Make) -> None:
    script = Script(make, steps=EPOCHS * BATCHES)
    assert type(script.loader) is DataLoader
    assert isinstance(script.scheduler, LRScheduler)
    in_every_iteration(script)
    assert [*script.rates, script.last] == plainly(make, EPOCHS * BATCHES)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("make", [one_cycle, cosine])
def test_a_single_worker_has_the_plain_schedule(make: Make, sync: str) -> None:
    def body() -> Script:
        script = Script(make, steps=EPOCHS * BATCHES)
        in_every_iteration(script)
        return script

    [script] = run(Cluster(compute_s=[1.0]), sync, body).values()
    assert [*script.rates, script.last] == plainly(make, EPOCHS * BATCHES)


@pytest.mark.parametrize("make", [one_cycle, cosine])
@pytest.mark.parametrize("distributed_first", [False, True])
def test_workers_in_lockstep_have_the_same_rates(make: Make, distributed_first: bool) -> None:
    """A schedule for the given loader advances by two steps per iteration, one for the distributed loader by one."""
    steps = EPOCHS * BATCHES // (2 if distributed_first else 1)

    def body() -> Script:
        script = Script(make, steps=steps, distributed_first=distributed_first)
        in_every_iteration(script)
        return script

    scripts = run(UNEQUAL, "bsp", body)
    plain = plainly(make, steps)
    for script in scripts.values():
        assert [*script.rates, script.last] == plain[:: 1 if distributed_first else 2]


@pytest.mark.parametrize("make", [one_cycle, cosine])
@pytest.mark.parametrize("distributed_first", [False, True])
def test_with_unequal_workers_the_schedule_follows_the_job(make: Make, distributed_first: bool) -> None:
    """A worker that is three times as fast makes three times as many steps of the same schedule."""
    steps = EPOCHS * BATCHES // (2 if distributed_first else 1)

    def body() -> Script:
        script = Script(make, steps=steps, distributed_first=distributed_first)
        in_every_iteration(script)
        return script

    scripts = run(UNEQUAL, "asp", body)
    plain = plainly(make, steps)
    made = [len(scripts[worker].rates) for worker in (0, 1)]
    assert sum(made) == EPOCHS * BATCHES
    assert made[0] > 1.1 * EPOCHS * BATCHES / 2  # more than the schedule of the distributed loader has steps
    assert made[0] > 2 * made[1]
    assert max(scripts[0].last, scripts[1].last) <= plain[-6]
    for worker in (0, 1):
        places = [plain.index(rate) for rate in scripts[worker].rates] if make is cosine else []
        assert places == sorted(places)
        assert set(scripts[worker].rates) <= set(plain)


def test_a_schedule_that_is_stepped_after_several_batches_follows_the_job_too() -> None:
    def body() -> Script:
        script = Script(cosine, steps=EPOCHS * BATCHES // 3)
        in_every_iteration(script, accumulated=3)
        return script

    scripts = run(UNEQUAL, "asp", body)
    assert all(script.last < 0.15 for script in scripts.values())
    alone = run(Cluster(compute_s=[1.0]), "asp", body)[0]
    assert [*alone.rates, alone.last] == plainly(cosine, EPOCHS * BATCHES // 3)


def test_a_schedule_stops_quietly_at_its_end() -> None:
    def body() -> Script:
        script = Script(one_cycle, steps=EPOCHS * BATCHES)
        in_every_iteration(script, epochs=EPOCHS + 1)
        return script

    for script in run(UNEQUAL, "asp", body).values():
        assert script.last == plainly(one_cycle, EPOCHS * BATCHES)[-1]


def test_a_worker_that_joins_again_continues_at_the_jobs_position() -> None:
    rates: list[list[float]] = []

    def train() -> None:
        script = Script(cosine, steps=EPOCHS * BATCHES)
        rates.append(script.rates)
        in_every_iteration(script)

    presence = {1: Presence(lost_at_s=4.5, back_after_s=30.0)}
    simulate(Cluster(compute_s=[1.0, 1.0], presence=presence), "asp", train_fn=train)
    assert len(rates) == 3
    assert rates[2][0] == 1.0
    assert rates[2][1] < 0.6


# -- in every epoch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["bsp", "asp", None])
def test_a_scheduler_that_is_stepped_in_every_epoch_works_as_usual(sync: str | None) -> None:
    def halve(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=1, gamma=0.5)

    def body() -> Script:
        script = Script(halve, steps=0)
        in_every_epoch(script)
        return script

    scripts = run(UNEQUAL, sync, body) if sync is not None else {0: body()}
    for script in scripts.values():
        assert script.rates == sorted(script.rates, reverse=True)
        assert set(script.rates) == {1.0, 0.5, 0.25}
        assert script.last == 0.125


def test_a_scheduler_with_a_metric_works_as_usual(run_on_threads: RunOnThreads) -> None:
    def plateau(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def train() -> float:
        script = Script(plateau, steps=0)
        for _ in range(EPOCHS):
            for _ in script.loader:
                script.step()
            script.scheduler.step(1.0)
        return script.last

    assert run_on_threads(train, workers=2, sync="asp").results == {0: 0.25, 1: 0.25}


# -- the parts --------------------------------------------------------------------------------------------


def test_without_a_scheduler_three_parts_are_returned(run_on_threads: RunOnThreads) -> None:
    def train() -> int:
        model = nn.Linear(1, 1)
        parts = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), examples())
        same, optimizer, loader = parts
        assert same is model
        assert isinstance(optimizer, paceline.DistributedOptimizer)
        return len(list(loader))

    assert train() == BATCHES
    assert run_on_threads(train, workers=2, sync="bsp").results == {0: BATCHES // 2, 1: BATCHES // 2}


def test_the_data_is_named_by_the_place_that_calls_prepare(run_on_threads: RunOnThreads) -> None:
    """Two calls distribute two streams of epochs, also with the same dataset, as two calls of `distribute` do."""
    loader = examples()

    def train() -> tuple[int, int]:
        model = nn.Linear(1, 1)
        _, _, first = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        _, _, second = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        numbers = first._part.number, second._part.number
        for _ in first:
            pass
        return numbers

    assert run_on_threads(train, workers=2, sync="bsp").results == {0: (0, 1), 1: (0, 1)}


ONE_DATASET: Any = TensorDataset(torch.arange(16))


@pytest.mark.parametrize(
    "loaders",
    [
        [DataLoader(ONE_DATASET, sampler=range(8)), DataLoader(ONE_DATASET, sampler=range(8, 16))],
        [[*range(8)], [*range(8, 16)]],
        [[*range(8)], DataLoader(ONE_DATASET, sampler=range(8))],
    ],
    ids=["one dataset", "lists", "a list and a dataset"],
)
def test_the_loaders_of_one_call_have_streams_of_their_own(
    loaders: list[Any], run_on_threads: RunOnThreads
) -> None:
    def train() -> tuple[list[list[int]], bool]:
        model = nn.Linear(1, 1)
        parts = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)
        first, second = parts[2:]
        for _ in range(2):
            assert len([*zip(first, second, strict=True)]) == 4
        # The first stream has the name that it has without the other loader.
        return [first.position.passes, second.position.passes], "/" in first.position.name

    expected = [[0, 1], [0, 1]], False
    assert run_on_threads(train, workers=2, sync="bsp").results == {0: expected, 1: expected}


def test_the_state_of_the_scheduler_is_that_of_the_wrapped_one(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        script = Script(cosine, steps=EPOCHS * BATCHES)
        in_every_iteration(script, epochs=1)
        state = script.scheduler.state_dict()
        assert state["last_epoch"] == script.scheduler.last_epoch == BATCHES
        script.scheduler.load_state_dict({**state, "last_epoch": 7})
        assert script.scheduler.last_epoch == 7

    run_on_threads(train, workers=2, sync="bsp")


def test_what_a_script_sets_on_its_scheduler_is_set_on_the_wrapped_one(run_on_threads: RunOnThreads) -> None:
    """Scripts that go on from a checkpoint of their own often set the number of the epoch."""

    def train() -> None:
        script = Script(lambda optimizer, steps: StepLR(optimizer, step_size=10), steps=1)
        script.scheduler.last_epoch, script.scheduler.gamma = 9, 0.25
        script.scheduler.step()
        assert script.scheduler.state_dict()["last_epoch"] == 10
        assert script.last == 0.25

    run_on_threads(train, workers=1)


def test_parts_are_returned_in_the_order_in_which_they_were_given() -> None:
    one, other, loader = nn.Linear(1, 1), nn.Linear(1, 2), examples()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other))
    schedule = StepLR(second, step_size=1)
    parts = paceline.prepare(loader, None, second, other, first, one, schedule)
    assert parts[:2] == (loader, None)
    assert parts[3] is other
    assert parts[5] is one
    assert parts[6] is schedule
    assert [part.param_groups for part in (parts[2], parts[4])] == [second.param_groups, first.param_groups]
    assert all(isinstance(part, paceline.DistributedOptimizer) for part in (parts[2], parts[4]))


def test_a_single_part_is_returned_alone() -> None:
    assert isinstance(paceline.prepare(nn.Linear(1, 1)), nn.Linear)


def test_an_optimizer_of_none_of_the_models_is_refused() -> None:
    one, other, third = (nn.Linear(1, 1) for _ in range(3))
    with pytest.raises(
        ConfigurationError,
        match="2 models, but 2 of the 4 parameters of the SGD optimizer are in none of them",
    ):
        paceline.prepare(one, other, torch.optim.SGD([*one.parameters(), *third.parameters()], lr=0.1))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_an_optimizer_may_train_several_of_the_models(run_on_threads: RunOnThreads, sync: str) -> None:
    def train() -> None:
        torch.manual_seed(0)
        encoder, decoder, critic = (
            nn.Linear(3, 4),
            nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
            nn.Linear(3, 1),
        )
        both = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        other = torch.optim.SGD(critic.parameters(), lr=0.1)
        encoder, decoder, critic, both, other = paceline.prepare(encoder, decoder, critic, both, other)
        for _ in range(3):
            x = torch.randn(5, 3)
            for optimizer in (both, other):
                optimizer.zero_grad()
                (decoder(encoder(x)) - x).square().mean().add(critic(x).square().mean()).backward()
                optimizer.step()
        if paceline.worker_index() == 0:
            kept.update(encoder=encoder, decoder=decoder, critic=critic)

    kept: dict[str, nn.Module] = {}
    run = run_on_threads(train, workers=2 if sync == "bsp" else 1, sync=sync)
    names = {"model0.weight", "model0.bias", "model2.weight", "model1.1.weight", "model1.0.running_mean"}
    assert names <= run.state_dict.keys()
    for index, model in enumerate(kept.values()):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, run.state_dict[f"model{index}.{name}"])


def test_a_module_that_no_optimizer_trains_is_not_a_part_of_the_model(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        torch.manual_seed(0)
        encoder, decoder, teacher = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)
        prepared = paceline.prepare(encoder, decoder, teacher, torch.optim.SGD(encoder.parameters(), lr=0.1))
        decoder(encoder(torch.randn(5, 3))).sum().backward()
        prepared[-1].step()

    assert run_on_threads(train, workers=2).state_dict.keys() == {"weight", "bias"}


def test_a_part_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got 3; expected modules, optimizers, loaders"):
        paceline.prepare(nn.Linear(1, 1), 3)
    with pytest.raises(ConfigurationError, match="got 'train'; expected modules, optimizers, loaders"):
        paceline.prepare(nn.Linear(1, 1), "train")
    with pytest.raises(ConfigurationError, match=r"got tensor\(\[0\.\]\); expected modules"):
        paceline.prepare(nn.Linear(1, 1), torch.zeros(1))
    with pytest.raises(ConfigurationError, match="got nothing"):
        paceline.prepare()


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = nn.Linear(1, 1)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(ConfigurationError, match="StepLR, which was not created for the given optimizer"):
        paceline.prepare(model, one, examples(), StepLR(other, step_size=1))


def test_a_distributed_optimizer_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="already a DistributedOptimizer"):
        paceline.prepare(model, optimizer, examples())


# -- without prepare --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "each", "warnings"),
    [("asp", "iteration", 2), ("asp", "epoch", 0), ("bsp", "iteration", 0), ("bsp", "epoch", 0)],
)
def test_a_schedule_that_does_not_follow_the_job_causes_one_warning(
    sync: str, each: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        scheduler = CosineAnnealingLR(optimizer, T_max=1000)
        for _ in range(EPOCHS):
            for _ in paceline.distribute(examples()):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).mean().backward()
                optimizer.step()
                if each == "iteration":
                    scheduler.step()
            if each == "epoch":
                scheduler.step()

    with caplog.at_level(logging.WARNING, "paceline"):
        simulate(UNEQUAL, sync, train_fn=train)
    assert (
        caplog.text.count("paceline.prepare(model, optimizer, loader, scheduler)") == warnings
    )  # one per worker


def test_a_prepared_schedule_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> Script:
        script = Script(cosine, steps=EPOCHS * BATCHES)
        in_every_iteration(script)
        return script

    with caplog.at_level(logging.WARNING, "paceline"):
        scripts = run(UNEQUAL, "asp", body)
    assert not caplog.records
    assert all(math.isfinite(script.last) for script in scripts.values())


def test_an_iterator_that_is_kept_does_not_end_a_later_pass() -> None:
    def body() -> Script:
        script = Script(cosine, steps=EPOCHS * BATCHES)
        kept = iter(script.loader)
        next(kept)
        for index, _ in enumerate(script.loader):
            script.step()
            script.scheduler.step()
            if not index:
                kept.close()
        return script

    script = run(Cluster(compute_s=[1.0]), "asp", body)[0]
    # The script has called step() for 24 of the 25 batches that it has drawn, and is at the end of the second epoch.
    assert script.last == plainly(cosine, EPOCHS * BATCHES)[24 * 2 * BATCHES // 25]
