"""Reads the documentation of each sync model from the docstring of the model's module.

Each docstring consists of a title, optionally some theory, labeled paragraphs (Reference, Admission, State,
Guarantee, Use, Deviations) and an example.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import zip_longest
from typing import NamedTuple

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from ..sync import MODELS
from ..sync.notation import AUTO, misplaced_auto, unknown_model
from ..words import Sentence, wrapped
from .timelines import DASHES, Dashes

LABELS = ("Reference", "Admission", "State", "Guarantee", "Use", "Deviations")

GAP = 2  # number of characters between two columns
LEAST_DESCRIPTION = 30  # with fewer characters per line, descriptions are put below the models


class Page(msgspec.Struct, frozen=True):
    """The documentation of one sync model, divided into its parts.

    Attributes:
        name: name of the model on the command line.
        defined: the class of the model, as "module.Class", if it is not a model of this package; else "".
        notation: the name and each parameter with its default, or with "..." if the default is missing, None or "".
        title: the first paragraph of the module's docstring, or of the class's if the module has several models.
        theory: the text between the title and the labeled paragraphs; "" if there is none.
        parts: mapping from the label of a paragraph to its text.
        parameters: a (name, description) pair for each parameter of the model.
        example: the doctest at the end of the docstring.
    """

    name: str
    defined: str
    notation: str
    title: str
    theory: str
    parts: dict[str, str]
    parameters: tuple[tuple[str, str], ...]
    example: str


def describe(name: str) -> Page:
    """Return the documentation of one model. Raise `ConfigurationError` if there is no model with that name."""
    if name == AUTO:
        raise misplaced_auto(name)
    if name not in MODELS:
        raise unknown_model(name)
    model = MODELS[name]
    ours = model.__module__.startswith("paceline.")
    head = inspect.cleandoc(import_module(model.__module__).__doc__ or model.__doc__ or "")
    text, arrow, example = head.partition("\n>>> ")
    opening, *labelled = re.split(rf"^({'|'.join(LABELS)}): ", text, flags=re.MULTILINE)
    title, _, theory = opening.strip().partition("\n\n")
    if [other.__module__ for other in MODELS.values()].count(model.__module__) > 1:
        title = inspect.cleandoc(model.__doc__ or title).partition("\n\n")[0]
    parts = {label: part.strip() for label, part in zip(labelled[::2], labelled[1::2], strict=True)}
    fields = [
        (f.name, "" if f.required else str(f.default).lower() if f.type is bool else f.default)
        for f in msgspec.structs.fields(model)
    ]
    shown = ",".join(f"{key}={'...' if default in ('', None) else default}" for key, default in fields)
    return Page(
        name=name,
        defined="" if ours else f"{model.__module__}.{model.__qualname__}",
        notation=f"{name}:{shown}" if shown else name,
        title=" ".join(title.split()),
        theory=theory.strip(),
        parts=parts,
        parameters=_parameters(model),
        example=(arrow + example).strip(),
    )


def pages() -> list[Page]:
    """Return the documentation of all models, in the order of `MODELS`."""
    return [describe(name) for name in MODELS]


class ModelsTable:
    """The table that `paceline sync --list` prints. In a narrow terminal, each description is below its model.

    Args:
        shown: the documentation of the models, in order.
    """

    def __init__(self, shown: Sequence[Page]) -> None:
        self._rows = [("model with defaults", "description", "bold")]
        for page in shown:
            divided = page.notation.replace(",", ",\n  ")  # each parameter is on a line of its own
            self._rows.append((divided, page.title.partition(": ")[2] or page.title, ""))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = max(len(line) for names, _, _ in self._rows for line in names.split("\n")) + GAP
        right = options.max_width - left
        for names, description, style in self._rows:
            lines = names.split("\n")
            if right >= LEAST_DESCRIPTION:
                pairs = zip_longest(lines, wrapped(description, right), fillvalue="")
                lines = [f"{name:{left}}{part}".rstrip() for name, part in pairs]
            else:
                lines += [f"    {part}" for part in wrapped(description, options.max_width - 4)]
            for line in lines:
                yield Text(line, style, no_wrap=True, overflow="ignore")


def page_text(page: Page) -> Group:
    """Return the text that `paceline sync NAME` prints."""
    lines: list[Text | Sentence] = [Sentence(page.notation, "bold"), Sentence(page.title)]
    if page.defined:
        lines += [Text(), Sentence(page.defined, label="Class: ")]
    if page.theory:
        lines += [Text(), Sentence(flowing(page.theory))]
    lines.append(Text())
    lines += [Sentence(flowing(part), label=f"{label}: ") for label, part in page.parts.items()]
    if page.parameters:
        lines += [Text(), Text("Parameters:", "bold")]
        lines += [Sentence(f"  {key}: {description}", indent="    ") for key, description in page.parameters]
    return Group(*lines)


def flowing(text: str) -> str:
    """Join the lines of each paragraph. Indented lines are left unchanged."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _parameters(model: type) -> tuple[tuple[str, str], ...]:
    """Read the names and descriptions of a model's parameters from the docstrings of its class and base classes."""
    found: dict[str, str] = {}
    for kind in model.__mro__:
        text = inspect.cleandoc(kind.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for key, description in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, flags=re.MULTILINE):
            found.setdefault(key, " ".join(description.split()))
    return tuple((f.name, found[f.name]) for f in msgspec.structs.fields(model) if f.name in found)


# -- The color, dashes and marker of each sync model, in all pictures that compare sync models ---------------
#
# A model always has the same color, regardless of its parameters and of the other models in the picture. Its own dashes
# distinguish it in black and white. Further runs of the same model have other dashes and markers: runs with balanced
# batches have the next entries of `DASHES` and `MARKERS`, and runs with translated hyper-parameters have the entries
# after these. When all of `DASHES` are used, further runs have `FURTHER_DASHES`. No model has the color of a kind of
# time (`words.COLOR_OF`).


class Style(NamedTuple):
    """The color, dashes and marker with which the curve and the points of a run are drawn.

    Attributes:
        color: color as a hexadecimal number.
        dashes: line style, as matplotlib takes it.
        marker: shape of a point, as matplotlib takes it.
    """

    color: str
    dashes: Dashes
    marker: str = "o"


MARKERS = ("o", "s", "D", "^")
"""The marker of a model, followed by the markers of other runs of the same model."""


FURTHER_DASHES: tuple[Dashes, ...] = (
    (0, (8, 2)),
    (0, (3, 1, 1, 1, 1, 1, 1, 1)),
    (0, (12, 2, 3, 2)),
    (0, (2, 3)),
    (0, (8, 2, 8, 2, 1, 2)),
    (0, (1, 4)),
)
"""The line styles of further runs of the same model. Curves have no markers, so these styles alone distinguish them."""

AUTO_STYLE = Style("#2D004B", DASHES[1])
"""The style of a run that chooses its models itself."""


def model_styles() -> dict[str, Style]:
    """Return the style of each registered model that has one (see `SyncModel.style`), and of "auto".

    The most important models have the colors that differ most (`COLOURS`). Models with a bound on the gap are purple,
    and models that drop gradients are brown.
    """
    styles = ((name, *model.style) for name, model in MODELS.items())
    return {AUTO: AUTO_STYLE} | {
        name: Style(color, DASHES[number]) for name, color, number in styles if color
    }


FURTHER_COLORS = ("#276419", "#8E0152", "#4575B4", "#A50026", "#35978F", "#B35806")
"""The colors of all other models, schedules and lists of models for each shard, in the order of their appearance.

Curves in these colors are dashed, so that a curve of another model behind them can be seen.
"""


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Return the style of each run in a picture: name -> style.

    No two runs have the same color and dashes, except in a picture with more than twelve runs of one color.

    Args:
        names: the names of the runs (see `words.run_name`), in the order of the legend.

    >>> styles = styles_of(["asp", "bsp", "bsp, balanced batches"])
    >>> [styles[name].color == MODELS["bsp"].style[0] for name in styles]
    [False, True, True]
    >>> styles["bsp"].dashes, styles["bsp, balanced batches"].dashes
    ('-', '--')
    >>> [styles[name].marker for name in styles]
    ['o', 'o', 's']
    """
    own = model_styles()
    models = len(own)
    found: dict[str, Style] = {}
    for name in dict.fromkeys(names):
        model = _model(name)
        if model not in own:
            number = len(own) - models
            dashes = DASHES[(1 + number // len(FURTHER_COLORS)) % len(DASHES)]
            own[model] = Style(FURTHER_COLORS[number % len(FURTHER_COLORS)], dashes)
        color, first = own[model].color, DASHES.index(own[model].dashes)
        variant = ("balanced batches" in name) + 2 * ("translated" in name)
        choices = [
            Style(color, DASHES[(first + number) % len(DASHES)], MARKERS[number % len(MARKERS)])
            for number in range(variant, variant + len(DASHES))
        ]
        choices += [
            Style(color, dashes, MARKERS[number % len(MARKERS)])
            for number, dashes in enumerate(FURTHER_DASHES, variant + len(DASHES))
        ]
        taken = {(style.color, style.dashes) for style in found.values()}
        found[name] = next((style for style in choices if (color, style.dashes) not in taken), choices[0])
    return found


def _model(name: str) -> str:
    """Return the model of a run, or the whole notation if the run has several models.

    >>> _model("ssp:staleness=3, balanced batches"), _model("bsp@0,asp@50, translated, int8")
    ('ssp', 'bsp@0,asp@50')
    """
    sync = name.partition(", ")[0]
    return sync if "@" in sync or "|" in sync else sync.partition(":")[0]
