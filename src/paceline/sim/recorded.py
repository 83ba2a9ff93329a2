"""Derives a `Cluster`, with the compute times and message times of each worker, from the files of a live run.

The compute times come from the workers' records. The time of a message is the difference between two clock readings,
which are comparable because all processes on a machine use the same clock. The time of a push runs from the moment
when the worker begins to send it until it has arrived at the shard. The time of an answer runs from the moment when
every shard may answer the pull until all weights have arrived at the worker. It includes the time that a server takes
to process a push before it answers, mainly to apply the gradient.

A push without a gradient, which a worker makes while its script evaluates the model, is no computation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..core.batch_sizes import BatchTime
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
    """Return a cluster that describes the machines of a recorded run, given its run directory.

    Raises:
        ConfigurationError: the directory does not contain a run, or no worker has finished an iteration.
    """
    shards = [trace for trace in read_run(run_dir) if trace.header.host == "shard"]
    if not shards:
        raise ConfigurationError(
            f"{run_dir} does not contain a run: there is no file trace-shard-*.jsonl. Give the run "
            "directory, which 'paceline run' prints when it ends."
        )
    return cluster_of(read_records(run_dir), shards, run_dir.name, _batch_size(run_dir))


def cluster_of(
    records: Sequence[Sequence[IterationRecord]],
    shards: Sequence[Trace],
    name: str = "",
    batch_size: int | None = None,
) -> Cluster:
    """Return a cluster that describes the machines of a run. Workers that finished no iteration are omitted.

    Args:
        records: the iterations of each worker.
        shards: the trace of each shard.
        name: name of the cluster.
        batch_size: usual number of samples in a batch, if the run had balanced batches, whose sizes differ.

    Raises:
        ConfigurationError: no worker has finished an iteration.
    """
    known = [(worker, iterations) for worker, iterations in enumerate(records) if iterations]
    if not known:
        raise ConfigurationError("no worker finished an iteration, so the speed of the workers is unknown.")
    arrived: dict[Key, list[float]] = {}
    samples: dict[Key, int] = {}  # pushes with samples of their own
    empty: set[Key] = set()
    released: dict[Key, float] = {}
    for trace in shards:
        for entry in trace.entries:
            if isinstance(entry.event, PushReceived) and entry.refused is None:
                key = entry.event.worker, entry.event.iteration
                arrived.setdefault(key, []).append(trace.time_s(entry))
                if entry.event.samples and not entry.event.repeated:
                    samples[key] = entry.event.samples
                if entry.event.empty:
                    empty.add(key)
            for action in entry.actions:
                if isinstance(action, AnswerPull) and not isinstance(entry.event, PullRepeated):
                    key = action.worker, action.iteration
                    released[key] = max(released.get(key, 0.0), trace.time_s(entry))
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
    computed = [
        _computed(
            [
                (samples.get((worker, record.iteration)), _computed_s(record))
                for record in [each for each in iterations if (worker, each.iteration) not in empty]
                or iterations
            ],
            batch_size,
        )
        for worker, iterations in known
    ]
    return Cluster(
        compute_s=[times for times, _ in computed],
        fixed_share=[share for _, share in computed],
        servers=len(shards),
        links=links,
        name=name,
        emulated=next((trace.header.emulated for trace in shards), ""),
    )


def _computed(observed: Sequence[tuple[int | None, float]], batch_size: int | None) -> tuple[Recorded, float]:
    """Return a worker's compute times for batches of the usual size, and its fixed share (see `Cluster`).

    Args:
        observed: the number of samples in each iteration, None without samples of its own, and its compute time in
            seconds.
        batch_size: usual number of samples in a batch; None if all batches are treated as equal.
    """
    sized = [(size, seconds) for size, seconds in observed if size is not None]
    if batch_size is None or not sized:
        return Recorded(seconds=tuple(seconds for _, seconds in observed)), 0.0
    time = BatchTime.fitted(sized)
    usual_s = time.of(batch_size)
    return Recorded(
        seconds=tuple(s if size is None else s * usual_s / time.of(size) for size, s in observed)
    ), time.fixed_s / usual_s


def _batch_size(run_dir: Path) -> int | None:
    """Return the usual number of samples in a batch of a run with balanced batches; None for any other run."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
        size = int(summary["batch_size"]) * int(summary["batches_per_push"])
        return size if summary["batch"] == "balanced" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the run did not end, or its data was not handed out in batches of known size


def _computed_s(record: IterationRecord) -> float:
    """Return the compute time of an iteration. If the iteration was restarted, only the last computation counts."""
    begun_s = record.begun_s if record.restarted_s is None else record.restarted_s
    return max(0.0, record.pushed_s - begun_s)
