"""Whom a run waits for before it trains; what it waits for later is tried on real processes, in test_ends.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.protocol.layout import Layout
from paceline.core.protocol.messages import ShardWaits, Status, Waits
from paceline.core.protocol.model_spec import ModelSpec, OptimizerSpec
from paceline.launcher.live_run.waiting import Waiting
from paceline.runtime import stall
from paceline.runtime.coordinator_host import CoordinatorHost
from paceline.runtime.job_options import make_job


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorHost]:
    """One that has yet to hear of its two workers and its server."""
    coordinator = CoordinatorHost.listen(make_job(workers=2, servers=1, run_dir=tmp_path))
    coordinator.start()
    yield coordinator
    coordinator.stop()


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
    coordinator: CoordinatorHost,
    monkeypatch: pytest.MonkeyPatch,
    started: list[str],
    registered: list[int],
    after_s: float,
    awaited: list[str],
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now_s))
    watch = stall.StallWatch(coordinator, timeout_s=4.0)
    for name in started:
        role, index = name.split()
        coordinator.watch.heard_s[role, int(index)] = now_s
    coordinator.watch.registered_s.update(dict.fromkeys(registered, now_s))

    now_s += after_s
    found = watch.look()

    assert [f"{each.role} {each.index} {each.doing}" for each in found] == awaited
    assert all(each.waiting == tuple(registered) for each in found)


def test_answers_from_before_a_loss_are_no_standstill(
    coordinator: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 waits for worker 0, which is lost. Server 0 has learned it only after three more answers."""
    now_s = 1000.0
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now_s))
    core = coordinator.core
    core.model = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
    watch = stall.StallWatch(coordinator)
    found = []
    both, one = (0, 1), (1,)
    for live, known in [(both, both), (both, both), (one, both), (one, both), (one, one), (one, one)]:
        monkeypatch.setattr(type(core.members), "live", frozenset(live))
        core.board = {worker: Status(1, None, "computing" if worker == 0 else "waiting") for worker in live}
        staleness = tuple((worker, 0) for worker in known)
        core.waits[0] = Waits((ShardWaits(0, "bsp", ((1, 1),), ("round 1",), staleness),), timers=False)
        now_s += 20.0
        watch.look()
        found.append(bool(watch.standstill))

    assert found == [False, False, False, False, False, True]


@pytest.mark.parametrize(("device", "late"), [("cpu", True), ("vulkan:0 (llvmpipe)", False)])
def test_an_accelerator_may_compile_in_any_iteration(
    coordinator: CoordinatorHost, device: str, late: bool
) -> None:
    watch = stall.StallWatch(coordinator)
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
        self._waiting = Waiting(coordinator, engine, timeout_s, self.append)

    def look(self, *awaited: stall.Awaited) -> None:
        watch: Any = SimpleNamespace(look=lambda: list(awaited), standstill="")
        self._waiting._watch = watch
        self._waiting.look()


def silent(*waiting: int) -> stall.Awaited:
    return stall.Awaited("worker", 0, 20.0, "last reported in iteration 8", waiting, 0.5)


@pytest.fixture
def training(coordinator: CoordinatorHost) -> CoordinatorHost:
    coordinator.core.model = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
    return coordinator


def finish(coordinator: CoordinatorHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all workers but worker 0 have finished."""
    monkeypatch.setattr(type(coordinator.core.members), "live", {0})
    monkeypatch.setattr(type(coordinator.core.members), "some_have_finished", True)


def test_a_worker_that_evaluates_when_the_others_have_finished_is_neither_named_nor_killed(
    training: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(training, monkeypatch)
    lines = Lines(training, "is running", timeout_s=10.0)
    lines.look(silent())
    assert (lines, lines.kills) == ([], [])


def test_a_worker_that_is_stopped_when_the_others_have_finished_is_named(
    training: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(training, monkeypatch)
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
    assert ("evaluating the model" in line) == (not waiting)
    assert line.endswith(
        "Run 'kill -KILL 5912' to kill it and let the others continue. In another run, --stall-timeout SECONDS (in "
        "Python, stall_timeout=SECONDS) does so."
    )


def test_a_worker_that_others_wait_for_is_killed_after_the_timeout(training: CoordinatorHost) -> None:
    lines = Lines(training, "is running", timeout_s=10.0)
    lines.look(silent(1))
    assert lines.kills == ["it had sent nothing for 20 s (--stall-timeout)"]
