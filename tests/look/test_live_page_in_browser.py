"""The live page of a run of four workers in headless Chromium, until the run has ended.

Only `make look` runs these tests, because they need Chromium and playwright.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import DEADLINE_S
from tests.support.shown import Shown

if not os.environ.get("PACELINE_LOOK"):
    pytest.skip("only `make look` looks at the page in Chromium", allow_module_level=True)

from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is not installed; run: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def heard(page: Page) -> list[str]:
    """Return a list to which each message in the console is added, and each request that fails."""
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("response", lambda response: said.append(response.url) if response.status >= 400 else None)
    return said


def picture(page: Page, name: str) -> None:
    """Save a picture of the page if the variable PACELINE_LOOK names a folder."""
    folder = Path(os.environ["PACELINE_LOOK"])
    if folder.is_dir():
        page.screenshot(path=folder / f"{name}.png", full_page=True)


def test_a_live_page_follows_a_run_of_four_workers_to_its_end(tmp_path: Path, browser: Browser) -> None:
    run = Shown(tmp_path, workers=4)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(DEADLINE_S * 1000)
    expect.set_options(timeout=DEADLINE_S * 1000)
    said = heard(page)
    try:
        page.goto(run.address)
        assert page.url == run.address.partition("?")[0]
        assert page.evaluate("document.cookie") == ""
        expect(page.locator(".live")).to_contain_text("live, updated")
        expect(page.get_by_role("heading", name="What the workers do now")).to_be_visible()
        expect(page.get_by_role("heading", name="Loss and metrics")).to_be_visible()
        page.reload()
        picture(page, "live-run")
        (tmp_path / "enough").touch()
        expect(page.locator(".live")).to_have_text(
            f"The run has finished. Its report is {tmp_path}/run/report.html."
        )
        assert run.process.wait(DEADLINE_S) == 0
        assert (tmp_path / "run" / "report.html").exists()
        expect(page.get_by_role("heading", name="What the workers do now")).to_be_hidden()
        picture(page, "live-run-ended")
        page.wait_for_timeout(2500)  # longer than the time between two requests
        assert said == []
    finally:
        page.close()
        run.end()
