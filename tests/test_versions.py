"""`make versions` knows what to test with which versions, and goes on after a failure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import versions
from tests.support.versions import OLDEST, USUAL, Combination, interpreter, main, pin, rooms

ROOT = Path(__file__).parents[1]


def test_the_usual_combinations_are_the_oldest_the_pinned_and_the_newest() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    [least] = re.findall(r'"torch>=([\d.]+)"', project)
    [python] = re.findall(r'requires-python = ">=([\d.]+)"', project)
    assert (OLDEST.python, OLDEST.torch.rpartition(".")[0]) == (python, least)
    assert USUAL[0] == OLDEST
    assert Combination(python, pin()) in USUAL
    assert "newest" in {each.torch for each in USUAL}
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert sorted({each.python for each in USUAL}) == named


def test_the_pin_of_torch_stands_in_one_place() -> None:
    for name in ("Makefile", "README.md", "pyproject.toml", "CONTRIBUTING.md"):
        assert f"torch=={pin()}" not in (ROOT / name).read_text(), name


def test_the_packages_tests_are_run_and_no_others() -> None:
    assert {"tests/run", "tests/sync", "tests/train", "src"} <= {*rooms()}
    assert not {"tests/benchmarks", "tests/reproductions", "docs", "tests/release", "tests/versions"} & {
        *rooms()
    }


@pytest.mark.parametrize("word", ["3.11", "3.11:new", "2.7.1", "2:2.7.1"])
def test_a_word_that_is_no_combination_is_refused(word: str) -> None:
    with pytest.raises(SystemExit, match="expected PYTHON:TORCH, for example"):
        Combination.read(word)


def test_a_version_of_python_that_is_missing_is_a_row_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(versions, "LEAST_FREE_BYTES", 0)
    assert interpreter("3.0") is None
    assert main(["3.0:2.7.1", "3.1:newest"]) == 1
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split()[0] for row in rows] == ["3.0:2.7.1", "3.1:newest"]
    assert all("exit code 1; see build/versions/" in row for row in rows)
    assert "There is no python3.0" in Path("build/versions/3.0-2.7.1.txt").read_text()
