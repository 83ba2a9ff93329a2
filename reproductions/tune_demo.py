"""The search for the best learning rate and momentum for each sync model in the demo.

Each measurement is a complete training run, which takes about half a minute. Measurements are appended to
`tuning.jsonl` in the run directory. If the search is stopped and started again, it reuses these measurements.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.errors import ConfigurationError
from paceline.lab.demo import DemoSetting, Problem, load, run_trial

from .exhibit import plain_table
from .grid_search import Measure, Point, Score, learning_rate, search
from .result_file import append_results, read_results

STARTS: dict[str, dict[float, int]] = {
    "bsp": {0.0: 4, 0.9: -1},
    "ssp:staleness=3": {0.0: 1, 0.9: -6},
    "asp": {0.0: 1, 0.9: -6},
    "elastic-bsp:lookahead=15": {0.0: 1, 0.9: -6},
}
"""Sync model -> momentum -> step of the learning rate at which the search begins (see `grid_search`)."""

SEEDS = (0, 1, 2)
"""The search uses the first seed; the best few points and their neighbors are measured with all seeds."""

# The default directory is always the same, so that the next search continues from the stored measurements.
DEFAULT_DIR = Path("runs", "tuning")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run, stored as one line of the journal."""

    problem: Problem  # training task
    setting: DemoSetting  # setting that was measured
    seed: int  # random seed for the run
    time_to_target_s: float | None  # seconds to the target accuracy, or None if the target was not reached
    final_accuracy: float  # accuracy at the end of the run

    @property
    def score(self) -> Score:
        """Score of the measurement. The search compares settings by their scores."""
        reached_s = self.time_to_target_s
        return Score(math.inf if reached_s is None else reached_s, 1.0 - self.final_accuracy)


def read_journal(path: Path, problem: Problem) -> dict[tuple[DemoSetting, int], Measured]:
    """Return the measurements that a file contains, by setting and seed; none if it does not exist.

    Raises:
        ConfigurationError: the file cannot be read, or contains measurements for another task.
    """
    found = read_results(path, Measured)
    for record in found:
        if record.problem != problem:
            raise ConfigurationError(
                f"{path} contains measurements for another training task ({record.problem}); move the file "
                "elsewhere, or use another run directory."
            )
    return {(record.setting, record.seed): record for record in found}


def tune(
    *,
    console: Console,
    run_dir: Path | None = None,
    starts: Mapping[str, Mapping[float, int]] = STARTS,
) -> list[DemoSetting]:
    """For each sync model, find the setting with the smallest median time to the target.

    If times are equal, the higher final accuracy wins. The search takes about 25 runs of half a minute for each sync
    model, about 45 minutes in total. Run the search on an otherwise idle machine.

    Args:
        console: where results are printed.
        run_dir: directory for the journal; by default ./runs/tuning. Points in the journal are not measured again.
        starts: sync model -> momentum -> step of the learning rate at which the search begins.

    Returns:
        The best setting for each sync model.

    Raises:
        ConfigurationError: the journal or the run directory cannot be used.
        RunFailedError: a run failed. All earlier measurements are kept.
    """
    problem = Problem()
    run_dir = run_dir or DEFAULT_DIR
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {run_dir} cannot be created: {error.strerror}."
        ) from error
    path = run_dir / "tuning.jsonl"
    known = read_journal(path, problem)
    console.print(
        f"Each measurement is a run of about {problem.duration_s:.0f} s, plus the time to start its processes. "
        f"There are about 25 measurements for each of {len(starts)} sync models. "
        f"{len(known)} measurements are already in {path}.",
        soft_wrap=True,
        highlight=False,
    )
    begun_s = time.monotonic()
    best = []
    for sync, start in starts.items():
        finals = search(_measure(sync, problem, known, path, console), start, SEEDS)
        console.print(_finals_table(sync, finals, problem))
        best.append(_setting(sync, next(iter(finals))))
    console.print(f"After {(time.monotonic() - begun_s) / 60:.0f} minutes, these are the best settings:")
    for setting in best:
        console.print(f"    {setting!r},", soft_wrap=True, highlight=False)
    return best


def _measure(
    sync: str, problem: Problem, known: dict[tuple[DemoSetting, int], Measured], path: Path, console: Console
) -> Measure:
    digits = load()

    def measure(point: Point, seed: int) -> Score:
        setting = _setting(sync, point)
        if (setting, seed) not in known:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="run-") as scratch:
                trial = run_trial(digits, problem, setting, seed, run_dir=Path(scratch), progress=None)
            known[setting, seed] = found = Measured(
                problem=problem,
                setting=setting,
                seed=seed,
                time_to_target_s=trial.outcome.time_to_target_s,
                final_accuracy=trial.outcome.final_accuracy,
            )
            append_results(path, found)
            console.print(f"{setting}, seed {seed}: {_words(found.score)}", soft_wrap=True, highlight=False)
        return known[setting, seed].score

    return measure


def _setting(sync: str, point: Point) -> DemoSetting:
    return DemoSetting(sync, learning_rate(point.step), point.momentum)


def _words(score: Score) -> str:
    time_s, error = score
    return f"{f'{time_s:.2f} s' if math.isfinite(time_s) else 'never'}, final accuracy {1 - error:.1%}"


def _finals_table(sync: str, finals: Mapping[Point, Score], problem: Problem) -> Table:
    reached = f"time to {problem.target_accuracy:.0%}, final accuracy"
    title = f"{sync}: medians of {len(SEEDS)} seeds"
    table = plain_table(title, "learning rate", "momentum", reached)
    for point, score in finals.items():
        table.add_row(f"{learning_rate(point.step):g}", f"{point.momentum:g}", _words(score))
    return table
