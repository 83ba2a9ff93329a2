"""Replaying a trace: the recorded events go to the cores that run live, and must give the recorded actions.

This is what the design rests on: what decides depends on nothing but its events.
"""

from __future__ import annotations

import contextlib

from ..core.coordinator import Coordinator
from ..core.entry import Entry
from ..core.shard import Shard
from ..errors import InvalidEventError
from ..plugins import load_models
from ..sync.events import AnyEvent
from ..sync.schedule import read_schedule
from .recording import Header, Memory, Trace

__all__ = ["Replay", "replay"]


class Replay:
    """A new host such as the one from which a trace was recorded.

    Args:
        header: header of the trace.

    Raises:
        ConfigurationError: the sync model is not known here. Import the module of a model of your own first.
    """

    def __init__(self, header: Header) -> None:
        load_models(header.sync)
        schedule = read_schedule(header.sync)
        self._memory = Memory(header)
        if header.host == "shard":
            shard = Shard(header.index, schedule.first, header.seed, recorder=self._memory)
            self._take = shard.handle
        else:
            coordinator = Coordinator(
                schedule, workers=0, servers=0, shards=0, seed=header.seed, recorder=self._memory
            )
            self._take = coordinator.take

    def take(self, event: AnyEvent) -> Entry:
        """Hand over an event; return what the host records."""
        with contextlib.suppress(InvalidEventError):  # the refusal is recorded
            self._take(event)
        return self._memory.trace.entries[-1]


def replay(trace: Trace) -> list[str]:
    """Replay a trace and return a description of each difference. The list is empty if all actions are identical."""
    host = Replay(trace.header)
    differences = []
    for number, recorded in enumerate(trace.entries):
        replayed = host.take(recorded.event)
        if (replayed.actions, replayed.refused) != (recorded.actions, recorded.refused):
            differences.append(
                f"entry {number}: {recorded.event}: recorded {recorded.refused or recorded.actions}, "
                f"replayed {replayed.refused or replayed.actions}"
            )
    return differences
