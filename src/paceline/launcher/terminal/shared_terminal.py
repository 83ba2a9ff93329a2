"""The terminal of the launcher, which worker 0 uses as if it ran alone.

Worker 0 gets a terminal of its own, a pseudo-terminal with the settings and the size of the launcher's terminal. The
launcher copies what worker 0 writes to its own terminal, and what the user types to worker 0. So the launcher remains
in control: Ctrl-C and Ctrl-Z reach the launcher, whatever worker 0 does with its terminal, and the settings of the
user's terminal never depend on worker 0.

Worker 0 cannot have the launcher's own terminal. Only one process group may read from a terminal, and that group also
gets the signals; and the launcher could not write what worker 0 writes to a log.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import re
import select
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from .copying import copy_output
from .transcript import Transcript

__all__ = ["Screen", "Terminal", "left_behind"]

logger = logging.getLogger("paceline.terminal")

CHUNK_BYTES = 65536
LOOK_INTERVAL_S = 0.2  # interval at which the size of the terminal and its foreground process are checked
# A line that has not ended after this time is shown: it is a prompt, or dots that show progress.
LINE_TIMEOUT_S = 0.1

DRAWING = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f]"  # control characters, except for tabs and line ends
    rb"|\r+[^\r\n]"  # a line that is written again
    rb"|\x1b(?!\[[\d;:]*m|\[[\d;:]*\Z|\Z)"  # control sequences, except for colors
)
"""Matches output that moves the cursor or erases text."""

UNDO = {
    b"\x1b[?25l": b"\x1b[?25h",  # hides and shows the cursor
    b"\x1b[?2004h": b"\x1b[?2004l",  # marks pasted text
    b"\x1b[?1049h": b"\x1b[?1049l",  # switches to a second screen
    b"\x1b[?1h": b"\x1b[?1l",  # changes what the arrow keys send
}
"""Modes of a terminal that a process may leave behind if it is killed, each with the sequence that resets it."""

READ_CALL = {"x86_64": "0", "aarch64": "63"}.get(platform.machine())
"""The number of the system call `read`, as text; None if it is not known for this kind of machine."""


class Screen(Protocol):
    """The part of the launcher that shows the output of worker 0. See `Progress`."""

    def print(self, line: str) -> None:
        """Show a line."""

    def draw(self, data: bytes) -> None:
        """Write output to the terminal unchanged. From now on, worker 0 alone draws on the terminal."""


def is_terminal(stream: object, number: int) -> bool:
    """Return True if the stream is a terminal, and writes to or reads from the descriptor with this number."""
    try:
        return bool(stream.isatty() and stream.fileno() == number)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False  # no stream, a closed one, or one that a notebook or a test has put in place


class Terminal:
    """A context manager that connects the terminal of this process with the terminal of worker 0.

    The user's terminal passes on each key as it is typed, from the beginning to the end of the context. Worker 0's
    terminal echoes the keys, and edits lines.

    Attributes:
        name: path of worker 0's terminal.
        reads: True if worker 0 reads what the user types.
    """

    def __init__(self) -> None:
        self.reads = is_terminal(sys.stdin, 0)
        self._own = 0 if self.reads else 1
        self._settings = termios.tcgetattr(self._own)
        self._size = b""
        self._changed = False  # True if the settings of our terminal are changed now
        self._paused = False
        self._lock = threading.Lock()
        self._main, worker = os.openpty()
        self._worker: int | None = worker
        self.name = os.ttyname(worker)
        termios.tcsetattr(worker, termios.TCSANOW, self._settings)
        self._copy_size()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="paceline-terminal", daemon=True)

    @classmethod
    def here(cls) -> Terminal | None:
        """Return the terminal of this process, or None if standard output is not a terminal."""
        if not is_terminal(sys.stdout, 1):
            return None
        try:
            return cls()
        except (OSError, termios.error) as error:
            logger.warning("worker 0 cannot have a terminal of its own: %s", error)
            return None

    def __enter__(self) -> Terminal:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._stopped)
        self._thread.join()
        self.pause()
        for descriptor in (self._stop, self._main, self._worker):
            if descriptor is not None:
                os.close(descriptor)

    def take_worker(self) -> int:
        """Return the descriptor of worker 0's terminal, once. The caller must close it.

        The output of worker 0 ends as soon as every process has closed the descriptor.
        """
        assert self._worker is not None
        descriptor, self._worker = self._worker, None
        return descriptor

    def pause(self) -> None:
        """Restore the settings of our terminal."""
        with self._lock:
            self._paused = True
            if self._changed:
                self._changed = False
                with contextlib.suppress(termios.error), _no_job_control():
                    termios.tcsetattr(self._own, termios.TCSADRAIN, self._settings)

    def resume(self) -> None:
        """Pass on keys again, after `pause`."""
        self._paused = False

    def copy_output(self, log: Path, screen: Screen) -> None:
        """Copy the output of worker 0 to its log and to the screen, until worker 0 has ended."""
        lines = _Lines(screen)
        copy_output(self._output(lines), log, lambda file: Transcript(file).write, lines.write)

    def awaits_user(self, process_id: int) -> bool:
        """Return True if the process waits for the user to type something, as far as the system tells.

        That is the case if its main thread reads from its terminal, or if it has changed its terminal to receive each
        key, as `readline` does while a line is edited.
        """
        if not self.reads:
            return False
        with contextlib.suppress(termios.error):
            if not termios.tcgetattr(self._main)[3] & termios.ICANON:
                return True
        try:
            call = Path(f"/proc/{process_id}/syscall").read_text().split()
            if call[0] != READ_CALL:
                return False
            return os.readlink(f"/proc/{process_id}/fd/{int(call[1], 16)}") in (self.name, "/dev/tty")
        except (OSError, IndexError):
            return False

    def _output(self, lines: _Lines) -> Iterator[bytes]:
        """Yield the output of worker 0 as it arrives, and b"" if a line has been unfinished for `LINE_TIMEOUT_S`."""
        source = os.dup(self._main)
        try:
            while True:
                if not select.select([source], [], [], LINE_TIMEOUT_S if lines.unfinished else None)[0]:
                    yield b""
                    continue
                try:
                    data = os.read(source, CHUNK_BYTES)
                except OSError:
                    return  # every process has closed the terminal
                if not data:
                    return
                yield data
        finally:
            os.close(source)

    def _run(self) -> None:
        """Copy what the user types to worker 0, and keep the sizes of both terminals equal."""
        # If this process is in the background, the system would otherwise stop it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU, signal.SIGTTIN})
        while True:
            self._copy_size()
            reading = self.reads and self._take_keys()
            ready, _, _ = select.select([self._stop, *[0] * reading], [], [], LOOK_INTERVAL_S)
            if self._stop in ready:
                return
            if 0 in ready and not self._paused:
                self._copy_keys()

    def _take_keys(self) -> bool:
        """Let our terminal pass on each key, if this process is in the foreground. Return True if it does so."""
        with self._lock, contextlib.suppress(OSError, termios.error):
            if self._paused or not _in_foreground():
                return False
            if not self._changed:
                iflag, oflag, cflag, lflag, ispeed, ospeed, characters = self._settings
                iflag &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
                # Ctrl-C and Ctrl-Z (ISIG) still send signals to this process.
                lflag &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
                characters = list(characters)
                characters[termios.VMIN], characters[termios.VTIME] = 1, 0
                changed = [iflag, oflag, cflag, lflag, ispeed, ospeed, characters]
                termios.tcsetattr(0, termios.TCSADRAIN, changed)
                self._changed = True
            return True
        return False

    def _copy_keys(self) -> None:
        try:
            keys = os.read(0, CHUNK_BYTES)
        except OSError:
            keys = b""
        if not keys:
            self.reads = False  # the user's terminal has been closed
        # If worker 0 reads nothing, its terminal is full after some thousand keys, and further keys are lost.
        while keys and select.select([], [self._main], [], 0)[1]:
            keys = keys[os.write(self._main, keys[:1]) :]

    def _copy_size(self) -> None:
        """Give worker 0's terminal the size of ours. Worker 0 then receives SIGWINCH if the size has changed."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._own, termios.TIOCGWINSZ, bytes(8))
            if size != self._size:
                self._size = size
                fcntl.ioctl(self._main, termios.TIOCSWINSZ, size)


class _Lines:
    """Passes the output of worker 0 to a screen: whole lines as lines, until worker 0 draws on its terminal.

    A script that only prints lines leaves the terminal to the launcher's progress display, above which the lines
    appear. From the first progress bar or prompt on, the output is passed on unchanged.

    Args:
        screen: the screen.

    Attributes:
        unfinished: True if the output ends in the middle of a line that has not been shown yet.
    """

    def __init__(self, screen: Screen) -> None:
        self.unfinished = False
        self._screen = screen
        self._drawing = False
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Pass on output. If `data` is empty, nothing has been written for some time."""
        self._rest += data
        if not self._drawing:
            *lines, rest = self._rest.split(b"\n")
            self._drawing = bool(DRAWING.search(self._rest)) or (not data and bool(rest))
            if not self._drawing:
                for line in lines:
                    self._screen.print(line.rstrip(b"\r").decode(errors="replace"))
                self._rest = rest
        if self._drawing:
            self._screen.draw(self._rest)
            self._rest = b""
        self.unfinished = bool(self._rest)


def left_behind(modes: set[bytes], data: bytes) -> set[bytes]:
    """Return the sequences that reset the modes of a terminal that are still set after this output.

    Args:
        modes: the sequences before this output.
        data: the output.
    """
    for start, end in UNDO.items():
        first, last = data.rfind(start), data.rfind(end)
        if first != last:
            modes = modes | {end} if first > last else modes - {end}
    return modes


def _in_foreground() -> bool:
    """Return True if this process may use the terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # the terminal is not the one that controls this process, so there is no job control


@contextlib.contextmanager
def _no_job_control() -> Iterator[None]:
    """Do not stop this process if it changes the terminal from the background."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
