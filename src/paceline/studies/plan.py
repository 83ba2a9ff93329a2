"""Which cells a study has: those in which hyper-parameters are chosen, and those that are evaluated with the choice.

Hyper-parameters are chosen for each model on each cluster, by other seeds than those of the evaluation: the ones that
reach the target soonest, in the median over the seeds, where a run that never reaches it comes last. Ties go to the
better final value. If the target is what the reference reaches, the reference itself is chosen by its final value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import NamedTuple

from .cells import Cell, CellTask, Outcome
from .curves import crossing
from .description import Contender, Point, Study, Target

__all__ = ["Choice", "Choices", "choose", "evaluated_cells", "target_value", "task_of", "tuning_cells"]

Find = Callable[[Cell], Outcome | None]
"""Function that returns the result of a cell; None if it has failed."""


class Choice(NamedTuple):
    """The hyper-parameters that were chosen for a model on a cluster.

    Attributes:
        point: their values.
        edges: sentences about values at the edge of the grid, beyond which there may be better ones.
    """

    point: Point
    edges: tuple[str, ...] = ()


Choices = Mapping[tuple[str, str], Choice]
"""(cluster, model) -> the choice. A model whose runs have all failed is missing."""


def task_of(study: Study, cell: Cell) -> CellTask:
    """Return what is needed to run a cell."""
    contender = study.contender(cell.contender)
    return CellTask(
        cell=cell,
        cluster=study.clusters[cell.cluster],
        sync=contender.sync,
        batch=contender.batch,
        hyperparameters=contender.hyperparameters,
        trained=study.trained,
        values={**study.arguments, **dict(cell.point)},
        budget=study.budget,
        metric=study.target.metric,
        joint_batch=study.joint_batch,
    )


def tuning_cells(study: Study) -> list[Cell]:
    """Return the cells in which hyper-parameters are chosen."""
    return [
        cell
        for cluster in study.clusters
        for contender in _tuned(study)
        for cell in _of(study, cluster, contender)
    ]


def _tuned(study: Study) -> list[Contender]:
    """Return the models whose hyper-parameters are chosen by runs of their own."""
    return [
        contender
        for contender in study.contenders
        if (len(contender.points) > 1 and study.tuning == "each") or contender.name == study.reference
        if len(contender.points) > 1
    ]


def _of(study: Study, cluster: str, contender: Contender) -> list[Cell]:
    return [
        Cell(cluster, contender.name, point, seed)
        for point in contender.points
        for seed in study.tuning_seeds
    ]


def evaluated_cells(study: Study, choices: Choices) -> list[Cell]:
    """Return the cells that are evaluated."""
    return [
        Cell(cluster, contender, choice.point, seed)
        for (cluster, contender), choice in choices.items()
        for seed in study.seeds
    ]


def choose(study: Study, find: Find) -> dict[tuple[str, str], Choice]:
    """Return the choices, given the results of the tuning cells."""
    choices: dict[tuple[str, str], Choice] = {}
    for cluster in study.clusters:
        target = study.target.value
        if study.target.of:
            leader = study.contender(study.target.of)
            found = _choice(study, cluster, leader, find, None)
            own = (
                []
                if found is None
                else [Cell(cluster, leader.name, found.point, s) for s in study.tuning_seeds]
            )
            target = target_value(study.target, filter(None, map(find, own)))
        for contender in study.contenders:
            source = contender if study.tuning == "each" else study.contender(study.reference)
            aim = None if source.name == study.target.of else target
            choice = _choice(study, cluster, source, find, aim)
            if choice is not None:
                choices[cluster, contender.name] = choice
    return choices


def target_value(target: Target, outcomes: Iterable[Outcome]) -> float:
    """Return the value that is to be reached, given the runs of the model whose final value it is."""
    if target.value is not None:
        return target.value
    finals = [outcome.final for outcome in outcomes]
    sign = 1.0 if target.higher_is_better else -1.0
    return fmean(finals) - sign * target.within if finals else math.nan


def _choice(
    study: Study, cluster: str, contender: Contender, find: Find, target: float | None
) -> Choice | None:
    """Return the best hyper-parameters of a model; None if all of its runs have failed.

    Args:
        study: the study.
        cluster: name of the cluster.
        contender: the model.
        find: function that returns the results of cells.
        target: the value to be reached; None to choose by the final value alone.
    """
    if len(contender.points) == 1:
        return Choice(contender.points[0])
    outcomes: dict[Point, list[Outcome]] = {}
    for cell in _of(study, cluster, contender):
        if (outcome := find(cell)) is not None:
            outcomes.setdefault(cell.point, []).append(outcome)
    if not outcomes:
        return None
    best = min(outcomes, key=lambda point: _score(outcomes[point], study.target, target))
    return Choice(best, tuple(_edges(best, contender.points)))


def _score(outcomes: list[Outcome], target: Target, value: float | None) -> tuple[float, float]:
    """Return what is to be small: the median time to the target, and the mean final value, negated if need be."""
    higher = target.higher_is_better
    times_s = [
        math.inf if value is None else crossing(each.points("seconds"), value, higher_is_better=higher)
        for each in outcomes
    ]
    finals = [each.final for each in outcomes]
    final = fmean(finals) if all(map(math.isfinite, finals)) else math.nan
    return median(times_s), math.inf if math.isnan(final) else -final if higher else final


def _edges(best: Point, points: tuple[Point, ...]) -> Iterable[str]:
    """Return a sentence for each value that is the smallest or the largest number of its grid."""
    for index, (key, value) in enumerate(best):
        values = {point[index][1] for point in points}
        if len(values) > 1 and all(isinstance(each, int | float) for each in values):
            for edge, word in ((min, "smallest"), (max, "largest")):
                if value == edge(values):
                    yield f"{key} {value} is the {word} of the grid"
