"""Training runs for the papers' figures, on simulated clusters, evaluated at regular intervals of virtual time.

What is trained is a `Problem`: a paper's network on published data, or what stands in for them. Compute times,
network bandwidth and message sizes are taken from the papers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.core.lease import BatchSizing
from paceline.errors import ConfigurationError
from paceline.lab.pool import TellCount, on_all_cores
from paceline.shard.store import WeightsSnapshot
from paceline.sim import Cluster, simulate
from paceline.train.data import distribute
from paceline.train.optimizer import DistributedOptimizer

from .datasets import Images
from .problems import DIGITS, Problem, accuracy, mean_loss, size

__all__ = [
    "Setting",
    "Target",
    "TrainingOutcome",
    "TrainingRun",
    "at_own_best",
    "best_of_each",
    "common_and_tuned",
    "medians",
    "run_all",
    "with_setting",
]

FEW = 4  # for this number of runs or fewer, starting a process pool takes longer than it saves

NEVER_S = 1e6  # used instead of an infinite time; longer than any run here

Setting = tuple[float, float]
"""(learning rate, momentum)."""


class Target(msgspec.Struct, frozen=True):
    """The accuracy or loss that a run should reach.

    Attributes:
        measure: "accuracy" on the test images, from 0 to 1, or "loss" over the first training images.
        value: smallest accuracy or largest loss that meets the target.
        in_a_row: number of consecutive evaluations that must meet the target.
    """

    measure: Literal["accuracy", "loss"]
    value: float
    in_a_row: int

    def lack(self, value: float) -> float:
        """Return how far a value is from meeting the target; 0 or less if the value meets it."""
        return self.value - value if self.measure == "accuracy" else value - self.value

    def reached_at(self, values: Sequence[float]) -> int | None:
        """Return the index of the evaluation at which the target was reached, or None."""
        row = 0
        for index, value in enumerate(values):
            row = row + 1 if self.lack(value) <= 0 else 0
            if row == self.in_a_row:
                return index
        return None


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one training run.

    Attributes:
        label: name in figures. Runs with the same label differ only in seed, learning rate or momentum.
        cluster: cluster to simulate.
        sync: sync model.
        target: target of the run, which also defines what is evaluated.
        learning_rate: learning rate for SGD; 0 before a learning rate is chosen.
        likely_rate: learning rate near which a search begins, or None to begin in the middle of the grid.
        momentum: momentum for SGD.
        batch_size: images per worker and iteration.
        iterations: number of iterations of each worker.
        until_s: virtual seconds after which the run ends.
        seed: random seed for weights, data and times.
        every_s: virtual seconds between two evaluations.
        until_target: True to end the run when it reaches the target.
        batch: "equal" or "balanced": the sizes of the workers' batches.
        problem: network and images.
        weight_decay: weight decay of SGD.
        milestones: epochs after which the learning rate is multiplied by `decay`.
        decay: factor of the learning rate at each milestone.
    """

    label: str
    cluster: Cluster
    sync: str
    target: Target
    learning_rate: float = 0.0
    likely_rate: float | None = None
    momentum: float = 0.0
    batch_size: int = 16
    iterations: int = 1_000_000
    until_s: float = math.inf
    seed: int = 0
    every_s: float = 1.0
    until_target: bool = True
    batch: BatchSizing = "equal"
    problem: Problem = DIGITS
    weight_decay: float = 0.0
    milestones: tuple[int, ...] = ()
    decay: float = 1.0


class TrainingOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a run. All times are virtual.

    Attributes:
        run: parameters of the run.
        times_s: times of the evaluations.
        values: accuracy or loss at each evaluation.
        time_s: time at which the last worker finished.
        gradients: number of pushes by all workers.
        updates: number of optimizer steps.
        restarts: number of computations that were aborted and restarted.
        mean_staleness: mean staleness of the gradients, in updates.
        bytes_by_kind: kind of message -> number of bytes sent.
        pushes_s: times at which the pushes began, ascending.
    """

    run: TrainingRun
    times_s: list[float]
    values: list[float]
    time_s: float
    gradients: int
    updates: int
    restarts: int
    mean_staleness: float
    bytes_by_kind: dict[str, int]
    pushes_s: list[float]

    @property
    def reached_s(self) -> float:
        """Virtual time at which the target was reached, in seconds; infinity if the target was missed."""
        index = self.run.target.reached_at(self.values)
        return math.inf if index is None else self.times_s[index]

    @property
    def slowness(self) -> float:
        """Time to the target; if it was missed, a far larger number that grows with the final distance from it."""
        lack = min(self.run.target.lack(self.values[-1]), NEVER_S)
        return min(self.reached_s, NEVER_S * (1 + max(0.0, lack)))


def run_all(
    runs: Sequence[TrainingRun], tell: TellCount = lambda done, of, what: None
) -> list[TrainingOutcome]:
    """Execute runs on all cores, but identical runs only once. Return the outcomes in the order of `runs`."""
    wanted = list(dict.fromkeys(map(_key, runs)))
    by_key = {_key(run): run for run in runs}
    images = _images_of(runs)
    if len(wanted) <= FEW:
        _prepare(images)
        found = {}
        for done, key in enumerate(wanted, start=1):
            found[key] = _run(by_key[key])
            tell(done, len(wanted), by_key[key].label)
        return [msgspec.structs.replace(found[_key(run)], run=run) for run in runs]
    tasks = [by_key[key] for key in wanted]
    outcomes = on_all_cores(_run, tasks, lambda run: run.label, tell, _prepare, (images,))
    by_task = dict(zip(wanted, outcomes, strict=True))
    return [msgspec.structs.replace(by_task[_key(run)], run=run) for run in runs]


def best_of_each(
    runs: Sequence[TrainingRun],
    grid: Sequence[Setting],
    tell: TellCount = lambda done, of, what: None,
) -> dict[str, Setting]:
    """For each label, find the setting with the smallest median time to the target. Ties go to the earlier setting.

    If each label has only one run and `until_target` is set in all runs, the search begins near `likely_rate` and
    moves outward. In this search, a run ends as soon as it has taken longer than the best run so far.

    Args:
        runs: for each label, one run per seed.
        grid: settings to try.
        tell: progress callback.
    """
    if len({run.label for run in runs}) == len(runs) and all(run.until_target for run in runs):
        tasks = [(run, tuple(grid)) for run in runs]
        found = on_all_cores(_tune, tasks, lambda task: task[0].label, tell, _prepare, (_images_of(runs),))
        return {run.label: setting for run, setting in zip(runs, found, strict=True)}
    tried = [with_setting(run, setting) for run in runs for setting in grid]
    scores: dict[str, dict[Setting, list[float]]] = {}
    for outcome in run_all(tried, tell):
        setting = outcome.run.learning_rate, outcome.run.momentum
        scores.setdefault(outcome.run.label, {}).setdefault(setting, []).append(outcome.slowness)
    return {
        label: min(times, key=lambda setting: (median(times[setting]), grid.index(setting)))
        for label, times in scores.items()
    }


def common_and_tuned(
    runs: Sequence[TrainingRun],
    grid: Sequence[Setting],
    tell: Callable[[str, float], None],
) -> tuple[list[TrainingOutcome], list[TrainingOutcome], dict[str, Setting]]:
    """Execute all runs with the given settings, as in the papers, and again with the best setting for each label.

    Only the runs with seed 0 determine the best setting in the grid.

    Returns:
        The outcomes with the given settings, the outcomes with the best settings, and the best setting for each
        label.
    """
    common = run_all(runs, lambda done, of, what: tell(what, 0.3 * done / max(1, of)))
    tuned, best = at_own_best(runs, grid, lambda what, share: tell(what, 0.3 + 0.7 * share))
    return common, tuned, best


def at_own_best(
    runs: Sequence[TrainingRun],
    grid: Sequence[Setting],
    tell: Callable[[str, float], None],
) -> tuple[list[TrainingOutcome], dict[str, Setting]]:
    """For each label, find the best setting in the grid, and execute all runs with it.

    Only the runs with seed 0 determine the best setting.

    Returns:
        The outcomes, and the best setting for each label.
    """
    best = best_of_each(
        [run for run in runs if run.seed == 0],
        grid,
        lambda done, of, what: tell(f"tuning {what}", 0.6 * done / max(1, of)),
    )
    outcomes = run_all(
        [with_setting(run, best[run.label]) for run in runs],
        lambda done, of, what: tell(what, 0.6 + 0.4 * done / max(1, of)),
    )
    return outcomes, best


def with_setting(run: TrainingRun, setting: Setting) -> TrainingRun:
    """Return a copy of the run that uses the learning rate and the momentum of the setting."""
    return msgspec.structs.replace(run, learning_rate=setting[0], momentum=setting[1])


def medians(
    outcomes: Sequence[TrainingOutcome], measure: Callable[[TrainingOutcome], float]
) -> dict[str, float]:
    """For each label, return the median of a measure over the runs with this label."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.run.label, []).append(measure(outcome))
    return {label: median(values) for label, values in found.items()}


def _key(run: TrainingRun) -> tuple[object, ...]:
    """Return a key. Runs with equal keys have equal results."""
    return (
        id(run.cluster),
        run.sync,
        run.learning_rate,
        run.momentum,
        run.batch_size,
        run.iterations,
        run.until_s,
        run.seed,
        run.every_s,
        run.target,
        run.until_target,
        run.batch,
        run.problem.name,
        run.weight_decay,
        run.milestones,
        run.decay,
    )


_images: Mapping[
    str, Images
]  # name of a problem -> its images; set by `_prepare`, once in each process of the pool


def _images_of(runs: Sequence[TrainingRun]) -> dict[str, Images]:
    problems = {run.problem.name: run.problem for run in runs}
    return {name: problem.images() for name, problem in problems.items()}


def _prepare(images: Mapping[str, Images]) -> None:
    global _images
    _images = images


def _tune(task: tuple[TrainingRun, tuple[Setting, ...]]) -> Setting:
    """Return the setting that reaches the target soonest or, if none does, the one that comes nearest to it."""
    run, grid = task
    likely = len(grid) // 2
    if (rate := run.likely_rate) is not None:
        likely = min(range(len(grid)), key=lambda index: abs(math.log(grid[index][0] / rate)))
    best = math.inf, likely
    until_s = run.until_s
    for index in sorted(range(len(grid)), key=lambda index: abs(index - likely)):
        outcome = _run(msgspec.structs.replace(with_setting(run, grid[index]), until_s=until_s))
        best = min(best, (outcome.slowness, index))
        until_s = min(until_s, best[0])
    return grid[best[1]]


def _run(run: TrainingRun) -> TrainingOutcome:
    images = _images[run.problem.name]
    if size(images.train) < run.batch_size:
        raise ConfigurationError(
            f"{run.problem.name}: {size(images.train)} training images are fewer than a batch of {run.batch_size}. "
            "Unpack the whole data set."
        )
    network = run.problem.network()  # evaluated with the weights of each snapshot
    times_s: list[float] = []
    values: list[float] = []

    def evaluate(time_s: float, snapshot: WeightsSnapshot) -> bool:
        network.load_state_dict(snapshot.state_dict)
        times_s.append(time_s)
        values.append(_value(network, images, run))
        return run.until_target and run.target.reached_at(values[-run.target.in_a_row :]) is not None

    result = simulate(
        run.cluster,
        run.sync,
        seed=run.seed,
        until_s=run.until_s,
        train_fn=_train,
        args=(images, run),
        on_nan="skip",
        hyperparameters="raw",
        batch=run.batch,
        snapshot_every_s=run.every_s,
        on_snapshot=evaluate,
    )
    measures = result.measures
    return TrainingOutcome(
        run=run,
        times_s=times_s,
        values=values,
        time_s=result.time_s,
        gradients=sum(measures.iterations.values()),
        updates=measures.updates,
        restarts=measures.restarts,
        mean_staleness=measures.mean_staleness,
        bytes_by_kind=result.bytes_by_kind,
        pushes_s=[loss.time_s for loss in result.losses or []],
    )


def _train(images: Images, run: TrainingRun) -> None:
    """Train as one worker of a run."""
    torch.manual_seed(run.seed)
    network = run.problem.network()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(
            network.parameters(), lr=run.learning_rate, momentum=run.momentum, weight_decay=run.weight_decay
        ),
        model=network,
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, run.milestones, run.decay)
    part = distribute(DataLoader(images.train, run.batch_size, shuffle=True, drop_last=True))

    def batches() -> Iterator[Any]:
        while True:
            yield from part
            if run.milestones:
                scheduler.step()

    for x, y in itertools.islice(batches(), run.iterations):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = run.problem.loss(network(x), y)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def _value(network: nn.Module, images: Images, run: TrainingRun) -> float:
    """Return the accuracy, or the loss over the first training images; infinity if it is not finite."""
    if run.target.measure == "accuracy":
        return accuracy(network, images.test)
    loss = mean_loss(network, images.train, run.problem.loss_count, run.problem.loss)
    return loss if math.isfinite(loss) else math.inf
