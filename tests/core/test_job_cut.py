"""A cut of a job as a value: it survives being written as JSON, and says with what the shards of a new run begin."""

from __future__ import annotations

import msgspec
import pytest

from paceline.core.coordinator import Coordinator
from paceline.core.job_cut import EpochCut, JobCut, LoaderCut, LoopCut, leader, require_plausible
from paceline.core.layout import HyperParameters, Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.lease import DataOrder, Lease
from paceline.core.messages import CutAgreed, LoopLimits, LoopPosition, Ready, Register, ShardState
from paceline.core.reconfiguration import StateCollection
from paceline.core.requests import Fail, TakeCut, server_peer, worker_peer
from paceline.core.shard import Shard
from paceline.errors import InvalidEventError, ProtocolError
from paceline.sync import BSP
from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
from paceline.sync.schedule import read_schedule

LAYOUT = Layout.of([Parameter(("weight",), (4, 5), "float32"), Parameter(("bias", "b"), (5,), "float64")])
MODEL = ModelSpec(
    LAYOUT,
    OptimizerSpec("Adam", ({"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False},), (0, 0)),
    (),
)
ORDER = DataOrder(100, 4, False, "auto", "digest")

CUT = JobCut(
    number=3,
    elapsed_s=12.5,
    seed=7,
    sync="ssp:staleness=2",
    model=MODEL,
    extensions=(MODEL,),
    slices=tuple(LAYOUT.slice_evenly(2)),
    shards=(ShardState(9, 36), ShardState(8, 32)),
    loaders=(
        LoaderCut(
            name="data",
            opened=1,
            order=ORDER,
            epochs=(EpochCut(0, ORDER, 40),),
            returned=(Lease(0, 8, 4, 4, 1),),
        ),
    ),
    loop=LoopCut(position=LoopPosition(0, 1, passes=(("data", 1),)), begun=0, limits=LoopLimits(epochs=3)),
)


def test_a_cut_is_equal_after_it_was_written_as_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(CUT), type=JobCut) == CUT


def test_a_cut_with_numbers_that_fail_later_is_refused() -> None:
    """A time of 1e300 s has too many ticks, and a lease without a stride cannot be divided."""
    require_plausible(CUT)
    lease = Lease(0, 8, 4, 0, 1)
    loader = msgspec.structs.replace(CUT.loaders[0], returned=(lease,))
    for wrong in (
        msgspec.structs.replace(CUT, loop=LoopCut(elapsed_s=1e300)),
        msgspec.structs.replace(CUT, loaders=(loader,)),
    ):
        with pytest.raises(ProtocolError, match="cannot be right"):
            require_plausible(wrong)


def test_the_shards_of_a_run_with_another_number_of_shards_begin_with_the_progress_of_shard_0() -> None:
    assert CUT.states_of(2) == (ShardState(9, 36), ShardState(8, 32))
    assert CUT.states_of(3) == (ShardState(9, 36),) * 3


@pytest.mark.parametrize(("resumed", "fails"), [(None, True), (CUT, False)], ids=["first run", "resumed run"])
def test_a_run_needs_its_first_worker_only_for_initial_weights(resumed: JobCut | None, fails: bool) -> None:
    core = Coordinator(read_schedule("ssp:staleness=2"), workers=2, servers=1, shards=1, resumed=resumed)
    core.connected(server_peer(0), 0)
    for worker in range(2):
        core.connected(worker_peer(worker), 0)
    for worker in range(2):
        core.handle(worker_peer(worker), Register(MODEL), 0)
    core.handle(server_peer(0), Ready(), 0)
    requests = core.disconnected(worker_peer(0), 0)
    assert any(isinstance(request, Fail) for request in requests) == fails


def parameter(name: str, set_index: int = 0, part: int = 0) -> Parameter:
    return Parameter((name,), (2,), "float32", set_index, part)


def model_of(*parameters: Parameter, groups: tuple[tuple[int, ...], ...] = ((0, 0),)) -> ModelSpec:
    """Return a model with these parameters. `groups` has the group of each parameter of each optimizer."""
    group: HyperParameters = {"lr": 0.1}
    optimizers = [OptimizerSpec("SGD", (group,) * (max(each) + 1), each) for each in groups]
    return ModelSpec(Layout.of(parameters), optimizers[0], (), tuple(optimizers[1:]))


AB = model_of(parameter("a"), parameter("b"))
ABC = model_of(parameter("a"), parameter("b"), parameter("c", part=1), groups=((0, 0, 1),))
ABCD = model_of(parameter("a"), parameter("b"), parameter("c"), parameter("d"), groups=((0, 0, 1, 1),))


def cut_of(*models: ModelSpec) -> JobCut:
    return msgspec.structs.replace(CUT, model=models[-1], extensions=models[:-1])


def test_a_script_that_was_about_to_add_parameters_may_have_them_when_it_goes_on() -> None:
    assert cut_of(AB).is_extended_by(ABC)
    assert cut_of(AB).is_extended_by(ABCD)
    assert not cut_of(ABC).is_extended_by(AB)
    renamed = model_of(parameter("a"), parameter("x"), parameter("c"), groups=((0, 0, 1),))
    assert not cut_of(AB).is_extended_by(renamed)
    regrouped = model_of(parameter("a"), parameter("b"), parameter("c"), groups=((0, 1, 1),))
    assert not cut_of(AB).is_extended_by(regrouped)
    assert cut_of(AB).has_of(AB, ABC) == "none"
    assert cut_of(AB, ABC).has_of(AB, ABC) == "all"
    assert cut_of(AB, ABC).has_of(AB, ABCD) == "some"


def test_the_order_in_which_sets_have_grown_does_not_matter() -> None:
    grown = model_of(parameter("a"), parameter("b", 1), parameter("c", 0, part=1), groups=((0, 1), (0,)))
    whole = model_of(parameter("a"), parameter("c"), parameter("b", 1), groups=((0, 1), (0,)))
    assert cut_of(grown).contains(whole)
    assert cut_of(AB, ABC).contains(AB)
    assert not cut_of(AB).contains(ABC)


def at_epoch(epoch: int) -> LoopCut:
    return LoopCut(position=LoopPosition(0, epoch), begun=0)


def giving_of(labels: dict[int, int], main: int = 0) -> StateCollection:
    giving = StateCollection(7)
    giving.begin(labels, main, at_epoch(9))
    return giving


def test_a_cut_is_complete_with_the_earliest_state_of_each_worker_after_its_last_push() -> None:
    giving = StateCollection(7)
    giving.give(0, 3, at_epoch(1))  # an answer has told of the cut before all shards were cut
    assert giving.completed is None
    giving.begin({0: 4, 1: 2}, 0, at_epoch(9))
    assert giving.awaited == [0, 1]  # the state of worker 0 was taken before its last push
    giving.give(1, 2, at_epoch(1))
    giving.give(0, 5, at_epoch(2))
    giving.give(0, 6, at_epoch(3))
    completed = giving.completed
    assert completed is not None
    assert completed.states == ((0, 5), (1, 2))
    assert completed.loop == at_epoch(2)  # that of worker 0 when it gave this state


def test_a_resumed_run_goes_on_where_the_main_worker_was() -> None:
    giving = giving_of({0: 4, 1: 2}, main=1)
    giving.give(0, 4, at_epoch(2))
    giving.give(1, 2, at_epoch(1))
    completed = giving.completed
    assert completed is not None
    assert completed.loop == at_epoch(1)


@pytest.mark.parametrize(
    ("main", "workers", "expected"), [(1, (0, 1), 1), (1, (0, 2), 0), (-1, (2, 1), 1), (0, (), None)], ids=str
)
def test_without_a_state_of_the_main_worker_the_lowest_index_counts(
    main: int, workers: tuple[int, ...], expected: int | None
) -> None:
    assert leader(main, workers) == expected


def test_a_worker_that_leaves_is_not_awaited_but_the_main_worker_is_needed() -> None:
    giving = giving_of({0: 4, 1: 2, 2: 2})
    giving.give(2, 2, at_epoch(1))
    assert not giving.left(1)
    assert giving.awaited == [0]
    assert giving.left(0)  # only it has what the scripts track
    given = giving_of({0: 4, 1: 2})
    given.give(0, 4, at_epoch(1))
    assert not given.left(0)
    given.give(1, 2, at_epoch(1))
    assert given.completed is not None
    assert given.completed.states == ((0, 4), (1, 2))


# -- at a shard ------------------------------------------------------------------------------------------


def test_a_push_that_is_refused_does_not_use_up_the_cut() -> None:
    """The shard is cut just before the next push with newly drawn data."""
    shard = Shard(0, [BSP()])
    shard.handle(WorkerJoined(now_ticks=0, worker=0))
    shard.handle(PushReceived(now_ticks=0, worker=0, iteration=0), drawn=(1,))
    shard.handle(PullRequested(now_ticks=0, worker=0, iteration=0))
    assert shard.cut(CutAgreed(1, 1, ())) == []
    with pytest.raises(InvalidEventError):
        shard.handle(PushReceived(now_ticks=0, worker=0, iteration=5), drawn=(2,))
    done = shard.handle(PushReceived(now_ticks=0, worker=0, iteration=1), drawn=(2,))
    assert done[0] == TakeCut(0, 1)
