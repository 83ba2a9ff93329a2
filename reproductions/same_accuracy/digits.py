"""Two networks on scikit-learn's digits: a multilayer perceptron, and a convolutional network with BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.layout import HyperParameters
from paceline.lab import demo

from ..ensembles.problems import Data, Orders, Weights, sgd
from ..ensembles.schedules import Batch

digits = cache(demo.load)
"""Returns the images and labels, which all problems share and no problem changes."""


class Digits:
    """What both networks have in common (see `Problem`), with the images of a split or, by default, the demo's."""

    optimizer = "SGD"
    higher_is_better = True
    chance = 0.15
    rates = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    joint_batch = 128
    epochs = 10

    def __init__(self, split: demo.Digits | None = None) -> None:
        split = split or digits()
        self.images, self.labels = split.train_images, split.train_labels
        self.test_images, self.test_labels = split.test_images, split.test_labels
        self.samples = len(self.labels)
        self._orders = Orders(self.samples)

    def data(self, seeds: Sequence[int], batch: Batch) -> Data:
        """Return images and labels."""
        chosen = self._orders.chosen(seeds, batch)
        return self.images[chosen], self.labels[chosen]


class DigitsMLP(Digits):
    """A network with one hidden layer of 64 neurons, trained by SGD with momentum 0.9."""

    name = "digits-mlp"

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters of SGD."""
        return sgd(rate, momentum=0.9)

    @staticmethod
    def network(seed: int) -> nn.Sequential:
        """Return the network for one run as a module, with its initial weights."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        return {name: value.detach() for name, value in self.network(seed).named_parameters()}

    def losses(self, weights: Weights, *data: Tensor) -> Tensor:
        """Return the cross-entropies."""
        images, labels = data
        return cross_entropies(_perceptron(weights, images.flatten(2)), labels)

    def quality(self, weights: Weights) -> Tensor:
        """Return the accuracies on the test images."""
        scores = _perceptron(weights, self.test_images.flatten(1).expand(len(weights["1.bias"]), -1, -1))
        return accuracies(scores, self.test_labels)


def _perceptron(weights: Weights, x: Tensor) -> Tensor:
    """Return the scores. Shape of x: (runs, images, 64)."""
    hidden = torch.baddbmm(weights["1.bias"].unsqueeze(1), x, weights["1.weight"].transpose(1, 2)).relu()
    return torch.baddbmm(weights["3.bias"].unsqueeze(1), hidden, weights["3.weight"].transpose(1, 2))


STATISTICS = 256
"""Number of training images from which BatchNorm's statistics are computed for the test."""

CHANNELS = 8, 16


class DigitsCNN(Digits):
    """A network with two convolutions, BatchNorm after each of them, and 2,722 parameters.

    It is trained by SGD with momentum 0.9 and weight decay 0.0005. A training step uses the statistics of its own
    batch. The test uses those of the first `STATISTICS` training images with the current weights, so it measures what
    the weights have learned, and not how workers share their running statistics.
    """

    name = "digits-cnn"

    def __init__(self, split: demo.Digits | None = None) -> None:
        super().__init__(split)
        tested = torch.cat([self.images[:STATISTICS], self.test_images])
        self._columns, self._tested = (
            functional.unfold(each, 3, padding=1) for each in (self.images, tested)
        )

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters of SGD."""
        return sgd(rate, momentum=0.9, weight_decay=5e-4)

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters. The convolutions are matrices, for images that are unfolded."""
        generator = torch.Generator().manual_seed(seed)
        first, second = CHANNELS
        return {
            "first": torch.randn(first, 9, generator=generator) * math.sqrt(2 / 9),
            "first.scale": torch.ones(first),
            "first.shift": torch.zeros(first),
            "second": torch.randn(second, 9 * first, generator=generator) * math.sqrt(2 / (9 * first)),
            "second.scale": torch.ones(second),
            "second.shift": torch.zeros(second),
            "output": torch.randn(9 * second, 10, generator=generator) / math.sqrt(9 * second),
            "output.bias": torch.zeros(10),
        }

    def data(self, seeds: Sequence[int], batch: Batch) -> Data:
        """Return unfolded images and labels."""
        chosen = self._orders.chosen(seeds, batch)
        return self._columns[chosen], self.labels[chosen]

    def losses(self, weights: Weights, *data: Tensor) -> Tensor:
        """Return the cross-entropies."""
        columns, labels = data
        return cross_entropies(_convolutional(weights, columns, columns.shape[1]), labels)

    def quality(self, weights: Weights) -> Tensor:
        """Return the accuracies on the test images."""
        runs = [
            _convolutional(
                {name: value[run : run + 1] for name, value in weights.items()},
                self._tested.unsqueeze(0),
                STATISTICS,
            )
            for run in range(len(weights["output"]))
        ]
        return accuracies(torch.cat(runs)[:, STATISTICS:], self.test_labels)


def _convolutional(weights: Weights, columns: Tensor, estimated: int) -> Tensor:
    """Return the scores. BatchNorm uses the statistics of the first `estimated` images.

    Shape of the unfolded images: (runs, images, 9, 64).
    """
    images = columns.shape[1]
    x = columns.transpose(1, 2).flatten(2)  # (runs, 9, images * 64)
    x = _convolved(weights, "first", x, images, estimated)  # (runs, channels, images * 64)
    windows = x.unflatten(2, (images, 8, 8)).unfold(3, 3, 2).unfold(4, 3, 2)
    x = windows.permute(0, 1, 5, 6, 2, 3, 4).flatten(4).flatten(1, 3)  # (runs, 9 * channels, images * 9)
    x = _convolved(weights, "second", x, images, estimated)  # (runs, channels, images * 9)
    x = x.unflatten(2, (images, 9)).transpose(1, 2).flatten(2)  # (runs, images, 9 * channels)
    return torch.baddbmm(weights["output.bias"].unsqueeze(1), x, weights["output"])


def _convolved(weights: Weights, name: str, columns: Tensor, images: int, estimated: int) -> Tensor:
    """Convolve unfolded images, normalize the result, and cut it off below 0."""
    x = torch.bmm(weights[name], columns)  # (runs, channels, images * places)
    used = x[:, :, : x.shape[2] // images * estimated]
    variance, mean = torch.var_mean(used, dim=2, keepdim=True, correction=0)
    scale, shift = (weights[f"{name}.{part}"].unsqueeze(2) for part in ("scale", "shift"))
    factor = scale * torch.rsqrt(variance + 1e-5)
    return torch.addcmul(shift - mean * factor, x, factor).relu()


def cross_entropies(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of each run. Shapes: (runs, items, classes) and (runs, items)."""
    losses = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(dim=1)


def accuracies(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the accuracy of each run. Shapes: (runs, items, classes) and (items,). NaN counts as wrong."""
    right = (scores.argmax(dim=2) == labels) & scores.isfinite().all(dim=2)
    return right.float().mean(dim=1)
