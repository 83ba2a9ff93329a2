"""Machines that leave a run that `paceline serve` has started, that are lost, or that join it again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from paceline.sync.events import PushReceived, WorkerJoined, WorkerLost
from paceline.trace import read_run, replay
from tests.support.added_device import ADDED, needs_added_device
from tests.support.live import await_that, mark, processes, times_in
from tests.support.marks import chaos, thorough
from tests.support.served import ENDLESS_SCRIPT, Served, await_training, enough, output, trained

__all__ = ["mark"]

# A script that calls Paceline again after it was told that its worker was taken out.
CALLS_AGAIN = "import paceline.errors\n" + ENDLESS_SCRIPT.replace(
    "        optimizer.step()",
    """        try:
            optimizer.step()
        except paceline.errors.TakenOutError:
            with paceline.evaluating():
                pass""",
)

NAN_SCRIPT = ENDLESS_SCRIPT.replace(
    "        optimizer.step()",
    """        if sys.argv[2:] == ["0.001", "nan"]:
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()""",
)


@pytest.mark.chaos
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_the_others_continue_without_a_machine_whose_link_swallows_everything(mark: str) -> None:
    with network(2, NetworkLink()) as machines:
        served = Served("--workers", "2", "--listen", "0.0.0.0")
        address = f"{machines.host}:{served.port}"
        stays, silent = (
            served.join("10", "0.1", address=address, prefix=machine.prefix) for machine in machines.machines
        )
        await_training(2)
        _, _, _, name = machines.machines[1].prefix
        subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)
        enough()
        code, _, stderr = output(stays)
        summary = served.summary()
        silent.kill()
        silent.communicate()

    assert code == 0, stderr
    [loss] = summary["losses"].values()  # type: ignore[attr-defined]
    assert "no heartbeat of machine" in loss


@pytest.mark.thorough
def test_the_others_continue_without_a_machine_that_is_killed(mark: str) -> None:
    served = Served("--workers", "2", "--sync", "asp")
    stays = served.join("10", "0.1")
    killed = served.join("10", "0.1")
    await_training(2)
    killed.kill()
    killed.communicate()
    enough()
    code, _, stderr = output(stays)
    summary = served.summary()

    assert code == 0, stderr
    assert len(summary["lost_workers"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("leaves_too", [False, *thorough(True)])
def test_a_run_pauses_while_it_has_too_few_workers(leaves_too: bool, mark: str) -> None:
    """One worker is killed. Then another one joins, or two others if the one that is left leaves as well."""
    served = Served("--workers", "2:3")
    stays, killed = served.join("10", "0.1"), served.join("10", "0.1")
    await_training(2)
    killed.kill()
    killed.communicate()
    await_that(lambda: "it has 1 of at least 2 workers" in served.messages, "the run is paused")
    steps = list(Path().glob("stepped-*"))
    await_that(lambda: time.time() - max(step.stat().st_mtime for step in steps) > 0.5, "nobody steps")
    if leaves_too:
        stays.terminate()
        left = output(stays)
        assert left[0] == 143, left
        await_that(
            lambda: "waits for others to join: 0 of at least 2 workers" in served.messages,
            "everybody has left",
        )
    enough()
    goes_on = [served.join("10"), served.join("10") if leaves_too else stays]
    codes = [output(program) for program in goes_on]
    summary = served.summary()

    assert [code for code, *_ in codes] == [0, 0], codes
    assert "the run continues" in served.messages
    assert len(summary["left"]) == int(leaves_too)  # type: ignore[arg-type]
    assert len(summary["lost_workers"]) == 1  # type: ignore[arg-type]
    assert summary["samples"] == 10 * 96
    assert sum(use.paused_s for use in times_in(summary).values()) > 0.0


def test_a_run_that_nobody_joins_gives_up(mark: str) -> None:
    served = Served("--workers", "2", "--wait", "0.1")

    assert "no machine has joined it within 0.1 s (--wait)" in served.failure()


@pytest.mark.chaos
def test_the_others_continue_while_a_worker_is_stopped(mark: str) -> None:
    served = Served("--workers", "2", "--sync", "bsp")
    joined = [served.join("10", "0.05"), served.join("10", "0.05")]
    await_training(2)
    stopped = processes(mark)["worker 1"]
    os.kill(stopped, signal.SIGSTOP)
    enough()
    summary = served.summary()
    os.kill(stopped, signal.SIGCONT)
    ends = sorted(output(program) for program in joined)

    assert summary["lost_workers"] == [1]
    times_in(summary)
    assert "has been stopped for" in summary["losses"]["1"]  # type: ignore[index]
    assert "Traceback" not in ends[0][2]
    assert [code for code, *_ in ends] == [0, 1]
    assert "worker 1 was taken out of the run: the process of worker 1" in ends[1][2]
    assert "error: no worker on this machine has finished its script (worker 1: it " in ends[1][2]


@pytest.mark.chaos
def test_a_machine_whose_workers_are_all_killed_fails(mark: str) -> None:
    served = Served("--workers", "1:2", "--sync", "asp")
    stays, loses = served.join("10", "0.1"), served.join("10", "0.1")
    await_training(2)
    agent = f"/proc/{loses.pid}/task/{loses.pid}/children"
    children = Path(agent).read_text().split()  # one of them is the fork server
    [killed] = [c for c in children if b"paceline worker" in Path("/proc", c, "cmdline").read_bytes()]
    os.kill(int(killed), signal.SIGKILL)
    code, _, stderr = output(loses)
    enough()
    codes = output(stays)[0], code
    summary = served.summary()

    assert codes == (0, 1)
    assert "no worker on this machine has finished its script" in stderr
    assert "it was terminated by signal SIGKILL" in stderr
    assert len(summary["lost_workers"]) == 1  # type: ignore[arg-type]


def assert_nothing_late_was_applied(worker: int) -> None:
    """Check that a shard has received no push of a lost worker until it has joined again, and that it has."""
    present, joins = True, 0
    trace = read_run(Path("run"))[0]
    for event in (entry.event for entry in trace.entries):
        if isinstance(event, WorkerJoined | WorkerLost) and event.worker == worker:
            present = isinstance(event, WorkerJoined)
            joins += present
        assert present or not isinstance(event, PushReceived) or event.worker != worker
    assert joins == 2
    assert replay(trace) == []


@pytest.mark.thorough
def test_a_worker_that_keeps_sending_nan_does_not_join_again(mark: str) -> None:
    served = Served("--workers", "1:2", "--sync", "asp", "--on-nan", "skip")
    Path("train.py").write_text(NAN_SCRIPT)
    stays, leaves = served.join("1000000"), served.join("1000000", "0.001", "nan")
    code, _, stderr = output(leaves)
    enough()
    stayed = output(stays)
    summary = served.summary()

    assert (stayed[0], code) == (0, 1), (stayed, stderr)
    assert "was taken out of the run: Worker" in stderr
    assert "has sent NaN or inf 10 times in a row" in stderr
    assert "joining again" not in stderr
    assert len(summary["lost_workers"]) == 1  # type: ignore[arg-type]


@needs_added_device
def test_a_worker_that_was_stopped_joins_again(mark: str) -> None:
    served = Served("--workers", "1:2", "--sync", "bsp")
    Path("train.py").write_text(CALLS_AGAIN)
    Path("abacus.py").write_text(ADDED)
    options = ["--run-dir", "again", "--import", "abacus", "--devices", "abacus:1"]
    with open("join.log", "w") as messages:
        stays = served.join("1000000")
        await_that(lambda: "worker 0" in processes(mark), "worker 0 has been started")
        again = served.join("1000000", options=options, stderr=messages)
    await_training(2)
    stopped = processes(mark)["worker 1"]
    os.kill(stopped, signal.SIGSTOP)
    await_that(lambda: "worker 1 is taken out" in served.messages, "the worker is taken out")
    os.kill(stopped, signal.SIGCONT)
    await_training(3)
    enough()
    ends = [output(stays), output(again)]
    summary = served.summary()

    said = Path("join.log").read_text()
    assert [code for code, *_ in ends] == [0, 0], said
    assert "worker 1 was taken out of the run: the process of worker 1 on machine" in said
    assert "worker 1 was cut off from the run; joining again in 1 s\njoined as worker 1" in said
    shown = ends[1][1]
    assert "worker 1 has finished" in shown
    assert "TakenOutError" not in said + shown
    log = Path("again", "worker-1.log").read_text()
    assert "TakenOutError: worker 1 was taken out of the run: the process of worker 1" in log
    assert "worker 1 has finished" in log
    assert summary["devices"] == {"0": "cpu", "1": "abacus:1 (Abacus 1)"}  # it has kept its device
    assert Path("asked").read_text().count("set 1") == 2
    assert summary["lost_workers"] == [1]
    times_in(summary)
    cause = summary["losses"]["1"]  # type: ignore[index]
    assert "has been stopped for" in cause
    lost = {"worker": 1, "incarnation": 0, "fate": "lost", "cause": cause, "returned": True}
    assert summary["departures"] == [lost]
    assert f"worker 1 was lost: {cause}. " in served.messages
    assert "worker 1 has joined again" in served.messages
    assert_nothing_late_was_applied(1)


@pytest.mark.thorough
@pytest.mark.usefixtures("machines_alone")
@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_a_machine_whose_link_was_down_joins_again(mark: str) -> None:
    with network(2, NetworkLink()) as machines, open("join.log", "w") as messages:
        served = Served("--workers", "1:2", "--listen", "0.0.0.0", "--sync", "asp")
        Path("train.py").write_text(ENDLESS_SCRIPT)
        address = f"{machines.host}:{served.port}"
        one, other = machines.machines
        stays = served.join("1000000", address=address, prefix=one.prefix)
        await_that(lambda: "worker 0" in processes(mark), "worker 0 has been started")
        again = served.join("1000000", address=address, prefix=other.prefix, stderr=messages)
        await_training(2)
        link = ["ip", "-n", other.prefix[3], "link", "set", "eth0"]
        subprocess.run([*link, "down"], check=True)
        await_that(lambda: "worker 1 is taken out" in served.messages, "the machine is taken out")
        subprocess.run([*link, "up"], check=True)
        await_training(3)
        enough()
        ends = [output(stays), output(again)]
        summary = served.summary()

    said = Path("join.log").read_text()
    assert [code for code, *_ in ends] == [0, 0], said
    assert "the connection to the coordinator was lost" in said
    assert said.count("joined as worker 1") == 2
    assert summary["lost_workers"] == [1]
    assert_nothing_late_was_applied(1)


# 6 s are longer than any silence that a machine may keep.
@pytest.mark.parametrize("pause_s", ["1", *thorough("6"), *chaos("0")])
def test_a_machine_that_is_taken_away_leaves_and_loses_nothing(pause_s: str, mark: str) -> None:
    served = Served("--workers", "2", "--sync", "asp")
    stays = served.join("10", "0.05")  # 12 s, so that it can use what the other one has left
    leaves = served.join("10", pause_s)
    await_training(2)
    leaves.terminate()
    left_code, _, left_stderr = output(leaves)
    enough()
    code, _, stderr = output(stays)
    summary = served.summary()

    assert (left_code, code) == (143, 0), left_stderr + stderr
    assert "Traceback" not in left_stderr
    assert summary["faults"] == []
    assert summary["left"] in ([0], [1])
    assert summary["lost_workers"] == []
    assert summary["samples"] == 10 * 96
    times = summary["time_use"][str(summary["left"][0])]  # type: ignore[index]
    assert times["idle_s"] == 0.0
    assert times["absent_s"] > 0.0


@pytest.mark.thorough
def test_a_worker_that_leaves_and_one_that_takes_its_place_are_said(mark: str) -> None:
    served = Served("--workers", "1:2", "--sync", "asp")
    Path("train.py").write_text(ENDLESS_SCRIPT)
    stays = served.join("1000000")
    await_training(1)
    leaves = served.join("1000000")
    await_training(2)
    leaves.send_signal(signal.SIGINT)
    left = output(leaves)
    words = "worker 1 has left: it was asked to leave. The other workers go on without it."
    await_that(lambda: words in served.messages, "the run says that the worker has left")
    again = served.join("1000000")
    await_that(lambda: "worker 1 has joined again" in served.messages, "the run says that it has returned")
    enough()
    ends = [left, output(stays), output(again)]
    served.summary()
    assert [code for code, *_ in ends] == [130, 0, 0], ends


@pytest.mark.chaos
def test_a_machine_that_is_taken_away_while_its_worker_starts_has_left(mark: str) -> None:
    served = Served("--workers", "1:2")
    with Path("leaves.log").open("w") as messages:
        leaves = served.join("10", stderr=messages)
    await_that(lambda: "joined as worker 0" in Path("leaves.log").read_text(), "the machine has joined")
    leaves.terminate()
    leaves.communicate(timeout=60)
    code, _, stderr = output(served.join("10"))
    summary = served.summary()

    assert leaves.returncode == 143
    assert code == 0, stderr
    assert summary["left"] == [0]
    assert summary["lost_workers"] == []
    assert trained() == 1  # otherwise, the signal has come too late for this test


@pytest.mark.thorough
def test_a_machine_is_told_once_that_the_run_failed(mark: str) -> None:
    served = Served("--workers", "1")
    Path("train.py").write_text("import paceline\npaceline.worker_index()\n")
    joined = served.join()
    messages = served.failure()
    code, _, stderr = output(joined)

    assert "the run failed: no worker called step()" in messages
    assert code == 1, stderr
    assert "error: the run failed: no worker called step()" in stderr


@pytest.mark.chaos
def test_a_machine_that_was_not_asked_to_leave_does_not_say_so_when_the_serving_machine_is_lost(
    mark: str,
) -> None:
    served = Served("--workers", "1")
    Path("train.py").write_text(ENDLESS_SCRIPT)
    joined = served.join("1000000", options=["--wait", "0", "--rejoin", "1", "--run-dir", "here"])
    await_training(1)
    served.program.kill()
    served.failure(code=-signal.SIGKILL)
    code, stdout, stderr = output(joined)

    assert code == 1
    assert "the connection to the coordinator was lost: " in stderr
    assert "gave up after 0 s" in stderr
    said = stdout + stderr + Path("here", "worker-0.log").read_text()
    assert "SIGTERM" not in said
    assert "leave" not in said
    assert "Traceback" not in said
