"""`python -m benchmarks coordinator`: how much of a core a coordinator with 1,000 light workers uses.

The workers are in another process and compute nothing (see `crowd`). Each worker notifies the coordinator about once
per second: the worker reports its state and, if the sync model needs this, the end of its iteration. The workers
belong to machines, which send heartbeats. Sometimes a worker asks a question, to measure the response time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from paceline import __version__
from paceline.cli.console import TellShare
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.errors import ConfigurationError
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job_options import make_job
from paceline.run.listener import Listener
from paceline.shard.optimizers import read_groups
from paceline.wire.memory import ConnectionSource, PassedSockets
from paceline.wire.preface import COORDINATOR
from paceline.wire.secure import new_secret

from .crowd import Crowd, CrowdReport, Place, allow_descriptors, beside, load_of
from .harness import Benchmark, Columns, Figures, marked

WORKERS = 1000
INTERVAL_S = 1.0
ROUNDS = 3
SECONDS = 5.0
WARM_UP_S = 3.0
SHARE_GOAL = 0.2  # goal: largest share of one core, at `USUAL_RATE`
USUAL_RATE = 1000.0  # notifications per second
# (sync model, number of machines, True for TLS)
SETTINGS = (
    ("asp", 125, False),
    ("asp", 125, True),
    ("asp", 1000, True),
    ("elastic-bsp:lookahead=15", 125, True),
    ("spec-sync", 125, True),
)
START_TIMEOUT_S = 120.0


class CoordinatorRow(msgspec.Struct, frozen=True):
    """The load of a coordinator."""

    sync: str
    secure: bool  # True if the connections use TLS
    workers: int
    machines: int
    iterations_per_s: float  # of all workers
    notifications_per_s: float  # messages of all workers
    share: float  # share of one core that the coordinator uses
    fewest: float  # smallest number of iterations of a worker, as a share of the mean
    response_s: float  # median of the response times
    slow_response_s: float  # 99th percentile of the response times
    taken_out: int  # number of workers that the coordinator has taken out

    @property
    def usual_share(self) -> float:
        """The share of one core per 1,000 notifications per second."""
        return self.share * USUAL_RATE / max(self.notifications_per_s, 1.0)


COLUMNS: Columns[CoordinatorRow] = {
    "sync model": lambda row: row.sync.partition(":")[0],
    "machines": lambda row: row.machines,
    "TLS": lambda row: "yes" if row.secure else "no",
    "notified": lambda row: f"{row.notifications_per_s:.0f}",
    "core": lambda row: marked(f"{row.usual_share:.1%}", row.usual_share < SHARE_GOAL),
    "fewest": lambda row: f"{row.fewest:.0%}",
    "answer (ms)": lambda row: f"{1e3 * row.response_s:.1f}, {1e3 * row.slow_response_s:.1f}",
    "lost": lambda row: row.taken_out,
}
CAPTION = (
    "notified: messages of the workers per second; core: share of one core per 1,000 messages per second, "
    f"goal: less than {SHARE_GOAL:.0%}, !: missed; fewest: fewest iterations of a worker in proportion to the mean; "
    "answer: median and 99th percentile of the response times; lost: workers taken out"
)


@Benchmark(
    minutes=3, quick={"settings": (("asp", 4, True),), "workers": 12, "seconds": 0.5, "interval_s": 0.05}
)
def measure(
    tell: TellShare,
    settings: Sequence[tuple[str, int, bool]] = SETTINGS,
    workers: int = WORKERS,
    seconds: float = SECONDS,
    interval_s: float = INTERVAL_S,
) -> list[Figures[CoordinatorRow]]:
    """Measure how much of a core the coordinator uses with 1,000 light workers, and how fast it responds."""
    rows = []
    for number, (sync, machines, secure) in enumerate(settings):
        tell(f"{sync}, {machines} machines", number / len(settings))
        rows.append(_measure(sync, workers, machines, seconds, interval_s, secure=secure))
    return [Figures(f"A coordinator with {workers} light workers", rows, COLUMNS, CAPTION)]


def _measure(
    sync: str, workers: int, machines: int, seconds: float, interval_s: float, *, secure: bool
) -> CoordinatorRow:
    allow_descriptors(workers + machines)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        # `make_job` gets one worker, because it checks the memory for all workers, but no process trains here.
        job = make_job(workers=1, servers=1, sync=sync, joined=True, transport="tcp", run_dir=f"{folder}/run")
        job = msgspec.structs.replace(
            job, workers=workers, least=workers, secure=secure, token=new_secret(), version=__version__
        )
        sock, address = CoordinatorHost.listen_for(job)
        source: ConnectionSource = sock
        if secure:
            listener = stack.enter_context(Listener(sock, bytes.fromhex(job.mark)))
            source = PassedSockets(listener.receiver(COORDINATOR))
        coordinator = CoordinatorHost(job, source, address)
        coordinator.start()
        stack.callback(coordinator.stop)
        place = Place(address, job.token, secure, __version__, sync, workers, machines, interval_s, _model())
        pipe = beside(stack, _work, msgspec.msgpack.encode(place))
        pipe.recv()  # all workers have joined
        if not coordinator.started.wait(START_TIMEOUT_S):
            raise ConfigurationError("the workers have not begun to train in time; use an idle machine.")
        time.sleep(min(WARM_UP_S, seconds))
        _fetch(pipe)
        shares, rates, notified, iterations, response_s = [], [], [], [0] * workers, []
        for _ in range(ROUNDS):
            load = load_of(coordinator._thread, seconds)
            report = _fetch(pipe)
            shares.append(load.used_s / load.elapsed_s)
            rates.append(sum(report.iterations) / load.elapsed_s)
            notified.append(report.notifications / load.elapsed_s)
            iterations = [sum(both) for both in zip(iterations, report.iterations, strict=True)]
            response_s += report.response_s
    return CoordinatorRow(
        sync,
        secure,
        workers,
        machines,
        median(rates),
        median(notified),
        median(shares),
        min(iterations) * workers / max(1, sum(iterations)),
        median(response_s or [0.0]),
        quantiles(response_s, n=100)[-1] if len(response_s) > 1 else 0.0,
        report.taken_out,
    )


def _model() -> ModelSpec:
    """Return a small model with SGD."""
    layout = Layout.of([Parameter(("weight",), (100,), "float32")])
    groups = read_groups(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    return ModelSpec(layout, OptimizerSpec("SGD", tuple(groups), (0,)), ())


def _fetch(pipe: Any) -> CrowdReport:
    pipe.send(None)
    report: CrowdReport = pipe.recv()
    return report


def _work(place: bytes, pipe: Any) -> None:
    """Act as the light workers until the pipe is closed. This function runs in a process of its own."""
    chosen = msgspec.msgpack.decode(place, type=Place)
    allow_descriptors(chosen.workers + chosen.machines)
    with Crowd(chosen) as crowd:
        crowd.join()
        pipe.send(None)
        while True:
            if crowd.work(1.0, also=pipe):
                try:
                    pipe.recv()
                except EOFError:
                    return
                pipe.send(crowd.report())
