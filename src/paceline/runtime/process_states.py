"""The states of processes as the kernel reports them, for the heartbeats of an agent.

A process is named by its id and its start time. The kernel may give the id of a process that has ended to a new one;
the start time, which is read together with the state, tells the two apart.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["RunningProcess", "State"]

State = Literal["running", "stopped", "traced", "gone"]
"""The state of a process: "stopped" by a signal, "traced" if a debugger has stopped it, or "gone" if it has ended."""

STATES: dict[str, State] = {"T": "stopped", "t": "traced", "Z": "gone", "X": "gone", "x": "gone"}
"""The states that the kernel names with these letters. All others are kinds of running or sleeping."""

START_TIME = 22 - 3  # index of the start time in the fields of /proc/PID/stat that follow the name


class RunningProcess(msgspec.Struct, frozen=True):
    """A process that was running when this object was made.

    Attributes:
        process_id: the id of the process.
        started: its start time, in units of the kernel since the machine was booted.

    Example:
        >>> import os
        >>> RunningProcess.of(os.getpid()).state()
        'running'
    """

    process_id: int
    started: int

    @classmethod
    def of(cls, process_id: int) -> RunningProcess | None:
        """Return the process that has this id now; None if there is none.

        The caller must know which process that is, for example because it is a child that has not been reaped.
        """
        fields = _fields(process_id)
        return None if fields is None else cls(process_id, int(fields[START_TIME]))

    @classmethod
    def this(cls) -> RunningProcess:
        """Return this process. In /proc, it may have another id, which belongs to another process namespace."""
        fields = _fields("self")
        assert fields is not None
        return cls(os.getpid(), int(fields[START_TIME]))

    def state(self) -> State:
        """Return the state of the process. A process that has ended but has not been reaped is "gone".

        The state is that of its main thread: signals and debuggers stop all threads of a process.
        """
        fields = _fields(self.process_id)
        if fields is None or int(fields[START_TIME]) != self.started:
            return "gone"
        return STATES.get(fields[0], "running")


def _fields(process_id: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces; None if there is no process."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
