"""Whom a run waits for before it trains; what it waits for later is tried on real processes, in test_ends.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core.layout import Layout
from paceline.core.messages import ShardWaits, Status, Waits
from paceline.core.model_spec import ModelSpec, OptimizerSpec
from paceline.runtime import stall
from paceline.runtime.coordinator import CoordinatorHost
from paceline.runtime.job import make_job


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorHost]:
    """One that has yet to hear of its two workers and its server."""
    coordinator = CoordinatorHost.listen(make_job(workers=2, servers=1, run_dir=tmp_path))
    coordinator.start()
    yield coordinator
    coordinator.stop(grace_s=0.0)


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
        coordinator.heard_s[role, int(index)] = now_s
    coordinator.registered_s.update(dict.fromkeys(registered, now_s))

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
