"""Synthetic ratings that stand in for MovieLens 100k: the same numbers of users, items and ratings."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from ..datasets import Images

__all__ = ["ITEMS", "USERS", "synthetic_ratings"]

USERS, ITEMS, RATINGS, TEST = 943, 1682, 100_000, 10_000
RANK, NOISE = 5, 0.5


def synthetic_ratings(seed: int = 0) -> Images:
    """Return pairs (user, item) with ratings: a matrix of rank 5 with noise, of which 100,000 entries are observed.

    Few items have many ratings and most have few, as in MovieLens: the popularity of items, and how much a user
    rates, are log-normal. Ratings are centered, with a variance of about 1.25.

    >>> synthetic_ratings().train[0]
    (tensor([  0, 190]), tensor(0.9077))
    """
    generator = torch.Generator().manual_seed(seed)
    users, items = (torch.randn(count, RANK, generator=generator) for count in (USERS, ITEMS))
    popular = torch.outer(
        torch.randn(USERS, generator=generator).exp(), (1.5 * torch.randn(ITEMS, generator=generator)).exp()
    )
    chosen = torch.multinomial(popular.flatten(), RATINGS, generator=generator)
    pairs = torch.stack([chosen // ITEMS, chosen % ITEMS], dim=1)
    true = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(dim=1) / RANK**0.5
    ratings = true + NOISE * torch.randn(RATINGS, generator=generator)
    return Images(
        TensorDataset(pairs[TEST:], ratings[TEST:]),
        TensorDataset(pairs[:TEST], ratings[:TEST]),
    )
