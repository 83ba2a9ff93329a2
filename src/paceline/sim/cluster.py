"""Descriptions of clusters: the speed and presence of each worker, the number of servers, and the network."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from ..core.data_feed import Work
from ..errors import ConfigurationError
from ..sync.ticks import resolution
from .cluster_file import in_words_of_file, read_bandwidth, read_cluster_file, read_preset
from .recorded import arguments_of_run
from .times import (
    Distribution,
    Link,
    Outside,
    Pause,
    Presence,
    Recorded,
    Resampled,
    Scaled,
    Timed,
    Times,
    Uplink,
    require_workers,
    times_of,
)

Together = TypeVar("Together", Pause, Uplink)
Own = TypeVar("Own", Link, Outside)


@dataclass(frozen=True)
class Cluster:
    """Describes the machines on which `simulate` runs a job, and the network between them.

    Args:
        compute_s: for each worker, the time to compute a gradient for a batch of the usual size, as a number of
            seconds, a distribution (`paceline.sim.Uniform`, ...), a list of recorded times, or an object of your own
            with a method `sample(generator)`. `paceline.sim.read_delays` reads a CSV file. A `Fraction` or a `Decimal`
            is exact; floats and random times are rounded to whole nanoseconds. These rules hold for all times of the
            cluster.
        fixed_share: fraction of each worker's compute time that does not depend on the size of the batch, from 0 to
            1: one number for each worker, or one number for all workers.
        servers: number of servers.
        latency_s: latency of every message, as a number of seconds or a distribution.
        bandwidth_bps: bandwidth of each machine's network interface, in bits per second in each direction. Default:
            unlimited.
        size_bytes: size of all parameters, and of a gradient, in bytes. This size has no effect if the bandwidth is
            unlimited. With a training function, 0 means the actual size of its model; any other number simulates the
            transfers of a model of that size.
        presence: mapping from worker to `Presence`, for workers that are not present during the whole run.
        links: mapping from worker to `Link`, for workers with a different latency or bandwidth.
        apply_s: time that a server would take to apply a push to all parameters, as a number of seconds or a
            distribution. For a shard, the time is proportional to the shard's share of the parameters. A server
            handles one message after another. Default: no time.
        update_s: time that a server would take for one update, that is, for one optimizer step, of all parameters.
            For a shard, the time is proportional to the shard's share, as for `apply_s`. A server that applies each
            push makes one update per push. A server that applies the mean of several pushes makes one update for all
            of these pushes. Answers leave, and further messages are handled, after the update. Default: no time.
        pauses: pauses that strike several workers at the same time (`paceline.sim.Pause`).
        uplinks: links that several workers share (`paceline.sim.Uplink`).
        outside: mapping from worker to `Outside`, for workers whose scripts also do something other than training.
        name: name of the cluster, used in titles.
        emulated: description of how unequal machines were emulated in the run from which the cluster was recorded,
            used in captions; "" if the run emulated nothing, or the cluster was not recorded.
        optimizers: names of the optimizers of the run from which the cluster was recorded. The codec that is
            recommended for slow links depends on these optimizers.

    Raises:
        ConfigurationError: an argument is not valid.

    Example:
        >>> Cluster(compute_s=[1.0, 1.0, 3.0], servers=2, bandwidth_bps=10e9).workers
        3
    """

    compute_s: Sequence[Times | Sequence[float]]
    servers: int = 1
    latency_s: Times = 0.0
    bandwidth_bps: float = math.inf
    size_bytes: int = 0
    presence: Mapping[int, Presence] = field(default_factory=dict)
    links: Mapping[int, Link] = field(default_factory=dict)
    name: str = ""
    fixed_share: float | Sequence[float] = 0.0
    emulated: str = ""
    apply_s: Times = 0.0
    pauses: Sequence[Pause] = ()
    uplinks: Sequence[Uplink] = ()
    outside: Mapping[int, Outside] = field(default_factory=dict)
    update_s: Times = 0.0
    optimizers: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.compute_s, str) or not isinstance(self.compute_s, Sequence) or not self.compute_s:
            raise ConfigurationError(
                f"compute_s is {self.compute_s!r}, expected a time for each worker, for example [1.0, 1.0, 3.0]."
            )
        compute = (_times(f"compute_s[{worker}]", times) for worker, times in enumerate(self.compute_s))
        object.__setattr__(self, "compute_s", tuple(compute))
        for name in ("latency_s", "apply_s", "update_s"):
            object.__setattr__(self, name, _times(name, getattr(self, name)))
        object.__setattr__(self, "fixed_share", self._shares())
        require_whole("servers", self.servers, 1)
        _require_bandwidth(self.bandwidth_bps)
        require_whole("size_bytes", self.size_bytes, 0)
        kinds: tuple[tuple[str, Mapping[int, object], type], ...] = (
            ("presence", self.presence, Presence),
            ("links", self.links, Link),
            ("outside", self.outside, Outside),
        )
        for name, by_worker, kind in kinds:
            for worker, value in by_worker.items():
                if not isinstance(value, kind):
                    raise ConfigurationError(
                        f"{name} has {value!r} for worker {worker}, expected a paceline.sim.{kind.__name__}(...)."
                    )
                _require_index(name, worker, self.workers)
        object.__setattr__(self, "pauses", tuple(self.pauses))
        object.__setattr__(self, "uplinks", tuple(self.uplinks))
        for each in (*self.pauses, *self.uplinks):
            if not isinstance(each, Pause | Uplink):
                raise ConfigurationError(
                    f"pauses and uplinks contain {each!r}, expected paceline.sim.Pause(...) or Uplink(...)."
                )
            require_workers("a pause" if isinstance(each, Pause) else "an uplink", each.workers, self.workers)
        shared = [worker for uplink in self.uplinks for worker in uplink.workers]
        if len(set(shared)) < len(shared):
            raise ConfigurationError("a worker has two uplinks, expected at most one.")
        for link in self.links.values():
            if link.bandwidth_bps is not None:
                _require_bandwidth(link.bandwidth_bps)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Cluster:
        """Return the cluster that a TOML file describes. See `docs/how-to/describe-a-cluster.md` for the format.

        Raises:
            ConfigurationError: the file cannot be read, or an entry is not valid; the message names the entry.
        """
        arguments = read_cluster_file(path)
        try:
            return cls(**arguments)
        except ConfigurationError as error:
            raise ConfigurationError(f"{os.fspath(path)}: {in_words_of_file(str(error))}") from error

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """Return the cluster `name`, such as "elastic-bsp", from a paper on sync models. See also `PRESETS`.

        Raises:
            ConfigurationError: there is no preset with that name.
        """
        return cls(**read_preset(name))

    @classmethod
    def from_run(cls, run_dir: str | os.PathLike[str], bandwidth: float | str = math.inf) -> Cluster:
        """Return the cluster on which a recorded run was made: its compute times, latencies and sizes.

        Args:
            run_dir: the directory of a live or a simulated run.
            bandwidth: bandwidth of each machine's network interface in that run, in bits per second, or a string
                such as "1 Gbit/s". If this bandwidth is limited, the transfers are subtracted from the recorded times,
                and simulated. By default, it is unlimited, and the recorded times include the transfers.

        Raises:
            ConfigurationError: the directory does not contain a run, machines have joined the run, no worker has
                finished an iteration, or a bandwidth is given for a run that has not recorded how many bytes travelled.
        """
        return cls(**arguments_of_run(Path(run_dir), read_bandwidth(bandwidth)))

    def with_(
        self,
        *,
        workers: int | None = None,
        bandwidth: float | str | None = None,
        servers: int | None = None,
        slow: Mapping[int, float] | None = None,
        size_bytes: int | None = None,
    ) -> Cluster:
        """Return the cluster with some changes. Arguments that are None change nothing.

        Args:
            workers: number of workers. Additional workers are copies of the existing workers, in turn. Their
                recorded times are resampled, in blocks (`paceline.sim.Resampled`).
            bandwidth: bandwidth of each machine's network interface, in bits per second, or a string such as
                "1 Gbit/s". Recorded times of messages count as latency, to which the transfers are added. If the
                recorded times include transfers over a network, give the bandwidth of this network to `from_run`, which
                subtracts these transfers.
            servers: number of servers. Recorded times of messages stay the same.
            slow: mapping from worker to a factor by which its compute times are multiplied.
            size_bytes: size of all parameters, in bytes.

        Raises:
            ConfigurationError: a value is not valid, or a bandwidth is given without a known size of the parameters.

        Example:
            >>> cluster = Cluster(compute_s=[[1.0, 2.0, 1.0], 3.0]).with_(workers=4, slow={1: 2.0})
            >>> [cluster.compute(worker).typical_s for worker in range(4)]
            [1.0, 6.0, 1.0, 3.0]
        """
        slow = slow or {}
        changes: dict[str, Any] = {}
        said: list[str] = []
        if servers is not None:
            require_whole("servers", servers, 1)
            changes["servers"] = servers
            said.append(f"{servers} server{'s' * (servers > 1)}")
        if size_bytes is not None:
            require_whole("size_bytes", size_bytes, 1)
            changes["size_bytes"] = size_bytes
            said.append(f"{size_bytes / 1e6:g} MB of parameters")
        links = dict(self.links)
        if bandwidth is not None:
            changes["bandwidth_bps"] = bps = read_bandwidth(bandwidth)
            if math.isfinite(bps) and not (size_bytes or self.size_bytes):
                raise ConfigurationError(
                    "a bandwidth has no effect on this cluster, because the size of its parameters is unknown. Also "
                    "give size_bytes. (Runs record this size since version 0.2 of Paceline.)"
                )
            links = {worker: structs.replace(link, bandwidth_bps=None) for worker, link in links.items()}
            said.append(f"{bps / 1e9:g} Gbit/s" if math.isfinite(bps) else "unlimited bandwidth")
        count = self.workers
        if workers is not None:
            require_whole("workers", workers, 1)
            count = workers
            said.append(f"{workers} worker{'s' * (workers > 1)}")
        if not isinstance(slow, Mapping):
            raise ConfigurationError(
                f"slow is {slow!r}, expected a factor for each worker that is slower, such as {{0: 3.0}}."
            )
        for worker, factor in slow.items():
            _require_index("slow", worker, count)
            if not (isinstance(factor, int | float) and 0 < factor < math.inf):
                raise ConfigurationError(
                    f"slow has the factor {factor!r} for worker {worker}, expected a number > 0."
                )
            said.append(f"worker {worker} {factor:g} times as slow")
        before = self.workers
        compute_s = [_like(self.compute(w % before), again=w >= before) for w in range(count)]
        for worker, factor in slow.items():
            compute_s[worker] = Scaled(base=compute_s[worker], factor=factor)
        assert isinstance(self.fixed_share, tuple)
        return replace(
            self,
            compute_s=compute_s,
            fixed_share=[self.fixed_share[w % before] for w in range(count)],
            links={w: _alike(links[w % before], w >= before) for w in range(count) if w % before in links},
            outside={
                w: _alike(self.outside[w % before], w >= before)
                for w in range(count)
                if w % before in self.outside
            },
            presence={w: self.presence[w % before] for w in range(count) if w % before in self.presence},
            pauses=[_members(each, before, count) for each in self.pauses if min(each.workers) < count],
            uplinks=[_members(each, before, count) for each in self.uplinks if min(each.workers) < count],
            name=f"{self.name} with {', '.join(said)}".strip() if said else self.name,
            **changes,
        )

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.compute_s)

    def ticks_per_s(self, *stated: object) -> int:
        """Return the number of ticks per second in a simulation of this cluster (see `paceline.sync.events`).

        Args:
            stated: other objects that state times, such as the sync models of the run.
        """
        servers = self.apply_s, self.update_s
        return resolution(
            self.compute_s, self.latency_s, servers, self.presence, self.links, self.outside, stated
        )

    def compute(self, worker: int) -> Distribution:
        """Return the distribution of a worker's compute times."""
        return times_of(self.compute_s[worker])

    def factor(self, worker: int, work: Work) -> float:
        """Return the ratio of a worker's compute time for an amount of data to its time for one full batch."""
        assert isinstance(self.fixed_share, tuple)
        fixed: float = self.fixed_share[worker]
        return fixed * work.batches + (1.0 - fixed) * work.full_batches

    def _shares(self) -> tuple[float, ...]:
        given = self.fixed_share
        shares = given if isinstance(given, Sequence) else [given] * self.workers
        if len(shares) != self.workers or not all(
            isinstance(share, int | float) and 0 <= share <= 1 for share in shares
        ):
            raise ConfigurationError(
                f"fixed_share is {given!r}, expected a number from 0 to 1, or one such number for each of the "
                f"{self.workers} workers."
            )
        return tuple(map(float, shares))

    def bandwidth_of(self, worker: int) -> float:
        """Return the bandwidth of a worker's network interface, in bits per second."""
        link = self.links.get(worker)
        return self.bandwidth_bps if link is None or link.bandwidth_bps is None else link.bandwidth_bps

    def outside_s(self, worker: int, *, has_epochs: bool) -> tuple[Distribution, Distribution]:
        """Return the times of a worker's script outside of training: before each iteration, and after each epoch.

        Args:
            worker: the worker.
            has_epochs: False if there are no epochs in the simulation.
        """
        own = self.outside.get(worker, Outside())
        each_s = own.each_s if has_epochs or own.without_epochs_s is None else own.without_epochs_s
        return times_of(each_s), times_of(own.epoch_s)

    def joins_late(self, worker: int) -> bool:
        """Return True if a worker joins after the beginning of the run."""
        presence = self.presence.get(worker)
        return presence is not None and presence.joins_at_s > 0

    def latency(self, worker: int, *, to_server: bool) -> Distribution:
        """Return the distribution of the latency between a worker and the servers, in one direction."""
        link = self.links.get(worker, Link())
        special = link.to_server_s if to_server else link.from_server_s
        return times_of(self.latency_s if special is None else special)


def require_whole(name: str, value: object, least: int) -> None:
    """Raise `ConfigurationError` unless `value` is an integer >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}, expected a whole number >= {least}.")


def _require_index(name: str, worker: object, count: int) -> None:
    if not (isinstance(worker, int) and 0 <= worker < count):
        raise ConfigurationError(
            f"{name} has an entry for worker {worker!r}, expected a number from 0 to {count - 1}."
        )


def _times(name: str, times: Times | Sequence[float]) -> Distribution:
    """Return the distribution of times that a user has given. Errors name the argument."""
    try:
        return times_of(times)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _require_bandwidth(bandwidth_bps: object) -> None:
    if not isinstance(bandwidth_bps, int | float) or not bandwidth_bps > 0:
        raise ConfigurationError(
            f"bandwidth_bps is {bandwidth_bps!r}, expected a number of bits per second > 0, for example 10e9."
        )


def _like(times: Times, *, again: bool) -> Times:
    """Return the times of a machine. If `again` is True, resample or shift recorded times for a copy of the machine."""
    known = times_of(times)
    if again and isinstance(known, Recorded):
        return Resampled(seconds=known.seconds)
    return structs.replace(known, shifted=True) if again and isinstance(known, Timed) else known


def _members(each: Together, before: int, count: int) -> Together:
    """Return a pause or an uplink that also applies to the copies of its workers in a cluster of `count` workers."""
    workers = tuple(worker for worker in range(count) if worker % before in each.workers)
    return structs.replace(each, workers=workers)


def _alike(own: Own, again: bool) -> Own:
    """Return the `Link` or `Outside` of a machine or, if `again` is True, of a copy of the machine."""
    times = {name: value for name, value in structs.asdict(own).items() if name.endswith("_s")}
    like = {name: _like(value, again=again) for name, value in times.items() if value is not None}
    return structs.replace(own, **like)
