"""MovieLens 100k (Harper and Konstan, 2015): `ml-100k/u.data`.

Every line is "user, item, rating, time", separated by tabs. Users are numbered from 1 to 943, items from 1 to 1,682,
and ratings are 1 to 5.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from paceline.errors import ConfigurationError

from .images import Images, expect

USERS, ITEMS = 943, 1682
TEST_SHARE = 0.1
SITE = "https://grouplens.org/datasets/movielens/100k"


def read_movielens_100k(folder: Path) -> Images:
    """Read pairs (user, item) with their ratings from the folder that contains `ml-100k`.

    A tenth of the ratings, drawn at random, is the test set. Users and items are numbered from 0.

    Raises:
        ConfigurationError: the file is missing or is not in the published format.
    """
    file = expect(expect(folder, "ml-100k", f"MovieLens 100k, {SITE}"), "u.data", f"MovieLens 100k, {SITE}")
    rows = [_row(file, number, line) for number, line in enumerate(file.read_text().splitlines(), start=1)]
    if not rows:
        raise ConfigurationError(f"{file} is empty. Unpack the archive again.")
    table = torch.tensor(rows)
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    pairs, ratings = table[:, :2] - 1, table[:, 2].to(torch.float32)
    tests = round(TEST_SHARE * len(table))
    return Images(
        TensorDataset(pairs[tests:], ratings[tests:]), TensorDataset(pairs[:tests], ratings[:tests])
    )


def _row(file: Path, number: int, line: str) -> list[int]:
    try:
        user, item, rating, _ = map(int, line.split("\t"))
    except ValueError:
        user = item = rating = 0
    if not (1 <= user <= USERS and 1 <= item <= ITEMS and 1 <= rating <= 5):
        raise ConfigurationError(
            f"{file}, line {number}: expected a user from 1 to {USERS}, an item from 1 to {ITEMS}, a rating from 1 "
            f"to 5 and a time, separated by tabs, not {line!r}."
        )
    return [user, item, rating]
