"""A mean is clipped once every shard has reported its norm; until then the shard's requests wait, in order."""

from __future__ import annotations

import math

import pytest

from paceline.core.joint_batch import JointNorms, clip_factor
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, round_robin
from paceline.core.messages import (
    Answer,
    Commit,
    CreateShards,
    InitialWeights,
    MeanAwaited,
    MeanClipped,
    MeanMeasured,
    MeanMissing,
    Message,
)
from paceline.core.requests import COORDINATOR, Apply, Measure, Request, Send, server_peer, worker_peer
from paceline.core.server import Server
from paceline.core.shard import Shard
from paceline.errors import InvalidEventError, ProtocolError
from paceline.sync import BSP, ElasticBSP, SyncModel, events
from paceline.sync.events import Clip, PullRequested, PushReceived, Stop, WorkerJoined, WorkerLost
from paceline.sync.ticks import in_ticks

CLIP = Clip(max_norm=1.0, factor=0.5)
MEAN = ((0, 0), (1, 0))


def shard_of(workers: int, sync: SyncModel | None = None) -> Shard:
    """A shard under BSP or another model, whose workers have joined."""
    shard = Shard(0, [sync or BSP()])
    for worker in range(workers):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    return shard


def push(shard: Shard, worker: int, iteration: int = 0, clip: Clip | None = CLIP) -> list[Request]:
    """Push and pull."""
    pushed = shard.handle(
        PushReceived(now_ticks=in_ticks(1.0), worker=worker, iteration=iteration, clip=clip)
    )
    return pushed + shard.handle(PullRequested(now_ticks=in_ticks(1.0), worker=worker, iteration=iteration))


def clip(shard: Shard, pushes: tuple[tuple[int, int], ...], factor: float) -> list[Request]:
    return shard.handle(events.MeanClipped(now_ticks=in_ticks(2.0), pushes=pushes, factor=factor))


def answered(requests: list[Request]) -> list[int]:
    return [r.to.index for r in requests if isinstance(r, Send) and isinstance(r.message, Answer)]


# -- a shard -----------------------------------------------------------------------------------------------------


def test_the_update_and_the_answers_wait_for_the_factor() -> None:
    shard = shard_of(2)
    assert push(shard, 0) == []
    assert push(shard, 1) == [Measure(0, MEAN, (0.5, 0.5), 1.0)]
    assert shard.version == 0
    assert shard.waits().keys() == {0, 1}
    assert "norms" in shard.waits()[0]
    update, *answers = clip(shard, MEAN, 0.5)
    assert update == Apply(0, MEAN, (0.25, 0.25))
    assert answered(answers) == [0, 1]
    assert shard.version == 1
    assert shard.waits() == {}


def test_what_arrives_meanwhile_waits_in_order() -> None:
    """Worker 3 evaluates, and worker 2 pushes for the next superstep of ElasticBSP."""
    shard = shard_of(4, ElasticBSP())
    stop = Stop(superstep=0, members=(0, 1))
    for worker in (0, 1):
        shard.handle(PushReceived(now_ticks=in_ticks(1.0), worker=worker, iteration=0, stop=stop, clip=CLIP))
    assert (
        shard.handle(events.PullRepeated(now_ticks=in_ticks(1.0), worker=3, iteration=0, restart=False)) == []
    )
    assert push(shard, 2) == []
    requests = clip(shard, MEAN, 1.0)
    assert requests[0] == Apply(0, MEAN, (0.5, 0.5))
    assert answered(requests[1:2]) == [3]
    assert requests[2] == Apply(0, ((2, 0),), (0.5,))  # by the worker's own factor
    assert answered(requests[3:]) == [2]


def test_a_lost_worker_is_not_answered_and_its_push_stays_in_the_mean() -> None:
    shard = shard_of(2)
    push(shard, 0)
    push(shard, 1)
    assert shard.handle(WorkerLost(now_ticks=in_ticks(1.5), worker=1)) == []
    update, *answers = clip(shard, MEAN, 1.0)
    assert isinstance(update, Apply)
    assert answered(answers) == [0]


def test_two_means_may_wait_and_the_second_factor_may_come_first() -> None:
    shard = shard_of(2, ElasticBSP())
    for superstep, worker in enumerate((0, 1)):
        stop = Stop(superstep=superstep, members=(worker,))
        shard.handle(PushReceived(now_ticks=in_ticks(1.0), worker=worker, iteration=0, stop=stop, clip=CLIP))
    assert clip(shard, ((1, 0),), 0.5) == []
    assert clip(shard, ((0, 0),), 0.25) == [
        Apply(0, ((0, 0),), (0.25,)),
        Apply(0, ((1, 0),), (0.5,)),
    ]


def test_a_factor_that_is_not_awaited_is_refused_and_changes_nothing() -> None:
    shard = shard_of(2)
    push(shard, 0)
    push(shard, 1)
    with pytest.raises(InvalidEventError, match="was not measured"):
        clip(shard, ((0, 0),), 0.5)
    assert shard.clipped.measured == [MEAN]


def test_a_mean_is_clipped_if_one_worker_clips_and_by_the_norm_of_the_most_advanced() -> None:
    shard = shard_of(2)
    push(shard, 0, clip=None)
    assert push(shard, 1) == [Measure(0, MEAN, (0.5, 0.5), 1.0)]
    shard = shard_of(2, ElasticBSP())
    shard.handle(PushReceived(now_ticks=in_ticks(1.0), worker=1, iteration=0))
    shard.handle(PullRequested(now_ticks=in_ticks(1.0), worker=1, iteration=0))
    stop = Stop(superstep=0, members=(0, 1))
    for worker, iteration, norm in ((0, 0, 7.0), (1, 1, 3.0)):
        flag = Clip(max_norm=norm, factor=1.0)
        requests = shard.handle(
            PushReceived(now_ticks=in_ticks(1.0), worker=worker, iteration=iteration, stop=stop, clip=flag)
        )
    assert requests == [Measure(0, ((0, 0), (1, 1)), (0.5, 0.5), 3.0)]


def test_a_shard_says_that_a_mean_is_missing_as_soon_as_that_is_certain() -> None:
    asked = ((1, 0),)
    missing = [Send(COORDINATOR, MeanMissing(0, asked))]
    shard = shard_of(2)  # worker 1's push may still come
    assert shard.ask(asked) == []
    assert shard.handle(WorkerLost(now_ticks=in_ticks(1.0), worker=1)) == missing
    shard = shard_of(2)  # it has come, and is held
    push(shard, 1)
    shard.handle(WorkerLost(now_ticks=in_ticks(1.0), worker=1))
    assert shard.ask(asked) == []
    assert push(shard, 0) == [Measure(0, MEAN, (0.5, 0.5), 1.0)]  # which answers the question
    shard = shard_of(2)  # it was applied without clipping
    push(shard, 0, clip=None)
    push(shard, 1, clip=None)
    assert shard.ask(asked) == missing


def test_a_worker_whose_answer_is_kept_may_neither_push_nor_pull() -> None:
    shard = shard_of(2)
    push(shard, 0)
    push(shard, 1)
    for event in (
        PushReceived(now_ticks=in_ticks(1.5), worker=0, iteration=1),
        events.PullRepeated(now_ticks=in_ticks(1.5), worker=0, iteration=1),
    ):
        with pytest.raises(InvalidEventError, match="before its pull was answered"):
            shard.handle(event)
    clip(shard, MEAN, 1.0)
    assert answered(shard.handle(events.PullRepeated(now_ticks=in_ticks(2.5), worker=0, iteration=1))) == [0]


# -- a server ----------------------------------------------------------------------------------------------------


def server_of(sync: str, workers: int = 2) -> Server:
    server = Server()
    model = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())
    server.handle(
        COORDINATOR, CreateShards(model, model.layout.slice_evenly(1), sync, tuple(range(workers)), 0), 0
    )
    server.handle(worker_peer(0), InitialWeights(0), 0)
    return server


def test_a_server_lists_the_workers_that_wait_for_a_factor() -> None:
    server = server_of("bsp")
    for worker in (0, 1):
        server.handle(worker_peer(worker), Commit(0, 0, clip=CLIP), 1)
    assert server.awaits_factor
    [waits] = server.waits(timers=False).shards
    assert waits.pulls == MEAN
    assert all("norms" in reason for reason in waits.reasons)
    requests = server.handle(COORDINATOR, MeanClipped(0, pushes=MEAN, factor=1.0), 2)
    assert answered(requests) == [0, 1]
    assert not server.awaits_factor


@pytest.mark.parametrize("sync", ["drop-stragglers:quorum=1", "conditions:pull=operator:not_"])
def test_a_push_that_clips_is_refused_if_its_shards_may_disagree_about_means(sync: str) -> None:
    server = server_of(sync)
    with pytest.raises(ProtocolError, match="clips the joint gradient"):
        server.handle(worker_peer(0), Commit(0, 0, clip=CLIP), 1)
    server.handle(worker_peer(0), Commit(0, 0), 1)


# -- the coordinator -----------------------------------------------------------------------------------------------


def told(requests: list[Request]) -> list[tuple[int, Message]]:
    """The messages to servers, by server."""
    found = []
    for request in requests:
        assert isinstance(request, Send)
        assert request.to == server_peer(request.to.index)
        found.append((request.to.index, request.message))
    return found


def test_the_squares_are_added_in_the_order_of_the_shards_and_all_receive_one_factor() -> None:
    squares = [0.1, 1e16, 0.3]
    norms = JointNorms(round_robin(shards=3, servers=2))
    assert norms.measured(MeanMeasured(2, MEAN, 2.0, squares[2])) == []
    assert norms.measured(MeanMeasured(0, MEAN, 2.0, squares[0])) == []
    factor = clip_factor(2.0, math.sqrt(sum(squares)))
    assert told(norms.measured(MeanMeasured(1, MEAN, 2.0, squares[1]))) == [
        (shard % 2, MeanClipped(shard, pushes=MEAN, factor=factor)) for shard in range(3)
    ]


def test_means_are_told_apart_by_their_pushes() -> None:
    norms = JointNorms(round_robin(shards=2, servers=2))
    later = ((0, 1), (1, 1))
    assert norms.measured(MeanMeasured(0, MEAN, 1.0, 9.0)) == []
    assert norms.measured(MeanMeasured(0, later, 1.0, 4.0)) == []
    assert told(norms.measured(MeanMeasured(1, later, 1.0, 0)))[0] == (
        0,
        MeanClipped(0, pushes=later, factor=clip_factor(1.0, 2.0)),
    )


def test_after_a_loss_the_shards_that_have_not_reported_are_asked_once() -> None:
    norms = JointNorms(round_robin(shards=3, servers=3))
    torn = ((1, 4),)
    assert norms.measured(MeanMeasured(0, torn, 1.0, 4.0)) == []
    assert told(norms.lost(1)) == [(1, MeanAwaited(1, torn)), (2, MeanAwaited(2, torn))]
    assert norms.lost(0) == []
    assert norms.missing(MeanMissing(2, torn)) == []
    both = ((0, 4), (1, 4))
    assert told(norms.measured(MeanMeasured(1, both, 1.0, 12.0))) == [
        (0, MeanClipped(0, pushes=torn, factor=clip_factor(1.0, 4.0))),
        (1, MeanClipped(1, pushes=both, factor=clip_factor(1.0, 4.0))),
    ]
    assert told(norms.measured(MeanMeasured(0, ((1, 5),), 1.0, 4.0))) == [
        (1, MeanAwaited(1, ((1, 5),))),
        (2, MeanAwaited(2, ((1, 5),))),
    ]  # the loss is known already
    assert norms.missing(MeanMissing(1, ((7, 7),))) == []  # of a mean that is complete


def test_no_shard_waits_for_the_shards_of_a_lost_server() -> None:
    norms = JointNorms(round_robin(shards=3, servers=2))
    early, late = ((0, 4),), ((0, 5),)
    assert norms.measured(MeanMeasured(0, early, 1.0, 4.0)) == []
    assert norms.lose_server(1) == []
    factor = clip_factor(1.0, 2.0 * math.sqrt(2))
    for mean, first in ((early, 2), (late, 0)):
        if mean == late:
            assert norms.measured(MeanMeasured(2, mean, 1.0, 4.0)) == []
        assert told(norms.measured(MeanMeasured(first, mean, 1.0, 4.0))) == [
            (0, MeanClipped(shard, pushes=mean, factor=factor)) for shard in (0, 2)
        ]
    norms = JointNorms(round_robin(shards=2, servers=2))
    assert norms.measured(MeanMeasured(0, early, 1.0, 4.0)) == []
    assert told(norms.lose_server(1)) == [(0, MeanClipped(0, pushes=early, factor=clip_factor(1.0, 2.0)))]


def test_a_mean_whose_norm_overflows_has_a_factor() -> None:
    assert clip_factor(1.0, math.inf) == 0.0
    assert clip_factor(1.0, math.nan) == 1.0
    assert clip_factor(0.0, 0) == 0.0
