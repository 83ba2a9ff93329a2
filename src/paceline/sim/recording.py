"""Where the entries of each host of a simulation go: to the meter and, if they are to be kept, into memory."""

from __future__ import annotations

from ..measures import Meter
from ..sync.notation import notation
from ..sync.schedule import Schedule
from ..trace import Entry, EntryRecorder, Header, Memory, Trace

__all__ = ["Recorders"]


class Recorders:
    """One for each host of a job.

    Args:
        schedule: of the job.
        shards: how many.
        seed: of the run.
        meter: what measures the shards' entries.
        keep: keep all entries.
        computed_by: see `Header`.

    Attributes:
        shards: each shard's.
        job: the coordinator's; None if nothing is kept.
    """

    def __init__(
        self, schedule: Schedule, shards: int, seed: int, meter: Meter, keep: bool, computed_by: str = ""
    ) -> None:
        self._kept: list[Memory] = []
        self.shards: list[EntryRecorder] = []
        for index in range(shards):
            sync = str(schedule.at_shard(index))
            header = Header(sync=sync, host="shard", index=index, seed=seed, computed_by=computed_by)
            memory = Memory(header) if keep else None
            self._kept += [memory] if memory is not None else []
            self.shards.append(Metered(meter, index, memory))
        sync = notation(schedule.first)
        header = Header(sync=sync, host="coordinator", seed=seed, computed_by=computed_by)
        self.job = Memory(header) if keep else None
        self._kept += [self.job] if self.job is not None else []

    @property
    def traces(self) -> list[Trace]:
        """What was kept: each shard's, then the coordinator's."""
        return [memory.trace for memory in self._kept]


class Metered:
    """Measures a shard's entries, and keeps them if they are to be kept."""

    def __init__(self, meter: Meter, shard: int, memory: Memory | None) -> None:
        self._meter = meter
        self._shard = shard
        self._memory = memory

    def record(self, entry: Entry) -> None:
        self._meter.record(self._shard, entry)
        if self._memory is not None:
            self._memory.record(entry)
