"""The agents of the machines that have joined a run: what they report, and what happens when a machine is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ..checkpoints.manifest import MANIFEST, PIECE_BYTES, read_manifest
from ..core.coordinator import Coordinator
from ..core.machines.heartbeats import answer
from ..core.machines.liveness import Verdict
from ..core.protocol.messages import (
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
    TakenOut,
)
from ..core.protocol.requests import Request
from ..errors import ConfigurationError, ProtocolError
from ..trace.clocks import ClockRecorder
from .best_effort import BestEffortFile
from .hub import Caller, Hub
from .job import Job, encode_job
from .job_watch import JobWatch
from .machines import Machines

__all__ = ["Agents", "MachinesLeft"]

log = logging.getLogger("paceline.coordinator")

Perform = Callable[[Sequence[Request]], None]


def machine_of(agent: Caller) -> int:
    """Return the index of an agent's machine, by which records name it. Machine 0 is the one with the coordinator."""
    return agent.index + 1


class MachinesLeft(NamedTuple):
    """What the machines that are left bring to a run that has lost a server.

    Attributes:
        workers: number of their workers.
        servers: number of their servers.
    """

    workers: int
    servers: int


class Agents:
    """Handles what the agents of machines report.

    Args:
        job: the configuration of the run.
        core: the state machine of the coordinator.
        hub: the connections of the coordinator.
        members: (role, index) -> connection of an agent, a worker or a server.
        machines: the machines that have joined the run.
        watch: what is known of the processes.
        perform: function that carries out requests of the core.
        give_up: function that closes the connection to a server, and keeps the reason.

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
        self._gone: set[tuple[int, int]] = set()  # (worker, incarnation) of those that do not join again
        self._leaving: set[int] = set()  # agents of machines that were asked to leave with their servers
        self._clocks: dict[int, ClockRecorder] = {}  # machine -> what records the offset of its clock
        self._main = core.main.worker  # the main worker of which the agents know

    def _admitted(self) -> Iterator[Caller]:
        """Yield the connections to the agents of all admitted machines. Others expect an answer to their offer."""
        for (role, index), member in sorted(self._members.items()):
            if role == "agent" and index in self._machines.names:
                yield member

    # -- what agents are told -----------------------------------------------------------------------------

    def kill(self, role: Literal["worker", "server"], index: int, why: str) -> None:
        """Kill a worker or server that runs on another machine."""
        for agent in self._machines.agents_of(role, index):
            if (member := self._members.get(("agent", agent))) is not None:
                self._hub.send(member, KillOrdered(role, index, why))

    def dismiss(self, failure: str, *, saved: bool) -> None:
        """Tell all machines that the run is over, and then that its results have been saved. See `RunEnded`."""
        for agent in self._admitted():
            self._hub.send(agent, RunEnded(failure, saved))

    def resume(self, words: str) -> None:
        """Tell all machines that the run goes on from a checkpoint. See `RunResumes`."""
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
        address = agent.host  # first, because it is an error if the connection has ended
        try:
            if message.version != self._job.version:
                raise ConfigurationError(
                    f"this machine has Paceline {message.version}, but the run uses Paceline "
                    f"{self._job.version}. Install the same version on all machines."
                )
            servers, workers = self._invite(message)
        except ConfigurationError as error:
            self._hub.send(agent, Refused(str(error)))
            return
        now_ticks = self._job.now_ticks()
        self._machines.admit(agent.index, address, workers, servers, now_ticks)
        for server in servers:
            self._watch.expect("server", server)
        for worker in workers:
            self._watch.expect("worker", worker)
        machine = machine_of(agent)
        self._hub.send(agent, MachineAdmitted(workers, encode_job(self._job), now_ticks, machine, servers))

    def _send_piece(self, agent: Caller, message: FetchCheckpoint) -> None:
        """Send a machine a piece of the checkpoint with which the run begins."""
        if agent.stream.backlog:
            raise ProtocolError("FetchCheckpoint arrived before the previous answer was read")
        if (resumed := self._job.resumed) is None:
            self._hub.send(agent, CheckpointPiece())
            return
        path = Path(resumed.path)
        if message.name != MANIFEST and message.name not in read_manifest(path).files:
            raise ProtocolError(f"the checkpoint has no file {message.name!r}")
        with (path / message.name).open("rb") as file:
            file.seek(message.begin)
            piece = memoryview(file.read(PIECE_BYTES))
        self._hub.send(agent, CheckpointPiece(resumed.path, self._core.model is not None), [piece])

    def _invite(self, offer: MachineJoined) -> tuple[tuple[int, ...], dict[int, int]]:
        """Expect the servers and the workers that a machine offers, and return their indices.

        Raises:
            ConfigurationError: the run needs fewer of them. Then nothing is expected.
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
        """Return what the machines that are left bring to the run when they join it again."""
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
        """Handle the end of the connection to an agent."""
        self._machines.liveness.machine_left(agent.index)
        if (clock := self._clocks.pop(machine_of(agent), None)) is not None:
            clock.close()
        reason = "the connection to its machine ended"
        for worker, incarnation in self._machines.workers[agent.index].items():
            self.note_end(worker, reason, incarnation)
        self._lose_servers(agent.index, reason)

    def note_end(self, worker: int, how: str, incarnation: int = 0, *, asked: bool = False) -> None:
        """Handle the end of a worker's process, after the messages that it has sent.

        Args:
            worker: index of the worker.
            how: a phrase that says how the process ended.
            incarnation: how often the index of the worker had been used before.
            asked: True if the worker had been asked to leave.
        """
        if incarnation != self._core.members.incarnation(worker):
            return  # its index has been used again
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
        """Handle the loss of a server that a machine has brought. A run in progress cannot go on without it.

        If the run has not begun yet, another machine may bring the server, and the agent ends what it has started.

        Args:
            agent: index of the machine's agent.
            server: index of the server. If the machine does not have it any more, this method has no effect.
            how: a clause that says why it is lost.
            output: the last lines of its output, if they say more.
        """
        if self.stopping or server not in self._machines.servers[agent]:
            return
        name = self._machines.names[agent]
        if ends := self._core.server_lost(server, f"{how} (machine {name})", output, certain=True):
            self._perform(ends)
            return
        log.warning("server %d of machine %s has left before the run has begun: %s", server, name, how)
        self._machines.servers[agent].discard(server)
        self._watch.left("server", server)
        if (member := self._members.get(("server", server))) is not None:
            self._hub.drop(member, how)
        if (member := self._members.get(("agent", agent))) is not None:
            self._hub.send(member, RunEnded(f"server {server} has ended before the run has begun: {how}"))

    def look(self) -> None:
        """Take out the machines and workers that are no longer alive, if it is time to look for them."""
        liveness, now_ticks = self._machines.liveness, self._job.now_ticks()
        if liveness.next_ticks is not None and now_ticks >= liveness.next_ticks:
            for verdict in liveness.look(now_ticks):
                self._take_out(verdict)

    def _take_out(self, verdict: Verdict) -> None:
        """Go on without a machine that is suspected to be down, or without a worker that is stopped.

        The workers and the agent receive the reason if they ever read again. If the machine has brought servers, a
        run in progress cannot go on without them.
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
        """Go on without a worker, whose machine must not start it again."""
        incarnation = self._core.members.incarnation(worker)
        agents = self._machines.agents_of("worker", worker)
        hosts = [each for each in agents if self._machines.workers[each][worker] == incarnation]
        agent = self._members.get(("agent", hosts[0])) if hosts else None
        self._take_out_worker(worker, reason, agent, for_good=True)

    def _take_out_worker(
        self, worker: int, reason: str, agent: Caller | None, *, for_good: bool = False
    ) -> None:
        """Go on without a worker whose process may go on, and tell it and its agent, if it has one."""
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
