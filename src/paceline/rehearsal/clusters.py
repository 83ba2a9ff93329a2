"""Functions for loading a cluster and for describing it in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

from ..sim import PRESETS, Cluster, Dataset
from ..sim.recorded import read_cluster_of_run

__all__ = ["describe", "describe_data", "load_cluster"]


def load_cluster(source: str) -> Cluster:
    """Load a cluster from a file or from the directory of a recorded run, or one of the papers' clusters by name.

    Raises:
        ConfigurationError: there is no file, run or cluster with that name, or its files are invalid.
    """
    if Path(source).is_dir():
        return read_cluster_of_run(Path(source))
    by_name = source in PRESETS and not Path(source).exists()
    return Cluster.preset(source) if by_name else Cluster.from_toml(source)


def describe_data(data: Dataset, workers: int) -> str:
    """Return a one-line description of the data that a number of workers use up."""
    epochs = f"{data.epochs} epochs" if data.epochs > 1 else "1 epoch"
    smaller = (
        f", or smaller ones, because an epoch has less than one such batch for each of {workers} workers"
        if data.samples < data.batch_size * workers
        else ""
    )
    pushes = f", with {data.pushes_per_batch:.3g} gradients each" if data.pushes_per_batch > 1 else ""
    return (
        f"{epochs} of {data.samples:,} samples, in batches of {data.batch_size}{pushes}{smaller}; balanced batches "
        "only where a worker may have to wait for others"
    )


def describe(cluster: Cluster) -> str:
    """Return a one-line description of a cluster."""
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
    if cluster.emulated:
        parts.append(f"recorded in a run with emulated machines: {cluster.emulated}")
    return "; ".join(parts)
