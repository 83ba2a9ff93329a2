"""Who is taken out of a run: machines whose heartbeats are absent for too long, and workers that are stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from paceline.core.liveness import HEARTBEAT_S, LOOK_S, SILENCE_S, Liveness, Removal
from paceline.core.messages import ProcessState
from paceline.sync.ticks import TICKS_PER_S, in_ticks
from tests.support.marks import thorough

PERIOD_TICKS = in_ticks(HEARTBEAT_S)
ITERATION_TICKS = in_ticks(0.1)
ITERATIONS = 100_000
MACHINES = 3

Delay = Callable[[random.Random], float]
"""Draws the time in seconds between the moment at which a heartbeat is due and its arrival."""


def no_delay(draws: random.Random) -> float:
    return 0.0


def jitter(draws: random.Random) -> float:
    """20 % of the time between two heartbeats."""
    return 0.2 * float(HEARTBEAT_S) * draws.random()


def loaded(draws: random.Random) -> float:
    """Jitter, and every hundredth heartbeat is delayed by up to two seconds."""
    return jitter(draws) + (draws.uniform(1.0, 2.0) if draws.random() < 0.01 else 0.0)


def lossy(draws: random.Random) -> float:
    """Jitter, and the retransmissions of a link that loses 5 % of the packets: 0.2 s, 0.4 s, 0.8 s, ..."""
    delay_s, retransmission_s = jitter(draws), 0.2
    while draws.random() < 0.05:
        delay_s += retransmission_s
        retransmission_s *= 2
    return delay_s


def arrivals(delay: Delay, seed: int, until_ticks: int) -> Iterable[int]:
    """Yield the times at which the heartbeats of a machine arrive. A connection keeps their order."""
    draws = random.Random(seed)
    latest_ticks = 0
    for due_ticks in range(PERIOD_TICKS, until_ticks, PERIOD_TICKS):
        latest_ticks = max(latest_ticks, due_ticks + in_ticks(delay(draws)))
        yield latest_ticks


def running(*workers: int, **others: int) -> list[ProcessState]:
    """Return the states of running workers, and of one worker for each other state: `running(1, stopped=2)`."""
    states = [ProcessState("worker", worker, "running") for worker in workers]
    return states + [ProcessState("worker", worker, state) for state, worker in others.items()]  # type: ignore[arg-type]


def cluster(*machines: int) -> Liveness:
    """Return a run in which every machine has one worker, with the same index, whose iterations take 0.1 s."""
    liveness = Liveness()
    for machine in machines:
        liveness.machine_joined(machine, f"10.0.0.{machine}", now_ticks=0)
        liveness.worker_joined(machine)
        liveness.heartbeat(machine, running(machine), 0)
        for _ in range(3):
            liveness.iterated(machine, ITERATION_TICKS)
    return liveness


def proceed(
    liveness: Liveness, machines: Iterable[int], start_s: float, end_s: float
) -> list[tuple[float, Removal]]:
    """Let machines send regular heartbeats; return the verdicts, with their times in seconds."""
    found = []
    for tenths in range(round(start_s * 10), round(end_s * 10)):
        now_ticks = tenths * TICKS_PER_S // 10
        if tenths % 5 == 0:
            for machine in machines:
                liveness.heartbeat(machine, running(machine), now_ticks)
        found += [(tenths / 10, verdict) for verdict in liveness.look(now_ticks)]
    return found


# A machine that is not taken out with more delays is not with those of `jitter`, or with none.
@pytest.mark.parametrize("delay", [*thorough(no_delay, jitter), loaded, lossy])
@pytest.mark.parametrize("seed", [0, *thorough(1, 2)])
def test_no_live_machine_is_taken_out_in_100_000_iterations(delay: Delay, seed: int) -> None:
    """A pause of a training thread does not touch heartbeats, so it only makes iterations longer."""
    draws = random.Random(seed)
    durations = [ITERATION_TICKS * (10 if draws.random() < 0.001 else 1) for _ in range(ITERATIONS)]
    end_ticks = sum(durations)
    liveness = cluster(*range(MACHINES))
    for duration_ticks in durations[:100]:
        liveness.iterated(0, duration_ticks)
    events = sorted(
        (at_ticks, machine)
        for machine in range(MACHINES)
        for at_ticks in arrivals(delay, seed * MACHINES + machine, end_ticks)
    )
    for at_ticks, machine in events:
        # A machine whose time is over at an arrival had been taken out before: looking more often finds no more.
        while (due_ticks := liveness.next_ticks) is not None and due_ticks + PERIOD_TICKS < at_ticks:
            assert liveness.look(due_ticks) == []
        assert liveness.look(at_ticks) == []
        liveness.heartbeat(machine, running(machine), at_ticks)


def test_a_machine_behind_a_link_that_swallows_everything_is_taken_out_within_10_heartbeats() -> None:
    assert in_ticks(SILENCE_S) + in_ticks(LOOK_S) <= 10 * PERIOD_TICKS


def test_a_machine_that_never_sends_a_heartbeat_is_taken_out() -> None:
    liveness = Liveness()
    liveness.machine_joined(1, "spare", now_ticks=0)
    [(at_s, verdict)] = proceed(liveness, [], 0, 20)
    assert verdict.reason == "no heartbeat of machine spare for 4.9 s, although one is due every 0.5 s"
    assert at_s <= 5


def test_a_silent_machine_is_named_once_and_the_others_continue() -> None:
    liveness = cluster(1, 2)
    assert proceed(liveness, [1, 2], 0.5, 60) == []
    reason = "no heartbeat of machine 10.0.0.2 for 4.9 s, although one is due every 0.5 s"
    assert proceed(liveness, [1], 60, 120) == [(64.4, Removal(2, None, reason))]


def test_heartbeats_of_a_machine_that_was_taken_out_count_only_when_it_has_joined_again() -> None:
    liveness = cluster(1, 2)
    assert len(proceed(liveness, [1], 0.5, 10)) == 1
    assert proceed(liveness, [1, 2], 10, 12) == []
    assert 2 not in liveness.states()
    liveness.machine_joined(2, "10.0.0.2", now_ticks=12 * TICKS_PER_S)
    assert proceed(liveness, [1, 2], 12, 20) == []
    assert liveness.states()[2] == "running"


def test_time_in_which_the_coordinator_did_not_run_is_no_silence() -> None:
    """A laptop that was suspended, or Ctrl-Z: on waking, no heartbeat has been read yet."""
    liveness = cluster(1, 2)
    assert proceed(liveness, [1, 2], 0.5, 60) == []
    assert liveness.look(3600 * TICKS_PER_S) == []
    assert proceed(liveness, [1, 2], 3600.5, 3620) == []
    found = proceed(liveness, [1], 3620, 3640)
    assert [verdict.machine for _, verdict in found] == [2]


@pytest.mark.parametrize("pause_s", [0.4, 1.0, 5.0])
def test_a_pause_of_the_coordinator_does_not_depend_on_what_it_handles_first(pause_s: float) -> None:
    for heartbeat_first in (True, False):
        liveness = cluster(1)
        assert proceed(liveness, [1], 0.5, 60) == []
        now_ticks = 60 * TICKS_PER_S + in_ticks(pause_s)
        if heartbeat_first:
            liveness.heartbeat(1, running(1), now_ticks)
            assert liveness.look(now_ticks) == []
        else:
            assert liveness.look(now_ticks) == []
            liveness.heartbeat(1, running(1), now_ticks)
        assert liveness.silences(now_ticks)["10.0.0.1"] <= PERIOD_TICKS


def stop(liveness: Liveness, iteration_ticks: int, state: str = "stopped") -> list[tuple[float, Removal]]:
    """Stop worker 2 after 60 s; return the verdicts of the next minute, with the seconds since then."""
    for worker in (1, 2):
        for _ in range(20):
            liveness.iterated(worker, iteration_ticks)
    assert proceed(liveness, [1, 2], 0.5, 60) == []
    found = []
    for tenths in range(600, 1200):
        now_ticks = tenths * TICKS_PER_S // 10
        if tenths % 5 == 0:
            liveness.heartbeat(1, running(1), now_ticks)
        # The agent looks every tenth of a second, and sends what has changed at once.
        if tenths % 5 == 0 or tenths == 601:
            liveness.heartbeat(2, running(**{state: 2}), now_ticks)
        found += [(tenths / 10 - 60, verdict) for verdict in liveness.look(now_ticks)]
    return found


@pytest.mark.parametrize("iteration_s", [0.01, 0.3, 0.5, 2.0])
def test_a_stopped_worker_is_taken_out_within_a_second_or_3_iterations(iteration_s: float) -> None:
    [(after_s, verdict)] = stop(cluster(1, 2), in_ticks(iteration_s))
    assert (verdict.machine, verdict.worker) == (2, 2)
    assert "the process of worker 2 on machine 10.0.0.2 has been stopped for" in verdict.reason
    assert after_s < max(1.0, 3 * iteration_s)
    assert after_s > 0.6


@pytest.mark.parametrize("state", ["traced", "running"])
def test_a_worker_in_a_debugger_and_a_slow_worker_are_never_taken_out(state: str) -> None:
    assert stop(cluster(1, 2), ITERATION_TICKS, state) == []


def test_a_worker_that_continues_in_time_is_not_taken_out() -> None:
    liveness = cluster(1, 2)
    assert proceed(liveness, [1, 2], 0.5, 60) == []
    liveness.heartbeat(2, running(stopped=2), 60 * TICKS_PER_S)
    assert liveness.look(in_ticks(60.5)) == []
    liveness.heartbeat(2, running(2), in_ticks(60.5))
    liveness.heartbeat(2, running(stopped=2), in_ticks(60.6))  # stopped again: the time begins anew
    assert liveness.look(in_ticks(61.2)) == []


def test_nobody_is_taken_out_while_all_workers_are_stopped() -> None:
    liveness = cluster(1, 2)
    for tenths in range(600):
        now_ticks = tenths * TICKS_PER_S // 10
        for machine in (1, 2):
            liveness.heartbeat(machine, running(stopped=machine), now_ticks)
        assert liveness.look(now_ticks) == []


def test_the_state_of_a_server_leads_to_no_verdict() -> None:
    liveness = cluster(1, 2)
    for tenths in range(600):
        now_ticks = tenths * TICKS_PER_S // 10
        liveness.heartbeat(1, running(1), now_ticks)
        liveness.heartbeat(2, [ProcessState("server", 2, "stopped")], now_ticks)
        assert liveness.look(now_ticks) == []


def test_a_stopped_worker_that_was_taken_out_or_has_left_is_not_named_again() -> None:
    liveness = cluster(1, 2)
    assert len(stop(liveness, ITERATION_TICKS)) == 1
    now_ticks = 120 * TICKS_PER_S
    assert 2 not in liveness.states()
    liveness.worker_joined(2)
    liveness.heartbeat(1, running(1), now_ticks)
    liveness.heartbeat(2, running(stopped=2), now_ticks)
    assert liveness.states()[2] == "stopped"
    liveness.worker_left(2)
    liveness.heartbeat(2, running(stopped=2), now_ticks)
    for tenths in range(20):
        assert liveness.look(now_ticks + tenths * TICKS_PER_S // 10) == []


def test_what_is_reported_about_an_earlier_incarnation_does_not_harm_the_later_one() -> None:
    """The stopped process still exists when another machine uses its index again."""
    liveness = cluster(1, 2, 3)
    liveness.worker_joined(2, incarnation=1)
    for tenths in range(100):
        now_ticks = tenths * TICKS_PER_S // 10
        liveness.heartbeat(1, running(1), now_ticks)
        liveness.heartbeat(3, [ProcessState("worker", 2, "running", incarnation=1)], now_ticks)
        liveness.heartbeat(2, [ProcessState("worker", 2, "stopped")], now_ticks)
        assert liveness.look(now_ticks) == []
        assert liveness.states()[2] == "running"
