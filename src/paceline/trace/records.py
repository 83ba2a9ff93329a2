"""What each iteration of each worker cost: lines of `worker-<index>.jsonl` in the run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["IterationRecord", "read_records"]


class IterationRecord(msgspec.Struct, frozen=True):
    """What one iteration cost, in seconds since the run began.

    Attributes:
        iteration: from 0.
        begun_s: the weights were here.
        computed_s: the gradient was ready. Until `pushed_s` the worker slept, if it emulates a slower machine.
        pushed_s: the push began.
        answered_s: the last shard's weights were here.
        loss: if the script's closure returned one.
        superstep: set if the push was the last one before that superstep's barrier.
        change: set if the push was the last one before that change of the sync model.
        dropped_s: when the computation was dropped, to be started anew; None if it was not.
        restarted_s: when it was started anew.
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
        """What was computed in vain, and the pull after it."""
        return 0.0 if self.restarted_s is None else self.restarted_s - self.begun_s


def read_records(run_dir: Path) -> list[list[IterationRecord]]:
    """Each worker's records, in order. A last line that was cut short, when its worker was killed, is left out."""
    decoder = msgspec.json.Decoder(IterationRecord)
    logs = sorted(run_dir.glob("worker-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [[decoder.decode(line) for line in log.read_bytes().split(b"\n")[:-1]] for log in logs]
