"""A pool of processes for independent computations on all cores. The processes exit when their parent exits.

Each process receives one task at a time. So if a process ends unexpectedly, only the task that it was carrying
out fails. Another process takes the place of the ended process, and the other tasks are not affected.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from ..errors import ConfigurationError, PacelineError, RunFailedError, first_line
from ..run.compute_devices import usable_cores
from ..start.processes.program import end_with_parent
from ..sync.plugins import imported_modules, load_models

CONTEXT = multiprocessing.get_context("spawn")
"""The start method of the processes: they do not inherit what this process has changed in its memory."""

Task = TypeVar("Task")
Result = TypeVar("Result")

TellCount = Callable[[int, int, str], None]
"""Progress callback. Arguments: number of finished tasks, number of tasks, name of the task that just finished."""

ENDED = "it ended without an error message; perhaps it was killed, ran out of memory, or called os._exit()"
"""The description of a process that has ended without a result."""


class EndedTask(NamedTuple, Generic[Result]):
    """A task that has ended.

    Attributes:
        number: position of the task.
        result: the result of the task; None if the task has failed.
        error: the exception that the task has raised; None if the task has a result. Exceptions that are not
            Paceline's own have a note with the traceback.
    """

    number: int
    result: Result | None
    error: BaseException | None


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
    results: dict[int, Any] = {}
    with ProcessPool(None, prepare, prepare_args) as pool:
        for ended in pool.ended(function, tasks, fresh=fresh):
            if ended.error is not None:
                raise ended.error
            results[ended.number] = ended.result
            tell(len(results), len(tasks), name_of(tasks[ended.number]))
    return [results[index] for index in range(len(tasks))]


class ProcessPool:
    """Processes that carry out tasks. This context manager ends all of them when it exits. See `on_all_cores`.

    Args:
        processes: number of processes. Default: one for each core that this process may use.
        prepare: importable function that every process calls first. If `prepare` fails, the first task of the process
            fails, too.
        prepare_args: arguments for `prepare`.
    """

    def __init__(
        self,
        processes: int | None = None,
        prepare: Callable[..., object] = tuple,
        prepare_args: tuple[Any, ...] = (),
    ) -> None:
        self._count = processes or usable_cores() or 1
        self._begin = (os.getpid(), imported_modules(), prepare, prepare_args)
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def ended(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, fresh: bool = False
    ) -> Iterator[EndedTask[Result]]:
        """Apply a function to each task. Yield each task when it has ended.

        The tasks begin in their order. If the iterator is closed, the processes that are at work are terminated.

        Args:
            function: function that processes one task.
            tasks: tasks to process.
            fresh: True to run each task in a new process.

        Raises:
            ConfigurationError: the function or a task cannot be sent to another process.
        """
        left = iter(range(len(tasks)))
        working: dict[Connection, _Worker] = {}

        def give(number: int) -> None:
            worker = self._idle.pop() if self._idle else _Worker(self._begin)
            working[worker.connection] = worker
            worker.give(number, function, tasks[number])

        try:
            for number in itertools.islice(left, self._count):
                give(number)
            while working:
                for connection in wait(list(working)):
                    assert isinstance(connection, Connection)
                    worker = working.pop(connection)
                    ended = worker.ended()
                    if fresh or worker.died:
                        worker.close()
                    else:
                        self._idle.append(worker)
                    if (following := next(left, None)) is not None:
                        give(following)
                    yield ended
        finally:
            for worker in working.values():  # the other results are no longer needed
                worker.process.terminate()
            for worker in working.values():
                worker.close()


class _Worker:
    """A process of the pool, as its parent sees it.

    Attributes:
        connection: the connection to the process.
        process: the process.
        died: True if the process has ended without a result.
    """

    def __init__(self, begin: tuple[Any, ...]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=_serve, args=(theirs, *begin))
        # A new process inherits the signal mask, so Ctrl-C does not end it while it starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self.died = False
        self._number = -1

    def give(self, number: int, function: Callable[[Any], object], task: object) -> None:
        """Give a task to the process.

        Raises:
            ConfigurationError: the function or the task cannot be sent to another process.
        """
        self._number = number
        try:
            # If the process has ended, `ended` notices this.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.connection.send((function, task))
        except Exception as error:  # pickling may raise any exception of the task's own methods
            raise _unsuitable("sent to", error) from error

    def ended(self) -> EndedTask[Any]:
        """Return the outcome of the task. Call this method only when the connection can be read."""
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError):  # an `OSError` if only a part of the outcome was sent
            self.died = True
            return EndedTask(self._number, None, RunFailedError("a process", ENDED))
        return EndedTask(self._number, result, error)

    def close(self) -> None:
        """Let the process end, and wait until it has ended."""
        self.connection.close()
        self.process.join()
        self.process.close()


def _serve(
    connection: Connection,
    parent: int,
    imports: Sequence[str],
    prepare: Callable[..., object],
    prepare_args: tuple[Any, ...],
) -> None:
    """Carry out tasks as a process of the pool, which ignores Ctrl-C and exits when its parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    prepared = False
    while True:
        try:
            content = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, task = _unpickled(content)
            if not prepared:
                load_models("", imports)
                prepare(*prepare_args)
                prepared = True
            outcome: tuple[object, BaseException | None] = function(task), None
        except BaseException as error:
            outcome = None, _sendable(error)
        try:
            connection.send(outcome)
        except Exception as error:  # the result cannot be pickled
            connection.send((None, _sendable(error)))


def _unpickled(content: bytes) -> tuple[Callable[[Any], object], object]:
    """Return the function and the task that the parent has sent.

    Raises:
        ConfigurationError: this process cannot restore the function or the task, for example because it does not find
            their classes.
    """
    try:
        function, task = pickle.loads(content)
    except Exception as error:  # unpickling may raise any exception of the task's own methods
        raise _unsuitable("read in", error) from error
    return function, task


def _unsuitable(done: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"a task cannot be {done} another process: {first_line(error)}. Define its functions and classes at the top "
        "level of a module, and not in a notebook or below `if __name__ == '__main__'`."
    )


def _sendable(error: BaseException) -> BaseException:
    """Return an exception with its traceback as a note. If the exception cannot be pickled, return its description."""
    if not isinstance(error, PacelineError):
        error.add_note(f"In a process of its own:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a user's exception may raise any other exception here
        return RunFailedError("a process", first_line(error), traceback.format_exc())
    return error


# -- Many independent tasks: in this process, in several processes, or on Ray, with an estimate of the time left
#
# Each result is kept as soon as its task has ended. A task that fails is named, and the other tasks go on.

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


class TaskPool(Protocol):
    """A function that carries out tasks, for example in a pool of processes."""

    def __call__(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
    ) -> Iterator[EndedTask[Any]]:
        """Apply a function to each task, and yield each task when it has ended.

        Args:
            function: function that carries out one task.
            tasks: the tasks.
            fresh: True if each task needs a new process.
        """


@contextlib.contextmanager
def in_processes(count: int | None, prepare: Callable[[], object] = tuple) -> Iterator[TaskPool]:
    """Return a context with a pool of processes on this machine.

    Args:
        count: number of processes; None for one on each core that this process may use.
        prepare: importable function that each process calls first.
    """
    with ProcessPool(count, prepare) as pool:
        yield pool.ended


def in_this_process(
    function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
) -> Iterator[EndedTask[Any]]:
    """Carry out tasks in this process, one after another. The first task that fails ends the work."""
    for number, task in enumerate(tasks):
        yield EndedTask(number, function(task), None)


def work_off(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    keep: Callable[[Task, Result], object],
    tell: Tell,
    *,
    pool: TaskPool,
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
        cost_of: function that returns the cost of a task, in any unit. The time left is estimated from these costs.
        fresh: True if each task needs a new process.
        done: number of tasks that had ended before this call.
        later: number of tasks that later calls will carry out.
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


# -- The runs of a study as tasks of a Ray cluster -----------------------------------------------------------
#
# Every node needs the same version of Paceline, and must find the modules of the study in the same folders as this
# program.


@contextlib.contextmanager
def on_ray(prepare: Callable[[], object] = tuple) -> Iterator[TaskPool]:
    """Return a context with a pool that carries out each task on one core of the Ray cluster.

    If this program is not connected to a cluster, it is connected inside the context.

    Args:
        prepare: importable function that is called before each task.

    Raises:
        ConfigurationError: ray is not installed.
    """
    from ..start.ray import import_ray  # importing torch takes seconds

    ray = import_ray()
    connected = ray.is_initialized()
    if not connected:
        ray.init()
    path = [os.path.abspath(folder) for folder in sys.path if folder]

    def carry_out(
        function: Callable[[Any], Any], tasks: Sequence[Any], *, fresh: bool = False
    ) -> Iterator[EndedTask[Any]]:
        once = ray.remote(num_cpus=1, max_retries=0, max_calls=1 if fresh else 0)(_carry_out)
        pending = {
            once.remote(function, task, prepare, path, imported_modules()): number
            for number, task in enumerate(tasks)
        }
        try:
            while pending:
                [ready], _ = ray.wait(list(pending), num_returns=1)
                number = pending.pop(ready)
                try:
                    yield EndedTask(number, ray.get(ready), None)
                except ray.exceptions.RayTaskError as error:
                    yield EndedTask(number, None, error.cause or error)
                except ray.exceptions.RayError as error:
                    yield EndedTask(number, None, error)
        finally:
            for each in pending:
                ray.cancel(each, force=True)

    try:
        yield carry_out
    finally:
        if not connected:
            ray.shutdown()


def _carry_out(
    function: Callable[[Any], Any],
    task: Any,
    prepare: Callable[[], object],
    path: Sequence[str],
    imports: Sequence[str],
) -> Any:
    sys.path += [folder for folder in path if folder not in sys.path]
    load_models("", imports)
    prepare()
    return function(task)
