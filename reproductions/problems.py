"""The problems that the training runs of the exhibits learn: a network, and images with their labels.

The papers' data sets are not part of this repository. Without the option `--data`, a small network of the same family
stands in for a paper's network, and small images for its data: scikit-learn's digits, 1,797 images of 8 x 8 pixels, or
16,000 MNIST digits of 28 x 28 pixels for training. With the option, the exhibits train the paper's network on the
published data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.errors import unknown_name
from paceline.lab.demo import DigitsNet, load
from paceline.shard.lars import LARS

from .datasets import Images, mnist_digits, read_cifar, read_imagenet, read_movielens_100k
from .datasets.synthetic_ratings import ITEMS, USERS, synthetic_ratings
from .networks import (
    MatrixFactorization,
    alexnet_cifar,
    c3f2_net,
    resnet_cifar,
    resnet_imagenet,
    small_resnet,
    small_vgg,
    vgg_16,
)

CHUNK = 512  # number of images that are evaluated together


class Problem(msgspec.Struct, frozen=True):
    """A network and the images that it is trained on."""

    name: str  # name of both; problems with the same name are the same
    # importable function without arguments that returns the network with its initial weights
    network: Callable[[], nn.Module]
    # importable function without arguments that reads the images, or other samples
    images: Callable[[], Images]
    train_size: int  # number of training samples
    # function of the outputs and the labels that is minimized
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy
    # number of training images for evaluating the loss; using all of them would take too long
    loss_count: int = 256
    # True if runs may be trained together (see `reproductions.ensembles`): the images are tensors that are
    # used as they are, and the network has no state except its parameters and the statistics of BatchNorm
    stacked: bool = False


def digits() -> Images:
    """Read the digits, with the training and test images of the demo."""
    found = load()
    return Images(
        TensorDataset(found.train_images, found.train_labels),
        TensorDataset(found.test_images, found.test_labels),
    )


def on_digits(network: str, build: Callable[[], nn.Module]) -> Problem:
    """Return the problem of training a network on scikit-learn's digits."""
    return Problem(f"{network} on scikit-learn's digits", build, digits, train_size=1438, stacked=True)


def on_mnist(network: str, build: Callable[[], nn.Module]) -> Problem:
    """Return the problem to train a network on the MNIST digits."""
    name = f"{network} on 16,000 MNIST digits"
    return Problem(name, build, mnist_digits, train_size=16_000, stacked=True)


DIGITS = on_digits("DigitsNet", DigitsNet)
SMALL_VGG = on_mnist("a small VGG", small_vgg)
MNIST_RESNET = on_mnist("ResNet-8 with half the channels", small_resnet)
RATINGS = Problem(
    "matrix factorization of synthetic ratings",
    partial(MatrixFactorization, USERS, ITEMS, 8, sparse=True),
    synthetic_ratings,
    train_size=90_000,
    loss=nn.functional.mse_loss,
    loss_count=4096,
)
SMALL_C3F2 = on_digits("C3F2-Net with half the channels", partial(c3f2_net, 10, 1, 8, 16))
SMALL_RESNET = on_digits("ResNet-8 with half the channels", partial(resnet_cifar, 8, 10, 1, 8))
DEEPER_RESNET = on_digits("ResNet-14 with half the channels", partial(resnet_cifar, 14, 10, 1, 8))


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """A paper's protocol for training a network on its data."""

    batch_size: int  # samples per worker and iteration
    rate: float  # learning rate
    epochs: float  # epochs of training
    optimizer: str = "SGD"  # name of the optimizer in `OPTIMIZERS`
    milestones: tuple[int, ...] = ()  # epochs after which the learning rate is multiplied by `decay`
    decay: float = 1.0  # factor of the learning rate at each milestone


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "LARS": LARS}
"""The optimizers of the papers by name."""


class Workload(msgspec.Struct, frozen=True):
    """A network and a data set of a paper, and what stands in for them."""

    network: Callable[[], nn.Module]  # function that returns the paper's network
    read: Callable[[Path], Images]  # function that reads the data set from the folder given with `--data`
    train_size: int  # number of training samples
    # problem that is used without the data set. It has the same loss as the paper's problem.
    stand_in: Problem


def on_cifar(classes: int, network: Callable[[], nn.Module], stand_in: Problem, crop: int = 32) -> Workload:
    """Return the workload of a network on CIFAR-10 or CIFAR-100."""
    return Workload(network, partial(read_cifar, classes=classes, crop=crop), 50_000, stand_in)


def on_imagenet(network: Callable[[], nn.Module], stand_in: Problem) -> Workload:
    """Return the workload of a network on ImageNet 1K."""
    return Workload(network, read_imagenet, 1_281_167, stand_in)


WORKLOADS = {
    "C3F2-Net on CIFAR-10": on_cifar(10, c3f2_net, SMALL_C3F2, crop=28),
    "ResNet-50 on CIFAR-100": on_cifar(100, partial(resnet_cifar, 50, 100), SMALL_RESNET, crop=28),
    "ResNet-110 on CIFAR-100": on_cifar(100, partial(resnet_cifar, 110, 100), DEEPER_RESNET, crop=28),
    "VGG-16 on ImageNet 1K": on_imagenet(vgg_16, SMALL_VGG),
    "ResNet-50 on ImageNet 1K": on_imagenet(partial(resnet_imagenet, 50), MNIST_RESNET),
    "ResNet-110 on CIFAR-10": on_cifar(10, partial(resnet_cifar, 110), DEEPER_RESNET),
    "ResNet-18 on ImageNet 1K": on_imagenet(partial(resnet_imagenet, 18), SMALL_RESNET),
    "AlexNet on CIFAR-10": on_cifar(10, alexnet_cifar, DIGITS),
    "AlexNet on CIFAR-100": on_cifar(100, partial(alexnet_cifar, 100), DIGITS),
    "ResNet-56 on CIFAR-10": on_cifar(10, partial(resnet_cifar, 56), SMALL_RESNET),
    "ResNet-56 on CIFAR-100": on_cifar(100, partial(resnet_cifar, 56, 100), SMALL_RESNET),
    "matrix factorization on MovieLens 100k": Workload(
        partial(MatrixFactorization, mean=3.5, sparse=True), read_movielens_100k, 90_000, RATINGS
    ),
}
"""The papers' networks with their data sets, by name."""


def problem(workload: str, data: Path | None) -> Problem:
    """Return a paper's own problem or, if there is no folder with the data, what stands in for it.

    >>> problem("VGG-16 on ImageNet 1K", None).name
    'a small VGG on 16,000 MNIST digits'

    Args:
        workload: a name in `WORKLOADS`.
        data: the folder given with `--data`, or None.

    Raises:
        ConfigurationError: there is no such workload.
    """
    if workload not in WORKLOADS:
        raise unknown_name("workload", workload, WORKLOADS)
    found = WORKLOADS[workload]
    if data is None:
        return found.stand_in
    return Problem(
        workload,
        found.network,
        partial(found.read, data),
        found.train_size,
        found.stand_in.loss,
        loss_count=4096,
    )


def accuracy(network: nn.Module, images: Dataset[Any]) -> float:
    """Return the share of images for which the network's largest output is that of the label."""
    return _mean(
        network, images, size(images), lambda outputs, labels: (outputs.argmax(dim=1) == labels).sum()
    )


def mean_loss(
    network: nn.Module, images: Dataset[Any], count: int, loss: Callable[..., torch.Tensor]
) -> float:
    """Return the mean loss over the first images."""
    return _mean(network, images, min(count, size(images)), partial(loss, reduction="sum"))


def _mean(network: nn.Module, images: Dataset[Any], count: int, total: Callable[..., torch.Tensor]) -> float:
    """Return the mean of a quantity over the first images.

    Args:
        network: the network.
        images: the images and their labels.
        count: number of images.
        total: returns the sum of the quantity over a batch, from the network's outputs and the labels.
    """
    network.eval()
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        totals = [total(network(inputs), labels) for inputs, labels in _chunks(images, count)]
    return float(torch.stack(totals).sum()) / count


def size(images: Dataset[Any]) -> int:
    """Return the number of images."""
    return len(images)  # type: ignore[arg-type]  # all data sets here have a length


def _chunks(images: Dataset[Any], count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of the first images, without a loader, which would draw a random number."""
    for begin in range(0, count, CHUNK):
        end = min(begin + CHUNK, count)
        if isinstance(images, TensorDataset):
            yield images[begin:end]
        else:
            yield default_collate([images[index] for index in range(begin, end)])
