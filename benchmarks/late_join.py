"""Measures how long a worker that joins a run in progress takes from the end of its imports to its first update.

`paceline serve` runs on this machine, and one worker trains throughout. Further workers join one after another with
`paceline join`, and leave when they have made their first update. The script of each of these workers writes down the
time from the end of its imports to the return of its first `optimizer.step()`. This time includes the registration of
the model, the join at all shards, the connections to the servers, the first weights, one iteration, and the wait that
the sync model requires.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from paceline.cli.console import TellShare
from paceline.errors import RunFailedError

from .harness import Benchmark, Columns, Figures, goal_text, program

T = TypeVar("T")

SYNCS = ("bsp", "asp", "ssp:staleness=3", "elastic-bsp:lookahead=15", "spec-sync")
GOAL_S = 2.0
TIMEOUT_S = 60.0
POLL_S = 0.01

SCRIPT = """
import os
import time
from pathlib import Path

import torch

import paceline

imported_s = time.monotonic()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
x = torch.randn(32, 64, generator=torch.Generator().manual_seed(paceline.worker_index()))
first = True
while True:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    time.sleep(0.01)
    optimizer.step()
    if first:
        first = False
        unfinished = Path(f"unfinished-{os.getpid()}")
        unfinished.write_text(str(time.monotonic() - imported_s))
        unfinished.rename(f"updated-{os.getpid()}")
"""


class LateJoinRow(msgspec.Struct, frozen=True):
    """The times of the joins under one sync model, from the end of the imports to the end of the first update."""

    sync: str
    seconds: list[float]

    @property
    def met(self) -> bool:
        """True if the median is at most `GOAL_S`."""
        return median(self.seconds) <= GOAL_S


COLUMNS: Columns[LateJoinRow] = {
    "sync model": lambda row: row.sync,
    "median (s)": lambda row: f"{median(row.seconds):.2f}",
    "all joins (s)": lambda row: ", ".join(f"{each:.2f}" for each in row.seconds),
    "goal": lambda row: goal_text(f"at most {GOAL_S:g} s", row.met),
}


@Benchmark(minutes=3, quick={"rounds": 1, "syncs": ("asp",)})
def measure(tell: TellShare, rounds: int = 5, syncs: Sequence[str] = SYNCS) -> list[Figures[LateJoinRow]]:
    """Measure how long a worker that joins a run takes from the end of its imports to its first update."""
    rows = []
    for index, sync in enumerate(syncs):
        tell(sync, index / len(syncs))
        with TemporaryDirectory() as folder:
            rows.append(LateJoinRow(sync, _joins_s(Path(folder), sync, rounds)))
    return [Figures("From the end of the imports to the first update of a worker that joins", rows, COLUMNS)]


def _joins_s(folder: Path, sync: str, rounds: int) -> list[float]:
    """Serve a run in this folder, let workers join it one after another, and return their times."""
    (folder / "train.py").write_text(SCRIPT)
    serve = ("serve", "--workers", "1:2", "--servers", "2", "--sync", sync, "--run-dir", "run")
    with _ended(folder, *serve):
        address = _await(lambda: re.search(r"paceline join (\S+) ", _log(folder)), folder)[1]
        with _joined(folder, address):
            found = []
            for _ in range(rounds):
                with _joined(folder, address) as update:
                    found.append(float(update.read_text()))
            return found


@contextlib.contextmanager
def _joined(folder: Path, address: str) -> Iterator[Path]:
    """Let a worker join the run, and yield the file that it has written after its first update."""
    before = set(folder.glob("updated-*"))
    with _ended(folder, "join", "--secret-file", "run/secret", address, "train.py"):
        [update] = _await(lambda: set(folder.glob("updated-*")) - before, folder)
        yield update


@contextlib.contextmanager
def _ended(folder: Path, *arguments: str) -> Iterator[None]:
    """Run a command of Paceline during the block. After the block, ask the command to end, and wait for its end."""
    with (
        (folder / "log").open("ab") as log,
        program("-m", "paceline", *arguments, folder=folder, log=log) as run,
    ):
        yield
        run.terminate()
        run.wait(TIMEOUT_S)


def _log(folder: Path) -> str:
    """Return what the programs have printed."""
    return (folder / "log").read_text()


def _await(look: Callable[[], T | None], folder: Path) -> T:
    """Wait until `look` returns something, and return it.

    Raises:
        RunFailedError: `look` has returned nothing for more than a minute.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise RunFailedError("a program", f"it has made no progress for {TIMEOUT_S:g} s", _log(folder))
        time.sleep(POLL_S)
    return found
