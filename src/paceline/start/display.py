"""The progress display of a run: a live table in a terminal; elsewhere, a line in words every few seconds."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from types import TracebackType
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..core.status import JobStatus
from ..look.status import StatusView, progress_line
from ..run.job import Job
from ..words import counted
from .terminal import RESET, ForgivingStream, print_line, print_sentence

if TYPE_CHECKING:
    from ..run.coordinator import CoordinatorHost  # imports torch


REFRESH_PER_S = 8
REFRESH_S_PER_WORKER = 0.001  # a table of many workers is refreshed less often
PLAIN_INTERVAL_S = 5.0
PLAIN_REFRESH_S = 0.5  # often enough to find out which process is awaited
LEAST_HEIGHT = 12  # number of lines that the table may have even in a terminal with few lines


def announce_run(job: Job, console: Console) -> None:
    """If the console is a terminal, print what is being started: the first output of the run comes seconds later.

    Args:
        job: the configuration of the run.
        console: the console to write to.
    """
    if console.is_terminal:
        counts = f"{counted(job.workers, 'worker')} and {counted(job.servers, 'server')}"
        print_sentence(console, f"starting {counts}, {job.sync}")


class ProgressDisplay:
    """A context manager that shows the progress of a run. Call `update` often.

    Args:
        coordinator: the coordinator of the run.
        console: the console to write to. Console output that cannot be written is dropped.
    """

    def __init__(self, coordinator: CoordinatorHost, console: Console) -> None:
        self._coordinator = coordinator
        self._console = console
        # Without this wrapper, a write error would end this process or the thread that draws the table.
        console.file = cast(IO[str], ForgivingStream(console.file, "the progress"))
        self._plain_s = time.monotonic()
        self._refreshed_s = -math.inf
        self._shown: JobStatus | None = None  # the state that the table shows
        self._line = ""  # the last line of progress
        self._live: Live | None = None
        self._drawn = b""  # the last byte that `draw` has written; b"" before
        if console.is_terminal:
            self._live = Live(
                Text("starting"),
                console=console,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
                # Standard output belongs to the caller and may be redirected to a file.
                redirect_stdout=False,
            )

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._drawn:
            self.begin_line()
            with contextlib.suppress(OSError):
                _write(RESET)

    def print(self, line: str) -> None:
        """Print a line from a worker to standard output, or above the live table if standard output is a terminal."""
        self.begin_line()
        if self._live is not None and sys.stdout is not None and sys.stdout.isatty():
            self._console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            print_line(line)

    def draw(self, data: bytes) -> None:
        """Write output of worker 0 to the terminal unchanged. From now on, no table and no progress is shown.

        Raises:
            OSError: the terminal cannot be written.
        """
        if not self._drawn:
            self.pause()
            if sys.stdout is not None:
                sys.stdout.flush()
        self._drawn = data[-1:]
        _write(data)

    def begin_line(self) -> None:
        """Begin a new line on the terminal if worker 0 has left its last line unfinished."""
        if self._drawn not in (b"", b"\n"):
            self._drawn = b"\n"
            with contextlib.suppress(OSError):
                _write(b"\r\n")

    def pause(self) -> None:
        """Remove the live table."""
        if self._live is not None:
            self._live.stop()

    def resume(self) -> None:
        """Show the live table again, after `pause`."""
        if self._live is not None and not self._drawn:
            self._live.start()

    def update(self) -> None:
        """Show the current state of the run."""
        if self._drawn or self._console.quiet:
            return
        now_s, coordinator = time.monotonic(), self._coordinator
        interval_s = PLAIN_REFRESH_S if self._live is None else 1 / REFRESH_PER_S
        if now_s - self._refreshed_s >= max(interval_s, REFRESH_S_PER_WORKER * coordinator.job.workers):
            self._refreshed_s = now_s
            coordinator.refresh()
        status, job = coordinator.status, coordinator.job
        if status is None:
            return
        most = job.workers if job.joined else None
        if self._live is not None:
            if status is not self._shown:
                self._shown = status
                self._live.update(
                    StatusView(status, most=most, notes=self._notes, lines=self._height, links=False)
                )
        elif now_s - self._plain_s >= PLAIN_INTERVAL_S:
            self._plain_s = now_s
            # If the state has no workers, no machine has joined the run yet. On a busy machine, the state may not have
            # changed since the previous line. In both cases, no line is printed.
            line = progress_line(status, most) if status.workers else ""
            if line not in ("", self._line):
                self._line = line
                print_sentence(self._console, line)

    @property
    def _notes(self) -> list[str]:
        emulated = self._coordinator.job.emulated
        return [f"emulated: {emulated}"] if emulated else []

    @property
    def _height(self) -> int:
        """The number of lines that the table may have. The rest of the terminal is for the script's output."""
        height = self._console.height
        return max(min(height - 1, LEAST_HEIGHT), height // 2)


def _write(data: bytes) -> None:
    """Write all of the data to standard output."""
    while data:
        data = data[os.write(1, data) :]
