"""Computes the norm of the joint gradient at the coordinator: the factor by which every shard clips a mean.

Each shard reports the squared norm of its part of a mean (`MeanMeasured`). When all shards have reported, the squares
are added in the order of the shards, and every shard receives the same factor (`MeanClipped`):

    factor = min(1, max_norm / (sqrt(sum of the squares) + 1e-6))

as in `torch.nn.utils.clip_grad_norm_`. Servers have no connections to each other, so the sum is made here; this takes
one round trip.

Reports belong together if their means have a push in common. If no worker is lost, the means of all shards contain
the same pushes, and every shard reports. If a worker is lost while it sends a push, some shards may have received the
push and others not. A mean that consists of such pushes may exist at only some of the shards. Therefore, as soon as a
push of a lost worker is in a reported mean, the shards that have not reported are asked (`MeanAwaited`). A shard
answers with `MeanMissing` if it will not report a mean with any of these pushes; its part then counts as 0. So no
shard waits forever, and all shards that apply the mean use the same factor.

The squared norms are computed in double precision. In virtual time, these messages take no time.
"""

from __future__ import annotations

import math

from ...state import stateful
from ..protocol.messages import MeanAwaited, MeanClipped, MeanMeasured, MeanMissing
from ..protocol.placement import Placement
from ..protocol.requests import Request, Send, server_peer

__all__ = ["JointNorms", "clip_factor"]

LEAST_DIVISOR = 1e-6
"""Added to the norm before max_norm is divided by it, as in `torch.nn.utils.clip_grad_norm_`."""


def clip_factor(max_norm: float, norm: float) -> float:
    """Return the factor by which a gradient with this L2 norm must be multiplied.

    >>> clip_factor(1.0, 0.5), round(clip_factor(1.0, 4.0), 4)
    (1.0, 0.25)
    """
    return min(1.0, max_norm / (norm + LEAST_DIVISOR))


@stateful(decides="pushes reports missing asked")
class JointMean:
    """The parts of one mean that have been reported so far."""

    def __init__(self, report: MeanMeasured) -> None:
        self.pushes = set(report.pushes)  # all pushes in the reported parts
        self.reports = [report]
        self.missing: set[int] = set()  # shards that have no part of this mean
        self.asked = False  # True if the shards that have not reported were asked whether they will


@stateful(decides="_open _lost", fixed="_placement _shards")
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

    def measured(self, report: MeanMeasured) -> list[Request]:
        """Process a shard's report."""
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
        """Handle a lost worker: ask the shards that have not reported a mean with a push of this worker."""
        self._lost.add(worker)
        return [request for mean in self._open for request in self._ask(mean)]

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
        if len({report.shard for report in reports} | mean.missing) < self._shards:
            return []
        self._open.remove(mean)
        norm = math.sqrt(sum(report.square for report in reports))
        factor = clip_factor(reports[0].max_norm, norm)
        return [
            self._send(report.shard, MeanClipped(report.shard, report.pushes, factor)) for report in reports
        ]

    def _send(self, shard: int, message: MeanClipped | MeanAwaited) -> Send:
        return Send(server_peer(self._placement.server_of[shard]), message)
