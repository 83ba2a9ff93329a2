"""The standard streams of the processes of a run: where their input comes from, and where their output goes.

Every process writes to its log. The output of worker 0 is also shown. If the launcher writes to a terminal, worker 0
has a terminal, too (see `terminal`); all other processes, and worker 0 otherwise, write to pipes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from .terminal import Screen, Terminal

__all__ = ["Channel", "Channels", "Streams"]

logger = logging.getLogger("paceline.channels")


class Streams(NamedTuple):
    """What the user wants of the standard streams.

    Attributes:
        reads: True if worker 0 reads this process's standard input even if that is not a terminal.
        show_all: True if the output of every process is shown, each line with the name of its process.
    """

    reads: bool = False
    show_all: bool = False


class Channel(NamedTuple):
    """The standard streams of one process.

    Attributes:
        stdin: descriptor of its standard input. Once the process has started, it must be closed.
        stdout: descriptor of its standard output and standard error. Once the process has started, it must be closed.
        copy: a function that copies the output, until it ends, to the log and to the screen.
        close: a function that releases what `copy` would use, for a process that cannot be started.
    """

    stdin: int
    stdout: int
    copy: Callable[[], None]
    close: Callable[[], None]


class Channels:
    """Opens the standard streams of the processes of one run.

    Args:
        streams: what the user wants.
        terminal: the terminal that worker 0 uses, if any.
        screen: shows the output.
    """

    def __init__(self, streams: Streams, terminal: Terminal | None, screen: Screen) -> None:
        self._streams = streams
        self._terminal = terminal
        self._screen = screen

    def open(self, name: str, log: Path) -> Channel:
        """Return the standard streams of the process with this name, such as "worker 0"."""
        if name == "worker 0" and self._terminal is not None:
            terminal = self._terminal
            stdout = terminal.take_worker()
            stdin = os.dup(stdout) if terminal.reads else self._input(name)
            return Channel(stdin, stdout, lambda: terminal.copy_output(log, self._screen), lambda: None)
        source, sink = os.pipe()
        output = open(source, "rb")  # noqa: SIM115 - closed by `copy_lines` or `close`
        show = self._show(name)
        return Channel(self._input(name), sink, lambda: copy_lines(output, log, show), output.close)

    def _input(self, name: str) -> int:
        if name == "worker 0" and self._streams.reads and not os.isatty(0):
            return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _show(self, name: str) -> Callable[[str], None]:
        """Return the function that shows a line of this process."""
        if self._streams.show_all:
            return lambda line: self._screen.print(f"{name} | {line}")
        return self._screen.print if name == "worker 0" else lambda line: None


def copy_lines(source: IO[bytes], log: Path, show: Callable[[str], None]) -> None:
    """Copy the output of a process to its log and to `show` until the output ends.

    If writing to the log fails, no more output is written to the log; the same applies to `show`. The output is still
    read, because otherwise the process would block on a full pipe.
    """
    sinks: dict[str, Callable[[bytes], object]] = {}
    with source, contextlib.ExitStack() as opened:
        try:
            sinks["written"] = opened.enter_context(log.open("wb", buffering=0)).write
        except OSError as error:
            logger.warning("the log %s cannot be written: %s", log, error.strerror)
        sinks["shown"] = lambda line: show(line.decode(errors="replace").rstrip("\n"))
        for line in source:
            for done, write in list(sinks.items()):
                try:
                    write(line)
                except Exception as error:
                    # The disk may be full, and `show` may raise any exception from the caller's output stream.
                    logger.warning("the output for the log %s can no longer be %s: %s", log, done, error)
                    del sinks[done]
