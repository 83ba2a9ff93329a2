"""Measures how much time the option `--wire` saves on slow links.

Two workers and one server are on machines of their own: network namespaces with a rate-limited link each. The workers
train in lockstep, so in each step the server receives two gradients over its link, and sends the weights twice. The
*communication time* is the time of a step minus the time of the backward pass alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import cloudpickle
import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import paceline
from paceline.cli.progress_bar import TellShare
from paceline.core.protocol.wire_format import WireFormat
from paceline.errors import ConfigurationError
from paceline.frontend.optimizer import DistributedOptimizer
from paceline.launcher.live_run.local import Placement
from paceline.launcher.live_run.run import start
from paceline.runtime.job_options import make_job

from .overlap.namespaces import Network, NetworkLink, network, rate_bps
from .transport.timing import Flat, median_s

__all__ = ["WirePlan", "WireReport", "WireRow", "estimate_s", "measure", "table"]

WORKERS = 2
LR = 1e-3
WARM_UP = 2
STARTING_S = 10.0  # approximate time to start and end the processes of a run on two cores
GOAL = 0.6  # largest share of the time of float32 that bf16 in both directions may take


class WirePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the benchmark. Call `require_sound` to check them before anything starts.

    Attributes:
        wire: the format that is compared with float32.
        rate: rate of each link in each direction, in tc's notation, for example "250mbit".
        size_mb: size of the model in MB (2**20 bytes).
        rounds: number of rounds.
        iterations: number of measured steps in each run.
    """

    wire: str = "bf16"
    rate: str = "250mbit"
    size_mb: float = 25.0
    rounds: int = 3
    iterations: int = 6

    def require_sound(self) -> None:
        """Raise `ConfigurationError` if the plan is invalid."""
        rate_bps(self.rate)
        if WireFormat.read(self.wire).exact:
            raise ConfigurationError("wire is 'float32', with which it is compared; expected another format.")
        for name, value in (("rounds", self.rounds), ("iterations", self.iterations)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}, expected a whole number >= 1.")
        if self.size_mb <= 0:
            raise ConfigurationError(f"size is {self.size_mb}, expected a number > 0.")


class WireRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one format.

    Attributes:
        wire: the format.
        communication_ms: communication time of a step, median over the rounds.
        low: the shortest communication time of any round.
        high: the longest communication time of any round.
    """

    wire: str
    communication_ms: float
    low: float
    high: float


class WireReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results, and the conditions of the measurement.

    Attributes:
        plan: the plan.
        rows: one row for float32 and one for the other format.
        shares: for each round, the communication time of the other format as a share of that of float32.
    """

    plan: WirePlan
    rows: tuple[WireRow, WireRow]
    shares: tuple[float, ...]


def estimate_s(plan: WirePlan) -> float:
    """Estimate how long the measurements take, in seconds."""
    step_s = 2 * WORKERS * plan.size_mb * 2**20 * 8 / rate_bps(plan.rate)
    return plan.rounds * (2 * STARTING_S + 1.5 * (WARM_UP + plan.iterations) * step_s)


def measure(plan: WirePlan, tell: TellShare = lambda what, share, slow=False: None) -> WireReport:
    """Measure everything in the plan, round by round.

    Raises:
        ConfigurationError: the plan is invalid, or network namespaces cannot be created. No process has been started.
        RunFailedError: a process failed. All other processes have been stopped.
    """
    plan.require_sound()
    formats = ("float32", plan.wire)
    times_s: dict[str, list[float]] = {wire: [] for wire in formats}
    with network(1 + WORKERS, NetworkLink(plan.rate, 0.0)) as machines:
        for number in range(plan.rounds):
            for index, wire in enumerate(formats):
                share = (2 * number + index) / (2 * plan.rounds)
                tell(f"round {number + 1} of {plan.rounds}, {wire}", share, slow=True)
                times_s[wire].append(_communication_s(plan, wire, machines))
    exact, other = (times_s[wire] for wire in formats)
    return WireReport(
        plan=plan,
        rows=(_row("float32", exact), _row(plan.wire, other)),
        shares=tuple(each / before for each, before in zip(other, exact, strict=True)),
    )


def _row(wire: str, times_s: Sequence[float]) -> WireRow:
    times_ms = [1e3 * time_s for time_s in times_s]
    return WireRow(wire=wire, communication_ms=median(times_ms), low=min(times_ms), high=max(times_ms))


def _communication_s(plan: WirePlan, wire: str, machines: Network) -> float:
    """Train once, and return the mean of the workers' communication times."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        server, *workers = machines.machines
        job = make_job(
            workers=WORKERS, servers=1, transport="tcp", wire=wire, run_dir=out / "run", dry_run=True
        )
        function = (_train, (plan.size_mb, plan.iterations, out))
        start(
            job,
            ["function"],
            cloudpickle.dumps(sys.path) + cloudpickle.dumps(function),
            sys.path,
            console=Console(quiet=True),
            placement=Placement(machines.host, (server,), tuple(workers)),
        )
        times_s = [msgspec.json.decode(file.read_bytes(), type=float) for file in out.glob("time-*")]
    assert len(times_s) == WORKERS
    return sum(times_s) / WORKERS


def _train(size_mb: float, iterations: int, out: Path) -> None:
    """Train, then time backward passes without communication."""
    torch.set_num_threads(1)
    worker = paceline.worker_index()
    model, bare = Flat(size_mb, worker), Flat(size_mb, worker)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)

    def step() -> None:
        model.compute()
        optimizer.step()

    step_s = median_s(step, iterations)
    time.sleep(0.1)
    bare_s = median_s(bare.compute, iterations)
    (out / f"time-{worker}").write_bytes(msgspec.json.encode(step_s - bare_s))


def table(report: WireReport) -> Table:
    """Return the table of the results."""
    plan = report.plan
    made = Table(
        title=f"Communication time of a step with {plan.size_mb:g} MB, {WORKERS} workers, links of {plan.rate}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for heading in ("format", "ms", "low - high", "share of float32", "low - high", f"goal <= {GOAL:g}"):
        made.add_column(heading, justify="left" if heading == "format" else "right", no_wrap=True)
    share = median(report.shares)
    goal = "-" if plan.wire != "bf16" else "met" if share <= GOAL else "missed"
    shares = (f"{share:.2f}", f"{min(report.shares):.2f} - {max(report.shares):.2f}", goal)
    for row, last in zip(report.rows, (("1", "", ""), shares), strict=True):
        made.add_row(row.wire, f"{row.communication_ms:.0f}", f"{row.low:.0f} - {row.high:.0f}", *last)
    return made
