"""How far a job has come, how fast it goes on, and for whom it waits: computed from a real coordinator."""

from __future__ import annotations

import math

import msgspec
import pytest

from paceline.core.coordinator import Coordinator
from paceline.core.data_feed import DataFeed
from paceline.core.data_ledger import LoopPositions
from paceline.core.job_cut import LoopCut
from paceline.core.lease import DataOrder, Lease
from paceline.core.messages import (
    DataGranted,
    EntryRequested,
    EpochReached,
    LoopEntered,
    LoopLimits,
    LoopPosition,
    ShardWaits,
    Status,
    Waits,
    WorkerFinished,
)
from paceline.core.requests import server_peer, worker_peer
from paceline.core.status import (
    Awaited,
    JobProgress,
    Observed,
    ProgressMeter,
    WaitSamples,
    job_status,
    still_waiting,
)
from paceline.sync import ASP
from paceline.sync.schedule import Schedule, ScheduleStep
from paceline.sync.ticks import TICKS_PER_S

WORKERS = 4


@pytest.fixture
def core() -> Coordinator:
    return Coordinator(Schedule((ScheduleStep((ASP(),)),)), workers=WORKERS, servers=1, shards=1)


def begin(core: Coordinator, limits: LoopLimits, loop: int = 0, second: float = 0.0) -> None:
    core.handle(worker_peer(0), EntryRequested(loop, limits), round(second * TICKS_PER_S))


def report(core: Coordinator, *statuses: Status) -> None:
    for worker, status in enumerate(statuses):
        core.handle(worker_peer(worker), status, 0)


def at(epoch: int | None, part: float | None = None, **others: object) -> Status:
    return msgspec.structs.replace(Status(0, None, "computing", epoch=epoch, part=part), **others)


def read(core: Coordinator, second: float = 0.0, meter: ProgressMeter | None = None) -> JobProgress:
    return (meter or ProgressMeter()).read(core, round(second * TICKS_PER_S))


# -- the progress ---------------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_report(core: Coordinator) -> None:
    assert read(core) == JobProgress()


def test_a_loop_of_unknown_length_shows_how_far_its_epoch_has_come(core: Coordinator) -> None:
    report(core, at(2, 0.75), at(2, 0.85))
    found = read(core)
    assert (found.progress, found.epoch, found.epochs) == (None, 3, None)
    assert found.epoch_progress == pytest.approx(0.8)


def test_the_progress_of_a_number_of_epochs_is_the_mean_over_the_workers(core: Coordinator) -> None:
    begin(core, LoopLimits(epochs=10))
    report(core, at(3, 0.5), at(4, 0.1))
    found = read(core)
    assert (found.epoch, found.epochs) == (4, 10)
    assert found.progress == pytest.approx(0.38)
    assert found.epoch_progress == pytest.approx(0.8)


def test_a_worker_that_has_finished_has_done_every_epoch_and_a_lost_one_does_not_count(
    core: Coordinator,
) -> None:
    begin(core, LoopLimits(epochs=10))
    report(core, at(8, 0.0), at(9, 0.9), at(1, 0.0))
    core.handle(worker_peer(1), WorkerFinished(), 0)
    core.disconnected(worker_peer(2), 0)
    assert read(core).progress == pytest.approx(0.9)


def test_the_progress_does_not_go_back_when_a_worker_joins_or_gets_earlier_data(core: Coordinator) -> None:
    meter = ProgressMeter()
    begin(core, LoopLimits(epochs=4))
    for second, newcomer in enumerate([None, at(0), at(1), at(1, 0.1), at(1, 0.5)]):
        report(core, at(1, 0.25), *([] if newcomer is None else [newcomer]))
        meter.note(core, second * TICKS_PER_S)
        found = read(core, second, meter)
        assert found.progress == pytest.approx(
            0.3125 if newcomer is None or newcomer.part != 0.5 else 0.34375
        )
        assert found.epoch == 2


def test_what_an_earlier_run_has_done_of_an_epoch_does_not_count_for_the_time_left(core: Coordinator) -> None:
    core.loops = LoopPositions(LoopCut(begun=0, elapsed_s=50.0, limits=LoopLimits(epochs=2)))
    meter = ProgressMeter()
    for second in range(13):  # the first batch is known after 3 s, and every second makes 1 % of the loop
        report(core, at(0) if second < 3 else at(0, 0.5 + 0.02 * (second - 3)))
        meter.note(core, second * TICKS_PER_S)
    found = read(core, 12.0, meter)
    assert found.progress == pytest.approx(0.34)
    assert found.left_s == pytest.approx(66.0)


def test_without_a_loader_only_whole_epochs_count(core: Coordinator) -> None:
    begin(core, LoopLimits(epochs=4))
    report(core, at(1), at(1))
    found = read(core)
    assert (found.progress, found.epoch, found.epoch_progress) == (0.25, 2, None)


def test_the_limit_that_is_nearest_to_its_end_counts(core: Coordinator) -> None:
    core.handle(
        worker_peer(0),
        EpochReached(LoopPosition(1, 0, 100, 1000), limits=LoopLimits(10, 60.0, 400, 10_000)),
        0,
    )
    report(core, at(1, updates=200, samples=9000))
    assert read(core, 6.0).progress == pytest.approx(0.8)  # of the samples
    report(core, at(1, updates=480, samples=9000))
    assert read(core, 6.0).progress == pytest.approx(0.95)  # of the updates
    assert read(core, 59.4).progress == pytest.approx(0.99)  # of the time


def test_a_loop_over_a_time_ends_at_this_time(core: Coordinator) -> None:
    begin(core, LoopLimits(time_s=60.0), second=5.0)
    found = read(core, 20.0)
    assert (found.progress, found.left_s) == (0.25, 45.0)


def test_the_time_left_follows_from_the_second_half_of_the_loop(core: Coordinator) -> None:
    meter = ProgressMeter()
    begin(core, LoopLimits(epochs=100))
    for tenth in range(1000):  # first 2 seconds per epoch, and from 50 seconds on 1 second
        second = tenth / 10
        report(core, at(*_epoch_at(second)))
        meter.note(core, tenth * TICKS_PER_S // 10)
    report(core, at(*_epoch_at(100.0)))
    found = read(core, 100.0, meter)
    assert found.progress == pytest.approx(0.75)
    assert found.left_s == pytest.approx(25.0, rel=0.05)


def _epoch_at(second: float) -> tuple[int, float]:
    done = second / 2 if second < 50 else 25 + (second - 50)
    return int(done), done % 1


def test_the_time_left_is_unknown_in_the_first_second_and_in_a_loop_that_stands_still(
    core: Coordinator,
) -> None:
    meter = ProgressMeter()
    begin(core, LoopLimits(epochs=10))
    report(core, at(0, 0.5))
    for tenth in range(20):
        meter.note(core, tenth * TICKS_PER_S // 10)
    assert read(core, 0.5, meter).left_s is None
    assert read(core, 2.0, meter).left_s is None


def test_each_loop_begins_with_no_progress(core: Coordinator) -> None:
    begin(core, LoopLimits(epochs=1))
    report(core, at(1, 0.0))
    assert read(core).progress == 1.0
    assert read(core).left_s == 0.0
    begin(core, LoopLimits(epochs=2), loop=1, second=9.0)
    report(core, at(0, 0.5))
    assert (read(core, 9.0).progress, read(core, 9.0).epochs) == (0.25, 2)


def test_other_limits_of_a_resumed_script_replace_the_earlier_ones_and_let_a_stopped_loop_go_on() -> None:
    earlier, later = LoopLimits(updates=3), LoopLimits(updates=5)
    loops = LoopPositions(LoopCut(begun=0, limits=earlier, stopped=(0,)))
    loops.begun(0, 0, earlier)
    assert loops.stopped == {0}
    loops.begun(0, 0, later)
    assert (loops.limits, loops.stopped) == (later, set())


def test_the_speed_of_the_job_is_that_of_the_last_seconds(core: Coordinator) -> None:
    meter = ProgressMeter()
    for tenth in range(300):
        second = tenth / 10
        samples = round(10 * second if second < 15 else 150 + 1000 * (second - 15))
        report(core, at(None, samples=samples + 1), at(None, samples=max(samples - 50, 0)))
        meter.note(core, tenth * TICKS_PER_S // 10)
    assert read(core, 29.9, meter).samples_per_s == pytest.approx(1000.0, rel=0.05)


def test_the_speed_is_unknown_if_no_push_says_how_many_samples_it_has(core: Coordinator) -> None:
    meter = ProgressMeter()
    report(core, at(0, updates=5))
    for second in range(5):
        meter.note(core, second * TICKS_PER_S)
    assert read(core, 5.0, meter).samples_per_s is None


def test_the_loss_is_a_moving_mean_over_all_live_workers(core: Coordinator) -> None:
    meter = ProgressMeter()
    report(core, at(0, loss=1.0), at(0, loss=3.0), at(0), at(0, loss=100.0))
    core.disconnected(worker_peer(3), 0)
    meter.note(core, 0)
    assert read(core, 0.0, meter).loss == 2.0
    report(core, at(0, loss=0.0), at(0, loss=0.0))
    meter.note(core, TICKS_PER_S)
    loss = read(core, 1.0, meter).loss
    assert loss is not None
    assert 0.5 < loss < 1.9
    report(core, at(0, loss=math.nan), at(0, loss=1.0))
    meter.note(core, 2 * TICKS_PER_S)
    assert math.isnan(read(core, 2.0, meter).loss or 0.0)
    report(core, at(0, loss=1.0), at(0, loss=1.0))
    meter.note(core, 3 * TICKS_PER_S)
    assert read(core, 3.0, meter).loss == 1.0


@pytest.mark.parametrize("loss", [math.inf, -math.inf, 1e308])
def test_no_loss_stops_the_coordinator(core: Coordinator, loss: float) -> None:
    meter = ProgressMeter()
    report(core, at(0, loss=loss), at(0, loss=loss), at(0, loss=-loss))
    for second in range(3):
        meter.note(core, second * TICKS_PER_S)
    assert read(core, 3.0, meter).loss is not None


# -- what a worker reports ------------------------------------------------------------------------------------


def place(feed: DataFeed) -> tuple[int | None, float | None]:
    return feed.place


def test_a_worker_knows_its_epoch_and_the_part_that_it_has_drawn() -> None:
    feed = DataFeed()
    assert place(feed) == (None, None)
    for loader, size in ((0, 8), (1, 4)):
        feed.begin(loader, str(loader), 0, DataOrder(size, 2, False, "dynamic", ""))
        feed.handle(DataGranted(loader, 0, (Lease(0, 0, 2, 2, 2),), False))
    feed.draw(0, 2, 2, part=0.25)
    assert place(feed) == (None, None)  # it may be a loader to evaluate the model
    feed.push()
    assert place(feed) == (0, 0.25)
    feed.draw(1, 2, 2, part=0.5)  # without a push
    assert place(feed) == (0, 0.25)
    feed.draw(0, 2, 2, part=0.75)
    feed.draw(0, 2, 2, part=0.5)  # a batch that another worker has returned
    feed.push()
    assert place(feed) == (0, 0.75)
    feed.begin(0, "0", 1, DataOrder(8, 2, False, "dynamic", ""))
    assert place(feed) == (1, 0.0)


def test_in_a_loop_over_epochs_its_number_counts_instead_of_that_of_the_pass() -> None:
    feed = DataFeed()
    feed.enter(0, LoopLimits(epochs=5))
    assert place(feed) == (0, None)
    feed.handle(LoopEntered(LoopPosition(0, 3)))
    feed.begin(0, "0", 7, DataOrder(8, 2, False, "dynamic", ""))
    feed.draw(0, 2, 2, part=0.25)
    feed.push()
    assert place(feed) == (3, 0.25)
    feed.reach(LoopPosition(0, 4), over=False, tracks=False)
    assert place(feed) == (4, 0.0)


def test_an_order_of_unknown_size_has_no_parts() -> None:
    feed = DataFeed()
    feed.begin(0, "0", 0, DataOrder(None, 2, False, "dynamic", ""))
    feed.draw(0, 2, 2)
    feed.push()
    assert place(feed) == (0, None)


# -- who is awaited -------------------------------------------------------------------------------------------


def waits(core: Coordinator, iteration: int, *workers: int) -> None:
    """Let the server answer that these workers wait after an iteration; all compute as far as they have said."""
    pulls = tuple((worker, iteration) for worker in workers)
    answer = Waits((ShardWaits(0, "bsp", pulls, ("the round",) * len(pulls)),), timers=False)
    core.handle(server_peer(0), answer, 0)


@pytest.fixture
def training(core: Coordinator) -> Coordinator:
    report(core, *(Status(7, None, "computing") for _ in range(WORKERS)))
    return core


def look(core: Coordinator, *waiting: tuple[int, ...]) -> Awaited:
    looks = WaitSamples(TICKS_PER_S)
    for second, workers in enumerate(waiting):
        waits(core, 7, *workers)
        looks.look(core, second * TICKS_PER_S)
    return looks.awaited(core, len(waiting) * TICKS_PER_S)


def test_a_worker_is_awaited_if_others_have_waited_for_it_in_many_looks(training: Coordinator) -> None:
    assert look(training, (0, 1, 2), (), (0, 1, 2), (0, 2, 3)) == Awaited((3,), 0.5)


def test_nobody_is_awaited_for_long_if_all_workers_are_equally_fast(training: Coordinator) -> None:
    others = [tuple(other for other in range(WORKERS) if other != worker) for worker in range(WORKERS)]
    assert look(training, *others, (), ()) == Awaited()


def test_the_first_worker_at_the_end_of_a_round_does_not_make_the_others_slow(training: Coordinator) -> None:
    assert look(training, (0,), (1,), (2,)) == Awaited()
    assert look(training, (0, 1), (0, 1)) == Awaited((2, 3), 1.0)


def test_a_single_look_says_nothing_and_old_ones_are_forgotten(training: Coordinator) -> None:
    assert look(training, (0, 1, 2)) == Awaited()
    looks = WaitSamples(TICKS_PER_S)
    waits(training, 7, 0, 1, 2)
    for second in range(3):
        looks.look(training, second * TICKS_PER_S)
    assert looks.awaited(training, 3 * TICKS_PER_S) == Awaited((3,), 1.0)
    assert looks.awaited(training, 60 * TICKS_PER_S) == Awaited()


@pytest.mark.parametrize("finishes", [True, False])
def test_nobody_waits_for_a_worker_that_has_left(finishes: bool, training: Coordinator) -> None:
    looks = WaitSamples(TICKS_PER_S)
    waits(training, 7, 0, 1, 2)
    for second in range(3):
        looks.look(training, second * TICKS_PER_S)
    if finishes:
        training.handle(worker_peer(3), WorkerFinished(), 0)
    else:
        training.disconnected(worker_peer(3), 0)
    assert looks.awaited(training, 3 * TICKS_PER_S) == Awaited()


def test_looks_before_training_begins_do_not_count(core: Coordinator) -> None:
    looks = WaitSamples(TICKS_PER_S)
    waits(core, 0, 0, 1, 2)
    for _ in range(3):
        looks.look(core, 0)
    assert looks.awaited(core, 0) == Awaited()


def test_a_worker_that_computes_again_waits_no_longer(training: Coordinator) -> None:
    waits(training, 7, 0, 1)
    assert still_waiting(training) == {0, 1}
    report(training, Status(8, None, "computing"))
    assert still_waiting(training) == {1}
    assert [row.waits_for for row in job_status(training, Observed(1, 1.0, ())).workers][:2] == [
        "",
        "the round",
    ]


def test_a_long_wait_is_stated_by_its_length_and_short_ones_by_how_often_they_occur(
    training: Coordinator,
) -> None:
    waits(training, 7, 0, 1, 2)
    lately = Awaited((2,), 0.4)
    long = job_status(training, Observed(1, 1.0, (), state_s={0: 5.0, 1: 12.0, 2: 0.1}, awaited=lately))
    assert (long.awaited, long.awaited_s, long.awaited_share) == ((3,), 12.0, None)
    short = job_status(training, Observed(1, 1.0, (), state_s={0: 0.1}, awaited=lately))
    assert (short.awaited, short.awaited_s, short.awaited_share) == ((2,), None, 0.4)
