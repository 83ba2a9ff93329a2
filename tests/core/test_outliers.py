"""Workers that differ from all others are named, and healthy ones are not.

The runs here compute real gradients of small models, in one thread and without a host: 2 to 8 workers, in lockstep or
asynchronously with equal or unequal speeds, until the losses are near zero. The data are split anew in each epoch, or
for ever, or by a property of the samples, or drawn at random. A run that is resumed begins with a guard that knows
nothing, so each run is judged from its beginning, from its middle, and from its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from paceline.core.guard import Guard, GuardVerdict
from paceline.core.messages import Observation
from tests.support.marks import thorough

Batch = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """A model, its data, and its loss."""

    model: nn.Module
    data: Batch
    loss: Callable[[nn.Module, Batch], torch.Tensor]


class Push(NamedTuple):
    """What a worker has seen of a push."""

    worker: int
    updates: int
    loss: float
    gradient: float
    samples: int = 0


def classification(generator: torch.Generator) -> Task:
    labels = torch.randint(6, (360,), generator=generator)
    centers = 1.6 * torch.randn(6, 16, generator=generator)
    x = centers[labels] + torch.randn(360, 16, generator=generator)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 6))
    return Task(model, (x, labels), lambda model, batch: cross_entropy(model(batch[0]), batch[1]))


def regression(generator: torch.Generator) -> Task:
    x = torch.randn(300, 8, generator=generator)
    y = torch.sin(x @ torch.randn(8, 1, generator=generator))
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 1))
    return Task(model, (x, y), lambda model, batch: mse_loss(model(batch[0]), batch[1]))


def language(generator: torch.Generator) -> Task:
    """A language model that is trained on random crops of one text."""
    following = torch.softmax(2.5 * torch.randn(20, 20, generator=generator), -1)
    text = [0]
    while len(text) < 1500:
        text.append(int(torch.multinomial(following[text[-1]], 1, generator=generator)))
    crops = torch.tensor(text).unfold(0, 13, 1)
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 20))

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        crop = batch[0]
        return cross_entropy(model(crop[:, :-1]).flatten(0, 1), crop[:, 1:].flatten())

    return Task(model, (crops, crops[:, :1]), loss)


def contrastive(generator: torch.Generator) -> Task:
    """An embedding that tells each sample from the others of its batch."""
    x = torch.randn(300, 12, generator=generator)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        views = [normalize(model(batch[0] + 0.1 * torch.randn_like(batch[0])), dim=-1) for _ in range(2)]
        return cross_entropy(10 * views[0] @ views[1].T, torch.arange(len(batch[0])))

    return Task(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16)), (x, x[:, :1]), loss)


FAULTS: dict[str, Callable[[Batch], Batch]] = {
    "labels": lambda batch: (batch[0], batch[1][torch.randperm(len(batch[1]))]),
    "scale": lambda batch: (batch[0], 30 * batch[1]) if batch[1].is_floating_point() else batch,
    "noise": lambda batch: (4 * torch.randn_like(batch[0]), batch[1]),
    "factor": lambda batch: batch,
}
WRONG_FACTOR = 30.0


class Fault(NamedTuple):
    """What is wrong at the last worker, and from which update on."""

    name: str
    begins: int


class Data:
    """Hands out the samples of a task to workers."""

    def __init__(self, task: Task, batches: Sequence[int], split: str, chance: random.Random) -> None:
        workers = len(batches)
        self._count, self._workers, self._batches, self._split = len(task.data[0]), workers, batches, split
        self._chance = chance
        order = list(range(self._count))
        if split == "sorted":  # half of each worker's data has similar labels
            order.sort(key=lambda sample: float(task.data[1][sample].float().sum()))
            part = self._count // workers
            self._own = [
                [*order[part * w : part * w + part // 2], *chance.sample(order, part // 2)]
                for w in range(workers)
            ]
        else:
            self._own = [order[w::workers] for w in range(workers)]
        self._left: list[list[int]] = [[] for _ in range(workers)]

    def draw(self, worker: int) -> list[int]:
        batch = self._batches[worker]
        if self._split == "random":
            return self._chance.sample(range(self._count), batch)
        while len(self._left[worker]) < batch:
            if self._split == "epoch":
                order = self._chance.sample(range(self._count), self._count)
                for each, left in enumerate(self._left):
                    left += order[each :: self._workers]
            else:
                self._left[worker] += self._chance.sample(self._own[worker], len(self._own[worker]))
        drawn, self._left[worker] = self._left[worker][:batch], self._left[worker][batch:]
        return drawn


def train(
    make: Callable[[torch.Generator], Task],
    seed: int,
    *,
    workers: int,
    sync: str = "bsp",
    updates: int = 100,
    batch: int | Sequence[int] = 8,
    split: str = "epoch",
    adam: bool = False,
    fault: Fault | None = None,
) -> list[Push]:
    """Train, and return all pushes. `sync` is "bsp", "asp", or "uneven" for asp with workers of unequal speeds.

    `batch` is the size of the batches of all workers, or of each worker.

    Under asp, each worker makes `updates` / `workers` pushes for one of the others' updates.
    """
    torch.manual_seed(seed)
    chance = random.Random(seed)
    task = make(torch.Generator().manual_seed(seed))
    parameters = list(task.model.parameters())
    rate = (0.01 if adam else 0.1) / (1 if sync == "bsp" else workers)
    optimizer = (
        torch.optim.Adam(parameters, lr=rate) if adam else torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    )
    batches = [batch] * workers if isinstance(batch, int) else batch
    data = Data(task, batches, split, chance)
    pushes: list[Push] = []

    def push(worker: int, version: int, now: int) -> list[torch.Tensor]:
        drawn = torch.tensor(data.draw(worker))
        samples = task.data[0][drawn], task.data[1][drawn]
        wrong = fault is not None and worker == workers - 1 and now >= fault.begins
        if wrong and fault is not None:
            samples = FAULTS[fault.name](samples)
        loss = task.loss(task.model, samples)
        factor = WRONG_FACTOR if wrong and fault is not None and fault.name == "factor" else 1.0
        gradient = [factor * each for each in torch.autograd.grad(loss, parameters)]
        norm = torch.stack([each.norm() for each in gradient]).norm().item()
        pushes.append(Push(worker, version, loss.item(), norm, batches[worker]))
        return gradient

    def apply(gradient: Sequence[torch.Tensor]) -> None:
        for parameter, each in zip(parameters, gradient, strict=True):
            parameter.grad = each
        nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()

    if sync == "bsp":
        for update in range(updates):
            found = [push(worker, update, update) for worker in range(workers)]
            shares = torch.tensor(batches) / sum(batches)
            apply([torch.tensordot(shares, torch.stack(each), 1) for each in zip(*found, strict=True)])
        return pushes
    copies = [[p.detach().clone() for p in parameters] for _ in range(workers)]
    versions = [0] * workers
    speed = [1 + (1.5 if sync == "uneven" else 0.2) * chance.random() for _ in range(workers)]
    due = [each * chance.random() for each in speed]
    weights = [p.detach().clone() for p in parameters]
    for update in range(updates):
        worker = min(range(workers), key=lambda each: due[each])
        torch._foreach_copy_([p.data for p in parameters], copies[worker])
        gradient = push(worker, versions[worker], update)
        torch._foreach_copy_([p.data for p in parameters], weights)
        apply(gradient)
        weights = [p.detach().clone() for p in parameters]
        copies[worker], versions[worker] = weights, update + 1
        due[worker] += speed[worker] * chance.lognormvariate(0, 0.15)
    return pushes


def judge(pushes: Sequence[Push], workers: int) -> list[tuple[int, GuardVerdict]]:
    """Return what a guard says of the workers, with the number of the push at which it does."""
    guard, said = Guard("tell"), []
    for number, push in enumerate(pushes):
        seen = Observation(push.updates, push.loss, push.gradient, 5.0, samples=push.samples)
        verdicts = guard.take(push.worker, seen, present=range(workers), sync="", lockstep=False)
        said += [(number, verdict) for verdict in verdicts if "differs" in verdict.words]
    return said


def healthy(number: int) -> tuple[list[Push], int, str]:
    """Return the pushes of a healthy run, the number of its workers, and what kind of run it is."""
    chance = random.Random(number)
    tasks: list[Any] = [classification, classification, regression, language, contrastive]
    make, workers = tasks[number % 5], (2, 3, 4, 8, 5)[number // 5 % 5]
    sync, split = (
        ("bsp", "asp", "uneven")[number // 3 % 3],
        chance.choice(("epoch", "epoch", "fixed", "sorted", "random")),
    )
    updates = 600 // workers if sync == "bsp" else 600
    pushes = train(
        make,
        number,
        workers=workers,
        sync=sync,
        updates=updates,
        batch=chance.choice((4, 8, 16)),
        split="random" if make is language else split,
        adam=chance.random() < 0.5,
    )
    return pushes, workers, f"run {number}: {make.__name__}, {workers} workers, {sync}, {split}"


def accused(numbers: Sequence[int]) -> tuple[list[str], list[float]]:
    """Return the healthy runs of which the guard accuses a worker, and the last losses of the classifications."""
    found, last = [], []
    for number in numbers:
        pushes, workers, kind = healthy(number)
        for begun in (0, 2 * len(pushes) // 5, 4 * len(pushes) // 5):
            found += [f"{kind}: {verdict.words}" for _, verdict in judge(pushes[begun:], workers)]
        if "classification" in kind:
            last.append(sum(push.loss for push in pushes[-20:]) / 20)
    return found, last


def test_no_worker_of_a_healthy_run_is_accused() -> None:
    # Both are accused by a test that only compares values with those of others.
    found, _ = accused([1, 29])
    assert found == []


@pytest.mark.thorough
def test_no_worker_of_two_hundred_healthy_runs_is_accused() -> None:
    found, last = accused(range(200))
    assert found == []
    assert sum(loss < 1e-3 for loss in last) > len(last) / 4


@pytest.mark.parametrize(
    ("make", "split", "batches"),
    [
        (contrastive, "epoch", (40, 4)),
        *thorough((language, "random", (40, 4)), (language, "random", (24, 24, 3))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_worker_is_accused_because_of_the_size_of_its_batches(
    make: Callable[[torch.Generator], Task], split: str, batches: tuple[int, ...]
) -> None:
    pushes = train(make, 0, workers=len(batches), updates=300, batch=batches, split=split)
    assert judge(pushes, len(batches)) == []
    assert judge([push._replace(samples=0) for push in pushes], len(batches)) != []


def test_a_fault_of_a_worker_with_small_batches_is_found() -> None:
    pushes = train(regression, 1, workers=3, updates=61, batch=(16, 16, 5), fault=Fault("factor", 40))
    said = judge(pushes, 3)
    assert [verdict.words.partition(" differs")[0] for _, verdict in said] == ["Worker 2"]
    assert 40 * 3 <= said[0][0] < 61 * 3


BAD = [
    (classification, "labels"),
    (classification, "noise"),
    (regression, "scale"),
    (regression, "factor"),
]


@pytest.mark.parametrize(("make", "fault"), BAD, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize(("sync", "workers"), [("bsp", 3), ("asp", 4), *thorough(("bsp", 8))])
def test_a_fault_is_found_within_twenty_updates(
    make: Callable[[torch.Generator], Task], fault: str, sync: str, workers: int
) -> None:
    begins = 40 if sync == "bsp" else 120
    pushes = train(
        make, 1, workers=workers, sync=sync, updates=begins + 21, fault=Fault(fault, begins), split="epoch"
    )
    said = judge(pushes, workers)
    assert [verdict.words.partition(" differs")[0] for _, verdict in said[:1]] == [f"Worker {workers - 1}"]
    assert "differs from all others" in said[0][1].words
    update = said[0][0] // (workers if sync == "bsp" else 1)
    assert begins <= update <= begins + 20


def test_of_two_workers_nobody_can_say_which_is_wrong() -> None:
    pushes = train(classification, 7, workers=2, updates=61, fault=Fault("noise", 40))
    [(_, verdict)] = judge(pushes, 2)
    assert "Worker 1 differs from worker 0" in verdict.words
    assert "With two workers, it is unknown which of them is wrong" in verdict.words
    assert "all others" not in verdict.words


def test_unequal_data_are_no_fault() -> None:
    """A worker whose samples are harder has losses that are always larger, by less than the factor allowed."""
    pushes = [
        Push(w, u, (1.9 if w == 2 else 1.0) * (1 + 0.01 * (u % 7)), 1.0) for u in range(500) for w in range(4)
    ]
    assert judge(pushes, 4) == []


def test_negative_losses_are_not_compared() -> None:
    pushes = [Push(w, u, -100.0 if w == 2 else -1.0, 1.0) for u in range(100) for w in range(4)]
    assert judge(pushes, 4) == []
