"""A text stream that drops its output instead of raising an exception when writing fails.

Training may take hours. Its result must not be lost because a reader stops reading (`paceline run ... | head`), a
disk is full, or a terminal was closed.
"""

from __future__ import annotations

import logging
from typing import IO, Any

__all__ = ["ForgivingStream"]

log = logging.getLogger("paceline.output")


class ForgivingStream:
    """A wrapper of a text stream that ignores everything written after the first failure.

    All other attributes are those of the stream. The failure is logged, unless the reader of a pipe has closed it,
    since the reader did so intentionally.

    Args:
        stream: the stream to write to.
        name: name of the stream in the log.

    Attributes:
        failed: True once writing has failed.
    """

    def __init__(self, stream: IO[str], name: str) -> None:
        self.failed = False
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write the text, or drop it if writing has failed."""
        if not self.failed:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless writing has failed."""
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
