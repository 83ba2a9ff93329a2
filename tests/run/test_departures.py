"""How a server notices that workers have left: goodbyes, closed connections, and what the coordinator says.

A worker says goodbye to the coordinator and to each server on separate connections, and the end of a connection is
noticed at different times. So a server may be told of a departure, or be asked for the final weights, before it has
read the last messages of the workers that have left.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer
from paceline.core import messages
from paceline.core.coordinator import LOST_TOO_EARLY, Coordinator
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.messages import (
    Commit,
    CreateShards,
    FetchSnapshot,
    Hello,
    LossSettled,
    Message,
    PushesReported,
    Snapshot,
    first_phase,
)
from paceline.core.requests import COORDINATOR, Apply, Fail, Request, Send, server_peer, worker_peer
from paceline.core.server import Server
from paceline.errors import PeerLostError, UserCodeError
from paceline.run.coordinator import CoordinatorHost
from paceline.run.hub import Caller, Hub
from paceline.run.job import Assignment
from paceline.run.job_options import make_job
from paceline.run.server import ServerHost
from paceline.run.worker import WorkerSession
from paceline.run.worker_links import Links
from paceline.sync import BSP
from paceline.sync.events import Clip
from paceline.sync.schedule import Schedule, ScheduleStep
from paceline.train import session as sessions
from paceline.wire.stream import Stream
from paceline.wire.transports import connect
from tests.conftest import RunOnThreads
from tests.support.live import await_that

MODEL = ModelSpec(
    Layout.of([Parameter(("a",), (40,), "float32")]), OptimizerSpec("SGD", ({"lr": 0.1},), (0,)), ()
)


def server_with_a_held_push(clip: Clip | None = None) -> Server:
    """Return a server of a run under BSP: worker 0 has pushed with two batches drawn, and worker 1 has not."""
    server = Server()
    slices = MODEL.layout.slice_evenly(1)
    server.handle(COORDINATOR, CreateShards(MODEL, slices, "bsp", (0, 1), 0), 0)
    server.handle(worker_peer(0), messages.InitialWeights(0), 0)
    for worker in (0, 1):
        server.connected(worker, 0)
    requests = server.handle(worker_peer(0), Commit(0, 0, None, drawn=(2,), clip=clip), 0)
    assert not any(isinstance(request, Apply) for request in requests)
    return server


DEPARTURES = {
    "worker 0 is lost, says the coordinator": lambda s: s.handle(COORDINATOR, messages.WorkerLost(0), 0),
    "the coordinator asks": lambda s: s.handle(COORDINATOR, FetchSnapshot(0, (0, 1)), 0),
    "worker 0's connection ends": lambda s: s.disconnected(0, 0),
    "worker 1 says goodbye": lambda s: s.handle(worker_peer(1), messages.WorkerFinished(), 0),
}


@pytest.mark.parametrize("clip", [None, Clip(max_norm=1.0, factor=0.5)], ids=["", "clipped"])
@pytest.mark.parametrize("order", list(permutations(DEPARTURES)), ids=lambda order: ", ".join(order))
def test_the_final_weights_contain_what_the_departures_cause(
    order: tuple[str, ...], clip: Clip | None
) -> None:
    server = server_with_a_held_push(clip)
    done: list[Request] = []
    for what in order:
        done += DEPARTURES[what](server)
        server.validate()
        reported = any(isinstance(r, Send) and isinstance(r.message, PushesReported) for r in done)
        if reported:
            done += server.handle(COORDINATOR, LossSettled(0, 0, 0), 0)
    if clip is not None:
        done += server.handle(COORDINATOR, messages.MeanClipped(0, pushes=((0, 0),), factor=0.5), 0)
    done = [
        r for r in done if isinstance(r, Apply) or (isinstance(r, Send) and isinstance(r.message, Snapshot))
    ]
    assert [type(request) for request in done] == [Apply, Send]
    assert done[-1] == Send(COORDINATOR, Snapshot(0, 1))


def test_the_coordinator_names_all_workers_that_have_left() -> None:
    core = Coordinator(Schedule((ScheduleStep((BSP(),)),)), workers=3, servers=2, shards=3)
    for server in (0, 1):
        core.connected(server_peer(server), 0)
    for worker in (0, 1, 2):
        core.connected(worker_peer(worker), 0)
    core.handle(worker_peer(2), messages.WorkerFinished(), 0)
    core.disconnected(worker_peer(0), 0)
    assert core.fetch(2) == [Send(server_peer(0), FetchSnapshot(2, (0, 2)))]


def test_a_server_reports_the_pushes_of_a_lost_worker_when_its_connection_has_ended() -> None:
    server = server_with_a_held_push()
    report = Send(COORDINATOR, PushesReported(0, 0, (0,), (True,), ((2,),)))
    assert server.handle(COORDINATOR, messages.WorkerLost(0), 0) == []
    assert server.disconnected(0, 0) == [report]
    server = server_with_a_held_push()
    assert server.disconnected(0, 0) == []
    assert server.handle(COORDINATOR, messages.WorkerLost(0), 0) == [report]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_that_is_asked_for_the_final_weights_first_reads_the_goodbyes(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    done: set[int] = set()  # workers whose only message from now on is their goodbye
    asked: list[set[int]] = []  # workers that were expected when a request for the weights arrived
    answered: list[set[int]] = []  # workers that were expected when it was answered
    serve, handle, send = Hub._serve, ServerHost._handle_coordinator, ServerHost._send_snapshot

    def serve_later(hub: Hub[Any], peer: Caller, events: int) -> None:
        if (
            hub._name.startswith("the coordinator")
            or peer.index not in done
            or peer.role != "worker"
            or asked
        ):
            serve(hub, peer, events)
        else:
            time.sleep(
                0.001
            )  # the server sees at once that there is more to read, and would leave the workers no time

    def note_request(host: ServerHost, message: messages.Message) -> None:
        if isinstance(message, FetchSnapshot):
            asked.append(set(host._core.expected))
        handle(host, message)

    def note_answer(host: ServerHost, peer: Any, index: int) -> None:
        answered.append(set(host._core.expected))
        send(host, peer, index)

    monkeypatch.setattr(Hub, "_serve", serve_later)
    monkeypatch.setattr(ServerHost, "_handle_coordinator", note_request)
    monkeypatch.setattr(ServerHost, "_send_snapshot", note_answer)

    def train() -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        time.sleep(0.2)  # the server may still look for another message after the last push
        done.add(paceline.worker_index())

    run = run_on_threads(train, workers=2, servers=1, transport=transport)
    assert asked == [{0, 1}]
    assert answered == [set()]
    assert run.state_dict["weight"].item() == 0.0


def test_a_server_without_a_goodbye_is_told_that_the_worker_is_lost() -> None:
    core = Coordinator(Schedule((ScheduleStep((BSP(),)),)), workers=2, servers=2, shards=2)
    for server in (0, 1):
        core.connected(server_peer(server), 0)
    for worker in (0, 1):
        core.connected(worker_peer(worker), 0)
    done = core.handle(worker_peer(0), messages.WorkerFinished(early=True, unreached=(1,)), 0)
    told = [each for each in done if isinstance(each, Send) and isinstance(each.message, messages.WorkerLost)]
    assert told == [Send(server_peer(1), messages.WorkerLost(0))]
    assert core.members.fate(0) == "left"
    report = PushesReported(0, 0, (4,), (True,), ((),))
    assert core.handle(server_peer(1), report, 0) == [Send(server_peer(1), LossSettled(0, 0, 4))]
    mean = ((0, 4),)  # a server that lacks this push is asked, so that the other server does not wait for it
    [asked] = core.handle(server_peer(0), messages.MeanMeasured(0, mean, 1.0, 4.0), 0)
    assert asked == Send(server_peer(1), messages.MeanAwaited(1, mean))


def test_a_worker_whose_goodbye_does_not_reach_a_server_holds_nobody_up(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 is asked to leave while it waits in a barrier, so a shard of each server holds its push."""
    goodbyes: list[str] = []
    send = Stream.send

    def send_most(stream: Stream[Any], message: Any, *args: Any, **options: Any) -> Any:
        if isinstance(message, messages.WorkerFinished) and paceline.worker_index() == 1:
            goodbyes.append(str(message.unreached))
            if len(goodbyes) == 1:
                raise PeerLostError("the connection was cut")
        return send(stream, message, *args, **options)

    monkeypatch.setattr(Stream, "send", send_most)

    def train() -> None:
        session = sessions.current()
        assert isinstance(session, WorkerSession)
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        for iteration in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if iteration == 2 and session.worker == 1:
                session.links.asked_to_leave = True  # noticed while this worker waits
            elif iteration == 2:
                await_that(lambda: len(goodbyes) == 3, "worker 1 has left")
            try:
                optimizer.step()
            except SystemExit:
                return

    run = run_on_threads(train, workers=2, servers=2, transport="tcp")
    assert goodbyes == ["()", "()", "(0,)"]
    assert run.state_dict["weight"].tolist() == [[-1.0, -1.0]]


def test_a_worker_that_ends_before_it_is_connected_to_the_servers_holds_nobody_up(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers expect worker 1, whose script catches the error and ends."""
    connect_links = Links.connect

    def connect_most(links: Links, place: Assignment, *args: Any) -> None:
        if place.index == 1:
            raise PeerLostError("the connection was cut")
        connect_links(links, place, *args)

    monkeypatch.setattr(Links, "connect", connect_most)

    def train() -> None:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
        with contextlib.suppress(PeerLostError):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    run = run_on_threads(train, workers=2, servers=2, transport="tcp")
    assert run.state_dict["weight"].tolist() == [[-1.0, -1.0]]


def test_a_run_fails_if_the_worker_with_the_initial_weights_ends_before_it_is_connected() -> None:
    core = Coordinator(Schedule((ScheduleStep((BSP(),)),)), workers=2, servers=1, shards=1)
    core.connected(server_peer(0), 0)
    for worker in (0, 1):
        core.connected(worker_peer(worker), 0)
        core.handle(worker_peer(worker), messages.Register(MODEL), 0)
    assert core.initializer == 0
    done = core.handle(worker_peer(0), messages.WorkerFinished(unreached=(0,)), 0)
    assert Fail("worker 0", LOST_TOO_EARLY) in done


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nobody_waits_for_the_weights_if_the_coordinator_fails(when: str, tmp_path: Path) -> None:
    """The server is connected, but it never sends its weights."""
    job = make_job(workers=1, servers=1, transport="unix", run_dir=tmp_path / "run")
    coordinator = CoordinatorHost.listen(job)
    coordinator.start()

    def begin() -> None:
        coordinator.over.set()  # the weights are collected at the end of a run
        coordinator.core.model, coordinator.core.slices = MODEL, tuple(MODEL.layout.slice_evenly(1))
        coordinator.core.addresses = ("unix:nowhere",)

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    server: Stream[Message] = Stream(connect(coordinator.address), first_phase("coordinator", "server"))
    with contextlib.closing(server):
        server.send(Hello(job.token, "server", 0, address="unix:nowhere"))
        await_that(lambda: coordinator._of_role("server"), "the server is connected")
        coordinator.ask(begin)
        if when == "before":
            coordinator.call(fail)
            await_that(lambda: not coordinator._thread.is_alive(), "the coordinator has failed")
        collection = coordinator.collect()
        if when == "meanwhile":
            assert not collection.finished.is_set()
            coordinator.call(fail)
        assert collection.finished.wait(60.0)
    coordinator.stop()
    assert collection.missing == [0]
    assert coordinator.failure is not None
    assert "Input/output error" in coordinator.failure.reason


def test_a_model_of_the_user_that_fails_at_a_departure_keeps_no_other_thread_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher tells how a process has ended, and asks a question before the coordinator's thread looks."""
    coordinator = CoordinatorHost.listen(make_job(workers=1, servers=1, run_dir=tmp_path / "run"))
    answers: list[int] = []
    is_busy, goes_on = threading.Event(), threading.Event()

    def fail() -> None:
        raise UserCodeError("the sync model has raised an exception")

    def be_busy() -> None:
        is_busy.set()
        goes_on.wait(60.0)

    monkeypatch.setattr(coordinator.watch, "note_states", be_busy)
    coordinator.start()
    assert is_busy.wait(60.0)
    coordinator.call(fail)
    asking = threading.Thread(target=lambda: answers.append(coordinator.ask(lambda: 5)), daemon=True)
    asking.start()
    await_that(lambda: coordinator._calls.qsize() == 2, "the question waits behind the call")
    goes_on.set()
    asking.join(10.0)
    found = answers.copy()
    coordinator.stop()
    assert found == [5]
    assert coordinator.failure is not None
