"""What the garbage collector is spared, so that tests do not wait for it."""

from __future__ import annotations

import gc

__all__ = ["spare_what_exists"]


def spare_what_exists() -> None:
    """Let the collector, and searches of all objects, leave out what has been imported and created so far."""
    gc.collect()
    gc.freeze()
