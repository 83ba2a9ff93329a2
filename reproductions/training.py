"""Training runs for the papers' figures, on simulated clusters, evaluated at regular intervals of virtual time.

A run trains a `Problem`: a paper's network on published data, or a stand-in for both. Compute times,
network bandwidth and message sizes are taken from the papers.

Runs that differ only in their learning rates and seeds are trained together if the problem allows this (see
`reproductions.ensembles`). In this case, the result of a run depends on its seed, but the times at which its workers
push are the same for `SHARING` consecutive seeds.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import ConfigurationError
from paceline.lab.pool import ProcessPool, Tell
from paceline.shard.store import WeightsSnapshot
from paceline.sim import Cluster, simulate
from paceline.studies.statistics import Ratio, Time, ratio_of_times
from paceline.sync.events import PushReceived
from paceline.train.data import distribute
from paceline.train.optimizer import DistributedOptimizer

from .clusters import one_server
from .datasets import Images
from .ensembles.networks import StackedNetwork
from .ensembles.schedules import Epochs, Schedule, record
from .ensembles.training import Setting, train
from .exhibit import Options
from .kept_runs import KeptRuns, kept_runs, key_of
from .networks import parameter_count
from .problems import DIGITS, OPTIMIZERS, Problem, Protocol, accuracy, mean_loss, problem, size

SHARING = 4
"""Number of consecutive seeds whose runs follow the same schedule."""

MEMORY_BYTES = 2**30
"""Approximate maximum size of the weights that the workers of all runs of an ensemble hold together."""

FEW = 4  # for this number of runs or fewer, starting a process pool takes longer than it saves

NEVER_S = 1e6  # used instead of an infinite time; longer than any run here


class Target(msgspec.Struct, frozen=True):
    """The accuracy or loss that a run should reach."""

    # "accuracy" on the test images, from 0 to 1, or "loss" over the first training images
    measure: Literal["accuracy", "loss"]
    value: float  # smallest accuracy or largest loss that meets the target
    in_a_row: int  # number of consecutive evaluations that must meet the target

    def lack(self, value: float) -> float:
        """Return how far a value is from meeting the target; 0 or less if the value meets it."""
        return self.value - value if self.measure == "accuracy" else value - self.value

    def reached_at(self, values: Sequence[float]) -> int | None:
        """Return the index of the evaluation at which the target was reached, or None."""
        row = 0
        for index, value in enumerate(values):
            row = row + 1 if self.lack(value) <= 0 else 0
            if row == self.in_a_row:
                return index
        return None


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one training run."""

    label: str = ""  # name in figures. Runs with the same label differ only in seed or learning rate.
    cluster: Cluster  # cluster to simulate
    sync: str = ""  # sync model
    target: Target  # target of the run, which also defines what is evaluated
    learning_rate: float = 0.0  # learning rate for SGD
    momentum: float = 0.0  # momentum for SGD
    batch_size: int = 16  # images per worker and iteration
    iterations: int = 1_000_000  # number of iterations of each worker
    seed: int = 0  # random seed for weights, data and times
    every_s: float = 1.0  # virtual seconds between two evaluations
    until_target: bool = True  # True to end the run when it reaches the target
    problem: Problem = DIGITS  # network and images
    weight_decay: float = 0.0  # weight decay of SGD
    milestones: tuple[int, ...] = ()  # epochs after which the learning rate is multiplied by `decay`
    decay: float = 1.0  # factor of the learning rate at each milestone
    optimizer: str = "SGD"  # name of the optimizer in `OPTIMIZERS`. Only runs with SGD are trained together.

    @property
    def together(self) -> bool:
        """True if runs that differ in rates and seeds are trained together."""
        return self.problem.stacked and self.optimizer == "SGD"

    @property
    def parameters(self) -> dict[str, object]:
        """All parameters on which the outcome depends, which are all but the label."""
        values = msgspec.structs.asdict(self) | {"problem": self.problem.name}
        return {name: value for name, value in values.items() if name != "label"}

    @property
    def kind(self) -> str:
        """All parameters but the learning rate and the seed. Runs of one kind may be trained together."""
        return repr({**self.parameters, "learning_rate": None, "seed": None})


class TrainingOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a run. All times are virtual."""

    run: TrainingRun  # parameters of the run
    times_s: list[float]  # times of the evaluations
    values: list[float]  # accuracy or loss at each evaluation
    time_s: float  # time at which the run ended
    gradients: int  # number of pushes by all workers
    restarts: int  # number of computations that were aborted and restarted
    mean_staleness: float  # mean staleness of the gradients, in updates
    bytes_by_kind: dict[str, int]  # kind of message -> number of bytes sent
    pushes_s: list[float]  # times of the pushes, ascending

    @property
    def reached_s(self) -> float:
        """Virtual time at which the target was reached, in seconds; infinity if the target was missed."""
        index = self.run.target.reached_at(self.values)
        return math.inf if index is None else self.times_s[index]

    @property
    def slowness(self) -> float:
        """Time to the target; if it was missed, a far larger number that grows with the final `Target.lack`."""
        lack = min(self.run.target.lack(self.values[-1]), NEVER_S)
        return min(self.reached_s, NEVER_S * (1 + max(0.0, lack)))

    @property
    def time(self) -> Time:
        """The time to the target, which is censored if the target was missed."""
        reached = math.isfinite(self.reached_s)
        return Time(self.reached_s if reached else self.time_s, max(self.time_s, self.times_s[-1]), reached)

    @property
    def iterations(self) -> Time:
        """The number of iterations of all workers to the target, which is censored if the target was missed."""
        reached = math.isfinite(self.reached_s)
        count = self.pushed_until(self.reached_s) if reached else self.gradients
        return Time(float(count), float(self.gradients), reached)

    def pushed_until(self, time_s: float) -> int:
        """Return the number of pushes until `time_s`."""
        return bisect.bisect_right(self.pushes_s, time_s)


def run_all(runs: Sequence[TrainingRun], tell: Tell = lambda what, share: None) -> list[TrainingOutcome]:
    """Execute runs on all cores, but identical runs only once. Return the outcomes in the order of `runs`."""
    kept = kept_runs.get(None) or KeptRuns()
    by_key = {(run.kind, run.learning_rate, run.seed): run for run in runs}
    tasks = _tasks({key: run for key, run in by_key.items() if kept.get(run.parameters) is None})
    for done, (task, outcomes) in enumerate(_executed(tasks), start=1):
        kept.keep({key_of(run.parameters): outcome for run, outcome in zip(task, outcomes, strict=True)})
        tell(task[0].label, done / len(tasks))
    return [TrainingOutcome(run=run, **(kept.get(run.parameters) or {})) for run in runs]


def _executed(tasks: Sequence[Task]) -> Iterator[tuple[Task, list[Fields]]]:
    """Execute tasks, and yield each task with its outcomes when it has ended."""
    problems = {task[0].problem.name: task[0].problem for task in tasks}
    images = {name: problem.images() for name, problem in problems.items()}
    if sum(map(len, tasks)) <= FEW:
        _prepare(images)
        yield from ((task, _execute(task)) for task in tasks)
        return
    with ProcessPool(None, _prepare_process, (images,)) as pool:
        for ended in pool.ended(_execute, tasks):
            if ended.error is not None:
                raise ended.error
            assert ended.result is not None
            yield tasks[ended.number], ended.result


def under_each(run: TrainingRun, schemes: Mapping[str, str], options: Options) -> list[TrainingRun]:
    """Return a run under each sync model with each seed. The labels are the keys of `schemes`."""
    return [
        msgspec.structs.replace(run, label=label, sync=sync, seed=seed)
        for label, sync in schemes.items()
        for seed in range(1 if options.quick else options.seeds)
    ]


def on_data(run: TrainingRun, workload: str, protocol: Protocol, data: Path) -> TrainingRun:
    """Return the run on the paper's own data, with the paper's protocol.

    Args:
        run: the run on a stand-in.
        workload: name of the network and the data in `reproductions.problems.WORKLOADS`.
        protocol: how the paper trains.
        data: folder of the data sets.
    """
    learned = problem(workload, data)
    samples = protocol.batch_size * run.cluster.workers
    return msgspec.structs.replace(
        run,
        problem=learned,
        learning_rate=protocol.rate,
        batch_size=protocol.batch_size,
        iterations=max(1, round(protocol.epochs * learned.train_size / samples)),
        milestones=protocol.milestones,
        decay=protocol.decay,
        optimizer=protocol.optimizer,
    )


def speed_up(
    outcomes: Sequence[TrainingOutcome],
    label: str,
    reference: str,
    measure: Callable[[TrainingOutcome], Time] = lambda outcome: outcome.time,
) -> Ratio:
    """Return the speed-up of a label over a reference: the ratio of their times to the target, with an interval."""
    ours, others = (
        [measure(each) for each in outcomes if each.run.label == name] for name in (label, reference)
    )
    # A run that reaches its target ends early. Here, all runs have the end of a run that misses its target.
    end = max(time.end for time in (*ours, *others))
    ours, others = ([time._replace(end=end) for time in times] for times in (ours, others))
    return ratio_of_times(others, ours)


def medians(
    outcomes: Sequence[TrainingOutcome], measure: Callable[[TrainingOutcome], float]
) -> dict[str, float]:
    """For each label, return the median of a measure over the runs with this label."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.run.label, []).append(measure(outcome))
    return {label: median(values) for label, values in found.items()}


# -- execution ---------------------------------------------------------------------------------------------------------

Task = list[TrainingRun]
"""One run, or runs that are trained together: all combinations of some rates and seeds."""

Fields = dict[str, Any]
"""The fields of a `TrainingOutcome`, without its run."""

_images: Mapping[
    str, Images
]  # name of a problem -> its images; set by `_prepare`, once in each process of the pool


def _prepare(images: Mapping[str, Images]) -> None:
    global _images
    _images = images


def _prepare_process(images: Mapping[str, Images]) -> None:
    """Prepare a process of the pool, and silence the warning that a diverging run would log at each push."""
    _prepare(images)
    logging.getLogger("paceline.train.training").setLevel(logging.ERROR)


def _tasks(runs: Mapping[tuple[str, float, int], TrainingRun]) -> list[Task]:
    """Divide runs into tasks. Runs of one kind share a task if their weights fit into memory."""
    rates: dict[str, set[float]] = {}
    for kind, rate, _ in runs:
        rates.setdefault(kind, set()).add(rate)
    together: dict[object, Task] = {}
    for key, run in runs.items():
        if run.together:
            with torch.device("meta"):
                size_bytes = 4 * parameter_count(run.problem.network())
            fitting = max(1, MEMORY_BYTES // (size_bytes * (run.cluster.workers + 2)) // SHARING)
            part = sorted(rates[run.kind]).index(run.learning_rate) // fitting
            together.setdefault((run.kind, run.seed // SHARING, part), []).append(run)
        else:
            together[key] = [run]
    return list(together.values())


def _execute(task: Task) -> list[Fields]:
    """Return the outcomes of the runs of a task."""
    first = task[0]
    images = _images[first.problem.name]
    if size(images.train) < first.batch_size:
        raise ConfigurationError(
            f"{first.problem.name}: {size(images.train)} training images are fewer than a batch of "
            f"{first.batch_size}. Unpack the whole data set."
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each core has a task of its own, and sums do not depend on the number of cores
    try:
        return (
            _train_together(task, images) if first.together else [_train_alone(run, images) for run in task]
        )
    finally:
        torch.set_num_threads(threads)


def _train_together(task: Task, images: Images) -> list[Fields]:
    """Train with every learning rate and every seed along one schedule."""
    first = task[0]
    rates, seeds = (sorted({getattr(run, name) for run in task}) for name in ("learning_rate", "seed"))
    schedule = record(
        one_server(first.cluster),
        first.sync,
        Epochs(size(images.train), first.batch_size),
        seeds[0] // SHARING,
        iterations=first.iterations,
    )
    stacked = stacked_network(first, images)
    settings = [Setting(rate, "raw") for rate in rates]
    times_s: list[float] = []
    values: list[np.ndarray] = []  # of each evaluation; shape: (rates, seeds)
    every = (first.every_s * k for k in itertools.count(1))
    for evaluation in train(stacked, schedule, settings, seeds, every):
        times_s.append(evaluation.time_s)
        values.append(evaluation.quality)
        of_runs = np.stack(values, axis=-1)
        curves = of_runs.reshape(-1, len(values)).tolist()
        if first.until_target and None not in map(first.target.reached_at, curves):
            break
    return [
        _outcome(
            run, schedule, times_s, of_runs[rates.index(run.learning_rate), seeds.index(run.seed)].tolist()
        )
        for run in task
    ]


def stacked_network(run: TrainingRun, images: Images) -> StackedNetwork:
    """Return the problem of a run as functions of stacked parameters."""
    loss, tested = run.problem.loss, images.test
    quality = _share_right
    if run.target.measure == "loss":
        tested = TensorDataset(*images.train[: run.problem.loss_count])
        quality = loss
    return StackedNetwork(
        run.problem.network,
        images.train,  # type: ignore[arg-type]  # of a problem that can be stacked, a TensorDataset
        tested,  # type: ignore[arg-type]
        loss,
        quality,
        momentum=run.momentum,
        weight_decay=run.weight_decay,
        milestones=run.milestones,
        decay=run.decay,
    )


def _share_right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(dim=1) == labels).float().mean()


def _outcome(run: TrainingRun, schedule: Schedule, times_s: list[float], values: list[float]) -> Fields:
    """Return the outcome of a run that follows a schedule, up to the target if the run ends at the target."""
    values = [value if math.isfinite(value) else math.inf for value in values]
    reached = run.target.reached_at(values) if run.until_target else None
    count = len(values) if reached is None else reached + 1
    time_s = schedule.end_s if reached is None else times_s[reached]
    pushes_s = [
        at_s
        for event, at_s in zip(schedule.events, schedule.times_s, strict=True)
        if isinstance(event, PushReceived)
    ]
    until = bisect.bisect_right(pushes_s, time_s)
    share = until / max(1, len(pushes_s))
    measures = schedule.measures
    return {
        "times_s": times_s[:count],
        "values": values[:count],
        "time_s": time_s,
        "gradients": until,
        "restarts": round(share * measures.restarts),
        "mean_staleness": measures.mean_staleness,
        "bytes_by_kind": {kind: round(share * number) for kind, number in schedule.bytes_by_kind.items()},
        "pushes_s": pushes_s[:until],
    }


def _train_alone(run: TrainingRun, images: Images) -> Fields:
    """Train one run in a simulation of its own."""
    network = run.problem.network()  # evaluated with the weights of each snapshot
    times_s: list[float] = []
    values: list[float] = []

    def evaluate(time_s: float, snapshot: WeightsSnapshot) -> bool:
        network.load_state_dict(snapshot.state_dict)
        times_s.append(time_s)
        values.append(_value(network, images, run))
        return run.until_target and run.target.reached_at(values[-run.target.in_a_row :]) is not None

    result = simulate(
        run.cluster,
        run.sync,
        seed=run.seed,
        train_fn=_train,
        args=(images, run),
        on_nan="skip",
        hyperparameters="raw",
        snapshot_every_s=run.every_s,
        on_snapshot=evaluate,
    )
    measures = result.measures
    return {
        "times_s": times_s,
        "values": values,
        "time_s": result.time_s,
        "gradients": sum(measures.iterations.values()),
        "restarts": measures.restarts,
        "mean_staleness": measures.mean_staleness,
        "bytes_by_kind": result.bytes_by_kind,
        "pushes_s": [loss.time_s for loss in result.losses or []],
    }


def _train(images: Images, run: TrainingRun) -> None:
    """Train as one worker of a run."""
    torch.manual_seed(run.seed)
    network = run.problem.network()
    optimizer = DistributedOptimizer(
        OPTIMIZERS[run.optimizer](
            network.parameters(), lr=run.learning_rate, momentum=run.momentum, weight_decay=run.weight_decay
        ),
        model=network,
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, run.milestones, run.decay)
    part = distribute(DataLoader(images.train, run.batch_size, shuffle=True, drop_last=True))

    def batches() -> Iterator[Any]:
        while True:
            yield from part
            if run.milestones:
                scheduler.step()

    for x, y in itertools.islice(batches(), run.iterations):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = run.problem.loss(network(x), y)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def _value(network: nn.Module, images: Images, run: TrainingRun) -> float:
    """Return the accuracy, or the loss over the first training images; infinity if it is not finite."""
    if run.target.measure == "accuracy":
        return accuracy(network, images.test)
    loss = mean_loss(network, images.train, run.problem.loss_count, run.problem.loss)
    return loss if math.isfinite(loss) else math.inf
