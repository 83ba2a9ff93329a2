"""Changes of a cluster: what if it had more workers, another network, more servers, or a slower machine?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import ConfigurationError
from .cluster_file import RATES, quantity
from .racks import Pause, Uplink
from .times import Recorded, Resampled, Scaled, Timed, Times, times_of
from .worker_settings import Link, Outside

if TYPE_CHECKING:
    from .cluster import Cluster

Together = TypeVar("Together", Pause, Uplink)

__all__ = ["changed", "read_bandwidth"]


def read_bandwidth(bandwidth: float | str, name: str = "bandwidth") -> float:
    """Return a bandwidth in bits per second. `name` is what an error calls it.

    >>> read_bandwidth("1gbit"), read_bandwidth("100 MB/s")
    (1000000000.0, 800000000.0)

    Raises:
        ConfigurationError: it is not a number of bits per second > 0, or a string with a unit.
    """
    value = bandwidth if bandwidth == math.inf else quantity(bandwidth, RATES, name)
    if not value > 0:
        raise ConfigurationError(f"{name} is {bandwidth!r}, expected more than 0, for example '1 Gbit/s'.")
    return float(value)


def changed(
    cluster: Cluster,
    workers: int | None,
    bandwidth: float | str | None,
    servers: int | None,
    slow: Mapping[int, float],
    size_bytes: int | None,
) -> Cluster:
    """Return a cluster with some changes. See `Cluster.with_`."""
    from .cluster import require_whole

    changes: dict[str, Any] = {}
    said: list[str] = []
    if servers is not None:
        require_whole("servers", servers, 1)
        changes["servers"] = servers
        said.append(f"{servers} servers" if servers > 1 else "1 server")
    if size_bytes is not None:
        require_whole("size_bytes", size_bytes, 1)
        changes["size_bytes"] = size_bytes
        said.append(f"{size_bytes / 1e6:g} MB of parameters")
    links = dict(cluster.links)
    if bandwidth is not None:
        changes["bandwidth_bps"] = bps = read_bandwidth(bandwidth)
        if math.isfinite(bps) and not (size_bytes or cluster.size_bytes):
            raise ConfigurationError(
                "a bandwidth has no effect on this cluster, because the size of its parameters is unknown. Also give "
                "size_bytes; a run records this size if it is made with this version of Paceline."
            )
        links = {worker: msgspec.structs.replace(link, bandwidth_bps=None) for worker, link in links.items()}
        said.append(f"{bps / 1e9:g} Gbit/s" if math.isfinite(bps) else "unlimited bandwidth")
    count = cluster.workers
    if workers is not None:
        require_whole("workers", workers, 1)
        count = workers
        said.append(f"{workers} workers" if workers > 1 else "1 worker")
    if not isinstance(slow, Mapping):
        raise ConfigurationError(
            f"slow is {slow!r}, expected a factor for each worker that is slower, such as {{0: 3.0}}."
        )
    for worker, factor in slow.items():
        if not (isinstance(worker, int) and 0 <= worker < count):
            raise ConfigurationError(
                f"slow has an entry for worker {worker!r}, expected a number from 0 to {count - 1}."
            )
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ConfigurationError(
                f"slow has the factor {factor!r} for worker {worker}, expected a number > 0."
            )
        said.append(f"worker {worker} {factor:g} times as slow")
    before = cluster.workers
    compute_s = [_like(cluster.compute(w % before), repeated=w >= before) for w in range(count)]
    for worker, factor in slow.items():
        compute_s[worker] = Scaled(base=compute_s[worker], factor=factor)
    assert isinstance(cluster.fixed_share, tuple)
    return replace(
        cluster,
        compute_s=compute_s,
        fixed_share=[cluster.fixed_share[w % before] for w in range(count)],
        links={
            w: _link_like(links[w % before], repeated=w >= before)
            for w in range(count)
            if w % before in links
        },
        outside={
            w: _outside_like(cluster.outside[w % before], repeated=w >= before)
            for w in range(count)
            if w % before in cluster.outside
        },
        presence={w: cluster.presence[w % before] for w in range(count) if w % before in cluster.presence},
        pauses=[_members(each, before, count) for each in cluster.pauses if min(each.workers) < count],
        uplinks=[_members(each, before, count) for each in cluster.uplinks if min(each.workers) < count],
        name=f"{cluster.name} with {', '.join(said)}".strip() if said else cluster.name,
        **changes,
    )


def _like(times: Times, *, repeated: bool) -> Times:
    """Return the times of a machine like another one: the same distribution, but not the same recorded times."""
    known = times_of(times)
    if repeated and isinstance(known, Recorded):
        return Resampled(seconds=known.seconds)
    return msgspec.structs.replace(known, shifted=True) if repeated and isinstance(known, Timed) else known


def _members(each: Together, before: int, count: int) -> Together:
    """Return a pause or an uplink with the workers that are machines like its workers."""
    workers = tuple(worker for worker in range(count) if worker % before in each.workers)
    return msgspec.structs.replace(each, workers=workers)


def _link_like(link: Link, *, repeated: bool) -> Link:
    return msgspec.structs.replace(
        link,
        to_server_s=None if link.to_server_s is None else _like(link.to_server_s, repeated=repeated),
        from_server_s=None if link.from_server_s is None else _like(link.from_server_s, repeated=repeated),
    )


def _outside_like(outside: Outside, *, repeated: bool) -> Outside:
    without_epochs_s = outside.without_epochs_s
    return Outside(
        each_s=_like(outside.each_s, repeated=repeated),
        epoch_s=_like(outside.epoch_s, repeated=repeated),
        without_epochs_s=None if without_epochs_s is None else _like(without_epochs_s, repeated=repeated),
    )
