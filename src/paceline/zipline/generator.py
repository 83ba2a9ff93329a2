"""The paper's synthetic workers, on which its solvers are measured.

Worker p has an interval i_p, uniform in 1000-1500 ms, and a start s_p, uniform in 10-50 ms; its j-th push is at
j * i_p + s_p. All run until a common moment, 20 s, which takes them out of the phase in which they started; from
the last two pushes the next R are predicted.

Source: Zhao et al., ElasticBSP (2021), section 6.1. Our reading: a worker's newest push is its first one at or after
the common moment, which is what the spread of the newest pushes in the data that the authors published looks like.
"""

from __future__ import annotations

import numpy as np

from .end_times import Floats

__all__ = ["generate_pushes"]


def generate_pushes(
    worker_count: int,
    generator: np.random.Generator,
    *,
    interval_ms: tuple[float, float] = (1000.0, 1500.0),
    warm_up_ms: float = 20_000.0,
) -> Floats:
    """The last two pushes of each worker, (worker_count, 2) float64, in ms; what a `Predictor` takes.

    Args:
        worker_count: n.
        generator: where the intervals and starts are drawn from; the same seed gives the same workers.
        interval_ms: the range of the intervals.
        warm_up_ms: the common moment. With 0, each worker has just pushed twice.

    >>> pushes = generate_pushes(3, np.random.default_rng(0))
    >>> pushes.shape, bool((pushes[:, 1] >= 20_000).all())
    ((3, 2), True)
    """
    interval = generator.uniform(*interval_ms, worker_count)
    start = generator.uniform(10.0, 50.0, worker_count)
    # The first push at or after the warm-up, but two at least.
    newest = np.maximum(np.ceil((warm_up_ms - start) / interval), 2)
    return np.stack([start + (newest - 1) * interval, start + newest * interval], axis=1)
