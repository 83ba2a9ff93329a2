"""Why translated runs are not as good as those of bsp, as far as results show it: in sentences, for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product

from ..ensembles.problems import epochs_of
from .families import FAMILIES, NORMALIZED
from .plan import FACTORS, PROBLEMS, WORKERS, problem_of, sign_of
from .summary import Cell, part_until
from .table import Result, Runs

FEWER, MANY = WORKERS[-2:]
SMALL = min(FACTORS)

TOLD = (
    "But at the end, each of these runs says how many of its samples were in dropped gradients, and how many updates "
    "are missing."
)


def reasons(cells: Sequence[Cell], results: Mapping[tuple[object, ...], Result]) -> list[str]:
    """Return why translated cells are not within the bounds, or have learned nothing.

    Args:
        cells: the cells.
        results: the results that they were made of, by their keys.
    """
    own = [cell for cell in cells if cell.hyperparameters == "translated"]
    return [_fewer_steps(), *_quadratics(own, results), *_lost(own, results)]


def joint_steps(problem: str, workers: int) -> tuple[int, float]:
    """Return the number of joint steps in the epochs of a problem under bsp, and under the other models.

    >>> joint_steps("quadratic-8", 16)
    (110, 110.0)
    """
    made = problem_of(problem)
    samples, batch, epochs = epochs_of(made, workers)
    each = samples / (batch * workers)
    return epochs * math.ceil(each), epochs * each


def _fewer_steps() -> str:
    """Return for which problems bsp makes more joint steps than the other models, if it is more than 1 %."""
    places: dict[tuple[int, float], tuple[dict[str, None], dict[int, None]]] = {}
    for name, workers in product((name for name in PROBLEMS if name not in FAMILIES | NORMALIZED), WORKERS):
        usual, fewer = joint_steps(name, workers)
        if usual > 1.01 * fewer:
            names, counts = places.setdefault((usual, fewer), ({}, {}))
            names[f"`{name}`"], counts[workers] = None, None
    where = "; ".join(
        f"{usual} instead of {fewer:.1f} for {_listed(names)} with {_listed(counts)} workers"
        for (usual, fewer), (names, counts) in places.items()
    )
    return (
        "If the samples of an epoch are not a multiple of the joint batch, the last joint batch is smaller. Under "
        "`bsp`, as in one process, its update is a whole step. Under the other models, an update moves the weights "
        f"by its part of a joint batch. So there are more joint steps under `bsp`: {where}."
    )


def _quadratics(cells: Sequence[Cell], results: Mapping[tuple[object, ...], Result]) -> list[str]:
    """Return what the missing steps cost the quadratics with many workers at a small rate."""
    outside = [cell for cell in cells if cell.workers == MANY and not cell.within]
    own = [c for c in outside if c.problem.startswith("quadratic") and c.factor == SMALL]
    if not own:
        return []
    costs = []
    for cell in {cell.problem: cell for cell in own}.values():
        usual, fewer = joint_steps(cell.problem, MANY)
        before, last = (_curve(_bsp(cell, results, workers))[-1] for workers in (FEWER, MANY))
        of_each_step = math.log(before / last) / (usual - joint_steps(cell.problem, FEWER)[0])
        costs.append(math.expm1(of_each_step * (usual - fewer)))
    return [
        f"Of the {len(outside)} translated cells with {MANY} workers that are not within the bounds, {len(own)} are "
        "those of the quadratics at a quarter of the best rate, where the loss is still falling at the end. Joint "
        "steps are missing: 3 samples per worker are a joint batch of 120 instead of 128, and 1,408 is no multiple of "
        f"120. This makes the loss {_range([100 * cost for cost in costs], '.1f')} % higher, depending on the "
        f"curvatures: `bsp` with {FEWER} workers, which make fewer steps, shows how fast the loss falls. The "
        f"loss is {_range([100 * c.lack for c in own if c.model != 'rennala'], '.1f')} % above that of `bsp`. Under "
        "`rennala`, which also drops gradients, the loss is "
        f"{_range([100 * c.lack for c in own if c.model == 'rennala'], '.1f')} % above. With 1,440 "
        "samples, which are twelve joint batches of 120, the loss in the cluster steady 3x is between 2.2 % below "
        "and 1.1 % above that of `bsp` under `asp`, and 1.1 to 2.0 % above it under `ssp`."
    ]


def _lost(cells: Sequence[Cell], results: Mapping[tuple[object, ...], Result]) -> list[str]:
    """Return how far bsp itself comes in cells whose runs end at chance, although they get better until the end."""
    found = []
    slow = [cell for cell in cells if cell.at_chance and _gets_better(cell, results)]
    for name, model, factor in dict.fromkeys((cell.problem, cell.model, cell.factor) for cell in slow):
        own = [cell for cell in slow if (cell.problem, cell.model, cell.factor) == (name, model, factor)]
        problem, sign = problem_of(name), sign_of(name)
        learned, parts = [], []
        for cell in own:
            curve = _curve(_bsp(cell, results, cell.workers))
            learned.append(part_until(curve, sign, problem.chance))
            parts.append(part_until(curve, sign, cell.quality))
        found.append(
            f"The runs of `{model}` on `{name}` at {factor:g} of the best rate count as runs that have learned "
            f"nothing, because their results do not reach {problem.chance:g}, but end at "
            f"{_range([cell.quality for cell in own], '.2f')}. But `bsp` itself needs "
            f"{_range([100 * part for part in learned], '.0f')} % of its run to reach {problem.chance:g}, and ends at "
            f"{_range([cell.reference for cell in own], '.2f')}. The runs of `{model}` end where `bsp` is after "
            f"{_range([100 * part for part in parts], '.0f')} % of its run. They learn until the end, only more "
            "slowly, so there is nothing in their losses that a guard could notice. "
            + ("" if any(cell.untold for cell in own) else TOLD)
        )
    return found


def _gets_better(cell: Cell, results: Mapping[tuple[object, ...], Result]) -> bool:
    """Return True if the mean quality of a cell is better at each tenth of its runs than at the one before."""
    curve = _runs(cell, results, cell.workers, cell.model, cell.hyperparameters).curve
    tenths = [-math.inf if value is None else sign_of(cell.problem) * value for value in curve[3::4]]
    return all(before < after for before, after in pairwise(tenths))


def _bsp(cell: Cell, results: Mapping[tuple[object, ...], Result], workers: int) -> Runs:
    """Return the runs of bsp at the rate of a cell with this number of workers."""
    return _runs(cell, results, workers, "bsp", "raw")


def _runs(
    cell: Cell, results: Mapping[tuple[object, ...], Result], workers: int, model: str, kind: str
) -> Runs:
    result = results[cell.problem, cell.cluster, workers, model, kind, cell.runs]
    return next(runs for runs in result.runs if runs.factor == cell.factor)


def _curve(runs: Runs) -> list[float]:
    return [value for value in runs.curve if value is not None]


def _listed(names: Iterable[object]) -> str:
    """Return names as text: "a, b and c"."""
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def _range(values: Sequence[float], form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"
