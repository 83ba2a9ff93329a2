"""Pictures of the timelines of simulations: each worker's times of computing, transfers and waiting, and the barriers.

The timeline of a live run is on the page of its report, and is drawn from the same kind of `Activity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from ..files import Unfinished
from ..trace.activity import SPAN_UNITS_PER_S, Activity
from ..trace.recording import AnyTrace, IterationRecord
from ..words import COMPUTING, TRANSFER, WAITING, WASTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH_INCHES = 11.0
STRIP_HEIGHT_INCHES = 1.25
BAR_HEIGHT = 0.78

LABELS = {
    COMPUTING: "computing, one bar per iteration",
    TRANSFER: "transferring data",
    WASTED: "aborted or lost computations",
    WAITING: "waiting",
}


def activity_of(records: Sequence[Sequence[IterationRecord]], traces: Sequence[AnyTrace]) -> Activity:
    """Return what the workers of a simulation did.

    Args:
        records: the records of each worker.
        traces: the traces of the simulation.
    """
    shards = [trace for trace in traces if trace.header.host == "shard"]
    activity = Activity(len(shards), ticks_per_s=shards[0].header.ticks_per_s)
    for worker in range(len(records)):
        activity.expect_records(worker)
    for index, shard in enumerate(shards):
        recorder = activity.at_shard(index)
        for entry in shard.entries:
            recorder.record(entry)
    for worker, each in enumerate(records):
        for record in each:
            activity.record(worker, record)
    return activity


def timeline_picture(activity: Activity, until_s: float) -> Figure:
    """Draw the first seconds of one timeline.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure(WIDTH_INCHES, STRIP_HEIGHT_INCHES + 0.7)
    strip = figure.subplots()
    _draw(strip, activity, until_s)
    strip.set_xlabel("seconds")
    _explain(strip)
    return figure


def timelines_picture(timelines: Mapping[str, Activity], until_s: float, whole_s: float) -> Figure:
    """Draw the beginning of several timelines, one below the other.

    Args:
        timelines: title -> what the workers did, in the order of drawing. Must not be empty.
        until_s: end of the part that is drawn, in seconds since training began.
        whole_s: length of the longest simulation, in seconds.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    workers = max(len(activity.workers) for activity in timelines.values())
    height_inches = STRIP_HEIGHT_INCHES * max(1.0, workers / 4)
    figure = new_figure(WIDTH_INCHES, height_inches * len(timelines) + 0.8)
    strips = list(figure.subplots(len(timelines), 1, squeeze=False)[:, 0])
    for strip, (title, activity) in zip(strips, timelines.items(), strict=True):
        _draw(strip, activity, until_s)
        strip.tick_params(axis="x", labelbottom=strip is strips[-1])
        strip.set_title(title, loc="left", fontsize=10, fontweight="bold")
    part = f": the first {until_s:.4g} of {whole_s:.4g} s" if until_s < whole_s else ""
    strips[-1].set_xlabel(f"virtual seconds since training began{part}")
    _explain(strips[0])
    return figure


def _draw(axes: Axes, activity: Activity, until_s: float) -> None:
    """Draw one row of bars per worker (worker 0 on top), and one line per barrier."""
    kinds = (WASTED, COMPUTING, TRANSFER, WAITING, TRANSFER)  # the parts of a span, in their order
    for span in activity.spans:
        begun_s = span.begun / SPAN_UNITS_PER_S
        for color, length in zip(kinds, span.lengths, strict=True):
            length_s = length / SPAN_UNITS_PER_S
            if length and begun_s < until_s:
                edge = "white" if color == COMPUTING else "none"  # separates the iterations
                place = (span.worker - BAR_HEIGHT / 2, BAR_HEIGHT)
                axes.broken_barh([(begun_s, length_s)], place, facecolor=color, edgecolor=edge, linewidth=0.4)
            begun_s += length_s
    workers = len(activity.workers)
    barriers_s = [barrier_s for barrier_s in activity.barriers_s if barrier_s <= until_s]
    axes.vlines(barriers_s, -0.5, workers - 0.5, color="black", linewidth=1.3)
    axes.set_xlim(0.0, until_s)
    axes.set_ylim(workers - 0.5, -0.5)
    axes.set_yticks(range(workers), [f"worker {index}" for index in range(workers)])
    axes.tick_params(axis="y", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _explain(axes: Axes) -> None:
    """Draw a legend above a timeline."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    barrier = Line2D([], [], color="black", linewidth=1.3, label="barrier")
    handles = [*(Patch(facecolor=color, label=label) for color, label in LABELS.items()), barrier]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
    )


# -- Creates matplotlib figures and saves them as PNG or PDF files; no display is needed ---------------------
#
# matplotlib is optional. Commands ask `can_draw` and print their tables in any case. The global state of
# matplotlib (pyplot, rcParams) is left as it is, so the user's own figures are not affected.

Dashes = str | tuple[int, tuple[int, ...]]
"""A line style, as matplotlib takes it: a name, or an offset and the lengths of dashes and gaps."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#762A83", "#8C510A", "#000000")
"""Curve colors that color-blind readers can distinguish, in order of use: four of Okabe and Ito (2008) and two of
ColorBrewer. Other colors of Okabe and Ito stand for kinds of time (`words.COLOR_OF`). Sync models have the styles of
`models.model_styles`.
"""

DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
"""Line styles, combined with the colors so that curves can also be distinguished in black and white."""

DOTS_PER_INCH = 130

NO_MATPLOTLIB = "pictures require matplotlib, which is not installed; run: pip install 'paceline[report]'"
"""Why nothing can be drawn. This message ends with a command, so that the command can be copied."""


def can_draw() -> bool:
    """Return True if matplotlib is installed. Otherwise, `new_figure` raises an error."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def no_picture(*names: str) -> str:
    """Return a sentence that says which pictures were left out without matplotlib, and how to get them.

    >>> no_picture("ranking.png", "timelines.png").partition(":")[0]
    'ranking.png and timelines.png were not drawn'
    """
    return f"{' and '.join(names)} {'were' if len(names) > 1 else 'was'} not drawn: {NO_MATPLOTLIB}"


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(NO_MATPLOTLIB) from error
    figure = Figure(figsize=(width_inches, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file in the format that the path's suffix names: ".png" or ".pdf".

    The file contains no date, so the same figure makes the same file. A PDF file contains its fonts as TrueType,
    which publishers require.
    """
    import matplotlib

    metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
    with Unfinished(path) as place, matplotlib.rc_context({"pdf.fonttype": 42}):
        figure.savefig(place, format=path.suffix[1:], metadata=metadata)
