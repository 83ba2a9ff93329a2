"""Shows numbers, lists of workers, sentences in a terminal, and the names and colors of runs to users."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

MOST_NAMED = 4  # number of workers that are named in a sentence


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, such as "2 workers"."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def named_workers(workers: Collection[int]) -> str:
    """Return the names of workers, or of the first ones if there are many.

    >>> named_workers([3]), named_workers([1, 2]), named_workers(range(64))
    ('worker 3', 'workers 1, 2', 'workers 0, 1, 2, 3 and 60 others')
    """
    named = ", ".join(map(str, sorted(workers)[:MOST_NAMED]))
    others = len(workers) - MOST_NAMED
    more = f" and {counted(others, 'other')}" if others > 0 else ""
    return f"worker{'s' * (len(workers) != 1)} {named}{more}"


def duration(seconds: float) -> str:
    """Return a duration with two units at most.

    >>> duration(0.84), duration(75), duration(7260)
    ('0.8 s', '1 min 15 s', '2 h 1 min')
    """
    return f"{seconds:.1f} s" if seconds < 59.95 else rough_duration(seconds)


def rough_duration(seconds: float) -> str:
    """Return a duration in whole seconds, with two units at most.

    >>> rough_duration(0.84), rough_duration(75), rough_duration(7260)
    ('1 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    return f"{minutes} min {rest_s} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def shortened(text: str, width: int) -> str:
    """Return a text that is at most `width` cells wide. A longer text is cut after a word, and gets an ellipsis.

    >>> shortened("2 of 3 workers have pushed", 16), shortened("waiting", 6)
    ('2 of 3 workers…', '…')
    """
    if cell_len(text) <= width:
        return text
    kept = ""
    for word in text.split():
        longer = f"{kept} {word}" if kept else word
        if cell_len(longer.rstrip(",;:")) >= width:
            break
        kept = longer
    return kept.rstrip(",;:") + "…"


def length(seconds: float) -> str:
    """Return a duration in one unit, from milliseconds to hours.

    >>> length(0.0123), length(4.26), length(148.4), length(3000), length(90000)
    ('12.3 ms', '4.3 s', '148 s', '50 min', '25 h')
    >>> length(0.9996), length(599.6)  # the unit is that of the rounded number
    ('1.0 s', '10 min')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{2 if seconds < 0.01 else 3}g} ms"
    if seconds < 599.5:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 599.5 * 60 else f"{seconds / 3600:.0f} h"


def percent(share: float) -> str:
    """Return a share from 0 to 1 in percent.

    >>> percent(0.614), percent(0.004)
    ('61 %', '0.4 %')
    """
    return f"{share * 100:.0f} %" if share >= 0.01 or not share else f"{share * 100:.1g} %"


def size(number_of_bytes: float) -> str:
    """Return a number of bytes in words.

    >>> size(512), size(12_300_000), size(4.56e9)
    ('512 bytes', '12.3 MB', '4.56 GB')
    >>> size(999_700), size(1.2e12)  # the unit is that of the rounded number
    ('1 MB', '1.2 TB')
    """
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number_of_bytes >= 0.9995 * least:
            return f"{number_of_bytes / least:.3g} {unit}"
    return f"{number_of_bytes:.0f} bytes"


def listed(workers: Sequence[int]) -> str:
    """Return the names of all given workers, which must be in ascending order.

    >>> listed([3]), listed([0, 1, 2]), listed([0, 1, 5]), listed([1, 2, 4, 5, 6, 9])
    ('worker 3', 'workers 0 to 2', 'workers 0, 1 and 5', 'workers 1, 2, 4 to 6 and 9')
    """
    if len(workers) == 1:
        return f"worker {workers[0]}"
    spans: list[list[int]] = []
    for worker in workers:
        if spans and worker == spans[-1][-1] + 1:
            spans[-1].append(worker)
        else:
            spans.append([worker])
    parts: list[str] = []
    for span in spans:
        parts += [f"{span[0]} to {span[-1]}"] if len(span) > 2 else [str(worker) for worker in span]
    return f"workers {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"workers {parts[0]}"


# -- Sentences in the terminal: they are wrapped between words, in the available width -----------------------

NO_BREAK_SPACE = "\u00a0"
UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|min|h|MB|GB|TB|Gbit/s|samples/s)(?!\w))")
"""Matches the space between a number and its unit."""
COMMAND = re.compile(r"(?<=: )paceline .*[^.]$", re.MULTILINE)
"""Matches a command at the end of a sentence."""


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text for a terminal of this width, divided between words, but not before a unit.

    Text that users may copy is not divided, even if it is longer than a line: a path, and a command that follows a
    colon and ends the text.

    Args:
        text: the text. The line ends of the text are kept.
        width: number of characters in a line.
        indent: beginning of each line, except for the first one.

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
    """A text that is wrapped between words when it is shown.

    Args:
        text: the text.
        style: the style of the text.
        indent: beginning of each line, except for the first one.
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


# -- The names of runs in tables and pictures that compare them ----------------------------------------------


def run_name(sync: str, batch: str, hyperparameters: str = "raw", wire: str = "float32") -> str:
    """Return the name of a run: its sync model, and those of its settings that differ from the usual settings.

    >>> run_name("bsp", "equal"), run_name("bsp", "balanced")
    ('bsp', 'bsp, balanced batches')
    >>> run_name("asp", "equal", "translated", "int8")
    'asp, translated, int8'
    """
    notes = ["balanced batches"] * (batch == "balanced") + ["translated"] * (hyperparameters == "translated")
    return ", ".join([sync, *notes, *([wire] if wire != "float32" else [])])


def wrappable(name: str) -> str:
    """Return the name of a run with spaces where a table may wrap it.

    >>> wrappable("ssp:staleness=3,execution=lazy, balanced batches")
    'ssp: staleness=3, execution=lazy, balanced batches'
    """
    return name.replace(", ", ",").replace(",", ", ").replace(":", ": ", 1)


# -- The color of each use of the workers' time. All pictures use these colors, and no curve has any of them

COMPUTING = "#56B4E9"
TRANSFER = "#999999"
WAITING = "#D55E00"
WASTED = "#F0E442"
PAUSED = "#6F6FB4"
OUTSIDE = "#CC79A7"
LOADING = "#8CC6A5"
IDLE = "#9999994D"
"""Transparent, so that it is pale on a light background and on a dark one."""

COLOR_OF = {
    "computing": COMPUTING,
    "transfer": TRANSFER,
    "waiting": WAITING,
    "wasted": WASTED,
    "paused": PAUSED,
    "outside": OUTSIDE,
    "idle": IDLE,
    "loading": LOADING,
}
"""Kind of time, as in `trace.activity_cells` -> its color."""
