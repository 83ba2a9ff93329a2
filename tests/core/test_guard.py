"""The guard of a run: what it notices, what it says, and what it does about it. Everything here is pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec
import pytest

from paceline.core.guard import (
    CONFIRMED,
    MOST_NAN,
    NAMED_NAN,
    GoodWeights,
    Guard,
    GuardMode,
    GuardVerdict,
    guard_mode,
)
from paceline.core.job_cut import GuardCut
from paceline.core.messages import Observation
from paceline.errors import ConfigurationError
from paceline.settings import SETTINGS

CALM = Observation(0, loss=1.0, gradient=1.0, weights=5.0)


class Run:
    """Feeds a guard with the pushes of a run under asp: one update after another, by one worker after another."""

    def __init__(
        self,
        mode: GuardMode = "tell",
        *,
        workers: int = 4,
        sync: str = "asp",
        skips_nan: bool = False,
    ) -> None:
        self.guard = Guard(mode, skips_nan=skips_nan)
        self.present = list(range(workers))
        self.verdicts: list[GuardVerdict] = []
        self.updates = 0
        self._sync = sync

    def follow(self, sync: str) -> None:
        self._sync = sync

    def push(self, worker: int, seen: Observation) -> list[GuardVerdict]:
        verdicts = self.guard.take(
            worker, seen, present=self.present, sync=self._sync, lockstep=self._sync == "bsp"
        )
        self.verdicts += verdicts
        return verdicts

    def train(self, losses: Iterable[float | None], **other: float) -> list[GuardVerdict]:
        """Push these losses, with noise of a few percent. Return what the guard has said meanwhile."""
        before = len(self.verdicts)
        for loss in losses:
            noisy = None if loss is None else loss * (1 + 0.03 * math.sin(7 * self.updates))
            gradient, weights = other.get("gradient", 1.0), other.get("weights", 5.0)
            worker = self.present[self.updates % len(self.present)]
            self.push(
                worker, Observation(self.updates, noisy, gradient, weights, "", int(other.get("set", 0)))
            )
            self.updates += 1
        return self.verdicts[before:]


def falling(begin: float = 2.3, end: float = 0.1, count: int = 100) -> list[float]:
    return [begin * (end / begin) ** (number / count) for number in range(count)]


# -- what it notices -------------------------------------------------------------------------------------------


def test_a_loss_that_grows_is_said_once_with_its_figures_the_model_the_staleness_and_what_to_do() -> None:
    run = Run()
    assert not run.train(falling())
    [verdict] = run.train([0.1 * 1.5**number for number in range(40)])

    assert "Training diverges (update" in verdict.words
    assert ", asp, mean staleness" in verdict.words
    assert "the loss" in verdict.words
    assert "at best" in verdict.words
    assert "Lower the learning rate" in verdict.words
    assert "--sync bsp" in verdict.words
    assert not verdict.stops
    assert not run.train([1e6] * 100)


def test_a_divergence_is_said_within_twenty_updates() -> None:
    run = Run()
    run.train(falling())
    run.train([20.0] * 15)
    assert len(run.verdicts) == 1


@pytest.mark.parametrize("begun", [2.3, -5.0, 0.0])
def test_a_loss_may_have_any_sign(begun: float) -> None:
    run = Run()
    assert not run.train([begun - 0.1 * number for number in range(100)])
    assert run.train([begun + 3.0**number for number in range(1, 30)], weights=5.5)


def test_what_was_learned_is_lost_if_the_loss_is_back_where_it_began_and_the_weights_have_grown() -> None:
    run = Run()
    run.train(falling())
    verdicts = [verdict for number in range(30) for verdict in run.train([2.3], weights=5 + 0.1 * number)]
    assert "what was learned is lost" in verdicts[0].words


def test_a_loss_that_jumps_with_the_data_and_falls_again_is_not_said() -> None:
    run = Run()
    run.train(falling())
    assert not run.train(falling(3.0, 0.1, 60))


def test_a_loss_that_stays_where_it_began_is_said_at_last_although_the_weights_do_not_move() -> None:
    run = Run()
    run.train(falling())
    assert not run.train([2.3] * 60)
    assert run.train([2.3] * 60)


def test_one_batch_proves_nothing() -> None:
    run = Run()
    losses = falling(count=300)
    for number in range(20, 300, 10):
        losses[number] *= 1000
    assert not run.train(losses)


def test_warm_restarts_are_not_said() -> None:
    run = Run()
    for _ in range(5):
        assert not run.train(falling(1.2, 0.02, 60))


def test_a_loss_that_a_script_does_not_pass_is_replaced_by_gradients_and_weights() -> None:
    run = Run()
    assert not run.train([None] * 60)
    [verdict] = run.train([None] * 20, gradient=30.0)
    assert "the norm of the gradients is 30, and was at most 1 before" in verdict.words

    run = Run()
    run.train([None] * 60)
    [verdict] = run.train([None] * 5, weights=60.0)
    assert "the weights explode: their norm was 5, and is 60" in verdict.words


def test_gradients_that_grow_while_the_loss_is_at_its_best_are_not_said() -> None:
    run = Run()
    run.train(falling())
    assert not run.train(falling(0.1, 0.01), gradient=30.0)


def test_small_initial_weights_may_grow_while_the_loss_falls() -> None:
    run = Run()
    for number, loss in enumerate(falling()):
        assert not run.train([loss], weights=0.1 * (1 + number))


def test_the_losses_of_several_optimizers_are_not_compared_with_their_beginning() -> None:
    run = Run()
    for number in range(200):
        run.train([0.5 + 0.1 * number], set=0)
        run.train([5.0 / (1 + number)], set=1)
    assert not run.verdicts


def test_pushes_of_the_same_round_are_one_point() -> None:
    run = Run(sync="bsp")
    for update in range(60):
        for worker in range(4):
            run.push(worker, Observation(update, 2.3, 1.0, 5.0))
    assert run.guard.points == 59


def test_a_worker_with_losses_unlike_all_others_is_named() -> None:
    run = Run()
    run.train(falling())
    for _ in range(5):
        for worker in range(4):
            run.updates += 1
            run.push(worker, Observation(run.updates, 4.0 if worker == 2 else 0.1, 1.0, 5.0))
    [verdict] = run.verdicts
    assert "Worker 2 differs from all others" in verdict.words
    assert "its losses are usually 4, those of the others at most 0.125" in verdict.words
    assert verdict.takes_out is None


def test_a_worker_with_gradients_unlike_all_others_is_named() -> None:
    run = Run()
    for update in range(40):
        run.push(update % 4, Observation(update, None, 50.0 if update % 4 == 1 else 1.0, 5.0))
    assert "Worker 1 differs" in run.verdicts[0].words
    assert "the norms of its gradients" in run.verdicts[0].words


@pytest.mark.parametrize("joins", [False, True])
def test_a_worker_that_differs_from_those_that_have_left_is_not_named(joins: bool) -> None:
    """What it differs from must be there. Nothing is known of a worker that has just joined."""
    run = Run(workers=2)
    for update in range(80):
        run.push(update % 2, Observation(update, None, 1.0 if update % 2 else 50.0, 5.0))
    [before] = run.verdicts
    assert "Worker 0 differs from worker 1" in before.words
    if joins:
        run.push(2, Observation(80, None, 1.0, 5.0))
    run.guard.left(1)
    for update in range(81, 90):
        assert not run.push(0, Observation(update, None, 50.0, 5.0))


def test_two_workers_that_differ_from_the_others_are_not_outliers() -> None:
    run = Run()
    for update in range(40):
        run.push(update % 4, Observation(update, None, 50.0 if update % 2 else 1.0, 5.0))
    assert not run.verdicts


# -- NaN -------------------------------------------------------------------------------------------------------


def nan(updates: int) -> Observation:
    return Observation(updates, math.nan, math.nan, 5.0, "conv.weight")


@pytest.mark.parametrize("mode", ["off", "tell", "temper", "stop"])
def test_a_worker_that_keeps_sending_nan_is_named_and_then_taken_out(mode: GuardMode) -> None:
    run = Run(mode, skips_nan=True)
    said = []
    for turn in range(MOST_NAN):
        for worker in (0, 1, 3):
            run.push(worker, CALM)
        said += [(turn + 1, verdict) for verdict in run.push(2, nan(0))]

    assert [turn for turn, _ in said] == [NAMED_NAN, MOST_NAN]
    assert [verdict.takes_out for _, verdict in said] == [None, 2]
    assert "Worker 2 has sent NaN or inf 10 times in a row" in said[1][1].words
    assert "'conv.weight'" in said[1][1].words


def test_a_nan_now_and_then_is_not_said() -> None:
    run = Run(skips_nan=True)
    for turn in range(50):
        for worker in range(4):
            run.push(worker, nan(turn) if turn % 5 == 0 else CALM)
    assert not run.verdicts


@pytest.mark.parametrize(
    ("mode", "stops"), [("off", False), ("tell", False), ("temper", False), ("stop", True)]
)
def test_nan_from_all_workers_is_always_said_and_takes_nobody_out(mode: GuardMode, stops: bool) -> None:
    run = Run(mode, skips_nan=True)
    for turn in range(20):
        for worker in range(4):
            run.push(worker, nan(turn))
    [verdict] = run.verdicts
    assert "The gradients of all workers contain NaN or inf" in verdict.words
    assert verdict.stops is stops
    assert verdict.takes_out is None


@pytest.mark.parametrize("mode", ["off", "tell"])
def test_weights_with_nan_are_always_said(mode: GuardMode) -> None:
    run = Run(mode)
    run.push(0, Observation(7, 1.0, 1.0, math.inf))
    run.push(1, Observation(7, 1.0, 1.0, math.nan))
    [verdict] = run.verdicts
    assert verdict.words.startswith("The weights contain NaN or inf (update 7, asp")


def test_the_first_nan_stops_a_run_that_does_not_skip_them_only_if_its_guard_stops() -> None:
    assert not Run("tell").push(0, nan(3))
    [verdict] = Run("stop").push(0, nan(3))
    assert verdict.stops
    assert "'conv.weight'" in verdict.words


def test_a_worker_that_joins_with_the_index_of_one_that_was_taken_out_begins_anew() -> None:
    run = Run("off", skips_nan=True)
    for _ in range(2):
        for _ in range(MOST_NAN):
            run.push(0, CALM)
            run.push(1, nan(0))
        run.guard.left(1)
    assert [verdict.takes_out for verdict in run.verdicts] == [None, 1, None, 1]


@pytest.mark.parametrize("before", [1, NAMED_NAN, MOST_NAN, 3 * MOST_NAN])
def test_a_worker_that_sent_nan_before_the_others_joined_is_taken_out(before: int) -> None:
    run = Run("off", workers=1, skips_nan=True)
    for _ in range(before):
        run.push(0, nan(0))
    run.present = [0, 1]
    for _ in range(MOST_NAN):
        run.push(1, CALM)
        run.push(0, nan(0))
    assert [verdict.takes_out for verdict in run.verdicts if "in a row" in verdict.words] == [None, 0]


def test_a_nan_of_another_worker_at_the_last_moment_saves_nobody() -> None:
    run = Run("off", workers=2, skips_nan=True)
    for turn in range(2 * MOST_NAN):
        run.push(1, nan(0) if turn == MOST_NAN - 1 else CALM)
        run.push(0, nan(0))
        if run.verdicts and run.verdicts[-1].takes_out is not None:
            break
    assert turn == MOST_NAN
    assert run.verdicts[-1].takes_out == 0


# -- what it does ----------------------------------------------------------------------------------------------


def diverging(run: Run, points: int) -> None:
    run.train([50.0] * points)


def test_under_a_model_in_lockstep_no_other_model_is_advised() -> None:
    run = Run(sync="bsp")
    run.train(falling())
    diverging(run, 120)
    [verdict] = run.verdicts
    assert "--sync" not in verdict.words


def test_stop_ends_the_run() -> None:
    run = Run("stop")
    run.train(falling())
    diverging(run, 20)
    assert run.verdicts[0].stops


def test_off_says_nothing_of_a_divergence() -> None:
    run = Run("off")
    run.train(falling())
    diverging(run, 100)
    assert not run.verdicts


def test_the_mode_depends_on_the_hyper_parameters() -> None:
    assert (guard_mode(None, translated=True), guard_mode(None, translated=False)) == ("tell", "off")
    assert guard_mode("temper", translated=False) == "tell"  # as in earlier versions
    assert SETTINGS["guard"].value("temper") == "tell"
    with pytest.raises(ConfigurationError, match=r"unknown guard 'shout'\. Choices: off, stop, tell\."):
        SETTINGS["guard"].value("shout")
    with pytest.raises(ConfigurationError, match=r"unknown guard 'shout'\. Choices: off, stop, tell\."):
        guard_mode("shout", translated=True)


# -- good weights ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept() -> tuple[Run, GoodWeights[int], Callable[[int, float], None]]:
    """A run, the weights that are kept of it, and a function that trains it. The weights are the update's number."""
    run = Run("stop")
    good: GoodWeights[int] = GoodWeights(run.guard.judged)

    def train(count: int, loss: float) -> None:
        for _ in range(count):
            run.train([loss])
            if good.wanted:
                good.take(run.updates)

    return run, good, train


def test_good_weights_are_those_after_which_nothing_was_wrong_for_long_enough(
    kept: tuple[Run, GoodWeights[int], Callable[[int, float], None]],
) -> None:
    run, good, train = kept
    train(10, 2.3)
    assert good.good is None
    train(100, 1.0)
    first = good.good
    assert first is not None
    assert first <= run.updates - CONFIRMED
    train(30, 1.0)
    assert good.good is not None
    assert first < good.good <= run.updates - CONFIRMED
    last = run.updates
    train(20, 50.0)
    assert run.verdicts[-1].stops
    assert good.good < last - 5


def test_there_are_no_good_weights_of_a_run_that_diverges_from_the_beginning(
    kept: tuple[Run, GoodWeights[int], Callable[[int, float], None]],
) -> None:
    run, good, train = kept
    train(3, 2.3)
    train(20, 50.0)
    assert run.verdicts[-1].stops
    assert good.good is None


# -- runs that resume ------------------------------------------------------------------------------------------


def resumed(run: Run) -> Run:
    """Return a run that goes on from a checkpoint of another one."""
    after = Run()
    after.guard.resume(msgspec.json.decode(msgspec.json.encode(run.guard.cut()), type=GuardCut))
    return after


def test_a_run_that_goes_on_is_compared_with_how_the_job_began() -> None:
    run = Run()
    run.train(falling())
    after = resumed(run)
    assert not after.train([0.1] * 20)
    assert after.train([2.2] * 30, weights=7.0) or after.train([2.2] * 120, weights=7.0)
    fresh = Run()
    assert not fresh.train([2.2] * 150, weights=7.0)
