"""The runs of a study, which are its *cells*: what identifies a cell, how it is run, and the file of its result.

A cell is a model on a cluster, with values of the hyper-parameters and a seed. Its result is written when it has
ended, and is then never changed. It contains no times of this machine, so it is the same wherever it was computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.protocol.lease import BatchSizing
from ..errors import ConfigurationError
from ..files import Unfinished
from ..sim import Cluster, SimResult, simulate
from ..trace.time_use import time_shares
from .description import Budget, Point
from .trained import Trained, Value

__all__ = ["UNITS", "Cell", "CellTask", "Folder", "Measured", "Outcome", "prepare", "run_cell"]

UNITS = ("seconds", "updates", "samples")
"""In what the length of a run is counted: virtual seconds, updates of shard 0, and samples of all workers."""


class Cell(NamedTuple):
    """What identifies a run.

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
        """Name of the file with the result. It can be read, and no other cell has the same."""
        values = "".join(f" {key}={value}" for key, value in self.point)
        words = re.sub(r"[^\w.=+-]+", "-", f"{self.cluster} {self.contender}{values} {self.seed}")
        return f"{words[:120]}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}.json"


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A value of the metric, and when it was logged.

    Attributes:
        seconds: virtual time in seconds.
        updates: number of updates by then.
        samples: number of samples that all workers had used by then; 0 if it is unknown.
        value: the value; NaN or infinite if the metric was.
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
        staleness: staleness in updates -> number of pushes with it, counted per shard.
        time: what the workers have spent their time on -> the share, from 0 to 1.
        worker_samples: worker -> number of samples in its pushes that were not dropped.
        bytes_sent: number of bytes sent by all processes.
        restarts: number of computations that were restarted.
        findings: what made the result worse than it could be, in sentences.
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
        """The last value of the metric; NaN if there is none."""
        return self.curve[-1].value if self.curve else math.nan

    def points(self, unit: str) -> list[tuple[float, float]]:
        """Return the curve over one of `UNITS`."""
        return [(getattr(each, unit), each.value) for each in self.curve]

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of the pushes, in updates; 0 if there are none."""
        count = sum(self.staleness.values())
        return (
            sum(staleness * pushes for staleness, pushes in self.staleness.items()) / count if count else 0.0
        )


class CellTask(NamedTuple):
    """A cell, and all that is needed to run it, also in another process.

    Attributes:
        cell: what identifies it.
        cluster: the cluster.
        sync: the sync model.
        batch: "equal" or "balanced".
        hyperparameters: "translated" or "raw".
        trained: what is trained.
        values: all values of its hyper-parameters.
        budget: where the run ends.
        metric: the metric that is kept.
        joint_batch: True if the batch sizes of loaders are those of joint batches.
    """

    cell: Cell
    cluster: Cluster
    sync: str
    batch: BatchSizing
    hyperparameters: str
    trained: Trained
    values: Mapping[str, Value]
    budget: Budget
    metric: str
    joint_batch: bool = False


def prepare() -> None:
    """Prepare a process for cells: it computes with one thread, and logs nothing, because findings are kept."""
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


IDENTITY = "study.json"
CELLS = "cells"

TEXTS = {
    "train": "the text of the training function or script",
    "imports": "a module with sync models, or its text,",
}
"""Part of the identity of a study that contains fingerprints of source texts -> what it is called."""


class Folder:
    """The folder of a study: what it consists of, the results of its cells, and what was made of them.

    Args:
        path: the folder. It is made if it does not exist.
        identity: what another study must have in common with this one to go on with its cells.

    Raises:
        ConfigurationError: the folder cannot be written, or belongs to something else.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._cells = path / CELLS
        text = msgspec.json.format(msgspec.json.encode(identity), indent=2) + b"\n"
        try:
            if path.is_dir() and any(path.iterdir()):
                _require_same(path, msgspec.json.decode(text))
            self._cells.mkdir(parents=True, exist_ok=True)
            for left in path.rglob(".*.unfinished"):
                left.unlink()
            with Unfinished(path / IDENTITY) as place:
                place.write_bytes(text)
        except OSError as error:
            raise ConfigurationError(
                f"the folder {path} cannot be written: {error.strerror}. Choose another one with --out."
            ) from error

    def read(self, cell: Cell) -> Outcome | None:
        """Return the result of a cell; None if it has not ended yet."""
        try:
            return _decode(self._cells.joinpath(cell.file_name).read_bytes())
        except FileNotFoundError:
            return None

    def write(self, cell: Cell, outcome: Outcome) -> None:
        """Write the result of a cell, wholly or not at all."""
        with Unfinished(self._cells / cell.file_name) as place:
            place.write_bytes(_encode(outcome))

    def remove_others(self, cells: Iterable[Cell]) -> None:
        """Remove the results of cells that do not belong to the study any more."""
        known = {cell.file_name for cell in cells}
        for file in self._cells.iterdir():
            if file.name not in known:
                file.unlink()

    def discard(self) -> None:
        """Remove the folder, in which nothing has been written but what the study consists of."""
        shutil.rmtree(self._cells)
        (self.path / IDENTITY).unlink()
        with contextlib.suppress(OSError):  # the folder may have been there before
            self.path.rmdir()


def _require_same(path: Path, identity: dict[str, Any]) -> None:
    """Raise `ConfigurationError` unless a folder belongs to this study."""
    if not (path / IDENTITY).exists():
        raise ConfigurationError(
            f"the folder {path} is not empty and contains no study; choose another with --out."
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
    """Encode a result. JSON has no infinite numbers and no NaN, so these are text."""
    values = msgspec.to_builtins(outcome, str_keys=True)
    values["curve"] = [
        [*place, value if math.isfinite(value) else str(value)] for *place, value in values["curve"]
    ]
    return msgspec.json.encode(values) + b"\n"


def _decode(content: bytes) -> Outcome:
    values = msgspec.json.decode(content)
    values["curve"] = [[*place, float(value)] for *place, value in values["curve"]]
    return msgspec.convert(values, Outcome, strict=False)
