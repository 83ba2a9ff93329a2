"""Closes, in a forked child, what it must not keep open.

A script may fork: a `DataLoader` with workers does. The child inherits every descriptor, and a connection does not
end while anybody holds it: a worker that was killed would not be noticed before its children have ended, too. So
whatever owns a descriptor says so here, and a child closes all of them before it runs any code of the script. (A
program that is started with `exec` inherits none: Python's descriptors are close-on-exec. Shared memory stays mapped
in a child, since its copy of the script may look at the model's weights.)
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["close_in_forks"]


class Owner(Protocol):
    """Something that owns descriptors."""

    def close_in_fork(self) -> None:
        """Close them in this process, a forked child, and nothing else: say nothing to anybody."""
        ...


_owners: WeakSet[Owner] = WeakSet()
_registered = False


def close_in_forks(owner: Owner) -> None:
    """Have every child that is forked from now on close what `owner` owns, as long as that lives."""
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close_all)
    _owners.add(owner)


def _close_all() -> None:
    for owner in list(_owners):
        with contextlib.suppress(OSError, ValueError):  # it had been closed before
            owner.close_in_fork()
    _owners.clear()
