"""The page in headless Chromium: both themes, all widths, keyboard, pointer, accessibility, and following a run.

Only `make look` runs these tests, because they need Chromium, playwright and axe-core.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.look.page import page_of
from paceline.trace.report import RunReport
from tests.support.made_reports import MARKUP, extremes, failed, large, nothing, running, slow_link, straggler

if not os.environ.get("PACELINE_LOOK"):
    pytest.skip("only `make look` looks at the page in Chromium", allow_module_level=True)

from playwright.sync_api import Browser, Page, expect, sync_playwright

AXE = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
DRAWN = "() => performance.getEntriesByName('paceline-drawn').length"
MOST_BYTES = 15_000_000
WIDTHS = (380, 768, 1280, 1600)

expect.set_options(timeout=60_000)  # on a busy machine, a live page asks seldom


def without_samples() -> RunReport:
    """Return the report of a run whose numbers of samples are unknown."""
    report = straggler()
    progress = tuple((at_s, 0, updates) for at_s, _, updates in report.progress)
    return msgspec.structs.replace(report, name="without samples", progress=progress)


MADE: dict[str, tuple[Callable[[], RunReport], ...]] = {
    "straggler": (straggler,),
    "slow link": (slow_link,),
    "failed": (failed,),
    "nothing": (nothing,),
    "extremes": (extremes,),
    "running": (lambda: running(straggler(), 70.0),),
    "side by side": (straggler, slow_link, failed),
    "large": (large,),
    "one without samples": (straggler, without_samples),
}


@cache
def text_of(name: str) -> str:
    return page_of([make() for make in MADE[name]])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is not installed; run: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a page, from a file unless an address is given. At the end, no page may have reported anything."""
    messages: list[str] = []
    contexts = []

    def visit(name: str = "", *, width: int = 1280, scheme: Any = "light", address: str = "") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        if not address:
            file = tmp_path / f"{name}.html"
            file.write_text(text_of(name), encoding="utf-8")
            address = file.as_uri()
        page.goto(address)
        page.wait_for_function(DRAWN)
        return page

    yield visit
    for context in contexts:
        context.close()
    # the browser itself reports an answer with an error, and a server that has gone
    assert [message for message in messages if "Failed to load resource" not in message] == []


def findings(page: Page) -> list[str]:
    """Return what axe finds that is serious or critical."""
    assert AXE.exists(), f"{AXE} is missing; run: npm install --prefix {sys.prefix} axe-core"
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{each['id']}: {node['html']} {node['failureSummary']}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def timeline_of(page: Page) -> Any:
    return page.locator(".rows")


def shown_time(page: Page) -> str:
    return str(page.locator(".where").inner_text())


def press(page: Page, key: str, times: int = 1) -> None:
    for _ in range(times):
        page.keyboard.press(key)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", MADE)
def test_the_page_fits_its_width_and_axe_finds_nothing_serious(
    visit: Callable[..., Page], name: str, width: int, scheme: str
) -> None:
    page = visit(name, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert findings(page) == []


def test_with_everything_open_axe_finds_nothing_serious(visit: Callable[..., Page]) -> None:
    page = visit("slow link", width=380)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    expect(page.get_by_text("NaN or infinite")).to_have_count(0)
    expect(page.locator("details table").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert findings(page) == []


@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("name", ["straggler", "side by side", "extremes"])
def test_a_table_that_does_not_end_at_its_edge_shows_it(
    visit: Callable[..., Page], name: str, width: int
) -> None:
    """A row that is cut off at the edge looks like a whole one, and many systems show no scroll bar."""
    page = visit(name, width=width)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    wider = 0
    for box in page.locator(".scroll:visible").all():
        more = (
            "(box) => box.scrollWidth > box.clientWidth + 1 ? box.dataset.more : (box.dataset.more ?? 'none')"
        )
        page.wait_for_function(
            f"(box) => ['none', 'right'].includes(({more})(box))", arg=box.element_handle()
        )
        if box.evaluate(more) == "right":
            wider += 1
            assert "linear-gradient" in box.evaluate("(box) => getComputedStyle(box).maskImage")
            box.evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
            page.wait_for_function("(box) => box.dataset.more === 'left'", arg=box.element_handle())
    assert wider >= (width == 420)
    assert findings(page) == []


@pytest.mark.parametrize(("width", "most"), [(1280, 800), (1600, 800), (380, 1200)])
def test_the_cause_and_the_remedy_are_on_the_first_screen(
    visit: Callable[..., Page], width: int, most: int
) -> None:
    page = visit("straggler", width=width)
    for words in ("The other workers waited 124 s", "Add --batch balanced"):
        box = page.get_by_text(words).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < most
    bar = page.locator(".alltime .stack").bounding_box()
    assert bar is not None
    assert bar["y"] < 800


def test_markup_in_names_stays_text(visit: Callable[..., Page]) -> None:
    page = visit("failed")
    assert page.locator("h1").inner_text() == MARKUP
    assert page.locator("img[src]").count() == 0
    assert page.locator(".failure").inner_text().startswith("Why it failed")
    expect(page.get_by_text("20 values at × are NaN or infinite.")).to_be_visible()
    expect(page.get_by_text("A guess: the values of the tensor")).to_be_visible()


def test_a_run_of_which_nothing_is_known_has_a_report(visit: Callable[..., Page]) -> None:
    page = visit("nothing")
    expect(page.get_by_text("cut off: it was killed, and left no summary")).to_be_visible()
    expect(page.get_by_text("Nothing is known about the workers' time.")).to_be_visible()


def test_of_many_models_and_metrics_some_are_shown_at_first(visit: Callable[..., Page]) -> None:
    page = visit("extremes")
    models = page.get_by_label("Model in force")
    shown = page.locator(".model > h3")
    assert shown.all_inner_texts() == ["ssp:staleness=11"]  # the longest
    models.select_option(label="ssp:staleness=3, from 50 min 0 s on")
    assert shown.all_inner_texts() == ["ssp:staleness=3"]
    charts = page.locator("section", has=page.get_by_text("Loss and metrics")).locator("canvas:visible")
    first = charts.count()
    page.get_by_text("5 more metrics").click()
    assert charts.count() == first + 5
    assert findings(page) == []


def test_the_keyboard_zooms_and_reads_the_timeline(visit: Callable[..., Page]) -> None:
    page = visit("straggler")
    timeline = timeline_of(page)
    whole = shown_time(page)
    timeline.focus()
    press(page, "+", 5)
    zoomed = shown_time(page)
    assert zoomed != whole
    press(page, "ArrowRight")
    assert shown_time(page) != zoomed
    press(page, "ArrowDown")
    spoken = page.locator("section", has=timeline).locator(".spoken[role=status]")
    expect(spoken).to_contain_text("Worker 1 ")
    press(page, "Shift+ArrowRight", 3)
    expect(spoken).to_contain_text(" from ")
    press(page, "0")
    assert shown_time(page) == whole


def test_the_pointer_zooms_selects_and_is_told_who_was_awaited(visit: Callable[..., Page]) -> None:
    page = visit("straggler")
    timeline = timeline_of(page)
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    whole = shown_time(page)
    x, y = box["x"] + 500, box["y"] + 34 + 10
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    for _ in range(7):
        page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function("(before) => document.querySelector('.where').textContent !== before", arg=whole)
    words = set()
    for step in range(60):
        page.mouse.move(x + 4 * step, y)
        words.add(page.locator(".tip:visible").inner_text().split("\n")[0])
    assert any(each.startswith("Worker 0 waited for worker 3 for ") for each in words), words
    assert any(each.startswith("Worker 0 computed for ") for each in words), words
    page.get_by_role("button", name="Whole run").click()
    assert shown_time(page) == whole
    page.mouse.move(box["x"] + 200, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, y, steps=4)
    page.mouse.up()
    assert shown_time(page) != whole
    page.mouse.wheel(0, 300)  # without ctrl, the wheel scrolls the page
    selected = shown_time(page)
    page.get_by_role("button", name="Zoom in").click()
    assert shown_time(page) != selected


def test_the_pointer_is_told_what_happened_at_a_mark(visit: Callable[..., Page]) -> None:
    page = visit("slow link")
    timeline = timeline_of(page)
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    words = set()
    for x in range(80, int(box["width"]), 5):
        page.mouse.move(box["x"] + x, box["y"] + 20)
        words |= set(page.locator(".tip:visible").all_inner_texts())
    told = [each.split("\n")[0] for each in words]
    assert "Worker 2 was lost: its connection ended." in told
    assert "The model changed from bsp to ssp:staleness=3." in told


def test_the_focus_goes_through_the_page_in_order_and_is_visible(visit: Callable[..., Page]) -> None:
    page = visit("slow link")
    places = []
    for _ in range(60):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => {
                const element = document.activeElement;
                if (element === document.body) return null;
                const outlined = element.matches("input[type=radio]") ? element.nextElementSibling : element;
                return [
                    [...document.querySelectorAll("*")].indexOf(element),
                    getComputedStyle(outlined).outlineStyle,
                    element.getBoundingClientRect().top < innerHeight,
                ];
            }"""
        )
        if found is None:
            break
        places.append(found)
    order = [place for place, _, _ in places]
    assert len(order) > 20
    assert order == sorted(order)
    assert {outline for _, outline, _ in places} == {"solid"}
    assert all(on_screen for _, _, on_screen in places)


def test_the_theme_can_be_changed(visit: Callable[..., Page]) -> None:
    page = visit("straggler", scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.get_by_role("button", name="Light").click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)" != dark
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(paper) == dark


def test_charts_change_their_axis_and_scale_and_have_their_data_as_a_table(
    visit: Callable[..., Page],
) -> None:
    page = visit("straggler")
    loss = page.locator("figure", has=page.get_by_text("loss", exact=True))
    canvas = loss.locator("canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile("over time"))
    page.get_by_role("radio", name="samples").check()
    expect(canvas).to_have_attribute("aria-label", re.compile("over samples"))
    page.get_by_label("logarithmic").check()
    page.get_by_role("radio", name="strong").check()
    expect(canvas).to_have_attribute("aria-label", re.compile("loss, smoothed goes from"))
    loss.locator(".frame").focus()
    press(page, "ArrowRight", 2)
    expect(loss.locator(".spoken[role=status]")).to_contain_text("loss, smoothed: ")
    loss.locator("summary").click()
    expect(loss.locator("tbody tr").first).to_contain_text("loss")
    assert loss.locator("tbody tr").count() == 800


def test_tables_can_be_sorted(visit: Callable[..., Page]) -> None:
    page = visit("straggler")
    workers = page.locator("table", has=page.get_by_role("button", name="iterations"))
    first = workers.locator("tbody tr").first.locator("th")
    assert first.inner_text() == "0"
    workers.get_by_role("button", name="awaited by others, s").click()
    assert first.inner_text() == "3"
    workers.get_by_role("button", name="worker", exact=True).click()
    workers.get_by_role("button", name="worker", exact=True).click()
    assert first.inner_text() == "0"
    assert workers.locator("tfoot th").inner_text() == "all"


def test_several_runs_begin_with_the_differences_of_their_settings(visit: Callable[..., Page]) -> None:
    page = visit("side by side")
    assert page.locator("h2").first.inner_text() == "Settings that differ"
    rows = page.locator("table").first.locator("tbody tr").all_inner_texts()
    assert [row.split() for row in rows[:1]] == [["--sync", "bsp", "ssp:staleness=3", "–"]]
    page.get_by_role("radio", name="slow-link").check()
    expect(page.get_by_text("the link carries 11.6 MB/s")).to_be_visible()


def test_speeds_that_are_compared_have_the_same_unit(visit: Callable[..., Page]) -> None:
    page = visit("one without samples")
    speed = page.locator("figure", has=page.get_by_text("updates/s", exact=True))
    label = speed.locator("canvas").get_attribute("aria-label") or ""
    first, second = re.findall(r"goes from (.+?)(?:;|\.$)", label)
    assert first == second


def test_the_command_can_be_copied(visit: Callable[..., Page]) -> None:
    page = visit("straggler")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("copied").or_(page.get_by_text("selected: press"))).to_be_visible()


def test_the_page_of_a_large_run_is_small_enough_and_zooms(visit: Callable[..., Page]) -> None:
    assert len(text_of("large").encode()) < MOST_BYTES
    page = visit("large")
    drawn_ms = page.evaluate("performance.getEntriesByName('paceline-drawn')[0].startTime")
    timeline_of(page).focus()
    frames_ms = page.evaluate(
        """async () => {
            const rows = document.querySelector(".rows");
            const times = [];
            for (const key of [..."++++++++++----------++++++", ...Array(20).fill("ArrowRight"), "0"]) {
                const begun = performance.now();
                rows.dispatchEvent(new KeyboardEvent("keydown", { key }));
                await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
                times.push(performance.now() - begun);
            }
            return times.sort((a, b) => a - b);
        }"""
    )
    median_ms, longest_ms = frames_ms[len(frames_ms) // 2], frames_ms[-1]
    print(
        f"\n64 workers x 10,000 iterations: {len(text_of('large').encode()) / 1e6:.1f} MB; first drawn after "
        f"{drawn_ms:.0f} ms; a zoom takes {median_ms:.0f} ms, at most {longest_ms:.0f} ms"
    )
    assert shown_time(page).startswith("0:00")


class Live:
    """A server that shows a run and how it goes on.

    Attributes:
        report: what it answers to a request for data; None to answer with an error.
        asked: number of requests for data.
    """

    def __init__(self, report: RunReport) -> None:
        self.report: RunReport | None = report
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shown = outer.report
                if self.path == "/data":
                    outer.asked += 1
                    content = msgspec.json.encode(shown) if shown is not None else b""
                else:
                    assert shown is not None
                    content = page_of([shown], live="data").encode()
                self.send_response(200 if shown is not None else 503)
                self.send_header("Content-Type", "application/json" if self.path == "/data" else "text/html")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def live() -> Iterator[Live]:
    server = Live(running(straggler(), 60.0))
    yield server
    server.close()


def test_a_live_page_follows_the_run_and_keeps_what_the_reader_has_chosen(
    visit: Callable[..., Page], live: Live
) -> None:
    page = visit(address=live.address)
    expect(page.locator(".live")).to_contain_text("live, updated")
    timeline_of(page).focus()
    press(page, "+", 3)
    page.get_by_role("radio", name="samples").check()
    timeline_of(page).focus()
    zoomed = shown_time(page)
    live.report = running(straggler(), 75.0)
    expect(page.locator(".facts")).to_contain_text("for 1 min 15 s")
    assert shown_time(page) == zoomed
    assert page.evaluate("document.activeElement.className") == "rows"
    assert page.get_by_role("radio", name="samples").is_checked()
    expect(page.get_by_text("a push of worker 3; last: worker 3")).to_be_visible()
    assert findings(page) == []
    live.report = straggler()
    expect(page.locator(".live")).to_contain_text("The run has finished. Its report is ")
    expect(page.get_by_text("What the workers do now")).to_be_hidden()
    asked = live.asked
    page.wait_for_timeout(2500)  # longer than the time between two requests
    assert live.asked == asked


def test_a_live_page_says_when_the_connection_is_lost_and_when_it_is_back(
    visit: Callable[..., Page], live: Live
) -> None:
    page = visit(address=live.address)
    report, live.report = live.report, None
    expect(page.locator(".live")).to_contain_text("The connection to the run is lost")
    live.report = report
    expect(page.locator(".live")).to_contain_text("live, updated")


def test_a_hidden_page_does_not_ask(visit: Callable[..., Page], live: Live) -> None:
    page = visit(address=live.address)
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", { value: true, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    asked = live.asked
    page.wait_for_timeout(2500)  # longer than the time between two requests
    assert live.asked == asked
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", { value: false });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    expect(page.locator(".live")).to_contain_text("live, updated 0 s ago")
    assert live.asked > asked
