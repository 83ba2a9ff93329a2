"""Records of the times of each worker's iterations, stored in `worker-<index>.jsonl` in the run directory.

A long run writes these files in segments (see `trace.segments`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from .segments import Follower, held_files

__all__ = ["IterationRecord", "read_records", "record_files", "records_in"]


class IterationRecord(msgspec.Struct, frozen=True):
    """The times of one iteration, in seconds since the run began.

    Attributes:
        iteration: number of the iteration, from 0.
        begun_s: time at which the computation began, after the weights had arrived.
        computed_s: time at which the gradient was ready. If the worker emulates a slower machine, it slept from this
            time until `pushed_s`.
        pushed_s: time at which the push began.
        answered_s: time at which the new weights of all shards had arrived.
        loss: the loss that the script has logged for this iteration, or that its closure has returned; None if there
            is neither.
        superstep: number of the superstep if the push was the worker's last one of that superstep, else None.
        change: number of the sync model change if the push was the worker's last one before the change, else None.
        dropped_s: time at which the computation was aborted in order to be restarted; None if it was not aborted.
        restarted_s: time at which the computation was restarted; None if it was not restarted.
        outside_s: part of the time from `begun_s` to `pushed_s` in which the script did not train; see
            `core.metrics.time_spent`. Unset if there is none, as in all records of earlier versions.
        loading_s: part of this time in which the script asked for batches.
        exchanged_s: part of this time in which the worker requested data, or pulled again after an evaluation.
        begins_pass: True if the iteration is the first one of a pass over its loader. What is outside of training in
            this iteration lies between two passes.
        machine: index of the machine whose clock the times are on (see `trace.clocks`). Unset if it is machine 0, the
            one with the coordinator.
    """

    iteration: int
    begun_s: float
    computed_s: float
    pushed_s: float
    answered_s: float
    loss: float | None
    superstep: int | None
    change: int | None = None
    dropped_s: float | None = None
    restarted_s: float | None = None
    machine: int | msgspec.UnsetType = msgspec.UNSET
    outside_s: float | msgspec.UnsetType = msgspec.UNSET
    loading_s: float | msgspec.UnsetType = msgspec.UNSET
    exchanged_s: float | msgspec.UnsetType = msgspec.UNSET
    begins_pass: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def apart_s(self) -> tuple[float, float, float]:
        """The times of this iteration outside of training, of loading, and of exchanges before the push."""
        return self.outside_s or 0.0, self.loading_s or 0.0, self.exchanged_s or 0.0

    @property
    def computing_s(self) -> float:
        """Time of the computation that was pushed: the last one, if the iteration was restarted."""
        outside_s, loading_s, exchanged_s = self.apart_s
        apart_s = outside_s + loading_s + exchanged_s
        begun_s = (
            self.begun_s + apart_s
            if self.restarted_s is None
            else max(self.restarted_s, self.begun_s + apart_s)
        )
        return max(0.0, self.pushed_s - begun_s)

    @property
    def wasted_s(self) -> float:
        """Time in seconds spent on an aborted computation and the pull after it; 0 if no computation was aborted."""
        return 0.0 if self.restarted_s is None else self.restarted_s - self.begun_s


def record_files(run_dir: Path) -> list[Path]:
    """Return the path of the records of each worker, in order of the workers' indices."""
    return held_files(run_dir, "worker-*")


def records_in(path: Path) -> Iterator[IterationRecord]:
    """Yield the records in a file, one by one: those that are left, if the run has deleted the oldest ones.

    An incomplete last line, which a killed worker may leave behind, is ignored.
    """
    decode = msgspec.json.Decoder(IterationRecord).decode
    yield from map(decode, Follower(path, headed=False).lines())


def read_records(run_dir: Path) -> list[list[IterationRecord]]:
    """Read all records in a run directory into memory. Return one list for each worker, in order of their indices."""
    return [list(records_in(path)) for path in record_files(run_dir)]
