"""Sentences about the state of a job: how far it has come, how fast it goes on, and for whom it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..core.status.job_status import JobStatus
from .words import counted, duration, named_workers, rough_duration

__all__ = [
    "GONE",
    "awaited_words",
    "figures",
    "loss_name",
    "progress_line",
    "progress_words",
    "state_counts",
    "title",
]

FEW_WORKERS = 8
"""Number of workers up to which the line of progress says nothing about states that each iteration passes through."""

ORDINARY = frozenset({"computing", "waiting", "pulling"})
"""The states through which a worker passes in each iteration."""

GONE = frozenset({"finished", "left", "lost"})
"""The states of workers that take no part in the run any more."""


def title(status: JobStatus, most: int | None = None) -> str:
    """Return the sync model, the numbers of workers and servers, the time and what is unusual about the run.

    Args:
        status: the state of the job.
        most: number of workers that the run may have, if it may have more than it has.
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
    """Return how many workers are in each state, the most frequent one first.

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
    """Return how the losses of a job are called: the script may have logged none, so that they are guessed."""
    return "loss (guessed)" if any(worker.guessed for worker in status.workers) else "loss"


def awaited_words(status: JobStatus) -> str:
    """Return for whom the others wait, and for how long; "" if nobody is awaited.

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
        # A run that is not over is never shown as such.
        done = f"{min(int(100 * status.progress), 99 if status.left_s else 100)} %"
        return f"{done} ({epoch})" if epoch else done
    return epoch if status.epoch_progress is None else f"{epoch} ({int(100 * status.epoch_progress)} % of it)"


def _of_several(state: str, count: int) -> str:
    state = state.replace("waits in", "waiting in")
    return state.replace(" its ", " their ") if count > 1 else state
