"""Cluster files, which describe a cluster in TOML. Clusters from papers on sync models are stored in the same format.

    servers = 4
    bandwidth = "10 Gbit/s"
    latency = "100 us"
    parameters = "100 MB"

    [[workers]]
    count = 24
    compute = "1.0 s"

    [[workers]]
    count = 8
    compute = "1.6 s"
    jitter = "20 %"
    lost_at = "300 s"
    back_after = "60 s"

    [[pauses]]
    workers = [24, 25, 26, 27]
    every = "10 min"
    lasting = "20 s"

    [[uplinks]]
    workers = [28, 29, 30, 31]
    bandwidth = "1 Gbit/s"

In place of `[[workers]]`, `delays = "delays.csv"` names a file of measured compute times (see `times`).

Every quantity is a string with a unit, or a number in base units (seconds, bytes, bits per second, or fractions from
0 to 1). A string without a unit, such as "400", is refused: its author may mean milliseconds.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import msgspec

from ..errors import ConfigurationError, nearest, unknown_name
from ..settings.checks import converted, read_toml
from .times import (
    Constant,
    Distribution,
    Link,
    Own,
    Pause,
    Presence,
    Times,
    Uniform,
    Uplink,
    read_delays,
    times_of,
)

TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
SIZES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
RATES = {
    "bit/s": 1.0,
    "kbit/s": 1e3,
    "Mbit/s": 1e6,
    "Gbit/s": 1e9,
    "MB/s": 8e6,
    "GB/s": 8e9,
    "kbit": 1e3,
    "mbit": 1e6,
    "gbit": 1e9,
}
"""Units of bandwidths. The last three are units of the command tc."""

SHARES = {"%": 0.01}

_FILE_KEYS = {
    "compute_s": "compute",
    "fixed_share": "fixed",
    "latency_s": "latency",
    "bandwidth_bps": "bandwidth",
    "size_bytes": "parameters",
    "joins_at_s": "joins_at",
    "lost_at_s": "lost_at",
    "preempted_every_s": "preempted_every",
    "back_after_s": "back_after",
    "apply_s": "apply",
    "update_s": "update",
    "every_s": "every",
    "lasting_s": "lasting",
}
"""The names of Python arguments, each with the name of the corresponding key of a cluster file."""

_quantity = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/%]*)\s*")


def quantity(value: object, units: dict[str, float], what: str) -> float:
    """Return a quantity in base units. `value` is a number in base units, or a string with a unit.

    >>> quantity("100 us", TIMES, "latency")
    0.0001

    Raises:
        ConfigurationError: the value is not valid, or it is negative.
    """
    number: float | None = None
    example = max(units, key=lambda unit: units[unit] == 1)  # the base unit if `units` contains it
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and (match := _quantity.fullmatch(value)):
        unit = match[2]
        if unit not in units:
            wrong = "an unknown unit" if unit else "no unit"
            raise ConfigurationError(
                f"{what} is {value!r}, which has {wrong}; expected one of {', '.join(units)}, such as "
                f"'{match[1]} {example}'."
            )
        try:
            number = float(Decimal(match[1]) * Decimal(repr(units[unit])))
        except InvalidOperation:
            number = None
    if number is None or not 0 <= number < math.inf:
        raise ConfigurationError(
            f"{what} is {value!r}, expected a number >= 0, or a string such as '2 {example}'."
        )
    return number


def read_bandwidth(bandwidth: float | str, name: str = "bandwidth") -> float:
    """Return a bandwidth in bits per second. `name` is the name of the bandwidth in error messages.

    >>> read_bandwidth("1gbit"), read_bandwidth("100 MB/s")
    (1000000000.0, 800000000.0)

    Raises:
        ConfigurationError: the bandwidth is neither a number of bits per second > 0 nor a string with a unit.
    """
    value = bandwidth if bandwidth == math.inf else quantity(bandwidth, RATES, name)
    if not value > 0:
        raise ConfigurationError(f"{name} is {bandwidth!r}, expected more than 0, for example '1 Gbit/s'.")
    return float(value)


class Group(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A `[[workers]]` table of a cluster file, which describes a group of identical workers."""

    count: int = 1
    compute: Any
    jitter: Any = None
    fixed: Any = 0.0
    bandwidth: Any = None
    latency: Any = None
    joins_at: Any = None
    lost_at: Any = None
    preempted_every: Any = None
    back_after: Any = None


class PauseTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A `[[pauses]]` table of a cluster file."""

    workers: list[int]
    every: Any
    lasting: Any


class UplinkTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An `[[uplinks]]` table of a cluster file."""

    workers: list[int]
    bandwidth: Any


class File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of a cluster file."""

    workers: list[Group] = []
    servers: int = 1
    bandwidth: Any = None
    latency: Any = 0.0
    parameters: Any = 0
    name: str = ""
    emulated: str = ""
    delays: str = ""
    apply: Any = 0.0
    update: Any = 0.0
    pauses: list[PauseTable] = []
    uplinks: list[UplinkTable] = []


TABLES: Mapping[str, type[msgspec.Struct]] = {
    r"workers\[.*\]": Group,
    r"pauses\[.*\]": PauseTable,
    r"uplinks\[.*\]": UplinkTable,
    "": File,
}
"""Pattern of a table's place in a cluster file -> the class with the table's entries."""


def _preset_files() -> dict[str, Any]:
    folder = resources.files("paceline.sim") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")
    }


PRESETS = tuple(sorted(_preset_files()))
"""The names of the clusters from the papers."""


def read_preset(name: str) -> dict[str, Any]:
    """Return the arguments for `Cluster` that describe one of the clusters from the papers.

    Raises:
        ConfigurationError: there is no preset with that name.
    """
    if name not in PRESETS:
        raise unknown_name("cluster", name, PRESETS)
    return _parse(tomllib.loads(_preset_files()[name].read_text(encoding="utf-8")), name, name)


def read_cluster_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments for `Cluster` from a cluster file.

    Raises:
        ConfigurationError: the file cannot be read, or an entry is not valid; the message names the entry.
    """
    if Path(path).suffix == ".csv":
        raise ConfigurationError(
            f"{path} is not a TOML file. If it contains measured times, name it in a cluster file: "
            f'delays = "{Path(path).name}".'
        )
    meant = f"Did you mean {near!r}? " if (near := nearest(os.fspath(path), PRESETS)) else ""
    hint = f"{meant}Give the path of a TOML file, or the name of a cluster from the papers: {', '.join(PRESETS)}."
    table = read_toml(Path(path), "the cluster file", hint)
    return _parse(table, os.fspath(path), Path(path).stem, Path(path).parent)


def _parse(table: dict[str, Any], source: str, name: str, folder: Path = Path()) -> dict[str, Any]:
    try:
        if not isinstance(table.get("workers", []), list):
            raise ConfigurationError(f"workers is {table['workers']!r}, expected [[workers]] tables.")
        return _arguments(converted(table, File, tables=TABLES), name, folder)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error


def in_words_of_file(message: str) -> str:
    """Return an error message in which the names of Python arguments are replaced by the keys of a cluster file.

    >>> in_words_of_file("back_after_s is -1, expected a number of seconds >= 0.")
    'back_after is -1, expected a number of seconds >= 0.'
    """
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda match: _FILE_KEYS.get(match[0], match[0]), message)


def _arguments(file: File, name: str, folder: Path) -> dict[str, Any]:
    """Return the arguments for `Cluster` from the content of a file.

    Args:
        file: the content.
        name: the default name of the cluster.
        folder: folder that contains the file of delays, if the path of this file is relative.
    """
    if bool(file.workers) == bool(file.delays):
        raise ConfigurationError("expected either [[workers]] tables, or delays = 'FILE.csv'.")
    compute: list[Times] = []
    fixed: list[float] = []
    presence: dict[int, Presence] = {}
    links: dict[int, Link] = {}
    for number, group in enumerate(file.workers):
        table = f"workers[{number}]"
        if group.count < 1:
            raise ConfigurationError(f"{table}.count is {group.count}, expected a whole number >= 1.")
        time = _times(group.compute, f"{table}.compute")
        if group.jitter is not None:
            time = _jittered(time, quantity(group.jitter, SHARES, f"{table}.jitter"), table)
        presence_times = {
            f"{key}_s": quantity(value, TIMES, f"{table}.{key}")
            for key in ("joins_at", "lost_at", "preempted_every", "back_after")
            if (value := getattr(group, key)) is not None
        }
        latency = None if group.latency is None else _times(group.latency, f"{table}.latency")
        bandwidth = (
            None if group.bandwidth is None else quantity(group.bandwidth, RATES, f"{table}.bandwidth")
        )
        for worker in range(len(compute), len(compute) + group.count):
            if presence_times:
                try:
                    presence[worker] = Presence(**presence_times)
                except ConfigurationError as error:
                    raise ConfigurationError(f"{table}: {in_words_of_file(str(error))}") from error
            if latency is not None or bandwidth is not None:
                links[worker] = Link(bandwidth_bps=bandwidth, to_server_s=latency, from_server_s=latency)
        compute += [time] * group.count
        share = quantity(group.fixed, SHARES, f"{table}.fixed")
        if share > 1:
            raise ConfigurationError(f"{table}.fixed is {group.fixed!r}, expected at most 100 %.")
        fixed += [share] * group.count
    if file.delays:
        compute = list(read_delays(folder / file.delays))
    return {
        "apply_s": _times(file.apply, "apply"),
        "update_s": _times(file.update, "update"),
        "pauses": [
            Pause(
                workers=tuple(each.workers),
                every_s=quantity(each.every, TIMES, f"pauses[{number}].every"),
                lasting_s=_times(each.lasting, f"pauses[{number}].lasting"),
            )
            for number, each in enumerate(file.pauses)
        ],
        "uplinks": [
            Uplink(
                workers=tuple(each.workers),
                bandwidth_bps=quantity(each.bandwidth, RATES, f"uplinks[{number}].bandwidth"),
            )
            for number, each in enumerate(file.uplinks)
        ],
        "compute_s": compute,
        "fixed_share": fixed or 0.0,
        "servers": file.servers,
        "latency_s": _times(file.latency, "latency"),
        "bandwidth_bps": math.inf if file.bandwidth is None else quantity(file.bandwidth, RATES, "bandwidth"),
        "size_bytes": round(quantity(file.parameters, SIZES, "parameters")),
        "presence": presence,
        "links": links,
        "name": file.name or name,
        "emulated": file.emulated,
    }


def _times(value: object, what: str) -> Times:
    """Return the distribution for a single time, a list of recorded times, or a table with the key `kind`."""
    if isinstance(value, list):
        return times_of([quantity(item, TIMES, f"{what}[{index}]") for index, item in enumerate(value)])
    if not isinstance(value, dict):
        return times_of(quantity(value, TIMES, what))
    kind = next((kind for tag, kind in _KINDS.items() if tag == value.get("kind")), None)
    if kind is None:
        raise ConfigurationError(f"{what}: kind is {value.get('kind')!r}. {_EXAMPLES}")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key in value:
        if key not in fields and key != "kind":
            raise ConfigurationError(f"{what}: unknown field `{key}`. {_EXAMPLES}")
    for key, field in fields.items():
        if field.required and key not in value:
            raise ConfigurationError(f"{what}: missing required field `{key}`. {_EXAMPLES}")
    read = {key: _READ[key](item, f"{what}.{key}") for key, item in value.items() if key != "kind"}
    try:
        times: Distribution = kind(**read)
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error} {_EXAMPLES}") from error
    return times


def _seconds(value: object, what: str) -> object:
    if isinstance(value, list):
        return tuple(quantity(item, TIMES, what) for item in value)
    return quantity(value, TIMES, what)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{what} is {value!r}, expected a number.")
    return float(value)


def _truth(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} is {value!r}, expected true or false.")
    return value


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{what} is {value!r}, expected a whole number.")
    return value


_READ: dict[str, Callable[[object, str], Any]] = {
    **dict.fromkeys(
        ("at", "seconds", "low", "high", "median", "least", "over", "lasting", "every"), _seconds
    ),
    **dict.fromkeys(("sigma", "alpha", "factor"), _number),
    "base": _times,
    **dict.fromkeys(("count", "block"), _whole),
    "shifted": _truth,
}

_KINDS = {kind.__struct_config__.tag: kind for kind in get_args(Distribution) if kind is not Own}

_EXAMPLES = (
    'Kinds of times: { kind = "uniform", low, high }, { kind = "log-normal", median, sigma }, '
    '{ kind = "pareto", least, alpha }, { kind = "drifting", base, factor, over }, '
    '{ kind = "occasional", base, factor, lasting, every }, { kind = "scaled", base, factor }, '
    '{ kind = "sum", base, count }, { kind = "recorded", seconds = [...] }, '
    '{ kind = "resampled", seconds = [...], block }.'
)


def _jittered(time: Times, share: float, table: str) -> Times:
    """Return a uniform distribution around a constant time. Its half-width is `share` times the constant."""
    constant = times_of(time)
    if not 0 <= share < 1:
        raise ConfigurationError(f"{table}.jitter is {share:.0%}, expected less than 100 %.")
    if not isinstance(constant, Constant):
        raise ConfigurationError(
            f"{table}.jitter is given, but {table}.compute is not a single number. Omit jitter, or set compute to a "
            "single number."
        )
    mean_s = constant.seconds
    return Uniform(low=mean_s * (1 - share), high=mean_s * (1 + share))
