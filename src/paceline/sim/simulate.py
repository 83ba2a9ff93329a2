"""The function `simulate`, which runs a job in virtual time, with or without training, and returns the result."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from ..core.auto import Prospect
from ..core.guard import DIVERGED, GoodWeights, Guard, guard_mode
from ..core.layout import CODECS, Layout, ModelSpec, OptimizerSpec, WireFormat
from ..core.lease import BatchSizing
from ..core.metrics import MetricHistory
from ..core.requests import Situation
from ..errors import ConfigurationError, PacelineError, RunFailedError, UsageError
from ..settings import SETTINGS
from ..sync import SyncModel
from ..sync.plugins import load_models
from ..sync.schedule import Schedule, read_schedule
from ..sync.ticks import Seconds
from ..trace.activity_cells import time_use
from ..trace.measures import Meter
from ..trace.recording import IterationRecord
from .clockwork import Clockwork, Dataset, DatasetClockwork, require_enough_data
from .cluster import Cluster, require_whole
from .recorded import compute_times
from .result import Loss, Recorders, SimResult, TakeRecord
from .simulated_job import VirtualJob
from .times import Link

if TYPE_CHECKING:
    from ..shard.store import WeightsSnapshot
    from .simulated_cuts import SimCut


ITERATIONS_WITHOUT_LOSS = 5
"""Number of iterations without a loss after which a run that needs losses is ended."""

ITERATIONS_WITHOUT_SAMPLES = 5
"""Number of iterations without samples after which a run that is limited by its samples is ended."""

NOTHING_TRAINED = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())


def simulate(
    cluster: Cluster,
    sync: str | SyncModel | Sequence[SyncModel] | Schedule = "bsp",
    iterations: int | None = 100,
    seed: int = 0,
    *,
    until_s: Seconds = math.inf,
    until_updates: int | None = None,
    until_samples: int | None = None,
    train_fn: Callable[..., object] | None = None,
    args: Sequence[object] = (),
    shards: int | None = None,
    shard_bytes: Sequence[int] | None = None,
    slicing: str = "auto",
    overlap: str = "shards",
    on_nan: str = "stop",
    hyperparameters: str = "translated",
    wire: str = "float32",
    guard: str | None = None,
    batch: BatchSizing = "equal",
    joint_batch: bool = False,
    data: Dataset | None = None,
    snapshot_every_s: float | None = None,
    on_snapshot: Callable[[float, WeightsSnapshot], bool] | None = None,
    needs_losses: bool = False,
    record: bool = False,
    run_dir: str | Path | None = None,
    cut_at_s: Sequence[float] = (),
    resumed: SimCut | None = None,
) -> SimResult:
    """Simulate a run in virtual time, on a cluster that need not exist.

    Without `train_fn`, no gradients are computed: the workers only let the time of their iterations pass. With
    `train_fn`, each worker runs this function until it returns, as with `paceline.launch`. Real gradients are
    computed on real data, by one worker after another, in the order of virtual time.

    Args:
        cluster: the machines and the network.
        sync: sync model or schedule, or "auto", as for `paceline.launch`. The simulations with which "auto" chooses
            take no virtual time.
        iterations: number of iterations of each worker; None if only `until_s` limits the run. Ignored with
            `train_fn`.
        seed: random seed for the run.
        until_s: virtual time, in seconds, at which the run is stopped.
        until_updates: number of updates of shard 0 after which the run is stopped; None for no limit.
        until_samples: number of samples, in the pushes of all workers, after which the run is stopped; None for no
            limit. Samples in dropped pushes count, too. Only with `train_fn` or `data`.
        train_fn: training function, which uses `DistributedOptimizer` and `distribute`.
        args: arguments for `train_fn`.
        shards: number of slices into which the parameters are divided. Default: one per server.
        shard_bytes: size of each shard in bytes. Default: equal sizes. Not allowed with `train_fn`.
        slicing: as for `paceline.launch`. Ignored without `train_fn`.
        overlap: "shards" if each shard answers independently; "off" if no worker pulls until all workers have pushed
            to all shards.
        on_nan: as for `paceline.launch`.
        hyperparameters: as for `paceline.launch`. Ignored without `train_fn`.
        wire: as for `paceline.launch`, on all connections of the simulated network. Without `train_fn`, all
            parameters count as float32.
        guard: as for `paceline.launch`. Ignored without `train_fn`. With "stop", the last good weights are saved in
            `run_dir`, if there is one.
        batch: as for `paceline.launch`. Ignored without `train_fn` and without `data`.
        joint_batch: as for `paceline.launch`. Ignored without `train_fn` and without `data`.
        data: data that the workers use up. The run then ends after its last epoch, and `iterations` is ignored. Not
            allowed with `train_fn`, which distributes its own data.
        snapshot_every_s: interval, in seconds of virtual time, at which the weights are stored in
            `SimResult.snapshots`. Only with `train_fn`.
        on_snapshot: function that receives the virtual time and the weights of each snapshot. With this function,
            snapshots are not stored. If the function returns True, the run ends.
        needs_losses: True to end the run with an error if a `train_fn` logs no loss in its first five iterations (see
            `paceline.log`).
        record: True to keep traces and records in memory, for `SimResult.trace`, `.records` and `.save`. They take
            about one kilobyte per iteration, worker and shard. If False, memory use does not grow with the length of
            the run, except for the losses and snapshots of a `train_fn`.
        run_dir: new directory for the same files as in a live run: traces and records, which are written during the
            run, and a summary. `SimResult.trace` and `.records` then read these files.
        cut_at_s: virtual times, in seconds, at which the job is cut, as for a checkpoint. Only with `train_fn`.
        resumed: one of the `SimResult.cuts` of an earlier simulation with the same seed. This simulation goes on from
            the cut. Its cluster and its sync model may be different. Only with `train_fn`.

    Raises:
        ConfigurationError: an argument is not valid, or the run directory cannot be written. Nothing was computed.
        UsageError: `needs_losses` is True, and a training function reports no losses; or `until_samples` is given, and
            the numbers of samples are unknown.
        RunFailedError: a training function failed, a worker waits for a pull that will never be answered, or the
            guard has stopped the run.

    Example:
        >>> result = simulate(Cluster(compute_s=[1.0, 3.0]), "bsp", iterations=4)
        >>> result.time_s, result.updates, result.waiting_share
        (12.0, 4, 0.3333333333333333)
    """
    settings = {
        "overlap": overlap,
        "slicing": slicing,
        "on_nan": on_nan,
        "hyperparameters": hyperparameters,
        "batch": batch,
        "joint_batch": joint_batch,
    }
    ends = data is not None or iterations is not None
    count = _require_sound(cluster, iterations, seed, until_s, shards, shard_bytes, settings, ends=ends)
    load_models(sync)
    schedule = read_schedule(sync)
    schedule.require_runnable(cluster.workers, count)
    schedule.require_overlap(overlap)
    if joint_batch and data is not None:
        data = msgspec.structs.replace(data, joint_batch=True)
    wire_format = WireFormat.read(wire)
    wire_format.require_usable(str(schedule), common=schedule.lockstep)
    translated = hyperparameters == "translated"
    mode = guard_mode(guard, translated=translated)
    _require_compatible(
        cluster, schedule, train_fn, shard_bytes, snapshot_every_s, on_snapshot, data, until_samples
    )
    first = [worker for worker in range(cluster.workers) if not cluster.joins_late(worker)]
    losses: list[Loss] = []
    snapshots: list[tuple[float, WeightsSnapshot]] = []
    final: WeightsSnapshot | None = None
    cuts: list[SimCut] = []
    optimizers = tuple(cluster.optimizers)
    recorders = Recorders(
        schedule,
        cluster.workers,
        count,
        seed,
        emulated=cluster.emulated,
        keep=record,
        run_dir=run_dir,
        ticks_per_s=cluster.ticks_per_s(schedule.models, until_s),
    )
    if schedule.auto:
        batch = "balanced"
    if until_updates is not None:
        require_whole("until_updates", until_updates, 1)
        recorders.takers.append(_update_limit(recorders.meter, until_updates, lambda: job.kernel.stop()))
    if until_samples is not None:
        require_whole("until_samples", until_samples, 1)
        recorders.takers.append(_sample_limit(recorders.meter, until_samples, lambda: job.kernel.stop()))
    make_job = partial(
        VirtualJob,
        cluster,
        schedule,
        count,
        seed,
        overlap=overlap == "shards",
        recorders=recorders,
        planner=lambda situation: prospects(situation, simulate),
        wire=wire_format,
    )
    with recorders:
        if train_fn is None:
            recorders.begin()
            sizes = shard_bytes or [
                cluster.size_bytes * (k + 1) // count - cluster.size_bytes * k // count for k in range(count)
            ]
            # The whole size counts as float32 values.
            encoded = {
                codec: [-(-CODECS[codec].encoded_bytes(size) // 4) for size in sizes]
                for codec in wire_format.codecs
            }
            job = make_job(has_epochs=data is not None)
            clockwork = (
                Clockwork(job, math.inf if iterations is None else iterations)
                if data is None
                else DatasetClockwork(job, data, batch)
            )
            job.run(clockwork, lambda worker: NOTHING_TRAINED, [NullStore()] * count, encoded, until_s)
        else:
            from .virtual_training import Training, computed_by

            recorders.takers.append(
                _loss_recorder(losses, lambda: not needs_losses or training.job.knows_loss)
            )
            training = Training(
                lambda: train_fn(*args),
                workers=cluster.workers,
                schedule=schedule,
                seed=seed,
                skips_nan=on_nan == "skip",
                slicing=slicing,
                overlap=overlap,
                shards=count,
                batch=batch,
                joint_batch=joint_batch,
                wire=wire_format,
                observes=mode != "off",
                resumed=resumed,
            )
            with training:
                recorders.begin(computed_by(), translated=translated)
                job = training.job = make_job(
                    slicing=slicing,
                    translated=translated,
                    guard=Guard(mode, skips_nan=on_nan == "skip"),
                    relaxes=translated,
                    resumed=resumed.job if resumed is not None else None,
                    cut_at_s=cut_at_s,
                    marks_outside=translated or schedule.auto,
                )
                stores = training.make_stores(first)
                encoded = wire_format.sizes([store.bounds for store in stores])
                if cluster.size_bytes:
                    total = max(1, sum(encoded["float32"]))
                    encoded = {
                        codec: [cluster.size_bytes * size // total for size in sizes]
                        for codec, sizes in encoded.items()
                    }
                if snapshot_every_s is not None:
                    keep: Callable[[float, WeightsSnapshot], object] = on_snapshot or (
                        lambda time_s, snapshot: snapshots.append((time_s, snapshot))
                    )
                    _take_snapshots(job, training.snapshot, snapshot_every_s, keep)
                good: GoodWeights[WeightsSnapshot] = GoodWeights(job.coordinator.guard.judged)
                if mode == "stop":
                    recorders.takers.append(_good_weights_keeper(good, training.snapshot))
                try:
                    job.run(training, training.model_of, stores, encoded, until_s)
                except RunFailedError as error:
                    if error.process == DIVERGED:
                        _save_good_weights(good.good, run_dir, error)
                    raise
                final = training.snapshot()
                cuts = training.cuts
                optimizers = tuple(each.name for each in training.model.optimizers)
    meter, kernel = recorders.meter, job.kernel
    most_used = job.coordinator.data.most_used_order()
    end_ticks = kernel.now_ticks if job.cut_off_ticks is None else job.cut_off_ticks
    result = SimResult(
        sync=str(schedule),
        hyperparameters=None if train_fn is None else hyperparameters,
        wire=str(wire_format),
        seed=seed,
        servers=cluster.servers,
        shards=count,
        shard_bytes=tuple(job.shard_bytes["float32"]),
        push_bytes=tuple(job.shard_bytes[wire_format.gradients]),
        pull_bytes=tuple(job.shard_bytes[wire_format.codec_of_weights(common=schedule.lockstep)]),
        finished_s=tuple(worker.finished_s for worker in job.workers),
        measures=meter.measures(job.cut_off_ticks),
        time_use=time_use(
            meter.presences(job.cut_off_ticks),
            job.coordinator.time_ledger.totals(end_ticks),
            kernel.ticks_per_s,
        ),
        staleness=dict(sorted(meter.staleness.items())),
        bytes_by_kind=dict(job.bytes_sent),
        events=kernel.happened,
        faults=job.coordinator.faults,
        noticed=job.coordinator.findings,
        balanced=most_used is not None and most_used[0].balanced,
        choices=job.coordinator.auto.choices if job.coordinator.auto is not None else [],
        emulated=cluster.emulated,
        optimizers=optimizers,
        recording=recorders.recording,
        run_dir=Path(run_dir).absolute() if run_dir is not None else None,
        state_dict=final.state_dict if final is not None else None,
        losses=sorted(losses, key=lambda loss: (loss.time_s, loss.worker)) if final is not None else None,
        history=MetricHistory(job.coordinator.history.metrics()),
        snapshots=snapshots,
        cuts=cuts,
    )
    recorders.summarize(result.summary)
    return result


def _loss_recorder(losses: list[Loss], goes_on: Callable[[], bool]) -> TakeRecord:
    """Return a function that appends the loss of an iteration to `losses`, if the iteration has a loss.

    `goes_on` says whether the run may go on without a loss. If `goes_on` returns False after five iterations in which a
    worker has reported no loss, the function raises `UsageError`.
    """

    def take(worker: int, record: IterationRecord) -> None:
        if record.loss is not None:
            losses.append(Loss(record.pushed_s, worker, record.iteration, record.loss))
        elif record.iteration + 1 >= ITERATIONS_WITHOUT_LOSS and not goes_on():
            raise UsageError(
                f"worker {worker} has reported no loss in its first {ITERATIONS_WITHOUT_LOSS} iterations. Call "
                "paceline.log(loss=loss) before each step(), or step(closure) with a closure that returns the loss."
            )

    return take


def _update_limit(meter: Meter, most: int, stop: Callable[[], None]) -> TakeRecord:
    """Return a function that stops the run after an iteration if shard 0 has had `most` updates."""
    shard = meter.state.shards[0]

    def check(worker: int, record: IterationRecord) -> None:
        if shard.updates >= most:
            stop()

    return check


def _sample_limit(meter: Meter, most: int, stop: Callable[[], None]) -> TakeRecord:
    """Return a function that stops the run after an iteration if the pushes to shard 0 contain `most` samples.

    If no samples have been counted after five iterations of a worker, the function raises `UsageError`.
    """
    shard = meter.state.shards[0]

    def check(worker: int, record: IterationRecord) -> None:
        pushed = shard.samples + shard.dropped_samples
        if pushed >= most:
            stop()
        elif not pushed and record.iteration + 1 >= ITERATIONS_WITHOUT_SAMPLES:
            raise UsageError(
                f"the run ends after {most} samples, but none were counted in the first {ITERATIONS_WITHOUT_SAMPLES} "
                f"iterations of worker {worker}. Distribute the loader with paceline.distribute, call step(samples=n), "
                "or limit the seconds or the updates instead."
            )

    return check


def _good_weights_keeper(
    good: GoodWeights[WeightsSnapshot], take: Callable[[], WeightsSnapshot]
) -> TakeRecord:
    """Return a function that, after an iteration, takes a snapshot that may become the last good weights."""

    def keep(worker: int, record: IterationRecord) -> None:
        if good.wanted:
            good.take(take())

    return keep


def _save_good_weights(
    good: WeightsSnapshot | None, run_dir: str | Path | None, failure: RunFailedError
) -> None:
    """Save the last good weights of a run that its guard has stopped, and note where they are."""
    if good is not None and run_dir is not None:
        path = good.save(Path(run_dir, "weights.safetensors"))
        failure.add_note(f"the last good weights, of update {max(good.versions)}, were saved to {path}")


def _take_snapshots(
    job: VirtualJob,
    take: Callable[[], WeightsSnapshot],
    every_s: float,
    keep: Callable[[float, WeightsSnapshot], object],
) -> None:
    """Pass the time and a snapshot to `keep` at every multiple of `every_s`. If `keep` returns True, stop the run."""
    ticks: Iterator[int] = itertools.count(1)

    def tick() -> None:
        if keep(job.kernel.now_s, take()):
            job.kernel.stop()
        elif job.goes_on:
            job.kernel.in_background(job.kernel.in_ticks(next(ticks) * every_s), tick)

    job.kernel.in_background(0, tick)


def _require_compatible(
    cluster: Cluster,
    schedule: Schedule,
    train_fn: object,
    shard_bytes: object,
    snapshot_every_s: float | None,
    on_snapshot: object,
    data: Dataset | None,
    until_samples: int | None,
) -> None:
    """Raise `ConfigurationError` for arguments that cannot be used with, or without, `train_fn`."""
    if data is not None:
        if train_fn is not None:
            raise ConfigurationError(
                "data and train_fn are both given, but a training function distributes its own data. Omit one of "
                "them."
            )
        require_enough_data(data, cluster, schedule)
    if train_fn is None:
        if snapshot_every_s is not None or on_snapshot is not None:
            raise ConfigurationError(
                "snapshot_every_s or on_snapshot is given without train_fn, but without training there are no "
                "weights. Give train_fn, or omit these arguments."
            )
        if until_samples is not None and data is None:
            raise ConfigurationError(
                f"until_samples is {until_samples!r}, but without data or train_fn no samples are counted. Give one of "
                "them, or omit until_samples."
            )
        return
    if shard_bytes is not None:
        raise ConfigurationError(
            "shard_bytes and train_fn are both given, but the trained model determines the sizes of the shards. Omit "
            "shard_bytes."
        )
    if on_snapshot is not None and snapshot_every_s is None:
        raise ConfigurationError(
            "on_snapshot is given without snapshot_every_s, so it would never be called. Give both arguments."
        )
    if snapshot_every_s is not None and not 1e-9 <= snapshot_every_s < math.inf:
        raise ConfigurationError(
            f"snapshot_every_s is {snapshot_every_s:g}, expected a number of seconds >= 1e-9."
        )
    if all(cluster.joins_late(worker) for worker in range(cluster.workers)):
        raise ConfigurationError(
            "every worker joins late, but with train_fn at least one worker must be present from the beginning, to "
            "provide the initial weights."
        )


def _require_sound(
    cluster: Cluster,
    iterations: int | None,
    seed: int,
    until_s: Seconds,
    shards: int | None,
    shard_bytes: Sequence[int] | None,
    settings: Mapping[str, object],
    *,
    ends: bool,
) -> int:
    """Check arguments of `simulate`, and return the number of shards."""
    if not isinstance(cluster, Cluster):
        raise ConfigurationError(
            f"cluster is {cluster!r}, expected a paceline.Cluster, for example Cluster(compute_s=[1.0, 1.0, 3.0])."
        )
    if iterations is not None:
        require_whole("iterations", iterations, 1)
    if not isinstance(until_s, int | float | Fraction) or not until_s > 0:
        raise ConfigurationError(f"until_s is {until_s!r}, expected a number of seconds > 0.")
    if math.isinf(until_s) and not ends:
        raise ConfigurationError(
            "iterations is None and until_s is not given, so the run would never end. Give at least one of them."
        )
    count = shards if shards is not None else len(shard_bytes) if shard_bytes is not None else cluster.servers
    if isinstance(count, bool) or not isinstance(count, int) or count < cluster.servers:
        raise ConfigurationError(
            f"shards is {count!r} and servers is {cluster.servers}, but each server needs at least one shard."
        )
    if shard_bytes is not None and len(shard_bytes) != count:
        raise ConfigurationError(
            f"shard_bytes has {len(shard_bytes)} sizes for {count} shards, expected one size per shard."
        )
    for size in shard_bytes or ():
        require_whole("a size in shard_bytes", size, 0)
    require_whole("seed", seed, 0)
    for name, value in settings.items():
        SETTINGS[name].value(value)
    return count


# -- What stands in place of the tensors of a shard, in a simulation that does not train ---------------------


class NullStore:
    """A `core.requests.ShardStore` without tensors."""

    def put(self, *_: Any, **__: Any) -> None:
        pass

    apply = overwrite = discard = preserve = put

    def squared_norm(self, pushes: Sequence[tuple[int, int]], scales: Sequence[float]) -> float:
        return 0.0


# -- Estimates how fast a run would be under other sync models, from observations. See `paceline.core.auto`
#
# The observed cycles of the workers are turned into a cluster. A cycle is a computation with its transfers. The usual
# difference between a worker's cycles and its computations becomes the latency of its link. The rest of each cycle
# becomes a compute time. Then each candidate is simulated on this cluster for some epochs of the run's data. The cycles
# are used in the order in which they were observed, so pauses and other changes are as frequent as in the run.

LENGTH = 64  # approximate number of iterations of each worker that are simulated
RECENT = 32  # number of latest cycles and computations whose medians are compared
LEAST_COMPUTED = 8  # with fewer known computations, transfers count as part of the compute times
NEGLIGIBLE = 0.02  # share of a cycle below which its transfers are noise

Simulate = Callable[..., SimResult]
"""The type of the function `simulate`."""


def prospects(situation: Situation, simulate: Simulate) -> list[Prospect]:
    """Return the speed of each candidate, except for candidates that cannot be simulated."""
    found = []
    for sync in situation.syncs:
        with contextlib.suppress(PacelineError):  # a candidate that cannot be simulated is left out
            found.append(Prospect(sync, _speed(situation, sync, simulate)))
    return found


def cluster_of(situation: Situation) -> Cluster:
    """Return a cluster that describes the machines of a run."""
    times, shares, links = [], [], {}
    for worker, (cycles, computed) in enumerate(zip(situation.cycles, situation.computed, strict=True)):
        transfer_s = _transfer_s(cycles, computed)
        without = [
            (None if samples < 0 else samples, max(0.0, seconds - transfer_s)) for samples, seconds in cycles
        ]
        sized = situation.balanced or situation.joint
        recorded, share = compute_times(without, situation.batch_size if sized else None)
        times.append(recorded)
        shares.append(min(1.0, max(0.0, share)))
        links[worker] = Link(to_server_s=transfer_s / 2, from_server_s=transfer_s / 2)
    return Cluster(compute_s=times, fixed_share=shares, links=links)


def _transfer_s(cycles: Sequence[tuple[int, float]], computed: Sequence[tuple[int, float]]) -> float:
    """Return how much longer a worker's cycles usually take than its computations, in seconds."""
    if len(computed) < LEAST_COMPUTED:
        return 0.0
    cycle_s = median(seconds for _, seconds in cycles[-RECENT:])
    transfer_s = cycle_s - median(seconds for _, seconds in computed[-RECENT:])
    return transfer_s if transfer_s > NEGLIGIBLE * cycle_s else 0.0


def _speed(situation: Situation, sync: str, simulate: Simulate) -> float:
    """Return the applied samples per second, or gradients if the number of samples is unknown."""
    cluster = cluster_of(situation)
    if situation.samples is None:
        result = simulate(cluster, sync, LENGTH)
        applied = sum(result.measures.iterations.values()) - result.measures.dropped_pushes
        return applied / result.time_s if result.time_s else 0.0
    shown = LENGTH * situation.batch_size * (1 if situation.joint else cluster.workers)
    samples = min(situation.samples, shown)
    data = Dataset(
        samples=samples,
        batch_size=situation.batch_size,
        epochs=math.ceil(shown / samples),
        split=situation.split,
        pushes_per_batch=situation.pushes_per_batch,
        joint_batch=situation.joint,
    )
    batch: BatchSizing = "balanced" if situation.balanced else "equal"
    return simulate(cluster, sync, None, data=data, batch=batch).measures.samples_per_s
