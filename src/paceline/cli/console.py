"""Code shared by all commands: exit codes, error messages, standard streams, Ctrl-C, JSON, and lists of numbers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

import typer
from rich.markup import escape

from ..errors import ConfigurationError, PacelineError, UsageError
from ..launcher.terminal.output import ForgivingStream, plain_console, print_sentence

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_ALL_WELL",
    "command_line",
    "interruptible",
    "keep_streams_usable",
    "load_named_models",
    "print_json",
    "read_whole",
    "run_app",
]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# The run finished, but a worker crashed or some results were not saved in the run directory.
EXIT_NOT_ALL_WELL = 3
EXIT_INTERRUPTED = 130


def command_line(app: typer.Typer) -> Any:
    """Return the command of a command line, whose help texts are shown as they are.

    They contain extras such as paceline[report], and rich takes what stands in brackets for the name of a style.
    """
    command = typer.main.get_command(app)
    for each in (command, *getattr(command, "commands", {}).values()):
        for holder in (each, *each.params):
            if text := getattr(holder, "help", None):
                holder.help = escape(text)
    return command


def run_app(app: typer.Typer) -> None:
    """Run the command line. If it fails, print the error and exit with the exit code for this kind of error."""
    keep_streams_usable()
    try:
        command_line(app)()
    except (ConfigurationError, UsageError) as error:
        print_sentence(plain_console(stderr=True), f"error: {error}")
        for line in getattr(error, "__notes__", ()):
            print(line, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except PacelineError as error:
        first, *details = str(error).split("\n")  # the details are tracebacks and lines of logs
        print_sentence(plain_console(stderr=True), f"error: {first}")
        for line in (*details, *getattr(error, "__notes__", ())):
            print(line, file=sys.stderr)
        sys.exit(EXIT_FAILED)


def keep_streams_usable() -> None:
    """Make sure that printing never fails in this process, even if a standard stream is closed or cannot be written.

    A closed stream is reopened on /dev/null. Otherwise the first socket would get the file descriptor of the closed
    stream, and printed text would be sent to the peer of that socket. A stream that fails later, such as a pipe whose
    reader has exited, drops its output and does not end the process.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the new descriptor is `number`
    for number, name, description in ((1, "stdout", "standard output"), (2, "stderr", "standard error")):
        # `sys.stdout` or `sys.stderr` is None if the stream was closed when Python started.
        stream = getattr(sys, name) or os.fdopen(number, "w", closefd=False)
        setattr(sys, name, cast(TextIO, ForgivingStream(stream, description)))


@contextlib.contextmanager
def interruptible(then: str = "all processes of the run have ended") -> Iterator[None]:
    """On Ctrl-C, SIGTERM, SIGHUP or SIGQUIT, print a message and exit with code 130, 143, 129 or 131.

    Args:
        then: the message to print on Ctrl-C if the interrupted code does not provide one.
    """
    from ..launcher.processes.interruption import Terminated

    try:
        yield
    except KeyboardInterrupt as interrupt:
        print_sentence(
            plain_console(stderr=True), f"interrupted: {interrupt.args[0] if interrupt.args else then}"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Terminated as end:
        print_sentence(plain_console(stderr=True), f"terminated: {end.words}")
        raise typer.Exit(128 + end.number) from None


def read_whole(name: str, number: float) -> int:
    """Convert a float that is a whole number to an integer. The error message contains `name`.

    Raises:
        ConfigurationError: the float is not a whole number.
    """
    if not number.is_integer():
        raise ConfigurationError(f"{name} is {number:g}, expected a whole number >= 1.")
    return int(number)


def load_named_models(sync: str, imports: Sequence[str] | None) -> None:
    """Import the installed models named in `sync`, and the modules in `imports`.

    The modules may be in the current directory.
    """
    from ..plugins import load_models

    if imports and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    load_models(sync, imports or ())


def print_json(value: object) -> None:
    """Print an object as JSON, for `--json`. Exit with code 1 if the JSON cannot be written completely."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode(), flush=True)
    if isinstance(sys.stdout, ForgivingStream) and sys.stdout.failed:
        raise typer.Exit(EXIT_FAILED)
