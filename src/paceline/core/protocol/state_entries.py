"""What a shard's optimizer state consists of, without its vectors: enough to lay out the files of a checkpoint."""

from __future__ import annotations

import msgspec

from .model_spec import HyperParameters

__all__ = ["StateEntries"]


class StateEntries(msgspec.Struct, frozen=True, omit_defaults=True):
    """The entries of a shard's optimizer state. The values of vectors are left out, because they are large.

    Attributes:
        vectors: "<segment>/<key>" -> name of the dtype in torch, for entries with one value per element.
        numbers: "<segment>/<key>" -> (name of the dtype in torch, value), for entries with one value.
        groups: for each parameter set, the hyper-parameters of each group as the last push had set them.
        counters: for each parameter set, what the optimizer itself has changed in each group. Only optimizers that
            are not torch's do that.
    """

    vectors: dict[str, str]
    numbers: dict[str, tuple[str, float | int]]
    groups: tuple[tuple[HyperParameters, ...], ...]
    counters: tuple[tuple[HyperParameters, ...], ...] = ()
