"""What every method answers: one end time per worker.

Owns the canonical choice: once the barrier is known, each worker stops with its latest end time not after it.
An earlier one would only make the window wider, and a worker that could have gone on would wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .end_times import Floats, Indices, Matrix

__all__ = ["Solution", "solution_at"]


@dataclass(frozen=True, eq=False)
class Solution:
    """A set Z: one end time of each worker.

    Attributes:
        wait: d_Z = max(Z) - min(Z), how long the first to arrive waits for the last; in the unit of the input.
        barrier: max(Z), when the barrier falls; in the unit of the input.
        picks: (n,) integers, each worker's column: `times[p, picks[p]]` is the end time it stops with.
        candidates: how many d_Z the method evaluated.
    """

    wait: float
    barrier: float
    picks: Indices
    candidates: int


def solution_at(times: Floats, barrier: float, candidates: int) -> Solution:
    """The canonical Z for a barrier that is not before any worker's first end time; `times` is (n, R)."""
    picks = Matrix(times).picks(barrier)
    earliest = times[np.arange(len(times)), picks].min()
    return Solution(float(barrier - earliest), float(barrier), picks, candidates)
