"""The machines and processes of a run, as the host of the coordinator knows them.

Agents      handles the reports of the agents of machines, and the loss of a machine
Machines    the machines that have joined the run
JobWatch    when each process last sent a message, how fast workers are, and how much data travels between machines
StallWatch  finds out which processes a stalled run waits for
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from ..checkpoints.manifest import MANIFEST, PIECE_BYTES, read_manifest
from ..core.coordinator import Coordinator
from ..core.liveness import SILENCE_S, Clocks, Direction, Liveness, Removal, TrafficMeter, answer
from ..core.messages import (
    CheckpointPiece,
    ClockOffset,
    FetchCheckpoint,
    Heartbeat,
    KillOrdered,
    MachineAdmitted,
    MachineJoined,
    MachineLeaving,
    MainChosen,
    Message,
    ProcessEnded,
    Refused,
    RunEnded,
    RunResumes,
    ServerEnded,
    Status,
    TakenOut,
    Waits,
)
from ..core.requests import Request
from ..core.standstill import standstill, unable_to_begin
from ..core.status import (
    LOCAL,
    JobStatus,
    MachineStatus,
    Observed,
    ProgressMeter,
    StateTimes,
    held_state,
    job_status,
    worker_state,
)
from ..errors import CheckpointError, ConfigurationError, ProtocolError
from ..sync.ticks import TICKS_PER_S
from ..trace.clocks import ClockRecorder
from ..wire.preface import Traffic, traffic_of
from ..wire.stream import Stream
from .compute_devices import CPU
from .hub import Caller, Hub
from .installed import installed, what_differs
from .job import Job, Role, encode_job
from .traces import BestEffortFile

log = logging.getLogger("paceline.coordinator")

Perform = Callable[[Sequence[Request]], None]


def machine_of(agent: Caller) -> int:
    """Return the index that an agent's machine has in records. Machine 0 is the machine with the coordinator."""
    return agent.index + 1


class MachinesLeft(NamedTuple):
    """The workers and servers that the remaining machines bring to a run that has lost a server.

    Attributes:
        workers: number of their workers.
        servers: number of their servers.
    """

    workers: int
    servers: int


class Agents:
    """Handles the reports of the agents of machines.

    Args:
        job: the configuration of the run.
        core: the state machine of the coordinator.
        hub: the connections of the coordinator.
        members: (role, index) -> connection of an agent, a worker or a server.
        machines: the machines that have joined the run.
        watch: what is known of the processes.
        perform: function that carries out requests of the core.
        give_up: function that closes the connection to a server for the given reason, and records the reason.

    Attributes:
        crashed: workers on other machines whose processes have crashed.
        stopping: True once the servers have been told to end.
    """

    def __init__(
        self,
        job: Job,
        core: Coordinator,
        hub: Hub[Caller],
        members: Mapping[tuple[str, int], Caller],
        machines: Machines,
        watch: JobWatch,
        perform: Perform,
        give_up: Callable[[int, str], None],
    ) -> None:
        self.crashed: set[int] = set()
        self.stopping = False
        self._job = job
        self._core = core
        self._hub = hub
        self._members = members
        self._machines = machines
        self._watch = watch
        self._perform = perform
        self._give_up = give_up
        self._gone: set[tuple[int, int]] = set()  # (worker, incarnation) of workers that do not join again
        self._leaving: set[int] = set()  # agents of machines that were asked to leave with their servers
        self._clocks: dict[int, ClockRecorder] = {}  # machine -> the recorder of the offset of its clock
        self._main = core.main.worker  # the main worker that the agents have been told of

    def _admitted(self) -> Iterator[Caller]:
        """Yield the connections to the agents of admitted machines. Other agents wait for an answer to their offer."""
        for (role, index), member in sorted(self._members.items()):
            if role == "agent" and index in self._machines.names:
                yield member

    # -- what agents are told -----------------------------------------------------------------------------

    def kill(self, role: Role, index: int, why: str) -> None:
        """Kill a worker or server that runs on another machine."""
        for agent in self._machines.agents_of(role, index):
            if (member := self._members.get(("agent", agent))) is not None:
                self._hub.send(member, KillOrdered(role, index, why))

    def dismiss(self, failure: str, *, saved: bool = False) -> None:
        """Tell all machines that the run is over; if `saved`, also that its results have been saved. See `RunEnded`."""
        for agent in self._admitted():
            self._hub.send(agent, RunEnded(failure, saved))

    def resume(self, words: str) -> None:
        """Tell all machines that the run continues from a checkpoint. See `RunResumes`."""
        for agent in self._admitted():
            self._hub.send(agent, RunResumes(words))

    def name_main(self) -> None:
        """Tell all machines if another worker has become the main worker."""
        if self._main != self._core.main.worker:
            self._main = self._core.main.worker
            for agent in self._admitted():
                self._hub.send(agent, MainChosen(self._main))

    # -- what agents report -------------------------------------------------------------------------------

    def hear(self, agent: Caller, message: Message) -> None:
        """Handle a message from the agent of a machine that joins the run or has joined it."""
        workers = self._machines.workers[agent.index]
        match message:
            case Heartbeat():
                now_ticks = self._job.now_ticks()
                self._hub.send(agent, answer(message, now_ticks, self._job.now_ticks()))
                self._machines.liveness.heartbeat(agent.index, message.states, now_ticks)
                if message.clock is not None and workers:
                    self._record_clock(machine_of(agent), message.clock)
            case FetchCheckpoint():
                self._send_piece(agent, message)
            case MachineJoined():
                self._admit(agent, message)
            case MachineLeaving():
                self._leaving.add(agent.index)
                self._lose_servers(agent.index, "its machine was asked to leave the run")
            case ServerEnded():
                self.lose_server(agent.index, message.server, message.how, message.output)
            case ProcessEnded():
                if message.worker not in workers:
                    raise ProtocolError(f"worker {message.worker} is not a worker of {agent}")
                if message.crashed:
                    self.crashed.add(message.worker)
                incarnation = workers[message.worker]
                if not message.returns:
                    self._gone.add((message.worker, incarnation))
                self.note_end(message.worker, message.how, incarnation, asked=message.asked)

    def _admit(self, agent: Caller, message: MachineJoined) -> None:
        """Admit the machine of an agent, or refuse it."""
        # read first, because this raises an exception if the connection has ended
        address, reached = agent.host, agent.reached
        try:
            self._require_equal(message)
            servers, workers = self._invite(message)
        except ConfigurationError as error:
            self._hub.send(agent, Refused(str(error)))
            return
        now_ticks = self._job.now_ticks()
        self._machines.admit(agent.index, address, reached, workers, servers, now_ticks)
        for server in servers:
            self._watch.expect("server", server)
        for worker in workers:
            self._watch.expect("worker", worker)
        machine = machine_of(agent)
        self._hub.send(agent, MachineAdmitted(workers, encode_job(self._job), now_ticks, machine, servers))

    def _require_equal(self, offer: MachineJoined) -> None:
        """Raise `ConfigurationError` if the packages that a machine has installed do not suit the run."""
        if offer.version != self._job.version:
            raise ConfigurationError(
                f"this machine has Paceline {offer.version}, but the run uses Paceline {self._job.version}. Install "
                "the same version on all machines."
            )
        own, model, sent = installed(), self._core.model, self._job.optimizers.sent
        found = own if offer.installed is None else offer.installed
        pickled = (
            "the function of the run" if offer.unpickles else f"the optimizer {min(sent)}" if sent else ""
        )
        names = () if model is None else [each.name for each in model.optimizers]
        if reason := what_differs(found, own, pickled=pickled, optimizers=names):
            raise ConfigurationError(reason)

    def _send_piece(self, agent: Caller, message: FetchCheckpoint) -> None:
        """Send a machine a piece of the checkpoint with which the run begins."""
        if agent.stream.backlog:
            raise ProtocolError("FetchCheckpoint arrived before the previous answer was read")
        if (resumed := self._job.resumed) is None:
            self._hub.send(agent, CheckpointPiece())
            return
        path = Path(resumed.path)
        try:
            if message.name != MANIFEST and message.name not in read_manifest(path).files:
                raise ProtocolError(f"the checkpoint has no file {message.name!r}")
            with (path / message.name).open("rb") as file:
                file.seek(message.begin)
                piece = memoryview(file.read(PIECE_BYTES))
        except (OSError, CheckpointError) as error:
            why = f"{message.name}: {error.strerror}" if isinstance(error, OSError) else str(error)
            words = (
                f"a machine that joins needs the checkpoint {path}, with which the run has begun, but the checkpoint "
                f"cannot be read: {why}. Put it back, or resume the run from a newer checkpoint."
            )
            self._hub.send(agent, Refused(words))
            return
        self._hub.send(agent, CheckpointPiece(resumed.path, self._core.model is not None), [piece])

    def _invite(self, offer: MachineJoined) -> tuple[tuple[int, ...], dict[int, int]]:
        """Expect the servers and the workers that a machine offers, and return their indices.

        Raises:
            ConfigurationError: the run needs fewer servers or workers. In this case, nothing is expected.
        """
        servers = self._core.servers.invite(offer.servers)
        try:
            return servers, self._core.invite(offer.workers, offer.wanted)
        except ConfigurationError:
            for server in servers:
                self._core.servers.release(server)
            raise

    def _record_clock(self, machine: int, offset: ClockOffset) -> None:
        """Record the offset of a machine's clock, for timelines."""
        if machine not in self._clocks:
            path = Path(self._job.run_dir, f"clock-{machine}.jsonl")
            self._clocks[machine] = ClockRecorder(BestEffortFile(path, self._core.faults.append))
        self._clocks[machine].record(offset)

    # -- losses -------------------------------------------------------------------------------------------

    def left(self) -> MachinesLeft:
        """Return what the remaining machines bring to the run when they join it again."""
        agents = [agent.index for agent in self._admitted() if agent.index not in self._leaving]
        workers = {
            (worker, incarnation)
            for agent in agents
            for worker, incarnation in self._machines.workers[agent].items()
            if incarnation == self._core.members.incarnation(worker)
        }
        servers = sum(len(self._machines.servers[agent]) for agent in agents)
        return MachinesLeft(len(workers - self._gone), servers)

    def gone(self, agent: Caller) -> None:
        """Record that the connection to an agent has ended, and that the processes of its machine are lost with it."""
        self._machines.liveness.machine_left(agent.index)
        if (clock := self._clocks.pop(machine_of(agent), None)) is not None:
            clock.close()
        reason = "the connection to its machine ended"
        for worker, incarnation in self._machines.workers[agent.index].items():
            self.note_end(worker, reason, incarnation)
        self._lose_servers(agent.index, reason)

    def note_end(self, worker: int, how: str, incarnation: int = 0, *, asked: bool = False) -> None:
        """Record that a worker's process has ended. If the worker is connected, its last messages are received first.

        Args:
            worker: index of the worker.
            how: a phrase that says how the process ended.
            incarnation: how often the index of the worker had been used before.
            asked: True if the worker had been asked to leave.
        """
        if incarnation != self._core.members.incarnation(worker):
            return  # another worker has this index now
        self._machines.liveness.worker_left(worker)
        self._core.note_ending(worker, how)
        if (member := self._members.get(("worker", worker))) is not None:
            self._hub.expect_end(member)
        else:
            self._perform(self._core.ended(worker, self._job.now_ticks(), incarnation, asked=asked))

    def _lose_servers(self, agent: int, how: str) -> None:
        for server in sorted(self._machines.servers[agent]):
            self.lose_server(agent, server, how)

    def lose_server(self, agent: int, server: int, how: str, output: str = "") -> None:
        """Record that a server that a machine has brought is lost. A run in progress cannot continue without it.

        If the run has not begun yet, another machine may bring the server. In this case, the agent of the lost server's
        machine is told to end the processes of this machine.

        Args:
            agent: index of the machine's agent.
            server: index of the server. If the machine no longer has this server, this method has no effect.
            how: a clause that says why the server is lost.
            output: the last lines of the server's output, if they say more than `how`.
        """
        if self.stopping or server not in self._machines.servers[agent]:
            return
        name = self._machines.names[agent]
        if ends := self._core.server_lost(server, how, output, certain=True):
            self._perform(ends)
            return
        log.warning("server %d of machine %s has left before the run has begun: %s", server, name, how)
        del self._machines.servers[agent][server]
        self._watch.left("server", server)
        if (member := self._members.get(("server", server))) is not None:
            self._hub.drop(member, how)
        if (member := self._members.get(("agent", agent))) is not None:
            self._hub.send(member, RunEnded(f"server {server} has ended before the run has begun: {how}"))

    def look(self) -> None:
        """If a check is due, take out the machines and workers that are no longer alive."""
        liveness, now_ticks = self._machines.liveness, self._job.now_ticks()
        if liveness.next_ticks is not None and now_ticks >= liveness.next_ticks:
            for verdict in liveness.look(now_ticks):
                self._take_out(verdict)

    def _take_out(self, verdict: Removal) -> None:
        """Continue without a machine that seems to be down, or without a worker that has been suspended for too long.

        The workers and the agent receive the reason as soon as they read again. If the machine has brought servers, a
        run in progress cannot continue without these servers.
        """
        workers, reason = self._machines.workers[verdict.machine], verdict.reason
        if verdict.worker is None:
            for server in sorted(self._machines.servers[verdict.machine]):
                self.lose_server(verdict.machine, server, reason)
                self._give_up(server, reason)
        agent = self._members.get(("agent", verdict.machine))
        for worker in workers if verdict.worker is None else [verdict.worker]:
            incarnation = self._core.members.incarnation(worker)
            if workers[worker] == incarnation and not self._core.members.fate(worker):
                self._take_out_worker(worker, reason, agent)
        if verdict.worker is None and agent is not None:
            self._hub.drop(agent, reason)

    def take_out_for_good(self, worker: int, reason: str) -> None:
        """Continue without a worker. The worker's machine must not start the worker again."""
        incarnation = self._core.members.incarnation(worker)
        agents = self._machines.agents_of("worker", worker)
        hosts = [each for each in agents if self._machines.workers[each][worker] == incarnation]
        agent = self._members.get(("agent", hosts[0])) if hosts else None
        self._take_out_worker(worker, reason, agent, for_good=True)

    def _take_out_worker(
        self, worker: int, reason: str, agent: Caller | None, *, for_good: bool = False
    ) -> None:
        """Continue without a worker whose process may still run.

        Notify the worker, and the agent of its machine if there is such an agent.
        """
        log.warning("worker %d is taken out of the run: %s", worker, reason)
        self._core.note_ending(worker, reason)
        message = TakenOut(worker, self._core.members.incarnation(worker), reason, for_good)
        if agent is not None:
            self._hub.send(agent, message)
        self._perform(self._core.take_out(worker, self._job.now_ticks()))
        if (member := self._members.get(("worker", worker))) is not None:
            self._hub.send(member, message)
            self._hub.drop(member, reason)

    def close(self) -> None:
        """Close the records of the clocks."""
        for clock in self._clocks.values():
            clock.close()


# -- The machines that have joined a run, as the host of the coordinator knows them --------------------------


class Machines:
    """The machines that have joined a run, each with an agent that has connected to the coordinator.

    Attributes:
        workers: index of a machine's agent -> the machine's workers, each with its incarnation; {} until the machine
            has been admitted.
        servers: index of a machine's agent -> the servers that the machine has brought, each with the incarnation 0.
        names: index of the agent of an admitted machine -> name of the machine: its address, with a number if several
            agents have this address.
        hosts: index of the agent of an admitted machine -> name of the machine, the same for all of its agents: `LOCAL`
            if the coordinator runs on it, or else its address. But an agent with a loopback address may have come
            through a tunnel from any machine, so it counts as a machine of its own.
        liveness: decides from the agents' heartbeats which machines and workers are taken out.
    """

    def __init__(self) -> None:
        self.workers: dict[int, dict[int, int]] = {}
        self.servers: dict[int, dict[int, int]] = {}
        self.liveness = Liveness()
        self.names: dict[int, str] = {}
        self.hosts: dict[int, str] = {}

    def add(self) -> int:
        """Return the index of the agent of a new machine."""
        agent = len(self.workers)
        self.workers[agent], self.servers[agent] = {}, {}
        return agent

    def admit(
        self,
        agent: int,
        address: str,
        reached: str,
        workers: Mapping[int, int],
        servers: Iterable[int],
        now_ticks: int,
    ) -> None:
        """Record that a machine with this address now runs these processes in addition to its earlier processes.

        Args:
            agent: index of the machine's agent.
            address: the address from which the agent has reached the coordinator.
            reached: the address at which the agent has reached the coordinator.
            workers: worker -> its incarnation.
            servers: the servers.
            now_ticks: the current time.
        """
        if agent not in self.names:
            same = sum(name.partition(" ")[0] == address for name in self.names.values())
            name = self.names[agent] = f"{address} ({same + 1})" if same else address
            here = LOCAL if address == reached else address
            self.hosts[agent] = name if ip_address(address).is_loopback else here
            self.liveness.machine_joined(agent, name, now_ticks)
        self.workers[agent].update(workers)
        self.servers[agent].update(dict.fromkeys(servers, 0))
        for worker, incarnation in workers.items():
            self.liveness.worker_joined(worker, incarnation)

    def names_of(self, role: str) -> dict[int, str]:
        """Return the name of the machine of each worker or server that a machine has brought."""
        return {index: self.names[agent] for index, agent in self._agent_of(role).items()}

    def hosts_of(self, role: str) -> dict[int, str]:
        """Return the machine, as in `hosts`, of each worker or server that a machine has brought."""
        return {index: self.hosts[agent] for index, agent in self._agent_of(role).items()}

    @property
    def hosts_of_servers(self) -> list[str]:
        """The machines of all servers, as in `hosts`. At least one server runs on the coordinator's machine."""
        return sorted({LOCAL, *self.hosts_of("server").values()})

    def _agent_of(self, role: str) -> dict[int, int]:
        """Return the agent of each worker or server that a machine has brought: of its newest incarnation."""
        newest: dict[int, tuple[int, int]] = {}  # process -> (its incarnation, its agent)
        for agent, brought in self._brought(role).items():
            for index, incarnation in brought.items():
                newest[index] = max(newest.get(index, (-1, -1)), (incarnation, agent))
        return {index: agent for index, (_, agent) in newest.items()}

    def _brought(self, role: str) -> dict[int, dict[int, int]]:
        return self.servers if role == "server" else self.workers

    def name_of(self, process: str) -> str:
        """Return the name of the machine of a process such as "worker 2"; "" if no machine has brought the process."""
        roles = ("worker", "server")
        named = {f"{role} {index}": name for role in roles for index, name in self.names_of(role).items()}
        return named.get(process, "")

    def agents_of(self, role: str, index: int) -> list[int]:
        """Return the agents that have started this server, or any incarnation of this worker."""
        return [agent for agent, indices in self._brought(role).items() if index in indices]

    def statuses(self, now_ticks: int) -> tuple[MachineStatus, ...]:
        """Return the status of each machine: how long it has been silent, and the servers that it has brought."""
        servers: dict[str, list[int]] = {}
        for server, name in sorted(self.names_of("server").items()):
            servers.setdefault(name, []).append(server)
        silent_s = {name: ticks / TICKS_PER_S for name, ticks in self.liveness.silences(now_ticks).items()}
        return tuple(
            MachineStatus(name, each_s, each_s / float(SILENCE_S), tuple(servers.get(name, ())))
            for name, each_s in silent_s.items()
        )


# -- What the host of the coordinator sees of a run: messages of each process, paces of workers, bytes that travel
#
# From these observations and the state of the core, the host computes the state of the job, for the display and for
# other programs.

NOTE_INTERVAL_TICKS = TICKS_PER_S // 5  # minimum time between two records of the workers' states
CLOCK_GAP_S = 1.0  # a longer time between two looks means that the launcher was suspended
PACE_SPAN = 8  # approximate number of recent iterations over which a worker's iteration time is averaged


Stage = Literal["starting", "preparing", "silent", "asked"]
"""The stages and states of a process that have a clock. See `JobWatch.clocks`."""


class JobWatch:
    """Watches the processes of one run.

    Args:
        job: the configuration of the run.
        core: the state machine of the coordinator.
        machines: the machines that have joined the run.

    Attributes:
        clocks: (stage, role, index) -> for how long the run has waited for this process. A process is "starting" from
            the moment at which it is expected until its first message. From then on, a worker is "preparing" until it
            has registered its model. A process is "silent" since its last message, or since the last time at which
            servers report that a part of a message moved to or from the process. A server that has been asked which
            workers wait is "asked" until it answers.
        took_s: (stage, role, index) -> how long a process has taken to start or to prepare, including all pauses.
        connected: (role, index) of the processes that have sent a message.
        usual_s: worker -> moving average of the worker's iteration time in seconds, including waiting.
        devices: worker -> its device and the model of this device, for workers that have connected.
        traffic: the number of bytes that each link between machines has carried.
        progress: how far the run has come.
    """

    def __init__(self, job: Job, core: Coordinator, machines: Machines) -> None:
        self.clocks: Clocks[tuple[Stage, str, int]] = Clocks(time.monotonic(), gap_s=CLOCK_GAP_S)
        self.took_s: dict[tuple[Stage, str, int], float] = {}
        self.connected: set[tuple[str, int]] = set()
        self.usual_s: dict[int, float] = {}
        self.devices: dict[int, str] = {}
        self.traffic = TrafficMeter()
        self.progress = ProgressMeter()
        # (stage, role, index) -> time at which the stage began
        self._begun_s: dict[tuple[Stage, str, int], float] = {}
        self._job = job
        self._core = core
        self._machines = machines
        self._state_times = StateTimes()
        self._noted_ticks = 0
        # worker -> (its latest iteration, value of `counted_s` when this iteration was first reported)
        self._paced: dict[int, tuple[int, float]] = {}

    def machine_of(self, role: str, index: int) -> str:
        """Return the name of the machine of a process."""
        return self._machines.names_of(role).get(index, LOCAL)

    def named_devices(self) -> dict[int, str]:
        """Return the device of each worker, for the user; {} if all workers are on the CPU."""
        found = dict(sorted(self.devices.items()))
        return found if set(found.values()) - {CPU.label} else {}

    # -- processes ----------------------------------------------------------------------------------------

    def expect(self, role: str, index: int) -> None:
        """Wait for a process from now on. Forget all observations of an earlier process with this role and index."""
        self.left(role, index)
        self.connected.discard((role, index))
        self.took_s.pop(("starting", role, index), None)
        if role == "worker":
            self.took_s.pop(("preparing", role, index), None)
            for known in (self.usual_s, self._paced, self.devices):
                known.pop(index, None)
        now_s = time.monotonic()
        self._enter("starting", role, index, now_s)
        self.clocks.begin(("silent", role, index), now_s)

    def heard(self, role: str, index: int) -> None:
        """Note a message from a process."""
        now_s = time.monotonic()
        self.clocks.begin(("silent", role, index), now_s)
        if (role, index) in self.connected:
            return
        self.connected.add((role, index))
        self._pass("starting", role, index, now_s)
        if role == "worker":
            self._enter("preparing", role, index, now_s)

    def prepared(self, worker: int) -> None:
        """Record that a worker has registered its model."""
        self._pass("preparing", "worker", worker, time.monotonic())

    def left(self, role: str, index: int) -> None:
        """Stop waiting for a process, because the process has left."""
        for stage in get_args(Stage):
            self.clocks.end((stage, role, index))

    def _pass(self, stage: Stage, role: str, index: int, now_s: float) -> None:
        """Record that a process has passed a stage."""
        if (begun_s := self._begun_s.pop((stage, role, index), None)) is not None:
            self.took_s[stage, role, index] = now_s - begun_s
        self.clocks.end((stage, role, index))

    def _enter(self, stage: Stage, role: str, index: int, now_s: float) -> None:
        self._begun_s[stage, role, index] = now_s
        self.clocks.begin((stage, role, index), now_s)

    # -- the state of the job -----------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """Return the state of the job, for observers."""
        now_ticks = self._job.now_ticks()
        core, machines = self._core, self._machines
        self.progress.note(core, now_ticks)
        observed = Observed(
            servers=self._job.servers,
            elapsed_s=now_ticks / TICKS_PER_S,
            connected={index for role, index in self.connected if role == "worker"},
            machine_of=machines.names_of("worker"),
            devices=self.named_devices(),
            state_s=self._state_times.state_s(now_ticks),
            usual_s=self.usual_s,
            processes=machines.liveness.states(),
            machines=machines.statuses(now_ticks),
            traffic=self.traffic.links(now_ticks),
            progress=self.progress.read(core, now_ticks),
            awaited=self.progress.awaited(core, now_ticks),
        )
        return job_status(core, observed)

    # -- states and paces ---------------------------------------------------------------------------------

    def note_states(self) -> None:
        """Record the states of all workers, so that the status can tell how long each worker has been in its state."""
        now_ticks = self._job.now_ticks()
        if now_ticks < self._noted_ticks + NOTE_INTERVAL_TICKS:
            return
        self._noted_ticks = now_ticks
        core, processes = self._core, self._machines.liveness.states()
        states = {}
        for worker in {*core.members.live, *core.members.finished, *core.members.lost}:
            reported = core.board.get(worker)
            states[worker] = (
                held_state(core, worker, processes)
                or worker_state(core, worker, ("worker", worker) in self.connected),
                None if reported is None else reported.iteration,
            )
        self._state_times.note(states, now_ticks)
        self.progress.note(core, now_ticks)

    def note_pace(self, worker: int, now: Status) -> None:
        """Update the moving average of a worker's iteration time."""
        now_s = self.clocks.counted_s(time.monotonic())  # without pauses, which do not belong to an iteration
        before = self._paced.get(worker)
        if before is not None and now.iteration > before[0]:
            each_s = (now_s - before[1]) / (now.iteration - before[0])
            self._machines.liveness.iterated(worker, round(each_s * TICKS_PER_S))
            usual_s = self.usual_s.get(worker, each_s)
            self.usual_s[worker] = usual_s + (each_s - usual_s) / PACE_SPAN
        if before is None or now.iteration > before[0]:
            self._paced[worker] = now.iteration, now_s

    # -- traffic ------------------------------------------------------------------------------------------

    def note_own_traffic(self, streams: Mapping[tuple[str, int], Stream[Any]]) -> None:
        """Record the traffic of this process's connections to other machines.

        Args:
            streams: (role, index) -> connection to the process with this role and index.
        """
        machines = {
            "worker": self._machines.hosts_of("worker"),
            "server": self._machines.hosts_of("server"),
            "agent": self._machines.hosts,
        }
        for (role, index), stream in streams.items():
            machine = machines[role].get(index, LOCAL)
            if machine != LOCAL and (traffic := traffic_of(stream.sock)) is not None:
                self._note_traffic((role, index), LOCAL, machine, traffic)

    def note_traffic_of(self, server: int, message: Waits) -> None:
        """Record the traffic of a server's connections to workers."""
        machines = self._machines.hosts_of("worker")
        here = self._machines.hosts_of("server").get(server, LOCAL)
        for each in message.traffic:
            there = machines.get(each.worker, LOCAL)
            if there != here:
                traffic = Traffic(each.sent_bytes, each.received_bytes)
                self._note_traffic(("server", server, each.worker), here, there, traffic)
        for worker, moved_ticks in message.moved_ticks:
            self.clocks.renew(("silent", "worker", worker), self._job.monotonic_s_of(moved_ticks))

    def _note_traffic(self, connection: Hashable, here: str, there: str, traffic: Traffic) -> None:
        """Record the traffic of a connection between two machines, as counted by the machine `here`."""
        now_ticks = self._job.now_ticks()
        self.traffic.note(connection, Direction(here, there), traffic.sent, now_ticks)
        self.traffic.note(connection, Direction(there, here), traffic.received, now_ticks)


# -- Finds out what a stalled run is waiting for: a silent worker or server, or conditions that will never hold
#
# The result is only a guess, because a worker whose script evaluates its model for a minute is as silent as a
# worker that hangs. Therefore the time after which a worker is reported depends on the usual duration of its
# iterations. The report names the process and says how long the process has been silent; the user decides what to do.
# The clock of a process starts when the process is expected, and stands still while the run waits for other
# machines (see `core.liveness`). Possible reports:
#
#     before training   a process has not started, or a worker has not begun to train, although another process took
#                       much less time to do so; or no process has done so after more than a minute
#     in training       a server does not answer; or a worker that should be computing has been silent for a long time
#                       while other workers wait for this worker, or while all workers are silent
#     standstill        every worker is waiting, and no condition will release any worker. With the sync models of this
#                       package, a standstill happens only if some workers wait in a barrier for other workers, which in
#                       turn wait for the workers in the barrier; user-defined conditions may also cause a standstill in
#                       other ways

# A worker is reported when its silence has lasted at least PATIENCE_S, and at least PATIENCE_ITERATIONS times
# the worker's usual iteration time.
PATIENCE_S = 3.0
PATIENCE_ITERATIONS = 5
# Permitted silence while a worker's iteration time is unknown. This is long enough for an iteration that compiles
# code. On an accelerator, any iteration may compile code, so workers on accelerators always have at least this time.
FIRST_PATIENCE_S = 15.0
# Time for a machine's first process to start, and for the first worker to reach step().
NOBODY_YET_PATIENCE_S = 60.0
# Permitted silence of a server, which answers only after it has handled its current message.
SERVER_PATIENCE_S = 3.0
SUSPICIOUS_S = 2.0  # after this time without a computing worker, ask the servers which workers are waiting
APART_S = 1.0  # minimum time between two requests to the servers
IDLE = "idle"  # the state in which no worker computes


class AwaitedProcess(msgspec.Struct, frozen=True):
    """A process that a run is waiting for.

    Attributes:
        role: "worker" or "server".
        index: index of the worker or server.
        quiet_s: seconds for which this process has been silent, although it could have sent a message. At the start
            of a run, seconds by which this process has taken longer than the fastest process.
        doing: state of the process, as a phrase that completes a sentence beginning with "It".
        waiting: the workers that wait for this process.
        usual_s: usual duration of the worker's iterations in seconds; 0 if unknown.
    """

    role: Role
    index: int
    quiet_s: float
    doing: str
    waiting: tuple[int, ...]
    usual_s: float = 0.0


class StallWatch:
    """Detects stalls of one run. The coordinator's host must call `look` regularly.

    Args:
        job: the configuration of the run. In training, the permitted silence is at most `stall_timeout_s` while a
            worker's iteration time is unknown.
        core: the state machine of the coordinator.
        watch: what is known of the processes.
        asked: the servers that were asked which workers are waiting, and have not answered yet.
        ask: asks the servers which workers are waiting.

    Attributes:
        awaited: the processes for which the run has been waiting for an unusually long time.
        ever_awaited: (role, index) of all processes that have ever been in `awaited`.
        standstill: a description of what each worker waits for, if no worker can ever continue; else "".
    """

    def __init__(
        self, job: Job, core: Coordinator, watch: JobWatch, asked: Collection[int], ask: Callable[[], None]
    ) -> None:
        self.awaited: tuple[AwaitedProcess, ...] = ()
        self.ever_awaited: set[tuple[str, int]] = set()
        self.standstill = ""
        self._first_patience_s = min(FIRST_PATIENCE_S, job.stall_timeout_s or FIRST_PATIENCE_S)
        self._job = job
        self._core = core
        self._watch = watch
        self._asked = asked
        self._ask = ask
        self._asked_s = -math.inf
        # The clock of the state in which no worker computes.
        self._idle: Clocks[str] = Clocks(time.monotonic(), gap_s=CLOCK_GAP_S)
        self._before: dict[int, Waits] = {}  # previous answers of the servers
        self._none_late_s = 0.0  # before `counted_s` reaches this value, no worker in training can be late

    def look(self) -> None:
        """Update `awaited` and `standstill`."""
        self.awaited = tuple(self._look())
        self.ever_awaited.update((each.role, each.index) for each in self.awaited)

    def _look(self) -> list[AwaitedProcess]:
        core, clocks = self._core, self._watch.clocks
        members, now_s = core.members.live or core.awaited, time.monotonic()
        # True if the run waits for workers or servers that have yet to join
        waits = core.quorum.paused or core.shortage != ""
        clocks.look(now_s, counts=not waits)
        self._idle.look(now_s, counts=not waits)
        kept = self._kept & members
        for worker in kept:
            clocks.renew(("silent", "worker", worker), now_s)
        if core.model is None and core.unable_to_begin:
            self.standstill = unable_to_begin(sorted(members), core.collectives.waiting)
        if waits:
            self._before = {}
            self._idle.end(IDLE)
            return []
        if core.model is None:
            return self._look_before_training(sorted(members), kept, now_s)
        gathered, board = core.collectives.waiting, core.board
        idle = bool(members) and all(
            worker in gathered or (worker in board and board[worker].state != "computing")
            for worker in members
        )
        idle_s = self._idle.hold(IDLE, now_s, holds=idle)
        late = self._late(members, now_s)
        if not late and (idle_s is None or idle_s < SUSPICIOUS_S):
            self._before = {}
            return []
        live = sorted(members)
        if now_s - self._asked_s > APART_S:
            if not self._asked and self._answered:
                self._look_for_standstill(live, idle_s)
            self._asked_s = now_s
            self._ask()
            return []
        silent = self._silent_servers(now_s, sorted(late))
        if silent or not self._answered:
            return silent
        if not core.started and core.awaits_initial_weights:
            initializer = core.initializer
            if initializer not in late:
                return []
            waiting = tuple(worker for worker in live if worker != initializer)
            doing = "has not sent the initial weights yet"
            return [AwaitedProcess("worker", initializer, late[initializer], doing, waiting)]
        held = self._held
        for worker in held:
            clocks.renew(("silent", "worker", worker), now_s)
        awaited = [worker for worker in live if worker in late and worker not in held]
        if not held and len(awaited) < len(live):
            return []  # no worker waits for the late workers, so the remaining workers can continue
        waiting = tuple(worker for worker in live if worker in held)
        return [self._awaited(worker, late[worker], waiting) for worker in awaited]

    def _late(self, live: Collection[int], now_s: float) -> dict[int, float]:
        """Return the workers in training that have been silent for too long, with the durations of their silences.

        The silences are computed only when one of them can be too long. A message from a worker ends the worker's
        silence, and may change the worker's usual iteration time. After a message, the worker cannot be late before the
        shortest patience has passed.
        """
        counted_s = self._watch.clocks.counted_s(now_s)
        if counted_s < self._none_late_s:
            return {}
        gathered, late = self._core.collectives.waiting, {}
        least_s = min(PATIENCE_S, self._first_patience_s)
        for worker in live:
            quiet_s, patience_s = self._quiet_s("worker", worker, now_s), self._patience_s(worker)
            if quiet_s > patience_s and worker not in gathered:
                late[worker] = quiet_s
            least_s = min(least_s, patience_s - quiet_s)
        self._none_late_s = counted_s + least_s
        return late

    @property
    def _kept(self) -> set[int]:
        """The workers that send nothing because they wait for other workers: their silence is no sign of a problem."""
        core = self._core
        kept = {*core.collectives.waiting, *core.awaiting_turn, *core.reconfigurations.joining}
        if core.model is None:
            kept.update(worker for stage, _, worker in self._watch.took_s if stage == "preparing")
        return kept

    def _quiet_s(self, role: Role, index: int, now_s: float) -> float:
        """Return for how long a process that could act has been silent; 0 if the process is not expected."""
        return self._watch.clocks.waited_s(("silent", role, index), now_s) or 0.0

    def _silent_servers(self, now_s: float, waiting: list[int]) -> list[AwaitedProcess]:
        clocks = self._watch.clocks
        asked_s = [
            (server, clocks.waited_s(("asked", "server", server), now_s) or 0.0)
            for server in sorted(self._asked)
        ]
        return [
            AwaitedProcess("server", server, quiet_s, "has not answered the coordinator yet", tuple(waiting))
            for server, quiet_s in asked_s
            if quiet_s > SERVER_PATIENCE_S
        ]

    def _awaited(self, worker: int, quiet_s: float, waiting: tuple[int, ...]) -> AwaitedProcess:
        status = self._core.board.get(worker)
        doing = (
            f"last reported in iteration {status.iteration}"
            if status is not None
            else "has received its first weights"
            if self._core.started
            else "has not received its first weights yet"
        )
        usual_s = self._watch.usual_s.get(worker, 0.0)
        return AwaitedProcess("worker", worker, quiet_s, doing, waiting, usual_s)

    def _look_before_training(
        self, live: list[int], kept: Collection[int], now_s: float
    ) -> list[AwaitedProcess]:
        watch = self._watch
        waiting = tuple(worker for worker in live if worker in kept)
        # The vacant servers are left out: machines that have yet to join bring them.
        servers = [k for k in range(self._job.servers) if k not in self._core.servers.vacant]
        awaited = []
        stages: list[tuple[Literal["starting", "preparing"], Role, int, str]]
        stages = [("starting", "worker", worker, "has not started yet") for worker in live]
        stages += [("starting", "server", server, "has not started yet") for server in servers]
        stages += [
            ("preparing", "worker", worker, "has not begun to train yet")
            for worker in live
            if worker not in waiting
        ]
        for stage, role, index, doing in stages:
            waited_s = watch.clocks.waited_s((stage, role, index), now_s)
            if waited_s is None:
                continue
            # The processes of a machine start at the same time, and all workers run the same script. So no process
            # should take much longer than the fastest process.
            machine = watch.machine_of(role, index)
            fastest_s = min(
                (
                    each_s
                    for (of, other, number), each_s in watch.took_s.items()
                    if of == stage and (stage == "preparing" or watch.machine_of(other, number) == machine)
                ),
                default=None,
            )
            quiet_s = min(waited_s - (fastest_s or 0.0), self._quiet_s(role, index, now_s))
            if quiet_s >= (NOBODY_YET_PATIENCE_S if fastest_s is None else self._first_patience_s):
                awaited.append(AwaitedProcess(role, index, quiet_s, doing, waiting))
        return awaited

    @property
    def _answers(self) -> list[Waits]:
        return [answer for _, answer in sorted(self._core.waits.items())]

    @property
    def _held(self) -> set[int]:
        """The workers that wait for a pull, for a call that all workers make, or for their turn."""
        pulling = {worker for answer in self._answers for shard in answer.shards for worker, _ in shard.pulls}
        return pulling | self._core.awaiting_turn | self._core.collectives.waiting.keys()

    @property
    def _answered(self) -> bool:
        return len(self._core.waits) == self._job.servers

    def _patience_s(self, worker: int) -> float:
        usual_s = self._watch.usual_s.get(worker)
        if usual_s is None:
            return self._first_patience_s
        on_cpu = self._watch.devices.get(worker, CPU.label) == CPU.label
        return max(PATIENCE_S if on_cpu else self._first_patience_s, PATIENCE_ITERATIONS * usual_s)

    def _look_for_standstill(self, live: list[int], idle_s: float | None) -> None:
        """Set `standstill` if the servers repeat their previous answers, all workers wait and no timer is set."""
        core = self._core
        before, self._before = self._before, core.waits.copy()
        shards = [shard for answer in self._answers for shard in answer.shards]
        # While some workers wait in a call such as a barrier, they push without a gradient, so that no other worker has
        # to wait for them. Such a push may arrive only after a while.
        patience_s = max(map(self._patience_s, core.standing_in), default=0.0)
        if (
            idle_s is None
            or idle_s < patience_s
            or self._before != before
            or any(answer.timers for answer in self._answers)
            or set(live) - self._held
            or any({worker for worker, _ in shard.staleness} != set(live) for shard in shards)
        ):
            # A worker can still continue: its pull was answered, its push has not arrived yet, or a shard has yet to
            # learn that another worker has joined, left or been lost.
            return
        self.standstill = standstill(shards, core.collectives.waiting)
