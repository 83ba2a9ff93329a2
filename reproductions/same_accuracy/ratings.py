"""Matrix factorization by SGD without momentum: ratings with a known structure, which two thin matrices reproduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.layout import HyperParameters

from ..ensembles.problems import Data, Orders, Weights, sgd
from ..ensembles.schedules import Batch
from ..evidence.factors import (
    ITEMS,
    OBSERVED,
    USERS,
    drawn_factors,
    noisy_ratings,
    penalized_errors,
    squared_errors,
)

TESTED = 6000


class Ratings:
    """The factorization. The test uses ratings that were not observed."""

    name = "ratings"
    optimizer = "SGD"
    higher_is_better = False
    chance = 1.0
    rates = tuple(2.0**step for step in range(7))
    samples = OBSERVED
    joint_batch = 240
    epochs = 10

    def __init__(self) -> None:
        self._ratings, order = noisy_ratings()
        self._observed, self._tested = order[: self.samples], order[self.samples : self.samples + TESTED]
        self._orders = Orders(self.samples)

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters of SGD."""
        return sgd(rate)

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        return drawn_factors(seed, 0.7)

    def data(self, seeds: Sequence[int], batch: Batch) -> Data:
        """Return the positions of ratings, and the ratings."""
        positions = self._observed[self._orders.chosen(seeds, batch)]
        return positions, self._ratings[positions]

    def losses(self, weights: Weights, *data: Tensor) -> Tensor:
        """Return half of the mean squared errors, plus half of the squared factors with a small weight."""
        positions, ratings = data
        return 0.5 * penalized_errors(*_factors(weights, positions), ratings).mean(dim=1)

    def quality(self, weights: Weights) -> Tensor:
        """Return the mean squared errors of the ratings that were not observed."""
        factors = _factors(weights, self._tested.expand(len(weights["users"]), -1))
        return squared_errors(*factors, self._ratings[self._tested]).mean(dim=1)


def _factors(weights: Weights, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the user and of the item of each rating. Shape of each: (runs, ratings, width)."""
    runs = torch.arange(len(positions)).unsqueeze(1)
    return (
        functional.embedding(positions // ITEMS + USERS * runs, weights["users"].flatten(0, 1)),
        functional.embedding(positions % ITEMS + ITEMS * runs, weights["items"].flatten(0, 1)),
    )
