"""VGG-16 (Simonyan and Zisserman, 2014, Table 1, column D)."""

from __future__ import annotations

from torch import nn

__all__ = ["vgg_16"]

CONVOLUTIONS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Output channels of the convolutions of 3 x 3 pixels; each group ends with a pooling layer."""


def vgg_16(classes: int = 1000) -> nn.Sequential:
    """Return VGG-16 for images of 224 x 224 pixels, which ElasticBSP (2021, section 6.2.3) trains on ImageNet.

    For 1,000 classes, it has 138,357,544 parameters; its authors print 138 million (Table 2), and torchvision
    publishes the exact number.

    Args:
        classes: number of classes.
    """
    layers: list[nn.Module] = []
    before = 3
    for group in CONVOLUTIONS:
        for after in group:
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            before = after
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(before * 7 * 7, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, classes),
    )
