"""The result of every method: one end time per worker.

This module also defines the canonical choice: once the barrier is known, each worker stops at its latest end time at
or before the barrier. If the worker stopped earlier, the set Z would not become narrower, and the worker would wait
although it could have run another iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .end_times import Floats, Indices, Matrix

__all__ = ["Solution", "solution_at"]


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of a solver: a set Z that contains one end time of each worker.

    Attributes:
        wait: d_Z = max(Z) - min(Z), the time that the first worker to arrive waits for the last, in the unit of the
            input.
        barrier: max(Z), the time of the barrier, in the unit of the input.
        picks: integer array of shape (n,) with the column of each worker: worker p stops at `times[p, picks[p]]`.
        candidates: number of sets Z, barriers or windows that the method evaluated.
    """

    wait: float
    barrier: float
    picks: Indices
    candidates: int


def solution_at(times: Floats, barrier: float, candidates: int) -> Solution:
    """Return the canonical solution for a barrier that is not before any worker's first end time.

    `times` is an (n, R) array.
    """
    picks = Matrix(times).picks(barrier)
    earliest = times[np.arange(len(times)), picks].min()
    return Solution(float(barrier - earliest), float(barrier), picks, candidates)
