"""The site: `make site` builds it from the pages in this folder.

The pages are Markdown that reads on a code host, too. So a page `index.md` has no list of pages for Sphinx: its items
that begin with a link are this list, in their order.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import paceline

project = "Paceline"
author = "The Paceline authors"
version = release = paceline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
highlight_language = "text"  # of indented blocks, which are commands and their output
nitpicky = False

html_theme = "furo"
html_title = f"Paceline {version}"
html_copy_source = False
html_show_sphinx = False

ITEM = re.compile(r"^- \[[^\]]+\]\(([^)#:]+)\.md\)", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)#:\s]+)")
DOCS = Path(__file__).parent
ROOT = DOCS.parent

SHOWN = {
    "README.md": "index",
    "SECURITY.md": "reference/security",
    "CHANGELOG.md": "reference/changelog",
    "CONTRIBUTING.md": "internals/contributing",
}
"""A file beside this folder -> the page of the site that shows it or stands for it."""


def prepare_page(app: object, page: str, source: list[str]) -> None:
    """Make a page of the site from the source of a page."""
    folder = (DOCS / page).parent
    text = source[0]
    if (shown := {place: name for name, place in SHOWN.items()}.get(page)) and page != "index":
        text = LINK.sub(
            lambda link: link[1] + os.path.relpath(ROOT / link[2], folder), (ROOT / shown).read_text()
        )

    def within_site(link: re.Match[str]) -> str:
        file = os.path.relpath(os.path.normpath(folder / link[2]), ROOT)
        return link[1] + (os.path.relpath(DOCS / SHOWN[file], folder) + ".md" if file in SHOWN else link[2])

    text = LINK.sub(within_site, text)
    if folder / "index" == DOCS / page and (listed := ITEM.findall(text)):
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(listed) + "\n```\n"
    source[0] = text


def setup(app: Any) -> None:
    """Register with Sphinx."""
    app.connect("source-read", prepare_page)
