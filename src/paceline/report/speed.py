"""The unit in which the speeds of runs are compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

__all__ = ["speed_unit"]


def speed_unit(samples_per_s: Iterable[float]) -> Literal["samples", "gradients"]:
    """Return the unit in which runs are compared: samples if their number is known for every run, else gradients.

    Updates are never the unit, because an update contains one gradient under some sync models and one gradient of
    each worker under others.

    Args:
        samples_per_s: the samples per second of each run; 0 if they are unknown.

    >>> speed_unit([800.0, 1200.0]), speed_unit([800.0, 0.0])
    ('samples', 'gradients')
    """
    return "samples" if all(samples_per_s) else "gradients"
