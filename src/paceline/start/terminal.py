"""The standard streams of the processes of a run: where their input comes from, and where their output goes.

Every process writes to its log. The output of worker 0 is also shown. If another worker becomes the main worker, its
output is shown from then on, too. If the launcher writes to a terminal, worker 0 has a terminal as well (see
below). All other processes write to pipes, and so does worker 0 without a terminal.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol

from rich.console import Console
from rich.text import Text

from ..errors import InternalError
from ..words import wrapped
from .processes.program import CUT_OFF


class StandardStreams(NamedTuple):
    """The choices of the user about the standard streams.

    Attributes:
        reads: True if worker 0 reads this process's standard input even if this input is not a terminal.
        show_all: True if the output of every process is shown, each line with the name of its process.
    """

    reads: bool = False
    show_all: bool = False


class Channel(NamedTuple):
    """The standard streams of one process.

    Attributes:
        stdin: descriptor of standard input. Once the process has started, this descriptor must be closed.
        stdout: descriptor of standard output and standard error. Once the process has started, this descriptor must be
            closed.
        copy: a function that copies the output, until it ends, to the log and to the screen.
        close: a function that releases the resources of `copy`, for a process that cannot be started.
    """

    stdin: int
    stdout: int
    copy: Callable[[], None]
    close: Callable[[], None]


class Channels:
    """Opens the standard streams of the processes of one run.

    Args:
        streams: how the user wants to use the standard streams.
        terminal: the terminal that worker 0 uses, if any.
        screen: shows the output.
        shown: name of the process whose output is shown from the beginning.
    """

    def __init__(
        self, streams: StandardStreams, terminal: Terminal | None, screen: Screen, shown: str = "worker 0"
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
            log: path of the process's log.
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

        def show(line: str) -> None:
            if name in self._shown and not line.startswith(CUT_OFF):
                self._screen.print(line)

        return show


# -- Copies the output of a process to its log and to the screen ---------------------------------------------

Sink = Callable[[bytes], object]


def copy_output(
    output: Iterable[bytes],
    log: Path,
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
        show: shows a piece on the screen. It may raise any exception.
        append: True to append to the log instead of overwriting it.
    """
    sinks: dict[str, Sink] = {"shown": show}
    with contextlib.ExitStack() as opened:
        try:
            sinks["written"] = opened.enter_context(log.open("ab" if append else "wb", buffering=0)).write
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


# -- The terminal of the launcher, which worker 0 uses as if it ran alone ------------------------------------
#
# Worker 0 gets a terminal of its own, a pseudo-terminal with the settings and the size of the launcher's
# terminal. The launcher copies the output of worker 0 to the user's terminal, and the user's keys to worker 0.
# So the launcher remains in control: Ctrl-C and Ctrl-Z reach the launcher, whatever worker 0 does with its
# terminal, and the settings of the user's terminal never depend on worker 0.
#
# Worker 0 cannot have the launcher's own terminal. Only one process group may read from a terminal, and this
# group also gets the signals. Besides, the launcher could not copy the output of worker 0 to a log.

logger = logging.getLogger("paceline.terminal")

CHUNK_BYTES = 65536
LOOK_INTERVAL_S = 0.2  # interval at which the size of the terminal and its foreground process are checked
# A line that has not ended after this time is shown: it is a prompt, or dots that show progress.
LINE_TIMEOUT_S = 0.1

DRAWING = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f]"  # control characters, except for tabs and line ends
    rb"|\r+[^\r\n]"  # a line that is overwritten
    rb"|\x1b(?!\[[\d;:]*m|\[[\d;:]*\Z|\Z)"  # control sequences, except for colors
)
"""Matches output that moves the cursor or erases text."""

RESET = b"\x1b[0m\x1b[?25h\x1b[?2004l\x1b[?1l"
"""Ends what a killed process may leave behind: colors, a hidden cursor, marks around pasted text, changed keys."""

READ_CALL = {"x86_64": "0", "aarch64": "63"}.get(platform.machine())
"""The number of the system call `read`, as text; None if it is not known for this kind of processor."""


class Screen(Protocol):
    """The part of the launcher that shows the output of worker 0. See `ProgressDisplay`."""

    def print(self, line: str) -> None:
        """Show a line."""

    def draw(self, data: bytes) -> None:
        """Write output to the terminal unchanged. From now on, worker 0 alone draws on the terminal."""


def is_terminal(stream: object, number: int) -> bool:
    """Return True if the stream is a terminal, and writes to or reads from the descriptor with this number."""
    try:
        return bool(stream.isatty() and stream.fileno() == number)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False  # no stream, a closed stream, or a replacement by a notebook or a test


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
        self._changed = False  # True if the settings of the user's terminal are changed now
        self._paused = False
        self._lock = threading.Lock()
        self._main, worker = os.openpty()
        self._worker: int | None = worker
        self.name = os.ttyname(worker)
        settings = termios.tcgetattr(self._own)
        # Worker 0's terminal adds no carriage returns: the user's terminal adds them, and the log is a text file.
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(worker, termios.TCSANOW, settings)
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
        """Return the descriptor of worker 0's terminal, which the caller must close. Call this only once.

        The output of worker 0 ends as soon as every process has closed the descriptor.
        """
        assert self._worker is not None
        descriptor, self._worker = self._worker, None
        return descriptor

    def pause(self) -> None:
        """Restore the settings of the user's terminal."""
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
        copy_output(self._output(lines), log, lines.write)

    def awaits_user(self, process_id: int) -> bool:
        """Return True if the process waits for the user to type something, as far as the system tells.

        This is the case if its main thread reads from its terminal, or if it has changed the terminal to receive each
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
        """Copy the user's keys to worker 0, and keep the sizes of both terminals equal."""
        # Without this, the system would stop this process when it is in the background.
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
        """If this process is in the foreground, let the user's terminal pass on each key, and return True."""
        with self._lock, contextlib.suppress(OSError, termios.error):
            if self._paused or not _in_foreground():
                return False
            if not self._changed:
                changed = termios.tcgetattr(0)
                changed[0] &= ~termios.ICRNL  # worker 0's terminal decides what Enter means
                # Ctrl-C and Ctrl-Z still send signals to this process.
                changed[3] &= ~(termios.ICANON | termios.ECHO)
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
        """Give worker 0's terminal the size of the user's. Worker 0 receives SIGWINCH if the size has changed."""
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


def _in_foreground() -> bool:
    """Return True if this process may use the terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # the terminal is not the one that controls this process, so there is no job control


@contextlib.contextmanager
def _no_job_control() -> Iterator[None]:
    """Keep this process from being stopped when it changes the terminal from the background."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- Text on the screen. Output that cannot be written is dropped, instead of raising an exception -----------
#
# Training may take hours. The result of training must be kept even if the reader of the output stops reading
# (`paceline run ... | head`), the disk is full, or the terminal is closed.

log = logging.getLogger("paceline.output")


class ForgivingStream:
    """A wrapper around a text stream that drops all output after the first write error.

    The error is logged, unless it is a broken pipe: readers usually close a pipe intentionally. All other attributes
    are taken from the stream.

    Args:
        stream: the stream to write to.
        name: name of the stream in the log message.

    Attributes:
        failed: True once writing has failed.
    """

    def __init__(self, stream: IO[str], name: str) -> None:
        self.failed = False
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write the text, or drop the text if writing has failed."""
        self._forgive(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless writing has failed."""
        self._forgive(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _forgive(self, act: Callable[..., object], *text: str) -> None:
        if not self.failed:
            try:
                act(*text)
            except OSError as error:
                self.failed = True
                if not isinstance(error, BrokenPipeError):
                    log.warning("%s can no longer be written: %s", self._name, error.strerror)


def print_line(line: str) -> None:
    """Print a line to standard output. Several threads may do so at the same time.

    `print` would write the end of the line separately, so that another thread's line could come in between.
    """
    print(f"{line}\n", end="", flush=True)


def plain_console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a console that prints each text as it is. All consoles of Paceline are made here.

    Texts contain names from users, and extras such as paceline[report]. By default, rich takes a word in
    brackets for the name of a style, and does not print it.

    Args:
        stderr: True for a console that prints to standard error instead of standard output.
        options: further arguments of `rich.console.Console`.
    """
    return Console(stderr=stderr, markup=False, **options)


def print_sentence(
    console: Console, text: str, style: str = "", *, marked: tuple[str, str] = ("", "")
) -> None:
    """Print text for people. On a terminal, the text is wrapped between words; in a pipe or a file, it is not wrapped.

    A word that is longer than a line, such as a path, is left whole, so that it can be copied. A command line should
    not be printed by this function, because a wrapped command line cannot be copied.

    Args:
        console: the console to write to.
        text: the text.
        style: the style of the text.
        marked: a word whose first occurrence has a style of its own, and this style.
    """
    if console.is_terminal:
        text = "\n".join(wrapped(text, console.width))
    shown = Text(text, style=style)
    word, word_style = marked
    shown.stylize(word_style, start := text.find(word), start + len(word))
    console.print(shown, soft_wrap=True)


class PlainScreen:
    """Shows the output of a worker line by line on standard output. See `Screen`."""

    def print(self, line: str) -> None:
        """Show a line."""
        print_line(line)

    def draw(self, data: bytes) -> None:
        """Raise an error: only a worker with a terminal draws, and here no worker has a terminal."""
        raise InternalError("a worker without a terminal draws on the screen")
