"""How a run that has lost a server is placed on the machines that are left, without processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from paceline.checkpoints.reading import NewestCheckpoint
from paceline.core.coordinator import Coordinator
from paceline.core.job_cut import JobCut
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.requests import Fail
from paceline.errors import RunFailedError
from paceline.run.agents import MachinesLeft
from paceline.run.job import ResumedFrom
from paceline.run.job_options import make_job
from paceline.run.resuming import resumed_with
from paceline.start import run as vacancies
from paceline.start.join import Agent
from paceline.start.local import HostMachine, LocalEngine, ProcessPlacement
from paceline.start.processes.interruption import Interruption
from paceline.start.run import RestartPolicy, ShortageWatch, is_loss, on_machines
from paceline.start.terminal import Channel
from paceline.sync.schedule import read_schedule

JOB = make_job(workers=4, servers=4, remote_servers=2, joined=True, dry_run=True)


@pytest.mark.parametrize(
    ("workers", "servers", "least", "remote"),
    [(4, 2, 4, 2), (4, 1, 4, 1), (2, 0, 2, 0), (0, 0, 1, 0), (8, 3, 4, 2)],
)
def test_the_machines_that_are_left_bring_what_they_had(
    workers: int, servers: int, least: int, remote: int
) -> None:
    job = on_machines(JOB, MachinesLeft(workers, servers))
    assert (job.least, job.remote_servers, job.local_servers) == (least, remote, 4 - remote)


def test_a_run_on_one_machine_stays_as_it_is() -> None:
    job = make_job(workers=2, servers=2, dry_run=True)
    assert on_machines(job, MachinesLeft(0, 0)) == job


def test_a_run_with_a_minimum_keeps_it() -> None:
    job = on_machines(structs.replace(JOB, pause_below=3), MachinesLeft(workers=1, servers=2))
    assert job.least == 3


def test_a_server_that_fails_with_an_exception_of_its_own_is_no_loss() -> None:
    assert is_loss(RunFailedError("server 1", "it was terminated by signal SIGKILL"))
    assert not is_loss(RunFailedError("server 1", "ValueError", "Traceback ..."))
    assert not is_loss(RunFailedError("worker 1", "it was terminated by signal SIGKILL"))


def newest(number: int) -> NewestCheckpoint:
    checkpoint: Any = SimpleNamespace(path=Path(f"/checkpoints/{number:06d}"))
    return NewestCheckpoint(checkpoint, ())


@pytest.mark.parametrize("begun", [None, resumed_with(newest(1))])
def test_a_run_goes_on_three_times_from_the_same_checkpoint(begun: ResumedFrom | None) -> None:
    job, policy = structs.replace(JOB, resumed=begun), RestartPolicy()
    for number in (1, 2):
        for _ in range(3):
            resumed = policy.resumed(job, newest(number))
            assert resumed is not None
            job = policy.next(job, resumed)
        assert policy.resumed(job, newest(number)) is None


def test_further_servers_are_on_the_machine_of_the_first() -> None:
    placement = ProcessPlacement("10.0.0.1", (HostMachine("10.0.0.1"),), ())
    assert placement.for_servers(3).servers == (HostMachine("10.0.0.1"),) * 3
    assert placement.for_servers(1) == placement


def lost_by(coordinator: Coordinator) -> list[Any]:
    coordinator.servers.invite(1)
    return coordinator.server_lost(1, "its connection ended", certain=True)


def test_the_log_of_a_worker_is_continued_in_its_next_life(tmp_path: Path) -> None:
    (tmp_path / "worker-1.log").write_text("the earlier life\n")
    continued: dict[str, bool] = {}

    def start(*arguments: object) -> None:
        raise OSError

    def open_log(name: str, log: Path, *, append: bool) -> Channel:
        continued[name] = append
        stream = os.open(os.devnull, os.O_RDWR)
        return Channel(stream, os.dup(stream), lambda: None, lambda: None)

    starter: Any = SimpleNamespace(start=start)
    channels: Any = SimpleNamespace(open=open_log)
    job = structs.replace(JOB, run_dir=str(tmp_path))
    engine = LocalEngine(job, "tls:127.0.0.1:1", starter, channels, lambda worker, how: None)
    for worker in (0, 1):
        with pytest.raises(OSError):  # noqa: PT011 - of `start`
            engine.start("worker", worker, HostMachine(), b"")
    assert continued == {"worker 0": False, "worker 1": True}


def test_ctrl_z_stops_a_machine_with_its_processes_and_any_other_program_alone() -> None:
    before = signal.getsignal(signal.SIGTSTP)
    with Interruption():
        assert signal.getsignal(signal.SIGTSTP) == before
    done: list[object] = []
    interruption = SimpleNamespace(suspend=lambda: done.append("suspended"))
    process = SimpleNamespace(signal=done.append)
    agent: Any = SimpleNamespace(_engine=SimpleNamespace(processes=[process]), _interruption=interruption)
    Agent._suspend(agent)
    assert done == [signal.SIGSTOP, "suspended", signal.SIGCONT]


def test_a_run_that_resumes_does_not_wait_for_another_machine_to_bring_a_server_that_is_lost() -> None:
    layout = Layout.of([Parameter(("weight",), (4,), "float32")])
    model = ModelSpec(layout, OptimizerSpec("SGD", ({"lr": 0.1},), (0,)), ())
    cut = JobCut(number=1, elapsed_s=1.0, seed=7, sync="bsp", model=model)
    begins, resumes = (
        Coordinator(
            read_schedule("bsp"), workers=1, servers=2, shards=2, late={0}, late_servers=[1], resumed=resumed
        )
        for resumed in (None, cut)
    )
    assert (lost_by(begins), begins.servers.vacant) == ([], {1})
    assert (lost_by(resumes), resumes.servers.vacant) == (
        [Fail("server 1", "its connection ended", "")],
        set(),
    )


@pytest.mark.parametrize(
    ("again", "vacant", "timeout_s", "lost"),
    [(True, {1, 2}, 0.0, True), (True, {1}, 1e6, False), (True, set(), 0.0, False), (False, {1}, 0.0, False)],
)
def test_a_machine_that_does_not_join_again_in_time_has_lost_its_servers(
    monkeypatch: pytest.MonkeyPatch, *, again: bool, vacant: set[int], timeout_s: float, lost: bool
) -> None:
    monkeypatch.setattr(vacancies, "RETURN_TIMEOUT_S", timeout_s)
    coordinator: Any = SimpleNamespace(report=SimpleNamespace(vacant=tuple(vacant)))
    failure = ShortageWatch(coordinator, None, print, again=again).unreturned_server()
    assert (failure is not None) == lost
    assert failure is None or failure.process == "server 1"
