"""The study on noisy quadratics: all learning rates, momenta and sizes of the batches follow from one recursion."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..grid_search import Point
from .places import CONTENDERS, PLACES, Contender, Place, Variant
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
)
from .quadratics import CURVATURES, expected_losses, noise_of
from .schedules import record
from .study import Study, decay_factors, equal_gradients

BATCHES = ("0.1 each", "1 each", "10 each", "1 in all", "10 in all")
"""The sizes of the batches, in units of the critical batch: of each worker's batch, or of all workers' together."""

TARGETS = (0.3, 0.1, 0.03)

SECONDS_PER_GRADIENT = 5e-5
"""Time for one gradient in the simulation and in the recursion, on one core, however few settings there are."""

SECONDS_PER_NUMBER = 2e-9
"""Time for one number of the recursion's state."""


def batch_of(batches: str, workers: int) -> float:
    """Return the size of one worker's batch, in units of the critical batch.

    >>> batch_of("1 each", 4), batch_of("1 in all", 4)
    (1.0, 0.25)
    """
    size, _, unit = batches.partition(" ")
    return float(size) if unit == "each" else float(size) / workers


class MeasuredLosses:
    """All measures of a variant at a place with one seed, for some settings and all sizes of the batches."""

    def __init__(self, place: Place, variant: Variant, seed: int, settings: Sequence[Setting]) -> None:
        schedule = record(place, variant, seed)
        self._index = {setting: index for index, setting in enumerate(settings)}
        factors = decay_factors(schedule, place)
        losses = expected_losses(
            schedule,
            np.array([rate_of(setting.momentum, setting.step) for setting in settings]),
            np.array([setting.momentum for setting in settings]),
            np.stack([factors[setting.decay] for setting in settings], axis=1),
        )
        last = int(np.searchsorted(schedule.pushed, equal_gradients(place)))
        times_s = np.append(schedule.times_s, np.inf)
        self._values: dict[tuple[str, str], np.ndarray] = {}
        self._finals: dict[str, np.ndarray] = {}
        self._diverged: dict[str, np.ndarray] = {}
        for batches in BATCHES:
            loss = losses.at(noise_of(batch_of(batches, place.workers)))
            self._diverged[batches] = np.logical_not((loss <= 2.0).all(axis=0))
            self._finals[batches] = loss[-1]
            for target in TARGETS:
                below = loss <= target
                first = np.where(below.any(axis=0), np.argmax(below, axis=0), len(loss))
                # version k is the result of update k - 1
                self._values[batches, f"time to {target:g}"] = times_s[first - 1]
            self._values[batches, "loss at equal time"] = loss[-1]
            enough = last < len(schedule.updates)
            self._values[batches, "loss at equal gradients"] = (
                loss[last + 1] if enough else np.full(len(settings), np.inf)
            )

    def outcome(self, point: Point, batches: str, measure: str) -> Outcome:
        """Return the outcome with one setting. A rate beyond all steps counts as divergence."""
        at = self._index.get(setting_of(point, measure))
        if at is None:
            return Outcome(math.inf, math.inf, True)
        value, final = self._values[batches, measure][at], self._finals[batches][at]
        return Outcome(float(value), float(final), bool(self._diverged[batches][at]))


def _middle(place: Place, contender: Contender) -> int:
    return -2 if contender.averages else -2 - round(math.log2(place.workers))


def _estimate_s(place: Place, contender: Contender) -> float:
    settings = len(DECAYS) * len(MOMENTA) * len(STEPS) * len(CURVATURES)
    gradients = place.workers * place.until_s
    variants = len(contender.variants(place.workers))
    share = 0.2 if contender.averages else 0.8  # of the gradients that are updates of their own
    tuning_s = gradients * (SECONDS_PER_GRADIENT + SECONDS_PER_NUMBER * settings * (place.workers + 8))
    evaluation_s = gradients * 2 * SECONDS_PER_GRADIENT
    return share * tuning_s * variants * len(TUNING_SEEDS) + evaluation_s * min(variants, 2) * len(
        EVALUATION_SEEDS
    )


QUADRATICS = Study(
    name="quadratics",
    places=tuple(PLACES.values()),
    contenders=tuple(CONTENDERS.values()),
    batches=BATCHES,
    targets=TARGETS,
    measure=MeasuredLosses,
    estimate_s=_estimate_s,
    budget=48,
    middle=_middle,
    all_settings=True,
)
