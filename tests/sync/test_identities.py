"""What the models are to one another: SSP(0) waits where BSP does, SSP(inf) is ASP, and what SSP(3) bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.shard import ShardSync
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    PSSP,
    SSP,
    Conditions,
    DropStragglers,
    NaiveWaiting,
    SpecSync,
    SyncModel,
)
from paceline.sync.actions import AnswerPull, AnyAction
from paceline.sync.events import Change, WorkerJoined
from paceline.testing.promises import CheckedShard

# A busy machine is no failure.
patiently = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])

CHOICES = st.lists(st.integers(0, 9999), min_size=60, max_size=120)


def side_by_side(
    one: SyncModel, other: SyncModel, choices: list[int]
) -> list[tuple[list[AnyAction], list[AnyAction]]]:
    """The actions of both, event by event, while the same events are legal for both."""
    lives = CheckedShard(one.at_shard()), CheckedShard(other.at_shard())
    actions = []
    for choice in choices:
        event, same = (checked.legal.pick(choice) for checked in lives)
        assert event == same
        actions.append((lives[0].tell(event), lives[1].tell(event)))
    return actions


def releases(actions: list[AnyAction]) -> list[AnyAction]:
    return [action for action in actions if isinstance(action, AnswerPull)]


@patiently
@given(CHOICES)
def test_ssp_0_waits_exactly_where_bsp_does(choices: list[int]) -> None:
    for ssp, bsp in side_by_side(SSP(staleness=0), BSP(), choices):
        assert releases(ssp) == releases(bsp)


@patiently
@given(CHOICES)
def test_ssp_inf_is_asp_and_never_waits(choices: list[int]) -> None:
    for ssp, asp in side_by_side(SSP(staleness=math.inf), ASP(), choices):
        assert ssp == asp
    checked = CheckedShard(SSP(staleness=math.inf).at_shard())
    for choice in choices:
        checked.walk([choice])
        assert not checked.legal.waiting


@patiently
@given(CHOICES, st.integers(2, 4))
def test_under_ssp_3_nobody_starts_an_iteration_more_than_3_ahead_of_the_slowest(
    choices: list[int], workers: int
) -> None:
    checked = CheckedShard(SSP(staleness=3).at_shard())
    for _ in range(workers):
        checked.tell(checked.legal.join())
    started = dict.fromkeys(range(workers), 0)  # worker -> the iteration that it computes, or did last
    largest = 0
    for choice in choices:
        # Nobody leaves or joins, so iterations may be compared as they are; worker 0 is slow.
        movable = [worker for worker in range(workers) if worker not in checked.legal.waiting]
        worker = movable[choice % len(movable)]
        if worker == 0 and choice % 5:
            worker = movable[-1]
        actions = checked.tell(checked.legal.push(worker)) + checked.tell(checked.legal.pull(worker))
        for action in releases(actions):
            assert isinstance(action, AnswerPull)
            started[action.worker] = action.iteration + 1
        slowest = min(checked.legal.label.values())
        largest = max(largest, max(started.values()) - slowest)
        assert largest <= 3


def test_under_ssp_3_the_bound_is_reached() -> None:
    checked = CheckedShard(SSP(staleness=3).at_shard())
    for _ in range(2):
        checked.tell(checked.legal.join())
    answered = 0
    while not checked.legal.waiting:
        checked.tell(checked.legal.push(1))
        answered += len(checked.tell(checked.legal.pull(1)))
    assert answered == 3  # it has started its iterations 0, 1, 2 and 3 and waits for leave to start 4


@patiently
@given(CHOICES, st.integers(0, 3), st.sampled_from(["soft", "lazy"]))
def test_pssp_that_always_delays_is_ssp(choices: list[int], staleness: int, execution: str) -> None:
    pssp = PSSP(staleness=staleness, probability=1.0, execution=execution)
    for one, other in side_by_side(pssp, SSP(staleness=staleness, execution=execution), choices):
        assert one == other


@patiently
@given(CHOICES)
def test_pssp_that_never_delays_is_asp(choices: list[int]) -> None:
    for one, other in side_by_side(PSSP(staleness=0, probability=0.0), ASP(), choices):
        assert one == other


@patiently
@given(CHOICES, st.integers(0, 3))
def test_dssp_with_equal_bounds_is_ssp(choices: list[int], staleness: int) -> None:
    for one, other in side_by_side(DSSP(lower=staleness, upper=staleness), SSP(staleness=staleness), choices):
        assert one == other


@patiently
@given(CHOICES, st.integers(0, 3))
def test_dsps_with_equal_bounds_is_ssp(choices: list[int], staleness: int) -> None:
    for one, other in side_by_side(DSPS(lower=staleness, upper=staleness), SSP(staleness=staleness), choices):
        assert one == other


@patiently
@given(CHOICES)
def test_drop_stragglers_that_waits_for_all_is_bsp(choices: list[int]) -> None:
    for one, other in side_by_side(DropStragglers(quorum=100), BSP(), choices):
        assert one == other


@patiently
@given(CHOICES, st.integers(0, 2), st.integers(0, 3))
def test_under_dssp_nobody_starts_an_iteration_more_than_upper_ahead(
    choices: list[int], lower: int, spread: int
) -> None:
    checked = CheckedShard(DSSP(lower=lower, upper=lower + spread).at_shard())
    for _ in range(3):
        checked.tell(checked.legal.join())
    count = dict.fromkeys(range(3), 0)
    for choice in choices:
        free = [worker for worker in range(3) if worker not in checked.legal.waiting]
        worker = free[choice % len(free)]
        count[worker] += 1
        actions = checked.tell(checked.legal.push(worker)) + checked.tell(checked.legal.pull(worker))
        for action in releases(actions):
            assert isinstance(action, AnswerPull)
            assert count[action.worker] - min(count.values()) <= lower + spread


@pytest.mark.thorough
def test_the_lead_at_which_pssp_first_delays_has_mean_s_plus_1_over_c_minus_1() -> None:
    """FluentPS, Theorem 1: a pull with k = s + j is the first to be delayed with probability c (1 - c)^j."""
    staleness, c, trials = 3, 0.25, 4000
    leads = []
    for seed in range(trials):
        checked = CheckedShard(PSSP(staleness=staleness, probability=c).at_shard(seed))
        for _ in range(2):
            checked.tell(checked.legal.join())
        lead = 0
        checked.tell(checked.legal.push(1))
        while checked.tell(checked.legal.pull(1)):
            checked.tell(checked.legal.push(1))
            lead += 1
        leads.append(lead)
    mean = staleness + 1 / c - 1
    deviation = math.sqrt((1 - c) / c**2 / trials)
    assert abs(sum(leads) / trials - mean) < 4 * deviation
    assert min(leads) == staleness


@patiently
@given(
    CHOICES,
    st.sampled_from([ASP(), ASP(push_scale="1/n"), SSP(staleness=1), SSP(staleness=0, execution="lazy")]),
)
def test_spec_syncs_shards_are_its_bases(choices: list[int], base: ASP | SSP) -> None:
    for spec_sync, of_base in side_by_side(
        SpecSync(base=base, abort_time_s=1.0, abort_rate=0.0), base, choices
    ):
        assert spec_sync == of_base


@patiently
@given(CHOICES)
def test_naive_waiting_for_no_time_is_asp(choices: list[int]) -> None:
    for naive, asp in side_by_side(NaiveWaiting(delay_s=0.0), ASP(), choices):
        assert naive == asp


@patiently
@given(CHOICES, st.integers(0, 3), st.sampled_from(["soft", "lazy"]), st.sampled_from(["1", "1/n"]))
def test_a_condition_of_ones_own_makes_ssp(
    choices: list[int], s: int, execution: str, push_scale: str
) -> None:
    own = Conditions(
        pull=lambda state: state.progress < state.v_train + s, execution=execution, push_scale=push_scale
    )
    ssp = SSP(staleness=s, execution=execution, push_scale=push_scale)
    for one, other in side_by_side(own, ssp, choices):
        assert one == other


@patiently
@given(CHOICES)
def test_a_condition_on_the_gap_makes_ssp(choices: list[int]) -> None:
    for one, other in side_by_side(Conditions(pull=lambda state: state.gap <= 2), SSP(staleness=2), choices):
        assert one == other


@patiently
@given(CHOICES)
def test_a_condition_that_always_holds_makes_asp(choices: list[int]) -> None:
    for one, other in side_by_side(Conditions(pull=lambda state: True), ASP(), choices):
        assert one == other


@patiently
@given(CHOICES)
def test_conditions_that_average_make_bsp(choices: list[int]) -> None:
    own = Conditions(pull=lambda state: state.progress < state.v_train, pushes="average")
    for one, other in side_by_side(own, BSP(), choices):
        assert one == other


@patiently
@given(CHOICES, st.integers(1, 3))
def test_conditions_with_a_quorum_make_drop_stragglers(choices: list[int], quorum: int) -> None:
    own = Conditions(
        pull=lambda state: state.progress < state.v_train,
        push=lambda state: state.pushed >= min(quorum, state.live),
        pushes="average",
    )
    for one, other in side_by_side(own, DropStragglers(quorum=quorum), choices):
        assert one == other


@patiently
@given(CHOICES, st.sampled_from([BSP(), SSP(staleness=1), DropStragglers(quorum=2)]))
def test_after_a_change_a_shard_is_like_one_that_began_with_the_model(
    choices: list[int], sync: SyncModel
) -> None:
    """But for the labels of those who were there."""
    changed, fresh = CheckedShard(ShardSync(ASP())), CheckedShard(ShardSync(sync))
    for checked in (changed, fresh):
        for _ in range(2):
            checked.tell(checked.legal.join())
    for worker in range(2):
        changed.tell(changed.legal.push(worker, change=Change(number=1, members=(0, 1), sync=str(sync))))
        changed.tell(changed.legal.pull(worker))
    for choice in choices:
        actions, same = (checked.tell(checked.legal.pick(choice)) for checked in (changed, fresh))
        assert [type(action) for action in actions] == [type(action) for action in same]
        assert changed.legal.phase == fresh.legal.phase


def test_dssp_goes_on_with_who_joined_behind_the_rounds_that_are_complete() -> None:
    """Its count is the slowest's at another shard, which this one is ahead of."""
    checked = CheckedShard(DSSP(lower=0, upper=2).at_shard())
    checked.tell(checked.legal.join())
    checked.tell(checked.legal.push(0))
    checked.tell(WorkerJoined(now_ticks=0, worker=1, count=0))
    checked.tell(checked.legal.pull(0))
    for _ in range(3):
        checked.tell(checked.legal.push(1))
        checked.tell(checked.legal.pull(1))
        for worker in set(checked.legal.in_phase("computing")) & {0}:
            checked.tell(checked.legal.push(worker))
            checked.tell(checked.legal.pull(worker))


def test_dssp_chooses_anew_when_its_gap_has_come_down_to_lower() -> None:
    """It takes 1 s for an iteration, the slowest 3 s. When it has waited for the slowest and goes on, its gap is 1;
    with its next push it is 2 again, and to spend one or two iterations would shorten the next wait."""
    checked = CheckedShard(DSSP(lower=1, upper=4).at_shard())
    for _ in range(2):
        checked.tell(checked.legal.join())
    ends = {0: 1, 1: 3}
    waits = 0
    while checked.legal.now_ticks < 60:
        worker = min(ends, key=lambda w: (ends[w], w))
        checked.legal.now_ticks = ends.pop(worker)
        actions = checked.tell(checked.legal.push(worker)) + checked.tell(checked.legal.pull(worker))
        waits += worker in checked.legal.waiting
        for action in releases(actions):
            assert isinstance(action, AnswerPull)
            ends[action.worker] = checked.legal.now_ticks + (1 if action.worker == 0 else 3)
    assert waits < 15  # one iteration of the slowest, one wait: 20, is SSP(1)
