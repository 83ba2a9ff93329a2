"""`python -m benchmarks guard`: what the guard of a run notices.

Twenty divergences are planted in small training runs, which compute real gradients, but in virtual time. The guard must
report each divergence within 20 updates of the moment at which the divergence can be seen. In twenty healthy runs, some
of which look like a divergence for a while, the guard must report nothing. Observing and judging a push must take less
than 1 % of a step of 5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.cli.console import TellShare

from ..harness import Benchmark, Columns, Figures, marked
from .cost import MOST_US, Cost, measure_cost
from .judging import MOST_UPDATES, Judged, judge
from .scenarios import HEALTHY, PLANTED, Scenario

SEEDS = (0, 1, 2)  # the constants of the guard were chosen with other seeds, from 100 on

COLUMNS: Columns[Sequence[Judged]] = {
    "run": lambda runs: runs[0].name,
    "first words": lambda runs: next((each.told for each in runs if each.words), ""),
    "seeds": len,
    "right": lambda runs: sum(each.right for each in runs),
    "updates until reported": lambda runs: _range([each.late for each in runs if each.late is not None]),
}
COST_COLUMNS: Columns[Cost] = {
    "observed by the worker": lambda cost: f"{cost.observe_us:.1f}",
    "sent and received": lambda cost: f"{cost.report_us:.1f}",
    "judged by the coordinator": lambda cost: f"{cost.judge_us:.1f}",
    "all": lambda cost: marked(f"{cost.total_us:.1f}", cost.total_us <= MOST_US),
}


@Benchmark(minutes=2, quick={"scenarios": (PLANTED[0], HEALTHY[0]), "seeds": (0,)})
def measure(
    tell: TellShare, scenarios: Sequence[Scenario] = (*PLANTED, *HEALTHY), seeds: Sequence[int] = SEEDS
) -> list[Figures[Any]]:
    """Let the guard of a run judge 20 planted divergences and 20 healthy runs, with three seeds each.

    The cost of the guard is measured, too.
    """
    cost = measure_cost()
    judged = []
    for number, scenario in enumerate(scenarios):
        tell(scenario.name, number / len(scenarios))
        judged.append([judge(scenario, seed) for seed in seeds])
    return figures_of(judged, cost)


def figures_of(judged: Sequence[Sequence[Judged]], cost: Cost) -> list[Figures[Any]]:
    """Return the runs of each scenario, and the cost."""
    right = sum(each.right for runs in judged for each in runs)
    caption = (
        f"{right} of {sum(map(len, judged))} runs are right: divergences are reported within {MOST_UPDATES} "
        "updates"
    )
    goal = f"Goal: at most {MOST_US:g} us, 1 % of a step of 5 ms."
    return [
        Figures("The guard of a run", judged, COLUMNS, caption, labels=2),
        Figures("Cost of the guard per push, us", [cost], COST_COLUMNS, goal, labels=0),
    ]


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if numbers else ""
