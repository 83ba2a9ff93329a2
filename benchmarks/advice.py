"""`python -m benchmarks advice`: compares speedups that `paceline advise` promises with the speedups of live runs.

Scripts of several kinds are run under bsp. From the run directory, `advise` predicts by which factor another model, or
balanced batches, would change the samples per second. A live run with the change shows whether the prediction is right.
The kinds of scripts differ in what takes the time: machines of different speeds, evaluations in one worker or in all
workers, saving, logging, and loading.

Workers sleep instead of computing, so two cores suffice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline.cli.console import TellShare
from paceline.core.lease import BatchSizing
from paceline.lab.advice import advise
from paceline.train.collectives import is_main
from paceline.train.data import distribute
from paceline.train.epochs import epochs
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import worker_index

from .harness import Benchmark, Columns, Figures, Rounds, in_turns, live, marked

WORKERS = 3
BATCH = 8
BATCHES = 12  # number of batches of each worker in an epoch, if all workers have equal shares
EPOCHS = 5
SAMPLE_S = 0.02  # compute time of one sample: long, so that other programs on the machine matter little
GOAL = 0.1  # largest permitted error of a promise


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of script, and a change for which `advise` promises a speedup. All times are in seconds."""

    sync: str = "bsp"  # the changed sync model
    batch: BatchSizing = "equal"  # the changed sizes of the batches
    slow: dict[int, float] = {}  # worker -> factor by which its computations take longer
    evaluating: float = 0.0  # time of an evaluation at the end of each epoch
    saving: float = 0.0  # time to save the model in the middle of an epoch, after every fourth step
    logging: float = 0.0  # time to log after each step
    loading: dict[int, float] = {}  # worker -> time to load an item
    everywhere: bool = False  # True if all workers evaluate and save, False if only the main worker does


KINDS = {
    "equal machines": Kind(sync="asp"),
    "a slow worker": Kind(batch="balanced", slow={2: 2.0}),
    "a slow worker, on demand": Kind(sync="asp", slow={2: 2.0}),
    "evaluation in one worker": Kind(batch="balanced", evaluating=2.0),
    "evaluation in one worker, on demand": Kind(sync="asp", evaluating=2.0),
    "evaluation in all workers": Kind(batch="balanced", slow={2: 2.0}, evaluating=2.0, everywhere=True),
    "saving in the middle": Kind(sync="asp", saving=0.5),
    "logging": Kind(batch="balanced", slow={1: 2.0}, logging=0.08),
    "a slow loader": Kind(sync="asp", loading={1: 0.02}),
}
"""The kinds, by name."""


class AdviceRow(msgspec.Struct, frozen=True):
    """The promised and the measured factor of the samples per second: medians over the rounds."""

    kind: str
    change: str  # the change, as options of the command line
    promised: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the promise."""
        return self.promised / self.measured - 1

    @property
    def met(self) -> bool:
        """True if the error is at most the goal."""
        return abs(self.error) <= GOAL


COLUMNS: Columns[AdviceRow] = {
    "script": lambda row: row.kind,
    "change": lambda row: row.change,
    "promised": lambda row: f"{row.promised:.2f}",
    "measured": lambda row: f"{row.measured:.2f}",
    "error": lambda row: marked(f"{row.error:+.1%}", row.met),
}


@Benchmark(minutes=8, quick={"kinds": ("equal machines",)})
def measure(
    tell: TellShare, rounds: Rounds = 1, kinds: Sequence[str] = tuple(KINDS)
) -> list[Figures[AdviceRow]]:
    """Compare the speedup that paceline advise promises for a change with the speedup of a live run.

    The measurements use scripts of several kinds.
    """
    rows = []
    for name, pairs in in_turns(tell, rounds, {name: name for name in kinds}, _promised_and_measured).items():
        kind = KINDS[name]
        change = f"--sync {kind.sync}" if kind.batch == "equal" else f"--batch {kind.batch}"
        rows.append(AdviceRow(name, change, *(median(column) for column in zip(*pairs, strict=True))))
    title = "Samples per second with a change, divided by those under bsp: promised by advise, and measured"
    return [Figures(title, rows, COLUMNS, f"goal for the error: {GOAL:.0%}; !: goal missed", labels=2)]


def _promised_and_measured(name: str) -> tuple[float, float]:
    """Run a kind of script without and with its change."""
    kind = KINDS[name]
    with TemporaryDirectory() as folder:
        recorded = Path(folder, "before")
        before = _samples_per_s(name, "bsp", "equal", run_dir=recorded)
        after = _samples_per_s(name, kind.sync, kind.batch)
        speed = {(row.sync, row.batch): row.speed for row in advise(recorded, ("bsp", kind.sync)).rows}
    return speed[kind.sync, kind.batch] / speed["bsp", "equal"], after / before


def _samples_per_s(name: str, sync: str, batch: BatchSizing, **settings: Path) -> float:
    result, _ = live(train, name, workers=WORKERS, sync=sync, batch=batch, **settings)
    return float(result.summary["samples_per_s"])


class Items(Dataset[torch.Tensor]):
    """Items that take a while to load."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return WORKERS * BATCHES * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return torch.full((4,), float(index))


def train(name: str) -> None:
    """Train as a script of the kind `name` does."""
    kind, worker = KINDS[name], worker_index()
    torch.set_num_threads(1)
    loader = distribute(DataLoader(Items(kind.loading.get(worker, 0.0)), batch_size=BATCH, shuffle=True))
    model = nn.Linear(4, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), model=model)
    for _ in epochs(EPOCHS):
        for number, batch in enumerate(loader):
            time.sleep(SAMPLE_S * len(batch) * kind.slow.get(worker, 1.0))
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(kind.logging)
            if number % 4 == 3 and (kind.everywhere or is_main()):
                time.sleep(kind.saving)
        if kind.everywhere or is_main():
            time.sleep(kind.evaluating)
