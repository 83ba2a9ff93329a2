"""Baselines to compare ZipLine with: barriers that are chosen without optimization.

Source: Zhao et al., ElasticBSP (2021), Fig. 4 (`bsp_d` and `rnd_d`). The paper does not say how its random barrier
is drawn. We draw it uniformly from the barriers that ZipLine considers: all end times by which every worker has ended
at least one iteration. Each worker stops at its latest end time at or before the barrier.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .end_times import checked_times
from .solution import Solution, solution_at

__all__ = ["bsp_barrier", "random_barrier"]


def bsp_barrier(times: ArrayLike) -> Solution:
    """Return the solution of BSP: every worker stops at the end of its next iteration (column 0).

    `times` is an (n, R) array as for `solve`.

    >>> bsp_barrier([[2, 4, 6], [5, 10, 15]]).wait
    3.0
    """
    first = checked_times(times)[:, 0]
    barrier = float(first.max())
    return Solution(barrier - float(first.min()), barrier, np.zeros(len(first), dtype=np.intp), 1)


def random_barrier(times: ArrayLike, generator: np.random.Generator) -> Solution:
    """Return the solution for a random barrier, drawn with `generator`. `times` is an (n, R) array as for `solve`.

    >>> random_barrier([[2, 4, 6], [5, 10, 15]], np.random.default_rng(0)).barrier in (5.0, 6.0, 10.0, 15.0)
    True
    """
    matrix = checked_times(times)
    barriers = matrix[matrix >= matrix[:, 0].max()]
    return solution_at(matrix, generator.choice(barriers), 1)
