"""Virtual time: the order of what happens, and every sync model rehearsed to the end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.errors import ConfigurationError
from paceline.measures import Measures, measure
from paceline.sim.kernel import MESSAGE, TIMER, Kernel
from paceline.sim.rehearsal import Rehearsal, rehearse
from paceline.sync import Conditions
from paceline.sync.actions import ApplyMean, ApplyPush, DropPush, PublishPlan
from paceline.sync.events import PullRepeated, PushReceived
from paceline.trace import replay

MODELS = [
    "bsp",
    "asp",
    "ssp:staleness=2",
    "ssp:staleness=2,execution=lazy",
    "dssp:lower=1,upper=5",
    "dsps:lower=1,upper=5",
    "pssp:staleness=2",
    "dynamic-pssp:staleness=2",
    "drop-stragglers:quorum=3",
    "naive-waiting:delay_s=0.2",
    "elastic-bsp:lookahead=5",
    "spec-sync",
    "spec-sync:base=ssp:staleness=2,abort_time_s=0.3,abort_rate=0.2",
    "bsp|ssp:staleness=2",
    "bsp@0,elastic-bsp@10,spec-sync@20,ssp:staleness=1@30",
]


def unequal(seed: int = 0, jitter: float = 0.1) -> list[Callable[[int], float]]:
    """Four workers, the last one three times slower."""

    def times(worker: int) -> Callable[[int], float]:
        draw = random.Random(f"{seed} {worker}")
        mean_s = 3.0 if worker == 3 else 1.0
        return lambda iteration: mean_s * draw.uniform(1 - jitter, 1 + jitter)

    return [times(worker) for worker in range(4)]


def test_things_happen_in_order_of_time_then_priority_then_setting() -> None:
    kernel = Kernel()
    happened: list[str] = []
    kernel.at(2.0, lambda: happened.append("timer"), TIMER)
    kernel.at(2.0, lambda: happened.append("first message"), MESSAGE)
    kernel.at(2.0, lambda: happened.append("second message"), MESSAGE)
    kernel.at(1.0, lambda: happened.append("earlier"))
    kernel.at(9.0, lambda: happened.append("too late"))
    kernel.run(until_s=5.0)
    assert happened == ["earlier", "first message", "second message", "timer"]
    assert kernel.now_s == 2.0


def test_time_never_goes_back() -> None:
    kernel = Kernel()
    seen: list[float] = []
    kernel.at(3.0, lambda: kernel.at(1.0, lambda: seen.append(kernel.now_s)))
    kernel.run()
    assert seen == [3.0]


@pytest.mark.parametrize("sync", MODELS)
@pytest.mark.parametrize("latency_s", [0.0, 0.03])
def test_every_model_comes_to_its_end_loses_no_push_and_replays(sync: str, latency_s: float) -> None:
    rehearsal = rehearse(sync, unequal(), iterations=40, shards=2, latency_s=latency_s)
    pushes = {(worker, iteration) for worker in range(4) for iteration in range(40)}
    for trace in rehearsal.traces[:-1]:
        counted = dict.fromkeys(pushes, 0)
        for action in (action for entry in trace.entries for action in entry.actions):
            match action:
                case ApplyPush(worker, iteration) | DropPush(worker, iteration):
                    counted[worker, iteration] += 1
                case ApplyMean(keys):
                    for key in keys:
                        counted[key] += 1
                case _:
                    pass
        assert set(counted.values()) == {1}
        assert {
            (e.event.worker, e.event.iteration) for e in trace.entries if isinstance(e.event, PushReceived)
        } == pushes
    for trace in rehearsal.traces:
        assert replay(trace) == []
    assert [len(records) for records in rehearsal.records] == [40] * 4


def test_a_rehearsal_is_the_same_every_time() -> None:
    one, other = (rehearse("spec-sync", unequal(), iterations=30, shards=2, latency_s=0.01) for _ in range(2))
    assert one == other


def test_bsp_takes_as_long_as_its_slowest_worker() -> None:
    rehearsal = rehearse("bsp", [1.0, 3.0], iterations=4, latency_s=0.25)
    assert rehearsal.time_s == 4 * (3.0 + 2 * 0.25) + 0.25  # there and back, and the last word


def test_elastic_bsp_waits_less_than_bsp_and_restores_barriers() -> None:
    elastic = rehearse("elastic-bsp:lookahead=15", [1.0, 1.0, 1.0, 3.0], until_s=300)
    bsp = rehearse("bsp", [1.0, 1.0, 1.0, 3.0], until_s=300)
    assert figures(elastic).waiting_share < 0.05 < 0.45 < figures(bsp).waiting_share
    plans = [a for e in elastic.traces[-1].entries for a in e.actions if isinstance(a, PublishPlan)]
    assert len(plans) > 10


def figures(rehearsal: Rehearsal) -> Measures:
    return measure(rehearsal.traces[:-1])


def delayed_share(rehearsal: Rehearsal) -> float:
    measures = figures(rehearsal)
    return measures.delayed_pulls / (sum(measures.iterations.values()) * (len(rehearsal.traces) - 1))


@pytest.mark.parametrize("seed", range(3))
def test_lazy_execution_delays_fewer_pulls_than_the_soft_barrier(seed: int) -> None:
    """FluentPS, Fig. 9."""
    soft, lazy = (
        rehearse(f"ssp:staleness=3,execution={execution}", unequal(seed), until_s=400)
        for execution in ("soft", "lazy")
    )
    assert delayed_share(lazy) < 0.5 * delayed_share(soft)


@pytest.mark.parametrize("seed", range(3))
def test_pssp_delays_fewer_pulls_than_ssp_at_the_same_regret_bound(seed: int) -> None:
    """FluentPS, section III-E: s' = s + 1/c - 1, and Table IV."""
    pssp = rehearse("pssp:staleness=3,probability=0.2", unequal(seed), until_s=400, seed=seed)
    ssp = rehearse("ssp:staleness=7", unequal(seed), until_s=400)
    assert delayed_share(pssp) < 0.5 * delayed_share(ssp)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sync", ["spec-sync", "naive-waiting:delay_s=0.2"])
def test_pulls_are_fresher_than_asps(sync: str, seed: int) -> None:
    """SpecSync, sections III-B and IV."""
    asp = rehearse("asp", unequal(seed), until_s=400)
    assert figures(rehearse(sync, unequal(seed), until_s=400)).mean_staleness < figures(asp).mean_staleness


def test_an_iteration_restarts_at_most_once() -> None:
    rehearsal = rehearse("spec-sync:abort_time_s=0.1,abort_rate=0", unequal(), until_s=200, latency_s=0.02)
    again = [
        (e.event.worker, e.event.iteration)
        for e in rehearsal.traces[0].entries
        if isinstance(e.event, PullRepeated)
    ]
    assert len(again) == len(set(again)) > 20


def test_naive_waiting_puts_every_pull_off_by_its_delay() -> None:
    rehearsal = rehearse("naive-waiting:delay_s=0.5", [1.0, 2.0], iterations=10)
    assert rehearsal.time_s == 10 * 2.5
    for records in rehearsal.records:
        for record in records:
            assert record.answered_s - record.pushed_s == pytest.approx(0.5)


def test_what_cannot_be_rehearsed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="give iterations, or until_s"):
        rehearse("asp", [1.0])
    with pytest.raises(ConfigurationError, match="quorum is 3, but there are 2 workers"):
        rehearse("drop-stragglers:quorum=3", [1.0, 1.0], iterations=1)
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        rehearse(Conditions(pull=lambda state: 1 / 0), [1.0], iterations=1)
