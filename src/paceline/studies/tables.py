"""The tables of a study: `runs.csv` and `curves.csv` for programs, and `table.tex` for a paper."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .cells import UNITS, Cell, Outcome
from .curves import crossing
from .results import Row, StudyResult
from .statistics import CONFIDENCE, Estimate

__all__ = [
    "curves_csv",
    "interval_text",
    "keys_of",
    "runs_csv",
    "table_tex",
    "value_text",
    "whole_percent",
]

TIMES = ("computing", "loading", "waiting", "transfer", "wasted", "paused", "outside")


def runs_csv(result: StudyResult) -> str:
    """Return a line for each run: what it was, when it reached the target, and how it went."""
    keys = keys_of(result)
    metric = result.study.target.metric
    header = ["cluster", "model", "purpose", "seed", *keys, "reached"]
    header += [f"{unit}_to_target" for unit in UNITS]
    header += [f"final_{metric}", *UNITS, "gradients", "mean_staleness", "max_staleness"]
    header += [f"{name}_share" for name in TIMES] + ["bytes_sent", "restarts", "findings"]
    targets = {row.cluster: row.target for row in result.rows}
    lines = [
        _run(result, cell, outcome, "tuning", keys, targets.get(cell.cluster, math.nan))
        for cell, outcome in result.tuning
    ]
    lines += [
        _run(
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


def _run(
    result: StudyResult, cell: Cell, outcome: Outcome, purpose: str, keys: Sequence[str], target: float
) -> list[Any]:
    higher = result.study.target.higher_is_better
    values = dict(cell.point)
    reached = [crossing(outcome.points(unit), target, higher_is_better=higher) for unit in UNITS]
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

    >>> value_text(12.345), value_text(1234.5), value_text(math.inf)
    ('12.3', '1234', 'never')
    """
    if math.isinf(value):
        return "never"
    if math.isnan(value):
        return "unknown"
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def interval_text(estimate: Estimate) -> str:
    """Return an estimate with its interval: "12.3 [11.0, 14.1]". An upper end that is not known is "never"."""
    if math.isnan(estimate.low) or (estimate.low == 0.0 and math.isinf(estimate.high)):
        return value_text(estimate.value)
    return f"{value_text(estimate.value)} [{value_text(estimate.low)}, {value_text(estimate.high)}]"


def whole_percent(share: float) -> str:
    """Return a share as a percentage: "12 %"."""
    return f"{100 * share:.0f} %"


COLUMNS = (
    "model",
    "seconds to target",
    "ratio",
    "reached",
    "final {metric}",
    "staleness",
    "waiting",
)


def table_tex(result: StudyResult) -> str:
    """Return a table for a paper, which needs the package booktabs. Each cluster is a block of rows.

    A dagger marks what differs from the reference after Holm's correction, and bold what no other model on this
    cluster surpasses in time to target and in the final value together.
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
                *(_row_tex(row, keys, study.reference) for row in rows),
            ]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _row_tex(row: Row, keys: Sequence[str], reference: str) -> str:
    values = dict(row.choice.point)
    name = _escaped(row.contender.name)
    cells = [
        rf"\textbf{{{name}}}" if row.front else name,
        *(_escaped(str(values.get(key, "--"))) for key in keys),
        interval_text(row.time["seconds"]),
        "1" if row.ratio is None else interval_text(Estimate(*row.ratio[:3])) + _dagger(row.ratio_p),
        f"{row.reached}/{len(row.outcomes)}",
        interval_text(row.final) + (_dagger(row.lead_p) if row.lead is not None else ""),
        value_text(_mean_staleness(row)),
        whole_percent(_share(row, "waiting")).replace("%", r"\%"),
    ]
    return " & ".join(cells) + r" \\"


def _dagger(p: float) -> str:
    return r"$^\dagger$" if p <= 1 - CONFIDENCE else ""


def _mean_staleness(row: Row) -> float:
    return sum(each.mean_staleness for each in row.outcomes.values()) / len(row.outcomes)


def _share(row: Row, name: str) -> float:
    return sum(each.time.get(name, 0.0) for each in row.outcomes.values()) / len(row.outcomes)


def _escaped(text: str) -> str:
    """Return text in which LaTeX's special characters stand for themselves.

    >>> _escaped("pause_s=50 %")
    'pause\\\\_s=50 \\\\%'
    """
    return "".join(rf"\{letter}" if letter in "&%$#_{}" else letter for letter in text)
