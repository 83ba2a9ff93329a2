"""How stale a gradient may be under ElasticBSP, in simulated runs.

Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine Learning, 2021,
section 3: "a small iteration difference beta exists that is defined within the R future intervals. The parameter beta
serves as the upper bound s' defined in some period tau (a superstep)". The paper does not say which number this is.
From the plan to the barrier, each worker ends 1 to R iterations, so there beta = R - 1. But a superstep begins with
the monitoring phase, until each worker has pushed twice. If an iteration takes from a to b seconds, a worker ends 2 to
floor(2 b / a) iterations in this phase. So over a whole superstep, the numbers of iterations differ by at most
R - 1 + floor(2 b / a) - 2, for which R alone is no bound.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Cluster, simulate
from paceline.sim import Uniform
from paceline.sync.actions import ApplyMean, PublishPlan
from paceline.sync.events import IterationFinished


class Superstep:
    """What happened from one barrier to the next.

    Attributes:
        monitored: worker -> number of iterations that ended before the plan.
        planned: worker -> number of iterations that ended after it.
        begin: worker -> the first iteration whose weights were pulled after the plan.
    """

    def __init__(self) -> None:
        self.monitored: Counter[int] = Counter()
        self.planned: Counter[int] = Counter()
        self.begin: dict[int, int] = {}

    @property
    def difference(self) -> int:
        """The iteration difference d^iter of section 4.2: of the iterations "since last synchronization"."""
        total = self.monitored + self.planned
        return max(total.values()) - min(total.values())


class Run:
    """A simulated run.

    Attributes:
        supersteps: those that were completed.
        stalest_planned: largest staleness of a gradient that was computed on weights pulled after the plan.
    """

    def __init__(self, cluster: Cluster, lookahead: int, until_s: float, seed: int = 0) -> None:
        sync = f"elastic-bsp:lookahead={lookahead}"
        shard, coordinator = simulate(cluster, sync, None, seed, until_s=until_s, record=True).trace
        self.supersteps = [Superstep()]
        ended: Counter[int] = Counter()
        stopped: set[int] = set()
        for entry in coordinator.entries:
            event = entry.event
            if not isinstance(event, IterationFinished):
                continue
            now, worker = self.supersteps[-1], event.worker
            (now.planned if now.begin else now.monitored)[worker] += 1
            ended[worker] += 1
            if any(isinstance(action, PublishPlan) for action in entry.actions):
                # The worker that ends the monitoring phase pulls after the plan. The others are computing.
                now.begin = {w: ended[w] + (w != worker) for w in range(cluster.workers)}
            if event.superstep is not None:
                stopped.add(worker)
            if len(stopped) == cluster.workers:
                stopped.clear()
                self.supersteps.append(Superstep())
        del self.supersteps[-1]

        self.stalest_planned = 0
        index = updates = 0  # since the last barrier
        for each in shard.entries:
            for worker, iteration, staleness in each.staleness:
                assert staleness <= updates  # the weights contain all updates up to the last barrier
                if index < len(self.supersteps) and iteration >= self.supersteps[index].begin[worker]:
                    self.stalest_planned = max(self.stalest_planned, staleness)
            updates += bool(each.staleness)
            if any(isinstance(action, ApplyMean) for action in each.actions):
                index, updates = index + 1, 0


@settings(max_examples=40)
@given(
    machines=st.lists(st.tuples(st.integers(4, 40), st.integers(0, 20)), min_size=2, max_size=5),
    lookahead=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_no_difference_and_no_staleness_exceeds_the_bound(
    machines: list[tuple[int, int]], lookahead: int, seed: int
) -> None:
    # No two pushes come at the same moment: of a push at the moment of the plan, it would depend on the order of the
    # messages whether it follows the plan.
    lows = [least + math.pi / 1000 * worker for worker, (least, _) in enumerate(machines)]
    highs = [low + spread for low, (_, spread) in zip(lows, machines, strict=True)]
    cluster = Cluster(compute_s=[Uniform(low=low, high=high) for low, high in zip(lows, highs, strict=True)])
    shortest, longest = min(lows), max(highs)
    run = Run(cluster, lookahead, until_s=2 * (lookahead + 3) * longest, seed=seed)
    assert run.supersteps
    for superstep in run.supersteps:
        assert min(superstep.planned.values()) >= 1
        assert max(superstep.planned.values()) <= lookahead
        assert min(superstep.monitored.values()) >= 2
        assert max(superstep.monitored.values()) <= 2 * longest / shortest
        assert superstep.difference <= lookahead - 1 + math.floor(2 * longest / shortest) - 2
    assert run.stalest_planned <= (lookahead - 1) * (cluster.workers - 1)


@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("lookahead", [2, 7])
def test_the_bounds_on_what_follows_the_plan_are_attained(lookahead: int, workers: int) -> None:
    """The others end R iterations just before the slowest, which began its iteration with the plan, ends one."""
    slow_s = lookahead + Fraction(1, 8)
    run = Run(Cluster(compute_s=[slow_s, *[1] * (workers - 1)]), lookahead, until_s=float(4 * slow_s))
    first = run.supersteps[0]
    assert first.planned == {0: 1, **dict.fromkeys(range(1, workers), lookahead)}
    assert run.stalest_planned == (lookahead - 1) * (workers - 1)


@pytest.mark.parametrize("ratio", [10, 50])
def test_a_lookahead_of_1_does_not_bound_the_difference_of_a_superstep(ratio: int) -> None:
    """The bound that includes the monitoring phase is attained."""
    run = Run(Cluster(compute_s=[Fraction(ratio) + Fraction(1, 8), 1]), lookahead=1, until_s=4 * ratio)
    assert run.supersteps[0].difference == 2 * ratio - 2
