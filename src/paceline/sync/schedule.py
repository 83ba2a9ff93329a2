"""Which sync model a job runs, and when it changes: `--sync bsp@0,elastic-bsp@epoch:5`.

Each step names a model (or one for each shard) and when it is to begin: at the start, when the first worker comes to
an iteration, or when the first worker begins an epoch (a pass over what `distribute` gave it). The workers then end
the old model with their next pushes, so that all shards change at one boundary: see `changes`.
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
    """A model and when it is to begin.

    Attributes:
        models: one, or one for each shard.
        iteration: the worker's own, from 0; None if an epoch is meant.
        epoch: likewise.
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
    """The steps of a job, in order. The first begins at 0.

    >>> str(read_schedule("bsp@0,ssp:staleness=1,execution=lazy@epoch:5"))
    'bsp@0,ssp:staleness=1,execution=lazy@epoch:5'
    """

    steps: tuple[Step, ...]

    @property
    def first(self) -> tuple[SyncModel, ...]:
        """What the job begins with: one model, or one for each shard."""
        return self.steps[0].models

    @property
    def models(self) -> tuple[SyncModel, ...]:
        """The models of all steps."""
        return tuple(model for step in self.steps for model in step.models)

    def at_shard(self, shard: int) -> SyncModel:
        """What a shard begins with."""
        return self.first[shard if len(self.first) > 1 else 0]

    def require_runnable(self, workers: int, shards: int) -> None:
        """Raise `ConfigurationError` if a step cannot run in such a job."""
        for step in self.steps:
            require_shards(step.models, shards)
            for model in step.models:
                model.require_runnable(workers)

    def require_overlap(self, overlap: str) -> None:
        """Raise `ConfigurationError` if a step cannot run with this overlap: "off" is for models in lockstep."""
        if overlap == "off" and not all(model.lockstep for step in self.steps for model in step.models):
            raise ConfigurationError(
                "overlap is 'off', where nobody pulls until everybody has pushed: that is for the sync model bsp, "
                f"not {self}."
            )

    def __str__(self) -> str:
        return ",".join(map(str, self.steps)) if len(self.steps) > 1 else self.steps[0].sync


def read_schedule(sync: str | SyncModel | Sequence[SyncModel] | Schedule) -> Schedule:
    """A schedule out of what users give: a model, a list of one for each shard, or text.

    Raises:
        ConfigurationError: the text is none, or the steps are in no order.
    """
    if isinstance(sync, Schedule):
        return sync
    if isinstance(sync, SyncModel):
        return Schedule((Step((_known(sync),)),))
    if not isinstance(sync, str):
        if not isinstance(sync, Sequence):
            raise ConfigurationError(
                f"sync is {sync!r}, expected a sync model such as paceline.sync.SSP(staleness=3), a list of one for "
                "each shard, or text such as 'ssp:staleness=3'."
            )
        if not sync:
            raise ConfigurationError("sync is empty, expected a sync model or one for each shard.")
        return Schedule((Step(tuple(_known(model) for model in sync)),))
    return _read_text(sync)


def _read_text(sync: str) -> Schedule:
    """Read a schedule from its notation."""
    if "@" not in sync:
        return Schedule((Step(parse_shards(sync)),))
    steps: list[Step] = []
    pending: list[str] = []
    for item in sync.split(","):  # a model's own keys are separated by commas too: a step ends with its "@"
        pending.append(item)
        if "@" in item:
            steps.append(_read_step(",".join(pending)))
            pending = []
    if pending:
        raise ConfigurationError(
            f"sync {sync!r}: {','.join(pending)!r} does not say when, as in 'bsp@0,asp@100'."
        )
    if steps[0].iteration != 0:
        raise ConfigurationError(f"sync {sync!r}: the first model begins at 0, as in 'bsp@0,asp@100'.")
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
            f"sync {text!r}: {when!r} is no time, expected an iteration ('@100') or an epoch ('@epoch:5')."
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
