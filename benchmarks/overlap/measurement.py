"""Measures how communication times change with overlap synchronization and with even slices (FluentPS, section IV).

Each worker and each server runs in its own network namespace, with its own rate-limited link. There are three
settings:

    1  overlap off, sliced by parameter     as in PS-Lite: no worker pulls before all workers have pushed all slices
    2  overlap, sliced by parameter         overlap synchronization alone
    3  overlap, sliced evenly               overlap and Elastic Parameter Slicing, several shards on each server

All settings use BSP over TCP. Nearly all parameters of the model are in one fully connected layer. Slicing by
parameter does not split this layer, so one shard holds all of it.

The *communication time* is the time of an iteration minus the time of a forward and backward pass without
communication. After the last iteration, all workers time these passes simultaneously. For each time, the median over
iterations is computed first, then the mean over workers, then the median over rounds.

The *link minimum* is the time that the transfers of the busiest server need at the full speed of its link. After
all pushes have arrived, this server must still send weights: with overlap, at least those of its smallest shard;
without overlap, those of all its shards. Protocol overhead, processor time and delays are not included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec
import torch
from rich import box
from rich.table import Table
from torch import nn

from paceline.cli.progress_bar import TellShare
from paceline.core.protocol.layout import Layout, Parameter
from paceline.errors import ConfigurationError
from paceline.frontend.optimizer import DistributedOptimizer
from paceline.frontend.session import worker_index
from paceline.launcher.launch import launch
from paceline.launcher.live_run.local import Placement
from paceline.trace.recording import Trace
from paceline.trace.records import IterationRecord, read_records
from reproductions.papers import FLUENT_PS

from .namespaces import Network, NetworkLink, network, rate_bps
from .picture import Exchange, exchange_of, overlap_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Found",
    "Net",
    "OverlapPlan",
    "OverlapReport",
    "OverlapRow",
    "OverlapSetting",
    "estimate_s",
    "found_in",
    "least_s",
    "measure",
    "picture",
    "rows",
    "table",
]

PAPER_OVERLAP, PAPER_EVEN = (
    FLUENT_PS.numbers[name].value / 100 for name in ("overlap-saves", "overlap-and-eps-save")
)
"""Fractions of PS-Lite's communication time that are saved according to the paper."""

WORKERS = 4
SERVERS = 4
SHARDS = 16  # number of shards in setting 3 (see `OverlapPlan`)
ROUNDS = 3
WIDTH = 2048  # number of outputs of the large layer; 2048 outputs give the model 38 MB of parameters
WARM_UP = 2  # iterations that are not measured
BATCH = 4
LR = 1e-3
STARTING_S = 15.0  # approximate time to start the processes of a run on two cores


class OverlapSetting(msgspec.Struct, frozen=True):
    """One of the settings that the benchmark compares.

    Attributes:
        name: name in the table and the picture.
        overlap: value for the argument `overlap` of `launch`.
        slicing: value for the argument `slicing` of `launch`.
        shards: number of shards.
        paper_less: fraction of the first setting's communication time that this setting saves, according to the
            FluentPS paper; None for the first setting.
    """

    name: str
    overlap: str
    slicing: str
    shards: int
    paper_less: float | None


class OverlapPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the benchmark. Call `require_sound` to check them before anything starts.

    Attributes:
        rate: rate of each link in each direction, in tc's notation, for example "1gbit".
        delay_s: delay of each packet that an emulated machine sends.
        rounds: number of rounds.
        iterations: number of measured iterations in each run.
        shards: number of shards in setting 3. With one shard per server, a server answers only after it has received
            all pushes. With several shards per server, a server sends the first answers while later pushes arrive,
            but there are more messages.
        width: number of outputs of the large layer.
    """

    rate: str = "1gbit"
    delay_s: float = 0.001
    rounds: int = ROUNDS
    iterations: int = 8
    shards: int = SHARDS
    width: int = WIDTH

    @property
    def settings(self) -> tuple[OverlapSetting, ...]:
        """The compared settings. The first one is the baseline for the others."""
        return (
            OverlapSetting("1 overlap off, by parameter", "off", "by-parameter", SERVERS, None),
            OverlapSetting("2 overlap, by parameter", "shards", "by-parameter", SERVERS, PAPER_OVERLAP),
            OverlapSetting(
                f"3 overlap, even, {self.shards} shards", "shards", "even", self.shards, PAPER_EVEN
            ),
        )

    def require_sound(self) -> None:
        """Raise `ConfigurationError` if the plan is invalid."""
        rate_bps(self.rate)
        counts = (("rounds", self.rounds, 1), ("iterations", self.iterations, 1), ("width", self.width, 1))
        for name, value, least in (*counts, ("shards", self.shards, SERVERS)):
            if value < least:
                raise ConfigurationError(f"{name} is {value}, expected a whole number >= {least}.")


class OverlapRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one setting.

    Attributes:
        setting: name of the setting.
        overlap: see `OverlapSetting`.
        slicing: see `OverlapSetting`.
        shards: see `OverlapSetting`.
        communication_ms: communication time per iteration, median over the rounds.
        low_ms: smallest communication time in any round.
        high_ms: largest communication time in any round.
        bare_ms: time of a forward and backward pass without communication.
        least_ms: the link minimum, as defined at the top of this module.
        less: fraction of the first setting's communication time that this setting saves; None for the first setting.
        paper_less: the same fraction according to the FluentPS paper; None for the first setting.
    """

    setting: str
    overlap: str
    slicing: str
    shards: int
    communication_ms: float
    low_ms: float
    high_ms: float
    bare_ms: float
    least_ms: float
    less: float | None
    paper_less: float | None


class OverlapReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results for all settings, and the conditions of the measurement.

    Attributes:
        rate: rate of each link in each direction.
        delay_ms: delay of each packet that an emulated machine sends; 0 if the kernel cannot delay packets.
        workers: number of workers, each on its own emulated machine.
        servers: number of servers, each on its own emulated machine.
        size_mb: model size in MB (2**20 bytes).
        rounds: number of rounds.
        rows: one row per setting.
        exchanges: for each setting, the pushes and pulls of the iteration of median duration in the last round.
    """

    rate: str
    delay_ms: float
    workers: int
    servers: int
    size_mb: float
    rounds: int
    rows: tuple[OverlapRow, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def conditions(self) -> str:
        """The conditions of the measurement, as text."""
        delay = f"{self.delay_ms:g} ms of delay" if self.delay_ms else "no delay (this kernel has no netem)"
        return (
            f"{self.workers} workers and {self.servers} servers, each with a link of {self.rate} in each "
            f"direction and {delay}; {self.size_mb:.0f} MB of parameters"
        )


class Found(msgspec.Struct, frozen=True):
    """The results of one run.

    Attributes:
        communication_s: communication time per iteration.
        bare_s: time of a forward and backward pass without communication.
        least_s: the link minimum, as defined at the top of this module.
        exchange: the pushes and pulls of the iteration with the median duration.
    """

    communication_s: float
    bare_s: float
    least_s: float
    exchange: Exchange


class Net(nn.Module):
    """A network of small convolutions and one large linear layer, which has nine tenths of the parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        convolutions = ((3, 32, 2), (32, 64, 2), (64, 128, 2), (128, 256, 1), (256, 256, 1))
        layers: list[nn.Module] = []
        for inputs, outputs, stride in convolutions:
            layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(256 * 4 * 4, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores


def measure(plan: OverlapPlan, tell: TellShare = lambda what, share, slow=False: None) -> OverlapReport:
    """Measure everything in the plan, round by round.

    Args:
        plan: parameters of the benchmark.
        tell: progress callback, called before each run.

    Raises:
        ConfigurationError: the plan is invalid, or network namespaces cannot be created. No process has been started.
        RunFailedError: a process failed. All other processes have been stopped.
    """
    plan.require_sound()
    found: list[list[Found]] = [[] for _ in plan.settings]
    runs = plan.rounds * len(plan.settings)
    with network(SERVERS + WORKERS, NetworkLink(plan.rate, plan.delay_s)) as machines:
        for number in range(plan.rounds):
            for index, setting in enumerate(plan.settings):
                share = (number * len(plan.settings) + index) / runs
                tell(f"round {number + 1} of {plan.rounds}, {setting.name}", share, slow=True)
                with tempfile.TemporaryDirectory() as out:
                    found[index].append(_run(plan, setting, machines, Path(out)))
    return OverlapReport(
        rate=plan.rate,
        delay_ms=plan.delay_s * 1e3 if machines.delayed else 0.0,
        workers=WORKERS,
        servers=SERVERS,
        size_mb=_layout(plan).size_bytes / 2**20,
        rounds=plan.rounds,
        rows=rows(plan.settings, found),
        exchanges=tuple(rounds[-1].exchange for rounds in found),
    )


def estimate_s(plan: OverlapPlan) -> float:
    """Estimate how long the measurements take on two cores, in seconds."""
    transfer_s = _layout(plan).size_bytes * 8 / rate_bps(plan.rate)
    iterations_s = (WARM_UP + plan.iterations) * transfer_s * (2 * WORKERS + 2 * WORKERS + 2)
    return plan.rounds * (len(plan.settings) * STARTING_S + iterations_s)


def _layout(plan: OverlapPlan) -> Layout:
    with torch.device("meta"):
        named = Net(plan.width).named_parameters()
    return Layout.of([Parameter((name,), tuple(p.shape), "float32") for name, p in named])


def _run(plan: OverlapPlan, setting: OverlapSetting, machines: Network, out: Path) -> Found:
    result = launch(
        _train,
        args=(plan.width, plan.iterations, out),
        workers=WORKERS,
        servers=SERVERS,
        shards=setting.shards,
        slicing=setting.slicing,
        overlap=setting.overlap,
        sync="bsp",
        transport="tcp",
        run_dir=out / "run",
        progress=False,
        placement=Placement(machines.host, machines.machines[:SERVERS], machines.machines[SERVERS:]),
    )
    bare_s = [msgspec.json.decode((out / f"bare-{i}.json").read_bytes(), type=float) for i in range(WORKERS)]
    shards = [trace for trace in result.trace if trace.header.host == "shard"]
    return found_in(read_records(result.run_dir), shards, bare_s, least_s(plan, setting))


def _train(width: int, iterations: int, out: Path) -> None:
    """Train as one worker, then time forward and backward passes without communication.

    Under BSP, all workers finish the last iteration together, so they all measure these passes simultaneously.
    """
    torch.manual_seed(worker_index())
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    model, bare = Net(width), Net(width)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)

    def backward(net: Net) -> None:
        net.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()

    for _ in range(WARM_UP + iterations):
        backward(model)
        optimizer.step()
    times_s = [_time_s(lambda: backward(bare)) for _ in range(WARM_UP + iterations)]
    bare_s = median(times_s[WARM_UP:])
    (out / f"bare-{worker_index()}.json").write_bytes(msgspec.json.encode(bare_s))


def _time_s(step: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    step()
    return time.perf_counter() - begun_s


def least_s(plan: OverlapPlan, setting: OverlapSetting) -> float:
    """Return the link minimum of one iteration, in seconds."""
    layout = _layout(plan)
    cut = layout.slice_evenly if setting.slicing == "even" else layout.slice_by_parameter
    of_server: dict[int, list[int]] = {}
    for shard in cut(setting.shards):
        of_server.setdefault(shard.index % SERVERS, []).append(shard.size_bytes)
    if setting.overlap == "off":
        busy_bytes = 2 * max(map(sum, of_server.values()))
    else:
        busy_bytes = max(sum(sizes) + min(sizes) for sizes in of_server.values())
    return WORKERS * busy_bytes * 8 / rate_bps(plan.rate)


# -- rows, table, picture ----------------------------------------------------------------------------------------


def found_in(
    records: Sequence[Sequence[IterationRecord]],
    shards: Sequence[Trace],
    bare_s: Sequence[float],
    least_s: float,
) -> Found:
    """Compute the results of a run.

    Args:
        records: for each worker, the records of its iterations.
        shards: trace of each shard.
        bare_s: for each worker, the time of a forward and backward pass without communication.
        least_s: the link minimum.
    """
    times_s = [[row.answered_s - row.begun_s for row in worker[WARM_UP:]] for worker in records]
    whole_s = [median(worker) for worker in times_s]
    of_all_s = [max(iteration) for iteration in zip(*times_s, strict=True)]
    middle = sorted(range(len(of_all_s)), key=of_all_s.__getitem__)[len(of_all_s) // 2]
    return Found(
        communication_s=fmean(whole - bare for whole, bare in zip(whole_s, bare_s, strict=True)),
        bare_s=fmean(bare_s),
        least_s=least_s,
        exchange=exchange_of(records, shards, WARM_UP + middle),
    )


def rows(settings: Sequence[OverlapSetting], found: Sequence[Sequence[Found]]) -> tuple[OverlapRow, ...]:
    """Return one row per setting, computed from the results of its runs."""
    made: list[OverlapRow] = []
    for setting, runs in zip(settings, found, strict=True):
        times_ms = [run.communication_s * 1e3 for run in runs]
        less = 1 - median(times_ms) / made[0].communication_ms if made else None
        made.append(
            OverlapRow(
                setting=setting.name,
                overlap=setting.overlap,
                slicing=setting.slicing,
                shards=setting.shards,
                communication_ms=median(times_ms),
                low_ms=min(times_ms),
                high_ms=max(times_ms),
                bare_ms=median(run.bare_s * 1e3 for run in runs),
                least_ms=runs[0].least_s * 1e3,
                less=less,
                paper_less=setting.paper_less,
            )
        )
    return tuple(made)


def table(report: OverlapReport) -> Table:
    """Return a table with one line per setting."""
    made = Table(
        title="Communication time per iteration, ms",
        title_justify="left",
        caption=f"{report.conditions}\nmedians over {report.rounds} round{'s' if report.rounds != 1 else ''}; low "
        "and high: fastest and slowest round\nlink minimum: time of the busiest server's transfers at full speed\n"
        "saved: reduction compared with setting 1\n"
        "paper: reduction compared with PS-Lite, for ResNet-56 (FluentPS, section IV)",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    made.add_column("setting", no_wrap=True)
    for heading in ("ms", "low - high", "link minimum", "saved", "paper"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        made.add_row(
            row.setting,
            f"{row.communication_ms:.0f}",
            f"{row.low_ms:.0f} - {row.high_ms:.0f}",
            f"{row.least_ms:.0f}",
            _percent(row.less),
            _percent(row.paper_less),
        )
    return made


def picture(report: OverlapReport) -> Figure:
    """Draw one iteration of each setting. Raises `ConfigurationError` if matplotlib is not installed."""
    labels = [
        row.setting if row.less is None else f"{row.setting} ({_percent(row.less)} less communication)"
        for row in report.rows
    ]
    exchanges = dict(zip(labels, report.exchanges, strict=True))
    return overlap_picture("Pushes and pulls of one iteration", report.conditions, exchanges)


def _percent(share: float | None) -> str:
    """
    >>> _percent(0.25), _percent(None)
    ('25.0%', '-')
    """
    return "-" if share is None else f"{share:.1%}"
