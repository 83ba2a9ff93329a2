"""What the results of the table say: which runs are as good as bsp's, which have learned nothing, and how soon."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from rich.table import Table
from scipy import stats

from paceline.studies.statistics import CONFIDENCE, crossing

from ..exhibit import plain_table
from .families import FAMILIES
from .plan import CLUSTERS, FACTORS, MODELS, PROBLEMS, problem_of, sign_of
from .table import KINDS, Result, Runs

BOUNDS = {1.0: (0.03, 0.06), 0.5: (0.01, 0.02), 0.25: (0.01, 0.02)}
"""Factor of the rate -> how much lower the accuracy may be, and by which share the loss may be higher."""

NAMES = {1.0: "best", 0.5: "1/2", 0.25: "1/4"}


class Cell(NamedTuple):
    """A model, compared with bsp with the same hyper-parameters."""

    problem: str  # name of the problem
    cluster: str  # name of the cluster
    workers: int  # number of workers
    model: str  # name of the sync model
    hyperparameters: str  # "raw" or "translated"
    factor: float  # the learning rate, as a share of the best one for bsp
    quality: float  # mean final quality over the seeds; infinitely bad if a run has diverged
    reference: float  # that of bsp
    lack: float  # by how much the accuracy is lower, or by which share the loss is higher
    # standard error of `lack`, from the differences between runs with the same seed; infinity if a run has
    # diverged
    error: float
    within: bool  # True if `lack` is within the bounds
    at_chance: int  # number of runs that have learned nothing
    untold: int  # number of these runs whose users were not told
    runs: int  # number of runs
    sooner: float  # by which factor the run reaches bsp's final quality sooner than bsp; 0 if it never does
    shorter: float  # by which factor all epochs take less time than under bsp

    @property
    def bound(self) -> float:
        """The largest allowed `lack` of a cell."""
        return _bound(self.problem, self.factor)


def cells_of(results: Mapping[tuple[object, ...], Result]) -> list[Cell]:
    """Return the cells for which bsp has a result with the same number of seeds, and has not diverged."""
    cells = []
    for result in results.values():
        key = (result.problem, result.cluster, result.workers, "bsp", "raw", result.seeds)
        if result.model != "bsp" and (reference := results.get(key)) is not None:
            pairs = zip(result.runs, reference.runs, strict=True)
            cells += [_cell(result, reference, *pair) for pair in pairs if None not in pair[1].finals]
    return cells


def _cell(result: Result, reference: Result, runs: Runs, bsp: Runs) -> Cell:
    problem, sign = problem_of(result.problem), sign_of(result.problem)
    finals = [-math.inf * sign if value is None else value for value in runs.finals]
    references = [value for value in bsp.finals if value is not None]
    quality, bar = fmean(finals), fmean(references)
    unit = 1.0 if problem.higher_is_better else bar
    lacks = [sign * (usual - value) / unit for usual, value in zip(references, finals, strict=True)]
    lack = sign * (bar - quality) / unit
    spread = stdev(lacks) if len(lacks) > 1 and math.isfinite(quality) else math.inf
    bound = _bound(result.problem, runs.factor)
    lost = [sign * (value - problem.chance) <= 0 for value in finals]
    target = bar - sign * bound * unit
    soon, usual = (part_until(curve, sign, target) for curve in (runs.curve, bsp.curve))
    return Cell(
        result.problem,
        result.cluster,
        result.workers,
        result.model,
        result.hyperparameters,
        runs.factor,
        quality,
        bar,
        lack,
        spread / math.sqrt(len(lacks)),
        lack <= bound,
        sum(lost),
        sum(each and not told for each, told in zip(lost, runs.told, strict=False)),
        len(finals),
        0.0 if math.isinf(soon) else usual * reference.end_s / (soon * result.end_s),
        reference.end_s / result.end_s,
    )


def part_until(curve: Sequence[float | None], sign: float, target: float) -> float:
    """Return after which part of the run a curve first reaches a target, interpolated; infinity if it never does.

    >>> part_until([0.2, 0.6, 1.0, 1.0], 1.0, 0.8)
    0.625
    """
    points = [
        ((index + 1) / len(curve), math.nan if value is None else value) for index, value in enumerate(curve)
    ]
    return crossing(points, target, higher_is_better=sign > 0)


GOALS = {1.0: 0.8, 0.5: 0.9, 0.25: 0.9}
"""Factor of the rate -> the share of translated cells that should be within the bounds."""

SOONER = 2.0
"""By which factor asp and elastic-bsp should reach bsp's quality sooner in the cluster "steady 3x"."""


def findings(cells: Sequence[Cell]) -> list[str]:
    """Return what the cells with translated hyper-parameters say about each goal, in sentences.

    The goals are about the problems with their usual optimizers, not about the other optimizers.
    """
    cells = [cell for cell in cells if cell.problem not in FAMILIES]
    found: list[str] = []
    if not cells:
        return found
    for factors, words in (
        ((0.5, 0.25), "half and a quarter of bsp's best rate"),
        ((1.0,), "bsp's best rate"),
    ):
        accuracy, loss = BOUNDS[factors[0]]
        shares = []
        for kind in ("translated", "raw"):
            own = [cell for cell in cells if cell.hyperparameters == kind and cell.factor in factors]
            if own:
                good = sum(cell.within for cell in own)
                shares.append(f"{100 * good / len(own):.0f} % of {len(own)} {kind} cells ({good})")
        found.append(
            f"At {words}, {' and '.join(shares)} are worse than bsp by at most {accuracy:g} of accuracy "
            f"or {100 * loss:.0f} % of the loss. The goal is {100 * GOALS[factors[0]]:.0f} %."
        )
    for kind in ("translated", "raw"):
        own = [cell for cell in cells if cell.hyperparameters == kind]
        lost = [cell for cell in own if cell.at_chance]
        if own:
            runs = sum(cell.at_chance for cell in lost)
            words = f" ({runs} runs, of which {sum(c.untold for c in lost)} gave no warning)" if lost else ""
            found.append(
                f"In {len(lost)} of {len(own)} {kind} cells, at least one run has learned nothing{words}."
            )
    for model in ("asp", "elastic-bsp"):
        own = [
            c
            for c in cells
            if (c.model, c.cluster, c.hyperparameters) == (model, "steady 3x", "translated") and c.factor < 1
        ]
        if own:
            reached = [cell.sooner for cell in own if cell.sooner]
            soon = sum(factor >= SOONER for factor in reached)
            middle = f" (median {median(reached):.2f})" if reached else ""
            found.append(
                f"With a quarter of the workers 3 times slower, {model} reaches bsp's quality to within the bound at "
                f"least {SOONER:g} times sooner in {soon} of {len(own)} cells at half and a quarter of the best "
                f"rate{middle}. All epochs together take {median(c.shorter for c in own):.2f} times less time."
            )
    better = [c for c in cells if c.hyperparameters == "translated" and -c.lack > c.bound]
    errors = [cell.error / cell.bound for cell in cells if math.isfinite(cell.error)]
    if errors:
        found.append(
            f"{len(better)} translated cells are better than bsp by more than the bound, and count as within it. The "
            f"median standard error of a cell's difference to bsp is {median(errors):.2f} of the bound; this "
            f"error is more than half of the bound in {sum(error > 0.5 for error in errors)} of {len(errors)} cells."
        )
    return found + _certainty([cell for cell in cells if cell.hyperparameters == "translated"])


def _certainty(cells: Sequence[Cell]) -> list[str]:
    """Return which of these cells are not within the bounds, and how many of them have enough seeds to be sure."""
    outside = [cell for cell in cells if not cell.within]
    if not outside:
        return []
    models = Counter(cell.model for cell in outside).most_common()
    unsure = [sum(abs(cell.lack - cell.bound) <= _half(cell) for cell in each) for each in (outside, cells)]
    return [
        f"{len(outside)} translated cells are not within the bounds: those of "
        f"{', '.join(f'{model} ({count})' for model, count in models)}. In {unsure[0]} of these cells, and in "
        f"{unsure[1] - unsure[0]} of the {len(cells) - len(outside)} other translated cells, the seeds are too few "
        f"to decide: the bound lies within the {100 * CONFIDENCE:.0f} % interval of the cell's difference from bsp, "
        "which is computed from pairs of runs with the same seed, one of bsp and one of the model."
    ]


def _half(cell: Cell) -> float:
    """Return half of Student's interval of what a cell lacks."""
    return cell.error * float(stats.t.ppf((1 + CONFIDENCE) / 2, cell.runs - 1)) if cell.runs > 1 else math.inf


def _bound(problem: str, factor: float) -> float:
    accuracy, loss = BOUNDS[factor]
    return accuracy if problem_of(problem).higher_is_better else loss


def tables(cells: Sequence[Cell]) -> list[Table]:
    """Return the tables of the summary."""
    usual, others = ([c for c in cells if (c.problem in FAMILIES) is other] for other in (False, True))
    made: list[Table] = []
    if usual:
        workers = map(str, sorted({cell.workers for cell in usual}))
        made += [
            _shares("sync model", usual, lambda cell: cell.model, MODELS),
            _shares("problem", usual, lambda cell: cell.problem, PROBLEMS),
            _shares("workers", usual, lambda cell: str(cell.workers), workers),
            _shares("cluster", usual, lambda cell: cell.cluster, CLUSTERS),
            _times(usual),
            _worst(usual),
        ]
    if others:
        made.append(_shares("optimizer", others, lambda cell: cell.problem, FAMILIES))
    return made


def _shares(
    heading: str, cells: Sequence[Cell], name_of: Callable[[Cell], str], names: Iterable[str]
) -> Table:
    """Return how many cells are within the bounds, and how many have runs that have learned nothing."""
    kinds = [kind for kind in KINDS if any(cell.hyperparameters == kind for cell in cells)]
    columns = [f"{kind}\n{name}" for kind in kinds for name in (*NAMES.values(), "lost")]
    table = plain_table(f"cells within the bounds of bsp, by {heading}", heading, *columns)
    for name in names:
        row = [name]
        for kind in kinds:
            own = [cell for cell in cells if name_of(cell) == name and cell.hyperparameters == kind]
            row += [_share([c for c in own if c.factor == factor]) for factor in FACTORS]
            row.append(str(sum(cell.at_chance > 0 for cell in own)) if own else "-")
        if any(cell != "-" for cell in row[1:]):
            table.add_row(*row)
    return table


def _share(cells: Sequence[Cell]) -> str:
    return f"{sum(cell.within for cell in cells)}/{len(cells)}" if cells else "-"


def _times(cells: Sequence[Cell]) -> Table:
    """Return by which factor bsp's final quality is reached sooner, with half of bsp's best rate."""
    clusters = list(dict.fromkeys(cell.cluster for cell in cells))
    table = plain_table(
        "how many times sooner bsp's final quality is reached: median (least, number of cells that never reach it)",
        "sync model",
        *(f"{cluster}\n{name}" for cluster in clusters for name in ("all epochs", *NAMES.values())),
    )
    for model in MODELS:
        row = [model]
        for cluster in clusters:
            own = [
                c for c in cells if (c.model, c.cluster, c.hyperparameters) == (model, cluster, "translated")
            ]
            row.append(f"{median(c.shorter for c in own):.2f}" if own else "-")
            row += [_sooner([c.sooner for c in own if c.factor == factor]) for factor in FACTORS]
        if any(cell != "-" for cell in row[1:]):
            table.add_row(*row)
    return table


def _sooner(factors: Sequence[float]) -> str:
    reached = [factor for factor in factors if factor]
    if not reached:
        return "never" if factors else "-"
    never = len(factors) - len(reached)
    return f"{median(reached):.2f} ({min(reached):.2f}, {never})"


WORST = 25
"""Number of translated cells that are listed."""


def _worst(cells: Sequence[Cell]) -> Table:
    """Return the translated cells with the largest `lack`, relative to their bounds."""
    table = plain_table(
        f"the {WORST} translated cells that are worst compared with bsp (lack: how much worse, relative to the bound)",
        *("problem", "cluster", "workers", "sync model", "rate", "bsp", "translated", "at chance", "lack"),
    )
    translated = [cell for cell in cells if cell.hyperparameters == "translated"]
    for cell in sorted(translated, key=_excess, reverse=True)[:WORST]:
        table.add_row(
            cell.problem,
            cell.cluster,
            str(cell.workers),
            cell.model,
            NAMES[cell.factor],
            f"{cell.reference:.4g}",
            f"{cell.quality:.4g}",
            f"{cell.at_chance} of {cell.runs}",
            f"{_excess(cell):.1f}",
        )
    return table


def _excess(cell: Cell) -> float:
    return cell.lack / cell.bound
