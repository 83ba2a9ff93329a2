"""Commands about existing runs: `paceline report`, `paceline replay` and `paceline status`."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import ConfigurationError, DeadlineError, PeerLostError
from ..files import Unfinished
from ..look.status import LONG_LINE, StatusView
from ..start.terminal import ForgivingStream, plain_console, print_sentence
from ..trace.report import read_run_file
from ..trace.run_dir import REPORT
from ..words import wrappable
from .console import interruptible, load_named_models, print_json, require_no_folder_of_runs
from .options import AsJson, ModelImports, Trusted
from .run import SecretFile, address_of, secret_of

if TYPE_CHECKING:
    from ..core.status import JobStatus
    from ..run.observer import Observer
    from ..trace.report import RunReport


TELL_S = 2.0  # time after which the user is told what takes so long


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="Directories of runs. Several runs are compared on one page.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File for the page. Default: report.html in the (first) run directory.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the report of a run as one HTML file, and say what held the run back.

    paceline report runs/20260101-120000
    """
    if as_json and (show or out is not None):
        raise ConfigurationError("--json prints the report, so --out and --open cannot be used with it.")
    with interruptible("no report was written"):
        from ..look.page import page_of
        from ..look.run_reading import ReportReader

        for run_dir in run_dirs:
            require_no_folder_of_runs(run_dir, "report", ", or several to compare them")
            ReportReader(run_dir)  # raises an error unless the directory contains a run
        path = run_dirs[0] / REPORT if out is None else out
        if not as_json:
            _require_file(path)
        tell = _Teller()
        reports = [_read(run_dir, tell) for run_dir in run_dirs]
        if as_json:
            encoded = msgspec.json.encode(reports[0] if len(reports) == 1 else reports)
            sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
            return
        try:
            with Unfinished(path.resolve()) as place:  # a link stays, such as /dev/stdout
                place.write_text(page_of(reports), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"{str(path)!r} cannot be written: {error.strerror or error}. Name another file with --out."
            ) from error
    console = plain_console()
    for each in reports:
        _print(each, console, name=len(reports) > 1)
    print(f"report: {path}")
    if show:
        webbrowser.open(path.resolve().as_uri())


def _print(report: RunReport, console: Console, *, name: bool) -> None:
    """Print the headline of a report, and the causes of lost time with their remedies."""
    if name:
        print(f"{report.name}:")
    print_sentence(console, report.headline)
    for number, cause in enumerate(report.causes, start=1):
        print_sentence(console, f"{number}. {cause.words}")
        for remedy in cause.remedies:
            print_sentence(console, f"   - {remedy}")


def _read(run_dir: Path, tell: _Teller) -> RunReport:
    from ..look.run_reading import ReportReader
    from ..run.run_lock import is_held

    def look() -> bool:
        tell.look(run_dir)
        return False

    return ReportReader(run_dir, is_held).read(hurried=look)


class _Teller:
    """Tells the user which run is being read, if reading takes long."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + TELL_S
        self._told: set[Path] = set()

    def look(self, run_dir: Path) -> None:
        """Say which run is being read: only once for each run, and only if reading takes long."""
        if time.monotonic() > self._due_s and run_dir not in self._told:
            self._told.add(run_dir)
            print(f"reading {run_dir} ...", file=sys.stderr, flush=True)


def _require_file(path: Path) -> None:
    """Raise `ConfigurationError` if the page cannot be written to this file."""
    if path.exists() and not path.is_file():  # a file would replace a pipe or a device
        raise ConfigurationError(
            f"--out is {str(path)!r}, which is not a file; name a file, such as report.html."
        )
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"--out is {str(path)!r}, but {str(path.parent)!r} does not exist; create it first."
        )


# -- `paceline replay`: repeats the decisions of a recorded run, with its own model or with another one ------

MOST_SHOWN = 5  # number of differences that are shown of each trace


def replay(
    run_dir: Annotated[
        Path, typer.Argument(help="Directory of a run.", show_default=False, metavar="RUN_DIR")
    ],
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            metavar="NAME:KEY=VALUE,...",
            help="Another synchronization model. It receives the recorded events of the shards, at the recorded times.",
            show_default=False,
        ),
    ] = None,
    imports: ModelImports = None,
    trust: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """Repeat and check the decisions of a run from its traces, or show what another model would have decided.

    paceline replay runs/20261121-120000
    """
    from ..sync import parse
    from ..trace.recording import load_kept_models, read_run
    from ..trace.replay import decisions_of, redecide
    from ..trace.replay import replay as replay_trace

    if not run_dir.is_dir():
        wrong = "is not a directory" if run_dir.exists() else "does not exist"
        raise ConfigurationError(f"{str(run_dir)!r} {wrong}; give the directory of a run.")
    require_no_folder_of_runs(run_dir, "replay")
    load_named_models("", imports)
    load_kept_models(run_dir, trust=trust)  # --sync may name models of the run
    load_named_models(sync or "", None)
    model = None if sync is None else parse(sync)
    traces = read_run(run_dir)
    if not traces:
        raise ConfigurationError(
            f"{run_dir} contains no traces. Give the directory of a run that has kept its traces, as all runs do "
            "except with --traces off."
        )
    console = plain_console(quiet=as_json)
    if model is None:
        differences = {trace.header.recorded_by: replay_trace(trace) for trace in traces}
        entries = sum(len(trace.entries) for trace in traces)
        for host, found in differences.items():
            for difference in found[:MOST_SHOWN]:
                console.print(f"{host}: {difference}", highlight=False, soft_wrap=True)
            if len(found) > MOST_SHOWN:
                console.print(f"{host}: {len(found) - MOST_SHOWN} more differences", highlight=False)
        count = sum(map(len, differences.values()))
        console.print(
            f"{entries:,} events at {len(traces)} state machines. "
            f"Decisions that differ from the recorded ones: {count:,}",
            highlight=False,
        )
        if as_json:
            print_json({"events": entries, "differences": differences})
        if count:
            raise typer.Exit(1)
        return
    if model.needs_plans or model.at_coordinator() is not None:
        raise ConfigurationError(
            f"{sync} plans for the whole job, and another plan would have changed the times of the pushes. Simulate "
            "the model with the recorded times instead: "
            + shlex.join(["paceline", "simulate", str(run_dir), "--sync", str(sync)])
        )
    shards = [trace for trace in traces if trace.header.host == "shard"]
    if not all(trace.header.is_whole for trace in shards):
        raise ConfigurationError(
            "the beginning of the traces was deleted, so it is not known what another model would have decided. Record "
            "a run with --traces full."
        )
    pairs = [(decisions_of(trace), redecide(trace, model)) for trace in shards]
    if as_json:
        print_json([{"recorded": recorded, "other": other} for recorded, other in pairs])
        return
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, title=str(run_dir), title_justify="left"
    )
    table.add_column("shard")
    table.add_column("sync", overflow="fold")
    for heading in (
        "updates",
        "dropped",
        "delayed pulls",
        "waited, s",
        "staleness mean, max",
        "pushes too early",
    ):
        table.add_column(heading, justify="right")
    for index, pair in enumerate(pairs):
        for decided in pair:
            table.add_row(
                str(index),
                wrappable(decided.sync),
                str(decided.updates),
                str(decided.dropped),
                str(sum(decided.delayed.values())),
                f"{sum(decided.waited_s.values()):.3g}",
                f"{decided.mean_staleness:.2f}, {decided.max_staleness}",
                str(sum(decided.too_early.values())),
            )
    console.print(table)
    for index, (recorded, other) in enumerate(pairs):
        first = other.differs_s
        console.print(
            f"shard {index}: {other.sync} decides "
            + (
                "like the recorded model."
                if first is None
                else f"differently from {recorded.sync}, first at {first:.6g} s."
            ),
            highlight=False,
        )
    early = sorted({worker for _, other in pairs for worker in other.too_early})
    if early:
        console.print(
            f"Under {sync}, some workers ({', '.join(map(str, early))}) would have waited longer, so their later "
            "messages would have come later, too. To see how the run would have gone on: "
            + shlex.join(["paceline", "simulate", str(run_dir), "--sync", str(sync)]),
            highlight=False,
            soft_wrap=not console.is_terminal,
        )


# -- `paceline status`: what the workers of a run are doing --------------------------------------------------

SETTLED_S = 0.3  # time within which the servers usually answer the coordinator
RATE_S = 0.7  # time over which the first rates are averaged
WATCH_INTERVAL_S = 1.0


class _Place(NamedTuple):
    """How a run in progress can be reached.

    Attributes:
        address: address of the run's coordinator.
        token: the secret of the run.
        run_dir: the run directory if the user has named it, or named nothing; None if the user has named an address.
        notes: notes that are shown with the state of the run, such as the address of its dashboard.
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
    from ..run.observer import Observer

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
        # The state that a call returns contains the servers' answers to the call before it. A rate is computed from two
        # answers, so only the third state contains rates.
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
    """Return where to find the run that the user names.

    Raises:
        ConfigurationError: there is no such run, or its secret is unknown.
        PeerLostError: the run is over.
    """
    from ..run.run_lock import newest_run, run_in

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
    """Return what happened when the run in a directory was last resumed, as a note; [] if it was never resumed."""
    try:
        file = read_run_file(run_dir)
    except (OSError, msgspec.MsgspecError):
        return []
    return [] if file is None else [each.words for each in file.resumptions[-1:]]


@contextlib.contextmanager
def _in_progress(place: _Place) -> Iterator[None]:
    """If a connection is lost in this context, raise an error that says how the run has ended, if this is known."""
    from ..run.run_lock import run_in, unreachable

    try:
        yield
    except (ConfigurationError, DeadlineError, PeerLostError) as error:
        if place.run_dir is None:
            raise
        found = run_in(place.run_dir)  # raises an error that says how the run has ended
        raise error if found.seen else unreachable(place.run_dir, found) from error


def _watch(observer: Observer, state: JobStatus, notes: Sequence[str]) -> None:
    """Show the state of a run every second until the run is over or standard output can no longer be written.

    A terminal shows only the latest state. Any other output, such as a file, receives every state.
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
    """Print the state of a run. In a pipe or a file, lines may have any length."""
    console = plain_console()
    if not console.is_terminal:
        console = plain_console(width=LONG_LINE)
    console.print(StatusView(state, notes=notes), crop=False)
