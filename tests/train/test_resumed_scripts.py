"""Scripts that are cut in a simulated run and resumed in another one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.errors import RunFailedError
from paceline.sim import Cluster, Presence, simulate
from paceline.sim.simulated_cuts import SimCut
from paceline.train.session import current, resumption_of
from tests.support.marks import thorough

EPOCHS, SIZE, BATCH = 3, 24, 4
PER_EPOCH = 6  # batches


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    """Items that are augmented with numbers from all generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = random.random() + float(np.random.randn())
        return index, torch.arange(4.0).add(index).sin() + 0.1 * noise + 0.1 * torch.rand(4)


DATA = Noisy()


class Script:
    """SGD with momentum, dropout and BatchNorm, in a loop of Paceline.

    Attributes:
        seen: the indices of the items of each batch, by epoch.
    """

    def __init__(self) -> None:
        torch.manual_seed(len(began))
        random.seed(len(began))
        np.random.seed(len(began))
        began.append(self)
        self.seen: list[tuple[int, list[int]]] = []
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.loader = DataLoader(DATA, BATCH, shuffle=True)
        self.prepare()

    def prepare(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.model, self.optimizer, self.batches = paceline.prepare(self.model, optimizer, self.loader)

    def train(self) -> None:
        for epoch in self.loop():
            self.model.train()
            for indices, x in self.batches:
                session = current()
                if session is None or not resumption_of(session).repeats:
                    self.seen.append((epoch, indices.tolist()))
                self.train_on(x)
            assert x.numel()  # also if the epoch was finished before the run was resumed
            self.model.eval()
            torch.rand(1)  # an evaluation may draw
            self.end_epoch()

    def loop(self) -> Any:
        return paceline.epochs(EPOCHS)

    def train_on(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()

    def end_epoch(self) -> None:
        pass

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        return found

    def held(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.model.state_dict().values()]


class Plain(Script):
    """A plain loop with a schedule of its epochs, which is neither prepared nor tracked."""

    def prepare(self) -> None:
        super().prepare()
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)

    def loop(self) -> Any:
        return range(EPOCHS)

    def end_epoch(self) -> None:
        self.scheduler.step()


class Averaged(Script):
    """AdamW with a prepared schedule of its iterations, and a tracked average of its weights."""

    def prepare(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = OneCycleLR(optimizer, max_lr=0.02, total_steps=EPOCHS * PER_EPOCH)
        self.model, self.optimizer, self.batches, self.scheduler = paceline.prepare(
            self.model, optimizer, self.loader, scheduler
        )
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        paceline.track(ema=self.ema)

    def train_on(self, x: torch.Tensor) -> None:
        super().train_on(x)
        self.scheduler.step()
        self.ema.update_parameters(self.model)

    def held(self) -> list[torch.Tensor]:
        rate = torch.tensor(self.scheduler.get_last_lr()[0])
        return [*super().held(), rate, *(each.clone() for each in self.ema.state_dict().values())]


class PlainAveraged(Averaged):
    """The same in a plain loop."""

    def loop(self) -> Any:
        return range(EPOCHS)


class Accumulating(Script):
    """A step for every second batch."""

    def train_on(self, x: torch.Tensor) -> None:
        self.loss(x).backward()
        if len(self.seen) % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Stopped(Script):
    """The loop is stopped in its first epoch. Another pass over the data follows, in no loop."""

    def train(self) -> None:
        super().train()
        for _, x in self.batches:
            self.train_on(x)

    def loop(self) -> Any:
        self.epochs = paceline.epochs(EPOCHS)
        return self.epochs

    def end_epoch(self) -> None:
        self.epochs.stop()


class Two(Script):
    """Two optimizers, each of which makes a step for each batch."""

    def prepare(self) -> None:
        parts = [*self.model]
        self.model, self.first, self.second, self.batches = paceline.prepare(
            self.model,
            torch.optim.SGD(nn.ModuleList(parts[:2]).parameters(), lr=0.01),
            torch.optim.Adam(parts[3].parameters()),
            self.loader,
        )

    def train_on(self, x: torch.Tensor) -> None:
        for optimizer in (self.first, self.second):
            optimizer.zero_grad()
            self.loss(x).backward()
            optimizer.step()


began: list[Script] = []

Run = tuple[list[Script], list[SimCut], dict[str, torch.Tensor]]


def run(
    make: type[Script],
    *,
    workers: int = 1,
    sync: str = "bsp",
    servers: int = 1,
    presence: dict[int, Presence] | None = None,
    **options: Any,
) -> Run:
    """Train a script in all workers. Return the scripts, the cuts and the final weights."""
    scripts: list[Script] = []

    def train() -> None:
        script = make()
        scripts.append(script)
        script.train()

    compute_s = [1.0 + 0.3 * worker for worker in range(workers)]
    cluster = Cluster(compute_s=compute_s, servers=servers, presence=presence or {})
    result = simulate(cluster, sync, train_fn=train, **options)
    assert result.state_dict is not None
    return scripts, result.cuts, result.state_dict


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


SCRIPTS: list[type[Script]] = [Script, Plain, Averaged, PlainAveraged, Accumulating, Two]
# Each script is cut in the second epoch, and some in the first and in the last one.
CUTS: list[Any] = [
    *((6.5, make) for make in SCRIPTS),
    *((0.5, make) for make in (Script, Two)),
    *((14.1, make) for make in (Averaged, Accumulating)),
]


@pytest.mark.parametrize(
    ("cut_at_s", "make"),
    [
        *CUTS,
        *thorough(*(cut for cut in product((0.5, 3.2, 5.5, 6.5, 11.5, 14.1), SCRIPTS) if cut not in CUTS)),
    ],
)
def test_a_resumed_script_computes_the_same_bits(cut_at_s: float, make: type[Script]) -> None:
    began.clear()
    [expected], _, _ = run(make)
    began.clear()
    [undisturbed], [cut], _ = run(make, cut_at_s=[cut_at_s])
    assert same(undisturbed.held(), expected.held())
    [resumed], _, _ = run(make, resumed=cut)
    done = len(expected.seen) - len(resumed.seen)
    assert resumed.seen == expected.seen[done:]
    assert 0 < done < len(expected.seen)
    assert same(resumed.held(), expected.held())


def test_three_workers_in_lockstep_go_on_with_the_same_batches() -> None:
    began.clear()
    expected, _, weights = run(Averaged, workers=3)
    began.clear()
    _, [cut], _ = run(Averaged, workers=3, cut_at_s=[4.5])
    resumed, _, after = run(Averaged, workers=3, resumed=cut)
    for one, other in zip(expected, resumed, strict=True):
        assert 0 < len(other.seen) < len(one.seen)
        assert other.seen == one.seen[-len(other.seen) :]
        for before, now in zip(one.held(), other.held(), strict=True):
            torch.testing.assert_close(now, before, rtol=1e-6, atol=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-6)


# In each kind of loop, each model once, and each change of the number of workers once.
GOING_ON: list[Any] = [
    (6.5, (1, 3), "asp", Averaged),
    (6.5, (3, 2), "ssp:staleness=2", Averaged),
    (6.5, (3, 3), "bsp", Averaged),
    (6.5, (1, 3), "ssp:staleness=2", PlainAveraged),
    (6.5, (3, 2), "bsp", PlainAveraged),
    (6.5, (3, 3), "asp", PlainAveraged),
]


@pytest.mark.parametrize(
    ("cut_at_s", "workers", "sync", "make"),
    [
        *GOING_ON,
        *thorough(
            *(
                case
                for case in product(
                    (2.5, 6.5, 11.5),
                    ((1, 3), (3, 2), (3, 3)),
                    ("bsp", "asp", "ssp:staleness=2"),
                    (Averaged, PlainAveraged),
                )
                if case not in GOING_ON
            )
        ),
    ],
)
def test_every_item_is_used_once_in_each_epoch_by_any_number_of_workers(
    cut_at_s: float, workers: tuple[int, int], sync: str, make: type[Script]
) -> None:
    began.clear()
    before, after = workers
    cut_at_s /= before
    scripts, [cut], _ = run(make, workers=before, sync=sync, cut_at_s=[cut_at_s])
    used = Counter[int]()
    for worker in cut.job.workers:
        for _, indices in scripts[worker.worker].seen[: worker.iteration + 1]:
            used.update(indices)
    resumed, _, _ = run(make, workers=after, sync=sync, resumed=cut)
    for script in resumed:
        for _, indices in script.seen:
            used.update(indices)
    assert used == Counter(dict.fromkeys(range(SIZE), EPOCHS))


def test_tracked_objects_come_from_the_main_worker_although_worker_0_has_returned() -> None:
    began.clear()
    presence = {0: Presence(lost_at_s=3.2, back_after_s=1.0)}
    _, [cut], _ = run(Averaged, workers=2, sync="asp", presence=presence, cut_at_s=[8.0])
    assert (cut.job.main, sorted(cut.workers)) == (1, [0, 1])
    resumed, _, _ = run(Averaged, workers=2, sync="asp", resumed=cut)
    for script in resumed:
        assert isinstance(script, Averaged)
        assert int(script.ema.n_averaged) > len(script.seen)


def test_a_loop_that_was_stopped_does_not_begin_again() -> None:
    began.clear()
    [undisturbed], [cut], _ = run(Stopped, cut_at_s=[8.5])
    assert len(undisturbed.seen) == PER_EPOCH
    assert cut.job.loop.stopped == (0,)
    [resumed], _, _ = run(Stopped, resumed=cut)
    assert resumed.seen == []


def test_dropped_samples_stay_dropped_when_a_run_goes_on() -> None:
    began.clear()
    sync = "drop-stragglers:quorum=2"
    _, [cut], _ = run(Script, workers=3, sync=sync, cut_at_s=[4.5])
    _, [again], _ = run(Script, workers=3, sync=sync, cut_at_s=[2.5], resumed=cut)
    before, after = cut.job.pushes, again.job.pushes
    assert 0 < before.dropped_samples <= BATCH * before.dropped
    assert before.dropped_samples < after.dropped_samples <= BATCH * after.dropped
    [loader] = again.job.loaders
    assert loader.used >= again.job.shards[0].samples + after.dropped_samples


class Grown(Script):
    """Trains a further layer, which it would have added in the epoch in progress."""

    def prepare(self) -> None:
        self.first: dict[str, torch.Tensor] = {}
        self.model.append(nn.Linear(1, 1))
        super().prepare()

    def train_on(self, x: torch.Tensor) -> None:
        self.loss(x)  # training begins
        self.first = self.first or {key: each.clone() for key, each in self.model.named_parameters()}
        super().train_on(x)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_script_may_have_parameters_that_the_cut_lacks(sync: str) -> None:
    began.clear()
    _, [cut], _ = run(Script, workers=2, sync=sync, servers=2, cut_at_s=[3.2])
    resumed, _, after = run(Grown, workers=2, sync=sync, servers=1, resumed=cut)
    first = [script.first for script in resumed if isinstance(script, Grown)]
    names = [parameter.names[0] for parameter in cut.job.model.layout.parameters]
    assert set(first[0]) - set(names) == {"4.weight", "4.bias"}
    bounds = cut.job.model.layout.slice_evenly(1)[0]
    trained = cut.weights(bounds)["float32"]
    for segment in bounds.segments:
        for each in first:
            value = each[names[segment.parameter]].flatten()
            assert torch.equal(value, trained[segment.start : segment.stop])
    assert after["4.weight"] != first[0]["4.weight"]


@pytest.mark.parametrize("servers", [(1, 2), (2, 1)], ids=str)
def test_another_number_of_servers_computes_the_same(servers: tuple[int, int]) -> None:
    def on(count: int, **options: Any) -> Run:
        scripts: list[Script] = []

        def train() -> None:
            scripts.append(script := Averaged())
            script.train()

        result = simulate(Cluster(compute_s=[1.0], servers=count), "bsp", train_fn=train, **options)
        assert result.state_dict is not None
        return scripts, result.cuts, result.state_dict

    began.clear()
    [expected], [cut], _ = on(servers[0], cut_at_s=[9.5])
    [resumed], _, _ = on(servers[1], resumed=cut)
    assert same(resumed.held(), expected.held())


class OwnCheckpoint(Averaged):
    """Saves a checkpoint at the end of each epoch, and begins with the last one. It may number its epochs."""

    saved: ClassVar[dict[str, Any]] = {}
    numbers = False

    def prepare(self) -> None:
        super().prepare()
        if self.saved:
            self.model.load_state_dict(self.saved["model"])
            self.optimizer.load_state_dict(self.saved["optimizer"])
            self.ema.load_state_dict(self.saved["ema"])
            self.scheduler.load_state_dict(self.saved["scheduler"])

    def loop(self) -> Any:
        for epoch in range(self.saved.get("epochs", 0), EPOCHS):
            if self.numbers:
                self.batches.set_epoch(epoch)  # type: ignore[attr-defined]
            yield epoch
            type(self).saved = {
                "model": {name: value.clone() for name, value in self.model.state_dict().items()},
                "optimizer": self.optimizer.state_dict(),
                "ema": {name: value.clone() for name, value in self.ema.state_dict().items()},
                "scheduler": self.scheduler.state_dict(),
                "epochs": epoch + 1,
            }


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("cut_at_s", [7.5, 14.1])
def test_the_job_wins_against_a_checkpoint_of_the_script(
    numbers: bool, cut_at_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OwnCheckpoint, "numbers", numbers)
    monkeypatch.setattr(OwnCheckpoint, "saved", {})
    began.clear()
    [expected], _, _ = run(OwnCheckpoint)
    monkeypatch.setattr(OwnCheckpoint, "saved", {})
    began.clear()
    _, [cut], _ = run(OwnCheckpoint, cut_at_s=[cut_at_s], until_s=cut_at_s + 2)
    assert OwnCheckpoint.saved["epochs"] == cut_at_s // PER_EPOCH
    caplog.clear()
    [resumed], _, _ = run(OwnCheckpoint, resumed=cut)
    assert resumed.seen == expected.seen[-len(resumed.seen) :]
    assert same(resumed.held(), expected.held())
    assert sum("What the script has loaded by itself is not used" in each for each in caplog.messages) == 1


def test_a_script_that_tracks_something_else_is_refused() -> None:
    class Other(Averaged):
        def prepare(self) -> None:
            super().prepare()
            paceline.track(other=self.ema)

    began.clear()
    _, [cut], _ = run(Averaged, cut_at_s=[3.2])
    with pytest.raises(
        RunFailedError, match=r"this run is resumed, and its script tracks 'other', but .* 'ema'"
    ):
        run(Other, resumed=cut)


class Tracked(Plain):
    """The same with a tracked schedule, in a loop of Paceline."""

    def prepare(self) -> None:
        super().prepare()
        paceline.track(scheduler=self.scheduler)
        self.rates: list[tuple[int, float]] = []

    def loop(self) -> Any:
        for epoch in paceline.epochs(EPOCHS):
            self.rates.append((epoch, self.optimizer.param_groups[0]["lr"]))
            yield epoch


def test_a_worker_that_joins_a_resumed_run_late_has_the_present_states_and_not_those_of_the_checkpoint() -> (
    None
):
    began.clear()
    _, [cut], _ = run(Tracked, sync="asp", cut_at_s=[3.2])
    late = {1: Presence(joins_at_s=5.0)}
    [first, second], _, _ = run(Tracked, workers=2, sync="asp", presence=late, resumed=cut)
    assert isinstance(first, Tracked)
    assert isinstance(second, Tracked)
    assert first.rates == [(0, 0.01), (1, 0.005), (2, 0.0025)]
    assert second.rates == first.rates[1:]


class Unsendable(StepLR):
    """A scheduler with a state that cannot be sent."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "function": print}


def test_what_cannot_be_sent_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Script):
        def prepare(self) -> None:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.model, self.optimizer, self.batches, _ = paceline.prepare(
                self.model, optimizer, self.loader, Unsendable(optimizer, 1)
            )

    began.clear()
    _, cuts, _ = run(Odd, cut_at_s=[3.2, 9.1])
    assert [len(cut.workers) for cut in cuts] == [1, 1]
    said = [each for each in caplog.messages if "does not contain the state of Unsendable" in each]
    assert len(said) == 1
    [resumed], _, _ = run(Odd, resumed=cuts[1])
    assert 0 < len(resumed.seen) < EPOCHS * PER_EPOCH
