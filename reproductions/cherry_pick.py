"""Cherry-picking, as in the SpecSync paper: a grid search for the abort time and abort rate, with live runs.

Reference: SpecSync (ICDCS 2018), sections VI-A and VI-E, Table II. Every trial is a complete training run. As in the
paper, the abort times are at most half the iteration time of the fast workers, and they differ from each other by
more than the communication time.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.lab.demo import DemoSetting, Problem, load, run_trial
from paceline.look.tables import TrialOutcome
from paceline.run.job_options import make_job

from .exhibit import plain_table

ABORT_TIMES_S = (0.005, 0.01, 0.015)
ABORT_RATES = (0.0, 0.25, 0.5)


class Search(msgspec.Struct, frozen=True):
    """The results and the cost of a search.

    Attributes:
        outcomes: the outcome of the adaptive variant, then the outcomes of the grid, sorted by the time to the target
            and then by the final accuracy, the best first.
        trials: number of points in the grid.
        search_s: duration of the search in seconds, not counting the run of the adaptive variant.
    """

    outcomes: tuple[TrialOutcome, ...]
    trials: int
    search_s: float


def cherry_pick(
    setting: DemoSetting,
    *,
    console: Console,
    run_dir: Path | None = None,
    abort_times_s: Sequence[float] = ABORT_TIMES_S,
    abort_rates: Sequence[float] = ABORT_RATES,
) -> Search:
    """Run the adaptive variant, then a trial for each pair of abort time and rate. Print the results and the cost.

    The results are also written to `cherry-pick.json` in the run directory.

    Args:
        setting: setting for SpecSync, without abort time and rate. All trials have this learning rate and momentum.
        console: console on which the table is printed.
        run_dir: directory for the results. By default, a new directory under ./runs.
        abort_times_s: abort times in the grid.
        abort_rates: abort rates in the grid.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunFailedError: a run failed.
    """
    problem = Problem()
    digits = load()
    pairs = [(time_s, rate) for time_s in abort_times_s for rate in abort_rates]
    join = "," if ":" in setting.sync else ":"
    points = [f"{setting.sync}{join}abort_time_s={time_s:g},abort_rate={rate:g}" for time_s, rate in pairs]
    settings = [setting, *(msgspec.structs.replace(setting, sync=sync) for sync in points)]
    for each in settings:
        make_job(workers=len(problem.pace_s), sync=each.sync, pace=problem.pace_s, dry_run=True)
    home = Path(make_job(workers=len(problem.pace_s), pace=problem.pace_s, run_dir=run_dir).run_dir)
    console.print(
        f"one run of the adaptive variant, then {len(pairs)} trials; each takes about {problem.duration_s:.0f} s, "
        "plus the time to start its processes",
        highlight=False,
    )
    outcomes = []
    begun_s = time.monotonic()
    for number, each in enumerate(settings):
        if number == 1:
            begun_s = time.monotonic()
        console.print(f"[bold]{number}/{len(pairs)}[/] {each}", soft_wrap=True, highlight=False)
        with tempfile.TemporaryDirectory(dir=home, prefix="trial-") as scratch:
            trial = run_trial(digits, problem, each, 0, run_dir=Path(scratch), progress=None)
        outcomes.append(trial.outcome)
    adaptive, *grid = outcomes
    found = Search((adaptive, *sorted(grid, key=_score)), len(pairs), time.monotonic() - begun_s)
    (home / "cherry-pick.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    console.print(_table(found, problem))
    console.print(
        f"{found.trials} trials: {len(abort_times_s)} abort times x {len(abort_rates)} abort rates, "
        f"{found.search_s / max(1, found.trials):.0f} s each, {found.search_s:.0f} s in total. "
        "The adaptive variant needs no trials.",
        soft_wrap=True,
        highlight=False,
    )
    return found


def _score(outcome: TrialOutcome) -> tuple[float, float]:
    reached_s = outcome.time_to_target_s
    return (math.inf if reached_s is None else reached_s, -outcome.final_accuracy)


def _table(found: Search, problem: Problem) -> Table:
    reached = f"s to {problem.target_accuracy:.0%}"
    headings = (reached, "final", "staleness\n(updates)\nmean", "aborts", "wasted")
    table = plain_table("", "abort time and rate", *headings)
    for outcome in found.outcomes:
        picked = outcome.sync.partition("abort_time_s=")[2].replace(",abort_rate=", " s, ")
        reached_s = outcome.time_to_target_s
        table.add_row(
            picked or "adaptive",
            "never" if reached_s is None else f"{reached_s:.2f}",
            f"{outcome.final_accuracy:.1%}",
            f"{outcome.mean_staleness:.2f}",
            f"{outcome.restarts:g}",
            f"{outcome.wasted_share:.1%}",
        )
    return table
