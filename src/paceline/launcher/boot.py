"""The first lines of every process that an engine starts: `python -P boot.py ARGUMENTS`.

Run by its path, and by itself: importing the package's other modules takes seconds, and a launcher that is killed
meanwhile must not leave anybody behind. So the process ties its life to its parent's first. `-P` keeps the current
directory off the path of modules, where a file that happens to be called `cloudpickle.py` would be run; a worker puts
its script's directory there later, as `python script.py` does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

__all__ = ["PARENT_VARIABLE", "end_with_parent"]

PARENT_VARIABLE = "PACELINE_PARENT"
"""The environment variable with the process id of whoever started this process."""

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent, whose id this is, has ended; at once, if it has already."""
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # until it is known whose it is; a worker's script will hear it
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root not in sys.path:  # the launcher may have found the package where this process does not look
        sys.path.append(root)

    from paceline.launcher.child import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
