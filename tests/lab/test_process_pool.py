"""The process pool: results in order, errors of tasks, and processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from paceline.errors import ConfigurationError
from paceline.lab.pool import EndedTask, ProcessPool, on_all_cores

PREPARED: list[int] = []


def prepare(number: int) -> None:
    PREPARED.append(number)


def add(number: int) -> int:
    if number == 13:
        raise ValueError("not thirteen")
    return number + sum(PREPARED)


def test_results_come_in_order_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    results = on_all_cores(
        add, [3, 1, 2], str, lambda done, of, what: told.append((done, of)), prepare, (10,)
    )
    assert results == [13, 11, 12]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_error_is_raised_as_it_was() -> None:
    with pytest.raises(ValueError, match="not thirteen"):
        on_all_cores(add, [1, 13, 2], str)


def test_no_process_outlives_a_parent_that_is_killed() -> None:
    program = """
        import os, sys, time
        sys.path[:] = {path!r}
        from paceline.lab.pool import EndedTask, ProcessPool, on_all_cores
        if __name__ == "__main__":
            on_all_cores(time.sleep, [600, 600], str, prepare=os.write, prepare_args=(1, b"ready\\n"))
    """
    script = textwrap.dedent(program).format(path=sys.path)
    parent = subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = subprocess.run(["pgrep", "-P", str(parent.pid)], capture_output=True, text=True).stdout.split()
    assert children
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline_s = time.monotonic() + 30.0
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < deadline_s, "a process outlived its parent"
        time.sleep(0.05)


def end_at_13(number: int) -> int:
    if number == 13:
        os._exit(3)
    return number


def send_a_part(connection: Connection, message: bytes) -> None:
    os.write(connection.fileno(), message[:-1])
    os._exit(3)


def end_while_sending_13(number: int) -> int:
    if number == 13:
        Connection._send = send_a_part  # type: ignore[attr-defined]
    return number


class Unpicklable(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


def fail(number: int) -> int:
    raise Unpicklable("one", "other")


def pid(_: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("function", [end_at_13, end_while_sending_13])
def test_a_process_that_ends_fails_its_own_task_only(function: Callable[[int], int]) -> None:
    with ProcessPool(2) as pool:
        ended: dict[int, EndedTask[int]] = {
            each.number: each for each in pool.ended(function, [1, 13, 2, 3, 4])
        }
    assert [ended[index].result for index in range(5)] == [1, None, 2, 3, 4]
    assert "ended without an error message" in str(ended[1].error)


def test_an_exception_that_cannot_be_pickled_is_told_in_words() -> None:
    with ProcessPool(1) as pool:
        [ended] = pool.ended(fail, [1])
    assert "Unpicklable: one" in str(ended.error)


def refuse() -> None:
    raise ValueError("not in this process")


class Unreadable:
    """A task that no other process can make."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return refuse, ()


def test_a_task_that_cannot_be_read_fails_alone_and_says_why() -> None:
    with ProcessPool(1) as pool:
        tasks: list[Any] = [0, Unreadable(), 0]
        ended = {each.number: each for each in pool.ended(pid, tasks)}
    assert "a task cannot be read in another process: ValueError: not in this process" in str(ended[1].error)
    assert ended[0].result == ended[2].result  # the process goes on


def test_a_task_that_cannot_be_sent_is_refused_and_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    tasks: list[Any] = [lambda: None]
    with ProcessPool(1) as pool, pytest.raises(ConfigurationError, match="cannot be sent to another process"):
        list(pool.ended(pid, tasks))
    assert set(multiprocessing.active_children()) <= before


def test_there_are_as_many_processes_as_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may allow only a few of the machine's cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5}, raising=False)
    with ProcessPool() as pool:
        assert len({ended.result for ended in pool.ended(pid, range(3))}) == 1


def test_processes_are_used_again_unless_each_task_needs_a_new_one() -> None:
    with ProcessPool(1) as pool:
        assert len({ended.result for ended in (*pool.ended(pid, range(3)), *pool.ended(pid, range(3)))}) == 1
        assert len({ended.result for ended in pool.ended(pid, range(2), fresh=True)}) == 2


def test_all_processes_end_if_the_rest_is_not_wanted() -> None:
    with ProcessPool(2) as pool:
        tasks = pool.ended(pid, range(20))
        first = next(tasks).result
        assert isinstance(tasks, Generator)
        tasks.close()
    assert not os.path.exists(f"/proc/{first}")
