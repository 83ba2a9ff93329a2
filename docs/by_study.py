"""Sections "The same comparison by `paceline study`" of two pages, which compare their numbers with those of a study.

The runs of a page are trained many at once along recorded schedules, those of a study one by one in the simulator.
The studies are in `reproductions/studies`, and what they have written is in `reproductions/results`, without cells
and figures.
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import NamedTuple

import numpy as np

from docs.on_accelerators import table
from paceline.studies.statistics import (
    Difference,
    Time,
    compare_samples,
    crossing,
    difference,
    holm,
    ratio_of_times,
)
from reproductions.evidence.study import Cell
from reproductions.evidence.verdicts import BASELINE, Comparison, Key
from reproductions.same_accuracy.plan import FACTORS
from reproductions.same_accuracy.summary import BOUNDS, part_until
from reproductions.same_accuracy.table import EVALUATIONS, Result

__all__ = ["of_digits", "of_same_accuracy"]

RESULTS = Path(__file__).parent.parent / "reproductions" / "results"

Place = tuple[str, str]
"""A cluster and a model of a study."""


class Run(NamedTuple):
    """A run of a study.

    Attributes:
        point: its hyper-parameters of the grid, by name.
        time: when it reached the target.
        final: the last value of the metric.
    """

    point: dict[str, str]
    time: Time
    final: float


def runs_of(study: str) -> dict[Place, list[Run]]:
    """Return the evaluated runs of a study, in the order of their seeds."""
    found: dict[Place, list[Run]] = {}
    for row in _rows(study, "runs.csv"):
        if row["purpose"] == "evaluation":
            names = list(row)
            point = {name: row[name] for name in names[names.index("seed") + 1 : names.index("reached")]}
            [final] = (float(value) for name, value in row.items() if name.startswith("final_"))
            end_s = float(row["seconds"])
            time = Time(float(row["seconds_to_target"] or end_s), end_s, row["reached"] == "1")
            found.setdefault((row["cluster"], row["model"]), []).append(Run(point, time, final))
    return found


def _rows(study: str, file: str) -> list[dict[str, str]]:
    with (RESULTS / f"study-{study}" / file).open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def _times(runs: Sequence[Run]) -> list[Time]:
    return [run.time for run in runs]


def _agreement(p_values: Mapping[Place, float], outside: Sequence[Place]) -> str:
    """Return in how many cells a page and its study agree, and the names of the others.

    Args:
        p_values: the probability of each difference if there were none.
        outside: the cells in which the interval of the difference does not hold "no difference".
    """
    surely, count = holm(p_values), len(p_values)
    named = ", ".join(f"`{name}` in {cluster}" for cluster, name in outside)
    return (
        f"After Holm's correction for the {count} comparisons, {len(surely) or 'none'} of the differences "
        f"{'is' if len(surely) == 1 else 'are'} significant. Without the correction, {count - len(outside)} of the "
        f"intervals include 'no difference'. The other intervals are those of {named or 'none'}; by chance alone, "
        f"about {0.05 * count:.0f} of the intervals would exclude 'no difference'."
    )


def _laid_out(text: str, tables: Mapping[str, list[str]]) -> list[str]:
    """Return the lines of paragraphs, commands and tables, which have a name in capitals in the text."""
    lines: list[str] = []
    for block in text.strip("\n").split("\n\n"):
        if block in tables:
            lines += tables[block]
        elif block.startswith("    "):
            lines += [block, ""]
        else:
            lines += [*textwrap.wrap(block, 118, break_on_hyphens=False), ""]
    return lines


# -- the same hyper-parameters under every model -------------------------------------------------------------------

PROBLEM, WORKERS, FACTOR = "digits-mlp", 4, 0.5
"""The part of the table that the study repeats."""

BOUND = BOUNDS[FACTOR][0]

SAME_ACCURACY = """\
`paceline study` asks the same question for `{problem}` with {workers} workers, at half of the best rate. In the
table, hundreds of runs are trained together along one schedule. In the study, each run is simulated alone, with
a schedule of its own, and evaluates its weights itself, which needs messages. The network, the order of the
data and the seeds are the same. This command repeats the study, which takes 7 minutes of computing time:

    paceline study reproductions/studies/same-accuracy.toml --out DIR

The results of the study are in `reproductions/results/study-same-accuracy`. The following table shows the mean
final accuracies over {seeds} seeds in percent, in the table and in the study, and their difference with its 95
% interval, paired by seed:

ACCURACIES

{agreement} Under `rennala`, the last mean is incomplete, and is applied when the workers have left, so the last
evaluations of the study come before this update. A test also simulates a single run for
each of the 69 cells, with one of these seeds and without evaluations during training. Each of these runs ends at the
same time as the run with this seed in the table, and with the same accuracy to within half a test image
(`tests/reproductions/test_studies.py`).

The next table shows how many times sooner than `bsp` a model reaches the final accuracy of `bsp` to
within the bound. The first two numbers are those of the mean over the seeds, in the table and in the study. The third
number is that of single runs, as in the `summary.md` of the study. A single run exceeds the target now and then
before the mean does, most of all under `bsp`.

TIMES

{times}
"""


def of_same_accuracy(results: Mapping[tuple[object, ...], Result]) -> list[str]:
    """Return the section of `docs/models/same-accuracy.md`.

    Args:
        results: the results of the table by their keys.
    """
    runs = runs_of("same-accuracy")
    clusters, names = (list(dict.fromkeys(keys)) for keys in zip(*runs, strict=True))
    seeds = len(runs[clusters[0], BASELINE])
    ours = {key: _result(results, *key, seeds) for key in runs}
    finals = {key: _final(ours[key], own) for key, own in runs.items()}
    in_table = {key: _reached_in_table(result, ours[key[0], BASELINE]) for key, result in ours.items()}
    in_study = _reached_in_study(runs)
    outside = [key for key, each in finals.items() if not each.by.low <= 0 <= each.by.high]
    head = [f"{cluster}: table, study" for cluster in clusters]
    relaxed = [name for name in names if name != BASELINE and ", " not in name]

    def sooner(cluster: str, name: str) -> str:
        both = (_quotient(times, cluster, name) for times in (in_table, in_study))
        ratio = ratio_of_times(_times(runs[cluster, BASELINE]), _times(runs[cluster, name]))
        return f"{', '.join(f'{each:.2f}' if each else 'never' for each in both)}; {ratio}"

    text = SAME_ACCURACY.format(
        problem=PROBLEM,
        workers=WORKERS,
        seeds=seeds,
        agreement=_agreement({key: each.by.p for key, each in finals.items()}, outside),
        times=_of_times(clusters, relaxed, in_table, in_study),
    )
    accuracies = table(
        ["", *head], [[f"`{name}`", *(str(finals[c, name]) for c in clusters)] for name in names]
    )
    times = table(["", *head], [[f"`{name}`", *(sooner(c, name) for c in clusters)] for name in relaxed])
    return [
        "## The same comparison by `paceline study`",
        "",
        *_laid_out(text, {"ACCURACIES": accuracies, "TIMES": times}),
    ]


class Final(NamedTuple):
    """Mean final accuracies in percent: that of a cell of the table, that of the study, and their difference."""

    table: float
    study: float
    by: Difference

    def __str__(self) -> str:
        low, by, high = (
            f"{round(each, 1) + 0.0:+.1f}" for each in (self.by.low, self.by.value, self.by.high)
        )
        return f"{self.table:.1f}, {self.study:.1f}; {by} [{low}, {high}]"


def _result(results: Mapping[tuple[object, ...], Result], cluster: str, name: str, seeds: int) -> Result:
    """Return the result in the table that belongs to a model of the study: "asp", or "asp, raw"."""
    model, _, kind = name.partition(", ")
    kind = "raw" if model == BASELINE else kind or "translated"
    return results[PROBLEM, cluster, WORKERS, model, kind, seeds]


def _final(result: Result, runs: Sequence[Run]) -> Final:
    finals = result.runs[FACTORS.index(FACTOR)].finals
    page = [math.nan if value is None else 100 * value for value in finals]
    study = [100 * float(f"{run.final:.5g}") for run in runs]  # rounded as in the table
    return Final(fmean(page), fmean(study), difference(study, page))


def _reached_in_table(result: Result, baseline: Result) -> float:
    """Return when the mean accuracy reaches the target in the table, in seconds."""
    runs, usual = (each.runs[FACTORS.index(FACTOR)] for each in (result, baseline))
    target = fmean(value for value in usual.finals if value is not None) - BOUND
    return part_until(runs.curve, 1.0, target) * result.end_s


def _reached_in_study(runs: Mapping[Place, Sequence[Run]]) -> dict[Place, float]:
    """Return when the mean accuracy reaches the target in the study, in seconds, with as many points as the table."""
    curves: dict[Place, dict[str, list[tuple[float, float]]]] = {}
    for row in _rows("same-accuracy", "curves.csv"):
        of_seed = curves.setdefault((row["cluster"], row["model"]), {}).setdefault(row["seed"], [])
        of_seed.append((float(row["seconds"]), float(row["accuracy"])))
    found = {}
    for (cluster, name), of_seeds in curves.items():
        end_s = fmean(curve[-1][0] for curve in of_seeds.values())
        times_s = end_s * np.arange(1, EVALUATIONS + 1) / EVALUATIONS
        mean = np.mean([np.interp(times_s, *np.array(curve).T) for curve in of_seeds.values()], axis=0)
        target = fmean(run.final for run in runs[cluster, BASELINE]) - BOUND
        points = zip(times_s.tolist(), mean.tolist(), strict=True)
        found[cluster, name] = crossing(list(points), target, higher_is_better=True)
    return found


def _quotient(times_s: Mapping[Place, float], cluster: str, name: str) -> float:
    """Return how many times sooner than the baseline a model reaches the target; 0 if it never does."""
    return times_s[cluster, BASELINE] / times_s[cluster, name]


def _of_times(
    clusters: Sequence[str],
    names: Sequence[str],
    in_table: Mapping[Place, float],
    in_study: Mapping[Place, float],
) -> str:
    """Return by how much the times in the table and in the study differ."""
    parts = []
    for cluster in clusters:
        changes = [
            abs(math.log(_quotient(in_study, cluster, name) / _quotient(in_table, cluster, name)))
            for name in names
            if math.isfinite(in_study[cluster, name] + in_table[cluster, name])
        ]
        usual = (times[cluster, BASELINE] for times in (in_table, in_study))
        parts.append(
            f"by a median of {_percent(median(changes))} and by at most {_percent(max(changes))} in {cluster}, where "
            f"`bsp` needs {' and '.join(f'{each:.0f} s' for each in usual)}"
        )
    return (
        f"The first two numbers differ {'; '.join(parts)}. The table has one schedule, so its times depend on which "
        "workers this schedule slows down, and when: most of all in the cluster *pauses*, where a run has few pauses."
    )


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):.0f} %"


# -- when it pays --------------------------------------------------------------------------------------------------

TARGET = "time to 0.05"
"""The measure of the page that the study repeats."""

DIGITS = """\
`paceline study` finds out, on the problem `digits`, which model reaches 0.05 of the initial loss soonest, each with
its own best rate. For this page, all settings were trained together along recorded schedules, and the best rates and
momenta were searched for. In the study, each run is simulated alone, and each model has five rates and one momentum:
a grid around the values that are best on the page. The network, the seeds and the random times of the workers are
the same. This command repeats the study, which takes 10 minutes of computing time:

    paceline study reproductions/studies/evidence-digits.toml --out DIR

The results of the study are in `reproductions/results/study-evidence-digits`. The tables show the mean time to
the target over {seeds} seeds on the page and in the study, the quotient of these two times, paired by seed, and the
ratios to `bsp`:

TABLES

{agreement} The page and the
study choose different rates where several rates are about equally good with the three tuning seeds.
"""


def of_digits(cells: Sequence[Cell], found: Mapping[Key, Comparison]) -> list[str]:
    """Return the section of `docs/models/when-it-pays.md`.

    Args:
        cells: the results on digits.
        found: their comparisons with the baseline.
    """
    runs = runs_of("evidence-digits")
    ours = {(cell.place, cell.contender): cell.found["fixed"][TARGET] for cell in cells}
    seeds = len(next(iter(runs.values())))
    quotients = {key: compare_samples(_seconds(own), ours[key].values[:seeds]) for key, own in runs.items()}
    lines: list[str] = []
    for cluster in dict.fromkeys(cluster for cluster, _ in runs):
        rows = []
        for name in (name for place, name in runs if place == cluster):
            own, page = runs[cluster, name], ours[cluster, name]
            row = [f"`{name}`", f"{page.rate:g}, {page.momentum:g}", ", ".join(own[0].point.values())]
            row += [_mean_s(page.values[:seeds]), _mean_s(_seconds(own)), str(quotients[cluster, name])]
            if name == BASELINE:
                row += ["1", "1"]
            else:
                ratio = ratio_of_times(_times(own), _times(runs[cluster, BASELINE]))
                row += [found[Key(cluster, name, "fixed", TARGET)].text, str(ratio)]
            rows.append(row)
        head = [
            cluster.removesuffix(" workers"),
            "page: rate, momentum",
            "study",
            "page: time in s",
            "study",
            "study / page",
        ]
        lines += table([*head, "page: ratio to `bsp`", "study"], rows)
    outside = [key for key, ratio in quotients.items() if not ratio.tie]
    text = DIGITS.format(
        seeds=seeds,
        agreement=_agreement({key: ratio.p for key, ratio in quotients.items()}, outside),
    )
    return ["### The same comparison by `paceline study`", "", *_laid_out(text, {"TABLES": lines})]


def _seconds(runs: Sequence[Run]) -> list[float]:
    return [run.time.value if run.time.reached else math.inf for run in runs]


def _mean_s(times_s: Sequence[float]) -> str:
    never = sum(map(math.isinf, times_s))
    return f"never in {never} of {len(times_s)}" if never else f"{geometric_mean(times_s):.0f}"
