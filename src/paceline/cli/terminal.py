"""What commands share: exit codes, standard streams, Ctrl-C, progress, JSON, and values with commas between."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO, cast

import typer
from rich.console import Console

from ..errors import ConfigurationError
from ..launcher.output import ForgivingStream

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_ALL_WELL",
    "counting",
    "interruptible",
    "keep_streams_usable",
    "print_json",
    "read_numbers",
    "read_whole",
]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_ALL_WELL = 3  # the run came to its end, but workers crashed, or not everything is where it should be
EXIT_INTERRUPTED = 130


def keep_streams_usable() -> None:
    """Make the standard streams ones that can be printed to, whatever becomes of them. Of a whole process.

    A closed one is opened, to nowhere: else the first socket would get its number, and what is printed would go to
    whoever is at the other end. One that fails later, such as a pipe that nobody reads any more, ends nothing.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for number, name, words in ((1, "stdout", "standard output"), (2, "stderr", "standard error")):
        stream = getattr(sys, name) or os.fdopen(number, "w", closefd=False)  # None if it was closed
        setattr(sys, name, cast(TextIO, ForgivingStream(stream, words)))


@contextlib.contextmanager
def interruptible(then: str = "every process of the run has been ended") -> Iterator[None]:
    """Ctrl-C ends what runs in order, and says so; so does SIGTERM."""
    from ..launcher.interruption import Terminated

    try:
        yield
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {interrupt.args[0] if interrupt.args else then}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Terminated as end:
        print(f"terminated: {end.words}", file=sys.stderr)
        raise typer.Exit(128 + end.number) from None


@contextlib.contextmanager
def counting() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar for things that can be counted: (how many are done, of how many, which)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("")
        yield lambda done, of, what: progress.update(bar, completed=done, total=of, description=what)


def read_numbers(name: str, text: str | None) -> list[float] | None:
    """1,1,1,3. Raises `ConfigurationError`, with the option's name, for anything else."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"{name} is {text!r}, expected numbers with commas between, as in 1,1,1,3."
        ) from None


def read_whole(name: str, number: float) -> int:
    """One of them that must be whole."""
    if not number.is_integer():
        raise ConfigurationError(f"{name} is {number:g}, expected a whole number >= 1.")
    return int(number)


def print_json(value: object) -> None:
    """What `--json` prints. A program that reads it learns by the exit code if it is not whole."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode(), flush=True)
    if isinstance(sys.stdout, ForgivingStream) and sys.stdout.failed:
        raise typer.Exit(EXIT_FAILED)
