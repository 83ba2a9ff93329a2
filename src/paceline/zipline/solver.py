"""The two questions a caller can ask: `solve` for any end times, `solve_periodic` for steady workers.

Owns the names of the methods and which of them answers; checks the input once, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from numpy.typing import ArrayLike

from ..errors import unknown_name
from . import sweep
from .end_times import EndTimes, Floats, Matrix, checked_matrix, checked_progressions
from .grid_scan import full_grid_scan, grid_scan
from .naive import naive
from .solution import Solution
from .zipline import zipline
from .zipline_opt import zipline_opt, zipline_opt_bs

__all__ = ["METHODS", "solve", "solve_periodic"]


def _auto(times: EndTimes) -> Solution:
    window = sweep.narrowest_window(times)
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


def solve(times: ArrayLike, method: str = "auto") -> Solution:
    """When the next barrier should fall, and with which iteration each worker should stop for it.

    Picks one end time of each worker so that the first to arrive waits as little as possible for the last. All
    methods but the two grid scans are exact and answer the same: the least wait, then the earliest barrier, then
    each worker's latest end time not after it (the latest column among equal ones).

    Args:
        times: (n, R) numbers, converted to float64: predicted end times of n workers, R each, in any one unit.
            Each row must be finite and ascending; equal neighbours are allowed.
        method: "auto" is the fastest exact one. Of the paper: "naive", "grid-scan", "full-grid-scan", "zipline",
            "zipline-opt", "zipline-opt-bs". "naive" takes R^n steps.

    Raises:
        ConfigurationError: `times` is none of that, or there is no such method.

    Source: Zhao et al., ElasticBSP (2021), Problem 1 and section 5; canonical choice: Corollary 1.

    A fast worker that ends an iteration every 2 s and one that needs 5 s are closest together at 10 s:

    >>> solution = solve([[2, 4, 6, 8, 10], [5, 10, 15, 20, 25]])
    >>> solution.wait, solution.barrier, solution.picks.tolist()
    (0.0, 10.0, [4, 1])
    """
    if method not in METHODS:
        raise unknown_name("ZipLine method", method, METHODS)
    matrix = checked_matrix(times)
    return _auto(matrix) if method == "auto" else METHODS[method](matrix.times)


def solve_periodic(last: ArrayLike, interval: ArrayLike, lookahead: int) -> Solution:
    """`solve` for workers that keep their pace: worker p ends at `last[p] + j * interval[p]`, j = 1..lookahead.

    The answer is exactly that of `solve` on these end times as float64 numbers
    (`last[:, None] + np.arange(1, lookahead + 1) * interval[:, None]`), of which only a part is ever built.

    Args:
        last: (n,) numbers, each worker's last push, in any one unit.
        interval: (n,) numbers above 0, how long each worker's iterations take, in the same unit.
        lookahead: R, how many iterations ahead to look, at least 1.

    Raises:
        ConfigurationError: the arguments are none of that, or an end time would not be finite.

    Source: Zhao et al., ElasticBSP (2021), section 4, whose prediction this is.

    >>> solution = solve_periodic(last=[0, 0], interval=[2, 5], lookahead=15)
    >>> solution.wait, solution.barrier, solution.picks.tolist()
    (0.0, 10.0, [4, 1])
    """
    times = checked_progressions(last, interval, lookahead)
    # So few are cheaper built than asked one by one.
    if len(times.base) * lookahead <= sweep.FEW:
        return _auto(Matrix(times.rows(slice(None))))
    return _auto(times)
