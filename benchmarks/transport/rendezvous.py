"""Barriers and published results for the processes of a turn, based on files in a shared directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import DeadlineError

__all__ = ["await_until", "meet", "publish"]

MEETING_TIMEOUT_S = 120.0
MEETING_INTERVAL_S = 0.0005


def publish(out: Path, name: str, text: str) -> None:
    """Write a file atomically: other processes see the file only when it is complete."""
    hidden = out / f".{name}"
    hidden.write_text(text)
    hidden.rename(out / name)


def meet(out: Path, name: str, index: int, count: int) -> None:
    """Wait until `count` workers have called this function with the same name. `index` is the caller's index."""
    Path(out, f"{name}-{index}").touch()
    paths = [Path(out, f"{name}-{other}") for other in range(count)]
    await_until(lambda: all(path.exists() for path in paths), f"{count} workers to reach {name!r}")


def await_until(arrived: Callable[[], bool], what: str) -> None:
    """Poll until `arrived()` returns True. The error message contains `what`, a description of this condition.

    Raises:
        DeadlineError: `arrived()` still returns False after `MEETING_TIMEOUT_S` seconds.
    """
    deadline_s = time.monotonic() + MEETING_TIMEOUT_S
    while not arrived():
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"waited {MEETING_TIMEOUT_S:g} s for {what}")
        time.sleep(MEETING_INTERVAL_S)
