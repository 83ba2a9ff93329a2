"""The results of a study from its cells: times to the target, final values, and comparisons with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..lab.pool import Failure
from .cells import UNITS, Cell, Choices, ChosenPoint, Outcome, target_value
from .description import Contender, Study
from .statistics import (
    Difference,
    Estimate,
    Ratio,
    Time,
    difference,
    holm_adjusted,
    mean_interval,
    not_dominated,
    ratio_of_times,
    typical_time,
)


class StudyRow(NamedTuple):
    """The evaluated runs of a model on a cluster.

    Attributes:
        cluster: name of the cluster.
        contender: the model.
        choice: its hyper-parameters.
        target: the value that is to be reached.
        outcomes: seed -> the result; without the runs that have failed.
        failed: number of runs that have failed.
        times: unit (see `UNITS`) -> when each run reached the target, in the order of the seeds.
        time: unit -> the typical time.
        final: the mean final value.
        ratio: its seconds to the target, divided by those of the reference; None for the reference itself.
        ratio_p: p-value of this ratio after Holm's correction.
        lead: its final value minus that of the reference; None for the reference itself.
        lead_p: p-value of this difference after Holm's correction.
        front: True if no other model on this cluster is sooner at the target and has a better final value.
    """

    cluster: str
    contender: Contender
    choice: ChosenPoint
    target: float
    outcomes: dict[int, Outcome]
    failed: int
    times: dict[str, list[Time]]
    time: dict[str, Estimate]
    final: Estimate
    ratio: Ratio | None = None
    ratio_p: float = 1.0
    lead: Difference | None = None
    lead_p: float = 1.0
    front: bool = False

    @property
    def reached(self) -> int:
        """The number of runs that reached the target."""
        return sum(time.reached for time in self.times["seconds"])

    @property
    def runs(self) -> int:
        """The number of runs, including those that have failed."""
        return len(self.outcomes) + self.failed


class StudyResult(NamedTuple):
    """The result of a study.

    Attributes:
        study: the study.
        rows: the evaluated runs, in the order of the clusters and models.
        tuning: the cells in which hyper-parameters were chosen, with their results.
        failures: the cells that have failed.
    """

    study: Study
    rows: tuple[StudyRow, ...]
    tuning: tuple[tuple[Cell, Outcome], ...]
    failures: tuple[Failure, ...]

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failures" if self.failures else ""
        return f"StudyResult({self.study.name!r}, {len(self.rows)} rows{failed})"

    def of_cluster(self, cluster: str) -> list[StudyRow]:
        """Return the rows of a cluster."""
        return [row for row in self.rows if row.cluster == cluster]


def make_result(
    study: Study,
    choices: Choices,
    find: Callable[[Cell], Outcome | None],
    tuning: Sequence[Cell],
    failures: Sequence[Failure],
) -> StudyResult:
    """Return the result of a study, given the results of its cells."""
    rows = [row for cluster in study.clusters for row in _rows(study, cluster, choices, find)]
    rows = _compared(study, rows)
    ended = tuple((cell, outcome) for cell in tuning if (outcome := find(cell)) is not None)
    return StudyResult(study, tuple(rows), ended, tuple(failures))


def _rows(
    study: Study, cluster: str, choices: Choices, find: Callable[[Cell], Outcome | None]
) -> list[StudyRow]:
    outcomes: dict[str, dict[int, Outcome]] = {}
    for contender in study.contenders:
        choice = choices.get((cluster, contender.name))
        cells = (
            [] if choice is None else [Cell(cluster, contender.name, choice.point, s) for s in study.seeds]
        )
        found = {cell.seed: outcome for cell in cells if (outcome := find(cell)) is not None}
        if found:
            outcomes[contender.name] = found
    target = target_value(study.target, outcomes.get(study.target.of, {}).values())
    rows = [
        _row(study, cluster, study.contender(name), choices[cluster, name], target, found)
        for name, found in outcomes.items()
    ]
    front = not_dominated(
        {row.contender.name: (row.time["seconds"].value, row.final.value) for row in rows},
        higher_is_better=study.target.higher_is_better,
    )
    return [row._replace(front=row.contender.name in front and row.reached > 0) for row in rows]


def _row(
    study: Study,
    cluster: str,
    contender: Contender,
    choice: ChosenPoint,
    target: float,
    outcomes: dict[int, Outcome],
) -> StudyRow:
    higher = study.target.higher_is_better
    times = {unit: [_time(each, unit, target, higher) for each in outcomes.values()] for unit in UNITS}
    return StudyRow(
        cluster=cluster,
        contender=contender,
        choice=choice,
        target=target,
        outcomes=outcomes,
        failed=len(study.seeds) - len(outcomes),
        times=times,
        time={unit: typical_time(found) for unit, found in times.items()},
        final=mean_interval([each.final for each in outcomes.values()]),
    )


def _time(outcome: Outcome, unit: str, target: float, higher_is_better: bool) -> Time:
    """Return when a run reached the target, or when it ended without reaching the target."""
    end = float(getattr(outcome, unit))
    reached = outcome.reaches(unit, target, higher_is_better=higher_is_better)
    return Time(min(reached, end), end, math.isfinite(reached))


def _compared(study: Study, rows: Sequence[StudyRow]) -> list[StudyRow]:
    """Compare each row with the reference on its cluster. The p-values are corrected for the number of comparisons."""
    references = {row.cluster: row for row in rows if row.contender.name == study.reference}
    found = [
        _with_comparison(row, references[row.cluster], paired=study.paired)
        if row.cluster in references and row.contender.name != study.reference
        else row
        for row in rows
    ]
    ratios = {index: row.ratio.p for index, row in enumerate(found) if row.ratio is not None}
    leads = {index: row.lead.p for index, row in enumerate(found) if row.lead is not None}
    for index, p in holm_adjusted(ratios).items():
        found[index] = found[index]._replace(ratio_p=p)
    for index, p in holm_adjusted(leads).items():
        found[index] = found[index]._replace(lead_p=p)
    return found


def _with_comparison(row: StudyRow, reference: StudyRow, *, paired: bool) -> StudyRow:
    """Return a row compared with the reference. If runs are paired, only seeds that both rows have are compared."""
    common = [seed for seed in row.outcomes if seed in reference.outcomes]
    if paired and not common:
        return row

    def times(own: StudyRow) -> list[Time]:
        by_seed = dict(zip(own.outcomes, own.times["seconds"], strict=True))
        return [by_seed[seed] for seed in (common if paired else own.outcomes)]

    def finals(own: StudyRow) -> list[float]:
        return [own.outcomes[seed].final for seed in (common if paired else own.outcomes)]

    return row._replace(
        ratio=ratio_of_times(times(row), times(reference), paired=paired),
        lead=difference(finals(row), finals(reference), paired=paired),
    )
