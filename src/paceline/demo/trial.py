"""One trial: the digits, trained in a run of their own under one sync model with one setting, then judged.

Evaluation disturbs nobody's timing: a reader takes snapshots of the weights at every multiple of an interval,
and they are judged when the run is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..launcher.launch import RunResult, launch
from ..report.accuracy import Curve
from ..report.comparison import Outcome
from .digits import Digits, Recipe, accuracy, train
from .settings import Problem, Setting

__all__ = ["Trial", "run_trial", "time_to_target"]


class Trial(msgspec.Struct, frozen=True):
    """What one run came to."""

    outcome: Outcome
    curve: Curve
    run_dir: Path


def run_trial(
    digits: Digits, problem: Problem, setting: Setting, seed: int, *, run_dir: Path, progress: bool | None
) -> Trial:
    """Train in processes of its own, then judge. Takes the problem's duration and the start of the processes.

    A setting that diverges is a result and no failure: gradients that are not finite are skipped.

    Raises:
        ConfigurationError: bad input; nothing was started.
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
        sync=setting.sync,
        seed=seed,
        pace=problem.pace_s,
        on_nan="skip",
        run_dir=run_dir,
        progress=progress,
        snapshot_every_s=problem.snapshot_every_s,
    )
    times_s, accuracies = _judge(result, digits, problem.snapshot_every_s)
    reached_s = time_to_target(times_s, accuracies, problem.target_accuracy)
    summary = result.summary
    present_s = len(problem.pace_s) * summary["duration_s"]
    pulls = sum(summary["iterations"].values()) * problem.servers
    outcome = Outcome(
        sync=setting.sync,
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
                "waiting_share",
                "mean_staleness",
                "max_staleness",
                "restarts",
                "emulated",
            )
        },
    )
    return Trial(outcome, Curve(setting.sync, times_s, accuracies, reached_s), run_dir)


def time_to_target(times_s: Sequence[float], accuracies: Sequence[float], target: float) -> float | None:
    """When the second evaluation in a row was at or above the target; None if that never came.

    >>> time_to_target([0.0, 0.5, 1.0, 1.5, 2.0], [0.1, 0.96, 0.94, 0.95, 0.97], target=0.95)
    2.0
    """
    for index in range(1, len(times_s)):
        if min(accuracies[index - 1], accuracies[index]) >= target:
            return times_s[index]
    return None


def _judge(
    result: RunResult, digits: Digits, interval_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The accuracy at each time of the grid. Of snapshots that were late and fell together, the first counts."""
    by_tick: dict[int, float] = {}
    for taken_s, snapshot in result.snapshots:
        tick = round(taken_s / interval_s)
        if tick not in by_tick:
            by_tick[tick] = accuracy(snapshot.state_dict, digits)
    return tuple(round(tick * interval_s, 6) for tick in by_tick), tuple(by_tick.values())
