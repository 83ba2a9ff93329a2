"""Residual networks for ImageNet (He et al., 2016, Table 1): four stages after a convolution of 7 x 7 pixels."""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import ConfigurationError

STAGES = {18: ((2, 2, 2, 2), False), 50: ((3, 4, 6, 3), True)}
"""Depth -> blocks of each stage, and whether the blocks are bottlenecks."""

WIDEN = 4  # a bottleneck has this many times as many output channels as inner channels


def resnet_imagenet(depth: int) -> nn.Sequential:
    """Return a residual network for images of 224 x 224 pixels and 1,000 classes.

    ResNet-18 has 11,689,512 parameters and ResNet-50 25,557,032, as published with torchvision,
    whose bottlenecks halve the size in their convolution of 3 x 3 pixels, as here. ElasticBSP (2021) trains ResNet-50
    and SpecSync (2018) ResNet-18, for which its Table I says 5.9 million parameters. The paper does not say why.

    Args:
        depth: number of layers, 18 or 50.

    Raises:
        ConfigurationError: the depth is neither 18 nor 50.
    """
    if depth not in STAGES:
        raise ConfigurationError(
            f"the papers train ResNet-18 and ResNet-50 on ImageNet, but not {depth} layers."
        )
    blocks, bottleneck = STAGES[depth]
    layers: list[nn.Module] = [
        *_normalized(3, 64, kernel=7, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = 64
    for stage, count in enumerate(blocks):
        inner = 64 * 2**stage
        for number in range(count):
            block = Block(before, inner, 2 if stage and not number else 1, bottleneck)
            layers.append(block)
            before = block.channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A residual block with two convolutions, or a bottleneck with three.

    The shortcut is a convolution of 1 x 1 pixels where the block changes the shape.

    Attributes:
        channels: number of output channels.
    """

    def __init__(self, before: int, inner: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.channels = inner * WIDEN if bottleneck else inner
        convolutions = (
            [(before, inner, 1, 1), (inner, inner, 3, stride), (inner, self.channels, 1, 1)]
            if bottleneck
            else [(before, inner, 3, stride), (inner, inner, 3, 1)]
        )
        layers: list[nn.Module] = []
        for entering, leaving, kernel, step in convolutions:
            layers += [*_normalized(entering, leaving, kernel, step), nn.ReLU()]
        self.residual = nn.Sequential(*layers[:-1])
        same = stride == 1 and before == self.channels
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_normalized(before, self.channels, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.residual(x) + self.shortcut(x))


def _normalized(before: int, after: int, kernel: int, stride: int) -> list[nn.Module]:
    """Return a convolution without bias, and its normalization."""
    convolution = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(after)]
