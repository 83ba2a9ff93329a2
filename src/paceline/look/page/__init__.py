"""The report of one run, or of several, as one HTML page that needs neither a network nor any other file.

The page consists of `page.html`, `page.css` and the scripts in this folder, which are put together here with the
data. The scripts share one scope, in the order of `SCRIPTS`; `main.js` comes last and draws the page.

Names in a report come from users, and may contain markup. So the data are JSON without `<`, and the scripts put text
into the page only as text nodes (`make` in `dom.js`). As a second defence, the page's content security policy allows
only the page's own script, and no connections except those of a live page to its own server.
"""

from __future__ import annotations

import base64
import hashlib
import html
import zlib
from collections.abc import Sequence
from importlib.resources import files
from string import Template

import msgspec

from ...trace.activity_cells import KINDS
from ...trace.report import RunReport
from ...words import COLOR_OF
from ..timelines import COLOURS

__all__ = ["SCRIPTS", "page_of"]

SCRIPTS = (
    "dom.js",
    "numbers.js",
    "packed.js",
    "theme.js",
    "canvas.js",
    "table.js",
    "bars.js",
    "series.js",
    "chart.js",
    "histogram.js",
    "levels.js",
    "spans.js",
    "timeline_picture.js",
    "timeline_words.js",
    "timeline.js",
    "summary.js",
    "workers.js",
    "metrics.js",
    "models.js",
    "ledger.js",
    "settings.js",
    "compare.js",
    "live.js",
    "main.js",
)

PACKED_FROM = 500_000
"""Data with at least this number of characters are compressed. The data of a short run remain readable."""


def page_of(reports: Sequence[RunReport], *, live: str = "") -> str:
    """Return a page that shows one report in full, or several reports side by side.

    Args:
        reports: at least one report.
        live: path from which the page fetches the report again and again as JSON, relative to its own address. Such a
            page shows one run. Default: the page never changes.

    Raises:
        ValueError: there is no report, or several for a live page.
    """
    if not reports or (live and len(reports) > 1):
        raise ValueError(f"a page shows at least one report, and a live page exactly one; got {len(reports)}")
    source = files(__name__)
    script = "\n".join((source / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'\n(() => {{\n"use strict";\n{script}}})();\n'
    style = "\n" + (source / "page.css").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return Template((source / "page.html").read_text(encoding="utf-8")).substitute(
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        title=html.escape(", ".join(report.name for report in reports[:3]) or "Paceline"),
        style=style,
        data=_data(reports, live),
        script=script,
    )


def _data(reports: Sequence[RunReport], live: str) -> str:
    """Return the data of the page as JSON or, if the JSON is long, as a string of compressed JSON in base64."""
    data = {
        "reports": reports,
        "live": live,
        "kinds": [{"name": kind, "color": COLOR_OF[kind]} for kind in KINDS],
        "curves": COLOURS,
    }
    text = msgspec.json.encode(data)
    if len(text) >= PACKED_FROM:
        text = msgspec.json.encode(base64.b64encode(zlib.compress(text)).decode())
    return text.decode().replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(content: str) -> str:
    """Return the part of a policy that allows an element with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
