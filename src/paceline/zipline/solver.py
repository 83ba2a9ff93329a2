"""The two entry points: `solve` for arbitrary end times, and `solve_periodic` for workers with a constant pace.

This module maps the names of the methods to their implementations and validates the input once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from numpy.typing import ArrayLike

from ..errors import unknown_name
from .end_times import (
    FEW,
    EndTimes,
    Floats,
    Matrix,
    Progressions,
    Solution,
    checked_matrix,
    checked_progressions,
    whole_times,
)
from .searches import full_grid_scan, grid_scan, naive
from .zipline import narrowest_window, zipline, zipline_opt, zipline_opt_bs


def _auto(times: EndTimes) -> Solution:
    window = narrowest_window(times)
    return Solution(window.wait, window.barrier, times.picks(window.barrier), window.candidates)


METHODS: dict[str, Callable[[Floats], Solution]] = {
    "auto": lambda times: _auto(Matrix(times)),
    "naive": naive,
    "grid-scan": grid_scan,
    "full-grid-scan": full_grid_scan,
    "zipline": zipline,
    "zipline-opt": zipline_opt,
    "zipline-opt-bs": zipline_opt_bs,
}
"""The methods of `solve`: name -> function of the matrix of end times."""


def solve(times: ArrayLike, method: str = "auto") -> Solution:
    """Return the best time for the next barrier, and the iteration after which each worker should stop for it.

    One end time of each worker is picked so that the first worker to arrive waits as briefly as possible for the last.
    All methods except the two grid scans are exact and return the same solution: of all solutions with the shortest
    wait, the one with the earliest barrier. Each worker stops at its latest end time at or before the barrier (the last
    column if several end times are equal).

    Args:
        times: array of shape (n, R), converted to float64: R predicted end times for each of n workers, all in the
            same unit. Each row must be finite and ascending; equal neighbors are allowed.
        method: "auto" is the fastest exact method. The methods of the paper are "naive", "grid-scan",
            "full-grid-scan", "zipline", "zipline-opt" and "zipline-opt-bs". "naive" takes R^n steps.

    Raises:
        ConfigurationError: `times` is not valid, or `method` is unknown.

    Source: Zhao et al., ElasticBSP (2021), Problem 1 and section 5; Corollary 1 for the canonical choice.

    A worker that needs 2 s per iteration and a worker that needs 5 s per iteration both end an iteration at 10 s:

    >>> solution = solve([[2, 4, 6, 8, 10], [5, 10, 15, 20, 25]])
    >>> solution.wait, solution.barrier, solution.picks.tolist()
    (0.0, 10.0, [4, 1])
    """
    if method not in METHODS:
        raise unknown_name("ZipLine method", method, METHODS)
    matrix = checked_matrix(times)
    # With "auto", the search reuses intermediate results of the check of this matrix.
    return _auto(matrix) if method == "auto" else METHODS[method](matrix.times)


def solve_periodic(last: ArrayLike, interval: ArrayLike, lookahead: int) -> Solution:
    """Return the best time for the next barrier, as `solve` does, but for workers with a constant pace.

    The end times of worker p are `last[p] + j * interval[p]` for j = 1..lookahead. Most of these times are usually not
    computed. If `last` and `interval` contain only integers, of any size, the result is exact, and the wait and the
    barrier are integers. Otherwise, the result is exactly what `solve` returns for these end times as float64 numbers
    (`last[:, None] + np.arange(1, lookahead + 1) * interval[:, None]`).

    Args:
        last: array of shape (n,): time of each worker's last push.
        interval: array of shape (n,): duration of each worker's iterations, above 0, in the unit of `last`.
        lookahead: R, the number of iterations to predict, at least 1.

    Raises:
        ConfigurationError: an argument is not valid, or an end time would not be finite.

    Source: Zhao et al., ElasticBSP (2021), section 4, which defines this prediction.

    >>> solution = solve_periodic(last=[0, 0], interval=[2, 5], lookahead=15)
    >>> solution.wait, solution.barrier, solution.picks.tolist()
    (0, 10, [4, 1])
    """
    whole = whole_times(last, interval)
    if whole is None:
        return _periodic(checked_progressions(last, interval, lookahead))
    times = checked_progressions(whole.base, whole.interval, lookahead)
    if not whole.fit(lookahead):
        whole = whole.reduced()
        if not whole.fit(lookahead):
            return whole.restored(whole.search(lookahead))
        times = checked_progressions(whole.base, whole.interval, lookahead)
    return whole.restored(_periodic(times))


def _periodic(times: Progressions) -> Solution:
    # If there are few end times, it is faster to build the whole matrix.
    if len(times.base) * times.lookahead <= FEW:
        return _auto(Matrix(times.rows(slice(None))))
    return _auto(times)
