"""Creates matplotlib figures and saves them as PNG or PDF files; no display is needed.

matplotlib is optional. Commands ask `can_draw` and print their tables in any case. The global state of matplotlib
(pyplot, rcParams) is left as it is, so the user's own figures are not affected.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from ..files import Unfinished

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "DASHES", "NO_MATPLOTLIB", "Dashes", "can_draw", "new_figure", "no_picture", "save"]

Dashes = str | tuple[int, tuple[int, ...]]
"""A line style, as matplotlib takes it: a name, or an offset and the lengths of dashes and gaps."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#762A83", "#8C510A", "#000000")
"""Curve colors that color-blind readers can distinguish, in order of use: four of Okabe and Ito (2008), whose others
are the colors of time (`colors_of_time`), and two of ColorBrewer. Sync models have the styles in `styles_of_models`.
"""

DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
"""Line styles, combined with the colors so that curves can also be distinguished in black and white."""

DOTS_PER_INCH = 130

NO_MATPLOTLIB = "pictures require matplotlib, which is not installed; run: pip install 'paceline[report]'"
"""Why nothing can be drawn. It ends with a command that may be copied."""


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
