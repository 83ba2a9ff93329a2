"""Measures how well a push and a pull use a network link, compared with iperf3, and what a slow link slows down.

A worker and one or two servers are on machines of their own: network namespaces with a rate-limited link each. The
worker trains with ASP, so a step is a push of the whole gradient and a pull of all weights.

The *link time* of a step is the time in which iperf3 passes as many bytes over the same links, first from the worker
to the server, and then back. The *communication time* is the time of a step minus the time of the backward pass
alone. Their ratio can exceed 1, because a link carries both directions at the same time: the server answers for one
shard while the gradient for another one arrives.

In the second measurement, the link of one of two servers is ten times slower. The *delay* of a shard is the time from
the beginning of an iteration until the shard answers the pull, according to its trace.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import cloudpickle
import msgspec
import torch
from msgspec import structs
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.progress_bar import TellShare
from paceline.errors import ConfigurationError
from paceline.frontend.optimizer import DistributedOptimizer
from paceline.launcher.live_run.local import HostMachine, Placement
from paceline.launcher.live_run.run import start
from paceline.launcher.live_run.run_results import RunResult
from paceline.runtime.job_options import make_job
from paceline.sync.actions import AnswerPull
from paceline.sync.ticks import TICKS_PER_S
from paceline.trace.records import read_records
from paceline.wire.secret import new_secret

from .overlap.namespaces import Network, NetworkLink, network, rate_bps
from .transport.timing import Flat, median_s

__all__ = ["LinksPlan", "LinksReport", "LinksRow", "estimate_s", "measure", "tables"]

SLOWER = 10
"""How many times slower the link of one server is in the second measurement."""

SHARDS = 4  # number of shards in the first measurement
LR = 1e-3
WARM_UP = 2
IPERF_S = 3
STARTING_S = 8.0  # approximate time to start and end the processes of a run on two cores
DELAYED_MB = 8.0  # size of the model in the second measurement
GOAL = 0.9


class LinksPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the benchmark. Call `require_sound` to check them before anything starts.

    Attributes:
        rate: rate of each link in each direction, in tc's notation, for example "1gbit".
        sizes_mb: model sizes in MB (2**20 bytes).
        rounds: number of rounds.
        iterations: number of measured steps in each run.
    """

    rate: str = "1gbit"
    sizes_mb: tuple[float, ...] = (25.0, 100.0)
    rounds: int = 3
    iterations: int = 6

    def require_sound(self) -> None:
        """Raise `ConfigurationError` if the plan is invalid, or iperf3 is not installed."""
        rate_bps(self.rate)
        for name, value in (("rounds", self.rounds), ("iterations", self.iterations)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}, expected a whole number >= 1.")
        if not self.sizes_mb or min(self.sizes_mb) <= 0:
            raise ConfigurationError(f"sizes are {self.sizes_mb}, expected numbers > 0.")
        if shutil.which("iperf3") is None:
            raise ConfigurationError("this benchmark needs the command iperf3; install it first.")


class LinksRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one model size, with or without TLS.

    Attributes:
        size_mb: size of the model in MB (2**20 bytes).
        tls: True if the connections use TLS.
        link_ms: link time of a step, median over the rounds.
        communication_ms: communication time of a step, median over the rounds.
        ratio: link time divided by communication time, median over the rounds.
        low: the smallest ratio of any round.
        high: the largest ratio of any round.
    """

    size_mb: float
    tls: bool
    link_ms: float
    communication_ms: float
    ratio: float
    low: float
    high: float


class LinksReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results, and the conditions of the measurement.

    Attributes:
        rate: rate of each link in each direction.
        iperf_mbit: what iperf3 passes over the link, from the worker and to the worker; medians over the rounds.
        rounds: number of rounds.
        rows: one row per size, without and with TLS.
        delays_ms: for both shards, the median delay in milliseconds with equal links.
        slowed_ms: the same, if the link of the second shard's server is slower.
    """

    rate: str
    iperf_mbit: tuple[float, float]
    rounds: int
    rows: tuple[LinksRow, ...]
    delays_ms: tuple[float, float]
    slowed_ms: tuple[float, float]


def estimate_s(plan: LinksPlan) -> float:
    """Estimate how long the measurements take, in seconds."""
    transfers_s = sum(2 * size * 2**20 * 8 / rate_bps(plan.rate) for size in plan.sizes_mb)
    steps_s = (WARM_UP + plan.iterations) * transfers_s
    return plan.rounds * (2 * IPERF_S + 2 * (len(plan.sizes_mb) * STARTING_S + steps_s)) + 2 * 2 * STARTING_S


def measure(plan: LinksPlan, tell: TellShare = lambda what, share, slow=False: None) -> LinksReport:
    """Measure everything in the plan, round by round.

    Raises:
        ConfigurationError: the plan is invalid, or network namespaces cannot be created. No process has been started.
        RunFailedError: a process failed. All other processes have been stopped.
    """
    plan.require_sound()
    cases = [(size_mb, tls) for size_mb in plan.sizes_mb for tls in (False, True)]
    found: dict[tuple[float, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    speeds = []
    steps = plan.rounds * len(cases) + 2
    with network(2, NetworkLink(plan.rate, 0.0)) as machines:
        worker, server = machines.machines
        for number in range(plan.rounds):
            tell(f"round {number + 1} of {plan.rounds}, iperf3", number * len(cases) / steps)
            speeds.append((_iperf_bps(worker, server), _iperf_bps(server, worker)))
            for index, (size_mb, tls) in enumerate(cases):
                share = (number * len(cases) + index) / steps
                name = "TLS" if tls else "plain TCP"
                tell(f"round {number + 1} of {plan.rounds}, {size_mb:g} MB, {name}", share, slow=True)
                link_s = sum(size_mb * 2**20 * 8 / bps for bps in speeds[-1])
                found[size_mb, tls].append((link_s, _communication_s(plan, size_mb, machines, tls=tls)))
    delays = []
    for factor in (1, SLOWER):
        tell(
            "two servers, " + ("one with a slow link" if factor > 1 else "equal links"),
            1 - 1 / steps,
            slow=True,
        )
        slow = NetworkLink(f"{rate_bps(plan.rate) / factor / 1e6:g}mbit", 0.0)
        with network(3, NetworkLink(plan.rate, 0.0), {2: slow}) as machines:
            delays.append(_delays_ms(plan, machines))
    return LinksReport(
        rate=plan.rate,
        iperf_mbit=(median(up for up, _ in speeds) / 1e6, median(down for _, down in speeds) / 1e6),
        rounds=plan.rounds,
        rows=tuple(_row(*case, times) for case, times in found.items()),
        delays_ms=delays[0],
        slowed_ms=delays[1],
    )


def _row(size_mb: float, tls: bool, times: Sequence[tuple[float, float]]) -> LinksRow:
    ratios = [link_s / communication_s for link_s, communication_s in times]
    return LinksRow(
        size_mb=size_mb,
        tls=tls,
        link_ms=1e3 * median(link_s for link_s, _ in times),
        communication_ms=1e3 * median(communication_s for _, communication_s in times),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
    )


def _iperf_bps(sender: HostMachine, receiver: HostMachine) -> float:
    """Return the rate at which iperf3 passes data over one TCP connection, in bits per second."""
    server = subprocess.Popen(
        [*receiver.prefix, "iperf3", "--server", "--one-off", "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                raise ConfigurationError("iperf3 does not listen: its port 5201 may be in use.")
        command = [*sender.prefix, "iperf3", "--client", receiver.host, "--time", str(IPERF_S), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, process_group=0)
    finally:
        server.terminate()
        server.communicate()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"])


def _communication_s(plan: LinksPlan, size_mb: float, machines: Network, *, tls: bool) -> float:
    with tempfile.TemporaryDirectory() as out:
        worker, server = machines.machines
        _launch(
            plan, size_mb, Placement(machines.host, (server,), (worker,)), Path(out), shards=SHARDS, tls=tls
        )
        times_s = msgspec.json.decode(Path(out, "times").read_bytes(), type=tuple[float, float])
    step_s, bare_s = times_s
    return step_s - bare_s


def _launch(
    plan: LinksPlan, size_mb: float, placement: Placement, out: Path, *, shards: int, tls: bool = False
) -> RunResult:
    """Train in one worker, and return the result of the run."""
    job = make_job(
        workers=1,
        servers=len(placement.servers),
        shards=shards,
        sync="asp",
        transport="tcp",
        run_dir=out / "run",
        dry_run=True,
    )
    if tls:
        job = structs.replace(job, token=new_secret(), secure=True)
    function = (_train, (size_mb, plan.iterations, out))
    payload = cloudpickle.dumps(sys.path) + cloudpickle.dumps(function)
    console = Console(quiet=True)
    return start(job, ["function"], payload, sys.path, console=console, placement=placement)


def _train(size_mb: float, iterations: int, out: Path) -> None:
    """Train as the only worker, then time backward passes without communication."""
    torch.set_num_threads(1)
    model, bare = Flat(size_mb, worker=0), Flat(size_mb, worker=0)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    def backward() -> None:
        bare.zero_grad()
        bare().backward()

    step_s = median_s(step, iterations)
    time.sleep(0.1)
    (out / "times").write_bytes(msgspec.json.encode((step_s, median_s(backward, iterations))))


def _delays_ms(plan: LinksPlan, machines: Network) -> tuple[float, float]:
    """Return, for both shards, the median time from the beginning of an iteration until the shard answers."""
    with tempfile.TemporaryDirectory() as out:
        worker, *servers = machines.machines
        placement = Placement(machines.host, tuple(servers), (worker,))
        result = _launch(plan, DELAYED_MB, placement, Path(out), shards=2)
        [records] = read_records(result.run_dir)
        shards = [trace for trace in result.trace if trace.header.host == "shard"]
    begun_s = {record.iteration: record.begun_s for record in records[WARM_UP:]}
    delays = []
    for trace in sorted(shards, key=lambda each: each.header.index):
        answered_s = {
            action.iteration: entry.event.now_ticks / TICKS_PER_S
            for entry in trace.entries
            for action in entry.actions
            if isinstance(action, AnswerPull)
        }
        delays.append(1e3 * median(answered_s[i] - at_s for i, at_s in begun_s.items() if i in answered_s))
    first, second = delays
    return first, second


def tables(report: LinksReport) -> list[Table]:
    """Return the tables of both measurements."""
    up, down = report.iperf_mbit
    made = Table(
        title=f"A push and a pull over a link of {report.rate}, compared with iperf3",
        title_justify="left",
        caption=f"iperf3: {up:.0f} Mbit/s from the worker, {down:.0f} Mbit/s to it; medians over {report.rounds} "
        f"round{'s' if report.rounds != 1 else ''}; low and high: rounds with the smallest and the largest ratio\n"
        f"goal: a ratio of at least {GOAL:g} without TLS",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for heading in ("MB", "connection", "iperf3 ms", "paceline ms", "ratio", "low - high", "goal"):
        made.add_column(heading, justify="left" if heading == "connection" else "right", no_wrap=True)
    for row in report.rows:
        met = "-" if row.tls else "met" if row.ratio >= GOAL else "missed"
        made.add_row(
            f"{row.size_mb:g}",
            "TLS" if row.tls else "plain",
            f"{row.link_ms:.0f}",
            f"{row.communication_ms:.0f}",
            f"{row.ratio:.2f}",
            f"{row.low:.2f} - {row.high:.2f}",
            met,
        )
    slowed = Table(
        title=f"Time from the beginning of a step until each of two shards of {DELAYED_MB / 2:g} MB answers, ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for heading in ("links of the servers", "shard 0", "shard 1"):
        slowed.add_column(heading, justify="right", no_wrap=True)
    slowed.add_row("equal", *(f"{each:.0f}" for each in report.delays_ms))
    slowed.add_row(f"that of shard 1 {SLOWER} times slower", *(f"{each:.0f}" for each in report.slowed_ms))
    return [made, slowed]
