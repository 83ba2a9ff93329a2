"""Random legal lives of one shard's machine, for every model, against a deliberately dumb oracle.

The oracle is told nothing but the events, and works out from all of them, each time anew, who must wait and which
updates the last event is due to bring about. The promises of every model are checked by `CheckedShard`.

PACELINE_CHECK_MODELS=1 (`make check-models`) lives more of them.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.core.job_sync import JobSync
from paceline.core.shard import ShardSync
from paceline.errors import InvalidEventError
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    PSSP,
    SSP,
    Conditions,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    NaiveWaiting,
    PullState,
    PushState,
    SpecSync,
    SyncModel,
)
from paceline.sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    PublishChange,
    PublishPlan,
    RestartWorker,
    SetTimer,
)
from paceline.sync.draws import uniform
from paceline.sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.notation import parse_shards
from paceline.testing.promises import CheckedShard, Events, Oracle
from tests.support.marks import thorough

LARGE = bool(os.environ.get("PACELINE_CHECK_MODELS"))


class Told(NamedTuple):
    """What the events say of one live worker."""

    pushed: int  # c_p
    asks: bool  # has it asked for weights since its last push
    first: int  # the first superstep that it may be a member of
    last: int  # when it pushed last, or joined
    interval: int | None = None  # between its last two pushes, or between joining and the only one
    significance: float | None = None  # the last that was measured


class Moment(NamedTuple):
    """What is known after an event."""

    event: AnyEvent
    workers: dict[int, Told]  # live
    slowest: int  # min c; while nobody is live, it is what it was

    @property
    def fastest(self) -> int:
        return max(its.pushed for its in self.workers.values())


def moments(events: Events) -> list[Moment]:
    """What the events say, after each of them."""
    known = []
    workers: dict[int, Told] = {}
    slowest = 0
    for event in events:
        workers = dict(workers)
        match event:
            case WorkerJoined():
                workers[event.worker] = Told(slowest, asks=False, first=event.superstep, last=event.now_ticks)
            case WorkerLost() | WorkerFinished():
                del workers[event.worker]
            case PushReceived():
                its = workers[event.worker]
                workers[event.worker] = its._replace(
                    pushed=its.pushed + 1,
                    asks=False,
                    last=event.now_ticks,
                    interval=event.now_ticks - its.last,
                    significance=its.significance if event.significance is None else event.significance,
                )
            case PullRequested():
                workers[event.worker] = workers[event.worker]._replace(asks=True)
        slowest = min((its.pushed for its in workers.values()), default=slowest)
        known.append(Moment(event, workers, slowest))
    return known


def told(events: Events) -> tuple[dict[int, Told], int]:
    """What all the events say of the live workers, and min c."""
    return moments(events)[-1][1:] if events else ({}, 0)


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


def applied_and_divided(events: Events) -> list[ApplyPush | ApplyMean]:
    """FluentPS, Algorithm 1, line 15."""
    n = max(len(moment.workers) for moment in moments(events))
    return [ApplyPush(update.worker, update.iteration, 1 / n) for update in applied_on_arrival(events)]  # type: ignore[union-attr]


# -- what is decided when a pull arrives: it is answered, or waits for the end of a round -------------------------

Answers = Callable[[Sequence[Moment]], bool]
"""All that is known when a pull has arrived -> it is answered at once."""


def delaying(answers: Answers, *, lazy: bool = False) -> Oracle:
    """V_train is min c. Soft barrier: a pull that is not answered waits until V_train has passed what it was then;
    lazy execution: until it has passed the worker's progress."""

    def must_wait(events: Events) -> set[int]:
        known = moments(events)
        waiting = set()
        for worker, its in known[-1].workers.items() if known else ():
            if its.asks:
                at = last_pull(events, worker)
                rnd = known[at].slowest
                if lazy:
                    rnd = max(rnd, its.pushed - 1)
                if not answers(known[: at + 1]) and known[-1].slowest <= rnd:
                    waiting.add(worker)
        return waiting

    return Oracle(must_wait, applied_on_arrival)


def last_pull(events: Events, worker: int) -> int:
    return max(
        index
        for index, event in enumerate(events)
        if isinstance(event, PullRequested) and event.worker == worker
    )


def gap_of(known: Sequence[Moment]) -> int:
    """c_p - min c of the worker whose pull has come last."""
    return known[-1].workers[known[-1].event.worker].pushed - known[-1].slowest


def within(staleness: float) -> Answers:
    return lambda known: gap_of(known) <= staleness


def by_chance(staleness: int, probability: Callable[[int, Told], float], *key: int) -> Answers:
    """PSSP: a pull that is too far ahead is delayed if the number of (key, worker, iteration) is below P."""

    def answers(known: Sequence[Moment]) -> bool:
        pull = known[-1].event
        assert isinstance(pull, PullRequested)
        k = gap_of(known) - 1  # progress - V_train
        chance = probability(k, known[-1].workers[pull.worker])
        return k < staleness or uniform(*key, pull.worker, pull.iteration) >= chance

    return answers


def following_the_speeds(lower: int, upper: int, *, lazy: bool = False) -> Oracle:
    """DSPS: at each advance of V_train, s is ceil(slowest / fastest) in [lower, upper], where a worker's time is that
    from its last answer, or its join, to its push."""

    def must_wait(events: Events) -> set[int]:
        s, v_train = lower, 0
        began: dict[int, int] = {}
        took: dict[int, int] = {}
        waiting: dict[int, int] = {}  # worker -> the round that it waits for
        for event, workers, slowest in moments(events):
            worker = event.worker
            match event:
                case WorkerJoined():
                    began[worker] = event.now_ticks
                case PushReceived():
                    took[worker] = event.now_ticks - began[worker]
                case PullRequested():
                    waiting[worker] = -1
                    if workers[worker].pushed - slowest > s:
                        waiting[worker] = max(slowest, workers[worker].pushed - 1) if lazy else slowest
                case WorkerLost() | WorkerFinished():
                    waiting.pop(worker, None)
                    took.pop(worker, None)
            for other in [w for w, rnd in waiting.items() if rnd < slowest]:
                del waiting[other]
                began[other] = event.now_ticks
            if slowest > v_train and took.keys() == workers.keys() and max(took.values()):
                fastest = min(took.values())
                ratio = math.ceil(Fraction(max(took.values()), fastest)) if fastest else upper
                s = min(upper, max(lower, ratio))
            v_train = slowest
        return set(waiting)

    return Oracle(must_wait, applied_on_arrival)


# -- DSSP: the fastest chooses how many iterations it spends beyond `lower` ---------------------------------------


def spending(lower: int, upper: int) -> Oracle:
    def must_wait(events: Events) -> set[int]:
        known = moments(events)
        left: dict[int, int] = {}
        answered: dict[int, bool] = {}
        for now in known:
            worker = now.event.worker
            if isinstance(now.event, WorkerLost | WorkerFinished):
                left.pop(worker, None)
            if isinstance(now.event, PullRequested):
                gap = now.workers[worker].pushed - now.slowest
                if gap <= lower:
                    left.pop(worker, None)
                elif worker not in left and now.workers[worker].pushed == now.fastest:
                    left[worker] = best_to_spend(now, worker, upper - lower)
                answered[worker] = gap <= lower or (left.get(worker, 0) > 0 and gap <= upper)
                if gap > lower and answered[worker]:
                    left[worker] -= 1
                elif gap > lower:  # it waits, and may choose anew when its gap has been `lower`
                    left.pop(worker, None)
        return {
            worker
            for worker, its in (known[-1].workers if known else {}).items()
            if its.asks and not answered[worker] and its.pushed - known[-1].slowest > lower
        }

    return Oracle(must_wait, applied_on_arrival)


def best_to_spend(now: Moment, worker: int, most: int) -> int:
    """Try every r, and every later push of the slowest: of those who are last, the one with the longest interval."""
    last = [(w, its) for w, its in now.workers.items() if its.pushed == now.slowest]
    if any(its.interval is None for _, its in last):
        return 0
    longest = max(its.interval for _, its in last if its.interval is not None)
    q = min((w, its) for w, its in last if its.interval == longest)[1]
    its = now.workers[worker]
    assert its.interval is not None
    if longest <= 0:
        return 0
    waits = []
    for r in range(most + 1):
        done = its.last + r * its.interval
        k = 1
        while q.last + k * longest < done:
            k += 1
        waits.append(q.last + k * longest - done)
    return waits.index(min(waits))


# -- NaiveWaiting(d): a pull waits for its timer ------------------------------------------------------------------


def put_off(delay_s: float) -> Oracle:
    def must_wait(events: Events) -> set[int]:
        workers, _ = told(events)
        fired = {(event.worker, event.iteration) for event in events if isinstance(event, TimerFired)}
        last = {event.worker: event.iteration for event in events if isinstance(event, PullRequested)}
        return {w for w, its in workers.items() if delay_s and its.asks and (w, last[w]) not in fired}

    return Oracle(must_wait, applied_on_arrival)


# -- pull and push conditions of all kinds: Algorithm 1 with every number counted anew ----------------------------


class Numbers(NamedTuple):
    """What a condition may look at."""

    progress: int
    v_train: int
    pushed: int  # Count[V_train]
    live: int


def by_conditions(
    pull: Callable[[Numbers], bool],
    push: Callable[[Numbers], bool],
    *,
    average: bool,
    lazy: bool = False,
    beside: bool = False,
) -> Oracle:
    """Rounds close by a push condition; with `average`, a push that is late for its round is dropped and its worker
    goes on from V_train, as it says with its next push. Or, `beside` other models, a worker counts its own pushes, and
    the first one that it has computed on the weights of a round is in the mean of this round."""

    def run(events: Events) -> tuple[set[int], list[ApplyPush | ApplyMean]]:
        count: dict[int, int] = {}
        waiting: dict[int, int] = {}  # worker -> the round that it waits for
        held: list[tuple[int, int]] = []
        newest: set[int] = set()  # workers with the weights of this round
        averaged: set[int] = set()  # workers with a push in the mean of this round
        v_train = 0
        updates: list[ApplyPush | ApplyMean] = []

        def numbers(progress: int = -1) -> Numbers:
            pushed = sum(c > v_train or worker in averaged for worker, c in count.items())
            return Numbers(progress, v_train, pushed, len(count))

        for event in events:
            updates = []
            worker = event.worker
            match event:
                case WorkerJoined():
                    count[worker] = v_train
                    newest.add(worker)
                case WorkerLost() | WorkerFinished():
                    del count[worker]
                    waiting.pop(worker, None)
                    newest.discard(worker)
                    averaged.discard(worker)
                case PushReceived():
                    count[worker] = max(count[worker], event.progress or 0) + 1
                    if not average and not event.empty:
                        updates.append(ApplyPush(worker, event.iteration))
                    elif beside and worker in newest - averaged and not event.empty:
                        held.append((worker, event.iteration))
                        averaged.add(worker)
                    elif not beside and not event.empty and count[worker] > v_train:
                        held.append((worker, event.iteration))
                case PullRequested():
                    progress = count[worker] - 1
                    if not pull(numbers(progress)):
                        waiting[worker] = max(progress, v_train) if lazy else v_train
                    else:
                        newest.add(worker)
            while (
                numbers().pushed and push(numbers()) and not isinstance(event, PullRequested | WorkerJoined)
            ):
                if held:
                    updates.append(ApplyMean(tuple(sorted(held))))
                    held = []
                v_train += 1
                newest.clear()
                averaged.clear()
                for other in [w for w, rnd in waiting.items() if rnd < v_train]:
                    del waiting[other]
                    newest.add(other)
            if held and not count:
                updates.append(ApplyMean(tuple(sorted(held))))
                held = []
        return set(waiting), updates

    return Oracle(lambda events: run(events)[0], lambda events: run(events)[1])


def quorum_of(least: int, *, beside: bool = False) -> Oracle:
    """Drop stragglers."""
    return by_conditions(
        lambda its: its.progress < its.v_train,
        lambda its: its.pushed >= min(least, its.live),
        average=True,
        beside=beside,
    )


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
    for event, workers, slowest in moments(events):
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


def nearly(state: PullState) -> bool:
    return state.progress < state.v_train + 1


def half(state: PushState) -> bool:
    return 2 * state.pushed >= state.live


def half_of(its: Numbers) -> bool:
    return 2 * its.pushed >= its.live


SEED = 7
SHARD = 1

ORACLES: list[tuple[SyncModel, Oracle]] = [
    (BSP(), Oracle(bounded(0).must_wait, means_of_rounds)),
    (ASP(), bounded(math.inf)),
    (ASP(push_scale="1/n"), Oracle(bounded(math.inf).must_wait, applied_and_divided)),
    (SSP(staleness=0), bounded(0)),
    (SSP(staleness=1), bounded(1)),
    (SSP(staleness=3), bounded(3)),
    (SSP(staleness=math.inf), bounded(math.inf)),
    (SSP(staleness=0, execution="lazy"), delaying(within(0), lazy=True)),
    (SSP(staleness=1, execution="lazy"), delaying(within(1), lazy=True)),
    (
        SSP(staleness=2, execution="lazy", push_scale="1/n"),
        Oracle(delaying(within(2), lazy=True).must_wait, applied_and_divided),
    ),
    (DSSP(lower=0, upper=2), spending(0, 2)),
    (DSSP(lower=1, upper=4), spending(1, 4)),
    (DSPS(lower=0, upper=3), following_the_speeds(0, 3)),
    (DSPS(lower=1, upper=4, execution="lazy"), following_the_speeds(1, 4, lazy=True)),
    (PSSP(staleness=1), delaying(by_chance(1, lambda k, its: 0.5, SEED))),
    (
        PSSP(staleness=0, probability=0.75, execution="lazy", draws="per-shard"),
        delaying(by_chance(0, lambda k, its: 0.75, SEED, SHARD), lazy=True),
    ),
    (
        DynamicPSSP(staleness=1, alpha=1.5),
        delaying(by_chance(1, lambda k, its: min(1.0, 1.5 / (1 + math.exp(1 - k))), SEED)),
    ),
    (
        DynamicPSSP(staleness=0, alpha="significance", execution="lazy"),
        delaying(
            by_chance(0, lambda k, its: min(1.0, (its.significance or 0.0) / (1 + math.exp(-k))), SEED),
            lazy=True,
        ),
    ),
    (DropStragglers(quorum=1), quorum_of(1)),
    (DropStragglers(quorum=3), quorum_of(3)),
    (NaiveWaiting(delay_s=0.0), put_off(0.0)),
    (NaiveWaiting(delay_s=0.5), put_off(0.5)),
    (SpecSync(base=SSP(staleness=1), abort_time_s=1.0, abort_rate=0.5), bounded(1)),
    (
        Conditions(pull=nearly, push=half),
        by_conditions(lambda its: its.progress < its.v_train + 1, half_of, average=False),
    ),
    (
        Conditions(pull=nearly, push=half, execution="lazy"),
        by_conditions(lambda its: its.progress < its.v_train + 1, half_of, average=False, lazy=True),
    ),
    (
        Conditions(pull=lambda state: state.progress < state.v_train, push=half, pushes="average"),
        by_conditions(lambda its: its.progress < its.v_train, half_of, average=True),
    ),
    (ElasticBSP(), Oracle(stopped, means_of_supersteps)),
]

LIKE_OTHERS: list[SyncModel] = [
    SSP(staleness=0),
    SSP(staleness=3),
    SSP(staleness=math.inf),
    SSP(staleness=0, execution="lazy"),
    SSP(staleness=1, execution="lazy"),
    DSSP(lower=0, upper=2),
    DSPS(lower=0, upper=3),
    PSSP(staleness=0, probability=0.75, execution="lazy", draws="per-shard"),
    DynamicPSSP(staleness=1, alpha=1.5),
    DropStragglers(quorum=1),
    NaiveWaiting(delay_s=0.0),
    Conditions(pull=nearly, push=half),
]
"""Of the models above, those that differ from another one in a number, or have less than another one.

Only `make thorough` and `make check-models` live their lives.
"""

BESIDE: list[tuple[SyncModel, Oracle]] = [
    (BSP(), Oracle(bounded(0).must_wait, means_of_rounds)),
    (DropStragglers(quorum=1), quorum_of(1, beside=True)),
    (DropStragglers(quorum=2), quorum_of(2, beside=True)),
    (DropStragglers(quorum=3), quorum_of(3, beside=True)),
    (
        Conditions(pull=lambda state: state.progress < state.v_train, push=half, pushes="average"),
        by_conditions(lambda its: its.progress < its.v_train, half_of, average=True, beside=True),
    ),
]
"""Models that average, at one shard beside others that run other models."""

MOST_WORKERS = 6  # more than the exhaustive search can have
PICK = st.integers(0, 11)
WILD_STEPS_TICKS = [0, 1, 5 * 10**8, 10**15]
SMALL_STEPS_TICKS = [0, 1, 2, 4, 12]  # for oracles that count how many intervals pass in a time


class ShardProperties(RuleBasedStateMachine):
    """One machine and its oracle; each rule is one event, or one that is refused."""

    def __init__(self, sync: SyncModel, oracle: Oracle, *, alone: bool = True) -> None:
        super().__init__()
        self.checked = CheckedShard(ShardSync(sync, SEED, SHARD, alone=alone), oracle)
        self.legal = self.checked.legal
        self.superstep = -1
        self.yet_to_stop: dict[int, Stop] = {}  # worker -> the flag for one of its next pushes
        self.steps = SMALL_STEPS_TICKS if isinstance(sync, DSSP | DSPS) else WILD_STEPS_TICKS

    def tell(self, event: AnyEvent) -> None:
        self.checked.tell(event)

    @precondition(lambda self: len(self.legal.phase) < MOST_WORKERS)
    @rule(iteration=st.integers(0, 2))
    def join(self, iteration: int) -> None:
        self.tell(self.legal.join(iteration))

    @precondition(lambda self: self.legal.gone and len(self.legal.phase) < MOST_WORKERS)
    @rule(pick=PICK)
    def join_anew(self, pick: int) -> None:
        worker = self.legal.gone[pick % len(self.legal.gone)]
        iteration = 100 * len(self.checked.events)  # a label that it has not used
        event = WorkerJoined(
            now_ticks=self.legal.now_ticks, worker=worker, iteration=iteration, superstep=self.superstep + 1
        )
        self.tell(event)

    @precondition(lambda self: self.legal.in_phase("computing"))
    @rule(
        pick=PICK,
        empty=PICK,
        flag=st.booleans(),
        pull=st.booleans(),
        significance=st.sampled_from([None, 0.0, 0.5, 2.0]),
    )
    def push(self, pick: int, empty: int, flag: bool, pull: bool, significance: float | None) -> None:
        computing = self.legal.in_phase("computing")
        worker = computing[pick % len(computing)]
        stop = self.yet_to_stop.pop(worker, None) if flag else None
        self.tell(self.legal.push(worker, empty=empty == 0, stop=stop, significance=significance))
        if pull:
            self.tell(self.legal.pull(worker))

    @precondition(lambda self: self.legal.in_phase("pushed"))
    @rule(pick=PICK)
    def pull(self, pick: int) -> None:
        pushed = self.legal.in_phase("pushed")
        self.tell(self.legal.pull(pushed[pick % len(pushed)]))

    @precondition(lambda self: self.legal.phase)
    @rule(pick=PICK, lost=st.booleans())
    def leave(self, pick: int, lost: bool) -> None:
        worker = list(self.legal.phase)[pick % len(self.legal.phase)]
        self.yet_to_stop.pop(worker, None)
        self.tell(self.legal.leave(worker, lost=lost))

    @precondition(lambda self: self.legal.in_phase("computing"))
    @rule(pick=PICK)
    def repeat(self, pick: int) -> None:
        computing = self.legal.in_phase("computing")
        self.tell(self.legal.repeat(computing[pick % len(computing)]))

    @precondition(lambda self: self.legal.timers)
    @rule(pick=PICK)
    def fire(self, pick: int) -> None:
        """Timers fire on time or late, and so in any order; also for those who have left."""
        self.tell(self.legal.fire(self.legal.timers[pick % len(self.legal.timers)]))

    @rule(step=PICK)
    def pass_time(self, step: int) -> None:
        self.legal.now_ticks += self.steps[step % len(self.steps)]

    @precondition(lambda self: self.legal.phase.keys() - self.yet_to_stop and self.last_superstep_is_open())
    @rule(newest_only=st.booleans())
    def plan(self, newest_only: bool) -> None:
        """The next superstep: its members stop with one of their next pushes. The last one may still be open."""
        free = sorted(self.legal.phase.keys() - self.yet_to_stop)
        members = tuple(free[-1:] if newest_only else free)
        self.superstep += 1
        self.yet_to_stop |= dict.fromkeys(members, Stop(superstep=self.superstep, members=members))

    def last_superstep_is_open(self) -> bool:
        """Whoever has yet to stop is waited for: somebody has stopped before it."""
        heard = {event.stop for event in self.checked.events if isinstance(event, PushReceived)}
        return heard >= set(self.yet_to_stop.values())

    @rule(pick=PICK)
    def refuse(self, pick: int) -> None:
        events = self.legal.illegal()
        self.checked.refuse(events[pick % len(events)])

    def teardown(self) -> None:
        """Whoever waits goes on when the others have left, one by one."""
        while len(self.legal.phase) > 1:
            others = sorted(self.legal.phase, key=lambda worker: worker in self.legal.waiting)
            self.tell(self.legal.leave(others[0], lost=True))
        self.checked.fire_timers()
        assert not self.legal.waiting
        assert not self.checked.faults


def seldom(sync: SyncModel) -> list[pytest.MarkDecorator]:
    return [pytest.mark.thorough] if sync in LIKE_OTHERS and not LARGE else []


@pytest.mark.parametrize("lives", [50] if LARGE else [10, *thorough(20)])
@pytest.mark.parametrize(
    ("sync", "oracle"),
    [pytest.param(sync, oracle, id=str(sync), marks=seldom(sync)) for sync, oracle in ORACLES],
)
def test_every_legal_life_agrees_with_the_oracle(sync: SyncModel, oracle: Oracle, lives: int) -> None:
    live(lambda: ShardProperties(sync, oracle), lives)


@pytest.mark.parametrize("lives", [50] if LARGE else [10, *thorough(40)])
@pytest.mark.parametrize(("sync", "oracle"), BESIDE, ids=[str(sync) for sync, _ in BESIDE])
def test_every_legal_life_beside_other_models_agrees_with_the_oracle(
    sync: SyncModel, oracle: Oracle, lives: int
) -> None:
    live(lambda: ShardProperties(sync, oracle, alone=False), lives)


def live(begin: Callable[[], ShardProperties], lives: int) -> None:
    run_state_machine_as_test(
        begin,  # type: ignore[arg-type]  # anything that makes one will do
        settings=settings(
            max_examples=lives,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no failure
        ),
    )


# -- a whole job whose model changes in mid-run -------------------------------------------------------------------

SYNCS = [
    "asp",
    "bsp",
    "ssp:staleness=1",
    "ssp:staleness=0,execution=lazy",
    "dssp:lower=0,upper=2",
    "drop-stragglers:quorum=1",
    "naive-waiting:delay_s=0.5",
    "elastic-bsp:lookahead=2",
    "spec-sync:abort_time_s=0.5,abort_rate=0",
    "spec-sync:base=ssp,staleness=1",
    "bsp|ssp:staleness=2",
    "naive-waiting:delay_s=1|asp",
    "ssp:staleness=1|drop-stragglers:quorum=2",
]
SHARDS = 2


class JobWorker:
    """A worker, as it sees itself."""

    def __init__(self) -> None:
        self.iteration = 0
        self.awaited: set[int] = set()  # shards that have yet to answer
        self.stop: tuple[int, Stop] | None = None  # the plan to follow
        self.change: Change | None = None  # to be flagged on the next push
        self.flagged = False  # the push whose answers it awaits
        self.progress: int | None = None  # the latest round that a shard has told it to go on from
        self.tells_starts = False
        self.starts = False  # the iteration that it waits for is to be told of when it starts
        self.asked = 0  # requests that it has made: all workers make the same in the same order
        self.to_shards: list[deque[AnyEvent]] = [deque() for _ in range(SHARDS)]
        self.to_coordinator: deque[AnyEvent] = deque()
        self.heard: deque[AnyAction] = deque()  # what the coordinator has sent
        self.leaves: WorkerLost | WorkerFinished | None = None


class JobLife(RuleBasedStateMachine):
    """Workers, two shards and the coordinator, with every message on its way for as long as it likes.

    Each push is dealt with once at each shard: see `Life`. At the end everybody goes on, and nobody is stuck.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_ticks = 0
        self.job: JobSync
        self.shards: list[CheckedShard] = []
        self.workers: dict[int, JobWorker] = {}
        self.joined = 0
        self.timers: list[SetTimer] = []  # the coordinator's
        self.script: list[str] = []
        self.change = 0  # the last that was published
        self.journal: list[str] = []  # who was told what, and what came of it
        self.superstep = -1  # the last that was planned since
        self.gone: dict[
            int, int
        ] = {}  # who has left and of whom nothing is on its way -> a label not used yet

    @initialize(
        sync=st.sampled_from(SYNCS),
        workers=st.integers(1, 4),
        script=st.lists(st.sampled_from(SYNCS), min_size=1, max_size=4),
    )
    def begin(self, sync: str, workers: int, script: list[str]) -> None:
        self.job = JobSync(sync, SEED)
        models = parse_shards(sync)
        alone = len(set(models)) == 1
        self.shards = [
            CheckedShard(ShardSync(models[index % len(models)], SEED, index, alone=alone))
            for index in range(SHARDS)
        ]
        for _ in range(workers):
            self.come()
        self.script = script

    # -- what may happen ----------------------------------------------------------------------------------

    @rule(picks=st.lists(st.integers(0, 999), min_size=1, max_size=20))
    def go_on(self, picks: list[int]) -> None:
        """Something happens to some workers: a message arrives, or an iteration ends."""
        for pick in picks:
            if not self.workers:
                return
            pick, nth = divmod(pick, max(1, len(self.workers)))
            worker = list(self.workers)[nth]
            its = self.workers[worker]
            full = [where for where in range(SHARDS) if its.to_shards[where]]
            full += [SHARDS] * bool(its.to_coordinator)
            free = not its.awaited and its.leaves is None
            if full and (not free or pick % 3):
                self.take(worker, full[pick % len(full)])
            elif free:
                while its.heard and pick % 4:  # it may not have read what the coordinator has sent it
                    self.hear(worker)
                if not its.awaited:  # it has not started anew
                    self.commit(worker)

    @rule(pick=PICK, where=PICK, messages=st.integers(1, 4))
    def deliver(self, pick: int, where: int, messages: int) -> None:
        """Some messages of one worker arrive, at a shard or at the coordinator."""
        if self.workers:
            worker = list(self.workers)[pick % len(self.workers)]
            for _ in range(messages):
                self.take(worker, where % (SHARDS + 1))

    @rule(pick=PICK)
    def listen(self, pick: int) -> None:
        listening = [w for w, its in self.workers.items() if its.heard and not its.awaited and not its.leaves]
        if listening:
            self.hear(listening[pick % len(listening)])

    def ask(self, worker: int) -> None:
        """A worker comes to a point of the script at which the model is to change."""
        its = self.workers[worker]
        if its.asked < len(self.script):
            sync = self.script[its.asked]
            its.to_coordinator.append(
                SyncRequested(now_ticks=0, worker=worker, source="script", number=its.asked, sync=sync)
            )
            its.asked += 1

    def may_join(self) -> bool:
        """The coordinator lets nobody join while a change is under way."""
        changing = self.job.changing or any(vars(checked.machine)["_change"] for checked in self.shards)
        return not changing and len(self.workers) < MOST_WORKERS

    @precondition(lambda self: self.may_join())
    @rule()
    def come(self) -> None:
        """Somebody new."""
        self.enter(self.joined, 0)
        self.joined += 1

    @precondition(lambda self: self.gone and self.may_join())
    @rule(pick=PICK)
    def come_back(self, pick: int) -> None:
        """Somebody who was lost, or had finished, with nothing left of its former life."""
        worker = list(self.gone)[pick % len(self.gone)]
        self.enter(worker, self.gone.pop(worker))

    def enter(self, worker: int, iteration: int) -> None:
        """All hear of a worker at once, the coordinator's machine last."""
        its = JobWorker()
        its.iteration = iteration
        known = self.job.sync or vars(self.job)["_first"]  # as the worker itself assumes
        its.tells_starts = any(model.needs_starts for model in parse_shards(known))
        pulls = any(checked.events for checked in self.shards)
        event = WorkerJoined(
            now_ticks=self.now_ticks,
            worker=worker,
            iteration=iteration,
            count=max(self.hosted(checked).entry(worker)[1] for checked in self.shards) if pulls else None,
            superstep=self.superstep + 1,
            pulls=pulls,
        )
        if pulls:
            its.awaited = set(range(SHARDS))
            its.starts = its.tells_starts
            for queue in its.to_shards:
                queue.append(PullRequested(now_ticks=0, worker=worker, iteration=iteration - 1))
        self.workers[worker] = its
        for shard in range(SHARDS):
            self.shards[shard].legal.now_ticks = self.now_ticks
            self.tell_shard(shard, event)
        self.tell_coordinator(event)

    @precondition(lambda self: any(its.leaves is None for its in self.workers.values()))
    @rule(pick=PICK, lost=st.booleans(), rarely=PICK, cut=st.lists(st.integers(0, 4), min_size=3, max_size=3))
    def leave(self, pick: int, lost: bool, rarely: int, cut: list[int]) -> None:
        """A worker ends its work, or dies: then only the first of its messages may still arrive."""
        stay = [w for w, its in self.workers.items() if its.leaves is None]
        worker = stay[pick % len(stay)]
        if rarely < 3 and (lost or not self.workers[worker].awaited):
            self.go(worker, lost=lost, cut=cut if lost else None)

    @rule(pick=PICK)
    def fire(self, pick: int) -> None:
        """A timer fires, on time or late."""
        for checked in self.shards:
            if checked.legal.timers:
                timer = checked.legal.timers[pick % len(checked.legal.timers)]
                self.now_ticks = max(self.now_ticks, timer.due_ticks)
                self.tell_shard(self.shards.index(checked), checked.legal.fire(timer))
        if self.timers:
            timer = self.timers.pop(pick % len(self.timers))
            self.now_ticks = max(self.now_ticks, timer.due_ticks)
            fired = TimerFired(now_ticks=self.now_ticks, worker=timer.worker, iteration=timer.iteration)
            self.tell_coordinator(fired)

    @rule(step=st.sampled_from(SMALL_STEPS_TICKS))
    def pass_time(self, step: int) -> None:
        self.now_ticks += step

    def teardown(self) -> None:
        """All messages arrive, everybody goes on, and everybody gets to the end of some iterations more."""
        if not self.shards:
            return
        goal = {worker: its.iteration + 6 for worker, its in self.workers.items()}
        for _ in range(200):
            self.settle()
            behind = [w for w, its in self.workers.items() if its.iteration < goal[w]]
            free = [w for w, its in self.workers.items() if not its.awaited]
            if not self.workers:
                return
            assert free, f"everybody is stuck: {[vars(its) for its in self.workers.values()]}"
            if not behind and not self.changes():
                break
            for worker in free:
                self.now_ticks += 2
                while self.workers[worker].heard:
                    self.hear(worker)
                if not self.workers[worker].awaited:
                    self.commit(worker)
        else:
            raise AssertionError(f"not everybody goes on: {[vars(its) for its in self.workers.values()]}")
        models = parse_shards(self.job.sync)
        for index, checked in enumerate(self.shards):
            assert self.model_of(checked) == models[index % len(models)]
        while self.workers:
            free = [w for w, its in self.workers.items() if not its.awaited]
            self.go(free[0], lost=False)
            self.settle()

    # -- how it happens -----------------------------------------------------------------------------------

    def commit(self, worker: int) -> None:
        its = self.workers[worker]
        if its.iteration % 3 == 1:
            self.ask(worker)
        change, its.change = its.change, None
        stop = None
        if change is None and its.stop is not None and its.iteration >= its.stop[0]:
            stop, its.stop = its.stop[1], None
        progress, its.progress = its.progress, None
        push = PushReceived(
            now_ticks=0, worker=worker, iteration=its.iteration, stop=stop, change=change, progress=progress
        )
        for queue in its.to_shards:
            queue += [push, PullRequested(now_ticks=0, worker=worker, iteration=its.iteration)]
        its.to_coordinator.append(
            IterationFinished(
                now_ticks=0,
                worker=worker,
                iteration=its.iteration,
                superstep=stop.superstep if stop is not None else None,
                change=change.number if change is not None else None,
            )
        )
        its.iteration += 1
        its.awaited = set(range(SHARDS))
        its.starts = change is not None or its.tells_starts
        its.flagged = change is not None
        if change is not None:
            its.tells_starts = any(model.needs_starts for model in parse_shards(change.sync))

    def hear(self, worker: int) -> None:
        its = self.workers[worker]
        match its.heard.popleft():
            case PublishPlan(plan) if worker in plan.members:
                its.stop = dict(plan.stops)[worker], Stop(superstep=plan.superstep, members=plan.members)
            case PublishChange(change):
                its.change, its.stop = change, None
            case RestartWorker(_, iteration) if iteration == its.iteration:
                for queue in its.to_shards:
                    queue.append(PullRepeated(now_ticks=0, worker=worker, iteration=iteration))
                its.awaited = set(range(SHARDS))
                its.starts = False

    def go(self, worker: int, *, lost: bool, cut: Sequence[int] | None = None) -> None:
        its = self.workers[worker]
        its.leaves = (WorkerLost if lost else WorkerFinished)(now_ticks=0, worker=worker)
        for index, queue in enumerate([*its.to_shards, its.to_coordinator]):
            while cut is not None and len(queue) > cut[index]:
                queue.pop()
            queue.append(its.leaves)

    def take(self, worker: int, where: int) -> None:
        """The next message of this worker arrives."""
        its = self.workers.get(worker)
        queue = its.to_coordinator if its and where == SHARDS else its.to_shards[where] if its else None
        if its is None or not queue:
            return
        event = msgspec.structs.replace(queue.popleft(), now_ticks=self.now_ticks)
        if where == SHARDS:
            self.tell_coordinator(event)
        else:
            self.tell_shard(where, event)
        if its.leaves is not None and not any([*its.to_shards, its.to_coordinator]):
            del self.workers[worker]
            self.gone[worker] = its.iteration + 2

    def tell_shard(self, shard: int, event: AnyEvent) -> None:
        its = self.workers[event.worker] if event.worker in self.workers else JobWorker()
        self.journal.append(f"shard {shard}: {event}")
        try:
            actions = self.shards[shard].tell(event)
        except InvalidEventError:
            # A flag of somebody lost, for a change that was published anew: the shard hears no more of it.
            # The same holds for a round of the old model, which a push of somebody lost names after the change.
            old = isinstance(event, PushReceived) and (
                (event.change and event.change.number < self.change) or event.progress is not None
            )
            if not (old and its.leaves is not None):
                raise
            its.to_shards[shard] = deque([its.leaves])
            return
        self.journal += [f"    {action}" for action in actions]
        for action in actions:
            if isinstance(action, AnswerPull) and action.worker in self.workers:
                self.answer(shard, action)

    def answer(self, shard: int, action: AnswerPull) -> None:
        its = self.workers[action.worker]
        its.awaited.discard(shard)
        if action.v_train is not None:
            its.progress = max(action.v_train, its.progress or 0)
        if not its.awaited and its.flagged:
            its.flagged, its.progress = False, None  # rounds are counted anew
        if not its.awaited and its.starts and its.leaves is None:
            its.to_coordinator.append(
                IterationStarted(now_ticks=0, worker=action.worker, iteration=its.iteration)
            )
            its.starts = False

    def tell_coordinator(self, event: AnyEvent) -> None:
        self.journal.append(f"coordinator: {event}")
        actions = self.job.handle(event)
        self.job.validate()
        self.journal += [f"    {action}" for action in actions]
        for action in actions:
            match action:
                case SetTimer():
                    self.timers.append(action)
                    continue
                case PublishPlan(plan):
                    self.superstep = plan.superstep
                    receivers: Sequence[int] = plan.members
                case PublishChange(change):
                    assert change.number == self.change + 1, "changes are published in order"
                    self.change, self.superstep = change.number, -1
                    receivers = change.members
                case RestartWorker(worker):
                    receivers = [worker]
                case _:
                    raise AssertionError(f"the coordinator cannot {action}")
            for receiver in receivers:
                if receiver in self.workers:
                    self.workers[receiver].heard.append(action)

    def settle(self) -> None:
        """All that is on its way arrives, all timers fire."""
        while any(any([*its.to_shards, its.to_coordinator]) for its in self.workers.values()):
            for worker in list(self.workers):
                for where in range(SHARDS + 1):
                    self.take(worker, where)
            self.now_ticks += 1
        for _ in range(len(self.timers) + sum(len(checked.legal.timers) for checked in self.shards)):
            self.fire(0)
        if any(any([*its.to_shards, its.to_coordinator]) for its in self.workers.values()):
            self.settle()

    def changes(self) -> bool:
        """A change is under way, or somebody has asked for one that has yet to be published."""
        underway = any(
            isinstance(e, SyncRequested) for its in self.workers.values() for e in its.to_coordinator
        )
        unsure = vars(self.job)["_change"] is not None or self.everywhere() != self.change
        return underway or unsure or bool(vars(self.job)["_requested"])

    def everywhere(self) -> int:
        """The number of the last change that all shards have made."""
        return min((vars(checked.machine)["_changed"] for checked in self.shards), default=0)

    def hosted(self, checked: CheckedShard) -> ShardSync:
        assert isinstance(checked.machine, ShardSync)
        return checked.machine

    def model_of(self, checked: CheckedShard) -> SyncModel:
        return self.hosted(checked).sync


@pytest.mark.parametrize("lives", [100] if LARGE else [20, *thorough(40)])
def test_a_job_goes_on_through_all_changes_of_its_model(lives: int) -> None:
    run_state_machine_as_test(
        JobLife,
        settings=settings(
            max_examples=lives,
            stateful_step_count=60,
            derandomize=True,
            phases=[Phase.generate],  # what it finds is too long to be made short in any time
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def live_at_random(seed: int) -> None:
    """One life of a job, with more happening in it than a search that begins with the simplest would have."""
    rng = random.Random(seed)
    job = JobLife()

    def pick() -> int:
        return rng.randrange(12)

    try:
        job.begin(
            sync=rng.choice(SYNCS),
            workers=rng.randint(1, MOST_WORKERS),
            script=rng.choices(SYNCS, k=rng.randint(1, 4)),
        )
        job.journal.append(f"script: {job.script}")
        for _ in range(rng.choice([10, 30, 80])):
            room = job.may_join() and rng.random() < 0.5
            match rng.choice(
                ["go on"] * 3 + ["deliver"] * 4 + ["come", "back", "leave", "leave", "fire", "time"]
            ):
                case "go on":
                    job.go_on(picks=[rng.randrange(1000) for _ in range(rng.randint(1, 20))])
                case "deliver":
                    job.deliver(pick=pick(), where=pick(), messages=rng.randint(1, 4))
                    job.listen(pick=pick())
                case "come" if room:
                    job.come()
                case "back" if room and job.gone:
                    job.come_back(pick=pick())
                case "leave" if any(its.leaves is None for its in job.workers.values()):
                    cut = [rng.randrange(5) for _ in range(3)]
                    job.leave(pick=pick(), lost=rng.random() < 0.5, rarely=pick(), cut=cut)
                case "fire":
                    job.fire(pick=pick())
                case "time":
                    job.pass_time(step=rng.choice(SMALL_STEPS_TICKS))
        job.teardown()
    except Exception as error:
        story = "\n".join(job.journal)
        raise AssertionError(f"seed {seed}: {error!r} at the end of\n{story}") from error


@pytest.mark.parametrize(
    "seeds", [range(1000)] if LARGE else [range(120), *thorough(range(120, 300))], ids=str
)
def test_a_job_goes_on_whatever_happens(seeds: Sequence[int]) -> None:
    for seed in seeds:
        live_at_random(seed)
