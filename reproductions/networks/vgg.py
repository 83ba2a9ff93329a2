"""VGG-16 (Simonyan and Zisserman, 2014, Table 1, column D)."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Output channels of the convolutions of 3 x 3 pixels; each group ends with a pooling layer."""


def vgg_16() -> nn.Sequential:
    """Return VGG-16 for images of 224 x 224 pixels, which ElasticBSP (2021, section 6.2.3) trains on ImageNet.

    It has 138,357,544 parameters; its authors print 138 million (Table 2), and torchvision
    publishes the exact number.
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
        nn.Linear(4096, 1000),
    )


def small_vgg() -> nn.Sequential:
    """Return a small relative of VGG-16 for images of 28 x 28 pixels with one channel.

    As in VGG-16, nearly all parameters are those of three fully connected layers: 1,333,770 of 1,335,146. There is no
    dropout, so that runs differ only in their data and their initial weights.
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
