"""Derives a `Cluster` from the files of a live run: the compute times and the message times of each worker.

The compute times are in the workers' records. The time of a message is the difference between two clock readings,
which are comparable because all processes on a machine use the same clock. A push lasts from
the time at which the worker sent it until the event at the shard that received it. An answer lasts from the event
that released the pull at the last shard until the weights have arrived. So the time that a server takes to process a
push, mainly to apply the gradient, counts as part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigurationError
from ..sync.actions import AnswerPull
from ..sync.events import PullRepeated, PushReceived
from ..trace.recording import Trace, read_run
from ..trace.records import IterationRecord, read_records
from .cluster import Cluster
from .machines import Link
from .times import Recorded

__all__ = ["cluster_of", "read_cluster_of_run"]

Key = tuple[int, int]
"""A pair (worker, iteration)."""


def read_cluster_of_run(run_dir: Path) -> Cluster:
    """Return a cluster that describes the machines of the run in a directory.

    Raises:
        ConfigurationError: the directory does not contain a run, or no worker has finished an iteration.
    """
    shards = [trace for trace in read_run(run_dir) if trace.header.host == "shard"]
    if not shards:
        raise ConfigurationError(
            f"{run_dir} does not contain a run: there is no file trace-shard-*.jsonl. Give the directory that "
            "paceline run prints when it ends."
        )
    return cluster_of(read_records(run_dir), shards, run_dir.name)


def cluster_of(
    records: Sequence[Sequence[IterationRecord]], shards: Sequence[Trace], name: str = ""
) -> Cluster:
    """Return a cluster that describes the machines of a run, without workers that were lost in their first iteration.

    Args:
        records: the iterations of each worker.
        shards: the trace of each shard.
        name: name of the cluster.

    Raises:
        ConfigurationError: no worker has finished an iteration.
    """
    known = [(worker, iterations) for worker, iterations in enumerate(records) if iterations]
    if not known:
        raise ConfigurationError("no worker finished an iteration, so the speed of the workers is unknown.")
    arrived: dict[Key, list[float]] = {}
    released: dict[Key, float] = {}
    for trace in shards:
        for entry in trace.entries:
            if isinstance(entry.event, PushReceived) and entry.refused is None:
                key = entry.event.worker, entry.event.iteration
                arrived.setdefault(key, []).append(entry.event.now_s)
            for action in entry.actions:
                if isinstance(action, AnswerPull) and not isinstance(entry.event, PullRepeated):
                    key = action.worker, action.iteration
                    released[key] = max(released.get(key, 0.0), entry.event.now_s)
    links = {}
    for index, (worker, iterations) in enumerate(known):
        to_server_s = [
            max(0.0, at_s - record.pushed_s)
            for record in iterations
            for at_s in arrived.get((worker, record.iteration), [])
        ]
        from_server_s = [
            max(0.0, record.answered_s - released[worker, record.iteration])
            for record in iterations
            if (worker, record.iteration) in released
        ]
        links[index] = Link(
            to_server_s=Recorded(seconds=tuple(to_server_s or [0.0])),
            from_server_s=Recorded(seconds=tuple(from_server_s or [0.0])),
        )
    return Cluster(
        compute_s=[Recorded(seconds=tuple(map(_computed_s, iterations))) for _, iterations in known],
        servers=len(shards),
        links=links,
        name=name,
    )


def _computed_s(record: IterationRecord) -> float:
    """Return the compute time of an iteration. If the iteration was restarted, only the last computation counts."""
    begun_s = record.begun_s if record.restarted_s is None else record.restarted_s
    return max(0.0, record.pushed_s - begun_s)
