"""Image files in one folder per class, as ImageNet 1K (ILSVRC 2012) is usually unpacked.

The folder `imagenet/train` contains a folder for each class, named after its WordNet number ("n01440764"), with the
class's JPEG files. `imagenet/val` has the same form. Classes are numbered in the order of their names. The files are
decoded by Pillow when they are read, so nothing but their names is kept in memory.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from paceline.errors import ConfigurationError

from .images import Images, expect

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, SHORTER = 224, 256  # pixels of the part that is used, and of the shorter side before cropping
ENDINGS = {".jpeg", ".jpg", ".png"}
SITE = "https://image-net.org/challenges/LSVRC/2012"


def read_imagenet(folder: Path) -> Images:
    """Return the training and the validation images of the folder that contains `imagenet`.

    Raises:
        ConfigurationError: Pillow is not installed, a folder is missing or empty, or the two folders' classes differ.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "image files are decoded by Pillow, which is not installed. Run: pip install 'paceline[demo]'"
        ) from error
    root = expect(folder, "imagenet", f"ImageNet 1K, {SITE}")
    train, test = (expect(root, name, f"ImageNet 1K, {SITE}") for name in ("train", "val"))
    classes = _classes(train)
    if (others := _classes(test)) != classes:
        differing = sorted(set(classes) ^ set(others))
        raise ConfigurationError(
            f"{train} and {test} must contain a folder for each class, with equal names, but {differing[0]!r} is "
            "only in one of them. The validation images are published without such folders: sort them into folders "
            "first."
        )
    return Images(ImageFiles(train, classes, augment=True), ImageFiles(test, classes))


def _classes(folder: Path) -> list[str]:
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise ConfigurationError(f"{folder} must contain a folder for each class, but it contains none.")
    return classes


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """Images that are decoded when they are read.

    In training, a random part of 8 % to 100 % of the area is scaled to 224 x 224 pixels and mirrored at random, as is
    usual for ResNet. Otherwise the shorter side is scaled to 256 pixels, and the middle is used.

    Args:
        folder: folder with one folder per class.
        classes: names of the classes, in the order of their labels.
        augment: True for training.
    """

    def __init__(self, folder: Path, classes: list[str], augment: bool = False) -> None:
        self._files = [  # more than a million names: strings take less memory than paths
            (os.path.join(folder, name, file), label)
            for label, name in enumerate(classes)
            for file in sorted(os.listdir(folder / name))
            if os.path.splitext(file)[1].lower() in ENDINGS
        ]
        if not self._files:
            raise ConfigurationError(f"{folder} contains no image files ({', '.join(sorted(ENDINGS))}).")
        self._augment = augment

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image, UnidentifiedImageError

        file, label = self._files[index]
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise ConfigurationError(f"{file} cannot be decoded as an image: {error}.") from error
        box = _random_box(*image.size) if self._augment else _middle_box(*image.size)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if self._augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), label


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the original image."""


def _middle_box(width: int, height: int) -> Box:
    """Return the part that is the middle 224 x 224 pixels after the shorter side is scaled to 256 pixels."""
    side = min(width, height) * SIZE / SHORTER
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int) -> Box:
    """Return a part with 8 % to 100 % of the area and a ratio of sides from 3:4 to 4:3, limited to the image."""
    share, log_ratio, x, y = torch.rand(4).tolist()
    area = (0.08 + 0.92 * share) * width * height
    ratio = math.exp((2 * log_ratio - 1) * math.log(4 / 3))
    wide, high = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = x * (width - wide), y * (height - high)
    return left, top, left + wide, top + high
