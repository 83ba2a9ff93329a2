"""Copies the output of a process to its log and to the screen."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

__all__ = ["copy_output"]

logger = logging.getLogger("paceline.copying")

Sink = Callable[[bytes], object]


def copy_output(
    output: Iterable[bytes],
    log: Path,
    record: Callable[[BinaryIO], Sink],
    show: Sink,
    *,
    append: bool = False,
) -> None:
    """Copy the output of a process to its log and to the screen until the output ends.

    If writing to the log fails, no more output is written to the log; the same applies to the screen. The output is
    still read, because otherwise the process would block when its pipe or terminal is full.

    Args:
        output: the output, in pieces.
        log: path of the log.
        record: given the opened log, returns the function that writes a piece to it.
        show: shows a piece on the screen. It may raise any exception.
        append: True to append to the log instead of overwriting it.
    """
    sinks: dict[str, Sink] = {"shown": show}
    with contextlib.ExitStack() as opened:
        try:
            sinks["written"] = record(opened.enter_context(log.open("ab" if append else "wb", buffering=0)))
        except OSError as error:
            logger.warning("the log %s cannot be written: %s", log, error.strerror)
        for piece in output:
            for done, write in list(sinks.items()):
                try:
                    write(piece)
                except Exception as error:
                    # The disk may be full, and the caller's output stream may raise any exception.
                    logger.warning("the output for the log %s can no longer be %s: %s", log, done, error)
                    del sinks[done]
