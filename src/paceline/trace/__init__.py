"""Recording, reading, replaying and measuring the traces of a run."""

from __future__ import annotations

from .recording import (
    Entry,
    EntryRecorder,
    Header,
    Memory,
    Recorder,
    Trace,
    read,
    read_run,
)
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
