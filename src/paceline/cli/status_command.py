"""`paceline status`: what the workers of a run are doing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from ..errors import ConfigurationError, DeadlineError, PeerLostError
from ..launcher.terminal.output import ForgivingStream, plain_console
from ..report.run_file import read_run_file
from ..report.status_tables import LONG_LINE, StatusView
from .console import interruptible, print_json
from .join_command import SecretFile, address_of, secret_of
from .options import AsJson

if TYPE_CHECKING:
    from ..core.status.job_status import JobStatus
    from ..runtime.observer import Observer

__all__ = ["status"]

SETTLED_S = 0.3  # time after which the servers have answered the coordinator
RATE_S = 0.7  # time over which the first rates are averaged
WATCH_INTERVAL_S = 1.0


class _Place(NamedTuple):
    """Where a run is found.

    Attributes:
        address: address of its coordinator.
        token: its secret.
        run_dir: its directory, if it has been found there; else None.
        notes: sentences about the run that its state does not contain.
    """

    address: str
    token: str
    run_dir: Path | None = None
    notes: tuple[str, ...] = ()


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_DIR|HOST:PORT]",
            help="Directory of a run on this machine, or the address that `paceline serve` has printed. Default: the "
            "newest run in progress in ./runs.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the state again every second, until the run is over.")
    ] = False,
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Show how far a run has come, what its workers are doing, and who waits for whom. The run is not disturbed.

    paceline status --watch

    paceline status 10.0.0.1:29600
    """
    from ..runtime.observer import Observer

    if watch and as_json:
        raise ConfigurationError(
            "--watch and --json cannot be used together; call status again for each state."
        )
    place = _place(run, secret_file)
    with (
        interruptible("the run continues"),
        _in_progress(place),
        contextlib.closing(Observer(place.address, place.token)) as observer,
    ):
        # Each call asks the servers for the answers that the next state contains; rates need two of them.
        for pause_s in (RATE_S, SETTLED_S):
            observer.fetch()
            time.sleep(pause_s)
        state = observer.fetch()
        if as_json:
            print_json(msgspec.to_builtins(state))
        elif not watch:
            _print_status(state, place.notes)
        else:
            _watch(observer, state, place.notes)


def _place(run: str | None, secret_file: Path | None) -> _Place:
    """Return where the run is that the user names.

    Raises:
        ConfigurationError: there is no such run, or its secret is unknown.
        PeerLostError: the run is over.
    """
    from ..runtime.in_progress import newest_run, run_in

    if run is not None and not Path(run).is_dir():
        if ":" not in run:
            raise ConfigurationError(
                f"there is no directory {run!r}; name the directory of a run, such as runs/NAME, or the address of a "
                "run that is served, such as 10.0.0.1:29600."
            )
        return _Place(address_of(run), secret_of(secret_file))
    run_dir = newest_run() if run is None else Path(run)
    found = run_in(run_dir)
    notes = [f"the run in {run_dir}"] if run is None else []
    notes += [f"dashboard: {found.dashboard}"] if found.dashboard else []
    notes += _last_resumption(run_dir)
    return _Place(found.address, found.token, run_dir, tuple(notes))


def _last_resumption(run_dir: Path) -> list[str]:
    """Return what happened when the run in a directory was resumed last, as a note; [] if it was not."""
    try:
        file = read_run_file(run_dir)
    except (OSError, msgspec.MsgspecError):
        return []
    return [] if file is None else [each.words for each in file.resumptions[-1:]]


@contextlib.contextmanager
def _in_progress(place: _Place) -> Iterator[None]:
    """If the run ends in this context, say so, instead of naming the address of its coordinator.

    If nobody can see from here whether it has ended, say what is known.
    """
    from ..runtime.in_progress import run_in, unreachable

    try:
        yield
    except (ConfigurationError, DeadlineError, PeerLostError) as error:
        if place.run_dir is None:
            raise
        found = run_in(place.run_dir)  # raises an error that says how the run has ended
        raise error if found.seen else unreachable(place.run_dir, found) from error


def _watch(observer: Observer, state: JobStatus, notes: Sequence[str]) -> None:
    """Show the state of a run every second until the run is over or the reader of standard output has gone.

    A terminal shows only the latest state. Anything else, such as a file, receives one after another.
    """
    from rich.live import Live

    console = plain_console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while True:
            if live is not None:
                live.update(StatusView(state, notes=notes, lines=console.height - 1), refresh=True)
            else:
                _print_status(state, notes)
            if isinstance(sys.stdout, ForgivingStream) and sys.stdout.failed:
                return
            time.sleep(WATCH_INTERVAL_S)
            try:
                state = observer.fetch()
            except PeerLostError:
                return


def _print_status(state: JobStatus, notes: Sequence[str]) -> None:
    """Print the state of a run; in a pipe or a file, without a limit of the length of a line."""
    console = plain_console()
    if not console.is_terminal:
        console = plain_console(width=LONG_LINE)
    console.print(StatusView(state, notes=notes), crop=False)
