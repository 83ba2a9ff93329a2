"""`python -m benchmarks what-if`: predictions from a recorded run, compared with live runs on the changed machines.

Workers and a server are on machines of their own: network namespaces with a rate-limited link each. A live run with
four workers is recorded. From the run directory, `Cluster.from_run(...).with_(...)` predicts how long the same training
takes in three cases: on the same machines, with half the bandwidth, and with twice the workers. Live runs of each case
show whether the predictions are right.

The workers mostly sleep: each iteration has a random length, which is different in each run. So two cores suffice for
eight workers. About a third of an iteration is spent on transfers, because all workers share the link of the server.

The queues of the links are as short as those of a switch in a local network. In a long queue, the acknowledgements of
one direction wait behind the data of the other direction, so a transfer takes longer to reach its share of the rate.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import torch
from torch import nn

from paceline.cli.console import TellShare
from paceline.cli.options import number_option
from paceline.errors import ConfigurationError
from paceline.sim import Cluster, simulate
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import worker_index

from .harness import Benchmark, Columns, Figures, Rate, Rounds, live, marked, rounds_text, spread
from .overlap.namespaces import NetworkLink, network, rate_bps

PACE_S = (0.3, 0.3, 0.4, 0.6)
"""Mean length of an iteration of each recorded worker, without transfers. Additional workers repeat these lengths."""

JITTER = 0.2
INPUTS, OUTPUTS = 1024, 1280  # size of the only layer, which has 5 MB of parameters
SYNCS = ("bsp", "asp")


class Case(msgspec.Struct, frozen=True):
    """A live run that is predicted from the recorded run."""

    workers: int  # number of workers
    slower: float  # factor by which the links are slower than in the recorded run
    goal: float  # largest permitted error of the prediction


RECORDED = "the recorded run"
CASES = {
    RECORDED: Case(len(PACE_S), 1.0, 0.02),
    "half the bandwidth": Case(len(PACE_S), 2.0, 0.1),
    "twice the workers": Case(2 * len(PACE_S), 1.0, 0.1),
}
"""The predicted runs, by name. In the first case, the recorded run predicts its own duration."""


class WhatIfRow(msgspec.Struct, frozen=True):
    """The results for one case under one sync model: medians over the rounds."""

    sync: str
    case: str  # a key of `CASES`
    measured_s: float  # time of the live run
    predicted_s: float  # time that was predicted from the recorded run of the same round
    ratio: float  # predicted time divided by measured time
    low: float
    high: float

    @property
    def met(self) -> bool:
        """True if the error of the median ratio is at most the goal."""
        return abs(self.ratio - 1) <= CASES[self.case].goal


COLUMNS: Columns[WhatIfRow] = {
    "sync": lambda row: row.sync,
    "case": lambda row: row.case,
    "measured": lambda row: f"{row.measured_s:.2f} s",
    "predicted": lambda row: f"{row.predicted_s:.2f} s",
    "predicted / measured": lambda row: marked(f"{row.ratio:.3f}", row.met),
    "in all rounds": lambda row: f"{row.low:.3f} to {row.high:.3f}",
}

Times = dict[tuple[str, str], list[tuple[float, float]]]
"""(sync model, case) -> the predicted and the measured time of each round, in seconds."""

QueueMs = Annotated[
    float,
    number_option("--queue-ms", metavar="MS", help="Queue of each link, as the time to send a full queue."),
]


@Benchmark(minutes=15, quick={"rounds": 1, "iterations": 2, "syncs": ("asp",)})
def measure(
    tell: TellShare,
    rate: Rate = "800mbit",
    queue_ms: QueueMs = 10.0,
    rounds: Rounds = 3,
    iterations: int = 24,
    syncs: Sequence[str] = SYNCS,
) -> list[Figures[WhatIfRow]]:
    """From a recorded run, predict a run with half the bandwidth and another run with twice the workers.

    Then measure these runs live. Requires root privileges and the commands ip and tc.
    """
    if not 0 < queue_ms <= 1000:
        raise ConfigurationError(f"queue_ms is {queue_ms:g}, expected more than 0 and at most 1000.")
    times: Times = {(sync, case): [] for sync in syncs for case in CASES}
    begun = 0
    for number in range(rounds):
        for sync in syncs:
            with TemporaryDirectory() as folder:
                recorded = Path(folder, "recorded")
                for name, case in CASES.items():
                    what = f"round {number + 1} of {rounds}, {sync}, {name}"
                    tell(what, begun / (rounds * len(times)), slow=True)
                    begun += 1
                    out = recorded if name == RECORDED else Path(folder, name.replace(" ", "-"))
                    link = NetworkLink(f"{rate_bps(rate) / case.slower / 1e6:g}mbit", 0.0, queue_ms / 1000)
                    with network(1 + case.workers, link) as machines:
                        placement = machines.placement(1)
                        settings = {"sync": sync, "transport": "tcp", "run_dir": out, "placement": placement}
                        result, _ = live(train, iterations, begun, workers=case.workers, **settings)
                    predicted_s = _predicted_s(rate_bps(rate), sync, case, recorded, iterations)
                    times[sync, name].append((predicted_s, result.summary["duration_s"]))
    goals = ", ".join(f"{name}: {case.goal:.0%}" for name, case in CASES.items())
    links = f"links of {rate} with queues of {queue_ms:g} ms"
    title = f"Predicted from a recorded run with {len(PACE_S)} workers on {links}"
    caption = f"{rounds_text(rounds)}; goals for the error of the ratio: {goals}; !: goal missed"
    return [Figures(title, rows(times), COLUMNS, caption, labels=2)]


def rows(times: Times) -> list[WhatIfRow]:
    """Return a row for each sync model and case."""
    found = []
    for (sync, case), pairs in times.items():
        predicted_s, measured_s = (median(column) for column in zip(*pairs, strict=True))
        ratios = spread(predicted / measured for predicted, measured in pairs)
        found.append(WhatIfRow(sync, case, measured_s, predicted_s, *ratios))
    return found


def _predicted_s(bps: float, sync: str, case: Case, recorded: Path, iterations: int) -> float:
    """Return the time that a recorded run predicts for a case."""
    cluster = Cluster.from_run(recorded, bandwidth=bps)
    changed = cluster.with_(workers=case.workers, bandwidth=bps / case.slower)
    return simulate(changed, sync, iterations).measures.duration_s


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
