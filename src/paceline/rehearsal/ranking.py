"""Which sync model suits a cluster: each one simulated for the same time, side by side; or one, for a range of a key.

Timing alone: how much is computed, how stale it is, who waits. Nothing is said here of what staleness does to a loss:
that takes `simulate(train_fn=...)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import fmean

import msgspec

from ..errors import ConfigurationError
from ..sim import Cluster, SimResult, simulate
from ..sync import MODELS
from ..sync.schedule import read_schedule
from .process_pool import TellCount, on_all_cores

__all__ = [
    "EVERY_MODEL",
    "Figures",
    "Task",
    "figures_of",
    "rank",
    "read_syncs",
    "require_runnable",
    "run_tasks",
    "sweep",
    "sweep_values",
    "variants",
]

EVERY_MODEL = (
    "bsp",
    "asp",
    "ssp:staleness=3",
    "ssp:staleness=3,execution=lazy",
    "dssp:lower=3,upper=15",
    "dsps:lower=1,upper=15",
    "pssp:staleness=3,probability=0.1",
    "dynamic-pssp:staleness=3",
    "elastic-bsp:lookahead=15",
    "spec-sync",
)
"""What is compared by default: each model with the parameters of its paper."""


MOST_VALUES = 1000
"""Of a sweep."""


class Task(msgspec.Struct, frozen=True):
    """One simulation."""

    cluster: Cluster
    sync: str
    iterations: int | None
    until_s: float
    seed: int
    shards: int | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one simulation came to.

    Attributes:
        sync: the sync model.
        until_s: virtual seconds that it ran for.
        finished_s: until a worker had finished its last iteration, the mean over the workers.
        gradients_per_s: applied pushes, of all workers, per virtual second.
        updates_per_s: optimizer steps; under BSP one for all gradients of a round.
        mean_staleness: in versions.
        max_staleness: likewise.
        computing_share: of all workers' time, from 0 to 1, what went into gradients that were pushed.
        waiting_share: likewise, what they waited for others.
        wasted_share: likewise, what they computed in vain, with the pulls after it.
        delayed_share: of all pulls, those that were not answered on arrival.
        restarts: computations that were started anew.
        bytes_sent: by all.
        faults: conditions that failed, and what their shards went on with, in words: the figures are not the model's.
        front: no other model of the comparison has both more gradients and less staleness.
    """

    sync: str
    until_s: float
    finished_s: float
    gradients_per_s: float
    updates_per_s: float
    mean_staleness: float
    max_staleness: int
    computing_share: float
    waiting_share: float
    wasted_share: float
    delayed_share: float
    restarts: int
    bytes_sent: int
    faults: list[str] = []
    front: bool = False

    @property
    def moving_share(self) -> float:
        """Of all workers' time, what transfers took."""
        return max(0.0, 1.0 - self.computing_share - self.waiting_share - self.wasted_share)


def figures_of(sync: str, result: SimResult) -> Figures:
    """The figures of one result."""
    measures = result.measures
    pushes = sum(measures.iterations.values())
    duration_s = measures.duration_s or 1.0
    present_s = measures.present_s or 1.0
    return Figures(
        sync=sync,
        until_s=measures.duration_s,
        finished_s=fmean(result.finished_s),
        gradients_per_s=(pushes - measures.dropped_pushes / result.shards) / duration_s,
        updates_per_s=measures.updates_per_s,
        mean_staleness=measures.mean_staleness,
        max_staleness=measures.max_staleness,
        computing_share=result.computed_s / present_s,
        waiting_share=measures.waiting_share,
        wasted_share=result.wasted_s / present_s,
        delayed_share=measures.delayed_pulls / (pushes * result.shards) if pushes else 0.0,
        restarts=measures.restarts,
        bytes_sent=result.bytes_sent,
        faults=result.faults,
    )


def run_task(task: Task) -> Figures:
    """One simulation, without its traces."""
    result = simulate(
        task.cluster,
        task.sync,
        task.iterations,
        task.seed,
        until_s=task.until_s,
        shards=task.shards,
    )
    return figures_of(task.sync, result)


def run_tasks(tasks: Sequence[Task], tell: TellCount = lambda done, of, what: None) -> list[Figures]:
    """All of them, in order, on all cores."""
    if len(tasks) > 1:
        return on_all_cores(run_task, tasks, lambda task: task.sync, tell)
    tell(0, len(tasks), "")
    figures = [run_task(task) for task in tasks]
    tell(len(tasks), len(tasks), "")
    return figures


def rank(
    cluster: Cluster,
    syncs: Sequence[str],
    *,
    iterations: int = 100,
    seed: int = 0,
    shards: int | None = None,
    tell: TellCount = lambda done, of, what: None,
) -> list[Figures]:
    """Each model for as long as BSP takes for so many iterations; most gradients first.

    Raises:
        ConfigurationError: bad input.
    """
    require_runnable(cluster, syncs, shards)
    horizon_s = horizon(cluster, iterations, seed, shards)
    tasks = [Task(cluster, sync, None, horizon_s, seed, shards) for sync in syncs]
    return mark_front(
        sorted(run_tasks(tasks, tell), key=lambda row: (-row.gradients_per_s, row.mean_staleness))
    )


def horizon(cluster: Cluster, iterations: int, seed: int, shards: int | None) -> float:
    """How long BSP takes. Raises `ConfigurationError` if it comes to nothing there, or takes no time."""
    time_s = simulate(cluster, "bsp", iterations, seed, shards=shards).time_s
    if not time_s:
        raise ConfigurationError(
            "under bsp, nobody finishes an iteration on this cluster, or none takes any time: there is nothing to "
            "compare. Look at compute, and at when workers are lost."
        )
    return time_s


def mark_front(rows: Sequence[Figures]) -> list[Figures]:
    """Mark those that no other one beats in both respects."""
    return [
        msgspec.structs.replace(
            row,
            front=not any(
                other.gradients_per_s >= row.gradients_per_s
                and other.mean_staleness <= row.mean_staleness
                and (other.gradients_per_s, -other.mean_staleness)
                != (row.gradients_per_s, -row.mean_staleness)
                for other in rows
            ),
        )
        for row in rows
    ]


def sweep(
    cluster: Cluster,
    syncs: Sequence[str],
    key: str,
    values: Sequence[float],
    *,
    iterations: int = 100,
    seed: int = 0,
    shards: int | None = None,
    tell: TellCount = lambda done, of, what: None,
) -> list[tuple[float, Figures]]:
    """Each model that has this key, once for each value. (value, figures), in the order of models and values."""
    pairs = variants(syncs, key, values)
    require_runnable(cluster, [sync for _, sync in pairs], shards)
    horizon_s = horizon(cluster, iterations, seed, shards)
    tasks = [Task(cluster, sync, None, horizon_s, seed, shards) for _, sync in pairs]
    return [(value, row) for (value, _), row in zip(pairs, run_tasks(tasks, tell), strict=True)]


def variants(syncs: Sequence[str], key: str, values: Sequence[float]) -> list[tuple[float, str]]:
    """Each model that has a key, with each value of it. Raises `ConfigurationError` if none has it."""
    having = [sync for sync in syncs if _has_key(sync, key)]
    if not having:
        known = ", ".join(sorted({field for model in MODELS.values() for field in model.__struct_fields__}))
        raise ConfigurationError(
            f"no sync model of {', '.join(syncs)} has a key {key!r}. Keys there are: {known}."
        )
    return [(value, _with_key(sync, key, value)) for sync in having for value in values]


def require_runnable(cluster: Cluster, syncs: Sequence[str], shards: int | None = None) -> None:
    """Raise `ConfigurationError` if one of these models cannot run on such a cluster."""
    for sync in syncs:
        read_schedule(sync).require_runnable(cluster.workers, shards or cluster.servers)


def sweep_values(text: str) -> tuple[str, list[float]]:
    """`key=5..480` (each value about twice the one before), `key=1..9:2` (steps of 2), or `key=1,5,20`.

    >>> sweep_values("lookahead=5..40")
    ('lookahead', [5.0, 10.0, 20.0, 40.0])
    >>> sweep_values("staleness=1..7:3")
    ('staleness', [1.0, 4.0, 7.0])

    Raises:
        ConfigurationError: it is none of these.
    """
    key, equals, rest = text.partition("=")
    number = r"([0-9.]+)"
    try:
        if match := re.fullmatch(rf"{number}\.\.{number}(?::{number})?", rest):
            low, high = float(match[1]), float(match[2])
            values = list(_steps(low, high, float(match[3]) if match[3] else None))
        else:
            values = [float(part) for part in rest.split(",")]
    except ValueError:
        values = []
    if len(values) > MOST_VALUES:
        raise ConfigurationError(
            f"sweep {text!r} asks for more than {MOST_VALUES} values; take larger steps."
        )
    if not (key and equals and values):
        raise ConfigurationError(
            f"sweep is {text!r}, expected key=from..to, key=from..to:step or key=value,value, for example "
            "lookahead=5..480."
        )
    return key, values


def read_syncs(text: str) -> list[str]:
    """Several models in one text: `bsp,ssp:staleness=3,execution=lazy,elastic-bsp`. "all" are those of `EVERY_MODEL`.

    A part that names no model is a key of the one before it; `@` joins the steps of a schedule.

    >>> read_syncs("bsp,ssp:staleness=3,execution=lazy,bsp@0,asp@50,asp")
    ['bsp', 'ssp:staleness=3,execution=lazy', 'bsp@0,asp@50', 'asp']

    Raises:
        ConfigurationError: one of them is not known.
    """
    if text.strip() == "all":
        return list(EVERY_MODEL)
    found: list[str] = []
    for part in text.split(","):
        when = part.rpartition("@")[2] if "@" in part else ""
        belongs = bool(re.match(r"[a-z_]+=", part)) or when not in ("", "0")
        if belongs and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    for sync in found:
        read_schedule(sync)
    return found


def _steps(low: float, high: float, step: float | None) -> Iterator[float]:
    if low > high or (low <= 0 if step is None else step <= 0):
        return
    if step is not None:
        count = int((high - low) / step * (1 + 1e-9)) + 1
        yield from (round(low + index * step, 12) for index in range(min(count, MOST_VALUES + 1)))
        return
    value = low
    while value < high:
        yield value
        value *= 2
    yield high


def _plain(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _has_key(sync: str, key: str) -> bool:
    name = sync.partition(":")[0]
    return "@" not in sync and "|" not in sync and name in MODELS and key in MODELS[name].__struct_fields__


def _with_key(sync: str, key: str, value: float) -> str:
    name, _, rest = sync.partition(":")
    kept = [item for item in rest.split(",") if item and item.partition("=")[0] != key]
    return f"{name}:{','.join([f'{key}={_plain(value)}', *kept])}"
