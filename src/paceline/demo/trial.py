"""A trial: one live run that trains on the digits with one setting, and the evaluation of its weights.

The evaluation does not disturb the timing of the run: a reader takes snapshots of the weights at regular intervals,
and the snapshots are evaluated after the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..launcher.launch import RunResult, launch
from ..report.accuracy import Curve
from ..report.results_table import TrialOutcome
from .digits import Digits, Recipe, accuracy, train
from .settings import Problem, Setting

__all__ = ["Trial", "run_trial", "time_to_target"]


class Trial(msgspec.Struct, frozen=True):
    """The result of a trial.

    Attributes:
        outcome: settings and results of the run.
        curve: accuracy on the test images over time.
        run_dir: directory of the run.
    """

    outcome: TrialOutcome
    curve: Curve
    run_dir: Path


def run_trial(
    digits: Digits, problem: Problem, setting: Setting, seed: int, *, run_dir: Path, progress: bool | None
) -> Trial:
    """Train in new processes, then evaluate the weights.

    A trial takes the duration given by `problem`, plus the time to start the processes. Gradients that are not finite
    are skipped, so that a trial has a result even if training diverges.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunFailedError: a process failed.
    """
    recipe = Recipe(
        learning_rate=setting.learning_rate,
        momentum=setting.momentum,
        batch_size=problem.batch_size,
        duration_s=problem.duration_s,
        seed=seed,
    )
    result = launch(
        train,
        args=(digits, recipe),
        workers=len(problem.pace_s),
        servers=problem.servers,
        devices="cpu",
        sync=setting.sync,
        batch=setting.batch,
        hyperparameters=setting.hyperparameters,
        seed=seed,
        pace=problem.pace_s,
        on_nan="skip",
        run_dir=run_dir,
        progress=progress,
        snapshot_every_s=problem.snapshot_every_s,
    )
    times_s, accuracies = _evaluate(result, digits, problem.snapshot_every_s)
    reached_s = time_to_target(times_s, accuracies, problem.target_accuracy)
    summary = result.summary
    present_s = len(problem.pace_s) * summary["duration_s"]
    pulls = sum(summary["iterations"].values()) * problem.servers
    outcome = TrialOutcome(
        sync=setting.sync,
        batch=setting.batch,
        hyperparameters=setting.hyperparameters,
        learning_rate=setting.learning_rate,
        momentum=setting.momentum,
        seeds=(seed,),
        target_accuracy=problem.target_accuracy,
        time_to_target_s=reached_s,
        final_accuracy=accuracy(result.state_dict, digits),
        delayed_share=summary["delayed_pulls"] / pulls if pulls else 0.0,
        wasted_share=summary["wasted_s"] / present_s if present_s else 0.0,
        **{
            key: summary[key]
            for key in (
                "updates_per_s",
                "gradients_per_s",
                "samples_per_s",
                "waiting_share",
                "mean_staleness",
                "max_staleness",
                "restarts",
                "emulated",
            )
        },
    )
    return Trial(outcome, Curve(setting.name, times_s, accuracies, reached_s), run_dir)


def time_to_target(times_s: Sequence[float], accuracies: Sequence[float], target: float) -> float | None:
    """Return the first time at which two consecutive evaluations have reached the target, or None.

    >>> time_to_target([0.0, 0.5, 1.0, 1.5, 2.0], [0.1, 0.96, 0.94, 0.95, 0.97], target=0.95)
    2.0
    """
    for index in range(1, len(times_s)):
        if min(accuracies[index - 1], accuracies[index]) >= target:
            return times_s[index]
    return None


def _evaluate(
    result: RunResult, digits: Digits, interval_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the times of the evaluations, which are multiples of the interval, and the accuracy at each time.

    If the times of several snapshots round to the same multiple, because some were late, only the first is used.
    """
    by_tick: dict[int, float] = {}
    for taken_s, snapshot in result.snapshots:
        tick = round(taken_s / interval_s)
        if tick not in by_tick:
            by_tick[tick] = accuracy(snapshot.state_dict, digits)
    return tuple(round(tick * interval_s, 6) for tick in by_tick), tuple(by_tick.values())
