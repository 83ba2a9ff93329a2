"""Drivers for simulated workers that compute nothing and only let time pass. See `paceline.sim.simulated_job`."""

from __future__ import annotations

import math

import msgspec

from ..core.lease import SPLITS, BatchSizing, DataOrder, Split
from ..errors import ConfigurationError, unknown_name
from ..sync.schedule import Schedule
from .cluster import Cluster, require_whole
from .simulated_job import Driver, VirtualJob

LOADER = 0  # index of each worker's only loader


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """Data that simulated workers use up, as if they ran a script that distributes a loader in each epoch.

    Attributes:
        samples: number of samples in an epoch.
        batch_size: usual number of samples in a worker's batch or, if `joint_batch` is True, in the joint batch of
            all workers. The compute times of a cluster refer to batches of this size.
        epochs: number of epochs.
        split: as for `paceline.distribute`.
        drop_last: True to leave out an incomplete last batch.
        pushes_per_batch: mean number of gradients that are computed from a batch, at least 1. This number is 2 for a
            script that steps two optimizers in turn.
        joint_batch: as for `paceline.distribute`.

    Raises:
        ConfigurationError: a number is not positive, or the split is unknown.

    Example:
        >>> Dataset(samples=50_000, batch_size=32).epochs
        1
    """

    samples: int
    batch_size: int
    epochs: int = 1
    split: Split = "auto"
    drop_last: bool = False
    pushes_per_batch: float = 1.0
    joint_batch: bool = False

    def rounds(self, workers: int) -> int:
        """Return the number of joint batches in an epoch."""
        return math.ceil(self.samples / (self.batch_size * (1 if self.joint_batch else workers)))

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "epochs"):
            require_whole(name, getattr(self, name), 1)
        if self.split not in SPLITS:
            raise unknown_name("split", self.split, SPLITS)
        if not 1 <= self.pushes_per_batch < math.inf:
            raise ConfigurationError(
                f"pushes_per_batch is {self.pushes_per_batch!r}, expected a number >= 1."
            )


def require_enough_data(data: Dataset, cluster: Cluster, schedule: Schedule) -> None:
    """Raise `ConfigurationError` if the data cannot be split between the workers, or no epoch has a full batch."""
    if data.joint_batch and data.batch_size < cluster.workers:
        raise ConfigurationError(
            f"data has a joint batch of {data.batch_size} samples for {cluster.workers} workers, but each worker "
            f"needs at least one. Use at most {data.batch_size} workers, or a larger batch_size."
        )
    if data.samples < cluster.workers:
        raise ConfigurationError(
            f"data has {data.samples} samples for {cluster.workers} workers, but each worker needs at least one."
        )
    if not data.drop_last:
        return
    lockstep = all(model.lockstep for model in schedule.models)
    static = data.split == "static" or (data.split == "auto" and lockstep)
    # Workers that are absent when an epoch begins have no part in its joint batches.
    parts = cluster.workers if static and not cluster.presence and not data.joint_batch else 1
    if data.samples < data.batch_size * parts:
        each = f" for each of {parts} workers" if parts > 1 else ""
        raise ConfigurationError(
            f"data has {data.samples} samples and drop_last=True, but a full batch{each} takes "
            f"{data.batch_size * parts} samples, so nothing would be computed. Omit drop_last, or use smaller "
            "batches."
        )


class Clockwork(Driver):
    """Drives workers through a number of iterations.

    Args:
        job: the simulated job.
        iterations: number of iterations of each worker; may be infinite.
    """

    def __init__(self, job: VirtualJob, iterations: float) -> None:
        self._job = job
        self._iterations = iterations

    def joined(self, worker: int) -> None:
        self.answered(worker)

    def answered(self, worker: int) -> None:
        if self._job.workers[worker].core.iteration < self._iterations:
            self._job.compute(worker)
        else:
            self._job.finish(worker)

    def computed(self, worker: int) -> None:
        self._job.push(worker)

    def aborted(self, worker: int) -> None:
        self._job.pull_again(worker)


class DatasetClockwork(Clockwork):
    """Drives workers through the epochs of a dataset: each worker computes one or more gradients for each batch.

    Args:
        job: the simulated job.
        dataset: the data.
        batch: "equal" or "balanced": the sizes of the workers' batches.
    """

    def __init__(self, job: VirtualJob, dataset: Dataset, batch: BatchSizing) -> None:
        super().__init__(job, 0)
        self._epochs = dataset.epochs
        self._order = DataOrder(
            dataset.samples,
            dataset.batch_size,
            dataset.drop_last,
            dataset.split,
            "",
            batch == "balanced",
            joint=dataset.joint_batch and len(job.workers) > 1,
        )
        self._epoch = 0  # the latest epoch that any worker has begun
        self._next: dict[int, int] = {}  # worker -> the epoch that it begins next
        self._pushes_per_batch = dataset.pushes_per_batch
        # worker -> numbers of its batches and pushes since it joined
        self._batches: dict[int, int] = {}
        self._pushes: dict[int, int] = {}
        # worker -> number of empty pushes that it must still make, one for each joint batch in which it has no part
        self._owed: dict[int, int] = {}
        # worker -> function that draws how long its script is outside of training after an epoch
        self._outside = {
            worker: sample
            for worker in range(len(job.workers))
            if (sample := job.epoch_sampler(worker)) is not None
        }
        self._computes: set[int] = set()  # workers whose current gradient is not computed yet
        self._waiting: set[int] = set()  # workers that wait for data

    def joined(self, worker: int) -> None:
        self._next[worker] = self._epoch
        self._batches[worker] = self._pushes[worker] = self._owed[worker] = 0
        self._computes.discard(worker)
        self._waiting.discard(worker)
        self._begin(worker)

    def answered(self, worker: int) -> None:
        if worker in self._computes:  # the computation was aborted
            self._job.compute(worker)
        elif self._owed[worker]:
            self._owed[worker] -= 1
            self._job.sit_out(worker)
        elif self._pushes[worker] < int(self._batches[worker] * self._pushes_per_batch):
            self._computes.add(worker)
            self._job.compute(worker)
        else:
            self._continue(worker)

    def computed(self, worker: int) -> None:
        self._computes.discard(worker)
        self._pushes[worker] += 1
        self._job.push(worker)

    def supplied(self, worker: int) -> None:
        if worker in self._waiting:
            self._continue(worker)

    def _begin(self, worker: int) -> None:
        """Begin the worker's next epoch. After the last epoch, request the data that other workers have returned."""
        core, epoch = self._job.workers[worker].core, self._next[worker]
        self._next[worker] = epoch + 1
        if epoch > self._epochs:
            self._job.finish(worker)
            return
        self._waiting.add(worker)
        if epoch == self._epochs:
            requests = core.data.reopen()
        else:
            self._epoch = max(self._epoch, epoch)
            core.reach_epoch(epoch)
            requests = core.data.begin(LOADER, "data", epoch, self._order)
        self._job.carry(worker, requests, at_once=False)

    def _end_epoch(self, worker: int) -> None:
        """Let the time pass that the script needs at the end of an epoch, for example to evaluate the model."""
        epoch = self._next[worker] - 1
        if worker in self._outside and epoch < self._epochs:
            self._job.let_pass(worker, self._outside[worker](epoch, self._job.kernel.now_s), "outside")
        else:
            self._begin(worker)

    def passed(self, worker: int) -> None:
        self._job.workers[worker].stopwatch.enter("exchanging", self._job.kernel.now_ticks)
        self._begin(worker)

    def _continue(self, worker: int) -> None:
        """Compute the gradient for the worker's next batch, or wait for data."""
        data = self._job.workers[worker].core.data
        self._waiting.discard(worker)
        batch = data.take(LOADER)
        if batch is not None and not batch.size:
            sits_out = self._job.workers[worker].core.lockstep
            self._owed[worker] = max(1, round(self._pushes_per_batch)) if sits_out else 0
            self.answered(worker)
        elif batch is not None:
            data.draw(LOADER, batch.size, batch.size)
            self._batches[worker] += 1
            self._computes.add(worker)
            self._job.compute(worker)
        elif data.ended(LOADER):
            self._end_epoch(worker)
        else:
            self._waiting.add(worker)
            self._job.carry(worker, data.request(LOADER), at_once=False)
