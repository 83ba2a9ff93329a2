"""Changes of the sync model while scripts make calls of all workers, evaluate, leave, join, are lost and are cut.

A change reaches the workers in different iterations, and each of them must pass the change with a push. So the
question is always the same: does a worker that waits for something else still make this push?
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.sim import Cluster, Presence, simulate
from paceline.sync.notation import parse_shards
from paceline.train.generator_states import generators_lock
from tests.support.marks import thorough

MODELS = (
    "bsp",
    "asp",
    "ssp:staleness=1",
    "dssp:lower=1,upper=3",
    "dsps:lower=1,upper=3",
    "drop-stragglers:quorum=2",
    "naive-waiting:delay_s=0.2",
    "elastic-bsp:lookahead=3",
    "spec-sync",
)
PER_SHARD = ("bsp", "asp", "ssp:staleness=1")
"""Models of which each shard may have its own."""

RUNS = 30  # number of random runs in each test


class Job:
    """A script that every worker runs, and what it has done.

    Attributes:
        sync: the sync models of the run.
        changes: the models that the script requests, each with the number of steps before the request.
        requester: the worker whose script requests the changes; None if all of them do.
        calls: what all scripts do after each epoch: "reduce", "barrier", "evaluate" (all workers), "evaluate alone"
            (the main worker); or "begin" for a barrier at the beginning of each epoch.
        extends: the epoch after which the scripts add parameters; -1 if they do not.
        leaver: the worker whose script ends after its first epoch; None if there is none.
        used: item -> how often it was used.
        ended: number of workers whose scripts have ended.
    """

    def __init__(self, sync: str, *, items: int = 60, batch: int = 4, epochs: int = 3) -> None:
        self.sync, self.items, self.batch, self.epochs = sync, items, batch, epochs
        self.changes: list[tuple[str, int]] = []
        self.requester: int | None = None
        self.calls: list[str] = ["reduce"]
        self.extends = -1
        self.leaver: int | None = None
        self.joint = False
        self.shards = 1
        self.cut_at_s: list[float] = []
        self.cluster = Cluster(compute_s=[1.0, 2.0, 3.0], latency_s=0.001)
        self.used: Counter[int] = Counter()
        self.ended = 0

    def train(self) -> None:
        with generators_lock:
            torch.manual_seed(0)
            model, added = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        data = TensorDataset(torch.ones(self.items, 2), torch.arange(self.items))
        worker, steps, extended = paceline.worker_index(), 0, False
        requests = list(self.changes) if self.requester in (None, worker) else []
        for epoch in paceline.epochs(self.epochs):
            if "begin" in self.calls:
                paceline.barrier()
            for x, index in paceline.distribute(DataLoader(data, batch_size=self.batch)):
                if requests and steps >= requests[0][1]:
                    paceline.set_sync(parse_shards(requests.pop(0)[0]))
                optimizer.zero_grad()
                y = model(x) + added(x) if extended else model(x)
                y.square().mean().backward()
                optimizer.step()
                steps += 1
                self.used.update(index.tolist())
            if self.extends == epoch and not extended:
                model.added, extended = added, True
                optimizer.add_param_group({"params": added.parameters()})
            self._call(model)
            if worker == self.leaver:
                break
        self.ended += 1

    def _call(self, model: nn.Module) -> None:
        if "reduce" in self.calls:
            paceline.reduce(1.0)
        if "evaluate" in self.calls or ("evaluate alone" in self.calls and paceline.is_main()):
            with paceline.evaluating(model):
                pass
        if "barrier" in self.calls:
            paceline.barrier()

    def run(self, **options: Any) -> Any:
        return simulate(
            self.cluster,
            self.sync,
            train_fn=self.train,
            joint_batch=self.joint,
            shards=self.shards,
            cut_at_s=self.cut_at_s,
            **options,
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if name != "used")


def random_life(draw: random.Random, *, joins: bool) -> Presence:
    """A worker that is lost, or that joins late or comes back if it may."""
    at_s = draw.uniform(0.5, 9.0)
    lives = [Presence(), Presence(lost_at_s=at_s)]
    if joins:
        lives += [Presence(joins_at_s=at_s), Presence(lost_at_s=at_s, back_after_s=draw.uniform(0.5, 4.0))]
    return draw.choice(lives)


def random_job(draw: random.Random) -> Job:
    """A job with one to three changes, near the ends of epochs more often than elsewhere."""
    workers, joint = draw.randint(2, 4), draw.random() < 0.3
    batch = draw.randint(workers, 10) if joint else draw.randint(1, 5)
    items = draw.randint(batch * (1 if joint else workers), 40)
    job = Job("bsp", items=items, batch=batch, epochs=draw.randint(1, 3))
    job.joint, job.shards = joint, draw.choice([1, 1, 2])
    usable = [model for model in MODELS if workers > 2 or "quorum" not in model]

    def models() -> str:
        if job.shards == 2 and draw.random() < 0.3:
            return "|".join(draw.choice(PER_SHARD) for _ in range(2))
        return draw.choice(usable)

    per_epoch = max(1, items // batch // (1 if joint else workers))
    job.sync, step = draw.choice(["bsp", "bsp", models()]), 0
    for _ in range(draw.randint(1, 3)):
        step += draw.choice([1, max(1, per_epoch - 1), per_epoch, draw.randint(1, 2 * per_epoch)])
        job.changes.append((models(), step))
    if draw.random() < 0.7:  # the changes are those of a schedule
        job.sync = ",".join([f"{job.sync}@0", *(f"{sync}@{step}" for sync, step in job.changes)])
        job.changes = []
    job.requester = draw.choice([None, 0, draw.randrange(workers)])
    job.calls = draw.choice([["reduce"], ["barrier"], ["reduce", "barrier"], ["begin"], []])
    job.calls = job.calls + draw.choice([[], [], ["evaluate"], ["evaluate alone"]])
    job.extends = draw.choice([-1, -1, 0, 1])
    job.leaver = draw.choice([None, None, draw.randrange(workers)])
    some_leave = draw.random() < 0.4
    job.cluster = Cluster(
        compute_s=[draw.choice([float(draw.randint(1, 5)), draw.uniform(0.5, 3.0)]) for _ in range(workers)],
        presence={each: random_life(draw, joins=job.extends < 0) for each in range(1, workers)}
        if some_leave
        else {},
        latency_s=draw.choice([0.0, 0.001, 0.3]),
    )
    job.cut_at_s = [draw.uniform(0.5, 10.0) for _ in range(draw.choice([0, 0, 1, 2]))]
    return job


@pytest.mark.thorough
@pytest.mark.parametrize("first", [*range(3), *thorough(*range(3, 103))])
def test_random_jobs_with_changes_and_calls_come_to_their_end(first: int) -> None:
    """Nobody waits for ever, whoever else does what. A joint batch uses every item once in each epoch."""
    for seed in range(RUNS * first, RUNS * (first + 1)):
        job = random_job(random.Random(seed))
        try:
            job.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {job}") from error
        undisturbed = not job.cluster.presence and job.leaver is None
        if undisturbed:
            assert job.ended == job.cluster.workers, seed
        if undisturbed and job.joint:
            assert job.used == Counter(dict.fromkeys(range(job.items), job.epochs)), seed


@pytest.mark.parametrize(
    ("sync", "latency_s"), [("bsp", 0.3), ("asp", 0.001), *thorough(("bsp", 0.001), ("asp", 0.3))]
)
@pytest.mark.parametrize("first", [1, *thorough(2, 3, 4, 5)])
def test_a_worker_may_join_between_two_calls_of_the_others(sync: str, latency_s: float, first: int) -> None:
    """It begins in the epoch that they have ended, and makes the calls alone that they have behind them."""
    for quarters in range(first, 60, 5):  # in all phases of an iteration
        job = Job(sync, items=20, batch=5, epochs=4)
        job.calls = ["reduce", "evaluate alone", "barrier"]
        presence = {1: Presence(joins_at_s=quarters / 4)}
        job.cluster = Cluster(compute_s=[1.0, 0.3], presence=presence, latency_s=latency_s)
        job.run()
        assert job.ended == 2, quarters


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("compute_s", [(1.0, 2.0, 3.0), *thorough(((1.0, 1.0, 5.0),))])
@pytest.mark.parametrize("after", ["asp", "elastic-bsp:lookahead=3", "drop-stragglers:quorum=2"])
def test_a_worker_in_a_call_passes_a_change_that_it_learns_of_there(
    after: str, compute_s: tuple[float, ...], joint: bool
) -> None:
    """An epoch has 5 steps or, with joint batches, 15. The change is requested at the beginning of its last one."""
    job = Job(f"bsp@0,{after}@{14 if joint else 4}")
    job.joint, job.cluster = joint, Cluster(compute_s=compute_s, latency_s=0.001)
    job.run()
    assert job.ended == 3


@pytest.mark.parametrize("call", ["barrier", "begin", "extend"])
@pytest.mark.parametrize("loses", [False, True])
def test_it_does_so_in_every_call_of_all_workers(call: str, loses: bool) -> None:
    """Also if another worker is lost meanwhile."""
    job = Job("bsp@0,asp@4")
    job.calls, job.extends = [call], 0 if call == "extend" else -1
    if loses:
        presence = {2: Presence(lost_at_s=15.5)}
        job.cluster = Cluster(compute_s=[1.0, 2.0, 3.0], presence=presence, latency_s=0.001)
    job.run()
    assert job.ended == (2 if loses else 3)


def test_a_script_may_request_a_model_that_needs_several_workers() -> None:
    """Each simulated worker knows how many workers the run has."""
    job = Job("bsp")
    job.changes = [("drop-stragglers:quorum=3", 4)]
    job.run()
    assert job.ended == 3
