"""Handwritten digits: the data, a small network, and the training function that every worker runs.

The 1,797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. The launcher loads them and
hands them to the workers as tensors; a worker never imports scikit-learn.
"""

from __future__ import annotations

import itertools
import time

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..errors import ConfigurationError
from ..frontend.data import distribute
from ..frontend.optimizer import DistributedOptimizer

__all__ = ["Digits", "DigitsNet", "Recipe", "accuracy", "load", "train"]

TEST_SHARE = 0.2
SPLIT_SEED = 0
CLASSES = 10
BRIGHTEST = 16.0  # the pixels' own scale is 0 to 16


class Digits(msgspec.Struct, frozen=True):
    """The images, split.

    Attributes:
        train_images: float32 (n, 1, 8, 8), from 0 to 1.
        train_labels: int64 (n,), from 0 to 9.
        test_images: likewise, none of them in the training part.
        test_labels: likewise.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker trains.

    Attributes:
        learning_rate: of SGD.
        momentum: of SGD; 0 for none.
        batch_size: images per worker and iteration.
        duration_s: it goes on with pass after pass over its part until so many seconds have gone by; infinity, where
            that is not what ends it.
        iterations: or until it has done so many.
        seed: of the initial weights, which are the same in all workers.
    """

    learning_rate: float
    momentum: float
    batch_size: int
    duration_s: float
    seed: int
    iterations: int | None = None


class DigitsNet(nn.Sequential):
    """Two convolutions and two full layers; 9,802 parameters. Without dropout and batch normalisation, so that
    workers differ in nothing but their data."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 32),
            nn.ReLU(),
            nn.Linear(32, CLASSES),
        )


def load() -> Digits:
    """The digits with their split, the same every time: of each class a fifth is for testing.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            "the handwritten digits come with scikit-learn, which is not installed: pip install 'paceline[demo]'"
        ) from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).to(torch.float32).unsqueeze(1) / BRIGHTEST
    labels = torch.from_numpy(raw.target).to(torch.int64)
    test = _test_part(labels)
    return Digits(images[~test], labels[~test], images[test], labels[test])


def train(digits: Digits, recipe: Recipe) -> None:
    """Train until the time is up: what each worker of a run does.

    Workers stop by the clock and not after equal numbers of epochs: each sync model gets the same time, and
    nobody trains alone at the end because the others are through.
    """
    torch.manual_seed(recipe.seed)
    model = DigitsNet()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum), model=model
    )
    images = TensorDataset(digits.train_images, digits.train_labels)
    part = distribute(DataLoader(images, recipe.batch_size, shuffle=True, drop_last=True))
    begun_s: float | None = None
    batches = itertools.chain.from_iterable(itertools.repeat(part))
    for x, y in itertools.islice(batches, recipe.iterations):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        now_s = time.monotonic()
        begun_s = begun_s or now_s  # the first step also waits until every worker is there
        if now_s - begun_s >= recipe.duration_s:
            return


def accuracy(state_dict: dict[str, torch.Tensor], digits: Digits) -> float:
    """The share of the test images, from 0 to 1, that a network with these weights names rightly."""
    model = DigitsNet()
    model.load_state_dict(state_dict)
    with torch.inference_mode():
        named = model(digits.test_images).argmax(dim=1)
    return float((named == digits.test_labels).float().mean())


def _test_part(labels: torch.Tensor) -> torch.Tensor:
    """A mask of the test images: of every class the same share, drawn from a seed of its own."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(CLASSES):
        (of_class,) = torch.nonzero(labels == digit, as_tuple=True)
        shuffled = of_class[torch.randperm(len(of_class), generator=generator)]
        test[shuffled[: round(TEST_SHARE * len(of_class))]] = True
    return test
