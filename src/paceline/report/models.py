"""What there is to know of each sync model, out of the head of its own file: one place to keep right.

The head of a model's file is a title, perhaps some theory, then labelled paragraphs (Reference, Admission, State,
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
    """One model's head, taken apart.

    Attributes:
        name: as on the command line.
        notation: the name with every parameter, and its default where there is one.
        title: the first paragraph.
        theory: what stands between the title and the labels; "" if nothing does.
        parts: label -> its paragraph.
        parameters: (name, what it is).
        example: the doctest.
    """

    name: str
    notation: str
    title: str
    theory: str
    parts: dict[str, str]
    parameters: tuple[tuple[str, str], ...]
    example: str


def describe(name: str) -> Page:
    """The page of one model. Raises `ConfigurationError` if there is none of that name."""
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
    """Every model's page, in the order of `MODELS`."""
    return [describe(name) for name in MODELS]


def models_table(shown: Sequence[Page]) -> Table:
    """What `paceline sync --list` prints."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("model, with its defaults", no_wrap=True)
    table.add_column("what it does")
    for page in shown:
        what = page.title.partition(": ")[2] or page.title
        table.add_row(page.notation.replace(",", ",\n  "), what)
    return table


def page_text(page: Page) -> Group:
    """What `paceline sync NAME` prints."""
    lines = [Text(page.notation, "bold"), Text(page.title)]
    if page.theory:
        lines += [Text(), Text(flowing(page.theory))]
    lines.append(Text())
    lines += [Text.assemble((f"{label}: ", "bold"), flowing(part)) for label, part in page.parts.items()]
    if page.parameters:
        lines += [Text(), Text("Parameters:", "bold")]
        lines += [Text(f"  {key}: {what}") for key, what in page.parameters]
    return Group(*lines)


def flowing(text: str) -> str:
    """Paragraphs without their line breaks; what is indented stays as it is."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _parameters(model: type) -> tuple[tuple[str, str], ...]:
    """The attributes that the docstrings of a model and of what it is made from describe."""
    found: dict[str, str] = {}
    for kind in model.__mro__:
        text = inspect.cleandoc(kind.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for key, what in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, flags=re.MULTILINE):
            found.setdefault(key, " ".join(what.split()))
    names = [field.name for field in msgspec.structs.fields(model)]
    return tuple((name, found[name]) for name in names if name in found)
