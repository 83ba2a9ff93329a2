"""Work that consists of many independent tasks: in this process, in several, or on Ray, with the time that is left.

Each result is kept as soon as its task has ended. A task that fails is named, and the others go on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ..rehearsal.process_pool import Ended, ProcessPool

__all__ = ["Failure", "Pool", "Tell", "in_processes", "in_this_process", "work_off"]

Task = TypeVar("Task")
Result = TypeVar("Result")


Tell = Callable[[str, float], object]
"""Progress callback. Arguments: what is done, and the fraction of the work that has been done, from 0 to 1."""


class Failure(NamedTuple):
    """A task that has failed.

    Attributes:
        name: name of the task.
        error: the exception.
    """

    name: str
    error: BaseException


class Pool(Protocol):
    """Where tasks are carried out."""

    def __call__(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
    ) -> Iterator[Ended[Any]]:
        """Apply a function to each task, and yield each task when it has ended.

        Args:
            function: function that carries out one task.
            tasks: the tasks.
            fresh: True if each task needs a new process.
        """
        ...


@contextlib.contextmanager
def in_processes(count: int | None, prepare: Callable[[], object] = tuple) -> Iterator[Pool]:
    """Return a context with a pool of processes on this machine.

    Args:
        count: number of processes; None for one on each core.
        prepare: importable function that each process calls first.
    """
    with ProcessPool(count, prepare) as pool:
        yield pool.ended


def in_this_process(
    function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
) -> Iterator[Ended[Any]]:
    """Carry out tasks in this process, one after another. The first one that fails ends them."""
    for number, task in enumerate(tasks):
        yield Ended(number, function(task), None)


def work_off(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    keep: Callable[[Task, Result], object],
    tell: Tell,
    *,
    pool: Pool,
    name_of: Callable[[Task], str] = str,
    cost_of: Callable[[Task], float] = lambda task: 1.0,
    fresh: bool = False,
    done: int = 0,
    later: int = 0,
) -> list[Failure]:
    """Carry out tasks, keep their results, and return those that have failed, in the order of the tasks.

    Args:
        function: function that carries out one task.
        tasks: the tasks.
        keep: called with each task that has ended and its result.
        tell: progress callback.
        pool: where the tasks are carried out.
        name_of: function that returns the name of a task.
        cost_of: function that returns the cost of a task in any unit, from which the time left is estimated.
        fresh: True if each task needs a new process.
        done: number of tasks that had ended before.
        later: number of tasks that follow in other calls.
    """
    failures: dict[int, Failure] = {}
    costs = [cost_of(task) for task in tasks]
    paid, begun_s = 0.0, time.monotonic()
    of = done + len(tasks) + later
    total = sum(costs) * (1 + later / max(1, len(tasks)))
    for count, ended in enumerate(pool(function, tasks, fresh=fresh), start=1):
        task = tasks[ended.number]
        if ended.error is None:
            keep(task, ended.result)  # type: ignore[arg-type]
        else:
            failures[ended.number] = Failure(name_of(task), ended.error)
        paid += costs[ended.number]
        left_s = (time.monotonic() - begun_s) / paid * (total - paid) if paid else 0.0
        tell(f"{done + count} of {of}, {_left(left_s)}: {name_of(task)}", (done + count) / of)
    return [failures[number] for number in sorted(failures)]


def _left(seconds: float) -> str:
    """Return how much time is left, in words.

    >>> _left(40.0), _left(600.0)
    ('less than a minute left', 'about 10 min left')
    """
    return "less than a minute left" if seconds < 60 else f"about {seconds / 60:.0f} min left"
