"""Tests of the standing of each update, by which hyper-parameters are translated (`core/joint_batch.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from paceline.core.joint_batch import RAMP, WINDOW
from paceline.core.requests import Apply, Timer
from paceline.core.shard import Shard
from paceline.errors import InvalidEventError
from paceline.sync import SyncModel, parse
from paceline.sync.events import (
    Change,
    Clip,
    Edit,
    MeanClipped,
    PullRequested,
    PushReceived,
    RateTempered,
    RecordedEvent,
    Stop,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.translation import Standing
from paceline.trace.recording import Header, Memory, Recorder, read
from paceline.trace.replay import replay


class Job:
    """One shard with translated hyper-parameters, whose workers push and pull in an order that a test decides.

    Attributes:
        applied: all updates, in order.
    """

    def __init__(self, sync: str, workers: int, *, translated: bool = True, usual: int | None = None) -> None:
        model: SyncModel = parse(sync)
        header = Header(
            sync=sync, host="shard", hyperparameters="translated" if translated else msgspec.UNSET
        )
        self.memory = Memory(header)
        self.shard = Shard(0, [model], recorder=self.memory, usual_samples=usual, translated=translated)
        self.applied: list[Apply] = []
        self._label: dict[int, int] = {}
        for worker in range(workers):
            self.join(worker)

    def handle(self, event: RecordedEvent) -> list[Apply]:
        requests = self.shard.handle(event)
        for timer in [request for request in requests if isinstance(request, Timer)]:
            requests += self.shard.handle(
                TimerFired(now_ticks=0, worker=timer.worker, iteration=timer.iteration)
            )
        applied = [request for request in requests if isinstance(request, Apply)]
        self.applied += applied
        return applied

    def join(self, worker: int, **keywords: object) -> None:
        self.handle(WorkerJoined(now_ticks=0, worker=worker, iteration=0, **keywords))  # type: ignore[arg-type]
        self._label[worker] = 0

    def push(self, worker: int, samples: int | None = None, **keywords: object) -> list[Apply]:
        """Let a worker push and pull. Return the updates."""
        label = self._label[worker]
        self._label[worker] += 1
        push = PushReceived(now_ticks=0, worker=worker, iteration=label, samples=samples, **keywords)  # type: ignore[arg-type]
        applied = self.handle(push)
        return applied + self.handle(PullRequested(now_ticks=0, worker=worker, iteration=label))

    def leave(self, worker: int) -> list[Apply]:
        return self.handle(WorkerFinished(now_ticks=0, worker=worker))

    def rounds(self, count: int, workers: Sequence[int], samples: int | None = None) -> list[Standing | None]:
        """Let the workers push in turn. Return the standings of the updates."""
        updates = [each for _ in range(count) for worker in workers for each in self.push(worker, samples)]
        return [update.standing for update in updates]

    def require_replayable(self) -> None:
        assert replay(self.memory.trace) == []


def standing_of(updates: list[Apply]) -> Standing:
    (update,) = updates
    assert update.standing is not None
    return update.standing


SINGLE = [
    "asp",
    "ssp:staleness=9",
    "dssp:lower=9,upper=12",
    "dsps:lower=9,upper=12",
    "pssp:staleness=9,probability=0.5",
    "naive-waiting:delay_s=1",
    "spec-sync",
    "ringmaster:threshold=50",
    "elastic-bsp",
]


@pytest.mark.parametrize("sync", SINGLE)
def test_a_push_of_n_equal_workers_has_a_share_of_one_nth(sync: str) -> None:
    job = Job(sync, workers=4)
    standings = [standing for standing in job.rounds(3, range(4), 32) if standing is not None]
    assert len(standings) == 12
    assert {standing.share for standing in standings} == {0.25}
    assert all(0.6 < standing.delay <= 0.75 for standing in standings)
    job.require_replayable()


@pytest.mark.parametrize("sync", ["bsp", "conditions:pull=tests.core.test_standing:behind,pushes=average"])
def test_the_mean_of_all_workers_is_a_whole_step_whatever_its_batches(sync: str) -> None:
    job = Job(sync, workers=3)
    for samples in ([32, 32, 32], [32, 32, 5], [1, 1, 1], [None, 3, None]):
        for worker, count in enumerate(samples):
            job.push(worker, count)
    assert [update.standing for update in job.applied] == [None] * 4
    job.require_replayable()


def behind(state: object) -> bool:
    return state.progress < state.v_train  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("sync", ["asp", "ssp:staleness=1", "elastic-bsp", "drop-stragglers:quorum=1"])
def test_a_single_worker_takes_whole_steps(sync: str) -> None:
    job = Job(sync, workers=1)
    for samples in (32, 32, 7, None):
        job.push(0, samples)
    assert [update.standing for update in job.applied] == [None] * 4


def test_shares_follow_the_samples() -> None:
    job = Job("asp", workers=2)
    job.push(0, 48)
    job.push(1, 16)
    assert standing_of(job.push(0, 48)).share == 0.75
    assert standing_of(job.push(1, 16)).share == 0.25


def test_the_shares_of_an_epoch_add_up_to_the_joint_batches_even_if_the_last_ones_are_smaller() -> None:
    job = Job("asp", workers=4)
    for _ in range(5):
        job.rounds(7, range(4), 32)
        job.rounds(1, range(4), 8)
    assert sum(update.standing.share for update in job.applied if update.standing) == pytest.approx(
        40, rel=0.04
    )


def test_samples_that_are_unknown_count_as_usual_ones() -> None:
    job = Job("asp", workers=4)
    assert {each.share for each in job.rounds(2, range(4)) if each is not None} == {0.25}
    job = Job("asp", workers=4)
    job.rounds(1, range(4), 16)
    assert standing_of(job.push(3)).share == 0.25
    assert standing_of(job.push(3, 16)).share == 0.25


def test_a_mean_of_fewer_has_the_share_of_its_pushes() -> None:
    job = Job("drop-stragglers:quorum=3", workers=4)
    for worker in (0, 1, 2):
        job.push(worker, 32)
    assert job.applied[-1].standing == Standing(0.75)
    job = Job("rennala:batch=2", workers=4)
    job.push(0, 32)
    job.push(0, 32)
    assert job.applied[-1].standing == Standing(0.5)


def test_a_mean_of_more_than_a_joint_batch_is_one_step() -> None:
    job = Job("rennala:batch=4", workers=2)
    for _ in range(4):
        job.push(0, 32)
    assert job.applied[-1].standing is None


def test_the_share_at_a_barrier_of_elastic_bsp_is_that_of_all_its_pushes() -> None:
    job = Job("elastic-bsp", workers=4)
    job.rounds(2, range(4), 32)
    stop = Stop(superstep=0, members=(0, 1, 2, 3))
    for worker in range(4):
        job.push(worker, 32, stop=stop)
    assert len(job.applied[-1].pushes) == 4
    assert job.applied[-1].standing is not None
    assert job.applied[-1].standing.share == 1.0
    job.require_replayable()


def test_samples_enter_once() -> None:
    """In place of the factor of the gradient, which raw SGD uses, translated updates have the share."""
    raw, translated = (Job("asp", workers=2, translated=each, usual=32) for each in (False, True))
    for job in (raw, translated):
        job.push(0, 48)
        job.push(1, 16)
    assert [(update.scales, update.standing) for update in raw.applied] == [((1.5,), None), ((0.5,), None)]
    assert [update.scales for update in translated.applied] == [(1.0,), (1.0,)]
    assert standing_of(translated.push(1, 16)).share == 0.25
    alone = Job("asp", workers=1, usual=32)
    assert [update.scales for update in alone.push(0, 48)] == [(1.0,)]


@pytest.mark.parametrize("sync", ["asp", "spec-sync:base=asp"])
@pytest.mark.parametrize("scale", ["1/n", "1/tau", "n/tau"])
def test_a_model_that_scales_pushes_is_raw(sync: str, scale: str) -> None:
    colon = "," if ":" in sync else ":"
    raw, translated = (
        Job(f"{sync}{colon}push_scale={scale}", 2, translated=each, usual=32) for each in (False, True)
    )
    for job in (raw, translated):
        job.rounds(3, [0, 1, 0], 48)
    assert translated.applied == raw.applied
    assert translated.memory.trace.entries == raw.memory.trace.entries


@pytest.mark.parametrize("sync", [*SINGLE, "bsp", "drop-stragglers:quorum=2"])
def test_translation_changes_no_decision(sync: str) -> None:
    raw, translated = (Job(sync, 3, translated=each) for each in (False, True))
    for job in (raw, translated):
        job.rounds(4, [0, 1, 2], 32)
        job.push(0, 8)
        job.leave(1)
    plain = [msgspec.structs.replace(entry, standings=[]) for entry in translated.memory.trace.entries]
    assert plain == raw.memory.trace.entries
    assert all(not entry.standings for entry in raw.memory.trace.entries)


def test_the_predicted_delay_is_the_mean_of_the_measured_ones_however_unequal_the_workers_are() -> None:
    job = Job("asp", workers=4)
    first = standing_of(job.push(0, 32)).delay
    job.rounds(60, [0, 1, 2, 0, 1, 2, 0, 1, 2, 3], 32)
    last = standing_of(job.push(0, 32)).delay
    assert first == pytest.approx(0.75, abs=0.02)
    assert last == pytest.approx(0.75, abs=0.1)


def test_the_measured_delay_replaces_the_prediction() -> None:
    """If each worker pushes twice in a row, half of the pushes are on the newest weights."""
    job = Job("asp", workers=2)
    job.rounds(100, [0, 0, 1, 1], 32)
    assert standing_of(job.push(0, 32)).delay == pytest.approx(0.5, abs=0.05)


def steps_of(standings: Sequence[Standing | None]) -> list[float]:
    """Return by how much the delay changes, in units of what the ramp allows, at each update."""
    delays = [0.0 if each is None else each.delay for each in standings]
    return [abs(after - before) for before, after in pairwise(delays)]


def test_the_delay_moves_smoothly_when_the_model_changes() -> None:
    job = Job("bsp", workers=4)
    assert set(job.rounds(3, range(4), 32)) == {None}
    change = Change(number=1, members=(0, 1, 2, 3), sync="asp")
    for worker in range(4):
        job.push(worker, 32, change=change)
    standings = job.rounds(40, range(4), 32)
    assert job.applied[3].standing is None, "the last mean belongs to BSP"
    assert max(steps_of(standings)) <= 0.75 * 0.25 / RAMP
    assert standings[-1] is not None
    assert standings[-1].delay == pytest.approx(0.75, abs=0.02)
    reached = next(i for i, each in enumerate(standings) if each is not None and each.delay > 0.5)
    assert reached * 0.25 < WINDOW / 4
    job.require_replayable()


def test_share_and_delay_move_smoothly_when_workers_come_and_go() -> None:
    job = Job("asp", workers=4)
    standings = job.rounds(10, range(4), 32)
    job.leave(3)
    standings += job.rounds(20, range(3), 32)
    job.join(4, count=0, pulls=True)
    job.handle(PullRequested(now_ticks=0, worker=4, iteration=-1))
    standings += job.rounds(20, [0, 1, 2, 4], 32)
    shares = [each.share for each in standings if each is not None]
    assert shares[39] == 0.25
    assert 0.25 < shares[45] < 1 / 3
    assert shares[99] == pytest.approx(1 / 3)
    assert shares[-1] == 0.25
    assert max(after - before for before, after in pairwise(shares)) < 0.02
    assert max(steps_of(standings)) < 0.05
    job.require_replayable()


def test_the_last_pushes_of_a_run_do_not_suddenly_take_whole_steps() -> None:
    job = Job("asp", workers=4)
    job.rounds(10, range(4), 32)
    shares = []
    for worker in range(4):
        shares.append(standing_of(job.push(worker, 32)).share)
        job.leave(worker)
    assert max(shares) < 0.4


def test_a_held_push_of_a_lost_worker_counts() -> None:
    job = Job("drop-stragglers:quorum=3", workers=4)
    job.push(0, 32)
    job.push(1, 32)
    job.handle(WorkerLost(now_ticks=0, worker=1, kept=0))
    for worker in (2, 3):
        job.push(worker, 32)
    (update,) = job.applied
    assert len(update.pushes) == 4
    assert update.standing is None
    job.require_replayable()


def test_pushes_that_remain_when_everybody_has_left_are_applied() -> None:
    job = Job("rennala:batch=3", workers=2)
    job.push(0, 32)
    job.leave(0)
    job.push(1, 32)
    (update,) = job.leave(1)
    assert len(update.pushes) == 2
    assert update.standing is None
    job.require_replayable()


def test_edits_and_empty_pushes_are_no_updates() -> None:
    job = Job("asp", workers=2)
    job.push(0, 32)
    job.push(0, empty=True)
    job.push(1, edit=Edit(number=0, sole=True))
    assert len(job.applied) == 1
    assert standing_of(job.push(1, 32)).share == 0.5, "there is nothing to make up for"
    assert job.shard.standing is not None
    assert job.shard.standing.joint_steps == 1.0
    job.require_replayable()


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_a_trace_of_an_earlier_version_in_which_the_guard_reduces_the_rate_is_replayed(sync: str) -> None:
    job = Job(sync, workers=2)
    job.shard.handle(RateTempered(now_ticks=0, factor=0.5))
    job.push(0, 32)
    job.push(1, 32)
    assert standing_of(job.applied[-1:]).temper == 0.5
    job.require_replayable()


def test_a_replay_notices_another_standing() -> None:
    job = Job("asp", workers=2)
    job.rounds(3, [0, 1], 32)
    entry = job.memory.trace.entries[-2]
    (standing,) = entry.standings
    assert standing is not None
    other = msgspec.structs.replace(standing, delay=standing.delay * (1 + 2**-52))
    job.memory.trace.entries[-2] = msgspec.structs.replace(entry, standings=[other])
    assert len(replay(job.memory.trace)) == 1


def test_a_mean_that_is_clipped_later_keeps_its_standing() -> None:
    job = Job("rennala:batch=2", workers=4)
    clip = Clip(max_norm=1.0, factor=0.5)
    job.push(0, 32, clip=clip)
    job.push(1, 32, clip=clip)
    assert job.applied == []
    (update,) = job.handle(MeanClipped(now_ticks=0, pushes=((0, 0), (1, 0)), factor=0.5))
    assert update.scales == (0.25, 0.25)
    assert update.standing == Standing(0.5)
    job.require_replayable()


def test_a_schedule_translates_the_models_that_do_not_scale_pushes() -> None:
    job = Job("asp:push_scale=1/n", workers=2)
    assert set(job.rounds(20, [0, 1], 32)) == {None}
    change = Change(number=1, members=(0, 1), sync="asp")
    for worker in (0, 1):
        job.push(worker, 32, change=change)
    first = standing_of(job.push(0, 32))
    assert first.share == 0.5
    assert first.delay == pytest.approx(0.5, abs=0.02), "raw updates are steps all the same"
    job.require_replayable()


def test_a_raw_trace_contains_nothing_of_translation(tmp_path: Path) -> None:
    job = Job("asp", workers=2, translated=False)
    job.rounds(3, [0, 1], 32)
    recorder = Recorder.to_path(tmp_path / "trace.jsonl", job.memory.trace.header)
    for entry in job.memory.trace.entries:
        recorder.record(entry)
    recorder.close()
    text = (tmp_path / "trace.jsonl").read_text()
    assert "standing" not in text
    assert "hyperparameters" not in text


def test_a_translated_trace_can_be_written_and_replayed(tmp_path: Path) -> None:
    job = Job("drop-stragglers:quorum=2", workers=3)
    job.rounds(3, [0, 1, 2], 32)
    recorder = Recorder.to_path(tmp_path / "trace.jsonl", job.memory.trace.header)
    for entry in job.memory.trace.entries:
        recorder.record(entry)
    recorder.close()
    trace = read(tmp_path / "trace.jsonl")
    assert trace.header.translated
    assert [each for entry in trace.entries for each in entry.standings] == [
        update.standing for update in job.applied if update.standing is not None
    ]
    assert replay(trace) == []


def test_a_join_that_is_tried_again_leaves_no_trace() -> None:
    job = Job("asp", workers=2)
    job.rounds(5, [0, 1], 32)
    for _ in range(3):
        job.join(2, count=5, pulls=True)
        job.handle(WorkerLost(now_ticks=0, worker=2))
    assert standing_of(job.push(0, 32)).share == 0.5


def test_a_refused_event_changes_no_standing() -> None:
    job = Job("asp", workers=2)
    job.push(0, 32)
    with pytest.raises(InvalidEventError):
        job.handle(PushReceived(now_ticks=0, worker=1, iteration=5, samples=1000))
    assert standing_of(job.push(1, 32)).share == 0.5
    job.require_replayable()


def test_the_next_update_makes_up_for_dropped_pushes() -> None:
    job = Job("ringmaster:threshold=2", 4)
    shares = []
    for worker in (0, 1, 0, 1, 3, 0, 1):
        # Worker 3 is four updates late when it pushes, so its push is dropped.
        shares += [update.standing.share for update in job.push(worker) if update.standing is not None]
    assert shares == [0.25, 0.25, 0.25, 0.25, 0.5, 0.25]
