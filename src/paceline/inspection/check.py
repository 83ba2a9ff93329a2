"""Runs a script alone and with several workers for a few iterations, and returns what would go wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ..errors import ConfigurationError, RunFailedError, first_line
from ..launcher.endings import describe_ending
from ..launcher.launch import run_script
from ..runtime.job import make_job
from . import probe
from .mistakes import Evidence, Mistake, find_mistakes
from .observations import Observation, read_observations
from .source import unguarded_writes

__all__ = ["check_script"]

GRACE_S = 10.0  # time for a script to end after its time limit, which it may notice late


def check_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int = 2,
    iterations: int = 5,
    sync: str = "bsp",
    timeout_s: float = 120.0,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Mistake]:
    """Run a script in one process and then with several workers, and return what would go wrong.

    The script runs in the current directory, and the files that it writes are written.

    Args:
        script: the script.
        arguments: arguments of the script.
        workers: number of workers, at least 2.
        iterations: number of steps of an optimizer after which the script is ended.
        sync: the sync model.
        timeout_s: time in seconds after which the script is ended in any case; once alone and once with workers.
        tell: called with a description of what begins now.

    Raises:
        ConfigurationError: an argument is not valid; nothing was started.
    """
    if not script.is_file():
        what = "is not a file" if script.exists() else "does not exist"
        raise ConfigurationError(f"the script {str(script)!r} {what}; give the path of a Python file.")
    for name, value, least in (
        ("workers", workers, 2),
        ("iterations", iterations, 1),
        ("timeout", timeout_s, 1),
    ):
        if value < least:
            raise ConfigurationError(f"{name} is {value:g}, expected at least {least}.")
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        job = make_job(workers=workers, servers=1, sync=sync, run_dir=Path(folder, "run"), dry_run=True)
        command = [folder, str(iterations), str(timeout_s), str(script), *arguments]
        tell(f"running {script} in one process, for {iterations} iterations")
        alone = _run_alone(command, Path(folder), timeout_s)
        failure = ""
        if not any(each.kind == "raised" for each in alone):
            tell(f"running {script} with {workers} workers, for {iterations} iterations")
            try:
                run_script(job, Path(probe.__file__), command, console=Console(quiet=True))
            except RunFailedError as error:
                failure = first_line(error)
        found = [read_observations(Path(folder, f"worker-{index}.jsonl")) for index in range(workers)]
    files = {str(script.resolve()), *(each.file for each in alone if each.kind == "imported")}
    return find_mistakes(Evidence(alone, found, failure, unguarded_writes(sorted(map(Path, files)))))


def _run_alone(command: Sequence[str], folder: Path, timeout_s: float) -> list[Observation]:
    """Run the script in one process, and return the observations."""
    log, code = folder / "alone.log", 0
    with log.open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            [sys.executable, "-P", probe.__file__, *command],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s + GRACE_S,
            check=False,
        ).returncode
    observations = read_observations(folder / "alone.jsonl")
    if code and not any(each.kind == "raised" for each in observations):  # for example, it was killed
        last = log.read_text(errors="replace").splitlines()[-1:] or ["no output"]
        observations.append(
            Observation("raised", f"its process {describe_ending(code)}; last output: {last[0]}")
        )
    return observations
