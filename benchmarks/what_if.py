"""`python -m benchmarks what-if`: predictions from a recorded run, compared with live runs on the changed machines.

Workers and a server are on machines of their own: network namespaces with a rate-limited link each. A live run with
four workers is recorded. From its directory, `Cluster.from_run(...).with_(...)` predicts how long the same training
takes on the same machines, with half the bandwidth, and with twice the workers. Live runs of each kind tell whether
this is right.

The workers mostly sleep: each iteration has a random length, which is different in each run. So two cores suffice for
eight workers. About a third of an iteration is spent on transfers, because all workers share the link of the server.

The queues of the links are as short as those of a switch in a local network. In a long queue, the acknowledgements of
one direction wait behind the data of the other one, so a transfer takes longer to reach its share of the rate.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch
from rich import box
from rich.table import Table
from torch import nn

from paceline.cli.progress_bar import TellShare
from paceline.errors import ConfigurationError
from paceline.frontend.optimizer import DistributedOptimizer
from paceline.frontend.session import worker_index
from paceline.launcher.launch import launch
from paceline.launcher.live_run.local import Placement
from paceline.sim import Cluster, simulate

from .overlap.namespaces import Network, NetworkLink, network, rate_bps

__all__ = ["CASES", "WhatIfPlan", "WhatIfReport", "WhatIfRow", "estimate_s", "measure", "rows", "table"]

PACE_S = (0.3, 0.3, 0.4, 0.6)
"""Mean length of an iteration of each recorded worker without its transfers. The workers beyond repeat these."""

JITTER = 0.2
INPUTS, OUTPUTS = 1024, 1280  # of the only layer, which has 5 MB of parameters
SYNCS = ("bsp", "asp")
STARTING_S = 10.0  # approximate time to start and end the processes of a run on two cores


class Case(msgspec.Struct, frozen=True):
    """What is predicted.

    Attributes:
        workers: number of workers.
        slower: factor by which the links are slower than in the recorded run.
        goal: largest permitted error of the prediction.
    """

    workers: int
    slower: float
    goal: float


CASES = {
    "the recorded run": Case(len(PACE_S), 1.0, 0.02),
    "half the bandwidth": Case(len(PACE_S), 2.0, 0.1),
    "twice the workers": Case(2 * len(PACE_S), 1.0, 0.1),
}
"""What is predicted, by name. The first case is that of the recorded run, which is its own measure."""


class WhatIfPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the benchmark. Call `require_sound` to check them before anything starts.

    Attributes:
        rate: rate of each link in each direction, in tc's notation, for example "800mbit".
        queue_s: length of the queues of each link, as the time to send it at the rate.
        rounds: number of rounds.
        iterations: number of iterations of each worker.
        syncs: sync models.
    """

    rate: str = "800mbit"
    queue_s: float = 0.01
    rounds: int = 3
    iterations: int = 24
    syncs: tuple[str, ...] = SYNCS

    def require_sound(self) -> None:
        """Raise `ConfigurationError` if the plan is invalid."""
        rate_bps(self.rate)
        if not 0 < self.queue_s <= 1:
            raise ConfigurationError(
                f"queue_s is {self.queue_s!r}, expected more than 0 and at most 1 second."
            )
        for name, value in (("rounds", self.rounds), ("iterations", self.iterations)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}, expected a whole number >= 1.")


class WhatIfRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one case under one sync model.

    Attributes:
        sync: the sync model.
        case: a key of `CASES`.
        measured_s: time of the live run in seconds, median over the rounds.
        predicted_s: time that was predicted from the recorded run of the same round, median over the rounds.
        ratio: predicted time divided by measured time, median over the rounds.
        low: the smallest ratio of any round.
        high: the largest ratio of any round.
    """

    sync: str
    case: str
    measured_s: float
    predicted_s: float
    ratio: float
    low: float
    high: float

    @property
    def met(self) -> bool:
        """True if the error of the median is at most the goal."""
        return abs(self.ratio - 1) <= CASES[self.case].goal


class WhatIfReport(msgspec.Struct, frozen=True):
    """The results.

    Attributes:
        rate: rate of each link of the recorded run, in each direction.
        queue_s: length of the queues of each link, in seconds.
        rounds: number of rounds.
        rows: a row for each sync model and case.
    """

    rate: str
    queue_s: float
    rounds: int
    rows: tuple[WhatIfRow, ...]


Times = dict[tuple[str, str], list[tuple[float, float]]]
"""(sync model, case) -> the predicted and the measured time of each round, in seconds."""


def estimate_s(plan: WhatIfPlan) -> float:
    """Estimate how long the measurements take, in seconds."""
    transfers_s = 2 * 4 * INPUTS * OUTPUTS * 8 / rate_bps(plan.rate)
    runs_s = [
        STARTING_S + plan.iterations * (max(PACE_S) + case.workers * case.slower * transfers_s)
        for case in CASES.values()
    ]
    return plan.rounds * len(plan.syncs) * sum(runs_s)


def measure(plan: WhatIfPlan, tell: TellShare = lambda what, share, slow=False: None) -> WhatIfReport:
    """Measure and predict everything in the plan, round by round.

    Raises:
        ConfigurationError: the plan is invalid, or network namespaces cannot be created. No process has been started.
        RunFailedError: a process failed. All other processes have been stopped.
    """
    plan.require_sound()
    times: Times = {(sync, case): [] for sync in plan.syncs for case in CASES}
    begun = 0
    for number in range(plan.rounds):
        for sync in plan.syncs:
            with TemporaryDirectory() as folder:
                for name, case in CASES.items():
                    what = f"round {number + 1} of {plan.rounds}, {sync}, {name}"
                    tell(what, begun / (plan.rounds * len(times)), slow=True)
                    begun += 1
                    out = Path(folder, name.replace(" ", "-"))
                    if case.slower == 1.0 and case.workers == len(PACE_S):
                        recorded = out
                    measured_s = _live(plan, sync, case, begun, out)
                    times[sync, name].append((_predicted(plan, sync, case, recorded), measured_s))
    return WhatIfReport(plan.rate, plan.queue_s, plan.rounds, rows(times))


def rows(times: Times) -> tuple[WhatIfRow, ...]:
    """Return a row for each sync model and case."""
    found = []
    for (sync, case), pairs in times.items():
        ratios = [predicted_s / measured_s for predicted_s, measured_s in pairs]
        found.append(
            WhatIfRow(
                sync=sync,
                case=case,
                measured_s=median(measured_s for _, measured_s in pairs),
                predicted_s=median(predicted_s for predicted_s, _ in pairs),
                ratio=median(ratios),
                low=min(ratios),
                high=max(ratios),
            )
        )
    return tuple(found)


def _predicted(plan: WhatIfPlan, sync: str, case: Case, recorded: Path) -> float:
    """Return the time in seconds that a recorded run predicts for a case."""
    bps = rate_bps(plan.rate)
    cluster = Cluster.from_run(recorded, bandwidth=bps)
    changed = cluster.with_(workers=case.workers, bandwidth=bps / case.slower)
    return simulate(changed, sync, plan.iterations).measures.duration_s


def _live(plan: WhatIfPlan, sync: str, case: Case, seed: int, run_dir: Path) -> float:
    """Make a live run; return its time in seconds."""
    link = NetworkLink(f"{rate_bps(plan.rate) / case.slower / 1e6:g}mbit", 0.0, plan.queue_s)
    with network(1 + case.workers, link) as machines:
        result = launch(
            train,
            args=(plan.iterations, seed),
            workers=case.workers,
            servers=1,
            sync=sync,
            transport="tcp",
            run_dir=run_dir,
            progress=False,
            placement=_placed(machines),
        )
    duration_s: float = result.summary["duration_s"]
    return duration_s


def _placed(machines: Network) -> Placement:
    server, *workers = machines.machines
    return Placement(machines.host, (server,), tuple(workers))


def train(iterations: int, seed: int) -> None:
    """Train one layer, and sleep in each iteration for a random time.

    The worker sleeps before it computes the gradient, because the gradient may be sent as soon as it is computed.
    """
    worker = worker_index()
    draw = random.Random(f"{seed} {worker}")
    torch.set_num_threads(1)
    model = nn.Linear(INPUTS, OUTPUTS, bias=False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model=model)
    x = torch.randn(1, INPUTS, generator=torch.Generator().manual_seed(worker))
    for _ in range(iterations):
        time.sleep(PACE_S[worker % len(PACE_S)] * draw.uniform(1 - JITTER, 1 + JITTER))
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def table(report: WhatIfReport) -> Table:
    """Return the predicted and the measured times as a table."""
    goals = ", ".join(f"{name}: {case.goal:.0%}" for name, case in CASES.items())
    shown = Table(
        title=f"Predicted from a recorded run with {len(PACE_S)} workers on links of {report.rate} with queues of "
        f"{report.queue_s * 1000:g} ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        caption=f"medians of {report.rounds} rounds; goals for the error of the ratio: {goals}; !: goal missed",
        caption_justify="left",
    )
    shown.add_column("sync")
    shown.add_column("case")
    for name in ("measured", "predicted", "predicted / measured", "in all rounds"):
        shown.add_column(name, justify="right")
    for row in report.rows:
        shown.add_row(
            row.sync,
            row.case,
            f"{row.measured_s:.2f} s",
            f"{row.predicted_s:.2f} s",
            f"{row.ratio:.3f}{'' if row.met else '!'}",
            f"{row.low:.3f} to {row.high:.3f}",
        )
    return shown
