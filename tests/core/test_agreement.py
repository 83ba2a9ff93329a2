"""Hyper-parameters that differ between workers at the same point of training are found, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.agreement import MARKED_STEPS, Agreement
from paceline.core.messages import HyperParametersReported
from paceline.errors import ProtocolError
from paceline.sim import Cluster, Presence, SimResult, simulate
from tests.support.live import run_program
from tests.support.marks import chaos, thorough

Make = Callable[[torch.optim.Optimizer], LRScheduler]

BATCHES = 30
EPOCHS = 8
UNEQUAL = Cluster(compute_s=[1.0, 2.0, 3.1])
SYNCS = ["bsp", "asp", *chaos("ssp:staleness=2", "elastic-bsp:lookahead=4")]
MOSTLY_ASP = ["asp", *thorough("bsp"), *chaos("ssp:staleness=2", "elastic-bsp:lookahead=4")]
"""For what does not depend on the model: under asp, workers are further apart."""


def examples(batches: int = BATCHES) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4 * batches, 1)), batch_size=4)


def train(
    make: Make,
    *,
    stepped: str = "epoch",
    prepared: bool = True,
    epochs: int = EPOCHS,
    batches: int = BATCHES,
    split: Any = "auto",
    metric: Callable[[int], float] | None = None,
    track: bool = False,
    loop: Callable[[int], Any] = range,
) -> None:
    model = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001)
    scheduler: Any = make(optimizer)
    loader: Any = paceline.distribute(examples(batches), split=split)
    if prepared:
        model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)
    else:
        model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    if track:
        paceline.track(scheduler=scheduler)
    for epoch in loop(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x).mean() * 0).backward()
            optimizer.step()
            if stepped == "iteration":
                scheduler.step()
        if stepped == "epoch":
            scheduler.step(*([] if metric is None else [metric(epoch)]))


def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=1)


def own_loss(epoch: int) -> float:
    """The loss of worker 0 stagnates, that of the others does not."""
    return 1.0 if paceline.worker_index() == 0 else 1.0 / (1 + epoch)


def findings(body: Callable[[], None], sync: str, cluster: Cluster = UNEQUAL) -> list[str]:
    result = simulate(cluster, sync, train_fn=body)
    assert isinstance(result, SimResult)
    assert result.summary["findings"] == result.findings
    return [text for text in result.findings if "hyper-parameters" in text]


# -- the fault --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("prepared", [True, *thorough(False)])
def test_a_plateau_of_each_workers_own_loss_is_found_once(sync: str, prepared: bool) -> None:
    found = findings(lambda: train(plateau, prepared=prepared, metric=own_loss), sync)
    assert len(found) == 1, found
    assert "lr=0.001" in found[0] or "lr=0.0001" in found[0]
    assert "scheduler.step(paceline.reduce(loss))" in found[0]


@pytest.mark.parametrize("sync", MOSTLY_ASP)
def test_a_plateau_of_the_joint_loss_is_no_finding(sync: str) -> None:
    def joint(epoch: int) -> float:
        loss = paceline.reduce(own_loss(epoch))
        assert isinstance(loss, float)
        return loss if epoch < 2 else 9.0

    assert findings(lambda: train(plateau, metric=joint), sync) == []


def test_workers_that_reduce_the_rate_one_epoch_apart_are_no_finding() -> None:
    def nearly(epoch: int) -> float:
        return 1.0 / (1 + min(epoch, 2 + (paceline.worker_index() == 0)))

    assert findings(lambda: train(plateau, metric=nearly), "bsp") == []


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("key", ["lr", *thorough("momentum")])
def test_constants_that_depend_on_the_worker_are_found(sync: str, key: str) -> None:
    def body() -> None:
        def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
            optimizer.param_groups[0][key] = 0.1 * (1 + paceline.worker_index())
            return LambdaLR(optimizer, lambda epoch: 1.0)

        train(make)

    [found] = findings(body, sync)
    assert f"{key}=0." in found


@pytest.mark.parametrize("sync", MOSTLY_ASP)
def test_without_a_loader_workers_are_compared_by_their_steps(sync: str) -> None:
    def body() -> None:
        crops(lambda optimizer, step: None if step else rate_of(optimizer, 0.1 + paceline.worker_index()))

    [found] = findings(body, sync)
    assert "after 50 steps" in found


@pytest.mark.parametrize("sync", MOSTLY_ASP)
def test_a_prepared_schedule_whose_height_depends_on_the_worker_is_found(sync: str) -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        height = 0.1 * (1 + paceline.worker_index())
        return OneCycleLR(optimizer, max_lr=height, total_steps=EPOCHS * BATCHES)

    def body() -> None:
        model = nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001)
        loader: Any
        model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, examples(), make(optimizer))
        for _ in range(EPOCHS):
            for (x,) in loader:
                optimizer.zero_grad()
                (model(x).mean() * 0).backward()
                optimizer.step()
                scheduler.step()

    [found] = findings(body, sync)
    assert "steps of the same schedule" in found


def test_the_second_of_two_optimizers_is_compared_by_itself() -> None:
    def body() -> None:
        one, other = nn.Linear(1, 1), nn.Linear(1, 1)
        first = paceline.DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=0.1))
        rate = 0.1 + paceline.worker_index()
        second = paceline.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=rate))
        for _ in range(120):
            for model, optimizer in ((one, first), (other, second)):
                optimizer.zero_grad()
                (model(torch.ones(4, 1)).mean() * 0).backward()
                optimizer.step()

    [found] = findings(body, "bsp")
    assert "lr=" in found


def test_a_late_worker_whose_scheduler_is_not_tracked_is_found() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=100.5)})

    def halve(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return StepLR(optimizer, step_size=4, gamma=0.1)

    def body() -> None:
        train(halve, epochs=10, loop=paceline.epochs, track=tracked, split="dynamic", prepared=False)

    tracked = False
    [found] = findings(body, "asp", cluster)
    assert "paceline.track" in found
    tracked = True
    assert findings(body, "asp", cluster) == []


# -- no fault ---------------------------------------------------------------------------------------------

STEPS = EPOCHS * BATCHES

SCHEDULES: dict[str, Make] = {
    "step": lambda o: StepLR(o, step_size=2, gamma=0.1),
    "milestones": lambda o: MultiStepLR(o, milestones=[3, 5]),
    "exponential": lambda o: ExponentialLR(o, gamma=0.5),
    "lambda": lambda o: LambdaLR(o, lambda epoch: 1.0 / (1 + epoch)),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=STEPS),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=7),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.001, max_lr=0.1, step_size_up=9, cycle_momentum=False),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=STEPS),
    "long steps": lambda o: StepLR(o, step_size=70, gamma=0.1),
    "warm-up": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=20), CosineAnnealingLR(o, STEPS - 20)], milestones=[20]
    ),
    "chained": lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=9), ExponentialLR(o, gamma=0.97)]),
}
BY_ITERATION = ["one cycle", "long steps", "restarts"]
"""Those with a new rate in each iteration, with steps that are no epochs, and with rates that rise again."""

BY_EPOCH = ["exponential", "warm-up"]
"""Those that change the rates clearly within the epochs."""


@pytest.mark.parametrize("sync", ["asp", *chaos("bsp", "ssp:staleness=2", "elastic-bsp:lookahead=4")])
@pytest.mark.parametrize("split", ["auto", *chaos("static")])
@pytest.mark.parametrize(
    ("name", "prepared", "stepped"),
    [
        *((name, True, "iteration") for name in BY_ITERATION),
        *((name, False, "epoch") for name in BY_EPOCH),
        *thorough(*((name, True, "iteration") for name in SCHEDULES if name not in BY_ITERATION)),
        *thorough(*((name, False, "epoch") for name in SCHEDULES if name not in BY_EPOCH)),
        *chaos(*((name, False, "iteration") for name in SCHEDULES)),
        *chaos(*((name, True, "epoch") for name in SCHEDULES)),
    ],
)
def test_ordinary_schedulers_are_no_finding(
    sync: str, split: str, name: str, prepared: bool, stepped: str
) -> None:
    def body() -> None:
        train(SCHEDULES[name], stepped=stepped, prepared=prepared, split=split)

    assert findings(body, sync) == []


@pytest.mark.parametrize("sync", MOSTLY_ASP)
@pytest.mark.parametrize("prepared", [True, *thorough(False)])
@pytest.mark.parametrize("name", ["one cycle", "long steps", *thorough("cosine")])
def test_ordinary_schedulers_in_long_epochs_are_no_finding(sync: str, prepared: bool, name: str) -> None:
    def body() -> None:
        train(SCHEDULES[name], stepped="iteration", prepared=prepared, epochs=1, batches=STEPS)

    assert findings(body, sync) == []


@pytest.mark.parametrize("sync", MOSTLY_ASP)
@pytest.mark.parametrize(
    ("tracked", "stepped"),
    [(False, "epoch"), (True, "iteration"), *thorough((False, "iteration"), (True, "epoch"))],
)
@pytest.mark.parametrize("name", ["one cycle", *chaos("exponential", "warm-up", "chained")])
def test_a_worker_that_joins_late_with_its_schedule_is_no_finding(
    sync: str, tracked: bool, stepped: str, name: str
) -> None:
    cluster = Cluster(compute_s=[1.0, 2.0, 1.5], presence={2: Presence(joins_at_s=40.5)})

    def body() -> None:
        train(SCHEDULES[name], stepped=stepped, track=tracked, loop=paceline.epochs)

    assert findings(body, sync, cluster) == []


@pytest.mark.parametrize("sync", MOSTLY_ASP)
def test_a_worker_that_is_lost_and_comes_back_is_no_finding(sync: str) -> None:
    cluster = Cluster(compute_s=[1.0, 2.0], presence={1: Presence(lost_at_s=60.0, back_after_s=20.0)})
    make = SCHEDULES["step"]
    assert findings(lambda: train(make, track=True, loop=paceline.epochs, epochs=12), sync, cluster) == []


@pytest.mark.parametrize("sync", MOSTLY_ASP)
def test_two_optimizers_with_different_rates_and_groups_are_no_finding(sync: str) -> None:
    def body() -> None:
        body_, head, other = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
        groups = [{"params": body_.parameters(), "lr": 0.01}, {"params": head.parameters(), "lr": 0.1}]
        both = nn.Sequential(body_, head)
        first = paceline.DistributedOptimizer(torch.optim.Adam(groups), model=both)
        second = paceline.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=1.0))
        schedule = ExponentialLR(second, gamma=0.9)
        for _ in range(4):
            for _ in paceline.distribute(examples()):
                for model, optimizer in ((both, first), (other, second)):
                    optimizer.zero_grad()
                    (model(torch.ones(4, 1)).mean() * 0).backward()
                    optimizer.step()
            schedule.step()

    assert findings(body, sync) == []


def rate_of(optimizer: Any, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate


def crops(change: Callable[[Any, int], None], steps: int = 160) -> None:
    model = nn.Linear(1, 1)
    model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        change(optimizer, step)
        optimizer.zero_grad()
        (model(torch.ones(4, 1)).mean() * 0).backward()
        optimizer.step()


@pytest.mark.parametrize("sync", MOSTLY_ASP)
def test_without_a_loader_a_schedule_by_the_workers_steps_is_no_finding(sync: str) -> None:
    def body() -> None:
        crops(lambda optimizer, step: rate_of(optimizer, 0.1 / (1 + step)))

    assert findings(body, sync) == []


# -- the rules --------------------------------------------------------------------------------------------


def report(step: int, rate: float, epoch: int | None = None, **rest: Any) -> HyperParametersReported:
    rest.setdefault("within", epoch is None)
    groups = msgspec.msgpack.encode([{"lr": rate}])
    return HyperParametersReported(0, step, groups, epoch, "loader", **rest)


def test_a_difference_of_less_than_an_epoch_and_fifty_steps_is_not_said() -> None:
    agreement = Agreement()
    for step in (0, MARKED_STEPS - 1):
        assert agreement.take(0, 0, report(step, 0.1, 3)) == ""
        assert agreement.take(1, 0, report(step, 0.2, 3)) == ""
    assert agreement.take(1, 0, report(MARKED_STEPS, 0.2, 3)).startswith(
        "Worker 1 trains with lr=0.2 and worker 0"
    )
    assert agreement.take(1, 0, report(9999, 0.2, 3)) == "", "it is said once"


def test_a_new_incarnation_of_a_worker_begins_anew() -> None:
    agreement = Agreement()
    agreement.take(0, 0, report(0, 0.1, 0))
    agreement.take(0, 0, report(9, 0.1, 1))
    assert agreement.take(1, 0, report(0, 0.2, 0)) == ""
    assert agreement.take(1, 1, report(0, 0.2, 1, late=True)) == ""
    assert agreement.take(1, 0, report(9, 0.2, 1)) != ""


def test_a_change_within_a_pass_may_depend_on_the_epoch_or_on_the_steps() -> None:
    agreement = Agreement()
    for step in (0, 50, 100):
        assert agreement.take(0, 0, report(step, 1.0 / (1 + step), 0, within=True)) == ""
    for step, epoch in ((0, 0), (50, 1), (100, 2)):
        assert agreement.take(1, 0, report(step, 1.0 / (1 + step), epoch, within=True)) == ""


def test_small_differences_are_not_said() -> None:
    agreement = Agreement()
    for step in (0, 50, 100):
        assert agreement.take(0, 0, report(step, 0.1)) == ""
        assert agreement.take(1, 0, report(step, 0.10001)) == ""


def test_the_memory_is_bounded() -> None:
    agreement = Agreement()
    for step in range(0, 200_000, 50):
        agreement.take(0, 0, report(step, step))
    for step in range(1000):
        agreement.take(0, 0, report(200_000, step))
    assert len(agreement._marks) <= 512
    assert max(len(mark.values) for mark in agreement._marks.values()) <= 4


def test_a_report_that_cannot_be_decoded_is_refused() -> None:
    agreement = Agreement()
    for groups in (b"?", b"\xc1", msgspec.msgpack.encode([{"lr": [[1.0]]}])):
        with pytest.raises(ProtocolError, match="hyper-parameters of a report cannot be decoded"):
            agreement.take(0, 0, HyperParametersReported(0, 0, groups))
    assert agreement._marks == {}


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.thorough
def test_many_groups_are_compared_as_far_as_they_fit(sync: str) -> None:
    def body() -> None:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(300)))
        rate = 0.1 * (1 + paceline.worker_index())
        groups = [{"params": layer.parameters(), "lr": rate} for layer in model]
        optimizer = paceline.DistributedOptimizer(torch.optim.Adam(groups), model=model)
        for _ in range(60):
            optimizer.zero_grad()
            (model(torch.ones(4, 1)).mean() * 0).backward()
            optimizer.step()

    assert len(findings(body, sync, Cluster(compute_s=[1.0, 2.0]))) == 1


# -- live -------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
loader = DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(8):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    scheduler.step(1.0 if paceline.is_main() else 1.0 / (1 + epoch))
"""


@pytest.mark.processes
def test_the_finding_is_shown_during_the_run_and_kept_in_the_summary(mark: str, tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run_program("-m", "paceline", "run", "--workers", "2", "--run-dir", "run", "train.py")
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["findings"]
    # On a busy machine, there are others.
    [finding] = [each for each in found if "scheduler.step(paceline.reduce(loss))" in each]
    told = " ".join((ended.stdout + ended.stderr).split())
    assert finding in told
