"""`barrier`, `reduce` and `is_main`: calls that all workers make, and that end together."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.joint_batch import Collectives, combine
from paceline.core.messages import Combined, Contributed
from paceline.core.requests import Send
from paceline.errors import ProtocolError, RunFailedError, UsageError
from paceline.sim import Cluster, simulate
from paceline.sim.times import Presence
from paceline.sync.events import PushReceived
from paceline.trace.measures import measure
from paceline.train.session import current
from tests.support.live import await_that, run_program
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

MODELS = ["bsp", "asp", "ssp:staleness=1", "elastic-bsp:lookahead=3", "spec-sync"]


def contributed(*values: float, call: str = "reduce()", op: Any = "mean", weight: float = 1.0) -> Contributed:
    return Contributed(call, 1, op, array("d", values).tobytes(), weight)


def numbers_in(combined: Combined) -> list[float]:
    return array("d", combined.numbers).tolist()


class Trainer:
    """A model with one weight, which falls by 1 with each update."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.model = torch.nn.ParameterList([self.weight])
        self.optimizer = paceline.DistributedOptimizer(torch.optim.SGD([self.weight], lr=1.0))

    def step(self) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.weight.sum()
            loss.backward()
            return loss

        self.optimizer.step(closure)


# -- the core ---------------------------------------------------------------------------------------------


def test_a_call_ends_when_every_live_worker_has_made_it() -> None:
    calls = Collectives(lambda models: [])
    assert calls.contributed(2, contributed(1.0), {0, 1, 2}) == []
    assert calls.contributed(0, contributed(2.0), {0, 1, 2}) == []
    sent = calls.contributed(1, contributed(6.0), {0, 1, 2})
    assert [send.to.index for send in sent if isinstance(send, Send)] == [0, 1, 2]
    [combined] = {send.message for send in sent if isinstance(send, Send)}
    assert isinstance(combined, Combined)
    assert numbers_in(combined) == [3.0]
    assert not calls.waiting


def test_a_worker_that_leaves_is_not_waited_for_and_not_counted() -> None:
    calls = Collectives(lambda models: [])
    calls.contributed(0, contributed(2.0), {0, 1, 2})
    calls.contributed(1, contributed(40.0), {0, 1, 2})
    assert calls.left(1, {0, 2}) == []
    [send] = calls.left(2, {0})
    assert isinstance(send, Send)
    assert isinstance(send.message, Combined)
    assert (send.to.index, numbers_in(send.message)) == (0, [2.0])
    assert calls.left(0, set()) == []


def test_different_calls_are_refused_in_all_workers() -> None:
    calls = Collectives(lambda models: [])
    calls.contributed(0, contributed(call="barrier()", op="sum"), {0, 1})
    first, second = calls.contributed(1, contributed(1.0), {0, 1})
    assert isinstance(first, Send)
    assert isinstance(second, Send)
    assert first.message == second.message
    assert isinstance(first.message, Combined)
    assert first.message.refused.startswith("worker 0 called barrier(), but worker 1 called reduce().")


def test_a_part_of_a_number_is_a_violation_of_the_protocol_and_changes_nothing() -> None:
    calls = Collectives(lambda models: [])
    with pytest.raises(ProtocolError, match="3 bytes"):
        calls.contributed(0, Contributed("reduce()", 1, "sum", b"abc"), {0})
    assert not calls.waiting


@given(st.data())
def test_every_call_ends_once_for_the_live_workers_with_the_same_result(data: st.DataObject) -> None:
    """Workers call and leave in any order; a model of each worker says what must have arrived."""
    count = data.draw(st.integers(1, 4))
    calls, live = Collectives(lambda models: []), set(range(count))
    made = dict.fromkeys(range(count), 0)  # worker -> calls that it has made
    ended = dict.fromkeys(range(count), 0)  # worker -> calls that have ended for it
    results: dict[int, list[float]] = {}  # number of the call -> its result
    for _ in range(data.draw(st.integers(0, 25))):
        if not live:
            break
        worker = data.draw(st.sampled_from(sorted(live)))
        if made[worker] > ended[worker] or data.draw(st.integers(0, 4)) == 0:
            live.discard(worker)
            sent = calls.left(worker, live)
        else:
            made[worker] += 1
            number = 0.1 * worker + made[worker]
            sent = calls.contributed(worker, contributed(number, op="sum"), live)
        for send in sent:
            assert isinstance(send, Send)
            assert isinstance(send.message, Combined)
            ended[send.to.index] += 1
            result = results.setdefault(ended[send.to.index], numbers_in(send.message))
            assert numbers_in(send.message) == result
        if sent:
            assert [send.to.index for send in sent if isinstance(send, Send)] == sorted(live)
            call = ended[min(live)]
            total = 0.0
            for place, each in enumerate(sorted(live)):
                total = total + (0.1 * each + call) if place else 0.1 * each + call
            assert results[call] == [total]
        assert {worker for worker in live if made[worker] > ended[worker]} == set(calls.waiting)
        assert not live or live - set(calls.waiting)


# -- values -----------------------------------------------------------------------------------------------


def test_outside_a_run_a_value_is_its_own_mean() -> None:
    paceline.barrier()
    assert paceline.is_main()
    assert paceline.reduce(3) == 3.0
    assert paceline.reduce(3, "sum") == 3
    assert isinstance(paceline.reduce(3, "sum"), int)
    assert paceline.reduce(0.5, weight=7) == 0.5
    half = paceline.reduce(torch.tensor([[0.5, -1.0]], dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [[0.5, -1.0]]
    assert paceline.reduce(torch.tensor([1, 2]), "sum").tolist() == [1, 2]
    assert paceline.reduce(torch.tensor([1, 2])).dtype == torch.float32
    assert paceline.reduce(torch.tensor([True, False]), "sum").tolist() == [1, 0]
    assert list(paceline.reduce({"b": 1, "a": torch.ones(2)}, "sum")) == ["b", "a"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("high",), {}, "reduce.. got 'high', expected a number"),
        (({"loss": [1]},), {}, "under the key 'loss'"),
        (({1: 1.0},), {}, "expected strings"),
        ((torch.zeros(1, dtype=torch.complex64),), {}, "expected a number, a tensor"),
        ((1.0, "max"), {}, 'op=\'max\', expected "mean" or "sum"'),
        ((1.0, "sum"), {"weight": 2}, "no weight for a sum"),
        ((1.0,), {"weight": -1}, "weight=-1, expected a number >= 0"),
        ((torch.zeros(131_073),), {}, "got 131073 numbers, expected at most 131072"),
    ],
)
def test_what_cannot_be_reduced_is_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        paceline.reduce(*arguments, **options)


def test_a_worker_with_weight_0_does_not_count_even_if_its_value_is_not_a_number() -> None:
    combined = combine({0: contributed(0.5, weight=4.0), 1: contributed(float("nan"), weight=0.0)})
    assert numbers_in(combined) == [0.5]


# -- in a live run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_all_workers_receive_the_same_result(transport: str, run_on_threads: RunOnThreads) -> None:
    def train() -> object:
        worker = paceline.worker_index()
        before = paceline.reduce(worker + 1, "sum")  # training has not begun
        trainer = Trainer()
        trainer.step()
        paceline.barrier()
        metrics = {"loss": float(worker), "counts": torch.tensor([worker, 1])}
        large = paceline.reduce(torch.full((131_072,), float(worker)))
        trainer.step()
        return (
            before,
            paceline.reduce(metrics, "sum"),
            paceline.reduce(float(worker), weight=worker),
            large.mean(),
        )

    results: dict[int, Any] = run_on_threads(train, workers=3, transport=transport).results
    assert set(results) == {0, 1, 2}
    for before, metrics, weighted, large in results.values():
        assert before == 6
        assert metrics["loss"] == 3.0
        assert metrics["counts"].tolist() == [3, 3]
        assert weighted == 5 / 3
        assert large == 1.0


@pytest.mark.parametrize("model", ["ssp:staleness=1", *thorough("asp", "elastic-bsp:lookahead=3")])
def test_a_worker_in_a_barrier_does_not_hold_back_the_others(
    model: str, run_on_threads: RunOnThreads
) -> None:
    def train() -> None:
        trainer = Trainer()
        for _ in range(2 + 8 * paceline.worker_index()):
            trainer.step()
        paceline.barrier()
        trainer.step()

    run = run_on_threads(train, sync=model, hyperparameters="raw")
    events = [entry.event for entry in run.shards[0].entries]
    pushed = [event for event in events if isinstance(event, PushReceived)]
    assert sum(not event.empty for event in pushed) == 14
    assert measure(run.shards).dropped_pushes == sum(event.empty for event in pushed)
    # At a barrier of ElasticBSP, the mean of two gradients is one update.
    assert -int(run.state_dict["0"]) in ({14} if "elastic" not in model else {12, 13, 14})


def test_a_finished_worker_is_not_waited_for(run_on_threads: RunOnThreads) -> None:
    def train() -> object:
        trainer = Trainer()
        trainer.step()
        return paceline.reduce(5.0) if paceline.worker_index() else None

    assert run_on_threads(train).results == {0: None, 1: 5.0}


def test_a_lost_worker_is_not_waited_for(run_on_threads: RunOnThreads) -> None:
    def train() -> object:
        trainer = Trainer()
        trainer.step()
        if paceline.worker_index() == 1:
            raise KeyError("lost")
        return paceline.reduce(5.0)

    run = run_on_threads(train, workers=3, keep_errors=True)
    assert run.results == {0: 5.0, 2: 5.0}
    assert set(run.errors) == {1}


def test_the_workers_are_told_that_their_calls_differ(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        if paceline.is_main():
            paceline.barrier()
        else:
            paceline.reduce({"loss": 1.0})

    errors = run_on_threads(train, keep_errors=True).errors
    for worker in (0, 1):
        assert str(errors[worker]).startswith(
            "The workers' calls differ: worker 0 called barrier(), but worker 1 called reduce(op='mean') of 'loss': "
            "a number. All workers must make the same calls"
        )


def test_a_barrier_inside_an_edit_is_refused(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        trainer = Trainer()
        trainer.step()
        inside = pytest.raises(UsageError, match=r"barrier\(\) was called inside `with optimizer.editing")
        with inside, trainer.optimizer.editing():
            paceline.barrier()

    run_on_threads(train, workers=1)


SCRIPT = """
import paceline, torch

{before}
model = torch.nn.Linear(2, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    {inside}
"""
ONLY_IN_WORKER_0 = "paceline.is_main() and paceline.barrier()"


@pytest.mark.parametrize(
    ("place", "waits"),
    [
        ("inside", "worker 1, after its iteration 1, waits at shard 0 (bsp) for"),
        *thorough(("before", "worker 1, which is about to train, waits for the models of the other workers")),
    ],
)
def test_a_barrier_that_waits_for_a_worker_that_waits_is_named(
    place: str, waits: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**{"before": "", "inside": "", place: ONLY_IN_WORKER_0}))
    options = ["--workers", "2", "--servers", "1", "--run-dir", str(tmp_path / "run")]
    ended = run_program("-m", "paceline", "run", *options, str(script))
    assert ended.returncode == 1
    assert "worker 0 waits in barrier 1 for the other workers" in ended.stderr
    assert waits in ended.stderr
    assert "Let all workers make the same calls, after the same number of iterations." in ended.stderr


# -- in virtual time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", MODELS)
def test_a_simulated_worker_waits_in_virtual_time(sync: str) -> None:
    results: dict[int, list[float]] = {0: [], 1: []}

    def train() -> None:
        worker = paceline.worker_index()
        paceline.barrier()
        trainer = Trainer()
        for step in range(6):
            trainer.step()
            if step % 2:
                results[worker].append(paceline.reduce(10.0 * worker + step))

    result = simulate(Cluster(compute_s=[1.0, 3.0]), sync, train_fn=train)
    assert results == {0: [6.0, 8.0, 10.0], 1: [6.0, 8.0, 10.0]}
    assert result.time_s >= 18.0


@pytest.mark.parametrize("sync", ["asp", "ssp:staleness=1", "elastic-bsp:lookahead=3", "spec-sync"])
def test_a_simulated_worker_in_a_barrier_does_not_hold_back_the_others(sync: str) -> None:
    seen = []

    def train() -> None:
        trainer = Trainer()
        for _ in range(2 + 8 * paceline.worker_index()):
            trainer.step()
        paceline.barrier()
        trainer.step()
        seen.append(paceline.worker_index())

    simulate(Cluster(compute_s=[1.0, 1.0]), sync, train_fn=train)
    assert sorted(seen) == [0, 1]


def late(time_s: float, snapshot: object) -> bool:
    """End a run that would never end."""
    return time_s > 1000.0


SNAPSHOTS: dict[str, Any] = {"snapshot_every_s": 50.0, "on_snapshot": late}


@pytest.mark.parametrize(
    ("presence", "options"),
    [({}, SNAPSHOTS), ({1: Presence(lost_at_s=1000.0)}, {}), ({1: Presence(lost_at_s=1000.0)}, SNAPSHOTS)],
    ids=["snapshots", "a loss", "both"],
)
def test_a_simulated_worker_in_a_barrier_does_not_wait_for_what_happens_later(
    presence: dict[int, Presence], options: dict[str, Any]
) -> None:
    seen = []

    def train() -> None:
        trainer = Trainer()
        for _ in range(2 + 8 * paceline.worker_index()):
            trainer.step()
        paceline.barrier()
        trainer.step()
        seen.append(paceline.worker_index())

    cluster = Cluster(compute_s=[1.0, 1.0], presence=presence)
    result = simulate(cluster, "ssp:staleness=1", train_fn=train, **options)
    assert sorted(seen) == [0, 1]
    assert max(result.finished_s) < 30.0


def step_barrier_step() -> None:
    """Wait in a barrier that only worker 0 enters."""
    trainer = Trainer()
    trainer.step()
    if paceline.is_main():
        paceline.barrier()
    trainer.step()


@pytest.mark.parametrize("options", [{}, SNAPSHOTS], ids=["nothing else", "snapshots"])
def test_a_simulated_barrier_at_different_iterations_of_bsp_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(RunFailedError) as caught:
        simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=step_barrier_step, **options)
    assert "worker 0 waits in barrier 1 for the other workers" in str(caught.value)
    assert "worker 1, after its iteration 1, waits at shard 0 (bsp) for" in str(caught.value)


def test_a_simulated_barrier_that_a_later_loss_ends_is_no_standstill() -> None:
    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(lost_at_s=100.0)})
    result = simulate(cluster, "bsp", train_fn=step_barrier_step, **SNAPSHOTS)
    assert result.finished_s[0] > 100.0


def test_in_lockstep_workers_may_call_after_different_iterations_if_they_were_not_in_lockstep_before() -> (
    None
):
    """Under asp, the workers have made different numbers of iterations when bsp takes effect."""

    def train() -> None:
        trainer = Trainer()
        for sync in ("asp", "bsp"):
            paceline.set_sync(sync)
            for _ in range(4):
                trainer.step()
        paceline.barrier()
        trainer.step()

    result = simulate(Cluster(compute_s=[1.0, 1.5, 2.7]), "bsp", train_fn=train)
    assert result.measures.gradients == 3 * 9


def test_a_simulated_barrier_before_the_first_step_of_the_others_is_named() -> None:
    def train() -> None:
        if paceline.is_main():
            paceline.barrier()
        Trainer().step()

    with pytest.raises(RunFailedError, match="worker 0 waits in barrier 1 for the other workers"):
        simulate(Cluster(compute_s=[1.0, 1.0]), "bsp", train_fn=train)


def test_a_simulated_worker_that_is_lost_releases_the_others() -> None:
    results = []

    def train() -> None:
        trainer = Trainer()
        trainer.step()
        if paceline.worker_index() == 1:
            for _ in range(100):
                trainer.step()
        results.append(paceline.reduce(float(paceline.worker_index())))

    cluster = Cluster(compute_s=[1.0, 1.0], presence={1: Presence(lost_at_s=7.5)})
    simulate(cluster, "asp", train_fn=train)
    assert results == [0.0]


def test_in_lockstep_a_worker_that_has_evaluated_makes_its_last_steps_while_the_other_waits(
    run_on_threads: RunOnThreads,
) -> None:
    """During the evaluation, worker 0 pushes without gradients, so it still has steps left afterwards."""

    def work() -> float:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=1)
        model, distributed, part = paceline.prepare(model, optimizer, loader)
        for number, (batch,) in enumerate(part):
            distributed.zero_grad()
            model(batch).mean().backward()
            distributed.step()
            if number == 2 and paceline.worker_index() == 0:
                with paceline.evaluating(model):
                    evaluate_for(2)
        paceline.barrier()
        return paceline.reduce(1.0, op="sum")

    def evaluate_for(iterations: int) -> None:
        session = current()
        assert session is not None
        begun = session.core.iteration
        await_that(lambda: session.core.iteration > begun + iterations, "worker 1 has gone on")

    assert run_on_threads(work, workers=2, sync="bsp").results == {0: 2.0, 1: 2.0}
