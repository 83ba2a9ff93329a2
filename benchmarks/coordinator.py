"""`python -m benchmarks coordinator`: how much of a core a coordinator with 1,000 light workers uses.

The workers are in another process and compute nothing (see `crowd`). Each of them notifies the coordinator about
once per second: it reports its state, and the end of its iteration if the sync model needs to know it. The workers
belong to machines, which send heartbeats. Sometimes a worker asks a question, to measure the response time.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from rich import box
from rich.table import Table

from paceline import __version__
from paceline.cli.progress_bar import TellShare
from paceline.core.protocol.layout import Layout, Parameter
from paceline.core.protocol.model_spec import ModelSpec, OptimizerSpec
from paceline.errors import ConfigurationError
from paceline.runtime.coordinator_host import CoordinatorHost
from paceline.runtime.job_options import make_job
from paceline.runtime.listener import Listener
from paceline.shard.optimizers import read_groups
from paceline.wire.passing import PassedSockets, Source
from paceline.wire.preface import COORDINATOR
from paceline.wire.secret import new_secret

from .crowd import Crowd, CrowdReport, Place
from .descriptors import allow_descriptors

__all__ = ["CoordinatorRow", "estimate_s", "measure", "table"]

WORKERS = 1000
INTERVAL_S = 1.0
ROUNDS = 3
SECONDS = 5.0
WARM_UP_S = 3.0
START_S = 20.0  # approximate time to connect all workers
SHARE_GOAL = 0.2  # of one core, at `USUAL_RATE`
USUAL_RATE = 1000.0  # notifications per second
# (sync model, number of machines, True for TLS)
SETTINGS = (
    ("asp", 125, False),
    ("asp", 125, True),
    ("asp", 1000, True),
    ("elastic-bsp:lookahead=15", 125, True),
    ("spec-sync", 125, True),
)
SPARE_DESCRIPTORS = 100
START_TIMEOUT_S = 120.0


class CoordinatorRow(msgspec.Struct, frozen=True):
    """The load of a coordinator.

    Attributes:
        sync: the sync model.
        secure: True if the connections use TLS.
        workers: number of workers.
        machines: number of machines.
        iterations_per_s: number of iterations of all workers per second.
        notifications_per_s: number of messages of all workers per second.
        share: share of one core that the coordinator uses.
        fewest: smallest number of iterations of a worker, as a share of the mean.
        response_s: median of the response times.
        slow_response_s: 99th percentile of the response times.
        taken_out: number of workers that the coordinator has taken out.
    """

    sync: str
    secure: bool
    workers: int
    machines: int
    iterations_per_s: float
    notifications_per_s: float
    share: float
    fewest: float
    response_s: float
    slow_response_s: float
    taken_out: int

    @property
    def usual_share(self) -> float:
        """The share of one core per 1,000 notifications per second."""
        return self.share * USUAL_RATE / max(self.notifications_per_s, 1.0)


def estimate_s() -> float:
    """Estimate how long all measurements take, in seconds."""
    return len(SETTINGS) * (START_S + WARM_UP_S + ROUNDS * SECONDS)


def measure(
    tell: TellShare,
    settings: Sequence[tuple[str, int, bool]] = SETTINGS,
    workers: int = WORKERS,
    seconds: float = SECONDS,
    interval_s: float = INTERVAL_S,
) -> list[CoordinatorRow]:
    """Measure the load of the coordinator under several sync models.

    Raises:
        ConfigurationError: this process may not open enough sockets.
    """
    rows = []
    for number, (sync, machines, secure) in enumerate(settings):
        tell(f"{sync}, {machines} machines", number / len(settings))
        rows.append(_measure(sync, workers, machines, seconds, interval_s, secure=secure))
    return rows


def _measure(
    sync: str, workers: int, machines: int, seconds: float, interval_s: float, *, secure: bool
) -> CoordinatorRow:
    allow_descriptors(workers + machines + SPARE_DESCRIPTORS)
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        # No process trains, so the memory for the processes of so many workers is not needed.
        job = make_job(workers=1, servers=1, sync=sync, joined=True, transport="tcp", run_dir=f"{folder}/run")
        job = msgspec.structs.replace(
            job, workers=workers, least=workers, secure=secure, token=new_secret(), version=__version__
        )
        sock, address = CoordinatorHost.listen_for(job)
        source: Source = sock
        if secure:
            listener = stack.enter_context(Listener(sock, bytes.fromhex(job.mark)))
            source = PassedSockets(listener.receiver(COORDINATOR))
        coordinator = CoordinatorHost(job, source, address)
        coordinator.start()
        stack.callback(coordinator.stop)
        place = Place(address, job.token, secure, __version__, sync, workers, machines, interval_s, _model())
        pipe, end = spawn.Pipe()
        process = spawn.Process(target=_work, args=(msgspec.msgpack.encode(place), end), daemon=True)
        process.start()
        end.close()
        stack.callback(process.join)
        stack.callback(pipe.close)
        pipe.recv()  # all workers have joined
        if not coordinator.started.wait(START_TIMEOUT_S):
            raise ConfigurationError("the workers have not begun to train in time; use an idle machine.")
        time.sleep(min(WARM_UP_S, seconds))
        _fetch(pipe)
        assert coordinator._thread.ident is not None
        clock = time.pthread_getcpuclockid(coordinator._thread.ident)
        shares, rates, notified, iterations, response_s = [], [], [], [0] * workers, []
        for _ in range(ROUNDS):
            begun_s, used_s = time.monotonic(), time.clock_gettime(clock)
            time.sleep(seconds)
            used_s = time.clock_gettime(clock) - used_s
            report = _fetch(pipe)
            elapsed_s = time.monotonic() - begun_s
            shares.append(used_s / elapsed_s)
            rates.append(sum(report.iterations) / elapsed_s)
            notified.append(report.notifications / elapsed_s)
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
    """Be the light workers until the pipe is closed. Run in a process of its own."""
    chosen = msgspec.msgpack.decode(place, type=Place)
    allow_descriptors(chosen.workers + chosen.machines + SPARE_DESCRIPTORS)
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


def table(rows: list[CoordinatorRow]) -> Table:
    """Return the results as a table."""
    shown = Table(
        title=f"A coordinator with {rows[0].workers if rows else WORKERS} light workers",
        caption="notified: messages of the workers per second; core: share of one core per 1,000 of them per second, "
        f"goal: less than {SHARE_GOAL:.0%}, !: missed; fewest: fewest iterations of a worker in "
        "proportion to the mean; answer: median and 99th percentile of the response times; lost: workers taken out",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("sync model")
    for name in ("machines", "TLS", "notified", "core", "fewest", "answer (ms)", "lost"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.sync.partition(":")[0],
            str(row.machines),
            "yes" if row.secure else "no",
            f"{row.notifications_per_s:.0f}",
            f"{row.usual_share:.1%}{'!' if row.usual_share >= SHARE_GOAL else ''}",
            f"{row.fewest:.0%}",
            f"{1e3 * row.response_s:.1f}, {1e3 * row.slow_response_s:.1f}",
            str(row.taken_out),
        )
    return shown
