"""The offsets of the machines' clocks: the stated bound holds for all delays, and timelines agree within it."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.liveness import ClockEstimate, OffsetBounds
from paceline.core.messages import ClockOffset
from paceline.errors import ConfigurationError
from paceline.sync.ticks import TICKS_PER_S, in_ticks
from paceline.trace import Header, read
from paceline.trace.clocks import ClockRecorder, MachineClock, clock_of, read_clocks

PPB = 1_000_000_000
IDLE_MS = 1.0  # largest permitted bound on an idle link


class Clock(msgspec.Struct, frozen=True):
    """A clock that is ahead of the true time by `offset_s` at first, and then gains `drift_ppm`."""

    offset_s: float
    drift_ppm: int

    def at(self, true_ticks: int) -> int:
        return true_ticks + in_ticks(self.offset_s) + true_ticks * self.drift_ppm // 1_000_000


def exchange(
    estimate: ClockEstimate, own: Clock, coordinator: Clock, times: tuple[int, int, int, int]
) -> None:
    """Carry out an exchange whose messages are sent and received at these true times."""
    estimate.exchanged(own.at(times[0]), coordinator.at(times[1]), coordinator.at(times[2]), own.at(times[3]))


clocks = st.builds(Clock, st.floats(-30, 30), st.integers(-100, 100))
delays = st.integers(0, 2 * TICKS_PER_S)
exchanges = st.lists(
    st.tuples(st.integers(0, 60 * TICKS_PER_S), delays, delays, delays), min_size=1, max_size=12
)


@given(clocks, clocks, exchanges)
def test_the_error_is_at_most_the_bound_for_all_delays(
    own: Clock, coordinator: Clock, each: list[tuple[int, int, int, int]]
) -> None:
    estimate = ClockEstimate()
    now_ticks = 0
    for pause_ticks, there_ticks, between_ticks, back_ticks in each:
        sent = now_ticks + pause_ticks
        received = sent + there_ticks
        answered = received + between_ticks
        now_ticks = answered + back_ticks
        exchange(estimate, own, coordinator, (sent, received, answered, now_ticks))
        assert estimate.bounds is not None
        true_ticks = coordinator.at(now_ticks) - own.at(now_ticks)
        assert abs(estimate.bounds.offset_ticks - true_ticks) <= estimate.bounds.bound_ticks + 2
        # 2 ticks: the clocks of this test round down
        half_trip_ticks = (there_ticks + back_ticks) // 2
        slack_ticks = (now_ticks - sent) // 1000
        assert estimate.bounds.bound_ticks <= half_trip_ticks + slack_ticks + 2


@given(st.integers(0, TICKS_PER_S), st.integers(0, TICKS_PER_S))
def test_the_bound_is_half_the_round_trip_and_is_reached_by_the_most_asymmetric_delays(
    there: int, back: int
) -> None:
    bounds = OffsetBounds.exchanged(0, there, there, there + back)
    assert 0 <= bounds.bound_ticks - (there + back) / 2 <= 2 + (there + back) / 2000
    assert bounds.least_ticks == -back
    assert there <= bounds.most_ticks <= there + 2 + (there + back) // 1000


def simulated(
    own: Clock, coordinator: Clock, seed: int, seconds: int
) -> tuple[ClockEstimate, list[ClockOffset]]:
    """Exchange a message every half second over an idle link; return all estimates."""
    draws = random.Random(seed)
    estimate = ClockEstimate()
    stated = []
    for number in range(2 * seconds):
        sent = number * TICKS_PER_S // 2
        received = sent + draws.randrange(100_000, 250_000)
        answered = received + draws.randrange(20_000, 5_000_000)
        arrived = answered + draws.randrange(100_000, 250_000)
        exchange(estimate, own, coordinator, (sent, received, answered, arrived))
        assert estimate.stated is not None
        stated.append(estimate.stated)
    return estimate, stated


@pytest.mark.parametrize("offset_s", [-30.0, 0.0, 30.0])
@pytest.mark.parametrize("drift_ppm", [-100, 0, 100])
def test_timelines_agree_within_the_bound_and_1_ms_on_an_idle_link(
    offset_s: float, drift_ppm: int, tmp_path: Path
) -> None:
    own, coordinator = Clock(offset_s, drift_ppm), Clock(3.0, -drift_ppm)
    _, stated = simulated(own, coordinator, 1, 120)
    recorder = ClockRecorder((tmp_path / "clock-1.jsonl").open("wb"))
    for offset in stated:
        recorder.record(offset)
    recorder.close()
    clock = read_clocks(tmp_path)[1]
    assert len((tmp_path / "clock-1.jsonl").read_bytes().splitlines()) == pytest.approx(120, abs=2)
    for true_ticks in range(TICKS_PER_S, 118 * TICKS_PER_S, TICKS_PER_S // 7):
        moment = clock.on_coordinator(own.at(true_ticks))
        assert abs(moment.ticks - coordinator.at(true_ticks)) <= moment.bound_ticks
        assert moment.bound_ticks <= in_ticks(IDLE_MS / 1000)


def test_two_machines_agree_on_the_order_of_events_beyond_their_bounds() -> None:
    """Events that alternate between three machines every 3 ms are shown in this order."""
    coordinator = Clock(0.0, 0)
    machines = {0: coordinator, 1: Clock(-30.0, 100), 2: Clock(30.0, -100)}
    offsets = {0: MachineClock()} | {
        machine: MachineClock(simulated(clock, coordinator, machine, 60)[1])
        for machine, clock in machines.items()
        if machine
    }
    shown = []
    for number in range(3000):
        machine = number % 3
        at_ticks = TICKS_PER_S + number * 3 * TICKS_PER_S // 1000
        shown.append(clock_of(machine, offsets).on_coordinator(machines[machine].at(at_ticks)))
    assert shown == sorted(shown)


def test_the_drift_is_estimated() -> None:
    estimate, _ = simulated(Clock(30.0, 100), Clock(0.0, -100), 3, 60)
    assert estimate.drift_ppb == pytest.approx(-200_000, abs=10_000)


def test_the_drift_is_unknown_at_first() -> None:
    estimate = ClockEstimate()
    assert (estimate.bounds, estimate.drift_ppb, estimate.stated) == (None, None, None)
    estimate, _ = simulated(Clock(0.0, 100), Clock(0.0, 0), 3, 2)
    assert estimate.drift_ppb is None


def test_a_slow_exchange_does_not_widen_the_bound() -> None:
    estimate, _ = simulated(Clock(0.0, 0), Clock(0.0, 0), 3, 10)
    assert estimate.bounds is not None
    before_ticks = estimate.bounds.bound_ticks
    now_ticks = 10 * TICKS_PER_S
    estimate.exchanged(
        now_ticks, now_ticks + TICKS_PER_S, now_ticks + TICKS_PER_S, now_ticks + 3 * TICKS_PER_S
    )
    assert estimate.bounds.bound_ticks < before_ticks + in_ticks(0.003)


@pytest.mark.parametrize("jump_s", [-3600, -1, 1, 3600])
def test_a_clock_that_jumps_makes_the_estimate_begin_anew(jump_s: int) -> None:
    estimate, _ = simulated(Clock(0.0, 0), Clock(0.0, 0), 3, 10)
    own, coordinator = Clock(0.0, 0), Clock(jump_s, 0)
    times = (20 * TICKS_PER_S, 20 * TICKS_PER_S + 100, 20 * TICKS_PER_S + 200, 20 * TICKS_PER_S + 300)
    exchange(estimate, own, coordinator, times)
    assert estimate.bounds is not None
    assert abs(estimate.bounds.offset_ticks - jump_s * TICKS_PER_S) <= estimate.bounds.bound_ticks
    assert estimate.bounds.bound_ticks < 200
    assert estimate.drift_ppb is None


def test_an_exchange_that_contradicts_itself_has_no_effect() -> None:
    estimate = ClockEstimate()
    estimate.exchanged(100, 50, 40, 200)
    estimate.exchanged(200, 50, 50, 100)
    estimate.exchanged(0, 0, 1000, 10)
    assert estimate.bounds is None


def test_between_two_records_with_a_jump_the_bound_covers_both() -> None:
    clock = MachineClock([ClockOffset(0, 0, 10), ClockOffset(1000, 10**9, 10)])
    moment = clock.on_coordinator(500)
    assert moment.ticks - moment.bound_ticks <= 500 - 10
    assert moment.ticks + moment.bound_ticks >= 500 + 10**9 + 10


def test_a_trace_of_one_machine_is_written_as_before_and_names_machine_0(tmp_path: Path) -> None:
    header = msgspec.json.encode(Header(sync="asp", host="shard"))
    assert b"machine" not in header
    (tmp_path / "trace.jsonl").write_bytes(header + b"\n")
    assert read(tmp_path / "trace.jsonl").machine == 0
    (tmp_path / "other.jsonl").write_bytes(
        msgspec.json.encode(Header(sync="asp", host="shard", machine=2)) + b"\n"
    )
    assert read(tmp_path / "other.jsonl").machine == 2


def test_a_run_on_one_machine_has_no_offsets_and_a_missing_file_is_named(tmp_path: Path) -> None:
    assert read_clocks(tmp_path).keys() == {0}
    with pytest.raises(ConfigurationError, match=r"no file clock-2\.jsonl"):
        clock_of(2, read_clocks(tmp_path))
    (tmp_path / "clock-2.jsonl").write_bytes(b'{"at_ticks":1}\n')
    with pytest.raises(ConfigurationError, match="does not contain the offsets"):
        read_clocks(tmp_path)


def test_an_unfinished_last_line_is_ignored(tmp_path: Path) -> None:
    line = msgspec.json.encode(ClockOffset(5, 7, 1))
    (tmp_path / "clock-3.jsonl").write_bytes(line + b"\n" + line[:10])
    assert read_clocks(tmp_path)[3].on_coordinator(5).ticks == 12
