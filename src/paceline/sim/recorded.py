"""Derives a `Cluster`, with the compute times and message times of each worker, from the files of a live run.

The compute times come from the workers' records. The time of a message is the difference between two clock readings,
which are comparable because all processes on a machine use the same clock. The time of a push runs from the moment
when the worker begins to send it until it has arrived at the shard. The time of an answer runs from the moment when
every shard may answer the pull until all weights have arrived at the worker. It includes the time that a server takes
to process a push before it answers, mainly to apply the gradient.

A push without a gradient, which a worker makes while its script evaluates the model, is no computation. The first
iteration of an accelerator with batches of a new size takes longer, because programs are compiled. Both are left out.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from ..core.data.batch_sizes import BatchTime
from ..errors import ConfigurationError
from ..sync.actions import AnswerPull
from ..sync.events import PullRepeated, PushReceived
from ..trace.recording import AnyTrace, trace_files
from ..trace.records import IterationRecord, record_files, records_in
from .cluster import Cluster
from .times import Recorded
from .worker_settings import Link

__all__ = ["cluster_of", "compute_times", "read_cluster_of_run"]


class Column:
    """A number for each iteration of a worker. It takes eight bytes, because a run may have millions of iterations.

    >>> column = Column()
    >>> column.put(2, 0.5)
    >>> column.get(1), column.get(2), column.get(7)
    (None, 0.5, None)
    """

    def __init__(self) -> None:
        self._values = array("d")

    def put(self, iteration: int, value: float) -> None:
        """Set the number of an iteration."""
        missing = iteration + 1 - len(self._values)
        if missing > 0:
            self._values.extend(repeat(math.nan, missing))
        self._values[iteration] = value

    def get(self, iteration: int) -> float | None:
        """Return the number of an iteration; None if it has none."""
        value = self._values[iteration] if iteration < len(self._values) else math.nan
        return None if math.isnan(value) else value


class Arrivals:
    """What the shards have received from one worker, by iteration.

    Attributes:
        arrived_s: for each shard, the time at which the push arrived.
        samples: number of samples of the push, if it has samples of its own.
        atypical: 1 if the push had no gradient, or if it was a warm-up.
        released_s: time at which the last shard answered the pull.
    """

    def __init__(self, shards: int) -> None:
        self.arrived_s = [Column() for _ in range(shards)]
        self.samples = Column()
        self.atypical = Column()
        self.released_s = Column()


def read_cluster_of_run(run_dir: Path) -> Cluster:
    """Return a cluster that describes the machines of a recorded run, given its run directory.

    Raises:
        ConfigurationError: the directory does not contain a run, or no worker has finished an iteration.
    """
    shards = [trace for trace in trace_files(run_dir) if trace.header.host == "shard"]
    if not shards:
        if _summary(run_dir).get("traces") == "off":
            raise ConfigurationError(
                f"the run in {run_dir} made no traces (--traces off), so the speed of its machines is unknown. Give "
                "the directory of another run."
            )
        raise ConfigurationError(
            f"{run_dir} does not contain a run: there is no file trace-shard-*.jsonl. Give the run "
            "directory, which 'paceline run' prints when it ends."
        )
    records = [records_in(path) for path in record_files(run_dir)]
    name = run_dir.name if shards[0].header.is_whole else f"{run_dir.name} (its last iterations)"
    return cluster_of(records, shards, name, _batch_size(run_dir))


def cluster_of(
    records: Iterable[Iterable[IterationRecord]],
    shards: Sequence[AnyTrace],
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
    arrivals = _arrivals(shards)
    links: dict[int, Link] = {}
    computed: list[tuple[Recorded, float]] = []
    for worker, iterations in enumerate(records):
        own = arrivals[worker]
        to_server_s, from_server_s = array("d"), array("d")
        observed: list[tuple[int | None, float]] = []
        atypical: list[tuple[int | None, float]] = []
        for record in iterations:
            for column in own.arrived_s:
                if (arrived_s := column.get(record.iteration)) is not None:
                    to_server_s.append(max(0.0, arrived_s - record.pushed_s))
            if (released_s := own.released_s.get(record.iteration)) is not None:
                from_server_s.append(max(0.0, record.answered_s - released_s))
            samples = own.samples.get(record.iteration)
            times = atypical if own.atypical.get(record.iteration) else observed
            times.append((None if samples is None else int(samples), _computed_s(record)))
        if observed or atypical:
            links[len(computed)] = Link(
                to_server_s=Recorded(seconds=tuple(to_server_s or [0.0])),
                from_server_s=Recorded(seconds=tuple(from_server_s or [0.0])),
            )
            computed.append(compute_times(observed or atypical, batch_size))
    if not computed:
        raise ConfigurationError("no worker finished an iteration, so the speed of the workers is unknown.")
    return Cluster(
        compute_s=[times for times, _ in computed],
        fixed_share=[share for _, share in computed],
        servers=len(shards),
        links=links,
        name=name,
        emulated=next((trace.header.emulated for trace in shards), ""),
    )


def _arrivals(shards: Sequence[AnyTrace]) -> Mapping[int, Arrivals]:
    """Return what the shards have received from each worker."""
    arrivals: dict[int, Arrivals] = defaultdict(lambda: Arrivals(len(shards)))
    for shard, trace in enumerate(shards):
        for entry in trace.entries:
            event, now_s = entry.event, trace.header.time_s(entry)
            if isinstance(event, PushReceived) and entry.refused is None:
                own = arrivals[event.worker]
                own.arrived_s[shard].put(event.iteration, now_s)
                if event.samples and not event.repeated:
                    own.samples.put(event.iteration, event.samples)
                if event.empty or event.warm_up:
                    own.atypical.put(event.iteration, 1)
            if isinstance(event, PullRepeated):
                continue
            for action in entry.actions:
                # The first weights of a worker that joins late are the answer to a pull with the number -1.
                if isinstance(action, AnswerPull) and action.iteration >= 0:
                    released_s = arrivals[action.worker].released_s
                    before_s = released_s.get(action.iteration) or 0.0
                    released_s.put(action.iteration, max(before_s, now_s))
    return arrivals


def compute_times(
    observed: Sequence[tuple[int | None, float]], batch_size: int | None
) -> tuple[Recorded, float]:
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
        summary = _summary(run_dir)
        size = int(summary["batch_size"]) * int(summary["batches_per_push"])
        return size if summary["batch"] == "balanced" else None
    except (ValueError, KeyError, TypeError):
        return None  # the run did not end, or its data was not handed out in batches of known size


def _summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run; {} if the run did not end."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _computed_s(record: IterationRecord) -> float:
    """Return the compute time of an iteration. If the iteration was restarted, only the last computation counts."""
    begun_s = record.begun_s if record.restarted_s is None else record.restarted_s
    return max(0.0, record.pushed_s - begun_s)
