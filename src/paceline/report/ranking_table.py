"""A table and pictures that compare sync models on one cluster: speed, staleness, and the workers' use of time."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from rich.table import Table

from .canvas import new_figure
from .colors_of_time import COMPUTING, OUTSIDE, TRANSFER, WAITING, WASTED
from .names import wrappable
from .runs_table import runs_table
from .speed import speed_unit
from .styles_of_models import styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Ranked", "ranking_picture", "ranking_table", "sweep_picture"]

LABEL_COLUMNS = 36  # a longer name of a sync model is wrapped
NOTE_COLUMNS = 160
NEAR_X, NEAR_Y = 0.06, 0.045  # points that are nearer than this, as shares of the axes, have one label


class Ranked(Protocol):
    """The results shown for one sync model in the table and pictures. See `paceline.rehearsal.ranking.Figures`."""

    @property
    def name(self) -> str: ...
    @property
    def speed(self) -> float: ...
    @property
    def samples_per_s(self) -> float: ...
    @property
    def epoch_s(self) -> float | None: ...
    @property
    def mean_staleness(self) -> float: ...
    @property
    def max_staleness(self) -> int: ...
    @property
    def computing_share(self) -> float: ...
    @property
    def waiting_share(self) -> float: ...
    @property
    def transfer_share(self) -> float: ...
    @property
    def wasted_share(self) -> float: ...
    @property
    def outside_share(self) -> float: ...
    @property
    def delayed_share(self) -> float: ...
    @property
    def failure(self) -> str: ...
    @property
    def sound(self) -> bool: ...
    @property
    def front(self) -> bool: ...


COLUMNS: dict[str, Callable[[Ranked], str]] = {
    "s per\nepoch": lambda row: f"{row.epoch_s:.4g}",
    "{unit}\nper s": lambda row: f"{row.speed:.4g}",
    "staleness\n(updates)\nmean, max": lambda row: f"{row.mean_staleness:.1f}, {row.max_staleness}",
    "time\nwaited": lambda row: f"{row.waiting_share:.1%}",
    "time in\ntransit": lambda row: f"{row.transfer_share:.1%}",
    "time\nwasted": lambda row: f"{row.wasted_share:.1%}",
    "pulls\ndelayed": lambda row: f"{row.delayed_share:.1%}",
}
EPOCH, SPEED, STALENESS, WAITED, TRANSIT, WASTED_TIME, DELAYED = COLUMNS
WITH_DATA = (EPOCH, SPEED, STALENESS, WAITED, TRANSIT, WASTED_TIME)
WITHOUT_DATA = (SPEED, STALENESS, WAITED, TRANSIT, WASTED_TIME, DELAYED)
EXPENDABLE = (DELAYED, WASTED_TIME, TRANSIT, WAITED)  # the least important one first

UNSOUND = "!: this model is not recommended, for the reason below"


def ranking_table(title: str, rows: Sequence[Ranked], caption: str, width: int = 80) -> Table:
    """Return a table with one row per model, in the given order, that fits into `width` columns of a screen.

    A "*" marks each row whose `front` is True, and a "!" each row that is not `sound`.
    """
    if not all(row.sound for row in rows):
        caption += f"\n{UNSOUND}"
    unit = _unit(rows)
    has_data = all(row.epoch_s is not None for row in rows if not row.failure)
    return runs_table(
        [f"{'*' if row.front else ' ' if row.sound else '!'} {wrappable(row.name)}" for row in rows],
        {
            heading.format(unit=unit): ["-" if row.failure else COLUMNS[heading](row) for row in rows]
            for heading in (WITH_DATA if has_data else WITHOUT_DATA)
        },
        # The speed follows from the time per epoch.
        expendable=(*EXPENDABLE, SPEED.format(unit=unit)) if has_data else EXPENDABLE,
        width=width,
        title=title,
        caption=caption,
    )


def ranking_picture(title: str, note: str, rows: Sequence[Ranked]) -> Figure:
    """On the left, plot speed against staleness; on the right, plot how the workers spent their time.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    lines = textwrap.wrap(note, NOTE_COLUMNS)
    height_inches = 1.4 + 0.2 * len(lines) + 0.42 * max(7, len(rows))
    figure = new_figure(12.0, height_inches)
    figure.suptitle(title + "\n" * len(lines), fontsize=13, fontweight="bold")
    figure.text(0.5, 1 - 0.3 / height_inches, "\n".join(lines), ha="center", va="top", fontsize=9.5)
    scatter, bars = figure.subplots(1, 2)
    _draw_scatter(scatter, rows)
    _draw_bars(bars, rows)
    return figure


def sweep_picture(title: str, key: str, lines: Mapping[str, Sequence[tuple[float, Ranked]]]) -> Figure:
    """Plot speed, staleness and waiting time against a parameter, with one line per sync model."""
    figure = new_figure(12.0, 4.2)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    styles = styles_of(lines)
    shown: dict[str, Callable[[Ranked], float]] = {
        "gradients per second": lambda row: row.speed,
        "mean staleness, in updates": lambda row: row.mean_staleness,
        "share of the workers' time spent waiting": lambda row: row.waiting_share,
    }
    for axes, (label, value_of) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for name, points in lines.items():
            axes.plot(
                [value for value, _ in points],
                [value_of(row) for _, row in points],
                marker="o",
                color=styles[name].color,
                linestyle=styles[name].dashes,
                label=name,
            )
        axes.set_xlabel(key)
        axes.set_title(label, fontsize=10)
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if label.startswith("share"):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        values = [value for points in lines.values() for value, _ in points]
        if min(values) > 0 and max(values) / min(values) > 20:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(values)), [f"{value:g}" for value in sorted(set(values))], fontsize=8)
            axes.minorticks_off()
    figure.axes[0].legend(frameon=False, fontsize=9)
    return figure


def _draw_scatter(axes: Axes, rows: Sequence[Ranked]) -> None:
    front = sorted((row for row in rows if row.front), key=lambda row: row.mean_staleness)
    axes.plot(
        [row.mean_staleness for row in front],
        [row.speed for row in front],
        color="#BBBBBB",
        zorder=1,
    )
    styles = styles_of(row.name for row in rows)
    for row in rows:
        color = styles[row.name].color
        axes.scatter(
            row.mean_staleness,
            row.speed,
            s=45,
            color=color if row.front else "white",
            edgecolor=color,
            linestyle="-" if row.front else styles[row.name].dashes,
            zorder=2,
        )
    for numbers, place in _labels([(row.mean_staleness, row.speed) for row in rows]):
        axes.annotate(
            ", ".join(map(str, numbers)),
            place,
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            fontweight="bold",
            zorder=3,
        )
    axes.set_xlabel("mean staleness, in updates (lower is fresher)")
    axes.set_ylabel(f"{_unit(rows)} per second (higher is faster)")
    axes.margins(x=0.08, y=0.1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title("filled: no other model is both faster and fresher", fontsize=9.5)


def _labels(points: Sequence[tuple[float, float]]) -> list[tuple[list[int], tuple[float, float]]]:
    """Return the numbers of neighboring points, counted from 1, and the place of their label: above the highest one.

    >>> _labels([(0.0, 1.0), (5.0, 4.0), (5.1, 4.1)])
    [([1], (0.0, 1.0)), ([2, 3], (5.05, 4.1))]
    """
    places_x = [x for x, _ in points]
    width, height = max(places_x) - min(places_x), max(y for _, y in points)  # the vertical axis begins at 0
    groups: list[list[int]] = []
    for index, (x, y) in enumerate(points):
        near = [
            group
            for group in groups
            if any(
                abs(x - points[other][0]) <= NEAR_X * width and abs(y - points[other][1]) <= NEAR_Y * height
                for other in group
            )
        ]
        groups = [group for group in groups if group not in near]
        groups.append(sorted([index, *(other for group in near for other in group)]))
    return [
        (
            [index + 1 for index in group],
            (fmean(points[index][0] for index in group), max(points[index][1] for index in group)),
        )
        for group in groups
    ]


def _draw_bars(axes: Axes, rows: Sequence[Ranked]) -> None:
    parts: dict[str, tuple[str, Callable[[Ranked], float]]] = {
        "computing": (COMPUTING, lambda row: row.computing_share),
        "transferring data": (TRANSFER, lambda row: row.transfer_share),
        "aborted or lost computations": (WASTED, lambda row: row.wasted_share),
        "waiting": (WAITING, lambda row: row.waiting_share),
        "outside of training": (OUTSIDE, lambda row: row.outside_share),
    }
    positions = range(len(rows))
    left = [0.0] * len(rows)
    for label, (color, share_of) in parts.items():
        shares = [share_of(row) for row in rows]
        if label == "outside of training" and not any(shares):
            continue  # most simulations have no script
        axes.barh(positions, shares, left=left, color=color, label=label, height=0.72)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    axes.set_yticks(
        positions,
        [
            textwrap.fill(f"{number}  {wrappable(row.name)}", LABEL_COLUMNS)
            for number, row in enumerate(rows, start=1)
        ],
        fontsize=8.5,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the workers' time")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8.5)


def _unit(rows: Sequence[Ranked]) -> str:
    return speed_unit([row.samples_per_s for row in rows if row.sound] or [0.0])
