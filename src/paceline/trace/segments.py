"""The segments of the files that grow with a run: traces and records.

A long run writes each of these files in segments, so that the oldest ones can be deleted while it goes on. The newest
segment has the name of the file. When it is full, it is moved to the folder `earlier` next to it, and gets a number
there, counted from 0. The newest segment in that folder is never deleted, so the number of every segment is known.

    trace-shard-0.jsonl                  the newest segment, or all of a file that has not been full yet
    earlier/trace-shard-0.000006.jsonl
    earlier/trace-shard-0.000007.jsonl

Readers may read while the run writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from ..files import open_regular

__all__ = [
    "EARLIER",
    "KEPT_SEGMENTS",
    "Follower",
    "Position",
    "earlier_path",
    "earlier_segments",
    "first_segment",
    "held_files",
    "last_line",
]

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

    If a segment is missing between others, those before the gap are left out.
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
    """Return the path of the first segment of a file that is still there."""
    return next(iter(earlier_segments(path).values()), path)


def last_line(segment: Path) -> bytes:
    """Return the last line of a segment that is complete. Only the end of the file is read."""
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
    """Return the paths of files that grow with a run, of which at least one segment is there.

    For a moment, and if a process is killed at this moment, the newest segment of a file may not be there yet.

    Args:
        run_dir: the run directory.
        stem: pattern of the names, without the extension. Files with a number at the end are sorted by it.
    """
    found = set(run_dir.glob(f"{stem}.jsonl"))
    for segment in (run_dir / EARLIER).glob(f"{stem}.*.jsonl"):
        found.add(run_dir / f"{segment.stem.rpartition('.')[0]}.jsonl")
    return sorted(found, key=_index)


def _index(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A place in a file: the number of a segment, and the number of bytes before the place in this segment."""

    segment: int = 0
    offset: int = 0


class Follower:
    """Reads the lines of a file in all segments that are there, and, when it is asked again, those that were added.

    Args:
        path: path of the file.
        headed: True if each segment begins with a line that is a header. Such lines are left out.
        position: where to begin.

    Attributes:
        skipped: True if segments were deleted before they had been read.
    """

    def __init__(self, path: Path, *, headed: bool, position: Position = Position()) -> None:  # noqa: B008
        self._path = path
        self._headed = headed
        self._segment, self._offset = position.segment, position.offset
        self.skipped = False

    @property
    def place(self) -> tuple[int, int]:
        """The segment of the last line that was returned, and the number of bytes up to its end."""
        return self._segment, self._offset

    @property
    def position(self) -> Position:
        """The place behind the last line that was returned.

        It is never at the end of a segment that is complete. So the segments before it may be deleted.
        """
        with contextlib.suppress(FileNotFoundError):
            if earlier_path(self._path, self._segment).stat().st_size == self._offset:
                self._segment, self._offset = self._segment + 1, 0
        return Position(self._segment, self._offset)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are there now, and have not been returned yet.

        An incomplete last line is left for the next call; a killed process may leave one behind.
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
                continue  # its end was noticed before
            if is_final:
                self._segment, self._offset = segment + 1, 0
            elif not earlier_path(self._path, segment).exists():
                return  # otherwise, the segment was moved meanwhile, and lines may have been added before that

    def _open(self) -> IO[bytes] | None:
        """Open the segment that is to be read; None if it is not there yet."""
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
                file.close()  # it was moved a moment ago, so this may be the next one
                continue
            return file
