"""`evaluating`: one worker evaluates the model, and the others go on training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import sync
from paceline.errors import PeerLostError, RunFailedError, UsageError, WeightsChangedError
from paceline.run.worker import Repeating, WorkerSession
from paceline.sim import Cluster, simulate
from paceline.sync.events import PushReceived
from paceline.trace.measures import measure
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

PATIENCE_S = 60.0  # a safety net: nothing here waits that long unless something hangs


class Trainer:
    """One worker's model, whose only weight falls by 1 with each update: the gradient is 1 in every worker."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout())
        nn.init.zeros_(self.layer.weight)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = paceline.DistributedOptimizer(optimizer, model=self.model)

    @property
    def layer(self) -> nn.Linear:
        layer = self.model[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def step(self) -> None:
        # Without a closure, a worker that starts late would discard its first gradient.
        self.optimizer.step(self._gradient)

    def _gradient(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).mean()
        loss.backward()
        return loss

    @property
    def updates(self) -> int:
        return updates_in(self.model)


def updates_in(model: nn.Module) -> int:
    """The number of updates that the weights of a `Trainer` include."""
    return -int(next(model.parameters()).item())


def updates_of(state_dict: dict[str, torch.Tensor]) -> int:
    return -int(state_dict["0.weight"].item())


def await_event(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "the other worker is stopped"


# -- outside a run ----------------------------------------------------------------------------------------


def test_outside_a_run_the_copy_has_the_weights_of_the_model_and_does_not_follow_it() -> None:
    trainer = Trainer()
    trainer.step()
    with paceline.evaluating(trainer.model) as snapshot:
        assert not any(module.training for module in snapshot.modules())
        trainer.step()
        assert (updates_in(snapshot), trainer.updates) == (1, 2)
    assert trainer.model.training


# -- in a live run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "transport"),
    [
        ("bsp", "shm"),
        ("ssp:staleness=1", "unix"),
        ("elastic-bsp:lookahead=3", "shm"),
        ("drop-stragglers:quorum=2", "unix"),
        *thorough(
            ("bsp", "unix"),
            ("ssp:staleness=1", "shm"),
            ("elastic-bsp:lookahead=3", "unix"),
            ("drop-stragglers:quorum=2", "shm"),
        ),
    ],
)
def test_the_others_go_on_while_a_worker_evaluates(
    model: str, transport: str, run_on_threads: RunOnThreads
) -> None:
    """Worker 0 does not end its evaluation before worker 1 has made 20 more steps."""
    begun, gone_on = threading.Event(), threading.Event()

    def train() -> None:
        trainer = Trainer()
        trainer.step()
        if paceline.worker_index() == 0:
            with paceline.evaluating(trainer.model) as snapshot:
                before = updates_in(snapshot)
                begun.set()
                await_event(gone_on)
                assert updates_in(snapshot) == before
            assert trainer.updates >= before + 20
            trainer.step()
        else:
            while not begun.is_set():
                trainer.step()
            for _ in range(20):
                trainer.step()
            gone_on.set()
            trainer.step()

    run = run_on_threads(train, workers=2, servers=2, sync=model, transport=transport, hyperparameters="raw")
    assert updates_of(run.state_dict) == run.shards[0].entries[-1].version
    assert run.time_use[0].outside_s > 0.0 == run.time_use[1].wasted_s


def test_pushes_without_a_gradient_are_not_averaged(run_on_threads: RunOnThreads) -> None:
    """Under bsp, each round lowers the weight by exactly 1, also if only one worker has pushed a gradient for it."""
    gone_on = threading.Event()

    def train() -> int:
        trainer = Trainer()
        trainer.step()
        if paceline.worker_index() == 0:
            with paceline.evaluating(trainer.model) as snapshot:
                assert updates_in(snapshot) == 1
                await_event(gone_on)
        else:
            for _ in range(20):
                trainer.step()
            assert trainer.updates == 21
            gone_on.set()
        return trainer.updates

    results = run_on_threads(train, workers=2, sync="bsp").results
    assert results == {0: 21, 1: 21}


def test_the_snapshot_has_the_weights_of_the_job(run_on_threads: RunOnThreads) -> None:
    """Under asp, a worker that has made one step sees the updates of the other worker in the snapshot."""
    trained = threading.Event()
    evaluated = threading.Event()

    def train() -> None:
        trainer = Trainer()
        trainer.step()
        if paceline.worker_index() == 0:
            await_event(trained)
            with paceline.evaluating(trainer.model) as snapshot:
                assert updates_in(snapshot) == 22
                assert trainer.updates == 22
                evaluated.set()
        else:
            for _ in range(20):
                trainer.step()
            trained.set()
            await_event(evaluated)

    run = run_on_threads(train, workers=2, sync="asp", hyperparameters="raw")
    # Under asp, no worker waits for another one, so there are no pushes without a gradient.
    assert sum(isinstance(entry.event, PushReceived) for entry in run.shards[0].entries) == 22


def test_a_change_of_the_sync_model_does_not_wait_for_the_evaluation(run_on_threads: RunOnThreads) -> None:
    begun, gone_on = threading.Event(), threading.Event()

    def train() -> None:
        trainer = Trainer()
        trainer.step()
        if paceline.worker_index() == 0:
            with paceline.evaluating(trainer.model):
                begun.set()
                await_event(gone_on)
        else:
            await_event(begun)
            paceline.set_sync("bsp")
            for _ in range(20):
                trainer.step()
            gone_on.set()

    run_on_threads(train, workers=2, sync="asp")


def test_evaluating_does_not_count_as_a_restart(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        trainer = Trainer()
        for _ in range(3):
            trainer.step()
            with paceline.evaluating(trainer.model):
                pass

    run = run_on_threads(train, workers=2, sync="asp")
    assert measure(run.shards).restarts == 0


def test_data_that_was_drawn_before_the_evaluation_belongs_to_the_next_step(
    run_on_threads: RunOnThreads,
) -> None:
    gone_on = threading.Event()
    loader = DataLoader(TensorDataset(torch.ones(400, 1)), batch_size=4)

    def train() -> None:
        trainer = Trainer()
        for index, _ in enumerate(paceline.distribute(loader)):
            if index == 3 and paceline.worker_index() == 0:
                with paceline.evaluating(trainer.model):
                    await_event(gone_on)
            trainer.step()
            if index == 5 and paceline.worker_index() == 1:
                gone_on.set()

    run = run_on_threads(train, workers=2, sync="ssp:staleness=1")
    pushes = [entry.event for entry in run.shards[0].entries if isinstance(entry.event, PushReceived)]
    assert sum(push.samples or 0 for push in pushes) == 400
    assert all((push.samples is None) == push.empty for push in pushes)


def fail_in(model: nn.Module, when: Callable[[], None]) -> None:
    with paceline.evaluating(model):
        when()
        raise ZeroDivisionError


@pytest.mark.parametrize("sync_model", ["asp", "ssp:staleness=1"])
def test_a_body_that_raises_ends_the_evaluation(sync_model: str, run_on_threads: RunOnThreads) -> None:
    gone_on = threading.Event()

    def train() -> None:
        trainer = Trainer()
        trainer.step()
        if paceline.worker_index() == 0:
            with pytest.raises(ZeroDivisionError):
                fail_in(trainer.model, lambda: await_event(gone_on))
        for _ in range(5):
            trainer.step()
        gone_on.set()

    run = run_on_threads(train, workers=2, sync=sync_model, hyperparameters="raw")
    assert updates_of(run.state_dict) == 12
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("paceline worker")]


def test_a_lost_coordinator_is_an_error_at_the_end(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(session: WorkerSession) -> None:
        failed.set()
        raise PeerLostError("the coordinator is gone")

    monkeypatch.setattr(WorkerSession, "_stand_in", fail)

    def train() -> str:
        trainer = Trainer()
        trainer.step()
        with (
            pytest.raises(PeerLostError, match="the coordinator is gone"),
            paceline.evaluating(trainer.model),
        ):
            await_event(failed)
        trainer.step()
        return "done"

    assert run_on_threads(train, workers=1, sync="bsp").results == {0: "done"}


def test_an_emulated_slow_machine_pushes_at_its_own_pace(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals_s: list[float] = []
    begin = Repeating.__init__

    def record(self: Repeating, function: Callable[[], None], interval_s: float, name: str) -> None:
        intervals_s.append(interval_s)
        begin(self, function, interval_s, name)

    monkeypatch.setattr(Repeating, "__init__", record)

    def train() -> None:
        trainer = Trainer()
        for _ in range(3):
            trainer.step()
        with paceline.evaluating(trainer.model):
            pass

    run_on_threads(train, workers=1, sync="bsp", pace=[0.05])
    assert intervals_s[0] >= 0.04


@pytest.mark.parametrize("call", ["step", "evaluating"])
def test_training_and_a_second_evaluation_are_refused(call: str, run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        trainer = Trainer()
        trainer.step()
        use: Callable[[], object] = trainer.step
        if call == "evaluating":
            use = paceline.evaluating(trainer.model).__enter__
        expected = rf"{call}\(\) was called inside `with paceline.evaluating"
        with paceline.evaluating(trainer.model), pytest.raises(UsageError, match=expected):
            use()
        trainer.step()

    run_on_threads(train, workers=2, sync="asp")


def test_edited_weights_are_refused(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        trainer = Trainer()
        trainer.step()
        with torch.no_grad():
            trainer.layer.weight.add_(1.0)
        with pytest.raises(WeightsChangedError):
            paceline.evaluating(trainer.model).__enter__()

    run_on_threads(train, workers=1, sync="bsp")


def test_before_the_first_step_the_copy_has_the_local_weights(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        trainer = Trainer()
        nn.init.constant_(trainer.layer.weight, -5.0)
        with paceline.evaluating(trainer.model) as snapshot:
            assert updates_in(snapshot) == 5
        trainer.step()

    run_on_threads(train, workers=2, sync="bsp")


# -- in virtual time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["bsp", "asp", "elastic-bsp:lookahead=3", "spec-sync"])
def test_in_virtual_time_evaluation_takes_no_time(model: str) -> None:
    ends_s: dict[bool, float] = {}
    seen: list[tuple[int, int]] = []

    def train() -> None:
        trainer = Trainer()
        for _ in range(10):
            trainer.step()
            if evaluates and paceline.worker_index() == 0:
                with paceline.evaluating(trainer.model) as snapshot:
                    seen.append((updates_in(snapshot), trainer.updates))

    for evaluates in (False, True):
        result = simulate(Cluster(compute_s=[1.0, 3.0]), model, train_fn=train)
        ends_s[evaluates] = result.time_s
        assert result.measures.iterations == {0: 10, 1: 10}
    assert ends_s[True] == ends_s[False]
    assert len(seen) == 10
    assert all(copied == own for copied, own in seen)


def test_in_virtual_time_training_inside_is_refused() -> None:
    def train() -> None:
        trainer = Trainer()
        trainer.step()
        with paceline.evaluating(trainer.model):
            trainer.step()

    with pytest.raises(RunFailedError, match=r"step\(\) was called inside"):
        simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=train)


# -- the sync models --------------------------------------------------------------------------------------


def test_models_under_which_no_worker_waits_for_another() -> None:
    independent = {"asp", "naive-waiting:delay_s=1", "spec-sync"}
    others = {
        "bsp",
        "ssp",
        "dssp",
        "dsps",
        "pssp",
        "elastic-bsp",
        "drop-stragglers:quorum=2",
        "spec-sync:base=ssp",
    }
    assert {name for name in independent | others if sync.parse(name).independent} == independent


def test_only_a_module_can_be_evaluated() -> None:
    number: Any = 3
    with pytest.raises(UsageError, match=r"evaluating\(\) got 3, expected a torch.nn.Module"):
        paceline.evaluating(number).__enter__()
