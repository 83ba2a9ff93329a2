"""The harness: how a benchmark is declared, and the code that all benchmarks share around their measurements.

A benchmark is a function `measure(tell, ...)` with a `Benchmark` as its decorator. The function returns a list of
`Figures`: rows, and the columns of the table that shows the rows. From this function, the harness makes a command of
`python -m benchmarks`. If the type of an argument names an option, such as `Rounds`, the argument becomes an option of
the command. Every command also has these options:

- `--quick` measures something small. This shows only that the benchmark works.
- `--json` prints JSON lines: one with the conditions of the measurement, and one for each row.
- `--against COMMIT` measures this checkout and COMMIT in turn, and prints the ratios of all numbers.

The harness must not know what is measured. The speed of a machine varies by half from hour to hour, so a benchmark
measures all cases within one run, in turns (see `in_turns`), and compares medians.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import paceline
from paceline.cli.console import TellShare, interruptible, shown_progress
from paceline.cli.options import AsJson, whole_number_option
from paceline.errors import ConfigurationError, RunFailedError
from paceline.settings.checks import numbers
from paceline.sim import Cluster
from paceline.start.launch import launch
from paceline.start.results import RunResult
from paceline.train.session import worker_index

from .overlap.namespaces import rate_bps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Case = TypeVar("Case")
Row = TypeVar("Row")
Measure = TypeVar("Measure", bound=Callable[..., Any])

NOTHING_LEFT = "there are no results, and all processes have been stopped"
ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2  # number of calls or iterations at the beginning that are not measured
QUIET = 0.05  # share of all cores that other programs may use without a warning
LOOK_S = 0.5  # seconds for which the harness measures the load by other programs
PAIRS = 3  # number of runs of each commit with `--against`

# -- the options that benchmarks share ---------------------------------------------------------------------------


def list_option(name: str, metavar: str, help: str, read: Callable[[str], Sequence[object]]) -> Any:
    """Return an option whose value is a list. `read` makes the list from text with commas."""

    def parse(given: str | Sequence[object]) -> Sequence[object]:
        return read(given) if isinstance(given, str) else given  # the default value is a list already

    return typer.Option(name, metavar=metavar, help=help, parser=parse)


def _rate(given: str) -> str:
    rate_bps(given)
    return given


Rounds = Annotated[
    int,
    whole_number_option(
        "--rounds", least=1, help="Number of rounds. Each result is the median over the rounds."
    ),
]
SizesMb = Annotated[
    Sequence[float],
    list_option("--sizes", "MB ...", "Model sizes in MB (2**20 bytes).", partial(numbers, "sizes")),
]
Rate = Annotated[
    str,
    typer.Option(
        "--rate",
        metavar="RATE",
        help="Rate of each network link in each direction, for example 250mbit.",
        parser=_rate,
    ),
]

# -- results -----------------------------------------------------------------------------------------------------


Columns = Mapping[str, Callable[[Row], object]]
"""Heading of a column of a table -> function that returns the text of a cell."""


class Figures(Generic[Row]):
    """Results of one kind, and how they are shown.

    Args:
        title: title of the table.
        rows: the results. Each row is a `msgspec.Struct`, whose fields are printed with `--json`.
        columns: the columns of the table.
        caption: text below the table.
        labels: number of columns with text, which are the leftmost ones.
    """

    def __init__(
        self, title: str, rows: Sequence[Row], columns: Columns[Row], caption: str = "", labels: int = 1
    ) -> None:
        self.title = title
        self.rows = rows
        self.columns = columns
        self.caption = caption
        self.labels = labels

    def cells(self) -> list[list[str]]:
        """Return the text of each cell of each row."""
        return [[str(cell(row)) for cell in self.columns.values()] for row in self.rows]

    def table(self) -> Table:
        """Return the table."""
        table = new_table(self.title, self.caption)
        found = self.cells()
        for number, heading in enumerate(self.columns):
            widest = max((len(cells[number]) for cells in found), default=8)
            narrow = "\n".join(textwrap.wrap(heading, max(widest, 8, *map(len, heading.split()))))
            side: Any = "left" if number < self.labels else "right"
            table.add_column(narrow, justify=side, no_wrap=number >= self.labels, overflow="fold")
        for cells in found:
            table.add_row(*cells)
        return table


def new_table(title: str, caption: str = "") -> Table:
    """Return a table without columns, in the style of all benchmarks."""
    return Table(
        title=title,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def marked(text: str, met: bool) -> str:
    """Return a text, followed by a mark if a goal is not met."""
    return text if met else f"{text} !"


def goal_text(goal: str, met: bool) -> str:
    """
    >>> goal_text("at most 2 s", True), goal_text("", True)
    ('at most 2 s: met', '')
    """
    return f"{goal}: {'met' if met else 'not met'}" if goal else ""


class Spread(NamedTuple):
    """The median, the smallest and the largest of some numbers."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """
    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0)
    """
    found = list(values)
    return Spread(median(found), min(found), max(found))


def rounds_text(rounds: int) -> str:
    """
    >>> rounds_text(1), rounds_text(3)
    ('medians over 1 round', 'medians over 3 rounds')
    """
    return f"medians over {rounds} round{'s' if rounds != 1 else ''}"


# -- measuring ---------------------------------------------------------------------------------------------------


def in_turns(
    tell: TellShare,
    rounds: int,
    cases: Mapping[str, Case],
    measure: Callable[[Case], T],
    work: Callable[[Case], float] = lambda case: 1.0,
) -> dict[str, list[T]]:
    """Measure every case once in each round, so that a change of the machine's speed affects all cases.

    Args:
        tell: progress callback.
        rounds: number of rounds.
        cases: the cases, by name.
        measure: measures one case.
        work: about how long a case takes, in any unit, for the progress display.

    Returns:
        For each case, what was measured in each round.
    """
    found: dict[str, list[T]] = {name: [] for name in cases}
    total, done = rounds * sum(map(work, cases.values())), 0.0
    for number in range(rounds):
        for name, case in cases.items():
            tell(f"round {number + 1} of {rounds}, {name}", done / total, slow=True)
            found[name].append(measure(case))
            done += work(case)
    return found


def times_s(step: Callable[[], object], iterations: int) -> list[float]:
    """Return the time of each call of `step` in seconds, after a warm-up."""
    found = []
    for index in range(WARM_UP + iterations):
        begun_s = time.perf_counter()
        step()
        if index >= WARM_UP:
            found.append(time.perf_counter() - begun_s)
    return found


def median_s(step: Callable[[], object], iterations: int) -> float:
    """Return the median time of one call of `step` in seconds, after a warm-up."""
    return median(times_s(step, iterations))


def live(
    function: Callable[..., T], *args: object, kind: type[T] | Any = object, **settings: Any
) -> tuple[RunResult, list[T]]:
    """Run a training function in the workers of a run.

    Args:
        function: the training function.
        args: its arguments.
        kind: type of the value that the function returns, which travels as JSON.
        settings: arguments of `paceline.launch`. Without `run_dir`, the directory of the run is removed.

    Returns:
        The result of the run, and what the function has returned in each worker.
    """
    with TemporaryDirectory() as folder:
        settings = {"run_dir": Path(folder, "run"), "servers": 1, "progress": False, **settings}
        result = launch(_return, args=(function, args, folder), **settings)
        files = sorted(Path(folder).glob("returned-*"), key=lambda file: int(file.name.partition("-")[2]))
        return result, [msgspec.json.decode(file.read_bytes(), type=kind) for file in files]


def recorded(function: Callable[..., object], *args: object, **settings: Any) -> Cluster:
    """Run a training function as `live` does, and return the cluster that the run has recorded."""
    with TemporaryDirectory() as folder:
        run_dir = Path(folder, "recorded")
        live(function, *args, run_dir=run_dir, **settings)
        return Cluster.from_run(run_dir)


def _return(function: Callable[..., object], args: Sequence[object], folder: str) -> None:
    """Call a training function in a worker, and write down what it returns."""
    publish(Path(folder), f"returned-{worker_index()}", msgspec.json.encode(function(*args)))


def publish(folder: Path, name: str, content: bytes) -> None:
    """Write a file atomically: other processes see the file only when it is complete."""
    hidden = folder / f".{name}"
    hidden.write_bytes(content)
    hidden.rename(folder / name)


@contextlib.contextmanager
def program(
    *arguments: str,
    folder: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    errors: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program during the block, and end the program if it is still running afterwards.

    Args:
        arguments: arguments of Python.
        folder: current directory of the program. Default: the current directory of this process.
        env: environment variables in addition to those of this process.
        log: file that receives the output and errors of the program. Default: pipes.
        errors: file that receives the errors of the program. Default: `log`.
    """
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **(env or {})},
        stdout=log or subprocess.PIPE,
        stderr=errors or log or subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def require_success(name: str, process: subprocess.Popen[str], errors: str) -> None:
    """Raise `RunFailedError` if a program has failed."""
    if process.returncode:
        raise RunFailedError(name, f"exit code {process.returncode}", errors)


def busy_share(seconds: float = LOOK_S) -> float:
    """Sleep, and return which share of all cores is in use meanwhile; 0 if this share is unknown."""
    try:
        before = _ticks()
        time.sleep(seconds)
        idle, total = (after - each for after, each in zip(_ticks(), before, strict=True))
    except OSError:
        return 0.0
    return 1 - idle / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """Return the idle time and the whole time of all cores since the system has started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


# -- benchmarks as commands --------------------------------------------------------------------------------------


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """Declares, as a decorator, that a function is a benchmark. The function's docstring is the help of its command."""

    minutes: float  # approximate duration of the benchmark on two cores
    quick: Mapping[str, object]  # arguments with which the function takes only seconds
    # Draws the results. The command has the option `--picture`.
    picture: Callable[[list[Figures[Any]]], Figure] | None = None
    notes: Sequence[str] = ()  # remarks on how to read the results
    # Receives all options, and raises an error, before anything starts, if the options are not valid.
    require: Callable[..., None] = lambda **given: None

    def __call__(self, measure: Measure) -> Measure:
        measure.declared = self  # type: ignore[attr-defined]
        return measure


def command_of(name: str, measure: Callable[..., list[Figures[Any]]]) -> Callable[..., None]:
    """Return the function of a command: it reads its options, measures, and prints the results."""
    declared: Benchmark = measure.declared  # type: ignore[attr-defined]
    hints = get_type_hints(measure, include_extras=True)
    options = {
        each.name: each
        for each in inspect.signature(measure).parameters.values()
        if get_args(hints[each.name])[1:]
    }

    def run(
        as_json: bool, quick: bool, against: str | None, picture: Path | None = None, **given: Any
    ) -> None:
        if against is not None:
            options_given = sys.argv[sys.argv.index(name) + 1 :]
            _show(_compared(name, options_given, against), as_json=as_json, conditions={})
            return
        if picture is not None:
            _require_drawing(picture)
        chosen = {key: value for key, value in given.items() if not (quick and key in declared.quick)}
        if quick:
            given = {**given, **declared.quick}
        declared.require(picture=picture, **given)
        console = Console(stderr=True)
        takes = f"about {declared.minutes:.0f} min on two cores"
        console.print(f"This takes {'a minute or less' if quick or declared.minutes < 1 else takes}.")
        if (busy := busy_share()) > QUIET:
            console.print(
                f"warning: other programs use {busy:.0%} of this machine's cores. All times and "
                "ratios may be wrong. Measure on an idle machine."
            )
        with interruptible(NOTHING_LEFT), shown_progress(console) as tell:
            found = measure(tell, **given)
        conditions = {"benchmark": name, "options": chosen, "quick": quick, "version": paceline.__version__}
        conditions |= {"cores": os.cpu_count(), "busy_share": round(busy, 3)}
        _show(found, as_json=as_json, conditions=conditions, notes=declared.notes)
        if picture is not None and declared.picture is not None:
            from paceline.look.timelines import save

            save(declared.picture(found), picture)

    parameters = [
        _option("as_json", AsJson, False),
        _option("quick", Quick, False),
        _option("against", Against, None),
        *([_option("picture", Picture, None)] if declared.picture is not None else []),
        *(_option(key, _as_parsed(hints[key]), option.default) for key, option in options.items()),
    ]
    run.__doc__ = f"{inspect.getdoc(measure)}\n\nTakes about {_time_text(declared.minutes)}."
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


Quick = Annotated[
    bool, typer.Option("--quick", help="Measure something small: this shows only that the benchmark works.")
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="COMMIT",
        help=f"Compare with another commit: both are measured {PAIRS} times, in turn.",
        show_default=False,
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture", metavar="PATH", help="Also draw the results as this PNG file.", show_default=False
    ),
]


def _option(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def _as_parsed(annotation: Any) -> Any:
    """Hide an option's type from typer if the option has a parser: typer would read a sequence in its own way."""
    kind, option = get_args(annotation)[:2]
    return Annotated[Any, option] if option.parser is not None else Annotated[kind, option]


def _time_text(minutes: float) -> str:
    """
    >>> _time_text(0.2), _time_text(1), _time_text(8)
    ('a few seconds', 'a minute', '8 minutes')
    """
    return "a few seconds" if minutes < 1 else "a minute" if minutes == 1 else f"{minutes:g} minutes"


def _require_drawing(path: Path) -> None:
    """Raise `ConfigurationError` now, before anything starts, if a picture cannot be saved."""
    from paceline.look.timelines import new_figure

    new_figure(1.0, 1.0)
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"cannot save the picture as {str(path)!r}: the folder does not exist. Create it first."
        )


def _show(
    found: Sequence[Figures[Any]],
    *,
    as_json: bool,
    conditions: Mapping[str, object],
    notes: Sequence[str] = (),
) -> None:
    """Print results as JSON lines or as tables."""
    if as_json:
        shown = {id(row): row for figures in found for row in figures.rows}  # a row may be in two tables
        for row in (conditions, *shown.values()):
            print(msgspec.json.encode(row).decode(), flush=True)
        return
    console = Console()
    for figures in found:
        if figures.rows:
            console.print(figures.table(), "")
    for note in notes:
        console.print(f"- {note}", highlight=False, markup=False)


# -- another commit ----------------------------------------------------------------------------------------------


class Compared(msgspec.Struct, frozen=True):
    """A number that was measured with both commits: its median for each commit, and its ratio in each pair of runs."""

    what: str
    before: float
    now: float
    ratio: float
    low: float
    high: float


def _compared(name: str, options: Sequence[str], commit: str) -> list[Figures[Compared]]:
    """Run a benchmark in this checkout and in a checkout of another commit, in turn, and compare all numbers."""
    kept = [each for each in _without(options, "--against") if each != "--json"]
    with TemporaryDirectory() as folder:
        other = Path(folder, "other")
        git = ["git", "-C", str(ROOT), "worktree"]
        added = subprocess.run(
            [*git, "add", "--detach", str(other), commit], capture_output=True, text=True, check=False
        )
        if added.returncode:
            raise ConfigurationError(f"there is no checkout of {commit!r}: {added.stderr.strip()}")
        try:
            pairs = [[_numbers_of(root, name, kept) for root in (other, ROOT)] for _ in range(PAIRS)]
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    rows = []
    for what in pairs[0][0]:
        both = [(before[what], now[what]) for before, now in pairs if what in before and what in now]
        if both and all(before for before, _ in both):
            before, now = (median(column) for column in zip(*both, strict=True))
            rows.append(Compared(what, before, now, *spread(each / its for its, each in both)))
    columns: Columns[Compared] = {
        "what": lambda row: row.what,
        commit: lambda row: f"{row.before:.4g}",
        "now": lambda row: f"{row.now:.4g}",
        "ratio": lambda row: f"{row.ratio:.3f}",
        "low - high": lambda row: f"{row.low:.3f} - {row.high:.3f}",
    }
    return [
        Figures(
            f"{name}: now, compared with {commit}", rows, columns, f"medians over {PAIRS} runs of each commit"
        )
    ]


def _without(options: Sequence[str], name: str) -> list[str]:
    """Return the options without the option `name` and its value.

    >>> _without(["--rounds", "3", "--against", "main", "--quick"], "--against")
    ['--rounds', '3', '--quick']
    >>> _without(["--against=main"], "--against")
    []
    """
    text = "\0".join(options)
    return [each for each in re.sub(rf"(^|\0){name}(=|\0)[^\0]*", r"\1", text).split("\0") if each]


def _numbers_of(root: Path, name: str, options: Sequence[str]) -> dict[str, float]:
    """Run a benchmark in a checkout, and return what it has measured."""
    command = [sys.executable, "-m", "benchmarks", name, *options, "--json"]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunFailedError(name, f"exit code {done.returncode} in {root}")
    return numbers_in(done.stdout)


def numbers_in(text: str) -> dict[str, float]:
    """Return all numbers with a fraction in JSON values. A number's name consists of the keys and values around it.

    >>> numbers_in('[{"sync": "bsp", "workers": 2, "median_us": 3.5}]\\n{"rounds": 3}')
    {'bsp 2 median_us': 3.5}
    >>> numbers_in('{"sync": "bsp", "median_us": {"10": 3.5}}')
    {'bsp median_us 10': 3.5}
    """
    found: dict[str, float] = {}

    def walk(value: object, name: str) -> None:
        if isinstance(value, dict):
            own = " ".join(str(each) for each in value.values() if isinstance(each, str | int))
            for key, each in value.items():
                walk(each, " ".join(filter(None, (name, own, key))))
        elif isinstance(value, list):
            for number, each in enumerate(value):
                walk(each, f"{name}[{number}]" if isinstance(each, float) else "")
        elif isinstance(value, float):
            found[name] = value

    decoder, place = json.JSONDecoder(), 0
    while text := text[place:].lstrip():
        value, place = decoder.raw_decode(text)
        if not (isinstance(value, dict) and "busy_share" in value):  # the conditions
            walk(value, "")
    return found
