"""A pool of processes for independent computations on all cores. The processes exit when their parent exits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ..errors import RunFailedError
from ..launcher.program import end_with_parent
from ..plugins import imported_modules, load_models

__all__ = ["TellCount", "on_all_cores"]

Task = TypeVar("Task")
Result = TypeVar("Result")

TellCount = Callable[[int, int, str], None]
"""Progress callback. Arguments: number of finished tasks, number of tasks, name of the task that just finished."""


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
    """Apply a function to each task in a pool of processes. Return the results in the order of the tasks.

    Args:
        function: function that processes one task. The function must be importable, and tasks and results must be
            picklable.
        tasks: tasks to process.
        name_of: function that returns the name of a task, for the progress callback.
        tell: progress callback.
        prepare: importable function that every process calls first. The default does nothing.
        prepare_args: arguments for `prepare`.
        fresh: True to run each task in a new process.

    Raises:
        RunFailedError: a process ended without returning a result.
    """
    tell(0, len(tasks), "")
    if not tasks:
        return []
    pool = ProcessPoolExecutor(
        min(len(tasks), os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), imported_modules(), prepare, prepare_args),
        max_tasks_per_child=1 if fresh else None,
    )
    try:
        futures = {pool.submit(function, task): task for task in tasks}
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()  # if the task failed, this raises its exception
            tell(done, len(tasks), name_of(futures[future]))
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise RunFailedError(
            "a process",
            "it ended without an error message; perhaps it was killed, ran out of memory, or called os._exit()",
        ) from error
    except BaseException:
        for process in list((pool._processes or {}).values()):  # the other results are no longer needed
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(
    parent: int, imports: Sequence[str], prepare: Callable[..., object], prepare_args: tuple[Any, ...]
) -> None:
    """Prepare a process in the pool, so that it ignores Ctrl-C and exits when its parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    load_models("", imports)
    prepare(*prepare_args)
