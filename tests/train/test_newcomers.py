"""A worker that joins a run in progress holds the job's model before its script can look at it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.run.job import Assignment, ResumedFrom
from paceline.run.job_options import make_job
from paceline.run.readers import Fetches
from paceline.sim import Cluster, Presence, simulate
from paceline.train.session import Callbacks
from tests.conftest import RunOnThreads
from tests.support.marks import thorough
from tests.support.sharded import Net, Shards, model_of

UNTRAINED = -1000.0
"""The weights that the script of a worker has before its first step. The job's are not far from 0."""


class RunningMean(nn.Module):
    """Follows the mean of its inputs, as BatchNorm does."""

    running_mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_mean.lerp_(x.mean(), 0.1)
        return x


class Script:
    """A model of one weight, to which each gradient adds 1, after a running mean that approaches 5."""

    def __init__(self, *, first: bool, split: Any = "auto", momentum: float = 0.0) -> None:
        self.model = nn.Sequential(RunningMean(), nn.Linear(1, 1, bias=False))
        nn.init.constant_(self.weight, 0.0 if first else UNTRAINED)
        self.optimizer = paceline.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=momentum), model=self.model
        )
        self.batches = DataLoader(TensorDataset(torch.full((64, 1), 5.0)), batch_size=4)
        self.split = split

    @property
    def mean(self) -> float:
        statistics = self.model[0]
        assert isinstance(statistics, RunningMean)
        return statistics.running_mean.item()

    @property
    def weight(self) -> torch.Tensor:
        return next(self.model.parameters())

    def train_epoch(self) -> int:
        """Train for one epoch, and return the number of its batches."""
        count = 0
        for (x,) in paceline.distribute(self.batches, split=self.split):
            self.optimizer.zero_grad()
            self.model(x)
            self.weight.grad = torch.full_like(self.weight, -1.0)
            self.optimizer.step()
            count += 1
        return count


def by_evaluating(script: Script, folder: Path) -> float:
    with paceline.evaluating(script.model) as snapshot:
        return next(snapshot.parameters()).item()


def by_a_forward_pass(script: Script, folder: Path) -> float:
    with torch.no_grad():
        return float(script.model[1](torch.ones(1, 1)).item())


def by_saving(script: Script, folder: Path) -> float:
    path = folder / f"model-{paceline.worker_index()}.pt"
    state = script.model.state_dict()
    paceline.save(state, path)
    return float(state["1.weight"])


def by_reading(script: Script, folder: Path) -> float:
    return script.weight.item()


def of_the_statistics(script: Script, folder: Path) -> float:
    return script.mean


LOOKS = [by_evaluating, by_a_forward_pass, by_saving, by_reading, of_the_statistics]

RETURNS = Cluster(compute_s=[1.0, 1.0, 1.0], presence={0: Presence(lost_at_s=9.5, back_after_s=3.0)})
"""Worker 0 comes back in an epoch whose data has been divided among the others."""


# Each look once, in both kinds of loops.
FIRST_LOOKS: list[Any] = [
    (paceline.epochs, "bsp", by_evaluating),
    (paceline.epochs, "bsp", by_reading),
    (paceline.epochs, "asp", by_saving),
    (range, "asp", by_a_forward_pass),
    (range, "bsp", of_the_statistics),
]


@pytest.mark.parametrize(
    ("numbers", "sync", "look"),
    [
        *FIRST_LOOKS,
        *thorough(
            *(
                case
                for case in product([paceline.epochs, range], ["bsp", "asp"], LOOKS)
                if case not in FIRST_LOOKS
            )
        ),
    ],
)
def test_a_worker_without_a_batch_in_its_first_epoch_sees_the_jobs_model(
    numbers: Any, sync: str, look: Callable[[Script, Path], float], tmp_path: Path
) -> None:
    lives: list[list[tuple[int, float]]] = []

    def train() -> None:
        script = Script(first=paceline.worker_index() > 0 or not any(lives), split="static")
        seen: list[tuple[int, float]] = []
        if paceline.worker_index() == 0:
            lives.append(seen)
        seen += ((script.train_epoch(), look(script, tmp_path)) for _ in numbers(6))

    simulate(RETURNS, sync, train_fn=train)
    first, returned = lives
    assert returned[0][0] == 0, "it has no part in the epoch in progress"
    assert all(value > 0.0 for _, value in [*first, *returned]), returned


def test_in_a_loop_over_range_it_sees_the_jobs_model_from_the_first_pass_on() -> None:
    seen: list[float] = []

    def train() -> None:
        late = paceline.worker_index() == 2
        script = Script(first=not late)
        for epoch in range(3):
            script.train_epoch()
            if late and epoch == 0:
                seen.append(by_evaluating(script, Path()))
                seen.append(script.weight.item())

    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], presence={2: Presence(joins_at_s=9.5)})
    simulate(cluster, "bsp", train_fn=train)
    assert seen == [10.0, 10.0]  # updates


def test_before_the_loop_a_look_shows_the_jobs_model_too() -> None:
    seen: list[float] = []

    def train() -> None:
        late = paceline.worker_index() == 2
        script = Script(first=not late)
        if late:
            seen.extend(look(script, Path()) for look in (by_a_forward_pass, by_evaluating, by_reading))
        for _ in range(2):
            script.train_epoch()

    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], presence={2: Presence(joins_at_s=9.5)})
    simulate(cluster, "bsp", train_fn=train)
    assert seen == [10.0, 10.0, 10.0]


def test_the_average_of_a_late_worker_is_made_of_the_jobs_weights() -> None:
    """The guide's own example. Worker 0 sends its averages as the job's when it has the lowest index."""
    averages: dict[int, list[float]] = {}

    def train() -> None:
        index = paceline.worker_index()
        script = Script(first=index > 0 or not averages.get(0))
        ema = AveragedModel(script.model)
        paceline.track(ema=ema)
        for _ in paceline.epochs(6):
            script.train_epoch()
            ema.update_parameters(script.model)
            averages.setdefault(index, []).append(next(ema.parameters()).item())

    simulate(RETURNS, "bsp", train_fn=train)
    assert all(value > 0.0 for each in averages.values() for value in each), averages


def test_all_models_of_a_late_worker_are_the_jobs() -> None:
    seen: list[tuple[float, float]] = []

    def train() -> None:
        late = paceline.worker_index() == 1
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for model in models:
            nn.init.constant_(model.weight, UNTRAINED if late else 0.0)
        optimizers = [
            paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)
            for model, lr in zip(models, (1.0, 2.0), strict=True)
        ]
        loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2)
        for _ in paceline.epochs(3):
            for (x,) in paceline.distribute(loader, split="static"):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    (-model(x)).mean().backward()
                    optimizer.step()
            if late:
                seen.append((models[0].weight.item(), models[1].weight.item()))

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=4.5)})
    simulate(cluster, "asp", train_fn=train)
    one, other = seen[0]
    assert one > 0.0
    assert other > 0.0


def test_the_state_of_the_optimizer_is_the_jobs_before_the_first_step() -> None:
    states: list[Any] = []

    def train() -> None:
        late = paceline.worker_index() == 1
        model = nn.Linear(1, 1, bias=False)
        optimizer = paceline.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1.0), model=model)
        loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2)
        for _ in paceline.epochs(3):
            for (x,) in paceline.distribute(loader, split="static"):
                optimizer.zero_grad()
                (-model(x)).mean().backward()
                optimizer.step()
            if late:
                states.append(optimizer.state_dict()["state"])

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=4.5)})
    simulate(cluster, "asp", train_fn=train)
    assert float(states[0][0]["step"]) == 4.0
    assert float(states[0][0]["exp_avg"]) < 0.0


def test_the_statistics_with_which_a_late_worker_trains_are_the_jobs() -> None:
    seen: list[float] = []

    def train() -> None:
        late = paceline.worker_index() == 1
        script = Script(first=not late, split="dynamic")
        for _ in paceline.epochs(4):
            script.train_epoch()
            if late:
                seen.append(script.mean)

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=28.5)})
    simulate(cluster, "asp", train_fn=train)
    assert seen[0] > 4.5  # from 0, ten batches would reach 3.3


# -- live -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_live_worker_that_looks_at_the_model_without_a_batch_makes_nobody_wait(
    sync: str, tmp_path: Path, run_on_threads: RunOnThreads
) -> None:
    """Worker 1 looks while worker 0 trains its last epochs, and trains only when worker 0 has ended."""
    third_epoch, looked, ended = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, float] = {}
    batches: list[int] = []

    def first() -> None:
        script = Script(first=True, split="static", momentum=0.5)
        for epoch in range(6):
            if epoch == 3:
                third_epoch.set()
                looked.wait(60.0)
            script.train_epoch()
        ended.set()

    def late() -> None:
        script = Script(first=False, split="static", momentum=0.5)
        for epoch in range(6):
            batches.append(script.train_epoch())
            if epoch == 2:
                seen.update((look.__name__, look(script, tmp_path)) for look in LOOKS)
                seen["momentum"] = script.optimizer.state_dict()["state"][0]["momentum_buffer"].item()
                looked.set()
                assert ended.wait(60.0), "worker 0 waits for worker 1"

    def train() -> None:
        try:
            (late if paceline.worker_index() else first)()
        finally:
            looked.set()

    run = run_on_threads(train, late=third_epoch, servers=2, sync=sync)
    weight, velocity, mean = 0.0, 0.0, 0.0
    for _ in range(3 * 16):
        velocity = 0.5 * velocity + 1.0
        weight += velocity
        mean += 0.1 * (5.0 - mean)
    expected = {look.__name__: mean if look is of_the_statistics else weight for look in LOOKS}
    assert batches[:3] == [0, 0, 0]
    assert seen == pytest.approx({**expected, "momentum": -velocity})
    assert run.lost == []


@pytest.mark.parametrize("has_begun", [False, True])
def test_in_a_resumed_run_the_checkpoint_is_used_only_until_training_goes_on(
    has_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    shards = Shards(model_of(net, [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)]), 2, net)
    job = make_job(workers=2, servers=1, run_dir=tmp_path / "run", dry_run=True)
    job = structs.replace(job, resumed=ResumedFrom(str(shards.write(tmp_path))))
    links: Any = SimpleNamespace(
        core=SimpleNamespace(started=None), lock=threading.RLock(), handlers={}, targets={}
    )
    servers = Fetches(Assignment(job=job, role="worker", index=1, coordinator=""), links, Callbacks())
    present: list[Any] = [{"scale": torch.tensor(7.0)}, [(shards.slices[0], {}), (shards.slices[1], {})]]
    answers = iter(present if has_begun else [None, None])
    monkeypatch.setattr(Fetches, "_read", lambda self, read: next(answers))
    model, state = servers.fetch_model(lambda spec: ""), servers.fetch_state()
    assert model is not None
    assert model["scale"].item() == (7.0 if has_begun else 0.5)
    assert len(state) == (2 if has_begun else 1)
