"""Faults in runs on several machines, each emulated with its own network, processes and mounts.

Each run trains a network on the digits, has one fault at a random moment, and goes on until some epochs after it or
until it fails. Then all that users rely on is checked: everything ends, with the exit codes in
docs/reference/exit-codes.md; no message contains a traceback; the cause is named, and no other; the ledger closes;
and no checkpoint is worse than an earlier one. `make chaos` has sixty of these runs, with a line for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch
from sklearn.datasets import load_digits

from tests.support.emulated import Machine, machines, why_not_emulated
from tests.support.live import await_that, mark
from tests.support.marks import chaos

__all__ = ["mark"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("machines_alone"),
    pytest.mark.skipif(bool(why_not_emulated()), reason=f"emulated machines need {why_not_emulated()}"),
]

RUNS = int(os.environ.get("PACELINE_FAULTS", "60"))
FIRST_SEED = int(os.environ.get("PACELINE_FAULTS_SEED", "0"))

STALL_S = 4.0  # for how long a process is stopped
SETTLED_S = 100.0  # from the end of the fault until the run has trained further, or has failed
END_S = 60.0  # until every process has ended after that
GOOD = 0.8  # an accuracy that no untrained network reaches
NOISE = 0.08  # how much worse the accuracy may be than that of an earlier epoch

SYNCS = ("bsp", "asp", "ssp:staleness=2", "elastic-bsp", "spec-sync")
PORT = "29600"
STARTED = 3  # number of machines that join at the beginning


@dataclass(frozen=True)
class Expected:
    """How a run with a fault must end.

    Attributes:
        serve: exit codes of `paceline serve`.
        victim: exit codes of `paceline join` on the machine with the fault, if workers run there.
        others: exit codes of `paceline join` on the other machines.
        loss: matches what is said of each lost worker; "" if no worker may be lost.
        lost: True if a worker must be lost if the fault came after training began.
        said: matches what `paceline serve` says, or `paceline join` if there is no `serve` any more.
        late: exit codes of `paceline join` on a machine that joins after the fault, if the run goes on.
        weights: True if weights must be saved if the fault came after training began.
    """

    serve: tuple[int, ...] = (0,)
    victim: tuple[int, ...] = (0,)
    others: tuple[int, ...] = (0,)
    loss: str = ""
    lost: bool = False
    said: str = ""
    late: tuple[int, ...] = (0,)
    weights: bool = True


SILENT = "no heartbeat of machine"
# A server on another machine cannot be reached, and the run cannot continue without it.
CUT_OFF = Expected((1,), (1,), (1,), said=f"server 1.*{SILENT}", weights=False)
ENDS_AT_ONCE = "the run ends while a machine joins"
# (what is struck, what happens to it) -> how the run ends
FAULTS = {
    ("worker", "SIGKILL"): Expected(victim=(0, 1), loss="SIGKILL", lost=True),
    ("worker", "SIGSTOP"): Expected(loss="has been stopped for"),
    ("worker", "SIGTERM"): Expected(victim=(0, 1), loss="SIGTERM"),
    ("agent", "SIGKILL"): Expected(victim=(137,), loss="connection to its machine|SIGKILL", lost=True),
    ("agent", "SIGSTOP"): Expected(loss=SILENT),
    ("agent", "SIGTERM"): Expected(victim=(143,)),
    ("agent", "SIGINT"): Expected(victim=(130,)),
    ("machine", "loses power"): Expected(victim=(137,), loss=SILENT, lost=True),
    ("machine", "link down for 2 s"): Expected(),
    ("machine", "link down for 6 s"): Expected(loss=SILENT, lost=True),
    ("machine", "link down for 15 s"): Expected(loss=SILENT, lost=True),
    ("serve", "link down for 2 s"): Expected(),
    ("serve", "link down for 6 s"): Expected(loss=SILENT, lost=True),
    ("serve", "link down for 15 s"): Expected(loss=SILENT, lost=True),
    ("server", "SIGKILL"): Expected((1,), (1,), (1,), said=r"server \d.*SIGKILL", weights=False),
    ("remote server", "SIGKILL"): Expected((1,), (1,), (1,), said=r"server 1.*SIGKILL", weights=False),
    ("remote server", "loses power"): Expected((1,), (137,), (1,), said=f"server 1.*{SILENT}", weights=False),
    ("server", "SIGSTOP"): Expected(),
    ("serve", "SIGKILL"): Expected(
        (137,), (1,), (1,), said="the connection to the coordinator was lost|cannot connect"
    ),
    ("serve", "SIGSTOP"): Expected(loss=SILENT),
    ("serve", "SIGTERM"): Expected(
        (143,), (1,), (1,), said="terminated: all processes of the run have ended"
    ),
    ("nothing", "another machine joins"): Expected(),
    ("nothing", ENDS_AT_ONCE): Expected(late=(0, 1)),
}
# What must not be said where nothing of the kind has happened.
UNTRUE = ("Traceback", "the script failed", "exit code 0", "the run failed: the run failed")

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch

import paceline

torch.manual_seed(0)
x, y, test_x, test_y = torch.load("digits.pt")
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
paceline.track(ema=ema)


def accuracy(network):
    with torch.no_grad():
        return (network(test_x).argmax(dim=1) == test_y).float().mean().item()


loop = paceline.epochs(1000)
for epoch in loop:
    for inputs, targets in loader:

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
        Path(f"stepped-{paceline.worker_index()}").touch()
        time.sleep(0.03)
    ema.update_parameters(model)
    if paceline.is_main():
        with paceline.evaluating(model) as snapshot:
            found = accuracy(snapshot)
        paceline.save({"model": model.state_dict(), "ema": ema.module.state_dict()}, "checkpoint.pt")
        with open("results", "a") as results:
            print(epoch, paceline.worker_index(), found, accuracy(ema.module), time.time(), file=results)
        print(f"epoch {epoch}: {found:.1%}", flush=True)
    if Path("enough").exists():
        loop.stop()
"""


@dataclass(frozen=True)
class Job:
    """A run, and the fault in it.

    Attributes:
        target: what is struck.
        event: what happens to it. See `FAULTS`.
        sync: the sync model.
        servers: number of servers.
        remote: True if one of them is on a machine that joins.
        early: True if the moment is counted from the start, and not from the end of the first epoch.
        moment_s: the moment of the fault.
        takes_first: True if the machine of worker 0 is struck, if possible.
        grows: True if another machine joins after the fault.
    """

    target: str
    event: str
    sync: str
    servers: int
    remote: bool
    early: bool
    moment_s: float
    takes_first: bool
    grows: bool

    @property
    def expected(self) -> Expected:
        """How the run must end."""
        long = self.event in ("link down for 6 s", "link down for 15 s")
        return CUT_OFF if self.remote and self.target == "serve" and long else FAULTS[self.target, self.event]

    def __str__(self) -> str:
        since = "the start" if self.early else "the first epoch"
        where = ", one on a machine that joins" if self.remote else ""
        return (
            f"{self.target}: {self.event}, {self.moment_s:.1f} s after {since} "
            f"({self.sync}, {self.servers} servers{where})"
        )


def drawn_job(seed: int) -> Job:
    draw = random.Random(seed)
    target, event = list(FAULTS)[seed % len(FAULTS)]
    servers = draw.choice([1, 2])
    remote = target == "remote server" or (servers > 1 and draw.random() < 0.5)
    early = draw.random() < 0.2
    return Job(
        target,
        event,
        draw.choice(SYNCS),
        2 if remote else servers,
        remote,
        early,
        draw.uniform(0.0, 3.0 if early else 6.0),
        takes_first=draw.random() < 0.6,
        grows=target == "nothing" or draw.random() < 0.3,
    )


@dataclass
class Outcome:
    """What came of one run.

    Attributes:
        job: the run.
        victim: name of the machine that was struck.
        trained: True if training had begun before the fault.
        hit: True if what was to be struck was there.
        roles: name of each machine -> "serve", "victim", "others" or "late".
        codes: name of each machine -> the exit code of its program.
        said: name of each machine -> the messages of its program.
        hung: what did not happen in time.
    """

    job: Job
    victim: str
    trained: bool
    hit: bool
    roles: dict[str, str]
    codes: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)


def write_digits() -> None:
    """Write the digits to a file, four fifths of them for training."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.save((x[:1437], y[:1437], x[1437:], y[1437:]), "digits.pt")


def results() -> list[list[float]]:
    """The epoch, the worker, the two accuracies and the time of each evaluation so far."""
    path = Path("results")
    lines = path.read_text().splitlines() if path.exists() else []
    return [[float(word) for word in line.split()] for line in lines]


def happens(condition: object, timeout_s: float) -> bool:
    """Wait until a condition holds. Return False if it did not hold in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


class Cluster:
    """The machines of one run.

    Args:
        job: the run.
        serving: the machine that serves it.
        joining: the other machines, of which the last one joins after the fault. Of those that join at the beginning,
            the last one brings a server if the job has one there.
        mark: marks the processes of this test.
    """

    def __init__(self, job: Job, serving: Machine, joining: list[Machine], mark: str) -> None:
        self.job = job
        self.serving = serving
        self.present = joining[:STARTED]
        self._late = joining[STARTED]
        self._mark = mark
        self._with_server = self.present[-1] if job.remote else None

    def start(self) -> None:
        """Start the run, and let machines join it."""
        job, address = self.job, self.serving.address
        self.serving.start(
            *("-m", "paceline", "serve", "--run-dir", "run", "--workers", f"2:{STARTED + 1}"),
            *("--listen", address, "--port", PORT, "--sync", job.sync, "--servers", str(job.servers)),
            *(["--remote-servers", "1"] if job.remote else []),
        )
        await_that(lambda: "paceline join" in self.serving.said, "serve says how to join")
        for machine in self.present:
            self._join(machine)

    def strike(self) -> Outcome:
        """Let the fault happen. Return an outcome without what came of it."""
        job = self.job
        if not job.early:
            await_that(results, "the first epoch has ended")
        time.sleep(job.moment_s)  # the moment is what this is about
        trained = bool(results())
        victim = self._victim()
        roles = {machine.name: "others" for machine in self.present}
        roles |= {self._late.name: "late", victim.name: "victim", self.serving.name: "serve"}
        hit = True
        if job.event == "loses power":
            victim.lose_power(self._mark)
        elif job.event.startswith("link"):
            victim.set_link("down")
            time.sleep(float(job.event.split()[-2]))
            victim.set_link("up")
        elif job.event.startswith("SIG"):
            hit = self._signal(victim)
        if job.grows:
            self.present.append(self._late)
            self._join(self._late)
        return Outcome(job, victim.name, trained, hit, roles)

    def settles(self, victim: str) -> bool:
        """Wait until all machines have trained further, or the run has failed. Return False if neither happens."""
        since_s = time.time()
        # A machine whose worker was asked to leave waits for the end of the run.
        asked = victim if (self.job.target, self.job.event) == ("worker", "SIGTERM") else ""

        def has_stepped(machine: Machine) -> bool:
            workers = [name for name in machine.processes(self._mark) if name.startswith("worker")]
            paths = [Path(f"stepped-{name.split()[1]}") for name in workers]
            return any(path.exists() and path.stat().st_mtime > since_s for path in paths)

        def has_settled() -> bool:
            if self.serving.ended:
                return True
            epochs = sum(line[4] > since_s for line in results())
            return epochs >= 2 and all(
                machine.name == asked or machine.ended or has_stepped(machine) for machine in self.present
            )

        return happens(has_settled, SETTLED_S)

    def end(self, outcome: Outcome) -> None:
        """Let the run end, and record how its programs have ended and what they have said."""
        Path("enough").touch()
        for machine in [self.serving, *self.present]:
            try:
                outcome.codes[machine.name] = machine.wait(END_S)
            except subprocess.TimeoutExpired:
                outcome.hung.append(f"{machine.name} has not ended")
        for machine in [self.serving, *self.present]:
            outcome.said[machine.name] = machine.said

    def _join(self, machine: Machine) -> None:
        # A link that is down for long must not let a machine give up.
        wait_s = 30 if "link" in self.job.event else 8
        machine.start(
            *("-m", "paceline", "join", "--secret-file", "run/secret", "--wait", str(wait_s)),
            *("--run-dir", f"logs-{machine.name}"),
            *(["--servers", "1"] if machine is self._with_server else []),
            *(f"{self.serving.address}:{PORT}", "train.py"),
        )

    def _victim(self) -> Machine:
        """Return the machine that is struck. One with a server is struck only if the fault is about the server."""
        if self.job.target == "remote server":
            return self.present[-1]
        if self.job.target in ("serve", "server", "nothing"):
            return self.serving
        able = [machine for machine in self.present if machine is not self._with_server]
        with_first = [machine for machine in able if "worker 0" in machine.processes(self._mark)]
        others = [machine for machine in able if machine not in with_first]
        return (with_first if self.job.takes_first and with_first else others)[0]

    def _signal(self, victim: Machine) -> bool:
        """Send the signal. Return False if the process is not there."""
        running = victim.processes(self._mark)
        role = {"worker": "worker", "server": "server", "remote server": "server"}.get(
            self.job.target, "program"
        )
        found = [process for name, process in sorted(running.items()) if name.startswith(role)]
        if not found:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[0], signal.Signals[self.job.event])
        if self.job.event == "SIGSTOP":
            time.sleep(STALL_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[0], signal.SIGCONT)
        return True


def problems(outcome: Outcome) -> list[str]:
    """What is not as documented."""
    expected, found = outcome.job.expected, list(outcome.hung)
    serving, *others = outcome.codes
    for name, code in outcome.codes.items():
        codes: tuple[int, ...] = getattr(expected, outcome.roles[name])
        if outcome.roles[name] == "late" and expected.serve != (0,):
            codes = (1, 2)  # the run may have failed before it could be reached
        if outcome.hit and code not in codes:
            found.append(f"exit code {code} of {name}, expected one of {codes}")
    for name, said in outcome.said.items():
        found += [f"{name} says {words!r}" for words in UNTRUE if words in said]
    told = outcome.said[serving if outcome.codes.get(serving) != 137 else others[0]]
    if expected.said and outcome.hit and not re.search(expected.said, told):
        found.append(f"the cause is not named: {expected.said}")
    found += problems_of_results(outcome)
    path = Path("run", "summary.json")
    if path.exists():
        found += problems_of_summary(outcome, json.loads(path.read_text()))
    elif outcome.codes.get(serving) == 0:
        found.append("no summary")
    for path in [*Path().rglob("*.unfinished"), *Path().rglob("*.tmp")]:
        found.append(f"{path} is left")
    return found


def problems_of_summary(outcome: Outcome, summary: dict[str, object]) -> list[str]:
    """What does not agree in the summary of a run."""
    found = []
    losses: dict[str, str] = summary["losses"]  # type: ignore[assignment]
    for worker, loss in losses.items():
        if not outcome.job.expected.loss or not re.search(outcome.job.expected.loss, loss):
            found.append(f"worker {worker} was lost: {loss}")
    if outcome.job.expected.lost and outcome.trained and outcome.hit and not losses:
        found.append("no worker was lost")
    ledger: dict[str, dict[str, int]] = summary["ledger"]  # type: ignore[assignment]
    samples, pushes = ledger["samples"], ledger["pushes"]
    if summary.get("epochs"):
        total = summary["epochs"] * summary["epoch_samples"]  # type: ignore[operator]
        if sum(samples.values()) != total:
            found.append(f"samples {samples} are not the {total} of {summary['epochs']} epochs")
    iterations: dict[str, int] = summary.get("iterations", {})  # type: ignore[assignment]
    if pushes and sum(pushes.values()) != sum(iterations.values()):
        found.append(f"pushes {pushes} are not the {sum(iterations.values())} iterations")
    faults: list[str] = summary["faults"]  # type: ignore[assignment]
    return found + [f"fault: {fault}" for fault in faults]


def problems_of_results(outcome: Outcome) -> list[str]:
    """What a script has saved must not be worse than what was there before."""
    found, best = [], 0.0
    seen: dict[int, int] = {}
    for epoch, worker, accuracy, averaged, _ in results():
        if min(accuracy, averaged if best > GOOD else accuracy) < best - NOISE:
            found.append(
                f"epoch {epoch:.0f} of worker {worker:.0f}: {accuracy}, average {averaged}, after {best}"
            )
        best = max(best, accuracy)
        if seen.setdefault(int(epoch), int(worker)) != worker:
            found.append(f"workers {seen[int(epoch)]} and {worker:.0f} have saved epoch {epoch:.0f}")
    saved = sorted(Path("run").glob("weights*.safetensors"))
    if (
        outcome.trained
        and outcome.job.expected.weights
        and not saved
        and outcome.job.expected.serve != (137,)
    ):
        found.append("no weights")
    if saved and saved[0].stem == "weights" and best > GOOD:
        _, _, x, y = torch.load("digits.pt")
        weights = safetensors.torch.load_file(saved[0])
        network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
        network.load_state_dict(weights)
        final = (network(x).argmax(dim=1) == y).float().mean().item()
        if final < best - NOISE:
            found.append(f"the final weights have an accuracy of {final}, after {best}")
    return found


@pytest.mark.parametrize("seed", chaos(*range(FIRST_SEED, FIRST_SEED + RUNS)))
def test_a_fault_on_several_machines_ends_as_documented(seed: int, mark: str) -> None:
    job = drawn_job(seed)
    write_digits()
    Path("train.py").write_text(SCRIPT)
    with machines(STARTED + 2) as (serving, *joining):
        cluster = Cluster(job, serving, joining, mark)
        cluster.start()
        outcome = cluster.strike()
        if job.event != ENDS_AT_ONCE and not cluster.settles(outcome.victim):
            outcome.hung.append("the run has not trained further")
        cluster.end(outcome)
    found = problems(outcome)
    missed = "" if outcome.hit else " (it was not there)"
    codes = list(outcome.codes.values())
    print(f"\n{seed}: {job} on {outcome.victim}{missed}: {codes}: {found or 'as documented'}", flush=True)
    report = "\n".join(f"--- {name}\n{said}" for name, said in outcome.said.items())
    assert not found, f"{job}: {found}\n{report}"
