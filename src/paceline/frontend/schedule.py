"""Learning-rate schedules that follow the progress of the job instead of the iteration count of one worker.

A schedule that is stepped once per iteration, such as `OneCycleLR(total_steps=epochs * len(loader))`, assumes that
the script performs `len(loader)` iterations in each epoch. In a run, the workers share these iterations. With a
dynamic split, a fast worker performs more of them than a slow one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..core.model_spec import HyperParameters
from .position import Position, current_position
from .session import Session

__all__ = ["JobScheduler", "ScheduleWatch"]

log = logging.getLogger("paceline.frontend.schedule")


class JobScheduler:
    """Wraps a scheduler, so that it follows the progress of the job if the script steps it in every iteration.

    A call of `step()` belongs to an iteration if it happens during a pass over the loader, and the optimizer has made
    at most one step since the last call. Such a call steps the wrapped scheduler as often as necessary to reach the
    number of steps that corresponds to the position of the job: `length` steps per epoch, or fewer if the script
    steps the scheduler only once every few batches. Any other call steps the wrapped scheduler once. All other
    attributes are those of the wrapped scheduler.

    Attributes:
        steps: number of steps that the scheduler should have made in iterations.

    Args:
        scheduler: the scheduler to wrap.
        optimizer: the distributed optimizer.
        position: how far the script has progressed through the data.
        length: number of batches per epoch for which the schedule was written. If this number is not known (None),
            each call steps the wrapped scheduler once.
        joint: number of these batches in a joint batch of all workers.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizer: torch.optim.Optimizer,
        position: Position,
        length: int | None,
        joint: int,
    ) -> None:
        self._scheduler = scheduler
        self._position = position
        self._length = length
        self._joint = joint
        self._optimizer_steps = 0  # since the last call of `step`
        self._calls = 0  # number of calls that belonged to an iteration
        self.steps = 0
        optimizer.register_step_post_hook(self._count)

    def step(self, *arguments: Any, **options: Any) -> None:
        """Step the wrapped scheduler. See the description of this class."""
        optimizer_steps, self._optimizer_steps = self._optimizer_steps, 0
        scheduler, position, length = self._scheduler, self._position, self._length
        # In a run, the wrapped optimizer makes no steps. Without this flag, the scheduler would warn about that.
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        in_iteration = position.in_pass and optimizer_steps <= 1
        if length is None or arguments or options or not in_iteration:
            scheduler.step(*arguments, **options)
            return
        self._calls += 1
        batches = position.epoch * length + min(position.joint_batches * self._joint, length)
        before = self.steps
        self.steps = max(before, self._calls * batches // position.drawn)
        end = getattr(scheduler, "total_steps", math.inf)
        for _ in range(self.steps - before):
            if scheduler.last_epoch >= end:
                return
            scheduler.step()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_scheduler":  # while a copy of this object is made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._scheduler, name)

    def _count(self, *_: object) -> None:
        self._optimizer_steps += 1


class ScheduleWatch:
    """Warns once if the learning rate follows a worker's own iteration count, but the data is split dynamically.

    Args:
        session: this worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._warned = session.workers == 1
        # position, number of the pass, and learning rates at the last step
        self._last: tuple[Position, int, list[object]] | None = None

    def look(self, groups: Sequence[HyperParameters]) -> None:
        """Compare the learning rates of a step with those of the step before."""
        if self._warned:
            return
        position = current_position(self._session)
        if position is None or not position.dynamic:
            self._last = None
            return
        rates: list[object] = [group.get("lr") for group in groups]
        last, self._last = self._last, (position, position.passes, rates)
        if last is not None and last[:2] == self._last[:2] and last[2] != rates:
            self._warned = True
            log.warning(
                "The learning rate changes within an epoch, but the number of iterations per epoch differs between "
                "workers, because each batch is handed out when a worker needs it. Let the schedule follow the "
                "progress of the job: model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, "
                "loader, scheduler)."
            )
