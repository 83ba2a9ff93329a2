"""The papers' networks: their numbers of parameters, and the shapes of what they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import ConfigurationError
from reproductions.networks import (
    MatrixFactorization,
    alexnet_cifar,
    c3f2_net,
    parameter_count,
    resnet_cifar,
    resnet_imagenet,
    small_resnet,
    small_vgg,
    vgg_16,
)
from tests.support.marks import thorough

CONVOLUTIONS = 3 * 25 * 32 + 32 + 32 * 25 * 64 + 64 + 64 * 9 * 64 + 64

COUNTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    # by hand, layer by layer
    "C3F2-Net": (c3f2_net, CONVOLUTIONS + 64 * 7 * 7 * 256 + 256 + 256 * 10 + 10),
    # Caffe's cifar10_quick
    "AlexNet, CIFAR-10": (alexnet_cifar, 145_578),
    "AlexNet, CIFAR-100": (lambda: alexnet_cifar(100), 145_578 + 90 * (64 + 1)),
    # He et al., 2016, Table 6, to two digits; the exact counts are those of common implementations
    "ResNet-20": (lambda: resnet_cifar(20), 269_722),
    "ResNet-56": (lambda: resnet_cifar(56), 853_018),
    "ResNet-110": (lambda: resnet_cifar(110), 1_727_962),
    # torchvision
    "ResNet-18": (lambda: resnet_imagenet(18), 11_689_512),
    "ResNet-50": (lambda: resnet_imagenet(50), 25_557_032),
    "VGG-16": (vgg_16, 138_357_544),
    # by hand, layer by layer
    "small VGG": (small_vgg, 208 + 1168 + 785 * 1024 + 1025 * 512 + 5130),
    "small ResNet": (small_resnet, 19_074),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_network_has_the_published_number_of_parameters(name: str) -> None:
    network, count = COUNTS[name]
    with torch.device("meta"):
        assert parameter_count(network()) == count


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (56, 0.85), (110, 1.7)])
def test_residual_networks_have_the_size_in_table_6_of_their_paper(depth: int, millions: float) -> None:
    with torch.device("meta"):
        assert float(f"{parameter_count(resnet_cifar(depth)) / 1e6:.2g}") == millions


def test_matrix_factorization_has_the_size_in_table_1_of_spec_sync() -> None:
    with torch.device("meta"):
        assert parameter_count(MatrixFactorization()) == 4_200_000


@pytest.mark.parametrize(
    ("network", "size", "classes"),
    [
        (lambda: c3f2_net(10), 28, 10),
        (lambda: alexnet_cifar(100), 32, 100),
        (lambda: resnet_cifar(50, 100), 28, 100),
        (lambda: resnet_imagenet(18), 224, 1000),
        (lambda: resnet_imagenet(50), 224, 1000),
        (vgg_16, 224, 1000),
        *thorough((lambda: resnet_cifar(110, 100), 32, 100)),
    ],
)
def test_a_network_takes_the_images_of_its_data_set(
    network: Callable[[], nn.Module], size: int, classes: int
) -> None:
    with torch.device("meta"):
        assert network()(torch.empty(2, 3, size, size)).shape == (2, classes)


def convolutions(network: nn.Module) -> int:
    return sum(isinstance(module, nn.Conv2d) for module in network.modules())


def test_resnet_110_has_60_more_convolutional_layers_than_resnet_50() -> None:
    # ElasticBSP (2021), section 6.2.4.
    with torch.device("meta"):
        assert convolutions(resnet_cifar(110)) - convolutions(resnet_cifar(50)) == 60


def test_a_stage_halves_the_size_and_doubles_the_channels() -> None:
    network = resnet_cifar(8, channels=1, width=4)
    assert network[:-3](torch.zeros(1, 1, 8, 8)).shape == (1, 16, 2, 2)


def test_ratings_are_inner_products_plus_the_mean() -> None:
    model = MatrixFactorization(3, 2, rank=4, mean=3.5)
    user, item = model.users.weight[2], model.items.weight[1]
    assert torch.allclose(model(torch.tensor([[2, 1]])), user @ item + 3.5)


def test_sparse_gradients_contain_the_rows_of_the_batch() -> None:
    model = MatrixFactorization(5, 4, rank=2, sparse=True)
    model(torch.tensor([[3, 1], [0, 1]])).sum().backward()
    grad = model.users.weight.grad
    assert grad is not None
    assert sorted(grad.coalesce().indices().flatten().tolist()) == [0, 3]


@pytest.mark.parametrize("depth", [2, 21, 57])
def test_a_depth_that_is_not_6n_plus_2_is_refused(depth: int) -> None:
    with pytest.raises(ConfigurationError, match=f"6n \\+ 2 layers.*not {depth}"):
        resnet_cifar(depth)


def test_another_resnet_for_imagenet_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ResNet-18 and ResNet-50"):
        resnet_imagenet(34)
