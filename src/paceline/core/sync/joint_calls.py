"""Barriers, reductions and extensions: calls that every worker's script makes, and that end together in all workers.

A worker that makes such a call sends a `Contributed` and waits for a `Combined`. A call ends when every live worker
has made it. So at most one call is in progress, and each worker is in it or has yet to reach it. A worker that
finishes or is lost is no longer waited for. What a worker contributed before it was lost is not used, so the result
is over the workers that receive it. The numbers are added in the order of the workers' indices, in float64, so the
result does not depend on the order in which the contributions arrive. A worker whose script has added parameters
contributes the extended model; the call then continues in `core.changes.extension`.

A worker that joins a run in progress makes the calls before its first step alone, because the others have made them
already. It may also begin an epoch after whose end the others have made some of their calls but not all: a reduction,
but not the barrier after a long evaluation. So each call has its place in the series of calls without a step in
between (`Contributed.since_step`). The worker that joined makes the calls alone that the others have behind them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping

import msgspec

from ...errors import ProtocolError
from ...state import stateful
from ..protocol.messages import Combined, Contributed, StandInAllowed
from ..protocol.model_spec import ModelSpec
from ..protocol.requests import Request, Send, worker_peer

__all__ = ["LIMIT_BYTES", "Collectives", "combine"]

ITEM_BYTES = 8

LIMIT_BYTES = 1024 * 1024
"""Maximum size of the numbers in one reduction, 8 bytes each."""


@stateful(decides="waiting uneven grown", fixed="_extend", about={"grown": "scripts"})
class Collectives:
    """The call that is in progress.

    Args:
        extend: function that begins an extension, given the extended model of each worker.

    Attributes:
        waiting: the contribution of each worker that has made the call and waits for the others.
        uneven: True once workers may push in lockstep without a gradient while they wait.
        grown: True once a worker has joined a run in progress. In lockstep, workers then end their epochs at
            different iterations.
    """

    def __init__(self, extend: Callable[[Mapping[int, ModelSpec]], list[Request]]) -> None:
        self.waiting: dict[int, Contributed] = {}
        self.uneven = self.grown = False
        self._extend = extend

    def contributed(self, worker: int, message: Contributed, live: Collection[int]) -> list[Request]:
        """Handle the call of a worker that is not in a call. If every live worker has made the call, end it.

        Raises:
            ProtocolError: the message contains a part of a number.
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
        """Handle a worker that has finished or was lost; `live` no longer contains it."""
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
        divisor += weight
        numbers = array("d", contributions[worker].numbers)
        total = array("d", [each + weight * number for each, number in zip(total, numbers, strict=True)])
    if one.op == "mean":
        total = array("d", [number / divisor if divisor else float("nan") for number in total])
    return Combined(total.tobytes())
