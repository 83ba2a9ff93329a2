"""The runs of a study, called its *cells*: the key of a cell, how a cell is run, and the file with its result.

A cell is a model on a cluster, with values of the hyper-parameters and a seed. The result of a cell is written when
the run has ended, and is never changed afterwards. The result contains no times of the computing machine, so it is the
same on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from ..core.lease import BatchSizing
from ..errors import ConfigurationError
from ..files import Unfinished
from ..sim import Cluster, SimResult, simulate
from ..trace.activity_cells import time_shares
from .description import Budget, Contender, Point, Study, Target
from .statistics import crossing
from .trained import TrainedProblem, Value

UNITS = ("seconds", "updates", "samples")
"""Units in which the length of a run is counted: virtual seconds, updates of shard 0, and samples of all workers."""


class Cell(NamedTuple):
    """The key of a run.

    Attributes:
        cluster: name of the cluster.
        contender: name of the model.
        point: values of the hyper-parameters of the grid.
        seed: the seed.
    """

    cluster: str
    contender: str
    point: Point
    seed: int

    def __str__(self) -> str:
        values = "".join(f", {key} {value}" for key, value in self.point)
        return f"{self.contender} on {self.cluster}{values}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """Name of the file with the result. The name is readable, and different for each cell."""
        values = "".join(f" {key}={value}" for key, value in self.point)
        words = re.sub(r"[^\w.=+-]+", "-", f"{self.cluster} {self.contender}{values} {self.seed}")
        return f"{words[:120]}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}.json"


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A value of the metric, and when it was logged.

    Attributes:
        seconds: virtual time in seconds.
        updates: number of updates that had been applied at this time.
        samples: number of samples that all workers had used at this time; 0 if it is unknown.
        value: the logged value, which may be NaN or infinite.
    """

    seconds: float
    updates: int
    samples: int
    value: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell.

    Attributes:
        curve: the values of the metric, in the order of time.
        metrics: the names of all metrics that were logged.
        seconds: virtual time of the run, in seconds.
        updates: number of updates.
        samples: number of samples in all pushes; 0 if it is unknown.
        gradients: number of gradients that were pushed.
        staleness: staleness in updates -> number of pushes with this staleness, counted separately at each shard.
        time: activity of the workers -> its share of their time, from 0 to 1.
        worker_samples: worker -> number of samples in its pushes that were not dropped.
        bytes_sent: number of bytes sent by all processes.
        restarts: number of computations that were restarted.
        findings: sentences about what made the result worse than it could be.
    """

    curve: tuple[Measured, ...]
    metrics: tuple[str, ...]
    seconds: float
    updates: int
    samples: int
    gradients: int
    staleness: dict[int, int]
    time: dict[str, float]
    worker_samples: dict[int, int]
    bytes_sent: int
    restarts: int
    findings: tuple[str, ...]

    @property
    def final(self) -> float:
        """The last value of the metric; NaN if there is no value."""
        return self.curve[-1].value if self.curve else math.nan

    def points(self, unit: str) -> list[tuple[float, float]]:
        """Return the curve over one of `UNITS`."""
        return [(getattr(each, unit), each.value) for each in self.curve]

    def reaches(self, unit: str, target: float, *, higher_is_better: bool) -> float:
        """Return where the curve first reaches a target, counted in one of `UNITS`, or infinity."""
        return crossing(self.points(unit), target, higher_is_better=higher_is_better)

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of the pushes, in updates; 0 if there are none."""
        count = sum(self.staleness.values())
        return (
            sum(staleness * pushes for staleness, pushes in self.staleness.items()) / count if count else 0.0
        )


class CellTask(NamedTuple):
    """A cell, and everything that a process needs to run it.

    Attributes:
        cell: the key of the cell.
        cluster: the cluster.
        sync: the sync model.
        batch: "equal" or "balanced".
        hyperparameters: "translated" or "raw".
        trained: what is trained.
        values: the values of all hyper-parameters.
        budget: the limits of the run.
        metric: the metric that is kept.
        joint_batch: True if the batch sizes of loaders are those of joint batches.
        wire: format in which gradients and weights travel.
    """

    cell: Cell
    cluster: Cluster
    sync: str
    batch: BatchSizing
    hyperparameters: str
    trained: TrainedProblem
    values: Mapping[str, Value]
    budget: Budget
    metric: str
    joint_batch: bool = False
    wire: str = "float32"


def prepare() -> None:
    """Prepare a process for cells: it uses one thread, and logs nothing, because the results contain the findings."""
    import torch

    torch.set_num_threads(1)
    logging.disable()


def run_cell(task: CellTask) -> Outcome:
    """Run a cell in this process.

    Raises:
        RunFailedError: the training function, or the sync model, has failed.
    """
    function, args = task.trained.run(task.values, task.cell.seed)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = simulate(
            task.cluster,
            task.sync,
            seed=task.cell.seed,
            until_s=task.budget.seconds or math.inf,
            until_updates=task.budget.updates,
            until_samples=task.budget.samples,
            train_fn=function,
            args=args,
            hyperparameters=task.hyperparameters,
            batch=task.batch,
            joint_batch=task.joint_batch,
            wire=task.wire,
            on_nan="skip",
        )
    return _outcome(result, task.metric)


def _outcome(result: SimResult, metric: str) -> Outcome:
    measures = result.measures
    points = result.history[metric].points if metric in result.history else ()
    curve = [Measured(each.time_s, each.updates, each.samples, each.value) for each in points]
    shares = {
        name.removesuffix("_share"): round(share, 6) for name, share in time_shares(result.time_use).items()
    }
    present_s = sum(use.present_s for use in result.time_use.values())
    shares["waiting"] = round(sum(use.waiting_s for use in result.time_use.values()) / (present_s or 1.0), 6)
    used = measures.samples + measures.dropped_samples
    return Outcome(
        curve=tuple(sorted(curve, key=lambda each: (each.seconds, each.updates))),
        metrics=tuple(result.history),
        seconds=measures.duration_s,
        updates=measures.updates,
        samples=max([used, *(each.samples for each in curve)]),
        gradients=sum(measures.iterations.values()),
        staleness=result.staleness,
        time=shares,
        worker_samples=measures.worker_samples,
        bytes_sent=result.bytes_sent,
        restarts=result.restarts,
        findings=(*result.findings, *result.faults),
    )


def cut_off(outcome: Outcome, budget: Budget) -> bool:
    """Return True if a run has reached a limit of its budget, so it may have ended before it logged the metric."""
    limits = ((getattr(budget, unit), getattr(outcome, unit)) for unit in UNITS)
    return any(limit is not None and reached >= limit for limit, reached in limits)


IDENTITY = "study.json"
CELLS = "cells"

TEXTS = {
    "train": "the name or the text of the training function, or the command or the text of the script,",
    "imports": "the name or the text of a module with sync models",
}
"""Key of the fingerprints of source texts in the identity of a study -> the name of these texts in messages."""


class Folder:
    """The folder of a study: its identity, the results of its cells, and the tables and figures.

    Args:
        path: the folder, which is made if it does not exist.
        identity: the values that another study must have in common with this study to reuse the cells of this study.

    Raises:
        ConfigurationError: the folder cannot be written, or its content does not belong to this study.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._cells = path / CELLS
        text = msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n"
        try:
            if path.exists() and not all(each.match(".*.unfinished") for each in path.iterdir()):
                _require_same(path, msgspec.json.decode(text))
            path.mkdir(parents=True, exist_ok=True)
            for left in path.rglob(".*.unfinished"):
                left.unlink()
            # The identity comes first: a folder without it is refused, even if the study was killed at this point.
            with Unfinished(path / IDENTITY) as place:
                place.write_bytes(text)
            self._cells.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the folder {path} cannot be written: {error.strerror}. Choose another folder with --out."
            ) from error

    def read(self, cell: Cell) -> Outcome | None:
        """Return the result of a cell; None if the cell has not ended yet."""
        try:
            return _decode(self._cells.joinpath(cell.file_name).read_bytes())
        except FileNotFoundError:
            return None

    def write(self, cell: Cell, outcome: Outcome) -> None:
        """Write the result of a cell atomically."""
        with Unfinished(self._cells / cell.file_name) as place:
            place.write_bytes(_encode(outcome))

    def remove_others(self, cells: Iterable[Cell]) -> None:
        """Remove the results of cells that do not belong to the study any more."""
        known = {cell.file_name for cell in cells}
        for file in self._cells.iterdir():
            if file.name not in known:
                file.unlink()

    def discard(self) -> None:
        """Remove the folder, which contains the identity of the study, and perhaps results without the metric."""
        shutil.rmtree(self._cells)
        (self.path / IDENTITY).unlink()
        with contextlib.suppress(OSError):  # the folder may contain other files of the user
            self.path.rmdir()


def _require_same(path: Path, identity: dict[str, Any]) -> None:
    """Raise `ConfigurationError` unless a folder belongs to this study."""
    if not (path / IDENTITY).exists():
        raise ConfigurationError(
            f"the folder {path} is not empty and contains no study; choose another folder with --out."
        )
    try:
        before = msgspec.json.decode((path / IDENTITY).read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{path / IDENTITY} is damaged: {error}. Choose another folder with --out."
        ) from error
    for key in {**identity, **before}:
        if before.get(key) != identity.get(key):
            what = TEXTS.get(key, repr(key))
            raise ConfigurationError(
                f"the folder {path} belongs to another study: {what} differs. Choose another folder with --out, or "
                "remove this one."
            )


def _encode(outcome: Outcome) -> bytes:
    """Encode a result. JSON has no infinite numbers and no NaN, so these values are encoded as text."""
    values = msgspec.to_builtins(outcome, str_keys=True)
    values["curve"] = [
        [*place, value if math.isfinite(value) else str(value)] for *place, value in values["curve"]
    ]
    return msgspec.json.encode(values) + b"\n"


def _decode(content: bytes) -> Outcome:
    values = msgspec.json.decode(content)
    values["curve"] = [[*place, float(value)] for *place, value in values["curve"]]
    return msgspec.convert(values, Outcome, strict=False)


# -- The cells of a study: those in which hyper-parameters are chosen, and those evaluated with the choice ---
#
# Hyper-parameters are chosen for each model on each cluster, with seeds that the evaluation does not use. The
# chosen values have the smallest median time to the target over these seeds; the time of a run that fails or never
# reaches the target counts as infinite. If the times are equal, the better mean final value decides; a run that
# fails has the worst final value. If the target is the final value of a model, the hyper-parameters of this model are
# chosen by the final value alone. A model with only one combination of values has runs with these seeds only if its
# final value sets the target of the other models.

Find = Callable[[Cell], Outcome | None]
"""Function that returns the result of a cell; None if the cell has failed."""


class ChosenPoint(NamedTuple):
    """The hyper-parameters that were chosen for a model on a cluster.

    Attributes:
        point: the chosen values.
        edges: sentences about chosen values at the edge of the grid. Better values may lie outside the grid.
    """

    point: Point
    edges: tuple[str, ...] = ()


Choices = Mapping[tuple[str, str], ChosenPoint]
"""(cluster, model) -> the choice. A model whose runs have all failed is missing."""


def task_of(study: Study, cell: Cell) -> CellTask:
    """Return everything that is needed to run a cell."""
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
        wire=contender.wire,
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
    """Return the models that have tuning runs, in which their values are chosen or the target is set."""
    chosen = {
        contender.name
        for contender in study.contenders
        if len(contender.points) > 1 and (study.tuning == "each" or contender.name == study.reference)
    }
    named = chosen | {study.target.of} if chosen else chosen
    return [contender for contender in study.contenders if contender.name in named]


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


def choose(study: Study, find: Find) -> dict[tuple[str, str], ChosenPoint]:
    """Return the choices, given the results of the tuning cells."""
    choices: dict[tuple[str, str], ChosenPoint] = {}
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
    """Return the value to be reached; NaN, which no run reaches, if a final value is not finite or there is none.

    `outcomes` are the runs of the model whose final value sets the target.
    """
    if target.value is not None:
        return target.value
    finals = [outcome.final for outcome in outcomes]
    if not finals or not all(map(math.isfinite, finals)):
        return math.nan
    sign = 1.0 if target.higher_is_better else -1.0
    return fmean(finals) - sign * target.within


def _choice(
    study: Study, cluster: str, contender: Contender, find: Find, target: float | None
) -> ChosenPoint | None:
    """Return the best hyper-parameters of a model; None if all of its runs have failed.

    Args:
        study: the study.
        cluster: name of the cluster.
        contender: the model.
        find: function that returns the results of cells.
        target: the value to be reached; None to choose by the final value alone.
    """
    if len(contender.points) == 1:
        return ChosenPoint(contender.points[0])
    outcomes: dict[Point, list[Outcome | None]] = {}
    for cell in _of(study, cluster, contender):
        outcomes.setdefault(cell.point, []).append(find(cell))
    possible = [point for point, found in outcomes.items() if any(found)]
    if not possible:
        return None
    best = min(possible, key=lambda point: _score(outcomes[point], study.target, target))
    return ChosenPoint(best, tuple(_edges(best, contender.points)))


def _score(outcomes: list[Outcome | None], target: Target, value: float | None) -> tuple[float, float]:
    """Return (median time to the target, mean final value, negated if higher is better). The smallest is the best.

    `outcomes` contains None for each run that has failed.
    """
    higher = target.higher_is_better
    times_s = [
        math.inf if each is None or value is None else each.reaches("seconds", value, higher_is_better=higher)
        for each in outcomes
    ]
    finals = [math.nan if each is None else each.final for each in outcomes]
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
