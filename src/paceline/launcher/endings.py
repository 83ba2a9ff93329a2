"""How a process came to its end, in words, and whether that was a crash.

A machine that is taken away ends a process by SIGKILL or SIGTERM, which is what Paceline is made for. A segmentation
fault is not that, and neither is the system's out-of-memory killer, which also sends SIGKILL: the run goes on without
such a worker, but says so with its exit code.
"""

from __future__ import annotations

import signal
from pathlib import Path

__all__ = ["CRASHES", "EXIT_PEER_LOST", "describe_ending", "is_crash", "out_of_memory_kills"]

CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""Signals by which the system ends a process for what the process itself has done."""


EXIT_PEER_LOST = 75
"""Exit code of a worker that could not go on because another process of the run was gone."""


def describe_ending(exit_code: int, *, out_of_memory: bool = False) -> str:
    """Say how a process ended, in words that follow its name.

    Args:
        exit_code: negative if a signal ended it.
        out_of_memory: True if the system has killed a process meanwhile because it ran out of memory.

    >>> describe_ending(3), describe_ending(-11)
    ('it ended with exit code 3', 'it was ended by signal SIGSEGV')
    """
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    number = -exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = str(number)
    if out_of_memory and number == signal.SIGKILL:
        return f"it was ended by signal {name}, and the system has run out of memory and killed a process meanwhile"
    return f"it was ended by signal {name}"


def is_crash(exit_code: int, *, out_of_memory: bool = False) -> bool:
    """True if a process ended by its own doing, and not because somebody took its machine away."""
    return -exit_code in CRASHES or (out_of_memory and exit_code == -signal.SIGKILL)


def out_of_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the system has killed since it was booted because it ran out of memory.

    0 where it does not say.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
