"""When the next barrier should fall: predicted end times in, the narrowest window out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Solution", "solve", "solve_periodic"]


@dataclass(frozen=True, eq=False)
class Solution:
    """One end time per worker."""

    wait: float
    barrier: float
    picks: NDArray[np.intp]
    candidates: int


def solve(times: ArrayLike, method: str = "auto") -> Solution:
    """The narrowest window that holds an end time of every worker."""
    matrix = np.asarray(times, dtype=float)
    following = np.full_like(matrix, np.inf)
    following[:, :-1] = matrix[:, 1:]
    flat = matrix.ravel()
    order = flat.argsort()
    start = flat[order]
    end = np.empty_like(start)
    end[0] = matrix[:, 0].max()
    end[1:] = following.ravel()[order[:-1]]
    np.maximum.accumulate(end, out=end)
    best = int((end - start).argmin())
    barrier = float(end[best])
    picks = np.count_nonzero(matrix <= barrier, axis=1) - 1
    return Solution(barrier - float(start[best]), barrier, picks, flat.size)


def solve_periodic(last: ArrayLike, interval: ArrayLike, lookahead: int) -> Solution:
    """The same for end times `last + j * interval`, j = 1..lookahead."""
    steps = np.arange(1, lookahead + 1)
    return solve(np.asarray(last, float)[:, None] + steps * np.asarray(interval, float)[:, None])
