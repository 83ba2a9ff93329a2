"""Compares Paceline with DDP, PostLocalSGD, Accelerate, torchft and hivemind on the same work (see `plan` and `work`).

Three machines, each with its own network, processes, mounts and shared memory, train a small language model on the
sources of Python's standard library. Processes that a system needs only once (the coordinator and the servers of
Paceline, the lighthouse of torchft, the first peer of hivemind, rank 0) are on machine 0. Machine 2 is slow, or is
switched off and on.

*Time.* The clock starts when all workers are ready for their first step. The worker on machine 0 saves its weights
together with the time, and the launcher evaluates them later, at the lowest priority. So the measured time includes no
evaluations. But it includes the time to save 0.5 MB five times a second, which is the same for all systems.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import typer

import paceline
from paceline.cli.console import TellShare
from paceline.errors import ConfigurationError
from paceline.wire.secure import new_secret

from ..harness import ROOT, Benchmark, Columns, Figures, busy_share
from ..overlap.namespaces import NetworkLink
from . import work
from .machines import Machine, machines, require_machines
from .plan import (
    CONDITIONS,
    KILLED_S,
    LIMIT_S,
    RESULTS,
    RETURNED_S,
    SYSTEMS,
    TARGET,
    Case,
    Outcome,
    Row,
    Session,
    append_results,
    left,
    quick_cases,
    read_results,
    rows,
)

PORT = 29600
LOOK_S = 0.05
END_S = 120.0  # longest time that a run of Paceline may take to end
QUICK_TARGET = 5.2  # nats per byte; the loss of the initial weights is above 5.5
PACKAGES = ("torch", "accelerate", "torchft", "hivemind")
INSTALL = "make .venv-peers/.ready"

Python = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="PYTHON",
        help=f"Python of an environment with {', '.join(PACKAGES)}: {INSTALL}",
    ),
]
Results = Annotated[
    str,
    typer.Option(
        "--results", metavar="FILE", help="File of the results. Runs in this file are not repeated."
    ),
]

COLUMNS: Columns[Row] = {
    "condition": lambda row: row.condition,
    "system": lambda row: row.system,
    "seconds": lambda row: row.remark or f"{row.time_s:.1f}",
    "low - high": lambda row: "" if row.low_s is None else f"{row.low_s:.1f} - {row.high_s:.1f}",
    "reached": lambda row: f"{row.reached} of {row.runs}" if row.runs else "",
    "MB sent": lambda row: "" if row.sent_mb is None else f"{row.sent_mb:.1f}",
    "samples lost": lambda row: "" if row.lost_samples is None else f"{row.lost_samples:g}",
    "rate": lambda row: "" if row.lr is None else f"{row.lr:g}",
}


class Limits(NamedTuple):
    """The loss and the time at which a run ends, and the times at which a machine is switched off and on.

    All times are in seconds from the first step.
    """

    target: float
    limit_s: float
    killed_s: float
    returned_s: float
    awaits_return: bool = (
        False  # True if a run also waits for the first gradient of a worker that has returned
    )


FULL = Limits(TARGET, LIMIT_S, KILLED_S, RETURNED_S)
SHORT = Limits(QUICK_TARGET, 120.0, 1.0, 1.2, awaits_return=True)


def _require_sound(python: str, **rest: object) -> None:
    require_machines()
    versions_of(python)


@Benchmark(
    minutes=150,
    quick={"quick": True},
    require=_require_sound,
    notes=[
        "docs/make_comparison.py writes a page with the results, the way they were measured, and their limits."
    ],
)
def measure(
    tell: TellShare,
    python: Python = str(ROOT / ".venv-peers" / "bin" / "python"),
    results: Results = str(RESULTS),
    quick: bool = False,
) -> list[Figures[Any]]:
    """Compare Paceline with DDP, PostLocalSGD, Accelerate, torchft and hivemind on three emulated machines.

    A run ends when a small language model has reached a validation loss. If the command was stopped, repeat it to make
    the runs that are left. The other systems need an environment of their own: run `make .venv-peers/.ready`.

    Requires root privileges and the commands ip, tc, unshare, nsenter, hostname and mount.
    """
    if quick:
        cases = quick_cases()
        found = []
        for number, case in enumerate(cases):
            tell(str(case), number / len(cases), slow=True)
            found.append(run_case(case, python, SHORT))
        return [Figures("Does each system work?", found, QUICK_COLUMNS)]
    path = Path(results)
    session = Session(
        str(date.today()),
        f"{os.cpu_count()} cores ({platform.machine()})",
        round(busy_share(), 3),
        versions_of(python),
    )
    append_results(path, session)
    _, outcomes = read_results(path)
    while (following := next(left(outcomes), None)) is not None:
        tell(str(following), len(outcomes) / TOTAL, slow=True)
        outcomes.append(run_case(following, python, FULL))
        append_results(path, outcomes[-1])
    title = f"Seconds to a validation loss of {TARGET:g} nats per byte"
    return [Figures(title, rows(outcomes), COLUMNS, "medians over the seeds", labels=2)]


TOTAL = 4 * 12 + 3 * sum(len(CONDITIONS) - len(system.without) for system in SYSTEMS.values())
QUICK_COLUMNS: Columns[Outcome] = {
    "system": lambda each: SYSTEMS[each.system].title,
    "condition": lambda each: CONDITIONS[each.condition].title,
    "seconds": lambda each: (
        each.failure or (f"{each.time_s:.1f}" if each.time_s is not None else "not reached")
    ),
    "MB sent": lambda each: f"{each.sent_mb:.1f}",
    "samples lost": lambda each: f"{each.lost_samples}",
    "back after": lambda each: "" if each.returned_s is None else f"{each.returned_s:.1f} s",
}


def versions_of(python: str) -> dict[str, str]:
    """Return the versions of all systems. Raises `ConfigurationError` if this Python lacks a system."""
    program = (
        "import importlib.metadata, json, sys; "
        "print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))"
    )
    try:
        done = subprocess.run([python, "-c", program, *PACKAGES], capture_output=True, text=True, check=False)
        reason = (done.stderr.strip() or "no message").splitlines()[-1] if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        raise ConfigurationError(
            f"python is {python!r}, which lacks a compared system: {reason}. Expected the Python of an environment "
            f"with {', '.join(PACKAGES)}; {INSTALL} creates one."
        )
    peers: dict[str, str] = json.loads(done.stdout)
    own = importlib.metadata.version("torch")
    if own.partition("+")[0] != peers["torch"].partition("+")[0]:
        raise ConfigurationError(
            f"python is {python!r}, whose torch is {peers['torch']}, expected {own}, that of Paceline's environment."
        )
    return {**peers, "paceline": paceline.__version__, "python": platform.python_version()}


class _Run:
    """The processes of a run, and what is known about the run so far."""

    def __init__(self, case: Case, python: str, on: Sequence[Machine], folder: Path) -> None:
        self.case, self.on, self.folder = case, on, folder
        self.system, condition = SYSTEMS[case.system], CONDITIONS[case.condition]
        self.task = work.Task(
            case.system,
            str(folder),
            tuple(each.address for each in on),
            condition.slowness,
            case.lr,
            case.seed,
            condition.slow_link,
        )
        self.python = python
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.serving: subprocess.Popen[bytes] | None = None
        self._env = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "PACELINE_SECRET": new_secret(),
        }
        if self.system.program == "with_paceline":
            self.serving = self._serve()
        elif self.system.program == "with_torchft":
            self._start(0, [str(Path(python).with_name("torchft_lighthouse")), *LIGHTHOUSE], {})
        for index in range(len(on)):
            self.start_worker(index)

    @property
    def of_paceline(self) -> bool:
        """True if the system is Paceline."""
        return self.serving is not None

    def start_worker(self, index: int, again: bool = False) -> None:
        """Start the worker of a machine."""
        module = f"benchmarks.peers.{self.system.program}"
        task = {**asdict(self.task), "again": again}
        env = {"PEERS_TASK": json.dumps(task), "PEERS_MACHINE": str(index)}
        command = [self.python, "-m", module]
        if self.of_paceline:
            options = ["--workers", "1", "--run-dir", str(self.folder / f"joined-{index}-{again}")]
            if self.task.slow_link and index:
                options += ["--servers", "1"]
            address = f"{self.task.addresses[0]}:{PORT}"
            command = [sys.executable, "-m", "paceline", "join", *options, "-m", address, module]
        self.workers[index] = self._start(index, command, env, f"worker-{index}.log")

    def events(self, index: int) -> list[dict[str, Any]]:
        """Return what the workers of a machine have recorded."""
        path = self.folder / f"events-{index}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def require_alive(self, expected: Sequence[int]) -> None:
        """Raise `RuntimeError` if the worker of one of these machines has ended."""
        for index in expected:
            if (code := self.workers[index].poll()) is not None:
                said = error_in((self.folder / f"worker-{index}.log").read_text(errors="replace"))
                raise RuntimeError(f"the worker on machine {index} ended with {said or f'exit code {code}'}")

    def end(self) -> dict[str, Any]:
        """End the run. If the system is Paceline, return the ledger of samples."""
        (self.folder / "end").touch()
        if self.serving is None:
            return {}
        self.serving.wait(END_S)
        summary = json.loads((self.folder / "run" / "summary.json").read_text())
        ledger: dict[str, Any] = summary["ledger"]["samples"]
        return ledger

    def _serve(self) -> subprocess.Popen[bytes]:
        options = [*self.system.options, *(self.system.slow_link_options if self.task.slow_link else ())]
        listen = ["--listen", self.task.addresses[0], "--port", str(PORT)]
        where = ["--run-dir", str(self.folder / "run"), "--seed", str(self.task.seed)]
        command = [sys.executable, "-m", "paceline", "serve", "--workers", "3", *listen, *where, *options]
        return self._start(0, command, {})

    def _start(
        self, index: int, command: Sequence[str], env: dict[str, str], log: str = "first.log"
    ) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return self.on[index].start(*command, env={**self._env, **env}, log=output)


LIGHTHOUSE = (
    "--min_replicas",
    "2",
    "--join_timeout_ms",
    "2000",
    "--quorum_tick_ms",
    "50",
    "--bind",
    "0.0.0.0:29510",
)


def run_case(case: Case, python: str, limits: Limits) -> Outcome:
    """Make a run on emulated machines, and return its outcome. Afterwards, no process of the run is left."""
    link = NetworkLink(CONDITIONS[case.condition].rate, 0.0)
    with TemporaryDirectory(prefix="peers-") as folder, machines(work.WORKERS, link) as on:
        run = _Run(case, python, on, Path(folder))
        try:
            return _followed(run, limits)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            for file in sorted(run.folder.glob("*.log")):
                lines = file.read_text(errors="replace").splitlines()
                print(f"-- {file.name} of {case}", *lines[-KEPT_LINES:], sep="\n", file=sys.stderr)
            return Outcome(*case, None, 0.0, 0, None, failure=f"{error}")


KEPT_LINES = 25  # number of lines that are shown of each log of a run that has failed


def error_in(log: str) -> str:
    """Return the last exception in the log of a Python program; "" if there is none.

    >>> error_in("Traceback (most recent call last):\\n  File\\nValueError: no\\nbye")
    'ValueError: no'
    """
    found = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", log, re.MULTILINE)
    return found[-1] if found else ""


def _followed(run: _Run, limits: Limits) -> Outcome:
    """Follow a run until its end."""
    killed = CONDITIONS[run.case.condition].killed
    last = len(run.on) - 1
    begun_s = _begun_s(run)
    before = sum(each.sent_bytes() for each in run.on)
    off_s, on_s = (
        begun_s + each if killed else float("inf") for each in (limits.killed_s, limits.returned_s)
    )
    away, back_s, reached_s, loss = False, float("inf"), None, None
    sent = before
    seen: set[str] = set()
    evaluate = evaluation()
    while time.monotonic() < begun_s + limits.limit_s:
        now_s = time.monotonic()
        if now_s >= off_s:
            run.on[last].switch_off()
            run.workers[last].wait()
            away, off_s = True, float("inf")
        if now_s >= on_s and away:
            run.on[last].switch_on()
            run.start_worker(last, again=True)
            away, back_s, on_s = False, now_s, float("inf")
        run.require_alive([index for index in run.workers if not (away and index == last)])
        if reached_s is None:
            sent = sum(each.sent_bytes() for each in run.on)
            for file in sorted({*run.folder.glob("weights-*.pt")}):
                if file.name not in seen and reached_s is None:
                    seen.add(file.name)
                    at_s, loss = evaluate(file)
                    file.unlink()
                    if loss <= limits.target:
                        reached_s = at_s
        if reached_s is not None and not (
            limits.awaits_return and killed and _returned_s(run, back_s) is None
        ):
            break
        time.sleep(LOOK_S)
    ledger = run.end()
    # a worker of Paceline does not record that its push was dropped
    lost = ledger.get("dropped", 0) + sum(
        work.lost_samples(run.events(index)) for index in range(len(run.on))
    )
    return Outcome(
        *run.case,
        time_s=None if reached_s is None else round(reached_s - begun_s, 3),
        sent_mb=round((sent - before) / 1e6, 3),
        lost_samples=lost,
        loss=None if loss is None else round(loss, 4),
        returned_s=_returned_s(run, back_s),
    )


def _begun_s(run: _Run) -> float:
    """Wait until the workers have begun, and return the time."""
    deadline_s = time.monotonic() + work.READY_S
    while time.monotonic() < deadline_s:
        run.require_alive([*run.workers])
        for event in run.events(0):
            if event["event"] == "begun":
                return float(event["at_s"])
        time.sleep(LOOK_S)
    raise TimeoutError(f"the workers did not begin within {work.READY_S:g} s")


def _returned_s(run: _Run, back_s: float) -> float | None:
    """Return the seconds from the return of the killed machine to its first gradient; None before this gradient."""
    computed = (each["at_s"] for each in run.events(len(run.on) - 1) if each["event"] == "computed")
    first_s = next((at_s for at_s in computed if at_s > back_s), None)
    return None if first_s is None else round(first_s - back_s, 1)


def evaluation() -> Any:
    """Return a function that returns, for a file, the time at which its weights were saved, and their loss."""
    model = work.new_model(0)
    samples = work.Text().validation()

    def evaluate(file: Path) -> tuple[float, float]:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["weights"])
        with _behind_all_others(), torch.no_grad():
            return saved["at_s"], work.loss_of(model, samples).item()

    return evaluate


@contextlib.contextmanager
def _behind_all_others() -> Iterator[None]:
    """Run this thread at the lowest priority in this context."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
