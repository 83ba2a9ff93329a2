"""The sync models that a job runs, and when it changes from one to the next: `--sync bsp@0,elastic-bsp@epoch:5`.

Each step consists of a model (or one model per shard) and the time when it begins: at the start of the job, when the
first worker reaches an iteration, or when the first worker begins an epoch (one pass over the part of the data that
`distribute` gave the worker). All shards change the model at the same boundary; see `paceline.core.shard_sync`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ..errors import ConfigurationError
from .model import SyncModel
from .notation import notation, parse_shards, require_registered, require_shards

__all__ = ["Schedule", "Step", "read_schedule"]


class Step(msgspec.Struct, frozen=True):
    """One step of a schedule: a model, and when it begins.

    Attributes:
        models: one model, or one for each shard.
        iteration: the step begins when the first worker reaches this iteration, counted from 0. None if `epoch` is
            set.
        epoch: the step begins when the first worker begins this epoch, counted from 0. None if `iteration` is set.
    """

    models: tuple[SyncModel, ...]
    iteration: int | None = 0
    epoch: int | None = None

    @property
    def sync(self) -> str:
        """The models in the notation of the command line."""
        return notation(self.models)

    def __str__(self) -> str:
        return f"{self.sync}@{f'epoch:{self.epoch}' if self.iteration is None else self.iteration}"


class Schedule(msgspec.Struct, frozen=True):
    """The steps of a job, in order. The first step begins at iteration 0.

    >>> str(read_schedule("bsp@0,ssp:staleness=1,execution=lazy@epoch:5"))
    'bsp@0,ssp:staleness=1,execution=lazy@epoch:5'
    """

    steps: tuple[Step, ...]

    @property
    def first(self) -> tuple[SyncModel, ...]:
        """The models of the first step: one model, or one for each shard."""
        return self.steps[0].models

    @property
    def models(self) -> tuple[SyncModel, ...]:
        """The models of all steps."""
        return tuple(model for step in self.steps for model in step.models)

    def at_shard(self, shard: int) -> SyncModel:
        """Return the first model of a shard."""
        return self.first[shard if len(self.first) > 1 else 0]

    def require_runnable(self, workers: int, shards: int) -> None:
        """Raise `ConfigurationError` if a step cannot run with these numbers of workers and shards."""
        for step in self.steps:
            require_shards(step.models, shards)
            for model in step.models:
                model.require_runnable(workers)

    def require_overlap(self, overlap: str) -> None:
        """Raise `ConfigurationError` if a step cannot run with this overlap: "off" requires `lockstep` models."""
        if overlap == "off" and not all(model.lockstep for step in self.steps for model in step.models):
            raise ConfigurationError(
                f"overlap is 'off', which requires the sync model bsp, but the sync model is {self}. With 'off', no "
                "worker pulls until all have pushed."
            )

    def __str__(self) -> str:
        return ",".join(map(str, self.steps)) if len(self.steps) > 1 else self.steps[0].sync


def read_schedule(sync: str | SyncModel | Sequence[SyncModel] | Schedule) -> Schedule:
    """Return the schedule for a model, a list of models (one for each shard), or text.

    Raises:
        ConfigurationError: the text is not a valid schedule, or its steps are out of order.
    """
    if isinstance(sync, Schedule):
        return sync
    if isinstance(sync, SyncModel):
        return Schedule((Step((_known(sync),)),))
    if not isinstance(sync, str):
        if not isinstance(sync, Sequence):
            raise ConfigurationError(
                f"sync is {sync!r}, expected a sync model such as paceline.sync.SSP(staleness=3), a list of "
                "models (one for each shard), or text such as 'ssp:staleness=3'."
            )
        if not sync:
            raise ConfigurationError("sync is empty, expected one sync model, or one for each shard.")
        return Schedule((Step(tuple(_known(model) for model in sync)),))
    return _read_text(sync)


def _read_text(sync: str) -> Schedule:
    """Read a schedule from its notation."""
    if "@" not in sync:
        return Schedule((Step(parse_shards(sync)),))
    # A comma separates two steps only if it follows the "@" of a step: parameters are also separated by commas.
    steps: list[Step] = []
    pending: list[str] = []
    for item in sync.split(","):
        pending.append(item)
        if "@" in item:
            steps.append(_read_step(",".join(pending)))
            pending = []
    if pending:
        raise ConfigurationError(
            f"sync {sync!r}: {','.join(pending)!r} does not say when it begins, as in 'bsp@0,asp@100'."
        )
    if steps[0].iteration != 0:
        raise ConfigurationError(f"sync {sync!r}: the first model must begin at 0, as in 'bsp@0,asp@100'.")
    for unit in ("iteration", "epoch"):
        times = [time for step in steps if (time := getattr(step, unit)) is not None]
        for before, after in itertools.pairwise(times):
            if before >= after:
                raise ConfigurationError(f"sync {sync!r}: {unit} {after} does not come after {before}.")
    return Schedule(tuple(steps))


def _read_step(text: str) -> Step:
    model, _, when = text.rpartition("@")
    unit, colon, number = when.rpartition(":")
    if not number.isascii() or not number.isdigit() or (colon and unit != "epoch"):
        raise ConfigurationError(
            f"sync {text!r}: {when!r} is not a valid time, expected an iteration ('@100') or an epoch ('@epoch:5')."
        )
    models = parse_shards(model)
    return Step(models, None, int(number)) if colon else Step(models, int(number))


def _known(model: object) -> SyncModel:
    if not isinstance(model, SyncModel):
        raise ConfigurationError(
            f"sync is {model!r}, expected a sync model such as paceline.sync.SSP(staleness=3)."
        )
    require_registered(model)
    return model
