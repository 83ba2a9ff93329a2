"""A process that a scheduler has started: it joins the job, and if it is the first one, it also serves the job.

Each process runs one worker as a child. So a worker that is lost or leaves does not end the process, for which the
scheduler might end or restart the whole job. A process fails only if the job does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs
from rich.console import Console

from ...errors import ConfigurationError, PeerLostError, RunFailedError
from ...runtime.compute_devices import Device
from ...runtime.resuming import can_resume
from ...wire.addresses import seen_from
from ...wire.secret import VARIABLE, read_secret
from ...wire.tcp import interface_to, is_local
from ..live_run.run_description import command_line
from ..processes.interruption import Interruption, Terminated
from ..processes.serving import Announcement, Serving, finished
from ..terminal.channels import Streams
from ..terminal.output import print_sentence
from .environments import Place, Store
from .join import join

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["join_job", "listening_address"]

POLL_INTERVAL_S = 0.2
# Time that the other workers have to leave after the worker of the first process has left.
LEAVE_TIMEOUT_S = 5.0
EXIT_FINISHED = (0, 3)  # exit codes of a run that has finished

ANYWHERE = ("0.0.0.0", "::", "[::]")


def listening_address(place: Place, listen: str) -> str:
    """Return the address at which the other processes of the job reach the first one, which is this process.

    Args:
        place: the place of this process.
        listen: the address of this machine that the user has chosen; "" for that of the interface over which this
            machine reaches the host that the scheduler has named, and all others do.

    Raises:
        ConfigurationError: other machines cannot reach the address.
    """
    if listen and listen not in ANYWHERE:
        return listen
    address = interface_to(place.host)
    if is_local(f"tcp:{address}:0") and not (place.alone or is_local(f"tcp:{place.host}:0")):
        raise ConfigurationError(
            f"on this machine, the name {place.host!r} means {address}, which the other machines of the job cannot "
            "reach. Name the address on which they reach this machine with --listen."
        )
    return address


def join_job(
    place: Place,
    worker_arguments: Sequence[str],
    serve_arguments: Sequence[str],
    *,
    listen: str,
    port: int,
    token: str,
    version: str,
    console: Console,
    patience_s: float,
    run_dir: str | None,
    streams: Streams,
    device: Device | None = None,
    force: bool = False,
) -> int:
    """Run one worker of a job that a scheduler has started, until it has ended. The first process also serves it.

    Args:
        place: the place of this process.
        worker_arguments: what the worker runs; see `Order`.
        serve_arguments: the options with which the first process serves the job.
        listen: see `listening_address`.
        port: TCP port of the coordinator; 0 for the one that the scheduler implies or, if there is none, a free one.
        token: the secret of the job; "" for a new one, if all processes run on this machine.
        version: version of Paceline on this machine.
        console: console for messages.
        patience_s: number of seconds for which the first process is awaited.
        run_dir: run directory. If it has the checkpoint of a run that has not finished, the job resumes this run.
            Default: a new directory in ./runs.
        streams: what the user wants of the standard streams of the worker.
        device: the device of the worker; None if none is assigned.
        force: True to use the run directory although a run that is in progress holds it.

    Returns:
        The exit code of this process. A process whose worker is lost or leaves does not fail, unless it is the first
        one and the run ends because of that.

    Raises:
        ConfigurationError: an input is not valid, or the job does not accept this process.
        PeerLostError: the first process cannot be reached.
        RunFailedError: the job has failed.
        Terminated: this process serves the job, and was asked to leave before the job had finished.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    port = port or place.port

    def work(meeting: Announcement) -> None:
        join(
            meeting.address,
            token or read_secret(Path(meeting.secret_file)),
            worker_arguments,
            version=version,
            workers=1,
            indices=[place.index],
            console=console,
            patience_s=patience_s,
            # Logs of processes with the same file system are in one directory.
            run_dir=run_dir or str(Path("runs", Path(meeting.run_dir).name)),
            streams=streams,
            devices=[] if device is None else [device],
        )

    if not place.serves:
        meeting = _meeting(place, listen, port, patience_s)
        try:
            work(meeting)
        except Terminated as end:
            if end.number != signal.SIGTERM:
                raise
            print_sentence(console, f"left the run: {end.words}")
        return 0
    reached = listening_address(place, listen)
    where = [f"--listen={listen or reached}", f"--port={port}", f"--command={command_line()}"]
    if folder := run_dir or (None if place.store else f"runs/{place.name}"):
        where.append(f"--resume={folder}" if can_resume(Path(folder), force=force) else f"--run-dir={folder}")
    with Serving([*serve_arguments, *where], {VARIABLE: token} if token else {}) as serving:
        store = None if place.store is None else _store(place.store, patience_s, serves=True)
        found = serving.announced()
        if found is None:
            if store is not None and place.store is not None:
                failed = Announcement("", "", failure="its first process could not start it, and says why")
                store.set(place.store.key, msgspec.json.encode(failed).decode())
            return serving.wait(lambda: 0.0) or 1
        meeting = structs.replace(found, address=seen_from(found.address, f"tls:{reached}:0"))
        if store is not None and place.store is not None:
            store.set(place.store.key, msgspec.json.encode(meeting).decode())
        asked: Terminated | None = None
        try:
            work(meeting)
        except Terminated as end:
            asked = end
        except RunFailedError as error:  # the run may continue without this worker
            print_sentence(console, str(error))
        code = _await_end(serving, asked is not None)
        if asked is not None and not (code in EXIT_FINISHED and finished(meeting.run_dir)):
            raise asked
        return 0 if code in EXIT_FINISHED else code


def _await_end(serving: Serving, leaving: bool) -> int:
    """Wait for the end of the run, and return the exit code of the program that serves it.

    When the machine is about to be taken away, the other workers usually leave, too. If not, the run is interrupted,
    so that it can still save its weights.
    """
    with Interruption() as interruption:
        asked_s = time.monotonic() if leaving else None

        def deadline_s() -> float:
            nonlocal asked_s
            if interruption.asked and asked_s is None:
                asked_s = time.monotonic()
            return float("inf") if asked_s is None else asked_s + LEAVE_TIMEOUT_S

        return serving.wait(deadline_s)


def _meeting(place: Place, listen: str, port: int, patience_s: float) -> Announcement:
    """Return how this process joins the run that the first process serves."""
    if place.store is None:
        host = listen if listen and listen not in ANYWHERE else place.host
        return Announcement(f"tls:{host}:{port}", place.name)
    store = _store(place.store, patience_s, serves=False)
    deadline_s = time.monotonic() + patience_s
    while not store.check([place.store.key]):
        if time.monotonic() > deadline_s:
            raise PeerLostError(
                f"the first process of the job has not published its address within {patience_s:g} s; wait longer "
                "with --wait, and look at its output"
            )
        time.sleep(POLL_INTERVAL_S)
    meeting = msgspec.json.decode(store.get(place.store.key), type=Announcement)
    if meeting.failure:
        raise RunFailedError("the run", meeting.failure)
    return meeting


def _store(store: Store, patience_s: float, *, serves: bool) -> TCPStore:
    """Return a connection to the store of a job. It contains no secrets, because anybody may connect to it."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(
            store.host,
            store.port,
            is_master=store.hosted and serves,
            timeout=timedelta(seconds=max(1.0, patience_s)),
        )
    except DistError as error:
        raise PeerLostError(
            f"the store of the job at {store.host}:{store.port} cannot be reached: {error}"
        ) from error
