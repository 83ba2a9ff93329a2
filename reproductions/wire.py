"""The cost of the codecs of `--wire` in quality: each run is compared with a float32 run, in virtual time.

Both runs of a pair begin with the same weights and compute gradients from the same batches, in the same order. Codecs
round as in a live run (`paceline.shard.codecs`). All workers share a joint batch. The learning rate falls to 0 in
stages of ten steps. The quality is the mean of the last five of 50 evaluations of the servers' weights. A *cell* has
the runs that differ only in their seeds. Its loss of quality is the mean difference of its pairs: above 0 is worse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

import paceline
from paceline.core.layout import CODECS
from paceline.lab import demo
from paceline.lab.pool import Tell, in_processes, work_off
from paceline.sim import Cluster, Presence

from .ensembles.problems import Orders
from .ensembles.schedules import Batch
from .evidence.batched import AsModule, Weights
from .evidence.language import CONTEXT, ByteTransformer, library_text, sequences
from .exhibit import known, plain_table
from .kept_runs import KeptRuns, key_of
from .result_file import rounded
from .same_accuracy.digits import DigitsCNN, DigitsMLP, digits

WITHOUT_FEEDBACK = "int4 without feedback"
ALL = ("bf16", "int8", "int4", WITHOUT_FEEDBACK, "gradients=int8,weights=int4")
ASP = "gradients=int4,weights=bf16"

PART = 10  # steps with the same learning rate, which are an epoch of the simulated run
EVALUATIONS, LAST = 50, 5
VERDICTS = (
    "met",
    "missed",
    "open",
)  # whether the loss of quality is below the goal; open: within two standard errors of the goal


class Learned(NamedTuple):
    """A network with inputs and targets, and functions of its weights. A quality is accuracy in points, or a loss."""

    data: Sequence[Tensor]
    initial: Callable[[int], Weights]
    loss: Callable[..., Tensor]
    quality: Callable[[Weights], Tensor]


def _digits(kind: type[DigitsMLP | DigitsCNN], samples: int) -> Learned:
    """Learn from few images. With as many as in the demo, too few errors would remain to show the effect of a codec."""
    images = torch.cat([digits().train_images, digits().test_images])
    labels = torch.cat([digits().train_labels, digits().test_labels])
    problem: Any = kind(demo.Digits(images[:samples], labels[:samples], images[samples:], labels[samples:]))
    return Learned(
        [part[0] for part in problem.data([0], Batch(0, 0, samples))],
        problem.initial,
        lambda own, x, y: problem.losses({n: v[None] for n, v in own.items()}, x[None], y[None]).mean(),
        lambda own: 100 * problem.quality({n: v[None] for n, v in own.items()}),
    )


def _text(samples: int) -> Learned:
    problem = ByteTransformer()
    data = sequences(library_text(samples * CONTEXT + 1), CONTEXT)
    return Learned(data, problem.initial, problem.loss, problem.validation)


class Problem(NamedTuple):
    """A network to train, the number of samples, and the number of samples in a joint batch."""

    learned: Callable[[int], Learned]  # all runs of a process share its result
    samples: int
    joint_batch: int
    relative: bool  # True to compare a loss, in percent; False to compare an accuracy, in points
    most: float  # the goal: the largest loss of quality


PROBLEMS = {
    "digits-mlp": Problem(cache(partial(_digits, DigitsMLP)), 600, 128, False, 0.5),
    "digits-cnn": Problem(cache(partial(_digits, DigitsCNN)), 600, 128, False, 0.5),
    "text-gpt": Problem(cache(_text), 15_000, 16, True, 1.0),
}


def _muon(weights: Weights, lr: float, others: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the network, and AdamW for all other weights, as Muon is usually used."""
    matrices = [weights.pop(name) for name in ("attention", "mixed", "wide", "narrow")]
    muon = torch.optim.Muon(matrices, lr, weight_decay=0.0)
    return [muon, torch.optim.AdamW(weights.values(), **others)]


class Optimizer(NamedTuple):
    """An optimizer and its settings. The first learning rates are near the best ones of a single process."""

    make: Callable[..., list[torch.optim.Optimizer]]
    settings: dict[str, Any]
    rates: dict[str, float]  # first learning rate for each problem
    only: Mapping[str, Sequence[str]] = {}  # name in `PLACES` -> the codecs to try there; empty for all
    step_s: float = 1.0  # virtual time of a step; a second optimizer's part takes as long as a joint batch


ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
OPTIMIZERS = {
    "sgd": Optimizer(
        lambda weights, **settings: [torch.optim.SGD(weights.values(), **settings)],
        {"momentum": 0.9},
        {"digits-mlp": 0.2, "digits-cnn": 0.1, "text-gpt": 0.2},
    ),
    "adamw": Optimizer(
        lambda weights, **settings: [torch.optim.AdamW(weights.values(), **settings)],
        ADAMW,
        dict.fromkeys(PROBLEMS, 0.01),
    ),
    "muon": Optimizer(
        _muon, {"others": ADAMW | {"lr": 0.01}}, {"text-gpt": 0.04}, {"4 workers": [*ALL[1:3], ALL[-1]]}, 5.0
    ),
}


class Place(NamedTuple):
    """A cluster, and the codecs with which its workers train. Its times are those of whole joint batches."""

    cluster: Cluster
    codecs: Sequence[str] = ("int8", "int4")
    steps: int = 200
    sync: str = "bsp"
    batch: Any = "equal"
    only: tuple[str, str] | None = None  # a problem and an optimizer


FOUR = Cluster([4.0] * 4)  # a step takes a second
REPLACED = Cluster([4.0] * 5, presence={3: Presence(lost_at_s=100.5), 4: Presence(joins_at_s=110.25)})
PLACES = {
    "4 workers": Place(FOUR, ALL),
    "16 workers": Place(Cluster([16.0] * 16), ALL),
    "speeds 3:3:3:1, balanced": Place(Cluster([4.0, 4.0, 4.0, 12.0]), batch="balanced"),
    "one of 4 replaced": Place(REPLACED),
    "4 workers, asp": Place(FOUR, [ASP], sync="asp"),
    "4 workers, 5000 steps": Place(FOUR, steps=5000, only=("digits-mlp", "sgd")),
}


class Run(NamedTuple):
    """A training run, given by the names of its parts. The run with the seed 0 also represents all runs of its cell."""

    problem: str
    optimizer: str
    place: str
    codec: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{', '.join(self[:4])}, seed {self.seed}"

    @property
    def parameters(self) -> object:
        """The parameters that determine the result, apart from the code."""
        settings, rates = OPTIMIZERS[self.optimizer][1:3]
        learned = *PROBLEMS[self.problem][1:3], rates[self.problem], settings
        return *self, *learned, *PLACES[self.place][2:5]

    @property
    def cost_s(self) -> float:
        """Approximate processor time, in seconds: 2 ms for each gradient."""
        return 0.002 * PLACES[self.place].steps * PLACES[self.place].cluster.workers


def cells(problems: Sequence[str] = (), codecs: Sequence[str] = ()) -> list[Run]:
    """Return the cells with these problems and codecs; [] means all of them. An unknown name is an error."""
    problems, codecs = known("problem", problems, PROBLEMS), known("codec", codecs, [*ALL, ASP])
    return [
        Run(problem, optimizer, name, codec)
        for name, place in PLACES.items()
        for problem in problems
        for optimizer, trained in OPTIMIZERS.items()
        for codec in place.codecs
        if codec in codecs and place.only in (None, (problem, optimizer))
        if problem in trained.rates and codec in (trained.only.get(name, ()) if trained.only else codecs)
    ]


def missing(wanted: Sequence[Run], seeds: int, path: Path) -> list[Run]:
    """Return the runs of these cells that are missing in a file: first, all cells with one seed, then with the next."""
    kept = KeptRuns(path)
    both = dict.fromkeys(cell._replace(codec=codec) for cell in wanted for codec in ("float32", cell.codec))
    runs = (run._replace(seed=seed) for seed in range(seeds) for run in both)
    return [run for run in runs if kept.get(run.parameters) is None]


def make(runs: Sequence[Run], path: Path, processes: int, tell: Tell) -> None:
    """Train in several processes, and append each result to a file as soon as its run has ended."""
    kept = KeptRuns(path)

    def keep(run: Run, outcome: dict[str, Any]) -> None:
        kept.keep({key_of(run.parameters): outcome})

    with in_processes(processes) as pool:
        for failure in work_off(train, runs, keep, tell, pool=pool, cost_of=lambda run: run.cost_s):
            raise failure.error


def found(wanted: Sequence[Run], seeds: int, path: Path) -> dict[Run, tuple[float, float, str]]:
    """Return the loss of quality of each cell with two or more pairs of runs: mean, standard error, and verdict."""
    kept, results = KeptRuns(path), {}
    for cell in wanted:
        problem, lost = PROBLEMS[cell.problem], []
        for seed in range(seeds):
            pair = [cell._replace(codec=codec, seed=seed).parameters for codec in ("float32", cell.codec)]
            values = [fmean(each["values"]) for run in pair if (each := kept.get(run)) is not None]
            if len(values) == 2:
                exact, coded = values
                lost.append(100 * (coded / exact - 1) if problem.relative else exact - coded)
        if len(lost) > 1:
            error = stdev(lost) / math.sqrt(len(lost)) if math.isfinite(sum(lost)) else 0.0
            more = fmean(lost) - problem.most
            results[cell] = fmean(lost), error, VERDICTS[2 if abs(more) <= 2 * error else more > 0]
    return results


def result_tables(results: Mapping[Run, tuple[float, float, str]]) -> list[Table]:
    """Return a table for each problem: a row for each name in `PLACES` and optimizer, a column for each codec."""
    tables = []
    for name in dict.fromkeys(cell.problem for cell in results):
        unit = "increase of the loss in percent" if PROBLEMS[name].relative else "points of accuracy lost"
        title = f"{unit} on {name}, mean ± standard error; the goal is at most {PROBLEMS[name].most:g}"
        used = {cell.codec for cell in results if cell.problem == name}
        codecs = [codec for codec in (*ALL, ASP) if codec in used]
        headings = [codec.replace(",", ",\n").replace(" ", "\n") for codec in codecs]
        tables.append(plain_table(title, "workers, optimizer", *headings))
        for row in dict.fromkeys(cell[:3] for cell in results if cell.problem == name):
            lost = [results.get(Run(*row, codec)) for codec in codecs]
            texts = ["" if each is None else "{:+z.2f} ± {:.2f} {}".format(*each) for each in lost]
            tables[-1].add_row(f"{row[2]}, {row[1]}", *texts)
    return tables


def train(run: Run) -> dict[str, Any]:
    """Carry out a run. Return what is kept of the run: its name, its last qualities, and its processor time."""
    begun_s = time.process_time()
    torch.set_num_threads(1)
    problem, place = PROBLEMS[run.problem], PLACES[run.place]
    make, settings, rates, _, step_s = OPTIMIZERS[run.optimizer]
    learned, joint = problem.learned(problem.samples), problem.joint_batch
    orders, passes = Orders(problem.samples), -(-place.steps * joint // problem.samples)
    order = torch.cat([orders.of(run.seed, index) for index in range(passes)])

    def train_fn() -> None:
        model = AsModule(learned.initial(run.seed))
        inner = make(model.weights, lr=rates[run.problem], **settings)
        first = [each.param_groups[0]["lr"] for each in inner]
        optimizers = [paceline.DistributedOptimizer(each, model=model) for each in inner]
        numbers: Any = range(PART * joint)
        loader = paceline.distribute(DataLoader(numbers, joint, collate_fn=torch.tensor))
        for part in paceline.epochs(place.steps // PART):
            for each, rate in zip(inner, first, strict=True):
                each.param_groups[0]["lr"] = rate * (1 - part * PART / place.steps)
            for indices in loader:
                chosen = order[part * PART * joint + indices]

                def closure(chosen: Tensor = chosen) -> Tensor:
                    for each in optimizers:
                        each.zero_grad()
                    loss = learned.loss(model.weights, *(each[chosen] for each in learned.data))
                    loss.backward()
                    return loss

                optimizers[0].step(closure)
                for other in optimizers[1:]:
                    other.step()

    wire = run.codec.removesuffix(" without feedback")
    arguments: dict[str, Any] = {"wire": wire, "seed": run.seed, "batch": place.batch, "joint_batch": True}
    arguments |= {"train_fn": train_fn, "snapshot_every_s": place.steps * step_s / EVALUATIONS}
    with patch.dict(CODECS, int4=CODECS["int4"]._replace(feedback=run.codec != WITHOUT_FEEDBACK)):
        result = paceline.simulate(place.cluster, place.sync, **arguments)
    seen, values = AsModule(learned.initial(run.seed)), []
    for _, snapshot in result.snapshots[-LAST:]:
        seen.load_state_dict(snapshot.state_dict)
        with torch.inference_mode():
            values.append(rounded(float(learned.quality(seen.weights)), 7))
    return {"run": str(run), "values": values, "took_s": round(time.process_time() - begun_s, 2)}
