"""Optional output files of a run: logs and traces. Training continues even if these files cannot be written.

Others read these files while the run goes on, and a process that is killed loses what is buffered. So data is not
buffered, except in files to which so much is written that their owners flush them regularly instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ..wire.forks import close_in_forks

__all__ = ["BestEffortFile"]


class BestEffortFile:
    """An output file that discards all data after its first failure. Data written before the failure is kept.

    Args:
        path: path of the file, which is overwritten if it exists.
        failed: called once with an error message when the file cannot be opened, written or closed.
        append: True to append to the file instead.

    Attributes:
        buffered: True if the owner calls `flush` again and again.
    """

    buffered = False

    def __init__(self, path: Path, failed: Callable[[str], None], *, append: bool = False) -> None:
        self._path = path
        self._failed = failed
        self._file: IO[bytes] | None = None
        try:
            self._file = path.open("ab" if append else "wb")
        except OSError as error:
            self._give_up(error)
        close_in_forks(self)

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes, with the buffered data; 0 after a failure."""
        return 0 if self._file is None else self._file.tell()

    def write(self, data: bytes | bytearray) -> None:
        """Write data, unless an earlier operation has failed."""
        if self._file is not None:
            try:
                self._file.write(data)
                if not self.buffered:
                    self._file.flush()
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        """Write the buffered data, unless an earlier operation has failed."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write the buffered data and close the file, unless an earlier operation has failed."""
        if self._file is not None:
            try:
                self._file.close()
                self._file = None
            except OSError as error:
                self._give_up(error)

    def close_in_fork(self) -> None:
        """See `close_in_forks`. Buffered data is discarded, because the parent process writes it."""
        if self._file is not None:
            self._file.raw.close()  # type: ignore[attr-defined]  # the file is a BufferedWriter

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Closing the file tries to write the buffered data again, which may fail again.
            with contextlib.suppress(OSError):
                file.close()
        self._failed(
            f"{self._path.name} cannot be written and is incomplete: {error.strerror or error}. The run continues "
            "without this file."
        )
