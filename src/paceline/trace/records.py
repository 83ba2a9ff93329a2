"""The times of each iteration of each worker, which are stored in `worker-<index>.jsonl` in the run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["IterationRecord", "read_records"]


class IterationRecord(msgspec.Struct, frozen=True):
    """The times of one iteration, in seconds since the run began.

    Attributes:
        iteration: number of the iteration, from 0.
        begun_s: time at which the weights had arrived and the computation began.
        computed_s: time at which the gradient was ready. A worker that emulates a slower machine slept from then
            until `pushed_s`.
        pushed_s: time at which the push began.
        answered_s: time at which the weights of the last shard had arrived.
        loss: the loss that the script's closure returned; None if it returned none.
        superstep: number of the superstep if the push was the last one before its barrier, else None.
        change: number of the change of the sync model if the push was the last one before it, else None.
        dropped_s: time at which the computation was aborted in order to be restarted; None if it was not.
        restarted_s: time at which the computation was restarted; None if it was not.
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

    @property
    def wasted_s(self) -> float:
        """The time of the aborted computation and of the pull after it, in seconds."""
        return 0.0 if self.restarted_s is None else self.restarted_s - self.begun_s


def read_records(run_dir: Path) -> list[list[IterationRecord]]:
    """Return the records of each worker, in order.

    An incomplete last line, which is left behind if a worker is killed, is ignored.
    """
    decoder = msgspec.json.Decoder(IterationRecord)
    logs = sorted(run_dir.glob("worker-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [[decoder.decode(line) for line in log.read_bytes().split(b"\n")[:-1]] for log in logs]
