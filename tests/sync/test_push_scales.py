"""Factors of pushes that depend on their staleness, and the training that results, which theory predicts exactly.

On a quadratic with curvature h, SGD with gradient noise of variance v makes updates that are linear in the earlier
weights and in the noise: x[k + 1] = x[k] - a[k] (h x[k - tau[k]] + noise[k]). Here, a[k] is the learning rate times
the factor of update k, and tau[k] is its staleness. So the second moment of x can be computed from the recorded
delays and factors, without sampling. Each coordinate of a parameter is an independent sample.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.core.messages import CutAgreed, CutTaken, ShardState
from paceline.core.requests import Send
from paceline.core.shard import Shard
from paceline.sim import Cluster, SimResult, simulate
from paceline.sync import ASP, SSP, SyncModel
from paceline.sync.actions import ApplyPush
from paceline.sync.conditions import PUSH_SCALES
from paceline.sync.events import Change, PullRequested, PushReceived, WorkerFinished, WorkerJoined, WorkerLost
from paceline.sync.notation import parse
from paceline.trace import replay
from paceline.trace.recording import Header, Memory

SAMPLES = 20_000
CURVATURE, NOISE, RATE = 0.7, 0.5, 0.4
UNEQUAL = Cluster(compute_s=[1.0, 1.3, 1.9, 3.1, 11.0])


@pytest.mark.parametrize(
    ("scale", "n", "tau", "factor"),
    [
        ("1", 4, 9, 1.0),
        ("1/n", 4, 9, 0.25),
        ("1/tau", 4, 0, 1.0),
        ("1/tau", 4, 1, 1.0),
        ("1/tau", 4, 8, 0.125),
        ("n/tau", 4, 3, 1.0),
        ("n/tau", 4, 4, 1.0),
        ("n/tau", 4, 8, 0.5),
    ],
)
def test_the_factor_follows_from_the_staleness(scale: str, n: int, tau: int, factor: float) -> None:
    assert PUSH_SCALES[scale](n, tau) == factor
    shard = ASP(push_scale=scale).at_shard()
    for worker in range(n):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    push = PushReceived(now_ticks=1, worker=0, iteration=0, staleness=tau)
    assert shard.handle(push) == [ApplyPush(0, 0, factor)]


def train() -> None:
    """Take steps on `SAMPLES` independent quadratics, which are the coordinates of one parameter."""
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(torch.ones(SAMPLES, dtype=torch.float64)))
    (x,) = model.parameters()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD([x], lr=RATE), model=model)
    generator = torch.Generator().manual_seed(1 + paceline.worker_index())
    for _ in range(12):
        optimizer.zero_grad()
        noise = math.sqrt(NOISE) * torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
        (0.5 * CURVATURE * x.square() + noise * x).sum().backward()
        optimizer.step()


def applied(result: SimResult) -> list[tuple[int, float]]:
    """Return the staleness and the factor of each update, as recorded."""
    return [
        (staleness, action.scale)
        for trace in result.trace
        for entry in trace.entries
        for action, (_, _, staleness) in zip(
            (action for action in entry.actions if isinstance(action, ApplyPush)),
            entry.staleness,
            strict=True,
        )
    ]


def second_moment(updates: list[tuple[int, float]]) -> float:
    """Return the expected square of x after these updates, starting from x = 1."""
    mean = [1.0]
    of_noise = [np.zeros(len(updates))]  # coefficients of the noise of each update
    for k, (tau, factor) in enumerate(updates):
        rate = RATE * factor
        mean.append(mean[k] - rate * CURVATURE * mean[k - tau])
        coefficients = of_noise[k] - rate * CURVATURE * of_noise[k - tau]
        coefficients[k] -= rate
        of_noise.append(coefficients)
    return mean[-1] ** 2 + NOISE * float(np.square(of_noise[-1]).sum())


@pytest.mark.parametrize(
    "sync",
    [
        *(ASP(push_scale=scale) for scale in PUSH_SCALES),
        SSP(staleness=1, push_scale="1/tau"),
        SSP(staleness=4, execution="lazy", push_scale="n/tau"),
    ],
    ids=str,
)
def test_the_mean_loss_is_what_theory_predicts_for_the_recorded_delays(sync: SyncModel) -> None:
    result = simulate(UNEQUAL, sync, train_fn=train, record=True, hyperparameters="raw")
    assert result.state_dict is not None
    updates = applied(result)
    assert len(updates) == 60
    assert max(tau for tau, _ in updates) > 5
    scale = PUSH_SCALES[getattr(sync, "push_scale", "1")]
    # n stays 5, although workers leave when they have taken their steps
    assert all(factor == scale(5, tau) for tau, factor in updates)
    squares = result.state_dict["x"].square()
    error = float(squares.std()) / math.sqrt(SAMPLES)
    assert float(squares.mean()) == pytest.approx(second_moment(updates), abs=3 * error)
    for trace in result.trace:
        assert replay(trace) == []


def test_the_loss_is_lower_if_outdated_gradients_count_less() -> None:
    moments = {
        scale: second_moment(applied(simulate(UNEQUAL, ASP(push_scale=scale), train_fn=train, record=True)))
        for scale in ("1", "1/tau", "n/tau")
    }
    assert moments["1/tau"] < moments["n/tau"] <= moments["1"]


# -- n: the largest number of workers that have been present at once ------------------------------------------


class AtShard:
    """Drives the core of one shard by hand."""

    def __init__(self, sync: str = "asp:push_scale=1/n", at_once: int = 0, *, replays: bool = False) -> None:
        self.memory = Memory(Header(sync=sync, host="shard"))
        state = ShardState(at_once=at_once)
        self.shard = Shard(0, [parse(sync)], recorder=self.memory, state=state, replays=replays)

    def join(self, *workers: int, pulls: bool = False) -> None:
        for worker in workers:
            self.shard.handle(WorkerJoined(now_ticks=0, worker=worker, pulls=pulls))
            if pulls:
                self.shard.handle(PullRequested(now_ticks=0, worker=worker, iteration=-1))

    def leave(self, *workers: int, lost: bool = False) -> None:
        for worker in workers:
            kind = WorkerLost if lost else WorkerFinished
            self.shard.handle(kind(now_ticks=0, worker=worker))

    def factor(self, worker: int, **flags: Any) -> float:
        """Return the factor of the worker's next push."""
        iteration = self.shard.sync.order.label[worker]
        self.shard.handle(PushReceived(now_ticks=0, worker=worker, iteration=iteration, **flags))
        [factor] = [a.scale for a in self.memory.trace.entries[-1].actions if isinstance(a, ApplyPush)]
        self.shard.handle(PullRequested(now_ticks=0, worker=worker, iteration=iteration))
        return factor


@pytest.mark.parametrize("lost", [True, False])
def test_the_last_workers_of_a_run_push_with_the_factor_of_all(*, lost: bool) -> None:
    """FluentPS, Algorithm 1, line 15: w += g/N; Table II: "The total number of workers is N"."""
    shard = AtShard()
    shard.join(0, 1, 2, 3)
    assert shard.factor(0) == 1 / 4
    shard.leave(1, 2, lost=lost)
    assert shard.factor(0) == 1 / 4
    shard.leave(3, lost=lost)
    assert shard.factor(0) == 1 / 4


def test_a_worker_that_joins_again_is_not_counted_twice() -> None:
    shard = AtShard()
    shard.join(0, 1, 2)
    shard.leave(2, lost=True)
    shard.join(2, pulls=True)
    assert shard.factor(2) == 1 / 3
    shard.leave(1, lost=True)
    shard.join(7, pulls=True)
    assert shard.factor(7) == 1 / 3
    shard.join(1, pulls=True)
    assert shard.factor(7) == 1 / 4


def test_a_change_of_the_model_keeps_the_number_of_workers() -> None:
    shard = AtShard("asp")
    shard.join(0, 1, 2)
    shard.leave(2)
    change = Change(number=1, members=(0, 1), sync="ssp:staleness=3,push_scale=1/n")
    assert shard.factor(0, change=change) == 1.0
    assert shard.factor(1, change=change) == 1.0
    assert shard.factor(0) == 1 / 3


def test_a_resumed_run_begins_with_the_number_of_its_job() -> None:
    before = AtShard()
    before.join(0, 1, 2, 3)
    before.leave(2, 3)
    requests = before.shard.cut(CutAgreed(1, None, ()))
    [taken] = [r.message for r in requests if isinstance(r, Send) and isinstance(r.message, CutTaken)]
    assert taken.state.at_once == 4
    after = AtShard(at_once=taken.state.at_once)
    after.join(0, 1)
    assert after.factor(0) == 1 / 4
    after.join(2, 3, 4, pulls=True)
    assert after.factor(0) == 1 / 5
    assert replay(after.memory.trace) == []


def test_a_trace_from_before_the_number_was_kept_is_replayed_as_it_was_recorded() -> None:
    shard = AtShard(replays=True)  # it records no numbers, and counts the live workers
    shard.join(0, 1, 2, 3)
    factors = [shard.factor(0)]
    shard.leave(1, 2)
    factors.append(shard.factor(0))
    assert factors == [1 / 4, 1 / 2]
    assert all(getattr(entry.event, "at_once", None) is None for entry in shard.memory.trace.entries)
    assert replay(shard.memory.trace) == []
