"""Compares sync models for the demo, and equal batches with balanced ones.

Four workers train on handwritten digits, and one of them is three times slower than the others. A table and a picture
show how much time is lost by waiting for the slowest worker, and how much of it is saved by an elastic barrier or by
balanced batches. Each sync model runs twice: with the learning rate and momentum that are best for BSP, translated,
as a user has them who changes only `--sync`; and with its own best ones, used as they are.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..errors import ConfigurationError
from ..files import Unfinished, write_json
from ..launcher.terminal.output import print_sentence
from ..report.accuracy import accuracy_picture
from ..report.canvas import can_draw, no_picture, save
from ..report.results_table import TrialOutcome, comparison_table, medians
from ..runtime.job_options import make_job
from .digits import load
from .settings import SETTINGS, Problem, Setting
from .trial import Trial, run_trial

__all__ = ["run_demo"]


def run_demo(
    *,
    console: Console,
    run_dir: Path | None = None,
    seeds: Sequence[int] = (0,),
    settings: Sequence[Setting] = SETTINGS,
    problem: Problem | None = None,
    progress: bool | None = True,
) -> list[TrialOutcome]:
    """Train with each setting and each seed, one run after another, then print and save the results.

    Afterwards, the run directory contains `summary.json` (one object per setting, with medians over the seeds),
    `trials.json` (one object per run), `curves.csv`, `comparison.png`, and a directory for each run.

    Args:
        console: console on which the table and the messages are printed.
        run_dir: directory for the results. Default: a new directory under ./runs.
        seeds: random seeds. Each seed determines the initial weights and the order of the data for all settings.
        settings: settings to compare.
        problem: training task. Default: `Problem()`.
        progress: True to show progress on standard error, False to hide it, None to show it only on a terminal.

    Returns:
        One outcome per setting, with medians over the seeds.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunFailedError: a run failed.
    """
    problem = problem or Problem()
    if not seeds:
        raise ConfigurationError("seeds is empty; expected at least one whole number, for example 0.")
    digits = load()
    workers = len(problem.pace_s)
    home = Path(
        make_job(workers=workers, servers=problem.servers, pace=problem.pace_s, run_dir=run_dir).run_dir
    )
    print_sentence(
        console,
        f"{workers} workers train on {len(digits.train_labels)} handwritten digits for {problem.duration_s:g} s "
        f"under each of {len(settings)} settings. The speeds are emulated: one worker is "
        f"{max(problem.pace_s) / min(problem.pace_s):g} times slower than the others.",
    )
    trials: list[Trial] = []
    for seed in seeds:
        for setting in settings:
            count = (f"{len(trials) + 1}/{len(seeds) * len(settings)}", "bold")
            line = Text.assemble(count, f" {setting}, seed {seed}")
            console.print(line, soft_wrap=True, highlight=False)
            run = home / f"{re.sub('[^a-z0-9.]+', '-', setting.name)}-seed-{seed}"
            trials.append(run_trial(digits, problem, setting, seed, run_dir=run, progress=progress))
    outcomes = [medians([t.outcome for t in trials if t.outcome.name == s.name]) for s in settings]
    write_json(home / "summary.json", outcomes)
    write_json(home / "trials.json", [trial.outcome for trial in trials])
    _save_curves(home / "curves.csv", trials)
    console.print(comparison_table(outcomes, every=len(settings) > len(SETTINGS), width=console.width))
    if can_draw():
        _save_picture(home / "comparison.png", trials, problem)
        console.print(f"picture: {home / 'comparison.png'}", soft_wrap=True, highlight=False)
    else:
        print_sentence(console, no_picture("comparison.png"))
    console.print(f"results: {home}", soft_wrap=True, highlight=False)
    return outcomes


def _save_curves(path: Path, trials: Sequence[Trial]) -> None:
    with Unfinished(path) as place, place.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sync", "seed", "time_s", "accuracy"])
        for trial in trials:
            for time_s, accuracy in zip(trial.curve.times_s, trial.curve.accuracies, strict=True):
                rows.writerow([trial.outcome.name, trial.outcome.seeds[0], time_s, accuracy])


def _save_picture(path: Path, trials: Sequence[Trial], problem: Problem) -> None:
    shown = {setting.name for setting in SETTINGS}
    figure = accuracy_picture(
        "Handwritten digits, one slow worker",
        f"the speeds of the workers were emulated: {trials[0].outcome.emulated}",
        [trial.curve for trial in trials if trial.outcome.name in shown],
        problem.target_accuracy,
    )
    save(figure, path)
