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
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import pytest

from paceline.core.members import WorkerLoss
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
    events,
)
from paceline.sync.actions import AnyAction
from paceline.sync.draws import uniform
from paceline.sync.dsps import AdaptiveMachine
from paceline.sync.dssp import SpendingMachine
from paceline.sync.spec_sync import Speculation, Speculator
from paceline.testing.admission import Admission, more_ahead_than
from paceline.testing.checking import explore, survey
from paceline.testing.small_job import SmallJob
from paceline.testing.state_pools import State
from tests.support.marks import thorough

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


def round_is_complete(state: PullState) -> bool:
    return state.progress < state.v_train


def two(state: PushState) -> bool:
    return state.pushed >= min(2, state.live)


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
    "mixed-dropping": (SSP(staleness=1), DropStragglers(quorum=1)),
    "mixed-dropping-bsp": (DropStragglers(quorum=1), BSP()),
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


small = pytest.mark.skipif(bool(LARGE), reason="`make test` and `make thorough` visit the small sizes")

# These take long, and are variants of models that `make test` visits. `make check-models` visits them.
VARIANTS = {
    *("spec-sync-half", "spec-sync-ssp", "mixed-failing"),
    *(name for name in MODELS if name.startswith("spec-sync-adaptive")),
}


def larger(*values: Any) -> list[Any]:
    """Parameters that only `make check-models` visits."""
    mark = pytest.mark.skipif(not LARGE, reason="make check-models visits the larger sizes")
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]


def seldom(*values: Any) -> list[Any]:
    """Parameters that show little more: only `make thorough` visits them, and `make check-models`."""
    return list(values) if LARGE else thorough(*values)


def less_often(names: Iterable[str], rare: set[str]) -> list[Any]:
    """Names of models; `make test` visits those that are not in `rare`."""
    names = list(names)
    return [
        *(name for name in names if name not in rare),
        *seldom(*(name for name in names if name in rare)),
    ]


# `make test` visits a model that each of these is like: one with another table, another way to draw or to execute, in
# another combination, or beside another model.
LIKE_OTHERS = {
    *(f"{name}-{table}" for name in ("dssp", "dsps") for table in (1, 2, 3)),
    *("pssp-lazy", "pssp-per-shard", "dynamic-pssp-per-shard"),
    *("drop-stragglers", "conditions", "conditions-lazy"),
    *("mixed", "mixed-timers", "mixed-dropping"),
}


@pytest.mark.parametrize(
    "name", less_often((name for name in MODELS if LARGE or name not in VARIANTS), LIKE_OTHERS)
)
def test_no_interleaving_with_a_loss_deadlocks_or_breaks_the_bound(name: str) -> None:
    # With three iterations, these models' barriers, drops and timers multiply the interleavings.
    two = name in ("elastic-bsp", "drop-stragglers", "mixed-timers")
    small_size = "2,2,2,1" if two else "2,2,3,1"
    size = LARGE if "," in LARGE else "3,2,4,1" if LARGE else small_size
    workers, shards, iterations, losses = map(int, size.split(","))
    for seed in range(SEEDS.get(name, 1)):
        cluster = cluster_of(
            name, workers=workers, shards=shards, iterations=iterations, losses=losses, seed=seed
        )
        assert visit(name, cluster) > 100


# With a join, these take long, too. `make check-models` visits them, and all random choices of the models that draw.
JOINING_VARIANTS = {
    *VARIANTS,
    *("ssp-lazy", "conditions-lazy", "mixed-timers"),
    *(f"{name}-{table}" for name in ("dssp", "dsps") for table in (1, 2, 3)),
    *("pssp-lazy", "pssp-per-shard", "dynamic-pssp-per-shard"),
}
# These take long with a join that nobody is lost beside, or with one beside which somebody may be lost. `make test`
# or `make thorough` visits the other one of the two.
LONG_JOINS = {"asp", "conditions-failing", "drop-stragglers", "mixed-dropping"}
LONG_JOINS_WITH_A_LOSS = {
    *("conditions", "dynamic-pssp", "elastic-bsp", "spec-sync"),
    *("dssp-0", "dsps-0", "naive-waiting", "pssp", "ssp"),
}
# Under these, two iterations with a join take long. `make test` and `make thorough` visit one.
SHORT_JOINS = {"dssp-0", "naive-waiting", "spec-sync"}
# With a join, these show little more than BSP, SSP, PSSP, ElasticBSP, SpecSync, drop-stragglers, and drop-stragglers
# beside BSP. `make test` leaves them to `make thorough`.
RARE_JOINS = {
    *("asp", "dssp-0", "dsps-0", "dynamic-pssp", "naive-waiting"),
    *("conditions", "conditions-failing", "mixed", "mixed-dropping"),
}


def joining(long: set[str]) -> list[Any]:
    """The models that are visited with a join."""
    variants = JOINING_VARIANTS | long
    names = [
        name
        for name in MODELS
        if (name in variants) == bool(LARGE) or (LARGE and name in {*SEEDS, *SHORT_JOINS})
    ]
    return less_often(names, RARE_JOINS)


@pytest.mark.parametrize("name", joining(LONG_JOINS))
def test_no_interleaving_with_a_late_worker_deadlocks_or_breaks_the_bound(name: str) -> None:
    # Where the coordinator's word multiplies the interleavings, there is only one worker beside the newcomer.
    workers = 1 if isinstance(MODELS[name], ElasticBSP | SpecSync) else 2
    iterations = 1 if name in SHORT_JOINS and not LARGE else 2
    for seed in range(SEEDS.get(name, 1) if LARGE else 1):
        cluster = cluster_of(name, workers=workers, late=1, shards=2, iterations=iterations, seed=seed)
        assert explore(cluster) > 50


@pytest.mark.parametrize("name", joining(LONG_JOINS_WITH_A_LOSS))
def test_no_interleaving_of_a_join_and_a_loss_deadlocks_or_breaks_the_bound(name: str) -> None:
    """Either worker may be lost. The other one, if it is the newcomer, may be alone at once."""
    assert explore(cluster_of(name, workers=1, late=1, losses=1, shards=2, iterations=1)) > 50


@small
@pytest.mark.thorough
def test_under_bsp_all_rounds_are_the_same_at_all_shards_whoever_joins_and_whoever_is_lost() -> None:
    """Apart from a push that one shard has averaged before the loss and another has never received."""
    assert explore(cluster_of("bsp", workers=2, late=1, losses=1, shards=2, iterations=1)) > 10_000


JOINED = [("bsp", "asp", 2, 0), *thorough(("asp", "bsp", 1, 1))]
LARGER_JOINED = [("asp", "bsp", 2, 0), ("asp", "bsp", 2, 1)]


@pytest.mark.parametrize(("before", "after", "shards", "losses"), LARGER_JOINED if LARGE else JOINED)
def test_no_interleaving_of_a_join_and_a_change_of_model_deadlocks(
    before: str, after: str, shards: int, losses: int
) -> None:
    cluster = SmallJob(
        MODELS[before],
        workers=1,
        late=1,
        losses=losses,
        shards=shards,
        iterations=2 - losses,  # with a loss, two iterations take more than half a minute
        changes=[after],
        commits=True,
        any_plan=True,
    )
    assert explore(cluster) > 100


@pytest.mark.parametrize("name", ["elastic-bsp" if LARGE else "bsp"])
def test_the_search_finds_a_held_push_that_is_kept_though_a_shard_has_not_received_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerLoss, "kept", 1_000)
    with pytest.raises(AssertionError, match="shards have averaged different pushes"):
        explore(cluster_of(name, workers=2, losses=1, shards=2, iterations=1 if name == "bsp" else 3))


@small
@pytest.mark.parametrize("name", ["asp", "ssp", "ssp-lazy", "naive-waiting", *thorough("bsp")])
def test_pulls_that_come_by_themselves_change_nothing(name: str) -> None:
    assert explore(cluster_of(name, workers=2, shards=2, iterations=3, losses=1, commits=False)) > 100


@small
def test_no_interleaving_of_two_supersteps_deadlocks() -> None:
    assert explore(cluster_of("elastic-bsp", workers=2, shards=1, iterations=6)) > 2_000


@pytest.mark.parametrize("iterations", [4] if LARGE else [3])
def test_no_interleaving_of_a_quorum_of_three_workers_deadlocks(iterations: int) -> None:
    """Two shards may disagree about who is late, and by how much; the worker goes on from the later round at both."""
    cluster = SmallJob(
        DropStragglers(quorum=2), workers=3, shards=2, iterations=iterations, commits=True, agree=False
    )
    assert explore(cluster) > 500


FIG_2 = SSP(staleness=1), PSSP(staleness=0), DropStragglers(quorum=2)
BESIDE: list[tuple[tuple[SyncModel, ...], int, int, int]] = [
    (FIG_2, 3, 2, 3),
    ((SSP(staleness=1), DropStragglers(quorum=2)), 3, 3, 1),
    ((SSP(staleness=1, execution="lazy"), DropStragglers(quorum=2)), 3, 3, 1),
    ((BSP(), DropStragglers(quorum=2)), 3, 3, 1),
    ((SSP(staleness=1), Conditions(pull=round_is_complete, push=two, pushes="average")), 3, 3, 1),
]
"""Models, workers, iterations, and how many seeds are tried."""
RARE_BESIDE: list[tuple[tuple[SyncModel, ...], int, int, int]] = [
    ((PSSP(staleness=0), DropStragglers(quorum=2)), 3, 3, 3),
    ((ASP(), DropStragglers(quorum=2)), 3, 3, 1),
    ((DropStragglers(quorum=1), DropStragglers(quorum=2)), 3, 3, 1),
]
"""These take long, and show little more: FIG_2 has both models of the first one."""
LARGER_BESIDE = [
    (FIG_2, 3, 3, 3),
    *((models, 3, 4, seeds) for models, _, _, seeds in [*BESIDE[1:], *RARE_BESIDE]),
    ((PSSP(staleness=0), DropStragglers(quorum=3)), 4, 3, 3),
    ((SSP(staleness=1), DropStragglers(quorum=2)), 4, 3, 1),
    ((SSP(staleness=1, execution="lazy"), DropStragglers(quorum=2)), 4, 3, 1),
]


@pytest.mark.parametrize(
    ("models", "workers", "iterations", "seeds"),
    LARGER_BESIDE if LARGE else [*BESIDE, *thorough(*RARE_BESIDE)],
)
def test_no_interleaving_of_a_quorum_beside_other_models_deadlocks_or_skips_a_round(
    models: Sequence[SyncModel], workers: int, iterations: int, seeds: int
) -> None:
    """At every shard, c_p is the number of the worker's pushes, so the other shards decide as if there were no quorum.

    The checks at the shard know which pushes are averaged: the first one of a worker that it has computed on the
    weights of the round.
    """
    for seed in range(seeds):
        cluster = beside_cluster(models, workers=workers, iterations=iterations, seed=seed)

        def counts_its_own_pushes(state: State, cluster: SmallJob = cluster) -> None:
            for at in state.servers:
                for shard in cluster.server(at).shards.values():
                    assert shard.sync.counts.count == shard.sync.order.label

        assert explore(cluster, visit=counts_its_own_pushes) > 80


@pytest.mark.parametrize(
    ("models", "size"),
    [
        ((SSP(staleness=1), PSSP(staleness=0), DropStragglers(quorum=1)), (2, 0, 1, 1)),
        ((PSSP(staleness=0), DropStragglers(quorum=2)), (2, 1, 2, 0)),
        *seldom(((SSP(staleness=1), DropStragglers(quorum=2)), (3, 0, 1, 1))),
        *larger(
            ((SSP(staleness=1), PSSP(staleness=0), DropStragglers(quorum=1)), (2, 0, 2, 1)),
            ((SSP(staleness=1), DropStragglers(quorum=2)), (3, 0, 2, 1)),
            ((BSP(), DropStragglers(quorum=2)), (3, 0, 2, 1)),
            ((PSSP(staleness=0), DropStragglers(quorum=2)), (3, 0, 2, 1)),
            ((SSP(staleness=1), DropStragglers(quorum=2)), (2, 1, 2, 1)),
        ),
    ],
)
def test_no_interleaving_of_a_quorum_beside_other_models_with_losses_and_joins_deadlocks(
    models: Sequence[SyncModel], size: tuple[int, int, int, int]
) -> None:
    workers, late, iterations, losses = size
    cluster = beside_cluster(models, workers=workers, late=late, iterations=iterations, losses=losses)
    assert explore(cluster) > 1_000


def beside_cluster(models: Sequence[SyncModel], **options: Any) -> SmallJob:
    return SmallJob(models, shards=len(models), commits=True, any_plan=True, agree=False, **options)


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
    ("asp", ["bsp"], 1, 1),
    ("bsp", ["asp"], 2, 0),
    ("bsp", ["elastic-bsp"], 2, 0),
    ("asp", [str(SPEC_SYNC)], 2, 0),
    ("drop-stragglers", ["ssp:staleness=1"], 2, 0),
    ("naive-waiting", ["bsp"], 3, 0),
    ("ssp", ["ssp:staleness=1,execution=lazy|bsp"], 2, 0),
    ("conditions-failing", ["ssp:staleness=1"], 2, 0),
    ("pssp-per-shard", ["dsps:lower=0,upper=1"], 3, 0),
    ("bsp", ["asp", "bsp"], 2, 0),
    ("mixed-dropping", ["drop-stragglers:quorum=1"], 2, 0),
    ("drop-stragglers", ["bsp|drop-stragglers:quorum=1"], 2, 0),
]
"""(before, after, iterations, losses); a second one that follows may be asked for while the first is under way."""

RARE_CHANGES = [
    ("asp", ["bsp"], 2, 0),
    ("ssp-lazy", ["bsp"], 2, 0),
    ("elastic-bsp", ["bsp"], 3, 0),
    ("ssp", [str(FAILING)], 2, 0),
    ("bsp", ["ssp:staleness=1|drop-stragglers:quorum=1"], 2, 0),
]
"""Their models are also in the changes above, in another order or with others."""

LARGER_CHANGES = [
    *((name, changes, 3, losses) for name, changes, _, losses in [*CHANGES, *RARE_CHANGES]),
    ("spec-sync", ["ssp:staleness=1"], 3, 0),
    ("bsp", ["asp"], 3, 1),
    ("ssp-lazy", ["bsp"], 3, 1),
    ("elastic-bsp", ["bsp"], 3, 1),
    ("bsp", ["elastic-bsp"], 3, 1),
    ("asp", [str(SPEC_SYNC)], 3, 1),
    ("spec-sync", ["ssp:staleness=1"], 3, 1),
    ("spec-sync", ["elastic-bsp"], 3, 0),
    ("drop-stragglers", ["ssp:staleness=1"], 3, 1),
    ("bsp", ["drop-stragglers:quorum=1"], 3, 0),
    ("naive-waiting", ["bsp"], 1, 1),
    ("ssp", ["ssp:staleness=1,execution=lazy|bsp"], 3, 1),
    ("mixed", ["elastic-bsp"], 3, 0),
    ("conditions-failing", ["ssp:staleness=1"], 3, 1),
    ("ssp", [str(FAILING)], 3, 1),
    ("elastic-bsp", [str(FAILING)], 3, 0),
    ("asp", ["bsp", "ssp:staleness=1"], 3, 0),
    ("elastic-bsp", ["bsp", "elastic-bsp"], 3, 0),
    ("asp", [str(SPEC_SYNC), "bsp"], 3, 0),
]


@pytest.mark.parametrize(
    ("name", "changes", "iterations", "losses"),
    LARGER_CHANGES if LARGE else [*CHANGES, *thorough(*RARE_CHANGES)],
)
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
