"""Matrix factorization: ratings with a known structure, which two thin matrices are to reproduce."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paceline.sync.draws import uniform

from .batched import Weights
from .schedules import Gradient

USERS, ITEMS, RANK = 200, 300, 5
WIDTH = 8
OBSERVED = 12_000
BATCH = 64
NOISE = 0.3
REGULARIZATION = 0.01


@cache
def noisy_ratings() -> tuple[Tensor, Tensor]:
    """Return the ratings of all items by all users, and an order in which they are observed. Both are flat.

    All problems share these tensors, and no problem changes them.
    """
    generator = torch.Generator().manual_seed(0)
    users = torch.randn(USERS, RANK, generator=generator)
    items = torch.randn(ITEMS, RANK, generator=generator)
    ratings = users @ items.T / RANK**0.5
    ratings += NOISE * torch.randn(ratings.shape, generator=generator)
    return ratings.flatten(), torch.randperm(USERS * ITEMS, generator=generator)


def drawn_factors(seed: int, spread: float) -> Weights:
    """Return random factors of rank 8, which is more than the rank of the ratings, because these are noisy."""
    generator = torch.Generator().manual_seed(seed)
    counts = {"users": USERS, "items": ITEMS}
    return {name: spread * torch.randn(n, WIDTH, generator=generator) for name, n in counts.items()}


def squared_errors(users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
    """Return the squared error of each rating, given the factors of its user and of its item."""
    return ((users * items).sum(dim=-1) - ratings).square()


def penalized_errors(users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
    """Return the squared error of each rating, plus its squared factors with a small weight."""
    sizes = users.square().sum(dim=-1) + items.square().sum(dim=-1)
    return squared_errors(users, items, ratings) + REGULARIZATION * sizes


class Ratings:
    """The factorization. The validation uses ratings that were not observed."""

    def __init__(self) -> None:
        self._ratings, order = noisy_ratings()
        self._observed, self._held_out = order[:OBSERVED], order[OBSERVED : OBSERVED + 4000]

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        return drawn_factors(seed, 0.5)

    def batch(self, seed: int, gradient: Gradient) -> tuple[Tensor, ...]:
        """Return the positions of ratings, and the ratings."""
        # torch's generator on the CPU uses no more than 32 bits of its seed.
        key = int(uniform(seed, gradient.worker, gradient.iteration) * 2**32)
        chosen = torch.randint(OBSERVED, (BATCH,), generator=torch.Generator().manual_seed(key))
        positions = self._observed[chosen]
        return positions, self._ratings[positions]

    def loss(self, weights: Weights, *batch: Tensor) -> Tensor:
        """Return half of the sum of the squared errors, and of the squared factors with a small weight."""
        positions, ratings = batch
        return 0.5 * penalized_errors(*_factors(weights, positions), ratings).sum()

    def validation(self, weights: Weights) -> Tensor:
        """Return the mean squared error of the held-out ratings."""
        positions = self._held_out
        return squared_errors(*_factors(weights, positions), self._ratings[positions]).mean()


def _factors(weights: Weights, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the user and of the item of each rating. Shape of each: (ratings, width)."""
    return weights["users"][positions // ITEMS], weights["items"][positions % ITEMS]
