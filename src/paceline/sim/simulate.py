"""`simulate`: a run in virtual time, of whatever depth, and what came of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.layout import Layout
from ..core.model_spec import ModelSpec, OptimizerSpec
from ..errors import ConfigurationError, unknown_name
from ..runtime.job import ON_NAN, OVERLAPS, SLICINGS
from ..sync import SyncModel
from ..sync.schedule import Schedule, read_schedule
from ..trace.records import IterationRecord
from .cluster import Cluster, require_whole
from .job import Job, NullStore
from .kernel import SECOND_NS, nanoseconds
from .recording import Recorders, TakeRecord
from .result import Loss, SimResult

if TYPE_CHECKING:
    from ..runtime.reader import WeightsSnapshot

__all__ = ["simulate"]

NOTHING_TRAINED = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())


def simulate(
    cluster: Cluster,
    sync: str | SyncModel | Sequence[SyncModel] | Schedule = "bsp",
    iterations: int | None = 100,
    seed: int = 0,
    *,
    until_s: float = math.inf,
    train_fn: Callable[..., object] | None = None,
    args: Sequence[object] = (),
    shards: int | None = None,
    shard_bytes: Sequence[int] | None = None,
    slicing: str = "even",
    overlap: str = "shards",
    on_nan: str = "stop",
    snapshot_every_s: float | None = None,
    on_snapshot: Callable[[float, WeightsSnapshot], bool] | None = None,
    record: bool = False,
    run_dir: str | Path | None = None,
) -> SimResult:
    """Run a job in virtual time, on a cluster that need not exist.

    Without `train_fn` nothing is computed: only times pass, each worker for so many iterations. With it, every
    worker runs that function, as with `paceline.launch`, to its end: real gradients on real data, computed one after
    another in the order in which virtual time says that they happen.

    Args:
        cluster: the machines.
        sync: as for `paceline.launch`.
        iterations: of each worker, where nothing is trained; None to go on until the time is up.
        seed: of the run: of all that chance decides.
        until_s: virtual time at which to stop.
        train_fn: trains, with a `DistributedOptimizer` and `distribute`.
        args: what it is called with.
        shards: how many slices the parameters are cut into; by default one for each server.
        shard_bytes: the size of each, where they are not even; only where nothing is trained.
        slicing: as for `paceline.launch`, with `train_fn`.
        overlap: "shards": each answers for itself; "off": nobody pulls until everybody has pushed everything.
        on_nan: as for `paceline.launch`.
        snapshot_every_s: with `train_fn`, keep the weights of every so many seconds.
        on_snapshot: is given these instead, each with its virtual time, and none is kept; if it returns True, the run
            ends there.
        record: keep traces and records in memory, for `SimResult.trace`, `.records` and `.save`. They take about
            a kilobyte per iteration, worker and shard; without them memory does not grow with the length of a run,
            except for the losses and snapshots of a `train_fn`.
        run_dir: a new directory to which traces and records are written while the run goes on, and a summary at its
            end, as a live run does; `SimResult.trace` and `.records` then read them from there.

    Raises:
        ConfigurationError: bad input, or a run directory that cannot be written; nothing was computed.
        RunFailedError: a training function failed, or everybody waits and nothing will release anybody.

    Example:
        >>> result = simulate(Cluster(compute_s=[1.0, 3.0]), "bsp", iterations=4)
        >>> result.time_s, result.updates, result.waiting_share
        (12.0, 4, 0.3333333333333333)
    """
    schedule, count = _checked(
        cluster, sync, iterations, seed, until_s, shards, shard_bytes, slicing, overlap, on_nan
    )
    _require_apart(cluster, train_fn, shard_bytes, snapshot_every_s, on_snapshot)
    first = [worker for worker in range(cluster.workers) if not cluster.joins_late(worker)]
    history: list[Loss] = []
    snapshots: list[tuple[float, WeightsSnapshot]] = []
    final: WeightsSnapshot | None = None
    recorders = Recorders(schedule, cluster.workers, count, seed, keep=record, run_dir=run_dir)
    with recorders:
        if train_fn is None:
            recorders.begin()
            sizes = shard_bytes or [
                cluster.size_bytes * (k + 1) // count - cluster.size_bytes * k // count for k in range(count)
            ]
            job = Job(
                cluster,
                schedule,
                [NullStore()] * count,
                sizes,
                seed,
                overlap=overlap == "shards",
                recorders=recorders,
            )
            clockwork = _Clockwork(job, math.inf if iterations is None else iterations)
            job.run(clockwork, lambda worker: NOTHING_TRAINED, until_s)
        else:
            from .training import Training, computed_by

            recorders.takers.append(_historian(history))
            training = Training(
                lambda: train_fn(*args),
                workers=cluster.workers,
                schedule=schedule,
                seed=seed,
                skips_nan=on_nan == "skip",
                slicing=slicing,
                overlap=overlap,
                shards=count,
            )
            with training:
                recorders.begin(computed_by())
                stores = training.make_stores(first)
                sizes = [store.bounds.size_bytes for store in stores]
                if cluster.size_bytes:
                    sizes = [cluster.size_bytes * size // max(1, sum(sizes)) for size in sizes]
                job = Job(
                    cluster,
                    schedule,
                    stores,
                    sizes,
                    seed,
                    overlap=overlap == "shards",
                    recorders=recorders,
                    slicing=slicing,
                )
                training.job = job
                if snapshot_every_s is not None:
                    _take_snapshots(
                        job, training.snapshot, snapshot_every_s, on_snapshot or _keeper(snapshots)
                    )
                job.run(training, training.model_of, until_s)
                final = training.snapshot()
    result = SimResult(
        sync=str(schedule),
        seed=seed,
        servers=cluster.servers,
        shards=count,
        finished_s=tuple(worker.finished_s for worker in job.workers),
        measures=recorders.meter.measures(job.cut_off_s),
        staleness=dict(sorted(recorders.meter.staleness.items())),
        bytes_by_kind=dict(job.bytes_sent),
        events=job.kernel.happened,
        computed_s=sum(worker.computed_ns for worker in job.workers) / SECOND_NS,
        wasted_s=sum(worker.wasted_s for worker in job.workers),
        faults=job.faults,
        recording=recorders.recording,
        run_dir=Path(run_dir).absolute() if run_dir is not None else None,
        state_dict=final.state_dict if final is not None else None,
        history=sorted(history, key=lambda loss: (loss.time_s, loss.worker)) if final is not None else None,
        snapshots=snapshots,
    )
    recorders.summarize(result.summary)
    return result


class _Clockwork:
    """Workers that compute nothing: time passes, so many times. See `paceline.sim.job.Driver`."""

    def __init__(self, job: Job, iterations: float) -> None:
        self._job = job
        self._iterations = iterations

    def joined(self, worker: int) -> None:
        self.answered(worker)

    def answered(self, worker: int) -> None:
        if self._job.workers[worker].core.iteration < self._iterations:
            self._job.compute(worker)
        else:
            self._job.finish(worker)

    def computed(self, worker: int) -> None:
        self._job.push(worker)

    def aborted(self, worker: int) -> None:
        self._job.pull_again(worker)

    def sent(self, worker: int, shard: int) -> None:
        pass

    def lost(self, worker: int) -> None:
        pass


def _historian(history: list[Loss]) -> TakeRecord:
    """Return a function that appends the loss of every iteration that has one."""

    def take(worker: int, record: IterationRecord) -> None:
        if record.loss is not None:
            history.append(Loss(record.pushed_s, worker, record.iteration, record.loss))

    return take


def _keeper(
    snapshots: list[tuple[float, WeightsSnapshot]],
) -> Callable[[float, WeightsSnapshot], bool]:
    """What keeps snapshots, and never has enough."""

    def keep(time_s: float, snapshot: WeightsSnapshot) -> bool:
        snapshots.append((time_s, snapshot))
        return False

    return keep


def _take_snapshots(
    job: Job,
    take: Callable[[], WeightsSnapshot],
    every_s: float,
    keep: Callable[[float, WeightsSnapshot], bool],
) -> None:
    """Have the weights kept at every multiple of an interval, until the last worker has left or `keep` says True."""
    ticks: Iterator[int] = itertools.count(1)

    def tick() -> None:
        if keep(job.kernel.now_s, take()):
            job.kernel.stop()
        elif job.goes_on:
            job.kernel.at(nanoseconds(next(ticks) * every_s), tick)

    job.kernel.at(0, tick)


def _require_apart(
    cluster: Cluster,
    train_fn: object,
    shard_bytes: object,
    snapshot_every_s: float | None,
    on_snapshot: object,
) -> None:
    """Refuse what does not go together with training, or with times only."""
    if train_fn is None:
        if snapshot_every_s is not None or on_snapshot is not None:
            raise ConfigurationError(
                "snapshots are asked for without train_fn: there are no weights to look at."
            )
        return
    if shard_bytes is not None:
        raise ConfigurationError(
            "shard_bytes is given, and train_fn too: what is trained has a size of its own."
        )
    if on_snapshot is not None and snapshot_every_s is None:
        raise ConfigurationError(
            "on_snapshot is given without snapshot_every_s, so it would never be called."
        )
    if snapshot_every_s is not None and not 1e-9 <= snapshot_every_s < math.inf:
        raise ConfigurationError(
            f"snapshot_every_s is {snapshot_every_s:g}, expected a number of seconds >= 1e-9."
        )
    if all(cluster.joins_late(worker) for worker in range(cluster.workers)):
        raise ConfigurationError(
            "every worker joins late: with train_fn, one must be there at the beginning, to give the first weights."
        )


def _checked(
    cluster: Cluster,
    sync: str | SyncModel | Sequence[SyncModel] | Schedule,
    iterations: int | None,
    seed: int,
    until_s: float,
    shards: int | None,
    shard_bytes: Sequence[int] | None,
    slicing: str,
    overlap: str,
    on_nan: str,
) -> tuple[Schedule, int]:
    """The schedule and the number of shards, when everything has been checked."""
    if not isinstance(cluster, Cluster):
        raise ConfigurationError(
            f"cluster is {cluster!r}, expected a paceline.Cluster, for example Cluster(compute_s=[1.0, 1.0, 3.0])."
        )
    if iterations is not None:
        require_whole("iterations", iterations, 1)
    if not isinstance(until_s, int | float) or not until_s > 0:
        raise ConfigurationError(f"until_s is {until_s!r}, expected a number of seconds > 0.")
    if iterations is None and math.isinf(until_s):
        raise ConfigurationError("give iterations, or until_s, or both: otherwise this never ends.")
    count = shards if shards is not None else len(shard_bytes) if shard_bytes is not None else cluster.servers
    if isinstance(count, bool) or not isinstance(count, int) or count < cluster.servers:
        raise ConfigurationError(
            f"shards is {count!r} and servers {cluster.servers}: each server needs one at least."
        )
    if shard_bytes is not None and len(shard_bytes) != count:
        raise ConfigurationError(f"shard_bytes has {len(shard_bytes)} sizes for {count} shards.")
    for size in shard_bytes or ():
        require_whole("a size in shard_bytes", size, 0)
    require_whole("seed", seed, 0)
    for name, value, choices in (
        ("overlap", overlap, OVERLAPS),
        ("slicing", slicing, SLICINGS),
        ("on_nan", on_nan, ON_NAN),
    ):
        if value not in choices:
            raise unknown_name(name, value, choices)
    schedule = read_schedule(sync)
    schedule.require_runnable(cluster.workers, count)
    schedule.require_overlap(overlap)
    return schedule, count
