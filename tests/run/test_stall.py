"""Whom a run waits for, and since when; a few of these cases are also tried on real processes, in test_ends.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from paceline.core.layout import Layout, ModelSpec, OptimizerSpec
from paceline.core.messages import Contributed, ShardWaits, Status, Waits
from paceline.run import agents as job_watch
from paceline.run.agents import AwaitedProcess, StallWatch
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job_options import make_job
from paceline.start import run as vacancies
from paceline.start import waiting
from paceline.start.run import ShortageWatch
from paceline.start.waiting import Waiting


class Now:
    """The time that the launcher and the coordinator's host read. A run looks often while it passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        for module in (job_watch, waiting, vacancies):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.s

    def passes(self, seconds: float, *looks: Callable[[], object]) -> list[Any]:
        """Let this time pass. Return what the last looks have returned."""
        found: list[Any] = []
        for _ in range(round(2 * seconds)):
            self.s += 0.5
            found = [look() for look in looks]
        return found


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorHost]:
    """One that has yet to hear of its two workers and its server, which have just been started."""
    coordinator = CoordinatorHost.listen(make_job(workers=2, servers=1, run_dir=tmp_path))
    for role, index in [("server", 0), ("worker", 0), ("worker", 1)]:
        coordinator.watch.expect(role, index)
    yield coordinator
    end(coordinator)


def end(coordinator: CoordinatorHost) -> None:
    """End a coordinator whose thread was not started."""
    coordinator._stopping = True
    coordinator._run()


@pytest.mark.parametrize(
    ("started", "registered", "after_s", "awaited"),
    [
        ([], [], 50.0, []),
        (
            [],
            [],
            61.0,
            ["worker 0 has not started yet", "worker 1 has not started yet", "server 0 has not started yet"],
        ),
        (["worker 0"], [], 3.0, []),
        (["worker 0"], [], 5.0, ["worker 1 has not started yet", "server 0 has not started yet"]),
        (["worker 0", "worker 1"], [], 5.0, ["server 0 has not started yet"]),
        (["worker 0", "server 0"], [0], 5.0, ["worker 1 has not started yet"]),
        (["worker 0", "worker 1", "server 0"], [], 50.0, []),
        (["worker 0", "worker 1", "server 0"], [0], 5.0, ["worker 1 has not begun to train yet"]),
        (
            ["worker 0", "worker 1", "server 0"],
            [],
            61.0,
            [
                "worker 0 has not begun to train yet",
                "worker 1 has not begun to train yet",
            ],
        ),
    ],
)
def test_who_is_awaited_before_training(
    now: Now,
    coordinator: CoordinatorHost,
    started: list[str],
    registered: list[int],
    after_s: float,
    awaited: list[str],
) -> None:
    job = structs.replace(coordinator.job, stall_timeout_s=4.0)
    watch = StallWatch(job, coordinator.core, coordinator.watch, coordinator.asked, lambda: None)
    for name in started:
        role, index = name.split()
        coordinator.watch.heard(role, int(index))
    for worker in registered:
        coordinator.watch.prepared(worker)

    now.passes(after_s, watch.look)

    assert [f"{each.role} {each.index} {each.doing}" for each in watch.awaited] == awaited
    assert all(each.waiting == tuple(registered) for each in watch.awaited)


def test_answers_from_before_a_loss_are_no_standstill(
    now: Now, coordinator: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 waits for worker 0, which is lost. Server 0 has learned it only after three more answers."""
    core = coordinator.core
    core.model = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
    watch = StallWatch(coordinator.job, core, coordinator.watch, coordinator.asked, core.waits.clear)
    found = []
    both, one = (0, 1), (1,)
    for live, known in [(both, both), (both, both), (one, both), (one, both), (one, one), (one, one)]:
        monkeypatch.setattr(type(core.members), "live", frozenset(live))
        core.board = {worker: Status(1, None, "computing" if worker == 0 else "waiting") for worker in live}
        staleness = tuple((worker, 0) for worker in known)
        core.waits[0] = Waits((ShardWaits(0, "bsp", ((1, 1),), ("round 1",), staleness),), timers=False)
        now.passes(1.5)
        watch.look()
        found.append(bool(watch.standstill))

    assert found == [False, False, False, False, False, True]


@pytest.mark.parametrize(("device", "late"), [("cpu", True), ("vulkan:0 (llvmpipe)", False)])
def test_an_accelerator_may_compile_in_any_iteration(
    coordinator: CoordinatorHost, device: str, late: bool
) -> None:
    watch = coordinator.stalls
    coordinator.watch.devices[0] = device
    coordinator.watch.usual_s[0] = 0.1
    assert (watch._patience_s(0) < 10.0) == late
    coordinator.watch.usual_s[0] = 60.0
    assert watch._patience_s(0) == 300.0


class Lines(list[str]):
    """What was said about a silent worker, and what was done to its process."""

    def __init__(self, coordinator: CoordinatorHost, state: str, timeout_s: float | None = None) -> None:
        super().__init__()
        self.kills: list[str] = []
        process = SimpleNamespace(id=5912, state=state, kill=self.kills.append)
        engine: Any = SimpleNamespace(process=lambda role, index: process)
        self._coordinator = coordinator
        self._waiting = Waiting(coordinator, engine, timeout_s, self.append)

    def look(self, *awaited: AwaitedProcess) -> None:
        self._coordinator.stalls.awaited = awaited
        self._coordinator._publish()
        self._waiting.look()


def silent(*waiting: int) -> AwaitedProcess:
    return AwaitedProcess("worker", 0, 20.0, "last reported in iteration 8", waiting, 0.5)


@pytest.fixture
def training(coordinator: CoordinatorHost) -> CoordinatorHost:
    coordinator.core.model = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
    return coordinator


def finish(coordinator: CoordinatorHost) -> None:
    """Let all workers but worker 0 have finished."""
    coordinator.core.members.leave(1, "finished")


def test_a_worker_that_evaluates_when_the_others_have_finished_is_neither_named_nor_killed(
    training: CoordinatorHost,
) -> None:
    finish(training)
    lines = Lines(training, "is running", timeout_s=10.0)
    lines.look(silent())
    assert (lines, lines.kills) == ([], [])


def test_a_worker_that_is_stopped_when_the_others_have_finished_is_named(
    training: CoordinatorHost,
) -> None:
    finish(training)
    lines = Lines(training, "is stopped")
    lines.look(silent())
    [line] = lines
    assert "No other worker is waiting for it." in line
    assert "Run 'kill -CONT 5912' to resume the process." in line
    assert "Run 'kill -KILL 5912' to kill it and end the run." in line


@pytest.mark.parametrize("waiting", [(), (1,)])
def test_who_waits_is_said_and_what_a_kill_leads_to(
    training: CoordinatorHost, waiting: tuple[int, ...]
) -> None:
    lines = Lines(training, "is running")
    lines.look(silent(*waiting))
    [line] = lines
    assert line.startswith(
        "The run is waiting for worker 0" if waiting else "Worker 0 has sent nothing for 20 s"
    )
    assert line.count("The script of worker 0 may do something other than training, such as evaluating ") == 1
    assert line.endswith(
        "Run 'kill -KILL 5912' to kill it and let the others continue. In a later run, --stall-timeout SECONDS (in "
        "Python, stall_timeout=SECONDS) does so."
    )


def test_nobody_is_told_to_kill_a_worker_whose_script_has_not_begun_to_train(
    coordinator: CoordinatorHost,
) -> None:
    lines = Lines(coordinator, "is running")
    lines.look(silent(1))
    [line] = lines
    assert "The script of worker 0 may still import libraries or load data." in line
    assert "kill" not in line
    stopped = Lines(coordinator, "is stopped")
    stopped.look(silent(1))
    assert "Run 'kill -KILL 5912'" in stopped[0]


def test_a_stopped_worker_that_others_wait_for_is_not_said_to_evaluate(training: CoordinatorHost) -> None:
    lines = Lines(training, "is stopped")
    lines.look(silent(1))
    assert "evaluating the model" not in lines[0]


def test_a_worker_that_others_wait_for_is_killed_after_the_timeout(training: CoordinatorHost) -> None:
    lines = Lines(training, "is running", timeout_s=10.0)
    lines.look(silent(1))
    assert lines.kills == ["it had sent nothing for 20 s (--stall-timeout)"]


# -- each clock begins when its subject arrives --------------------------------------------------------------


class Served:
    """A run that machines join, with the launcher's watchdogs, in virtual time and without processes."""

    def __init__(
        self, now: Now, coordinator: CoordinatorHost, *, timeout_s: float | None, wait_s: float
    ) -> None:
        self.core, self.watch, self.coordinator = coordinator.core, coordinator.watch, coordinator
        self.lines: list[str] = []
        self.kills: list[str] = []
        self.now = now
        engine: Any = SimpleNamespace(process=lambda role, index: None)
        coordinator.agents.kill = lambda role, index, why: self.kills.append(f"{role} {index}")  # type: ignore[method-assign]
        coordinator.call = lambda function, *given, **options: function(*given, **options)  # type: ignore[method-assign]
        coordinator.stalls._ask = lambda: None
        self._waiting = Waiting(coordinator, engine, timeout_s, self.lines.append)
        self._shortage = ShortageWatch(coordinator, wait_s, self.lines.append)
        for server in range(coordinator.job.local_servers):
            self.watch.expect("server", server)

    def passes(self, seconds: float) -> str:
        """Let this time pass. Return why the run must end, or ""."""
        standstill, ends = self.now.passes(seconds, self.look, self._shortage.look)
        return str(standstill or ends)

    def look(self) -> str:
        """Look for stalls, as the coordinator and the launcher do in turn."""
        self.coordinator.stalls.look()
        self.coordinator._publish()
        return self._waiting.look()

    def machine_joins(self, workers: int, servers: int = 0) -> list[int]:
        """Do what happens when a machine is admitted, except that no heartbeats are expected of it."""
        machines = self.coordinator.machines
        agent = machines.add()
        machines.names[agent] = machines.hosts[agent] = f"10.0.0.{agent}"
        for server in self.core.servers.invite(servers):
            self.watch.expect("server", server)
        invited = self.core.invite(workers)
        machines.workers[agent].update(invited)
        for worker in invited:
            self.watch.expect("worker", worker)
        return sorted(invited)

    def trains(self, *workers: int) -> None:
        """Let the run train with these workers. No server has anything to say of them."""
        self.core.model = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
        self.core.waits[0] = Waits((), timers=False)
        self.core.members.present.update(workers)
        self.core.started = True
        for worker in workers:
            self.watch.heard("worker", worker)
            self.watch.prepared(worker)
            self.reports(worker, 1)

    def reports(self, worker: int, iteration: int) -> None:
        status = Status(iteration, None, "computing")
        self.watch.heard("worker", worker)
        self.core.board[worker] = status
        self.watch.note_pace(worker, status)

    def waits(self, *workers: int) -> None:
        """Let the servers say that these workers wait."""
        pulls = tuple((worker, 2) for worker in workers)
        live = tuple((worker, 0) for worker in sorted(self.core.members.live))
        shard = ShardWaits(0, "bsp", pulls, tuple("round 2" for _ in pulls), live)
        self.core.waits[0] = Waits((shard,), timers=False)


@pytest.fixture
def served(now: Now, tmp_path: Path) -> Iterator[Served]:
    """A run with 2 to 4 workers and one server, which kills what others have waited for for 20 s."""
    job = make_job(
        workers=4, least=2, pause_below=2, servers=1, joined=True, transport="tcp", run_dir=tmp_path
    )
    coordinator = CoordinatorHost.listen(job)
    run = Served(now, coordinator, timeout_s=20.0, wait_s=600.0)
    run.watch.heard("server", 0)
    yield run
    end(coordinator)


def test_a_machine_that_joins_later_is_not_silent_since_the_start_of_the_run(served: Served) -> None:
    served.passes(88.0)
    served.machine_joins(2)
    assert (served.passes(19.0), served.lines, served.kills) == ("", [], [])
    # The processes of this machine have never sent anything, and this is still noticed.
    served.passes(42.0)
    assert served.lines[0].startswith("The run is waiting for worker 0, which has sent nothing for 60 s.")
    assert served.kills[:2] == ["worker 0", "worker 1"]


def test_a_worker_that_joins_later_has_as_much_time_to_prepare_as_the_first(served: Served) -> None:
    served.machine_joins(1)
    served.watch.heard("worker", 0)
    served.passes(30.0)
    served.watch.prepared(0)  # it has waited for data until the other worker came
    served.passes(60.0)
    served.machine_joins(1)
    served.watch.heard("worker", 1)
    served.passes(44.0)
    assert (served.lines, served.kills) == ([], [])


def test_a_worker_that_gets_no_data_before_others_join_is_not_silent(served: Served) -> None:
    served.machine_joins(1)
    served.watch.heard("worker", 0)
    served.passes(120.0)
    assert (served.lines, served.kills) == ([], [])


def test_a_pause_is_no_silence_and_no_part_of_an_iteration(served: Served) -> None:
    served.trains(*served.machine_joins(3))
    for iteration in range(2, 8):
        served.now.passes(1.0, served.look)
        for worker in (0, 1, 2):
            served.reports(worker, iteration)
    for worker in (1, 2):
        served.watch.left("worker", worker)
        served.core.members.leave(worker, "lost")
    served.core.quorum.pause_or_resume()
    assert served.core.quorum.paused
    served.passes(120.0)
    served.core.members.present.update(served.machine_joins(1))
    served.core.members.admit(3)
    served.core.members.present.add(3)
    served.core.quorum.pause_or_resume()
    assert not served.core.quorum.paused
    served.watch.heard("worker", 3)
    served.waits(3)
    served.passes(2.0)
    served.reports(0, 8)
    assert served.watch.usual_s[0] < 1.5
    assert (served.kills, [line for line in served.lines if "has sent nothing" in line]) == ([], [])


def test_a_worker_that_has_waited_in_a_call_of_all_workers_is_not_silent_after_it(served: Served) -> None:
    served.trains(*served.machine_joins(2))
    served.core.collectives.waiting[1] = Contributed("barrier", 1)
    for iteration in range(2, 62):
        served.passes(1.0)
        served.reports(0, iteration)
    served.core.collectives.waiting.clear()
    served.waits(0)
    served.passes(2.5)
    assert (served.lines, served.kills) == ([], [])


def test_a_worker_whose_pull_was_delayed_for_long_is_not_silent_after_it(served: Served) -> None:
    served.trains(*served.machine_joins(2))
    served.waits(1)
    for iteration in range(2, 62):
        served.passes(1.0)
        served.reports(0, iteration)
    served.waits(0)  # worker 1 has been answered, and its report that it computes is on the way
    served.passes(2.5)
    assert served.kills == []
    served.passes(20.0)
    assert served.kills[:1] == ["worker 1"]


def test_a_worker_that_has_yet_to_join_a_superstep_is_not_silent(served: Served) -> None:
    served.trains(*served.machine_joins(2))
    [late] = served.machine_joins(1)
    served.core.members.admit(late)
    served.core.reconfigurations.joining.append(late)
    served.watch.heard("worker", late)
    for iteration in range(2, 62):
        served.passes(1.0)
        served.waits(1)
        served.reports(0, iteration)
    assert (served.lines, served.kills) == ([], [])


def test_a_worker_that_joins_in_the_place_of_a_silent_one_does_not_respond_again(served: Served) -> None:
    served.trains(*served.machine_joins(3))
    for iteration in range(2, 20):
        served.passes(1.0)
        served.reports(0, iteration)
        served.waits(0)
    assert any("worker 1, which has sent nothing" in line for line in served.lines)
    served.lines.clear()
    served.watch.left("worker", 1)
    served.core.members.leave(1, "lost")
    served.core.members.invite(1, [1])
    served.watch.expect("worker", 1)
    served.core.members.admit(1)
    served.watch.heard("worker", 1)
    served.passes(0.5)
    assert not [line for line in served.lines if "responds again" in line]


def test_a_server_that_another_machine_brings_is_not_asked_since_the_first_was(
    now: Now, tmp_path: Path
) -> None:
    job = make_job(
        workers=1,
        servers=2,
        remote_servers=1,
        joined=True,
        transport="tcp",
        run_dir=tmp_path,
        stall_timeout=20.0,
    )
    coordinator = CoordinatorHost.listen(job)
    run = Served(now, coordinator, timeout_s=20.0, wait_s=600.0)
    run.watch.heard("server", 0)
    run.machine_joins(0, servers=1)
    peer: Any = SimpleNamespace(role="server", index=1, stream=None)
    coordinator.asked.add(1)
    run.watch.clocks.begin(("asked", "server", 1), now.s)
    run.watch.heard("server", 1)
    run.passes(10.0)
    coordinator.agents.lose_server = lambda *arguments: None  # type: ignore[method-assign]
    coordinator.gone(peer, "its connection ended")  # and its machine leaves, before the run has begun
    run.core.servers.release(1)
    run.passes(90.0)
    assert coordinator.asked == set()
    run.trains(*run.machine_joins(1, servers=1))
    run.watch.heard("server", 1)
    run.core.waits[1] = Waits((), timers=False)
    run.passes(2.0)
    assert (run.kills, [line for line in run.lines if "server 1" in line]) == ([], [])
    end(coordinator)


def test_time_in_which_the_launcher_is_suspended_counts_neither_as_silence_nor_as_a_shortage(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    vacancies_ = ShortageWatch(served.coordinator, 60.0, served.lines.append)
    vacancies_.look()
    served.now.s += 3600.0
    assert vacancies_.look() == ""
    served.trains(*served.machine_joins(2))
    served.passes(1.0)
    served.now.s += 3600.0
    served.waits(1)
    served.look()
    assert (served.lines, served.kills) == ([], [])


def test_only_the_wait_for_machines_is_about_the_run(served: Served) -> None:
    assert served.passes(599.0) == ""
    assert "no machine has joined it within 600 s (--wait)" in served.passes(2.0)


def test_a_shortage_is_as_old_as_itself_and_not_as_the_run(served: Served) -> None:
    served.passes(500.0)
    served.trains(*served.machine_joins(2))
    for iteration in range(2, 202):
        served.passes(1.0)
        served.reports(0, iteration)
        served.reports(1, iteration)
    served.core.members.leave(1, "lost")
    served.core.quorum.pause_or_resume()
    assert served.passes(599.0) == ""
    assert "has waited for 600 s (--wait)" in served.passes(2.0)


def test_a_machine_joins_a_run_that_goes_on_again_within_its_own_time(now: Now, served: Served) -> None:
    served.core.servers.vacant.add(0)
    served.coordinator._publish()
    again = ShortageWatch(served.coordinator, None, served.lines.append, again=True)
    now.passes(59.0, again.look)
    assert again.unreturned_server() is None
    now.passes(2.0, again.look)
    assert again.unreturned_server() is not None
