"""Computes the standing of each update at a shard, for translated hyper-parameters (see `paceline.sync.translation`).

**Share.** The joint batch consists of the usual samples of all live workers (`core/sync/joint_batch.py`). So over an
epoch, the shares of all updates add up to the number of joint batches, also if the last batches are smaller. An
update with a push of every live worker is a whole joint step, as in one process, whatever the sizes of its batches.
Samples of a worker that has left are taken out of the joint batch in `RAMP` joint steps. So at the end of a run, the
last pushes, whose workers are alone by then, do not suddenly take whole steps.

If the model drops pushes, the next update makes up for them: their shares are added to its own, up to a whole step.
Otherwise an epoch would move the weights less far than in one process.

**Delay.** The shard sums the shares of its updates: its *joint steps*. The delay of a push is the difference between
this sum when it is applied, and the sum when its worker has received the weights. The mean of the delays is not known
at the beginning of the run, and after a worker has joined or left, or the model has changed. It is then predicted:
under a model that applies pushes on arrival, n - 1 pushes of others lie between two pushes of a worker, on average
over all pushes, however unequal the workers are. This makes (n - 1) / n joint steps. The prediction counts as much as
the measurements of the next `WINDOW` joint steps. What is reported follows the estimate in `RAMP` joint steps, so it
never jumps during the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...state import stateful
from ...sync import SyncModel
from ...sync.events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from ...sync.translation import Standing
from .joint_batch import JointBatch

__all__ = ["StandingEstimator"]

Key = tuple[int, int]
"""A push: (worker, iteration)."""

WINDOW = 16.0
"""Number of joint steps over which delays are averaged: enough for several pushes of a slow worker."""

RAMP = 2.0
"""Number of joint steps in which the reported delay follows the estimate, and a worker that has left is forgotten."""


@stateful(decides="temper joint_steps _batch _pulled _pushes _dropped _model _mean _delay")
class StandingEstimator:
    """Estimates, from the events at one shard, how the hyper-parameters of its updates are translated.

    Attributes:
        temper: factor by which the learning rate is reduced at present.
        joint_steps: sum of the shares of all updates.
    """

    def __init__(self) -> None:
        self.temper = 1.0
        self.joint_steps = 0.0
        self._batch = JointBatch()
        self._pulled: dict[int, float] = {}  # live worker -> joint steps in the worker's weights
        # push that is neither applied nor dropped yet -> joint steps in the weights that it was computed on, samples;
        # 0 samples for a push without a gradient
        self._pushes: dict[Key, tuple[float, float]] = {}
        self._dropped = 0.0  # shares of the pushes that were dropped since the last update
        self._model: SyncModel | None = None  # the model of the last update
        self._mean: float | None = None  # mean delay; None if it must be predicted
        self._delay: float | None = None  # the delay that is reported; None before the first update

    def note(self, event: AnyEvent) -> None:
        """Record an event that the model has accepted. Call this before recording the resulting actions."""
        if type(event) is PushReceived:
            has_gradient = not event.empty and event.edit is None
            samples = self._batch.push(event.worker, event.samples) if has_gradient else 0.0
            self._pushes[event.worker, event.iteration] = self._pulled[event.worker], samples
        elif type(event) is WorkerJoined:
            self._pulled[event.worker] = self.joint_steps
            self._batch.join(event.worker)
            self._mean = None
        elif type(event) is WorkerLost or type(event) is WorkerFinished:
            del self._pulled[event.worker]
            self._batch.leave(event.worker)
            self._mean = None

    def answered(self, worker: int) -> None:
        """Record that a worker receives the current weights."""
        self._pulled[worker] = self.joint_steps

    def drop(self, push: Key, *, counts: bool) -> None:
        """Record that a push is not applied.

        Args:
            push: the push.
            counts: True if the next update makes up for the push, unless it has no gradient.
        """
        if counts and self._pushes[push][1]:
            self._dropped += self._share([push])
        del self._pushes[push]

    def apply(self, pushes: Sequence[Key], model: SyncModel) -> Standing:
        """Record an update that a model has decided, and return its standing."""
        share = 1.0 if model.lockstep else min(self._share(pushes) + self._dropped, 1.0)
        self._dropped = 0.0
        observed = sum(self.joint_steps - self._pushes.pop(push)[0] for push in pushes) / len(pushes)
        self.joint_steps += share
        self._batch.forget(share / RAMP)
        if self._mean is None or model is not self._model:
            single = len(pushes) == 1 and not model.fresh
            self._mean, self._model = self._predicted() if single else observed, model
        self._mean += (observed - self._mean) * share / WINDOW
        if self._delay is None:
            self._delay = self._mean
        self._delay += (self._mean - self._delay) * share / RAMP
        return Standing(share, 0.0 if model.lockstep else self._delay, self.temper)

    def _share(self, pushes: Sequence[Key]) -> float:
        """Return the part of a joint batch that some pushes contain."""
        return self._batch.share({worker for worker, _ in pushes}, (self._pushes[push][1] for push in pushes))

    def _predicted(self) -> float:
        """Return the mean delay of pushes that are applied on arrival."""
        return 1.0 - 1.0 / self._batch.workers if self._batch.workers else 0.0
