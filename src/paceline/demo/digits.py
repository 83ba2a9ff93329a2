"""Handwritten digits: the data, a small network, and the training function that every worker runs.

The 1,797 images of 8 x 8 pixels are part of scikit-learn, so nothing is downloaded. The launcher loads the images and
passes them to the workers as tensors, so workers do not import scikit-learn.
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
BRIGHTEST = 16.0  # scikit-learn's pixels range from 0 to 16


class Digits(msgspec.Struct, frozen=True):
    """The images and labels, split into a training set and a test set.

    Attributes:
        train_images: float32 tensor of shape (n, 1, 8, 8) with values from 0 to 1.
        train_labels: int64 tensor of shape (n,) with values from 0 to 9.
        test_images: images of the test set, in the same format. The two sets are disjoint.
        test_labels: labels of the test set, in the same format.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The hyper-parameters and the length of a worker's training.

    A worker trains on its part of each pass over the training set, until the duration or the number of iterations is
    reached.

    Attributes:
        learning_rate: learning rate of SGD.
        momentum: momentum of SGD; 0 disables it.
        batch_size: images per worker and iteration.
        duration_s: training time in seconds; infinity for no limit.
        seed: random seed for the initial weights, which are the same in all workers.
        iterations: number of iterations of the worker; None for no limit.
    """

    learning_rate: float
    momentum: float
    batch_size: int
    duration_s: float
    seed: int
    iterations: int | None = None


class DigitsNet(nn.Sequential):
    """A network with two convolutional and two fully connected layers, 9,802 parameters in total.

    It has no dropout and no batch normalization, so that workers differ only in their data.
    """

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
    """Load the digits and split them. The test set is always the same and contains a fifth of each class.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            "the digits are part of scikit-learn, which is not installed. Run: pip install 'paceline[demo]'"
        ) from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).to(torch.float32).unsqueeze(1) / BRIGHTEST
    labels = torch.from_numpy(raw.target).to(torch.int64)
    test = _test_part(labels)
    return Digits(images[~test], labels[~test], images[test], labels[test])


def train(digits: Digits, recipe: Recipe) -> None:
    """Train as one worker of a run.

    In the demo, workers stop after a fixed time, not after a fixed number of epochs. Thus, each sync model gets the
    same training time, and the slow worker does not train alone after the others have finished.
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
        begun_s = begun_s or now_s  # the first step is not timed, since it includes the wait for all workers
        if now_s - begun_s >= recipe.duration_s:
            return


def accuracy(state_dict: dict[str, torch.Tensor], digits: Digits) -> float:
    """Return the accuracy of a network with these weights on the test images, from 0 to 1."""
    model = DigitsNet()
    model.load_state_dict(state_dict)
    with torch.inference_mode():
        predicted = model(digits.test_images).argmax(dim=1)
    return float((predicted == digits.test_labels).float().mean())


def _test_part(labels: torch.Tensor) -> torch.Tensor:
    """Return the mask that selects the test images: a fifth of each class, and always the same images."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(CLASSES):
        (of_class,) = torch.nonzero(labels == digit, as_tuple=True)
        shuffled = of_class[torch.randperm(len(of_class), generator=generator)]
        test[shuffled[: round(TEST_SHARE * len(of_class))]] = True
    return test
