"""Images in memory and what is done to them before training, independent of the format of the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.errors import ConfigurationError

PADDING = 4  # pixels of zeros at each side before a random crop (He et al., 2016, section 4.2)


class Images(msgspec.Struct, frozen=True):
    """Labeled images or other samples, split into a training set and a test set.

    Attributes:
        train: data set of pairs (float32 tensor of shape (channels, height, width), integer label).
        test: data set in the same format.
    """

    train: Dataset[Any]
    test: Dataset[Any]


class Pixels(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of equal size that are kept as bytes and normalized when they are read.

    Args:
        images: uint8 tensor of shape (n, channels, height, width).
        labels: int64 tensor of shape (n,).
        mean: mean of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel.
        crop: height and width of the part that is used: the middle, or a random part if `augment` is True.
        augment: True to crop and mirror at random, drawn from torch's default generator.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        crop: int,
        augment: bool = False,
    ) -> None:
        self._images = images
        self._labels = labels
        self._mean = torch.tensor(mean).view(-1, 1, 1)
        self._std = torch.tensor(std).view(-1, 1, 1)
        self._crop = crop
        self._augment = augment

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = (self._images[index].float() / 255 - self._mean) / self._std
        crop = self._crop
        if self._augment:
            image = nn.functional.pad(image, (PADDING,) * 4)
            spare = image.shape[-1] - crop
            top, left = torch.randint(spare + 1, (2,)).tolist()
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        else:
            top = left = (image.shape[-1] - crop) // 2
        return image[:, top : top + crop, left : left + crop], self._labels[index]


def expect(folder: Path, name: str, what: str) -> Path:
    """Return the path of a file or folder in `folder`.

    Args:
        folder: the folder given with `--data`, or a folder in it.
        name: name of the file or folder.
        what: name of the data set to which it belongs, and where that is published; part of the message.

    Raises:
        ConfigurationError: the file or folder does not exist.
    """
    path = folder / name
    if not path.exists():
        raise ConfigurationError(
            f"{path} does not exist. It belongs to {what}. Unpack the archive in {folder}."
        )
    return path
