"""The built site: no link is dead, and nothing is fetched from the network. Only `make site` runs these tests."""

from __future__ import annotations

import os
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

if not os.environ.get("PACELINE_SITE"):
    pytest.skip("only `make site` builds the site", allow_module_level=True)

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(SITE.rglob("*.html"))
DYNAMIC = {"search.html", "genindex.html"}  # what they link to depends on what is searched


class Contents(HTMLParser):
    """What a page links to, what it loads, and the places that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == "a" and (target := given.get("href")):
            self.links.append(target)
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(given.get("href") or "")
        if tag in ("script", "img", "iframe", "source") and (source := given.get("src")):
            self.loads.append(source)


@cache
def contents(page: Path) -> Contents:
    return Contents(page.read_text(encoding="utf-8"))


def test_there_are_pages() -> None:
    assert len(PAGES) > 80, "run: make site"
    assert SITE / "index.html" in PAGES


def test_no_link_is_dead() -> None:
    dead = []
    for page in PAGES:
        for link in contents(page).links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file():
                dead.append(f"{page.relative_to(SITE)}: {link}")
            elif page.name in DYNAMIC or target.suffix != ".html" or not parts.fragment:
                continue
            elif unquote(parts.fragment) not in contents(target).places:
                dead.append(f"{page.relative_to(SITE)}: {link}")
    assert dead == []


def test_nothing_is_fetched_from_the_network() -> None:
    fetched = []
    for page in PAGES:
        for source in contents(page).loads:
            parts = urlsplit(source)
            if parts.scheme == "data":
                continue
            if parts.netloc or not (page.parent / unquote(parts.path)).resolve().is_file():
                fetched.append(f"{page.relative_to(SITE)}: {source}")
    assert fetched == []


def test_style_sheets_load_nothing_from_the_network() -> None:
    sheets = sorted(SITE.rglob("*.css"))
    assert sheets
    assert [
        sheet for sheet in sheets if "url(http" in sheet.read_text() or "@import" in sheet.read_text()
    ] == []
