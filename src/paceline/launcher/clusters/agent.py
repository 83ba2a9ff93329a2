"""What the agent of a machine does while the machine is in a run: it starts the processes of its machine, monitors
them, and reports how they end.

The agent carries out what the coordinator orders over the connection on which it has admitted the machine (see
`join`), and sends heartbeats. Workers that were taken out of the run join it again on the same connection. If the
connection is lost, the agent ends all processes.

The run cannot continue without the servers that a machine brings. So they stay until the coordinator ends them, and
the agent stays with them: when it is asked to leave, it tells the coordinator.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from ...core.machines.heartbeats import Heartbeats
from ...core.protocol.messages import (
    MOST_WORDS,
    HeartbeatAnswered,
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
)
from ...errors import DeadlineError, PeerLostError, ProtocolError, RunFailedError
from ...runtime.compute_devices import Device
from ...runtime.job import Job
from ...runtime.process_states import RunningProcess, State
from ...wire.stream import Stream
from ..live_run.local import HostMachine, LocalEngine, Process
from ..live_run.rejoining import Rejoins
from ..processes.endings import EXIT_PEER_LOST
from ..processes.interruption import Interruption
from ..terminal.channels import Channels
from ..terminal.output import print_sentence

__all__ = ["POLL_INTERVAL_S", "Agent", "CutOffError", "process_names"]

NO_DEVICES: Mapping[int, Device] = {}
POLL_INTERVAL_S = 0.05
# Maximum time to wait for the workers to exit by themselves after the run is over, or to leave it.
GRACE_S = 10.0


class CutOffError(PeerLostError):
    """The connection to the coordinator was lost, so this machine is no longer part of the run.

    Attributes:
        workers: the workers that join the run again if this machine does.
        resumes: True if the run goes on from a checkpoint, so that its coordinator expects this machine again.
    """

    def __init__(self, words: str, workers: Sequence[int], *, resumes: bool = False) -> None:
        super().__init__(words, workers)
        self.words = words
        self.workers = workers
        self.resumes = resumes

    def __str__(self) -> str:
        return self.words


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
        # worker -> its incarnation, for the last incarnation of each worker that was started here
        self._workers: dict[int, int] = {}
        # worker -> its process, once it has been started
        self._running: dict[int, RunningProcess] = {}
        self._reported: set[int] = set()  # workers whose end has been reported
        # worker that was taken out of the run -> time from which its process has been running again; inf while not
        self._taken_out: dict[int, float] = {}
        self._excluded: set[int] = set()  # workers that were taken out for good
        self._gone: set[int] = set()  # workers that have ended and never join again
        # (time at which a worker asks to join again, its index), sorted
        self._due: list[tuple[float, int]] = []
        self._asked: int | None = None  # the worker that has asked, until it has been answered
        # why the run has failed, "" if it has not; None while it is in progress
        self._failure: str | None = None
        self._saved = False  # True once the results of the run have been saved, or could not be
        self._resumes = ""  # why the run goes on from a checkpoint; "" if it does not
        self._cut_off: CutOffError | None = None  # set if the connection to the coordinator was lost
        self._ended_servers: set[int] = set()  # servers whose end has been reported
        self._failed_server: RunFailedError | None = None  # the first server that has failed during the run
        # Time at which the coordinator has closed the connection after the end of the run; inf before.
        self._closed_s = math.inf

    def start_servers(self, servers: Iterable[int], payload: bytes) -> None:
        """Start servers, to which the objects in `payload` are sent. `carry_out` monitors them."""
        for server in servers:
            self._engine.start_server(server, HostMachine(), payload)

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
            arguments: what each worker runs; see `Order`.
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
        if self._failed_server is not None:
            raise self._failed_server
        if failed := engine.failed_worker():
            raise failed
        if self._cut_off is not None:
            raise self._cut_off
        if self._failure:
            raise RunFailedError("the run", self._failure)

    @property
    def _busy(self) -> bool:
        """True if a process has not ended yet, or a worker is about to join again.

        Servers end when the coordinator tells them to, which it does after it has collected the weights. If they have
        ended before, it is about to say that the run is over, or that the run goes on from a checkpoint.
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
        return (returns and not over) or len(self._reported) < len(self._workers)

    @property
    def _knows_outcome(self) -> bool:
        """True if the coordinator has said how the run has ended, and will say nothing else."""
        return bool(self._failure) or self._saved

    @property
    def _awaits_outcome(self) -> bool:
        """True if workers of this machine have finished, and it is not known yet whether the run has kept their work.

        Without this, the machine would report success although the weights of the run were lost at its end.
        """
        lost = self._cut_off is not None or self._closed_s < math.inf
        return self._engine.finished and not (self._knows_outcome or self._interruption.asked or lost)

    def _start(self, workers: Mapping[int, int]) -> None:
        for worker, incarnation in workers.items():
            self._workers[worker] = incarnation
            self._reported.discard(worker)
            self._running.pop(worker, None)
            self._taken_out.pop(worker, None)
            self._excluded.discard(worker)
            self._gone.discard(worker)
            self._engine.start_worker(
                worker,
                HostMachine(),
                self._arguments,
                self._payload,
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
            goes_on = "goes on from its last checkpoint; if it has none, it " if resumes else ""
            print_sentence(
                self._console,
                f"a run in progress {goes_on}ends, because it cannot continue without {names}, and its weights are "
                "saved first. A second signal ends all processes on this machine at once",
            )
            with contextlib.suppress(PeerLostError):  # `_hear` notices that the connection is lost
                self._stream.send(MachineLeaving())

    def _hear(self) -> None:
        """Handle the coordinator's messages. If there is none, or the run is over, wait for a short time.

        A machine with servers goes on after the end of the run, until the coordinator closes the connection.
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
                        self._workers.get(worker) == incarnation
                    ):
                        self._taken_out[worker] = math.inf
                        if for_good:
                            self._excluded.add(worker)
                        print_sentence(
                            self._console,
                            f"worker {worker} was taken out of the run: {reason}",
                        )
                    case MainChosen(worker):
                        if worker in self._workers:
                            self._channels.show(f"worker {worker}")
                            print_sentence(
                                self._console,
                                f"worker {worker} is the main worker from the next epoch on (see paceline.is_main)",
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
        ):  # also those that have finished their script, because the run goes back to a checkpoint
            return sorted(self._workers.keys() - self._gone - self._excluded)
        cut_off = [
            worker
            for worker, process in self._engine.workers.items()
            if worker not in self._reported and process.exit_code in (None, EXIT_PEER_LOST)
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
            self._reported.discard(asked)
            for known in (self._engine.workers, self._workers, self._running, self._taken_out):
                known.pop(asked, None)
        self._start(workers)

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
            if process.exit_code is None or worker in self._reported:
                continue
            self._reported.add(worker)
            killed = worker in self._taken_out and process.exit_code == -signal.SIGKILL
            cut_off = (killed or process.exit_code == EXIT_PEER_LOST) and worker not in self._excluded
            returns, asked = cut_off or process.exit_code == 0, self._interruption.asked
            if not returns:
                self._gone.add(worker)
            # `_hear` notices that the connection is lost.
            with contextlib.suppress(PeerLostError, DeadlineError):
                self._stream.send(ProcessEnded(worker, process.ending, process.crashed, asked, returns))
                self._stream.drain()
            over = self._failure is not None or self._cut_off is not None or asked
            if cut_off and not (over or self._resumes or self._failed_server is not None):
                self._plan_return(worker, f"worker {worker} was cut off from the run")

    def _plan_return(self, worker: int, why: str) -> None:
        """Plan to let a worker join again, unless this has been done too often."""
        pause_s = self._rejoins.pause_s()
        then = "this machine does not try again" if pause_s is None else f"joining again in {pause_s:g} s"
        print_sentence(self._console, f"{why}; {then}")
        if pause_s is not None:
            self._due = sorted([*self._due, (time.monotonic() + pause_s, worker)])

    def _rejoin(self) -> None:
        """Ask the coordinator to let a worker join again, if possible with the same index, if this is due."""
        if self._asked is not None or not self._due or time.monotonic() < self._due[0][0]:
            return
        _, self._asked = self._due.pop(0)
        with contextlib.suppress(PeerLostError):  # `_hear` notices that the connection is lost
            self._stream.send(MachineJoined(self._job.version, 1, (self._asked,)))


def process_names(role: str, indices: Iterable[int]) -> str:
    """Return the names of processes, such as "workers 0, 1"."""
    names = list(map(str, indices))
    return f"{role}{'s' * (len(names) > 1)} {', '.join(names)}"
