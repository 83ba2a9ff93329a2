"""The figures of a study. A model has the same color and dashes in every figure, and in all other pictures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..look.models import Style, styles_of
from ..look.timelines import new_figure
from ..words import COLOR_OF
from .cells import UNITS, Outcome
from .results import StudyResult, StudyRow
from .statistics import CONFIDENCE, band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


PANEL_INCHES = 3.4
MOST_COLUMNS = 3
PLACES = 80
"""Number of segments in which a curve and its interval are drawn."""

SMALL, TINY = 8.0, 7.0
"""Font sizes in points."""

WIDEST = 28
"""Largest number of characters in a line, if the name of a model is divided into lines."""

LINE_INCHES = 0.17
"""Height of a line of a legend."""

AXES = {"seconds": "virtual seconds", "updates": "updates", "samples": "samples of all workers"}


class Drawing(NamedTuple):
    """The styles and the metric with which the models of a study are drawn.

    Attributes:
        styles: name of the model -> its style.
        metric: the metric of the target.
        higher_is_better: True if larger values are better.
    """

    styles: Mapping[str, Style]
    metric: str
    higher_is_better: bool


def pictures_of(result: StudyResult) -> dict[str, Figure]:
    """Return the figures by the names of their files, without endings.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    return {name: draw() for name, draw in _drawings(result).items()}


def names_of(result: StudyResult) -> list[str]:
    """Return the names of the figures without drawing them."""
    return list(_drawings(result))


def _drawings(result: StudyResult) -> dict[str, Callable[[], Figure]]:
    """Return a function for each figure that draws it."""
    study = result.study
    drawn = styles_of(contender.style for contender in study.contenders)
    drawing = Drawing(
        {contender.name: drawn[contender.style] for contender in study.contenders},
        study.target.metric,
        study.target.higher_is_better,
    )
    metric = re.sub(r"[^\w.-]+", "-", drawing.metric)
    drawings: dict[str, Callable[[], Figure]] = {
        f"{metric}-over-{unit}": partial(_over, result, drawing, unit)
        for unit in UNITS
        if any(getattr(each, unit) for row in result.rows for each in row.outcomes.values())
    }
    drawings["time-to-target"] = partial(_times, result, drawing)
    drawings[f"{metric}-and-time"] = partial(_front, result, drawing)
    drawings["staleness"] = partial(_staleness, result, drawing)
    drawings["time-of-workers"] = partial(_time_of_workers, result)
    if axis := _axis(result):
        drawings["tuning"] = partial(_tuning, result, drawing, axis)
    return drawings


def _panels(result: StudyResult, height_inches: float, **options: Any) -> tuple[Figure, dict[str, Axes]]:
    """Return a figure with a panel for each cluster that has results."""
    clusters = [cluster for cluster in result.study.clusters if result.of_cluster(cluster)]
    columns = min(MOST_COLUMNS, max(1, len(clusters)))
    rows = -(-len(clusters) // columns) or 1
    figure = new_figure(PANEL_INCHES * max(columns, 1.5), height_inches * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False, **options).flatten()
    for axes in grid[len(clusters) :]:
        axes.remove()
    panels = dict(zip(clusters, grid, strict=False))
    for cluster, axes in panels.items():
        axes.set_title(f"{cluster} ({result.study.clusters[cluster].workers} workers)", fontsize=9)
        axes.tick_params(labelsize=SMALL)
    return figure, panels


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put one legend for all panels below them. The figure becomes higher if the legend has more than two lines."""
    widest = max((len(line) for label in labels for line in label.splitlines()), default=1)
    width_inches, height_inches = figure.get_size_inches()
    columns = max(1, min(len(labels), int(width_inches / (0.65 + 0.058 * widest))))
    lines = -(-sum(1 + label.count("\n") for label in labels) // columns)
    figure.set_size_inches(width_inches, height_inches + LINE_INCHES * max(0, lines - 2))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        handlelength=2.6,
    )


def _in_lines(name: str) -> str:
    """Return the name of a model in at most two lines.

    >>> print(_in_lines("pssp:staleness=3,probability=0.1"))
    pssp:staleness=3,
    probability=0.1
    """
    lines = [""]
    for part in re.findall(r"[^ ,:@]*[ ,:@]*", name) if len(name) > WIDEST else [name]:
        if lines[-1] and len(lines[-1] + part) > WIDEST:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines[:2]) + "..." * (len(lines) > 2)


def _over(result: StudyResult, drawing: Drawing, unit: str) -> Figure:
    """Draw the mean of the metric over seconds, updates or samples, with its interval as a band."""
    figure, panels = _panels(result, 2.7)
    handles: dict[str, Any] = {}
    for cluster, axes in panels.items():
        means: list[float] = []
        for row in result.of_cluster(cluster):
            curves = [each.points(unit) for each in row.outcomes.values() if each.curve]
            if not curves:
                continue
            first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
            found = band(curves, [first + (last - first) * step / PLACES for step in range(PLACES + 1)])
            style, x = drawing.styles[row.contender.name], [place for place, _ in found]
            means += [each.value for _, each in found]
            [handles[row.contender.name]] = axes.plot(
                x, [each.value for _, each in found], color=style.color, linestyle=style.dashes, linewidth=1.4
            )
            axes.fill_between(
                x,
                [each.low for _, each in found],
                [each.high for _, each in found],
                color=style.color,
                alpha=0.15,
                linewidth=0,
            )
        _scale(axes, means, drawing)
        target = _target_line(axes, result.of_cluster(cluster)[0].target)
        axes.set_xlim(left=0)
        axes.set_xlabel(AXES[unit], fontsize=SMALL)
        axes.grid(alpha=0.25, linewidth=0.6)
    _label_first(panels, drawing.metric)
    ordered = [each.name for each in result.study.contenders if each.name in handles]
    _legend(figure, [*(handles[name] for name in ordered), target], [*map(_in_lines, ordered), "target"])
    seeds = len(result.study.seeds)
    if seeds > 1:
        figure.suptitle(f"mean over {seeds} seeds, with its {CONFIDENCE:.0%} interval", fontsize=9)
    return figure


def _scale(axes: Axes, means: Sequence[float], drawing: Drawing) -> None:
    """Limit the axis of the metric to the values at which the curves differ, without the worst tenth of the values."""
    finite = sorted(value for value in means if math.isfinite(value))
    if not finite:
        return
    low, high = finite[0], finite[-1]
    if not drawing.higher_is_better and low > 0 and high > 20 * low:
        axes.set_yscale("log")
        _label_decades(axes.yaxis)
        return
    cut = finite[len(finite) // 10] if drawing.higher_is_better else finite[-1 - len(finite) // 10]
    low, high = (cut, high) if drawing.higher_is_better else (low, cut)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _target_line(axes: Axes, target: float) -> Any:
    """Draw the target, and return its line for the legend."""
    return axes.axhline(target, color="#555555", linewidth=1.0, linestyle=":", zorder=1)


def _label_decades(axis: Axis) -> None:
    """Label 1, 2 and 5 in each decade of a logarithmic axis. With one decade, Matplotlib's own labels overlap."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _label_first(panels: Mapping[str, Axes], label: str) -> None:
    """Label the vertical axis of the panels at the left."""
    for index, axes in enumerate(panels.values()):
        if index % MOST_COLUMNS == 0:
            axes.set_ylabel(label, fontsize=SMALL)


def _times(result: StudyResult, drawing: Drawing) -> Figure:
    """Draw the seconds to the target: each run, and the typical time with its interval."""
    from matplotlib.lines import Line2D

    names = [contender.name for contender in result.study.contenders]
    figure, panels = _panels(result, 0.9 + 0.27 * len(names))
    for index, (cluster, axes) in enumerate(panels.items()):
        rows = {row.contender.name: row for row in result.of_cluster(cluster)}
        shown = [time.value for row in rows.values() for time in row.times["seconds"]]
        upper = [row.time["seconds"].high for row in rows.values()]
        right = 1.08 * max(*shown, *(high for high in upper if high <= 1.6 * max(shown)), 0.0)
        for place, name in enumerate(names):
            if name in rows:
                _draw_times(axes, rows[name], place, right, drawing.styles[name].color)
        _name_rows(axes, names, index)
        if min(shown) > 0 and right > 12 * min(shown):
            axes.set_xscale("log")
            _label_decades(axes.xaxis)
            axes.set_xlim(0.8 * min(shown), right)
        else:
            axes.set_xlim(0, right)
        axes.set_xlabel("virtual seconds to the target", fontsize=SMALL)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    handles = [
        Line2D([], [], color="#444444", marker="o", markersize=6, linewidth=2),
        Line2D([], [], color="#444444", marker="o", markersize=3.5, linestyle="none", markerfacecolor="none"),
        Line2D([], [], color="#444444", marker=">", markersize=5, linestyle="none", markerfacecolor="none"),
    ]
    labels = [f"typical time, {CONFIDENCE:.0%} interval", "a run", "a run that never reached the target"]
    _legend(figure, handles, labels)
    return figure


def _name_rows(axes: Axes, names: Sequence[str], panel: int) -> None:
    """Give each model a row, with its name in the panels at the left."""
    shown = [*map(_in_lines, names)] if panel % MOST_COLUMNS == 0 else [""] * len(names)
    axes.set_yticks(range(len(names)), shown)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _draw_times(axes: Axes, row: StudyRow, place: int, right: float, color: str) -> None:
    estimate = row.time["seconds"]
    low = estimate.low if math.isfinite(estimate.low) else estimate.value
    if math.isfinite(low) and not math.isnan(estimate.low):
        high = min(estimate.high, right)
        axes.plot(
            [min(low, right), high],
            [place, place],
            color=color,
            linewidth=2.2,
            solid_capstyle="butt",
            zorder=2,
        )
        if estimate.high > right:  # the interval goes on beyond the axis
            axes.plot([right], [place], color=color, marker=5, markersize=8, clip_on=False, zorder=3)
    if math.isfinite(estimate.value) and estimate.value <= right:
        axes.plot([estimate.value], [place], color=color, marker="o", markersize=6.5, zorder=4)
    for marker, size, reached in (("o", 3.5, True), (">", 5.0, False)):
        chosen = [time.value for time in row.times["seconds"] if time.reached is reached]
        axes.plot(
            chosen,
            [place + 0.28] * len(chosen),
            linestyle="none",
            marker=marker,
            markersize=size,
            markerfacecolor="none",
            markeredgecolor=color,
            markeredgewidth=0.9,
            zorder=3,
        )


def _front(result: StudyResult, drawing: Drawing) -> Figure:
    """Draw the final value over the time to the target, and join the points that are not dominated."""
    from matplotlib.lines import Line2D

    figure, panels = _panels(result, 2.9)
    for cluster, axes in panels.items():
        rows = result.of_cluster(cluster)
        ends = [time.end for row in rows for time in row.times["seconds"]]
        reached = [row for row in rows if math.isfinite(row.time["seconds"].value)]
        farthest = max([row.time["seconds"].value for row in reached] or ends)
        right = 1.05 * max(
            1.1 * farthest,
            *(high for row in reached if (high := row.time["seconds"].high) < 1.5 * farthest),
            0,
        )
        for row in rows:
            style = drawing.styles[row.contender.name]
            color = style.color
            time, final = row.time["seconds"], row.final
            never = not math.isfinite(time.value)
            x = right if never else time.value
            if not never and math.isfinite(time.low):
                axes.plot(
                    [time.low, min(time.high, right)],
                    [final.value] * 2,
                    color=color,
                    linewidth=1.1,
                    alpha=0.7,
                )
            if math.isfinite(final.low):
                axes.plot([x, x], [final.low, final.high], color=color, linewidth=1.1, alpha=0.7)
            axes.plot(
                [x],
                [final.value],
                marker=">" if never else style.marker,
                markersize=8 if row.front else 6,
                color=color,
                markerfacecolor=color if row.front else "white",
                markeredgewidth=1.4,
                clip_on=False,
                zorder=4,
            )
        front = sorted((row for row in reached if row.front), key=lambda row: row.time["seconds"].value)
        axes.plot(
            [row.time["seconds"].value for row in front],
            [row.final.value for row in front],
            color="#555555",
            linewidth=0.9,
            linestyle=(0, (4, 3)),
            drawstyle="steps-post",
            zorder=1,
        )
        target = _target_line(axes, rows[0].target)
        _scale_finals(axes, rows)
        axes.set_xlim(0, right)
        axes.set_xlabel("virtual seconds to the target", fontsize=SMALL)
        axes.grid(alpha=0.25, linewidth=0.6)
    _label_first(panels, f"final {drawing.metric}")
    handles = [
        Line2D([], [], color=style.color, marker=style.marker, linestyle="none", markersize=6)
        for style in (drawing.styles[each.name] for each in result.study.contenders)
    ]
    labels = [_in_lines(each.name) for each in result.study.contenders]
    handles.append(Line2D([], [], color="#555555", linewidth=0.9, linestyle=(0, (4, 3))))
    _legend(figure, [*handles, target], [*labels, "not dominated (filled)", "target"])
    return figure


def _scale_finals(axes: Axes, rows: Sequence[StudyRow]) -> None:
    """Let the axis show the final values. Include the target, unless the final values would then be squeezed."""
    found = [number for row in rows for number in (row.final.low, row.final.value, row.final.high)]
    finite = [number for number in found if math.isfinite(number)]
    if not finite:
        return
    low, high, target = min(finite), max(finite), rows[0].target
    if 2 * low - high <= target <= 2 * high - low:
        low, high = min(low, target), max(high, target)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _staleness(result: StudyResult, drawing: Drawing) -> Figure:
    """Draw a histogram of the staleness for each model and cluster."""
    clusters = [cluster for cluster in result.study.clusters if result.of_cluster(cluster)]
    names = [contender.name for contender in result.study.contenders]
    figure = new_figure(PANEL_INCHES * max(len(clusters), 1.5), 0.75 * len(names) + 0.8)
    grid = figure.subplots(len(names), len(clusters), squeeze=False, sharex="col")
    for column, cluster in enumerate(clusters):
        rows = {row.contender.name: row for row in result.of_cluster(cluster)}
        pooled = {name: _pooled(row.outcomes.values()) for name, row in rows.items()}
        most = max(_quantile(counts, 0.995) for counts in pooled.values())
        for line, name in enumerate(names):
            axes = grid[line][column]
            axes.tick_params(labelsize=TINY)
            axes.set_xlim(-0.7, most + 0.7)
            axes.set_yticks([])
            axes.xaxis.get_major_locator().set_params(integer=True)
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
            if column == 0:
                axes.set_ylabel(_in_lines(name), rotation=0, ha="right", va="center", fontsize=SMALL)
            if line == 0:
                axes.set_title(f"{cluster} ({result.study.clusters[cluster].workers} workers)", fontsize=9)
            if name not in rows:
                axes.text(0.5, 0.5, "failed", transform=axes.transAxes, ha="center", fontsize=TINY)
                continue
            counts = pooled[name]
            total = sum(counts.values())
            shown = {staleness: count / total for staleness, count in counts.items() if staleness <= most}
            axes.bar(list(shown), list(shown.values()), width=0.85, color=drawing.styles[name].color)
            axes.set_ylim(top=1.3 * max(shown.values()))  # with room for the text above the bars
            mean = sum(staleness * count for staleness, count in counts.items()) / total
            axes.text(
                0.99,
                0.98,
                f"mean {mean:.1f}, largest {max(counts)}",
                transform=axes.transAxes,
                ha="right",
                va="top",
                fontsize=TINY,
            )
        grid[-1][column].set_xlabel("staleness of a gradient in updates", fontsize=SMALL)
    return figure


def _pooled(outcomes: Sequence[Outcome] | Any) -> dict[int, int]:
    counts = Counter[int]()
    for outcome in outcomes:
        counts.update(outcome.staleness)
    return dict(sorted(counts.items())) or {0: 1}


def _quantile(counts: Mapping[int, int], share: float) -> int:
    left = share * sum(counts.values())
    for value, count in counts.items():
        left -= count
        if left <= 0:
            return value
    return max(counts)


def _time_of_workers(result: StudyResult) -> Figure:
    """Draw what the workers spent their time on, as stacked bars."""
    names = [contender.name for contender in result.study.contenders]
    figure, panels = _panels(result, 0.8 + 0.24 * len(names))
    kinds = [kind for kind in COLOR_OF if kind != "idle"]
    used: dict[str, Any] = {}
    for index, (cluster, axes) in enumerate(panels.items()):
        rows = {row.contender.name: row for row in result.of_cluster(cluster)}
        for place, name in enumerate(names):
            left = 0.0
            for kind in kinds if name in rows else ():
                share = fmean(outcome.time.get(kind, 0.0) for outcome in rows[name].outcomes.values())
                if share > 0.0005:
                    [used[kind]] = axes.barh([place], [share], left=left, height=0.7, color=COLOR_OF[kind])
                left += share
        _name_rows(axes, names, index)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("share of the workers' time", fontsize=SMALL)
    shown = [kind for kind in kinds if kind in used]
    _legend(figure, [used[kind] for kind in shown], shown)
    return figure


def _tuning(result: StudyResult, drawing: Drawing, axis: str) -> Figure:
    """Draw the median time to the target over the values of a hyper-parameter, and mark the choices.

    If not all values are numbers, they are drawn at equal distances.
    """
    values = _values(result)[axis]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    place_of = {value: float(value) if numeric else index for index, value in enumerate(values)}
    figure, panels = _panels(result, 2.7)
    handles: dict[str, Any] = {}
    for cluster, axes in panels.items():
        target = result.of_cluster(cluster)[0].target
        times = _tuned(result, cluster, axis, lambda o, t=target: _seconds(o, t, drawing))  # type: ignore[misc]
        finite = [s for found in times.values() for s in found.values() if math.isfinite(s)]
        never = 1.25 * max(finite, default=1.0)
        for name, found in times.items():
            style = drawing.styles[name]
            known = sorted(found, key=place_of.__getitem__)
            x = [place_of[value] for value in known]
            y = [min(found[value], never) for value in known]
            [handles[name]] = axes.plot(
                x, y, color=style.color, linestyle=style.dashes, linewidth=1.2, marker="o", markersize=3
            )
        for row in result.of_cluster(cluster):
            value: Any = dict(row.choice.point).get(axis)
            found = times.get(row.contender.name, {})
            if value in found:
                axes.plot(
                    [place_of[value]],
                    [min(found[value], never)],
                    marker="o",
                    markersize=9,
                    markerfacecolor="none",
                    markeredgewidth=1.3,
                    markeredgecolor=drawing.styles[row.contender.name].color,
                )
        shown = sorted({value for found in times.values() for value in found}, key=place_of.__getitem__)
        places = [place_of[value] for value in shown]
        if numeric and places and places[0] > 0 and places[-1] > 4 * places[0]:
            axes.set_xscale("log")
        axes.set_xticks(places, [f"{value:g}" if numeric else str(value) for value in shown], minor=False)
        axes.minorticks_off()
        axes.set_xlabel(axis, fontsize=SMALL)
        if finite and max(finite) > 12 * min(finite):
            axes.set_yscale("log")
            _label_decades(axes.yaxis)
        if any(math.isinf(s) for found in times.values() for s in found.values()):
            axes.axhline(never, color="#999999", linewidth=0.8, zorder=0)
            axes.set_ylim(top=1.1 * never)
            axes.annotate(
                "never",
                (0.02, never),
                (0, 2.5),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                va="bottom",
                fontsize=TINY,
                color="#666666",
            )
        axes.grid(alpha=0.25, linewidth=0.6)
    _label_first(panels, "virtual seconds to the target")
    ordered = [each.name for each in result.study.contenders if each.name in handles]
    _legend(figure, [handles[name] for name in ordered], [*map(_in_lines, ordered)])
    return figure


def _axis(result: StudyResult) -> str:
    """Return the hyper-parameter with the most values in the runs of the tuning; "" if there is none."""
    values = _values(result)
    return max(values, key=lambda key: len(values[key]), default="")


def _values(result: StudyResult) -> dict[str, list[Any]]:
    """Return the values of each hyper-parameter in the runs of the tuning, in the order of the grids."""
    values: dict[str, dict[Any, None]] = {}
    for cell, _ in result.tuning:
        for key, value in cell.point:
            values.setdefault(key, {})[value] = None
    return {key: list(found) for key, found in values.items()}


def _tuned(
    result: StudyResult, cluster: str, axis: str, seconds: Callable[[Outcome], float]
) -> dict[str, dict[Any, float]]:
    """Return model -> value of `axis` -> the median seconds, with the best choice of the other hyper-parameters.

    Models without this hyper-parameter are left out. A run that has failed counts as never reaching the target.
    """
    found: dict[str, dict[Any, dict[Any, list[float]]]] = {}
    for cell, outcome in result.tuning:
        point = dict(cell.point)
        if cell.cluster == cluster and axis in point:
            by_value = found.setdefault(cell.contender, {}).setdefault(point[axis], {})
            by_value.setdefault(cell.point, []).append(seconds(outcome))
    count = len(result.study.tuning_seeds)

    def median_s(ended_s: list[float]) -> float:
        return median([*ended_s, *[math.inf] * (count - len(ended_s))])

    return {
        name: {value: min(map(median_s, by_point.values())) for value, by_point in by_value.items()}
        for name, by_value in found.items()
    }


def _seconds(outcome: Outcome, target: float, drawing: Drawing) -> float:
    return outcome.reaches("seconds", target, higher_is_better=drawing.higher_is_better)
