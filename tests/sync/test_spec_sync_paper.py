"""SpecSync and naive waiting by the paper: Zhang, Tian, Wang and Yan, "Stay fresh: speculative synchronization for
fast distributed machine learning", ICDCS 2018. Each test names the sentence, equation, algorithm line or figure that
it holds the code to.

Figs. 2, 4 and 6 have no numbers; the times here keep to what the text says of them. Workers 1 to 4 of the paper are
numbered so here.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from paceline.core.shard import ShardSync
from paceline.sync import ASP, SSP, NaiveWaiting, SpecSync, SyncModel
from paceline.sync.actions import AnswerPull, AnyAction, ApplyPush, RestartWorker, SetTimer
from paceline.sync.events import (
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.spec_sync import Span, Speculation, Speculator, tune
from paceline.sync.ticks import in_ticks

# Fig. 2: when each worker ends its first iteration. Worker 1 pulls at t_1 = 1.0, and by t_2 = 1.6 workers 3 and 4
# have pushed; worker 2 is the last.
FIRST_PUSH_S = {1: 1.0, 3: 1.2, 4: 1.5, 2: 2.0}


def span(start_s: float, end_s: float) -> Span:
    return Span(in_ticks(start_s), in_ticks(end_s))


def tuned_by(spans: dict[int, Span], pushes: Sequence[tuple[float, int]]) -> Speculation | None:
    """What Algorithm 1 makes of pushes (seconds, worker)."""
    return tune(spans, [(in_ticks(at_s), worker) for at_s, worker in pushes])


def parameters_seen(sync: SyncModel, delay_s: float = 0.0) -> dict[int, int]:
    """How many updates the parameters hold that each worker starts its second iteration with."""
    shard = sync.at_shard()
    for worker in (1, 2, 3, 4):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    happenings: list[tuple[int, bool, int]] = [(in_ticks(at_s), False, w) for w, at_s in FIRST_PUSH_S.items()]
    updates = 0
    seen = {}
    while happenings:
        happenings.sort()
        now_ticks, fires, worker = happenings.pop(0)
        actions: list[AnyAction] = []
        if fires:
            actions += shard.handle(TimerFired(now_ticks=now_ticks, worker=worker, iteration=0))
        else:
            actions += shard.handle(PushReceived(now_ticks=now_ticks, worker=worker, iteration=0))
            actions += shard.handle(PullRequested(now_ticks=now_ticks, worker=worker, iteration=0))
        for action in actions:
            match action:
                case ApplyPush():
                    updates += 1
                case AnswerPull():
                    seen[action.worker] = updates
                case SetTimer():
                    assert action.due_ticks == now_ticks + in_ticks(delay_s)
                    happenings.append((action.due_ticks, True, action.worker))
                case _:
                    raise AssertionError(action)
    return seen


# -- section III: staying fresh through naive waiting -------------------------------------------------------------


def test_fig_2_asynchrony_hides_pushes_after_a_pull() -> None:
    """ "The parameters worker-1 pulls at time t_1 have received only one update from itself, while the ones worker-2
    pulls include four updates from all workers"; "worker-1 has the most outdated parameters"."""
    assert parameters_seen(ASP()) == {1: 1, 3: 2, 4: 3, 2: 4}


def test_section_iii_a_delaying_the_pull_exposes_the_two_pushes_of_workers_3_and_4() -> None:
    """ "Delaying the pull request of worker-1 to t_2 exposes the two pushes from worker-3 and worker-4"."""
    assert parameters_seen(NaiveWaiting(delay_s=0.6), 0.6)[1] == 3


def test_fig_4_naive_waiting_lets_worker_1_uncover_three_updates_and_the_others_all_four() -> None:
    """ "Worker-1 now uncovers three updates (highlighted in Fig. 4), while the other three workers get all four"."""
    seen = parameters_seen(NaiveWaiting(delay_s=0.9), 0.9)
    assert seen == {1: 3, 3: 4, 4: 4, 2: 4}


def test_section_iii_b_each_worker_simply_delays_its_pull_requests() -> None:
    """ "Each worker simply delays its pull requests by a short period of time": pushes are not delayed, nobody waits
    for anybody, and a pull is answered by its own timer alone."""
    shard = NaiveWaiting(delay_s=2.0).at_shard()
    for worker in (1, 2):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    assert shard.handle(PushReceived(now_ticks=in_ticks(1.0), worker=1, iteration=0)) == [ApplyPush(1, 0)]
    assert shard.handle(PullRequested(now_ticks=in_ticks(1.5), worker=1, iteration=0)) == [
        SetTimer(1, 0, in_ticks(3.5))
    ]
    assert shard.handle(PushReceived(now_ticks=in_ticks(2.0), worker=2, iteration=0)) == [ApplyPush(2, 0)]
    assert shard.handle(PullRequested(now_ticks=in_ticks(2.0), worker=2, iteration=0)) == [
        SetTimer(2, 0, in_ticks(4.0))
    ]
    assert shard.handle(TimerFired(now_ticks=in_ticks(3.5), worker=1, iteration=0)) == [AnswerPull(1, 0)]
    assert shard.handle(TimerFired(now_ticks=in_ticks(4.0), worker=2, iteration=0)) == [AnswerPull(2, 0)]


def test_fig_5_curves_with_zero_delay_correspond_to_the_stock_implementation() -> None:
    """Stock MXNet is ASP."""
    assert parameters_seen(NaiveWaiting(delay_s=0.0)) == parameters_seen(ASP())


# -- section IV: speculative synchronization ----------------------------------------------------------------------


class Scheduler:
    """The coordinator's machine, and short words for the messages of section V."""

    def __init__(self, sync: SpecSync, *workers: int) -> None:
        self.machine: Speculator = sync.at_coordinator()
        for worker in workers:
            self.machine.handle(WorkerJoined(now_ticks=0, worker=worker))

    def notify(self, now_s: float, worker: int, iteration: int, *, starts: bool = True) -> list[AnyAction]:
        """A worker has pushed, and, if it need not wait, begins its next iteration at once."""
        event = IterationFinished(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration)
        assert self.machine.handle(event) == []
        return self.begin(now_s, worker, iteration + 1) if starts else []

    def begin(self, now_s: float, worker: int, iteration: int) -> list[AnyAction]:
        return self.machine.handle(
            IterationStarted(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration)
        )

    def expire(self, now_s: float, worker: int, iteration: int) -> list[AnyAction]:
        return self.machine.handle(TimerFired(now_ticks=in_ticks(now_s), worker=worker, iteration=iteration))


def test_fig_6_worker_1_aborts_after_two_pushes_of_its_peers_and_so_does_worker_4() -> None:
    """ "Shortly after it starts, it learns that two other peers have pushed updates to servers"; "the
    abort-and-restart decision is also made by worker-4"; "in contrast, workers 2 and 3 choose not to restart as
    they do not see enough updates (two in this example)"."""
    # Two pushes are enough and one is not: "more than m * ABORT_RATE" with m = 4 and a rate of 0.375 is more than
    # 1.5.
    scheduler = Scheduler(SpecSync(abort_time_s=0.6, abort_rate=0.375), 1, 2, 3, 4)
    assert scheduler.notify(1.0, 1, 0) == [SetTimer(1, 1, in_ticks(1.6))]
    assert scheduler.notify(1.2, 3, 0) == [SetTimer(3, 1, in_ticks(1.2 + 0.6))]
    assert scheduler.notify(1.5, 4, 0) == [SetTimer(4, 1, in_ticks(1.5 + 0.6))]
    assert scheduler.expire(1.6, 1, 1) == [RestartWorker(1, 1)]  # workers 3 and 4
    assert scheduler.expire(1.8, 3, 1) == []  # worker 4 alone
    assert scheduler.notify(1.9, 2, 0) == [SetTimer(2, 1, in_ticks(2.5))]
    assert scheduler.notify(2.0, 3, 1) == [SetTimer(3, 2, in_ticks(2.6))]
    assert scheduler.expire(2.1, 4, 1) == [RestartWorker(4, 1)]  # workers 2 and 3
    assert scheduler.expire(2.5, 2, 1) == []  # worker 3 alone


def test_section_iv_a_the_worker_pulls_again_and_starts_over_with_fresher_parameters() -> None:
    """ "Worker-1 hence aborts the ongoing iteration, re-synchronizes with servers to include those two recent
    updates, and starts over": the pull that it repeats is answered at once, and its push comes later under the same
    number."""
    shard = ShardSync(SpecSync())
    for worker in (1, 3, 4):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    shard.handle(PushReceived(now_ticks=in_ticks(1.0), worker=1, iteration=0))
    assert shard.handle(PullRequested(now_ticks=in_ticks(1.0), worker=1, iteration=0)) == [AnswerPull(1, 0)]
    for now_s, worker in [(1.2, 3), (1.5, 4)]:
        assert shard.handle(PushReceived(now_ticks=in_ticks(now_s), worker=worker, iteration=0)) == [
            ApplyPush(worker, 0)
        ]
    assert shard.handle(PullRepeated(now_ticks=in_ticks(1.6), worker=1, iteration=1)) == [AnswerPull(1, 0)]
    assert shard.handle(PushReceived(now_ticks=in_ticks(3.0), worker=1, iteration=1)) == [ApplyPush(1, 1)]


def test_section_iv_a_specsync_can_be_implemented_in_both_asp_and_ssp() -> None:
    """ "The only difference between ASP and SSP is that the latter enforces bounded staleness"."""
    for base in (ASP(), SSP(staleness=0)):
        shard = SpecSync(base=base).at_shard()
        for worker in (0, 1):
            shard.handle(WorkerJoined(now_ticks=0, worker=worker))
        shard.handle(PushReceived(now_ticks=in_ticks(1.0), worker=0, iteration=0))
        waits = not shard.handle(PullRequested(now_ticks=in_ticks(1.0), worker=0, iteration=0))
        assert waits == isinstance(base, SSP)


def test_section_iv_a_over_ssp_the_speculation_begins_when_the_iteration_does() -> None:
    """ "After starting an iteration, a worker speculates about the parameter updates made in a time period of length
    ABORT_TIME": pushes before the start are in the parameters that it pulled, though its own notify came before."""
    scheduler = Scheduler(SpecSync(base=SSP(staleness=0), abort_time_s=1.0, abort_rate=0.0), 0, 1, 2)
    assert scheduler.notify(1.0, 0, 0, starts=False) == []
    scheduler.notify(1.5, 1, 0, starts=False)
    scheduler.notify(2.0, 2, 0, starts=False)
    for worker in (0, 1, 2):  # the slowest has released them all
        assert scheduler.begin(2.0, worker, 1) == [SetTimer(worker, 1, in_ticks(3.0))]
    assert scheduler.expire(3.0, 0, 1) == []
    scheduler.notify(3.0, 2, 1, starts=False)
    assert scheduler.expire(3.0, 1, 1) == [RestartWorker(1, 1)]


def test_section_iv_a_it_counts_the_number_of_pushes_made_by_others() -> None:
    """Its own push is what began the iteration."""
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.0), 0, 1)
    scheduler.notify(1.0, 0, 0)
    assert scheduler.expire(2.0, 0, 1) == []


@pytest.mark.parametrize("pushes", range(6))
def test_section_iv_a_the_count_is_normalized_by_the_number_of_workers(pushes: int) -> None:
    """ "The worker counts the number of pushes made by others in that speculation period, and normalizes the count
    by the total number of workers ... If the push rate exceeds ABORT_RATE": of 4 workers at a rate of 0.75, more
    than 3."""
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.75), 0, 1, 2, 3)
    scheduler.notify(1.0, 0, 0)
    for number in range(pushes):
        scheduler.notify(1.1 + number / 10, 1 + number % 3, number // 3)
    assert scheduler.expire(2.0, 0, 1) == ([RestartWorker(0, 1)] if pushes > 3 else [])


def test_section_v_b_m_is_the_number_of_workers_when_the_timer_expires() -> None:
    """ "Where m is the number of workers": those live; what the lost one had pushed counts."""
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.5), 0, 1)
    scheduler.notify(1.0, 0, 0)
    scheduler.notify(1.5, 1, 0)
    scheduler.machine.handle(WorkerLost(now_ticks=in_ticks(1.6), worker=1))
    assert scheduler.expire(2.0, 0, 1) == [RestartWorker(0, 1)]  # 1 > 1 * 0.5; of 2 workers it would not be


def test_section_iv_a_an_iteration_is_restarted_at_most_once() -> None:
    """Algorithm 2: only a notify starts a timer, and a worker that starts over has finished nothing."""
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.0), 0, 1)
    scheduler.notify(1.0, 0, 0)
    scheduler.notify(1.5, 1, 0)
    assert scheduler.expire(2.0, 0, 1) == [RestartWorker(0, 1)]
    scheduler.notify(2.5, 1, 1)
    assert scheduler.expire(3.0, 0, 1) == []


# -- section IV-B: adaptive hyperparameter tuning -----------------------------------------------------------------

# Three workers; each one's last iteration, and all pushes since the earliest of their starts.
SPANS = {0: span(0.0, 4.0), 1: span(0.5, 4.5), 2: span(1.0, 9.0)}
PUSHES = [(1.0, 2), (1.5, 1), (3.0, 2), (4.0, 0), (4.5, 1), (9.0, 2)]


def gain(worker: int, delay_s: float) -> int:
    """Eq. 5: the pushes of others that the worker would have uncovered, had it deferred its last iteration."""
    start = SPANS[worker].start_ticks
    end = start + in_ticks(delay_s)
    return sum(1 for now_s, who in PUSHES if who != worker and start < in_ticks(now_s) <= end)


def loss(worker: int, delay_s: float) -> float:
    """Eq. 6: D / T_i (m - 1)."""
    return in_ticks(delay_s) / SPANS[worker].ticks * (len(SPANS) - 1)


def improvement(delay_s: float) -> float:
    """Eqs. 3 and 7."""
    return sum(gain(worker, delay_s) - loss(worker, delay_s) for worker in SPANS)


MEAN_S = 16.0 / 3


def test_eqs_3_to_7_the_abort_time_maximizes_the_sum_of_gains_minus_losses() -> None:
    tuned = tuned_by(SPANS, PUSHES)
    assert tuned is not None
    # Within 3.5 s worker 0 would see others push at 1.0, 1.5 and 3.0, worker 1 at 1.0, 3.0 and 4.0, worker 2 at
    # 1.5, 4.0 and 4.5: 9 in all. F falls by 2 / 4 + 2 / 4 + 2 / 8 = 1.25 per second, so F(3.5) = 9 - 4.375.
    assert tuned.abort_time_ticks == in_ticks(3.5)
    assert improvement(3.5) == 4.625
    assert max(improvement(step / 100) for step in range(1, int(100 * MEAN_S))) == improvement(3.5)


def test_section_iv_b_the_contribution_is_maximal_only_where_the_interval_right_aligns_with_a_push() -> None:
    """ "It is sufficient to search a finite number of D"."""
    aligned = {in_ticks(now_s) - span.start_ticks for span in SPANS.values() for now_s, _ in PUSHES}
    tuned = tuned_by(SPANS, PUSHES)
    assert tuned is not None
    assert tuned.abort_time_ticks in aligned


def test_eq_5_the_gain_counts_the_push_at_the_end_of_the_delay_and_none_at_the_start() -> None:
    spans = {0: span(0.0, 8.0), 1: span(0.0, 8.0)}
    assert tuned_by(spans, [(0.0, 0), (0.0, 1)]) is None
    assert tuned_by(spans, [(0.0, 0), (0.0, 1), (2.0, 1)]) == Speculation(in_ticks(2.0), Fraction(2) / 16)


def test_eq_5_a_workers_own_pushes_are_no_gain() -> None:
    spans = {0: span(0.0, 8.0), 1: span(4.0, 12.0)}
    assert tuned_by(spans, [(1.0, 0), (5.0, 1)]) is None


def test_eq_6_the_loss_takes_each_workers_own_span() -> None:
    """F(2.0) = 2 - 2 (1 / 2 + 1 / 30) is above 0; with the mean span it would be 2 - 2 (2 / 16), and 3.0 better."""
    spans = {0: span(0.0, 2.0), 1: span(0.0, 30.0)}
    pushes = [(2.0, 0), (2.0, 1), (3.0, 0), (3.9, 0)]
    tuned = tuned_by(spans, pushes)
    assert tuned is not None
    f = {
        d: sum(1 for t, who in pushes for i in (0, 1) if who != i and t <= d) - d * (1 / 2 + 1 / 30)
        for d in (2, 3, 3.9)
    }
    assert tuned.abort_time_ticks == in_ticks(max(f, key=lambda d: f[d]))


def test_section_iv_b_gamma_is_the_loss_divided_by_m() -> None:
    """ "We therefore set Gamma = l_i(D*) / m", with the mean span (Algorithm 1, line 8: D (m - 1) / T m)."""
    tuned = tuned_by(SPANS, PUSHES)
    assert tuned is not None
    assert tuned.abort_rate == pytest.approx(3.5 * 2 / (MEAN_S * 3))


def test_section_iv_b_a_worker_aborts_only_when_the_gain_outweighs_the_loss() -> None:
    """Strictly more than m * Gamma = l(D*) pushes: with equal spans F(D*) > 0 means that they were more on
    average."""
    spans = {worker: span(0.0, 4.0) for worker in range(3)}
    tuned = tuned_by(spans, [(1.0, 0), (1.0, 1), (1.0, 2)])
    assert tuned is not None
    assert tuned.abort_time_ticks == in_ticks(1.0)
    assert 3 * tuned.abort_rate == pytest.approx(0.5)  # one push of another is enough


# -- Algorithm 1 --------------------------------------------------------------------------------------------------


def epoch_of_three(scheduler: Scheduler) -> None:
    """Three workers of equal speed, all in step but for a tenth: the pushes come shortly after one another."""
    for worker in (0, 1, 2):
        scheduler.notify(4.0 + worker / 4, worker, 0)


def test_section_iv_b_no_speculation_before_the_first_epoch_has_ended() -> None:
    """Eq. 5 refers "back to the previous epoch"; before the first one has ended there is none."""
    scheduler = Scheduler(SpecSync(), 0, 1, 2)
    assert scheduler.notify(4.0, 0, 0) == []
    assert scheduler.notify(4.25, 1, 0) == []
    assert scheduler.notify(4.5, 2, 0, starts=False) == []
    assert scheduler.machine.speculation is None  # every start was the same: nothing was pushed soon after it
    assert scheduler.begin(4.5, 2, 1) == []


def test_algorithm_1_line_2_an_epoch_ends_when_every_live_worker_has_pushed() -> None:
    """ "All pushes made in the last epoch"; and section V-B: the scheduler "computes the two hyperparameters at the
    beginning of each epoch"."""
    scheduler = Scheduler(SpecSync(), 0, 1, 2)
    epoch_of_three(scheduler)
    scheduler.notify(8.0, 0, 1)
    scheduler.notify(8.25, 1, 1)
    assert scheduler.machine.speculation is None
    scheduler.notify(8.5, 2, 1)
    # Starts at 4.0, 4.25 and 4.5, spans of 4: worker 0 would see the others after 0.25 and 0.5 s, worker 1 the
    # third after 0.25 s. F(0.25) = 2 - 0.25 * 2 * 3 / 4 = 1.625, F(0.5) = 3 - 0.75 = 2.25.
    tuned = scheduler.machine.speculation
    assert tuned is not None
    assert tuned.abort_time_ticks == in_ticks(0.5)
    assert tuned.abort_rate == pytest.approx(0.5 * 2 / (4.0 * 3))


def test_algorithm_1_line_2_whoever_leaves_is_not_waited_for() -> None:
    scheduler = Scheduler(SpecSync(), 0, 1, 2)
    epoch_of_three(scheduler)
    scheduler.notify(8.0, 0, 1)
    scheduler.notify(8.25, 1, 1)
    scheduler.machine.handle(WorkerLost(now_ticks=in_ticks(8.3), worker=2))
    # Worker 2's push counts, but not its gain: F(0.5) = 3 - 0.5 * (1 / 4 + 1 / 4) with m = 2.
    assert scheduler.machine.speculation == Speculation(in_ticks(0.5), Fraction(1, 2) / 8)


def test_algorithm_1_line_3_candidates_are_differences_of_pushes_and_starts_up_to_the_mean_span() -> None:
    """Under ASP a start is the worker's own push before, so these are differences of pushes."""
    spans = {0: span(0.0, 1.0), 1: span(0.0, 1.0)}
    assert tuned_by(spans, [(1.0, 0), (1.0, 1)]) is None  # F(1) = 2 - 2: not above 0
    assert (
        tuned_by(spans, [(0.5, 0), (1.5, 0), (1.5, 1), (1.5, 1), (1.5, 1)]) is None
    )  # F(0.5) = 0; 1.5 is too long


def test_algorithm_1_lines_5_to_7_the_best_is_taken_and_of_several_the_shortest() -> None:
    spans = {0: span(0.0, 4.0), 1: span(0.0, 4.0)}
    assert tuned_by(spans, [(1.0, 0), (3.0, 1)]) == Speculation(
        in_ticks(1.0), Fraction(1) / 8
    )  # F(1) = 0.5 and F(3) = 0.5
    assert tuned_by(spans, [(1.0, 0), (2.0, 1)]) == Speculation(
        in_ticks(2.0), Fraction(2) / 8
    )  # F(1) = 0.5 and F(2) = 1.0


def test_algorithm_1_line_8_the_abort_rate() -> None:
    """ABORT_RATE = D (m - 1) / (T m), where "T: averaged iteration span"."""
    spans = {0: span(0.0, 2.0), 1: span(0.0, 6.0), 2: span(0.0, 4.0)}
    tuned = tuned_by(spans, [(0.5, 0), (0.5, 1)])
    assert tuned is not None
    assert tuned.abort_time_ticks == in_ticks(0.5)
    assert tuned.abort_rate == pytest.approx(0.5 * (3 - 1) / (4.0 * 3))


def test_no_speculation_while_the_best_improvement_is_not_above_zero() -> None:
    """ "To make sure that re-execution always makes a positive contribution to the overall freshness improvement"."""
    scheduler = Scheduler(SpecSync(), 0, 1)
    for iteration, now_s in enumerate([4.0, 8.0]):
        scheduler.notify(now_s, 0, iteration)
        scheduler.notify(now_s + 0.25, 1, iteration)
    assert scheduler.machine.speculation is not None
    for iteration, now_s in enumerate([12.0, 16.0], start=2):
        scheduler.notify(now_s, 0, iteration, starts=False)
        scheduler.notify(now_s, 1, iteration, starts=False)
        for worker in (0, 1):
            actions = scheduler.begin(now_s, worker, iteration + 1)
    # Both have pushed at 12 and at 16: the only push of another is a whole span away, F(4) = 2 - 4 (1 / 4 + 1 / 4).
    assert scheduler.machine.speculation is None
    assert actions == []


def test_a_span_of_no_time_tunes_nothing() -> None:
    """T_i = 0 has no Eq. 6."""
    assert tuned_by({0: span(1.0, 1.0), 1: span(0.0, 1.0)}, [(0.5, 1), (1.0, 0)]) is None


# -- section V, Algorithm 2 ---------------------------------------------------------------------------------------


def test_algorithm_2_lines_4_to_6_a_notification_starts_the_speculation_for_its_sender() -> None:
    """HANDLENOTIFICATION: "Append current timestamp to l; call CHECKRESYNC(msg.sender) after ABORT_TIME"."""
    scheduler = Scheduler(SpecSync(abort_time_s=3.0, abort_rate=1.0), 0, 1)
    assert scheduler.notify(10.0, 1, 0) == [SetTimer(1, 1, in_ticks(13.0))]
    assert scheduler.notify(11.0, 0, 0) == [SetTimer(0, 1, in_ticks(14.0))]


def test_algorithm_2_lines_7_to_10_check_resync() -> None:
    """CHECKRESYNC: "cnt <- number of pushes received within ABORT_TIME; if cnt > m x ABORT_RATE then issue
    re-sync"."""
    for pushes, restarts in [(0, False), (1, False), (2, True), (3, True)]:
        scheduler = Scheduler(SpecSync(abort_time_s=3.0, abort_rate=0.5), 0, 1)
        scheduler.notify(10.0, 0, 0)
        for number in range(pushes):
            scheduler.notify(11.0 + number / 2, 1, number)
        assert scheduler.expire(13.0, 0, 1) == ([RestartWorker(0, 1)] if restarts else [])


def test_algorithm_2_line_9_exactly_m_times_abort_rate_is_not_enough() -> None:
    """Section V-B: "checks whether the counter is *more than* m x ABORT_RATE"."""
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.5), 0, 1)
    scheduler.notify(1.0, 0, 0)
    scheduler.notify(1.5, 1, 0)
    assert scheduler.expire(2.0, 0, 1) == []


def test_section_v_b_the_push_counter_is_reset_at_each_notification_of_the_sender() -> None:
    """ "It resets the push counter of the sender and starts the corresponding timer"."""
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.0), 0, 1)
    scheduler.notify(1.0, 0, 0)
    scheduler.notify(1.1, 1, 0)
    assert scheduler.notify(1.2, 0, 1) == [SetTimer(0, 2, in_ticks(2.2))]
    assert scheduler.expire(2.0, 0, 1) == []  # the timer of the iteration before
    assert scheduler.expire(2.2, 0, 2) == []


def test_section_v_b_once_the_iteration_completes_no_resync_comes_any_more() -> None:
    """ "Proceeds to the next iteration, during which the worker expects a re-sync message"."""
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.0), 0, 1)
    scheduler.notify(1.0, 0, 0)
    scheduler.notify(1.1, 1, 0)
    scheduler.notify(1.5, 0, 1, starts=False)  # over SSP it may have to wait here
    assert scheduler.expire(2.0, 0, 1) == []


def test_section_v_b_the_timer_of_a_worker_that_has_left_expires_in_vain() -> None:
    scheduler = Scheduler(SpecSync(abort_time_s=1.0, abort_rate=0.0), 0, 1)
    scheduler.notify(1.0, 0, 0)
    scheduler.notify(1.1, 1, 0)
    scheduler.machine.handle(WorkerLost(now_ticks=in_ticks(1.5), worker=0))
    assert scheduler.expire(2.0, 0, 1) == []


def test_section_v_b_new_hyperparameters_hold_for_the_iterations_that_start_after_them() -> None:
    """They are computed "at the beginning of each epoch"; a timer that runs keeps the rate that it was started
    with."""
    scheduler = Scheduler(SpecSync(), 0, 1, 2)
    epoch_of_three(scheduler)
    for worker in (0, 1):
        assert scheduler.notify(8.0 + worker / 4, worker, 1) == []
    assert scheduler.notify(8.5, 2, 1) == [SetTimer(2, 2, in_ticks(9.0))]
    assert scheduler.expire(8.5, 0, 2) == []  # nothing watches it


def test_section_v_b_servers_are_agnostic_to_speculative_synchronization() -> None:
    """ "Servers are agnostic to speculative synchronization performed by workers and the scheduler"."""
    for base in (ASP(), SSP(staleness=2)):
        machine, of_base = SpecSync(base=base).at_shard(), base.at_shard()
        assert type(machine) is type(of_base)
