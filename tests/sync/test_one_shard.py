"""Rennala SGD and Ringmaster ASGD: what their papers promise, and why they run on one shard only.

Tyurin and Richtarik, "Optimal time complexities of parallel stochastic optimization methods under a fixed computation
model", NeurIPS 2023. Maranjyan, Tyurin and Richtarik, "Ringmaster ASGD: the first asynchronous SGD with optimal time
complexity", ICML 2025.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from paceline.core.messages import RestartOrdered
from paceline.core.worker import Worker
from paceline.errors import ConfigurationError
from paceline.sim import Cluster, SimResult, simulate
from paceline.sync import Rennala, Ringmaster, SyncModel, parse
from paceline.sync.actions import AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush, RestartWorker
from paceline.sync.events import (
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.notation import require_shards
from paceline.sync.ringmaster import Filter
from paceline.sync.schedule import read_schedule
from paceline.testing import check
from paceline.testing.checking import explore
from paceline.testing.small_job import SmallJob
from paceline.trace import replay
from tests.support.marks import thorough

SEEDS = [*range(5), *thorough(*range(5, 40))]
EVERY_MODEL = [
    Rennala(batch=1),
    Rennala(batch=2),
    Rennala(batch=3),
    Ringmaster(threshold=1),
    Ringmaster(threshold=2),
    Ringmaster(threshold=1, stop=True),
    Ringmaster(threshold=2, stop=True),
]
SEARCHED = [(Rennala(batch=2), 3), (Ringmaster(threshold=1, stop=True), 2)]
"""(model, number of iterations). `make thorough` searches three iterations of the others, and of the last model."""


def random_times(seed: int) -> list[int]:
    """Return a whole number of seconds for each of up to eight workers, often with equal ones."""
    draw = random.Random(seed)
    return [draw.choice((1, 2, 3, 5, 7, 12, 40)) for _ in range(draw.randrange(1, 9))]


def run(times: list[int], sync: SyncModel, until_s: float) -> SimResult:
    return simulate(Cluster(compute_s=times), sync, None, until_s=until_s, record=True)


def update_times(result: SimResult) -> list[float]:
    """Return the time of each update at the shard."""
    return [
        result.trace[0].time_s(entry)
        for entry in result.trace[0].entries
        for action in entry.actions
        if isinstance(action, ApplyPush | ApplyMean)
    ]


# -- the exhaustive search -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "iterations"),
    [*SEARCHED, *thorough(*((sync, 3) for sync in EVERY_MODEL if (sync, 3) not in SEARCHED))],
    ids=str,
)
def test_they_keep_the_promises_of_every_model(sync: SyncModel, iterations: int) -> None:
    assert check(sync, iterations=iterations).states > 2000


class OneByOne(Filter):
    """Applies each push as a mean of one push, because the search compares the means of the shards."""

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        actions = super().pushed(push)
        if isinstance(actions[0], DropPush):
            return actions
        key = push.worker, push.iteration
        return [HoldPush(*key), ApplyMean((key,))]


class RingmasterOfMeans(Ringmaster, frozen=True):
    def at_shard(self, seed: int = 0, shard: int = 0) -> OneByOne:
        return OneByOne(self.threshold)


@pytest.mark.parametrize("sync", [Rennala(batch=2), RingmasterOfMeans(threshold=1)], ids=str)
def test_on_two_shards_the_search_finds_a_push_that_only_one_of_them_applies(sync: SyncModel) -> None:
    job = SmallJob(sync, workers=2, shards=2, iterations=2, commits=True, agree=True)
    with pytest.raises(AssertionError, match="averaged"):
        explore(job)


@pytest.mark.parametrize("sync", ["rennala:batch=2", "ringmaster:threshold=2"])
def test_several_shards_are_refused(sync: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a single shard, but this job has 2"):
        simulate(Cluster(compute_s=[1.0, 2.0], servers=2), sync, 5)
    with pytest.raises(ConfigurationError, match="needs a single shard, but this job has 3"):
        read_schedule(f"asp@0,{sync}@5").require_runnable(workers=2, shards=3)
    require_shards([parse(sync)], 1)


# -- Rennala ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_batch_is_collected_as_soon_as_the_workers_have_computed_b_gradients(seed: int) -> None:
    times = random_times(seed)
    batch = random.Random(-seed).randrange(1, 20)
    expected = next(t for t in range(10_000) if sum(t // tau for tau in times) >= batch)
    result = run(times, Rennala(batch=batch), expected + 0.5)
    assert update_times(result) == [expected]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_further_batch_begins_when_a_worker_has_finished_its_outdated_gradient(seed: int) -> None:
    """Worker i's first gradient on new weights takes tau_i more than the rest of the one that it is computing."""
    times = random_times(seed)
    batch = random.Random(-seed).randrange(1, 12)
    result = run(times, Rennala(batch=batch), 300)
    found = update_times(result)
    begun, fresh = 0, [0] * len(times)  # when each worker pulls the current weights
    for end in found:
        assert end == next(
            t
            for t in range(begun, 10_000)
            if sum(max(0, t - at) // tau for at, tau in zip(fresh, times, strict=True)) >= batch
        )
        begun = int(end)
        # A worker whose push completes the batch pulls at once; at equal times, the pushes are in the trace's order.
        fresh = [next_pull(result, worker, end) for worker in range(len(times))]
    assert set(result.staleness) <= {0}
    assert replay(result.trace[0]) == []


def next_pull(result: SimResult, worker: int, update_s: float) -> int:
    """Return the time of the worker's first answer that contains the update at this time."""
    updated = False
    for entry in result.trace[0].entries:
        event = entry.event
        now_s = result.trace[0].time_s(entry)
        if now_s == update_s and any(isinstance(action, ApplyMean) for action in entry.actions):
            updated = True
        if updated and isinstance(event, PullRequested) and event.worker == worker:
            return int(now_s)
    return 10_000


# -- Ringmaster ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_applied_delay_is_below_r_and_r_updates_take_at_most_the_time_of_the_paper(
    seed: int, stop: bool
) -> None:
    times = random_times(seed)
    threshold = random.Random(-seed).randrange(1, 12)
    result = run(times, Ringmaster(threshold=threshold, stop=stop), 1000)
    assert max(result.staleness) < threshold
    sorted_times = sorted(times)
    most_s = min(
        2 * (1 + Fraction(threshold, m)) / (sum(Fraction(1, tau) for tau in sorted_times[:m]) / m)
        for m in range(1, len(times) + 1)
    )
    moments = [0.0, *update_times(result)]
    assert all(b - a <= most_s for a, b in zip(moments, moments[threshold:], strict=False))
    assert len(moments) > threshold
    assert all(replay(trace) == [] for trace in result.trace)


def test_a_computation_is_stopped_as_soon_as_its_delay_reaches_r_and_may_be_stopped_again() -> None:
    result = run([1, 10], Ringmaster(threshold=3, stop=True), 9.5)
    orders = [
        (result.trace[1].time_s(entry), action)
        for entry in result.trace[1].entries
        for action in entry.actions
        if isinstance(action, RestartWorker)
    ]
    assert orders == [(3.0 * k, RestartWorker(1, 0, k - 1)) for k in (1, 2, 3)]
    assert result.restarts == 3
    assert result.measures.updates == 9


def test_a_restarted_computation_may_be_stopped_before_its_delay_reaches_r() -> None:
    """Two updates are applied at 2 s. The first one stops worker 2, the second one is counted, and pulled, too."""
    shard = run([1, 2, 3], Ringmaster(threshold=2, stop=True), 3.0).trace[0]
    restarts = [
        (shard.time_s(entry), entry.version)
        for entry in shard.entries
        if isinstance(entry.event, PullRepeated) and entry.event.worker == 2
    ]
    assert restarts == [(2.0, 3), (3.0, 4)]


def test_without_stops_an_outdated_gradient_is_finished_and_dropped() -> None:
    result = run([1, 10], Ringmaster(threshold=3), 10.5)
    dropped = [
        (result.trace[0].time_s(entry), action)
        for entry in result.trace[0].entries
        for action in entry.actions
        if isinstance(action, DropPush)
    ]
    assert dropped == [(10.0, DropPush(1, 0))]


def test_a_push_that_crosses_the_order_to_restart_counts_as_dropped() -> None:
    coordinator = Ringmaster(threshold=1, stop=True).at_coordinator()
    assert coordinator is not None
    for worker in range(3):
        coordinator.handle(WorkerJoined(now_ticks=0, worker=worker))
    orders = coordinator.handle(IterationFinished(now_ticks=1, worker=0, iteration=0))
    assert orders == [RestartWorker(1, 0, 0), RestartWorker(2, 0, 0)]
    # Worker 1 had pushed before the order came: its gradient was outdated, so worker 2 need not be stopped again.
    assert coordinator.handle(IterationFinished(now_ticks=1, worker=1, iteration=0)) == []
    finished = IterationFinished(now_ticks=2, worker=2, iteration=0, attempt=1)
    assert coordinator.handle(finished) == []  # workers 0 and 1 have yet to start
    assert coordinator.handle(IterationStarted(now_ticks=2, worker=0, iteration=1)) == [
        RestartWorker(0, 1, 0)
    ]
    coordinator.handle(WorkerLost(now_ticks=2, worker=1))
    coordinator.validate()


def test_a_worker_ignores_an_order_to_restart_an_attempt_that_it_has_given_up() -> None:
    core = Worker(read_schedule("ringmaster:threshold=1,stop=true"), workers=2, shards=1, servers=1)
    assert core.handle(RestartOrdered(0, 0)) != []
    core.pull_again()
    core.handle(RestartOrdered(0, 0))  # a repetition
    assert not core.restart_ordered
    core.handle(RestartOrdered(0, 1))
    assert core.restart_ordered
