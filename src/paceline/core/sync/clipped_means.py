"""Holds back the requests of a shard, from a mean that is clipped on, until the mean's factor is known.

The norm of a joint gradient is known only when every shard has computed its part of the mean. Therefore a shard first
asks its host to measure the mean, and reports the squared norm to the coordinator (`core.sync.joint_norms`). Until
the coordinator returns the factor, the shard keeps the update and everything that its sync model decides afterwards,
in order. So the model does not notice the delay: its events and actions are the same as without clipping. A worker
whose answer is kept cannot push again, so a shard keeps at most a few requests for each worker.

A push that is applied on arrival needs none of this: it is multiplied by the factor that its worker has computed from
its own gradient. Its commit carries this factor, and the largest norm for the mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from ...errors import InvalidEventError
from ...state import stateful
from ..protocol.messages import Answer
from ..protocol.requests import Apply, Measure, Request, Send, worker_peer

__all__ = ["ClippedMeans"]

Pushes = tuple[tuple[int, int], ...]
"""The (worker, iteration) of each push in a mean."""


@stateful(decides="measured _kept")
class ClippedMeans:
    """The measured means of one shard, and the requests that wait for their factors.

    Attributes:
        measured: the pushes of each mean whose factor is unknown, in the order in which the means were measured.
    """

    def __init__(self) -> None:
        self.measured: list[Pushes] = []
        self._kept: deque[Request] = deque()

    @property
    def kept_updates(self) -> int:
        """The number of updates that are kept."""
        return sum(type(request) is Apply for request in self._kept)

    @property
    def kept_answers(self) -> set[int]:
        """The workers whose answers are kept."""
        return {
            request.to.index
            for request in self._kept
            if type(request) is Send and type(request.message) is Answer
        }

    def measure(self, update: Apply, max_norm: float) -> list[Request]:
        """Return the requests that measure a mean, and then apply it."""
        self.measured.append(update.pushes)
        return [Measure(update.shard, update.pushes, update.scales, max_norm), update]

    def pass_on(self, requests: Iterable[Request]) -> list[Request]:
        """Return those of a shard's new requests that the host may carry out now, and keep the others."""
        ready: list[Request] = []
        for request in requests:
            if type(request) is Measure or not (self._kept or self._waits(request)):
                ready.append(request)
            else:
                self._kept.append(request)
        return ready

    def clip(self, pushes: Pushes, factor: float) -> list[Request]:
        """Multiply a measured mean by its factor. Return the requests that are no longer kept.

        Raises:
            InvalidEventError: no such mean was measured. The state is unchanged.
        """
        if pushes not in self.measured:
            raise InvalidEventError(f"a factor for the mean of the pushes {pushes}, which was not measured")
        self.measured.remove(pushes)
        self._kept = deque(
            _scaled(request, factor) if type(request) is Apply and request.pushes == pushes else request
            for request in self._kept
        )
        ready: list[Request] = []
        while self._kept and not self._waits(self._kept[0]):
            ready.append(self._kept.popleft())
        return ready

    def leave(self, worker: int) -> None:
        """Remove the answers to a worker that has left."""
        peer = worker_peer(worker)
        self._kept = deque(
            request for request in self._kept if not (type(request) is Send and request.to == peer)
        )

    def contain(self, pushes: Sequence[tuple[int, int]]) -> bool:
        """Return True if any of these pushes is in a mean whose factor is unknown."""
        return any(push in mean for mean in self.measured for push in pushes)

    def _waits(self, request: Request) -> bool:
        return type(request) is Apply and request.pushes in self.measured


def _scaled(update: Apply, factor: float) -> Apply:
    return msgspec.structs.replace(update, scales=tuple(scale * factor for scale in update.scales))
