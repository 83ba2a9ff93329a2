"""The progress display of the commands: a bar on a terminal, otherwise occasional lines of text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ..launcher.terminal.output import plain_console

__all__ = ["TellShare", "counting", "shown_progress"]

PLAIN_INTERVAL_S = 5.0
REFRESH_INTERVAL_S = 0.2


class TellShare(Protocol):
    """A callback that shows progress, to be called before each step of the work."""

    def __call__(self, what: str, share: float, slow: bool = False) -> None:
        """Show the progress.

        Args:
            what: description of the step that begins now.
            share: fraction of the work that has been done, from 0 to 1.
            slow: True if the step may take seconds; such a step is always shown.
        """


@contextlib.contextmanager
def counting() -> Iterator[Callable[[int, int, str], None]]:
    """On a terminal, show a bar that counts steps. Yield a callback that takes (done, total, description)."""
    console = plain_console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("")
        yield lambda done, of, what: progress.update(bar, completed=done, total=of, description=what)


@contextlib.contextmanager
def shown_progress(console: Console) -> Iterator[TellShare]:
    """Show progress without disturbing measurements. Yield the progress callback.

    On a terminal, a bar is shown; elsewhere, a line of text is printed every few seconds. The bar is drawn
    only inside the callback, because a refresh thread would take CPU time from the calls that are measured.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    task = bar.add_task("starting", total=1.0)
    shown_s = -inf
    interval_s = REFRESH_INTERVAL_S if console.is_terminal else PLAIN_INTERVAL_S

    def tell(what: str, share: float, slow: bool = False) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < interval_s and not slow:
            return
        shown_s = now_s
        if console.is_terminal:
            bar.update(task, description=what, completed=share, refresh=True)
        else:
            console.print(f"{share:.0%}, {what}", markup=False, highlight=False, soft_wrap=True)

    with bar if console.is_terminal else contextlib.nullcontext():
        yield tell
