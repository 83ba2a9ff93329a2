"""Tables in the terminal, and tables and pictures that compare sync models or runs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..words import COMPUTING, OUTSIDE, TRANSFER, WAITING, WASTED, run_name, shortened, wrappable
from .models import styles_of
from .summary import speed_unit
from .timelines import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LABEL_COLUMNS = 36  # a longer name of a sync model is wrapped
NOTE_COLUMNS = 160
NEAR_X, NEAR_Y = 0.06, 0.045  # points that are nearer than these shares of the axes have a common label


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one simulation. All shares are numbers from 0 to 1.

    Attributes:
        sync: sync model.
        batch: sizes of the workers' batches.
        until_s: virtual seconds that were simulated.
        finished_s: virtual time at which workers finished their last iteration, averaged over the workers.
        gradients_per_s: number of applied pushes of all workers per virtual second.
        updates_per_s: optimizer steps per virtual second. Under BSP, one step applies all gradients of a round, so
            compare models by `speed` instead.
        samples_per_s: number of samples per virtual second from which applied gradients were computed; 0.0 if the
            simulation had no data.
        epoch_s: virtual time per epoch, in seconds; None if the simulation had no data.
        mean_staleness: mean staleness of the gradients, in updates.
        max_staleness: largest staleness of a gradient, in updates.
        computing_share: share of the workers' time spent computing gradients that were pushed.
        waiting_share: share of the workers' time spent waiting for other workers.
        transfer_share: share of the workers' time in which messages were on their way.
        wasted_share: share of the workers' time spent on computations that were aborted or lost, and on the pulls
            after aborts.
        outside_share: share of the workers' time in which their scripts did not train, for example in a barrier.
        delayed_share: pulls that were not answered on arrival, as a share of all pulls.
        sync_cost_s: c_sync, the sum over the barriers of the longest waiting time of a worker, in virtual seconds.
        predicted_sync_cost_s: the value of this sum that the plans predicted; None if the model plans no barriers.
        restarts: number of computations that were aborted and restarted.
        bytes_sent: bytes sent by all processes.
        faults: descriptions of the user-defined conditions that failed, and of the models with which the shards
            continued. If the list is not empty, the results are not those of `sync` alone.
        failure: why there are no results, with the lines of the model's code that failed; all numbers are then 0. ""
            if there are results.
        unapplied: sentence about pushes that were never applied; "" if there are none. See `trace.measures`.
        front: True if the model can be recommended, and every other model that can be recommended is slower, has a
            higher staleness, or is equal in both.
    """

    sync: str
    batch: Literal["equal", "balanced"] = "equal"
    until_s: float = 0.0
    finished_s: float = 0.0
    gradients_per_s: float = 0.0
    updates_per_s: float = 0.0
    samples_per_s: float = 0.0
    epoch_s: float | None = None
    mean_staleness: float = 0.0
    max_staleness: int = 0
    computing_share: float = 0.0
    waiting_share: float = 0.0
    transfer_share: float = 0.0
    wasted_share: float = 0.0
    outside_share: float = 0.0
    delayed_share: float = 0.0
    sync_cost_s: float = 0.0
    predicted_sync_cost_s: float | None = None
    restarts: int = 0
    bytes_sent: int = 0
    faults: list[str] = []
    failure: str = ""
    unapplied: str = ""
    front: bool = False

    @property
    def sound(self) -> bool:
        """True if the model can be recommended: nothing failed, and no pushes are missing from the updates."""
        return not (self.failure or self.unapplied or self.faults)

    @property
    def name(self) -> str:
        """The sync model, and the sizes of the batches if they are balanced."""
        return run_name(self.sync, self.batch)

    @property
    def speed(self) -> float:
        """Samples per second if they are known, else gradients per second."""
        return self.samples_per_s or self.gradients_per_s


COLUMNS: dict[str, Callable[[Figures], str]] = {
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
EXPENDABLE = (DELAYED, WASTED_TIME, TRANSIT, WAITED)  # the least important column first

UNSOUND = "!: this model is not recommended, for the reason below"


def ranking_table(title: str, rows: Sequence[Figures], caption: str, width: int = 80) -> Table:
    """Return a table that fits into `width` columns of a screen, with one row per model, in the given order.

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
        # The speed follows from the time per epoch, so the column of the speed may be left out.
        expendable=(*EXPENDABLE, SPEED.format(unit=unit)) if has_data else EXPENDABLE,
        width=width,
        title=title,
        caption=caption,
    )


def ranking_picture(title: str, note: str, rows: Sequence[Figures]) -> Figure:
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


def sweep_picture(title: str, key: str, lines: Mapping[str, Sequence[tuple[float, Figures]]]) -> Figure:
    """Plot speed, staleness and waiting time against a parameter, with one line per sync model."""
    figure = new_figure(12.0, 4.2)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    styles = styles_of(lines)
    shown: dict[str, Callable[[Figures], float]] = {
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


def _draw_scatter(axes: Axes, rows: Sequence[Figures]) -> None:
    front = sorted((row for row in rows if row.front), key=lambda row: row.mean_staleness)
    axes.plot([row.mean_staleness for row in front], [row.speed for row in front], color="#BBBBBB", zorder=1)
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
    """Group near points. For each group, return the numbers of its points, counted from 1, and the place of its label.

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


def _draw_bars(axes: Axes, rows: Sequence[Figures]) -> None:
    parts: dict[str, tuple[str, Callable[[Figures], float]]] = {
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


def _unit(rows: Sequence[Figures]) -> str:
    return speed_unit([row.samples_per_s for row in rows if row.sound] or [0.0])


# -- A table that compares the results of runs, with one row per sync model ----------------------------------


class TrialOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of training under one sync model: the result of one run, or the medians of several runs.

    Attributes:
        sync: the sync model, in the notation of the command line.
        batch: sizes of the workers' batches: "equal" or "balanced".
        hyperparameters: "translated" if the learning rate and momentum are those of a joint batch, else "raw".
        learning_rate: learning rate of the runs.
        momentum: momentum of the runs.
        seeds: random seeds for the runs.
        target_accuracy: target accuracy on the test images, from 0 to 1.
        time_to_target_s: time at which the accuracy was at or above the target in two evaluations in a row, in
            seconds since training began; None if this never happened.
        final_accuracy: accuracy of the final weights on the test images, from 0 to 1.
        updates_per_s: optimizer steps per second. Updates under different models contain different numbers of
            gradients, so the table compares the samples or gradients per second.
        gradients_per_s: gradients per second, of all workers together.
        samples_per_s: samples per second, of all workers together; 0 if the number of samples is unknown.
        waiting_share: fraction of the workers' total time that was spent waiting, from 0 to 1.
        mean_staleness: mean staleness over all pushes and shards, in updates.
        max_staleness: largest staleness of any push at any shard in any run, in updates.
        delayed_share: fraction of pulls that were delayed, from 0 to 1; a pull counts once for each shard.
        restarts: number of computations that were aborted and restarted.
        wasted_share: fraction of the workers' total time spent on aborted computations, and on the pulls after
            aborts.
        emulated: description of how the runs emulated unequal machines; "" if the runs emulated nothing.
    """

    sync: str
    batch: str = "equal"
    hyperparameters: str = "raw"
    learning_rate: float
    momentum: float
    seeds: tuple[int, ...]
    target_accuracy: float
    time_to_target_s: float | None
    final_accuracy: float
    updates_per_s: float
    gradients_per_s: float
    samples_per_s: float
    waiting_share: float
    mean_staleness: float
    max_staleness: int
    delayed_share: float = 0.0
    restarts: float = 0
    wasted_share: float = 0.0
    emulated: str

    @property
    def name(self) -> str:
        """The sync model, with its kinds of batches and hyper-parameters unless these are the usual ones."""
        return run_name(self.sync, self.batch, self.hyperparameters)


def medians(outcomes: Sequence[TrialOutcome]) -> TrialOutcome:
    """Combine the outcomes of runs with the same settings: take medians, but the maximum of `max_staleness`."""
    first = outcomes[0]
    time_s = median(math.inf if o.time_to_target_s is None else o.time_to_target_s for o in outcomes)
    means = (
        "final_accuracy",
        "updates_per_s",
        "gradients_per_s",
        "samples_per_s",
        "waiting_share",
        "mean_staleness",
    )
    return msgspec.structs.replace(
        first,
        seeds=tuple(seed for outcome in outcomes for seed in outcome.seeds),
        time_to_target_s=time_s if math.isfinite(time_s) else None,
        max_staleness=max(outcome.max_staleness for outcome in outcomes),
        **{
            name: median(getattr(outcome, name) for outcome in outcomes)
            for name in (*means, "delayed_share", "restarts", "wasted_share")
        },
    )


def comparison_table(outcomes: Sequence[TrialOutcome], *, every: bool = False, width: int = 80) -> Table:
    """Return a table that fits into `width` columns of a screen, with one row per outcome.

    The caption describes the seeds and the emulation of unequal machines. If `every` is True, the table has columns
    for delayed pulls and aborted computations instead of the learning rate, the momentum and the speed.
    """
    first = outcomes[0]
    unit = speed_unit(outcome.samples_per_s for outcome in outcomes)
    runs = f"medians of {len(first.seeds)} seeds" if len(first.seeds) > 1 else f"seed {first.seeds[0]}"
    rates, speed, waited = "rate,\nmomentum", f"{unit}\nper s", "time\nwaited"
    staleness, delayed, wasted = "staleness\n(updates)\nmean, max", "pulls\ndelayed", "aborts,\nwasted"
    columns: dict[str, Callable[[TrialOutcome], str]] = {
        rates: lambda o: f"{o.learning_rate:g}, {o.momentum:g}",
        f"s to\n{first.target_accuracy:.0%}": lambda o: (
            "never" if o.time_to_target_s is None else f"{o.time_to_target_s:.2f}"
        ),
        "final\naccur.": lambda o: f"{o.final_accuracy:.1%}",
        speed: lambda o: f"{getattr(o, f'{unit}_per_s'):.1f}",
        waited: lambda o: f"{o.waiting_share:.1%}",
        staleness: lambda o: f"{o.mean_staleness:.1f}, {o.max_staleness}",
    }
    if every:
        del columns[rates], columns[speed]
        columns |= {
            delayed: lambda o: f"{o.delayed_share:.1%}",
            wasted: lambda o: f"{o.restarts:g}, {o.wasted_share:.1%}",
        }
    return runs_table(
        [wrappable(outcome.name).replace(", translated", "\n  translated") for outcome in outcomes],
        {heading: [show(outcome) for outcome in outcomes] for heading, show in columns.items()},
        expendable=(wasted, delayed, rates, staleness, waited, speed),
        width=width,
        caption=f"{runs}; {f'emulated: {first.emulated}' if first.emulated else 'no emulation'}{_legend(outcomes)}",
    )


def _legend(outcomes: Sequence[TrialOutcome]) -> str:
    """Return what the rows with translated hyper-parameters mean; "" if there are none."""
    if not any(outcome.hyperparameters == "translated" for outcome in outcomes):
        return ""
    return (
        "\ntranslated: with the learning rate and momentum of bsp, as if only --sync had changed; other rows: with "
        "the best values for the model itself, used as they are"
    )


# -- A table with one row per run, which fits the width of the screen and cuts no word in the middle ---------
#
# On a narrow screen, less important columns are left out, and the caption names them. Names of runs are
# wrapped between words.

GAP = 2  # columns of the screen between two columns of the table
INDENT = 2  # width of the mark with which a name may begin; a line never ends between the mark and the name


def runs_table(
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    *,
    expendable: Sequence[str],
    width: int,
    title: str = "",
    caption: str = "",
) -> Table:
    """Return a table whose first column contains the names of runs.

    Args:
        names: the names, with spaces where they may be wrapped.
        columns: heading -> cells, from left to right. A heading may have several lines; a cell has only one line.
        expendable: headings of the columns that may be left out, beginning with the least important one.
        width: width of the screen, in columns.
        title: text above the table.
        caption: text below the table.
    """
    longest = max((len(word) for name in names for word in name.split()), default=0) + INDENT
    least = min(longest, max(width // 2, 1))  # a longer word is continued on the next line
    kept = dict(columns)
    for heading in expendable:
        if least + _taken(kept) <= width:
            break
        kept.pop(heading, None)
    if left_out := [" ".join(heading.split()) for heading in columns if heading not in kept]:
        caption += f"\nleft out in {width} columns: {'; '.join(left_out)}"
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=caption.strip("\n") or None,
        caption_justify="left",
    )
    table.add_column(
        "sync",
        overflow="fold",
        vertical="bottom",
        min_width=least,
        max_width=max(least, width - _taken(kept)),
    )
    for heading in kept:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        table.add_row(name, *(cells[number] for cells in kept.values()))
    return table


def _taken(columns: Mapping[str, Sequence[str]]) -> int:
    """Return the width that the columns take, with the gaps before them."""
    return sum(GAP + max(map(len, [*heading.split("\n"), *cells])) for heading, cells in columns.items())


# -- A table that fits the available width: less important columns are left out, and texts end after a word --

Cell = tuple[str, str]
"""A text, and its style."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: the heading of the column.
        kind: "number" for figures, which are aligned on the right and never shortened, else "text".
        rank: the columns with the lowest ranks are left out first; None to keep the column.
        least: width to which the texts of the column may be shortened. Default: the width of their first words.
        reserved: minimum width of the column if it is shown, so that other columns do not appear or disappear when
            its texts change.
    """

    name: str
    kind: Literal["text", "number"] = "text"
    rank: int | None = None
    least: int | None = None
    reserved: int = 0


class FittedTable:
    """A table without borders, whose lines are not longer than the width of the console if possible.

    Args:
        columns: the columns.
        rows: for each row, a cell per column.

    Example:
        >>> table = FittedTable(
        ...     [Column("worker", "number"), Column("waits for", rank=1)], [(("0", ""), ("a slow worker", ""))]
        ... )
        >>> [line.plain for line in table.lines(18)]
        ['worker  waits for', '     0  a slow…']
        >>> [line.plain for line in table.lines(12)]
        ['worker', '     0']
    """

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
        self._columns = columns
        self._rows = list(rows)
        self._texts = [[column.name, *(row[k][0] for row in self._rows)] for k, column in enumerate(columns)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> list[Text]:
        """Return the lines of the table for a console of this width."""
        widths = self._widths(width)
        heading: list[Cell] = [(column.name, "bold") for column in self._columns]
        return [self._line(row, widths) for row in (heading, *self._rows)]

    def _widths(self, width: int) -> dict[int, int]:
        """Return the widths of the columns that are shown."""
        widths = {k: self._least(k) for k in range(len(self._columns))}
        ranks = [(column.rank, k) for k, column in enumerate(self._columns) if column.rank is not None]
        for _, k in sorted(ranks):
            if _total(widths) <= width:
                break
            del widths[k]
        for k in widths:
            natural = max(map(cell_len, self._texts[k]))
            widths[k] += max(min(natural - widths[k], width - _total(widths)), 0)
        return widths

    def _least(self, k: int) -> int:
        column, texts = self._columns[k], self._texts[k]
        if column.kind == "number":
            return max(map(cell_len, texts))
        shortest = max(map(_first_word, texts))
        if column.least is not None:
            shortest = max(min(max(map(cell_len, texts)), column.least), shortest)
        return max(cell_len(column.name), column.reserved, shortest)

    def _line(self, row: Sequence[Cell], widths: dict[int, int]) -> Text:
        line = Text(no_wrap=True, overflow="ignore")
        for place, (k, width) in enumerate(widths.items()):
            text, style = row[k]
            if self._columns[k].kind == "text":
                text = shortened(text, width)
            padding = " " * (width - cell_len(text))
            line.append(" " * (GAP if place else 0))
            cells = (padding, text) if self._columns[k].kind == "number" else (text, padding)
            for cell in cells:
                line.append(cell, style if cell is text else "")
        line.rstrip()
        return line


def _total(widths: dict[int, int]) -> int:
    """Return the width of a table whose columns have these widths."""
    return sum(widths.values()) + GAP * max(len(widths) - 1, 0)


def _first_word(text: str) -> int:
    """Return the least width to which a text can be shortened without cutting its first word."""
    first, _, rest = text.partition(" ")
    return cell_len(first.rstrip(",;:")) + 1 if rest else cell_len(text)
