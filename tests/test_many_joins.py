"""A thousand joins and losses in random order: no worker, message or sample is lost track of."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

import paceline.sim.job
from paceline.core import messages
from paceline.core.coordinator import Coordinator
from paceline.core.host import Host
from paceline.core.layout import Layout, Parameter
from paceline.core.messages import Message, Register, Started
from paceline.core.model_spec import ModelSpec, OptimizerSpec
from paceline.core.requests import COORDINATOR, Fail, Peer, Request, Timer, server_peer, worker_peer
from paceline.core.server import Server
from paceline.errors import ConfigurationError, ProtocolError
from paceline.sim import Cluster, LogNormal, Presence, simulate
from paceline.sim.clockwork import Dataset
from paceline.sync.schedule import read_schedule

from .marks import thorough

MODEL = ModelSpec(
    Layout.of([Parameter(("a",), (40,), "float32")]), OptimizerSpec("SGD", ({"lr": 0.1},), (0,)), ()
)
SERVERS = 2
SLOTS = 50
JOINS = 1000


class Cores:
    """A coordinator, two servers and up to 50 workers that only join and are lost; messages take random times.

    A worker is identified by its index and its incarnation. Messages between the same two processes keep their order.
    """

    def __init__(self, sync: str, seed: int) -> None:
        self.draws = random.Random(seed)
        self.coordinator = Coordinator(
            read_schedule(sync), workers=SLOTS, servers=SERVERS, shards=SERVERS, late=range(SLOTS), least=1
        )
        self.servers = [Server(0) for _ in range(SERVERS)]
        self.channels: dict[tuple[object, object], deque[Any]] = {}
        self.alive: set[tuple[int, int]] = set()  # (worker, incarnation)
        self.unconnected: set[tuple[int, int]] = set()  # those that have not connected to the coordinator
        self.known: set[tuple[int, int]] = set()  # every worker that there ever was
        self.connections: set[Any] = (
            set()
        )  # (process, server) of each open connection of a worker to a server
        self.joined = 0  # number of workers that have received Started
        self.refused = 0
        for index in range(SERVERS):
            self.coordinator.connected(server_peer(index), 0, f"address {index}")

    # -- what happens -------------------------------------------------------------------------------------

    def join(self) -> bool:
        """Start a worker, unless all indices are in use."""
        try:
            [(worker, incarnation)] = self.coordinator.invite(1).items()
        except ConfigurationError:
            return False
        assert (worker, incarnation) not in self.known
        assert not any(worker == other for other, _ in self.alive)
        self.known.add((worker, incarnation))
        self.alive.add((worker, incarnation))
        self.unconnected.add((worker, incarnation))
        self.post((worker, incarnation), COORDINATOR, "hello")
        self.post((worker, incarnation), COORDINATOR, Register(MODEL))
        return True

    def lose(self, process: tuple[int, int]) -> None:
        """Let a process end, or be taken out although it goes on. A part of what it has sent may get lost."""
        self.alive.remove(process)
        if self.draws.random() < 0.3 and process not in self.unconnected:
            self.perform(COORDINATOR, self.coordinator.take_out(process[0], 0))
        for receiver in (COORDINATOR, *map(server_peer, range(SERVERS))):
            channel = self.channels.setdefault((process, receiver), deque())
            while channel and self.draws.random() < 0.3:
                channel.pop()
            channel.append("end")

    def post(self, sender: object, receiver: object, message: object) -> None:
        self.channels.setdefault((sender, receiver), deque()).append(message)

    def deliver(self, most: int) -> None:
        """Deliver the first message of a random channel, up to `most` times."""
        for _ in range(most):
            ready = [ends for ends, channel in self.channels.items() if channel]
            if not ready:
                return
            sender, receiver = self.draws.choice(ready)
            self.arrive(sender, receiver, self.channels[sender, receiver].popleft())

    def arrive(self, sender: Any, receiver: Any, message: Any) -> None:
        if receiver == COORDINATOR:
            self.at_coordinator(sender, message)
        elif isinstance(receiver, Peer):
            self.at_server(receiver.index, sender, message)
        elif receiver in self.alive and isinstance(message, Started):
            self.joined += 1
            for index in range(SERVERS):
                self.post(receiver, server_peer(index), "hello")
                if message.initializer == receiver[0]:
                    self.post(receiver, server_peer(index), messages.InitialWeights(index))

    def at_coordinator(self, sender: Any, message: Any) -> None:
        core = self.coordinator
        if isinstance(sender, Peer):
            self.perform(COORDINATOR, core.handle(sender, message, 0))
            return
        worker, incarnation = sender
        newest = core.members.incarnation(worker) == incarnation
        try:
            if message == "hello":
                self.perform(COORDINATOR, core.connected(worker_peer(worker), 0, "", incarnation))
                self.unconnected.discard(sender)
            elif message == "end" and sender in self.unconnected:
                self.unconnected.discard(sender)
                self.perform(COORDINATOR, core.ended(worker, 0, incarnation))
            elif message == "end" and newest:
                self.perform(COORDINATOR, core.disconnected(worker_peer(worker), 0))
            elif isinstance(message, Message) and newest and not core.members.fate(worker):
                self.perform(COORDINATOR, core.handle(worker_peer(worker), message, 0))
        except ProtocolError:
            self.refused += 1

    def at_server(self, index: int, sender: Any, message: Any) -> None:
        core = self.servers[index]
        if sender == COORDINATOR:
            if isinstance(message, messages.WorkerLost) and message.at_once:
                self.cut(index, message.worker, message.incarnation)
            self.perform(server_peer(index), core.handle(COORDINATOR, message, 0))
            return
        worker, incarnation = sender
        connection = (sender, index)
        try:
            if message == "hello":
                core.require_expected(worker, 0, incarnation)
                self.connections.add(connection)
                self.perform(server_peer(index), core.connected(worker, 0, 0, incarnation))
            elif connection not in self.connections:
                return
            elif message == "end":
                self.cut(index, worker, incarnation)
            else:
                self.perform(server_peer(index), core.handle(worker_peer(worker), message, 0))
        except ProtocolError:
            self.refused += 1

    def cut(self, index: int, worker: int, incarnation: int) -> None:
        """Close the connection of a server to a worker if it is open."""
        connection = ((worker, incarnation), index)
        if connection in self.connections:
            self.connections.remove(connection)
            self.perform(server_peer(index), self.servers[index].disconnected(worker, 0))

    def perform(self, sender: Peer, requests: list[Request]) -> None:
        _PostingHost(self, sender).carry_out(requests)

    def validate(self) -> None:
        self.coordinator.validate()
        for server in self.servers:
            if server.shards:
                server.validate()


class _PostingHost(Host):
    """Posts the messages that a core sends. No worker pushes, so servers request nothing else."""

    def __init__(self, cores: Cores, sender: Peer) -> None:
        self._cores = cores
        self._sender = sender

    def send(self, to: Peer, message: Message) -> None:
        if to.role == "worker":
            incarnation = self._cores.coordinator.members.incarnation(to.index)
            self._cores.post(self._sender, (to.index, incarnation), message)
        else:
            self._cores.post(self._sender, to, message)

    def set_timer(self, timer: Timer) -> None:
        """Do nothing: no time passes."""

    def end_run(self, failure: Fail) -> None:
        """Do nothing: no worker reports that it has the weights, so the loss of the initializer ends the run."""


@pytest.mark.parametrize("sync", ["bsp", "asp", "elastic-bsp:lookahead=5", *thorough("ssp:staleness=2")])
def test_a_thousand_joins_and_losses(sync: str) -> None:
    cores = Cores(sync, seed=3)
    keeper = cores.join() and next(iter(cores.alive))  # it initializes the weights, so it is not lost
    cores.deliver(10**6)
    while len(cores.known) < JOINS:
        losable = sorted(cores.alive - {keeper})
        if cores.draws.random() < 0.5 or not losable:
            cores.join()
        else:
            cores.lose(cores.draws.choice(losable))
        cores.deliver(cores.draws.choice((5, 100)))
        cores.validate()
    cores.deliver(10**6)
    cores.validate()

    assert (len(cores.known), cores.joined > JOINS / 4) == (JOINS, True)
    alive = {worker for worker, _ in cores.alive}
    assert cores.coordinator.members.present == cores.coordinator.members.live == alive
    assert all(server.expected == alive for server in cores.servers)
    assert {worker for worker in range(SLOTS) if cores.coordinator.members.fate(worker)} <= set(
        range(SLOTS)
    ) - alive
    assert len(cores.coordinator.members.lost) + len(alive) <= JOINS
    for process in sorted(cores.alive):
        cores.lose(process)
    cores.deliver(10**6)
    assert cores.coordinator.members.live == cores.coordinator.members.present == set()
    assert all(not server.expected for server in cores.servers)
    assert len(cores.coordinator.invite(SLOTS)) == SLOTS  # no index has been lost


PRESENCE = Presence(preempted_every_s=20.0, back_after_s=5.0)


@pytest.mark.parametrize("sync", ["bsp", "elastic-bsp:lookahead=5", *thorough("asp")])
def test_no_sample_is_lost_track_of(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Coordinator] = []

    class Validated(Coordinator):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            jobs.append(self)

        def disconnected(self, peer: Peer, now_ticks: int) -> list[Request]:
            requests = super().disconnected(peer, now_ticks)
            self.validate()
            return requests

    monkeypatch.setattr(paceline.sim.job, "Coordinator", Validated)
    cluster = Cluster(
        compute_s=[LogNormal(median=1.0, sigma=0.3)] * 20,
        servers=2,
        latency_s=LogNormal(median=0.01, sigma=0.5),
        presence=dict.fromkeys(range(1, 20), PRESENCE),
    )
    data = Dataset(samples=40_000, batch_size=16, epochs=2, split="dynamic")
    result = simulate(cluster, sync, data=data, seed=1)

    [core] = jobs
    [counts] = core.data.counts().values()
    assert len(core.members.lost) > 100
    assert counts.used + counts.torn == data.samples * data.epochs
    assert (counts.left, counts.leased) == (0, 0)
    assert result.measures.samples <= data.samples * data.epochs
