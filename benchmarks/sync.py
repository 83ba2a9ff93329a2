"""`python -m benchmarks sync`: the time that a shard spends in a sync model for each push and pull."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import msgspec

from paceline.cli.console import TellShare
from paceline.core.shard import ShardSync
from paceline.sync import Conditions, PullState, SyncModel, parse
from paceline.sync.actions import AnswerPull, SetTimer
from paceline.sync.events import AnyEvent, PullRequested, PushReceived, TimerFired, WorkerJoined

from .harness import Benchmark, Figures, marked

GOALS_US = {10: 6.0, 10_000: 12.0}
"""Number of workers -> goal for the median time of one push and one pull together, in microseconds."""

MEASURED = 20_000  # number of pushes measured for each model and number of workers
STEP_TICKS = 1_000_000  # simulated time between two pushes


def within_two(state: PullState) -> bool:
    """Return True if the worker is at most two iterations ahead of the slowest worker."""
    return state.gap <= 2


SYNCS = (
    "bsp asp asp:push_scale=1/n ssp:staleness=3 ssp:staleness=3,execution=lazy dssp dsps pssp:staleness=0 "
    "dynamic-pssp:staleness=0 drop-stragglers:quorum=7 rennala:batch=7 ringmaster:threshold=100 "
    "naive-waiting:delay_s=0.001 elastic-bsp spec-sync"
)
MODELS: tuple[SyncModel, ...] = (*map(parse, SYNCS.split()), Conditions(pull=within_two))


class CostRow(msgspec.Struct, frozen=True):
    """The median time of one push and one pull together, for each number of workers in `GOALS_US`."""

    sync: str
    median_us: dict[int, float]


@Benchmark(minutes=0.5, quick={"pushes": 300})
def measure(
    tell: TellShare, models: Sequence[SyncModel] = MODELS, pushes: int = MEASURED
) -> list[Figures[CostRow]]:
    """Time a push and a pull under each sync model, with 10 and with 10,000 workers."""
    rows = []
    for number, model in enumerate(models):
        tell(str(model), number / len(models))
        rows.append(CostRow(str(model), {workers: _cost_us(model, workers, pushes) for workers in GOALS_US}))

    def cell(row: CostRow, workers: int) -> str:
        return marked(f"{row.median_us[workers]:.1f}", row.median_us[workers] <= GOALS_US[workers])

    columns = {
        f"{workers:,} workers\n(goal {goal_us:g})": partial(cell, workers=workers)
        for workers, goal_us in GOALS_US.items()
    }
    return [Figures("Time of a push and a pull, median us", rows, {"sync": lambda row: row.sync, **columns})]


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
