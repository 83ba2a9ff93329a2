"""The site: `make site` builds it from the pages in this folder.

The pages are Markdown that reads on a code host, too. So a page `index.md` has no list of pages for Sphinx: its items
that begin with a link are this list, in their order.
"""

from __future__ import annotations

import inspect
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import paceline

project = "Paceline"
author = "The Paceline authors"
version = release = paceline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
highlight_language = "text"  # of indented blocks, which are commands and their output
default_role = "code"  # as in Markdown, one backtick in a docstring is code

napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes are fields of a class, and members are documented once
autodoc_typehints = "none"  # docstrings say in words what an argument is
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"Paceline {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # which is fetched, and a page that is read from a file cannot fetch
smartquotes = False  # "--option" stays what users type

NAME = re.compile(r"^\| `((paceline[\w.]*)\.(\w+))` \|", re.MULTILINE)
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
    if (copied := {place: name for name, place in SHOWN.items()}.get(page)) and page != "index":
        text = LINK.sub(
            lambda link: link[1] + os.path.relpath(ROOT / link[2], folder), (ROOT / copied).read_text()
        )

    def within_site(link: re.Match[str]) -> str:
        file = os.path.relpath(os.path.normpath(folder / link[2]), ROOT)
        return link[1] + (os.path.relpath(DOCS / SHOWN[file], folder) + ".md" if file in SHOWN else link[2])

    text = LINK.sub(within_site, text)
    if Path(page).name.startswith("api") and "integrations" not in page:  # which import what may be missing
        shown = {name: lines for name, *found in NAME.findall(text) if (lines := details(name, *found))}
        text = NAME.sub(lambda name: f"| [`{name[1]}`](#{name[1]}) |" if name[1] in shown else name[0], text)
        text += "\n## Details\n" + "".join(shown.values())
    if folder / "index" == DOCS / page and (listed := ITEM.findall(text)):
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(listed) + "\n```\n"
    source[0] = text


def details(name: str, module: str, attribute: str) -> str:
    """Return the lines that show the docstring of a name; "" for constants, and for names that `paceline` has, too."""
    value = getattr(import_module(module), attribute)
    if module != "paceline" and attribute in paceline.__all__:
        return ""
    if not inspect.isclass(value):
        return f"\n```{{eval-rst}}\n.. autofunction:: {name}\n```\n" if inspect.isroutine(value) else ""
    if issubclass(value, BaseException):
        return f"\n```{{eval-rst}}\n.. autoexception:: {name}\n```\n"
    return f"\n```{{eval-rst}}\n.. autoclass:: {name}\n   :members:\n```\n"


def escape_norms(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep |g| in a docstring from being a substitution."""
    lines[:] = [re.sub(r"\|(\w+)\|", r"\\|\1\\|", line) for line in lines]


def make_boxes_focusable(
    app: object, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Let the keyboard scroll boxes that are wider than the page."""
    if body := context.get("body"):
        for box in ("<pre>", '<div class="table-wrapper'):
            body = body.replace(
                box, box.replace("<pre", '<pre tabindex="0"').replace("<div", '<div tabindex="0"')
            )
        context["body"] = body


def setup(app: Any) -> None:
    """Register with Sphinx."""
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", escape_norms)
    app.connect("html-page-context", make_boxes_focusable)
