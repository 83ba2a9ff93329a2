"""Many independent computations on all cores, in processes that end when this one does."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ..errors import RunFailedError
from ..launcher.boot import end_with_parent

__all__ = ["TellCount", "on_all_cores"]

Task = TypeVar("Task")
Result = TypeVar("Result")

TellCount = Callable[[int, int, str], None]
"""(how many are done, of how many, which was the last)."""


def on_all_cores(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    name_of: Callable[[Task], str],
    tell: TellCount = lambda done, of, what: None,
    prepare: Callable[..., object] = tuple,
    prepare_args: tuple[Any, ...] = (),
    *,
    fresh: bool = False,
) -> list[Result]:
    """The results of all tasks, in order.

    Args:
        function: what is done with each; importable, as tasks and results are picklable.
        tasks: what for.
        name_of: what a task is called in the progress.
        tell: hears of the progress.
        prepare: is called first in every process; importable. By default nothing comes of it.
        prepare_args: what with.
        fresh: every task gets a process that has done nothing before.

    Raises:
        RunFailedError: a process ended without a word.
    """
    tell(0, len(tasks), "")
    if not tasks:
        return []
    pool = ProcessPoolExecutor(
        min(len(tasks), os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), prepare, prepare_args),
        max_tasks_per_child=1 if fresh else None,
    )
    try:
        futures = {pool.submit(function, task): task for task in tasks}
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()  # raises what the task raised
            tell(done, len(tasks), name_of(futures[future]))
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise RunFailedError(
            "a process",
            "it ended without a word: it was killed, or had too little memory, or called os._exit()",
        ) from error
    except BaseException:
        for process in list((pool._processes or {}).values()):  # what they compute is of no use any more
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int, prepare: Callable[..., object], prepare_args: tuple[Any, ...]) -> None:
    """Tie this process's life to its parent's, which also hears Ctrl-C for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    prepare(*prepare_args)
