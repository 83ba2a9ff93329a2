"""`python -m benchmarks sync`: the time that a shard spends in a sync model for each push and pull."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from statistics import median

import msgspec
from rich.table import Table

from paceline.core.sync.shard_sync import ShardSync
from paceline.sync import Conditions, PullState, SyncModel, parse
from paceline.sync.actions import AnswerPull, SetTimer
from paceline.sync.events import AnyEvent, PullRequested, PushReceived, TimerFired, WorkerJoined

__all__ = ["GOALS_US", "MODELS", "CostRow", "cost_table", "measure"]

GOALS_US = {10: 6.0, 10_000: 12.0}
"""Number of workers -> goal for the median time of one push and one pull together, in microseconds."""

MEASURED = 20_000  # number of pushes measured for each model and number of workers
STEP_TICKS = 1_000_000  # simulated time between two pushes


def within_two(state: PullState) -> bool:
    """Return True if the worker is at most two iterations ahead of the slowest worker."""
    return state.gap <= 2


MODELS: tuple[SyncModel, ...] = (
    *map(
        parse,
        (
            "bsp",
            "asp",
            "asp:push_scale=1/n",
            "ssp:staleness=3",
            "ssp:staleness=3,execution=lazy",
            "dssp",
            "dsps",
            "pssp:staleness=0",
            "dynamic-pssp:staleness=0",
            "drop-stragglers:quorum=7",
            "rennala:batch=7",
            "ringmaster:threshold=100",
            "naive-waiting:delay_s=0.001",
            "elastic-bsp",
            "spec-sync",
        ),
    ),
    Conditions(pull=within_two),
)


class CostRow(msgspec.Struct, frozen=True):
    """The time measured for a sync model with a given number of workers.

    Attributes:
        sync: sync model.
        workers: number of workers.
        median_us: median time of one push and one pull together.
        goal_us: goal for `median_us`.
    """

    sync: str
    workers: int
    median_us: float
    goal_us: float


def measure(models: Sequence[SyncModel] = MODELS, pushes: int = MEASURED) -> list[CostRow]:
    """Measure the median time of one push and one pull under each model. Live shards run the same code."""
    return [
        CostRow(str(model), workers, _cost_us(model, workers, pushes), goal_us)
        for model in models
        for workers, goal_us in GOALS_US.items()
    ]


def _cost_us(model: SyncModel, workers: int, pushes: int) -> float:
    """Measure one model.

    Each worker pushes as soon as its previous pull has been answered, so some workers run ahead as far as the model
    allows.
    """
    shard = ShardSync(model)
    for worker in range(workers):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    times_ns: list[int] = []
    iterations = [0] * workers
    free = list(range(workers))  # workers whose latest pull has been answered
    now_ticks = 0
    clock = time.perf_counter_ns
    gc.collect()
    gc.disable()
    try:
        while len(times_ns) < pushes:
            asked, free = free, []
            for worker in asked:
                now_ticks += STEP_TICKS
                iteration = iterations[worker]
                push: AnyEvent = PushReceived(now_ticks=now_ticks, worker=worker, iteration=iteration)
                pull: AnyEvent = PullRequested(now_ticks=now_ticks, worker=worker, iteration=iteration)
                begun_ns = clock()
                actions = shard.handle(push)
                actions += shard.handle(pull)
                times_ns.append(clock() - begun_ns)
                iterations[worker] += 1
                for action in actions:
                    if isinstance(action, SetTimer):
                        fired = TimerFired(now_ticks=now_ticks, worker=worker, iteration=iteration)
                        actions = [*actions, *shard.handle(fired)]
                free += [action.worker for action in actions if isinstance(action, AnswerPull)]
    finally:
        gc.enable()
    return median(times_ns) / 1000


def cost_table(rows: Sequence[CostRow]) -> Table:
    """Return a table with one line per model."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("median us per push and pull", no_wrap=True)
    for workers, goal_us in GOALS_US.items():
        table.add_column(f"{workers:,} workers\n(goal {goal_us:g})", justify="right")
    for sync in dict.fromkeys(row.sync for row in rows):
        cells = {row.workers: row for row in rows if row.sync == sync}
        table.add_row(
            sync,
            *(
                f"{row.median_us:.1f}{'' if row.median_us <= row.goal_us else ' !'}"
                for row in (cells[workers] for workers in GOALS_US)
            ),
        )
    return table
