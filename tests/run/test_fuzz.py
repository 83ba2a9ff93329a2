"""Peers that hold the token and send what no honest peer sends: no host ends, nothing grows, honest workers go on.

Every message that there is, as it would come next, is mutated: bits, lengths, types, values, order, payloads; over
shared memory the rings' own memory too. First against hosts that are polled by hand, without threads, then against a
run on threads. A short part of it runs with the tests; `make fuzz` sends 500,000 frames in process and 50,000 over
sockets. PACELINE_FUZZ is how many in process (a tenth of that over sockets), PACELINE_FUZZ_SEED where to begin.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import random
import resource
import shutil
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, worker_index
from paceline.core import worker as core
from paceline.core.layout import (
    BufferSpec,
    FrozenSpec,
    Layout,
    ModelSpec,
    OptimizerSpec,
    Parameter,
    ShardSlice,
)
from paceline.core.lease import DataOrder
from paceline.core.messages import (
    ROWS,
    Answer,
    Commit,
    Content,
    FrozenTensors,
    Hello,
    InitialState,
    InitialWeights,
    KeepStates,
    Message,
    Refused,
    Role,
    Stage,
    Started,
    WorkerFinished,
    first_phase,
)
from paceline.core.requests import COORDINATOR, Abort, Host, Peer, Proceed, Request
from paceline.errors import PacelineError, PeerLostError, ProtocolError
from paceline.run import hub as spin
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job import Assignment
from paceline.run.job_options import make_job
from paceline.run.server import ServerHost
from paceline.run.server_memory import ServerMemory
from paceline.run.worker import WorkerSession
from paceline.shard.optimizers import read_groups
from paceline.sync.actions import ApplyMean, ApplyPush
from paceline.sync.events import Change, PushFlags, Stop
from paceline.trace.recording import Trace, read_run
from paceline.train.session import current
from paceline.wire.memory import PIECE_BYTES, Region, cut
from paceline.wire.ring import RING_BYTES, Ring, available
from paceline.wire.stream import MAGIC, PREFIX, Stream
from paceline.wire.transports import connect
from tests.support.listening import place_of
from tests.support.made_messages import BAD_SYNCS, SYNCS, VALUES, edited, example, flip
from tests.support.made_messages import kinds as all_kinds

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

FRAMES = int(os.environ.get("PACELINE_FUZZ", "5000"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "0"))
LOUD = "PACELINE_FUZZ" in os.environ
MOST_GROWTH_BYTES = 256 * 1024 * 1024

LR = 2.0**-10
SLOPES = (1.0, 2.0)  # each honest worker's gradient, in every element; a hostile one's is 0
LAST_WORD = 3.0  # of one that turns hostile after its iteration 0
HONEST = len(SLOPES)
HOSTILE = 24  # in each run
VISITORS = 4  # after each of these
CHANGE = "a change that nobody published"
LAST_STEPS = 4  # of the honest, when the hostile ones are gone
POLLS = 4000  # that this takes at most
TIMEOUT_S = 30.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Progress:
    """Prints how far a long attack is, and for how long it has been going on; nothing unless PACELINE_FUZZ is set."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._begun_s = self._shown_s = time.monotonic()

    def now_and_then(self, what: str) -> None:
        """Print it, if the last line is ten seconds old."""
        if time.monotonic() - self._shown_s > 10:
            self.now(what)

    def now(self, what: str) -> None:
        """Print it."""
        self._shown_s = time.monotonic()
        if LOUD:
            print(f"{self._where}, after {self._shown_s - self._begun_s:.0f} s: {what}", flush=True)


# -- mutations --------------------------------------------------------------------------------------------


def framed(header: bytes, payload: bytes = b"", payload_bytes: int | None = None) -> bytes:
    size_bytes = len(payload) if payload_bytes is None else payload_bytes
    return PREFIX.pack(MAGIC, len(header) % 2**32, size_bytes % 2**64) + header + payload


def not_text(header: bytes, choice: random.Random) -> bytes:
    """Some of its letters are no UTF-8 any more."""
    letters = [place for place, byte in enumerate(header) if chr(byte).isalpha()]
    changed = bytearray(header)
    for place in choice.sample(letters, min(len(letters), 2)):
        changed[place] = choice.choice((0xFF, 0x80, 0xC0, 0xED))
    return bytes(changed)


def mutated(message: Message, size_bytes: int, choice: random.Random) -> tuple[bytes, bool]:
    """A frame, and whether the connection is of no use after it, because it is only the beginning of one."""
    header, payload = msgspec.msgpack.encode(message), bytes(size_bytes)
    match choice.randrange(16):
        case 0:
            return framed(flip(header, choice), payload), False
        case 1:
            whole = framed(header, payload)
            return whole[: choice.randrange(len(whole))], True
        case 2:
            magic = choice.choice((MAGIC, MAGIC, b"PCL2"))
            sizes = choice.choice((0, 1, len(header) + 1, len(header) - 1, 1 << 20, 1 << 26, 2**32 - 1))
            return struct.pack("<4sIQ", magic, sizes, size_bytes) + header + payload, True
        case 3:
            return framed(header, b"", choice.choice((1, size_bytes + 1, 1 << 40, 2**64 - 1))), True
        case 4:
            return framed(header, bytes(max(0, size_bytes + choice.choice((-8, -1, 1, 8, 4096))))), True
        case 5:
            return framed(not_text(header, choice), payload), False
        case 6:
            return choice.randbytes(choice.randrange(1, 200)), True
        case 7 | 8 | 9 | 10:
            return framed(header, payload), False  # as it is, at a time that is none of its own
        case _:
            return framed(edited(message, choice), payload), False


# -- a run that is polled by hand -------------------------------------------------------------------------

PARAMETERS = [Parameter(("a",), (40,), "float32"), Parameter(("b",), (3, 8), "float32")]
FROZEN = "0123456789abcdef" * 4  # a digest
OPTIMIZERS = {
    "SGD": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR),
    "Adam": torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=LR),
    "NAdam": torch.optim.NAdam([nn.Parameter(torch.zeros(1))], lr=LR),
}


def model_of(optimizer: str) -> ModelSpec:
    spec = OptimizerSpec(optimizer, read_groups(OPTIMIZERS[optimizer]), (0, 0))
    frozen = FrozenSpec("fixed", (2,), "float32", FROZEN)
    return ModelSpec(Layout.of(PARAMETERS), spec, (BufferSpec("count", (3,), "float32"),), frozen=(frozen,))


def extended(model: ModelSpec) -> ModelSpec:
    """Return the model with a further parameter of the same optimizer, and one of another optimizer."""
    added = [Parameter(("c",), (9,), "float32", 0, 1), Parameter(("d",), (2, 2), "float64", 1, 1)]
    first = msgspec.structs.replace(model.optimizer, group_of=(0, 0, 0))
    further = OptimizerSpec("SGD", read_groups(OPTIMIZERS["SGD"]), (0,))
    return ModelSpec(Layout.of([*PARAMETERS, *added]), first, model.buffers, (further,), model.frozen)


class Puppet(Host):
    """A worker of few words: what a session does, without waiting for anything."""

    def __init__(self, bench: Bench, index: int) -> None:
        self.bench, self.index = bench, index
        job = bench.job
        self.core = core.Worker(job.schedule, workers=job.workers, shards=job.shards, servers=job.servers)
        self.coordinator: Stream[Any] = Stream(
            connect(bench.coordinator.address),
            first_phase("coordinator", "worker"),
            takes_descriptor=job.transport == "shm",
        )
        self.servers: dict[str, Stream[Any]] = {}
        self.shards: tuple[ShardSlice, ...] = ()
        self.region: Region | None = None
        self.completed = 0  # iterations, as `step` has said
        self.payloads: dict[int, list[memoryview]] | None = None  # of the messages that are being sent
        self.coordinator.send(Hello(job.token, "worker", index))
        self.perform(self.core.register(bench.model))

    @property
    def streams(self) -> list[Stream[Any]]:
        return [self.coordinator, *self.servers.values()]

    @property
    def idle(self) -> bool:
        """True if it has its weights and computes."""
        return bool(self.shards) and not self.core.waiting_for

    def server_of(self, shard: int) -> Stream[Any]:
        return list(self.servers.values())[shard % len(self.servers)]

    def perform(
        self, requests: Sequence[Request], payloads: dict[int, list[memoryview]] | None = None
    ) -> None:
        """Send what the core asks for; `payloads` are those of commits and first weights, by shard."""
        self.payloads = payloads
        self.carry_out(requests)

    def send(self, to: Peer, message: Any) -> None:
        if to is COORDINATOR:
            self.coordinator.send(message)
        else:
            payload = self.payloads[message.shard] if self.payloads is not None else []
            self.server_of(message.shard).send(message, payload)

    def proceed(self, request: Proceed) -> None:
        """Do nothing: `idle` says that the worker may go on."""

    def abort(self, request: Abort) -> None:
        """Do nothing: the worker of this test finishes what it has begun."""

    def sink(self, message: Message, size_bytes: int) -> list[memoryview]:
        return [memoryview(bytearray(size_bytes))]

    def hear(self) -> None:
        """Take in what has come. Raises `PeerLostError` if a connection is gone."""
        for stream in self.streams:
            stream.flush()
        for message in self.coordinator.receive():
            if isinstance(message, Refused):
                raise ProtocolError(message.reason)
            self.perform(self.core.handle(message))
            if isinstance(message, Started):
                self.enter(message)
        for stream in list(self.servers.values()):
            for message in stream.receive():
                if isinstance(message, Answer):
                    self.perform(self.core.handle(message))

    def enter(self, started: Started) -> None:
        self.shards = started.shards
        shared = self.bench.job.transport == "shm"
        addresses = list(dict.fromkeys(started.addresses))
        channels = len(addresses) if shared and available() else 0
        self.region = Region.create(self.bench.model.layout, shared=shared, channels=channels)
        for part in self.region.gradients.values():
            np.frombuffer(part, np.float32)[:] = slope(self.index, 0)
        for descriptor in self.coordinator.descriptors:
            os.close(descriptor)
        self.coordinator.descriptors.clear()
        for channel, address in enumerate(addresses):
            stream: Stream[Any] = Stream(connect(address), first_phase("server", "worker"), self.sink)
            self.servers[address] = stream
            descriptors = [] if self.region.descriptor is None else [self.region.descriptor]
            size_bytes = self.region.size_bytes if descriptors else 0
            hello = Hello(
                *(self.bench.job.token, "worker", self.index),
                memory_bytes=size_bytes,
                channels=channels,
                channel=channel,
            )
            stream.send(hello, descriptors=descriptors)
            if channels:
                outgoing, incoming = map(Ring, self.region.channels[channel])
                stream.use_rings(outgoing, incoming)
        self.region.close()
        if started.initializer == self.index:
            payloads = {shard.index: list(cut(self.region.weights, shard).values()) for shard in self.shards}
            payloads[0].append(memoryview(bytes(12)))
            self.perform(self.core.initialize(), payloads)

    def content_of(self, shard: ShardSlice) -> tuple[Content, list[memoryview]]:
        """What a push of this iteration brings, and its payload."""
        assert self.region is not None
        pieces = () if self.bench.job.transport == "shm" else tuple(range(len(shard.pieces(PIECE_BYTES))))
        payload = list(cut(self.region.gradients, shard).values()) if pieces else []
        return Content(b"\1\1", self.bench.groups, pieces), payload

    def commit_of(self, shard: ShardSlice) -> tuple[Commit, list[memoryview]]:
        """The push of this iteration, as it would be, and its payload."""
        content, payload = self.content_of(shard)
        return Commit(shard.index, self.core.iteration, content, significance=self.significance), payload

    @property
    def significance(self) -> float | None:
        return 0.5 if self.core.needs_significance else None

    def step(self) -> bool:
        """Do what is to be done next; True if an iteration has been completed."""
        self.hear()
        if not self.idle:
            return False
        if self.completed < self.core.iteration:
            self.completed = self.core.iteration
            return True
        self.push()
        return False

    def push(self) -> None:
        contents, payloads = zip(*(self.content_of(shard) for shard in self.shards), strict=True)
        requests = self.core.push(PushFlags(significance=self.significance), contents)
        self.perform(requests, dict(enumerate(payloads)))

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class Bench:
    """A coordinator and two servers, polled by hand."""

    def __init__(self, run_dir: Path, sync: str, transport: str, optimizer: str = "SGD") -> None:
        self.job = make_job(
            workers=HONEST + HOSTILE,
            servers=2,
            shards=3,
            sync=sync,
            transport=transport,
            hyperparameters="raw",  # so that each update moves the weights equally far
            run_dir=run_dir,
        )
        self.model = model_of(optimizer)
        self.groups = msgspec.msgpack.encode(self.model.optimizer.groups)
        self.coordinator = CoordinatorHost.listen(self.job)
        places = [
            Assignment(job=self.job, role="server", index=i, coordinator=self.coordinator.address)
            for i in range(2)
        ]
        self.servers = [ServerHost.connect(place) for place in places]
        self.addresses = [self.coordinator.address]  # and, when they have told it, the servers'

    def poll(self) -> None:
        """One turn of each host's loop."""
        coordinator, now_ticks = self.coordinator, self.job.now_ticks()
        coordinator._hub.poll(0.0)
        for timer in coordinator._timers.take_due(now_ticks):
            coordinator._perform(coordinator.core.fire(timer, now_ticks))
        for server in self.servers:
            server._hub.poll(0.0)
            for timer in server._timers.take_due(now_ticks):
                server.carry_out(server._core.fire(timer, now_ticks))
            assert server._running, "a peer has ended a server"
        assert not coordinator._stopping

    def validate(self) -> None:
        """No machine contradicts itself."""
        self.coordinator.core.validate()
        for server in self.servers:
            server._core.validate()

    def weights(self) -> dict[int, np.ndarray[Any, Any]]:
        """shard -> its elements, padding included."""
        return {
            index: np.concatenate([np.frombuffer(part, np.float32) for part in parts.values()])
            for server in self.servers
            if server._memory is not None
            for index, parts in server._memory.weights.items()
        }

    def close(self) -> None:
        for server in self.servers:
            for _, recorder in server._recorders.values():
                recorder.close()
            server._hub.close()
            server._copies.close()
        assert self.coordinator._recorder is not None
        self.coordinator._recorder.close()
        self.coordinator._hub.close()
        self.coordinator._shared.release()
        self.coordinator._bell.close()
        self.coordinator._bell_end.close()


def slope(worker: int, iteration: int, last_word: float = 0.0) -> float:
    """Every element of a push's gradient."""
    if worker < HONEST:
        return SLOPES[worker]
    return last_word if iteration == 0 else 0.0


def updates(trace: Trace, last_word: float = 0.0) -> float:
    """How far every element of a shard has gone down, by what its trace says."""
    total = 0.0
    for entry in trace.entries:
        for action in entry.actions:
            if isinstance(action, ApplyPush):
                total += action.scale * slope(action.worker, action.iteration, last_word)
            elif isinstance(action, ApplyMean):
                total += sum(slope(*key, last_word) for key in action.pushes) / len(action.pushes)
    return LR * total


# -- hostile peers ----------------------------------------------------------------------------------------


class Attacker:
    """Sends mutated frames as one of the workers, or as a reader.

    Attributes:
        sent: how many, of which kind of message.
    """

    def __init__(self, seed: object) -> None:
        self.choice = random.Random(f"fuzz {seed}")
        self.sent: Counter[str] = Counter()
        self.replay: list[bytes] = []

    def to_coordinator(self, puppet: Puppet) -> list[tuple[Message, int]]:
        """What a worker may tell the coordinator now, and some of what it never may."""
        return [(message, 0) for message in self.words(puppet, "coordinator")]

    def to_server(self, puppet: Puppet) -> list[tuple[Message, int]]:
        """The same for a server, with the sizes of the payloads."""
        choice = self.choice
        shard = choice.choice(puppet.shards)
        commit, parts = puppet.commit_of(shard)
        content = commit.content
        assert content is not None
        size_bytes = sum(part.nbytes for part in parts)
        payloads: dict[type[Message], int] = {
            Commit: size_bytes,
            Stage: size_bytes,
            InitialState: 8,
            InitialWeights: shard.size_bytes,
            FrozenTensors: choice.choice((0, 8)),
            KeepStates: choice.choice((0, 8)),
        }
        members = choice.choice(((puppet.index,), (0, puppet.index), (0, 1, puppet.index), tuple(range(9))))
        stop = Stop(superstep=choice.randrange(4), members=members)
        change = Change(number=choice.randrange(3), members=members, sync=choice.choice(SYNCS + BAD_SYNCS))
        replace = msgspec.structs.replace
        return [
            *((message, payloads.get(type(message), 0)) for message in self.words(puppet, "server", shard)),
            *[(commit, size_bytes)] * 6,
            (replace(commit, stop=stop), size_bytes),
            (replace(commit, change=change), size_bytes),
            (replace(commit, significance=choice.choice((0.0, 0.5, 1e300, math.nan))), size_bytes),
            (replace(commit, progress=choice.choice((0, 1, 5, 2**40, 2**53))), size_bytes),
            (replace(commit, empty=True, content=replace(content, pieces=())), 0),
            (replace(commit, content=None), size_bytes),
            (replace(commit, pulls=False), size_bytes),
            (
                replace(
                    commit,
                    content=replace(content, buffers=choice.choice(((0,), (0, 0), (1,), (0,) * 1000))),
                ),
                size_bytes + 12,
            ),
            (replace(commit, content=replace(content, groups=self.groups(puppet))), size_bytes),
        ]

    def words(self, puppet: Puppet, host: Role, shard: ShardSlice | None = None) -> Iterator[Message]:
        """Yield examples of the messages that workers send to a host, and a few of all others."""
        choice, iteration = self.choice, puppet.core.iteration
        model = puppet.bench.model
        content, _ = puppet.content_of(shard or puppet.shards[0])
        known: dict[str, Callable[[], object]] = {
            "token": lambda: puppet.bench.job.token,
            "index": lambda: choice.randrange(30),
            "worker": lambda: choice.choice((0, puppet.index)),
            "shard": lambda: 0 if shard is None else shard.index,
            "shards": lambda: puppet.shards,
            "iteration": lambda: max(0, iteration + choice.choice((-1, 0, 0, 0, 1))),
            "model": lambda: choice.choice((model, extended(model), extended(model))),
            "content": lambda: content,
            "pieces": lambda: content.pieces * choice.randrange(4),
            "groups": lambda: choice.choice((b"\x90", b"?", puppet.bench.groups)),
            "sync": lambda: choice.choice(SYNCS + BAD_SYNCS),
            "numbers": lambda: bytes(choice.choice((0, 3, 16))),
            "order": lambda: DataOrder(100, 4, False, "auto", ""),
            "loss": lambda: choice.choice((None, 0.5, math.nan)),
            "digests": lambda: choice.choice(((), (FROZEN,), (FROZEN,) * 2, ("0" * 64,))),
            "left": lambda: (0, puppet.index),
        }
        # Most are such that the host does not end the connection at once.
        kinds = choice.choices([row.message for row in ROWS if row[1:3] == ("worker", host)], k=12)
        for kind in [*kinds, *choice.choices(all_kinds(), k=3)]:
            yield example(kind, whole=choice.random() < 0.5, known=known, choice=choice)

    def groups(self, puppet: Puppet) -> bytes:
        groups: list[dict[str, Any]] = [dict(group) for group in puppet.bench.model.optimizer.groups]
        for _ in range(self.choice.randrange(1, 3)):
            group = self.choice.choice(groups)
            group[self.choice.choice([*group, "new"])] = self.choice.choice(VALUES)
        return msgspec.msgpack.encode(groups)

    def send(self, sock: socket.socket, words: Sequence[tuple[Message, int]]) -> bool:
        """Send one frame. False if no more can be sent."""
        message, size_bytes = self.choice.choice(words)
        frame, useless = mutated(message, size_bytes, self.choice)
        if self.replay and self.choice.random() < 0.05:
            frame, useless = self.choice.choice(self.replay), False
        elif not useless and len(self.replay) < 20:
            self.replay.append(frame)
        self.sent[type(message).__name__] += 1
        try:
            sent = sock.send(frame)
        except BlockingIOError:
            return False
        except OSError:
            return False
        return sent == len(frame) and not useless

    def scribble(self, puppet: Puppet, stream: Stream[Any]) -> None:
        """Write anything into the memory of a ring, or a mutated frame."""
        choice = self.choice
        self.sent["ring"] += 1
        assert puppet.region is not None
        outgoing, incoming = puppet.region.channels[list(puppet.servers.values()).index(stream)]
        if choice.random() < 0.6 and stream._ring_out is not None:
            message, _ = choice.choice(self.to_server(puppet))
            header = (
                edited(message, choice) if choice.random() < 0.7 else choice.randbytes(choice.randrange(80))
            )
            with contextlib.suppress(ValueError):
                stream._ring_out.write(header)
            return
        words = choice.choice((outgoing, incoming)).cast("Q")
        for _ in range(choice.randrange(1, 3)):
            place = choice.choice((0, 8, 16, 24, 25, 26, choice.randrange(RING_BYTES // 8)))
            near = words[place] + choice.choice((-16, -8, 8, 16, 24, 4096, 65536))
            words[place] = choice.choice((near % 2**64, 0, 1, 2**64 - 1, 2**64 - 2, choice.getrandbits(64)))


@pytest.fixture
def shifts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What hostile workers have done that workers may do, and that honest ones can feel: a mean is applied with the
    hyper-parameters of its most advanced worker, and a flagged push is believed to flag a published change."""
    noted: list[str] = []
    read, keep = ServerMemory.read, ServerMemory.keep

    def noting(memory: ServerMemory, commit: Commit, gradient: Any) -> Any:
        push = read(memory, commit, gradient)
        if push is not None and push.groups != memory._plan.model.optimizer.groups:
            noted.append("hyper-parameters")
        return push

    def noting_changes(memory: ServerMemory, worker: int, commit: Commit, *rest: Any) -> None:
        keep(memory, worker, commit, *rest)
        if worker >= HONEST and commit.change is not None:
            noted.append(CHANGE)

    monkeypatch.setattr(ServerMemory, "read", noting)
    monkeypatch.setattr(ServerMemory, "keep", noting_changes)
    monkeypatch.setattr(spin, "SPIN_S", 0.0)
    return noted


def attack_by_hand(run_dir: Path, number: int, frames: int, shifts: list[str]) -> tuple[int, bool]:
    """One run. How many frames were sent, and whether the honest workers' weights could be checked."""
    attacker = Attacker((SEED, number))
    choice = attacker.choice
    transport = ("shm", "unix", "tcp")[number % 3]
    optimizer = choice.choice(("SGD", "SGD", "Adam", "NAdam"))
    shifts.clear()
    with contextlib.closing(Bench(run_dir, choice.choice(SYNCS), transport, optimizer)) as bench:
        puppets = [Puppet(bench, index) for index in range(HONEST + HOSTILE)]
        honest, hostile = puppets[:HONEST], puppets[HONEST:]
        while not all(puppet.idle for puppet in puppets):
            bench.poll()
            for puppet in puppets:
                puppet.hear()
        bench.addresses += {address for _, address in bench.coordinator.core.shards}
        for puppet in hostile:
            for _ in range(choice.choice((1, 2, 4, 8, 30))):
                if not one_move(attacker, puppet):
                    break
                for _ in range(choice.choice((1, 1, 1, 3))):
                    bench.poll()
                if choice.random() < 0.2:
                    bench.validate()
            puppet.close()
            for _ in range(VISITORS):
                visit(attacker, puppet)
            bench.poll()
            bench.validate()
            if not step_all(honest, shifts):
                break
            if attacker.sent.total() >= frames:
                break
        for puppet in hostile:
            puppet.close()
        goal = max(puppet.core.iteration for puppet in honest) + LAST_STEPS
        finished = False
        for _ in range(POLLS):
            bench.poll()
            under_way = [puppet for puppet in honest if puppet.core.iteration < goal or not puppet.idle]
            if finished := not under_way:
                break
            if not step_all(under_way, shifts):
                break
            for puppet in set(honest) - set(under_way):  # done: nobody is to wait for it
                for stream in puppet.streams:
                    stream.send(WorkerFinished())
                puppet.close()
                honest.remove(puppet)
        assert finished or CHANGE in shifts, (
            number,
            bench.job.sync,
            transport,
            [vars(p.core) for p in honest],
        )
        bench.validate()
        weights = bench.weights()
        for puppet in honest:
            puppet.close()
    if finished and optimizer == "SGD" and not shifts:
        for trace in read_run(run_dir)[:-1]:
            elements = weights[trace.header.index]
            assert np.allclose(elements, -updates(trace), rtol=1e-4, atol=0), (number, bench.job.sync)
        return attacker.sent.total(), True
    return attacker.sent.total(), False


def step_all(honest: Sequence[Puppet], shifts: list[str]) -> bool:
    """Have each do what is next. False if one was expelled: only a change that nobody published excuses that."""
    try:
        for puppet in honest:
            puppet.step()
    except PeerLostError:
        if CHANGE not in shifts:
            raise
        return False
    return True


def visit(attacker: Attacker, puppet: Puppet) -> None:
    """Call a host as a reader, or as nobody, and send it some frames."""
    choice, bench = attacker.choice, puppet.bench
    role: Any = choice.choice(("reader", "reader", "worker", "server"))
    index, extension = choice.choice((0, 1, 2, 99)), choice.choice((0, 0, 1, 99))
    hello = Hello(bench.job.token, role, index, extension=extension)
    greeting = framed(msgspec.msgpack.encode(hello))
    sock = connect(choice.choice(bench.addresses))
    with sock:
        sock.setblocking(False)
        if choice.random() < 0.8:
            sock.send(greeting)
        words = attacker.to_server(puppet) if choice.random() < 0.7 else attacker.to_coordinator(puppet)
        for _ in range(choice.choice((1, 2, 3))):
            if not attacker.send(sock, words):
                break
            bench.poll()
    bench.poll()


def one_move(attacker: Attacker, puppet: Puppet) -> bool:
    """Something honest, or something hostile. False if the peer can do no more."""
    choice = attacker.choice
    try:
        if choice.random() < 0.25:
            puppet.step()
            return True
    except PacelineError:
        return False
    if choice.random() < 0.4:
        return attacker.send(puppet.coordinator.sock, attacker.to_coordinator(puppet))
    stream = choice.choice(list(puppet.servers.values()))
    if stream._ring_out is not None and choice.random() < 0.7:
        attacker.scribble(puppet, stream)
        return True
    return attacker.send(stream.sock, attacker.to_server(puppet))


def test_mutated_frames_in_process_end_no_host_and_hold_no_honest_worker_up(
    tmp_path: Path, shifts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("paceline").setLevel(logging.ERROR)
    sent = checked = 0
    before = 0
    show = Progress("in process")
    try:
        for number in itertools.count():
            count, exact = attack_by_hand(tmp_path / "run", number, FRAMES - sent, shifts)
            shutil.rmtree(tmp_path / "run")
            sent += count
            checked += exact
            before = before or resident_bytes()  # after the first run: what is imported and kept is there
            show.now_and_then(f"{sent:,} frames in {number + 1:,} runs")
            if sent >= FRAMES:
                break
    finally:
        logging.getLogger("paceline").setLevel(logging.NOTSET)
    gc.collect()
    grown = resident_bytes() - before
    tripped = Counter(
        record.exc_info[0].__name__ for record in caplog.records if record.exc_info and record.exc_info[0]
    )
    show.now(
        f"{sent:,} frames in {number + 1:,} runs, the weights of {checked:,} checked, {grown / 2**20:.0f} MiB more "
        f"than after the first, nets: {dict(tripped)}"
    )
    assert checked > 0
    assert grown < MOST_GROWTH_BYTES
    assert not tripped, "what broke no rule that anybody had written down: see the log"


# -- a run on threads -------------------------------------------------------------------------------------


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(48, dtype=torch.float64))


def test_mutated_frames_over_sockets_end_no_host_and_the_others_weights_are_right(
    run_on_threads: RunOnThreads, shifts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One of three workers turns hostile, first as itself, then as any number of readers."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    frames, sent, before = max(1, FRAMES // 10), 0, 0
    show = Progress("over sockets")
    try:
        for number in itertools.count():
            attacker = Attacker((SEED, "threads", number))
            quota = min(frames - sent, 500)
            steps = 6
            shifts.clear()

            def train(attacker: Attacker = attacker, quota: int = quota, steps: int = steps) -> int:
                model = Flat()
                optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)
                for iteration in range(steps):
                    optimizer.zero_grad()
                    (model.a.sum() * slope(worker_index(), iteration, LAST_WORD)).backward()
                    if worker_index() == HONEST and iteration == 1:
                        session = current()
                        assert isinstance(session, WorkerSession)
                        attack_as_worker(attacker, session, quota)
                        attack_as_readers(attacker, session, quota)
                        return 0
                    optimizer.step()
                return steps

            transport = ("shm", "unix", "tcp")[number % 3]
            run = run_on_threads(
                train,
                workers=HONEST + 1,
                servers=2,
                sync="asp",
                transport=transport,
                hyperparameters="raw",
                keep_errors=True,
            )
            sent += attacker.sent.total()
            honest = [index for index, done in run.results.items() if done == steps]
            assert sorted(honest) == list(range(HONEST)), run.errors
            if not shifts:
                values = run.state_dict["a"].chunk(2)
                for value, trace in zip(values, run.shards, strict=True):
                    torch.testing.assert_close(value, torch.full_like(value, -updates(trace, LAST_WORD)))
            before = before or resident_bytes()
            show.now_and_then(f"{sent:,} frames in {number + 1:,} runs")
            if sent >= frames:
                break
    finally:
        logging.getLogger("paceline").setLevel(logging.NOTSET)
    gc.collect()
    grown = resident_bytes() - before
    tripped = [record for record in caplog.records if record.exc_info]
    show.now(f"{sent:,} frames in {number + 1:,} runs, {grown / 2**20:.0f} MiB more than after the first")
    assert grown < MOST_GROWTH_BYTES
    assert not tripped


class Borrowed(Puppet):
    """A puppet's words out of a session's mouth."""

    def __init__(self, session: WorkerSession) -> None:
        memory = session.memory
        assert memory is not None
        for part in memory.region.gradients.values():
            part[:] = bytes(part.nbytes)
        layout = Layout.of([Parameter(("a",), (48,), "float64")])
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
        self.index = session.worker
        self.core = session.core
        self.shards = memory.shards
        self.region = memory.region
        self.coordinator = session.links.coordinator
        self.servers = {str(place): stream for place, stream in enumerate(session.links.servers)}
        self.bench = Words(
            session._job, ModelSpec(layout, OptimizerSpec("SGD", read_groups(optimizer), (0,)), ())
        )  # type: ignore[assignment]

    def content_of(self, shard: ShardSlice) -> tuple[Content, list[memoryview]]:
        content, payload = super().content_of(shard)
        return msgspec.structs.replace(content, present=b"\1"), payload


class Words:
    """As much of a bench as words need."""

    def __init__(self, job: Any, model: ModelSpec) -> None:
        self.job, self.model = job, model
        self.groups = msgspec.msgpack.encode(model.optimizer.groups)


def attack_as_worker(attacker: Attacker, session: WorkerSession, quota: int) -> None:
    puppet = Borrowed(session)
    choice = attacker.choice
    for _ in range(choice.choice((1, 3, 10, 100))):
        if attacker.sent.total() >= quota:
            return
        if choice.random() < 0.3:
            alive = attacker.send(puppet.coordinator.sock, attacker.to_coordinator(puppet))
        else:
            stream = choice.choice(list(puppet.servers.values()))
            if stream._ring_out is not None and choice.random() < 0.7:
                attacker.scribble(puppet, stream)
                alive = True
            else:
                alive = attacker.send(stream.sock, attacker.to_server(puppet))
        if not alive:
            return


def attack_as_readers(attacker: Attacker, session: WorkerSession, quota: int) -> None:
    puppet = Borrowed(session)
    choice = attacker.choice
    hosts = [session.links.coordinator.sock, *(stream.sock for stream in session.links.servers)]
    names = [host_address(sock) for host, sock in enumerate(hosts) if is_open(sock)]
    greeting = framed(msgspec.msgpack.encode(Hello(session._job.token, "reader", 0)))
    while names and attacker.sent.total() < quota:
        place = choice.randrange(len(names))
        family, name = names[place]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(name)
            words = attacker.to_server(puppet) + attacker.to_coordinator(puppet)
            with contextlib.suppress(OSError):
                if choice.random() < 0.8:
                    sock.sendall(greeting)
                for _ in range(choice.choice((1, 2, 5))):
                    if attacker.sent.total() >= quota or not attacker.send(sock, words):
                        break


def is_open(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.getpeername()
        return True
    return False


def host_address(sock: socket.socket) -> tuple[int, Any]:
    return sock.family, place_of(sock)
