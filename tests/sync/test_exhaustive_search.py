"""Every interleaving of a small job that clips gradients or edits weights, and the search itself.

See `test_exhaustive`. The larger sizes belong to `make check-models`.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations, product
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from paceline.core.joint_batch import JointNorms
from paceline.core.messages import Answer, Commit, IterationFinished, Message, PlanPublished
from paceline.core.reconfiguration import Edits
from paceline.core.requests import Request, Send
from paceline.core.shard import ShardSync
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
    ElasticBSP,
    NaiveWaiting,
    SpecSync,
    SyncModel,
    parse,
)
from paceline.sync.actions import AnswerPull, AnyAction, HoldPush
from paceline.sync.conditions import ConditionMachine
from paceline.sync.events import AnyEvent, PushReceived, Stop, WorkerFinished, WorkerLost
from paceline.sync.spec_sync import Speculator
from paceline.testing.admission import STOPPED, Admission, ShardView, more_ahead_than
from paceline.testing.checking import explore
from paceline.testing.small_job import SmallJob
from paceline.testing.state_pools import Call, State, Step
from tests.support.marks import thorough
from tests.support.wrong_declarations import declare_as_history

from .test_exhaustive import (
    LARGE,
    MODELS,
    SPEC_SYNC,
    adaptive_spec_sync,
    cluster_of,
    larger,
    seldom,
    sized_cluster,
    small,
)

# -- clipping ------------------------------------------------------------------------------------------------


CLIPPED: list[tuple[str, list[str], str]] = [
    ("bsp", [], "2,2,2,1"),
    ("bsp", [], "2,3,2,0"),
    ("elastic-bsp", [], "2,2,2,0"),
    ("elastic-bsp", [], "2,2,1,1"),
    ("bsp", ["asp"], "2,2,2,0"),
]
"""A model, the changes that are asked for, and workers, shards, iterations and losses."""

LARGER_CLIPPED: list[tuple[str, list[str], str]] = [
    ("bsp", [], "3,2,2,1"),
    ("elastic-bsp", [], "2,2,2,1"),
    ("elastic-bsp", [], "3,2,2,0"),
    ("bsp", ["elastic-bsp"], "2,2,3,0"),
    ("asp", ["bsp"], "2,2,3,0"),
    ("elastic-bsp", [], "2,2,3,1"),
    ("bsp", [], "2,2,2,2"),
    ("bsp", [], "2,3,2,1"),
    ("bsp", ["asp"], "2,2,2,1"),
]


@pytest.mark.parametrize(("name", "changes", "size"), LARGER_CLIPPED if LARGE else CLIPPED)
def test_no_interleaving_with_clipping_deadlocks_and_all_shards_clip_by_the_same_factor(
    name: str, changes: list[str], size: str
) -> None:
    assert explore(clipped_cluster(name, changes, size)) > 1_000


@pytest.mark.parametrize("name", larger("elastic-bsp"))
def test_without_questions_about_torn_means_the_search_finds_that_a_shard_waits_for_ever(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is lost between two shards leaves a mean that exists at only one of them."""
    monkeypatch.setattr(JointNorms, "_ask", lambda self, mean: [])
    with pytest.raises(AssertionError, match="have not been applied"):
        explore(clipped_cluster(name, [], "2,2,3,1"))


def clipped_cluster(name: str, changes: list[str], size: str) -> SmallJob:
    return sized_cluster(MODELS[name], size, changes=changes, clips=True)


# -- edits of the weights ------------------------------------------------------------------------------------


EDITED: list[tuple[str, list[str], str, tuple[int, ...]]] = [
    ("bsp", [], "2,2,3,1", (1,)),
    ("ssp", [], "2,2,3,0", (0, 2)),
    ("drop-stragglers", [], "2,2,2,0", (1,)),
    ("elastic-bsp", [], "2,2,3,0", (2,)),
    ("asp", ["bsp"], "2,2,2,0", (1,)),
    *thorough(("asp", [], "3,2,1,0", (0,))),
]
"""A model, the changes that are asked for; workers, shards, iterations and losses; the iterations that are edits."""


LARGER_EDITED: list[tuple[str, list[str], str, tuple[int, ...]]] = [
    ("bsp", [], "3,2,2,1", (0,)),
    ("asp", [], "2,2,3,0", (0, 1)),
    ("asp", [], "2,2,2,1", (0,)),
    ("bsp", ["asp"], "2,2,2,0", (1,)),
]


@pytest.mark.parametrize(("name", "changes", "size", "edits"), LARGER_EDITED if LARGE else EDITED)
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
    (NaiveWaiting(delay_s=1.0), [], "2,2,2,1"),
    (ElasticBSP(), [], "3,1,2,0"),
    (SPEC_SYNC, [], "2,1,2,1"),
    (ASP(), ["bsp"], "2,2,2,0"),
    *thorough((DropStragglers(quorum=2), [], "3,1,2,1")),
]
LARGER_SEARCHED: list[Searched] = [
    (SSP(staleness=1), [], "3,1,2,1"),
    (ElasticBSP(), [], "2,1,4,1"),
    (ElasticBSP(), [], "2,2,2,1"),
    (SPEC_SYNC, [], "2,1,3,1"),
    (SPEC_SYNC, [], "2,2,2,0"),
    (SPEC_SYNC_SSP, [], "2,2,2,1"),
    (adaptive_spec_sync(0, ASP()), [], "2,1,3,1"),
    (ElasticBSP(), ["ssp:staleness=1"], "2,2,2,0"),
    (SPEC_SYNC, [], "3,1,2,0"),
    (HALF, [], "2,1,3,0"),
    (HALF, [], "3,1,2,0"),
    (ASP(), ["bsp"], "2,2,2,1"),
]


@pytest.mark.parametrize(("sync", "changes", "size"), LARGER_SEARCHED if LARGE else SEARCHED, ids=str)
def test_the_reductions_lose_no_end(sync: SyncModel, changes: list[str], size: str) -> None:
    """Nor anything that the coordinator or a worker comes to know on the way."""
    agree = not isinstance(sync, DropStragglers)
    require_equal_ends(sized_cluster(sync, size, changes=changes, agree=agree))


@pytest.mark.parametrize("name", ["bsp", *larger("elastic-bsp")])
def test_the_reductions_lose_no_end_of_a_job_that_clips(name: str) -> None:
    require_equal_ends(clipped_cluster(name, [], "2,2,2,1" if LARGE else "2,2,1,1"))


@pytest.mark.parametrize(("name", "size"), [("asp", "2,2,1,1"), *larger(("bsp", "2,2,2,1"))])
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
    "name", ["spec-sync-adaptive-0", *thorough("spec-sync", "spec-sync-half", "spec-sync-adaptive-1")]
)
@pytest.mark.parametrize("iterations", [2, *thorough(3)])
def test_machines_that_count_for_the_same_do_the_same(name: str, iterations: int) -> None:
    cluster = cluster_of(name, workers=2, shards=1, iterations=iterations, losses=1)
    explore(cluster)
    assert not cluster.coordinator_differs()


@pytest.mark.parametrize(
    ("field", "name"), [("_workers", "spec-sync"), *seldom(("_yet_to_push", "spec-sync-adaptive-1"))]
)
def test_a_field_that_decides_and_is_declared_as_history_is_found(
    field: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_as_history(Speculator, field, monkeypatch)
    cluster = cluster_of(name, workers=2, shards=1, iterations=2, losses=1)
    explore(cluster)
    assert cluster.coordinator_differs()


@small
@pytest.mark.parametrize(
    ("name", "states"),
    [("asp", 352), ("ssp", 255), ("dsps-0", 522), ("spec-sync", 2166), *thorough(("bsp", 3865))],
)
def test_the_number_of_states_is_known(name: str, states: int) -> None:
    """It grows if history is compared, and shrinks if something that decides is not."""
    assert explore(cluster_of(name, workers=2, shards=2, iterations=3, losses=1)) == states


RESTORED: dict[str, SyncModel] = {
    "dssp": DSSP(lower=0, upper=2),
    "dsps": DSPS(lower=0, upper=2),
    **{
        str(sync): sync
        for sync in MODELS.values()
        if isinstance(sync, SyncModel) and type(parse(str(sync))) is type(sync)
    },
}
"""One model for all shards, which processes can create from its notation."""

# SpecSync over SSP has what these have, and fewer interleavings.
RARELY_RESTORED = {str(SPEC_SYNC), str(HALF)}


@small
@pytest.mark.parametrize(
    "name",
    [*(name for name in RESTORED if name not in RARELY_RESTORED), *thorough(*sorted(RARELY_RESTORED))],
)
def test_a_restored_core_does_what_the_original_does_whatever_follows(name: str) -> None:
    sync = RESTORED[name]
    agree = not isinstance(sync, DropStragglers | Conditions)
    cluster = sized_cluster(sync, "2,1,2,1", agree=agree)
    explore(cluster)
    assert not cluster.restored_differs()


@small
@pytest.mark.parametrize(("sync", "late", "changes"), [(ASP(), 0, ["bsp"]), (BSP(), 1, [])], ids=str)
def test_a_core_that_is_restored_in_a_change_or_a_join_does_what_the_original_does(
    sync: SyncModel, late: int, changes: list[str]
) -> None:
    cluster = SmallJob(
        sync, workers=2 - late, late=late, shards=2, iterations=1, changes=changes, commits=True
    )
    explore(cluster)
    assert not cluster.restored_differs()


ORDERED: list[tuple[SyncModel, str]] = [
    (ElasticBSP(), "3,1,2,0"),
    (SPEC_SYNC, "2,1,2,1"),
]
LARGER_ORDERED: list[tuple[SyncModel, str]] = [
    (ElasticBSP(), "3,1,2,1"),
    (ElasticBSP(), "2,1,5,1"),
    (SPEC_SYNC_SSP, "2,1,2,1"),
]


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


class MovingAlone(DropStragglers, frozen=True):
    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return MovingOn()


def test_the_search_finds_the_deadlock_of_shards_that_each_move_a_late_worker_on() -> None:
    cluster = SmallJob(
        MovingAlone(quorum=2), workers=3, shards=2, iterations=3, commits=True, agree=False, watch=False
    )
    with pytest.raises(AssertionError, match=r"(?s)deadlock: worker \d is waiting"):
        explore(cluster)


def moves_late_workers(sync: SyncModel, seed: int, shard: int, *, alone: bool) -> ShardSync:
    """A shard that does as if all shards ran its model."""
    return ShardSync(sync, seed, shard)


@pytest.mark.parametrize("other", [PSSP(staleness=0), SSP(staleness=1, execution="lazy")], ids=str)
def test_the_search_finds_the_deadlock_of_one_shard_that_moves_a_late_worker_on(other: SyncModel) -> None:
    """Its next push counts for the current round at this shard only, where it then waits for the others.

    They wait for it at the other shard, where it is the slowest.
    """
    cluster = SmallJob(
        (other, MovingAlone(quorum=2)),
        workers=3,
        shards=2,
        iterations=3,
        commits=True,
        agree=False,
        watch=False,
        shard_host=moves_late_workers,
    )
    with pytest.raises(AssertionError, match=r"(?s)deadlock: worker 0 is waiting .* shard 1: \{0: 'round 3"):
        explore(cluster)


def test_the_search_finds_that_a_worker_skips_rounds_of_bsp_if_it_is_moved_on_at_all_shards() -> None:
    cluster = SmallJob(
        (BSP(), DropStragglers(quorum=2)),
        workers=3,
        shards=2,
        iterations=3,
        commits=True,
        agree=False,
        shard_host=moves_late_workers,
    )
    with pytest.raises(AssertionError, match="skips rounds, although the shards run different models"):
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
            its = replace(its, core=number)
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
            return self._with_worker(state, w, replace(its, orders=(*its.orders, *orders)))

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
