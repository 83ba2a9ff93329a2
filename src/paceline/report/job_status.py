"""The state of a job as tables for the terminal: the view of `paceline status`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.job_status import JobStatus, LinkStatus, MachineStatus, WorkerStatus
from ..launcher.progress import COLORS, counted

__all__ = ["status_view"]

UNKNOWN = "-"


def status_view(status: JobStatus) -> RenderableType:
    """Return the tables of workers, machines and links. Empty tables are left out."""
    counts = f"{counted(len(status.workers), 'worker')}, {counted(status.servers, 'server')}"
    pause = f", waits for others to join: {status.shortage}" if status.shortage else ""
    parts: list[RenderableType] = [Text(f"{status.sync}, {counts}, {status.elapsed_s:.0f} s{pause}")]
    parts.append(_workers(status.workers))
    if status.machines:
        parts.append(_machines(status.machines))
    if status.links:
        parts.append(_links(status.links))
    return Group(*parts)


def _workers(workers: tuple[WorkerStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (
        "worker",
        "machine",
        "state",
        "for",
        "iteration",
        "loss",
        "samples/s",
        "staleness",
        "waits for",
    ):
        right = name in ("for", "iteration", "loss", "samples/s", "staleness")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for worker in workers:
        table.add_row(
            str(worker.worker),
            Text(worker.machine),
            Text(worker.state, COLORS.get(worker.state, COLORS["waiting"])),
            _duration(worker.state_s),
            _number(worker.iteration, "d"),
            _number(worker.loss, ".4f"),
            _number(worker.samples_per_s, ".1f"),
            _number(worker.staleness, "d"),
            Text(_wait(worker)),
        )
    return table


def _machines(machines: tuple[MachineStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("machine")
    table.add_column("last heartbeat", justify="right")
    table.add_column("suspicion", justify="right")
    for machine in machines:
        table.add_row(Text(machine.machine), f"{machine.silent_s:.1f} s ago", f"{machine.suspicion:.1f}")
    return table


def _links(links: tuple[LinkStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("link")
    table.add_column("MB/s", justify="right")
    table.add_column("MB in total", justify="right")
    for link in links:
        rate = None if link.bytes_per_s is None else link.bytes_per_s / 1e6
        route = Text(f"{link.sender} -> {link.receiver}")
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
