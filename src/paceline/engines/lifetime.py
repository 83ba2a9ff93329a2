"""A process that ends when the one that started it does, however that comes about."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

__all__ = ["end_with_parent"]

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent, whose id this is, has ended; at once, if it has already."""
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
