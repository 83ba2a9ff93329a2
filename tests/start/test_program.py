"""The programs that are executed for a run all start in one place."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

import pytest

import paceline
from paceline.run.job_options import make_job
from paceline.start.processes.program import environment, execute, main_of
from paceline.wire.secure import VARIABLE

SOURCE = Path(paceline.__file__).parent
STARTS = re.compile(
    r"\b(subprocess\.(Popen|run|call|check_\w+)\(|os\.(exec|spawn|posix_spawn|system|popen)\w*\()"
)


def test_programs_are_started_in_one_file() -> None:
    """Fork servers fork, and pools of processes are Python's."""
    starting = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if STARTS.search(path.read_text())
    }
    assert starting == {"start/processes/program.py"}


def test_a_program_gets_neither_the_secret_nor_modules_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.setenv(VARIABLE, "a secret")
    program = f"import os, secrets, sys; print({VARIABLE!r} in os.environ, sys.argv[1:])"
    with execute(["-c", program, "one"], stdout=subprocess.PIPE, cwd=tmp_path) as started:
        assert started.communicate()[0] == b"False ['one']\n"
    assert started.returncode == 0


def test_the_main_function_of_a_module_gets_the_arguments_that_follow(tmp_path: Path) -> None:
    """Wherever the package lies: Python itself is told nothing of it."""
    words = [*main_of("paceline.cli"), "--version"]
    with execute(words, environment={"PYTHONPATH": ""}, stdout=subprocess.PIPE, cwd=tmp_path) as started:
        assert started.communicate()[0].decode() == f"paceline {paceline.__version__}\n"


@pytest.mark.parametrize(
    ("given", "level", "said"),
    [
        ("info", logging.INFO, ""),
        ("", logging.WARNING, ""),
        ("loud", logging.WARNING, "PACELINE_LOG is 'loud', expected one of "),
    ],
)
def test_the_level_of_the_logs_ends_no_process(
    given: str, level: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOG", given)
    program = (
        "import logging; from paceline.start.processes.program import log_to_stderr; log_to_stderr(); "
        "print(logging.getLogger('paceline').level)"
    )
    with execute(["-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        stdout, stderr = started.communicate()
    assert int(stdout) == level
    assert said in stderr.decode()
    assert bool(said) == bool(stderr)


def test_a_run_counts_the_cores_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may allow only a few of the machine's cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 4, 5}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert make_job(workers=2, dry_run=True).servers == 4
    assert environment(2)["OMP_NUM_THREADS"] == "3"
