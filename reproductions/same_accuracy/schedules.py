"""Schedules: which worker pushes when, and on which data each gradient is computed.

None of these depends on the weights, for models that do not measure gradients. So a schedule is recorded once, in a
simulated run with real epochs of positions in place of data, and a network with one parameter. It is then used for
all networks, rates, seeds and hyper-parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.sim import Cluster, simulate
from paceline.sync.events import RecordedEvent
from paceline.trace.measures import missing_updates
from paceline.train.data import distribute
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import current

__all__ = ["Batch", "Epochs", "Schedule", "record"]


class Epochs(NamedTuple):
    """The data of a run.

    Attributes:
        samples: number of samples in an epoch.
        batch: number of samples in a worker's batch.
        epochs: number of epochs.
    """

    samples: int
    batch: int
    epochs: int


class Batch(NamedTuple):
    """The data from which a gradient is computed: adjacent positions in the order of an epoch.

    Attributes:
        epoch: number of the epoch, from 0.
        start: first position.
        size: number of positions.
    """

    epoch: int
    start: int
    size: int


class Schedule(NamedTuple):
    """What shard 0 of a simulated run has received.

    Attributes:
        sync: the sync model.
        seed: random seed for the run.
        ticks_per_s: number of ticks per second of virtual time.
        epochs: the data of the run.
        events: the events at the shard, in order.
        times_s: virtual time of each event, in seconds.
        batches: for each worker, the batch of each of its iterations.
        end_s: virtual time at which the last worker finished, in seconds.
        missing: what the user is told at the end about updates that are missing; "" if nothing.
    """

    sync: str
    seed: int
    ticks_per_s: int
    epochs: Epochs
    events: Sequence[RecordedEvent]
    times_s: Sequence[float]
    batches: dict[int, list[Batch]]
    end_s: float
    missing: str


def record(cluster: Cluster, sync: str, epochs: Epochs, seed: int) -> Schedule:
    """Return the schedule of a run with one shard."""
    batches: dict[int, list[Batch]] = {}
    result = simulate(
        cluster,
        sync,
        seed=seed,
        train_fn=_train,
        args=(epochs, batches),
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
        missing_updates(result.measures),
    )


def _train(epochs: Epochs, batches: dict[int, list[Batch]]) -> None:
    """Train a network with one parameter as one worker of a run, and add its batches to `batches`."""
    network = nn.Linear(1, 1, bias=False)
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.0), model=network)
    loader = DataLoader(TensorDataset(torch.arange(epochs.samples)), epochs.batch)
    part = distribute(loader)
    session = current()
    assert session is not None
    own = batches.setdefault(session.worker, [])
    nothing = torch.zeros(1, 1)

    def closure() -> None:
        network(nothing).backward()

    for epoch in range(epochs.epochs):
        for (positions,) in part:
            own.append(Batch(epoch, int(positions[0]), len(positions)))
            optimizer.step(closure)
