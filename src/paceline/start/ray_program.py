"""The program under an actor of Ray, and the actor: the program serves a run, or joins it with one worker.

The program receives one order and one payload over its standard input, and then the numbers of signals. So no secret
is on its command line or in its environment. At the end of the file, its actor has ended. So it leaves the run as
after SIGTERM, and kills itself if this takes more than 20 s. The program reports over another pipe.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import queue
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import cloudpickle
import msgspec
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
from .processes.program import CALL, environment, execute
from .processes.spawn import Starter
from .terminal import StandardStreams, plain_console

LEAVE_TIMEOUT_S = 20.0  # time after which the program is killed if its actor has ended


class ServeOrder(msgspec.Struct, frozen=True, tag="serve"):
    """Serve a run. The payload contains the module search path, and conditions that cannot be imported.

    Attributes:
        job: the configuration of the run, with its run directory on this machine.
        host: address on which this machine listens.
        quiet: True if no messages are printed.
        snapshot_every_s: see `launch`.
        command: the command line that repeats the run.
        source: the source of the training function; "" if it cannot be read.
        interrupted: why the run was interrupted, as a sentence; "" if it begins, or if a user has resumed it.
        lock: token of the lock that the program which has called `launch` holds on the run directory.
    """

    job: Job
    host: str
    quiet: bool
    snapshot_every_s: float | None
    command: str = ""
    source: str = ""
    interrupted: str = ""
    lock: str = ""


class JoinOrder(msgspec.Struct, frozen=True, tag="join"):
    """Join a run with one worker. The payload contains the module search path and the training function.

    Attributes:
        address: address of the coordinator.
        token: the secret of the run.
        quiet: True if no messages are printed.
        show_all: see `launch`.
    """

    address: str
    token: str
    quiet: bool
    show_all: bool

    def __repr__(self) -> str:
        """Return a description without the token, which must not appear in a log."""
        return f"JoinOrder({self.address!r})"


class ServedRun(msgspec.Struct, frozen=True, tag="served"):
    """The run can be joined.

    Attributes:
        address: address of the coordinator.
    """

    address: str


class EndedHost(msgspec.Struct, frozen=True, tag="ended"):
    """The order has been carried out.

    Attributes:
        how: "finished", or "left" or "interrupted" if a signal was the reason, "lost" if the worker was killed,
            "refused" if it could not join, or "failed".
        words: description of the reason; "" if there is none.
        error: the exception, pickled, if an order to serve has failed; else b"".
        result: the summary, the snapshots and the problems of a run that was served, pickled; else b"".
    """

    how: str
    words: str = ""
    error: bytes = b""
    result: bytes = b""


Order = ServeOrder | JoinOrder
Report = ServedRun | EndedHost


def main() -> None:
    """Carry out the order that is read from standard input."""
    # The actor's thread, from which this process inherits both, may block or ignore signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor, folder = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(descriptor, False)
    # Torch is imported while the run is being placed. A program that serves a run needs it, too, and the more
    # programs there are on a node, the longer all of them take to import it.
    starter = Starter.here()
    with (
        open(os.dup(0), "rb") as source,
        open(descriptor, "wb") as sink,
        open(os.devnull, "rb") as nothing,
        starter,
    ):
        logging.basicConfig(level=os.environ.get("PACELINE_LOG", "WARNING"), format="%(name)s: %(message)s")
        os.dup2(nothing.fileno(), 0)
        data, payload = read_frame(source), read_frame(source)
        if data is None or payload is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        done = threading.Event()
        obeying = threading.Thread(target=_obey, args=(source, folder, done), daemon=True)
        obeying.start()
        order = msgspec.msgpack.decode(data, type=Order)
        console = plain_console(stderr=True, quiet=order.quiet)

        def report(message: Report) -> None:
            write_frame(sink, msgspec.msgpack.encode(message))

        with contextlib.suppress(BrokenPipeError):  # the actor has ended
            if isinstance(order, JoinOrder):
                ended = _join(order, payload, folder, console, starter)
            else:
                ended = _serve(order, payload, console, starter, lambda where: report(ServedRun(where)))
            done.set()
            report(ended)
        done.set()
        obeying.join()  # the actor reads the files until then


def search_path(other: Sequence[str]) -> list[str]:
    """Return the module search path of this machine, and after it what only the other machine has."""
    return [*sys.path, *(entry for entry in other if entry not in sys.path)]


def _obey(source: IO[bytes], folder: str, done: threading.Event) -> None:
    """Send this process the signals that it is told to. When the actor has ended, leave the run.

    In the end, the files are removed.

    Args:
        source: standard input.
        folder: directory of the files.
        done: set when the order has been carried out.
    """
    while (number := read_frame(source)) is not None:
        if not done.is_set():
            os.kill(os.getpid(), int(number))
    if not done.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
    in_time = done.wait(LEAVE_TIMEOUT_S)
    shutil.rmtree(folder, ignore_errors=True)
    if not in_time:
        os.kill(os.getpid(), signal.SIGKILL)


def _join(order: JoinOrder, payload: bytes, folder: str, console: Console, starter: Starter) -> EndedHost:
    device = device_of_process(0)  # Ray hides the accelerators that are not for this worker
    objects = io.BytesIO(payload)
    path = cloudpickle.dumps(search_path(cloudpickle.load(objects)))
    try:
        joined = join(
            order.address,
            order.token,
            ["function"],
            worker_payload=path + objects.read(),
            version=VERSION,
            workers=1,
            console=console,
            run_dir=folder,
            streams=StandardStreams(show_all=order.show_all),
            shown="worker 0",
            starter=starter,
            devices=[] if device is None else [device],
        )
    except (Interrupted, Terminated) as end:
        return EndedHost("left", end.words)
    except (ConfigurationError, PeerLostError) as error:
        return EndedHost("refused", str(error))
    except PacelineError as error:
        return EndedHost("failed", str(error))
    return EndedHost("finished" if joined.finished else "lost")


def _serve(
    order: ServeOrder,
    payload: bytes,
    console: Console,
    starter: Starter,
    served: Callable[[str], None],
) -> EndedHost:
    from .run import start

    objects = io.BytesIO(payload)
    sys.path[:] = search_path(cloudpickle.load(objects))
    local_conditions.update(cloudpickle.load(objects))
    try:
        load_models(order.job.sync, order.job.imports)
        job = structs.replace(order.job, epoch_ns=time.monotonic_ns())
        result = start(
            job,
            ["function"],
            b"",
            sys.path,
            console=console,
            snapshot_every_s=order.snapshot_every_s,
            placement=ProcessPlacement(order.host, (HostMachine(order.host),) * job.servers, ()),
            starter=starter,
            listening=lambda address, job: served(address),
            command=order.command,
            source=order.source,
            interrupted=order.interrupted,
            lock_token=order.lock,
        )
    except (Interrupted, Terminated) as end:
        return EndedHost("interrupted", end.words, result=pickle.dumps((end.summary, [], ())))
    except (ConfigurationError, RunFailedError) as error:
        return EndedHost("failed", str(error), error=pickle.dumps(error))
    return EndedHost("finished", result=pickle.dumps((result.summary, result.snapshots, result.problems)))


# -- The actor with which a run takes part in a Ray cluster: it starts one program, and relays messages to and from it
#
# The program (see `ray_program`) serves the run, or joins it with one worker. It has a main thread of its
# own, so it can handle signals, and its workers end with it. A parent-death signal could not end it with the
# actor, because the kernel sends this signal when the *thread* ends that has created the process, and the
# methods of an actor run on threads that come and go. Instead, the program reads from a pipe, whose other end
# is closed when the actor has ended for whatever reason. When an actor ends, Ray kills its child processes.
# So the program is not a child of the actor: otherwise, it could neither leave the run nor remove its files.

END_TIMEOUT_S = 25.0  # longer than the time after which the program kills itself

LENGTH = struct.Struct("<Q")

BOOT = f"""
import os
if os.fork():
    os._exit(0)
{CALL}"""


def write_frame(sink: IO[bytes], data: bytes) -> None:
    """Write bytes with their length."""
    sink.write(LENGTH.pack(len(data)))
    sink.write(data)
    sink.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """Return the next bytes that `write_frame` has written; None at the end of the file."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    data = source.read(size)
    return data if len(data) == size else None


class RayHost:
    """An actor that hosts a program. Several of its methods may run at the same time, on different threads.

    It must not be created with secrets as arguments: Ray stores the arguments with which an actor is created.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="paceline-")
        order_source, order_sink = os.pipe()
        report_source, report_sink = os.pipe()
        self._orders = open(order_sink, "wb")  # noqa: SIM115 - closed by `end`
        self._lock = threading.Lock()  # of `_orders`
        self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        try:
            execute(
                ["-c", BOOT, "paceline.start.ray_program", str(report_sink), self._folder],
                environment=environment(1),
                stdin=order_source,
                pass_fds=[report_sink],
                start_new_session=True,  # Ray also kills the process group of an actor
            ).wait()
        finally:
            os.close(order_source)
            os.close(report_sink)
        threading.Thread(target=self._read_reports, args=(report_source,), daemon=True).start()

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
        """Send an order to the program; see `ray_program`. If it has ended, nothing happens."""
        self._send(order, payload)

    def hear(self) -> bytes | None:
        """Wait for the next message of the program, and return it. Return None if it has ended."""
        return self._reports.get()

    def signal(self, number: int) -> None:
        """Send a signal to the program, which already has an order. If it has ended, nothing happens."""
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
        """Append data to a file, before the program has its order."""
        path = Path(self._folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def end(self, hurried: bool) -> None:
        """Let the program leave the run and end, or kill it if this must happen immediately. Remove its files."""
        if hurried:
            self.signal(signal.SIGKILL)
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._ended.wait(END_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, *frames: bytes) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            for frame in frames:
                write_frame(self._orders, frame)

    def _read_reports(self, descriptor: int) -> None:
        with open(descriptor, "rb") as source:
            while (report := read_frame(source)) is not None:
                self._reports.put(report)
        self._ended.set()
        self._reports.put(None)
