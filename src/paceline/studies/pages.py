"""The page `summary.md` of a study, and its tables for programs and papers."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from ..errors import first_line
from ..sync.schedule import read_schedule
from ..words import counted
from .cells import UNITS, Cell, Outcome
from .description import Study
from .results import StudyResult, StudyRow
from .statistics import CONFIDENCE, Estimate


def summary_md(result: StudyResult, figures: Sequence[str], left_out: str = "") -> str:
    """Return the page.

    Args:
        result: the result of the study.
        figures: names of the figures, without their endings.
        left_out: why there are no figures.
    """
    study = result.study
    parts = [f"# {study.name}", _method(study)]
    for cluster in study.clusters:
        rows = result.of_cluster(cluster)
        parts.append(f"## {cluster}")
        parts.append(_cluster(study, rows) if rows else "All runs on this cluster have failed.")
        if rows:
            parts += [
                _table(result, rows),
                "\n".join(f"- {sentence}" for sentence in _sentences(study, rows)),
            ]
    parts += list(_failures(result))
    if figures or left_out:
        parts.append("## Figures")
        parts += [f"Note: {left_out}"] * bool(left_out)
        parts += [f"![{name}](figures/{name}.png)" for name in figures]
    return "\n\n".join(parts) + "\n"


def _method(study: Study) -> str:
    target = study.target
    kinds = {contender.hyperparameters for contender in study.contenders}
    limits = {"seconds": "virtual seconds", "updates": "updates", "samples": "samples"}
    ends = [
        f"{_number(value)} {words}" for key, words in limits.items() if (value := getattr(study.budget, key))
    ]
    aim = (
        f"{target.metric} {value_text(target.value)}"
        if target.value is not None
        else f"the mean final {target.metric} of {target.of}"
        + (f", or up to {target.within:g} worse" if target.within else "")
    )
    tuned = any(len(contender.points) > 1 for contender in study.contenders)
    sentences = [
        f"{counted(len(study.contenders), 'model')} on {counted(len(study.clusters), 'cluster')} train "
        f"`{study.trained.title}` with {counted(len(study.seeds), 'seed')}.",
        f"The target is {aim}; {'higher' if target.higher_is_better else 'lower'} values are better.",
        f"Hyper-parameters are {' or '.join(sorted(kinds))}.{_as_they_are(study)}",
        f"A run ends after {' or '.join(ends)} at the latest."
        if ends
        else "A run ends with its training function.",
    ]
    if tuned:
        whose = (
            "Each model has its own best hyper-parameters of the grid on each cluster"
            if study.tuning == "each"
            else f"All models have the best hyper-parameters of {study.reference} on each cluster"
        )
        sentences.append(
            f"{whose}: those with the smallest median time to the target over {len(study.tuning_seeds)} other seeds "
            "or, among those with equal times, the best final value."
        )
    sentences += [
        f"Brackets are {CONFIDENCE:.0%} intervals. Times are geometric means over the seeds. If a run never "
        "reaches the target, its time is only known to be longer than the run. If such runs leave the upper end of an "
        "interval open, this end is shown as never.",
        f"Ratios are times divided by those of {study.reference}, "
        + ("paired by seed." if study.paired else "not paired by seed."),
        "A ratio or difference is called significant if it remains significant after Holm's correction for all "
        "comparisons of its kind in this study.",
    ]
    return " ".join(sentences)


def _as_they_are(study: Study) -> str:
    """Return a sentence about models whose hyper-parameters stay raw although the study translates them."""
    names = [
        contender.name
        for contender in study.contenders
        if contender.hyperparameters == "translated"
        and any(model.scales_pushes for step in read_schedule(contender.sync).steps for model in step.models)
    ]
    if not names:
        return ""
    return f" Those of {'; '.join(names)} are used as they are, because such a model scales gradients itself."


def _cluster(study: Study, rows: Sequence[StudyRow]) -> str:
    return f"{study.clusters[rows[0].cluster].workers} workers; target {value_text(rows[0].target)}."


def _table(result: StudyResult, rows: Sequence[StudyRow]) -> str:
    keys = keys_of(result)
    metric = result.study.target.metric
    lines = [
        ["model", *keys, "seconds to target", "ratio", "reached", f"final {metric}", "staleness", "waiting"],
        ["---"] * (len(keys) + 7),
    ]
    for row in rows:
        name, *cells = _cells(row, keys, "-", " of ")
        marked = [cell.replace(MARK, " \\*") for cell in cells]
        lines.append([f"**{name}**" if row.front else name, *marked])
    separated = [" | ".join(cell.replace("|", r"\|") for cell in line) for line in lines]
    table = "\n".join(f"| {line} |" for line in separated)
    return (
        f"{table}\n\nBold: no other model is sooner at the target and ends with a better value. "
        "\\*: significantly different from the reference."
    )


MARK = "\N{DAGGER}"  # significantly different from the reference


def _cells(row: StudyRow, keys: Sequence[str], missing: str, of: str) -> list[str]:
    """Return the cells of a row of the table, with `MARK` after each comparison that is significant.

    Args:
        row: the row.
        keys: the hyper-parameters of the columns.
        missing: the text for a hyper-parameter that a model does not have.
        of: the text between two numbers of runs.
    """
    values = dict(row.choice.point)
    significant = 1 - CONFIDENCE
    outcomes = row.outcomes.values()
    return [
        row.contender.name,
        *(str(values.get(key, missing)) for key in keys),
        interval_text(row.time["seconds"]),
        "1"
        if row.ratio is None
        else interval_text(Estimate(*row.ratio[:3])) + MARK * (row.ratio_p <= significant),
        f"{row.reached}{of}{row.runs}" + f", {row.failed} failed" * bool(row.failed),
        interval_text(row.final) + MARK * (row.lead is not None and row.lead_p <= significant),
        value_text(fmean(each.mean_staleness for each in outcomes)),
        whole_percent(fmean(each.time.get("waiting", 0.0) for each in outcomes)),
    ]


def _sentences(study: Study, rows: Sequence[StudyRow]) -> Iterator[str]:
    """Yield sentences about the rows of a cluster. "Significant" refers to p-values after Holm's correction."""
    surely = [row for row in rows if row.ratio is not None and row.ratio_p <= 1 - CONFIDENCE]
    for words, chosen in (
        ("sooner", [row for row in surely if row.ratio is not None and row.ratio.high < 1]),
        ("later", [row for row in surely if row.ratio is not None and row.ratio.low > 1]),
    ):
        if chosen:
            named = "; ".join(f"{row.contender.name} ({_factor(row)})" for row in chosen)
            yield f"Significantly {words} at the target than {study.reference}: {named}."
    others = [row for row in rows if row.ratio is not None and row not in surely]
    if others:
        named = "; ".join(row.contender.name for row in others)
        yield f"Not significantly different from {study.reference} in time to target: {named}."
    front = [row.contender.name for row in rows if row.front]
    if front:
        yield f"Not dominated in time to target and final {study.target.metric}: {'; '.join(front)}."
    for row in rows:
        if row.failed:
            yield (
                f"{row.contender.name} fails in {row.failed} of {row.runs} runs; its times and values are those of the "
                "other runs."
            )
        if never := len(row.outcomes) - row.reached:
            yield f"{row.contender.name} never reaches the target in {never} of {row.runs} runs."
    for row in rows:
        if row.choice.edges:
            yield f"{row.contender.name}: {' and '.join(row.choice.edges)}, so a better value may lie outside the grid."


def _factor(row: StudyRow) -> str:
    assert row.ratio is not None
    if row.ratio.ratio == 0 or math.isinf(row.ratio.ratio):
        return "one of the two never reaches the target"
    return f"{value_text(row.ratio.ratio)} of its time"


def _failures(result: StudyResult) -> Iterator[str]:
    if result.failures:
        yield "## Failed runs"
        yield "The comparisons do not include these runs."
        yield "\n".join(f"- {failure.name}: {first_line(failure.error)}" for failure in result.failures)
    if findings := list(_findings(result.rows)):
        yield "## Findings"
        yield "\n".join(f"- {finding}" for finding in findings)


def _findings(rows: Sequence[StudyRow]) -> Iterator[str]:
    """Yield each finding about a model on a cluster once, even if the numbers in it differ between seeds."""
    for row in rows:
        alike: dict[str, list[tuple[int, str]]] = {}
        for seed, outcome in row.outcomes.items():
            for finding in outcome.findings:
                alike.setdefault(re.sub(r"\d+(\.\d+)?", "", finding), []).append((seed, finding))
        for (first, finding), *others in alike.values():
            seeds = f"{len(others) + 1} seeds, for example {first}" if others else f"seed {first}"
            yield f"{row.contender.name} on {row.cluster}, {seeds}: {finding}"


# -- The tables of a study: `runs.csv` and `curves.csv` for programs, and `table.tex` for a paper ------------

TIMES = ("computing", "loading", "waiting", "transfer", "wasted", "paused", "outside")


def runs_csv(result: StudyResult) -> str:
    """Return a line for each run: its cell, when it reached the target, and its statistics."""
    keys = keys_of(result)
    metric = result.study.target.metric
    header = ["cluster", "model", "purpose", "seed", *keys, "reached"]
    header += [f"{unit}_to_target" for unit in UNITS]
    header += [f"final_{metric}", *UNITS, "gradients", "mean_staleness", "max_staleness"]
    header += [f"{name}_share" for name in TIMES] + ["bytes_sent", "restarts", "findings"]
    targets = {row.cluster: row.target for row in result.rows}
    lines = [
        _run_line(result, cell, outcome, "tuning", keys, targets.get(cell.cluster, math.nan))
        for cell, outcome in result.tuning
    ]
    lines += [
        _run_line(
            result,
            Cell(row.cluster, row.contender.name, row.choice.point, seed),
            outcome,
            "evaluation",
            keys,
            row.target,
        )
        for row in result.rows
        for seed, outcome in row.outcomes.items()
    ]
    return _csv([header, *lines])


def _run_line(
    result: StudyResult, cell: Cell, outcome: Outcome, purpose: str, keys: Sequence[str], target: float
) -> list[Any]:
    higher = result.study.target.higher_is_better
    values = dict(cell.point)
    reached = [outcome.reaches(unit, target, higher_is_better=higher) for unit in UNITS]
    return [
        cell.cluster,
        cell.contender,
        purpose,
        cell.seed,
        *(values.get(key, "") for key in keys),
        int(math.isfinite(reached[0])),
        *(_number(each) if math.isfinite(each) else "" for each in reached),
        _number(outcome.final),
        *(_number(getattr(outcome, unit)) for unit in UNITS),
        outcome.gradients,
        _number(outcome.mean_staleness),
        max(outcome.staleness, default=0),
        *(_number(outcome.time.get(name, 0.0)) for name in TIMES),
        outcome.bytes_sent,
        outcome.restarts,
        " ".join(outcome.findings),
    ]


def curves_csv(result: StudyResult) -> str:
    """Return a line for each value of the metric in the runs that are evaluated."""
    lines = [
        [
            row.cluster,
            row.contender.name,
            seed,
            _number(each.seconds),
            each.updates,
            each.samples,
            _number(each.value),
        ]
        for row in result.rows
        for seed, outcome in row.outcomes.items()
        for each in outcome.curve
    ]
    return _csv([["cluster", "model", "seed", *UNITS, result.study.target.metric], *lines])


def keys_of(result: StudyResult) -> list[str]:
    """Return the names of all hyper-parameters in grids."""
    points = (contender.points[0] for contender in result.study.contenders)
    return list(dict.fromkeys(key for point in points for key, _ in point))


def _number(value: float) -> str:
    """Return a number with up to seven significant digits.

    >>> _number(0.1 + 0.2), _number(12345678.9), _number(3)
    ('0.3', '12345680', '3')
    """
    if isinstance(value, int):
        return str(value)
    text = f"{value:.7g}"
    return f"{float(text):.0f}" if "e+" in text else text


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def value_text(value: float) -> str:
    """Return a number with three significant digits; "never" if it is infinite.

    >>> value_text(12.345), value_text(99.96), value_text(1234.5), value_text(math.inf)
    ('12.3', '100', '1234', 'never')
    """
    if math.isinf(value):
        return "never"
    if math.isnan(value):
        return "unknown"
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def interval_text(estimate: Estimate) -> str:
    """Return an estimate with its interval: "12.3 [11.0, 14.1]". An upper end that is not known is "never"."""
    if math.isnan(estimate.low) or (estimate.low == 0.0 and math.isinf(estimate.high)):
        return value_text(estimate.value)
    return f"{value_text(estimate.value)} [{value_text(estimate.low)}, {value_text(estimate.high)}]"


def whole_percent(share: float) -> str:
    """Return a share as a percentage: "12 %"."""
    return f"{100 * share:.0f} %"


COLUMNS = ("model", "seconds to target", "ratio", "reached", "final {metric}", "staleness", "waiting")


def table_tex(result: StudyResult) -> str:
    """Return a table in LaTeX, for a paper that uses the package booktabs. Each cluster is a block of rows.

    A dagger marks a significant difference from the reference after Holm's correction. A model is bold if no other
    model on its cluster is both sooner at the target and better in the final value.
    """
    study = result.study
    keys = keys_of(result)
    columns = [each.format(metric=study.target.metric) for each in COLUMNS]
    columns[1:1] = keys
    lines = [
        "% The package booktabs is required.",
        "% Bold: no other model on the cluster is sooner at the target and ends with a better value.",
        "% Dagger: significantly different from the reference after Holm's correction.",
        f"% Brackets: {CONFIDENCE:.0%} intervals.",
        r"\begin{tabular}{l" + "r" * (len(columns) - 1) + "}",
        r"\toprule",
        " & ".join(map(_escaped, columns)) + r" \\",
    ]
    for cluster in study.clusters:
        rows = result.of_cluster(cluster)
        if rows:
            target = f"target {value_text(rows[0].target)}"
            lines += [
                r"\midrule",
                rf"\multicolumn{{{len(columns)}}}{{l}}{{\emph{{{_escaped(cluster)}}}, {_escaped(target)}}} \\",
                *(_row_tex(row, keys) for row in rows),
            ]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _row_tex(row: StudyRow, keys: Sequence[str]) -> str:
    name, *cells = _cells(row, keys, "--", "/")
    shown = [rf"\textbf{{{_escaped(name)}}}" if row.front else _escaped(name)]
    shown += [_escaped(cell).replace(MARK, r"$^\dagger$") for cell in cells]
    return " & ".join(shown) + r" \\"


SPECIAL = {letter: rf"\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
}
"""Character that LaTeX does not show as it is -> how LaTeX shows this character."""


def _escaped(text: str) -> str:
    """Return text in which LaTeX's special characters stand for themselves.

    >>> _escaped("pause_s=50 %"), _escaped("bsp|asp")
    ('pause\\\\_s=50 \\\\%', 'bsp\\\\textbar{}asp')
    """
    return "".join(SPECIAL.get(letter, letter) for letter in text)
