"""The documentation says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.report.models import LABELS, describe
from paceline.sync import MODELS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "script",
    [
        "make_messages.py",
        "make_sync_models.py",
        "make_papers.py",
        "make_when_it_pays.py",
        "make_same_accuracy.py",
        "make_overview.py",
    ],
)
def test_a_page_is_what_its_sources_say(script: str) -> None:
    ended = subprocess.run([sys.executable, ROOT / "docs" / script, "--check"])
    assert ended.returncode == 0, "run: make docs"


def test_what_is_recommended_is_what_the_study_shows() -> None:
    """Every ratio that recommends a model, with the numbers of better, tied and worse comparisons, is on the page."""
    models = re.sub(r"\s+", " ", (ROOT / "docs" / "sync-models.md").read_text())
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "when-it-pays.md").read_text())
    quoted = re.findall(r"`[^`]+` [\d.]+ to [\d.]+ \(\d+, \d+, \d+\)", models)
    assert len(quoted) > 10
    assert [ratio for ratio in quoted if ratio not in page] == []


@pytest.mark.parametrize("name", MODELS)
def test_the_head_of_a_models_file_has_every_part(name: str) -> None:
    page = describe(name)
    assert set(page.parts) == set(LABELS)
    assert page.title.endswith(".")
    assert page.example.startswith(">>> ")
    fields = {field for field, _ in page.parameters}
    assert fields == set(re.findall(r"(\w+)=", page.notation)), "each parameter is explained"


def test_the_overview_names_files_that_exist() -> None:
    named = re.findall(r"`(src/paceline/[\w/]+(?:\.py)?)`", (ROOT / "docs" / "overview.md").read_text())
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))])
def test_links_between_files_lead_somewhere(page: str) -> None:
    file = ROOT / page if page == "README.md" else ROOT / "docs" / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text()):
        assert (file.parent / target).exists(), f"{page} links to {target}"


def test_each_row_of_the_page_about_failures_names_a_test() -> None:
    rows = [
        line for line in (ROOT / "docs" / "failures.md").read_text().splitlines() if line.startswith("| ")
    ][1:]
    assert rows
    for row in rows:
        file, name = re.findall(r"`(tests/\S+\.py)::(\w+)` \|$", row)[0]
        assert f"def {name}(" in (ROOT / file).read_text(), f"there is no test {name} in {file}"
