"""The programs that are executed for a run: their start, their environment, their title, and their end.

All programs start here. No program searches the working directory for modules, because a file there may have the name
of a module that Paceline imports. No program gets the secret of a run, unless the caller passes it in the environment.

If the launcher is killed, no process of the run may keep running. So each process asks the kernel to kill it when its
parent exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ...run.compute_devices import usable_cores
from ...wire.secure import without_secret

BOOT = str(Path(__file__).with_name("boot.py"))
"""Path of the program that becomes a server or a worker, or forks servers and workers; see `boot`."""

CALL = f"""
import sys
from importlib import import_module
sys.path.append({str(Path(__file__).parents[3])!r})
sys.argv[:2], module = ["paceline"], sys.argv[1]
import_module(module).main()
"""
"""The program that calls the function `main` of a module of Paceline. Its first argument names the module.

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
    """Return the words with which `execute` calls the function `main` of a module of Paceline."""
    return ["-c", CALL, module]


def log_to_stderr() -> None:
    """Write Paceline's own messages to stderr, which is the log of this process.

    The root logger is left to the script. `logging.basicConfig` would do nothing if the root logger had a handler, and
    libraries that have handlers of their own would print each message twice.
    """
    logger = logging.getLogger("paceline")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    level, levels = os.environ.get("PACELINE_LOG") or "WARNING", logging.getLevelNamesMapping()
    logger.setLevel(levels.get(level.upper(), logging.WARNING))
    if level.upper() not in levels:
        logger.warning("PACELINE_LOG is %r, expected one of %s; WARNING is used", level, ", ".join(levels))


def execute(
    words: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start Python as a new program.

    Args:
        words: what Python executes, such as a file or `-c` and code, followed by the arguments of the new program.
        prefix: command that is put in front of the command line.
        environment: the environment. Default: the environment of this process, without the secret of a run.
        options: streams, descriptors and process group; see `subprocess.Popen`.

    Raises:
        OSError: the program cannot be started.
    """
    env = without_secret(os.environ) if environment is None else environment
    return subprocess.Popen([*prefix, sys.executable, "-P", *words], env=env, **options)


def environment(processes: int) -> dict[str, str]:
    """Return the environment of the processes of a run, which is read when a program or a library starts.

    The environment does not contain the secret of a run, even if the user has set the secret for several commands.

    Args:
        processes: number of servers and workers, which share the cores of this machine.
    """
    threads = max(1, usable_cores() // processes)
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

    Later collections skip all objects that exist at the end of this context. Otherwise, the collections would write to
    each of these objects, and so copy the memory that a process shares with its children.
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
        # The fields after the command's name begin with the third, so these are the fields 48 and 49 of proc(5).
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError):
        return
    if 0 < start < end:
        # The last byte stays zero. Otherwise, the kernel takes the environment for a part of the title.
        ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


# -- Files without a name, through which programs exchange data of any size ----------------------------------


def file_of(data: bytes) -> int:
    """Return the descriptor of a new unnamed file that contains the data."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def open_file(descriptor: int) -> BinaryIO:
    """Return a reader of the file from its start. Closing the reader closes the descriptor."""
    file = open(descriptor, "rb")  # noqa: SIM115 - closed by the caller
    file.seek(0)
    return file


# -- A program beside the processes of a run ----------------------------------------------------------------

POLL_S = 0.05


class Companion:
    """A program beside a run, with its input, its output and its end.

    The output of the program goes to files without a name, so the program never waits for a reader.

    Args:
        words: see `execute`.
        number: the signal that ends the program if it must not go on.
        heard: False if the program writes to the standard output and the standard error of this process.
        options: see `execute`.

    Attributes:
        exit_code: exit code of the program, or minus the number of the signal that has terminated it; None until `end`
            has returned.
        said: the content of the program's standard output.
        complaint: the content of the program's standard error.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        number: signal.Signals = signal.SIGKILL,
        *,
        heard: bool = True,
        **options: Any,
    ) -> None:
        self.exit_code: int | None = None
        self.said = b""
        self.complaint = ""
        self._number = number
        self._files = [file_of(b""), file_of(b"")] if heard else []
        streams = dict(zip(("stdout", "stderr"), self._files, strict=False))
        try:
            self._process = execute(words, **{"stdin": subprocess.PIPE, "bufsize": 0, **streams, **options})
        except BaseException:
            self._close()
            raise

    def tell(self, data: bytes) -> None:
        """Write to the program's standard input. If the program has ended, the data is dropped."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)

    def end(self, over: Callable[[], bool], told: bytes = b"") -> bool:
        """Close the program's standard input, and wait until it has ended. Return True if it has ended by itself.

        Args:
            over: called repeatedly. Once it returns True, the signal `number` is sent to the program.
            told: the rest of the program's standard input.
        """
        process = self._process
        try:
            while not over():
                try:
                    process.communicate(told or None, POLL_S)
                    return True
                except subprocess.TimeoutExpired:
                    told = b""
            process.send_signal(self._number)
            process.communicate()
            return False
        finally:
            process.kill()
            self.exit_code = process.wait()
            self._close()

    @property
    def last(self) -> str:
        """The last line of `complaint`; "" if there is none."""
        return self.complaint.strip().rpartition("\n")[2]

    def _close(self) -> None:
        if self._files:
            with open_file(self._files[0]) as said, open_file(self._files[1]) as complaint:
                self.said, self.complaint = said.read(), complaint.read().decode(errors="replace")
            self._files = []


# -- Functions that describe how a process ended, recognize crashes, and end what a failed process leaves behind
#
# When a machine is preempted, its processes are terminated by SIGKILL or SIGTERM, which Paceline is designed
# to handle. A segmentation fault is a crash, and so is a SIGKILL from the system's out-of-memory killer. The
# run continues without a crashed worker, but the exit code of the run reports the crash.

CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""Signals that the system sends to terminate a process because of an error in the process itself."""

EXIT_PEER_LOST = 75
"""Exit code of a worker that could not continue because another process of the run was lost."""

CUT_OFF = "paceline: cut off from the run: "
"""Beginning of the line that says in a worker's log why the worker could not continue.

The screen does not show this line, because the agent of the machine says what has happened to the run.
"""

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a worker whose script was ended by SIGINT, although the script has caught the `KeyboardInterrupt`."""


def describe_ending(exit_code: int, *, out_of_memory: bool = False) -> str:
    """Return a description of how a process ended.

    Args:
        exit_code: exit code of the process, or the negated signal number if a signal terminated the process.
        out_of_memory: True if, while the process was running, the system ran out of memory and killed some process.

    >>> describe_ending(3), describe_ending(-11)
    ('it ended with exit code 3', 'it was terminated by signal SIGSEGV')
    """
    if exit_code == EXIT_PEER_LOST:
        return f"it lost its connection to another process of the run (exit code {exit_code})"
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    number = -exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:
        # Real-time signals have no name.
        name = str(number)
    if out_of_memory and number == signal.SIGKILL:
        return f"it was terminated by signal {name}, probably because the system ran out of memory"
    return f"it was terminated by signal {name}"


def is_crash(exit_code: int, *, out_of_memory: bool = False) -> bool:
    """Return True if a process was terminated by a signal in `CRASHES`, or because the system ran out of memory."""
    return -exit_code in CRASHES or (out_of_memory and exit_code == -signal.SIGKILL)


def out_of_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return the number of processes that the system has killed since boot because it ran out of memory.

    Return 0 if the system does not report this number.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def await_group_leader(process_id: int) -> None:
    """Wait until a child process has ended. If it failed or was killed, kill the rest of its process group.

    The child is not reaped here, because the id of its group may be reused as soon as the child is reaped.

    Raises:
        ChildProcessError: another part of the program has already reaped the child.
    """
    end = os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
    if end is not None and (end.si_code, end.si_status) != (os.CLD_EXITED, 0):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process_id, signal.SIGKILL)
