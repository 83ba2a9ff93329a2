"""Processes whose clocks differ by up to 60 s and 200 ppm decide the same as processes that share a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import paceline.sim.simulated_job
from paceline.core.coordinator import Coordinator
from paceline.core.requests import Request, Timer
from paceline.core.server import Server
from paceline.sim import Cluster, LogNormal, SimResult, Uniform, simulate
from paceline.sync.ticks import TICKS_PER_S, in_ticks
from paceline.trace import Trace, replay

MODELS = (
    "bsp",
    "asp",
    "ssp:staleness=2",
    "dssp:lower=1,upper=5",
    "dsps:lower=1,upper=5",
    "dynamic-pssp:staleness=1",
    "drop-stragglers:quorum=3",
    "naive-waiting:delay_s=0.2",
    "elastic-bsp:lookahead=5",
    "spec-sync",
)
CLUSTER = Cluster(
    compute_s=[
        LogNormal(median=1.0, sigma=0.3),
        LogNormal(median=0.8, sigma=0.2),
        Uniform(low=1.0, high=2.0),
        Uniform(low=2.0, high=3.0),
    ],
    servers=2,
    latency_s=LogNormal(median=0.002, sigma=0.5),
)
DRIFT_PPM = 100


class Clock(msgspec.Struct, frozen=True):
    """A clock that is ahead of the virtual time by `offset_s` at first, and then gains `drift_ppm`."""

    offset_s: int = 0
    drift_ppm: int = 0

    def at(self, true_ticks: int) -> int:
        return true_ticks + in_ticks(self.offset_s) + true_ticks * self.drift_ppm // 1_000_000

    def true(self, own_ticks: int) -> int:
        """Return the virtual time at which this clock shows a time."""
        return (own_ticks - in_ticks(self.offset_s)) * 1_000_000 // (1_000_000 + self.drift_ppm)

    def timers(self, requests: list[Request]) -> list[Request]:
        """Return the requests of a core as the simulation understands them: with timers in virtual time."""
        return [
            msgspec.structs.replace(request, due_ticks=self.true(request.due_ticks))
            if isinstance(request, Timer)
            else request
            for request in requests
        ]


def with_clocks(core: type, clocks: Sequence[Clock]) -> type:
    """Return a subclass of a core whose n-th instance reads the n-th clock."""
    left = list(clocks)

    class Clocked(core):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.clock = left.pop(0)

        def handle(self, sender: Any, message: Any, now_ticks: int) -> list[Request]:
            return self.clock.timers(super().handle(sender, message, self.clock.at(now_ticks)))

        def connected(self, peer: Any, now_ticks: int, *others: Any, **options: Any) -> list[Request]:
            return self.clock.timers(super().connected(peer, self.clock.at(now_ticks), *others, **options))

        def disconnected(self, peer: Any, now_ticks: int) -> list[Request]:
            return self.clock.timers(super().disconnected(peer, self.clock.at(now_ticks)))

        def fire(self, timer: Timer, now_ticks: int) -> list[Request]:
            return self.clock.timers(super().fire(timer, self.clock.at(now_ticks)))

    return Clocked


def run(monkeypatch: pytest.MonkeyPatch, sync: str, *clocks: Clock) -> SimResult:
    """Simulate a run; the clocks are those of the coordinator and of the two servers."""
    coordinator, *servers = clocks
    monkeypatch.setattr(paceline.sim.simulated_job, "Coordinator", with_clocks(Coordinator, [coordinator]))
    monkeypatch.setattr(paceline.sim.simulated_job, "Server", with_clocks(Server, servers))
    return simulate(CLUSTER, sync, iterations=60, seed=1, record=True)


def decisions(trace: Trace) -> list[object]:
    """Return everything in a trace except for the times."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(field) for key, field in value.items() if not key.endswith("_ticks")}
        return [timeless(element) for element in value] if isinstance(value, list) else value

    return [timeless(msgspec.to_builtins(entry)) for entry in trace.entries]


def assert_same_decisions(one: SimResult, other: SimResult) -> None:
    for trace, expected in zip(one.trace, other.trace, strict=True):
        assert decisions(trace) == decisions(expected)
        assert replay(trace) == []
    statistics, usual = map(numbers, (one.measures, other.measures))
    assert statistics.keys() == usual.keys()
    for name, value in statistics.items():
        within = 3e-6 * DRIFT_PPM * abs(usual[name]) + 1e-6
        assert value == pytest.approx(usual[name], abs=within), name


def numbers(measures: object) -> dict[str, float]:
    """Return all numbers in the statistics of a run, among them staleness and waits."""
    found = {}

    def find(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                find(f"{name}.{key}", part)
        elif isinstance(value, list):
            for index, part in enumerate(value):
                find(f"{name}.{index}", part)
        elif isinstance(value, int | float):
            found[name] = value

    find("", msgspec.to_builtins(measures, str_keys=True))
    return found


@pytest.mark.parametrize("sync", MODELS)
def test_offsets_of_30_s_change_nothing(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(monkeypatch, sync, Clock(), Clock(), Clock())
    apart = run(monkeypatch, sync, Clock(7), Clock(30), Clock(-30))

    assert_same_decisions(apart, together)
    assert apart.records == together.records
    for shard, expected in zip(apart.trace[:2], together.trace[:2], strict=True):
        offset_ticks = shard.entries[0].event.now_ticks - expected.entries[0].event.now_ticks
        assert abs(offset_ticks) == 30 * TICKS_PER_S


@pytest.mark.parametrize("sync", MODELS)
def test_drifts_of_100_ppm_change_no_decision(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(monkeypatch, sync, Clock(), Clock(), Clock())
    apart = run(monkeypatch, sync, Clock(7, 50), Clock(30, DRIFT_PPM), Clock(-30, -DRIFT_PPM))

    assert_same_decisions(apart, together)
    for worker, expected in zip(apart.records, together.records, strict=True):
        for record, other in zip(worker, expected, strict=True):
            # Only timers differ, by the drift of the clock that they are set on.
            within_s = DRIFT_PPM * 1e-6 * other.answered_s + 1e-6
            assert record.pushed_s == pytest.approx(other.pushed_s, abs=within_s)
            assert record.answered_s == pytest.approx(other.answered_s, abs=within_s)
