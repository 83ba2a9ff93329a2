"""The programs beside a run: one serves the run of a scheduled job; others digest its traces, simulate it, or show it.

Each program is a `Companion`. This module starts the programs, gives them orders, and interprets how they end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ..core.auto import Prospect
from ..core.requests import Situation
from ..errors import ConfigurationError
from ..files import read_regular
from ..look.show_process import Listening, Outlets, ServedSocket, ShowOrder
from ..run.job import Job
from ..run.traces import BestEffortFile
from ..wire.secure import without_secret
from .processes.interruption import Interruption
from .processes.program import Companion, end_with_parent, main_of
from .terminal import plain_console, print_sentence


class Announcement(msgspec.Struct, frozen=True):
    """The message that says how processes can join a run.

    Attributes:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        run_dir: the run directory, on the machine that serves the run.
        secret_file: the file that contains the secret, if the secret is new; else "".
        failure: why there is no run to join; "" if there is a run.
    """

    address: str
    run_dir: str
    secret_file: str = ""
    failure: str = ""


def announce(descriptor: int, announcement: Announcement) -> None:
    """Tell the parent of this process how processes join the run."""
    with open(descriptor, "wb") as target:
        target.write(msgspec.json.encode(announcement))


@contextlib.contextmanager
def serving(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[Companion, Callable[[], Announcement | None]]]:
    """Start `paceline serve` as a child of this process, which is the first process of a scheduler's job.

    The child ignores SIGTERM, SIGHUP and SIGQUIT, and its servers inherit this. Schedulers send such signals to all
    processes, but the servers must still receive the last pushes of the workers. If the run is still in progress at the
    end of the context, the child receives SIGINT, which interrupts the run as Ctrl-C does. The child has a process
    group of its own, so that it does not receive the user's Ctrl-C, too, and count two signals. The child ends even if
    a server is silent, because it does not wait for such a server forever.

    Args:
        arguments: options of the command.
        environment: variables that are added to the environment.

    Returns:
        The program, and a function that waits until the run can be joined. If the run could not be started,
        this function returns None, and the program has said why.
    """
    source, sink = os.pipe()
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def announced() -> Announcement | None:
        data = announcements.read()
        return msgspec.json.decode(data, type=Announcement) if data else None

    with open(source, "rb") as announcements:
        try:
            program = Companion(
                [*main_of("paceline.cli"), "serve", *arguments, f"--announce={sink}"],
                signal.SIGINT,
                heard=False,
                stdin=subprocess.DEVNULL,
                environment={**os.environ, **environment},
                pass_fds=[sink],
                process_group=0,
                preexec_fn=prepare,
            )
        finally:
            os.close(sink)
        try:
            yield program, announced
        finally:
            program.end(lambda: True)


def finished(run_dir: str) -> bool:
    """Return True if a run has ended because its workers have finished, and not because they were asked to leave."""
    try:
        summary = json.loads(read_regular(Path(run_dir, "summary.json")))
    except (OSError, ValueError):
        return False
    return summary["ended"] == "finished" and not summary["left"]


def digesting(job: Job) -> Companion:
    """Start the program that digests the oldest traces of a run and deletes them. See `paceline.trace.digest`.

    The program has a session of its own, because Ctrl-C in a terminal must not end it.
    """
    shards = [shard for shard, server in enumerate(job.placement.server_of) if server < job.local_servers]
    # Machines that have joined the run keep the records of their workers.
    workers = () if job.joined else range(job.workers)
    return Companion(
        [
            *main_of("paceline.trace.digest"),
            job.run_dir,
            f"--shards={','.join(map(str, shards))}",
            f"--workers={','.join(map(str, workers))}",
        ],
        start_new_session=True,
    )


# -- Simulations beside a live run, with which `--sync auto` chooses sync models -----------------------------
#
# Each simulation is a process of its own with a low priority, so that the coordinator never waits for it. A
# thread waits for its results. If a simulation fails, or takes too long, the run goes on with its present sync model.

log = logging.getLogger("paceline.rehearsal")

TIMEOUT_S = 120.0


class Rehearsals:
    """A context manager that starts the simulations of a run, one after another, and ends them.

    An object of this class is a `run.coordinator.Rehearsal`.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread()

    def __enter__(self) -> Rehearsals:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def __call__(self, situation: Situation, take: Callable[[Sequence[Prospect]], None]) -> None:
        """Start a simulation, unless another one is in progress. `take` gets the results; none if it fails."""
        if self._over.is_set() or self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=self._rehearse, args=(situation, take), name="paceline-rehearsal", daemon=True
        )
        self._thread.start()

    def _rehearse(self, situation: Situation, take: Callable[[Sequence[Prospect]], None]) -> None:
        """Simulate, and pass on the results; none if the simulation fails."""
        deadline_s = time.monotonic() + TIMEOUT_S
        try:
            program = Companion(main_of("paceline.sim.rehearse"), start_new_session=True)
        except OSError as error:
            log.warning("a simulation for --sync auto cannot be started: %s", error)
            return take([])
        in_time = program.end(
            lambda: self._over.is_set() or time.monotonic() > deadline_s, msgspec.msgpack.encode(situation)
        )
        if program.exit_code == 0:
            take(msgspec.msgpack.decode(program.said, type=list[Prospect]))
        elif not self._over.is_set():
            why = program.last if in_time else f"it took longer than {TIMEOUT_S:g} s"
            log.warning("a simulation for --sync auto has failed: %s", why)
            take([])


# -- The process that shows a run elsewhere while it goes on (see `look.show_process`), as the launcher starts it

# Maximum time to wait until everything is written and every open page has been told that the run has ended.
END_TIMEOUT_S = 20.0
LOG = "outlets.log"  # in the run directory, if there is anything to say
PROGRAM = main_of("paceline.look.show_process")


@contextlib.contextmanager
def showing(outlets: Outlets, job: Job, address: str, interruption: Interruption) -> Iterator[str]:
    """Start the process that shows a run. When the context ends, this process shows the end of the run, and exits.

    Enter the context when the run directory exists, and leave it when all files in this directory are complete.
    Without an outlet, nothing is started.

    Args:
        outlets: where the run is shown. Their sockets are closed here as soon as the process has them.
        job: the configuration of the run.
        address: address of the coordinator.
        interruption: counter of the signals that ask the run to end.

    Returns:
        Address of the live page, with its token; "" if there is none.
    """
    if not outlets:
        yield ""
        return
    token = secrets.token_urlsafe(24)
    page = "" if outlets.dashboard is None else f"{_url(outlets.dashboard)}/?token={token}"
    order = ShowOrder(
        run_dir=job.run_dir,
        address=address,
        secret=job.token,
        dashboard=_served(outlets.dashboard),
        token=token,
        metrics=_served(outlets.metrics),
        tensorboard=outlets.tensorboard and os.path.join(outlets.tensorboard, Path(job.run_dir).name),
    )
    try:
        program = Companion(
            PROGRAM,
            environment={**without_secret(os.environ), "OMP_NUM_THREADS": "1"},
            pass_fds=[each.descriptor for each in (order.dashboard, order.metrics) if each is not None],
            # In its own process group, the process does not receive Ctrl-C. If the process had a session of its own,
            # its low priority would have no effect on the processes of the run, because the kernel shares out time by
            # session.
            process_group=0,
        )
    except OSError as error:
        raise ConfigurationError(f"the process that shows the run cannot be started: {error}") from error
    finally:
        outlets.close()
    program.tell(msgspec.json.encode(order) + b"\n")
    if page:
        _say(f"dashboard: {page}")
    if outlets.metrics is not None:
        _say(f"metrics: {_url(outlets.metrics)}/metrics")
    if outlets.tensorboard:
        _say(f"TensorBoard: tensorboard --logdir {outlets.tensorboard}")
    try:
        yield page
    finally:
        program.tell(b"\n")
        deadline_s, before = time.monotonic() + END_TIMEOUT_S, interruption.count

        def over() -> bool:
            """Return True after the timeout, or after a signal: the run has ended, so Ctrl-C ends this wait only."""
            signaled = interruption.count > before or interruption.hurried()
            return signaled or time.monotonic() > deadline_s

        if not program.end(over) and time.monotonic() > deadline_s:
            _say(
                f"note: the process that shows the run did not end within {END_TIMEOUT_S:g} s, and was killed"
            )
        if (code := program.exit_code or 0) > 0:
            _say(f"note: {program.last or f'the process that shows the run has exited with code {code}'}")
        if program.complaint:
            file = BestEffortFile(Path(job.run_dir, LOG), _say)
            file.write(program.complaint.encode())
            file.close()


def _say(sentence: str) -> None:
    """Tell the user a sentence, even if no progress is shown: the user has asked for an outlet."""
    print_sentence(plain_console(stderr=True), sentence)


def _served(listening: Listening | None) -> ServedSocket | None:
    """Return the descriptor and the address of a socket, for the process that inherits the socket."""
    return (
        None if listening is None else ServedSocket(listening.sock.fileno(), listening.host, listening.port)
    )


def _url(listening: Listening) -> str:
    """Return the address of a page. If other machines may read the page, its host is the name of this machine."""
    host = socket.gethostname() if listening.host in ("0.0.0.0", "::") else listening.host
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.port}"
