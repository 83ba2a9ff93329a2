"""Closes inherited file descriptors in forked child processes.

A script may fork, for example by using a `DataLoader` with workers. The child inherits every file descriptor, and a
connection stays open while any process holds its descriptor. Without this module, the connections of a killed worker
would stay open until all of its children had exited. Therefore, each object that owns descriptors registers itself
here, and a forked child closes these descriptors before it runs any code of the script. Shared memory stays mapped in
the child, because the script may read the model's weights there.

A program that is started with `exec` inherits no descriptors, because Python's descriptors are close-on-exec.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["close_in_forks"]


class Owner(Protocol):
    """An object that owns file descriptors."""

    def close_in_fork(self) -> None:
        """Close the descriptors in a forked child, without sending anything."""
        ...


_owners: WeakSet[Owner] = WeakSet()
_registered = False


def close_in_forks(owner: Owner) -> None:
    """Close the descriptors of `owner` in every child that is forked from now on, as long as `owner` exists."""
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close_all)
    _owners.add(owner)


def _close_all() -> None:
    for owner in list(_owners):
        # These errors are raised if the descriptors are already closed.
        with contextlib.suppress(OSError, ValueError):
            owner.close_in_fork()
    _owners.clear()
