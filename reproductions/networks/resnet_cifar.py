"""Residual networks for CIFAR (He et al., 2016, section 4.2): three stages of n blocks, 6n + 2 layers."""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import ConfigurationError


def resnet_cifar(depth: int, classes: int = 10, channels: int = 3, width: int = 16) -> nn.Sequential:
    """Return a residual network for images of 32 x 32 pixels, or of any other size from 4 x 4.

    The shortcuts between stages have no parameters: they skip every second pixel and add channels of zeros (option A
    of the paper). He et al., Table 6, print 0.27 million parameters for 20 layers, 0.85 million for 56 and 1.7
    million for 110. ElasticBSP (2021) trains 50 and 110 layers on CIFAR-100, FluentPS (2019) 56 layers on CIFAR-10
    and CIFAR-100, and SpecSync (2018) 110 layers on CIFAR-10, for which its Table I says 2.5 million parameters. That
    is more than this network has, and the paper does not say why.

    Args:
        depth: number of layers, 6n + 2: 20, 50, 56 and 110 are in the papers.
        classes: number of classes.
        channels: number of channels of the images.
        width: number of channels in the first stage; it doubles with every stage.

    Raises:
        ConfigurationError: the depth is not 6n + 2 with n >= 1.
    """
    blocks, rest = divmod(depth - 2, 6)
    if blocks < 1 or rest:
        raise ConfigurationError(
            f"a residual network for CIFAR has 6n + 2 layers, for example 20, 50, 56 or 110, but not {depth}."
        )
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    before = width
    for stage in range(3):
        after = width * 2**stage
        for _ in range(blocks):
            layers.append(Block(before, after))
            before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers)


def small_resnet() -> nn.Sequential:
    """Return a small residual network, whose first layer halves images of 28 x 28 pixels with one channel.

    It has 8 layers and 19,074 parameters, few of them in its one fully connected layer.
    """
    return nn.Sequential(nn.AvgPool2d(2), *resnet_cifar(8, 10, 1, 8))


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters. If the number of channels grows, the size is halved."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if after == before else 2
        self.added = after - before
        self.residual = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.added))
        return nn.functional.relu(self.residual(x) + shortcut)
