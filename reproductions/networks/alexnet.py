"""Small relatives of AlexNet (Krizhevsky et al., 2012) for CIFAR: three convolutions, two fully connected layers."""

from __future__ import annotations

from torch import nn


def c3f2_net(classes: int = 10, channels: int = 3, size: int = 28, width: int = 32) -> nn.Sequential:
    """Return C3F2-Net, which ElasticBSP (2021, section 6.2.1) trains on CIFAR-10.

    The paper says that it is AlexNet reduced to "3 convolutional layers and 2 fully connected layers with smaller
    widths", for images of 28 x 28 pixels. It states neither the widths nor a number of parameters. These are our
    choice: kernels of 5, 5 and 3 pixels in the order of AlexNet, and most parameters in the fully connected layers,
    on which the paper bases its explanation (section 6.2.5). There is no dropout.

    Args:
        classes: number of classes.
        channels: number of channels of the images.
        size: height and width of the images in pixels, a multiple of 4 if no pixels are to be left out.
        width: number of channels of the first convolution.
    """
    side = size // 2 // 2
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * side * side, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, classes),
    )


def alexnet_cifar(classes: int = 10) -> nn.Sequential:
    """Return the AlexNet for images of 32 x 32 pixels that FluentPS (2019) trains on CIFAR-10 and CIFAR-100.

    The paper runs Caffe workers and does not list the layers. This is the network `cifar10_quick` that Caffe
    publishes, whose accuracy on CIFAR-10 (about 75 %) is near the 76.5 % of the paper. For 10 classes, it has
    145,578 parameters.

    Args:
        classes: number of classes.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=5, padding=2),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, stride=2, ceil_mode=True),
        nn.Conv2d(32, 64, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, stride=2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.Linear(64, classes),
    )
