"""Matrix factorization for ratings: a vector for each user and for each item."""

from __future__ import annotations

import torch
from torch import nn


class MatrixFactorization(nn.Module):
    """Predict a rating as the inner product of the user's and the item's vector, plus a constant.

    SpecSync (2018) trains it on MovieLens. Table I says 4.2 million parameters and 100,000 ratings, which is
    MovieLens 100k with its 943 users and 1,682 items: (943 + 1682) x 1600 = 4,200,000. The default rank is derived
    from this number; the paper does not state it.

    Args:
        users: number of users.
        items: number of items.
        rank: length of the vectors.
        mean: the constant, the mean rating of the training set; not trained.
        sparse: True to compute sparse gradients, which contain only the rows of the users and items in the batch.
    """

    def __init__(
        self, users: int = 943, items: int = 1682, rank: int = 1600, mean: float = 0.0, sparse: bool = False
    ) -> None:
        super().__init__()
        self.mean = mean
        self.users = nn.Embedding(users, rank, sparse=sparse)
        self.items = nn.Embedding(items, rank, sparse=sparse)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=rank**-0.5)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return predicted ratings of shape (n,) for an integer tensor of shape (n, 2): indices of users, items."""
        user, item = pairs.unbind(dim=1)
        products: torch.Tensor = self.users(user) * self.items(item)
        return products.sum(dim=1) + self.mean
