"""Noisy quadratics with many coordinates, so that the loss of one run is close to the expected one.

The loss is the sum of h x^2 / 2 over coordinates with curvature h, divided by the number of coordinates per
curvature. The gradient of one sample is h x plus independent noise with variance v h, as for linear models (see
`reproductions.evidence.quadratics`). The initial loss is 1, and the loss is exact, not measured on samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.layout import HyperParameters

from ..ensembles.problems import Data, Weights, sgd
from ..ensembles.schedules import Batch

CURVATURES = 8
COPIES = 512
"""Number of coordinates with the same curvature."""

NOISE = 3.0
"""Variance v of a sample's gradient, for curvature 1."""


class Quadratic:
    """A noisy quadratic whose curvatures are between 1 and 1 / `condition`, trained by SGD with momentum 0.9."""

    optimizer = "SGD"
    higher_is_better = False
    chance = 0.9
    rates = tuple(0.8 * 2.0**-step for step in range(9, -3, -1))
    samples = 1408  # eleven joint batches: a smaller last one would be a whole step under bsp only
    joint_batch = 128
    epochs = 10

    def __init__(self, condition: int) -> None:
        self.name = f"quadratic-{condition}"
        curvatures = torch.logspace(0.0, -1.0, CURVATURES, base=float(condition))
        self._curvatures = curvatures.repeat_interleave(COPIES)
        # Each curvature contributes equally to the initial loss.
        self._initial = (2 / (self._curvatures * CURVATURES)).sqrt()
        self._spread = (NOISE * self._curvatures).sqrt()

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters of SGD."""
        return sgd(rate, momentum=0.9)

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters."""
        return {"x": self._initial}

    def data(self, seeds: Sequence[int], batch: Batch) -> Data:
        """Return the noise of the gradient."""
        noise = torch.empty(len(seeds), len(self._spread))
        for row, seed in zip(noise, seeds, strict=True):
            # A generator uses only the last 32 bits of its seed.
            key = (seed << 19) + (batch.epoch << 13) + batch.start
            row.normal_(generator=torch.Generator().manual_seed(key))
        return (noise * self._spread / batch.size**0.5,)

    def losses(self, weights: Weights, *data: Tensor) -> Tensor:
        """Return the losses whose gradients are noisy."""
        (noise,) = data
        x = weights["x"]
        return (0.5 * self._curvatures * x * x + noise * x).sum(dim=1)

    def quality(self, weights: Weights) -> Tensor:
        """Return the exact losses."""
        return (0.5 * self._curvatures * weights["x"].double().square()).sum(dim=1) / COPIES
