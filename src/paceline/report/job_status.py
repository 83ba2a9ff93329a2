"""The state of a job as tables for the terminal: the view of `paceline status`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..core.job_status import JobStatus, LinkStatus, MachineStatus, WorkerStatus
from .words import counted

__all__ = ["COLORS", "LONG_LINE", "status_view"]

UNKNOWN = "-"

COLORS = {
    "computing": "green",
    "waiting": "yellow",
    "pulling": "cyan",
    "starting": "dim",
    "before its first forward pass": "dim",
    "waiting for the others to start": "yellow",
    "paused": "yellow",
    "finished": "blue",
    "left": "blue",
    "lost": "red",
    "stopped by a signal": "red",
    "held by a debugger": "magenta",
}
"""State of a worker -> its color. Any other state is a call in which the worker waits."""


def status_view(status: JobStatus) -> RenderableType:
    """Return the tables of workers, machines and links. Empty tables are left out.

    No line is longer than the console is wide: less important columns are left out, and long texts are cut.
    """
    counts = f"{counted(len(status.workers), 'worker')}, {counted(status.servers, 'server')}"
    pause = f", waits for others to join: {status.shortage}" if status.shortage else ""
    main = f", worker {status.main_worker} is the main worker" if status.main_worker > 0 else ""
    title = f"{status.sync}, {counts}, {status.elapsed_s:.0f} s{main}{pause}"
    parts: list[RenderableType] = [_cut(title)]
    parts.append(WorkerTable(status.workers))
    parts += [_cut(loss) for worker in status.workers if (loss := _loss(worker))]
    if status.machines:
        parts.append(_machines(status.machines))
    if status.links:
        parts.append(_links(status.links))
    return Group(*parts)


class WorkerTable:
    """The table of the workers, with as many columns as the console has room for."""

    def __init__(self, workers: tuple[WorkerStatus, ...]) -> None:
        self._workers = workers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = dict(COLUMNS)
        for name in EXPENDABLE:
            if self._least_width(columns, console, options) <= options.max_width:
                break
            del columns[name]
        yield self._table(columns)

    def _least_width(self, columns: Mapping[str, Column], console: Console, options: ConsoleOptions) -> int:
        """Return the width of a table in which no more than the reasons for waiting are cut."""
        table = self._table({name: column for name, column in columns.items() if name != "waits for"})
        reasons = (min(len(_wait(worker)), LEAST_REASON) for worker in self._workers)
        least = max([len("waits for"), *reasons])
        return table.__rich_measure__(console, options.update(width=LONG_LINE)).maximum + least

    def _table(self, columns: Mapping[str, Column]) -> Table:
        table = _table([(name, number) for name, (number, _) in columns.items()])
        for worker in self._workers:
            table.add_row(*(text(worker) for _, text in columns.values()))
        return table


Column = tuple[bool, Callable[[WorkerStatus], str | Text]]
"""True for a column of numbers, which are never cut, and the function that returns what it says about a worker."""


def _cut(text: str, style: str = "") -> Text:
    """Return a text that is cut if there is too little room for it."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


COLUMNS: dict[str, Column] = {
    "worker": (False, lambda worker: str(worker.worker)),
    "machine": (False, lambda worker: _cut(worker.machine)),
    "state": (False, lambda worker: _cut(worker.state, COLORS.get(worker.state, COLORS["waiting"]))),
    "for": (True, lambda worker: _duration(worker.state_s)),
    "iteration": (True, lambda worker: _number(worker.iteration, "d")),
    "loss": (True, lambda worker: _number(worker.loss, ".4f")),
    "samples/s": (True, lambda worker: _number(worker.samples_per_s, ".1f")),
    "staleness": (True, lambda worker: _number(worker.staleness, "d")),
    "waits for": (False, lambda worker: _cut(_wait(worker))),
}
EXPENDABLE = ("staleness", "samples/s", "loss")  # the columns that are left out, the first one first
LEAST_REASON = 20  # number of characters of a reason for waiting that are shown at least
LONG_LINE = 1000  # number of characters; longer than any line


def _table(columns: Sequence[tuple[str, bool]]) -> Table:
    """Return an empty table. The second part of a column is True if it contains numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, number in columns:
        table.add_column(_cut(name), justify="right" if number else "left", no_wrap=number)
    return table


def _machines(machines: tuple[MachineStatus, ...]) -> Table:
    bring = any(machine.servers for machine in machines)
    columns = [("machine", False), ("last heartbeat", True), ("suspicion", True)]
    table = _table([*columns, ("servers", False)] if bring else columns)
    for machine in machines:
        servers = [_cut(", ".join(map(str, machine.servers)))] if bring else []
        heard, suspicion = f"{machine.silent_s:.1f} s ago", f"{machine.suspicion:.1f}"
        table.add_row(_cut(machine.machine), heard, suspicion, *servers)
    return table


def _links(links: tuple[LinkStatus, ...]) -> Table:
    table = _table([("link", False), ("MB/s", True), ("MB in total", True)])
    for link in links:
        rate = None if link.bytes_per_s is None else link.bytes_per_s / 1e6
        route = _cut(f"{link.sender} -> {link.receiver}")
        table.add_row(route, _number(rate, ".2f"), _number(link.total_bytes / 1e6, ".1f"))
    return table


def _wait(worker: WorkerStatus) -> str:
    """Return what a worker waits for, and the workers that keep it waiting.

    >>> _wait(WorkerStatus(0, "", "waiting", waits_for="round 3", last=(1, 2)))
    'round 3; last: workers 1, 2'
    """
    if not worker.last:
        return worker.waits_for
    workers = f"worker{'s' * (len(worker.last) > 1)} {', '.join(map(str, worker.last))}"
    return f"{worker.waits_for}; last: {workers}"


def _loss(worker: WorkerStatus) -> str:
    """Return how often a worker was lost, and why the last time; "" if it never was.

    >>> _loss(WorkerStatus(1, "", "computing", losses=("it was stopped", "its connection ended")))
    'worker 1 was lost 2 times, and joined again; the last time: its connection ended'
    """
    if not worker.losses:
        return ""
    often = f" {len(worker.losses)} times" if len(worker.losses) > 1 else ""
    again = "" if worker.state == "lost" else ", and joined again"
    last = "; the last time" if often else ""
    return f"worker {worker.worker} was lost{often}{again}{last}: {worker.losses[-1]}"


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    """Return a duration with two units at most.

    >>> _duration(0.84), _duration(75), _duration(7260), _duration(None)
    ('0.8 s', '1 min 15 s', '2 h 1 min', '-')
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    return f"{minutes} min {rest_s} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
