"""The picture of a job that `paceline status` shows: computed from real cores, and drawn as tables."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from paceline.core import messages
from paceline.core.coordinator import Coordinator
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.messages import (
    Commit,
    Contributed,
    CreateShards,
    Ready,
    Register,
    ShardWaits,
    Status,
    Waits,
)
from paceline.core.requests import COORDINATOR, server_peer, worker_peer
from paceline.core.server import Server
from paceline.core.status import (
    JobStatus,
    LinkStatus,
    MachineStatus,
    Observed,
    StateTimes,
    WorkerStatus,
    job_status,
    waiting_for,
)
from paceline.look.status import StatusView
from paceline.sync import BSP
from paceline.sync.schedule import Schedule, ScheduleStep

MODEL = ModelSpec(
    Layout.of([Parameter(("a",), (40,), "float32")]), OptimizerSpec("SGD", ({"lr": 0.1},), (0,)), ()
)
WORKERS = (0, 1, 2)


@pytest.fixture
def server() -> Server:
    """A server under BSP that has the first pushes of workers 0 and 2, and waits for that of worker 1."""
    server = Server()
    slices = MODEL.layout.slice_evenly(1)
    server.handle(COORDINATOR, CreateShards(MODEL, slices, "bsp", WORKERS, 0), 0)
    server.handle(worker_peer(0), messages.InitialWeights(0), 0)
    for worker in WORKERS:
        server.connected(worker, 0)
    for worker in (0, 2):
        server.handle(worker_peer(worker), Commit(0, 0), 0)
    return server


@pytest.fixture
def core(server: Server) -> Coordinator:
    """The coordinator of the same run, which has asked the server who waits."""
    core = Coordinator(Schedule((ScheduleStep((BSP(),)),)), workers=3, servers=1, shards=1)
    core.connected(server_peer(0), 0)
    for worker in WORKERS:
        core.connected(worker_peer(worker), 0)
    for worker in WORKERS:
        core.handle(worker_peer(worker), Register(MODEL, samples=32), 0)
    core.handle(server_peer(0), Ready(), 0)
    for worker in WORKERS:
        core.handle(worker_peer(worker), Status(0, 0.5, "computing" if worker == 1 else "waiting"), 0)
    core.handle(server_peer(0), server.waits(timers=False), 0)
    return core


def seen(**others: object) -> Observed:
    return msgspec.structs.replace(Observed(servers=1, elapsed_s=75.0, connected=WORKERS), **others)


def test_each_worker_has_a_row_that_says_for_whom_it_waits(core: Coordinator) -> None:
    observed = seen(machine_of={1: "10.0.0.3"}, state_s={0: 1.5, 1: 2.0}, usual_s={0: 0.5, 1: 4.0})
    status = job_status(core, observed, local="10.0.0.1")
    assert (status.sync, status.servers, status.elapsed_s) == ("bsp", 1, 75.0)
    reason = status.workers[0].waits_for
    assert "2 of 3 workers have pushed" in reason
    assert status.workers == (
        WorkerStatus(0, "10.0.0.1", "waiting", 1.5, 0, 0.5, 64.0, 0, reason, last=(1,)),
        WorkerStatus(1, "10.0.0.3", "computing", 2.0, 0, 0.5, 8.0, 0, ""),
        WorkerStatus(2, "10.0.0.1", "waiting", None, 0, 0.5, None, 0, reason, last=(1,)),
    )


def test_the_staleness_is_the_number_of_updates_since_the_worker_has_received_the_weights() -> None:
    server = Server()
    server.handle(COORDINATOR, CreateShards(MODEL, MODEL.layout.slice_evenly(1), "asp", (0, 1), 0), 0)
    server.handle(worker_peer(0), messages.InitialWeights(0), 0)
    for worker in (0, 1):
        server.connected(worker, 0)
    for iteration in range(3):
        server.handle(worker_peer(0), Commit(0, iteration), 0)
    [shard] = server.waits(timers=False).shards
    assert shard.staleness == ((0, 0), (1, 3))


@pytest.mark.parametrize(
    ("process", "shown"),
    [
        ("running", "computing"),
        ("stopped", "stopped by a signal"),
        ("traced", "held by a debugger"),
        ("gone", "computing"),
    ],
)
def test_what_the_agent_sees_is_shown_in_place_of_the_last_report(
    core: Coordinator, process: str, shown: str
) -> None:
    assert job_status(core, seen(processes={1: process})).workers[1].state == shown


def test_a_worker_that_is_gone_waits_for_nobody_and_has_no_speed(core: Coordinator) -> None:
    core.disconnected(worker_peer(2), 0)
    row = job_status(core, seen(usual_s={2: 1.0}, processes={2: "stopped"})).workers[2]
    assert (row.state, row.waits_for, row.samples_per_s, row.staleness) == ("lost", "", None, None)


def test_a_worker_in_a_barrier_waits_for_those_that_have_not_reached_it(core: Coordinator) -> None:
    core.handle(worker_peer(0), Contributed("barrier()", 1), 0)
    rows = job_status(core, seen()).workers
    assert rows[0].state == "waits in barrier 1"
    assert (rows[0].waits_for, rows[0].last) == ("the end of barrier 1", (1, 2))
    assert (rows[2].last, rows[1].last) == ((1,), ())


def test_workers_that_have_not_begun_have_rows() -> None:
    core = Coordinator(Schedule((ScheduleStep((BSP(),)),)), workers=3, servers=1, shards=1)
    core.connected(worker_peer(0), 0)
    rows = job_status(core, seen(connected={0})).workers
    assert [row.state for row in rows] == ["before its first forward pass", "starting", "starting"]
    assert {row.iteration for row in rows} == {None}


def test_computing_the_status_changes_nothing(core: Coordinator) -> None:
    first = job_status(core, seen())
    assert job_status(core, seen()) == first


def test_shards_are_named_only_if_they_wait_for_different_things() -> None:
    def answer(*reasons: str) -> Waits:
        return Waits(tuple(ShardWaits(k, "ssp", ((0, 4),), (each,)) for k, each in enumerate(reasons)), False)

    assert waiting_for([answer("worker 1", "worker 1")]) == {0: "worker 1"}
    assert waiting_for([answer("worker 1", "worker 2", "worker 2")]) == {
        0: "worker 1 (shard 0); worker 2 (shard 1, 2)"
    }
    assert waiting_for([]) == {}


def test_the_time_in_a_state_begins_again_when_it_changes_and_ends_when_a_worker_is_gone() -> None:
    times = StateTimes(ticks_per_s=1)
    times.note({0: "computing", 1: "computing"}, 0)
    times.note({0: "computing", 1: "waiting"}, 5)
    assert times.state_s(7) == {0: 7.0, 1: 2.0}
    times.note({1: "computing"}, 8)
    assert times.state_s(10) == {1: 2.0}


def test_the_time_in_a_state_begins_again_with_each_iteration() -> None:
    times = StateTimes(ticks_per_s=1)
    times.note({0: ("computing", 7)}, 0)
    times.note({0: ("computing", 8)}, 60)
    assert times.state_s(61) == {0: 1.0}


STATUS = JobStatus(
    "elastic-bsp:lookahead=4",
    2,
    75.2,
    (
        WorkerStatus(0, "10.0.0.1", "waiting", 1.5, 12, 0.25, 640.0, 3, "round 12", (1,)),
        WorkerStatus(1, "[fe80::1]", "stopped by a signal", 7260.0),
    ),
    (MachineStatus("[fe80::1]", 0.31, 0.0),),
    (
        LinkStatus("10.0.0.1", "[fe80::1]", 2_500_000.0, 123_456_789),
        LinkStatus("[fe80::1]", "10.0.0.1", None, 0),
    ),
)


def drawn(status: JobStatus, width: int = 140) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(StatusView(status), crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_the_view_shows_workers_machines_and_links() -> None:
    shown = drawn(STATUS)
    assert shown.splitlines()[0] == "elastic-bsp:lookahead=4, 2 workers, 2 servers, 1 min 15 s"
    cells = [line.split() for line in shown.splitlines()[1:]]
    assert cells[1][:9] == ["0", "10.0.0.1", "waiting", "1.5", "s", "12", "0.2500", "640.0", "3"]
    assert shown.count("round 12; last: worker 1") == 1
    assert "2 h 1 min" in shown
    assert cells[4] == ["[fe80::1]", "0.3", "s", "ago", "0.0"]
    assert cells[6] == ["10.0.0.1", "->", "[fe80::1]", "2.50", "123.5"]
    assert cells[7] == ["[fe80::1]", "->", "10.0.0.1", "-", "0.0"]


def test_a_job_on_one_machine_has_only_the_table_of_workers() -> None:
    shown = drawn(msgspec.structs.replace(STATUS, machines=(), links=()))
    assert "heartbeat" not in shown
    assert "MB/s" not in shown


def test_the_fields_are_documented() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "reference", "status.md").read_text()
    for kind in (JobStatus, WorkerStatus, MachineStatus, LinkStatus):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in page, name


def test_the_status_survives_encoding() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(STATUS), type=JobStatus) == STATUS


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_line_of_a_table_is_longer_than_the_terminal_is_wide(width: int) -> None:
    reason = "2 of 3 workers have pushed for round 12, and the others are computing"
    long = WorkerStatus(2, "10.0.0.1 (2)", "before its first forward pass", 7260.0, waits_for=reason)
    status = msgspec.structs.replace(STATUS, workers=(*STATUS.workers, long))
    lines = drawn(status, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == len(drawn(status, 1000).splitlines()) + (width < 60)  # the title has two lines
    if width > 60:
        assert all("2 h 1 min" in lines[row] for row in (3, 4))  # numbers are not cut


def test_the_header_of_a_column_is_not_wrapped_where_nobody_waits() -> None:
    worker = WorkerStatus(0, "127.0.0.1", "computing", 0.1, 327, None, 148.8, 0)
    lines = drawn(JobStatus("asp", 1, 26.0, (worker,)), 80).splitlines()
    assert lines[1].split()[-4:] == ["loss", "samples/s", "waits", "for"]
    assert lines[2].split() == ["0", "computing", "0.1", "s", "327", "-", "148.8"]
    assert len(lines) == 3
    assert drawn(JobStatus("asp", 1, 26.0, ()), 80) == "asp, 0 workers, 1 server, 26 s"  # nobody has joined


def test_less_important_columns_are_left_out_one_after_another() -> None:
    headers = {
        width: drawn(STATUS, width).splitlines()[1 + (width < 57)].split() for width in range(140, 40, -1)
    }
    assert len(headers[140]) == 10  # "waits for" are two words
    assert headers[110][-4:] == ["loss", "samples/s", "waits", "for"]
    assert headers[80] == ["worker", "machine", "state", "for", "iteration", "loss", "samples/s"]
    assert headers[60] == ["worker", "machine", "state", "iteration", "loss"]
    assert headers[41] == ["worker", "state", "iteration"]


def test_each_loss_keeps_its_cause_when_the_worker_comes_back(core: Coordinator) -> None:
    core.note_ending(1, "it was stopped")
    core.take_out(1, 0)
    core.disconnected(worker_peer(1), 0)
    core.note_ending(1, "it ended with exit code 75")  # a consequence
    core.handle(server_peer(0), messages.PushesReported(1, 0, (0,), (False,), ((),)), 0)
    assert core.invite(1, [1]) == {1: 1}
    core.members.admit(1)
    assert (
        drawn(job_status(core, seen()), 200).splitlines()[-1]
        == "worker 1 was lost, and joined again: it was stopped"
    )
    core.members.leave(1, "lost")
    core.note_ending(1, "no heartbeat")
    assert core.invite(1, [1]) == {1: 2}
    core.members.admit(1)
    core.members.leave(1, "finished")
    core.note_ending(1, "it ended with exit code 0")

    worker = job_status(core, seen()).workers[1]
    assert (worker.state, worker.losses) == ("finished", ("it was stopped", "no heartbeat"))
    assert [core.cause(departure) for departure in core.members.departures] == [
        "it was stopped",
        "no heartbeat",
        "it ended with exit code 0",
    ]
    assert [core.members.has_returned(departure) for departure in core.members.departures] == [
        True,
        True,
        False,
    ]


def test_a_worker_that_was_asked_to_leave_has_left_for_this_reason(core: Coordinator) -> None:
    core.handle(worker_peer(1), messages.WorkerFinished(early=True), 0)
    core.note_ending(1, "it ended with exit code 0")
    [departure] = core.members.departures
    assert (departure.fate, core.cause(departure)) == ("left", "it was asked to leave")
