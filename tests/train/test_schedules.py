"""Prepared schedules: scripts that resume, and loops without a distributed loader."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.sim import Cluster, Presence, simulate
from paceline.train.worker_state import set_state, state_of
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

EPOCHS, BATCHES = 6, 12
STEPS = EPOCHS * BATCHES
EQUAL = Cluster(compute_s=[1.0, 1.0])
UNEQUAL = Cluster(compute_s=[1.0, 2.0, 3.1])

Make = Callable[[torch.optim.Optimizer], LRScheduler]


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=STEPS)


def cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=STEPS)


def by_lambda(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=10)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, STEPS - 10)], milestones=[10])


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=10), ExponentialLR(optimizer, gamma=0.97)])


def in_epochs(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=2, gamma=0.5)


SCHEDULES = [one_cycle, cosine, by_lambda, warm_up_and_cosine, chained, in_epochs]


class Script:
    """A training script with a schedule of `EPOCHS` epochs that may continue an earlier one.

    Attributes:
        rates: the learning rates of the steps.
        state: the state of the optimizer and of the scheduler after the last epoch.
    """

    def __init__(
        self, make: Make, *, state: Any = None, load: str = "after", skip: int = 0, batch: int = 4
    ) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = make(optimizer)
        batches = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 1)), batch_size=batch)
        if state is not None and load == "before":
            optimizer.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        parts = paceline.prepare(model, optimizer, batches, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = parts
        if state is not None and load == "after":
            self.optimizer.load_state_dict(state[0])
            self.scheduler.load_state_dict(state[1])
        if skip and hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(skip)
        self.each = "epoch" if make is in_epochs else "iteration"
        self.rates: list[float] = []
        self.state: Any = None

    def train(self, epochs: Iterable[int]) -> None:
        for _ in epochs:
            for (x,) in self.loader:
                self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
                self.optimizer.zero_grad()
                (self.model(x).mean() * 0).backward()
                self.optimizer.step()
                if self.each == "iteration":
                    self.scheduler.step()
            if self.each == "epoch":
                self.scheduler.step()
        groups = [{**group, "params": [0, 1]} for group in self.optimizer.param_groups]
        self.state = {"state": {}, "param_groups": groups}, self.scheduler.state_dict()


def plainly(make: Make) -> list[float]:
    """The learning rates of a single process."""
    script = Script(make)
    script.train(range(EPOCHS))
    return script.rates


Host = Callable[[Callable[[], Script]], dict[int, Script]]


def alone(body: Callable[[], Script]) -> dict[int, Script]:
    return {0: body()}


def simulated(body: Callable[[], Script], cluster: Cluster = EQUAL, sync: str = "bsp") -> dict[int, Script]:
    scripts: dict[int, Script] = {}

    def train() -> None:
        scripts[paceline.worker_index()] = body()

    simulate(cluster, sync, train_fn=train)
    return scripts


@pytest.fixture(params=["alone", "simulated", "live"])
def host(request: pytest.FixtureRequest, run_on_threads: RunOnThreads) -> Host:
    def live(body: Callable[[], Script]) -> dict[int, Script]:
        results: Any = run_on_threads(body, workers=2, sync="bsp").results
        return dict(results)

    return {"alone": alone, "simulated": simulated, "live": live}[request.param]


# -- scripts that resume ----------------------------------------------------------------------------------


# Each schedule alone, and in a run those that differ most.
RESUMED: list[Any] = [
    *(("alone", range, make) for make in SCHEDULES),
    *(("simulated", range, make) for make in (one_cycle, chained, in_epochs)),
    *(("live", paceline.epochs, make) for make in (warm_up_and_cosine, in_epochs)),
]


@pytest.mark.parametrize(
    ("host", "loop", "make"),
    [
        *RESUMED,
        *thorough(
            *(
                case
                for case in itertools.product(
                    ("alone", "simulated", "live"), (range, paceline.epochs), SCHEDULES
                )
                if case not in RESUMED
            )
        ),
    ],
    indirect=["host"],
)
def test_a_resumed_schedule_is_the_uninterrupted_one(
    host: Host, loop: Callable[[int], Iterable[int]], make: Make
) -> None:
    def uninterrupted() -> Script:
        script = Script(make)
        script.train(loop(EPOCHS))
        return script

    def first() -> Script:
        script = Script(make)
        script.train(loop(3))
        return script

    def rest(load: str, skip: int) -> Script:
        script = Script(make, state=copy.deepcopy(begun[0].state), load=load, skip=skip)
        script.train(loop(EPOCHS - 3))
        return script

    whole, begun = host(uninterrupted), host(first)
    assert whole[0].rates == plainly(make)[:: len(whole)]
    for load, skip in itertools.product(("before", "after"), (0, 3)):
        resumed = host(partial(rest, load, skip))
        for worker, script in whole.items():
            assert begun[worker].rates + resumed[worker].rates == script.rates, (load, skip)


SPLIT: list[Any] = [(0, one_cycle), (3, chained), (0, warm_up_and_cosine), (3, in_epochs)]


@pytest.mark.parametrize(
    ("skip", "make"),
    [*SPLIT, *thorough(*(case for case in itertools.product((0, 3), SCHEDULES) if case not in SPLIT))],
)
def test_under_a_dynamic_split_the_resumed_schedule_ends_where_the_uninterrupted_one_does(
    skip: int, make: Make
) -> None:
    """At the end of an epoch, all workers have the same rate, whoever received the last batches."""

    def first() -> Script:
        script = Script(make)
        script.train(range(3))
        return script

    def rest() -> Script:
        script = Script(make, state=state, skip=skip)
        script.train(range(EPOCHS - 3))
        return script

    plain = plainly(make)
    states = [script.state for script in simulated(first, UNEQUAL, "asp").values()]
    lasts = [state[0]["param_groups"][0]["lr"] for state in states]
    assert lasts == [plain[3 * BATCHES]] * 3
    state = states[2]
    for script in simulated(rest, UNEQUAL, "asp").values():
        assert set(script.rates) <= set(plain[3 * BATCHES :])
        assert script.rates[0] == plain[3 * BATCHES]


def linear_by_lambda(batches: int) -> Make:
    return lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 - step / (EPOCHS * batches))


def cosine_over(batches: int) -> Make:
    return lambda optimizer: CosineAnnealingLR(optimizer, T_max=EPOCHS * batches)


# The batches become larger or smaller.
OTHER_SIZES: list[Any] = [(2, "asp", linear_by_lambda), (8, "bsp", linear_by_lambda), (8, "asp", cosine_over)]


@pytest.mark.parametrize(
    ("batch", "sync", "make_of"),
    [
        *OTHER_SIZES,
        *thorough(
            *(
                case
                for case in itertools.product((2, 8), ("bsp", "asp"), (linear_by_lambda, cosine_over))
                if case not in OTHER_SIZES
            )
        ),
    ],
)
def test_a_schedule_goes_on_at_the_same_part_of_training_if_the_batches_have_another_size(
    batch: int, sync: str, make_of: Callable[[int], Make]
) -> None:
    there, here = BATCHES * 4 // batch, BATCHES

    def first() -> dict[str, object]:
        script = Script(make_of(there), batch=batch)
        script.train(range(3))
        return state_of(script.scheduler)

    def rest() -> tuple[Script, dict[str, object]]:
        script = Script(make_of(here), skip=3)
        set_state(script.scheduler, copy.deepcopy(begun))
        script.train(range(EPOCHS - 3))
        return script, state_of(script.scheduler)

    states: dict[int, dict[str, object]] = {}
    simulate(EQUAL, sync, train_fn=lambda: states.update({paceline.worker_index(): first()}))
    begun = states[0]
    ends: dict[int, tuple[Script, dict[str, object]]] = {}
    simulate(UNEQUAL, sync, train_fn=lambda: ends.update({paceline.worker_index(): rest()}))
    script, end = ends[0]
    whole = plainly(make_of(here))
    assert script.rates[0] == pytest.approx(whole[3 * here])
    assert script.rates == sorted(script.rates, reverse=True)
    for rate in script.rates:
        assert min(abs(rate - each) for each in whole[3 * here :]) < 0.02
    assert script.scheduler.get_last_lr() == pytest.approx([0.0], abs=1e-9)
    assert end["place"][2] == (here if make_of is linear_by_lambda else there)  # type: ignore[index]


# Each schedule once, with and without each of the two.
JOINED_LATE: list[Any] = [
    (False, False, cosine),
    (False, True, one_cycle),
    (True, False, warm_up_and_cosine),
    (True, True, chained),
]


@pytest.mark.parametrize(
    ("tracked", "resumed", "make"),
    [
        *JOINED_LATE,
        *thorough(
            *(
                case
                for case in itertools.product(
                    (False, True), (False, True), (one_cycle, cosine, chained, warm_up_and_cosine)
                )
                if case not in JOINED_LATE
            )
        ),
    ],
)
def test_a_worker_that_joins_late_has_the_rates_of_the_others(
    tracked: bool, resumed: bool, make: Make
) -> None:
    first = simulated(lambda: _trained(Script(make), range(3)), EQUAL)[0].state if resumed else None
    scripts: list[Script] = []

    def train() -> None:
        script = Script(make, state=first, skip=3 if resumed else 0)
        scripts.append(script)
        if tracked:
            paceline.track(scheduler=script.scheduler)
        script.train(paceline.epochs(3))

    simulate(Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=14.5)}), "asp", train_fn=train)
    early, late = scripts
    plain = plainly(make)[3 * BATCHES :] if resumed else plainly(make)
    assert set(early.rates) <= set(plain)
    assert len(late.rates) > 5
    assert set(late.rates[1:]) <= set(plain[BATCHES:])
    assert abs(plain.index(late.rates[-1]) - plain.index(early.rates[-1])) <= 2


def _trained(script: Script, epochs: Iterable[int]) -> Script:
    script.train(epochs)
    return script


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_second_schedule_for_the_same_place_and_data_begins_at_its_beginning(sync: str) -> None:
    """The folds of a cross-validation share the stream of epochs if they share the dataset."""
    data = TensorDataset(torch.ones(4 * BATCHES, 1))
    rates: dict[int, list[list[float]]] = {}

    def train() -> None:
        folds = rates.setdefault(paceline.worker_index(), [])
        for _ in range(3):
            model = nn.Linear(1, 1)
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            batches = DataLoader(data, batch_size=4)
            schedule = CosineAnnealingLR(sgd, T_max=2 * BATCHES)
            model, optimizer, loader, scheduler = paceline.prepare(model, sgd, batches, schedule)
            own: list[float] = []
            folds.append(own)
            for _ in range(2):
                for (x,) in loader:
                    own.append(optimizer.param_groups[0]["lr"])
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    optimizer.step()
                    scheduler.step()
            paceline.barrier()

    simulate(EQUAL, sync, train_fn=train)
    for folds in rates.values():
        assert folds[0] == folds[1] == folds[2]
        assert folds[0][0] == 1.0
        assert folds[0][-1] < 0.05


def test_a_schedule_that_is_made_during_a_pass_begins_there(run_on_threads: RunOnThreads) -> None:
    def train() -> list[int]:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 1)), batch_size=4)
        loader: Any = paceline.distribute(batches)
        made: list[int] = []
        scheduler: Any = None
        optimizer: Any = None
        for index, (x,) in enumerate(loader):
            if index == 2:
                model, optimizer, scheduler, _ = paceline.prepare(model, sgd, cosine(sgd), loader)
            if index >= 2:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                scheduler.step()
                made.append(scheduler.last_epoch)
        return made

    assert run_on_threads(train, workers=2, sync="bsp").results == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}


# -- loops without a distributed loader -------------------------------------------------------------------


def crops(batch: int = 4) -> Iterator[torch.Tensor]:
    """Random crops of one long array."""
    long = torch.arange(1000.0)
    while True:
        starts = torch.randint(0, 990, (batch,))
        yield torch.stack([long[start : start + 1] for start in starts])


def in_crops(
    limits: dict[str, Any], make: Make, *, accumulated: int = 1, nested: int = 1, prepared: bool = True
) -> tuple[list[float], float]:
    """Train on random crops until the job has reached a limit; return the rates, and the last one."""
    model = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = make(optimizer)
    if prepared:
        model, optimizer, scheduler = paceline.prepare(model, optimizer, scheduler)
    else:
        model, optimizer = paceline.prepare(model, optimizer)
    rates = []
    steps = itertools.count(1)
    for _ in paceline.epochs(**limits):
        for x in itertools.islice(crops(), nested):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            (model(x).mean() * 0).backward()
            optimizer.step(samples=len(x))
            if next(steps) % accumulated == 0:
                scheduler.step()
    return rates, float(scheduler.get_last_lr()[0])


def cosine_of(steps: int) -> Make:
    return lambda optimizer: CosineAnnealingLR(optimizer, T_max=steps)


UPDATES, SAMPLES, COUNT = {"updates": 120}, {"samples": 480}, {"updates": 120, "count": 1000}


@pytest.mark.parametrize(
    ("limits", "sync"),
    [
        *(
            (UPDATES, "bsp"),
            (SAMPLES, "asp"),
            (COUNT, "ssp:staleness=2"),
            (UPDATES, "elastic-bsp:lookahead=4"),
        ),
        *thorough(
            *((UPDATES, "asp"), (UPDATES, "ssp:staleness=2")),
            *((SAMPLES, sync) for sync in ("bsp", "ssp:staleness=2", "elastic-bsp:lookahead=4")),
            *((COUNT, sync) for sync in ("bsp", "asp", "elastic-bsp:lookahead=4")),
        ),
    ],
)
def test_without_a_loader_the_schedule_ends_with_the_loop(limits: dict[str, Any], sync: str) -> None:
    """The cosine begins at 1 and ends at 0 with the last update, whoever has made the updates."""
    steps = 120
    ends: dict[int, tuple[list[float], float]] = {}

    def train() -> None:
        ends[paceline.worker_index()] = in_crops(limits, cosine_of(steps))

    simulate(UNEQUAL, sync, train_fn=train)
    plain, last = in_crops(limits, cosine_of(steps))
    assert last < 1e-9
    for rates, end in ends.values():
        assert rates[0] == plain[0] == 1.0
        assert all(any(abs(rate - other) < 1e-12 for other in [*plain, last]) for rate in rates)
        assert end < 0.01, "the schedule has not followed the job"
    if sync == "bsp" and "updates" in limits:
        assert ends[0] == (plain, last)


def test_without_a_loader_a_schedule_may_be_stepped_every_few_iterations() -> None:
    ends: dict[int, float] = {}

    def train() -> None:
        ends[paceline.worker_index()] = in_crops({"updates": 120}, cosine_of(30), accumulated=4)[1]

    simulate(UNEQUAL, "asp", train_fn=train)
    assert all(end < 0.03 for end in ends.values())


def test_minutes_count_the_updates_of_the_job() -> None:
    """A job of three workers makes as many updates in its time as they make together."""
    made: dict[int, tuple[list[float], float]] = {}

    def train() -> None:
        made[paceline.worker_index()] = in_crops({"minutes": 1.0}, cosine_of(1000))

    result = simulate(UNEQUAL, "asp", train_fn=train)
    reached, _ = in_crops({"updates": result.measures.updates}, cosine_of(1000))
    assert all(end == pytest.approx(reached[-1], abs=0.01) for _, end in made.values())


def test_without_a_limit_that_the_job_counts_each_call_is_one_step() -> None:
    made: dict[int, tuple[list[float], float]] = {}

    def train() -> None:
        made[paceline.worker_index()] = in_crops({"count": 2}, cosine_of(40), nested=20)

    simulate(UNEQUAL, "asp", train_fn=train)
    plain = in_crops({"count": 2}, cosine_of(40), nested=20)
    assert made == {0: plain, 1: plain, 2: plain}


@pytest.mark.parametrize("tracked", [False, True])
def test_a_late_worker_begins_at_the_progress_of_the_loop(tracked: bool) -> None:
    made: list[tuple[int, float]] = []

    def train() -> None:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, scheduler = paceline.prepare(model, sgd, cosine_of(120)(sgd))
        if tracked:
            paceline.track(scheduler=scheduler)
        for _ in paceline.epochs(updates=120):
            for x in itertools.islice(crops(), 5):
                optimizer.zero_grad()
                (model(x).mean() * 0).backward()
                optimizer.step()
                scheduler.step()
        made.append((paceline.worker_index(), optimizer.param_groups[0]["lr"]))

    simulate(Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=40.5)}), "asp", train_fn=train)
    assert sorted(index for index, _ in made) == [0, 1]
    assert all(rate < 0.01 for _, rate in made)


def test_the_second_loop_has_a_schedule_of_its_own_length() -> None:
    """A scheduler that is used in two loops goes on in the second one, at the pace of that loop."""
    positions: dict[int, list[int]] = {}

    def train() -> None:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, scheduler = paceline.prepare(model, sgd, cosine_of(1000)(sgd))
        own = positions.setdefault(paceline.worker_index(), [])
        for _ in range(2):
            for _, x in zip(paceline.epochs(updates=60), crops(), strict=False):
                optimizer.zero_grad()
                (model(x).mean() * 0).backward()
                optimizer.step()
                scheduler.step()
            own.append(scheduler.last_epoch)
            paceline.barrier()

    simulate(UNEQUAL, "asp", train_fn=train)
    for one, two in positions.values():
        assert abs(one - 60) <= 3
        assert abs(two - one - 60) <= 6


def test_with_a_loader_the_updates_of_a_loop_are_its_unit_if_they_end_it() -> None:
    """Under bsp, 60 updates of two workers use 120 batches, but the schedule is written for 60 steps."""
    ends: dict[int, int] = {}

    def train() -> None:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 1)), batch_size=4)
        model, optimizer, loader, scheduler = paceline.prepare(model, sgd, batches, cosine_of(60)(sgd))
        for _ in paceline.epochs(updates=60):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                scheduler.step()
        ends[paceline.worker_index()] = scheduler.last_epoch

    simulate(EQUAL, "bsp", train_fn=train)
    assert ends == {0: 60, 1: 60}


def test_a_scheduler_that_is_stepped_once_per_pass_is_left_alone_in_a_loop_of_updates() -> None:
    ends: dict[int, tuple[int, int]] = {}

    def train() -> None:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 1)), batch_size=4)
        model, optimizer, scheduler = paceline.prepare(model, sgd, StepLR(sgd, 1))
        passes = 0
        for _ in paceline.epochs(updates=60):
            for (x,) in paceline.distribute(batches):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            scheduler.step()
            passes += 1
        ends[paceline.worker_index()] = passes, scheduler.last_epoch

    simulate(UNEQUAL, "asp", train_fn=train)
    assert all(passes == steps for passes, steps in ends.values())


@pytest.mark.parametrize(
    ("sync", "prepared", "warnings"), [("asp", False, 3), ("asp", True, 0), ("bsp", False, 0)]
)
def test_a_schedule_by_the_workers_own_iterations_causes_one_warning(
    sync: str, prepared: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        simulate(
            UNEQUAL,
            sync,
            train_fn=lambda: in_crops({"updates": 60}, cosine_of(60), prepared=prepared) and None,
        )
    assert caplog.text.count("paceline.prepare(model, optimizer, scheduler)") == warnings


# -- torch's warning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("each", ["epoch", "iteration"])
@pytest.mark.parametrize("loader", [False, True])
def test_torch_does_not_warn_that_a_scheduler_is_stepped_before_its_optimizer(
    run_on_threads: RunOnThreads, given: bool, each: str, loader: bool
) -> None:
    """In a run, the optimizer for which the scheduler was created takes no step. Warnings are errors in tests."""

    def train() -> None:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler: Any = StepLR(sgd, step_size=1)
        batches: Any = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=4)
        parts: list[Any] = [model, sgd, *([batches] if loader else []), *([scheduler] if given else [])]
        model, optimizer, *rest = paceline.prepare(*parts)
        batches = rest.pop(0) if loader else batches
        scheduler = rest.pop() if given else scheduler
        for _ in range(2):
            for (x,) in batches:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                if each == "iteration":
                    scheduler.step()
            if each == "epoch":
                scheduler.step()

    run_on_threads(train, workers=2, sync="bsp")


def test_torch_does_not_warn_in_a_late_worker_that_has_no_batch_in_its_first_epoch() -> None:
    made: list[int] = []

    def train() -> None:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = StepLR(sgd, step_size=1)
        batches = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 1)), batch_size=4)
        model, optimizer, loader = paceline.prepare(model, sgd, batches)
        paceline.track(scheduler=scheduler)
        for _ in paceline.epochs(EPOCHS):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            scheduler.step()
        made.append(scheduler.last_epoch)

    simulate(Cluster(compute_s=[1.0, 1.0], presence={1: Presence(joins_at_s=14.5)}), "bsp", train_fn=train)
    assert made == [EPOCHS, EPOCHS]
