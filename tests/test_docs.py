"""The documentation says what the code says."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

import paceline
from paceline.look.models import LABELS, describe
from paceline.shard import foreign
from paceline.sync import MODELS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    "script",
    [
        "make_messages.py",
        "make_sync_models.py",
        "make_papers.py",
        "make_when_it_pays.py",
        "make_same_accuracy.py",
        "make_codecs.py",
        "make_comparison.py",
        "make_overview.py",
        "make_reference.py",
    ],
)
def test_a_page_is_what_its_sources_say(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [script, "--check"])
    monkeypatch.setattr(foreign, "_sources", [])  # of optimizers, which some pages' problems set
    monkeypatch.setattr(foreign, "_classes", {})
    monkeypatch.setattr("sys.path", [*sys.path])  # a script adds the folder of the project
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "docs" / script), run_name="__main__")
    assert not ended.value.code, "run: make docs"


def test_what_is_recommended_is_what_the_study_shows() -> None:
    """Every ratio that recommends a model, with the numbers of better, tied and worse comparisons, is on the page."""
    models = re.sub(r"\s+", " ", (ROOT / "docs" / "models" / "index.md").read_text())
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "models" / "when-it-pays.md").read_text())
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


def test_no_two_models_have_the_same_title() -> None:
    titles = [describe(name).title for name in MODELS if MODELS[name].__module__.startswith("paceline.")]
    assert len({*titles}) == len(titles) > 10


def test_a_switch_is_shown_as_users_write_it() -> None:
    assert describe("ringmaster").notation == "ringmaster:threshold=...,stop=false"


def test_the_guide_lists_all_extras_with_their_packages() -> None:
    page = (ROOT / "docs" / "start" / "installation.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    assert rows.keys() == EXTRAS.keys()
    for name, requirements in EXTRAS.items():
        others = {other for each in requirements for other in re.findall(r"^paceline\[(.+)\]", each)}
        packages = {re.match(r"[\w-]+", each)[0] for each in requirements} - {"paceline"}  # type: ignore[index]
        words = set(re.findall(r"[\w-]+", rows[name]))
        assert packages | set(",".join(others).split(",")) - {""} <= words, name


def test_messages_and_pages_name_extras_that_exist() -> None:
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    named = {
        name.strip()
        for page in pages
        for names in re.findall(r"paceline\[([a-z, ]+)\]", page.read_text())
        for name in names.split(",")
    }
    assert len(named) > 5
    assert named <= EXTRAS.keys()


def test_the_version_stands_in_one_place_and_the_others_follow() -> None:
    assert "version" in PROJECT["dynamic"]
    [cited] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    versions = re.findall(r"^## (\S+) - .+$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited == versions[0] == paceline.__version__
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split("."))], reverse=True)


def test_the_readme_installs_what_the_examples_import() -> None:
    """Its two lines bring every package that a script in `examples/` imports, by the metadata of the project."""
    readme = (ROOT / "README.md").read_text()
    [extras] = re.findall(r"^    pip install '\.\[([\w,]+)\]'$", readme, re.MULTILINE)
    wanted = [*PROJECT["dependencies"]]
    open_extras = extras.split(",")
    for name in open_extras:  # which grows
        for requirement in EXTRAS[name]:
            inner = re.match(r"paceline\[(.+)\]", requirement)
            open_extras += inner[1].split(",") if inner else []
            wanted += [] if inner else [requirement]
    names = {re.match(r"[\w-]+", each)[0].lower() for each in wanted}  # type: ignore[index]
    brought = {*names, "paceline", "sklearn" if "scikit-learn" in names else ""}
    # Each of the examples for a framework says what it needs.
    scripts = [each for each in (ROOT / "examples").rglob("*.py") if each.parent.name != "frameworks"]
    assert scripts
    for script in scripts:
        imported = {
            module.partition(".")[0]
            for node in ast.walk(ast.parse(script.read_text()))
            for module in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
        }
        own = {path.stem for path in script.parent.glob("*.py")}
        assert imported - set(sys.stdlib_module_names) - own <= brought, script


def test_the_overview_names_files_that_exist() -> None:
    named = re.findall(r"`(src/paceline/[\w/]+(?:\.py)?)`", (ROOT / "docs" / "overview.md").read_text())
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_the_reference_has_every_public_name_and_variable() -> None:
    reference = ROOT / "docs" / "reference"
    named = set(re.findall(r"^\| `paceline\.(\w+)` \|", (reference / "api.md").read_text(), re.MULTILINE))
    assert named == {name for name in paceline.__all__ if not inspect.ismodule(getattr(paceline, name))}
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    variables = set(re.findall(r"PACELINE_[A-Z]+", sources)) - {
        "PACELINE_PARENT"
    }  # of a process, not of users
    page = (reference / "settings.md").read_text()
    assert {name for name in variables if f"`{name}`" not in page} == set()


def test_no_page_is_too_long() -> None:
    lines = {page: len((ROOT / "docs" / page).read_text().splitlines()) for page in PAGES}
    assert {page: count for page, count in lines.items() if count > 250} == {}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "reproductions", "examples", "docs"])
def test_pages_that_messages_and_docstrings_name_exist(folder: str) -> None:
    named = {
        (path.relative_to(ROOT), page)
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml", ".sh", ".sbatch", ".yaml")
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text())
    }
    assert named or folder != "src"
    assert [(file, page) for file, page in named if not (ROOT / page).exists()] == []


def test_each_page_of_the_site_is_listed_once() -> None:
    """The items of `index.md` are the table of contents (`docs/conf.py`)."""
    listed = [
        (index.parent / target).resolve()
        for index in (ROOT / "docs").rglob("index.md")
        for target in re.findall(r"^- \[[^\]]+\]\(([^)#:]+\.md)\)", index.read_text(), re.MULTILINE)
    ]
    assert sorted(listed) == sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "index.md"})


def test_each_row_of_the_page_about_failures_names_a_test() -> None:
    rows = [
        line for line in (ROOT / "docs" / "failures.md").read_text().splitlines() if line.startswith("| ")
    ][1:]
    assert rows
    for row in rows:
        file, name = re.findall(r"`(tests/\S+\.py)::(\w+)` \|$", row)[0]
        assert f"def {name}(" in (ROOT / file).read_text(), f"there is no test {name} in {file}"
