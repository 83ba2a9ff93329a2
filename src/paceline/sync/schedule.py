"""The sync models that a job uses, and when the job changes the model: `--sync bsp@0,elastic-bsp@epoch:5`.

Each step of a schedule has a model (or one model per shard) and a starting point: the start of the job, the first
time a worker reaches an iteration, or the first time a worker begins an epoch. An epoch is one pass over the part of
the data that `distribute` assigned to the worker. All shards change the model at the same boundary; see
`paceline.core.shard`.

`--sync auto` is a schedule, too: it begins with bsp, and the coordinator chooses all later models (see
`paceline.core.auto`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ..errors import ConfigurationError
from .bsp import BSP
from .model import SyncModel, agree_on_means
from .notation import AUTO, notation, parse_shards, require_registered, require_shards

OVERLAPS = ("shards", "off")
"""With "shards", each shard answers pulls independently. With "off", workers pull only after all workers have
pushed."""


class ScheduleStep(msgspec.Struct, frozen=True):
    """One step of a schedule: a model, and when the job begins to use it.

    Attributes:
        models: one model, or one for each shard.
        iteration: the step begins as soon as any worker reaches this iteration, counted from 0. None if `epoch` is
            set.
        epoch: the step begins as soon as any worker begins this epoch, counted from 0. None if `iteration` is set.
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
    """The sync models of a job, as a sequence of steps. The first step begins at iteration 0.

    >>> str(read_schedule("bsp@0,ssp:staleness=1,execution=lazy@epoch:5"))
    'bsp@0,ssp:staleness=1,execution=lazy@epoch:5'

    Attributes:
        steps: the steps, in order.
        auto: True if the coordinator chooses the models after the first step, whose model is bsp.
    """

    steps: tuple[ScheduleStep, ...]
    auto: bool = False

    @property
    def first(self) -> tuple[SyncModel, ...]:
        """The models of the first step: one model, or one for each shard."""
        return self.steps[0].models

    @property
    def models(self) -> tuple[SyncModel, ...]:
        """The models of all steps."""
        return tuple(model for step in self.steps for model in step.models)

    @property
    def lockstep(self) -> bool:
        """True if all workers always read the same versions of the weights. See `SyncModel.lockstep`."""
        return not self.auto and all(model.lockstep for model in self.models)

    @property
    def agrees_on_means(self) -> bool:
        """True if the shards agree on means in each step, so that a script may clip the joint gradient."""
        return all(agree_on_means(step.models) for step in self.steps)

    def require_runnable(self, workers: int, shards: int) -> None:
        """Raise `ConfigurationError` if a step cannot run with this many workers and shards."""
        for step in self.steps:
            require_shards(step.models, shards)
            for model in step.models:
                model.require_runnable(workers)

    def require_overlap(self, overlap: str) -> None:
        """Raise `ConfigurationError` if a step cannot run with this `overlap`: "off" requires `lockstep` models."""
        if overlap == "off" and not self.lockstep:
            raise ConfigurationError(
                f"overlap is 'off', which requires the sync model bsp, but the sync model is {self}. With 'off', "
                "workers pull only after all workers have pushed."
            )

    def __str__(self) -> str:
        if self.auto:
            return AUTO
        return ",".join(map(str, self.steps)) if len(self.steps) > 1 else self.steps[0].sync


def read_schedule(sync: str | SyncModel | Sequence[SyncModel] | Schedule) -> Schedule:
    """Return a schedule made from a model, a list of models (one for each shard), or text.

    Raises:
        ConfigurationError: `sync` is not a valid schedule, or its steps are out of order.
    """
    if isinstance(sync, Schedule):
        return sync
    if isinstance(sync, str):
        return _read_text(sync)
    models = (sync,) if isinstance(sync, SyncModel) else sync
    if not isinstance(models, Sequence):
        raise ConfigurationError(
            f"sync is {sync!r}, expected a sync model such as paceline.sync.SSP(staleness=3), a list of "
            "models (one for each shard), or text such as 'ssp:staleness=3'."
        )
    if not models:
        raise ConfigurationError("sync is an empty sequence, expected one sync model, or one for each shard.")
    return Schedule((ScheduleStep(tuple(map(_known, models))),))


def _read_text(sync: str) -> Schedule:
    """Read a schedule from its notation."""
    if sync.strip() == AUTO:
        return Schedule((ScheduleStep((BSP(),)),), auto=True)
    if "@" not in sync:
        return Schedule((ScheduleStep(parse_shards(sync)),))
    # Commas also separate parameters, so a comma ends a step only after the step's "@".
    steps: list[ScheduleStep] = []
    pending: list[str] = []
    for item in sync.split(","):
        pending.append(item)
        if "@" in item:
            steps.append(_read_step(",".join(pending)))
            pending = []
    if pending:
        raise ConfigurationError(
            f"sync {sync!r}: {','.join(pending)!r} does not say when it begins. Write, for example, 'bsp@0,asp@100'."
        )
    if steps[0].iteration != 0:
        raise ConfigurationError(
            f"sync {sync!r}: the first model must begin at iteration 0, as in 'bsp@0,asp@100'."
        )
    for unit in ("iteration", "epoch"):
        times = [time for step in steps if (time := getattr(step, unit)) is not None]
        for before, after in itertools.pairwise(times):
            if before >= after:
                raise ConfigurationError(
                    f"sync {sync!r}: {unit} {after} is listed after {unit} {before}, expected increasing numbers."
                )
    return Schedule(tuple(steps))


def _read_step(text: str) -> ScheduleStep:
    model, _, when = text.rpartition("@")
    unit, colon, number = when.rpartition(":")
    if not number.isascii() or not number.isdigit() or (colon and unit != "epoch"):
        raise ConfigurationError(
            f"sync {text!r}: {when!r} is not a valid start, expected an iteration ('@100') or an epoch ('@epoch:5')."
        )
    models = parse_shards(model)
    return ScheduleStep(models, None, int(number)) if colon else ScheduleStep(models, int(number))


def _known(model: object) -> SyncModel:
    if not isinstance(model, SyncModel):
        raise ConfigurationError(
            f"sync is {model!r}, expected a sync model such as paceline.sync.SSP(staleness=3)."
        )
    require_registered(model)
    return model
