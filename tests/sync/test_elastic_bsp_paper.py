"""ElasticBSP by the paper: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel
model", Machine Learning, 2021. Each test names the sentence or the figure that it holds the code against.

A job of three workers lives in the paper's own time: `Job` lets each worker push at given intervals, hands the
pushes to a shard and to the planner, and starts the next iteration when the shard has answered.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sync import ElasticBSP
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, HoldPush, Plan, PublishPlan
from paceline.sync.events import (
    IterationFinished,
    PullRequested,
    PushReceived,
    Stop,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.ticks import TICKS_PER_S, in_ticks


class Arrival(NamedTuple):
    """One push at the shard."""

    now_s: float
    worker: int
    iteration: int
    stops: bool


class Job:
    """Workers with their own intervals, one shard and the planner, in virtual time; plans arrive at once."""

    def __init__(self, interval_s: list[Callable[[int], float]], lookahead: int) -> None:
        sync = ElasticBSP(lookahead=lookahead)
        self.arrivals: list[Arrival] = []
        self.plans: list[tuple[float, Plan]] = []  # and when they were made
        self.barriers: list[tuple[float, ApplyMean]] = []  # and when they fell
        self.waited_s: list[dict[int, float]] = []  # for each barrier: worker -> how long it waited
        self.lost_at_s: dict[int, float] = {}
        self._interval_s = interval_s  # worker -> its iteration -> seconds
        self._shard = sync.at_shard()
        self._planner = sync.at_coordinator()
        self._stop: dict[int, tuple[int, Stop]] = {}
        self._asked_s: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []  # (end, worker, iteration)
        for worker, interval in enumerate(interval_s):
            for machine in (self._shard, self._planner):
                machine.handle(WorkerJoined(now_ticks=0, worker=worker))
            heapq.heappush(self._heap, (interval(0), worker, 0))

    def run(self, *, barriers: int) -> None:
        """Until so many barriers have fallen."""
        while len(self.barriers) < barriers:
            now_s, worker, iteration = heapq.heappop(self._heap)
            if now_s >= self.lost_at_s.get(worker, float("inf")):
                self._perform(now_s, self._shard.handle(WorkerLost(now_ticks=in_ticks(now_s), worker=worker)))
                self._hear_plans(
                    now_s, self._planner.handle(WorkerLost(now_ticks=in_ticks(now_s), worker=worker))
                )
                continue
            self._end_iteration(now_s, worker, iteration)

    def _end_iteration(self, now_s: float, worker: int, iteration: int) -> None:
        planned, stop = self._stop.get(worker, (0, None))
        if stop is not None and iteration >= planned:
            del self._stop[worker]
        else:
            stop = None
        self.arrivals.append(Arrival(now_s, worker, iteration, stop is not None))
        self._asked_s[worker] = now_s
        push = PushReceived(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration, stop=stop)
        pull = PullRequested(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration)
        self._perform(now_s, self._shard.handle(push) + self._shard.handle(pull))
        superstep = stop.superstep if stop is not None else None
        notify = IterationFinished(
            now_ticks=in_ticks(now_s), worker=worker, iteration=iteration, superstep=superstep
        )
        self._hear_plans(now_s, self._planner.handle(notify))

    def _perform(self, now_s: float, actions: list[AnyAction]) -> None:
        for action in actions:
            match action:
                case ApplyMean():
                    self.barriers.append((now_s, action))
                    self.waited_s.append({})
                case AnswerPull(worker, iteration):
                    if self.barriers and (worker, iteration) in self.barriers[-1][1].pushes:
                        self.waited_s[-1][worker] = now_s - self._asked_s[worker]
                    end_s = now_s + self._interval_s[worker](iteration + 1)
                    heapq.heappush(self._heap, (end_s, worker, iteration + 1))
                case _:
                    assert isinstance(action, ApplyPush | HoldPush)

    def _hear_plans(self, now_s: float, actions: list[AnyAction]) -> None:
        for action in actions:
            assert isinstance(action, PublishPlan)
            self.plans.append((now_s, action.plan))
            stop = Stop(superstep=action.plan.superstep, members=action.plan.members)
            for worker, iteration in action.plan.stops:
                self._stop[worker] = iteration, stop

    def ends_since(self, worker: int, since_s: float, until_s: float) -> list[float]:
        """When this worker's iterations ended, in (since, until]."""
        return [a.now_s for a in self.arrivals if a.worker == worker and since_s < a.now_s <= until_s]


def steady(interval_s: float) -> Callable[[int], float]:
    return lambda iteration: interval_s


def square_circle_and_diamond(lookahead: int = 15) -> Job:
    """Three workers as in Fig. 5, in eighths of a second so that no sum is rounded. The circle, worker 1, is the
    slowest at first and becomes the fastest after the first barrier."""
    return Job([steady(1.0), lambda i: 2.625 if i < 4 else 0.625, steady(1.375)], lookahead)


def test_section_4_the_monitoring_phase_requires_at_least_two_push_requests_per_worker() -> None:
    """Fig. 5: "The purpose of the monitoring phase is to allow the server to learn the iteration interval of all the
    workers. It requires at least two PUSH requests per worker." """
    job = square_circle_and_diamond()
    job.run(barriers=4)
    since_s = 0.0
    for (made_s, _), (fell_s, _) in zip(job.plans, job.barriers, strict=False):
        monitored = [len(job.ends_since(worker, since_s, made_s)) for worker in range(3)]
        assert min(monitored) == 2  # with the second push of the slowest, and not before
        since_s = fell_s


def test_section_4_intervals_are_extrapolated_from_the_two_latest_pushes() -> None:
    """ "if a worker p arrives at time t and presents an iteration interval gamma, then the future R iterations can be
    estimated to occur at time t + gamma, t + 2 gamma, ..., t + R gamma." """
    job = square_circle_and_diamond()
    job.run(barriers=3)
    since_s = 0.0
    for (made_s, plan), (fell_s, _) in zip(job.plans, job.barriers, strict=False):
        predicted = []
        for worker, iteration in plan.stops:
            *_, before_s, last_s = job.ends_since(worker, since_s, made_s)
            last = max(a.iteration for a in job.arrivals if a.worker == worker and a.now_s <= made_s)
            predicted.append(last_s + (iteration - last) * (last_s - before_s))
        assert plan.barrier_ticks == in_ticks(max(predicted))
        assert plan.wait_ticks == in_ticks(max(predicted) - min(predicted))
        since_s = fell_s


def test_section_4_1_the_barrier_is_at_the_latest_of_the_picked_times() -> None:
    """ "t_sync = max(Z) represents the time point to impose the synchronization barrier b and d_Z ... represents the
    waiting time overhead". With workers that keep their pace it comes as predicted."""
    job = square_circle_and_diamond()
    job.run(barriers=5)
    for (_, plan), (fell_s, _), waited_s in zip(job.plans, job.barriers, job.waited_s, strict=False):
        assert fell_s == pytest.approx(plan.barrier_ticks / TICKS_PER_S, abs=1e-9)
        assert max(waited_s.values()) == pytest.approx(plan.wait_ticks / TICKS_PER_S, abs=1e-9)


def test_fig_5_the_two_phases_repeat_once_a_synchronization_occurs() -> None:
    """ "Once a synchronization occurs, the two phases repeat again." """
    job = square_circle_and_diamond()
    job.run(barriers=6)
    assert [plan.superstep for _, plan in job.plans[:6]] == list(range(6))
    times_s = [time_s for pair in zip(job.plans, job.barriers, strict=False) for time_s, _ in pair]
    assert times_s == sorted(times_s)  # plan, barrier, plan, barrier, ...


def test_fig_5_a_worker_that_changes_its_speed_is_followed_at_the_next_barrier() -> None:
    """ "even if one of the workers (round orange) has different speeds between synchronizations, ElasticBSP can still
    find the optimal next synchronization time, since it always uses the most recent history of workers." """
    job = square_circle_and_diamond()
    job.run(barriers=3)
    *_, before_s, last_s = job.ends_since(1, job.barriers[0][0], job.plans[1][0])
    assert last_s - before_s == 0.625
    fell_s, _ = job.barriers[1]
    assert fell_s == pytest.approx(job.plans[1][1].barrier_ticks / TICKS_PER_S, abs=1e-9)


def test_section_4_an_erroneous_prediction_is_not_carried_forward() -> None:
    """ "that error will not be carried forward to the next decision. That is because we always use the most
    up-to-date history of worker time intervals". A glitch delays worker 0's fourth iteration by 5 s."""
    job = Job([lambda i: 6.0 if i == 3 else 1.0, steady(1.5)], lookahead=3)
    job.run(barriers=3)
    assert job.barriers[0][0] > job.plans[0][1].barrier_ticks / TICKS_PER_S + 3
    for index in (1, 2):
        assert job.barriers[index][0] == pytest.approx(
            job.plans[index][1].barrier_ticks / TICKS_PER_S, abs=1e-9
        )


def test_section_4_a_worker_that_fails_is_taken_out() -> None:
    """ "if a worker does not behave in a predictable way, say due to a failure, it will be taken out of the
    distributed computation (and will be ignored by our method)." """
    job = square_circle_and_diamond()
    job.lost_at_s[1] = 6.0
    job.run(barriers=3)
    assert {member for _, plan in job.plans[1:] for member in plan.members} == {0, 2}
    assert {worker for worker, _ in job.barriers[-1][1].pushes} == {0, 2}


@settings(max_examples=60)
@given(
    history=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    lookahead=st.integers(1, 4),
)
def test_section_4_1_no_choice_of_one_end_time_per_worker_waits_less(
    history: list[tuple[int, int]], lookahead: int
) -> None:
    """Problem 1: "find a solution Z containing one element from each S^p, such that d_Z is minimized"; section 4.2:
    of those, "the Z* with the earliest (smallest) timestamp is preferred". All R^n are tried; R bounds each stop."""
    planner = ElasticBSP(lookahead=lookahead).at_coordinator()
    events = []
    for worker, (before, interval) in enumerate(history):
        planner.handle(WorkerJoined(now_ticks=0, worker=worker))
        events += [(before + iteration * interval, worker, iteration) for iteration in range(2)]
    actions: list[AnyAction] = []
    for now_ticks, worker, iteration in sorted(events):
        assert not actions
        actions = planner.handle(IterationFinished(now_ticks=now_ticks, worker=worker, iteration=iteration))
    [published] = actions
    assert isinstance(published, PublishPlan)
    ends = [[before + interval * (1 + j) for j in range(1, lookahead + 1)] for before, interval in history]
    least, earliest = min((max(z) - min(z), max(z)) for z in itertools.product(*ends))
    picked = [ends[worker][iteration - 2] for worker, iteration in published.plan.stops]
    assert (max(picked) - min(picked), max(picked)) == (least, earliest)
    assert (published.plan.wait_ticks, published.plan.barrier_ticks) == (least, earliest)


def test_corollary_1_early_synchronization_is_preferred() -> None:
    """Corollary 1, Fig. 9: "If multiple solutions exhibit the same d_Z's, then the solution Z that occurred first
    (chronologically) is selected". Both of these workers end together at 6, 12 and 18."""
    planner = ElasticBSP(lookahead=12).at_coordinator()
    for worker in (0, 1):
        planner.handle(WorkerJoined(now_ticks=0, worker=worker))
    actions: list[AnyAction] = []
    for now_s, worker, iteration in [(1.0, 0, 0), (2.0, 1, 0), (2.0, 0, 1), (4.0, 1, 1)]:
        actions = planner.handle(
            IterationFinished(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration)
        )
    [published] = actions
    assert isinstance(published, PublishPlan)
    assert published.plan.barrier_ticks == in_ticks(6.0)
    assert published.plan.wait_ticks == 0
    assert published.plan.stops == ((0, 5), (1, 2))


def test_section_3_pushes_between_barriers_are_asynchronous_and_the_barrier_aggregates_as_bsp() -> None:
    """ "By the end of each period tau, the synchronization barrier b is posed to all the workers where gradient
    aggregation is carried out on the server, similarly to BSP"."""
    job = square_circle_and_diamond()
    job.run(barriers=3)
    stopping = [(a.worker, a.iteration) for a in job.arrivals if a.stops]
    averaged = [push for _, mean in job.barriers for push in mean.pushes]
    assert sorted(stopping) == sorted(averaged)
    assert all(len(mean.pushes) == 3 for _, mean in job.barriers)
    assert all(set(waited_s) == {0, 1, 2} for waited_s in job.waited_s)


def test_section_3_a_bound_in_r_ensures_that_it_does_not_behave_as_asp() -> None:
    """ "A bound in R also ensures that ElasticBSP does not behave as the ASP model": from the plan on, nobody runs
    more than R iterations before it stops."""
    for lookahead in (1, 2, 5):
        job = square_circle_and_diamond(lookahead)
        job.run(barriers=4)
        for (made_s, plan), (fell_s, _) in zip(job.plans, job.barriers, strict=False):
            for worker in plan.members:
                assert 1 <= len(job.ends_since(worker, made_s, fell_s)) <= lookahead


def test_section_1_each_superstep_permits_a_different_number_of_iterations_per_worker() -> None:
    """ "the time a synchronization barrier is imposed varies and each superstep can permit a different number of
    iterations per worker, offering elasticity"."""
    job = square_circle_and_diamond()
    job.run(barriers=3)
    starts_s = [0.0, *(fell_s for fell_s, _ in job.barriers)]
    counts = [
        tuple(len(job.ends_since(worker, begun_s, fell_s)) for worker in range(3))
        for begun_s, fell_s in itertools.pairwise(starts_s)
    ]
    assert all(len(set(count)) > 1 for count in counts)
    assert len(set(counts)) > 1
