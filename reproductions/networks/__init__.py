"""The networks that the papers train, one file per family.

Where a paper states layers or a number of parameters, the network follows it; the docstrings say what a paper leaves
open and what was chosen. The tests compare the numbers of parameters with the papers and with published counts.

>>> import torch
>>> from reproductions.networks import parameter_count, resnet_cifar
>>> with torch.device("meta"):  # without memory for the weights
...     parameter_count(resnet_cifar(20))
269722
"""

from torch import nn

from .alexnet import alexnet_cifar, c3f2_net
from .matrix_factorization import MatrixFactorization
from .resnet_cifar import resnet_cifar, small_resnet
from .resnet_imagenet import resnet_imagenet
from .vgg import small_vgg, vgg_16

__all__ = [
    "MatrixFactorization",
    "alexnet_cifar",
    "c3f2_net",
    "parameter_count",
    "resnet_cifar",
    "resnet_imagenet",
    "small_resnet",
    "small_vgg",
    "vgg_16",
]


def parameter_count(network: nn.Module) -> int:
    """Return the number of trainable parameters of a network, which excludes buffers."""
    return sum(parameter.numel() for parameter in network.parameters())
