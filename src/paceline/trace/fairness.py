"""How evenly the workers contribute to the updates of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key", int, str)

__all__ = ["fairness", "shares_of_updates"]


def shares_of_updates(samples: Mapping[Key, int], gradients: Mapping[Key, int]) -> dict[Key, float]:
    """Return each worker's share of what the updates contain, from 0 to 1.

    Args:
        samples: worker -> number of samples in its gradients that were applied; all 0 if unknown.
        gradients: worker -> number of these gradients, which count if the samples are unknown.

    >>> shares_of_updates({0: 30, 1: 10}, {0: 3, 1: 3})
    {0: 0.75, 1: 0.25}
    """
    counts = samples if any(samples.values()) else gradients
    total = sum(counts.values())
    return {worker: count / total if total else 0.0 for worker, count in counts.items()}


def fairness(shares: Mapping[Key, float]) -> float:
    """Return Jain's index of the shares: 1 if they are equal, 1 / n if one of n workers contributes everything.

    Reference: Jain, Chiu and Hawe, "A quantitative measure of fairness", 1984.

    >>> fairness({0: 0.75, 1: 0.25})
    0.8
    """
    squares = sum(share * share for share in shares.values())
    return sum(shares.values()) ** 2 / (len(shares) * squares) if squares else 1.0
