"""Schedules: which worker pushes when, and on which data each gradient is computed.

Under models that do not measure gradients, a schedule does not depend on the weights. So it is recorded once, in a
simulated run with real epochs of positions in place of data, and a network with one parameter. It is then used for
all networks, rates, seeds and hyper-parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.sim import Cluster, simulate
from paceline.sync.events import RecordedEvent
from paceline.trace.measures import Measures
from paceline.train.data import distribute
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import current


class Epochs(NamedTuple):
    """The data of a run."""

    samples: int  # number of samples in an epoch
    batch: int  # number of samples in a worker's batch
    # number of epochs. If workers train for a number of iterations instead, the progress of the run is
    # counted in units of this many epochs.
    epochs: int = 1


class Batch(NamedTuple):
    """The data from which a gradient is computed: adjacent positions in the order of an epoch."""

    epoch: int  # number of the epoch, from 0
    start: int  # first position
    size: int  # number of positions


class Schedule(NamedTuple):
    """What shard 0 of a simulated run has received."""

    sync: str  # the sync model
    seed: int  # random seed for the run
    ticks_per_s: int  # number of ticks per second of virtual time
    epochs: Epochs  # the data of the run
    events: Sequence[RecordedEvent]  # the events at the shard, in order
    times_s: Sequence[float]  # virtual time of each event, in seconds
    batches: dict[int, list[Batch]]  # for each worker, the batch of each of its iterations
    end_s: float  # virtual time at which the last worker finished, in seconds
    measures: Measures  # what the run has measured
    bytes_by_kind: dict[str, int]  # kind of message -> number of bytes sent


def record(
    cluster: Cluster,
    sync: str,
    epochs: Epochs,
    seed: int,
    *,
    iterations: int | None = None,
) -> Schedule:
    """Return the schedule of a run with one shard.

    Args:
        cluster: the cluster.
        sync: the sync model.
        epochs: the data.
        seed: random seed for the run.
        iterations: number of iterations of each worker, over as many epochs as they take; None to train for the
            epochs of the data.
    """
    batches: dict[int, list[Batch]] = {}
    result = simulate(
        cluster,
        sync,
        seed=seed,
        train_fn=_train,
        args=(epochs, iterations, batches),
        shards=1,
        record=True,
        hyperparameters="raw",
    )
    trace = result.trace[0]
    return Schedule(
        sync,
        seed,
        trace.header.ticks_per_s,
        epochs,
        [entry.event for entry in trace.entries],
        [trace.header.time_s(entry) for entry in trace.entries],
        batches,
        result.time_s,
        result.measures,
        result.bytes_by_kind,
    )


def _train(epochs: Epochs, iterations: int | None, batches: dict[int, list[Batch]]) -> None:
    """Train a network with one parameter as one worker of a run, and add its batches to `batches`."""
    network = nn.Linear(1, 1, bias=False)
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.0), model=network)
    loader = DataLoader(
        TensorDataset(torch.arange(epochs.samples)), epochs.batch, drop_last=iterations is not None
    )
    part = distribute(loader)
    session = current()
    assert session is not None
    own = batches.setdefault(session.worker, [])
    nothing = torch.zeros(1, 1)

    def closure() -> None:
        network(nothing).backward()

    def positions_of_epochs() -> Iterator[Batch]:
        for epoch in itertools.count() if iterations is not None else range(epochs.epochs):
            for (positions,) in part:
                yield Batch(epoch, int(positions[0]), len(positions))

    for batch in itertools.islice(positions_of_epochs(), iterations):
        own.append(batch)
        optimizer.step(closure)
