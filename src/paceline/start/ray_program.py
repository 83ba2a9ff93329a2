"""The program that an actor of Ray starts, and this actor. The program serves a run, or joins it with one worker.

The program receives one order and one payload over a pipe, and then the numbers of signals. So no secret is on its
command line or in its environment. If the other end of this pipe is closed, the actor has ended. Then the program
leaves the run as after SIGTERM, and kills itself if this takes more than 20 s. The program reports over another pipe.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
from msgspec import structs
from rich.console import Console

from .. import VERSION
from ..checkpoints.manifest import files_in
from ..errors import ConfigurationError, PacelineError, PeerLostError, RunFailedError
from ..run.job import Job
from ..sync.plugins import load_models, local_conditions
from .join import join
from .local import HostMachine, ProcessPlacement
from .processes.devices import device_of_process
from .processes.interruption import Interrupted, Terminated
from .processes.program import CALL, environment, execute, log_to_stderr
from .processes.spawn import Starter
from .terminal import plain_console

LEAVE_TIMEOUT_S = 20.0  # the program kills itself this long after the end of its actor


class HostReport(NamedTuple):
    """A report of the program.

    Attributes:
        how: "served" if the run can be joined now. Otherwise, how the program has ended: "finished"; "failed"; "left"
            if a signal has ended a program that had joined the run; "interrupted" if a signal has ended the program
            that served the run; "lost" if the worker was lost; or "refused" if the run did not accept the program, or
            the program has lost the coordinator.
        words: address of the coordinator, or a description of the reason; "" if there is none.
        error: the exception if the run that was served has failed; else None.
        result: the summary, the snapshots and the problems of a run that was served; else None.
    """

    how: str
    words: str = ""
    error: Exception | None = None
    result: tuple[Any, Any, Any] | None = None


Send = Callable[[HostReport], None]


def main() -> None:
    """Carry out the order that is received."""
    # This process has inherited the signal mask and the handlers of the actor's thread, which may ignore signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    orders, reports = (
        Connection(int(sys.argv[1]), writable=False),
        Connection(int(sys.argv[2]), readable=False),
    )
    folder = sys.argv[3]
    # Starts a fork server, which imports torch while the run is being placed, and forks all later processes, too.
    with orders, reports, Starter([()] * 2) as starter:
        log_to_stderr()
        try:
            (serves, quiet, options), payload = pickle.loads(orders.recv_bytes()), orders.recv_bytes()
        except EOFError:
            shutil.rmtree(folder, ignore_errors=True)
            return
        done = threading.Event()
        obeying = threading.Thread(target=_obey, args=(orders, folder, done), daemon=True)
        obeying.start()

        def send(report: HostReport) -> None:
            with contextlib.suppress(BrokenPipeError):  # the actor has ended
                reports.send_bytes(pickle.dumps(report))

        console = plain_console(stderr=True, quiet=quiet)
        if serves:
            ended = _serve(payload, send, console=console, starter=starter, **options)
        else:
            ended = _join(payload, run_dir=folder, console=console, starter=starter, **options)
        done.set()
        send(ended)
        obeying.join()  # until this thread has ended, the actor can read the files


def search_path(other: Sequence[str]) -> list[str]:
    """Return the module search path of this machine, followed by the entries that are only in `other`."""
    return [*sys.path, *(entry for entry in other if entry not in sys.path)]


def _obey(orders: Connection, folder: str, done: threading.Event) -> None:
    """Send this process the signals that the actor orders. When the actor has ended, leave the run.

    At the end, the files are removed.

    Args:
        orders: where the numbers of the signals arrive.
        folder: directory of the files.
        done: set when the order has been carried out.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            number = int(orders.recv_bytes())
            if not done.is_set():
                os.kill(os.getpid(), number)
    if not done.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
    in_time = done.wait(LEAVE_TIMEOUT_S)
    shutil.rmtree(folder, ignore_errors=True)
    if not in_time:
        os.kill(os.getpid(), signal.SIGKILL)


def _join(payload: bytes, address: str, token: str, **options: Any) -> HostReport:
    """Join a run with one worker. The payload contains the module search path and the training function."""
    device = device_of_process(0)  # Ray hides the accelerators that are not for this worker
    objects = io.BytesIO(payload)
    path = cloudpickle.dumps(search_path(cloudpickle.load(objects)))
    try:
        joined = join(
            address,
            token,
            ["function"],
            worker_payload=path + objects.read(),
            version=VERSION,
            workers=1,
            shown="worker 0",
            devices=[] if device is None else [device],
            **options,
        )
    except (Interrupted, Terminated) as end:
        return HostReport("left", end.words)
    except (ConfigurationError, PeerLostError) as error:
        return HostReport("refused", str(error))
    except PacelineError as error:
        return HostReport("failed", str(error))
    return HostReport("finished" if joined.finished else "lost")


def _serve(
    payload: bytes, send: Send, job: Job, host: str, *, console: Console, **options: Any
) -> HostReport:
    """Serve a run. The payload contains the module search path, and conditions that cannot be imported."""
    from .run import start

    objects = io.BytesIO(payload)
    sys.path[:] = search_path(cloudpickle.load(objects))
    local_conditions.update(cloudpickle.load(objects))
    try:
        load_models(job.sync, job.imports)
        result = start(
            structs.replace(job, epoch_ns=time.monotonic_ns()),
            ["function"],
            b"",
            sys.path,
            console=console,
            placement=ProcessPlacement(host, (HostMachine(host),) * job.servers, ()),
            listening=lambda address, job: send(HostReport("served", address)),
            **options,
        )
    except (Interrupted, Terminated) as end:
        return HostReport("interrupted", end.words, result=(end.summary, [], ()))
    except (ConfigurationError, RunFailedError) as error:
        return HostReport("failed", str(error), error=error)
    return HostReport("finished", result=(result.summary, result.snapshots, result.problems))


# -- The actor with which a run takes part in a Ray cluster: it starts one program, and relays messages to and from it
#
# The program serves the run, or joins it with one worker. It has a main thread of its own, so it can handle
# signals, and its workers end with it. A parent-death signal could not end the program
# when the actor ends, because the kernel sends this signal when the *thread* that has created the process ends, and the
# methods of an actor run on threads that come and go. Instead, the program reads from a pipe, whose other end
# is closed when the actor has ended for whatever reason. When an actor ends, Ray kills its child processes.
# So the program is not a child of the actor, because a child could not leave the run or remove its files.

END_TIMEOUT_S = 25.0  # longer than the time after which the program kills itself

BOOT = f"""
import os
if os.fork():
    os._exit(0)
{CALL}"""


class RayHost:
    """An actor that hosts a program. Several of its methods may run at the same time, on different threads.

    It must not be created with secrets as arguments: Ray stores the arguments with which an actor is created.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="paceline-")
        orders, self._orders = Pipe(duplex=False)
        self._lock = threading.Lock()  # protects `_orders`
        source, sink = Pipe(duplex=False)
        self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        with orders, sink:
            descriptors = [orders.fileno(), sink.fileno()]
            execute(
                ["-c", BOOT, "paceline.start.ray_program", *map(str, descriptors), self._folder],
                environment=environment(1),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ray also kills the process group of an actor
            ).wait()
        threading.Thread(target=self._read_reports, args=(source,), daemon=True).start()

    def place(self, mark: str = "") -> tuple[str, str, str]:
        """Return the id and the address of the node on which the actor runs, and the directory of its files there.

        Args:
            mark: path of a file in the run directory. If this node sees it, the program works in the run directory.
        """
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        folder = str(Path(mark).parent) if mark and Path(mark).exists() else self._folder
        return str(node), str(address), folder

    def order(self, order: bytes, payload: bytes) -> None:
        """Send an order to the program; see `main`. If the program has ended, nothing happens."""
        self._send(order, payload)

    def hear(self) -> bytes | None:
        """Wait for the next message of the program, and return it. Return None if the program has ended."""
        return self._reports.get()

    def signal(self, number: int) -> None:
        """Send a signal to the program, if it has not ended. It must have received its order before."""
        self._send(str(number).encode())

    def files(self) -> list[tuple[str, int]]:
        """Return the names and the sizes in bytes of the files that the program has written to its own directory."""
        return [
            (str(path.relative_to(self._folder)), path.stat().st_size)
            for path in files_in(Path(self._folder))
        ]

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return a part of a file."""
        with Path(self._folder, name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, name: str, data: bytes) -> None:
        """Append data to a file. This must happen before the program receives its order."""
        path = Path(self._folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def end(self, hurried: bool) -> None:
        """Let the program leave the run and end; if `hurried` is True, kill it instead. Then remove its files."""
        if hurried:
            self.signal(signal.SIGKILL)
        with self._lock:
            self._orders.close()
        self._ended.wait(END_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, *messages: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            for message in messages:
                self._orders.send_bytes(message)

    def _read_reports(self, source: Connection) -> None:
        with source, contextlib.suppress(EOFError, OSError):
            while True:
                self._reports.put(source.recv_bytes())
        self._ended.set()
        self._reports.put(None)
