"""Messages with which the servers clip a mean by the norm over all shards."""

from __future__ import annotations

from .protocol_table import Message, sent

__all__ = [
    "MeanAwaited",
    "MeanClipped",
    "MeanMeasured",
    "MeanMissing",
]


@sent("server", to="coordinator", during="serving")
class MeanMeasured(Message, frozen=True, tag=True):
    """A shard has computed a mean that must be clipped, and waits for the factor. See `core.sync.joint_norms`.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push in the mean.
        max_norm: largest norm of the joint gradient, according to the most advanced worker that clips.
        square: squared L2 norm of the shard's slice of the mean.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    max_norm: float
    square: float


@sent("coordinator", to="server", during="serving")
class MeanClipped(Message, frozen=True, tag=True):
    """The factor by which a shard must multiply a mean before it applies the mean. See the event of the same name."""

    shard: int
    pushes: tuple[tuple[int, int], ...]
    factor: float


@sent("coordinator", to="server", during="serving")
class MeanAwaited(Message, frozen=True, tag=True):
    """A worker was lost whose push is in a mean that another shard has measured.

    If the shard will not measure a mean with any of these pushes, it must send a `MeanMissing`.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]


@sent("server", to="coordinator", during="serving")
class MeanMissing(Message, frozen=True, tag=True):
    """A shard will never measure a mean with any of the pushes that a `MeanAwaited` has named."""

    shard: int
    pushes: tuple[tuple[int, int], ...]
