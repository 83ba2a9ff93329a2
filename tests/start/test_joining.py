"""Machines that join a run: `paceline serve` and `paceline join`, as separate programs on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from paceline.core.messages import ClockOffset
from paceline.look.run_reading import read_report
from paceline.sync.events import PushReceived, WorkerJoined
from paceline.sync.ticks import TICKS_PER_S, in_ticks
from paceline.trace import read_run, replay
from paceline.trace.clocks import read_clocks
from paceline.trace.recording import read_records
from tests.support.closed_door import relay
from tests.support.live import (
    DEADLINE_S,
    assert_equal,
    await_that,
    listening_ports,
    mark,
    run_program,
    start_program,
)
from tests.support.marks import chaos, thorough
from tests.support.served import ENDLESS_SCRIPT, SCRIPT, Served, await_training, enough, output, two_machines

__all__ = ["mark", "two_machines"]


@contextlib.contextmanager
def tunnel(port: int) -> Iterator[int]:
    """Return another port, whose connections are passed on to this one, as `ssh -L` does."""

    def pass_on(inner: socket.socket) -> None:
        with inner, socket.create_connection(("127.0.0.1", port)) as outer:
            back = threading.Thread(target=relay, args=(outer, inner, bytearray()))
            back.start()
            relay(inner, outer, bytearray())
            back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=pass_on, args=(entrance.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as entrance:
        threading.Thread(target=accept, daemon=True).start()
        yield entrance.getsockname()[1]
        entrance.shutdown(socket.SHUT_RDWR)


# As sitecustomize.py, it lets every process of a machine read a clock with an offset and a drift.
OTHER_CLOCK = """
import os
import time

read_ns = time.monotonic_ns
offset_ns, drift_ppm = map(int, os.environ["TEST_CLOCK"].split())
time.monotonic_ns = lambda: (now_ns := read_ns()) + offset_ns + now_ns * drift_ppm // 1_000_000
time.monotonic = time.perf_counter = lambda: time.monotonic_ns() / 1e9
"""


def assert_timelines_agree(folders: Sequence[str]) -> None:
    """Check that pushes arrive after they were sent, and answers after that, within the stated bounds."""
    for folder in folders:
        for path in Path(folder).glob("worker-*.jsonl"):
            path.rename(Path("run", path.name))
    clocks = read_clocks(Path("run"))
    records = read_records(Path("run"))
    arrived = {
        (event.worker, event.iteration): event.now_ticks
        for entry in read_run(Path("run"))[0].entries
        if isinstance(event := entry.event, PushReceived)
    }
    assert len(arrived) == sum(map(len, records)) > 0
    for worker, each in enumerate(records):
        for record in each:
            assert isinstance(record.machine, int)
            clock = clocks[record.machine]
            pushed, answered = (
                clock.on_coordinator(in_ticks(at_s)) for at_s in (record.pushed_s, record.answered_s)
            )
            arrived_ticks = arrived[worker, record.iteration]
            assert pushed.ticks - pushed.bound_ticks <= arrived_ticks <= answered.ticks + answered.bound_ticks
    offsets = [
        msgspec.json.decode(line, type=ClockOffset)
        for path in Path("run").glob("clock-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert min(offset.bound_ticks for offset in offsets) < in_ticks(0.001)
    timeline = read_report(Path("run")).timeline
    assert timeline is not None
    assert timeline.error_s > 0


FROZEN_SCRIPT = SCRIPT.replace("optimizer =", "model[0].requires_grad_(False)\noptimizer =", 1).replace(
    "model.parameters()", "model[2].parameters()", 1
)


@pytest.mark.thorough
def test_a_run_that_machines_join_saves_what_is_trained_and_says_so(mark: str) -> None:
    """Both workers have the same first layer, so no server has it."""
    served = Served("--workers", "2")
    Path("train.py").write_text(FROZEN_SCRIPT)
    joined = served.join("1", options=["-n", "2", "--run-dir", "first"])
    code, _, errors = output(joined)
    summary = served.summary()
    assert code == 0, errors
    assert (summary["samples"], summary["faults"]) == (96, [])
    assert set(load_file("run/weights.safetensors")) == {"2.weight", "2.bias"}
    assert "The saved weights lack 2 frozen parameters" in served.messages
    assert not [*Path("run").glob("frozen"), *Path("first").glob("frozen")]


def test_two_machines_train_what_one_machine_trains(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clocks differ by a minute, and drift apart. One of them reaches the run through a tunnel."""
    Path("clocks").mkdir()
    Path("clocks", "sitecustomize.py").write_text(OTHER_CLOCK)
    served = Served("--workers", "3", "--servers", "2")
    with tunnel(int(served.port)) as port, monkeypatch.context() as machine:
        machine.setenv("PYTHONPATH", f"{Path('clocks').absolute()}:{os.environ['PYTHONPATH']}")
        machine.setenv("TEST_CLOCK", f"{30 * TICKS_PER_S} 100")
        first = served.join("2", options=["-n", "2", "--run-dir", "first"])
        machine.setenv("TEST_CLOCK", f"{-30 * TICKS_PER_S} -100")
        second = served.join("2", options=["--run-dir", "second"], address=f"127.0.0.1:{port}")
        codes = [output(first), output(second)]
    summary = served.summary()
    alone = run_program(
        *("-m", "paceline", "run", "-n", "3", "--servers", "2", "--run-dir", "alone", "train.py", "2")
    )

    assert [code for code, *_ in codes] == [0, 0], codes
    shown = "".join(stdout for _, stdout, _ in codes)
    assert "worker 0 has finished" in shown
    assert (summary["workers"], summary["samples"], summary["lost_workers"]) == (3, 192, [])
    assert alone.returncode == 0, alone.stderr
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")
    assert_timelines_agree(["first", "second"])


def test_only_who_has_the_secret_can_watch_or_join_a_run(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("--workers", "2", "--servers", "2")
    Path("train.py").write_text(ENDLESS_SCRIPT)  # the run goes on while it is watched
    joined = [served.join("1000000"), served.join("1000000")]
    await_training(2)
    refused = served.join("1", secret="0" * 64)
    wrong = run_program("-m", "paceline", "status", served.address, "--secret-file", served.wrong_secret())
    monkeypatch.setenv("PACELINE_SECRET", served.secret)
    watched = run_program("-m", "paceline", "status", served.address, "--json")
    watching = start_program("-m", "paceline", "status", served.address, "--watch")
    assert watching.stdout is not None
    first_line = watching.stdout.readline()
    watching.stdout.close()  # as `head` does
    watching.stdout = None
    watching_ended = output(watching)
    listening = listening_ports(mark)
    another = output(refused)
    enough()
    codes = [output(program)[0] for program in joined]
    summary = served.summary()

    assert (codes, summary["lost_workers"]) == ([0, 0], [])
    assert listening == [int(served.port)]
    assert another[0] == 2
    assert (
        f"the run at {served.address} cannot be joined or watched: the secret is not that of the run"
        in another[2]
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == another[2]
    assert wrong.stderr.endswith("or the secret with which the run was started.\n")
    assert watched.returncode == 0, watched.stderr
    state = json.loads(watched.stdout)
    assert [worker["worker"] for worker in state["workers"]] == [0, 1]
    assert {worker["state"] for worker in state["workers"]} <= {"computing", "waiting", "pulling"}
    assert [machine["machine"] for machine in state["machines"]] == ["127.0.0.1", "127.0.0.1 (2)"]
    assert "bsp, 2 workers, 2 servers" in first_line
    assert (watching_ended[0], watching_ended[2]) == (0, "")
    names = {"this machine", "127.0.0.1", "127.0.0.1 (2)"}
    links = {(link["sender"], link["receiver"]): link for link in state["links"]}
    assert set(links) == {
        (a, b) for a in names for b in names if (a == "this machine") != (b == "this machine")
    }
    assert all(link["total_bytes"] > 1000 and link["bytes_per_s"] > 0 for link in links.values())


@pytest.mark.thorough
def test_a_machine_that_cannot_take_part_is_refused_and_the_run_goes_on(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served("--workers", "2", "--servers", "2")
    Path("train.py").write_text(ENDLESS_SCRIPT)  # the run goes on while machines are refused
    joined = [served.join("1000000"), served.join("1000000")]
    await_training(2)
    refused = [
        served.join("1", secret=""),
        served.join("1", options=["-n", "2"]),
        served.join("1", options=["-n", "0", "--servers", "1"]),
        served.join("1", options=["-n", "0", "--servers", "1", "--listen", "192.0.2.1"]),
    ]
    monkeypatch.setenv("PACELINE_SECRET", served.secret)
    shown = run_program("-m", "paceline", "status", served.address)
    missing, many, brings, elsewhere = (output(program) for program in refused)
    enough()
    codes = [output(program)[0] for program in joined]
    summary = served.summary()

    assert (codes, summary["lost_workers"]) == ([0, 0], [])
    assert {program[0] for program in (missing, many, brings, elsewhere)} == {2}
    assert "set PACELINE_SECRET" in missing[2]
    assert "2 workers cannot join, because the run has at most 2 workers" in many[2]
    assert (
        "but the run needs no more servers: of its 2 servers, the machine that serves the run has 2"
        in brings[2]
    )
    assert "cannot listen on 192.0.2.1:0" in elsewhere[2]
    assert "bsp, 2 workers, 2 servers" in shown.stdout
    assert any("staleness" in line and "waits for" in line for line in shown.stdout.splitlines())


@pytest.mark.thorough
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_a_link_that_is_too_slow_for_the_model_is_reported_with_the_arithmetic(mark: str) -> None:
    with network(1, NetworkLink("20mbit")) as machines:
        served = Served("--workers", "1", "--listen", "0.0.0.0")
        large = SCRIPT.replace("Linear(6, 8)", "Linear(6, 8000)").replace("8, 1)", "8000, 1)")
        Path("train.py").write_text(large.replace("lr=0.01", "lr=1e-6"))
        address = f"{machines.host}:{served.port}"
        joined = output(served.join("1", address=address, prefix=machines.machines[0].prefix))
        summary = served.summary()

    assert joined[0] == 0, joined
    faults = str(summary["faults"])
    found = re.search(r"a gradient of ([\d.]+) MB leaves at ([\d.]+) MB/s, which takes ([\d.]+) s", faults)
    assert found is not None, faults
    size_mb, rate_mb, time_s = map(float, found.groups())
    assert 0.24 < size_mb < 0.28  # 64,001 parameters
    assert 1.0 < rate_mb < 10.0  # 20 Mbit/s are 2.5 MB/s, but a burst of 0.13 MB is not delayed
    assert time_s == pytest.approx(size_mb / rate_mb, rel=0.3)


@pytest.mark.parametrize("sync", ["elastic-bsp:lookahead=5", *chaos("bsp", "asp", "ssp:staleness=2")])
def test_a_worker_joins_in_mid_run(sync: str, mark: str) -> None:
    served = Served("--workers", "1:2", "--servers", "2", "--sync", sync)
    first = served.join("20", "0.05")
    await_training(1)
    second = served.join("20", "0.05")
    await_training(2)
    enough()
    codes = [output(first), output(second)]
    summary = served.summary()

    assert [code for code, *_ in codes] == [0, 0], codes
    assert "worker 1 has finished" in codes[1][1]
    assert summary["samples"] == 20 * 96
    assert (summary["left"], summary["lost_workers"]) == ([], [])
    traces = read_run(Path("run"))
    joined = [
        entry.event
        for trace in traces
        for entry in trace.entries
        if isinstance(entry.event, WorkerJoined) and entry.event.worker == 1
    ]
    pushed = {
        event.worker
        for entry in traces[0].entries
        if isinstance(event := entry.event, PushReceived) and not event.empty
    }
    assert len({(event.iteration, event.count) for event in joined}) == 1
    assert pushed == {0, 1}
    assert all(replay(trace) == [] for trace in traces)


@pytest.mark.thorough
def test_a_worker_that_joins_when_all_data_is_handed_out_says_that_it_takes_no_part(mark: str) -> None:
    served = Served("--workers", "1:2", "--sync", "bsp")
    first = served.join("1", "0.05")
    await_training(1)
    second = served.join("1")
    words = "handed out before this worker joined, so the worker takes no part in the training"
    await_that(
        lambda: f"worker 1: the data of epoch 1 of 1 was {words}" in served.messages, "the run says so"
    )
    enough()
    ends = [output(first), output(second)]
    summary = served.summary()

    assert [code for code, *_ in ends] == [0, 0], ends
    assert words in ends[1][1], ends[1]
    assert summary["samples"] == 96


def test_an_interrupted_run_is_summarized_and_its_machines_say_where_it_was_interrupted(mark: str) -> None:
    served = Served("--workers", "1")
    joined = served.join("1000", "0.02")
    await_training(1)
    served.program.send_signal(signal.SIGINT)
    printed, _ = served.program.communicate()
    served.failure(code=130)
    code, _, stderr = output(joined)

    assert ["ended", "interrupted"] in [line.split() for line in printed.splitlines()]
    assert code == 1
    assert "it was interrupted on the machine that serves it" in stderr


def test_a_worker_that_fails_is_named_with_its_machine_and_with_its_log_there(mark: str) -> None:
    served = Served("--workers", "1")
    Path("train.py").write_text("raise ValueError('the labels are missing')")
    joined = served.join(options=["--run-dir", "theirs"])
    messages = served.failure()
    code, _, stderr = output(joined)

    assert "worker 0 on 127.0.0.1 failed: ValueError: the labels are missing" in messages
    assert "the log of worker 0 is on the machine 127.0.0.1, which prints the path of the log" in messages
    assert code == 1
    assert f"the output of worker 0 is in {Path('theirs', 'worker-0.log').absolute()}" in stderr
    assert "the labels are missing" in Path("theirs", "worker-0.log").read_text()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1", "expected HOST:PORT"),
        *thorough(("127.0.0.1:99999", "expected HOST:PORT")),
        ("127.0.0.1:1", "gave up after 0 s"),
    ],
)
def test_an_address_that_cannot_be_reached(
    address: str, words: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(SCRIPT)
    monkeypatch.setenv("PACELINE_SECRET", "0" * 64)

    ended = run_program("-m", "paceline", "join", "--wait", "0", address, "train.py")

    assert ended.returncode in (1, 2)
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("wait_s", ["600", *thorough("inf")])
def test_ctrl_c_ends_a_machine_that_calls_a_silent_server(
    wait_s: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(SCRIPT)
    monkeypatch.setenv("PACELINE_SECRET", "0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        joined = start_program("-m", "paceline", "join", "--wait", wait_s, address, "train.py")
        connection, _ = silent.accept()
        with connection:
            joined.send_signal(signal.SIGINT)
            code, _, stderr = output(joined)

    assert code == 130, stderr
    assert "no worker was started" in stderr
    assert "Traceback" not in stderr


def test_options_after_the_address_are_not_taken_for_the_script(mark: str) -> None:
    ended = run_program("-m", "paceline", "join", "127.0.0.1:1", "--wait", "0", "train.py")

    assert ended.returncode == 2
    assert "paceline join --wait ... 127.0.0.1:1 SCRIPT" in " ".join(ended.stderr.split())


@pytest.mark.thorough
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_the_commands_of_the_documentation(
    mark: str, two_machines: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "how-to", "several-machines.md").read_text()
    blocks = re.findall(r"```sh\n# on (\S+)\n(.*?)```", page, re.DOTALL)
    Path("train.py").write_text(SCRIPT.replace("int(sys.argv[1])", "2"))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "paceline"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def start(address: str, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*two_machines[address], "sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    serving, *joining = blocks[:3]
    served = start(*serving)
    await_that(Path("first-run", "secret").exists, "serve has written the secret")
    ends = [output(program) for program in [*(start(*block) for block in joining), served]]
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    summary = json.loads(Path("first-run", "summary.json").read_text())
    assert (summary["samples"], summary["lost_workers"]) == (192, [])
    alone = run_program("-m", "paceline", "run", "-n", "2", "--run-dir", "alone", "train.py")
    assert alone.returncode == 0, alone.stderr
    assert_equal("first-run/weights.safetensors", "alone/weights.safetensors")
    assert [command.split()[:2] for _, command in blocks[3:]] == [["paceline", "serve"]]
