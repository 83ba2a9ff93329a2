"""Rankings of sync models on a cluster.

Each model is simulated for the same virtual time. The simulations cover timing only: how many gradients are computed,
how stale they are, and how long workers wait. To find out how staleness affects the loss, train a model; see
`paceline simulate --script`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import msgspec

from ..core.lease import BATCH_SIZINGS, BatchSizing
from ..errors import ConfigurationError, RunFailedError, SyncRefusedError
from ..look.tables import Figures as Figures
from ..run.compute_devices import usable_cores
from ..sim import Cluster, Dataset, SimResult, simulate
from ..sim.clockwork import require_enough_data
from ..sync import MODELS
from ..sync.schedule import read_schedule
from ..trace.activity_cells import time_shares
from ..trace.measures import unapplied_pushes
from ..words import run_name
from .pool import TellCount, on_all_cores

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
"""The models that are compared by default, with the parameters from their papers."""


# Invented data, with which balanced batches are simulated if the user has given no data for the ranking. No simulation
# uses up these epochs.
NOTIONAL_BATCH = 64
NOTIONAL_ROUNDS = 100
NOTIONAL_EPOCHS = 10**9


class Task(msgspec.Struct, frozen=True):
    """The arguments of one simulation.

    Attributes:
        cluster: cluster to simulate.
        sync: sync model.
        iterations: iterations of each worker; None for no limit.
        until_s: virtual seconds after which the simulation ends.
        seed: random seed.
        shards: number of shards; None for one per server.
        data: data that the workers use up; None if only the other limits end the simulation.
        batch: sizes of the workers' batches of this data.
        wire: format in which gradients and weights travel.
        notional: True if the data was invented so that there are batches that can be divided. Then the speed is counted
            in gradients of full batches, as in a simulation without data.
    """

    cluster: Cluster
    sync: str
    iterations: int | None
    until_s: float
    seed: int
    shards: int | None = None
    data: Dataset | None = None
    batch: BatchSizing = "equal"
    notional: bool = False
    wire: str = "float32"


def figures_of(
    sync: str, result: SimResult, data: Dataset | None = None, batch: BatchSizing = "equal"
) -> Figures:
    """From the result of a simulation, compute the numbers that a ranking shows."""
    measures = result.measures
    pushes = sum(measures.iterations.values())
    unapplied = unapplied_pushes(measures.pushes, measures.unapplied)
    trained = 1.0 - measures.unapplied / measures.gradients if unapplied and measures.gradients else 1.0
    duration_s = measures.duration_s or 1.0
    own = ("updates_per_s", "mean_staleness", "max_staleness", "waiting_share", "sync_cost_s", "restarts")
    shares: dict[str, Any] = time_shares(result.time_use)
    return Figures(
        **{name: getattr(measures, name) for name in (*own, "predicted_sync_cost_s")},
        **{
            name: shares[name]
            for name in ("computing_share", "transfer_share", "wasted_share", "outside_share")
        },
        sync=sync,
        batch=batch,
        until_s=measures.duration_s,
        finished_s=fmean(result.finished_s),
        gradients_per_s=(pushes - measures.dropped_pushes / result.shards) / duration_s * trained,
        samples_per_s=measures.samples_per_s * trained,
        epoch_s=duration_s / data.epochs if data is not None else None,
        delayed_share=measures.delayed_pulls / (pushes * result.shards) if pushes else 0.0,
        bytes_sent=result.bytes_sent,
        faults=result.faults,
        unapplied=unapplied,
    )


def failed(sync: str, error: RunFailedError, batch: BatchSizing = "equal") -> Figures:
    """Return figures that contain no results, for a simulation that failed because of its sync model.

    A model that does not allow what the script asks for also counts as the cause of a failure.

    Raises:
        RunFailedError: the failure has another cause, so it would be the same under each model.
    """
    if isinstance(error.__cause__, SyncRefusedError):
        refused = f"left out, because this model does not allow what the script asks for: {error.__cause__}"
        return Figures(sync=sync, batch=batch, failure=refused)
    if error.process != "the run":  # a script has failed, or virtual time does not advance
        raise error
    return Figures(sync=sync, batch=batch, failure=f"{error.reason}\n{error.traceback}".rstrip())


def run_task(task: Task) -> Figures:
    """Run one simulation without recording traces."""
    try:
        result = simulate(
            task.cluster,
            task.sync,
            task.iterations,
            task.seed,
            until_s=task.until_s,
            shards=task.shards,
            data=task.data,
            batch=task.batch,
            wire=task.wire,
        )
    except RunFailedError as error:
        return failed(task.sync, error, task.batch)
    row = figures_of(task.sync, result, task.data, task.batch)
    if not task.notional or task.data is None:
        return row
    gradients_per_s = row.samples_per_s / task.data.batch_size
    return msgspec.structs.replace(row, gradients_per_s=gradients_per_s, samples_per_s=0.0, epoch_s=None)


def balanced_task(cluster: Cluster, until_s: float, seed: int, shards: int | None, wire: str) -> Task:
    """Return a simulation of bsp with balanced batches, with invented data that can be divided in any way."""
    samples = NOTIONAL_BATCH * cluster.workers * NOTIONAL_ROUNDS
    data = Dataset(samples=samples, batch_size=NOTIONAL_BATCH, epochs=NOTIONAL_EPOCHS)
    return Task(cluster, "bsp", None, until_s, seed, shards, data, "balanced", True, wire)


def run_tasks(tasks: Sequence[Task], tell: TellCount = lambda done, of, what: None) -> list[Figures]:
    """Run simulations on all cores. Return the results in the order of the tasks.

    With only one core or one task, the simulations run in this process, because a new process would first have to
    import everything.
    """

    def name_of(task: Task) -> str:
        return run_name(task.sync, task.batch)

    if min(len(tasks), usable_cores()) > 1:
        return on_all_cores(run_task, tasks, name_of, tell)
    tell(0, len(tasks), "")
    figures = []
    for done, task in enumerate(tasks, start=1):
        figures.append(run_task(task))
        tell(done, len(tasks), name_of(task))
    return figures


def rank(
    cluster: Cluster,
    syncs: Sequence[str],
    *,
    iterations: int = 100,
    seed: int = 0,
    shards: int | None = None,
    wire: str = "float32",
    data: Dataset | None = None,
    balances: bool = True,
    balanced_bsp: bool = False,
    tell: TellCount = lambda done, of, what: None,
) -> list[Figures]:
    """Simulate each model for the time that BSP needs for `iterations` iterations, or until its data is used up.

    With data, each model whose workers may have to wait for each other is simulated with equal and, if `balances` is
    True, with balanced batches. Without data, `balanced_bsp` adds bsp with balanced batches if bsp is one of the
    models.

    Returns:
        The results, sorted by samples per second, or by gradients per second without data, descending. Models that
        cannot be recommended come last (see `Figures.sound`).

    Raises:
        ConfigurationError: a model cannot run on this cluster or with this data, or BSP completes no iteration on this
            cluster.
    """
    require_runnable(cluster, syncs, shards)
    if data is None:
        horizon_s = horizon(cluster, iterations, seed, shards, wire)
        tasks = [Task(cluster, sync, None, horizon_s, seed, shards, wire=wire) for sync in syncs]
        if balanced_bsp and "bsp" in syncs:
            tasks.append(balanced_task(cluster, horizon_s, seed, shards, wire))
    else:
        for sync in syncs:
            require_enough_data(data, cluster, read_schedule(sync))
        tasks = [
            Task(cluster, sync, None, math.inf, seed, shards, data, batch, wire=wire)
            for sync in syncs
            for batch in _sizings(sync, balances)
        ]
    order = sorted(run_tasks(tasks, tell), key=lambda row: (not row.sound, -row.speed, row.mean_staleness))
    return mark_front(order)


def _sizings(sync: str, balances: bool) -> tuple[BatchSizing, ...]:
    """Return the sizes of batches with which a model is compared: balanced batches only where they may save time."""
    schedule = read_schedule(sync)
    if not balances or all(model.independent for model in schedule.models):
        return ("equal",)
    return ("balanced",) if schedule.auto else BATCH_SIZINGS


def horizon(cluster: Cluster, iterations: int, seed: int, shards: int | None, wire: str = "float32") -> float:
    """Return the virtual time in seconds that BSP needs for a number of iterations.

    Raises:
        ConfigurationError: BSP completes no iteration on this cluster, or its iterations take no time.
    """
    time_s = simulate(cluster, "bsp", iterations, seed, shards=shards, wire=wire).time_s
    if not time_s:
        raise ConfigurationError(
            "under bsp, no worker finishes an iteration on this cluster, or iterations take no time, so there is "
            "nothing to compare. Check the compute times, and the times at which workers are lost."
        )
    return time_s


def mark_front(rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows, with `front` set (see `Figures.front`)."""
    return [
        msgspec.structs.replace(
            row,
            front=row.sound
            and not any(
                other.sound
                and other.speed >= row.speed
                and other.mean_staleness <= row.mean_staleness
                and (other.speed, -other.mean_staleness) != (row.speed, -row.mean_staleness)
                for other in rows
            ),
        )
        for row in rows
    ]


def require_runnable(cluster: Cluster, syncs: Sequence[str], shards: int | None = None) -> None:
    """Raise `ConfigurationError` if one of the models cannot run on this cluster."""
    for sync in syncs:
        read_schedule(sync).require_runnable(cluster.workers, shards or cluster.servers)


def read_syncs(text: str) -> list[str]:
    """Parse a list of sync models, for example `bsp,ssp:staleness=3,execution=lazy,elastic-bsp`.

    "all" stands for `EVERY_MODEL`. A part of the form `key=value` is a parameter of the preceding model. Consecutive
    parts with `@` are the steps of one schedule.

    >>> read_syncs("bsp,ssp:staleness=3,execution=lazy,bsp@0,asp@50,asp")
    ['bsp', 'ssp:staleness=3,execution=lazy', 'bsp@0,asp@50', 'asp']

    Raises:
        ConfigurationError: one of the models is unknown or invalid.
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


# -- Comparisons of several values of one parameter of sync models: `paceline simulate --sweep` --------------

MOST_VALUES = 1000
"""Maximum number of values in a sweep."""


def sweep(
    cluster: Cluster,
    syncs: Sequence[str],
    key: str,
    values: Sequence[float],
    *,
    iterations: int = 100,
    seed: int = 0,
    shards: int | None = None,
    wire: str = "float32",
    tell: TellCount = lambda done, of, what: None,
) -> list[tuple[float, Figures]]:
    """Simulate each model that has the parameter `key`, once for each value. Return pairs (value, results)."""
    pairs = variants(syncs, key, values)
    require_runnable(cluster, [sync for _, sync in pairs], shards)
    horizon_s = horizon(cluster, iterations, seed, shards, wire)
    tasks = [Task(cluster, sync, None, horizon_s, seed, shards, wire=wire) for _, sync in pairs]
    return [(value, row) for (value, _), row in zip(pairs, run_tasks(tasks, tell), strict=True)]


def variants(syncs: Sequence[str], key: str, values: Sequence[float]) -> list[tuple[float, str]]:
    """Return pairs (value, sync model), one for each value and each model that has the parameter `key`.

    Raises:
        ConfigurationError: no model has this parameter.
    """
    having = [sync for sync in syncs if _has_key(sync, key)]
    if not having:
        known = ", ".join(sorted({field for model in MODELS.values() for field in model.__struct_fields__}))
        raise ConfigurationError(
            f"none of the sync models {', '.join(syncs)} has a parameter {key!r}. Known parameters: {known}."
        )
    return [(value, _with_key(sync, key, value)) for sync in having for value in values]


def sweep_values(text: str) -> tuple[str, list[float]]:
    """Parse a sweep: `key=5..480` (doubling), `key=1..9:2` (steps of 2), or `key=1,5,20`.

    >>> sweep_values("lookahead=5..40")
    ('lookahead', [5.0, 10.0, 20.0, 40.0])
    >>> sweep_values("staleness=1..7:3")
    ('staleness', [1.0, 4.0, 7.0])

    Raises:
        ConfigurationError: the text does not have one of these forms.
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
        raise ConfigurationError(f"sweep {text!r} has more than {MOST_VALUES} values; use larger steps.")
    if not (key and equals and values):
        raise ConfigurationError(
            f"sweep is {text!r}; expected key=from..to, key=from..to:step or key=value,value, for example "
            "lookahead=5..480."
        )
    return key, values


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
    return str(int(value)) if float(value).is_integer() else repr(value)


def _has_key(sync: str, key: str) -> bool:
    name = sync.partition(":")[0]
    return "@" not in sync and "|" not in sync and name in MODELS and key in MODELS[name].__struct_fields__


def _with_key(sync: str, key: str, value: float) -> str:
    name, _, kept = without_key(sync, key).partition(":")
    return f"{name}:{key}={_plain(value)}" + f",{kept}" * bool(kept)


def without_key(sync: str, key: str) -> str:
    """Return a sync model without one of its parameters.

    >>> without_key("ssp:staleness=3,execution=lazy", "staleness"), without_key("ssp:staleness=3", "staleness")
    ('ssp:execution=lazy', 'ssp')
    """
    name, _, rest = sync.partition(":")
    kept = ",".join(item for item in rest.split(",") if item and item.partition("=")[0] != key)
    return f"{name}:{kept}" if kept else name
