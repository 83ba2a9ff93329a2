"""Runs a script alone and with several workers for a few iterations, and returns what would go wrong."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import msgspec

from ..errors import ConfigurationError
from ..run.installed import folder_of_torch
from ..run.job_options import make_job, require_script
from ..start.processes.program import describe_ending, execute
from ..wire.secure import without_secret
from .mistakes import Mistake, ScriptEvidence, find_mistakes
from .observations import ScriptObservation, read_observations, unguarded_writes, unreduced_metrics

PROBE = Path(__file__).with_name("probe.py")

GRACE_S = 10.0  # time for a script to end after its time limit, which the script may notice late


def check_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int = 2,
    iterations: int = 5,
    sync: str = "bsp",
    joint_batch: bool = False,
    timeout_s: float = 120.0,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Mistake]:
    """Run a script in one process and then with several workers, and return what would go wrong.

    The script runs in the current directory, and really writes its files.

    Args:
        script: the script.
        arguments: arguments of the script.
        workers: number of workers, at least 2.
        iterations: number of steps of an optimizer after which the script is ended.
        sync: the sync model.
        joint_batch: True to divide the batches of loaders among the workers. See `paceline.distribute`.
        timeout_s: time in seconds after which the script is ended in any case. This limit holds for the script alone,
            and again for the run with workers.
        tell: called with a description of each run before it begins, and with the number of samples in an update.

    Raises:
        ConfigurationError: an argument is not valid; nothing was started.
        ModuleNotFoundError: torch is not installed; nothing was started.
    """
    require_script(script)
    folder_of_torch()  # without torch, the script would fail, and the script is not to blame
    for name, value, least in (
        ("workers", workers, 2),
        ("iterations", iterations, 1),
        ("timeout", timeout_s, 1),
    ):
        if not least <= value < inf:
            raise ConfigurationError(f"{name} is {value:g}, expected a number >= {least}.")
    # The options are checked before anything is started.
    make_job(workers=workers, servers=1, sync=sync, dry_run=True)
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as name:
        folder = Path(name)
        observer = [str(PROBE), str(folder), str(iterations), str(timeout_s)]
        observed = [str(script), *arguments]
        tell(f"running {script} in one process, for {iterations} iterations")
        failure = _run([*observer, *observed], folder / "alone.log", timeout_s)
        alone = read_observations(folder / "alone.jsonl")
        if failure and not any(each.kind == "raised" for each in alone):  # for example, it was killed
            alone.append(ScriptObservation("raised", failure))
        failure = ""
        if any(each.kind == "stepped" for each in alone) and not any(each.kind == "raised" for each in alone):
            tell(f"running {script} with {workers} workers, for {iterations} iterations")
            run = ["-m", "paceline", "run", "--workers", str(workers), "--servers", "1", "--sync", sync]
            run += ["--joint-batch"] * joint_batch
            run += ["--run-dir", str(folder / "run"), "--observer", shlex.join(observer), "--", *observed]
            failure = _run(run, folder / "run.log", timeout_s)
            if words := _samples(folder / "run" / "summary.json"):
                tell(f"in such a run: {words}")
        found = [read_observations(folder / f"worker-{index}.jsonl") for index in range(workers)]
    files = {str(script.resolve()), *(each.file for each in alone if each.kind == "imported")}
    paths = sorted(map(Path, files))
    return find_mistakes(
        ScriptEvidence(alone, found, failure, unguarded_writes(paths), unreduced_metrics(paths))
    )


def _samples(summary: Path) -> str:
    """Return how many samples an update of a run has, in words; "" if the run has not begun."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(summary.read_bytes(), type=_Summary).samples_per_update
    return ""


class _Summary(msgspec.Struct):
    """The part of `summary.json` that is used here."""

    samples_per_update: str = ""


def _run(arguments: Sequence[str], log: Path, timeout_s: float) -> str:
    """Run Python with these arguments. If Python fails, return its error message, else "".

    The observed script ends itself after `timeout_s`. If the script still runs `GRACE_S` later, it is interrupted.
    """
    with log.open("wb") as output:
        process = execute(
            arguments,
            environment={**without_secret(os.environ), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(timeout_s + GRACE_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {timeout_s + GRACE_S:g} s"
        finally:
            _end(process)
    if process.returncode == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines() or ["no output"]
    message = _error_message(lines, str(log.parent))
    return message or f"{describe_ending(process.returncode)}: {lines[-1]}"


def _error_message(lines: Sequence[str], folder: str) -> str:
    """Return the error message in the output of a run, without traceback, or "" if there is none.

    Lines that name a file in `folder` are left out, because this folder is deleted.
    """
    message: list[str] = []
    for line in lines:
        if message and line.startswith("Traceback "):
            break
        if (message or line.startswith("error: ")) and folder not in line:
            message.append(line.removeprefix("error: "))
    return "\n".join(message)


def _end(process: subprocess.Popen[bytes]) -> None:
    """If a process still runs, interrupt it as Ctrl-C would. If it does not end, kill it."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
