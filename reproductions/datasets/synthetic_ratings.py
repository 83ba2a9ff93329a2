"""Synthetic ratings that stand in for MovieLens 100k: the same numbers of users, items and ratings."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

from .images import Images

USERS, ITEMS, RATINGS, TEST = 943, 1682, 100_000, 10_000
RANK, NOISE = 5, 0.5


def synthetic_ratings() -> Images:
    """Return pairs (user, item) with ratings: a matrix of rank 5 with noise, of which 100,000 entries are observed.

    Few items have many ratings and most have few, as in MovieLens: the popularity of items, and the number of ratings
    of a user, are log-normal. Ratings are centered, with a variance of about 1.25.

    The entries are drawn with NumPy, because the draws of `torch.multinomial` depend on the number of threads.

    >>> ratings = synthetic_ratings()
    >>> len(ratings.train), len(ratings.test)
    (90000, 10000)
    """
    generator = np.random.default_rng(0)
    users, items = (generator.standard_normal((count, RANK)) for count in (USERS, ITEMS))
    popularity = np.add.outer(
        generator.standard_normal(USERS), 1.5 * generator.standard_normal(ITEMS)
    ).ravel()
    # The largest sums of a logarithm of a weight and a Gumbel variable are a weighted sample without replacement.
    chosen = np.argpartition(-popularity - generator.gumbel(size=popularity.size), RATINGS)[:RATINGS]
    user, item = np.divmod(generator.permutation(np.sort(chosen)), ITEMS)
    true = (users[user] * items[item]).sum(axis=1) / RANK**0.5
    pairs = torch.from_numpy(np.stack([user, item], axis=1))
    ratings = torch.from_numpy((true + NOISE * generator.standard_normal(RATINGS)).astype(np.float32))
    return Images(
        TensorDataset(pairs[TEST:], ratings[TEST:]),
        TensorDataset(pairs[:TEST], ratings[:TEST]),
    )
