"""Comparisons of several values of one parameter of sync models: `paceline simulate --sweep`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..errors import ConfigurationError
from ..sim import Cluster
from ..sync import MODELS
from .process_pool import TellCount
from .ranking import Figures, Task, horizon, require_runnable, run_tasks

__all__ = ["sweep", "sweep_values", "variants"]

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
    name, _, rest = sync.partition(":")
    kept = [item for item in rest.split(",") if item and item.partition("=")[0] != key]
    return f"{name}:{','.join([f'{key}={_plain(value)}', *kept])}"
