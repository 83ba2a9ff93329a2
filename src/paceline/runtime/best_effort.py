"""Files that a run can do without: logs and traces. A full disk or a deleted directory must not end training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ..wire.forks import close_in_forks

__all__ = ["BestEffortFile"]


class BestEffortFile:
    """A file for writing, given up on after its first failure. What was written before stays readable.

    Args:
        path: where; overwritten.
        failed: called once, with the reason in words, when the file cannot be opened, written or closed.
    """

    def __init__(self, path: Path, failed: Callable[[str], None]) -> None:
        self._path = path
        self._failed = failed
        self._file: IO[bytes] | None = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            self._give_up(error)
        close_in_forks(self)

    def write(self, data: bytes | bytearray) -> None:
        """Write some bytes, if nothing has failed so far."""
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        """Write what is buffered, if nothing has failed so far."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write what is buffered, if nothing has failed so far, and close the file."""
        if self._file is not None:
            try:
                self._file.close()
                self._file = None
            except OSError as error:
                self._give_up(error)

    def close_in_fork(self) -> None:
        """See `close_in_forks`. What is buffered is the parent's to write."""
        if self._file is not None:
            self._file.raw.close()  # type: ignore[attr-defined]  # of a BufferedWriter

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it tries once more to write what is buffered
                file.close()
        self._failed(
            f"{self._path.name} cannot be written and is incomplete: {error.strerror or error}. The run goes on "
            "without it."
        )
