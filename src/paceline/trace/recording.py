"""Records and reads the files that grow with a run: traces and the records of iterations, both in segments.

A trace contains the events and actions of one state machine, in a text file of JSON lines. A run has one trace per
shard, and one for the coordinator. The first line is the header, which states the version of the format, the initial
sync model, and whether the trace belongs to a shard or to the coordinator. Each further line is an entry; the entries
are in the order in which their events were processed. An entry contains the event with its exact time, the resulting
actions, the reason if the event was refused, and the effects of the actions: the version that the shard reached, the
staleness of each push that the shard applied, and the largest gap (see `measures`) among the workers whose pulls the
shard answered.

Times are whole numbers of ticks (see `paceline.sync.events`). In version 3 of the format, times were floats in
seconds. When a trace in version 3 is read, its times are rounded to whole numbers of nanoseconds. The trace can then
be replayed, unless a decision depended on the rounding errors of the floats.

A long run writes its traces in segments, of which the oldest may be deleted (see below). Each segment has
a header of its own. From the second segment on, the header contains the state of the core when the segment began, so
that the remaining segments can be replayed (see `trace.keyframes`). Such a segment is in version 5 of the format.
When a trace is read, its header is the header of the first remaining segment.

Traces in versions before 3 are rejected. For example, version 2 does not contain the gaps of the workers, which only
the state machine can compute. Statistics that depend on these gaps would be wrong without any warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast

import msgspec

from ..core.requests import Entry
from ..errors import ConfigurationError, unknown_name
from ..files import open_regular, read_regular
from ..sync import Conditions, SyncModel
from ..sync.plugins import LOCAL, load_models
from ..sync.schedule import read_schedule
from ..sync.ticks import TICKS_PER_S, in_ticks
from ..trust import SIGNATURE, is_own, is_signed, printable, signature_of
from .keyframes import Keyframe

DECODER = msgspec.json.Decoder(Entry)

FORMAT = 4
FORMAT_CONTINUED = 5  # the format of segments that continue a trace
FORMAT_IN_SECONDS = 3  # the last format in which times were numbers of seconds; `read` converts it


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a trace.

    Attributes:
        sync: initial sync model, in the notation of the command line. If the shards have different models, the notation
            lists one model per shard. Changes of the model are recorded as events.
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
        """True unless the beginning of the trace was deleted."""
        return self.keyframe is msgspec.UNSET

    @property
    def recorded_on(self) -> int:
        """Index of the machine whose clock the times are on."""
        return 0 if self.machine is msgspec.UNSET else self.machine

    @property
    def own_sync(self) -> str:
        """The initial sync model of the shard that recorded the trace."""
        models = self.sync.split("|")
        return models[self.index if len(models) > 1 else 0]

    @property
    def recorded_by(self) -> str:
        """Name of the core that recorded the trace, for messages to the user."""
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
        header: the header of the first remaining segment.

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
            for line in FileFollower(self.path, headed=True).lines():
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

    If the beginning of a trace was deleted, the remaining segments are read.
    """
    return [Trace(file.header, list(file.entries)) for file in trace_files(run_dir)]


# Field in seconds -> field in ticks.
CONVERTED = {"now_s": "now_ticks", "due_s": "due_ticks", "wait_s": "wait_ticks", "barrier_s": "barrier_ticks"}


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


# -- Records of the times of each worker's iterations, stored in `worker-<index>.jsonl` in the run directory


class IterationRecord(msgspec.Struct, frozen=True):
    """The times of one iteration, in seconds since the run began.

    Attributes:
        iteration: number of the iteration, from 0.
        begun_s: time at which the computation began, after the weights had arrived.
        computed_s: time at which the gradient was ready. If the worker emulates a slower machine, it slept from this
            time until `pushed_s`.
        pushed_s: time at which the push began.
        answered_s: time at which the new weights of all shards had arrived.
        loss: the loss that the script has logged for this iteration, or that its closure has returned; None if there
            is no loss.
        superstep: number of the superstep if the push was the worker's last one of that superstep, else None.
        change: number of the sync model change if the push was the worker's last one before the change, else None.
        dropped_s: time at which the computation was aborted in order to be restarted; None if it was not aborted.
        restarted_s: time at which the computation was restarted; None if it was not restarted.
        outside_s: part of the time from `begun_s` to `pushed_s` in which the script did not train; see
            `core.metrics`. Unset if there is none, as in all records of earlier versions.
        loading_s: part of the same time in which the script asked for batches.
        exchanged_s: part of the same time in which the worker requested data, or pulled again after an evaluation.
        begins_pass: True if the iteration is the first one of a pass over its loader. Its time outside of training
            then lies between two passes.
        machine: index of the machine whose clock the times are on (see `trace.clocks`). Unset if it is machine 0, the
            one with the coordinator.
    """

    iteration: int
    begun_s: float
    computed_s: float
    pushed_s: float
    answered_s: float
    loss: float | None
    superstep: int | None
    change: int | None = None
    dropped_s: float | None = None
    restarted_s: float | None = None
    machine: int | msgspec.UnsetType = msgspec.UNSET
    outside_s: float | msgspec.UnsetType = msgspec.UNSET
    loading_s: float | msgspec.UnsetType = msgspec.UNSET
    exchanged_s: float | msgspec.UnsetType = msgspec.UNSET
    begins_pass: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def apart_s(self) -> tuple[float, float, float]:
        """The times that this iteration spent outside of training, on loading, and on exchanges before the push."""
        return self.outside_s or 0.0, self.loading_s or 0.0, self.exchanged_s or 0.0

    @property
    def computing_s(self) -> float:
        """Time of the computation that was pushed: the last one, if the iteration was restarted."""
        outside_s, loading_s, exchanged_s = self.apart_s
        apart_s = outside_s + loading_s + exchanged_s
        begun_s = (
            self.begun_s + apart_s
            if self.restarted_s is None
            else max(self.restarted_s, self.begun_s + apart_s)
        )
        return max(0.0, self.pushed_s - begun_s)

    @property
    def wasted_s(self) -> float:
        """Time in seconds spent on an aborted computation and the pull after it; 0 if no computation was aborted."""
        return 0.0 if self.restarted_s is None else self.restarted_s - self.begun_s


def record_files(run_dir: Path) -> list[Path]:
    """Return the path of the records of each worker, in order of the workers' indices.

    A script may write to the run directory, too, so other files are left out.
    """
    files = held_files(run_dir, "worker-*")
    return [path for path in files if path.stem.removeprefix("worker-").isdecimal()]


def records_in(path: Path) -> Iterator[IterationRecord]:
    """Yield the records in a file, one by one, without the oldest records if the run has deleted these.

    An incomplete last line, which a killed worker may leave behind, is ignored.
    """
    decode = msgspec.json.Decoder(IterationRecord).decode
    yield from map(decode, FileFollower(path, headed=False).lines())


def read_records(run_dir: Path) -> list[list[IterationRecord]]:
    """Read all records in a run directory into memory. Return one list for each worker, by index."""
    return [list(records_in(path)) for path in record_files(run_dir)]


# -- The segments of the files that grow with a run: traces and records --------------------------------------
#
# A long run writes each of these files in segments, so that the oldest segments can be deleted while the run goes on.
# The newest segment has the name of the file. When this segment is full, it is moved to the folder `earlier` next to
# the file. There, its name contains a number, counted from 0. The newest segment in that folder is never deleted, so
# the number of every segment is known.
#
#     trace-shard-0.jsonl                  the newest segment, or all of a file that has not been full yet
#     earlier/trace-shard-0.000006.jsonl
#     earlier/trace-shard-0.000007.jsonl
#
# Readers may read while the run writes.

EARLIER = "earlier"
"""Name of the folder with the segments before the newest one."""

KEPT_SEGMENTS = 3
"""Number of segments of each file that are kept in addition to the newest one."""

END_BYTES = 1 << 14
"""Number of bytes at the end of a segment that are first searched for its last line."""


def earlier_path(path: Path, number: int) -> Path:
    """Return the path of a segment of the file `path` that is not the newest one.

    >>> earlier_path(Path("run/worker-3.jsonl"), 7).as_posix()
    'run/earlier/worker-3.000007.jsonl'
    """
    return path.parent / EARLIER / f"{path.stem}.{number:06}{path.suffix}"


def earlier_segments(path: Path) -> dict[int, Path]:
    """Return the segments of a file before the newest one, in order: number -> path.

    If a segment is missing, all segments before this gap are left out.
    """
    found = {}
    for segment in (path.parent / EARLIER).glob(f"{path.stem}.*{path.suffix}"):
        digits = segment.name[len(path.stem) + 1 : -len(path.suffix)]
        if digits.isdecimal():
            found[int(digits)] = segment
    held: list[int] = []
    for number in sorted(found, reverse=True):
        if held and number != held[-1] - 1:
            break
        held.append(number)
    return {number: found[number] for number in reversed(held)}


def first_segment(path: Path) -> Path:
    """Return the path of the first remaining segment of a file."""
    return next(iter(earlier_segments(path).values()), path)


def last_line(segment: Path) -> bytes:
    """Return the last line of a complete segment. Only the end of the segment is read."""
    size_bytes = segment.stat().st_size
    with open_regular(segment) as file:
        read_bytes = 0
        while True:
            read_bytes = min(size_bytes, 2 * read_bytes or END_BYTES)
            file.seek(size_bytes - read_bytes)
            _, newline, line = file.read(read_bytes).rstrip(b"\n").rpartition(b"\n")
            if newline or read_bytes == size_bytes:
                return line


def held_files(run_dir: Path, stem: str) -> list[Path]:
    """Return the paths of the files that grow with a run and have at least one segment.

    Between two segments, a file has no newest segment for a moment. If the process is killed at this moment, the
    newest segment remains missing.

    Args:
        run_dir: the run directory.
        stem: pattern of the names, without the extension. Files whose names end with a number are sorted by this
            number.
    """
    found = set(run_dir.glob(f"{stem}.jsonl"))
    for segment in (run_dir / EARLIER).glob(f"{stem}.*.jsonl"):
        found.add(run_dir / f"{segment.stem.rpartition('.')[0]}.jsonl")
    return sorted(found, key=_index)


def _index(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


class FilePosition(msgspec.Struct, frozen=True, array_like=True):
    """A place in a file: the number of a segment, and the offset in this segment, in bytes."""

    segment: int = 0
    offset: int = 0


class FileFollower:
    """Reads the lines of a file from all its remaining segments.

    Each further call of `lines` reads the lines that were added since the call before.

    Args:
        path: path of the file.
        headed: True if each segment begins with a line that is a header. Such lines are left out.
        position: where to begin.

    Attributes:
        skipped: True if segments were deleted before they had been read.
    """

    def __init__(self, path: Path, *, headed: bool, position: FilePosition = FilePosition()) -> None:  # noqa: B008
        self._path = path
        self._headed = headed
        self._segment, self._offset = position.segment, position.offset
        self.skipped = False

    @property
    def place(self) -> tuple[int, int]:
        """The segment of the last line that was returned, and the number of bytes up to the end of this line."""
        return self._segment, self._offset

    @property
    def position(self) -> FilePosition:
        """The place after the last line that was returned.

        If a complete segment ends with this line, the place is the beginning of the next segment. So all segments
        before the segment of this place may be deleted.
        """
        with contextlib.suppress(FileNotFoundError):
            if earlier_path(self._path, self._segment).stat().st_size == self._offset:
                self._segment, self._offset = self._segment + 1, 0
        return FilePosition(self._segment, self._offset)

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines that have not been returned yet.

        An incomplete last line, which a killed process may leave behind, is left for the next call.
        """
        while (file := self._open()) is not None:
            with file:
                segment = self._segment
                is_final = earlier_path(self._path, segment).exists()
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    is_header = self._headed and not self._offset
                    self._offset += len(line)
                    if not is_header:
                        yield line
            if self._segment != segment:
                continue  # the end of this segment was noticed before
            if is_final:
                self._segment, self._offset = segment + 1, 0
            elif not earlier_path(self._path, segment).exists():
                return  # otherwise, the segment was moved just now, perhaps after further lines were added

    def _open(self) -> IO[bytes] | None:
        """Open the segment that is to be read; None if it does not exist yet."""
        while True:
            earlier = earlier_segments(self._path)
            if earlier and self._segment < min(earlier):
                self._segment, self._offset, self.skipped = min(earlier), 0, True
            newest = self._segment not in earlier
            try:
                file = open_regular(self._path if newest else earlier[self._segment])
            except FileNotFoundError:
                if newest and not earlier_path(self._path, self._segment).exists():
                    return None
                continue  # it was moved or deleted a moment ago
            if newest and earlier_path(self._path, self._segment).exists():
                file.close()  # the segment was moved a moment ago, so the open file may be the next segment
                continue
            return file


# -- The modules with a user's own sync models and conditions, whose names are kept with each run ------------
#
# With these names, the sync model of a finished run can be simulated and replayed without naming its module again.
# `summary.json` also contains the folder in which each module was found, because the module may be next to the script
# of the run.
#
# Importing a module runs its code. So the summary's list of modules is signed (see `paceline.trust`). A module that
# is not imported yet is imported only if the run belongs to this user, or if the user allows it.


def modules_of_models(models: Iterable[SyncModel]) -> tuple[str, ...]:
    """Return the names of the modules that define these models or their conditions, without those of Paceline."""
    names: list[str] = []
    for model in models:
        names.append(type(model).__module__)
        if isinstance(model, Conditions):
            names += [name.partition(":")[0] for name in (model.pull, model.push) if name]
    own = [name for name in names if not name.startswith("paceline.") and name not in ("__main__", LOCAL)]
    return tuple(dict.fromkeys(own))


def kept_modules(modules: Sequence[str]) -> dict[str, Any]:
    """Return the entries about imported modules in the summary of a run, signed if there are any modules."""
    content = {"imports": folders_of(modules)}
    return {**content, SIGNATURE: signature_of(content)} if modules else content


def folders_of(modules: Sequence[str]) -> dict[str, str]:
    """Return a mapping from the name of each imported module to the folder in which Python has found it.

    For a module in a package, this is the folder that contains the package. The folder is "" if it is unknown.
    """
    found = {}
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        depth = name.count(".") + (file is not None and Path(file).name == "__init__.py")
        found[name] = str(Path(file).resolve().parents[depth]) if file is not None else ""
    return found


def load_kept_models(run_dir: Path, *, trust: bool = False) -> tuple[str, ...]:
    """Import the modules that the summary of a run names, and return their names; () if there is no summary.

    A module that is not on the module search path is imported from the folder that the summary names, unless this
    folder is in the run directory, which contains only data.

    Args:
        run_dir: the directory of the run.
        trust: True to import the modules even if another user has written the summary.

    Raises:
        ConfigurationError: a module cannot be imported, or only another user's summary names it.
    """
    path = run_dir / "summary.json"
    try:
        summary = json.loads(read_regular(path))
        kept: Mapping[str, str] = {str(name): str(folder) for name, folder in summary["imports"].items()}
        sync = str(summary["sync"])
        content = {"imports": summary["imports"], SIGNATURE: summary.get(SIGNATURE)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    trust = trust or (is_signed(content) and is_own(run_dir, path))
    if not trust:
        require_known(kept, run_dir, [folder for name, folder in kept.items() if _is_missing(name)])
    for name, folder in kept.items():
        if _is_missing(name) and folder not in sys.path and _is_outside(Path(folder), run_dir):
            sys.path.append(folder)
    load_models(sync, kept)
    require_known([name for name in modules_in(sync) if name not in kept], run_dir)
    return tuple(kept)


def modules_in(sync: str) -> tuple[str, ...]:
    """Return the user's modules that define the models in a notation, or their conditions; () if it is not valid."""
    try:
        return modules_of_models(read_schedule(sync).models)
    except ConfigurationError:  # the code that needs the model says what is wrong
        return ()


def require_known(modules: Iterable[str], where: object, folders: Sequence[str] = ()) -> None:
    """Require that modules named in a file are already imported, so that the file does not decide what code runs.

    Args:
        modules: names of modules.
        where: the run directory or the trace that names the modules, for the error message.
        folders: the folders from which they would be imported, if these are known.

    Raises:
        ConfigurationError: a module is not imported, or belongs to Python itself, so that it defines no sync models.
    """
    unknown = [name for name in modules if name not in sys.modules or _is_of_python(name)]
    if unknown:
        found = f" from {printable(folders)}" if folders else ""
        raise ConfigurationError(
            f"{where} names the module {printable(unknown)}{found}, but this is not signed with your key, so "
            "somebody else may have written it; look at the module, and name it with --import, or add --trust. In "
            "Python, import the module first, or give trust=True."
        )


def _is_of_python(name: str) -> bool:
    """Return True if an imported module belongs to Python itself."""
    file = getattr(sys.modules[name], "__file__", None)
    if name.partition(".")[0] not in sys.stdlib_module_names:
        return False
    return file is None or (Path(os.__file__).parent in Path(file).parents and "site-packages" not in file)


def _is_missing(name: str) -> bool:
    return name not in sys.modules and find_spec(name.partition(".")[0]) is None


def _is_outside(folder: Path, run_dir: Path) -> bool:
    return folder.is_absolute() and not folder.resolve().is_relative_to(run_dir.resolve())


# -- What is kept of the traces and records of a run: the option `--traces` ----------------------------------

KEPT = ("full", "recent", "off")


class KeptTraces(msgspec.Struct, frozen=True):
    """The option `--traces`, which says what is kept of the traces and records of a run.

    Attributes:
        kept: "full" if everything is kept, "recent" if the oldest parts are deleted during the run, or "off" if there
            are no traces.
        megabytes: approximate number of megabytes that recent traces and records may occupy in the run directory.

    Example:
        >>> KeptTraces.read("recent:7").size_bytes, str(KeptTraces.read("recent:7")), str(KeptTraces())
        (7000000, 'recent:7', 'recent')
    """

    kept: Literal["full", "recent", "off"] = "recent"
    megabytes: int = 100

    @classmethod
    def read(cls, text: str) -> KeptTraces:
        """Parse the notation of the command line.

        Raises:
            ConfigurationError: the notation is not valid.
        """
        kept, colon, size = text.partition(":")
        if kept not in KEPT:
            raise unknown_name("traces", text, KEPT)
        # Twelve digits are more megabytes than any disk has, and fit in a message.
        if colon and not (kept == "recent" and re.fullmatch("[0-9]{1,12}", size) and int(size) > 0):
            raise ConfigurationError(
                f"traces is {text!r}, expected a number of megabytes only for recent traces, such as 'recent:500'."
            )
        known = cast(Literal["full", "recent", "off"], kept)
        return cls(known, int(size)) if size else cls(known)

    def __str__(self) -> str:
        usual = self.kept != "recent" or self.megabytes == KeptTraces().megabytes
        return self.kept if usual else f"{self.kept}:{self.megabytes}"

    @property
    def size_bytes(self) -> int:
        """The approximate number of bytes that recent traces and records may occupy in the run directory."""
        return self.megabytes * 10**6
