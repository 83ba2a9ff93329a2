"""Functions that load a cluster and describe a cluster in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

from ..sim import PRESETS, Cluster

__all__ = ["describe", "load_cluster"]


def load_cluster(source: str) -> Cluster:
    """Load a cluster file, or the cluster from the papers with the given name.

    Raises:
        ConfigurationError: there is no file or cluster with that name, or the file is invalid.
    """
    by_name = source in PRESETS and not Path(source).exists()
    return Cluster.preset(source) if by_name else Cluster.from_toml(source)


def describe(cluster: Cluster) -> str:
    """Return a description of a cluster in one line."""
    counted = [
        (times, len(list(group)))
        for times, group in itertools.groupby(map(cluster.compute, range(cluster.workers)))
    ]
    groups = ", ".join(f"{count} at {times.typical_s:.3g} s" for times, count in counted[:6])
    more = f", and {len(counted) - 6} other groups" if len(counted) > 6 else ""
    parts = [
        f"{cluster.workers} workers ({groups}{more})",
        f"{cluster.servers} server{'s' * (cluster.servers > 1)}",
    ]
    if cluster.bandwidth_bps < float("inf"):
        parts.append(f"{cluster.bandwidth_bps / 1e9:g} Gbit/s, {cluster.size_bytes / 1e6:g} MB of parameters")
    if cluster.presence:
        parts.append(f"{len(cluster.presence)} of the workers not always present")
    return "; ".join(parts)
