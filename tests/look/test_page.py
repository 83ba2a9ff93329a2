"""The page that shows reports: one file, without network, that no name of a run can harm."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from paceline.core.metrics import Metric, MetricPoint
from paceline.look import page
from paceline.look.page import PACKED_FROM, SCRIPTS, page_of
from paceline.look.timelines import COLOURS
from paceline.trace.activity_cells import KINDS
from paceline.trace.report import RunReport
from paceline.words import COLOR_OF
from tests.support.made_reports import (
    MARKUP,
    extremes,
    failed,
    losses,
    made_report,
    nothing,
    slow_link,
    straggler,
)

HERE = files(page)


class Elements(HTMLParser):
    """Collects the elements of a page, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        self.texts.append((self.inside, data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]

    def policy(self) -> str:
        (found,) = [each["content"] for each in self.of("meta") if each.get("http-equiv")]
        assert found is not None
        return found


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data = json.loads(found[1])
    return json.loads(zlib.decompress(base64.b64decode(data))) if isinstance(data, str) else data


def long_report() -> RunReport:
    report = straggler()
    metrics = tuple(losses(f"{MARKUP} {i}", 10.0, 2000, count=2000) for i in range(3))
    return msgspec.structs.replace(report, metrics=metrics)


def sources() -> dict[str, str]:
    return {name: (HERE / name).read_text(encoding="utf-8") for name in (*SCRIPTS, "page.css", "page.html")}


def test_each_script_in_the_folder_is_part_of_the_page() -> None:
    assert sorted(SCRIPTS) == sorted(file.name for file in HERE.iterdir() if file.name.endswith(".js"))


def test_scripts_put_text_into_the_page_only_as_text() -> None:
    for name, text in sources().items():
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
            assert word not in text, name
        if not name.endswith(".html"):
            assert "</" not in text, name


@pytest.mark.parametrize("live", ["", "data"])
def test_the_page_names_nothing_outside_of_it(live: str) -> None:
    text = page_of([straggler()], live=live)
    elements = Elements(text)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert {attributes["href"] for attributes in elements.of("link")} == {"data:,"}
    assert not any("src" in attributes for _, attributes in elements.found)


@pytest.mark.parametrize("live", ["", "data"])
def test_the_policy_allows_this_script_and_style_only(live: str) -> None:
    elements = Elements(page_of([failed()], live=live))
    (script,) = [text for tag, text in elements.texts if tag == "script" and "main()" in text]
    style = "".join(text for tag, text in elements.texts if tag == "style")

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    allowed = "'self'" if live else "'none'"
    assert elements.policy().split("; ") == [
        "default-src 'none'",
        f"script-src 'sha256-{digest(script)}'",
        f"style-src 'sha256-{digest(style)}'",
        "img-src data:",
        f"connect-src {allowed}",
        "base-uri 'none'",
        "form-action 'none'",
    ]


@pytest.mark.parametrize("reports", [[failed()], [failed(), straggler()], [long_report()]])
def test_markup_in_names_makes_no_elements(reports: list[RunReport]) -> None:
    harmless = Elements(page_of([straggler()]))
    text = page_of(reports)
    elements = Elements(text)
    assert [tag for tag, _ in elements.found] == [tag for tag, _ in harmless.found]
    assert "<img" not in text
    assert text.count("</script>") == 2


@pytest.mark.parametrize("report", [straggler(), failed(), nothing(), extremes(), long_report()])
def test_the_data_are_those_of_the_report(report: RunReport) -> None:
    text = page_of([report])
    encoded = msgspec.json.encode(report)
    assert data_of(text)["reports"] == [json.loads(encoded)]


def test_short_data_can_be_read_in_the_page_and_long_data_are_compressed() -> None:
    short, long = straggler(), long_report()
    assert '"reports":[{"name":"digits-bsp"' in page_of([short])
    assert len(msgspec.json.encode(long)) > PACKED_FROM
    assert '"reports"' not in page_of([long]).split('id="data">')[1].split("</script>")[0]


def test_a_short_run_has_a_page_of_some_hundred_kilobytes() -> None:
    assert len(page_of([straggler()]).encode()) < 400_000


def test_values_that_are_not_finite_are_missing_in_the_data() -> None:
    points = tuple(MetricPoint(1.0, 2, 3, value) for value in (float("nan"), float("inf"), 1.5))
    report = RunReport(name="a", run_dir="a", state="failed", metrics=(Metric("loss", "mean", points),))
    (metric,) = data_of(page_of([report]))["reports"][0]["metrics"]
    assert [point["value"] for point in metric["points"]] == [None, None, 1.5]


def test_each_kind_of_time_has_a_color_that_no_curve_has() -> None:
    assert tuple(COLOR_OF) == KINDS
    assert len(set(COLOR_OF.values())) == len(KINDS)
    assert not set(COLOR_OF.values()) & set(COLOURS)
    data = data_of(page_of([nothing()]))
    assert data["kinds"] == [{"name": kind, "color": COLOR_OF[kind]} for kind in KINDS]
    for name, text in sources().items():
        assert not any(color.lower() in text.lower() for color in COLOR_OF.values()), name


def test_a_page_needs_a_report_and_a_live_page_exactly_one() -> None:
    with pytest.raises(ValueError, match="at least one report"):
        page_of([])
    with pytest.raises(ValueError, match="got 2"):
        page_of([nothing(), nothing()], live="data")


def test_the_title_names_the_runs() -> None:
    assert "<title>digits-bsp, slow-link</title>" in page_of([straggler(), slow_link()])


def test_made_timelines_agree_with_their_exact_iterations() -> None:
    report = made_report("a", computing_s=(0.1, 0.2), iterations=50, buckets=64)
    timeline = report.timeline
    assert timeline is not None
    for worker, row in zip(report.workers, timeline.shares, strict=True):
        shares = base64.b64decode(row)
        for kind, time_s in worker.time_s.items():
            total_s = sum(shares[KINDS.index(kind) :: len(KINDS)]) / 255 * timeline.width_s
            assert total_s == pytest.approx(time_s, rel=0.02, abs=0.05)
