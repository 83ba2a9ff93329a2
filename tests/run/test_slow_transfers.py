"""Transfers that take long: whatever the time, nobody gives up while bytes move, and everybody does when none do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from paceline.core.liveness import Liveness
from paceline.core.messages import Snapshot, Waits, WorkerFinished, first_phase
from paceline.errors import DeadlineError
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job_options import make_job
from paceline.run.server import ServerCaller, ServerHost
from paceline.sync.ticks import TICKS_PER_S
from paceline.wire import preface as patience
from paceline.wire.preface import LOOK_INTERVAL_S, Patience
from paceline.wire.stream import Stream
from tests.conftest import RunOnThreads
from tests.support.live import loaded, mark, processes, start_program
from tests.support.served import SCRIPT as TRAINS
from tests.support.served import Served, await_training, enough, output

__all__ = ["mark"]

SNAPSHOTS = first_phase("server", "reader")

# A model of SIZE_MB MB in layers of 10 MB, whose weights do not change: weight k of layer i is i + k % 1000.
SCRIPT = """
import sys
import torch
import paceline

class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(2_500_000) % 1000 + float(number))

model = torch.nn.Sequential(*(Layer(number) for number in range(int(sys.argv[1]) // 10)))
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
optimizer.zero_grad()
sum((layer.weight * 0.0).sum() for layer in model).backward()
optimizer.step()
"""


def assert_whole(size_mb: int) -> None:
    """Check the weights that a run of the script has saved."""
    weights = load_file("run/weights.safetensors")
    assert len(weights) == size_mb // 10
    for number in range(size_mb // 10):
        assert torch.equal(weights[f"{number}.weight"], torch.arange(2_500_000) % 1000 + float(number))


# -- the rule ------------------------------------------------------------------------------------------------


class Clock:
    """A clock that goes on by one interval whenever it is read. At the same time, something may happen."""

    def __init__(self, happens: Callable[[], object] = lambda: None) -> None:
        self.happens = happens
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += patience.LOOK_INTERVAL_S
        self.happens()
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "LOOK_INTERVAL_S", 2**-10)  # so that nobody really waits for long
    return clock


LIMIT_S = 4 * 2**-10


def test_patience_ends_when_nothing_has_moved_for_the_limit(clock: Clock) -> None:
    moved = iter([0, 0, 70_000, 70_000, 70_000])
    waiting = Patience(lambda: next(moved), limit_s=LIMIT_S / 2)
    looks = [(waiting.look(), waiting.quiet_s / LIMIT_S, waiting.over) for _ in range(4)]

    assert looks == [(False, 0.25, False), (True, 0.0, False), (False, 0.25, False), (False, 0.5, True)]


def test_time_in_which_nobody_could_look_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.5, 3600.0, 3600.5])
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: next(times)))
    waiting = Patience(lambda: 0, limit_s=3.0)
    for _ in range(3):
        waiting.look()

    assert waiting.quiet_s == 0.5 + 2 * LOOK_INTERVAL_S + 0.5
    assert not waiting.over


# -- one connection ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connection(kind: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection with small buffers."""
    if kind == "unix":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            ends = client, listener.accept()[0]
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def frame(message: Any, payload: bytes) -> bytes:
    """Return what a stream sends for a message."""
    one, other = socket.socketpair()
    with one, other:
        Stream(one, first_phase("server", "reader")).send(message)
        empty = other.recv(1 << 16)
    return empty[:8] + len(payload).to_bytes(8, "little") + empty[16:] + payload


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_message_may_take_longer_than_the_limit_while_its_bytes_arrive(kind: str, clock: Clock) -> None:
    payload = bytes(range(250)) * 40
    received = bytearray(len(payload))
    with connection(kind) as (here, there):
        stream: Stream[Any] = Stream(
            here, first_phase("server", "reader"), lambda message, size: [memoryview(received)]
        )
        data = frame(Snapshot(0, 3), payload)
        parts = iter([data[start : start + 50] for start in range(0, len(data), 50)])
        clock.happens = lambda: there.sendall(next(parts, b""))
        answer = stream.wait(LIMIT_S)

    assert (answer, bytes(received)) == (Snapshot(0, 3), payload)
    assert clock.now_s > 10 * LIMIT_S


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_message_whose_bytes_stop_is_given_up(kind: str, clock: Clock) -> None:
    with connection(kind) as (here, there):
        stream: Stream[Any] = Stream(
            here, first_phase("server", "reader"), lambda message, size: [memoryview(bytearray(size))]
        )
        there.sendall(frame(Snapshot(0, 3), bytes(1000))[:500])
        with pytest.raises(DeadlineError, match="has carried nothing for"):
            stream.wait(LIMIT_S)


def test_a_queue_may_take_longer_than_the_limit_while_the_peer_reads_it(clock: Clock) -> None:
    with connection("unix") as (here, there):
        stream: Stream[Any] = Stream(here, SNAPSHOTS)
        stream.send(WorkerFinished(), [memoryview(bytes(4 << 20))])
        there.setblocking(False)
        read = 0

        def read_a_little() -> None:
            nonlocal read
            with contextlib.suppress(BlockingIOError):
                read += len(there.recv(1 << 16))

        clock.happens = read_a_little
        stream.drain(LIMIT_S)
        assert not stream.backlog
        assert clock.now_s > 10 * LIMIT_S

        stream.send(WorkerFinished(), [memoryview(bytes(4 << 20))])
        clock.happens = lambda: None
        with pytest.raises(DeadlineError):
            stream.drain(LIMIT_S)


# -- the end of a run ----------------------------------------------------------------------------------------


class Throttled:
    """A socket that sends only what it is permitted to send."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._permitted = threading.Event()
        self.permitted_bytes = self.sent_bytes = 0

    def permit(self, size_bytes: int) -> None:
        self.permitted_bytes = size_bytes
        self._permitted.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        if not self.permitted_bytes:
            self._permitted.wait(0.001)  # so that the loop of the host does not keep the interpreter busy
            self._permitted.clear()
            raise BlockingIOError
        sent: int = self._sock.send(parts[0][: self.permitted_bytes])
        self.permitted_bytes -= sent
        self.sent_bytes += sent
        return sent


@pytest.fixture
def throttled(monkeypatch: pytest.MonkeyPatch) -> dict[int, Throttled]:
    """Index of a server -> its connection to the coordinator, which is throttled before it sends weights."""
    found: dict[int, Throttled] = {}
    send_snapshot = ServerHost._send_snapshot

    def throttle(server: ServerHost, peer: Any, shard: int) -> None:
        if not isinstance(peer.stream.sock, Throttled):
            found[shard] = peer.stream.sock = Throttled(peer.stream.sock)
        send_snapshot(server, peer, shard)

    monkeypatch.setattr(ServerHost, "_send_snapshot", throttle)
    monkeypatch.setattr(patience, "SILENCE_S", LIMIT_S)
    return found


def train_large() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Linear(100, 64))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    optimizer.zero_grad()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_shard_may_take_longer_than_the_limit_while_its_bytes_arrive(
    transport: str, run_on_threads: RunOnThreads, clock: Clock, throttled: dict[int, Throttled]
) -> None:
    began_s = 0.0

    def permit_more() -> None:
        """Time passes only when the server has sent what it was permitted to send."""
        nonlocal began_s
        if not throttled or throttled[0].permitted_bytes:
            clock.now_s -= patience.LOOK_INTERVAL_S
        else:
            throttled[0].permit(1000)
            began_s = began_s or clock.now_s

    clock.happens = permit_more
    run = run_on_threads(train_large, workers=1, transport=transport)

    assert {name: tensor.numel() for name, tensor in run.state_dict.items()} == {
        "0.weight": 6400,
        "0.bias": 100,
        "1.weight": 6400,
        "1.bias": 64,
    }
    assert clock.now_s - began_s > 10 * LIMIT_S


def test_only_the_shards_of_a_silent_server_are_given_up(
    run_on_threads: RunOnThreads, clock: Clock, throttled: dict[int, Throttled]
) -> None:
    def permit_more() -> None:
        """Time passes only when server 0 has sent its half of the weights."""
        if 0 in throttled:
            throttled[0].permit(1 << 30)
        if 0 not in throttled or throttled[0].sent_bytes < 25_000:
            clock.now_s -= patience.LOOK_INTERVAL_S

    clock.happens = permit_more
    run = run_on_threads(train_large, workers=1, servers=2, transport="unix")

    assert "0.weight" in run.state_dict
    assert "1.weight" not in run.state_dict


def test_a_lent_snapshot_is_that_of_the_time_at_which_it_was_requested(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights change while a reader has yet to receive most of them."""
    send_snapshot = ServerHost._send_snapshot
    expected: list[bytes] = []
    received = bytearray()
    here, there = socket.socketpair()

    def target(message: Any, size_bytes: int) -> list[memoryview]:
        nonlocal received
        received = bytearray(size_bytes)
        return [memoryview(received)]

    stream: Stream[Any] = Stream(here, SNAPSHOTS, target)

    def also_to_a_reader(server: ServerHost, peer: Any, shard: int) -> None:
        send_snapshot(server, peer, shard)
        reader = ServerCaller(Stream(there, first_phase("server", "reader")))
        throttled = reader.stream.sock = Throttled(reader.stream.sock)  # type: ignore[assignment]
        server._hub.adopt(reader)
        weights = server._require_memory().weights[shard]
        expected.append(b"".join(bytes(part) for part in weights.values()))
        send_snapshot(server, reader, shard)
        server._keep(shard)
        for part in weights.values():
            part[:] = bytes(part.nbytes)
        throttled.permit(1 << 30)
        reader.stream.flush()

    monkeypatch.setattr(ServerHost, "_send_snapshot", also_to_a_reader)
    with here, there:
        run_on_threads(train_large, workers=1, transport="unix")
        assert isinstance(stream.wait(), Snapshot)

    assert bytes(received) == expected[0] != bytes(len(received))


def test_a_worker_whose_connection_carries_data_is_not_silent(tmp_path: Path) -> None:
    """The servers report when bytes last moved, so a long message does not look like a worker that hangs."""
    job = make_job(workers=2, servers=1, run_dir=tmp_path)
    coordinator = CoordinatorHost.listen(job)
    coordinator.start()
    clocks = coordinator.watch.clocks
    for worker in (0, 1):
        clocks.begin(("silent", "worker", worker), 1.0)
    first, second = (clocks.began_s(("silent", "worker", worker)) for worker in (0, 1))
    assert first is not None
    moved_s = 1234.56789
    for _ in range(3):
        clocks.look(2000.0)
        waits = Waits((), False, moved_ticks=((0, job.ticks_of(moved_s)), (1, job.ticks_of(0.5)), (7, 5)))
        coordinator.watch.note_traffic_of(0, waits)
        after = [clocks.began_s(("silent", "worker", worker)) for worker in (0, 1, 7)]
        # The clock stays the same while no byte moves; otherwise, the worker would seem to respond again.
        assert after[1:] == [second, None]
        assert after[0] is not None
        assert after[0] > first
        moved = clocks.waited_s(("silent", "worker", 0), 2000.0)
    assert moved == pytest.approx(2000.0 - moved_s, abs=1e-3)
    coordinator.stop()


def test_heartbeats_may_wait_behind_a_large_message() -> None:
    liveness = Liveness()
    liveness.machine_joined(3, "10.0.0.3", now_ticks=0)
    for second in range(1, 60):
        liveness.moved(3, second * TICKS_PER_S)
        assert liveness.look(second * TICKS_PER_S) == []
    [verdict] = [v for tenths in range(600, 660) for v in liveness.look(tenths * TICKS_PER_S // 10)]
    assert verdict.machine == 3


# -- whole runs ----------------------------------------------------------------------------------------------

SERVE = """
import paceline.wire.preface as patience

patience.SILENCE_S = 1.0
from paceline.cli import main

main()
"""

STOPS_A_SERVER = """
import os, signal
from pathlib import Path
os.kill(int(Path("victim").read_text()), signal.SIGSTOP)
"""


@pytest.mark.processes
def test_all_machines_report_failure_when_weights_are_lost_at_the_end(mark: str) -> None:
    Path("serve.py").write_text(SERVE)
    served = Served("--workers", "1", "--servers", "2", "--remote-servers", "1", program=["serve.py"])
    Path("train.py").write_text(TRAINS + STOPS_A_SERVER)
    brings = served.join(options=["--servers", "1", "--workers", "0", "--run-dir", "brought"])
    joined = served.join("1", "0.1")
    await_training(1)
    Path("victim").write_text(str(processes(mark)["server 1"]))
    enough()
    messages = served.failure()
    os.kill(int(Path("victim").read_text()), signal.SIGCONT)
    ends = [output(joined), output(brings)]

    assert "server 1: it had to send its weights, but sent nothing for 1 s" in messages
    assert "the saved weights are incomplete; missing: " in messages
    assert json.loads(Path("run", "summary.json").read_text())["ended"] == "failed"
    assert [code for code, *_ in ends] == [1, 1], ends
    assert all("server 1: it had to send its weights, but sent nothing for 1 s" in each[2] for each in ends)


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
@pytest.mark.parametrize(("rate", "remote_mb"), [("20mbit", 40), ("50mbit", 400)])
def test_weights_behind_a_slow_link_are_collected_whole(rate: str, remote_mb: int, mark: str) -> None:
    """Four of five servers, with four fifths of the weights, are behind the link."""
    size_mb = remote_mb * 5 // 4
    with network(1, NetworkLink(rate)) as machines:
        served = Served("--workers", "1", "--servers", "5", "--remote-servers", "4", "--listen", "0.0.0.0")
        Path("train.py").write_text(SCRIPT)
        address = f"{machines.host}:{served.port}"
        [machine] = machines.machines
        began_s = time.monotonic()
        joined = served.join(str(size_mb), options=["--servers", "4"], address=address, prefix=machine.prefix)
        code, _, stderr = output(joined, timeout_s=900.0)
        summary = served.summary()
        took_s = time.monotonic() - began_s

    assert code == 0, stderr
    assert (summary["faults"], summary["lost_workers"]) == ([], [])
    assert_whole(size_mb)
    print(f"\n{remote_mb} MB behind {rate}: whole, after {took_s:.0f} s in all; {served.messages}")


@pytest.mark.chaos
@pytest.mark.processes
def test_weights_are_collected_whole_on_a_machine_with_12_busy_processes(mark: str) -> None:
    Path("train.py").write_text(SCRIPT)
    run = ["-m", "paceline", "run", "-n", "1", "--transport", "tcp", "--servers", "1", "--run-dir", "run"]
    with loaded(12):
        began_s = time.monotonic()
        code, stdout, stderr = output(start_program(*run, "train.py", "400"), timeout_s=900.0)
        took_s = time.monotonic() - began_s

    assert code == 0, stdout + stderr
    assert_whole(400)
    print(f"\n400 MB with 12 busy processes: whole, after {took_s:.0f} s in all")
