"""The batch size of the script as that of the joint batch: training as in one process, on any number of workers."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import paceline
from paceline.core.lease import BatchSizing
from paceline.errors import ConfigurationError, RunFailedError
from paceline.lab.advice import command_for
from paceline.sim import Cluster, Presence, simulate
from paceline.trace import replay
from paceline.train.generator_states import generators_lock
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

ITEMS = 103
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.8),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}


def others(chosen: list[Any], *values: Iterable[object]) -> list[Any]:
    """All combinations of values except the chosen ones, which every run tests."""
    return thorough(*(case for case in itertools.product(*values) if case not in chosen))


def examples(items: int = ITEMS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(items, 5, generator=generator, dtype=torch.float64), torch.arange(items))


class Trainer:
    """Trains a model as an ordinary script does, and records the items of each batch."""

    def __init__(
        self, batch: int, *, drop_last: bool = False, items: int = ITEMS, layers: Sequence[nn.Module] = ()
    ) -> None:
        with generators_lock:
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(5, 4), *layers, nn.Tanh(), nn.Linear(4, 1)).double()
        self.loader = DataLoader(examples(items), batch_size=batch, drop_last=drop_last)
        self.batches: list[list[int]] = []
        self.worker = paceline.worker_index()

    def train(self, optimizer: str = "momentum", epochs: int = 2, **options: Any) -> Trainer:
        trained = paceline.DistributedOptimizer(
            OPTIMIZERS[optimizer](self.model.parameters()), model=self.model
        )
        for _ in paceline.epochs(epochs):
            for x, index in paceline.distribute(self.loader, **options):
                trained.zero_grad()
                (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                trained.step()
                self.batches.append(index.tolist())
        return self

    @property
    def items(self) -> Counter[int]:
        return Counter(item for batch in self.batches for item in batch)


def simulated(
    workers: int, trainer: Callable[[], Trainer], sync: str = "bsp", **options: Any
) -> tuple[list[Trainer], Any]:
    trainers: list[Trainer] = []
    cluster = options.pop("cluster", None) or Cluster(compute_s=[1.0] * workers)
    result = simulate(cluster, sync, train_fn=lambda: trainers.append(trainer()), joint_batch=True, **options)
    return trainers, result


ON_HOW_MANY = [(1, "adam", False), (2, "momentum", True), (3, "adam", False), (3, "momentum", True)]


@pytest.mark.parametrize(
    ("workers", "optimizer", "drop_last"),
    [*ON_HOW_MANY, *others(ON_HOW_MANY, [1, 2, 3], OPTIMIZERS, [False, True])],
)
def test_bsp_on_any_number_of_workers_equals_one_process(
    workers: int, optimizer: str, drop_last: bool
) -> None:
    """The joint batch of 17 is uneven, and the last one has one sample, fewer than there are workers."""
    alone = Trainer(17, drop_last=drop_last).train(optimizer)
    trainers, result = simulated(workers, lambda: Trainer(17, drop_last=drop_last).train(optimizer))
    for name, expected in alone.model.state_dict().items():
        torch.testing.assert_close(result.state_dict[name], expected, rtol=1e-9, atol=1e-11)
    assert sum((trainer.items for trainer in trainers), Counter()) == alone.items
    assert result.updates == len(alone.batches)


def test_balanced_parts_learn_what_equal_ones_do() -> None:
    alone = Trainer(17).train(epochs=4)
    cluster = Cluster(compute_s=[1.0, 1.0, 4.0])
    trainers, result = simulated(3, lambda: Trainer(17).train(epochs=4), cluster=cluster, batch="balanced")
    for name, expected in alone.model.state_dict().items():
        torch.testing.assert_close(result.state_dict[name], expected, rtol=1e-9, atol=1e-11)
    last = {trainer.worker: len(trainer.batches[-2]) for trainer in trainers}
    assert last[2] < 5 < last[0]


def test_two_steps_for_each_batch_equal_one_process_too() -> None:
    """A worker without a part of the last joint batch makes no step with it, but as many pushes as the others."""

    def train(results: list[dict[str, torch.Tensor]]) -> None:
        with generators_lock:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
        optimizers = [
            paceline.DistributedOptimizer(
                torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9), model=model
            )
            for part in model
        ]
        for _ in range(2):
            for x, _ in paceline.distribute(DataLoader(data, batch_size=17)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                    optimizer.step()
        results.append({name: value.clone() for name, value in model.state_dict().items()})

    data = examples()
    alone: list[dict[str, torch.Tensor]] = []
    train(alone)
    result = simulate(Cluster(compute_s=[1.0] * 3), "bsp", train_fn=lambda: train([]), joint_batch=True)
    assert result.state_dict is not None
    for name, expected in alone[0].items():
        torch.testing.assert_close(result.state_dict[name], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("every", "size"), [(2, 17), (3, 20), (4, 17), *thorough((2, 20), (3, 17), (4, 20))])
def test_gradients_that_are_accumulated_use_every_sample_once(every: int, size: int) -> None:
    """The last of six or seven joint batches has one sample. No worker waits for ever, and nothing is used twice."""

    def train() -> Counter[int]:
        trainer, items = Trainer(size, items=101 if size == 20 else ITEMS), Counter[int]()
        optimizer = paceline.DistributedOptimizer(
            torch.optim.SGD(trainer.model.parameters(), lr=0.05), model=trainer.model
        )
        for _ in paceline.epochs(3):
            for number, (x, index) in enumerate(paceline.distribute(trainer.loader)):
                (trainer.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                items.update(index.tolist())
                if (number + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            paceline.reduce(1.0)
        return items

    found: list[Counter[int]] = []
    simulate(Cluster(compute_s=[1.0] * 3), "bsp", train_fn=lambda: found.append(train()), joint_batch=True)
    assert sum(found, Counter()) == Counter(dict.fromkeys(range(101 if size == 20 else ITEMS), 3))


@pytest.mark.parametrize("batch", ["equal", "balanced"])
def test_batch_norm_never_receives_a_single_sample(batch: str) -> None:
    """The rest of an epoch is 3 samples, which go to one of two workers."""
    trainers, _ = simulated(
        2,
        lambda: Trainer(10, layers=[nn.BatchNorm1d(4)]).train(),
        batch=batch,
        cluster=Cluster(compute_s=[1, 9]),
    )
    sizes = [len(each) for trainer in trainers for each in trainer.batches]
    assert min(sizes) >= 2
    assert sum((trainer.items for trainer in trainers), Counter()) == Counter(dict.fromkeys(range(ITEMS), 2))


DIVIDED = [
    ("ssp:staleness=1", "equal"),
    ("spec-sync", "equal"),
    ("elastic-bsp:lookahead=3", "equal"),
    ("elastic-bsp:lookahead=3", "balanced"),
]


@pytest.mark.parametrize(
    ("sync", "batch"),
    [
        *DIVIDED,
        *others(
            DIVIDED,
            ["asp", "ssp:staleness=1", "elastic-bsp:lookahead=3", "spec-sync"],
            ["equal", "balanced"],
        ),
    ],
)
def test_every_model_uses_every_item_once_in_parts_of_the_joint_batch(sync: str, batch: str) -> None:
    cluster = Cluster(compute_s=[1.0, 1.0, 3.0])
    trainers, _ = simulated(3, lambda: Trainer(12).train(epochs=3), sync, batch=batch, cluster=cluster)
    assert sum((trainer.items for trainer in trainers), Counter()) == Counter(dict.fromkeys(range(ITEMS), 3))
    sizes = Counter(len(each) for trainer in trainers for each in trainer.batches)
    if batch == "equal":
        assert sizes.most_common(1)[0][0] == 4
        assert max(sizes) == 4


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_workers_that_join_and_are_lost_divide_what_is_left(sync: str) -> None:
    """Worker 2 joins in the middle of an epoch, and worker 1 is lost there. No data waits for the next epoch."""
    trainers: list[Trainer] = []

    def train() -> None:
        trainer = Trainer(10)
        trainers.append(trainer)
        trainer.train(epochs=2)

    presence = {2: Presence(joins_at_s=1.15), 1: Presence(lost_at_s=8.05)}
    cluster = Cluster(compute_s=[1.0] * 3, presence=presence, latency_s=0.001)
    result = simulate(cluster, sync, train_fn=train, joint_batch=True)
    used = {trainer.worker: trainer.items for trainer in trainers}
    assert used[2].total() > 50
    assert sum(used.values(), Counter()) == Counter(dict.fromkeys(range(ITEMS), 2))
    assert result.measures.samples == 2 * ITEMS


def random_life(draw: random.Random) -> Presence:
    """A worker that joins late, is lost, comes back, or is there from the beginning to the end."""
    at_s = draw.uniform(0.5, 6.0)
    return draw.choice(
        [
            Presence(),
            Presence(joins_at_s=at_s),
            Presence(lost_at_s=at_s),
            Presence(lost_at_s=at_s, back_after_s=draw.uniform(0.5, 4.0)),
        ]
    )


@pytest.mark.parametrize("seed", [*range(5), *thorough(*range(5, 300))])
def test_in_random_runs_every_sample_is_in_the_weights_once(seed: int) -> None:
    """Whoever joins and is lost, under any model and its changes, and with calls that all workers make."""
    draw = random.Random(seed)
    workers, epochs = draw.randint(2, 5), draw.randint(1, 3)
    batch = draw.randint(workers, 12)
    items, drop_last = draw.randint(batch, 60), draw.random() < 0.3
    sync = draw.choice(["bsp", "bsp", "asp", "ssp:staleness=1", "bsp@0,asp@4", "asp@0,bsp@5"])
    reduces, evaluates = draw.random() < 0.4 and "@" not in sync, draw.random() < 0.3

    def train() -> None:
        trainer = Trainer(batch, items=items, drop_last=drop_last)
        model = trainer.model
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in paceline.epochs(epochs):
            for x, _ in paceline.distribute(trainer.loader):
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
            if reduces:
                paceline.reduce(1.0)
            if evaluates and paceline.is_main():
                with paceline.evaluating(model):
                    pass

    cluster = Cluster(
        compute_s=[draw.uniform(0.5, 3.0) for _ in range(workers)],
        presence={worker: random_life(draw) for worker in range(1, workers)},
        latency_s=0.001,
    )
    sizing: BatchSizing = draw.choice(["equal", "balanced"])
    result = simulate(cluster, sync, train_fn=train, joint_batch=True, batch=sizing)
    used = items // batch * batch if drop_last else items
    lost_s = {
        worker: each.lost_at_s for worker, each in cluster.presence.items() if each.lost_at_s is not None
    }
    others_left_s = max(at for worker, at in result.measures.left_s.items() if worker not in lost_s)
    if any(at_s > others_left_s for at_s in lost_s.values()):  # nobody is there to compute what it returns
        assert epochs * used - batch <= result.measures.samples <= epochs * used
    else:
        assert result.measures.samples == epochs * used


def test_a_resumed_run_keeps_the_joint_batch_on_another_number_of_workers() -> None:
    alone = Trainer(17).train()
    _, first = simulated(2, lambda: Trainer(17).train(), cut_at_s=[2.2])
    _, again = simulated(3, lambda: Trainer(17).train(), resumed=first.cuts[0])
    for name, expected in alone.model.state_dict().items():
        torch.testing.assert_close(again.state_dict[name], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("own_loop", "joins_at_s"), [(False, 0.0), (True, 0.0), (False, 0.2), (False, 1.3)])
def test_a_resumed_run_may_begin_with_a_joint_batch_that_is_too_small_for_all_workers(
    own_loop: bool, joins_at_s: float
) -> None:
    """A worker without a part in it makes as many pushes as the others, so they meet in the same reductions."""

    def train() -> None:
        trainer = Trainer(4, items=5)
        model = trainer.model
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
        loader = paceline.distribute(trainer.loader)
        paceline.checkpoint()
        for _ in range(4) if own_loop else paceline.epochs(4):
            for x, _ in loader:
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
            paceline.reduce(1.0)

    cluster = Cluster(compute_s=[1.0] * 2)
    first = simulate(cluster, "bsp", train_fn=train, joint_batch=True)
    [cut] = first.cuts
    assert [rest.begin for rest in cut.job.loaders[0].epochs] == [4]
    late = {2: Presence(joins_at_s=joins_at_s)} if joins_at_s else {}
    cluster = Cluster(compute_s=[1.0] * 3, presence=late)
    again = simulate(cluster, "bsp", train_fn=train, joint_batch=True, resumed=cut)
    for name, expected in (first.state_dict or {}).items():
        torch.testing.assert_close((again.state_dict or {})[name], expected, rtol=1e-9, atol=1e-11)


def test_a_prepared_schedule_advances_as_in_one_process() -> None:
    rates: dict[str, list[float]] = {"alone": [], "run": []}

    def train(where: str) -> None:
        trainer = Trainer(17)
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=14)
        model, stepped, loader, scheduler = paceline.prepare(
            trainer.model, optimizer, trainer.loader, schedule
        )
        for _ in paceline.epochs(2):
            for x, _ in loader:
                stepped.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                stepped.step()
                if paceline.worker_index() == 0:
                    rates[where].append(round(optimizer.param_groups[0]["lr"], 9))
                scheduler.step()

    train("alone")
    simulate(Cluster(compute_s=[1.0] * 3), "bsp", train_fn=lambda: train("run"), joint_batch=True)
    assert rates["run"] == rates["alone"]


# -- live -------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_live_run_equals_one_process_and_says_what_its_joint_batch_is(tmp_path: Path) -> None:
    """The loader has a process of its own, which takes batches ahead."""

    def train() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        loader = DataLoader(data, batch_size=17, num_workers=1)
        model, optimizer, part = paceline.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.02), loader, joint_batch=True
        )
        for _ in paceline.epochs(2):
            for x, _ in part:
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
        return model.state_dict()

    data = examples()
    alone = train()
    result = paceline.launch(train, workers=3, servers=1, run_dir=tmp_path / "run", progress=False)
    for name, expected in alone.items():
        torch.testing.assert_close(result.state_dict[name], expected, rtol=1e-9, atol=1e-11)
    assert all(replay(trace) == [] for trace in result.trace)
    summary = result.summary
    assert summary["ledger"]["samples"]["used"] == 2 * ITEMS
    assert (summary["batch_size"], summary["batches_per_push"], summary["joint_batch"]) == (17, 1, True)
    assert summary["samples_per_update"] == "17 samples an update, divided over 3 workers"
    assert "joint_batch=True" in command_for(summary, "asp", "equal")


def test_a_worker_that_joins_a_live_run_has_a_part_of_the_epoch_in_progress(
    run_on_threads: RunOnThreads,
) -> None:
    begun, joined = threading.Event(), threading.Event()

    def train() -> list[tuple[int, list[int]]]:
        trainer, late = Trainer(12), paceline.worker_index() == 1
        optimizer = paceline.DistributedOptimizer(
            torch.optim.SGD(trainer.model.parameters(), lr=0.01), model=trainer.model
        )
        used: list[tuple[int, list[int]]] = []
        for epoch in paceline.epochs(2):
            for x, index in paceline.distribute(trainer.loader):
                if late:
                    joined.set()
                optimizer.zero_grad()
                (trainer.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                used.append((epoch, index.tolist()))
                if len(used) == 3 and not late:
                    begun.set()
                    assert joined.wait(60.0)
        return used

    results: dict[int, Any] = run_on_threads(train, late=begun, sync="bsp", joint_batch=True).results
    used = [batch for result in results.values() for batch in result]
    assert Counter(item for _, batch in used for item in batch) == Counter(dict.fromkeys(range(ITEMS), 2))
    assert any(epoch == 0 for epoch, _ in results[1])
    assert Counter(len(batch) for epoch, batch in used if epoch).most_common(1)[0][0] == 6


# -- what cannot be divided -------------------------------------------------------------------------------


class Whole(Sampler[list[int]]):
    """A batch sampler of one's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3], [4, 5, 6, 7]])

    def __len__(self) -> int:
        return 2


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(8, 2))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(examples(), batch_sampler=Whole()),
        DataLoader(Stream(), batch_size=4),
        [torch.ones(4, 2), torch.ones(4, 2)],
    ],
    ids=["batch sampler", "stream", "list"],
)
def test_what_cannot_be_divided_is_refused_with_the_way_out(loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="joint_batch=False"):
        paceline.distribute(loader, joint_batch=True)

    def train() -> None:
        trainer = Trainer(4)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(trainer.model.parameters(), lr=0.1))
        for _ in paceline.distribute(loader):
            optimizer.step()

    with pytest.raises(RunFailedError, match=r"cannot be divided among the workers.*joint_batch=False"):
        simulate(Cluster(compute_s=[1.0] * 2), "bsp", train_fn=train, joint_batch=True)


def test_a_loader_may_keep_a_batch_size_of_its_own() -> None:
    trainers, _ = simulated(2, lambda: Trainer(8).train(joint_batch=False))
    assert {len(each) for trainer in trainers for each in trainer.batches} >= {8}
    trainers = []
    cluster = Cluster(compute_s=[1.0] * 2)
    simulate(cluster, "bsp", train_fn=lambda: trainers.append(Trainer(8).train(joint_batch=True)))
    assert max(len(each) for trainer in trainers for each in trainer.batches) == 4


@pytest.mark.parametrize(
    ("trainer", "options", "message"),
    [
        (
            lambda: Trainer(2),
            {},
            r"joint batch has 2 samples, which cannot be divided among 3 workers.*at most 2 workers",
        ),
        (
            lambda: Trainer(5, layers=[nn.BatchNorm1d(4)]),
            {},
            "BatchNorm, which needs at least 2 samples.*at most 2",
        ),
        (lambda: Trainer(16), {"max_batch": 5}, "max_batch is 5, expected an integer of at least 6"),
    ],
)
def test_too_small_parts_are_refused_before_anything_is_trained(
    trainer: Callable[[], Trainer], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunFailedError, match=message):
        simulated(3, lambda: trainer().train(**options))


def test_a_part_is_not_larger_than_the_maximum_when_workers_are_lost() -> None:
    cluster = Cluster(compute_s=[1.0] * 3, presence={1: Presence(lost_at_s=1.3)})
    trainers, _ = simulated(3, lambda: Trainer(12).train(max_batch=5), cluster=cluster)
    assert max(len(each) for trainer in trainers for each in trainer.batches) == 5
