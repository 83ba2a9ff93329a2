"""What the workers of a run have spent their time on. The times add up to the duration of the run.

    computing   computations that were pushed. If the run was cut off, the computation in progress counts, too
    loading     the script asked a distributed loader for a batch
    waiting     pulls that a shard did not answer at once, from their arrival until they were answered, their worker
                was lost, or the run ended; of several shards, the longest wait counts
    transfer    messages on their way: pushes, weights and requests for data. This is what remains of the presence of
                a worker when all other times are subtracted
    wasted      computations that were aborted, the pulls after them, and what a worker had computed when it was lost
    paused      the worker could not go on, because the run had too few workers
    outside     the script did not train: it evaluated or saved the model, waited in a barrier or a reduction, or had
                pushed for the last time. `core.metrics.time_spent` defines what is outside, and what is loading
    idle        time from when a worker finished until the last worker left
    absent      time in which the worker had not joined yet, was lost, or had left before its script ended

A worker is present from the moment when shard 0 counts it among its workers until it has left. Its presence is the
sum of the first seven times. The waits are measured by the shards, each on its own clock; the other times are
measured by the workers (see `core.metrics.time_spent`). So no two clocks are compared, and the sums are exact.

A worker that is lost makes no last report. The time since its last report belongs to the activity that it has
reported then, except for the time in which it waited.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..core.metrics.time_spent import STATES, WorkerTime
from .measures import Presence

__all__ = ["TimeUse", "time_shares", "time_use"]


class TimeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has spent its time on, in seconds. See the description of this module.

    Attributes:
        computing_s: computations that were pushed.
        loading_s: waits for batches of a distributed loader.
        waiting_s: pulls that were not answered at once.
        transfer_s: messages on their way.
        wasted_s: computations that were aborted or lost.
        paused_s: pauses of the run.
        outside_s: time outside of training.
        idle_s: time after the worker had finished.
        absent_s: time in which the worker did not take part in the run.
    """

    computing_s: float
    loading_s: float
    waiting_s: float
    transfer_s: float
    wasted_s: float
    paused_s: float
    outside_s: float
    idle_s: float
    absent_s: float

    @property
    def present_s(self) -> float:
        """Time for which the worker took part in the run, in seconds."""
        return (
            self.computing_s
            + self.loading_s
            + self.waiting_s
            + self.transfer_s
            + self.wasted_s
            + self.paused_s
            + self.outside_s
        )


def time_use(
    presences: Mapping[int, Presence], spent: Mapping[int, WorkerTime], ticks_per_s: int
) -> dict[int, TimeUse]:
    """Return what each worker has spent its time on.

    Args:
        presences: what the traces tell; see `Meter.presences`.
        spent: what the workers have reported; see `core.metrics.time_spent.TimeLedger`.
        ticks_per_s: number of ticks per second.

    Example:
        >>> presence = Presence(present=100, waiting=20, idle=0, absent=0)
        >>> spent = WorkerTime({"computing": 60, "wasted": 0, "paused": 0, "outside": 0}, {"computing": 25})
        >>> use = time_use({0: presence}, {0: spent}, ticks_per_s=1)[0]
        >>> use.computing_s, use.waiting_s, use.transfer_s
        (80.0, 20.0, 0.0)
    """
    found = {}
    for worker, presence in presences.items():
        times = dict.fromkeys(STATES, 0)
        left = presence.present - presence.waiting
        if worker in spent:
            times.update(spent[worker].reported)
            left -= sum(times.values())
            for state, tail in spent[worker].tails.items():
                added = max(0, min(tail, left))
                times[state] += added
                left -= added
        found[worker] = TimeUse(
            **{f"{state}_s": ticks / ticks_per_s for state, ticks in times.items()},
            waiting_s=presence.waiting / ticks_per_s,
            transfer_s=left / ticks_per_s,
            idle_s=presence.idle / ticks_per_s,
            absent_s=presence.absent / ticks_per_s,
        )
    return found


def time_shares(uses: Mapping[int, TimeUse]) -> dict[str, float]:
    """Return the shares of the workers' presence, from 0 to 1: name of the share -> the share."""
    present_s = sum(use.present_s for use in uses.values())
    return {
        f"{state}_share": sum(getattr(use, f"{state}_s") for use in uses.values()) / present_s
        if present_s
        else 0.0
        for state in ("computing", "transfer", *STATES[1:])
    }
