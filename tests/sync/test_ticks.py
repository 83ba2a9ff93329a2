"""Decisions are exact: they depend neither on the unit of the times nor on rounding errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.errors import ConfigurationError
from paceline.sim import Cluster, Presence, SimResult, simulate
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    PSSP,
    SSP,
    DropStragglers,
    ElasticBSP,
    NaiveWaiting,
    SpecSync,
    SyncModel,
    parse,
)
from paceline.sync.actions import Plan, PublishPlan, SetTimer
from paceline.sync.dssp import iterations_to_spend
from paceline.sync.events import PushReceived, WorkerJoined
from paceline.sync.ticks import TICKS_PER_S, in_ticks
from paceline.trace import read, replay
from tests.support.marks import chaos, thorough

MODELS: dict[str, Callable[[Fraction], SyncModel]] = {
    "bsp": lambda unit: BSP(),
    "asp": lambda unit: ASP(),
    "ssp": lambda unit: SSP(staleness=2),
    "ssp lazy": lambda unit: SSP(staleness=2, execution="lazy"),
    "dssp": lambda unit: DSSP(lower=1, upper=9),
    "dsps": lambda unit: DSPS(lower=1, upper=9),
    "pssp": lambda unit: PSSP(staleness=1, probability=0.5),
    "drop-stragglers": lambda unit: DropStragglers(quorum=2),
    "elastic-bsp": lambda unit: ElasticBSP(lookahead=12),
    "naive-waiting": lambda unit: NaiveWaiting(delay_s=Fraction(2, 5) * unit),
    "spec-sync": lambda unit: SpecSync(),
    "spec-sync fixed": lambda unit: SpecSync(abort_time_s=Fraction(1, 2) * unit, abort_rate=0.3),
    "spec-sync over ssp": lambda unit: SpecSync(base=SSP(staleness=1)),
}
UNTIMED = {"asp", "ssp", "ssp lazy", "pssp", "drop-stragglers"}
"""These decide, as BSP does, by the order of events alone."""

every_model = pytest.mark.parametrize(
    "model", [*(name for name in MODELS if name not in UNTIMED), *thorough(*sorted(UNTIMED))]
)

UNITS = {"milliseconds": Fraction(1000), "3/7": Fraction(3, 7), "microseconds": Fraction(1, 10**6)}


def cluster_with_ties(seed: int, unit: Fraction) -> Cluster:
    """Workers with compute times in tenths of a second, or lists of them, so that many events are simultaneous."""
    draw = random.Random(seed)
    workers = draw.randint(2, 6)
    compute: list[Any] = [
        [Fraction(draw.randint(1, 20), 10) * unit for _ in range(draw.choice([1, 1, 5]))]
        for _ in range(workers)
    ]
    return Cluster(
        compute_s=compute,
        servers=draw.choice([1, 1, 3]),
        latency_s=draw.choice([Fraction(0), Fraction(1, 10)]) * unit,
        presence={1: Presence(lost_at_s=6 * unit, back_after_s=2 * unit)} if draw.random() < 0.3 else {},
    )


def decisions(result: SimResult, unit: Fraction) -> list[Any]:
    """The entries of all traces, with exact times in the given unit."""

    def exact(trace: Any, thing: Any) -> Any:
        if isinstance(thing, msgspec.Struct):
            thing = {"type": type(thing).__name__} | msgspec.structs.asdict(thing)
        if isinstance(thing, dict):
            return {
                key: Fraction(value, trace.header.ticks_per_s) / unit
                if key.endswith("_ticks")
                else exact(trace, value)
                for key, value in thing.items()
            }
        return [exact(trace, each) for each in thing] if isinstance(thing, list | tuple) else thing

    return [exact(trace, entry) for trace in result.trace for entry in trace.entries]


@every_model
@pytest.mark.parametrize("unit", ["3/7", *chaos("milliseconds", "microseconds")])
@pytest.mark.parametrize("seeds", [range(2), *thorough(range(2, 12))], ids=str)
def test_the_same_run_in_another_unit_makes_the_same_decisions(
    model: str, unit: str, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        one, other = (
            simulate(cluster_with_ties(seed, scale), MODELS[model](scale), 25, seed=seed, record=True)
            for scale in (Fraction(1), UNITS[unit])
        )
        assert decisions(one, Fraction(1)) == decisions(other, UNITS[unit])


@every_model
def test_decimals_are_what_they_say_whether_they_are_floats_or_exact(model: str) -> None:
    times = [0.1, 0.3, 0.7, 1.1]
    runs = [
        simulate(
            Cluster(compute_s=[make(time) for time in times]), MODELS[model](Fraction(1)), 30, record=True
        )
        for make in (float, lambda time: Decimal(str(time)), lambda time: Fraction(str(time)))
    ]
    first, *others = (decisions(run, Fraction(1)) for run in runs)
    assert all(first == other for other in others)


def plans(result: SimResult) -> list[Plan]:
    return [
        action.plan
        for entry in result.trace[-1].entries
        for action in entry.actions
        if type(action) is PublishPlan
    ]


def test_a_barrier_without_waiting_is_found_where_floats_see_a_small_wait() -> None:
    """The workers end iterations together at 0.6, 1.2, ... s. With floats, 0.2 * 6 and 0.3 * 4 differ."""
    result = simulate(Cluster([0.2, 0.3]), ElasticBSP(lookahead=15), 30, record=True)
    first = plans(result)[0]
    assert first.barrier_ticks == in_ticks(1.2)
    assert first.wait_ticks == 0
    assert dict(first.stops) == {0: 5, 1: 3}  # the sixth and the fourth iteration
    whole = simulate(Cluster([2.0, 3.0]), ElasticBSP(lookahead=15), 30, record=True)
    assert [plan.stops for plan in plans(whole)] == [plan.stops for plan in plans(result)]


def test_times_that_are_stated_as_fractions_meet_exactly() -> None:
    """Neither 1/3 s nor 1/7 s is a whole number of nanoseconds."""
    thirds = Cluster([Fraction(1, 3), Fraction(1, 7)])
    result = simulate(thirds, ElasticBSP(lookahead=30), 60, record=True)
    assert result.trace[0].header.ticks_per_s == 21 * TICKS_PER_S
    assert plans(result)[0].wait_ticks == 0
    assert simulate(thirds, "bsp", 3000).time_s == 1000.0


def test_a_trace_with_a_finer_resolution_is_read_and_replayed(tmp_path: Path) -> None:
    cluster = Cluster([Fraction(1, 3), Fraction(1, 7 * 2**60)])
    models = [ElasticBSP(lookahead=5), SpecSync(), NaiveWaiting(delay_s=Fraction(1, 11))]
    for number, model in enumerate(models):
        run_dir = tmp_path / str(number)
        result = simulate(cluster, model, 40, record=True, run_dir=run_dir)
        for path in run_dir.glob("trace-*.jsonl"):
            trace = read(path)
            assert trace in result.trace
            assert replay(trace) == []


def test_a_trace_in_seconds_is_converted(tmp_path: Path) -> None:
    simulate(Cluster([0.25, 1.5, 0.75]), "naive-waiting:delay_s=0.5", 20, run_dir=tmp_path / "waiting")
    simulate(Cluster([0.25, 1.5, 0.75]), "elastic-bsp:lookahead=5", 20, run_dir=tmp_path / "elastic")
    paths = list(tmp_path.glob("*/trace-*.jsonl"))
    assert len(paths) == 4
    for path in paths:
        trace = read(path)
        old = path.with_name("old.jsonl")
        lines = [json.dumps(in_seconds(json.loads(line))) for line in path.read_text().splitlines()]
        old.write_text("\n".join([*lines, '{"an incomplete']))
        converted = read(old)
        assert converted == trace
        assert replay(converted) == []
    kinds = {type(action) for path in paths for entry in read(path).entries for action in entry.actions}
    assert {SetTimer, PublishPlan} <= kinds


def in_seconds(thing: Any) -> Any:
    """A line as format 3 had it."""
    if isinstance(thing, list):
        return [in_seconds(each) for each in thing]
    if not isinstance(thing, dict):
        return thing
    line = {
        key.removesuffix("_ticks") + "_s" if key.endswith("_ticks") else key: value / TICKS_PER_S
        if key.endswith("_ticks")
        else in_seconds(value)
        for key, value in thing.items()
        if key != "ticks_per_s"
    }
    return line | {"format": 3} if "format" in line else line


def test_dssp_chooses_the_extra_iterations_with_the_shortest_predicted_wait() -> None:
    """The workers take 507,462,866 and 1,418,374,099 ns: with floats, r = 4 seemed better than r = 1."""
    draw = random.Random(0)
    cases = [
        (507_462_866 * k, 507_462_866, 1_418_374_099 * n, 1_418_374_099) for k in range(30) for n in range(11)
    ]
    cases += [
        (draw.randint(1, 60), draw.randint(1, 60), draw.randint(1, 60), draw.randint(1, 60))
        for _ in range(2000)
    ]
    for t_p, i_p, t_q, i_q in cases:

        def wait(r: int, t_p: int = t_p, i_p: int = i_p, t_q: int = t_q, i_q: int = i_q) -> int:
            push = t_q + i_q
            while push < t_p + r * i_p:
                push += i_q
            return push - (t_p + r * i_p)

        assert iterations_to_spend(t_p, i_p, t_q, i_q, 12) == min(range(13), key=wait)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("naive-waiting:delay_s=1/3", NaiveWaiting(delay_s=Fraction(1, 3))),
        ("naive-waiting:delay_s=4/2", NaiveWaiting(delay_s=2)),
        (
            "spec-sync:abort_time_s=3/7,abort_rate=1/4",
            SpecSync(abort_time_s=Fraction(3, 7), abort_rate=Fraction(1, 4)),
        ),
    ],
)
def test_the_parameters_of_models_may_be_fractions(text: str, model: SyncModel) -> None:
    assert parse(text) == model
    assert parse(str(model)) == model


@pytest.mark.parametrize(
    "text", ["naive-waiting:delay_s=1/0", "naive-waiting:delay_s=-1/3", "ssp:staleness=4/2"]
)
def test_a_fraction_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse(text)


def test_a_fraction_below_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="delay_s is -1/3, expected a number >= 0"):
        NaiveWaiting(delay_s=Fraction(-1, 3))
    with pytest.raises(ConfigurationError, match=r"seconds is -0\.3"):
        Cluster([Fraction(-3, 10)])
    with pytest.raises(ConfigurationError, match="lost_at_s"):
        Presence(joins_at_s=Fraction(1, 3), lost_at_s=Fraction(1, 4))


def test_a_float_that_would_be_rounded_to_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"seconds is 4e-10, which would be rounded to 0"):
        Cluster([4e-10, 1.0])
    assert simulate(Cluster([Fraction(4, 10**10), 1]), "asp", 2).time_s == 2.0
    with pytest.raises(ConfigurationError, match=r"delay_s is 4e-10, which would be rounded to 0"):
        parse("naive-waiting:delay_s=4e-10")
    with pytest.raises(ConfigurationError, match=r"abort_time_s is 4e-10, which would be rounded to 0"):
        SpecSync(abort_time_s=4e-10, abort_rate=0)
    SpecSync(abort_time_s=Fraction(4, 10**10), abort_rate=0)


def test_integers_are_exact_however_large() -> None:
    large = 10**14 + 1
    exact = simulate(Cluster([large, 3 * large]), DSPS(lower=1, upper=9), 9, record=True)
    assert exact.trace[0].entries[2].event.now_ticks == large * TICKS_PER_S


def test_the_end_of_a_simulation_may_be_a_fraction() -> None:
    cluster = Cluster([Fraction(1, 3)])
    assert simulate(cluster, "asp", None, until_s=Fraction(2, 3)).updates == 2
    assert simulate(cluster, "asp", None, until_s=Fraction(2, 3) - Fraction(1, 10**15)).updates == 1


def test_an_iteration_that_takes_no_time_makes_the_ratio_of_dsps_infinite() -> None:
    shard = DSPS(lower=1, upper=5).at_shard()
    for worker in (0, 1):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    for now_ticks, worker in ((0, 0), (7, 1)):
        shard.handle(PushReceived(now_ticks=now_ticks, worker=worker, iteration=0))
    assert shard.staleness == 5


def test_elastic_bsp_monitors_a_newcomer_from_the_barrier_on() -> None:
    """Worker 2 joins at 1.25 s and pushes at 2.75, 4.25 and 5.75 s; the first superstep ends at 3 s."""
    result = simulate(
        Cluster([1.0, 1.0, 1.5], presence={2: Presence(joins_at_s=1.25)}),
        ElasticBSP(lookahead=4),
        20,
        record=True,
    )
    times_s = [
        result.trace[-1].time_s(entry)
        for entry in result.trace[-1].entries
        for action in entry.actions
        if type(action) is PublishPlan
    ]
    assert times_s[:2] == [2.0, 5.75]
