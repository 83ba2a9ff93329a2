"""The synthetic workers with which the paper measures its solvers.

Worker p has an interval i_p, drawn uniformly from 1000-1500 ms, and a start time s_p, drawn uniformly from 10-50 ms.
The j-th push of worker p is at time j * i_p + s_p. All workers first run for a warm-up period of 20 s, after which
they are no longer in phase. The next R pushes of each worker are predicted from the worker's last two pushes.

Source: Zhao et al., ElasticBSP (2021), section 6.1. We assume that the newest push of a worker is its first push at
or after the end of the warm-up, which matches the spread of the newest pushes in the data that the authors published.
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
    """Return the times of the last two pushes of each worker, in ms, as the input of a `Predictor`.

    The result is a float64 array of shape (worker_count, 2).

    Args:
        worker_count: number of workers, n.
        generator: source of the random intervals and start times. The same seed produces the same workers.
        interval_ms: range of the intervals, in ms.
        warm_up_ms: duration of the warm-up, in ms. If it is 0, each worker has pushed exactly twice.

    >>> pushes = generate_pushes(3, np.random.default_rng(0))
    >>> pushes.shape, bool((pushes[:, 1] >= 20_000).all())
    ((3, 2), True)
    """
    interval = generator.uniform(*interval_ms, worker_count)
    start = generator.uniform(10.0, 50.0, worker_count)
    # The number of the first push at or after the end of the warm-up, but at least 2.
    newest = np.maximum(np.ceil((warm_up_ms - start) / interval), 2)
    return np.stack([start + (newest - 1) * interval, start + newest * interval], axis=1)
