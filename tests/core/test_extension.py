"""The protocol by which a script extends the model, in every order in which its messages can arrive.

The search runs the same cores as a live run: a coordinator, two servers with one shard each, and two or three
workers. All workers propose the same extended model, once or twice. The messages on one connection keep their order,
and everything else can happen in any order. A worker may be lost at any moment; the coordinator and each server
notice it later, after some of the worker's last messages or none. A worker that has been told that the model is
extended connects to each server again, perhaps before the server has been told. If it is lost, a server may read its
greeting much later, during the next extension. The search keeps, for each server, what its memory would contain:
which layout, and whose initial weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from paceline.core import messages
from paceline.core.coordinator import Coordinator
from paceline.core.layout import BufferSpec, Layout, ModelSpec, OptimizerSpec, Parameter, require_extension
from paceline.core.messages import Answer, ExtensionReady, Message, Ready, Status
from paceline.core.reconfiguration import Extension
from paceline.core.requests import COORDINATOR, Host, Peer, Proceed, Request, Send, server_peer, worker_peer
from paceline.core.server import Server
from paceline.core.worker import Worker
from paceline.errors import ProtocolError
from paceline.sync import ASP
from paceline.sync.schedule import Schedule, ScheduleStep
from paceline.testing.state_pools import Written
from tests.support.marks import thorough

SERVERS = 2
SGD = OptimizerSpec("SGD", ({"lr": 0.1},), (0,))
FIRST = Parameter(("a",), (40,), "float32")
MODEL = ModelSpec(Layout.of([FIRST]), SGD, ())
ADDED = Parameter(("b",), (40,), "float32", 1, 1)
EXTENDED = ModelSpec(Layout.of([FIRST, ADDED]), SGD, (), (SGD,))
LAST = ModelSpec(Layout.of([FIRST, ADDED, Parameter(("c",), (40,), "float32", 2, 2)]), SGD, (), (SGD, SGD))
MODELS = [MODEL, EXTENDED, LAST]
"""The model after each number of extensions."""


class Memory:
    """What a server's memory contains: see `paceline.run.server_memory`.

    Attributes:
        origins: for each extension in force, the worker whose initial weights the server has stored.
        prepared: number of the last extension for which the server has prepared.
        origin: the worker whose initial weights have arrived for this extension; None if none have arrived.
    """

    def __init__(self) -> None:
        self.origins: list[int] = []
        self.prepared = 0
        self.origin: int | None = None

    def extend(self) -> None:
        if len(self.origins) < self.prepared:
            assert self.origin is not None, "the initial weights have not arrived"
            self.origins.append(self.origin)


class Job:
    """A run whose workers have begun to train, and are about to propose an extended model."""

    def __init__(self, workers: int, losses: int, extensions: int = 1, *, late_losses: bool = False) -> None:
        schedule = Schedule((ScheduleStep((ASP(),)),))
        self.losses = losses
        self.extensions = extensions
        self.late_losses = (
            late_losses  # True if workers are lost only after the first of two extensions is complete
        )
        self.coordinator = Coordinator(schedule, workers=workers, servers=SERVERS, shards=SERVERS)
        self.servers = [Server() for _ in range(SERVERS)]
        self.workers = [
            Worker(schedule, workers=workers, shards=SERVERS, servers=SERVERS) for _ in range(workers)
        ]
        self.memory = [Memory() for _ in range(SERVERS)]
        # (sender, receiver) -> messages in flight. A worker's greeting on a new connection to a server is in the
        # queue ("greeting", (w, s)), and is the number of the extension that it contains.
        self.queues: dict[tuple[Any, Any], list[Message | int]] = {}
        self.proposed = [0] * workers  # number of extensions that each worker has proposed
        self.lost: set[int] = set()
        self.unnoticed: set[tuple[int, int]] = set()  # (lost worker, server or -1 for the coordinator)
        self.connections: dict[
            tuple[int, int], int
        ] = {}  # (worker, server) -> extension of the newest connection
        self._begin(schedule)

    def _begin(self, schedule: Schedule) -> None:
        members = range(len(self.workers))
        for server in range(SERVERS):
            self.coordinator.connected(server_peer(server), 0)
        requests: list[Request] = []
        for worker in members:
            self.coordinator.connected(worker_peer(worker), 0)
        for worker in members:
            [register] = self.workers[worker].register(MODEL)
            assert isinstance(register, Send)
            requests += self.coordinator.handle(worker_peer(worker), register.message, 0)
        for server in range(SERVERS):
            [created] = [r.message for r in requests if isinstance(r, Send) and r.to == server_peer(server)]
            self.servers[server].handle(COORDINATOR, created, 0)
            self.servers[server].handle(worker_peer(0), messages.InitialWeights(server), 0)
            for worker in members:
                self.servers[server].connected(worker, 0)
            for reply in self.coordinator.handle(server_peer(server), Ready(), 0):
                assert isinstance(reply, Send)
                self.workers[reply.to.index].handle(reply.message)
        self.coordinator.handle(worker_peer(0), Status(0, None, "computing"), 0)
        for core in self.workers:
            for shard in range(SERVERS):
                core.handle(Answer(shard, -1, 0))

    # -- steps --------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[str, Callable[[Job], None]]]:
        """Yield the possible next steps, each with a description."""
        live = [worker for worker in range(len(self.workers)) if worker not in self.lost]
        for worker in live if self._may_lose() else ():
            yield f"worker {worker} is lost", lambda job, w=worker: job.lose(w)  # type: ignore[misc]
        for worker in live:
            if self._may_propose(worker):
                # No message has an effect on this step, so it comes first.
                yield f"worker {worker} proposes", lambda job, w=worker: job.propose(w)  # type: ignore[misc]
                return
        for key, queue in self.queues.items():
            if queue and not (key[1] in self.lost and isinstance(key[0], tuple)):
                yield (
                    f"{key[1]} receives {type(queue[0]).__name__} from {key[0]}",
                    lambda job, key=key: job.deliver(key),  # type: ignore[misc]
                )
        for worker, place in sorted(self.unnoticed):
            yield (
                f"{place} notices the loss of worker {worker}",
                lambda job, w=worker, p=place: job.notice(w, p),  # type: ignore[misc]
            )

    def _may_lose(self) -> bool:
        if self.late_losses and self.coordinator.model == MODELS[self.extensions - 2]:
            return False
        return self.losses > 0

    def _may_propose(self, worker: int) -> bool:
        core, done = self.workers[worker], self.proposed[worker]
        in_call = done > 0 and (core.extended is None or bool(core.waiting_for))
        return done < self.extensions and not in_call

    def propose(self, worker: int) -> None:
        self.proposed[worker] += 1
        self._send_all(worker, self.workers[worker].propose(MODELS[self.proposed[worker]]))

    def lose(self, worker: int) -> None:
        self.losses -= 1
        self.lost.add(worker)
        self.unnoticed |= {(worker, place) for place in (-1, *range(SERVERS))}

    def notice(self, worker: int, place: int) -> None:
        """Let the coordinator (-1) or a server see the end of a worker's connections, and drop what is in flight."""
        self.unnoticed.discard((worker, place))
        receiver = "coordinator" if place < 0 else ("server", place)
        self.queues.pop((worker, receiver), None)
        self.queues.pop(("greeting", (worker, place)), None)
        if place < 0:
            self._send_all("coordinator", self.coordinator.disconnected(worker_peer(worker), 0))
        else:
            self._send_all(("server", place), self.servers[place].disconnected(worker, 0))

    def deliver(self, key: tuple[Any, Any]) -> None:
        sender, receiver = key
        message = self.queues[key].pop(0)
        if isinstance(message, int):
            worker, server = receiver
            self._greet(worker, server, message)
        elif receiver == "coordinator":
            peer = worker_peer(sender) if isinstance(sender, int) else server_peer(sender[1])
            self._send_all(receiver, self.coordinator.handle(peer, message, 0))
        elif isinstance(receiver, int):
            self._at_worker(receiver, message)
        else:
            self._at_server(receiver[1], sender, message)

    def _at_worker(self, worker: int, message: Message) -> None:
        if worker in self.lost:
            return
        if isinstance(message, Answer):
            assert len(self.memory[message.shard].origins) == self.proposed[worker]
        core = self.workers[worker]
        self._send_all(worker, core.handle(message))
        if isinstance(message, messages.ModelExtended):
            core.await_extended_weights()
            for server in range(SERVERS):
                self.queues.setdefault(("greeting", (worker, server)), []).append(message.number)

    def _at_server(self, server: int, sender: Any, message: Message) -> None:
        core, memory = self.servers[server], self.memory[server]
        if isinstance(message, messages.ExtendShards):
            memory.prepared, memory.origin = message.number, None
        elif isinstance(message, messages.ModelExtended):
            memory.extend()
        elif isinstance(message, messages.InitialWeights):
            assert isinstance(sender, int)
            if sender != core.initializer:
                assert sender in self.lost  # a live worker sends only what was requested
                return
            core.require_beginning(message.shard, sender)
            memory.origin = sender
        peer = worker_peer(sender) if isinstance(sender, int) else COORDINATOR
        self._send_all(("server", server), core.handle(peer, message, 0))

    def _greet(self, worker: int, server: int, number: int) -> None:
        core, memory = self.servers[server], self.memory[server]
        try:
            core.require_expected(worker, number)
        except ProtocolError:
            assert worker in self.lost, "a live worker was refused"
            return
        if number > core.extension:
            assert self.coordinator.model == MODELS[number], (
                "a server has extended before all servers were ready"
            )
            memory.extend()
        assert len(memory.origins) == number, f"the server stores {memory.origins}"
        self.connections[worker, server] = number
        self._send_all(("server", server), core.connected(worker, 0, number))

    def _send_all(self, sender: Any, requests: list[Request]) -> None:
        _QueueingHost(self, sender).carry_out(requests)

    # -- states -------------------------------------------------------------------------------------------

    def key(self) -> object:
        """Return what distinguishes this state from others."""
        coordinator = self.coordinator
        assert coordinator.model is not None
        extension = coordinator.reconfigurations.extension
        return (
            tuple(sorted((repr(k), tuple(map(_short, q))) for k, q in self.queues.items() if q)),
            tuple(sorted(self.lost)),
            tuple(self.proposed),
            tuple(sorted(self.unnoticed)),
            tuple((tuple(m.origins), m.origin, m.prepared) for m in self.memory),
            tuple(
                (w.waiting_for, tuple(sorted(w._awaited)), w.extended is None, w.extension)
                for w in self.workers
            ),
            tuple(
                (
                    tuple(sorted(s.expected)),
                    tuple(sorted(s._connected.items())),
                    tuple(sorted(s.ending)),
                    tuple(s._to_begin),
                    (s.initializer, s.extension, s._next),
                )
                for s in self.servers
            ),
            MODELS.index(coordinator.model),
            tuple(sorted(coordinator.collectives.waiting)),
            extension and (tuple(extension._workers), tuple(sorted(extension._ready))),
        )

    def check_end(self) -> None:
        """Check a state without steps: all workers that are left go on, with the weights of one worker."""
        live = [worker for worker in range(len(self.workers)) if worker not in self.lost]
        if not live:
            return
        assert self.coordinator.model == MODELS[self.extensions], "an extension never takes effect"
        stored = {tuple(memory.origins) for memory in self.memory}
        assert len(stored) == 1, f"the initial weights are of several workers: {stored}"
        assert [len(origins) for origins in stored] == [self.extensions]
        for worker in live:
            assert self.workers[worker].waiting_for == "", f"worker {worker} waits forever"
            for server in range(SERVERS):
                assert self.connections[worker, server] == self.extensions


class _QueueingHost(Host):
    """Puts the messages that a core sends into the queues of a job."""

    def __init__(self, job: Job, sender: Any) -> None:
        self._job = job
        self._sender = sender

    def send(self, to: Peer, message: Message) -> None:
        receiver = {"worker": to.index, "server": ("server", to.index)}.get(to.role, "coordinator")
        self._job.queues.setdefault((self._sender, receiver), []).append(message)

    def proceed(self, request: Proceed) -> None:
        """Do nothing: the job reads the state of the core instead."""


def _short(message: Message | int) -> object:
    if isinstance(message, int):
        return message
    fields = ("shard", "initializer", "worker", "number")
    return type(message).__name__, tuple(getattr(message, name, None) for name in fields)


def search(workers: int, losses: int, extensions: int = 1) -> int:
    """Explore all states, and return their number. With two extensions, no worker is lost during the first one."""
    first = Job(workers, losses, extensions, late_losses=extensions > 1)
    seen, pending = {first.key()}, [first]
    while pending:
        job = pending.pop()
        steps = list(job.steps())
        if not steps:
            job.check_end()
        written = Written(job)
        for _, step in steps:
            after = written.copy()
            step(after)
            if (key := after.key()) not in seen:
                seen.add(key)
                pending.append(after)
    return len(seen)


def walk(workers: int, losses: int, choice: random.Random, extensions: int = 1) -> None:
    """Take random steps to the end.

    Losses are rare, so that they also happen late. In some walks, a worker is lost as soon as it has greeted the
    servers, and one server waits for a long time before it reads the greeting or notices the loss.
    """
    job = Job(workers, losses, extensions)
    victim, place = choice.randrange(workers), choice.choice((None, *range(SERVERS)))
    rare = {f"{(victim, place)} receives int from greeting", f"{place} notices the loss of worker {victim}"}
    taken = []
    try:
        while steps := list(job.steps()):
            others = [step for step in steps if not step[0].endswith("is lost")]
            if job.losses and victim not in job.lost and job.queues.get(("greeting", (victim, place))):
                steps = [step for step in steps if step[0] == f"worker {victim} is lost"]
            elif others and choice.random() < 0.95:
                steps = others
            weights = [0.05 if what in rare else 1.0 for what, _ in steps]
            [(what, step)] = choice.choices(steps, weights)
            taken.append(what)
            step(job)
        job.check_end()
    except (AssertionError, ProtocolError) as error:
        raise AssertionError("\n".join([*taken, repr(error)])) from error


def test_every_order_of_messages_extends_the_model() -> None:
    assert search(workers=2, losses=0, extensions=2) > 100


@pytest.mark.chaos  # 17,575 and 39,839 states, three minutes
@pytest.mark.parametrize("extensions", [1, 2])
def test_every_order_of_messages_extends_the_model_if_a_worker_is_lost(extensions: int) -> None:
    assert search(workers=2, losses=1, extensions=extensions) > 10_000


@pytest.mark.parametrize("seed", [*range(8), *thorough(*range(8, 20))])
def test_random_orders_extend_the_model_once_or_twice_if_workers_are_lost(seed: int) -> None:
    choice = random.Random(f"extension {seed}")
    for _ in range(40):
        walk(3, choice.choice((0, 1, 2, 3)), choice, extensions=choice.choice((1, 2)))


# -- the search finds mistakes ------------------------------------------------------------------------------


def counts_reports_on_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Extension.ready

    def mistaken(self: Extension, server: int, message: ExtensionReady) -> list[Request]:
        return ready(self, server, ExtensionReady(self._workers[0], message.number))

    monkeypatch.setattr(Extension, "ready", mistaken)


def keeps_reports_when_the_initializer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Extension.begin

    def mistaken(self: Extension) -> list[Request]:
        ready = set(self._ready)
        requests = begin(self)
        self._ready |= ready
        return requests

    monkeypatch.setattr(Extension, "begin", mistaken)


def forgets_that_the_initializer_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Extension, "left", lambda self, worker: [])


def never_lets_workers_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    require_expected = Server.require_expected

    def mistaken(self: Server, worker: int, extension: int = 0, incarnation: int = 0) -> None:
        require_expected(self, worker, extension, incarnation)
        if worker in self._connected:
            raise ProtocolError("the worker is already connected")

    monkeypatch.setattr(Server, "require_expected", mistaken)


def takes_effect_before_all_servers_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Extension.ready

    def mistaken(self: Extension, server: int, message: ExtensionReady) -> list[Request]:
        self._ready |= set(range(SERVERS))
        return ready(self, server, message)

    monkeypatch.setattr(Extension, "ready", mistaken)


def takes_every_greeting_for_one_of_the_newest_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    greet = Job._greet

    def mistaken(self: Job, worker: int, server: int, number: int) -> None:
        core = self.servers[server]
        greet(self, worker, server, core.extension if core._to_begin else core._next)

    monkeypatch.setattr(Job, "_greet", mistaken)


def refuses_a_greeting_before_the_coordinators_message(monkeypatch: pytest.MonkeyPatch) -> None:
    require_expected = Server.require_expected

    def mistaken(self: Server, worker: int, extension: int = 0, incarnation: int = 0) -> None:
        require_expected(self, worker, extension, incarnation)
        if extension > self.extension:
            raise ProtocolError("the extension is not in force")

    monkeypatch.setattr(Server, "require_expected", mistaken)


@pytest.mark.parametrize(
    "mistake",
    [
        counts_reports_on_a_lost_worker,
        keeps_reports_when_the_initializer_is_lost,
        forgets_that_the_initializer_may_be_lost,
        never_lets_workers_connect_again,
        takes_effect_before_all_servers_are_ready,
        takes_every_greeting_for_one_of_the_newest_extension,
        refuses_a_greeting_before_the_coordinators_message,
    ],
)
def test_the_search_finds_a_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    choice = random.Random("mistakes")

    def take_walks() -> None:
        for _ in range(3000):
            walk(3, 1, choice, extensions=2)

    with pytest.raises(AssertionError):
        take_walks()


# -- what a worker may propose ------------------------------------------------------------------------------


def changed(**changes: object) -> ModelSpec:
    return msgspec.structs.replace(EXTENDED, **changes)


BUFFER = BufferSpec("mean", (3,), "float32")
UNSUITABLE: dict[str, tuple[ModelSpec, ModelSpec, str]] = {
    "another part": (
        MODEL,
        changed(layout=Layout.of([FIRST, msgspec.structs.replace(ADDED, part=2)])),
        "those of part 1",
    ),
    "another shape of an earlier parameter": (
        MODEL,
        changed(layout=Layout.of([msgspec.structs.replace(FIRST, shape=(41,)), ADDED])),
        "the earlier parameters",
    ),
    "another optimizer": (MODEL, changed(optimizer=msgspec.structs.replace(SGD, name="Adam")), "the groups"),
    "another group of an earlier parameter": (
        MODEL,
        changed(optimizer=msgspec.structs.replace(SGD, groups=SGD.groups * 2, group_of=(1,))),
        "the groups",
    ),
    "fewer optimizers": (EXTENDED, changed(further=(), layout=EXTENDED.layout), "lacks an optimizer"),
    "another shape of a buffer": (
        msgspec.structs.replace(MODEL, buffers=(BUFFER,)),
        changed(buffers=(msgspec.structs.replace(BUFFER, shape=(4,)),)),
        "has become",
    ),
}


@pytest.mark.parametrize("what", UNSUITABLE)
def test_an_extension_that_changes_what_is_trained_already_is_refused(what: str) -> None:
    before, after, message = UNSUITABLE[what]
    with pytest.raises(ProtocolError, match=message):
        require_extension(before, after)


def test_an_optimizer_may_be_replaced_or_get_a_further_group() -> None:
    require_extension(MODEL, EXTENDED)
    replaced = msgspec.structs.replace(SGD, name="Adam", replaced=1)
    require_extension(MODEL, msgspec.structs.replace(MODEL, optimizer=replaced))
    later = msgspec.structs.replace(ADDED, set_index=0)
    larger = msgspec.structs.replace(SGD, groups=SGD.groups * 2, group_of=(0, 1))
    require_extension(MODEL, ModelSpec(Layout.of([FIRST, later]), larger, ()))
