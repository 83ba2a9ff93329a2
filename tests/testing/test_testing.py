"""`paceline.testing.check` finds what is wrong with a sync model, names the promise, and shows the way there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import ClassVar

import pytest

from paceline.core.shard import ShardSync
from paceline.sync import (
    ASP,
    BSP,
    MODELS,
    SSP,
    ElasticBSP,
    JobMachine,
    ShardMachine,
    SyncModel,
    parse,
    register,
)
from paceline.sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    RestartWorker,
    SetTimer,
)
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerLost,
)
from paceline.testing import CheckedShard, Oracle, check, play
from paceline.testing.admission import more_ahead_than
from paceline.testing.promises import Events
from tests.support.marks import thorough


class Careless(ShardMachine):
    """ASP, of which the others get one thing wrong."""

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [(DropPush if push.empty else ApplyPush)(push.worker, push.iteration)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [AnswerPull(pull.worker, pull.iteration)]


class DropsNothing(Careless):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [ApplyPush(push.worker, push.iteration)]


class ForgetsPushes(Careless):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [] if push.iteration > 1 else super().pushed(push)


class HoldsForever(Careless):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return super().pushed(push) if push.empty else [HoldPush(push.worker, push.iteration)]


class AveragesInOrderOfArrival(HoldsForever):
    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[int, int]] = []

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        actions = super().pushed(push)
        if not push.empty:
            self._held.append((push.worker, push.iteration))
        return actions + (self._mean() if len(self._held) == 2 else [])

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        return self._mean() if self._held and not self.counts.live_count else []

    def _mean(self) -> list[AnyAction]:
        held, self._held = tuple(self._held), []
        return [ApplyMean(held)]


class AnswersTwice(Careless):
    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return super().pulled(pull) * 2


class AppliesStalePushesTwice(Careless):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return super().pushed(push) * (2 if push.staleness else 1)


class SetsATimerForTheNextPush(Careless):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [*super().pushed(push), SetTimer(push.worker, push.iteration + 1, push.now_ticks)]


class CountsItsChecks(Careless):
    checks = 0

    def check(self, event: AnyEvent) -> None:
        self.checks += 1


class SharesItsList(Careless):
    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.pushes = self.seen

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        self.pushes.append(push.worker)
        return super().pushed(push)


class WaitsForAnotherPush(Careless):
    """The worker that has pushed last waits until another one pushes. At two shards, this may be another worker."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -1
        self._delayed: dict[int, int] = {}

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        self._last = push.worker
        return super().pushed(push) + self._release()

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        if self._last != pull.worker or self.counts.live_count == 1:
            return super().pulled(pull)
        self._delayed[pull.worker] = pull.iteration
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        self._delayed.pop(event.worker, None)
        return self._release() if self.counts.live_count == 1 else []

    def waits(self) -> dict[int, str]:
        return dict.fromkeys(self._delayed, "a push of another worker")

    def _release(self) -> list[AnyAction]:
        delayed, self._delayed = self._delayed, {}
        return [AnswerPull(worker, iteration) for worker, iteration in delayed.items()]


class WaitsForTheLost(WaitsForAnotherPush):
    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        self._delayed.pop(event.worker, None)
        return []


class DescribesNothing(WaitsForAnotherPush):
    def waits(self) -> dict[int, str]:
        return {}


class NoticesLosses(Careless):
    pass


class RestartsTheLost(JobMachine):
    def __init__(self) -> None:
        self._left: list[int] = []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        self._left.append(event.worker)
        return []

    def finished(self, event: IterationFinished) -> list[AnyAction]:
        return [RestartWorker(worker, 0) for worker in self._left]


@pytest.fixture
def registered() -> Iterator[None]:
    known = set(MODELS)
    yield
    for name in set(MODELS) - known:
        del MODELS[name]
    parse.cache_clear()


def model_of(machine: type[ShardMachine], coordinator: type[JobMachine] | None = None) -> SyncModel:
    class Broken(SyncModel, frozen=True):
        name = machine.__name__.lower()

        def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
            return machine()

        def at_coordinator(self, seed: int = 0) -> JobMachine | None:
            return coordinator() if coordinator is not None else None

    register(Broken)
    return Broken()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (
            DropsNothing,
            r"random events are handled\n.*an empty push must be dropped\nafter these events:\n    WorkerJoined",
        ),
        (ForgetsPushes, r"caused 0 actions that apply, hold or drop a push, expected one .*\nafter these"),
        (HoldsForever, r"all workers have left, but the pushes \{.*\} have not been applied"),
        (AveragesInOrderOfArrival, r"not in worker order"),
        (AnswersTwice, r"AnswerPull.*answers a pull that was not requested"),
        (AppliesStalePushesTwice, r"staleness=[1-9].* caused 2 actions that apply, hold or drop a push"),
        (SetsATimerForTheNextPush, r"but no live worker \d has pushed iteration \d"),
        (CountsItsChecks, r"PullRepeated.* has changed the state machine"),
        (SharesItsList, r"machines share nothing\nevents at one state machine have changed another"),
        (WaitsForTheLost, r"all workers wait after Worker(Lost|Finished)"),
        (DescribesNothing, r"delayed pulls are described\nworkers \{\d\} wait, but waits\(\) describes \{\}"),
    ],
)
def test_a_broken_promise_is_named(machine: type[ShardMachine], words: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)^{machine.__name__.lower()} breaks a promise: .*{words}"):
        check(model_of(machine))


@pytest.mark.usefixtures("registered")
@pytest.mark.thorough
def test_a_machine_that_keeps_the_promises_passes() -> None:
    result = check(model_of(Careless))
    assert result.sync == "careless"
    assert result.states > 1000


@pytest.mark.parametrize(
    ("sync", "numbers"),
    [(ASP(), [(None, None)] * 3), (ASP(push_scale="n/tau"), [(0, 2), (1, 2), (1, 2)])],
    ids=["asp", "n/tau"],
)
def test_a_push_has_the_numbers_that_the_model_needs(
    sync: SyncModel, numbers: list[tuple[int | None, int | None]]
) -> None:
    checked = CheckedShard(ShardSync(sync))
    for _ in range(2):
        checked.tell(checked.legal.join())
    for worker in (0, 1, 0):
        checked.tell(checked.legal.push(worker))
        checked.tell(checked.legal.pull(worker))
    pushes = [event for event in checked.events if isinstance(event, PushReceived)]
    assert [(push.staleness, push.at_once) for push in pushes] == numbers


@pytest.mark.usefixtures("registered")
def test_the_search_finds_a_deadlock_that_needs_two_shards() -> None:
    assert check(model_of(WaitsForAnotherPush), shards=1).states > 100
    with pytest.raises(
        AssertionError, match=r"(?s)no interleaving fails.*shard 1 receives.*deadlock: worker \d is waiting"
    ):
        check(parse("waitsforanotherpush"))


@pytest.mark.usefixtures("registered")
def test_a_coordinator_that_commands_the_lost_is_found() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)RestartWorker.*but the worker has left\nafter these events.*WorkerLost"
    ):
        check(model_of(NoticesLosses, RestartsTheLost))


def test_a_model_that_is_not_registered_is_named() -> None:
    class Unknown(SyncModel, frozen=True):
        name = "unknown"

    with pytest.raises(AssertionError, match="notation reads back\nunknown cannot be parsed"):
        check(Unknown())


def test_a_rule_that_does_not_hold_is_found() -> None:
    with pytest.raises(
        AssertionError,
        match=r"a worker may be lost\n(?s:.*)workers \{\d\} wait at a shard, but set\(\) must",
    ):
        check(SSP(staleness=1), more_ahead_than(2))


def test_shards_that_average_different_pushes_are_found() -> None:
    check(BSP(), agree=True, iterations=1)
    with pytest.raises(AssertionError, match="shards have averaged different pushes"):
        check(parse("drop-stragglers:quorum=1"), agree=True, iterations=1)


def test_an_oracle_is_compared() -> None:
    def applied(events: Events) -> list[ApplyPush | ApplyMean]:
        last = events[-1]
        pushed = isinstance(last, PushReceived) and not last.empty
        return [ApplyPush(last.worker, last.iteration)] if isinstance(last, PushReceived) and pushed else []

    assert check(ASP(), oracle=Oracle(lambda events: set(), applied), iterations=1).promises == 13
    with pytest.raises(
        AssertionError, match=r"the oracle agrees\nworkers \{\d\} wait, but the oracle expects"
    ):
        check(SSP(staleness=0), oracle=Oracle(lambda events: set(), applied), iterations=1)


@pytest.mark.processes
@pytest.mark.parametrize(
    "call",
    [
        "check(ASP(), iterations=1)",
        *thorough("explore(SmallJob(ASP(), workers=1, shards=1, iterations=1))"),
    ],
)
def test_without_assertions_no_model_passes(call: str) -> None:
    """The promises are assertions, which Python leaves out with -O."""
    program = f"from paceline.sync import ASP\nfrom paceline.testing import SmallJob, check, explore\n{call}"
    ended = subprocess.run([sys.executable, "-B", "-O", "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ConfigurationError: Python runs without assertions" in ended.stderr


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.thorough
def test_models_with_a_planner_pass(iterations: int) -> None:
    assert check(ElasticBSP(lookahead=2), iterations=iterations).states > 100


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("> join 0", "must begin with"),
        ("> shard bsp\n> leap 0", "not a command: 'leap 0'"),
        ("> shard bsp\n> at 2\n> at 1", "the time cannot go back from 2 s to 1 s"),
    ],
)
def test_a_script_that_cannot_be_played_says_why(script: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        play(script)
