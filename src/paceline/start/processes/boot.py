"""The program that becomes a server or a worker, or forks servers and workers: `python -P boot.py KIND`.

KIND is "fork server" for a process that forks servers and workers, or "process" for a process that becomes a server or
a worker.

The program first makes sure that it ends with its parent, and then imports torch, which takes seconds. `-P` keeps the
current directory out of `sys.path`; otherwise, a file there with a name such as `cloudpickle.py` would be imported. A
worker later adds the directory of its script, as `python script.py` does.
"""

from __future__ import annotations

import os
import signal
import sys


def main(kind: str) -> None:
    """Run the program. See the module's docstring for `kind`."""
    # The launcher may have imported the package from a directory that is not in this process's `sys.path`.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    if root not in sys.path:
        sys.path.append(root)

    from paceline.start.processes.program import PARENT_VARIABLE, end_with_parent, set_title

    end_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    set_title(f"paceline {kind}")
    # Servers always ignore Ctrl-C. Workers restore the default handler before they run the script.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    from paceline.start.processes.fork_server import carry_out

    carry_out(kind)


if __name__ == "__main__":
    main(sys.argv[1])
