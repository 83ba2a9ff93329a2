"""The built site in headless Chromium: both themes, two widths, the search, accessibility, nothing from the network.

Only `make look` runs these tests, because they need Chromium, playwright, axe-core and the site of `make site`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("PACELINE_LOOK"):
    pytest.skip("only `make look` looks at the site in Chromium", allow_module_level=True)

from playwright.sync_api import Browser, Page, expect, sync_playwright

SITE = Path(__file__).parents[2] / "build" / "site"
AXE = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = os.environ.get("PACELINE_PICTURES")  # a folder for pictures of the pages

SEEN = (
    "index",
    "start/installation",
    "start/coming-from-ddp",
    "how-to/index",
    "how-to/why-not-faster",
    "how-to/slow-links",
    "models/index",
    "models/elastic-bsp",
    "models/when-it-pays-times",
    "reference/api",
    "reference/command-line",
    "reference/settings",
    "internals/messages",
    "overview",
)
"""Pages of each kind."""

expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is not installed; run: apt-get install chromium"
    assert (SITE / "index.html").exists(), "run: make site"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page from its file. At the end, no page may have reported or fetched anything."""
    told: list[str] = []
    contexts = []

    def visit(name: str, *, width: int = 1280, scheme: Any = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:")) else told.append(request.url),
        )
        page.goto((SITE / f"{name}.html").as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert [
        each for each in told if not each.startswith("log: Changed to ")
    ] == []  # what the theme itself says


def findings(page: Page) -> list[str]:
    """Return what axe finds that is serious or critical."""
    assert AXE.exists(), f"{AXE} is missing; run: npm install --prefix {sys.prefix} axe-core"
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")["violations"]
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1600])
@pytest.mark.parametrize("name", SEEN)
def test_a_page_fits_its_width_and_axe_finds_nothing_serious(
    visit: Callable[..., Page], name: str, width: int, scheme: str
) -> None:
    page = visit(name, width=width, scheme=scheme)
    if PICTURES:
        page.screenshot(path=f"{PICTURES}/{name.replace('/', '-')}-{width}-{scheme}.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert findings(page) == []


def test_the_search_finds_pages_without_a_server(visit: Callable[..., Page]) -> None:
    page = visit("search")
    page.locator("input[name=q]").last.fill("preemptible")
    page.locator("input[name=q]").last.press("Enter")
    expect(page.locator("#search-results a").first).to_be_visible()
    expect(page.get_by_role("link", name="Use preemptible machines").first).to_be_visible()


def test_each_theme_can_be_chosen(visit: Callable[..., Page]) -> None:
    page = visit("index")
    colors = set()
    for _ in range(3):
        page.locator(".theme-toggle:visible").first.click()
        colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colors) == 2
