"""Numbers that no honest worker sends: a machine refuses them or takes them, and goes on; none is counted up to."""

from __future__ import annotations

import contextlib

import pytest

from paceline.core.shard import ShardSync
from paceline.errors import InvalidEventError
from paceline.sync import parse
from paceline.sync.events import Change, PullRequested, PushReceived, Stop, WorkerJoined

SYNCS = [
    "bsp",
    "asp",
    "ssp:staleness=1",
    "dssp:lower=1,upper=3",
    "dsps",
    "pssp",
    "dynamic-pssp:alpha=significance",
    "drop-stragglers:quorum=1",
    "naive-waiting:delay_s=1",
    "elastic-bsp",
    "spec-sync",
]


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_push_for_a_round_that_nobody_has_come_to_costs_no_time(sync: str, workers: int) -> None:
    shard = ShardSync(parse(sync))
    for worker in range(workers):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    for worker in reversed(range(workers)):
        with contextlib.suppress(InvalidEventError):
            shard.handle(PushReceived(now_ticks=1, worker=worker, iteration=0, progress=2**52))
            shard.handle(PullRequested(now_ticks=1, worker=worker, iteration=0))
    shard.validate()


def test_the_latest_round_that_another_shard_can_have_closed_is_taken() -> None:
    """Each of the others may have pushed once more there than here."""
    shard = ShardSync(parse("drop-stragglers:quorum=1"))
    for worker in range(3):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    for worker, progress in [(1, 1), (2, 2)]:
        shard.handle(PushReceived(now_ticks=1, worker=worker, iteration=0, progress=progress))
    assert shard.counts.furthest == 3
    with pytest.raises(InvalidEventError, match="worker 0 goes on from round 7, expected at most 6"):
        shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0, progress=7))
    shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0, progress=6))
    shard.validate()


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    "flags",
    [
        {"stop": Stop(superstep=2**53, members=(0,))},
        {"stop": Stop(superstep=2**53, members=(0, 7, 7, 2**53))},
        {"stop": Stop(superstep=0, members=())},
        {"change": Change(number=2**53, members=(0,), sync="bsp")},
        {"change": Change(number=2**53, members=(0, 1, 7, 2**53), sync="elastic-bsp")},
        {"change": Change(number=0, members=(0, 0), sync="asp")},
        {"change": Change(number=1, members=(), sync="asp")},
        {
            "change": Change(number=1, members=(0,), sync="asp"),
            "stop": Stop(superstep=1, members=(0, 1)),
        },
    ],
    ids=str,
)
def test_flags_of_another_world_are_refused_or_taken_and_the_others_go_on(
    sync: str, flags: dict[str, object]
) -> None:
    shard = ShardSync(parse(sync))
    for worker in range(2):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    with contextlib.suppress(InvalidEventError):
        shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0, **flags))  # type: ignore[arg-type]
        shard.validate()
        shard.handle(PullRequested(now_ticks=1, worker=0, iteration=0))
    shard.validate()
    shard.handle(PushReceived(now_ticks=2, worker=1, iteration=0))
    shard.handle(PullRequested(now_ticks=2, worker=1, iteration=0))
    shard.validate()
