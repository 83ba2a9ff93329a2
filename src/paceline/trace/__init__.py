"""Recording, reading, replaying and measuring the traces of a run."""

from __future__ import annotations

from .recording import (
    Entry,
    EntryRecorder,
    Header,
    Memory,
    Recorder,
    Trace,
    new_machine,
    read,
    read_run,
    replay,
)

__all__ = [
    "Entry",
    "EntryRecorder",
    "Header",
    "Memory",
    "Recorder",
    "Trace",
    "new_machine",
    "read",
    "read_run",
    "replay",
]
