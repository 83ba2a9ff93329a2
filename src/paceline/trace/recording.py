"""Record what a pure machine was told and what it answered; read it back; replay it.

A trace is a text file of JSON lines, one per host of a machine (each shard, and the coordinator). The first
line is the header: which model to begin with, hosted where, on which version of the format. Each further line is
one entry, in the order of processing: the event with its exact time, the actions that came out, whether it was
refused, and what came of the actions (the version that the shard reached, the staleness of each push it applied, how
far ahead the workers were whose pulls it answered).

Traces of other versions of the format are refused. Version 2 does not say how far ahead workers were, which only the
machine knew: every figure that builds on it would be wrong without a word.

**Replay.** `replay(trace)` feeds the events to a new machine of the same model and compares the actions. They
are identical, or it says where they part. Times survive the text exactly: the shortest decimal that reads back
as the same float.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from ..core.entry import Entry, EntryRecorder
from ..core.job_sync import JobSync
from ..core.shard_sync import ShardSync
from ..errors import ConfigurationError, InvalidEventError
from ..sync import Machine, parse
from ..sync.actions import AnyAction

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

FORMAT = 3


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace is a trace of.

    Attributes:
        sync: what the host began with, in the notation of the command line; for the coordinator of a job whose
            shards differ, one model for each. Changes are among the events.
        host: "shard" or "coordinator".
        index: of the shard; 0 for the coordinator.
        seed: of the run, from which the model draws.
        format: version of this file format.
        emulated: how unequal machines were emulated, in words, or "" if they were not.
        computed_by: in virtual time, on what gradients were computed: the trace is the same only there; "" if none
            were, and it is the same on any machine.
    """

    sync: str
    host: str
    index: int = 0
    seed: int = 0
    format: int = FORMAT
    emulated: str = ""
    computed_by: str = ""


class Trace(msgspec.Struct, frozen=True):
    """One host's trace, whole."""

    header: Header
    entries: list[Entry]


class Memory:
    """Keeps one trace."""

    def __init__(self, header: Header) -> None:
        self.trace = Trace(header, [])
        self.record = self.trace.entries.append


class Sink(Protocol):
    """Where the bytes of a trace go: a file, or something like one."""

    def write(self, data: bytearray, /) -> object: ...

    def close(self) -> object: ...


class Recorder:
    """Writes one trace, line by line; lines reach the file when its buffer is full and on `close`."""

    def __init__(self, file: Sink, header: Header) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._write(header)

    @classmethod
    def to_path(cls, path: Path, header: Header) -> Recorder:
        """Open `path` for writing and write the header."""
        return cls(path.open("wb"), header)

    def record(self, entry: Entry) -> None:
        """Append one entry."""
        self._write(entry)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._file.close()

    def _write(self, line: Header | Entry) -> None:
        self._encoder.encode_into(line, self._buffer)
        self._buffer += b"\n"
        self._file.write(self._buffer)


def read(path: Path) -> Trace:
    """Read one trace. The last line may be cut short (its process was killed); it is left out then.

    Raises:
        ConfigurationError: it is not a trace, or one of another version of the format.
    """
    lines = path.read_bytes().split(b"\n")
    try:
        version = msgspec.json.decode(lines[0])["format"]
        if version != FORMAT:
            raise ConfigurationError(
                f"{path} is a trace of format {version}; this version reads {FORMAT}. Record the run again, or read "
                "it with the version of Paceline that wrote it."
            )
        return Trace(msgspec.json.decode(lines[0], type=Header), list(_entries(lines[1:-1])))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is not a trace of Paceline: {error}") from error


def read_run(run_dir: Path) -> list[Trace]:
    """Read the traces in a run directory: each shard's, in order, then the coordinator's. See `read`."""
    shards = sorted(run_dir.glob("trace-shard-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [read(path) for path in [*shards, *run_dir.glob("trace-coordinator.jsonl")]]


def new_machine(header: Header) -> Machine:
    """A new machine such as the one that the trace was recorded of."""
    if header.host == "shard":
        return ShardSync(parse(header.sync), header.seed, header.index)
    return JobSync(header.sync, header.seed)


def replay(trace: Trace) -> list[str]:
    """Feed a trace's events to a new machine; return one line per difference. An empty list: identical."""
    machine = new_machine(trace.header)
    differences = []
    for number, entry in enumerate(trace.entries):
        actions: list[AnyAction] = []
        refused = None
        try:
            actions = machine.handle(entry.event)
        except InvalidEventError as error:
            refused = str(error)
        if actions != entry.actions or refused != entry.refused:
            differences.append(
                f"entry {number}: {entry.event}: recorded {entry.refused or entry.actions}, "
                f"replayed {refused or actions}"
            )
    return differences


def _entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    decoder = msgspec.json.Decoder(Entry)
    for line in lines:
        yield decoder.decode(line)
