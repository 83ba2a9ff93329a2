"""`python -m benchmarks data`: what it costs to hand out the data of an epoch during training.

In live runs, workers alternate between passes over a plain `DataLoader` and over the same loader with `distribute`,
and measure the time per batch in the loader and in the optimizer's step. Then a coordinator answers the requests of
1,000 workers, each of which asks 10 times per second.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import median
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.cli.console import TellShare
from paceline.core.requests import Request
from paceline.train.data import distribute
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import Session, current

from .data_requests import SECONDS, RequestsRow, ask_core, ask_floor, ask_host
from .harness import Benchmark, Columns, Figures, live, marked

WORKERS = (1, 4)
PROCESSES = (0, 2)  # numbers of processes of the loader
BATCH = 16
BATCHES = 100  # number of batches in an epoch, for each worker
STEP_S = 0.005  # compute time of a gradient
ADDED_GOAL = 0.01  # goal: largest time that the distributed loader adds, as a share of `STEP_S`
SHARE_GOAL = 0.1  # goal: largest share of one core that the coordinator uses
ASKING = 1000  # number of workers that ask the coordinator
RATE = 10.0  # number of requests per second of each of these workers


class Pass(msgspec.Struct, frozen=True):
    """The mean times of one worker in one pass over a loader."""

    batches: int  # number of batches
    first_s: float  # time until the first batch has been loaded
    loader_s: float  # time to load a batch other than the first one
    step_s: float  # time of `DistributedOptimizer.step()`
    requests: int  # number of requests for data that were sent with a push
    waits: int  # number of times that the worker waited for data, except at the beginning of the pass
    waited_s: float  # total time of these waits


class LoaderRow(msgspec.Struct, frozen=True):
    """The time per batch of a distributed loader, compared with the plain loader.

    Each pass over the distributed loader is compared with the pass over the plain loader before it. All times are
    medians over these pairs of passes in all workers.
    """

    workers: int
    processes: int  # number of processes of the loader
    plain_us: float  # time to load a batch of the plain loader
    distributed_us: float
    plain_step_us: float  # time of a step with a batch of the plain loader
    distributed_step_us: float
    added_us: float  # additional time for a batch of the distributed loader, in the loader and in the step
    first_ms: float  # additional time for the first batch of an epoch
    requests: float  # number of requests per batch that are sent with a push
    waits: float  # number of waits for data per batch, without the wait at the beginning of an epoch
    wait_us: float  # mean time of a wait for data; 0 if there was no wait

    @property
    def added(self) -> float:
        """The additional time, as a share of the time to compute a gradient."""
        return self.added_us / 1e6 / STEP_S


def _share(row: RequestsRow) -> float:
    """Return the share of a core that the requests of 1,000 workers take."""
    return row.request_us / 1e6 * ASKING * RATE


COLUMNS: Columns[LoaderRow] = {
    "workers": lambda row: row.workers,
    "loader processes": lambda row: row.processes,
    "load": lambda row: f"{row.plain_us:.0f} us",
    "added": lambda row: f"{row.distributed_us - row.plain_us:+.0f} us",
    "step": lambda row: f"{row.plain_step_us:.0f} us",
    "added ": lambda row: f"{row.distributed_step_us - row.plain_step_us:+.0f} us",
    "in total": lambda row: marked(f"{row.added:+.2%}", row.added < ADDED_GOAL),
}
WAIT_COLUMNS: Columns[LoaderRow] = {
    "workers": lambda row: row.workers,
    "loader processes": lambda row: row.processes,
    "first batch of an epoch": lambda row: f"{row.first_ms:+.1f} ms",
    "requests": lambda row: f"{row.requests:.1%}",
    "waits": lambda row: f"{row.waits:.1%}",
    "per wait": lambda row: f"{row.wait_us:.0f} us" if row.waits else "",
}
REQUEST_COLUMNS: Columns[RequestsRow] = {
    "measured": lambda row: row.measured,
    "workers": lambda row: f"{row.workers:,}",
    "requests per s": lambda row: f"{row.rate:,.0f}" if row.rate else "",
    "per request": lambda row: f"{row.request_us:.1f} us",
    "share of a core": lambda row: marked(f"{_share(row):.1%}", _share(row) < SHARE_GOAL),
}


@Benchmark(minutes=3, quick={"workers": (2,), "processes": (0,), "rounds": 1, "asking": 20, "seconds": 0.1})
def measure(
    tell: TellShare,
    workers: Sequence[int] = WORKERS,
    processes: Sequence[int] = PROCESSES,
    rounds: int = 7,
    asking: int = ASKING,
    seconds: float = SECONDS,
) -> list[Figures[Any]]:
    """Measure what it costs to hand out data: the time per batch, and the coordinator's load with 1,000 workers."""
    settings = list(product(workers, processes))
    parts = len(settings) + 3
    loaders = []
    for number, (count, helpers) in enumerate(settings):
        tell(f"live run: workers {count}, loader processes {helpers}", number / parts, slow=True)
        _, found = live(
            train, count, helpers, rounds, kind=list[tuple[Pass, Pass]], workers=count, sync="asp"
        )
        loaders.append(compare(count, helpers, [pair for pairs in found for pair in pairs]))
    tell(f"the coordinator's state machine, {asking:,} workers", len(settings) / parts, slow=True)
    core = ask_core(asking, RATE)
    tell(f"system calls for {asking:,} connections", (len(settings) + 1) / parts, slow=True)
    floor = ask_floor(asking, RATE, seconds)
    tell(f"a coordinator with {asking:,} connections", (len(settings) + 2) / parts, slow=True)
    return figures_of(loaders, [core, floor, ask_host(asking, RATE, seconds)])


def figures_of(loaders: Sequence[LoaderRow], requests: Sequence[RequestsRow]) -> list[Figures[Any]]:
    """Return the times of the loaders and the load of the coordinator."""
    gradient = f"{1e3 * STEP_S:.0f} ms"
    return [
        Figures(
            "Time per batch of the plain loader, and what the distributed loader adds",
            loaders,
            COLUMNS,
            f"goal: in total, less than {ADDED_GOAL:.0%} of a gradient's {gradient} is added; !: goal missed",
        ),
        Figures(
            "Requests and waits for data, per batch",
            loaders,
            WAIT_COLUMNS,
            "requests are sent with pushes; the wait for the first batch of an epoch is not counted",
        ),
        Figures(
            f"A coordinator that answers {ASKING:,} workers, each of which asks {RATE:.0f} times per second",
            requests,
            REQUEST_COLUMNS,
            f"goal: less than {SHARE_GOAL:.0%} of a core; !: goal missed",
        ),
    ]


def compare(workers: int, processes: int, pairs: Sequence[tuple[Pass, Pass]]) -> LoaderRow:
    """Compare passes over the plain loader with passes over the distributed loader."""
    distributed = [after for _, after in pairs]
    batches, waits = sum(one.batches for one in distributed), sum(one.waits for one in distributed)

    def median_us(time_s: Callable[[Pass, Pass], float]) -> float:
        return 1e6 * median(time_s(before, after) for before, after in pairs)

    return LoaderRow(
        workers,
        processes,
        median_us(lambda before, after: before.loader_s),
        median_us(lambda before, after: after.loader_s),
        median_us(lambda before, after: before.step_s),
        median_us(lambda before, after: after.step_s),
        median_us(lambda before, after: after.loader_s + after.step_s - before.loader_s - before.step_s),
        median_us(lambda before, after: after.first_s - before.first_s) / 1e3,
        sum(one.requests for one in distributed) / batches,
        waits / batches,
        1e6 * sum(one.waited_s for one in distributed) / waits if waits else 0.0,
    )


def train(workers: int, processes: int, rounds: int) -> list[tuple[Pass, Pass]]:
    """Train on passes over both loaders in turn, and return the times. The first round is not measured."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(64, 10)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    session = current()
    assert session is not None
    watch = Watch(session)
    pairs = []
    for number in range(rounds + 1):
        before = _pass(_loader(BATCH * BATCHES, processes), model, optimizer, watch)
        shared = distribute(_loader(BATCH * BATCHES * workers, processes))
        after = _pass(shared, model, optimizer, watch)
        if number and before is not None and after is not None:
            pairs.append((before, after))
    return pairs


def _loader(samples: int, processes: int) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=processes)


def _pass(
    loader: Iterable[Any], model: nn.Module, optimizer: DistributedOptimizer, watch: Watch
) -> Pass | None:
    """Train on one pass over a loader. Return None if the worker has received fewer than two batches."""
    loader_s, step_s = [], []
    begun_s = time.perf_counter()
    batches = iter(loader)
    while (batch := next(batches, None)) is not None:
        loader_s.append(time.perf_counter() - begun_s)
        if len(loader_s) == 1:
            watch.reset()
        x, y = batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        time.sleep(STEP_S)
        begun_s = time.perf_counter()
        optimizer.step()
        step_s.append(time.perf_counter() - begun_s)
        begun_s = time.perf_counter()
    if len(loader_s) < 2:
        return None
    count = len(loader_s)
    times_s = loader_s[0], sum(loader_s[1:]) / (count - 1), sum(step_s) / count
    return Pass(count, *times_s, watch.requests, watch.waits, watch.waited_s)


class Watch:
    """Counts the requests for data that a session sends, and measures how long it waits for answers. See `Pass`.

    Reading an answer that has already arrived is not a wait.
    """

    def __init__(self, session: Session) -> None:
        exchange, push = session.exchange, session.core.data.push
        arrived = select.poll()
        arrived.register(session.links.coordinator, select.POLLIN)  # type: ignore[attr-defined]

        def watched_exchange(ask: Callable[[], Sequence[Request]]) -> None:
            requests = ask()
            waiting = bool(requests) or (session.core.data.waiting and not arrived.poll(0))
            begun_s = time.perf_counter()
            exchange(lambda: requests)
            if waiting:
                self.waits += 1
                self.waited_s += time.perf_counter() - begun_s

        def watched_push(busy_s: float | None = None) -> list[Request]:
            requests = push(busy_s)
            self.requests += len(requests)
            return requests

        session.exchange = watched_exchange  # type: ignore[method-assign]
        session.core.data.push = watched_push  # type: ignore[method-assign]
        self.reset()

    def reset(self) -> None:
        """Set all counts to 0."""
        self.requests = self.waits = 0
        self.waited_s = 0.0
