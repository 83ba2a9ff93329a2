"""Recording and reading traces: the events and actions of the state machines of a run.

A trace is a text file of JSON lines. A run has one trace per shard, and one for the coordinator. The first line is
the header, which states the version of the format, the initial sync model, and whether the trace belongs to a shard
or to the coordinator. Each further line is an entry; the entries are in the order in which their events were
processed. An entry contains the event with its exact time, the resulting actions, the reason if the event was
refused, and the effects of the actions: the version that the shard reached, the staleness of each push that the shard
applied, and the largest gap (see `measures`) among the workers whose pulls the shard answered.

Times are whole numbers of ticks (see `paceline.sync.ticks`). In version 3 of the format, they were floats in seconds.
When such a trace is read, they are rounded to whole numbers of nanoseconds. Its decisions can then be replayed unless
they depended on the rounding errors of the floats.

A long run writes its traces in segments, of which the oldest may be deleted (see `trace.segments`). Each segment has
a header of its own. From the second one on, the header contains the state of the core when the segment began, so that
what is left can be replayed (see `trace.keyframes`). Such a segment is in version 5 of the format. When a trace is
read, its header is that of the first segment that is left.

Traces in earlier versions of the format are rejected. For example, version 2 does not contain the gaps of the
workers, which only the state machine can compute. Statistics that depend on these gaps would be wrong without any
warning. See `replay` for the main use of traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..core.protocol.entry import Entry, EntryRecorder
from ..errors import ConfigurationError
from ..files import open_regular
from ..sync.ticks import TICKS_PER_S, in_ticks
from .keyframes import Keyframe
from .segments import Follower, first_segment, held_files

__all__ = [
    "AnyTrace",
    "Entry",
    "EntryRecorder",
    "Header",
    "Memory",
    "Recorder",
    "Trace",
    "TraceFile",
    "read",
    "read_run",
    "trace_files",
]

DECODER = msgspec.json.Decoder(Entry)

FORMAT = 4
FORMAT_CONTINUED = 5  # the format of segments that continue a trace
FORMAT_IN_SECONDS = 3  # the last format in which times were numbers of seconds; `read` converts it


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
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).
        machine: index of the machine whose clock the times are on (see `trace.clocks`). Unset if it is machine 0, the
            one with the coordinator.
        imports: names of the modules that define the user's own models of the run. Unset if there are none.
        hyperparameters: "translated" if the hyper-parameters of each update are translated (see
            `paceline.sync.translation`). Unset if they are used as they are.
        keyframe: the state of the core before the first entry of a segment that continues a trace. Unset for the
            beginning of a trace.
    """

    sync: str
    host: str
    index: int = 0
    seed: int = 0
    format: int = FORMAT
    emulated: str = ""
    computed_by: str = ""
    ticks_per_s: int = TICKS_PER_S
    machine: int | msgspec.UnsetType = msgspec.UNSET
    imports: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    hyperparameters: str | msgspec.UnsetType = msgspec.UNSET
    keyframe: Keyframe | msgspec.UnsetType = msgspec.UNSET

    def continued(self, keyframe: Keyframe) -> Header:
        """Return the header of a segment that continues the trace, given the state of the core."""
        return msgspec.structs.replace(self, format=FORMAT_CONTINUED, keyframe=keyframe)

    @property
    def is_whole(self) -> bool:
        """True unless the trace continues another one, whose entries were deleted."""
        return self.keyframe is msgspec.UNSET

    @property
    def recorded_on(self) -> int:
        """Index of the machine whose clock the times are on."""
        return 0 if self.machine is msgspec.UNSET else self.machine

    @property
    def recorded_by(self) -> str:
        """The core that recorded the trace, for messages."""
        return f"shard {self.index}" if self.host == "shard" else "the coordinator"

    @property
    def translated(self) -> bool:
        """True if hyper-parameters are translated."""
        return self.hyperparameters == "translated"

    def time_s(self, entry: Entry) -> float:
        """Return the time of an entry's event, in seconds since the run began."""
        return entry.event.now_ticks / self.ticks_per_s


class Trace(msgspec.Struct, frozen=True):
    """A complete trace.

    Attributes:
        header: the header.
        entries: all entries, in order.
    """

    header: Header
    entries: list[Entry]

    def __repr__(self) -> str:
        return f"Trace({self.header.recorded_by}, {len(self.entries)} entries)"

    @property
    def machine(self) -> int:
        """Index of the machine whose clock the times are on."""
        return self.header.recorded_on

    def time_s(self, entry: Entry) -> float:
        """Return the time of an entry's event, in seconds since the run began."""
        return self.header.time_s(entry)


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
        self._header = header
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

    def begin_segment(self, keyframe: Keyframe) -> None:
        """Write the header of a segment, which the file has just begun, given the state of the core."""
        self._write(self._header.continued(keyframe))

    def close(self) -> None:
        """Write the buffered lines and close the file."""
        self._file.close()

    def _write(self, line: Header | Entry) -> None:
        self._encoder.encode_into(line, self._buffer)
        self._buffer += b"\n"
        self._file.write(self._buffer)


class TraceFile:
    """A trace in a file. Its entries are read one by one, so a trace of any length needs little memory.

    Args:
        path: path of the file, which is its newest segment.

    Attributes:
        path: path of the file.
        header: the header of the first segment that is left.

    Raises:
        ConfigurationError: the file is not a trace, or it is in another version of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(first_segment(path)) as file, self._checked():
            line = file.readline()
            version = msgspec.json.decode(line)["format"]
            self._convert = version == FORMAT_IN_SECONDS
            if version not in (FORMAT, FORMAT_CONTINUED, FORMAT_IN_SECONDS):
                raise ConfigurationError(
                    f"{path} is a trace of format {version}; this version of Paceline reads format {FORMAT}. Repeat "
                    "the run, or read the trace with the version of Paceline that wrote it."
                )
            self.header = msgspec.json.decode(_converted(line) if self._convert else line, type=Header)

    @property
    def entries(self) -> Iterator[Entry]:
        """All entries, in order. An incomplete last line, which a killed process may leave behind, is ignored.

        Raises:
            ConfigurationError: the file is not a trace.
        """
        with self._checked():
            for line in Follower(self.path, headed=True).lines():
                yield self.decode(line)

    def decode(self, line: bytes) -> Entry:
        """Decode a line of the file that is not a header."""
        return DECODER.decode(_converted(line) if self._convert else line)

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{self.path} is not a Paceline trace: {error}") from error


AnyTrace = Trace | TraceFile
"""A trace in memory or in a file."""


def read(path: Path) -> Trace:
    """Read one trace. An incomplete last line, which a killed process may leave behind, is ignored.

    Raises:
        ConfigurationError: the file is not a trace, or it is in another version of the format.
    """
    file = TraceFile(path)
    return Trace(file.header, list(file.entries))


def trace_files(run_dir: Path) -> list[TraceFile]:
    """Return all traces in a run directory: first the shards' traces, in order, then the coordinator's trace."""
    shards = held_files(run_dir, "trace-shard-*")
    return [TraceFile(path) for path in [*shards, *held_files(run_dir, "trace-coordinator")]]


def read_run(run_dir: Path) -> list[Trace]:
    """Read all traces in a run directory into memory, in the order of `trace_files`.

    Of a trace whose beginning was deleted, this is what is left.
    """
    return [Trace(file.header, list(file.entries)) for file in trace_files(run_dir)]


# Field in seconds -> field in ticks.
CONVERTED = {
    "now_s": "now_ticks",
    "due_s": "due_ticks",
    "wait_s": "wait_ticks",
    "barrier_s": "barrier_ticks",
}


def _converted(line: bytes) -> bytes:
    """Convert a line of a trace from seconds to ticks."""

    def in_new_format(value: Any) -> Any:
        if isinstance(value, list):
            return [in_new_format(element) for element in value]
        if not isinstance(value, dict):
            return value
        return {
            CONVERTED.get(key, key): in_ticks(field) if key in CONVERTED else in_new_format(field)
            for key, field in value.items()
        }

    converted = in_new_format(msgspec.json.decode(line))
    if "format" in converted:
        converted["format"] = FORMAT
    return msgspec.json.encode(converted)
