"""Measures how well a push and a pull use a network link, compared with iperf3, and which shards a slow link delays.

A worker and one or two servers are on machines of their own: network namespaces with a rate-limited link each. The
worker trains with ASP, so a step is a push of the whole gradient and a pull of all weights.

The *link time* of a step is the time in which iperf3 sends as many bytes as the step does over the same links, first
from the worker to the server, and then back. The *communication time* is the time of a step minus the time of the
backward pass alone. The link time can exceed the communication time, because a link carries both directions at the same
time: the server answers for one shard while the gradient for another shard arrives.

In the second measurement, the link of one of two servers is ten times slower. The *delay* of a shard is the time from
the beginning of an iteration until the shard answers the pull, according to its trace.

With `--wire`, a format of gradients and weights is compared with float32 instead. Two workers train in lockstep, so
in each step the server receives two gradients over its link, and sends the weights twice. Then four workers, one of
which computes three times slower, train twice with a server on a fast link: first with float32 and equal batches, then
with the format and balanced batches.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import cloudpickle
import msgspec
import torch
import typer
from msgspec import structs
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from paceline.cli.console import TellShare
from paceline.core.layout import WireFormat
from paceline.errors import ConfigurationError
from paceline.run.job_options import make_job
from paceline.start.local import HostMachine, ProcessPlacement
from paceline.start.run import start
from paceline.sync.actions import AnswerPull
from paceline.sync.ticks import TICKS_PER_S
from paceline.trace.recording import read_records
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.prepare import prepare
from paceline.train.session import worker_index
from paceline.wire.secure import new_secret

from .harness import (
    WARM_UP,
    Benchmark,
    Columns,
    Figures,
    Rate,
    Rounds,
    SizesMb,
    in_turns,
    live,
    median_s,
    rounds_text,
    spread,
)
from .overlap.namespaces import Network, NetworkLink, network, rate_bps
from .transport.plan import Flat

SLOWER = 10  # how many times slower the link of one server is in the second measurement
SHARDS = 4  # number of shards in the first measurement
IPERF_S = 3
DELAYED_MB = 8.0  # size of the model in the second measurement
GOAL = 0.9
WIRE_WORKERS = 2
WIRE_GOALS = {"bf16": 0.6, "int4": 0.25}  # largest share of the time of float32 that a format may take
UNEQUAL = (1.0, 1.0, 1.0, 3.0)  # each worker's slowness in the second measurement with a format
SERVER_RATE = "1gbit"  # rate of the link of the server of these workers
COMPUTE_S = 0.03  # time in which the fastest of these workers compute a batch
BATCH = 12


class LinksRow(msgspec.Struct, frozen=True):
    """The results for one model size, with or without TLS: medians over the rounds."""

    size_mb: float
    tls: bool
    link_ms: float
    communication_ms: float
    ratio: float  # link time divided by communication time
    low: float
    high: float


class DelayRow(msgspec.Struct, frozen=True):
    """The median delay of each shard in milliseconds, if the link of the second server is `slower` times slower."""

    slower: int
    delays_ms: tuple[float, float]


class WireRow(msgspec.Struct, frozen=True):
    """The time of a step with one format: the median and the extremes of the rounds."""

    wire: str
    step_ms: float
    low: float
    high: float
    shares: list[float]  # for each round, the time as a share of the time with float32

    @property
    def goal(self) -> str:
        """The goal, and whether it is met."""
        goal = WIRE_GOALS.get(self.wire.split()[0])
        return "-" if goal is None else f"<= {goal:g} {'met' if median(self.shares) <= goal else 'missed'}"


COLUMNS: Columns[LinksRow] = {
    "MB": lambda row: f"{row.size_mb:g}",
    "connection": lambda row: "TLS" if row.tls else "plain",
    "iperf3 ms": lambda row: f"{row.link_ms:.0f}",
    "paceline ms": lambda row: f"{row.communication_ms:.0f}",
    "ratio": lambda row: f"{row.ratio:.2f}",
    "low - high": lambda row: f"{row.low:.2f} - {row.high:.2f}",
    f"goal >= {GOAL:g}": lambda row: "-" if row.tls else "met" if row.ratio >= GOAL else "missed",
}
DELAY_COLUMNS: Columns[DelayRow] = {
    "links of the servers": lambda row: (
        "equal" if row.slower == 1 else f"the link of shard 1 is {row.slower} times slower"
    ),
    "shard 0": lambda row: f"{row.delays_ms[0]:.0f}",
    "shard 1": lambda row: f"{row.delays_ms[1]:.0f}",
}
WIRE_COLUMNS: Columns[WireRow] = {
    "format": lambda row: row.wire,
    "ms": lambda row: f"{row.step_ms:.0f}",
    "low - high": lambda row: f"{row.low:.0f} - {row.high:.0f}",
    "share of float32": lambda row: f"{median(row.shares):.2f}",
    "all rounds": lambda row: ", ".join(f"{share:.2f}" for share in row.shares),
    "goal": lambda row: row.goal,
}
Wire = Annotated[
    str,
    typer.Option(
        "--wire",
        metavar="<bf16|int8|int4>",
        help="Instead, compare this format of gradients and weights with float32. Only the first of the sizes is "
        "measured, with two and with four workers. This takes about 4 minutes on links of 250mbit, and does not need "
        "iperf3.",
    ),
]


@Benchmark(minutes=4, quick={"sizes_mb": (1.0,), "rounds": 1, "iterations": 2})
def measure(
    tell: TellShare,
    rate: Rate = "1gbit",
    sizes_mb: SizesMb = (25.0, 100.0),
    rounds: Rounds = 3,
    wire: Wire = "float32",
    iterations: int = 6,
) -> list[Figures[Any]]:
    """Compare a push and a pull over a network link with iperf3, without and with TLS.

    Also measures which shards are delayed if the link of one of two servers is slow.

    Requires root privileges and the commands ip, tc and iperf3.
    """
    if not sizes_mb or min(sizes_mb) <= 0:
        raise ConfigurationError(f"sizes are {sizes_mb}, expected numbers > 0.")
    if not WireFormat.read(wire).exact:
        return _measure_wire(tell, rate, sizes_mb[0], rounds, wire, iterations)
    if shutil.which("iperf3") is None:
        raise ConfigurationError("this benchmark needs the command iperf3; install it first.")
    with network(2, NetworkLink(rate, 0.0)) as machines:
        worker, server = machines.machines
        cases: dict[str, tuple[float, bool] | None] = {"iperf3": None}
        for size_mb, tls in product(sizes_mb, (False, True)):
            cases[f"{size_mb:g} MB, {'TLS' if tls else 'plain TCP'}"] = size_mb, tls

        def run(case: tuple[float, bool] | None) -> tuple[float, ...]:
            if case is None:
                return _iperf_bps(worker, server), _iperf_bps(server, worker)
            placement = ProcessPlacement(machines.host, (server,), (worker,))
            return (_communication_s(placement, *case, iterations),)

        found = in_turns(tell, rounds, cases, run)
    speeds = found["iperf3"]
    rows = [
        row_of(
            *case,
            [
                (sum(case[0] * 2**20 * 8 / bps for bps in speed), time_s)
                for speed, (time_s,) in zip(speeds, found[name], strict=True)
            ],
        )
        for name, case in cases.items()
        if case is not None
    ]
    delays = []
    for factor in (1, SLOWER):
        tell("two servers, " + ("one with a slow link" if factor > 1 else "equal links"), 0.99, slow=True)
        slow = NetworkLink(f"{rate_bps(rate) / factor / 1e6:g}mbit", 0.0)
        with network(3, NetworkLink(rate, 0.0), {2: slow}) as machines:
            delays.append(DelayRow(factor, _delays_ms(machines, iterations)))
    up, down = (median(column) / 1e6 for column in zip(*speeds, strict=True))
    caption = f"iperf3: {up:.0f} Mbit/s from the worker, {down:.0f} Mbit/s to it; {rounds_text(rounds)}"
    title = f"A push and a pull over a link of {rate}, compared with iperf3"
    delayed = (
        f"Time from the beginning of a step until each of two shards of {DELAYED_MB / 2:g} MB answers, ms"
    )
    return [Figures(title, rows, COLUMNS, caption, labels=2), Figures(delayed, delays, DELAY_COLUMNS)]


def row_of(size_mb: float, tls: bool, times: list[tuple[float, float]]) -> LinksRow:
    """Return the row for pairs of a link time and a communication time in seconds, one pair for each round."""
    link_s, communication_s = (median(column) for column in zip(*times, strict=True))
    ratios = spread(link_s / communication_s for link_s, communication_s in times)
    return LinksRow(size_mb, tls, 1e3 * link_s, 1e3 * communication_s, *ratios)


def _measure_wire(
    tell: TellShare, rate: str, size_mb: float, rounds: int, wire: str, iterations: int
) -> list[Figures[WireRow]]:
    link = NetworkLink(rate, 0.0)
    with network(1 + WIRE_WORKERS, link) as machines:
        settings: dict[str, Any] = {
            "workers": WIRE_WORKERS,
            "transport": "tcp",
            "placement": machines.placement(1),
        }

        def run(each: str) -> float:
            _, times_s = live(train, size_mb, iterations, kind=float, wire=each, **settings)
            return fmean(times_s)

        found = in_turns(tell, rounds, {each: each for each in ("float32", wire)}, run)
    with network(1 + len(UNEQUAL), link, {0: NetworkLink(SERVER_RATE, 0.0)}) as machines:
        settings = {"workers": len(UNEQUAL), "transport": "tcp", "placement": machines.placement(1)}

        def run_unequal(case: tuple[str, str]) -> float:
            form, batch = case
            given = settings | {"wire": form, "batch": batch}
            return max(live(train_unequal, size_mb, 2 * iterations, kind=float, **given)[1])

        cases = {"float32": ("float32", "equal"), f"{wire} balanced": (wire, "balanced")}
        unequal = in_turns(tell, rounds, cases, run_unequal)
    figures = []
    for times_s, what in (
        (found, f"Communication time of a step with {size_mb:g} MB, {WIRE_WORKERS} workers, links of {rate}"),
        (
            unequal,
            f"Time of a step with {size_mb:g} MB, 4 workers 1:1:1:3, links of {rate}, server {SERVER_RATE}",
        ),
    ):
        figures.append(Figures(what, wire_rows(times_s), WIRE_COLUMNS, rounds_text(rounds)))
    return figures


def wire_rows(found: dict[str, list[float]]) -> list[WireRow]:
    """Return a row for each format and its communication times in seconds. The first format is float32."""
    exact, *_ = found.values()
    return [
        WireRow(
            wire,
            *spread(1e3 * each for each in times_s),
            [a / b for a, b in zip(times_s, exact, strict=True)],
        )
        for wire, times_s in found.items()
    ]


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


def _communication_s(placement: ProcessPlacement, size_mb: float, tls: bool, iterations: int) -> float:
    with tempfile.TemporaryDirectory() as out:
        settings: dict[str, Any] = {
            "workers": 1,
            "servers": 1,
            "shards": SHARDS,
            "sync": "asp",
            "transport": "tcp",
        }
        if not tls:
            _, [time_s] = live(train, size_mb, iterations, kind=float, placement=placement, **settings)
            return time_s
        # No argument of `launch` asks for TLS, because only a run that other machines can join uses TLS.
        job = make_job(**settings, run_dir=Path(out, "run"), dry_run=True)
        job = structs.replace(job, token=new_secret(), secure=True)
        function = (_write_time, (size_mb, iterations, Path(out, "time")))
        payload = cloudpickle.dumps(sys.path) + cloudpickle.dumps(function)
        start(job, ["function"], payload, sys.path, console=Console(quiet=True), placement=placement)
        return msgspec.json.decode(Path(out, "time").read_bytes(), type=float)


def train(size_mb: float, iterations: int) -> float:
    """Train, then time backward passes without communication. Return the difference of the two times, in seconds."""
    torch.set_num_threads(1)
    model, bare = Flat(size_mb, worker_index()), Flat(size_mb, worker_index())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)

    def step() -> None:
        model.compute()
        optimizer.step()

    step_s = median_s(step, iterations)
    time.sleep(0.1)
    return step_s - median_s(bare.compute, iterations)


def train_unequal(size_mb: float, iterations: int) -> float:
    """Train with batches whose compute time depends on this worker's speed. Return the time of a step in seconds."""
    torch.set_num_threads(1)
    slow = UNEQUAL[worker_index()]
    data = TensorDataset(torch.zeros(BATCH * len(UNEQUAL) * iterations, 1))
    flat = Flat(size_mb, worker_index())
    _, optimizer, loader = prepare(
        flat, torch.optim.SGD(flat.parameters(), lr=1e-3), DataLoader(data, batch_size=BATCH)
    )
    times_s = []
    for _ in range(3):  # in the first epoch, batches are not balanced
        begun_s = time.perf_counter()
        for (batch,) in loader:
            time.sleep(COMPUTE_S * slow * len(batch) / BATCH)
            flat.compute()
            optimizer.step()
        times_s.append((time.perf_counter() - begun_s) / iterations)
    return median(times_s[1:])


def _write_time(size_mb: float, iterations: int, file: Path) -> None:
    file.write_bytes(msgspec.json.encode(train(size_mb, iterations)))


def _delays_ms(machines: Network, iterations: int) -> tuple[float, float]:
    """Return, for both shards, the median time from the beginning of an iteration until the shard answers."""
    with tempfile.TemporaryDirectory() as out:
        worker, *servers = machines.machines
        placement = ProcessPlacement(machines.host, tuple(servers), (worker,))
        result, _ = live(
            train,
            DELAYED_MB,
            iterations,
            workers=1,
            servers=2,
            shards=2,
            sync="asp",
            transport="tcp",
            run_dir=Path(out, "run"),
            placement=placement,
        )
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
