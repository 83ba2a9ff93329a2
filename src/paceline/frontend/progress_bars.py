"""Progress bars over a loader whose data is handed out dynamically.

A bar takes `len()` of the loader for the number of batches. But with a dynamic split, a fast worker receives more
batches and a slow one fewer. tqdm would then drop the bar of a fast worker, and never fill that of a slow one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["bars_over", "expected_batches"]


def bars_over(loader: object) -> Sequence[Any]:
    """Return the bars of tqdm that iterate over a loader.

    Their attribute `total` is the expected number of batches.
    """
    tqdm = sys.modules.get("tqdm.std")  # if the script has not imported tqdm, there are no bars
    return [bar for bar in tqdm.tqdm._instances if bar.iterable is loader] if tqdm else []


def expected_batches(drawn: int, begun: int, rounds: int) -> int:
    """Return how many batches a worker will have drawn at the end of an epoch, if all speeds stay as they are.

    Args:
        drawn: number of batches that the worker has drawn in this epoch.
        begun: number of joint batches of this epoch that the job has begun.
        rounds: number of joint batches of the epoch.

    >>> expected_batches(drawn=15, begun=10, rounds=50)  # the worker is 1.5 times faster than the mean
    75
    """
    return max(drawn, round(drawn * max(rounds, begun) / begun))
