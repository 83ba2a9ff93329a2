"""Functions that describe how a process ended, recognize crashes, and end what a failed process leaves behind.

When a machine is preempted, its processes are terminated by SIGKILL or SIGTERM, which Paceline is designed to handle.
A segmentation fault is a crash, and so is a SIGKILL from the system's out-of-memory killer. The run continues without
a crashed worker, but the exit code of the run reports the crash.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = [
    "CRASHES",
    "EXIT_INTERRUPTED",
    "EXIT_PEER_LOST",
    "await_group_leader",
    "describe_ending",
    "is_crash",
    "out_of_memory_kills",
]

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
"""Signals that the system sends to terminate a process because of an error in the process itself."""


EXIT_PEER_LOST = 75
"""Exit code of a worker that could not continue because another process of the run was lost."""


EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a worker whose script was ended by SIGINT, although it has caught the `KeyboardInterrupt`."""


def describe_ending(exit_code: int, *, out_of_memory: bool = False) -> str:
    """Return a description of how a process ended.

    Args:
        exit_code: exit code of the process, or the negated signal number if a signal terminated the process.
        out_of_memory: True if, while the process was running, the system ran out of memory and killed some process.

    >>> describe_ending(3), describe_ending(-11)
    ('it ended with exit code 3', 'it was terminated by signal SIGSEGV')
    """
    if exit_code == EXIT_PEER_LOST:
        return f"it lost its connection to another process of the run (exit code {exit_code})"
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    number = -exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:
        # Real-time signals have no name.
        name = str(number)
    if out_of_memory and number == signal.SIGKILL:
        return f"it was terminated by signal {name}, probably because the system ran out of memory"
    return f"it was terminated by signal {name}"


def is_crash(exit_code: int, *, out_of_memory: bool = False) -> bool:
    """Return True if a process was terminated by a signal in `CRASHES`, or because the system ran out of memory."""
    return -exit_code in CRASHES or (out_of_memory and exit_code == -signal.SIGKILL)


def out_of_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return the number of processes that the system has killed since boot because it ran out of memory.

    Return 0 if the system does not report this number.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def await_group_leader(process_id: int) -> None:
    """Wait until a child process has ended. If it failed or was killed, kill the rest of its process group.

    The child is not reaped here, because the id of its group may be reused as soon as it is.

    Raises:
        ChildProcessError: another part of the program has already reaped the child.
    """
    end = os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
    if end is not None and (end.si_code, end.si_status) != (os.CLD_EXITED, 0):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process_id, signal.SIGKILL)
