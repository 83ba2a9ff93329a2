"""`make versions`: run the package's tests with several versions of Python and torch, and end with a table.

Each combination has an environment of its own, which is removed when it is no longer needed, because a build of torch
for CUDA takes 5 to 7 GB. With the oldest version of torch and the usual one, a run is made of both. This file uses
nothing but the standard library, because it runs before the first environment exists.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.full import Outcome, counts, table

__all__ = ["USUAL", "Combination", "main", "rooms"]

FOLDER = Path("build", "versions")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
LEAST_FREE_BYTES = 16_000_000_000  # two environments exist at a time
LANES = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
PIN = re.compile(r"^torch==(\S+)$", re.MULTILINE)
TOGETHER = "tests/versions"


class Combination(NamedTuple):
    """A version of Python and one of torch. "newest" is the newest version of torch that pip finds."""

    python: str
    torch: str

    @classmethod
    def read(cls, text: str) -> Combination:
        """Read a combination from a word such as "3.11:2.7.1"."""
        python, _, torch = text.partition(":")
        if not (re.fullmatch(r"3\.\d+", python) and re.fullmatch(r"\d+(\.\d+)+|newest", torch)):
            raise SystemExit(f"{text!r} is no combination; expected PYTHON:TORCH, for example 3.11:2.7.1.")
        return cls(python, torch)

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}"

    @property
    def environment(self) -> Path:
        """The environment of the combination."""
        return FOLDER / f"{self.python}-{self.torch}"


def pin() -> str:
    """Return the version of torch that all other environments have."""
    found = PIN.search(CONSTRAINTS.read_text())
    assert found is not None, f"{CONSTRAINTS} pins no version of torch"
    return found[1]


OLDEST = Combination("3.11", "2.7.1")
USUAL = (
    OLDEST,
    Combination("3.11", pin()),
    Combination("3.12", pin()),
    Combination("3.13", "newest"),
)
"""The oldest versions, those of the other environments, and the newest ones."""

BESIDE = USUAL[:2]
"""The two versions of torch that train together."""


def rooms() -> list[str]:
    """Return what is tested: the tests of the package's folders, and the examples in its docstrings."""
    folders = {path.parent.name for path in Path("src/paceline").glob("*/__init__.py")}
    return [*sorted(str(path) for path in Path("tests").iterdir() if path.name in folders), "src"]


def interpreter(version: str) -> str | None:
    """Return the path of a version of Python; None if there is none on this machine."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(name), *map(str, pyenv.glob(f"versions/{version}.*/bin/{name}"))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
            return path
    return None


def execute(command: Sequence[str | Path], file: Path, **variables: str) -> int:
    """Run a command, append what it prints to a file, and return the exit code."""
    with file.open("a") as output:
        print(f"\n$ {' '.join(map(str, command))}", file=output, flush=True)
        return subprocess.run(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode


def install(combination: Combination, file: Path) -> int:
    """Create the environment of a combination, and return the exit code."""
    python = interpreter(combination.python)
    if python is None:
        file.write_text(f"There is no python{combination.python} on this machine.\n")
        return 1
    shutil.rmtree(combination.environment, ignore_errors=True)
    constraints = FOLDER / f"{combination.environment.name}-constraints.txt"
    wanted = "" if combination.torch == "newest" else f"torch=={combination.torch}"
    constraints.write_text(PIN.sub(wanted, CONSTRAINTS.read_text()))
    pip = combination.environment / "bin" / "pip"
    options = ("install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "-c", constraints)
    return (
        execute([python, "-m", "venv", combination.environment], file)
        or execute([pip, *options, "torch"], file)
        or execute([pip, *options, "-e", ".[dev]"], file)
    )


def tested(name: str, file: Path, command: Sequence[str | Path], began_s: float, **variables: str) -> Outcome:
    """Run tests, and return how they have ended."""
    code = execute(command, file, OMP_NUM_THREADS="1", **variables)
    numbers = counts(file.read_text(errors="replace"))
    return Outcome(name, code, *numbers, time.monotonic() - began_s, file)


def test(combination: Combination) -> Outcome:
    """Run the package's tests with a combination, and return how they have ended."""
    file, began_s = FOLDER / f"{combination.environment.name}.txt", time.monotonic()
    file.unlink(missing_ok=True)
    python = str(combination.environment / "bin" / "python")
    if code := install(combination, file):
        return Outcome(str(combination), code, 0, 0, 0, time.monotonic() - began_s, file)
    said = subprocess.run(
        [python, "-c", "import platform, torch; print(platform.python_version(), torch.__version__)"],
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split()
    name = f"Python {said[0]}, torch {said[1]}" if len(said) == 2 else str(combination)
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *LANES, *rooms()]
    return tested(name, file, command, began_s)


def test_together() -> Outcome:
    """Train with two versions of torch in one run, and return how it has ended."""
    file = FOLDER / "together.txt"
    file.unlink(missing_ok=True)
    other, own = (str(each.environment.absolute() / "bin" / "python") for each in BESIDE)
    name = f"torch {BESIDE[0].torch} beside {BESIDE[1].torch}"
    command = [own, "-m", "pytest", "-p", "no:cacheprovider", "-s", TOGETHER]
    return tested(name, file, command, time.monotonic(), PACELINE_OTHER_PYTHON=other)


def main(arguments: list[str]) -> int:
    """Test the combinations that are named, or the usual ones, and return the exit code."""
    combinations = [Combination.read(each) for each in arguments] or [*USUAL]
    FOLDER.mkdir(parents=True, exist_ok=True)
    if (free_bytes := shutil.disk_usage(FOLDER).free) < LEAST_FREE_BYTES:
        print(
            f"The environments need {LEAST_FREE_BYTES / 1e9:.0f} GB, and {free_bytes / 1e9:.1f} GB are free."
        )
        return 2
    outcomes: list[Outcome] = []
    waiting = {*BESIDE} if {*BESIDE} <= {*combinations} else set[Combination]()
    ready = set[Combination]()
    try:
        for each in combinations:
            print(f"{time.strftime('%H:%M:%S')} {each}, whose output is {each.environment}.txt", flush=True)
            outcomes.append(test(each))
            ready.add(each)
            if waiting and waiting <= ready:
                outcomes.append(test_together())
                waiting = set()
            for done in ready - waiting:
                shutil.rmtree(done.environment, ignore_errors=True)
    finally:  # Ctrl-C shows what there is
        for each in combinations:
            shutil.rmtree(each.environment, ignore_errors=True)
        print(f"\n{table(outcomes)}", flush=True)
    return int(any(each.code for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
