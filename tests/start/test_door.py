"""Strangers at the door of a served run: nobody gets in, the run goes on, and the secret is nowhere to be read.

`make siege` repeats the attacks for a minute, and compares the speed of the run with its speed in peace.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.trace.recording import read_records
from paceline.wire.secure import contexts, new_secret
from paceline.wire.transports import connect
from tests.support.closed_door import relay
from tests.support.live import await_that, mark, run_program, started
from tests.support.served import Served, enough, output

__all__ = ["mark"]

LARGE = bool(os.environ.get("PACELINE_SIEGE"))
HALF_OPEN = 500
EPOCHS = 120 if LARGE else 24  # of 12 iterations of each worker, which take about 20 ms each
PHASE_S = 5.0  # time between a change from peace to attack or back
ATTACKS_PER_S = 50


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


class Attackers:
    """Everybody who must not get in.

    Args:
        port: the port of the run.
        recorded: what a member has sent to this port before.
    """

    def __init__(self, port: int, recorded: bytes) -> None:
        self.done = 0
        self.admitted: list[str] = []
        self._port = port
        self._recorded = recorded
        self._draw = random.Random(0)
        self._old = contexts(new_secret())

    @property
    def ways(self) -> list[Callable[[], None]]:
        return [self.scan, self.speak_plainly, self.make_noise, self.replay, self.use_an_old_secret]

    def scan(self) -> None:
        call(self._port).close()

    def speak_plainly(self) -> None:
        self._expect_nothing("plain text", b"GET / HTTP/1.1\r\n\r\n")

    def make_noise(self) -> None:
        self._expect_nothing("noise", self._draw.randbytes(self._draw.randrange(1, 3000)))

    def replay(self) -> None:
        self._expect_nothing("a replay", self._recorded)

    def use_an_old_secret(self) -> None:
        try:
            connect(f"tls:127.0.0.1:{self._port}", 20, self._old).close()
        except PacelineError:
            return
        self.admitted.append("an old secret")

    def attack(self) -> None:
        """Try one way after another, at a fixed rate."""
        for way in self.ways:
            with contextlib.suppress(OSError):  # refused, or reset
                way()
            self.done += 1
            time.sleep(1 / ATTACKS_PER_S)

    def _expect_nothing(self, what: str, said: bytes) -> None:
        """Say something, and check that the answer is at most an alert of TLS, which has 7 bytes."""
        with call(self._port) as sock:
            sock.sendall(said)
            sock.settimeout(0.05)
            heard = b""
            with contextlib.suppress(TimeoutError):
                while data := sock.recv(4096):
                    heard += data
        # A replayed beginning of a handshake is answered, but the answer can be read only with the key of its sender.
        if what != "a replay" and len(heard) > 7:
            self.admitted.append(f"{what}: {heard!r}")


def recording(port: int) -> tuple[int, bytearray, threading.Thread]:
    """Return a port that passes on one connection to another port, and what its caller has sent."""
    wire = socket.create_server(("127.0.0.1", 0))
    recorded = bytearray()

    def pass_on() -> None:
        with wire:
            inner, _ = wire.accept()
        with inner, call(port) as outer:
            outer.settimeout(None)
            back = threading.Thread(target=relay, args=(outer, inner, bytearray()))
            back.start()
            relay(inner, outer, recorded)
            back.join()

    thread = threading.Thread(target=pass_on)
    thread.start()
    return int(wire.getsockname()[1]), recorded, thread


@contextlib.contextmanager
def half_open(port: int) -> Iterator[None]:
    """Hold connections that say nothing, or only the beginning of a handshake."""
    with contextlib.ExitStack() as stack:
        for number in range(HALF_OPEN):
            with contextlib.suppress(OSError):  # the run has closed it already
                sock = stack.enter_context(call(port))
                sock.sendall(b"\x16\x03\x01" if number % 2 else b"")
        yield


def test_nobody_gets_in_and_the_run_goes_on(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("--workers", "2", "--sync", "asp", "--servers", "2")
    joined = [served.join(str(EPOCHS), "0.02"), served.join(str(EPOCHS), "0.02")]
    await_that(lambda: Path("run", "trace-shard-0.jsonl").exists(), "training has begun")
    monkeypatch.setenv("PACELINE_SECRET", served.secret)
    passes, recorded, relaying = recording(int(served.port))
    watched = run_program("-m", "paceline", "status", f"127.0.0.1:{passes}", "--json")
    relaying.join()
    monkeypatch.delenv("PACELINE_SECRET")
    commands = [Path(folder, "cmdline").read_bytes() for folder in started(mark)]
    attackers = Attackers(int(served.port), bytes(recorded))
    phases: list[tuple[bool, float]] = []  # whether the run was attacked from then on, and when this began
    for attacked in cycle((False, True)):
        until_s = time.monotonic() + PHASE_S
        phases.append((attacked, time.monotonic()))
        with half_open(int(served.port)) if attacked else contextlib.nullcontext():
            while served.program.poll() is None and time.monotonic() < until_s:
                if attacked:
                    attackers.attack()
                else:
                    time.sleep(0.05)
                if not LARGE:  # each way is tried once
                    break
        if served.program.poll() is not None or (attacked and not LARGE):
            break
    ended_s = time.monotonic()
    if not LARGE:
        enough()
    codes = [output(program) for program in joined]
    summary = served.summary()

    assert watched.returncode == 0, watched.stderr
    assert len(recorded) > 200
    assert attackers.admitted == []
    assert attackers.done >= len(attackers.ways)
    assert [code for code, *_ in codes] == [0, 0], codes
    assert (summary["samples"], summary["lost_workers"], summary["left"]) == (EPOCHS * 96, [], [])
    secret = served.secret.encode()
    assert not [command for command in commands if secret in command]
    files = [path for path in Path().rglob("*") if path.is_file()]
    holders = [path for path in files if secret in path.read_bytes()]
    assert holders == [Path("run", "secret")]
    assert holders[0].stat().st_mode & 0o077 == 0
    if LARGE:
        compare(phases, ended_s)


def compare(phases: list[tuple[bool, float]], ended_s: float) -> None:
    """Print the speed of the run while it was attacked and in peace."""
    [folder, *_] = Path("runs").iterdir()
    pushed_s = sorted(record.pushed_s for records in read_records(folder) for record in records)
    offset_s = ended_s - pushed_s[-1]  # the run ended with the last push
    speeds: dict[bool, list[float]] = {False: [], True: []}
    ends = [begun_s for _, begun_s in phases[1:]] + [ended_s]
    for (attacked, begun_s), end_s in zip(phases, ends, strict=True):
        count = sum(begun_s <= at_s + offset_s < end_s for at_s in pushed_s)
        if end_s - begun_s > PHASE_S / 2:
            speeds[attacked].append(count / (end_s - begun_s))
    peace, attack = statistics.median(speeds[False]), statistics.median(speeds[True])
    print(f"\n{attack:.1f} iterations per second under attack, {attack / peace:.3f} of {peace:.1f} in peace")
    assert attack >= 0.9 * peace
