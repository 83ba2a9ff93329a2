"""A text stream whose failure ends nothing: what was to be printed is dropped instead.

Training may take hours; a reader that has seen enough (`paceline run ... | head`), a full disk or a terminal that was
closed must not cost its result.
"""

from __future__ import annotations

import logging
from typing import IO, Any

__all__ = ["ForgivingStream"]

log = logging.getLogger("paceline.output")


class ForgivingStream:
    """Writes to a stream until that fails, and nowhere from then on. Everything else is the stream's own.

    The failure is logged, unless it is a pipe that nobody reads any more: whoever closed it knows.

    Args:
        stream: to write to.
        name: of the stream, for the log.

    Attributes:
        failed: True once something could not be written.
    """

    def __init__(self, stream: IO[str], name: str) -> None:
        self.failed = False
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write, or drop it."""
        if not self.failed:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush what was written."""
        if not self.failed:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        self.failed = True
        if not isinstance(error, BrokenPipeError):
            log.warning("%s cannot be written any more: %s", self._name, error.strerror)
