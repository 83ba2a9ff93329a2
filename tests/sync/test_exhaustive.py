"""Every interleaving of a small job, time abstracted away: nothing deadlocks, and the bounds hold.

What is checked in every state is in `paceline.testing.small_job`, the admission rules are in `admission`. What a
model decides by times or by chance is decided by tables here, of which several are tried, with another column for
each shard.

PACELINE_CHECK_MODELS=1 goes to 3 workers, 2 shards and 4 iterations for every model and prints how far it is
(`make check-models`); PACELINE_CHECK_MODELS="workers,shards,iterations,losses" to another size. Each step up costs
about tenfold. Changes of model and the search itself are tried at larger sizes, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Sequence
from fractions import Fraction
from itertools import combinations, product
from typing import Any, ClassVar

import msgspec
import pytest

from paceline.core.edits import Edits
from paceline.core.joint_norms import JointNorms
from paceline.core.losses import Loss
from paceline.core.messages import Answer, Commit, IterationFinished, Message, PlanPublished
from paceline.core.requests import Request, Send
from paceline.core.shard_sync import ShardSync
from paceline.core.worker import Worker
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
    SpecSync,
    SyncModel,
    events,
)
from paceline.sync.actions import AnswerPull, AnyAction, HoldPush
from paceline.sync.conditions import ConditionMachine
from paceline.sync.draws import uniform
from paceline.sync.dsps import AdaptiveMachine
from paceline.sync.dssp import SpendingMachine
from paceline.sync.events import (
    AnyEvent,
    PushReceived,
    Stop,
    WorkerFinished,
    WorkerLost,
)
from paceline.sync.spec_sync import Speculation, Speculator
from paceline.testing.admission import STOPPED, Admission, ShardView, more_ahead_than
from paceline.testing.search import explore, survey
from paceline.testing.small_job import SmallJob
from paceline.testing.states import Call, State, Step

LARGE = os.environ.get("PACELINE_CHECK_MODELS", "")


# -- models whose choices are tables ----------------------------------------------------------------------


def dssp(table: int) -> DSSP:
    """DSSP(0, 2) that spends what a table says, whatever the times."""

    class Tabled(SpendingMachine):
        shard = 0

        def _choose(self, worker: int) -> int:
            return int(3 * uniform(table, self.shard, worker, self.counts.count[worker]))

    class TabledDSSP(DSSP, frozen=True):
        draws: ClassVar[str] = "per-shard"

        def at_shard(self, seed: int = 0, shard: int = 0) -> SpendingMachine:
            machine = Tabled(self)
            machine.shard = shard
            return machine

    return TabledDSSP(lower=0, upper=2)


def dsps(table: int) -> DSPS:
    """DSPS(0, 2) whose staleness is what a table says, whatever the times."""

    class Tabled(AdaptiveMachine):
        shard = 0

        def _adapt(self) -> None:
            self.staleness = int(3 * uniform(table, self.shard, self.v_train))

    class TabledDSPS(DSPS, frozen=True):
        draws: ClassVar[str] = "per-shard"

        def at_shard(self, seed: int = 0, shard: int = 0) -> AdaptiveMachine:
            machine = Tabled(self)
            machine.shard = shard
            return machine

    return TabledDSPS(lower=0, upper=2)


def adaptive_spec_sync(table: int, base: ASP | SSP) -> SpecSync:
    """Adaptive SpecSync that tunes as a table says, whatever the times."""

    class Tabled(Speculator):
        epoch = 0

        def finished(self, event: events.IterationFinished) -> list[AnyAction]:
            actions = super().finished(event)
            self._pushes.clear()  # nothing is tuned from them
            return actions

        def _end_epoch_if_complete(self) -> None:
            if self._yet_to_push or not self._workers:
                return
            self.epoch += 1
            choices = [None, Speculation(1, Fraction(0)), Speculation(1, Fraction(1, 2))]
            self.speculation = choices[int(3 * uniform(table, self.epoch))]
            self._yet_to_push = set(self._workers)

    class TabledSpecSync(SpecSync, frozen=True):
        def at_coordinator(self, seed: int = 0) -> Speculator:
            return Tabled(self)

    return TabledSpecSync(base=base)


def gap_at_most_one(state: PullState) -> bool:
    return state.gap <= 1


def fails_in_its_second_round(state: PullState) -> bool:
    if state.progress >= 1:
        raise ValueError("no more")
    return state.gap <= 1


SPEC_SYNC = SpecSync(abort_time_s=1.0, abort_rate=0.0)
FAILING = Conditions(pull=fails_in_its_second_round)
MIXED: tuple[SyncModel, ...] = (SSP(staleness=1, execution="lazy"), BSP())

MODELS: dict[str, SyncModel | Sequence[SyncModel]] = {
    "bsp": BSP(),
    "asp": ASP(),
    "ssp": SSP(staleness=1),
    "ssp-lazy": SSP(staleness=1, execution="lazy"),
    **{f"dssp-{table}": dssp(table) for table in range(4)},
    **{f"dsps-{table}": dsps(table) for table in range(4)},
    "pssp": PSSP(staleness=0),
    "pssp-lazy": PSSP(staleness=0, execution="lazy"),
    "pssp-per-shard": PSSP(staleness=0, draws="per-shard"),
    "dynamic-pssp": DynamicPSSP(staleness=0, alpha=1.0),
    "dynamic-pssp-per-shard": DynamicPSSP(staleness=0, alpha=1.0, draws="per-shard"),
    "drop-stragglers": DropStragglers(quorum=1),
    "naive-waiting": NaiveWaiting(delay_s=1.0),
    "conditions": Conditions(pull=gap_at_most_one),
    "conditions-lazy": Conditions(pull=gap_at_most_one, execution="lazy"),
    "conditions-failing": FAILING,
    "mixed": MIXED,
    "mixed-timers": (NaiveWaiting(delay_s=1.0), BSP()),
    "mixed-failing": (FAILING, SSP(staleness=1)),
    "elastic-bsp": ElasticBSP(),
    "spec-sync": SPEC_SYNC,
    "spec-sync-half": SpecSync(abort_time_s=1.0, abort_rate=0.5),
    "spec-sync-ssp": SpecSync(base=SSP(staleness=1), abort_time_s=1.0, abort_rate=0.0),
    **{f"spec-sync-adaptive-{table}": adaptive_spec_sync(table, ASP()) for table in range(2)},
    "spec-sync-adaptive-ssp": adaptive_spec_sync(1, SSP(staleness=1)),
}

LAZY_CONDITIONS = Admission(lambda told: set(), more_ahead_than(0).may)

SEEDS = {"pssp": 3, "pssp-lazy": 3, "pssp-per-shard": 3, "dynamic-pssp": 3, "dynamic-pssp-per-shard": 3}
"""How many are tried of the models that draw."""


def cluster_of(
    name: str,
    *,
    workers: int,
    shards: int,
    iterations: int,
    losses: int = 0,
    late: int = 0,
    seed: int = 0,
    commits: bool = True,
) -> SmallJob:
    """A job under one of the models above."""
    sync = MODELS[name]
    return SmallJob(
        sync,
        # Not every pull of a gap above 1 has been delayed when it arrived: some of these have been answered since.
        LAZY_CONDITIONS if name == "conditions-lazy" else None,
        workers=workers,
        shards=shards,
        iterations=iterations,
        losses=losses,
        late=late,
        seed=seed,
        commits=commits,
        any_plan=True,
        # Those that drop choose at each shard; a condition fails at each shard by itself.
        agree=isinstance(sync, SyncModel) and not isinstance(sync, DropStragglers | Conditions),
    )


def visit(name: str, cluster: SmallJob) -> int:
    """Search a job, loudly if it is a large one."""
    if not LARGE:
        return explore(cluster)
    start_s = time.monotonic()

    def progress(states: int, end: str = "\r") -> None:
        print(
            f"{name}: {states} states, {time.monotonic() - start_s:.0f} s",
            end=end,
            file=sys.stderr,
            flush=True,
        )

    states = survey(cluster, progress)
    progress(states, "\n")
    return states


# -- one model all the way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_with_a_loss_deadlocks_or_breaks_the_bound(name: str) -> None:
    size = LARGE if "," in LARGE else "3,2,4,1" if LARGE else "2,2,3,1"
    workers, shards, iterations, losses = map(int, size.split(","))
    for seed in range(SEEDS.get(name, 1)):
        cluster = cluster_of(
            name, workers=workers, shards=shards, iterations=iterations, losses=losses, seed=seed
        )
        assert visit(name, cluster) > 100


small = pytest.mark.skipif(bool(LARGE), reason="the small sizes are visited by every run of the tests")


@small
@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_with_a_late_worker_deadlocks_or_breaks_the_bound(name: str) -> None:
    alone = isinstance(
        MODELS[name], ElasticBSP | SpecSync
    )  # where the coordinator's word multiplies the interleavings
    for seed in range(SEEDS.get(name, 1)):
        cluster = cluster_of(name, workers=1 if alone else 2, late=1, shards=2, iterations=2, seed=seed)
        assert explore(cluster) > 50


@small
@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_of_a_join_and_a_loss_deadlocks_or_breaks_the_bound(name: str) -> None:
    """Either worker may be lost. The other one, if it is the newcomer, may be alone at once."""
    assert explore(cluster_of(name, workers=1, late=1, losses=1, shards=2, iterations=1)) > 50


@small
def test_under_bsp_all_rounds_are_the_same_at_all_shards_whoever_joins_and_whoever_is_lost() -> None:
    """Apart from a push that one shard has averaged before the loss and another has never received."""
    assert explore(cluster_of("bsp", workers=2, late=1, losses=1, shards=2, iterations=1)) > 10_000


@small
@pytest.mark.parametrize(
    ("before", "after", "losses"), [("bsp", "asp", 0), ("asp", "bsp", 0), ("asp", "bsp", 1)]
)
def test_no_interleaving_of_a_join_and_a_change_of_model_deadlocks(
    before: str, after: str, losses: int
) -> None:
    cluster = SmallJob(
        MODELS[before],
        workers=1,
        late=1,
        losses=losses,
        shards=2,
        iterations=2 - losses,  # with a loss, two iterations take more than half a minute
        changes=[after],
        commits=True,
        any_plan=True,
    )
    assert explore(cluster) > 100


@small
@pytest.mark.parametrize("name", ["bsp", "elastic-bsp"])
def test_the_search_finds_a_held_push_that_is_kept_though_a_shard_has_not_received_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loss, "_kept", 1_000)
    with pytest.raises(AssertionError, match="shards have averaged different pushes"):
        explore(cluster_of(name, workers=2, losses=1, shards=2, iterations=1 if name == "bsp" else 3))


@small
@pytest.mark.parametrize("name", ["bsp", "asp", "ssp", "ssp-lazy", "naive-waiting"])
def test_pulls_that_come_by_themselves_change_nothing(name: str) -> None:
    assert explore(cluster_of(name, workers=2, shards=2, iterations=3, losses=1, commits=False)) > 100


@small
def test_no_interleaving_of_two_supersteps_deadlocks() -> None:
    assert explore(cluster_of("elastic-bsp", workers=2, shards=1, iterations=6)) > 2_000


@small
@pytest.mark.parametrize("iterations", [3, 4])
def test_no_interleaving_of_a_quorum_of_three_workers_deadlocks(iterations: int) -> None:
    """Two shards may disagree about who is late, and by how much; the worker goes on from the later round at both."""
    cluster = SmallJob(
        DropStragglers(quorum=2), workers=3, shards=2, iterations=iterations, commits=True, agree=False
    )
    assert explore(cluster) > 500


def sized_cluster(sync: Any, size: str, **options: Any) -> SmallJob:
    """A job of a size "workers,shards,iterations,losses", in which plans may name any iteration."""
    workers, shards, iterations, losses = map(int, size.split(","))
    return SmallJob(
        sync,
        workers=workers,
        shards=shards,
        iterations=iterations,
        losses=losses,
        commits=True,
        any_plan=True,
        **options,
    )


# -- changes of model ---------------------------------------------------------------------------------------

CHANGES = [
    ("asp", ["bsp"], 2, 1),
    ("bsp", ["asp"], 2, 1),
    ("ssp-lazy", ["bsp"], 2, 1),
    ("elastic-bsp", ["bsp"], 3, 0),
    ("elastic-bsp", ["bsp"], 2, 1),
    ("bsp", ["elastic-bsp"], 2, 1),
    ("asp", [str(SPEC_SYNC)], 2, 1),
    ("spec-sync", ["ssp:staleness=1"], 2, 1),
    ("spec-sync", ["elastic-bsp"], 2, 0),
    ("drop-stragglers", ["ssp:staleness=1"], 2, 1),
    ("bsp", ["drop-stragglers:quorum=1"], 3, 0),
    ("naive-waiting", ["bsp"], 3, 0),
    ("naive-waiting", ["bsp"], 2, 1),
    ("ssp", ["ssp:staleness=1,execution=lazy|bsp"], 2, 1),
    ("mixed", ["elastic-bsp"], 3, 0),
    ("conditions-failing", ["ssp:staleness=1"], 2, 1),
    ("ssp", [str(FAILING)], 2, 1),
    ("elastic-bsp", [str(FAILING)], 3, 0),
    ("pssp-per-shard", ["dsps:lower=0,upper=1"], 3, 0),
    ("asp", ["bsp", "ssp:staleness=1"], 3, 0),
    ("bsp", ["asp", "bsp"], 3, 0),
    ("elastic-bsp", ["bsp", "elastic-bsp"], 2, 0),
    ("asp", [str(SPEC_SYNC), "bsp"], 2, 0),
]
"""(before, after, iterations, losses); a second one that follows may be asked for while the first is under way."""

LARGER_CHANGES = [(name, changes, 3, losses) for name, changes, _, losses in CHANGES]


@pytest.mark.parametrize(("name", "changes", "iterations", "losses"), LARGER_CHANGES if LARGE else CHANGES)
def test_no_interleaving_with_a_change_of_model_deadlocks_or_breaks_a_bound(
    name: str, changes: list[str], iterations: int, losses: int
) -> None:
    each_its_own = ("drop-stragglers", "conditions", "mixed", "|")
    cluster = SmallJob(
        MODELS[name],
        workers=2,
        shards=2,
        iterations=iterations,
        losses=losses,
        changes=changes,
        commits=True,
        any_plan=True,
        agree=not any(word in " ".join([name, *changes]) for word in each_its_own),
    )
    assert explore(cluster) > 1_000


# -- clipping ------------------------------------------------------------------------------------------------


CLIPPED: list[tuple[str, list[str], str]] = [
    ("bsp", [], "2,2,2,2"),
    ("bsp", [], "3,2,2,1"),
    ("bsp", [], "2,3,2,1"),
    ("elastic-bsp", [], "2,2,3,1"),
    ("elastic-bsp", [], "3,2,2,0"),
    ("bsp", ["asp"], "2,2,2,1"),
    ("bsp", ["elastic-bsp"], "2,2,3,0"),
    ("asp", ["bsp"], "2,2,3,0"),
]
"""A model, the changes that are asked for, and workers, shards, iterations and losses."""


@pytest.mark.parametrize(("name", "changes", "size"), CLIPPED)
def test_no_interleaving_with_clipping_deadlocks_and_all_shards_clip_by_the_same_factor(
    name: str, changes: list[str], size: str
) -> None:
    assert explore(clipped_cluster(name, changes, size)) > 1_000


def test_without_questions_about_torn_means_the_search_finds_that_a_shard_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is lost between two shards leaves a mean that exists at only one of them."""
    monkeypatch.setattr(JointNorms, "_ask", lambda self, mean: [])
    with pytest.raises(AssertionError, match="have not been applied"):
        explore(clipped_cluster("elastic-bsp", [], "2,2,3,1"))


def clipped_cluster(name: str, changes: list[str], size: str) -> SmallJob:
    return sized_cluster(MODELS[name], size, changes=changes, clips=True)


# -- edits of the weights ------------------------------------------------------------------------------------


EDITED: list[tuple[str, list[str], str, tuple[int, ...]]] = [
    ("bsp", [], "2,2,3,1", (1,)),
    ("bsp", [], "3,2,2,1", (0,)),
    ("asp", [], "2,2,3,0", (0, 1)),
    ("asp", [], "2,2,2,1", (0,)),
    ("asp", [], "3,2,1,0", (0,)),
    ("ssp", [], "2,2,3,0", (0, 2)),
    ("drop-stragglers", [], "2,2,2,0", (1,)),
    ("elastic-bsp", [], "2,2,3,0", (1,)),
    ("bsp", ["asp"], "2,2,2,0", (1,)),
    ("asp", ["bsp"], "2,2,2,0", (1,)),
]
"""A model, the changes that are asked for; workers, shards, iterations and losses; the iterations that are edits."""


@pytest.mark.parametrize(("name", "changes", "size", "edits"), EDITED)
def test_in_no_interleaving_do_shards_take_the_edits_of_different_workers(
    name: str, changes: list[str], size: str, edits: tuple[int, ...]
) -> None:
    assert explore(edited_cluster(name, changes, size, edits)) > 20


def test_if_every_shard_named_an_editor_the_search_would_find_that_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Edits, "name", lambda self, worker, number: True)
    with pytest.raises(AssertionError, match="expected one"):
        explore(edited_cluster("asp", [], "2,2,1,0", (0,)))


def edited_cluster(name: str, changes: list[str], size: str, edits: tuple[int, ...]) -> SmallJob:
    return sized_cluster(MODELS[name], size, changes=changes, agree=name != "drop-stragglers", edits=edits)


# -- the search itself --------------------------------------------------------------------------------------


HALF = SpecSync(abort_time_s=1.0, abort_rate=0.5)
SPEC_SYNC_SSP = SpecSync(base=SSP(staleness=0), abort_time_s=1.0, abort_rate=0.0)

Searched = tuple[SyncModel, list[str], str]
"""A model, the changes that are asked for, and workers, shards, iterations and losses."""

SEARCHED: list[Searched] = [
    (SSP(staleness=1), [], "2,2,2,1"),
    (SSP(staleness=1), [], "3,1,2,1"),
    (DropStragglers(quorum=2), [], "3,1,2,1"),
    (NaiveWaiting(delay_s=1.0), [], "2,2,2,1"),
    (ElasticBSP(), [], "2,2,2,1"),
    (ElasticBSP(), [], "2,1,4,1"),
    (ElasticBSP(), [], "3,1,2,0"),
    (SPEC_SYNC, [], "2,2,2,0"),
    (SPEC_SYNC, [], "2,1,3,1"),
    (HALF, [], "2,1,3,0"),
    (SPEC_SYNC_SSP, [], "2,2,2,1"),
    (adaptive_spec_sync(0, ASP()), [], "2,1,3,1"),
    (ASP(), ["bsp"], "2,2,2,0"),
    (ElasticBSP(), ["ssp:staleness=1"], "2,2,2,0"),
]
LARGER_SEARCHED: list[Searched] = [
    (SPEC_SYNC, [], "3,1,2,0"),
    (HALF, [], "3,1,2,0"),
    (ASP(), ["bsp"], "2,2,2,1"),
]


@pytest.mark.parametrize(("sync", "changes", "size"), LARGER_SEARCHED if LARGE else SEARCHED, ids=str)
def test_the_reductions_lose_no_end(sync: SyncModel, changes: list[str], size: str) -> None:
    """Nor anything that the coordinator or a worker comes to know on the way."""
    agree = not isinstance(sync, DropStragglers)
    require_equal_ends(sized_cluster(sync, size, changes=changes, agree=agree))


@pytest.mark.parametrize(("name", "size"), [("bsp", "2,2,2,1"), ("elastic-bsp", "2,2,2,1")])
def test_the_reductions_lose_no_end_of_a_job_that_clips(name: str, size: str) -> None:
    require_equal_ends(clipped_cluster(name, [], size))


@pytest.mark.parametrize(("name", "size"), [("bsp", "2,2,2,1"), ("asp", "2,2,1,1")])
def test_the_reductions_lose_no_end_of_a_job_that_edits(name: str, size: str) -> None:
    require_equal_ends(edited_cluster(name, [], size, (0,)))


def require_equal_ends(cluster: SmallJob) -> None:
    """A search with the reductions finds what a search without them finds, in fewer states."""

    def search(whole: bool) -> tuple[int, set[State], set[Hashable]]:
        ends: set[State] = set()
        known: set[Hashable] = set()
        states = explore(
            cluster,
            whole=whole,
            ends=ends,
            visit=lambda state: known.update(cluster.apart_from_shards(state)),
        )
        return states, ends, known

    reduced, whole = search(whole=False), search(whole=True)
    assert reduced[1:] == whole[1:]
    assert reduced[0] < whole[0]


@small
@pytest.mark.parametrize(
    "name", ["spec-sync", "spec-sync-half", "spec-sync-adaptive-0", "spec-sync-adaptive-1"]
)
def test_machines_that_count_for_the_same_do_the_same(name: str) -> None:
    cluster = cluster_of(name, workers=2, shards=1, iterations=3, losses=1)
    explore(cluster)
    assert not cluster.coordinator_differs()


ORDERED: list[tuple[SyncModel, str]] = [
    (ElasticBSP(), "3,1,2,0"),
    (ElasticBSP(), "2,1,4,1"),
    (SPEC_SYNC, "2,1,2,1"),
    (SPEC_SYNC_SSP, "2,1,2,1"),
]
LARGER_ORDERED: list[tuple[SyncModel, str]] = [(ElasticBSP(), "3,1,2,1"), (ElasticBSP(), "2,1,5,1")]


@pytest.mark.parametrize(("sync", "size"), LARGER_ORDERED if LARGE else ORDERED, ids=str)
def test_it_does_not_matter_in_which_order_a_shard_takes_what_two_workers_have_sent(
    sync: SyncModel, size: str
) -> None:
    workers = int(size.split(",")[0])

    def in_both_orders(state: State) -> None:
        for one, other in combinations(range(workers), 2):
            for (a, first), (b, second) in product(steps(state, one), steps(state, other)):
                if isinstance(sync, ElasticBSP) and "notices the loss" in a + b:
                    continue  # a shard that holds a push of the lost worker keeps what follows, until the verdict
                ab = [take() for label, take in steps(first(), other) if label == b]
                ba = [take() for label, take in steps(second(), one) if label == a]
                pairs.add((a, b))
                assert list(map(cluster.plain, ab)) == list(map(cluster.plain, ba)), f"{a}, {b}"

    def steps(state: State, worker: int) -> list[Step]:
        return list(cluster.steps_of(state, 0, worker))

    cluster = sized_cluster(sync, size)
    pairs: set[tuple[str, str]] = set()
    explore(cluster, whole=True, visit=in_both_orders)
    assert len(pairs) > 10


class Bent(ConditionMachine):
    """BSP, but for what `answer` does."""

    def __init__(self) -> None:
        super().__init__(lambda state: state.progress < state.v_train, average=True)

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        return self.answer(event, super().handle(event))

    def answer(self, event: AnyEvent, actions: list[AnyAction]) -> list[AnyAction]:
        return actions


def bent(machine: type[Bent]) -> SyncModel:
    class BentBSP(BSP, frozen=True):
        def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
            return machine()

    return BentBSP()


def test_the_search_finds_a_deadlock() -> None:
    class Stubborn(Bent):
        """Closes no round when a worker is lost."""

        def handle(self, event: AnyEvent) -> list[AnyAction]:
            if isinstance(event, WorkerLost):
                self._pushed -= self.counts.left(event.worker) > self.v_train
                self._forget_pull(event.worker)
                return []
            return super().handle(event)

    def as_if_nobody_ever_left(told: ShardView) -> set[int]:
        slowest = min(its.pushed for its in told.workers)
        return {worker for worker, its in enumerate(told.workers) if its.asks and its.pushed > slowest}

    rule = Admission(as_if_nobody_ever_left, as_if_nobody_ever_left)
    cluster = SmallJob(bent(Stubborn), rule, workers=2, shards=1, iterations=1, losses=1)
    with pytest.raises(AssertionError, match=r"(?s)worker \d is lost.*deadlock: worker \d is"):
        explore(cluster)


def test_the_search_finds_a_wrong_bound() -> None:
    with pytest.raises(AssertionError, match=r"workers \{\d\} wait at a shard, but set\(\) must"):
        explore(SmallJob(SSP(staleness=1), more_ahead_than(2), workers=2, shards=1, iterations=3))


def test_the_search_finds_a_push_that_is_dealt_with_never_or_twice() -> None:
    class Forgetful(Bent):
        def answer(self, event: AnyEvent, actions: list[AnyAction]) -> list[AnyAction]:
            late = isinstance(event, PushReceived) and event.iteration > 0
            return [action for action in actions if not (late and isinstance(action, HoldPush))]

    class Eager(Bent):
        def answer(self, event: AnyEvent, actions: list[AnyAction]) -> list[AnyAction]:
            late = isinstance(event, PushReceived) and event.iteration > 0
            return actions[:1] + actions if late else actions

    class Hoarder(Bent):
        def _apply_mean(self) -> list[AnyAction]:
            return []

    for machine, words in [
        (Forgetful, "caused 0 actions that apply, hold or drop a push"),
        (Eager, "caused 2 actions that apply, hold or drop a push"),
        (Hoarder, "was returned before the worker's push was applied"),
    ]:
        with pytest.raises(AssertionError, match=words):
            explore(SmallJob(bent(machine), workers=2, shards=1, iterations=2))


def test_the_search_finds_the_deadlock_of_shards_that_change_each_at_its_own_moment() -> None:
    class Hasty(ShardSync):
        """Passes to the next model with the first flagged push, and counts everybody from there."""

        def _complete(self, now_ticks: int) -> list[AnyAction]:
            actions: list[AnyAction] = []
            for worker in list(self.counts.count) if self._change is not None else ():
                actions += self._tell(WorkerFinished(now_ticks=now_ticks, worker=worker))
            return actions + super()._complete(now_ticks)

    cluster = SmallJob(
        ASP(),
        workers=2,
        shards=2,
        iterations=3,
        changes=["bsp"],
        commits=True,
        agree=False,
        shard_host=Hasty,
        watch=False,
    )
    with pytest.raises(AssertionError, match=r"(?s)its last push before change 1.*deadlock: worker \d is"):
        explore(cluster)


# -- mistakes of the past, put back -------------------------------------------------------------------------


class MovingOn(ConditionMachine):
    """Drop-stragglers with a quorum of 2 that moves a late worker on by itself, without telling it."""

    def __init__(self) -> None:
        super().__init__(
            lambda state: state.progress < state.v_train,
            lambda state: state.pushed >= min(2, state.live),
            average=True,
        )

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        actions = super().handle(event)
        for number, action in enumerate(actions):
            if isinstance(action, AnswerPull) and action.v_train is not None:
                behind = action.v_train - self.counts.count[action.worker]
                if behind > 0:
                    self.counts.pushed(action.worker, action.v_train - 1)
                actions[number] = AnswerPull(action.worker, action.iteration)
        return actions


def test_the_search_finds_the_deadlock_of_shards_that_each_move_a_late_worker_on() -> None:
    class Moving(DropStragglers, frozen=True):
        def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
            return MovingOn()

    cluster = SmallJob(
        Moving(quorum=2), workers=3, shards=2, iterations=3, commits=True, agree=False, watch=False
    )
    with pytest.raises(AssertionError, match=r"(?s)deadlock: worker \d is waiting"):
        explore(cluster)


def test_the_search_finds_the_deadlock_of_pushes_of_one_worker_in_different_rounds() -> None:
    """A worker goes on at each shard from the round that this shard has named."""

    class RoundPerShard(Worker):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._rounds: dict[int, int] = {}

        def handle(self, message: Message) -> list[Request]:
            if isinstance(message, Answer) and message.v_train is not None:
                self._rounds[message.shard] = message.v_train
            return super().handle(message)

        def push(self, *args: Any, **options: Any) -> list[Request]:
            rounds, self._rounds = self._rounds, {}
            requests: list[Request] = []
            for request in super().push(*args, **options):
                if isinstance(request, Send) and isinstance(request.message, Commit):
                    own = rounds.get(request.message.shard)
                    request = Send(request.to, msgspec.structs.replace(request.message, progress=own))
                requests.append(request)
            return requests

    class AnswersOneByOne(SmallJob):
        def _answer(self, state: State, index: int, w: int, answer: Answer) -> State:
            its = state.workers[w]
            answer = Answer(index, self._workers[its.core].iteration, 0, answer.v_train)
            number, outcome = self._workers.after(its.core, Call("handle", message=answer))
            its = its._replace(core=number)
            if self._workers[number].waiting_for:
                return self._with_worker(state, w, its)
            return self._go_on(state, w, its, outcome.requests)

    class ByName(DropStragglers, frozen=True):
        draws: ClassVar[str] = "per-shard"  # shards are not interchangeable here

    cluster = AnswersOneByOne(
        ByName(quorum=2),
        workers=3,
        shards=2,
        iterations=3,
        commits=True,
        agree=False,
        watch=False,
        worker_core=RoundPerShard,
    )
    with pytest.raises(AssertionError, match=r"(?s)deadlock: worker \d is waiting"):
        explore(cluster)


def test_the_search_finds_the_deadlock_of_plans_that_are_sent_to_shards() -> None:
    """Of each shard a worker learns for itself that it has received the plan, and flags the push to that shard."""

    class FlagsPerShard(Worker):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._stops: dict[int, Stop] = {}

        def handle(self, message: Message) -> list[Request]:
            if isinstance(message, PlanPublished):
                self._stops[message.iteration] = message.stop  # where the search puts the shard
                return []
            return super().handle(message)

        def push(self, *args: Any, **options: Any) -> list[Request]:
            stops, self._stops = self._stops, {}
            requests: list[Request] = []
            for request in super().push(*args, **options):
                assert isinstance(request, Send)
                message = request.message
                if isinstance(message, Commit):
                    message = msgspec.structs.replace(message, stop=stops.get(message.shard))
                elif isinstance(message, IterationFinished) and stops:
                    superstep = min(stop.superstep for stop in stops.values())
                    if self._told != superstep:
                        message = msgspec.structs.replace(message, superstep=superstep)
                        self._told = superstep
                requests.append(Send(request.to, message))
            return requests

        _told = -1

    class PlansToShards(SmallJob):
        def _order(self, state: State, w: int, core: int, message: Message) -> State:
            if not isinstance(message, PlanPublished):
                return super()._order(state, w, core, message)
            its = state.workers[w]
            shards = (0, 1) if w == 0 else (1, 0)
            orders = tuple(PlanPublished(message.stop, shard) for shard in shards)
            return self._with_worker(state, w, its._replace(orders=(*its.orders, *orders)))

    class ElasticByName(ElasticBSP, frozen=True):
        draws: ClassVar[str] = "per-shard"  # shards and workers are not interchangeable here

    cluster = PlansToShards(
        ElasticByName(),
        STOPPED,
        workers=2,
        shards=2,
        iterations=4,
        commits=True,
        agree=False,
        watch=False,
        worker_core=FlagsPerShard,
    )
    with pytest.raises(AssertionError, match=r"(?s)deadlock: worker \d is waiting"):
        explore(cluster)
