"""The program that every server and worker process runs first: `python -P boot.py ARGUMENTS`.

If the launcher is killed, no process of the run may keep running. So each process first asks the kernel to kill it
when its parent exits. The file is run by its path, so that the request precedes the import of the package, which
takes seconds. `-P` keeps the current directory out of `sys.path`; otherwise, a file there with a name such as
`cloudpickle.py` would be imported. A worker later adds the directory of its script, as `python script.py` does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

__all__ = ["PARENT_VARIABLE", "end_with_parent"]

PARENT_VARIABLE = "PACELINE_PARENT"
"""Name of the environment variable that contains the process id of the parent."""

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent exits. If the parent has already exited, exit immediately.

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
    # Servers always ignore Ctrl-C. Workers restore the default handler before they run the script.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The launcher may have imported the package from a directory that is not in this process's `sys.path`.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root not in sys.path:
        sys.path.append(root)

    from paceline.launcher.child import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
