"""Random legal lives of one shard's machine, for every model, against a deliberately dumb oracle.

The oracle is told nothing but the events, and works out from all of them, each time anew, who must wait and which
updates the last event is due to bring about. What every model promises besides is checked in `world.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.sync import ASP, BSP, SSP, ElasticBSP, SyncModel
from paceline.sync.actions import ApplyMean, ApplyPush
from paceline.sync.events import (
    AnyEvent,
    PullRequested,
    PushReceived,
    Stop,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

from .world import MOST_WORKERS, Life

Events = Sequence[AnyEvent]


class Oracle(NamedTuple):
    """What a model ought to do, by the letter."""

    must_wait: Callable[[Events], set[int]]
    updates_due: Callable[[Events], list[ApplyPush | ApplyMean]]  # after the last of the events


class Told(NamedTuple):
    """What the events say of one live worker."""

    pushed: int  # c_p
    asks: bool  # has it asked for weights since its last push
    first: int  # the first superstep that it may be a member of


def told(events: Events) -> tuple[dict[int, Told], int]:
    """What the events say of the live workers, and min c; while nobody is live, it is what it was."""
    workers: dict[int, Told] = {}
    slowest = 0
    for event in events:
        match event:
            case WorkerJoined():
                workers[event.worker] = Told(slowest, asks=False, first=event.superstep)
            case WorkerLost() | WorkerFinished():
                del workers[event.worker]
            case PushReceived():
                its = workers[event.worker]
                workers[event.worker] = its._replace(pushed=its.pushed + 1, asks=False)
            case PullRequested():
                workers[event.worker] = workers[event.worker]._replace(asks=True)
        slowest = min((its.pushed for its in workers.values()), default=slowest)
    return workers, slowest


# -- ASP and SSP(s): each push is applied; a worker goes on iff c_p - min c <= s, at every moment -----------------


def bounded(staleness: float) -> Oracle:
    def must_wait(events: Events) -> set[int]:
        workers, slowest = told(events)
        return {worker for worker, its in workers.items() if its.asks and its.pushed - slowest > staleness}

    return Oracle(must_wait, applied_on_arrival)


def applied_on_arrival(events: Events) -> list[ApplyPush | ApplyMean]:
    match events[-1]:
        case PushReceived(worker=worker, iteration=iteration, empty=False):
            return [ApplyPush(worker, iteration)]
        case _:
            return []


# -- BSP: a round is complete when all live workers have pushed it; then its mean is applied, once ----------------


def means_of_rounds(events: Events) -> list[ApplyPush | ApplyMean]:
    """The rounds that were not complete before the last event and are now, or that nobody is left to complete."""
    before, now = complete_rounds(events[:-1]), complete_rounds(events)
    return [ApplyMean(tuple(sorted(now[rnd]))) for rnd in sorted(now) if rnd not in before and now[rnd]]


def complete_rounds(events: Events) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(generation, round) -> its pushes; a generation ends when nobody is live any more."""
    rounds: dict[tuple[int, int], list[tuple[int, int]]] = {}
    over: set[tuple[int, int]] = set()
    generation = 0
    for index, event in enumerate(events):
        workers, slowest = told(events[: index + 1])
        if isinstance(event, PushReceived):
            rnd = generation, workers[event.worker].pushed - 1
            rounds.setdefault(rnd, [])
            if not event.empty:
                rounds[rnd].append((event.worker, event.iteration))
        over |= {rnd for rnd in rounds if rnd[1] < slowest or not workers}
        generation += not workers
    return {rnd: pushes for rnd, pushes in rounds.items() if rnd in over}


# -- ElasticBSP: flagged pushes wait until every member has sent one or has left ----------------------------------


def stopped(events: Events) -> set[int]:
    workers, _ = told(events)
    last = {event.worker: event for event in events if isinstance(event, PushReceived)}
    complete = complete_supersteps(events)
    return {
        worker
        for worker, its in workers.items()
        if its.asks and (stop := last[worker].stop) is not None and stop.superstep not in complete
    }


def means_of_supersteps(events: Events) -> list[ApplyPush | ApplyMean]:
    if isinstance(events[-1], PushReceived) and events[-1].stop is None:
        return applied_on_arrival(events)
    before, now = complete_supersteps(events[:-1]), complete_supersteps(events)
    return [ApplyMean(tuple(sorted(now[step]))) for step in now if step not in before and now[step]]


def complete_supersteps(events: Events) -> dict[int, list[tuple[int, int]]]:
    """Superstep -> its pushes, for those that nobody has yet to stop for; in the order of their first pushes."""
    workers, _ = told(events)
    flagged: dict[int, list[PushReceived]] = {}
    for event in events:
        if isinstance(event, PushReceived) and event.stop is not None:
            flagged.setdefault(event.stop.superstep, []).append(event)
    return {
        superstep: [(push.worker, push.iteration) for push in pushes if not push.empty]
        for superstep, pushes in flagged.items()
        if (stop := pushes[0].stop) is not None
        and not {m for m in stop.members if m in workers and workers[m].first <= superstep}
        - {push.worker for push in pushes}
    }


ORACLES: list[tuple[SyncModel, Oracle]] = [
    (BSP(), Oracle(bounded(0).must_wait, means_of_rounds)),
    (ASP(), bounded(math.inf)),
    (SSP(staleness=0), bounded(0)),
    (SSP(staleness=1), bounded(1)),
    (SSP(staleness=3), bounded(3)),
    (SSP(staleness=math.inf), bounded(math.inf)),
    (ElasticBSP(), Oracle(stopped, means_of_supersteps)),
]

PICK = st.integers(0, 11)


class ShardLife(RuleBasedStateMachine):
    """One machine and its oracle; each rule is one event, or one that is refused."""

    def __init__(self, sync: SyncModel, oracle: Oracle) -> None:
        super().__init__()
        self.life = Life(sync.at_shard())
        self.world = self.life.world
        self.oracle = oracle
        self.superstep = -1
        self.yet_to_stop: dict[int, Stop] = {}  # worker -> the flag for one of its next pushes

    def tell(self, event: AnyEvent) -> None:
        updates = len(self.life.updates)
        self.life.tell(event)
        assert self.life.updates[updates:] == self.oracle.updates_due(self.life.events)

    @precondition(lambda self: len(self.world.phase) < MOST_WORKERS)
    @rule(iteration=st.integers(0, 2))
    def join(self, iteration: int) -> None:
        self.tell(self.world.join(iteration))

    @precondition(lambda self: self.world.gone and len(self.world.phase) < MOST_WORKERS)
    @rule(pick=PICK)
    def join_anew(self, pick: int) -> None:
        worker = self.world.gone[pick % len(self.world.gone)]
        iteration = 100 * len(self.life.events)  # a label that it has not used
        event = WorkerJoined(
            now_s=self.world.now_s, worker=worker, iteration=iteration, superstep=self.superstep + 1
        )
        self.tell(event)

    @precondition(lambda self: self.world.in_phase("computing"))
    @rule(pick=PICK, empty=PICK, flag=st.booleans(), pull=st.booleans())
    def push(self, pick: int, empty: int, flag: bool, pull: bool) -> None:
        computing = self.world.in_phase("computing")
        worker = computing[pick % len(computing)]
        stop = self.yet_to_stop.pop(worker, None) if flag else None
        self.tell(self.world.push(worker, empty=empty == 0, stop=stop))
        if pull:
            self.tell(self.world.pull(worker))

    @precondition(lambda self: self.world.in_phase("pushed"))
    @rule(pick=PICK)
    def pull(self, pick: int) -> None:
        pushed = self.world.in_phase("pushed")
        self.tell(self.world.pull(pushed[pick % len(pushed)]))

    @precondition(lambda self: self.world.phase)
    @rule(pick=PICK, lost=st.booleans())
    def leave(self, pick: int, lost: bool) -> None:
        worker = list(self.world.phase)[pick % len(self.world.phase)]
        self.yet_to_stop.pop(worker, None)
        self.tell(self.world.leave(worker, lost=lost))

    @rule(step_s=st.sampled_from([0.0, 1e-9, 0.5, 1e6]))
    def pass_time(self, step_s: float) -> None:
        self.world.now_s += step_s

    @precondition(lambda self: self.world.phase.keys() - self.yet_to_stop and self.last_superstep_is_open())
    @rule(newest_only=st.booleans())
    def plan(self, newest_only: bool) -> None:
        """The next superstep: its members stop with one of their next pushes. The last one may still be open."""
        free = sorted(self.world.phase.keys() - self.yet_to_stop)
        members = tuple(free[-1:] if newest_only else free)
        self.superstep += 1
        self.yet_to_stop |= dict.fromkeys(members, Stop(superstep=self.superstep, members=members))

    def last_superstep_is_open(self) -> bool:
        """Whoever has yet to stop is waited for: somebody has stopped before it."""
        heard = {event.stop for event in self.life.events if isinstance(event, PushReceived)}
        return heard >= set(self.yet_to_stop.values())

    @rule(pick=PICK)
    def refuse(self, pick: int) -> None:
        events = self.world.refused()
        self.life.refuse(events[pick % len(events)])

    @invariant()
    def those_wait_who_must(self) -> None:
        assert self.world.waiting == self.oracle.must_wait(self.life.events)

    def teardown(self) -> None:
        """Whoever waits goes on when the others have left, one by one."""
        while len(self.world.phase) > 1:
            others = sorted(self.world.phase, key=lambda worker: worker in self.world.waiting)
            self.tell(self.world.leave(others[0], lost=True))
        assert not self.world.waiting


@pytest.mark.parametrize(("sync", "oracle"), ORACLES, ids=[str(sync) for sync, _ in ORACLES])
def test_every_legal_life_agrees_with_the_oracle(sync: SyncModel, oracle: Oracle) -> None:
    run_state_machine_as_test(
        lambda: ShardLife(sync, oracle),  # type: ignore[arg-type]  # anything that makes one will do
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )
