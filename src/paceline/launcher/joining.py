"""A machine that joins a run: its agent starts the machine's workers, monitors them, and reports how they end.

The agent connects to the coordinator of the run and offers to run some workers. The coordinator replies with their
indices and the configuration of the run. From then on, the workers are processes as in a run on one machine, except
that the coordinator and the servers are on another one.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs
from rich.console import Console

from ..core.heartbeats import Heartbeats
from ..core.messages import (
    FromCoordinatorToAgent,
    HeartbeatAnswered,
    Hello,
    KillOrdered,
    MachineAdmitted,
    MachineJoined,
    Message,
    ProcessEnded,
    ProcessState,
    Refused,
    RunEnded,
    TakenOut,
)
from ..errors import ConfigurationError, PacelineError, PeerLostError, ProtocolError, RunFailedError
from ..runtime.job import Job, claim_run_dir, decode_job
from ..runtime.process_states import RunningProcess, State
from ..wire.addresses import connect
from ..wire.stream import Stream
from ..wire.tls import Contexts, contexts
from .channels import Channels, Streams
from .endings import EXIT_PEER_LOST
from .interruption import Interruption
from .local import HostMachine, LocalEngine, Process
from .output import PlainScreen
from .rejoining import MOST_REJOINS, Rejoins
from .starting import Starter

__all__ = ["Joined", "join"]

POLL_INTERVAL_S = 0.05
RETRY_INTERVAL_S = 0.5
# Maximum time to wait for the coordinator's answer.
ANSWER_TIMEOUT_S = 30.0
# Maximum time to wait for the workers to exit by themselves after the run is over, or to leave it.
GRACE_S = 10.0
# Time after which an unanswered connection to the coordinator is given up. A coordinator that is suspended still
# acknowledges what it receives, and within this time, one that is not has taken out a machine behind a broken link.
SILENCE_MS = 10_000


class Joined(NamedTuple):
    """How the workers of this machine have ended.

    Attributes:
        run_dir: the directory of their logs.
        finished: True if one of them has finished its script; False if all of them were lost.
        endings: how the process of each of them has ended, for the user.
    """

    run_dir: Path
    finished: bool
    endings: str

    @classmethod
    def of(cls, run_dir: str, engine: LocalEngine) -> Joined:
        """Return how the workers of an engine have ended."""
        endings = [f"{process.name}: {process.ending}" for process in engine.workers.values()]
        return cls(Path(run_dir), engine.finished, "; ".join(endings))


def join(
    address: str,
    token: str,
    worker_arguments: Sequence[str],
    *,
    worker_payload: bytes = b"",
    version: str,
    workers: int,
    indices: Sequence[int] = (),
    console: Console,
    patience_s: float = 60.0,
    rejoins: int = MOST_REJOINS,
    run_dir: str | None = None,
    streams: Streams | None = None,
    shown: str = "",
    starter: Starter | None = None,
) -> Joined:
    """Run workers on this machine for a run whose coordinator listens at `address`, until they have ended.

    Workers that are taken out of the run join it again (see `rejoining`).

    Args:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        token: the secret of the run.
        worker_arguments: what each worker runs; see `Order`.
        worker_payload: the objects that are sent to each worker.
        version: version of Paceline on this machine.
        workers: number of workers to start on this machine.
        indices: the indices that these workers get if they are free.
        console: console for messages.
        patience_s: number of seconds for which the coordinator is called if it does not answer.
        rejoins: maximum number of times that workers join again after they were taken out of the run.
        run_dir: directory of the workers' logs. Default: a new directory in ./runs.
        streams: what the user wants of the standard streams of the workers.
        shown: name of the worker whose output is shown. Default: the first one on this machine.
        starter: starts the workers when they join for the first time; by default, a new one.

    Raises:
        ConfigurationError: the run does not accept this machine.
        PeerLostError: the coordinator cannot be reached.
        RunFailedError: the run failed, or a worker on this machine failed.
        KeyboardInterrupt: Ctrl-C was pressed; all workers on this machine have ended.
    """
    again = Rejoins(rejoins)
    folder, wanted = run_dir or "", workers
    with Interruption() as interruption:
        first = True
        reason: PacelineError
        while True:
            stream = _call(address, contexts(token), patience_s, console, interruption)
            try:
                offer = MachineJoined(version, wanted, tuple(indices))
                admitted = _ask_to_join(stream, address, token, offer)
                if taken := ", ".join(str(index) for index in indices if index not in admitted.workers):
                    console.print(f"the worker index {taken} is not free", markup=False)
                job = decode_job(admitted.job, admitted.now_ticks)
                job = claim_run_dir(structs.replace(job, run_dir=folder))
                folder, first = job.run_dir, False
                with starter or Starter([()] * wanted) as processes:
                    starter = None
                    channels = Channels(
                        streams or Streams(),
                        None,
                        PlainScreen(),
                        shown=shown or f"worker {min(admitted.workers)}",
                    )
                    engine = LocalEngine(
                        job, address, processes, channels, lambda worker, how: None, admitted.machine
                    )
                    agent = Agent(job, engine, stream, console, interruption, again)
                    agent.carry_out(admitted.workers, worker_arguments, worker_payload)
                return Joined.of(folder, engine)
            except CutOffError as error:
                if not error.workers:
                    return Joined.of(folder, engine)
                wanted, indices = len(error.workers), error.workers
                reason, pause_s = error, again.pause_s()
            except ConfigurationError as error:
                if first:
                    raise
                reason, pause_s = error, again.pause_s()
            finally:
                stream.close()
            if pause_s is None:
                raise reason
            console.print(f"{reason}; joining again in {pause_s:g} s", markup=False, soft_wrap=True)
            deadline_s = time.monotonic() + pause_s
            while time.monotonic() < deadline_s:
                if interruption.asked:
                    raise interruption.exception("all workers on this machine have ended", {})
                time.sleep(POLL_INTERVAL_S)


class CutOffError(PeerLostError):
    """The connection to the coordinator was lost, so this machine is no longer part of the run.

    Attributes:
        workers: the workers that had not ended yet, or were about to join again.
    """

    def __init__(self, words: str, workers: Sequence[int]) -> None:
        super().__init__(words, workers)
        self.words = words
        self.workers = workers

    def __str__(self) -> str:
        return self.words


def _call(
    address: str, known: Contexts, patience_s: float, console: Console, interruption: Interruption
) -> Stream[Message]:
    """Return a connection to the coordinator. If it cannot be reached, try again for `patience_s` seconds."""
    deadline_s = time.monotonic() + patience_s
    told = False
    while True:
        try:
            left_s = max(1.0, deadline_s - time.monotonic())
            stream: Stream[Message] = Stream(connect(address, left_s, known), FromCoordinatorToAgent)
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
            return stream
        except ProtocolError as error:
            raise ConfigurationError(
                f"the coordinator at {address} belongs to another run, or its secret is another one: {error}."
            ) from error
        except PeerLostError as error:
            if interruption.asked:
                raise interruption.exception("no worker was started", {}) from error
            if time.monotonic() > deadline_s:
                raise PeerLostError(f"{error}; gave up after {patience_s:g} s") from error
            if not told:
                console.print(f"{error}; trying again for {patience_s:g} s", markup=False, soft_wrap=True)
                told = True
            time.sleep(RETRY_INTERVAL_S)


def _ask_to_join(stream: Stream[Message], address: str, token: str, offer: MachineJoined) -> MachineAdmitted:
    """Offer to run some workers, and return the answer of the coordinator."""
    try:
        stream.send(Hello(token, "agent", 0))
        stream.send(offer)
        answer = stream.wait(ANSWER_TIMEOUT_S)
    except PeerLostError as error:
        raise ConfigurationError(
            f"the coordinator at {address} has closed the connection: it belongs to another run, or its secret is "
            "another one."
        ) from error
    if isinstance(answer, Refused):
        raise ConfigurationError(answer.reason)
    if not isinstance(answer, MachineAdmitted):
        raise ProtocolError(f"the coordinator sent {type(answer).__name__}, expected MachineAdmitted")
    return answer


class Agent:
    """Starts the workers of one machine, and monitors them until they have ended.

    Args:
        job: the configuration of the run, on this machine.
        engine: starts the processes.
        stream: a connection to the coordinator, which has admitted this machine.
        console: console for messages.
        interruption: counter of the signals that ask this program to end.
        rejoins: counts how often workers of this machine have joined again.
    """

    def __init__(
        self,
        job: Job,
        engine: LocalEngine,
        stream: Stream[Message],
        console: Console,
        interruption: Interruption,
        rejoins: Rejoins,
    ) -> None:
        self._job = job
        self._engine = engine
        self._stream = stream
        self._console = console
        self._interruption = interruption
        self._rejoins = rejoins
        self._heartbeats = Heartbeats()
        self._arguments: Sequence[str] = ()
        self._payload = b""
        # worker -> its incarnation, for the last incarnation of each worker that was started here
        self._workers: dict[int, int] = {}
        # worker -> its process, once it has been started
        self._running: dict[int, RunningProcess] = {}
        self._reported: set[int] = set()  # workers whose end has been reported
        # worker that was taken out of the run -> time from which its process has been running again; inf while not
        self._taken_out: dict[int, float] = {}
        # (time at which a worker asks to join again, its index), sorted
        self._due: list[tuple[float, int]] = []
        self._asked: int | None = None  # the worker that has asked, until it has been answered
        # why the run has failed, "" if it has not; None while it is in progress
        self._failure: str | None = None
        self._cut_off: CutOffError | None = None  # set if the connection to the coordinator was lost

    def carry_out(self, workers: Mapping[int, int], arguments: Sequence[str], payload: bytes) -> None:
        """Start the workers, and wait until they have ended. See `join` for the exceptions.

        Args:
            workers: index of each worker -> its incarnation.
            arguments: what each worker runs; see `Order`.
            payload: the objects that are sent to each worker.

        Raises:
            CutOffError: the connection to the coordinator was lost; all workers have ended.
        """
        engine = self._engine
        self._arguments, self._payload = arguments, payload
        try:
            self._start(workers)
            deadline_s = math.inf
            # Heartbeats go on while the workers leave; otherwise, the coordinator would count them as lost.
            while self._busy and self._cut_off is None and time.monotonic() < deadline_s:
                self._hear()
                self._report_states()
                self._report_ends()
                if self._interruption.hurried():
                    break
                if deadline_s == math.inf and (self._interruption.asked or self._failure is not None):
                    deadline_s = time.monotonic() + GRACE_S
                    if self._interruption.asked:
                        for process in engine.processes:
                            process.signal(signal.SIGTERM)
                elif deadline_s == math.inf:
                    self._rejoin()
        finally:
            engine.end(engine.processes, grace_s=0.0, hurried=self._interruption.hurried)
        self._report_ends()
        if self._interruption.asked:
            raise self._interruption.exception("all workers on this machine have ended", {})
        if failed := engine.failed_worker():
            raise failed
        if self._cut_off is not None:
            raise self._cut_off
        if self._failure:
            raise RunFailedError("the run", self._failure)

    @property
    def _busy(self) -> bool:
        """True if a worker has not ended yet, or is about to join again."""
        returns = bool(self._due) or self._asked is not None
        over = self._failure is not None or self._interruption.asked
        return (returns and not over) or len(self._reported) < len(self._workers)

    def _start(self, workers: Mapping[int, int]) -> None:
        for worker, incarnation in workers.items():
            self._workers[worker] = incarnation
            self._reported.discard(worker)
            self._running.pop(worker, None)
            self._taken_out.pop(worker, None)
            self._engine.start_worker(worker, HostMachine(), self._arguments, self._payload, incarnation)
        names = ", ".join(map(str, workers))
        self._console.print(f"joined as worker{'s' * (len(workers) > 1)} {names}", markup=False)

    def _hear(self) -> None:
        """Handle the coordinator's messages. If there is none, or the run is over, wait for a short time."""
        if self._failure is not None:
            time.sleep(POLL_INTERVAL_S)
            return
        ready = select.select([self._stream], [], [], POLL_INTERVAL_S)[0]
        if not ready:
            return
        try:
            for message in self._stream.receive():
                match message:
                    case KillOrdered(worker, why):
                        self._engine.workers[worker].kill(why)
                    case TakenOut(worker, incarnation, reason) if self._workers.get(worker) == incarnation:
                        self._taken_out[worker] = math.inf
                        self._console.print(
                            f"worker {worker} was taken out of the run: {reason}",
                            markup=False,
                            soft_wrap=True,
                        )
                    case RunEnded(failure):
                        self._failure = failure
                    case HeartbeatAnswered():
                        self._heartbeats.answered(message, self._job.now_ticks())
                    case MachineAdmitted(workers) if self._asked is not None:
                        self._asked = None
                        self._start(workers)
                    case Refused(reason) if self._asked is not None:
                        worker, self._asked = self._asked, None
                        self._plan_return(worker, reason)
                    case _:
                        raise ProtocolError(f"the coordinator sent an unexpected {type(message).__name__}")
        except PeerLostError as error:
            if self._failure is None:
                cut_off = [
                    worker
                    for worker, process in self._engine.workers.items()
                    if worker not in self._reported and process.exit_code in (None, EXIT_PEER_LOST)
                ]
                cut_off += [worker for _, worker in self._due]
                cut_off += [] if self._asked is None else [self._asked]
                self._cut_off = CutOffError(
                    f"the connection to the coordinator was lost: {error}",
                    cut_off,
                )

    def _report_states(self) -> None:
        """Send a heartbeat with the states of the workers' processes if one is due."""
        states = []
        for worker, process in self._engine.workers.items():
            if worker not in self._running:
                running = RunningProcess.of(process.id) if process.started else None
                if running is not None:
                    self._running[worker] = running
            if worker in self._running:
                state = self._running[worker].state()
                states.append(ProcessState("worker", worker, state, self._workers[worker]))
                self._end_if_taken_out(worker, process, state)
        heartbeat = self._heartbeats.due(states, self._job.now_ticks())
        if heartbeat is not None:
            with contextlib.suppress(PeerLostError):  # `_hear` notices that the connection is lost
                self._stream.send(heartbeat)

    def _end_if_taken_out(self, worker: int, process: Process, state: State) -> None:
        """Kill the process of a worker that was taken out if it does not end by itself when it runs again."""
        if (since_s := self._taken_out.get(worker)) is None:
            return
        since_s = min(since_s, time.monotonic()) if state == "running" else math.inf
        self._taken_out[worker] = since_s
        if time.monotonic() > since_s + GRACE_S:
            process.kill("it was taken out of the run")

    def _report_ends(self) -> None:
        """Report the workers that have ended since the last call. Those that were cut off join again."""
        for worker, process in self._engine.workers.items():
            if process.exit_code is None or worker in self._reported:
                continue
            self._reported.add(worker)
            with contextlib.suppress(PeerLostError):  # the run is over
                self._stream.send(ProcessEnded(worker, process.ending, process.crashed))
                self._stream.drain(ANSWER_TIMEOUT_S)
            killed = worker in self._taken_out and process.exit_code == -signal.SIGKILL
            over = self._failure is not None or self._cut_off is not None
            if (killed or process.exit_code == EXIT_PEER_LOST) and not over:
                self._plan_return(worker, f"worker {worker} was cut off from the run")

    def _plan_return(self, worker: int, why: str) -> None:
        """Plan to let a worker join again, unless this has been done too often."""
        pause_s = self._rejoins.pause_s()
        then = "this machine does not try again" if pause_s is None else f"joining again in {pause_s:g} s"
        self._console.print(f"{why}; {then}", markup=False, soft_wrap=True)
        if pause_s is not None:
            self._due = sorted([*self._due, (time.monotonic() + pause_s, worker)])

    def _rejoin(self) -> None:
        """Ask the coordinator to let a worker join again, if possible with the same index, if this is due."""
        if self._asked is not None or not self._due or time.monotonic() < self._due[0][0]:
            return
        _, self._asked = self._due.pop(0)
        with contextlib.suppress(PeerLostError):  # `_hear` notices that the connection is lost
            self._stream.send(MachineJoined(self._job.version, 1, (self._asked,)))
