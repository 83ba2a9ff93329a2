"""Traces of a run: recorded, read, replayed, and measured."""

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
