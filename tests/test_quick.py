"""`make quick` runs the tests of pure code, and these start no process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.quick import LONG_FILES, QUICK, STARTS, forbid_processes, is_quick

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    "name",
    [
        *("sync/test_bsp.py", "sync/test_scripts.py", "zipline/test_methods.py", "core/test_layout.py"),
        *(
            "core/test_guard.py",
            "sim/test_sim.py",
            "trace/test_trace.py",
            "look/test_reading.py",
            "test_quick.py",
        ),
    ],
)
def test_pure_code_is_tested_quickly(name: str) -> None:
    assert is_quick(FOLDER / name)


@pytest.mark.parametrize(
    "name",
    [
        "sync/test_exhaustive.py",
        "start/test_live.py",
        "train/test_optim.py",
        "start/test_cut_off.py",
        "train/test_staging.py",
    ],
)
def test_what_trains_connects_or_takes_long_is_left_out(name: str) -> None:
    assert not is_quick(FOLDER / name)


def test_every_long_file_exists() -> None:
    assert set(LONG_FILES) <= {path.name for path in FOLDER.rglob("test_*.py")}


@pytest.mark.parametrize("event", STARTS)
def test_starting_a_process_is_refused_with_what_to_do(event: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"a test of `make quick` starts a process .*tests/support/quick\.py"
    ):
        forbid_processes(event, ())
    forbid_processes("open", ())


@pytest.mark.skipif(not QUICK, reason="only `make quick` forbids processes")
def test_no_test_starts_a_process() -> None:
    with pytest.raises(RuntimeError, match="starts a process"):
        os.system("true")
