"""An agent and a coordinator that exchange heartbeats, in virtual time, with clocks that disagree."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from paceline.core.liveness import Heartbeats, Liveness, Removal, answer
from paceline.core.messages import MOST_PROCESSES, Heartbeat, HeartbeatAnswered, ProcessState
from paceline.sync.ticks import TICKS_PER_S, in_ticks

LOOK_TICKS = TICKS_PER_S // 10
LATENCY_TICKS = TICKS_PER_S // 1000


def states_of(machine: int, state: str = "running") -> list[ProcessState]:
    return [ProcessState("worker", machine, state)]  # type: ignore[arg-type]


def verdicts(
    clock: Callable[[int], int], stops_s: float | None, silent_s: float | None
) -> list[tuple[int, Removal]]:
    """Let two agents send heartbeats for 30 s; return the verdicts with their times on the coordinator's clock.

    The clock of machine 2 shows `clock(t)` at the time t. Its worker is stopped, or its link swallows everything.
    """
    liveness = Liveness()
    agents = {1: Heartbeats(), 2: Heartbeats()}
    for machine in agents:
        liveness.machine_joined(machine, f"10.0.0.{machine}", now_ticks=0)
        liveness.worker_joined(machine)
        liveness.iterated(machine, in_ticks(0.1))
    found = []
    for now_ticks in range(LOOK_TICKS, 30 * TICKS_PER_S, LOOK_TICKS):
        for machine, agent in agents.items():
            own = clock if machine == 2 else int
            stopped = machine == 2 and stops_s is not None and now_ticks >= in_ticks(stops_s)
            heartbeat = agent.due(states_of(machine, "stopped" if stopped else "running"), own(now_ticks))
            swallowed = machine == 2 and silent_s is not None and now_ticks >= in_ticks(silent_s)
            if heartbeat is not None and not swallowed:
                received_ticks = now_ticks + LATENCY_TICKS
                liveness.heartbeat(machine, heartbeat.states, received_ticks)
                agent.answered(
                    answer(heartbeat, received_ticks, received_ticks), own(received_ticks + LATENCY_TICKS)
                )
        found += [(now_ticks, verdict) for verdict in liveness.look(now_ticks + 2 * LATENCY_TICKS)]
    for machine, agent in agents.items():
        own = clock if machine == 2 else int
        bounds = agent.clock.bounds
        assert bounds is not None
        true_ticks = next(t for t in range(0, 31 * TICKS_PER_S, LATENCY_TICKS) if own(t) >= bounds.at_ticks)
        assert abs(bounds.offset_ticks - (true_ticks - own(true_ticks))) <= bounds.bound_ticks
        assert bounds.bound_ticks < 2 * LATENCY_TICKS
    return found


@pytest.mark.parametrize(("stops_s", "silent_s"), [(12.3, None), (None, 12.3), (None, None)])
def test_offsets_of_clocks_change_no_decision(stops_s: float | None, silent_s: float | None) -> None:
    expected = verdicts(int, stops_s, silent_s)
    assert len(expected) == (stops_s is not None or silent_s is not None)
    for offset_s in (-30, 30):
        for ppm in (-100, 100):
            shown = verdicts(
                lambda t, s=offset_s, p=ppm: t + s * TICKS_PER_S + t * p // 1_000_000,  # type: ignore[misc]
                stops_s,
                silent_s,
            )
            # With a drift, a heartbeat may be sent at the agent's next look.
            assert [verdict.worker for _, verdict in shown] == [verdict.worker for _, verdict in expected]
            for (at, _), (expected_at, _) in zip(shown, expected, strict=True):
                assert abs(at - expected_at) <= 2 * LOOK_TICKS


def test_a_change_is_sent_at_once_and_does_not_shift_the_regular_heartbeats() -> None:
    agent = Heartbeats()
    sent = [
        tenths
        for tenths in range(20)
        if agent.due(states_of(1, "stopped" if tenths >= 7 else "running"), tenths * LOOK_TICKS)
    ]
    assert sent == [0, 5, 7, 10, 15]


def test_an_agent_that_was_late_sends_one_heartbeat_and_keeps_its_times() -> None:
    agent = Heartbeats()
    sent = [
        tenths for tenths in (0, 1, 5, 23, 24, 25, 29, 30) if agent.due(states_of(1), tenths * LOOK_TICKS)
    ]
    assert sent == [0, 5, 23, 25, 30]


def test_a_heartbeat_states_the_clock_once_it_is_known() -> None:
    agent = Heartbeats()
    first = agent.due(states_of(1), 0)
    assert first is not None
    assert first.clock is None
    agent.answered(
        HeartbeatAnswered(
            0,
            1000,
            1000,
        ),
        200,
    )
    second = agent.due(states_of(1), TICKS_PER_S)
    assert second is not None
    assert second.clock is not None
    assert second.clock.offset_ticks == pytest.approx(900, abs=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sent_ticks": 2**63, "states": []},
        {"sent_ticks": 0, "states": [["worker", -1, "running"]]},
        {"sent_ticks": 0, "states": [["reader", 1, "running"]]},
        {"sent_ticks": 0, "states": [["worker", 1, "asleep"]]},
        {"sent_ticks": 0, "states": [["worker", 1, "running"]] * (MOST_PROCESSES + 1)},
        {"sent_ticks": 0, "states": [], "clock": {"at_ticks": 0, "offset_ticks": 0, "bound_ticks": -1}},
    ],
)
def test_a_heartbeat_with_impossible_numbers_or_states_is_refused(wrong: dict[str, object]) -> None:
    encoded = msgspec.msgpack.encode({"type": "Heartbeat", **wrong})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=Heartbeat)


def test_a_heartbeat_survives_encoding() -> None:
    agent = Heartbeats()
    agent.due([], 0)
    agent.answered(HeartbeatAnswered(0, -5000, -4000), 2000)
    heartbeat = agent.due([*states_of(3), ProcessState("server", 0, "traced")], 10)
    assert heartbeat is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(heartbeat), type=Heartbeat) == heartbeat
