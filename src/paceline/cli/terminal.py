"""What commands share: exit codes, Ctrl-C, progress, JSON, and values that are written with commas between."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import typer
from rich.console import Console

from ..errors import ConfigurationError

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "counting",
    "interruptible",
    "print_json",
    "read_numbers",
    "read_whole",
]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def interruptible(then: str = "every process of the run has been ended") -> Iterator[None]:
    """Ctrl-C ends what runs in order, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {then}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


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
    """What `--json` prints."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
