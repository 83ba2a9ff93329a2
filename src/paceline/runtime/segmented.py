"""Writes the files that grow with a run in segments, so that the oldest ones can be deleted: see `trace.segments`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from ..sync.ticks import TICKS_PER_S
from ..trace.segments import KEPT_SEGMENTS, earlier_path, earlier_segments
from .best_effort import BestEffortFile
from .job import Job

__all__ = ["TEND_S", "TEND_TICKS", "SegmentedFile", "Segmenting", "segmenting"]

TEND_S = 0.25
"""Interval in seconds at which the hosts call `SegmentedFile.tend`."""

TEND_TICKS = round(TEND_S * TICKS_PER_S)

LEAST_BYTES = 2**14
"""Minimum size of a segment in bytes."""

PART_OF_MERGED = {"shard": 4, "coordinator": 1}
PART_OF_OWN = 2
"""The sizes of what is written for an iteration of a worker, in relation to one another: an entry for the push and
one for the pull at each shard, at most one at the coordinator, and a record."""


class Segmenting(NamedTuple):
    """How a file is written in segments.

    Attributes:
        size_bytes: size at which a segment is full.
        kept: number of full segments that are kept by the process that writes the file, which deletes the others.
            None if another process deletes them, after it has digested them.
    """

    size_bytes: int
    kept: int | None


def segmenting(
    job: Job, kind: Literal["shard", "coordinator", "worker"], machine: int = 0
) -> Segmenting | None:
    """Return how a process of a run writes its traces or records; None to keep all of them.

    All files of the run share the bytes that the user grants, so that they cover about the same time.

    Args:
        job: the configuration of the run.
        kind: what writes the file.
        machine: index of its machine. On machine 0, the launcher's, segments are digested before they are deleted.
    """
    if job.traces.kept != "recent":
        return None
    merged = sum(PART_OF_MERGED.values()) - PART_OF_MERGED["shard"] + PART_OF_MERGED["shard"] * job.shards
    total = job.workers * (merged + PART_OF_OWN)
    part = PART_OF_OWN if kind == "worker" else PART_OF_MERGED[kind] * job.workers
    size_bytes = job.traces.size_bytes * part // (total * (KEPT_SEGMENTS + 1))
    return Segmenting(max(LEAST_BYTES, size_bytes), None if machine == 0 else KEPT_SEGMENTS)


class SegmentedFile(BestEffortFile):
    """An output file that is written in segments. Its owner calls `tend` several times per second.

    Args:
        path: path of the file, which is overwritten if it exists.
        failed: called once with an error message when the file cannot be opened, written or closed.
        segmenting: how it is written in segments; None to write one that never ends.
        append: True to append to the file instead.
    """

    buffered = True

    def __init__(
        self,
        path: Path,
        failed: Callable[[str], None],
        segmenting: Segmenting | None,
        *,
        append: bool = False,
    ) -> None:
        super().__init__(path, failed, append=append)
        self._segmenting = segmenting

    def tend(self) -> bool:
        """Write the buffered data. Return True if the segment was full, so that another one has begun."""
        self.flush()
        if self._segmenting is None or self.size_bytes < self._segmenting.size_bytes:
            return False
        number = max(earlier_segments(self._path), default=-1) + 1
        self.close()
        try:
            earlier_path(self._path, number).parent.mkdir(exist_ok=True)
            os.replace(self._path, earlier_path(self._path, number))
            self._file = self._path.open("wb")
        except OSError as error:
            self._give_up(error)
            return False
        if (kept := self._segmenting.kept) is not None:
            for segment in list(earlier_segments(self._path).values())[:-kept]:
                with contextlib.suppress(OSError):  # the next call tries it again
                    segment.unlink()
        return True
