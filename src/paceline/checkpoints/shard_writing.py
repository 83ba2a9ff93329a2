"""Writes the content of one shard to its places in the files of a checkpoint, in pieces and at a limited rate.

A draft may vanish while it is being written, and another one may take its name. So a writer knows the token of its
draft, and compares this token whenever it writes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from ..core.protocol.layout import ShardSlice, item_bytes
from ..core.protocol.state_entries import StateEntries
from ..errors import CheckpointError
from ..files import read_regular
from ..shard.buffer_bytes import bytes_of
from ..shard.vectors import Vectors, segment_views, torch_dtype
from .directory import read_draft
from .pace import Pace
from .places import MODEL, PLACES, Places, optimizer_file

__all__ = ["PIECE_BYTES", "ShardWriter", "is_draft", "mark_of", "shard_content"]

PIECE_BYTES = 1024 * 1024
"""Number of bytes after which a writer keeps to its pace."""

SYNC_BYTES = 32 * PIECE_BYTES
"""Number of bytes after which a writer waits for the disk, so that a full cache does not delay other processes."""


def shard_content(bounds: ShardSlice, weights: Vectors, state: Vectors) -> list[memoryview]:
    """Return the content of a shard in the order in which a `ShardWriter` expects it.

    The content shares the memory of the vectors.

    Args:
        bounds: the shard.
        weights: the shard's slice of the weights.
        state: the shard's optimizer state, as returned by `Store.optimizer_state()`.
    """
    vectors = [state[name].contiguous() for name in sorted(state) if state[name].dim()]
    return [bytes_of(vector.reshape(-1)) for vector in [*segment_views(bounds, weights), *vectors]]


class ShardWriter:
    """Writes the content of one shard to its places in the files of a draft.

    As a context manager, it closes the files in the end. The shard counts as written only if all of its content is on
    the disk by then.

    Args:
        path: the directory of the draft.
        token: `Draft.token`.
        bounds: the shard.
        entries: the entries of its optimizer state, as given to `Draft.begin`.
        pace: the rate at which to write; None for no limit.

    Attributes:
        size_bytes: size of the content.

    Raises:
        CheckpointError: the draft has been discarded, or another run writes a draft of this name.
    """

    def __init__(
        self, path: Path, token: str, bounds: ShardSlice, entries: StateEntries, pace: Pace | None = None
    ) -> None:
        self._path = path
        self._token = token
        self._shard = bounds.index
        self._pace = pace or Pace()
        self._files: dict[str, int] = {}
        self._unsynced_bytes = 0
        with self._explained():
            places = _places_in(path)
            self._left = list(reversed(list(_regions(places, bounds, entries))))
            for _, targets in self._left:
                for name, _ in targets:
                    if name not in self._files:
                        self._files[name] = os.open(path / name, os.O_WRONLY)
        try:
            self._require_own()  # after all files have been opened
        except CheckpointError:
            self._close()
            raise
        self.size_bytes = sum(size_bytes for size_bytes, _ in self._left)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._complete()
        finally:
            self._close()

    def _close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the next part of the content, which may have any size.

        Raises:
            CheckpointError: the data cannot be written, the draft is no longer there, or there is more than expected.
        """
        self._require_own()
        view = memoryview(data).cast("B")
        with self._explained():
            while view.nbytes:
                if not self._left:
                    raise CheckpointError(f"shard {self._shard} has more than {self.size_bytes} bytes")
                size_bytes, targets = self._left.pop()
                piece = view[: min(size_bytes, PIECE_BYTES)]
                for name, begin in targets:
                    _write_at(self._files[name], piece, begin)
                    self._spend(piece.nbytes)
                view = view[piece.nbytes :]
                if piece.nbytes < size_bytes:
                    rest = [(name, begin + piece.nbytes) for name, begin in targets]
                    self._left.append((size_bytes - piece.nbytes, rest))

    def _spend(self, size_bytes: int) -> None:
        self._pace.spend(size_bytes)
        self._unsynced_bytes += size_bytes
        if self._unsynced_bytes >= SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        self._unsynced_bytes = 0
        for descriptor in self._files.values():
            os.fdatasync(descriptor)
        self._require_own()

    def _require_own(self) -> None:
        """Raise `CheckpointError` if the draft has been removed, or another one has taken its name."""
        if not is_draft(self._path, self._token):
            raise CheckpointError(
                f"shard {self._shard} cannot be written to {self._path}: somebody has removed this draft, or another "
                "run writes to the same directory"
            )

    def _complete(self) -> None:
        if self._left:
            left_bytes = sum(size_bytes for size_bytes, _ in self._left)
            raise CheckpointError(
                f"{left_bytes} of the {self.size_bytes} bytes of shard {self._shard} are missing"
            )
        with self._explained():
            self._sync()
            mark_of(self._path, self._shard).touch()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"shard {self._shard} cannot be written to {self._path}: {error.strerror or error}"
            ) from error


Region = tuple[int, list[tuple[str, int]]]
"""A part of a shard's content: its size in bytes, and the files and offsets to which it is written."""


def _regions(places: Places, bounds: ShardSlice, entries: StateEntries) -> Iterator[Region]:
    """Return the regions of a shard's content, in the order of `shard_content`."""
    for segment in bounds.segments:
        item = item_bytes(segment.dtype)
        begin = segment.offset * item
        size_bytes = (segment.stop - segment.start) * item
        yield size_bytes, [(MODEL, place + begin) for place in places.weights[segment.parameter]]
    for name in sorted(entries.vectors):
        position, _, key = name.partition("/")
        segment = bounds.segments[int(position)]
        item = torch_dtype(entries.vectors[name]).itemsize
        size_bytes = (segment.stop - segment.start) * item
        begin = places.state[segment.parameter][key] + segment.offset * item
        yield size_bytes, [(optimizer_file(places.optimizer[segment.parameter]), begin)]


def _places_in(path: Path) -> Places:
    return msgspec.json.decode(read_regular(path / PLACES), type=Places)


def is_draft(path: Path, token: str) -> bool:
    """Return True if a directory is the draft with this token, and not another one, or one on another machine.

    Args:
        path: the directory.
        token: `Draft.token`.
    """
    draft = read_draft(path)
    return draft is not None and draft.token == token


def _write_at(descriptor: int, data: memoryview, begin: int) -> None:
    written = 0
    while written < data.nbytes:
        written += os.pwrite(descriptor, data[written:], begin + written)


def mark_of(path: Path, shard: int) -> Path:
    """Return the path of the empty file that exists once a shard has been written."""
    return path / f"shard-{shard}.written"
