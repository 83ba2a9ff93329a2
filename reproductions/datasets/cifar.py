"""The binary version of CIFAR-10 and CIFAR-100 (Krizhevsky, 2009).

Every record has one byte (CIFAR-10) or two bytes (CIFAR-100: the coarse and the fine class) for the label, and 3,072
bytes for the red, green and blue pixels of an image of 32 x 32 pixels, row by row. The published files are
`data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` in the folder `cifar-10-batches-bin`, and `train.bin`
and `test.bin` in the folder `cifar-100-binary`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from paceline.errors import ConfigurationError

from .images import Images, Pixels, expect

SHAPE = (3, 32, 32)
IMAGE_BYTES = 3 * 32 * 32
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)  # of the training images of CIFAR-10
SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"


class Version(NamedTuple):
    """A version of the data set: its folder, its files, and the bytes of each record before the pixels."""

    folder: str
    train: tuple[str, ...]
    test: str
    labels: int


VERSIONS = {
    10: Version(
        "cifar-10-batches-bin", tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin", 1
    ),
    100: Version("cifar-100-binary", ("train.bin",), "test.bin", 2),
}
"""Number of classes -> the version with these classes, which are the fine ones of CIFAR-100."""


def read_cifar(folder: Path, classes: int = 10, crop: int = 32) -> Images:
    """Read CIFAR-10 or CIFAR-100 from the folder that contains the folder of the data set.

    Args:
        folder: the folder.
        classes: number of classes, 10 or 100.
        crop: height and width in pixels of the part of each image that is used; 28 in ElasticBSP (2021).

    Raises:
        ConfigurationError: a file is missing or is not in the published format.
    """
    version = VERSIONS[classes]
    what = f"the binary version of CIFAR-{classes}, {SITE}"
    root = expect(folder, version.folder, what)
    parts = []
    for names, augment in ((version.train, True), ((version.test,), False)):
        read = [read_records(expect(root, name, what), version.labels, classes) for name in names]
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
