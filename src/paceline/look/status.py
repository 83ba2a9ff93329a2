"""The state of a job in the terminal: the view of `paceline status`, and the live table of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from ..core.status import HELD, JobStatus, LinkStatus, MachineStatus, WorkerStatus
from ..words import Sentence, counted, duration, named_workers, rough_duration
from .tables import Cell, Column, FittedTable

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

LONG_LINE = 1000  # number of characters; longer than any line
LEAST_ROWS = 3  # number of workers that are shown even if the terminal has too few lines
LEAST_REASON = 20  # minimum number of characters of a reason for waiting that are shown

MACHINE = Column("machine", rank=7, least=LONG_LINE)  # never shortened
DEVICE = Column("device", rank=3, least=6)
LOSS = Column("loss", "number", rank=6)
WORKER_COLUMNS = (
    Column("worker"),
    Column("state", least=19, reserved=12),
    Column("for", "number", rank=5),
    Column("iteration", "number", rank=8),
    LOSS,
    Column("samples/s", "number", rank=4),
    Column("staleness", "number", rank=1),
    Column("waits for", rank=2, least=LEAST_REASON, reserved=LEAST_REASON),
)
"""The columns of the table of workers. If there are several machines, a column with the machine is added."""


class StatusView:
    """The state of a job in a terminal: a few sentences, and tables of workers, machines and links.

    Sentences are wrapped between words. Tables have as many columns as there is room for, and tables without rows are
    left out.

    Args:
        status: the state of the job.
        most: maximum number of workers of the run, if the run has fewer now.
        notes: sentences that follow the first sentence.
        lines: number of lines to which the view is limited, if possible. If there are too many workers, those that
            are awaited, stopped, lost or slowest are shown, and the other workers are counted. None to show all
            workers.
        links: False to leave out the tables of machines and links.
    """

    def __init__(
        self,
        status: JobStatus,
        *,
        most: int | None = None,
        notes: Sequence[str] = (),
        lines: int | None = None,
        links: bool = True,
    ) -> None:
        self._status = status
        self._sentences = [title(status, most), *notes, *filter(None, [progress_words(status)])]
        self._lines = lines
        self._links = links

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        above = [Sentence(sentence) for sentence in self._sentences]
        below: list[RenderableType] = [Sentence(loss) for worker in status.workers if (loss := _loss(worker))]
        if status.machines and self._links:
            below.append(_machines(status.machines))
        if status.links and self._links:
            below.append(_links(status.links))
        shown, rest = status.workers, None
        if self._lines is not None:
            room = self._lines - _height((*above, *below), console, options) - 1  # one for the heading
            if room < len(shown):
                shown, rest = _divided(status, max(room - 1, LEAST_ROWS))
                # The sentence about the other workers may have several lines.
                shown, rest = _divided(status, max(room - _height([rest], console, options), LEAST_ROWS))
        yield from above
        if shown:
            yield _workers(status, shown)
        if rest is not None:
            yield rest
        yield from below


def _height(parts: Sequence[RenderableType], console: Console, options: ConsoleOptions) -> int:
    """Return the number of lines of some parts of the view."""
    return sum(len(console.render_lines(part, options, pad=False)) for part in parts)


def _divided(status: JobStatus, count: int) -> tuple[tuple[WorkerStatus, ...], Sentence]:
    """Return the most important workers, and a sentence that counts the other workers."""
    shown = _most_telling(status, count)
    named = {worker.worker for worker in shown}
    others = [worker.state for worker in status.workers if worker.worker not in named]
    return shown, Sentence(f"{counted(len(others), 'more worker')}: {state_counts(others)}")


def _most_telling(status: JobStatus, count: int) -> tuple[WorkerStatus, ...]:
    """Return at most `count` workers: first those that are awaited, then those that do not run, then the slowest."""

    def rank(worker: WorkerStatus) -> tuple[object, ...]:
        iteration = -1 if worker.iteration is None else worker.iteration
        unusual = worker.state in HELD.values() or worker.state == "lost"
        done = worker.state in GONE
        return worker.worker not in status.awaited, not unusual, done, iteration, -(worker.state_s or 0.0)

    telling = sorted(status.workers, key=rank)[:count]
    return tuple(sorted(telling, key=lambda worker: worker.worker))


def _workers(status: JobStatus, shown: Sequence[WorkerStatus]) -> FittedTable:
    """Return the table of the workers.

    The table has a column of machines only if there are several machines, and a column of devices only if there are
    accelerators.
    """
    several = bool(status.machines) or len({worker.machine for worker in status.workers}) > 1
    loss = LOSS._replace(name=loss_name(status))
    columns = [loss if column is LOSS else column for column in WORKER_COLUMNS]
    rows = [_cells(worker) for worker in shown]
    if any(worker.device for worker in status.workers):
        columns.insert(1, DEVICE)
        for row, worker in zip(rows, shown, strict=True):
            row.insert(1, (worker.device or UNKNOWN, ""))
    if several:
        columns.insert(1, MACHINE)
        for row, worker in zip(rows, shown, strict=True):
            row.insert(1, (worker.machine, ""))
    return FittedTable(columns, rows)


def _cells(worker: WorkerStatus) -> list[Cell]:
    """Return what the columns say about a worker, without its machine and its device."""
    return [
        (str(worker.worker), ""),
        (worker.state, COLORS.get(worker.state, COLORS["waiting"])),
        (UNKNOWN if worker.state_s is None else duration(worker.state_s), ""),
        (_number(worker.iteration, "d"), ""),
        (_number(worker.loss, ".4f"), ""),
        (_number(worker.samples_per_s, ",.1f"), ""),
        (_number(worker.staleness, "d"), ""),
        (_wait(worker), ""),
    ]


def _machines(machines: Sequence[MachineStatus]) -> FittedTable:
    columns = [Column("machine"), Column("last heartbeat", "number"), Column("suspicion", "number", rank=2)]
    if any(machine.servers for machine in machines):
        columns.append(Column("servers", rank=1))
    rows = [
        (
            (machine.machine, ""),
            (f"{machine.silent_s:.1f} s ago", ""),
            (f"{machine.suspicion:.1f}", ""),
            (", ".join(map(str, machine.servers)), ""),
        )[: len(columns)]
        for machine in machines
    ]
    return FittedTable(columns, rows)


def _links(links: Sequence[LinkStatus]) -> FittedTable:
    columns = [Column("link"), Column("MB/s", "number"), Column("MB in total", "number", rank=1)]
    rows = [
        [
            (f"{link.sender} -> {link.receiver}", ""),
            (_number(None if link.bytes_per_s is None else link.bytes_per_s / 1e6, ".2f"), ""),
            (_number(link.total_bytes / 1e6, ".1f"), ""),
        ]
        for link in links
    ]
    return FittedTable(columns, rows)


def _wait(worker: WorkerStatus) -> str:
    """Return what a worker waits for, and the workers that keep it waiting.

    >>> _wait(WorkerStatus(0, "", "waiting", waits_for="round 3", last=(1, 2)))
    'round 3; last: workers 1, 2'
    """
    return f"{worker.waits_for}; last: {named_workers(worker.last)}" if worker.last else worker.waits_for


def _loss(worker: WorkerStatus) -> str:
    """Return how often a worker was lost, and why it was lost last; "" if it was never lost.

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


# -- Sentences about the state of a job: how far it has come, how fast it goes on, and for whom it waits -----

FEW_WORKERS = 8
"""With at most this many workers, all in ordinary states, the line of progress does not count the states."""

ORDINARY = frozenset({"computing", "waiting", "pulling"})
"""The states through which a worker passes in each iteration."""

GONE = frozenset({"finished", "left", "lost"})
"""The states of workers that take no part in the run any more."""


def title(status: JobStatus, most: int | None = None) -> str:
    """Return the sync model, the numbers of workers and servers, the time and what is unusual about the run.

    Args:
        status: the state of the job.
        most: maximum number of workers of the run, if the run has fewer now.
    """
    present = sum(worker.state not in GONE for worker in status.workers)
    workers = f"{present} of {counted(most, 'worker')}" if most else counted(len(status.workers), "worker")
    servers = counted(status.servers, "server")
    pause = f", waits for others to join: {status.shortage}" if status.shortage else ""
    main = f", worker {status.main_worker} is the main worker" if status.main_worker > 0 else ""
    sync = f"{status.sync}, " if status.sync else ""
    return f"{sync}{workers}, {servers}, {rough_duration(status.elapsed_s)}{main}{pause}"


def progress_words(status: JobStatus) -> str:
    """Return how far the job has come, how fast it goes on, and for whom it waits; "" if nothing is known.

    >>> progress_words(
    ...     JobStatus("asp", 1, 5.0, (), progress=0.37, left_s=12, samples_per_s=1240, loss=0.31, epoch=4, epochs=10)
    ... )
    '37 % (epoch 4 of 10), 1,240 samples/s, loss 0.31, 12 s left'
    """
    return "; ".join(filter(None, [", ".join(figures(status)), awaited_words(status)]))


def progress_line(status: JobStatus, most: int | None = None) -> str:
    """Return the state of the job as one line, whose length does not depend on the number of workers.

    Args:
        status: the state of the job.
        most: see `title`.
    """
    states = {worker.state for worker in status.workers}
    counts = ""
    if len(status.workers) > FEW_WORKERS or states - ORDINARY:
        counts = state_counts(worker.state for worker in status.workers)
    parts = [", ".join(figures(status)), counts, awaited_words(status)]
    return f"{title(status, most)}: {'; '.join(filter(None, parts))}".removesuffix(": ")


def state_counts(states: Iterable[str]) -> str:
    """Return how many workers are in each state, the most frequent state first.

    >>> state_counts(["computing", "waits in barrier 1", "computing"])
    '2 computing, 1 waiting in barrier 1'
    """
    counts = sorted(Counter(states).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {_of_several(state, count)}" for state, count in counts)


def figures(status: JobStatus) -> list[str]:
    """Return how far the job has come and how fast it goes on, as far as it is known."""
    found = [_share(status)] if status.progress is not None or status.epoch is not None else []
    if status.samples_per_s is not None:
        speed = status.samples_per_s
        found.append(f"{speed:,.0f} samples/s" if speed >= 10 else f"{speed:.1f} samples/s")
    if status.loss is not None:
        found.append(f"{loss_name(status)} {status.loss:.3g}")
    if status.left_s is not None:
        found.append(f"{rough_duration(status.left_s)} left")
    return found


def loss_name(status: JobStatus) -> str:
    """Return the name for the losses of a job, which says whether the script has logged them or they were guessed."""
    return "loss (guessed)" if any(worker.guessed for worker in status.workers) else "loss"


def awaited_words(status: JobStatus) -> str:
    """Return which workers are awaited, and for how long; "" if no worker is awaited.

    >>> awaited_words(JobStatus("bsp", 1, 5.0, (), awaited=(3,), awaited_share=0.7))
    'waiting for worker 3 (70 % of the time)'
    >>> awaited_words(JobStatus("bsp", 1, 5.0, (), awaited=(3,), awaited_s=12.0))
    'waiting for worker 3 (for 12.0 s)'
    """
    if not status.awaited:
        return ""
    words = f"waiting for {named_workers(status.awaited)}"
    if status.awaited_s is not None:
        return f"{words} (for {duration(status.awaited_s)})"
    share = status.awaited_share
    return words if share is None else f"{words} ({100 * share:.0f} % of the time)"


def _share(status: JobStatus) -> str:
    """Return the part of the training that is done, or the epoch, if the length of the training is unknown."""
    of = f" of {status.epochs}" if status.epochs is not None else ""
    epoch = "" if status.epoch is None else f"epoch {status.epoch}{of}"
    if status.progress is not None:
        # A run that goes on is never shown as complete.
        done = f"{min(int(100 * status.progress), 99 if status.left_s else 100)} %"
        return f"{done} ({epoch})" if epoch else done
    return epoch if status.epoch_progress is None else f"{epoch} ({int(100 * status.epoch_progress)} % of it)"


def _of_several(state: str, count: int) -> str:
    state = state.replace("waits in", "waiting in")
    return state.replace(" its ", " their ") if count > 1 else state
