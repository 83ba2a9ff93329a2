"""The binary version of CIFAR-10 and CIFAR-100 (Krizhevsky, 2009).

Every record has one byte (CIFAR-10) or two bytes (CIFAR-100: the coarse and the fine class) for the label, and 3,072
bytes for the red, green and blue pixels of an image of 32 x 32 pixels, row by row. The published files are
`data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` in the folder `cifar-10-batches-bin`, and `train.bin`
and `test.bin` in the folder `cifar-100-binary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.errors import ConfigurationError

from .images import Images, Pixels, expect

SHAPE = (3, 32, 32)
IMAGE_BYTES = 3 * 32 * 32
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)  # of the training images of CIFAR-10
SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"


def read_cifar_10(folder: Path, crop: int = 32) -> Images:
    """Read CIFAR-10 from the folder that contains `cifar-10-batches-bin`.

    Args:
        folder: the folder.
        crop: height and width in pixels of the part of each image that is used; 28 in ElasticBSP (2021).

    Raises:
        ConfigurationError: a file is missing or is not in the published format.
    """
    what = f"the binary version of CIFAR-10, {SITE}"
    root = expect(folder, "cifar-10-batches-bin", what)
    train = [expect(root, f"data_batch_{number}.bin", what) for number in range(1, 6)]
    return _images(train, [expect(root, "test_batch.bin", what)], labels=1, classes=10, crop=crop)


def read_cifar_100(folder: Path, crop: int = 32) -> Images:
    """Read CIFAR-100, with its 100 fine classes, from the folder that contains `cifar-100-binary`.

    Args:
        folder: the folder.
        crop: height and width in pixels of the part of each image that is used; 28 in ElasticBSP (2021).

    Raises:
        ConfigurationError: a file is missing or is not in the published format.
    """
    what = f"the binary version of CIFAR-100, {SITE}"
    root = expect(folder, "cifar-100-binary", what)
    train, test = expect(root, "train.bin", what), expect(root, "test.bin", what)
    return _images([train], [test], labels=2, classes=100, crop=crop)


def _images(train: Sequence[Path], test: Sequence[Path], *, labels: int, classes: int, crop: int) -> Images:
    parts = []
    for files, augment in ((train, True), (test, False)):
        read = [read_records(file, labels, classes) for file in files]
        images, targets = (torch.cat(tensors) for tensors in zip(*read, strict=True))
        parts.append(Pixels(images, targets, MEAN, STD, crop, augment))
    return Images(*parts)


def read_records(file: Path, labels: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images, uint8 of shape (n, 3, 32, 32), and the labels, int64 of shape (n,), of one file.

    Args:
        file: the file.
        labels: bytes of each record before its pixels. The last of them is the label.
        classes: number of classes.

    Raises:
        ConfigurationError: the file is not in the published format.
    """
    data = np.fromfile(file, dtype=np.uint8)
    size = labels + IMAGE_BYTES
    if not len(data) or len(data) % size:
        raise ConfigurationError(
            f"{file} has {len(data)} bytes, which is not a multiple of {size}, the size of a record. The file is "
            "incomplete, or it is not the binary version of the data set."
        )
    records = data.reshape(-1, size)
    found = records[:, labels - 1].astype(np.int64)
    if found.max() >= classes:
        raise ConfigurationError(
            f"{file}: record {int(found.argmax())} has the label {found.max()}, but the labels are 0 to "
            f"{classes - 1}. This is not the binary version of CIFAR-{classes}."
        )
    return torch.from_numpy(records[:, labels:].reshape(-1, *SHAPE).copy()), torch.from_numpy(found)
