"""Readers for the published data sets that the papers use, and stand-ins for them, one file per format.

The option `--data DIR` of `python -m reproductions` names a folder that contains the data sets as they are unpacked
from their archives: `cifar-10-batches-bin`, `cifar-100-binary`, `ml-100k`, and for ImageNet a folder `imagenet` with
`train` and `val`, each with one folder per class. Nothing is downloaded.
"""

from .cifar import read_cifar
from .image_folder import read_imagenet
from .images import Images, Pixels
from .mnist import mnist_digits
from .movielens import read_movielens_100k

__all__ = [
    "Images",
    "Pixels",
    "mnist_digits",
    "read_cifar",
    "read_imagenet",
    "read_movielens_100k",
]
