"""`paceline bench overlap`: what overlap synchronization and even slicing save where the links are slow.

Owns the settings that FluentPS compares (section IV), the model, and the table. Starts processes, and machines for
them out of network namespaces: each worker and each server has a link of its own.

    1  overlap off, sliced by parameter     PS-Lite: nobody pulls until everybody has pushed everything
    2  overlap, sliced by parameter         overlap synchronization
    3  overlap, sliced evenly               with Elastic Parameter Slicing, several shards on each server

All under BSP over TCP. Nearly all parameters of the model are in one fully connected layer; by parameter, it lies on
one shard as a whole.

*Communication time* is that of a whole iteration without a bare forward and backward of the same model, which is
timed in the same processes, in all of them at once, when the last iteration is done. Each figure is a median over
iterations, then the mean of the workers, then the median over rounds.

*The links' least* is how long the busiest server's link is busy: it receives every worker's part before it can answer
with the last shard; without overlap, before it answers at all. It knows no protocol, no processor and no delay.
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

from paceline.cli.progress import TellShare
from paceline.core.layout import Layout, Parameter
from paceline.errors import ConfigurationError
from paceline.frontend.data import worker_index
from paceline.frontend.optimizer import DistributedOptimizer
from paceline.launcher.launch import launch
from paceline.launcher.local import Placement
from paceline.trace.recording import Trace
from paceline.trace.records import IterationRecord, read_records

from .namespaces import Link, Network, network, rate_bps
from .picture import Exchange, exchange_of, overlap_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Found",
    "Net",
    "Plan",
    "Report",
    "Row",
    "Setting",
    "estimate_s",
    "found_in",
    "least_s",
    "measure",
    "picture",
    "rows",
    "table",
]

WORKERS = 4
SERVERS = 4
SHARDS = 16  # of setting 3: see `Plan`
ROUNDS = 3
WIDTH = 2048  # of the large layer's output: 38 MB in all
WARM_UP = 2
BATCH = 4
LR = 1e-3
STARTING_S = 15.0  # of a run's processes, on two cores


class Setting(msgspec.Struct, frozen=True):
    """What is compared.

    Attributes:
        name: of the table and the picture.
        overlap: as `launch` takes it.
        slicing: likewise.
        shards: how many.
        paper_less: by what share the communication time was less than the first setting's, in FluentPS.
    """

    name: str
    overlap: str
    slicing: str
    shards: int
    paper_less: float | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `require_sound` before anything starts.

    Attributes:
        rate: of each direction of each link, in tc's notation.
        delay_s: of what a machine sends.
        rounds: how often everything is measured.
        iterations: of each run, without those of warming up.
        shards: of setting 3. With one per server a server answers only when all of its pushes are here; with
            several, the first answers leave while later pushes arrive. Each costs messages of its own.
        width: of the large layer.
    """

    rate: str = "1gbit"
    delay_s: float = 0.001
    rounds: int = ROUNDS
    iterations: int = 8
    shards: int = SHARDS
    width: int = WIDTH

    @property
    def settings(self) -> tuple[Setting, ...]:
        """In order; the first is what the others are compared with."""
        return (
            Setting("1 overlap off, by parameter", "off", "by-parameter", SERVERS, None),
            Setting("2 overlap, by parameter", "shards", "by-parameter", SERVERS, 0.86),
            Setting(f"3 overlap, even, {self.shards} shards", "shards", "even", self.shards, 0.937),
        )

    def require_sound(self) -> None:
        """Refuse what cannot be measured. Raises `ConfigurationError`."""
        rate_bps(self.rate)
        counts = (("rounds", self.rounds, 1), ("iterations", self.iterations, 1), ("width", self.width, 1))
        for name, value, least in (*counts, ("shards", self.shards, SERVERS)):
            if value < least:
                raise ConfigurationError(f"{name} is {value}, expected a whole number >= {least}.")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One setting's figures.

    Attributes:
        setting: its name.
        overlap: see `Setting`; likewise what follows.
        slicing: ...
        shards: ...
        communication_ms: of an iteration; median over the rounds.
        low_ms: the least of a round.
        high_ms: the most.
        bare_ms: a bare forward and backward.
        least_ms: what the links alone ask for.
        less: by what share the communication time is less than the first setting's; None for the first.
        paper_less: the same in FluentPS.
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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and on what.

    Attributes:
        rate: of each direction of each link.
        delay_ms: of what a machine sends; 0 where the kernel cannot delay.
        workers: each on a machine of its own.
        servers: likewise.
        size_mb: of the model, in 2**20 bytes.
        rounds: how many.
        rows: one per setting.
        exchanges: for each setting, one iteration of the last round, the median one.
    """

    rate: str
    delay_ms: float
    workers: int
    servers: int
    size_mb: float
    rounds: int
    rows: tuple[Row, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def circumstances(self) -> str:
        """In words."""
        delay = f"{self.delay_ms:g} ms of delay" if self.delay_ms else "no delay (this kernel has no netem)"
        return (
            f"{self.workers} workers and {self.servers} servers, each with a link of {self.rate} each way, "
            f"{delay}; {self.size_mb:.0f} MB of parameters"
        )


class Found(msgspec.Struct, frozen=True):
    """What one run showed.

    Attributes:
        communication_s: of an iteration.
        bare_s: of a forward and backward.
        least_s: what the links alone ask for.
        exchange: its median iteration.
    """

    communication_s: float
    bare_s: float
    least_s: float
    exchange: Exchange


class Net(nn.Module):
    """A few small convolutions and one large layer, which has nine tenths of the parameters."""

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


def measure(plan: Plan, tell: TellShare = lambda what, share, slow=False: None) -> Report:
    """Measure everything in the plan, round by round.

    Args:
        plan: what.
        tell: called before each run.

    Raises:
        ConfigurationError: the plan is not sound, or machines cannot be made here; nothing was started.
        RunFailedError: a process failed; nothing is left running.
    """
    plan.require_sound()
    found: list[list[Found]] = [[] for _ in plan.settings]
    runs = plan.rounds * len(plan.settings)
    with network(SERVERS + WORKERS, Link(plan.rate, plan.delay_s)) as machines:
        for number in range(plan.rounds):
            for index, setting in enumerate(plan.settings):
                share = (number * len(plan.settings) + index) / runs
                tell(f"round {number + 1} of {plan.rounds}, {setting.name}", share, slow=True)
                with tempfile.TemporaryDirectory() as out:
                    found[index].append(_run(plan, setting, machines, Path(out)))
    return Report(
        rate=plan.rate,
        delay_ms=plan.delay_s * 1e3 if machines.delayed else 0.0,
        workers=WORKERS,
        servers=SERVERS,
        size_mb=_layout(plan).size_bytes / 2**20,
        rounds=plan.rounds,
        rows=rows(plan.settings, found),
        exchanges=tuple(rounds[-1].exchange for rounds in found),
    )


def estimate_s(plan: Plan) -> float:
    """How long it will take on two cores, roughly."""
    transfer_s = _layout(plan).size_bytes * 8 / rate_bps(plan.rate)
    iterations_s = (WARM_UP + plan.iterations) * transfer_s * (2 * WORKERS + 2 * WORKERS + 2)
    return plan.rounds * (len(plan.settings) * STARTING_S + iterations_s)


def _layout(plan: Plan) -> Layout:
    with torch.device("meta"):
        named = Net(plan.width).named_parameters()
    return Layout.of([Parameter((name,), tuple(p.shape), "float32") for name, p in named])


def _run(plan: Plan, setting: Setting, machines: Network, out: Path) -> Found:
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
    """One worker: iterations, then bare ones, at which all arrive together under BSP."""
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


def least_s(plan: Plan, setting: Setting) -> float:
    """How long the busiest server's link is busy with one iteration."""
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
    """What a run showed: its records and traces, and each worker's bare time."""
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


def rows(settings: Sequence[Setting], found: Sequence[Sequence[Found]]) -> tuple[Row, ...]:
    """One per setting, out of what its runs showed."""
    made: list[Row] = []
    for setting, runs in zip(settings, found, strict=True):
        times_ms = [run.communication_s * 1e3 for run in runs]
        less = 1 - median(times_ms) / made[0].communication_ms if made else None
        made.append(
            Row(
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


def table(report: Report) -> Table:
    """One line per setting."""
    made = Table(
        title="Communication of an iteration, ms",
        title_justify="left",
        caption=f"{report.circumstances}\nmedians of {report.rounds} round{'s' if report.rounds != 1 else ''}; low "
        "and high are of a round\nlink's least: what the busiest server's link alone asks for\n"
        "less: than setting 1; paper: FluentPS, section IV, ResNet-56, against PS-Lite",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    made.add_column("setting", no_wrap=True)
    for heading in ("ms", "low - high", "link's least", "less", "paper"):
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


def picture(report: Report) -> Figure:
    """One iteration of each setting. Raises `ConfigurationError` if matplotlib is not installed."""
    labels = [
        row.setting if row.less is None else f"{row.setting} (communication {_percent(row.less)} less)"
        for row in report.rows
    ]
    exchanges = dict(zip(labels, report.exchanges, strict=True))
    return overlap_picture("Pushes and pulls of one iteration", report.circumstances, exchanges)


def _percent(share: float | None) -> str:
    """
    >>> _percent(0.937), _percent(None)
    ('93.7%', '-')
    """
    return "-" if share is None else f"{share:.1%}"
