"""SpecSync's coordinator against deliberately dumb oracles: who is restarted, and what is tuned."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.errors import ConfigurationError
from paceline.sim import Cluster, Presence, simulate
from paceline.sync import ASP, BSP, SSP, SpecSync, parse
from paceline.sync.actions import AnyAction, RestartWorker, SetTimer
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    IterationStarted,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.spec_sync import Span, Speculation, Speculator, tune
from paceline.sync.ticks import in_ticks
from tests.support.marks import thorough

Push = tuple[int, int]
"""(when, who)"""

# -- Eq. 7 by the letter ------------------------------------------------------------------------------------------


def freshness(spans: dict[int, Span], pushes: Sequence[Push], delay: int) -> Fraction:
    """F(D), Eq. 7, in exact numbers: the gain of each worker by Eq. 5, its loss by Eq. 6."""
    m = len(spans)
    total = Fraction(0)
    for worker, span in spans.items():
        start = span.start_ticks
        gain = 0
        for when, who in pushes:
            if who != worker and start < when <= start + delay:
                gain += 1
        total += gain - Fraction(delay * (m - 1), span.ticks)
    return total


def candidates(spans: dict[int, Span], pushes: Sequence[Push]) -> list[int]:
    """Each time from somebody's start to a push of another, up to the mean span."""
    mean = Fraction(sum(span.ticks for span in spans.values()), len(spans))
    found = set()
    for worker, span in spans.items():
        for when, who in pushes:
            delay = when - span.start_ticks
            if who != worker and 0 < delay <= mean:
                found.add(delay)
    return sorted(found)


def best(spans: dict[int, Span], pushes: Sequence[Push]) -> Speculation | None:
    """The shortest of the best delays, and its rate; None if no F is above 0."""
    if len(spans) < 2 or any(span.ticks <= 0 for span in spans.values()):
        return None
    tried = [(freshness(spans, pushes, delay), -delay) for delay in candidates(spans, pushes)]
    if not tried or max(tried)[0] <= 0:
        return None
    _, minus_delay = max(tried)
    # ABORT_RATE = D (m - 1) / (T m), with the mean T.
    total = sum(span.ticks for span in spans.values())
    return Speculation(-minus_delay, Fraction(-minus_delay * (len(spans) - 1), total))


@st.composite
def histories(
    draw: st.DrawFn, length: st.SearchStrategy[int], unit: int
) -> tuple[dict[int, Span], list[Push]]:
    """Spans of some workers and pushes in order of time, on a grid, so that many fall on one moment."""
    spans = {}
    for worker in range(draw(st.integers(1, 5))):
        start = unit * draw(st.integers(0, 12))
        spans[worker] = Span(start, start + draw(length))
    pushes = draw(
        st.lists(st.tuples(st.integers(0, 24).map(lambda step: unit * step), st.integers(0, 6)), max_size=20)
    )
    return spans, sorted(pushes)


# A busy machine is no failure.
patiently = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])


@patiently
@given(
    st.one_of(
        histories(st.sampled_from([0, 1, 2, 3, 4, 6, 12]), 1),
        histories(st.integers(1, 10**10), 3 * 10**8),
        histories(st.integers(1, 10**29), 3 * 10**27),  # beyond 64 bits
    )
)
def test_tune_finds_the_best_of_all_candidates_and_of_several_the_shortest(
    history: tuple[dict[int, Span], list[Push]],
) -> None:
    spans, pushes = history
    assert tune(spans, pushes) == best(spans, pushes)


def test_a_worker_that_began_long_before_the_others_may_leave_although_ticks_are_very_short() -> None:
    """The pushes since its start remain, and they are more than 2**63 ticks earlier than the starts of the others."""
    short = Fraction(1, 10**18)
    cluster = Cluster([1 + short, 1, 300], presence={2: Presence(lost_at_s=20)})
    assert simulate(cluster, "spec-sync", 30).updates == 2 * 30


@pytest.mark.parametrize("seed", range(20))
def test_tune_is_exact_for_many_workers_whose_candidates_are_almost_equally_good(seed: int) -> None:
    """The spans differ by ticks only, so that floats could not tell many of the candidates apart."""
    draw = random.Random(seed)
    spans = {}
    for worker in range(12):
        start = draw.randrange(5) * 10**9
        spans[worker] = Span(start, start + 8 * 10**9 + draw.randrange(-1, 2))
    pushes = sorted(
        (draw.randrange(14) * 10**9 + draw.randrange(-1, 2), draw.randrange(12)) for _ in range(60)
    )
    assert tune(spans, pushes) == best(spans, pushes)


@pytest.mark.parametrize(
    ("spans", "pushes"),
    [
        ({}, []),
        ({0: Span(0, 10)}, [(5, 1)]),
        ({0: Span(0, 10), 1: Span(0, 10)}, []),
        ({0: Span(0, 10), 1: Span(10, 10)}, [(5, 1)]),
        ({0: Span(0, 10), 1: Span(0, 10)}, [(0, 0), (0, 1)]),
        ({0: Span(0, 10), 1: Span(0, 10)}, [(50, 0), (50, 1)]),
    ],
    ids=[
        "nobody",
        "one alone",
        "no pushes",
        "no time has passed",
        "pushes with the start",
        "pushes too late",
    ],
)
def test_tune_has_nothing_to_go_by(spans: dict[int, Span], pushes: list[Push]) -> None:
    assert tune(spans, pushes) is None


# -- the coordinator, recounted from the full log -----------------------------------------------------------------


class Iteration:
    """One iteration of one worker, as the log tells it."""

    def __init__(self, worker: int, number: int, start: int | None, start_at: int) -> None:
        self.worker = worker
        self.number = number
        self.start = start
        self.start_at = start_at  # place in the log
        self.end: int | None = None
        self.first = True  # of its worker: nobody is told of its start, so it is not watched


class Log:
    """Reads everything anew out of the events, for each question."""

    def __init__(self, events: Sequence[AnyEvent], fixed: Speculation | None) -> None:
        self.events = events
        self.iterations: dict[int, list[Iteration]] = {}  # of live workers, in order
        self.speculation = [fixed]  # after each event
        yet_to_push: set[int] = set()
        for at, event in enumerate(events):
            worker = event.worker
            match event:
                case WorkerJoined():
                    self.iterations[worker] = [Iteration(worker, event.iteration, event.now_ticks, at)]
                    yet_to_push.add(worker)
                case WorkerLost() | WorkerFinished():
                    del self.iterations[worker]
                    yet_to_push.discard(worker)
                case IterationStarted():
                    its = Iteration(worker, event.iteration, event.now_ticks, at)
                    its.first = False
                    self.iterations[worker].append(its)
                case IterationFinished():
                    self.iterations[worker][-1].end = event.now_ticks
                    yet_to_push.discard(worker)
            now = self.speculation[-1]
            ends_epoch = isinstance(event, IterationFinished | WorkerLost | WorkerFinished)
            if fixed is None and ends_epoch and not yet_to_push and self.iterations:
                now = self.tuned(at)
                yet_to_push = set(self.iterations)
            self.speculation.append(now)

    def tuned(self, at: int) -> Speculation | None:
        spans = {}
        for worker, iterations in self.iterations.items():
            last = [its for its in iterations if its.end is not None][-1]
            assert last.start is not None
            assert last.end is not None
            spans[worker] = Span(last.start, last.end)
        pushes = [(e.now_ticks, e.worker) for e in self.events[: at + 1] if isinstance(e, IterationFinished)]
        return best(spans, pushes)

    def due(self) -> list[AnyAction]:
        """What the last event is to bring about."""
        at = len(self.events) - 1
        event = self.events[at]
        if isinstance(event, IterationStarted):
            speculation = self.speculation[at]
            if speculation is None:
                return []
            return [SetTimer(event.worker, event.iteration, event.now_ticks + speculation.abort_time_ticks)]
        if isinstance(event, TimerFired) and event.worker in self.iterations:
            its = self.iterations[event.worker][-1]
            speculation = self.speculation[its.start_at]
            asked_before = any(
                isinstance(e, TimerFired) and (e.worker, e.iteration) == (event.worker, event.iteration)
                for e in self.events[its.start_at : at]
            )
            if its.number == event.iteration and its.end is None and not its.first and not asked_before:
                assert speculation is not None
                others = [
                    e
                    for e in self.events[its.start_at : at]
                    if isinstance(e, IterationFinished) and e.worker != event.worker
                ]
                if len(others) > len(self.iterations) * speculation.abort_rate:
                    return [RestartWorker(event.worker, event.iteration)]
        return []


PICK = st.integers(0, 11)
STEPS_TICKS = [in_ticks(seconds) for seconds in (0.0, 0.25, 0.5, 1.0)]


class CoordinatorLife(RuleBasedStateMachine):
    """Up to six workers that start, finish and leave, and timers that fire on time or late."""

    def __init__(self, sync: SpecSync) -> None:
        super().__init__()
        self.fixed = (
            Speculation(in_ticks(sync.abort_time_s), Fraction(sync.abort_rate))
            if sync.abort_time_s is not None and sync.abort_rate is not None
            else None
        )
        self.machine: Speculator = sync.at_coordinator()
        self.events: list[AnyEvent] = []
        self.timers: list[SetTimer] = []
        self.now_ticks = 0
        self.computes: dict[int, int] = {}  # worker -> the iteration
        self.waits: dict[int, int] = {}  # worker -> the iteration that it is to start
        self.joined = 0

    def tell(self, event: AnyEvent) -> None:
        actions = self.machine.handle(event)
        self.machine.validate()
        self.events.append(event)
        log = Log(self.events, self.fixed)
        assert actions == log.due()
        assert self.machine.speculation == log.speculation[-1]
        self.timers += [action for action in actions if isinstance(action, SetTimer)]

    @initialize(workers=st.integers(1, 4))
    def begin(self, workers: int) -> None:
        for _ in range(workers):
            self.join()

    @precondition(lambda self: len(self.computes) + len(self.waits) < 6)
    @rule()
    def join(self) -> None:
        self.tell(WorkerJoined(now_ticks=self.now_ticks, worker=self.joined, iteration=self.joined % 3))
        self.computes[self.joined] = self.joined % 3
        self.joined += 1

    @precondition(lambda self: self.computes)
    @rule(pick=PICK, goes_on=st.booleans(), step=PICK)
    def finish(self, pick: int, goes_on: bool, step: int) -> None:
        self.now_ticks += STEPS_TICKS[step % 4]
        worker = sorted(self.computes)[pick % len(self.computes)]
        iteration = self.computes.pop(worker)
        self.waits[worker] = iteration + 1
        self.tell(IterationFinished(now_ticks=self.now_ticks, worker=worker, iteration=iteration))
        if goes_on:
            self.start(sorted(self.waits).index(worker))

    @precondition(lambda self: self.waits)
    @rule(pick=PICK)
    def start(self, pick: int) -> None:
        worker = sorted(self.waits)[pick % len(self.waits)]
        self.computes[worker] = self.waits.pop(worker)
        self.tell(IterationStarted(now_ticks=self.now_ticks, worker=worker, iteration=self.computes[worker]))

    @precondition(lambda self: self.timers)
    @rule(pick=PICK, twice=st.booleans())
    def fire(self, pick: int, twice: bool) -> None:
        timer = self.timers.pop(pick % len(self.timers))
        self.now_ticks = max(self.now_ticks, timer.due_ticks)
        for _ in range(1 + twice):
            self.tell(TimerFired(now_ticks=self.now_ticks, worker=timer.worker, iteration=timer.iteration))

    @precondition(lambda self: self.computes or self.waits)
    @rule(pick=PICK, lost=st.booleans(), rarely=PICK)
    def leave(self, pick: int, lost: bool, rarely: int) -> None:
        if rarely < 3:
            live = sorted(self.computes | self.waits)
            worker = live[pick % len(live)]
            self.computes.pop(worker, None)
            self.waits.pop(worker, None)
            self.tell((WorkerLost if lost else WorkerFinished)(now_ticks=self.now_ticks, worker=worker))


@pytest.mark.parametrize(
    "sync",
    [
        SpecSync(),
        SpecSync(abort_time_s=1.0, abort_rate=0.5),
        *thorough(SpecSync(abort_time_s=0.5, abort_rate=0.0), SpecSync(base=SSP(staleness=1))),
    ],
    ids=str,
)
def test_every_life_of_the_coordinator_agrees_with_a_recount_of_the_full_log(sync: SpecSync) -> None:
    run_state_machine_as_test(
        lambda: CoordinatorLife(sync),  # type: ignore[arg-type]  # anything that makes one will do
        settings=settings(
            max_examples=50,
            stateful_step_count=60,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_the_log_of_pushes_stays_short_however_long_the_run() -> None:
    """Only pushes since the earliest start that can still matter are kept."""
    coordinator = SpecSync().at_coordinator()
    for worker in range(4):
        coordinator.handle(WorkerJoined(now_ticks=0, worker=worker))
    longest = 0
    for iteration, worker in itertools.product(range(50), range(4)):
        now_ticks = 4 * iteration + worker
        coordinator.handle(IterationFinished(now_ticks=now_ticks, worker=worker, iteration=iteration))
        coordinator.handle(IterationStarted(now_ticks=now_ticks, worker=worker, iteration=iteration + 1))
        longest = max(longest, len(vars(coordinator)["_pushes"]))
    assert longest <= 3 * 4


# -- the specification --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sync"),
    [
        ("spec-sync", SpecSync()),
        ("spec-sync:base=asp", SpecSync()),
        ("spec-sync:base=ssp", SpecSync(base=SSP())),
        ("spec-sync:base=ssp,staleness=4", SpecSync(base=SSP(staleness=4))),
        ("spec-sync:base=ssp:staleness=4", SpecSync(base=SSP(staleness=4))),
        ("spec-sync:base=ssp:staleness=4,execution=lazy", SpecSync(base=SSP(staleness=4, execution="lazy"))),
        ("spec-sync:abort_time_s=0.5,abort_rate=0.25", SpecSync(abort_time_s=0.5, abort_rate=0.25)),
        (
            "spec-sync:base=ssp,staleness=0,abort_time_s=2,abort_rate=0",
            SpecSync(base=SSP(staleness=0), abort_time_s=2.0, abort_rate=0.0),
        ),
        ("spec-sync:base=asp,push_scale=1/n", SpecSync(base=ASP(push_scale="1/n"))),
    ],
)
def test_is_read_and_written(text: str, sync: SpecSync) -> None:
    assert parse(text) == sync
    assert parse(str(sync)) == sync


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("spec-sync:base=bsp", "base is bsp, expected asp or ssp"),
        ("spec-sync:base=nope", "unknown sync model 'nope'"),
        ("spec-sync:abort_time_s=1", "give both, or neither to have them tuned"),
        ("spec-sync:abort_rate=1", "give both, or neither to have them tuned"),
        ("spec-sync:abort_time_s=0,abort_rate=1", "abort_time_s is 0, expected a number >="),
        ("spec-sync:abort_time_s=-1,abort_rate=1", "abort_time_s is -1"),
        ("spec-sync:abort_time_s=inf,abort_rate=1", "abort_time_s is inf"),
        ("spec-sync:abort_time_s=1,abort_rate=-0.5", "abort_rate is -0.5, expected a number >= 0"),
        ("spec-sync:abort_time_s=1,abort_rate=nan", "abort_rate is nan"),
        ("spec-sync:abort_time_s=soon,abort_rate=1", "abort_time_s is 'soon', expected a number"),
        ("spec-sync:staleness=3", "unknown parameter of sync model 'spec-sync': 'staleness'"),
        ("spec-sync:base=asp,staleness=3", "'staleness'"),
    ],
)
def test_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse(text)
    assert complaint in str(refusal.value)


def test_a_base_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="base is bsp, expected asp or ssp"):
        SpecSync(base=BSP())  # type: ignore[arg-type]


def test_an_abort_rate_that_is_never_exceeded_restarts_nobody() -> None:
    coordinator = SpecSync(abort_time_s=1.0, abort_rate=math.inf).at_coordinator()
    for worker in (0, 1):
        coordinator.handle(WorkerJoined(now_ticks=0, worker=worker))
    coordinator.handle(IterationFinished(now_ticks=in_ticks(1.0), worker=0, iteration=0))
    coordinator.handle(IterationStarted(now_ticks=in_ticks(1.0), worker=0, iteration=1))
    coordinator.handle(IterationFinished(now_ticks=in_ticks(1.5), worker=1, iteration=0))
    assert coordinator.handle(TimerFired(now_ticks=in_ticks(2.0), worker=0, iteration=1)) == []


def test_a_warm_up_or_an_edit_is_no_last_iteration_and_ends_no_epoch() -> None:
    coordinator = SpecSync().at_coordinator()
    for worker in range(2):
        coordinator.handle(WorkerJoined(now_ticks=0, worker=worker))
    coordinator.handle(IterationFinished(now_ticks=110, worker=0, iteration=0))
    coordinator.handle(IterationFinished(now_ticks=120, worker=1, iteration=0, warm_up=True))
    assert coordinator._workers[1].last is None
    assert coordinator._yet_to_push == {1}
    coordinator.handle(IterationStarted(now_ticks=130, worker=1, iteration=1))
    coordinator.handle(IterationFinished(now_ticks=180, worker=1, iteration=1))
    assert coordinator._workers[1].last == Span(130, 180)
    assert coordinator._yet_to_push == {0, 1}, "the next epoch has begun"


def test_what_a_script_did_outside_of_training_is_not_part_of_its_last_iteration() -> None:
    """The tuning is as if worker 1 had started when it had evaluated the model."""
    tuned = []
    for start_ticks, outside_ticks in ((100, 0), (20, 80)):
        coordinator = SpecSync().at_coordinator()
        for worker in range(3):
            coordinator.handle(WorkerJoined(now_ticks=0, worker=worker))
        for worker, now_ticks in ((0, 110), (2, 120)):
            coordinator.handle(IterationFinished(now_ticks=now_ticks, worker=worker, iteration=0))
        coordinator._workers[1].start_ticks = start_ticks
        finished = IterationFinished(now_ticks=140, worker=1, iteration=0, outside_ticks=outside_ticks)
        coordinator.handle(finished)
        tuned.append(coordinator.speculation)
    assert tuned[0] == tuned[1]
    assert tuned[0] is not None
