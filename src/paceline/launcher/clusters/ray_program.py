"""The program under an actor of Ray (see `ray_host`): it serves a run, or joins it with one worker.

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
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

import cloudpickle
import msgspec
from msgspec import structs
from rich.console import Console

from ... import __version__
from ...errors import ConfigurationError, PacelineError, PeerLostError, RunFailedError
from ...plugins import load_models
from ...plugins.user_conditions import local_conditions
from ...runtime.job import Job
from ..live_run.local import HostMachine, Placement
from ..processes.devices import device_of_process
from ..processes.interruption import Interrupted, Terminated
from ..processes.starting import Starter
from ..terminal.channels import Streams
from ..terminal.output import plain_console
from .join import join
from .ray_host import read_frame, write_frame

__all__ = ["Ended", "JoinOrder", "Order", "Report", "ServeOrder", "Served", "main"]

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


class Served(msgspec.Struct, frozen=True, tag="served"):
    """The run can be joined.

    Attributes:
        address: address of the coordinator.
    """

    address: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
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
Report = Served | Ended


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
                ended = _serve(order, payload, console, starter, lambda where: report(Served(where)))
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


def _join(order: JoinOrder, payload: bytes, folder: str, console: Console, starter: Starter) -> Ended:
    device = device_of_process(0)  # Ray hides the accelerators that are not for this worker
    objects = io.BytesIO(payload)
    path = cloudpickle.dumps(search_path(cloudpickle.load(objects)))
    try:
        joined = join(
            order.address,
            order.token,
            ["function"],
            worker_payload=path + objects.read(),
            version=__version__,
            workers=1,
            console=console,
            run_dir=folder,
            streams=Streams(show_all=order.show_all),
            shown="worker 0",
            starter=starter,
            devices=[] if device is None else [device],
        )
    except (Interrupted, Terminated) as end:
        return Ended("left", end.words)
    except (ConfigurationError, PeerLostError) as error:
        return Ended("refused", str(error))
    except PacelineError as error:
        return Ended("failed", str(error))
    return Ended("finished" if joined.finished else "lost")


def _serve(
    order: ServeOrder,
    payload: bytes,
    console: Console,
    starter: Starter,
    served: Callable[[str], None],
) -> Ended:
    from ..live_run.run import start

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
            placement=Placement(order.host, (HostMachine(order.host),) * job.servers, ()),
            starter=starter,
            listening=lambda address, job: served(address),
            command=order.command,
            source=order.source,
            interrupted=order.interrupted,
            lock_token=order.lock,
        )
    except (Interrupted, Terminated) as end:
        return Ended("interrupted", end.words, result=pickle.dumps((end.summary, [], ())))
    except (ConfigurationError, RunFailedError) as error:
        return Ended("failed", str(error), error=pickle.dumps(error))
    return Ended("finished", result=pickle.dumps((result.summary, result.snapshots, result.problems)))
