"""`python -m benchmarks transport`: the times of a training step and of other ways to move the same bytes.

The compared systems:

- `floor`: one process per worker; the processes run simultaneously. Each process computes its gradients, copies them
  into a flat vector, makes one pass of SGD over this vector, and copies the weights once. Nothing is exchanged.
- `socket`: servers receive gradients over TCP on loopback, apply SGD and send weights. There is no framing.
- `gloo`: all-reduce of the flat gradient, then fused SGD. DDP does the same on a CPU.
- `paceline`: `zero_grad()`, `backward()` and `step()` with a `DistributedOptimizer`, in processes of a Paceline run.
- `mxnet`, only with `--mxnet`: the kvstore of MXNet (which contains PS-Lite), as `dist_async` and `dist_sync`. MXNet's
  workers only fill their gradients, its servers apply SGD, and a step ends when all weights have been pulled.
- `optimizer`: one update of a `Shard` in a single process, compared with the time to copy as many bytes as the update
  reads and writes.

Whole steps are timed, with `zero_grad()` and `backward()` of the same model in all systems. Nothing is subtracted,
because the time of a backward pass depends on what the other processes do meanwhile.

For each time, the median over iterations is computed first, then the mean over workers, then the median over rounds.
In each round, the systems are measured in turn, so that a change in the machine's speed affects all systems. Every
process uses one thread.

A model consists of 8 tensors of equal size, or of one tensor if the model is smaller than 64 KB. An MB is 2**20 bytes;
sizes are rounded to whole KB. Each run of Paceline is measured under ASP and then under BSP, because starting its
processes takes longer than the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any, NamedTuple

import msgspec

from paceline.cli.console import TellShare
from paceline.cli.options import whole_number_option
from paceline.core.layout import ALIGNMENT_BYTES, ITEM_BYTES
from paceline.errors import ConfigurationError, unknown_name
from paceline.settings.checks import numbers

from ..harness import Benchmark, Columns, Figures, Rounds, SizesMb, in_turns, list_option, rounds_text
from . import plan
from .kvstore import NEEDED, Mxnet, require_mxnet
from .plan import (
    FLOOR,
    GLOO,
    MXNET_ASP,
    MXNET_BSP,
    OPTIMIZER,
    SHM_ASP,
    SHM_BSP,
    SOCKET_ASP,
    SOCKET_BSP,
    SYSTEMS,
    TCP_ASP,
    TCP_BSP,
    Case,
    Turn,
)
from .systems import measure_turn, one_thread_each

SIZES_MB = (0.004, 1.0, 25.0, 100.0)
WORKERS = (2, 4)


class TransportRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The time of a step or an update with one system: the median and the extremes of the rounds."""

    system: str  # see `SYSTEMS`
    transport: str  # "shm" or "tcp"
    mode: str  # "asp" or "bsp"
    size_mb: float
    workers: int
    median_ms: float
    low_ms: float
    high_ms: float
    # The following fields are None for a training step.
    optimizer: str | None = None  # key in `OPTIMIZERS`
    traffic_ms: float | None = None  # time to copy as many bytes as the update reads and writes
    fastest_ms: float | None = None  # time of the fastest update in any round

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.system, self.transport, self.mode)


def _whole(name: str, number: float) -> int:
    """Convert a float that is a whole number to an integer. The error message contains `name`.

    Raises:
        ConfigurationError: the float is not a whole number.
    """
    if not number.is_integer():
        raise ConfigurationError(f"{name} is {number:g}, expected a whole number >= 1.")
    return int(number)


Workers = Annotated[
    Sequence[int],
    list_option(
        "--workers",
        "N ...",
        "Numbers of workers.",
        lambda text: tuple(_whole("workers", each) for each in numbers("workers", text)),
    ),
]
Servers = Annotated[int, whole_number_option("--servers", least=1, help="Number of servers.")]
Systems = Annotated[
    Sequence[str],
    list_option(
        "--systems",
        "NAME ...",
        f"Systems to measure, any of: {', '.join(SYSTEMS)}; with --mxnet also {MXNET_ASP.system}.",
        lambda text: text.split(","),
    ),
]


def _require_sound(
    sizes_mb: Sequence[float],
    workers: Sequence[int],
    servers: int,
    systems: Sequence[str],
    mxnet: str | None = None,
    **rest: object,
) -> None:
    known = (*SYSTEMS, MXNET_ASP.system)
    for system in systems:
        if system not in known:
            raise unknown_name("system", system, known)
    if MXNET_ASP.system in systems and mxnet is None:
        raise ConfigurationError(f"mxnet is not given, expected {NEEDED}.")
    for number in workers:
        if number < 1:
            raise ConfigurationError(f"workers is {number}, expected a whole number >= 1.")
    for size_mb in sizes_mb:
        if not (math.isfinite(size_mb) and size_mb >= plan.SMALLEST_MB):
            raise ConfigurationError(
                f"size is {size_mb:g} MB, expected a number >= {plan.SMALLEST_MB:g}, "
                f"for example {', '.join(f'{size:g}' for size in SIZES_MB)}."
            )
        most = plan.elements(size_mb) * ITEM_BYTES["float32"] // ALIGNMENT_BYTES
        if servers > most:
            raise ConfigurationError(
                f"servers is {servers}, expected at most {most}: a model of {size_mb:g} MB cannot be cut "
                "into more slices."
            )
    if mxnet is not None:
        require_mxnet(mxnet)


@Benchmark(
    minutes=11,
    quick={"sizes_mb": (0.004,), "workers": (2,), "rounds": 1, "updated_mb": (0.1,)},
    require=_require_sound,
)
def measure(
    tell: TellShare,
    sizes_mb: SizesMb = SIZES_MB,
    workers: Workers = WORKERS,
    servers: Servers = 2,
    rounds: Rounds = 3,
    systems: Systems = SYSTEMS,
    updated_mb: Sequence[float] = (25.0, 100.0),
    mxnet: Mxnet = None,
) -> list[Figures[Any]]:
    """Time a training step over shared memory and over TCP. Compare the times with plain copies, sockets and gloo."""
    if mxnet is not None:
        systems = (*systems, MXNET_ASP.system)
    planned = plan.turns_of(sizes_mb, workers, servers, systems, updated_mb, mxnet)
    turns = {turn.name: turn for turn in planned}
    with one_thread_each():
        found = in_turns(tell, rounds, turns, measure_turn, plan.work_s)
    return figures_of([row for name, turn in turns.items() for row in rows_of(turn, found[name])], rounds)


def rows_of(turn: Turn, rounds: Sequence[plan.Times]) -> list[TransportRow]:
    """Return one row for each case of a turn, computed from the results of all rounds."""
    rows = []
    for case in turn.cases:
        figures_ms, traffic_ms, fastest_ms = (
            [figures[key] * 1e3 for figures in rounds if key in figures]
            for key in (case.mode, "traffic", "fastest")
        )
        rows.append(
            TransportRow(
                **case._asdict(),
                size_mb=turn.size_mb,
                workers=turn.workers,
                median_ms=median(figures_ms),
                low_ms=min(figures_ms),
                high_ms=max(figures_ms),
                optimizer=turn.optimizer,
                traffic_ms=median(traffic_ms) if traffic_ms else None,
                fastest_ms=min(fastest_ms, default=None),
            )
        )
    return rows


# -- goals -------------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """A bound on a time, or on the ratio of two times."""

    top: Case  # case whose time is bounded; for a ratio, its time is the numerator
    bottom: Case | None  # case whose time is the denominator; None for a bound on the time of `top`
    size_mb: float  # model size in MB (2**20 bytes)
    workers: int  # number of workers
    bound: float  # the bound, a ratio or a time in microseconds
    at_least: bool = False  # True if `bound` is a lower bound, False if it is an upper bound

    @property
    def unit(self) -> str:
        """Unit of the bound."""
        return "us" if self.bottom is None else "x"


def update_of(optimizer: str, what: str = "update by") -> Case:
    """Return the case of an update by this optimizer or, if `what` is `TRAFFIC`, of the update's memory traffic."""
    return OPTIMIZER._replace(system=f"{what} {optimizer}")


LARGE_MB = (25.0, 100.0)
TRAFFIC = "traffic of"

GOALS: tuple[Goal, ...] = (
    *(Goal(SHM_ASP, FLOOR, size_mb, 2, 1.3) for size_mb in LARGE_MB),
    *(Goal(GLOO, SHM_BSP, size_mb, n, 4.0, at_least=True) for size_mb in LARGE_MB for n in (2, 4)),
    Goal(SHM_ASP, None, 0.004, 2, 60.0),
    *(Goal(TCP_BSP, SOCKET_BSP, size_mb, n, 1.15) for size_mb in LARGE_MB for n in (2, 4)),
    *(
        Goal(GLOO, TCP_BSP, size_mb, n, speed, at_least=True)
        for size_mb in LARGE_MB
        for n, speed in ((2, 0.8), (4, 1.0))
    ),
    Goal(update_of("Adam"), update_of("Adam", TRAFFIC), 100.0, 1, 1.5),
)


class GoalRow(msgspec.Struct, frozen=True):
    """A goal, and what was measured: a time in microseconds or a ratio."""

    goal: Goal
    figure: float

    @property
    def met(self) -> bool:
        """True if the figure is within the bound."""
        return self.figure >= self.goal.bound if self.goal.at_least else self.figure <= self.goal.bound


Times = Mapping[tuple[Case, float, int], float]
"""(case, size in MB, number of workers) -> time in milliseconds."""


def goal_rows(rows: Sequence[TransportRow]) -> list[GoalRow]:
    """Compare the measured times with the goals. Goals whose times were not measured are left out."""
    times_ms = times_by_case(rows)
    found = ((goal, _measured(times_ms, goal)) for goal in GOALS)
    return [GoalRow(goal, figure) for goal, figure in found if figure is not None]


def _measured(times_ms: Times, goal: Goal) -> float | None:
    if goal.bottom is not None:
        return ratio_of(times_ms, goal.top, goal.bottom, goal.size_mb, goal.workers)
    median_ms = times_ms.get((goal.top, goal.size_mb, goal.workers))
    return None if median_ms is None else median_ms * 1e3


def ratio_of(times_ms: Times, top: Case, bottom: Case, size_mb: float, workers: int) -> float | None:
    """Return the ratio of the times of two cases, or None if one of the times was not measured."""
    above, below = (times_ms.get((case, size_mb, workers)) for case in (top, bottom))
    return None if above is None or below is None else above / below


def times_by_case(rows: Sequence[TransportRow]) -> Times:
    """Return the median times of the rows, indexed by case, size and number of workers."""
    times_ms: dict[tuple[Case, float, int], float] = {}
    for row in rows:
        case = row.case
        if row.optimizer is not None:
            case = update_of(row.optimizer)
            assert row.traffic_ms is not None
            times_ms[update_of(row.optimizer, TRAFFIC), row.size_mb, row.workers] = row.traffic_ms
        times_ms[case, row.size_mb, row.workers] = row.median_ms
    return times_ms


# -- tables ------------------------------------------------------------------------------------------------------

# Heading of a column of ratios -> case of a row -> numerator and denominator of the ratio in that cell.
RATIOS: dict[str, dict[Case, tuple[Case, Case]]] = {
    "x\nfloor": {SHM_ASP: (SHM_ASP, FLOOR)},
    "gloo /\nthis": {SHM_BSP: (GLOO, SHM_BSP), TCP_BSP: (GLOO, TCP_BSP)},
    "x\nsocket": {TCP_ASP: (TCP_ASP, SOCKET_ASP), TCP_BSP: (TCP_BSP, SOCKET_BSP)},
}

MXNET_RATIOS = {"mxnet /\nthis": {TCP_ASP: (MXNET_ASP, TCP_ASP), TCP_BSP: (MXNET_BSP, TCP_BSP)}}


def figures_of(rows: Sequence[TransportRow], rounds: int) -> list[Figures[Any]]:
    """Return the tables of the steps, updates and goals that were measured."""
    times_ms = times_by_case(rows)
    steps = [row for row in rows if row.optimizer is None]
    updates = [row for row in rows if row.optimizer is not None]
    columns: dict[str, Callable[[TransportRow], str]] = {
        "system": lambda row: " ".join(row.case),
        "MB": lambda row: f"{row.size_mb:g}",
        "workers": lambda row: str(row.workers),
        "ms": lambda row: _ms(row.median_ms),
        "low - high": _span,
    }
    with_mxnet = any(row.case in (MXNET_ASP, MXNET_BSP) for row in rows)
    for heading, pairs in (RATIOS | (MXNET_RATIOS if with_mxnet else {})).items():
        columns[heading] = partial(_ratio, times_ms, pairs)
    caption = f"{rounds_text(rounds)}; low and high: fastest and slowest round"
    found: list[Figures[Any]] = [Figures("One training step", steps, columns, caption)]
    for size_mb in dict.fromkeys(row.size_mb for row in updates):
        one = [row for row in updates if row.size_mb == size_mb]
        found.append(Figures(f"One update of {size_mb:g} MB of parameters", one, UPDATE_COLUMNS))
    return [each for each in (*found, Figures("Goals", goal_rows(rows), GOAL_COLUMNS)) if each.rows]


def _ratio(times_ms: Times, pairs: Mapping[Case, tuple[Case, Case]], row: TransportRow) -> str:
    return _text(ratio_of(times_ms, *pairs[row.case], row.size_mb, row.workers)) if row.case in pairs else ""


UPDATE_COLUMNS: Columns[TransportRow] = {
    "optimizer": lambda row: row.optimizer,
    "ms": lambda row: _ms(row.median_ms),
    "low - high": lambda row: _span(row),
    "traffic ms": lambda row: _ms(row.traffic_ms or 0.0),
    "x traffic": lambda row: _text(row.median_ms / (row.traffic_ms or math.nan)),
    "fastest ns/weight": lambda row: _text(1e6 * (row.fastest_ms or 0.0) / plan.elements(row.size_mb)),
}
GOAL_COLUMNS: Columns[GoalRow] = {
    "what": lambda row: " / ".join(_short(case) for case in (row.goal.top, row.goal.bottom) if case),
    "MB": lambda row: f"{row.goal.size_mb:g}",
    "workers": lambda row: row.goal.workers,
    "measured": lambda row: f"{_text(row.figure)} {row.goal.unit}",
    "goal": lambda row: f"{'>=' if row.goal.at_least else '<='} {row.goal.bound:g} {row.goal.unit}",
    "met": lambda row: "[green]yes[/]" if row.met else "[red]no[/]",
}


def _short(case: Case) -> str:
    """Return the shortest name of a case that distinguishes it from all other cases.

    >>> _short(Case("gloo", "tcp", "bsp")), _short(Case("paceline", "shm", "asp"))
    ('gloo', 'paceline shm asp')
    """
    several = case.system in ("paceline", "socket")
    return " ".join(case) if several else case.system


def _ms(value: float) -> str:
    """Format a time in milliseconds with three decimals, or with fewer decimals if it is 10 ms or longer.

    >>> [_ms(value) for value in (0.0512, 12.346, 123.456, 45678.9)]
    ['0.051', '12.35', '123.5', '45679']
    """
    return f"{value:.{max(0, 4 - len(f'{abs(value):.0f}'))}f}"


def _span(row: TransportRow) -> str:
    return f"{_ms(row.low_ms)} - {_ms(row.high_ms)}"


def _text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"
