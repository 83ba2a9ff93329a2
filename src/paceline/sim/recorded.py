"""A cluster out of what a live run recorded: how long each worker computed, and how long its messages took.

What a worker computed is in its own records. How long a message took is the difference of two clocks' readings, which
on one machine are one clock: of a push, from its beginning to the shard's event; of an answer, from the last shard's
event to the arrival of the weights. So what the servers do for a push, applying it above all, is counted as part of
the way back.
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
"""(worker, iteration)."""


def read_cluster_of_run(run_dir: Path) -> Cluster:
    """The cluster that a run in a directory has shown.

    Raises:
        ConfigurationError: there is no finished run.
    """
    shards = [trace for trace in read_run(run_dir) if trace.header.host == "shard"]
    if not shards:
        raise ConfigurationError(
            f"{run_dir} holds no run: no trace-shard-*.jsonl is there. Give the directory that paceline run names "
            "at its end."
        )
    return cluster_of(read_records(run_dir), shards, run_dir.name)


def cluster_of(
    records: Sequence[Sequence[IterationRecord]], shards: Sequence[Trace], name: str = ""
) -> Cluster:
    """The cluster that a run has shown. A worker that finished no iteration, having been lost, is left out.

    Args:
        records: each worker's iterations.
        shards: each shard's trace.
        name: of the cluster.

    Raises:
        ConfigurationError: no worker has finished any iteration.
    """
    known = [(worker, its) for worker, its in enumerate(records) if its]
    if not known:
        raise ConfigurationError("no worker finished an iteration, so how fast they are cannot be told.")
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
    for index, (worker, its) in enumerate(known):
        there = [
            max(0.0, at_s - record.pushed_s)
            for record in its
            for at_s in arrived.get((worker, record.iteration), [])
        ]
        back = [
            max(0.0, record.answered_s - released[worker, record.iteration])
            for record in its
            if (worker, record.iteration) in released
        ]
        links[index] = Link(
            to_server_s=Recorded(seconds=tuple(there or [0.0])),
            from_server_s=Recorded(seconds=tuple(back or [0.0])),
        )
    return Cluster(
        compute_s=[Recorded(seconds=tuple(map(_computed_s, its))) for _, its in known],
        servers=len(shards),
        links=links,
        name=name,
    )


def _computed_s(record: IterationRecord) -> float:
    """How long the gradient of an iteration took; of one that was started anew, the second time."""
    begun_s = record.begun_s if record.restarted_s is None else record.restarted_s
    return max(0.0, record.pushed_s - begun_s)
