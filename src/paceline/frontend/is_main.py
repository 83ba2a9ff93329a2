"""`is_main`: whether this worker writes files and messages for the whole run, and in which directory.

Another worker becomes the main worker when the earlier one is lost (see `core.machines.main_worker`). A script that
asks several times in an epoch, for example before and after an evaluation, relies on the same answer. So the answer
changes only when an epoch begins.

The workers may have different working directories, on different machines. Relative paths of files are meant in that
of the first main worker, on machines that have this directory.
"""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

from ..core.protocol.messages import LONGEST_PATH, WorkingDirectory
from .session import Session, current

__all__ = ["has_directory", "is_main", "update_main", "working_directory"]


def is_main() -> bool:
    """Return True in the worker that writes files and messages for the whole run.

    This is worker 0 at first. If it is lost, or leaves before its script has ended, the worker with the lowest index
    of those that take part takes its place, and keeps it even if worker 0 joins again. In a loop over `epochs`, the
    result changes only when an epoch begins or the loop ends; outside of such a loop, when a pass over a distributed
    loader begins. So do not store it for longer. For what must not move to another worker, a script asks for
    `worker_index() == 0`. Outside a run, the result is True.

    Example:
        >>> import paceline
        >>> if paceline.is_main():
        ...     print("epoch 1")
        epoch 1
    """
    session = current()
    return session is None or _main.get(session, session.main_worker) == session.worker


def update_main(session: Session) -> None:
    """Let `is_main` return what this worker has been told, and the same until the next call."""
    _main[session] = session.main_worker


_main: WeakKeyDictionary[Session, int] = WeakKeyDictionary()


def working_directory() -> WorkingDirectory | None:
    """Return the working directory of this process; None if it has been removed, or has a path that is no text.

    Example:
        >>> here = working_directory()
        >>> here is not None and has_directory(here)
        True
    """
    try:
        path = os.getcwd()
        path.encode()
        number = _number_of(path)
    except (OSError, UnicodeEncodeError):
        return None
    return WorkingDirectory(path, number) if len(path) <= LONGEST_PATH else None


def has_directory(directory: WorkingDirectory) -> bool:
    """Return True if this machine has a process's working directory, and no other directory in its place."""
    try:
        return os.path.isabs(directory.path) and _number_of(directory.path) == directory.number
    except (OSError, ValueError):
        return False


def _number_of(path: str) -> int:
    return os.stat(path).st_ino & (2**62 - 1)
