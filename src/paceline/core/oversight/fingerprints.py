"""Finds workers that compute the same gradients, because they use the same data.

Workers whose script does not distribute its data report a hash of their gradient in each of their first iterations.
All workers start from the same weights, so gradients that are equal in the first iteration come from equal data. If
the sync model keeps the workers in lockstep, their weights remain the same, so later gradients are compared, too.
"""

from __future__ import annotations

from collections.abc import Collection

from ...state import stateful
from ..protocol.messages import GradientHashed

__all__ = ["HASHED_ITERATIONS", "Fingerprints"]

HASHED_ITERATIONS = 3
"""Number of iterations whose gradients are hashed."""

NAMED = 8  # maximum number of workers that a message names


@stateful(decides="_hashes _compared")
class Fingerprints:
    """Compares the hashes that the workers of a run report, once."""

    def __init__(self) -> None:
        self._hashes: dict[int, list[str]] = {}  # worker -> its hashes, by iteration
        self._compared = False

    def take(self, worker: int, message: GradientHashed, live: Collection[int], *, lockstep: bool) -> str:
        """Store a worker's hash. When the last one has arrived, compare them.

        Args:
            worker: the worker that sent the message.
            message: the message. A worker whose messages are out of order is not compared.
            live: the workers that take part and have not left.
            lockstep: True if the sync model keeps all workers in lockstep.

        Returns:
            A description of the workers that compute the same gradients; "" if there are none, or not all hashes
            have arrived.
        """
        hashes = self._hashes.setdefault(worker, [])
        if message.iteration == len(hashes) < HASHED_ITERATIONS:
            hashes.append(message.gradient)
        complete = [each for each in sorted(self._hashes) if len(self._hashes[each]) == HASHED_ITERATIONS]
        if self._compared or not set(live) <= set(complete) or len(complete) < 2:
            return ""
        self._compared = True
        compared = HASHED_ITERATIONS if lockstep else 1
        groups: dict[tuple[str, ...], list[int]] = {}
        for each in complete:  # a worker may have left since it sent its hashes
            groups.setdefault(tuple(self._hashes[each][:compared]), []).append(each)
        same = [workers for hashes, workers in groups.items() if len(workers) > 1 and all(hashes)]
        return _report(same[0], compared) if same else ""


def _report(workers: list[int], iterations: int) -> str:
    names = ", ".join(map(str, workers[:NAMED])) + (", ..." if len(workers) > NAMED else "")
    when = f"in each of their first {iterations} iterations" if iterations > 1 else "in their first iteration"
    return (
        f"workers {names} compute the same gradients {when}: they train on the same data, so the run is no better "
        "than one with fewer workers. Distribute the loader with paceline.prepare or paceline.distribute, or give "
        "each worker its own part of the data, or its own seed, by paceline.worker_index()."
    )
