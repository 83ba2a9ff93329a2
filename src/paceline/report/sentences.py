"""Sentences in the terminal: they are wrapped between words, in the width that there is."""

from __future__ import annotations

import re
import textwrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

__all__ = ["Sentence", "wrapped"]

NO_BREAK_SPACE = "\u00a0"
UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|min|h|MB|GB|Gbit/s|samples/s)(?!\w))")
"""Matches the space between a number and its unit."""
COMMAND = re.compile(r"(?<=: )paceline .*[^.]$", re.MULTILINE)
"""Matches a command with which a sentence ends."""


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text for a terminal of this width, divided between words, but not before a unit.

    What may be copied is left whole, even if it is longer than a line: a path, and a command that follows a colon and
    ends the text.

    Args:
        text: the text. Its line ends are kept.
        width: number of characters in a line.
        indent: what each line begins with, except for the first one.

    >>> wrapped("the run is in /a/very/long/path now", 12)
    ['the run is', 'in', '/a/very/long/path', 'now']
    >>> wrapped("it waits for 12 s now", 16)
    ['it waits for', '12 s now']
    >>> wrapped("to compare them, run: paceline advise runs/1", 16)
    ['to compare them,', 'run:', 'paceline advise runs/1']
    """
    text = COMMAND.sub(lambda command: command[0].replace(" ", NO_BREAK_SPACE), text)
    return [
        part.replace(NO_BREAK_SPACE, " ")
        for line in UNIT.sub(NO_BREAK_SPACE, text).split("\n")
        for part in textwrap.wrap(
            line, max(width, 1), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        or [""]
    ]


class Sentence:
    """A text that is wrapped between words where it is shown.

    Args:
        text: the text.
        style: its style.
        indent: what each line begins with, except for the first one.
        label: words before the text, in bold.
    """

    def __init__(self, text: str, style: str = "", *, indent: str = "", label: str = "") -> None:
        self._text = label + text
        self._style = style
        self._indent = indent
        self._label = label

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, line in enumerate(wrapped(self._text, options.max_width, self._indent)):
            shown = Text(line, self._style, no_wrap=True, overflow="ignore")
            if number == 0:
                shown.stylize("bold", 0, len(self._label))
            yield shown
