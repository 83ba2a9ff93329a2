"""Computations over all workers: joint batches, calls of all workers, norms of joint gradients, shares of updates.

The samples of a joint batch are those that one push of each live worker would contain.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from ..errors import ProtocolError
from ..state import stateful
from ..sync import SyncModel
from ..sync.events import AnyEvent, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from ..sync.translation import Standing
from .layout import ModelSpec, Placement
from .messages import (
    Combined,
    Contributed,
    MeanAwaited,
    MeanClipped,
    MeanMeasured,
    MeanMissing,
    StandInAllowed,
)
from .requests import Request, Send, server_peer, worker_peer

PUSHES = 8
"""Number of a worker's pushes over which its samples are averaged."""

NEGLIGIBLE = 0.001
"""Part of the joint batch below which the samples of workers that have left are forgotten."""


@stateful()
class JointBatch:
    """Estimates the samples of a joint batch at one shard, in constant time for each push.

    The *usual samples* of a worker are a running mean over its pushes. A worker that has not pushed yet is counted with
    the mean of the other workers. A push with an unknown number of samples is counted with the mean of all workers; if
    all numbers are unknown, pushes are counted.

    Example:
        >>> batch = JointBatch()
        >>> for worker in (0, 1):
        ...     batch.join(worker)
        >>> for worker, samples in ((0, 48), (1, 16)):
        ...     _ = batch.push(worker, samples)
        >>> batch.share({0}, [48.0])
        0.75
    """

    def __init__(self) -> None:
        self._usual: dict[int, tuple[float, int]] = {}  # live worker -> usual samples, number of pushes
        self._total = 0.0  # sum of the usual samples of the workers that have pushed
        self._known = 0  # number of live workers that have pushed
        self._left = 0.0  # usual samples of workers that have left, as far as they still count

    @property
    def workers(self) -> int:
        """The number of live workers."""
        return len(self._usual)

    def join(self, worker: int) -> None:
        """Add a live worker."""
        self._usual[worker] = 0.0, 0

    def leave(self, worker: int) -> None:
        """Remove a worker. The worker's samples remain in the joint batch until they are forgotten."""
        usual, pushes = self._usual.pop(worker)
        if pushes:
            self._known -= 1
            self._total = self._total - usual if self._known else 0.0
            self._left += usual

    def push(self, worker: int, samples: int | None) -> float:
        """Record a push, and return its number of samples: that of a typical push if its own number is unknown."""
        counted = float(samples) if samples else self._typical
        usual, pushes = self._usual[worker]
        self._known += not pushes
        change = (counted - usual) / min(pushes + 1, PUSHES)
        self._usual[worker] = usual + change, pushes + 1
        self._total += change
        return counted

    def share(self, workers: Collection[int], samples: Iterable[float]) -> float:
        """Return the part of a joint batch that some pushes contain; at most 1.

        Args:
            workers: the workers of these pushes. If every live worker is one of them, the pushes are a whole joint
            batch.
            samples: the samples of each push.
        """
        joint = self._total + self._typical * (len(self._usual) - self._known)
        if self._left < joint * NEGLIGIBLE:
            self._left = 0.0
        contained = sum(samples)
        if len(workers) >= len(self._usual) and self._usual.keys() <= set(workers):
            contained = max(contained, joint)
        return min(contained / (joint + self._left), 1.0)

    def forget(self, part: float) -> None:
        """Remove a part of the samples of workers that have left."""
        self._left *= 1.0 - part

    @property
    def _typical(self) -> float:
        """The mean of the workers' usual samples; 1 before the first push, so that pushes are counted."""
        return self._total / self._known if self._known else 1.0


# -- Barriers, reductions and extensions: calls that every worker's script makes, and that end together in all workers
#
# A worker that makes such a call sends a `Contributed` and waits for a `Combined`. A call ends when every
# live worker has made it. So at most one call is in progress, and each worker is in this call or has yet to reach it. A
# worker that finishes or is lost is no longer waited for. The contribution of a lost worker is not used, so the result
# combines the contributions of exactly those workers that receive the result. The numbers are added in the order of the
# workers' indices, in float64, so the result does not depend on the order in which the contributions arrive. A worker
# whose script has added parameters contributes the extended model; the call then continues in `core.reconfiguration`.
#
# If a worker joins a run in progress, the other workers have already made the calls that come before its first step. So
# the new worker makes these calls alone. The new worker may also begin an epoch that the other workers have ended. The
# other workers may have made some of the calls that follow this epoch, but not all: for example, a reduction, but not
# the barrier after a long evaluation. So the calls between two steps are numbered (`Contributed.since_step`), and the
# new worker makes alone those calls that the other workers have already made.

ITEM_BYTES = 8

LIMIT_BYTES = 1024 * 1024
"""Maximum size of the numbers in one reduction, 8 bytes each."""


@stateful(fixed="_extend", about={"grown": "scripts"})
class Collectives:
    """The call that is in progress.

    Args:
        extend: function that begins an extension, given the extended model of each worker.

    Attributes:
        waiting: the contribution of each worker that has made the call and waits for other workers.
        uneven: True once workers may push without a gradient while they wait for other workers in a call.
        grown: True once a worker has joined a run in progress. In lockstep, workers then end their epochs at
            different iterations.
    """

    def __init__(self, extend: Callable[[Mapping[int, ModelSpec]], list[Request]]) -> None:
        self.waiting: dict[int, Contributed] = {}
        self.uneven = self.grown = False
        self._extend = extend

    def contributed(self, worker: int, message: Contributed, live: Collection[int]) -> list[Request]:
        """Record that a worker that was in no call has made a call. If every live worker has made the call, end it.

        Raises:
            ProtocolError: the last number in the message is incomplete.
        """
        if len(message.numbers) % ITEM_BYTES:
            raise ProtocolError(f"a contribution has {len(message.numbers)} bytes, expected a multiple of 8")
        self.waiting[worker] = message
        return self._end_if_complete(live)

    def allow_pushes(self, live: Collection[int]) -> list[Request]:
        """Let the live workers push without a gradient while they wait, unless this has been done already."""
        if self.uneven:
            return []
        self.uneven = True
        for worker, contribution in self.waiting.items():
            self.waiting[worker] = msgspec.structs.replace(contribution, may_push=True)
        return [Send(worker_peer(worker), StandInAllowed()) for worker in sorted(live)]

    def left(self, worker: int, live: Collection[int]) -> list[Request]:
        """Record that a worker has finished or was lost; `live` no longer contains this worker."""
        self.waiting.pop(worker, None)
        return self._end_if_complete(live)

    def _end_if_complete(self, live: Collection[int]) -> list[Request]:
        if not self.waiting or len(self.waiting) < len(live):
            return []
        contributions, self.waiting = self.waiting, {}
        if self.grown and all(each.model is None for each in contributions.values()):
            earliest = min(each.since_step for each in contributions.values())
            self.waiting = {w: each for w, each in contributions.items() if each.since_step > earliest}
            contributions = {w: each for w, each in contributions.items() if w not in self.waiting}
        combined = combine(contributions)
        if not combined.refused:
            models = {w: each.model for w, each in sorted(contributions.items()) if each.model is not None}
            if models:
                return self._extend(models)
        return [Send(worker_peer(worker), combined) for worker in sorted(contributions)]


def combine(contributions: Mapping[int, Contributed]) -> Combined:
    """Return the result of a call.

    Args:
        contributions: worker -> its contribution. Must not be empty.

    >>> def of(number: float, weight: float = 1.0) -> Contributed:
    ...     return Contributed("reduce()", 1, "mean", array("d", [number]).tobytes(), weight)
    >>> array("d", combine({0: of(1.0), 1: of(5.0, weight=3.0)}).numbers)
    array('d', [4.0])
    """
    first, *others = sorted(contributions)
    one = contributions[first]
    for worker in others:
        other = contributions[worker]
        kinds = [(each.call, each.op, len(each.numbers), each.model is None) for each in (one, other)]
        if kinds[0] != kinds[1]:
            return Combined(
                refused=f"worker {first} called {one.call}, but worker {worker} called {other.call}. All workers "
                "must make the same calls of paceline.barrier() and paceline.reduce(), and add the same parameters, "
                "in the same order."
            )
    total = array("d", bytes(len(one.numbers)))
    divisor = 0.0
    for worker in (first, *others):
        weight = contributions[worker].weight if one.op == "mean" else 1.0
        if not weight:
            continue  # the number may be NaN, like any mean of no samples
        divisor += weight
        numbers = array("d", contributions[worker].numbers)
        total = array("d", [each + weight * number for each, number in zip(total, numbers, strict=True)])
    if one.op == "mean":
        total = array("d", [number / divisor if divisor else float("nan") for number in total])
    return Combined(total.tobytes())


# -- Computes the norm of the joint gradient at the coordinator, and the factor by which every shard clips a mean
#
# Each shard reports the squared norm of its part of a mean (`MeanMeasured`). When all shards have reported,
# the squares are added in the order of the shards, and every shard receives the same factor (`MeanClipped`):
#
#     factor = min(1, max_norm / (sqrt(sum of the squares) + 1e-6))
#
# as in `torch.nn.utils.clip_grad_norm_`. Servers have no connections to each other, so the coordinator computes the
# sum; this takes one round trip.
#
# Reports belong together if their means have a push in common. If no worker is lost, the means of all shards
# contain the same pushes, and every shard reports. If a worker is lost while it sends a push, some shards may have
# received the push, and other shards may not. A mean that consists of such pushes may exist at only some of the shards.
# Therefore, as soon as a push of a lost worker is in a reported mean, the shards that have not reported are asked
# (`MeanAwaited`). A shard answers with `MeanMissing` if it will not report a mean with any of these pushes; its part
# then counts as 0. The parts of a lost server's shards that were not reported count as 0, too. So no shard waits
# forever, and all shards that apply the mean use the same factor.
#
# The squared norms are computed in double precision. In virtual time, these messages take no time.

LEAST_DIVISOR = 1e-6
"""This value is added to the norm, and max_norm is divided by the sum, as in `torch.nn.utils.clip_grad_norm_`."""


def clip_factor(max_norm: float, norm: float) -> float:
    """Return the factor by which a gradient with this L2 norm must be multiplied.

    >>> clip_factor(1.0, 0.5), round(clip_factor(1.0, 4.0), 4)
    (1.0, 0.25)
    """
    return min(1.0, max_norm / (norm + LEAST_DIVISOR))


@stateful()
class JointMean:
    """The parts of one mean that have been reported so far."""

    def __init__(self, report: MeanMeasured) -> None:
        self.pushes = set(report.pushes)  # all pushes in the reported parts
        self.reports = [report]
        self.missing: set[int] = set()  # shards that have no part of this mean
        self.asked = False  # True if the shards that have not reported were asked whether they will report


@stateful(fixed="_placement _shards")
class JointNorms:
    """The means that have been measured by some shards, but not yet by all.

    Args:
        placement: the servers of the shards.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._shards = len(placement.shards)
        self._open: list[JointMean] = []
        self._lost: set[int] = set()  # all workers that have ever been lost
        self._gone: set[int] = set()  # shards of lost servers

    def measured(self, report: MeanMeasured) -> list[Request]:
        """Process a shard's report of the squared norm of its part of a mean."""
        mean = JointMean(report)
        for other in [other for other in self._open if not mean.pushes.isdisjoint(other.pushes)]:
            self._open.remove(other)
            mean.pushes |= other.pushes
            mean.reports += other.reports
            mean.missing |= other.missing
            mean.asked |= other.asked
        self._open.append(mean)
        return self._complete(mean) or self._ask(mean)

    def missing(self, report: MeanMissing) -> list[Request]:
        """Process a shard's report that it has no part of a mean."""
        for mean in self._open:
            if not mean.pushes.isdisjoint(report.pushes):
                mean.missing.add(report.shard)
                return self._complete(mean)
        return []

    def lost(self, worker: int) -> list[Request]:
        """Record that a worker is lost. If its push is in a mean, ask the shards that have not reported the mean."""
        self._lost.add(worker)
        return [request for mean in self._open for request in self._ask(mean)]

    def lose_server(self, server: int) -> list[Request]:
        """Record that a server is lost. Its shards have no part of a mean that they have not reported."""
        self._gone.update(self._placement.shards_of(server))
        return [request for mean in self._open.copy() for request in self._complete(mean)]

    def _ask(self, mean: JointMean) -> list[Request]:
        if mean.asked or not any(worker in self._lost for worker, _ in mean.pushes):
            return []
        mean.asked = True
        pushes = tuple(sorted(mean.pushes))
        reported = {report.shard for report in mean.reports}
        return [
            self._send(shard, MeanAwaited(shard, pushes))
            for shard in self._placement.shards
            if shard not in reported
        ]

    def _complete(self, mean: JointMean) -> list[Request]:
        """If every shard has reported, return the requests that send the factor to the shards with a mean."""
        reports = sorted(mean.reports, key=lambda report: report.shard)
        if len({report.shard for report in reports} | mean.missing | self._gone) < self._shards:
            return []
        self._open.remove(mean)
        norm = math.sqrt(sum(report.square for report in reports))
        factor = clip_factor(reports[0].max_norm, norm)
        return [
            self._send(report.shard, MeanClipped(report.shard, pushes=report.pushes, factor=factor))
            for report in reports
        ]

    def _send(self, shard: int, message: MeanClipped | MeanAwaited) -> Send:
        return Send(server_peer(self._placement.server_of[shard]), message)


# -- Computes the standing of each update at a shard, for translated hyper-parameters (see `paceline.sync.translation`)
#
# **Share.** The share of an update is the part of a joint batch that its pushes contain. The joint batch consists of
# the usual samples of all live workers (`JointBatch`). So over an epoch, the shares of all updates add up to the number
# of joint batches, even if the last batches are smaller. An update with a push of every live worker is a whole joint
# step, as in one process, whatever the sizes of its batches. The samples of a worker that has left are taken out of the
# joint batch gradually, over a few joint steps (see `RAMP`). So if only one worker is left at the end of a run, its
# pushes do not suddenly become whole steps.
#
# If the model drops pushes, the next update makes up for them: the shares of the dropped pushes are added to the share
# of this update, up to a whole step. Otherwise an epoch would move the weights less far than in one process.
#
# **Delay.** The sum of the shares of a shard's updates is the number of its *joint steps*. The delay of a push is the
# number of joint steps between the time at which its worker received the weights, and the time at which the push is
# applied. The mean of the delays is not known at the beginning of the run, after a worker has joined or left, and after
# the model has changed. In these cases, the mean is predicted: under a model that applies pushes on arrival, with n
# workers, n - 1 pushes of other workers lie between two pushes of a worker, on average over all pushes, however unequal
# the workers are. These pushes make (n - 1) / n joint steps. The prediction counts as much as the measurements of the
# next `WINDOW` joint steps. The reported delay approaches the estimate gradually (see `RAMP`), so the reported delay
# never jumps during the run.

Key = tuple[int, int]
"""A push: (worker, iteration)."""

WINDOW = 16.0
"""Number of joint steps over which delays are averaged: enough for several pushes of a slow worker."""

RAMP = 2.0
"""Time constant, in joint steps, with which the reported delay approaches the estimate, and with which workers that
have left are forgotten."""


@stateful()
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
            counts: True if the push's share of the joint batch is added to the share of the next update. A push
                without a gradient has no share.
        """
        if counts and self._pushes[push][1]:
            self._dropped += self._share([push])
        del self._pushes[push]

    def apply(self, pushes: Sequence[Key], model: SyncModel) -> Standing:
        """Record an update that a model has decided, and return the `Standing` of the update."""
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
