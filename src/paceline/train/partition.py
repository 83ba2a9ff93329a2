"""Unequal shares of a dataset, in which each worker has its own mixture of labels."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigurationError, first_line

if TYPE_CHECKING:
    from torch import Tensor


def partition(
    labels: Sequence[int] | np.ndarray | Tensor,
    workers: int,
    *,
    dirichlet: float | None = None,
    shards: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Divide a dataset among workers whose data differ, and return the indices of the samples of each worker.

    Every sample belongs to exactly one worker. The result depends only on the arguments, so all workers of a live run
    and of a simulation compute the same division, and each worker keeps its own data in all epochs. Load this data with
    an ordinary `DataLoader`, not with `paceline.distribute`, which would divide it among all workers.

    Args:
        labels: the label of each sample, in one dimension.
        workers: number of workers.
        dirichlet: concentration of the mixture of labels. The samples of each label are divided in proportions that
            are drawn from a symmetric Dirichlet distribution. 0.1 gives a worker samples of few labels, and 100 gives
            it almost equally many of all labels (Hsu, Qi and Brown, 2019).
        shards: number of pieces for each worker. The samples are sorted by label and cut into `workers * shards`
            pieces, whose sizes differ by at most one sample. The pieces are dealt out at random (McMahan and others,
            2017). Give either `dirichlet` or `shards`.
        seed: random seed.

    Returns:
        For each worker, the indices of its samples, in ascending order.

    Raises:
        ConfigurationError: an argument is not valid, or a worker would get no sample.

    Example:
        >>> parts = partition([0, 0, 0, 0, 1, 1, 1, 1], workers=2, shards=1)
        >>> sorted(parts)
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    try:
        found = np.asarray(labels)
    except ValueError as error:
        raise ConfigurationError(f"labels cannot be converted to an array: {first_line(error)}") from error
    if found.ndim != 1 or not found.size:
        raise ConfigurationError(
            f"labels has the shape {found.shape}, expected one label for each sample, in one dimension."
        )
    _require_whole("workers", workers, 1, found.size, f"from 1 to the number of samples, {found.size}")
    if (dirichlet is None) == (shards is None):
        raise ConfigurationError(
            "expected either dirichlet or shards, for example partition(..., dirichlet=0.3)."
        )
    _require_whole("seed", seed, 0, inf, ">= 0")
    generator = np.random.default_rng(seed)
    if dirichlet is not None:
        parts = _by_proportions(found, workers, dirichlet, generator)
    else:
        assert shards is not None
        parts = _by_pieces(found, workers, shards, generator)
    if empty := [worker for worker, part in enumerate(parts) if not part]:
        raise ConfigurationError(
            f"worker {empty[0]} would get none of the {found.size} samples. Use a larger value of dirichlet, fewer "
            "workers, or another seed."
        )
    return parts


def _require_whole(name: str, value: object, least: int, most: float, range_in_words: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(f"{name} is {value!r}, expected a whole number {range_in_words}.")


def _by_proportions(
    labels: np.ndarray, workers: int, concentration: float, generator: np.random.Generator
) -> list[list[int]]:
    if not (isinstance(concentration, int | float) and 0 < concentration < float("inf")):
        raise ConfigurationError(f"dirichlet is {concentration!r}, expected a number > 0, for example 0.3.")
    parts: list[list[int]] = [[] for _ in range(workers)]
    for label in np.unique(labels):
        samples = generator.permutation(np.flatnonzero(labels == label))
        proportions = generator.dirichlet([float(concentration)] * workers)
        ends = np.round(np.cumsum(proportions)[:-1] * samples.size).astype(int)
        for part, own in zip(parts, np.split(samples, ends), strict=True):
            part += own.tolist()
    return [sorted(part) for part in parts]


def _by_pieces(
    labels: np.ndarray, workers: int, shards: int, generator: np.random.Generator
) -> list[list[int]]:
    most = labels.size // workers
    _require_whole("shards", shards, 1, most, f"from 1 to {most}, the number of samples per worker")
    pieces = np.array_split(np.argsort(labels, kind="stable"), workers * shards)
    dealt = generator.permutation(len(pieces)).reshape(workers, shards)
    return [sorted(np.concatenate([pieces[piece] for piece in own]).tolist()) for own in dealt]
