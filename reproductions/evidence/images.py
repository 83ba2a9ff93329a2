"""A convolutional network with BatchNorm on scikit-learn's digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from .batched import Weights
from .schedules import Gradient

BATCH = 16
TESTED = 359  # images for validation, the last ones
ESTIMATED = 256  # training images from which BatchNorm's statistics are computed for the validation


class DigitImages:
    """A network with two convolutions, BatchNorm after each of them, and about 8,000 parameters.

    A training step uses the statistics of its own batch. The validation uses those of `ESTIMATED` training images
    with the current weights, so the result does not depend on how workers share their running statistics.
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        labels = torch.tensor(data.target)[order]
        self.images, self.labels = images[:-TESTED], labels[:-TESTED]
        self._tested = images[-TESTED:], labels[-TESTED:]

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        generator = torch.Generator().manual_seed(seed)
        weights = {
            "first": torch.randn(16, 1, 3, 3, generator=generator) / 3,
            "second": torch.randn(32, 16, 3, 3, generator=generator) / 12,
            "output": torch.randn(32 * 9, 10, generator=generator) / math.sqrt(32 * 9),
            "output_bias": torch.zeros(10),
        }
        for name, channels in (("first", 16), ("second", 32)):
            weights[f"{name}.scale"], weights[f"{name}.shift"] = torch.ones(channels), torch.zeros(channels)
        return weights

    def batch(self, seed: int, gradient: Gradient) -> tuple[Tensor, ...]:
        """Return images and labels: each epoch is a permutation of its own."""
        per_epoch = len(self.images) // BATCH
        epoch, index = divmod(gradient.number, per_epoch)
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        chosen = torch.randperm(len(self.images), generator=generator)[BATCH * index : BATCH * (index + 1)]
        return self.images[chosen], self.labels[chosen]

    def loss(self, weights: Weights, *batch: Tensor) -> Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return functional.cross_entropy(_logits(weights, images, len(images)), labels)

    def validation(self, weights: Weights) -> Tensor:
        """Return the cross-entropy on the held-out images."""
        images, labels = self._tested
        together = torch.cat([self.images[:ESTIMATED], images])
        return functional.cross_entropy(_logits(weights, together, ESTIMATED)[ESTIMATED:], labels)


def _logits(weights: Weights, images: Tensor, estimated: int) -> Tensor:
    """Return the scores of the digits. BatchNorm uses the statistics of the first `estimated` images."""
    x = functional.conv2d(images, weights["first"], padding=1)
    x = _normalized(x, weights, "first", estimated)
    x = functional.conv2d(x, weights["second"], stride=2)
    x = _normalized(x, weights, "second", estimated)
    return x.flatten(1) @ weights["output"] + weights["output_bias"]


def _normalized(x: Tensor, weights: Weights, name: str, estimated: int) -> Tensor:
    variance, mean = torch.var_mean(x[:estimated], dim=(0, 2, 3), keepdim=True, correction=0)
    scale, shift = (weights[f"{name}.{part}"].reshape(1, -1, 1, 1) for part in ("scale", "shift"))
    return torch.relu((x - mean) * torch.rsqrt(variance + 1e-5) * scale + shift)
