"""A cut of a job: everything, except for tensors, that a later run needs in order to continue the job.

A cut treats every worker as if it had been lost: pushes that a shard has applied are in its weights, and all other data
that a worker has received is returned, so that it is handed out again. A run that is resumed begins with the weights
and the optimizer state of the cut, and with a `JobCut`.

A `JobCut` contains no state of a core. So the later run may have other numbers of workers, servers and shards, and
another sync model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import msgspec
from msgspec import structs

from ..errors import ProtocolError
from .layout import Layout, ModelSpec, Parameter, ShardSlice, first_difference
from .lease import DataOrder, Lease
from .messages import LoopLimits, LoopPosition, PushCounts, ShardState


class EpochCut(msgspec.Struct, frozen=True):
    """An epoch of a loader that has begun and not ended.

    Attributes:
        number: number of the epoch.
        order: the order of the epoch.
        begin: the first position of the rest of the epoch. No worker has used this position or a later one. The
            positions before it are used, torn, left out or returned.
    """

    number: int
    order: DataOrder
    begin: int


class WorkerTimes(msgspec.Struct, frozen=True):
    """The times that a worker has taken for its batches, from which the sizes of balanced batches follow.

    Attributes:
        worker: index of the worker.
        fixed_samples: the part of these times that does not depend on the size of a batch, as the number of samples for
            which the other part is equally long.
        latest: (number of samples, time in seconds) of its latest batches, in order.
    """

    worker: int
    fixed_samples: float
    latest: tuple[tuple[int, float], ...]


class LoaderCut(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of a loader. See `paceline.core.loader_ledger` for the states of a position.

    Attributes:
        name: name of the loader.
        opened: number of epochs that have begun.
        order: the order of the last of these epochs; None if no epoch has begun.
        epochs: the epochs that have begun and not ended, in order.
        returned: the positions before the rest of each epoch that are handed out again, in this order. Each lease has
            a count.
        total: number of positions, over all epochs that have begun, without the rests of `epochs`.
        left: number of these positions that no worker will use, because a script has ended the epoch.
        used: number of these positions whose gradients are in the weights of all shards.
        torn: number of these positions whose gradients are in the weights of some shards only.
        left_out: number of these positions that were left out.
        moved: number of positions that were handed out in a later epoch than their own.
        times: the times of the workers, if the batches are balanced.
    """

    name: str
    opened: int = 0
    order: DataOrder | None = None
    epochs: tuple[EpochCut, ...] = ()
    returned: tuple[Lease, ...] = ()
    total: int = 0
    left: int = 0
    used: int = 0
    torn: int = 0
    left_out: int = 0
    moved: int = 0
    times: tuple[WorkerTimes, ...] = ()


class LoopCut(msgspec.Struct, frozen=True, kw_only=True):
    """The place of the job in the training loops of its script. See `paceline.epochs`.

    Attributes:
        position: the last position that the job has reached; None before the first one.
        begun: number of the last loop that has begun; -1 if no loop has begun.
        elapsed_s: time in seconds since this loop began, without the time between two runs.
        limits: the limits of this loop; None if they are unknown.
        start: number of updates, and of samples, at the beginning of this loop.
        stopped: the loops that a worker has stopped, in ascending order.
        ended: number of the last loop that has ended, and the worker whose states were sent last; (-1, 0) if no loop
            has ended.
    """

    position: LoopPosition | None = None
    begun: int = -1
    elapsed_s: float = 0.0
    limits: LoopLimits | None = None
    start: tuple[int, int] = (0, 0)
    stopped: tuple[int, ...] = ()
    ended: tuple[int, int] = (-1, 0)


class WorkerCut(msgspec.Struct, frozen=True):
    """A worker that took part in the run at the cut.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        iteration: label of its last push that every shard has applied or dropped; -1 if there is none.
    """

    worker: int
    incarnation: int
    iteration: int


class CourseCut(msgspec.Struct, frozen=True):
    """Losses and norms with which the guard of a resumed run compares those of the run. See `paceline.core.guard`.

    Attributes:
        set_index: index of the parameter set.
        loss: loss at the beginning; None if it is unknown.
        gradient: norm of the gradients at the beginning.
        weights: norm of the weights at the beginning.
        usual: highest usual level of the norm of the gradients.
        lowest: lowest level of the loss; None if it is unknown.
    """

    set_index: int
    loss: float | None
    gradient: float
    weights: float
    usual: float = 0.0
    lowest: float | None = None


class GuardCut(msgspec.Struct, frozen=True):
    """The state of a run's guard. See `paceline.core.guard`.

    Attributes:
        courses: how training has begun, for each parameter set for which this is known.
    """

    courses: tuple[CourseCut, ...] = ()


class JobCut(msgspec.Struct, frozen=True, kw_only=True):
    """A cut of a job.

    Attributes:
        number: number of the cut, counted from 1 over all runs of the job.
        elapsed_s: time in seconds for which the job has run, over all of its runs.
        seed: random seed of the job, from which the orders of its epochs follow.
        sync: the sync model in force, or one model per shard, in the notation of the command line.
        model: the model that is trained, with all parameters that were added.
        extensions: the earlier models, in order, if parameters were added after training had begun.
        slices: the slice of each shard, in order.
        shards: the state of each shard, in order. Under lockstep models, these states are equal.
        pushes: what has become of all pushes that shard 0 has received, over all runs of the job.
        torn: number of pushes that are in the weights of some shards only.
        workers: the workers that took part, in ascending order.
        loaders: the ledger of each loader.
        loop: the place of the job in its training loops.
        guard: the state of the guard.
        main: the main worker; -1 if there was none, or if it is not known.
    """

    number: int
    elapsed_s: float
    seed: int
    sync: str
    model: ModelSpec
    extensions: tuple[ModelSpec, ...] = ()
    slices: tuple[ShardSlice, ...] = ()
    shards: tuple[ShardState, ...] = ()
    pushes: PushCounts = PushCounts()
    torn: int = 0
    workers: tuple[WorkerCut, ...] = ()
    loaders: tuple[LoaderCut, ...] = ()
    loop: LoopCut = LoopCut()
    guard: GuardCut = GuardCut()
    main: int = -1

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models of the job: at the beginning of training, and after each addition of parameters."""
        return (*self.extensions, self.model)

    def contains(self, model: ModelSpec) -> bool:
        """Return True if the job has trained this model before or at the cut.

        A model with only some of the parameters of an extension counts, too: in the run that resumes the cut, the
        script may have all or some of its added parameters from the beginning.
        """
        return any(map(partial(_same, model), self.models)) or any(
            _extends(before, model) and _extends(model, after) for before, after in pairwise(self.models)
        )

    def models_before(self, models: Sequence[ModelSpec]) -> tuple[ModelSpec, ...]:
        """Return the models of the job that come before the models of a run that has resumed this cut.

        Args:
            models: the models of the run, in order.
        """
        return tuple(known for known in self.models if not any(map(partial(_same, known), models)))

    def is_covered_by(self, model: ModelSpec) -> bool:
        """Return True if a model has everything that the model of the job had at the cut."""
        return _extends(self.model, model)

    def is_extended_by(self, model: ModelSpec) -> bool:
        """Return True if a model has everything that the model of the job had at the cut, and further parameters.

        A script adds parameters at a moment of its own choice: at the cut, some workers may wait for the extension, or
        may be about to add parameters. In the run that resumes the cut, the script may have these parameters from the
        beginning.
        """
        return not _same(self.model, model) and _extends(self.model, model)

    def has_of(self, before: ModelSpec, model: ModelSpec) -> Literal["none", "some", "all"]:
        """Return whether all, some or none of the parameters that `model` adds to `before` were trained at the cut."""
        earlier = {parameter.names[0] for parameter in before.layout.parameters}
        known = {parameter.names[0] for parameter in self.model.layout.parameters}
        added = {parameter.names[0] for parameter in model.layout.parameters} - earlier
        if self.contains(model):
            return "all"
        return "none" if added.isdisjoint(known) or not self.is_extended_by(model) else "some"

    def states_of(self, shards: int) -> tuple[ShardState, ...]:
        """Return the state with which each shard begins if a run with `shards` shards resumes this cut.

        If the number of shards differs, a new shard is made up of parts of several old shards. The state of shard 0 is
        then used for all shards, because shard 0 counts the progress of a job.
        """
        if shards == len(self.shards):
            return self.shards
        return (self.shards[0] if self.shards else ShardState(),) * shards


def leader(main: int, workers: Collection[int]) -> int | None:
    """Return the worker that all scripts of a later run follow: they go on at its position, with its tracked objects.

    This is the main worker, because only its state contains the tracked objects. Without a state of the main worker, it
    is the worker with the lowest index.

    Args:
        main: the main worker at the cut.
        workers: the workers that have given the states of their scripts.
    """
    return main if main in workers else min(workers, default=None)


def _same(model: ModelSpec, other: ModelSpec) -> bool:
    """Return True if two models are equal, no matter when their parameters were added."""
    return not first_difference(_from_the_beginning(model), _from_the_beginning(other))


def _extends(model: ModelSpec, other: ModelSpec) -> bool:
    """Return True if `other` is `model`, perhaps with further parameters, no matter when these were added."""
    before, after = _from_the_beginning(model), _from_the_beginning(other)
    if len(after.optimizers) < len(before.optimizers):
        return False
    for index, (old, new) in enumerate(zip(before.optimizers, after.optimizers, strict=False)):
        known, found = _of_set(before, index), _of_set(after, index)
        if (
            old.name != new.name
            or len(new.groups) < len(old.groups)
            or found[: len(known)] != known
            or new.group_of[: len(old.group_of)] != old.group_of
        ):
            return False
    buffers = {buffer.name: str(buffer) for buffer in after.buffers}
    return all(buffers.get(buffer.name) == str(buffer) for buffer in before.buffers)


def _of_set(model: ModelSpec, set_index: int) -> list[Parameter]:
    return [parameter for parameter in model.layout.parameters if parameter.set_index == set_index]


def _from_the_beginning(model: ModelSpec) -> ModelSpec:
    """Return a model as if all of its parameters had been there from the beginning.

    In the returned model, the sets of parameters follow one another. Within a set, added parameters come last, as
    before.
    """
    parameters = [structs.replace(parameter, part=0) for parameter in model.layout.parameters]
    return structs.replace(
        model,
        layout=Layout.of(sorted(parameters, key=lambda parameter: parameter.set_index)),
        buffers=tuple(sorted(model.buffers, key=lambda buffer: buffer.name)),
        frozen=tuple(sorted(model.frozen, key=lambda frozen: frozen.name)),
    )


def require_plausible(cut: JobCut) -> None:
    """Check that the numbers of a cut do not contradict one another.

    A cut is read from files, which any user may have written.

    Raises:
        ProtocolError: some numbers contradict one another. The message says which.
    """
    sizes = {parameter: each.size for parameter, each in enumerate(cut.model.layout.parameters)}
    covered = dict.fromkeys(sizes, 0)
    for bounds in cut.slices:
        for segment in bounds.segments:
            if (
                segment.parameter in sizes
                and 0 <= segment.offset <= segment.offset + segment.stop - segment.start
            ):
                covered[segment.parameter] += segment.stop - segment.start
    counts = [
        cut.torn,
        *structs.astuple(cut.pushes),
        *(n for each in cut.shards for n in structs.astuple(each)),
    ]
    workers = [each.worker for each in cut.workers]
    names = [loader.name for loader in cut.loaders]
    for is_right, what in (
        (cut.number >= 1 and _is_time(cut.elapsed_s), "the number or the time of the cut"),
        (0 <= cut.seed < 2**64, "the seed"),
        (bool(cut.slices) and len(cut.slices) == len(cut.shards), "the number of shards"),
        (covered == sizes, "the slices of the shards"),
        (all(_is_count(count) for count in counts), "the counts of pushes and updates"),
        (workers == sorted({*workers}) and all(_is_worker(each) for each in cut.workers), "the workers"),
        (len(names) == len({*names}), "the names of the loaders"),
        (_is_loop(cut.loop), "the place in the loops of the script"),
        *((_is_loader(loader), f"the ledger of the loader {loader.name!r}") for loader in cut.loaders),
    ):
        if not is_right:
            raise ProtocolError(f"{what} cannot be right")


def _is_count(number: int, least: int = 0) -> bool:
    return least <= number < 2**53


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds < 2**53


def _is_worker(cut: WorkerCut) -> bool:
    return _is_count(cut.worker) and _is_count(cut.incarnation) and _is_count(cut.iteration, least=-1)


def _is_loop(cut: LoopCut) -> bool:
    counts = [*cut.start, *cut.stopped, cut.ended[1], *([] if cut.position is None else [cut.position.loop])]
    return (
        all(_is_count(number) for number in counts)
        and _is_count(cut.begun, least=-1)
        and _is_count(cut.ended[0], least=-1)
        and _is_time(cut.elapsed_s)
        and list(cut.stopped) == sorted({*cut.stopped})
    )


def _is_loader(cut: LoaderCut) -> bool:
    counts = (cut.opened, cut.total, cut.left, cut.used, cut.torn, cut.left_out, cut.moved)
    rests = {rest.number: rest for rest in cut.epochs}
    return (
        all(_is_count(number) for number in counts)
        and bool(cut.opened) == (cut.order is not None)
        and list(rests) == sorted(rests)
        and len(rests) == len(cut.epochs)
        and all(
            0 <= rest.number < cut.opened and 0 <= rest.begin <= _end_of(rest.order) for rest in cut.epochs
        )
        and all(_is_lease(lease, rests.get(lease.epoch), cut.opened) for lease in cut.returned)
        and all(
            _is_count(times.worker)
            and _is_time(times.fixed_samples)
            and all(_is_count(samples) and _is_time(took_s) for samples, took_s in times.latest)
            for times in cut.times
        )
    )


def _is_lease(lease: Lease, rest: EpochCut | None, opened: int) -> bool:
    """Return True if a lease has positions that can be handed out again."""
    if lease.count is None or not (0 <= lease.epoch < opened and lease.start >= 0 and lease.count >= 1):
        return False
    if not (lease.batch >= 1 and lease.stride >= 1):
        return False
    end = lease.start + (lease.count - 1) * lease.stride + lease.batch
    return end <= (2**53 if rest is None else _end_of(rest.order))


def _end_of(order: DataOrder) -> int:
    return 2**53 if order.size is None else order.size
