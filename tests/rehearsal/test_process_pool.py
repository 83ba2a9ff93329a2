"""The process pool: results in order, errors of tasks, and processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from paceline.rehearsal.process_pool import on_all_cores

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
        from paceline.rehearsal.process_pool import on_all_cores
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
