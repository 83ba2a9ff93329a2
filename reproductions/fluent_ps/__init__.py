"""Tables and figures of FluentPS (Yao, Wu and Wang, CLUSTER 2019), one file per subject."""

from . import accuracy, delayed_pulls, slicing

EXHIBITS = tuple(exhibit for module in (slicing, delayed_pulls, accuracy) for exhibit in module.EXHIBITS)
