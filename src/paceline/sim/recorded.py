"""Derives a cluster, with the compute times and message times of each worker, from the files of a live run.

The compute times come from the workers' records. The time of a message is the difference between two clock readings,
which are comparable because all processes on a machine use the same clock. The time of a push runs from the moment
when the worker begins to send it until it has arrived at the shard. The time of an answer runs from the moment when
every shard may answer the pull until all weights have arrived at the worker. This time includes the time that a server
takes to process a push before it answers, mainly to apply the gradient.

If the bandwidth of the run's network is known, the transfers are subtracted from the times of the messages. For this,
all recorded messages are sent through the simulated network, each at its recorded time. The difference between the
simulated and the recorded arrival of a message counts as latency. So the same cluster can be simulated with another
bandwidth.

A push without a gradient, which a worker makes while its script evaluates the model, does not count as a computation.
An accelerator's first iteration with batches of a new size takes longer, because programs are compiled. Both kinds of
iterations are left out of the compute times, unless a worker has made no others.

A script's time outside of training (see `core.metrics`) is not part of the compute times, because it does not depend on
the batch. In a simulation, this time passes as it did in the run: before the same iterations, or at the end of each
epoch.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

from ..core.batch_sizes import BatchTime
from ..core.layout import WireFormat
from ..errors import ConfigurationError
from ..files import read_regular
from ..sync.actions import AnswerPull
from ..sync.events import PullRepeated, PushReceived, WorkerFinished
from ..trace.recording import AnyTrace, IterationRecord, record_files, records_in, trace_files
from .network import Transfer, ends_of
from .times import Link, Outside, Recorded

EMPTY, WARM_UP = 1.0, 2.0  # why the time of an iteration is not typical


class _Column:
    """A number for each iteration of a worker. Each number takes eight bytes, because a run may have many iterations.

    >>> column = _Column()
    >>> column.put(2, 0.5)
    >>> column.get(1), column.get(2), column.get(7)
    (None, 0.5, None)
    """

    def __init__(self) -> None:
        self._values = array("d")

    def put(self, iteration: int, value: float) -> None:
        """Set the number that belongs to an iteration."""
        missing = iteration + 1 - len(self._values)
        if missing > 0:
            self._values.extend(repeat(math.nan, missing))
        self._values[iteration] = value

    def get(self, iteration: int) -> float | None:
        """Return the number that belongs to an iteration; None if there is none."""
        value = self._values[iteration] if iteration < len(self._values) else math.nan
        return None if math.isnan(value) else value


class Arrivals:
    """The entries of the shards' traces about the messages of one worker, by iteration.

    Attributes:
        arrived_s: for each shard, the time at which the push arrived.
        finished_s: the time at which the worker has finished, according to shard 0; None if it has not finished.
        samples: number of samples of the push, if it has samples of its own.
        atypical: `EMPTY` if the push had no gradient, `WARM_UP` if its iteration took longer because programs were
            compiled (see `PushFlags.warm_up`).
        released_s: for each shard, the time at which it answered the pull.
    """

    def __init__(self, shards: int) -> None:
        self.arrived_s = [_Column() for _ in range(shards)]
        self.finished_s: float | None = None
        self.samples = _Column()
        self.atypical = _Column()
        self.released_s = [_Column() for _ in range(shards)]


class Latencies:
    """The latencies of a worker's messages in one direction.

    Attributes:
        seconds: the latency of each message, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = array("d")

    def distribution(self) -> Recorded:
        """Return the latencies as a distribution; 0 s if there was no message."""
        return Recorded(seconds=tuple(self.seconds or [0.0]))


class _OutsideTimes:
    """The times of one worker's script outside of training, in seconds."""

    def __init__(self) -> None:
        self._each = array("d")  # before each iteration; 0 for the first iteration of an epoch
        self._epochs = array("d")  # between two epochs, and after the last epoch
        self._all = array("d")  # before each iteration
        self._answered_s = 0.0

    def add(self, record: IterationRecord) -> None:
        """Add the time before an iteration."""
        outside_s, _, _ = record.apart_s
        first, self._answered_s = not self._all, record.answered_s
        begins = bool(record.begins_pass)
        if begins and not first:  # the previous epoch has ended
            self._epochs.append(outside_s)
        self._each.append(0.0 if begins else outside_s)
        self._all.append(outside_s)

    def end(self, finished_s: float | None) -> None:
        """Add the time after the last iteration."""
        if finished_s is not None:
            self._epochs.append(max(0.0, finished_s - self._answered_s))

    @property
    def matters(self) -> bool:
        """True if the script was outside of training at all."""
        return sum(self._all) + sum(self._epochs) > 0.0

    def distributions(self) -> Outside:
        """Return the times as distributions. The recorded times repeat in their order."""
        return Outside(
            each_s=Recorded(seconds=tuple(self._each)),
            epoch_s=Recorded(seconds=tuple(self._epochs or [0.0])),
            without_epochs_s=Recorded(seconds=tuple(self._all)),
        )


class _LatencyEstimate:
    """Collects the times of messages, and subtracts their transfers through a network of limited bandwidth.

    Args:
        bandwidth_bps: bandwidth of each machine. If it is unlimited, the whole time of a message is its latency.
    """

    def __init__(self, bandwidth_bps: float) -> None:
        self._bandwidth_bps = bandwidth_bps
        self._transfers: list[Transfer] = []
        # For each message: its latency, as a column and an index; when it had arrived; and its number of transfers.
        self._messages: list[tuple[array[float], int, float, int]] = []

    def add(self, latencies: Latencies, arrived_s: float, transfers: Sequence[Transfer]) -> None:
        """Add a message that consists of several transfers. It has arrived when all transfers have arrived."""
        latencies.seconds.append(max(0.0, arrived_s - max(transfer.begun_s for transfer in transfers)))
        if math.isfinite(self._bandwidth_bps):
            self._transfers += transfers
            message = latencies.seconds, len(latencies.seconds) - 1, arrived_s, len(transfers)
            self._messages.append(message)

    def subtract_transfers(self) -> None:
        """Replace each latency by the time from the end of the message's simulated transfers to its arrival."""
        ends_s = iter(ends_of(self._transfers, self._bandwidth_bps))
        for seconds, index, arrived_s, count in self._messages:
            seconds[index] = max(0.0, arrived_s - max(islice(ends_s, count)))


class Sizes(NamedTuple):
    """The bytes that travelled in a run.

    Attributes:
        parameters: size of all parameters, in bytes.
        pushes: size of a push to each shard.
        answers: size of the answer of each shard.
    """

    parameters: int
    pushes: tuple[int, ...]
    answers: tuple[int, ...]


def arguments_of_run(run_dir: Path, bandwidth_bps: float) -> dict[str, Any]:
    """Return the arguments of the cluster that describes the machines of a recorded run. See `Cluster.from_run`.

    Raises:
        ConfigurationError: the directory does not contain a run, machines have joined the run, no worker has finished
            an iteration, or a bandwidth is given for a run that has not recorded how many bytes travelled.
    """
    shards = [trace for trace in trace_files(run_dir) if trace.header.host == "shard"]
    summary = _summary(run_dir)
    if summary.get("joined") or any(trace.header.machine for trace in shards):
        raise _joined(run_dir)
    if not shards:
        if summary.get("traces") == "off":
            raise ConfigurationError(
                f"the run in {run_dir} made no traces (--traces off), so the speed of its machines is unknown. Give "
                "the directory of another run."
            )
        raise ConfigurationError(
            f"{run_dir} does not contain a run: there is no file trace-shard-*.jsonl. Give the run "
            "directory, which 'paceline run' prints when it ends."
        )
    sizes = _sizes(run_dir, len(shards))
    if math.isfinite(bandwidth_bps) and sizes is None:
        raise ConfigurationError(
            f"the summary of the run in {run_dir} does not say how many bytes travelled, so its transfers cannot be "
            "distinguished from other delays. Omit the bandwidth of the run, or record another run with this version "
            "of Paceline."
        )
    records = {int(path.stem.rpartition("-")[2]): _records(path) for path in record_files(run_dir)}
    name = run_dir.name if shards[0].header.is_whole else f"{run_dir.name} (its last iterations)"
    arguments = _arguments(records, shards, name, _batch_size(run_dir), sizes, bandwidth_bps)
    return arguments | {"optimizers": tuple(summary.get("optimizers", ()))}


def _records(path: Path) -> Iterator[IterationRecord]:
    """Yield the records of a worker.

    Raises:
        ConfigurationError: the machine of the worker has joined the run.
    """
    for record in records_in(path):
        if record.machine:
            raise _joined(path.parent)
        yield record


def _joined(run_dir: Path) -> ConfigurationError:
    return ConfigurationError(
        f"machines have joined the run in {run_dir}, so it cannot be simulated: the time that a message takes is "
        "read from the clocks of two machines, and may be shorter than the error of these clocks. The report of the "
        "run says what would help. To simulate these machines, describe them in a file: paceline simulate CLUSTER.toml"
    )


def _arguments(
    records: Mapping[int, Iterable[IterationRecord]],
    shards: Sequence[AnyTrace],
    name: str,
    batch_size: int | None,
    sizes: Sizes | None,
    bandwidth_bps: float,
) -> dict[str, Any]:
    """Return the arguments of a run's cluster. Workers that finished no iteration are omitted.

    Args:
        records: worker -> its iterations.
        shards: the trace of each shard.
        name: name of the cluster.
        batch_size: usual number of samples in a batch, if the run had balanced batches, whose sizes differ.
        sizes: the bytes that travelled; None if unknown.
        bandwidth_bps: bandwidth of the network of the run. This bandwidth may be limited only if the sizes are known.

    Raises:
        ConfigurationError: no worker has finished an iteration.
    """
    arrivals = _arrivals(shards)
    sizes = sizes or Sizes(0, (0,) * len(shards), (0,) * len(shards))
    estimate = _LatencyEstimate(bandwidth_bps)
    computed: list[tuple[Recorded, float]] = []
    latencies: list[tuple[Latencies, Latencies]] = []  # to the servers, and from them
    outside: list[_OutsideTimes] = []
    for worker, iterations in records.items():
        own, at = arrivals[worker], ("worker", worker)
        to_server, from_server = Latencies(), Latencies()
        besides = _OutsideTimes()
        observed: list[tuple[int | None, float]] = []
        atypical: list[tuple[int | None, float]] = []
        for record in iterations:
            number = record.iteration
            empty = own.atypical.get(number) == EMPTY
            if not empty:  # no other worker waits for a worker inside `evaluating`
                besides.add(record)
            for shard, column in enumerate(own.arrived_s):
                if (arrived_s := column.get(number)) is not None:
                    size_bytes = 0 if empty else sizes.pushes[shard]
                    push = Transfer(record.pushed_s, at, ("server", shard), size_bytes)
                    estimate.add(to_server, arrived_s, [push])
            answers = [
                Transfer(released_s, ("server", shard), at, sizes.answers[shard])
                for shard, column in enumerate(own.released_s)
                if (released_s := column.get(number)) is not None
            ]
            if answers:
                estimate.add(from_server, record.answered_s, answers)
            samples = own.samples.get(number)
            times = atypical if own.atypical.get(number) else observed
            # Loading counts as computing, because it takes equally long under every sync model.
            computed_s = record.computing_s + record.apart_s[1]
            times.append((None if samples is None else int(samples), computed_s))
        if observed or atypical:
            latencies.append((to_server, from_server))
            besides.end(own.finished_s)
            outside.append(besides)
            computed.append(compute_times(observed or atypical, batch_size))
    if not computed:
        raise ConfigurationError("no worker finished an iteration, so the speed of the workers is unknown.")
    estimate.subtract_transfers()
    return {
        "compute_s": [times for times, _ in computed],
        "fixed_share": [share for _, share in computed],
        "servers": len(shards),
        "bandwidth_bps": bandwidth_bps,
        "size_bytes": sizes.parameters,
        "links": {
            worker: Link(to_server_s=to_server.distribution(), from_server_s=from_server.distribution())
            for worker, (to_server, from_server) in enumerate(latencies)
        },
        "outside": {worker: known.distributions() for worker, known in enumerate(outside) if known.matters},
        "name": name,
        "emulated": next((trace.header.emulated for trace in shards), ""),
    }


def _arrivals(shards: Sequence[AnyTrace]) -> Mapping[int, Arrivals]:
    """Return what the shards have received from each worker."""
    arrivals: dict[int, Arrivals] = defaultdict(lambda: Arrivals(len(shards)))
    for shard, trace in enumerate(shards):
        for entry in trace.entries:
            event, now_s = entry.event, trace.header.time_s(entry)
            if isinstance(event, PushReceived) and entry.refused is None:
                own = arrivals[event.worker]
                own.arrived_s[shard].put(event.iteration, now_s)
                if event.counted:
                    own.samples.put(event.iteration, event.counted)
                if event.empty or event.warm_up:
                    own.atypical.put(event.iteration, EMPTY if event.empty else WARM_UP)
            if isinstance(event, WorkerFinished) and shard == 0:
                arrivals[event.worker].finished_s = now_s
            if isinstance(event, PullRepeated):
                continue
            for action in entry.actions:
                # The first weights of a worker that joins late are the answer to a pull for iteration -1.
                if isinstance(action, AnswerPull) and action.iteration >= 0:
                    arrivals[action.worker].released_s[shard].put(action.iteration, now_s)
    return arrivals


def compute_times(
    observed: Sequence[tuple[int | None, float]], batch_size: int | None
) -> tuple[Recorded, float]:
    """Return a worker's compute times for batches of the usual size, and its fixed share (see `Cluster`).

    Args:
        observed: for each iteration, its number of samples (None if it has no samples of its own), and its compute
            time in seconds.
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


def _sizes(run_dir: Path, shards: int) -> Sizes | None:
    """Return the bytes that travelled in a run; None if the summary does not contain them."""
    summary = _summary(run_dir)
    try:
        wire = WireFormat.read(summary.get("wire", "float32"))
        keys = "shard_bytes", "push_bytes", "pull_bytes"
        if "rounded_bytes" in summary:  # a summary of an earlier version has the sizes for each codec
            earlier = {"float32": "shard_bytes", "bf16": "rounded_bytes"}
            keys = "shard_bytes", earlier[wire.gradients], earlier[wire.weights]
        whole, pushes, pulls = (tuple(map(int, summary[key])) for key in keys)
    except (KeyError, TypeError, ValueError):
        return None
    return Sizes(sum(whole), pushes, pulls) if len(whole) == len(pushes) == len(pulls) == shards else None


def _batch_size(run_dir: Path) -> int | None:
    """Return the batch size to which a run's compute times refer if its batches are unequal; None for other runs.

    Balanced batches are unequal, and so are the parts of a joint batch. In such runs, the times refer to the batch
    size of the loader.
    """
    try:
        summary = _summary(run_dir)
        size = int(summary["batch_size"]) * int(summary["batches_per_push"])
        return size if summary["batch"] == "balanced" or summary.get("joint_batch") else None
    except (ValueError, KeyError, TypeError):
        return None  # the run did not end, or its data was not handed out in batches of known size


def _summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run; {} if the run did not end."""
    try:
        summary = json.loads(read_regular(run_dir / "summary.json"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
