"""What the hosts of a run do with callers that lie: strangers, workers that break the rules, other models."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, worker_index
from paceline.core.layout import ITEM_BYTES, Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.messages import (
    Commit,
    Content,
    Failed,
    FetchFrozen,
    FetchOptimizerState,
    FetchSnapshot,
    FrozenTensors,
    Hello,
    InitialState,
    InitialWeights,
    IterationFinished,
    IterationStarted,
    Message,
    PullRequested,
    Ready,
    Register,
    Stage,
    Status,
    SyncRequested,
    WorkerFinished,
)
from paceline.errors import ConfigurationError, DeadlineError, PeerLostError
from paceline.run import server as serving
from paceline.run.hub import HostError
from paceline.run.readers import Reader
from paceline.run.server import READERS_PER_SHARD
from paceline.run.worker import WorkerSession
from paceline.shard.optimizers import read_groups
from paceline.shard.store import Store
from paceline.sync import ASP, BSP, ElasticBSP, SyncModel
from paceline.sync.events import Change
from paceline.trace.measures import measure
from paceline.train.session import current
from paceline.wire.memory import PIECE_BYTES, cut
from paceline.wire.transports import connect
from tests.support.hosts import TIMEOUT_S, Expelled, until_closed
from tests.support.listening import place_of
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

SLOPES = (1.0, 10.0, 4.0)  # each worker's gradient, in every element and iteration
LR = 0.01
STEPS = 6
ATTACKED = 3  # the iteration in which a worker turns hostile


class Slope(nn.Module):
    """Its loss is linear, so that the weights tell how often each worker's gradient was applied."""

    count: torch.Tensor

    def __init__(self, size: int = 40) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(3))

    def pull_down(self, slope: float) -> None:
        """Have every element's gradient be `slope`."""
        (slope * (self.a.sum() + self.b.sum())).backward()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


@dataclass
class Worker:
    """A worker's view of its own run, at an iteration of its choice."""

    session: WorkerSession
    optimizer: torch.optim.Optimizer

    @property
    def server(self) -> socket.socket:
        """The connection to server 0."""
        return self.session.links.servers[0].sock

    @property
    def coordinator(self) -> socket.socket:
        return self.session.links.coordinator.sock

    @property
    def pieces(self) -> list[memoryview]:
        """The gradient for shard 0, in pieces; none over shared memory, where it lies already."""
        memory = self.session.memory
        assert memory is not None
        if self.session._job.transport == "shm":
            return []
        shard, pieces = memory.shards[0], []
        mine = cut(memory.region.gradients, shard)
        for piece in shard.pieces(PIECE_BYTES):
            size_bytes = ITEM_BYTES[piece.dtype]
            pieces.append(mine[piece.dtype][piece.start * size_bytes : piece.stop * size_bytes])
        return pieces

    def push(self, payload: list[memoryview] | None = None, **changes: Any) -> None:
        """Send server 0 the commit that is due, but for some changes; the true payload, if there is no other."""
        groups = msgspec.msgpack.encode(read_groups(self.optimizer))
        pieces = self.pieces
        content = Content(b"\1\1", groups, tuple(range(len(pieces))))
        inner = {key: changes.pop(key) for key in list(changes) if key in Content.__struct_fields__}
        true = Commit(0, self.session.core.iteration, msgspec.structs.replace(content, **inner))
        payload = pieces if payload is None else payload
        self.session.links.servers[0].send(msgspec.structs.replace(true, **changes), payload)

    def send(self, message: Message, payload: bytes = b"") -> None:
        self.session.links.servers[0].send(message, [memoryview(payload)])

    def tell_coordinator(self, message: Message) -> None:
        self.session.links.coordinator.send(message)
        self.session.links.coordinator.drain(TIMEOUT_S)


def session_of_thread() -> WorkerSession:
    session = current()
    assert isinstance(session, WorkerSession)
    return session


def training(
    meanwhile: Callable[[Worker, int], None] = lambda worker, iteration: None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    make: Callable[[], Slope] = Slope,
    steps: int = STEPS,
) -> Callable[[], None]:
    """A training function; `meanwhile` is called in each worker before each step but the first."""

    def train() -> None:
        model = make()
        wrapped = make_optimizer(model)
        optimizer = DistributedOptimizer(wrapped, model=model)
        for iteration in range(steps):
            optimizer.zero_grad()
            model.pull_down(SLOPES[worker_index()])
            if iteration:
                meanwhile(Worker(session_of_thread(), wrapped), iteration)
            optimizer.step()

    return train


def assert_weights(state: dict[str, torch.Tensor], total: float) -> None:
    """All elements have gone down by the learning rate times the sum of the applied gradients."""
    for name in ("a", "b"):
        torch.testing.assert_close(state[name], torch.full_like(state[name], -LR * total), rtol=1e-12, atol=0)


ALL = sum(SLOPES) / 3
WITHOUT_1 = (SLOPES[0] + SLOPES[2]) / 2


# -- strangers --------------------------------------------------------------------------------------------


def frame(header: bytes, payload_bytes: int = 0, magic: bytes = b"PCL1") -> bytes:
    return struct.pack("<4sIQ", magic, len(header), payload_bytes) + header


def greeting(token: str, role: Any = "worker", index: int = 0, **rest: Any) -> bytes:
    return frame(msgspec.msgpack.encode(Hello(token, role, index, **rest)))


NESTED = (
    b"\x82\xa4type\xa8Finished\xa1x" + b"\x91" * 4000 + b"\xc0"
)  # lists in lists, in a key that is skipped

STRANGERS: dict[str, Callable[[str], bytes]] = {
    "a wrong token": lambda token: greeting("0" * len(token)),
    "no token": lambda token: greeting(""),
    "a token in other letters": lambda token: greeting("ä" * len(token)),
    "a prefix of the token": lambda token: greeting(token[:-1], "reader"),
    "a wrong token and then what only a worker may send": lambda token: (
        greeting("x" + token) + frame(msgspec.msgpack.encode(FetchSnapshot(0)))
    ),
    "a request without a greeting": lambda token: frame(msgspec.msgpack.encode(FetchOptimizerState(0))),
    "a server that is one too many": lambda token: greeting(token, "server", 99),
    "a worker that there is not": lambda token: greeting(token, "worker", 99),
    "a worker that is here already": lambda token: greeting(token, "worker", 0),
    "a worker below zero": lambda token: greeting(token, "worker", -1),
    "a role that there is not": lambda token: greeting(token, "queen"),
    "another protocol": lambda token: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "noise": lambda token: bytes(range(256)) * 20,
    "a header longer than a greeting": lambda token: frame(b"\xc1" * 5000),
    "a header of the largest length": lambda token: struct.pack("<4sIQ", b"PCL1", (1 << 32) - 1, 0),
    "a payload without end": lambda token: frame(
        msgspec.msgpack.encode(Hello("", "worker", 0)), (1 << 64) - 1
    ),
    "an empty header": lambda token: frame(b""),
    "a list without end": lambda token: frame(b"\xdd\xff\xff\xff\xff"),
    "a header that nests without end": lambda token: frame(NESTED),
}


def stranger(peer: socket.socket) -> socket.socket:
    """Another connection to whoever is at the other end of this one."""
    caller = socket.socket(peer.family, socket.SOCK_STREAM)
    caller.settimeout(TIMEOUT_S)
    caller.connect(place_of(peer))
    return caller


AT_UNIX_SOCKETS = ["a wrong token", "a worker that is here already", "noise"]
"""Strangers that also call hosts of a run over shared memory, whose sockets are of another family."""


@pytest.mark.parametrize(
    ("who", "transport"),
    [
        *((who, "tcp") for who in STRANGERS),
        *((who, "shm") for who in AT_UNIX_SOCKETS),
        *thorough(*((who, "shm") for who in STRANGERS if who not in AT_UNIX_SOCKETS)),
    ],
)
def test_a_stranger_gets_not_one_byte_and_the_run_goes_on(
    run_on_threads: RunOnThreads, who: str, transport: str
) -> None:
    heard: list[bytes] = []

    def call(worker: Worker, iteration: int) -> None:
        if worker.session.worker != 1 or iteration != ATTACKED:
            return
        for peer in (worker.server, worker.coordinator):
            if who == "a server that is one too many" and peer is worker.server:
                continue  # to a server, servers are nobody: such a caller may wait, and gets nothing
            with stranger(peer) as caller:
                with contextlib.suppress(ConnectionError):
                    caller.sendall(STRANGERS[who](worker.session._job.token))
                heard.append(until_closed(caller))

    run = run_on_threads(training(call), workers=2, servers=1, transport=transport)
    assert set(heard) == {b""}
    assert_weights(run.state_dict, STEPS * (SLOPES[0] + SLOPES[1]) / 2)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_caller_that_says_nothing_or_half_a_greeting_gets_nothing_and_holds_nobody_up(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    callers: list[socket.socket] = []

    def call(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            for peer in (worker.server, worker.coordinator):
                for said in (b"", b"PCL1", greeting(worker.session._job.token)[:-1]):
                    caller = stranger(peer)
                    callers.append(caller)
                    caller.sendall(said)

    run = run_on_threads(training(call), workers=2, servers=1, transport=transport)
    assert_weights(run.state_dict, STEPS * (SLOPES[0] + SLOPES[1]) / 2)
    assert len(callers) == 6
    for caller in callers:
        assert until_closed(caller) == b""  # it ends when the run does
        caller.close()


# -- workers that break the rules -------------------------------------------------------------------------


def groups_with(**changes: object) -> bytes:
    optimizer = sgd(nn.Linear(1, 1))
    return msgspec.msgpack.encode([{**group, **changes} for group in read_groups(optimizer)])


def vectors(worker: Worker, value: int = 0) -> list[memoryview]:
    """A payload of the size of shard 0."""
    return [memoryview(bytes([value]) * worker.session.servers.shards[0].size_bytes)]


def swamp(worker: Worker) -> None:
    """Ask for much at once, without reading the answers."""
    for _ in range(200):
        worker.send(FetchOptimizerState(0))
        worker.send(FetchSnapshot(99))


ATTACKS: dict[str, Callable[[Worker], None]] = {
    "an iteration of the future": lambda w: w.push(iteration=ATTACKED + 1),
    "an iteration of the past": lambda w: w.push(iteration=0),
    "an iteration below zero": lambda w: w.push(iteration=-1),
    "a shard that there is not": lambda w: w.push(shard=7, payload=[]),
    "a shard below zero": lambda w: w.push(shard=-1, payload=[]),
    "a buffer without its bytes": lambda w: w.push(buffers=(0,)),
    "a buffer that there is not": lambda w: w.push(buffers=(1,)),
    "a buffer below zero": lambda w: w.push(buffers=(-1,)),
    "presence of too few parameters": lambda w: w.push(present=b"\1"),
    "presence of too many parameters": lambda w: w.push(present=b"\1\1\1"),
    "a gradient that is too long": lambda w: w.push(payload=[*vectors(w), memoryview(b"\0" * 8)]),
    "a gradient that is too short": lambda w: w.push(payload=[vectors(w)[0][8:]]),
    "an empty push with a gradient": lambda w: w.push(empty=True, pieces=(), payload=vectors(w)),
    "a gradient of no pieces": lambda w: w.push(pieces=(), payload=vectors(w)),
    "a piece that there is not": lambda w: w.push(pieces=(0, 1), payload=[*vectors(w), *vectors(w)]),
    "a piece below zero": lambda w: w.push(pieces=(-1,), payload=vectors(w)),
    "pieces without their bytes": lambda w: w.push(pieces=(0,), payload=[]),
    "an early piece of a shard that there is not": lambda w: w.send(Stage(7, (0,))),
    "an early piece of a shard below zero, with bytes": lambda w: w.send(Stage(-1, (0,)), b"12345678"),
    "an early piece of a shard elsewhere": lambda w: w.send(Stage(1, (0,)), bytes(vectors(w)[0])),
    "an early piece that there is not": lambda w: w.send(Stage(0, (1,)), bytes(vectors(w)[0])),
    "an early piece below zero": lambda w: w.send(Stage(0, (-1,)), bytes(vectors(w)[0])),
    "an early piece without its bytes": lambda w: w.send(Stage(0, (0,))),
    "an early piece that is too long": lambda w: w.send(Stage(0, (0,)), bytes(vectors(w)[0]) + b"12345678"),
    "early bytes of no piece": lambda w: w.send(Stage(0, ()), bytes(vectors(w)[0])),
    "a pull without a push": lambda w: w.send(PullRequested(0, ATTACKED)),
    "a pull of what was pulled": lambda w: w.send(PullRequested(0, ATTACKED - 1)),
    "a pull below zero": lambda w: w.send(PullRequested(0, -1)),
    "a pull from a shard that there is not": lambda w: w.send(PullRequested(2, ATTACKED - 1)),
    "hyper-parameters that are noise": lambda w: w.push(groups=b"\xc1\xc1"),
    "hyper-parameters that end too soon": lambda w: w.push(groups=groups_with()[:-3]),
    "hyper-parameters of no group": lambda w: w.push(groups=b"\x90"),
    "hyper-parameters that are text": lambda w: w.push(groups=groups_with(lr="0.01")),
    "hyper-parameters of another kind": lambda w: w.push(groups=groups_with(lr=None)),
    "a pair for a number": lambda w: w.push(groups=groups_with(lr=(0.1, 0.2))),
    "a flag for a number": lambda w: w.push(groups=groups_with(lr=True)),
    "hyper-parameters of another name": lambda w: w.push(groups=groups_with(betas=(0.1, 0.2))),
    "hyper-parameters that are not text in UTF-8": lambda w: w.push(groups=b"\x91\x81\xa2\xff\xfe\x01"),
    "hyper-parameters with a name that is not text": lambda w: w.push(
        groups=groups_with().replace(b"momentum", b"moment\xff\xff")
    ),
    "a learning rate that is no number": lambda w: w.push(groups=groups_with(lr=math.nan)),
    "a learning rate without end": lambda w: w.push(groups=groups_with(lr=math.inf)),
    "a weight decay that is no number": lambda w: w.push(groups=groups_with(weight_decay=math.nan)),
    "the same buffer twice": lambda w: w.push(buffers=(0, 0), payload=[*w.pieces, memoryview(bytes(24))]),
    "a request for frozen parameters that there are not": lambda w: w.send(FetchFrozen(0, ("0" * 64,))),
    "a request for frozen parameters of another shard": lambda w: w.send(
        FetchFrozen(1, ())  # type: ignore[arg-type]
    ),
    "frozen parameters that nobody has requested": lambda w: w.send(
        FrozenTensors(0, ("0" * 64,)), b"12345678"
    ),
    "frozen parameters of another shard": lambda w: w.send(FrozenTensors(1, ())),  # type: ignore[arg-type]
    "a significance that is no number": lambda w: w.push(significance=math.nan),
    "a significance below zero": lambda w: w.push(significance=-1.0),
    "a round that nobody has come to": lambda w: w.push(progress=2**40),
    "a round beyond all numbers": lambda w: w.push(progress=2**63),
    "a flag that is not for it": lambda w: w.push(change=Change(number=1, members=(0, 2), sync="asp")),
    "a flag for a model that cannot run": lambda w: w.push(
        change=Change(number=1, members=(0, 1, 2), sync="drop-stragglers:quorum=99")
    ),
    "a flag for a model that counts without end": lambda w: w.push(
        change=Change(number=1, members=(1,), sync="dssp:lower=0,upper=1e18")
    ),
    "a flag for a condition from elsewhere": lambda w: w.push(
        change=Change(number=1, members=(1,), sync="conditions:pull=pyclbr:readmodule")
    ),
    "an optimizer state of a shard elsewhere": lambda w: w.send(InitialState(1), b"12345678"),
    "hyper-parameters that nest without end": lambda w: w.push(groups=b"\x91\x81\xa2lr" + b"\x91" * 4000),
    "first weights again": lambda w: w.send(InitialWeights(0), bytes(vectors(w)[0]) + bytes(12)),
    "first weights of a shard elsewhere": lambda w: w.send(InitialWeights(5)),
    "an optimizer state": lambda w: w.send(InitialState(0), b"12345678"),
    "a snapshot of a shard that there is not": lambda w: w.send(FetchSnapshot(3)),
    "a state of a shard that there is not": lambda w: w.send(FetchOptimizerState(-1)),
    "much at once": swamp,
    "a second greeting": lambda w: w.send(Hello(w.session._job.token, "worker", 1)),
    "another worker's greeting": lambda w: w.send(Hello(w.session._job.token, "worker", 0)),
    "what only coordinators hear": lambda w: w.send(Ready()),
    "a header that nests without end": lambda w: w.server.sendall(frame(NESTED)),
    "noise": lambda w: w.server.sendall(bytes(range(64))),
    "a list that is not there": lambda w: w.server.sendall(frame(b"\xdd\xff\xff\xff\xff")),
}


IN_MEMORY = [
    "an iteration of the future",
    "a gradient that is too long",
    "a gradient of no pieces",
    "a piece that there is not",
    "an early piece that there is not",
    "a pull without a push",
    "hyper-parameters that are noise",
    "a round beyond all numbers",
    "first weights again",
    "much at once",
    "noise",
]
"""Also over shared memory, where gradients do not travel: some of commits, of pieces, of pulls, and of bare bytes."""


@pytest.mark.parametrize(
    ("what", "transport"),
    [
        *((what, "tcp") for what in ATTACKS),
        *((what, "shm") for what in IN_MEMORY),
        *thorough(*((what, "shm") for what in ATTACKS if what not in IN_MEMORY)),
    ],
)
def test_a_worker_that_breaks_the_rules_is_logged_and_lost_and_the_others_finish(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, what: str, transport: str
) -> None:
    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            with contextlib.suppress(PeerLostError):  # it may be closed before all has been sent
                ATTACKS[what](worker)
            until_closed(worker.server)
            raise Expelled

    with caplog.at_level(logging.WARNING):
        run = run_on_threads(training(turn), workers=3, servers=2, transport=transport, keep_errors=True)
    assert {worker: type(error) for worker, error in run.errors.items()} == {1: Expelled}
    assert_weights(run.state_dict, ATTACKED * ALL + (STEPS - ATTACKED) * WITHOUT_1)
    assert "server 0 refused worker 1: " in caplog.text


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("pieces", "reason"),
    [((0,), "Commit has a payload of 0 bytes"), ((), "an iteration was committed without 1 of 1 pieces")],
    ids=str,
)
def test_a_commit_without_its_gradient_is_refused(
    run_on_threads: RunOnThreads,
    caplog: pytest.LogCaptureFixture,
    pieces: tuple[int, ...],
    reason: str,
    transport: str,
) -> None:
    """Over shared memory a commit carries none, so this is a stream's; and one on which nothing came early."""

    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            worker.push(payload=[], pieces=pieces)
            until_closed(worker.server)
            raise Expelled

    run = run_on_threads(
        training(turn), workers=3, servers=2, transport=transport, overlap="off", keep_errors=True
    )
    assert list(run.errors) == [1]
    assert_weights(run.state_dict, ATTACKED * ALL + (STEPS - ATTACKED) * WITHOUT_1)
    assert reason in caplog.text


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_what_a_worker_staged_before_it_was_lost_counts_for_nothing(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            for _ in range(3):
                worker.send(Stage(0, (0,)), bytes(worker.pieces[0]))
            raise Expelled

    run = run_on_threads(training(turn), workers=3, servers=2, transport=transport, keep_errors=True)
    assert list(run.errors) == [1]
    assert_weights(run.state_dict, ATTACKED * ALL + (STEPS - ATTACKED) * WITHOUT_1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("overlap", ["shards", "off"])
def test_a_second_pull_after_one_push_is_refused_and_the_push_counts(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, overlap: str, transport: str
) -> None:
    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            worker.push(pulls=False)
            worker.send(PullRequested(0, ATTACKED))
            worker.send(PullRequested(0, ATTACKED))
            until_closed(worker.server)
            raise Expelled

    run = run_on_threads(
        training(turn), workers=3, servers=1, transport=transport, overlap=overlap, keep_errors=True
    )
    assert list(run.errors) == [1]
    assert_weights(run.state_dict, (ATTACKED + 1) * ALL + (STEPS - ATTACKED - 1) * WITHOUT_1)
    assert "server 0 refused worker 1: " in caplog.text


def test_more_shards_than_parameters_are_refused_if_sliced_by_parameter(run_on_threads: RunOnThreads) -> None:
    run = run_on_threads(training(), workers=2, servers=1, shards=3, slicing="by-parameter", keep_errors=True)
    assert "shards is 3, but the model has 2 parameters" in str(run.errors[0])
    assert isinstance(run.errors[0], ConfigurationError)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_second_push_of_one_iteration_is_refused_and_the_first_one_counts(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            worker.push()
            worker.push()
            until_closed(worker.server)
            raise Expelled

    run = run_on_threads(training(turn), workers=3, servers=1, transport=transport, keep_errors=True)
    assert list(run.errors) == [1]
    assert_weights(run.state_dict, (ATTACKED + 1) * ALL + (STEPS - ATTACKED - 1) * WITHOUT_1)
    assert "server 0 refused worker 1: " in caplog.text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_push_after_the_goodbye_is_refused(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            worker.send(WorkerFinished())
            worker.push()
            until_closed(worker.server)
            raise Expelled

    run = run_on_threads(training(turn), workers=3, servers=2, transport=transport, keep_errors=True)
    assert list(run.errors) == [1]
    assert_weights(run.state_dict, ATTACKED * ALL + (STEPS - ATTACKED) * WITHOUT_1)
    assert "server 0 refused worker 1: " in caplog.text


MISFITS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam with a state it never kept": (torch.optim.Adam, {"amsgrad": True}),
    "RMSprop with a state it never kept": (torch.optim.RMSprop, {"centered": True}),
    "RMSprop with a momentum it never kept": (torch.optim.RMSprop, {"momentum": 0.9}),
    "Adamax that would divide by zero": (torch.optim.Adamax, {"betas": (1.0, 1.0)}),
    "RAdam that would divide by zero": (torch.optim.RAdam, {"betas": (1.0, 1.0)}),
    "Adadelta with a negative rho": (torch.optim.Adadelta, {"rho": -1e300}),
}


@pytest.mark.parametrize("what", MISFITS)
def test_hyper_parameters_that_the_optimizer_would_trip_over_cost_no_server_its_life(
    run_on_threads: RunOnThreads, what: str
) -> None:
    kind, changes = MISFITS[what]

    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            groups = [{**group, **changes} for group in read_groups(worker.optimizer)]
            worker.push(groups=msgspec.msgpack.encode(groups))
            raise Expelled  # whether it was refused or just left

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=LR)  # type: ignore[call-arg]

    run = run_on_threads(training(turn, make_optimizer), workers=3, servers=1, sync=ASP(), keep_errors=True)
    assert sorted(run.results) == [0, 2]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigurationError("the device is too small"), "the device is too small"),
        (RuntimeError("not this time"), "RuntimeError: not this time"),
    ],
    ids=["sentence for users", "other"],
)
def test_a_step_that_fails_on_a_server_ends_the_run_and_lets_no_worker_wait(
    error: Exception, words: str, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_of, told = serving._report_of, []

    def fail(store: Store, *arguments: object) -> None:
        raise error

    def note(cause: BaseException) -> Failed:
        told.append(report_of(cause))
        return told[-1]

    monkeypatch.setattr(Store, "apply", fail)
    monkeypatch.setattr(serving, "_report_of", note)
    with pytest.raises(HostError):
        run_on_threads(training(), workers=2, servers=1, sync=BSP(), keep_errors=True)
    assert {each.reason for each in told} == {words}
    assert all(bool(each.traceback) == (words != str(error)) for each in told)


def another_model() -> ModelSpec:
    layout = Layout.of([Parameter(("a",), (40,), "float64")])
    return ModelSpec(layout, OptimizerSpec("SGD", read_groups(sgd(Slope())), (0,)), ())


def asking(sync: str, number: int = 0) -> SyncRequested:
    return SyncRequested("script", number, sync)


TALK: dict[str, tuple[SyncModel, Callable[[Worker], None]]] = {
    "another model, later": (BSP(), lambda w: w.tell_coordinator(Register(another_model()))),
    "what only servers say": (BSP(), lambda w: w.tell_coordinator(Ready())),
    "a second greeting": (BSP(), lambda w: w.tell_coordinator(Hello(w.session._job.token, "worker", 1))),
    "what only servers hear": (BSP(), lambda w: w.tell_coordinator(FetchOptimizerState(0))),
    "a status with a payload": (
        BSP(),
        lambda w: w.session.links.coordinator.send(Status(0, None, "computing"), [memoryview(b"payload")]),
    ),
    "noise": (BSP(), lambda w: w.coordinator.sendall(bytes(range(64)))),
    "a header that nests without end": (BSP(), lambda w: w.coordinator.sendall(frame(NESTED))),
    "an iteration of the future": (
        ElasticBSP(lookahead=4),
        lambda w: w.tell_coordinator(IterationFinished(iteration=99)),
    ),
    "an iteration below zero": (
        ElasticBSP(lookahead=4),
        lambda w: w.tell_coordinator(IterationFinished(iteration=-1)),
    ),
    "a beginning that nobody asked for": (
        BSP(),
        lambda w: w.tell_coordinator(IterationStarted(w.session.core.iteration)),
    ),
    "a beginning that no plan asked for": (
        ElasticBSP(lookahead=4),
        lambda w: w.tell_coordinator(IterationStarted(w.session.core.iteration)),
    ),
    "a quorum above the workers": (BSP(), lambda w: w.tell_coordinator(asking("drop-stragglers:quorum=99"))),
    "a model for one shard that is for all": (BSP(), lambda w: w.tell_coordinator(asking("bsp|elastic-bsp"))),
    "a model that counts without end": (
        BSP(),
        lambda w: w.tell_coordinator(asking("dssp:lower=0,upper=1e18")),
    ),
    "a model that looks ahead without end": (
        BSP(),
        lambda w: w.tell_coordinator(asking("elastic-bsp:lookahead=1e18")),
    ),
    "a model of many words": (BSP(), lambda w: w.tell_coordinator(asking("bsp" + " " * 100_000))),
    "a model of many bases": (
        BSP(),
        lambda w: w.tell_coordinator(asking("spec-sync:base=" * 60_000 + "asp")),
    ),
    "a condition from elsewhere": (
        BSP(),
        lambda w: w.tell_coordinator(asking("conditions:pull=pyclbr:readmodule")),
    ),
    "a condition of this process": (
        BSP(),
        lambda w: w.tell_coordinator(asking("conditions:pull=local:f-0")),
    ),
    "a change that is not its next": (BSP(), lambda w: w.tell_coordinator(asking("asp", number=7))),
    "a change below zero": (BSP(), lambda w: w.tell_coordinator(asking("asp", number=-1))),
    "a change that ends nothing": (
        BSP(),
        lambda w: w.tell_coordinator(IterationFinished(iteration=w.session.core.iteration, change=1)),
    ),
    "a superstep that there is not": (
        ElasticBSP(lookahead=4),
        lambda w: w.tell_coordinator(IterationFinished(iteration=w.session.core.iteration, superstep=99)),
    ),
}


@pytest.mark.parametrize("what", TALK)
def test_a_worker_that_tells_the_coordinator_nonsense_is_lost_and_the_others_finish(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    sync, talk = TALK[what]

    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            talk(worker)
            until_closed(worker.coordinator)
            raise Expelled

    run = run_on_threads(training(turn), workers=3, servers=2, sync=sync, keep_errors=True)
    assert {worker: type(error) for worker, error in run.errors.items()} == {1: Expelled}
    assert sorted(run.results) == [0, 2]
    assert "the coordinator refused worker 1: " in caplog.text
    if isinstance(sync, BSP):
        assert_weights(run.state_dict, ATTACKED * ALL + (STEPS - ATTACKED) * WITHOUT_1)


def test_the_initializer_may_not_send_a_state_for_a_shard_elsewhere_either(
    run_on_threads: RunOnThreads,
) -> None:
    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 0 and iteration == ATTACKED:
            worker.send(InitialState(5))
            until_closed(worker.server)
            raise Expelled

    run = run_on_threads(training(turn), workers=3, servers=2, keep_errors=True)
    assert {worker: type(error) for worker, error in run.errors.items()} == {0: Expelled}


@pytest.mark.parametrize("transport", ["unix", "tcp", *thorough("shm")])
def test_a_worker_that_pushes_and_never_reads_its_answers_is_dropped(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """Otherwise its answers would be queued without limit."""
    count = itertools.count()

    def turn(worker: Worker, iteration: int) -> None:
        if worker.session.worker == 1 and iteration == ATTACKED:
            stream = worker.session.links.servers[0]
            with contextlib.suppress(
                PeerLostError, DeadlineError
            ):  # a ring that nobody reads any more is full
                for number in range(20_000):
                    worker.push(iteration=ATTACKED + number)
                    stream.drain(1.0)
                    next(count)
                worker.send(WorkerFinished())
                stream.drain(1.0)
            until_closed(worker.server)
            raise Expelled

    make = functools.partial(Slope, 20_000)
    run = run_on_threads(
        training(turn, make=make), workers=2, servers=1, transport=transport, sync="asp", keep_errors=True
    )
    assert {worker: type(error) for worker, error in run.errors.items()} == {1: Expelled}
    assert (
        "server 0 refused worker 1: Commit arrived before the previous answer of shard 0 was read"
        in caplog.text
    )
    assert next(count) < 20_000


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_callers_that_reset_at_once_end_neither_coordinator_nor_server(
    run_on_threads: RunOnThreads, transport: str
) -> None:
    def call(worker: Worker, iteration: int) -> None:
        if worker.session.worker != 1 or iteration != ATTACKED:
            return
        for peer in (worker.server, worker.coordinator):
            for _ in range(200):
                caller = stranger(peer)
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                caller.close()

    run = run_on_threads(training(call), workers=2, servers=1, transport=transport)
    assert_weights(run.state_dict, STEPS * (SLOPES[0] + SLOPES[1]) / 2)


def test_readers_are_not_let_in_without_limit(run_on_threads: RunOnThreads) -> None:
    refused: list[socket.socket] = []
    left: list[socket.socket] = []

    def call(worker: Worker, iteration: int) -> None:
        if worker.session.worker != 1 or iteration != ATTACKED:
            return
        with contextlib.ExitStack() as stack:
            callers = [stack.enter_context(stranger(worker.server)) for _ in range(READERS_PER_SHARD + 2)]
            for caller in callers:
                caller.sendall(greeting(worker.session._job.token, "reader", 0))
            while len(refused) < 2:  # any two of them: the server need not see the greetings in their order
                heard, _, _ = select.select(callers, [], [], TIMEOUT_S)
                assert heard, "nobody was refused"
                for caller in heard:
                    with contextlib.suppress(ConnectionResetError):
                        if caller.recv(1 << 16):  # it was let in, and hears of the shard
                            continue
                    callers.remove(caller)
                    refused.append(caller)
        left.extend(callers)

    run = run_on_threads(training(call), workers=2, servers=1, transport="tcp")
    assert (len(refused), len(left)) == (2, READERS_PER_SHARD)
    assert_weights(run.state_dict, STEPS * (SLOPES[0] + SLOPES[1]) / 2)


# -- readers ----------------------------------------------------------------------------------------------


def test_a_reader_that_does_not_reach_every_server_leaves_no_connection_open() -> None:
    model = another_model()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = [f"tcp:127.0.0.1:{each.getsockname()[1]}" for each in (server, gone)]
        gone.close()
        with pytest.raises(PeerLostError) as lost:
            Reader.connect(model, list(zip(model.layout.slice_evenly(2), addresses, strict=True)), "token")
        with server.accept()[0] as caller:
            assert until_closed(caller)
    assert addresses[1] in str(lost.value)


@contextlib.contextmanager
def reader_beside(worker: Worker, model: Slope, trained: DistributedOptimizer) -> Iterator[Reader]:
    session = worker.session
    assert trained._training is not None
    spec = trained._training._trained.spec
    shards = list(
        zip(session.servers.shards, [address_of(s.sock) for s in session.links.servers], strict=True)
    )
    with contextlib.closing(Reader.connect(spec, shards, session._job.token)) as reader:
        yield reader


def address_of(peer: socket.socket) -> str:
    if peer.family == socket.AF_UNIX:
        return f"unix:{place_of(peer)}"
    host, port = peer.getpeername()
    return f"tcp:{host}:{port}"


@pytest.mark.parametrize(
    ("sync", "transport"),
    [(BSP(), "tcp"), (ASP(), "shm"), *thorough((BSP(), "shm"), (ASP(), "tcp"))],
    ids=str,
)
def test_a_readers_snapshot_is_never_torn_within_a_shard(
    run_on_threads: RunOnThreads, sync: SyncModel, transport: str
) -> None:
    """Each update takes 1/1024 off every element, exactly; so a shard's version tells what its elements are."""
    size, steps = 60_000, 40
    seen: list[tuple[int, ...]] = []

    def train() -> None:
        model = Slope(size)
        wrapped = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        optimizer = DistributedOptimizer(wrapped, model=model)
        with contextlib.ExitStack() as stack:
            reader: Reader | None = None
            for _ in range(steps):
                optimizer.zero_grad()
                model.pull_down(1.0)
                optimizer.step()
                if worker_index() != 0:
                    continue
                if reader is None:
                    worker = Worker(session_of_thread(), wrapped)
                    reader = stack.enter_context(reader_beside(worker, model, optimizer))
                for _ in range(2):
                    check(reader.read())

    def check(snapshot: Any) -> None:
        flat = torch.cat([snapshot.state_dict["a"], snapshot.state_dict["b"].reshape(-1)])
        values = {float(value) for value in flat.unique()}
        assert values <= {-version * 2.0**-10 for version in snapshot.versions}
        runs = 1 + int((flat[1:] != flat[:-1]).sum())  # each shard is one stretch of the vector
        assert runs <= len(snapshot.versions)
        seen.append(snapshot.versions)

    # Under BSP all take part in every update; under ASP a push is an update.
    run = run_on_threads(train, workers=3, servers=2, sync=sync, transport=transport, hyperparameters="raw")
    assert len(seen) == 2 * steps
    assert all(a <= b for one, two in itertools.pairwise(seen) for a, b in zip(one, two, strict=True))
    # A worker that came late under ASP computed its first gradient on weights that are nobody's: it is left out.
    left_out = measure(run.shards).dropped_pushes // 2
    assert left_out <= (0 if isinstance(sync, BSP) else 2)
    updates = steps if isinstance(sync, BSP) else 3 * steps - left_out
    assert run.state_dict["a"].unique().tolist() == [-updates * 2.0**-10]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_reader_that_pushes_is_refused(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    def call(worker: Worker, iteration: int) -> None:
        if worker.session.worker != 1 or iteration != ATTACKED:
            return
        commit = Commit(0, 3, Content(b"\1\1", groups_with()), empty=True)
        with contextlib.closing(connect(address_of(worker.server))) as reader:
            reader.sendall(greeting(worker.session._job.token, "reader", 1))
            reader.sendall(frame(msgspec.msgpack.encode(commit)))
            assert until_closed(reader) == b""

    run = run_on_threads(training(call), workers=2, servers=1, transport=transport)
    assert_weights(run.state_dict, STEPS * (SLOPES[0] + SLOPES[1]) / 2)
    assert "server 0 refused reader 1: Commit is not expected" in caplog.text


# -- workers that do not train the same -------------------------------------------------------------------


def linear(inputs: int = 4, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 3, **options), nn.Linear(3, 2))


def grouped(model: nn.Module, first: int) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.SGD([{"params": parameters[:first]}, {"params": parameters[first:]}], lr=0.1)


def with_buffer(name: str, buffer: torch.Tensor) -> nn.Module:
    model = linear()
    model[1].register_buffer(name, buffer)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    return model


Setup = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def setup(
    make: Callable[[], nn.Module], optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
) -> Setup:
    def both() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, optimizer(model)

    return both


DIFFERENCES: dict[str, tuple[Setup, Setup, str]] = {
    "shape": (
        setup(linear),
        setup(lambda: linear(5)),
        "0.weight float32[3, 5] instead of 0.weight float32[3, 4]",
    ),
    "name": (
        setup(linear),
        setup(lambda: nn.Sequential(nn.ReLU(), *linear())),
        "1.weight float32[3, 4] instead of 0.weight float32[3, 4]",
    ),
    "dtype": (
        setup(linear),
        setup(lambda: linear(dtype=torch.float64)),
        "0.weight float64[3, 4] instead of 0.weight float32[3, 4]",
    ),
    "more parameters": (
        setup(linear),
        setup(lambda: nn.Sequential(*linear(), nn.Linear(2, 2))),
        "6 parameters instead of 4",
    ),
    "fewer parameters": (
        setup(linear),
        setup(lambda: linear()[:1]),
        "2 parameters instead of 4",
    ),
    "a second name": (
        setup(lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.Identity())),
        setup(tied),
        "0.weight",
    ),
    "optimizer": (
        setup(linear),
        setup(linear, lambda model: torch.optim.Adam(model.parameters())),
        "optimizer Adam instead of SGD",
    ),
    "groups": (
        setup(linear, lambda model: grouped(model, 1)),
        setup(linear, lambda model: grouped(model, 2)),
        "the parameters are assigned to groups differently",
    ),
    "an empty group": (
        setup(linear, lambda model: grouped(model, 4)),
        setup(linear),
        "groups",
    ),
    "more buffers": (
        setup(linear),
        setup(lambda: with_buffer("seen", torch.zeros(3))),
        "1 buffers instead of 0",
    ),
    "a buffer's shape": (
        setup(lambda: with_buffer("seen", torch.zeros(3))),
        setup(lambda: with_buffer("seen", torch.zeros(3, 1))),
        "buffer 1.seen float32[3, 1] instead of 1.seen float32[3]",
    ),
    "a buffer's name": (
        setup(lambda: with_buffer("seen", torch.zeros(3))),
        setup(lambda: with_buffer("kept", torch.zeros(3))),
        "buffer 1.kept float32[3] instead of 1.seen float32[3]",
    ),
    "a buffer's dtype": (
        setup(lambda: with_buffer("seen", torch.zeros(3))),
        setup(lambda: with_buffer("seen", torch.zeros(3, dtype=torch.int64))),
        "buffer 1.seen int64[3] instead of 1.seen float32[3]",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_worker_with_another_model_is_refused_and_told_the_first_difference(
    run_on_threads: RunOnThreads, what: str
) -> None:
    def train() -> None:
        model, wrapped = DIFFERENCES[what][worker_index()]()  # type: ignore[operator]
        optimizer = DistributedOptimizer(wrapped, model=model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    run = run_on_threads(train, workers=2, servers=1, keep_errors=True)
    assert list(run.errors) == [1]
    assert isinstance(run.errors[1], ConfigurationError), run.errors[1]
    assert str(run.errors[1]).startswith("its model differs from the model of worker 0: ")
    assert DIFFERENCES[what][2] in str(run.errors[1])
