"""The times of a worker's iterations, which it also writes to `worker-<index>.jsonl` in the run directory."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..core.metrics.time_spent import Lap
from ..core.protocol.messages import Commit
from ..sync.ticks import TICKS_PER_S
from ..trace.records import IterationRecord
from .job import Assignment
from .segmented import TEND_S, SegmentedFile, segmenting

__all__ = ["Iterations"]

LEAST_NOTED_S = 1e-6  # shorter times are left out of the records
USUAL_ITERATIONS = 15  # number of iterations whose median is the usual computing time


class Iterations:
    """The times of one worker's iterations. All are in seconds on the clock of the run.

    Args:
        place: the worker's place in the run.
        failed: called with an error message when the file of the records cannot be written.

    Attributes:
        begun_s: when the weights for the current iteration arrived; None before the first iteration.
        computed_s: when the current gradient was complete.
        lap: what the worker has done in the current iteration until its push.
        begins_pass: True if this push is the first one of a pass over its loader.
        restarted: when the current iteration was aborted and restarted; None if it was not aborted.
    """

    def __init__(self, place: Assignment, failed: Callable[[str], None]) -> None:
        self.begun_s: float | None = None
        self.computed_s = 0.0
        self.lap = Lap()
        self.begins_pass = False
        self.restarted: tuple[float, float] | None = None
        # the computing times of the latest iterations
        self._computing_s: deque[float] = deque(maxlen=USUAL_ITERATIONS)
        # the record of the last iteration, if the script logs the loss of an iteration after its step
        self._unwritten: IterationRecord | None = None
        self._machine = place.machine or msgspec.UNSET
        self._file: SegmentedFile | None = None  # the records; None if there are none
        if place.job.traces.kept != "off":
            path = Path(place.job.run_dir, f"worker-{place.index}.jsonl")
            segments = segmenting(place.job, "worker", place.machine)
            self._file = SegmentedFile(path, failed, segments, append=place.incarnation > 0)
        self._encode = msgspec.json.Encoder().encode
        self._tend_s = 0.0  # when the file is tended next

    def begin(self, now_s: float) -> None:
        """Record that the weights for an iteration have arrived."""
        self.begun_s = now_s
        self.restarted = None
        self.begins_pass = False

    def restart(self, dropped_s: float, now_s: float) -> None:
        """Record that the current iteration was aborted, and is restarted now."""
        self.restarted = dropped_s, now_s

    def usual_s(self, otherwise_s: float) -> float:
        """Return the usual computing time; `otherwise_s` before the first push."""
        return statistics.median(self._computing_s) if self._computing_s else otherwise_s

    def push(self, lap: Lap, busy_s: float) -> None:
        """Record that a push begins.

        Args:
            lap: what the worker has done in the iteration.
            busy_s: how long it has loaded and computed for the push.
        """
        self.lap = lap
        self._computing_s.append(busy_s)

    def end(
        self,
        commit: Commit | None,
        pushed_s: float,
        answered_ticks: int,
        loss: float | None = None,
        *,
        follows: bool = False,
    ) -> float:
        """Record the iteration that has ended, and begin the next one.

        Args:
            commit: the commit that it has ended with.
            pushed_s: when its push began.
            answered_ticks: when it ended.
            loss: its loss, if that is known.
            follows: True if the loss may become known before the next push. The record is then written after that.

        Returns:
            When the next iteration has begun.
        """
        answered_s = answered_ticks / TICKS_PER_S
        if self._file is not None:
            self.write_unwritten()
            record = self._record(commit, pushed_s, answered_s, loss)
            if follows:
                self._unwritten = record
            else:
                self._write(self._file, record)
        self.begin(answered_s)
        return answered_s

    def _record(
        self, commit: Commit | None, pushed_s: float, answered_s: float, loss: float | None
    ) -> IterationRecord:
        """Return the record of the iteration that has ended."""
        assert self.begun_s is not None
        assert commit is not None
        dropped_s, restarted_s = self.restarted or (None, None)
        outside_s, loading_s, computing_s = (
            ticks / TICKS_PER_S for ticks in (self.lap.outside, self.lap.loading, self.lap.computing)
        )
        known_s = outside_s + loading_s + computing_s
        lasted_s = (dropped_s or pushed_s) - self.begun_s
        # An aborted computation is not part of the lap, so exchanges before it are not known.
        exchanged_s = lasted_s - known_s if dropped_s is None else 0.0
        return IterationRecord(
            iteration=commit.iteration,
            begun_s=self.begun_s,
            computed_s=self.computed_s,
            pushed_s=pushed_s,
            answered_s=answered_s,
            loss=loss,
            superstep=commit.stop.superstep if commit.stop is not None else None,
            change=commit.change.number if commit.change is not None else None,
            dropped_s=dropped_s,
            restarted_s=restarted_s,
            machine=self._machine,
            outside_s=_noted(outside_s),
            loading_s=_noted(loading_s),
            exchanged_s=_noted(exchanged_s),
            begins_pass=self.begins_pass or msgspec.UNSET,
        )

    def write_unwritten(self, loss: float | None = None) -> None:
        """Write the record that has waited for its loss, if there is one."""
        record, self._unwritten = self._unwritten, None
        if record is not None and self._file is not None:
            if loss is not None:
                record = msgspec.structs.replace(record, loss=loss)
            self._write(self._file, record)

    def _write(self, file: SegmentedFile, record: IterationRecord) -> None:
        """Write a record."""
        file.write(self._encode(record) + b"\n")
        if record.answered_s >= self._tend_s:
            self._tend_s = record.answered_s + TEND_S
            file.tend()

    def flush(self) -> None:
        """Write the buffered records."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write all records, and close the file."""
        self.write_unwritten()
        if self._file is not None:
            self._file.close()


def _noted(seconds: float) -> float | msgspec.UnsetType:
    """Return a time as it is recorded."""
    return round(seconds, 9) if seconds >= LEAST_NOTED_S else msgspec.UNSET
