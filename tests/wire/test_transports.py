"""What each transport promises. A transport that this file adds, in one process, keeps the same promises."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, worker_index
from paceline.core.messages import Hello, Message, Stage, first_phase
from paceline.errors import ConfigurationError, PeerLostError, ProtocolError
from paceline.run.job import describe
from paceline.run.job_options import make_job
from paceline.start.local import ProcessPlacement
from paceline.wire.memory import PassedSockets, cut, pass_on, socket_pair
from paceline.wire.secure import Contexts
from paceline.wire.stream import Stream
from paceline.wire.transports import TRANSPORTS, Transport, connect, is_here, seen_from
from tests.support.told_apart import lines_that_tell_apart, source_that_tells_apart

from .test_wire import LARGE, TIMEOUT_S, Wire, carry, contents, expected, fill

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

SMALL_BYTES = 4096  # more than the messages of one push have without their payload


class InProcess(Transport):
    """Pairs of sockets between the threads of one process."""

    name = "in-process"
    words = "pairs of sockets (in-process)"
    kinds = ("thread",)

    def __init__(self) -> None:
        self.doors: dict[str, socket.socket] = {}  # address -> where connections to it are passed on

    def listen(self, host: str = "", port: int = 0, *, secure: bool = False) -> tuple[PassedSockets, str]:
        address = f"thread:{len(self.doors)}"
        self.doors[address], receiver = socket_pair()
        return PassedSockets(receiver), address

    def connect(self, address: str, timeout_s: float, known: Contexts | None) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pass_on(theirs, self.doors[address])
            except OSError:
                ours.close()
                raise
        return ours


@pytest.fixture(params=[*TRANSPORTS, InProcess.name])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of each transport, with the one of this file in the table."""
    added = InProcess()
    monkeypatch.setitem(TRANSPORTS, added.name, added)
    yield request.param
    for door in added.doors.values():
        door.close()


@contextlib.contextmanager
def connected(transport: Transport) -> Iterator[tuple[Stream[Message], Stream[Message]]]:
    """The two ends of a connection."""
    listener, address = transport.listen()
    with contextlib.closing(listener):
        ours: Stream[Message] = Stream(connect(address), first_phase("server", "worker"))
        assert select.select([listener], [], [], TIMEOUT_S)[0]
        theirs: Stream[Message] = Stream(
            listener.accept()[0],
            first_phase("worker", "server"),
            takes_descriptor=transport.shares_memory,
        )
        with contextlib.closing(ours), contextlib.closing(theirs):
            yield ours, theirs


# -- connections ------------------------------------------------------------------------------------------


def test_whoever_calls_an_address_is_accepted_and_nobody_else(name: str) -> None:
    transport = TRANSPORTS[name]
    (first, here), (second, there) = transport.listen(), transport.listen()
    with contextlib.closing(first), contextlib.closing(second):
        assert here != there
        assert is_here(here)
        assert seen_from(here, here) == here
        with pytest.raises(BlockingIOError):
            first.accept()
        with connect(here) as caller:
            assert select.select([first], [], [], TIMEOUT_S)[0]
            with first.accept()[0] as accepted:
                caller.sendall(b"hello")
                assert accepted.recv(5) == b"hello"
        with pytest.raises(BlockingIOError):
            second.accept()
    with pytest.raises(PeerLostError, match="cannot connect to"):
        connect(here)


def test_messages_arrive_in_order_until_the_other_end_is_closed(name: str) -> None:
    with connected(TRANSPORTS[name]) as (ours, theirs):
        sent: list[Message] = [Hello("token", "worker", 0), Stage(0, (1, 2)), Stage(1, ())]
        for message in sent:
            ours.send(message)
        assert [theirs.wait(TIMEOUT_S) for _ in sent] == sent
        ours.close()
        with pytest.raises(PeerLostError):
            theirs.wait(TIMEOUT_S)


def test_an_address_of_no_transport_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"the address 'pigeon:7' is of an unknown kind"):
        connect("pigeon:7")


# -- memory, and what it costs ----------------------------------------------------------------------------


def test_a_push_and_its_answer_arrive_and_travel_only_if_memory_is_not_shared(name: str) -> None:
    with contextlib.closing(Wire(name, LARGE, 2)) as wire:
        assert (wire.region.descriptor is not None) == TRANSPORTS[name].shares_memory
        gradients = fill(wire.region.gradients, seed=1)
        held = {dtype: memoryview(bytearray(view.nbytes)) for dtype, view in wire.region.weights.items()}
        weights = fill(held, seed=2)
        for shard, worker, server in zip(wire.shards, wire.workers, wire.servers, strict=True):
            before = sum(server.traffic)
            wire.push(shard)
            assert contents(wire.inboxes[shard.index].gradient) == expected(gradients, shard)
            wire.answer(shard, cut(held, shard))
            carry(server, worker)
            size_bytes = 2 * sum(view.nbytes for view in cut(held, shard).values())
            travelled = sum(server.traffic) - before
            assert travelled < SMALL_BYTES if TRANSPORTS[name].shares_memory else travelled >= size_bytes // 2
        assert contents(wire.region.weights) == weights


# -- users ------------------------------------------------------------------------------------------------


def test_a_job_names_its_transport_and_refuses_what_it_does_not_have(name: str) -> None:
    transport = TRANSPORTS[name]
    job = make_job(workers=1, transport=name, dry_run=True)
    assert job.carrier is transport
    assert describe(job)["transport"] == transport.words
    placement = ProcessPlacement.on_loopback(job)
    if transport.spans_machines:
        placement.require_for(job)
        return
    with pytest.raises(ConfigurationError, match="works on a single machine only"):
        placement.require_for(job)
    with pytest.raises(ConfigurationError, match=f"port is 4242 and transport is '{name}'"):
        make_job(workers=1, transport=name, port=4242, dry_run=True)


def test_a_run_trains(name: str, run_on_threads: RunOnThreads) -> None:
    """Every gradient is the worker's index plus one, so that the weights say whose pushes were applied."""

    def train() -> None:
        model = nn.Linear(40, 3, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(4):
            optimizer.zero_grad()
            ((worker_index() + 1) * model.weight.sum()).backward()
            optimizer.step()

    run = run_on_threads(train, workers=2, servers=2, shards=3, transport=name, hyperparameters="raw")
    assert set(run.state_dict["weight"].flatten().tolist()) == {-0.5 * 4 * (1 + 2) / 2}


# -- the source -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "if transport == 'shm': pass",
        "shared = name not in ('auto', 'tcp')",
        "WORDS = {'unix': 'sockets'}",
        "match transport:\n    case 'tcp': pass",
    ],
)
def test_a_comparison_with_a_name_is_found(text: str) -> None:
    assert list(lines_that_tell_apart(text, TRANSPORTS))


def test_only_a_transport_knows_its_name() -> None:
    """Everything else asks it for what it can do."""
    assert source_that_tells_apart(TRANSPORTS) == set()
