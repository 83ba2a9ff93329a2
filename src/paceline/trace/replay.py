"""Replays a trace: passes the recorded events to a new core, which must return the recorded actions.

Live runs use the same cores (see `paceline.core`). The decisions of a core depend only on its events, so a replay is
exact. If the beginning of a trace was deleted, the replay begins with the state of the core in the header.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from ..core.coordinator import Coordinator
from ..core.protocol.entry import Entry
from ..core.shard import Shard
from ..errors import ConfigurationError, InvalidEventError
from ..plugins import load_models
from ..sync.events import RecordedEvent
from ..sync.schedule import read_schedule
from .kept_models import modules_of_models, require_known
from .keyframes import fill
from .recording import Header, Memory, Trace

__all__ = ["Replay", "replay"]


class Replay:
    """A new core of the kind that recorded a trace, for replaying the trace event by event.

    Args:
        header: header of the trace.
        trust: True to import the modules that the header names, if they have not been imported.

    Attributes:
        core: the core.

    Raises:
        ConfigurationError: the sync model is unknown, the module that defines it has not been imported, or the
            beginning of the trace was deleted and nothing says what the core's state was at the first entry that is
            left.
    """

    def __init__(self, header: Header, *, trust: bool = False) -> None:
        imports = () if header.imports is msgspec.UNSET else header.imports
        keyframe = None if header.keyframe is msgspec.UNSET else header.keyframe
        if keyframe is not None and keyframe.why:
            raise ConfigurationError(
                f"the trace of {header.recorded_by} cannot be replayed: its beginning was deleted, and the state of "
                f"the sync model at the first entry that is left was not kept ({keyframe.why}). Run with --traces "
                "full to keep the whole trace."
            )
        sync = header.sync if keyframe is None or not keyframe.sync else keyframe.sync
        if not trust:
            require_known(imports, f"the trace of {header.recorded_by}")
        load_models(sync, imports if trust else ())
        schedule = read_schedule(sync)
        if not trust:
            require_known(modules_of_models(schedule.models), f"the trace of {header.recorded_by}")
        self._memory = Memory(header)
        if header.host == "shard":
            self.core: Shard | Coordinator = Shard(
                header.index,
                schedule.first,
                header.seed,
                recorder=self._memory,
                ticks_per_s=header.ticks_per_s,
                translated=header.translated,
                replays=True,
            )
            self._take: Callable[[Any], object] = self.core.handle
        else:
            self.core = Coordinator(
                schedule,
                workers=0,
                servers=0,
                shards=0,
                seed=header.seed,
                recorder=self._memory,
                ticks_per_s=header.ticks_per_s,
            )
            self._take = self.core.take
        if keyframe is not None:
            fill(self.core, keyframe, imports)

    def take(self, event: RecordedEvent) -> Entry:
        """Pass an event to the core and return the entry that the core records."""
        with contextlib.suppress(InvalidEventError):  # the refusal is recorded
            self._take(event)
        return self._memory.trace.entries[-1]


def replay(trace: Trace, *, trust: bool = False) -> list[str]:
    """Replay a trace and return a description of each difference; [] if all decisions are identical.

    Args:
        trace: the trace.
        trust: True to import the modules with the models of the run that the trace names. Otherwise, import them
            first: a trace is data, and to import a module is to run it.
    """
    host = Replay(trace.header, trust=trust)
    differences = []
    for number, recorded in enumerate(trace.entries):
        replayed = host.take(recorded.event)
        if (was := _decision(recorded)) != (now := _decision(replayed)):
            differences.append(f"entry {number}: {recorded.event}: recorded {was}, replayed {now}")
    return differences


def _decision(entry: Entry) -> object:
    """Return what a core has decided about an event: its refusal, or its actions and the standings of updates."""
    return entry.refused or ((entry.actions, entry.standings) if entry.standings else entry.actions)
