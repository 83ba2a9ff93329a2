"""The protocol by which a script extends the model, in every order in which its messages can arrive.

The search runs the same cores as a live run: a coordinator, two servers with one shard each, and two or three
workers. All workers propose the same extended model. The messages on one connection keep their order, and everything
else can happen in any order. A worker may be lost at any moment; the coordinator and each server notice it
later, after some of the worker's last messages or none. A worker that has been told that the model is extended
connects to each server again, perhaps before the server has been told. The search keeps, for each server, what its
memory would contain: which layout, and whose initial weights.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from paceline.core import messages
from paceline.core.coordinator import Coordinator
from paceline.core.extension import Extension
from paceline.core.layout import Layout, Parameter
from paceline.core.messages import Answer, ExtensionReady, Message, Ready, Status
from paceline.core.model_spec import BufferSpec, ModelSpec, OptimizerSpec, require_extension
from paceline.core.requests import COORDINATOR, Proceed, Request, Send, server_peer, worker_peer
from paceline.core.server import Server
from paceline.core.worker import Worker
from paceline.errors import ProtocolError
from paceline.sync import ASP
from paceline.sync.schedule import Schedule, Step

SERVERS = 2
SGD = OptimizerSpec("SGD", ({"lr": 0.1},), (0,))
FIRST = Parameter(("a",), (40,), "float32")
MODEL = ModelSpec(Layout.of([FIRST]), SGD, ())
ADDED = Parameter(("b",), (40,), "float32", 1, 1)
EXTENDED = ModelSpec(Layout.of([FIRST, ADDED]), SGD, (), (SGD,))


class Memory:
    """What a server's memory contains: see `paceline.runtime.server_memory`."""

    def __init__(self) -> None:
        self.extended = False
        self.origin: int | None = None  # the worker whose initial weights were received last
        self.prepared = False

    def extend(self) -> None:
        if not self.extended:
            assert self.prepared, "the server has not been told to prepare"
            assert self.origin is not None, "the initial weights have not arrived"
            self.extended = True


class Job:
    """A run whose workers have begun to train, and are about to propose an extended model."""

    def __init__(self, workers: int, losses: int) -> None:
        schedule = Schedule((Step((ASP(),)),))
        self.losses = losses
        self.coordinator = Coordinator(schedule, workers=workers, servers=SERVERS, shards=SERVERS)
        self.servers = [Server() for _ in range(SERVERS)]
        self.workers = [
            Worker(schedule, workers=workers, shards=SERVERS, servers=SERVERS) for _ in range(workers)
        ]
        self.memory = [Memory() for _ in range(SERVERS)]
        # (sender, receiver) -> messages in flight. A worker's new connection to a server is ("greeting", (w, s)).
        self.queues: dict[tuple[Any, Any], list[Message | None]] = {}
        self.proposed: set[int] = set()
        self.lost: set[int] = set()
        self.unnoticed: set[tuple[int, int]] = set()  # (lost worker, server or -1 for the coordinator)
        self.reconnected: set[tuple[int, int]] = set()
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
                self.servers[server].connected(worker)
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
        for worker in live if self.losses else ():
            yield f"worker {worker} is lost", lambda job, w=worker: job.lose(w)  # type: ignore[misc]
        for worker in live:
            if worker not in self.proposed:
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

    def propose(self, worker: int) -> None:
        self.proposed.add(worker)
        self._send_all(worker, self.workers[worker].propose(EXTENDED))

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
        if sender == "greeting":
            self._greet(*receiver)
            return
        assert message is not None
        if receiver == "coordinator":
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
            assert self.memory[message.shard].extended
        core = self.workers[worker]
        self._send_all(worker, core.handle(message))
        if isinstance(message, messages.ModelExtended):
            core.await_extended_weights()
            for server in range(SERVERS):
                self.queues.setdefault(("greeting", (worker, server)), []).append(None)

    def _at_server(self, server: int, sender: Any, message: Message) -> None:
        core, memory = self.servers[server], self.memory[server]
        if isinstance(message, messages.ExtendShards):
            memory.prepared, memory.origin = True, None
        elif isinstance(message, messages.ModelExtended):
            memory.extend()
        elif isinstance(message, messages.InitialWeights):
            if sender != core.initializer:
                assert sender in self.lost  # a live worker sends only what was requested
                return
            core.require_beginning(message.shard)
            memory.origin = sender
        peer = worker_peer(sender) if isinstance(sender, int) else COORDINATOR
        self._send_all(("server", server), core.handle(peer, message, 0))

    def _greet(self, worker: int, server: int) -> None:
        core = self.servers[server]
        try:
            core.require_expected(worker)
        except ProtocolError:
            assert worker in self.lost, "a live worker was refused"
            return
        if worker in core.outdated:
            self.memory[server].extend()
        assert self.memory[server].extended
        self.reconnected.add((worker, server))
        self._send_all(("server", server), core.connected(worker))

    def _send_all(self, sender: Any, requests: list[Request]) -> None:
        for request in requests:
            if isinstance(request, Proceed):
                continue
            assert isinstance(request, Send), request
            to, message = request.to, request.message
            receiver = {"worker": to.index, "server": ("server", to.index)}.get(to.role, "coordinator")
            self.queues.setdefault((sender, receiver), []).append(message)

    # -- states -------------------------------------------------------------------------------------------

    def key(self) -> object:
        """Return what distinguishes this state from others."""
        coordinator = self.coordinator
        extension = coordinator._extension
        return (
            tuple(sorted((repr(k), tuple(map(_short, q))) for k, q in self.queues.items() if q)),
            tuple(sorted(self.lost)),
            tuple(sorted(self.proposed)),
            tuple(sorted(self.unnoticed)),
            tuple((m.extended, m.origin, m.prepared) for m in self.memory),
            tuple((w.waiting_for, tuple(sorted(w._awaited)), w.extended is None) for w in self.workers),
            tuple(
                (tuple(sorted(s.expected)), tuple(sorted(s.outdated)), tuple(s._to_begin), s.initializer)
                for s in self.servers
            ),
            coordinator.model == EXTENDED,
            tuple(sorted(coordinator.collectives.waiting)),
            extension and (tuple(extension._workers), tuple(sorted(extension._ready))),
        )

    def check_end(self) -> None:
        """Check a state without steps: all workers that are left go on, with the weights of one worker."""
        live = [worker for worker in range(len(self.workers)) if worker not in self.lost]
        if not live:
            return
        assert self.coordinator.model == EXTENDED, "the extension never takes effect"
        assert all(memory.extended for memory in self.memory)
        assert len({memory.origin for memory in self.memory}) == 1, (
            "the initial weights are of several workers"
        )
        for worker in live:
            assert self.workers[worker].waiting_for == "", f"worker {worker} waits forever"
            assert {(worker, server) for server in range(SERVERS)} <= self.reconnected


def _short(message: Message | None) -> object:
    fields = ("shard", "initializer", "worker")
    return type(message).__name__, tuple(getattr(message, name, None) for name in fields)


def search(workers: int, losses: int) -> int:
    """Explore all states, and return their number."""
    first = Job(workers, losses)
    seen, pending = {first.key()}, [first]
    while pending:
        job = pending.pop()
        steps = list(job.steps())
        if not steps:
            job.check_end()
        for _, step in steps:
            after = copy.deepcopy(job)
            step(after)
            if (key := after.key()) not in seen:
                seen.add(key)
                pending.append(after)
    return len(seen)


def walk(workers: int, losses: int, choice: random.Random) -> None:
    """Take random steps to the end. Losses are rare, so that they also happen late."""
    job = Job(workers, losses)
    taken = []
    try:
        while steps := list(job.steps()):
            others = [step for step in steps if not step[0].endswith("is lost")]
            what, step = choice.choice(others if others and choice.random() < 0.9 else steps)
            taken.append(what)
            step(job)
        job.check_end()
    except (AssertionError, ProtocolError) as error:
        raise AssertionError("\n".join([*taken, repr(error)])) from error


def test_every_order_of_messages_extends_the_model() -> None:
    assert search(workers=2, losses=0) > 100


@pytest.mark.chaos  # 17,575 states, 40 seconds
def test_every_order_of_messages_extends_the_model_if_a_worker_is_lost() -> None:
    assert search(workers=2, losses=1) > 10_000


@pytest.mark.parametrize("seed", range(20))
def test_random_orders_extend_the_model_if_two_of_three_workers_are_lost(seed: int) -> None:
    choice = random.Random(f"extension {seed}")
    for _ in range(40):
        walk(3, choice.choice((0, 1, 2)), choice)


# -- the search finds mistakes ------------------------------------------------------------------------------


def counts_reports_on_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Extension.ready

    def mistaken(self: Extension, server: int, message: ExtensionReady) -> list[Request]:
        return ready(self, server, ExtensionReady(self._workers[0]))

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
    monkeypatch.setattr(
        Server,
        "_report_if_ready",
        lambda self: [] if self._to_begin else [Send(COORDINATOR, ExtensionReady(0))],
    )


def takes_effect_before_all_servers_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Extension.ready

    def mistaken(self: Extension, server: int, message: ExtensionReady) -> list[Request]:
        self._ready |= set(range(SERVERS))
        return ready(self, server, message)

    monkeypatch.setattr(Extension, "ready", mistaken)


@pytest.mark.parametrize(
    "mistake",
    [
        counts_reports_on_a_lost_worker,
        keeps_reports_when_the_initializer_is_lost,
        forgets_that_the_initializer_may_be_lost,
        never_lets_workers_connect_again,
        takes_effect_before_all_servers_are_ready,
    ],
)
def test_the_search_finds_a_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    choice = random.Random("mistakes")

    def take_walks() -> None:
        for _ in range(3000):
            walk(3, 1, choice)

    with pytest.raises(AssertionError):
        take_walks()


# -- what a worker may propose ------------------------------------------------------------------------------


def changed(**changes: object) -> ModelSpec:
    return msgspec.structs.replace(EXTENDED, **changes)


BUFFER = BufferSpec("mean", (3,), "float32", False)
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
