"""Runs the protocol for a problem, one cell after another. A cell is a contender at a place.

Each finished cell is appended to a file, so that a study which was stopped continues with the first missing cell.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from paceline.lab.pool import Tell, in_this_process, work_off

from ..grid_search import Point
from ..result_file import append_results, read_results, rounded
from .places import Contender, Place, Variant
from .protocol import (
    DECAYS,
    EVALUATION_SEEDS,
    MOMENTA,
    STEPS,
    TUNING_SEEDS,
    Outcome,
    Setting,
    rate_of,
    setting_of,
    tuned,
)
from .schedules import Schedule, record


class Measured(Protocol):
    """The measures of a variant at a place with one seed."""

    def outcome(self, point: Point, batches: str, measure: str) -> Outcome:
        """Return the outcome with one setting."""
        ...


Measure = Callable[[Place, Variant, int, Sequence[Setting]], Measured]
"""Function that makes the runs of a variant at a place with a seed, for some settings."""


class Study(msgspec.Struct, frozen=True):
    """A problem, and where and how the contenders are compared on it."""

    name: str  # name on the command line
    places: tuple[Place, ...]  # the places
    contenders: tuple[Contender, ...]  # the contenders
    batches: tuple[str, ...]  # sizes of the batches
    targets: tuple[float, ...]  # the targets, as shares of the initial loss
    measure: Measure  # see `Measure`
    # function that returns the approximate time for a cell in seconds, on one core
    estimate_s: Callable[[Place, Contender], float]
    budget: int  # number of settings with which the tuning begins
    middle: Callable[[Place, Contender], int]  # function that returns the step at which the tuning begins
    # True if all settings are measured together, because they cost next to nothing
    all_settings: bool = False
    # the measure by which settings are chosen for all measures, if runs are expensive; "" to choose for each
    # measure separately
    tune_by: str = ""
    seeds: tuple[int, ...] = EVALUATION_SEEDS  # the seeds of the evaluation

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of what is measured. In the last two, the learning rate decays to 0."""
        times = (f"time to {target:g}" for target in self.targets)
        return (*times, "loss at equal time", "loss at equal gradients")


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The results of a contender for one size of the batches and one measure."""

    sync: str  # the best variant
    momentum: float  # the best momentum
    rate: float  # the best learning rate
    tried: int  # number of settings that were tried
    results: tuple[float | None, ...]  # the result with each evaluation seed; None for "never"

    @property
    def values(self) -> list[float]:
        """The results, with infinity for "never"."""
        return [math.inf if value is None else value for value in self.results]


class Cell(msgspec.Struct, frozen=True):
    """The results of a contender at a place."""

    place: str  # name of the place
    contender: str  # name of the contender
    found: dict[str, dict[str, Found]]  # results by size of the batches and measure


def read_cells(path: Path) -> list[Cell]:
    """Return the cells in a file; none if it does not exist."""
    return read_results(path, Cell)


def missing(study: Study, path: Path) -> list[tuple[Place, Contender]]:
    """Return the cells of a study that a file does not contain."""
    done = {(cell.place, cell.contender) for cell in read_cells(path)}
    cells = ((place, contender) for place in study.places for contender in study.contenders)
    return [(place, contender) for place, contender in cells if (place.name, contender.name) not in done]


def run(study: Study, path: Path, tell: Tell) -> None:
    """Run the cells that are missing in a file, and append them to it."""
    work_off(
        lambda task: make_cell(study, *task),
        missing(study, path),
        lambda task, cell: append_results(path, cell),
        tell,
        pool=in_this_process,
        name_of=lambda task: f"{task[0].name}: {task[1].name}",
        cost_of=lambda task: study.estimate_s(*task),
    )


def make_cell(study: Study, place: Place, contender: Contender) -> Cell:
    """Tune and evaluate a contender at a place."""
    variants = contender.variants(place.workers)
    every = [Setting(d, m, step) for d in DECAYS for m in MOMENTA for step in STEPS] * study.all_settings
    runs = [[study.measure(place, variant, seed, every) for seed in TUNING_SEEDS] for variant in variants]
    keys = [(batches, measure) for batches in study.batches for measure in study.measures]
    best: dict[tuple[str, str], tuple[Point, int]] = {}
    for batches, measure in keys:

        def outcomes(point: Point, batches: str = batches, measure: str = measure) -> list[Outcome]:
            return [each.outcome(point, batches, measure) for each in runs[point.variant]]

        if study.tune_by in ("", measure):
            middle = study.middle(place, contender)
            best[batches, measure] = tuned(outcomes, len(variants), middle, study.budget)
    for batches, measure in keys:
        best.setdefault((batches, measure), best[batches, study.tune_by or measure])
    results: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
    for index, variant in enumerate(variants):
        chosen = {key: point for key, (point, _) in best.items() if point.variant == index}
        settings = list({setting_of(point, measure) for (_, measure), point in chosen.items()})
        for seed in study.seeds if chosen else ():
            found = study.measure(place, variant, seed, settings)
            for (batches, measure), point in chosen.items():
                results[batches, measure].append(found.outcome(point, batches, measure).result)
    found_by: dict[str, dict[str, Found]] = {batches: {} for batches in study.batches}
    for batches, measure in keys:
        point, tried = best[batches, measure]
        found_by[batches][measure] = Found(
            variants[point.variant].sync,
            point.momentum,
            float(f"{rate_of(point.momentum, point.step):.3g}"),
            tried,
            tuple(rounded(value, 4) for value in results[batches, measure]),
        )
    return Cell(place.name, contender.name, found_by)


@functools.cache
def equal_gradients(place: Place) -> float:
    """Return the number of full batches after which losses are compared: nearly all that BSP uses."""
    counts = [record(place, Variant("bsp"), seed).updates[-1].pushed for seed in TUNING_SEEDS]
    return float(math.floor(0.9 * min(counts)))


def decay_factors(schedule: Schedule, place: Place) -> dict[str, list[float]]:
    """Return the factor of the learning rate in each update, for each way in which it decays."""
    most = equal_gradients(place)
    return {
        "constant": [1.0] * len(schedule.updates),
        "with time": [1 - update.time_s / place.until_s for update in schedule.updates],
        "with gradients": [max(0.0, 1 - update.pushed / most) for update in schedule.updates],
    }
