"""Loads a cluster, changes it, and describes it in one line."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from statistics import median

import msgspec

from ..errors import ConfigurationError
from ..sim import PRESETS, Cluster, Dataset
from ..sim.cluster_file import read_bandwidth

MOST_GROUPS = 6
"""Maximum number of groups of equal workers that are listed.

With more groups, the smallest, the largest and the median compute time are shown.
"""


def load_cluster(source: str, recorded_bandwidth: float | str | None = None) -> Cluster:
    """Load a cluster.

    Args:
        source: a cluster file, the directory of a recorded run, or the name of one of the papers' clusters.
        recorded_bandwidth: bandwidth of the network of the recorded run (see `Cluster.from_run`).

    Raises:
        ConfigurationError: there is no file, run or cluster with that name, or its files are invalid.
    """
    if Path(source).is_dir():
        return Cluster.from_run(source, math.inf if recorded_bandwidth is None else recorded_bandwidth)
    if recorded_bandwidth is not None:
        raise ConfigurationError(
            f"recorded_bandwidth is given, but {source!r} is not the directory of a run. Omit recorded_bandwidth, or "
            "give a run."
        )
    by_name = source in PRESETS and not Path(source).exists()
    return Cluster.preset(source) if by_name else Cluster.from_toml(source)


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a cluster that was described or recorded. See `Cluster.with_`.

    Each attribute is None if its value does not change.

    Attributes:
        workers: number of workers.
        servers: number of servers.
        bandwidth: bandwidth of each machine, such as "1gbit".
        slow: workers and the factors by which their compute times are multiplied, such as "3:2,5:1.5".
        recorded_bandwidth: bandwidth of the network of the recorded run.

    Raises:
        ConfigurationError: a text cannot be read.
    """

    workers: int | None = None
    servers: int | None = None
    bandwidth: str | None = None
    slow: str | None = None
    recorded_bandwidth: str | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "recorded_bandwidth"):
            if (value := getattr(self, name)) is not None:
                read_bandwidth(value, name)
        if self.slow is not None:
            _factors(self.slow)

    def made(self, cluster: Cluster) -> Cluster:
        """Return the changed cluster.

        Raises:
            ConfigurationError: a change is not valid.
        """
        return cluster.with_(
            workers=self.workers,
            servers=self.servers,
            bandwidth=self.bandwidth,
            slow=None if self.slow is None else _factors(self.slow),
        )

    @property
    def options(self) -> list[str]:
        """The options of the command line that state these changes.

        >>> Changes(workers=64, bandwidth="1gbit").options
        ['--workers', '64', '--bandwidth', '1gbit']
        """
        return [
            word
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]


NO_CHANGES = Changes()


def _factors(text: str) -> dict[int, float]:
    """Parse workers and factors.

    >>> _factors("3:2,5:1.5")
    {3: 2.0, 5: 1.5}
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(worker): float(factor) for worker, factor in pairs}
    except ValueError:
        raise ConfigurationError(
            f"slow is {text!r}, expected WORKER:FACTOR,..., for example 3:2 if worker 3 takes twice as long."
        ) from None


def describe_data(data: Dataset, workers: int) -> str:
    """Return a one-line description of the data that a number of workers use up."""
    epochs = f"{data.epochs} epochs" if data.epochs > 1 else "1 epoch"
    smaller = (
        f", or smaller ones, because an epoch has less than one such batch for each of {workers} workers"
        if data.samples < data.batch_size * workers and not data.joint_batch
        else ""
    )
    pushes = f", with {data.pushes_per_batch:.3g} gradients each" if data.pushes_per_batch > 1 else ""
    joint = "joint " if data.joint_batch else ""
    return (
        f"{epochs} of {data.samples:,} samples, in {joint}batches of {data.batch_size}{pushes}{smaller}; balanced "
        "batches only for models under which a worker may have to wait for others"
    )


def describe(cluster: Cluster) -> str:
    """Return a one-line description of a cluster."""
    typical_s = [cluster.compute(worker).typical_s for worker in range(cluster.workers)]
    counted = [
        (shown, len(list(group))) for shown, group in itertools.groupby(map("{:.3g} s".format, typical_s))
    ]
    groups = (
        ", ".join(f"{count} at {shown}" for shown, count in counted)
        if len(counted) <= MOST_GROUPS
        else f"{min(typical_s):.3g} to {max(typical_s):.3g} s, median {median(typical_s):.3g} s"
    )
    parts = [
        f"{cluster.workers} workers ({groups})",
        f"{cluster.servers} server{'s' * (cluster.servers > 1)}",
    ]
    if cluster.bandwidth_bps < float("inf"):
        parts.append(
            f"{cluster.bandwidth_bps / 1e9:g} Gbit/s, {cluster.size_bytes / 1e6:.4g} MB of parameters"
        )
    if cluster.presence:
        parts.append(f"{len(cluster.presence)} of the workers not always present")
    if cluster.emulated:
        parts.append(f"recorded in a run with emulated machines: {cluster.emulated}")
    return "; ".join(parts)
