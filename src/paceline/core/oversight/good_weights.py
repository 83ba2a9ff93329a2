"""Keeps weights that are certainly good: nothing was wrong when they were taken, and for some time after that.

A divergence is noticed up to 20 updates after it begins. So the weights that are taken now are only a candidate,
until `CONFIRMED` further points have been sound; then they replace the good ones. At most two copies are kept.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from .guard import CONFIRMED, Guard

__all__ = ["GoodWeights"]

Weights = TypeVar("Weights")


class GoodWeights(Generic[Weights]):
    """The last good weights, and the candidate that may replace them.

    Args:
        guard: the guard of the run.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._good: Weights | None = None
        self._candidate: tuple[Weights, int] | None = None  # the weights, and the points that had been judged

    @property
    def wanted(self) -> bool:
        """True if weights that are taken now could become the good ones."""
        self._confirm()
        return self._candidate is None and 0 < self._guard.points == self._guard.sound

    def take(self, weights: Weights) -> None:
        """Take weights as the candidate. Later ones replace those that have not been confirmed."""
        self._candidate = weights, self._guard.points

    @property
    def good(self) -> Weights | None:
        """The last weights that are certainly good; None if there are none."""
        self._confirm()
        return self._good

    def _confirm(self) -> None:
        if self._candidate is None:
            return
        weights, points = self._candidate
        if self._guard.sound >= points + CONFIRMED:
            self._good, self._candidate = weights, None
        elif (
            self._guard.sound < self._guard.points
        ):  # it may have been taken when something was wrong already
            self._candidate = None
