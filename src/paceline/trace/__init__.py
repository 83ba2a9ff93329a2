"""Recording, reading, replaying and measuring the traces of a run.

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
