"""`is_main`: whether this worker writes files and messages for the whole run.

Another worker becomes the main worker when the earlier one is lost (see `core.machines.main_worker`). A script that
asks several times in an epoch, for example before and after an evaluation, relies on the same answer. So the answer
changes only when an epoch begins.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from .session import Session, current

__all__ = ["is_main", "update_main"]


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
