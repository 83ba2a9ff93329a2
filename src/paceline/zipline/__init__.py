"""When the next barrier should fall: predicted end times in, a plan out.

Workers of unequal speed end their iterations at unequal times. If each of n workers is predicted to end its next R
iterations at known times, and one end time of each is picked, then the first to arrive waits d_Z = max(Z) - min(Z)
for the last. ZipLine picks the set Z with the least d_Z: that is when a barrier costs least.

Pure: NumPy and nothing else of the outside world, no clock, no environment, no global random source. Times may be
in any one unit.

- `solve`, `solve_periodic`: the answer, a `Solution`, exact and canonical, fast or by one of the paper's methods.
- `LastInterval`, `MeanInterval`, `MedianInterval`: from recent pushes to what `solve_periodic` takes.
- `candidate_waits`: every d_Z that ZipLine evaluates, in order (Figs 6 and 7).
- `generate_pushes`, `bsp_barrier`, `random_barrier`: the paper's synthetic workers, and what to compare with.

Source: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine
Learning (2021), sections 4 to 6.1; "ElasticBSP (2021)" in the modules.

>>> import numpy as np
>>> pushes = generate_pushes(10, np.random.default_rng(0))
>>> solve_periodic(*LastInterval()(pushes), lookahead=15).picks.shape
(10,)
"""

from .baselines import bsp_barrier, random_barrier
from .generator import generate_pushes
from .prediction import LastInterval, MeanInterval, MedianInterval, Predictor
from .solution import Solution
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
