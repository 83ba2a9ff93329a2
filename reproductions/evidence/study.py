"""Runs the protocol on noisy quadratics, one cell after another. A cell is a contender at a place.

Each finished cell is appended to a file, one JSON object per line, so that a study which was stopped continues with
the first missing cell.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from paceline.cli.progress import TellShare

from ..grid_search import Point
from .places import CONTENDERS, PLACES, Contender, Place, Variant
from .protocol import (
    EVALUATION_SEEDS,
    MEASURES,
    MOMENTA,
    STEPS,
    TARGETS,
    TUNING_SEEDS,
    Outcome,
    rate_of,
    tuned,
)
from .quadratics import CURVATURES, expected_losses, noise_of
from .schedules import Schedule, record

__all__ = ["BATCHES", "Cell", "Found", "batch_of", "estimate_s", "read_cells", "run"]

BATCHES = ("0.1 each", "1 each", "10 each", "1 in all", "10 in all")
"""The sizes of the batches, in units of the critical batch: of each worker's batch, or of all workers' together."""

SECONDS_PER_GRADIENT = 5e-5
"""Time for one gradient in the simulation and in the recursion, on one core, however few settings there are."""

SECONDS_PER_NUMBER = 2e-9
"""Time for one number of the recursion's state."""


class Found(msgspec.Struct, frozen=True):
    """The results of a contender for one size of the batches and one measure.

    Attributes:
        sync: the best variant.
        momentum: the best momentum.
        rate: the best learning rate.
        tried: number of settings that were tried.
        results: the result with each evaluation seed; None for "never".
    """

    sync: str
    momentum: float
    rate: float
    tried: int
    results: tuple[float | None, ...]

    @property
    def values(self) -> list[float]:
        """The results, with infinity for "never"."""
        return [math.inf if value is None else value for value in self.results]


class Cell(msgspec.Struct, frozen=True):
    """The results of a contender at a place.

    Attributes:
        place: name of the place.
        contender: name of the contender.
        found: results by size of the batches and measure.
    """

    place: str
    contender: str
    found: dict[str, dict[str, Found]]


def batch_of(batches: str, workers: int) -> float:
    """Return the size of one worker's batch, in units of the critical batch.

    >>> batch_of("1 each", 4), batch_of("1 in all", 4)
    (1.0, 0.25)
    """
    size, _, unit = batches.partition(" ")
    return float(size) if unit == "each" else float(size) / workers


def read_cells(path: Path) -> list[Cell]:
    """Return the cells in a file; none if it does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Cell) for line in path.read_bytes().splitlines()]


def estimate_s(places: Sequence[Place], contenders: Sequence[Contender]) -> float:
    """Return the approximate time that the study takes on one core, in seconds."""
    settings = len(DECAYS) * len(MOMENTA) * len(STEPS) * len(CURVATURES)
    total_s = 0.0
    for place in places:
        gradients = place.workers * place.until_s
        tuning_s = gradients * (SECONDS_PER_GRADIENT + SECONDS_PER_NUMBER * settings * (place.workers + 8))
        for contender in contenders:
            variants = len(contender.variants(place.workers))
            share = 0.2 if contender.averages else 0.8  # of the gradients that are updates of their own
            total_s += share * tuning_s * variants * len(TUNING_SEEDS)
            total_s += gradients * 2 * SECONDS_PER_GRADIENT * min(variants, 2) * len(EVALUATION_SEEDS)
    return total_s


def run(
    path: Path, places: Sequence[Place], contenders: Sequence[Contender], tell: TellShare
) -> list[Cell]:
    """Run the cells that are missing in a file, append them to it, and return all cells."""
    cells = read_cells(path)
    done = {(cell.place, cell.contender) for cell in cells}
    wanted = [(place, contender) for place in places for contender in contenders]
    missing = [(p, c) for p, c in wanted if (p.name, c.name) not in done]
    for index, (place, contender) in enumerate(missing):
        tell(f"{place.name}: {contender.name}", index / len(missing))
        cell = make_cell(place, contender)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(cell) + b"\n")
        cells.append(cell)
    return cells


def make_cell(place: Place, contender: Contender) -> Cell:
    """Tune and evaluate a contender at a place."""
    variants = contender.variants(place.workers)
    every = [Setting(decay, m, step) for decay in DECAYS for m in MOMENTA for step in STEPS]
    measured = [[Measured(place, variant, seed, every) for seed in TUNING_SEEDS] for variant in variants]
    middle = -2 if contender.averages else -2 - round(math.log2(place.workers))
    best: dict[tuple[str, str], tuple[Point, int]] = {}
    for batches in BATCHES:
        for measure in MEASURES:

            def outcomes(point: Point, batches: str = batches, measure: str = measure) -> list[Outcome]:
                return [each.outcome(point, batches, measure) for each in measured[point.variant]]

            best[batches, measure] = tuned(outcomes, len(variants), middle)
    results: dict[tuple[str, str], list[float]] = {key: [] for key in best}
    for index, variant in enumerate(variants):
        chosen = {key: point for key, (point, _) in best.items() if point.variant == index}
        settings = list({_setting(point, measure) for (_, measure), point in chosen.items()})
        for seed in EVALUATION_SEEDS if chosen else ():
            found = Measured(place, variant, seed, settings)
            for (batches, measure), point in chosen.items():
                results[batches, measure].append(found.outcome(point, batches, measure).result)
    return Cell(
        place.name,
        contender.name,
        {
            batches: {
                measure: Found(
                    variants[(point := best[batches, measure][0]).variant].sync,
                    point.momentum,
                    float(f"{rate_of(point.momentum, point.step):.3g}"),
                    best[batches, measure][1],
                    tuple(_rounded(value) for value in results[batches, measure]),
                )
                for measure in MEASURES
            }
            for batches in BATCHES
        },
    )


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Setting(NamedTuple):
    """A setting with which a run is made: how the learning rate decays, the momentum, and the step of the rate."""

    decay: str
    momentum: float
    step: int


DECAYS = ("constant", "with time", "with gradients")
"""How the learning rate decays: not at all, linearly with time, or linearly with the number of gradients."""

_DECAY_OF = dict(zip(MEASURES, (*["constant"] * len(TARGETS), "with time", "with gradients"), strict=True))


def _setting(point: Point, measure: str) -> Setting:
    return Setting(_DECAY_OF[measure], point.momentum, point.step)


class Measured:
    """All measures of a variant at a place with one seed, for some settings and all sizes of the batches."""

    def __init__(self, place: Place, variant: Variant, seed: int, settings: Sequence[Setting]) -> None:
        schedule = record(place, variant, seed)
        self._index = {setting: index for index, setting in enumerate(settings)}
        losses = expected_losses(
            schedule,
            np.array([rate_of(setting.momentum, setting.step) for setting in settings]),
            np.array([setting.momentum for setting in settings]),
            _decays(schedule, place, settings),
        )
        last = int(np.searchsorted(schedule.pushed, equal_gradients(place)))
        times_s = np.append(schedule.times_s, np.inf)
        self._values: dict[tuple[str, str], np.ndarray] = {}
        self._finals: dict[str, np.ndarray] = {}
        self._diverged: dict[str, np.ndarray] = {}
        for batches in BATCHES:
            loss = losses.at(noise_of(batch_of(batches, place.workers)))
            self._diverged[batches] = ~(loss <= 2.0).all(axis=0)
            self._finals[batches] = loss[-1]
            for target, measure in zip(TARGETS, MEASURES, strict=False):
                below = loss <= target
                # the first version from which on the loss stays below the target
                settled = len(loss) - np.argmin(below[::-1], axis=0)
                settled[below.all(axis=0)] = 0
                self._values[batches, measure] = times_s[np.maximum(settled - 1, 0)]
            self._values[batches, MEASURES[-2]] = loss[-1]
            enough = last < len(schedule.updates)
            self._values[batches, MEASURES[-1]] = loss[last + 1] if enough else np.full(len(settings), np.inf)

    def outcome(self, point: Point, batches: str, measure: str) -> Outcome:
        """Return the outcome with one setting."""
        at = self._index.get(_setting(point, measure))
        if at is None:
            return Outcome(math.inf, math.inf, True)
        value, final = self._values[batches, measure][at], self._finals[batches][at]
        return Outcome(float(value), float(final), bool(self._diverged[batches][at]))


def equal_gradients(place: Place) -> float:
    """Return the number of full batches after which losses are compared: nearly all that BSP uses."""
    return _gradients_of_bsp(place.name)


@functools.cache
def _gradients_of_bsp(name: str) -> float:
    counts = [record(PLACES[name], Variant("bsp"), seed).updates[-1].pushed for seed in TUNING_SEEDS]
    return float(math.floor(0.9 * min(counts)))


def _decays(schedule: Schedule, place: Place, settings: Sequence[Setting]) -> np.ndarray:
    """Return the factor of the learning rate for each update and setting."""
    factors = {
        "constant": np.ones(len(schedule.updates)),
        "with time": 1 - schedule.times_s / place.until_s,
        "with gradients": np.maximum(0.0, 1 - schedule.pushed / equal_gradients(place)),
    }
    return np.stack([factors[setting.decay] for setting in settings], axis=1)


def chosen_places(names: Sequence[str]) -> Iterator[Place]:
    """Yield the places with these names, or all places if there are no names."""
    yield from (place for name, place in PLACES.items() if not names or name in names)


def every_contender() -> list[Contender]:
    """Return all contenders."""
    return list(CONTENDERS.values())
