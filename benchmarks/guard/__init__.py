"""`python -m benchmarks guard`: what the guard of a run notices.

Twenty divergences are planted in small training runs, with real gradients in virtual time. Each must be said within
20 updates of the moment at which it can be seen. In twenty healthy runs, some of which look like a divergence for a
while, nothing must be said. Observing and judging a push must take less than 1 % of a step of 5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table

from paceline.cli.progress_bar import TellShare

from .cost import MOST_US, Cost, measure_cost
from .judging import MOST_UPDATES, Judged, judge
from .scenarios import HEALTHY, PLANTED

__all__ = ["GuardReport", "estimate_s", "measure", "tables"]

SEEDS = (0, 1, 2)
"""The constants of the guard were chosen with other seeds, from 100 on."""

RUN_S = 1.0  # approximate time of one run


class GuardReport(msgspec.Struct, frozen=True):
    """All runs, and what the guard costs."""

    judged: list[Judged]
    cost: Cost


def estimate_s() -> float:
    """Return about how many seconds `measure` takes."""
    return RUN_S * len(SEEDS) * len((*PLANTED, *HEALTHY))


def measure(tell: TellShare) -> GuardReport:
    """Let the guard judge all runs, and measure what it costs."""
    runs = [(scenario, seed) for scenario in (*PLANTED, *HEALTHY) for seed in SEEDS]
    judged = []
    cost = measure_cost()
    for number, (scenario, seed) in enumerate(runs):
        tell(f"{scenario.name}, seed {seed}", number / len(runs))
        judged.append(judge(scenario, seed))
    return GuardReport(judged, cost)


def tables(report: GuardReport) -> list[Table]:
    """Return a table with one row for each scenario, and one of the cost."""
    return [_runs(report.judged), _cost(report.cost)]


def _runs(judged: Sequence[Judged]) -> Table:
    """Return a table with one row for each scenario."""
    right = sum(each.right for each in judged)
    shown = Table(
        "run",
        "seeds",
        "right",
        "updates until said",
        "first words",
        box=box.SIMPLE,
        title="The guard of a run",
    )
    shown.caption = f"{right} of {len(judged)} right: planted ones are said within {MOST_UPDATES} updates"
    for name in dict.fromkeys(each.name for each in judged):
        rows = [each for each in judged if each.name == name]
        late = [each.late for each in rows if each.late is not None]
        words = next((each.words for each in rows if each.words), "")
        shown.add_row(
            name,
            str(len(rows)),
            str(sum(each.right for each in rows)),
            f"{min(late)} to {max(late)}" if late else "",
            words.partition("): ")[2].partition(". ")[0],
        )
    return shown


def _cost(cost: Cost) -> Table:
    shown = Table("per push", "us", box=box.SIMPLE, title="Its cost")
    shown.add_row("observed by the worker", f"{cost.observe_us:.1f}")
    shown.add_row("sent and received", f"{cost.report_us:.1f}")
    shown.add_row("judged by the coordinator", f"{cost.judge_us:.1f}")
    shown.add_row("all", f"{cost.total_us:.1f}{' !' * (cost.total_us > MOST_US)}")
    shown.caption = f"Goal: at most {MOST_US:g} us, 1 % of a step of 5 ms."
    return shown
