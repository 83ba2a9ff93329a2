"""Code shared by all commands: exit codes, error messages, standard streams, Ctrl-C, JSON, progress, and folders."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ..errors import ConfigurationError, PacelineError, UsageError
from ..start.terminal import ForgivingStream, plain_console, print_sentence

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# The run finished, but a worker crashed or some results were not saved in the run directory.
EXIT_NOT_ALL_WELL = 3
EXIT_INTERRUPTED = 130


def command_line(app: typer.Typer) -> Any:
    """Return the command that a Typer application defines, with the brackets in its help texts escaped.

    The help texts contain extras such as paceline[report]. Without escaping, rich would take the word in brackets for
    the name of a style.
    """
    command = typer.main.get_command(app)
    for each in (command, *getattr(command, "commands", {}).values()):
        for holder in (each, *each.params):
            if text := getattr(holder, "help", None):
                holder.help = escape(text)
    return command


def run_app(app: typer.Typer) -> None:
    """Run the command line. If the command fails, print the error and exit with the code for this kind of error."""
    keep_streams_usable()
    try:
        _require_utf_8()
        command_line(app)()
    except PacelineError as error:
        is_input = isinstance(error, ConfigurationError | UsageError)
        # The details of a failed run are tracebacks and lines of logs.
        first, *details = [str(error)] if is_input else str(error).split("\n")
        print_sentence(plain_console(stderr=True), f"error: {first}")
        for line in (*details, *getattr(error, "__notes__", ())):
            print(line, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if is_input else EXIT_FAILED)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _refuse(
            f"torch is not installed for {sys.executable}, the Python that runs this command; run: "
            f"{shlex.quote(sys.executable)} -m pip install torch"
        )
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"{str(error.filename)!r} cannot be used: {error.strerror}.")


def _refuse(words: str) -> None:
    print_sentence(plain_console(stderr=True), f"error: {words}")
    sys.exit(EXIT_BAD_INPUT)


def _require_utf_8() -> None:
    """Raise `ConfigurationError` unless messages and JSON files can contain the command and the current directory."""
    try:
        for text in (*sys.argv[1:], os.getcwd()):
            text.encode()
    except FileNotFoundError:
        raise ConfigurationError("the current directory was deleted; change to another directory.") from None
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{error.object!r} is not UTF-8; use only UTF-8 in the command and in the name of the current directory."
        ) from None


def keep_streams_usable() -> None:
    """Make sure that printing never fails in this process, even if a standard stream is closed or cannot be written.

    A closed stream is reopened on /dev/null. Otherwise the first socket would get the file descriptor of the closed
    stream, and printed text would be sent to the peer of that socket. A stream that fails later, such as a pipe whose
    reader has exited, drops its output and does not end the process. Characters that cannot be encoded are escaped.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the new descriptor is `number`
    for number, name, description in ((1, "stdout", "standard output"), (2, "stderr", "standard error")):
        # `sys.stdout` or `sys.stderr` is None if the stream was closed when Python started.
        stream = getattr(sys, name) or os.fdopen(number, "w", closefd=False)
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, cast(TextIO, ForgivingStream(stream, description)))


@contextlib.contextmanager
def interruptible(then: str = "all processes of the run have ended") -> Iterator[None]:
    """On Ctrl-C, SIGTERM, SIGHUP or SIGQUIT, print a message and exit with code 130, 143, 129 or 131.

    Args:
        then: the message to print on Ctrl-C if the interrupted code does not provide one.
    """
    from ..start.processes.interruption import Terminated

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


def load_named_models(sync: str, imports: Sequence[str] | None) -> None:
    """Import the installed models named in `sync`, and the modules in `imports`.

    The modules may be in the current directory.
    """
    from ..sync.plugins import load_models

    if imports and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    load_models(sync, imports or ())


def print_json(value: object) -> None:
    """Print an object as JSON, for `--json`. Exit with code 1 if the JSON cannot be written completely."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode(), flush=True)
    if isinstance(sys.stdout, ForgivingStream) and sys.stdout.failed:
        raise typer.Exit(EXIT_FAILED)


# -- The progress display of the commands: a bar on a terminal, otherwise occasional lines of text -----------

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


# -- Creates the folder into which a command writes pictures and JSON files ----------------------------------


def new_folder(out: Path | None, what: str) -> Path:
    """Create the output folder and return it.

    Args:
        out: the folder that the user chose, which must be empty or new. None creates a new folder under ./runs.
        what: prefix for the name of a new folder under ./runs.

    Raises:
        ConfigurationError: the folder is not empty or cannot be created.
    """
    if out is None:
        stamp = time.strftime(f"{what}-%Y%m%d-%H%M%S")
        names = (stamp if number == 1 else f"{stamp}-{number}" for number in itertools.count(1))
        _make(Path("runs"), exist_ok=True)
        return next(folder for name in names if _make(folder := Path("runs", name)))
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{str(out)!r} is a file; choose a folder with --out.")
    if out.exists() and any(out.iterdir()):
        raise ConfigurationError(f"the folder {str(out)!r} is not empty; choose another folder with --out.")
    _make(out, exist_ok=True)
    return out


def _make(folder: Path, *, exist_ok: bool = False) -> bool:
    """Create a folder. Return False if the folder exists and may not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            return False
        raise ConfigurationError(f"cannot create the folder {str(folder)!r}: {error.strerror}.") from error
    return True


# -- Folders that contain runs, given where a run is expected ------------------------------------------------

MOST_NAMED = 5  # number of runs that a message names


def require_no_folder_of_runs(folder: Path, command: str, or_else: str = "") -> None:
    """Raise `ConfigurationError` if a folder is not the directory of a run, but contains such directories.

    The error names the newest of these runs.

    Args:
        folder: the folder.
        command: the command to which the folder was given.
        or_else: what else the command accepts.
    """
    from ..look.run_reading import holds_run

    if not folder.is_dir() or holds_run(folder):
        return
    runs = [each for each in folder.iterdir() if each.is_dir() and holds_run(each)]
    if not runs:
        return
    runs.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    named = ", ".join(map(str, runs[:MOST_NAMED]))
    more = f" and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    raise ConfigurationError(
        f"{str(folder)!r} is not a run, but contains runs (newest first: {named}{more}); name one of them{or_else}: "
        f"paceline {command} {shlex.quote(str(runs[0]))}"
    )
