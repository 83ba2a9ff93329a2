"""`python -m benchmarks auto`: what `--sync auto` chooses on 60 simulated clusters, compared with every fixed choice.

The clusters are of six kinds, ten of each: some workers are always slower, times vary at random, workers pause, links
are slow, machines are equal, or the speeds of machines change in mid-run. The workers use up the same data under each
choice. A *time* is the virtual time of the run, divided by the share of the data whose gradients were applied, because
`drop-stragglers` drops some gradients.

The time says nothing about the quality of the result: an epoch is assumed to be worth the same under each choice, which
is the aim of translated hyper-parameters (see `paceline.sync.translation`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from paceline.cli.console import TellShare
from paceline.core.auto import RELAXED
from paceline.lab.pool import on_all_cores
from paceline.sim import Cluster, Dataset, Link, LogNormal, Occasional, Recorded, Uniform, simulate
from paceline.sim.times import Times
from paceline.sync.model import backup_quorum

from .harness import Benchmark, Columns, Figures

KINDS = ("steady", "jitter", "pauses", "slow links", "equal", "changing")
EACH = 10  # clusters of each kind
ROUNDS = 30  # iterations of each worker in an epoch, if all have the same number
BATCH = 32
EPOCHS = 24
WITHIN = 0.15  # goal: the time is longer than with the best fixed choice by at most this share
SHARE = 0.9  # share of the clusters that must meet the goal `WITHIN`
SLOWER = 0.05  # goal: the time is longer than under bsp by at most this share


class Row(msgspec.Struct, frozen=True):
    """The result for one cluster."""

    name: str
    times_s: dict[str, float]  # fixed choice -> its time in virtual seconds
    auto_s: float  # the time with `auto`
    changes: tuple[str, ...]  # the models to which `auto` has changed, in order

    @property
    def best(self) -> str:
        """The fixed choice with the shortest time."""
        return min(self.times_s, key=self.times_s.__getitem__)

    @property
    def behind(self) -> float:
        """Share by which the time with `auto` is longer than with the best fixed choice."""
        return self.auto_s / self.times_s[self.best] - 1.0

    @property
    def behind_bsp(self) -> float:
        """Share by which the time with `auto` is longer than under bsp."""
        return self.auto_s / self.times_s["bsp"] - 1.0


COLUMNS: Columns[Row] = {
    "cluster": lambda row: row.name,
    "best fixed choice": lambda row: row.best,
    "s": lambda row: f"{row.times_s[row.best]:.0f}",
    "auto, s": lambda row: f"{row.auto_s:.0f}",
    "behind": lambda row: f"{row.behind:+.1%}{' !' * (row.behind > WITHIN or row.behind_bsp > SLOWER)}",
    "behind bsp": lambda row: f"{row.behind_bsp:+.1%}",
    "auto changed to": lambda row: ", ".join(row.changes),
}


def clusters(each: int = EACH) -> Iterator[Cluster]:
    """Yield `each` clusters of each kind. The clusters differ in size, and in how unequal their workers are."""
    for kind in KINDS:
        for number in range(each):
            draw = random.Random(f"{kind} {number}")
            workers = (4, 6, 8, 12, 16)[number % 5]
            slow = set(range(workers - max(1, workers // 4), workers))
            yield Cluster(
                compute_s=[_times(kind, number, worker in slow, draw) for worker in range(workers)],
                links={w: _slow_link(number) for w in slow} if kind == "slow links" else {},
                fixed_share=(0.0, 0.2, 0.4)[number % 3],
                latency_s=0.02,
                name=f"{kind} {number}",
            )


def _times(kind: str, number: int, slow: bool, draw: random.Random) -> Times:
    """Return the compute times of a worker. The larger `number` is, the more unequal the workers are."""
    degree = number / 9
    nearly = Uniform(low=0.97, high=1.03)
    match kind:
        case "steady":
            factor = 1.5 + 2.5 * degree if slow else 1.0
            return Uniform(low=0.97 * factor, high=1.03 * factor)
        case "jitter":
            return LogNormal(median=1.0, sigma=0.1 + 0.6 * degree)
        case "pauses":
            return Occasional(
                base=nearly, factor=4.0 + 8.0 * degree, lasting=3.0, every=30.0 + 60.0 * draw.random()
            )
        case "changing":
            return Recorded(seconds=tuple(_changing(number, slow, draw)))
        case _:
            return nearly


def _changing(number: int, slow: bool, draw: random.Random) -> Iterator[float]:
    """Yield compute times whose distribution changes during the run."""
    steady = 3.0 if slow else 1.0
    first, last = (
        ((1.0, 0.5), (steady, 0.5), (1.0, 0.0), (steady, 0.0))[number % 4],
        (steady, 0.1 * (number % 3)),
    )
    for iteration in range(4 * EPOCHS * ROUNDS):
        factor, sigma = first if iteration < EPOCHS * ROUNDS * (0.25 + 0.05 * number) else last
        yield (
            factor * max(0.2, draw.lognormvariate(0.0, sigma)) if sigma else factor * draw.uniform(0.97, 1.03)
        )


def _slow_link(number: int) -> Link:
    latency_s = 0.05 + 0.06 * number
    return Link(to_server_s=latency_s, from_server_s=latency_s)


def choices(workers: int) -> list[tuple[str, str]]:
    """Return the fixed choices: sync models, with equal or balanced batches."""
    quorums = {backup_quorum(workers), backup_quorum(workers, workers // 4)} - {None}
    backups = [f"drop-stragglers:quorum={quorum}" for quorum in sorted(filter(None, quorums))]
    return [("bsp", "equal"), *((sync, "balanced") for sync in ("bsp", *backups, *RELAXED))]


def judge(cluster: Cluster, epochs: int = EPOCHS) -> Row:
    """Simulate every fixed choice, and `auto`, on a cluster."""
    times_s = {
        sync if batch == "equal" else f"{sync}, balanced": _run(cluster, sync, batch, epochs)[0]
        for sync, batch in choices(cluster.workers)
    }
    auto_s, changes = _run(cluster, "auto", "balanced", epochs)
    return Row(cluster.name, times_s, auto_s, changes)


def _run(cluster: Cluster, sync: str, batch: str, epochs: int) -> tuple[float, tuple[str, ...]]:
    data = Dataset(samples=BATCH * cluster.workers * ROUNDS, batch_size=BATCH, epochs=epochs)
    result = simulate(cluster, sync, None, data=data, batch="equal" if batch == "equal" else "balanced")
    return data.samples * epochs / result.measures.samples_per_s, tuple(c.after for c in result.choices)


@Benchmark(minutes=6, quick={"each": 1, "epochs": 2})
def measure(tell: TellShare, each: int = EACH, epochs: int = EPOCHS) -> list[Figures[Row]]:
    """Compare --sync auto with every fixed choice on 60 simulated clusters.

    Also checks the results against this project's goals.
    """
    judged = partial(judge, epochs=epochs)
    rows = on_all_cores(
        judged, [*clusters(each)], lambda one: one.name, lambda done, of, what: tell(what, done / max(1, of))
    )
    within, slowest = reached(rows)
    caption = (
        f"within {WITHIN:.0%} of the best fixed choice: {within:.0%} of the clusters (goal: {SHARE:.0%}); slower "
        f"than bsp by at most {slowest:.1%} (goal: {SLOWER:.0%})"
    )
    return [Figures("--sync auto, compared with fixed choices", rows, COLUMNS, caption, labels=2)]


def reached(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the share of the clusters in which `auto` is within 15 % of the best fixed choice, and the largest share
    by which `auto` is slower than bsp."""
    return sum(row.behind <= WITHIN for row in rows) / len(rows), max(row.behind_bsp for row in rows)
