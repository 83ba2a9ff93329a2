"""Workers that join a run in progress begin with the same label and the same c_p at every shard."""

from __future__ import annotations

import math
from itertools import product

import pytest

from paceline.core import messages
from paceline.core.coordinator import Coordinator
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, ShardSlice
from paceline.core.lease import DataOrder, positions
from paceline.core.messages import (
    ChangePublished,
    Contributed,
    JoinOffered,
    JoinProposed,
    PushesReported,
    Ready,
    Refused,
    Register,
    Started,
    SyncRequested,
    WorkerWelcomed,
)
from paceline.core.reconfiguration import Join
from paceline.core.requests import (
    COORDINATOR,
    AbandonCut,
    Apply,
    CompleteCut,
    EndWithout,
    Peer,
    Request,
    Send,
    Warn,
    server_peer,
    worker_peer,
)
from paceline.core.server import Server
from paceline.core.shard import ShardSync
from paceline.errors import ConfigurationError, ProtocolError
from paceline.lab.ranking import EVERY_MODEL
from paceline.sim import Cluster, LogNormal, Presence, simulate
from paceline.sync import Conditions, PullState, parse
from paceline.sync.actions import AnswerPull, ApplyMean
from paceline.sync.events import PullRequested, WorkerJoined
from paceline.sync.schedule import Schedule, ScheduleStep
from tests.support.marks import thorough

MODEL = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
OTHER_MODEL = ModelSpec(Layout((), (), {}), OptimizerSpec("SGD", (), ()), ())

LATE = Cluster(
    compute_s=[LogNormal(median=1.0, sigma=0.8)] * 4,
    latency_s=LogNormal(median=0.2, sigma=1.0),
    servers=2,
    presence={2: Presence(joins_at_s=7.1), 3: Presence(joins_at_s=5.3)},
)


@pytest.mark.parametrize("seed", [*range(10), *thorough(*range(10, 30))])
def test_under_bsp_all_shards_average_the_same_pushes_of_workers_that_join(seed: int) -> None:
    result = simulate(LATE, "bsp", iterations=12, shards=2, seed=seed, record=True)
    means, joins = [], []
    for trace in result.trace[:2]:
        means.append([a.pushes for e in trace.entries for a in e.actions if isinstance(a, ApplyMean)])
        events = [entry.event for entry in trace.entries]
        joins.append([(e.worker, e.iteration, e.count) for e in events if isinstance(e, WorkerJoined)])
    assert means[0] == means[1]
    assert joins[0] == joins[1]
    assert {worker for mean in means[0] for worker, _ in mean} == {0, 1, 2, 3}


def test_in_a_simulation_no_message_of_the_coordinator_overtakes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shard 0 refuses the first c_p while this c_p is on its way to shard 1, which must not receive it last."""
    received: dict[Server, list[int]] = {}
    refusals = [False]
    handle, may_join = Server.handle, ShardSync.may_join

    def noted(server: Server, sender: Peer, message: messages.Message, now_ticks: int) -> list[Request]:
        if isinstance(message, messages.WorkerJoined):
            received.setdefault(server, []).append(message.count)
        return handle(server, sender, message, now_ticks)

    monkeypatch.setattr(Server, "handle", noted)
    monkeypatch.setattr(
        ShardSync, "may_join", lambda shard, count: refusals.pop() if refusals else may_join(shard, count)
    )
    monkeypatch.setattr(ShardSync, "entry", lambda shard, worker: (0, 7 - 2 * len(refusals)))
    cluster = Cluster([1.0, 1.0, 1.0], servers=2, presence={2: Presence(joins_at_s=3.5)})
    simulate(cluster, "asp", iterations=8, shards=2)
    first, second = received.values()
    assert first == second == sorted(first)
    assert len(first) == 2


def waits_s(cluster: Cluster, sync: str, until_s: float) -> list[float]:
    """Return the longest time that each of the first three workers waits for an answer before `until_s`."""
    result = simulate(cluster, sync, iterations=40, shards=2, record=True)
    return [
        max(record.answered_s - record.pushed_s for record in records if record.begun_s < until_s)
        for records in result.records[:3]
    ]


EQUAL, SIMILAR, UNEQUAL = (1.0, 1.0, 1.0, 1.0), (1.0, 1.3, 0.7, 1.1), (1.0, 1.0, 2.0, 3.0)
REPRESENTATIVES = [
    ("bsp", EQUAL),
    ("bsp", UNEQUAL),
    ("ssp:staleness=3", UNEQUAL),
    ("pssp:staleness=3,probability=0.1", UNEQUAL),
    ("drop-stragglers:quorum=3", UNEQUAL),
    ("elastic-bsp:lookahead=15", UNEQUAL),
    ("spec-sync", UNEQUAL),
]
"""A model for each reason to wait: a round, a bound, a draw, a quorum, a plan, a timer."""


@pytest.mark.parametrize(
    ("sync", "compute_s"),
    [
        *REPRESENTATIVES,
        *thorough(
            *(
                case
                for case in product(
                    [*EVERY_MODEL, "drop-stragglers:quorum=3", "naive-waiting:delay_s=0.2"],
                    [EQUAL, SIMILAR, UNEQUAL],
                )
                if case not in REPRESENTATIVES
            )
        ),
    ],
    ids=str,
)
def test_a_worker_that_joins_makes_the_others_wait_for_at_most_one_of_its_iterations(
    sync: str, compute_s: tuple[float, ...]
) -> None:
    """With equal workers, this is also one of their own iterations."""
    together = waits_s(Cluster(compute_s, latency_s=0.01, servers=2), sync, math.inf)
    for joins_at_s in (5.3, 7.77, 11.2):
        presence = {3: Presence(joins_at_s=joins_at_s)}
        late = Cluster(compute_s, latency_s=0.01, servers=2, presence=presence)
        found = waits_s(late, sync, joins_at_s + 12.0)
        assert all(b <= a + compute_s[3] for a, b in zip(together, found, strict=True)), (together, found)


# -- the messages of a join -------------------------------------------------------------------------------


def offer(count: int, iteration: int = 0) -> JoinOffered:
    return JoinOffered(2, 1, iteration, count)


def counts(requests: list[Request]) -> list[int]:
    return [
        request.message.count
        for request in requests
        if isinstance(request, Send) and isinstance(request.message, messages.WorkerJoined)
    ]


def test_the_largest_offer_counts_and_all_servers_must_accept_it() -> None:
    join = Join(2, 1, servers=2)
    assert join.begin([2, 5]) == [Send(server_peer(s), JoinProposed(2, 1, (2, 5))) for s in (0, 1)]
    assert join.offered(0, offer(7), 0) == []
    requests = join.offered(1, offer(6, iteration=3), 4)
    joined = messages.WorkerJoined(2, 1, 3, 7, 4)
    assert requests == [Send(server_peer(s), joined) for s in (0, 1)]
    join.welcomed(1, WorkerWelcomed(2, 1, 7))
    assert str(join.phase) == "agreed"
    join.welcomed(0, WorkerWelcomed(2, 1, 7))
    assert str(join.phase) == "in force"


def test_after_a_refusal_all_servers_are_asked_again_with_a_growing_margin() -> None:
    join = Join(2, 1, servers=2)
    join.offered(0, offer(7), 0)
    assert counts(join.offered(1, offer(7), 0)) == [7, 7]
    join.welcomed(0, WorkerWelcomed(2, 1, 7))
    assert counts(join.offered(1, offer(8), 0)) == [9, 9]
    assert join.offered(0, offer(8), 0) == []  # this refusal of the first c_p does not concern the second one
    join.welcomed(0, WorkerWelcomed(2, 1, 7))
    join.welcomed(1, WorkerWelcomed(2, 1, 9))
    assert join.phase == "agreed"
    assert counts(join.offered(0, offer(10), 0)) == [13, 13]


def test_answers_about_an_earlier_incarnation_have_no_effect() -> None:
    join = Join(2, 1, servers=1)
    assert join.offered(0, JoinOffered(2, 0, 0, 3), 0) == []
    join.offered(0, offer(3), 0)
    join.welcomed(0, WorkerWelcomed(2, 0, 3))
    assert join.phase == "agreed"


# -- at the coordinator -----------------------------------------------------------------------------------


class Run:
    """A coordinator whose run is in progress, with one server that answers when `serve` is called."""

    def __init__(self, workers: int = 2, most: int = 4, *, servers: int = 1, pause_below: int = 0) -> None:
        schedule = Schedule((ScheduleStep((parse("asp"),)),))
        late = range(workers, most)
        self.core = Coordinator(
            schedule, workers=most, servers=servers, shards=servers, late=late, pause_below=pause_below
        )
        for server in range(servers):
            self.core.connected(server_peer(server), 0)
        for worker in range(workers):
            self.core.connected(worker_peer(worker), 0)
        for worker in range(workers):
            self.core.handle(worker_peer(worker), Register(MODEL), 0)
        for server in range(servers):
            self.core.handle(server_peer(server), Ready(), 0)

    def come(self, model: ModelSpec = MODEL) -> tuple[int, list[Request]]:
        [(worker, incarnation)] = self.core.invite(1).items()
        self.core.connected(worker_peer(worker), 0, incarnation=incarnation)
        return worker, self.core.handle(worker_peer(worker), Register(model), 0)

    def serve(self, worker: int) -> list[Request]:
        incarnation = self.core.members.incarnation(worker)
        self.core.handle(server_peer(0), JoinOffered(worker, incarnation, 0, 3), 0)
        return self.core.handle(server_peer(0), WorkerWelcomed(worker, incarnation, 3), 0)


def kinds(requests: list[Request]) -> list[type]:
    return [type(request.message) for request in requests if isinstance(request, Send)]


def test_an_invited_worker_joins_when_it_registers_and_starts_when_the_server_has_accepted_it() -> None:
    run = Run()
    worker, requests = run.come()
    assert worker == 2
    assert kinds(requests) == [JoinProposed]
    assert 2 not in run.core.members.present
    assert kinds(run.serve(2)) == [Started]
    assert 2 in run.core.members.present
    run.core.validate()


def test_a_worker_with_another_model_is_refused_and_the_run_goes_on() -> None:
    run = Run()
    worker, requests = run.come(OTHER_MODEL)
    assert kinds(requests) == [Refused]
    assert worker not in run.core.members.live
    assert not run.core.members.lost


def test_a_worker_with_batches_of_another_size_is_refused_and_the_run_goes_on() -> None:
    core = Run().core
    orders = [DataOrder(24, size, False, "static", "") for size in (4, 3)]
    asks = [messages.DataRequested(0, "loader", 0, order, 0, 0) for order in orders]
    assert kinds(core.handle(worker_peer(0), asks[0], 0)) == [messages.DataGranted]
    core.invite(1)
    core.connected(worker_peer(2), 0)
    [refused] = core.handle(worker_peer(2), asks[1], 0)
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refused)
    assert "its batch size is 3 instead of 4" in refused.message.reason
    [warned] = core.handle(worker_peer(2), messages.Failed(refused.message.reason, ""), 0)
    assert isinstance(warned, Warn)
    assert warned.words.startswith("worker 2 could not join the run: distribute() cannot split the data")
    assert core.members.live == {0, 1}
    core.validate()


def test_the_loss_of_a_server_settles_the_lost_workers_that_only_it_had_yet_to_report() -> None:
    run = Run(servers=2)
    run.core.disconnected(worker_peer(1), 0)
    report = PushesReported(1, 0, (5,), (True,), ((),))
    assert run.core.handle(server_peer(0), report, 0) == []
    how = "its connection ended"
    settled = Send(server_peer(0), messages.LossSettled(1, 0, 5))
    assert run.core.server_lost(1, how) == [settled, EndWithout(1, how)]
    assert not run.core.losses.open


def test_the_loss_of_a_server_completes_a_mean_that_only_it_had_yet_to_measure() -> None:
    core = Run(servers=2).core
    mean = ((0, 5), (1, 5))
    assert core.handle(server_peer(0), messages.MeanMeasured(0, mean, 1.0, 0.25), 0) == []
    how = "its connection ended"
    clipped = Send(server_peer(0), messages.MeanClipped(0, pushes=mean, factor=1.0))
    assert core.server_lost(1, how) == [clipped, EndWithout(1, how)]


def test_workers_join_one_after_another() -> None:
    run = Run()
    run.come()
    assert run.come() == (3, [])
    assert kinds(run.serve(2)) == [Started, JoinProposed]
    assert kinds(run.serve(3)) == [Started]


def test_a_worker_in_a_call_that_has_yet_to_pass_a_change_does_not_hold_up_the_run() -> None:
    """It has made the call before it knew of the change, so its message does not say that it may push."""
    core = Run().core
    core.handle(worker_peer(1), Contributed("barrier()", 1), 0)
    assert core.standing_in == set()
    core.handle(worker_peer(0), SyncRequested("script", 0, "bsp"), 0)
    assert core.standing_in == {1}


def test_a_change_waits_for_a_join_and_a_join_for_a_change() -> None:
    run = Run()
    run.come()
    assert run.core.handle(worker_peer(0), SyncRequested("script", 0, "bsp"), 0) == []
    run.come()
    requests = run.serve(2)
    assert kinds(requests) == [Started, ChangePublished, ChangePublished, ChangePublished]
    for worker in range(3):
        assert (
            run.core.handle(worker_peer(worker), messages.IterationFinished(iteration=0, change=1), 0) == []
        )
    assert kinds(run.core.handle(worker_peer(0), messages.IterationStarted(1), 0)) == [JoinProposed]


def test_if_a_worker_is_lost_while_it_joins_the_next_one_joins() -> None:
    run = Run()
    run.come()
    run.come()
    requests = run.core.disconnected(worker_peer(2), 0)
    assert kinds(requests) == [messages.WorkerLost, JoinProposed]
    assert kinds(run.serve(3)) == [Started]


def test_an_index_is_used_again_by_the_next_incarnation() -> None:
    run = Run(2, 2)
    run.core.disconnected(worker_peer(1), 0)
    with pytest.raises(ConfigurationError):
        run.core.invite(1)  # its loss is not settled yet
    run.core.handle(server_peer(0), PushesReported(1, 0, (-1,), (False,), ((),)), 0)
    assert run.core.members.fate(1) == "lost"
    assert run.come()[0] == 1
    assert run.core.members.incarnations == {1: 1}
    assert run.core.members.fate(1) == ""
    assert run.core.ended(1, 0, incarnation=0) == []  # the process of the earlier one
    assert kinds(run.serve(1)) == [Started]


def test_the_position_of_a_worker_that_leaves_before_it_has_joined_is_forgotten() -> None:
    """Otherwise, it would count as the position of the next worker with this index."""
    core = Run().core
    position = messages.LoopPosition(0, 3)
    core.handle(worker_peer(0), messages.EpochReached(position), 0)
    [(worker, _)] = core.invite(1).items()
    core.connected(worker_peer(worker), 0)
    core.handle(worker_peer(worker), messages.EntryRequested(0), 0)
    assert core.loops.cut(0, 1, worker).position == position
    core.disconnected(worker_peer(worker), 0)
    assert core.loops.cut(0, 1, worker).position is None


def test_a_cut_of_a_run_without_workers_waits_until_a_worker_has_joined() -> None:
    run = Run(1, 2, pause_below=1)
    run.core.disconnected(worker_peer(0), 0)
    run.core.handle(server_peer(0), PushesReported(0, 0, (-1,), (False,), ((),)), 0)
    assert run.core.cut() == []
    worker, _ = run.come()
    assert messages.CutAgreed in kinds(run.serve(worker))


def test_a_cut_is_abandoned_if_the_last_worker_is_lost_before_it_has_given_its_state() -> None:
    run = Run(1, 2, pause_below=1)
    run.core.cut()
    taken = messages.CutTaken(1, 0, messages.ShardState(), messages.PushCounts(), (messages.LastPush(0, -1),))
    assert messages.StateWanted in kinds(run.core.handle(server_peer(0), taken, 0))
    requests = run.core.disconnected(worker_peer(0), 0)
    assert any(isinstance(request, AbandonCut) for request in requests)
    assert not any(isinstance(request, CompleteCut) for request in requests)


def test_the_first_epoch_is_split_when_enough_workers_have_joined() -> None:
    schedule = Schedule((ScheduleStep((parse("bsp"),)),))
    core = Coordinator(schedule, workers=3, servers=1, shards=1, late=range(3), least=2)
    ask = messages.DataRequested(0, "loader", 0, DataOrder(24, 4, False, "auto", ""), 0, 0)
    core.invite(1)
    core.connected(worker_peer(0), 0)
    assert core.handle(worker_peer(0), ask, 0) == []
    core.invite(1)
    [early] = core.connected(worker_peer(1), 0)
    assert isinstance(early, Send)
    assert early.to == worker_peer(0)
    [late] = core.handle(worker_peer(1), ask, 0)
    assert isinstance(late, Send)
    for granted in (early.message, late.message):
        assert isinstance(granted, messages.DataGranted)
        assert positions(granted.leases) == 12


def test_a_worker_that_leaves_before_the_run_begins_receives_no_data() -> None:
    schedule = Schedule((ScheduleStep((parse("bsp"),)),))
    core = Coordinator(schedule, workers=3, servers=1, shards=1, late=range(3), least=2)
    ask = messages.DataRequested(0, "loader", 0, DataOrder(24, 4, False, "auto", ""), 0, 0)
    core.invite(1)
    core.connected(worker_peer(0), 0)
    core.handle(worker_peer(0), ask, 0)
    core.disconnected(worker_peer(0), 0)
    core.invite(2)
    assert core.connected(worker_peer(1), 0) == []


def test_a_worker_that_was_asked_to_leave_before_the_run_begins_does_not_count() -> None:
    schedule = Schedule((ScheduleStep((parse("bsp"),)),))
    core = Coordinator(schedule, workers=3, servers=1, shards=1, late=range(3), least=2)
    core.invite(2)
    core.connected(worker_peer(0), 0)
    core.ended(1, 0, asked=True)
    assert core.shortage == "1 of at least 2 workers"
    ask = messages.DataRequested(0, "loader", 0, DataOrder(24, 4, False, "auto", ""), 0, 0)
    assert core.handle(worker_peer(0), ask, 0) == []


@pytest.mark.parametrize("then", ["trains", "is lost", "is refused"])
def test_a_run_does_not_end_before_a_worker_that_has_drawn_data_but_not_begun(then: str) -> None:
    """Otherwise, its data would be lost, and its process would end with an error."""
    run = Run()
    core = run.core
    ask = messages.DataRequested(0, "loader", 0, DataOrder(24, 4, False, "dynamic", ""), 0, 0)
    core.invite(1)
    core.connected(worker_peer(2), 0)
    assert kinds(core.handle(worker_peer(2), ask, 0)) == [messages.DataGranted]
    for worker in range(2):
        assert not core.everybody_left
        core.handle(worker_peer(worker), messages.WorkerFinished(), 0)
    assert core.awaited == {2}
    assert not core.everybody_left
    if then == "trains":
        core.handle(worker_peer(2), Register(MODEL), 0)
        assert kinds(run.serve(2))[0] == Started
        assert not core.everybody_left
        core.handle(worker_peer(2), messages.WorkerFinished(), 0)
    elif then == "is lost":
        core.disconnected(worker_peer(2), 0)
    else:
        core.handle(worker_peer(2), Register(OTHER_MODEL), 0)
    assert core.everybody_left


def test_a_worker_gets_the_index_that_it_asks_for_if_this_is_free() -> None:
    run = Run(1, 5)
    run.core.disconnected(worker_peer(0), 0)
    run.core.handle(server_peer(0), PushesReported(0, 0, (-1,), (False,), ((),)), 0)
    assert run.core.invite(1, [3]) == {3: 0}
    assert run.core.invite(1, [3]) == {1: 0}  # the next free one that has not been used
    assert run.core.invite(1, [0]) == {0: 1}
    assert run.core.invite(2, [4, 7]) == {4: 0, 2: 0}


# -- at a server ------------------------------------------------------------------------------------------


def serve(sync: str, shards: int = 1) -> Server:
    """Return a server with two workers, which are computing their first iteration."""
    core = Server()
    slices = tuple(ShardSlice(index, {}, ()) for index in range(shards))
    core.handle(COORDINATOR, messages.CreateShards(MODEL, slices, sync, (0, 1), 0), 0)
    for index in range(shards):
        core.handle(worker_peer(0), messages.InitialWeights(index), 0)
    for worker in (0, 1):
        core.connected(worker, 0)
    return core


def iterate(core: Server, worker: int, iteration: int) -> list[Request]:
    return [
        request
        for shard in core.shards
        for request in core.handle(worker_peer(worker), messages.Commit(shard, iteration), 0)
    ]


def answered(requests: list[Request]) -> list[int]:
    return [r.to.index for r in requests if isinstance(r, Send) and isinstance(r.message, messages.Answer)]


def joined(count: int, worker: int = 2) -> messages.WorkerJoined:
    return messages.WorkerJoined(worker, 0, 0, count, 0)


def test_under_bsp_a_worker_is_answered_at_the_next_boundary_and_counts_from_there() -> None:
    core = serve("bsp")
    assert core.handle(COORDINATOR, JoinProposed(2, 0), 0) == [Send(COORDINATOR, JoinOffered(2, 0, 0, 1))]
    assert core.handle(COORDINATOR, joined(1), 0) == [Send(COORDINATOR, WorkerWelcomed(2, 0, 1))]
    assert answered(core.connected(2, 0)) == []
    assert answered(iterate(core, 0, 0)) == []
    assert sorted(answered(iterate(core, 1, 0))) == [0, 1, 2]
    assert answered(iterate(core, 0, 1)) == []
    assert answered(iterate(core, 1, 1)) == []
    assert sorted(answered(iterate(core, 2, 0))) == [0, 1, 2]


def test_a_shard_that_has_gone_beyond_the_round_refuses_it() -> None:
    core = serve("bsp")
    for iteration in range(2):
        for worker in (0, 1):
            iterate(core, worker, iteration)
    assert core.handle(COORDINATOR, joined(1), 0) == [Send(COORDINATOR, JoinOffered(2, 0, 0, 3))]
    assert 2 not in core.expected


def test_a_worker_that_another_server_has_refused_joins_again_in_a_later_round() -> None:
    core = serve("bsp")
    core.handle(COORDINATOR, joined(1), 0)
    assert core.handle(COORDINATOR, joined(3), 0) == [Send(COORDINATOR, WorkerWelcomed(2, 0, 3))]
    core.connected(2, 0)
    released = [answered(iterate(core, worker, iteration)) for iteration in range(3) for worker in (0, 1)]
    assert [2 in workers for workers in released] == [False] * 5 + [True]


@pytest.mark.parametrize(
    "sync", ["asp", "ssp:staleness=1", "pssp", "dssp", "elastic-bsp", "spec-sync", "dsps"]
)
def test_the_other_models_let_a_worker_begin_at_once_with_the_progress_of_the_slowest(sync: str) -> None:
    core = serve(sync)
    for worker in (0, 1):
        iterate(core, worker, 0)
    iterate(core, 0, 1)
    assert core.handle(COORDINATOR, JoinProposed(2, 0), 0) == [Send(COORDINATOR, JoinOffered(2, 0, 0, 1))]
    core.handle(COORDINATOR, joined(1), 0)
    assert answered(core.connected(2, 0)) == [2]


def test_under_ssp_only_a_worker_that_joins_ahead_of_the_slowest_waits() -> None:
    core = serve("ssp:staleness=1")
    core.handle(COORDINATOR, joined(1), 0)
    assert answered(core.connected(2, 0)) == []
    assert answered(iterate(core, 0, 0)) == [0]
    assert answered(iterate(core, 1, 0)) == [2, 1]


def test_a_worker_that_joins_does_not_count_in_a_round_before_its_first() -> None:
    core = serve("drop-stragglers:quorum=2")
    core.handle(COORDINATOR, joined(1), 0)
    assert not any(isinstance(request, Apply) for request in iterate(core, 0, 0))
    assert any(isinstance(request, Apply) for request in iterate(core, 1, 0))


def test_if_all_others_leave_the_worker_that_joins_begins() -> None:
    core = serve("bsp")
    core.handle(COORDINATOR, joined(4), 0)
    core.connected(2, 0)
    core.handle(worker_peer(0), messages.WorkerFinished(), 0)
    assert answered(core.handle(worker_peer(1), messages.WorkerFinished(), 0)) == [2]


def test_a_server_answers_when_it_has_noticed_all_departures() -> None:
    core = serve("bsp")
    assert core.handle(COORDINATOR, JoinProposed(2, 0, (1,)), 0) == []
    [offered] = core.handle(worker_peer(1), messages.WorkerFinished(), 0)
    assert offered == Send(COORDINATOR, JoinOffered(2, 0, 0, 1))


def test_an_index_that_is_used_again_gets_new_labels_and_only_its_incarnation_may_connect() -> None:
    core = serve("asp")
    iterate(core, 1, 0)
    core.disconnected(1, 0)
    [offered] = core.handle(COORDINATOR, JoinProposed(1, 1), 0)
    assert offered == Send(COORDINATOR, JoinOffered(1, 1, 2, 0))
    core.handle(COORDINATOR, messages.WorkerJoined(1, 1, 2, 0, 0), 0)
    with pytest.raises(ProtocolError, match="incarnation 0 of worker 1 connects, expected 1"):
        core.require_expected(1)
    assert answered(core.connected(1, 0, 0, 1)) == [1]


def test_a_users_condition_is_not_asked_about_the_first_pull_of_a_worker_that_joins() -> None:
    """The condition may expect what only a push brings, such as its significance."""

    def significant(state: PullState) -> bool:
        assert state.significance is not None
        return state.significance > 1

    shard = ShardSync(Conditions(pull=significant, significance="on"))
    shard.handle(WorkerJoined(now_ticks=0, worker=0))
    shard.handle(WorkerJoined(now_ticks=0, worker=1, count=0, pulls=True))
    pull = PullRequested(now_ticks=0, worker=1, iteration=-1)
    assert shard.handle(pull) == [AnswerPull(1, -1)]
