"""A warm start for the programs that tests start: a process that has imported torch and Paceline forks them.

A new program of Python needs more than a second of CPU time to import torch. So a process that runs tests has a *warm
server*, which has one thread and runs no tensor operation. `subprocess.Popen` has it fork each program for which this
makes no difference (see `Program.suits`), and executes the others.

A forked program is like an executed one, except for this:

- The modules that it would import are imported already. Code that is given with `-c` often looks at these, so it is
  executed.
- All forked programs hash strings with the same seed, and have `sys.flags.safe_path`.
- It ends as a process of a run does (see `paceline.start.processes.orders`).
- Its optimizers do not import torch's compiler, as in a process of a run (see `defer_dynamo`).
- It has a warm server of its own, a child, for the programs that it starts in turn. One is the fork server of a run.

The warm server clones itself with `CLONE_PARENT`. So the program is a child of the process that has asked for it,
which waits for it as usual. `/proc` shows the command line and the environment of the program, because the warm
server is executed with long ones, in whose place these are written.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import importlib
import io
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from paceline.shard.optimizers import defer_dynamo
from paceline.start.processes import program
from paceline.start.processes.fork_server import keep_imported, thread_count
from paceline.start.processes.orders import leave

__all__ = ["WarmStarts", "bare_environment", "hear_signals", "take_terminal"]

IMPORTED = (
    "numpy.random",
    "torch.distributed.run",
    "paceline.cli",
    "paceline.train.epochs",
    "paceline.train.collectives",
    "paceline.train.prepare",
    "paceline.join",
    "paceline.start.join",
    "paceline.start.schedulers",
    "paceline.start.launch",
    "paceline.start.processes.child",
    "paceline.trace.report",
)

READ_AT_START = re.compile(
    "PYTHON|OMP_|KMP_|MKL_|OPENBLAS_|GLIBC_|LD_|MALLOC_|TORCH_(?!NCCL_)|CUDA_|LC_|LANG|FORCE_|PY_|GITHUB_"
    "|TERMINAL_"
)
"""The variables that an interpreter or a library reads when it starts. If one differs, a program is executed.

torchrun sets one for NCCL, which has no effect on a CPU."""

FORCES_COLOR = re.compile("FORCE_|PY_|GITHUB_|TERMINAL_")
"""Those of them that decide about colors and widths."""

TAKEN_OVER = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Those of them that a forked program heeds."""

TUNABLES = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={program.PAST_CACHE_BYTES}"}
"""The variable with which fork servers are executed, and so all forked programs. It makes large copies faster."""

OURS = str(Path(program.BOOT).parents[3])
"""The directory of the package."""

MODULES = {"paceline", "sitecustomize", "usercustomize", *sys.stdlib_module_names} | {
    entry.partition(".")[0]
    for entry in os.listdir(sysconfig.get_path("purelib"))
    if entry != "__pycache__"  # so is the folder with what a program has compiled
}
"""Modules that may be imported already."""

ROOM_BYTES = 32768  # of the command line and of the environment of a warm server
SPARE = 200  # the descriptor by which a forked program reaches its warm server, out of the way of others

SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
PR_GET_TID_ADDRESS = 40

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""The signals with which a user or a scheduler asks a whole process group for something."""

HEARD = (signal.SIGINT, signal.SIGHUP)
"""The signals that `hear_signals` lets a program hear."""


class Program(NamedTuple):
    """A program of Python that is to be started.

    Attributes:
        words: the options of the interpreter, what it executes, and the arguments.
        folder: the working directory.
        environment: the environment variables.
        session: True if the program begins a session.
        terminal: True if the terminal that is its standard input controls it.
        group: the process group that it enters; 0 for a new one, and -1 for that of its parent.
        ignored: the signals that it ignores, because its parent does, as under `nohup`.
    """

    words: list[str]
    folder: str
    environment: dict[str, str]
    session: bool
    terminal: bool
    group: int
    ignored: list[signal.Signals]

    @property
    def options(self) -> list[str]:
        count = next((n for n, word in enumerate(self.words) if word not in ("-P", "-u")), len(self.words))
        return self.words[:count]

    @property
    def what(self) -> tuple[str, str, list[str]]:
        """What is executed: "-m" and a module, "-c" and code, or "" and a file. Then the arguments."""
        kind, *rest = self.words[len(self.options) :] or ["-"]
        if kind not in ("-m", "-c"):
            return "", kind, rest
        name, *arguments = rest or ["-"]
        return kind, name, arguments

    @property
    def file(self) -> str:
        return os.path.join(self.folder, self.what[1])

    @property
    def first_place(self) -> list[str]:
        """The directory in which it looks for modules before all others."""
        places = {"-m": self.folder, "-c": "", "": os.path.dirname(os.path.realpath(self.file))}
        return [] if "-P" in self.options else [places[self.what[0]]]

    @property
    def given_places(self) -> list[str]:
        """The directories in which it looks for modules because its environment says so."""
        given = self.environment.get("PYTHONPATH", "").split(":")
        return [os.path.join(self.folder, place) for place in given if place]

    def suits(self, executed_with: Mapping[str, str]) -> bool:
        """Return True if the program can be forked from a process that was executed with some environment."""
        kind, name, _ = self.what
        if name.startswith("-") or (kind == "-c" and name != program.CALL):
            return False
        if not os.path.isdir(self.folder) or (not kind and not os.path.isfile(self.file)):
            return False
        if (
            at_start(self.environment) != at_start(executed_with)
            or len(pickle.dumps(tuple(self))) > ROOM_BYTES // 2
        ):
            return False
        # A file with the name of a module would be imported instead of it.
        places = {*self.first_place, *self.given_places} - {OURS}
        found = [name for place in places if os.path.isdir(place) for name in os.listdir(place)]
        return all(name.partition(".")[0] not in MODULES for name in found)


def at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a difference when a program starts, and not later."""
    found = {**TUNABLES, **environment}
    return {name: found[name] for name in found if READ_AT_START.match(name) and name not in TAKEN_OVER}


def bare_environment(**variables: str) -> dict[str, str]:
    """Return an environment with few variables, in which programs start warm."""
    kept = at_start(os.environ)
    for name in filter(FORCES_COLOR.match, list(kept)):
        del kept[name]
    return {**kept, "PATH": "/usr/bin:/bin", "PYTHONPATH": OURS, **variables}


def hear_signals() -> None:
    """Hear Ctrl-C and hang-ups, also where the tests themselves run in the background, deaf to both."""
    for number in HEARD:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def take_terminal() -> None:
    """Let the terminal that is standard input control this process, so that keys send signals to it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# -- the process that starts programs -----------------------------------------------------------------------


class WarmServer:
    """The warm server of this process.

    Args:
        control: the socket on which it receives what to start.
        process: the warm server itself, if `close` must wait for its end.
    """

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._control = control
        self._process = process
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def executed(cls, environment: Mapping[str, str]) -> WarmServer:
        """Return a warm server that is a new program, and ends with this process."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {
            **TUNABLES,
            **environment,
            program.PARENT_VARIABLE: str(os.getpid()),
            "ROOM": ROOM_BYTES * "-",
        }
        variables.pop("PYTHONPATH", None)
        words = [sys.executable, "-P", __file__, ROOM_BYTES * "-"]
        with theirs:
            process = subprocess.Popen(words, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=variables)
        return cls(control, process)

    def close(self) -> None:
        """End the warm server, and wait for its end."""
        self._control.close()
        if self._process is not None:
            self._process.wait()

    def fork(self, wanted: Program, streams: Sequence[int]) -> int | None:
        """Start a program, and return its process id, or None if there is no warm server."""
        if os.getpid() != self._owner:
            return None  # this process has been forked, and the program would not be its child
        ready, done = os.pipe()
        with open(ready, "rb") as answer:
            try:
                with self._lock:
                    socket.send_fds(self._control, [pickle.dumps(tuple(wanted))], [*streams, done])
            except (BrokenPipeError, ConnectionResetError):
                return None
            finally:
                os.close(done)
            process_id = answer.readline()
        if not process_id:
            raise OSError(f"the warm server has not started {wanted.words}")
        return int(process_id)


class WarmStarts:
    """Has `subprocess.Popen` start programs warm where this makes no difference.

    Args:
        environment: the environment of the warm server.
        server: the warm server. Default: it is started before the first program that can be forked.

    Attributes:
        allowed: False if all programs are executed.
    """

    def __init__(self, environment: Mapping[str, str], server: WarmServer | None = None) -> None:
        self.allowed = True
        self._environment = environment
        self._server = server
        popen: Any = subprocess.Popen
        self._execute: Callable[..., None] = popen._execute_child
        popen._execute_child = lambda process, *arguments: self._start(process, *arguments)

    def close(self) -> None:
        """Start programs as usual again."""
        cast(Any, subprocess.Popen)._execute_child = self._execute
        if self._server is not None:
            self._server.close()

    def begin(self) -> WarmServer | None:
        """Return the warm server. Only the main thread starts it, because it ends with the thread that starts it."""
        if self._server is None and threading.current_thread() is threading.main_thread():
            self._server = WarmServer.executed(self._environment)
        return self._server

    def _start(self, process: Any, *arguments: Any) -> None:
        """Do what `_execute_child` does."""
        args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, *rest = arguments
        pipes, (_, *user, session, group) = rest[:6], rest[6:]
        usual = close_fds and not (executable or pass_fds or shell) and user == [None, None, None, -1]
        if (
            self.allowed
            and usual
            and preexec_fn in (None, hear_signals, take_terminal)
            and isinstance(args, list | tuple)  # torchrun gives a tuple
            and args[0] == sys.executable
        ):
            variables = os.environ if env is None else env
            environment = {os.fsdecode(name): os.fsdecode(variables[name]) for name in variables}
            words = [os.fsdecode(word) for word in args[1:]]
            terminal = preexec_fn is take_terminal
            group = -1 if group is None else group
            heard = HEARD if preexec_fn is hear_signals else ()
            ignored = [n for n in ASKED if signal.getsignal(n) == signal.SIG_IGN and n not in heard]
            wanted = Program(
                words, os.path.abspath(cwd or ""), environment, session, terminal, group, ignored
            )
            given = pipes[0], pipes[3], pipes[5]
            streams = [own if stream == -1 else stream for own, stream in enumerate(given)]
            server = self.begin() if wanted.suits(self._environment) else None
            if server is not None and (process_id := server.fork(wanted, streams)) is not None:
                process.pid = process_id
                process._child_created = True
                process._close_pipe_fds(*pipes)
                return
        self._execute(process, *arguments)


# -- the warm server, and the programs that it forks --------------------------------------------------------


def main() -> None:
    """Be a warm server, or become a program. Standard input is the socket on which a warm server gets its orders."""
    program.end_with_parent(int(os.environ.pop(program.PARENT_VARIABLE)))
    places = sys.path.copy()
    with program.importing():
        for module in IMPORTED:
            importlib.import_module(module)
    keep_imported()
    defer_dynamo()
    if os.fork() == 0:  # OpenBLAS ends its threads before a fork
        os._exit(0)
    os.wait()
    if (count := thread_count()) > 1:
        sys.exit(f"a warm server must have one thread, but it has {count}")
    wanted, spare = serve()
    sys.path[:] = [*wanted.first_place, *dict.fromkeys([*wanted.given_places, *places])]
    run(wanted, spare)


def serve() -> tuple[Program, int]:
    """Start programs. Return in each of them, with the process id of its own warm server, or 0."""
    for number in ASKED:
        signal.signal(number, signal.SIG_IGN)
    show("warm server of tests", 45)
    control, environment = socket.socket(fileno=0), dict(os.environ)
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, ROOM_BYTES, 4)
        if not order:
            os._exit(0)
        if clone() == 0:
            control.detach()
            return become(Program(*pickle.loads(order)), descriptors, environment)
        for descriptor in descriptors:
            os.close(descriptor)


def clone() -> int:
    """Fork this process, as `os.fork` does, except that the child gets this process's parent."""
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    address = ctypes.c_void_p()  # where the C library keeps the number of this thread
    libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | signal.SIGCHLD
    python.PyOS_BeforeFork()
    process_id: int = libc.syscall(SYS_CLONE, ctypes.c_ulong(flags), None, None, address, address)
    if process_id == 0:
        python.PyOS_AfterFork_Child()
        cast(Any, threading.main_thread())._set_native_id()
    else:
        python.PyOS_AfterFork_Parent()
    if process_id < 0:
        raise OSError(ctypes.get_errno(), "a warm server cannot fork")
    return process_id


def become(
    wanted: Program, descriptors: Sequence[int], environment: Mapping[str, str]
) -> tuple[Program, int]:
    """Let this process look like a program that has just been executed. Return it, and the id of its warm server.

    Args:
        wanted: the program.
        descriptors: its standard streams, and a pipe into which its process id is written.
        environment: the environment of the warm server.
    """
    import numpy as np
    import torch

    *streams, done = descriptors
    for target, source in enumerate(streams):
        os.dup2(source, target)
    os.closerange(3, done)
    os.closerange(done + 1, os.sysconf("SC_OPEN_MAX"))
    if wanted.session:
        os.setsid()
        if wanted.terminal:
            take_terminal()
    elif wanted.group != -1:
        os.setpgid(0, wanted.group)
    spare = 0
    if (
        program.BOOT not in wanted.words
    ):  # the fork server of a run, or a process of it, which executes nothing
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        spare = os.fork()
        if spare == 0:
            program.end_with_parent(parent)
            os.dup2(theirs.fileno(), 0)
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            control.detach()
            theirs.detach()
            return serve()
        theirs.close()
        apart = fcntl.fcntl(control.fileno(), fcntl.F_DUPFD_CLOEXEC, SPARE)
        control.close()
        WarmStarts(environment, WarmServer(socket.socket(fileno=apart)))
    os.chdir(wanted.folder)
    os.environ.clear()
    os.environ.update(wanted.environment)
    show("\0".join([sys.executable, *wanted.words]), 45)
    show("\0".join(f"{name}={value}" for name, value in wanted.environment.items()), 47)
    for number in {*ASKED} - {*wanted.ignored}:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    open_streams(bool(wanted.environment.get("PYTHONUNBUFFERED")) or "-u" in wanted.options)
    np.random.seed()
    torch.default_generator.seed()
    tempfile.tempdir = None
    os.write(done, b"%d\n" % os.getpid())
    os.close(done)
    return wanted, spare


def show(text: str, field: int) -> None:
    """Write what `/proc` shows as the command line (field 45 after the name) or as the environment (field 47)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[field]), int(fields[field + 1])
    ctypes.memmove(start, os.fsencode(text)[: end - start - 1].ljust(end - start, b"\0"), end - start)


def open_streams(unbuffered: bool) -> None:
    """Open the standard streams as the interpreter does when it starts."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        mode, old = ("r" if descriptor == 0 else "w"), getattr(sys, name)
        buffering = 0 if unbuffered and mode == "w" else -1
        binary: Any = os.fdopen(descriptor, f"{mode}b", buffering, closefd=False)
        getattr(binary, "raw", binary).name = f"<{name}>"
        lines = not unbuffered and (binary.isatty() or descriptor == 2)
        newline = None if descriptor == 0 else "\n"
        stream: Any = io.TextIOWrapper(binary, old.encoding, old.errors, newline, lines, unbuffered)
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(wanted: Program, spare: int) -> NoReturn:
    """Run a program in this process, and end as the interpreter does."""
    kept = sys.modules.keys() - {"__main__"}
    status, interrupted = 0, False
    try:
        execute(wanted)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
    if spare:
        os.kill(spare, signal.SIGKILL)
        os.waitpid(spare, 0)
    if interrupted:  # the signal tells a shell
        cast(Any, threading)._shutdown()
        cast(Any, atexit)._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    leave(status & 0xFF, kept)


def execute(wanted: Program) -> None:
    """Execute the code of a program in a new module `__main__`."""
    kind, name, arguments = wanted.what
    sys.orig_argv = [sys.executable, *wanted.words]
    sys.argv = [kind or name, *arguments]
    main: Any = types.ModuleType("__main__")
    main.__builtins__, main.__annotations__ = builtins, {}
    sys.modules["__main__"] = main
    if kind == "-m":
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(name, "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        main.__file__, main.__cached__ = wanted.file, None
        main.__loader__ = SourceFileLoader("__main__", wanted.file)
        exec(compile(Path(wanted.file).read_bytes(), wanted.file, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    main()
