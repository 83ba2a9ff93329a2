"""Recording and reading traces: the events and actions of the state machines of a run.

A trace is a text file of JSON lines. A run has one trace per shard, and one for the coordinator. The first line is
the header, which states the version of the format, the initial sync model, and whether the trace belongs to a shard
or to the coordinator. Each further line is an entry; the entries are in the order in which their events were
processed. An entry contains the event with its exact time, the resulting actions, the reason if the event was
refused, and the effects of the actions: the version that the shard reached, the staleness of each push that the shard
applied, and the largest gap (see `measures`) among the workers whose pulls the shard answered.

Traces in other versions of the format are rejected. For example, version 2 does not contain the gaps of the workers,
which only the state machine can compute. Statistics that depend on these gaps would be wrong without any warning.

Times are stored exactly, as the shortest decimal number that is read back as the same float. See `replay` for the
main use of traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from ..core.entry import Entry, EntryRecorder
from ..errors import ConfigurationError

__all__ = [
    "Entry",
    "EntryRecorder",
    "Header",
    "Memory",
    "Recorder",
    "Trace",
    "read",
    "read_run",
]

FORMAT = 3


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a trace.

    Attributes:
        sync: initial sync model, in the notation of the command line. For the coordinator of a run whose shards have
            different models, the notation lists one model per shard. Changes of the model are recorded as events.
        host: "shard" or "coordinator", depending on which of them recorded the trace.
        index: index of the shard; 0 for the coordinator.
        seed: random seed for the run, from which the sync model's random numbers are derived.
        format: version of the file format.
        emulated: description of how the run emulated unequal machines; "" if the run emulated nothing.
        computed_by: for a run in virtual time that computed gradients, a description of the hardware and software
            that computed them. The trace can be reproduced only with the same hardware and software. "" if no
            gradients were computed; the trace is then the same on any machine.
    """

    sync: str
    host: str
    index: int = 0
    seed: int = 0
    format: int = FORMAT
    emulated: str = ""
    computed_by: str = ""


class Trace(msgspec.Struct, frozen=True):
    """A complete trace.

    Attributes:
        header: the header.
        entries: all entries, in order.
    """

    header: Header
    entries: list[Entry]


class Memory:
    """A recorder that stores one trace in memory.

    Attributes:
        trace: the trace recorded so far.
    """

    def __init__(self, header: Header) -> None:
        self.trace = Trace(header, [])
        self.record = self.trace.entries.append


class Sink(Protocol):
    """A file or similar object to which a `Recorder` writes the bytes of a trace."""

    def write(self, data: bytearray, /) -> object: ...

    def close(self) -> object: ...


class Recorder:
    """A recorder that writes one trace to a file. The file object buffers the lines."""

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
        """Write one entry."""
        self._write(entry)

    def close(self) -> None:
        """Write the buffered lines and close the file."""
        self._file.close()

    def _write(self, line: Header | Entry) -> None:
        self._encoder.encode_into(line, self._buffer)
        self._buffer += b"\n"
        self._file.write(self._buffer)


def read(path: Path) -> Trace:
    """Read one trace. An incomplete last line, which a killed process may leave behind, is ignored.

    Raises:
        ConfigurationError: the file is not a trace, or it is in another version of the format.
    """
    lines = path.read_bytes().split(b"\n")
    try:
        version = msgspec.json.decode(lines[0])["format"]
        if version != FORMAT:
            raise ConfigurationError(
                f"{path} is a trace of format {version}; this version of Paceline reads format {FORMAT}. Repeat the "
                "run, or read the trace with the version of Paceline that wrote it."
            )
        return Trace(msgspec.json.decode(lines[0], type=Header), list(_entries(lines[1:-1])))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is not a Paceline trace: {error}") from error


def read_run(run_dir: Path) -> list[Trace]:
    """Read all traces in a run directory: first the shards' traces, in order, then the coordinator's trace."""
    shards = sorted(run_dir.glob("trace-shard-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [read(path) for path in [*shards, *run_dir.glob("trace-coordinator.jsonl")]]


def _entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    decoder = msgspec.json.Decoder(Entry)
    for line in lines:
        yield decoder.decode(line)
