"""Studies on problems with real data, in which many settings are trained together along each schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch.func import vmap

from paceline.studies.statistics import crossing

from ..grid_search import Point
from . import batched
from .batched import Problem
from .factors import Ratings
from .images import DigitImages
from .language import ByteTransformer
from .places import CONTENDERS, PLACES, Contender, Place, Variant
from .protocol import EVALUATION_SEEDS, TUNING_SEEDS, Outcome, Setting, rate_of, setting_of
from .schedules import record
from .study import Study, decay_factors, equal_gradients

SIX = ("bsp", "asp", "asp n/tau", "elastic-bsp", "spec-sync", "rennala")
"""The contenders, fixed before any result was known. Each has one variant here."""

TWO = ("steady 4x, 4 workers", "jitter, 4 workers")
"""The places."""

EVALUATIONS = 60
"""Number of times that the validation loss is computed in a run."""

BLOCK = 4
"""Number of learning rates that are added together."""


class MeasuredTraining:
    """The measures of a variant at a place with one seed. Settings are trained when they are first needed."""

    def __init__(
        self, problem: Problem, place: Place, variant: Variant, seed: int, settings: Sequence[Setting]
    ) -> None:
        self._problem, self._place, self._seed = problem, place, seed
        self._schedule = record(place, variant, seed)
        self._curves: dict[Setting, list[tuple[float, float, float]]] = {}  # (time, pushed, loss)
        if settings:
            self._train(settings)

    def outcome(self, point: Point, batches: str, measure: str) -> Outcome:
        """Return the outcome with one setting."""
        setting = setting_of(point, measure)
        if setting not in self._curves:
            steps = range(setting.step, setting.step + BLOCK)
            self._train([new for s in steps if (new := setting._replace(step=s)) not in self._curves])
        curve = self._curves[setting]
        first, final = curve[0][2], curve[-1][2]
        diverged = not all(loss <= 2 * first for _, _, loss in curve)
        if measure == "loss at equal time":
            value = final
        elif measure == "loss at equal gradients":
            most = equal_gradients(self._place)
            value = next((loss for _, pushed, loss in curve if pushed >= most), math.inf)
        else:
            target = float(measure.removeprefix("time to ")) * first
            value = crossing([(time_s, loss) for time_s, _, loss in curve], target)
        return Outcome(value, final if math.isfinite(final) else math.inf, diverged)

    def _train(self, settings: Sequence[Setting]) -> None:
        schedule = self._schedule
        factors = decay_factors(schedule, self._place)
        decay = torch.tensor([factors[setting.decay] for setting in settings])
        rates = [rate_of(setting.momentum, setting.step) for setting in settings]
        momenta = [setting.momentum for setting in settings]
        every = max(1, len(schedule.updates) // EVALUATIONS)
        validation = vmap(self._problem.validation)
        for setting in settings:
            self._curves[setting] = []
        steps = batched.train(self._problem, schedule, rates, momenta, self._seed, lambda k: decay[:, k])
        for version, weights in enumerate(steps):
            if version % every and version < len(schedule.updates):
                continue
            update = schedule.updates[max(0, version - 1)]
            time_s, pushed = (update.time_s, update.pushed) if version else (0.0, 0.0)
            with torch.no_grad():
                losses = validation(weights).tolist()
            for setting, loss in zip(settings, losses, strict=True):
                self._curves[setting].append((time_s, pushed, loss))


def _study(
    name: str,
    make: Callable[[], Problem],
    gradients: int,
    seconds_per_gradient: float,
    targets: tuple[float, ...],
    middle: int,
    budget: int = 18,
    seeds: int = len(EVALUATION_SEEDS),
) -> Study:
    """Return the study of a problem.

    Args:
        name: name of the study.
        make: function that makes the problem. It is called when the first run begins.
        gradients: number of gradients of a run in which no worker waits.
        seconds_per_gradient: time for one gradient with one setting, on one core.
        targets: the targets, as shares of the initial validation loss.
        middle: the step at which the tuning begins, under models that average.
        budget: number of settings with which the tuning of each contender begins.
        seeds: number of seeds of the evaluation.
    """
    problems: list[Problem] = []

    def measure(place: Place, variant: Variant, seed: int, settings: Sequence[Setting]) -> MeasuredTraining:
        if not problems:
            problems.append(make())
        return MeasuredTraining(problems[0], place, variant, seed, settings)

    def estimate_s(place: Place, contender: Contender) -> float:
        settings = 1.5 * budget * len(TUNING_SEEDS) + 3 * seeds
        return gradients * seconds_per_gradient * settings * (0.5 if contender.name == "bsp" else 1.0)

    def first_variant(contender: Contender) -> Callable[[int], tuple[Variant, ...]]:
        return lambda n: contender.variants(n)[-1:] if contender.averages else contender.variants(n)[:1]

    return Study(
        name=name,
        places=tuple(
            msgspec.structs.replace(PLACES[place], until_s=gradients / PLACES[place].workers) for place in TWO
        ),
        contenders=tuple(Contender(n, first_variant(CONTENDERS[n]), CONTENDERS[n].averages) for n in SIX),
        batches=("fixed",),
        targets=targets,
        measure=measure,
        estimate_s=estimate_s,
        budget=budget,
        seeds=EVALUATION_SEEDS[:seeds],
        tune_by=f"time to {targets[1]:g}",
        middle=lambda place, contender: middle - (0 if contender.averages else 2),
    )


STUDIES = {
    study.name: study
    for study in (
        _study("text-transformer", ByteTransformer, 1800, 0.0055, (0.5, 0.45, 0.42), -4, budget=9, seeds=8),
        _study("digits", DigitImages, 2000, 0.001, (0.1, 0.05, 0.03), -1),
        _study("ratings", Ratings, 6000, 0.0002, (0.7, 0.5, 0.3), -5),
    )
}
"""The studies by name."""
