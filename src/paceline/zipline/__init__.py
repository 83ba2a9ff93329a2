"""Compute the best time for the next barrier from the predicted end times of the workers' iterations.

Workers of different speeds end their iterations at different times. Suppose that the end times of the next R
iterations have been predicted for each of n workers. Let Z be a set that contains one end time of each worker. If the
workers stop at these end times, the first worker to arrive waits d_Z = max(Z) - min(Z) for the last. ZipLine finds
the set Z with the smallest d_Z, so that the barrier causes as little waiting as possible.

This package has no side effects and no hidden inputs: it uses NumPy, but no clock, no environment variables and no
global random source. All times passed to one call must be in the same unit; any unit works.

- `solve` and `solve_periodic` return a `Solution`, computed by a fast exact search. `solve` can also use the
  paper's methods.
- `LastInterval`, `MeanInterval` and `MedianInterval` compute the input of `solve_periodic` from the times of pushes.
- `candidate_waits` returns the values of d_Z in the order in which ZipLine computes them (Figs. 6 and 7).
- `generate_pushes` creates the paper's synthetic workers; `bsp_barrier` and `random_barrier` are simple baselines.

Source: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine
Learning (2021), sections 4 to 6.1. The modules cite this paper as "ElasticBSP (2021)".

>>> import numpy as np
>>> pushes = generate_pushes(10, np.random.default_rng(0))
>>> solve_periodic(*LastInterval()(pushes), lookahead=15).picks.shape
(10,)

Read first: `end_times` (the input), then `zipline`.

Imports from `errors`.
"""

from .end_times import Solution
from .prediction import LastInterval, MeanInterval, MedianInterval, Predictor, generate_pushes
from .searches import bsp_barrier, random_barrier
from .solver import METHODS, solve, solve_periodic
from .zipline import candidate_waits

__all__ = [
    "METHODS",
    "LastInterval",
    "MeanInterval",
    "MedianInterval",
    "Predictor",
    "Solution",
    "bsp_barrier",
    "candidate_waits",
    "generate_pushes",
    "random_barrier",
    "solve",
    "solve_periodic",
]
