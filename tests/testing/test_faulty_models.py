"""Twenty faulty models. `check` refuses each of them, or a run names the model and the event."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from paceline.errors import RunFailedError
from paceline.lab.ranking import rank
from paceline.sim import Cluster, simulate
from paceline.sync import MODELS, JobMachine, ShardMachine, SyncModel, parse, register
from paceline.sync.actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush, SetTimer
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.plugins import load_models
from paceline.testing import check
from tests.support.marks import thorough

EXAMPLES = Path(__file__).parents[2] / "examples"

MOST_STATES = 50_000
"""Number of states that are searched in about five seconds."""


class Shard(ShardMachine):
    """A correct model, ASP, whose subclasses each have one fault."""

    def __init__(self, shard: int = 0) -> None:
        super().__init__()
        self.shard = shard
        self.held: list[tuple[int, int]] = []

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [(DropPush if push.empty else ApplyPush)(push.worker, push.iteration)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [AnswerPull(pull.worker, pull.iteration)]


class NeverLetsGo(Shard):
    """The first worker's second pull is never answered."""

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [] if pull.worker == 0 and pull.iteration >= 1 else super().pulled(pull)


class RaisesAtOneShard(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if self.shard == 1 and push.iteration == 1:
            raise KeyError(push.worker)
        return super().pushed(push)


class AppliesTwice(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return super().pushed(push) * 2


class AveragesWhatWasApplied(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [*super().pushed(push), ApplyMean(((push.worker, push.iteration),))]


class HoldsForEver(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [(DropPush if push.empty else HoldPush)(push.worker, push.iteration)]


class NegativeScale(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        first = super().pushed(push)
        return first if push.empty else [ApplyPush(push.worker, push.iteration, -0.5)]


class NoScale(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        first = super().pushed(push)
        return first if push.empty else [ApplyPush(push.worker, push.iteration, float("nan"))]


class SharesState(Shard):
    """A class attribute is the same object in all shards."""

    seen: ClassVar[list[int]] = []

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        self.seen.append(push.iteration)
        drops = push.empty or len(self.seen) % 2
        return [(DropPush if drops else ApplyPush)(push.worker, push.iteration)]


class ReadsTheClock(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        drops = push.empty or time.time() < 0
        return [(DropPush if drops else ApplyPush)(push.worker, push.iteration)]


class ReadsTheDate(Shard):
    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return super().pulled(pull) if datetime.now().year else []


class DrawsGlobally(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        drops = push.empty or random.gauss(0.0, 1.0) > 100.0
        return [(DropPush if drops else ApplyPush)(push.worker, push.iteration)]


class DrawsFromNumPy(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        drops = push.empty or np.random.rand() > 1.0
        return [(DropPush if drops else ApplyPush)(push.worker, push.iteration)]


class NeverApplies(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [DropPush(push.worker, push.iteration)]


class AnswersTwice(Shard):
    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return super().pulled(pull) * 2


class AnswersStrangers(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return [*super().pushed(push), AnswerPull(push.worker + 1, push.iteration)]


class ReturnsNothing(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        return None  # type: ignore[return-value]


class ReturnsWords(Shard):
    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return ["answer"]  # type: ignore[list-item]


class WaitsForTheLost(Shard):
    """BSP in which a worker that has left still counts."""

    def __init__(self, shard: int = 0) -> None:
        super().__init__(shard)
        self.everybody: set[int] = set()
        self.asked: dict[int, int] = {}

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        self.everybody.add(event.worker)
        return []

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        self.asked[pull.worker] = pull.iteration
        if self.asked.keys() != self.everybody:
            return []
        asked, self.asked = self.asked, {}
        return [AnswerPull(worker, iteration) for worker, iteration in asked.items()]


class ChangesInCheck(Shard):
    def check(self, event: AnyEvent) -> None:
        self.held.append((event.now_ticks, 0))


class UnsortedMean(Shard):
    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if push.empty:
            return [DropPush(push.worker, push.iteration)]
        self.held.append((push.worker, push.iteration))
        return [HoldPush(push.worker, push.iteration), *self.merged(2)]

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        return [] if self.counts.live_count else self.merged(1)

    def merged(self, least: int) -> list[AnyAction]:
        if len(self.held) < least:
            return []
        held, self.held = tuple(sorted(self.held, reverse=True)), []
        return [ApplyMean(held)]


class WaitsForItsTimer(Shard):
    """The timer is set, but nothing answers the pull when the timer fires."""

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        return [SetTimer(pull.worker, pull.iteration, pull.now_ticks + 1)]


class DescribesWrongly(NeverLetsGo):
    def waits(self) -> dict[int, str]:
        return {0: ""}


class Planner(JobMachine):
    def finished(self, event: IterationFinished) -> list[AnyAction]:
        return [AnswerPull(event.worker, event.iteration)]


class PlansAnswers(Shard):
    pass


FAULTS: dict[type[Shard], str] = {
    NeverLetsGo: "wait",
    RaisesAtOneShard: "KeyError",
    AppliesTwice: "caused 2 actions that apply, hold or drop a push",
    AveragesWhatWasApplied: "contains pushes that are not held",
    HoldsForEver: "all workers have left, but the pushes",
    NegativeScale: "has the scale -0.5, expected a finite number > 0",
    NoScale: "has the scale nan, expected a finite number > 0",
    SharesState: "in one state machine and",
    ReadsTheClock: r"time\(\) reads a clock; use event.now_ticks",
    ReadsTheDate: r"now\(\) reads a clock",
    DrawsGlobally: "draws from a global random generator",
    DrawsFromNumPy: "draws from a global random generator",
    NeverApplies: "finished, but no push was applied",
    AnswersTwice: "answers a pull that was not requested",
    AnswersStrangers: "answers a pull that was not requested",
    ReturnsNothing: "NoneType",
    ReturnsWords: "answer",
    WaitsForTheLost: "wait",
    ChangesInCheck: "changed|refused",
    UnsortedMean: "not in worker order",
    WaitsForItsTimer: "wait",
    DescribesWrongly: "wait",
    PlansAnswers: "a state machine at the coordinator cannot return",
}
"""Each faulty machine, with what `check` says about it."""

AT_RUN_TIME: dict[type[Shard], str] = {
    NeverLetsGo: "worker 0, after its iteration 1, waits at shard \\d .faulty:kind=NeverLetsGo.",
    RaisesAtOneShard: "faulty:kind=RaisesAtOneShard raised KeyError: 0 at shard 1, when it received the push of "
    "iteration 1 of worker 0",
    AppliesTwice: "faulty:kind=AppliesTwice returned something that cannot be carried out at shard [01], when it",
    NegativeScale: "faulty:kind=NegativeScale returned something that cannot be carried out at shard [01], when it "
    "received the push of iteration 0 of worker 0: .* has the scale -0.5",
    NoScale: "faulty:kind=NoScale returned something that cannot be carried out .* has the scale nan",
    AnswersStrangers: "faulty:kind=AnswersStrangers",
    ReturnsNothing: "faulty:kind=ReturnsNothing returned something that cannot be carried out at shard [01]",
    ReturnsWords: "faulty:kind=ReturnsWords returned something that cannot be carried out .* received the pull of "
    "iteration 0",
    WaitsForItsTimer: "waits at shard \\d .faulty:kind=WaitsForItsTimer. for the sync model",
}
"""Machines with which a run fails, and what the error says."""

FOR_EVER = """\
a worker waits for ever, because its pull is not answered even when all other workers have finished:
  worker 0, after its iteration 1, waits at shard 0 (faulty:kind=NeverLetsGo) for the sync model \
faulty:kind=NeverLetsGo, which does not describe its delayed pulls"""

KINDS = {kind.__name__: kind for kind in FAULTS}


@pytest.fixture(autouse=True)
def faulty() -> Iterator[None]:
    register(Faulty)
    SharesState.seen.clear()
    yield
    MODELS.pop("faulty", None)
    parse.cache_clear()


class Faulty(SyncModel, frozen=True):
    name = "faulty"

    kind: str

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        return KINDS[self.kind](shard)

    def at_coordinator(self, seed: int = 0) -> JobMachine | None:
        return Planner() if self.kind == "PlansAnswers" else None


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_faulty_model_is_refused(kind: type[Shard]) -> None:
    with pytest.raises(AssertionError, match=FAULTS[kind]) as refused:
        check(Faulty(kind=kind.__name__))
    assert str(refused.value).startswith(f"faulty:kind={kind.__name__} breaks a promise: ")


def test_the_model_without_a_fault_is_not_refused() -> None:
    KINDS["Shard"] = Shard
    checked = check(Faulty(kind="Shard"))
    assert checked.promises == 12
    assert checked.states < MOST_STATES


@pytest.mark.parametrize("kind", AT_RUN_TIME, ids=lambda kind: kind.__name__)
def test_a_simulation_names_the_model_and_the_event(kind: type[Shard]) -> None:
    with pytest.raises(RunFailedError, match=f"(?s){AT_RUN_TIME[kind]}"):
        simulate(Cluster([1.0, 1.5, 4.0], servers=2), Faulty(kind=kind.__name__), 5)


@pytest.mark.usefixtures("one_core")  # other processes cannot import the models of a test
def test_a_comparison_goes_on_without_the_faulty_models() -> None:
    kinds = [*AT_RUN_TIME, HoldsForEver]
    syncs = ["bsp", "asp", *(f"faulty:kind={kind.__name__}" for kind in kinds)]
    rows = rank(Cluster([1.0, 1.5, 4.0], servers=2), syncs, iterations=5)
    assert [row.sync for row in rows[:2]] == ["asp", "bsp"]
    assert [row.sound for row in rows] == [True, True] + [False] * len(kinds)
    told: dict[str, Any] = {row.sync: row.failure or row.unapplied for row in rows[2:]}
    assert all(told.values())
    assert told["faulty:kind=NeverLetsGo"].startswith(FOR_EVER)


@pytest.mark.parametrize("limit", [{"until_s": 20.0}, {"until_s": 1e6, "until_updates": 12}])
def test_a_worker_that_is_never_let_go_is_named_although_the_others_go_on(limit: dict[str, Any]) -> None:
    with pytest.raises(RunFailedError) as failed:
        simulate(Cluster([1.0, 1.5], servers=1), Faulty(kind="NeverLetsGo"), None, **limit)
    assert failed.value.reason.startswith(FOR_EVER)
    assert "worker 1" not in failed.value.reason


@pytest.mark.parametrize("until_s", [3.3, 7.9, 23.7])
@pytest.mark.parametrize(
    "sync", ["naive-waiting:delay_s=2", "pssp:staleness=1,probability=0.5", "bsp@0,asp@4"]
)
def test_a_worker_that_waits_when_a_run_is_cut_off_is_not_taken_for_one(sync: str, until_s: float) -> None:
    result = simulate(Cluster([1.0, 1.5, 4.0], servers=2), sync, None, until_s=until_s)
    assert result.measures.duration_s == until_s


@pytest.mark.parametrize(
    "model", ["merge-late:late=1,most=2", *thorough("median-bound:ahead=1", "buffered:batch=2")]
)
def test_an_ordinary_model_is_checked_in_a_few_seconds(
    model: str, monkeypatch: pytest.MonkeyPatch, own_models: None
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    load_models("", [model.partition(":")[0].replace("-", "_")])
    assert 1_000 < check(parse(model)).states < MOST_STATES


def test_a_stall_is_noticed_without_a_description() -> None:
    with pytest.raises(RunFailedError) as failed:
        simulate(Cluster([1.0, 1.5], servers=1), Faulty(kind="NeverLetsGo"), 5)
    assert (
        "worker 0, after its iteration 1, waits at shard 0 (faulty:kind=NeverLetsGo) for the sync model"
        in str(failed.value)
    )
