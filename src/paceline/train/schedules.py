"""Learning-rate schedules that follow the progress of the job instead of the iteration count of one worker.

A schedule that is stepped once per iteration, such as `OneCycleLR(total_steps=epochs * len(loader))`, assumes that
the script makes all iterations of training. In a run, the workers share these iterations, and a fast worker performs
more iterations than a slow one.

The progress of the job is measured in the unit for which such a schedule is written:

    the data     batches of the loader that was given to `prepare`
    the loop     updates since the beginning of a loop `paceline.epochs(updates=...)` or `(minutes=...)`, or samples
                 since the beginning of a loop `paceline.epochs(samples=...)`

The job knows how many units all workers together have done. A worker knows how many of these units are its own, and how
often it has stepped the scheduler for its own units. So each call advances the schedule to the step that a single
process would have reached after the units of all workers. Steps are counted from the step that the schedule had reached
when the measuring began. So the schedule goes on from a state that the script has loaded, and the number of the first
epoch does not matter.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import msgspec
import torch
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, SequentialLR

from ..core.agreement import MARKED_STEPS
from ..core.layout import HyperParameters
from ..core.messages import MOST_REPORTED_BYTES, HyperParametersReported
from ..errors import ConfigurationError
from ..shard.optimizers import read_groups
from .loops import Loop, Position, active_loop, current_position, latest_position
from .session import OfSession, Session, came_late, resumption_of

log = logging.getLogger("paceline.train.schedules")


class Reached(NamedTuple):
    """The number of units of a schedule that have been done since the measuring began.

    Attributes:
        job: number of units that all workers have done.
        own: how many of these units this worker has done.
    """

    job: int
    own: int


class ScheduledData:
    """The data for which a schedule is written, from the next pass over the data on.

    Args:
        position: how far the script has progressed through the data.
        length: number of batches in an epoch.
        joint: number of these batches in a joint batch of all workers.

    Attributes:
        position: how far the script has progressed through the data.
        length: number of batches in an epoch.
        first: number of the epoch in which the schedule begins; None before this epoch.
    """

    def __init__(self, position: Position, length: int, joint: int) -> None:
        self.position = position
        self.length = length
        self.first: int | None = None
        self._joint = joint
        # the progress when the schedule began: passes, batches of the epoch, and batches that were drawn
        self._passes, self._begun, self._drawn = len(position.passes), 0, position.drawn
        if position.in_pass:
            self._passes, self._begun = self._passes - 1, self._batches

    def reached(self) -> Reached | None:
        """Return how many batches have been used since the schedule began; None if none has."""
        position = self.position
        if self.first is None:
            self.first = position.passes[self._passes]
        skipped = min(position.skipped * self._joint, self.length)
        job = (position.epoch - self.first) * self.length + self._batches - self._begun - skipped
        own = position.drawn - self._drawn
        return Reached(max(job, 0), own) if own else None

    @property
    def _batches(self) -> int:
        """Number of batches of the current epoch that the job has begun."""
        return min(self.position.joint_batches * self._joint, self.length)


class ScheduledLoop(NamedTuple):
    """The loop for whose limit a schedule is written."""

    loop: Loop

    def reached(self) -> Reached | None:
        """Return the progress since the loop began; None if the unit cannot be counted, or if there is no progress."""
        done, limits = self.loop.done(), self.loop.limits
        if done is None:
            return None
        by_samples = limits.samples < math.inf and limits.updates == math.inf
        job, own = (done.samples, done.own_samples) if by_samples else (done.updates, done.steps)
        return Reached(job, own) if own else None


class Place(NamedTuple):
    """The place of a schedule that follows the job. A worker that goes on from a state of the scheduler begins here.

    Attributes:
        steps: number of steps that the schedule has made since the measuring began.
        first: number of the epoch of the data in which the schedule begins; None before this epoch.
        length: number of batches in an epoch for which the schedule is written; None if there is no data.
    """

    steps: int
    first: int | None = None
    length: int | None = None


class JobScheduler:
    """Wraps a scheduler, so that it follows the progress of the job if the script steps it in every iteration.

    If the script passes over a distributed loader, a call of `step()` belongs to an iteration under two conditions: the
    call happens during a pass, and the optimizer has made at most one step since the last call. If there is no such
    loader, every call in a loop that ends after a number of updates, of samples or of minutes belongs to an iteration.
    In a call that belongs to an iteration, the wrapped scheduler is stepped as often as necessary to reach the step
    that corresponds to the progress of the job (see the description of this module). In any other call, the wrapped
    scheduler is stepped once. All other public attributes are those of the wrapped scheduler, and a script may
    set them.

    Args:
        scheduler: the scheduler to wrap.
        optimizer: the distributed optimizer.
        session: this worker's session.
        data: the data for which the schedule is written; None if there is no loader, or its length is not known.
        watch: the optimizer's `ScheduleWatch`, which is dismissed as soon as the schedule follows the job.
        marks: the optimizer's `Marks`; None if no hyper-parameters are reported.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizer: torch.optim.Optimizer,
        session: Session,
        data: ScheduledData | None,
        watch: ScheduleWatch | None,
        marks: Marks | None,
    ) -> None:
        self._scheduler = scheduler
        self._session = session
        self._data = data
        self._watch = watch
        self._marks = marks
        self._optimizer_steps = 0  # since the last call of `step`
        # The data or the loop that was measured last, the number of calls that belonged to it, and the steps that these
        # calls have made.
        self._measured: ScheduledData | ScheduledLoop | None = None
        self._calls = 0
        self._steps = 0
        self._length = data.length if data is not None else None
        optimizer.register_step_post_hook(self._count)
        if data is not None:
            data.position.follow(self._catch_up)
        _prepared(session).append(ref(self))

    def step(self, *arguments: Any, **options: Any) -> None:
        """Step the wrapped scheduler. See the description of this class."""
        optimizer_steps, self._optimizer_steps = self._optimizer_steps, 0
        if resumption_of(self._session).repeats:
            return
        measured = self._measure()
        position = self._data.position if self._data is not None else latest_position(self._session)
        in_iteration = position is None or (position.in_pass and optimizer_steps <= 1)
        reached = measured.reached() if measured is not None and in_iteration else None
        if reached is None or arguments or options:
            self._scheduler.step(*arguments, **options)
            return
        if self._measured is None:
            if self._watch is not None:
                self._watch.dismiss()
            if self._marks is not None:
                self._marks.follow()
        elif self._measured != measured:
            self._calls = self._steps = 0
        self._measured = measured
        self._calls += 1
        self._advance(reached)

    def begin_at(self, step: int) -> None:
        """Let the wrapped scheduler go on from a step, before it begins to follow the job.

        Raises:
            ConfigurationError: the scheduler is not a `LambdaLR`. Only a `LambdaLR` can go on here, because the state
                that any other scheduler has loaded contains the length of the earlier run's schedule.
        """
        if not isinstance(self._scheduler, LambdaLR):
            raise ConfigurationError(
                f"the checkpoint was written by another number of workers, so its {self.kind} has another number of "
                "steps. Use the number of workers with which the checkpoint was written, or a LambdaLR."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a call with the number of the step is deprecated
            self._scheduler.step(step)

    @property
    def kind(self) -> str:
        """Name of the class of the wrapped scheduler."""
        return type(self._scheduler).__name__

    @property
    def place(self) -> Place:
        """The place in the data or the loop that is measured now.

        A worker that joins late or is resumed sets the place after it has loaded the state of the wrapped scheduler. If
        an epoch had another number of batches in the earlier run, a `LambdaLR` goes on at the same part of the epoch.
        The state that any other scheduler has loaded contains the length of the earlier run's schedule, so such a
        scheduler makes as many steps in an epoch as in the earlier run.
        """
        measured = self._measure()
        steps = self._steps if self._measured in (None, measured) else 0
        return Place(steps, self._data.first if self._data is not None else None, self._length)

    @place.setter
    def place(self, place: Sequence[Any]) -> None:
        steps, first, there = Place(*place)
        self._steps = steps
        if self._data is None:
            return
        self._data.first = first
        if there is None or there == self._data.length or self._measure() is not self._data:
            return
        if isinstance(self._scheduler, LambdaLR):
            self._steps = steps * self._data.length // there
            self.begin_at(self._scheduler.last_epoch + self._steps - steps)
        else:
            self._length = there

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or hasattr(type(self), name)
        object.__setattr__(self if own else self._scheduler, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_scheduler":  # while a copy of this object is made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._scheduler, name)

    def _measure(self) -> ScheduledData | ScheduledLoop | None:
        """Return the data or the loop that the schedule follows now; None if each call is one step."""
        loop, data = active_loop(self._session), self._data
        if loop is not None:
            epochs, time_s, updates, samples = loop.limits
            counted = min(time_s, updates, samples) if data is None else updates
            if counted < math.inf and (data is None or epochs is None):
                return ScheduledLoop(loop)
        return data

    def _advance(self, reached: Reached) -> None:
        """Step the wrapped scheduler until it has reached the progress of the job."""
        steps, units = self._calls * reached.job, reached.own
        if self._measured is self._data is not None and self._length is not None:
            steps, units = steps * self._length, units * self._data.length
        before, self._steps = self._steps, max(self._steps, steps // units)
        for _ in range(self._steps - before):
            if _has_ended(self._scheduler):
                return
            self._scheduler.step()
            if self._marks is not None and (step := _steps_of(self._scheduler)) % MARKED_STEPS == 0:
                self._marks.passed(step, read_groups(self._scheduler.optimizer))

    def _catch_up(self) -> None:
        """Follow the job to the end of an epoch, whose last batches other workers may have received."""
        if self._measured is self._data is not None and (reached := self._data.reached()) is not None:
            self._advance(reached)

    def _count(self, *_: object) -> None:
        self._optimizer_steps += 1


def prepared_schedulers(session: Session) -> list[JobScheduler]:
    """Return the schedulers that the script of a worker has prepared, in the order in which it has prepared them."""
    return [scheduler for each in _prepared(session) if (scheduler := each()) is not None]


_prepared = OfSession[deque[ref[JobScheduler]]](lambda _: deque())


def _has_ended(scheduler: LRScheduler) -> bool:
    """Return True if a scheduler has made its last step, and would raise an error in the next one."""
    if isinstance(scheduler, ChainedScheduler):
        return any(map(_has_ended, scheduler._schedulers))
    if isinstance(scheduler, SequentialLR):
        return _has_ended(scheduler._schedulers[-1])
    total = getattr(scheduler, "total_steps", None)
    return total is not None and scheduler.last_epoch >= total


def _steps_of(scheduler: LRScheduler) -> int:
    """Return how many steps a scheduler has made, including those before its state was saved and loaded."""
    first = scheduler._schedulers[0] if isinstance(scheduler, ChainedScheduler) else scheduler
    return first.last_epoch


class ScheduleWatch:
    """Warns once if the learning rate follows a worker's own iterations, although the job's iterations are counted.

    The job's iterations are counted if the data is split dynamically. The job's iterations are also counted if the sync
    model does not keep all workers in lockstep, and a loop without a distributed loader ends after a number of updates,
    of samples or of minutes.

    Args:
        session: this worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._warned = session.workers == 1
        # the pass or loop of the last step, and the learning rates of this step
        self._last: tuple[object, list[object]] = None, []
        self._changes = 0  # number of steps in a row with other learning rates than the step before

    def dismiss(self) -> None:
        """Do not warn from now on."""
        self._warned = True

    def look(self, groups: Sequence[HyperParameters]) -> None:
        """Compare the learning rates of a step with those of the step before."""
        if self._warned:
            return
        position, loop = current_position(self._session), active_loop(self._session)
        text, allowed = IN_EPOCH, 0
        place: object = None
        if position is not None and position.dynamic:
            place = position, len(position.passes)
        elif latest_position(self._session) is None and loop is not None and not self._session.core.lockstep:
            # The loop decides what an epoch is, so the learning rate may well change from one epoch to the next.
            text, allowed = IN_LOOP, 1
            place = loop if loop.limits.epochs is None else None
        rates: list[object] = [group.get("lr") for group in groups]
        last, self._last = self._last, (place, rates)
        same = place is not None and last[0] == place
        self._changes = self._changes + 1 if same and last[1] != rates else 0
        if self._changes > allowed:
            self._warned = True
            log.warning("%s", text)


IN_EPOCH = (
    "The learning rate changes within an epoch, but the number of iterations per epoch differs between workers, "
    "because each batch is handed out when a worker needs it. Let the schedule follow the progress of the job: "
    "model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)."
)
IN_LOOP = (
    "The learning rate changes in every iteration of this worker, but the loop ends when all workers together have "
    "reached its limit. Let the schedule follow the progress of the job: model, optimizer, scheduler = "
    "paceline.prepare(model, optimizer, scheduler)."
)


# -- The marks at which a worker reports the hyper-parameters of an optimizer. See `paceline.core.agreement`
#
# A report costs a small message, so a worker reports only every `MARKED_STEPS` steps, and once in each epoch.
# All other steps cost a few comparisons.

Groups = tuple[HyperParameters, ...]


class Marks:
    """Decides when the hyper-parameters of one optimizer are reported.

    If one prepared schedule follows the job, the hyper-parameters are reported at steps of this schedule, at which they
    must be the same in all workers. If several schedules follow the job, the hyper-parameters are not reported, because
    the schedules do not advance together.

    Args:
        session: this worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = 0
        self._pass: tuple[Position, int] | None = None  # the pass of the last step, and the number of passes
        self._epoch: tuple[str, int] | None = None  # the loader and the epoch of the last step
        self._groups: Groups = ()  # the groups of the last step
        self._marked: Groups = ()  # the groups of the last mark
        self._within = False  # True once hyper-parameters have changed within a pass
        self._followers = 0  # number of schedules that follow the job
        # step of a schedule that follows the job, and hyper-parameters at this step
        self._passed: tuple[int, Groups] | None = None

    def follow(self) -> None:
        """Record that a schedule begins to follow the job."""
        self._followers += 1

    def passed(self, step: int, groups: Groups) -> None:
        """Record the hyper-parameters at a mark of a schedule that follows the job."""
        self._passed = step, groups

    def look(self, set_index: int, groups: Groups) -> HyperParametersReported | None:
        """Return the report to send before a step; None if the step is not at a mark.

        Args:
            set_index: index of the optimizer's parameter set.
            groups: the hyper-parameters of this step.
        """
        step, self._steps = self._steps, self._steps + 1
        if self._followers:
            passed, self._passed = self._passed, None
            if passed is None or self._followers > 1:
                return None
            return HyperParametersReported(set_index, step, _encoded(passed[1]), schedule=passed[0])
        position = current_position(self._session)
        here = (position, len(position.passes)) if position is not None else None
        epoch = (position.name, position.epoch) if position is not None else None
        self._within |= step > 0 and here == self._pass and groups != self._groups
        begins = epoch is not None and epoch != self._epoch
        self._pass, self._epoch, self._groups = here, epoch, groups
        if not begins and step % MARKED_STEPS:
            return None
        before, self._marked = self._marked, groups
        late = came_late(self._session)
        # Workers are at different steps within an epoch, and the state that a late worker has loaded is that of
        # another worker. In both cases, only hyper-parameters that have not changed since the last mark can be
        # compared.
        if groups != before and (late or (epoch is not None and not begins)):
            return None
        loader, number = epoch if epoch is not None else ("", None)
        return HyperParametersReported(
            set_index, step, _encoded(groups), number, loader, within=self._within, late=late
        )


def _encoded(groups: Groups) -> bytes:
    """Encode the hyper-parameters of as many groups as fit into a report."""
    while len(encoded := msgspec.msgpack.encode(groups)) > MOST_REPORTED_BYTES:
        groups = groups[: len(groups) // 2]
    return encoded
