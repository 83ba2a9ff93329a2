"""What a sync model does to the result of training, as far as its rule alone tells.

Speed can be simulated without the script of a user, but accuracy cannot. So whatever recommends a model for its speed
also says which of these effects it has. Only training with the model shows how large the effect is.

The number of samples in an update belongs to what a model does, too: with n workers, an update of one model uses n
batches, and an update of another one uses a single batch. The hyper-parameters of a script are usually made for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from .model import SyncModel

__all__ = ["EFFECTS", "Effect", "Samples", "backup_quorum", "effect_of", "samples_words"]

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


# -- samples of an update ---------------------------------------------------------------------------------

Kind = Literal["rounds", "quorum", "collected", "barriers", "arrival"]
"""How a model makes updates of pushes.

rounds: the mean of one push of every worker; quorum: of the first ones of a round; collected: of a fixed number of
pushes, whichever workers they are from; barriers: single pushes, and the mean of all workers at a barrier; arrival:
single pushes.
"""

KINDS: dict[str, Kind] = {"drop-stragglers": "quorum", "rennala": "collected", "elastic-bsp": "barriers"}
"""Name of a model -> its kind. Of the others, those that average are "rounds", and all others "arrival"."""


class Samples(NamedTuple):
    """What the number of samples in an update follows from.

    Attributes:
        workers: number of workers.
        batch: batch size of the loader in samples; None if it is unknown.
        joint: True if the batch size is that of the joint batch, which is divided among the workers.
        balanced: True if the sizes of the workers' batches follow their speeds.
        translated: True if the hyper-parameters refer to the joint batch. See `paceline.sync.translation`.
        divisible: True if the batches of the loader could be divided.
        loader: False if the script distributes no loader: it makes its batches itself, of a size that nobody knows.
        asked: True if the run was asked to divide the batches of loaders.
    """

    workers: int
    batch: int | None
    joint: bool = False
    balanced: bool = False
    translated: bool = True
    divisible: bool = True
    loader: bool = True
    asked: bool = False

    @property
    def whose(self) -> str:
        """Where a batch of unknown size comes from."""
        return "of the loader" if self.loader else "of the script"

    @property
    def joint_batch(self) -> int:
        """Number of samples in a joint batch."""
        return (self.batch or 1) * (1 if self.joint else self.workers)

    @property
    def part(self) -> str:
        """The number of samples in a worker's batch."""
        if not self.joint:
            return str(self.batch or 1)
        least, more = divmod(self.batch or 1, self.workers)
        if self.balanced:
            return f"about {max(1, round((self.batch or 1) / self.workers))}"
        return f"{least} or {least + 1}" if more else str(least)

    def pushes(self, count: int) -> str:
        """The number of samples in several pushes."""
        total = count * self.joint_batch / self.workers
        return f"{total:.0f}" if not self.joint else f"about {total:.0f}"


def samples_words(models: Sequence[SyncModel], samples: Samples, option: str = "--joint-batch") -> str:
    """Return how many samples an update has, and how many the script says; "" for a single worker.

    Args:
        models: one model for all shards, or one model for each shard.
        samples: what the numbers follow from.
        option: how the user divides the batches of the loader among the workers.

    >>> from .notation import parse_shards
    >>> def words(sync: str, **changes: object) -> str:
    ...     return samples_words(parse_shards(sync), Samples(3, 16)._replace(**changes))
    >>> words("bsp")
    '3 workers x 16 = 48 samples an update; the script says 16: --joint-batch keeps 16'
    >>> words("bsp", batch=48, joint=True)
    '48 samples an update, divided over 3 workers'
    >>> words("asp", translated=False)
    '16 samples an update, 3 under way at once'
    >>> words("bsp", workers=1)
    ''
    """
    if samples.workers < 2:
        return ""
    told = {_kind(model): model for model in models}
    clauses = [
        (f"{model.name}: " if len(told) > 1 else "") + _TABLE[kind](model, samples)
        for kind, model in told.items()
    ]
    return "; ".join([*clauses, *_remedy(set(told), samples, option)])


def _kind(model: SyncModel) -> Kind:
    if model.lockstep or getattr(model, "pushes", "") == "average":
        return "rounds"
    return KINDS.get(model.name, "arrival")


def _in_rounds(model: SyncModel, samples: Samples) -> str:
    workers, batch, joint = samples.workers, samples.batch, samples.joint_batch
    if batch is None:
        return f"{workers} batches {samples.whose} an update, one of each worker"
    if samples.joint:
        return f"{batch} samples an update, {_divided(samples)}"
    if samples.balanced:
        return (
            f"{joint} samples an update ({workers} workers x {batch}), divided in proportion to their speeds"
        )
    return f"{workers} workers x {batch} = {joint} samples an update"


def _with_quorum(model: SyncModel, samples: Samples) -> str:
    quorum, workers = min(getattr(model, "quorum", samples.workers), samples.workers), samples.workers
    if samples.joint:
        parts = f"{samples.batch}, {_divided(samples)}, of which {quorum} count"
        return f"{samples.pushes(quorum)} samples an update: {parts}"
    unit = _unit(samples)
    return f"{quorum} of {workers} workers x {samples.part} = {samples.pushes(quorum)} {unit} an update"


def _collected(model: SyncModel, samples: Samples) -> str:
    count = getattr(model, "batch", 1)
    if samples.joint:
        return f"{samples.pushes(count)} samples an update, in {count} pushes: {samples.batch}, {_divided(samples)}"
    return f"{count} pushes x {samples.part} = {samples.pushes(count)} {_unit(samples)} an update"


def _with_barriers(model: SyncModel, samples: Samples) -> str:
    of = f": {samples.batch}, {_divided(samples)}" if samples.joint else ""
    return f"{samples.part} {_unit(samples, 1)} an update, and {samples.joint_batch} at a barrier{of}"


def _on_arrival(model: SyncModel, samples: Samples) -> str:
    of = f": {samples.batch}, {_divided(samples)}" if samples.joint else ""
    return f"{samples.part} {_unit(samples, 1)} an update, {samples.workers} under way at once{of}"


_TABLE: dict[Kind, Callable[[SyncModel, Samples], str]] = {
    "rounds": _in_rounds,
    "quorum": _with_quorum,
    "collected": _collected,
    "barriers": _with_barriers,
    "arrival": _on_arrival,
}


def _unit(samples: Samples, pushes: int = 2) -> str:
    if samples.batch is None:
        return f"batch{'es' * (pushes > 1)} {samples.whose}"
    return "samples"


def _divided(samples: Samples) -> str:
    speeds = ", in proportion to their speeds" if samples.balanced else ""
    return f"divided over {samples.workers} workers{speeds}"


def _remedy(kinds: set[Kind], samples: Samples, option: str) -> list[str]:
    """Return what the script says, and how the joint batch becomes what it says."""
    batch = samples.batch
    if not samples.loader:
        return ["it has distributed no loader" + f", so {option} divides nothing" * samples.asked]
    if samples.joint or batch is None:
        return []
    if "rounds" in kinds:
        said = f"the script says {batch}"
    elif samples.translated:
        refers = f"{samples.workers} x {batch} = {samples.joint_batch} samples"
        said = f"the hyper-parameters refer to {refers}, the script says {batch}"
    else:
        return [f"the script says {batch}"] if kinds & {"quorum", "collected"} else []
    possible = samples.divisible and batch >= samples.workers
    return [f"{said}: {option} keeps {batch}" if possible else said]
