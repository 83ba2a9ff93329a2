"""The papers' clusters. All exhibits of a paper use one description, which is a preset of the simulator."""

from __future__ import annotations

import dataclasses

import msgspec

from paceline.sim import Cluster, Link, Scaled

UNKNOWN_SPEEDS = (
    "The paper does not say how much the speeds of its machines differ, although this affects the results most. "
    "The files in paceline/sim/presets describe the simulated machines, and mark numbers that are not in the paper."
)
"""What the exhibits of FluentPS say about the machines that they simulate."""


def scaled(cluster: Cluster, factor: float, size_bytes: int) -> Cluster:
    """Return a cluster that trains another network.

    Args:
        cluster: the cluster.
        factor: time of an iteration, divided by the time with the network that the cluster describes.
        size_bytes: size of the network's parameters in bytes.
    """
    times = [Scaled(base=cluster.compute(worker), factor=factor) for worker in range(cluster.workers)]
    return dataclasses.replace(cluster, compute_s=times, size_bytes=size_bytes)


def part_of(cluster: Cluster, workers: int, *, serving: bool = False) -> Cluster:
    """Return a cluster with some of the machines, chosen evenly, so that the share of slower machines stays the same.

    Args:
        cluster: the cluster.
        workers: number of machines.
        serving: True if each machine is a server, too, so that the bandwidth of the servers is that of the machines.
    """
    count = cluster.workers
    chosen = [count - 1 - count * index // workers for index in range(workers)]
    return dataclasses.replace(
        cluster,
        compute_s=[cluster.compute(worker) for worker in chosen],
        fixed_share=0.0,
        bandwidth_bps=cluster.bandwidth_bps * (workers / count if serving else 1),
        links={
            index: cluster.links[worker] for index, worker in enumerate(chosen) if worker in cluster.links
        },
        name=f"{workers} of {cluster.name}",
    )


def one_server(cluster: Cluster) -> Cluster:
    """Return the cluster with one server, which has the bandwidth of all servers together.

    With one shard, a run needs only one schedule. The other shards of an evenly sliced run would receive the same
    pushes at about the same times.
    """
    if cluster.servers == 1:
        return cluster
    own = Link(bandwidth_bps=cluster.bandwidth_bps)
    links = {
        worker: msgspec.structs.replace(link, bandwidth_bps=link.bandwidth_bps or cluster.bandwidth_bps)
        for worker in range(cluster.workers)
        for link in [cluster.links.get(worker, own)]
    }
    bandwidth_bps = cluster.bandwidth_bps * cluster.servers
    return dataclasses.replace(cluster, servers=1, bandwidth_bps=bandwidth_bps, links=links)
