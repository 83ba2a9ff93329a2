"""`make full` knows every suite, goes on after a failure, and tells how each has ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import full
from tests.support.full import LEFT_OUT, SUITES, what_lacks

ROOT = Path(__file__).parents[1]

MAKE = """
import sys
print({"look": "2 passed, 1 skipped in 1.00s", "ray": "1 failed, 3 passed, 1 error in 9.00s"}.get(sys.argv[1], ""))
sys.exit(sys.argv[1] != "look")
"""


def test_each_target_that_runs_tests_is_a_suite() -> None:
    recipes = re.findall(
        r"^([a-z-]+):[^\n]*\n((?:\t[^\n]*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    testing = {name for name, recipe in recipes if "-m pytest" in recipe}
    assert testing - {*LEFT_OUT} - {"quick"} == {*SUITES}  # what `quick` runs is in `test`
    assert {name for name, _ in recipes} >= {*LEFT_OUT}


def test_all_suites_run_and_the_table_tells_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "make.py").write_text(MAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAKE", f"{sys.executable} make.py")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import full; "
    program += "full.is_there = lambda needed: True; sys.exit(full.main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", program, "ray", "porting", "look"], capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    shown = [line.split() for line in ended.stdout.rpartition("\n\n")[2].splitlines()]
    assert [line[:4] for line in shown] == [
        ["suite", "passed", "failed", "skipped"],
        ["ray", "3", "2", "0"],
        ["porting", "0", "0", "0"],
        ["look", "2", "0", "1"],
    ]
    assert " ".join(shown[1][6:]) == "exit code 1; see build/full/ray.txt"
    assert shown[3][6:] == ["ok"]
    assert Path("build/full/ray.txt").read_text().startswith("1 failed")


def test_what_is_missing_is_said_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(full, "is_there", lambda needed: needed not in ("chromium", "munged"))
    assert full.main(["look", "clusters"]) == 2
    assert capsys.readouterr().out.startswith(
        "These are missing: chromium, munged. With Debian's packages, type:\n    apt-get install chromium munge\n"
    )
    assert what_lacks(["porting"]) == ""
    monkeypatch.setattr(full, "is_there", lambda needed: needed != "root")
    assert what_lacks(["siege", "porting"]).startswith(
        "Some suites emulate machines or start a cluster, which needs "
    )
    assert full.main(["nothing"]) == 2
    assert capsys.readouterr().out.startswith("There is no suite 'nothing'. The suites are: test, thorough, ")
