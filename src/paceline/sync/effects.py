"""What a sync model does to the result of training, as far as its rule alone tells.

Speed can be simulated without the script of a user, but accuracy cannot. So whatever recommends a model for its speed
also says which of these effects it has. Only training with the model shows how large the effect is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .model import SyncModel

__all__ = ["EFFECTS", "Effect", "backup_quorum", "effect_of"]

Effect = Literal["exact", "fresh", "stale"]

EFFECTS: dict[Effect, str] = {
    "exact": "every update is that of one process on the joint batch",
    "fresh": "no gradient is stale, but late ones are dropped, so an update averages fewer of them",
    "stale": "gradients are computed on outdated weights, which changes how training proceeds",
}
"""The effects as clauses, from the least to the most."""


def effect_of(models: Sequence[SyncModel]) -> Effect:
    """Return the effect of one model for all shards, or of one model for each shard.

    >>> from .notation import parse_shards
    >>> effect_of(parse_shards("bsp")), effect_of(parse_shards("drop-stragglers:quorum=3"))
    ('exact', 'fresh')
    >>> effect_of(parse_shards("bsp|asp"))
    'stale'
    """
    if all(model.lockstep for model in models):
        return "exact"
    return "fresh" if all(model.fresh for model in models) else "stale"


def backup_quorum(workers: int, slow: int = 1) -> int | None:
    """Return how many pushes `drop-stragglers` should wait for; None if too few workers would remain.

    Args:
        workers: number of workers.
        slow: number of workers that are too slow to be waited for.

    >>> backup_quorum(4), backup_quorum(16, slow=4), backup_quorum(2)
    (3, 12, None)
    """
    quorum = workers - max(1, slow)
    return quorum if 2 * quorum > workers else None
