"""What scripts spend their time on is told back: computing, loading, and being outside of training, in any worker."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.sim import Cluster, SimResult, simulate
from paceline.sim.virtual_training import VirtualSession
from paceline.sync.events import PushReceived
from paceline.sync.ticks import TICKS_PER_S
from paceline.trace import replay
from paceline.trace.activity_cells import KINDS
from paceline.train.session import current, install
from tests.support.marks import thorough
from tests.trace.test_activity import activity_of

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

POINTS = 0.03  # the shares that are told may be wrong by at most this
BATCHES, BATCH, EPOCHS = 6, 4, 3

Spent = dict[int, dict[str, float]]
"""Worker -> what its script has really spent its time on, in virtual seconds."""


class Habits(NamedTuple):
    """How long, in seconds, a worker takes for what its script does besides computing."""

    item: float = 0.0  # loading one item
    evaluating: float = 0.0  # at the end of each epoch
    saving: float = 0.0  # after every third step
    logging: float = 0.0  # after each step
    checking: float = 0.0  # for each batch of another distributed loader, at the end of each epoch


class Script:
    """A training script whose workers have habits, and which measures itself.

    Args:
        habits: the habits of each worker.
        compute_s: how long each worker computes for a full batch.
        steps: number of steps with each batch, as with several optimizers.
        accumulated: number of batches for each step.
        ahead: True to draw each batch before the one before it is used, as libraries do.
    """

    def __init__(
        self,
        habits: Sequence[Habits],
        compute_s: Sequence[float],
        *,
        steps: int = 1,
        accumulated: int = 1,
        ahead: bool = False,
    ) -> None:
        self.habits = habits
        self.compute_s = compute_s
        kinds = "computing", "loading", "outside"
        self.spent: Spent = {worker: dict.fromkeys(kinds, 0.0) for worker in range(len(habits))}
        self._steps, self._accumulated, self._ahead = steps, accumulated, ahead

    def let_pass(self, kind: str, seconds: float) -> None:
        """Let virtual time pass, if the worker takes part in the run already."""
        session = current()
        assert isinstance(session, VirtualSession)
        if session.joined and seconds:
            self.spent[session.worker][kind] += seconds
            session.let_pass(seconds)

    def compute(self) -> None:
        """Count the time that passes in the next step."""
        session = current()
        assert session is not None
        seconds = self.compute_s[session.worker] * session.core.data.work.full_batches
        self.spent[session.worker]["computing"] += seconds

    def __call__(self) -> None:
        own = self.habits[paceline.worker_index()]
        items = BATCHES * BATCH * paceline.worker_count()
        loader = paceline.distribute(DataLoader(Slow(self, items, own.item, "loading"), batch_size=BATCH))
        others = paceline.distribute(DataLoader(Slow(self, items, own.checking, "outside"), batch_size=BATCH))
        model = nn.Linear(2, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        for _ in paceline.epochs(EPOCHS):
            for number, batch in enumerate(one_ahead(loader) if self._ahead else loader):
                for _ in range(self._steps):
                    model(batch).sum().backward()
                    if (number + 1) % self._accumulated == 0:
                        self.compute()
                        optimizer.step()
                        optimizer.zero_grad()
                if (number + 1) % self._accumulated == 0:
                    self.let_pass("outside", own.logging)
                    if number % 3 == 2:
                        self.let_pass("outside", own.saving)
            self.let_pass("outside", own.evaluating)
            if own.checking:
                with torch.no_grad():
                    for batch in others:
                        model(batch)
                        self.let_pass("outside", own.checking)


class Slow(Dataset[torch.Tensor]):
    """Items that take a while to load."""

    def __init__(self, script: Script, items: int, seconds: float, kind: str) -> None:
        self._script, self._items, self._seconds, self._kind = script, items, seconds, kind

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, index: int) -> torch.Tensor:
        self._script.let_pass(self._kind, self._seconds)
        return torch.full((2,), float(index))


def one_ahead(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the batches of a loader, each after the next one was drawn."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


def told(result: SimResult, worker: int) -> dict[str, float]:
    use = result.time_use[worker]
    return {"computing": use.computing_s, "loading": use.loading_s, "outside": use.outside_s}


def random_script(draw: random.Random) -> Script:
    def some(most: float) -> float:
        return draw.choice([0.0, draw.uniform(0.0, most)])

    habits = [
        Habits(some(0.5), some(30.0), some(4.0), some(1.0), some(0.5)) for _ in range(draw.randint(1, 3))
    ]
    steps = draw.choice([1, 1, 2])
    return Script(
        habits,
        [draw.uniform(0.5, 3.0) for _ in habits],
        steps=steps,
        accumulated=1 if steps > 1 else draw.choice([1, 1, 2]),
        ahead=draw.choice([True, False]),
    )


@pytest.mark.parametrize("seed", [*range(4), *thorough(*range(4, 12))])
def test_what_scripts_spend_their_time_on_is_told_back(seed: int) -> None:
    """By the workers' own stopwatches, by their records, and as what the records leave for the computations."""
    draw = random.Random(seed)
    script = random_script(draw)
    sync = draw.choice(["bsp", "asp", "ssp:staleness=1", "elastic-bsp:lookahead=4"])
    result = simulate(Cluster(compute_s=script.compute_s), sync, train_fn=script, record=True)
    activity = activity_of(result).closed()
    assert result.recording is not None
    for worker, expected in script.spent.items():
        within = POINTS * sum(expected.values())
        assert told(result, worker) == pytest.approx(expected, abs=within), (worker, script.habits[worker])
        own_s = dict(zip(KINDS, activity.workers[worker].times_s, strict=True))
        assert {kind: own_s[kind] for kind in expected} == pytest.approx(expected, abs=within)
        recorded_s = sum(record.computing_s for record in result.recording.records[worker])
        assert recorded_s == pytest.approx(expected["computing"], abs=within)


@pytest.mark.parametrize("hyperparameters", ["raw", "translated"])
@pytest.mark.parametrize("sync", ["elastic-bsp:lookahead=4", "dssp:lower=0,upper=4", "dsps"])
def test_pushes_tell_what_was_outside_of_training_unless_intervals_are_those_of_the_papers(
    sync: str, hyperparameters: str
) -> None:
    """So a replay decides the same, and a run with raw hyper-parameters predicts as the papers do."""
    script = Script([Habits(), Habits(evaluating=9.0)], [1.0, 1.5])
    result = simulate(
        Cluster(compute_s=script.compute_s),
        sync,
        train_fn=script,
        record=True,
        hyperparameters=hyperparameters,
    )
    assert all(replay(trace) == [] for trace in result.trace)
    events = [entry.event for trace in result.trace for entry in trace.entries]
    told = [getattr(event, "outside_ticks", 0) for event in events]
    assert max(told) == (9 * 10**9 if hyperparameters == "translated" else 0)


# -- live ------------------------------------------------------------------------------------------------------


def test_a_live_worker_tells_what_it_loads_and_what_is_outside_of_training(
    run_on_threads: RunOnThreads,
) -> None:
    """Sleeping takes at least as long as asked for, however busy the machine is."""
    evaluating_s, item_s, checking_s = 0.1, 0.002, 0.01

    class Items(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2 * BATCHES * BATCH

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(item_s * paceline.worker_index())
            return torch.full((2,), float(index))

    def script() -> None:
        loader = paceline.distribute(DataLoader(Items(), batch_size=BATCH))
        others = paceline.distribute(DataLoader(Items(), batch_size=BATCH))
        model = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = paceline.DistributedOptimizer(
            sgd, model=model
        )  # searches no objects beside other threads
        for _ in paceline.epochs(EPOCHS):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if paceline.is_main():
                time.sleep(evaluating_s)
                with paceline.evaluating(model):
                    time.sleep(evaluating_s)
            with torch.no_grad():
                for batch in others:
                    time.sleep(checking_s)
                    model(batch)

    run = run_on_threads(script, workers=2, sync="bsp")
    first, second = run.time_use[0], run.time_use[1]
    # The pushes without a gradient, which the worker makes inside `evaluating`, are exchanges.
    assert first.outside_s >= EPOCHS * (evaluating_s + BATCHES * checking_s)
    assert second.outside_s >= EPOCHS * BATCHES * (checking_s + BATCH * item_s)
    # The first batch is loaded before the worker takes part in the run.
    assert second.loading_s >= (EPOCHS * BATCHES - 1) * BATCH * item_s
    [trace, *_] = run.shards
    pushes = [entry.event for entry in trace.entries if isinstance(entry.event, PushReceived)]
    told_s = [push.outside_ticks / TICKS_PER_S for push in pushes if push.worker == 0 and not push.empty]
    assert sum(each >= evaluating_s for each in told_s) == EPOCHS - 1


def test_a_loader_on_a_thread_of_its_own_takes_no_time_of_the_training(run_on_threads: RunOnThreads) -> None:
    def script() -> None:
        session = current()
        loader = paceline.distribute(
            DataLoader(TensorDataset(torch.ones(2 * BATCHES * BATCH, 2)), batch_size=BATCH)
        )
        model = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer = paceline.DistributedOptimizer(
            sgd, model=model
        )  # searches no objects beside other threads
        drawn: queue.Queue[torch.Tensor | None] = queue.Queue(2)

        def load() -> None:
            install(session, for_thread=True)
            for (batch,) in loader:
                drawn.put(batch)
            drawn.put(None)

        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        thread = threading.Thread(target=load)
        thread.start()
        while (batch := drawn.get()) is not None:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        thread.join()

    run = run_on_threads(script, workers=2, sync="asp")
    assert [use.loading_s for use in run.time_use.values()] == [0.0, 0.0]
    assert not any(getattr(entry.event, "outside_ticks", 0) for entry in run.shards[0].entries)
