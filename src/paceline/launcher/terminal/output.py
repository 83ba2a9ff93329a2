"""Text on the screen. Output that cannot be written is dropped, instead of raising an exception.

Training may take hours. Its result must be kept even if the reader of the output stops reading
(`paceline run ... | head`), the disk is full, or the terminal is closed.
"""

from __future__ import annotations

import logging
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from ...errors import InternalError
from ...report.sentences import wrapped

__all__ = ["ForgivingStream", "PlainScreen", "plain_console", "print_line", "print_sentence"]

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
            log.warning("%s can no longer be written: %s", self._name, error.strerror)


def print_line(line: str) -> None:
    """Print a line to standard output. Several threads may do so at the same time.

    `print` would write the end of the line separately, so that another thread's line could come in between.
    """
    print(f"{line}\n", end="", flush=True)


def plain_console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a console that prints each text as it is. All consoles of Paceline are made here.

    Texts contain names from users, and extras such as paceline[report]. By default, rich takes what stands in
    brackets for the name of a style, and drops it.

    Args:
        stderr: whether it prints to standard error, not to standard output.
        options: further arguments of `rich.console.Console`.
    """
    return Console(stderr=stderr, markup=False, **options)


def print_sentence(
    console: Console, text: str, style: str = "", *, marked: tuple[str, str] = ("", "")
) -> None:
    """Print text for people. A terminal wraps it between words; in a pipe or a file, it is never wrapped.

    A word that is longer than a line, such as a path, is left whole, so that it can be copied. A command line should
    not be printed by this function, because a wrapped one cannot be copied.

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
        """Only a worker with a terminal draws, and no worker has one here."""
        raise InternalError("a worker without a terminal draws on the screen")
