"""The main function of every server and worker process; it is called by `boot`.

A worker runs the user's script as `python script.py` would, or calls a function that its payload contains. The
payload of a server contains the module search path, and the conditions that the server cannot import.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import cloudpickle
import torch

from ...errors import PacelineError, PeerLostError, ProtocolError, TakenOutError, first_line
from ...run.job import Assignment
from ...run.server import ServerHost
from ...run.worker import WorkerSession
from ...shard.foreign import use_sources
from ...shard.optimizers import defer_dynamo
from ...sync.plugins import load_models, local_conditions, script_traceback
from ...train import session as sessions
from ...train.training import watch_script
from .orders import Descriptors, ProcessOrder
from .program import CUT_OFF, EXIT_INTERRUPTED, EXIT_PEER_LOST, log_to_stderr, open_file

MEMORY_ADVICE = (
    "Reduce the batch size. If only balanced batches are too large, limit their size in all workers with "
    "distribute(loader, max_batch=...)."
)

VERSION_ADVICE = "Install a version that has this name, or change the script."

# Maximum time between the arrivals of one signal at several processes, if a scheduler sends it to all of them.
SAME_SIGNAL_S = 0.5
POLL_INTERVAL_S = 0.02


def main(order: ProcessOrder, descriptors: Descriptors) -> int:
    """Run this process as the server or worker that the order describes. Return the exit code.

    Args:
        order: the order of the launcher.
        descriptors: the descriptors of the process.
    """
    objects = open_file(descriptors.payload)
    assignment, job = order.assignment, order.assignment.job
    log_to_stderr()
    faulthandler.enable(2)  # a crash in a library, such as a driver, then leaves a traceback in the log
    defer_dynamo()
    use_sources(job.optimizers)
    # Servers continue to ignore Ctrl-C: the launcher ends them in an orderly way.
    if assignment.role == "server":
        if assignment.machine:
            # Schedulers send SIGTERM to all processes of a machine. The machine's agent decides when the server ends.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.path[:] = cloudpickle.load(objects)
        local_conditions.update(cloudpickle.load(objects))
        objects.close()
        use_device(assignment)
        passed = None if descriptors.passed is None else socket.socket(fileno=descriptors.passed)
        try:
            server = ServerHost.connect(assignment, passed)
        except (PeerLostError, ProtocolError) as error:
            return _cut_off(error)
        server.run()
        return 0
    interrupts = Interrupts()
    os.environ.update(job.torchrun_environment(assignment.index))
    kind, *arguments = order.arguments
    if kind == "function":
        sys.path[:] = cloudpickle.load(objects)
    else:
        objects.close()
        # `python script.py` adds the directory of the script, and `python -m module` adds the current directory.
        sys.path.insert(0, os.getcwd() if kind == "module" else str(Path(arguments[0]).resolve().parent))
    use_device(assignment)
    try:
        session = WorkerSession.connect(assignment)
    except (PeerLostError, ProtocolError) as error:
        return _cut_off(error)
    sessions.install(session)
    if job.joined:
        leave_on_sigterm(session)
    watch_script()
    try:
        _train(kind, arguments, objects)
    except SystemExit as end:
        if end.code not in (None, 0):
            if job.joined:
                print(f"paceline: {_describe_exit(end.code)}", file=sys.stderr, flush=True)
            session.fail(_describe_exit(end.code), "")
            return 1
    except BaseException as error:
        causes = _causes(error)
        consequence = any(isinstance(cause, PeerLostError) for cause in causes)
        if job.joined and not consequence and _is_leaving(session):
            print(
                f"paceline: the script failed after its process had received SIGTERM: {first_line(error)}",
                file=sys.stderr,
            )
            session.finish()
            session.close()
            return 0
        # If this worker was taken out of the run, this has caused all exceptions that the script has raised since then.
        reason = next((cause for cause in causes if isinstance(cause, TakenOutError)), error)
        told = script_traceback(error)
        # The launcher reports the exception once. If the launcher is on another machine, the user may be unable to see
        # its output. In this case, the log on this machine contains the exception, too.
        words = with_advice(first_line(reason), causes)
        if job.joined:
            shown = told if words == first_line(reason) else f"{told.rstrip()}\npaceline: {words}"
            print(f"{CUT_OFF}{words}" if consequence else shown, file=sys.stderr, flush=True)
        session.fail(words, told, consequence=consequence)
        return EXIT_PEER_LOST if consequence else 1
    session.finish()
    session.close()
    if not interrupts.ended(session):
        return 0
    print(
        "paceline: the script was interrupted by SIGINT, and has ended by itself", file=sys.stderr, flush=True
    )
    return 0 if job.joined else EXIT_INTERRUPTED


class Interrupts:
    """Notices whether SIGINT has ended the script, which may catch the `KeyboardInterrupt` and end normally."""

    def __init__(self) -> None:
        self._iteration: int | None = None  # the iteration in which the worker was interrupted
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        session = sessions.current()
        self._iteration = 0 if session is None else session.core.iteration
        signal.default_int_handler(number, frame)

    def ended(self, session: WorkerSession) -> bool:
        """Return True if the script has not gone on to train after it was interrupted."""
        return self._iteration is not None and session.core.iteration <= self._iteration + 1


def use_device(assignment: Assignment) -> None:
    """Hide other accelerators, import the modules of the run, and make the assigned device torch's current one.

    If all other accelerators are hidden, the device already is the current one. If torch has chosen another kind of
    accelerator, the device cannot become the current one.
    """
    job, device = assignment.job, assignment.device
    if device is not None:  # a driver reads these variables when it is initialized
        os.environ.update(device.environment)
    load_models(job.sync, [*job.imports, *assignment.imports])
    if device is None:
        return
    chosen = torch.accelerator.current_accelerator()
    if device.own_index and chosen is not None and chosen.type == device.kind:
        torch.accelerator.set_device_index(device.own_index)


def _cut_off(error: PacelineError) -> int:
    """Return the exit code of a process that has not reached the coordinator, and say why.

    This is not a failure of the run, because a link may be down for a while. Later, the agent of the machine lets the
    worker join the run again.
    """
    print(f"paceline: the coordinator was not reached: {error}", file=sys.stderr, flush=True)
    return EXIT_PEER_LOST


def leave_on_sigterm(session: WorkerSession) -> None:
    """Let SIGTERM ask this worker to leave the run.

    Schedulers send this signal to all processes on a machine that they are about to take away. So a worker may
    receive it twice, from the scheduler and from its agent, which kills a worker that does not leave.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            session.links.asked_to_leave = True
        else:  # a process that the script has forked
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)


def _is_leaving(session: WorkerSession) -> bool:
    """Return True if a scheduler has asked this worker to leave the run.

    The signal may also have ended another process, such as one of a `DataLoader`. If the script has
    noticed the end of that process first, this worker receives the signal a little later.
    """
    deadline_s = time.monotonic() + SAME_SIGNAL_S
    while not session.links.asked_to_leave and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)
    return session.links.asked_to_leave


def _train(kind: str, arguments: list[str], objects: BinaryIO) -> None:
    """Read the training function from the payload and call it, or run the named script or module."""
    if kind == "function":
        with objects:
            function, args = cloudpickle.load(objects)
        function(*args)
        return
    sys.argv = arguments
    if kind == "module":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def with_advice(reason: str, causes: Iterable[BaseException]) -> str:
    """Return why a script has failed, and what to do if the cause is the device's memory or torch's version.

    Args:
        reason: the reason.
        causes: the error, and the errors that led to it.

    >>> with_advice("it is closed", [OSError("it is closed")])
    'it is closed'
    """
    for error in causes:
        if _is_lacking_in_torch(error):
            return f"{reason.rstrip('.')}: this machine has torch {torch.__version__}. {VERSION_ADVICE}"
        words = isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
        if words or isinstance(error, torch.OutOfMemoryError):
            return f"{reason.rstrip('.')}. {MEMORY_ADVICE}"
    return reason


def _is_lacking_in_torch(error: BaseException) -> bool:
    """Return True if a script has asked a module of torch for a name that the installed version does not have."""
    match error:
        case AttributeError(obj=types.ModuleType(__name__=name)) | ImportError(name=str(name)):
            return name.partition(".")[0] == "torch"
        case _:
            return False


def _describe_exit(code: object) -> str:
    """Return a description of a call to `sys.exit(code)`. If `code` is a message, the exit code is 1."""
    if isinstance(code, int):
        return f"the script ended with exit code {code}"
    return f"the script ended with exit code 1: {code}"


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return the error and the errors that led to it, the latest one first."""
    causes: list[BaseException] = []
    while error is not None and all(error is not known for known in causes):
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes
