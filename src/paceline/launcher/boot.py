"""The program that every process of an engine runs first: `python -P boot.py ARGUMENTS`.

It is run by its path and does not import the rest of the package at first. These imports take seconds, and no process
may be left behind if the launcher is killed meanwhile. So the process first arranges that it ends with its parent.
`-P` keeps the current directory out of `sys.path`, since a file there that happens to be called `cloudpickle.py`
would be run. A worker adds the directory of its script later, as `python script.py` does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

__all__ = ["PARENT_VARIABLE", "end_with_parent"]

PARENT_VARIABLE = "PACELINE_PARENT"
"""The environment variable with the process id of the process that started this one."""

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Arrange that the kernel kills this process when its parent ends. Exit immediately if it has already ended.

    Args:
        parent: process id of the parent.
    """
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    # Servers keep ignoring Ctrl-C. Workers install the default handler before they run the script.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher may have found the package in a directory that is not in the path of this process.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root not in sys.path:
        sys.path.append(root)

    from paceline.launcher.child import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
