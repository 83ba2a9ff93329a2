"""Makes the runs of the table that are missing in a file of results, and appends them to it.

Each line of the file is the result of one ensemble, or the rates of one problem. So a command that was stopped
continues with what is missing.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import torch

from paceline.lab.pool import Tell, in_processes, in_this_process, work_off
from paceline.trace.measures import missing_updates

from ..ensembles.problems import Problem, epochs_of
from ..ensembles.schedules import Epochs, Schedule, record
from ..ensembles.training import Setting, evenly, train
from ..result_file import append_results, read_results, rounded
from .guarding import Guards
from .plan import (
    COSTS_S,
    TUNING_SEEDS,
    Job,
    Scope,
    cluster_of,
    factors_of,
    jobs,
    kinds_of,
    problem_of,
    sign_of,
)

EVALUATIONS = 40
"""Number of times that the quality is computed in a run."""

TUNING_WORKERS = 4
SCHEDULE_SEED = 0

UNCORRECTED = "translated without delay"
KINDS = ("raw", "translated", UNCORRECTED)
"""The kinds of hyper-parameters. As in a real run, the delays of translated ones are corrected."""

ENSEMBLES = (("raw", "translated"), (UNCORRECTED,))
"""The kinds that are trained together, because their runs have the same observer."""


class Tuned(msgspec.Struct, frozen=True, tag="tuned"):
    """The search for the best learning rate of a problem under bsp."""

    problem: str  # name of the problem
    best: float  # the best rate
    # mean final quality over the tuning seeds for each rate of the problem; None if it is not finite
    finals: list[float | None]


class Runs(msgspec.Struct, frozen=True, tag="runs"):
    """The result of the runs with one learning rate."""

    factor: float  # the learning rate, as a share of the best one for bsp
    finals: list[float | None]  # final quality with each seed; None if it is not finite
    curve: list[float | None]  # mean quality over the seeds at each evaluation; None if it is not finite
    # for each seed, True if the user was told that training goes wrong or, at the end, that updates are
    # missing
    told: list[bool] = []


class Result(msgspec.Struct, frozen=True, tag="result"):
    """The result of an ensemble."""

    problem: str  # name of the problem
    cluster: str  # name of the cluster
    workers: int  # number of workers
    model: str  # name of the sync model
    hyperparameters: str  # one of `KINDS`
    seeds: int  # number of seeds
    end_s: float  # virtual time of the whole run, in seconds. Evaluations are at equal intervals.
    took_s: float  # time that this ensemble has taken, in seconds
    runs: list[Runs]  # the runs for each learning rate

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies a result."""
        return self.problem, self.cluster, self.workers, self.model, self.hyperparameters, self.seeds


class Order(msgspec.Struct, frozen=True):
    """What is to be done for a job."""

    job: Job  # the job
    kinds: dict[str, tuple[str, ...]]  # problem -> some of `KINDS`
    seeds: int  # number of seeds
    path: Path  # the file of results
    epochs: int | None  # number of epochs; None for those of each problem

    def __str__(self) -> str:
        return f"{self.job.model}, {self.job.cluster}, {self.job.workers} workers"

    @property
    def cost_s(self) -> float:
        """Approximate time on one core, in seconds."""
        runs = {name: len(kinds) * len(factors_of(name)) * self.seeds for name, kinds in self.kinds.items()}
        return sum(
            runs[problem] / 48 * (fixed + each * self.job.workers)
            for problem in runs
            for fixed, each in [COSTS_S[problem]]
        )


def read(path: Path) -> tuple[dict[str, Tuned], dict[tuple[object, ...], Result]]:
    """Return the rates of each problem, and the results by their keys, in a file; none if there is no file."""
    found: list[Tuned | Result] = read_results(path, Tuned, Result)
    return (
        {each.problem: each for each in found if isinstance(each, Tuned)},
        {each.key: each for each in found if isinstance(each, Result)},
    )


def missing(scope: Scope, kinds: Sequence[str], seeds: int, path: Path, epochs: int | None) -> list[Order]:
    """Return orders for the results that a file lacks."""
    _, results = read(path)
    orders = []
    for job in jobs(scope):
        wanted = {
            problem: tuple(
                kind
                for kind in kinds_of(problem, job.model, kinds)
                if (problem, job.cluster, job.workers, job.model, kind, seeds) not in results
            )
            for problem in job.problems
        }
        left = {problem: each for problem, each in wanted.items() if each}
        if left:
            orders.append(Order(job, left, seeds, path, epochs))
    return orders


def make(orders: Sequence[Order], processes: int, tell: Tell) -> None:
    """Carry out orders, and append the results to their files.

    Args:
        orders: what is to be done.
        processes: 1 to work in this process, more to work on all cores.
        tell: progress callback.
    """
    _prepare()
    with in_processes(None, _prepare) if processes > 1 else nullcontext(in_this_process) as pool:
        failures = work_off(
            _make,
            orders,
            lambda order, results: append_results(order.path, *results),
            tell,
            pool=pool,
            cost_of=lambda order: order.cost_s,
        )
    if failures:
        raise failures[0].error


def tune(names: Sequence[str], path: Path, epochs: int | None) -> None:
    """Search for the best learning rate of each problem that the file contains no rate for, and append the rates."""
    _prepare()
    known, _ = read(path)
    for name in names:
        if name in known:
            continue
        problem = problem_of(name)
        schedule = _schedule("steady 3x", TUNING_WORKERS, "bsp", _epochs(problem, TUNING_WORKERS, epochs))
        settings = [Setting(rate, "raw") for rate in problem.rates]
        [end] = train(problem, schedule, settings, TUNING_SEEDS, ())
        quality = end.quality.mean(axis=1)
        ranked = np.where(np.isfinite(quality), sign_of(name) * quality, -math.inf)
        best = problem.rates[int(ranked.argmax())]
        append_results(path, Tuned(name, best, _row(quality)))


def _make(order: Order) -> list[Result]:
    tuned, _ = read(order.path)
    results: list[Result] = []
    for name, kinds in order.kinds.items():
        job, problem = order.job, problem_of(name)
        schedule = _schedule(job.cluster, job.workers, job.sync, _epochs(problem, job.workers, order.epochs))
        rates = [factor * tuned[name].best for factor in factors_of(name)]
        for together in ENSEMBLES:
            if own := [kind for kind in kinds if kind in together]:
                results += _make_ensemble(order, name, schedule, own, rates)
    return results


def _make_ensemble(
    order: Order, name: str, schedule: Schedule, kinds: Sequence[str], rates: Sequence[float]
) -> list[Result]:
    """Train all rates and seeds with some kinds of hyper-parameters."""
    begun_s, job = time.monotonic(), order.job
    settings = [Setting(rate, "raw" if kind == "raw" else "translated") for kind in kinds for rate in rates]
    guards = Guards(schedule, settings, order.seeds, corrects_delay=UNCORRECTED not in kinds)
    times_s = evenly(schedule.end_s, EVALUATIONS)
    found = list(train(problem_of(name), schedule, settings, range(order.seeds), times_s, guards))
    took_s = round((time.monotonic() - begun_s) / len(kinds), 2)
    curves = np.stack([each.quality.mean(axis=1) for each in found], axis=1)
    finals = found[-1].quality
    told = np.reshape(guards.told, finals.shape) | bool(missing_updates(schedule.measures))
    results = []
    for index, kind in enumerate(kinds):
        runs = [
            Runs(factor, _row(finals[row]), _row(curves[row]), told[row].tolist())
            for row, factor in enumerate(factors_of(name), start=index * len(rates))
        ]
        end_s = round(schedule.end_s, 3)
        results.append(
            Result(name, job.cluster, job.workers, job.model, kind, order.seeds, end_s, took_s, runs)
        )
    return results


def _prepare() -> None:
    torch.set_num_threads(1)


def _epochs(problem: Problem, workers: int, count: int | None) -> Epochs:
    epochs = epochs_of(problem, workers)
    return epochs if count is None else epochs._replace(epochs=count)


@functools.lru_cache(maxsize=2)
def _schedule(cluster: str, workers: int, sync: str, epochs: Epochs) -> Schedule:
    return record(cluster_of(cluster, workers), sync, epochs, SCHEDULE_SEED)


def _row(values: np.ndarray) -> list[float | None]:
    return [rounded(float(value), 5) for value in values]
