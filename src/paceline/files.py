"""Files that are either complete or absent, and reading that never waits.

A file is written under a temporary name in the same directory, and gets its name when its whole content is on the disk.
So no reader finds an incomplete file, even if the disk is full, or if the writer is killed. Until a file gets its name,
an earlier file of this name stays unchanged.

Other programs may also write to the directories of runs. If such a program has made a pipe in place of a file, a reader
would wait for ever. So files of a run are opened by `open_regular`, which refuses pipes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

SYNC_BYTES = 16 * 2**20  # number of bytes after which a `PatientWriter` waits for the disk


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file to read it, without ever waiting for its content.

    Raises:
        OSError: the path cannot be opened, or is not a file but a pipe, a device or a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file. See `open_regular`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     os.mkfifo(f"{folder}/run.json")
        ...     try:
        ...         read_regular(f"{folder}/run.json")
        ...     except OSError as error:
        ...         print(error.strerror)
        it is a pipe or a device, expected a file
    """
    with open_regular(path) as file:
        return file.read()


class Unfinished:
    """A file that is being written. As a context manager, it returns the path at which the content is to be written.

    When the context ends, the file gets its name or, after an exception, is removed.

    Args:
        path: path of the complete file, in an existing directory.

    Attributes:
        path: path of the complete file.
        place: path of the file until it is complete. The name is new, so several processes may write the same file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "figures.json")
        ...     with Unfinished(path) as place:
        ...         _ = place.write_text("[1, 2]")
        ...         print(path.exists())
        ...     print(path.read_text(), len(list(Path(folder).iterdir())))
        False
        [1, 2] 1
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:12]}.unfinished")

    def __enter__(self) -> Path:
        return self.place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.discard()

    def finish(self, is_valid: Callable[[], bool] = lambda: True) -> None:
        """Give the file its name, now that all of its content has been written.

        Args:
            is_valid: called when all of the content is on the disk. If it returns False, the file is removed.

        Raises:
            OSError: the content could not be written to the disk. The unfinished file is removed.
        """
        try:
            # Some file systems report only here that the disk is full.
            with self.place.open("rb") as file:
                os.fsync(file.fileno())
            if is_valid():
                os.replace(self.place, self.path)
            else:
                self.discard()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the unfinished file, if it exists."""
        with contextlib.suppress(OSError):
            self.place.unlink()


def write_json(path: Path, value: object) -> None:
    """Write a value to a JSON file, which is either complete or absent.

    Raises:
        OSError: the file cannot be written. An earlier file of this name is unchanged.
    """
    with Unfinished(path) as place:
        place.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


class PatientWriter:
    """Writes to a file. After every `SYNC_BYTES`, it waits until all bytes written so far are on the disk.

    Args:
        file: the file.
        progressed: called after each of these waits.
    """

    def __init__(self, file: IO[bytes], progressed: Callable[[], object]) -> None:
        self._file = file
        self._progressed = progressed
        self._unsynced_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write data, and return its size in bytes."""
        data = memoryview(data).cast("B")
        for start in range(0, data.nbytes, SYNC_BYTES):
            part = data[start : start + SYNC_BYTES]
            self._file.write(part)
            self._unsynced_bytes += part.nbytes
            if self._unsynced_bytes >= SYNC_BYTES:
                self._unsynced_bytes = 0
                self._file.flush()
                os.fdatasync(self._file.fileno())
                self._progressed()
        return data.nbytes

    def flush(self) -> None:
        """Pass buffered data to the operating system."""
        self._file.flush()
