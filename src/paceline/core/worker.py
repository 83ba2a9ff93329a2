"""What one worker makes of the sync model: which flags its pushes carry, whom it tells, whether it starts anew.

Pure, like the machines of shards and coordinator, and hosted like them: by a worker's live session, and by whatever
stands for a worker in virtual time. It never knows a model better than by what it asks of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..errors import ConfigurationError
from ..sync.events import Change, Stop
from ..sync.notation import AnySyncModel, notation, parse_shards, require_shards
from ..sync.schedule import Schedule

__all__ = ["Flags", "Request", "WorkerSync"]


class Flags(NamedTuple):
    """Of one push.

    Attributes:
        stop: the barrier that the worker arrives at with it.
        change: the change of model before which it is the last one.
        notify: is the coordinator to hear of it.
        progress: the round that it is for, if a shard has told the worker to go on from a later one.
    """

    stop: Stop | None
    change: Change | None
    notify: bool
    progress: int | None = None


class Request(NamedTuple):
    """A change of model that is asked for: see `SyncRequested`."""

    source: Literal["schedule", "script"]
    number: int
    sync: str


class WorkerSync:
    """One worker's part.

    Args:
        schedule: of the job.
        shards: how many there are.

    Attributes:
        iteration: that it computes, or whose answers it awaits.
        needs_significance: are its pushes to carry |g| / |w|.
        may_restart: may a computation be dropped and started anew.
    """

    def __init__(self, schedule: Schedule, shards: int) -> None:
        self.iteration = 0
        self._shards = shards
        self._steps = list(enumerate(schedule.steps[1:]))  # to be asked for when they are due
        self._epoch = 0
        self._wanted = schedule.first  # what the job will have when all that this worker asked for has come
        self._asked = 0  # changes that the script has asked for
        self._change: Change | None = None  # to be flagged on the next push
        self._flagged: Change | None = None  # flagged on the push that awaits its answers
        self._plan: tuple[Stop, int] | None = None  # stop with the first push at or past this
        self._restart = -1  # the iteration that is to be started anew
        self._progress: int | None = None  # the latest round that a shard has told it to go on from
        self._follow(schedule.first)

    def join(self, iteration: int, models: Sequence[AnySyncModel]) -> None:
        """Join a job that goes on already: with this iteration, under the models in force."""
        self.iteration = iteration
        self._follow(models)

    # -- what it hears ------------------------------------------------------------------------------------

    def plan(self, stop: Stop, iteration: int) -> None:
        """The coordinator has planned this worker's stop."""
        self._plan = stop, iteration

    def announce(self, change: Change) -> None:
        """The coordinator has published a change. A plan made before is void."""
        self._change, self._plan = change, None

    def order_restart(self, iteration: int) -> None:
        """The coordinator wants an iteration started anew."""
        self._restart = iteration

    def hear_answer(self, v_train: int | None) -> None:
        """A shard has answered, perhaps with the round to go on from."""
        if v_train is not None:
            self._progress = max(v_train, self._progress or 0)

    def reach(self, epoch: int) -> None:
        """This worker begins a pass over its data."""
        self._epoch = max(self._epoch, epoch)

    # -- what it does -------------------------------------------------------------------------------------

    @property
    def restart_ordered(self) -> bool:
        """Is the computation at hand to be dropped."""
        return self._restart == self.iteration

    def restarted(self) -> None:
        """It has been dropped."""
        self._restart = -1

    def ask(self, models: Sequence[AnySyncModel], workers: int, shard: int | None = None) -> Request:
        """A change that the script wants, of all shards or of one.

        Raises:
            ConfigurationError: the job cannot have it.
        """
        if shard is not None:
            if not 0 <= shard < self._shards or len(models) != 1:
                raise ConfigurationError(
                    f"shard is {shard}, expected a number from 0 to {self._shards - 1}, and one sync model for it."
                )
            every = list(self._wanted) * (self._shards if len(self._wanted) == 1 else 1)
            every[shard] = models[0]
            models = every
        require_shards(models, self._shards)
        for model in models:
            model.require_runnable(workers)
            if "local:" in str(model):
                raise ConfigurationError(
                    f"{model} cannot be sent to the servers in mid-run: put its conditions into a module that they "
                    "can import."
                )
        self._wanted = tuple(models)
        self._asked += 1
        return Request("script", self._asked - 1, notation(models))

    def due(self) -> list[Request]:
        """The schedule's steps that this worker has come to, each once."""
        requests = []
        while self._steps:
            number, step = self._steps[0]
            reached, wanted = (
                (self._epoch, step.epoch) if step.iteration is None else (self.iteration, step.iteration)
            )
            if wanted is None or reached < wanted:
                break
            self._steps.pop(0)
            self._wanted = step.models
            requests.append(Request("schedule", number, step.sync))
        return requests

    def push(self) -> Flags:
        """The flags of this iteration's push, which is sent now."""
        self._flagged, self._change = self._change, None
        stop = None
        if self._plan is not None and self._flagged is None and self.iteration >= self._plan[1]:
            stop, self._plan = self._plan[0], None
        progress, self._progress = self._progress, None
        return Flags(stop, self._flagged, self._notifies or self._flagged is not None, progress)

    def answered(self) -> bool:
        """Every shard has answered: the next iteration begins. True if the coordinator is to hear that."""
        self.iteration += 1
        if self._flagged is None:
            return self.may_restart
        self._follow(parse_shards(self._flagged.sync))
        self._flagged = self._progress = None  # rounds are counted anew
        return True

    def _follow(self, models: Sequence[AnySyncModel]) -> None:
        self.needs_significance = any(model.needs_significance for model in models)
        self.may_restart = any(model.needs_starts for model in models)
        self._notifies = models[0].at_coordinator() is not None
