"""The color, dashes and marker of each sync model. All pictures that compare sync models use the same ones.

A model always has the same color, whatever its parameters are and whichever models are beside it. Its own dashes
distinguish it in black and white. Runs of the same model have other dashes and markers: those with balanced batches
the next ones in the list, and those with translated hyper-parameters the next but one. No model has a color of
`colors_of_time`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .canvas import COLOURS, DASHES, Dashes

__all__ = ["FURTHER_COLORS", "MODEL_STYLES", "Style", "styles_of"]


class Style(NamedTuple):
    """How the curves and points of a run are drawn.

    Attributes:
        color: color as a hexadecimal number.
        dashes: line style, as matplotlib takes it.
        marker: shape of a point, as matplotlib takes it.
    """

    color: str
    dashes: Dashes
    marker: str = "o"


MARKERS = ("o", "s", "D", "^")
"""The marker of a model, and those of other runs of the same model."""


_BLUE, _ORANGE, _GREEN, _PURPLE, _BROWN, _BLACK = COLOURS

MODEL_STYLES: Mapping[str, Style] = {
    "bsp": Style(_BLUE, DASHES[0]),
    "asp": Style(_ORANGE, DASHES[0]),
    "elastic-bsp": Style(_GREEN, DASHES[0]),
    "ssp": Style(_PURPLE, DASHES[0]),
    "drop-stragglers": Style(_BROWN, DASHES[0]),
    "spec-sync": Style(_BLACK, DASHES[0]),
    # Models with a bound on the gap are purple, too, and models that drop gradients brown.
    "dssp": Style("#AF8DC3", DASHES[1]),
    "dsps": Style("#4D004B", DASHES[2]),
    "pssp": Style("#7A0177", DASHES[3]),
    "dynamic-pssp": Style("#C51B8A", DASHES[4]),
    "rennala": Style("#BF812D", DASHES[1]),
    "ringmaster": Style("#543005", DASHES[2]),
    "naive-waiting": Style("#01665E", DASHES[1]),
    "auto": Style("#2D004B", DASHES[1]),
    "conditions": Style("#7FBC41", DASHES[1]),
}
"""The style of each model of the package. The most important models have the colors that differ most."""

FURTHER_COLORS = ("#276419", "#8E0152", "#4575B4", "#A50026", "#35978F", "#B35806")
"""The colors of all other models, schedules and lists of models for each shard, in the order of their appearance.

Their curves are dashed, so that a curve of another model below them can be seen.
"""


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Return the style of each run in a picture: name -> style. No two runs have the same style.

    Args:
        names: the names of the runs (see `names.run_name`), in the order of the legend.

    >>> styles = styles_of(["asp", "bsp", "bsp, balanced batches"])
    >>> [styles[name].color == MODEL_STYLES["bsp"].color for name in styles]
    [False, True, True]
    >>> styles["bsp"].dashes, styles["bsp, balanced batches"].dashes
    ('-', '--')
    >>> [styles[name].marker for name in styles]
    ['o', 'o', 's']
    """
    own: dict[str, Style] = dict(MODEL_STYLES)
    found: dict[str, Style] = {}
    for name in dict.fromkeys(names):
        model = _model(name)
        if model not in own:
            number = len(own) - len(MODEL_STYLES)
            dashes = DASHES[(1 + number // len(FURTHER_COLORS)) % len(DASHES)]
            own[model] = Style(FURTHER_COLORS[number % len(FURTHER_COLORS)], dashes)
        color, first = own[model].color, DASHES.index(own[model].dashes)
        variant = ("balanced batches" in name) + 2 * ("translated" in name)
        choices = [
            Style(color, DASHES[(first + number) % len(DASHES)], MARKERS[number % len(MARKERS)])
            for number in range(variant, variant + len(DASHES))
        ]
        found[name] = next((style for style in choices if style not in found.values()), choices[0])
    return found


def _model(name: str) -> str:
    """Return the model of a run, or the whole notation if the run has several models.

    >>> _model("ssp:staleness=3, balanced batches"), _model("bsp@0,asp@50, translated")
    ('ssp', 'bsp@0,asp@50')
    """
    sync = re.sub(r", (balanced batches|translated)", "", name)
    return sync if "@" in sync or "|" in sync else sync.partition(":")[0]
