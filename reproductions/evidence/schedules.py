"""Schedules: which gradients each update contains, and on which weights they were computed.

Under every model but those that measure gradients, the order of updates does not depend on the weights. So a schedule
is recorded once, in a simulation without training, and then used for all learning rates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.sim import Dataset, simulate
from paceline.sync.actions import ApplyMean, ApplyPush
from paceline.sync.events import PushReceived
from paceline.trace import Trace

from .places import Place, Variant

FULL_BATCH = 1024  # samples in a full batch, if batches are balanced: enough for fine differences


class Gradient(NamedTuple):
    """A gradient in an update."""

    worker: int  # the worker that computed it
    iteration: int  # the worker's iteration
    number: int  # number of gradients that were pushed before it, by all workers
    read: int  # version of the weights on which it was computed
    weight: float  # factor of the gradient in the update
    share: float = 1.0  # size of the batch from which it was computed, divided by the size of a full batch


class Update(NamedTuple):
    """One update of the weights."""

    time_s: float  # virtual time
    # size of all batches from which a gradient has been pushed so far, applied or not, in full batches
    pushed: float
    gradients: tuple[Gradient, ...]  # the gradients whose weighted sum is applied


class Schedule(NamedTuple):
    """The updates of a run, in order. The k-th update, counted from 0, turns version k into version k + 1."""

    updates: tuple[Update, ...]

    @property
    def times_s(self) -> np.ndarray:
        """The time of each update."""
        return np.array([update.time_s for update in self.updates])

    @property
    def pushed(self) -> np.ndarray:
        """The number of full batches that were used until each update."""
        return np.array([update.pushed for update in self.updates])


def record(place: Place, variant: Variant, seed: int) -> Schedule:
    """Simulate a place under a model and return the schedule."""
    data = None
    if variant.batch == "balanced":
        data = Dataset(samples=FULL_BATCH * place.workers * 1000, batch_size=FULL_BATCH)
    result = simulate(
        place.cluster(variant.fixed_share),
        variant.sync,
        iterations=None,
        seed=seed,
        until_s=place.until_s,
        data=data,
        batch=variant.batch,
        record=True,
    )
    return schedule_of(result.trace[0])


def schedule_of(trace: Trace) -> Schedule:
    """Return the schedule that a shard's trace contains."""
    updates: list[Update] = []
    shares: dict[tuple[int, int], float] = {}
    numbers: dict[tuple[int, int], int] = {}
    pushed = 0.0
    for entry in trace.entries:
        event = entry.event
        if isinstance(event, PushReceived):
            share = 1.0 if event.samples is None else event.samples / FULL_BATCH
            shares[event.worker, event.iteration] = share
            numbers[event.worker, event.iteration] = len(numbers)
            pushed += share
        stale = iter(entry.staleness)
        for action in entry.actions:
            if isinstance(action, ApplyPush):
                found, weights = [next(stale)], [action.scale]
            elif isinstance(action, ApplyMean):
                found = [next(stale) for _ in action.pushes]
                total = sum(shares[push] for push in action.pushes)
                weights = [shares[push] / total for push in action.pushes]
            else:
                continue
            version = len(updates)
            gradients = tuple(
                Gradient(
                    worker,
                    iteration,
                    numbers[worker, iteration],
                    version - staleness,
                    weight,
                    shares[worker, iteration],
                )
                for (worker, iteration, staleness), weight in zip(found, weights, strict=True)
            )
            updates.append(Update(trace.time_s(entry), pushed, gradients))
    return Schedule(tuple(updates))
