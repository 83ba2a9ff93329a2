"""Recording, reading, replaying and measuring the traces of a run.

A trace contains the events of one core and the actions that followed. Everything that is said about a run afterwards
is computed from its traces and records: statistics, the use of time, findings, the values of a report. The code here
does not depend on how these values are shown.

Read first: `recording` and `replay`, then `measures`.

Imports from `errors`, `state`, `files`, `trust`, `words`, `sync` and `core`.
"""

from __future__ import annotations

from ..core.requests import Entry, EntryRecorder
from .recording import Header, Memory, Recorder, Trace, read, read_run
from .replay import Replay, replay

__all__ = [
    "Entry",
    "EntryRecorder",
    "Header",
    "Memory",
    "Recorder",
    "Replay",
    "Trace",
    "read",
    "read_run",
    "replay",
]
