"""Reads the documentation of each sync model from the docstring of the model's module.

Each docstring consists of a title, optionally some theory, labeled paragraphs (Reference, Admission, State,
Guarantee, Use, Deviations) and an example.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib import import_module

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import unknown_name
from ..sync import MODELS

__all__ = ["LABELS", "Page", "describe", "flowing", "models_table", "page_text", "pages"]

LABELS = ("Reference", "Admission", "State", "Guarantee", "Use", "Deviations")


class Page(msgspec.Struct, frozen=True):
    """The documentation of one sync model, divided into its parts.

    Attributes:
        name: name of the model on the command line.
        notation: the name and each parameter with its default, or with "..." if the default is missing, None or "".
        title: the first paragraph of the docstring.
        theory: the text between the title and the labeled paragraphs; "" if there is none.
        parts: mapping from the label of a paragraph to its text.
        parameters: a (name, description) pair for each parameter of the model.
        example: the doctest at the end of the docstring.
    """

    name: str
    notation: str
    title: str
    theory: str
    parts: dict[str, str]
    parameters: tuple[tuple[str, str], ...]
    example: str


def describe(name: str) -> Page:
    """Return the documentation of one model. Raise `ConfigurationError` if there is no model with that name."""
    if name not in MODELS:
        raise unknown_name("sync model", name, MODELS)
    model = MODELS[name]
    head = inspect.cleandoc(import_module(model.__module__).__doc__ or "")
    text, arrow, example = head.partition("\n>>> ")
    found = re.split(rf"^({'|'.join(LABELS)}): ", text, flags=re.MULTILINE)
    opening, labelled = found[0], found[1:]
    title, _, theory = opening.strip().partition("\n\n")
    parts = {label: part.strip() for label, part in zip(labelled[::2], labelled[1::2], strict=True)}
    fields = [(f.name, "" if f.required else f.default) for f in msgspec.structs.fields(model)]
    shown = ",".join(f"{key}={'...' if default in ('', None) else default}" for key, default in fields)
    return Page(
        name=name,
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


def models_table(shown: Sequence[Page]) -> Table:
    """Return the table that `paceline sync --list` prints."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("model with defaults", no_wrap=True)
    table.add_column("description")
    for page in shown:
        description = page.title.partition(": ")[2] or page.title
        table.add_row(page.notation.replace(",", ",\n  "), description)
    return table


def page_text(page: Page) -> Group:
    """Return the text that `paceline sync NAME` prints."""
    lines = [Text(page.notation, "bold"), Text(page.title)]
    if page.theory:
        lines += [Text(), Text(flowing(page.theory))]
    lines.append(Text())
    lines += [Text.assemble((f"{label}: ", "bold"), flowing(part)) for label, part in page.parts.items()]
    if page.parameters:
        lines += [Text(), Text("Parameters:", "bold")]
        lines += [Text(f"  {key}: {description}") for key, description in page.parameters]
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
    names = [field.name for field in msgspec.structs.fields(model)]
    return tuple((name, found[name]) for name in names if name in found)
