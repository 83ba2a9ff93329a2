"""Measures how communication times change with overlap synchronization and with even slices (FluentPS, section IV).

Each worker and each server runs in its own network namespace, with its own rate-limited link. There are three
settings:

    1  overlap off, sliced by parameter     as in PS-Lite: no worker pulls before all workers have pushed all slices
    2  overlap, sliced by parameter         overlap synchronization alone
    3  overlap, sliced evenly               overlap and Elastic Parameter Slicing, several shards on each server

All settings use BSP over TCP. Nearly all parameters of the model are in one fully connected layer. Slicing by
parameter does not split this layer, so one shard holds the whole layer.

The *communication time* is the time of an iteration minus the time of a forward and backward pass without
communication. After the last iteration, all workers time these passes simultaneously. For each time, the median over
iterations is computed first, then the mean over workers, then the median over rounds.

The *link minimum* is the time that the transfers of the busiest server need at the full speed of its link. After
all pushes have arrived, this server must still send weights: with overlap, at least those of its smallest shard;
without overlap, those of all its shards. Protocol overhead, processor time and delays are not included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from torch import nn

from paceline.cli.console import TellShare
from paceline.cli.options import whole_number_option
from paceline.core.layout import Layout, Parameter
from paceline.errors import ConfigurationError
from paceline.trace.recording import IterationRecord, Trace, read_records
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import worker_index
from reproductions.papers import FLUENT_PS

from ..harness import (
    WARM_UP,
    Benchmark,
    Columns,
    Figures,
    Rate,
    Rounds,
    in_turns,
    live,
    median_s,
    rounds_text,
    spread,
)
from ..transport.kvstore import Mxnet, require_mxnet
from .beside_mxnet import COMPUTE_S, measure_beside
from .namespaces import Network, NetworkLink, network, rate_bps
from .picture import Exchange, exchange_of, overlap_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_OVERLAP, PAPER_EVEN = (
    FLUENT_PS.numbers[name].value / 100 for name in ("overlap-saves", "overlap-and-eps-save")
)
"""Fractions of PS-Lite's communication time that are saved according to the paper."""

WORKERS = 4
SERVERS = 4
WIDTH = 2048  # number of outputs of the large layer; 2048 outputs give the model 38 MB of parameters
BATCH = 4
LR = 1e-3


class OverlapSetting(msgspec.Struct, frozen=True):
    """One of the settings that the benchmark compares: arguments of `launch`."""

    name: str
    overlap: str
    slicing: str
    shards: int
    paper_less: float | None  # fraction of the first setting's communication time that is saved in the paper


def settings_of(shards: int) -> tuple[OverlapSetting, ...]:
    """Return the compared settings. The first setting is the baseline for the other settings.

    With one shard per server, a server answers only after it has received all pushes. With several shards per server,
    a server sends the first answers while later pushes arrive, but there are more messages.
    """
    return (
        OverlapSetting("1 overlap off, by parameter", "off", "by-parameter", SERVERS, None),
        OverlapSetting("2 overlap, by parameter", "shards", "by-parameter", SERVERS, PAPER_OVERLAP),
        OverlapSetting(f"3 overlap, even, {shards} shards", "shards", "even", shards, PAPER_EVEN),
    )


class OverlapRow(msgspec.Struct, frozen=True):
    """The results for one setting: medians over the rounds."""

    setting: OverlapSetting
    communication_ms: float  # communication time per iteration
    low_ms: float
    high_ms: float
    bare_ms: float  # time of a forward and backward pass without communication
    least_ms: float  # the link minimum, as defined at the top of this module
    less: float | None  # fraction of the first setting's communication time that this setting saves
    exchange: Exchange  # the pushes and pulls of the iteration of median duration in the last round


class Found(msgspec.Struct, frozen=True):
    """The results of one run. See `OverlapRow`."""

    communication_s: float
    bare_s: float
    least_s: float
    exchange: Exchange


COLUMNS: Columns[OverlapRow] = {
    "setting": lambda row: row.setting.name,
    "ms": lambda row: f"{row.communication_ms:.0f}",
    "low - high": lambda row: f"{row.low_ms:.0f} - {row.high_ms:.0f}",
    "link minimum": lambda row: f"{row.least_ms:.0f}",
    "saved": lambda row: _percent(row.less),
    "paper": lambda row: _percent(row.setting.paper_less),
}


def picture(found: list[Figures[Any]]) -> Figure:
    """Draw one iteration of each setting."""
    [figures] = found
    exchanges = {
        row.setting.name
        if row.less is None
        else f"{row.setting.name} ({_percent(row.less)} less communication)": row.exchange
        for row in figures.rows
    }
    return overlap_picture("Pushes and pulls of one iteration", figures.caption.partition("\n")[0], exchanges)


Iterations = Annotated[int, whole_number_option("--iterations", least=1, help="Measured iterations per run.")]
Shards = Annotated[
    int,
    whole_number_option("--shards", least=SERVERS, help="Number of shards in the setting with even slicing."),
]


def _require_sound(mxnet: str | None, picture: object, **rest: object) -> None:
    if mxnet is not None:
        if picture is not None:
            raise ConfigurationError("--picture is given, but --mxnet draws no picture.")
        require_mxnet(mxnet)


@Benchmark(
    minutes=5,
    quick={"rounds": 1, "iterations": 2, "width": 32, "compute_s": 0.1},
    picture=picture,
    require=_require_sound,
)
def measure(
    tell: TellShare,
    rate: Rate = "1gbit",
    rounds: Rounds = 3,
    iterations: Iterations = 8,
    shards: Shards = 16,
    width: int = WIDTH,
    delay_s: float = 0.001,
    mxnet: Mxnet = None,
    compute_s: float = COMPUTE_S,
) -> list[Figures[Any]]:
    """Measure the time saved on slow links by overlap synchronization and by slices of equal size (FluentPS paper).

    Runs 4 workers and 4 servers, each in its own network namespace. With --mxnet, the benchmark runs 8 workers and 8
    servers, and takes about 15 minutes.

    Requires root privileges and the commands ip and tc.
    """
    link = NetworkLink(rate, delay_s)
    if mxnet is not None:
        return measure_beside(tell, mxnet, link, rounds, iterations, shards, compute_s)
    settings = settings_of(shards)
    with network(SERVERS + WORKERS, link) as machines:
        run = partial(_run, machines, rate, iterations, width)
        found = in_turns(tell, rounds, {each.name: each for each in settings}, run)
    delay = f"{1e3 * delay_s:g} ms of delay" if machines.delayed else "no delay (this kernel has no netem)"
    conditions = (
        f"{WORKERS} workers and {SERVERS} servers, each with a link of {rate} in each direction and {delay}; "
        f"{layout_of(width).size_bytes / 2**20:.0f} MB of parameters"
    )
    return [figures_of(settings, list(found.values()), conditions, rounds)]


def figures_of(
    settings: Sequence[OverlapSetting], found: Sequence[Sequence[Found]], conditions: str, rounds: int
) -> Figures[OverlapRow]:
    """Return the results of each setting, computed from its runs."""
    rows: list[OverlapRow] = []
    for setting, runs in zip(settings, found, strict=True):
        times_ms = spread(run.communication_s * 1e3 for run in runs)
        less = 1 - times_ms.median / rows[0].communication_ms if rows else None
        bare_ms = median(run.bare_s * 1e3 for run in runs)
        rows.append(OverlapRow(setting, *times_ms, bare_ms, runs[0].least_s * 1e3, less, runs[-1].exchange))
    caption = (
        f"{conditions}\n{rounds_text(rounds)}; low and high: fastest and slowest round\n"
        "link minimum: time of the busiest server's transfers at full speed\n"
        "saved: reduction compared with setting 1\n"
        "paper: reduction compared with PS-Lite, for ResNet-56 (FluentPS, section IV)"
    )
    return Figures("Communication time per iteration, ms", rows, COLUMNS, caption)


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


def layout_of(width: int) -> Layout:
    """Return the layout of the model's parameters."""
    with torch.device("meta"):
        named = Net(width).named_parameters()
    return Layout.of([Parameter((name,), tuple(p.shape), "float32") for name, p in named])


def _run(machines: Network, rate: str, iterations: int, width: int, setting: OverlapSetting) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        result, bare_s = live(
            _train,
            width,
            iterations,
            kind=float,
            workers=WORKERS,
            servers=SERVERS,
            shards=setting.shards,
            slicing=setting.slicing,
            overlap=setting.overlap,
            sync="bsp",
            transport="tcp",
            run_dir=Path(folder, "run"),
            placement=machines.placement(SERVERS),
        )
        shards = [trace for trace in result.trace if trace.header.host == "shard"]
        return found_in(read_records(result.run_dir), shards, bare_s, least_s(rate, width, setting))


def _train(width: int, iterations: int) -> float:
    """Train as one worker, then return the time of forward and backward passes without communication.

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
    return median_s(lambda: backward(bare), iterations)


def least_s(rate: str, width: int, setting: OverlapSetting) -> float:
    """Return the link minimum of one iteration, in seconds."""
    layout = layout_of(width)
    cut = layout.slice_evenly if setting.slicing == "even" else layout.slice_by_parameter
    of_server: dict[int, list[int]] = {}
    for shard in cut(setting.shards):
        of_server.setdefault(shard.index % SERVERS, []).append(shard.size_bytes)
    if setting.overlap == "off":
        busy_bytes = 2 * max(map(sum, of_server.values()))
    else:
        busy_bytes = max(sum(sizes) + min(sizes) for sizes in of_server.values())
    return WORKERS * busy_bytes * 8 / rate_bps(rate)


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


def _percent(share: float | None) -> str:
    """
    >>> _percent(0.25), _percent(None)
    ('25.0%', '-')
    """
    return "-" if share is None else f"{share:.1%}"
