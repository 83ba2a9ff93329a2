"""Joining a run: a machine offers to run some workers, and perhaps some servers, and its agent looks after them.

The coordinator replies with the indices of these workers and servers, and with the configuration of the run. From then
on, they are processes as in a run on one machine, except that the coordinator and other processes are on other
machines.

A machine that brings servers listens on one port for all of them, as the machine that serves the run does. The run
cannot continue without these servers. So if a machine with servers loses its connection to the coordinator, it does not
join again. A machine without servers joins again, with those of its workers that were cut off.

When the run has lost a server and goes on from a checkpoint, the coordinator says so. Then every machine ends its
processes and joins the run again, with as many workers and servers as before.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
from msgspec import structs
from rich.console import Console

from ..checkpoints.manifest import MANIFEST, REST, Pace, origin_of, read_manifest, require_intact
from ..core.liveness import Heartbeats
from ..core.messages import (
    MOST_WORDS,
    CheckpointPiece,
    FetchCheckpoint,
    HeartbeatAnswered,
    Hello,
    KillOrdered,
    MachineAdmitted,
    MachineJoined,
    MachineLeaving,
    MainChosen,
    Message,
    ProcessEnded,
    ProcessState,
    Refused,
    RunEnded,
    RunResumes,
    ServerEnded,
    TakenOut,
    first_phase,
)
from ..errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    PacelineError,
    PeerLostError,
    ProtocolError,
    RunFailedError,
)
from ..files import read_regular
from ..run.compute_devices import Device
from ..run.installed import installed
from ..run.job import Job, ResumedFrom, claim_run_dir, decode_job
from ..run.listener import Listener
from ..run.observer import call
from ..run.run_lock import RunningProcess
from ..wire.secure import Contexts, SecureSocket, contexts
from ..wire.stream import Stream, no_payload
from ..wire.transports import TCP, is_local, seen_from
from .local import FIRST_PAUSE_S, MOST_REJOINS, HostMachine, LocalEngine, Process, Rejoins
from .processes.interruption import Interruption
from .processes.orders import payload_of_server
from .processes.program import EXIT_PEER_LOST
from .processes.spawn import Starter
from .terminal import Channels, PlainScreen, StandardStreams, print_sentence

RETRY_INTERVAL_S = 0.5
# Maximum duration of one attempt to connect to the coordinator.
ATTEMPT_S = 60.0
# Time after which the connection to the coordinator is given up if the coordinator's machine acknowledges nothing. That
# machine acknowledges what it receives even if the coordinator is suspended. If the link is broken, a coordinator that
# is not suspended has taken this machine out of the run within this time.
SILENCE_MS = 10_000


class Joined(NamedTuple):
    """A description of how the processes of this machine have ended.

    Attributes:
        run_dir: the directory of the processes' logs.
        finished: True if a worker has finished its script, or there was no worker; False if all workers were lost.
        endings: how the process of each worker has ended, for the user.
    """

    run_dir: Path
    finished: bool
    endings: str

    @classmethod
    def of(cls, run_dir: str, engine: LocalEngine) -> Joined:
        """Return how the processes of an engine have ended."""
        endings = [f"{process.name}: {process.ending}" for process in engine.workers.values()]
        return cls(Path(run_dir), engine.finished or not engine.workers, "; ".join(endings))


class ServerOffer(msgspec.Struct, frozen=True):
    """The servers that a machine brings.

    Attributes:
        count: number of servers.
        listen: address of this machine on which the workers reach the servers; "" for the address from which this
            machine reaches the coordinator, "0.0.0.0" or "::" for all addresses.
        port: TCP port of the servers; 0 for any free port.
        path: module search path from which the servers import user-defined objects.
        devices: see `Job.server_devices`.
    """

    count: int
    listen: str = ""
    port: int = 0
    path: Sequence[str] = ()
    devices: tuple[Device, ...] = ()


def join(
    address: str,
    token: str,
    worker_arguments: Sequence[str],
    *,
    worker_payload: bytes = b"",
    version: str,
    workers: int,
    indices: Sequence[int] = (),
    servers: ServerOffer | None = None,
    console: Console,
    patience_s: float = 60.0,
    rejoins: int = MOST_REJOINS,
    run_dir: str | None = None,
    streams: StandardStreams | None = None,
    shown: str = "",
    starter: Starter | None = None,
    devices: Sequence[Device] = (),
    imports: Sequence[str] = (),
) -> Joined:
    """Run processes of a run on this machine, and return when these processes have ended.

    Workers that are taken out of the run join it again (see `start.local`).

    Args:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        token: the secret of the run.
        worker_arguments: the script, module or function that each worker runs; see `ProcessOrder`.
        worker_payload: the objects that are sent to each worker.
        version: version of Paceline on this machine.
        workers: number of workers to start on this machine.
        indices: the indices that these workers get if these indices are free.
        servers: the servers that this machine brings, if any.
        console: console for messages.
        patience_s: number of seconds for which this machine tries to reach the coordinator.
        rejoins: maximum number of times that workers join again after they were taken out of the run.
        run_dir: directory of the workers' logs. Default: a new directory in ./runs.
        streams: how the user wants to use the standard streams of the workers.
        shown: name of the worker whose output is shown. Default: the first worker on this machine.
        starter: starts the workers when they join for the first time; by default, a new starter.
        devices: the device of each worker; () if none is assigned.
        imports: modules that the workers of this machine import besides those of the run.

    Raises:
        ConfigurationError: the run does not accept this machine, or this machine cannot listen for its servers.
        PeerLostError: the coordinator cannot be reached, or the connection to it was lost and this machine does not
            join again.
        RunFailedError: the run failed, or a process on this machine failed.
        KeyboardInterrupt: Ctrl-C was pressed; all processes on this machine have ended.
    """
    rejoining = Rejoins(rejoins)
    folder, wanted = run_dir or "", workers
    with Interruption(suspends=True) as interruption:
        first = True
        reason: PacelineError
        while True:
            stream = _call(address, contexts(token), patience_s, console, interruption)
            opened = contextlib.ExitStack()  # closed before this machine joins again
            try:
                sock, listens_at = None, "tls:"
                if servers is not None:
                    sock, listens_at = _listen(servers, stream.sock.getsockname()[0], console)
                    opened.callback(sock.close)
                count = 0 if servers is None else servers.count
                unpickles = bool(worker_payload)
                offer = MachineJoined(version, wanted, tuple(indices), count, installed(), unpickles)
                checkpoint, admitted = _ask_to_join(stream, address, token, offer, opened, interruption)
                if taken := ", ".join(str(index) for index in indices if index not in admitted.workers):
                    print_sentence(console, f"the worker index {taken} is not free")
                job = decode_job(admitted.job, admitted.now_ticks)
                if checkpoint is not None:
                    job = structs.replace(job, resumed=ResumedFrom(str(checkpoint)))
                of_servers = () if servers is None else servers.devices
                job = claim_run_dir(structs.replace(job, run_dir=folder, server_devices=of_servers))
                folder, first = job.run_dir, False
                listener = None
                if sock is not None:
                    listener = opened.enter_context(Listener(sock, bytes.fromhex(job.mark)))
                    names = process_names("server", admitted.servers)
                    print_sentence(console, f"brings {names}, reached at {listens_at}")
                with starter or Starter([()] * (wanted + count)) as processes:
                    starter = None
                    channels = Channels(
                        streams or StandardStreams(),
                        None,
                        PlainScreen(),
                        shown=shown or (f"worker {min(admitted.workers)}" if admitted.workers else ""),
                    )
                    engine = LocalEngine(
                        job,
                        address,
                        processes,
                        channels,
                        lambda worker, how: None,
                        admitted.machine,
                        listener,
                        listens_at,
                        imports,
                    )
                    agent = Agent(job, engine, channels, stream, console, interruption, rejoining)
                    if servers is not None:
                        agent.start_servers(admitted.servers, payload_of_server(servers.path, {}))
                    placed = dict(zip(admitted.workers, devices, strict=True)) if devices else {}
                    agent.carry_out(admitted.workers, worker_arguments, worker_payload, placed)
                return Joined.of(folder, engine)
            except CutOffError as error:
                if servers is not None and not error.resumes:
                    raise
                if servers is None and not error.workers:
                    # It is unknown whether the run keeps the work of the finished workers.
                    if engine.finished:
                        raise
                    return Joined.of(folder, engine)
                wanted, indices = len(error.workers), error.workers
                devices = [agent.devices[worker] for worker in error.workers if worker in agent.devices]
                reason, pause_s = error, FIRST_PAUSE_S if error.resumes else rejoining.pause_s()
            except UnansweredError as error:
                reason, pause_s = error, rejoining.pause_s()
            except ConfigurationError as error:
                if first:
                    raise
                reason, pause_s = error, rejoining.pause_s()
            finally:
                opened.close()
                stream.close()
            if pause_s is None:
                raise reason
            print_sentence(console, f"{reason}; joining again in {pause_s:g} s")
            deadline_s = time.monotonic() + pause_s
            while time.monotonic() < deadline_s:
                _look(interruption, "all workers on this machine have ended")
                time.sleep(POLL_INTERVAL_S)


class UnansweredError(PeerLostError):
    """The connection was lost before the coordinator had answered the offer of this machine."""


def _listen(servers: ServerOffer, own: str, console: Console) -> tuple[socket.socket, str]:
    """Return a socket that listens for the servers of this machine, and the address at which they are reached.

    Args:
        servers: the servers.
        own: the address from which this machine has reached the coordinator.
        console: console for messages.

    Raises:
        ConfigurationError: this machine cannot listen at this address.
    """
    sock, address = TCP.listen(servers.listen or own, servers.port, secure=True)
    host = f"[{own}]" if ":" in own else own
    listens_at = seen_from(address, f"tls:{host}:0")
    if is_local(listens_at):
        print_sentence(
            console,
            f"the servers of this machine are reached at {listens_at}, so only workers on this machine can use them. "
            "Use --listen to name the address on which the other machines reach this machine.",
        )
    return sock, listens_at


def _call(
    address: str, known: Contexts, patience_s: float, console: Console, interruption: Interruption
) -> Stream[Message]:
    """Return a connection to the coordinator. If the connection fails, try again for `patience_s` seconds."""
    deadline_s = time.monotonic() + patience_s
    told = False
    while True:
        try:
            attempt_s = min(ATTEMPT_S, max(1.0, deadline_s - time.monotonic()))
            sock = _connected(address, attempt_s, known, interruption)
            stream: Stream[Message] = Stream(sock, first_phase("coordinator", "agent"))
            with contextlib.suppress(OSError):  # if the connection is lost, the first message will fail
                stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
            return stream
        except PeerLostError as error:
            if interruption.asked:
                raise interruption.exception("no worker was started", {}) from error
            if time.monotonic() > deadline_s:
                raise PeerLostError(f"{error}; gave up after {patience_s:g} s") from error
            if not told:
                limit = "" if math.isinf(patience_s) else f" for {patience_s:g} s"
                print_sentence(console, f"{error}; trying again{limit}")
                told = True
            time.sleep(RETRY_INTERVAL_S)


def _connected(
    address: str, timeout_s: float, known: Contexts, interruption: Interruption
) -> socket.socket | SecureSocket:
    """Return a connection to the coordinator, as `call` does, unless a signal asks this program to end.

    A handler that only counts signals does not end a system call. So another thread connects, and this thread watches
    the count. After a signal, the other thread is left behind, and ends with the program.
    """
    connecting: Future[socket.socket | SecureSocket] = Future()
    arguments = connecting, address, timeout_s, known
    threading.Thread(target=_connect, args=arguments, name="paceline-call", daemon=True).start()
    del arguments
    try:
        while not wait([connecting], POLL_INTERVAL_S).done:
            _look(interruption)
        return connecting.result()
    except BaseException:
        connecting.add_done_callback(_close)
        raise
    finally:
        del connecting  # its exception refers to this frame, which would keep the exception alive


def _connect(
    connecting: Future[socket.socket | SecureSocket], address: str, timeout_s: float, known: Contexts
) -> None:
    try:
        connecting.set_result(call(address, timeout_s, known))
    except BaseException as error:
        connecting.set_exception(error)
    finally:
        del connecting


def _close(connecting: Future[socket.socket | SecureSocket]) -> None:
    if connecting.exception() is None:
        connecting.result().close()


def _look(interruption: Interruption, words: str = "no worker was started") -> None:
    """Stop this process if Ctrl-Z was pressed. Raise the exception for a signal that asks this program to end.

    Args:
        interruption: counter of the signals.
        words: message of the exception, which says which processes have ended.
    """
    if interruption.suspended:
        interruption.suspend()
    if interruption.asked:
        raise interruption.exception(words, {})


def _ask_to_join(
    stream: Stream[Message],
    address: str,
    token: str,
    offer: MachineJoined,
    opened: contextlib.ExitStack,
    interruption: Interruption,
) -> tuple[Path | None, MachineAdmitted]:
    """Offer to run processes for the run, and wait for the coordinator's answer.

    Returns:
        The directory of the checkpoint with which the run begins (perhaps a copy, which `opened` removes), and the
        answer of the coordinator.
    """
    try:
        stream.send(Hello(token, "agent", 0))
        # The checkpoint comes before the offer, because fetching it may take long, and an admitted machine must send
        # heartbeats.
        checkpoint = fetch_checkpoint(
            stream,
            lambda: opened.enter_context(TemporaryDirectory(prefix="paceline-")),
            lambda: _look(interruption),
        )
        stream.send(offer)
        answer = stream.wait()
    except (PeerLostError, DeadlineError) as error:
        raise UnansweredError(
            f"the connection to the coordinator at {address} was lost before it had answered: {error}"
        ) from error
    if isinstance(answer, Refused):
        raise ConfigurationError(answer.reason)
    if not isinstance(answer, MachineAdmitted):
        raise ProtocolError(f"the coordinator sent {type(answer).__name__}, expected MachineAdmitted")
    return checkpoint, answer


# -- The checkpoint with which a run begins, on a machine that joins the run and does not see its directory


class _Piece(NamedTuple):
    """A piece of a file, and the coordinator's message about the checkpoint."""

    about: CheckpointPiece
    data: bytearray


def fetch_checkpoint(
    stream: Stream[Message], space: Callable[[], str], look: Callable[[], None]
) -> Path | None:
    """Return the directory of the checkpoint with which a run begins; None if there is none.

    If this machine does not see the directory of the run, the files are fetched. While the run trains, there are
    pauses between the pieces, in which training can use the link.

    Args:
        stream: a connection to the coordinator on which the greeting has been sent.
        space: called if the files must be fetched. This function creates an empty directory for the files, and returns
            the path.
        look: called before each piece. This function may raise an exception.

    Raises:
        CheckpointError: the files cannot be written, or have not arrived intact.
        ConfigurationError: the coordinator cannot read the checkpoint.
        DeadlineError: the coordinator does not answer.
        PeerLostError: the connection is lost.
    """
    pieces = list(_pieces(stream, MANIFEST, look))
    if not (path := pieces[0].about.path):
        return None
    manifest = b"".join(piece.data for piece in pieces)
    try:
        if read_regular(Path(path, MANIFEST)) == manifest:
            return Path(path)
    except OSError:
        pass  # this machine does not see the directory
    try:
        folder = Path(space(), origin_of(Path(path)))
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_bytes(manifest)
        found = read_manifest(folder)
        for name in found.files:
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("wb") as file:
                for piece in _pieces(stream, name, look):
                    file.write(piece.data)
        require_intact(folder, found, Pace())
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of the run cannot be copied to this machine: {error.strerror or error}"
        ) from error
    return folder


def _pieces(stream: Stream[Message], name: str, look: Callable[[], None]) -> Iterator[_Piece]:
    """Fetch a file, and yield its pieces. The last piece is empty."""
    begin = 0
    while True:
        look()
        asked_s = time.monotonic()
        data = bytearray()

        def target(message: Message, size_bytes: int, data: bytearray = data) -> list[memoryview]:
            data.extend(bytes(size_bytes))
            return [memoryview(data)] if size_bytes else []

        stream.sink = target
        stream.send(FetchCheckpoint(name, begin))
        about = stream.wait()
        stream.sink = no_payload
        if isinstance(about, Refused):
            raise ConfigurationError(about.reason)
        if not isinstance(about, CheckpointPiece):
            raise ProtocolError(f"the coordinator sent {type(about).__name__}, expected CheckpointPiece")
        yield _Piece(about, data)
        if not data:
            return
        begin += len(data)
        if about.begun:
            time.sleep(REST * (time.monotonic() - asked_s))


# -- The agent of a machine in a run: it starts the processes of its machine, and reports how they end --------
#
# The agent carries out the orders that the coordinator sends over the connection on which it has admitted the
# machine (see `join`), and sends heartbeats. Workers that were taken out of the run join it again on the same
# connection. If the connection is lost, the agent ends all processes.
#
# The run cannot continue without the servers that a machine brings. So these servers run until the coordinator ends
# them, and the agent runs until then, too. When the agent is asked to leave, it tells the coordinator.

NO_DEVICES: Mapping[int, Device] = {}
POLL_INTERVAL_S = 0.05
# Maximum time to wait for the workers to exit by themselves after the run is over, or after they were asked to leave.
GRACE_S = 10.0


class CutOffError(PeerLostError):
    """The connection to the coordinator was lost, so this machine is no longer part of the run.

    Attributes:
        workers: the workers that join the run again if this machine joins it again.
        resumes: True if the run goes on from a checkpoint, so that its coordinator expects this machine again.
    """

    def __init__(self, words: str, workers: Sequence[int], *, resumes: bool = False) -> None:
        super().__init__(words, workers)
        self.words = words
        self.workers = workers
        self.resumes = resumes

    def __str__(self) -> str:
        return self.words


class _Hosted(msgspec.Struct):
    """A worker of this machine.

    Attributes:
        incarnation: incarnation of the worker.
        running: process of the worker; None until this process has been started.
        taken_out_s: None while the worker takes part in the run. After the worker was taken out, the time since which
            its process has been running again; inf while its process is not running.
        excluded: True if the worker was taken out for good.
        gone: True if the worker has ended and never joins again.
        reported: True if the worker's end has been reported.
    """

    incarnation: int
    running: RunningProcess | None = None
    taken_out_s: float | None = None
    excluded: bool = False
    gone: bool = False
    reported: bool = False


class Agent:
    """Starts the processes of one machine, and monitors them until they have ended.

    Args:
        job: the configuration of the run, on this machine.
        engine: starts the processes.
        channels: the standard streams of the processes.
        stream: a connection to the coordinator, which has admitted this machine.
        console: console for messages.
        interruption: counter of the signals that ask this program to end.
        rejoins: counts how often workers of this machine have joined again.

    Attributes:
        devices: worker -> its device, for workers to which one is assigned.
    """

    def __init__(
        self,
        job: Job,
        engine: LocalEngine,
        channels: Channels,
        stream: Stream[Message],
        console: Console,
        interruption: Interruption,
        rejoins: Rejoins,
    ) -> None:
        self._job = job
        self._engine = engine
        self._channels = channels
        self._stream = stream
        self._console = console
        self._interruption = interruption
        self._rejoins = rejoins
        self._heartbeats = Heartbeats()
        self._arguments: Sequence[str] = ()
        self._payload = b""
        self.devices: dict[int, Device] = {}
        self._hosted: dict[int, _Hosted] = {}  # the last incarnation of each worker that was started here
        # (time at which a worker asks to join again, index of the worker), sorted
        self._due: list[tuple[float, int]] = []
        self._asked: int | None = (
            None  # the worker that has asked to join again, until the coordinator answers
        )
        # why the run has failed; "" if the run has succeeded; None while the run is in progress
        self._failure: str | None = None
        self._saved = False  # True once the results of the run have been saved, or saving has failed
        self._resumes = ""  # why the run goes on from a checkpoint; "" if it does not
        self._cut_off: CutOffError | None = None  # set if the connection to the coordinator was lost
        self._ended_servers: set[int] = set()  # servers whose end has been reported
        self._failed_server: RunFailedError | None = None  # the first server that has failed during the run
        # Time at which the connection to the coordinator was closed or lost; inf before.
        self._closed_s = math.inf

    def start_servers(self, servers: Iterable[int], payload: bytes) -> None:
        """Start servers, to which the objects in `payload` are sent. `carry_out` monitors them."""
        for server, device in zip(servers, cycle(self._job.server_devices or [None]), strict=False):
            self._engine.start("server", server, HostMachine(), payload, device=device)

    def carry_out(
        self,
        workers: Mapping[int, int],
        arguments: Sequence[str],
        payload: bytes,
        devices: Mapping[int, Device] = NO_DEVICES,
    ) -> None:
        """Start the workers, and wait until all processes have ended. See `join` for the exceptions.

        Args:
            workers: index of each worker -> its incarnation.
            arguments: the script, module or function that each worker runs; see `ProcessOrder`.
            payload: the objects that are sent to each worker.
            devices: worker -> its device, for workers to which one is assigned.

        Raises:
            CutOffError: the connection to the coordinator was lost; all processes have ended.
        """
        engine = self._engine
        self._arguments, self._payload = arguments, payload
        self.devices.update(devices)
        try:
            if workers:
                self._start(workers)
            deadline_s = math.inf  # time by which the workers must have ended
            # Heartbeats go on while the workers leave; otherwise, the coordinator would count them as lost.
            while self._busy and self._cut_off is None:
                self._hear()
                self._report_states()
                self._report_ends()
                if self._interruption.suspended and all(each.started for each in engine.processes):
                    self._suspend()
                if self._interruption.hurried():
                    break
                if deadline_s == math.inf and (self._interruption.asked or self._failure is not None):
                    deadline_s = time.monotonic() + GRACE_S
                    if self._interruption.asked:
                        self._leave()
                elif deadline_s == math.inf:
                    self._rejoin()
                if time.monotonic() > deadline_s:
                    if not (engine.servers or self._awaits_outcome):
                        break
                    for process in engine.workers.values():
                        process.kill()
        finally:
            engine.end(engine.processes, grace_s=0.0, hurried=self._interruption.hurried)
        self._report_ends()
        if self._interruption.asked:
            raise self._interruption.exception("all processes on this machine have ended", {})
        if self._cut_off is not None and self._cut_off.resumes:
            raise self._cut_off
        if failed := self._failed_server or engine.failed_worker():
            log = Path(self._job.run_dir, f"{failed.process.replace(' ', '-')}.log")
            failed.add_note(f"the output of {failed.process} is in {log}")
            raise failed
        if self._cut_off is not None:
            raise self._cut_off
        if self._failure:
            raise RunFailedError("the run", self._failure)

    def _suspend(self) -> None:
        """Stop all processes on this machine and this process, until this process is continued."""
        processes = self._engine.processes
        for process in processes:
            process.signal(signal.SIGSTOP)
        try:
            self._interruption.suspend()
        finally:
            for process in processes:
                process.signal(signal.SIGCONT)

    @property
    def _busy(self) -> bool:
        """True while the agent must go on.

        This is the case if a process has not ended yet, or a worker is about to join again, or the agent must still
        hear from the coordinator how the run ends.

        The coordinator collects the weights, and then tells the servers to end. If the servers have ended without
        being told, the coordinator is about to say that the run is over, or that the run goes on from a checkpoint.
        """
        if self._resumes and not self._interruption.asked:
            return True
        if servers := self._engine.servers:
            told = self._failure is not None or self._interruption.asked
            running = len(self._ended_servers) < len(servers)
            if not told or (running and time.monotonic() < self._closed_s + GRACE_S):
                return True
        if self._awaits_outcome:
            return True
        returns = bool(self._due) or self._asked is not None
        over = self._failure is not None or self._interruption.asked
        return (returns and not over) or not all(each.reported for each in self._hosted.values())

    @property
    def _knows_outcome(self) -> bool:
        """True if the coordinator has said how the run has ended, and will say nothing else."""
        return bool(self._failure) or self._saved

    @property
    def _awaits_outcome(self) -> bool:
        """True if workers of this machine have finished, and it is not known yet whether the run has kept their work.

        Without this check, the machine would report success even if the weights were lost at the end of the run.
        """
        lost = self._cut_off is not None or self._closed_s < math.inf
        return self._engine.finished and not (self._knows_outcome or self._interruption.asked or lost)

    def _start(self, workers: Mapping[int, int]) -> None:
        for worker, incarnation in workers.items():
            self._hosted[worker] = _Hosted(incarnation)
            self._engine.start(
                "worker",
                worker,
                HostMachine(),
                self._payload,
                self._arguments,
                incarnation,
                self.devices.get(worker),
            )
        print_sentence(self._console, f"joined as {process_names('worker', workers)}")

    def _leave(self) -> None:
        """Let the workers leave the run. If this machine has brought servers, the run loses them."""
        for process in self._engine.workers.values():
            process.signal(signal.SIGTERM)
        if self._engine.servers:
            names = process_names("server", self._engine.servers)
            resumes = self._job.on_server_loss == "resume"
            goes_on = "goes on from its newest checkpoint; if it has none, it " if resumes else ""
            print_sentence(
                self._console,
                f"without {names}, a run in progress {goes_on}saves its weights and ends. A second signal ends all "
                "processes on this machine immediately",
            )
            with contextlib.suppress(PeerLostError):  # `_hear` notices that the connection is lost
                self._stream.send(MachineLeaving())

    def _hear(self) -> None:
        """Handle the coordinator's messages. If there is no message, or the run is over, wait for a short time.

        A machine with servers handles messages even after the end of the run, until the coordinator closes the
        connection.
        """
        if (self._knows_outcome and not self._engine.servers) or self._closed_s < math.inf:
            time.sleep(POLL_INTERVAL_S)
            return
        ready = select.select([self._stream], [], [], POLL_INTERVAL_S)[0]
        if not ready:
            return
        try:
            for message in self._stream.receive():
                match message:
                    case KillOrdered(role, index, why):
                        if (process := self._engine.process(role, index)) is not None:
                            process.kill(why)
                    case TakenOut(worker, incarnation, reason, for_good) if (
                        worker in self._hosted and self._hosted[worker].incarnation == incarnation
                    ):
                        hosted = self._hosted[worker]
                        hosted.taken_out_s, hosted.excluded = math.inf, hosted.excluded or for_good
                        print_sentence(
                            self._console,
                            f"worker {worker} was taken out of the run: {reason}",
                        )
                    case MainChosen(worker):
                        if worker in self._hosted:
                            self._channels.show(f"worker {worker}")
                            print_sentence(
                                self._console,
                                f"worker {worker} is the main worker now; paceline.is_main() says so from the next "
                                "epoch on",
                            )
                    case RunEnded(failure, saved):
                        self._failure, self._saved = failure, saved
                    case RunResumes(words):
                        self._resumes = words
                    case HeartbeatAnswered():
                        self._heartbeats.answered(message, self._job.now_ticks())
                    case MachineAdmitted(workers) if self._asked is not None:
                        self._take_back(self._asked, workers)
                    case Refused(reason) if self._asked is not None:
                        worker, self._asked = self._asked, None
                        self._plan_return(worker, reason)
                    case _:
                        raise ProtocolError(f"the coordinator sent an unexpected {type(message).__name__}")
        except PeerLostError as error:
            self._closed_s = time.monotonic()
            if self._failure == "" and not self._saved:
                self._failure = (
                    f"the connection to the coordinator was lost before it had saved the results: {error}"
                )
            if self._failure is None:
                words = self._resumes or f"the connection to the coordinator was lost: {error}"
                self._cut_off = CutOffError(words, self._returning(), resumes=bool(self._resumes))

    def _returning(self) -> list[int]:
        """Return the workers that join the run again now that the connection is lost."""
        if (
            self._resumes
        ):  # the run goes on from a checkpoint, so workers that have finished their script return, too
            return sorted(w for w, each in self._hosted.items() if not (each.gone or each.excluded))
        cut_off = [
            worker
            for worker, process in self._engine.workers.items()
            if not self._hosted[worker].reported and process.exit_code in (None, EXIT_PEER_LOST)
        ]
        cut_off += [worker for _, worker in self._due]
        cut_off += [] if self._asked is None else [self._asked]
        return cut_off

    def _take_back(self, asked: int, workers: Mapping[int, int]) -> None:
        """Start a worker that has asked to join again."""
        device, self._asked = self.devices.pop(asked, None), None
        if device is not None:
            self.devices |= dict.fromkeys(workers, device)
        if asked not in workers:  # another machine has this index now
            self._engine.workers.pop(asked, None)
            self._hosted.pop(asked, None)
        self._start(workers)

    def _report_states(self) -> None:
        """Send a heartbeat with the states of the workers' processes if one is due."""
        states = []
        for worker, process in self._engine.workers.items():
            hosted = self._hosted[worker]
            if hosted.running is None and process.started:
                hosted.running = RunningProcess.of(process.id)
            if hosted.running is not None:
                state = hosted.running.state()
                states.append(ProcessState("worker", worker, state, hosted.incarnation))
                self._end_if_taken_out(hosted, process, runs=state == "running")
        heartbeat = self._heartbeats.due(states, self._job.now_ticks())
        if heartbeat is not None:
            with contextlib.suppress(PeerLostError):  # `_hear` notices that the connection is lost
                self._stream.send(heartbeat)

    def _end_if_taken_out(self, hosted: _Hosted, process: Process, *, runs: bool) -> None:
        """If a worker was taken out of the run, kill its process, unless the process ends by itself.

        The process may have been suspended, so it has `GRACE_S` for this after it is running again.
        """
        if (since_s := hosted.taken_out_s) is None:
            return
        since_s = min(since_s, time.monotonic()) if runs else math.inf
        hosted.taken_out_s = since_s
        if time.monotonic() > since_s + GRACE_S:
            process.kill("it was taken out of the run")

    def _report_ends(self) -> None:
        """Report the processes that have ended since the last call. Workers that were cut off join again."""
        for server, process in self._engine.servers.items():
            if process.exit_code is None or server in self._ended_servers:
                continue
            self._ended_servers.add(server)
            failed = process.exit_code != 0
            output = process.words[-MOST_WORDS:]
            # `_hear` notices that the connection is lost.
            with contextlib.suppress(PeerLostError, DeadlineError):
                self._stream.send(ServerEnded(server, process.ending, output))
                self._stream.drain()
            told = self._failure is not None or self._cut_off is not None or self._interruption.asked
            if failed and not told and self._failed_server is None:
                self._failed_server = RunFailedError(process.name, process.ending, output)
        for worker, process in self._engine.workers.items():
            hosted = self._hosted[worker]
            if process.exit_code is None or hosted.reported:
                continue
            hosted.reported = True
            killed = hosted.taken_out_s is not None and process.exit_code == -signal.SIGKILL
            cut_off = (killed or process.exit_code == EXIT_PEER_LOST) and not hosted.excluded
            returns, asked = cut_off or process.exit_code == 0, self._interruption.asked
            if not returns:
                hosted.gone = True
            # `_hear` notices that the connection is lost.
            with contextlib.suppress(PeerLostError, DeadlineError):
                self._stream.send(ProcessEnded(worker, process.ending, process.crashed, asked, returns))
                self._stream.drain()
            over = self._failure is not None or self._cut_off is not None or asked
            if cut_off and not (over or self._resumes or self._failed_server is not None):
                self._plan_return(worker, f"worker {worker} was cut off from the run")

    def _plan_return(self, worker: int, why: str) -> None:
        """Plan to let a worker join again, unless workers of this machine have joined again too often."""
        pause_s = self._rejoins.pause_s()
        then = "this machine does not try again" if pause_s is None else f"joining again in {pause_s:g} s"
        print_sentence(self._console, f"{why}; {then}")
        if pause_s is not None:
            self._due = sorted([*self._due, (time.monotonic() + pause_s, worker)])

    def _rejoin(self) -> None:
        """If a worker is due to join again, ask the coordinator to admit it, if possible with the same index."""
        if self._asked is not None or not self._due or time.monotonic() < self._due[0][0]:
            return
        _, self._asked = self._due.pop(0)
        with contextlib.suppress(PeerLostError):  # `_hear` notices that the connection is lost
            self._stream.send(MachineJoined(self._job.version, 1, (self._asked,)))


def process_names(role: str, indices: Iterable[int]) -> str:
    """Return the names of processes, such as "workers 0, 1"."""
    names = list(map(str, indices))
    return f"{role}{'s' * (len(names) > 1)} {', '.join(names)}"
