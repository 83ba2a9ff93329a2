"""The programs that are executed for a run: their start, their environment, their title, and their end.

All programs start here. None searches the working directory for modules, because a file there may have the name of a
module that Paceline imports. None gets the secret of a run, unless it is given in the environment.

If the launcher is killed, no process of the run may keep running. So each process asks the kernel to kill it when its
parent exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...wire.secure import without_secret

BOOT = str(Path(__file__).with_name("boot.py"))
"""Path of the program, see `boot`."""

CALL = f"""
import sys
from importlib import import_module
sys.path.append({str(Path(__file__).parents[3])!r})
sys.argv[:2], module = ["paceline"], sys.argv[1]
import_module(module).main()
"""
"""The program that calls the function `main` of a module of Paceline, which its first argument names.

The launcher may have imported Paceline from a directory that is not in the new program's `sys.path`.
"""

PARENT_VARIABLE = "PACELINE_PARENT"
"""Name of the environment variable that contains the process id of the parent."""

PR_SET_PDEATHSIG = 1

PAST_CACHE_BYTES = 1024 * 1024
"""Size in bytes above which `memcpy` bypasses the cache. Large copies are 1.5 times as fast as with the default.

By default, glibc uses three quarters of the size of the last-level cache. In a virtual machine, this may be hundreds
of megabytes, although the cache is shared with other virtual machines.
"""


def main_of(module: str) -> list[str]:
    """Return what `execute` executes to call the function `main` of a module of Paceline."""
    return ["-c", CALL, module]


def execute(
    words: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start Python as a new program.

    Args:
        words: what it executes, and the arguments of this program.
        prefix: command that is put in front of the command line.
        environment: the environment. Default: that of this process, without the secret of a run.
        options: streams, descriptors and process group; see `subprocess.Popen`.

    Raises:
        OSError: the program cannot be started.
    """
    env = without_secret(os.environ) if environment is None else environment
    return subprocess.Popen([*prefix, sys.executable, "-P", *words], env=env, **options)


def environment(processes: int) -> dict[str, str]:
    """Return the environment of the processes of a run, which is read when a program or a library starts.

    It does not contain the secret of a run, although the user may have set it for several commands.

    Args:
        processes: number of servers and workers, which share the cores of this machine.
    """
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {
        # If the user has set one of these two variables, the user's value is used.
        "OMP_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={PAST_CACHE_BYTES}",
        **without_secret(os.environ),
        "PYTHONUNBUFFERED": "1",
    }


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


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules without the garbage collector, which costs 15 % of the time and frees nothing.

    Later collections leave out what exists afterwards. They would write to every object, and so copy the memory that
    a process shares with its children.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def set_title(title: str) -> None:
    """Set the command line that `ps` shows for this process. A title that is longer than the present one is cut off.

    The title replaces the command line in this process's memory. Systems without `/proc` keep the command line.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # The fields after the command's name begin with the third; these are 48 and 49 of proc(5).
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError):
        return
    if 0 < start < end:
        # The last byte stays zero. Otherwise, the kernel takes the environment for a part of the title.
        ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)
