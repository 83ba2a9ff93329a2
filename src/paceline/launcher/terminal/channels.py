"""The standard streams of the processes of a run: where their input comes from, and where their output goes.

Every process writes to its log. The output of worker 0 is also shown. If another worker becomes the main worker, its
output is shown from then on, too. If the launcher writes to a terminal, worker 0 has a terminal as well (see
`terminal`); all other processes, and worker 0 otherwise, write to pipes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .copying import copy_output
from .shared_terminal import Screen, Terminal

__all__ = ["Channel", "Channels", "Streams"]


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
        shown: name of the process whose output is shown from the beginning.
    """

    def __init__(
        self, streams: Streams, terminal: Terminal | None, screen: Screen, shown: str = "worker 0"
    ) -> None:
        self._streams = streams
        self._terminal = terminal
        self._screen = screen
        self._first = shown
        self._shown = {shown}

    def show(self, name: str) -> None:
        """Show the output of the process with this name from now on, too."""
        self._shown.add(name)

    def open(self, name: str, log: Path, *, append: bool = False) -> Channel:
        """Return the standard streams of the process with this name, such as "worker 0".

        Args:
            name: name of the process.
            log: path of its log.
            append: True if the log contains the output of an earlier process, which is kept.
        """
        if name == self._first and self._terminal is not None:
            terminal = self._terminal
            stdout = terminal.take_worker()
            stdin = os.dup(stdout) if terminal.reads else self._input(name)
            return Channel(stdin, stdout, lambda: terminal.copy_output(log, self._screen), lambda: None)
        source, sink = os.pipe()
        output = open(source, "rb")  # noqa: SIM115 - closed by `copy` or `close`
        show = self._show(name)

        def copy() -> None:
            with output:
                copy_output(
                    output,
                    log,
                    lambda file: file.write,
                    lambda line: show(line.decode(errors="replace").rstrip("\n")),
                    append=append,
                )

        return Channel(self._input(name), sink, copy, output.close)

    def _input(self, name: str) -> int:
        if name == self._first and self._streams.reads and not os.isatty(0):
            return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _show(self, name: str) -> Callable[[str], None]:
        """Return the function that shows a line of this process."""
        if self._streams.show_all:
            return lambda line: self._screen.print(f"{name} | {line}")
        return lambda line: self._screen.print(line) if name in self._shown else None
